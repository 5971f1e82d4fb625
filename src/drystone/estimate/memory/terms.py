"""What does memory depend on, apart from the layout? One set of numbers per model and recipe.

The array arithmetic of `peak.py` needs about thirty numbers that the model, the recipe and the
launcher fix together. They are worked out here once and cached, so that a search over layouts pays
for them once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from drystone.describe.model import Attention, Block, Experts, Head, Mlp, ModelSpec, Side
from drystone.describe.recipe import OPTIMIZERS, Lora, Loss, Precision, Recipe, StepKernel, Tuning
from drystone.estimate.launchers import Launcher, find_launcher
from drystone.estimate.memory.activations import (
    BlockActivations,
    activation_width,
    block_activations,
    decoder_share,
    norm_bytes,
)
from drystone.estimate.parameters import BlockParameters, count_block, count_model

FP32_WEIGHTS = (Precision.FP32, Precision.TF32, Precision.AMP_FP16, Precision.AMP_BF16)
_PURE = (Precision.FP16, Precision.BF16)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes per trainable parameter, before any sharding."""

    weights: float  # what lives on: sharded by ZeRO-3
    compute_copy: float  # a 16-bit copy beside wider weights, whole unless layers are gathered
    gradients: float  # sharded from ZeRO-2 on
    master: float  # fp32 copy of 16-bit weights: sharded with the moments from ZeRO-1 on
    moments: float
    step: float  # temporaries of the optimizer step, sharded like the moments


def state_bytes(recipe: Recipe, launcher: Launcher) -> StateBytes:
    """What the precision, the optimizer and the launcher's conventions come to."""
    precision = recipe.precision
    if precision in FP32_WEIGHTS:
        copy = 0.0 if precision in (Precision.FP32, Precision.TF32) else 2.0
        weights, gradients, master, state = 4.0, 4.0, 0.0, 4.0
    elif precision in _PURE:
        copy, weights, gradients, master, state = 0.0, 2.0, 2.0, 0.0, 2.0
    elif launcher.keeps_master:
        fp16 = precision is Precision.FP16_MIXED
        gradients = float(launcher.fp16_gradient_bytes if fp16 else launcher.bf16_gradient_bytes)
        copy, weights, master, state = 0.0, 2.0, 4.0, 4.0
    else:
        copy, weights, gradients, master, state = 2.0, 4.0, 4.0, 0.0, 4.0
    facts = OPTIMIZERS[recipe.optimizer]
    state = state if facts.moment_bytes is None else facts.moment_bytes
    step = _step_bytes(recipe, launcher, gradients=gradients, master=master, state=state)
    return StateBytes(
        weights=weights,
        compute_copy=copy,
        gradients=gradients,
        master=master,
        moments=facts.moments * state,
        step=step,
    )


def _step_bytes(
    recipe: Recipe, launcher: Launcher, *, gradients: float, master: float, state: float
) -> float:
    cast = 4.0 if master and gradients < 4 and launcher.casts_gradients_for_step else 0.0
    if OPTIMIZERS[recipe.optimizer].moment_bytes is not None:
        return cast  # one kernel, block by block (bitsandbytes)
    if recipe.step_kernel is StepKernel.FOREACH or launcher.step_copies:
        return cast + max(launcher.step_copies, 1.0) * state
    return cast


# NF4 and GPTQ keep a 16- or 32-bit constant per block of 64 to 128 weights (arXiv:2305.14314).
_QLORA_BITS = 4.5
_FP32_LOGITS_BYTES = 12.0
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTerms:
    """One kind of layer."""

    parameters: BlockParameters
    activations: BlockActivations
    token_share: float  # its tokens, as a share of `seq_len`: below 1 on a shorter decoder side
    adapter: float  # trainable adapter parameters
    unquantised: float  # parameters on every rank that stay in 16 bit under QLoRA
    kv: float  # parameters of keys and values; ranks past the number of heads repeat them
    num_kv_heads: int
    transient: float  # bytes per token while it runs backward, divided by tp


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryTerms:
    """All that the array arithmetic needs to know."""

    recipe: Recipe
    launcher: Launcher
    state: StateBytes
    layers: tuple[LayerTerms, ...]
    counts: IntArray  # (num_layers + 1, kinds): how many of each before a position
    changes: tuple[int, ...]  # the layers that are of another kind than the one before
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
    frozen_bytes: float  # of a weight that is neither trained nor quantised
    is_frozen: bool
    num_experts: int  # of a layer that has any; 0: none
    fewest_kv_heads: int  # of any layer


@lru_cache(maxsize=1024)
def memory_terms(model: ModelSpec, recipe: Recipe) -> MemoryTerms:
    """The numbers of one model under one recipe."""
    launcher = find_launcher(recipe.launcher)
    recipe = _upcast(recipe, launcher)
    counted = count_model(model)
    width = activation_width(recipe.precision)
    of_block = {block: _layer_terms(block, model, recipe, launcher) for block in model.blocks}
    # Blocks that differ in nothing that takes memory (a window, say) are one kind here.
    layers = tuple(dict.fromkeys(of_block.values()))
    order = np.array([layers.index(of_block[block]) for block in model.layers()])
    return MemoryTerms(
        recipe=recipe,
        launcher=launcher,
        state=state_bytes(_trained(recipe), launcher),
        layers=layers,
        counts=_counts_before(order, len(layers)),
        changes=tuple(int(layer) + 1 for layer in np.flatnonzero(np.diff(order))),
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
        layer_copy_bytes=quantised_bytes(recipe) if recipe.tuning is Tuning.QLORA else width,
        frozen_bytes=4.0 if recipe.precision in FP32_WEIGHTS else 2.0,
        is_frozen=recipe.tuning is not Tuning.FULL,
        num_experts=max((_num_experts(block) for block in model.blocks), default=0),
        fewest_kv_heads=min(layer.num_kv_heads for layer in layers),
    )


