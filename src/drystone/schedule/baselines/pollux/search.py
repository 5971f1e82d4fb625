"""How should GPUs be shared so that the power mean of speedups is largest? A genetic search.

After Pollux (Qiao et al., OSDI 2021) and its artifact (github:petuum/adaptdl, branch
osdi21-artifact, simulator/pollux.py): a state says how many GPUs of each node each job has. States
are crossed at a point of the list of jobs, changed at random, and mended to keep the rules; a
hundred of them live through a hundred generations. The best one of all is taken. Rules:

- A node gives out no more than it has, and jobs listed first are served first.
- Of the jobs that span nodes, a node serves one at most: two would slow each other down.
- A job is on GPUs of one type, on as few nodes as its count needs, and on no more than its limit.

Survivors are chosen by the power mean alone; the artifact ranks by it and by utility together
(NSGA-II), and then takes the one of best mean as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from drystone.schedule.snapshot import BoolArray, FloatArray, IntArray

POPULATION: Final = 100
GENERATIONS: Final = 100
# Generations without a better state, after which the search ends; fewer for small problems.
PATIENCE: Final = 25
MIN_PATIENCE: Final = 5
FAIRNESS_POWER: Final = -1.0  # p of the power mean
_RESET_SHARE: Final = 0.1
_CLEAR_SHARE: Final = 0.1
_SMALLEST_SPEEDUP: Final = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharingSearch:
    """The problem: jobs by rows, in the order in which they are served; nodes by columns."""

    node_gpus: IntArray  # (nodes)
    node_type: IntArray  # (nodes)
    type_gpus_per_node: IntArray  # (types): of the largest node
    values: FloatArray  # (jobs, types, counts): speedup on so many GPUs; 0 where it cannot run
    max_gpus: IntArray  # (jobs)
    base: IntArray  # (jobs, nodes): what is the case now
    change_factor: FloatArray  # (jobs): what a speedup is worth if the job must restart for it


def search_sharing(
    problem: SharingSearch, chance: np.random.Generator, before: IntArray | None = None
) -> IntArray:
    """States from best to worst, (states, jobs, nodes), from the states of the round before."""
    states = problem.base[None]
    if before is not None and len(before):
        states = np.concatenate((states, before))
    states = _unique(_mend(problem, states, chance))
    states = np.concatenate((problem.base[None], states))
    scores = score_states(problem, states)
    bound = _bound(problem) * (1 - 1e-9)
    idle, patience = 0, min(max(problem.base.size // 2, MIN_PATIENCE), PATIENCE)
    for _ in range(GENERATIONS):
        best = scores.max()
        children = _cross(states[_pick_parents(scores, chance)], chance)
        children = _mend(problem, _mutate(problem, children, chance), chance)
        states = _unique(np.concatenate((states, children)))
        scores = score_states(problem, states)
        order = np.argsort(-scores, kind="stable")[:POPULATION]
        states, scores = states[order], scores[order]
        idle = 0 if scores[0] > best + 1e-12 else idle + 1
        if idle >= patience or scores[0] >= bound:
            break
    return states


def score_states(problem: SharingSearch, states: IntArray) -> FloatArray:
    """The power mean of speedups in each state, those that need a restart discounted."""
    speedups = state_speedups(problem, states)
    changed = (states != problem.base).any(axis=2)
    return _power_mean(np.where(changed, speedups * problem.change_factor, speedups))


def _bound(problem: SharingSearch) -> float:
    """What no state can surpass: every job at its best, whatever the others have."""
    counts = np.arange(problem.values.shape[2])
    usable = np.where(counts <= problem.max_gpus[:, None, None], problem.values, 0.0)
    best = usable.max(axis=(1, 2)) * problem.change_factor
    best = np.maximum(best, state_speedups(problem, problem.base[None])[0])
    return float(_power_mean(best[None])[0])


def _power_mean(speedups: FloatArray) -> FloatArray:
    mean = ((speedups + _SMALLEST_SPEEDUP) ** FAIRNESS_POWER).mean(axis=1)
    result: FloatArray = mean ** (1 / FAIRNESS_POWER)
    return result


def state_speedups(problem: SharingSearch, states: IntArray) -> FloatArray:
    """The speedup of each job in each state, (states, jobs)."""
    counts = states.sum(axis=2)
    kinds = problem.node_type[np.argmax(states, axis=2)]
    rows = np.arange(states.shape[1])
    found: FloatArray = problem.values[rows, kinds, counts]
    return found


def _pick_parents(scores: FloatArray, chance: np.random.Generator) -> IntArray:
    """As many as a population, each the better of two at random."""
    pairs = chance.integers(len(scores), size=(POPULATION, 2))
    first, second = pairs[:, 0], pairs[:, 1]
    return np.where(scores[first] >= scores[second], first, second)


def _cross(parents: IntArray, chance: np.random.Generator) -> IntArray:
    """Neighbours exchange the jobs before a point."""
    first, second = parents[0::2], parents[1::2]
    num_jobs = parents.shape[1]
    point = chance.integers(num_jobs, size=(len(first), 1))
    head = (np.arange(num_jobs) < point)[:, :, None]
    return np.concatenate((np.where(head, first, second), np.where(head, second, first)))


def _mutate(problem: SharingSearch, states: IntArray, chance: np.random.Generator) -> IntArray:
    """Some jobs go back to what they have now, some lose GPUs, some get more where any are free."""
    shape = states.shape
    back = chance.random(shape[:2]) < _RESET_SHARE
    states = np.where(back[:, :, None], problem.base, states)
    clears = (chance.random(shape[:2]) < _CLEAR_SHARE)[:, :, None]
    states[clears & (chance.random(shape) < _CLEAR_SHARE)] = 0
    has_free = (states.sum(axis=1) < problem.node_gpus)[:, None, :]
    anybody = has_free / shape[1]
    there = has_free & (states > 0)
    same = there / np.maximum(there.sum(axis=1, keepdims=True), 1)
    grows = chance.random(shape) < anybody + same - anybody * same
    most = np.broadcast_to(problem.node_gpus, shape)
    drawn = states + np.floor(chance.random(shape) * (most - states + 1)).astype(np.int64)
    return np.where(grows, np.minimum(drawn, most), states)


def _mend(problem: SharingSearch, states: IntArray, chance: np.random.Generator) -> IntArray:
    """The same states with every rule kept, by taking GPUs away."""
    states = _one_type(problem, states)
    spans = np.count_nonzero(states, axis=2)[:, :, None] > 1
    crowded = np.cumsum((states > 0) & spans, axis=1) > 1
    states = np.where(crowded & spans, 0, states)
    shuffle = chance.permutation(states.shape[2])
    total = np.minimum(np.cumsum(states[:, :, shuffle], axis=2), problem.max_gpus[:, None])
    mended = np.empty_like(states)
    mended[:, :, shuffle] = np.diff(total, axis=2, prepend=0)
    given = np.minimum(np.cumsum(mended, axis=1), problem.node_gpus)
    mended = np.diff(given, axis=1, prepend=0)
    return _compact(problem, mended)


def _one_type(problem: SharingSearch, states: IntArray) -> IntArray:
    """Each job keeps the type of which it has most."""
    num_types = len(problem.type_gpus_per_node)
    if num_types == 1:
        return states
    is_type = problem.node_type[:, None] == np.arange(num_types)
    best = np.argmax(states @ is_type, axis=2)
    return np.where(problem.node_type == best[:, :, None], states, 0)


def _compact(problem: SharingSearch, states: IntArray) -> IntArray:
    """Each job keeps its fullest nodes: as many as its count there cannot do without."""
    order = np.argsort(-states, axis=2, kind="stable")
    sorted_states = np.take_along_axis(states, order, axis=2)
    size = problem.type_gpus_per_node[problem.node_type[order[:, :, :1]]]
    total = np.cumsum(sorted_states, axis=2)
    needed = (total > np.arange(states.shape[2]) * size) & (sorted_states > 0)
    last = states.shape[2] - np.argmax(needed[:, :, ::-1], axis=2)
    kept: BoolArray = np.arange(states.shape[2]) < np.where(needed.any(axis=2), last, 0)[:, :, None]
    result = np.zeros_like(states)
    np.put_along_axis(result, order, np.where(kept, sorted_states, 0), axis=2)
    return result


def _unique(states: IntArray) -> IntArray:
    """Each state once, in the order of appearance."""
    flat = np.ascontiguousarray(states.reshape(len(states), -1).astype(np.uint8))
    keys = flat.view(np.dtype((np.void, max(flat.shape[1], 1))))[:, 0]
    _, first = np.unique(keys, return_index=True)
    return states[np.sort(first)]
