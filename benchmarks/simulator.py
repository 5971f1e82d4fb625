"""How many events a second does the simulator manage, without the time that policies take?"""

from __future__ import annotations

import time

import numpy as np

from drystone.describe.job import JobSpec
from drystone.describe.trace_cluster import make_nodes
from drystone.run.loop import drive
from drystone.run.simulator.world import SimulatedWorld
from drystone.schedule.policy import find_policy
from drystone.schedule.snapshot import OptionSet

NUM_JOBS = 20_000
NUM_GPUS = 2_500


def main() -> None:
    """First come, first served, at about three quarters of what the cluster can carry."""
    chance = np.random.default_rng(0)
    options = OptionSet(
        counts=np.array([[1], [2], [4], [8]]),
        samples_per_second=np.array([1.0, 1.9, 3.6, 6.8]),
        memory_bytes=np.zeros(4),
    )
    times = np.cumsum(chance.exponential(4.0, NUM_JOBS))
    jobs = [
        JobSpec(
            id=str(index),
            submit_seconds=float(times[index]),
            model="m",
            total_samples=float(chance.lognormal(8, 1.2)),
            requested_gpu="V100",
            requested_count=int(chance.choice([1, 2, 4, 8], p=[0.7, 0.1, 0.1, 0.1])),
        )
        for index in range(NUM_JOBS)
    ]
    policy_seconds = 0.0

    def add(_: float, seconds: float) -> None:
        nonlocal policy_seconds
        policy_seconds += seconds

    world = SimulatedWorld(
        jobs=jobs,
        nodes=make_nodes("V100", count=NUM_GPUS // 4, gpus_per_node=4),
        options_of=lambda _: options,
        gpu_types=("V100",),
    )
    before = time.perf_counter()
    drive(world, find_policy("fifo"), on_decision=add)
    whole = time.perf_counter() - before
    pace = len(world.log) / (whole - policy_seconds)
    print(
        f"{len(world.log)} events in {whole:.1f} s, {policy_seconds:.1f} s of it in the policy: "
        f"{pace:,.0f} events a second without it"
    )


if __name__ == "__main__":
    main()
