"""Keys of Axolotl, LLaMA-Factory, TRL, Hugging Face's Trainer, Accelerate and DeepSpeed."""

from __future__ import annotations

from typing import Any, Final

from drystone.describe.layout import Sharding
from drystone.describe.recipe import (
    AttentionKernel,
    Loss,
    Offload,
    Optimizer,
    Precision,
    Recompute,
    RecomputeKind,
    Tuning,
)
from drystone.plan.configs.keys import Key, Tool

_FULL: Final = Recompute(kind=RecomputeKind.FULL)
_NONE: Final = Recompute()
_NO: Final[dict[Any, Any]] = {False: None, None: None}

_OPTIMIZERS: Final[dict[Any, Any]] = {
    "adamw_torch_fused": Optimizer.ADAM, "adamw_torch": Optimizer.ADAM, "adamw": Optimizer.ADAM,
    "adamw_hf": Optimizer.ADAM, "adamw_apex_fused": Optimizer.ADAM, "adam": Optimizer.ADAM,
    "paged_adamw_32bit": Optimizer.ADAM, "paged_adamw": Optimizer.ADAM,
    "adamw_8bit": Optimizer.ADAM_8BIT, "adamw_bnb_8bit": Optimizer.ADAM_8BIT,
    "paged_adamw_8bit": Optimizer.ADAM_8BIT, "adamw_torch_8bit": Optimizer.ADAM_8BIT,
    "sgd": Optimizer.SGD, "adafactor": Optimizer.ADAFACTOR, "lion_32bit": Optimizer.LION,
    "lion": Optimizer.LION, None: None,
}  # fmt: skip
_ATTENTION: Final = {
    "sdpa": AttentionKernel.FUSED, "flash_attention_2": AttentionKernel.FUSED,
    "flash_attention_3": AttentionKernel.FUSED, "flash_attention": AttentionKernel.FUSED,
    "flex_attention": AttentionKernel.FUSED, "xformers": AttentionKernel.FUSED,
    "kernels-community/flash-attn2": AttentionKernel.FUSED,
    "kernels-community/flash-attn3": AttentionKernel.FUSED,
    "kernels-community/vllm-flash-attn3": AttentionKernel.FUSED,
    "eager": AttentionKernel.EAGER,
}  # fmt: skip
_ON_OFF_RECOMPUTE: Final[dict[Any, Any]] = {
    True: _FULL, False: _NONE, None: None, "true": _FULL, "unsloth": _FULL,
}  # fmt: skip
_BF16: Final[dict[Any, Any]] = {
    True: Precision.BF16_MIXED, "auto": Precision.BF16_MIXED, "true": Precision.BF16_MIXED,
    "full": Precision.BF16, "false": None, "": None, **_NO,
}  # fmt: skip
_BF16_USUAL: Final[dict[Any, Any]] = {**_BF16, False: Precision.FP32, "false": Precision.FP32}
_FP16: Final[dict[Any, Any]] = {True: Precision.FP16_MIXED, "": None, **_NO}
_CHUNKED: Final[dict[Any, Any]] = {True: Loss.CHUNKED, **_NO}
_FOUR_BIT: Final[dict[Any, Any]] = {True: Tuning.QLORA, **_NO}
_EIGHT_BIT: Final[dict[Any, Any]] = {True: 8.0, **_NO}


def _fsdp_keys(start: str) -> tuple[Key, ...]:
    """What FSDP's own keys say, under whichever prefix a tool has them."""
    return (
        Key(f"fsdp_config.{start}reshard_after_forward", "keep_gathered",
            {True: False, False: True, None: None, "full_shard": False, "shard_grad_op": True,
             "true": False, "false": True}),
        Key(f"fsdp_config.{start}sharding_strategy", "keep_gathered",
            {"full_shard": False, "shard_grad_op": True, 1: False, 2: True, None: None}),
        Key(f"fsdp_config.{start}offload_params", "offload",
            {True: Offload.STATE, False: Offload.NONE, None: None, "false": Offload.NONE,
             "true": Offload.STATE}),
        Key(f"fsdp_config.{start}activation_checkpointing", "recompute",
            {True: _FULL, **_NO}),
    )  # fmt: skip


