"""Markets for judging prices: jobs with options of several types, from a seed."""

from __future__ import annotations

import numpy as np

from drystone.schedule.prices.shadow_prices import Market

# By type: how fast one GPU is, and how many there are for each job.
SPEEDS = np.array([4.0, 2.2, 1.5, 1.0, 0.8, 0.5])
GPUS_PER_JOB = np.array([1.5, 1.5, 1.0, 1.5, 1.0, 1.5])
COUNTS = np.array([1, 2, 4, 8, 16])


def make_market(seed: int, num_jobs: int, *, mixed: int = 0) -> Market:
    """Six types, counts of 1 to 16, a fifth of the options missing, and more wanted than there is.

    `mixed` options more take two types at once.
    """
    chance = np.random.default_rng(seed)
    num_types, num_counts = len(SPEEDS), len(COUNTS)
    counts = np.zeros((num_jobs, num_types * num_counts, num_types))
    for kind in range(num_types):
        counts[:, kind * num_counts : (kind + 1) * num_counts, kind] = COUNTS
    speed = SPEEDS * chance.lognormal(0, 0.3, (num_jobs, num_types))
    bend = chance.uniform(0.5, 0.95, (num_jobs, num_types))
    values = (speed[:, :, None] * COUNTS ** bend[:, :, None]).reshape(num_jobs, -1)
    values /= values.max(axis=1, keepdims=True)
    values[chance.random(values.shape) < 0.2] = 0.0
    if mixed:
        more = np.zeros((num_jobs, mixed, num_types))
        for option in range(mixed):
            pair = chance.choice(num_types, 2, replace=False)
            more[:, option, pair] = 2.0 ** chance.integers(0, 4, 2)
        counts = np.concatenate((counts, more), axis=1)
        values = np.concatenate((values, chance.uniform(0.3, 1.1, (num_jobs, mixed))), axis=1)
    values *= chance.lognormal(0, 0.7, (num_jobs, 1))
    return Market(
        values=values,
        counts=tuple(np.ascontiguousarray(counts[:, :, kind]) for kind in range(num_types)),
        capacity=np.round(num_jobs * GPUS_PER_JOB),
    )
