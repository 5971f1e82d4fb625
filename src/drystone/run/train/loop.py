"""Execute a plan: the whole training of one job, top to bottom."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, TextIO

import torch

from drystone.describe.model import ModuleSpec
from drystone.describe.recipe import Offload, Optimizer, Precision, Recipe, StepKernel, Tuning
from drystone.errors import InvalidSpec
from drystone.plan.plan import Plan
from drystone.run.fence import check_lease
from drystone.run.train.cells.engine import CellTrainer
from drystone.run.train.cells.layout import cell_layout, is_cell
from drystone.run.train.collectives import Wire
from drystone.run.train.config import RankConfig
from drystone.run.train.data import open_tokens, rank_works
from drystone.run.train.emulate import VARIABLE, EmulatedDevice, rank_gpus, read_emulation
from drystone.run.train.models.lora import add_adapters
from drystone.run.train.models.module import UserModule, build_user_module
from drystone.run.train.models.transformer import Transformer, build_model
from drystone.run.train.step_report import write_event, write_report
from drystone.run.train.trainer import MakeOptimizer, Trainer

_DTYPES = {
    Precision.FP32: torch.float32,
    Precision.TF32: torch.float32,
    Precision.BF16_MIXED: torch.bfloat16,
    Precision.FP16_MIXED: torch.float16,
}


def train(plan: Plan, config: RankConfig, wire: Wire, stream: TextIO) -> None:
    """Train to the last step, or until asked to leave; rank 0 writes a line for each step."""
    emulation = read_emulation(os.environ.get(VARIABLE, ""), plan)
    device = None
    if emulation is not None:
        device = emulation.device_of(wire.rank, rank_gpus(plan)[wire.rank])
    with (device.make_ledger() if device else None) or nullcontext():
        seconds = emulation.seconds if emulation else {}
        trainer = prepare(plan, config, wire, emulated=device, section_seconds=seconds)
        _run(trainer, plan, config, stream)


def _run(trainer: Trainer, plan: Plan, config: RankConfig, stream: TextIO) -> None:
    source = open_tokens(
        config.data,
        seq_len=plan.recipe.seq_len,
        vocab_size=plan.model.vocab_size,
        seed=config.seed,
        tokenizer=config.tokenizer,
    )
    trainer.leave_on_sigterm()
    trainer.resume()
    wire = trainer.engine.wire
    is_speaker = wire.rank == 0
    if is_speaker:
        write_event(stream, "started", step=trainer.progress.step, ranks=wire.num_ranks)
    model = trainer.model
    read = model.read_from(source) if isinstance(model, UserModule) else source.read
    for batches in trainer.iterate(read, num_steps=config.num_steps):
        check_lease()  # a process that was given up stops itself
        report = trainer.step(batches)
        if is_speaker:
            write_report(stream, report)
        is_last = trainer.is_leaving or report.step == config.num_steps
        if is_last or config.saves_after(report.step, step_seconds=plan.step_seconds):
            trainer.start_save()
        for step, path in trainer.take_saved(wait=is_last or config.waits_for_saves):
            if is_speaker:
                write_event(stream, "checkpoint", step=step, path=str(path))
    if is_speaker:
        event = "left" if trainer.progress.step < config.num_steps else "finished"
        write_event(stream, event, step=trainer.progress.step)


def prepare(
    plan: Plan,
    config: RankConfig,
    wire: Wire,
    *,
    emulated: EmulatedDevice | None = None,
    section_seconds: Mapping[str, float] | None = None,
) -> Trainer:
    """Everything that the plan says, checked and built."""
    recipe = plan.recipe
    _check_recipe(recipe)
    model = _build(plan, config)
    given: dict[str, Any] = {
        "optimizer": choose_optimizer(
            recipe.optimizer, config.learning_rate, kernel=recipe.step_kernel
        ),
        "wire": wire,
        "dtype": _DTYPES[recipe.precision],
        "recompute": recipe.recompute,
        "offload": recipe.offload is Offload.ACTIVATIONS,
        "config": config,
        "emulated": emulated,
        "section_seconds": section_seconds,
    }
    if is_cell(plan):
        assert isinstance(model, Transformer)  # modules are never split
        return CellTrainer(
            model,
            cell_layout(plan),
            seq_len=recipe.seq_len,
            **given,
        )
    works = rank_works(plan)
    if len(works) != wire.num_ranks:
        raise InvalidSpec(f"the plan is for {len(works)} ranks, {wire.num_ranks} were started")
    return Trainer(model, works, sharding=plan.sharding, **given)


def _build(plan: Plan, config: RankConfig) -> Transformer | UserModule:
    if isinstance(plan.model, ModuleSpec):
        return build_user_module(plan.model, seed=config.seed)
    model = build_model(plan.model, seed=config.seed, on_meta=True)
    if plan.recipe.tuning is Tuning.LORA:
        add_adapters(model, plan.recipe.lora, seed=config.seed)
    return model


def _check_recipe(recipe: Recipe) -> None:
    if recipe.precision not in _DTYPES:
        raise InvalidSpec(
            f"precision {recipe.precision.value} cannot be trained yet",
            hint="Plan with " + " or ".join(one.value for one in _DTYPES),
        )
    if recipe.tuning is Tuning.QLORA:
        raise InvalidSpec(f"tuning {recipe.tuning.value} cannot be trained yet")
    if recipe.offload in (Offload.OPTIMIZER, Offload.STATE):
        raise InvalidSpec(
            f"offload {recipe.offload.value} cannot be trained yet",
            hint="Plan with offload activations, or none",
        )
    if recipe.dropout:
        raise InvalidSpec("the reference transformer has no dropout")


def choose_optimizer(
    optimizer: Optimizer, learning_rate: float, *, kernel: StepKernel = StepKernel.FUSED
) -> MakeOptimizer:
    """Optimizers that treat every element apart, so that a piece of a matrix is enough for them."""
    how = {"fused": kernel is StepKernel.FUSED, "foreach": kernel is StepKernel.FOREACH}

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        match optimizer:
            case Optimizer.ADAM:
                return torch.optim.AdamW(groups, lr=learning_rate, **how)
            case Optimizer.SGD:
                return torch.optim.SGD(groups, lr=learning_rate, **how)
            case Optimizer.SGD_MOMENTUM:
                return torch.optim.SGD(groups, lr=learning_rate, momentum=0.9, **how)
        raise InvalidSpec(
            f"optimizer {optimizer.value} cannot be trained yet",
            hint="Plan with adam, sgd or sgd-momentum",
        )

    return make
