"""Training for those who have a loop of their own: wrap the model, iterate, call `step`.

    with joined() as wire:
        trainer = Trainer(NamedBlocks(model, "blocks"), works, optimizer=..., wire=wire)
        for batches in trainer.iterate(source.read, num_steps=100):
            report = trainer.step(batches)

`iterate` yields this rank's micro-batches of a step and ends early when any rank was asked to
leave.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from drystone.describe.layout import Sharding
from drystone.describe.recipe import Recompute, RecomputeKind
from drystone.errors import InvalidSpec
from drystone.run.train.balance import Balance, Division, largest_sizes
from drystone.run.train.checkpoint.background import BackgroundSaves
from drystone.run.train.checkpoint.checkpoint import Progress, load_latest, save_checkpoint
from drystone.run.train.checkpoint.handover import give_state, take_state
from drystone.run.train.collectives import Wire
from drystone.run.train.config import RankConfig
from drystone.run.train.data import RankWork, micro_batches
from drystone.run.train.device import Copies, is_accelerator
from drystone.run.train.emulate import SLOWDOWN, EmulatedDevice
from drystone.run.train.group import this_device
from drystone.run.train.models.layered import Batch, LayeredModel
from drystone.run.train.schedule import has_schedule, learning_rate_factor, set_learning_rate
from drystone.run.train.step_report import StepReport, Straggler, StragglerWatch
from drystone.run.train.stepping import LossScale, Stepper, StepResult
from drystone.run.train.uneven.engine import Engine
from drystone.run.train.uneven.whole import WholeEngine

MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


class Trainer:
    """A model held in unequal pieces, its optimizer, and how far it is."""

    def __init__(
        self,
        model: LayeredModel,
        works: Sequence[RankWork],
        *,
        optimizer: MakeOptimizer,
        wire: Wire | None = None,
        device: torch.device | None = None,  # None: the GPU of this rank, or the processor
        dtype: torch.dtype = torch.float32,
        sharding: Sharding = Sharding.ZERO3,  # below ZeRO-3 every rank holds all weights
        recompute: Recompute | None = None,  # None: of every layer, all
        offload: bool = False,
        config: RankConfig | None = None,
        emulated: EmulatedDevice | None = None,  # what this rank pretends to be
        section_seconds: Mapping[str, float] | None = None,  # of emulated devices: `Pacer`
        **options: Any,  # fields of the configuration, over those that it has
    ) -> None:
        self.model, self.works = model, tuple(works)
        self.config = config = replace(config or RankConfig(), **options)
        if not any(work.batch for work in works):
            raise InvalidSpec("no rank has a batch")
        self._emulated = emulated or EmulatedDevice()
        self._pacer = self._emulated.make_pacer(section_seconds or {})
        self._sharding = sharding
        self._recompute = recompute or Recompute(kind=RecomputeKind.FULL)
        self.engine = self._make_engine(
            model, wire=wire, device=device or this_device(), dtype=dtype, offload=offload
        )
        self.optimizer = optimizer(self.engine.parameter_groups(weight_decay=config.weight_decay))
        self._checkpoints, self._keep = config.checkpoints, config.keep
        self._background: BackgroundSaves | None = None
        self.progress = Progress(seed=config.seed)
        self._scale = LossScale() if dtype is torch.float16 else None
        self._watch = StragglerWatch(len(self.works))
        self._balance = Balance([work.micro_batch for work in self.works])
        self.is_leaving = False
        self._num_steps = config.num_steps
        self._data_seconds = 0.0
        self._copies = Copies(self.engine.device)
        self._ahead: tuple[list[range], bytes, list[Callable[[], Batch]]] | None = None
        self._started = time.perf_counter()

    @property
    def scales_loss(self) -> bool:
        """Whether steps are passed over until the factor of the loss fits (fp16)."""
        return self._scale is not None

    @property
    def global_batch(self) -> int:
        """Samples in a step, over all ranks."""
        return sum(work.batch for work in self.works)

    def rebalance(self, batches: Sequence[int], micro_batches: Sequence[int] | None = None) -> None:
        """Give the ranks other batches from the next step on; what each holds stays.

        Every rank must call it with the same numbers between the same steps. The sum may change.
        """
        if len(batches) != len(self.works) or not any(batches):
            raise InvalidSpec(f"batches {list(batches)} for {len(self.works)} ranks")
        sizes = micro_batches or [work.micro_batch for work in self.works]
        self.works = tuple(
            replace(work, batch=batch, micro_batch=max(size, 1))
            for work, batch, size in zip(self.works, batches, sizes, strict=True)
        )

    def resume(self) -> bool:
        """Go on from the newest whole checkpoint, if there is one."""
        if self._checkpoints is None:
            return False
        progress = load_latest(self._checkpoints, self.engine, self.optimizer)
        if progress is not None:
            self._adopt(progress)
        return progress is not None

    def succeed(self, *, tell_ready: Callable[[], None]) -> bool:
        """Take over from the launch before; False where it left nothing but checkpoints."""
        assert self._checkpoints is not None  # a standby has a job, and that a folder
        progress = take_state(self._checkpoints, self.engine, self.optimizer, tell_ready)
        if progress is None:
            return False
        self._adopt(progress)
        return True

    def hand_over(self) -> bool:
        """Give the state to the launch that waits for it; False where none takes it."""
        if self._checkpoints is None:
            return False
        if self._background is not None:
            self._background.wait()
        return give_state(self._checkpoints, self.engine, self.optimizer, self._progress_now())

    def _adopt(self, progress: Progress) -> None:
        self.progress = progress
        if self._scale is not None and progress.loss_scale:
            self._scale = LossScale(progress.loss_scale, progress.scale_steps)

    def save(self) -> Path | None:
        """Write a checkpoint, together with all ranks."""
        if self._checkpoints is None:
            return None
        if self._background is not None:
            self._background.wait()
        return save_checkpoint(
            self._checkpoints, self.engine, self.optimizer, self._progress_now(), keep=self._keep
        )

    def start_save(self) -> None:
        """Write a checkpoint while training goes on; `take_saved` says when it is whole."""
        if self._checkpoints is None:
            return
        if self._background is None:
            self._background = BackgroundSaves(
                self._checkpoints, self.engine, self.optimizer, keep=self._keep
            )
        self._background.save(self._progress_now())

    def take_saved(self, *, wait: bool = False) -> list[tuple[int, Path]]:
        """Step and folder of the checkpoints of `start_save` that became whole since last asked."""
        if self._background is None:
            return []
        if wait:
            self._background.wait()
        return self._background.take_whole()

    def _progress_now(self) -> Progress:
        # Of before the next step's samples were read.
        chance = (self._ahead[1] if self._ahead else bytes(torch.get_rng_state().tolist())).hex()
        if self._scale is None:
            return replace(self.progress, rng_state=chance)
        return replace(
            self.progress,
            rng_state=chance,
            loss_scale=self._scale.factor,
            scale_steps=self._scale.num_steps,
        )

    def leave_on_sigterm(self) -> None:
        """From now on SIGTERM means: finish the step, then `is_leaving` is true on all ranks."""

        def ask(_: int, __: FrameType | None) -> None:
            self.engine.stop_asked = True

        signal.signal(signal.SIGTERM, ask)

    def iterate(
        self, read: Callable[[Sequence[int]], Batch], *, num_steps: int
    ) -> Iterator[list[Batch]]:
        """Micro-batches of this rank, step by step, up to step `num_steps` of the whole job."""
        self._num_steps = num_steps
        if is_accelerator(self.engine.device):
            self.engine.while_computing = partial(self._read_ahead, read)
        try:
            while self.progress.step < num_steps and not self.is_leaving:
                self._started = time.perf_counter()
                batches = self._batches(read, self._runs(self.progress.position))
                self._data_seconds = time.perf_counter() - self._started
                yield batches
        finally:
            self.engine.while_computing = None

    def _batches(self, read: Callable[[Sequence[int]], Batch], runs: list[range]) -> list[Batch]:
        """On the device; read already, where that was foreseen."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == runs:
            return [wait() for wait in ahead[2]]
        return [self._copies.batch_to_device(read(run))() for run in runs]

    def _read_ahead(self, read: Callable[[Sequence[int]], Batch]) -> None:
        """The samples of the next step, while the device computes this one."""
        if self.progress.step + 1 >= self._num_steps:
            return
        runs = self._runs(self.progress.position + self.global_batch)
        chance = bytes(torch.get_rng_state().tolist())
        self._ahead = runs, chance, [self._copies.batch_to_device(read(run)) for run in runs]

    def evaluate(self, read: Callable[[Sequence[int]], Batch], *, num_samples: int) -> float:
        """The mean loss of the samples from 0 on, in rounds of a whole batch; nothing is changed.

        The last round reads beyond `num_samples` where they do not fill it.
        """
        loss_sum = total = 0.0
        for position in range(0, num_samples, self.global_batch):
            batches = [self._copies.batch_to_device(read(run))() for run in self._runs(position)]
            summed, weight = self.engine.compute_loss(batches)
            loss_sum, total = loss_sum + summed, total + weight
        return loss_sum / total if total else math.nan

    def step(self, batches: Sequence[Batch]) -> StepReport:
        """Gradients over all ranks, clipped by their true norm; then the optimizer."""
        if self._pacer is not None:
            self._pacer.speed = self._emulated.speed_at(self.progress.step + 1)
        if self._scale is not None:
            self.engine.loss_scale = self._scale.factor
        result = self.engine.compute_gradients(batches)
        if self._pacer is not None and self._pacer.is_measuring:
            self._pacer.adopt({k: SLOWDOWN * v for k, v in result.section_seconds.items()})
        is_skipped = not (math.isfinite(result.gradient_norm) and math.isfinite(result.loss))
        if self._scale is not None:
            self._scale = self._scale.after(result.gradient_norm)
        if self.config.clip and not is_skipped:
            self.engine.clip_gradients(result, self.config.clip)
        if has_schedule(self.config):
            factor = learning_rate_factor(self.config, self.progress.step, self._num_steps)
            set_learning_rate(self.optimizer, factor)
        with self.engine.timer.section("optimizer"):
            if not is_skipped:
                self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        now = time.perf_counter()
        self.is_leaving = result.stop_asked
        taken = tuple(work.batch for work in self.works)
        self.progress = replace(
            self.progress,
            step=self.progress.step + 1,
            position=self.progress.position + self.global_batch,
        )
        whole = now - self._started
        updating = self.engine.timer.last_seconds("optimizer")
        stragglers = self._look_for_stragglers(taken, result)
        return StepReport(
            step=self.progress.step,
            loss=result.loss,
            gradient_norm=result.gradient_norm,
            learning_rate=max(group["lr"] for group in self.optimizer.param_groups),
            tokens=result.weight,
            step_seconds=whole,
            tokens_per_second=result.weight / whole,
            seconds={"data": self._data_seconds, **result.seconds, "optimizer": updating},
            compute_seconds=result.compute_seconds,
            peak_memory_bytes=result.peak_memory_bytes,
            batches=taken,
            stragglers=stragglers,
            is_skipped=is_skipped,
        )

    def _make_engine(
        self,
        model: LayeredModel,
        *,
        wire: Wire | None,
        device: torch.device,
        dtype: torch.dtype,
        offload: bool,
    ) -> Stepper:
        given: dict[str, Any] = {
            "wire": wire,
            "device": device,
            "dtype": dtype,
            "seed": self.config.seed,
            "pacer": self._pacer,
        }
        shares = [work.state_share for work in self.works]
        if self._sharding >= Sharding.ZERO3:
            refuse_kept(self._recompute)
            return Engine(model, shares, offload=offload, **given)
        if offload:
            raise InvalidSpec(
                "activations are offloaded only where weights are gathered layer by layer",
                hint="Plan without offload, or with ZeRO-3",
            )
        return WholeEngine(
            model,
            shares,
            is_replicated=self._sharding is Sharding.NONE,
            recompute=self._recompute,
            **given,
        )

    def _find_better(self, batches: tuple[int, ...], result: StepResult) -> Division | None:
        """What the ranks should do from the next step on, if anything else."""
        peaks, usable = result.peak_memory_bytes, [work.usable_bytes for work in self.works]
        sizes = [work.micro_batch for work in self.works]
        self._balance.limit(
            largest_sizes(batches, peaks, usable) if self._grows_with_batch else [0] * len(sizes),
            largest_sizes(sizes, peaks, usable),
        )
        return self._balance.see(batches, result.compute_seconds)

    @property
    def _grows_with_batch(self) -> bool:
        """Whether a larger batch takes more memory: layer by layer, what is between them waits."""
        return isinstance(self.engine, Engine) and not self.engine.offloads

    def _runs(self, position: int) -> list[range]:
        """The global sample numbers of each micro-batch of this rank, in the step from there."""
        return micro_batches(self.works, self.engine.wire.rank, position)

    def _look_for_stragglers(
        self, batches: tuple[int, ...], result: StepResult
    ) -> tuple[Straggler, ...]:
        """Who is slower than planned; where that is wanted, others take over from the next step."""
        self._watch.see(batches, result.compute_seconds)
        if self.config.rebalances:
            better = self._find_better(batches, result)
            if better is not None:
                self.rebalance(*better)
        return self._watch.stragglers()


def refuse_kept(recompute: Recompute) -> None:
    """Layer by layer, what is inside a layer is never kept."""
    if recompute != Recompute(kind=RecomputeKind.FULL):
        raise InvalidSpec(
            f"recompute {recompute} with weights gathered layer by layer cannot be executed",
            hint="Plan again: such a plan recomputes all, or holds all weights (ZeRO-0 or 1)",
        )
