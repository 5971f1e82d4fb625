// Shows the description of this service. Swagger UI 5.34.1 (npm package swagger-ui-dist, Apache-2.0).
SwaggerUIBundle({ url: "/openapi.json", dom_id: "#swagger-ui", deepLinking: true });
