"""What every way to take a step has in common: pieces of parameters, clipping, what is reported.

Whoever takes steps computes gradients for the pieces that its rank holds; the rest is the same
whether layers are gathered whole, or split over stages and tensor-parallel ranks.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch

from drystone.run.train.collectives import Pending, Wire, Worked
from drystone.run.train.device import is_accelerator
from drystone.run.train.emulate import KINDS, Pacer, active_ledger
from drystone.run.train.models.layered import Batch, Weight
from drystone.run.train.timing import make_timer
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


PARTS = ("forward", "backward", "gather", "reduce")


class Total:
    """What counts in a step over all ranks (tokens, or samples): on the device, never read there.

    The host would wait for it in the middle of the step.
    """

    def __init__(self, value: torch.Tensor, pending: Pending | None = None) -> None:
        self._value, self._pending = value, pending

    def value(self) -> torch.Tensor:
        """The sum."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        return self._value


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
        self.timer = make_timer(device)
        # Called once in a step, when all of it was asked of the device and nothing read yet.
        self.while_computing: Callable[[], None] | None = None

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

    def _summed(self, loss_sum: torch.Tensor, weight: Weight) -> tuple[float, float]:
        """Both over all ranks."""
        mine = torch.cat((loss_sum.reshape(1), self._on_device(weight)))
        self.wire.sum(mine).wait()
        loss, total = self.wire.read(mine)
        return loss, total

    def parameter_groups(self, *, weight_decay: float = 0.0) -> list[dict[str, object]]:
        """For a torch optimizer: matrices decay, vectors do not. Either list may be empty."""
        trained = [owned for owned in self.owned if owned.value.requires_grad]
        matrices = [owned for owned in trained if len(owned.shape) > 1]
        vectors = [owned for owned in trained if len(owned.shape) <= 1]
        return [
            {"params": [owned.value for owned in some], "weight_decay": decay, "owned": some}
            for some, decay in ((matrices, weight_decay), (vectors, 0.0))
        ]

    def clip_gradients(self, result: StepResult, most: float) -> None:
        """Scale the gradients so that their norm over all ranks is at most `most`."""
        scale = most / (result.gradient_norm + 1e-6)
        if scale < 1.0:
            gradients = self._gradients()
            if gradients:
                torch._foreach_mul_(gradients, scale)

    def _gradients(self, *, is_counted: bool = False) -> list[torch.Tensor]:
        """Of the owned pieces; or of those among them that no other rank counts as well."""
        return [
            one.value.grad
            for one in (self.counted if is_counted else self.owned)
            if one.value.grad is not None
        ]

    def _start_total(self, mine: Weight) -> Total:
        """Sum what counts over the ranks, while the forward pass runs."""
        total = self._on_device(mine)
        return Total(total, self.wire.sum(total))

    def _on_device(self, weight: Weight) -> torch.Tensor:
        if isinstance(weight, torch.Tensor):
            return weight.to(self.device, torch.float64).reshape(1)
        # Not `torch.tensor`: that would copy a number from the host, and wait for the device.
        return torch.full((1,), weight, dtype=torch.float64, device=self.device)

    def _loss_gradient(self, loss: torch.Tensor, total: Total) -> torch.Tensor:
        """With which a backward pass begins at a sum of losses."""
        scale = self.loss_scale / total.value()
        return scale.to(loss.dtype).reshape(loss.shape)

    def _square_norm(self) -> torch.Tensor:
        """Of the counted gradients, without the scale of the loss."""
        if self.loss_scale != 1.0:
            gradients = self._gradients()
            if gradients:
                torch._foreach_div_(gradients, self.loss_scale)
        counted = self._gradients(is_counted=True)
        if not counted:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        # Without a tensor as large as a gradient.
        norms = torch._foreach_norm(counted, 2, torch.float64)
        return torch.stack(norms).square().sum()

    def _result(self, loss_sum: torch.Tensor, total: Total) -> StepResult:
        """Sum over the ranks what is only known in part: one small collective."""
        squares = self._square_norm()
        if self.while_computing is not None:
            self.while_computing()
        seconds = dict.fromkeys(PARTS, 0.0) | self.timer.seconds()
        costs = self._pacer.measured_seconds() if self._pacer else {}
        mine = [
            seconds["forward"] + seconds["backward"],
            float(_peak_memory_bytes(self.device)),
            *(costs.get(kind, 0.0) for kind in KINDS),
        ]
        told = torch.zeros(1 + self.wire.num_ranks * len(mine), dtype=torch.float64)
        told[0], at = float(self.stop_asked), 1 + self.wire.rank * len(mine)
        told[at : at + len(mine)] = torch.tensor(mine, dtype=torch.float64)
        # From here on the host waits for the device, once a step: whether to go on, to skip or to
        # clip depends on these numbers.
        numbers = torch.cat((torch.stack((loss_sum, squares)), told.to(self.device)))
        self.wire.sum(numbers).wait()
        weight, loss, square, stops, *others = self.wire.read(torch.cat((total.value(), numbers)))
        by_rank = [others[at : at + len(mine)] for at in range(0, len(others), len(mine))]
        highest = [max(column) for column in zip(*by_rank, strict=True)]
        return StepResult(
            loss=loss / weight,
            gradient_norm=square**0.5,
            weight=weight,
            stop_asked=stops > 0,
            compute_seconds=tuple(row[0] for row in by_rank),
            peak_memory_bytes=tuple(int(row[1]) for row in by_rank),
            section_seconds=dict(zip(KINDS, highest[2:], strict=True)),
            seconds=seconds,
        )

    def _timed(self, part: str) -> AbstractContextManager[None]:
        """Seconds of what is inside are those of the part."""
        found: AbstractContextManager[None] = self.timer.section(part)
        return found

    def _paced(
        self, kind: str, hidden: torch.Tensor, *, num_layers: int = 1
    ) -> AbstractContextManager[None]:
        """As slow as an emulated device, where there is one; noted, where somebody takes notes."""
        number = len(hidden) * num_layers
        if self.wire.log is not None:
            self.wire.log.append(Worked(kind, number))
        return self._pacer.section(kind, number) if self._pacer else nullcontext()


def _peak_memory_bytes(device: torch.device) -> int:
    if is_accelerator(device):
        most: int = torch.get_device_module(device).max_memory_allocated(device)
        return most
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
