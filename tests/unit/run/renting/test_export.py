"""The ledger as a table: rows add up to the book, in our columns and in those of FOCUS."""

import csv
from decimal import Decimal

import pytest

from drystone.describe.cluster import NodeSpec
from drystone.describe.job import TrainingJob
from drystone.describe.market import Offer
from drystone.errors import UnknownName
from drystone.run.control.notes import ClusterDescribed, Described
from drystone.run.events import (
    BillSettled,
    NodeJoined,
    NodeReleased,
    ReleaseAsked,
    RentalAsked,
    Started,
    Stopped,
)
from drystone.run.renting.export import COLUMNS, FOCUS_COLUMNS, export_ledger
from drystone.run.renting.ledger import Ledger

DAY = 1_764_460_800.0  # 2025-11-30, midnight
OFFER = Offer(
    name="a", gpu="A100", num_gpus=4, price_dollars_per_hour=8.0, infra="aws/us-east-1",
    is_spot=True,
)  # fmt: skip


def at(hours: float) -> float:
    return DAY + 3600.0 * hours


EVENTS = (
    ClusterDescribed(
        time_seconds=DAY, nodes=(("own", "T4", 2),), dollars_per_gpu_hour=(("T4", 0.5),)
    ),
    RentalAsked(time_seconds=DAY, offer="a", num_nodes=1, first_rental=0, ready_seconds=DAY),
    NodeJoined(
        time_seconds=DAY, node=1, rental=0, offer="a", price_dollars_per_hour=8.0,
        spec=NodeSpec(id="r0", gpu="A100", num_gpus=4),
    ),
    Described(time_seconds=DAY, job_id="1", job=TrainingJob(name="x", owner="ada")),
    Started(
        time_seconds=at(1), job_id="1", option=0, placement=((1, 4),), samples_per_second=1.0,
        productive_seconds=at(1),
    ),
    Stopped(time_seconds=at(3), job_id="1"),
    ReleaseAsked(time_seconds=at(4), node=1),
    NodeReleased(time_seconds=at(4.5), node=1),
    BillSettled(time_seconds=at(5), rental=0, offer="a", micro_dollars=35_500_000),
    Described(time_seconds=at(5), job_id="2", job=TrainingJob(name="y", owner="bob")),
    Started(
        time_seconds=at(5), job_id="2", option=0, placement=((0, 2),), samples_per_second=1.0,
        productive_seconds=at(5),
    ),
)  # fmt: skip


def rows(form: str) -> list[dict[str, str]]:
    lines = export_ledger(EVENTS, at(6), form=form, account="fleet", offers=(OFFER,))
    return list(csv.DictReader(lines))


def test_every_dollar_says_what_it_was_for():
    found = [(row["use"], row["job"], row["node"], row["dollars"]) for row in rows("csv")]

    assert found == [
        ("starting", "", "r0", "8.000000"),
        ("job", "1", "r0", "16.000000"),
        ("idle", "", "r0", "8.000000"),
        ("leaving", "", "r0", "4.000000"),
        ("settled", "", "r0", "-0.500000"),
        ("job", "2", "own", "1.000000"),
    ]
    assert tuple(rows("csv")[0]) == COLUMNS
    assert rows("csv")[1]["team"] == "ada"
    assert rows("csv")[-1]["event"] == ""  # it still runs


def test_rows_add_up_to_the_book():
    book = Ledger()
    for event in EVENTS:
        book.record(event)
    statement = book.statement(at(6))
    total = Decimal(statement.total) / 1_000_000

    assert sum(Decimal(row["dollars"]) for row in rows("csv")) == total
    assert sum(Decimal(row["EffectiveCost"]) for row in rows("focus")) == total
    assert sum(statement.by_use.values()) == statement.total


def test_focus_has_all_its_columns_and_what_they_must_hold():
    found = rows("focus")
    assert tuple(found[0]) == FOCUS_COLUMNS
    assert len(FOCUS_COLUMNS) - 2 == 43  # of FOCUS 1.0, and two of our own
    for row in found:
        assert row["BillingCurrency"] == "USD"
        assert row["ChargeCategory"] in ("Usage", "Adjustment")
        assert row["BillingPeriodStart"] == "2025-11-01T00:00:00Z"
        assert row["BillingPeriodEnd"] == "2025-12-01T00:00:00Z"
        assert row["ServiceCategory"] == "Compute"
    job = found[1]
    assert (job["ProviderName"], job["RegionId"]) == ("aws", "us-east-1")
    assert (job["PricingCategory"], job["ListUnitPrice"]) == ("Dynamic", "8.000000")
    assert (job["ChargePeriodStart"], job["ChargePeriodEnd"]) == (
        "2025-11-30T01:00:00Z",
        "2025-11-30T03:00:00Z",
    )
    assert job["Tags"] == '{"job": "1", "use": "job"}'
    settled, own = found[4], found[5]
    assert (settled["ChargeCategory"], settled["PricingQuantity"]) == ("Adjustment", "")
    assert (own["BilledCost"], own["EffectiveCost"]) == ("0", "1.000000")


def test_other_formats_are_refused():
    with pytest.raises(UnknownName):
        list(export_ledger(EVENTS, at(6), form="xml"))
