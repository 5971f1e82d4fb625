"""Launches: a plan in a few words, as `why`, `show` and the page say it, and who makes it when."""

from types import SimpleNamespace

import numpy as np
import pytest

from drystone.describe.files.cluster import parse_cluster
from drystone.describe.job import TrainingJob, make_spec
from drystone.describe.model_source import find_model
from drystone.describe.pool import parse_pool
from drystone.describe.recipe import Recipe
from drystone.plan.plan import Plan, Way
from drystone.plan.search import plan_executable
from drystone.run.control.journal import Journal
from drystone.run.control.launches import Seat, describe_plan, order_launch
from drystone.run.control.notes import Described
from drystone.run.control.store import Store
from drystone.run.control.troubles import Troubles
from drystone.run.control.world import LiveWorld
from drystone.run.engines.contract import Rendezvous
from drystone.run.events import Submitted


@pytest.mark.parametrize(
    ("pool", "model", "words"),
    [
        ("1xA100-80G", "gpt2", "1 A100-80GB-SXM, even, batches 1x16"),
        ("2xA100-80G", "llama-3-8b", "2 A100-80GB-SXM, cell tp=2, batches 2x16"),
        (
            "1xA100-80G,1xV100-32G",
            "gpt2",
            "1 A100-80GB-SXM + 1 V100-32GB-SXM, uneven, batches 1x16/1x0",
        ),
    ],
)
def test_a_plan_is_uneven_only_if_it_is_and_a_cell_says_how_it_is_split(pool, model, words):
    gpus = parse_pool(pool)
    plan = plan_executable(find_model(model), Recipe(seq_len=512, global_batch=16), gpus)
    kinds = [group.gpu.name for group in gpus.groups for _ in range(group.count)]
    seats = [Seat(node="n", gpu=gpu, device=at) for at, gpu in enumerate(kinds)]

    assert isinstance(plan, Plan)
    assert describe_plan(plan, seats) == words
    assert describe_plan(None, seats).endswith(", own script")


CLUSTER = parse_cluster("nodes: [{gpu: A100, gpus_per_node: 2}, {gpu: T4, gpus_per_node: 2}]")
PLANNERS = (
    "plan.options.search_cells",
    "plan.options.plan_uneven",
    "plan.options.pair_speeds",
    "plan.options.equal_ways",
    "plan.uneven.modules.plan_module",
    "run.control.options.plan_executable",
    "run.control.options.plan_module",
)


@pytest.fixture
def journal(tmp_path):
    store = Store(f"sqlite:///{tmp_path}/log.db")
    yield Journal(store, store.acquire("me", lease_seconds=60), CLUSTER, clock=lambda: 100.0)
    store.close()


@pytest.mark.parametrize(
    ("model", "placement", "way"),
    [
        ("gpt2", ((0, 1),), Way.CELL),
        ("gpt2", ((0, 2), (1, 2)), Way.UNEVEN),
        ("llama-3-8b", ((0, 2),), Way.CELL),
    ],
    ids=["one GPU", "two types", "a Cell"],
)
def test_launching_calls_no_planner(journal, tmp_path, monkeypatch, model, placement, way):
    counts = [dict(placement).get(node, 0) for node in range(2)]
    job = TrainingJob(
        name="a",
        model=model,
        seq_len=512,
        num_steps=10,
        global_batch=16,
        precision="fp16-mixed",
        min_gpus=sum(counts),  # so that fewer GPUs which are as fast do not rule it out
    )
    spec = make_spec(job, journal.book.shape(job), job_id="1", submit_seconds=1.0)
    journal.commit(
        [Described(time_seconds=1.0, job_id="1", job=job), Submitted(time_seconds=1.0, job=spec)]
    )
    [option] = np.flatnonzero((journal.options_of(spec).counts == counts).all(axis=1)).tolist()
    world = LiveWorld(journal, SimpleNamespace(troubles=Troubles()))
    world.launch("1", option, placement, "")

    def plan_again(*_: object, **__: object) -> None:
        raise AssertionError("planned again")

    for name in PLANNERS:
        monkeypatch.setattr(f"drystone.{name}", plan_again)
    engine = SimpleNamespace(rendezvous=lambda node: Rendezvous(address=node, port=1234))
    order = order_launch(
        journal, journal.live.state.jobs["1"], engine, busy={}, folder=tmp_path, lease_seconds=10
    )

    assert len(order.seats) == sum(counts)
    assert journal.plan_of(spec, option).way is way
