"""Do decisions stay good when little is known? Traces and adversarial loads, lengths known and not.

    python benchmarks/decisions.py [--data DIR] [--loads bursts,wide] [--policy prices,sia-freed]
        [--told known,unknown,shuffled] [--seeds 10]

Generated loads: `bursts` (six of 120 jobs), `stream` (a steady one), `equal` (64 equal jobs, whose
optimum heSRPT gives), `sweep` (equal jobs of ten minutes, again and again), `wide` (a job that
needs 32 GPUs among tiny ones), `whole` (three jobs that need whole nodes, among tiny ones),
`heavy` (lengths with a heavy tail). Traces: `arena/pai`, `arena/helios`, `arena/philly`, and with
`--data` those of Sia and Pollux (`benchmarks/sia.py` says what DIR holds), by the beginnings of
their names: `sia/philly/workload-1`, `pollux/workloads/workload-6`.

`--told`: `known` lengths; `unknown`; `shuffled`: unknown, and lengths (of the fastest run)
exchanged among the jobs, so that neither model nor owner says anything about them. `--seeds`: so
many orders of jobs that are submitted at one time, and of lengths; the median and the range of the
mean are printed. `restarts` are of a job, in the mean, and `most` are the most starts of one job;
`special` are the hours of the wide or whole-node jobs, `alone` is the mean over each job's fastest
run alone, or for `equal` over heSRPT's optimum.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from drystone.describe.cluster import make_nodes
from drystone.describe.job import JobSpec
from drystone.describe.option import OptionSet
from drystone.observe.metrics import RunReport
from drystone.observe.simulation import PolicyRun, Scenario, alone_seconds, run_policy
from drystone.run.events import Finished, Started
from drystone.schedule.snapshot import StartupCost
from figures import print_figures
from goodput.scenarios import pollux_scenario, sia_scenario
from policies import arena_scenario

HOUR = 3600.0
STARTUP = StartupCost(seconds_per_gpu=10.0, most_seconds=60.0)
NUM_TINY = 2000
SCALING = 0.8  # n GPUs are as fast as n ** SCALING
GENERATED = ("bursts", "stream", "equal", "sweep", "wide", "whole", "heavy")
RIGID = ("fifo", "shortest", "least-attained", "gavel", "gavel-each-round")


def widths(*counts: int, speed: float = 1.0) -> OptionSet:
    """Options of one type that scale with a power of the GPUs."""
    return OptionSet(
        counts=np.array(counts, dtype=np.int64)[:, None],
        samples_per_second=speed * np.array(counts, dtype=np.float64) ** SCALING,
        memory_bytes=np.zeros(len(counts)),
    )


ELASTIC = widths(1, 2, 4, 8, 16, 32)
OPTIONS = {
    "elastic": ELASTIC,
    "tiny": widths(1, 2),
    "wide": widths(32),
    "whole": widths(8),
    "any": widths(*range(1, 65)),
}


def generated(load: str, seed: int) -> Scenario:
    """A load that was made up to be hard; `seed` draws its lengths and times."""
    draw = np.random.default_rng(seed)
    jobs: list[tuple[float, str, float]] = []  # time, options, seconds on one GPU
    if load == "bursts":
        for burst in range(6):
            lengths = draw.lognormal(np.log(0.6 * HOUR), 1.4, 120)
            jobs += [(burst * 4 * HOUR, "elastic", length) for length in lengths]
    elif load in ("stream", "heavy"):
        times = np.cumsum(draw.exponential(100.0, 500))
        lengths = draw.lognormal(np.log(0.6 * HOUR), 1.2, 500)
        if load == "heavy":
            lengths = 0.15 * HOUR * (1 + draw.pareto(1.1, 500))
            lengths = np.minimum(lengths, 60 * HOUR)
        jobs = [(when, "elastic", length) for when, length in zip(times, lengths, strict=True)]
    elif load == "equal":
        jobs = [(0.0, "any", 1.5 * HOUR)] * 64
    elif load == "sweep":
        for sweep in range(4):
            jobs += [(sweep * 1.5 * HOUR, "elastic", HOUR)] * 64
    else:
        times = np.cumsum(draw.exponential(20.0, NUM_TINY))
        jobs = [
            (when, "tiny", length)
            for when, length in zip(times, draw.exponential(0.28 * HOUR, NUM_TINY), strict=True)
        ]
        many = {"wide": 1, "whole": 3}[load]
        jobs += [(HOUR, load, 4.4 * HOUR * (32 if load == "wide" else 5) ** SCALING)] * many
    jobs.sort(key=lambda job: job[0])
    specs = tuple(
        JobSpec(id=f"{kind}-{at}", submit_seconds=when, model=kind, total_samples=length)
        for at, (when, kind, length) in enumerate(jobs)
    )
    return Scenario(
        jobs=specs,
        nodes=tuple(make_nodes("A100-40G", count=8, gpus_per_node=8)),
        options_of=lambda job: OPTIONS[job.model],
        startup=StartupCost() if load == "equal" else STARTUP,
    )


def scenario_of(load: str, told: str, policy: str, data: Path | None, seed: int) -> Scenario:
    """A load, with what policies are told of it."""
    family, _, name = load.partition("/")
    rigid = policy in RIGID
    if load in GENERATED:
        scenario = generated(load, seed)
    elif family == "arena":
        scenario = arena_scenario(name)
    elif data is not None and family == "sia":
        scenario = sia_scenario(data, name, rigid=rigid)
    elif data is not None and family == "pollux":
        scenario = pollux_scenario(data, name, rigid=rigid)
    else:
        raise SystemExit(f"no load {load!r}; Sia's and Pollux's need --data")
    if told == "shuffled":
        scenario = replace(scenario, jobs=_shuffled(scenario, seed))
    if seed:
        scenario = replace(scenario, jobs=_reordered(scenario.jobs, seed))
    return replace(scenario, knows_lengths=told == "known")


def _shuffled(scenario: Scenario, seed: int) -> tuple[JobSpec, ...]:
    """The same jobs, each with the fastest seconds of another."""
    alone = alone_seconds(scenario)
    seconds = np.array([alone[job.id] for job in scenario.jobs])
    other = np.random.default_rng(1000 + seed).permutation(seconds)
    return tuple(
        replace(job, total_samples=job.total_samples * after / before)
        for job, before, after in zip(scenario.jobs, seconds, other, strict=True)
    )


def _reordered(jobs: Sequence[JobSpec], seed: int) -> tuple[JobSpec, ...]:
    """Jobs of one submission time in another order."""
    ties = np.random.default_rng(seed).random(len(jobs))
    order = sorted(range(len(jobs)), key=lambda at: (jobs[at].submit_seconds, ties[at]))
    return tuple(jobs[at] for at in order)


def hesrpt_seconds(sizes: Sequence[float], num_gpus: int, power: float) -> float:
    """Mean completion of the optimal policy, sizes known: Berg, Vesilo, Harchol-Balter (2020)."""
    left, now, total = np.sort(np.array(sizes))[::-1], 0.0, 0.0
    while len(left):
        part = (np.arange(len(left) + 1) / len(left)) ** (1 / (1 - power))
        speed = (np.diff(part) * num_gpus) ** power
        step = float((left / speed).min())
        ends = int((left / speed).argmin())
        now += step
        total += now
        left = np.delete(left - step * speed, ends)
    return total / len(sizes)


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one run amounted to."""

    report: RunReport
    most_starts: int
    special_hours: float  # the jobs that a load is about, or nothing

    @property
    def hours(self) -> float:
        """To completion, in the mean."""
        return self.report.mean_completion_seconds / HOUR


