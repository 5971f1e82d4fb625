"""How soon is training back after a raylet was killed, and what do controller and agents cost?

Promised: restart within 10 s of the kill, no process of the old launch left; the controller under
1 % of a core for each running job; an agent under 60 MiB. A real Ray cluster on this machine, four
nodes of three types, on loopback. Wall times: on a machine with other work they are pessimistic.

    python benchmarks/ray_recovery.py [--times 2] [--jobs 16] [--seconds 30]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from figures import print_figures, print_skip

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "engines"))

MODEL_JOB = {
    "model": "mini-gpt",
    "train": {"steps": 100_000, "batch": 12, "sequence": 16, "checkpoint_every": 5},
    "gpus": {"min": 2},
}


def main() -> int:
    """Print a line for each recovery, then the costs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=30.0)
    given = parser.parse_args()
    if importlib.util.find_spec("ray") is None:
        print_skip("Ray is not installed: pip install 'drystone[ray]'")
        return 0
    from ray_fixture import RayCluster, RayNodeSpec
    from test_ray import Ray
    from under_test import LiveSystem

    nodes = [RayNodeSpec("wide", "A100", 16)]
    nodes += [RayNodeSpec(f"small{number}", "T4", 1) for number in range(given.times)]
    engine = Ray()
    engine._cluster = RayCluster((*nodes, RayNodeSpec("other", "V100", 1)))
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    try:
        with tempfile.TemporaryDirectory() as folder:
            system = LiveSystem(engine, Path(folder))
            try:
                figures = measure_recovery(system, given.times)
                figures |= measure_costs(system, given.jobs, given.seconds)
            finally:
                system.leave(ends_agents=True)
    finally:
        engine._cluster.close()
    print_figures(figures)
    return 0


def measure_recovery(system: Any, times: int) -> dict[str, float]:
    """One job over two types; the raylet of its second node is killed again and again."""
    from test_ray import ranks_alive

    from drystone.describe.files.job import make_job

    engine = system.engine
    names = [engine.named(system, f"small{number}") for number in range(times)]
    names.append(engine.named(system, "other"))
    wide = engine.named(system, "wide")
    job = system.controller.submit(make_job(MODEL_JOB, folder=system.folder))[0]
    system.place(job, *({wide: 1, one: 1} for one in names))
    restarts, first_steps = [], []
    for number in range(1, times + 1):
        wait_steps(system, job, number, 8)
        victim = next(
            node for node, _ in system.controller.journal.live.jobs[job].devices if node != wide
        )
        killed = time.monotonic()
        engine.kill_node(victim)
        system.until(lambda n=number: system.num_starts(job) == n + 1, "a new start")
        decided = time.monotonic() - killed
        system.until(lambda n=number: not ranks_alive(system, job, n), "no orphan")
        cleared = time.monotonic() - killed
        system.until(lambda n=number: len(ranks_alive(system, job, n + 1)) == 2, "processes")
        running = time.monotonic() - killed
        wait_steps(system, job, number + 1, 1)
        stepped = time.monotonic() - killed
        print(
            f"raylet killed: decided after {decided:.2f} s, old processes gone after "
            f"{cleared:.2f} s, new ones running after {running:.2f} s, first step after "
            f"{stepped:.2f} s"
        )
        restarts.append(max(running, cleared))
        first_steps.append(stepped)
    system.controller.cancel(job)
    system.until(lambda: not ranks_alive(system, job, times + 1), "the end of it")
    return {
        "restart_seconds": statistics.median(restarts),
        "first_step_seconds": statistics.median(first_steps),
    }


def wait_steps(system: Any, job: str, epoch: int, steps: int) -> None:
    """Until a launch has done so many steps."""
    pattern = f"agents/*/launches/{job}.{epoch}/rank-0.out"

    def is_there() -> bool:
        text = "".join(one.read_text() for one in system.folder.glob(pattern))
        return text.count('"step_seconds"') >= steps

    system.until(is_there, f"step {steps} of launch {epoch}")


def measure_costs(system: Any, num_jobs: int, seconds: float) -> dict[str, float]:
    """CPU time of the controller, all threads, with nothing running and with jobs that report."""
    from drystone.run.engines.agent.launches import read_json

    idle = cpu_share(seconds)
    wide = system.engine.named(system, "wide")
    jobs = [system.submit(steps=10**6, seconds=1.0) for _ in range(num_jobs)]
    for job in jobs:
        system.place(job, {wide: 1})
    for job in jobs:
        system.wait_step(job, 1)
    busy = cpu_share(seconds)
    print(
        f"controller: {100 * idle:.2f} % of a core with nothing running, {100 * busy:.2f} % with "
        f"{num_jobs} jobs that report every second: {100 * (busy - idle) / num_jobs:.3f} % a job"
    )
    agents_mib = []
    for path in sorted(system.folder.glob("agents/*/address.json")):
        status = Path(f"/proc/{read_json(path)['pid']}/status")
        if status.exists():
            kib = next(line for line in status.read_text().splitlines() if "VmRSS" in line)
            agents_mib.append(int(kib.split()[1]) / 1024)
            print(f"agent of {path.parent.name}: {agents_mib[-1]:.1f} MiB")
    for job in jobs:
        system.controller.cancel(job)
    system.until(lambda: not system.processes(), "the end of all")
    return {"core_share_per_job": (busy - idle) / num_jobs, "agent_mib": max(agents_mib)}


def cpu_share(seconds: float) -> float:
    """Of one core, that this process takes."""
    begun, used = time.monotonic(), time.process_time()
    time.sleep(seconds)
    return (time.process_time() - used) / (time.monotonic() - begun)


if __name__ == "__main__":
    sys.exit(main())
