"""How fast are a job's options really, given what it was seen to do?

While a job runs, the speed it makes is compared with what its option says. The ratio is kept for
each GPU type of that option, and the speeds of all options are corrected by it: fully on types
where the job has run; on others by the square root of the mean ratio, since part of an error comes
from the job and part from the type, and nobody knows how much. An option of several types is as
slow as the slowest of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from drystone.schedule.snapshot import FloatArray, Snapshot

# By job: for each GPU type, seen / said; nan where it has not run yet.
Ratios = Mapping[str, FloatArray]

_LEAST_RATIO: Final = 0.1  # less is a fault, not a wrong estimate
_MOST_RATIO: Final = 10.0
_AS_SAID: Final = 1e-3  # a difference this small is none
_CARRIED: Final = 0.5  # the exponent with which a ratio counts for types that were not tried


def update_ratios(snapshot: Snapshot, known: Ratios) -> dict[str, FloatArray]:
    """What was known, with what is seen now; jobs that are gone are forgotten."""
    jobs = snapshot.jobs
    ratios = {job_id: known[job_id] for job_id in known if job_id in jobs.row_of} if known else {}
    seen = jobs.measured_speeds
    if seen is None:
        return ratios
    rows, said = snapshot.running, snapshot.job_speeds.take(snapshot.running_cells)
    seen = seen.take(rows)
    # Of whom nothing is known yet, only those are of interest who do not do just as is said.
    told = ((seen > 0) if ratios else (seen > 0) & (seen != said)).nonzero()[0]
    if not len(told):
        return ratios
    rows, seen = rows.take(told), seen.take(told)
    ratio = np.clip(seen / np.maximum(said.take(told), 1e-300), _LEAST_RATIO, _MOST_RATIO)
    for row, now in zip(rows.tolist(), ratio.tolist(), strict=True):
        job_id = jobs.specs[row].id
        before = ratios.get(job_id)
        if before is None and abs(now - 1) < _AS_SAID:
            continue
        kinds = snapshot.counts(row, int(jobs.option[row])) > 0
        if before is None:
            before = np.full(len(snapshot.gpu_types), np.nan)
        ratios[job_id] = np.where(kinds, now, before)
    return ratios


def corrected_speeds(snapshot: Snapshot, ratios: Ratios) -> FloatArray:
    """Samples a second of every option, (jobs, options), by what is known of each job."""
    if not ratios:
        return snapshot.job_speeds
    rows = np.array([snapshot.jobs.row_of[job_id] for job_id in ratios], dtype=np.int64)
    known = np.stack(list(ratios.values()))
    others = np.exp(_CARRIED * np.nanmean(np.log(known), axis=1))[:, None]
    factors = np.where(np.isnan(known), others, known)[:, None, :]
    takes = snapshot.options.counts[snapshot.jobs.option_set[rows]] > 0
    slowest = np.where(takes, factors, np.inf).min(axis=2, initial=np.inf)
    speeds = snapshot.job_speeds.copy()
    speeds[rows] *= np.where(np.isfinite(slowest), slowest, 1.0)
    return speeds
