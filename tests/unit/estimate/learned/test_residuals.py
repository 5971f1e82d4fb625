"""The range of memory estimates is what the published runs say, and says where it is from."""

import re

import numpy as np
import pytest

from drystone.estimate.launchers import LAUNCHERS
from drystone.estimate.learned.residuals import (
    HIGH_QUANTILE,
    LOW_QUANTILE,
    exceeds_share,
    family_of,
    likely_range,
    memory_range,
    memory_residuals,
    residual_cells,
)
from drystone.observe.check.accuracy import MEMORY_TABLE, check_memory
from drystone.observe.check.runs import load_runs


def test_the_range_holds_the_estimate_itself():
    low, high = memory_range()

    assert 0.5 < low < 1 < high < 1.5


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("is_full", [True, False])
def test_every_launcher_has_a_range_around_its_estimate(launcher, is_full):
    low, high = likely_range(launcher, is_full=is_full, reading="allocated")

    assert 0.5 <= low < 1 < high <= 2
    assert family_of(launcher) in {"megatron", "hugging-face", "torch"}


def test_a_source_that_is_left_out_says_nothing():
    with_it, without = (
        likely_range("torchtitan", is_full=True, reading="reserved", without=source)
        for source in ("", "torchtitan")
    )

    assert with_it != without
    assert {cell.source for cell in residual_cells()} > {"torchtitan", "mcoregold"}


def test_the_risk_falls_with_room_and_never_vanishes():
    rooms = (0.5, 0.9, 1.0, 1.1, 1.5, 10.0)
    risks = [
        exceeds_share("megatron-te", is_full=True, reading="allocated", room=room) for room in rooms
    ]

    assert risks == sorted(risks, reverse=True)
    assert risks[0] > 0.9
    assert 0 < risks[-1] < 0.1
    _, high = likely_range("megatron-te", is_full=True, reading="allocated")
    at_end = exceeds_share("megatron-te", is_full=True, reading="allocated", room=high)
    assert at_end == pytest.approx(0.1, abs=0.02)


def test_the_range_says_where_it_comes_from():
    residuals = memory_residuals()

    assert residuals.table.endswith(MEMORY_TABLE.name)
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", residuals.date)


@pytest.mark.slow
def test_the_range_is_what_the_published_runs_give():
    """After a change of the memory model or the table: benchmarks/learn_residuals.py --write."""
    report = check_memory(load_runs(MEMORY_TABLE, measure="memory"))
    ratios = [run.measured / run.estimated for run in report.first_readings]
    low, high = np.quantile(ratios, [LOW_QUANTILE, HIGH_QUANTILE])

    residuals = memory_residuals()
    assert residuals.num_runs == len(ratios)
    assert residuals.low == pytest.approx(low, abs=0.001)
    assert residuals.high == pytest.approx(high, abs=0.001)
