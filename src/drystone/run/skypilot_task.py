"""From plans to one task of SkyPilot, with a GPU type each to choose from. Nothing is sent.

SkyPilot takes whichever of `any_of` is cheapest or free; the task then runs the plan that was made
for it, told by the driver's name of the device. All alternatives have the same number of nodes,
because a task has one. Checkpoints go to a bucket that every node mounts. Written against the task
fields of SkyPilot 0.14.1.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, Final

from drystone.errors import InvalidSpec
from drystone.plan.plan import Plan
from drystone.run.kubernetes import (
    DEFAULT_IMAGE,
    START_SCRIPT,
    ExportSettings,
    PodGroup,
    check_runs,
    name_of,
    pod_groups,
)

# By our name: SkyPilot's, and a shell pattern of what `nvidia-smi` calls such a device.
_DEVICES: Final = MappingProxyType(
    {
        "K80-12GB": ("K80", "*K80"),
        "P100-16GB-PCIe": ("P100", "*P100*"),
        "P100-16GB-SXM": ("P100", "*P100*"),
        "V100-16GB-PCIe": ("V100", "*V100*16GB"),
        "V100-16GB-SXM": ("V100", "*V100*16GB"),
        "V100-32GB-SXM": ("V100-32GB", "*V100*32GB*"),
        "T4-16GB": ("T4", "*T4"),
        "RTX-3090": ("RTX3090", "*RTX 3090"),
        "RTX-4090": ("RTX4090", "*RTX 4090"),
        "RTX-5090": ("RTX5090", "*RTX 5090"),
        "RTX-A6000": ("RTXA6000", "*RTX A6000"),
        "RTX-6000-Ada": ("RTX6000-Ada", "*RTX 6000 Ada*"),
        "A10-24GB": ("A10", "*A10"),
        "A10G-24GB": ("A10G", "*A10G"),
        "A40-48GB": ("A40", "*A40"),
        "L4-24GB": ("L4", "*L4"),
        "L40-48GB": ("L40", "*L40"),
        "L40S-48GB": ("L40S", "*L40S"),
        "A100-40GB-PCIe": ("A100", "*A100*40GB*"),
        "A100-40GB-SXM": ("A100", "*A100*40GB*"),
        "A100-80GB-PCIe": ("A100-80GB", "*A100*80GB*"),
        "A100-80GB-SXM": ("A100-80GB", "*A100*80GB*"),
        "H100-80GB-PCIe": ("H100", "*H100*"),
        "H100-80GB-SXM": ("H100", "*H100*"),
        "H200-141GB-SXM": ("H200", "*H200*"),
        "B200-180GB-SXM": ("B200", "*NVIDIA B200*"),
    }
)
_CHECKPOINTS: Final = "/checkpoints"
_FOLDER: Final = "$HOME/drystone"
_PLAN: Final = "plan.json"
_END: Final = "DRYSTONE_END"  # of a here-document; no plan has such a line


def skypilot_task(plans: Sequence[Plan], settings: ExportSettings) -> dict[str, Any]:
    """The task: any of these plans' GPUs, and on them the plan that was made for them."""
    groups = [_only_group(plan, settings) for plan in plans]
    _check_together(plans, groups)
    accelerators = [f"{_DEVICES[one.gpu][0]}:{one.gpus_per_pod}" for one in groups]
    choices: list[dict[str, Any]] = [{"accelerators": text} for text in accelerators]
    shared = {} if settings.image == DEFAULT_IMAGE else {"image_id": f"docker:{settings.image}"}
    name = name_of(plans[0], settings)
    bucket = {"source": settings.claim} if settings.claim else {"name": f"{name}-checkpoints"}
    return {
        "name": name,
        "num_nodes": len(groups[0].ranks),
        "resources": shared | {"any_of": choices},
        "file_mounts": {_CHECKPOINTS: bucket | {"mode": "MOUNT"}},
        "run": _run_script(plans, groups, settings),
    }


