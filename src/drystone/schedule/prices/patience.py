"""How long may a job wait, and how often may it be started?

Nobody starves. A job that was just started keeps its GPUs for `KEEP_SECONDS`. A job that has waited
for its patience (`patience_seconds`: short for jobs that need whole nodes) is served before all
prices, from anyone who is not protected, and is then protected for `PROTECTED_SECONDS`, a wide one
until it should have ended. Of each type such jobs get half together; a job that needs more gets it
when no other is protected there. So a job waits longer than its patience and `KEEP_SECONDS` only
while protected jobs, or those that were started often, hold GPUs that it needs.

Nobody is started again and again. A job that was started n times keeps its GPUs for
k(n) = `KEEP_SECONDS` * `KEEP_GROWTH` ** (n - `FREE_STARTS`), or `KEEP_SECONDS` while that is less.
Proof of the bound: every start but the first follows a stop, and after its start number n nobody is
stopped, resized or moved before k(n) is over. So who has run for T seconds in all (starts counted)
was started at most `FREE_STARTS` + log(1 + T (g - 1) / `KEEP_SECONDS`) / log(g) times, g being
`KEEP_GROWTH`, since that many k(n) fit into T. What faults, limits and nodes that close take from
it comes on top.

Nor is a job stopped that ends by its deadline as it runs and would not after a few restarts.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from drystone.schedule.prices.place import Assignment
from drystone.schedule.snapshot import (
    BoolArray,
    FloatArray,
    IntArray,
    JobTable,
    Placement,
    Snapshot,
)
from drystone.units import HOUR_SECONDS

# A job that needs whole nodes finds no place by chance. It waits for this part of the time that it
# would run alone, but no less than so long; any other job waits for `PATIENCE_SECONDS`.
WIDE_PATIENCE_SHARE: Final = 0.1
MIN_PATIENCE_SECONDS: Final = 900.0
PATIENCE_SECONDS: Final = 24 * 3600.0
PROTECTED_SECONDS: Final = 2 * 3600.0
KEEP_SECONDS: Final = 60.0
SPARE_RESTARTS: Final = 3.0  # a job with less time than these before its deadline is left alone
# Of each type, jobs that are served ahead of prices take no more than this part together; one job
# may take more, if it is the only one.
_MAX_OVERDUE_SHARE: Final = 0.5
# A job keeps what it was given for longer with every start beyond so many, by this factor.
FREE_STARTS: Final = 8
KEEP_GROWTH: Final = 1.5
_MOST_GROWTH: Final = 60  # starts, beyond which it is for ever


def patience_seconds(
    snapshot: Snapshot, speeds: FloatArray, left_samples: FloatArray
) -> FloatArray:
    """By job: how long it may wait before it is served ahead of all prices."""
    patience: FloatArray = np.full(len(snapshot.jobs), PATIENCE_SECONDS)
    table, nodes = snapshot.options, snapshot.nodes
    node_gpus = np.array([nodes.num_gpus[rows].max(initial=0) for rows in nodes.rows_by_type])
    # By set: whether every option takes a whole node of a type or more, and that is many GPUs.
    fills = ((table.counts >= node_gpus) & (table.counts > 1)).any(axis=2)
    is_wide = (fills | (table.samples_per_second <= 0)).all(axis=1) & ~table.empty_sets
    rows = is_wide.take(snapshot.jobs.option_set).nonzero()[0]
    if len(rows):
        alone = left_samples[rows] / np.maximum(speeds[rows].max(axis=1, initial=0.0), 1e-100)
        share = WIDE_PATIENCE_SHARE * alone
        patience[rows] = np.clip(share, MIN_PATIENCE_SECONDS, PATIENCE_SECONDS)
    return patience


def has_no_time_to_restart(snapshot: Snapshot) -> BoolArray:
    """By job: whether it runs, ends by its deadline as it is, and would not after `SPARE_RESTARTS`.

    Who has to wait for GPUs once more loses more than a restart, and nobody knows how much.
    """
    jobs, found = snapshot.jobs, np.zeros(len(snapshot.jobs), dtype=np.bool_)
    rows = np.flatnonzero(jobs.is_running & np.isfinite(jobs.deadline_seconds))
    if not (len(rows) and snapshot.knows_lengths):
        return found
    at = (rows, jobs.option[rows])
    seconds = np.maximum(jobs.remaining_samples[rows], 0.0) / snapshot.job_speeds[at]
    starting = jobs.running_since_seconds[rows] + snapshot.startup_seconds[at]
    ends = np.maximum(snapshot.now_seconds, starting) + seconds
    restart = SPARE_RESTARTS * (snapshot.startup_seconds[at] + KEEP_SECONDS)
    spare = jobs.deadline_seconds[rows] - ends
    found[rows] = (spare >= 0) & (spare < restart)
    return found


def overdue(snapshot: Snapshot, patience: FloatArray) -> list[int]:
    """The jobs that have waited too long, those first that did so the longest ago."""
    late = snapshot.now_seconds - snapshot.jobs.waiting_since_seconds - patience
    rows = (late >= 0).nonzero()[0]  # nobody who runs: that is not a number
    if not len(rows):
        return []
    ordered: list[int] = rows[np.argsort(-late[rows], kind="stable")].tolist()
    return ordered


def serve_all_overdue(
    given: Assignment,
    left_samples: FloatArray,
    rows: list[int],
    patience: FloatArray,
    protected: dict[str, float],
) -> None:
    """Serve jobs that have waited too long, and protect them: wide ones until they should end."""
    if not rows:
        return
    snapshot, jobs = given.snapshot, given.snapshot.jobs
    taken = np.zeros(len(snapshot.gpu_types))
    for name in protected:
        row = jobs.row_of[name]
        if jobs.is_running[row]:
            taken += snapshot.counts(row, int(jobs.option[row]))
    limit = _MAX_OVERDUE_SHARE * snapshot.capacity
    for row in rows:
        room = np.where(taken > 0, limit - taken, np.inf)
        reason = f"it has waited for {patience[row] / HOUR_SECONDS:.1f} h, and is served first"
        if not serve_overdue(given, row, reason, room):
            continue
        option = int(given.option[row])
        taken += snapshot.counts(row, option)
        seconds = PROTECTED_SECONDS
        if patience[row] < PATIENCE_SECONDS:
            takes = float(snapshot.startup_seconds[row, option])
            seconds = max(
                seconds, takes + float(left_samples[row] / given.worth.speeds[row, option])
            )
        protected[jobs.specs[row].id] = snapshot.now_seconds + seconds


def serve_overdue(given: Assignment, row: int, reason: str, room: FloatArray) -> bool:
    """Give a waiting job its smallest option that finds a place, and of equals the best.

    It takes no more of each type than `room`.
    """
    values, num_gpus = given.worth.values[row], given.snapshot.job_num_gpus[row]
    for option in np.lexsort((-values, num_gpus)).tolist():
        if values[option] <= 0:
            continue
        counts = given.snapshot.counts(row, option)
        if (counts > room).any():
            continue
        placement = given.room.place(counts) or _evict_for(given, counts)
        if placement is not None:
            given.give(row, option, placement, reason)
            return True
    return False


def _evict_for(given: Assignment, counts: IntArray) -> Placement | None:
    """A place on the GPUs of running jobs that are not settled, those worth least first."""
    jobs, kinds = given.snapshot.jobs, set(np.flatnonzero(counts).tolist())
    types = given.snapshot.nodes.type_index
    victims = [
        row
        for row in given.is_holding.nonzero()[0].tolist()
        if any(int(types[node]) in kinds for node, _ in jobs.placements[row])
    ]
    victims.sort(key=lambda row: float(given.worth.values[row, jobs.option[row]]))
    evicted: list[int] = []
    placement = None
    for row in victims:
        evicted.append(row)
        given.room.give_back(given.open_part(row))
        placement = given.room.place(counts)
        if placement is not None:
            break
    for row in reversed(evicted):  # whoever was evicted in vain gets its GPUs back
        part = given.open_part(row)
        if given.room.has(part):
            given.room.take(part)
        else:
            given.is_holding[row] = False
    return placement


def keep_seconds(jobs: JobTable) -> FloatArray:
    """By job: how long it keeps what it was given at its last start."""
    extra = np.clip(jobs.num_starts - FREE_STARTS, 0, _MOST_GROWTH).astype(np.float64)
    keeps: FloatArray = KEEP_SECONDS * KEEP_GROWTH**extra
    return keeps
