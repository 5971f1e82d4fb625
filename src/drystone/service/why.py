"""Why a job waits, or why it got what it has: the answer in words and in numbers."""

from __future__ import annotations

import math
from collections import Counter
from typing import Final

from drystone.describe.job import TrainingJob
from drystone.run.control.admission import under_hard_cap
from drystone.run.control.controller import Controller
from drystone.run.control.forecast import Forecast, copy_present, forecast_start
from drystone.run.lifecycle import TERMINAL, JobState
from drystone.run.state import JobRecord
from drystone.schedule.decision import find_policy
from drystone.schedule.snapshot import StartupCost
from drystone.service.auth.callers import check_touch
from drystone.service.shapes import Counts, Shape
from drystone.service.views import Job, Option, free_by_type, options_of
from drystone.units import format_seconds

_NOT_KNOWN: Final = Forecast(start_seconds=None)


class DecisionMade(Shape):
    """The last decision about a job."""

    decision: str
    reason: str
    numbers: dict[str, float | None]
    time_seconds: float


class Why(Shape):
    """Why a job waits, or has what it has."""

    id: str
    state: JobState
    sentence: str
    position: int | None
    num_waiting: int
    expected_start_seconds: float | None
    not_before_seconds: float | None
    ahead: list[str]
    options: list[Option]
    prices: dict[str, float | None]
    decision: DecisionMade | None
    faults: Counts
    blocking: list[str]


def explain(controller: Controller, job_id: str) -> Why:
    """Everything behind the state of one job; the future is worked out without the lock."""
    journal = controller.journal
    with journal.lock:
        is_waiting = controller.find(job_id).state is JobState.QUEUED
        check_touch(journal.live.jobs[job_id].job, job_id)
        seconds = controller.settings.pace.startup_seconds
        startup = StartupCost(seconds_per_gpu=seconds, most_seconds=seconds)
        present = copy_present(journal, startup) if is_waiting else None
    forecast = _NOT_KNOWN
    if present is not None:
        forecast = forecast_start(present, find_policy(controller.settings.policy), job_id)
    with journal.lock:
        return _make_why(controller, controller.find(job_id), journal.now(), forecast)


def _make_why(controller: Controller, record: JobRecord, now: float, forecast: Forecast) -> Why:
    """The whole answer, given what should happen."""
    live_state = controller.journal.live
    job_id = record.spec.id
    live = live_state.jobs[job_id]
    left = max(record.spec.total_samples - record.done_at(now), 1.0)
    options = options_of(controller, live.job, left) if record.state not in TERMINAL else []
    waiting = [
        other.spec.id
        for other in live_state.state.active.values()
        if other.state is JobState.QUEUED
    ]
    decision = live.last_decision
    if record.state is not JobState.QUEUED:
        forecast = _NOT_KNOWN  # it started or ended meanwhile
    blocking = _blocking(controller, record, options, now)
    numbers: dict[str, float | None] = dict(decision.numbers) if decision else {}
    made = None
    if decision:
        made = DecisionMade(
            decision=decision.decision,
            reason=decision.reason,
            numbers=numbers,
            time_seconds=decision.time_seconds,
        )
    return Why(
        id=job_id,
        state=record.state,
        sentence=_sentence(controller, record, options, now, forecast, blocking),
        position=waiting.index(job_id) + 1 if job_id in waiting else None,
        num_waiting=len(waiting),
        expected_start_seconds=forecast.start_seconds,
        not_before_seconds=forecast.not_before_seconds,
        ahead=list(forecast.earlier),
        options=options,
        prices={
            name.removeprefix("price_"): value
            for name, value in numbers.items()
            if name.startswith("price_")
        },
        decision=made,
        faults=dict(live.faults),
        blocking=blocking,
    )