def _only_group(plan: Plan, settings: ExportSettings) -> PodGroup:
    check_runs(plan, settings)
    groups = pod_groups(plan, settings.gpus_per_pod)
    if len(groups) > 1:
        raise InvalidSpec(
            f"a cluster of SkyPilot has one GPU type, and this plan has {len(groups)}: "
            + ", ".join(plan.gpus),
            where="--to skypilot",
            hint="Plan each type by itself, and name the second plan with --also",
        )
    [group] = groups
    if group.gpu not in _DEVICES:
        raise InvalidSpec(
            f"no name of SkyPilot is known for {group.gpu}",
            where="--to skypilot",
            hint="Known: " + ", ".join(_DEVICES),
        )
    return group


def _check_together(plans: Sequence[Plan], groups: Sequence[PodGroup]) -> None:
    numbers = [len(group.ranks) for group in groups]
    if len(set(numbers)) > 1:
        told = ", ".join(
            f"{number} of {group.gpus_per_pod} {group.gpu}"
            for number, group in zip(numbers, groups, strict=True)
        )
        raise InvalidSpec(
            f"a task of SkyPilot has one number of nodes, and these plans differ: {told}",
            where="--also",
            hint="Plan for as many nodes of each type, or write --gpus-per-pod",
        )
    names = [_DEVICES[group.gpu][0] for group in groups]
    for name in names:
        if names.count(name) > 1:
            raise InvalidSpec(f"two plans are for {name}, as SkyPilot calls it", where="--also")
    asked = {(plan.model.name, plan.recipe.seq_len, plan.recipe.global_batch) for plan in plans}
    if len(asked) > 1:
        raise InvalidSpec(
            "the plans are not of one job: their models, sequences or batches differ",
            where="--also",
        )


def _run_script(plans: Sequence[Plan], groups: Sequence[PodGroup], settings: ExportSettings) -> str:
    lines = [
        "set -eu",
        f'mkdir -p "{_FOLDER}"',
        f'cd "{_FOLDER}"',
        'gpu="$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)"',
        'case "$gpu" in',
    ]
    for plan, group in zip(plans, groups, strict=True):
        pattern = _DEVICES[group.gpu][1].replace(" ", "\\ ")
        ranks = ";".join(" ".join(map(str, node)) for node in group.ranks)
        text = json.dumps(plan.to_json(), allow_nan=False)
        lines += [
            f"{pattern})",
            f"cat > {_PLAN} <<'{_END}'",
            text,
            _END,
            f"export DRYSTONE_RANKS='{ranks}' WORLD_SIZE={plan.num_gpus} ;;",
        ]
    lines += [
        '*) echo "No plan was made for $gpu" >&2; exit 2 ;;',
        "esac",
        f"cat > start.sh <<'{_END}'",
        START_SCRIPT.read_text(encoding="utf-8").rstrip(),
        _END,
        'export MASTER_ADDR="$(echo "$SKYPILOT_NODE_IPS" | head -n 1)" MASTER_PORT=29500',
        'export JOB_COMPLETION_INDEX="$SKYPILOT_NODE_RANK" DRYSTONE_FIRST_GROUP=0',
        f"export DRYSTONE_PLAN={_PLAN} DRYSTONE_STEPS={settings.num_steps}",
        f"export DRYSTONE_CHECKPOINTS={_CHECKPOINTS} PYTHONUNBUFFERED=1",
        f"export DRYSTONE_PROGRESS={_CHECKPOINTS}/progress.jsonl",
        f"sh start.sh {shlex.join(_command(settings))}",
    ]
    return "\n".join(lines) + "\n"


def _command(settings: ExportSettings) -> list[str]:
    if settings.command:
        return list(settings.command)
    words = f"python -m drystone.run.train {_PLAN} --steps {settings.num_steps}"
    return [*words.split(), "--data", settings.data, "--checkpoints", _CHECKPOINTS]
