"""From the traced step of a few blocks to the numbers of the whole model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from drystone.estimate.module.trace import (
    OUTSIDE,
    BlockTrace,
    ModuleTrace,
    OutsideTrace,
    Phase,
    Span,
    TraceRequest,
)
from drystone.run.train.tracing.blocks import Block, Blocks
from drystone.run.train.tracing.kernels import measure_step
from drystone.run.train.tracing.timeline import LiveBytes, RawSpan, Recorder, stretch, template_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What can be counted on shapes alone."""

    num_params: int = 0
    num_trainable_params: int = 0
    weights_bytes: int = 0
    buffers_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FullCounts:
    """The counts of the full depth, taken before any block is left out."""

    by_kind: dict[int, Counts]
    outside: Counts


def count_full_depth(
    module: nn.Module, blocks: Blocks, *, dtype: torch.dtype, live: LiveBytes
) -> FullCounts:
    """Count every tensor once; what several blocks share belongs to the outside."""
    owners: dict[int, set[int]] = {}
    for index, block in enumerate(blocks.every):
        for tensor in _tensors(block.module):
            owners.setdefault(id(tensor), set()).add(index)
    inside = {id(block.module) for block in blocks.every}
    for tensor in _tensors_outside(module, inside):
        owners.setdefault(id(tensor), set()).add(OUTSIDE)
    tensors = {id(tensor): tensor for tensor in _tensors(module)}
    held: dict[int, list[torch.Tensor]] = {}
    for key, owner in owners.items():
        held.setdefault(next(iter(owner)) if len(owner) == 1 else OUTSIDE, []).append(tensors[key])
    by_kind: dict[int, Counts] = {}
    for index, block in enumerate(blocks.every):
        by_kind.setdefault(block.kind, _counts(held.get(index, []), dtype, live))
    return FullCounts(by_kind=by_kind, outside=_counts(held.get(OUTSIDE, []), dtype, live))


def summarise(
    *,
    request: TraceRequest,
    module: nn.Module,
    blocks: Blocks,
    counts: FullCounts,
    recorder: Recorder,
    inputs_bytes: int,
    seconds: float,
) -> ModuleTrace:
    """Put the trace of the whole model together."""
    params = list(module.parameters())
    whole_step = measure_step(params, request, recorder.live)
    owned = {
        block.kind: _own_params(template_of(blocks, block.kind), blocks, module)
        for block in blocks.kept
    }
    temporaries = whole_step.temporaries_bytes
    for kind, own in owned.items():
        omitted = len(blocks.of_kind(kind)) - len(blocks.of_kind(kind, kept=True))
        if omitted:
            ids = {id(tensor) for tensor in own}
            without = measure_step([p for p in params if id(p) not in ids], request, recorder.live)
            temporaries += omitted * (whole_step.temporaries_bytes - without.temporaries_bytes)
    stretched = stretch(recorder.spans, blocks)
    kinds = tuple(
        _block_trace(kind, blocks, counts.by_kind[kind], recorder, own, whole_step.state_bytes)
        for kind, own in sorted(owned.items())
    )
    in_blocks = {id(p) for block in blocks.kept for p in _own_params(block, blocks, module)}
    around = [p for p in params if id(p) not in in_blocks]
    outside_spans = [span for span, block in stretched if block is None]
    outside = OutsideTrace(
        **_as_table(counts.outside),
        gradients_bytes=_gradients_bytes(around, recorder.live),
        optimizer_bytes=sum(whole_step.state_bytes.get(id(p), 0) for p in around),
        head_peak_bytes=_head_peak_bytes(recorder.spans),
        forward_flops=sum(s.flops for s in outside_spans if s.phase is Phase.FORWARD),
        backward_flops=sum(s.flops for s in outside_spans if s.phase is Phase.BACKWARD),
    )
    return ModuleTrace(
        request=request,
        module=type(module).__name__,
        blocks=kinds,
        outside=outside,
        timeline=tuple(_span(span, block) for span, block in stretched),
        inputs_bytes=inputs_bytes,
        step_temporaries_bytes=temporaries,
        num_blocks_traced=len(blocks.kept),
        torch_version=torch.__version__,
        trace_seconds=seconds,
    )


