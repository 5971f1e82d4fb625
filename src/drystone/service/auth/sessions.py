"""Sessions of the page: a signed cookie, so that they outlive a restart and nothing is kept.

The cookie names a token and a time, and is signed with a key that only this system has (a file that
only its owner reads). A token that is revoked ends its sessions.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from pathlib import Path
from typing import Final

from drystone.errors import DrystoneError
from drystone.run.control.access import Access, Token

SESSION_SECONDS: Final = 7 * 24 * 3600
_KEY_NAME: Final = "session.key"
_COOKIE: Final = re.compile(r"([0-9a-f]{12})\.([0-9]{1,12})\.([0-9a-f]{64})")


class Sessions:
    """Makes and reads cookies."""

    def __init__(self, folder: Path) -> None:
        self._key = _load_key(folder / _KEY_NAME)

    def make(self, token: Token, now_seconds: float) -> tuple[str, float]:
        """A cookie for a token, and when it ends."""
        expires = int(now_seconds) + SESSION_SECONDS
        text = f"{token.id}.{expires}"
        return f"{text}.{self._sign(text)}", float(expires)

    def find(self, access: Access, cookie: str, now_seconds: float) -> tuple[Token, float] | None:
        """The token behind a cookie, and when it ends; None where it is not ours or too old."""
        match = _COOKIE.fullmatch(cookie)
        if match is None:
            return None
        token_id, expires, signature = match.groups()
        if not hmac.compare_digest(self._sign(f"{token_id}.{expires}"), signature):
            return None
        token = access.live(token_id)
        if token is None or float(expires) <= now_seconds:
            return None
        return token, float(expires)

    def _sign(self, text: str) -> str:
        return hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()


def _load_key(path: Path) -> bytes:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(32))
    except FileExistsError:
        pass
    key = path.read_bytes()
    if len(key) != 32:
        raise DrystoneError(
            "is no key of 32 bytes", where=str(path), hint="Remove it; people log in again"
        )
    return key
