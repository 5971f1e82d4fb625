"""Steps on the stand-in accelerator: devices, dtypes, streams, waits and memory, without a GPU."""

import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch._subclasses.fake_tensor import FakeTensorDeviceMismatchError

sys.path.insert(0, str(Path(__file__).parent))
import standin_cases
from engine_cases import SEQ_LEN, Case, a_model, a_spec, an_optimizer, train_plainly, train_unevenly
from standin_cases import on_standin, standin, take_steps

from drystone.describe.layout import Layouts, Sharding, parse_layout
from drystone.describe.model_source import find_model
from drystone.describe.recipe import (
    Offload,
    Optimizer,
    Precision,
    Recipe,
    Recompute,
    RecomputeKind,
    Tuning,
)
from drystone.estimate.memory.layer_major import layer_major_memory
from drystone.estimate.memory.peak import estimate_memory
from drystone.run.train.checkpoint import background
from drystone.run.train.data import RankWork
from drystone.run.train.device import Copies
from drystone.run.train.models import transformer
from drystone.run.train.stepping import Stepper
from drystone.run.train.timing import EventTimer, make_timer
from drystone.run.train.uneven.engine import Engine

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]

# Where the host waits for the device in a step, and why. Everything else is a fault.
WAITS = {
    ("an event is waited for", "timing.seconds"): "how long the parts of the step took: once, when "
    "all of the step has been asked for",
    ("a copy blocks", "stepping._result"): "seconds and peaks of this rank, for all ranks to know; "
    "the device has nothing to do then",
    ("numbers are read", "stepping._result"): "whether to go on, to skip the step or to clip it",
}
FULL, NONE, SELECTIVE = (
    Recompute(kind=kind)
    for kind in (RecomputeKind.FULL, RecomputeKind.NONE, RecomputeKind.SELECTIVE)
)


def a_recipe(**more) -> Recipe:
    return Recipe(**{"seq_len": SEQ_LEN, "global_batch": 8, "recompute": FULL} | more)


LAYERED = {"sharding": Sharding.ZERO3}
RECIPES = {
    "bf16, layer by layer": (a_recipe(), LAYERED),
    "bf16, offloaded": (a_recipe(offload=Offload.ACTIVATIONS), LAYERED),
    "fp16": (a_recipe(precision=Precision.FP16_MIXED), LAYERED),
    "tf32": (a_recipe(precision=Precision.TF32), LAYERED),
    "fp16, whole weights": (
        a_recipe(precision=Precision.FP16_MIXED, recompute=NONE), {"sharding": Sharding.NONE}
    ),
    "bf16, whole weights, ZeRO-1, selective": (
        a_recipe(recompute=SELECTIVE), {"sharding": Sharding.ZERO1}
    ),
    "adapters, offloaded": (
        a_recipe(tuning=Tuning.LORA, offload=Offload.ACTIVATIONS), LAYERED
    ),
    "adapters, whole weights": (
        a_recipe(tuning=Tuning.LORA, recompute=NONE), {"sharding": Sharding.NONE}
    ),
    "Lion": (a_recipe(optimizer=Optimizer.LION, recompute=NONE), {"sharding": Sharding.ZERO1}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "style"),
    [*((recipe, "llama") for recipe in RECIPES), ("bf16, offloaded", "gpt"), ("Lion", "gpt")],
)
def test_a_step_stays_on_its_device_in_its_dtype_and_waits_for_nothing(recipe: str, style: str):
    what, how = RECIPES[recipe]
    watch, _ = take_steps(a_spec(style, tied=style == "gpt"), what, **how)

    width = {Precision.TF32: torch.float32, Precision.FP16_MIXED: torch.float16}
    assert watch.products == {width.get(what.precision, torch.bfloat16)}
    assert set(watch.waits) == set(WAITS)
    assert watch.races == []
    offloads = what.offload is Offload.ACTIVATIONS
    assert (watch.num_copies_beside > 20) is offloads  # else batches alone, ahead of their step
    assert watch.num_copies_beside >= 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "rank"), [("pp=2", 0), ("pp=2", 1), ("dp=2,pp=2,zero=3", 0), ("tp=2", 0)]
)
def test_ranks_of_split_jobs_stay_on_their_device_too(layout: str, rank: int):
    watch = standin_cases.take_split_steps(
        a_spec("llama", tied=False), layout, rank, dtype=torch.bfloat16, seq_len=SEQ_LEN
    )

    assert watch.products == {torch.bfloat16}
    assert set(watch.waits) == set(WAITS)
    assert watch.races == []


FAULTS = {
    "used before it was written": lambda device: _unwaited(device),
    "freed while": lambda device: _freed_too_early(device),
}


def _unwaited(device: torch.device) -> None:
    there = torch.empty(3, device=device)
    with standin.module.stream(standin.Stream()):
        there.fill_(1.0)
    there.add_(1.0)


def _freed_too_early(device: torch.device) -> None:
    there = torch.ones(3, device=device)
    with standin.module.stream(standin.Stream()):
        standin.module.current_stream().wait_stream(standin.STREAMS[0])
        there.sum()
    del there


@pytest.mark.parametrize("fault", FAULTS)
def test_the_watch_finds_what_two_streams_do_to_each_other(fault: str):
    with on_standin() as (device, watch, _):
        FAULTS[fault](device)

    assert any(fault in race for race in watch.races)


