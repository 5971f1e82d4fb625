"""Emulated devices: as slow as asked, and uneven batches gain what they should."""

import os
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from drystone.errors import InvalidSpec
from drystone.run.runtime.emulate import Pacer

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from runtime_speedup import compare

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]


def test_sections_take_their_cost_over_the_speed():
    pacer = Pacer(speed=0.5, seconds={"forward": 0.01})
    started = time.perf_counter()

    for _ in range(5):
        with pacer.section("forward", 2):
            pass
    with pacer.section("unknown", 2):
        pass

    assert 0.2 <= time.perf_counter() - started < 0.4
    assert pacer.num_sections == 6


def test_a_device_without_speed_is_refused():
    with pytest.raises(InvalidSpec):
        Pacer(speed=0.0, seconds={})


@pytest.mark.slow
def test_batches_by_speed_gain_almost_all_that_they_can():
    seconds, overran = compare([1, 3], [2, 6], repeats=3)

    # The shortest: what else the machine does can only lengthen a step. The benchmark has longer
    # steps, of which the collectives are a smaller part, and medians.
    shortest = {name: min(some) for name, some in seconds.items()}
    if overran > 0.05 or os.getloadavg()[0] > 2 * (os.cpu_count() or 1):
        pytest.skip(f"the machine is too busy: {overran:.0%} of sections overran")
    assert shortest["even"] / shortest["uneven"] >= 1.9  # of 2.0
    assert shortest["FSDP2, even"] / shortest["uneven"] >= 1.9
