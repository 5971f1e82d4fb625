"""The pace of emulated devices: what a section of work costs on each GPU type of a launch."""

from __future__ import annotations

import json
from typing import Final

from drystone.describe.files.cluster import ClusterSpec
from drystone.describe.layout import Sharding
from drystone.describe.machine import Machine
from drystone.describe.model import ModuleSpec
from drystone.estimate.layer import layer_seconds
from drystone.estimate.memory.layer_major import layer_major_recipe
from drystone.estimate.module.estimate import best_flops
from drystone.plan.plan import Plan, Way
from drystone.plan.uneven.modules import section_flops

_MAX_TABLE_ROWS: Final = 64  # of a device that a table paces; from there on in proportion


def emulation(plan: Plan | None, cluster: ClusterSpec) -> dict[str, str]:
    """Each type at the pace that the estimates give a device of its rates, and with its memory."""
    variables = {"OMP_NUM_THREADS": "1"}
    if plan is None:
        return variables
    seconds = {gpu: section_seconds(plan, cluster.true_machine(gpu), gpu) for gpu in plan.gpus}
    fastest = min(seconds, key=lambda gpu: sum(seconds[gpu].values()))
    total = sum(seconds[fastest].values())
    devices = {
        gpu: {
            "speed": total / sum(seconds[gpu].values()),
            "memory_bytes": cluster.emulations[gpu].memory_bytes,
            "seconds": _section_table(plan, cluster, gpu),
        }
        for gpu in plan.gpus
        if gpu in cluster.emulations
    }
    told = {"gpus": devices, "seconds": seconds[fastest]}
    return variables | {"DRYSTONE_EMULATE": json.dumps(told)}


def _section_table(plan: Plan, cluster: ClusterSpec, gpu: str) -> dict[str, list[float]]:
    """Seconds of sections with 1, 2, 3 ... samples, where a table paces devices of this type."""
    if cluster.emulations[gpu].pace is None or isinstance(plan.model, ModuleSpec):
        return {}
    machine = cluster.true_machine(gpu)
    largest = max(share.batch for stage in plan.stages for share in stage.ranks)
    rows = [
        section_seconds(plan, machine, gpu, micro_batch=size)
        for size in range(1, min(2 * largest, _MAX_TABLE_ROWS) + 1)
    ]
    return {kind: [size * row[kind] for size, row in enumerate(rows, start=1)] for kind in rows[0]}


def section_seconds(
    plan: Plan, machine: Machine, gpu: str, micro_batch: int = 0
) -> dict[str, float]:
    """What one sample costs on a device of this type: forward and backward of a block, the head.

    In micro-batches of that size, or else of the largest that the plan has there.
    """
    mine = [
        (share.micro_batch, stage.tp)
        for stage in plan.stages
        for share in stage.ranks
        if share.gpu == gpu
    ]
    micro = micro_batch or max((size for size, _ in mine), default=1)
    if isinstance(plan.model, ModuleSpec):
        rate = best_flops(machine.gpu, plan.recipe)
        return {kind: flops / rate for kind, flops in section_flops(plan.model).items()}
    is_layer_major = plan.way is Way.UNEVEN and plan.sharding is Sharding.ZERO3
    found = layer_seconds(
        plan.model,
        layer_major_recipe(plan.recipe) if is_layer_major else plan.recipe,
        machine,
        tp=max((tp for _, tp in mine), default=1),
        micro_batch=max(1, micro),
    )
    both = found.backward + found.recompute
    costs = {"forward": found.forward, "backward": both, "head": found.head}
    return {kind: float(seconds.item()) / max(1, micro) for kind, seconds in costs.items()}
