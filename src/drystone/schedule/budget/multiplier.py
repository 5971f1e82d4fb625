"""Budget balance: what was spent too much or too little so far, and over how long it is made good.

The multiplier comes from the frontier (`belief.py`) and stays where it is while beliefs do. There
is one feedback, and it is slow: a balance of dollars grows by the budget and shrinks by what is
spent, and is to be used up or made good within a horizon, so the frontier is read at the budget and
a horizon's share of the balance. What running jobs will still cost counts as spent: what is
promised cannot be spent again, and who looks only at bills overspends until the first long jobs
end. The horizon should see many jobs come, since what a few of them cost strays by itself, and to
follow that costs time: jobs that come in a dear hour would be slower than those of a cheap one, and
a mean of two speeds is slower than the speed in their middle (boa.md 2.2).

What moves with the money is the level: how many times the least that keeps up is spent. The shape
of the frontier is soon known; how often jobs come and how large they are is not, and near the least
that keeps up ten percent of that are a factor of fifty in the multiplier. So levels are averaged,
in logarithms, over `STEADY_JOBS` jobs, and do not fall below `1 + ELBOW` before much is owed: the
last tenth of the money that can be saved costs several times the time.

Debt is never forgiven. Credit is kept up to `MAX_CREDIT_HORIZONS` budgets of a horizon: what a
quiet week did not need is not all thrown at the next busy hour.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from drystone.errors import InvalidSpec
from drystone.units import HOUR_SECONDS

MAX_CREDIT_HORIZONS: Final = 2.0
STEADY_JOBS: Final = 30.0
ELBOW: Final = 0.2
ELBOW_JOBS: Final = 100.0  # what the budget is while so many come: who owes that has no elbow


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetBalance:
    """What the rule remembers between two decisions."""

    budget_dollars_per_hour: float
    horizon_seconds: float
    time_seconds: float = 0.0  # up to which money is counted
    spent_dollars: float = 0.0  # in all, by then
    balance_dollars: float = 0.0  # budget so far less what was spent; below 0: debt

    def __post_init__(self) -> None:
        budget = self.budget_dollars_per_hour
        if not (math.isfinite(budget) and budget > 0):
            raise InvalidSpec(f"the budget is {budget} dollars an hour, must be above 0")
        if not (math.isfinite(self.horizon_seconds) and self.horizon_seconds > 0):
            raise InvalidSpec(f"horizon_seconds is {self.horizon_seconds}, must be above 0")

    @property
    def horizon_dollars(self) -> float:
        """What the budget is in a horizon."""
        return self.budget_dollars_per_hour * self.horizon_seconds / HOUR_SECONDS

    @property
    def owed_horizons(self) -> float:
        """The debt, in budgets of a horizon; below 0: credit."""
        return -self.balance_dollars / self.horizon_dollars

    def target_dollars_per_hour(self, promised_dollars: float = 0.0) -> float:
        """What to spend, so that the balance is used up or made good within the horizon."""
        hours = self.horizon_seconds / HOUR_SECONDS
        return self.budget_dollars_per_hour + (self.balance_dollars - promised_dollars) / hours


def update_balance(
    balance: BudgetBalance, *, now_seconds: float, spent_dollars: float
) -> BudgetBalance:
    """The balance now, where so many dollars have been spent since the beginning.

    That may be less than before: a provider may bill less than was counted.
    """
    if now_seconds < balance.time_seconds:
        raise InvalidSpec("time can only grow")
    hours = (now_seconds - balance.time_seconds) / HOUR_SECONDS
    earned = balance.budget_dollars_per_hour * hours
    new = balance.balance_dollars + earned - (spent_dollars - balance.spent_dollars)
    return replace(
        balance,
        time_seconds=now_seconds,
        spent_dollars=spent_dollars,
        balance_dollars=min(new, MAX_CREDIT_HORIZONS * balance.horizon_dollars),
    )


def steady_level(
    before: float,
    balance: BudgetBalance,
    *,
    promised_dollars: float,
    least_dollars_per_hour: float,
    arrivals_per_second: float,
    num_jobs: float,
    num_new: int,
) -> float:
    """The level after `num_new` of `num_jobs` jobs; `before` is 0 at the first."""
    if not least_dollars_per_hour > 0:
        return max(before, 1.0)  # nothing has to be paid for
    target = balance.target_dollars_per_hour(promised_dollars)
    hours = ELBOW_JOBS / arrivals_per_second / HOUR_SECONDS
    owed = (promised_dollars - balance.balance_dollars) / (balance.budget_dollars_per_hour * hours)
    elbow = 1.0 + ELBOW * min(max(1.0 - owed, 0.0), 1.0)
    wanted = math.log(max(target / least_dollars_per_hour, elbow))
    if not before > 0:
        return math.exp(wanted)
    share = min(num_new * max(1.0 / num_jobs, 1.0 / STEADY_JOBS), 1.0)
    return before * math.exp(share * (wanted - math.log(before)))
