"""Many agents at once: all are asked before the first answer is awaited, so a slow one delays none.

What is done about an agent that does not answer is the engine's to say.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from drystone.run.engines.agent.client import AgentClient, AgentGone, AgentRefused, Remote
from drystone.run.engines.contract import Key, Seen


class AgentPool:
    """One connection to each agent."""

    def __init__(self, *, timeout_seconds: float = 2.0) -> None:
        self.controller = 0  # the epoch that orders carry
        self._timeout_seconds = timeout_seconds
        self._clients: dict[str, AgentClient] = {}
        self._known: dict[str, tuple[Key, ...]] = {}  # launches that each agent told of last

    def put(self, node: str, where: Path | Remote) -> None:
        """The agent of a node is there; a connection to an earlier one is let go."""
        self.drop(node)
        self._clients[node] = AgentClient(
            where, controller=self.controller, timeout_seconds=self._timeout_seconds
        )

    def drop(self, node: str) -> None:
        """Nothing more is asked of a node."""
        self._known.pop(node, None)
        if node in self._clients:
            self._clients.pop(node).close()

    def close(self) -> None:
        """Let go of the connections; the agents stay."""
        for client in self._clients.values():
            client.close()

    def quit(self) -> None:
        """End all agents, and with them everything that runs."""
        for client in self._clients.values():
            with suppress(AgentGone, AgentRefused):
                client.ask("quit")
        self.close()

    def ask(self, node: str, op: str, **values: Any) -> dict[str, Any]:
        """One request to one agent."""
        if node not in self._clients:
            raise AgentGone(f"there is no agent of {node}")
        return self._clients[node].ask(op, **values)

    def poll(
        self, offsets: Mapping[Key, int], renew: Iterable[Key], lease_seconds: float
    ) -> tuple[list[Seen], set[str], dict[str, str]]:
        """Launches of all agents, the nodes that did not answer, and why nodes are to be left."""
        renewed = frozenset(renew)
        launches: list[Seen] = []
        silent: set[str] = set()
        leaving: dict[str, str] = {}
        for node, client in self._clients.items():
            # Only of what it told last time: a thousand nodes need not hear of each other's.
            known = self._known.get(node, ())
            told = {f"{one[0]}.{one[1]}": offsets[one] for one in known if one in offsets}
            longer = [list(one) for one in known if one in renewed]
            try:
                client.send("poll", offsets=told, renew=longer, lease_seconds=lease_seconds)
            except AgentGone:
                silent.add(node)
        deadline = time.monotonic() + self._timeout_seconds
        for node, client in self._clients.items():
            if node in silent:
                continue
            try:
                answer = client.receive(deadline - time.monotonic())
            except AgentGone:
                silent.add(node)
                continue
            except AgentRefused:  # there is a later controller; other answers are on their way
                self.close()
                raise
            seen = [_seen(node, one) for one in answer["launches"]]
            self._known[node] = tuple((one.job_id, one.epoch) for one in seen)
            launches += seen
            if answer.get("leaving"):
                leaving[node] = str(answer["leaving"])
        return launches, silent, leaving


def _seen(node: str, table: Mapping[str, Any]) -> Seen:
    return Seen(
        node=node,
        job_id=table["job_id"],
        epoch=table["epoch"],
        devices=tuple(table["devices"]),
        exits={int(rank): code for rank, code in table["exits"].items()},
        is_over=table["is_over"],
        note=table["note"],
        reports=table["reports"],
        offset=table["offset"],
    )
