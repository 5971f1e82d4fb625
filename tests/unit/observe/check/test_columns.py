"""What the words in the columns of published runs mean."""

import contextlib

import pytest

from drystone.describe.layout import Layout, Schedule, Sharding
from drystone.describe.model import Experts, Head, Mlp, Norm, QkNorm
from drystone.describe.recipe import (
    AttentionKernel,
    CudaGraphs,
    ExpertDispatch,
    Lora,
    Loss,
    Offload,
    Optimizer,
    Precision,
    Recipe,
    RecomputeKind,
    Tuning,
)
from drystone.errors import DrystoneError, RequestError
from drystone.estimate.parameters import count_model
from drystone.observe.check.columns import number_of, parse_layout, whole_number_of
from drystone.observe.check.model import parse_shape, style_of
from drystone.observe.check.recipe_columns import launcher_of, parse_recipe

ROW = {
    "run_id": "mine-0001",
    "framework": "Megatron-LM core (dev image), transformer_engine",
    "arch": "gpt",
    "layers": "12",
    "hidden": "512",
    "heads": "8",
    "vocab": "50304",
    "seq_len": "1024",
    "dp": "2",
    "sharding": "none",
    "tp": "2",
    "pp": "2",
    "micro_batch": "4",
    "precision": "bf16-mixed",
    "recompute": "none",
    "tuning": "full",
}


def recipe(**changes: str) -> Recipe:
    row = ROW | changes
    model = parse_shape(row)
    return parse_recipe(row, parse_layout(row, model), model)


def layout(**changes: str) -> Layout:
    row = ROW | changes
    return parse_layout(row, parse_shape(row))


# --- the model -------------------------------------------------------------------------------


def test_what_a_row_leaves_out_follows_from_the_rest():
    model = parse_shape(ROW)
    block = model.blocks[0]

    assert model.num_layers == 12
    assert block.attention.num_kv_heads == 8
    assert block.attention.head_dim == 64
    assert block.feed_forward == Mlp(ffn_size=2048, gated=False, bias=True, activation="gelu")
    assert model.learned_positions == 1024
    assert model.head is Head.LANGUAGE


@pytest.mark.parametrize(
    ("arch", "norm", "positions", "num_norms"),
    [
        ("gpt (4x mlp, tied emb)", Norm.LAYER, 1024, 2),
        ("LLAMA", Norm.RMS, 0, 2),
        ("mpt", Norm.LAYER_NO_BIAS, 1024, 2),
        ("falcon", Norm.LAYER, 0, 1),
        ("gemma2", Norm.RMS, 0, 4),
    ],
)
def test_the_name_of_an_architecture_implies_its_norms(arch, norm, positions, num_norms):
    model = parse_shape(ROW | {"arch": arch})

    assert model.blocks[0].norm is norm
    assert model.learned_positions == positions
    assert model.blocks[0].num_norms == num_norms


def test_bert_looks_both_ways_and_qwen3_norms_its_heads():
    bert = parse_shape(ROW | {"arch": "bert"})

    assert bert.head is Head.MASKED
    assert not bert.blocks[0].attention.causal
    assert parse_shape(ROW | {"arch": "qwen3"}).blocks[0].attention.qk_norm is QkNorm.HEAD


EXPERTS = {"arch": "moe", "moe_experts": "8", "moe_topk": "2", "ffn": "2048"}


def test_experts_are_as_wide_as_the_row_says():
    experts = parse_shape(ROW | EXPERTS).blocks[0].feed_forward

    assert isinstance(experts, Experts)
    assert (experts.num_experts, experts.top_k, experts.ffn_size) == (8, 2, 2048)


def test_experts_of_another_width_follow_from_the_stated_parameters():
    half = parse_shape(ROW | EXPERTS | {"ffn": "1024"})
    stated = str(count_model(half).total)
    model = parse_shape(ROW | EXPERTS | {"params": stated})
    experts = model.blocks[0].feed_forward

    assert isinstance(experts, Experts)
    assert experts.ffn_size == pytest.approx(1024, rel=0.01)
    assert count_model(model).total == pytest.approx(float(stated), rel=0.01)


