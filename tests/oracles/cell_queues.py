"""Clusters and queues for judging `cells`, from a seed; small, so that everybody is in the way."""

from __future__ import annotations

import numpy as np

from drystone.describe.cluster import NodeSpec
from drystone.describe.job import JobSpec
from drystone.describe.option import OptionSet
from drystone.run.simulate.world import SimulatedWorld
from drystone.schedule.options import types_of

COUNTS = (1, 2, 4, 8, 16)
ODD_COUNTS = (1, 2, 3, 4, 6, 8, 12)


def make_world(seed: int, *, num_jobs: int = 30, nodes_of_a_type: int = 4) -> SimulatedWorld:
    """One to four types; every third seed has nodes of unlike size, every fourth odd counts.

    Speeds of every second seed are whole numbers, so that many choices are equal.
    """
    chance = np.random.default_rng(seed)
    nodes = _nodes(chance, nodes_of_a_type, is_uneven=seed % 3 == 0)
    works = [
        _options(chance, nodes, ODD_COUNTS if seed % 4 == 0 else COUNTS, is_whole=seed % 2 == 0)
        for _ in range(6)
    ]
    gpu_types = types_of(nodes)
    jobs = []
    for index in range(num_jobs):
        work = int(chance.integers(len(works)))
        named = bool(chance.random() < 0.7)
        jobs.append(
            JobSpec(
                id=f"job{index}",
                submit_seconds=float(chance.integers(0, 20 * num_jobs)),
                model=str(work),
                total_samples=float(chance.lognormal(8.0, 1.0)),
                requested_gpu=str(chance.choice(gpu_types)) if named else "",
                requested_count=int(chance.choice(COUNTS[:4])),
            )
        )
    return SimulatedWorld(
        jobs=sorted(jobs, key=lambda job: job.submit_seconds),
        nodes=nodes,
        options_of=lambda job: works[int(job.model)],
        gpu_types=gpu_types,
        round_seconds=60.0,
    )


def _nodes(
    chance: np.random.Generator, nodes_of_a_type: int, *, is_uneven: bool
) -> tuple[NodeSpec, ...]:
    nodes = []
    for gpu in ("A", "B", "C", "D")[: chance.integers(1, 5)]:
        size = int(chance.choice([1, 2, 4, 8]))
        for index in range(int(chance.integers(1, nodes_of_a_type + 1))):
            smaller = is_uneven and chance.random() < 0.3
            num_gpus = max(1, size // 2) if smaller else size
            nodes.append(NodeSpec(id=f"{gpu}{index}", gpu=gpu, num_gpus=num_gpus))
    return tuple(nodes)


def _options(
    chance: np.random.Generator,
    nodes: tuple[NodeSpec, ...],
    some_counts: tuple[int, ...],
    *,
    is_whole: bool,
) -> OptionSet:
    """Up to all counts of every type, a fifth of them missing; sometimes one that mixes types."""
    gpu_types = types_of(nodes)
    total = [sum(one.num_gpus for one in nodes if one.gpu == gpu) for gpu in gpu_types]
    rows: dict[tuple[int, ...], float] = {}
    for kind, num_gpus in enumerate(total):
        pace, bend = chance.uniform(2.0, 20.0), chance.uniform(0.3, 1.1)
        for count in some_counts:
            if count <= num_gpus and chance.random() < 0.8:
                row = [0] * len(total)
                row[kind] = count
                rows[tuple(row)] = pace * count**bend
    if not rows or (len(total) > 1 and chance.random() < 0.3):
        rows[tuple(min(1, num_gpus) for num_gpus in total)] = 30.0
    speeds = np.array(list(rows.values()))
    return OptionSet(
        counts=np.array(list(rows), dtype=np.int64),
        samples_per_second=np.maximum(np.round(speeds), 1.0) if is_whole else speeds,
        memory_bytes=np.zeros(len(rows)),
    )
