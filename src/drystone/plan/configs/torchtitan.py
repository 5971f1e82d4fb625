"""torchtitan's options, and what its named configs mean before any option is given."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from typing import Any, Final

from drystone.describe.layout import Schedule, Sharding
from drystone.describe.recipe import Loss, Offload, Precision, Recompute, RecomputeKind
from drystone.errors import InvalidSpec
from drystone.plan.configs.keys import Key, Table, Tool, names

_FILE: Final = Path(__file__).with_name("torchtitan.csv")
_SCHEDULES: Final = {
    "1f1b": Schedule.ONE_F_ONE_B,
    "gpipe": Schedule.GPIPE,
    "interleaved1f1b": Schedule.INTERLEAVED,
}
_USUAL_TOKENS: Final = 16384
_USUAL_CONTEXT: Final = 2048


@cache
def named_configs() -> dict[str, dict[str, str]]:
    """The rows of torchtitan.csv by name."""
    with _FILE.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return {row["config"]: row for row in rows}


def config_of(model: str) -> str:
    """The named config that trains a model."""
    for name, row in named_configs().items():
        if row["model"] == model:
            return name
    known = ", ".join(row["model"] for row in named_configs().values())
    raise InvalidSpec(
        f"torchtitan has no config of {model}",
        where="--to torchtitan",
        hint=f"It has those of {known}; other models need a config function of your own",
    )


def _settle(said: dict[str, Any], table: Table) -> None:
    """Tokens as sequences, degrees as sharding, and what the named config says for the rest."""
    row = named_configs().get(str(table.get("config") or table.get("CONFIG") or ""), {})
    if row:
        said.setdefault("model", row["model"])
        for name in ("tp", "ep"):
            said.setdefault(name, int(row[name]))
        said.setdefault("recompute", Recompute.parse(row["recompute"]))
        said.setdefault("loss", Loss.CHUNKED)
    if "seq_len" not in said:
        said["seq_len"] = int(row.get("seq_len", _USUAL_CONTEXT))
    _settle_batch(said, row)
    _settle_state(said, table)
    if said.get("schedule") is Schedule.INTERLEAVED:
        said.pop("schedule")
        if said.get("pp", 1) > 1:
            said.setdefault("virtual_stages", 2)  # torchtitan's own, where layers are not said
    elif "schedule" in said and said.get("pp", 1) == 1:
        said.pop("schedule")
    said["sequence_parallel"] = said.get("sequence_parallel", True) and said.get("tp", 1) > 1
    nodes, per_node = said.pop("_nodes", 1), said.pop("_per_node", 0)
    if per_node:
        said["num_gpus"] = nodes * per_node


def _settle_batch(said: dict[str, Any], row: dict[str, str]) -> None:
    seq_len, pp = said["seq_len"], said.get("pp", 1)
    tokens = said.pop("_micro_tokens", 0)
    if tokens:
        said["micro_batch"] = max(tokens // seq_len, 1)
    elif "micro_batch" not in said:
        usual = int(row["micro_batch"]) if row else _USUAL_TOKENS // seq_len
        said["micro_batch"] = max(usual, 1)
    in_step, per_pass = said.pop("_step_tokens", 0), said.pop("_pipeline_batches", 1)
    if in_step:
        said["step_batch"] = max(in_step // seq_len, 1)
    elif pp > 1:
        said.setdefault("accumulation", per_pass)
    small = said.pop("_pipeline_micro", 0)  # the older way: a local batch in micro-batches
    if pp > 1 and small:
        said["accumulation"] = max(said["micro_batch"] // small, 1)
        said["micro_batch"] = small


def _settle_state(said: dict[str, Any], table: Table) -> None:
    replicas = said.pop("_replicate", 1)
    shard = table.get("parallelism.data_parallel_shard_degree", -1)
    cp, pp = said.get("cp", 1), said.get("pp", 1)
    if shard == 1 and cp == 1:
        said["sharding"] = Sharding.NONE
    else:
        said["sharding"] = Sharding.ZERO3
        if replicas > 1:
            said["replicas"] = replicas
    policy = said.pop("_reshard", "default")
    said["keep_gathered"] = said["sharding"] is Sharding.ZERO3 and (
        policy == "never" or (policy == "default" and pp > 1)
    )
    if isinstance(shard, int) and shard > 0:
        product = shard * replicas * cp * pp * said.get("tp", 1)
        said.setdefault("num_gpus", product)


_RECOMPUTE: Final[dict[Any, Any]] = {
    "full": Recompute(kind=RecomputeKind.FULL),
    "selective": Recompute(kind=RecomputeKind.SELECTIVE),
    "none": Recompute(),
    None: Recompute(),
}
_YES: Final[dict[Any, Any]] = {True: True, False: False}

_TORCHTITAN_INERT: Final = names(
    """
    training.steps training.max_norm training.gc_* training.mixed_precision_reduce
    training.dataset* training.seed training.deterministic checkpoint.* metrics.* profil* debug.*
    comm.* optimizer.* lr_scheduler.* validat* dataloader.* hf_assets_path dump_folder module
    config MODULE CONFIG model.hf_* model.tokenizer_path job.* rdzv* local_ranks_filter role tee
    master_* activation_checkpoint.* compile.components compile.backend node_rank
    parallelism.context_parallel_* parallelism.spmd_backend training.disable_cuda_graphs
    parallelism.pipeline_parallel_*_less_layers tokenizer.* log_rank PROGRAM
    """
)
TORCHTITAN: Final = Tool(
    name="torchtitan",
    keys=(
        Key("training.max_context_length", "seq_len"),
        Key("training.seq_len", "seq_len"),
        Key("training.num_tokens_per_microbatch_per_dp_rank", "_micro_tokens"),
        Key("training.num_tokens_per_train_step", "_step_tokens"),
        Key("training.local_batch_size", "micro_batch"),
        Key("training.batch_size", "micro_batch"),
        Key("training.global_batch_size", "step_batch"),
        Key("parallelism.data_parallel_replicate_degree", "_replicate"),
        Key("parallelism.data_parallel_shard_degree", "_shard", {}),
        Key(
            "parallelism.fsdp_reshard_after_forward",
            "_reshard",
            {"default": "default", "always": "always", "never": "never"},
        ),
        Key("parallelism.tensor_parallel_degree", "tp"),
        Key("parallelism.enable_sequence_parallel", "sequence_parallel", _YES),
        Key("parallelism.pipeline_parallel_degree", "pp"),
        Key("parallelism.pipeline_parallel_schedule", "schedule", _SCHEDULES),
        Key("parallelism.num_pp_microbatches", "_pipeline_batches"),
        Key("parallelism.pipeline_parallel_microbatch_size", "_pipeline_micro"),
        Key("parallelism.context_parallel_degree", "cp"),
        Key("parallelism.expert_parallel_degree", "ep"),
        Key("parallelism.expert_tensor_parallel_degree", "etp"),
        Key("activation_checkpoint", "recompute", _RECOMPUTE),
        Key("activation_checkpoint.mode", "recompute", _RECOMPUTE),
        Key(
            "training.mixed_precision_param",
            "precision",
            {"bfloat16": Precision.BF16_MIXED, "float32": Precision.FP32},
        ),
        Key("training.dtype", "precision", {"bfloat16": Precision.BF16, "float32": None}),
        Key("training.enable_cpu_offload", "offload", {True: Offload.STATE, False: Offload.NONE}),
        Key("compile.enable", "compiled", _YES),
        Key("training.compile", "compiled", _YES),
        Key("nproc_per_node", "_per_node"),
        Key("nnodes", "_nodes"),
        Key("NGPU", "_per_node"),
    ),
    usual={
        "precision": Precision.BF16_MIXED,
        "sharding": Sharding.ZERO3,
        "recompute": _RECOMPUTE["selective"],
        "loss": Loss.CHUNKED,
    },
    marks=("training.*", "parallelism.*", "activation_checkpoint", "CONFIG", "job.config_file"),
    inert=_TORCHTITAN_INERT,
    launcher="torchtitan",
    settle=_settle,
)
