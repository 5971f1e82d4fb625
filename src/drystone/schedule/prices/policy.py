"""Everything has a price: each job picks its best option at the shadow prices of the GPU types.

One decision in four steps. (1) What is each option of each job worth (`worth.py`), at
speeds corrected by what was seen (`corrected.py`), among options within the job's limits
(`../limits.py`), for owners with shares (`../fair_shares.py`)? (2) Prices from the dual
(`shadow_prices.py`), from the last prices on. (3) Every job picks, and the picks are made to fit
(`integral.py`) and packed onto nodes (`place.py`), moving smaller jobs off a node where that
pays. (4) What is left over goes to whoever still waits or gains most from more.

`patience.py` says how long a job may wait at most, and how often it may be started.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from drystone.schedule.belief import (
    Guess,
    LengthMemory,
    Ratios,
    corrected_speeds,
    guess_remaining,
    update_lengths,
    update_ratios,
)
from drystone.schedule.decision import Decision, Memory, Policy, Refuse, Start, Wake
from drystone.schedule.limits import Limits, Used, check_limits
from drystone.schedule.prices.integral import choose
from drystone.schedule.prices.patience import (
    KEEP_SECONDS,
    has_no_time_to_restart,
    keep_seconds,
    overdue,
    patience_seconds,
    serve_all_overdue,
)
from drystone.schedule.prices.place import begin_assignment, hand_out
from drystone.schedule.prices.rent_or_wait import RentMemory, plan_rent, rent_and_release
from drystone.schedule.prices.shadow_prices import Market, solve_prices
from drystone.schedule.prices.worth import Worth, seconds_late, worth_of_options
from drystone.schedule.renting import gpu_price
from drystone.schedule.snapshot import FloatArray, IntArray, Snapshot
from drystone.schedule.spot_places import sees_places
from drystone.schedule.teams import owner_weights, type_values, update_usage
from drystone.units import HOUR_SECONDS

_NO_OPTION: Final = "it has no option on this cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the owner of a cluster may say. Nothing said: all jobs count by their priority."""

    # By owner: what is due to each. Empty: owners do not matter.
    shares: Mapping[str, float] = field(default_factory=dict)
    # By GPU type: what a GPU costs, for jobs with a limit on money. Offers say it of their types.
    dollars_per_gpu_hour: Mapping[str, float] = field(default_factory=dict)
    # The speed of a job that is spread over more nodes than it needs; 0: never spread a job.
    spread_speed_share: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricesMemory:
    """What is carried from one decision to the next, and the certificate of the last."""

    prices: FloatArray
    now_seconds: float = 0.0
    protected: Mapping[str, float] = field(default_factory=dict)  # job: until when
    value: float = 0.0  # what the last decision is worth
    bound: float = 0.0  # what no decision could exceed
    ratios: Ratios = field(default_factory=dict)
    used: Mapping[str, Used] = field(default_factory=dict)  # by jobs with limits
    usage: Mapping[str, float] = field(default_factory=dict)  # by owner
    rent: RentMemory | None = None
    lengths: LengthMemory | None = None  # where nobody says how long jobs are

    @property
    def gap(self) -> float:
        """How far the last decision may be from the best, as a share of the bound."""
        return (self.bound - self.value) / self.bound if self.bound > 0 else 0.0


def prices(snapshot: Snapshot, memory: Memory) -> tuple[list[Decision], Memory]:
    """Decide by prices, as nobody has said anything else."""
    return _plain_prices(snapshot, memory)


def make_prices(settings: Settings) -> Policy:
    """Decide by prices, as the owner of the cluster wants it."""
    return sees_places(
        lambda snapshot, memory: decide_by_prices(snapshot, memory, settings), moves_at_once=True
    )


_PLAIN: Final = Settings()
_plain_prices: Final = make_prices(_PLAIN)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _View:
    """What is known of the jobs at a decision."""

    speeds: FloatArray  # corrected; 0 for options that may not be taken
    weights: FloatArray
    limits: Limits
    ratios: Ratios
    usage: Mapping[str, float]
    lengths: LengthMemory | None = None
    guess: Guess | None = None  # of what is left; None: as the snapshot says

    def worth_at(self, snapshot: Snapshot, prices: FloatArray) -> Worth:
        """What options are worth at these prices."""
        return worth_of_options(snapshot, self.speeds, self.weights, prices, self.guess)


