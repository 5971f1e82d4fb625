"""Talk to a running Drystone over its socket: for the command line and for Python."""

from __future__ import annotations

import http.client
import json
import os
import socket
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from drystone.errors import (
    DrystoneError,
    InvalidSpec,
    NothingFits,
    RequestError,
)
from drystone.run.agent.socket_path import short_path

FOLDER_VARIABLE: Final = "DRYSTONE_FOLDER"
_SOCKET_NAME: Final = "drystone.sock"


class NotRunning(DrystoneError):
    """Nobody answers."""


def default_folder() -> Path:
    """Where a running system keeps its log, its jobs and its socket."""
    named = os.environ.get(FOLDER_VARIABLE)
    return Path(named) if named else Path.home() / ".drystone"


class _Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        """To the file instead of to a host."""
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.settimeout(self.timeout)
        try:
            with short_path(self._path) as name:
                made.connect(name)
        except OSError:
            made.close()
            raise
        self.sock = made


class Client:
    """Requests, one at a time."""

    def __init__(self, folder: Path | None = None, *, timeout_seconds: float = 60.0) -> None:
        self.folder = folder or default_folder()
        self._timeout_seconds = timeout_seconds
        self._connection: _Connection | None = None

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        """Ask."""
        given = {name: value for name, value in query.items() if value not in (None, "", [])}
        text = urlencode(given, doseq=True)
        return self._request("GET", f"{path}?{text}" if text else path, None)

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Order."""
        return self._request("POST", path, body)

    def close(self) -> None:
        """Let go of the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        if self._connection is None:
            self._connection = _Connection(self.folder / _SOCKET_NAME, self._timeout_seconds)
        headers = {"Content-Type": "application/json"} if body is not None else {}
        text = json.dumps(body) if body is not None else None
        try:
            self._connection.request(method, path, body=text, headers=headers)
            answer = self._connection.getresponse()
            table = json.loads(answer.read())
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise NotRunning(
                f"no Drystone answers in {self.folder}: {error}",
                hint="Start one with `drystone serve`, or name its folder with --folder",
            ) from None
        except ValueError as error:
            self.close()
            raise DrystoneError(f"the answer is no JSON: {error}") from None
        if answer.status >= 400:
            raise _error_of(answer.status, table.get("error") or {})
        found: dict[str, Any] = table
        return found


def _error_of(status: int, error: dict[str, Any]) -> DrystoneError:
    kinds: dict[int, type[DrystoneError]] = {
        404: RequestError, 409: RequestError, 422: InvalidSpec, 507: NothingFits,
    }  # fmt: skip
    made = kinds.get(status, DrystoneError)
    message = str(error.get("message") or f"the request failed with status {status}")
    return made(message, where=str(error.get("where", "")), hint=str(error.get("hint", "")))
