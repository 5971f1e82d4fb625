"""Layers over unlike stages against every way to divide them."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drystone.plan.groups.search import share_layers


def compositions(total: int, parts: int):
    """Every way to write `total` as `parts` numbers of at least one."""
    for cuts in itertools.combinations(range(1, total), parts - 1):
        yield np.diff((0, *cuts, total))


def brute_force(num_layers, pace, other, most):
    """(slowest, sum) of the best division; None if there is none."""
    best = None
    for layers in compositions(num_layers, len(pace)):
        if (layers > most).any():
            continue
        seconds = pace * layers + other
        key = (seconds.max(), seconds.sum())
        best = key if best is None else min(best, key)
    return best


def shared(num_layers, pace, other, most):
    """The same by the search, as the only row."""
    columns = [np.array([column], dtype=float) for column in (pace, other)]
    caps = np.array([most], dtype=np.int64)
    layers, fits = share_layers(num_layers, *columns, caps, np.ones(caps.shape, dtype=bool))
    return layers[0] if fits[0] else None


def check(num_layers, pace, other, most):
    pace, other, most = np.array(pace, float), np.array(other, float), np.array(most)
    layers = shared(num_layers, pace, other, most)
    best = brute_force(num_layers, pace, other, most)
    if best is None:
        assert layers is None
        return
    assert layers is not None
    assert layers.sum() == num_layers
    assert (layers >= 1).all()
    assert (layers <= most).all()
    seconds = pace * layers + other
    assert math.isclose(seconds.max(), best[0], rel_tol=1e-9)
    assert math.isclose(seconds.sum(), best[1], rel_tol=1e-9)


# Whole numbers make ties, as equal GPUs do.
stages = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5), st.integers(0, 9)), min_size=1,
                  max_size=4)  # fmt: skip


@given(num_layers=st.integers(1, 9), columns=stages)
def test_whole_seconds_with_ties(num_layers, columns):
    check(num_layers, *zip(*columns, strict=True))


@given(num_layers=st.integers(1, 9), columns=stages, data=st.data())
def test_any_seconds(num_layers, columns, data):
    pace = [data.draw(st.floats(0.01, 10)) for _ in columns]
    other = [data.draw(st.floats(0, 10)) for _ in columns]
    check(num_layers, pace, other, [one[2] for one in columns])


@pytest.mark.parametrize(
    ("num_layers", "most"), [(3, (1, 1)), (2, (0, 9)), (1, (9, 9)), (4, (-3, 9))]
)
def test_what_has_no_place_is_said_so(num_layers, most):
    assert shared(num_layers, [1.0, 1.0], [0.0, 0.0], most) is None


@given(rows=st.lists(stages, min_size=2, max_size=4))
def test_rows_do_not_touch_each_other(rows):
    width = max(len(row) for row in rows)
    table = np.zeros((3, len(rows), width))
    exists = np.zeros((len(rows), width), dtype=bool)
    for index, row in enumerate(rows):
        table[:, index, : len(row)] = np.array(row).T
        exists[index, : len(row)] = True

    layers, fits = share_layers(8, table[0], table[1], table[2].astype(np.int64), exists)

    for index, row in enumerate(rows):
        alone = shared(8, *(np.array(column, float) for column in zip(*row, strict=True)))
        assert fits[index] == (alone is not None)
        if alone is not None:
            assert layers[index, : len(row)].tolist() == alone.tolist()
            assert not layers[index, len(row) :].any()
