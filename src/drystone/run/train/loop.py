"""Execute a plan: the whole training of one job, top to bottom."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, TextIO

import torch

from drystone.describe.model import ModuleSpec
from drystone.describe.recipe import TRAINED_WEIGHT_BITS, Offload, Precision, Recipe, Tuning
from drystone.errors import InvalidSpec
from drystone.plan.checkpoints import checkpoint_interval
from drystone.plan.plan import Plan
from drystone.run.fence import check_lease
from drystone.run.succession import awaited_epoch
from drystone.run.train.cells.engine import CellTrainer
from drystone.run.train.cells.layout import cell_layout, is_cell
from drystone.run.train.collectives import Wire
from drystone.run.train.config import RankConfig
from drystone.run.train.data import DataRequest, open_source, rank_works
from drystone.run.train.emulate import (
    VARIABLE,
    EmulatedDevice,
    Emulation,
    rank_gpus,
    read_emulation,
)
from drystone.run.train.export import check_export, export_at_end
from drystone.run.train.judgement import Evaluation, LossWatch, keep_best
from drystone.run.train.models.layered import compiled
from drystone.run.train.models.lora import add_adapters
from drystone.run.train.models.module import UserModule, build_user_module
from drystone.run.train.models.transformer import Transformer, build_model
from drystone.run.train.optimizers import choose_optimizer
from drystone.run.train.reporters import Curves, open_curves
from drystone.run.train.step_report import StepReport, write_event, write_report
from drystone.run.train.trainer import Trainer

DTYPES = {
    Precision.FP32: torch.float32,
    Precision.TF32: torch.float32,
    Precision.BF16_MIXED: torch.bfloat16,
    Precision.FP16_MIXED: torch.float16,
}


def train(plan: Plan, config: RankConfig, wire: Wire, stream: TextIO) -> Ending:
    """Train to the last step, or until asked to leave; rank 0 writes a line for each step."""
    emulation = read_emulation(os.environ.get(VARIABLE, ""), plan)
    with prepared(plan, emulation, config, wire) as trainer:
        return _Training(trainer, plan, config, stream).run()


@contextmanager
def prepared(
    plan: Plan, emulation: Emulation | None, config: RankConfig, wire: Wire
) -> Iterator[Trainer]:
    """Everything that the plan says, on this rank's device or on what it pretends to be."""
    device = None
    if emulation is not None:
        device = emulation.device_of(wire.rank, rank_gpus(plan)[wire.rank])
    with (device.make_ledger() if device else None) or nullcontext():
        seconds = emulation.seconds if emulation else {}
        yield prepare(plan, config, wire, emulated=device, section_seconds=seconds)


def end(ending: Ending, plan: Plan, config: RankConfig, stream: TextIO) -> None:
    """Export what was trained, and say that it is over: rank 0, once it has left the others.

    They need not wait for it, and could not: writing a large model takes longer than a collective
    may take.
    """
    if ending.is_over and config.export != "none":
        write_event(stream, "exported", path=str(export_at_end(plan, config)))
    reason = {"reason": ending.reason} if ending.reason else {}
    write_event(stream, "finished" if ending.is_over else "left", step=ending.step, **reason)


class Ending(NamedTuple):
    """Where a launch of a job ended."""

    step: int
    is_over: bool  # rather than asked to leave
    reason: str = ""  # of an end before the last step


