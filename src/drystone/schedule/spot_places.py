"""Spot places for policies that rent: each spot offer as a GPU type of its own.

A node of a spot offer is the same GPU at another price, which can be taken away; nodes of one job
are not to be in two zones. So a policy sees every place where spot nodes are sold (an offer, or
offers of one `infra`) as a type of its own, and every option of one type once more on each place
that sells it, slower by what restarts will cost there. Prices, whole nodes, packing and the
frontier then need to know nothing of spot; decisions are translated back.

What restarts cost is learned: how long nodes of the place stayed (`Snapshot.histories`), at first
what the offer states (`budget/spot.py`). Where lengths are known, a job with a deadline goes where
`choose_place` sends it: it waits for a spot node while there is time, takes the cheap places first,
and goes on demand when the deadline nears.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from drystone.describe.job import JobSpec
from drystone.describe.market import Offer
from drystone.schedule.budget.spot import (
    ON_DEMAND,
    PRIOR_LIFE_HOURS,
    WAIT,
    DeadlineJob,
    PlaceHistory,
    SpotPlace,
    choose_place,
    hours_kept,
)
from drystone.schedule.decision import Decision, Memory, Move, Policy, Rent, Resize, Start, Wake
from drystone.schedule.renting import (
    cheapest_offers,
    gpu_price,
    num_coming,
    num_here,
    own_gpus,
    rents_under_cap,
)
from drystone.schedule.snapshot import (
    BoolArray,
    FloatArray,
    JobTable,
    NodeTable,
    OptionTable,
    Snapshot,
)
from drystone.units import HOUR_SECONDS

# Assumption: what a lost node costs beside the restart, the work since the last checkpoint; on
# average, and at most (checkpoints every ten minutes).
MEAN_LOST_SECONDS: Final = 300.0
MAX_LOST_SECONDS: Final = 600.0
_TICK_HOURS: Final = 1 / 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where spot nodes of one GPU type are sold."""

    name: str  # of the GPU type that stands for it
    kind: int  # row of the real type
    offers: tuple[int, ...]  # rows
    spot: SpotPlace  # price of a GPU


def sees_places(policy: Policy, *, moves_at_once: bool = False) -> Policy:
    """The policy, deciding on spot places where the market has any.

    One that takes nodes away before those are here that a job is to have next (`moves_at_once`)
    sees that it should move once they are; they are rented for it, unless its deadline is near.
    """

    @functools.wraps(policy)
    def decide(snapshot: Snapshot, memory: Memory) -> tuple[list[Decision], Memory]:
        places = find_places(snapshot)
        if not places:
            return policy(snapshot, memory)
        seen = split(snapshot, places)
        barred, wakes = _bar(seen, places)
        lacking = _keep_until_there(seen, barred, len(places)) if moves_at_once else {}
        if barred.any():
            seen = replace(seen, barred=barred)
        decisions, memory = policy(seen, memory)
        width = snapshot.options.counts.shape[1]
        rents = _rents_for(seen, lacking, decisions)
        return [*(_real(snapshot, one, width) for one in decisions), *rents, *wakes], memory

    return decide


def find_places(snapshot: Snapshot) -> list[Place]:
    """The spot places of a market, in the order of its offers."""
    groups: dict[tuple[str, str], list[int]] = {}
    for row, offer in enumerate(snapshot.offers):
        if offer.is_spot and offer.gpu in snapshot.gpu_types:
            groups.setdefault((offer.gpu, offer.infra or offer.name), []).append(row)
    return [
        Place(
            name=f"{gpu} (spot {where})",
            kind=snapshot.gpu_types.index(gpu),
            offers=tuple(rows),
            spot=_spot_place(snapshot, [snapshot.offers[row] for row in rows]),
        )
        for (gpu, where), rows in groups.items()
    ]


def split(snapshot: Snapshot, places: Sequence[Place]) -> Snapshot:
    """The same with a GPU type for each place."""
    offers, kind_of = list(snapshot.offers), {}
    num_types = len(snapshot.gpu_types)
    for number, place in enumerate(places):
        for row in place.offers:
            offers[row] = replace(offers[row], gpu=place.name, is_spot=False)
            kind_of[row] = num_types + number
    nodes = _split_nodes(snapshot, kind_of, num_types + len(places))
    shares = [_trained_shares(snapshot, place) for place in places]
    return replace(
        snapshot.complete(),
        gpu_types=(*snapshot.gpu_types, *(place.name for place in places)),
        nodes=nodes,
        options=_split_options(snapshot.options, places, shares),
        jobs=_split_jobs(snapshot, places, kind_of, shares),
        offers=tuple(offers),
    )


