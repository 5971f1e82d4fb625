"""The ledger of a running system: who pays for which GPU, as a pure fold over its log.

Every debit is for one node and one stretch of time, in whole millionths of a dollar, on one account
(a team and a job), and names the event of the log that closed it. A job that holds GPUs of a rented
node pays for its share of that node's bill; what nobody holds is on the account `IDLE`, and so is
the difference where a provider billed other than our clock says. GPUs of the owner's are charged at
the prices of the cluster file while jobs hold them, and cost nothing while they are idle. A bill is
divided without loss, so the accounts add up to the nodes, always and to the last millionth.

`record` folds events in the order of the log; `statement` says how things stand at a time, with
what runs counted up to then. Nothing here looks at a clock or a store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from drystone.describe.job import TrainingJob
from drystone.run.control.notes import ClusterDescribed, Described, Note
from drystone.run.events import (
    BillSettled,
    Event,
    NodeAdded,
    NodeJoined,
    NodeReclaimed,
    NodeReleased,
    NodeRemoved,
    PhaseChanged,
    PriceChanged,
    Progressed,
    ReleaseAsked,
    RentalAsked,
    RentalFailed,
    SpeedChanged,
    Started,
    Submitted,
    Unpaused,
)
from drystone.run.rentals import MICRO_DOLLARS, RentalState
from drystone.units import HOUR_SECONDS

# What happens to a job without taking its GPUs.
_KEEPS_GPUS: Final = (Note, Submitted, Progressed, SpeedChanged, PhaseChanged, Unpaused)


class Account(NamedTuple):
    """Who is charged: a job of a team; nobody's where both are empty."""

    team: str
    job_id: str


IDLE: Final = Account("", "")  # rented GPUs that nobody held, and what settling a bill changed


