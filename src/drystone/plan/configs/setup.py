"""What a training config asks for, whichever tool it is of: batch, split, precision, adapters."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from drystone.describe.layout import Layout, Schedule, Sharding
from drystone.describe.model import ModelSpec
from drystone.describe.recipe import (
    AttentionKernel,
    ExpertDispatch,
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
    step_batch: int = 0  # sequences in a step, where a config says these instead
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 0
    sharding: Sharding = Sharding.NONE
    shard_size: int = 0
    replicas: int = 0  # copies of the state, each shared by some ranks, where a config says these
    keep_gathered: bool = False
    sequence_parallel: bool = False
    virtual_stages: int = 1
    schedule: Schedule = Schedule.ONE_F_ONE_B
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
    expert_dispatch: ExpertDispatch = ExpertDispatch.AUTO
    launcher: str = field(default="pytorch", compare=False)
    shape: ModelSpec | None = field(default=None, compare=False)  # where keys describe the model

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
        return self.step_batch or self.micro_batch * self.accumulation * self.dp(num_gpus)

    def settled(self) -> Setup:
        """With the micro-batches that the batch of a step comes to on these GPUs."""
        at_once = self.micro_batch * self.dp()
        if not self.step_batch or not self.num_gpus:
            return self
        if self.step_batch % at_once:
            raise InvalidSpec(
                f"the config asks for {self.step_batch} sequences in a step, which micro-batches "
                f"of {self.micro_batch} on {self.dp()} data-parallel ranks do not divide"
            )
        return replace(self, accumulation=self.step_batch // at_once, step_batch=0)

    def layout(self, num_gpus: int = 0) -> Layout:
        """The split that the config asks for, on so many GPUs."""
        dp = self.dp(num_gpus)
        return Layout(
            dp=dp,
            tp=self.tp,
            pp=self.pp,
            cp=self.cp,
            ep=self.ep,
            etp=self.etp,
            micro_batch=self.micro_batch,
            sharding=self.sharding,
            shard_size=self._shard_size(dp * self.cp),
            keep_gathered=self.keep_gathered,
            sequence_parallel=self.sequence_parallel,
            virtual_stages=self.virtual_stages,
            schedule=Schedule.INTERLEAVED if self.virtual_stages > 1 else self.schedule,
        )

    def _shard_size(self, num_ranks: int) -> int:
        """Ranks that share one copy of the state; 0: all."""
        if self.replicas > 1:
            if num_ranks % self.replicas:
                raise InvalidSpec(
                    f"the config asks for {self.replicas} copies of the state, which do not "
                    f"divide {num_ranks} data-parallel ranks"
                )
            return num_ranks // self.replicas
        return self.shard_size if self.shard_size < num_ranks else 0
