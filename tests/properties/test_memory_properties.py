"""What holds of memory for every model, recipe and layout."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drystone.describe.layout import Layout, Layouts, Schedule, Sharding
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
    Optimizer,
    Precision,
    Recipe,
    Recompute,
    RecomputeKind,
    StepKernel,
    Tuning,
)
from drystone.estimate.launchers import LAUNCHERS
from drystone.estimate.memory.kept import kept_activations
from drystone.estimate.memory.peak import MemoryEstimates, estimate_memory
from drystone.estimate.memory.state import State, held_parameters, split_stage, stage_state
from drystone.estimate.memory.terms import memory_terms

powers = st.sampled_from([1, 2, 4, 8])


@st.composite
def attentions(draw) -> Attention:
    if draw(st.integers(0, 4)) == 0:
        return Attention(
            num_heads=8,
            num_kv_heads=8,
            head_dim=96,
            value_head_dim=64,
            q_lora_rank=draw(st.sampled_from([0, 128])),
            kv_lora_rank=64,
            rope_head_dim=32,
        )
    return Attention(
        num_heads=8,
        num_kv_heads=draw(powers),
        head_dim=draw(st.sampled_from([32, 64, 128])),
        qkv_bias=draw(st.booleans()),
        out_bias=draw(st.booleans()),
        qk_norm=draw(st.sampled_from(QkNorm)),
    )


@st.composite
def blocks(draw) -> Block:
    if draw(st.booleans()):
        feed_forward = Mlp(
            ffn_size=draw(st.sampled_from([512, 2048])),
            gated=draw(st.booleans()),
            bias=draw(st.booleans()),
        )
    else:
        feed_forward = Experts(
            num_experts=8,
            top_k=draw(st.integers(1, 4)),
            ffn_size=draw(st.sampled_from([256, 1024])),
            gated=draw(st.booleans()),
            shared_ffn_size=draw(st.sampled_from([0, 512])),
        )
    return Block(
        attention=draw(attentions()),
        feed_forward=feed_forward,
        norm=draw(st.sampled_from(Norm)),
        num_norms=draw(st.integers(1, 4)),
    )


@st.composite
def models(draw) -> ModelSpec:
    stack = [(draw(blocks()), draw(st.integers(8, 12)))]
    if draw(st.booleans()):
        stack.append((draw(blocks()), draw(st.integers(1, 6))))
    if draw(st.integers(0, 3)) == 0:
        other = draw(attentions())
        stack = [(replace(block, side=Side.ENCODER), count) for block, count in stack]
        last, count = stack[-1]
        decoder = replace(last, side=Side.DECODER, cross_attention=other, num_norms=3)
        stack.append((decoder, count))
    head = draw(st.sampled_from([Head.LANGUAGE, Head.MASKED, Head.CLASSIFY]))
    return ModelSpec(
        name="drawn",
        hidden_size=draw(st.sampled_from([256, 512, 1024])),
        stack=tuple(stack),
        vocab_size=draw(st.sampled_from([1000, 32000, 256_000])),
        tied_embeddings=draw(st.booleans()),
        learned_positions=draw(st.sampled_from([0, 2048])),
        head=head,
        num_classes=10 if head is Head.CLASSIFY else 0,
    )


recipes = st.builds(
    Recipe,
    seq_len=st.sampled_from([128, 1024, 4096]),
    global_batch=st.sampled_from([1, 64, 1024]),
    precision=st.sampled_from(Precision),
    optimizer=st.sampled_from(Optimizer),
    step_kernel=st.sampled_from(StepKernel),
    recompute=st.builds(Recompute, kind=st.sampled_from(RecomputeKind), every=st.integers(1, 4)),
    attention=st.sampled_from(AttentionKernel),
    loss=st.sampled_from(Loss),
    tuning=st.sampled_from(Tuning),
    lora=st.builds(
        Lora,
        rank=st.sampled_from([1, 16]),
        targets=st.sampled_from([("q", "v"), Lora.KNOWN_TARGETS]),
        dtype_bytes=st.sampled_from([0, 2, 4]),
        train_embeddings=st.booleans(),
    ),
    offload=st.sampled_from(Offload),
    compiled=st.booleans(),
    dropout=st.sampled_from([0.0, 0.1]),
    launcher=st.sampled_from(sorted(LAUNCHERS)),
    decoder_seq_len=st.sampled_from([0, 128]),
)


@st.composite
def layouts(draw) -> Layout:
    dp, tp, pp, cp = (draw(powers) for _ in range(4))
    copies = dp * cp
    return Layout(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=draw(st.sampled_from([one for one in (1, 2, 4, 8) if copies * tp % one == 0])),
        micro_batch=draw(st.integers(1, 4)),
        sharding=draw(st.sampled_from(Sharding)),
        shard_size=draw(st.sampled_from([0, 1, copies])),
        sequence_parallel=draw(st.booleans()),
        schedule=draw(st.sampled_from([Schedule.ONE_F_ONE_B, Schedule.GPIPE])),
        virtual_stages=draw(st.integers(1, 3)) if pp > 1 else 1,
        keep_gathered=draw(st.booleans()),
        vocab_barriers=draw(st.integers(0, 2)) if pp > 1 else 0,
    )


def state_of(model: ModelSpec, recipe: Recipe, layout: Layout) -> State:
    terms = memory_terms(model, recipe)
    split = split_stage(terms, Layouts.of([layout]), np.zeros((1, 1), dtype=np.int64))
    return stage_state(terms, split, held_parameters(terms, split))


def kept_of(model: ModelSpec, recipe: Recipe, layout: Layout) -> float:
    terms = memory_terms(model, recipe)
    split = split_stage(terms, Layouts.of([layout]), np.zeros((1, 1), dtype=np.int64))
    return kept_activations(terms, split).kept.item()


def columns_of(found: MemoryEstimates) -> dict[str, np.ndarray]:
    readings = {name: getattr(found, name) for name in ("stage", "moment", "device", "required")}
    return readings | found.items()


@given(model=models(), recipe=recipes, layout=layouts())
def test_items_are_finite_and_add_up(model, recipe, layout):
    found = estimate_memory(model, recipe, Layouts.of([layout]))

    for name, values in found.items().items():
        assert np.isfinite(values).all(), name
        assert (values >= 0).all(), name
    assert sum(found.items().values()) == pytest.approx(found.device, rel=1e-12)


@given(model=models(), recipe=recipes, layout=layouts())
def test_the_range_contains_the_estimate(model, recipe, layout):
    found = estimate_memory(model, recipe, Layouts.of([layout]))
    low, high = found.required_range()

    assert (low > 0).all()
    assert (low <= found.required).all()
    assert (found.required <= high).all()
    assert (found.allocated <= found.reserved).all()
    assert (found.reserved <= found.device).all()


@given(model=models(), recipe=recipes, layout=layouts())
def test_a_higher_stage_of_zero_never_needs_more_state(model, recipe, layout):
    states = [state_of(model, recipe, replace(layout, sharding=one)) for one in Sharding]

    for lower, higher in pairwise(states):
        for name in ("weights", "gradients", "optimizer", "step"):
            assert getattr(higher, name) <= getattr(lower, name) * (1 + 1e-12), name


@given(model=models(), recipe=recipes, layout=layouts())
def test_more_tensor_parallelism_never_needs_more_state(model, recipe, layout):
    more = state_of(model, recipe, replace(layout, tp=2 * layout.tp))
    fewer = state_of(model, recipe, layout)

    for name in ("weights", "gradients", "optimizer"):
        assert getattr(more, name) <= getattr(fewer, name) * (1 + 1e-12), name


@given(model=models(), recipe=recipes, layout=layouts())
def test_a_larger_micro_batch_never_needs_less(model, recipe, layout):
    # Both accumulate: a micro-batch that makes accumulation needless may save gradients.
    recipe = replace(recipe, global_batch=4 * layout.dp * layout.micro_batch)
    larger = replace(layout, micro_batch=2 * layout.micro_batch)
    small = estimate_memory(model, recipe, Layouts.of([layout]))
    large = estimate_memory(model, recipe, Layouts.of([larger]))

    assert large.required >= small.required * (1 - 1e-12)


@given(model=models(), recipe=recipes, layout=layouts())
def test_recomputation_never_keeps_more(model, recipe, layout):
    none = kept_of(model, replace(recipe, recompute=Recompute()), layout)
    selective = kept_of(
        model, replace(recipe, recompute=Recompute(kind=RecomputeKind.SELECTIVE)), layout
    )
    full = kept_of(model, replace(recipe, recompute=Recompute(kind=RecomputeKind.FULL)), layout)

    assert full <= none * (1 + 1e-12)
    assert full <= selective * (1 + 1e-12)


@given(model=models(), recipe=recipes, layout=layouts())
def test_a_longer_sequence_never_needs_less(model, recipe, layout):
    recipe = replace(recipe, decoder_seq_len=0)
    short = estimate_memory(model, recipe, Layouts.of([layout]))
    long = estimate_memory(model, replace(recipe, seq_len=2 * recipe.seq_len), Layouts.of([layout]))

    assert long.required >= short.required * (1 - 1e-12)


@given(model=models(), recipe=recipes, many=st.lists(layouts(), min_size=1, max_size=6))
def test_an_array_of_layouts_is_as_many_single_calls(model, recipe, many):
    together = columns_of(estimate_memory(model, recipe, Layouts.of(many)))

    for index, layout in enumerate(many):
        alone = columns_of(estimate_memory(model, recipe, Layouts.of([layout])))
        for name, values in alone.items():
            assert values[0] == together[name][index], name


@given(
    model=models(),
    recipe=recipes,
    many=st.lists(layouts(), min_size=2, max_size=6),
    chance=st.randoms(use_true_random=False),
)
def test_the_order_of_layouts_is_the_order_of_results(model, recipe, many, chance):
    order = list(range(len(many)))
    chance.shuffle(order)
    found = columns_of(estimate_memory(model, recipe, Layouts.of(many)))
    shuffled = columns_of(estimate_memory(model, recipe, Layouts.of([many[i] for i in order])))

    for name, values in found.items():
        np.testing.assert_array_equal(values[order], shuffled[name], err_msg=name)


@given(model=models(), recipe=recipes, layout=layouts())
def test_no_stage_needs_more_than_the_hungriest(model, recipe, layout):
    found = estimate_memory(model, recipe, Layouts.of([layout]))
    stages = list(range(layout.pp))
    each = estimate_memory(model, recipe, Layouts.of([layout] * layout.pp), stage=stages)

    assert found.required == each.required.max()
    assert found.required == each.required[found.stage]
