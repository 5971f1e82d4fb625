"""The formulas of others, written anew, against values that their authors published."""

import sys
from pathlib import Path

import pytest

from drystone.units import GiB, MiB

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from leaderboard import (
    accelerate_bytes,
    deepspeed_zero2_bytes,
    deepspeed_zero3_bytes,
    frenzy_bytes,
    megatron_activation_bytes,
)

# accelerate's documentation of `estimate-memory bert-base-cased`: 413.18 MB in fp32, and training
# with Adam takes 1.61 GB in float32, 826.36 MB in float16.
BERT_BASE_PARAMS = 413.18 * MiB / 4


def test_accelerate_says_of_bert_what_its_documentation_says() -> None:
    assert accelerate_bytes(BERT_BASE_PARAMS, is_fp32=True) / GiB == pytest.approx(1.61, abs=0.005)
    half = accelerate_bytes(BERT_BASE_PARAMS, is_fp32=False)
    assert half / MiB == pytest.approx(826.36, abs=0.01)


def test_deepspeed_says_of_t5_what_was_printed() -> None:
    # t5-small, one GPU, nothing offloaded: "1.08GB | offload_param=none, offload_optimizer=none"
    # with "60M total params, 16M largest layer params".
    params, largest = 60_506_624, 32_128 * 512
    assert deepspeed_zero3_bytes(params, largest, 1) / GiB == pytest.approx(1.08, abs=0.005)
    # Its documentation of ZeRO-2: t5-3b, 2851M parameters, 8 GPUs: 15.93GB a GPU.
    assert deepspeed_zero2_bytes(2851e6, 8) / GiB == pytest.approx(15.93, abs=0.01)


def test_megatron_activations_are_those_of_the_paper() -> None:
    # arXiv:2205.05198, Table 2: s b h 34 / t a layer, with sequence parallelism and selective
    # recomputation (four times the hidden size in the MLP).
    told = megatron_activation_bytes(
        tokens=2048, hidden=12288, ffn=4 * 12288, vocab=0, layers=96, tp=8, pp=8, vpp=1,
        num_micro=8, is_selective=True,
    )  # fmt: skip
    layers = 2048 * 12288 * 34 * 96 / 8
    assert told == pytest.approx(layers, rel=0.01)


def test_frenzy_is_the_formula_of_its_paper() -> None:
    # GPT-3 175B: the parameters of arXiv:2104.04473, and 34 + 5 a s / h bytes at t = 1.
    told = frenzy_bytes(
        vocab=51200, hidden=12288, layers=96, heads=96, seq_len=2048, micro_batch=1, tp=1
    )
    params, activations = 174.6e9, 2048 * 12288 * 96 * (34 + 5 * 96 * 2048 / 12288)
    assert told == pytest.approx(20 * params + activations, rel=0.001)
