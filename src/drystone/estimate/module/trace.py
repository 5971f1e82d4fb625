"""Trace of a torch module: parameters, bytes and FLOPs, by block and along one training step.

Torch-free on purpose. The tracer (`drystone.run.train.tracing.trace`) runs in a process of its own
and writes a `ModuleTrace` as JSON; this file reads it back and checks it.

The heart of it is the timeline: the training step of one micro-batch, cut into spans at the borders
of the repeated blocks. Each span says by how much it changes the bytes that are alive, how many of
those are gradients, and how far above its start it reaches. Walking along the timeline gives the
peak of any split that leaves the arithmetic alone (data parallel, ZeRO): see `tracer.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Annotated, Any

import msgspec

from drystone.describe.recipe import AttentionKernel, Optimizer, RecomputeKind, StepKernel
from drystone.errors import InvalidSpec, UnreadableFile

FORMAT = 2  # raised whenever the meaning of a stored trace changes
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
Count = Annotated[int, msgspec.Meta(ge=0)]
OUTSIDE = -1  # the "block" of a span that lies before, between or after the blocks


class Kernels(StrEnum):
    """Whose kernels are assumed where devices save different tensors or round differently."""

    CUDA = "cuda"  # dropout masks of one byte, fused attention with dropout, 512-byte allocations
    CPU = "cpu"  # exactly what torch does on CPU: for comparing with its own MemTracker


class Phase(StrEnum):
    """The parts of one training step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """Which module to trace, and how it would be trained on one device."""

    path: str  # the Python file
    function: str  # takes no argument and returns the torch.nn.Module
    micro_batch: int
    seq_len: int
    dtype: str = "bfloat16"  # of weights and gradients
    autocast: str = ""  # number format of torch.autocast; empty: compute as the weights are
    has_master: bool = False  # the optimizer keeps and updates an fp32 copy of the weights
    optimizer: Optimizer = Optimizer.ADAM
    step_kernel: StepKernel = StepKernel.FUSED
    recompute: RecomputeKind = RecomputeKind.NONE
    recompute_every: int = 1
    attention: AttentionKernel = AttentionKernel.FUSED
    kernels: Kernels = Kernels.CUDA
    is_whole: bool = False  # trace every block instead of a few of each kind

    def __post_init__(self) -> None:
        for name in ("micro_batch", "seq_len", "recompute_every"):
            if getattr(self, name) < 1:
                raise InvalidSpec(f"trace: {name} is {getattr(self, name)}, must be >= 1")
        if self.dtype not in DTYPE_BYTES:
            raise InvalidSpec(f"trace: dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        if self.autocast and self.autocast not in DTYPE_BYTES:
            raise InvalidSpec(f"trace: autocast {self.autocast!r} is not known")
        if self.recompute is RecomputeKind.SELECTIVE:
            raise InvalidSpec(
                "trace: selective recomputation is not known for an arbitrary module",
                hint="Use none, full, or full/2; or recompute inside the module itself",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTrace:
    """One kind of repeated block. Every number is of one block and one micro-batch."""

    name: str  # its class
    path: str  # the list it stands in, as in `model.layers`
    count: Count  # blocks of this kind in the whole model
    is_recomputed: bool
    num_params: Count
    num_trainable_params: Count
    weights_bytes: Count
    buffers_bytes: Count
    gradients_bytes: Count
    optimizer_bytes: Count
    saved_bytes: Count  # what its forward pass leaves alive, its output included
    output_bytes: Count  # the boundary: what must be kept even if all else is recomputed
    forward_peak_bytes: Count  # above what was alive when its forward pass began
    backward_peak_bytes: Count  # above what was alive when its backward pass began
    forward_flops: Count
    backward_flops: Count  # with the recomputation, if there is one


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideTrace:
    """Everything that is not a repeated block: embeddings, last norm, head, loss."""

    num_params: Count
    num_trainable_params: Count
    weights_bytes: Count
    buffers_bytes: Count
    gradients_bytes: Count
    optimizer_bytes: Count
    # After the last block: head, loss and their backward pass, above its start.
    head_peak_bytes: Count
    forward_flops: Count
    backward_flops: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One stretch of the training step."""

    block: int  # index into `ModuleTrace.blocks`, or OUTSIDE
    phase: Phase
    change_bytes: int  # bytes alive at its end less those at its start
    gradients_bytes: int  # of those, gradients of parameters
    peak_bytes: int  # most bytes alive at any time within it, less those at its start

    def __post_init__(self) -> None:
        if self.peak_bytes < 0 or self.peak_bytes < self.change_bytes:
            raise InvalidSpec(
                f"trace: a span peaks at {self.peak_bytes} but ends at {self.change_bytes} bytes "
                "above its start"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTrace:
    """One module, traced for one micro-batch; extrapolated to its full depth."""

    request: TraceRequest
    module: str  # its class
    blocks: tuple[BlockTrace, ...]  # one of each kind
    outside: OutsideTrace
    timeline: tuple[Span, ...]  # of the full depth, forward and backward
    inputs_bytes: int
    step_temporaries_bytes: int  # above weights, gradients and state, while the optimizer steps
    num_blocks_traced: int
    torch_version: str
    trace_seconds: float  # without importing torch

    def __post_init__(self) -> None:
        for span in self.timeline:
            if not OUTSIDE <= span.block < len(self.blocks):
                raise InvalidSpec(
                    f"trace: the timeline names block kind {span.block}, which is unknown"
                )

    @property
    def num_blocks(self) -> int:
        """Repeated blocks in the whole model."""
        return sum(block.count for block in self.blocks)

    @property
    def num_params(self) -> int:
        """Parameters of the whole model, shared ones once."""
        return int(self._total("num_params"))

    @property
    def num_trainable_params(self) -> int:
        """Parameters that get a gradient."""
        return int(self._total("num_trainable_params"))

    @property
    def weights_bytes(self) -> int:
        """All parameters."""
        return self._total("weights_bytes")

    @property
    def buffers_bytes(self) -> int:
        """All buffers."""
        return self._total("buffers_bytes")

    @property
    def gradients_bytes(self) -> int:
        """Gradients of all parameters that got one."""
        return self._total("gradients_bytes")

    @property
    def optimizer_bytes(self) -> int:
        """State of the optimizer, with the fp32 copy of the weights where there is one."""
        return self._total("optimizer_bytes")

    @property
    def forward_flops(self) -> int:
        """FLOPs of one forward pass of one micro-batch; attention counted without causal saving."""
        return self._total("forward_flops")

    @property
    def backward_flops(self) -> int:
        """FLOPs of one backward pass of one micro-batch, with recomputation."""
        return self._total("backward_flops")

    @property
    def peak_bytes(self) -> int:
        """Peak of one training step on one device in the steady state, as MemTracker counts it."""
        persistent = self.weights_bytes + self.buffers_bytes + self.optimizer_bytes
        live = peak = persistent + self.inputs_bytes
        for span in self.timeline:
            peak = max(peak, live + span.peak_bytes)
            live += span.change_bytes
        in_step = persistent + self.inputs_bytes
        in_step += self.gradients_bytes + self.step_temporaries_bytes
        return max(peak, in_step)

    def _total(self, name: str) -> int:
        blocks = sum(block.count * getattr(block, name) for block in self.blocks)
        return int(getattr(self.outside, name) + blocks)


def trace_table(trace: ModuleTrace) -> dict[str, Any]:
    """A trace as a table that JSON can hold."""
    return {"format": FORMAT, **asdict(trace)}


def parse_trace(table: Mapping[str, Any], *, where: str = "trace") -> ModuleTrace:
    """A trace from the table of `trace_table`; anything else is refused."""
    try:
        if table.get("format") != FORMAT:
            raise ValueError("it was written by another version")
        found = msgspec.convert(table, ModuleTrace)
        # A dataclass passes over keys that it does not have, so what was read is written again.
        if json.dumps(trace_table(found), sort_keys=True) != json.dumps(table, sort_keys=True):
            raise ValueError("it says more than a trace does")
        return found
    except (ValueError, AttributeError, InvalidSpec) as error:
        raise UnreadableFile(f"not a trace of a module: {error}", where=where) from None


def parse_request(table: Mapping[str, Any]) -> TraceRequest:
    """A request from its JSON table."""
    return msgspec.convert(table, TraceRequest)
