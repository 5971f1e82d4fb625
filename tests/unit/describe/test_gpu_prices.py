"""The example prices: few, sourced, dated, and of GPUs that the catalogue knows."""

import re
from collections import defaultdict

import pytest

from drystone.describe.catalogue import gpu_names
from drystone.describe.gpu_prices import Price, cheapest_price, find_prices, load_prices
from drystone.errors import InvalidSpec, UnknownName


def _price(**changes: object) -> Price:
    values: dict[str, object] = {
        "gpu": "T4-16GB", "cloud": "example", "instance": "one", "num_gpus": 1, "region": "here",
        "on_demand_dollars_per_gpu_hour": 1.0, "spot_dollars_per_gpu_hour": 0.5,
        "date": "2026-01-01", "source": "made up",
    }  # fmt: skip
    return Price(**(values | changes))  # type: ignore[arg-type]


def test_only_a_modest_number_of_example_rows_is_shipped():
    assert 30 <= len(load_prices()) <= 60


def test_every_price_has_a_source_a_date_and_a_known_gpu():
    for price in load_prices():
        assert price.gpu in gpu_names()
        assert price.source
        assert price.cloud
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", price.date)
        assert 0.05 < price.on_demand_dollars_per_gpu_hour < 30
        assert price.spot_dollars_per_gpu_hour < price.on_demand_dollars_per_gpu_hour


def test_a_cloud_has_one_price_for_a_gpu_and_common_gpus_have_several_clouds():
    clouds = defaultdict(list)
    for price in load_prices():
        clouds[price.gpu].append(price.cloud)

    assert all(len(names) == len(set(names)) for names in clouds.values())
    for common in ("A100-80GB-SXM", "H100-80GB-SXM", "H200-141GB-SXM", "L40S-48GB"):
        assert len(clouds[common]) >= 3


def test_prices_are_found_by_any_name_and_the_cheapest_comes_first():
    prices = find_prices("a100-80g")
    dollars = [price.on_demand_dollars_per_gpu_hour for price in prices]

    assert {price.gpu for price in prices} == {"A100-80GB-SXM"}
    assert dollars == sorted(dollars)
    assert cheapest_price("A100-80G") == prices[0]


def test_a_gpu_that_nobody_rents_has_no_price():
    assert find_prices("GB300") == ()
    assert cheapest_price("GB300") is None


def test_an_unknown_gpu_is_an_error_and_not_an_empty_answer():
    with pytest.raises(UnknownName):
        find_prices("A100-90G")


@pytest.mark.parametrize(
    "changes",
    [
        {"on_demand_dollars_per_gpu_hour": 0.0},
        {"spot_dollars_per_gpu_hour": -1.0},
        {"num_gpus": 0},
    ],
)
def test_impossible_prices_are_refused(changes: dict[str, object]):
    with pytest.raises(InvalidSpec):
        _price(**changes)
