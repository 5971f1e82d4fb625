"""What `sbatch` is given: the resources of one launch, and a script that starts its agents.

Nodes that give the same number of GPUs and share a partition are one plain job, of whatever types
they are: it starts at once. Otherwise the launch is a heterogeneous job, one component a group;
those are started by Slurm's backfill scheduler alone, every 30 s unless the site says otherwise.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from drystone.run.engines.slurm.dialect import SlurmNode

# Of a node's memory a launch gets the share of its GPUs, less what Slurm may keep for the system.
_MEMORY_SHARE: Final = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Nodes that are asked for together."""

    nodes: tuple[str, ...]
    gpu: str  # Slurm's name of the type; "": whatever those nodes have
    gpus_per_node: int
    cpus_per_node: int
    memory_mib: int  # on each node; 0: the site's default
    partition: str  # "": the site's default


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptSettings:
    """What is the same for all launches."""

    python: str
    python_path: str
    pins_nodes: bool = True
    warning_seconds: int = 60  # Slurm's signal comes so long before the time limit
    options: tuple[str, ...] = ()  # more of sbatch's, such as --account=physics


def make_groups(
    gpus: Mapping[str, int],
    nodes: Mapping[str, SlurmNode],
    *,
    allowed: Sequence[str] = (),
    pins_nodes: bool = True,
) -> tuple[Group, ...]:
    """The GPUs of each node, in as few groups as can be asked for; without pins by type."""
    partitions = {name: _partitions(nodes[name], allowed) for name in gpus}
    members: dict[tuple[str, int, str], list[str]] = {}
    for name, count in gpus.items():
        kind = "" if pins_nodes else next(iter(nodes[name].gpus))
        for known, some in members.items():
            common = partitions[some[0]] & partitions[name]
            if known[:2] == (kind, count) and (common or not partitions[name]):
                for member in (*some, name):
                    partitions[member] = common
                some.append(name)
                break
        else:
            members[kind, count, name] = [name]
    groups = []
    for (kind, count, _), some in members.items():
        shares = [count / nodes[name].num_gpus for name in some]
        cpus = min(int(nodes[name].cpus * s) for name, s in zip(some, shares, strict=True))
        memory = min(nodes[name].memory_mib * s for name, s in zip(some, shares, strict=True))
        groups.append(
            Group(
                nodes=tuple(some),
                gpu=kind,
                gpus_per_node=count,
                cpus_per_node=max(1, cpus),
                memory_mib=int(memory * _MEMORY_SHARE),
                partition=_choose(partitions[some[0]], nodes[some[0]], allowed),
            )
        )
    return tuple(groups)


def _partitions(node: SlurmNode, allowed: Sequence[str]) -> frozenset[str]:
    return frozenset(name for name in node.partitions if not allowed or name in allowed)


def _choose(names: frozenset[str], node: SlurmNode, allowed: Sequence[str]) -> str:
    """The first one in the order that we, or the node, name them."""
    return next((name for name in (allowed or node.partitions) if name in names), "")


def write_script(folder: Path, name: str, groups: Sequence[Group], settings: ScriptSettings) -> str:
    """The text of the script of one launch; `folder` is that of the launch, on a shared disk."""
    blocks = [_directives(folder, name, group, settings) for group in groups]
    header = "\n#SBATCH hetjob\n".join("\n".join(block) for block in blocks)
    het = f"--het-group={','.join(map(str, range(len(groups))))} " * (len(groups) > 1)
    return _SCRIPT.format(
        header=header,
        folder=shlex.quote(str(folder)),
        het=het,
        path=shlex.quote(settings.python_path),
        python=shlex.quote(settings.python),
    )


def _directives(folder: Path, name: str, group: Group, settings: ScriptSettings) -> list[str]:
    gpu = f"{group.gpu}:" if group.gpu else ""
    options = [
        f"--job-name={name}",
        f"--output={shlex.quote(str(folder / 'slurm.out'))}",
        "--open-mode=append",
        "--no-requeue",
        f"--signal=B:USR1@{settings.warning_seconds}",
        f"--nodes={len(group.nodes)}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={group.cpus_per_node}",
        f"--gres=gpu:{gpu}{group.gpus_per_node}",
    ]
    if group.memory_mib:
        options.append(f"--mem={group.memory_mib}M")
    if group.partition:
        options.append(f"--partition={group.partition}")
    if settings.pins_nodes:
        options.append(f"--nodelist={','.join(group.nodes)}")
    return [f"#SBATCH {option}" for option in (*options, *settings.options)]


# Bash runs a trap only when the command in the foreground has ended, but at once during `wait`.
# A second copy of a script (its number was lost when the controller was killed) and one that Slurm
# started again by itself both find the folder claimed: restarts belong to the controller.
_SCRIPT: Final = """#!/bin/bash
{header}
folder={folder}
mkdir "$folder/claimed" || {{ echo "this launch was started already"; exit 0; }}
trap 'touch "$folder/leave"' TERM USR1
export PYTHONPATH={path}
srun {het}--ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 --wait=0 --mpi=none \\
    {python} -m drystone.run.engines.slurm.agent "$folder" &
agents=$!
while kill -0 $agents 2>/dev/null; do
    sleep 1 & wait -n $agents $!
    if [ -e "$folder/over" ]; then
        late=$((${{late:-0}} + 1))
        [ $late -le 5 ] || kill -KILL $agents
    fi
done
touch "$folder/ended"
"""