def _blocking(
    controller: Controller, record: JobRecord, options: list[Option], now: float
) -> list[str]:
    """Running jobs whose GPUs, as they end one after another, would suffice for it."""
    if record.state is not JobState.QUEUED or any(option.is_free for option in options):
        return []
    state = controller.journal.live.state
    ends = []
    for other in state.active.values():
        if other.state is JobState.RUNNING:
            eta = Job.of(controller, other, now).eta_seconds
            ends.append((math.inf if eta is None else eta, other))
    ends.sort(key=lambda pair: pair[0])
    free = free_by_type(controller)
    blocking: list[str] = []
    for _, other in ends:
        blocking.append(other.spec.id)
        for row, count in other.placement:
            free[state.nodes[row].gpu] += count
        if any(all(free[gpu] >= n for gpu, n in option.gpus.items()) for option in options):
            break
    return blocking if options else []


def _sentence(
    controller: Controller,
    record: JobRecord,
    options: list[Option],
    now: float,
    forecast: Forecast,
    blocking: list[str],
) -> str:
    live = controller.journal.live.jobs[record.spec.id]
    match record.state:
        case JobState.RUNNING:
            got = live.plan or "its GPUs"
            return f"It runs on {got}, because {live.reason or 'they were free'}."
        case JobState.PAUSED:
            return f"It is paused ({live.reason}); `drystone resume {record.spec.id}` lets it run."
        case JobState.QUEUED:
            return _waiting_sentence(controller, record.spec.id, options, now, forecast, blocking)
        case JobState.DONE:
            return "It is done."
    return f"It is {record.state.value}: {live.reason or 'its owner cancelled it'}."


def _waiting_sentence(
    controller: Controller,
    job_id: str,
    options: list[Option],
    now: float,
    forecast: Forecast,
    blocking: list[str],
) -> str:
    live = controller.journal.live.jobs[job_id]
    held = controller.admission.held.get(job_id)
    if held:
        return f"It is held back: {held}."
    if live.retry_seconds > now:
        wait = format_seconds(live.retry_seconds - now)
        return f"It failed ({live.reason.splitlines()[0]}) and is tried again in {wait}."
    if not options:
        return _no_options_sentence(controller, live.job)
    if not any(option.is_free for option in options) and controller.settings.renting is not None:
        return _renting_sentence(controller, blocking)
    if not blocking:
        drained = sorted(controller.journal.live.drained.items())
        if drained and not any(option.is_free for option in options):
            nodes = ", ".join(f"{node} ({reason})" if reason else node for node, reason in drained)
            return f"The nodes {nodes} are drained, and what is left does not suffice."
        return "GPUs that suffice are free; the next decision takes it up, or serves a better use."
    num_ahead, start = len(forecast.earlier), forecast.start_seconds
    others = "one that waits" if num_ahead == 1 else f"{num_ahead} that wait"
    ahead = f", and {others} should start before it" if num_ahead else ""
    when, least = "; when it starts is not known", forecast.not_before_seconds
    if least is not None and least > now:
        when = f"; it should not start within {format_seconds(least - now)}"
    if start is not None:
        when = f"; it should start in {format_seconds(max(start - now, 1.0))}"
    ends = f"job{'s' if len(blocking) > 1 else ''} {', '.join(blocking)}"
    return f"No GPUs that suffice are free: {ends} must end{ahead}{when}."


def _no_options_sentence(controller: Controller, job: TrainingJob) -> str:
    journal = controller.journal
    options = journal.book.options(job)
    _, above_cap = under_hard_cap(journal, options)
    if above_cap:
        return f"It waits for other prices or a higher cap: {above_cap}."
    return "No GPUs of this cluster suffice for it any more."


def _renting_sentence(controller: Controller, blocking: list[str]) -> str:
    """No GPUs are free that suffice, and more can be rented."""
    coming = Counter(
        rental.offer for rental in controller.journal.live.state.rentals.asked.values()
    )
    if coming:
        nodes = ", ".join(f"{number} of {offer}" for offer, number in sorted(coming.items()))
        return f"No GPUs that suffice are free; nodes are on their way ({nodes})."
    ends = ""
    if blocking:
        ends = f", or until job{'s' if len(blocking) > 1 else ''} {', '.join(blocking)} ended"
    return f"No GPUs that suffice are free; it waits until nodes are rented for it{ends}."
