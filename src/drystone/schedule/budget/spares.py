"""How many idle nodes are kept for the jobs to come, where there is money left?

A rented node takes minutes to come, and a job waits for it. Where the budget is above what all jobs
can use on their fastest options, the rest buys them a place that is there when they arrive. A place
is as many nodes as a job takes on average. One that is taken is replaced by a new one, which takes
the start delay d to come, so where jobs arrive at rate a (Poisson), an arrival finds none of s
places with Erlang's loss probability B(s, a d) (A. K. Erlang 1917; B(0) = 1, and
B(s) = a d B(s-1) / (s + a d B(s-1))). So s places save d (1 - B) seconds a job, and stand idle as
s - a d (1 - B) places. Both grow with s, the first ever slower, the second ever faster: places are
taken in order of seconds saved for a dollar, over all GPU types, until the money that is left is
spent, as steps of the frontier are (`frontier.py`). They come after all of these.

What is left is what was saved so far, and no more than the budget less what jobs can use. The count
of n jobs is off by a share of 1 / sqrt(n), so by that share they may use more than is believed:
without it places that were bought early were repaid by jobs that came later, on narrower options.

Nobody is waited for at night: places are kept for `MAX_GAPS` mean times between arrivals after
the last one, and no place is kept that would be taken for less than `MIN_USE` of the time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import numpy as np

from drystone.describe.market import Offer
from drystone.schedule.budget.frontier import Frontier
from drystone.schedule.budget.multiplier import BudgetBalance
from drystone.schedule.decision import Decision, Start
from drystone.schedule.snapshot import Snapshot
from drystone.units import HOUR_SECONDS

MAX_GAPS: Final = 4.0  # e^-4: so rarely does a Poisson process pause for longer
MIN_USE: Final = 0.02


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Starts:
    """What jobs were started on so far: by GPU type, how many jobs and on how many nodes."""

    num_jobs: Mapping[int, int] = field(default_factory=dict)
    num_nodes: Mapping[int, int] = field(default_factory=dict)
    last_arrival_seconds: float = -math.inf
    # What is paid for the places that were kept at the last decision, and since when.
    dollars_per_hour: float = 0.0
    time_seconds: float = math.inf

    def idle_dollars(self, now_seconds: float) -> float:
        """What the places have cost since the last decision."""
        return self.dollars_per_hour * max(now_seconds - self.time_seconds, 0.0) / HOUR_SECONDS


class Spares(NamedTuple):
    """Idle nodes that are to be there, by GPU type, and until when if nobody comes."""

    num_nodes: Mapping[int, int]
    until_seconds: float = math.inf


def plan_spares(
    snapshot: Snapshot,
    starts: Starts,
    offers: Mapping[int, Offer],
    frontier: Frontier | None,
    balance: BudgetBalance | None,
) -> Spares:
    """The places that the money pays for which jobs cannot use."""
    if frontier is None or balance is None or not starts.num_jobs:
        return Spares({})
    total = sum(starts.num_jobs.values())
    usable = float(frontier.spend_dollars_per_hour[-1]) * (1 + 1 / math.sqrt(total))
    unspent = balance.target_dollars_per_hour - balance.budget_dollars_per_hour
    left = min(balance.budget_dollars_per_hour - usable, unspent)
    rate = float(frontier.classes.arrivals_per_second.sum())
    until = starts.last_arrival_seconds + MAX_GAPS / rate
    if left <= 0 or until <= snapshot.now_seconds:
        return Spares({})
    steps = list[tuple[float, float, int, int]]()
    for kind, number in starts.num_jobs.items():
        offer = offers.get(kind)
        if offer is not None and not offer.is_short:
            size = math.ceil(starts.num_nodes[kind] / number)
            found = place_steps(rate * number / total * offer.start_delay_seconds)
            price = size * offer.price_dollars_per_hour
            # Dollars for a start delay saved, not the other way round: a node may cost nothing.
            steps += [(idle * price / taken, idle * price, kind, size) for taken, idle in found]
    nodes: dict[int, int] = {}
    for _, dollars, kind, size in sorted(steps, key=lambda step: (step[0], step[2])):
        left -= dollars
        if left < 0:
            break
        nodes[kind] = nodes.get(kind, 0) + size
    return Spares(nodes, until)


def place_steps(load: float) -> list[tuple[float, float]]:
    """Of each further place: the share of the time in which it is taken, and in which it is idle.

    A place is taken from the moment a job takes it until the next one is there in its stead; each
    time a job has been spared a start delay.
    """
    steps, lost = list[tuple[float, float]](), 1.0
    while load > 0:
        before, lost = lost, load * lost / (len(steps) + 1 + load * lost)
        taken = load * (before - lost)
        if taken < MIN_USE:
            break
        steps.append((taken, 1.0 - taken))
    return steps


def count_starts(
    starts: Starts,
    snapshot: Snapshot,
    offers: Mapping[int, Offer],
    decisions: Sequence[Decision],
    *,
    has_arrivals: bool,
) -> Starts:
    """Add the jobs that are started now, by the nodes that they take of each type."""
    num_jobs, num_nodes = dict(starts.num_jobs), dict(starts.num_nodes)
    for decision in decisions:
        if not isinstance(decision, Start):
            continue
        counts = snapshot.counts(snapshot.jobs.row_of[decision.job_id], decision.option)
        for kind in np.flatnonzero(counts).tolist():
            if kind in offers:
                num_jobs[kind] = num_jobs.get(kind, 0) + 1
                nodes = math.ceil(int(counts[kind]) / offers[kind].num_gpus)
                num_nodes[kind] = num_nodes.get(kind, 0) + nodes
    last = snapshot.now_seconds if has_arrivals else starts.last_arrival_seconds
    return replace(starts, num_jobs=num_jobs, num_nodes=num_nodes, last_arrival_seconds=last)


def pay_for_spares(
    starts: Starts, snapshot: Snapshot, offers: Mapping[int, Offer], num_kept: Mapping[int, int]
) -> Starts:
    """Take down what the idle nodes that stay will cost until the next decision."""
    dollars = sum(number * offers[kind].price_dollars_per_hour for kind, number in num_kept.items())
    return replace(starts, dollars_per_hour=dollars, time_seconds=snapshot.now_seconds)
