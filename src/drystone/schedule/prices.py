"""What is a GPU of each type worth? Shadow prices from the dual, with a certificate.

The problem: every job takes one option or none, worth `values[job, option]`; the GPUs of each type
are limited. Given a price for each type, every job picks for itself the option that is worth most
after paying for its GPUs: one array operation. The dual

    D(p) = sum over jobs of max(0, max over options of (value - p . counts)) + p . capacity

bounds every allocation from above, for any prices p >= 0, and is convex. It is made small one price
at a time: along one price D is least where demand for that type falls to what is there. Rounds of
trial prices, each between the neighbours of the best before, find that place to about one part in
a hundred, since D is convex; a step that does not help is not taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from drystone.schedule.snapshot import FloatArray, IntArray

_NUM_TRIALS: Final = 12
_NUM_ROUNDS: Final = 3
_MOST_SWEEPS: Final = 12
_GOOD_ENOUGH: Final = 1e-3  # a sweep that improves the bound by less is the last


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Market:
    """The problem: what options are worth, what they take, and what there is."""

    values: FloatArray  # (jobs, options); not above 0: no option
    counts: tuple[FloatArray, ...]  # by type, (jobs, options)
    capacity: FloatArray  # by type


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prices:
    """Prices, and the proof of how good they are: no allocation is worth more than `bound`."""

    prices: FloatArray  # by type, in units of value a GPU
    bound: float


def solve_prices(market: Market, start: FloatArray | None = None) -> Prices:
    """Prices whose dual bound is near its least."""
    num_types = len(market.capacity)
    prices = np.zeros(num_types) if start is None else start.astype(np.float64).copy()
    surplus = _surplus(market, prices)
    bound = _bound(market, surplus, prices)
    for _ in range(_MOST_SWEEPS):
        before = bound
        for kind in range(num_types):
            bound, surplus = _improve(market, prices, kind, surplus, bound)
        if before - bound <= _GOOD_ENOUGH * max(abs(bound), 1e-300):
            break
    return Prices(prices=prices, bound=bound)


def choose_options(market: Market, prices: FloatArray) -> tuple[IntArray, FloatArray]:
    """What each job picks at these prices, -1 for nothing, and what that leaves it."""
    if market.values.shape[1] == 0:
        return np.full(len(market.values), -1, dtype=np.int64), np.zeros(len(market.values))
    surplus = _surplus(market, prices)
    best = surplus.argmax(axis=1)
    left = surplus[np.arange(len(best)), best]
    return np.where(left >= 0, best, -1).astype(np.int64), np.maximum(left, 0.0)


def _surplus(market: Market, prices: FloatArray) -> FloatArray:
    """What each option leaves after its GPUs are paid; minus infinity for what is no option."""
    surplus = np.where(market.values > 0, market.values, -np.inf)
    for price, counts in zip(prices, market.counts, strict=True):
        if price > 0:
            surplus = surplus - price * counts
    return surplus


def _bound(market: Market, surplus: FloatArray, prices: FloatArray) -> float:
    best = surplus.max(axis=1, initial=0.0)
    return float(best.sum() + prices @ market.capacity)


def _improve(
    market: Market, prices: FloatArray, kind: int, surplus: FloatArray, bound: float
) -> tuple[float, FloatArray]:
    """Move one price to where the bound is least along it; `prices` is changed in place."""
    counts, old = market.counts[kind], float(prices[kind])
    without = surplus + old * counts
    used = counts > 0
    if not used.any():
        prices[kind] = 0.0
        return _bound(market, without, prices), without
    rest = float(prices @ market.capacity) - old * float(market.capacity[kind])
    # No price above the best value of a single GPU can be needed.
    highest = float(np.max(np.where(used, without, 0.0) / np.maximum(counts, 1), initial=0.0))
    trials, best_price, best_bound = _first_trials(old, highest), old, bound
    for _ in range(_NUM_ROUNDS):
        bounds = _bounds_along(without, counts, trials)
        bounds += trials * market.capacity[kind] + rest
        least = int(bounds.argmin())
        if bounds[least] < best_bound:
            best_price, best_bound = float(trials[least]), float(bounds[least])
        trials = _trials_between(
            float(trials[max(least - 1, 0)]), float(trials[min(least + 1, len(trials) - 1)])
        )
    prices[kind] = best_price
    return best_bound, without - best_price * counts


def _first_trials(old: float, highest: float) -> FloatArray:
    """Prices around the old one, and both ends."""
    if not 0 < old < highest:
        return _trials_between(0.0, highest)
    around = np.geomspace(old / 1.5, min(old * 1.5, highest), _NUM_TRIALS - 2)
    return np.concatenate(([0.0], around, [highest]))


def _trials_between(low: float, high: float) -> FloatArray:
    """Prices from one to the other, in equal ratios: they span several orders of magnitude."""
    if low > 0 or high <= 0:
        return np.geomspace(low, high, _NUM_TRIALS) if high > low else np.array([max(low, 0.0)])
    return np.concatenate(([0.0], np.geomspace(high * 1e-3, high, _NUM_TRIALS - 1)))


def _bounds_along(without: FloatArray, counts: FloatArray, trials: FloatArray) -> FloatArray:
    """The jobs' part of the bound at each trial price of one type."""
    best = np.empty((len(trials), len(without)))
    for row, price in enumerate(trials):
        np.max(without - price * counts, axis=1, initial=0.0, out=best[row])
    total: FloatArray = best.sum(axis=1)
    return total
