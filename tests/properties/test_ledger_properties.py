"""Whatever happens, the book balances: every debit has its event, accounts add up to nodes."""

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from drystone.describe.cluster import NodeSpec
from drystone.describe.job import JobSpec, TrainingJob
from drystone.run.control.notes import ClusterDescribed, Described
from drystone.run.events import (
    BillSettled,
    Finished,
    NodeJoined,
    NodeReclaimed,
    NodeReleased,
    PriceChanged,
    Progressed,
    ReleaseAsked,
    RentalAsked,
    RentalFailed,
    Started,
    Stopped,
    Submitted,
)
from drystone.run.renting.ledger import IDLE, Ledger
from drystone.run.state import ClusterState

OWN = (("own-0", "A100", 4), ("own-1", "T4", 2))
OFFERS = {"big": ("A100", 8, 20.0), "small": ("T4", 2, 0.7)}
PRICES = (0.0, 0.1, 0.7, 3.33, 20.0, 31.415926)


class Story:
    """A log that could have happened, drawn step by step."""

    def __init__(self, seed):
        self.dice, self.now, self.log = random.Random(seed), 1_000.0, []
        self.state = ClusterState([NodeSpec(id=i, gpu=g, num_gpus=n) for i, g, n in OWN])
        self.prices = {name: offer[2] for name, offer in OFFERS.items()}
        self.closed, self.num_jobs = [], 0
        self.tell(ClusterDescribed(
            time_seconds=self.now, nodes=OWN, dollars_per_gpu_hour=(("A100", 1.79), ("T4", 0.35))
        ))  # fmt: skip

    def tell(self, *events):
        for event in events:
            self.log.append(event)
            if not isinstance(event, ClusterDescribed | Described):
                self.state.record(event)

    def pick(self, some):
        some = list(some)
        return self.dice.choice(some) if some else None

    def step(self):
        self.now += self.dice.uniform(0, 5_000)
        getattr(self, self.dice.choice(
            ["submit", "start", "start", "stop", "ask", "arrive", "arrive", "reprice", "leave",
             "settle"]
        ))()  # fmt: skip

    def submit(self):
        self.num_jobs += 1
        name = f"j{self.num_jobs}"
        owner = self.dice.choice(["ada", "bob", ""])
        self.tell(
            Described(time_seconds=self.now, job_id=name, job=TrainingJob(name=name, owner=owner)),
            Submitted(
                time_seconds=self.now,
                job=JobSpec(id=name, submit_seconds=self.now, model="m", total_samples=1e9),
            ),
        )

    def start(self):
        waiting = [one for one, job in self.state.active.items() if job.option < 0]
        name, rows = self.pick(waiting), [r for r, free in enumerate(self.state.free) if free]
        if name is None or not rows:
            return
        row = self.pick(rows)
        placement = [(row, self.dice.randint(1, self.state.free[row]))]
        if len(rows) > 1 and self.dice.random() < 0.5:
            other = self.pick(one for one in rows if one != row)
            placement.append((other, 1))
        self.tell(Started(
            time_seconds=self.now, job_id=name, option=0, placement=tuple(sorted(placement)),
            samples_per_second=1.0, productive_seconds=self.now,
        ))  # fmt: skip

    def stop(self):
        name = self.pick(one for one, job in self.state.active.items() if job.option >= 0)
        if name is not None:
            self.tell(Progressed(time_seconds=self.now, job_id=name, done_samples=1.0))
            kind = self.dice.choice([Stopped, Finished])
            self.tell(kind(time_seconds=self.now, job_id=name))

    def ask(self):
        self.tell(RentalAsked(
            time_seconds=self.now, offer=self.dice.choice(sorted(OFFERS)),
            num_nodes=self.dice.randint(1, 3), first_rental=self.state.rentals.num_asked,
            ready_seconds=self.now,
        ))  # fmt: skip

    def arrive(self):
        rental = self.pick(self.state.rentals.asked)
        if rental is None:
            return
        offer = self.state.rentals.asked[rental].offer
        if self.dice.randint(0, 3) == 0:
            self.tell(RentalFailed(time_seconds=self.now, rental=rental, offer=offer))
            return
        gpu, number, _ = OFFERS[offer]
        self.tell(NodeJoined(
            time_seconds=self.now, node=len(self.state.nodes), rental=rental, offer=offer,
            spec=NodeSpec(id=f"r{rental}", gpu=gpu, num_gpus=number),
            price_dollars_per_hour=self.prices[offer],
            billed_since_seconds=self.now - self.dice.choice([0.0, 0.3, 60.0]),
        ))  # fmt: skip

    def reprice(self):
        offer = self.dice.choice(sorted(OFFERS))
        self.prices[offer] = self.dice.choice(PRICES)
        self.tell(PriceChanged(
            time_seconds=self.now, offer=offer, price_dollars_per_hour=self.prices[offer]
        ))  # fmt: skip

    def leave(self):
        rented = self.state.rentals.rented
        row = self.pick(
            one for one in rented
            if self.state.free[one] == self.state.nodes[one].num_gpus or one in self.state.closing
        )  # fmt: skip
        if row is None:
            return
        kind = self.dice.choice([ReleaseAsked, NodeReleased, NodeReclaimed])
        if kind is not ReleaseAsked:
            self.closed.append(rented[row].rental)
        elif row in self.state.closing:
            return
        self.tell(kind(time_seconds=self.now, node=row))

    def settle(self):
        rental = self.pick(self.closed)
        if rental is not None:
            self.closed.remove(rental)
            amount = self.dice.randint(0, 50_000_000)
            self.tell(BillSettled(
                time_seconds=self.now, rental=rental, offer="big", micro_dollars=amount
            ))  # fmt: skip