class _Training:
    """One launch of a job: steps, evaluations, checkpoints, and what is told of them."""

    def __init__(self, trainer: Trainer, plan: Plan, config: RankConfig, stream: TextIO) -> None:
        self._trainer, self._config, self._stream = trainer, config, stream
        self._wire = trainer.engine.wire
        _refuse_tokens_beside_own_data(trainer.model, config)
        self._source = open_source(data_request(plan, config, config.data))
        self._evaluation: Evaluation | None = None
        if config.eval_data:
            held_out = open_source(data_request(plan, config, config.eval_data, is_shuffled=False))
            self._evaluation = Evaluation(trainer, held_out, config)
        self._best_interval = checkpoint_interval(plan).num_steps
        self._watch = LossWatch(stops_at_once=config.on_bad_loss == "stop")
        self._curves: Curves | None = None
        self._reason = ""  # to end before the last step
        self._owes_checkpoint = False  # what was handed over is nowhere but in memory

    def run(self) -> Ending:
        """To the last step, or until there is a reason to end, or somebody asks to leave."""
        trainer, config = self._trainer, self._config
        trainer.leave_on_sigterm()
        if awaited_epoch():
            self._owes_checkpoint = trainer.succeed(tell_ready=lambda: self._tell("ready", step=0))
        if not self._owes_checkpoint:
            trainer.resume()
        self._tell("started", step=trainer.progress.step, ranks=self._wire.num_ranks)
        if self._wire.rank == 0:
            self._curves = open_curves(config, first_step=trainer.progress.step)
        if self._evaluation is not None:
            self._reason = self._evaluation.reason_to_end
        model, source = trainer.model, self._source
        read = model.read_from(source) if isinstance(model, UserModule) else source.read
        for batches in trainer.iterate(read, num_steps=0 if self._reason else config.num_steps):
            check_lease()  # a process that was given up stops itself
            report = trainer.step(batches)
            self._tell_step(report)
            self._watch.see(report, scales_loss=trainer.scales_loss)
            has_saved = self._evaluate(report.step)
            self._save(report.step, has_saved=has_saved)
            if self._reason:
                break
        return self._end()

    def _evaluate(self, step: int) -> bool:
        """Look at the held-out data, if that is due; whether this step was saved as the best."""
        if self._evaluation is None or not self._evaluation.is_due(step):
            return False
        loss, is_best = self._evaluation.run()
        self._reason = self._evaluation.reason_to_end
        self._tell("evaluated", step=step, loss=loss, is_best=is_best)
        if self._curves is not None:
            self._curves.write(step, {"eval/loss": loss})
        if not (is_best and self._config.keep_best):
            return False
        path = self._trainer.save()
        if path is None:
            return False
        if self._wire.rank == 0:
            keep_best(path)
        self._wire.barrier()
        self._tell("checkpoint", step=step, path=str(path))
        return True

    def _save(self, step: int, *, has_saved: bool) -> None:
        """Start a checkpoint where one is due, and tell of those that are whole."""
        trainer, config = self._trainer, self._config
        if trainer.is_leaving and self._watch.is_calm and not has_saved and trainer.hand_over():
            self._tell("handed_over", step=step)
            return
        is_last = trainer.is_leaving or step == config.num_steps or bool(self._reason)
        is_due = is_last or config.saves_after(step, best_interval=self._best_interval)
        if (is_due or self._owes_checkpoint) and self._watch.is_calm and not has_saved:
            trainer.start_save()
            self._owes_checkpoint = False
        for saved, path in trainer.take_saved(wait=is_last or config.waits_for_saves):
            self._tell("checkpoint", step=saved, path=str(path))

    def _end(self) -> Ending:
        if self._curves is not None:
            self._curves.close()
        step = self._trainer.progress.step
        is_over = bool(self._reason) or step >= self._config.num_steps
        return Ending(step=step, is_over=is_over, reason=self._reason)

    def _tell_step(self, report: StepReport) -> None:
        if self._wire.rank == 0:
            write_report(self._stream, report)
        if self._curves is not None:
            self._curves.write_step(report)

    def _tell(self, event: str, **values: object) -> None:
        if self._wire.rank == 0:
            write_event(self._stream, event, **values)


def _refuse_tokens_beside_own_data(model: object, config: RankConfig) -> None:
    has_own = isinstance(model, UserModule) and model.fed.own is not None
    if has_own and (config.data != "synthetic" or config.eval_data):
        raise InvalidSpec(
            "the module reads its own samples (training_data), and data names others",
            hint="Leave out data",
        )


def data_request(
    plan: Plan, config: RankConfig, name: str, *, is_shuffled: bool = True
) -> DataRequest:
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
        is_packed=config.pack,
        is_plain=is_module,
        is_shuffled=is_shuffled,
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
    use_tf32(recipe.precision is Precision.TF32)
    check_export(plan, config)
    model = _build(plan, config)
    given: dict[str, Any] = {
        "optimizer": choose_optimizer(recipe.optimizer, config, kernel=recipe.step_kernel),
        "wire": wire,
        "dtype": DTYPES[recipe.precision],
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


def use_tf32(is_wanted: bool) -> None:
    """Whether GPUs multiply fp32 matrices on their tensor cores; torch's own defaults differ."""
    torch.backends.cuda.matmul.allow_tf32 = is_wanted
    torch.backends.cudnn.allow_tf32 = is_wanted


def _build(plan: Plan, config: RankConfig) -> Transformer | UserModule:
    if isinstance(plan.model, ModuleSpec):
        module = build_user_module(plan.model, seed=config.seed)
        if plan.recipe.compiled:
            module.calls = compiled(module.blocks)
        return module
    model = build_model(plan.model, seed=config.seed, on_meta=True)
    model.is_packed = config.pack
    if plan.recipe.tuning is not Tuning.FULL:
        is_quantised = plan.recipe.tuning is Tuning.QLORA
        add_adapters(model, plan.recipe.lora, seed=config.seed, is_quantised=is_quantised)
    if plan.recipe.compiled:
        model.calls = compiled(model.blocks)
    return model


def _check_recipe(recipe: Recipe) -> None:
    if recipe.precision not in DTYPES:
        raise InvalidSpec(
            f"precision {recipe.precision.value} cannot be trained yet",
            hint="Plan with " + " or ".join(one.value for one in DTYPES),
        )
    if recipe.tuning is Tuning.QLORA and recipe.weight_bits not in TRAINED_WEIGHT_BITS:
        raise InvalidSpec(
            f"weights of {recipe.weight_bits:g} bits cannot be trained beside",
            hint="Plan with --tuning qlora and leave out the bits: 4.5, scales included",
        )
    if recipe.offload in (Offload.OPTIMIZER, Offload.STATE):
        raise InvalidSpec(
            f"offload {recipe.offload.value} cannot be trained yet",
            hint="Plan with offload activations, or none",
        )
    if recipe.recompute.modules:
        raise InvalidSpec(
            f"recompute {recipe.recompute} cannot be executed yet",
            hint="Plan with none, selective, or full",
        )
    if recipe.dropout:
        raise InvalidSpec("the reference transformer has no dropout")
