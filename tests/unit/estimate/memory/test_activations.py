"""What layers keep: the published identities to the byte, and what each extension adds."""

import math
from dataclasses import replace

import numpy as np
import pytest

from drystone.describe.layout import Layout, Layouts, Schedule
from drystone.describe.model import (
    Attention,
    Block,
    Experts,
    Head,
    Mlp,
    ModelSpec,
    Norm,
    QkNorm,
    Side,
)
from drystone.describe.recipe import (
    AttentionKernel,
    Lora,
    Loss,
    Offload,
    Precision,
    Recipe,
    Recompute,
    RecomputeKind,
    Tuning,
)
from drystone.estimate.launchers import find_launcher
from drystone.estimate.memory.activations import (
    SavedBytes,
    activation_width,
    block_activations,
    decoder_share,
    norm_bytes,
    saved_by_block,
)
from drystone.estimate.memory.kept import kept_activations
from drystone.estimate.memory.state import split_stage
from drystone.estimate.memory.terms import memory_terms
from drystone.estimate.parameters import count_model
from drystone.units import GiB

# papers/frenzy.md 1.3: h, l, a, s; then static / activations in GiB at t = 1, 2, 4, 8 and b = 1.
MARP_VECTORS = [
    ((1024, 24, 16, 1024), (6.59, 3.29, 1.65, 0.82), (2.67, 1.45, 0.84, 0.54)),
    ((1600, 48, 25, 1024), (28.98, 14.49, 7.25, 3.62), (8.35, 4.54, 2.64, 1.68)),
    ((2560, 32, 32, 2048), (49.29, 24.65, 12.32, 6.16), (25.31, 13.44, 7.50, 4.53)),
    ((4096, 32, 32, 2048), (123.87, 61.93, 30.97, 15.48), (28.50, 15.50, 9.00, 5.75)),
    ((5120, 40, 40, 2048), (239.22, 119.61, 59.80, 29.90), (44.53, 24.22, 14.06, 8.98)),
]
MARP_VOCABULARY = 50257


def gpt(*, hidden: int, layers: int, heads: int, vocab: int = MARP_VOCABULARY) -> ModelSpec:
    attention = Attention(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        qkv_bias=True,
        out_bias=True,
    )
    mlp = Mlp(ffn_size=4 * hidden, gated=False, bias=True)
    block = Block(attention=attention, feed_forward=mlp, norm=Norm.LAYER)
    return ModelSpec(
        name="gpt",
        hidden_size=hidden,
        stack=((block, layers),),
        vocab_size=vocab,
        tied_embeddings=True,
        final_norm=Norm.LAYER,
    )


def megatron(seq_len: int, **changes) -> Recipe:
    recipe = Recipe(
        seq_len=seq_len,
        global_batch=8,
        attention=AttentionKernel.EAGER,
        dropout=0.1,
        launcher="megatron-local",
    )
    return replace(recipe, **changes)


def kept_bytes(model: ModelSpec, recipe: Recipe, layout: Layout) -> float:
    """What the first stage keeps for its micro-batches in flight."""
    terms = memory_terms(model, recipe)
    stage = np.zeros((1, 1), dtype=np.int64)
    return kept_activations(terms, split_stage(terms, Layouts.of([layout]), stage)).kept.item()


def marp_activation_bytes(*, h: int, l: int, a: int, s: int, b: int, t: int) -> float:  # noqa: E741
    """papers/frenzy.md 1.3, which is arXiv:2205.05198 eq. 2."""
    return s * b * h * l * (10 + 24 / t + 5 * a * s / (h * t))


def marp_params(*, h: int, l: int, vocab: int) -> int:  # noqa: E741
    return vocab * h + l * (12 * h**2 + 13 * h)


@pytest.mark.parametrize(("shape", "static", "activations"), MARP_VECTORS)
def test_the_oracle_gives_the_vectors_of_the_paper(shape, static, activations):
    h, l, a, s = shape  # noqa: E741
    for index, t in enumerate((1, 2, 4, 8)):
        params = marp_params(h=h, l=l, vocab=MARP_VOCABULARY)
        kept = marp_activation_bytes(h=h, l=l, a=a, s=s, b=1, t=t)
        assert 20 * params / t / GiB == pytest.approx(static[index], abs=0.0051)
        assert kept / GiB == pytest.approx(activations[index], abs=0.0051)


