"""Who gets which option, when at the prices alone demand misses what there is by a little?

At the best prices a few jobs are torn between two options, so what everybody picks takes a few GPUs
too many or too few. First jobs step back, those that lose least for each GPU set free, until
everything fits; then jobs step up where that gains most for what it takes. Last come exchanges: one
job steps back so that another can step up, if the two together gain.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from drystone.schedule.prices import Market, Prices, choose_options
from drystone.schedule.snapshot import BoolArray, FloatArray, IntArray

_MOST_ROUNDS: Final = 12
_MOST_EXCHANGES: Final = 8
_MOST_CANDIDATES: Final = 128
_NUM_OTHER_STARTS: Final = 5
_OFF: Final = 0.04
_NEAR: Final = 5e-3  # this near to the bound, no other start is tried
_MOST_CELLS_TRIED: Final = 20_000  # jobs x options; the more jobs, the smaller the gap
_MOST_JOBS_TRIED: Final = 2_000
_TINY: Final = 1e-9
_GOOD_ENOUGH: Final = 1e-3  # this near to the bound, no exchange is looked for


def choose_within(market: Market, solution: Prices) -> IntArray:
    """The option of each job, -1 for none; together they take no more than there is."""
    if market.values.shape[1] == 0:
        return np.full(len(market.values), -1, dtype=np.int64)
    best = _choose_at(market, solution.prices)
    if len(market.values) <= _MOST_JOBS_TRIED and market.values.size <= _MOST_CELLS_TRIED:
        for factors in _other_factors(len(solution.prices)):
            if best.worth() >= (1 - _NEAR) * solution.bound:
                break
            other = _choose_at(market, solution.prices * factors)
            best = other if other.worth() > best.worth() else best
    best.exchange(solution)
    best.step_up()
    return best.picks()


def _choose_at(market: Market, prices: FloatArray) -> _Choice:
    """What is picked at these prices, made to fit."""
    choice = _Choice(market, prices, choose_options(market, prices)[0])
    choice.step_back()
    choice.step_up()
    return choice


def _other_factors(num_types: int) -> FloatArray:
    """Prices a few percent off, spread evenly: from elsewhere one arrives elsewhere."""
    steps = np.arange(1, _NUM_OTHER_STARTS + 1)[:, None] * np.sqrt(2.0 + np.arange(num_types))
    factors: FloatArray = np.exp(_OFF * (2.0 * (steps % 1.0) - 1.0))
    return factors


def value_of(market: Market, picks: IntArray) -> float:
    """What these picks are worth together."""
    rows = np.flatnonzero(picks >= 0)
    return float(market.values[rows, picks[rows]].sum())


class _Choice:
    """The options taken, and what they leave over. The last column stands for no option."""

    def __init__(self, market: Market, prices: FloatArray, picks: IntArray) -> None:
        num_jobs, self._nothing = market.values.shape
        self._rows = np.arange(num_jobs)
        values = np.where(market.values > 0, market.values, -np.inf)
        self._values = np.concatenate((values, np.zeros((num_jobs, 1))), axis=1)
        self._counts = np.zeros((len(prices), num_jobs, self._nothing + 1))
        for kind, counts in enumerate(market.counts):
            self._counts[kind, :, :-1] = counts
        self._paid = np.maximum(prices, prices.max(initial=0.0) * 1e-3 + 1e-30)
        self._now = np.where(picks >= 0, picks, self._nothing)
        self._slack = market.capacity - self._taken()

    def picks(self) -> IntArray:
        return np.where(self._now == self._nothing, -1, self._now)

    def _taken(self) -> FloatArray:
        total: FloatArray = self._counts[:, self._rows, self._now].sum(axis=1)
        return total

    def _more(self) -> FloatArray:
        """By type, job and option: the GPUs that it takes beyond what the job has now."""
        now = self._counts[:, self._rows, self._now]
        more: FloatArray = self._counts - now[:, :, None]
        return more

    def _gain(self) -> FloatArray:
        gain: FloatArray = self._values - self._values[self._rows, self._now][:, None]
        return gain

    def step_back(self) -> None:
        """Until everything fits, let those step back that lose least for what they set free."""
        for _ in range(_MOST_ROUNDS):
            over = np.maximum(-self._slack, 0.0)
            if over.max(initial=0.0) <= _TINY:
                return
            more = self._more()
            relief = np.einsum("k,kjo->jo", self._paid, np.clip(-more, 0.0, over[:, None, None]))
            worse = np.einsum("k,kjo->jo", self._paid, np.clip(more, 0.0, None))
            may = (relief > 0) & np.isfinite(self._values) & self._fits_beside(more)
            loss = np.maximum(-self._gain(), 0.0) + worse
            self._take(_ratio(loss, relief, may), more, is_relief=True)

    def step_up(self) -> None:
        """Let jobs take what is left over, the most gain for each GPU's price first."""
        for _ in range(_MOST_ROUNDS):
            more, gain = self._more(), self._gain()
            may = gain > _TINY * self.worth()
            may &= (more <= self._slack[:, None, None] + _TINY).all(axis=0)
            if not may.any():
                return
            cost = np.einsum("k,kjo->jo", self._paid, np.clip(more, 0.0, None))
            self._take(_ratio(-gain, cost + self._paid.min(), may), more, is_relief=False)

    def _fits_beside(self, more: FloatArray) -> BoolArray:
        """Whether a move takes no more of any type than is left, or nothing of it."""
        room = np.maximum(self._slack, 0.0)[:, None, None]
        return np.asarray((more <= room + _TINY).all(axis=0), dtype=np.bool_)

    def _take(self, badness: FloatArray, more: FloatArray, *, is_relief: bool) -> None:
        """Make the best move of each job, the best first, as long as they help and fit."""
        best = badness.argmin(axis=1)
        of_best = badness[self._rows, best]
        order = np.argsort(of_best, kind="stable")
        order = order[np.isfinite(of_best[order])]
        moves = more[:, order, best[order]].T.tolist()
        left = self._slack.tolist()  # plain numbers: for a handful of types they are quicker
        for row, move in zip(order.tolist(), moves, strict=True):
            if is_relief:
                if min(left) >= -_TINY:
                    break
                may = any(
                    have < -_TINY and change < 0 for have, change in zip(left, move, strict=True)
                )
            else:
                may = True
            if may and all(
                change <= 0 or have - change >= -_TINY
                for have, change in zip(left, move, strict=True)
            ):
                self._now[row] = best[row]
                left = [have - change for have, change in zip(left, move, strict=True)]
        self._slack = np.array(left)

    def exchange(self, solution: Prices) -> None:
        """Let one job step back for another while the two together gain."""
        for _ in range(_MOST_EXCHANGES):
            if self.worth() >= (1 - _GOOD_ENOUGH) * solution.bound or not self._exchange_once(
                solution
            ):
                return

    def worth(self) -> float:
        return float(self._values[self._rows, self._now].sum())

    def _exchange_once(self, solution: Prices) -> bool:
        """Make the best pair of moves that fits.

        A move loses `loss` against what is best at these prices. All losses together, and what is
        left over times its price, are the distance to the bound: no way to a better choice has
        a move that loses more than that.
        """
        more, gain = self._more(), self._gain()
        at_prices = gain - np.einsum("k,kjo->jo", solution.prices, more)
        loss = at_prices.max(axis=1)[:, None] - at_prices
        loss[self._rows, self._now] = np.inf
        near = np.flatnonzero(loss.ravel() <= solution.bound - self.worth())
        if len(near) > _MOST_CANDIDATES:
            near = near[np.argpartition(loss.ravel()[near], _MOST_CANDIDATES)[:_MOST_CANDIDATES]]
        row, option = np.divmod(np.sort(near), loss.shape[1])
        gain, more = gain[row, option], more[:, row, option]
        net = gain[:, None] + gain
        net[row[:, None] == row] = -np.inf
        for kind, left in enumerate(self._slack):
            net[more[kind][:, None] + more[kind] > left + _TINY] = -np.inf
        best = int(net.argmax()) if net.size else 0
        if not net.size or net.flat[best] <= _TINY * self.worth():
            return False
        for move in divmod(best, len(row)):
            self._slack -= more[:, move]
            self._now[row[move]] = option[move]
        return True


def _ratio(top: FloatArray, bottom: FloatArray, where: BoolArray) -> FloatArray:
    """One by the other where that is asked for, infinity elsewhere."""
    result: FloatArray = np.divide(top, bottom, out=np.full(top.shape, np.inf), where=where)
    return result
