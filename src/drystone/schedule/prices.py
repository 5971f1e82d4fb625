"""What is a GPU of each type worth? Shadow prices from the dual, with a certificate.

The problem: every job takes one option or none, worth `values[job, option]`; the GPUs of each type
are limited. Given a price for each type, every job picks for itself the option that is worth most
after paying for its GPUs: one array operation. The dual

    D(p) = sum over jobs of max(0, max over options of (value - p . counts)) + p . capacity

bounds every allocation from above, for any prices p >= 0, and is convex, but has kinks. Its smooth
neighbour takes t log(sum of exp(. / t)) for the inner maximum, with t a share of the best value of
the job; it is above D by at most t log(1 + options) a job. Newton's method makes it small in few
steps, since there are few types, for shares that shrink from one to the next. Whatever prices come
out, D itself is taken at them, so the bound holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from drystone.schedule.snapshot import FloatArray, IntArray

# Shares of smoothing, one after another, and the most Newton steps at each. Prices that are known
# from before are near enough to begin late in the list.
_SHARES: Final = (0.3, 0.1, 0.03, 0.01)
_FIRST_SHARE_WHEN_KNOWN: Final = 2
_MOST_STEPS: Final = 6
_MOST_HALVINGS: Final = 6
_STEP_CUT: Final = 0.25
# A step that improves the smooth bound by less than this part of its share is the last.
_GOOD_ENOUGH: Final = 1e-3
_DAMPING: Final = 1e-3


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
    prices = np.zeros(num_types) if start is None else start.astype(np.float64)
    is_alive = (market.values > 0).any(axis=1) if market.values.shape[1] else np.zeros(0, bool)
    if not is_alive.any():
        return Prices(prices=np.zeros(num_types), bound=0.0)
    smooth = _SmoothDual(market, np.flatnonzero(is_alive))
    known = start is not None and bool((start > 0).any())
    for share in _SHARES[_FIRST_SHARE_WHEN_KNOWN if known else 0 :]:
        prices = _descend(smooth, prices, share)
    return _better_of(market, prices, start)


def dual_bound(market: Market, prices: FloatArray) -> float:
    """What no allocation can exceed."""
    if market.values.shape[1] == 0:
        return 0.0
    best = _surplus(market, prices).max(axis=1, initial=0.0)
    return float(best.sum() + prices @ market.capacity)


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
            surplus -= price * counts
    return surplus


def _better_of(market: Market, prices: FloatArray, start: FloatArray | None) -> Prices:
    """The prices found, unless those at the start have the smaller bound."""
    bound = dual_bound(market, prices)
    if start is not None:
        before = dual_bound(market, start)
        if before <= bound:
            return Prices(prices=start.astype(np.float64), bound=before)
    return Prices(prices=prices, bound=bound)


class _SmoothDual:
    """The smooth neighbour of the dual: its value, slope and curvature at given prices.

    Arrays are (options, jobs): sums and maxima over options then run along whole rows.
    """

    def __init__(self, market: Market, rows: IntArray) -> None:
        values = np.where(market.values > 0, market.values, -np.inf)[rows]
        self._values = np.ascontiguousarray(values.T)
        self._counts = np.stack([np.ascontiguousarray(one[rows].T) for one in market.counts])
        self._squares = self._counts**2
        self._best: FloatArray = self._values.max(axis=0)
        self._capacity = market.capacity
        kinds = range(len(self._counts))
        takes = self._counts > 0
        self._pairs = [
            (one, other)
            for one in kinds
            for other in range(one)
            if (takes[one] & takes[other]).any()
        ]

    def at(self, prices: FloatArray, share: float) -> tuple[float, FloatArray, FloatArray]:
        """Value, slope by type, and curvature (types x types)."""
        heat = share * self._best
        picked = self._values.copy()
        for price, counts in zip(prices, self._counts, strict=True):
            if price > 0:
                picked -= price * counts
        most = np.maximum(picked.max(axis=0), 0.0)
        picked -= most
        picked /= heat
        np.exp(picked, out=picked)  # in what proportion each option is picked
        total = picked.sum(axis=0) + np.exp(-most / heat)
        value = float((most + heat * np.log(total)).sum() + prices @ self._capacity)
        picked /= total
        demand = np.einsum("oj,koj->kj", picked, self._counts)
        squares = np.einsum("oj,koj->kj", picked, self._squares)
        slope = self._capacity - demand.sum(axis=1)
        curvature = -(demand / heat) @ demand.T
        curvature[np.diag_indices(len(slope))] += squares @ (1.0 / heat)
        for one, other in self._pairs:
            both = np.einsum("oj,oj,oj->j", picked, self._counts[one], self._counts[other])
            curvature[one, other] += both @ (1.0 / heat)
            curvature[other, one] = curvature[one, other]
        return value, slope, curvature


def _descend(smooth: _SmoothDual, prices: FloatArray, share: float) -> FloatArray:
    """Newton's method for one share of smoothing; prices never go below 0."""
    value, slope, curvature = smooth.at(prices, share)
    for _ in range(_MOST_STEPS):
        step = _newton_step(prices, slope, curvature)
        if step is None:
            break
        before, length = value, 1.0
        for _ in range(_MOST_HALVINGS):
            trial = np.maximum(prices + length * step, 0.0)
            value, slope, curvature = smooth.at(trial, share)
            if value < before:
                break
            length *= _STEP_CUT
        else:
            break
        prices = trial
        if before - value <= _GOOD_ENOUGH * share * abs(value):
            break
    return prices


def _newton_step(prices: FloatArray, slope: FloatArray, curvature: FloatArray) -> FloatArray | None:
    """Where to, for the prices that can move; None where none can."""
    is_free = (prices > 0) | (slope < 0)
    free = np.flatnonzero(is_free)
    if len(free) == 0:
        return None
    part = curvature[np.ix_(free, free)]
    diagonal = np.diag(part)
    # A price to which nobody reacts moves by as much as the least of the others would.
    floor = max(float(diagonal.max()) * 1e-9, 1e-300)
    part = part + np.diag(_DAMPING * diagonal + floor)
    step = np.zeros(len(prices))
    step[free] = -np.linalg.solve(part, slope[free])
    return step
