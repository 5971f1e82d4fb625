"""Whatever a cluster or market file says, it is read, or refused with a reason."""

from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from drystone.describe.files.cluster import ClusterSpec, parse_cluster
from drystone.describe.files.job import make_job
from drystone.describe.files.market import parse_market
from drystone.describe.job import TrainingJob
from drystone.errors import RequestError

ODD = st.sampled_from(
    ["A100", "T4", "nothing like it", "", "4GiB", "-1GiB", "1e400GiB", "nan", "é" * 300, "\0", "..",
     0, -1, 1, 2, 10**30, 10**400, -(10**400), 0.5, -0.0, float("inf"),
     float("-inf"), float("nan"), True, None]
)  # fmt: skip
PLAIN = st.recursive(
    ODD | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)


def table(*keys: str) -> st.SearchStrategy:
    """Some of the keys, and sometimes another one, with whatever as values."""
    named = st.dictionaries(st.sampled_from(keys), PLAIN, max_size=len(keys))
    return st.builds(
        lambda known, more: known | more, named, st.just({}) | named | st.just({"x": 1})
    )


NODES = st.builds(
    lambda odd, emulate: {"gpu": "A100"} | odd | emulate,
    table("gpu", "count", "gpus_per_node", "name", "memory_bytes"),
    st.just({}) | st.builds(lambda odd: {"emulate": odd}, table("speed", "memory") | PLAIN),
)
CLUSTERS = st.fixed_dictionaries(
    {"nodes": st.lists(NODES, max_size=3) | PLAIN},
    optional={"prices": st.dictionaries(ODD, PLAIN, max_size=3) | PLAIN, "node": PLAIN},
)
OFFERS = st.builds(
    lambda odd: {"name": "a", "gpu": "T4", "num_gpus": 1, "price_dollars_per_hour": 1} | odd,
    table(
        "name", "gpu", "num_gpus", "price_dollars_per_hour", "start_delay_seconds", "most_nodes",
        "reclaims_per_hour", "memory_bytes", "price_changes", "instance", "infra", "spot",
        "emulate", "spot_trace",
    ),
)  # fmt: skip
MARKETS = st.fixed_dictionaries(
    {"offers": st.lists(OFFERS, max_size=3) | PLAIN}, optional={"offer": PLAIN}
)


@given(CLUSTERS | PLAIN)
def test_no_table_breaks_the_reader_of_clusters(value):
    with suppress(RequestError):
        assert isinstance(parse_cluster(yaml.safe_dump(value)), ClusterSpec)


@given(MARKETS | PLAIN)
def test_no_table_breaks_the_reader_of_markets(value):
    with suppress(RequestError):
        assert all(one.num_gpus > 0 for one in parse_market(yaml.safe_dump(value)))


@given(st.text(max_size=300))
def test_no_text_breaks_the_reader_of_markets(text: str):
    with suppress(RequestError):
        parse_market(text)


JOB_KEYS = (
    "name", "model", "command", "train", "gpus", "data", "tune", "optimizer", "evaluate", "report",
    "environment", "priority", "deadline", "max_cost", "max_duration", "patience", "team", "from",
)  # fmt: skip
TRAIN_KEYS = (
    "steps", "tokens", "batch", "sequence", "precision", "learning_rate", "checkpoint_every",
    "compile", "seed",
)  # fmt: skip


@given(table(*JOB_KEYS), table(*TRAIN_KEYS))
def test_no_table_breaks_the_reader_of_jobs(job, train):
    told = {"command": "true", "train": {"steps": 1} | train} | job
    with suppress(RequestError):
        assert isinstance(make_job(told, folder=Path("nowhere")), TrainingJob)


@pytest.mark.parametrize("key", ["steps", "tokens", "batch", "sequence", "checkpoint_every"])
@pytest.mark.parametrize("number", [10**400, -(10**400)], ids=["large", "small"])
def test_numbers_that_no_float_holds_are_refused(key, number):
    with pytest.raises(RequestError):
        make_job({"model": "mini-gpt", "train": {"steps": 1} | {key: number}}, folder=Path())
    for limit in ("max_duration", "deadline"):
        with pytest.raises(RequestError):
            make_job({"command": "true", "train": {"steps": 1}, limit: number}, folder=Path())
