"""What does a whole model cost per token, sequence and micro-batch on one GPU, as coefficients?

Everything that depends on model, recipe and GPU but not on the layout is summed up here once, so
that `speed` only multiplies arrays.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from drystone.describe.model import Block, Experts, Head, ModelSpec, Side
from drystone.describe.recipe import (
    LOW_PRECISIONS,
    OPTIMIZERS,
    AttentionKernel,
    Loss,
    Precision,
    Recipe,
    RecomputeKind,
    Tuning,
)
from drystone.estimate.launchers import LauncherEfficiency
from drystone.estimate.parameters import count_model
from drystone.estimate.time.compute import (
    Device,
    Matmul,
    Ramp,
    attention_flops,
    attention_seconds,
    block_matmuls,
    forward_ramp,
    head_matmuls,
    input_gradient_ramp,
    weight_gradient_ramp,
)
from drystone.estimate.time.traffic import adapter_bytes, kv_width, layer_traffic, lora_shapes

_FP32_WEIGHTS = (Precision.FP32, Precision.TF32, Precision.AMP_FP16, Precision.AMP_BF16)
_ALL_16_BIT = (Precision.FP16, Precision.BF16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One direction through all layers."""

    matmul: Ramp
    experts: Ramp
    attention_seconds: float  # per sequence
    hidden_bytes: float  # moved per token; sequence parallelism divides it, else nothing does
    split_bytes: float  # moved per token; tensor parallelism divides it
    routed_bytes: float = 0.0  # moved per token for its copies at experts, all `top_k` of them
    weight_bytes: float = 0.0  # moved per micro-batch, however many tokens: casts, dequantising


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A model under a recipe on a GPU, ready to be split."""

    num_layers: int
    num_moe_layers: int
    forward: Pass
    backward: Pass
    recompute_share: float  # of a forward pass's multiplications that are done again
    recompute_attention_share: float
    recompute_memory_share: float
    head: Ramp  # forward and backward
    head_bytes: float  # per token, divided by tp
    hidden_size: int
    top_k: float
    num_experts: int
    routed_width: int  # channels of a row as it travels to an expert
    group_share: float  # of the groups of experts that those of one token may come from
    kv_bytes_per_token: float  # keys and values of one layer
    layer_params: float  # of all layers
    outer_params: float  # embedding and head
    expert_params: float
    trained_params: float
    model_flops_per_token: float  # forward and backward, nothing recomputed, causal halves left out
    element_bytes: float  # of activations, and of weights as they are gathered
    reduce_bytes: float  # of a gradient as it is reduced
    optimizer_bytes: float  # moved per trained parameter in a step
    accumulate_bytes: float  # moved per trained parameter and micro-batch
    tokens_per_sequence: float  # as computed
    counted_tokens_per_sequence: float  # as reported: with padding that is not computed

    @property
    def trained_share(self) -> float:
        """Trained parameters over all."""
        return self.trained_params / (self.layer_params + self.outer_params)


def make_work(
    model: ModelSpec, recipe: Recipe, device: Device, launcher: LauncherEfficiency
) -> Work:
    """Sum up the model."""
    params = count_model(model)
    counted = _tokens(model, recipe)
    if launcher.mean_sequence_tokens < recipe.seq_len:
        recipe = replace(recipe, seq_len=round(launcher.mean_sequence_tokens))
    forward, backward = _layer_passes(model, recipe, device, launcher)
    head, head_bytes = _head(model, recipe, device, launcher)
    moe = [(b.feed_forward, n) for b, n in model.stack if isinstance(b.feed_forward, Experts)]
    matmul_share, attention_share, memory_share = _recompute_shares(recipe, launcher)
    element = 4.0 if recipe.precision in (Precision.FP32, Precision.TF32) else 2.0
    trained = float(params.total) if recipe.tuning is Tuning.FULL else _lora_params(model, recipe)
    return Work(
        num_layers=model.num_layers,
        num_moe_layers=sum(count for _, count in moe),
        forward=forward,
        backward=backward,
        recompute_share=matmul_share,
        recompute_attention_share=attention_share,
        recompute_memory_share=memory_share,
        head=head,
        head_bytes=head_bytes,
        hidden_size=model.hidden_size,
        top_k=float(moe[0][0].top_k) if moe else 0.0,
        num_experts=moe[0][0].num_experts if moe else 0,
        routed_width=(moe[0][0].latent_size if moe else 0) or model.hidden_size,
        group_share=moe[0][0].top_groups / moe[0][0].num_groups if moe else 1.0,
        kv_bytes_per_token=element * kv_width(model.blocks[0].attention),
        layer_params=float(params.blocks),
        outer_params=float(params.around_blocks),
        expert_params=float(sum(block.expert * count for block, count in params.runs)),
        trained_params=trained,
        model_flops_per_token=_model_flops(model, recipe) * _tokens(model, recipe) / counted,
        element_bytes=element,
        reduce_bytes=_reduce_bytes(recipe, launcher),
        optimizer_bytes=_optimizer_bytes(recipe, launcher),
        accumulate_bytes=6.0 if recipe.precision in _ALL_16_BIT else 10.0,
        tokens_per_sequence=_tokens(model, recipe),
        counted_tokens_per_sequence=counted,
    )


def _tokens(model: ModelSpec, recipe: Recipe) -> float:
    if not model.is_encoder_decoder:
        return float(recipe.seq_len)
    return float(recipe.seq_len + (recipe.decoder_seq_len or recipe.seq_len))


def _side_len(model: ModelSpec, recipe: Recipe, block: Block) -> int:
    if model.is_encoder_decoder and block.side is Side.DECODER:
        return recipe.decoder_seq_len or recipe.seq_len
    return recipe.seq_len


def _layer_passes(
    model: ModelSpec, recipe: Recipe, device: Device, launcher: LauncherEfficiency
) -> tuple[Pass, Pass]:
    plain: list[Matmul] = []
    experts: list[Matmul] = []
    adapters = 0.0
    fused = recipe.attention is AttentionKernel.FUSED
    attention_share = launcher.attention_share if fused else 1.0
    if fused and launcher.uses_cudnn_attention:
        attention_share *= device.cudnn_attention_gain
    forward_attention = backward_attention = hidden = split = routed = 0.0
    for block, count in model.stack:
        seq_len = _side_len(model, recipe, block)
        share = seq_len / _tokens(model, recipe) if model.is_encoder_decoder else 1.0
        layer_plain, layer_experts = block_matmuls(block, model.hidden_size)
        plain += _times(layer_plain, count * share)
        experts += _times(layer_experts, count * share)
        attentions = [(block.attention, 0)]
        if block.cross_attention is not None:
            attentions.append((block.cross_attention, recipe.seq_len))
        for attention, kv_len in attentions:
            there, back = attention_seconds(
                attention, recipe, device, seq_len=seq_len, kv_len=kv_len
            )
            rate = attention_share if attention.recurrence is None else 1.0
            forward_attention += count * there / rate
            backward_attention += count * back / rate
        layer_hidden, layer_split, layer_routed = layer_traffic(
            block, model.hidden_size, recipe, launcher
        )
        hidden += count * share * layer_hidden
        split += count * share * layer_split
        routed += count * share * layer_routed
        adapters += count * share * adapter_bytes(block, model.hidden_size, recipe)
    flops = device.matmul_flops * device.won_back(launcher.won_back_share)
    tuned = recipe.tuning is not Tuning.FULL
    weight_bytes = _weight_bytes(model, recipe)
    forward = Pass(
        matmul=forward_ramp(plain, device, flops=flops),
        experts=forward_ramp(experts, device, flops=flops),
        attention_seconds=forward_attention,
        hidden_bytes=hidden,
        split_bytes=split + adapters,
        routed_bytes=routed,
        weight_bytes=weight_bytes,
    )
    gradients = [input_gradient_ramp(plain, device, flops=flops)]
    expert_gradients = [input_gradient_ramp(experts, device, flops=flops)]
    if not tuned:
        gradients.append(weight_gradient_ramp(plain, device, flops=flops))
        expert_gradients.append(weight_gradient_ramp(experts, device, flops=flops))
    backward = Pass(
        matmul=_add(gradients),
        experts=_add(expert_gradients),
        attention_seconds=backward_attention,
        hidden_bytes=2.0 * hidden,
        split_bytes=2.0 * (split + adapters),
        routed_bytes=2.0 * routed,
        weight_bytes=weight_bytes if recipe.tuning is Tuning.QLORA else 0.0,
    )
    return forward, backward


def _times(matmuls: Iterable[Matmul], count: float) -> list[Matmul]:
    return [Matmul(m.n, m.k, m.by_column, m.count * count, m.splits) for m in matmuls]


def _add(ramps: Iterable[Ramp]) -> Ramp:
    total = Ramp()
    for ramp in ramps:
        total = Ramp(
            total.work + ramp.work,
            total.rows + ramp.rows,
            total.split + ramp.split,
            total.fixed + ramp.fixed,
        )
    return total


def _scale(ramp: Ramp, share: float) -> Ramp:
    """The same multiplications for a share of the tokens."""
    return Ramp(ramp.work * share, ramp.rows * share, ramp.split, ramp.fixed)


def _lora_params(model: ModelSpec, recipe: Recipe) -> float:
    total = 0.0
    for block, count in model.stack:
        shapes = lora_shapes(block, model.hidden_size, recipe)
        total += count * recipe.lora.rank * sum(n + k for n, k in shapes)
    if recipe.lora.train_embeddings:
        total += 2.0 * model.vocab_size * model.hidden_size
    return total


def _weight_bytes(model: ModelSpec, recipe: Recipe) -> float:
    """Bytes moved per pass to bring weights into the form that is multiplied."""
    params = float(count_model(model).blocks)
    if recipe.tuning is Tuning.QLORA:
        # Read the codes, write 16 bit, read them again; table look-ups reach half the bandwidth.
        return params * 2.0 * ((recipe.weight_bits or 4.5) / 8 + 4.0)
    if recipe.precision in (Precision.AMP_FP16, Precision.AMP_BF16):
        return params * 6.0
    return 0.0


def _head(
    model: ModelSpec, recipe: Recipe, device: Device, launcher: LauncherEfficiency
) -> tuple[Ramp, float]:
    matmuls = head_matmuls(model)
    flops = device.head_flops * device.won_back(launcher.won_back_share)
    ramps = [
        forward_ramp(matmuls, device, flops=flops),
        input_gradient_ramp(matmuls, device, flops=flops),
    ]
    if recipe.tuning is Tuning.FULL or recipe.lora.train_embeddings:
        ramps.append(weight_gradient_ramp(matmuls, device, flops=flops))
    if recipe.loss is Loss.CHUNKED:  # the logits are multiplied out again in the backward pass
        ramps.append(ramps[0])
    per_logit = {Loss.PLAIN: launcher.loss_bytes, Loss.FUSED: 12.0, Loss.CHUNKED: 12.0}[recipe.loss]
    if recipe.compiled:
        per_logit = min(per_logit, 16.0)
    logits = float(sum(matmul.n for matmul in matmuls[-1:]))
    share = launcher.masked_head_share if model.head is Head.MASKED else 1.0
    return _scale(_add(ramps), share), share * per_logit * logits


def _recompute_shares(recipe: Recipe, launcher: LauncherEfficiency) -> tuple[float, float, float]:
    """How much of a forward pass is done again: multiplications, attention, memory-bound work."""
    part = 1.0 / recipe.recompute.every
    match recipe.recompute.kind:
        case RecomputeKind.NONE:
            return 0.0, 0.0, 0.0
        case RecomputeKind.FULL:
            return part, part, part
    if launcher.selective_share == 0.0:  # Megatron: the attention core only
        return 0.0, part, 0.0
    # torch, by operator: every second multiplication and all that is cheap; attention is kept.
    attention = part if recipe.attention is AttentionKernel.EAGER else 0.0
    return launcher.selective_share * part, attention, part


def _model_flops(model: ModelSpec, recipe: Recipe) -> float:
    """6 FLOPs per multiplied parameter and token, and three times attention's forward FLOPs."""
    matmuls, attention = 0.0, 0.0
    tokens = _tokens(model, recipe)
    for block, count in model.stack:
        seq_len = _side_len(model, recipe, block)
        plain, experts = block_matmuls(block, model.hidden_size)
        top_k = block.feed_forward.top_k if isinstance(block.feed_forward, Experts) else 0
        active = sum(m.n * m.k for m in plain) + top_k * sum(m.n * m.k for m in experts)
        matmuls += count * active * seq_len / tokens
        attention += count * attention_flops(block.attention, seq_len)
        if block.cross_attention is not None:
            attention += count * attention_flops(
                block.cross_attention, seq_len, kv_len=recipe.seq_len
            )
    matmuls += sum(m.n * m.k for m in head_matmuls(model))
    return 6.0 * matmuls + 3.0 * attention / tokens


def _reduce_bytes(recipe: Recipe, launcher: LauncherEfficiency) -> float:
    if recipe.precision in _FP32_WEIGHTS:
        return 4.0
    mixed = recipe.precision in (Precision.BF16_MIXED, *LOW_PRECISIONS)
    return launcher.reduce_bytes if mixed else 2.0


def _optimizer_bytes(recipe: Recipe, launcher: LauncherEfficiency) -> float:
    share = OPTIMIZERS[recipe.optimizer].step_traffic
    if recipe.precision in _ALL_16_BIT:
        share *= 0.5
    return share * launcher.optimizer_bytes