def _num_experts(block: Block) -> int:
    return block.feed_forward.num_experts if isinstance(block.feed_forward, Experts) else 0


def quantised_bytes(recipe: Recipe) -> float:
    """Bytes of one quantised weight, its share of the quantisation constants included."""
    return (recipe.weight_bits or _QLORA_BITS) / 8


def adapter_parameters(block: Block, hidden_size: int, lora: Lora) -> int:
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
    return lora.rank * sum(sizes.get(target, 0) for target in lora.targets)


def _trained(recipe: Recipe) -> Recipe:
    """The recipe as it applies to what is trained: adapters may have a format of their own."""
    formats = {2: Precision.BF16, 4: Precision.FP32}
    if recipe.tuning is Tuning.FULL or recipe.lora.dtype_bytes not in formats:
        return recipe
    return replace(recipe, precision=formats[recipe.lora.dtype_bytes])


def _upcast(recipe: Recipe, launcher: Launcher) -> Recipe:
    """QLoRA as PEFT prepares it: what is not quantised is fp32, and so is what layers hand on.

    `prepare_model_for_kbit_training` of PEFT (`utils/other.py`) turns every 16-bit parameter that
    is not quantised into fp32; `Linear4bit` of bitsandbytes (`nn/modules.py`) computes in 16 bit
    and returns what it was given, so that activations between the layers are fp32 as well.
    """
    is_prepared = launcher.upcasts_quantised and not recipe.keeps_16_bit
    if recipe.tuning is Tuning.QLORA and is_prepared and recipe.precision in _PURE:
        return replace(recipe, precision=Precision.FP32)
    return recipe


def _counts_before(order: IntArray, num_kinds: int) -> IntArray:
    counts = np.zeros((len(order) + 1, num_kinds), dtype=np.int64)
    counts[1:] = np.cumsum(order[:, None] == np.arange(num_kinds), axis=0)
    return counts


def _attentions(block: Block) -> list[Attention]:
    return [
        attention for attention in (block.attention, block.cross_attention) if attention is not None
    ]


def _kv_parameters(block: Block, hidden_size: int) -> int:
    """Parameters of the key and value projections that tensor parallelism divides by heads."""
    return sum(
        attention.num_kv_heads
        * (attention.head_dim + attention.v_dim)
        * (hidden_size + attention.qkv_bias)
        for attention in _attentions(block)
        if not attention.is_latent
    )


def _layer_terms(block: Block, model: ModelSpec, recipe: Recipe, launcher: Launcher) -> LayerTerms:
    hidden = model.hidden_size
    parameters = count_block(block, hidden)
    is_frozen = recipe.tuning is not Tuning.FULL
    ffn = block.feed_forward
    if isinstance(ffn, Mlp):
        active_ffn = ffn.ffn_size
    else:
        active_ffn = ffn.top_k * ffn.ffn_size + ffn.shared_ffn_size
    return LayerTerms(
        parameters=parameters,
        activations=block_activations(block, hidden, recipe, launcher),
        token_share=_token_share(block, model, recipe),
        adapter=float(adapter_parameters(block, hidden, recipe.lora)) if is_frozen else 0.0,
        unquantised=float(parameters.norms + parameters.router),
        kv=float(_kv_parameters(block, hidden)),
        num_kv_heads=min(attention.num_kv_heads for attention in _attentions(block)),
        # The gradients of the feed-forward network's two widest tensors stand beside each other.
        transient=float(2 * activation_width(recipe.precision) * active_ffn),
    )


def _token_share(block: Block, model: ModelSpec, recipe: Recipe) -> float:
    if model.is_encoder_decoder and block.side is Side.DECODER:
        return decoder_share(recipe)
    return 1.0


def _logits_per_token(model: ModelSpec, recipe: Recipe) -> float:
    """Elements of logits per token of `seq_len`; a classifier has one position per sequence."""
    if model.head in (Head.LANGUAGE, Head.MASKED):
        share = decoder_share(recipe) if model.is_encoder_decoder else 1.0
        return model.vocab_size * share
    return model.num_classes / recipe.seq_len


def _logits_bytes(recipe: Recipe, launcher: Launcher) -> float:
    """Bytes per element of logits at the peak around the loss."""
    width = activation_width(recipe.precision)
    if recipe.loss is Loss.CHUNKED:
        return 0.0
    fused = recipe.loss is Loss.FUSED
    num_bytes = launcher.fused_logits_bytes if fused else launcher.logits_bytes
    # In fp32 the logits are twice as wide and need no fp32 copy: at most logits, log-softmax and
    # gradient stand beside each other, and where 14 bytes did (transformers), one gradient more.
    most = _FP32_LOGITS_BYTES + 4 * (num_bytes >= 14)
    return num_bytes if width == 2 else min(num_bytes + 2, most)
