"""The rest of a job with phases: the recursion against every path, one by one."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from drystone.describe.cluster import make_nodes
from drystone.describe.job import JobSpec
from drystone.describe.option import OptionSet
from drystone.run.simulate.world import SimulatedWorld
from drystone.schedule.budget.blocks import weigh_rest
from drystone.schedule.snapshot import Snapshot, StartupCost

STARTUP_SECONDS = 40.0


def a_snapshot(seed: int, *, phase: int, running: bool) -> tuple[Snapshot, OptionSet]:
    """A job of four phases with three options, somewhere in one of the phases."""
    random = np.random.default_rng(seed)
    speeds = [random.uniform(1, 6, 3) for _ in range(4)]
    ends = np.cumsum(random.uniform(50, 600, 4))
    options = OptionSet(
        counts=np.array([[1], [2], [4]]),
        samples_per_second=speeds[0],
        memory_bytes=np.zeros(3),
        phase_ends_samples=tuple(ends[:3].tolist()),
        later_speeds=tuple(speeds[1:]),
    )
    # The job ends in the last phase, before that would.
    total = float(ends[2] + 0.6 * (ends[3] - ends[2]))
    world = SimulatedWorld(
        jobs=[JobSpec(id="j", submit_seconds=0.0, model="m", total_samples=total)],
        nodes=make_nodes("A", count=1, gpus_per_node=4),
        options_of=lambda _: options,
        gpu_types=["A"],
        startup=StartupCost(seconds_per_gpu=STARTUP_SECONDS, most_seconds=STARTUP_SECONDS),
    )
    if running or phase:
        world.launch("j", 1, ((0, 2),), "")
        for _ in range(phase):
            world.advance()
    if phase and not running:
        world.stop("j", "")
    return world.observe(), options


def brute_force(
    snapshot: Snapshot, options: OptionSet, price: np.ndarray, multiplier: float, first: int
) -> float:
    """The least cost of all sequences that begin with an option, without its start."""
    (spec,), rate = snapshot.jobs.specs, 1 + multiplier * price
    done = spec.total_samples - float(snapshot.jobs.remaining_samples[0])
    ends = [min(options.phase_end_samples(phase), spec.total_samples) for phase in range(4)]
    work = np.clip(np.diff([done, *np.maximum(ends, done)]), 0, None)
    left = [phase for phase in range(4) if work[phase] > 1e-9]
    least = np.inf
    for path in product(range(3), repeat=len(left) - 1):
        cost, now = 0.0, first
        for phase, option in zip(left, (first, *path), strict=True):
            if option != now:
                cost += STARTUP_SECONDS * rate[option]
            now = option
            cost += work[phase] / options.speeds(phase)[option] * rate[option]
        least = min(least, cost)
    return least


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("phase", "running"), [(0, False), (0, True), (2, False), (2, True)])
def test_the_rest_of_a_job_is_the_best_of_all_paths(seed, phase, running):
    snapshot, options = a_snapshot(seed, phase=phase, running=running)
    price, multiplier = np.array([1.0, 2.0, 4.0]), 0.3

    rest = weigh_rest(snapshot, price[None], multiplier, snapshot.startup_seconds)

    for option in range(3):
        wanted = brute_force(snapshot, options, price, multiplier, option)
        restart = STARTUP_SECONDS * (1 + multiplier * price[option])
        assert rest.start[0, option] == pytest.approx(wanted + restart)
    if running:
        assert rest.stay[0] == pytest.approx(brute_force(snapshot, options, price, multiplier, 1))
    else:
        assert np.isnan(rest.stay[0])


def test_an_option_without_a_price_cannot_be_started_and_is_never_changed_to():
    snapshot, options = a_snapshot(0, phase=0, running=False)

    rest = weigh_rest(snapshot, np.array([[1.0, np.inf, np.inf]]), 0.3, snapshot.startup_seconds)

    seconds = 0.0
    begin = 0.0
    for phase in range(4):
        stop = min(options.phase_end_samples(phase), snapshot.jobs.specs[0].total_samples)
        seconds += (stop - begin) / float(options.speeds(phase)[0])
        begin = stop
    assert rest.start[0, 0] == pytest.approx(1.3 * (seconds + STARTUP_SECONDS))
    assert np.isinf(rest.start[0, 1:]).all()
