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
_LEAST_HEAT: Final = 1e-280  # its inverse, times squares of counts of GPUs, is still a number


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
    bound = smooth.bound(prices)
    if start is not None:
        before = smooth.bound(start)
        if before <= bound:
            return Prices(prices=start.astype(np.float64), bound=before)
    return Prices(prices=prices, bound=bound)


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


class _SmoothDual:
    """The smooth neighbour of the dual: its value, slope and curvature at given prices.

    Arrays are (options, jobs): sums and maxima over options then run along whole rows.
    """

    def __init__(self, market: Market, rows: IntArray) -> None:
        values = np.where(market.values > 0, market.values, -np.inf)[rows]
        self._values = np.ascontiguousarray(values.T)
        kinds = len(market.counts)
        # The counts by type, then their squares.
        self._moments = np.empty((2 * kinds, *self._values.shape))
        for kind, one in enumerate(market.counts):
            self._moments[kind] = one[rows].T
        counts = self._moments[:kinds]
        np.square(counts, out=self._moments[kinds:])
        self._counts, self._flat = counts, counts.reshape(kinds, -1)
        self._best: FloatArray = self._values.max(axis=0)
        self._capacity = market.capacity
        takes = counts > 0
        # Above these nobody takes any of a type, so that no bound is least there.
        worth = np.where(takes, self._values / np.maximum(counts, 1.0), 0.0)
        self.most_prices: FloatArray = worth.max(axis=(1, 2), initial=0.0)
        self._pairs = [
            (one, other)
            for one in range(kinds)
            for other in range(one)
            if (takes[one] & takes[other]).any()
        ]

    def _left(self, prices: FloatArray) -> tuple[FloatArray, FloatArray]:
        """What each option leaves after its GPUs are paid, and the best of each job, or 0."""
        left: FloatArray = self._values - (prices @ self._flat).reshape(self._values.shape)
        most: FloatArray = left.max(axis=0)
        return left, np.maximum(most, 0.0, out=most)

    def bound(self, prices: FloatArray) -> float:
        """The dual itself: what no allocation can exceed."""
        return float(self._left(prices)[1].sum() + prices @ self._capacity)

    def at(self, prices: FloatArray, share: float) -> tuple[float, FloatArray, FloatArray]:
        """Value, slope by type, and curvature (types x types)."""
        heat = np.maximum(share * self._best, _LEAST_HEAT)
        cold = 1.0 / heat
        picked, most = self._left(prices)
        picked -= most
        # What is worse by more than a number can say is picked by nobody: exp(-inf) is 0.
        with np.errstate(over="ignore"):
            picked *= cold
        np.exp(picked, out=picked)  # in what proportion each option is picked
        total = picked.sum(axis=0)
        total += np.exp(-most * cold)
        value = float(most.sum() + heat @ np.log(total) + prices @ self._capacity)
        picked /= total
        kinds = len(prices)
        moments = np.einsum("oj,koj->kj", picked, self._moments)
        demand = moments[:kinds]
        slope = self._capacity - demand.sum(axis=1)
        curvature = -(demand * cold) @ demand.T
        curvature.flat[:: kinds + 1] += moments[kinds:] @ cold
        for one, other in self._pairs:
            both = np.einsum("oj,oj,oj->j", picked, self._counts[one], self._counts[other])
            curvature[one, other] += both @ cold
            curvature[other, one] = curvature[one, other]
        return value, slope, curvature


def _descend(smooth: _SmoothDual, prices: FloatArray, share: float) -> FloatArray:
    """Newton's method for one share of smoothing; prices stay between 0 and `most_prices`.

    Where every job is sure of its option nothing curves, and a step would be endless: it then ends
    at the most that anybody pays, and is cut from there.
    """
    prices = np.minimum(prices, smooth.most_prices)
    value, slope, curvature = smooth.at(prices, share)
    for _ in range(_MOST_STEPS):
        step = _newton_step(prices, slope, curvature)
        if step is None:
            break
        before, length = value, 1.0
        for _ in range(_MOST_HALVINGS):
            trial = np.clip(prices + length * step, 0.0, smooth.most_prices)
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
    if not is_free.any():
        return None
    # The others stay: their rows say that they move by nothing.
    part = np.where(is_free[:, None] & is_free, curvature, 0.0)
    diagonal = part.diagonal()
    # A price to which nobody reacts moves by as much as the least of the others would.
    floor = max(float(diagonal.max()) * 1e-9, 1e-300)
    damped = (1.0 + _DAMPING) * diagonal + floor
    part.flat[:: len(prices) + 1] = np.where(is_free, damped, 1.0)
    step: FloatArray = np.linalg.solve(part, np.where(is_free, -slope, 0.0))
    return step
