"""What a provider of nodes must be able to do, whoever it is: quote, rent, say how it stands, end.

Every rental has a token, which is in the log before the provider hears of it. A provider makes one
node for a token, however often it is asked, so whoever was killed in between simply asks again. All
tokens of one system begin alike (its fleet): what begins so and is in no log is an orphan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from drystone.describe.market import Offer
from drystone.errors import DrystoneError


class Stage(StrEnum):
    """Where a rental stands at its provider."""

    STARTING = "starting"
    RUNNING = "running"  # it can be used, and is billed
    FAILED = "failed"  # it never came, and will not
    ENDED = "ended"  # it was given back or taken back


@dataclass(frozen=True, slots=True, kw_only=True)
class Rental:
    """One rental as its provider sees it."""

    token: str
    offer: str  # empty: the provider does not say; the log knows
    stage: Stage
    reason: str = ""  # why it failed or ended
    price_dollars_per_hour: float = 0.0  # that is billed now
    since_seconds: float = 0.0  # billed from then on
    billed_micro_dollars: int | None = None  # in all, once it is over; None: not said


class ProviderTrouble(DrystoneError):
    """The provider does not answer, or not now; nothing is known to have changed."""


class Provider(Protocol):
    """Somebody who rents nodes out."""

    def quote(self) -> Mapping[str, float]:
        """Dollars an hour of a node now, by offer; offers that are not sold now are left out."""
        ...

    def rent(self, token: str, offer: Offer) -> None:
        """Ask for one node; asking twice with one token is asking once."""
        ...

    def status(self, fleet: str) -> Sequence[Rental]:
        """All rentals whose tokens begin with this, those that are over included where known."""
        ...

    def release(self, token: str) -> None:
        """Give a node back, or take a request back; doing it twice is doing it once."""
        ...


def make_token(fleet: str, rental: int) -> str:
    """The token of a rental; also a name that clouds accept."""
    return f"{fleet}-{rental:06d}"


def rental_of(token: str, fleet: str) -> int | None:
    """The rental that a token stands for; None where it is not of this log's fleet."""
    start, _, number = token.rpartition("-")
    return int(number) if start == fleet and number.isdigit() else None


def node_name(offer: str, rental: int) -> str:
    """The name of a rented node in the cluster; no two rentals of a log have the same."""
    return f"rented-{offer}-{rental:04d}"
