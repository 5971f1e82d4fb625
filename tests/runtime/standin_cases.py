"""Steps of the runtime on the stand-in accelerator, as a rank takes them from a plan."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "oracles"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import standin
from fake_ranks import FakeWire

import runtime_cells_memory as cells_memory
from drystone.describe.layout import Sharding, parse_layout
from drystone.describe.model import ModelSpec
from drystone.describe.recipe import Offload, Optimizer, Recipe, Tuning
from drystone.run.train.cells import build as cell_build
from drystone.run.train.cells.engine import CellTrainer
from drystone.run.train.collectives import Wire
from drystone.run.train.config import RankConfig
from drystone.run.train.data import RankWork
from drystone.run.train.emulate import Ledger
from drystone.run.train.loop import DTYPES
from drystone.run.train.models import transformer
from drystone.run.train.models.lora import add_adapters
from drystone.run.train.models.transformer import build_model
from drystone.run.train.optimizers import choose_optimizer
from drystone.run.train.trainer import Trainer

WORKS = (RankWork(batch=4, micro_batch=2), RankWork(batch=4, micro_batch=2))


class GoingOn(FakeWire):
    """Of what all ranks say in a step nobody asks to leave."""

    def read(self, values: torch.Tensor) -> list[float]:
        """Ones."""
        return _ones_but_stop(values)


@contextmanager
def on_standin() -> Iterator[tuple[torch.device, standin.Watch, Ledger]]:
    """Inside, tensors are fake, and everything is watched; attention as on an A100."""
    device = standin.install()
    before = transformer.takes_groups
    transformer.takes_groups = lambda q, *_: q.dtype in (torch.float16, torch.bfloat16)
    watch = standin.Watch()
    try:
        with (
            torch.autograd.set_multithreading_enabled(False),  # other threads are not watched
            FakeTensorMode(allow_non_fake_inputs=True),
            Ledger() as ledger,
            watch,
        ):
            yield device, watch, ledger
    finally:
        transformer.takes_groups = before


def take_steps(
    model: ModelSpec,
    recipe: Recipe,
    *,
    sharding: Sharding,
    works: tuple[RankWork, ...] = WORKS,
    num_steps: int = 3,
    **options: Any,
) -> tuple[standin.Watch, int]:
    """What was seen in the steps after the first, and the peak of memory in them."""
    with on_standin() as (device, watch, ledger):
        wire = GoingOn(0, len(works))
        built = build_model(model, on_meta=True)
        if recipe.tuning is Tuning.LORA:
            add_adapters(built, recipe.lora)
        trainer = Trainer(
            built,
            works,
            optimizer=choose_optimizer(recipe.optimizer, RankConfig(), kernel=recipe.step_kernel),
            wire=wire,
            device=device,
            dtype=DTYPES[recipe.precision],
            sharding=sharding,
            recompute=recipe.recompute,
            offload=recipe.offload is Offload.ACTIVATIONS,
            config=RankConfig(num_steps=num_steps),
            **options,
        )
        for batches in trainer.iterate(_read(recipe), num_steps=num_steps):
            trainer.step(batches)
            if trainer.progress.step == 1:
                watch.waits.clear()
                wire.peaks.clear()
                ledger.reset_peak()
        return watch, max([*wire.peaks, ledger.peak_bytes])


def take_split_steps(
    model: ModelSpec, layout: str, rank: int, *, dtype: torch.dtype, seq_len: int
) -> standin.Watch:
    """The same of one rank of a pipeline, or of tensor-parallel ranks, none of which are there."""
    cells = cells_memory.split_layout(model, parse_layout(layout), 2)
    dist.init_process_group("fake", rank=rank, world_size=cells.num_ranks, store=FakeStore())
    meshes = cell_build.DeviceMesh, cells_memory.ShardingPropagator._fake_mode_lock
    cell_build.DeviceMesh = cells_memory.RealMesh
    cells_memory.ShardingPropagator._fake_mode_lock = cells_memory.Unseen()
    try:
        with on_standin() as (device, watch, _):
            trainer = CellTrainer(
                build_model(model, on_meta=True),
                cells,
                seq_len=seq_len,
                optimizer=choose_optimizer(Optimizer.ADAM, RankConfig()),
                wire=_SplitWire(),
                device=device,
                dtype=dtype,
                config=RankConfig(num_steps=2),
            )
            read = _read(Recipe(seq_len=seq_len, global_batch=cells.global_batch))
            for batches in trainer.iterate(read, num_steps=2):
                trainer.step(batches)
                if trainer.progress.step == 1:
                    watch.waits.clear()
        return watch
    finally:
        cell_build.DeviceMesh, cells_memory.ShardingPropagator._fake_mode_lock = meshes
        dist.destroy_process_group()


class _SplitWire(Wire):
    def read(self, values: torch.Tensor) -> list[float]:
        return _ones_but_stop(values)


def _ones_but_stop(values: torch.Tensor) -> list[float]:
    """Of what all ranks say in a step the fourth is whether to stop."""
    standin.note_wait("numbers are read")
    return [float(at != 3) for at in range(values.numel())]


def _read(recipe: Recipe) -> Any:
    return lambda run: torch.zeros(len(run), recipe.seq_len + 1, dtype=torch.long)
