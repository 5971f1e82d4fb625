"""How many idle nodes are kept for the jobs to come, at what a dollar is worth?

A rented node takes minutes to come, and a job waits for it. A place is as many nodes as a job takes
on average, kept idle so that the next job need not wait. One that is taken is replaced by a new
one, which takes the start delay d to come, so where jobs arrive at rate a (Poisson), an arrival
finds none of s places with Erlang's loss probability B(s, a d) (A. K. Erlang 1917; B(0) = 1, and
B(s) = a d B(s-1) / (s + a d B(s-1))). So s places save d (1 - B) seconds a job, and stand idle as
s - a d (1 - B) places. Both grow with s, the first ever slower, the second ever faster: each
further place is a step like those of the frontier (`frontier.py`), with job-hours saved for a
dollar, and is taken in the same order, where it saves more than the multiplier asks for.

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
from drystone.schedule.decision import Decision, Start
from drystone.schedule.snapshot import Snapshot

MAX_GAPS: Final = 4.0  # e^-4: so rarely does a Poisson process pause for longer
MIN_USE: Final = 0.02


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Starts:
    """What jobs were started on so far: by GPU type, how many jobs and on how many nodes."""

    num_jobs: Mapping[int, int] = field(default_factory=dict)
    num_nodes: Mapping[int, int] = field(default_factory=dict)
    last_arrival_seconds: float = -math.inf


class Spares(NamedTuple):
    """Idle nodes that are to be there, by GPU type, and until when if nobody comes."""

    num_nodes: Mapping[int, int]
    until_seconds: float = math.inf


class PlaceStep(NamedTuple):
    """One more place: what a dollar spent on it saves, what it costs, and of what it is made."""

    job_hours_per_dollar: float
    dollars_per_hour: float
    kind: int
    num_nodes: int


def worth_of_places(
    starts: Starts, offers: Mapping[int, Offer], arrivals_per_second: float
) -> list[PlaceStep]:
    """All places that could be kept, those first that save most for a dollar."""
    steps, total = list[PlaceStep](), sum(starts.num_jobs.values())
    for kind, number in starts.num_jobs.items():
        offer = offers.get(kind)
        if offer is None or offer.is_short:
            continue
        size = math.ceil(starts.num_nodes[kind] / number)
        price = size * offer.price_dollars_per_hour
        load = arrivals_per_second * number / total * offer.start_delay_seconds
        for taken, idle in place_steps(load):
            dollars = idle * price
            steps.append(PlaceStep(taken / dollars if dollars else math.inf, dollars, kind, size))
    return sorted(steps, key=lambda step: (-step.job_hours_per_dollar, step.kind))


def plan_spares(
    now_seconds: float,
    starts: Starts,
    places: Sequence[PlaceStep],
    arrivals_per_second: float,
    multiplier: float,
) -> Spares:
    """The places that are worth their money where a dollar is worth so many job-hours."""
    until = starts.last_arrival_seconds + MAX_GAPS / arrivals_per_second
    if until <= now_seconds:
        return Spares({})
    nodes: dict[int, int] = {}
    for step in places:
        if step.job_hours_per_dollar < multiplier:
            break
        nodes[step.kind] = nodes.get(step.kind, 0) + step.num_nodes
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
