"""One training step, cut at the borders of the blocks, and stretched to the full depth.

Hooks before and after each block's forward cut the forward pass. Hooks on the tensors that leave
and enter a block cut the backward pass: the gradient of a block's output is complete exactly when
the backward pass of what follows it has ended. Recomputation runs inside a block's backward span.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from drystone.estimate.module.trace import Phase
from drystone.run.train.tracing.blocks import Block, Blocks

CUDA_GRANULE_BYTES = 512  # the caching allocator hands out multiples of it (CUDACachingAllocator)


class LiveBytes(TorchDispatchMode):
    """Adds up the storages that are alive, and the FLOPs of what runs."""

    def __init__(self, *, granule_bytes: int = 1) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.flops = 0
        self._granule_bytes = granule_bytes
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._flop_formulas = _flop_formulas()
        self._device_of = torch.ops.prim.device.default

    def size_bytes(self, tensor: torch.Tensor) -> int:
        """What this tensor's storage takes from the allocator."""
        return self.rounded(tensor.untyped_storage().nbytes())

    def rounded(self, num_bytes: int) -> int:
        """What an allocation of `num_bytes` takes."""
        return -(-num_bytes // self._granule_bytes) * self._granule_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, then count what it returned."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is self._device_of:  # asked thousands of times, allocates nothing
            return result
        formula = self._flop_formulas.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, torch.Tensor):
                self._watch(one)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return result

    def _watch(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._watched:
            return
        size_bytes = self.rounded(storage.nbytes())

        def forget(_: object) -> None:
            self.live_bytes -= size_bytes
            self._watched.pop(key, None)

        self._watched[key] = weakref.ref(storage, forget)
        self.live_bytes += size_bytes


def _flop_formulas() -> dict[Any, Callable[..., int]]:
    """The table of torch, and the fused attention of CPU, which is missing there."""

    def attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_flop_count(query.shape, key.shape, value.shape))

    def attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))

    aten = torch.ops.aten
    return {
        **flop_registry,
        aten._scaled_dot_product_flash_attention_for_cpu: attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
    }


class CalledTwice(Exception):
    """A block runs more than once in a forward pass, so that its spans cannot be told apart."""


@dataclass(slots=True, kw_only=True)
class RawSpan:
    """A stretch of the traced step. After a block: what lies between it and the next one."""

    phase: Phase
    block: Block | None  # the block it is, or that it follows in the order of the forward pass
    is_block: bool
    start_bytes: int
    end_bytes: int = 0
    peak_bytes: int = 0
    gradients_bytes: int = 0
    flops: int = 0


@dataclass(slots=True, kw_only=True)
class Recorder:
    """Cuts a running step into spans."""

    live: LiveBytes
    spans: list[RawSpan] = field(default_factory=list)
    outputs_bytes: dict[int, int] = field(default_factory=dict)  # by id of the block
    _seen: set[int] = field(default_factory=set)
    _last: Block | None = None  # the block that was entered last, in the forward pass

    def cut(self, block: Block | None, phase: Phase, *, is_block: bool) -> None:
        """End the current span and begin the next."""
        self.finish()
        live = self.live
        live.peak_bytes, live.flops = live.live_bytes, 0
        self.spans.append(
            RawSpan(phase=phase, block=block, is_block=is_block, start_bytes=live.live_bytes)
        )

    def finish(self) -> None:
        """End the current span."""
        if self.spans:
            span = self.spans[-1]
            span.end_bytes, span.peak_bytes = self.live.live_bytes, self.live.peak_bytes
            span.flops = self.live.flops

    def begin_backward(self) -> None:
        """The loss is there: what follows the last block has its backward pass now."""
        self.cut(self._last, Phase.BACKWARD, is_block=False)

    def attach(self, module: nn.Module, blocks: Blocks) -> None:
        """Hook the traced blocks and every parameter."""
        for block in blocks.kept:
            block.module.register_forward_pre_hook(self._entering(block), with_kwargs=True)
            block.module.register_forward_hook(self._leaving(block))
        for param in module.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self._count_gradient)

    def _count_gradient(self, param: torch.Tensor) -> None:
        if param.grad is not None:
            self.spans[-1].gradients_bytes += self.live.size_bytes(param.grad)

    def _entering(self, block: Block) -> Any:
        before: list[Block | None] = [None]

        def leave_backward(_: torch.Tensor) -> None:
            if self.spans[-1].block is block and self.spans[-1].is_block:
                self.cut(before[0], Phase.BACKWARD, is_block=False)

        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            if id(block) in self._seen:
                raise CalledTwice
            self._seen.add(id(block))
            before[0], self._last = self._last, block
            entering = _first_with_gradient((args, kwargs))
            if entering is not None:
                entering.register_hook(leave_backward)
            self.cut(block, Phase.FORWARD, is_block=True)

        return hook

    def _leaving(self, block: Block) -> Any:
        def enter_backward(_: torch.Tensor) -> None:
            self.cut(block, Phase.BACKWARD, is_block=True)

        def hook(_: nn.Module, __: Any, output: Any) -> None:
            leaving = _first_with_gradient(output)
            if leaving is not None:
                leaving.register_hook(enter_backward)
                self.outputs_bytes[id(block)] = self.live.size_bytes(leaving)
            self.cut(block, Phase.FORWARD, is_block=False)

        return hook


def stretch(spans: list[RawSpan], blocks: Blocks) -> list[tuple[RawSpan, Block | None]]:
    """The spans of the full depth, each with the block it belongs to (None: outside of blocks).

    A block left out repeats the spans of its kind's template, and stands where it stood.
    """
    kept = {id(block) for block in blocks.kept}
    follows: defaultdict[int, list[Block]] = defaultdict(list)
    anchor: Block | None = None
    for block in blocks.every:
        if id(block) in kept:
            anchor = block
        elif anchor is not None:
            follows[id(anchor)].append(block)
    forward = [span for span in spans if span.phase is Phase.FORWARD]
    backward = [span for span in spans if span.phase is Phase.BACKWARD]
    stretched = _stretched(forward, follows, blocks)
    # Backward runs from the end: stretch its mirror image, where "following" means the same.
    return stretched + _stretched(backward[::-1], follows, blocks)[::-1]


def _stretched(
    spans: list[RawSpan], follows: dict[int, list[Block]], blocks: Blocks
) -> list[tuple[RawSpan, Block | None]]:
    by_block: defaultdict[int, list[RawSpan]] = defaultdict(list)
    for span in spans:
        by_block[id(span.block)].append(span)
    result: list[tuple[RawSpan, Block | None]] = []
    for index, span in enumerate(spans):
        result.append((span, span.block if span.is_block else None))
        ends = index + 1 == len(spans) or spans[index + 1].block is not span.block
        if not ends or span.block is None:
            continue
        for omitted in follows.get(id(span.block), ()):
            template = template_of(blocks, omitted.kind)
            result += [(one, omitted if one.is_block else None) for one in by_block[id(template)]]
    return result


def template_of(blocks: Blocks, kind: int) -> Block:
    """The traced block that stands for the others of its kind."""
    kept = blocks.of_kind(kind, kept=True)
    return kept[min(1, len(kept) - 1)]


def _first_with_gradient(values: Any) -> torch.Tensor | None:
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            return leaf
    return None
