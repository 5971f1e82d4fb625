"""How much more or less do the jobs of an owner count, given what the owner's share is?

A GPU of type k counts `value[k]`: what it costs an hour where prices are known for every type, else
how fast jobs run on one of it, as a share of their fastest type, on average over the jobs that are
there. So an A100 counts more than a T4. What an owner used fades with a half-life. With

    used = the owner's part of all that was used,  due = share / sum of shares of owners with jobs

the owner's jobs weigh 2 ** (1 - used / due), from 1/8 to 2: 1 for whoever has just what is due. It
is the classic fair-share factor of Slurm (slurm.schedmd.com/priority_multifactor.html), times two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from drystone.schedule.snapshot import FloatArray, Snapshot

HALF_LIFE_SECONDS: Final = 24 * 3600.0
_LEAST_WEIGHT: Final = 0.125


def type_values(
    snapshot: Snapshot, speeds: FloatArray, dollars_per_hour: Mapping[str, float]
) -> FloatArray:
    """What one GPU of each type counts; the most valuable counts 1."""
    known = np.array([dollars_per_hour.get(gpu, 0.0) for gpu in snapshot.gpu_types])
    if (known > 0).all():
        prices: FloatArray = known / known.max()
        return prices
    counts = snapshot.options.counts[snapshot.jobs.option_set]
    total = counts.sum(axis=2)
    each = speeds / np.maximum(total, 1)
    best = np.stack(
        [
            np.where(counts[:, :, kind] == total, each, 0.0).max(axis=1, initial=0.0)
            for kind in range(len(snapshot.gpu_types))
        ],
        axis=1,
    )
    fastest = best.max(axis=1, initial=0.0, keepdims=True)
    share = np.divide(best, fastest, out=np.zeros_like(best), where=fastest > 0)
    runs = best > 0
    mean = share.sum(axis=0) / np.maximum(runs.sum(axis=0), 1)
    values: FloatArray = np.where(mean > 0, mean, 1.0)
    values /= values.max(initial=1e-300)
    return values


def update_usage(
    snapshot: Snapshot, values: FloatArray, usage: Mapping[str, float], elapsed_seconds: float
) -> dict[str, float]:
    """What each owner used, faded, with what ran since the last decision."""
    fade = 0.5 ** (elapsed_seconds / HALF_LIFE_SECONDS)
    found = {owner: used * fade for owner, used in usage.items()}
    jobs = snapshot.jobs
    for row in np.flatnonzero(jobs.is_running).tolist():
        held = min(elapsed_seconds, snapshot.now_seconds - float(jobs.running_since_seconds[row]))
        amount = float(snapshot.counts(row, int(jobs.option[row])) @ values)
        owner = jobs.specs[row].owner
        found[owner] = found.get(owner, 0.0) + amount * max(held, 0.0)
    return found


def owner_weights(
    snapshot: Snapshot, shares: Mapping[str, float], usage: Mapping[str, float]
) -> FloatArray:
    """What the jobs of each owner weigh, by job. An owner without a stated share has share 1."""
    owners = [spec.owner for spec in snapshot.jobs.specs]
    due = {owner: shares.get(owner, 1.0) for owner in dict.fromkeys(owners)}
    all_due = sum(due.values())
    all_used = sum(usage.get(owner, 0.0) for owner in due)
    weight = {}
    for owner, share in due.items():
        used = usage.get(owner, 0.0) / all_used if all_used > 0 else share / all_due
        weight[owner] = max(2.0 ** (1.0 - used * all_due / share), _LEAST_WEIGHT)
    return np.array([weight[owner] for owner in owners])
