"""How much memory does a rank take? Asked of the engine itself, on tensors that hold nothing.

The engine runs a step as one rank of many on fake tensors: they have shapes and no bytes, and the
ledger counts what they would hold. Collectives end at once. So every rank of every plan can be
asked, for models of any size, in seconds. Peaks grow evenly with the number of equal blocks, so a
deep model is asked at two depths and the line through them continued (`peak_of_rank`).

Not in it: the context of the device, buffers of NCCL, workspaces of libraries, and what the
allocator loses by rounding and fragmentation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from drystone.describe.model import ModelSpec
from drystone.describe.recipe import Recipe, Tuning
from drystone.run.runtime.batch import RankWork
from drystone.run.runtime.collectives import Form, Pending, Wire, choose_gather, choose_reduce
from drystone.run.runtime.engine import Engine
from drystone.run.runtime.ledger import Ledger
from drystone.run.runtime.lora import add_adapters
from drystone.run.runtime.model import build_model
from drystone.run.runtime.trainer import MakeOptimizer

_DEPTHS = (2, 4)  # blocks at which a deep model is asked


class FakeWire(Wire):
    """One rank of many, alone: collectives take the memory that they take on NCCL, and end."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__()
        self.rank, self.num_ranks, self.backend = rank, num_ranks, "nccl"

    def _gather(
        self, piece: torch.Tensor, flat: torch.Tensor, cuts: Sequence[int], form: Form | None
    ) -> Pending:
        sizes = _sizes(cuts)
        chosen = form or choose_gather(sizes, flat.element_size(), self.backend)
        return _holding(flat.new_empty(sum(_padding(sizes, chosen))))

    def _reduce(
        self, flat: torch.Tensor, out: torch.Tensor, cuts: Sequence[int], form: Form | None
    ) -> Pending:
        sizes = _sizes(cuts)
        chosen = form or choose_reduce(sizes, flat.element_size(), self.backend)
        return _holding(flat.new_empty(sum(_padding(sizes, chosen))))

    def sum(self, values: torch.Tensor) -> Pending:
        """Nothing is added."""
        return _holding(None)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class FakePeak:
    """Bytes of one rank: before a step (weights and optimizer state), and at most."""

    state_bytes: float
    peak_bytes: float


def peak_of_rank(
    model: ModelSpec,
    recipe: Recipe,
    works: Sequence[RankWork],
    rank: int,
    *,
    optimizer: MakeOptimizer,
    dtype: torch.dtype = torch.bfloat16,
    offload: bool = True,
) -> FakePeak:
    """What a rank takes in its second step, when optimizer state is there."""
    if len(model.stack) > 1 or model.num_layers <= _DEPTHS[-1]:
        return _peak_at_depth(model, recipe, works, rank, optimizer, dtype, offload)
    ((block, depth),) = model.stack
    few, more = (
        _peak_at_depth(
            replace(model, stack=((block, one),)), recipe, works, rank, optimizer, dtype, offload
        )
        for one in _DEPTHS
    )
    steps = (depth - _DEPTHS[0]) / (_DEPTHS[1] - _DEPTHS[0])
    return FakePeak(
        state_bytes=few.state_bytes + steps * (more.state_bytes - few.state_bytes),
        peak_bytes=few.peak_bytes + steps * (more.peak_bytes - few.peak_bytes),
    )


def _peak_at_depth(
    model: ModelSpec,
    recipe: Recipe,
    works: Sequence[RankWork],
    rank: int,
    make_optimizer: MakeOptimizer,
    dtype: torch.dtype,
    offload: bool,
) -> FakePeak:
    built = build_model(model, on_meta=True)
    if recipe.tuning is not Tuning.FULL:
        add_adapters(built, recipe.lora)
    with FakeTensorMode(allow_non_fake_inputs=True), Ledger() as ledger:
        engine = Engine(
            built,
            [work.state_share for work in works],
            wire=FakeWire(rank, len(works)),
            dtype=dtype,
            offload=offload,
        )
        optimizer = make_optimizer(engine.parameter_groups())
        work, length = works[rank], recipe.seq_len + 1
        sizes = [work.micro_batch] * (work.batch // max(work.micro_batch, 1))
        sizes += (
            [work.batch % work.micro_batch] if work.batch and work.batch % work.micro_batch else []
        )
        batches = [torch.zeros(size, length, dtype=torch.long) for size in sizes]
        for _ in range(2):
            ledger.reset_peak()
            state = ledger.live_bytes
            engine.compute_gradients(batches)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return FakePeak(state_bytes=state, peak_bytes=ledger.peak_bytes)
