"""Rules for one job with a deadline on spot nodes: uniform progress, spot with fallback.

Uniform progress is the rule of *Can't Be Late* (NSDI'24): a job should be as far as a straight line
from its start to its deadline. Behind it and without spot it goes on demand, and stays until it is
ahead by two restarts; spot is taken whenever there is any, and kept until it is lost. With slack
for two restarts or less it goes on demand for good. Several places: the cheapest that is available.
"""

from __future__ import annotations

from collections.abc import Sequence

from drystone.schedule.budget.spot import ON_DEMAND, WAIT, DeadlineJob, SpotPlace


def uniform_progress(
    job: DeadlineJob, places: Sequence[SpotPlace], *, all_work_hours: float, all_hours: float
) -> int:
    """Where the job should be now; `all_...` are its work and time when it began."""
    if job.place >= 0:
        return _keep_spot(job)
    if job.slack_hours < 2 * job.restart_hours + job.tick_hours:
        return ON_DEMAND
    done = 1 - job.work_hours / all_work_hours
    passed_hours = all_hours - job.hours_left
    if job.place == ON_DEMAND:
        ahead = min((passed_hours + 2 * job.restart_hours) / all_hours, 1.0)
        return _cheapest_available(places) if done >= ahead else ON_DEMAND
    place = _cheapest_available(places)
    return ON_DEMAND if place == WAIT and done < passed_hours / all_hours else place


def spot_with_fallback(job: DeadlineJob, places: Sequence[SpotPlace]) -> int:
    """Spot whenever there is any; on demand for good once there is no time left to wait."""
    if job.place == ON_DEMAND:
        return ON_DEMAND
    if job.place >= 0:
        return _keep_spot(job)
    if job.slack_hours <= 2 * job.restart_hours:
        return ON_DEMAND
    return _cheapest_available(places)


def _keep_spot(job: DeadlineJob) -> int:
    needed_hours = job.restart_hours + job.starting_hours + job.tick_hours
    return ON_DEMAND if job.slack_hours <= needed_hours else job.place


def _cheapest_available(places: Sequence[SpotPlace]) -> int:
    rows = [row for row, place in enumerate(places) if place.is_available]
    return min(rows, key=lambda row: places[row].dollars_per_hour, default=WAIT)