@pytest.mark.parametrize(("shape", "static", "activations"), MARP_VECTORS)
@pytest.mark.parametrize(("index", "tp"), [(0, 1), (1, 2), (2, 4), (3, 8)])
def test_megatron_keeps_what_the_naive_formula_says(shape, static, activations, index, tp):
    h, l, a, s = shape  # noqa: E741
    model = gpt(hidden=h, layers=l, heads=a)

    kept = kept_bytes(model, megatron(s), Layout(tp=tp))

    assert kept == pytest.approx(marp_activation_bytes(h=h, l=l, a=a, s=s, b=1, t=tp), rel=1e-12)
    assert kept / GiB == pytest.approx(activations[index], abs=0.0051)
    final_norm = 2 * h  # the paper does not count it
    params = count_model(model).total - final_norm
    assert params == marp_params(h=h, l=l, vocab=MARP_VOCABULARY)
    assert 20 * params / tp / GiB == pytest.approx(static[index], abs=0.0051)


@pytest.mark.parametrize("micro_batch", [1, 3])
@pytest.mark.parametrize(("h", "a", "s"), [(512, 8, 1024), (4096, 32, 2048), (768, 12, 512)])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_gpt_block_keeps_34_bytes_and_the_scores(h, a, s, tp, micro_batch):
    """Korthikanti et al., arXiv:2205.05198: equations 1, 2 and 4."""
    model, recipe = gpt(hidden=h, layers=1, heads=a), megatron(s)
    sbh, scores = s * micro_batch * h, 5 * a * s / h

    plain = kept_bytes(model, recipe, Layout(tp=tp, micro_batch=micro_batch))
    split = kept_bytes(
        model, recipe, Layout(tp=tp, micro_batch=micro_batch, sequence_parallel=True)
    )

    assert plain == pytest.approx(sbh * (10 + 24 / tp + scores / tp), rel=1e-14)
    assert split == pytest.approx(sbh * (34 + scores) / tp, rel=1e-14)
    if tp == 1:
        assert plain == sbh * 34 + 5 * a * s * s * micro_batch


def test_selective_recomputation_drops_the_scores_and_rebuilds_them():
    """arXiv:2205.05198 section 5: 34 bytes are left."""
    h, a, s = 1024, 16, 2048
    model = gpt(hidden=h, layers=1, heads=a)
    recipe = megatron(s, recompute=Recompute(kind=RecomputeKind.SELECTIVE))
    block = block_activations(model.blocks[0], h, recipe, find_launcher(recipe.launcher))

    assert kept_bytes(model, recipe, Layout()) == 34 * s * h
    assert block.rebuilt == SavedBytes(scores=5.0 * a)


def test_full_recomputation_keeps_the_input_of_each_layer():
    """arXiv:2205.05198 table 2: 2 s b h."""
    model = gpt(hidden=512, layers=6, heads=8)
    recipe = megatron(1024, recompute=Recompute(kind=RecomputeKind.FULL))

    assert kept_bytes(model, recipe, Layout(micro_batch=2)) == 6 * 2 * 1024 * 2 * 512


@pytest.mark.parametrize("kind", [RecomputeKind.FULL, RecomputeKind.SELECTIVE])
@pytest.mark.parametrize("launcher", ["megatron-te", "torchtitan"])
def test_recomputing_every_nth_layer_lies_between_all_and_none(kind, launcher):
    model = gpt(hidden=512, layers=6, heads=8)
    recipe = megatron(1024, launcher=launcher)
    none = kept_bytes(model, recipe, Layout())

    def kept(every: int) -> float:
        recompute = Recompute(kind=kind, every=every)
        return kept_bytes(model, replace(recipe, recompute=recompute), Layout())

    assert kept(1) < kept(2) < kept(3) < none
    assert kept(2) == pytest.approx((kept(1) + none) / 2)