_FSDP_VERSION: Final[dict[Any, Any]] = {2: Sharding.ZERO3, 1: Sharding.ZERO3, None: None}
_FSDP_INERT: Final = ("fsdp_config.*",)
# Of every tool: what is learnt, from what, how often it is written down, and who is told.
_INERT: Final = (
    "output_dir*", "overwrite_*", "dataset*", "eval*", "val_*", "save*", "log*", "report_to",
    "wandb*", "mlflow*", "trackio*", "swanlab*", "hub_*", "push_to_hub*", "learning_rate",
    "lr_scheduler*", "warmup*", "weight_decay", "num_epochs", "num_train_epochs", "max_steps",
    "seed", "resume*", "chat_template*", "special_tokens*", "tokens*", "tokenizer*", "template",
    "adam_*", "max_grad_norm", "ddp_timeout", "plot_loss", "do_*", "trust_remote_code",
    "preprocessing_*", "dataloader_*", "lora_alpha", "lora_dropout", "model_type", "strict",
    "test_datasets*", "early_stopping*", "loss_watchdog*", "type_of_model", "is_*_derived_model",
    "plugins", "*_checkpointing_kwargs*", "debug", "eot_tokens*", "cosine*", "*_strategy",
    "max_samples", "train_on_inputs", "remove_unused_columns", "ddp_find_unused_parameters",
    "lora_model_dir", "hf_use_auth_token", "model_revision", "tf32", "shuffle*", "roles_to_train",
    "PROGRAM", "run_name", "lora_fan_in_fan_out", "steps_per_print", "lora_task_type",
    "wall_clock_breakdown",
)  # fmt: skip

# Preferences and reinforcement: two models, or answers that are made while training.
_OTHER_OBJECTIVES: Final = tuple(
    Key(name, "objective", {None: None})
    for name in ("beta", "max_prompt_length", "num_generations", "reward_funcs", "loss_type")
)
_LOADED: Final[dict[Any, Any]] = {
    "bfloat16": Precision.BF16, "bf16": Precision.BF16, "float16": None, "float32": None,
    "auto": None, None: None,
}  # fmt: skip

_BATCH: Final = (
    Key("per_device_train_batch_size", "micro_batch"),
    Key("gradient_accumulation_steps", "accumulation"),
)
_TRAINER: Final = (
    *_BATCH,
    Key("bf16", "precision", _BF16),
    Key("fp16", "precision", _FP16),
    Key("gradient_checkpointing", "recompute", _ON_OFF_RECOMPUTE),
    Key("activation_checkpointing", "recompute", _ON_OFF_RECOMPUTE),  # the newer name
    Key("optim", "optimizer", _OPTIMIZERS),
    Key("torch_compile", "compiled", {True: True, False: False, None: None}),
    Key("use_liger_kernel", "loss", _CHUNKED),
)

TRAINER: Final = Tool(
    name="trainer",
    keys=(
        Key("model_name_or_path", "model"),
        *_TRAINER,
        *_fsdp_keys(""),
        *_OTHER_OBJECTIVES,
    ),
    usual={},
    marks=("per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs"),
    inert=(*_INERT, *_FSDP_INERT),
)  # fmt: skip

TRL: Final = Tool(
    name="trl",
    keys=(
        Key("model_name_or_path", "model"),
        Key("max_length", "seq_len"),
        Key("max_seq_length", "seq_len"),
        Key("bf16", "precision", _BF16_USUAL),
        *(key for key in _TRAINER if key.name != "bf16"),
        Key("dtype", "_loaded", _LOADED),
        Key("torch_dtype", "_loaded", _LOADED),
        *(key for key in _OTHER_OBJECTIVES if key.name != "loss_type"),
        Key("loss_type", "objective", {"nll": None, "dft": None, "chunked_nll": None, None: None}),
        Key("attn_implementation", "attention", _ATTENTION),
        Key("use_peft", "tuning", {True: Tuning.LORA, False: Tuning.FULL, None: None}),
        Key("load_in_4bit", "tuning", _FOUR_BIT),
        Key("load_in_8bit", "weight_bits", _EIGHT_BIT),
        Key("lora_r", "lora_rank"),
    ),
    usual={"precision": Precision.BF16_MIXED, "recompute": _FULL, "seq_len": 1024},
    qlora={"use_peft": True, "load_in_4bit": True},
    marks=("use_peft", "max_length", "max_seq_length", "attn_implementation", "dataset_name"),
    inert=(*_INERT, "packing", "use_bnb_nested_quant", "bnb_*", "per_device_eval_batch_size"),
)  # fmt: skip

