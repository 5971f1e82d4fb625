"""Mean completion time against budget: the best possible, and what policies reach.

The theoretical frontier (`schedule/budget/frontier.py`) is that of jobs which arrive for ever at
the rates and sizes of the trace, on GPUs rented one by one at the lowest price of their type, each
start paid for: nobody does better on average. Policies are simulated: nodes come whole, late, and
are paid for while idle. A policy that does not rent, or whose name is after `fixed:`, gets a fixed
set of nodes for the whole run: as many as the budget pays for, of the offer that does the trace's
work for the least money.

A job with phases is taken to keep one option through all of them. A policy that changes the option
from phase to phase can be better than that, so for such jobs the frontier is no lower bound.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np

from drystone.describe.cluster import NodeSpec
from drystone.describe.job import JobSpec
from drystone.describe.market import Offer
from drystone.errors import InvalidSpec, NothingFits
from drystone.observe.opponents import HINDSIGHT, best_within, try_settings
from drystone.observe.simulation import Scenario, run_policy
from drystone.schedule.budget.frontier import (
    Frontier,
    JobClasses,
    classes_from_speeds,
    trace_frontier,
)
from drystone.schedule.options import option_seconds
from drystone.schedule.snapshot import FloatArray
from drystone.units import HOUR_SECONDS

RENTING: Final = frozenset({"budget", "prices", "pollux-autoscale"})
# Before a name: the policy on fixed nodes, though it could rent.
FIXED: Final = "fixed:"
# Rents by a rule of its own, whatever the budget: one run says all.
DEAF: Final = frozenset({"pollux-autoscale"})
# Multiples of what the cheapest options cost, where nobody names budgets.
USUAL_MULTIPLES: Final = (1.1, 1.5, 2.0, 3.0, 5.0)
_MAX_HALVINGS: Final = 6
_CLOSE_ENOUGH: Final = 0.02

OnNodes = Callable[[tuple[NodeSpec, ...]], Scenario]  # the same jobs, on these nodes alone


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """One policy at one budget."""

    policy: str
    budget_dollars_per_hour: float  # infinite for a policy that heeds none
    spent_dollars_per_hour: float  # over the makespan
    spent_dollars: float
    # What theory compares: all the money, over the time in which jobs arrived. A run goes on after
    # its last job has come, and what is spent then is spent on those jobs too.
    arrival_dollars_per_hour: float
    mean_completion_seconds: float  # nan where no job was done
    num_done: int
    num_jobs: int
    theory_seconds: float  # the best possible for that money; nan where it cannot keep up
    setting: str = ""  # of an opponent known in hindsight: the best one, such as constant:8

    def to_json(self) -> dict[str, Any]:
        """As JSON knows it."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }


def theoretical_frontier(scenario: Scenario) -> Frontier:
    """Of the jobs of a scenario on what its market offers."""
    return trace_frontier(job_classes(scenario))


def job_classes(scenario: Scenario) -> JobClasses:
    """The kinds of jobs of a trace: those with the same options are one."""
    if not scenario.offers:
        raise InvalidSpec("a frontier needs something to buy", hint="Give --market FILE")
    members: dict[int, list[JobSpec]] = defaultdict(list)
    for job in scenario.jobs:
        members[id(scenario.options_of(job))].append(job)
    span = arrival_hours(scenario) * HOUR_SECONDS
    prices = gpu_prices(scenario)
    groups = [
        (found, scenario.options_of(found[0]))
        for found in members.values()
        if len(scenario.options_of(found[0]))
    ]
    if not groups:
        raise NothingFits("no job of the trace fits what the market offers")
    width = max(len(options) for _, options in groups)
    speeds, dollars, startup = (np.zeros((len(groups), width)) for _ in range(3))
    for row, (found, options) in enumerate(groups):
        mean = _mean_samples(found)
        speeds[row, : len(options)] = mean / option_seconds(options, mean)
        dollars[row, : len(options)] = options.counts @ prices
        told = scenario.startup.seconds(options.counts.sum(axis=1))
        own = sum(job.startup_seconds for job in found) / len(found)  # below 0: as is told
        startup[row, : len(options)] = own if own >= 0 else told
    return classes_from_speeds(
        arrivals_per_second=[len(found) / span for found, _ in groups],
        mean_samples=[_mean_samples(found) for found, _ in groups],
        price_dollars_per_hour=dollars,
        samples_per_second=speeds,
        startup_seconds=startup,
    )


def arrival_hours(scenario: Scenario) -> float:
    """From the first submission to the last; an hour where all come at once."""
    return (max(job.submit_seconds for job in scenario.jobs) or HOUR_SECONDS) / HOUR_SECONDS


def gpu_prices(scenario: Scenario) -> FloatArray:
    """Dollars an hour of one GPU by type: the cheapest offer."""
    lowest = dict.fromkeys(scenario.gpu_types, math.inf)
    for offer in scenario.offers:
        lowest[offer.gpu] = min(lowest[offer.gpu], offer.price_dollars_per_hour / offer.num_gpus)
    return np.array([lowest[gpu] for gpu in scenario.gpu_types])


def usual_budgets(frontier: Frontier) -> list[float]:
    """From just enough to several times that, as far as money helps."""
    least, most = (float(frontier.spend_dollars_per_hour[end]) for end in (0, -1))
    wanted = [multiple * least for multiple in USUAL_MULTIPLES if multiple * least < most]
    return [float(f"{budget:.3g}") for budget in (wanted or [1.1 * least])]


