"""Bytes on the wire against FSDP2 with accumulation, as the system counts them."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from ranks import START_METHOD

from runtime_wire import compare

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="no counters to read"),
]


def test_a_step_sends_a_third_and_less_of_what_fsdp_with_accumulation_sends():
    rows = compare(2, [4, 8], num_layers=12, width=128, repeats=1, start_method=START_METHOD)

    sent = {(count, name): num_bytes for count, name, num_bytes, _ in rows}
    for way in ("layer-major, even", "layer-major, uneven"):
        assert sent[4, way] <= 0.30 * sent[4, "FSDP2, accumulation"]
        assert sent[8, way] <= 0.17 * sent[8, "FSDP2, accumulation"]
        assert sent[8, way] == pytest.approx(sent[4, way], rel=0.01)
