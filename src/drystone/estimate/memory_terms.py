"""What does memory depend on, apart from the layout? One set of numbers per model and recipe.

The array arithmetic of `memory.py` needs about thirty numbers that the model, the recipe and the
launcher fix together. They are worked out here once and cached, so that a search over layouts pays
for them once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from drystone.describe.model import Block, Head, Mlp, ModelSpec, Side
from drystone.describe.recipe import Loss, Recipe, Tuning
from drystone.estimate.activations import (
    BlockActivations,
    activation_width,
    block_activations,
    norm_bytes,
)
from drystone.estimate.launchers import Launcher, find_launcher
from drystone.estimate.parameters import BlockParameters, count_block, count_model
from drystone.estimate.state import StateBytes, state_bytes

# NF4 and GPTQ keep a 16- or 32-bit constant per block of 64 to 128 weights (arXiv:2305.14314).
_QLORA_BITS = 4.5


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTerms:
    """One kind of layer."""

    parameters: BlockParameters
    activations: BlockActivations
    token_share: float  # its tokens, as a share of `seq_len`: below 1 on a shorter decoder side
    adapter: float  # trainable adapter parameters
    quantised: float  # parameters kept in few bits
    transient: float  # bytes per token while it runs backward, divided by tp


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryTerms:
    """All that the array arithmetic needs to know."""

    recipe: Recipe
    launcher: Launcher
    state: StateBytes
    layers: tuple[LayerTerms, ...]
    counts: npt.NDArray[np.int64]  # (num_layers + 1, kinds): how many of each before a position
    num_layers: int
    embedding: float  # parameters on the first stage, divided by tp
    positions: float  # on the first stage, whole
    head: float  # on the last stage, divided by tp; without a tied matrix
    tied_head: float  # the shared matrix: a copy when first and last stage differ
    final_norms: float
    logits_bytes_per_token: float  # at the peak around the loss, divided by tp
    head_bytes_per_token: float  # the last norm and the head's input
    boundary: float  # bytes per token that enter a layer
    copy_bytes: float  # bytes of a weight in the form in which it multiplies
    layer_copy_bytes: float  # the same for the weights of a layer, which may be quantised
    is_frozen: bool
    has_experts: bool


@lru_cache(maxsize=1024)
def memory_terms(model: ModelSpec, recipe: Recipe) -> MemoryTerms:
    """The numbers of one model under one recipe."""
    launcher = find_launcher(recipe.launcher)
    counted = count_model(model)
    width = activation_width(recipe.precision)
    is_frozen = recipe.tuning is not Tuning.FULL
    return MemoryTerms(
        recipe=recipe,
        launcher=launcher,
        state=state_bytes(recipe, launcher),
        layers=tuple(_layer_terms(block, model, recipe, launcher) for block in model.blocks),
        counts=_counts_before(model),
        num_layers=model.num_layers,
        embedding=float(counted.embedding),
        positions=float(counted.positions),
        head=float(counted.head),
        tied_head=float(counted.tied_head),
        final_norms=float(counted.final_norms + counted.other),
        logits_bytes_per_token=_logits_per_token(model, recipe) * _logits_bytes(recipe, launcher),
        head_bytes_per_token=norm_bytes(model.final_norm, model.hidden_size, recipe, launcher)
        + width * model.hidden_size,
        boundary=float(width * model.hidden_size),
        copy_bytes=float(width),
        layer_copy_bytes=weight_bits(recipe) / 8 if is_frozen else float(width),
        is_frozen=is_frozen,
        has_experts=model.is_moe,
    )


def weight_bits(recipe: Recipe) -> float:
    """Bits of one frozen weight, its share of the quantisation constants included."""
    return recipe.weight_bits or (_QLORA_BITS if recipe.tuning is Tuning.QLORA else 16.0)


def adapter_parameters(block: Block, hidden_size: int, recipe: Recipe) -> int:
    """Parameters that LoRA adds to one layer: rank x (inputs + outputs) of each target."""
    attention, ffn = block.attention, block.feed_forward
    sizes = {
        "q": hidden_size + attention.num_heads * attention.head_dim,
        "k": hidden_size + attention.num_kv_heads * attention.head_dim,
        "v": hidden_size + attention.num_kv_heads * attention.v_dim,
        "o": hidden_size + attention.num_heads * attention.v_dim,
    }
    if isinstance(ffn, Mlp):
        sizes |= {"up": hidden_size + ffn.ffn_size, "down": hidden_size + ffn.ffn_size}
        if ffn.gated:
            sizes["gate"] = hidden_size + ffn.ffn_size
    return recipe.lora.rank * sum(sizes.get(target, 0) for target in recipe.lora.targets)


def _counts_before(model: ModelSpec) -> npt.NDArray[np.int64]:
    kinds = model.blocks
    order = np.array([kinds.index(block) for block in model.layers()])
    counts = np.zeros((len(order) + 1, len(kinds)), dtype=np.int64)
    counts[1:] = np.cumsum(order[:, None] == np.arange(len(kinds)), axis=0)
    return counts


def _layer_terms(block: Block, model: ModelSpec, recipe: Recipe, launcher: Launcher) -> LayerTerms:
    hidden = model.hidden_size
    parameters = count_block(block, hidden)
    is_frozen = recipe.tuning is not Tuning.FULL
    quantised = parameters.total - parameters.norms - parameters.router
    ffn = block.feed_forward
    if isinstance(ffn, Mlp):
        active_ffn = ffn.ffn_size
    else:
        active_ffn = ffn.top_k * ffn.ffn_size + ffn.shared_ffn_size
    return LayerTerms(
        parameters=parameters,
        activations=block_activations(block, hidden, recipe, launcher),
        token_share=_token_share(block, model, recipe),
        adapter=float(adapter_parameters(block, hidden, recipe)) if is_frozen else 0.0,
        quantised=float(quantised) if recipe.tuning is Tuning.QLORA else 0.0,
        # The gradients of the feed-forward network's two widest tensors stand beside each other.
        transient=float(2 * activation_width(recipe.precision) * active_ffn),
    )


def _token_share(block: Block, model: ModelSpec, recipe: Recipe) -> float:
    if model.is_encoder_decoder and block.side is Side.DECODER and recipe.decoder_seq_len:
        return recipe.decoder_seq_len / recipe.seq_len
    return 1.0


def _logits_per_token(model: ModelSpec, recipe: Recipe) -> float:
    """Elements of logits per token of `seq_len`; a classifier has one position per sequence."""
    if model.head in (Head.LANGUAGE, Head.MASKED):
        share = 1.0
        if model.is_encoder_decoder and recipe.decoder_seq_len:
            share = recipe.decoder_seq_len / recipe.seq_len
        return model.vocab_size * share
    return model.num_classes / recipe.seq_len


def _logits_bytes(recipe: Recipe, launcher: Launcher) -> float:
    """Bytes per element of logits at the peak around the loss."""
    width = activation_width(recipe.precision)
    if recipe.loss is Loss.CHUNKED:
        return 0.0
    if recipe.loss is Loss.FUSED:
        return launcher.fused_logits_bytes * width / 2
    return launcher.logits_bytes * width / 2 if width > 2 else launcher.logits_bytes