class Use(StrEnum):
    """What was paid for."""

    JOB = "job"  # held by a job
    STARTING = "starting"  # rented, and nobody has held any of it yet
    IDLE = "idle"  # nobody held it any more
    LEAVING = "leaving"  # being given back
    SETTLED = "settled"  # by how much the provider's bill differs from our clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Debit:
    """One charge. `source` is the number of the event that closed it, counted from 1."""

    account: Account
    node: str
    rental: int  # -1: a node of the owner's
    since_seconds: float
    until_seconds: float
    micro_dollars: int
    source: int  # 0: not closed yet, counted up to now
    use: Use = Use.JOB


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """How the book stands at a time, in millionths of a dollar."""

    time_seconds: float
    by_account: Mapping[Account, int]
    by_node: Mapping[str, int]
    by_use: Mapping[Use, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """All that was charged."""
        return sum(self.by_node.values())


def team_of(job: TrainingJob) -> str:
    """Whose account a job is on: its team's, or its owner's where it has none."""
    return str(getattr(job, "team", "") or job.owner)


@dataclass(slots=True, kw_only=True)
class _Node:
    """A node as the book sees it."""

    id: str
    gpu: str
    num_gpus: int
    holders: dict[str, int] = field(default_factory=dict)  # GPUs by job
    since_seconds: float = 0.0  # charged up to then
    charged_micro_dollars: int = 0  # of the bill of a rented node
    idle_use: Use = Use.STARTING  # what it is when nobody holds it


class Ledger:
    """The book. `on_debit` hears of every debit that is closed."""

    def __init__(self, on_debit: Callable[[Debit], None] | None = None) -> None:
        self.num_events = 0
        self.rentals = RentalState()
        self._on_debit = on_debit
        self._nodes: dict[int, _Node] = {}  # by row, without those that are gone
        self._own_prices: dict[str, float] = {}  # dollars a GPU hour by type
        self._teams: dict[str, str] = {}  # by job
        self._rows: dict[str, tuple[int, ...]] = {}  # by job that has GPUs
        self._own: tuple[tuple[str, str, int], ...] = ()
        self._names: dict[int, str] = {}  # of rented nodes, by rental
        self._rentals_by_name: dict[str, int] = {}
        self._by_account: Counter[Account] = Counter()
        self._by_node: Counter[str] = Counter()
        self._by_use: Counter[Use] = Counter()

    def record(self, event: Event) -> None:
        """Fold one event of the log."""
        self.num_events += 1
        fold = _FOLDS.get(type(event))
        if fold is not None:
            fold(self, event)
            return
        job_id = getattr(event, "job_id", "")
        if job_id in self._rows and not isinstance(event, _KEEPS_GPUS):
            self._stop(job_id, event.time_seconds)

    def statement(self, now_seconds: float) -> Statement:
        """All accounts, with what runs counted up to now."""
        by_account, by_node = self._by_account.copy(), self._by_node.copy()
        by_use = self._by_use.copy()
        for debit in self.open_debits(now_seconds):
            by_account[debit.account] += debit.micro_dollars
            by_node[debit.node] += debit.micro_dollars
            by_use[debit.use] += debit.micro_dollars
        return Statement(
            time_seconds=now_seconds, by_account=by_account, by_node=by_node, by_use=by_use
        )

    def open_debits(self, now_seconds: float) -> Iterator[Debit]:
        """What is not closed yet, counted up to now."""
        for row in self._nodes:
            yield from self._debits(row, now_seconds, source=0)

    def offer_of(self, node: str) -> str | None:
        """What a node was rented as; None for one of the owner's."""
        rental = self._rentals_by_name.get(node)
        return None if rental is None else self.rentals.offers[rental]

    def team(self, job_id: str) -> str:
        """Whose account a job is on."""
        return self._teams.get(job_id, "")

    # --- what events do -------------------------------------------------------------------------

    def _take_in(self, event: Described) -> None:
        self._teams[event.job_id] = team_of(event.job)

    def _ask(self, event: RentalAsked) -> None:
        self.rentals.ask(event)

    def _fail(self, event: RentalFailed) -> None:
        self.rentals.fail(event)

    def _describe(self, event: ClusterDescribed) -> None:
        for row in [row for row in self._nodes if row not in self.rentals.rented]:
            self._close(row, event.time_seconds)
        self._own_prices = dict(event.dollars_per_gpu_hour)
        if event.nodes == self._own:
            return
        old = sorted(self.rentals.rented)
        rented = [self._nodes[row] for row in old]
        self._own = event.nodes
        self._nodes = {
            row: _Node(id=name, gpu=gpu, num_gpus=count, since_seconds=event.time_seconds)
            for row, (name, gpu, count) in enumerate(event.nodes)
        }
        # As in the state of the cluster: own nodes first, then those that are rented.
        moved = {before: len(event.nodes) + offset for offset, before in enumerate(old)}
        self._nodes |= dict(zip(moved.values(), rented, strict=True))
        self.rentals.move_rows(moved)

    def _add(self, event: NodeAdded) -> None:
        """A node of the owner's."""
        spec = event.spec
        self._nodes[event.node] = _Node(
            id=spec.id, gpu=spec.gpu, num_gpus=spec.num_gpus, since_seconds=event.time_seconds
        )

    def _remove(self, event: NodeRemoved) -> None:
        self._close(event.node, event.time_seconds)
        del self._nodes[event.node]

    def _join(self, event: NodeJoined) -> None:
        self.rentals.join(event)
        spec = event.spec
        self._names[event.rental], self._rentals_by_name[spec.id] = spec.id, event.rental
        self._nodes[event.node] = _Node(
            id=spec.id,
            gpu=spec.gpu,
            num_gpus=spec.num_gpus,
            since_seconds=self.rentals.rented[event.node].since_seconds,
        )

    def _reprice(self, event: PriceChanged) -> None:
        for row, rented in self.rentals.rented.items():
            if rented.offer == event.offer:
                self._close(row, event.time_seconds)
        self.rentals.reprice(event)

    def _leave(self, event: NodeReleased | NodeReclaimed) -> None:
        self._close(event.node, event.time_seconds)
        self.rentals.leave(event.node, event.time_seconds)
        del self._nodes[event.node]

    def _settle(self, event: BillSettled) -> None:
        """The provider's bill is the node's: the difference is on nobody's account."""
        difference = self.rentals.settle(event)
        if difference:
            self._post(
                Debit(
                    account=IDLE,
                    node=self._names.get(event.rental, f"{event.offer} that never came"),
                    rental=event.rental,
                    since_seconds=event.time_seconds,
                    until_seconds=event.time_seconds,
                    micro_dollars=difference,
                    source=self.num_events,
                    use=Use.SETTLED,
                )
            )

    def _give_back(self, event: ReleaseAsked) -> None:
        self._close(event.node, event.time_seconds)
        self._nodes[event.node].idle_use = Use.LEAVING

    def _start(self, event: Started) -> None:
        self._rows[event.job_id] = tuple(row for row, _ in event.placement)
        for row, count in event.placement:
            self._close(row, event.time_seconds)
            self._nodes[row].holders[event.job_id] = count
            self._nodes[row].idle_use = Use.IDLE

    def _stop(self, job_id: str, time_seconds: float) -> None:
        for row in self._rows.pop(job_id):
            if row in self._nodes:
                self._close(row, time_seconds)
                self._nodes[row].holders.pop(job_id, None)

    # --- charging -------------------------------------------------------------------------------

    def _close(self, row: int, time_seconds: float) -> None:
        """Charge a node up to a time."""
        node = self._nodes[row]
        for debit in list(self._debits(row, time_seconds, source=self.num_events)):
            self._post(debit)
            if debit.rental >= 0:
                node.charged_micro_dollars += debit.micro_dollars
        node.since_seconds = max(node.since_seconds, time_seconds)

    def _post(self, debit: Debit) -> None:
        self._by_account[debit.account] += debit.micro_dollars
        self._by_node[debit.node] += debit.micro_dollars
        self._by_use[debit.use] += debit.micro_dollars
        if self._on_debit is not None:
            self._on_debit(debit)

    def _debits(self, row: int, until_seconds: float, *, source: int) -> Iterator[Debit]:
        """What a node cost since it was last charged, by account."""
        node, rented = self._nodes[row], self.rentals.rented.get(row)
        until_seconds = max(until_seconds, node.since_seconds)
        if rented is None:
            hours = (until_seconds - node.since_seconds) / HOUR_SECONDS
            price = self._own_prices.get(node.gpu, 0.0) * hours * MICRO_DOLLARS
            shares = {job_id: round(price * count) for job_id, count in node.holders.items()}
        else:
            whole = rented.bill_micro_dollars(until_seconds) - node.charged_micro_dollars
            shares = divide_bill(whole, node.holders, node.num_gpus)
        for job_id, micro_dollars in shares.items():
            if micro_dollars:
                yield Debit(
                    account=Account(self._teams.get(job_id, ""), job_id) if job_id else IDLE,
                    node=node.id,
                    rental=rented.rental if rented else -1,
                    since_seconds=node.since_seconds,
                    until_seconds=until_seconds,
                    micro_dollars=micro_dollars,
                    source=source,
                    use=Use.JOB if job_id else node.idle_use,
                )


def divide_bill(whole: int, holders: Mapping[str, int], num_gpus: int) -> dict[str, int]:
    """A bill in whole millionths, by holder; the rest is nobody's, under the empty name.

    What rounding leaves goes to nobody where GPUs are idle, else to the first holder.
    """
    shares = {job_id: whole * count // num_gpus for job_id, count in holders.items()}
    rest = whole - sum(shares.values())
    if sum(holders.values()) < num_gpus or not holders:
        shares[""] = rest
    else:
        shares[next(iter(shares))] += rest
    return shares


def format_dollars(micro_dollars: int) -> str:
    """`$12.34`; with as many more digits as it takes to show small amounts."""
    dollars = micro_dollars / MICRO_DOLLARS
    return f"${dollars:,.2f}" if abs(dollars) >= 0.01 or dollars == 0 else f"${dollars:.6f}"


_FOLDS: Final[Mapping[type[Event], Callable[[Ledger, Any], None]]] = MappingProxyType(
    {
        Described: Ledger._take_in,
        ClusterDescribed: Ledger._describe,
        RentalAsked: Ledger._ask,
        RentalFailed: Ledger._fail,
        NodeAdded: Ledger._add,
        NodeRemoved: Ledger._remove,
        NodeJoined: Ledger._join,
        PriceChanged: Ledger._reprice,
        ReleaseAsked: Ledger._give_back,
        NodeReleased: Ledger._leave,
        NodeReclaimed: Ledger._leave,
        BillSettled: Ledger._settle,
        Started: Ledger._start,
    }
)
