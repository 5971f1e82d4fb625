"""Everything has a price: each job picks its best option at the shadow prices of the GPU types.

One decision in four steps. (1) What is each option of each job worth? The share of its fastest
speed that it gives, weighted so that jobs with little left count more, less what a restart would
lose. (2) Prices from the dual (`schedule/prices.py`), from the last prices on. (3) Every job picks;
picks are packed onto nodes, those that keep their GPUs first, then by worth per price. (4) What is
left over goes to whoever still waits or gains most from more.

Nobody starves. A job that was just started keeps its GPUs for `KEEP_SECONDS`. A job that has waited
for `PATIENCE_SECONDS` is served before all prices, the longest waiting first, from anyone who is
not protected, and is then protected for `PROTECTED_SECONDS`. So a job waits longer than
`PATIENCE_SECONDS` + `KEEP_SECONDS` only while protected jobs hold every GPU that it could use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from drystone.schedule.decision import Decision, Refuse
from drystone.schedule.hand_out import HandOut
from drystone.schedule.integral import choose_within
from drystone.schedule.policy import Memory
from drystone.schedule.prices import Market, solve_prices
from drystone.schedule.snapshot import FloatArray, IntArray, Snapshot
from drystone.schedule.worth import worth_of_options

PATIENCE_SECONDS: Final = 24 * 3600.0
PROTECTED_SECONDS: Final = 2 * 3600.0
# A fresh start is left alone for this long: many times what it cost.
KEEP_SECONDS: Final = 600.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricesMemory:
    """What is carried from one decision to the next, and the certificate of the last."""

    prices: FloatArray
    protected: Mapping[str, float] = field(default_factory=dict)  # job: until when
    value: float = 0.0  # what the last decision is worth
    bound: float = 0.0  # what no decision could exceed

    @property
    def gap(self) -> float:
        """How far the last decision may be from the best, as a share of the bound."""
        return (self.bound - self.value) / self.bound if self.bound > 0 else 0.0


def prices(snapshot: Snapshot, memory: Memory) -> tuple[list[Decision], Memory]:
    """Decide by prices; remembered are the last prices, as a place to start from."""
    before: PricesMemory | None = memory
    if len(snapshot.jobs) == 0:
        return [], before
    worth = worth_of_options(snapshot, snapshot.job_speeds, snapshot.jobs.weights)
    hand_out = HandOut(snapshot, worth)
    protected = _still_protected(snapshot, before)
    for row in _left_alone(snapshot, protected):
        hand_out.leave_alone(int(row))
    for row in overdue(snapshot):
        if hand_out.serve(row, _OVERDUE):
            until = snapshot.now_seconds + PROTECTED_SECONDS
            protected[snapshot.jobs.specs[row].id] = until
    market = make_market(snapshot, worth.values, hand_out.settled())
    settled_value = hand_out.value()
    solution = solve_prices(market, before.prices if before is not None else None)
    hand_out.price(solution.prices)
    hand_out.place(choose_within(market, solution))
    hand_out.leave_nothing_over()
    return [*hand_out.decisions(), *_refusals(snapshot)], PricesMemory(
        prices=solution.prices,
        protected=protected,
        value=hand_out.value(),
        bound=solution.bound + settled_value,
    )


_OVERDUE: Final = f"it has waited for {PATIENCE_SECONDS / 3600:.0f} h, and nobody waits longer"


def make_market(
    snapshot: Snapshot, values: FloatArray, settled: Mapping[int, int] | None = None
) -> Market:
    """The problem of prices: what options are worth and take, without jobs that are settled."""
    by_type = np.ascontiguousarray(snapshot.options.counts.transpose(2, 0, 1), dtype=np.float64)
    capacity = snapshot.capacity.astype(np.float64)
    left = values
    if settled:
        rows = np.fromiter(settled, dtype=np.int64, count=len(settled))
        options = np.fromiter(settled.values(), dtype=np.int64, count=len(settled))
        left = values.copy()
        left[rows] = 0.0
        capacity -= snapshot.options.counts[snapshot.jobs.option_set[rows], options].sum(axis=0)
    return Market(
        values=left,
        counts=tuple(by_type[:, snapshot.jobs.option_set]),
        capacity=np.maximum(capacity, 0.0),
    )


def overdue(snapshot: Snapshot) -> list[int]:
    """The jobs that have waited too long, the longest first."""
    waited = snapshot.now_seconds - snapshot.jobs.waiting_since_seconds
    rows = np.flatnonzero(np.nan_to_num(waited, nan=-1.0) >= PATIENCE_SECONDS)
    return [int(row) for row in rows[np.argsort(-waited[rows], kind="stable")]]


def _refusals(snapshot: Snapshot) -> list[Decision]:
    """Refuse the jobs that have no option at all."""
    hopeless = ~snapshot.jobs.is_running & ~(snapshot.job_speeds > 0).any(axis=1)
    return [
        Refuse(job_id=snapshot.jobs.specs[row].id, reason="it has no option on this cluster")
        for row in np.flatnonzero(hopeless)
    ]


def _still_protected(snapshot: Snapshot, memory: PricesMemory | None) -> dict[str, float]:
    if memory is None:
        return {}
    now, known = snapshot.now_seconds, snapshot.jobs.row_of
    return {
        name: until for name, until in memory.protected.items() if until > now and name in known
    }


def _left_alone(snapshot: Snapshot, protected: Mapping[str, float]) -> IntArray:
    """Rows of running jobs that keep what they have, whatever it is worth."""
    jobs = snapshot.jobs
    ran = snapshot.now_seconds - np.nan_to_num(jobs.running_since_seconds, nan=-np.inf)
    is_fresh = jobs.is_running & (ran < KEEP_SECONDS)
    is_safe = np.array([spec.id in protected for spec in jobs.specs], dtype=bool)
    return np.flatnonzero(is_fresh | (is_safe & jobs.is_running))
