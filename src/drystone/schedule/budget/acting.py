"""Starting, resizing and renting at a given multiplier: what `budget` and its opponents share.

Where a dollar is worth mu job-hours, a job takes the option with the least of

    w (wait + startup + work / speed) + mu dollars

with whole nodes paid for (`leftovers.py`), and waits only for nodes that have to be rented. Options
that keep its deadline come before all that do not, and those beyond its owner's money or time do
not exist. A running job changes its option where that lowers the same sum for its remaining work,
restart and later phases included, by `MIN_GAIN`, but not within `KEEP_STARTUPS` times what its
start cost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from drystone.describe.market import Offer
from drystone.schedule.budget.blocks import RestOfJobs, weigh_rest
from drystone.schedule.budget.leftovers import find_places
from drystone.schedule.budget.nodes import Wanted, rent_and_release
from drystone.schedule.decision import Decision, Numbers, Refuse, change_job, refuse_jobs
from drystone.schedule.limits import Limits, Used, check_limits
from drystone.schedule.packing import Room, make_room
from drystone.schedule.renting import gpu_price, own_gpus, rounded_cap
from drystone.schedule.snapshot import FloatArray, IntArray, Placement, Snapshot
from drystone.schedule.words import NO_CHOICE, cost_words, speed_words

# A job keeps its option for so many times what a start costs, so that restarts take a small share.
KEEP_STARTUPS: Final = 4.0
KEEP_SECONDS: Final = 60.0  # and at least for so long
MIN_GAIN: Final = 0.03
LATE_SECONDS: Final = 1e9  # weighs more than any sum of time and money
# How far money may rise in value where nodes are few, and from where; in logarithms.
_LEAST_MULTIPLIER: Final = 1e-4
_MAX_RISE: Final = 12.0
_NUM_HALVINGS: Final = 12
_ENDLESS_GPUS: Final = 100_000
NO_OPTION: Final = "it has no option within the limits that its owner set"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Terms:
    """On which terms jobs get nodes at this decision."""

    offers: Mapping[int, Offer]
    used_shares: FloatArray  # by type (`leftovers.py`)
    prices: FloatArray  # dollars an hour, (jobs, options); infinite: it cannot be had
    limits: Limits
    picks: Mapping[str, int] = field(default_factory=dict)  # of who waits for nodes to come
    spares: Mapping[int, int] = field(default_factory=dict)  # idle nodes to keep, by type
    numbers: Numbers = field(default_factory=dict)
    max_rentals: float = np.inf  # for so many waiting jobs nodes may be rented


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Acts:
    """What is done, and what has to be remembered of it."""

    decisions: list[Decision]
    changes: list[Decision]  # of those: starts and resizes
    picks: Mapping[str, int]
    num_kept: Mapping[int, int]  # idle nodes, by type


def act_at(snapshot: Snapshot, terms: Terms, multiplier: float) -> Acts:
    """Start and resize jobs, rent and release nodes, where a dollar is worth so many job-hours."""
    multiplier, rest = weigh_within(snapshot, terms, multiplier)
    room = make_room(snapshot)
    values = _start_values(snapshot, terms, rest, multiplier, room)
    return act_on(snapshot, terms, values, room, rest if snapshot.knows_lengths else None)


def weigh_within(snapshot: Snapshot, terms: Terms, multiplier: float) -> tuple[float, RestOfJobs]:
    """The least multiplier from this one on at which all jobs that are here fit what there can be.

    There can be so many nodes of an offer, and a hard cap: where jobs want more, they would wait
    for each other, so money is worth more to all of them until they want less.
    """
    rest = weigh_rest(snapshot, terms.prices, multiplier, snapshot.startup_seconds)
    most = _most_gpus(snapshot, terms.offers)
    cap = snapshot.hard_cap_dollars_per_hour
    has_limit = bool(np.isfinite(most).any()) or np.isfinite(cap)
    if not (snapshot.knows_lengths and has_limit) or _fits(snapshot, terms, rest, most, cap):
        return multiplier, rest
    low = math.log(max(multiplier, _LEAST_MULTIPLIER))
    high = low + _MAX_RISE
    found = rest
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        tried = weigh_rest(snapshot, terms.prices, math.exp(middle), snapshot.startup_seconds)
        if _fits(snapshot, terms, tried, most, cap):
            high, found = middle, tried
        else:
            low = middle
    return (multiplier, rest) if found is rest else (math.exp(high), found)


def _most_gpus(snapshot: Snapshot, offers: Mapping[int, Offer]) -> FloatArray:
    """By type: GPUs that there can be at most, the owner's included; infinite without an end."""
    most: FloatArray = own_gpus(snapshot).astype(np.float64)
    for kind, offer in offers.items():
        many = offer.most_nodes * offer.num_gpus
        most[kind] = np.inf if many >= _ENDLESS_GPUS else most[kind] + many
    return most