def simulate_point(
    scenario: Scenario, on_nodes: OnNodes, frontier: Frontier, policy: str, budget: float
) -> FrontierPoint | None:
    """A policy at a budget; None where the budget does not pay for one node."""
    given = replace(scenario, budget_dollars_per_hour=budget)
    fixed_price = 0.0
    if is_fixed(policy):
        nodes, fixed_price = fixed_nodes(scenario, budget)
        if not nodes:
            return None
        given = on_nodes(nodes)
    report = run_policy(given, policy.removeprefix(FIXED)).report
    hours = report.makespan_seconds / HOUR_SECONDS
    spent = report.spent_dollars + fixed_price * hours
    arrival_rate = spent / arrival_hours(scenario)
    return FrontierPoint(
        policy=policy,
        budget_dollars_per_hour=math.inf if policy in DEAF else budget,
        spent_dollars_per_hour=spent / hours if hours > 0 else 0.0,
        spent_dollars=spent,
        arrival_dollars_per_hour=arrival_rate,
        mean_completion_seconds=report.mean_completion_seconds,
        num_done=report.num_done,
        num_jobs=report.num_jobs,
        theory_seconds=_theory_at(frontier, arrival_rate),
    )


def hindsight_points(
    scenario: Scenario, frontier: Frontier, opponent: str, budgets: Sequence[float]
) -> list[FrontierPoint]:
    """An opponent known in hindsight, at its best setting for each budget."""
    tried = try_settings(scenario, opponent)
    found = []
    for budget in budgets:
        best = best_within(tried, budget)
        report, hours = best.report, best.report.makespan_seconds / HOUR_SECONDS
        found.append(
            FrontierPoint(
                policy=opponent,
                budget_dollars_per_hour=budget,
                spent_dollars_per_hour=report.spent_dollars / hours if hours > 0 else 0.0,
                spent_dollars=report.spent_dollars,
                arrival_dollars_per_hour=best.dollars_per_hour,
                mean_completion_seconds=report.mean_completion_seconds,
                num_done=report.num_done,
                num_jobs=report.num_jobs,
                theory_seconds=_theory_at(frontier, best.dollars_per_hour),
                setting=best.name,
            )
        )
    return found


def is_fixed(policy: str) -> bool:
    """Whether a policy of this name gets a fixed set of nodes."""
    rents = policy in RENTING or policy.partition(":")[0] in HINDSIGHT
    return policy.startswith(FIXED) or not rents


def fixed_nodes(scenario: Scenario, budget: float) -> tuple[tuple[NodeSpec, ...], float]:
    """The nodes that a budget pays for all the time, and their price an hour."""
    offer = cheapest_for_the_work(scenario)
    price = offer.price_dollars_per_hour
    number = min(int(budget / price + 1e-9) if price > 0 else offer.most_nodes, offer.most_nodes)
    nodes = tuple(offer.node(f"{offer.name}-{index:04d}") for index in range(number))
    return nodes, number * price


def cheapest_for_the_work(scenario: Scenario) -> Offer:
    """The offer on whose GPUs alone the trace's work costs least; as much of it as can be done."""

    def cost(offer: Offer) -> tuple[int, float]:
        column = scenario.gpu_types.index(offer.gpu)
        price = offer.price_dollars_per_hour / offer.num_gpus
        undone, total = 0, 0.0
        for job in scenario.jobs:
            options = scenario.options_of(job)
            counts = options.counts
            mine = counts[:, column] == counts.sum(axis=1)
            seconds = option_seconds(options, job.total_samples)
            undone += not mine.any()
            total += float((seconds * counts[:, column])[mine].min(initial=math.inf)) * price
        return undone, total if math.isfinite(total) else 0.0

    return min(scenario.offers, key=cost)


def reach_target(
    scenario: Scenario,
    on_nodes: OnNodes,
    frontier: Frontier,
    policy: str,
    target_seconds: float,
) -> list[FrontierPoint]:
    """Simulations at budgets between which the wanted mean completion time lies, ever closer."""
    low = frontier.least_budget(max(target_seconds, float(frontier.mean_completion_seconds[-1])))
    high, found = 4 * low, []
    for _ in range(_MAX_HALVINGS):
        middle = math.sqrt(low * high)
        point = simulate_point(scenario, on_nodes, frontier, policy, float(f"{middle:.4g}"))
        if point is not None:
            found.append(point)
        is_met = point is not None and meets(point, target_seconds)
        low, high = (low, middle) if is_met else (middle, high)
        if high / low < 1 + _CLOSE_ENOUGH:
            break
    return found


def meets(point: FrontierPoint, target_seconds: float) -> bool:
    """Whether all jobs were done, and early enough on average."""
    return point.num_done == point.num_jobs and point.mean_completion_seconds <= target_seconds


def cheapest_meeting(
    points: Sequence[FrontierPoint], policy: str, target_seconds: float
) -> FrontierPoint | None:
    """The least budget of a policy at which it was seen to meet the target."""
    met = [point for point in points if point.policy == policy and meets(point, target_seconds)]
    return min(met, key=lambda point: point.spent_dollars) if met else None


def _mean_samples(jobs: Sequence[JobSpec]) -> float:
    return sum(job.total_samples for job in jobs) / len(jobs)


def _theory_at(frontier: Frontier, spend: float) -> float:
    try:
        return frontier.at_budget(spend).mean_completion_seconds
    except NothingFits:
        return math.nan
