"""The range of memory estimates is what the published runs say, and says where it is from."""

import re

import numpy as np
import pytest

from drystone.estimate.learned.residuals import (
    HIGH_QUANTILE,
    LOW_QUANTILE,
    memory_range,
    memory_residuals,
)
from drystone.observe.check.accuracy import MEMORY_TABLE, check_memory
from drystone.observe.check.runs import load_runs


def test_the_range_holds_the_estimate_itself():
    low, high = memory_range()

    assert 0.5 < low < 1 < high < 1.5


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
