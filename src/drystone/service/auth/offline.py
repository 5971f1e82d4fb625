"""Tokens while no service runs: the first one must be made before a service may be reached."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from drystone.errors import DrystoneError, UnknownName
from drystone.run.control.access import Access, make_token
from drystone.run.control.notes import Note, TeamSet, TokenMade, TokenRevoked, parse
from drystone.run.control.store import Lease, Store
from drystone.service.auth.people import TokenShown

Table = dict[str, Any]
_LEASE_SECONDS: Final = 10.0
_KINDS: Final = tuple(
    f'{{"event": "{kind.__name__}"' for kind in (TokenMade, TokenRevoked, TeamSet)
)


class OfflineTokens:
    """The log, opened for a moment by somebody who may read and write its files."""

    def __init__(self, folder: Path, database: str = "") -> None:
        self._folder = None if database else folder
        self._address = database or f"sqlite:///{folder / 'log.db'}"

    def create(self, *, name: str, role: str, team: str) -> Table:
        """A new token, with its text."""
        note, text = make_token(name=name, role=role, team=team, now_seconds=time.time())
        with self._opened() as (store, lease, access):
            access.check_team(team)
            store.append(lease, [note], actor="owner")
            access.record(note)
            return vars(TokenShown.of(access.tokens[note.token_id])) | {"token": text}

    def revoke(self, token_id: str) -> Table:
        """A token that is worth nothing any more."""
        with self._opened() as (store, lease, access):
            if token_id not in access.tokens:
                raise UnknownName("token", token_id, access.tokens)
            if access.live(token_id) is not None:
                note = TokenRevoked(time_seconds=time.time(), token_id=token_id)
                store.append(lease, [note], actor="owner")
                access.record(note)
            return vars(TokenShown.of(access.tokens[token_id]))

    def list(self) -> list[Table]:
        """All of them."""
        store = self._open()
        try:
            return [vars(TokenShown.of(token)) for token in _fold(store).tokens.values()]
        finally:
            store.close()

    def _open(self) -> Store:
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return Store(self._address)

    @contextmanager
    def _opened(self) -> Iterator[tuple[Store, Lease, Access]]:
        store = self._open()
        try:
            lease = _take_lease(store)
            try:
                yield store, lease, _fold(store)
            finally:
                store.release(lease)
        finally:
            store.close()


def _fold(store: Store) -> Access:
    access = Access()
    for _, line in store.read_lines():
        if line.startswith(_KINDS):
            note = parse(line)
            assert isinstance(note, Note)
            access.record(note)
    return access


def _take_lease(store: Store) -> Lease:
    """For a moment; a controller that was killed may still seem to hold it."""
    holder = f"{socket.gethostname()}:tokens:{os.getpid()}"
    deadline = time.monotonic() + 60.0
    while (lease := store.acquire(holder, lease_seconds=_LEASE_SECONDS)) is None:
        if time.monotonic() > deadline:
            raise DrystoneError(
                "a controller holds this log and does not answer here",
                hint="Ask it: name its --folder, or `drystone login` to it",
            )
        time.sleep(0.2)
    return lease
