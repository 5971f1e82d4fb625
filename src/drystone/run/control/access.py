"""Who may ask what: tokens and teams, a fold over the log.

A token is `dry_ID_SECRET`. The secret has 256 random bits, so one round of SHA-256 keeps it: there
is nothing to guess. Only the hash is written down.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import math
import re
import secrets
from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from drystone.errors import InvalidSpec, UnknownName
from drystone.run.control.notes import Note, TeamSet, TokenMade, TokenRevoked
from drystone.units import HOUR_SECONDS

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
_TOKEN: Final = re.compile(r"dry_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
_SECRET_BYTES: Final = 32
PERIODS: Final = ("day", "week", "month", "ever")


class Role(StrEnum):
    """What a token is good for; each may do what the ones before it may."""

    VIEWER = "viewer"
    SUBMITTER = "submitter"
    ADMIN = "admin"

    def covers(self, needed: Role) -> bool:
        """Whether this role may do what needs that one."""
        order = list(Role)
        return order.index(self) >= order.index(needed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One token, without its secret."""

    id: str
    name: str
    role: Role
    team: str
    secret_sha256: str
    created_seconds: float
    revoked_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """Limits that the jobs of a team share."""

    name: str
    quota: float | None = None  # GPUs of the most valuable type
    budget_dollars: float | None = None
    budget_period: str = "month"


class Access:
    """All tokens and teams, as the log left them."""

    def __init__(self) -> None:
        self.tokens: dict[str, Token] = {}
        self.teams: dict[str, Team] = {}
        self.has_tokens = False  # whether any is good now

    def record(self, note: Note) -> None:
        """Fold one note."""
        match note:
            case TokenMade():
                self.tokens[note.token_id] = Token(
                    id=note.token_id,
                    name=note.name,
                    role=Role(note.role),
                    team=note.team,
                    secret_sha256=note.secret_sha256,
                    created_seconds=note.time_seconds,
                )
            case TokenRevoked(token_id=token_id):
                old = self.tokens[token_id]
                fields = {name: getattr(old, name) for name in Token.__slots__}
                self.tokens[token_id] = Token(**(fields | {"revoked_seconds": note.time_seconds}))
            case TeamSet():
                self.teams[note.name] = Team(
                    name=note.name,
                    quota=note.quota,
                    budget_dollars=note.budget_dollars,
                    budget_period=note.budget_period,
                )
            case _:
                pass
        self.has_tokens = any(one.revoked_seconds is None for one in self.tokens.values())

    @property
    def needs_token(self) -> bool:
        """Whether requests from the network need a token: since the first was made, for good.

        Else a service would be everybody's once its last token is revoked.
        """
        return bool(self.tokens)

    def find(self, text: str) -> Token | None:
        """The good token that somebody presents; None where it is none of ours."""
        match = _TOKEN.fullmatch(text)
        known = self.live(match.group(1)) if match else None
        # Always one hash and one comparison: how long it takes says nothing about which ids exist.
        wanted = known.secret_sha256 if known else "0" * 64
        is_right = hmac.compare_digest(_hash(match.group(2) if match else ""), wanted)
        return known if is_right else None

    def live(self, token_id: str) -> Token | None:
        """A token by its id, unless it was revoked."""
        token = self.tokens.get(token_id)
        return token if token is not None and token.revoked_seconds is None else None

    def check_team(self, name: str) -> None:
        """Refuse a team that nobody made."""
        if name and name not in self.teams:
            raise UnknownName("team", name, self.teams)


def make_token(*, name: str, role: str, team: str, now_seconds: float) -> tuple[TokenMade, str]:
    """A new token: what the log keeps, and the text that is shown once."""
    check_name(name, "name")
    if role not in list(Role):
        raise UnknownName("role", role, list(Role))
    token_id, secret = secrets.token_hex(6), secrets.token_urlsafe(_SECRET_BYTES)
    note = TokenMade(
        time_seconds=now_seconds,
        token_id=token_id,
        name=name,
        role=role,
        team=team,
        secret_sha256=_hash(secret),
    )
    return note, f"dry_{token_id}_{secret}"


def make_team(
    name: str,
    *,
    quota: float | None,
    budget_dollars: float | None,
    budget_period: str,
    now_seconds: float,
) -> TeamSet:
    """A team with its limits, checked."""
    check_name(name, "team")
    for what, value in (("quota", quota), ("budget", budget_dollars)):
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise InvalidSpec(f"a {what} is 0 or more, not {value}", where=name)
    if budget_period not in PERIODS:
        raise UnknownName("period", budget_period, PERIODS)
    return TeamSet(
        time_seconds=now_seconds,
        name=name,
        quota=quota,
        budget_dollars=budget_dollars,
        budget_period=budget_period,
    )


def check_name(name: str, what: str) -> None:
    """Names of people and teams stand in addresses, files and logs."""
    if not _NAME.fullmatch(name):
        raise InvalidSpec(
            f"{name[:60]!r} is no {what}",
            hint="Use up to 40 letters, digits and . _ -, beginning with a letter or a digit",
        )


def period_start(period: str, now_seconds: float) -> float:
    """When the running day, week or month began, by UTC; 0 for `ever`."""
    now = datetime.datetime.fromtimestamp(now_seconds, datetime.UTC)
    day = now.replace(hour=0, minute=0, second=0, microsecond=0)
    match period:
        case "day":
            return day.timestamp()
        case "week":
            return (day - datetime.timedelta(days=day.weekday())).timestamp()
        case "month":
            return day.replace(day=1).timestamp()
    return 0.0


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


class Spending:
    """Dollars by team and hour, of the runs that ended; what runs now is added by who asks."""

    def __init__(self) -> None:
        self.by_hour: dict[str, dict[int, float]] = defaultdict(dict)

    def add(
        self, team: str, start_seconds: float, end_seconds: float, dollars_per_hour: float
    ) -> None:
        """A run that ended."""
        if dollars_per_hour > 0:
            split_hours(self.by_hour[team], start_seconds, end_seconds, dollars_per_hour)

    def since(self, team: str, start_seconds: float) -> float:
        """What a team spent from a time on, which is the beginning of an hour."""
        first = int(start_seconds // HOUR_SECONDS)
        hours = self.by_hour.get(team, {})
        return sum(dollars for hour, dollars in hours.items() if hour >= first)


def split_hours(
    hours: dict[int, float], start_seconds: float, end_seconds: float, dollars_per_hour: float
) -> None:
    """Add what a stretch of time cost to each of the hours (since 1970) that it touches."""
    at = start_seconds
    while at < end_seconds:
        hour = int(at // HOUR_SECONDS)
        until = min((hour + 1) * HOUR_SECONDS, end_seconds)
        hours[hour] = hours.get(hour, 0.0) + dollars_per_hour * (until - at) / HOUR_SECONDS
        at = until
