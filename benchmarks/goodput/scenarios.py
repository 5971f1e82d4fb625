"""The clusters and workloads on which Sia and Pollux were measured, as scenarios for any policy.

The data are read from a folder with `peers/throughput.csv`, `peers/sia_statistical_efficiency.csv`
and `traces/trace_sia.csv` or `trace_pollux.csv`; nothing of Sia's is shipped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Final

from drystone.describe.cluster import NodeSpec, make_nodes
from drystone.describe.job import JobSpec
from drystone.describe.market import Offer
from drystone.observe.simulation import Scenario, reachable_nodes
from drystone.run.simulate.faults import FaultSpec
from goodput.model import (
    GoodputModel,
    GradientNoise,
    StepTimes,
    build_noise,
    build_steps,
)
from goodput.options import goodput_options, rigid_unit_samples
from goodput.tables import load_noise, load_placed_steps, load_workload

# Seconds of checkpoint and restore by model, measured on a cluster, and how much slower jobs ran
# there than in single measurements: github:siasosp23/artifacts, applications.py (rescale_time) and
# simulator_config.py (SLOWDOWNS) at 37c68be.
SIA_STARTUP_SECONDS: Final[Mapping[str, float]] = MappingProxyType(
    {"cifar10": 50, "deepspeech2": 25, "bert": 120, "yolov3": 80, "imagenet": 250, "ncf": 15}
)
SIA_SLOWDOWN: Final[Mapping[str, float]] = MappingProxyType(
    {
        "cifar10": 1.8, "imagenet": 1.2, "yolov3": 1.2, "bert": 1.2, "deepspeech2": 1.2, "ncf": 1.5,
    }
)  # fmt: skip
SIA_ORIGINS: Final[Mapping[str, str]] = MappingProxyType(
    {"-aws.csv": "T4", "-dgx-ext.csv": "A100-40GB", "-rtx.csv": "RTX2080Ti"}
)
# Pollux's simulator: every start costs 30 s, yolov3 takes 8 samples a GPU, and ncf runs on one GPU
# at its owner's batch: github:petuum/adaptdl, branch osdi21-artifact, simulator.py, applications.py
POLLUX_STARTUP_SECONDS: Final = 30.0
POLLUX_ORIGINS: Final[Mapping[str, str]] = MappingProxyType(
    {"placements.csv": "T4", "scalability.csv": "T4"}
)
POLLUX_MOST_LOCAL: Final[Mapping[str, float]] = MappingProxyType({"yolov3": 8.0})
NCF_BATCH: Final = 32768.0
ROUND_SECONDS: Final = 60.0
# BOA's experiments: the models of workload 1 that are short enough, nodes of 4 T4, at most 16 GPUs
# a job: github:Li-Zhouzi/adaptdl, benchmark/workloads/workload-1-cbd.csv and the cap of replicas.
BOA_MODELS: Final = ("cifar10", "deepspeech2", "bert")
BOA_MOST_GPUS: Final = 16
# Seconds of a restart that BOA's authors measured on AWS: boa.md, 2.4, table.
AWS_STARTUP_SECONDS: Final[Mapping[str, float]] = MappingProxyType(
    {"cifar10": 120, "deepspeech2": 150, "bert": 300}
)
# Four times the on-demand price of a T4 in AWS us-east-1 (describe/data/prices.csv).
T4_NODE_DOLLARS_PER_HOUR: Final = 4 * 0.978


def sia_nodes() -> tuple[NodeSpec, ...]:
    """64 GPUs: 6 nodes of 4 T4, 2 of 8 A100, 3 of 8 RTX 2080 Ti."""
    return (
        *make_nodes("T4", count=6, gpus_per_node=4),
        *make_nodes("A100-40GB", count=2, gpus_per_node=8),
        *make_nodes("RTX2080Ti", count=3, gpus_per_node=8),
    )


def sia_scenario(
    data: Path,
    workload: str,
    *,
    rigid: bool = False,
    round_seconds: float = ROUND_SECONDS,
    speed_error_share: float = 0.0,
    seed: int = 0,
    knows_lengths: bool = True,
) -> Scenario:
    """A workload of Sia's, such as "saturn/workload-1", on its 64 GPUs of three types.

    Every policy is told the true goodput of the current epoch of each job (off by up to
    `speed_error_share`). `rigid`: jobs run on the GPUs and at the batch that their owners named,
    and their work is counted in steps of that batch, as Gavel's policy does in Sia's simulator.
    """
    models = sia_models(data)
    jobs = load_workload(
        data / "traces" / "trace_sia.csv",
        workload,
        total_samples={name: model.total_samples for name, model in models.items()},
        startup_seconds=SIA_STARTUP_SECONDS,
    )
    nodes = sia_nodes()
    return Scenario(
        jobs=_in_own_steps(jobs, models) if rigid else jobs,
        nodes=nodes,
        options_of=goodput_options(models, nodes, rigid=rigid),
        round_seconds=round_seconds,
        decides_every_round=True,
        faults=FaultSpec(seed=seed, speed_error_share=speed_error_share),
        knows_lengths=knows_lengths,
    )


def pollux_scenario(
    data: Path, workload: str, *, num_nodes: int = 16, rigid: bool = False
) -> Scenario:
    """A workload of Pollux's, such as "workloads/workload-6", on nodes of 4 T4."""
    models = pollux_models(data)
    jobs = load_workload(
        data / "traces" / "trace_pollux.csv",
        workload,
        total_samples={name: model.total_samples for name, model in models.items()},
        startup_seconds=dict.fromkeys(models, POLLUX_STARTUP_SECONDS),
        requested_gpu="T4" if rigid else "",
    )
    jobs = _in_own_steps(jobs, models) if rigid else jobs
    nodes = tuple(make_nodes("T4", count=num_nodes, gpus_per_node=4))
    return Scenario(
        jobs=jobs,
        nodes=nodes,
        options_of=goodput_options(models, nodes, rigid=rigid),
        round_seconds=ROUND_SECONDS,
        decides_every_round=True,
    )


