"""Reading training configs: which tool a file is of, and what several files ask for together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drystone.describe.files.reader import load_yaml
from drystone.describe.layout import Sharding
from drystone.describe.recipe import Offload, Precision, Tuning
from drystone.errors import InvalidSpec, UnreadableFile, reason_of
from drystone.plan.configs.automodel import AUTOMODEL
from drystone.plan.configs.huggingface import (
    ACCELERATE,
    AXOLOTL,
    DEEPSPEED,
    LLAMA_FACTORY,
    TRAINER,
    TRL,
)
from drystone.plan.configs.keys import Reading, Table, Tool, flatten
from drystone.plan.configs.megatron import BRIDGE, MEGATRON, NEMO_MEGATRON
from drystone.plan.configs.setup import Setup
from drystone.plan.configs.shell import options_of, read_script
from drystone.plan.configs.torchtitan import TORCHTITAN

# The first whose marks a file has is its tool; the Trainer's keys are also those of TRL.
TOOLS: tuple[Tool, ...] = (
    DEEPSPEED, ACCELERATE, NEMO_MEGATRON, BRIDGE, AUTOMODEL, AXOLOTL, LLAMA_FACTORY, TRL, TRAINER,
)  # fmt: skip
# Of a launch script; the other tools' keys may stand there as options, too.
_SCRIPT_TOOLS: tuple[Tool, ...] = (BRIDGE, TORCHTITAN, LLAMA_FACTORY, TRL, TRAINER, MEGATRON)
_EVERY_TOOL = {tool.name: tool for tool in (*TOOLS, *_SCRIPT_TOOLS)}
_FILES_BESIDE = (ACCELERATE.name, DEEPSPEED.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What one or several configs ask for together, and what of them is not used."""

    setup: Setup
    tools: tuple[str, ...]
    unused: tuple[str, ...]
    num_inert: int


def read_configs(paths: Sequence[Path], *, num_gpus: int = 0) -> Asked:
    """What config files say; of what two of them say, the launcher's word counts."""
    readings = [reading for path in paths for reading in read_config(path)]
    main = next((reading for reading in readings if reading.tool not in _FILES_BESIDE), None)
    if main is None:
        raise InvalidSpec(
            "says how to launch, but not what to train",
            where=", ".join(map(str, paths)),
            hint="Give the training config as well: --config train.yaml --config accelerate.yaml",
        )
    tool = _EVERY_TOOL[main.tool]
    said: dict[str, Any] = dict(tool.usual)
    for reading in sorted(readings, key=lambda reading: reading.tool in _FILES_BESIDE):
        said |= reading.said
    loaded = said.pop("_loaded", None)
    setup = Setup(**said)
    if loaded and (setup.precision, setup.sharding) == (Precision.BF16_MIXED, Sharding.NONE):
        # Weights that are loaded in 16 bit stay so, and with them the optimizer's state; where
        # they are sharded, Accelerate and DeepSpeed make fp32 copies.
        setup = replace(setup, precision=loaded if setup.tuning is Tuning.FULL else setup.precision)
    if num_gpus:
        setup = replace(setup, num_gpus=num_gpus)
    if setup.weight_bits and setup.tuning is Tuning.LORA:
        setup = replace(setup, tuning=Tuning.QLORA)
    if setup.tuning is Tuning.FULL:
        setup = replace(setup, lora_rank=Setup().lora_rank)
    launcher = tool.launcher or _launcher(setup, readings)
    return Asked(
        setup=replace(setup, launcher=launcher).settled(),
        tools=tuple(reading.tool for reading in readings),
        unused=tuple(name for reading in readings for name in reading.unused),
        num_inert=sum(reading.num_inert for reading in readings),
    )


def _launcher(setup: Setup, readings: Sequence[Reading]) -> str:
    """Whose conventions on memory apply."""
    by_deepspeed = setup.sharding in (Sharding.ZERO1, Sharding.ZERO2)
    if by_deepspeed or any(reading.tool == DEEPSPEED.name for reading in readings):
        return "deepspeed"
    return "accelerate" if setup.sharding is Sharding.ZERO3 else "hf-trainer"


def read_config(path: Path) -> list[Reading]:
    """What one file says, and the DeepSpeed config that it names."""
    table, tool = load_table(path)
    beside = []
    named = table.pop("deepspeed", None)
    if isinstance(named, str) and named:
        beside.append(_read_deepspeed(path, named))
    reading = tool.read(_with_fsdp(table), str(path))
    says_fsdp = any(name.startswith("fsdp_config.") for name in table)
    if says_fsdp and "sharding" not in reading.said and not beside:
        reading = replace(reading, said={**reading.said, "sharding": Sharding.ZERO3})
    return [reading, *beside]


def load_table(path: Path) -> tuple[Table, Tool]:
    """The keys of a file, and its tool."""
    table, tools = _load_keys(path)
    for tool in tools:
        if tool.knows(table):
            return table, tool
    raise UnreadableFile(
        "is of no tool that is known: none of its keys tells which",
        where=str(path),
        hint="Read are configs of " + ", ".join(sorted(_EVERY_TOOL)),
    )


def _load_keys(path: Path) -> tuple[Table, tuple[Tool, ...]]:
    """The keys of YAML or JSON, or the options that a script starts its trainer with."""
    if path.suffix in (".sh", ".bash", ".slurm", ".sbatch", ".txt", ""):
        try:
            script = read_script(path.read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise UnreadableFile(f"cannot be read: {reason_of(error)}", where=str(path)) from None
        return options_of(script.words, script.variables), _SCRIPT_TOOLS
    value = load_yaml(path).value
    if not isinstance(value, dict):
        raise UnreadableFile("is not a config: it has no keys", where=str(path))
    return flatten(value), TOOLS


def _with_fsdp(table: Table) -> Table:
    """`fsdp: [full_shard, auto_wrap]` as one text, which other configs write at once."""
    words = table.get("fsdp")
    if not isinstance(words, list | str) or not words:
        return {name: value for name, value in table.items() if name != "fsdp"}
    text = " ".join(map(str, words)) if isinstance(words, list) else words
    found = {**table, "fsdp": text}
    if "shard" in text and "fsdp_version" not in table:
        found["fsdp_config.fsdp_version"] = 1
        found["fsdp_config.sharding_strategy"] = "shard_grad_op" if "grad" in text else "full_shard"
    if "offload" in text:
        found["fsdp_config.offload_params"] = True
    del found["fsdp"]
    return found


def _read_deepspeed(path: Path, named: str) -> Reading:
    """A DeepSpeed config: from its file, or from a name such as zero3_bf16_cpuoffload_all.json."""
    for folder in (path.parent, Path()):
        if (folder / named).is_file():
            return DEEPSPEED.read(load_table(folder / named)[0], named)
    match = re.search(r"(?:zero|z|stage)_?([0-3])", Path(named).stem.lower())
    if match is None:
        raise UnreadableFile(
            f"names {named}, which is not there, and the name does not tell the ZeRO stage",
            where=f"{path}: deepspeed",
        )
    said: dict[str, Any] = {"sharding": Sharding(int(match[1]))}
    if "offload" in named:
        is_all = "all" in named or "param" in named
        said["offload"] = Offload.STATE if is_all else Offload.OPTIMIZER
    return Reading(tool=DEEPSPEED.name, said=said)