def test_stated_parameters_that_agree_or_are_of_a_dense_model_change_nothing():
    model = parse_shape(ROW | EXPERTS)
    nearly = round(count_model(model).total * 1.02)

    assert parse_shape(ROW | EXPERTS | {"params": str(nearly)}) == model
    assert parse_shape(ROW | {"params": "1"}) == parse_shape(ROW)


def test_stated_parameters_that_leave_nothing_for_experts_are_refused():
    with pytest.raises(RequestError, match="less than the layers without experts"):
        parse_shape(ROW | EXPERTS | {"params": "1000"})


# --- the layout ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", Sharding.NONE),
        ("ddp (FSDP NO_SHARD)", Sharding.NONE),
        ("none (DeepSpeed 3D)", Sharding.NONE),
        ("", Sharding.NONE),
        ("zero0", Sharding.NONE),
        ("zero1 (distributed optimizer)", Sharding.ZERO1),
        ("zero2", Sharding.ZERO2),
        ("zero3", Sharding.ZERO3),
        ("fsdp-full (zero3)", Sharding.ZERO3),
        ("fsdp-grad-op", Sharding.ZERO3),
        ("hsdp", Sharding.ZERO3),
        ("fsdp", Sharding.ZERO3),
        ("ZeRO-3", Sharding.ZERO3),
        ("megatron-fsdp optim_grads_params", Sharding.ZERO3),
    ],
)
def test_words_for_sharding(text, expected):
    assert layout(sharding=text).sharding is expected


def test_grad_op_keeps_layers_gathered():
    assert layout(sharding="fsdp-grad-op").keep_gathered
    assert not layout(sharding="fsdp-full").keep_gathered


def test_hybrid_sharding_stays_in_its_group_or_in_a_node():
    assert layout(sharding="hsdp 4", dp="32").shard_size == 4
    assert layout(sharding="hsdp", dp="32", tp="1").shard_size == 8
    assert layout(sharding="hsdp", dp="32", tp="2").shard_size == 4
    assert layout(sharding="hsdp", dp="6", tp="1").shard_size == 2
    assert layout(sharding="fsdp-full", dp="32").shard_size == 0


def test_ulysses_splits_the_sequence():
    assert layout(sp="ulysses 4").cp == 4
    assert layout(sp="ulysses 4", cp="2").cp == 2
    assert layout(sp="megatron-sp").cp == 1


def test_sequence_parallelism_needs_tensor_parallelism():
    assert layout(sp="megatron-sp (TP reduce-scatter mode)").sequence_parallel
    assert not layout(sp="megatron-sp", tp="1").sequence_parallel
    assert not layout(sp="ulysses 4").sequence_parallel


@pytest.mark.parametrize(
    ("changes", "virtual"),
    [
        ({"vpp": ""}, 1),
        ({"vpp": "2"}, 2),
        ({"vpp": "layers/stage 1"}, 6),
        ({"vpp": "layers/stage 8"}, 1),
        ({"vpp": "2", "pp": "1"}, 1),
    ],
)
def test_words_for_virtual_stages(changes, virtual):
    found = layout(**changes)

    assert found.virtual_stages == virtual
    assert (found.schedule is Schedule.INTERLEAVED) == (virtual > 1)


@pytest.mark.parametrize(
    ("notes", "barriers"),
    [
        ("", 0),
        ("method baseline", 0),
        ("method redis", 0),
        ("method vocab-1", 2),
        ("method vocab-2", 1),
        ("method interlaced", 4),
    ],
)
def test_words_for_a_spread_vocabulary(notes, barriers):
    assert layout(notes=notes, pp="8").vocab_barriers == barriers


# --- the recipe ------------------------------------------------------------------------------


def test_the_global_batch_is_stated_or_follows():
    assert recipe().global_batch == 8
    assert recipe(grad_accum="16").global_batch == 128
    assert recipe(global_batch="64").global_batch == 64


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bf16-mixed", Precision.BF16_MIXED),
        ("fp16/bf16-mixed (Megatron)", Precision.BF16_MIXED),
        ("fp16-mixed", Precision.FP16_MIXED),
        ("bfloat16 weights, amp bf16", Precision.BF16),
        ("float16 weights, no amp", Precision.FP16),
        ("bf16 weights and states (bf16-true)", Precision.BF16),
        ("fp8 (tensorwise) over bf16-mixed", Precision.FP8_MIXED),
        ("mxfp8", Precision.MXFP8_MIXED),
        ("tf32", Precision.TF32),
        ("fp32", Precision.FP32),
        ("amp bf16", Precision.AMP_BF16),
        ("amp fp16", Precision.AMP_FP16),
    ],
)
def test_words_for_precision(text, expected):
    assert recipe(precision=text, framework="plain torch").precision is expected


