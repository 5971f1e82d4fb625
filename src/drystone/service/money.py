"""Requests about money: the budget, what is rented, and the ledger by account and by node."""

from __future__ import annotations

import math
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query
from fastapi.responses import Response
from pydantic import BaseModel

from drystone.run.control.controller import Controller
from drystone.run.rentals import MICRO_DOLLARS
from drystone.service.answers import answer_json
from drystone.service.auth.callers import VIEWER
from drystone.units import HOUR_SECONDS

_MOST_ROWS: Final = 100_000


class AccountShown(BaseModel):
    """What one job was charged; with neither team nor job, what nobody used."""

    team: str
    job_id: str
    dollars: float


class NodeShown(BaseModel):
    """What one node was charged; `offer` is null for a node of the owner's."""

    node: str
    dollars: float
    offer: str | None
    dollars_per_hour: float | None
    is_here: bool


class OfferShown(BaseModel):
    """What can be rented, at its price of now."""

    name: str
    gpu: str
    num_gpus: int
    dollars_per_hour: float
    is_short: bool
    short_until_seconds: float | None


class LedgerPage(BaseModel):
    """The account book. Accounts and nodes both add up to `total_dollars`."""

    now_seconds: float
    budget_dollars_per_hour: float | None
    hard_cap_dollars_per_hour: float | None
    rented_dollars_per_hour: float
    rented_dollars: float
    mean_dollars_per_hour: float | None
    total_dollars: float
    num_rented: int
    num_coming: int
    accounts: list[AccountShown]
    nodes: list[NodeShown]
    offers: list[OfferShown]
    trouble: str


def money_routes(controller: Controller) -> APIRouter:
    """All of them."""
    router = APIRouter(tags=["money"])
    journal = controller.journal

    @router.get("/v1/ledger", dependencies=[VIEWER], response_model=LedgerPage)
    def ledger(most: Annotated[int, Query(ge=1, le=_MOST_ROWS)] = 1000) -> Response:
        """Budget, rentals and the ledger; the largest `most` accounts and nodes."""
        with journal.lock:
            view = ledger_view(controller, journal.now(), most)
        return answer_json(view)

    return router


def ledger_view(controller: Controller, now: float, most: int) -> dict[str, Any]:
    """The book as plain tables. Whoever calls holds the journal's lock."""
    live, renting = controller.journal.live, controller.journal.renting
    rentals, at = live.state.rentals, live.ledger.statement(now)
    here = {live.state.nodes[row].id: one for row, one in rentals.rented.items()}
    begins = [one.since_seconds for one in rentals.bills]
    begins += [one.since_seconds for one in rentals.rented.values()]
    since = min(begins, default=math.inf)
    spent = rentals.spent_dollars(now)
    hours = (now - since) / HOUR_SECONDS
    nodes = [
        {
            "node": name,
            "dollars": micro / MICRO_DOLLARS,
            "offer": here[name].offer if name in here else live.ledger.offer_of(name),
            "dollars_per_hour": here[name].price_dollars_per_hour if name in here else None,
            "is_here": name in here,
        }
        for name, micro in sorted(at.by_node.items(), key=lambda one: -one[1])[:most]
    ]
    accounts = [
        {"team": account.team, "job_id": account.job_id, "dollars": micro / MICRO_DOLLARS}
        for account, micro in sorted(at.by_account.items(), key=lambda one: -one[1])[:most]
    ]
    return {
        "now_seconds": now,
        "budget_dollars_per_hour": _limit(renting.budget_dollars_per_hour if renting else math.inf),
        "hard_cap_dollars_per_hour": _limit(
            renting.hard_cap_dollars_per_hour if renting else math.inf
        ),
        "rented_dollars_per_hour": rentals.dollars_per_hour(),
        "rented_dollars": spent,
        "mean_dollars_per_hour": spent / hours if hours > 0 else None,
        "total_dollars": at.total / MICRO_DOLLARS,
        "num_rented": len(rentals.rented),
        "num_coming": len(rentals.asked),
        "accounts": accounts,
        "nodes": nodes,
        "offers": _offers(controller, now),
        "trouble": controller.desk.trouble if controller.desk else "",
    }


def _offers(controller: Controller, now: float) -> list[dict[str, Any]]:
    renting, rentals = controller.journal.renting, controller.journal.live.state.rentals
    rows = []
    for one in renting.offers if renting else ():
        is_short = rentals.is_short(one.name, now)
        rows.append(
            {
                "name": one.name,
                "gpu": one.gpu,
                "num_gpus": one.num_gpus,
                "dollars_per_hour": rentals.prices.get(one.name, one.price_dollars_per_hour),
                "is_short": is_short,
                "short_until_seconds": rentals.shortages[one.name].ends_seconds
                if is_short
                else None,
            }
        )
    return rows


def _limit(dollars: float) -> float | None:
    return dollars if math.isfinite(dollars) else None
