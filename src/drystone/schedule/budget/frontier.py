"""How fast can jobs finish for a budget of so many dollars an hour, and what should each get?

The theory of BOA Constrictor (arXiv:2602.01404; theorem in arXiv:2406.15560; `boa.md` 2.2 and 2.3):
jobs of several classes arrive for ever, GPUs are rented. Of all policies that keep the budget on
average, the one with the least mean completion time gives every job of a class the same resources
at once and until it ends. With class i arriving at rate a, and choice j taking `seconds` and
`dollars` for a job, the problem is

    minimise   sum a_i w_i seconds_i(j_i)   subject to   sum a_i dollars_i(j_i) <= budget     (BOA)

which is (BOA) of boa.md 2.2 with load / speedup written as rate x seconds: by Little's law the
objective is the mean number of jobs present, and the constraint is the mean spend. A choice is
any resources with a price, so several GPU types and mixed plans are choices like all others.

Solved exactly (boa.md 2.3): every class starts at its cheapest choice; steps along the hulls of
all classes are taken in order of time saved per dollar until the budget is spent; the last step is
taken in part, by giving that share of the class's jobs the larger choice. The order of the steps is
the whole frontier, so a wanted completion time is answered by reading it the other way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from drystone.errors import InvalidSpec, NothingFits
from drystone.schedule.snapshot import BoolArray, FloatArray, IntArray
from drystone.units import HOUR_SECONDS, format_seconds


def lower_hulls(costs: FloatArray, times: FloatArray) -> IntArray:
    """Choices on the hull of each row, cheapest first, padded with -1: (rows, most vertices).

    Walks all rows at once, from vertex to vertex: the next is where time falls most for the money,
    and of equals the farthest. A choice that is not finite is none; every row needs one that is.
    """
    usable = np.isfinite(costs) & np.isfinite(times)
    vertex = _cheapest(np.where(usable, costs, np.inf), times)
    rows = np.arange(len(costs))
    columns = [vertex]
    while len(rows):
        following = _next_vertices(costs[rows], times[rows], usable[rows], vertex)
        goes_on = following >= 0
        rows, vertex = rows[goes_on], following[goes_on]
        column = np.full(len(costs), -1, dtype=np.int64)
        column[rows] = vertex
        columns.append(column)
    return np.stack(columns[:-1] or columns, axis=1)


def _cheapest(costs: FloatArray, times: FloatArray) -> IntArray:
    """The cheapest choice of each row; of equals the fastest."""
    cheapest = costs == costs.min(axis=1, keepdims=True)
    fastest: IntArray = np.where(cheapest, times, np.inf).argmin(axis=1).astype(np.int64)
    return fastest


def _next_vertices(
    costs: FloatArray, times: FloatArray, usable: BoolArray, vertex: IntArray
) -> IntArray:
    """The vertex after this one in each row; -1 where nothing is faster."""
    here = vertex[:, None]
    with np.errstate(invalid="ignore"):
        more_cost = costs - np.take_along_axis(costs, here, axis=1)
        less_time = np.take_along_axis(times, here, axis=1) - times
    better = usable & (more_cost > 0) & (less_time > 0)
    slopes = np.zeros_like(costs)
    with np.errstate(over="ignore"):
        np.divide(less_time, more_cost, out=slopes, where=better)
    steepest = slopes.max(axis=1, keepdims=True)
    best = np.where(better & (slopes == steepest), times, np.inf).argmin(axis=1)
    return np.where(better.any(axis=1), best, -1).astype(np.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class JobClasses:
    """Classes of jobs, one row each, and what one job takes under each choice."""

    arrivals_per_second: FloatArray  # (classes,)
    job_seconds: FloatArray  # (classes, choices); infinite: no such choice
    job_dollars: FloatArray  # (classes, choices)
    weights: FloatArray  # (classes,): how much a second of such a job counts

    def __post_init__(self) -> None:
        rates, weights = self.arrivals_per_second, self.weights
        if self.job_seconds.ndim != 2 or self.job_seconds.shape != self.job_dollars.shape:
            raise InvalidSpec("job_seconds and job_dollars must be tables of one shape")
        if not len(rates) == len(weights) == len(self.job_seconds) or not len(rates):
            raise InvalidSpec("there must be one rate and one weight for each class, and a class")
        if not (np.isfinite(rates).all() and (rates >= 0).all() and (rates > 0).any()):
            raise InvalidSpec("arrival rates must be finite, 0 or more, and not all 0")
        if not (np.isfinite(weights).all() and (weights > 0).all()):
            raise InvalidSpec("weights must be finite and above 0")
        if np.isnan(self.job_seconds).any() or not (self.job_seconds > 0).all():
            raise InvalidSpec("job_seconds must be above 0")
        usable = np.isfinite(self.job_seconds)
        dollars = self.job_dollars[usable]
        if not (np.isfinite(dollars).all() and (dollars >= 0).all()):
            raise InvalidSpec("job_dollars must be finite and 0 or more where there is a choice")
        if not usable.any(axis=1).all():
            row = int(np.flatnonzero(~usable.any(axis=1))[0])
            raise InvalidSpec(f"class {row} has no choice at all")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Allocation:
    """What each class gets: `choice`, and for a share of its jobs `larger` (one class at most)."""

    choice: IntArray  # (classes,)
    larger: IntArray  # (classes,); the same as `choice` where nothing is mixed
    larger_share: FloatArray  # (classes,); of the jobs, hence of the work
    spend_dollars_per_hour: float
    mean_completion_seconds: float
    # The multiplier mu of boa.md 2.3: what one more dollar saves. 0: more money helps nothing.
    job_hours_per_dollar: float


def smooth_multiplier(slopes: FloatArray, spend: FloatArray, budget: float) -> float:
    """See `Frontier.multiplier_at`: of steps with these slopes, falling, between these corners."""
    if not len(slopes) or not slopes[-1] > 0:
        return float(slopes[0]) if len(slopes) else 0.0
    at = np.concatenate([spend[:1], (spend[1:] + spend[:-1]) / 2, spend[-1:]])
    logs = np.log(np.concatenate([2 * slopes[:1], slopes, slopes[-1:] / 2]))
    return float(np.exp(np.interp(budget, at, logs)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Frontier:
    """Mean completion time against budget: straight between corners, falling, convex."""

    classes: JobClasses
    hulls: IntArray  # (classes, vertices): choices on each hull, cheapest first, then -1
    step_class: IntArray  # the class that each step makes faster, in order
    spend_dollars_per_hour: FloatArray  # at the corners: before the first step, after each
    mean_completion_seconds: FloatArray  # at the corners, weighted by `weights`
    job_hours_per_dollar: FloatArray  # of each step, falling

    def at_budget(self, budget_dollars_per_hour: float) -> Allocation:
        """The least mean completion time within the budget, and what gives it."""
        least = float(self.spend_dollars_per_hour[0])
        if not budget_dollars_per_hour >= least:
            raise NothingFits(
                f"${budget_dollars_per_hour:.6g} an hour cannot keep up with the arriving jobs: on"
                f" their cheapest options they take ${least:.6g} an hour",
                hint="Raise the budget, or let fewer jobs in",
            )
        num_whole = int(
            np.searchsorted(self.spend_dollars_per_hour, budget_dollars_per_hour, side="right") - 1
        )
        return self._allocation(num_whole, budget_dollars_per_hour)

    def least_budget(self, mean_completion_seconds: float) -> float:
        """The least dollars an hour for which jobs finish in so many seconds on average."""
        fastest = float(self.mean_completion_seconds[-1])
        if not mean_completion_seconds >= fastest:
            raise NothingFits(
                f"a mean completion time of {format_seconds(mean_completion_seconds)} is out of"
                f" reach: on their fastest options jobs take {format_seconds(fastest)} on average",
                hint="Ask for a longer time, or offer faster options",
            )
        return float(
            np.interp(
                mean_completion_seconds,
                self.mean_completion_seconds[::-1],
                self.spend_dollars_per_hour[::-1],
            )
        )

    def at_multiplier(self, job_hours_per_dollar: float) -> Allocation:
        """What each class picks for itself where a dollar is worth so many job-hours.

        The least of w seconds + mu dollars, class by class (boa.md 2.3: minimise (1 + mu k) / s):
        every step that saves more than the multiplier is taken, and none in part.
        """
        num_whole = int(
            np.searchsorted(-self.job_hours_per_dollar, -job_hours_per_dollar, side="left")
        )
        return self._allocation(num_whole, 0.0)

    def multiplier_at(self, budget_dollars_per_hour: float) -> float:
        """The multiplier for a budget, without steps: what one more dollar saves, in job-hours.

        In the middle of a step it is the step's own, between two middles it is between theirs: jobs
        of one class are not all alike, so that its step is not taken by all of them at once. Twice
        the first one where the budget buys no step, half the last one where it buys them all.
        """
        return smooth_multiplier(
            self.job_hours_per_dollar, self.spend_dollars_per_hour, budget_dollars_per_hour
        )

    @cached_property
    def _jobs_per_mean_second(self) -> float:
        return float(self.classes.weights @ self.classes.arrivals_per_second)

    def _allocation(self, num_whole: int, budget_dollars_per_hour: float) -> Allocation:
        """Take so many whole steps, and of the next as much as the budget pays for."""
        classes = self.classes
        position = np.bincount(self.step_class[:num_whole], minlength=len(self.hulls))
        rows = np.arange(len(self.hulls))
        choice = self.hulls[rows, position]
        larger, share = choice.copy(), np.zeros(len(rows))
        seconds, dollars = classes.job_seconds[rows, choice], classes.job_dollars[rows, choice]
        spend = HOUR_SECONDS * float(classes.arrivals_per_second @ dollars)
        if num_whole < len(self.step_class) and budget_dollars_per_hour > spend:
            row = int(self.step_class[num_whole])
            above = int(self.hulls[row, position[row] + 1])
            more_dollars = classes.job_dollars[row, above] - dollars[row]
            step = HOUR_SECONDS * float(classes.arrivals_per_second[row] * more_dollars)
            part = min((budget_dollars_per_hour - spend) / step, 1.0) if step > 0 else 1.0
            larger[row], share[row] = above, part
            spend = min(spend + part * step, max(budget_dollars_per_hour, spend))
            seconds[row] -= part * (seconds[row] - classes.job_seconds[row, above])
        jobs = float((classes.weights * classes.arrivals_per_second) @ seconds)
        slopes = self.job_hours_per_dollar
        return Allocation(
            choice=choice,
            larger=larger,
            larger_share=share,
            spend_dollars_per_hour=spend,
            mean_completion_seconds=jobs / self._jobs_per_mean_second,
            job_hours_per_dollar=float(slopes[num_whole]) if num_whole < len(slopes) else 0.0,
        )


def classes_from_speeds(
    *,
    arrivals_per_second: npt.ArrayLike,
    mean_samples: npt.ArrayLike,
    price_dollars_per_hour: npt.ArrayLike,
    samples_per_second: npt.ArrayLike,
    startup_seconds: npt.ArrayLike = 0.0,
    weights: npt.ArrayLike = 1.0,
) -> JobClasses:
    """Classes whose choices are (price, speed); a speed of 0 is no choice.

    A job of mean size x on a choice of speed s takes x / s, and is paid for all the while (boa.md
    2.2); a startup is waited for and paid for as well (boa.md 2.4). All arguments are broadcast
    to (classes,) or (classes, choices).
    """
    speeds = np.asarray(samples_per_second, dtype=np.float64)
    rates = np.asarray(arrivals_per_second, dtype=np.float64)
    if rates.shape != speeds.shape[:1]:
        raise InvalidSpec("there must be one arrival rate and one row of speeds for each class")
    sizes = np.broadcast_to(np.asarray(mean_samples, dtype=np.float64), rates.shape)
    if speeds.ndim != 2 or not (np.isfinite(speeds).all() and (speeds >= 0).all()):
        raise InvalidSpec("samples_per_second must be a table of finite numbers, 0 or more")
    seconds = np.full(speeds.shape, np.inf)
    np.divide(np.broadcast_to(sizes[:, None], speeds.shape), speeds, out=seconds, where=speeds > 0)
    seconds += np.asarray(startup_seconds, dtype=np.float64)
    prices = np.broadcast_to(np.asarray(price_dollars_per_hour, dtype=np.float64), speeds.shape)
    dollars = np.where(speeds > 0, prices, 0.0) * np.where(speeds > 0, seconds, 0.0) / HOUR_SECONDS
    return JobClasses(
        arrivals_per_second=rates,
        job_seconds=seconds,
        job_dollars=dollars,
        weights=np.broadcast_to(np.asarray(weights, dtype=np.float64), rates.shape),
    )


def trace_frontier(classes: JobClasses) -> Frontier:
    """All steps of all hulls in order of time saved per dollar (boa.md 2.3, steps 3 and 4)."""
    hulls = lower_hulls(classes.job_dollars, classes.job_seconds)
    known = np.maximum(hulls, 0)
    dollars = np.take_along_axis(classes.job_dollars, known, axis=1)
    seconds = np.take_along_axis(classes.job_seconds, known, axis=1)
    is_step = hulls[:, 1:] >= 0
    more_dollars = np.where(is_step, np.diff(dollars, axis=1), 1.0)
    less_seconds = np.where(is_step, -np.diff(seconds, axis=1), 0.0)
    with np.errstate(over="ignore"):
        slopes = classes.weights[:, None] * less_seconds / more_dollars / HOUR_SECONDS
    # Rounding must not reorder the steps of one class.
    slopes = np.minimum.accumulate(slopes, axis=1)
    row, column = np.nonzero(is_step)
    order = np.argsort(-slopes[row, column], kind="stable")
    row, column = row[order], column[order]
    rates = classes.arrivals_per_second
    spend = HOUR_SECONDS * np.concatenate(
        [[rates @ dollars[:, 0]], rates[row] * more_dollars[row, column]]
    )
    weighted = classes.weights * rates
    jobs = np.concatenate([[weighted @ seconds[:, 0]], -weighted[row] * less_seconds[row, column]])
    return Frontier(
        classes=classes,
        hulls=hulls,
        step_class=row.astype(np.int64),
        spend_dollars_per_hour=np.cumsum(spend),
        mean_completion_seconds=np.cumsum(jobs) / float(weighted.sum()),
        job_hours_per_dollar=slopes[row, column],
    )
