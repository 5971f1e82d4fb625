"""On which hardware was a published run made? From its columns to a machine."""

from __future__ import annotations

import re

from drystone.describe.catalogue import find_gpu
from drystone.describe.machine import Link, Machine, default_machine, find_link
from drystone.errors import RequestError
from drystone.observe.check.runs import PublishedRun

_GIGABIT_BYTES = 1e9 / 8


def machine_of(run: PublishedRun) -> Machine:
    """The machine of a run; what the table does not say of the network is as usual for the GPU."""
    if not run.gpu_name:
        raise RequestError("the GPU is not stated")
    gpu = find_gpu(run.gpu_name)
    inter = _stated_network(run.interconnect, run.gpus_per_node)
    return default_machine(gpu, gpus_per_node=run.gpus_per_node, inter=inter)


def _stated_network(text: str, gpus_per_node: int) -> Link | None:
    """A rate such as `400 Gb/s RDMA per GPU`, `4x100Gb/node` or `1600 Gbps/node`, per GPU."""
    match = re.search(r"(?:(\d+)\s*x\s*)?(\d+(?:\.\d+)?)\s*Gb(?:ps|/s|it/s)?", text)
    if match is None:
        return None
    gigabits = float(match.group(1) or 1) * float(match.group(2))
    if "per GPU" not in text:
        gigabits = gigabits / gpus_per_node
    # What InfiniBand NDR reaches of its line rate, and its latency, stand for any RDMA network.
    known = find_link("InfiniBand NDR")
    share = known.bandwidth_bytes_per_second / (400 * _GIGABIT_BYTES)
    return Link(
        name=f"{gigabits:g} Gb/s a GPU",
        bandwidth_bytes_per_second=gigabits * _GIGABIT_BYTES * share,
        latency_seconds=known.latency_seconds,
        source=f"stated: {text}; share of the line rate and latency as {known.name}",
    )
