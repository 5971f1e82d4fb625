"""Shadow prices: what a GPU of each type is worth, from the dual, with a certificate.

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

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from drystone.schedule.snapshot import FloatArray, IntArray

# For more numbers than this BLAS starts threads, which cost far more than they save here.
_MAX_FOR_BLAS: Final = 4_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Menu:
    """All choices of all jobs."""

    row: IntArray  # whose choice it is, ascending
    option: IntArray  # -1: nothing
    starts: IntArray  # by job: where its stretch begins
    values: FloatArray
    counts: FloatArray  # (types, choices)

    def best_at(self, score: FloatArray) -> IntArray:
        """By job: its choice with the highest score; of equals the first."""
        highest = np.maximum.reduceat(score, self.starts)
        found: IntArray = (score == highest.take(self.row)).nonzero()[0]
        if len(found) > len(self.starts):  # somebody has equals: the first is written last
            best = np.empty(len(self.starts), dtype=np.int64)
            best[self.row[found[::-1]]] = found[::-1]
            return best
        return found


def make_menu(values: FloatArray, counts: Sequence[FloatArray]) -> Menu:
    """Of tables (jobs, options): what options are worth, not above 0 for none, and take by type."""
    num_jobs, width = values.shape
    is_there = np.ones((num_jobs, width + 1), dtype=np.bool_)
    np.greater(values, 0.0, out=is_there[:, :-1])
    at = is_there.ravel().nonzero()[0]
    row = at // (width + 1)
    cell = at - row  # in a table of the options; for nothing, beyond the row
    option = cell - row * width
    ends = (option == width).nonzero()[0]
    option[ends] = -1
    starts = np.zeros(num_jobs, dtype=np.int64)
    starts[1:] = ends[:-1] + 1
    taken = np.zeros((len(counts) + 1, len(at)))
    if width:
        for to, table in zip(taken, (values, *counts), strict=True):
            table.take(cell, out=to, mode="clip")
        taken[:, ends] = 0.0
    return Menu(row=row, option=option, starts=starts, values=taken[0], counts=taken[1:])


def weighted_sum(weights: FloatArray, rows: FloatArray) -> FloatArray:
    """The sum of all rows, each times its weight."""
    if rows.shape[1] > _MAX_FOR_BLAS:
        total: FloatArray = np.einsum("k,kc->c", weights, rows)
        return total
    return weights @ rows


def inner_products(rows: FloatArray, others: FloatArray) -> FloatArray:
    """Of every row with every other row."""
    if rows.shape[1] > _MAX_FOR_BLAS:
        products: FloatArray = np.einsum("kc,lc->kl", rows, others)
        return products
    return rows @ others.T


# Shares of smoothing, one after another, and the most Newton steps at each. Prices that are known
# from before are near enough to begin late in the list.
_SHARES: Final = (0.3, 0.1, 0.03, 0.01)
_FIRST_SHARE_WHEN_KNOWN: Final = 2
_MAX_STEPS: Final = 6
_MAX_HALVINGS: Final = 6
_STEP_CUT: Final = 0.25
# A step that improves the smooth bound by less than this part of its share is the last.
_GOOD_ENOUGH: Final = 1e-3
_DAMPING: Final = 1e-3
_MAX_PLAIN: Final = 8  # types for which plain numbers are quicker than a library
_MIN_HEAT: Final = 1e-280  # its inverse, times squares of counts of GPUs, is still a number


@dataclass(frozen=True, kw_only=True, eq=False)
class Market:
    """The problem: what options are worth, what they take, and what there is."""

    values: FloatArray  # (jobs, options); not above 0: no option
    counts: tuple[FloatArray, ...]  # by type, (jobs, options)
    capacity: FloatArray  # by type

    @cached_property
    def menu(self) -> Menu:
        """The same as one list of choices."""
        return make_menu(self.values, self.counts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prices:
    """Prices, and the proof of how good they are: no allocation is worth more than `bound`."""

    prices: FloatArray  # by type, in units of value a GPU
    bound: float


def solve_prices(market: Market, start: FloatArray | None = None) -> Prices:
    """Prices whose dual bound is near its least."""
    num_types = len(market.capacity)
    menu = market.menu
    if len(menu.row) == len(menu.starts):  # there is nothing but "nothing"
        return Prices(prices=np.zeros(num_types), bound=0.0)
    smooth = _SmoothDual(menu, market.capacity)
    prices = np.zeros(num_types) if start is None else start.astype(np.float64)
    known = start is not None and bool((start > 0).any())
    # What no job could pay, in units of one of tiny worth, may be no number: then it is infinite.
    with np.errstate(over="ignore"):
        for share in _SHARES[_FIRST_SHARE_WHEN_KNOWN if known else 0 :]:
            smooth.cool(share)
            prices = _descend(smooth, prices, share)
    bound = smooth.bound(prices)
    if start is not None:
        before = smooth.bound(start)
        if before <= bound * (1 + 1e-12):
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
    """The smooth neighbour of the dual: its value, and then its slope and curvature there.

    Everything is a list of choices, "nothing" among them, so what a job has at least is 0.
    """

    def __init__(self, menu: Menu, capacity: FloatArray) -> None:
        self._row, self._starts = menu.row, menu.starts
        self._values, self._counts, self._capacity = menu.values, menu.counts, capacity
        self._best: FloatArray = np.maximum.reduceat(menu.values, menu.starts)
        # Above these nobody takes any of a type, so that no bound is least there.
        worth = np.zeros(menu.counts.shape)
        np.divide(menu.values, menu.counts, out=worth, where=menu.counts > 0)
        self.max_prices: FloatArray = worth.max(axis=1, initial=0.0)

    def cool(self, share: float) -> None:
        """From now on, smooth by this share of the best value of each job."""
        self._heat = np.maximum(share * self._best, _MIN_HEAT)
        self._cold = 1.0 / self._heat
        cold = self._cold.take(self._row)
        # What a choice is worth and takes, by the heat of its job.
        self._cold_values, self._cold_counts = self._values * cold, self._counts * cold

    def bound(self, prices: FloatArray) -> float:
        """The dual itself: what no allocation can exceed."""
        left = self._values - weighted_sum(prices, self._counts)
        return float(np.maximum.reduceat(left, self._starts).sum() + prices @ self._capacity)

    def value(self, prices: FloatArray) -> float:
        """The smooth dual at these prices."""
        picked: FloatArray = self._cold_values - weighted_sum(prices, self._cold_counts)
        # How often each is picked against nothing: at most exp(1 / share), which is a number, and
        # never, if it is worse by more than a number can say.
        self._picked = np.exp(picked, out=picked)
        self._total = np.add.reduceat(picked, self._starts)
        heat = np.log(self._total)
        heat *= self._heat
        return float(heat.sum() + prices @ self._capacity)

    def curve(self) -> tuple[FloatArray, FloatArray]:
        """Slope by type, and curvature (types x types), where the value was asked for last."""
        taken = self._counts * (self._picked / self._total.take(self._row))
        demand = np.add.reduceat(taken, self._starts, axis=1)
        curvature = inner_products(taken, self._cold_counts)
        curvature -= inner_products(demand * self._cold, demand)
        return self._capacity - demand.sum(axis=1), curvature


def _descend(smooth: _SmoothDual, prices: FloatArray, share: float) -> FloatArray:
    """Newton's method for one share of smoothing; prices stay between 0 and `max_prices`.

    Where every job is sure of its option nothing curves, and a step would be endless: it then ends
    at the most that anybody pays, and is cut from there.
    """
    limits = smooth.max_prices.tolist()  # plain numbers: for a handful of types they are quicker
    prices = np.minimum(prices, smooth.max_prices)
    value = smooth.value(prices)
    for _ in range(_MAX_STEPS):
        now = prices.tolist()
        step = _newton_step(now, *smooth.curve())
        if step is None:
            break
        before, length = value, 1.0
        for _ in range(_MAX_HALVINGS):
            trial = np.array(
                [
                    min(max(price + length * change, 0.0), limit)
                    for price, change, limit in zip(now, step, limits, strict=True)
                ]
            )
            value = smooth.value(trial)
            if value < before:
                break
            length *= _STEP_CUT
        else:
            break
        prices = trial
        if before - value <= _GOOD_ENOUGH * share * abs(value):
            break
    return prices


def _newton_step(
    prices: list[float], slope: FloatArray, curvature: FloatArray
) -> list[float] | None:
    """Where to, for the prices that can move; None where none can."""
    down, rows = (-slope).tolist(), curvature.tolist()
    is_free = [price > 0 or fall > 0 for price, fall in zip(prices, down, strict=True)]
    if not any(is_free):
        return None
    most = max(rows[kind][kind] for kind, can_move in enumerate(is_free) if can_move)
    # A price to which nobody reacts moves by as much as the least of the others would.
    floor = max(most * 1e-9, 1e-300)
    for kind, can_move in enumerate(is_free):
        if can_move:
            rows[kind][kind] = (1.0 + _DAMPING) * max(rows[kind][kind], 0.0) + floor
            continue
        # It stays: its row says that it moves by nothing.
        for other in range(len(rows)):
            rows[kind][other] = rows[other][kind] = 0.0
        rows[kind][kind], down[kind] = 1.0, 0.0
    steep = [row[kind] for kind, row in enumerate(rows)]
    # Where rounding has left no curvature to solve with, every type steps by its own alone.
    return _solve(rows, down) or [fall / curve for fall, curve in zip(down, steep, strict=True)]


def _solve(rows: list[list[float]], right: list[float]) -> list[float] | None:
    """Gauss's elimination without exchanges, as befits a positive definite matrix; None if not.

    `right` is left as it was.
    """
    size, right = len(rows), right.copy()
    if size > _MAX_PLAIN:
        return _solve_large(rows, right)
    for step in range(size):
        row, pivot = rows[step], rows[step][step]
        if not pivot > 0.0:
            return None
        for other in range(step + 1, size):
            factor = rows[other][step] / pivot
            if factor:
                below = rows[other]
                for column in range(step + 1, size):
                    below[column] -= factor * row[column]
                right[other] -= factor * right[step]
    for step in range(size - 1, -1, -1):
        row = rows[step]
        for column in range(step + 1, size):
            right[step] -= row[column] * right[column]
        right[step] /= row[step]
    return right if all(map(math.isfinite, right)) else None


def _solve_large(rows: list[list[float]], right: list[float]) -> list[float] | None:
    try:
        found: list[float] = np.linalg.solve(rows, right).tolist()
    except np.linalg.LinAlgError:
        return None
    return found if all(map(math.isfinite, found)) else None
