"""Steps of the runtime on the stand-in accelerator, as a rank takes them from a plan."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "oracles"))
import standin
from fake_ranks import FakeWire

from drystone.describe.layout import Sharding
from drystone.describe.model import ModelSpec
from drystone.describe.recipe import Offload, Recipe, Tuning
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
        """Ones; the fourth is whether to stop."""
        standin.note_wait("numbers are read")
        return [float(at != 3) for at in range(values.numel())]


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


def _read(recipe: Recipe) -> Any:
    return lambda run: torch.zeros(len(run), recipe.seq_len + 1, dtype=torch.long)
