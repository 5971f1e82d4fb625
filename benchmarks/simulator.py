"""How many events a second does the simulator manage, without the time that policies take?

First come, first served at about three quarters of what the cluster can carry, decided at every
event. Then the same decisions again, read from a list: what is left is the simulator alone, in CPU
time, which a busy machine does not blur. With --philly FILE, also the 82,247 jobs of that trace on
2,500 GPUs (columns job_id, submit_time_s, num_gpus, duration_s), from reading it to the last end.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from drystone.describe.cluster import make_nodes
from drystone.describe.job import JobSpec
from drystone.describe.option import OptionSet
from drystone.describe.traces.trace import load_trace
from drystone.run.loop import drive
from drystone.run.simulate.collection import rare_collection
from drystone.run.simulate.world import SimulatedWorld
from drystone.schedule.decision import Decision, Memory, Policy, find_policy
from drystone.schedule.options import duration_options, types_of
from drystone.schedule.snapshot import Snapshot
from figures import print_figures

NUM_JOBS = 20_000
NUM_GPUS = 2_500
NODES = make_nodes("V100", count=NUM_GPUS // 4, gpus_per_node=4)


def made_up_world() -> SimulatedWorld:
    """Jobs of 1 to 8 GPUs, one every four seconds."""
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
    return SimulatedWorld(jobs=jobs, nodes=NODES, options_of=lambda _: options, gpu_types=("V100",))


def recorded(policy: Policy, made: list[list[Decision]]) -> Policy:
    """The policy; its decisions go into a list."""

    def call(snapshot: Snapshot, memory: Memory) -> tuple[list[Decision], Memory]:
        decisions, memory = policy(snapshot, memory)
        made.append(decisions)
        return decisions, memory

    return call


def read_out(made: list[list[Decision]]) -> Policy:
    """The same decisions, in the same order."""
    rest: Iterator[list[Decision]] = iter(made)

    def call(_: Snapshot, memory: Memory) -> tuple[list[Decision], Memory]:
        return next(rest), memory

    return call


def measure(name: str, world: SimulatedWorld, policy: Policy) -> float:
    """Run a world, and say how long it took: events a CPU second, the policy's left out."""
    policy_seconds = 0.0

    def add(_: float, seconds: float) -> None:
        nonlocal policy_seconds
        policy_seconds += seconds

    begin, begin_cpu = time.perf_counter(), time.process_time()
    with rare_collection():
        drive(world, policy, on_decision=add)
    whole, cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
    number = len(world.log)
    without = number / (cpu - policy_seconds * cpu / whole)
    print(
        f"{name}: {number:,} events in {whole:.2f} s ({cpu:.2f} s of CPU), {policy_seconds:.2f} s "
        f"of it in the policy: {number / (whole - policy_seconds):,.0f} events a second without it"
    )
    return without


def measure_philly(path: Path) -> tuple[float, float]:
    """The whole trace, from its file to its last event: seconds by the clock, and of CPU."""
    begin, begin_cpu = time.perf_counter(), time.process_time()
    jobs = load_trace(path)
    world = SimulatedWorld(
        jobs=jobs, nodes=NODES, options_of=duration_options(NODES), gpu_types=types_of(NODES)
    )
    measure(f"philly, {len(jobs):,} jobs", world, find_policy("fifo"))
    whole, cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
    print(f"  with reading the trace {whole:.1f} s, {cpu:.1f} s of CPU")
    return whole, cpu


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--philly", type=Path, help="a trace of durations: philly_jobs.csv.xz")
    parser.add_argument("--repeat", type=int, default=3)
    asked = parser.parse_args()
    made: list[list[Decision]] = []
    measure("fifo", made_up_world(), recorded(find_policy("fifo"), made))
    paces = [
        measure("the same decisions from a list", made_up_world(), read_out(made))
        for _ in range(asked.repeat)
    ]
    figures = {"events_per_cpu_second": max(paces)}
    if asked.philly is not None:
        figures["philly_seconds"], figures["philly_cpu_seconds"] = measure_philly(asked.philly)
    print_figures(figures)


if __name__ == "__main__":
    main()