def test_deepspeed_keeps_a_master_of_whatever_it_trains():
    zero = {"framework": "HF Trainer + PEFT (+DeepSpeed)", "precision": "bf16 weights"}

    assert recipe(**zero, sharding="zero2").precision is Precision.BF16_MIXED
    assert recipe(**zero, sharding="none").precision is Precision.BF16


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Optimizer.ADAM),
        ("AdamW fp32 states", Optimizer.ADAM),
        ("AdamW 8bit", Optimizer.ADAM_8BIT),
        ("paged_adamw_8-bit", Optimizer.ADAM_8BIT),
        ("muon fp32 states", Optimizer.MUON),
        ("LAMB", Optimizer.LAMB),
        ("Lion", Optimizer.LION),
        ("Adafactor", Optimizer.ADAFACTOR),
        ("SGD with momentum", Optimizer.SGD_MOMENTUM),
        ("SGD", Optimizer.SGD),
    ],
)
def test_words_for_the_optimizer(text, expected):
    assert recipe(optimizer=text).optimizer is expected


@pytest.mark.parametrize(
    ("text", "kind", "every"),
    [
        ("none (presumed)", RecomputeKind.NONE, 1),
        ("full (uniform 1)", RecomputeKind.FULL, 1),
        ("selective (op)", RecomputeKind.SELECTIVE, 1),
        ("selective (every other layer)", RecomputeKind.FULL, 2),
    ],
)
def test_words_for_recomputation(text, kind, every):
    found = recipe(recompute=text).recompute

    assert (found.kind, found.every) == (kind, every)


LTS = "Megatron-LM core (lts image), transformer_engine"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"attention": "flash"}, AttentionKernel.FUSED),
        ({"attention": ""}, AttentionKernel.FUSED),
        ({"attention": "eager (fused softmax)"}, AttentionKernel.EAGER),
        ({"attention": "unfused"}, AttentionKernel.EAGER),
        ({"attention": "default (TE/local)"}, AttentionKernel.FUSED),
        (
            {"attention": "default (TE/local)", "framework": "Megatron-LM core (dev image), local"},
            AttentionKernel.EAGER,
        ),
        (
            {"attention": "default (TE/local)", "framework": LTS, "meas_date": "2025-06-01"},
            AttentionKernel.EAGER,
        ),
        (
            {"attention": "default (TE/local)", "framework": LTS, "meas_date": "2026-02-01"},
            AttentionKernel.FUSED,
        ),
    ],
)
def test_words_for_the_attention_kernel(changes, expected):
    assert recipe(**changes).attention is expected


@pytest.mark.parametrize(
    ("framework", "expected"),
    [
        ("HF SFTTrainer + accelerate FSDP (none)", Loss.PLAIN),
        ("HF SFTTrainer + accelerate FSDP (foak-fast-kernels)", Loss.FUSED),
        ("HF SFTTrainer + accelerate FSDP (foak-fast-kernels-liger)", Loss.CHUNKED),
    ],
)
def test_words_for_the_loss(framework, expected):
    assert recipe(framework=framework).loss is expected


def test_full_training_has_no_adapters():
    assert recipe(tuning="full (pretrain)").tuning is Tuning.FULL


@pytest.mark.parametrize(
    ("text", "tuning", "bits"),
    [
        ("lora", Tuning.LORA, 0.0),
        ("LORA", Tuning.LORA, 0.0),
        ("qlora 4bit nf4 (bnb)", Tuning.QLORA, 4.5),
        ("qlora bnb.nf4-dq", Tuning.QLORA, 4.127),
    ],
)
def test_words_for_tuning(text, tuning, bits):
    found = recipe(tuning=text, lora_rank="8")

    assert (found.tuning, found.weight_bits, found.lora.rank) == (tuning, bits, 8)


