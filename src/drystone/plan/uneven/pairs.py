"""Speed of one job on equal GPUs, or on two types at once, data parallel, for all counts.

The estimate of `data_parallel`, for a grid of counts and micro-batches in one array operation:
each type at the pace of one micro-batch, whole samples on every rank, all memory together, as many
layers in even shards as memory allows, and collectives over the ring that the two form. What is
left out: ranks of one type that differ. The plan itself is made when the option is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from drystone.describe.layout import Sharding
from drystone.describe.machine import Link, Machine
from drystone.describe.model import ModelSpec
from drystone.describe.recipe import OPTIMIZERS, Recipe
from drystone.estimate.layer import compute_memory_bytes, layer_seconds, sharded_state_bytes
from drystone.estimate.memory.layer_major import layer_major_recipe
from drystone.estimate.time.network import Ring, make_ring
from drystone.estimate.time.speed import prepare
from drystone.estimate.time.step import Prepared, layered_step
from drystone.plan.uneven.data_parallel import full_update_seconds, pass_seconds_of
from drystone.plan.uneven.whole import whole_memory_bytes, whole_pass_seconds, whole_recipes

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)  # of a pair
_ALL_MICRO_BATCHES = tuple(range(1, 65))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairSpeeds:
    """Two types together, one entry a pair of counts."""

    first_count: IntArray
    second_count: IntArray
    step_seconds: FloatArray  # infinite where it does not fit
    high_bytes: FloatArray  # of the fullest rank


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Side:
    """One type: its ranks at each micro-batch, as an axis of the grid."""

    count: FloatArray
    micro: FloatArray
    forward: FloatArray  # seconds of a layer and a sample
    backward: FloatArray  # the same with recomputation
    memory_bytes: FloatArray
    usable_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EqualSpeeds:
    """One type alone, one entry a count."""

    step_seconds: FloatArray  # infinite where it does not fit
    high_bytes: FloatArray  # of each rank


@lru_cache(maxsize=1024)
def equal_speeds(
    model: ModelSpec, recipe: Recipe, machine: Machine, counts: tuple[int, ...]
) -> EqualSpeeds:
    """Every count of one type, batch and state in equal shares."""
    mine = layer_major_recipe(recipe)
    ranks = np.array(counts, dtype=np.int64)[:, None]
    state = sharded_state_bytes(model, mine, machine)
    # One rank gathers nothing, so what it takes differs.
    alone, among = (
        _ranks(model, mine, machine, _ALL_MICRO_BATCHES, num_ranks=number) for number in (1, 2)
    )
    sizes, forward, backward, memory = (
        np.where(ranks == 1, one, other) for one, other in zip(alone, among, strict=True)
    )
    rounds = np.ceil(np.ceil(recipe.global_batch / ranks) / sizes)
    prepared = [prepare(model, mine, machine, None)]
    launcher = prepared[0].launcher
    crosses = ranks > machine.gpus_per_node
    seconds = _step_seconds(
        prepared,
        passes=(rounds * forward, rounds * (forward + backward)),
        ranks=ranks.astype(np.float64),
        ring=make_ring([machine], [ranks.astype(np.float64)]),
        reached_share=np.where(crosses, launcher.network_gather_share, launcher.gather_share),
        even=np.ones((1, 1)),
    )
    held = memory + state / ranks
    fits = held <= machine.gpu.usable_bytes
    if OPTIMIZERS[recipe.optimizer].needs_whole_matrices:
        fits = fits & (ranks == 1)
    seconds = np.where(fits, seconds, np.inf)
    best = seconds.argmin(axis=1)
    rows = np.arange(len(best))
    return EqualSpeeds(step_seconds=seconds[rows, best], high_bytes=held[rows, best])


@lru_cache(maxsize=1024)
def pair_speeds(
    model: ModelSpec,
    recipe: Recipe,
    machines: tuple[Machine, Machine],
    between: Link,
    counts: tuple[tuple[int, ...], tuple[int, ...]],
) -> PairSpeeds:
    """Every count of the first type with every count of the second.

    Layer by layer with the state divided, or all of it on each GPU, whichever is faster.
    """
    ways = [_layered_pairs(model, layer_major_recipe(recipe), machines, between, counts)]
    ways += [_whole_pairs(model, mine, machines, between, counts) for mine in whole_recipes(recipe)]
    if OPTIMIZERS[recipe.optimizer].needs_whole_matrices:  # layer by layer, each rank has pieces
        ways[0] = (np.full_like(ways[0][0], np.inf), ways[0][1])
    seconds, full = (np.stack(some) for some in zip(*ways, strict=True))
    best = seconds.argmin(axis=0)
    columns = np.arange(seconds.shape[1])
    left, right = np.meshgrid(*counts, indexing="ij")
    return PairSpeeds(
        first_count=left.ravel(),
        second_count=right.ravel(),
        step_seconds=seconds[best, columns],
        high_bytes=full[best, columns],
    )


def _layered_pairs(
    model: ModelSpec,
    recipe: Recipe,
    machines: tuple[Machine, Machine],
    between: Link,
    counts: tuple[tuple[int, ...], tuple[int, ...]],
) -> tuple[FloatArray, FloatArray]:
    """Seconds of a step and bytes of the fullest rank, by pair of counts; state is divided."""
    of_ranks = [_ranks(model, recipe, machine, _MICRO_BATCHES, num_ranks=2) for machine in machines]
    sides = _sides(machines, counts, of_ranks)
    state = sharded_state_bytes(model, recipe, machines[0])
    ranks = sides[0].count + sides[1].count
    room = [side.count * (side.usable_bytes - side.memory_bytes) for side in sides]
    fits = room[0] + room[1] >= state
    # Of the layers, the share that can be cut evenly: what the tightest rank holds of each.
    even = np.ones((1, 1, 1, 1))
    for side in sides:
        even = np.minimum(even, (side.usable_bytes - side.memory_bytes) * ranks / state)
    full = np.maximum(sides[0].memory_bytes, sides[1].memory_bytes) + state / ranks
    full = np.minimum(full, max(side.usable_bytes for side in sides))
    prepared = [prepare(model, recipe, machine, None) for machine in machines]
    seconds, fits_too = _paired(prepared, recipe, sides, between, even=np.maximum(even, 0.0))
    return _best_of_sizes(np.where(fits & fits_too, seconds, np.inf), full)


def _whole_pairs(
    model: ModelSpec,
    recipe: Recipe,
    machines: tuple[Machine, Machine],
    between: Link,
    counts: tuple[tuple[int, ...], tuple[int, ...]],
) -> tuple[FloatArray, FloatArray]:
    """The same with all state on each rank."""
    sizes = np.array([size for size in _MICRO_BATCHES if size <= recipe.global_batch])
    of_ranks = []
    for machine in machines:
        forward, backward = whole_pass_seconds(model, recipe, machine, sizes)
        memory = whole_memory_bytes(model, recipe, machine, sizes, num_ranks=2)
        of_ranks.append((sizes, forward, backward - forward, memory))
    sides = _sides(machines, counts, of_ranks)
    prepared = [prepare(model, recipe, machine, None) for machine in machines]
    seconds, fits = _paired(prepared, recipe, sides, between, even=None)
    full = np.maximum(sides[0].memory_bytes, sides[1].memory_bytes)
    return _best_of_sizes(np.where(fits, seconds, np.inf), full)


def _paired(
    prepared: list[Prepared],
    recipe: Recipe,
    sides: list[_Side],
    between: Link,
    *,
    even: FloatArray | None,
) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    """Seconds of a step over the whole grid, and where each rank has memory and samples for it."""
    first, second = sides
    numbers = _samples(recipe.global_batch, first, second)
    fits = np.ones((1, 1, 1, 1), dtype=bool)
    for number, side in zip(numbers, sides, strict=True):
        fits = fits & (side.memory_bytes <= side.usable_bytes)
        fits = fits & ((number >= side.micro) | (side.micro == 1))
    passes = [
        np.maximum(*(number * one for number, one in zip(numbers, each, strict=True)))
        for each in ([side.forward for side in sides], [side.backward for side in sides])
    ]
    machines = [each.machine for each in prepared]
    seconds = _step_seconds(
        prepared,
        passes=(passes[0], passes[1]),
        ranks=first.count + second.count,
        ring=make_ring(machines, [side.count for side in sides], between),
        reached_share=prepared[0].launcher.network_gather_share,
        even=even,
    )
    return seconds, fits


def _best_of_sizes(seconds: FloatArray, full: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Of the grid of counts and micro-batches, the fastest micro-batches of each pair of counts."""
    shape = (seconds.shape[0] * seconds.shape[1], -1)
    flat = seconds.reshape(shape)
    best = flat.argmin(axis=1)
    rows = np.arange(len(best))
    return flat[rows, best], np.broadcast_to(full, seconds.shape).reshape(shape)[rows, best]


