"""Judgement of a training: losses that are no numbers or explode, evaluations, the best so far.

A step whose loss or gradient is not finite never changes the weights (`Trainer.step`). Whether the
job then stops or goes on is the recipe's choice; it stops in any case after several in a row, and
while losses look wrong nothing is saved, so the last good checkpoint stays.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from drystone.errors import DrystoneError, InvalidSpec
from drystone.run.train.config import RankConfig
from drystone.run.train.data import TokenSource
from drystone.run.train.models.layered import Batch
from drystone.run.train.models.module import UserModule
from drystone.run.train.samples import SKIPPED
from drystone.run.train.step_report import StepReport
from drystone.run.train.trainer import Trainer

MOST_SKIPPED: Final = 10  # steps in a row without a change, before the job is given up
FIRST_STEPS: Final = 5  # their losses are the measure of later ones
EXPLODED: Final = 3.0  # times the highest of them, in as many steps in a row
BEST: Final = "best"  # the folder beside the checkpoints


class Diverged(DrystoneError):
    """The loss is no longer a number, or far above where it began."""


class LossWatch:
    """Looks at the loss of every step; what cannot be trained on any further is raised."""

    def __init__(self, *, stops_at_once: bool) -> None:
        self._stops_at_once = stops_at_once
        self._first: list[float] = []
        self._num_skipped = self._num_high = 0

    @property
    def is_calm(self) -> bool:
        """Whether the last step was good; otherwise nothing is worth saving."""
        return not (self._num_skipped or self._num_high)

    def see(self, report: StepReport, *, scales_loss: bool = False) -> None:
        """One more step. With `scales_loss` (fp16) some steps are skipped to find the scale."""
        is_finite = math.isfinite(report.loss) and math.isfinite(report.gradient_norm)
        self._num_skipped = 0 if is_finite else self._num_skipped + 1
        most = 1 if self._stops_at_once and not scales_loss else MOST_SKIPPED
        if not math.isfinite(report.loss):
            most = 1 if self._stops_at_once else MOST_SKIPPED
        if self._num_skipped >= most:
            what = "loss" if not math.isfinite(report.loss) else "norm of the gradient"
            value = report.loss if what == "loss" else report.gradient_norm
            again = f", {self._num_skipped} steps in a row" if self._num_skipped > 1 else ""
            raise _diverged(report.step, f"the {what} is {value}{again}")
        if not is_finite:
            return
        if len(self._first) < FIRST_STEPS:
            self._first.append(report.loss)
            return
        limit = EXPLODED * max(self._first)
        self._num_high = self._num_high + 1 if report.loss > limit > 0 else 0
        if self._num_high >= FIRST_STEPS:
            began = max(self._first)
            raise _diverged(report.step, f"the loss exploded: {report.loss:.3g} after {began:.3g}")


def _diverged(step: int, what: str) -> Diverged:
    return Diverged(
        f"step {step}: {what}; stopped, and the checkpoints from before stay",
        hint="Lower the learning rate, add warmup, look at the data; or pass over such steps "
        "with train: {on_bad_loss: skip}",
    )


class Evaluation:
    """Held-out samples, and what the trainings' evaluations came to so far."""

    def __init__(self, trainer: Trainer, source: TokenSource, config: RankConfig) -> None:
        self._trainer, self._source, self._config = trainer, source, config
        most = config.evaluate_samples or source.num_samples
        self.num_samples = min(most, source.num_samples)
        self._is_module = isinstance(trainer.model, UserModule)
        if self._is_module:  # whose losses cannot be told apart: whole rounds only
            self.num_samples -= self.num_samples % trainer.global_batch
            if not self.num_samples:
                raise InvalidSpec(
                    f"holds {source.num_samples} samples; to evaluate a module of your own needs "
                    f"a whole batch of {trainer.global_batch}",
                    where=config.eval_data,
                )

    def is_due(self, step: int) -> bool:
        """Every so many steps, and after the last."""
        every = self._config.evaluate_every
        return step == self._config.num_steps or bool(every and step % every == 0)

    def run(self) -> tuple[float, bool]:
        """The mean loss of the held-out samples, and whether it is the best so far."""
        loss = self._trainer.evaluate(self._reader(), num_samples=self.num_samples)
        progress = self._trainer.progress
        is_best = math.isfinite(loss) and (progress.best_loss is None or loss < progress.best_loss)
        self._trainer.progress = (
            replace(progress, best_loss=loss, best_step=progress.step, num_worse=0)
            if is_best
            else replace(progress, num_worse=progress.num_worse + 1)
        )
        return loss, is_best

    @property
    def reason_to_end(self) -> str:
        """Why training ends early: no lower loss in as many tries as allowed; empty: it goes on."""
        patience, progress = self._config.stop_after, self._trainer.progress
        if not patience or progress.num_worse < patience:
            return ""
        return (
            f"the evaluation has not been below {progress.best_loss:.4g} (step "
            f"{progress.best_step}) in {progress.num_worse} tries"
        )

    def _reader(self) -> Callable[[Sequence[int]], Batch]:
        model = self._trainer.model
        if isinstance(model, UserModule):
            return model.read_from(self._source)
        return self._read

    def _read(self, samples: Sequence[int]) -> torch.Tensor:
        """What is beyond the last sample fills the round, and is not predicted."""
        rows = self._source.read([sample % self.num_samples for sample in samples])
        is_beyond = torch.tensor([sample >= self.num_samples for sample in samples])
        return rows | (is_beyond.long() * SKIPPED)[:, None]


def keep_best(checkpoint: Path) -> None:
    """Keep a checkpoint as the best: linked, so that it stays when the others are removed."""
    folder = checkpoint.parent / BEST
    scratch = checkpoint.parent / f".{BEST}.part"
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(checkpoint, scratch / checkpoint.name, copy_function=_link)
    shutil.rmtree(folder, ignore_errors=True)
    scratch.rename(folder)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # not on every file system
        shutil.copy2(source, target)
