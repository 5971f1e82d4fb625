"""The nodes as columns of numbers: what changes only when a node comes, goes, or is lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from drystone.run.state import ClusterState


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeColumns:
    """What the tables of nodes share until the next such change."""

    num_node_changes: int  # that the state had seen
    kinds: list[int]  # `type_index`
    shared: dict[str, Any]  # fields of `NodeTable`, and `kinds`


def node_columns(state: ClusterState, gpu_types: tuple[str, ...]) -> NodeColumns:
    """The columns of a state; nodes that are lost or gone have no GPUs."""
    nodes = state.nodes
    kinds = {gpu: kind for kind, gpu in enumerate(gpu_types)}
    type_index = np.array([kinds[node.gpu] for node in nodes], dtype=np.int64)
    num_gpus = np.array([node.num_gpus for node in nodes], dtype=np.int64)
    num_gpus[sorted(state.lost | state.gone | state.closing)] = 0
    return NodeColumns(
        num_node_changes=state.num_node_changes,
        kinds=type_index.tolist(),
        shared={
            "ids": tuple(node.id for node in nodes),
            "type_index": type_index,
            "kinds": type_index.tolist(),
            "num_gpus": num_gpus,
            "memory_bytes": np.array([node.memory_bytes for node in nodes], dtype=np.float64),
            "rows_by_type": tuple(
                np.flatnonzero(type_index == kind) for kind in range(len(gpu_types))
            ),
        },
    )
