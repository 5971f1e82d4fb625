"""Which nodes of a Slurm cluster are there for us, and which GPU types are they?

Slurm's name of a type (`gpu:a100:4`, `gpu:nvidia_h100_80gb_hbm3:8`) is looked up in the catalogue
of GPUs; where it has none (`gpu:4`) the features of the node are tried. What Slurm cannot know is
in a cluster file: a row whose `name` is that of a node says its type, and rows by type say how it
is emulated and what it costs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

from drystone.describe.catalogue import find_gpu
from drystone.describe.files.cluster import ClusterSpec, parse_cluster
from drystone.describe.node import NodeSpec
from drystone.errors import InvalidSpec, UnknownName
from drystone.run.engines.slurm.dialect import SlurmNode

_log = logging.getLogger("drystone.slurm")


def usable_nodes(nodes: Iterable[SlurmNode], partitions: Sequence[str] = ()) -> list[SlurmNode]:
    """Those with GPUs in the partitions that we use; none named: in any."""
    return [
        node
        for node in nodes
        if node.num_gpus and (not partitions or set(partitions) & set(node.partitions))
    ]


def make_cluster(nodes: Sequence[SlurmNode], file: ClusterSpec | None = None) -> ClusterSpec:
    """The nodes as Drystone describes them, by name."""
    named = {one.id: one.gpu for one in file.nodes} if file is not None else {}
    specs = []
    for node in sorted(nodes, key=lambda one: one.name):
        gpu = named.get(node.name) or _gpu_of(node)
        if gpu is None:
            _log.warning(
                "node %s is left out: no catalogue type is called %s, nor any of its features; "
                "name it in a cluster file", node.name, " or ".join(node.gpus) or "''",
            )  # fmt: skip
            continue
        specs.append(NodeSpec(id=node.name, gpu=gpu, num_gpus=node.num_gpus))
    if not specs:
        raise InvalidSpec(
            "Slurm shows no node with GPUs of a known type",
            hint="`sinfo -N -o '%N %G %P'` shows what it has; --partition chooses among them",
        )
    return _described(specs, file)


def _described(specs: Sequence[NodeSpec], file: ClusterSpec | None) -> ClusterSpec:
    """With prices and emulations, and with the memory that follows from them."""
    types = dict.fromkeys(spec.gpu for spec in specs)
    plain = parse_cluster(f"nodes: [{', '.join(f'{{gpu: {gpu}}}' for gpu in types)}]")
    emulations = {} if file is None else {g: e for g, e in file.emulations.items() if g in types}
    prices = dict(plain.dollars_per_gpu_hour)
    if file is not None:
        prices |= {g: d for g, d in file.dollars_per_gpu_hour.items() if g in types}
    made = ClusterSpec(nodes=tuple(specs), emulations=emulations, dollars_per_gpu_hour=prices)
    sized = tuple(
        replace(spec, memory_bytes=float(made.gpu(spec.gpu).usable_bytes)) for spec in specs
    )
    return replace(made, nodes=sized)


def _gpu_of(node: SlurmNode) -> str | None:
    kinds = [kind for kind in node.gpus if kind]
    if len(node.gpus) > 1:
        _log.warning("node %s has several types of GPUs; all count as the first", node.name)
    for name in (*kinds, *node.features):
        try:
            return find_gpu(name.replace("_", " ")).name
        except UnknownName:
            continue
    return None