LLAMA_FACTORY: Final = Tool(
    name="llama-factory",
    keys=(
        Key("model_name_or_path", "model"),
        Key("cutoff_len", "seq_len"),
        *_BATCH,
        Key("bf16", "precision", _BF16),
        Key("fp16", "precision", _FP16),
        Key("pure_bf16", "precision", {True: Precision.BF16, **_NO}),
        Key("disable_gradient_checkpointing", "recompute", {True: _NONE, False: _FULL, None: None}),
        Key("optim", "optimizer", _OPTIMIZERS),
        Key("torch_compile", "compiled", {True: True, False: False, None: None}),
        Key("enable_liger_kernel", "loss", _CHUNKED),
        Key("flash_attn", "attention", {
            "sdpa": AttentionKernel.FUSED, "fa2": AttentionKernel.FUSED,
            "fa3": AttentionKernel.FUSED, "auto": AttentionKernel.FUSED,
            "disabled": AttentionKernel.EAGER,
        }),
        Key("finetuning_type", "tuning", {
            "full": Tuning.FULL, "lora": Tuning.LORA,
        }),
        Key("quantization_bit", "tuning", {4: Tuning.QLORA, 8: Tuning.QLORA, None: None}),
        Key("quantization_bit", "weight_bits", {8: 8.0, 4: None, None: None}),
        Key("lora_rank", "lora_rank"),
        Key("stage", "objective", {"sft": None, "pt": None}),
    ),
    usual={"recompute": _FULL, "seq_len": 2048, "tuning": Tuning.LORA, "lora_rank": 8},
    qlora={"finetuning_type": "lora", "quantization_bit": 4},
    marks=("finetuning_type", "cutoff_len", "template"),
    inert=(*_INERT, "packing", "neat_packing", "media_dir", "ray_*",
           "placement_strategy", "resources_per_worker*", "quantization_method", "rope_scaling",
           "image_*", "video_*", "double_quantization", "upcast_*"),
)  # fmt: skip

AXOLOTL: Final = Tool(
    name="axolotl",
    keys=(
        Key("base_model", "model"),
        Key("sequence_len", "seq_len"),
        Key("micro_batch_size", "micro_batch"),
        Key("gradient_accumulation_steps", "accumulation"),
        Key("bf16", "precision", _BF16_USUAL),
        Key("fp16", "precision", _FP16),
        Key("bfloat16", "precision", {True: Precision.BF16, **_NO}),
        Key("float16", "precision", {True: Precision.FP16, **_NO}),
        Key("gradient_checkpointing", "recompute", {**_ON_OFF_RECOMPUTE, "offload": _FULL}),
        Key("gradient_checkpointing", "offload", {
            **dict.fromkeys(_ON_OFF_RECOMPUTE), "offload": Offload.ACTIVATIONS,
        }),
        Key("activation_offloading", "offload", {True: Offload.ACTIVATIONS, "legacy":
            Offload.ACTIVATIONS, "disk": Offload.ACTIVATIONS, "hidden_states":
            Offload.ACTIVATIONS, **_NO}),
        Key("optimizer", "optimizer", {**_OPTIMIZERS, "muon": Optimizer.MUON}),
        Key("torch_compile", "compiled", {True: True, False: False, None: None, "auto": None}),
        Key("attn_implementation", "attention", _ATTENTION),
        Key("flash_attention", "attention", {True: AttentionKernel.FUSED, "": None, **_NO}),
        Key("chunked_cross_entropy", "loss", {True: Loss.CHUNKED, **_NO}),
        Key("liger_fused_linear_cross_entropy", "loss", _CHUNKED),
        Key("cut_cross_entropy", "loss", {True: Loss.CHUNKED, **_NO}),
        Key("adapter", "tuning", {
            "lora": Tuning.LORA, "qlora": Tuning.QLORA, "": None, None: None,
        }),
        Key("load_in_4bit", "tuning", _FOUR_BIT),
        Key("load_in_8bit", "weight_bits", _EIGHT_BIT),
        Key("lora_r", "lora_rank"),
        Key("fsdp_version", "sharding", _FSDP_VERSION),
        Key("fsdp_config.fsdp_version", "sharding", _FSDP_VERSION),
        *_fsdp_keys(""),
        *_fsdp_keys("fsdp_"),
        Key("dp_shard_size", "shard_size"),
        Key("tensor_parallel_size", "tp"),
        Key("context_parallel_size", "cp"),
        Key("sequence_parallel_degree", "cp"),
        Key("expert_parallel_size", "ep"),
        Key("rl", "objective", {"": None, None: None}),
        Key("reward_model", "objective", {False: None, None: None}),
    ),
    usual={"precision": Precision.BF16_MIXED, "seq_len": 512},
    qlora={"adapter": "qlora", "load_in_4bit": True},
    marks=("base_model", "micro_batch_size", "sequence_len"),
    inert=(*_INERT, *_FSDP_INERT, "lora_target_linear", "sample_packing",
           "pad_to_sequence_len", "liger_*", "processor_type", "skip_prepare_dataset",
           "lora_*_kernel", "train_on_split", "model_config.*"),
)  # fmt: skip


