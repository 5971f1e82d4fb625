"""Keys of Megatron-LM (flags), Megatron-Bridge and NeMo 2 (YAML and overrides)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from drystone.describe.layout import Sharding
from drystone.describe.recipe import (
    AttentionKernel,
    ExpertDispatch,
    Loss,
    Offload,
    Optimizer,
    Precision,
    Recompute,
    RecomputeKind,
    Tuning,
)
from drystone.plan.configs.keys import Key, Table, Tool, names
from drystone.plan.configs.megatron_shape import shape_of

_YES: Final[dict[Any, Any]] = {True: True, False: False, None: None}
_ATTENTION: Final = {
    "auto": AttentionKernel.FUSED,
    "flash": AttentionKernel.FUSED,
    "fused": AttentionKernel.FUSED,
    "unfused": AttentionKernel.EAGER,
    "local": AttentionKernel.EAGER,
}
_FP8_RECIPES: Final = {
    "delayed": Precision.FP8_MIXED,
    "tensorwise": Precision.FP8_MIXED,
    "blockwise": Precision.FP8_MIXED,
    "mxfp8": Precision.MXFP8_MIXED,
}
_SHARDED: Final = {
    "no_shard": Sharding.NONE,
    "optim": Sharding.ZERO1,
    "optim_grads": Sharding.ZERO2,
    "optim_grads_params": Sharding.ZERO3,
}
# Of both: a flag, and the section in which the same name stands in YAML.
_SHARED: Final = (
    ("model", Key("tensor_model_parallel_size", "tp")),
    ("model", Key("pipeline_model_parallel_size", "pp")),
    ("model", Key("context_parallel_size", "cp")),
    ("model", Key("expert_model_parallel_size", "ep")),
    ("model", Key("expert_tensor_parallel_size", "etp")),
    ("model", Key("sequence_parallel", "sequence_parallel", _YES)),
    ("model", Key("seq_length", "seq_len")),
    ("train", Key("micro_batch_size", "micro_batch")),
    ("train", Key("global_batch_size", "step_batch")),
    ("model", Key("attention_backend", "attention", _ATTENTION)),
    ("model", Key("cross_entropy_loss_fusion", "loss", {True: Loss.FUSED, False: Loss.PLAIN})),
    (
        "model",
        Key(
            "moe_token_dispatcher_type",
            "expert_dispatch",
            {"alltoall": ExpertDispatch.ALLTOALL, "flex": ExpertDispatch.FUSED, "allgather": None},
        ),
    ),
    (
        "optimizer",
        Key(
            "optimizer",
            "optimizer",
            {"adam": Optimizer.ADAM, "sgd": Optimizer.SGD_MOMENTUM, "muon": Optimizer.MUON}
            | {"dist_muon": Optimizer.MUON},
        ),
    ),
    (
        "optimizer",
        Key("optimizer_cpu_offload", "offload", {True: Offload.OPTIMIZER, False: Offload.NONE}),
    ),
    ("ddp", Key("data_parallel_sharding_strategy", "sharding", _SHARDED)),
    ("ddp", Key("num_distributed_optimizer_instances", "replicas")),
)
# Read by `_settle`, several of them together.
_TOGETHER: Final = (
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
)
_INERT: Final = names(
    """
    lr* min_lr train_* weight_decay* adam_* sgd_* clip_grad init_method* seed log_* logging_*
    tensorboard* wandb* save* load* eval* exit_* data_* split tokenizer* vocab_file merge_file
    tiktoken* num_workers no_* master_* node_rank rdzv* distributed_* manual_gc* profile* ckpt_*
    dist_* mock_data calculate_per_token_loss decoupled_* override_opt* use_checkpoint_* timing_*
    overlap_* use_mcore_models use_flash_attn transformer_impl async_save auto_detect_*
    enable_experimental empty_unused_memory_level rotary_* norm_epsilon moe_aux_* moe_router_*
    moe_grouped_gemm moe_z_loss* moe_permute_fusion attention_dropout hidden_dropout
    make_vocab_size_divisible_by use_rotary_position_embeddings position_embedding_type
    cross_entropy_fusion_impl apply_layernorm_1p per_split_data_args_path nccl_* finetune
    cuda_graph_* mode attention_softmax_in_fp32 fp8_amax_* fp8_margin fp8_interval
    fp8_param_gather bias_* gradient_accumulation_fusion grad_reduce_in_* check_* accumulate_*
    global_batch_size_schedule step_batch_size_schedule rampup_* max_restarts tee
    start_weight_decay end_weight_decay apply_query_* untie_* disable_bias_linear step_func
    dataset config_file hf_path rerun_* result_* role module add_*bias mscale* high_priority*
    num_dataset_* create_attention_*
    """
)
# What says how large the model is: used by `shape_of`, without a value of its own in a setup.
_SHAPE: Final = names(
    """
    num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups
    group_query_attention kv_channels max_position_embeddings swiglu normalization vocab_size
    padded_vocab_size num_experts moe_ffn_hidden_size moe_layer_freq
    untie_embeddings_and_output_weights qk_layernorm squared_relu
    moe_shared_expert_intermediate_size moe_router_topk
    """
)


def _recompute(value: Mapping[str, Any], num_layers_per_stage: float) -> Recompute | None:
    """What the four keys of recomputation say together."""
    kind = value.get("recompute_granularity")
    modules = value.get("recompute_modules") or ()
    if kind == "selective":
        names = [modules] if isinstance(modules, str) else list(modules)
        return Recompute(kind=RecomputeKind.SELECTIVE, modules=tuple(map(str, names)))
    if kind != "full":
        return (
            Recompute(kind=RecomputeKind.SELECTIVE) if value.get("recompute_activations") else None
        )
    count = value.get("recompute_num_layers")
    if value.get("recompute_method") == "block" and isinstance(count, int) and count:
        every = max(num_layers_per_stage / count, 1.0) if num_layers_per_stage else 1.0
        return Recompute(kind=RecomputeKind.FULL, every=every)
    return Recompute(kind=RecomputeKind.FULL)


def _settle_sharding(said: dict[str, Any], value: Callable[[str, str], Any]) -> None:
    for name in ("use_megatron_fsdp", "use_torch_fsdp2", "use_custom_fsdp"):
        if any(value(name, where) is True for where in ("dist", "ddp")):
            said.setdefault("sharding", Sharding.ZERO3)
    if value("use_distributed_optimizer", "ddp") is True:
        said.setdefault("sharding", Sharding.ZERO1)


def _settle_run(said: dict[str, Any], table: Table) -> None:
    """Adapters, GPUs, and the model that a recipe is named for."""
    if "lora_rank" in said or table.get("peft.scheme") == "lora":
        said.setdefault("tuning", Tuning.LORA)
    if "_nodes" in said or "_per_node" in said:
        said["num_gpus"] = said.pop("_nodes", 1) * said.pop("_per_node", 8)
    if isinstance(table.get("recipe"), str):
        said.setdefault("model", _model_of_recipe(table["recipe"]))


def _settle(section: Callable[[str, str], str]) -> Callable[[dict[str, Any], Table], None]:
    """Together: recomputation, precision, sharding, GPUs; `section` says where a key stands."""

    def settle(said: dict[str, Any], table: Table) -> None:
        def value(name: str, where: str = "model") -> Any:
            return table.get(section(where, name))

        num_layers, pp = value("num_layers"), said.get("pp", 1)
        per_stage = num_layers / pp if isinstance(num_layers, int) else 0
        names = (*_TOGETHER, "recompute_activations")
        recompute = _recompute({name: value(name) for name in names}, per_stage)
        if recompute is not None:
            said["recompute"] = recompute
        _settle_sharding(said, value)
        chunk = value("num_layers_per_virtual_pipeline_stage")
        if isinstance(chunk, int) and chunk and per_stage:
            said["virtual_stages"] = max(int(per_stage // chunk), 1)
        if said.get("tp", 1) == 1:
            said.pop("sequence_parallel", None)
        _settle_run(said, table)

    return settle


def _model_of_recipe(name: str) -> str:
    """llama32_1b_pretrain_config is a recipe of llama32_1b."""
    found = re.sub(r"_(pretrain|sft|peft|finetune)\w*$|_config$", "", name)
    return re.sub(r"(?<=[a-z])(\d)(\d)(?=_)", r"\1.\2", found)


def _settle_flags(said: dict[str, Any], table: Table) -> None:
    _settle(lambda _, name: name)(said, table)
    if "model" not in said and "num_layers" in table:
        shape = shape_of(table)
        if shape is not None:
            said["shape"] = shape


_MEGATRON_INERT: Final = names(
    """
    recompute_activations use_distributed_optimizer use_megatron_fsdp use_torch_fsdp2
    num_layers_per_virtual_pipeline_stage moe_flex_dispatcher_backend init_model_with_meta_device
    fsdp_double_buffer use_nccl_ub PROGRAM
    """
)
MEGATRON: Final = Tool(
    name="megatron",
    keys=(
        *(key for _, key in _SHARED),
        Key("num_virtual_stages_per_pipeline_rank", "virtual_stages"),
        Key("bf16", "precision", {True: Precision.BF16_MIXED, False: None}),
        Key("fp16", "precision", {True: Precision.FP16_MIXED, False: None}),
        Key("fp8_format", "precision", dict.fromkeys(("hybrid", "e4m3"), Precision.FP8_MIXED)),
        Key("fp8_recipe", "precision", _FP8_RECIPES),
        Key("fp4_format", "precision", {"e2m1": Precision.NVFP4_MIXED}),
        Key("nproc_per_node", "_per_node"),
        Key("nnodes", "_nodes"),
        Key("language_model_type", "objective", {None: None}),  # images: not planned for
        Key("moe_enable_deepep", "expert_dispatch", {True: ExpertDispatch.FUSED, False: None}),
        Key("use_flash_attn", "attention", {True: AttentionKernel.FUSED, False: None}),
    ),
    usual={},
    marks=("tensor_model_parallel_size", "use_mcore_models", "micro_batch_size", "num_layers"),
    inert=(*_MEGATRON_INERT, *_INERT, *_TOGETHER, *_SHAPE),
    launcher="megatron-te",
    settle=_settle_flags,
)

_MIXED: Final[dict[Any, Any]] = {
    "bf16_mixed": Precision.BF16_MIXED,
    "fp16_mixed": Precision.FP16_MIXED,
    "bf16": Precision.BF16_MIXED,
    "bf16_with_fp8_delayed_scaling_mixed": Precision.FP8_MIXED,
    "bf16_with_fp8_current_scaling_mixed": Precision.FP8_MIXED,
    "bf16_with_fp8_subchannel_scaling_mixed": Precision.FP8_MIXED,
    "bf16_with_mxfp8_mixed": Precision.MXFP8_MIXED,
    "bf16_with_nvfp4_mixed": Precision.NVFP4_MIXED,
    None: None,
}


def _dotted(section: str, key: Key) -> Key:
    return Key(f"{section}.{key.name}", key.field, key.words)


_MODES: Final = {
    "sft": Tuning.FULL,
    "pretrain": Tuning.FULL,
    "lora": Tuning.LORA,
    "peft": Tuning.LORA,
}
_BRIDGE_INERT: Final = names(
    """
    optimizer.* scheduler.* checkpoint.* logger.* validation.* rng.* rerun* dataset.* tokenizer.*
    dist.* profiling.* train.* recipe mode ddp.* step_func no_sync hf_path comm_overlap.* peft.*
    master_* nvrx* inprocess* straggler* dataset model.num_layers_per_virtual_pipeline_stage
    config_file CONFIG rdzv* PROGRAM
    """
)
BRIDGE: Final = Tool(
    name="megatron-bridge",
    keys=(
        *(_dotted(section, key) for section, key in _SHARED),
        Key("dataset.seq_length", "seq_len"),
        Key("dataset.sequence_length", "seq_len"),
        Key("model.virtual_pipeline_model_parallel_size", "virtual_stages"),
        Key("mixed_precision", "precision", _MIXED),
        Key("model.fp8", "precision", dict.fromkeys(("hybrid", "e4m3"), Precision.FP8_MIXED)),
        Key("peft.dim", "lora_rank"),
        Key("peft_scheme", "tuning", {"lora": Tuning.LORA, "none": Tuning.FULL, None: None}),
        Key("mode", "tuning", _MODES),
        Key("nproc_per_node", "_per_node"),
        Key("nnodes", "_nodes"),
    ),
    usual={"precision": Precision.BF16_MIXED, "sharding": Sharding.ZERO1, "lora_rank": 32},
    marks=("train.micro_batch_size", "train.global_batch_size", "model.*_parallel_size"),
    inert=(*_BRIDGE_INERT, *(f"model.{name}" for name in (*_TOGETHER, *_INERT))),
    launcher="nemo",
    settle=_settle(lambda section, name: f"{section}.{name}"),
)

_PRECISIONS: Final[dict[Any, Any]] = {
    "bf16-mixed": Precision.BF16_MIXED,
    "bf16": Precision.BF16_MIXED,
    "16-mixed": Precision.FP16_MIXED,
    16: Precision.FP16_MIXED,
    32: Precision.FP32,
    "32": Precision.FP32,
    None: None,
}


def _settle_nemo(said: dict[str, Any], table: Table) -> None:
    """NeMo's YAML: the model's section, or the strategy's, has what Megatron has as flags."""
    plain = {name.rsplit(".", 1)[-1]: value for name, value in table.items()}
    plain |= {
        name.replace("activations_checkpoint", "recompute"): value
        for name, value in plain.items()
        if name.startswith("activations_checkpoint_")
    }
    _settle(lambda _, name: name)(said, plain)
    if "distributed" in str(table.get("model.optim.name", "")):
        said.setdefault("sharding", Sharding.ZERO1)


