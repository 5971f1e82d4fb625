"""What we ask of Ray: nodes, tasks on a node, placement groups. Nothing else calls it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from drystone.errors import DrystoneError, InvalidSpec, MissingExtra
from drystone.run.engines.ray.begin import AgentWish, begin_agent
from drystone.run.engines.ray.discover import ID_LABEL

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
