"""Where the GPUs of an option would come from, and what they cost."""

import math

import pytest

from drystone.service.supply import Supply

SUPPLY = Supply(
    free={"T4": 2, "A100": 0, "H100": 0},
    coming={"A100": 8},
    rentable={"A100": 16.0},
    prices={"T4": 0.5, "A100": 2.0},
)


@pytest.mark.parametrize(
    ("counts", "where"),
    [
        ([("T4", 2)], "free"),
        ([("T4", 3)], "taken"),
        ([("A100", 8)], "on its way"),
        ([("T4", 1), ("A100", 8)], "on its way"),
        ([("A100", 24)], "to rent"),
        ([("T4", 2), ("A100", 9)], "to rent"),
        ([("A100", 25)], "taken"),
        ([("H100", 1)], "taken"),
    ],
)
def test_where_gpus_come_from(counts, where):
    assert SUPPLY.where(counts) == where


def test_prices_add_up_and_are_not_guessed():
    assert SUPPLY.dollars_per_hour([("T4", 2), ("A100", 4)]) == 9.0
    assert math.isnan(SUPPLY.dollars_per_hour([("H100", 1)]))
