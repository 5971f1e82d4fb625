"""What a rank of a split job is seen to hold."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, zeros
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import runtime_cells_memory as benchmark
from drystone.describe.model_source import find_model
from drystone.run.train.cells import build as cell_build
from drystone.run.train.emulate import Ledger

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """The first of two ranks of which the other is not there."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_of_a_tensor_that_is_split_the_part_counts(two_ranks):
    mesh = init_device_mesh("cpu", (2,))

    with Ledger() as ledger:
        split = zeros(1000, 3, device_mesh=mesh, placements=[Shard(0)])
        seen = ledger.live_bytes
        doubled = split * 2

    assert seen == 500 * 3 * 4
    assert ledger.live_bytes == 2 * seen
    assert doubled.to_local().shape == torch.Size([500, 3])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "rank"),
    [("pp=2", 0), ("dp=2,pp=2,zero=3", 0), ("dp=2,pp=2,zero=3", 2), ("dp=4,tp=2,zero=3,sp=1", 0)],
)
def test_a_rank_of_a_split_job_takes_what_the_planner_says(
    layout: str, rank: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cell_build, "DeviceMesh", benchmark.RealMesh)
    monkeypatch.setattr(benchmark.ShardingPropagator, "_fake_mode_lock", benchmark.Unseen())
    model = find_model("llama-3-8b")
    ((block, _), *_) = model.stack
    small = replace(model, stack=((block, 4),), tied_embeddings=False)

    estimated, found = benchmark.compare(small, layout, 2, "full", rank, 2048)

    assert estimated == pytest.approx(found, rel=0.05)
