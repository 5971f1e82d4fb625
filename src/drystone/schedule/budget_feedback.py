"""How much is a dollar worth now? The budget multiplier, corrected by the money really spent.

Speeds, sizes and arrival rates are never quite what was believed, so the multiplier that theory
gives spends a little too much or too little; such an error mostly moves along the frontier, and
is mended by raising the multiplier while the average spend is above the budget (boa.md 2.6).

The rule: a balance of dollars grows by the budget and shrinks by what is spent, and is to be used
up or made good within a horizon. So the frontier is read at the budget and a horizon's share of the
balance (`target_dollars_per_hour`): how far the multiplier must move to change the spend by so much
depends on the jobs, and is far where they scale well (for speedups k^p as 1 / (1 - p)). What the
frontier does not know is left to `correction`, exp(-balance / (budget x horizon)): in debt a dollar
counts for more than the frontier says, in credit for less. As the multiplier settles, so does the
balance, and a balance that stays where it is means a mean spend equal to the budget, whatever the
error was. The horizon should be several completion times long, since what a decision costs is seen
only while its jobs run, and see many jobs come, since what a few of them cost strays by itself.

Debt is never forgiven. Credit is kept up to `MOST_CREDIT_HORIZONS` budgets of a horizon: what a
quiet week did not need is not all thrown at the next busy hour.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from drystone.errors import InvalidSpec
from drystone.units import HOUR_SECONDS

MOST_CREDIT_HORIZONS: Final = 2.0
_MOST_EXPONENT: Final = 30.0  # e^30: beyond it the cheapest option is everybody's choice anyway


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
    def target_dollars_per_hour(self) -> float:
        """What to spend, so that the balance is used up or made good within the horizon."""
        return self.budget_dollars_per_hour + self.balance_dollars / (
            self.horizon_seconds / HOUR_SECONDS
        )

    @property
    def correction(self) -> float:
        """What the frontier's multiplier is to be multiplied with."""
        whole = self.budget_dollars_per_hour * self.horizon_seconds / HOUR_SECONDS
        return math.exp(min(-self.balance_dollars / whole, _MOST_EXPONENT))


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
    most = MOST_CREDIT_HORIZONS * balance.budget_dollars_per_hour
    most *= balance.horizon_seconds / HOUR_SECONDS
    new = balance.balance_dollars + earned - (spent_dollars - balance.spent_dollars)
    return replace(
        balance,
        time_seconds=now_seconds,
        spent_dollars=spent_dollars,
        balance_dollars=min(new, most),
    )
