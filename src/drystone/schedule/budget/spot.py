"""Spot or on demand: where a job with a deadline should run now, or whether it should wait.

A spot node is cheap and can be taken away; an on-demand node is always to be had and kept. Every
change of place costs a restart: time in which a node is paid for and nothing is trained.

- **On demand as late as possible.** Money is saved by using all spot time there is, and it does not
  matter when the rest is done on demand. So a job waits while its slack is above a reserve, and the
  reserve pays for the restarts that are still to come.
- **A reservation price among spot places.** The cheapest places that are available often enough to
  finish in time are taken; dearer ones only when those do not suffice (`reservation_dollars`).
- **A safety net.** A job whose slack is down to one restart goes on demand, and stays.

*Can't Be Late* (NSDI'24) goes on demand when a job falls behind a straight line instead
(`baselines/uniform_progress.py`); `benchmarks/spot.py` compares both with the offline optimum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

# Priors, worth so many hours of watching a place. Assumptions: half of the time there is a node,
# and it stays for three hours. The rule hardly depends on them (benchmarks/spot.py, docs/log.md).
PRIOR_HOURS: Final = 6.0
PRIOR_SHARE: Final = 0.5
PRIOR_LIFE_HOURS: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceHistory:
    """What was seen of a spot place so far."""

    watched_hours: float = 0.0
    available_hours: float = 0.0  # of these
    num_losses: float = 0.0  # times that it became unavailable, or a node was taken away
    prior_life_hours: float = PRIOR_LIFE_HOURS

    @property
    def available_share(self) -> float:
        """Believed share of the time in which there is a node."""
        seen = self.available_hours + PRIOR_SHARE * PRIOR_HOURS
        return seen / (self.watched_hours + PRIOR_HOURS)

    @property
    def life_hours(self) -> float:
        """Believed time that a node stays."""
        losses = self.num_losses + PRIOR_HOURS / self.prior_life_hours
        return (self.available_hours + PRIOR_HOURS) / losses


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotPlace:
    """A place where spot nodes are sold: a zone, or an offer."""

    dollars_per_hour: float
    is_available: bool  # now, as far as known
    history: PlaceHistory = PlaceHistory()

    def restart_share(self, restart_hours: float) -> float:
        """Hours of restarting for each hour of training here."""
        return restart_hours / self.history.life_hours

    def dollars_per_trained_hour(self, restart_hours: float) -> float:
        """Its price with the restarts that it will cost."""
        return self.dollars_per_hour * (1 + self.restart_share(restart_hours))


WAIT: Final = -1
ON_DEMAND: Final = -2


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineJob:
    """A job between its places."""

    work_hours: float  # that are left
    hours_left: float  # until its deadline; infinity: it has none
    restart_hours: float  # without progress after every start; with what a lost node loses
    place: int = WAIT  # where it is: a row of the places, ON_DEMAND or WAIT
    last_place: int = WAIT  # where its checkpoint is
    starting_hours: float = 0.0  # of its last start that are still to come
    move_dollars: float = 0.0  # for carrying a checkpoint to another place
    on_demand_dollars_per_hour: float = math.inf
    tick_hours: float = 1 / 60  # until it is looked at again

    @property
    def slack_hours(self) -> float:
        """Hours that can be lost before the deadline is."""
        return self.hours_left - self.work_hours


def choose_place(job: DeadlineJob, places: Sequence[SpotPlace]) -> int:
    """A row of the places, ON_DEMAND or WAIT."""
    if job.place == ON_DEMAND:
        return _back_to_spot(job, places)
    net_hours = job.restart_hours + job.tick_hours
    if job.place >= 0:
        net_hours += job.starting_hours
    if job.slack_hours <= net_hours:
        return ON_DEMAND
    reserve_hours = hours_kept(job, places)
    limit = reservation_dollars(job, places, reserve_hours)
    wanted = [row for row in _available(places) if _price(job, places[row]) <= limit * (1 + 1e-9)]
    if job.place >= 0:
        return _stay_or_move(job, places, wanted, reserve_hours)
    if wanted:
        return _cheapest(job, places, wanted)
    if job.slack_hours > reserve_hours:
        return WAIT
    available = _available(places)
    return _cheapest(job, places, available) if available else ON_DEMAND


def reservation_dollars(
    job: DeadlineJob, places: Sequence[SpotPlace], reserve_hours: float
) -> float:
    """The least price at which places are to be had often enough to finish in time.

    Infinite where none suffice: then every spot place is welcome.
    """
    if math.isinf(job.hours_left):
        return min((_price(job, place) for place in places), default=math.inf)
    hours, share_without = job.hours_left - min(reserve_hours, job.slack_hours), 1.0
    for place in sorted(places, key=lambda place: _price(job, place)):
        share_without *= 1 - place.history.available_share
        trained_hours = hours * (1 - share_without) / (1 + place.restart_share(job.restart_hours))
        if trained_hours >= job.work_hours:
            return _price(job, place)
    return math.inf


def hours_kept(job: DeadlineJob, places: Sequence[SpotPlace]) -> float:
    """Slack that is kept for restarts: two, and one for each loss that is still to be expected.

    Where no other place takes over, a loss costs two: to on-demand nodes and back.
    """
    if not places or math.isinf(job.hours_left):
        return 2 * job.restart_hours
    life_hours = max(place.history.life_hours for place in places)
    share_without = math.prod(1 - place.history.available_share for place in places)
    num_losses = job.work_hours / life_hours * (1 + share_without)
    return (2 + num_losses) * job.restart_hours


def _back_to_spot(job: DeadlineJob, places: Sequence[SpotPlace]) -> int:
    """Leave on-demand nodes where there is time for the way there and back, and it pays."""
    available = _available(places)
    restart = job.restart_hours
    if not available or job.slack_hours < 2 * (restart + job.tick_hours):
        return ON_DEMAND
    row = min(available, key=lambda row: _price(job, places[row]))
    hours = min(places[row].history.life_hours, job.work_hours)
    saved = (job.on_demand_dollars_per_hour - places[row].dollars_per_hour) * hours
    lost = 2 * restart * job.on_demand_dollars_per_hour + _move_dollars(job, row)
    return row if saved > lost else ON_DEMAND


def _stay_or_move(
    job: DeadlineJob, places: Sequence[SpotPlace], wanted: list[int], reserve_hours: float
) -> int:
    """Move to a cheaper place where that pays for the restart, and there is slack for it."""
    if not wanted or job.slack_hours <= reserve_hours + 3 * job.restart_hours:
        return job.place
    row = min(wanted, key=lambda row: places[row].dollars_per_hour)
    here, there = places[job.place], places[row]
    hours = min(there.history.life_hours, job.work_hours)
    saved = (here.dollars_per_hour - there.dollars_per_hour) * hours
    lost = job.restart_hours * there.dollars_per_hour + _move_dollars(job, row)
    return row if row != job.place and saved > lost else job.place


def _cheapest(job: DeadlineJob, places: Sequence[SpotPlace], rows: list[int]) -> int:
    def dollars(row: int) -> float:
        hours = max(min(places[row].history.life_hours, job.work_hours), job.tick_hours)
        return _price(job, places[row]) + _move_dollars(job, row) / hours

    return min(rows, key=dollars)


def _move_dollars(job: DeadlineJob, row: int) -> float:
    return job.move_dollars if job.last_place not in (WAIT, row) else 0.0


def _price(job: DeadlineJob, place: SpotPlace) -> float:
    return place.dollars_per_trained_hour(job.restart_hours)


def _available(places: Sequence[SpotPlace]) -> list[int]:
    return [row for row, place in enumerate(places) if place.is_available]
