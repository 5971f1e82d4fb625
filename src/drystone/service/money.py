"""Requests about money: the budget, what is rented, and the ledger by account and by node."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Final, Literal, Self

from fastapi import APIRouter, Query
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel

from drystone.run.control.controller import Controller
from drystone.run.rentals import MICRO_DOLLARS
from drystone.run.renting.export import export_ledger
from drystone.schedule.spot_places import believed_history
from drystone.service.answers import answer_json
from drystone.service.auth.callers import VIEWER
from drystone.service.shapes import finite_or_none
from drystone.units import HOUR_SECONDS

_MAX_ROWS: Final = 100_000


class AccountShown(BaseModel):
    """What one job was charged; with neither team nor job, what was not used."""

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
    is_spot: bool
    num_taken_back: int  # nodes of it
    believed_hours: float | None  # that a spot node stays


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
    uses: dict[
        str, float
    ]  # dollars for jobs, and on rented nodes that were starting, idle, leaving
    offers: list[OfferShown]
    trouble: str

    @classmethod
    def of(cls, controller: Controller, now: float, limit: int) -> Self:
        """The book with its largest accounts and nodes; whoever calls holds the journal's lock."""
        live, renting = controller.journal.live, controller.journal.renting
        rentals, statement = live.state.rentals, live.ledger.statement(now)
        begins = [bill.since_seconds for bill in rentals.bills]
        begins += [rented.since_seconds for rented in rentals.rented.values()]
        spent = rentals.spent_dollars(now)
        hours = (now - min(begins, default=math.inf)) / HOUR_SECONDS
        accounts = sorted(statement.by_account.items(), key=lambda pair: -pair[1])[:limit]
        budget = renting.budget_dollars_per_hour if renting else math.inf
        hard_cap = renting.hard_cap_dollars_per_hour if renting else math.inf
        return cls(
            now_seconds=now,
            budget_dollars_per_hour=finite_or_none(budget),
            hard_cap_dollars_per_hour=finite_or_none(hard_cap),
            rented_dollars_per_hour=rentals.dollars_per_hour(),
            rented_dollars=spent,
            mean_dollars_per_hour=spent / hours if hours > 0 else None,
            total_dollars=statement.total / MICRO_DOLLARS,
            num_rented=len(rentals.rented),
            num_coming=len(rentals.asked),
            accounts=[
                AccountShown(
                    team=account.team, job_id=account.job_id, dollars=micro / MICRO_DOLLARS
                )
                for account, micro in accounts
            ],
            nodes=_nodes(controller, statement.by_node, limit),
            uses={use.value: micro / MICRO_DOLLARS for use, micro in statement.by_use.items()},
            offers=_offers(controller, now),
            trouble=controller.desk.trouble if controller.desk else "",
        )


def money_routes(controller: Controller) -> APIRouter:
    """All of them."""
    router = APIRouter(tags=["money"])
    journal = controller.journal

    @router.get("/v1/ledger", dependencies=[VIEWER], response_model=LedgerPage)
    def ledger(most: Annotated[int, Query(ge=1, le=_MAX_ROWS)] = 1000) -> Response:
        """Budget, rentals and the ledger; the largest `most` accounts and nodes."""
        with journal.lock:
            answer = LedgerPage.of(controller, journal.now(), most)
        return answer_json(answer)

    @router.get(
        "/v1/ledger/export",
        dependencies=[VIEWER],
        response_class=StreamingResponse,
        responses={200: {"content": {"text/csv": {"schema": {"type": "string"}}}}},
    )
    def export(form: Annotated[Literal["csv", "focus"], Query()] = "csv") -> Response:
        """Every debit as a row of CSV: in our columns, or in those of FinOps FOCUS 1.0."""
        with journal.lock:
            now, market = journal.now(), journal.live.market
        return StreamingResponse(
            export_ledger(
                (event for _, event in controller.store.read_needed()),
                now,
                form=form,
                account=market.fleet if market is not None else "drystone",
                offers=journal.renting.offers if journal.renting else (),
            ),
            media_type="text/csv",
        )

    return router


def _nodes(controller: Controller, by_node: Mapping[str, int], limit: int) -> list[NodeShown]:
    live = controller.journal.live
    here = {live.state.nodes[row].id: rented for row, rented in live.state.rentals.rented.items()}
    return [
        NodeShown(
            node=name,
            dollars=micro / MICRO_DOLLARS,
            offer=here[name].offer if name in here else live.ledger.offer_of(name),
            dollars_per_hour=here[name].price_dollars_per_hour if name in here else None,
            is_here=name in here,
        )
        for name, micro in sorted(by_node.items(), key=lambda pair: -pair[1])[:limit]
    ]


def _offers(controller: Controller, now: float) -> list[OfferShown]:
    renting, rentals = controller.journal.renting, controller.journal.live.state.rentals
    rows = []
    histories = rentals.histories(now)
    for offer in renting.offers if renting else ():
        seen = believed_history(histories, [offer])
        is_short = rentals.is_short(offer.name, now)
        rows.append(
            OfferShown(
                name=offer.name,
                gpu=offer.gpu,
                num_gpus=offer.num_gpus,
                dollars_per_hour=rentals.prices.get(offer.name, offer.price_dollars_per_hour),
                is_short=is_short,
                short_until_seconds=rentals.shortages[offer.name].ends_seconds
                if is_short
                else None,
                is_spot=offer.is_spot,
                num_taken_back=round(seen.num_losses),
                believed_hours=seen.life_hours if offer.is_spot else None,
            )
        )
    return rows
