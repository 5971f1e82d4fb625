"""What a transformer looks like: the shape of its blocks and of what stands around them.

A `ModelSpec` is a shape, and the few numbers without which it cannot be trained. How many
parameters, bytes and operations it comes to is the business of `drystone.estimate`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from drystone.errors import InvalidSpec


class Norm(StrEnum):
    """The kind of normalisation: a layer norm has a weight and a bias, an RMS norm a weight."""

    LAYER = "layernorm"
    LAYER_NO_BIAS = "layernorm-no-bias"
    RMS = "rmsnorm"
    NO_WEIGHT = "no-weight"


class QkNorm(StrEnum):
    """Normalisation of queries and keys before attention."""

    NONE = "none"
    HEAD = "head"  # one weight per channel of a head, shared by the heads (Qwen3, Gemma 3)
    FULL = "full"  # one weight per channel of the whole projection (OLMo 2)


class Side(StrEnum):
    """Which half of an encoder-decoder a block stands in. Other models have one side only."""

    DECODER = "decoder"
    ENCODER = "encoder"


class Head(StrEnum):
    """What turns the last hidden state into a loss."""

    LANGUAGE = "language"  # a projection onto the vocabulary
    MASKED = "masked"  # BERT: dense, norm, then the vocabulary
    CLASSIFY = "classify"  # a projection of one position onto classes
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """A mixer that keeps a state instead of looking back: Mamba, gated delta nets, lightning."""

    in_width: int  # channels of all projections of its input
    inner_width: int  # channels that it hands to its output projection
    state_size: int  # numbers of state for each inner channel
    chunk: int = 128  # tokens that are computed at a time, as a small attention
    conv_width: int = 0  # channels that pass a short convolution
    conv_kernel: int = 4
    conv_bias: bool = False
    in_bias: bool = False
    out_bias: bool = False
    small_params: int = 0  # decays, time steps, norms

    def __post_init__(self) -> None:
        _positive("recurrence", in_width=self.in_width, inner_width=self.inner_width,
                  state_size=self.state_size, chunk=self.chunk)  # fmt: skip
        _not_negative("recurrence", conv_width=self.conv_width, small_params=self.small_params)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """One mixer of tokens: grouped-query attention in general; latent (DeepSeek) when
    `kv_lora_rank` is set; with `recurrence`, heads are those of a mixer that keeps a state.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int  # channels of one query or key
    value_head_dim: int = 0  # channels of one value; 0: as head_dim
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: QkNorm = QkNorm.NONE
    window: int = 0  # sliding window in tokens; 0: sees everything
    causal: bool = True
    has_sinks: bool = False  # one learned logit per head (GPT-OSS)
    scale: float = 0.0  # of scores; 0: one over the root of head_dim
    softcap: float = 0.0  # largest score, approached smoothly (Gemma 2); 0: none
    rope_theta: float = 0.0  # base of its rotary angles, unscaled (Gemma 3); 0: as the model has
    # Latent attention: queries and keys-values pass a bottleneck; part of head_dim carries rotary.
    q_lora_rank: int = 0  # 0: queries are projected directly
    kv_lora_rank: int = 0  # 0: not latent
    rope_head_dim: int = 0  # the channels of head_dim that carry rotary, latent attention only
    has_output_gate: bool = False  # queries come with a gate as wide as they are (Qwen3-Next)
    recurrence: Recurrence | None = None

    def __post_init__(self) -> None:
        _positive("attention", num_heads=self.num_heads, num_kv_heads=self.num_kv_heads,
                  head_dim=self.head_dim)  # fmt: skip
        _not_negative("attention", value_head_dim=self.value_head_dim, window=self.window,
                      q_lora_rank=self.q_lora_rank, kv_lora_rank=self.kv_lora_rank,
                      rope_head_dim=self.rope_head_dim)  # fmt: skip
        if self.num_heads % self.num_kv_heads:
            raise InvalidSpec(
                f"attention: {self.num_heads} heads cannot share {self.num_kv_heads} "
                "key-value heads evenly",
                hint="num_heads must be a multiple of num_kv_heads",
            )
        if self.is_latent and not 0 < self.rope_head_dim < self.head_dim:
            raise InvalidSpec(
                f"latent attention: rope_head_dim is {self.rope_head_dim}, "
                f"must lie between 0 and head_dim {self.head_dim}"
            )

    @property
    def is_latent(self) -> bool:
        """Whether keys and values pass a low-rank bottleneck."""
        return self.kv_lora_rank > 0

    @property
    def v_dim(self) -> int:
        """Channels of one value head."""
        return self.value_head_dim or self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """One feed-forward network; gated ones (SwiGLU, GeGLU) have a third matrix; size 0: none."""

    ffn_size: int
    gated: bool
    bias: bool = False
    activation: str = "gelu"

    def __post_init__(self) -> None:
        _not_negative("mlp", ffn_size=self.ffn_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts: `top_k` of `num_experts` per token, plus what every token passes."""

    num_experts: int
    top_k: int
    ffn_size: int  # of one expert
    gated: bool = True
    bias: bool = False
    activation: str = "silu"
    shared_ffn_size: int = 0  # of all shared experts together
    has_shared_gate: bool = False  # Qwen: a sigmoid gate on the shared expert
    router_bias: bool = False
    num_groups: int = 1  # groups of experts that lie together (DeepSeek) ...
    top_groups: int = 1  # ... and how many of them the experts of one token may come from
    normalises_shares: bool = False  # those of the chosen experts sum up to 1 (Mixtral)
    latent_size: int = 0  # width that routed experts read and write; 0: the hidden size

    def __post_init__(self) -> None:
        _positive("experts", num_experts=self.num_experts, top_k=self.top_k, ffn_size=self.ffn_size)
        _not_negative("experts", shared_ffn_size=self.shared_ffn_size)
        if self.top_k > self.num_experts:
            raise InvalidSpec(f"experts: top_k {self.top_k} exceeds num_experts {self.num_experts}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One transformer layer."""

    attention: Attention
    feed_forward: Mlp | Experts
    norm: Norm = Norm.RMS
    num_norms: int = 2  # Gemma 2 and 3 have four; parallel residuals may have one
    cross_attention: Attention | None = None
    parallel_residual: bool = False  # attention and feed-forward read the same input
    norms_after: bool = False  # what leaves attention and feed-forward is normed (OLMo 2)
    side: Side = Side.DECODER

    def __post_init__(self) -> None:
        _not_negative("block", num_norms=self.num_norms)

    @property
    def is_moe(self) -> bool:
        """Whether the feed-forward network is a mixture of experts."""
        return isinstance(self.feed_forward, Experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """How an image becomes tokens."""

    image_size: int
    patch_size: int
    num_channels: int = 3
    has_class_token: bool = True
    patch_bias: bool = True

    def __post_init__(self) -> None:
        _positive("vision", image_size=self.image_size, patch_size=self.patch_size,
                  num_channels=self.num_channels)  # fmt: skip
        if self.image_size % self.patch_size:
            raise InvalidSpec(
                f"vision: image_size {self.image_size} is not a multiple of "
                f"patch_size {self.patch_size}"
            )

    @property
    def num_tokens(self) -> int:
        """Tokens of one image."""
        return (self.image_size // self.patch_size) ** 2 + int(self.has_class_token)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary angles differ from plain ones, so that a model reads more than it was made for."""

    kind: str  # linear, llama3 or longrope
    factor: float = 1.0
    low_frequency_factor: float = 1.0  # llama3: longer waves than so many in the context are scaled
    high_frequency_factor: float = 4.0  # llama3: shorter ones are left
    original_context: int = 0  # what it was made for
    short_factors: tuple[float, ...] = ()  # longrope: of each frequency, within that
    long_factors: tuple[float, ...] = ()  # and beyond
    table_scale: float = 1.0  # of cosines and sines


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model as a shape: runs of equal blocks in order, and what stands around them."""

    name: str
    hidden_size: int
    stack: tuple[tuple[Block, int], ...]  # (block, how many in a row), first layer first
    vocab_size: int = 0  # 0: no token embedding (vision)
    tied_embeddings: bool = False
    embedding_size: int = 0  # width of the token embedding if not hidden_size (OPT-350m, ALBERT)
    learned_positions: int = 0  # rows of the position table; 0: rotary, ALiBi, relative or none
    token_types: int = 0  # BERT's segment embedding
    has_embedding_norm: bool = False
    num_final_norms: int = 1  # T5 has two: one per side
    final_norm: Norm = Norm.RMS
    head: Head = Head.LANGUAGE
    head_bias: bool = False
    num_classes: int = 0  # with Head.CLASSIFY
    vision: Vision | None = None
    other_params: tuple[tuple[str, int], ...] = ()  # named leftovers, e.g. a pooler
    context_length: int = 0  # as published; 0: unknown
    stated_params: int = 0  # as published, to the last parameter; 0: not stated
    family: str = ""
    source: str = ""
    # The function beyond the shape, as far as the runtime's own transformer does it.
    rope_theta: float = 10_000.0  # base of the rotary angles
    norm_eps: float = 0.0  # of every norm; 0: 1e-6 for RMS norms, 1e-5 for others
    initial_std: float = 0.02  # of matrices before training
    rope_scaling: RopeScaling | None = None
    rotary_share: float = 1.0  # of each head, from its first channel on, carries positions
    norm_adds_one: bool = False  # the weight of a norm is what is added to 1 (Gemma)
    embedding_scale: float = 1.0  # embeddings are multiplied by it
    residual_scale: float = 1.0  # what each half of a block adds is multiplied by it
    logit_scale: float = 1.0  # logits are multiplied by it
    logit_softcap: float = 0.0  # largest logit, approached smoothly; 0: none
    padding_token: int = -1  # whose embedding learns nothing as what enters; -1: none
    not_done: tuple[str, ...] = ()  # what its config says and that transformer does not do
    weights: str = ""  # the folder of the weights that training begins with; empty: new ones
    weights_problem: str = ""  # why they cannot be loaded

    def __post_init__(self) -> None:
        where = f"model {self.name!r}"
        _positive(where, hidden_size=self.hidden_size)
        _not_negative(
            where,
            vocab_size=self.vocab_size,
            embedding_size=self.embedding_size,
            learned_positions=self.learned_positions,
            token_types=self.token_types,
            num_final_norms=self.num_final_norms,
            num_classes=self.num_classes,
        )
        if not self.stack:
            raise InvalidSpec(f"{where} has no layers")
        for _, count in self.stack:
            _positive(where, num_layers=count)
        if not (self.rope_theta > 0 and self.norm_eps >= 0 and self.initial_std > 0):
            raise InvalidSpec(f"{where}: rope_theta, norm_eps and initial_std cannot be below 0")

    @property
    def num_layers(self) -> int:
        """All blocks, both sides."""
        return sum(count for _, count in self.stack)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The distinct kinds of block, in order of first appearance."""
        return tuple(dict.fromkeys(block for block, _ in self.stack))

    @property
    def is_moe(self) -> bool:
        """Whether any layer is a mixture of experts."""
        return any(block.is_moe for block, _ in self.stack)

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether both sides are there."""
        return len({block.side for block, _ in self.stack}) == 2

    def layers(self) -> Iterator[Block]:
        """Every layer in order."""
        for block, count in self.stack:
            for _ in range(count):
                yield block


def _positive(where: str, **values: int) -> None:
    for name, value in values.items():
        if value <= 0:
            raise InvalidSpec(f"{where}: {name} is {value}, must be > 0")


def _not_negative(where: str, **values: int) -> None:
    for name, value in values.items():
        if value < 0:
            raise InvalidSpec(f"{where}: {name} is {value}, must be >= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSpec:
    """What the layered engine and its planner must know of a module."""

    name: str
    path: str  # of the Python file
    function: str  # that returns the module
    block_list: str  # the list of its blocks, as in `model.layers`
    num_layers: int
    vocab_size: int
    seq_len: int  # that it was traced with
    block_params: int  # of the largest block
    outer_params: int  # of all that is no block
    num_params: int
    # Operations of one sample: a block forward and backward, and all that is no block, both ways.
    block_forward_flops: float
    block_backward_flops: float  # without computing the block again
    outer_flops: float
    # Bytes of one micro-batch: of one sample, and of each further one.
    first_hidden_bytes: float  # what passes from block to block
    further_hidden_bytes: float
    first_block_bytes: float  # the most that one block's backward pass needs above it
    further_block_bytes: float
    first_outer_bytes: float  # the same of head and loss
    further_outer_bytes: float

    def __post_init__(self) -> None:
        if self.num_layers < 1 or self.vocab_size < 1 or self.seq_len < 1:
            raise InvalidSpec(f"{self.name}: blocks, vocabulary and length must be above 0")

    @property
    def context_length(self) -> int:
        """The length of samples, as models have it."""
        return self.seq_len
