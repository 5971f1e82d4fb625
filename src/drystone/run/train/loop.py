"""Execute a plan: the whole training of one job, top to bottom."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TextIO

import torch

from drystone.describe.job import TrainConfig
from drystone.describe.model import ModuleSpec
from drystone.describe.recipe import Offload, Optimizer, Precision, Recipe, StepKernel, Tuning
from drystone.errors import InvalidSpec
from drystone.plan.checkpoints import checkpoint_interval
from drystone.plan.plan import Plan
from drystone.run.fence import check_lease
from drystone.run.train.cells.engine import CellTrainer
from drystone.run.train.cells.layout import cell_layout, is_cell
from drystone.run.train.collectives import Wire
from drystone.run.train.config import RankConfig
from drystone.run.train.data import DataRequest, open_source, rank_works
from drystone.run.train.emulate import VARIABLE, EmulatedDevice, rank_gpus, read_emulation
from drystone.run.train.export import export_plan
from drystone.run.train.models.huggingface import exported_model
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
    source = open_source(data_request(plan, config, config.data))
    best_interval = checkpoint_interval(plan).num_steps
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
        if is_last or config.saves_after(report.step, best_interval=best_interval):
            trainer.start_save()
        for step, path in trainer.take_saved(wait=is_last or config.waits_for_saves):
            if is_speaker:
                write_event(stream, "checkpoint", step=step, path=str(path))
    is_left = trainer.progress.step < config.num_steps
    if is_speaker:
        if not is_left and config.export != "none":
            write_event(stream, "exported", path=str(_export(plan, config)))
        event = "left" if is_left else "finished"
        write_event(stream, event, step=trainer.progress.step)


def _export(plan: Plan, config: RankConfig) -> Path:
    """What was trained, as `transformers` or PEFT reads it, beside the checkpoints."""
    assert config.checkpoints is not None  # `_check_export`
    out = config.checkpoints.absolute().parent / "export"
    shutil.rmtree(out, ignore_errors=True)  # of an attempt before
    is_bf16 = plan.recipe.precision is Precision.BF16_MIXED
    export_plan(
        config.checkpoints,
        plan,
        out,
        dtype=torch.bfloat16 if is_bf16 else torch.float32,
        is_adapter=config.export == "peft",
    )
    return out


def data_request(plan: Plan, config: RankConfig, name: str) -> DataRequest:
    """What is read from the data of that name."""
    is_module = isinstance(plan.model, ModuleSpec)
    return DataRequest(
        name=name,
        seq_len=plan.recipe.seq_len,
        vocab_size=plan.model.vocab_size,
        seed=config.seed,
        format=config.data_format,
        column=config.column,
        tokenizer=config.tokenizer,
        model="" if isinstance(plan.model, ModuleSpec) else plan.model.source,
        is_plain=is_module,
    )


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
    _check_export(plan, config)
    model = _build(plan, config)
    given: dict[str, Any] = {
        "optimizer": choose_optimizer(recipe.optimizer, config, kernel=recipe.step_kernel),
        "wire": wire,
        "dtype": _DTYPES[recipe.precision],
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
            recompute=recipe.recompute,
            **given,
        )
    works = rank_works(plan)
    if len(works) != wire.num_ranks:
        raise InvalidSpec(f"the plan is for {len(works)} ranks, {wire.num_ranks} were started")
    return Trainer(model, works, **given)


def _build(plan: Plan, config: RankConfig) -> Transformer | UserModule:
    if isinstance(plan.model, ModuleSpec):
        return build_user_module(plan.model, seed=config.seed)
    model = build_model(plan.model, seed=config.seed, on_meta=True)
    if plan.recipe.tuning is Tuning.LORA:
        add_adapters(model, plan.recipe.lora, seed=config.seed)
    return model


def _check_export(plan: Plan, config: RankConfig) -> None:
    """What cannot be written at the end is refused at the beginning."""
    if config.export == "none":
        return
    if config.checkpoints is None:
        raise InvalidSpec("nothing is saved to export from", hint="Give --checkpoints FOLDER")
    if config.export == "peft" and plan.recipe.tuning is Tuning.FULL:
        raise InvalidSpec("export: peft, but there are no adapters", hint="Write huggingface")
    if isinstance(plan.model, ModuleSpec):
        raise InvalidSpec("export: no format is known for a module of your own")
    exported_model(plan.model)


def _check_recipe(recipe: Recipe) -> None:
    if recipe.precision not in _DTYPES:
        raise InvalidSpec(
            f"precision {recipe.precision.value} cannot be trained yet",
            hint="Plan with " + " or ".join(one.value for one in _DTYPES),
        )
    if recipe.tuning is Tuning.QLORA:
        raise InvalidSpec(f"tuning {recipe.tuning.value} cannot be trained yet")
    if recipe.dropout:
        raise InvalidSpec("the reference transformer has no dropout")


def choose_optimizer(
    optimizer: Optimizer, config: TrainConfig, *, kernel: StepKernel = StepKernel.FUSED
) -> MakeOptimizer:
    """Optimizers that treat every element apart, so that a piece of a matrix is enough for them."""
    how = {"fused": kernel is StepKernel.FUSED, "foreach": kernel is StepKernel.FOREACH}
    learning_rate, betas = config.learning_rate, (config.beta1, config.beta2)

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        match optimizer:
            case Optimizer.ADAM:
                return torch.optim.AdamW(
                    groups, lr=learning_rate, betas=betas, eps=config.epsilon, **how
                )
            case Optimizer.SGD:
                return torch.optim.SGD(groups, lr=learning_rate, **how)
            case Optimizer.SGD_MOMENTUM:
                return torch.optim.SGD(groups, lr=learning_rate, momentum=0.9, **how)
        raise InvalidSpec(
            f"optimizer {optimizer.value} cannot be trained yet",
            hint="Plan with adam, sgd or sgd-momentum",
        )

    return make
