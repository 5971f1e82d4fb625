"""Talk to a running Drystone, over its socket or over the network: for commands and for Python.

Importing this is quick: a command that shows a list spends more on imports than on anything else.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from drystone.errors import (
    DrystoneError,
    InvalidSpec,
    NothingFits,
    RequestError,
    reason_of,
)
from drystone.run.engines.agent.network import short_path

if TYPE_CHECKING:
    import http.client

FOLDER_VARIABLE: Final = "DRYSTONE_FOLDER"
URL_VARIABLE: Final = "DRYSTONE_URL"
TOKEN_VARIABLE: Final = "DRYSTONE_TOKEN"
_SOCKET_NAME: Final = "drystone.sock"
_LOGIN_NAME: Final = "login.json"


class NotRunning(DrystoneError):
    """Nobody answers."""


def default_folder() -> Path:
    """Where a running system keeps its log, its jobs and its socket."""
    named = os.environ.get(FOLDER_VARIABLE)
    return Path(named) if named else Path.home() / ".drystone"


def login_path() -> Path:
    """Where `drystone login` keeps the address and the token of a service."""
    home = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(home) / "drystone" / _LOGIN_NAME


def save_login(url: str, token: str) -> Path:
    """Keep where to talk to and as whom; only this user may read it."""
    path = login_path()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.part")
    handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump({"url": url, "token": token}, file)
    scratch.replace(path)
    return path


def load_login() -> tuple[str, str] | None:
    """The address and the token to use when no folder is named; None: the socket of this machine.

    `DRYSTONE_URL` and `DRYSTONE_TOKEN` come first, then `DRYSTONE_FOLDER`, then `drystone login`.
    """
    url = os.environ.get(URL_VARIABLE)
    if url:
        return url, os.environ.get(TOKEN_VARIABLE, "")
    if os.environ.get(FOLDER_VARIABLE):
        return None
    try:
        table = json.loads(login_path().read_text(encoding="utf-8"))
        return str(table["url"]), str(table["token"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        raise InvalidSpec(
            "cannot be read", where=str(login_path()), hint="`drystone login` writes it anew"
        ) from None


class Client:
    """Requests, one at a time: to the socket in a folder, or to an address with a token."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        url: str = "",
        token: str = "",
        timeout_seconds: float = 60.0,
    ) -> None:
        self.folder = folder or default_folder()
        if folder is None and not url:
            url, token = load_login() or ("", "")
        self.url, self._token = url.rstrip("/"), token
        self._timeout_seconds = timeout_seconds
        self._connection: http.client.HTTPConnection | None = None

    @property
    def is_remote(self) -> bool:
        """Whether paths of this machine may mean nothing there."""
        return bool(self.url)

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        """Send a GET request."""
        return self._request("GET", path + _query(query))

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send a POST request."""
        return self._request("POST", path, body)

    def patch(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a PATCH request."""
        return self._request("PATCH", path, body)

    def delete(self, path: str) -> dict[str, Any]:
        """Send a DELETE request."""
        return self._request("DELETE", path)

    def upload(self, bundle: str, name: str, path: Path) -> dict[str, Any]:
        """Send a file that a job needs."""
        with path.open("rb") as file:
            return self._request(
                "POST",
                "/v1/files" + _query({"bundle": bundle, "name": name}),
                raw=file,
                num_bytes=path.stat().st_size,
            )

    def close(self) -> None:
        """Let go of the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        raw: Iterable[bytes] | None = None,
        num_bytes: int = 0,
    ) -> dict[str, Any]:
        import http.client

        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        sent: Any = raw
        if body is not None:
            headers["Content-Type"] = "application/json"
            sent = json.dumps(body).encode()
        elif raw is not None:
            headers |= {
                "Content-Type": "application/octet-stream",
                "Content-Length": f"{num_bytes}",
            }
        is_kept = self._connection is not None
        try:
            if self._connection is None:
                self._connection = self._connect()
            self._connection.request(method, path, body=sent, headers=headers)
            answer = self._connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            if is_kept and method == "GET" and not isinstance(error, TimeoutError):
                self.close()  # the service may have let go of a connection that was quiet
                return self._request(method, path)
            self.close()
            raise self._silence(error) from None
        if answer.status < 400 and answer.headers.get_content_type() == "text/csv":
            return {"text": content.decode("utf-8")}
        try:
            table = json.loads(content)
        except ValueError:
            table = None
        if answer.status >= 400:
            told = table.get("error") if isinstance(table, dict) else None
            raise _error_of(answer.status, told if isinstance(told, dict) else {})
        if not isinstance(table, dict):
            self.close()
            raise DrystoneError(
                f"what answers at {self.url or self.folder} is not a Drystone service "
                f"(status {answer.status}, and no JSON object)",
                hint="Check the address; a proxy or another program may answer there",
            )
        return table

    def _connect(self) -> http.client.HTTPConnection:
        import http.client

        if not self.url:
            made = http.client.HTTPConnection("localhost", timeout=self._timeout_seconds)
            made.sock = _open_socket(self.folder / _SOCKET_NAME, self._timeout_seconds)
            made.auto_open = 0  # it would go to a port
            return made
        kind, host, port = split_url(self.url)
        if kind == "https":
            return http.client.HTTPSConnection(host, port, timeout=self._timeout_seconds)
        return http.client.HTTPConnection(host, port, timeout=self._timeout_seconds)

    def _silence(self, error: Exception) -> NotRunning:
        if self.url:
            return NotRunning(
                f"no Drystone answers at {self.url}: {reason_of(error)}",
                hint="`drystone login URL` names another; --folder names one on this machine",
            )
        return NotRunning(
            f"no Drystone answers in {self.folder}: {reason_of(error)}",
            hint="Start one with `drystone serve`, or name its folder with --folder",
        )


def split_url(url: str) -> tuple[str, str, int | None]:
    """`http` or `https`, the host, and the port if one is named."""
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(url)
        kind, host, port = parts.scheme, parts.hostname, parts.port
    except ValueError:
        kind, host, port = "", None, None
    if kind not in ("http", "https") or not host or parts.path not in ("", "/"):
        raise InvalidSpec(f"{url!r} is not an address", hint="Write e.g. http://gpu-box:8080")
    return kind, host, port


def _open_socket(path: Path, timeout_seconds: float) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.settimeout(timeout_seconds)
    try:
        with short_path(path) as name:
            made.connect(name)
    except OSError:
        made.close()
        raise
    return made


def _query(values: dict[str, Any]) -> str:
    given = {name: value for name, value in values.items() if value not in (None, "", [])}
    if not given:
        return ""
    from urllib.parse import urlencode

    return "?" + urlencode(given, doseq=True)


def _error_of(status: int, error: dict[str, Any]) -> DrystoneError:
    made: type[DrystoneError] = DrystoneError
    if status in (401, 403, 404, 409, 413):
        made = RequestError
    elif status == 422:
        made = InvalidSpec
    if error.get("kind") == "NothingFits":
        made = NothingFits
    message, hint = str(error.get("message") or ""), str(error.get("hint") or "")
    if status >= 500:
        message = message or f"the service failed to answer (status {status})"
        hint = hint or "Try again; if it stays so, the output of `drystone serve` says why"
    elif not message:
        message = f"the request was refused (status {status}), and not in the words of Drystone"
        hint = hint or "Check the address; a proxy or another program may answer there"
    return made(message, where=str(error.get("where", "")), hint=hint)
