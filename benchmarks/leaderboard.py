"""The same published runs through Drystone and through what people use instead: who is nearer?

    python benchmarks/leaderboard.py

Memory and speed of full training, every source counting equally. Drystone by constants chosen
without the source of a row; the others have none that were chosen. `llm-analysis` is the package
itself where it is installed (`pip install llm-analysis`), with what it needs of a GPU from our
catalogue and, for speed, with the one share of the peak that suits it best in hindsight. The
others are formulas, written anew and tested against values that their authors published
(`tests/unit/test_leaderboard.py`): accelerate's `estimate-memory` (batch of 1, one GPU; divided by
the ranks that share state), DeepSpeed's `estimate_zero{2,3}_model_states_mem_needs`, Megatron's
theoretical memory report and Frenzy's predictor (arXiv:2412.14479).
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping
from statistics import median

import numpy as np

from drystone.describe.layout import Sharding
from drystone.describe.model import Experts
from drystone.describe.recipe import Precision, RecomputeKind, Tuning
from drystone.errors import DrystoneError
from drystone.estimate.learned.residuals import family_of
from drystone.estimate.parameters import count_model
from drystone.observe.check.accuracy import MEMORY_TABLE, SPEED_TABLE, estimate_run
from drystone.observe.check.runs import PublishedRun, load_runs, machine_of
from figures import Figures, print_figures

Estimator = Callable[[PublishedRun], float]
_SHARES_OF_PEAK = tuple(share / 100 for share in range(20, 101, 5))
_FP32 = (Precision.FP32, Precision.TF32)


# --- formulas of others ----------------------------------------------------------------------


def accelerate_bytes(num_params: float, *, is_fp32: bool) -> float:
    """`accelerate estimate-memory`, training with Adam: the largest of its four sizes."""
    weights = 4 * num_params
    sizes = {"model": weights, "gradients": weights, "optimizer": 2 * weights}
    sizes["step"] = 4 * weights if is_fp32 else sizes["optimizer"]
    if not is_fp32:
        sizes["gradients"] = 1.5 * weights
    return max(sizes.values())


def deepspeed_zero2_bytes(num_params: float, num_gpus: int) -> float:
    """`estimate_zero2_model_states_mem_needs` without offload, one GPU."""
    return 4 * num_params + 16 * num_params / num_gpus


def deepspeed_zero3_bytes(num_params: float, largest_layer: float, num_gpus: int) -> float:
    """`estimate_zero3_model_states_mem_needs` without offload, one GPU."""
    return 4 * largest_layer + 18 * num_params / num_gpus


def megatron_activation_bytes(
    *,
    tokens: float,
    hidden: float,
    ffn: float,
    vocab: float,
    layers: int,
    tp: int,
    pp: int,
    vpp: int,
    num_micro: int,
    is_selective: bool,
) -> float:
    """Megatron's theoretical report: with sequence parallelism and selective recomputation, or not.

    `tokens`: of one micro-batch.
    """
    around = tokens * pp * (8 + hidden)  # input of the embedding, and its dropout
    in_flight = 1 + (pp - 1) / (pp * vpp) if vpp > 1 else min(1.0, num_micro / pp)
    if is_selective:
        total = (tokens * hidden * (18 + 4 * ffn / hidden) * layers + around) * in_flight
        if pp == 1:
            total += 4 * tokens * (hidden + vocab)
        return total / tp
    total = (tokens * hidden * (10 + 24 / tp) * layers + around) * in_flight
    if pp == 1:
        total += 2 * tokens * (vocab / tp + hidden)
    return 1.05 * total


def frenzy_bytes(
    *, vocab: int, hidden: int, layers: int, heads: int, seq_len: int, micro_batch: int, tp: int
) -> float:
    """Frenzy's predictor: 20 bytes a parameter, activations without recomputation."""
    params = vocab * hidden + layers * (12 * hidden**2 + 13 * hidden)
    per_token = 10 + 24 / tp + 5 * heads * seq_len / (hidden * tp)
    return 20 * params / tp + seq_len * micro_batch * hidden * layers * per_token