def _block_trace(
    kind: int,
    blocks: Blocks,
    counts: Counts,
    recorder: Recorder,
    own: list[nn.Parameter],
    state_bytes: dict[int, int],
) -> BlockTrace:
    block = template_of(blocks, kind)
    spans = [span for span in recorder.spans if span.is_block and span.block is block]
    forward = next((span for span in spans if span.phase is Phase.FORWARD), None)
    backward = next((span for span in spans if span.phase is Phase.BACKWARD), None)
    return BlockTrace(
        name=type(block.module).__name__,
        path=block.path,
        count=len(blocks.of_kind(kind)),
        is_recomputed=block.is_recomputed,
        **_as_table(counts),
        gradients_bytes=_gradients_bytes(own, recorder.live),
        optimizer_bytes=sum(state_bytes.get(id(p), 0) for p in own),
        saved_bytes=_saved_bytes(block, recorder.spans),
        output_bytes=recorder.outputs_bytes.get(id(block), 0),
        forward_peak_bytes=forward.peak_bytes - forward.start_bytes if forward else 0,
        backward_peak_bytes=backward.peak_bytes - backward.start_bytes if backward else 0,
        forward_flops=forward.flops if forward else 0,
        backward_flops=backward.flops if backward else 0,
    )


def _saved_bytes(block: Block, spans: list[RawSpan]) -> int:
    """What is alive after its forward pass and was not before, its input let go."""
    own = [span for span in spans if span.block is block and span.phase is Phase.FORWARD]
    return max(0, own[-1].end_bytes - own[0].start_bytes) if own else 0


def _span(span: RawSpan, block: Block | None) -> Span:
    return Span(
        block=OUTSIDE if block is None else block.kind,
        phase=span.phase,
        change_bytes=span.end_bytes - span.start_bytes,
        gradients_bytes=span.gradients_bytes,
        peak_bytes=span.peak_bytes - span.start_bytes,
    )


def _head_peak_bytes(spans: list[RawSpan]) -> int:
    """What follows the last block, forward and backward, above where it began."""
    forward = [span for span in spans if span.phase is Phase.FORWARD]
    backward = [span for span in spans if span.phase is Phase.BACKWARD]
    start = forward[-1].start_bytes
    return max(forward[-1].peak_bytes, backward[0].peak_bytes) - start


def _own_params(block: Block, blocks: Blocks, module: nn.Module) -> list[nn.Parameter]:
    """The parameters that only this block has."""
    inside = {id(block.module) for block in blocks.kept}
    shared = {
        id(p) for other in blocks.kept if other is not block for p in other.module.parameters()
    }
    shared |= {id(p) for p in _tensors_outside(module, inside)}
    return [p for p in block.module.parameters() if id(p) not in shared]


def _tensors(module: nn.Module) -> Iterable[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _tensors_outside(module: nn.Module, inside: set[int]) -> Iterable[torch.Tensor]:
    """Parameters and buffers of everything but the blocks."""
    if id(module) in inside:
        return
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)
    for child in module.children():
        yield from _tensors_outside(child, inside)


def _counts(tensors: list[torch.Tensor], dtype: torch.dtype, live: LiveBytes) -> Counts:
    def size(tensor: torch.Tensor) -> int:
        wide = tensor.is_floating_point() and tensor.element_size() > 1
        return live.rounded(tensor.numel() * (dtype.itemsize if wide else tensor.element_size()))

    params = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
    return Counts(
        num_params=sum(param.numel() for param in params),
        num_trainable_params=sum(param.numel() for param in params if param.requires_grad),
        weights_bytes=sum(size(param) for param in params),
        buffers_bytes=sum(
            size(tensor) for tensor in tensors if not isinstance(tensor, nn.Parameter)
        ),
    )


def _gradients_bytes(params: list[nn.Parameter], live: LiveBytes) -> int:
    return sum(live.size_bytes(param.grad) for param in params if param.grad is not None)


def _as_table(counts: Counts) -> dict[str, int]:
    return {name: getattr(counts, name) for name in Counts.__dataclass_fields__}
