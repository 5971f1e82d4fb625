"""Renting under a budget: every job gets at once what its speedup is worth, and keeps it.

The policy of BOA Constrictor (arXiv:2602.01404, arXiv:2406.15560), extended to several GPU types,
whole nodes and options of any kind. One decision in four steps. (1) Count arrivals; rates, sizes,
speeds and prices of whole nodes give the frontier (`belief.py`). It is made anew when jobs come.
(2) Read it at the budget, with a small share of what was spent too much or too little so far
(`multiplier.py`): that is what a dollar is worth, mu. (3) Every new job picks the option with the
least sum of its time and mu times its dollars, and running ones change where that pays
(`acting.py`). (4) Nodes are rented for those that do not fit, and what nobody uses and nobody waits
with is given back, but for places that save more time than their money would elsewhere
(`spares.py`).

A budget below what jobs cost on their cheapest options cannot keep up: some have to wait, however
it is spent. Then what the budget rents is a cluster that is too small, and whom it serves is
decided as on any such, in order of value for money, by the policy `prices`.

Where lengths are not known, mu is what makes the jobs that are present spend the budget, and nobody
is resized.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from drystone.describe.market import Offer
from drystone.schedule.budget.acting import (
    Terms,
    act_at,
    job_prices,
    limits_now,
    seconds_to_end,
)
from drystone.schedule.budget.arrivals import PRIOR_JOBS, Arrivals, count_arrivals, first_arrivals
from drystone.schedule.budget.belief import Belief, believe, is_too_old
from drystone.schedule.budget.blocks import weigh_rest
from drystone.schedule.budget.leftovers import option_prices
from drystone.schedule.budget.multiplier import BudgetBalance, steady_level, update_balance
from drystone.schedule.budget.spares import (
    Spares,
    Starts,
    count_starts,
    plan_spares,
)
from drystone.schedule.decision import Decision, Memory, Rent, Start, Wake
from drystone.schedule.limits import Used
from drystone.schedule.prices.policy import decide_by_prices
from drystone.schedule.renting import cheapest_offers
from drystone.schedule.snapshot import FloatArray, Snapshot
from drystone.schedule.spot_places import sees_places
from drystone.units import HOUR_SECONDS

# The horizon of the feedback: the time in which so many jobs come, or half of all that came so
# far; some completion times at least.
HORIZON_ARRIVALS: Final = 100.0
HORIZON_COMPLETIONS: Final = 4.0
MIN_HORIZON_SECONDS: Final = HOUR_SECONDS
MAX_HORIZON_SECONDS: Final = 7 * 24 * HOUR_SECONDS
# Jobs have to wait where the budget is so much below what keeps up, until it is so much above.
OVERLOADED_SHARE: Final = 0.97
RELIEVED_SHARE: Final = 1.03
MAX_DEBT_HORIZONS: Final = 1.0
_NUM_HALVINGS: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BudgetMemory:
    """What the policy remembers between decisions."""

    arrivals: Arrivals
    time_seconds: float
    balance: BudgetBalance | None = None  # None: there is no limit on money
    belief: Belief | None = None
    picks: Mapping[str, int] = field(default_factory=dict)  # of the jobs that still wait
    began: Starts = field(default_factory=Starts)  # what spare places are reckoned from
    level: float = 0.0  # what is spent, in multiples of the least that keeps up; 0: not known yet
    used: Mapping[str, Used] = field(default_factory=dict)  # by jobs with limits
    overload: Any = None  # the memory of `prices` while the budget cannot keep up
    is_overloaded: bool = False


@sees_places
def budget(snapshot: Snapshot, memory: Memory) -> tuple[list[Decision], Memory]:
    """Start every job on the option it is worth, renting for it; give back what is idle."""
    before = memory if isinstance(memory, BudgetMemory) else _first_memory(snapshot)
    arrivals = count_arrivals(before.arrivals, snapshot)
    has_arrivals = bool(arrivals.active - before.arrivals.active)
    offers = offers_now(snapshot)
    now = replace(before, arrivals=arrivals, time_seconds=snapshot.now_seconds)
    now = _believe_anew(snapshot, now, offers, has_arrivals=has_arrivals)
    now = replace(now, balance=_balance_now(now, snapshot))
    if now.balance is not None:
        now = replace(now, is_overloaded=_is_overloaded(snapshot, now, now.balance))
    if now.is_overloaded:
        return _share(snapshot, now)
    return _rent_freely(snapshot, replace(now, overload=None), before, offers, has_arrivals)


def offers_now(snapshot: Snapshot) -> dict[int, Offer]:
    """By type: the offer to rent of, below the hard cap."""
    return cheapest_offers(snapshot.offers, snapshot.gpu_types, snapshot.hard_cap_dollars_per_hour)


def _first_memory(snapshot: Snapshot) -> BudgetMemory:
    return BudgetMemory(
        arrivals=first_arrivals(snapshot.now_seconds), time_seconds=snapshot.now_seconds
    )


def _rent_freely(
    snapshot: Snapshot,
    now: BudgetMemory,
    before: BudgetMemory,
    offers: Mapping[int, Offer],
    has_arrivals: bool,
) -> tuple[list[Decision], Memory]:
    """Where the budget keeps up: nobody waits but for nodes to come."""
    belief = now.belief
    shares = np.zeros(len(snapshot.gpu_types)) if belief is None else belief.used_shares
    terms, used = _terms(snapshot, before, offers, shares, now.picks)
    num_new = len(now.arrivals.active - before.arrivals.active)
    promised = _promised_dollars(snapshot, terms)
    level = _level(now, promised, num_new)
    multiplier = _multiplier(snapshot, now, terms, level)
    spares = Spares({})
    if belief is not None and now.balance is not None:
        spares = plan_spares(
            snapshot.now_seconds,
            now.began,
            belief.places,
            belief.arrivals_per_second,
            max(multiplier, _place_multiplier(now.balance, belief, promised, now.arrivals.total)),
        )
    terms = replace(terms, spares=spares.num_nodes, numbers={"job_hours_per_dollar": multiplier})
    acts = act_at(snapshot, terms, multiplier)
    after = replace(
        now,
        picks=acts.picks,
        used=used,
        level=level,
        began=count_starts(now.began, snapshot, offers, acts.changes, has_arrivals=has_arrivals),
    )
    wakes = (
        [Wake(at_seconds=spares.until_seconds, reason="nobody may have come until then")]
        if spares.num_nodes
        else []
    )
    return [*acts.decisions, *wakes], after


def _share(snapshot: Snapshot, now: BudgetMemory) -> tuple[list[Decision], Memory]:
    """Where it does not: what it rents is shared, and some wait."""
    decisions, overload = decide_by_prices(_capped(snapshot, now), now.overload)
    least = 0.0 if now.belief is None else now.belief.least_dollars_per_hour
    missing = max(least - snapshot.budget_dollars_per_hour, 0.0)
    told = (
        f"; the budget of ${snapshot.budget_dollars_per_hour:,.2f} an hour is ${missing:,.2f} "
        "below what keeps up with the jobs that come, so some wait"
        if missing
        else "; more was spent than the budget, and some wait until that is made good"
    )
    said: list[Decision] = [
        replace(decision, reason=decision.reason + told)
        if isinstance(decision, Start | Rent)
        else decision
        for decision in decisions
    ]
    return said, replace(now, overload=overload, picks={})


def _capped(snapshot: Snapshot, now: BudgetMemory) -> Snapshot:
    """The same; in deep debt as if no more might be rented than makes it good, or one node."""
    balance = now.balance
    if balance is None or balance.owed_horizons < MAX_DEBT_HORIZONS:
        return snapshot
    cap = balance.target_dollars_per_hour()
    if not len(snapshot.running):
        prices = [offer.price_dollars_per_hour for offer in snapshot.offers]
        cap = max(cap, min(prices, default=0.0))
    cap = min(max(cap, 0.0), snapshot.hard_cap_dollars_per_hour)
    return replace(snapshot, hard_cap_dollars_per_hour=cap)


def _terms(
    snapshot: Snapshot,
    before: BudgetMemory,
    offers: Mapping[int, Offer],
    shares: FloatArray,
    picks: Mapping[str, int],
) -> tuple[Terms, Mapping[str, Used]]:
    limits = limits_now(snapshot, offers, before.used, snapshot.now_seconds - before.time_seconds)
    return Terms(
        offers=offers,
        used_shares=shares,
        prices=job_prices(snapshot, option_prices(snapshot, offers, shares), limits),
        limits=limits,
        # Who waits for nodes that are on their way keeps its pick; anybody else picks again.
        picks=picks if snapshot.rentals.coming else {},
    ), limits.used


def _believe_anew(
    snapshot: Snapshot, now: BudgetMemory, offers: Mapping[int, Offer], *, has_arrivals: bool
) -> BudgetMemory:
    """The belief, made again if jobs have come or time has passed."""
    limit, belief = snapshot.budget_dollars_per_hour, now.belief
    if not (np.isfinite(limit) and limit > 0) or not snapshot.knows_lengths:
        return replace(now, belief=None)
    is_old = belief is None or is_too_old(belief, now.arrivals, snapshot.now_seconds)
    if not (has_arrivals or is_old):
        return now
    paths = {} if belief is None else belief.paths
    return replace(now, belief=believe(snapshot, now.arrivals, now.began, offers, limit, paths))


def _balance_now(now: BudgetMemory, snapshot: Snapshot) -> BudgetBalance | None:
    """The balance, at the budget and the horizon of now; None where there is no limit on money."""
    limit, balance = snapshot.budget_dollars_per_hour, now.balance
    if not (np.isfinite(limit) and limit > 0):
        return None
    horizon = _horizon_seconds(now.belief, limit, now.arrivals.total)
    if balance is None:
        return BudgetBalance(
            budget_dollars_per_hour=limit,
            horizon_seconds=horizon,
            time_seconds=snapshot.now_seconds,
            spent_dollars=snapshot.spent_dollars,
        )
    after = update_balance(
        balance, now_seconds=snapshot.now_seconds, spent_dollars=snapshot.spent_dollars
    )
    return replace(after, budget_dollars_per_hour=limit, horizon_seconds=horizon)


def _horizon_seconds(belief: Belief | None, limit: float, num_jobs: float) -> float:
    """Within which a debt is to be made good: many jobs, and some completion times."""
    if belief is None:
        return 6 * MIN_HORIZON_SECONDS
    frontier = belief.frontier
    mean = float(
        np.interp(limit, frontier.spend_dollars_per_hour, frontier.mean_completion_seconds)
    )
    many_jobs = max(HORIZON_ARRIVALS, num_jobs / 2) / belief.arrivals_per_second
    wanted = max(HORIZON_COMPLETIONS * mean, many_jobs, MIN_HORIZON_SECONDS)
    return min(wanted, MAX_HORIZON_SECONDS)


def _is_overloaded(snapshot: Snapshot, now: BudgetMemory, balance: BudgetBalance) -> bool:
    """Whether the budget cannot keep up: by what is believed, or by what is owed.

    It lasts until it keeps up again and who waits could start on what the budget pays for.
    """
    if now.belief is None:
        return False
    owed = balance.owed_horizons
    limit, least = balance.budget_dollars_per_hour, now.belief.least_dollars_per_hour
    if owed > MAX_DEBT_HORIZONS or (owed > MAX_DEBT_HORIZONS / 2 and limit < least):
        return True
    if now.is_overloaded and limit < _demand_dollars(snapshot, now.belief.used_shares):
        return True
    share = RELIEVED_SHARE if now.is_overloaded else OVERLOADED_SHARE
    # What n jobs cost strays by a share of 1 / sqrt(n) and more: that is no overload yet.
    return limit < share * least / (1.0 + 2.0 / math.sqrt(now.arrivals.total))


def _demand_dollars(snapshot: Snapshot, used_shares: FloatArray) -> float:
    """What all jobs that are here would cost an hour on their cheapest options."""
    prices = option_prices(snapshot, offers_now(snapshot), used_shares)
    prices = prices[snapshot.jobs.option_set]
    speeds = snapshot.job_speeds
    able = (speeds > 0) & np.isfinite(prices)
    costs = np.where(able, prices / np.where(able, speeds, 1.0), np.inf)
    cheapest = costs.argmin(axis=1) if costs.size else np.zeros(0, dtype=np.int64)
    rates = prices[np.arange(len(prices)), cheapest]
    return float(rates[np.isfinite(rates)].sum())


def _level(now: BudgetMemory, promised_dollars: float, num_new: int) -> float:
    """How many times what keeps up is to be spent; as before where nobody has come."""
    if now.balance is None or now.belief is None or (now.level > 0 and not num_new):
        return now.level
    return steady_level(
        now.level,
        now.balance,
        promised_dollars=promised_dollars,
        least_dollars_per_hour=now.belief.least_dollars_per_hour,
        arrivals_per_second=now.belief.arrivals_per_second,
        num_jobs=now.arrivals.total,
        num_new=num_new,
    )


def _multiplier(snapshot: Snapshot, now: BudgetMemory, terms: Terms, level: float) -> float:
    """What a dollar is worth in job-hours now; 0 where money does not count."""
    if now.balance is None:
        return 0.0
    if not snapshot.knows_lengths:
        limit = now.balance.target_dollars_per_hour()
        return _instant_multiplier(snapshot, terms.prices, limit)
    if now.belief is None:
        return 0.0
    return now.belief.multiplier_at(level * now.belief.least_dollars_per_hour)


def _place_multiplier(
    balance: BudgetBalance, belief: Belief, promised_dollars: float, num_jobs: float
) -> float:
    """For places that stand idle nobody is to owe money, nor to count on what is only believed."""
    seen_share = num_jobs / (num_jobs + PRIOR_JOBS)
    return belief.multiplier_at(seen_share * balance.target_dollars_per_hour(promised_dollars))


def _promised_dollars(snapshot: Snapshot, terms: Terms) -> float:
    """What the jobs that run will still cost if they go on as they are."""
    rows, jobs = snapshot.running, snapshot.jobs
    if not len(rows):
        return 0.0
    at = (rows, jobs.option[rows])
    rates = np.where(np.isfinite(terms.prices[at]), terms.prices[at], 0.0)
    seconds = seconds_to_end(snapshot)[at]
    return float(rates @ np.where(np.isfinite(seconds), seconds, 0.0)) / HOUR_SECONDS


def _instant_multiplier(snapshot: Snapshot, prices: FloatArray, limit: float) -> float:
    """The least multiplier at which the jobs that are present spend no more than the budget."""
    rows = np.arange(len(snapshot.jobs))
    low, high = -20.0, 20.0
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        values = weigh_rest(snapshot, prices, float(np.exp(middle)), snapshot.startup_seconds).start
        able = np.isfinite(values).any(axis=1)
        picked = prices[rows, values.argmin(axis=1)] if values.size else np.zeros(len(rows))
        if float(np.where(able, picked, 0.0).sum()) > limit:
            low = middle
        else:
            high = middle
    return float(np.exp(high))