def test_fused_attention_keeps_no_scores_but_one_number_a_row():
    block = gpt(hidden=512, layers=1, heads=8).blocks[0]
    launcher = find_launcher("megatron-te")
    eager = saved_by_block(block, 512, megatron(1024), launcher)
    fused = saved_by_block(block, 512, megatron(1024, attention=AttentionKernel.FUSED), launcher)

    assert fused.scores == 0
    assert fused.divided == eager.divided + 4 * 8


def test_scores_see_all_keys_also_under_context_parallelism():
    model, recipe = gpt(hidden=512, layers=1, heads=8), megatron(1024)

    assert kept_bytes(model, recipe, Layout(cp=4)) == kept_bytes(model, recipe, Layout()) / 4


def test_fp32_activations_are_twice_as_wide():
    assert activation_width(Precision.FP32) == activation_width(Precision.TF32) == 4
    assert activation_width(Precision.BF16) == activation_width(Precision.FP8_MIXED) == 2
    assert activation_width(Precision.AMP_BF16) == 2


def test_plain_rms_norms_keep_an_fp32_copy_and_train_their_weight():
    torch, fused = find_launcher("torchtitan"), find_launcher("megatron-te")
    full = Recipe(seq_len=128, global_batch=1)

    assert norm_bytes(Norm.RMS, 100, full, fused) == 200
    assert norm_bytes(Norm.LAYER, 100, full, torch) == 200
    assert norm_bytes(Norm.RMS, 100, full, torch) == 600
    assert norm_bytes(Norm.RMS, 100, replace(full, compiled=True), torch) == 200
    assert norm_bytes(Norm.RMS, 100, replace(full, tuning=Tuning.LORA), torch) == 400
    assert norm_bytes(Norm.RMS, 100, full, find_launcher("litgpt")) == 800


def llama_block(**changes) -> Block:
    attention = Attention(num_heads=8, num_kv_heads=2, head_dim=64)
    return replace(
        Block(attention=attention, feed_forward=Mlp(ffn_size=1536, gated=True)), **changes
    )


def saved(block: Block, **changes) -> SavedBytes:
    recipe = replace(Recipe(seq_len=128, global_batch=1, launcher="megatron-te"), **changes)
    return saved_by_block(block, 512, recipe, find_launcher(recipe.launcher))


def test_grouped_queries_keep_narrower_keys_and_values():
    grouped = saved(llama_block())
    many = saved(llama_block(attention=Attention(num_heads=8, num_kv_heads=8, head_dim=64)))

    assert many.divided - grouped.divided == 2 * 2 * (8 - 2) * 64


def test_gated_networks_keep_three_or_four_tensors():
    te, torch = saved(llama_block()), saved(llama_block(), launcher="torchtitan")
    compiled = saved(llama_block(), launcher="torchtitan", compiled=True)

    assert torch.divided - te.divided == 2 * 1536
    assert compiled.divided == te.divided


def test_adapters_beside_some_matrices_spare_the_inputs_of_the_others():
    every = saved(llama_block(), tuning=Tuning.LORA)
    attention_only = saved(
        llama_block(), tuning=Tuning.LORA, lora=Lora(targets=("q", "k", "v", "o"))
    )

    assert every.whole - attention_only.whole == 2 * 512  # the norm before gate and up
    assert every.divided - attention_only.divided == 2 * 1536  # what enters down


def test_norms_of_queries_and_keys_keep_their_inputs():
    plain = saved(llama_block())
    normed = Attention(num_heads=8, num_kv_heads=2, head_dim=64, qk_norm=QkNorm.HEAD)

    assert saved(llama_block(attention=normed)).divided - plain.divided == 2 * (8 + 2) * 64


def test_bottlenecks_of_latent_attention_are_on_every_rank():
    latent = Attention(
        num_heads=8,
        num_kv_heads=8,
        head_dim=96,
        value_head_dim=64,
        q_lora_rank=192,
        kv_lora_rank=128,
        rope_head_dim=32,
    )
    kept = saved(llama_block(attention=latent))

    assert kept.whole - saved(llama_block()).whole == 2 * 2 * (192 + 128)


