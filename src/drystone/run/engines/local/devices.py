"""Which devices does this machine have? Asked of the driver's own tool, so torch is not needed."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from drystone.describe.catalogue import find_gpu
from drystone.describe.files.cluster import ClusterSpec, load_cluster_file, parse_cluster
from drystone.errors import InvalidSpec, RequestError

# What `serve` offers where there is no GPU and no cluster file: enough to try everything.
EXAMPLE_CLUSTER = """
nodes:
  - {gpu: A100, gpus_per_node: 2, emulate: {speed: 0.0003, memory: 4GiB}}
  - {gpu: T4, gpus_per_node: 2, emulate: {speed: 0.0003, memory: 4GiB}}
"""


def find_cluster(path: Path | None) -> ClusterSpec:
    """The cluster of a file; without one the GPUs of this machine, or emulated ones."""
    names = local_gpus()
    if path is not None:
        return _numbered(load_cluster_file(path), names)
    if not names:
        return parse_cluster(EXAMPLE_CLUSTER)
    rows = []
    for name, count in Counter(_type_of(one) for one in names).items():
        if not name:
            unknown = next(one for one in names if not _type_of(one))
            raise InvalidSpec(
                f"this machine has a {unknown}, which the catalogue does not know",
                hint="Name it as a near type in a cluster file: drystone serve --cluster FILE",
            )
        rows.append(f"{{gpu: {name}, gpus_per_node: {count}}}")
    return _numbered(parse_cluster(f"nodes: [{', '.join(rows)}]"), names)


def _numbered(cluster: ClusterSpec, names: Sequence[str]) -> ClusterSpec:
    """Which of the machine's GPUs each node has: those of its type first, then what is left.

    `names` are the driver's, in its order; a file may call a GPU by a near type's name.
    """
    real = [node for node in cluster.nodes if node.gpu not in cluster.emulations]
    wanted = sum(node.num_gpus for node in real)
    if not names or not wanted:
        return cluster
    if wanted > len(names):
        raise InvalidSpec(
            f"the cluster file names {wanted} GPUs, this machine has {len(names)}",
            hint="Leave nodes out, or emulate them: docs/serving.md",
        )
    types = [_type_of(name) for name in names]
    left = list(range(len(names)))
    numbers: dict[str, tuple[int, ...]] = {}
    for is_exact in (True, False):
        for node in real:
            mine = numbers.get(node.id, ())
            missing = node.num_gpus - len(mine)
            more = [one for one in left if types[one] == node.gpu or not is_exact][:missing]
            left = [one for one in left if one not in more]
            numbers[node.id] = (*mine, *more)
    return replace(cluster, device_numbers=numbers)


def _type_of(name: str) -> str:
    """The catalogue's name of a GPU; empty where it has none."""
    try:
        return find_gpu(name).name
    except RequestError:
        return ""


def local_gpus() -> list[str]:
    """The names of the GPUs of this machine, as the driver calls them, by its numbers."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        told = subprocess.run(
            [tool, "--query-gpu=index,name", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = {}
    for line in told.stdout.splitlines():
        index, _, name = line.partition(",")
        if index.strip().isdigit() and name.strip():
            found[int(index)] = name.strip()
    return [found[index] for index in sorted(found)]