_NEMO_DEGREES: Final = tuple(key for section, key in _SHARED if section == "model")
_NEMO_MEGATRON_INERT: Final = names(
    """
    trainer.* exp_manager.* name restore_from_path optim.* log.* resume* data.* model.data.*
    model.optim.* model.tokenizer.* model.recompute_* model.activations_checkpoint_* model.peft.*
    peft.* model.mcore_gpt run.*
    """
)
NEMO_MEGATRON: Final = Tool(
    name="nemo-megatron",
    keys=(
        *(_dotted("model", key) for key in _NEMO_DEGREES),
        *(_dotted("trainer.strategy", key) for key in _NEMO_DEGREES),
        Key("model.encoder_seq_length", "seq_len"),
        Key("model.data.seq_length", "seq_len"),
        Key("data.seq_length", "seq_len"),
        Key("model.micro_batch_size", "micro_batch"),
        Key("model.global_batch_size", "step_batch"),
        Key("data.micro_batch_size", "micro_batch"),
        Key("data.global_batch_size", "step_batch"),
        Key("model.virtual_pipeline_model_parallel_size", "virtual_stages"),
        Key("trainer.strategy.virtual_pipeline_model_parallel_size", "virtual_stages"),
        Key("trainer.precision", "precision", _PRECISIONS),
        Key("trainer.devices", "_per_node"),
        Key("trainer.num_nodes", "_nodes"),
        Key("model.fp8", "precision", {True: Precision.FP8_MIXED, False: None}),
        Key("model.peft.peft_scheme", "tuning", {"lora": Tuning.LORA, "none": Tuning.FULL}),
        Key("model.peft.lora_tuning.adapter_dim", "lora_rank"),
        Key("peft.dim", "lora_rank"),
    ),
    usual={"precision": Precision.BF16_MIXED, "sharding": Sharding.ZERO1},
    marks=("trainer.devices", "trainer.num_nodes", "trainer.strategy*"),
    inert=(*_NEMO_MEGATRON_INERT, *(f"model.{name}" for name in (*_INERT, *_SHAPE))),
    launcher="nemo",
    settle=_settle_nemo,
)
