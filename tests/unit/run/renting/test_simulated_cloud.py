"""The simulated cloud: one node for a token, kept in a file, seeded, and honest about money."""

from dataclasses import replace
from pathlib import Path

import pytest

from drystone.describe.market import Offer, Outage, PriceChange
from drystone.errors import UnknownName, UnreadableFile
from drystone.run.renting.provider import Stage, make_token, node_name, rental_of
from drystone.run.renting.simulated_cloud import CloudConditions, SimulatedCloud

OFFER = Offer(name="t4", gpu="T4", num_gpus=1, price_dollars_per_hour=3.6, start_delay_seconds=60.0)


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def opened(path: Path, clock: Clock, offer: Offer = OFFER, **conditions) -> SimulatedCloud:
    return SimulatedCloud(path / "cloud.json", (offer,), CloudConditions(**conditions), clock)


def stages(cloud: SimulatedCloud) -> list[Stage]:
    return [one.stage for one in cloud.status("f-")]


def test_a_node_starts_runs_and_ends_and_costs_what_it_ran(tmp_path, clock):
    cloud = opened(tmp_path, clock)
    cloud.rent("f-000000", OFFER)
    assert stages(cloud) == [Stage.STARTING]
    clock.now += 60
    assert stages(cloud) == [Stage.RUNNING]
    clock.now += 1000
    cloud.release("f-000000")
    clock.now += 500
    (one,) = cloud.status("f-")
    assert (one.stage, one.billed_micro_dollars) == (Stage.ENDED, 1_000_000)


def test_one_token_is_one_node_however_often_it_is_asked_for(tmp_path, clock):
    cloud = opened(tmp_path, clock)
    for _ in range(3):
        cloud.rent("f-000000", OFFER)
    clock.now += 100
    again = opened(tmp_path, clock)  # as a controller does that was killed
    again.rent("f-000000", OFFER)
    assert stages(again) == [Stage.RUNNING]
    again.release("f-000000")
    again.release("f-000000")
    again.rent("f-000000", OFFER)  # a token is used once
    assert stages(again) == [Stage.ENDED]


def test_what_was_given_back_before_it_ran_costs_nothing(tmp_path, clock):
    cloud = opened(tmp_path, clock)
    cloud.rent("f-000000", OFFER)
    clock.now += 30
    cloud.release("f-000000")
    clock.now += 1000
    (one,) = cloud.status("f-")
    assert (one.stage, one.billed_micro_dollars) == (Stage.ENDED, 0)


def test_there_are_no_more_than_the_offer_says(tmp_path, clock):
    offer = replace(OFFER, most_nodes=2)
    cloud = opened(tmp_path, clock, offer)
    for number in range(3):
        cloud.rent(f"f-{number:06d}", offer)
    assert stages(cloud) == [Stage.STARTING, Stage.STARTING, Stage.FAILED]


def test_spot_nodes_are_taken_back(tmp_path, clock):
    offer = replace(OFFER, reclaims_per_hour=60.0)
    cloud = opened(tmp_path, clock, offer)
    for number in range(20):
        cloud.rent(f"f-{number:06d}", offer)
    clock.now += 3600
    ended = [one for one in cloud.status("f-") if one.stage is Stage.ENDED]
    assert len(ended) == 20
    assert all("took the node back" in one.reason for one in ended)
    mean = sum(one.billed_micro_dollars for one in ended) / 20 / 1000  # a millionth is a ms here
    assert 20 < mean < 180  # seconds; the mean of the law is 60


def test_stock_outs_last_for_a_spell_and_follow_the_seed(tmp_path, clock):
    cloud = opened(tmp_path, clock, stockout_share=0.5, seed=3)
    drawn = []
    for spell in range(40):
        for part in range(2):
            cloud.rent(f"f-{2 * spell + part:06d}", OFFER)
            clock.now += 300
        drawn.append([one.stage is Stage.FAILED for one in cloud.status("f-")[-2:]])
    assert all(first == second for first, second in drawn)
    assert 8 < sum(first for first, _ in drawn) < 32


def test_prices_change_as_listed_and_as_drawn_and_bills_follow(tmp_path, clock):
    change = PriceChange(at_seconds=60.0 + 500.0, price_dollars_per_hour=7.2)
    offer = replace(OFFER, price_changes=(change,))
    cloud = opened(tmp_path, clock, offer)
    cloud.rent("f-000000", offer)
    assert cloud.quote() == {"t4": 3.6}
    clock.now += 1060
    assert cloud.quote() == {"t4": 7.2}
    assert cloud.billed_micro_dollars("f-000000") == 500_000 + 1_000_000
    swinging = opened(tmp_path / "other", clock, price_swing=0.5)
    prices = set()
    for _ in range(30):
        prices.add(swinging.quote()["t4"])
        clock.now += 600
    assert len(prices) > 20
    assert all(3.6 / 1.5 - 1e-6 <= one <= 3.6 * 1.5 + 1e-6 for one in prices)


def test_wrong_requests_are_refused(tmp_path, clock):
    cloud = opened(tmp_path, clock)
    with pytest.raises(UnknownName):
        cloud.rent("f-000000", replace(OFFER, name="h100"))
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(UnreadableFile):
        SimulatedCloud(tmp_path / "bad.json", (OFFER,))


def test_tokens_lead_back_to_rentals():
    token = make_token("drystone-abc-1f", 12)
    assert token == "drystone-abc-1f-000012"
    assert rental_of(token, "drystone-abc-1f") == 12
    assert rental_of(token, "drystone-abc-2e") is None
    assert rental_of("drystone-abc-1f-x", "drystone-abc-1f") is None
    assert node_name("t4", 7) == "rented-t4-0007"


def test_an_outage_takes_nodes_back_and_refuses_new_ones(tmp_path, clock):
    offer = replace(OFFER, outages=(Outage(from_seconds=600.0, until_seconds=900.0),))
    cloud = opened(tmp_path, clock, offer)
    cloud.rent("f-000000", offer)
    clock.now += 570
    cloud.rent("f-000001", offer)  # would come during the outage
    clock.now += 60
    cloud.rent("f-000002", offer)
    first = cloud.status("f-")[0]
    assert stages(cloud) == [Stage.ENDED, Stage.FAILED, Stage.FAILED]
    assert "took the node back" in first.reason
    assert first.billed_micro_dollars == 540_000  # from its 60th to its 600th second
    clock.now += 300
    cloud.rent("f-000003", offer)
    clock.now += 100_000
    assert stages(cloud)[-1] is Stage.RUNNING
