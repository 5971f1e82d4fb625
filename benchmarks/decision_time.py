"""How long does each policy take for one decision, on the same snapshots?

Snapshots are taken from a simulated run of Arena's Philly trace (1,280 GPUs, `--runner` decides),
where about `--active` jobs wait or run; each policy then decides on every one of them. A policy
that remembers is first shown the snapshot before, as it would have seen it. Seconds are CPU seconds
of one process, after a collection of garbage, which leaves caches cold as a pause does; `ratio` is
the median against that of `prices`. What the runner took at the same moments of its own run, where
one decision follows the other, is printed too.

`cells-plain` is the oracle of `cells` (tests/oracles/plain_cells.py): Crius's procedure as it is
described, one job, one candidate and one placement at a time. It decides the same as `cells`.

python benchmarks/decision_time.py --active 150 --snapshots 20
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "oracles"))
from plain_cells import plain_cells

from drystone.describe.files.cluster import load_cluster
from drystone.describe.traces.speeds import fill_sizes, load_speeds
from drystone.describe.traces.trace import load_trace
from drystone.errors import DrystoneError
from drystone.run.loop import drive
from drystone.run.simulate.world import SimulatedWorld
from drystone.schedule.decision import POLICIES, Decision, Memory, Policy, find_policy
from drystone.schedule.options import measured_options, types_of
from drystone.schedule.snapshot import Snapshot, StartupCost
from figures import print_figures

TESTS = Path(__file__).resolve().parents[1] / "tests"
PLAIN = "cells-plain"
# The mean of a decision in the run of Crius on this trace that its authors stored with Arena's
# artifact: their code on their machine, so not to be read like what is measured here.
STORED_CRIUS_SECONDS = 4.8
Pair = tuple[Snapshot, Snapshot]  # one decision after the other
Moments = tuple[list[Pair], list[float]]  # and what the runner took for the later one, in its run


def main() -> None:
    """Print a line for each policy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--active", type=int, default=150, help="jobs that wait or run")
    parser.add_argument("--snapshots", type=int, default=20)
    parser.add_argument("--runner", default="cells", help="the policy whose run is looked at")
    parser.add_argument("--policies", default=",".join(sorted([*POLICIES, PLAIN])))
    parser.add_argument("--most-seconds", type=float, default=20.0, help="for each policy")
    given = parser.parse_args()
    pairs, in_run = take_moments(given.runner, given.active, given.snapshots)
    sizes = [len(after.jobs) for _, after in pairs]
    waiting = [int((~after.jobs.is_running).sum()) for _, after in pairs]
    print(
        f"{len(pairs)} snapshots of a run under {given.runner}: {min(sizes)} to {max(sizes)} jobs, "
        f"{np.median(waiting):.0f} of them waiting (median)"
    )
    names = ["prices", *(one for one in given.policies.split(",") if one != "prices")]
    print(f"{'policy':20}{'median ms':>11}{'p95 ms':>11}{'max ms':>11}{'ratio':>9}  decisions")
    reference, figures = math.nan, {}
    for name in names:
        try:
            seconds, num_decisions = time_policy(name, pairs, given.most_seconds)
        except DrystoneError as error:
            print(f"{name:20}cannot run here: {error}")
            continue
        median = float(np.median(seconds))
        reference = median if name == "prices" else reference
        print(
            f"{name:20}{1e3 * median:11.2f}{1e3 * np.percentile(seconds, 95):11.2f}"
            f"{1e3 * max(seconds):11.2f}{median / reference:9.2f}"
            f"  {num_decisions / len(seconds):.1f} on average, {len(seconds)} timed",
            flush=True,
        )
        figures |= {f"{name}_seconds": median, f"{name}_times_prices": median / reference}
    print(
        f"the authors' stored run of Crius, on their machine: {STORED_CRIUS_SECONDS:g} s on "
        f"average, {STORED_CRIUS_SECONDS / reference:.0f} times prices here"
    )
    in_run_seconds = float(np.median(in_run))
    print(f"{given.runner}, along its own run: {1e3 * in_run_seconds:.2f} ms (median)")
    figures[f"{given.runner}_in_run_seconds"] = in_run_seconds
    if f"{PLAIN}_seconds" in figures:
        figures[f"{PLAIN}_times_in_run"] = figures[f"{PLAIN}_seconds"] / in_run_seconds
    figures["stored_crius_times_prices"] = STORED_CRIUS_SECONDS / reference
    print_figures(figures)


def take_moments(runner: str, active: int, num_snapshots: int) -> Moments:
    """Pairs of snapshots in which the later one has about so many jobs, evenly over the run."""
    policy, seen, pairs, in_run = find_policy(runner), [], [], []

    def look(snapshot: Snapshot, memory: Memory) -> tuple[list[Decision], Memory]:
        is_moment = bool(seen) and abs(len(snapshot.jobs) - active) <= 0.05 * active
        if is_moment:
            pairs.append((seen[-1], snapshot))
        seen[:] = [snapshot]
        start = time.process_time()
        decided = policy(snapshot, memory)
        if is_moment:
            in_run.append(time.process_time() - start)
        return decided

    nodes = load_cluster(TESTS / "golden" / "arena_cluster.yaml")
    steps = fill_sizes(load_speeds(TESTS / "data" / "arena_speeds.csv"))
    jobs = load_trace(TESTS / "data" / "arena_philly.csv", divide_work=5, most_jobs=986)
    world = SimulatedWorld(
        jobs=jobs,
        nodes=nodes,
        options_of=measured_options(steps, nodes),
        gpu_types=types_of(nodes),
        startup=StartupCost(seconds_per_gpu=10, most_seconds=40),
        round_seconds=300.0,
    )
    drive(world, look)
    if not pairs:
        raise SystemExit(f"no snapshot of that run has about {active} jobs")
    chosen = np.linspace(0, len(pairs) - 1, min(num_snapshots, len(pairs))).astype(int)
    moments = sorted(set(chosen.tolist()))
    return [pairs[one] for one in moments], [in_run[one] for one in moments]


def time_policy(name: str, pairs: list[Pair], most_seconds: float) -> tuple[list[float], int]:
    """CPU seconds of each decision, and decisions made in all; stops when time is up."""
    policy: Policy = plain_cells if name == PLAIN else find_policy(name)
    began = time.process_time()
    policy(*_first(pairs))  # imports and the like are not timed
    seconds: list[float] = []
    num_decisions = 0
    for before, after in pairs:
        _, memory = policy(_fresh(before), None)
        snapshot = _fresh(after)
        gc.collect()
        start = time.process_time()
        decisions, _ = policy(snapshot, memory)
        seconds.append(time.process_time() - start)
        num_decisions += len(decisions)
        if time.process_time() - began > most_seconds:
            break
    return seconds, num_decisions


def _first(pairs: list[Pair]) -> tuple[Snapshot, None]:
    return _fresh(pairs[0][0]), None


def _fresh(snapshot: Snapshot) -> Snapshot:
    """The same without what it has computed and kept."""
    jobs = snapshot.jobs
    new_jobs = type(jobs)(**{one.name: getattr(jobs, one.name) for one in fields(jobs)})
    return replace(snapshot, jobs=new_jobs)


if __name__ == "__main__":
    main()