def test_each_token_keeps_top_k_copies_whatever_the_experts_are_split_by():
    experts = Experts(num_experts=8, top_k=2, ffn_size=1536, shared_ffn_size=256)
    block = llama_block(feed_forward=experts)
    kept = saved(block)
    model = ModelSpec(name="moe", hidden_size=512, stack=((block, 2),), vocab_size=1000)
    recipe = Recipe(seq_len=128, global_batch=8, launcher="megatron-te", balanced_experts=True)

    assert kept.routed == 2 * 2 * 2 * 512  # dispatched input and output of two copies
    assert kept.inner == 3 * 2 * 2 * 1536
    assert kept.divided - saved(llama_block()).divided == 3 * 2 * (256 - 1536)
    together = kept_bytes(model, recipe, Layout(dp=8))
    assert kept_bytes(model, recipe, Layout(dp=8, ep=8)) == together


def test_a_rank_keeps_the_copies_of_its_own_part_of_the_sequence_unless_experts_are_divided():
    experts = Experts(num_experts=8, top_k=2, ffn_size=1536)
    block = llama_block(feed_forward=experts)
    model = ModelSpec(name="moe", hidden_size=512, stack=((block, 2),), vocab_size=1000)
    recipe = Recipe(seq_len=128, global_batch=8, launcher="megatron-te", balanced_experts=True)
    apart = kept_bytes(model, recipe, Layout(dp=4, tp=2, ep=4, etp=1, sequence_parallel=True))
    divided = kept_bytes(model, recipe, Layout(dp=4, tp=2, ep=4, etp=2, sequence_parallel=True))

    assert divided - apart == 2 * 128 * saved(block).routed / 2  # two layers, half of the copies


def test_the_fullest_rank_keeps_more_where_tokens_go_where_they_want():
    experts = Experts(num_experts=8, top_k=2, ffn_size=1536)
    block = llama_block(feed_forward=experts)
    model = ModelSpec(name="moe", hidden_size=512, stack=((block, 4),), vocab_size=1000)
    natural = Recipe(seq_len=128, global_batch=8, launcher="megatron-te")
    forced = replace(natural, balanced_experts=True)
    layout = Layout(dp=8, ep=8)
    even, uneven = kept_bytes(model, forced, layout), kept_bytes(model, natural, layout)
    copies = 4 * 128 * (saved(block).routed + saved(block).inner)

    # One expert a rank: half a spread times sqrt(2 ln 8) for one layer, half of it for four.
    assert uneven - even == pytest.approx(copies * 0.5 * math.sqrt(2 * math.log(8)) / 2)
    assert kept_bytes(model, natural, Layout(dp=8)) == kept_bytes(model, forced, Layout(dp=8))


def test_four_norms_keep_four_inputs_and_two_outputs():
    two, four = saved(llama_block()), saved(llama_block(num_norms=4))

    assert four.whole - two.whole == 2 * 2 * 512


def test_dropout_keeps_two_masks():
    assert saved(llama_block(), dropout=0.1).whole - saved(llama_block()).whole == 2 * 512


def test_gathered_inputs_stay_whole_where_the_launcher_keeps_them():
    kept = saved(llama_block(), launcher="torchtitan", compiled=True)

    assert kept.gathered == 2 * 2 * 512
    assert kept.whole == 2 * 2 * 512
    assert saved(llama_block(), launcher="nanotron").gathered == 0


def encoder_decoder() -> ModelSpec:
    attention = Attention(num_heads=8, num_kv_heads=8, head_dim=64, causal=False)
    mlp = Mlp(ffn_size=2048, gated=False)
    encoder = Block(attention=attention, feed_forward=mlp, side=Side.ENCODER)
    decoder = Block(attention=attention, feed_forward=mlp, cross_attention=attention, num_norms=3)
    return ModelSpec(
        name="t5", hidden_size=512, stack=((encoder, 3), (decoder, 3)), vocab_size=32000
    )


