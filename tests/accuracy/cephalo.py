"""Splits over unlike GPUs, judged by the layer times that Cephalo's authors measured and ship.

Each case is a model on their cluster of four or eight GPUs at sequence 512 and batch 64. The best
split is the exact one on their times and their memory (`tests/unit/plan/uneven`); one of ours is
judged by the same times, whatever it was made with.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "plan" / "uneven"))
import test_assignment_cephalo as published

from drystone.describe.catalogue import find_gpu
from drystone.describe.families.huggingface import parse_config
from drystone.describe.layout import Sharding
from drystone.describe.machine import default_machine
from drystone.describe.model import ModelSpec
from drystone.describe.pool import GpuGroup, Pool, make_pool
from drystone.describe.profile import Profile, TimedLayer, adopt_profiles, forget_profiles
from drystone.describe.recipe import AttentionKernel, Precision, Recipe
from drystone.plan.plan import Plan
from drystone.plan.uneven.assignment import Assignment, plan_assignment
from drystone.plan.uneven.data_parallel import plan_uneven
from drystone.run.train.balance import Balance, Division
from drystone.units import GiB

SEQ_LEN, BATCH = 512, 64
GPUS = {"a6000": "RTX-A6000", "l4": "L4", "p40": "P40", "p100": "P100-16GB-PCIe"}
PRECISIONS = {"float16": Precision.FP16_MIXED, "float32": Precision.FP32}


def _gpt(hidden: int, layers: int, heads: int) -> dict[str, object]:
    return {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": hidden,
        "n_layer": layers, "n_head": heads, "n_inner": 4 * hidden, "vocab_size": 49152,
        "n_positions": 1024,
    }  # fmt: skip


def _llama(hidden: int, ffn: int, layers: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 49152, "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    }  # fmt: skip


CONFIGS = {
    "gpt_1.3b": _gpt(2048, 24, 128),
    "gpt_2.7b": _gpt(2560, 32, 80),
    "llama_tiny": _llama(2048, 5632, 22),
    "llama_3b": _llama(3200, 8640, 26),
}


@dataclass(frozen=True)
class Case:
    """One of the published clusters, a model, a precision, and which memory table is meant."""

    cluster: tuple[str, ...]
    model: str
    dtype: str
    label: str

    @property
    def spec(self) -> ModelSpec:
        return parse_config(CONFIGS[self.model], where=self.model, name=self.model)

    @property
    def recipe(self) -> Recipe:
        return Recipe(
            seq_len=SEQ_LEN, global_batch=BATCH, precision=PRECISIONS[self.dtype],
            attention=AttentionKernel.EAGER,
        )  # fmt: skip

    def seconds(self, gpu: str, column: str) -> np.ndarray:
        return published.layer_seconds(self.model, gpu, self.dtype, f"{column}_ms_per_layer")

    def profile(self, gpu: str) -> Profile:
        forward, backward = self.seconds(gpu, "forward"), self.seconds(gpu, "backward")
        layers = [
            TimedLayer(
                model=self.model, seq_len=SEQ_LEN, micro_batch=size,
                forward_seconds=forward[size], backward_seconds=backward[size],
            )
            for size in range(1, published.LARGEST + 1)
        ]  # fmt: skip
        return Profile(
            device=GPUS[gpu], precision=PRECISIONS[self.dtype].value, layers=tuple(layers)
        )

    def pool(self) -> Pool:
        kinds = dict.fromkeys(self.cluster)
        groups = [
            GpuGroup(machine=default_machine(find_gpu(GPUS[gpu])), count=self.cluster.count(gpu))
            for gpu in kinds
        ]
        return make_pool(groups)

    def plan(self, *, is_measured: bool) -> Plan:
        """Our split, from the formulas or from the published times."""
        try:
            if is_measured:
                adopt_profiles(self.profile(gpu) for gpu in set(self.cluster))
            found = plan_uneven(self.spec, self.recipe, self.pool())
        finally:
            forget_profiles()
        assert isinstance(found, Plan)
        return found

    def rank_seconds(self, gpu: str, batch: int, micro_batch: int, *, recomputes: bool) -> float:
        """What a rank takes for its batch of one layer, by the published times."""
        forward, backward = self.seconds(gpu, "forward"), self.seconds(gpu, "backward")
        each = (2 if recomputes else 1) * forward + backward
        if batch == 0:
            return 0.0
        number = -(-batch // max(micro_batch, 1))
        sizes = [batch * (part + 1) // number - batch * part // number for part in range(number)]
        return float(sum(each[size] for size in sizes))

    def judged(self, plan: Plan) -> float:
        """Seconds of a layer on the slowest rank."""
        gpus = {find_gpu(name).name: short for short, name in GPUS.items()}
        recomputes = plan.sharding is Sharding.ZERO3
        return max(
            self.rank_seconds(
                gpus[share.gpu], share.batch, share.micro_batch, recomputes=recomputes
            )
            for share in plan.stages[0].ranks
        )

    def best(self) -> float:
        """Seconds of a layer under the best split by their times and memory, layer by layer."""
        found = plan_assignment(
            published.cephalo_spec(self.cluster, self.model, self.dtype, self.label)
        )
        assert isinstance(found, Assignment)
        return max(
            self.rank_seconds(
                self.cluster_kinds[rank.kind_index], rank.batch, rank.micro_batch, recomputes=True
            )
            for rank in found.ranks()
        )

    def learned(self, plan: Plan, num_steps: int) -> float:
        """Seconds of a layer after so many steps of `Balance`, which sees the published times."""
        short = {find_gpu(name).name: gpu for gpu, name in GPUS.items()}
        shares = [share for share in plan.stages[0].ranks for _ in range(share.count)]
        gpus = [short[share.gpu] for share in shares]
        division = Division(
            tuple(share.batch for share in shares), tuple(share.micro_batch for share in shares)
        )
        balance = Balance(division.micro_batches)
        largest = [
            self._largest_micro_batch(gpu, share.state_share)
            for gpu, share in zip(gpus, shares, strict=True)
        ]
        balance.limit([0] * len(shares), largest)
        for step in range(num_steps + 1):
            seconds = [
                self.rank_seconds(gpu, batch, size, recomputes=True)
                for gpu, batch, size in zip(gpus, *division, strict=True)
            ]
            if step < num_steps:
                division = balance.see(division.batches, seconds) or division
        return max(seconds)

    def _largest_micro_batch(self, gpu: str, state_share: float) -> int:
        """By the published memory, beside the state that the rank holds."""
        memory, num_params = published.compute_memory_bytes(self.model, self.dtype, self.label)
        state = state_share * published.STATE_BYTES_PER_PARAMETER * num_params
        room = published.CAPACITY_GIB[gpu] * GiB - state
        return int(np.searchsorted(memory, room, side="right")) - 1

    @property
    def cluster_kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.cluster))


CASES = tuple(
    Case(cluster, model, dtype, label)
    for cluster, model, dtype, label, *_ in published.GOLDEN
    if model in CONFIGS
)
