"""The ledger as a table: one row a debit, in our own columns or in those of FinOps FOCUS 1.0.

FOCUS (focus.finops.org) is what tools for the costs of clouds read. What it asks for and nobody
here knows is empty. GPUs of the owner's are on no invoice: they have an effective cost and are
billed at 0. What settling a bill changed is an adjustment. Columns of our own begin with `x_`.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Final

from drystone.describe.market import Offer
from drystone.errors import UnknownName
from drystone.run.events import Event
from drystone.run.rentals import MICRO_DOLLARS
from drystone.run.renting.ledger import Debit, Ledger, Use
from drystone.units import HOUR_SECONDS

FORMATS: Final = ("csv", "focus")
COLUMNS: Final = (
    "since", "until", "team", "job", "use", "node", "offer", "rental", "dollars", "event",
)  # fmt: skip
FOCUS_COLUMNS: Final = (
    "AvailabilityZone", "BilledCost", "BillingAccountId", "BillingAccountName", "BillingCurrency",
    "BillingPeriodEnd", "BillingPeriodStart", "ChargeCategory", "ChargeClass", "ChargeDescription",
    "ChargeFrequency", "ChargePeriodEnd", "ChargePeriodStart", "CommitmentDiscountCategory",
    "CommitmentDiscountId", "CommitmentDiscountName", "CommitmentDiscountStatus",
    "CommitmentDiscountType", "ConsumedQuantity", "ConsumedUnit", "ContractedCost",
    "ContractedUnitPrice", "EffectiveCost", "InvoiceIssuerName", "ListCost", "ListUnitPrice",
    "PricingCategory", "PricingQuantity", "PricingUnit", "ProviderName", "PublisherName",
    "RegionId", "RegionName", "ResourceId", "ResourceName", "ResourceType", "ServiceCategory",
    "ServiceName", "SkuId", "SkuPriceId", "SubAccountId", "SubAccountName", "Tags", "x_Job",
    "x_Use",
)  # fmt: skip


def export_ledger(
    events: Iterable[Event],
    now_seconds: float,
    *,
    form: str,
    account: str = "drystone",
    offers: Iterable[Offer] = (),
) -> Iterator[str]:
    """The lines of a CSV file, of all debits that a log has led to by now."""
    if form not in FORMATS:
        raise UnknownName("format", form, FORMATS)
    closed: list[Debit] = []
    book, by_name = Ledger(closed.append), {offer.name: offer for offer in offers}
    columns = COLUMNS if form == "csv" else FOCUS_COLUMNS
    yield _line(columns)

    def rows() -> Iterator[str]:
        for debit in closed:
            name = book.offer_of(debit.node)
            offer = by_name.get(name or "")
            row = (
                _own_row(debit, name) if form == "csv" else _focus_row(debit, name, offer, account)
            )
            yield _line(str(row.get(column, "")) for column in columns)
        closed.clear()

    for event in events:
        book.record(event)
        yield from rows()
    closed.extend(book.open_debits(now_seconds))
    yield from rows()


def _own_row(debit: Debit, offer: str | None) -> Mapping[str, object]:
    return {
        "since": _time(debit.since_seconds),
        "until": _time(debit.until_seconds),
        "team": debit.account.team,
        "job": debit.account.job_id,
        "use": debit.use.value,
        "node": debit.node,
        "offer": offer or "",
        "rental": debit.rental if debit.rental >= 0 else "",
        "dollars": _dollars(debit.micro_dollars),
        "event": debit.source or "",
    }


def _focus_row(
    debit: Debit, name: str | None, offer: Offer | None, account: str
) -> Mapping[str, object]:
    is_rented, is_settled = debit.rental >= 0, debit.use is Use.SETTLED
    hours = (debit.until_seconds - debit.since_seconds) / HOUR_SECONDS
    cost = _dollars(debit.micro_dollars)
    since, month_end = _month(debit.since_seconds)
    infra = offer.infra if offer else ""
    provider = infra.partition("/")[0] or ("Drystone" if is_rented else "own")
    who = debit.account.job_id or "nobody"
    row = {
        "BilledCost": cost if is_rented else "0",
        "BillingAccountId": account,
        "BillingCurrency": "USD",
        "BillingPeriodStart": since,
        "BillingPeriodEnd": month_end,
        "ChargeCategory": "Adjustment" if is_settled else "Usage",
        "ChargeDescription": f"{debit.node}: {debit.use.value}, {who}",
        "ChargeFrequency": "Usage-Based",
        "ChargePeriodStart": _time(debit.since_seconds),
        "ChargePeriodEnd": _time(debit.until_seconds),
        "ContractedCost": cost,
        "EffectiveCost": cost,
        "InvoiceIssuerName": provider,
        "ListCost": cost,
        "ProviderName": provider,
        "PublisherName": provider,
        "RegionId": infra.partition("/")[2],
        "ResourceId": debit.node,
        "ResourceName": debit.node,
        "ResourceType": "GPU node",
        "ServiceCategory": "Compute",
        "ServiceName": "GPU nodes",
        "SubAccountId": debit.account.team,
        "SubAccountName": debit.account.team,
        "Tags": json.dumps({"job": debit.account.job_id, "use": debit.use.value}),
        "x_Job": debit.account.job_id,
        "x_Use": debit.use.value,
    }
    if is_settled or hours <= 0:
        return row
    price = f"{debit.micro_dollars / MICRO_DOLLARS / hours:.6f}"
    return row | {
        "ConsumedQuantity": f"{hours:.6f}",
        "ConsumedUnit": "Hours",
        "ContractedUnitPrice": price,
        "ListUnitPrice": price,
        "PricingCategory": "Dynamic" if offer is not None and offer.is_spot else "Standard",
        "PricingQuantity": f"{hours:.6f}",
        "PricingUnit": "Hours",
        "SkuId": name or "own",
        "SkuPriceId": name or "own",
    }


def _dollars(micro_dollars: int) -> str:
    """Exact: sums of rows are sums of millionths."""
    sign, whole = "-" if micro_dollars < 0 else "", abs(micro_dollars)
    return f"{sign}{whole // MICRO_DOLLARS}.{whole % MICRO_DOLLARS:06d}"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _month(seconds: float) -> tuple[str, str]:
    """Its beginning, and that of the next one."""
    at = datetime.fromtimestamp(seconds, tz=UTC)
    years, months = divmod(at.month, 12)
    begin, end = at.strftime("%Y-%m"), f"{at.year + years:04d}-{months + 1:02d}"
    return f"{begin}-01T00:00:00Z", f"{end}-01T00:00:00Z"


def _line(values: Iterable[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(list(values))
    return text.getvalue()
