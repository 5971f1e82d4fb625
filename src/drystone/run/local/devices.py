"""Which devices does this machine have? Asked of the driver's own tool, so torch is not needed."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from pathlib import Path

from drystone.describe.catalogue import find_gpu
from drystone.describe.cluster_file import ClusterSpec, load_cluster_file, parse_cluster
from drystone.errors import InvalidSpec, RequestError

# What `serve` offers where there is no GPU and no cluster file: enough to try everything.
EXAMPLE_CLUSTER = """
nodes:
  - {gpu: A100, gpus_per_node: 2, emulate: {speed: 0.0003, memory: 4GiB}}
  - {gpu: T4, gpus_per_node: 2, emulate: {speed: 0.0003, memory: 4GiB}}
"""


def find_cluster(path: Path | None) -> ClusterSpec:
    """The cluster of a file; without one the GPUs of this machine, or emulated ones."""
    if path is not None:
        return load_cluster_file(path)
    names = local_gpus()
    if not names:
        return parse_cluster(EXAMPLE_CLUSTER)
    rows = []
    for name, count in Counter(names).items():
        try:
            gpu = find_gpu(name).name
        except RequestError as error:
            raise InvalidSpec(
                f"this machine has a {name}, which the catalogue does not know",
                hint="Name it as a near type in a cluster file: drystone serve --cluster FILE",
            ) from error
        rows.append(f"{{gpu: {gpu}, gpus_per_node: {count}}}")
    return parse_cluster(f"nodes: [{', '.join(rows)}]")


def local_gpus() -> list[str]:
    """The names of the GPUs of this machine, as the driver calls them."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        told = subprocess.run(
            [tool, "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in told.stdout.splitlines() if line.strip()]
