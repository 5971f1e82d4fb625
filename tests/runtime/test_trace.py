"""The tracer against torch's own MemTracker, on the same software."""

import json
import resource
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from drystone.describe.recipe import (
    AttentionKernel,
    Optimizer,
    RecomputeKind,
    StepKernel,
)
from drystone.estimate.module.trace import Kernels, ModuleTrace, TraceRequest, parse_trace
from drystone.run.train.tracing.trace import trace

sys.path.insert(0, str(Path(__file__).parent))
from memtracker import memtracker_peak_bytes

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.filterwarnings("default")]

MODELS = str(Path(__file__).parent / "traced_models.py")
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "my_module.py")


def a_request(function: str, **changes) -> TraceRequest:
    given = {"micro_batch": 2, "seq_len": 256, "kernels": Kernels.CPU, **changes}
    return TraceRequest(path=MODELS, function=function, **given)


RECIPES = {
    "bf16 foreach": {"step_kernel": StepKernel.FOREACH},
    "bf16 recompute": {"recompute": RecomputeKind.FULL},
    "fp32 fused": {"dtype": "float32"},
    "fp32 loop recompute/2": {
        "dtype": "float32", "step_kernel": StepKernel.LOOP,
        "recompute": RecomputeKind.FULL, "recompute_every": 2,
    },
    "autocast": {"dtype": "float32", "autocast": "bfloat16"},
    "eager attention": {"attention": AttentionKernel.EAGER},
}  # fmt: skip
FUNCTIONS = [
    "plain", "tied", "frozen_below", "frozen_but_adapters", "experts_every_third",
    "dense_then_experts", "with_dropout", "mlp", "shared", "by_index", "llama",
]  # fmt: skip


# By `benchmarks/trace_8b.py --reference`: torch 2.13.0, transformers 5.22.2, 47 s.
MEMTRACKER_8B_BYTES = 83_630_826_900
CASES = [(function, recipe) for function in FUNCTIONS for recipe in list(RECIPES)[:2]]
CASES += [("plain", recipe) for recipe in list(RECIPES)[2:5]] + [("llama", "fp32 fused")]


@pytest.mark.parametrize(("function", "recipe"), CASES)
def test_the_peak_is_that_of_memtracker(function: str, recipe: str):
    request = a_request(function, **RECIPES[recipe])

    predicted_bytes = trace(request).peak_bytes

    assert predicted_bytes == pytest.approx(memtracker_peak_bytes(request), rel=0.005)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("function", ["experts_every_third", "frozen_below"])
def test_a_few_blocks_tell_the_full_depth(function: str, recipe: str):
    request = a_request(function, **RECIPES[recipe])

    short, whole = trace(request), trace(replace(request, is_whole=True))

    assert short.num_blocks_traced < short.num_blocks == whole.num_blocks_traced
    assert short.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.002)
    assert short.step_temporaries_bytes == pytest.approx(whole.step_temporaries_bytes, rel=0.001)
    for name in ("num_params", "weights_bytes", "gradients_bytes", "optimizer_bytes",
                 "forward_flops", "backward_flops"):  # fmt: skip
        assert getattr(short, name) == getattr(whole, name), name
    assert len(short.timeline) == len(whole.timeline)


@pytest.mark.parametrize("function", ["shared", "by_index", "mlp"])
def test_what_cannot_be_cut_short_is_traced_whole(function: str):
    result = trace(a_request(function))

    assert result.num_blocks_traced == result.num_blocks
    assert result.peak_bytes > result.weights_bytes + result.optimizer_bytes


def test_kinds_of_block_are_told_apart():
    counts = {one.name: one.count for one in trace(a_request("plain")).blocks}
    mixed = trace(a_request("experts_every_third")).blocks

    assert counts == {"Block": 9}
    assert [one.count for one in mixed] == [8, 4]
    assert mixed[1].num_params > mixed[0].num_params


def test_shared_weights_are_counted_once():
    plain, tied = trace(a_request("plain")), trace(a_request("tied"))

    assert plain.num_params - tied.num_params == 1000 * 128
    assert tied.optimizer_bytes < plain.optimizer_bytes


def test_frozen_weights_have_no_state():
    result = trace(a_request("frozen_but_adapters"))
    expected = 10 * (128 * 128 + 128)

    assert result.num_trainable_params == expected
    assert result.gradients_bytes == 2 * expected
    assert result.optimizer_bytes == pytest.approx(4 * expected, rel=0.01)


def test_flops_are_those_of_the_matrices():
    """Six a parameter and token in all; attention beside it; embeddings are no matrix products."""
    result = trace(a_request("plain"))
    tokens, matrices = 2 * 256, result.num_params - (1000 + 2048) * 128
    attention = 9 * 4 * 2 * 256 * 256 * 128

    assert result.forward_flops == pytest.approx(2 * tokens * matrices + attention, rel=0.01)
    assert result.backward_flops == pytest.approx(4 * tokens * matrices + 2.5 * attention, rel=0.01)


