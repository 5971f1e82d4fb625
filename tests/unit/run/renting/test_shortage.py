"""Offers that were out of stock are remembered, forgotten after a while, and passed over."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "schedule"))
from tiny import job, option_set, snapshot

from drystone.describe.cluster import NodeSpec
from drystone.describe.market import Offer
from drystone.run.events import NodeJoined, RentalAsked, RentalFailed
from drystone.run.rentals import SHORTAGE_HALF_LIFE_SECONDS, RentalState
from drystone.schedule.decision import Rent, find_policy

CHEAP = Offer(name="cheap", gpu="A", num_gpus=4, price_dollars_per_hour=2.0)
DEAR = Offer(name="dear", gpu="A", num_gpus=4, price_dollars_per_hour=3.0)
OTHER = Offer(name="other", gpu="B", num_gpus=4, price_dollars_per_hour=4.0)


def rentals(*failures: float, offer: str = "cheap") -> RentalState:
    state = RentalState()
    for number, at in enumerate(failures):
        state.ask(
            RentalAsked(
                time_seconds=at, offer=offer, num_nodes=1, first_rental=number, ready_seconds=at
            )
        )
        state.fail(RentalFailed(time_seconds=at, rental=number, offer=offer))
    return state


@pytest.mark.parametrize(("number", "half_lives"), [(1, 1.0), (2, 2.0), (8, 4.0)])
def test_a_shortage_is_forgotten_the_later_the_more_often_it_failed(number, half_lives):
    state = rentals(*([100.0] * number))
    end = 100.0 + half_lives * SHORTAGE_HALF_LIFE_SECONDS
    assert state.shortages["cheap"].ends_seconds == pytest.approx(end)
    assert state.is_short("cheap", end - 1)
    assert not state.is_short("cheap", end)
    assert not state.is_short("dear", 100.0)


def test_a_node_that_comes_ends_the_shortage():
    state = rentals(100.0)
    state.ask(
        RentalAsked(
            time_seconds=101.0, offer="cheap", num_nodes=1, first_rental=1, ready_seconds=101.0
        )
    )
    spec = NodeSpec(id="n", gpu="A", num_gpus=4)
    state.join(
        NodeJoined(
            time_seconds=102.0, node=0, rental=1, offer="cheap", spec=spec,
            price_dollars_per_hour=2.0,
        )
    )  # fmt: skip
    assert not state.is_short("cheap", 102.0)


def decide(policy: str, offers: tuple[Offer, ...], *, budget: float = 100.0) -> list[Rent]:
    import dataclasses

    own = (NodeSpec(id="a", gpu="A", num_gpus=4), NodeSpec(id="b", gpu="B", num_gpus=4))
    options = option_set(([4, 0], 2.0), ([0, 4], 1.9))
    jobs = [job(str(number), samples=1e6) for number in range(6)]
    made = snapshot(own, jobs, options, budget_dollars_per_hour=budget, offers=offers)
    made = dataclasses.replace(made, offers=offers)
    decisions, _ = find_policy(policy)(made, None)
    return [one for one in decisions if isinstance(one, Rent)]


def short(offer: Offer) -> Offer:
    import dataclasses

    return dataclasses.replace(offer, is_short=True)


@pytest.mark.parametrize("policy", ["prices", "budget"])
def test_the_cheapest_offer_in_stock_is_rented(policy):
    assert "cheap" in {one.offer for one in decide(policy, (CHEAP, DEAR))}
    assert {one.offer for one in decide(policy, (short(CHEAP), DEAR))} == {"dear"}


@pytest.mark.parametrize("policy", ["prices", "budget"])
def test_another_type_is_rented_where_one_is_out_of_stock(policy):
    assert {one.offer for one in decide(policy, (short(CHEAP), OTHER))} == {"other"}
    assert decide(policy, (short(CHEAP),)) == []
