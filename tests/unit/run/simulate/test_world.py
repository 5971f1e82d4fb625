import gc
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "schedule"))
from tiny import job, node, option_set

from drystone.errors import DrystoneError, InvalidSpec
from drystone.run.events import (
    Finished,
    Interrupted,
    NodeLost,
    Started,
    StartFailed,
    parse_events,
    render_event,
)
from drystone.run.lifecycle import JobState
from drystone.run.loop import UnsoundDecisions, drive
from drystone.run.simulate.clock import VirtualTime
from drystone.run.simulate.collection import NEW_OBJECTS, rare_collection
from drystone.run.simulate.faults import FaultSpec
from drystone.run.simulate.world import SimulatedWorld
from drystone.run.snapshots import SnapshotMaker
from drystone.run.state import ClusterState, replay
from drystone.schedule.baselines.queues import fifo
from drystone.schedule.decision import Start
from drystone.schedule.snapshot import StartupCost

NODES = [node("a0"), node("a1")]
OPTIONS = option_set(([4], 2.0))
FAULTS = FaultSpec(
    seed=1,
    node_losses_per_hour=6,
    repair_seconds=300,
    node_slowdowns_per_hour=6,
    failed_start_share=0.2,
    checkpoint_seconds=60,
)


def jobs(number: int, samples: float = 100.0):
    return [replace(job(f"j{i}", samples), submit_seconds=10.0 * i) for i in range(number)]


def run(number: int = 3, samples: float = 100.0, **settings) -> SimulatedWorld:
    world = SimulatedWorld(
        jobs=jobs(number, samples),
        nodes=NODES,
        options_of=lambda _: OPTIONS,
        gpu_types=("A",),
        **settings,
    )
    drive(world, fifo)
    return world


def ends(world: SimulatedWorld) -> dict[str, float]:
    return {one.job_id: one.time_seconds for one in world.log if isinstance(one, Finished)}


def test_jobs_take_their_work_over_their_speed():
    assert ends(run()) == {"j0": 50.0, "j1": 60.0, "j2": 100.0}


def test_a_start_costs_time():
    world = run(1, startup=StartupCost(seconds_per_gpu=10, most_seconds=30))

    assert ends(world) == {"j0": 80.0}


def test_rounds_delay_decisions_but_not_ends():
    assert ends(run(round_seconds=40)) == {"j0": 50.0, "j1": 90.0, "j2": 130.0}


def test_what_does_not_end_by_the_horizon_stays_unfinished():
    world = run(horizon_seconds=70)

    assert sorted(ends(world)) == ["j0", "j1"]
    assert world.state.jobs["j2"].state is JobState.RUNNING
    assert world.now_seconds == 70


@pytest.mark.parametrize("faults", [FaultSpec(), FaultSpec(node_losses_per_hour=1)])
def test_a_policy_that_leaves_jobs_waiting_ends_the_run(faults: FaultSpec):
    world = SimulatedWorld(
        jobs=jobs(2), nodes=NODES, options_of=lambda _: OPTIONS, gpu_types=("A",), faults=faults
    )
    drive(world, lambda snapshot, memory: ([], memory))

    assert len(world.state.active) == 2


def test_unsound_decisions_are_not_carried_out():
    def greedy(snapshot, memory):
        name = snapshot.jobs.specs[0].id
        return [Start(job_id=name, option=0, placement=((0, 9),), reason="")], memory

    world = SimulatedWorld(
        jobs=jobs(1), nodes=NODES, options_of=lambda _: OPTIONS, gpu_types=("A",)
    )
    with pytest.raises(UnsoundDecisions, match="needs"):
        drive(world, greedy)
    assert not [one for one in world.log if isinstance(one, Started)]


def test_faults_lose_no_job():
    world = run(20, 2000.0, faults=FAULTS)

    kinds = {type(one) for one in world.log}
    assert {Interrupted, NodeLost, StartFailed} <= kinds
    assert len(ends(world)) == 20


