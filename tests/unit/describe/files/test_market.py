from pathlib import Path

import pytest

from drystone.describe.files.market import load_market, parse_market
from drystone.describe.market import Offer, Outage, PriceChange
from drystone.errors import InvalidSpec, RequestError, UnknownName
from drystone.run.renting.provider import live_offers

FULL = """
offers:
  - gpu: A100
    num_gpus: 8
    price_dollars_per_hour: 16
  - name: cheap
    gpu: T4
    num_gpus: 4
    price_dollars_per_hour: 1.4
    start_delay_seconds: 120
    most_nodes: 50
    reclaims_per_hour: 0.05
    memory_bytes: 16e9
    price_changes:
      - {at_seconds: 3600, price_dollars_per_hour: 1.6}
      - {at_seconds: 7200, price_dollars_per_hour: 0}
"""


def test_a_market_file_says_all_that_an_offer_has(tmp_path: Path):
    path = tmp_path / "market.yaml"
    path.write_text(FULL)

    assert load_market(path) == (
        Offer(name="8xA100", gpu="A100", num_gpus=8, price_dollars_per_hour=16.0),
        Offer(
            name="cheap",
            gpu="T4",
            num_gpus=4,
            price_dollars_per_hour=1.4,
            start_delay_seconds=120.0,
            most_nodes=50,
            reclaims_per_hour=0.05,
            memory_bytes=16e9,
            price_changes=(
                PriceChange(at_seconds=3600.0, price_dollars_per_hour=1.6),
                PriceChange(at_seconds=7200.0, price_dollars_per_hour=0.0),
            ),
        ),
    )


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{gpu: A, price_dollars_per_hor: 1}", "Did you mean 'price_dollars_per_hour'"),
        ("{gpu: A, price_dollars_per_hour: 1, sport: 1}", "unknown key 'sport'"),
        ("{gpu: A}", "`price_dollars_per_hour` is missing"),
        ("{price_dollars_per_hour: 1}", "`gpu` is missing"),
        ("{gpu: A, price_dollars_per_hour: -1}", "greater than or equal to 0"),
        ("{gpu: A, price_dollars_per_hour: cheap}", "price_dollars_per_hour"),
        ("{gpu: A, num_gpus: 0, price_dollars_per_hour: 1}", "num_gpus"),
        ("{gpu: A, num_gpus: 1.5, price_dollars_per_hour: 1}", "num_gpus"),
        ("{gpu: A, price_dollars_per_hour: 1, price_changes: [{at: 1}]}", "at_seconds"),
        ("7", "offers[0]"),
    ],
)
def test_a_wrong_offer_is_named_with_its_line(row: str, says: str):
    with pytest.raises(RequestError) as caught:
        parse_market(f"offers:\n  - {row}\n", where="m.yaml")

    assert says in str(caught.value)
    assert "m.yaml: line 2" in str(caught.value)


def test_a_misspelt_key_gets_a_hint():
    with pytest.raises(UnknownName, match="Did you mean 'offers'"):
        parse_market("offer: []")


@pytest.mark.parametrize("text", ["", "[]", "offers: []", "offers: 3", "{}"])
def test_a_market_without_offers_is_refused(text: str):
    with pytest.raises(RequestError, match="offers"):
        parse_market(text)


def test_names_are_unique():
    row = "{gpu: A, price_dollars_per_hour: 1}"
    with pytest.raises(InvalidSpec, match="two offers are called '1xA'"):
        parse_market(f"offers:\n  - {row}\n  - {row}\n")


def test_price_changes_ascend():
    change = "{at_seconds: 5, price_dollars_per_hour: 1}"
    with pytest.raises(InvalidSpec, match="ascend"):
        parse_market(
            f"offers: [{{gpu: A, price_dollars_per_hour: 1, price_changes: [{change}, {change}]}}]"
        )


def test_a_policy_sees_the_price_of_now_and_not_the_future():
    offer = parse_market(FULL)[1]

    assert offer.seen_at(2.0).price_dollars_per_hour == 2.0
    assert offer.seen_at(2.0).price_changes == ()


TRACE = """zone,seconds,available,spot_dollars_per_hour
east,0,1,1.0
east,3600,1,1.5
east,7200,0,1.5
east,10800,1,2.0
east,18000,,
"""


def test_a_spot_trace_gives_prices_and_outages_from_an_hour_on(tmp_path: Path):
    (tmp_path / "trace.csv").write_text(TRACE)
    path = tmp_path / "market.yaml"
    path.write_text(
        "offers: [{gpu: V100, spot_trace: {file: trace.csv, zone: east, start_hours: 1, scale: 8}}]"
    )

    [offer] = load_market(path)

    assert offer.is_spot
    assert offer.price_dollars_per_hour == 12.0
    assert offer.price_changes == (PriceChange(at_seconds=7200.0, price_dollars_per_hour=16.0),)
    assert offer.outages == (Outage(from_seconds=3600.0, until_seconds=7200.0),)
    times = (0.0, 3599.0, 3600.0, 7199.0, 7200.0)
    assert [offer.is_out_at(time) for time in times] == [False, False, True, True, False]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ("zone: north", "'north'"),
        ("zone: east, start_hours: 9", "the trace ends before"),
        ("zone: east}, price_dollars_per_hour: 1, emulate: {speed: 1", "come from the spot trace"),
    ],
)
def test_a_spot_trace_that_cannot_be_used_is_refused(tmp_path: Path, keys: str, says: str):
    (tmp_path / "trace.csv").write_text(TRACE)
    path = tmp_path / "market.yaml"
    path.write_text(f"offers: [{{gpu: V100, spot_trace: {{file: trace.csv, {keys}}}}}]")

    with pytest.raises(RequestError, match=says):
        load_market(path)


def test_a_spot_trace_is_for_simulated_nodes_only(tmp_path: Path):
    (tmp_path / "trace.csv").write_text(TRACE)
    path = tmp_path / "market.yaml"
    path.write_text("offers: [{gpu: V100-32G, spot_trace: {file: trace.csv, zone: east}}]")
    offers = load_market(path)

    assert live_offers(offers, is_simulated=True)[0].outages
    with pytest.raises(InvalidSpec, match="simulated nodes"):
        live_offers(offers, is_simulated=False)
