import math
from dataclasses import replace

import pytest

import drystone
from drystone.describe.recipe import Tuning
from drystone.plan.checkpoints import checkpoint_bytes, checkpoint_interval
from drystone.units import HOUR_SECONDS


@pytest.fixture(scope="module")
def plan():
    return drystone.plan("llama-3-8b", "8xA100-80G").plans[0]


def test_saving_as_often_as_is_best_loses_least():
    small = drystone.plan("gpt2", "8xA100-80G").plans[0]
    found = checkpoint_interval(replace(small, step_seconds=0.5))

    def lost_share(num_steps: float) -> float:
        """Of the time: saves, and half an interval for each failure."""
        interval = 0.5 * num_steps
        return found.copy_seconds / interval + interval / 2 / found.failure_seconds

    # Where no limit is reached, nothing nearby is better (first order, as in Young's paper).
    assert 30 < 0.5 * found.num_steps < 1800
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert lost_share(found.num_steps) <= lost_share(factor * found.num_steps)


def test_long_steps_do_not_write_a_checkpoint_after_each(plan):
    slow = checkpoint_interval(replace(plan, step_seconds=26.0))

    assert slow.checkpoint_bytes == pytest.approx(8.03e9 * 12, rel=0.01)
    assert slow.num_steps > 10
    assert slow.write_seconds / (26.0 * slow.num_steps) <= 0.25


def test_many_gpus_fail_often_and_few_seldom(plan):
    stage = plan.stages[0]
    many = replace(stage, ranks=tuple(replace(rank, count=4096) for rank in stage.ranks))
    often = checkpoint_interval(replace(plan, stages=(many,)))
    seldom = checkpoint_interval(plan)

    assert often.failure_seconds < 24 * HOUR_SECONDS < seldom.failure_seconds
    assert seldom.failure_seconds < 168 * HOUR_SECONDS


def test_what_is_frozen_is_saved_without_moments(plan):
    adapters = replace(plan, recipe=replace(plan.recipe, tuning=Tuning.LORA))

    assert checkpoint_bytes(adapters) == pytest.approx(8.03e9 * 2, rel=0.05)
    assert checkpoint_bytes(adapters) > 8.03e9 * 2


def test_the_interval_is_told_in_words(plan):
    words = checkpoint_interval(plan).describe(plan.step_seconds)

    assert "96.4 GB" in words
    assert math.isfinite(float(words.split("(")[1].split(" min")[0].replace(",", "")))