def decide_by_prices(
    snapshot: Snapshot, before: PricesMemory | None, settings: Settings = _PLAIN
) -> tuple[list[Decision], Memory]:
    """The same, on the GPU types of the snapshot."""
    rents = bool(snapshot.offers) or len(snapshot.rentals.nodes) > 0
    if len(snapshot.jobs) == 0 and not rents:
        return [], before
    view = _look(snapshot, before, settings)
    worth, start = _find_worth(snapshot, view, before)
    protected = _still_protected(snapshot, before)
    pinned = _pinned(snapshot, worth, protected)
    rent, closed = None, []
    if rents:
        rent = plan_rent(
            snapshot,
            make_market(snapshot, worth.values),
            before.rent if before is not None else None,
            {node for row in pinned.tolist() for node, _ in snapshot.jobs.placements[row]},
        )
        closed = rent.closed.tolist()
    given = begin_assignment(snapshot, worth, pinned=pinned, closed=closed)
    left = snapshot.jobs.remaining_samples if view.guess is None else view.guess.samples
    patience = patience_seconds(snapshot, view.speeds, left)
    waits_too_long = overdue(snapshot, patience)
    serve_all_overdue(given, left, waits_too_long, patience, protected)
    is_settled = len(pinned) > 0 or len(waits_too_long) > 0
    market = make_market(snapshot, worth.values, given.option if is_settled else None, closed)
    settled_value = given.value() if is_settled else 0.0
    solution = solve_prices(market, start)
    picks = choose(market, solution)
    changes = hand_out(
        given,
        picks,
        solution.prices,
        spread_speed_share=settings.spread_speed_share,
    )
    decisions = [_with_warning(change, row, snapshot, view) for row, change in changes]
    if rent is not None:
        decisions += rent_and_release(snapshot, rent, given.final_room())
    decisions += _wakes(snapshot, view, protected, given.option, patience)
    return [*decisions, *_refusals(snapshot, view)], PricesMemory(
        prices=solution.prices,
        now_seconds=snapshot.now_seconds,
        protected=protected,
        value=given.value(),
        bound=min(picks.bound, solution.bound) + settled_value,
        ratios=view.ratios,
        used=view.limits.used,
        usage=view.usage,
        rent=rent.memory if rent is not None else None,
        lengths=view.lengths,
    )


def _look(snapshot: Snapshot, before: PricesMemory | None, settings: Settings) -> _View:
    """Speeds as they are known, within limits, and what each job weighs."""
    elapsed = snapshot.now_seconds - before.now_seconds if before is not None else 0.0
    ratios = update_ratios(snapshot, before.ratios if before is not None else {})
    speeds = corrected_speeds(snapshot, ratios)
    dollars = {offer.gpu: gpu_price(offer) for offer in snapshot.offers}
    dollars |= snapshot.gpu_dollars_per_hour
    dollars |= settings.dollars_per_gpu_hour
    limits = check_limits(
        snapshot,
        speeds,
        dollars_per_hour=dollars,
        used=before.used if before is not None else {},
        elapsed_seconds=elapsed,
    )
    if limits.allowed is not None:
        speeds = np.where(limits.allowed, speeds, 0.0)
    weights, usage = snapshot.jobs.weights, {}
    if settings.shares:
        values = type_values(snapshot, speeds, dollars)
        usage = update_usage(snapshot, values, before.usage if before is not None else {}, elapsed)
        weights = weights * owner_weights(snapshot, settings.shares, usage)
    lengths = guess = None
    if not snapshot.knows_lengths:
        lengths = update_lengths(snapshot, before.lengths if before is not None else None, elapsed)
        guess, lengths = guess_remaining(snapshot, lengths)
    return _View(
        speeds=speeds,
        weights=weights,
        limits=limits,
        ratios=ratios,
        usage=usage,
        lengths=lengths,
        guess=guess,
    )


def _find_worth(
    snapshot: Snapshot, view: _View, before: PricesMemory | None
) -> tuple[Worth, FloatArray]:
    """What options are worth at the prices of before, and these; at first they must be found."""
    if before is not None:
        return view.worth_at(snapshot, before.prices), before.prices
    none = np.zeros(len(snapshot.gpu_types))
    worth = view.worth_at(snapshot, none)
    found = solve_prices(make_market(snapshot, worth.values)).prices
    return view.worth_at(snapshot, found), found


