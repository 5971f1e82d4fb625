"""Admission: quotas and budgets of teams, between the state and the policy.

The arithmetic is in `schedule/teams.py`; here is what it needs to know: which team a job is
of, what GPUs count, and what each team has spent in the running day, week or month.
"""

from __future__ import annotations

import math

import numpy as np

from drystone.describe.job import TrainingJob, find_module
from drystone.describe.option import OptionSet
from drystone.errors import InvalidSpec, NothingFits, RequestError
from drystone.run.control.access import Team, period_start
from drystone.run.control.journal import Journal
from drystone.run.control.live_state import LiveState
from drystone.run.engines.agent.accounts import account_name, find_account
from drystone.run.events import Failed
from drystone.run.lifecycle import JobState
from drystone.run.state import JobRecord
from drystone.schedule.decision import Decision, Memory, Policy
from drystone.schedule.renting import options_above_cap
from drystone.schedule.snapshot import Snapshot
from drystone.schedule.teams import TeamLimit, limit_teams, type_values
from drystone.units import HOUR_SECONDS, format_dollars, format_seconds


class OverLimit(RequestError):
    """A job would never run: its team's quota or budget does not allow it."""


class Admission:
    """What teams may hold, kept in step with the log."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.held: dict[str, str] = {}  # by job that waits: why its team may not start it
        prices = journal.cluster.dollars_per_gpu_hour
        dearest = max((prices.get(gpu, 0.0) for gpu in journal.cluster.gpu_types), default=0.0)
        # What a GPU of each type counts; 1 is the most valuable.
        self.values: dict[str, float] = {
            gpu: prices[gpu] / dearest if prices.get(gpu, 0.0) > 0 else 1.0
            for gpu in journal.cluster.gpu_types
        }

    def limited(self, policy: Policy) -> Policy:
        """The policy, seeing only what quotas and budgets leave."""

        def decide(snapshot: Snapshot, memory: Memory) -> tuple[list[Decision], Memory]:
            with self._journal.lock:
                live, now = self._journal.live, self._journal.now()
                limits = {
                    name: _limit(live, team, now)
                    for name, team in live.access.teams.items()
                    if team.quota is not None or team.budget_dollars is not None
                }
                teams = [live.jobs[spec.id].job.team for spec in snapshot.jobs.specs]
            if not limits:
                self.held = {}
                return policy(snapshot, memory)
            prices = self._journal.cluster.dollars_per_gpu_hour
            values = type_values(snapshot, snapshot.job_speeds, prices)
            self.values = dict(zip(snapshot.gpu_types, values.tolist(), strict=True))
            found = limit_teams(snapshot, teams, limits, values)
            self.held = dict(found.held)
            decisions, after = policy(found.snapshot, memory)
            return [*found.stops, *decisions], after

        return decide

    def check(self, job: TrainingJob, options: OptionSet) -> None:
        """Refuse a job that its team's limits never let run; others may wait."""
        live = self._journal.live
        live.access.check_team(job.team)
        team = live.access.teams.get(job.team)
        if team is None:
            return
        if team.quota is not None:
            # Types that could be rented, too: options have a column for each.
            values = np.array([self.values.get(gpu, 1.0) for gpu in self._journal.gpu_types])
            usable = options.samples_per_second > 0
            least = float((options.counts @ values)[usable].min(initial=math.inf))
            if least > team.quota + 1e-9:
                raise OverLimit(
                    f"{job.name} needs GPUs worth {least:.3g}, and the quota of team {team.name} "
                    f"is {team.quota:g} (in GPUs of the most valuable type)",
                    hint="Allow fewer or cheaper GPUs, or ask an admin for `drystone team set`",
                )
        spent = _limit(live, team, self._journal.now()).spent
        if spent and team.budget_period == "ever":
            raise OverLimit(spent, hint="Ask an admin for `drystone team set --budget`")


def spent_since(live: LiveState, team: str, start_seconds: float, now_seconds: float) -> float:
    """What a team spent from a time on, with what runs now."""
    running = 0.0
    for job_id, record in live.state.active.items():
        job = live.jobs[job_id]
        if record.state is JobState.RUNNING and job.job.team == team:
            held = max(0.0, now_seconds - max(job.priced_seconds, start_seconds))
            running += job.dollars_per_hour * held / HOUR_SECONDS
    return live.spending.since(team, start_seconds) + running


def _limit(live: LiveState, team: Team, now_seconds: float) -> TeamLimit:
    if team.budget_dollars is None:
        return TeamLimit(quota=team.quota)
    start = period_start(team.budget_period, now_seconds)
    spent = spent_since(live, team.name, start, now_seconds)
    if spent < team.budget_dollars:
        return TeamLimit(quota=team.quota)
    when = "" if team.budget_period == "ever" else f" of this {team.budget_period}"
    return TeamLimit(
        quota=team.quota,
        spent=f"team {team.name} has spent ${spent:.2f} of its budget of "
        f"${team.budget_dollars:.2f}{when}",
    )


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
    return options.only(~above), reason


def check_hard_cap(journal: Journal, name: str, options: OptionSet) -> OptionSet:
    """The options under the hard cap; a job without any is refused."""
    allowed, reason = under_hard_cap(journal, options)
    if reason:
        raise NothingFits(
            f"{name}: {reason}",
            hint="Allow fewer or cheaper GPUs, or start `drystone serve` with a higher --hard-cap",
        )
    return allowed


def limit_reached(journal: Journal, record: JobRecord) -> Failed | None:
    """The end of a running job that is beyond a limit; it is asked to leave, with a checkpoint."""
    live, now, job_id = journal.live, journal.now(), record.spec.id
    job = live.jobs[job_id].job
    dollars, seconds = live.dollars_at(job_id, now), live.run_seconds_at(job_id, now)
    if job.max_cost_dollars is not None and dollars >= job.max_cost_dollars:
        limit = format_dollars(job.max_cost_dollars)
        what = f"it has cost {format_dollars(dollars)}, max_cost is {limit}"
    elif job.max_duration_seconds is not None and seconds >= job.max_duration_seconds:
        limit = format_seconds(job.max_duration_seconds)
        what = f"it has run for {format_seconds(seconds)}, max_duration is {limit}"
    else:
        return None
    reason = f"limit: {what}; its last checkpoint is kept"
    return Failed(time_seconds=now, job_id=job_id, reason=reason, kind="limit")


def check_account(run_as: str, job: TrainingJob) -> None:
    """Refuse a job before any of its code runs where that could not be as the right account."""
    if not run_as:
        return
    find_account(account_name(run_as, job.owner))
    if find_module(job) is not None:
        raise InvalidSpec(
            "a Python function is looked at before the job is taken in, as the service's own user: "
            "where jobs run under other accounts (--run-as), that is refused",
            where="model",
            hint="Name the model by its config.json, or train it with a command of your own",
        )