_OfRanks = tuple[IntArray, FloatArray, FloatArray, FloatArray]


def _sides(
    machines: tuple[Machine, Machine],
    counts: tuple[tuple[int, ...], tuple[int, ...]],
    of_ranks: list[_OfRanks],
) -> list[_Side]:
    """Axes of the grid: counts of the first and second type, micro-batches of each."""
    sides = []
    for axis, (machine, numbers, (sizes, forward, backward, memory)) in enumerate(
        zip(machines, counts, of_ranks, strict=True)
    ):
        along_counts, along_sizes = [1, 1, 1, 1], [1, 1, 1, 1]
        along_counts[axis], along_sizes[axis + 2] = -1, -1
        sides.append(
            _Side(
                count=np.array(numbers, dtype=np.float64).reshape(along_counts),
                micro=sizes.astype(np.float64).reshape(along_sizes),
                forward=(forward / sizes).reshape(along_sizes),
                backward=((forward + backward) / sizes).reshape(along_sizes),
                memory_bytes=memory.reshape(along_sizes),
                usable_bytes=float(machine.gpu.usable_bytes),
            )
        )
    return sides


@lru_cache(maxsize=1024)
def _ranks(
    model: ModelSpec,
    recipe: Recipe,
    machine: Machine,
    micro_batches: tuple[int, ...],
    *,
    num_ranks: int,
) -> _OfRanks:
    """Micro-batches, seconds of both passes of a layer, and memory beside the state.

    Whether there are several ranks matters, not how many.
    """
    sizes = np.array([size for size in micro_batches if size <= recipe.global_batch])
    sharding = Sharding.ZERO3 if num_ranks > 1 else Sharding.NONE
    cost = layer_seconds(model, recipe, machine, micro_batch=sizes, sharding=sharding)
    forward, backward = pass_seconds_of(cost, model.num_layers)
    memory = compute_memory_bytes(
        model, recipe, machine, num_ranks=num_ranks, most_micro_batch=int(sizes[-1])
    )
    return sizes, forward, backward, memory[sizes]


