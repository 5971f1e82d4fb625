"""Answers about tokens, teams, sessions and spending: each model makes itself from the state."""

from __future__ import annotations

from typing import Literal, Self

from drystone.run.control.access import Team, Token, period_start, split_hours
from drystone.run.control.admission import spent_since
from drystone.run.control.controller import Controller
from drystone.run.lifecycle import JobState
from drystone.service.auth.callers import Caller
from drystone.service.shapes import Shape
from drystone.units import HOUR_SECONDS


class Session(Shape):
    """Who asks."""

    name: str
    role: Literal["", "viewer", "submitter", "admin"]
    team: str
    needs_token: bool
    expires_seconds: float | None

    @classmethod
    def of(cls, caller: Caller, *, needs_token: bool) -> Self:
        """The caller, and whether anybody needs a token here."""
        return cls(
            name=caller.name,
            role=caller.role.value if caller.role is not None else "",
            team=caller.team,
            needs_token=needs_token,
            expires_seconds=caller.expires_seconds,
        )


class TokenShown(Shape):
    """One token, without its secret."""

    id: str
    name: str
    role: str
    team: str
    created_seconds: float
    revoked_seconds: float | None

    @classmethod
    def of(cls, token: Token) -> TokenShown:
        """One token, without its secret and its hash."""
        return TokenShown(
            id=token.id,
            name=token.name,
            role=token.role.value,
            team=token.team,
            created_seconds=token.created_seconds,
            revoked_seconds=token.revoked_seconds,
        )


class TokenNew(TokenShown):
    """A new token with its text, which is shown this once."""

    token: str


class TokenList(Shape):
    """All tokens."""

    tokens: list[TokenShown]


class TeamShown(Shape):
    """One team, its limits and what it uses of them."""

    name: str
    quota: float | None
    budget_dollars: float | None
    budget_period: str
    used_value: float
    spent_dollars: float
    period_start_seconds: float
    num_running: int
    num_waiting: int

    @classmethod
    def of(cls, controller: Controller, team: Team, now: float) -> Self:
        """One team; whoever calls holds the journal's lock."""
        live = controller.journal.live
        values = controller.admission.values
        used, counts = 0.0, {JobState.RUNNING: 0, JobState.QUEUED: 0}
        for job_id, record in live.state.active.items():
            if live.jobs[job_id].job.team == team.name:
                counts[record.state] = counts.get(record.state, 0) + 1
                used += sum(
                    count * values.get(live.state.nodes[row].gpu, 1.0)
                    for row, count in record.placement
                )
        start = period_start(team.budget_period, now)
        return cls(
            name=team.name,
            quota=team.quota,
            budget_dollars=team.budget_dollars,
            budget_period=team.budget_period,
            used_value=used,
            spent_dollars=spent_since(live, team.name, start, now),
            period_start_seconds=start,
            num_running=counts[JobState.RUNNING],
            num_waiting=counts[JobState.QUEUED],
        )


class TeamList(Shape):
    """All teams."""

    teams: list[TeamShown]


class Spending(Shape):
    """What a team spends."""

    team: str
    budget_dollars: float | None
    budget_period: str
    period_start_seconds: float
    spent_dollars: float
    dollars_per_hour: float
    dollars: float


class HourlySpending(Shape):
    """What a team spent in each hour."""

    team: str
    points: list[tuple[float, float]]  # start of the hour, dollars


class SpendPage(Shape):
    """What all teams spend."""

    teams: list[Spending]
    hours: list[HourlySpending]
    dollars: float
    dollars_per_hour: float
    now_seconds: float

    @classmethod
    def of(cls, controller: Controller, now: float, num_hours: int) -> Self:
        """What every team spent and spends; whoever calls holds the journal's lock."""
        live = controller.journal.live
        active = {live.jobs[job_id].job.team for job_id in live.state.active}
        names = {*live.access.teams, *live.spending.by_hour, *active}
        by_hour = {name: dict(live.spending.by_hour.get(name, {})) for name in names}
        rates = dict.fromkeys(names, 0.0)
        for job_id, record in live.state.active.items():
            job = live.jobs[job_id]
            if record.state is JobState.RUNNING and job.dollars_per_hour > 0:
                rates[job.job.team] += job.dollars_per_hour
                split_hours(by_hour[job.job.team], job.priced_seconds, now, job.dollars_per_hour)
        teams, hours = [], []
        oldest = now // HOUR_SECONDS - num_hours
        for name in sorted(names):
            team = live.access.teams.get(name) or Team(name=name, budget_period="ever")
            start = period_start(team.budget_period, now)
            first = int(start // HOUR_SECONDS)
            teams.append(
                Spending(
                    team=name,
                    budget_dollars=team.budget_dollars,
                    budget_period=team.budget_period,
                    period_start_seconds=start,
                    spent_dollars=sum(d for hour, d in by_hour[name].items() if hour >= first),
                    dollars_per_hour=rates[name],
                    dollars=sum(by_hour[name].values()),
                )
            )
            points = [
                (hour * HOUR_SECONDS, dollars)
                for hour, dollars in sorted(by_hour[name].items())
                if hour > oldest
            ]
            hours.append(HourlySpending(team=name, points=points))
        return cls(
            teams=teams,
            hours=hours,
            dollars=sum(team.dollars for team in teams),
            dollars_per_hour=sum(rates.values()),
            now_seconds=now,
        )


class FileKept(Shape):
    """A file that was uploaded."""

    bundle: str
    name: str
    num_bytes: int
    sha256: str
