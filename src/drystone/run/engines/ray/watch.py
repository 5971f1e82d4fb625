"""The connection to a Ray cluster, and what was seen of it last.

Everything that Ray is asked goes through the thread of a `ClusterWatch`: if Ray hangs, the
controller's loop does not.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Final, NamedTuple

from drystone.describe.files.cluster import ClusterSpec
from drystone.errors import DrystoneError, InvalidSpec, MissingExtra
from drystone.run.engines.agents_on_nodes import ClusterWatch
from drystone.run.engines.ray.nodes import ID_LABEL, AgentRequest, Found, begin_agent, find_nodes

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
_ANSWER_SECONDS: Final = 0.1  # between looks while agents are being started


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

    def begin(self, ray_id: str, request: AgentRequest) -> Any:
        """Let a node find or start its agent; what `answer` takes."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        where = NodeAffinitySchedulingStrategy(node_id=ray_id, soft=False)
        return self._task.options(scheduling_strategy=where).remote(request)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RayView:
    """A Ray cluster at one time."""

    asked: float = 0.0  # when it was asked, by the monotonic clock
    found: Found = field(default_factory=Found)
    dead: Mapping[str, str] = field(default_factory=dict)  # by Ray's id: why
    locks: Mapping[str, Lock] = field(default_factory=dict)  # by name
    free_gpus: Mapping[str, float] = field(default_factory=dict)  # by Ray's id


class RayWatch:
    """What Ray shows, and what it is asked to do: agents to start, locks to take and release."""

    def __init__(
        self, connection: RayConnection, file: ClusterSpec | None, *, look_seconds: float
    ) -> None:
        self._connection, self._file = connection, file
        self._starting: dict[str, Any] = {}  # by node: Ray's reference, used in the thread alone
        self._answers: SimpleQueue[tuple[str, dict[str, Any] | str]] = SimpleQueue()
        self.thread = ClusterWatch(
            "Ray", self._look, RayView(), look_seconds=look_seconds, passing=Exception
        )

    @property
    def view(self) -> RayView:
        """What was seen last."""
        return self.thread.view

    def start_agent(self, node: str, ray_id: str, request: AgentRequest) -> None:
        """Have an agent started; `answers` tells what came of it."""

        def begin() -> None:
            if node not in self._starting:
                self._starting[node] = self._connection.begin(ray_id, request)

        self.thread.order(begin, f"start {node}")

    def answers(self) -> dict[str, dict[str, Any] | str]:
        """By node: the addresses of agents that came up since, or why one did not."""
        if self._starting:
            self.thread.look_soon(time.monotonic() - _ANSWER_SECONDS)
        found = {}
        while not self._answers.empty():
            node, answer = self._answers.get()
            found[node] = answer
        return found

    def lock(self, name: str, gpus: Mapping[str, int]) -> None:
        """Have a lock taken, unless it is there."""

        def take() -> None:
            if name not in self._connection.locks():
                self._connection.lock(name, gpus)

        if f"lock {name}" not in self.thread.unseen() and name not in self.view.locks:
            self.thread.order(take, f"lock {name}")

    def unlock(self, name: str) -> None:
        """Have a lock given back."""
        self.thread.order(lambda: self._connection.unlock(name), f"unlock {name}")

    def lock_names(self) -> set[str]:
        """The locks that are there, or will be."""
        unseen = self.thread.unseen()
        wanted = {tag.removeprefix("lock ") for tag in unseen if tag.startswith("lock ")}
        given_back = {tag.removeprefix("unlock ") for tag in unseen if tag.startswith("unlock ")}
        return (wanted | set(self.view.locks)) - given_back

    def _look(self, asked: float) -> RayView:
        there, free = self._connection.locks(), self._connection.free_gpus()
        rows = self._connection.nodes()
        for node, reference in list(self._starting.items()):
            answer = self._connection.answer(reference)
            if answer is not None:
                del self._starting[node]
                self._answers.put((node, answer))
        dead = {
            str(row["NodeID"]): str(row.get("DeathReasonMessage") or "Ray says that it is dead")
            for row in rows
            if not row.get("Alive")
        }
        found = find_nodes(rows, self._file)
        return RayView(asked=asked, found=found, dead=dead, locks=there, free_gpus=free)


class NoNodes(DrystoneError):
    """None of a cluster's nodes can be used."""