def make_market(
    snapshot: Snapshot,
    values: FloatArray,
    settled: IntArray | None = None,
    closed: Sequence[int] = (),
) -> Market:
    """The problem of prices: what options are worth and take, without jobs that are settled.

    `settled` has their options, -1 for the others. The GPUs of the nodes in `closed` are not to be
    given out.
    """
    jobs = snapshot.jobs
    capacity = snapshot.capacity.astype(np.float64)
    for node in closed:
        capacity[snapshot.nodes.type_index[node]] -= snapshot.nodes.num_gpus[node]
    left = values
    rows = (settled >= 0).nonzero()[0] if settled is not None else ()
    if settled is not None and len(rows):
        left = values.copy()
        left[rows] = 0.0
        capacity -= snapshot.options.counts[jobs.option_set[rows], settled[rows]].sum(axis=0)
    return Market(
        values=left,
        counts=tuple(snapshot.options.by_type.take(jobs.option_set, axis=1)),
        capacity=np.maximum(capacity, 0.0),
    )


def _wakes(
    snapshot: Snapshot,
    view: _View,
    protected: Mapping[str, float],
    given: IntArray,
    patience: FloatArray,
) -> list[Decision]:
    """Ask to decide again when somebody will have waited, run or been protected long enough."""
    jobs, now = snapshot.jobs, snapshot.now_seconds
    waits = (given < 0).nonzero()[0]
    waits = waits[(view.speeds[waits] > 0).any(axis=1)]
    times = [now + left for left in view.limits.left_seconds]
    if len(waits):
        since = jobs.waiting_since_seconds[waits]
        due = np.where(np.isnan(since), now, since) + patience[waits]
        first = float(due.min())
        times.append(first if first > now else now + KEEP_SECONDS)
        times += [float(due[due > now].min(initial=math.inf)), *protected.values()]
        keeps = keep_seconds(jobs)
        ends = (jobs.running_since_seconds + keeps)[keeps > KEEP_SECONDS]
        times.append(float(ends[ends > now].min(initial=math.inf)))
    coming = [time for time in times if now < time < math.inf]
    if not coming:
        return []
    return [Wake(at_seconds=min(coming), reason="somebody has waited or run long enough then")]


def _with_warning(decision: Decision, row: int, snapshot: Snapshot, view: _View) -> Decision:
    """A start says early if the deadline cannot be met."""
    if not isinstance(decision, Start):
        return decision
    late = seconds_late(snapshot, row, view.speeds)
    if late <= 0:
        return decision
    reason = (
        f"{decision.reason}; its deadline cannot be met: "
        f"at its fastest it ends {late / HOUR_SECONDS:.2f} h late"
    )
    return replace(decision, reason=reason, numbers={**decision.numbers, "late_seconds": late})


def _refusals(snapshot: Snapshot, view: _View) -> list[Decision]:
    """Refuse the jobs that can never run."""
    reasons: dict[int, str] = {}
    if snapshot.options.has_empty_sets:
        hopeless = snapshot.options.empty_sets[snapshot.jobs.option_set] & ~snapshot.jobs.is_running
        reasons = dict.fromkeys(np.flatnonzero(hopeless).tolist(), _NO_OPTION)
    reasons |= view.limits.refused
    return [
        Refuse(job_id=snapshot.jobs.specs[row].id, reason=reason)
        for row, reason in sorted(reasons.items())
    ]


def _still_protected(snapshot: Snapshot, memory: PricesMemory | None) -> dict[str, float]:
    if memory is None or not memory.protected:
        return {}
    now, known = snapshot.now_seconds, snapshot.jobs.row_of
    return {
        name: until for name, until in memory.protected.items() if until > now and name in known
    }


def _pinned(snapshot: Snapshot, worth: Worth, protected: Mapping[str, float]) -> IntArray:
    """Rows of running jobs that keep what they have, as long as they may have it at all."""
    jobs = snapshot.jobs
    ran = snapshot.now_seconds - jobs.running_since_seconds  # of who waits: not a number
    stays = jobs.is_running & (ran < keep_seconds(jobs))
    stays |= has_no_time_to_restart(snapshot)
    for name in protected:
        stays[jobs.row_of[name]] |= jobs.is_running[jobs.row_of[name]]
    rows = stays.nonzero()[0]
    return rows[worth.values[rows, jobs.option[rows]] > 0]
