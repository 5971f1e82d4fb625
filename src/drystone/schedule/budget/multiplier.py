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

What a start costs is learned from the same money (`StartCosts`): all that was paid beyond training,
for nodes that join, wait for the others of a job, start it, stand idle or leave, is laid on the
starts. A start that is told wrong, as where a machine is quicker or busier than was thought, shifts
the whole frontier, and the balance would have to stay away from 0 to make up for that.

Debt is never forgiven. Credit is kept up to `MAX_CREDIT_HORIZONS` budgets of a horizon: what a
quiet week did not need is not all thrown at the next busy hour.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import numpy as np

from drystone.errors import InvalidSpec
from drystone.schedule.decision import Decision, Resize, Start
from drystone.schedule.snapshot import Placement, Snapshot
from drystone.units import HOUR_SECONDS

MAX_CREDIT_HORIZONS: Final = 2.0
# What is told of starts weighs as much as so many that were seen.
TOLD_STARTS: Final = 16.0
_MAX_EXPONENT: Final = 30.0  # e^30: beyond it the cheapest option is everybody's choice anyway


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
        return math.exp(min(-self.balance_dollars / whole, _MAX_EXPONENT))


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
    most = MAX_CREDIT_HORIZONS * balance.budget_dollars_per_hour
    most *= balance.horizon_seconds / HOUR_SECONDS
    new = balance.balance_dollars + earned - (spent_dollars - balance.spent_dollars)
    return replace(
        balance,
        time_seconds=now_seconds,
        spent_dollars=spent_dollars,
        balance_dollars=min(new, most),
    )


class _Held(NamedTuple):
    """A job that runs, or was told to start, at the last look."""

    remaining_samples: float
    dollars_per_sample: float  # on the rented GPUs that it has
    dollars_per_hour: float  # the same GPUs
    start_dollars_per_hour: float = 0.0  # of its GPUs where it was told to start; else 0
    told_dollars: float = 0.0  # and what that start is said to cost


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StartCosts:
    """Money since the first look: for training, and beyond it, for how many starts."""

    first_dollars: float  # spent before
    trained_dollars: float = 0.0
    told_dollars: float = 0.0  # what the starts were said to cost
    started_dollars_per_hour: float = 0.0  # of the GPUs of all starts
    num_starts: int = 0
    time_seconds: float = math.inf  # of the last look
    held: Mapping[str, _Held] = field(default_factory=dict)

    def extra_seconds(self, spent_dollars: float) -> float:
        """By how much a start takes longer than is told, as it is paid for; below 0: shorter."""
        if not self.started_dollars_per_hour > 0:
            return 0.0
        beyond = spent_dollars - self.first_dollars - self.trained_dollars - self.told_dollars
        share = self.num_starts / (self.num_starts + TOLD_STARTS)
        return share * beyond / self.started_dollars_per_hour * HOUR_SECONDS


def count_training(costs: StartCosts, snapshot: Snapshot, idle_dollars: float = 0.0) -> StartCosts:
    """Add what was trained since the last look, and who has started. Lengths must be known.

    What was paid for nodes that are kept idle on purpose is no cost of starts either.
    A job that is not there any more has done what was left of it, or as much as it could by now: it
    may have been cancelled.
    """
    jobs, now = snapshot.jobs, snapshot.now_seconds
    hours = max(0.0, now - costs.time_seconds) / HOUR_SECONDS
    rows = np.flatnonzero(jobs.is_running).tolist()
    trained, started = 0.0, list[_Held]()
    for job_id, before in costs.held.items():
        row = jobs.row_of.get(job_id)
        left = float(jobs.remaining_samples[row]) if row is not None else 0.0
        done = (before.remaining_samples - left) * before.dollars_per_sample
        trained += done if row is not None else min(done, before.dollars_per_hour * hours)
        if before.start_dollars_per_hour > 0 and (row is None or jobs.option[row] >= 0):
            started.append(before)
    placements = [jobs.placements[row] for row in rows]
    held = _held(snapshot, rows, jobs.option[rows].tolist(), placements)
    return replace(
        costs,
        trained_dollars=costs.trained_dollars + trained + idle_dollars,
        told_dollars=costs.told_dollars + sum(job.told_dollars for job in started),
        started_dollars_per_hour=costs.started_dollars_per_hour
        + sum(job.start_dollars_per_hour for job in started),
        num_starts=costs.num_starts + len(started),
        time_seconds=now,
        held={
            job_id: job._replace(start_dollars_per_hour=0.0, told_dollars=0.0)
            for job_id, job in held.items()
        },
    )


def expect_starts(
    costs: StartCosts, snapshot: Snapshot, decisions: Sequence[Decision]
) -> StartCosts:
    """Take down who is told to start: it may have ended by the next look."""
    made = [decision for decision in decisions if isinstance(decision, Start | Resize)]
    rows = [snapshot.jobs.row_of[decision.job_id] for decision in made]
    new = _held(
        snapshot,
        rows,
        [decision.option for decision in made],
        [decision.placement for decision in made],
    )
    return replace(costs, held={**costs.held, **new}) if made else costs


def _held(
    snapshot: Snapshot, rows: list[int], options: list[int], placements: list[Placement]
) -> dict[str, _Held]:
    """Jobs on GPUs of which some are rented, as if each of them was told to start."""
    jobs = snapshot.jobs
    if not rows or not len(snapshot.rentals.nodes):
        return {}
    prices = np.array([offer.price_dollars_per_hour / offer.num_gpus for offer in snapshot.offers])
    by_node = np.zeros(len(snapshot.nodes))
    by_node[snapshot.rentals.nodes] = prices[snapshot.rentals.offer]
    speeds, startups = snapshot.job_speeds[rows, options], snapshot.startup_seconds[rows, options]
    found: dict[str, _Held] = {}
    for at, row in enumerate(rows):
        price = float(sum(by_node[node] * count for node, count in placements[at]))
        if price > 0 and speeds[at] > 0:
            found[jobs.specs[row].id] = _Held(
                float(jobs.remaining_samples[row]),
                price / float(speeds[at]) / HOUR_SECONDS,
                price,
                price,
                price * float(startups[at]) / HOUR_SECONDS,
            )
    return found
