"""Starting the tracer, its errors and its cache; and what a trace says about a split."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from drystone.describe.layout import Layout, Sharding
from drystone.describe.recipe import (
    Loss,
    Offload,
    Precision,
    Recipe,
    Recompute,
    RecomputeKind,
    Tuning,
)
from drystone.errors import DrystoneError, InvalidSpec, RequestError, UnreadableFile
from drystone.estimate.module import tracer as traced
from drystone.estimate.module.estimate import traced_memory
from drystone.estimate.module.trace import (
    OUTSIDE,
    BlockTrace,
    ModuleTrace,
    OutsideTrace,
    Phase,
    Span,
    TraceRequest,
    parse_trace,
    trace_table,
)
from drystone.estimate.module.tracer import trace_module, trace_request

RECIPE = Recipe(seq_len=128, global_batch=1, precision=Precision.BF16)


def a_request(**changes) -> TraceRequest:
    given = {"path": "/models/mine.py", "function": "build", "micro_batch": 1, "seq_len": 128}
    return TraceRequest(**{**given, **changes})


def a_span(block: int, phase: Phase, change: int, peak: int, gradients: int = 0) -> Span:
    return Span(block=block, phase=phase, change_bytes=change, peak_bytes=peak,
                gradients_bytes=gradients)  # fmt: skip


def a_trace(num_blocks: int = 4, **changes) -> ModuleTrace:
    """Blocks of 1000 parameters that keep 300 bytes each; a head of 500 that borrows 700."""
    counted = {"buffers_bytes": 0, "forward_flops": 1, "backward_flops": 2}
    block = BlockTrace(
        name="Block", path="blocks", count=num_blocks, is_recomputed=False, num_params=1000,
        num_trainable_params=1000, weights_bytes=2000, gradients_bytes=2000, optimizer_bytes=4000,
        saved_bytes=300, output_bytes=100, forward_peak_bytes=350, backward_peak_bytes=2100,
        **counted,
    )  # fmt: skip
    outside = OutsideTrace(
        num_params=500, num_trainable_params=500, weights_bytes=1000, gradients_bytes=1000,
        optimizer_bytes=2000, head_peak_bytes=700, **counted,
    )  # fmt: skip
    forward = [a_span(0, Phase.FORWARD, 300, 350)] * num_blocks
    backward = [a_span(0, Phase.BACKWARD, 1700, 2100, 2000)] * num_blocks
    head = [
        a_span(OUTSIDE, Phase.FORWARD, 200, 700),
        a_span(OUTSIDE, Phase.BACKWARD, 800, 900, 1000),
    ]
    given = {
        "request": a_request(), "module": "Mine", "blocks": (block,), "outside": outside,
        "timeline": (*forward, *head, *backward), "inputs_bytes": 10,
        "step_temporaries_bytes": 3000, "num_blocks_traced": 3, "torch_version": "2.13.0",
        "trace_seconds": 0.5,
    }  # fmt: skip
    return ModuleTrace(**{**given, **changes})


# --- the trace itself ------------------------------------------------------------------------


def test_totals_are_the_blocks_and_the_rest():
    trace = a_trace()

    assert (trace.num_blocks, trace.num_params, trace.weights_bytes) == (4, 4500, 9000)
    assert (trace.forward_flops, trace.backward_flops) == (5, 10)


def test_the_peak_is_the_highest_moment_of_the_step():
    state = 9000 + 18000 + 10
    in_step = state + 9000 + 3000
    in_last_backward = state + 4 * 300 + 200 + 800 + 3 * 1700 + 2100

    assert a_trace().peak_bytes == in_step > in_last_backward
    assert a_trace(step_temporaries_bytes=0).peak_bytes == max(in_last_backward, in_step - 3000)


def test_a_trace_survives_being_written_and_read():
    trace = a_trace()

    assert parse_trace(json.loads(json.dumps(trace_table(trace)))) == trace


@pytest.mark.parametrize(
    ("path", "value"),
    [(["format"], 0), (["blocks", 0, "num_params"], -1), (["timeline", 0, "phase"], "sideways"),
     (["timeline", 0, "block"], 7), (["timeline", 0, "peak_bytes"], -5), (["request"], None),
     (["outside", "weights_bytes"], "many"), (["surprise"], 1)],
)  # fmt: skip
def test_a_damaged_trace_is_refused(path: list, value: object):
    table = json.loads(json.dumps(trace_table(a_trace())))
    place = table
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value

    with pytest.raises(UnreadableFile, match="not a trace"):
        parse_trace(table)


# --- what to trace ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "launcher", "dtype", "autocast", "has_master"),
    [
        (Precision.FP32, "drystone", "float32", "", False),
        (Precision.BF16, "drystone", "bfloat16", "", False),
        (Precision.FP16, "drystone", "float16", "", False),
        (Precision.AMP_BF16, "drystone", "float32", "bfloat16", False),
        (Precision.FP16_MIXED, "megatron-te", "float16", "", True),
        (Precision.FP8_MIXED, "megatron-te", "bfloat16", "", True),
    ],
)
def test_the_precision_decides_what_is_traced(precision, launcher, dtype, autocast, has_master):
    recipe = replace(RECIPE, precision=precision, launcher=launcher)

    request = trace_request("mine.py", "build", recipe=recipe, layout=Layout())

    assert (request.dtype, request.autocast, request.has_master) == (dtype, autocast, has_master)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tuning": Tuning.LORA}, "adapters"),
        ({"loss": Loss.CHUNKED}, "own loss"),
        ({"recompute": Recompute(kind=RecomputeKind.SELECTIVE)}, "selective"),
    ],
)
def test_what_cannot_be_forced_on_a_module_is_refused(change: dict, message: str):
    with pytest.raises(InvalidSpec, match=message):
        trace_request("mine.py", "build", recipe=replace(RECIPE, **change), layout=Layout())


@pytest.mark.parametrize("change", [{"micro_batch": 0}, {"seq_len": -1}, {"dtype": "int3"},
                                    {"recompute_every": 0}, {"autocast": "int3"}])  # fmt: skip
def test_a_senseless_request_is_refused(change: dict):
    with pytest.raises(InvalidSpec):
        a_request(**change)


# --- what a split makes of it ----------------------------------------------------------------


def test_one_device_is_the_traced_peak():
    assert traced_memory(a_trace(), RECIPE, Layout()).allocated_bytes == a_trace().peak_bytes


@pytest.mark.parametrize("num_blocks", [1, 4, 30])
def test_each_stage_of_zero_needs_no_more_than_the_one_before(num_blocks: int):
    trace, recipe = a_trace(num_blocks), replace(RECIPE, global_batch=8)
    peaks = [
        traced_memory(trace, recipe, Layout(dp=8, sharding=stage)).allocated_bytes
        for stage in (Sharding.NONE, Sharding.ZERO1, Sharding.ZERO2)
    ]

    assert peaks == sorted(peaks, reverse=True)


def test_zero_three_splits_everything_and_gathers_what_runs():
    memory = traced_memory(
        a_trace(), replace(RECIPE, global_batch=8), Layout(dp=8, sharding=Sharding.ZERO3)
    )

    assert memory.weights_bytes == 9000 / 8
    assert memory.optimizer_bytes == 18000 / 8
    assert memory.gathered_bytes > 0
    assert memory.allocated_bytes < a_trace().peak_bytes


def test_accumulation_keeps_the_gradients_throughout():
    trace = a_trace(step_temporaries_bytes=0)
    once = traced_memory(trace, RECIPE, Layout())
    twice = traced_memory(trace, replace(RECIPE, global_batch=2), Layout())

    assert twice.gradients_bytes == 9000
    assert twice.allocated_bytes > once.allocated_bytes


def test_offloaded_state_is_not_on_the_gpu():
    memory = traced_memory(a_trace(), replace(RECIPE, offload=Offload.OPTIMIZER), Layout())

    assert (memory.optimizer_bytes, memory.step_bytes) == (0, 0)


@pytest.mark.parametrize("axis", ["tp", "pp", "cp", "ep"])
def test_splitting_the_arithmetic_is_refused(axis: str):
    layout = Layout(**{"dp": 2, axis: 2})

    with pytest.raises(InvalidSpec, match=f"{axis}=2.*traced"):
        traced_memory(a_trace(), RECIPE, layout)


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [(replace(RECIPE, seq_len=64), Layout()), (RECIPE, Layout(micro_batch=2)),
     (replace(RECIPE, recompute=Recompute.parse("full")), Layout()),
     (replace(RECIPE, offload=Offload.STATE), Layout())],
)  # fmt: skip
def test_a_trace_answers_for_its_own_recipe_only(recipe: Recipe, layout: Layout):
    with pytest.raises(InvalidSpec):
        traced_memory(a_trace(), recipe, layout)


# --- starting the tracer ---------------------------------------------------------------------


class FakeTracer:
    """Stands for the process: writes an answer, and counts how often it was asked."""

    def __init__(self, answer: str | None) -> None:
        self.answer = answer
        self.num_calls = 0

    def __call__(self, command, **_):
        self.num_calls += 1
        if self.answer is not None:
            Path(command[-1]).write_text(self.answer)
        return subprocess.CompletedProcess(command, 0, stdout="", stderr="one\nlast words")


@pytest.fixture
def install(monkeypatch):
    def replace_process(answer: str | None) -> FakeTracer:
        fake = FakeTracer(answer)
        monkeypatch.setattr(traced.subprocess, "run", fake)
        monkeypatch.setattr(traced.importlib.util, "find_spec", lambda _: object())
        return fake

    return replace_process


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text("def build(): ...")
    return path


def an_answer(source: Path) -> str:
    return json.dumps({"trace": trace_table(a_trace()), "sources": [str(source)]})


def test_the_second_question_is_answered_from_the_cache(install, source: Path, tmp_path: Path):
    tracer = install(an_answer(source))
    request = a_request(path=str(source))

    first = trace_module(request, cache_folder=tmp_path / "cache")
    second = trace_module(request, cache_folder=tmp_path / "cache")

    assert first == second
    assert tracer.num_calls == 1


def test_a_changed_file_or_request_is_traced_again(install, source: Path, tmp_path: Path):
    tracer = install(an_answer(source))
    request = a_request(path=str(source))

    trace_module(request, cache_folder=tmp_path)
    trace_module(replace(request, seq_len=64), cache_folder=tmp_path)
    source.write_text("def build(): return 1")
    trace_module(request, cache_folder=tmp_path)

    assert tracer.num_calls == 3


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", '{"digests": {}}', '{"digests": {}, "trace": {}}']
)
def test_a_damaged_cache_is_ignored(install, source: Path, tmp_path: Path, damage: str):
    tracer = install(an_answer(source))
    folder = tmp_path / "cache"
    trace_module(a_request(path=str(source)), cache_folder=folder)
    for entry in folder.iterdir():
        entry.write_text(damage)

    trace_module(a_request(path=str(source)), cache_folder=folder)

    assert tracer.num_calls == 2


def test_a_cache_that_cannot_be_written_does_no_harm(install, source: Path, tmp_path: Path):
    install(an_answer(source))
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")

    assert trace_module(a_request(path=str(source)), cache_folder=in_the_way) == a_trace()


def test_the_cache_lies_where_the_desktop_says(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert traced.default_cache_folder() == tmp_path / "drystone"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert traced.default_cache_folder() == Path.home() / ".cache" / "drystone"


def test_without_torch_the_message_says_what_to_install(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(traced.importlib.util, "find_spec", lambda _: None)

    with pytest.raises(RequestError, match=r"pip install 'drystone\[runtime\]'"):
        trace_module(a_request(), cache_folder=tmp_path)


def test_a_tracer_that_dies_is_our_failure(install, tmp_path: Path):
    install(None)

    with pytest.raises(DrystoneError, match="last words") as caught:
        trace_module(a_request(), cache_folder=tmp_path)
    assert caught.value.exit_code == 1
