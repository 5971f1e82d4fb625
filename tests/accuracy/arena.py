"""Arena's measured optima: the rows, and the models, recipes and machines they were run with.

Read from the authors' code (github:sjtu-epcc/arena, runtime/crius_worker/jax): `configs.py` (the
shapes), `trainer/*_trainer.py` (fp16 with an fp32 master, AdamW or Adafactor, attention written
out, rematerialisation, Alpa's search for stages), `run.sh` (16 micro-batches), `train.py` (XLA gets
80 % of a GPU's memory), runtime/jaxpr/device_info (an A100 has 40 GB).
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import median

import numpy as np

from drystone.describe.catalogue import find_gpu
from drystone.describe.layout import Layout, Sharding
from drystone.describe.machine import Link, Machine
from drystone.describe.model import Attention, Block, Experts, Head, Mlp, ModelSpec, Norm
from drystone.describe.recipe import (
    AttentionKernel,
    Optimizer,
    Precision,
    Recipe,
    Recompute,
    RecomputeKind,
)
from drystone.plan.cells.search import search_cells
from drystone.units import GB, MiB

ROWS = Path(__file__).resolve().parents[1] / "data" / "arena_best_plans.csv"
NUM_MICRO_BATCHES = 16
FULL = Recompute(kind=RecomputeKind.FULL)
# Two measured times that differ by less say nothing about which is faster.
LEAST_DIFFERENCE = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One row: what the best plan that Alpa found took on some GPUs."""

    model: str
    global_batch: int
    gpu: str
    num_nodes: int
    num_gpus: int
    step_seconds: float

    @property
    def family(self) -> str:
        """`bert` or `moe`."""
        return self.model.split("_")[0]

    @property
    def is_calibration(self) -> bool:
        """Whether the launcher `alpa` was set on this row; the others were held out."""
        return self.family == "bert" and self.gpu in ("A40", "A100")


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """The best Cell for one row."""

    row: Measured
    step_seconds: float
    layout: Layout

    @property
    def error(self) -> float:
        """Of the step time, relative."""
        return self.step_seconds / self.row.step_seconds - 1.0


def load_rows() -> list[Measured]:
    """The rows that ran."""
    lines = ROWS.read_text(encoding="utf-8").splitlines()
    rows = [
        Measured(
            model=row["model"],
            global_batch=int(row["global_batch"]),
            gpu=row["gpu_type"],
            num_nodes=int(row["num_nodes"]),
            num_gpus=int(row["num_gpus"]),
            step_seconds=float(row["iter_time_s"]),
        )
        for row in csv.DictReader(line for line in lines if not line.startswith("#"))
    ]
    return [row for row in rows if row.step_seconds > 0]


def predict(row: Measured) -> Predicted | None:
    """The best Cell among what Alpa could choose; None if none fits.

    Alpa was given 16 micro-batches of the whole job, so `dp x micro_batch` is fixed; it neither
    interleaves stages nor gathers weights layer by layer; a group of tokens for the experts is two
    sequences, and stays whole.
    """
    cells = search_cells(
        build_model(row.model),
        build_recipe(row),
        build_machine(row),
        (row.num_gpus,),
        recomputes=(FULL,),
    )
    layouts = cells.layouts
    allowed = (
        (layouts.dp * layouts.micro_batch * NUM_MICRO_BATCHES == row.global_batch)
        & (layouts.virtual_stages == 1)
        & (layouts.sharding != Sharding.ZERO3)
    )
    if row.family == "moe":
        allowed &= layouts.micro_batch % 2 == 0
    best = cells.take(np.flatnonzero(allowed)).best()
    if not len(best):
        return None
    return Predicted(row=row, step_seconds=float(best.step_seconds[0]), layout=best.layout(0))


def median_error(predictions: Sequence[Predicted]) -> float:
    """Of the absolute relative errors."""
    return median(abs(one.error) for one in predictions)


def ranked_pairs(predictions: Sequence[Predicted]) -> Iterator[tuple[Predicted, Predicted, bool]]:
    """Each two sets of GPUs for the same job, and whether the faster one was seen to be so."""
    for one, other in combinations(predictions, 2):
        mine, its = one.row.step_seconds, other.row.step_seconds
        same_job = (one.row.model, one.row.global_batch) == (
            other.row.model,
            other.row.global_batch,
        )
        if same_job and max(mine, its) >= (1 + LEAST_DIFFERENCE) * min(mine, its):
            yield one, other, (one.step_seconds < other.step_seconds) == (mine < its)


# --- models ----------------------------------------------------------------------------------

# Hidden size, layers, heads.
_BERT = {
    "760M": (1536, 24, 16), "1.3B": (2048, 24, 32), "2.6B": (2560, 32, 32), "6.7B": (4096, 32, 32),
}  # fmt: skip
# Hidden size, layers, heads, experts.
_MOE = {
    "690M": (768, 8, 16, 16), "1.3B": (768, 16, 16, 16), "2.4B": (1024, 16, 16, 16),
    "10B": (1536, 16, 16, 32), "27B": (2048, 16, 16, 48),
}  # fmt: skip
_GROUP_TOKENS = 2048  # the tokens that share the places of the experts


