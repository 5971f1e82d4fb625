"""The shapes of answers about people: sessions, tokens, teams, spending, files."""

from __future__ import annotations

from typing import Literal

from drystone.service.shapes import Shape

Pair = tuple[float, float]


class Session(Shape):
    """Who asks."""

    name: str
    role: Literal["", "viewer", "submitter", "admin"]
    team: str
    needs_token: bool
    expires_seconds: float | None


class TokenShown(Shape):
    """One token, without its secret."""

    id: str
    name: str
    role: str
    team: str
    created_seconds: float
    revoked_seconds: float | None


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
    points: list[Pair]


class SpendPage(Shape):
    """What all teams spend."""

    teams: list[Spending]
    hours: list[HourlySpending]
    dollars: float
    dollars_per_hour: float
    now_seconds: float


class FileKept(Shape):
    """A file that was uploaded."""

    bundle: str
    name: str
    num_bytes: int
    sha256: str
