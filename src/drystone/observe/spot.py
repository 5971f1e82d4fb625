"""One job with a deadline replayed on spot traces: by a rule, and at the least cost in hindsight.

Time goes in the ticks of the trace. A node is paid for by the tick, also while the job restarts on
it. Nobody is asked for more than one node, and what a zone has now is known to every rule; what it
will have is known to `least_dollars` only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from drystone.describe.traces.spot import SpotTrace
from drystone.schedule.baselines.uniform_progress import spot_with_fallback, uniform_progress
from drystone.schedule.budget.spot import (
    ON_DEMAND,
    WAIT,
    DeadlineJob,
    PlaceHistory,
    SpotPlace,
    choose_place,
)
from drystone.units import HOUR_SECONDS

Rule = Callable[[DeadlineJob, Sequence[SpotPlace]], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotTask:
    """The work, and what it costs to move it. Its deadline is the end of the trace."""

    work_hours: float
    restart_hours: float
    on_demand_dollars_per_hour: float
    move_dollars: float = 0.0  # for a checkpoint that goes to another zone


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotOutcome:
    """What became of it."""

    dollars: float
    is_done: bool
    num_starts: int
    on_demand_hours: float


def rules_for(task: SpotTask, trace: SpotTrace) -> dict[str, Rule]:
    """Ours and its opponents, by name."""
    all_hours = trace.is_available.shape[1] * trace.tick_seconds / HOUR_SECONDS

    def uniform(job: DeadlineJob, places: Sequence[SpotPlace]) -> int:
        return uniform_progress(job, places, all_work_hours=task.work_hours, all_hours=all_hours)

    return {
        "spot": choose_place,
        "uniform progress": uniform,
        "spot with fallback": spot_with_fallback,
        "on demand": lambda _job, _places: ON_DEMAND,
    }


def replay(rule: Rule, task: SpotTask, trace: SpotTrace) -> SpotOutcome:
    """Run a rule over a trace, tick by tick."""
    tick_hours = trace.tick_seconds / HOUR_SECONDS
    num_ticks = trace.is_available.shape[1]
    work, restart = round(task.work_hours / tick_hours), round(task.restart_hours / tick_hours)
    histories = [PlaceHistory()] * len(trace.zones)
    place, last, starting, num_starts = WAIT, WAIT, 0, 0
    dollars = on_demand_hours = 0.0
    for tick in range(num_ticks):
        available = trace.is_available[:, tick].tolist()
        prices = trace.dollars_per_hour[:, tick].tolist()
        before = trace.is_available[:, max(tick - 1, 0)].tolist()
        histories = [
            _watched(*seen, tick_hours) for seen in zip(histories, before, available, strict=True)
        ]
        if place >= 0 and not available[place]:
            place = WAIT
        job = DeadlineJob(
            work_hours=work * tick_hours,
            hours_left=(num_ticks - tick) * tick_hours,
            restart_hours=restart * tick_hours,
            place=place,
            last_place=last,
            starting_hours=starting * tick_hours,
            move_dollars=task.move_dollars,
            on_demand_dollars_per_hour=task.on_demand_dollars_per_hour,
            tick_hours=tick_hours,
        )
        chosen = rule(job, _places(prices, available, histories))
        if chosen not in (place, WAIT):
            starting, num_starts = restart, num_starts + 1
            if chosen >= 0:  # on-demand nodes are to be had where the checkpoint is
                dollars += task.move_dollars if last not in (WAIT, chosen) else 0.0
                last = chosen
        place = chosen
        if place == WAIT:
            continue
        is_spot = place >= 0
        dollars += (prices[place] if is_spot else task.on_demand_dollars_per_hour) * tick_hours
        on_demand_hours += 0.0 if is_spot else tick_hours
        starting, work = (starting - 1, work) if starting else (0, work - 1)
        if work == 0:
            break
    return SpotOutcome(
        dollars=dollars, is_done=work == 0, num_starts=num_starts, on_demand_hours=on_demand_hours
    )


def _places(
    prices: list[float], available: list[bool], histories: list[PlaceHistory]
) -> list[SpotPlace]:
    return [
        SpotPlace(dollars_per_hour=price, is_available=is_available, history=history)
        for price, is_available, history in zip(prices, available, histories, strict=True)
    ]


def _watched(
    history: PlaceHistory, was_available: bool, is_available: bool, tick_hours: float
) -> PlaceHistory:
    return replace(
        history,
        watched_hours=history.watched_hours + tick_hours,
        available_hours=history.available_hours + tick_hours * is_available,
        num_losses=history.num_losses + (was_available and not is_available),
    )


def least_dollars(task: SpotTask, trace: SpotTrace) -> float:
    """The least that the work can cost, by dynamic programming over ticks and work left.

    Moving checkpoints is free here, so it is a bound that nobody with `move_dollars` can reach.
    Infinite where even on-demand nodes would be late.
    """
    tick_hours = trace.tick_seconds / HOUR_SECONDS
    work, restart = round(task.work_hours / tick_hours), round(task.restart_hours / tick_hours)
    num_ticks = trace.is_available.shape[1]
    on_demand = np.full(num_ticks, task.on_demand_dollars_per_hour)
    prices = np.vstack([trace.dollars_per_hour, on_demand]) * tick_hours
    is_up = np.vstack([trace.is_available, np.ones(num_ticks, dtype=np.bool_)])
    paid = np.concatenate([np.zeros((len(prices), 1)), np.cumsum(prices, axis=1)], axis=1)
    up_for = np.zeros((len(prices), num_ticks + 1), dtype=np.int64)
    for tick in range(num_ticks - 1, -1, -1):
        up_for[:, tick] = np.where(is_up[:, tick], up_for[:, tick + 1] + 1, 0)
    # What the rest costs, by work left: of a job without a node, and of one that trains.
    idle: npt.NDArray[np.float64] = np.full(work + 1, np.inf)
    idle[0] = 0.0
    training = {num_ticks: np.tile(idle, (len(prices), 1))}
    for tick in range(num_ticks - 1, -1, -1):
        later = training.get(tick + restart)
        idle = idle.copy()
        if later is not None and restart:
            for zone in np.flatnonzero(up_for[:, tick] >= restart):
                restarted = later[zone] + paid[zone, tick + restart] - paid[zone, tick]
                np.minimum(idle, restarted, out=idle)
        now = np.tile(idle, (len(prices), 1))
        for zone in np.flatnonzero(is_up[:, tick]):
            stay = training[tick + 1][zone, :-1] + prices[zone, tick]
            np.minimum(now[zone, 1:], stay, out=now[zone, 1:])
        if not restart:
            idle = now.min(axis=0)
            now[:] = idle
        training[tick] = now
        training.pop(tick + max(restart, 1) + 1, None)
    return float(idle[work])