def test_a_decoder_looks_at_the_tokens_of_the_encoder():
    recipe = Recipe(
        seq_len=512,
        global_batch=1,
        decoder_seq_len=128,
        attention=AttentionKernel.EAGER,
        launcher="megatron-te",
    )
    model = encoder_decoder()
    decoder = memory_terms(model, recipe).layers[1]
    assert decoder_share(recipe) == decoder.token_share == 0.25

    kept, per_token = decoder.activations.kept, 0.25
    # Three norms: inputs, and outputs in front of two attentions and the network.
    assert kept.whole == 3 * 2 * (2 * 512)
    own, cross = 2 * 4 * 512, 2 * (512 + 512) + 2 * 4 * (512 + 512)
    assert kept.divided == own + cross + 2 * 2 * 2048
    assert per_token * kept.scores * 512 == 2 * 8 * (128 * 128 + 128 * 512) / 512


def test_equal_lengths_are_the_default_of_an_encoder_decoder():
    recipe = Recipe(seq_len=512, global_batch=1)
    stated = replace(recipe, decoder_seq_len=512)

    assert kept_bytes(encoder_decoder(), recipe, Layout()) == kept_bytes(
        encoder_decoder(), stated, Layout()
    )


@pytest.mark.parametrize(
    ("schedule", "in_flight"),
    [
        ({"pp": 4}, 4),
        ({"pp": 4, "virtual_stages": 2}, (2 * 3 + 4 + 1) / 2),
        ({"pp": 4, "vocab_barriers": 2}, 6),
        ({"pp": 1}, 1),
    ],
)
def test_the_first_stage_keeps_the_micro_batches_in_flight(schedule, in_flight):
    """1F1B and interleaved, arXiv:2104.04473 section 2.2; barriers, arXiv:2411.05288."""
    model, recipe = gpt(hidden=512, layers=8, heads=8), megatron(1024, global_batch=32)
    one = kept_bytes(model, recipe, Layout()) / 8 * (8 / schedule["pp"])

    assert kept_bytes(model, recipe, Layout(**schedule)) == pytest.approx(in_flight * one)


def test_gpipe_keeps_them_all_and_no_schedule_keeps_more():
    model, recipe = gpt(hidden=512, layers=8, heads=8), megatron(1024, global_batch=32)
    one = kept_bytes(model, recipe, Layout()) / 4
    few = replace(recipe, global_batch=3)

    assert kept_bytes(model, recipe, Layout(pp=4, schedule=Schedule.GPIPE)) == 32 * one
    assert kept_bytes(model, few, Layout(pp=4)) == 3 * one
    assert kept_bytes(model, few, Layout(pp=4, vocab_barriers=2)) == 3 * one


def test_offloaded_activations_leave_one_layer_on_the_gpu():
    model = gpt(hidden=512, layers=8, heads=8)
    recipe = megatron(1024, offload=Offload.ACTIVATIONS)

    assert kept_bytes(model, recipe, Layout()) == kept_bytes(model, megatron(1024), Layout()) / 8


@pytest.mark.parametrize(
    ("changes", "per_element"),
    [
        ({}, 6.0),
        ({"loss": Loss.CHUNKED}, 0.0),
        ({"loss": Loss.FUSED}, 10.0),
        ({"precision": Precision.FP32}, 8.0),
        ({"precision": Precision.TF32, "loss": Loss.FUSED}, 12.0),
        ({"launcher": "hf-trainer"}, 14.0),
        ({"launcher": "hf-trainer", "precision": Precision.FP32}, 16.0),
    ],
)
def test_logits_take_what_the_launcher_and_the_loss_keep(changes, per_element):
    model = gpt(hidden=512, layers=2, heads=8, vocab=1000)
    recipe = megatron(1024, **({"launcher": "megatron-te"} | changes))

    assert memory_terms(model, recipe).logits_bytes_per_token == 1000 * per_element


def test_a_classifier_has_logits_for_one_position():
    model = replace(
        gpt(hidden=512, layers=2, heads=8, vocab=0), head=Head.CLASSIFY, num_classes=1000
    )
    recipe = Recipe(seq_len=250, global_batch=1, launcher="megatron-te")

    assert memory_terms(model, recipe).logits_bytes_per_token == pytest.approx(6.0 * 1000 / 250)
