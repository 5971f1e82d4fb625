"""What is believed of the jobs to come: their frontier at whole-node prices, and its multiplier.

Arrivals so far (`arrivals.py`) give classes; classes at the prices of whole nodes (`leftovers.py`)
give a frontier; places kept for the next jobs (`spares.py`) are further steps of it. How much of a
node others use depends on what jobs choose, and that on prices, so both are found in turn, from
the side on which everything is used.

Nodes of which there are only so many, and a hard cap, bound every moment, while a budget is a mean.
With Poisson arrivals the spend at a moment has the variance sum a_i seconds_i price_i^2 (boa.md
2.3), so the mean is kept `HEADROOM_DEVIATIONS` below what there can be at most: a job that finds
nothing left waits, or takes what is worse for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from drystone.describe.market import Offer
from drystone.schedule.budget.arrivals import Arrivals, Paths, believed_classes
from drystone.schedule.budget.frontier import (
    Frontier,
    JobClasses,
    smooth_multiplier,
    trace_frontier,
)
from drystone.schedule.budget.leftovers import option_prices, used_shares
from drystone.schedule.budget.spares import PlaceStep, Starts, worth_of_places
from drystone.schedule.snapshot import FloatArray, IntArray, Snapshot
from drystone.units import HOUR_SECONDS

HEADROOM_DEVIATIONS: Final = 1.0
MAX_AGE_SHARE: Final = 0.05  # of the time that was watched: so old may a belief grow
_NUM_ROUNDS: Final = 4  # of prices and choices in turn


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Belief:
    """The frontier of the jobs to come, and what it was made of."""

    made_seconds: float
    frontier: Frontier
    used_shares: FloatArray  # by type
    places: Sequence[PlaceStep]
    paths: Paths
    # All steps, of widths and of places, in order of what a dollar saves.
    job_hours_per_dollar: FloatArray
    spend_dollars_per_hour: FloatArray  # at the corners
    max_dollars_per_hour: float  # that leaves headroom below the cap

    @property
    def arrivals_per_second(self) -> float:
        """Of all classes."""
        return float(self.frontier.classes.arrivals_per_second.sum())

    @property
    def least_dollars_per_hour(self) -> float:
        """What all jobs cost on their cheapest options."""
        return float(self.frontier.spend_dollars_per_hour[0])

    def multiplier_at(self, dollars_per_hour: float) -> float:
        """What a dollar is worth in job-hours where so much is to be spent."""
        spend = min(dollars_per_hour, self.max_dollars_per_hour)
        return smooth_multiplier(self.job_hours_per_dollar, self.spend_dollars_per_hour, spend)


def believe(
    snapshot: Snapshot,
    arrivals: Arrivals,
    starts: Starts,
    offers: Mapping[int, Offer],
    target_dollars_per_hour: float,
    paths: Paths,
) -> Belief | None:
    """What was seen so far, as a frontier; None where that is nothing."""
    shares = _settled_shares(snapshot, arrivals, offers, target_dollars_per_hour)
    prices = option_prices(snapshot, offers, shares)
    classes, _, paths = believed_classes(arrivals, snapshot, prices, paths)
    if classes is None:
        return None
    frontier = trace_frontier(classes)
    rate = float(classes.arrivals_per_second.sum())
    places = worth_of_places(starts, offers, rate)
    slopes = np.concatenate(
        [frontier.job_hours_per_dollar, [place.job_hours_per_dollar for place in places]]
    )
    steps = np.concatenate(
        [
            np.diff(frontier.spend_dollars_per_hour),
            [place.dollars_per_hour for place in places],
        ]
    )
    order = np.argsort(-slopes, kind="stable")
    order = order[np.isfinite(slopes[order])]
    least = frontier.spend_dollars_per_hour[:1]
    return Belief(
        made_seconds=snapshot.now_seconds,
        frontier=frontier,
        used_shares=shares,
        places=places,
        paths=paths,
        job_hours_per_dollar=slopes[order],
        spend_dollars_per_hour=np.concatenate([least, least + np.cumsum(steps[order])]),
        max_dollars_per_hour=_max_spend(frontier, _most_dollars(snapshot, offers)),
    )


def _settled_shares(
    snapshot: Snapshot,
    arrivals: Arrivals,
    offers: Mapping[int, Offer],
    target_dollars_per_hour: float,
) -> FloatArray:
    """By type: the share of what jobs leave of nodes that others use, and prices that agree."""
    shares = np.ones(len(snapshot.gpu_types))
    for _ in range(_NUM_ROUNDS):
        prices = option_prices(snapshot, offers, shares)
        classes, sets, _ = believed_classes(arrivals, snapshot, prices, None)
        if classes is None:
            break
        multiplier = trace_frontier(classes).multiplier_at(target_dollars_per_hour)
        found = _shares_at(snapshot, classes, sets, multiplier, offers)
        if np.allclose(found, shares, atol=0.02):
            break
        shares = np.minimum(found, shares)
    return shares


def is_too_old(belief: Belief, arrivals: Arrivals, now_seconds: float) -> bool:
    """Whether so much time has passed since it was made that rates are others."""
    watched = belief.made_seconds - arrivals.since_seconds
    return now_seconds - belief.made_seconds > MAX_AGE_SHARE * watched


def _shares_at(
    snapshot: Snapshot,
    classes: JobClasses,
    sets: IntArray,
    multiplier: float,
    offers: Mapping[int, Offer],
) -> FloatArray:
    """By type: the share that others use, if all choose at this multiplier."""
    seconds, dollars = classes.job_seconds, classes.job_dollars * HOUR_SECONDS
    weighed = np.where(np.isfinite(seconds), classes.weights[:, None] * seconds, np.inf)
    choice = (weighed + multiplier * dollars).argmin(axis=1)
    present = classes.arrivals_per_second * seconds[np.arange(len(sets)), choice]
    counts = snapshot.options.counts[sets, choice]
    return used_shares(counts, present, offers, len(snapshot.gpu_types))


def _most_dollars(snapshot: Snapshot, offers: Mapping[int, Offer]) -> float:
    """What can be rented at one moment."""
    there = sum(offer.most_nodes * offer.price_dollars_per_hour for offer in offers.values())
    return min(float(there), snapshot.hard_cap_dollars_per_hour)


def _max_spend(frontier: Frontier, most_dollars: float) -> float:
    """The highest corner of the frontier that leaves headroom; at least the lowest."""
    if not math.isfinite(most_dollars):
        return math.inf
    classes, rows = frontier.classes, frontier.step_class
    order = np.zeros(len(rows), dtype=np.int64)  # the how-manieth step of its class each is
    for row in np.unique(rows).tolist():
        mine = rows == row
        order[mine] = np.arange(mine.sum())
    before, after = frontier.hulls[rows, order], frontier.hulls[rows, order + 1]
    every = np.arange(len(frontier.hulls))
    first = _variance(classes, every, frontier.hulls[:, 0]).sum()
    changes = _variance(classes, rows, after) - _variance(classes, rows, before)
    variance = np.maximum(np.cumsum(np.concatenate([[first], changes])), 0.0)
    high = frontier.spend_dollars_per_hour + HEADROOM_DEVIATIONS * np.sqrt(variance)
    below = np.flatnonzero(high <= most_dollars)
    if len(below) == len(high):
        return math.inf
    return float(frontier.spend_dollars_per_hour[below[-1] if len(below) else 0])


def _variance(classes: JobClasses, rows: IntArray, choices: IntArray) -> FloatArray:
    """Of the dollars an hour at a moment, where jobs of these classes take these choices."""
    seconds, dollars = classes.job_seconds[rows, choices], classes.job_dollars[rows, choices]
    price = dollars / seconds * HOUR_SECONDS
    result: FloatArray = classes.arrivals_per_second[rows] * seconds * price**2
    return result
