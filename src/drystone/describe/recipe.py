"""How a model is to be trained: batch, precision, optimizer, recomputation, what is trained.

Everything here changes what is computed or kept, and nothing says on which GPUs. How the work is
split is a `Layout`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from drystone.describe.gpu import GpuSpec
from drystone.errors import InvalidSpec, UnknownName

_MOST = 10**9  # of sequences and tokens: beyond it somebody mistyped


class Precision(StrEnum):
    """The number format of weights and of the matrix multiplications."""

    FP32 = "fp32"
    TF32 = "tf32"  # fp32 everywhere, multiplied by tensor cores
    FP16_MIXED = "fp16-mixed"  # 16-bit weights and compute, fp32 master
    BF16_MIXED = "bf16-mixed"
    FP16 = "fp16"  # weights, gradients and states all 16 bit
    BF16 = "bf16"
    FP8_MIXED = "fp8-mixed"  # matrix multiplications in fp8 over bf16-mixed, one scale a tensor
    MXFP8_MIXED = "mxfp8-mixed"  # the same with one scale for 32 numbers
    NVFP4_MIXED = "nvfp4-mixed"  # in 4 bit, one scale for 16 numbers
    AMP_FP16 = "amp-fp16"  # fp32 weights, gradients and states; 16-bit compute by autocast
    AMP_BF16 = "amp-bf16"


LOW_PRECISIONS = (Precision.FP8_MIXED, Precision.MXFP8_MIXED, Precision.NVFP4_MIXED)


def auto_precision(gpus: Iterable[GpuSpec], *, is_emulated: bool = False) -> Precision:
    """What `auto` means: the 16-bit format that every GPU the work may run on has in common.

    bf16 needs no scaling of the loss; fp16 is for GPUs before Ampere, which have no bf16. Devices
    that are emulated on a processor train in fp32: 16 bits save nothing there.
    """
    if is_emulated:
        return Precision.FP32
    knows_bf16 = all(gpu.bf16_flops for gpu in gpus)
    return Precision.BF16_MIXED if knows_bf16 else Precision.FP16_MIXED


class Optimizer(StrEnum):
    """Which optimizer, as far as its state and step differ."""

    ADAM = "adam"  # Adam and AdamW keep the same state
    ADAM_8BIT = "adam-8bit"
    SGD = "sgd"
    SGD_MOMENTUM = "sgd-momentum"
    ADAFACTOR = "adafactor"
    LION = "lion"
    MUON = "muon"
    LAMB = "lamb"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts:
    """What an optimizer keeps, moves and needs: all that estimates and plans ask of it."""

    moments: float  # kept per parameter, in parameter-sized tensors
    step_traffic: float  # bytes that a step moves per parameter, over those of Adam in fp32
    needs_whole_matrices: bool = False  # looks at rows, columns or blocks of a parameter
    moment_bytes: float | None = None  # of each moment; None: as wide as the recipe keeps state


# Adafactor keeps a row and a column instead of a matrix (arXiv:1804.04235): under 1 % of it at
# usual widths. Muon keeps one momentum for matrices (arXiv:2502.16982). 8-bit states carry one fp32
# scale for a block of 256 values (arXiv:2110.02861).
OPTIMIZERS = {
    Optimizer.ADAM: OptimizerFacts(moments=2.0, step_traffic=1.0),
    Optimizer.ADAM_8BIT: OptimizerFacts(
        moments=2.0, step_traffic=0.55, needs_whole_matrices=True, moment_bytes=1 + 4 / 256
    ),
    Optimizer.SGD: OptimizerFacts(moments=0.0, step_traffic=0.45),
    Optimizer.SGD_MOMENTUM: OptimizerFacts(moments=1.0, step_traffic=0.7),
    Optimizer.ADAFACTOR: OptimizerFacts(moments=0.01, step_traffic=0.8, needs_whole_matrices=True),
    Optimizer.LION: OptimizerFacts(moments=1.0, step_traffic=0.75),
    Optimizer.MUON: OptimizerFacts(moments=1.0, step_traffic=1.0, needs_whole_matrices=True),
    Optimizer.LAMB: OptimizerFacts(moments=2.0, step_traffic=1.2),
}


# Bits of a frozen weight that our runtime keeps under QLoRA, scales included; 0: by `tuning`.
TRAINED_WEIGHT_BITS = (0.0, 4.5)


class StepKernel(StrEnum):
    """How the optimizer walks over the parameters; it decides the temporaries of the step."""

    FUSED = "fused"
    FOREACH = "foreach"
    LOOP = "loop"


class AttentionKernel(StrEnum):
    """Whether attention keeps the matrix of scores (eager) or not (fused: flash, cuDNN)."""

    FUSED = "fused"
    EAGER = "eager"


class Loss(StrEnum):
    """How the loss over the vocabulary is computed."""

    PLAIN = "plain"  # full logits, cross-entropy in fp32
    FUSED = "fused"  # logits kept, loss and its gradient in one kernel, in place
    CHUNKED = "chunked"  # logits exist one chunk at a time (Liger, linear-cross-entropy)


class ExpertDispatch(StrEnum):
    """How tokens travel to their experts and back."""

    AUTO = "auto"  # as the launcher does it
    ALLTOALL = "alltoall"  # each copy of a token on its own (NCCL)
    FUSED = "fused"  # a token goes to each node and rank once (DeepEP, HybridEP)


class CudaGraphs(StrEnum):
    """What of a step is recorded once, so that the host no longer launches it."""

    AUTO = "auto"  # as the launcher does it
    NONE = "none"
    LAYERS = "layers"  # attention and router of each layer, not what depends on token counts
    FULL = "full"  # the whole step; experts then have a fixed capacity


class Tuning(StrEnum):
    """What is trained."""

    FULL = "full"
    LORA = "lora"
    QLORA = "qlora"


class Offload(StrEnum):
    """What lives in host memory instead of on the GPU."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    STATE = "state"  # parameters, gradients and optimizer
    ACTIVATIONS = "activations"


