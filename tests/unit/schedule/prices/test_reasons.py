"""Reasons say what was compared and by how much: each number in them is checked."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny import job, node, option_set, snapshot

from drystone.schedule.decision import Move, Preempt, Resize, Start
from drystone.schedule.prices.patience import KEEP_SECONDS
from drystone.schedule.prices.policy import PricesMemory, prices
from drystone.schedule.prices.reasons import why_moved, why_no_node
from drystone.schedule.prices.worth import worth_of_options
from drystone.schedule.snapshot import StartupCost

TWO_TYPES = [node("a", "A", 2), node("t", "T", 2)]
CHOICE = option_set(((2, 0), 8.2), ((0, 2), 2.0))
LATER = KEEP_SECONDS + 1


def decide(seen, memory=None):
    decisions, after = prices(seen, memory)
    kinds = Start | Resize | Move | Preempt
    changes = [decision for decision in decisions if isinstance(decision, kinds)]
    return {decision.job_id: decision for decision in changes}, after


def test_a_start_is_compared_with_the_best_other_option():
    found, _ = decide(snapshot(TWO_TYPES, [job("one")], CHOICE))

    assert found["one"].reason == (
        "2 A are 4.1 times as fast as 2 T, and nobody else is short of such GPUs"
    )
    assert found["one"].numbers["times_as_fast"] == pytest.approx(4.1)


def test_prices_in_a_reason_are_those_of_the_decision():
    jobs = [job(f"job-{index}", 1000.0 * (index + 1)) for index in range(4)]
    found, after = decide(snapshot(TWO_TYPES, jobs, CHOICE))

    paid = {"2 A": 2 * after.prices[0], "2 T": 2 * after.prices[1]}
    assert found
    for decision in found.values():
        match = re.fullmatch(
            r"(2 [AT]) (?:are|have) .* (2 [AT]) for (?:(.*) times|(.*)%|the same).*price",
            decision.reason,
        )
        assert match, decision.reason
        told = float(match[3]) if match[3] else float(match[4] or 100) / 100
        assert told == pytest.approx(paid[match[1]] / paid[match[2]], rel=0.02)


def test_one_option_is_said_to_be_the_only_one():
    found, _ = decide(snapshot([node("a", "A", 2)], [job("one")], option_set(((2,), 1.0))))

    assert found["one"].reason == "it has no other option now"


def test_a_resize_says_how_much_sooner_the_job_ends():
    seen = snapshot(
        TWO_TYPES,
        [job("one", 4000.0)],
        CHOICE,
        {"one": (1, ((1, 2),))},
        startup=StartupCost(seconds_per_gpu=15.0, most_seconds=30.0),
        now_seconds=LATER,
    )
    found, _ = decide(seen, PricesMemory(prices=np.zeros(2)))

    left = float(seen.jobs.remaining_samples[0])
    saved = left / 2.0 - left / 8.2 - 30.0
    assert isinstance(found["one"], Resize)
    assert "4.1 times as fast as 2 T" in found["one"].reason
    assert f"it ends {saved / 60:.3g} min sooner, restart of 30 s included" in found["one"].reason


def test_a_job_that_loses_its_gpus_is_told_to_whom_and_at_what_price():
    long, short = job("long", 1e6), job("short", 500.0)
    running = {"long": (0, ((0, 2),))}
    options = option_set(((2,), 2.0))
    seen = snapshot([node("a", "A", 2)], [long, short], options, running, now_seconds=LATER)
    found, after = decide(seen)

    value = found["long"].numbers["value"]
    told = re.fullmatch(
        r"its 2 A cost (.*) times what they are worth to it at these prices: job short gets them",
        found["long"].reason,
    )
    assert isinstance(found["long"], Preempt)
    assert told, found["long"].reason
    assert float(told[1]) == pytest.approx(2 * after.prices[0] / value, rel=0.01)
    assert float(told[1]) > 1


def test_other_causes_name_what_they_are_about():
    seen = snapshot(TWO_TYPES, [job("one")], CHOICE)
    worth = worth_of_options(seen, np.array([[8.2, 2.0]]), np.ones(1), np.zeros(2))

    assert why_no_node(seen, worth, 0, 0, 1) == (
        "2 A would be 4.1 times as fast as 2 T, and find no place together now"
    )
    assert why_moved(seen, 0, 6.0, 2.0) == (
        "it makes room for job one, which gains 3 times what moving costs"
    )


def test_situations_that_differ_have_reasons_that_differ():
    jobs = [job(f"job-{index}", 900.0 * (index + 1)) for index in range(3)]
    alone, _ = decide(snapshot(TWO_TYPES, jobs[:1], CHOICE))
    crowd, _ = decide(snapshot(TWO_TYPES, jobs, CHOICE))
    slow, _ = decide(snapshot(TWO_TYPES, jobs[:1], option_set(((2, 0), 3.0), ((0, 2), 2.0))))

    told = {change.reason for found in (alone, crowd, slow) for change in found.values()}
    assert len(told) == 4
