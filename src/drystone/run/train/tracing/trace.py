"""Trace one training step of any torch module, without allocating it.

    python -m drystone.run.train.tracing.trace REQUEST.json [ANSWER.json]

The request is a `TraceRequest` as JSON. The answer is `{"trace": ModuleTrace, "sources": [files]}`,
where the sources are the user's files that the trace depends on, or `{"error": {"message",
"where", "hint"}}`. Without a second argument it goes to standard output.

The user's function takes no argument and returns a `torch.nn.Module`. What the module is fed, and
how its loss is found, is described in `tracing/batch.py`. Repeated blocks are found
(`tracing/blocks.py`), a few of each kind are run forward and backward over fake tensors, and the
step is stretched to the full depth (`tracing/timeline.py`). A module that cannot be cut short is
traced whole.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from drystone.estimate.module.trace import (
    Kernels,
    ModuleTrace,
    Phase,
    TraceRequest,
    parse_request,
    trace_table,
)
from drystone.run.engines.agent.keeper import be_killed_first


def main(arguments: list[str]) -> int:
    """Read the request, trace, write the answer. The answer says whether it went well."""
    be_killed_first()
    request = parse_request(json.loads(Path(arguments[0]).read_text()))
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # a compiled module is traced as the plain one
    gc.disable()  # imports make no garbage, and looking for it takes a sixth of their time
    with contextlib.redirect_stdout(sys.stderr):  # what the user's file prints is not the answer
        answer = _answer(request)
    if len(arguments) > 1:
        Path(arguments[1]).write_text(json.dumps(answer))
    else:
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    sys.stderr.flush()
    # Tearing down torch and the user's imports takes up to half a second, for nothing.
    os._exit(1 if "error" in answer else 0)


def _answer(request: TraceRequest) -> dict[str, object]:
    from drystone.run.train.tracing.build import TraceFailure, last_line, user_line

    try:
        return {"trace": trace_table(trace(request)), "sources": user_sources(request.path)}
    except TraceFailure as failure:
        where, message, hint = failure.where or request.path, failure.message, failure.hint
    except Exception as error:
        where, message, hint = user_line(error, request.path), last_line(error), _advice(error)
    return {"error": {"message": message, "where": where, "hint": hint}}


def user_sources(path: str) -> list[str]:
    """The user's file and what was imported from beside it."""
    folder = Path(path).resolve().parent
    loaded = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    files = {Path(file).resolve() for file in loaded if file}
    near = {file for file in files if folder in file.parents and "site-packages" not in file.parts}
    return sorted(str(file) for file in near | {Path(path).resolve()})


def trace(request: TraceRequest, source: ModuleType | None = None) -> ModuleTrace:
    """Trace the module that the request names; whole, if it cannot be cut short.

    Whoever has imported its file already gives it as `source`.
    """
    from dataclasses import replace

    from drystone.run.train.tracing.build import load_source
    from drystone.run.train.tracing.timeline import CalledTwice

    source = load_source(request.path) if source is None else source
    if not request.is_whole:
        with contextlib.suppress(
            Exception
        ):  # without some of its blocks, forward may raise anything
            return _traced(source, request)
    whole = replace(request, is_whole=True)
    try:
        return replace(_traced(source, whole), request=request)
    except CalledTwice:
        return replace(_traced(source, whole, cut_at_blocks=False), request=request)


def _traced(
    source: ModuleType, request: TraceRequest, *, cut_at_blocks: bool = True
) -> ModuleTrace:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from drystone.run.train.tracing.blocks import Blocks, find_blocks
    from drystone.run.train.tracing.build import build_module, make_batch, materialise
    from drystone.run.train.tracing.kernels import chosen_kernels
    from drystone.run.train.tracing.summary import count_full_depth, summarise
    from drystone.run.train.tracing.timeline import CUDA_GRANULE_BYTES, LiveBytes, Recorder

    start_seconds = time.perf_counter()
    live = LiveBytes(granule_bytes=CUDA_GRANULE_BYTES if request.kernels is Kernels.CUDA else 1)
    module = build_module(source, request.function, request.path)
    dtype = getattr(torch, request.dtype)
    found = find_blocks(module, request)
    blocks = found if cut_at_blocks else Blocks(every=(), kept=())
    counts = count_full_depth(module, blocks, dtype=dtype, live=live)
    blocks.truncate()
    gc.freeze()
    gc.enable()  # from here on, tensors must die when they die in a real run
    with FakeTensorMode(allow_non_fake_inputs=True), chosen_kernels(request), live:
        materialise(module, dtype)
        before_bytes = live.live_bytes
        batch = make_batch(module, source, request)
        inputs_bytes = live.live_bytes - before_bytes
        recorder = Recorder(live=live)
        recorder.attach(module, blocks)
        for block in found.kept:
            if block.is_recomputed:
                _recompute(block.module, lambda: chosen_kernels(request))
        recorder.cut(None, Phase.FORWARD, is_block=False)
        with _autocast(request):
            loss = batch.loss_of(module, source)
        recorder.begin_backward()
        loss.backward()
        recorder.finish()
        del loss
        return summarise(
            request=request,
            module=module,
            blocks=blocks,
            counts=counts,
            recorder=recorder,
            inputs_bytes=inputs_bytes,
            seconds=time.perf_counter() - start_seconds,
        )


def _recompute(
    block: object,
    kernels: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> None:
    from torch.utils.checkpoint import checkpoint

    # Random state is kept in a few kilobytes; fake tensors have none. Torch turns stand-ins for
    # kernels off in a backward pass, where the block runs again.
    block.forward = functools.partial(  # type: ignore[attr-defined]
        checkpoint,
        block.forward,  # type: ignore[attr-defined]
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=lambda: (contextlib.nullcontext(), kernels()),
    )


def _autocast(request: TraceRequest) -> contextlib.AbstractContextManager[object]:
    import torch

    if not request.autocast:
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=getattr(torch, request.autocast))


def _advice(error: Exception) -> str:
    """What to try, from what torch says."""
    from drystone.run.train.tracing.build import HINT

    if "DataDependent" in type(error).__name__ or "DynamicOutput" in type(error).__name__:
        return (
            "A shape or a branch depends on the values of a tensor, which a trace does not have. "
            "Use a form of fixed shape (for experts: a fixed capacity, or grouped matrix products)"
        )
    return f"If its input was guessed wrongly: {HINT[0].lower()}{HINT[1:]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