# --- a published run as they would be asked ---------------------------------------------------


def _ffn(run: PublishedRun) -> float:
    part = run.model.stack[-1][0].feed_forward
    return float(part.ffn_size) * (part.top_k if isinstance(part, Experts) else 1)


def _params_here(run: PublishedRun) -> float:
    layout = run.layout
    return count_model(run.model).total / (layout.tp * layout.pp)


def by_accelerate(run: PublishedRun) -> float:
    """Nothing of activations, and one GPU: divided among the ranks that share everything."""
    ranks = run.layout.dp * run.layout.cp if run.layout.sharding is Sharding.ZERO3 else 1
    is_fp32 = run.recipe.precision in _FP32
    return accelerate_bytes(_params_here(run), is_fp32=is_fp32) / ranks


def by_deepspeed(run: PublishedRun) -> float:
    """Its two estimators are for ZeRO-2 and ZeRO-3; states only."""
    layout, params = run.layout, _params_here(run)
    ranks = layout.dp * layout.cp
    if layout.sharding is Sharding.ZERO3:
        largest = run.model.hidden_size * run.model.vocab_size / layout.tp
        return deepspeed_zero3_bytes(params, largest, ranks)
    return deepspeed_zero2_bytes(params, ranks if layout.sharding is not Sharding.NONE else 1)