class RecomputeKind(StrEnum):
    """What of a recomputed layer is thrown away and computed again in the backward pass."""

    NONE = "none"
    SELECTIVE = "selective"  # Megatron: the attention core; torch: every second product
    FULL = "full"


# What Megatron can recompute by itself inside a layer (`recompute_modules`).
RECOMPUTE_MODULES = (
    "core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Activation recomputation, in every `every`-th layer: all of it, or single modules."""

    kind: RecomputeKind = RecomputeKind.NONE
    every: float = 1  # 4 means a quarter of the layers; 2.5 two of five
    modules: tuple[str, ...] = ()  # of `selective`; none: as the launcher means it

    def __post_init__(self) -> None:
        if not self.every >= 1:
            raise InvalidSpec(f"recompute: every is {self.every}, must be >= 1")
        if self.modules and self.kind is not RecomputeKind.SELECTIVE:
            raise InvalidSpec("recompute: modules are named for selective recomputation only")
        for module in self.modules:
            if module not in RECOMPUTE_MODULES:
                raise UnknownName("module to recompute", module, RECOMPUTE_MODULES)

    @classmethod
    def parse(cls, text: str) -> Recompute:
        """`none`, `selective`, `full`, `full/2` (every second layer), `selective[moe_act,mlp]`."""
        match = re.fullmatch(
            r"(none|selective|full)(?:\[([\w, ]*)\])?(?:/(\d+(?:\.\d+)?))?", text.strip().lower()
        )
        if match is None:
            raise InvalidSpec(
                f"recompute: {text!r} is not known",
                hint="Write none, selective, full, full/2 for every second layer, or "
                "selective[moe_act,layernorm] for single modules",
            )
        return cls(
            kind=RecomputeKind(match.group(1)),
            every=float(match.group(3) or 1),
            modules=tuple(re.findall(r"\w+", match.group(2) or "")),
        )

    def __str__(self) -> str:
        modules = f"[{','.join(self.modules)}]" if self.modules else ""
        return f"{self.kind.value}{modules}" + ("" if self.every == 1 else f"/{self.every:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Low-rank adapters: their rank and the matrices they stand beside."""

    rank: int = 16
    alpha: float = 0.0  # their product counts alpha / rank times; 0: as rank, so once
    targets: tuple[str, ...] = ("q", "k", "v", "o", "gate", "up", "down")
    dropout: float = 0.0
    dtype_bytes: int = 0  # bytes of one adapter weight; 0: as the precision says
    train_embeddings: bool = False  # token embedding and head are trained too, whole

    KNOWN_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise InvalidSpec(f"lora: rank is {self.rank}, must be >= 1")
        if self.alpha < 0:
            raise InvalidSpec(f"lora: alpha is {self.alpha}, must be >= 0")
        if not 0.0 <= self.dropout < 1.0:
            raise InvalidSpec(f"lora: dropout is {self.dropout}, must be in [0, 1)")
        for target in self.targets:
            if target not in self.KNOWN_TARGETS:
                raise InvalidSpec(f"lora: unknown target {target!r}",
                                  hint="Known: " + ", ".join(self.KNOWN_TARGETS))  # fmt: skip

    @property
    def scale(self) -> float:
        """How often the product of the two thin matrices counts."""
        return self.alpha / self.rank if self.alpha else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One way to train: what changes the arithmetic or the bytes, and nothing about hardware."""

    seq_len: int
    global_batch: int  # sequences in one optimizer step
    precision: Precision = Precision.BF16_MIXED
    optimizer: Optimizer = Optimizer.ADAM
    step_kernel: StepKernel = StepKernel.FUSED
    recompute: Recompute = field(default_factory=Recompute)
    attention: AttentionKernel = AttentionKernel.FUSED
    loss: Loss = Loss.PLAIN
    tuning: Tuning = Tuning.FULL
    lora: Lora = field(default_factory=Lora)
    weight_bits: float = 0.0  # of frozen weights under QLoRA, constants included; 0: by `tuning`
    # QLoRA: embeddings, head and norms stay in 16 bit, also where the launcher would upcast them.
    keeps_16_bit: bool = False
    offload: Offload = Offload.NONE
    compiled: bool = False  # torch.compile
    expert_dispatch: ExpertDispatch = ExpertDispatch.AUTO
    cuda_graphs: CudaGraphs = CudaGraphs.AUTO
    overlap_dispatch: bool = False  # tokens of one micro-batch travel while another one computes
    balanced_experts: bool = False  # every expert gets as many tokens, as benchmarks force it
    dropout: float = 0.0
    launcher: str = "drystone"  # whose conventions on bytes apply: see estimate/launchers.py
    decoder_seq_len: int = 0  # encoder-decoder only; 0: as seq_len

    def __post_init__(self) -> None:
        for name in ("seq_len", "global_batch"):
            if not 1 <= getattr(self, name) <= _MOST:
                raise InvalidSpec(f"recipe: {name} is {getattr(self, name)}, must be 1 to {_MOST}")
        if not 0.0 <= self.dropout < 1.0:
            raise InvalidSpec(f"recipe: dropout is {self.dropout}, must be in [0, 1)")
        if self.weight_bits < 0:
            raise InvalidSpec(f"recipe: weight_bits is {self.weight_bits}, must be >= 0")
