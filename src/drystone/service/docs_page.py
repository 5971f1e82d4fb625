"""The API's own page at `/docs`: Swagger UI from files that come with the package, no network."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Final

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, Response

_FOLDER: Final = Path(__file__).parent / "swagger"
_KINDS: Final = {
    "swagger-ui.css": "text/css",
    "swagger-ui-bundle.js": "text/javascript",
    "start.js": "text/javascript",
    "LICENSE": "text/plain",
    "NOTICE": "text/plain",
}
_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Drystone: the API</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="stylesheet" href="/docs/swagger-ui.css"></head>
<body><div id="swagger-ui"></div>
<script src="/docs/swagger-ui-bundle.js"></script><script src="/docs/start.js"></script>
</body></html>
"""


def add_docs(app: FastAPI) -> None:
    """`/docs` and its files."""

    @app.get("/docs", include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse(_PAGE)

    @app.get("/docs/{name}", include_in_schema=False)
    def file(name: str) -> Response:
        if name not in _KINDS:
            return Response("there is no such file", status_code=404)
        return Response(_read(name), media_type=_KINDS[name])


@lru_cache(maxsize=len(_KINDS))
def _read(name: str) -> bytes:
    return (_FOLDER / name).read_bytes()
