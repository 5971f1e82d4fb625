"""Does a rank of a split job take the memory that the planner says? On fake tensors.

    python benchmarks/runtime_cells_memory.py [--model llama-3-8b] [--layers 8] [--seq-len 2048]

One rank of many takes two steps on tensors without bytes, among ranks that are not there (torch's
fake process group); a ledger counts what it would hold. The estimate is taken without what no
tensor holds (context, workspaces, what the allocator keeps) and without its margin.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from drystone.describe.layout import Layout, Layouts, parse_layout
from drystone.describe.model import ModelSpec
from drystone.describe.model_source import find_model
from drystone.describe.recipe import Recipe, Recompute
from drystone.estimate.memory.peak import estimate_memory
from drystone.run.train.cells import build as cell_build
from drystone.run.train.cells.engine import CellEngine
from drystone.run.train.cells.layout import CellLayout, Chunk, Stage
from drystone.run.train.collectives import Wire
from drystone.run.train.config import RankConfig
from drystone.run.train.emulate import Ledger, host_memory
from drystone.run.train.models.transformer import build_model
from drystone.run.train.optimizers import choose_optimizer
from drystone.units import GiB
from figures import print_figures

# Layout, micro-batches, recomputation, rank.
CASES = (
    ("pp=2", 4, "full", 0), ("pp=2", 4, "none", 0), ("pp=2", 4, "none", 1),
    ("dp=2,pp=2,zero=3", 4, "full", 0), ("dp=2,pp=2,zero=3", 4, "full", 2),
    ("dp=2,pp=2,zero=2", 4, "full", 0), ("dp=2,pp=2,zero=1", 4, "full", 2),
    ("dp=4,pp=4,zero=3,micro=2", 8, "full", 4), ("dp=2,tp=2,pp=2,zero=1,sp=1", 4, "none", 0),
    ("dp=4,tp=2,zero=3,sp=1", 2, "full", 0), ("tp=4", 2, "full", 0),
)  # fmt: skip
NOT_OF_TENSORS = ("workspace", "cache", "context")


class UnreadWire(Wire):
    """Fake tensors have no numbers; any will do."""

    def read(self, values: torch.Tensor) -> list[float]:
        """Ones."""
        return [1.0] * values.numel()


class Unseen:
    """Around what DTensor does only to learn a shape: tensors as large as the whole."""

    def __enter__(self) -> None:
        """The ledger looks away."""
        self._paused = host_memory()
        self._paused.__enter__()

    def __exit__(self, *error: object) -> None:
        """It looks again."""
        self._paused.__exit__(None, None, None)


class RealMesh(DeviceMesh):
    """A mesh is made of numbers that are read, so of real tensors."""

    @staticmethod
    def from_group(*args: Any, **kwargs: Any) -> DeviceMesh:
        """Outside of the modes that make tensors fake."""
        with _disable_current_modes():
            return DeviceMesh.from_group(*args, **kwargs)


def split_layout(model: ModelSpec, layout: Layout, num_micro: int) -> CellLayout:
    """The layout of equal stages, as the planner has it."""
    ends = [model.num_layers * index // layout.pp for index in range(layout.pp + 1)]
    return CellLayout(
        stages=tuple(
            Stage(
                first_rank=index * layout.dp * layout.tp, tp=layout.tp,
                samples=(layout.micro_batch,) * layout.dp, shares=(1.0,) * layout.dp,
            )
            for index in range(layout.pp)
        ),
        chunks=tuple(
            Chunk(stage=index, first_layer=ends[index], end_layer=ends[index + 1])
            for index in range(layout.pp)
        ),
        global_batch=layout.dp * layout.micro_batch * num_micro,
        num_micro=num_micro,
        sharding=layout.sharding,
        splits_sequence=layout.sequence_parallel,
    )  # fmt: skip


def compare(
    model: ModelSpec, text: str, num_micro: int, recompute: str, rank: int, seq_len: int
) -> tuple[float, float]:
    """The estimate for the rank, and what the engine took, in bytes."""
    layout = parse_layout(text)
    cells = split_layout(model, layout, num_micro)
    recipe = Recipe(
        seq_len=seq_len, global_batch=cells.global_batch, recompute=Recompute.parse(recompute)
    )
    seat = cells.seat(rank)
    memory = estimate_memory(model, recipe, Layouts.of([layout]), stage=[seat.stage])
    expected = sum(
        float(item[0]) for name, item in memory.items().items() if name not in NOT_OF_TENSORS
    )
    dist.init_process_group("fake", rank=rank, world_size=cells.num_ranks, store=FakeStore())
    with FakeTensorMode(allow_non_fake_inputs=True), Ledger() as ledger:
        engine = CellEngine(
            build_model(model, on_meta=True), cells, seq_len=seq_len, wire=UnreadWire(),
            dtype=torch.bfloat16, recompute=recipe.recompute,
        )  # fmt: skip
        optimizer = choose_optimizer(recipe.optimizer, RankConfig())(engine.parameter_groups())
        runs = cells.samples(seat, 0) if engine.reads_samples else []
        batches = [torch.zeros(len(run), seq_len + 1, dtype=torch.long) for run in runs]
        for _ in range(2):
            ledger.reset_peak()
            engine.compute_gradients(batches)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    dist.destroy_process_group()
    return expected, float(ledger.peak_bytes)


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=2048)
    given = parser.parse_args()
    cell_build.DeviceMesh = RealMesh
    ShardingPropagator._fake_mode_lock = Unseen()
    model = find_model(given.model)
    ((block, _), *_) = model.stack
    model = replace(model, stack=((block, given.layers),), tied_embeddings=False)
    ratios = []
    print("layout                          micro recompute rank  estimate    engine  ratio")
    for text, num_micro, recompute, rank in CASES:
        expected, found = compare(model, text, num_micro, recompute, rank, given.seq_len)
        print(f"{text:<31} {num_micro:>5} {recompute:>9} {rank:>4} {expected / GiB:>9.2f} "
              f"{found / GiB:>9.2f} {expected / found:>6.3f}", flush=True)  # fmt: skip
        ratios.append(expected / found)
    print_figures({"least_ratio": min(ratios), "most_ratio": max(ratios), "ratios": ratios})


if __name__ == "__main__":
    main()
