"""One training step over unequal ranks, layer by layer, equal to that of one device.

Theory of operation. The order of loops is swapped: every micro-batch passes a layer before the next
layer is gathered (layer-major accumulation, Cephalo, arXiv:2411.01075). A layer is gathered once in
the forward pass and once in the backward pass, and its gradient is reduced once, so the collectives
of a step are the same on every rank, however many micro-batches it has; a rank with none takes part
too. Only what enters a layer is kept; the backward pass computes the layer again from it.

Losses are summed, divided by what counts over all ranks, and gradients are summed, so a rank weighs
as much as its samples. The next layer is gathered while this one is computed.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from drystone.errors import InvalidSpec
from drystone.run.runtime.collectives import Pending, Wire
from drystone.run.runtime.emulate import Pacer
from drystone.run.runtime.layered import Batch, Extras, LayeredModel
from drystone.run.runtime.shard import Owned, Unit, cut_units


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step came to, over all ranks; the same on each of them, but for `seconds`."""

    loss: float  # the true mean
    gradient_norm: float  # of the whole gradient, before clipping
    weight: float  # tokens, or samples
    stop_asked: bool  # some rank was asked to leave
    compute_seconds: tuple[float, ...]  # by rank
    peak_memory_bytes: tuple[int, ...]  # by rank; on a processor that of the whole process
    seconds: dict[str, float]  # of this rank, by part