def test_adapters_may_come_with_trained_embeddings():
    assert recipe(tuning="lora + trainable embedding and head").lora.train_embeddings
    assert recipe(tuning="lora").lora.rank == 16


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Offload.NONE),
        ("none", Offload.NONE),
        ("params+optimizer CPU", Offload.STATE),
        ("optimizer", Offload.OPTIMIZER),
        ("activations", Offload.ACTIVATIONS),
    ],
)
def test_words_for_offload(text, expected):
    assert recipe(offload=text).offload is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", False), ("no", False), ("eager", False), ("yes", True), ("thunder nvfuser", True)],
)
def test_words_for_compilation(text, expected):
    assert recipe(compile=text).compiled is expected


def test_megatron_trains_with_dropout_and_others_without():
    assert recipe().dropout == 0.1
    assert recipe(framework="torchtitan FSDP2").dropout == 0.0


@pytest.mark.parametrize(
    ("framework", "launcher"),
    [
        ("Megatron-LM core (dev image), transformer_engine", "megatron-te"),
        ("Megatron-LM core (lts image), local", "megatron-local"),
        ("Megatron-DeepSpeed (BigScience)", "megatron-deepspeed"),
        ("HF SFTTrainer + accelerate FSDP (none)", "accelerate"),
        ("HF Trainer + PEFT (+DeepSpeed)", "deepspeed"),
        ("HF Trainer + PEFT", "hf-trainer"),
        ("PEFT method_comparison loop", "hf-trainer"),
        ("torchtitan FSDP2", "torchtitan"),
        ("Galvatron profiler (Megatron kernels + FSDP)", "galvatron"),
        ("something new", "pytorch"),
    ],
)
def test_frameworks_follow_the_conventions_of_a_launcher(framework, launcher):
    assert launcher_of(framework) == launcher


# --- numbers ---------------------------------------------------------------------------------


def test_numbers_are_read_with_a_default_or_refused():
    assert whole_number_of({"dp": "8.0"}, "dp") == 8
    assert whole_number_of({}, "dp", 1) == 1
    assert number_of({"mem_gib": "1.5"}, "mem_gib") == 1.5
    assert number_of({}, "mem_gib") == 0
    with pytest.raises(RequestError, match="column dp is empty"):
        whole_number_of({"dp": ""}, "dp")


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "1.5", "1e12", "eight", "0x8", "8 GPUs"])
def test_numbers_that_cannot_be_meant_are_refused_in_words(text):
    with pytest.raises(RequestError, match="column dp"):
        whole_number_of({"dp": text}, "dp")


@pytest.mark.parametrize("name", [key for key in ROW if key not in ("run_id", "framework")])
@pytest.mark.parametrize("text", ["", "nan", "-1", "0", "1e400", "what?", "\x00"])
def test_no_word_in_any_column_is_met_with_anything_but_an_error_of_ours(name, text):
    with contextlib.suppress(DrystoneError):
        recipe(**{name: text})


@pytest.mark.parametrize(
    ("arch", "gated", "like"),
    [
        ("llama3", True, "llama"),
        ("Qwen2.5", True, "qwen2"),
        ("internlm2", True, "llama"),
        ("somebodys-new-model", True, "llama"),
        ("somebodys-old-model", False, "gpt"),
    ],
)
def test_an_architecture_nobody_knows_is_built_like_its_family(arch, gated, like):
    assert style_of(arch.lower(), gated=gated) == style_of(like, gated=gated)


@pytest.mark.parametrize(
    ("changes", "targets"),
    [
        ({"notes": "adapters on attention only"}, ("q", "k", "v", "o")),
        ({"tuning": "lora (q_proj, v_proj)"}, ("q", "v")),
        ({"lora_rank": "32", "trainable_params": "9175040"}, ("q", "v")),
        ({"lora_rank": "64", "trainable_params": "97255424"}, Lora.KNOWN_TARGETS),
        ({}, Lora.KNOWN_TARGETS),
    ],
)
def test_the_matrices_with_adapters_are_named_or_counted(changes, targets):
    shape = {
        "layers": "28", "hidden": "3072", "heads": "24", "kv_heads": "8", "head_dim": "128",
        "ffn": "8192", "gated_mlp": "yes", "vocab": "128256", "arch": "llama",
    }  # fmt: skip
    found = recipe(**(shape | {"tuning": "lora"} | changes))

    assert found.lora.targets == targets


