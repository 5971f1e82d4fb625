"""Agents on the nodes of a cluster, and the thread that watches the cluster's own scheduler.

Shared by all engines. `NodeAgents` has a connection to the agent of each node and knows which
nodes joined, left, or have been silent for how long. `ClusterWatch` talks to Ray or Slurm in a
thread of its own: if they hang, the controller's loop does not. `LaunchNames` and `TakenGpus` are
for clusters that others use too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from drystone.run.engines.agent.client import AgentClient, AgentGone, AgentRefused, Remote
from drystone.run.engines.agent.launches import read_lines
from drystone.run.engines.agent.network import keep_secret
from drystone.run.engines.contract import Key, Seen


class AgentAnswers(NamedTuple):
    """What all agents say at one time."""

    launches: list[Seen]
    silent: set[str]  # nodes whose agents did not answer
    leaving: dict[str, str]  # nodes whose agents are about to end, and why


class NodeAgents:
    """The agent of each node: one connection each, and how long it has been silent."""

    def __init__(self, *, timeout_seconds: float = 2.0) -> None:
        self._controller = 0
        self._timeout_seconds = timeout_seconds
        self._clients: dict[str, AgentClient] = {}
        self._known: dict[str, tuple[Key, ...]] = {}  # launches that each agent told of last
        self._silent_since: dict[str, float] = {}
        self._has_changed = False
        self._left: dict[str, str] = {}

    # --- nodes that come and go -----------------------------------------------------------------

    def __contains__(self, node: object) -> bool:
        return node in self._clients

    def set_controller(self, controller: int) -> None:
        """The epoch that orders carry from now on; agents refuse those of older controllers."""
        self._controller = controller
        for node, client in list(self._clients.items()):
            self.connect(node, client.where)

    def connect(self, node: str, where: Path | Remote) -> None:
        """Use the agent at an address; a connection to an earlier one of the node is closed."""
        self.disconnect(node)
        self._clients[node] = AgentClient(
            where, controller=self._controller, timeout_seconds=self._timeout_seconds
        )

    def disconnect(self, node: str) -> None:
        """Ask nothing more of a node."""
        self._known.pop(node, None)
        self._silent_since.pop(node, None)
        if node in self._clients:
            self._clients.pop(node).close()

    def join(self, node: str, where: Path | Remote) -> None:
        """Connect to a node of the cluster; one that is new is a change of the cluster."""
        self._has_changed |= node not in self._clients
        self.connect(node, where)

    def leave(self, node: str, reason: str) -> None:
        """A node left for good. Where only the cluster lost it, nothing may go on there."""
        with suppress(AgentGone, AgentRefused):
            self.ask(node, "quit")
        self.disconnect(node)
        self._has_changed = True
        self._left[node] = reason

    def take_changes(self) -> tuple[bool, dict[str, str]]:
        """Whether nodes joined or left since this was last called, and why nodes left."""
        changes = self._has_changed, self._left
        self._has_changed, self._left = False, {}
        return changes

    def close(self) -> None:
        """Close the connections; the agents stay."""
        for client in self._clients.values():
            client.close()

    def quit(self) -> None:
        """End all agents, and with them everything that runs."""
        for client in self._clients.values():
            with suppress(AgentGone, AgentRefused):
                client.ask("quit")
        self.close()

    # --- requests -------------------------------------------------------------------------------

    def ask(self, node: str, op: str, **values: Any) -> dict[str, Any]:
        """Send one request to one agent."""
        if node not in self._clients:
            raise AgentGone(f"there is no agent of {node}")
        return self._clients[node].ask(op, **values)

    def read(self, node: str, **values: Any) -> dict[str, Any]:
        """Read a file of a launch over a connection of its own. From any thread."""
        known = self._clients.get(node)
        if known is None:
            raise AgentGone(f"there is no agent of {node}")
        client = AgentClient(known.where)
        try:
            return client.ask("read", **values)
        finally:
            client.close()

    def silent_seconds(self, node: str) -> float:
        """How long the agent of a node has not answered; 0 if it answered last time."""
        since = self._silent_since.get(node)
        return 0.0 if since is None else time.monotonic() - since

    def poll(
        self, offsets: Mapping[Key, int], renew: Iterable[Key], lease_seconds: float
    ) -> AgentAnswers:
        """Ask all agents how their launches stand, and renew leases."""
        renewed = frozenset(renew)
        answers = AgentAnswers([], set(), {})
        for node, client in self._clients.items():
            # Only of what it told last time: a thousand nodes need not hear of each other's.
            known = self._known.get(node, ())
            told = {f"{key[0]}.{key[1]}": offsets[key] for key in known if key in offsets}
            longer = [list(key) for key in known if key in renewed]
            try:
                client.send("poll", offsets=told, renew=longer, lease_seconds=lease_seconds)
            except AgentGone:
                answers.silent.add(node)
        deadline = time.monotonic() + self._timeout_seconds
        for node, client in self._clients.items():
            if node in answers.silent:
                continue
            try:
                answer = client.receive(deadline - time.monotonic())
            except AgentGone:
                answers.silent.add(node)
                continue
            except AgentRefused:  # there is a later controller; other answers are on their way
                self.close()
                raise
            self._silent_since.pop(node, None)
            seen = [_seen(node, launch) for launch in answer["launches"]]
            self._known[node] = tuple((launch.job_id, launch.epoch) for launch in seen)
            answers.launches.extend(seen)
            if answer.get("leaving"):
                answers.leaving[node] = str(answer["leaving"])
        now = time.monotonic()
        for node in answers.silent:
            self._silent_since.setdefault(node, now)
        return answers


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


def silence_reason(seconds: float) -> str:
    """Why a node is lost whose agent has been silent for so long."""
    return f"its agent has not answered for {seconds:.0f} s"


def read_shared_file(
    agents: Path, node: str, *, job_id: str, epoch: int, name: str, offset: int
) -> dict[str, Any]:
    """Read a file of a launch from the disk that all nodes share; it needs no agent."""
    folder = agents / Path(node).name / "launches" / f"{Path(job_id).name}.{int(epoch)}"
    text, end = read_lines(folder / Path(name).name, offset)
    return {"text": text, "offset": end}


class LaunchNames:
    """What launches are called at a scheduler that others use too.

    Two systems of one user must not take each other's for theirs: a tag in the folder tells them
    apart.
    """

    def __init__(self, folder: Path) -> None:
        self.prefix = f"drystone-{keep_secret(folder / 'tag')[:8]}-"

    def name(self, key: Key) -> str:
        """The name of a launch."""
        return f"{self.prefix}{key[0]}.{key[1]}"

    def keys(self, names: Iterable[str]) -> frozenset[Key]:
        """The launches of this system among names of all kinds."""
        own = [name.removeprefix(self.prefix) for name in names if name.startswith(self.prefix)]
        parts = [name.rpartition(".") for name in own]
        return frozenset((job_id, int(epoch)) for job_id, _, epoch in parts)


class TakenGpus:
    """GPUs that others use, by node: as many as the last two looks agree on.

    Nodes and jobs are asked for one after the other, so that a single look may count a GPU as
    taken by others that a job of ours has just got.
    """

    def __init__(self) -> None:
        self._asked = 0.0
        self.before: Mapping[str, int] = {}  # at the look before the last
        self._now: Mapping[str, int] = {}

    def is_new(self, asked: float) -> bool:
        """Whether the look that began at that time was not noted yet."""
        return asked != self._asked

    def note(self, asked: float, taken: Mapping[str, int]) -> None:
        """Take in what another look shows."""
        self._asked, self.before, self._now = asked, self._now, taken

    def agreed(self) -> dict[str, int]:
        """What two looks agree on."""
        least = {node: min(count, self.before.get(node, 0)) for node, count in self._now.items()}
        return {node: count for node, count in least.items() if count}


class _View(Protocol):
    @property
    def asked(self) -> float: ...


View = TypeVar("View", bound=_View)


class ClusterWatch(Generic[View]):
    """A thread that looks at a cluster, at an interval or at once, and carries out orders.

    `look` gets the time at which it begins (monotonic, as `asked` of what it returns). Orders are
    carried out first come, first served. One that raises one of `passing` is tried again; one that
    raises anything else would be refused again and is dropped. Troubles are logged once.
    """

    def __init__(
        self,
        name: str,
        look: Callable[[float], View],
        first: View,
        *,
        look_seconds: float,
        passing: type[Exception],
        retry_seconds: float = 1.0,
    ) -> None:
        self._name, self._look = name, look
        self._look_seconds, self._passing = look_seconds, passing
        self._retry_seconds = min(retry_seconds, look_seconds)
        self._condition = threading.Condition()
        self._orders: deque[tuple[Callable[[], None], str]] = deque()
        self._unseen: list[str] = []  # tags of orders carried out since the last look began
        self._wants_look = False
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.trouble = ""  # why it could not be asked last time
        self._log = logging.getLogger(f"drystone.{name.lower()}")
        self.view = first  # what was seen last

    def start(self, *, looks_first: bool = True) -> None:
        """Go on in a thread; the first look is made here, and must succeed."""
        if looks_first:
            self.look()
        self._thread = threading.Thread(target=self._run, name=self._name.lower(), daemon=True)
        self._thread.start()

    def close(self, wait_seconds: float | None) -> None:
        """Try once more what is left to do, then end; wait for that, at most so long."""
        with self._condition:
            self._closing.set()
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join(wait_seconds)

    @property
    def is_running(self) -> bool:
        """Whether it was started."""
        return self._thread is not None

    def order(self, action: Callable[[], None], tag: str = "") -> None:
        """Have something done in the thread; a look follows at once where there is a tag."""
        with self._condition:
            self._orders.append((action, tag))
            self._condition.notify_all()

    def unseen(self) -> set[str]:
        """Tags of orders whose effect no look shows yet. To be read before `view`."""
        with self._condition:
            return {tag for _, tag in self._orders if tag}.union(self._unseen)

    def look_soon(self, after: float) -> None:
        """Look at once, unless a look began after that time."""
        with self._condition:
            if self.view.asked <= after:
                self._wants_look = True
                self._condition.notify_all()

    def wait_for_look(self, seconds: float) -> None:
        """Wait until something was seen, at most so long."""
        with self._condition:
            self._condition.wait(seconds)

    def look(self) -> None:
        """Ask for everything."""
        with self._condition:
            self._wants_look, num_done = False, len(self._unseen)
        view = self._look(time.monotonic())
        with self._condition:
            self.view = view
            del self._unseen[:num_done]
            self._condition.notify_all()

    def _run(self) -> None:
        while True:
            with self._condition:
                if not self._orders and not self._wants_look and not self._closing.is_set():
                    self._condition.wait(max(0.0, self._seconds_to_look()))
                is_closing = self._closing.is_set()
            is_well = self._try(self._carry_out)
            if is_closing:
                return
            if self._wants_look or self._seconds_to_look() <= 0:
                is_well = self._try(self.look) and is_well
            if is_well:
                self.trouble = ""
            else:
                self._closing.wait(self._retry_seconds)

    def _try(self, action: Callable[[], None]) -> bool:
        try:
            action()
        except Exception as error:  # whatever Ray or Slurm raise; agents are asked in any case
            self._note(error)
            return False
        return True

    def _carry_out(self) -> None:
        while self._orders:
            action, tag = self._orders[0]
            is_done = False
            try:
                action()
                is_done = True
            except self._passing:
                raise
            except Exception as error:
                self._note(error)
            with self._condition:
                self._orders.popleft()
                if is_done and tag:
                    self._unseen.append(tag)
                    self._wants_look = True

    def _seconds_to_look(self) -> float:
        return self.view.asked + self._look_seconds - time.monotonic()

    def _note(self, error: Exception) -> None:
        lines = f"{type(error).__name__}: {error}".strip().splitlines()
        if lines[0] != self.trouble:
            self._log.warning("%s does not answer as it should: %s", self._name, lines[0])
        self.trouble = lines[0]