def test_the_watch_finds_devices_that_are_mixed_and_a_host_that_waits():
    with on_standin() as (device, watch, _):
        there = torch.zeros(3, device=device)
        with pytest.raises(FakeTensorDeviceMismatchError):
            there + torch.zeros(3)
        there.to("cpu")
        torch.zeros(3).to(device, non_blocking=True)

    assert [what for what, _ in watch.waits] == [
        "a copy blocks",
        "a copy from or to memory that is not pinned",
    ]


def test_without_its_waits_a_copy_would_be_a_race(monkeypatch: pytest.MonkeyPatch):
    """What `Copies` waits for is needed: each wait left out is seen."""
    what, how = RECIPES["bf16, offloaded"]
    monkeypatch.setattr(standin.Stream, "wait_event", lambda *_: None)

    watch, _ = take_steps(a_spec("llama", tied=False), what, **how)

    assert len(watch.races) > 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sharding", "changes"),
    [
        (Sharding.NONE, {"recompute": NONE}),
        (Sharding.ZERO1, {"precision": Precision.FP16_MIXED}),
        (Sharding.ZERO1, {"precision": Precision.TF32, "recompute": SELECTIVE}),
        (Sharding.NONE, {"tuning": Tuning.LORA, "recompute": NONE}),
    ],
)
def test_whole_weights_take_what_the_planner_says(sharding: Sharding, changes: dict):
    model = find_model("llama-3.2-1b")
    ((block, _), *_) = model.stack
    model = replace(model, stack=((block, 3),))
    recipe = a_recipe(seq_len=1024, **changes)
    works = (RankWork(batch=4, micro_batch=2),) * 2

    _, found = take_steps(model, recipe, sharding=sharding, works=works)

    layout = parse_layout(f"dp=2,zero={sharding.value},micro=2")
    items = estimate_memory(model, recipe, Layouts.of([layout])).items()
    not_of_tensors = ("workspace", "cache", "context")
    expected = sum(float(item[0]) for name, item in items.items() if name not in not_of_tensors)
    assert expected == pytest.approx(found, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("tuning", "number"), [(Tuning.FULL, 2), (Tuning.LORA, 1)])
def test_offloaded_layers_take_what_the_planner_says(tuning: Tuning, number: int):
    model = find_model("llama-3.2-1b")
    ((block, _), *_) = model.stack
    model = replace(model, stack=((block, 6),))
    recipe = a_recipe(seq_len=1024, offload=Offload.ACTIVATIONS, tuning=tuning)
    works = tuple(
        RankWork(batch=2 * number, micro_batch=2, state_share=share) for share in (0.25, 0.75)
    )

    _, found = take_steps(model, recipe, sharding=Sharding.ZERO3, works=works)

    memory = layer_major_memory(model, recipe, num_ranks=2, most_micro_batch=2)
    assert float(memory.peak_bytes(0.25)[2]) == pytest.approx(found, rel=0.05)


def test_seconds_on_an_accelerator_are_those_of_its_events():
    device = standin.install()
    timer = make_timer(device)
    assert isinstance(timer, EventTimer)
    with on_standin():
        for _ in range(2):
            timer.begin()
            for part in ("forward", "forward", "backward"):
                with timer.section(part):
                    torch.zeros(2, device=device).add_(1)
            seconds = timer.seconds()
            with timer.section("optimizer"):
                torch.zeros(2, device=device)

    assert seconds == pytest.approx({"forward": 0.004, "backward": 0.002})
    assert timer.last_seconds("optimizer") == pytest.approx(0.001)  # of the step before


def test_the_thread_that_saves_is_on_the_device_of_its_rank(tmp_path, monkeypatch):
    """Without it every rank would have a context on the first GPU."""
    case = Case(batches=(2,), micros=(1,), shares=(1.0,), style="llama")
    engine = Engine(a_model(case), [1.0])
    optimizer = an_optimizer(engine.parameter_groups())
    calls = []
    monkeypatch.setattr(
        background, "use_device", lambda one: calls.append((one, threading.current_thread().name))
    )
    saves = background.BackgroundSaves(tmp_path, engine, optimizer)
    saves.save(background.Progress())
    saves.wait()

    assert calls == [(engine.device, "checkpoint")]
    standin.module.devices_set.clear()
    standin_device = standin.install()
    monkeypatch.undo()
    background.use_device(standin_device)
    assert standin.module.devices_set == [standin_device]


def test_a_checkpoint_is_copied_to_pinned_memory_without_waiting():
    with on_standin() as (device, watch, _):
        engine = Stepper([], wire=standin_cases.GoingOn(0, 1), device=device)
        memory = Copies(engine.device)
        source = torch.ones(5, device=device)
        memory.host_like(source).copy_(source, non_blocking=True)
        is_copied = memory.mark()
        assert watch.waits == []
        is_copied()

    assert [what for what, _ in watch.waits] == ["an event is waited for"]


def test_heads_that_share_keys_and_values_learn_the_same_where_attention_takes_groups(monkeypatch):
    case = Case(batches=(4,), micros=(2,), shares=(1.0,), style="llama")
    monkeypatch.setattr(transformer, "takes_groups", lambda *_: True)

    grouped = train_unevenly([case])[0]

    monkeypatch.undo()
    for (loss, *_), (expected, *_) in zip(grouped, train_plainly(case), strict=True):
        assert loss == pytest.approx(expected, abs=1e-5)
