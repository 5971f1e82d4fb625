"""What every way to take a step has in common: pieces of parameters, clipping, what is reported.

Whoever takes steps computes gradients for the pieces that its rank holds; the rest is the same
whether layers are gathered whole, or split over stages and tensor-parallel ranks.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch

from drystone.run.train.collectives import Wire, Worked
from drystone.run.train.emulate import KINDS, Pacer, active_ledger
from drystone.run.train.models.layered import Batch
from drystone.run.train.uneven.shard import Owned


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step came to, over all ranks; the same on each of them, but for `seconds`."""

    loss: float  # the true mean
    gradient_norm: float  # of the whole gradient, before clipping
    weight: float  # tokens, or samples
    stop_asked: bool  # some rank was asked to leave
    compute_seconds: tuple[float, ...]  # by rank
    peak_memory_bytes: tuple[int, ...]  # by rank; on a processor of its tensors, where these are
    # counted (`memory_ledger.py`), otherwise of the whole process
    section_seconds: dict[str, float]  # what a sample took, where a pacer asked for it
    seconds: dict[str, float]  # of this rank, by part


class Stepper:
    """Holds this rank's pieces of a model and takes steps with them."""

    def __init__(
        self,
        owned: Sequence[Owned],
        *,
        wire: Wire,
        device: torch.device,
        pacer: Pacer | None = None,
    ) -> None:
        self.wire, self.device, self._pacer = wire, device, pacer
        self.owned = list(owned)  # every piece of a parameter that this rank holds
        self.num_steps = 0
        self.stop_asked = False
        self.loss_scale = 1.0  # of the backward pass in fp16; gradients come out without it
        self._seconds: dict[str, float] = {}

    @property
    def counted(self) -> list[Owned]:
        """Those of them that no other rank counts as well: over all ranks, every element once."""
        return [one for one in self.owned if one.is_counted]

    def compute_gradients(self, batches: Sequence[Batch]) -> StepResult:
        """Forward and backward over this rank's micro-batches: each owned piece gets its `grad`."""
        raise NotImplementedError

    def compute_loss(self, batches: Sequence[Batch]) -> tuple[float, float]:
        """Losses summed over this step's samples of all ranks, and their weight; no gradients."""
        raise NotImplementedError

    def _summed(self, loss_sum: torch.Tensor, weight: float) -> tuple[float, float]:
        """Both over all ranks."""
        mine = torch.tensor([float(loss_sum), weight], dtype=torch.float64, device=self.device)
        self.wire.sum(mine).wait()
        loss, total = self.wire.read(mine)
        return loss, total

    def parameter_groups(self, *, weight_decay: float = 0.0) -> list[dict[str, object]]:
        """For a torch optimizer: matrices decay, vectors do not. Either list may be empty."""
        trained = [one for one in self.owned if one.value.requires_grad]
        matrices = [one.value for one in trained if len(one.shape) > 1]
        vectors = [one.value for one in trained if len(one.shape) <= 1]
        return [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]

    def clip_gradients(self, result: StepResult, most: float) -> None:
        """Scale the gradients so that their norm over all ranks is at most `most`."""
        scale = most / (result.gradient_norm + 1e-6)
        if scale < 1.0:
            for one in self.owned:
                if one.value.grad is not None:
                    one.value.grad.mul_(scale)

    def _result(self, loss_sum: torch.Tensor, total: float) -> StepResult:
        """Sum over the ranks what is only known in part: one small collective."""
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        for one in self.owned:
            if one.value.grad is not None:
                if self.loss_scale != 1.0:
                    one.value.grad /= self.loss_scale
                if one.is_counted:
                    norm = torch.linalg.vector_norm(one.value.grad, dtype=torch.float64)
                    squares += norm.square()  # without a tensor as large as the gradient
        costs = self._pacer.measured_seconds() if self._pacer else {}
        mine = [
            self._seconds["forward"] + self._seconds["backward"],
            float(_peak_memory_bytes(self.device)),
            *(costs.get(kind, 0.0) for kind in KINDS),
        ]
        table = torch.zeros(self.wire.num_ranks, len(mine), dtype=torch.float64)
        table[self.wire.rank] = torch.tensor(mine, dtype=torch.float64)
        few = torch.tensor([float(self.stop_asked)], dtype=torch.float64, device=self.device)
        sums = torch.stack((loss_sum, squares))
        numbers = torch.cat((sums, few, table.flatten().to(self.device)))
        self.wire.sum(numbers).wait()
        loss, square, stops, *others = self.wire.read(numbers)
        by_rank = [others[at : at + len(mine)] for at in range(0, len(others), len(mine))]
        highest = [max(column) for column in zip(*by_rank, strict=True)]
        return StepResult(
            loss=loss / total,
            gradient_norm=square**0.5,
            weight=total,
            stop_asked=stops > 0,
            compute_seconds=tuple(row[0] for row in by_rank),
            peak_memory_bytes=tuple(int(row[1]) for row in by_rank),
            section_seconds=dict(zip(KINDS, highest[2:], strict=True)),
            seconds=dict(self._seconds),
        )

    def _paced(self, kind: str, hidden: torch.Tensor) -> AbstractContextManager[None]:
        """As slow as an emulated device, where there is one; noted, where somebody takes notes."""
        if self.wire.log is not None:
            self.wire.log.append(Worked(kind, len(hidden)))
        return self._pacer.section(kind, len(hidden)) if self._pacer else nullcontext()

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[part] += time.perf_counter() - started


def _peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    ledger = active_ledger()
    if ledger is not None:
        return ledger.peak_bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


FIRST, GROWTH, BACKOFF, PATIENCE_STEPS, LEAST, MOST = 2.0**16, 2.0, 0.5, 2000, 1.0, 2.0**24


@dataclass(frozen=True, slots=True)
class LossScale:
    """The factor, and the steps since it last changed."""

    factor: float = FIRST
    num_steps: int = 0

    def after(self, gradient_norm: float) -> LossScale:
        """What to go on with, once a step's gradient is known."""
        if not math.isfinite(gradient_norm):
            return LossScale(max(self.factor * BACKOFF, LEAST), 0)
        if self.num_steps + 1 >= PATIENCE_STEPS:
            return LossScale(min(self.factor * GROWTH, MOST), 0)
        return replace(self, num_steps=self.num_steps + 1)
