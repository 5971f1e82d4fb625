"""Names and shapes of weights: in the runtime's transformer, and in files of `transformers`.

One table a family says which module of `transformers` holds which of ours. A module of theirs may
hold several of ours, one above the other (Phi-3), or stand the other way (GPT-2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from drystone.describe.model import Block, Experts, Mlp, ModelSpec, Norm, QkNorm

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a file, and what of ours is in it."""

    name: str
    shape: Shape  # as stored
    parts: tuple[tuple[str, Shape], ...]  # our names and shapes, one above the other
    is_transposed: bool = False  # stands the other way

    def find(self, part: str) -> int:
        """The row, of the tensor turned our way, at which one of ours begins."""
        row = 0
        for name, shape in self.parts:
            if name == part:
                return row
            row += shape[0]
        raise KeyError(part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """What a family calls its modules, ours by theirs."""

    prefix: str  # of all but the head
    outer: Mapping[str, str]
    layers: str
    inner: Mapping[str, tuple[str, ...]]
    is_transposed: bool = False  # of matrices in layers
    ignored: tuple[str, ...] = ()  # endings of tensors that are no weights


_ATTENTION: Final = {
    "self_attn.q_proj": ("attention.query",),
    "self_attn.k_proj": ("attention.key",),
    "self_attn.v_proj": ("attention.value",),
    "self_attn.o_proj": ("attention.out",),
    "self_attn.q_norm": ("attention.query_norm",),
    "self_attn.k_norm": ("attention.key_norm",),
}
_GATED: Final = {
    "mlp.gate_proj": ("feed_forward.gate",),
    "mlp.up_proj": ("feed_forward.up",),
    "mlp.down_proj": ("feed_forward.down",),
}
_BEFORE: Final = {"input_layernorm": ("norms.0",), "post_attention_layernorm": ("norms.1",)}
_AROUND: Final = {
    "input_layernorm": ("norms.0",),
    "pre_feedforward_layernorm": ("norms.1",),
    "post_attention_layernorm": ("norms.2",),
    "post_feedforward_layernorm": ("norms.3",),
}
_AFTER: Final = {
    "post_attention_layernorm": ("norms.0",),
    "post_feedforward_layernorm": ("norms.1",),
}
_FUSED: Final = {
    "self_attn.qkv_proj": ("attention.query", "attention.key", "attention.value"),
    "self_attn.o_proj": ("attention.out",),
    "mlp.gate_up_proj": ("feed_forward.gate", "feed_forward.up"),
    "mlp.down_proj": ("feed_forward.down",),
}
_EXPERTS: Final = {  # of each expert by its number
    "mlp.gate": ("feed_forward.router",),
    "mlp.experts.{}.gate_proj": ("feed_forward.experts.{}.gate",),
    "mlp.experts.{}.up_proj": ("feed_forward.experts.{}.up",),
    "mlp.experts.{}.down_proj": ("feed_forward.experts.{}.down",),
}
_MIXTRAL: Final = {
    "block_sparse_moe.gate": ("feed_forward.router",),
    "block_sparse_moe.experts.{}.w1": ("feed_forward.experts.{}.gate",),
    "block_sparse_moe.experts.{}.w3": ("feed_forward.experts.{}.up",),
    "block_sparse_moe.experts.{}.w2": ("feed_forward.experts.{}.down",),
}
_PLAIN: Final = {"mlp.c_fc": ("feed_forward.up",), "mlp.c_proj": ("feed_forward.down",)}


def _llama_style(*inner: Mapping[str, tuple[str, ...]]) -> Style:
    return Style(
        prefix="model.",
        outer={"embed_tokens": "tokens", "norm": "final_norm"},
        layers="layers",
        inner={new: old for table in inner for new, old in table.items()},
        ignored=(".rotary_emb.inv_freq",),
    )


_LLAMA: Final = _llama_style(_ATTENTION, _GATED, _BEFORE)
STYLES: Final[Mapping[str, Style]] = MappingProxyType(
    {
        "gemma": _LLAMA,
        "gemma2": _llama_style(_ATTENTION, _GATED, _AROUND),
        "gemma3_text": _llama_style(_ATTENTION, _GATED, _AROUND),
        "gpt2": Style(
            prefix="transformer.",
            outer={"wte": "tokens", "wpe": "positions", "ln_f": "final_norm"},
            layers="h",
            inner={
                "attn.c_attn": ("attention.query", "attention.key", "attention.value"),
                "attn.c_proj": ("attention.out",),
                "mlp.c_fc": ("feed_forward.up",),
                "mlp.c_proj": ("feed_forward.down",),
                "ln_1": ("norms.0",),
                "ln_2": ("norms.1",),
            },
            is_transposed=True,
            ignored=(".attn.bias", ".attn.masked_bias"),
        ),
        "granite": _LLAMA,
        "llama": _LLAMA,
        "mistral": _LLAMA,
        "mixtral": _llama_style(_ATTENTION, _MIXTRAL, _BEFORE),
        "olmo2": _llama_style(_ATTENTION, _GATED, _AFTER),
        "olmoe": _llama_style(_ATTENTION, _EXPERTS, _BEFORE),
        "phi3": _llama_style(_FUSED, _BEFORE),
        "qwen2": _LLAMA,
        "qwen3": _LLAMA,
        "qwen3_moe": _llama_style(_ATTENTION, _GATED, _EXPERTS, _BEFORE),
        "starcoder2": _llama_style(_ATTENTION, _PLAIN, _BEFORE),
    }
)


def stored_weights(spec: ModelSpec, style: Style) -> dict[str, Stored]:
    """What a file of `transformers` holds of a model, by its name there."""
    ours = dict(weight_shapes(spec))
    pairs: list[tuple[str, tuple[str, ...]]] = [
        (f"{style.prefix}{new}", (old,)) for new, old in style.outer.items()
    ]
    for layer, block in enumerate(spec.layers()):
        start = f"{style.prefix}{style.layers}.{layer}"
        pairs += [
            (f"{start}.{new}", tuple(f"blocks.{layer}.{part}" for part in old))
            for new, old in _inner_names(style, block)
        ]
    pairs.append(("lm_head", ("head",)))
    found = {}
    for new, old in pairs:
        for end in ("weight", "bias"):
            parts = tuple((f"{one}.{end}", ours.get(f"{one}.{end}", ())) for one in old)
            if all(shape for _, shape in parts):
                turned = style.is_transposed and ".h." in new and len(parts[0][1]) == 2
                found[f"{new}.{end}"] = _stored(f"{new}.{end}", parts, is_transposed=turned)
    return found


def _inner_names(style: Style, block: Block) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Modules of a layer, theirs and ours; those of each expert for themselves."""
    mixture = block.feed_forward
    num_experts = mixture.num_experts if isinstance(mixture, Experts) else 0
    for new, old in style.inner.items():
        if "{}" not in new:
            yield new, old
        else:
            for at in range(num_experts):
                yield new.format(at), tuple(part.format(at) for part in old)


def _stored(name: str, parts: tuple[tuple[str, Shape], ...], *, is_transposed: bool) -> Stored:
    whole = (sum(shape[0] for _, shape in parts), *parts[0][1][1:])
    return Stored(name, whole[::-1] if is_transposed else whole, parts, is_transposed)


def weight_shapes(spec: ModelSpec) -> Iterator[tuple[str, Shape]]:
    """Every weight of the runtime's transformer; a head that shares the embedding has none."""
    width = spec.hidden_size
    yield "tokens.weight", (spec.vocab_size, width)
    if spec.learned_positions:
        yield "positions.weight", (spec.learned_positions, width)
    if spec.has_embedding_norm:
        yield from _norm("first_norm", spec.final_norm, width)
    for layer, block in enumerate(spec.layers()):
        for name, shape in _block_shapes(block, width):
            yield f"blocks.{layer}.{name}", shape
    if spec.num_final_norms:
        yield from _norm("final_norm", spec.final_norm, width)
    if not spec.tied_embeddings:
        yield "head.weight", (spec.vocab_size, width)
    if spec.head_bias:
        yield "head.bias", (spec.vocab_size,)


def _block_shapes(block: Block, width: int) -> Iterator[tuple[str, Shape]]:
    attention, mlp = block.attention, block.feed_forward
    queries, keys = (
        number * attention.head_dim for number in (attention.num_heads, attention.num_kv_heads)
    )
    values, mixed = (
        number * attention.v_dim for number in (attention.num_kv_heads, attention.num_heads)
    )
    for name, outputs in (("query", queries), ("key", keys), ("value", values)):
        yield from _linear(f"attention.{name}", outputs, width, attention.qkv_bias)
    yield from _linear("attention.out", width, mixed, attention.out_bias)
    if attention.qk_norm is not QkNorm.NONE:
        for name, whole in (("query_norm", queries), ("key_norm", keys)):
            size = attention.head_dim if attention.qk_norm is QkNorm.HEAD else whole
            yield from _norm(f"attention.{name}", block.norm, size)
    if isinstance(mlp, Experts):
        yield from _linear("feed_forward.router", mlp.num_experts, width, False)
        for at in range(mlp.num_experts):
            yield from _feed_forward(f"feed_forward.experts.{at}", mlp, width)
    else:
        yield from _feed_forward("feed_forward", mlp, width)
    for index in range(block.num_norms):
        yield from _norm(f"norms.{index}", block.norm, width)


def _feed_forward(name: str, mlp: Mlp | Experts, width: int) -> Iterator[tuple[str, Shape]]:
    for part in ("up", "gate") if mlp.gated else ("up",):
        yield from _linear(f"{name}.{part}", mlp.ffn_size, width, mlp.bias)
    yield from _linear(f"{name}.down", width, mlp.ffn_size, mlp.bias)


def _linear(name: str, outputs: int, inputs: int, has_bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (outputs, inputs)
    if has_bias:
        yield f"{name}.bias", (outputs,)


def _norm(name: str, norm: Norm, width: int) -> Iterator[tuple[str, Shape]]:
    if norm is not Norm.NO_WEIGHT:
        yield f"{name}.weight", (width,)
    if norm is Norm.LAYER:
        yield f"{name}.bias", (width,)
