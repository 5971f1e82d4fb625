"""Small clusters and queues for tests of policies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from drystone.describe.cluster import NodeSpec
from drystone.describe.job import JobSpec
from drystone.describe.option import OptionSet
from drystone.run.events import Started, Submitted
from drystone.run.snapshots import SnapshotMaker
from drystone.run.state import ClusterState
from drystone.schedule.options import types_of
from drystone.schedule.snapshot import Placement, Snapshot, StartupCost


def option_set(*rows: tuple[Sequence[int], float], memory: float = 0.0) -> OptionSet:
    """Options from (counts by type, speed)."""
    return OptionSet(
        counts=np.array([counts for counts, _ in rows], dtype=np.int64),
        samples_per_second=np.array([speed for _, speed in rows], dtype=np.float64),
        memory_bytes=np.full(len(rows), memory),
    )


def job(name: str, samples: float = 100.0, **fields: object) -> JobSpec:
    return JobSpec(id=name, submit_seconds=0.0, model="m", total_samples=samples, **fields)


def node(name: str, gpu: str = "A", num_gpus: int = 4, memory_bytes: float = 0.0) -> NodeSpec:
    return NodeSpec(id=name, gpu=gpu, num_gpus=num_gpus, memory_bytes=memory_bytes)


def snapshot(
    nodes: Sequence[NodeSpec],
    jobs: Sequence[JobSpec],
    options: OptionSet | dict[str, OptionSet],
    running: dict[str, tuple[int, Placement]] | None = None,
    *,
    startup: StartupCost | None = None,
    now_seconds: float = 0.0,
    **market: object,
) -> Snapshot:
    """The jobs on the nodes; those named in `running` have an option and a placement.

    `market`: offers, budget and hard cap, as `SnapshotMaker` takes them.
    """

    def options_of(one: JobSpec) -> OptionSet:
        return options[one.id] if isinstance(options, dict) else options

    state = ClusterState(list(nodes))
    maker = SnapshotMaker(types_of(nodes), options_of, startup or StartupCost(), **market)
    for one in jobs:
        maker.update(state.record(Submitted(time_seconds=0.0, job=one)))
    for name, (option, placement) in (running or {}).items():
        record = state.record(
            Started(
                time_seconds=0.0,
                job_id=name,
                option=option,
                placement=placement,
                samples_per_second=maker.book.run_facts(
                    state.jobs[name].spec, 0
                ).samples_per_second[option],
                productive_seconds=0.0,
            )
        )
        maker.update(record)
    return maker.make(state, now_seconds)
