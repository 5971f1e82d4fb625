"""A controller that rents, its provider and the rented machines in one process; faults by seed.

Besides what happens to every controller (`simulated_controller.py`): requests to the provider fail,
or are done though the answer is lost, or are done seconds later; it is killed around each; lists
are empty, old, or lack what was just made; offers are out of stock, and nodes are taken back.
Whatever the seed: the provider never runs more than the hard cap pays for, in the end nothing runs
there, and what it billed is what the book says, to the millionth of a dollar.
"""

from dataclasses import replace
from itertools import count
from types import SimpleNamespace

from simulated_agents import Faults, SimulatedAgents
from simulated_controller import Simulation

from drystone.describe.files.cluster import ClusterSpec
from drystone.describe.files.market import parse_market
from drystone.run.control.notes import Note
from drystone.run.control.store import StoreBusy
from drystone.run.engines.agent.launches import LOST_EXIT
from drystone.run.events import RentalAsked
from drystone.run.lifecycle import TERMINAL
from drystone.run.renting import desk as renting_desk
from drystone.run.renting.calls import ProviderCalls
from drystone.run.renting.ledger import Ledger
from drystone.run.renting.provider import OVER, Renting, Stage, live_offers, node_name
from drystone.run.renting.simulated_cloud import CloudConditions, SimulatedCloud
from drystone.run.state import ClusterState

OFFERS = live_offers(
    parse_market(
        "offers:\n"
        "  - {name: t4, gpu: T4, num_gpus: 1, price_dollars_per_hour: 0.4,"
        " start_delay_seconds: 4}\n"
        "  - {name: spot, gpu: A100, num_gpus: 2, price_dollars_per_hour: 0.5,"
        " start_delay_seconds: 9, reclaims_per_hour: 40, most_nodes: 1, spot: true}\n"
    ),
    is_simulated=True,
)
BUDGET, HARD_CAP = 1.2, 1.3


class RentedAgents(SimulatedAgents):
    """Machines that join when they are attached, and are gone when the provider ends them."""

    def __init__(self, faults: Faults) -> None:
        super().__init__(faults, [])
        self._known: dict = {}
        self._has_changed, self._left = False, {}

    def restart(self) -> None:
        """The next controller knows of none before it has attached them."""
        self._known, self._has_changed, self._left = {}, False, {}

    def discover(self) -> ClusterSpec:
        return ClusterSpec(
            nodes=tuple(self._known.values()),
            emulations={offer.gpu: offer.emulation for offer in OFFERS},
        )

    def attach(self, name, offer) -> None:
        if name not in self._known:
            self._known[name] = offer.node(name)
            self.nodes.setdefault(name, {})
            self._silent_until.setdefault(name, 0.0)
            self._has_changed = True

    def detach(self, name, reason) -> None:
        if self._known.pop(name, None) is not None:
            self._left[name], self._has_changed = reason, True
            self.switch_off(name)

    def switch_off(self, name: str) -> None:
        self._silent_until[name] = float("inf")
        for part in self.nodes.get(name, {}).values():
            part.end(LOST_EXIT)

    def poll(self, offsets, renew, lease_seconds):
        poll = super().poll(offsets, renew, lease_seconds)
        self._unheard |= self.nodes.keys() - self._known.keys()
        poll = replace(
            poll,
            launches=tuple(seen for seen in poll.launches if seen.node in self._known),
            silent=poll.silent & self._known.keys(),
            cluster=self.discover() if self._has_changed else None,
            left=self._left,
        )
        self._has_changed, self._left = False, {}
        return poll


class UnreliableCloud(SimulatedCloud):
    """Requests that fail, or work though they seem to have failed; lists that lag behind."""

    def __init__(self, faults: Faults, *arguments) -> None:
        super().__init__(*arguments)
        self._faults, self._due, self._shown_at, self._before = faults, [], {}, []

    def quote(self):
        self._maybe_fail()
        return super().quote()

    def rent(self, token, offer) -> None:
        self._do(lambda: SimulatedCloud.rent(self, token, offer))
        self._shown_at.setdefault(token, self._clock() + self._faults.random.choice([0, 0, 2, 6]))

    def release(self, token) -> None:
        self._do(lambda: SimulatedCloud.release(self, token))

    def status(self, fleet):
        self._maybe_fail()
        found = super().status(fleet)
        if any(rental.token == fleet for rental in found):
            return found  # asked for by itself
        if self._faults.strike(0.05):
            return []
        if self._faults.strike(0.05):
            return self._before
        now = self._clock()
        self._before = [one for one in found if self._shown_at.get(one.token, 0.0) <= now]
        return self._before

    def _draw(self, token, offer):
        """By the number of the rental alone: the rest of its token is another in each run."""
        return replace(super()._draw(token.rpartition("-")[2], offer), token=token)

    def pass_time(self) -> None:
        """What was asked for arrives."""
        arrived = [deed for at, deed in self._due if at <= self._clock()]
        self._due = [(at, deed) for at, deed in self._due if at > self._clock()]
        for deed in arrived:
            deed()

    def _do(self, deed) -> None:
        self._faults.maybe_kill()
        self._maybe_fail()
        if self._faults.strike(0.05):
            self._due.append((self._clock() + self._faults.random.choice([1, 5, 15]), deed))
            raise TimeoutError("no answer")
        deed()
        self._faults.maybe_kill()
        if self._faults.strike(0.1):
            raise TimeoutError("it was done, and the answer is lost")

    def _maybe_fail(self) -> None:
        if self._faults.strike(0.1):
            raise RuntimeError("the provider does not want to")

    def truth(self) -> list:
        return SimulatedCloud.status(self, "drystone-")


