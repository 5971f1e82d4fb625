"""Writing a plan as the config of another trainer: training keys, Accelerate, DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from drystone.describe.layout import Schedule, Sharding
from drystone.describe.model import ModelSpec
from drystone.describe.recipe import Offload, Precision, RecomputeKind, Tuning
from drystone.plan.configs.huggingface import AXOLOTL, LLAMA_FACTORY, TRAINER, TRL
from drystone.plan.configs.keys import Table
from drystone.plan.configs.setup import Setup
from drystone.plan.configs.write_degrees import (
    DEGREE_TOOLS,
    FLAG_TOOLS,
    GPUS_OF_A_NODE,
    cannot,
    check_degrees,
    write_degrees,
)
from drystone.plan.plan import Plan, Way

_FIELDS: Final = (
    "model", "seq_len", "micro_batch", "accumulation", "precision", "recompute", "optimizer",
    "attention", "loss", "compiled", "tuning",
)  # fmt: skip
_TRAINERS: Final = {tool.name: tool for tool in (AXOLOTL, LLAMA_FACTORY, TRL, TRAINER)}
TARGETS: Final = (*_TRAINERS, "accelerate", "deepspeed", *DEGREE_TOOLS)
_MIXED: Final = {
    Precision.BF16_MIXED: "bf16",
    Precision.FP16_MIXED: "fp16",
    Precision.FP8_MIXED: "fp8",
}


def setup_of(plan: Plan, target: str) -> Setup:
    """A plan as a setup of one of these tools; refused where it cannot say it."""
    layout, recipe = plan.layout, plan.recipe
    if plan.way is not Way.CELL or layout is None:
        told = "unequal shares of the work, or layers divided among unlike GPUs"
        raise cannot(target, told)
    ranks = layout.dp * layout.cp
    is_hybrid = layout.shard_size not in (0, ranks)
    setup = Setup(
        model=plan.model.name,
        num_gpus=layout.num_gpus,
        seq_len=recipe.seq_len,
        micro_batch=layout.micro_batch,
        accumulation=recipe.global_batch // (layout.dp * layout.micro_batch),
        tp=layout.tp,
        pp=layout.pp,
        cp=layout.cp,
        ep=layout.ep,
        etp=layout.etp,
        sharding=layout.sharding,
        replicas=ranks // layout.shard_size if is_hybrid else 0,
        keep_gathered=layout.keep_gathered,
        sequence_parallel=layout.sequence_parallel,
        virtual_stages=layout.virtual_stages,
        schedule=Schedule.GPIPE if layout.schedule is Schedule.GPIPE else Schedule.ONE_F_ONE_B,
        recompute=recipe.recompute,
        precision=recipe.precision,
        optimizer=recipe.optimizer,
        attention=recipe.attention,
        loss=recipe.loss,
        tuning=recipe.tuning,
        lora_rank=recipe.lora.rank if recipe.tuning is not Tuning.FULL else Setup().lora_rank,
        weight_bits=recipe.weight_bits,
        offload=recipe.offload,
        compiled=recipe.compiled,
        expert_dispatch=recipe.expert_dispatch,
        shape=plan.model if isinstance(plan.model, ModelSpec) else None,
    )
    if layout.vocab_barriers:
        raise cannot(target, "a vocabulary spread over all stages")
    if target in DEGREE_TOOLS:
        check_degrees(setup, target)
    else:
        _check_split(setup, target)
    return setup


def _check_split(setup: Setup, target: str) -> None:
    for name in ("tp", "pp", "cp", "ep"):
        if getattr(setup, name) > 1:
            raise cannot(target, f"{name}={getattr(setup, name)}: they split data, and shard state")
    if setup.replicas > 1:
        raise cannot(target, f"{setup.replicas} copies of sharded state: hybrid sharding")
    recompute = setup.recompute
    if recompute.kind is RecomputeKind.SELECTIVE or recompute.every != 1:
        raise cannot(target, f"recompute {recompute}: they know none or full")


def write_config(setup: Setup, target: str) -> dict[str, Any]:
    """The config of one tool that means this setup; of options, dotted and flat."""
    if target in DEGREE_TOOLS:
        table = write_degrees(setup, target)
        return table if target in FLAG_TOOLS else nested(table)
    _check_state(setup, target)
    if target == "accelerate":
        return _accelerate(setup)
    if target == "deepspeed":
        return _deepspeed(setup)
    tool = _TRAINERS[target]
    names = [name for name in _FIELDS if not (tool is TRAINER and name == "seq_len")]
    if setup.tuning is not Tuning.FULL:
        names.append("lora_rank")
    if setup.weight_bits:
        names.append("weight_bits")
    table = tool.write(setup, names)
    return nested(table | (_axolotl_state(setup) if tool is AXOLOTL else {}))


def _check_state(setup: Setup, target: str) -> None:
    offload, sharding = setup.offload, setup.sharding
    if offload is Offload.ACTIVATIONS or (offload is not Offload.NONE and not sharding):
        raise cannot(target, f"offload {offload.value} with zero={int(sharding)}")
    if offload is Offload.STATE and sharding is not Sharding.ZERO3:
        raise cannot(target, f"offload {offload.value} with zero={int(sharding)}")
    if setup.keep_gathered and (sharding is not Sharding.ZERO3 or offload is Offload.OPTIMIZER):
        raise cannot(target, "keep=1 without FSDP")


def by_deepspeed(setup: Setup) -> bool:
    """Whether DeepSpeed shards the state, because FSDP has no word for it."""
    is_partial = setup.sharding in (Sharding.ZERO1, Sharding.ZERO2)
    return is_partial or setup.offload is Offload.OPTIMIZER


def _axolotl_state(setup: Setup) -> Table:
    if by_deepspeed(setup):
        return {"deepspeed": "deepspeed.json"}
    if setup.sharding is Sharding.NONE:
        return {}
    return {
        "fsdp_version": 2,
        "fsdp_config.reshard_after_forward": not setup.keep_gathered,
        "fsdp_config.offload_params": setup.offload is Offload.STATE,
        "fsdp_config.auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_config.state_dict_type": "SHARDED_STATE_DICT",
    }


def _accelerate(setup: Setup) -> dict[str, Any]:
    kind = "MULTI_GPU" if setup.num_gpus > 1 else "NO"
    state: Table = {}
    if by_deepspeed(setup):
        kind, is_offloaded = "DEEPSPEED", setup.offload is Offload.OPTIMIZER
        state = {
            "deepspeed_config.zero_stage": int(setup.sharding),
            "deepspeed_config.offload_optimizer_device": "cpu" if is_offloaded else "none",
            "deepspeed_config.offload_param_device": "none",
            "deepspeed_config.zero3_init_flag": setup.sharding is Sharding.ZERO3,
        }
    elif setup.sharding is Sharding.ZERO3:
        kind = "FSDP"
        state = {
            "fsdp_config.fsdp_version": 2,
            "fsdp_config.fsdp_reshard_after_forward": not setup.keep_gathered,
            "fsdp_config.fsdp_offload_params": setup.offload is Offload.STATE,
            "fsdp_config.fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_config.fsdp_cpu_ram_efficient_loading": True,
            "fsdp_config.fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "mixed_precision": _MIXED.get(setup.precision, "no"),
        "num_machines": -(-setup.num_gpus // GPUS_OF_A_NODE),
        "num_processes": setup.num_gpus,
    } | nested(state)


def _deepspeed(setup: Setup) -> dict[str, Any]:
    if setup.keep_gathered:
        raise cannot("deepspeed", "keep=1")
    zero: dict[str, Any] = {"stage": int(setup.sharding)}
    if setup.offload is not Offload.NONE:
        zero["offload_optimizer"] = {"device": "cpu"}
    if setup.offload is Offload.STATE:
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_batch_size": setup.global_batch(),
        "train_micro_batch_size_per_gpu": setup.micro_batch,
        "gradient_accumulation_steps": setup.accumulation,
        "bf16": {"enabled": setup.precision is Precision.BF16_MIXED},
        "fp16": {"enabled": setup.precision is Precision.FP16_MIXED},
        "zero_optimization": zero,
    }


def nested(table: Table) -> dict[str, Any]:
    """Dotted keys as mappings in mappings."""
    found: dict[str, Any] = {}
    for path, value in table.items():
        *outer, last = path.split(".")
        inner = found
        for name in outer:
            inner = inner.setdefault(name, {})
        inner[last] = value
    return found


def launch_words(setup: Setup, target: str, file: str) -> str:
    """How a written config is started, and what else that needs."""
    beside = "accelerate launch --config_file accelerate.yaml"
    commands: dict[str, Callable[[], str]] = {
        "axolotl": lambda: (
            f"accelerate launch --num_processes {setup.num_gpus} -m axolotl.cli.train {file}"
        ),
        "llama-factory": lambda: f"{beside} src/train.py {file}",
        "trl": lambda: f"trl sft --config {file} --accelerate_config accelerate.yaml",
        "trainer": lambda: f"{beside} YOUR_SCRIPT.py {file}",
        "accelerate": lambda: f"accelerate launch --config_file {file} YOUR_SCRIPT.py",
        "deepspeed": lambda: f"deepspeed YOUR_SCRIPT.py --deepspeed {file}",
        "torchtitan": lambda: f"sh {file}, in a clone of torchtitan",
        "megatron": lambda: f"sh {file} DATA_AND_SCHEDULE_FLAGS, in a clone of Megatron-LM",
        "megatron-bridge": lambda: (
            "torchrun scripts/training/run_recipe.py --recipe RECIPE --config_file " + file
        ),
        "nemo": lambda: f"automodel {file} --nproc-per-node {min(setup.num_gpus, GPUS_OF_A_NODE)}",
    }
    told = f"Start it with: {commands[target]()}"
    if target in ("llama-factory", "trl", "trainer"):
        told += "\nIts accelerate.yaml: the same plan with --to accelerate"
    if target == "axolotl" and by_deepspeed(setup):
        told += "\nIts deepspeed.json, beside it: the same plan with --to deepspeed"
    if target == "trainer":
        told += f"\nYour script has to cut sequences at {setup.seq_len} tokens"
    return told
