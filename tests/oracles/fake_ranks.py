"""How much memory does a rank take? Asked of the engine itself, on tensors that hold nothing.

The engine runs a step as one rank of many on fake tensors: they have shapes and no bytes, and the
ledger counts what they would hold. Collectives end at once. So every rank of every plan can be
asked, for models of any size, in seconds. The peak of each part of a step grows evenly with the
number of equal blocks, so a deep model is asked at two depths and the lines through them continued
(`peak_of_rank`): one for what comes before the backward passes, one for these, one for the end.

Not in it: the context of the device, buffers of NCCL, workspaces of libraries, and what the
allocator loses by rounding and fragmentation.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from drystone.describe.model import ModelSpec
from drystone.describe.recipe import Recipe, Tuning
from drystone.run.train.checkpoint.checkpoint import make_optimizer_state
from drystone.run.train.collectives import (
    Form,
    Log,
    Pending,
    Wire,
    choose_gather,
    choose_reduce,
)
from drystone.run.train.data import RankWork, micro_batches
from drystone.run.train.emulate import Ledger, active_ledger
from drystone.run.train.models.layered import LayeredModel
from drystone.run.train.models.lora import add_adapters
from drystone.run.train.models.transformer import build_model
from drystone.run.train.trainer import MakeOptimizer
from drystone.run.train.uneven.engine import Engine

# Blocks at which a deep model is asked. Where only adapters are trained nothing but blocks is
# reduced, and between the first two and the last two reductions there must be one in both.
_DEPTHS = (4, 6)


class FakeWire(Wire):
    """One rank of many, alone: collectives take the memory that they take on NCCL, and end."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__()
        self.rank, self.num_ranks, self.backend = rank, num_ranks, "nccl"
        self.peaks: list[int] = []  # between the reductions, where a ledger counts

    def _gather(
        self, piece: torch.Tensor, flat: torch.Tensor, cuts: Sequence[int], form: Form | None
    ) -> Pending:
        sizes = _sizes(cuts)
        chosen = form or choose_gather(sizes, flat.element_size(), self.backend)
        return _holding(flat.new_empty(sum(_padding(sizes, chosen))))

    def _reduce(
        self, flat: torch.Tensor, out: torch.Tensor, cuts: Sequence[int], form: Form | None
    ) -> Pending:
        ledger = active_ledger()
        if ledger is not None:
            self.peaks.append(ledger.peak_bytes)
            ledger.reset_peak()
        sizes = _sizes(cuts)
        chosen = form or choose_reduce(sizes, flat.element_size(), self.backend)
        return _holding(flat.new_empty(sum(_padding(sizes, chosen))))

    def sum(self, values: torch.Tensor, *, kind: str = "sum") -> Pending:
        """Nothing is added."""
        return self._noted(kind, values.nbytes, _holding(None))

    def read(self, values: torch.Tensor) -> list[float]:
        """Fake tensors have no numbers; any will do."""
        return [1.0] * values.numel()


def _sizes(cuts: Sequence[int]) -> list[int]:
    return [end - start for start, end in pairwise(cuts)]


def _padding(sizes: Sequence[int], form: Form) -> tuple[int, ...]:
    """Elements of the table, and of one's own row in it, where pieces are padded."""
    return (len(sizes) * max(sizes), max(sizes)) if form is Form.PADDED else ()


def _holding(buffer: torch.Tensor | None) -> Pending:
    """Ends at once, and keeps the buffer until then."""
    held = [buffer]
    return Pending((), held.clear)


def logs_of_step(
    model: ModelSpec, works: Sequence[RankWork], *, seq_len: int, is_small: bool = False
) -> list[Log]:
    """What every rank computes, begins and waits for in a step; `tests/oracles/replay.py` reads it.

    A small model is faster on real tensors; their values mean nothing.
    """
    logs: list[Log] = []
    for rank in range(len(works)):
        wire = FakeWire(rank, len(works))
        built = build_model(model, on_meta=True)
        with nullcontext() if is_small else FakeTensorMode(allow_non_fake_inputs=True):
            engine = Engine(built, [work.state_share for work in works], wire=wire)
            wire.log = []
            runs = micro_batches(works, rank, 0)
            engine.compute_gradients(
                [torch.zeros(len(run), seq_len + 1, dtype=torch.long) for run in runs]
            )
        logs.append(wire.log)
    return logs


def peak_of_rank(
    model: ModelSpec,
    recipe: Recipe,
    works: Sequence[RankWork],
    rank: int,
    *,
    optimizer: MakeOptimizer,
    dtype: torch.dtype = torch.bfloat16,
    offload: bool = True,
) -> float:
    """Bytes of tensors of a rank at most in a step, with optimizer state.

    Unequal shares are not asked at other depths, for they cut a short model in other places.
    """
    depths = [model.num_layers]
    is_even = len({work.state_share for work in works}) == 1
    if is_even and len(model.stack) == 1 and model.num_layers > _DEPTHS[-1]:
        depths = list(_DEPTHS)
    found = []
    for depth in depths:
        ((block, _), *others) = model.stack
        spec = model if others else replace(model, stack=((block, depth),))
        wire = FakeWire(rank, len(works))
        with FakeTensorMode(allow_non_fake_inputs=True), Ledger() as ledger:
            engine = Engine(
                _build(spec, recipe),
                [work.state_share for work in works],
                wire=wire,
                dtype=dtype,
                offload=offload,
            )
            found.append(_step_peaks(engine, works, recipe.seq_len, ledger, optimizer))
    if len(found) == 1:
        return float(max(found[0]))
    steps = (model.num_layers - depths[0]) / (depths[1] - depths[0])
    return max(few + steps * (more - few) for few, more in zip(*found, strict=True))


def _build(model: ModelSpec, recipe: Recipe) -> LayeredModel:
    built = build_model(model, on_meta=True)
    if recipe.tuning is not Tuning.FULL:
        add_adapters(built, recipe.lora, is_quantised=recipe.tuning is Tuning.QLORA)
    return built


def _step_peaks(
    engine: Engine,
    works: Sequence[RankWork],
    seq_len: int,
    ledger: Ledger,
    make_optimizer: MakeOptimizer,
) -> tuple[int, int, int]:
    """Peaks to the second reduction, between, and from the last but one on."""
    wire = engine.wire
    assert isinstance(wire, FakeWire)
    optimizer = make_optimizer(engine.parameter_groups())
    runs = micro_batches(works, wire.rank, 0)
    batches = [torch.zeros(len(run), seq_len + 1, dtype=torch.long) for run in runs]
    make_optimizer_state(optimizer)
    ledger.reset_peak()
    engine.compute_gradients(batches)
    optimizer.step()
    peaks = [*wire.peaks, ledger.peak_bytes]
    # Of a few blocks nothing is between; such a model is asked whole, never continued.
    return max(peaks[:2]), max(peaks[2:-2], default=min(peaks)), max(peaks[-2:])
