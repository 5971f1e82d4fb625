"""What is each option of each job worth now?

    worth = weight * speed share * hold / (hold + start) * left ** -SHORTNESS

The speed share is of the job's fastest option. `start` is the time without progress after a start,
0 for what the job runs already, and `hold` how long the decision is expected to hold: so a change
must pay for itself in that time. `left` is what is left at full speed: jobs with little left count
more.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from drystone.schedule.hand_out import Worth
from drystone.schedule.snapshot import FloatArray, Snapshot

# How long a decision is expected to hold; a restart must pay for itself in that time.
HOLD_SECONDS: Final = 3600.0
# How much shortness counts. Between 0 (all seconds count the same) and 1 (the most jobs finished
# an hour); chosen on Arena's Philly trace.
SHORTNESS: Final = 0.5
_SHORTEST_SECONDS: Final = 60.0


def worth_of_options(snapshot: Snapshot, speeds: FloatArray, weights: FloatArray) -> Worth:
    """The worth of each option, (jobs, options), for jobs of these weights at these speeds."""
    jobs = snapshot.jobs
    fastest = speeds.max(axis=1, initial=0.0)[:, None]
    fastest = np.where(fastest > 0, fastest, 1.0)
    remaining = np.maximum(jobs.remaining_samples, 1e-9)[:, None]
    left_seconds = np.maximum(remaining / fastest, _SHORTEST_SECONDS)
    full = weights[:, None] * speeds / fastest * left_seconds**-SHORTNESS
    held = np.minimum(remaining / np.where(speeds > 0, speeds, 1.0), HOLD_SECONDS)
    after_start: FloatArray = full * held / (held + snapshot.startup_seconds)
    values = after_start.copy()
    running = np.flatnonzero(jobs.is_running)
    values[running, jobs.option[running]] = full[running, jobs.option[running]]
    return Worth(values=values, after_start=after_start)
