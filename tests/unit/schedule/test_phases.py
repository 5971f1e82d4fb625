"""Jobs whose speeds change as they progress."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "schedule"))
from tiny import job, node, option_set

from drystone.describe.option import OptionSet
from drystone.errors import InvalidSpec
from drystone.run.events import Finished, PhaseChanged, parse_events, render_event
from drystone.run.loop import drive
from drystone.run.simulate.faults import FaultSpec
from drystone.run.simulate.world import SimulatedWorld
from drystone.run.state import replay
from drystone.schedule.baselines.queues import fifo
from drystone.schedule.decision import Preempt, Start
from drystone.schedule.options import fastest_seconds, option_seconds
from drystone.schedule.snapshot import StartupCost

NODES = [node("a0"), node("a1")]
SETS = (
    option_set(([4], 2.0), ([8], 2.5)),
    option_set(([4], 4.0), ([8], 3.0)),
    option_set(([4], 1.0), ([8], 1.6)),
)


def phased(ends: tuple[float, ...], *sets: OptionSet) -> OptionSet:
    return replace(
        sets[0],
        phase_ends_samples=ends,
        later_speeds=tuple(later.samples_per_second for later in sets[1:]),
    )


PHASED = phased((100.0, 180.0), *SETS)


def world_of(*jobs, options=PHASED, **settings) -> SimulatedWorld:
    return SimulatedWorld(
        jobs=jobs, nodes=NODES, options_of=lambda _: options, gpu_types=("A",), **settings
    )


def ends(world: SimulatedWorld) -> dict[str, float]:
    return {one.job_id: one.time_seconds for one in world.log if isinstance(one, Finished)}


def named(name: str, samples: float):
    return job(name, samples, requested_gpu="A", requested_count=4)


@pytest.mark.parametrize(
    ("samples", "seconds"),
    [(60.0, 30.0), (100.0, 50.0), (140.0, 60.0), (180.0, 70.0), (200.0, 90.0), (900.0, 790.0)],
)
def test_every_phase_runs_at_its_own_speed(samples: float, seconds: float):
    """100 samples at 2, 80 at 4, the rest at 1: the last phase has no end."""
    world = world_of(named("j", samples))
    drive(world, fifo)

    assert ends(world) == {"j": seconds}
    assert option_seconds(PHASED, samples)[0] == seconds


def test_a_preempted_job_goes_on_in_the_phase_it_was_in():
    """Stopped at 20 s in its first phase and at 75 s in its second, 10 s without GPUs each time.

    Each start costs 4 s: 4 + 16 run (32 samples), 10 waits, 4 + 34 (to 100 samples, at 68 s), 7 at
    speed 4 (128), 10 waits, 4 + 13 (to 180, at 102 s), 20 at speed 1.
    """
    stops, begins = [20.0, 75.0], [0.0, 30.0, 85.0]

    def scripted(snapshot, memory):
        now, jobs = snapshot.now_seconds, snapshot.jobs
        runs = dict(zip((spec.id for spec in jobs.specs), jobs.is_running, strict=True))
        if "j" in runs and now in stops and runs["j"]:
            return [Preempt(job_id="j", reason="test")], memory
        if "j" in runs and now in begins and not runs["j"]:
            return [Start(job_id="j", option=0, placement=((0, 4),), reason="test")], memory
        return [], memory

    clock = [
        replace(named(f"tick{at:.0f}", 1.0), submit_seconds=at) for at in (*stops, *begins[1:])
    ]
    world = world_of(
        named("j", 200.0), *clock, startup=StartupCost(seconds_per_gpu=1.0, most_seconds=4.0)
    )
    drive(world, scripted)

    assert ends(world) == {"j": pytest.approx(122.0)}
    changes = [one for one in world.log if isinstance(one, PhaseChanged)]
    assert [(one.phase, one.done_samples) for one in changes] == [(1, 100.0), (2, 180.0)]
    assert [one.time_seconds for one in changes] == pytest.approx([68.0, 102.0])


def test_a_snapshot_shows_the_phase_s_own_speeds_and_a_decision_follows_its_end():
    seen = []

    def watch(snapshot, memory):
        row = snapshot.jobs.row_of["j"]
        seen.append((snapshot.now_seconds, snapshot.speed(row, 0), snapshot.speed(row, 1)))
        return fifo(snapshot, memory)

    drive(world_of(named("j", 200.0)), watch)

    assert seen == [(0.0, 2.0, 2.5), (50.0, 4.0, 3.0), (70.0, 1.0, 1.6)]


def test_the_log_replays_with_faults():
    faults = FaultSpec(
        seed=3, node_losses_per_hour=60, repair_seconds=20, node_slowdowns_per_hour=60,
        slow_seconds=30, failed_start_share=0.2, checkpoint_seconds=10,
    )  # fmt: skip
    world = world_of(*(named(f"j{i}", 150.0 + 40 * i) for i in range(8)), faults=faults)
    drive(world, fifo)

    assert len(ends(world)) == 8
    again = replay(NODES, parse_events([render_event(one) for one in world.log]))
    assert repr(again.jobs) == repr(world.state.jobs)


def test_the_lower_bound_takes_the_fastest_option_of_each_phase():
    assert fastest_seconds(PHASED, 200.0) == 100 / 2.5 + 80 / 4.0 + 20 / 1.6
    assert fastest_seconds(PHASED, 200.0, done_samples=140.0) == 40 / 4.0 + 20 / 1.6
    assert fastest_seconds(SETS[0], 200.0) == 80.0
    assert np.allclose(option_seconds(SETS[0], 200.0), [100.0, 80.0])


@pytest.mark.parametrize(
    ("ends_samples", "sets"),
    [
        ((), SETS),
        ((1.0,), SETS),
        ((2.0, 1.0), SETS),
        ((0.0, 1.0), SETS),
        ((1.0,), (SETS[0], option_set(([4], 1.0)))),
        ((1.0,), (SETS[0], option_set(([4], 0.0), ([8], 1.0)))),
    ],
)
def test_phases_that_cannot_be_are_refused(ends_samples, sets):
    with pytest.raises(InvalidSpec, match="phases"):
        phased(ends_samples, *sets)


def test_what_is_not_allowed_has_no_speed_in_any_phase():
    allowed = PHASED.only(np.array([True, False]))

    assert [allowed.speeds(phase).tolist() for phase in range(3)] == [[2, 0], [4, 0], [1, 0]]
    assert allowed.row(1) is None
    assert allowed.row(0, phase=1).samples_per_second == 4.0
