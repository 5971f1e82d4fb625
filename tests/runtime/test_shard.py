"""Cuts: everything held once, shares kept, as many units even as the shares allow."""

from itertools import pairwise
from math import prod

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from drystone.errors import InvalidSpec
from drystone.run.train.checkpoint.slices import interval_boxes
from drystone.run.train.collectives import Form, Wire, choose_gather, choose_reduce
from drystone.run.train.uneven.cuts import (
    ALIGNED_ELEMENTS,
    cut_by_shares,
    cut_units,
    unit_size,
)
from drystone.run.train.uneven.shard import Unit

pytestmark = pytest.mark.torch

shares = st.lists(st.one_of(st.just(0.0), st.floats(0.01, 1.0)), min_size=1, max_size=8).filter(
    lambda some: sum(some) > 0
)
sizes = st.lists(st.integers(1, 5000), min_size=1, max_size=12)


@given(size=st.integers(0, 5000), shares=shares)
def test_cuts_by_shares_cover_a_unit_in_order(size: int, shares: list[float]):
    cuts = cut_by_shares(size, shares)

    assert (cuts[0], cuts[-1], len(cuts)) == (0, size, len(shares) + 1)
    assert list(cuts) == sorted(cuts)
    for (start, end), share in zip(pairwise(cuts), shares, strict=True):
        assert abs((end - start) - size * share / sum(shares)) <= 2 * ALIGNED_ELEMENTS
        assert share > 0 or start == end
        assert start == size or start % ALIGNED_ELEMENTS == 0  # 16 bytes in the narrowest dtype


@given(sizes=sizes, shares=shares)
def test_every_rank_holds_its_share_of_the_whole(sizes: list[int], shares: list[float]):
    cuts = cut_units(sizes, shares)

    held = [sum(one[rank + 1] - one[rank] for one in cuts) for rank in range(len(shares))]
    rounding = len(sizes) * (len(shares) + 2) * ALIGNED_ELEMENTS
    for mine, share in zip(held, shares, strict=True):
        assert abs(mine - sum(sizes) * share / sum(shares)) <= rounding
    for one, size in zip(cuts, sizes, strict=True):
        assert size <= one[-1] < size + len(shares) * ALIGNED_ELEMENTS


def test_as_many_units_stay_even_as_the_smallest_share_allows():
    cuts = cut_units([100] * 10, [0.1, 0.45, 0.45])

    is_even = [len({b - a for a, b in pairwise(one)}) == 1 for one in cuts]
    assert is_even == [True] * 2 + [False] * 8
    assert all(len({b - a for a, b in pairwise(one)}) == 1 for one in cut_units([7, 9], [1, 1]))


def test_shares_that_hold_nothing_are_refused():
    for wrong in ([], [0.0, 0.0], [1.0, -0.5]):
        with pytest.raises(InvalidSpec):
            cut_units([10], wrong)


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    ends=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_the_boxes_of_an_interval_are_its_elements_in_order(shape, ends):
    size = prod(shape)
    start, end = sorted(round(size * one) for one in ends)
    numbers = torch.arange(size).view(shape)

    boxes = interval_boxes(shape, start, end)

    found = []
    for box in boxes:
        spans = zip(box.offsets, box.lengths, strict=True)
        part = numbers[tuple(slice(at, at + length) for at, length in spans)].flatten().tolist()
        assert part[0] == box.start
        assert len(part) == box.size
        found += part
    assert found == list(range(start, end))
    assert len(boxes) <= 2 * len(shape) - 1


def test_the_form_follows_backend_evenness_and_size():
    large = 1 << 20
    assert choose_gather([large] * 4, 4, "nccl") is Form.EVEN
    assert choose_gather([1, 2], 4, "nccl") is Form.PADDED
    # Padding a large layer would take as much memory again.
    assert choose_gather([large, 3 * large], 4, "nccl") is Form.GROUPED
    assert choose_gather([large, large, 2 * large, 4 * large], 2, "nccl") is Form.GROUPED
    assert choose_gather([large, 3 * large], 4, "gloo") is Form.GROUPED
    assert choose_gather([1, 2], 4, "gloo") is Form.GROUPED
    assert choose_reduce([large, large], 4, "gloo") is Form.SPLIT
    assert choose_reduce([large, large], 4, "nccl") is Form.EVEN
    assert choose_reduce([0, large, large, 6 * large], 4, "nccl") is Form.GROUPED


def test_every_parameter_and_every_piece_begins_at_a_multiple_of_16_bytes():
    parameters = [(str(size), nn.Parameter(torch.ones(size))) for size in (5, 24, 3, 17)]
    wire = Wire()
    unit = Unit(
        "block 0", parameters, cut_units([unit_size(one for _, one in parameters)], [1.0])[0],
        wire=wire, device=torch.device("cpu"), dtype=torch.bfloat16,
        initial_value=lambda _, one, first, last: one.detach().reshape(-1)[first:last],
    )  # fmt: skip
    unit.gather()

    for _, parameter in parameters:
        assert parameter.storage_offset() * parameter.element_size() % 16 == 0
        assert torch.equal(parameter.float(), torch.ones(parameter.shape))
    for owned in unit.owned:
        assert owned.value.storage_offset() * owned.value.element_size() % 16 == 0