def measure(scenario: Scenario, policy: str) -> Row:
    """Run a policy and count starts."""
    run = run_policy(scenario, policy)
    starts: dict[str, int] = {}
    for event in run.log:
        if isinstance(event, Started):
            starts[event.job_id] = starts.get(event.job_id, 0) + 1
    return Row(
        report=run.report,
        most_starts=max(starts.values(), default=0),
        special_hours=_special_hours(scenario, run),
    )


def _special_hours(scenario: Scenario, run: PolicyRun) -> float:
    special = {
        job.id: job.submit_seconds for job in scenario.jobs if job.model in ("wide", "whole")
    }
    ends = {event.job_id: event.time_seconds for event in run.log if isinstance(event, Finished)}
    hours = [(ends.get(name, run.end_seconds) - since) / HOUR for name, since in special.items()]
    return max(hours, default=float("nan"))


def main() -> None:
    """Print a line for each load, policy, and what is told."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--loads", default=",".join(GENERATED))
    parser.add_argument("--policy", default="prices,sia-freed,cells,least-attained")
    parser.add_argument("--told", default="known,unknown")
    parser.add_argument("--seeds", type=int, default=1)
    given = parser.parse_args()
    print(
        f"{'load':<24} {'told':<9} {'policy':<15} {'mean h':>7} {'range':>15} "
        f"{'p99 h':>6} {'special':>7} "
        f"{'restarts':>8} {'most':>5} {'alone':>6} {'ms':>6} {'cpu s':>6}"
    )
    figures: dict[str, float] = {}
    for load in given.loads.split(","):
        for told in given.told.split(","):
            for policy in given.policy.split(","):
                make = partial(scenario_of, load, told, policy, given.data)
                _print_runs(load, told, policy, make, given.seeds, figures)
    print_figures(figures)


def _print_runs(
    load: str,
    told: str,
    policy: str,
    make: Callable[[int], Scenario],
    seeds: int,
    figures: dict[str, float],
) -> None:
    began = time.process_time()
    rows = [measure(make(seed), policy) for seed in range(seeds)]
    hours = [row.hours for row in rows]
    middle = rows[int(np.argsort(hours)[len(hours) // 2])]
    report = middle.report
    restarts = max(row.report.num_restarts / row.report.num_jobs for row in rows)
    most = max(row.most_starts for row in rows)
    ratio = report.lower_bound_ratio
    if load == "equal":
        sizes = [job.total_samples for job in make(0).jobs]
        ratio = report.mean_completion_seconds / hesrpt_seconds(sizes, 64, SCALING)
    spread = f"{min(hours):.3f}-{max(hours):.3f}"
    print(
        f"{load:<24} {told:<9} {policy:<15} {np.median(hours):>7.3f} {spread:>15} "
        f"{report.p99_completion_seconds / HOUR:>6.2f} {middle.special_hours:>7.2f} "
        f"{restarts:>8.2f} {most:>5} {ratio:>6.3f} "
        f"{report.mean_decision_seconds * 1e3:>6.2f} {time.process_time() - began:>6.1f}",
        flush=True,
    )
    figures[f"{load} {told} {policy} hours"] = float(np.median(hours))


if __name__ == "__main__":
    main()
