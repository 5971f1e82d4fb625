"""What is left of jobs of unknown length: learned from those that are gone."""

import math
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

    assert set(after.ended) == {(), ("m",), ("m", 1)}
    for counts in after.ended.values():  # 505 s at its fastest: between 2 ** 8.5 and 2 ** 9
        assert counts.sum() == counts[18] == 1.0


def lived(*seconds):
    """A table of jobs that ended after so long."""
    memory = update_lengths(seen([job("y")], [0.0]), None, 0.0)
    ends = np.zeros(50)
    for length in seconds:
        ends[math.ceil(2 * math.log2(length))] += 1
    return replace(memory, ended=dict.fromkeys(memory.seen["y"].keys, ends))


def having_done(memory, seconds):
    """The same when the job has done so much, and nothing was guessed yet."""
    job_now = replace(memory.seen["y"], done_samples=2.0 * seconds, left_seconds=0.0)
    return replace(memory, seen={"y": job_now})


def left_seconds(memory):
    """At the fastest, which does two samples a second."""
    return float(guess_remaining(seen([job("y")], [0.0]), memory)[0].samples[0] / 2.0)


def test_a_job_is_taken_to_be_as_long_as_those_of_its_kind():
    assert left_seconds(lived(*[600.0] * 20)) == pytest.approx(512.0, rel=0.5)
    assert left_seconds(lived(*[60_000.0] * 20)) == pytest.approx(65_536.0, rel=0.5)


def test_one_long_job_does_not_make_all_look_long():
    """On average 1,045 s are left; but nine of ten will have ended after a minute."""
    assert left_seconds(lived(*[60.0] * 18, *[10_000.0] * 2)) < 200.0


def test_who_has_outlived_the_short_ones_is_one_of_the_long():
    mixed = lived(*[60.0] * 18, *[10_000.0] * 2)

    assert left_seconds(having_done(mixed, 400.0)) > 4_000.0


def test_those_that_run_still_are_not_taken_for_short():
    """Short jobs end first: ten that ended after a minute say little beside thirty that run on."""
    names = ["y", *(f"r{at}" for at in range(30))]
    now = seen([job(name) for name in names], [0.0] * len(names))
    memory = update_lengths(now, None, 0.0)
    ended = lived(*[60.0] * 10).ended
    alone = left_seconds(lived(*[60.0] * 10))
    run_on = {
        name: replace(one, done_samples=2.0 * 3_600.0) if name != "y" else one
        for name, one in memory.seen.items()
    }

    guess, _ = guess_remaining(now, LengthMemory(seen=run_on, ended=ended))

    assert guess.samples[0] / 2.0 > 2 * alone


def test_a_guess_stands_until_it_is_wrong_by_much():
    first = guess_remaining(seen([job("y")], [0.0]), lived(*[600.0] * 20))[1]
    stood = first.seen["y"].left_seconds

    near = replace(first, ended=lived(*[600.0] * 20, *[900.0] * 4).ended)
    far = replace(first, ended=lived(*[60_000.0] * 40).ended)

    assert left_seconds(near) == stood
    assert left_seconds(far) > 8 * stood


def test_jobs_that_are_all_of_one_length_are_guessed_more_surely():
    def sharpness(memory):
        return guess_remaining(seen([job("y")], [0.0]), memory)[0].sharpness[0]

    assert sharpness(lived(*[600.0] * 40)) > sharpness(lived(*(10.0 * 2**at for at in range(12))))


def test_without_history_an_hour_is_taken_for_likely():
    now = seen([job("y")], [0.0])

    guess, _ = guess_remaining(now, update_lengths(now, None, 0.0))

    assert guess.samples[0] / 2.0 == pytest.approx(3600.0, rel=0.5)


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