def _fits(
    snapshot: Snapshot, terms: Terms, rest: RestOfJobs, most: FloatArray, cap_dollars: float
) -> bool:
    """Whether all jobs can have what they want now; who runs and would not change counts as is."""
    jobs, rows = snapshot.jobs, np.arange(len(snapshot.jobs))
    if not rest.start.size:
        return True
    wanted = rest.start.argmin(axis=1)
    able = np.isfinite(rest.start[rows, wanted])
    keeps = jobs.is_running & ~(rest.start[rows, wanted] < (1 - MIN_GAIN) * rest.stay)
    chosen = np.where(keeps, np.maximum(jobs.option, 0), wanted)
    counted = able | keeps
    counts = snapshot.options.counts[jobs.option_set, chosen][counted].sum(axis=0)
    dollars = terms.prices[rows, chosen][counted]
    is_cheap = float(dollars[np.isfinite(dollars)].sum()) <= rounded_cap(cap_dollars)
    return is_cheap and bool((counts <= most).all())


def act_on(
    snapshot: Snapshot,
    terms: Terms,
    values: FloatArray,
    room: Room,
    rest: RestOfJobs | None = None,
) -> Acts:
    """The same where the worth of starting is given, (jobs, options): less is better."""
    wanted = Wanted(snapshot, terms.offers, room, terms.max_rentals)
    starts, picks = _start(snapshot, values, terms, room, wanted)
    resizes = _resize(snapshot, rest, terms, room, wanted) if rest is not None else []
    rentals, num_kept = rent_and_release(snapshot, wanted=wanted, room=room, spares=terms.spares)
    return Acts(
        decisions=[*_refuse(snapshot, terms.limits), *starts, *resizes, *rentals],
        changes=[*starts, *resizes],
        picks=picks,
        num_kept=num_kept,
    )


def limits_now(
    snapshot: Snapshot,
    offers: Mapping[int, Offer],
    used: Mapping[str, Used],
    elapsed_seconds: float,
) -> Limits:
    """What owners allow: GPU types and numbers, money and running time."""
    prices = {snapshot.gpu_types[kind]: gpu_price(offer) for kind, offer in offers.items()}
    return check_limits(
        snapshot,
        snapshot.job_speeds,
        dollars_per_hour=prices,
        used=used,
        elapsed_seconds=elapsed_seconds,
    )


def job_prices(snapshot: Snapshot, prices: FloatArray, limits: Limits) -> FloatArray:
    """Dollars an hour, (jobs, options); infinite where a job cannot or may not have an option."""
    own: FloatArray = prices[snapshot.jobs.option_set]
    return own if limits.allowed is None else np.where(limits.allowed, own, np.inf)


def seconds_to_end(snapshot: Snapshot) -> FloatArray:
    """How long each job would take on each option once it has started, (jobs, options)."""
    speeds = snapshot.job_speeds
    left = np.maximum(snapshot.jobs.remaining_samples, 0.0)[:, None]
    return np.where(speeds > 0, left / np.where(speeds > 0, speeds, 1.0), np.inf)


def _refuse(snapshot: Snapshot, limits: Limits) -> list[Decision]:
    """Waiting jobs that can never run here, or that their owner's limits leave no option."""
    no_option = np.asarray(~(snapshot.job_speeds > 0).any(axis=1), dtype=np.bool_)
    no_option[list(limits.refused)] = False
    refused: list[Decision] = refuse_jobs(snapshot.jobs, no_option, NO_OPTION)
    for row, why in limits.refused.items():
        refused.append(Refuse(job_id=snapshot.jobs.specs[row].id, reason=f"{NO_OPTION}: {why}"))
    return refused


def _start_values(
    snapshot: Snapshot, terms: Terms, rest: RestOfJobs, multiplier: float, room: Room
) -> FloatArray:
    """What starting costs, (jobs, options), with the wait, and less what others pay for anyway."""
    places = find_places(snapshot, terms.offers, terms.used_shares, room)
    seconds = seconds_to_end(snapshot) + snapshot.startup_seconds
    shared = np.minimum(seconds, places.saved_seconds) * places.saved_dollars_per_hour
    weighed = snapshot.jobs.weights[:, None] * places.wait_seconds
    values: FloatArray = rest.start + weighed
    if snapshot.knows_lengths:
        values -= multiplier * shared
    return values + _lateness(snapshot, seconds + places.wait_seconds)