class Engine:
    """Holds a model in unequal pieces and takes steps with it."""

    def __init__(
        self,
        model: LayeredModel,
        shares: Sequence[float],
        *,
        wire: Wire | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        offload: bool = False,
        seed: int = 0,
        pacer: Pacer | None = None,
    ) -> None:
        self._pacer = pacer
        self.model, self.wire, self.seed = model, wire or Wire(), seed
        self.device = device or torch.device("cpu")
        if len(shares) != self.wire.num_ranks:
            raise InvalidSpec(f"{len(shares)} state shares for {self.wire.num_ranks} ranks")
        self._offload = offload and self.device.type == "cuda"
        self._lay_out(shares, dtype)
        self.num_steps = 0
        self.stop_asked = False
        self._seconds: dict[str, float] = {}
        self._reduction: Pending | None = None

    @property
    def owned(self) -> list[Owned]:
        """Every piece of a parameter that this rank holds."""
        return [one for unit in self.units for one in unit.owned]

    def parameter_groups(self, *, weight_decay: float = 0.0) -> list[dict[str, object]]:
        """For a torch optimizer: matrices decay, vectors do not. Either list may be empty."""
        trained = [one for one in self.owned if one.value.requires_grad]
        matrices = [one.value for one in trained if len(one.shape) > 1]
        vectors = [one.value for one in trained if len(one.shape) <= 1]
        return [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]

    def compute_gradients(self, batches: Sequence[Batch]) -> StepResult:
        """Forward and backward over this rank's micro-batches: each owned piece gets its `grad`."""
        self._seconds = dict.fromkeys(("forward", "backward", "gather", "reduce"), 0.0)
        weights = [self.model.weight(batch) for batch in batches]
        total = torch.tensor([sum(weights)], dtype=torch.float64, device=self.device)
        total_pending = self.wire.sum(total)
        self._order = self._gather_order()
        with torch.random.fork_rng(devices=self._rng_devices()):
            hidden, extras, kept = self._forward(batches)
            total_pending.wait()
            loss, gradients = self._head(batches, hidden, float(total))
            self._backward(batches, gradients, extras, kept)
        self._finish_reduction()
        self.num_steps += 1
        return self._result(loss, float(total))

    def clip_gradients(self, result: StepResult, most: float) -> None:
        """Scale the gradients so that their norm over all ranks is at most `most`."""
        scale = most / (result.gradient_norm + 1e-6)
        if scale < 1.0:
            for one in self.owned:
                if one.value.grad is not None:
                    one.value.grad.mul_(scale)

    def _lay_out(self, shares: Sequence[float], dtype: torch.dtype) -> None:
        """Sort the parameters into units, cut them, and take this rank's pieces."""
        for buffer in self.model.module.buffers():
            buffer.data = buffer.data.to(self.device)
        lists = self._unit_parameters()
        sizes = [sum(one.numel() for _, one in parameters) for _, parameters in lists]
        units = [
            Unit(name, parameters, cuts, wire=self.wire, device=self.device, dtype=dtype)
            for (name, parameters), cuts in zip(lists, cut_units(sizes, shares), strict=True)
        ]
        num_blocks = len(self.model.blocks)
        self.units = units
        self._blocks = units[:num_blocks]
        self._front, self._back = units[num_blocks], units[-1]  # one and the same where tied

    def _unit_parameters(self) -> list[tuple[str, list[tuple[str, nn.Parameter]]]]:
        names = {id(one): name for name, one in self.model.module.named_parameters()}
        groups = [(f"block {i}", list(one.parameters())) for i, one in enumerate(self.model.blocks)]
        front, back = list(self.model.front), list(self.model.back)
        if {id(one) for one in front} & {id(one) for one in back}:
            groups.append(("around", list({id(one): one for one in (*front, *back)}.values())))
        else:
            groups += [("front", front), ("back", back)]
        placed = [id(one) for _, parameters in groups for one in parameters]
        if len(placed) != len(set(placed)) or set(placed) != set(names):
            missing = [name for key, name in names.items() if key not in set(placed)]
            raise InvalidSpec(
                "every parameter must belong to one block, or to what is before or after them",
                hint=f"Not placed: {missing[:5]}" if missing else "Some are shared by blocks",
            )
        return [(name, [(names[id(p)], p) for p in group]) for name, group in groups]

    def _gather_order(self) -> list[Unit]:
        """Units in the order in which they are gathered; the last block stays for its backward."""
        return [
            self._front,
            *self._blocks,
            self._back,
            *reversed(self._blocks[:-1]),
            self._front,
        ]

    def _gather_next(self) -> Unit:
        """The next unit of the order, ready; the one after it is on its way."""
        with self._timed("gather"):
            unit = self._order.pop(0)
            unit.gather()
        if self._order and not self._order[0].is_gathered:
            self._order[0].start_gather()
        return unit

    def _forward(
        self, batches: Sequence[Batch]
    ) -> tuple[list[torch.Tensor], list[Extras], list[list[torch.Tensor]]]:
        """Through front and blocks without a graph; what enters each block is kept."""
        unit = self._gather_next()
        hidden, extras, kept = [], [], []
        with torch.no_grad():
            with self._timed("forward"):
                for index, batch in enumerate(batches):
                    self._seed(-1, index)
                    one, more = self.model.embed(batch)
                    hidden.append(one)
                    extras.append(more)
            unit.free()
            for layer in range(len(self._blocks)):
                unit = self._gather_next()
                with self._timed("forward"):
                    kept.append([self._put(one) for one in hidden])
                    for index, (entered, more) in enumerate(zip(hidden, extras, strict=True)):
                        with self._paced("forward", entered):
                            hidden[index] = self._run_block(layer, index, entered, more)
                if layer < len(self._blocks) - 1:
                    unit.free()
        return hidden, extras, kept

    def _head(
        self, batches: Sequence[Batch], hidden: list[torch.Tensor], total: float
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Losses, and their gradients with respect to what left the last block."""
        unit = self._gather_next()
        unit.begin_gradients()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        with self._timed("backward"):
            for index, batch in enumerate(batches):
                entered = hidden[index].detach().requires_grad_()
                with self._paced("head", entered):
                    self._seed(len(self._blocks), index)
                    loss = self.model.loss_sum(entered, batch)
                    loss_sum += loss.detach()
                    (loss / total).backward()
                    unit.fold_gradients()
                hidden[index] = _gradient(entered)  # in its place, so that the other is freed
        if unit is not self._front:
            self._start_reduction(unit)
        unit.free()
        return loss_sum, hidden

    def _backward(
        self,
        batches: Sequence[Batch],
        gradients: list[torch.Tensor],
        extras: list[Extras],
        kept: list[list[torch.Tensor]],
    ) -> None:
        """Back through the blocks, each computed again, then through the front."""
        for layer in reversed(range(len(self._blocks))):
            unit = self._blocks[layer]
            if not unit.is_gathered:
                unit = self._gather_next()
            unit.begin_gradients()
            entering = kept.pop()
            with self._timed("backward"):
                for index in range(len(batches)):
                    entered = self._get(entering[index]).detach().requires_grad_()
                    with self._paced("backward", entered):
                        left = self._run_block(layer, index, entered, extras[index])
                        left.backward(gradients[index])
                        unit.fold_gradients()
                    gradients[index] = _gradient(entered)
            self._start_reduction(unit)
            unit.free()
        unit = self._gather_next()
        if unit is not self._back:
            unit.begin_gradients()
        with self._timed("backward"):
            for index, batch in enumerate(batches):
                self._seed(-1, index)
                hidden, _ = self.model.embed(batch)
                if hidden.requires_grad:
                    hidden.backward(gradients[index])
                    unit.fold_gradients()
        self._start_reduction(unit)
        unit.free()

    def _run_block(
        self, layer: int, index: int, hidden: torch.Tensor, extras: Extras
    ) -> torch.Tensor:
        self._seed(layer, index)
        return self.model.run_block(layer, hidden, extras)

    def _start_reduction(self, unit: Unit) -> None:
        """One reduction is on its way at a time: the one before must have arrived."""
        self._finish_reduction()
        self._reduction = unit.start_reduce()

    def _finish_reduction(self) -> None:
        with self._timed("reduce"):
            if self._reduction is not None:
                self._reduction.wait()
        self._reduction = None

    def _result(self, loss_sum: torch.Tensor, total: float) -> StepResult:
        """Sum over the ranks what is only known in part: one small collective."""
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        for one in self.owned:
            if one.value.grad is not None:
                squares += one.value.grad.square().sum(dtype=torch.float64)
        num_ranks = self.wire.num_ranks
        numbers = torch.zeros(3 + 2 * num_ranks, dtype=torch.float64, device=self.device)
        numbers[0], numbers[1], numbers[2] = loss_sum, squares, float(self.stop_asked)
        numbers[3 + self.wire.rank] = self._seconds["forward"] + self._seconds["backward"]
        numbers[3 + num_ranks + self.wire.rank] = _peak_memory_bytes(self.device)
        self.wire.sum(numbers).wait()
        loss, square, stops, *by_rank = numbers.tolist()
        return StepResult(
            loss=loss / total,
            gradient_norm=square**0.5,
            weight=total,
            stop_asked=stops > 0,
            compute_seconds=tuple(by_rank[:num_ranks]),
            peak_memory_bytes=tuple(int(one) for one in by_rank[num_ranks:]),
            seconds=dict(self._seconds),
        )

    def _put(self, hidden: torch.Tensor) -> torch.Tensor:
        """Keep what enters a block: here, or in pinned host memory."""
        if not self._offload:
            return hidden
        host = torch.empty(hidden.shape, dtype=hidden.dtype, pin_memory=True)
        return host.copy_(hidden, non_blocking=True)

    def _get(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.to(self.device, non_blocking=True)

    def _seed(self, layer: int, index: int) -> None:
        """The same chance (dropout) when a layer is computed again."""
        key = ((self.seed * 1_000_003 + self.num_steps) * 65_537 + layer + 1) * 8_191
        torch.manual_seed((key + index * 4_099 + self.wire.rank) % 2**63)

    def _rng_devices(self) -> list[torch.device]:
        return [self.device] if self.device.type == "cuda" else []

    def _paced(self, kind: str, hidden: torch.Tensor) -> AbstractContextManager[None]:
        """As slow as an emulated device, where there is one."""
        return self._pacer.section(kind, len(hidden)) if self._pacer else nullcontext()

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[part] += time.perf_counter() - started


def _peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _gradient(entered: torch.Tensor) -> torch.Tensor:
    assert entered.grad is not None
    return entered.grad
