"""Can a module of the user's own be trained as it is, and what must a planner know of it?

Torch-free: a process of its own (`python -m drystone.run.train.tracing.probe`) looks for the
blocks, runs one step the way the engine does, over tensors without contents, and traces the module
for one and for two samples. What lies beyond is taken as a straight line. Answers are cached by the
contents of the user's files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from drystone.describe.layout import Layout
from drystone.describe.model_source import ModuleReference
from drystone.describe.module_spec import ModuleSpec
from drystone.describe.recipe import Recipe, Recompute, RecomputeKind
from drystone.errors import InvalidSpec
from drystone.estimate.module.trace import BlockTrace, ModuleTrace, parse_trace
from drystone.estimate.module.tracer import TIMEOUT_SECONDS, recalled_answer, trace_request

_PROBE = "drystone.run.train.tracing.probe"


def probe_module(
    found: ModuleReference,
    recipe: Recipe,
    *,
    timeout_seconds: float = TIMEOUT_SECONDS,
    cache_folder: Path | None = None,
) -> ModuleSpec:
    """What a job needs to know of a module; raises with the reason where it cannot be trained."""
    layered = replace(recipe, recompute=Recompute(kind=RecomputeKind.FULL))
    request = trace_request(
        found.path, found.function, recipe=layered, layout=Layout(dp=1, micro_batch=1)
    )
    answer = recalled_answer(
        _PROBE, request, timeout_seconds=timeout_seconds, cache_folder=cache_folder
    )
    one, two = (parse_trace(table, where=request.path) for table in answer["traces"])
    return _spec(found, one, two, blocks=str(answer["blocks"]), vocab_size=answer["vocab_size"])


def _spec(
    found: ModuleReference, one: ModuleTrace, two: ModuleTrace, *, blocks: str, vocab_size: int
) -> ModuleSpec:
    if any(block.path != blocks for block in one.blocks) or not one.blocks:
        raise InvalidSpec(f"its blocks are not all in {blocks}", where=str(found.path))

    def largest(trace: ModuleTrace, size: Callable[[BlockTrace], int]) -> float:
        return float(max(size(block) for block in trace.blocks))

    def line(size: Callable[[ModuleTrace], float]) -> tuple[float, float]:
        return size(one), max(0.0, size(two) - size(one))

    hidden = line(lambda trace: largest(trace, lambda block: block.output_bytes))
    inside = line(lambda trace: largest(trace, lambda block: block.backward_peak_bytes))
    outside = line(lambda trace: float(trace.outside.head_peak_bytes))
    number = one.num_blocks
    forward = sum(block.count * block.forward_flops for block in one.blocks) / number
    backward = sum(block.count * block.backward_flops for block in one.blocks) / number
    again = sum(b.count * b.forward_flops for b in one.blocks if b.is_recomputed) / number
    return ModuleSpec(
        name=f"{found.path.name}:{found.function}",
        path=str(found.path.resolve()),
        function=found.function,
        block_list=blocks,
        num_layers=number,
        vocab_size=vocab_size,
        seq_len=one.request.seq_len,
        block_params=int(largest(one, lambda block: block.num_params)),
        outer_params=one.outside.num_params,
        num_params=one.num_params,
        block_forward_flops=forward,
        block_backward_flops=max(0.0, backward - again),
        outer_flops=float(one.outside.forward_flops + one.outside.backward_flops),
        first_hidden_bytes=hidden[0],
        further_hidden_bytes=hidden[1],
        first_block_bytes=inside[0],
        further_block_bytes=inside[1],
        first_outer_bytes=outside[0],
        further_outer_bytes=outside[1],
    )