def rented_scenario(
    data: Path,
    workload: str = "workloads/workload-1",
    *,
    budget_dollars_per_hour: float = math.inf,
    start_delay_seconds: float = 120.0,
    most_nodes: int = 40,
    models: Sequence[str] = BOA_MODELS,
    startup_seconds: Mapping[str, float] = SIA_STARTUP_SECONDS,
) -> Scenario:
    """A workload of Pollux's with no nodes of one's own: 4 T4 a node, rented, as BOA has it.

    Starts cost what Sia measured for each model, which BOA's simulations use too (boa.md, 2.4), or
    what BOA's experiments on AWS had (`AWS_STARTUP_SECONDS`).
    """
    known = pollux_models(data)
    jobs = load_workload(
        data / "traces" / "trace_pollux.csv",
        workload,
        total_samples={name: model.total_samples for name, model in known.items()},
        startup_seconds={**SIA_STARTUP_SECONDS, **startup_seconds},
    )
    offer = Offer(
        name="4xT4",
        gpu="T4",
        num_gpus=4,
        price_dollars_per_hour=T4_NODE_DOLLARS_PER_HOUR,
        start_delay_seconds=start_delay_seconds,
        most_nodes=most_nodes,
    )
    limited = [replace(job, max_gpus=BOA_MOST_GPUS) for job in jobs if job.model in models]
    return Scenario(
        jobs=tuple(limited),
        nodes=(),
        options_of=goodput_options(known, reachable_nodes((), (offer,))),
        round_seconds=ROUND_SECONDS,
        decides_every_round=True,
        offers=(offer,),
        budget_dollars_per_hour=budget_dollars_per_hour,
    )


@lru_cache(maxsize=4)
def sia_models(data: Path) -> Mapping[str, GoodputModel]:
    """The data-parallel models of Sia on T4, A100 and RTX 2080 Ti."""
    steps = build_steps(
        load_placed_steps(
            data / "peers" / "throughput.csv", source="sia", gpu_of_origin=SIA_ORIGINS
        )
    )
    return {
        name: GoodputModel(steps=found, noise=noise, slowdown=SIA_SLOWDOWN[name])
        for name, found, noise in _with_noise(data, steps)
    }


@lru_cache(maxsize=4)
def pollux_models(data: Path) -> Mapping[str, GoodputModel]:
    """The models of Pollux on T4."""
    steps = build_steps(
        load_placed_steps(
            data / "peers" / "throughput.csv", source="pollux", gpu_of_origin=POLLUX_ORIGINS
        )
    )
    models = {
        name: GoodputModel(
            steps=found, noise=noise, most_local=POLLUX_MOST_LOCAL.get(name, math.inf)
        )
        for name, found, noise in _with_noise(data, steps)
    }
    if "ncf" in models:
        models["ncf"] = replace(models["ncf"], most_gpus=1, fixed_batch=NCF_BATCH)
    return models


def _with_noise(
    data: Path, steps: Mapping[str, Mapping[str, StepTimes]]
) -> list[tuple[str, Mapping[str, StepTimes], GradientNoise]]:
    noise = build_noise(load_noise(data / "peers" / "sia_statistical_efficiency.csv"))
    return [(name, found, noise[name]) for name, found in steps.items() if name in noise]


def _in_own_steps(
    jobs: Sequence[JobSpec], models: Mapping[str, GoodputModel]
) -> tuple[JobSpec, ...]:
    """The same jobs with their work in the unit of rigid options."""
    return tuple(
        replace(
            job,
            total_samples=job.total_samples
            / rigid_unit_samples(models[job.model], float(job.global_batch)),
        )
        for job in jobs
    )