def test_the_same_seed_gives_the_same_run_and_another_seed_another():
    first, again = run(20, 2000.0, faults=FAULTS), run(20, 2000.0, faults=FAULTS)
    other = run(20, 2000.0, faults=replace(FAULTS, seed=2))

    assert first.log == again.log
    assert first.log != other.log


def test_the_log_replays_to_the_same_state():
    world = run(20, 2000.0, faults=FAULTS, horizon_seconds=5000)
    lines = [render_event(event) for event in world.log]

    state = replay(NODES, parse_events(lines))

    state.now_seconds = world.state.now_seconds  # the clock runs on after the last event
    assert repr(state) == repr(world.state)
    assert state.free == world.state.free


def test_a_log_out_of_order_is_refused():
    state = ClusterState(tuple(NODES))
    state.record(NodeLost(time_seconds=5, node=0))
    with pytest.raises(DrystoneError, match="comes after"):
        state.record(NodeLost(time_seconds=4, node=1))


def test_what_is_due_at_one_time_happens_in_the_order_it_was_planned_jobs_first():
    maker = SnapshotMaker(("A",), lambda _: OPTIONS, StartupCost())
    time = VirtualTime(ClusterState(list(NODES)), maker)
    happened: list[str] = []
    for name in "abc":
        time.later(1.0, lambda _, name: happened.append(name), name)
    time.later(0.5, lambda _: happened.append("first"))
    jobs = [replace(job(name), submit_seconds=1.0) for name in ("j1", "j2")]
    time.expect(jobs, lambda _, spec: happened.append(spec.id))

    assert time.next_seconds() == 0.5
    time.run_until(0.9)
    assert happened == ["first"]
    time.run_until(1.0)
    assert happened == ["first", "j1", "j2", "a", "b", "c"]
    assert time.next_seconds() == math.inf


def test_speeds_may_be_other_than_they_seem():
    seen = ends(run(20, faults=FaultSpec(speed_error_share=0.5)))

    alone = seen["j0"]
    assert 100 / (2.0 * 1.5) <= alone <= 100 / (2.0 * 0.5)
    assert alone != 50.0


def test_an_unknown_length_is_guessed_from_what_was_done():
    lengths = []

    def watch(snapshot, memory):
        lengths.append(snapshot.jobs.remaining_samples.tolist())
        return fifo(snapshot, memory)

    world = SimulatedWorld(
        jobs=[job("long", 1e6), replace(job("next"), submit_seconds=20_000.0)],
        nodes=NODES,
        options_of=lambda _: OPTIONS,
        gpu_types=("A",),
        knows_lengths=False,
    )
    drive(world, watch)

    assert lengths[0] == [2.0 * 3600]
    assert lengths[1] == [40_000.0, 2.0 * 3600]


def test_wrong_faults_are_refused():
    with pytest.raises(InvalidSpec):
        FaultSpec(failed_start_share=1.0)


def test_a_run_that_keeps_its_snapshots_goes_like_one_that_does_not():
    kept = []

    def keep(snapshot, memory):
        kept.append(snapshot.complete())
        return fifo(snapshot, memory)

    def world_of() -> SimulatedWorld:
        return SimulatedWorld(
            jobs=jobs(10, 200.0),
            nodes=NODES,
            options_of=lambda _: OPTIONS,
            gpu_types=("A",),
            faults=FAULTS,
        )

    one, other = world_of(), world_of()
    drive(one, keep)
    drive(other, fifo)

    assert one.log == other.log
    fresh = iter(kept)

    def compare(snapshot, memory):
        before = next(fresh)
        assert before.jobs.option.tolist() == snapshot.jobs.option.tolist()
        assert before.jobs.remaining_samples.tolist() == snapshot.jobs.remaining_samples.tolist()
        assert before.nodes.free.tolist() == snapshot.nodes.free.tolist()
        return fifo(snapshot, memory)

    drive(world_of(), compare)


def test_garbage_is_looked_for_as_often_as_before_once_a_run_is_over():
    before = gc.get_threshold()

    with rare_collection():
        assert gc.get_threshold()[0] >= NEW_OBJECTS

    assert gc.get_threshold() == before