@pytest.mark.parametrize(
    ("changes", "keeps"),
    [
        ({"tuning": "qlora nf4"}, False),
        ({"tuning": "qlora 4bit gptq"}, True),
        ({"tuning": "qlora nf4", "sharding": "fsdp-full"}, True),
    ],
)
def test_peft_upcasts_neither_gptq_nor_under_fsdp(changes, keeps):
    assert recipe(**changes).keeps_16_bit is keeps


def test_eight_bits_are_read_as_eight():
    assert recipe(tuning="qlora 8bit").weight_bits == 8.0


def test_experts_known_by_name_come_with_what_no_column_says():
    """Latent attention, a dense first layer, shared experts; also with fewer layers."""
    row = ROW | {
        "model": "deepseek-v2-lite", "arch": "deepseek_v2", "layers": "27", "hidden": "2048",
        "heads": "16", "kv_heads": "16", "head_dim": "192", "ffn": "1408", "gated_mlp": "yes",
        "vocab": "102400", "moe_experts": "64", "moe_topk": "6",
    }  # fmt: skip
    model = parse_shape(row | {"params": "15706484224"})

    assert count_model(model).total == 15_706_484_224
    assert model.stack[0][0].attention.is_latent
    assert isinstance(model.stack[0][0].feed_forward, Mlp)
    assert parse_shape(row | {"layers": "4"}).num_layers == 4
    # Other numbers under the same name are another model.
    assert not parse_shape(row | {"hidden": "4096"}).stack[0][0].attention.is_latent


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"notes": "forced balance; EP overlap"}, (ExpertDispatch.AUTO, True, True)),
        ({"notes": "HybridEP"}, (ExpertDispatch.FUSED, False, False)),
        ({"dispatch": "alltoall, overlap"}, (ExpertDispatch.ALLTOALL, True, False)),
        ({"framework": "AutoModel (FSDP2 + TE + DeepEP)"}, (ExpertDispatch.FUSED, False, False)),
        ({"routing": "forced"}, (ExpertDispatch.AUTO, False, True)),
    ],
)
def test_how_experts_were_run_is_read_from_columns_or_notes(changes, found):
    read = recipe(**changes)

    assert (read.expert_dispatch, read.overlap_dispatch, read.balanced_experts) == found


@pytest.mark.parametrize(
    ("text", "graphs"),
    [("full", CudaGraphs.FULL), ("", CudaGraphs.AUTO), ("layers", CudaGraphs.LAYERS)],
)
def test_graphs_are_read_from_their_column(text, graphs):
    assert recipe(graphs=text).cuda_graphs is graphs
    assert recipe(notes="full-iteration CUDA graph").cuda_graphs is CudaGraphs.FULL


@pytest.mark.parametrize(
    ("text", "precision"),
    [
        ("MXFP8", Precision.MXFP8_MIXED),
        ("FP8-MX", Precision.MXFP8_MIXED),
        ("NVFP4", Precision.NVFP4_MIXED),
        ("FP8-CS (FP8-MX)", Precision.FP8_MIXED),
        ("fp8 tensorwise", Precision.FP8_MIXED),
    ],
)
def test_narrow_formats_are_told_apart(text, precision):
    assert recipe(precision=text).precision is precision


def test_tensor_parallelism_of_experts_is_stated_or_as_megatron_has_it():
    plain = {"framework": "Megatron-LM core (dev image)", "tp": "2", "dp": "4", "ep": "4"}

    assert layout(**plain).expert_tp == 2
    assert layout(**plain | {"model": "moe:gpt3_tp2_ep4_etp1_te"}).expert_tp == 1
    assert layout(**plain | {"framework": "Megatron-Bridge"}).expert_tp == 1
    assert layout(**plain | {"framework": "Megatron-Bridge", "etp": "2"}).expert_tp == 2


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("selective [layernorm moe_act]", "selective[layernorm,moe_act]"),
        ("selective (mla_up_proj, mlp)", "selective[mla_up_proj,mlp]"),
        ("selective (op)", "selective"),
        ("full (block 4)", "full/3"),
        ("full (uniform 1)", "full"),
    ],
)
def test_recomputation_by_module_and_by_layers_of_a_stage(text, found):
    assert str(recipe(recompute=text, layers="24").recompute) == found


