"""What does a module of the user's own cost? Traced by torch in another process, read back here.

Torch-free: the tracer is started as `python -m drystone.run.train.tracing.trace`. Its answers are
cached by the contents of the user's files, so that asking again costs milliseconds.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from drystone.describe.layout import Layout
from drystone.describe.model import ModuleSpec
from drystone.describe.model_source import ModuleReference
from drystone.describe.recipe import Loss, Precision, Recipe, Recompute, RecomputeKind, Tuning
from drystone.errors import DrystoneError, InvalidSpec, MissingExtra, RequestError, UnreadableFile
from drystone.estimate.launchers import find_launcher
from drystone.estimate.module.trace import (
    FORMAT,
    BlockTrace,
    Kernels,
    ModuleTrace,
    TraceRequest,
    parse_trace,
)

TIMEOUT_SECONDS = 120.0
_TRACER = "drystone.run.train.tracing.trace"
_FP16 = (Precision.FP16, Precision.FP16_MIXED, Precision.AMP_FP16)
_BF16 = (Precision.BF16, Precision.BF16_MIXED, Precision.AMP_BF16, Precision.FP8_MIXED)
_HALF = dict.fromkeys(_FP16, "float16") | dict.fromkeys(_BF16, "bfloat16")


def _whole(every: float) -> int:
    if every != int(every):
        raise InvalidSpec(
            f"recompute: a traced module recomputes every so many-th layer, not one in {every:g}",
            hint="Write a whole number, such as full/2",
        )
    return int(every)


def trace_request(
    path: str | Path,
    function: str,
    *,
    recipe: Recipe,
    layout: Layout,
    kernels: Kernels = Kernels.CUDA,
) -> TraceRequest:
    """What to trace, so that the trace can answer for this recipe and layout."""
    if recipe.tuning is not Tuning.FULL:
        raise InvalidSpec(
            f"a traced module cannot be given {recipe.tuning.value} adapters from outside",
            hint="Freeze its parameters and add the adapters in the function itself",
        )
    if recipe.loss is not Loss.PLAIN:
        raise InvalidSpec(
            f"a traced module brings its own loss; loss={recipe.loss.value} cannot be forced on it",
            hint="Return the loss from the module, computed as you want it",
        )
    half = _HALF.get(recipe.precision)
    is_pure = recipe.precision in (Precision.FP16, Precision.BF16)
    is_autocast = recipe.precision in (Precision.AMP_FP16, Precision.AMP_BF16) or (
        half is not None and not is_pure and not find_launcher(recipe.launcher).keeps_master
    )
    return TraceRequest(
        path=str(Path(path).resolve()),
        function=function,
        micro_batch=layout.micro_batch,
        seq_len=recipe.seq_len,
        dtype="float32" if half is None or is_autocast else half,
        autocast=half if half is not None and is_autocast else "",
        has_master=half is not None and not is_pure and not is_autocast,
        optimizer=recipe.optimizer,
        step_kernel=recipe.step_kernel,
        recompute=recipe.recompute.kind,
        recompute_every=_whole(recipe.recompute.every),
        attention=recipe.attention,
        kernels=kernels,
    )


def trace_module(
    request: TraceRequest,
    *,
    timeout_seconds: float = TIMEOUT_SECONDS,
    cache_folder: Path | None = None,
) -> ModuleTrace:
    """Trace the module in a process of its own, or recall the trace of the same files."""
    answer = recalled_answer(
        _TRACER, request, timeout_seconds=timeout_seconds, cache_folder=cache_folder
    )
    return parse_trace(answer["trace"], where=request.path)


def recalled_answer(
    program: str,
    request: TraceRequest,
    *,
    timeout_seconds: float,
    cache_folder: Path | None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """What a program that needs torch says about a module, run in a process of its own.

    An answer about files that have not changed since is recalled. The program runs the module's
    code: `environment` are the variables that it may see (None: all of this process).
    """
    folder = default_cache_folder() if cache_folder is None else cache_folder
    entry = folder / f"{program.rpartition('.')[2]}-{_fingerprint(request)}.json"
    if (recalled := _recall(entry)) is not None:
        return recalled
    answer = _run_program(program, request, timeout_seconds, environment)
    if "error" in answer:
        raise RequestError(**answer["error"])
    _remember(entry, answer)
    return answer


def default_cache_folder() -> Path:
    """`$XDG_CACHE_HOME/drystone`, or `~/.cache/drystone`."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "drystone"


def _run_program(
    program: str,
    request: TraceRequest,
    timeout_seconds: float,
    environment: Mapping[str, str] | None,
) -> dict[str, Any]:
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("tracing a module needs torch", "runtime", where=request.path)
    with tempfile.TemporaryDirectory(prefix="drystone-trace-") as folder:
        asked, answered = Path(folder, "request.json"), Path(folder, "answer.json")
        asked.write_text(json.dumps(asdict(request)))
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-m", program, str(asked), str(answered)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_seconds,
                check=False,
                env=None if environment is None else dict(environment),
            )
        except subprocess.TimeoutExpired:
            raise RequestError(
                f"{request.function}() was not traced within {timeout_seconds:g} s",
                where=request.path,
                hint="Does it loop, or load weights? It should only build the module",
            ) from None
        try:
            answer: dict[str, Any] = json.loads(answered.read_text())
        except (OSError, ValueError):
            said = done.stderr.strip().splitlines()
            raise DrystoneError(
                f"the tracer ended with code {done.returncode} and no answer"
                + (f": {said[-1]}" if said else ""),
                where=request.path,
            ) from None
    return answer


# --- the cache -------------------------------------------------------------------------------


def _fingerprint(request: TraceRequest) -> str:
    """What the trace depends on and is known before it is made."""
    versions = {name: _version(name) for name in ("drystone", "torch", "transformers")}
    known = {"format": FORMAT, "versions": versions, "request": asdict(request)}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _recall(entry: Path) -> dict[str, Any] | None:
    """The stored answer, if it can be read and none of the user's files has changed since."""
    try:
        stored = json.loads(entry.read_text())
        if any(_digest(Path(file)) != digest for file, digest in stored["digests"].items()):
            return None
        for table in [stored["trace"]] if "trace" in stored else stored["traces"]:
            parse_trace(table, where=str(entry))
        return dict(stored)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UnreadableFile):
        return None


def _remember(entry: Path, answer: Mapping[str, Any]) -> None:
    """Store it in one move, so that nobody reads half of it. A cache that fails is no failure."""
    try:
        digests = {file: _digest(Path(file)) for file in answer["sources"]}
        entry.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=entry.parent, delete=False) as file:
            json.dump({"digests": digests, **answer}, file)
        os.replace(file.name, entry)
    except OSError:
        return


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


_PROBE = "drystone.run.train.tracing.probe"


def probe_module(
    found: ModuleReference,
    recipe: Recipe,
    *,
    timeout_seconds: float = TIMEOUT_SECONDS,
    cache_folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> ModuleSpec:
    """What a job needs to know of a module; raises with the reason where it cannot be trained."""
    layered = replace(recipe, recompute=Recompute(kind=RecomputeKind.FULL))
    request = trace_request(
        found.path, found.function, recipe=layered, layout=Layout(dp=1, micro_batch=1)
    )
    answer = recalled_answer(
        _PROBE,
        request,
        timeout_seconds=timeout_seconds,
        cache_folder=cache_folder,
        environment=environment,
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
