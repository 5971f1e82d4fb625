"""Renting under a budget: every job gets at once what its speedup is worth, and keeps it.

The policy of BOA Constrictor (arXiv:2602.01404, arXiv:2406.15560), extended to several GPU types
and to options of any kind. One decision in five steps. (1) Count arrivals; rates, sizes, speeds and
prices give the frontier, and the frontier says what a dollar is worth: mu (`frontier.py`).
What starts cost is told, and corrected by what was paid for them (`multiplier.py`).
(2) Read it at the budget that makes good what was spent too much or too little so far, and correct
mu by that (`multiplier.py`). (3) Every new job picks the option with the least
(w + mu price) (work / speed + startup): boa.md 2.3, with a start as in 2.4. (4) Picks are packed
onto the nodes that are here; for those that do not fit, nodes are rented, and what nobody uses and
nobody waits with is given back, but for places that money pays for which jobs cannot use
(`spares.py`). (5) A running job changes its option where that lowers the same
sum for its remaining work, restart and later phases included, but not within `KEEP_STARTUPS` times
what its start cost.

Where lengths are not known, mu is what makes the jobs that are present spend the budget, and nobody
is resized. While more than `MAX_DEBT_HORIZONS` of budget is owed, nodes are rented for no job that
could wait for another to end: jobs queue where a budget is below what their cheapest options cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from drystone.describe.market import Offer
from drystone.errors import NothingFits
from drystone.schedule.budget.arrivals import (
    Arrivals,
    Paths,
    believed_classes,
    count_arrivals,
    first_arrivals,
)
from drystone.schedule.budget.blocks import RestOfJobs, weigh_rest
from drystone.schedule.budget.frontier import Frontier, trace_frontier
from drystone.schedule.budget.multiplier import (
    BudgetBalance,
    StartCosts,
    count_training,
    expect_starts,
    update_balance,
)
from drystone.schedule.budget.nodes import (
    Wanted,
    rent_and_release,
    type_prices,
)
from drystone.schedule.budget.spares import (
    Spares,
    Starts,
    count_starts,
    pay_for_spares,
    plan_spares,
)
from drystone.schedule.decision import Decision, Memory, Wake, change_job, refuse_jobs
from drystone.schedule.limits import named_options
from drystone.schedule.packing import Room, make_room
from drystone.schedule.renting import cheapest_offers, option_rents, own_gpus, rounded_cap
from drystone.schedule.snapshot import BoolArray, FloatArray, IntArray, Placement, Snapshot
from drystone.units import HOUR_SECONDS

# The horizon of the feedback: so many mean completion times, and the time in which so many jobs
# come, within bounds. What few jobs cost strays by itself, and to follow that costs time.
HORIZON_COMPLETIONS: Final = 4.0
HORIZON_ARRIVALS: Final = 16.0
MIN_HORIZON_SECONDS: Final = HOUR_SECONDS
MAX_HORIZON_SECONDS: Final = 24 * HOUR_SECONDS
# A job keeps its option for so many times what a start costs, so that restarts take a small share.
KEEP_STARTUPS: Final = 4.0
KEEP_SECONDS: Final = 60.0  # and at least for so long
MAX_DEBT_HORIZONS: Final = 1.0
_NUM_HALVINGS: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BudgetMemory:
    """What the policy remembers between decisions."""

    arrivals: Arrivals
    balance: BudgetBalance | None  # None: there is no limit on money
    picks: Mapping[str, int]  # of the jobs that still wait
    starts: StartCosts
    extra_start_seconds: float = 0.0  # beyond what is told of a start; learned anew as jobs come
    paths: Paths = field(default_factory=dict)
    began: Starts = field(default_factory=Starts)  # what spare places are reckoned from


def budget(snapshot: Snapshot, memory: Memory) -> tuple[list[Decision], Memory]:
    """Start every job on the option it is worth, renting for it; give back what is idle."""
    before = memory if isinstance(memory, BudgetMemory) else _first_memory(snapshot)
    arrivals = count_arrivals(before.arrivals, snapshot)
    offers = cheapest_offers(
        snapshot.offers, snapshot.gpu_types, snapshot.hard_cap_dollars_per_hour
    )
    prices = _option_prices(snapshot, offers)
    costs, extra = before.starts, before.extra_start_seconds
    has_arrivals = bool(arrivals.active - before.arrivals.active)
    if snapshot.knows_lengths:
        idle_dollars = before.began.idle_dollars(snapshot.now_seconds)
        costs = count_training(before.starts, snapshot, idle_dollars)
        if has_arrivals:  # paths hold for as long as nobody comes
            extra = costs.extra_seconds(snapshot.spent_dollars)
    startups = np.maximum(snapshot.startup_seconds + extra, 0.0)
    frontier, paths = _believed_frontier(snapshot, arrivals, prices, extra, before.paths)
    balance = _balance_now(before.balance, snapshot, _horizon_seconds(snapshot, frontier))
    multiplier = _multiplier(snapshot, frontier, balance, prices)
    rest = weigh_rest(snapshot, _job_prices(snapshot, prices), multiplier, startups)

    room = make_room(snapshot)
    wanted = Wanted(snapshot, offers, room, _max_rentals(snapshot, balance))
    numbers = {"job_hours_per_dollar": multiplier}
    # Who waits for nodes that are on their way keeps its pick; anybody else picks again.
    kept = before.picks if snapshot.rentals.coming else {}
    starts, picks = _start(snapshot, rest.start, kept, room, wanted, numbers)
    resizes = (
        _resize(snapshot, rest, startups, room, wanted, numbers) if snapshot.knows_lengths else []
    )
    began = count_starts(before.began, snapshot, offers, starts, has_arrivals=has_arrivals)
    spares = plan_spares(snapshot, began, offers, frontier, balance)
    rentals, num_kept = rent_and_release(
        snapshot, wanted=wanted, room=room, spares=spares.num_nodes
    )
    after = BudgetMemory(
        arrivals=arrivals,
        balance=balance,
        picks=picks,
        starts=expect_starts(costs, snapshot, [*starts, *resizes]),
        extra_start_seconds=extra,
        paths=paths,
        began=pay_for_spares(began, snapshot, offers, num_kept),
    )
    return [*_refuse(snapshot), *starts, *resizes, *rentals, *_wakes(spares)], after


def _wakes(spares: Spares) -> list[Decision]:
    """Ask to decide again when places have waited long enough for the next job."""
    if not spares.num_nodes:
        return []
    return [Wake(at_seconds=spares.until_seconds, reason="nobody may have come until then")]


def _first_memory(snapshot: Snapshot) -> BudgetMemory:
    return BudgetMemory(
        arrivals=first_arrivals(snapshot.now_seconds),
        balance=None,
        picks={},
        starts=StartCosts(first_dollars=snapshot.spent_dollars),
    )


def _balance_now(
    balance: BudgetBalance | None, snapshot: Snapshot, horizon_seconds: float
) -> BudgetBalance | None:
    """The balance, at the budget and the horizon of now; None where there is no limit on money."""
    limit = snapshot.budget_dollars_per_hour
    if not (np.isfinite(limit) and limit > 0):
        return None
    if balance is None:
        return BudgetBalance(
            budget_dollars_per_hour=limit,
            horizon_seconds=horizon_seconds,
            time_seconds=snapshot.now_seconds,
            spent_dollars=snapshot.spent_dollars,
        )
    after = update_balance(
        balance, now_seconds=snapshot.now_seconds, spent_dollars=snapshot.spent_dollars
    )
    return replace(after, budget_dollars_per_hour=limit, horizon_seconds=horizon_seconds)


def _max_rentals(snapshot: Snapshot, balance: BudgetBalance | None) -> float:
    """For how many waiting jobs nodes may be rented: any number, none in debt, one if none runs."""
    if balance is None:
        return np.inf
    whole = balance.budget_dollars_per_hour * balance.horizon_seconds / HOUR_SECONDS
    if balance.balance_dollars >= -MAX_DEBT_HORIZONS * whole:
        return np.inf
    return 0.0 if snapshot.jobs.is_running.any() else 1.0


def _refuse(snapshot: Snapshot) -> list[Decision]:
    """Waiting jobs that none of their options allows to run, ever."""
    possible = ((snapshot.job_speeds > 0) & _allowed(snapshot)).any(axis=1)
    reason = "it has no option within the limits that its owner set"
    return refuse_jobs(snapshot.jobs, ~np.asarray(possible), reason)


def _option_prices(snapshot: Snapshot, offers: Mapping[int, Offer]) -> FloatArray:
    """Dollars an hour of every option, (sets, options).

    Infinite where a type cannot be had, and where what must be rented is above the hard cap.
    """
    prices, counts = type_prices(snapshot, offers), snapshot.options.counts
    cap = snapshot.hard_cap_dollars_per_hour
    known = np.where(np.isfinite(prices), prices, 0.0)
    missing = (counts[:, :, ~np.isfinite(prices)] > 0).any(axis=2)
    if np.isfinite(cap):
        missing |= option_rents(counts, own_gpus(snapshot), offers) > rounded_cap(cap)
    return np.where(missing, np.inf, counts @ known)


def _believed_frontier(
    snapshot: Snapshot,
    arrivals: Arrivals,
    prices: FloatArray,
    extra_start_seconds: float,
    paths: Paths,
) -> tuple[Frontier | None, Paths]:
    """What jobs gain by money, by what was seen so far; None where that is not known or needed."""
    if not np.isfinite(snapshot.budget_dollars_per_hour) or not snapshot.knows_lengths:
        return None, paths
    classes, paths = believed_classes(arrivals, snapshot, prices, paths, extra_start_seconds)
    return None if classes is None else trace_frontier(classes), paths


def _horizon_seconds(snapshot: Snapshot, frontier: Frontier | None) -> float:
    """Within which a debt is to be made good: some completion times, and some jobs."""
    if frontier is None:
        return MAX_HORIZON_SECONDS if snapshot.knows_lengths else 6 * MIN_HORIZON_SECONDS
    try:
        mean = frontier.at_budget(snapshot.budget_dollars_per_hour).mean_completion_seconds
    except NothingFits:  # more arrives than the budget can carry: the cheapest for everyone
        mean = float(frontier.mean_completion_seconds[0])
    some_jobs = HORIZON_ARRIVALS / float(frontier.classes.arrivals_per_second.sum())
    wanted = max(HORIZON_COMPLETIONS * mean, some_jobs, MIN_HORIZON_SECONDS)
    return min(wanted, MAX_HORIZON_SECONDS)


def _multiplier(
    snapshot: Snapshot, frontier: Frontier | None, balance: BudgetBalance | None, prices: FloatArray
) -> float:
    """What a dollar is worth in job-hours now; 0 where money does not count."""
    if balance is None:
        return 0.0
    if not snapshot.knows_lengths:
        limit = snapshot.budget_dollars_per_hour
        return _instant_multiplier(snapshot, prices, limit) * balance.correction
    if frontier is None:
        return 0.0
    return frontier.multiplier_at(balance.target_dollars_per_hour) * balance.correction


def _instant_multiplier(snapshot: Snapshot, prices: FloatArray, limit: float) -> float:
    """The least multiplier at which the jobs that are present spend no more than the budget."""
    rows = np.arange(len(snapshot.jobs))
    job_prices = _job_prices(snapshot, prices)
    low, high = -20.0, 20.0
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        values = weigh_rest(
            snapshot, job_prices, float(np.exp(middle)), snapshot.startup_seconds
        ).start
        able = np.isfinite(values).any(axis=1)
        picked = job_prices[rows, values.argmin(axis=1)] if values.size else np.zeros(len(rows))
        if float(np.where(able, picked, 0.0).sum()) > limit:
            low = middle
        else:
            high = middle
    return float(np.exp(high))


def _job_prices(snapshot: Snapshot, prices: FloatArray) -> FloatArray:
    """Dollars an hour, (jobs, options); infinite where a job cannot or may not have an option."""
    return np.where(_allowed(snapshot), prices[snapshot.jobs.option_set], np.inf)


def _allowed(snapshot: Snapshot) -> BoolArray:
    """Whether each job may take each option, by the limits its owner set."""
    jobs, allowed = snapshot.jobs, np.ones(snapshot.job_speeds.shape, dtype=np.bool_)
    rows = np.flatnonzero(jobs.is_limited)
    if len(rows):
        counts = snapshot.options.counts[jobs.option_set[rows]]
        specs = [jobs.specs[row] for row in rows.tolist()]
        allowed[rows] = named_options(specs, counts, snapshot.gpu_types)
    return allowed


def _start(
    snapshot: Snapshot,
    values: FloatArray,
    picks: Mapping[str, int],
    room: Room,
    wanted: Wanted,
    numbers: Mapping[str, float],
) -> tuple[list[Decision], dict[str, int]]:
    """Waiting jobs in order of submission: here if it fits, else on nodes to be rented."""
    decisions: list[Decision] = []
    waiting: dict[str, int] = {}
    for row in np.flatnonzero(~snapshot.jobs.is_running).tolist():
        job_id = snapshot.jobs.specs[row].id
        order = np.argsort(values[row], kind="stable").tolist()
        if picks.get(job_id, -1) in order:
            order.insert(0, picks[job_id])
        for option in order:
            if not np.isfinite(values[row, option]):
                continue
            counts = snapshot.counts(row, option)
            placement = room.place(counts)
            if placement is not None:
                reason = "what its speedup is worth at the budget, and there is room"
                start = change_job(
                    snapshot.jobs, row, option, placement, reason=reason, numbers=numbers
                )
                decisions += [start] if start is not None else []
                break
            if wanted.add(counts):
                waiting[job_id] = option
                break
    return decisions, waiting


def _resize(
    snapshot: Snapshot,
    rest: RestOfJobs,
    startups: FloatArray,
    room: Room,
    wanted: Wanted,
    numbers: Mapping[str, float],
) -> list[Decision]:
    """Running jobs whose rest is clearly better done on another option: here, or once rented."""
    decisions: list[Decision] = []
    jobs = snapshot.jobs
    if not len(jobs):
        return decisions
    best = rest.start.argmin(axis=1)
    least = rest.start[np.arange(len(jobs)), best]
    ran = snapshot.now_seconds - np.nan_to_num(jobs.running_since_seconds, nan=np.inf)
    startup = startups[np.arange(len(jobs)), np.maximum(jobs.option, 0)]
    is_settled = ran >= np.maximum(KEEP_STARTUPS * startup, KEEP_SECONDS)
    gains = jobs.is_running & is_settled & (best != jobs.option) & (least < rest.stay)
    for row in np.flatnonzero(gains).tolist():
        option, held = int(best[row]), jobs.placements[row]
        counts = snapshot.counts(row, option)
        room.give_back(held)
        placement = room.place(counts)
        if placement is None:
            room.take(held)
            wanted.add(np.maximum(counts - _whole_nodes(snapshot, held), 0))
            continue
        saving = 1 - float(least[row] / rest.stay[row])
        reason = f"{saving:.0%} less time and money for what is left, restart included"
        resize = change_job(jobs, row, option, placement, reason=reason, numbers=numbers)
        decisions += [resize] if resize is not None else []
    return decisions


def _whole_nodes(snapshot: Snapshot, held: Placement) -> IntArray:
    """GPUs by type of the nodes that a job has for itself, which it would keep if it grew."""
    nodes = snapshot.nodes
    own = np.zeros(len(snapshot.gpu_types), dtype=np.int64)
    for node, count in held:
        if count + nodes.free[node] == nodes.num_gpus[node]:
            own[nodes.type_index[node]] += nodes.num_gpus[node]
    return own
