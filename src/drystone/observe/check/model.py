"""The model of a published run, from the row's numbers and its architecture's name."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import groupby

from drystone.describe.model import Attention, Block, Experts, Head, Mlp, ModelSpec, Norm, QkNorm
from drystone.describe.model_source import find_model
from drystone.errors import DrystoneError, RequestError
from drystone.estimate.parameters import count_model
from drystone.observe.check.columns import Row, is_yes, number_of, whole_number_of

# Parameters as stated and as counted that are no further apart than this are the same model.
_SAME_PARAMS = 0.03

_MAX_LAYERS = 10_000


@dataclass(frozen=True, slots=True)
class _Style:
    """What an architecture name implies beyond the numbers of a row."""

    norm: Norm = Norm.RMS
    bias: bool = False
    qkv_bias: bool = False
    positions: bool = False
    qk_norm: QkNorm = QkNorm.NONE
    num_norms: int = 2
    parallel: bool = False
    activation: str = "silu"
    causal: bool = True


_GPT = _Style(norm=Norm.LAYER, bias=True, qkv_bias=True, positions=True, activation="gelu")
_STYLES = {
    "gpt": _GPT,
    "gpt_bigcode": _GPT,
    "mpt": _Style(norm=Norm.LAYER_NO_BIAS, positions=True, activation="gelu"),
    "bert": _Style(
        norm=Norm.LAYER, bias=True, qkv_bias=True, positions=True, activation="gelu", causal=False
    ),
    "gpt-neox": _Style(norm=Norm.LAYER, bias=True, qkv_bias=True, parallel=True, activation="gelu"),
    "falcon": _Style(norm=Norm.LAYER, num_norms=1, parallel=True, activation="gelu"),
    "phi": _Style(
        norm=Norm.LAYER, bias=True, qkv_bias=True, num_norms=1, parallel=True, activation="gelu"
    ),
    "phi3": _Style(),
    "llama": _Style(),
    "mistral": _Style(),
    "mixtral": _Style(),
    "moe": _GPT,
    "qwen": _Style(qkv_bias=True),
    "qwen2": _Style(qkv_bias=True),
    "qwen3": _Style(qk_norm=QkNorm.HEAD),
    "gemma": _Style(activation="gelu"),
    "gemma2": _Style(num_norms=4, activation="gelu"),
    "gemma3": _Style(num_norms=4, activation="gelu", qk_norm=QkNorm.HEAD),
    "opt": _GPT,
    "bloom": _Style(norm=Norm.LAYER, bias=True, qkv_bias=True, activation="gelu"),
    "gptj": _Style(norm=Norm.LAYER, bias=True, num_norms=1, parallel=True, activation="gelu"),
    "starcoder": _GPT,
    "chatglm": _Style(qkv_bias=True),
    "glm": _Style(qkv_bias=True),
    "olmo2": _Style(qk_norm=QkNorm.FULL),
}


def style_of(arch: str, *, gated: bool) -> _Style:
    """What a name implies: the longest known name that it begins with, else by its MLP.

    Nearly everything with a gated MLP is built like Llama, and nearly everything without like GPT.
    """
    plain = re.sub(r"[^a-z0-9]", "", arch)
    known = {re.sub(r"[^a-z0-9]", "", name): style for name, style in _STYLES.items()}
    for length in range(len(plain), 1, -1):
        if plain[:length] in known:
            return known[plain[:length]]
    return _Style() if gated else _GPT


def parse_shape(row: Row) -> ModelSpec:
    """The model of a row: its numbers, and what the architecture's name implies."""
    arch = row["arch"].split(" ")[0].lower()
    if not arch:
        raise RequestError("the architecture is not stated")
    if re.search(r"mamba|rwkv|resnet|transformer-xl|unet|lstm|diffusion", arch):
        raise RequestError(f"architecture {arch!r} has no formula")
    if row.get("moe_experts") and (known := _known_experts(row)) is not None:
        return known
    style = style_of(arch, gated=is_yes(row, "gated_mlp"))
    if not row.get("gated_mlp"):  # what is built like Llama has a gate, unless a table says no
        row = {**row, "gated_mlp": "yes" if style.norm is Norm.RMS else "no"}
    hidden, heads = whole_number_of(row, "hidden"), whole_number_of(row, "heads")
    num_layers = whole_number_of(row, "layers")
    if num_layers > _MAX_LAYERS:
        raise RequestError(f"column layers: {num_layers:,} are too many to be meant")
    attention = Attention(
        num_heads=heads,
        num_kv_heads=whole_number_of(row, "kv_heads", heads),
        head_dim=whole_number_of(row, "head_dim", hidden // max(1, heads)),
        qkv_bias=style.qkv_bias,
        out_bias=style.bias,
        qk_norm=style.qk_norm,
        causal=style.causal,
    )
    block = Block(
        attention=attention,
        feed_forward=_feed_forward(row, style, hidden),
        norm=style.norm,
        num_norms=style.num_norms,
        parallel_residual=style.parallel,
    )
    model = ModelSpec(
        name=row.get("model", "") or row["run_id"],
        family=arch,
        hidden_size=hidden,
        stack=((block, num_layers),),
        vocab_size=whole_number_of(row, "vocab"),
        tied_embeddings=is_yes(row, "tied_emb"),
        learned_positions=whole_number_of(row, "seq_len") if style.positions else 0,
        final_norm=style.norm,
        head=Head.MASKED if arch == "bert" else Head.LANGUAGE,
    )
    return _with_stated_experts(model, number_of(row, "params"))


def _known_experts(row: Row) -> ModelSpec | None:
    """The model of that name, where the row's numbers are its own, perhaps with fewer layers.

    A table has no columns for latent attention, shared experts and leading dense layers.
    """
    try:
        model = find_model(row.get("model", ""))
    except DrystoneError:
        return None
    block, num_layers = model.stack[-1][0], whole_number_of(row, "layers")
    experts = block.feed_forward
    stated = (whole_number_of(row, name, 0) for name in ("hidden", "heads", "moe_experts"))
    if not isinstance(experts, Experts) or num_layers > model.num_layers:
        return None
    if (model.hidden_size, block.attention.num_heads, experts.num_experts) != tuple(stated):
        return None
    layers = tuple(model.layers())[:num_layers]
    stack = tuple((one, len(tuple(some))) for one, some in groupby(layers))
    model = replace(model, stack=stack, vocab_size=whole_number_of(row, "vocab"))
    stated_params = number_of(row, "params")
    counted = count_model(model).total
    return model if abs(counted / (stated_params or counted) - 1) < _SAME_PARAMS else None


def _feed_forward(row: Row, style: _Style, hidden: int) -> Mlp | Experts:
    ffn, gated = whole_number_of(row, "ffn", 4 * hidden), is_yes(row, "gated_mlp")
    if not row.get("moe_experts"):
        return Mlp(ffn_size=ffn, gated=gated, bias=style.bias, activation=style.activation)
    return Experts(
        num_experts=whole_number_of(row, "moe_experts"),
        top_k=whole_number_of(row, "moe_topk", 1),
        ffn_size=ffn,
        gated=gated,
        bias=style.bias,
        activation=style.activation,
    )


def _with_stated_experts(model: ModelSpec, stated_params: float) -> ModelSpec:
    """The same with narrower or wider experts, where the stated parameters contradict `ffn`.

    A table has one column for the feed-forward size; models whose experts have a size of their own
    state it only through their number of parameters.
    """
    (block, num_layers), counted = model.stack[0], count_model(model)
    experts = block.feed_forward
    if not isinstance(experts, Experts) or not stated_params:
        return model
    if abs(counted.total / stated_params - 1) < _SAME_PARAMS:
        return model
    in_experts = sum(layer.expert * number for layer, number in counted.runs)
    share = 1 + (stated_params - counted.total) / in_experts
    if share <= 0:
        raise RequestError(
            f"column params: {stated_params:g} is less than the layers without experts"
        )
    experts = replace(experts, ffn_size=max(1, round(experts.ffn_size * share)))
    return replace(model, stack=((replace(block, feed_forward=experts), num_layers),))
