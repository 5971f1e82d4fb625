"""Emulated memory: counted to the byte, and a real error beyond the cap."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch.distributed._tools.mem_tracker import MemTracker

sys.path.insert(0, str(Path(__file__).parent))
from command_cases import a_plan, events, fork, join
from engine_cases import Case, a_model, tokens

from drystone.errors import InvalidSpec
from drystone.plan.plan import save_plan
from drystone.run.train.emulate import Ledger, host_memory, read_emulation, resize_storage
from drystone.run.train.group import OUT_OF_MEMORY_EXIT_CODE
from drystone.run.train.uneven.engine import Engine

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]

CASE = Case(batches=(8,), micros=(2,), shares=(1.0,), style="llama")


HIDDEN_BYTES, TOKENS_BYTES = 12 * 16 * 4, 13 * 8  # of one sample
ROTARY_BYTES = 2 * 12 * 4 * 4  # of one micro-batch: two tables for 12 positions and heads of 4


def a_step(ledger: Ledger, *, samples=range(8), offload: bool = False) -> int:
    """The peak of a step of the engine, a sample at a time."""
    with ledger:
        engine = Engine(a_model(CASE), [1.0], offload=offload)
        engine.compute_gradients([tokens().read([one]) for one in samples])
        return ledger.peak_bytes


def test_a_plain_step_takes_what_torchs_own_tracker_says():
    def prepared():
        model, x = a_model(CASE), tokens().read(range(4)).clone()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step():
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        return model, optimizer, x, step

    with Ledger() as ledger:
        *_, step = prepared()
        ledger.reset_peak()
        step()
    *things, step = prepared()
    tracker = MemTracker()
    tracker.track_external(*things)
    with tracker:
        step()

    (told,) = tracker.get_tracker_snapshot("peak").values()
    assert ledger.peak_bytes == told["Total"]


def test_views_and_freed_tensors_count_once_and_no_longer():
    with Ledger() as ledger:
        x = torch.zeros(100)
        y = x.view(10, 10)
        assert ledger.live_bytes == 400
        del x
        assert ledger.live_bytes == 400
        resize_storage(y, 0)
        assert ledger.live_bytes == 0
        resize_storage(y, 400)
        with host_memory():
            elsewhere = torch.ones(1000)
        assert ledger.live_bytes == 400
        del y, elsewhere
        assert (ledger.live_bytes, ledger.peak_bytes) == (0, 400)


@pytest.mark.parametrize("part", [0.2, 0.5, 0.8, 0.999])
def test_beyond_the_cap_is_torchs_out_of_memory_error_and_within_it_is_none(part: float):
    peak = a_step(Ledger())

    with pytest.raises(torch.OutOfMemoryError, match="emulated device out of memory") as found:
        a_step(Ledger(int(peak * part)))
    assert a_step(Ledger(peak)) == peak
    assert found.value.live_bytes + found.value.asked_bytes > found.value.cap_bytes


def test_offloaded_activations_are_not_on_the_device_however_many():
    few, many = range(4), range(12)

    assert a_step(Ledger(), samples=many) > a_step(Ledger(), samples=few) + 8 * 3 * HIDDEN_BYTES
    both = [a_step(Ledger(), samples=some, offload=True) for some in (few, many)]
    assert both[1] - both[0] <= 8 * (TOKENS_BYTES + ROTARY_BYTES)


@pytest.mark.slow
def test_a_rank_beyond_its_cap_says_so_and_all_leave(tmp_path: Path):
    save_plan(a_plan([(2, 2, 0.5), (6, 3, 0.5)]), tmp_path / "plan.json")
    command = [str(tmp_path / "plan.json"), "--steps", "3", "--timeout", "20"]
    free = json.dumps({"ranks": [{"memory_bytes": 10**9}] * 2})
    assert join(fork(command, 2, tmp_path, DRYSTONE_EMULATE=free)) == [0, 0]
    peaks = events((tmp_path / "0.out").read_text())[-2]["peak_memory_bytes"]

    tight = {"ranks": [{"memory_bytes": peaks[0]}, {"memory_bytes": peaks[1] - 1}]}
    codes = join(fork(command, 2, tmp_path, DRYSTONE_EMULATE=json.dumps(tight)))

    assert codes[1] == OUT_OF_MEMORY_EXIT_CODE == 12
    assert codes[0] not in (0, 12)
    (line,) = events((tmp_path / "1.out").read_text())
    assert line["event"] == "out_of_memory"
    assert line["rank"] == 1
    assert line["live_bytes"] + line["asked_bytes"] == peaks[1]
    assert line["cap_bytes"] == peaks[1] - 1


def test_what_is_no_device_is_refused():
    for text, words in (
        ("{", "no JSON"),
        ('{"rank": []}', "rank"),
        ('{"ranks": [{"speed": -1}]}', "negative"),
    ):
        with pytest.raises(InvalidSpec if words != "rank" else Exception, match=words):
            read_emulation(text)
    with pytest.raises(InvalidSpec, match="not among"):
        read_emulation('{"ranks": [{"speed": 1}]}').device_of(1, "")


def test_devices_come_by_type_from_the_plan():
    plan = a_plan([(2, 2, 0.5), (6, 3, 0.5)])

    one = read_emulation('{"gpus": {"A100 80GB": {"speed": 2, "memory_bytes": 7}}}', plan)
    both = read_emulation("plan", plan)

    assert one.device_of(1, "A100-80G").memory_bytes == 7
    assert both.device_of(0, "A100-80G").speed == 1.0
    assert read_emulation("") is None
