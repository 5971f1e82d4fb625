"""`steady:MU`: renting at one multiplier for ever, as who knew all jobs in advance would choose it.

What `budget` could reach at best if it knew from the first job on what a dollar is worth. The best
MU is found in hindsight (`observe/opponents.py`). Nodes are bought whole: nobody counts on others
to use what is left of one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from drystone.errors import InvalidSpec
from drystone.schedule.budget.acting import Terms, act_at, job_prices, limits_now
from drystone.schedule.budget.leftovers import option_prices
from drystone.schedule.decision import Decision, Memory, Policy
from drystone.schedule.limits import Used
from drystone.schedule.renting import cheapest_offers
from drystone.schedule.snapshot import Snapshot
from drystone.schedule.spot_places import sees_places


class SteadyMemory(NamedTuple):
    """What one decision leaves to the next."""

    time_seconds: float
    picks: Mapping[str, int]
    used: Mapping[str, Used]


def make_steady(job_hours_per_dollar: str) -> Policy:
    """The policy of a multiplier, such as `0.02`."""
    try:
        multiplier = float(job_hours_per_dollar)
    except ValueError:
        multiplier = math.nan
    if not (math.isfinite(multiplier) and multiplier >= 0):
        raise InvalidSpec(
            f"steady:{job_hours_per_dollar} names no multiplier",
            hint="Write steady:0.02, the job-hours that a dollar must save",
        )

    def steady(snapshot: Snapshot, memory: Memory) -> tuple[list[Decision], Memory]:
        before = memory or SteadyMemory(snapshot.now_seconds, {}, {})
        offers = cheapest_offers(
            snapshot.offers, snapshot.gpu_types, snapshot.hard_cap_dollars_per_hour
        )
        elapsed = snapshot.now_seconds - before.time_seconds
        limits = limits_now(snapshot, offers, before.used, elapsed)
        whole = np.zeros(len(snapshot.gpu_types))
        terms = Terms(
            offers=offers,
            used_shares=whole,
            prices=job_prices(snapshot, option_prices(snapshot, offers, whole), limits),
            limits=limits,
            picks=before.picks if snapshot.rentals.coming else {},
            numbers={"job_hours_per_dollar": multiplier},
        )
        acts = act_at(snapshot, terms, multiplier)
        return acts.decisions, SteadyMemory(snapshot.now_seconds, acts.picks, limits.used)

    return sees_places(steady)
