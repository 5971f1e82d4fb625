"""What a training config asks for, whichever tool it is of: batch, split, precision, adapters."""

from __future__ import annotations

from dataclasses import dataclass, field

from drystone.describe.layout import Layout, Schedule, Sharding
from drystone.describe.recipe import (
    AttentionKernel,
    Loss,
    Offload,
    Optimizer,
    Precision,
    Recompute,
    Tuning,
)
from drystone.errors import InvalidSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A run as its config describes it; every tool's keys are read into these fields."""

    model: str = ""
    num_gpus: int = 0  # 0: the config does not say
    seq_len: int = 0  # 0: the model's usual one
    micro_batch: int = 1
    accumulation: int = 1  # micro-batches of each data-parallel rank in a step
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    sharding: Sharding = Sharding.NONE
    shard_size: int = 0
    keep_gathered: bool = False
    sequence_parallel: bool = False
    virtual_stages: int = 1
    recompute: Recompute = field(default_factory=Recompute)
    precision: Precision = Precision.FP32
    optimizer: Optimizer = Optimizer.ADAM
    attention: AttentionKernel = AttentionKernel.FUSED
    loss: Loss = Loss.PLAIN
    tuning: Tuning = Tuning.FULL
    lora_rank: int = 16
    weight_bits: float = 0.0
    offload: Offload = Offload.NONE
    compiled: bool = False
    launcher: str = field(default="pytorch", compare=False)

    def dp(self, num_gpus: int = 0) -> int:
        """Data-parallel ranks on so many GPUs; none given: on as many as the config says, or 1."""
        count, group = num_gpus or self.num_gpus, self.tp * self.pp * self.cp
        if count % group:
            raise InvalidSpec(
                f"the config asks for tp x pp x cp = {self.tp} x {self.pp} x {self.cp}, "
                f"which does not divide {count} GPUs"
            )
        return max(count // group, 1)

    def global_batch(self, num_gpus: int = 0) -> int:
        """Sequences in a step."""
        return self.micro_batch * self.accumulation * self.dp(num_gpus)

    def layout(self, num_gpus: int = 0) -> Layout:
        """The split that the config asks for, on so many GPUs."""
        dp = self.dp(num_gpus)
        return Layout(
            dp=dp,
            tp=self.tp,
            pp=self.pp,
            cp=self.cp,
            ep=self.ep,
            micro_batch=self.micro_batch,
            sharding=self.sharding,
            shard_size=self.shard_size if self.shard_size < dp * self.cp else 0,
            keep_gathered=self.keep_gathered,
            sequence_parallel=self.sequence_parallel,
            virtual_stages=self.virtual_stages,
            schedule=Schedule.INTERLEAVED if self.virtual_stages > 1 else Schedule.ONE_F_ONE_B,
        )
