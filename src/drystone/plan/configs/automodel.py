"""Keys of NeMo AutoModel's recipes (YAML)."""

from __future__ import annotations

from typing import Any, Final

from drystone.describe.layout import Schedule, Sharding
from drystone.describe.recipe import (
    AttentionKernel,
    Loss,
    Optimizer,
    Precision,
    Recompute,
    RecomputeKind,
    Tuning,
)
from drystone.plan.configs.keys import Key, Table, Tool, names

_FULL: Final = Recompute(kind=RecomputeKind.FULL)
_STRATEGIES: Final = {
    "fsdp2": Sharding.ZERO3,
    "megatron_fsdp": Sharding.ZERO3,
    "ddp": Sharding.NONE,
}
_MANAGERS: Final = "nemo_automodel.components.distributed"
_LOSSES: Final = "nemo_automodel.components.loss"
_SCHEDULES: Final = {
    "1f1b": Schedule.ONE_F_ONE_B,
    "gpipe": Schedule.GPIPE,
    "interleaved1f1b": Schedule.INTERLEAVED,
}
_DTYPES: Final[dict[Any, Any]] = {
    "bf16": Precision.BF16,
    "bfloat16": Precision.BF16,
    "torch.bfloat16": Precision.BF16,
    "auto": Precision.BF16,
    "float32": Precision.BF16_MIXED,
    "fp32": Precision.BF16_MIXED,
    None: None,
}


def _settle(said: dict[str, Any], table: Table) -> None:
    """Adapters, packed sequences, pipelines in micro-batches of their own."""
    if any(name.startswith("peft.") for name in table):
        said.setdefault("tuning", Tuning.LORA)
    packed = table.get("packed_sequence.packed_sequence_size")
    if isinstance(packed, int) and packed > 0:
        said["seq_len"] = packed
    pp, small = said.get("pp", 1), said.pop("_pipeline_micro", 0)
    if pp > 1 and small:
        said["micro_batch"] = small
    elif pp > 1:
        said["micro_batch"] = 1
    if said.get("schedule") is Schedule.INTERLEAVED:
        said.pop("schedule")
        if pp > 1:
            said.setdefault("virtual_stages", 2)
    elif pp == 1:
        said.pop("schedule", None)
    if said.get("tp", 1) == 1:
        said.pop("sequence_parallel", None)
    dp = table.get("distributed.dp_size")
    if isinstance(dp, int) and dp > 0:
        said["num_gpus"] = dp * said.get("tp", 1) * pp * said.get("cp", 1)


_AUTOMODEL_INERT: Final = names(
    """
    recipe step_scheduler.* dist_env.* rng.* checkpoint.* dataset.* ci.* validation_d*
    dataloader.* optimizer.* lr_scheduler.* wandb.* mlflow.* packed_sequence.* tokenizer.* seed
    clip_grad_norm.* loss_fn.* compile.* fp8.* peft.* distributed.dp_size quantization.*
    model.trust_remote_code model._target_ distributed.pipeline.* distributed.defer_*
    model.config._target_ _validation_d* nvtx model.output_hidden_states distributed.moe.* comet.*
    model.name_or_path model.force_hf model.use_liger_kernel parallelizer.*
    model.config.trust_remote_code benchmark.* model.backend.*
    """
)
AUTOMODEL: Final = Tool(
    name="nemo",
    keys=(
        Key("model.pretrained_model_name_or_path", "model"),
        Key("model.config.pretrained_model_name_or_path", "model"),
        Key("model.model_name", "model"),
        Key("dataset.seq_length", "seq_len"),
        Key("dataset.seq_len", "seq_len"),
        Key("dataset.max_seq_length", "seq_len"),
        Key("step_scheduler.local_batch_size", "micro_batch"),
        Key("step_scheduler.global_batch_size", "step_batch"),
        Key("distributed.strategy", "sharding", _STRATEGIES),
        Key(
            "distributed._target_",
            "sharding",
            {
                f"{_MANAGERS}.fsdp2.fsdp2manager": Sharding.ZERO3,
                f"{_MANAGERS}.megatron_fsdp.megatronfsdpmanager": Sharding.ZERO3,
                f"{_MANAGERS}.ddp.ddpmanager": Sharding.NONE,
            },
        ),
        Key("distributed.tp_size", "tp"),
        Key("distributed.pp_size", "pp"),
        Key("distributed.cp_size", "cp"),
        Key("distributed.ep_size", "ep"),
        Key("distributed.dp_replicate_size", "replicas"),
        Key("distributed.sequence_parallel", "sequence_parallel", {True: True, False: False}),
        Key(
            "distributed.activation_checkpointing",
            "recompute",
            {True: _FULL, False: Recompute(), None: None},
        ),
        Key("distributed.pipeline.pp_schedule", "schedule", _SCHEDULES),
        Key("distributed.pipeline.pp_microbatch_size", "_pipeline_micro"),
        Key("model.torch_dtype", "precision", _DTYPES),
        Key("fp8.enabled", "precision", {True: Precision.FP8_MIXED, False: None}),
        Key("compile.enabled", "compiled", {True: True, False: False}),
        Key(
            "model.attn_implementation",
            "attention",
            {
                "sdpa": AttentionKernel.FUSED,
                "flash_attention_2": AttentionKernel.FUSED,
                "flash_attention_3": AttentionKernel.FUSED,
                "eager": AttentionKernel.EAGER,
            },
        ),
        Key(
            "optimizer._target_",
            "optimizer",
            {
                "torch.optim.adamw": Optimizer.ADAM,
                "torch.optim.adam": Optimizer.ADAM,
                "transformer_engine.pytorch.optimizers.fused_adam.fusedadam": Optimizer.ADAM,
                "torch.optim.sgd": Optimizer.SGD_MOMENTUM,
                "bitsandbytes.optim.adamw8bit": Optimizer.ADAM_8BIT,
            },
        ),
        Key(
            "loss_fn._target_",
            "loss",
            {
                f"{_LOSSES}.masked_ce.maskedcrossentropy": Loss.PLAIN,
                f"{_LOSSES}.linear_ce.fusedlinearcrossentropy": Loss.CHUNKED,
                f"{_LOSSES}.te_parallel_ce.teparallelcrossentropy": Loss.FUSED,
                f"{_LOSSES}.chunked_ce.chunkedcrossentropy": Loss.PLAIN,
            },
        ),
        Key("peft.dim", "lora_rank"),
        Key("quantization.load_in_4bit", "tuning", {True: Tuning.QLORA, False: None}),
        Key("nproc_per_node", "num_gpus"),
    ),
    usual={"precision": Precision.BF16, "sharding": Sharding.ZERO3, "lora_rank": 8},
    qlora={"quantization.load_in_4bit": True},
    marks=("step_scheduler.*", "distributed.tp_size", "recipe"),
    inert=_AUTOMODEL_INERT,
    launcher="automodel",
    settle=_settle,
)
