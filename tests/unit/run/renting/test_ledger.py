"""The account book: who pays for which GPU, by the event."""

from drystone.describe.cluster import NodeSpec
from drystone.describe.job import TrainingJob
from drystone.run.control.notes import ClusterDescribed, Described
from drystone.run.events import (
    BillSettled,
    NodeJoined,
    NodeReleased,
    PriceChanged,
    RentalAsked,
    Started,
    Stopped,
)
from drystone.run.renting.ledger import IDLE, Account, Ledger, divide_bill, format_dollars

OWN = ClusterDescribed(
    time_seconds=0.0, nodes=(("own", "T4", 2),), dollars_per_gpu_hour=(("T4", 0.5),)
)
ASKED = RentalAsked(time_seconds=0.0, offer="a", num_nodes=1, first_rental=0, ready_seconds=60.0)
JOINED = NodeJoined(
    time_seconds=0.0, node=1, rental=0, offer="a", price_dollars_per_hour=8.0,
    spec=NodeSpec(id="r0", gpu="A100", num_gpus=4),
)  # fmt: skip


def described(job_id: str, owner: str) -> Described:
    return Described(time_seconds=0.0, job_id=job_id, job=TrainingJob(name=job_id, owner=owner))


def started(job_id: str, placement, at: float = 0.0) -> Started:
    return Started(
        time_seconds=at, job_id=job_id, option=0, placement=placement, samples_per_second=1.0,
        productive_seconds=at,
    )  # fmt: skip


def book_of(*events) -> Ledger:
    book = Ledger()
    for event in events:
        book.record(event)
    return book


def test_a_job_pays_its_share_of_a_rented_node_and_nobody_pays_the_rest():
    book = book_of(OWN, ASKED, JOINED, described("1", "ada"), started("1", ((1, 1),), at=1800.0))
    at = book.statement(3600.0)
    assert at.by_account == {IDLE: 4_000_000 + 3_000_000, Account("ada", "1"): 1_000_000}
    assert at.by_node == {"r0": 8_000_000}


def test_own_gpus_cost_their_listed_price_while_a_job_has_them():
    book = book_of(OWN, described("1", "ada"), started("1", ((0, 2),)))
    book.record(Stopped(time_seconds=3600.0, job_id="1"))
    assert book.statement(7200.0).by_account == {Account("ada", "1"): 1_000_000}


def test_a_new_price_holds_from_its_second_on():
    book = book_of(OWN, ASKED, JOINED, described("1", "ada"), started("1", ((1, 4),)))
    book.record(PriceChanged(time_seconds=1800.0, offer="a", price_dollars_per_hour=16.0))
    assert book.statement(3600.0).by_account == {Account("ada", "1"): 4_000_000 + 8_000_000}


def test_what_the_provider_billed_is_what_the_node_cost():
    book = book_of(OWN, ASKED, JOINED, described("1", "ada"), started("1", ((1, 4),)))
    book.record(Stopped(time_seconds=3600.0, job_id="1"))
    book.record(NodeReleased(time_seconds=3600.0, node=1))
    settled = BillSettled(time_seconds=3700.0, rental=0, offer="a", micro_dollars=8_100_000)
    book.record(settled)
    at = book.statement(4000.0)
    assert at.by_node == {"r0": 8_100_000}
    assert at.by_account == {Account("ada", "1"): 8_000_000, IDLE: 100_000}


def test_other_own_nodes_leave_what_is_rented_as_it_is():
    book = book_of(OWN, ASKED, JOINED)
    nodes = (("new-0", "T4", 1), ("new-1", "T4", 1))
    book.record(ClusterDescribed(time_seconds=1800.0, nodes=nodes))
    book.record(NodeReleased(time_seconds=3600.0, node=2))
    assert book.statement(7200.0).by_node == {"r0": 8_000_000}


def test_a_bill_is_divided_without_loss():
    assert divide_bill(100, {"a": 1, "b": 1}, 3) == {"a": 33, "b": 33, "": 34}
    assert divide_bill(100, {"a": 2, "b": 1}, 3) == {"a": 67, "b": 33}
    assert divide_bill(7, {}, 8) == {"": 7}


def test_small_amounts_show():
    assert format_dollars(12_345_678) == "$12.35"
    assert format_dollars(42) == "$0.000042"
