"""All talk with Ray, in a thread of its own: if Ray hangs, the controller's loop does not.

The loop leaves its wishes here (agents to be started, locks to be had or given back) and reads what
was found at the last look.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from drystone.describe.files.cluster import ClusterSpec
from drystone.errors import DrystoneError, InvalidSpec, MissingExtra
from drystone.run.engines.ray.nodes import ID_LABEL, AgentWish, Found, begin_agent, find_nodes

_NAMESPACE: Final = "drystone"
# Ray reads these when it is imported. It would count its users, and print to our standard output
# the last lines of every raylet that dies, and every error that nobody asked about.
_VARIABLES: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
}
_READY: Final = "CREATED"
_OVER: Final = "REMOVED"


class Lock(NamedTuple):
    """A placement group: whether all of it is there, and how many GPUs of which nodes."""

    is_held: bool
    gpus: Mapping[str, float]  # by Ray's id


class RayConnection:
    """A driver of a Ray cluster that runs already."""

    def __init__(self, address: str) -> None:
        if address.startswith("ray://"):
            raise InvalidSpec(
                f"{address} is an address of Ray Client, through which nodes cannot be managed",
                hint="Run drystone serve on a node of the cluster, with --address auto",
            )
        for name, value in _VARIABLES.items():
            os.environ.setdefault(name, value)
        try:
            import ray
        except ImportError as error:
            raise MissingExtra("the engine `ray` needs Ray", "ray") from error
        self._ray = ray
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            host = address.rpartition(":")[0]
            try:
                ray.init(
                    address=address or "auto",
                    namespace=_NAMESPACE,
                    log_to_driver=False,
                    configure_logging=False,
                    # A cluster on loopback cannot be found by this machine's own address.
                    _node_ip_address=host if host.startswith("127.") else None,
                )
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise DrystoneError(
                    f"no Ray cluster at {address or 'auto'}: {error}",
                    hint="Start one with `ray start --head`, and serve on one of its nodes",
                ) from error
        self._task: Any = ray.remote(num_cpus=0, max_retries=0)(begin_agent)

    def close(self) -> None:
        """Let go of the cluster; what runs there goes on."""
        if self._is_ours:
            self._ray.shutdown()

    def nodes(self) -> list[dict[str, Any]]:
        """Every node that Ray knows of, dead ones too."""
        found: list[dict[str, Any]] = self._ray.nodes()
        return found

    # --- agents ---------------------------------------------------------------------------------

    def begin(self, ray_id: str, wish: AgentWish) -> Any:
        """Let a node find or start its agent; what `answer` takes."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        where = NodeAffinitySchedulingStrategy(node_id=ray_id, soft=False)
        return self._task.options(scheduling_strategy=where).remote(wish)

    def answer(self, reference: Any) -> dict[str, Any] | str | None:
        """The agent's address, or what went wrong; None while the node is still at it."""
        ready, _ = self._ray.wait([reference], timeout=0)
        if not ready:
            return None
        try:
            found: dict[str, Any] = self._ray.get(reference, timeout=5)
        except self._ray.exceptions.RayTaskError as error:
            cause = getattr(error, "cause", None) or error
            return f"{cause}" if isinstance(cause, DrystoneError) else _last_line(str(error))
        except self._ray.exceptions.RayError as error:
            return _last_line(str(error))
        return found

    # --- locks ----------------------------------------------------------------------------------

    def locks(self) -> dict[str, Lock]:
        """By name: every placement group that is there."""
        from ray.util.placement_group import placement_group_table

        return {
            row["name"]: Lock(row["state"] == _READY, _gpus_of(row))
            for row in placement_group_table().values()
            if row["name"] and row["state"] != _OVER
        }

    def free_gpus(self) -> dict[str, float]:
        """By node (Ray's id): the GPUs that Ray has given to nobody."""
        from ray._private.state import available_resources_per_node

        found = available_resources_per_node()
        return {node: float(resources.get("GPU", 0.0)) for node, resources in found.items()}

    def lock(self, name: str, gpus: Mapping[str, int]) -> None:
        """Ask for so many GPUs of each node (Ray's ids), all or none; it outlives this process."""
        from ray.util.placement_group import placement_group

        placement_group(
            [{"GPU": count} for count in gpus.values()],
            strategy="PACK",
            name=name,
            lifetime="detached",
            bundle_label_selector=[{ID_LABEL: node} for node in gpus],
        )

    def unlock(self, name: str) -> None:
        """Give them back."""
        from ray.util.placement_group import get_placement_group, remove_placement_group

        try:
            group = get_placement_group(name)
        except ValueError:
            return  # it is gone already
        remove_placement_group(group)


def _gpus_of(row: Mapping[str, Any]) -> dict[str, float]:
    gpus: dict[str, float] = {}
    for bundle, node in row["bundles_to_node_id"].items():
        if node:
            gpus[node] = gpus.get(node, 0.0) + row["bundles"][bundle].get("GPU", 0.0)
    return gpus


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason was given"


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
