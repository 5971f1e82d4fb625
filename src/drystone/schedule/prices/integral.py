"""Who gets which option, when at the prices alone demand misses what there is by a little?

At the best prices a few jobs are torn between two options, so what everybody picks takes a few GPUs
too many or too few. First jobs step back, those that lose least for each GPU set free, until
everything fits; then jobs step up where that gains most for what it takes. Last come exchanges: one
job steps back so that another can step up, if the two together gain.

In a small market a few jobs decide how far the prices' bound is from any choice. Where the two are
more than `_SURE` apart and there are few choices, an integer programme says what is best, and how
far it may be from it at most, if its solver is installed (the extra `solver`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import numpy as np

from drystone.errors import MissingExtra
from drystone.schedule.prices.shadow_prices import Market, Menu, Prices, weighted_sum
from drystone.schedule.programme import Unsolved, choose_exactly
from drystone.schedule.snapshot import FloatArray, IntArray

_MAX_ROUNDS: Final = 12
_MAX_EXCHANGES: Final = 8
_MAX_CANDIDATES: Final = 128
_NUM_OTHER_STARTS: Final = 5
_OFF: Final = 0.04
_NEAR: Final = 5e-3  # this near to the bound, no other start is tried
_MAX_CELLS_TRIED: Final = 20_000  # jobs x options; the more jobs, the smaller the gap
_MAX_JOBS_TRIED: Final = 2_000
_TINY: Final = 1e-9
_GOOD_ENOUGH: Final = 1e-3  # this near to the bound, no exchange is looked for
_SURE: Final = 0.01
_EXACT_GAP: Final = 5e-3
_MAX_EXACT_CHOICES: Final = 600  # takes the solver 5 to 40 ms
_MAX_EXACT_NODES: Final = 200  # of its search: a limit that is the same on every machine


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Picks:
    """The option of each job, -1 for none; together they take no more than there is."""

    options: IntArray
    # By numbers alone no job could gain more than this with what is left over.
    max_gain: float = math.inf
    bound: float = math.inf  # no choice is worth more


def choose(market: Market, solution: Prices) -> Picks:
    """Who gets which option, near the best that there is at these prices."""
    if market.values.shape[1] == 0:
        return Picks(options=np.full(len(market.values), -1, dtype=np.int64))
    with np.errstate(over="ignore"):  # a loss or gain beyond all numbers is infinite
        best = _choose_near(market, solution)
    picks = Picks(
        options=best.picks(),
        max_gain=_TINY * best.worth if best.is_done else math.inf,
        bound=solution.bound,
    )
    if best.worth >= (1 - _SURE) * solution.bound or len(market.menu.row) > _MAX_EXACT_CHOICES:
        return picks
    return _exact(market, best, picks)


def _exact(market: Market, choice: _Choice, picks: Picks) -> Picks:
    """The best choice by an integer programme, or these picks, with what could be better at most.

    The picks stay where the best is not better than they are by more than the programme's gap.
    """
    scale = float(market.values.max())
    costs = np.where(market.values > 0, -market.values / scale, np.inf)
    counts = np.stack(market.counts, axis=2)
    try:
        found = choose_exactly(
            costs,
            counts,
            market.capacity,
            relative_gap=_EXACT_GAP,
            most_nodes=_MAX_EXACT_NODES,
        )
    except (MissingExtra, Unsolved):
        return picks
    rows = (found >= 0).nonzero()[0]
    value = float(market.values[rows, found[rows]].sum())
    taken = counts[rows, found[rows]].sum(axis=0)
    if value <= 0 or (taken > market.capacity + _TINY).any():
        return picks  # where numbers differ by more than the solver can tell apart
    bound = min(value * (1 + _EXACT_GAP), picks.bound)
    if value <= choice.worth * (1 + _EXACT_GAP):
        return replace(picks, bound=max(bound, choice.worth))
    choice.turn_to(found)
    choice.step_up()
    max_gain = _TINY * choice.worth if choice.is_done else math.inf
    return Picks(options=choice.picks(), max_gain=max_gain, bound=max(bound, choice.worth))


def _choose_near(market: Market, solution: Prices) -> _Choice:
    """The best of what is picked at these prices and at some near them, improved by exchanges."""
    best = _choose_at(market, solution.prices)
    if len(market.values) <= _MAX_JOBS_TRIED and market.values.size <= _MAX_CELLS_TRIED:
        for factors in _other_factors(len(solution.prices)):
            if best.worth >= (1 - _NEAR) * solution.bound:
                break
            other = _choose_at(market, solution.prices * factors)
            best = other if other.worth > best.worth else best
    if best.exchange(solution) or not best.is_done:
        best.step_up()
    return best


def _choose_at(market: Market, prices: FloatArray) -> _Choice:
    """What is picked at these prices, made to fit."""
    choice = _Choice(market.menu, market.capacity, prices)
    choice.step_back()
    choice.step_up()
    return choice


@cache
def _other_factors(num_types: int) -> FloatArray:
    """Prices a few percent off, spread evenly: from elsewhere one arrives elsewhere."""
    steps = np.arange(1, _NUM_OTHER_STARTS + 1)[:, None] * np.sqrt(2.0 + np.arange(num_types))
    factors: FloatArray = np.exp(_OFF * (2.0 * (steps % 1.0) - 1.0))
    return factors


class _Choice:
    """What each job takes of the menu, and what that leaves over."""

    def __init__(self, menu: Menu, capacity: FloatArray, prices: FloatArray) -> None:
        self._menu, self._values, self._counts = menu, menu.values, menu.counts
        self._paid = np.maximum(prices, prices.max(initial=0.0) * 1e-3 + 1e-30)
        self._now = menu.best_at(menu.values - weighted_sum(prices, menu.counts))
        self._capacity = capacity
        self.is_done = False  # whether nobody can step up any more
        self._look()
        self._slack = capacity - self._own.sum(axis=1)

    def turn_to(self, options: IntArray) -> None:
        """Take these options instead, -1 for none."""
        self._now = (self._menu.option == options.take(self._menu.row)).nonzero()[0]
        self._look()
        self._slack = self._capacity - self._own.sum(axis=1)

    def picks(self) -> IntArray:
        """The option of each job, -1 for none."""
        picks: IntArray = self._menu.option.take(self._now)
        return picks

    def _look(self) -> None:
        """What each job has now."""
        self._own = self._counts.take(self._now, axis=1)
        self._own_values = self._values.take(self._now)
        self.worth = float(self._own_values.sum())

    def _more(self, choices: IntArray) -> FloatArray:
        """By type and choice: the GPUs that it takes beyond what the job has now."""
        rows = self._menu.row.take(choices)
        more = self._counts.take(choices, axis=1)
        more -= self._own.take(rows, axis=1)
        return more

    def _gain(self) -> FloatArray:
        """By choice: what it is worth beyond what the job has now."""
        gain: FloatArray = self._values - self._own_values.take(self._menu.row)
        return gain

    def step_back(self) -> None:
        """Until everything fits, let those step back that lose least for what they set free."""
        for _ in range(_MAX_ROUNDS):
            over = np.maximum(-self._slack, 0.0)
            if over.max(initial=0.0) <= _TINY:
                return
            can_help = (self._own[over > 0] > 0).any(axis=0)
            choices = can_help.take(self._menu.row).nonzero()[0]
            more = self._more(choices)
            relief = weighted_sum(self._paid, np.minimum(np.maximum(-more, 0.0), over[:, None]))
            # It takes no more of any type than is left, or nothing of it.
            room = np.maximum(self._slack, 0.0)[:, None]
            may = ((relief > 0) & (more <= room + _TINY).all(axis=0)).nonzero()[0]
            choices, more = choices.take(may), more.take(may, axis=1)
            loss = np.maximum(-self._gain().take(choices), 0.0)
            loss += weighted_sum(self._paid, np.maximum(more, 0.0))
            loss /= relief.take(may)
            self._take(choices, loss, more, is_relief=True)

    def step_up(self) -> None:
        """Let jobs take what is left over, the most gain for each GPU's price first."""
        self.is_done = False
        for _ in range(_MAX_ROUNDS):
            gain = self._gain()
            choices = (gain > _TINY * self.worth).nonzero()[0]
            more = self._more(choices)
            fits = (more <= self._slack[:, None] + _TINY).all(axis=0).nonzero()[0]
            if not len(fits):
                self.is_done = True
                return
            choices, more = choices.take(fits), more.take(fits, axis=1)
            cost = weighted_sum(self._paid, np.maximum(more, 0.0)) + self._paid.min()
            # Where every move needs a GPU and none is left, nobody can follow. Nor can those that
            # moved: what is worth more and takes no more would have been taken instead.
            all_need = bool((more.max(axis=0) > 2 * _TINY).all())
            self._take(choices, -gain.take(choices) / cost, more, all_need=all_need)
            if all_need and self._slack.max(initial=0.0) <= _TINY:
                self.is_done = True
                return

    def _take(
        self,
        choices: IntArray,
        badness: FloatArray,
        more: FloatArray,
        *,
        is_relief: bool = False,
        all_need: bool = False,
    ) -> None:
        """Make the best move of each job, the best first, as long as they help and fit."""
        order = badness.argsort(kind="stable")
        choices = choices.take(order)
        left = self._slack.tolist()  # plain numbers: for a handful of types they are quicker
        tried: set[int] = set()
        rows = self._menu.row.take(choices).tolist()
        moves = more.T.take(order, axis=0)
        for at, row in enumerate(rows):
            if row in tried:
                continue
            tried.add(row)
            changes = list(zip(left, moves[at].tolist(), strict=True))
            if is_relief and not any(have < -_TINY and change < 0 for have, change in changes):
                continue
            if all(change <= 0 or have - change >= -_TINY for have, change in changes):
                self._now[row] = choices[at]
                left = [have - change for have, change in changes]
                if (is_relief and min(left) >= -_TINY) or (all_need and max(left) <= _TINY):
                    break
        self._slack = np.array(left)
        self._look()

    def exchange(self, solution: Prices) -> bool:
        """Let one job step back for another while the two together gain; whether any did."""
        for number in range(_MAX_EXCHANGES):
            if self.worth >= (1 - _GOOD_ENOUGH) * solution.bound or not self._exchange_once(
                solution
            ):
                return number > 0
        return True

    def _exchange_once(self, solution: Prices) -> bool:
        """Make the best pair of moves that fits.

        A move loses `loss` against what is best at these prices. All losses together, and what is
        left over times its price, are the distance to the bound: no way to a better choice has
        a move that loses more than that.
        """
        row, starts = self._menu.row, self._menu.starts
        at_prices = self._values - weighted_sum(solution.prices, self._counts)
        loss = np.maximum.reduceat(at_prices, starts).take(row) - at_prices
        loss[self._now] = np.inf
        near = (loss <= solution.bound - self.worth).nonzero()[0]
        if len(near) > _MAX_CANDIDATES:
            near = near[np.argpartition(loss[near], _MAX_CANDIDATES)[:_MAX_CANDIDATES]]
            near.sort()
        row, gain, more = row.take(near), self._gain().take(near), self._more(near)
        net = gain[:, None] + gain
        net[row[:, None] == row] = -np.inf
        for kind, left in enumerate(self._slack):
            net[more[kind][:, None] + more[kind] > left + _TINY] = -np.inf
        best = int(net.argmax()) if net.size else 0
        if not net.size or net.flat[best] <= _TINY * self.worth:
            return False
        for move in divmod(best, len(row)):
            self._slack -= more[:, move]
            self._now[row[move]] = near[move]
        self._look()
        return True