class SteppedCalls(ProviderCalls):
    """Without threads: calls are made at once, and looks when `step` says so."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self._pool.shutdown()
        self._pool = SimpleNamespace(submit=lambda call, *values: call(*values))

    def start(self, *, looks_first: bool = True) -> None: ...

    def want(self, rents, releases) -> None:
        super().want(dict(sorted(rents.items())), sorted(releases))

    def step(self) -> None:
        self.trouble = ""
        try:
            self.look()
        except Exception as error:
            self.trouble = str(error)


class RentingSimulation(Simulation):
    """One run by one seed, on nodes that are rented."""

    cluster = ClusterSpec(nodes=())

    def __init__(self, folder, seed: int, monkeypatch) -> None:
        self.policy_name = ("budget", "prices")[seed % 2]
        super().__init__(folder, seed, monkeypatch)
        ticks = count()
        clock = SimpleNamespace(monotonic=lambda: self.agents.now + next(ticks) * 1e-7)
        monkeypatch.setattr("drystone.run.renting.calls.time", clock)
        monkeypatch.setattr("drystone.run.engines.agents_on_nodes.time", clock)
        monkeypatch.setattr(renting_desk, "ProviderCalls", SteppedCalls)
        conditions = CloudConditions(
            seed=seed, stockout_share=0.1, delay_spread=1.0, spell_seconds=30
        )
        self.cloud = UnreliableCloud(
            self.faults, folder / "cloud.json", OFFERS, conditions, lambda: self.agents.now
        )
        self.has_looked = False

    def make_agents(self) -> RentedAgents:
        return RentedAgents(self.faults)

    def settings(self, **more):
        renting = Renting(
            provider=self.cloud, offers=OFFERS, joiner=self.agents, budget_dollars_per_hour=BUDGET,
            hard_cap_dollars_per_hour=HARD_CAP, look_seconds=1.0, patience_seconds=60.0,
        )  # fmt: skip
        return super().settings(renting=renting, **more)

    def open(self) -> None:
        self.agents.restart()
        super().open()
        try:
            self.controller.desk.open(self.controller.journal)
        except StoreBusy:  # it ends, and is started again
            self.drop()
            raise
        self.has_looked = True  # while it started

    def decide(self) -> None:
        if not self.has_looked and not self.faults.strike(0.2):
            self.controller.desk._calls.step()
        self.has_looked = False
        super().decide()

    def round(self) -> None:
        super().round()
        self.cloud.pass_time()
        rate = 0.0
        for rental in self.cloud.truth():
            if rental.stage in OVER:
                number = int(rental.token.rpartition("-")[2])
                self.agents.switch_off(node_name(rental.offer, number))
            else:
                rate += rental.price_dollars_per_hour
        assert rate <= HARD_CAP + 1e-9, f"${rate:.2f}/h are rented under a cap of ${HARD_CAP}"

    def is_over(self) -> bool:
        live = self.controller.journal.live
        rentals = live.state.rentals
        are_jobs_over = all(job.state in TERMINAL for job in live.state.jobs.values())
        is_quiet = not rentals.rented and not rentals.asked
        ours = {rental.token for rental in self.cloud.truth()}
        are_settled = len(rentals.settled) >= len(ours)
        return super().is_over() and are_jobs_over and is_quiet and are_settled

    def states(self) -> dict:
        rentals = self.controller.journal.live.state.rentals
        truth = {rental.token[-6:]: rental.stage.value for rental in self.cloud.truth()}
        return super().states() | {
            "asked": dict(rentals.asked), "rented": dict(rentals.rented), "truth": truth,
            "settled": dict(rentals.settled),
        }  # fmt: skip

    def check(self) -> None:
        super().check()
        self.check_money([event for _, event in self.controller.store.read()])

    def check_money(self, events: list) -> None:
        """Nothing is left, nothing was made that was not asked for, and the bills are the book."""
        state, debits = ClusterState([]), []
        book = Ledger(debits.append)
        for event in events:
            book.record(event)
            if not isinstance(event, Note):
                state.record(event)
        made = self.cloud.truth()
        assert all(rental.stage in (Stage.ENDED, Stage.FAILED) for rental in made)
        assert len(made) <= sum(one.num_nodes for one in events if isinstance(one, RentalAsked))
        billed = sum(rental.billed_micro_dollars for rental in made)
        told = book.statement(state.now_seconds)
        assert told.total == billed == sum(told.by_account.values())
