"""The reference pages of the service: REST from its OpenAPI document, metrics from its answer."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from reference_fields import NOTE, code, table


def _with_service(use: Callable[[Any, Any], list[str]]) -> list[str]:
    """What `use` makes of a service over an empty log, and of its app."""
    from drystone.describe.files.cluster import parse_cluster
    from drystone.run.control.access import make_team, make_token
    from drystone.run.control.controller import Controller, ControllerSettings
    from drystone.service.app import make_app

    cluster = parse_cluster("nodes: [{gpu: T4, emulate: {}}]")
    with tempfile.TemporaryDirectory() as folder:
        settings = ControllerSettings(folder=Path(folder), cluster=cluster, clock=lambda: 0.0)
        controller = Controller(settings)
        try:
            note, _ = make_token(name="reader", role="admin", team="", now_seconds=0.0)
            team = make_team(
                "nlp", quota=None, budget_dollars=None, budget_period="month", now_seconds=0.0
            )
            controller.journal.commit([note, team])
            return use(controller, make_app(controller))
        finally:
            controller.close()


def rest_page() -> Iterator[str]:
    """Requests and shapes, from the OpenAPI document."""
    document = {}
    _with_service(lambda _, app: document.update(app.openapi()) or [])
    yield from ("# REST", "", NOTE, "")
    yield "From the OpenAPI document that a service answers at `/openapi.json`;"
    yield "[what it means](../api.md)."
    yield ""
    yield from ("## Requests", "")
    yield from table(
        ["request", "", "takes", "answers"],
        [
            _request_row(f"{method.upper()} {path}", one)
            for path, methods in document["paths"].items()
            for method, one in methods.items()
        ],
    )
    yield from ("## Shapes", "")
    for name, schema in sorted(document["components"]["schemas"].items()):
        yield from (f"### {name}", "", schema.get("description", "").partition("\n")[0], "")
        needed = schema.get("required", ())
        yield from table(
            ["key", "type", "needed"],
            [
                [code(key), _schema_type(one), "yes" if key in needed else ""]
                for key, one in schema.get("properties", {}).items()
            ],
        )


def _request_row(request: str, operation: Mapping[str, Any]) -> list[str]:
    told = operation.get("description") or operation.get("summary", "")
    answers = [
        f"{status} {_content(answer.get('content', {}))}".strip()
        for status, answer in operation["responses"].items()
        if status.startswith("2")
    ]
    body = _content(operation.get("requestBody", {}).get("content", {}))
    takes = [code(given["name"]) for given in operation.get("parameters", ())]
    open_to_all = "" if operation.get("security") else " No token is needed."
    return [
        code(request),
        told.partition("\n")[0] + open_to_all,
        ", ".join([*takes, body] if body else takes),
        "; ".join(answers),
    ]


def _content(content: Mapping[str, Any]) -> str:
    return ", ".join(
        _schema_type(one.get("schema", {})) if kind == "application/json" else code(kind)
        for kind, one in content.items()
    )


def _schema_type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[-1]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_schema_type, schema["anyOf"])))
    if "enum" in schema:
        return ", ".join(code(str(one)) for one in schema["enum"])
    if "const" in schema:
        return code(str(schema["const"]))
    kind = schema.get("type", "anything")
    if kind == "array":
        if "prefixItems" in schema:
            return "[" + ", ".join(map(_schema_type, schema["prefixItems"])) + "]"
        return f"list of {_schema_type(schema.get('items', {}))}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        return f"table of {_schema_type(schema['additionalProperties'])}"
    words = {"object": "table", "string": "text", "integer": "whole number", "boolean": "boolean"}
    return words.get(kind, kind)


def metrics_page() -> list[str]:
    """What `/metrics` tells Prometheus."""
    return [
        "# Metrics", "", NOTE, "",
        "What `GET /metrics` of a service answers, in the text format of Prometheus"
        " (`service/prometheus.py`).", "",
        *_with_service(lambda controller, _: _metric_table(controller)),
    ]  # fmt: skip


def _metric_table(controller: Any) -> list[str]:
    from drystone.service.prometheus import Metrics

    metrics = Metrics()
    metrics.observe("GET", "/v1/jobs", 200, 0.01)
    text = metrics.render(controller)
    rows = []
    for name, told in re.findall(r"^# HELP (\S+) (.*)$", text, re.MULTILINE):
        found = re.search(rf"^# TYPE {name} (\w+)$", text, re.MULTILINE)
        samples = re.findall(rf"^{name}(?:_bucket)?{{([^}}]*)}}", text, re.MULTILINE)
        labels = dict.fromkeys(re.findall(r'(\w+)="', " ".join(samples)))
        rows.append([code(name), found[1] if found else "", ", ".join(map(code, labels)), told])
    return table(["name", "kind", "labels", ""], rows)
