"""Look at a module that somebody wants to train; only a small one is allocated.

    python -m drystone.run.train.tracing.probe REQUEST.json ANSWER.json

The request is a `TraceRequest` as JSON, for one sample. The answer is `{"blocks", "vocab_size",
"traces": [for one sample, for two], "sources": [files]}`, or `{"error": {"message", "where",
"hint"}}` when the module cannot be trained as `run/train/models/module.py` wants it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from drystone.errors import DrystoneError
from drystone.estimate.module.trace import TraceRequest, parse_request, trace_table
from drystone.run.engines.agent.keeper import be_killed_first

# What is larger is compared where it is trained, before its first step: here it would take the
# memory of a machine that may have little.
MAX_COMPARED_PARAMS = 250_000_000


def main(arguments: list[str]) -> int:
    """Read the request, look, write the answer."""
    be_killed_first()
    request = parse_request(json.loads(Path(arguments[0]).read_text()))
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    with contextlib.redirect_stdout(sys.stderr):  # what the user's file prints is not the answer
        answer = _answer(request)
    Path(arguments[1]).write_text(json.dumps(answer))
    sys.stderr.flush()
    os._exit(1 if "error" in answer else 0)  # tearing torch down takes time, for nothing


def _answer(request: TraceRequest) -> dict[str, Any]:
    from drystone.run.train.tracing.build import TraceFailure, last_line, user_line
    from drystone.run.train.tracing.trace import user_sources

    try:
        return {**_look(request), "sources": user_sources(request.path)}
    except TraceFailure as failure:
        where, message, hint = failure.where or request.path, failure.message, failure.hint
    except DrystoneError as error:
        where, message, hint = error.where or request.path, error.message, error.hint
    except Exception as error:
        where, message = user_line(error, request.path), last_line(error)
        hint = "docs/jobs.md says what a module that is trained as a job must be like"
    return {"error": {"message": message, "where": where, "hint": hint}}


def _look(request: TraceRequest) -> dict[str, Any]:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from drystone.run.train.models.module import (
        UserModule,
        build_whole,
        check_step,
        choose_batch,
        compare_blocks,
        count_tokens,
        name_blocks,
    )
    from drystone.run.train.tracing.blocks import find_blocks
    from drystone.run.train.tracing.build import build_module, load_source, materialise
    from drystone.run.train.tracing.trace import trace

    source = load_source(request.path)
    module = build_module(source, request.function, request.path)
    paths = [block.path for block in find_blocks(module, request).every]
    blocks = name_blocks(paths, module, request.path)
    fed = choose_batch(module, source, request.path)
    vocab_size = 1 if fed.own is not None else count_tokens(module, request.path)
    with FakeTensorMode(allow_non_fake_inputs=True):
        materialise(module, torch.float32)
        model = UserModule(module, blocks, fed, seq_len=request.seq_len)
        check_step(model, request.seq_len)
    num_params = sum(parameter.numel() for parameter in module.parameters())
    if num_params <= MAX_COMPARED_PARAMS:
        built = build_whole(source, request.function, request.path)
        whole = UserModule(built, blocks, fed, seq_len=request.seq_len)
        compare_blocks(whole, vocab_size, request.seq_len)

    def example_batch(micro_batch: int, seq_len: int) -> Any:
        return fed.make_batch(torch.zeros(micro_batch, seq_len + 1, dtype=torch.long))

    vars(source)["example_batch"] = example_batch  # the same as in training
    traces = [trace(replace(request, micro_batch=number), source) for number in (1, 2)]
    return {
        "blocks": blocks,
        "vocab_size": vocab_size,
        "traces": [trace_table(one) for one in traces],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
