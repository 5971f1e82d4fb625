"""State goes where there is room, as evenly as room allows."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from drystone.errors import NothingFits
from drystone.plan.uneven.assignment import state_shares

rooms = st.lists(st.integers(0, 10**12), min_size=1, max_size=40)


@given(rooms, st.integers(1, 10**13))
def test_shares_sum_to_one_and_fit(room: list[int], state_bytes: int):
    assume(sum(room) >= state_bytes)
    shares = state_shares(room, state_bytes=state_bytes)

    assert shares.sum() == pytest.approx(1, abs=1e-12)
    assert (shares >= 0).all()
    assert (shares * state_bytes <= np.array(room) * (1 + 1e-12)).all()


@given(rooms, st.integers(1, 10**13))
def test_who_holds_less_than_the_most_is_full(room: list[int], state_bytes: int):
    assume(sum(room) >= state_bytes)
    held = state_shares(room, state_bytes=state_bytes) * state_bytes

    below = held < held.max() * (1 - 1e-9)
    assert held[below] == pytest.approx(np.array(room)[below])


@given(st.integers(1, 50), st.integers(1, 10**12))
def test_shares_are_even_where_even_shares_fit(num_ranks: int, state_bytes: int):
    room = np.full(num_ranks, state_bytes // num_ranks + 1)
    shares = state_shares(room, state_bytes=state_bytes)

    assert (shares == shares[0]).all()


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 5)), min_size=1, max_size=8))
def test_grouped_ranks_hold_what_single_ones_hold(groups: list[tuple[int, int]]):
    room, counts = (np.array(column) for column in zip(*groups, strict=True))
    state_bytes = 0.7 * float(room @ counts)
    assume(state_bytes > 0)
    grouped = state_shares(room, state_bytes=state_bytes, num_ranks=counts)
    single = state_shares(np.repeat(room, counts), state_bytes=state_bytes)

    assert np.repeat(grouped, counts) == pytest.approx(single)


def test_all_room_may_be_needed():
    assert state_shares([1, 2, 5], state_bytes=8).tolist() == [1 / 8, 2 / 8, 5 / 8]


def test_no_state_is_shared_evenly():
    assert state_shares([0, 5], state_bytes=0, num_ranks=[1, 3]).tolist() == [0.25, 0.25]


def test_too_little_room_is_refused():
    with pytest.raises(NothingFits, match="2 bytes larger"):
        state_shares([1, 2], state_bytes=5)
