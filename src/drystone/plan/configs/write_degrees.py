"""Writing a plan for trainers that split models too: torchtitan, Megatron, NeMo AutoModel."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from drystone.describe.layout import Layouts, Schedule, Sharding
from drystone.describe.recipe import Loss, Offload, Precision, Recompute, RecomputeKind, Tuning
from drystone.errors import InvalidSpec
from drystone.plan.configs.automodel import AUTOMODEL
from drystone.plan.configs.keys import Table, Tool
from drystone.plan.configs.megatron import BRIDGE, MEGATRON
from drystone.plan.configs.megatron_shape import model_flags
from drystone.plan.configs.setup import Setup
from drystone.plan.configs.torchtitan import TORCHTITAN, config_of, named_configs

GPUS_OF_A_NODE: Final = 8
FLAG_TOOLS: Final = (TORCHTITAN.name, MEGATRON.name)
DEGREE_TOOLS: Final = {tool.name: tool for tool in (TORCHTITAN, MEGATRON, BRIDGE, AUTOMODEL)}
_DEGREES: Final = ("tp", "pp", "cp", "ep", "micro_batch", "seq_len")
_SHARDED: Final = {
    Sharding.ZERO2: "optim_grads",
    Sharding.ZERO3: "optim_grads_params",
}


def cannot(tool: str, what: str) -> InvalidSpec:
    """That a tool has no words for a plan, and how to find the nearest that it has words for."""
    return InvalidSpec(
        f"configs of {tool} cannot express {what}",
        where="the plan",
        hint=f"`drystone plan MODEL --gpus ... --tool {tool} --save plan.json` finds the fastest "
        "plan that they can",
    )


def write_degrees(setup: Setup, target: str) -> Table:
    """The keys, dotted, of one of these tools that mean this setup."""
    check_degrees(setup, target)
    if target == TORCHTITAN.name:
        return _torchtitan(setup)
    if target == AUTOMODEL.name:
        return _automodel(setup)
    return _megatron(setup, DEGREE_TOOLS[target])


def check_degrees(setup: Setup, target: str) -> None:
    """Refuse what a tool has no words for."""
    checks = {
        TORCHTITAN.name: _torchtitan_gaps,
        AUTOMODEL.name: _automodel_gaps,
        MEGATRON.name: _megatron_gaps,
        BRIDGE.name: _megatron_gaps,
    }
    for what, is_so in checks[target](setup).items():
        if is_so:
            raise cannot(target, what)


def _torchtitan_gaps(setup: Setup) -> Mapping[str, bool]:
    is_split = setup.tp * setup.pp * setup.cp * setup.ep > 1
    recompute, sharding = setup.recompute, setup.sharding
    return {
        f"zero={int(sharding)}: it shards all state or none": sharding
        in (Sharding.ZERO1, Sharding.ZERO2),
        "zero=0 beside tensor, pipeline, context or expert parallelism": is_split
        and sharding is Sharding.NONE,
        f"precision {setup.precision.value}: a converter in a config function does": setup.precision
        not in (Precision.BF16_MIXED, Precision.BF16, Precision.FP32),
        f"optimizer {setup.optimizer.value}": setup.optimizer.value != "adam",
        f"recompute {recompute}": recompute.every != 1 or bool(recompute.modules),
        f"offload {setup.offload.value}": setup.offload not in (Offload.NONE, Offload.STATE),
        f"{setup.tuning.value} training": setup.tuning is not Tuning.FULL,
        f"a {setup.loss.value} loss: its named configs cut it into chunks": setup.loss
        is not Loss.CHUNKED,
        "more than two virtual stages": setup.virtual_stages > 2,
        f"etp={setup.etp}": setup.etp > 1,
        "attention that keeps its scores": setup.attention.value == "eager",
    }


def _automodel_gaps(setup: Setup) -> Mapping[str, bool]:
    kind = setup.recompute
    return {
        f"zero={int(setup.sharding)}": setup.sharding in (Sharding.ZERO1, Sharding.ZERO2),
        "zero=0 beside tensor, pipeline or context parallelism": setup.sharding is Sharding.NONE
        and setup.tp * setup.pp * setup.cp * setup.ep > 1,
        f"recompute {kind}": kind.kind is RecomputeKind.SELECTIVE or kind.every != 1,
        f"offload {setup.offload.value}": setup.offload is not Offload.NONE,
        "keep=1": setup.keep_gathered,
        "more than two virtual stages": setup.virtual_stages > 2,
        f"etp={setup.etp}": setup.etp > 1,
    }


def _megatron_gaps(setup: Setup) -> Mapping[str, bool]:
    recompute, sharding = setup.recompute, setup.sharding
    return {
        "keep=1": setup.keep_gathered,
        "the schedule gpipe": setup.schedule is Schedule.GPIPE,
        f"zero={int(sharding)} beside pipeline stages": sharding > Sharding.ZERO1 and setup.pp > 1,
        "hybrid sharding with zero other than 1": setup.replicas > 1
        and sharding is not Sharding.ZERO1,
        f"recompute {recompute}: it counts layers of a stage": recompute.every != 1,
        f"offload {setup.offload.value}": setup.offload not in (Offload.NONE, Offload.OPTIMIZER),
        f"a {setup.loss.value} loss": setup.loss is Loss.CHUNKED,
        "torch.compile": setup.compiled,
    }


def can_say(target: str, splits: Layouts) -> npt.NDArray[np.bool_]:
    """Of many layouts, those that a tool can express; as `check_degrees` says of one."""
    zero, ranks = splits.sharding, splits.dp * splits.cp
    is_whole = splits.tp * splits.pp * splits.cp * splits.ep == 1
    plain = (splits.vocab_barriers == 0) & (splits.etp == np.where(splits.ep == 1, splits.tp, 1))
    if target in (MEGATRON.name, BRIDGE.name):
        keeps = (splits.keep_gathered == 0) & (splits.gpipe == 0)
        is_copied = (splits.shard_size < ranks) & (zero != 1)
        return np.asarray(plain & keeps & ~is_copied & ((zero <= 1) | (splits.pp == 1)))
    is_state_whole = (zero == 0) & is_whole
    found = plain & ((zero == 3) | is_state_whole) & (splits.virtual_stages <= 2)
    if target == AUTOMODEL.name:
        found = found & (splits.keep_gathered == 0)
    return np.asarray(found)


def _torchtitan(setup: Setup) -> Table:
    config = config_of(setup.model)
    dp, is_sharded = setup.dp(), setup.sharding is Sharding.ZERO3
    replicas = (setup.replicas or 1) if is_sharded else dp
    table: Table = {
        "module": named_configs()[config]["module"],
        "config": config,
        "training.seq_len": setup.seq_len,
        "training.local_batch_size": setup.micro_batch
        * (setup.accumulation if setup.pp > 1 else 1),
        "training.global_batch_size": setup.global_batch(),
        "parallelism.data_parallel_replicate_degree": replicas,
        "parallelism.data_parallel_shard_degree": dp // replicas,
        "parallelism.tensor_parallel_degree": setup.tp,
        "parallelism.pipeline_parallel_degree": setup.pp,
        "parallelism.context_parallel_degree": setup.cp,
        "parallelism.expert_parallel_degree": setup.ep,
        "parallelism.enable_sequence_parallel": setup.sequence_parallel or setup.tp == 1,
    }
    if is_sharded:
        policy = "never" if setup.keep_gathered else "always"
        table["parallelism.fsdp_reshard_after_forward"] = policy
    if setup.pp > 1:
        names = {Schedule.GPIPE: "GPipe", Schedule.ONE_F_ONE_B: "1F1B"}
        is_looped = setup.virtual_stages > 1
        table["parallelism.pipeline_parallel_schedule"] = (
            "Interleaved1F1B" if is_looped else names[setup.schedule]
        )
        table["parallelism.pipeline_parallel_microbatch_size"] = setup.micro_batch
    is_bf16 = setup.precision is Precision.BF16
    table["training.dtype"] = "bfloat16" if is_bf16 else "float32"
    is_fp32 = setup.precision is Precision.FP32
    table["training.mixed_precision_param"] = "float32" if is_fp32 else "bfloat16"
    table["training.enable_cpu_offload"] = setup.offload is Offload.STATE
    table["compile.enable"] = setup.compiled
    table["activation_checkpoint"] = setup.recompute.kind.value
    return table


def _written(setup: Setup, tool: Tool, *names: str) -> Table:
    return tool.write(setup, [*_DEGREES, *names])


def _megatron(setup: Setup, tool: Tool) -> Table:
    is_bridge = tool is BRIDGE
    names = ["optimizer", "attention", *(["loss"] if setup.loss is not Loss.PLAIN else [])]
    table = _written(setup, tool, *names)
    if setup.expert_dispatch.value != "auto":
        table |= tool.write(setup, ["expert_dispatch"])

    def key(section: str, name: str) -> str:
        return f"{section}.{name}" if is_bridge else name

    table[key("train", "global_batch_size")] = setup.global_batch()
    if setup.etp:
        table[key("model", "expert_tensor_parallel_size")] = setup.etp
    if setup.sequence_parallel:
        table[key("model", "sequence_parallel")] = True
    if setup.virtual_stages > 1:
        name = "virtual_pipeline_model_parallel_size"
        name = name if is_bridge else "num_virtual_stages_per_pipeline_rank"
        table[key("model", name)] = setup.virtual_stages
    table |= {key("model", name): value for name, value in _recompute(setup.recompute).items()}
    table |= {key(*path): value for path, value in _megatron_state(setup).items()}
    if setup.offload is Offload.OPTIMIZER:
        table[key("optimizer", "optimizer_cpu_offload")] = True
    table |= _bridge_precision(setup) if is_bridge else _flag_precision(setup.precision)
    if not is_bridge:
        if setup.tuning is not Tuning.FULL:
            raise cannot(tool.name, f"{setup.tuning.value} training")
        if setup.shape is not None:
            table = model_flags(setup.shape) | table
    return table


def _recompute(recompute: Recompute) -> Table:
    if recompute.kind is RecomputeKind.FULL:
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    if recompute.kind is RecomputeKind.SELECTIVE:
        modules = list(recompute.modules)
        named = {"recompute_modules": modules} if modules else {}
        return {"recompute_granularity": "selective"} | named
    return {}


def _megatron_state(setup: Setup) -> dict[tuple[str, str], Any]:
    found: dict[tuple[str, str], Any] = {}
    if setup.sharding > Sharding.ZERO1:
        found["dist", "use_megatron_fsdp"] = True
        found["ddp", "data_parallel_sharding_strategy"] = _SHARDED[setup.sharding]
    if setup.sharding is not Sharding.NONE:
        found["ddp", "use_distributed_optimizer"] = True
    else:  # a recipe of Megatron-Bridge shards the optimizer unless told not to
        found["ddp", "data_parallel_sharding_strategy"] = "no_shard"
    if setup.replicas > 1:
        found["ddp", "num_distributed_optimizer_instances"] = setup.replicas
    return found


def _flag_precision(precision: Precision) -> Table:
    if precision is Precision.FP32:
        return {}
    if precision is Precision.FP16_MIXED:
        return {"fp16": True}
    low: dict[Precision, Table] = {
        Precision.BF16_MIXED: {},
        Precision.FP8_MIXED: {"fp8_format": "hybrid"},
        Precision.MXFP8_MIXED: {"fp8_format": "e4m3", "fp8_recipe": "mxfp8"},
        Precision.NVFP4_MIXED: {"fp4_format": "e2m1"},
    }
    if precision not in low:
        raise cannot(MEGATRON.name, f"precision {precision.value}")
    return {"bf16": True} | low[precision]


def _bridge_precision(setup: Setup) -> Table:
    table = BRIDGE.write(setup, ["precision", "tuning"])
    if setup.tuning is not Tuning.FULL:
        table |= BRIDGE.write(setup, ["lora_rank"])
    return table


def _automodel(setup: Setup) -> Table:
    names = ["model", "sharding", "precision", "attention", "optimizer", "loss", "compiled"]
    table = _written(setup, AUTOMODEL, *names, "recompute", "sequence_parallel")
    table |= {
        "step_scheduler.global_batch_size": setup.global_batch(),
        "distributed.dp_size": setup.dp(),
    }
    if setup.replicas > 1:
        table["distributed.dp_replicate_size"] = setup.replicas
    if setup.pp > 1:
        schedule = {Schedule.GPIPE: "gpipe"}.get(setup.schedule, "1f1b")
        table["distributed.pipeline.pp_schedule"] = (
            "interleaved1f1b" if setup.virtual_stages > 1 else schedule
        )
        table["distributed.pipeline.pp_microbatch_size"] = setup.micro_batch
        table["step_scheduler.local_batch_size"] = setup.micro_batch * setup.accumulation
    if setup.tuning is not Tuning.FULL:
        table["peft.dim"] = setup.lora_rank
    if setup.tuning is Tuning.QLORA:
        table |= AUTOMODEL.qlora
    for name in ("distributed.strategy", "optimizer._target_", "loss_fn._target_"):
        table[name] = _spelt(table[name])
    return {"recipe": "TrainFinetuneRecipeForNextTokenPrediction"} | table


# Classes in their own spelling: keys compare them without it.
_CLASSES: Final = (
    "AdamW",
    "SGD",
    "MaskedCrossEntropy",
    "FusedLinearCrossEntropy",
    "TEParallelCrossEntropy",
    "AdamW8bit",
)


def _spelt(path: str) -> str:
    before, _, last = path.rpartition(".")
    right = next((name for name in _CLASSES if name.lower() == last), last)
    return f"{before}.{right}" if before else right


def flag_words(table: Mapping[str, Any], tool: str) -> list[str]:
    """A table as options of a command line, each as one text."""
    found, last = [], []
    for name, value in table.items():
        if tool == TORCHTITAN.name and name == "activation_checkpoint":
            last = [f"activation_checkpoint:{value}"]  # a sub-command of tyro's, after the rest
            continue
        word = name if tool == TORCHTITAN.name else name.replace("_", "-")
        if value is True:
            found.append(f"--{word}")
        elif value is False and tool == TORCHTITAN.name:
            group, _, own = word.rpartition(".")
            found.append(f"--{group}.no-{own.replace('_', '-')}")
        elif value is not False:
            values = value if isinstance(value, list) else [value]
            found.append(f"--{word} " + " ".join(shlex.quote(str(part)) for part in values))
    return found + last


def flag_script(setup: Setup, table: Mapping[str, Any], tool: str) -> str:
    """A script that starts the tool with these options."""
    per_node = min(setup.num_gpus, GPUS_OF_A_NODE)
    nodes = -(-setup.num_gpus // GPUS_OF_A_NODE)
    start = f"torchrun --nproc_per_node {per_node} --nnodes {nodes}"
    program = "-m torchtitan.train" if tool == TORCHTITAN.name else "pretrain_gpt.py"
    lines = [f"{start} {program}", *(f"  {word}" for word in flag_words(table, tool))]
    rest = "  " + '"$@"' if tool == MEGATRON.name else ""
    body = " \\\n".join([*lines, *([rest] if rest else [])])
    return f"#!/bin/sh\n# Written by Drystone: the plan, in the words of {tool}.\n{body}\n"