def build_model(name: str) -> ModelSpec:
    """The shape behind `bert_760M` or `moe_2.4B`."""
    family, size = name.split("_")
    return _bert(name, *_BERT[size]) if family == "bert" else _moe(name, *_MOE[size])


def _attention(hidden: int, heads: int) -> Attention:
    return Attention(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        qkv_bias=True,
        out_bias=True,
        causal=False,
    )


def _bert(name: str, hidden: int, layers: int, heads: int) -> ModelSpec:
    mlp = Mlp(ffn_size=4 * hidden, gated=False, bias=True)
    block = Block(attention=_attention(hidden, heads), feed_forward=mlp, norm=Norm.LAYER)
    return ModelSpec(
        name=name,
        hidden_size=hidden,
        stack=((block, layers),),
        vocab_size=51200,
        learned_positions=512,
        has_embedding_norm=True,
        num_final_norms=0,
        final_norm=Norm.LAYER,
        head=Head.MASKED,
        head_bias=True,
    )


def _moe(name: str, hidden: int, layers: int, heads: int, experts: int) -> ModelSpec:
    """Every second layer has experts, two a token; both kinds of layer are 8 hidden sizes wide.

    Tokens reach their experts and come back by multiplication with a mask (GShard) that has two
    places for each token of a group. That costs as much as a feed-forward network of that width
    which every token passes, so it stands here as one (its weights, 2 to 4 %, are not real).
    """
    routed = Experts(
        num_experts=experts,
        top_k=2,
        ffn_size=8 * hidden,
        gated=False,
        activation="relu",
        shared_ffn_size=2 * _GROUP_TOKENS,
    )
    plain = Mlp(ffn_size=8 * hidden, gated=False, bias=True)
    attention = _attention(hidden, heads)
    pair = tuple(
        (Block(attention=attention, feed_forward=one, norm=Norm.LAYER), 1)
        for one in (routed, plain)
    )
    return ModelSpec(
        name=name,
        hidden_size=hidden,
        stack=pair * (layers // 2),
        vocab_size=32000,
        learned_positions=1024,
        has_embedding_norm=True,
        num_final_norms=0,
        final_norm=Norm.LAYER,
        head_bias=True,
    )


# --- recipe and machine ----------------------------------------------------------------------


def build_recipe(row: Measured) -> Recipe:
    """How the row was trained."""
    return Recipe(
        seq_len=1024,
        global_batch=row.global_batch,
        precision=Precision.FP16_MIXED,
        optimizer=Optimizer.ADAM if row.family == "bert" else Optimizer.ADAFACTOR,
        attention=AttentionKernel.EAGER,
        recompute=FULL,
        launcher="alpa",
    )


# The GPU; GB/s inside a node; GB/s of a node by nodes and GPUs a node. Rates are what the 16-bit
# gradients of a model reach in an all-reduce, by the seconds that Arena's measured tables
# (runtime/jaxpr/comm_data) give it in its own estimates of data-parallel plans. For V100 there are
# no such estimates: inside, half of what large messages reach, as for the others; between nodes,
# assumed, like the A100.
_MACHINES = {
    "A100": ("A100-40GB-SXM", 60.0, {(2, 2): 2.0, (2, 4): 2.7}),
    "V100": ("V100-32GB-SXM", 60.0, {(2, 8): 2.7}),
    "A40": ("A40-48GB", 7.1, {(2, 1): 1.0, (2, 2): 1.8, (4, 2): 1.6, (8, 2): 0.71}),
    "A10": ("A10-24GB", 7.6, {(2, 2): 2.4, (4, 2): 2.2, (8, 2): 1.8}),
}
# Small messages take 35 to 110 us inside a node and 100 to 430 us between nodes.
_INSIDE_SECONDS, _BETWEEN_SECONDS = 35e-6, 100e-6
_XLA_SHARE = 0.8  # of a GPU's memory; the CUDA context lies outside of it
_CONTEXT_BYTES = 1113 * MiB


def build_machine(row: Measured) -> Machine:
    """The nodes of the row."""
    name, inside, between = _MACHINES[row.gpu]
    gpu = find_gpu(name)
    per_node = row.num_gpus // row.num_nodes
    node = between[row.num_nodes, per_node] if row.num_nodes > 1 else inside
    return Machine(
        gpu=replace(gpu, usable_bytes=int(_XLA_SHARE * gpu.usable_bytes + _CONTEXT_BYTES)),
        gpus_per_node=per_node,
        intra=Link(
            name="inside",
            bandwidth_bytes_per_second=inside * GB,
            latency_seconds=_INSIDE_SECONDS,
        ),
        inter=Link(
            name="between",
            bandwidth_bytes_per_second=node * GB / per_node,
            latency_seconds=_BETWEEN_SECONDS,
        ),
    )