@pytest.mark.parametrize(
    ("framework", "launcher"),
    [
        ("TorchTitan 0.2", "torchtitan"),
        ("torchtune full_finetune_distributed", "torch-fsdp"),
        ("Unsloth 2026.4", "hf-trainer"),
        ("ms-swift (DeepSpeed ZeRO-3)", "deepspeed"),
        ("Pai-Megatron-Patch", "megatron-te"),
        ("mcore v0.15", "megatron-te"),
        ("nvidia nemo 25.09", "nemo"),
        ("Hugging Face accelerate", "hf-trainer"),
        ("something nobody knows", "pytorch"),
    ],
)
def test_a_framework_is_known_by_any_spelling(framework: str, launcher: str) -> None:
    assert launcher_of(framework) == launcher


def test_words_of_other_peoples_tables() -> None:
    assert layout(sharding="ZeRO stage 3").sharding is Sharding.ZERO3
    assert layout(sharding="dist_opt").sharding is Sharding.ZERO1
    assert layout(sharding="no").sharding is Sharding.NONE
    assert recipe(recompute="gradient checkpointing").recompute.kind is RecomputeKind.FULL
    assert recipe(recompute="no").recompute.kind is RecomputeKind.NONE
    assert recipe(precision="mixed bf16").precision is Precision.BF16_MIXED
    assert recipe(precision="pure bf16", framework="torchtune").precision is Precision.BF16
    assert recipe(framework="torchtune").loss is Loss.CHUNKED
    assert layout(sharding="FULL_SHARD").sharding is Sharding.ZERO3
    assert layout(sharding="DP").sharding is Sharding.NONE
    assert layout(sp="yes").sequence_parallel
    assert recipe(recompute="SAC").recompute.kind is RecomputeKind.SELECTIVE
    assert recipe(recompute="block 3").recompute.every == 2  # three of six layers a stage
    assert recipe(tuning="SFT").tuning is Tuning.FULL
    for unclear in ("sometimes", "1/3", "0.5"):
        with pytest.raises(DrystoneError):
            recipe(recompute=unclear)


def test_megatron_keeps_a_master_also_where_a_table_says_bf16_alone() -> None:
    assert recipe(precision="BF16").precision is Precision.BF16_MIXED
    assert recipe(precision="BF16", framework="Megatron-Bridge").precision is Precision.BF16_MIXED
    assert recipe(precision="BF16", framework="torchtune").precision is Precision.BF16
    both = recipe(precision="bf16 + fp32 master", framework="torchtune")
    assert both.precision is Precision.BF16_MIXED


def test_a_gate_that_is_not_stated_is_as_the_architecture_has_it() -> None:
    def mlp(**changes: str) -> Mlp:
        part = parse_shape(ROW | changes).stack[0][0].feed_forward
        assert isinstance(part, Mlp)
        return part

    assert mlp(arch="llama").gated
    assert not mlp(arch="llama", gated_mlp="no").gated
    assert not mlp(arch="gpt").gated


# --- words of tables that nobody here wrote ----------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sharding", "keeps", "group"),
    [
        ("FULL_SHARD", Sharding.ZERO3, False, 0),
        ("SHARD_GRAD_OP", Sharding.ZERO3, True, 0),
        ("HYBRID_SHARD", Sharding.ZERO3, False, 8),
        ("HSDP", Sharding.ZERO3, False, 8),
        ("megatron-fsdp", Sharding.ZERO3, False, 0),
        ("zero_stage=1", Sharding.ZERO1, False, 0),
        ("stage 2", Sharding.ZERO2, False, 0),
        ("optim_grads", Sharding.ZERO2, False, 0),
        ("data parallel", Sharding.NONE, False, 0),
        ("n/a", Sharding.NONE, False, 0),
    ],
)
def test_sharding_in_the_words_of_each_framework(text, sharding, keeps, group):
    found = layout(sharding=text, dp="32", tp="1", pp="1")

    assert (found.sharding, found.keep_gathered) == (sharding, keeps)
    assert found.shard_size == group