def test_recomputing_keeps_the_boundary_only():
    none = trace(a_request("plain")).blocks[0]
    full = trace(a_request("plain", recompute=RecomputeKind.FULL)).blocks[0]

    assert none.output_bytes == full.output_bytes == 2 * 256 * 128 * 2
    assert full.saved_bytes == full.output_bytes < none.saved_bytes / 5
    # Torch stops recomputing at the last tensor that is needed: the last matrix product is spared.
    again = none.backward_flops + none.forward_flops
    assert 0.9 * again < full.backward_flops < again


def test_eager_attention_keeps_the_scores():
    fused, eager = (trace(a_request("plain", attention=kind)) for kind in AttentionKernel)
    scores_bytes = 2 * 4 * 256 * 256 * 2

    assert eager.blocks[0].saved_bytes > fused.blocks[0].saved_bytes + scores_bytes


def test_dropout_on_a_gpu_keeps_bytes_and_stays_fused():
    """On CPU, torch keeps masks as wide as their input, and the scores of attention."""
    on_cpu = trace(a_request("with_dropout")).blocks[0].saved_bytes
    on_gpu = trace(a_request("with_dropout", kernels=Kernels.CUDA)).blocks[0].saved_bytes
    without = trace(a_request("plain", kernels=Kernels.CUDA)).blocks[0].saved_bytes
    two_masks_bytes = 2 * 2 * 256 * 128

    assert without < on_gpu <= without + two_masks_bytes + 2 * 2 * 256 * 128 * 2 < on_cpu


@pytest.mark.parametrize(
    ("optimizer", "bytes_per_param"),
    [(Optimizer.ADAM, 4), (Optimizer.ADAM_8BIT, 2.03), (Optimizer.SGD, 0), (Optimizer.LION, 2),
     (Optimizer.SGD_MOMENTUM, 2), (Optimizer.LAMB, 4)],
)  # fmt: skip
def test_each_optimizer_keeps_its_state(optimizer: Optimizer, bytes_per_param: float):
    result = trace(a_request("plain", optimizer=optimizer))

    expected = bytes_per_param * result.num_trainable_params
    assert result.optimizer_bytes == pytest.approx(expected, rel=0.03, abs=2000)


@pytest.mark.parametrize("optimizer", [Optimizer.ADAFACTOR, Optimizer.MUON])
def test_the_lean_optimizers_keep_less_than_adam(optimizer: Optimizer):
    lean = trace(a_request("plain", optimizer=optimizer)).optimizer_bytes

    assert lean < trace(a_request("plain")).optimizer_bytes


def test_a_master_copy_takes_twelve_bytes_with_the_moments():
    result = trace(a_request("plain", has_master=True))

    assert result.optimizer_bytes == pytest.approx(12 * result.num_params, rel=0.01)


def test_a_builder_may_look_at_small_values():
    assert trace(a_request("looks_at_values")).num_blocks == 6


def test_the_example_is_traced_by_what_it_says_of_its_input():
    request = TraceRequest(path=EXAMPLE, function="build_model", micro_batch=4, seq_len=2048)

    result = trace(request)

    assert result.num_params == 2_421_817_344
    assert [one.count for one in result.blocks] == [32, 16]
    assert result.inputs_bytes == pytest.approx(4 * 2049 * 8, rel=0.02)


def traced_apart(request: TraceRequest, folder: Path) -> ModuleTrace:
    """The trace from a process of its own, as the command line makes it."""
    asked, answered = folder / "request.json", folder / "answer.json"
    asked.write_text(json.dumps(asdict(request)))
    command = [sys.executable, "-m", "drystone.run.train.tracing.trace", str(asked), str(answered)]
    subprocess.run(command, check=True, capture_output=True)
    return parse_trace(json.loads(answered.read_text())["trace"])


@pytest.mark.parametrize(
    ("function", "kernels"),
    [
        ("llama", Kernels.CUDA),
        ("experts_every_third", Kernels.CPU),
        ("by_index", Kernels.CUDA),
    ],
)
def test_a_process_of_its_own_changes_no_number(function: str, kernels: Kernels, tmp_path: Path):
    request = a_request(function, kernels=kernels, recompute=RecomputeKind.FULL)

    apart, within = traced_apart(request, tmp_path), trace(request)

    assert replace(apart, trace_seconds=0) == replace(within, trace_seconds=0)


def test_eight_billion_parameters_fit_in_a_small_process(tmp_path: Path):
    request = replace(
        a_request("llama_8b", step_kernel=StepKernel.FOREACH), micro_batch=1, seq_len=4096
    )

    result = traced_apart(request, tmp_path)

    needed_bytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    assert needed_bytes < 1.5e9
    assert result.num_params == 8_030_261_248
    assert result.peak_bytes == pytest.approx(MEMTRACKER_8B_BYTES, rel=0.03)
