"""Least attained service: whoever has had the fewest GPU hours runs. Needs no lengths.

After Tiresias (NSDI 2019): GPUs times time, in a few queues, lest jobs take turns for ever; a job
falls to the next queue when it has used its share, and within a queue the oldest comes first.
Each job keeps to the GPUs that its owner named.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from drystone.schedule.baselines.rigid import give_by_rank, refuse_impossible, rigid_options
from drystone.schedule.decision import Decision
from drystone.schedule.policies import Memory
from drystone.schedule.snapshot import Snapshot
from drystone.units import HOUR_SECONDS

# Where one queue ends and the next begins, in GPU seconds; Tiresias' simulator uses two queues
# with about one GPU hour between them, and large jobs need one more.
QUEUE_BOUNDS: Final = (1 * HOUR_SECONDS, 10 * HOUR_SECONDS)


def least_attained(snapshot: Snapshot, memory: Memory) -> tuple[list[Decision], Memory]:
    """Rank by queue; of one queue, by submission."""
    options = rigid_options(snapshot)
    queue = np.searchsorted(np.array(QUEUE_BOUNDS), snapshot.jobs.attained_gpu_seconds, "right")
    decisions = refuse_impossible(snapshot, options)
    decisions += give_by_rank(
        snapshot,
        rank=queue.astype(np.float64),
        options=options,
        reason="it has had the fewest GPU hours",
    )
    return decisions, memory
