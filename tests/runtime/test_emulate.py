"""Emulated devices are never faster than asked; a benchmark says what uneven batches gain."""

import time

import pytest

pytest.importorskip("torch")

from drystone.errors import InvalidSpec
from drystone.run.train.emulate import Pacer

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]


def test_sections_take_their_cost_over_the_speed():
    pacer = Pacer(speed=0.5, seconds={"forward": 0.01})
    started = time.perf_counter()

    for _ in range(5):
        with pacer.section("forward", 2):
            pass
    with pacer.section("unknown", 2):
        pass

    assert time.perf_counter() - started >= 0.2
    assert pacer.num_sections == 6


def test_a_device_without_speed_is_refused():
    with pytest.raises(InvalidSpec):
        Pacer(speed=0.0, seconds={})
