"""Batch and state over unlike ranks: what must hold whatever the numbers are."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from drystone.errors import InvalidSpec
from drystone.plan.uneven.assignment import Assignment, AssignmentShortfall, plan_assignment
from drystone.plan.uneven.spec import (
    AssignmentSpec,
    RankKind,
    RingLink,
    ShardRegime,
    even_or_uneven,
    ring_regimes,
)

whole = st.integers(0, 30)


def kind_of(
    *,
    num_ranks: int = 1,
    seconds_per_sample: float = 1.0,
    memory_per_sample: float = 1.0,
    usable: float = 100.0,
    largest: int = 16,
) -> RankKind:
    """Time and memory in proportion to samples; backward takes twice as long as forward."""
    sizes = np.arange(largest + 1)
    return RankKind(
        num_ranks=num_ranks,
        forward_seconds=seconds_per_sample * sizes,
        backward_seconds=2 * seconds_per_sample * sizes,
        compute_memory_bytes=memory_per_sample * sizes,
        usable_bytes=usable,
    )


def spec_of(*kinds: RankKind, **changes) -> AssignmentSpec:
    num_ranks = sum(kind.num_ranks for kind in kinds)
    given_values = {"batch": 12, "state_bytes": 10, "regimes": even_or_uneven(num_ranks)}
    return AssignmentSpec(kinds=kinds, **{**given_values, **changes})


def planned(spec: AssignmentSpec) -> Assignment:
    found = plan_assignment(spec)
    assert isinstance(found, Assignment), found
    return found


def seconds_of(spec: AssignmentSpec) -> float:
    found = plan_assignment(spec)
    return found.layer_seconds if isinstance(found, Assignment) else math.inf


@st.composite
def kinds(draw, *, most_ranks: int = 6):
    largest = draw(st.integers(1, 10))
    times = st.lists(st.integers(1, 30), min_size=largest, max_size=largest)
    return RankKind(
        num_ranks=draw(st.integers(1, most_ranks)),
        forward_seconds=np.array([0, *draw(times)]),
        backward_seconds=np.array([0, *draw(times)]),
        compute_memory_bytes=np.array(
            draw(st.lists(whole, min_size=largest + 1, max_size=largest + 1))
        ),
        usable_bytes=draw(st.integers(10, 60)),
        further_micro_batch_seconds=draw(st.integers(0, 2)),
    )


@st.composite
def specs(draw, *, collectives: bool = True):
    drawn = tuple(draw(st.lists(kinds(), min_size=1, max_size=4)))
    num_ranks = sum(kind.num_ranks for kind in drawn)
    gather = draw(st.integers(0, 40)) if collectives else 0
    return AssignmentSpec(
        kinds=drawn,
        batch=draw(st.integers(1, 60)),
        state_bytes=draw(st.integers(0, 200)),
        regimes=even_or_uneven(
            num_ranks, allgather_seconds=gather, reduce_scatter_seconds=2 * gather
        ),
        may_idle=draw(st.booleans()),
    )


@given(specs())
def test_every_sample_is_computed_once_and_all_state_is_held(spec: AssignmentSpec):
    found = plan_assignment(spec)
    assume(isinstance(found, Assignment))

    ranks = list(found.ranks())
    assert len(ranks) == spec.num_ranks
    assert sum(rank.batch for rank in ranks) == spec.batch
    assert sum(rank.state_share for rank in ranks) == pytest.approx(1, abs=1e-12)
    assert max(rank.layer_seconds for rank in ranks) == found.layer_seconds
    assert found.synchronised_layer_seconds >= found.layer_seconds
    assert found.memory_bytes <= found.usable_bytes
    for rank in ranks:
        assert rank.batch == rank.micro_batch * rank.num_micro_batches
        assert spec.may_idle or rank.batch >= 1
        held_bytes = rank.state_share * spec.state_bytes
        usable_bytes = spec.kinds[rank.kind_index].usable_bytes
        assert rank.compute_memory_bytes + held_bytes <= usable_bytes + 1e-9


@given(specs(), st.integers(0, 3), st.integers(1, 50))
def test_more_memory_never_makes_it_slower(spec: AssignmentSpec, which: int, more: int):
    which %= len(spec.kinds)
    richer = list(spec.kinds)
    richer[which] = replace(richer[which], usable_bytes=richer[which].usable_bytes + more)

    assert seconds_of(replace(spec, kinds=tuple(richer))) <= seconds_of(spec)


@given(specs(collectives=False), kinds(most_ranks=1))
def test_a_rank_that_may_idle_never_makes_it_slower(spec: AssignmentSpec, added: RankKind):
    assume(added.compute_memory_bytes[0] <= added.usable_bytes)
    spec = replace(spec, may_idle=True)
    wider = replace(spec, kinds=(*spec.kinds, added), regimes=even_or_uneven(spec.num_ranks + 1))

    assert seconds_of(wider) <= seconds_of(spec)


@given(specs(), st.randoms(use_true_random=False))
def test_the_order_of_kinds_changes_nothing_but_order(spec: AssignmentSpec, chance):
    order = list(range(len(spec.kinds)))
    chance.shuffle(order)
    shuffled = plan_assignment(replace(spec, kinds=tuple(spec.kinds[index] for index in order)))
    plain = plan_assignment(spec)

    if isinstance(plain, AssignmentShortfall):
        assert isinstance(shuffled, AssignmentShortfall)
        assert replace(shuffled, kind_index=None) == replace(plain, kind_index=None)
        return
    assert isinstance(shuffled, Assignment)
    kinds_in_order = [spec.kinds[index] for index in order]
    assert described(shuffled, kinds_in_order) == described(plain, list(spec.kinds))


def described(found: Assignment, of_kinds: list[RankKind]) -> list[str]:
    """The groups, each with its kind spelt out instead of its index, in an order of their own."""
    return sorted(
        f"{of_kinds[group.kind_index]} {replace(group, kind_index=0)}" for group in found.groups
    )


@given(kinds(most_ranks=5), st.integers(1, 40), st.integers(0, 100))
def test_equal_ranks_may_be_grouped_or_not(kind: RankKind, batch: int, state_bytes: int):
    changes = {"batch": batch, "state_bytes": state_bytes}
    apart = [replace(kind, num_ranks=1)] * kind.num_ranks
    together, single = spec_of(kind, **changes), spec_of(*apart, **changes)

    assert seconds_of(together) == seconds_of(single)


@given(specs())
def test_the_same_question_has_the_same_answer(spec: AssignmentSpec):
    assert plan_assignment(spec) == plan_assignment(spec)


def test_batches_follow_speed_and_state_follows_room():
    fast = kind_of(seconds_per_sample=1.0, memory_per_sample=8, usable=80)
    slow = kind_of(seconds_per_sample=3.0, memory_per_sample=8, usable=80)
    found = planned(spec_of(fast, slow, state_bytes=60, most_micro_batches=1))

    assert [rank.batch for rank in found.ranks()] == [9, 3]
    assert [rank.state_share for rank in found.ranks()] == pytest.approx([8 / 60, 52 / 60])
    assert found.regime.name == "uneven"


def test_micro_batches_are_no_larger_than_time_requires():
    found = planned(spec_of(kind_of(num_ranks=2)))

    assert {group.micro_batch for group in found.groups} == {1}
    assert found.compute_memory_bytes == 2


def test_a_cost_of_further_micro_batches_makes_them_larger():
    costly = replace(kind_of(num_ranks=2), further_micro_batch_seconds=1.0)
    found = planned(spec_of(costly))

    assert [(group.micro_batch, group.num_micro_batches) for group in found.groups] == [(6, 1)]


def test_even_shards_win_where_collectives_bind():
    """Uneven shards would allow a larger micro-batch, but slow collectives down for everybody."""
    tight = replace(kind_of(memory_per_sample=2, usable=12), further_micro_batch_seconds=0.5)
    roomy = replace(kind_of(memory_per_sample=2), further_micro_batch_seconds=0.5)
    regimes = even_or_uneven(2, allgather_seconds=15, reduce_scatter_seconds=15)
    bound = planned(spec_of(tight, roomy, state_bytes=16, regimes=regimes))
    free = planned(spec_of(tight, roomy, state_bytes=16))

    assert bound.regime.name == "even"
    assert [group.state_share for group in bound.groups] == [0.5, 0.5]
    assert free.regime.name == "uneven"
    assert free.groups[0].state_share < 0.5


def test_a_slow_rank_idles_and_still_holds_state():
    slow = kind_of(seconds_per_sample=1000.0)
    found = planned(spec_of(kind_of(), slow, may_idle=True))

    assert [rank.batch for rank in found.ranks()] == [12, 0]
    assert [rank.state_share for rank in found.ranks()] == [0.5, 0.5]
    assert found.groups[1].num_micro_batches == 0


def test_many_equal_ranks_stay_compact():
    found = planned(spec_of(kind_of(num_ranks=1000), batch=2500))

    assert [(group.num_ranks, group.batch) for group in found.groups] == [(500, 3), (500, 2)]
    assert len(list(found.ranks())) == 1000


def test_caps_are_kept():
    found = planned(spec_of(kind_of(num_ranks=2), most_micro_batch=2, most_micro_batches=3))

    assert all(group.micro_batch <= 2 for group in found.groups)
    assert all(group.num_micro_batches <= 3 for group in found.groups)


def test_too_much_state_is_refused_with_what_is_missing():
    found = plan_assignment(spec_of(kind_of(num_ranks=2), state_bytes=250))

    assert isinstance(found, AssignmentShortfall)
    assert found.short_bytes == 52  # 250 and one byte a rank, of 200
    assert found.kind_index is None
    assert found.batch_that_fits is None


def test_a_rank_too_small_for_one_sample_is_named():
    small = kind_of(memory_per_sample=120)
    found = plan_assignment(spec_of(kind_of(), small))

    assert isinstance(found, AssignmentShortfall)
    assert (found.kind_index, found.short_bytes) == (1, 20)
    assert isinstance(plan_assignment(spec_of(kind_of(), small, may_idle=True)), Assignment)


def test_fewer_samples_than_ranks_are_refused_with_the_least_batch():
    found = plan_assignment(spec_of(kind_of(num_ranks=20)))

    assert isinstance(found, AssignmentShortfall)
    assert (found.short_bytes, found.batch_that_fits) == (0, 20)


def test_a_batch_beyond_the_caps_is_refused_with_the_largest():
    caps = {"most_micro_batch": 2, "most_micro_batches": 2}
    found = plan_assignment(spec_of(kind_of(num_ranks=2), **caps))

    assert isinstance(found, AssignmentShortfall)
    assert (found.short_bytes, found.batch_that_fits) == (0, 8)


def test_a_batch_that_memory_forbids_is_refused_with_one_that_fits():
    costly = kind_of(num_ranks=2, memory_per_sample=10)
    found = plan_assignment(spec_of(costly, state_bytes=110, most_micro_batches=1))

    assert isinstance(found, AssignmentShortfall)
    assert (found.short_bytes, found.batch_that_fits) == (30, 9)


def test_partly_even_layers_lie_between_even_and_uneven():
    link = RingLink(bandwidth_bytes_per_second=10.0, latency_seconds=0.01)
    regimes = ring_regimes(link, num_ranks=4, allgather_bytes=40, reduce_scatter_bytes=80)
    times = [regime.allgather_seconds for regime in regimes]

    assert regimes[0].least_share == 0.25
    assert times[0] == min(times) == link.collective_seconds(40, num_ranks=4)
    assert times[-1] == max(times) == pytest.approx(40 / 10 + 4 * 0.01)
    assert all(regime.largest_share * 4 >= 1 for regime in regimes)


def test_the_best_of_many_regimes_is_at_least_as_good_as_each():
    link = RingLink(bandwidth_bytes_per_second=3.0)
    regimes = ring_regimes(link, num_ranks=3, allgather_bytes=40, reduce_scatter_bytes=80)
    tight = replace(kind_of(memory_per_sample=2, usable=11), further_micro_batch_seconds=3)
    roomy = replace(kind_of(num_ranks=2, memory_per_sample=2), further_micro_batch_seconds=3)
    spec = spec_of(tight, roomy, state_bytes=24, regimes=regimes)

    alone = [seconds_of(replace(spec, regimes=(regime,))) for regime in regimes]
    assert planned(spec).layer_seconds == min(alone)
    assert planned(spec).regime == regimes[alone.index(min(alone))]


@pytest.mark.parametrize(
    ("shares", "padded"), [(0.26, True), (0.9, False)], ids=["nearly even", "far from even"]
)
def test_uneven_collectives_are_padded_or_grouped(shares: float, padded: bool):
    link = RingLink(bandwidth_bytes_per_second=1.0)
    seconds = link.collective_seconds(100.0, num_ranks=4, largest_share=shares)

    assert seconds == pytest.approx(3 * shares * 100 if padded else 100)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_ranks": 0},
        {"forward_seconds": np.array([1.0, 1.0])},
        {"forward_seconds": np.array([0.0, -1.0])},
        {"backward_seconds": np.array([0.0, math.nan])},
        {"compute_memory_bytes": np.array([0.0])},
        {"compute_memory_bytes": np.zeros((2, 1))},
        {"usable_bytes": -1},
        {"usable_bytes": math.inf},
        {"further_micro_batch_seconds": -1},
    ],
)
def test_senseless_ranks_are_refused(changes):
    with pytest.raises(InvalidSpec):
        replace(kind_of(largest=1), **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"kinds": ()},
        {"regimes": ()},
        {"batch": 0},
        {"state_bytes": -1},
        {"most_micro_batch": 0},
        {"most_micro_batches": 0},
        {"state_bytes": 2.0**54},
        {"kinds": (kind_of(usable=2.0**50),), "batch": 2**12},
    ],
)
def test_senseless_questions_are_refused(changes):
    with pytest.raises(InvalidSpec):
        replace(spec_of(kind_of()), **changes)


@pytest.mark.parametrize(
    "changes", [{"least_share": 0.6, "largest_share": 0.5}, {"allgather_seconds": -1.0}]
)
def test_senseless_regimes_are_refused(changes):
    with pytest.raises(InvalidSpec):
        ShardRegime(name="odd", **changes)
