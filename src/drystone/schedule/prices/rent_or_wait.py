"""Rent or wait: how many nodes of each offer the queue is worth to the policy `prices`.

A rented GPU of type k has the price mu * dollars an hour, with mu the job hours that a dollar must
save (BOA's multiplier). A GPU costs the smaller of its shadow price and that: where own GPUs alone
would be dearer, as much is rented as jobs want at the price of renting. mu is moved until the nodes
wanted cost what the budget allows now: the budget, and what was left over or overspent so far, made
good within `_MAKE_GOOD_SECONDS`.

Nodes that are not wanted any more are closed: nobody is put on them, and they go once they are
idle. Long jobs would keep them for days, so where the nodes that are here cost more than
`_MAX_OVER` times what is allowed, those beyond it are closed at once, and whoever runs there
moves, shrinks or waits. So a debt stays within an hour or two of the budget.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from drystone.describe.market import Offer
from drystone.schedule.decision import Decision, Release, Rent, Wake
from drystone.schedule.packing import Room
from drystone.schedule.prices.shadow_prices import Market, choose_options, solve_prices
from drystone.schedule.renting import (
    cheapest_offers,
    gpu_price,
    rented_dollars,
    rents_under_cap,
)
from drystone.schedule.snapshot import BoolArray, FloatArray, IntArray, Snapshot
from drystone.units import HOUR_SECONDS

_MAKE_GOOD_SECONDS: Final = 6 * 3600.0
_STEP: Final = 1.3  # mu is raised or lowered by this factor at a time
_MAX_STEPS: Final = 1  # at one decision; the next goes on from there
_MAX_FIRST_STEPS: Final = 16
_MIN_SHARE: Final = 0.01
_WAKE_SECONDS: Final = 300.0  # how often it is looked whether nodes cost too much
_MAX_OVER: Final = 1.25  # of what is allowed; the room keeps jobs from being moved to and fro


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RentMemory:
    """What is remembered about renting."""

    idle_since_seconds: Mapping[str, float] = field(default_factory=dict)  # by id of the node
    job_hours_per_dollar: float = 0.0  # mu; 0: not known yet
    own_prices: FloatArray | None = None  # by type, if nothing could be rented
    since_seconds: float = 0.0
    spent_before_dollars: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RentPlan:
    """What is to be rented, and which rented nodes nobody should be put on, or stay on."""

    offers: Mapping[int, Offer]  # by type
    num_wanted: Mapping[int, int]  # nodes by type, beyond those that are here
    closed: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    memory: RentMemory


def plan_rent(
    snapshot: Snapshot,
    market: Market,
    before: RentMemory | None,
    left_alone: Collection[int] = (),
) -> RentPlan:
    """How many nodes of each offer jobs are worth now. `market` is of all jobs.

    Whoever runs on the nodes `left_alone` stays there for now.
    """
    now, spent = snapshot.now_seconds, snapshot.spent_dollars
    memory = before or RentMemory(since_seconds=now, spent_before_dollars=spent)
    cheapest = cheapest_offers(
        snapshot.offers, snapshot.gpu_types, snapshot.hard_cap_dollars_per_hour
    )
    offers = {
        kind: offer
        for kind, offer in cheapest.items()
        # With larger nodes of its type about, a job would ask for whole ones of their size.
        if not offer.is_short and _largest_node(snapshot, kind) <= offer.num_gpus
    }
    dollars = np.full(len(snapshot.gpu_types), np.inf)
    for kind, offer in offers.items():
        dollars[kind] = gpu_price(offer)
    capacity = _fixed_capacity(snapshot, offers)
    own = replace(market, capacity=capacity)
    wants = _Wants(own, offers, dollars, memory.own_prices)
    allowance = max(0.0, _allowance(snapshot, memory) - _kept_dollars(snapshot, offers))
    if len(snapshot.jobs) == 0 or allowance <= 0:
        mu, nodes = memory.job_hours_per_dollar, dict.fromkeys(offers, 0)
    elif math.isinf(allowance):
        mu, nodes = 0.0, wants.nodes_at(0.0)
    else:
        known, usual = memory.job_hours_per_dollar, len(snapshot.jobs) / allowance
        # Where money is ample it falls and falls; not so far that it takes long to come back.
        start = max(known, _MIN_SHARE * usual) if known else usual
        max_steps = _MAX_STEPS if known else _MAX_FIRST_STEPS
        mu, nodes = _move_multiplier(wants, allowance, start, max_steps)
    here = _here(snapshot, offers)
    return RentPlan(
        offers=offers,
        num_wanted={kind: max(0, number - here[kind]) for kind, number in nodes.items()},
        closed=_surplus_nodes(snapshot, offers, nodes, allowance, left_alone),
        memory=replace(
            memory,
            idle_since_seconds=_idle_since(snapshot, memory.idle_since_seconds),
            job_hours_per_dollar=mu,
            own_prices=wants.own_prices,
        ),
    )


def rent_and_release(snapshot: Snapshot, plan: RentPlan, room: Room) -> list[Decision]:
    """Rent what is wanted and not on its way; give back what has been idle for too long.

    `room` is what is left after jobs are placed.
    """
    rents = _rents(snapshot, plan)
    return [
        *rents,
        *_releases(snapshot, plan, room),
        *_wake_when_dear(snapshot, plan.memory),
        *([] if rents else _wake_while_saving(snapshot, plan)),
    ]


def _rents(snapshot: Snapshot, plan: RentPlan) -> list[Rent]:
    mu, rents = plan.memory.job_hours_per_dollar, []
    for kind, offer in sorted(plan.offers.items()):
        row, price = snapshot.offers.index(offer), offer.price_dollars_per_hour
        coming = sum(nodes.num_nodes for nodes in snapshot.rentals.coming if nodes.offer == row)
        wanted = plan.num_wanted.get(kind, 0)
        reason = (
            f"jobs want {wanted} more nodes where a dollar must save "
            f"{mu:.3g} job hours; {coming} are on their way"
        )
        numbers = {"price_dollars_per_hour": price, "job_hours_per_dollar": mu}
        rent = Rent(offer=offer.name, num_nodes=wanted - coming, reason=reason, numbers=numbers)
        rents.append((offer, rent))
    cap_left = snapshot.hard_cap_dollars_per_hour - snapshot.committed_dollars_per_hour
    return rents_under_cap(rents, cap_left)


def _releases(snapshot: Snapshot, plan: RentPlan, room: Room) -> list[Decision]:
    """A node goes once it has been idle for as long as a new one would take to start.

    One that somebody had to leave goes at once: there is no money for it.
    """
    found: list[Decision] = []
    later: list[float] = []
    now, nodes, closed = snapshot.now_seconds, snapshot.nodes, set(plan.closed.tolist())
    for row in snapshot.rentals.nodes.tolist():
        since = plan.memory.idle_since_seconds.get(nodes.ids[row])
        if since is None and row in closed:
            numbers = {"job_hours_per_dollar": plan.memory.job_hours_per_dollar}
            found.append(
                Release(node=row, reason="more is rented than the budget allows", numbers=numbers)
            )
        if since is None or room.free[row] < nodes.num_gpus[row]:
            continue
        patience = snapshot.offers[int(snapshot.node_offer[row])].start_delay_seconds
        if now >= since + patience:
            reason = f"idle for {now - since:.0f} s, and nobody is worth what it costs"
            found.append(Release(node=row, reason=reason, numbers={"idle_seconds": now - since}))
        else:
            later.append(since + patience)
    if later:
        found.append(
            Wake(at_seconds=min(later), reason="a rented node has been idle too long then")
        )
    return found


def _wake_when_dear(snapshot: Snapshot, memory: RentMemory) -> list[Decision]:
    """What is rented may cost too much before anything happens: then is time to decide."""
    budget, rate = snapshot.budget_dollars_per_hour, snapshot.rentals.dollars_per_hour
    if math.isinf(budget) or rate <= budget:
        return []
    make_good_hours = _MAKE_GOOD_SECONDS / HOUR_SECONDS
    saved_then = make_good_hours * (rate / _MAX_OVER - budget)
    hours = (_saved_dollars(snapshot, memory) - saved_then) / (rate - budget)
    # On whole steps of time, so that decisions do not each ask for a moment of their own.
    steps = (snapshot.now_seconds + max(hours, 0.0) * HOUR_SECONDS) // _WAKE_SECONDS + 1
    at_seconds = steps * _WAKE_SECONDS
    return [Wake(at_seconds=at_seconds, reason="what is rented costs more than is allowed then")]


def _wake_while_saving(snapshot: Snapshot, plan: RentPlan) -> list[Decision]:
    """Where a job waits for money, the budget grows with nothing happening: look again soon."""
    budget = snapshot.budget_dollars_per_hour
    is_waiting = bool((snapshot.jobs.option < 0).any())
    if not is_waiting or not plan.offers or snapshot.rentals.coming or not 0 < budget < math.inf:
        return []
    at_seconds = (snapshot.now_seconds // _WAKE_SECONDS + 1) * _WAKE_SECONDS
    return [Wake(at_seconds=at_seconds, reason="a job waits until a node can be paid")]


def _idle_since(snapshot: Snapshot, before: Mapping[str, float]) -> dict[str, float]:
    """Which rented nodes are idle, and since when."""
    nodes, rows = snapshot.nodes, snapshot.rentals.nodes
    idle = rows[nodes.free[rows] == nodes.num_gpus[rows]].tolist()
    return {nodes.ids[row]: before.get(nodes.ids[row], snapshot.now_seconds) for row in idle}


def _largest_node(snapshot: Snapshot, kind: int) -> int:
    return int(snapshot.nodes.num_gpus[snapshot.nodes.rows_by_type[kind]].max(initial=0))


def _fixed_capacity(snapshot: Snapshot, offers: Mapping[int, Offer]) -> FloatArray:
    """GPUs by type on nodes that are not rented, and on those of which no more can be had."""
    own = snapshot.capacity.astype(np.float64)
    rows = snapshot.rentals.nodes[~_is_kept(snapshot, offers)]
    np.subtract.at(own, snapshot.nodes.type_index[rows], snapshot.nodes.num_gpus[rows])
    return np.maximum(own, 0.0)


def _is_kept(snapshot: Snapshot, offers: Mapping[int, Offer]) -> BoolArray:
    """By rented node: whether its type is out of stock, so that it stays as long as it is used."""
    kinds = snapshot.nodes.type_index[snapshot.rentals.nodes].tolist()
    short = [snapshot.offers[row].is_short for row in snapshot.rentals.offer.tolist()]
    return np.array(
        [is_short and kind not in offers for kind, is_short in zip(kinds, short, strict=True)],
        dtype=np.bool_,
    )


def _kept_dollars(snapshot: Snapshot, offers: Mapping[int, Offer]) -> float:
    """What those cost an hour."""
    rows = snapshot.rentals.offer[_is_kept(snapshot, offers)].tolist()
    return float(sum(snapshot.offers[row].price_dollars_per_hour for row in rows))


def _allowance(snapshot: Snapshot, memory: RentMemory) -> float:
    """Dollars an hour that may be spent now."""
    budget, cap = snapshot.budget_dollars_per_hour, snapshot.hard_cap_dollars_per_hour
    if math.isinf(budget):
        return cap
    saved = _saved_dollars(snapshot, memory)
    return min(max(0.0, budget + saved / (_MAKE_GOOD_SECONDS / HOUR_SECONDS)), cap)


def _saved_dollars(snapshot: Snapshot, memory: RentMemory) -> float:
    """What the budget would have allowed so far, less what was spent; below 0: debt."""
    hours = (snapshot.now_seconds - memory.since_seconds) / HOUR_SECONDS
    spent = snapshot.spent_dollars - memory.spent_before_dollars
    return snapshot.budget_dollars_per_hour * hours - spent


class _Wants:
    """Which nodes jobs want, for any value of a dollar."""

    def __init__(
        self,
        market: Market,
        offers: Mapping[int, Offer],
        dollars: FloatArray,
        own_prices: FloatArray | None,
    ) -> None:
        self._market, self._offers, self._dollars = market, offers, dollars
        # If nothing could be rented: where to start from, and what is cut down to rents.
        self.own_prices = own_prices
        self._is_solved = False

    def nodes_at(self, job_hours_per_dollar: float) -> dict[int, int]:
        """Nodes of each offer if a dollar must save so many job hours."""
        can_rent = np.isfinite(self._dollars)
        rent = np.where(
            can_rent, np.where(can_rent, self._dollars, 0) * job_hours_per_dollar, np.inf
        )
        wanted = self._demand(rent) - self._market.capacity
        return {
            kind: min(max(0, math.ceil(wanted[kind] / offer.num_gpus)), offer.most_nodes)
            for kind, offer in self._offers.items()
        }

    def cost(self, nodes: Mapping[int, int]) -> float:
        """Dollars an hour."""
        return sum(
            number * self._offers[kind].price_dollars_per_hour for kind, number in nodes.items()
        )

    def within(self, nodes: Mapping[int, int], allowance: float) -> dict[int, int]:
        """As many of these nodes as may be paid, in the same proportions.

        Where many jobs are alike, all want GPUs at one price and none a little above it.
        """
        cost = self.cost(nodes)
        if cost <= allowance:
            return dict(nodes)
        found = {kind: int(number * allowance / cost) for kind, number in nodes.items()}
        for kind, offer in self._offers.items():
            left = allowance - self.cost(found)
            more = int(left / max(offer.price_dollars_per_hour, 1e-9) + 1e-9)
            found[kind] = min(found[kind] + more, nodes[kind])
        return found

    def _solve_own(self, problem: Market) -> FloatArray:
        """Prices if nothing could be rented: the same for every value of a dollar."""
        if not self._is_solved or self.own_prices is None:
            self.own_prices = solve_prices(problem, self.own_prices).prices
            self._is_solved = True
        return self.own_prices

    def _demand(self, rent_prices: FloatArray) -> FloatArray:
        """GPUs by type that jobs want, where every type costs at most what renting it costs."""
        market, fixed = self._market, np.zeros(len(rent_prices), dtype=np.bool_)
        values, prices = market.values, np.zeros(len(rent_prices))
        for _ in range(len(rent_prices) + 1):
            # A type that is rented has that price, and there is no end of it.
            capacity = np.where(fixed, 1e12, market.capacity)
            problem = replace(market, values=values, capacity=capacity)
            if fixed.any():
                prices = solve_prices(problem, np.where(fixed, 0.0, prices)).prices
            else:
                prices = self._solve_own(problem)
            dearer = ~fixed & (prices > rent_prices)
            if not dearer.any():
                break
            for kind in np.flatnonzero(dearer):
                paid = rent_prices[kind] * market.counts[kind]
                values = np.where(values > paid, values - paid, 0.0)
            fixed |= dearer
            if fixed.all():
                break
        picks, _ = choose_options(replace(market, values=values), np.where(fixed, 0.0, prices))
        rows = np.flatnonzero(picks >= 0)
        wanted = [counts[rows, picks[rows]].sum() for counts in market.counts]
        return np.where(fixed, np.array(wanted), 0.0)


def _move_multiplier(
    wants: _Wants, allowance: float, mu: float, max_steps: int
) -> tuple[float, dict[int, int]]:
    """Raise or lower mu until the nodes wanted cost what is allowed, or nearly."""
    nodes = wants.nodes_at(mu)
    is_dear = wants.cost(nodes) > allowance
    for _ in range(max_steps):
        other = mu * _STEP if is_dear else mu / _STEP
        changed = wants.nodes_at(other)
        if (wants.cost(changed) > allowance) != is_dear:
            # Between the two: as many of the larger number as can be paid.
            if is_dear:
                return other, wants.within(nodes, allowance)
            return mu, wants.within(changed, allowance)
        mu, nodes = other, changed
    return mu, wants.within(nodes, allowance)


def _here(snapshot: Snapshot, offers: Mapping[int, Offer]) -> dict[int, int]:
    """Rented nodes by type."""
    kinds = snapshot.nodes.type_index[snapshot.rentals.nodes]
    return {kind: int((kinds == kind).sum()) for kind in offers}


def _surplus_nodes(
    snapshot: Snapshot,
    offers: Mapping[int, Offer],
    nodes: Mapping[int, int],
    allowance: float,
    left_alone: Collection[int],
) -> IntArray:
    """Rented nodes beyond what is wanted: idle ones, and used ones that cannot be paid for."""
    found: list[int] = []
    rows, used = snapshot.rentals.nodes, _used_share(snapshot)
    kinds = snapshot.nodes.type_index[rows]
    cost = snapshot.rentals.dollars_per_hour - _kept_dollars(snapshot, offers)
    is_too_much = cost > _MAX_OVER * allowance
    # The dearest GPUs first: of them the fewest have to be left.
    for kind in sorted(offers, key=lambda kind: -offers[kind].price_dollars_per_hour):
        here = rows[kinds == kind]
        surplus = len(here) - nodes.get(kind, 0)
        if surplus <= 0:
            continue
        # The emptiest first, of equals the last.
        for row in here[np.lexsort((-here, used[here]))].tolist()[:surplus]:
            if used[row] > 0 and (not is_too_much or cost <= allowance or row in left_alone):
                continue
            found.append(row)
            cost -= rented_dollars(snapshot, row)
    return np.array(sorted(found), dtype=np.int64)


def _used_share(snapshot: Snapshot) -> FloatArray:
    """By node: the share of its GPUs that somebody has."""
    nodes = snapshot.nodes
    share: FloatArray = 1.0 - nodes.free / np.maximum(nodes.num_gpus, 1)
    return share