def tell_story(seed):
    story = Story(seed)
    for _ in range(story.dice.randint(1, 60)):
        story.step()
    return story


SEEDS = st.integers(0, 10**9)  # a story of its own each; there is nothing to gain by shrinking


@settings(max_examples=150, deadline=None)
@given(seed=SEEDS, later=st.floats(0, 100_000))
def test_the_book_balances_whatever_happens(seed, later):
    story = tell_story(seed)
    debits = []
    book = Ledger(debits.append)
    for event in story.log:
        book.record(event)
    closed = book.statement(story.now - 1e9)  # long before: nothing that is open counts
    now = book.statement(story.now + later)

    for debit in debits:
        assert 1 <= debit.source <= len(story.log)
        assert story.log[debit.source - 1].time_seconds == debit.until_seconds
        assert debit.micro_dollars != 0
    for statement in (closed, now):
        assert sum(statement.by_account.values()) == sum(statement.by_node.values())
        assert sum(statement.by_account.values()) == statement.total
    by_account, by_node = Counter(), Counter()
    for debit in debits:
        by_account[debit.account] += debit.micro_dollars
        by_node[debit.node] += debit.micro_dollars
    assert by_account == closed.by_account
    assert by_node == closed.by_node

    rented = sum(one for name, one in now.by_node.items() if not name.startswith("own"))
    assert rented == round(story.state.rentals.spent_dollars(story.now + later) * 1_000_000)
    assert all(one >= 0 for account, one in now.by_account.items() if account != IDLE)


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, cut=st.integers(0, 100))
def test_a_book_read_in_two_parts_is_the_same_book(seed, cut):
    """A controller that is killed and starts again folds the same log to the same accounts."""
    story = tell_story(seed)
    whole, parts = Ledger(), Ledger()
    for event in story.log:
        whole.record(event)
    for event in story.log[:cut]:
        parts.record(event)
    parts.statement(story.now)  # looking changes nothing
    for event in story.log[cut:]:
        parts.record(event)
    assert parts.statement(story.now) == whole.statement(story.now)