def by_megatron(run: PublishedRun) -> float:
    """Weights and optimizer of the fullest shard, and activations."""
    layout, model, recipe = run.layout, run.model, run.recipe
    embedding = model.hidden_size * model.vocab_size
    block = count_model(model).total - embedding * (1 if model.tied_embeddings else 2)
    shard = block / layout.pp + embedding
    if not model.tied_embeddings and layout.pp == 1:
        shard += embedding
    sharded = layout.sharding is not Sharding.NONE
    state = shard / layout.tp * (6 + 12 / layout.dp if sharded else 18)
    is_selective = layout.sequence_parallel and recipe.recompute.kind is RecomputeKind.SELECTIVE
    return state + megatron_activation_bytes(
        tokens=recipe.seq_len * layout.micro_batch / layout.cp,
        hidden=model.hidden_size,
        ffn=_ffn(run),
        vocab=model.vocab_size,
        layers=model.num_layers,
        tp=layout.tp,
        pp=layout.pp,
        vpp=layout.virtual_stages,
        num_micro=max(1, recipe.global_batch // (layout.dp * layout.micro_batch)),
        is_selective=is_selective,
    )


def by_frenzy(run: PublishedRun) -> float:
    """As its reviews give it; data and tensor parallelism are all it knows."""
    return frenzy_bytes(
        vocab=run.model.vocab_size,
        hidden=run.model.hidden_size,
        layers=run.model.num_layers,
        heads=run.model.stack[-1][0].attention.num_heads,
        seq_len=run.recipe.seq_len,
        micro_batch=run.layout.micro_batch,
        tp=run.layout.tp,
    )


def by_llm_analysis(run: PublishedRun, *, flops_share: float = 1.0) -> Mapping[str, float]:
    """The package's own `training()`: bytes on a GPU, tokens a second and GPU."""
    from llm_analysis.analysis import ActivationRecomputation, DSZeRO, LLMAnalysis
    from llm_analysis.config import DtypeConfig, GPUConfig, ModelConfig, ParallelismConfig

    machine, model, layout, recipe = machine_of(run), run.model, run.layout, run.recipe
    gpu, block = machine.gpu, model.stack[-1][0]
    part = block.feed_forward
    asked = ModelConfig(
        name=model.name,
        num_layers=model.num_layers,
        n_head=block.attention.num_heads,
        hidden_dim=model.hidden_size,
        vocab_size=model.vocab_size,
        max_seq_len=recipe.seq_len,
        num_key_value_heads=block.attention.num_kv_heads,
        ffn_embed_dim=None,
        expansion_ratio=part.ffn_size / model.hidden_size,
        model_type="llama" if part.gated else "gpt2",
        moe_num_experts=part.num_experts if isinstance(part, Experts) else 1,
        moe_top_k=part.top_k if isinstance(part, Experts) else 1,
    )
    bits = 32 if recipe.precision in _FP32 else 16
    analysis = LLMAnalysis(
        asked,
        GPUConfig(
            name=gpu.name,
            mem_per_GPU_in_GB=1e6,  # what does not fit has no answer there; we ask what it takes
            hbm_bandwidth_in_GB_per_sec=gpu.memory_bandwidth_bytes_per_second / 1e9,
            intra_node_bandwidth_in_GB_per_sec=machine.intra.bandwidth_bytes_per_second / 1e9,
            intra_node_min_message_latency=machine.intra.latency_seconds,
            peak_fp16_TFLOPS=(gpu.bf16_flops or gpu.fp16_flops or gpu.fp32_flops) / 1e12,
            inter_node_bandwidth_in_GB_per_sec=machine.inter.bandwidth_bytes_per_second / 1e9,
        ),
        DtypeConfig(weight_bits=bits, activation_bits=bits, embedding_bits=bits),
        ParallelismConfig(
            tp_size=layout.tp, pp_size=layout.pp, dp_size=layout.dp * layout.cp, ep_size=layout.ep,
            sp_size=layout.tp if layout.sequence_parallel else 1,
        ),
        flops_efficiency=flops_share,
    )  # fmt: skip
    recompute = {RecomputeKind.NONE: 0, RecomputeKind.SELECTIVE: 1, RecomputeKind.FULL: 2}
    num_micro = max(1, recipe.global_batch // (layout.dp * layout.micro_batch))
    answer = analysis.training(
        batch_size_per_gpu=layout.micro_batch,
        gradient_accumulation_steps=num_micro,
        seq_len=recipe.seq_len,
        total_num_tokens=1e9,
        activation_recomputation=ActivationRecomputation(recompute[recipe.recompute.kind]),
        ds_zero=DSZeRO(int(layout.sharding)),
        mlp_gated_linear_units=part.gated,
    )
    tokens = layout.dp * layout.micro_batch * num_micro * recipe.seq_len
    return {
        "memory": float(answer["(weight+op_state+grad+act)_memory_per_gpu"]),
        "speed": tokens / float(answer["latency_per_iter"]) / layout.num_gpus,
    }


# --- judging ---------------------------------------------------------------------------------


def full_runs(measure: str) -> list[tuple[PublishedRun, float]]:
    """Published runs of full training, with Drystone's estimate made without their source."""
    table = MEMORY_TABLE if measure == "memory" else SPEED_TABLE
    found = []
    for run in load_runs(table, measure=measure):
        if not isinstance(run, PublishedRun) or run.ran_out_of_memory or run.is_second_reading:
            continue
        if run.recipe.tuning is not Tuning.FULL:
            continue
        try:
            estimated, _ = estimate_run(run, measure=measure, without=run.dataset)
        except DrystoneError:
            continue
        found.append((run, estimated))
    return found


def _measured(run: PublishedRun, measure: str) -> float:
    if measure == "memory":
        return run.measured_memory_bytes
    return run.measured_tokens_per_second_per_gpu


def errors_by_source(
    runs: list[tuple[PublishedRun, float]], measure: str, estimator: Estimator | None
) -> dict[str, list[float]]:
    """Absolute errors of every source; a run without an answer is left out."""
    errors: dict[str, list[float]] = {}
    for run, ours in runs:
        try:
            value = ours if estimator is None else estimator(run)
        except (DrystoneError, AssertionError, ValueError, ZeroDivisionError, KeyError):
            continue
        if np.isfinite(value) and value > 0:
            error = abs(value / _measured(run, measure) - 1)
            errors.setdefault(run.dataset, []).append(error)
    return errors


# The runs that a formula is made for: it is judged on all, and once more on these.
MADE_FOR: dict[str, Callable[[PublishedRun], bool]] = {
    "megatron report": lambda run: family_of(run.recipe.launcher) == "megatron",
    "frenzy": lambda run: (
        run.layout.sharding is Sharding.NONE
        and run.layout.pp == 1
        and run.recipe.recompute.kind is RecomputeKind.NONE
    ),
    "deepspeed states": lambda run: run.layout.sharding in (Sharding.ZERO2, Sharding.ZERO3),
    "accelerate estimate-memory": lambda run: run.layout.num_gpus == 1,
}


def rank(measure: str, estimators: Mapping[str, Estimator | None]) -> Figures:
    """A table of all on the same rows, who is nearest on how many sources, and where we lose."""
    runs = full_runs(measure)
    found = {name: errors_by_source(runs, measure, one) for name, one in estimators.items()}
    figures: Figures = {}
    print(f"\n{measure} of full training, {len(runs)} runs; each source counts equally")
    print(f"{'estimator':<28} {'runs':>5} {'median':>8} {'90 %':>8}  nearest on")
    sources = sorted(found["drystone"])
    best = {
        source: min(
            (name for name in found if source in found[name]),
            key=lambda name: median(found[name][source]),
        )
        for source in sources
    }
    for name, errors in found.items():
        if not errors:
            continue
        middle = median(median(some) for some in errors.values())
        tail = median(float(np.quantile(some, 0.9)) for some in errors.values())
        wins = [source for source in sources if best[source] == name]
        print(f"{name:<28} {sum(map(len, errors.values())):>5} {middle:>8.1%} {tail:>8.1%}  "
              f"{len(wins)} of {len(sources)}: {', '.join(wins) or '-'}")  # fmt: skip
        if name in MADE_FOR:
            mine = [(run, ours) for run, ours in runs if MADE_FOR[name](run)]
            theirs, own = (errors_by_source(mine, measure, one) for one in (estimators[name], None))
            here = [median(median(some) for some in both.values()) for both in (theirs, own)]
            print(f"    on the {len(mine)} runs that it is made for {here[0]:.1%}, Drystone "
                  f"{here[1]:.1%}")  # fmt: skip
        key = f"{measure}_{name.split(' ')[0].replace('-', '_')}"
        figures |= {f"{key}_median": middle, f"{key}_p90": tail, f"{key}_wins": float(len(wins))}
    figures[f"{measure}_sources"] = float(len(sources))
    return figures


def main() -> None:
    """Both tables."""
    memory: dict[str, Estimator | None] = {
        "drystone": None,
        "megatron report": by_megatron,
        "frenzy": by_frenzy,
        "deepspeed states": by_deepspeed,
        "accelerate estimate-memory": by_accelerate,
    }
    speed: dict[str, Estimator | None] = {"drystone": None}
    if importlib.util.find_spec("llm_analysis") is None:
        print("llm-analysis is not installed: pip install llm-analysis, for its lines")
    else:
        logging.disable(logging.CRITICAL)
        memory["llm-analysis"] = lambda run: by_llm_analysis(run)["memory"]
        runs = full_runs("speed")

        def at(share: float) -> Estimator:
            return lambda run: by_llm_analysis(run, flops_share=share)["speed"]

        share = min(
            _SHARES_OF_PEAK,
            key=lambda one: median(
                median(some) for some in errors_by_source(runs, "speed", at(one)).values()
            ),
        )
        speed[f"llm-analysis at {share:.0%} of peak"] = at(share)
    # The stupid one: every run reaches the same share of its GPU's peak.
    speed["constant MFU 40 %"] = _constant_pace
    print_figures(rank("memory", memory) | rank("speed", speed))


def _constant_pace(run: PublishedRun) -> float:
    """A GPU that always reaches 40 % of its dense 16-bit peak: what people reckon with by hand."""
    gpu = machine_of(run).gpu
    active = count_model(run.model).active
    return 0.4 * (gpu.bf16_flops or gpu.fp16_flops or gpu.fp32_flops) / (6 * active)


if __name__ == "__main__":
    main()