ACCELERATE: Final = Tool(
    name="accelerate",
    keys=(
        Key("num_processes", "num_gpus"),
        Key("mixed_precision", "precision", {
            "no": None, "bf16": Precision.BF16_MIXED, "fp16": Precision.FP16_MIXED,
            "fp8": Precision.FP8_MIXED, False: None,
        }),
        Key("distributed_type", "sharding", {
            "fsdp": Sharding.ZERO3, "multi_gpu": Sharding.NONE, "no": Sharding.NONE,
            "deepspeed": None,
        }),
        *_fsdp_keys("fsdp_"),
        Key("deepspeed_config.zero_stage", "sharding", {
            0: Sharding.NONE, 1: Sharding.ZERO1, 2: Sharding.ZERO2, 3: Sharding.ZERO3,
        }),
        Key("deepspeed_config.offload_optimizer_device", "offload", {
            "cpu": Offload.OPTIMIZER, "none": Offload.NONE, None: None,
        }),
        Key("deepspeed_config.offload_param_device", "offload", {
            "cpu": Offload.STATE, "none": None, None: None,
        }),
        Key("deepspeed_config.gradient_accumulation_steps", "accumulation"),
        Key("parallelism_config.parallelism_config_tp_size", "tp"),
        Key("parallelism_config.parallelism_config_cp_size", "cp"),
        Key("parallelism_config.parallelism_config_dp_shard_size", "shard_size"),
    ),
    usual={},
    marks=("distributed_type", "compute_environment", "num_processes"),
    inert=("compute_environment", "debug", "machine_rank", "main_*", "num_machines", "rdzv*",
           "same_network", "downcast_bf16", "use_cpu", "tpu*", "enable_cpu_affinity", "gpu_ids",
           "deepspeed_config.zero3_*", "deepspeed_config.deepspeed_multinode_launcher",
           "deepspeed_config.gradient_clipping", *_FSDP_INERT,
           "parallelism_config.parallelism_config_dp_replicate_size"),
)  # fmt: skip

DEEPSPEED: Final = Tool(
    name="deepspeed",
    keys=(
        Key("train_micro_batch_size_per_gpu", "micro_batch"),
        Key("gradient_accumulation_steps", "accumulation"),
        Key("bf16.enabled", "precision", _BF16),
        Key("fp16.enabled", "precision", {"auto": None, **_FP16}),
        Key("zero_optimization.stage", "sharding", {int(stage): stage for stage in Sharding}),
        Key("zero_optimization.offload_optimizer.device", "offload", {
            "cpu": Offload.OPTIMIZER, "none": Offload.NONE,
        }),
        Key("zero_optimization.offload_param.device", "offload", {
            "cpu": Offload.STATE, "none": None,
        }),
    ),
    usual={},
    marks=("zero_optimization", "train_micro_batch_size_per_gpu"),
    inert=(*_INERT, "optimizer.*", "scheduler.*", "zero_optimization.*", "train_batch_size",
           "gradient_clipping", "zero_allow_untested_optimizer", "fp16.*", "bf16.*"),
)  # fmt: skip
