"""What is left of jobs of unknown length: learned from those that are gone."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from tiny import job, node, option_set, snapshot

from drystone.run.events import Finished, Started
from drystone.run.loop import drive
from drystone.run.simulate.world import SimulatedWorld
from drystone.schedule.belief import LengthMemory, guess_remaining, update_lengths
from drystone.schedule.prices.policy import prices

NODES = [node("a0")]
OPTIONS = option_set(([1], 1.0), ([4], 2.0))


def seen(jobs, speeds, running=None):
    found = snapshot(NODES, jobs, OPTIONS, running=running)
    columns = {"measured_speeds": np.array(speeds), "remaining_samples": np.full(len(jobs), 7200.0)}
    return replace(found, jobs=replace(found.jobs, **columns), knows_lengths=False)


def test_what_was_done_is_counted_from_the_speeds_seen():
    first = update_lengths(seen([job("x")], [2.0], {"x": (1, ((0, 4),))}), None, 0.0)

    then = update_lengths(seen([job("x")], [1.0], {"x": (0, ((0, 1),))}), first, 100.0)

    assert then.seen["x"].done_samples == pytest.approx(200.0)


def test_a_job_that_is_gone_tells_how_long_its_kind_is():
    before = update_lengths(seen([job("x"), job("y")], [2.0, 0.0]), None, 0.0)
    ran = update_lengths(seen([job("x"), job("y")], [2.0, 0.0]), before, 500.0)

    after = update_lengths(seen([job("y")], [0.0]), ran, 10.0)

    assert after.totals == {("m", 1): (pytest.approx(1010.0),)}
    assert after.all_seconds == pytest.approx((505.0,))


def test_the_guess_is_what_others_had_left_at_that_point():
    """Of three, two did more than 100: 300 and 500 on average are left 300."""
    memory = update_lengths(seen([job("y")], [0.0]), None, 0.0)
    done = replace(memory.seen["y"], done_samples=100.0)
    memory = LengthMemory(seen={"y": done}, totals={("m", 1): (50.0, 300.0, 500.0)})

    [left] = guess_remaining(seen([job("y")], [0.0]), memory)

    assert left == pytest.approx((2 * 300.0 + 7200.0) / 3)


def test_without_history_the_snapshot_s_guess_stands():
    now = seen([job("y")], [0.0])

    assert guess_remaining(now, update_lengths(now, None, 0.0)) == pytest.approx([7200.0])


def test_a_kind_that_was_short_before_goes_first():
    """One GPU; two short jobs have shown how long their kind is when a third one comes."""
    kinds = {"short": option_set(([1], 1.0)), "long": option_set(([1], 1.0))}
    jobs = [
        replace(job(name, samples), model=model, submit_seconds=submit)
        for name, model, samples, submit in (
            ("s0", "short", 100.0, 0.0),
            ("s1", "short", 100.0, 200.0),
            ("l0", "long", 9000.0, 400.0),
            ("s2", "short", 100.0, 8000.0),
        )
    ]
    world = SimulatedWorld(
        jobs=jobs,
        nodes=[node("a0", num_gpus=1)],
        options_of=lambda one: kinds[one.model],
        gpu_types=("A",),
        knows_lengths=False,
    )
    drive(world, prices)

    ends = [one.job_id for one in world.log if isinstance(one, Finished)]
    assert ends == ["s0", "s1", "s2", "l0"]
    assert sum(isinstance(one, Started) for one in world.log) == 5
