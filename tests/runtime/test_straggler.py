"""Who is slower than planned, and what is done about it."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from command_cases import a_plan, events, fork, join

from drystone.plan.plan import save_plan
from drystone.run.train.step_report import (
    LEAST_GAIN,
    WARM_UP_STEPS,
    WINDOW_STEPS,
    Straggler,
    StragglerWatch,
    better_batches,
)

pytestmark = [pytest.mark.torch]

SETTLED = WARM_UP_STEPS + WINDOW_STEPS


def watched(*spans: tuple[int, tuple[float, ...]], batches=(2, 6, 0)) -> StragglerWatch:
    """Steps in which a sample takes so long on each rank."""
    watch = StragglerWatch(len(batches))
    for steps, each in spans:
        for _ in range(steps):
            watch.see(batches, [batch * one for batch, one in zip(batches, each, strict=True)])
    return watch


def test_a_rank_that_slows_down_is_named_with_its_factor():
    assert watched((SETTLED, (3, 1, 1))).stragglers() == ()
    slower = watched((SETTLED, (3, 1, 1)), (WINDOW_STEPS, (3, 2.5, 1)))

    assert slower.stragglers() == (Straggler(1, 2.5),)


def test_nobody_is_named_for_one_slow_step_or_when_all_slow_down_or_before_it_is_settled():
    assert watched((SETTLED, (3, 1, 1)), (1, (3, 9, 1)), (2, (3, 1, 1))).stragglers() == ()
    assert watched((SETTLED, (3, 1, 1)), (WINDOW_STEPS, (6, 2, 2))).stragglers() == ()
    assert watched((WARM_UP_STEPS, (30, 10, 1)), (WINDOW_STEPS, (3, 1, 1))).stragglers() == ()
    assert watched((1, (3, 1, 1))).sample_seconds == [0.0, 0.0, 0.0]


@given(
    batches=st.lists(st.integers(0, 12), min_size=2, max_size=5),
    seconds=st.lists(st.floats(0.1, 10), min_size=5, max_size=5),
)
def test_better_batches_are_better_and_the_same_samples(batches, seconds):
    seconds = seconds[: len(batches)]
    found = better_batches(batches, seconds)
    working = [rank for rank, batch in enumerate(batches) if batch]

    def longest(some):
        return max((some[rank] * seconds[rank] for rank in working), default=0.0)

    if found is not None:
        assert sum(found) == sum(batches)
        assert all(found[rank] == 0 for rank in range(len(batches)) if rank not in working)
        assert longest(found) <= (1 - LEAST_GAIN) * longest(batches) + 1e-9
    elif len(working) == 2 and sum(batches) <= 12:  # nothing that one could have found either
        a, b = working
        total = batches[a] + batches[b]
        best = min(max(n * seconds[a], (total - n) * seconds[b]) for n in range(total + 1))
        assert best > (1 - LEAST_GAIN) * longest(batches) - 1e-9


def test_a_pace_that_is_not_known_moves_nothing():
    assert better_batches((2, 6), (0.0, 1.0)) is None
    assert better_batches((8, 0), (9.0, 0.0)) is None


@pytest.mark.slow
def test_an_emulated_straggler_is_named_and_loses_samples_without_a_restart(tmp_path: Path):
    save_plan(a_plan([(4, 1, 0.5), (4, 1, 0.5)]), tmp_path / "plan.json")
    slows = {"speed": 1.0, "slows_at_step": SETTLED + 2, "slows_to": 0.3333}
    devices = {
        "ranks": [{"speed": 1.0}, slows],
        "seconds": {"forward": 0.02, "backward": 0.06, "head": 0.02},
    }
    command = [str(tmp_path / "plan.json"), "--steps", str(SETTLED + 14), "--rebalance"]

    codes = join(fork(command, 2, tmp_path, DRYSTONE_EMULATE=json.dumps(devices)), seconds=300)

    assert codes == [0, 0]
    steps = [one for one in events((tmp_path / "0.out").read_text()) if one["event"] == "step"]
    assert all(one["batches"] == [4, 4] for one in steps[:SETTLED])
    assert steps[-1]["batches"] in ([6, 2], [5, 3])
    named = [one["stragglers"] for one in steps if one["stragglers"]]
    assert named[-1][0]["rank"] == 1
    assert named[-1][0]["factor"] == pytest.approx(3.0, rel=0.35)  # a busy machine slows both
