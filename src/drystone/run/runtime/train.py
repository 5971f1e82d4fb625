"""Execute a plan: the whole training of one job, top to bottom."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from drystone.describe.recipe import Offload, Optimizer, Precision, Tuning
from drystone.errors import InvalidSpec
from drystone.plan.plan import Plan
from drystone.run.runtime.batch import rank_works
from drystone.run.runtime.collectives import Wire
from drystone.run.runtime.data import open_tokens
from drystone.run.runtime.model import build_model
from drystone.run.runtime.step_report import write_event, write_report
from drystone.run.runtime.trainer import MakeOptimizer, Trainer

_DTYPES = {
    Precision.FP32: torch.float32,
    Precision.TF32: torch.float32,
    Precision.BF16_MIXED: torch.bfloat16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """What a plan leaves open."""

    num_steps: int = 10
    learning_rate: float = 3e-4
    weight_decay: float = 0.1
    clip: float = 1.0
    data: str = "synthetic"
    checkpoints: Path | None = None
    checkpoint_every: int = 100  # steps
    keep: int = 3
    seed: int = 0


def train(plan: Plan, settings: TrainSettings, wire: Wire, stream: TextIO) -> None:
    """Train to the last step, or until asked to leave; rank 0 writes a line for each step."""
    trainer = prepare(plan, settings, wire)
    source = open_tokens(
        settings.data,
        seq_len=plan.recipe.seq_len,
        vocab_size=plan.model.vocab_size,
        seed=settings.seed,
    )
    trainer.leave_on_sigterm()
    trainer.resume()
    is_speaker = wire.rank == 0
    if is_speaker:
        write_event(stream, "started", step=trainer.progress.step, ranks=wire.num_ranks)
    for batches in trainer.iterate(source.read, num_steps=settings.num_steps):
        report = trainer.step(batches)
        if is_speaker:
            write_report(stream, report)
        is_last = trainer.is_leaving or report.step == settings.num_steps
        if is_last or report.step % settings.checkpoint_every == 0:
            path = trainer.save()
            if is_speaker and path is not None:
                write_event(stream, "checkpoint", step=report.step, path=str(path))
    if is_speaker:
        event = "left" if trainer.progress.step < settings.num_steps else "finished"
        write_event(stream, event, step=trainer.progress.step)


def prepare(plan: Plan, settings: TrainSettings, wire: Wire) -> Trainer:
    """Everything that the plan says, checked and built."""
    recipe = plan.recipe
    works = rank_works(plan)
    if len(works) != wire.num_ranks:
        raise InvalidSpec(f"the plan is for {len(works)} ranks, {wire.num_ranks} were started")
    if recipe.precision not in _DTYPES:
        raise InvalidSpec(
            f"precision {recipe.precision.value} cannot be trained yet",
            hint="Plan with " + " or ".join(one.value for one in _DTYPES),
        )
    if recipe.tuning is not Tuning.FULL:
        raise InvalidSpec(f"tuning {recipe.tuning.value} cannot be trained yet")
    if recipe.dropout:
        raise InvalidSpec("the reference transformer has no dropout")
    return Trainer(
        build_model(plan.model, seed=settings.seed),
        works,
        optimizer=choose_optimizer(recipe.optimizer, settings.learning_rate),
        wire=wire,
        dtype=_DTYPES[recipe.precision],
        offload=recipe.offload is Offload.ACTIVATIONS,
        clip=settings.clip,
        weight_decay=settings.weight_decay,
        checkpoints=settings.checkpoints,
        keep=settings.keep,
        seed=settings.seed,
    )


def choose_optimizer(optimizer: Optimizer, learning_rate: float) -> MakeOptimizer:
    """Optimizers that treat every element apart, so that a piece of a matrix is enough for them."""

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        match optimizer:
            case Optimizer.ADAM:
                return torch.optim.AdamW(groups, lr=learning_rate)
            case Optimizer.SGD:
                return torch.optim.SGD(groups, lr=learning_rate)
            case Optimizer.SGD_MOMENTUM:
                return torch.optim.SGD(groups, lr=learning_rate, momentum=0.9)
        raise InvalidSpec(
            f"optimizer {optimizer.value} cannot be trained yet",
            hint="Plan with adam, sgd or sgd-momentum",
        )

    return make
