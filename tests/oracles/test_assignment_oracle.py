"""The threshold search against slower ways to the same answer.

Three oracles: every combination of every rank (any times, memory and regime); Cephalo's dynamic
programme as its note gives it (memory linear with one slope, for which it is exact); and the plain
(min,+) convolution, rank by rank, for the memory of larger clusters.
"""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drystone.plan.uneven.assignment import Assignment, AssignmentShortfall, plan_assignment
from drystone.plan.uneven.least_memory import RankCosts, has_split, least_split
from drystone.plan.uneven.spec import AssignmentSpec, RankKind, ShardRegime, even_or_uneven

INFINITE = math.inf


# Every combination


def rank_choices(spec: AssignmentSpec, kind: RankKind, regime: ShardRegime):
    """(samples, seconds, memory) of everything one rank may do."""
    gather, scatter = regime.allgather_seconds, regime.reduce_scatter_seconds
    if spec.may_idle:
        yield 0, gather + gather + scatter, kind.compute_memory_bytes[0]
    for m in range(1, kind.forward_seconds.size):
        for count in range(1, spec.batch // m + 1):
            if m > (spec.most_micro_batch or m) or count > (spec.most_micro_batches or count):
                continue
            forward = count * kind.forward_seconds[m]
            backward = forward + count * kind.backward_seconds[m]
            backward += (count - 1) * kind.further_micro_batch_seconds
            seconds = max(gather, forward) + max(gather + scatter, backward)
            if seconds < INFINITE:
                yield m * count, seconds, kind.compute_memory_bytes[m]


def state_fits(spec: AssignmentSpec, regime: ShardRegime, rooms) -> bool:
    """Whether shares within the regime's bounds hold the state, by the definition."""
    num_ranks, state = spec.num_ranks, spec.state_bytes
    if regime.name == "even":
        return all(room * num_ranks >= state for room in rooms)
    if any(room < math.ceil(regime.least_share * state) for room in rooms):
        return False
    most = state if regime.largest_share == 1 else math.floor(regime.largest_share * state)
    return sum(min(room, most) for room in rooms) >= state


def brute_force(spec: AssignmentSpec):
    """(seconds, least memory at them, regime) of the best; None if nothing fits."""
    best = None
    for regime in spec.regimes:
        ranks = [
            (kind.usable_bytes, list(rank_choices(spec, kind, regime)))
            for kind in spec.kinds
            for _ in range(kind.num_ranks)
        ]
        here = None
        for combination in itertools.product(*(choices for _, choices in ranks)):
            if sum(samples for samples, _, _ in combination) != spec.batch:
                continue
            rooms = [
                usable - memory
                for (usable, _), (_, _, memory) in zip(ranks, combination, strict=True)
            ]
            if min(rooms) < 0 or not state_fits(spec, regime, rooms):
                continue
            seconds = max(seconds for _, seconds, _ in combination)
            memory = sum(memory for _, _, memory in combination)
            here = min(here or (INFINITE, INFINITE), (seconds, memory))
        if here is not None and (best is None or here[0] < best[0]):
            best = (*here, regime)
    return best


whole = st.integers(0, 9)


@st.composite
def small_kinds(draw, *, num_ranks: int):
    """Times and memory of any shape, in small whole numbers so that there are ties."""
    largest = draw(st.integers(1, 5))
    array = st.lists(whole, min_size=largest, max_size=largest)
    return RankKind(
        num_ranks=num_ranks,
        forward_seconds=np.array([0, *draw(array)]),
        backward_seconds=np.array([0, *draw(array)]),
        compute_memory_bytes=np.array([draw(whole), *draw(array)]),
        usable_bytes=draw(st.integers(3, 24)),
        further_micro_batch_seconds=draw(st.integers(0, 2)),
    )


@st.composite
def small_regimes(draw, *, num_ranks: int):
    gather, scatter = draw(st.integers(0, 8)), draw(st.integers(0, 8))
    regimes = even_or_uneven(
        num_ranks, allgather_seconds=gather, reduce_scatter_seconds=scatter, uneven_factor=2
    )
    if draw(st.booleans()):
        half = ShardRegime(
            name="half even",
            least_share=0.5 / num_ranks,
            largest_share=min(1.0, 0.5 / num_ranks + 0.25),
            allgather_seconds=1.5 * gather,
            reduce_scatter_seconds=1.5 * scatter,
        )
        if half.largest_share * num_ranks >= 1:
            regimes = (regimes[0], half, regimes[1])
    return regimes


@st.composite
def small_specs(draw):
    counts = draw(st.sampled_from([(1,), (2,), (3,), (1, 1), (2, 1), (1, 2), (1, 1, 1)]))
    return AssignmentSpec(
        kinds=tuple(draw(small_kinds(num_ranks=count)) for count in counts),
        batch=draw(st.integers(1, 7)),
        state_bytes=draw(st.integers(0, 45)),
        regimes=draw(small_regimes(num_ranks=sum(counts))),
        may_idle=draw(st.booleans()),
        most_micro_batch=draw(st.none() | st.integers(1, 4)),
        most_micro_batches=draw(st.none() | st.integers(1, 4)),
    )


@settings(max_examples=250)
@given(small_specs())
def test_the_search_finds_what_trying_everything_finds(spec: AssignmentSpec):
    expected = brute_force(spec)
    found = plan_assignment(spec)

    if expected is None:
        assert isinstance(found, AssignmentShortfall)
        assert_shortfall_is_true(spec, found)
        return
    seconds, memory_bytes, regime = expected
    assert isinstance(found, Assignment)
    assert (found.layer_seconds, found.regime) == (seconds, regime)
    assert max(group.layer_seconds for group in found.groups) == seconds
    if regime.largest_share == 1:
        assert found.compute_memory_bytes == memory_bytes
    assert_assignment_is_sound(spec, found)


def assert_assignment_is_sound(spec: AssignmentSpec, found: Assignment) -> None:
    ranks = list(found.ranks())
    assert [rank.kind_index for rank in ranks] == [
        index for index, kind in enumerate(spec.kinds) for _ in range(kind.num_ranks)
    ]
    assert sum(rank.batch for rank in ranks) == spec.batch
    assert sum(rank.state_share for rank in ranks) == pytest.approx(1)
    for rank in ranks:
        kind = spec.kinds[rank.kind_index]
        held_bytes = rank.state_share * spec.state_bytes
        assert rank.batch == rank.micro_batch * rank.num_micro_batches
        assert rank.compute_memory_bytes + held_bytes <= kind.usable_bytes * (1 + 1e-12)
        assert rank.state_share >= found.regime.least_share - 1e-12 or spec.state_bytes == 0
        assert rank.state_share <= found.regime.largest_share + 1e-12


def assert_shortfall_is_true(spec: AssignmentSpec, found: AssignmentShortfall) -> None:
    assert found.short_bytes >= 0
    if found.batch_that_fits is not None:
        other = AssignmentSpec(
            kinds=spec.kinds,
            batch=found.batch_that_fits,
            state_bytes=spec.state_bytes,
            regimes=spec.regimes,
            may_idle=spec.may_idle,
            most_micro_batch=spec.most_micro_batch,
            most_micro_batches=spec.most_micro_batches,
        )
        assert brute_force(other) is not None


# Cephalo's dynamic programme


def dynamic_programme(spec: AssignmentSpec):
    """dp[i][j][k]: least time for the first i ranks to do j samples, micro-batches summing to k."""
    (regime,) = spec.regimes
    ranks = [kind for kind in spec.kinds for _ in range(kind.num_ranks)]
    batch = spec.batch
    times = {(0, 0): (0.0, 0.0)}  # (j, k): least time, and the memory on the way there
    for kind in ranks:
        following: dict[tuple[int, int], tuple[float, float]] = {}
        for (j, k), (slowest, memory) in times.items():
            for m in range(1, kind.forward_seconds.size):
                if kind.compute_memory_bytes[m] > kind.usable_bytes:
                    continue
                for count in range(1, (batch - j) // m + 1):
                    forward = count * kind.forward_seconds[m]
                    backward = forward + count * kind.backward_seconds[m]
                    backward += (count - 1) * kind.further_micro_batch_seconds
                    gather = regime.allgather_seconds
                    both = max(gather, forward)
                    both += max(gather + regime.reduce_scatter_seconds, backward)
                    reached = max(slowest, both), memory + kind.compute_memory_bytes[m]
                    key = j + m * count, k + m
                    following[key] = min(following.get(key, (INFINITE, INFINITE)), reached)
        times = following
    limit = sum(kind.usable_bytes for kind in ranks) - spec.state_bytes
    fitting = [
        seconds for (j, _), (seconds, memory) in times.items() if j == batch and memory <= limit
    ]
    return min(fitting, default=None)


@st.composite
def linear_specs(draw):
    """Memory with one slope for all ranks, which is where the programme is exact."""
    counts = draw(st.sampled_from([(4,), (2, 1, 1), (2, 3), (1, 1, 2), (5,)]))
    batch = draw(st.integers(sum(counts), 14))
    sizes = np.arange(batch + 1)
    slope = draw(st.integers(1, 4))
    kinds = [
        RankKind(
            num_ranks=count,
            forward_seconds=np.array([0, *draw(st.lists(whole, min_size=batch, max_size=batch))]),
            backward_seconds=draw(st.integers(1, 20)) * sizes,
            compute_memory_bytes=draw(st.integers(0, 10)) + slope * sizes,
            usable_bytes=draw(st.integers(5, 40)),
            further_micro_batch_seconds=draw(st.integers(0, 3)),
        )
        for count in counts
    ]
    gather = draw(st.integers(0, 20))
    return AssignmentSpec(
        kinds=tuple(kinds),
        batch=batch,
        state_bytes=draw(st.integers(0, 100)),
        regimes=(ShardRegime(name="any", allgather_seconds=gather, reduce_scatter_seconds=gather),),
    )


@settings(max_examples=100)
@given(linear_specs())
def test_the_search_finds_what_the_dynamic_programme_finds(spec: AssignmentSpec):
    expected = dynamic_programme(spec)
    found = plan_assignment(spec)

    if expected is None:
        assert isinstance(found, AssignmentShortfall)
    else:
        assert isinstance(found, Assignment)
        assert found.layer_seconds == expected


# The plain convolution


def plain_convolution(costs: list[RankCosts], batch: int) -> float:
    """The least memory, one rank after the other; infinite if no choices sum to the batch."""
    least = np.full(batch + 1, np.inf)
    least[0] = 0
    for one in costs:
        for _ in range(one.num_ranks):
            following = np.full(batch + 1, np.inf)
            for samples, memory in zip(one.batches, one.memory_bytes, strict=True):
                if samples <= batch:
                    moved = least[: batch + 1 - samples] + memory
                    following[samples:] = np.minimum(following[samples:], moved)
            least = following
    return float(least[batch])


@st.composite
def rank_costs(draw, *, largest_cost: int):
    batches = sorted(draw(st.sets(st.integers(0, 12), min_size=1, max_size=9)))
    shape = draw(st.sampled_from(["any", "flat", "convex", "concave"]))
    cost = st.integers(0, largest_cost)
    if shape == "any":
        memory = [draw(cost) for _ in batches]
    else:
        power = {"flat": 0.0, "convex": 2.0, "concave": 0.5}[shape]
        scale = draw(cost)
        memory = [math.ceil(scale * batch**power) for batch in batches]
    return RankCosts(
        num_ranks=draw(st.integers(1, 13)),
        batches=np.array(batches, dtype=np.int64),
        memory_bytes=np.array(memory, dtype=np.int64),
    )


@st.composite
def convolutions(draw):
    largest_cost = draw(st.sampled_from([3, 50, 80 * 2**30]))
    costs = draw(st.lists(rank_costs(largest_cost=largest_cost), min_size=1, max_size=4))
    least = sum(one.num_ranks * int(one.batches[0]) for one in costs)
    most = sum(one.num_ranks * int(one.batches[-1]) for one in costs)
    return costs, draw(st.integers(max(least - 1, 0), most + 1))


@settings(max_examples=250)
@given(convolutions())
def test_the_least_memory_is_that_of_the_plain_convolution(case: tuple[list[RankCosts], int]):
    costs, batch = case
    expected = plain_convolution(costs, batch)
    found = least_split(costs, batch=batch)

    if expected == INFINITE:
        assert found is None
        assert not has_split(costs, batch=batch, limit_bytes=INFINITE)
        return
    assert found is not None
    assert found.memory_bytes == expected
    assert has_split(costs, batch=batch, limit_bytes=expected)
    assert not has_split(costs, batch=batch, limit_bytes=expected - 1)
    assert least_split(costs, batch=batch, limit_bytes=expected - 1) is None
    total_samples, total_bytes = 0, 0.0
    for one, ranks in zip(costs, found.ranks_by_batch, strict=True):
        assert sum(ranks.values()) == one.num_ranks
        memory = dict(zip(one.batches.tolist(), one.memory_bytes.tolist(), strict=True))
        total_samples += sum(samples * count for samples, count in ranks.items())
        total_bytes += sum(memory[samples] * count for samples, count in ranks.items())
    assert (total_samples, total_bytes) == (batch, expected)


# Larger clusters


def plain_threshold_search(spec: AssignmentSpec):
    """Bisection over every time that occurs, with the plain convolution at each."""
    (regime,) = spec.regimes
    choices = [list(rank_choices(spec, kind, regime)) for kind in spec.kinds]
    limit = sum(kind.num_ranks * kind.usable_bytes for kind in spec.kinds) - spec.state_bytes

    def fits(seconds: float) -> bool:
        costs = []
        for kind, ours in zip(spec.kinds, choices, strict=True):
            least: dict[int, int] = {}
            for samples, taken, memory in ours:
                if taken <= seconds and memory <= kind.usable_bytes:
                    least[samples] = min(least.get(samples, int(memory)), int(memory))
            batches = np.array(sorted(least), dtype=np.int64)
            memory_bytes = np.array([least[one] for one in sorted(least)], dtype=np.int64)
            costs.append(
                RankCosts(num_ranks=kind.num_ranks, batches=batches, memory_bytes=memory_bytes)
            )
        return plain_convolution(costs, spec.batch) <= limit

    times = sorted({seconds for ours in choices for _, seconds, _ in ours})
    low, high = 0, len(times)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(times[middle]) else (middle + 1, high)
    return times[low] if low < len(times) else None


@pytest.mark.parametrize("seed", range(12))
def test_larger_clusters_with_rough_profiles_and_scarce_memory(seed: int):
    generator = np.random.default_rng(seed)
    batch = 40
    sizes = np.arange(13)
    kinds = []
    for num_ranks in generator.integers(1, 6, size=3):
        forward = (0.01 * sizes + 0.004) * generator.uniform(0.6, 1.6, sizes.size)
        forward[generator.integers(2, 13)] = np.inf
        forward[0] = 0
        kinds.append(
            RankKind(
                num_ranks=int(num_ranks),
                forward_seconds=forward,
                backward_seconds=generator.uniform(1, 3) * forward,
                compute_memory_bytes=(2e9 + 4e8 * sizes) * generator.uniform(0.5, 1.5, sizes.size),
                usable_bytes=int(generator.choice([8, 12, 16])) * 2**30,
                further_micro_batch_seconds=0.002,
            )
        )
    least = sum(kind.num_ranks * kind.compute_memory_bytes[1:].min() for kind in kinds)
    room = sum(kind.num_ranks * kind.usable_bytes for kind in kinds) - least
    spec = AssignmentSpec(
        kinds=tuple(kinds),
        batch=batch,
        state_bytes=int(room * generator.choice([0.7, 0.9, 0.97])),
        regimes=(ShardRegime(name="any", allgather_seconds=0.01, reduce_scatter_seconds=0.02),),
    )
    found = plan_assignment(spec)

    expected = plain_threshold_search(spec)
    assert (found.layer_seconds if isinstance(found, Assignment) else None) == expected