def _lateness(snapshot: Snapshot, seconds: FloatArray) -> FloatArray:
    """What is added for every option that would end after the deadline: more than all else."""
    late = np.zeros(seconds.shape)
    left = snapshot.jobs.deadline_seconds - snapshot.now_seconds
    rows = np.flatnonzero(np.isfinite(left))
    if len(rows) and snapshot.knows_lengths:
        beyond = seconds[rows] - left[rows, None]
        late[rows] = np.where(beyond > 0, LATE_SECONDS + beyond, 0.0)
    return late


def _start(
    snapshot: Snapshot, values: FloatArray, terms: Terms, room: Room, wanted: Wanted
) -> tuple[list[Decision], dict[str, int]]:
    """Waiting jobs in order of submission: here if it fits, else on nodes to be rented."""
    decisions: list[Decision] = []
    waiting: dict[str, int] = {}
    for row in np.flatnonzero(~snapshot.jobs.is_running).tolist():
        job_id = snapshot.jobs.specs[row].id
        order = np.argsort(values[row], kind="stable").tolist()
        if terms.picks.get(job_id, -1) in order:
            order.insert(0, terms.picks[job_id])
        for option in order:
            if not np.isfinite(values[row, option]):
                continue
            counts = snapshot.counts(row, option)
            placement = room.place(counts)
            if placement is not None:
                reason = _why_started(snapshot, terms, values, row, option)
                start = change_job(
                    snapshot.jobs, row, option, placement, reason=reason, numbers=terms.numbers
                )
                decisions += [start] if start is not None else []
                break
            if wanted.add(counts):
                waiting[job_id] = option
                break
    return decisions, waiting


def _why_started(
    snapshot: Snapshot, terms: Terms, values: FloatArray, row: int, option: int
) -> str:
    """The option against the best of the others, in speed and money."""
    others = values[row].copy()
    others[option] = np.inf
    second = int(others.argmin())
    if not np.isfinite(others[second]):
        return NO_CHOICE
    speeds, dollars = snapshot.job_speeds[row], terms.prices[row]
    words = speed_words(snapshot, row, option, second, float(speeds[option] / speeds[second]))
    if not 0 < dollars[second] < np.inf:
        return words
    return words + cost_words(float(dollars[option] / dollars[second]), "money")


def _resize(
    snapshot: Snapshot, rest: RestOfJobs, terms: Terms, room: Room, wanted: Wanted
) -> list[Decision]:
    """Running jobs whose rest is clearly better done on another option: here, or once rented."""
    decisions: list[Decision] = []
    jobs = snapshot.jobs
    if not len(snapshot.running):
        return decisions
    rows, held = np.arange(len(jobs)), np.maximum(jobs.option, 0)
    seconds, startups = seconds_to_end(snapshot), snapshot.startup_seconds
    values = rest.start + _lateness(snapshot, seconds + startups)
    stay = rest.stay + _lateness(snapshot, seconds)[rows, held]
    best = values.argmin(axis=1)
    least = values[rows, best]
    ran = snapshot.now_seconds - np.nan_to_num(jobs.running_since_seconds, nan=np.inf)
    is_settled = ran >= np.maximum(KEEP_STARTUPS * startups[rows, held], KEEP_SECONDS)
    is_better = least < (1 - MIN_GAIN) * stay
    if snapshot.barred is not None:  # what it has it is not to keep
        must_move = snapshot.barred[rows, held] & np.isfinite(least)
        is_settled, is_better = is_settled | must_move, is_better | must_move
    for row in np.flatnonzero(jobs.is_running & is_settled & is_better).tolist():
        option, placement = int(best[row]), jobs.placements[row]
        if option == jobs.option[row]:
            continue
        counts = snapshot.counts(row, option)
        room.give_back(placement)
        found = room.place(counts)
        if found is None:
            room.take(placement)
            wanted.add(np.maximum(counts - _whole_nodes(snapshot, placement), 0))
            continue
        saving = max(1 - float(least[row] / stay[row]), 0.0)
        held_speed = float(snapshot.job_speeds[row, jobs.option[row]])
        ratio = float(snapshot.job_speeds[row, option]) / max(held_speed, 1e-100)
        words = speed_words(snapshot, row, option, int(jobs.option[row]), ratio)
        reason = f"{words}: {saving:.0%} less time and money for what is left, restart included"
        resize = change_job(jobs, row, option, found, reason=reason, numbers=terms.numbers)
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
