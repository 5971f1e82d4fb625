"""All talk with Ray, in a thread of its own: if Ray hangs, the controller's loop does not.

The loop leaves its wishes here (agents to be started, locks to be had or given back) and reads what
was found at the last look.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from drystone.describe.files.cluster import ClusterSpec
from drystone.errors import DrystoneError
from drystone.run.engines.ray.begin import AgentWish
from drystone.run.engines.ray.connection import Lock, RayConnection
from drystone.run.engines.ray.discover import Found, find_nodes


@dataclass(slots=True)
class Look:
    """What was seen last."""

    found: Found = field(default_factory=Found)
    dead: Mapping[str, str] = field(default_factory=dict)  # by Ray's id: why
    locks: Mapping[str, Lock] = field(default_factory=dict)  # by name
    free_gpus: Mapping[str, float] = field(default_factory=dict)  # by Ray's id
    number: int = 0  # of looks so far


class Watch:
    """Looks at a Ray cluster every so often, and whenever there is a wish."""

    def __init__(
        self, connection: RayConnection, file: ClusterSpec | None, *, look_seconds: float
    ) -> None:
        self._connection, self._file, self._look_seconds = connection, file, look_seconds
        self._mutex = threading.Condition()
        self._look = Look()
        self._begins: dict[str, tuple[str, AgentWish]] = {}  # by node: Ray's id, and the wish
        self._answers: dict[str, dict[str, Any] | str] = {}
        self._locks: dict[str, Mapping[str, int]] = {}
        self._unlocks: set[str] = set()
        self._pending: dict[str, Any] = {}  # references by node
        self._is_ending = False
        self._thread: threading.Thread | None = None
        self._log = logging.getLogger("drystone.ray")
        self._told = ""

    def start(self) -> None:
        """Begin; the first look is over when this returns."""
        self.step()
        self._thread = threading.Thread(target=self._run, name="drystone-ray", daemon=True)
        self._thread.start()

    def close(self, wait_seconds: float = 5.0) -> None:
        """End; wishes that are left are tried once more."""
        with self._mutex:
            self._is_ending = True
            self._mutex.notify_all()
        if self._thread is not None:
            self._thread.join(wait_seconds)

    @property
    def is_running(self) -> bool:
        """Whether it has begun."""
        return self._thread is not None

    @property
    def look(self) -> Look:
        """What was seen last."""
        with self._mutex:
            return self._look

    def begin(self, node: str, ray_id: str, wish: AgentWish) -> None:
        """Have an agent started."""
        with self._mutex:
            self._begins[node] = (ray_id, wish)
            self._mutex.notify_all()

    def answers(self) -> dict[str, dict[str, Any] | str]:
        """By node: the addresses of agents that came up since, or why one did not."""
        with self._mutex:
            answers, self._answers = self._answers, {}
            return answers

    def lock(self, name: str, gpus: Mapping[str, int]) -> None:
        """Have a lock taken, unless it is there."""
        with self._mutex:
            if name not in self._look.locks and name not in self._locks:
                self._locks[name] = dict(gpus)
                self._mutex.notify_all()

    def unlock(self, name: str) -> None:
        """Have a lock given back."""
        with self._mutex:
            self._locks.pop(name, None)
            self._unlocks.add(name)
            self._mutex.notify_all()

    def lock_names(self) -> set[str]:
        """The locks that are there, or will be."""
        with self._mutex:
            return (set(self._look.locks) | set(self._locks)) - self._unlocks

    def _run(self) -> None:
        while True:
            with self._mutex:
                is_busy = bool(self._begins or self._locks or self._unlocks)
                if not is_busy and not self._is_ending:
                    self._mutex.wait(0.1 if self._pending else self._look_seconds)
                is_ending = self._is_ending
            self._try(self.step)
            if is_ending:
                return

    def _try(self, what: Callable[[], None]) -> None:
        """Ray's troubles are told once, and tried again."""
        try:
            what()
            self._told = ""
        except Exception as error:  # whatever Ray raises; the agents are asked in any case
            told = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
            if told != self._told:
                self._log.warning("Ray does not answer as it should: %s", told)
            self._told = told
            time.sleep(min(1.0, self._look_seconds))

    def step(self) -> None:
        """Carry wishes out, then look."""
        with self._mutex:
            begins, self._begins = self._begins, {}
            locks, unlocks = dict(self._locks), set(self._unlocks)
        for node, (ray_id, wish) in begins.items():
            if node not in self._pending:
                self._pending[node] = self._connection.begin(ray_id, wish)
        for name in unlocks:
            self._connection.unlock(name)
        there = self._connection.locks()
        for name, gpus in locks.items():
            if name not in there:
                self._connection.lock(name, gpus)
        if locks:
            there = self._connection.locks()
        free, rows = self._connection.free_gpus(), self._connection.nodes()
        answers = {}
        for node, reference in list(self._pending.items()):
            answer = self._connection.answer(reference)
            if answer is not None:
                answers[node] = answer
                del self._pending[node]
        dead = {
            str(row["NodeID"]): str(row.get("DeathReasonMessage") or "Ray says that it is dead")
            for row in rows
            if not row.get("Alive")
        }
        with self._mutex:
            for name in locks:
                self._locks.pop(name, None)
            self._unlocks -= unlocks
            self._answers |= answers
            self._look = Look(
                find_nodes(rows, self._file), dead, there, free, self._look.number + 1
            )
            self._mutex.notify_all()

    def wait_look(self, seconds: float) -> None:
        """Until something was seen, at most so long."""
        with self._mutex:
            self._mutex.wait(seconds)


class NoNodes(DrystoneError):
    """None of a cluster's nodes can be used."""