def _samples(batch: int, first: _Side, second: _Side) -> tuple[FloatArray, FloatArray]:
    """Samples on a rank of each type that together are the batch, the slower soonest done.

    If samples could be cut, both would end together; then one, the other or both do one more.
    """
    each = [first.forward + first.backward, second.forward + second.backward]
    per_round = [first.count, second.count]
    together = batch / (per_round[0] / each[0] + per_round[1] / each[1])
    least = [np.floor(together / pace + 1e-9) for pace in each]
    left = batch - (least[0] * per_round[0] + least[1] * per_round[1])
    best = np.full(np.broadcast_shapes(each[0].shape, together.shape), np.inf)
    found = [np.zeros_like(best), np.zeros_like(best)]
    for more in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1.0, 1.0)):
        done = more[0] * per_round[0] + more[1] * per_round[1] >= left - 1e-9
        seconds = np.maximum((least[0] + more[0]) * each[0], (least[1] + more[1]) * each[1])
        better = done & (seconds < best)
        best = np.where(better, seconds, best)
        for side in (0, 1):
            found[side] = np.where(better, least[side] + more[side], found[side])
    return found[0], found[1]


def _step_seconds(
    prepared: list[Prepared],
    *,
    passes: tuple[FloatArray, FloatArray],  # of a layer: forward, and backward with recomputation
    ranks: FloatArray,
    ring: Ring,
    reached_share: FloatArray | float,  # of the ring's bandwidth, by the launcher's gathers
    even: FloatArray | None,  # of the layers, the share that is cut evenly; None: nothing is cut
) -> FloatArray:
    """A step, as `data_parallel` has it."""
    work = prepared[0].work
    params = (work.layer_params + work.outer_params) / work.num_layers
    reached = ring.bandwidth_bytes_per_second * reached_share
    hops = ring.hops_seconds
    update = max(full_update_seconds(each) for each in prepared)
    if even is None:
        gather, times = np.zeros(1), 2.0
        part = (ranks - 1.0) / ranks
    else:
        # Shards that are not even are sent one by one.
        part = even * (ranks - 1.0) / ranks + (1.0 - even)
        gather, times = params * work.element_bytes / reached * part + hops, 1.0
    scatter = params * work.trained_share * work.reduce_bytes / reached * part + hops
    step = layered_step(
        prepared,
        num_ranks=ranks,
        forward=passes[0],
        backward=passes[1],
        gather=gather,
        scatter=times * scatter,
        pace=ring.pace,
    )
    shared = update if even is None else update / ranks
    return step.busy * (1.0 + step.straggler_share) + shared + step.host