def believed_history(
    histories: Mapping[str, PlaceHistory], offers: Sequence[Offer]
) -> PlaceHistory:
    """What was seen of the nodes of some offers, beside what the offers state."""
    seen = [histories.get(offer.name, PlaceHistory()) for offer in offers]
    rate = max(offer.reclaims_per_hour for offer in offers)
    return PlaceHistory(
        watched_hours=sum(one.watched_hours for one in seen),
        available_hours=sum(one.available_hours for one in seen),
        num_losses=sum(one.num_losses for one in seen),
        prior_life_hours=1 / rate if rate > 0 else PRIOR_LIFE_HOURS,
    )


def _spot_place(snapshot: Snapshot, offers: Sequence[Offer]) -> SpotPlace:
    in_stock = [offer for offer in offers if not offer.is_short] or list(offers)
    return SpotPlace(
        dollars_per_hour=min(gpu_price(offer) for offer in in_stock),
        is_available=any(not offer.is_short and offer.most_nodes for offer in offers),
        history=believed_history(snapshot.histories, offers),
    )


def _trained_shares(snapshot: Snapshot, place: Place) -> FloatArray:
    """The share of its time in which a job on the place trains, (sets, options).

    A job on n nodes loses one n times as often, and with it a restart and some work.
    """
    options = snapshot.options
    size = max(snapshot.offers[row].num_gpus for row in place.offers)
    num_nodes = -(-options.num_gpus // size)
    hours = (options.startup_seconds(snapshot.startup) + MEAN_LOST_SECONDS) / HOUR_SECONDS
    shares: FloatArray = 1.0 / (1.0 + num_nodes * hours / place.spot.history.life_hours)
    return shares


def _split_nodes(snapshot: Snapshot, kind_of: Mapping[int, int], num_types: int) -> NodeTable:
    nodes, kinds = snapshot.nodes, snapshot.nodes.type_index.copy()
    for node, offer in zip(
        snapshot.rentals.nodes.tolist(), snapshot.rentals.offer.tolist(), strict=True
    ):
        kinds[node] = kind_of.get(offer, int(kinds[node]))
    rows = tuple(np.flatnonzero(kinds == kind) for kind in range(num_types))
    return replace(nodes, type_index=kinds, rows_by_type=rows)


def _split_options(
    table: OptionTable, places: Sequence[Place], shares: Sequence[FloatArray]
) -> OptionTable:
    """All options as they are, then those of one type once more for each place."""
    num_types, counts = table.counts.shape[2], table.counts
    parts = [np.concatenate([counts, np.zeros((*counts.shape[:2], len(places)), np.int64)], 2)]
    speeds = [table.samples_per_second]
    for number, (place, share) in enumerate(zip(places, shares, strict=True)):
        here = counts[:, :, place.kind]
        is_single = (here > 0) & (here == table.num_gpus)
        part = np.zeros((*here.shape, num_types + len(places)), dtype=np.int64)
        part[:, :, num_types + number] = np.where(is_single, here, 0)
        parts.append(part)
        speeds.append(np.where(is_single, table.samples_per_second * share, 0.0))
    return OptionTable(
        counts=np.concatenate(parts, axis=1),
        samples_per_second=np.concatenate(speeds, axis=1),
        memory_bytes=np.tile(table.memory_bytes, (1, 1 + len(places))),
        next_set=table.next_set,
        end_samples=table.end_samples,
    )


def _split_jobs(
    snapshot: Snapshot,
    places: Sequence[Place],
    kind_of: Mapping[int, int],
    shares: Sequence[FloatArray],
) -> JobTable:
    """Who runs on spot nodes has the option of that place; who names a type means its places."""
    jobs, width = snapshot.jobs, snapshot.options.counts.shape[1]
    option, measured = jobs.option.copy(), jobs.measured_speeds
    measured = measured.copy() if measured is not None else None
    first = len(snapshot.gpu_types)
    for row in snapshot.running.tolist():
        kinds = {
            kind_of.get(int(snapshot.node_offer[node]), -1) for node, _ in jobs.placements[row]
        }
        if len(kinds) == 1 and (kind := kinds.pop()) >= 0:
            option[row] += width * (1 + kind - first)
            if measured is not None:
                cell = (int(jobs.option_set[row]), int(jobs.option[row]))
                measured[row] *= shares[kind - first][cell]
    specs = tuple(_split_spec(spec, snapshot.gpu_types, places) for spec in jobs.specs)
    return replace(jobs, specs=specs, option=option, measured_speeds=measured)


def _split_spec(spec: JobSpec, gpu_types: Sequence[str], places: Sequence[Place]) -> JobSpec:
    if not spec.allowed_gpus and not spec.denied_gpus:
        return spec

    def named(names: Iterable[str]) -> list[str]:
        return [*names, *(place.name for place in places if gpu_types[place.kind] in names)]

    allowed, denied = named(spec.allowed_gpus), named(spec.denied_gpus)
    return replace(spec, allowed_gpus=frozenset(allowed), denied_gpus=tuple(denied))


def _bar(seen: Snapshot, places: Sequence[Place]) -> tuple[BoolArray, list[Decision]]:
    """The options that jobs with deadlines are not to have now, and when to look again."""
    jobs = seen.jobs
    barred = np.zeros((len(jobs), seen.options.counts.shape[1]), dtype=np.bool_)
    hours: list[float] = []
    if seen.knows_lengths:
        for row in np.flatnonzero(np.isfinite(jobs.deadline_seconds)).tolist():
            barred[row], until_hours = _bar_job(seen, places, row)
            hours.append(until_hours)
    soonest_hours = min((one for one in hours if one > 0), default=np.inf)
    if not np.isfinite(soonest_hours):
        return barred, []
    tick_seconds = _TICK_HOURS * HOUR_SECONDS  # whole minutes: not each asks for its own moment
    ticks = (seen.now_seconds + soonest_hours * HOUR_SECONDS) // tick_seconds + 1
    at_seconds = ticks * tick_seconds
    reason = "a job with a deadline may have to go on demand then"
    return barred, [Wake(at_seconds=at_seconds, reason=reason)]


def _keep_until_there(seen: Snapshot, barred: BoolArray, num_places: int) -> dict[int, int]:
    """Let jobs stay until there are free GPUs where they should go; how many lack, by type."""
    lacking: dict[int, int] = {}
    width, first = barred.shape[1] // (1 + num_places), len(seen.gpu_types) - num_places
    for row in seen.running.tolist():
        held = int(seen.jobs.option[row])
        open_places = np.flatnonzero(~barred[row].reshape(1 + num_places, width)[1:].all(axis=1))
        if not barred[row, held] or not len(open_places):
            continue  # it may stay, or is to leave spot nodes at once
        kind, number = first + int(open_places[0]), int(seen.job_num_gpus[row, held])
        free = int(seen.nodes.free[seen.nodes.rows_by_type[kind]].sum())
        if free < number:
            barred[row, held] = False
            lacking[kind] = lacking.get(kind, 0) + number - free
    return lacking


def _rents_for(
    seen: Snapshot, lacking: Mapping[int, int], decisions: Sequence[Decision]
) -> list[Rent]:
    """Nodes for jobs that wait for them where they run, beside those that a policy rents."""
    rented = [one for one in decisions if isinstance(one, Rent)]
    prices = {offer.name: offer.price_dollars_per_hour for offer in seen.offers}
    cap_left = seen.hard_cap_dollars_per_hour - seen.committed_dollars_per_hour
    cap_left -= sum(one.num_nodes * prices[one.offer] for one in rented)
    wanted: list[tuple[Offer, Rent]] = []
    for kind, offer in cheapest_offers(seen.offers, seen.gpu_types, cap_left).items():
        if kind not in lacking or offer.is_short or any(one.offer == offer.name for one in rented):
            continue
        number = -(-lacking[kind] // offer.num_gpus) - num_coming(seen, offer)
        number = min(number, offer.most_nodes - num_here(seen, offer) - num_coming(seen, offer))
        reason = "a job with a deadline can go on there for less"
        if number > 0:
            wanted.append((offer, Rent(offer=offer.name, num_nodes=number, reason=reason)))
    return rents_under_cap(wanted, cap_left)


def _bar_job(seen: Snapshot, places: Sequence[Place], row: int) -> tuple[BoolArray, float]:
    """What one job is not to have, and hours until that may be otherwise."""
    width = seen.options.counts.shape[1] // (1 + len(places))
    barred = np.zeros(width * (1 + len(places)), dtype=np.bool_)
    speeds = seen.job_speeds[row]
    usable = [
        place
        for number, place in enumerate(places, 1)
        if speeds[number * width : (number + 1) * width].any()
    ]
    reference = _on_demand_option(seen, row, width)
    if not usable or reference is None:
        return barred, np.inf
    option, dollars = reference
    num_gpus = int(seen.job_num_gpus[row, option])
    job = _deadline_job(seen, row, option, width, dollars)
    spots = [
        replace(place.spot, dollars_per_hour=place.spot.dollars_per_hour * num_gpus)
        if place in usable
        else replace(place.spot, dollars_per_hour=np.inf, is_available=False)
        for place in places
    ]
    chosen = choose_place(job, spots)
    if chosen >= 0 and job.place == WAIT and job.slack_hours <= 2 * job.restart_hours + _TICK_HOURS:
        chosen = ON_DEMAND  # once the spot node had started there would be no time to lose it
    blocks = barred.reshape(1 + len(places), width)
    blocks[1:] = True
    if chosen == WAIT:
        blocks[1:] = [[not place.is_available] * width for place in spots]
    elif chosen >= 0:
        blocks[1 + chosen] = False
    # What the owner has is used at any time; what is rented on demand is not, but when it must be.
    counts = seen.options.counts[seen.jobs.option_set[row], :width]
    needs_rent = (counts > own_gpus(seen)).any(axis=1)
    blocks[0] = needs_rent & (chosen != ON_DEMAND)
    reserve = hours_kept(job, spots)
    net = job.restart_hours + _TICK_HOURS
    passing = job.slack_hours - (reserve if job.slack_hours > reserve else net)
    return barred, passing if chosen == WAIT else np.inf


def _on_demand_option(seen: Snapshot, row: int, width: int) -> tuple[int, float] | None:
    """The cheapest way on demand that keeps the deadline, or the fastest; its dollars an hour."""
    prices = np.full(len(seen.gpu_types), np.inf)
    for offer in seen.offers:
        if offer.most_nodes and offer.gpu in seen.gpu_types:
            kind = seen.gpu_types.index(offer.gpu)
            prices[kind] = min(prices[kind], gpu_price(offer))
    speeds = seen.job_speeds[row, :width]
    counts = seen.options.counts[seen.jobs.option_set[row], :width]
    paid = np.where(counts > 0, counts * np.where(np.isfinite(prices), prices, 0.0), 0.0).sum(
        axis=1
    )
    can_rent = ~((counts > 0) & ~np.isfinite(prices)).any(axis=1)
    able = (speeds > 0) & can_rent
    if not able.any():
        return None
    left = max(float(seen.jobs.remaining_samples[row]), 0.0)
    seconds = np.where(able, left / np.where(able, speeds, 1.0), np.inf)
    available = seen.jobs.deadline_seconds[row] - seen.now_seconds
    in_time = able & (seconds + seen.startup_seconds[row, :width] <= available)
    if in_time.any():
        option = int(np.where(in_time, paid * seconds, np.inf).argmin())
    else:
        option = int(seconds.argmin())
    return option, float(paid[option])


def _deadline_job(
    seen: Snapshot, row: int, option: int, width: int, on_demand_dollars: float
) -> DeadlineJob:
    jobs, now = seen.jobs, seen.now_seconds
    delay = max((offer.start_delay_seconds for offer in seen.offers), default=0.0)
    startup = float(seen.startup_seconds[row, option])
    held = int(jobs.option[row])
    starting = 0.0
    if held >= 0:
        ran = now - float(jobs.running_since_seconds[row])
        starting = max(float(seen.startup_seconds[row, held]) - ran, 0.0)
    speed = float(seen.job_speeds[row, option])
    place = WAIT if held < 0 else held // width - 1 if held >= width else ON_DEMAND
    return DeadlineJob(
        work_hours=max(float(jobs.remaining_samples[row]), 0.0) / speed / HOUR_SECONDS,
        hours_left=(float(jobs.deadline_seconds[row]) - now) / HOUR_SECONDS,
        restart_hours=(startup + delay + MAX_LOST_SECONDS) / HOUR_SECONDS,
        place=place,
        starting_hours=starting / HOUR_SECONDS,
        on_demand_dollars_per_hour=on_demand_dollars,
        tick_hours=_TICK_HOURS,
    )


def _real(snapshot: Snapshot, decision: Decision, width: int) -> Decision:
    """A decision on places as one on real types."""
    if not isinstance(decision, Start | Resize):
        return decision
    option = decision.option % width
    if isinstance(decision, Resize):
        row = snapshot.jobs.row_of[decision.job_id]
        if option == snapshot.jobs.option[row]:
            return Move(
                job_id=decision.job_id,
                placement=decision.placement,
                reason=decision.reason,
                numbers=decision.numbers,
            )
    return replace(decision, option=option)
