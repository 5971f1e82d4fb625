"""A trace in numbers: jobs, time, GPU hours by type, models, owners, arrivals."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from drystone.describe.job import JobSpec
from drystone.describe.traces.trace import Trace
from drystone.units import HOUR_SECONDS

_NUM_BINS: Final = 60
_BIN_MINUTES: Final = (1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720, 1440, 2880, 10080)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """A trace in numbers."""

    format: str
    num_jobs: int
    span_seconds: float  # from the first submission to the last
    gpu_hours: float  # of the jobs whose length is known in GPU seconds
    gpu_hours_by_type: Mapping[str, float]  # as asked for; "any" where no type was named
    models: Mapping[str, int]  # jobs by model; "(only a length)" where none is known
    owners: Mapping[str, int]
    jobs_by_num_gpus: Mapping[int, int]  # as asked for; 0 where nothing was
    num_deadlines: int
    bin_seconds: float
    arrivals_per_bin: Sequence[int]
    notes: Sequence[str]

    def to_json(self) -> dict[str, Any]:
        """As JSON knows it."""
        plain = asdict(self)
        plain["jobs_by_num_gpus"] = {str(key): n for key, n in self.jobs_by_num_gpus.items()}
        return plain


def summarise_trace(trace: Trace) -> TraceSummary:
    """Count a trace."""
    jobs = trace.jobs
    by_type: defaultdict[str, float] = defaultdict(float)
    for job in jobs:
        if not job.model:
            by_type[job.requested_gpu or "any"] += job.total_samples / HOUR_SECONDS
    span = max(job.submit_seconds for job in jobs)
    bin_seconds, arrivals = _arrivals(jobs, span)
    return TraceSummary(
        format=trace.format,
        num_jobs=len(jobs),
        span_seconds=span,
        gpu_hours=float(sum(by_type.values())),
        gpu_hours_by_type=dict(sorted(by_type.items(), key=lambda pair: -pair[1])),
        models=_counted(job.model or "(only a length)" for job in jobs),
        owners=_counted(job.owner or "(not named)" for job in jobs),
        jobs_by_num_gpus=dict(sorted(Counter(job.requested_count for job in jobs).items())),
        num_deadlines=sum(job.deadline_seconds < math.inf for job in jobs),
        bin_seconds=bin_seconds,
        arrivals_per_bin=arrivals,
        notes=trace.notes,
    )


def _counted(names: Any) -> dict[str, int]:
    return dict(Counter(names).most_common())


def _arrivals(jobs: Sequence[JobSpec], span: float) -> tuple[float, list[int]]:
    """Jobs by time, in at most `_NUM_BINS` bins of a length that people know."""
    fits = [60.0 * minutes for minutes in _BIN_MINUTES if span / (60 * minutes) < _NUM_BINS]
    bin_seconds = fits[0] if fits else span / _NUM_BINS
    rows = np.array([job.submit_seconds for job in jobs]) // bin_seconds
    return bin_seconds, np.bincount(rows.astype(np.int64)).tolist()