@pytest.mark.parametrize(
    ("text", "precision"),
    [
        ("16-mixed", Precision.FP16_MIXED),
        ("O2", Precision.FP16_MIXED),
        ("amp", Precision.AMP_FP16),
        ("half", Precision.FP16),
        ("float8 dynamic", Precision.FP8_MIXED),
        ("bf16/fp32", Precision.BF16_MIXED),
        ("BF16 params + fp32 optimizer", Precision.BF16_MIXED),
        ("bfloat16 weights, no amp", Precision.BF16),
    ],
)
def test_precision_in_the_words_of_each_framework(text, precision):
    assert recipe(framework="torchtitan", precision=text).precision is precision


@pytest.mark.parametrize(
    ("text", "tuning", "rank", "bits"),
    [
        ("fft", Tuning.FULL, 16, 0.0),
        ("cpt", Tuning.FULL, 16, 0.0),
        ("LoRA (r=8)", Tuning.LORA, 8, 0.0),
        ("lora rank 64", Tuning.LORA, 64, 0.0),
        ("LoRA 4bit", Tuning.QLORA, 16, 4.5),
        ("4-bit LoRA, r=32", Tuning.QLORA, 32, 4.5),
        ("lora int8", Tuning.QLORA, 16, 8.0),
    ],
)
def test_tuning_with_its_rank_and_bits_in_the_text(text, tuning, rank, bits):
    found = recipe(tuning=text)

    assert (found.tuning, found.lora.rank, found.weight_bits) == (tuning, rank, bits)


@pytest.mark.parametrize("text", ["dora", "dpo", "galore", ""])
def test_what_is_not_estimated_is_refused_and_not_taken_for_something_else(text):
    with pytest.raises(RequestError, match="has no formula"):
        recipe(tuning=text)


@pytest.mark.parametrize("text", ["", "no", "False", "none", "off", "eager"])
def test_every_way_to_say_no_is_a_no(text):
    assert not recipe(compile=text).compiled
    assert recipe(offload=text if text != "eager" else "").offload is Offload.NONE


@pytest.mark.parametrize(
    ("text", "kind", "every", "modules"),
    [
        ("AC", RecomputeKind.FULL, 1, ()),
        ("50%", RecomputeKind.FULL, 2, ()),
        ("0%", RecomputeKind.NONE, 1, ()),
        ("moe_act, layernorm", RecomputeKind.SELECTIVE, 1, ("layernorm", "moe_act")),
        ("block 0", RecomputeKind.NONE, 1, ()),
    ],
)
def test_recomputation_by_share_and_by_module(text, kind, every, modules):
    found = recipe(recompute=text).recompute

    assert (found.kind, found.every, found.modules) == (kind, every, modules)


def test_degrees_that_follow_from_the_others_may_be_left_out():
    found = layout(dp="", gpus="16", micro_batch="", global_batch="64", grad_accum="4", cp="none")

    assert (found.dp, found.micro_batch, found.cp) == (4, 4, 1)
    with pytest.raises(RequestError, match="column dp is empty"):
        layout(dp="", gpus="15")
    with pytest.raises(RequestError, match="column micro_batch is empty"):
        layout(micro_batch="", global_batch="64")


@pytest.mark.parametrize("text", ["yes", "on", "megatron-sp", "sequence parallel", "2"])
def test_sequence_parallelism_is_switched_on_in_many_words(text):
    assert layout(sp=text).sequence_parallel
    assert not layout(sp=text, tp="1").sequence_parallel


def test_a_word_for_sequence_parallelism_that_nobody_knows_is_refused():
    assert layout(sp="Ulysses=4", dp="4").cp == 4
    with pytest.raises(DrystoneError, match="column sp"):
        layout(sp="zigzag")


def test_commas_between_thousands_are_no_decimal_points():
    assert number_of({"pace": "12,345.5"}, "pace") == 12345.5
    with pytest.raises(RequestError, match="is not a number"):
        number_of({"pace": "60,5"}, "pace")
