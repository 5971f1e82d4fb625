"""What holds of every policy, whatever the cluster and the queue."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "schedule"))
from tiny import snapshot as make_snapshot

from drystone.describe.job import JobSpec
from drystone.describe.trace_cluster import NodeSpec
from drystone.run.events import Finished, Refused, Submitted
from drystone.run.loop import drive
from drystone.run.simulator.faults import FaultSpec
from drystone.run.simulator.world import SimulatedWorld
from drystone.run.state import replay
from drystone.schedule.check import check_decisions
from drystone.schedule.measured import types_of
from drystone.schedule.packing import make_room
from drystone.schedule.policy import POLICIES, find_policy
from drystone.schedule.snapshot import OptionSet, Snapshot, StartupCost

every_policy = pytest.mark.parametrize("name", sorted(POLICIES))
STARTUP = StartupCost(seconds_per_gpu=5.0, most_seconds=30.0)


@st.composite
def clusters(draw) -> tuple[NodeSpec, ...]:
    nodes = []
    for gpu in ("A", "B", "C")[: draw(st.integers(1, 3))]:
        size = draw(st.sampled_from([1, 2, 4, 8]))
        for index in range(draw(st.integers(1, 4))):
            nodes.append(NodeSpec(id=f"{gpu}{index}", gpu=gpu, num_gpus=size))
    return tuple(nodes)


@st.composite
def option_sets(draw, nodes: tuple[NodeSpec, ...]) -> OptionSet:
    """Options that fit on the empty cluster; some take two types at once."""
    gpu_types = types_of(nodes)
    total = [sum(one.num_gpus for one in nodes if one.gpu == gpu) for gpu in gpu_types]
    rows: dict[tuple[int, ...], float] = {}
    for _ in range(draw(st.integers(1, 5))):
        row = [0] * len(gpu_types)
        for kind in draw(
            st.lists(st.integers(0, len(total) - 1), min_size=1, max_size=2, unique=True)
        ):
            row[kind] = draw(st.integers(1, total[kind]))
        rows[tuple(row)] = draw(st.floats(0.1, 50.0))
    return OptionSet(
        counts=np.array(list(rows), dtype=np.int64),
        samples_per_second=np.array(list(rows.values())),
        memory_bytes=np.zeros(len(rows)),
    )


@st.composite
def queues(draw, nodes: tuple[NodeSpec, ...]) -> tuple[list[JobSpec], dict[str, OptionSet]]:
    gpu_types = types_of(nodes)
    jobs, options = [], {}
    for index in range(draw(st.integers(0, 8))):
        name = f"job{index}"
        options[name] = draw(option_sets(nodes))
        jobs.append(
            JobSpec(
                id=name,
                submit_seconds=float(draw(st.integers(0, 50))),
                model="m",
                total_samples=draw(st.floats(1.0, 1e4)),
                priority=draw(st.sampled_from([0.5, 1.0, 4.0])),
                requested_gpu=draw(st.sampled_from(["", gpu_types[0]])),
                requested_count=draw(st.integers(1, 4)),
            )
        )
    return jobs, options


@st.composite
def snapshots(draw) -> Snapshot:
    """Some jobs of a queue run where they fit; the others wait."""
    nodes = draw(clusters())
    jobs, options = draw(queues(nodes))
    room = make_room(make_snapshot(nodes, jobs, options))
    running = {}
    for job in jobs:
        if draw(st.booleans()):
            option = draw(st.integers(0, len(options[job.id]) - 1))
            placement = room.place(options[job.id].counts[option])
            if placement is not None:
                running[job.id] = (option, placement)
    now = draw(st.sampled_from([0.0, 1e3, 1e5]))
    return make_snapshot(nodes, jobs, options, running, startup=STARTUP, now_seconds=now)


@every_policy
@settings(max_examples=50)
@given(snapshot=snapshots())
def test_every_decision_is_sound(name: str, snapshot: Snapshot):
    """No GPU is given out twice, nothing is unknown, every placement is its option."""
    decisions, memory = find_policy(name)(snapshot, None)

    assert check_decisions(snapshot, decisions) == []
    assert check_decisions(snapshot, find_policy(name)(snapshot, memory)[0]) == []


@every_policy
@settings(max_examples=50)
@given(snapshot=snapshots())
def test_the_same_snapshot_gives_the_same_decisions(name: str, snapshot: Snapshot):
    assert find_policy(name)(snapshot, None)[0] == find_policy(name)(snapshot, None)[0]


@every_policy
@settings(max_examples=50)
@given(snapshot=snapshots(), chance=st.randoms(use_true_random=False))
def test_other_ids_change_nothing_but_ids(name: str, snapshot: Snapshot, chance):
    ids = [spec.id for spec in snapshot.jobs.specs]
    others = ids.copy()
    chance.shuffle(others)
    renamed = dict(zip(ids, others, strict=True))
    specs = tuple(replace(spec, id=renamed[spec.id]) for spec in snapshot.jobs.specs)
    other = replace(snapshot, jobs=replace(snapshot.jobs, specs=specs))

    decisions = find_policy(name)(snapshot, None)[0]

    expected = [replace(one, job_id=renamed[one.job_id]) for one in decisions]
    assert find_policy(name)(other, None)[0] == expected


@every_policy
@settings(max_examples=30)
@given(data=st.data(), has_faults=st.booleans(), has_rounds=st.booleans())
def test_no_job_is_lost(name: str, data: st.DataObject, has_faults: bool, has_rounds: bool):
    """Every job that came in is done or refused at the end, and the log replays to that state."""
    nodes = data.draw(clusters())
    jobs, options = data.draw(queues(nodes))
    faults = FaultSpec(
        seed=7, node_losses_per_hour=5, repair_seconds=60, node_slowdowns_per_hour=5,
        slow_seconds=60, failed_start_share=0.1, checkpoint_seconds=30,
    )  # fmt: skip
    world = SimulatedWorld(
        jobs=jobs,
        nodes=nodes,
        options_of=lambda job: options[job.id],
        gpu_types=types_of(nodes),
        startup=STARTUP,
        round_seconds=60.0 if has_rounds else 0.0,
        faults=faults if has_faults else None,
        horizon_seconds=1e7,
    )
    drive(world, find_policy(name))

    settled = [one.job_id for one in world.log if isinstance(one, Finished | Refused)]
    assert sorted(settled) == sorted(job.id for job in jobs)
    assert sum(isinstance(one, Submitted) for one in world.log) == len(jobs)
    again = replay(nodes, world.log)
    assert again.free == world.state.free
    assert repr(again.jobs) == repr(world.state.jobs)
