"""A job that cannot end within its money or time is refused before it waits."""

import math

import numpy as np
import pytest

from drystone.describe.job import JobSpec
from drystone.describe.option import OptionSet
from drystone.errors import NothingFits
from drystone.schedule.limits import options_within

TYPES = ("A100", "T4")
PRICES = {"A100": 3.6, "T4": 0.36}
OPTIONS = OptionSet(  # 3,600 samples: 6 min for $0.36, 3 min for $0.36, 1 h for $0.36; padding
    counts=np.array([[1, 0], [2, 0], [0, 1], [0, 0]]),
    samples_per_second=np.array([10.0, 20.0, 1.0, 0.0]),
    memory_bytes=np.zeros(4),
)


def spec(**more: float) -> JobSpec:
    return JobSpec(id="1", submit_seconds=0.0, model="m", total_samples=3600.0, **more)


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        ({}, [True, True, True, False]),
        ({"max_cost_dollars": 0.37}, [True, True, True, False]),
        ({"max_duration_seconds": 400.0}, [True, True, False, False]),
        ({"max_duration_seconds": 200.0, "max_cost_dollars": 0.37}, [False, True, False, False]),
    ],
)
def test_what_fits_the_limits_is_left(limits, left):
    assert options_within(spec(**limits), OPTIONS, TYPES, PRICES).tolist() == left


@pytest.mark.parametrize(
    ("limits", "prices", "told"),
    [
        ({"max_cost_dollars": 0.004}, PRICES, "max_cost is $0.0040.*takes about $0.36"),
        ({"max_duration_seconds": 60.0}, PRICES, "max_duration is 1 min.*takes about 3 min"),
        (
            {"max_duration_seconds": 60.0, "max_cost_dollars": 0.01},
            {"A100": 3.6},
            "within its money takes about 1 h",
        ),
    ],
)
def test_nothing_left_is_told_with_the_numbers(limits, prices, told):
    with pytest.raises(NothingFits, match=told.replace("$", r"\$")):
        options_within(spec(**limits), OPTIONS, TYPES, prices)


def test_without_prices_nothing_costs_anything():
    left = options_within(spec(max_cost_dollars=1e-9), OPTIONS, TYPES, {})

    assert left.tolist() == [True, True, True, False]
    assert math.isinf(spec().max_cost_dollars)
