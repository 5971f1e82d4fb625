"""A controller that rents from a simulated cloud, in this process; and what must be true after."""

import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from systems import Running

from drystone.describe.files.cluster import ClusterSpec
from drystone.describe.files.market import parse_market
from drystone.run.control.controller import Controller, ControllerSettings
from drystone.run.control.notes import Note
from drystone.run.control.runs import Patience
from drystone.run.control.world import Pace
from drystone.run.renting.ledger import Ledger
from drystone.run.renting.provider import Renting, Stage, live_offers
from drystone.run.renting.simulated_cloud import CloudConditions, SimulatedCloud
from drystone.run.state import ClusterState

MARKET = """
offers:
  - {name: t4, gpu: T4, num_gpus: 1, price_dollars_per_hour: 0.4, start_delay_seconds: 0.3}
"""
HARD_CAP = 1.3


def open_cloud(folder: Path, market: str = MARKET, **conditions) -> SimulatedCloud:
    offers = live_offers(parse_market(market), is_simulated=True)
    return SimulatedCloud(folder / "cloud.json", offers, CloudConditions(**conditions))


def make_renter(folder: Path, cloud: SimulatedCloud, policy: str = "budget") -> Controller:
    renting = Renting(
        provider=cloud,
        offers=tuple(cloud._offers.values()),
        budget_dollars_per_hour=1.2,
        hard_cap_dollars_per_hour=HARD_CAP,
        look_seconds=0.1,
    )
    return Controller(
        ControllerSettings(
            folder=folder,
            cluster=ClusterSpec(nodes=()),
            policy=policy,
            pace=Pace(tick_seconds=0.05, startup_seconds=0.5, round_seconds=1.0),
            patience=Patience(grace_seconds=10.0, progress_seconds=0.3, silence_seconds=30.0),
            renting=renting,
        )
    )


@contextmanager
def renting(folder: Path, cloud: SimulatedCloud, policy: str = "budget"):
    controller = make_renter(folder, cloud, policy)
    thread = threading.Thread(target=controller.run)
    thread.start()
    try:
        yield Running(controller)
    finally:
        controller.leave()
        thread.join()
        controller.close(ends_agents=True)


def take_back(cloud: SimulatedCloud) -> None:
    """Every node that is there is reclaimed now, whatever the conditions."""
    with cloud._lock:
        for token, one in cloud._made.items():
            if cloud._clock() < one.end_seconds:
                cloud._made[token] = replace(one, reclaim_seconds=cloud._clock())
        cloud._save()


def is_quiet(controller: Controller) -> bool:
    """Nothing is rented or on its way, and every bill is settled."""
    rentals = controller.journal.live.state.rentals
    are_settled = len(rentals.settled) == rentals.num_asked
    return not rentals.rented and not rentals.asked and are_settled


def check_rentals(events: list, cloud: SimulatedCloud) -> None:
    """Nothing twice, nothing lost, nothing above the cap, and the book is the provider's."""
    state, book, debits = ClusterState([]), Ledger(), []
    book = Ledger(debits.append)
    for event in events:
        book.record(event)
        if not isinstance(event, Note):
            state.record(event)
        assert state.rentals.dollars_per_hour() <= HARD_CAP * (1 + 1e-9), event
    made = cloud.status("drystone-")
    assert all(one.stage in (Stage.ENDED, Stage.FAILED) for one in made)
    assert not state.rentals.rented
    billed = sum(one.billed_micro_dollars for one in made)
    at = book.statement(state.now_seconds)
    assert at.total == billed == sum(at.by_account.values())
    assert all(1 <= one.source <= len(events) for one in debits)
