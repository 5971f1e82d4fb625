"""Which jobs are beyond their money, their time or the hard cap? Before and while they run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from drystone.describe.job import JobSpec
from drystone.errors import NothingFits
from drystone.run.control.journal import Journal
from drystone.run.events import Event, Failed
from drystone.run.lifecycle import JobState
from drystone.schedule.hard_cap import options_above_cap
from drystone.schedule.snapshot import BoolArray, OptionSet
from drystone.units import HOUR_SECONDS, format_dollars, format_seconds


def options_within(
    spec: JobSpec, options: OptionSet, gpu_types: tuple[str, ...], prices: Mapping[str, float]
) -> BoolArray:
    """The options on which a job would end within its money and time, as they are estimated.

    None at all is an error that says by how much. What a type costs is 0 where no price is known.
    """
    speeds = options.samples_per_second
    seconds = np.divide(
        spec.total_samples, speeds, out=np.full(len(speeds), np.inf), where=speeds > 0
    )
    rates = options.counts @ np.array([prices.get(gpu, 0.0) for gpu in gpu_types])
    dollars = np.where(
        speeds > 0, rates * np.where(speeds > 0, seconds, 0.0) / HOUR_SECONDS, np.inf
    )
    is_cheap, is_short = dollars <= spec.max_cost_dollars, seconds <= spec.max_duration_seconds
    within: BoolArray = (speeds > 0) & is_cheap & is_short
    if within.any():
        return within
    if not is_cheap.any():
        wrong = (
            f"max_cost is {format_dollars(spec.max_cost_dollars)}, and the cheapest way to run it "
            f"takes about {format_dollars(float(dollars.min()))}"
        )
    else:
        least = float(seconds[is_cheap].min())
        wrong = (
            f"max_duration is {format_seconds(spec.max_duration_seconds)}, and the quickest way "
            f"to run it within its money takes about {format_seconds(least)}"
        )
    raise NothingFits(f"{spec.model}: {wrong}", hint="Allow more, or train less")


def under_hard_cap(journal: Journal, options: OptionSet) -> tuple[OptionSet, str]:
    """Options with speed 0 where the hard cap does not allow to rent their nodes.

    Where that is so for all of them, the reason in words; else it is empty.
    """
    renting = journal.renting
    if renting is None or math.isinf(renting.hard_cap_dollars_per_hour):
        return options, ""
    state, own = journal.live.state, dict.fromkeys(journal.gpu_types, 0)
    for row, node in enumerate(state.nodes):
        if row not in state.gone and row not in state.rentals.rented:
            own[node.gpu] += node.num_gpus
    above, reason = options_above_cap(
        options,
        np.array(list(own.values()), dtype=np.int64),
        journal.offers(),
        journal.gpu_types,
        renting.hard_cap_dollars_per_hour,
    )
    speeds = np.where(above, 0.0, options.samples_per_second)
    return replace(options, samples_per_second=speeds), reason


def check_hard_cap(journal: Journal, name: str, options: OptionSet) -> OptionSet:
    """The options under the hard cap; a job without any is refused."""
    allowed, reason = under_hard_cap(journal, options)
    if reason:
        raise NothingFits(
            f"{name}: {reason}",
            hint="Allow fewer or cheaper GPUs, or start `drystone serve` with a higher --hard-cap",
        )
    return allowed


def limits_reached(journal: Journal) -> list[Event]:
    """The end of every job that is beyond a limit; it is asked to leave, with a checkpoint."""
    live, now = journal.live, journal.now()
    events: list[Event] = []
    for job_id, record in live.state.active.items():
        if record.state is not JobState.RUNNING:
            continue
        job = live.jobs[job_id].job
        dollars, seconds = live.dollars_at(job_id, now), live.run_seconds_at(job_id, now)
        reason = ""
        if job.max_cost_dollars is not None and dollars >= job.max_cost_dollars:
            most = format_dollars(job.max_cost_dollars)
            reason = f"it has cost {format_dollars(dollars)}, max_cost is {most}"
        elif job.max_duration_seconds is not None and seconds >= job.max_duration_seconds:
            most = format_seconds(job.max_duration_seconds)
            reason = f"it has run for {format_seconds(seconds)}, max_duration is {most}"
        if reason:
            reason = f"limit: {reason}; its last checkpoint is kept"
            events.append(Failed(time_seconds=now, job_id=job_id, reason=reason, kind="limit"))
    return events
