"""How do policies compare on Sia's traces: 64 GPUs of three types, goodput that changes by epoch?

    python benchmarks/sia.py --data DIR --policy prices,sia --workload saturn/workload-1

DIR holds Sia's measurements (peers/throughput.csv, peers/sia_statistical_efficiency.csv) and traces
(traces/trace_sia.csv), which have no licence and are not shipped. Every policy is told the same:
the true goodput of each option in the current epoch of each job, which `--speed-error 0.2` spoils
by up to 20 %, and how long jobs are, unless `--unknown-lengths`. Rigid policies run jobs with the
GPUs and the batch that their owners had tuned; rounds are of 60 s, Gavel's of 360 s.

Beside it what the authors' own simulator gives (hours; there Sia learns speeds while jobs run).
Milliseconds are of CPU time for a decision, since a busy machine slows down everybody's clock.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from drystone.observe.metrics import RunReport
from drystone.observe.simulation import Scenario, run_policy
from drystone.schedule.decision import Decision, Memory, Policy, find_policy
from drystone.schedule.snapshot import Snapshot
from figures import print_figures
from goodput.scenarios import sia_scenario
from goodput.tables import list_workloads

GAVEL_ROUND_SECONDS = 360.0
# Mean hours to completion by the authors' simulators, Saturn 1 to 7 and Philly 1 and 2, run
# unchanged: data/peers/README.md, 4.1.
THEIRS = {
    "sia": {"saturn": (0.581, 0.715, 0.741, 0.862, 0.667, 0.662, 0.595), "philly": (0.542, 0.737)},
    "gavel-each-round": {
        "saturn": (1.798, 1.717, 2.596, 2.557, 2.035, 1.787, 1.414),
        "philly": (1.671, 2.103),
    },
}


def main() -> None:
    """Run and print a line for each workload and policy, then means over workloads."""
    options = _arguments()
    trace = options.data / "traces" / "trace_sia.csv"
    wanted = options.workload.split(",") if options.workload else ["saturn", "philly"]
    workloads = [
        name for name in list_workloads(trace) if any(name.startswith(one) for one in wanted)
    ]
    policies = options.policy.split(",")
    print(
        f"{'workload':<20} {'policy':<17} {'done':>5} {'mean h':>7} {'theirs':>7} {'p99 h':>7} "
        f"{'makespan':>9} {'restarts':>9} {'to bound':>9} {'ms':>7} {'ms p95':>7} {'ms max':>7}"
    )
    hours: dict[str, list[float]] = {name: [] for name in policies}
    for workload in workloads:
        for name in policies:
            seconds: list[float] = []
            decide = _timed(find_policy(name), seconds)
            scenario = _scenario(options, workload, name)
            report = run_policy(scenario, name, decide=decide).report
            hours[name].append(report.mean_completion_seconds / 3600)
            print(_line(workload, name, report, seconds), flush=True)
    print()
    for name, found in hours.items():
        known = [_theirs(workload, name) for workload in workloads]
        theirs = f", theirs {np.mean(known):.3f} h" if None not in known else ""
        print(f"{name:<17} mean of {len(found)} workloads {np.mean(found):.3f} h{theirs}")
    print_figures(_compared(hours))


def _compared(hours: dict[str, list[float]]) -> dict[str, float]:
    """Means, and `prices` against the best of the others: on each workload, and on average."""
    figures = {f"{name}_hours": float(np.mean(found)) for name, found in hours.items()}
    others = [np.array(found) for name, found in hours.items() if name != "prices"]
    if "prices" in hours and others:
        ours = np.array(hours["prices"])
        figures["worst_of_best_other"] = float((ours / np.min(others, axis=0)).max())
        figures["mean_of_best_other"] = float(ours.mean() / min(one.mean() for one in others))
    return figures


def _timed(policy: Policy, seconds: list[float]) -> Policy:
    """The same policy, which notes the CPU time of each decision."""

    def decide(snapshot: Snapshot, memory: Memory) -> tuple[list[Decision], Memory]:
        before = time.process_time()
        answer = policy(snapshot, memory)
        seconds.append(time.process_time() - before)
        return answer

    return decide


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--policy", default="prices,sia,fifo")
    parser.add_argument("--workload", default="", help="beginnings of names, joined by commas")
    parser.add_argument("--speed-error", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--unknown-lengths", action="store_true")
    return parser.parse_args()


def _scenario(options: argparse.Namespace, workload: str, policy: str) -> Scenario:
    return sia_scenario(
        options.data,
        workload,
        rigid=policy.startswith("gavel"),
        round_seconds=GAVEL_ROUND_SECONDS if policy.startswith("gavel") else 60.0,
        speed_error_share=options.speed_error,
        seed=options.seed,
        knows_lengths=not options.unknown_lengths,
    )


def _theirs(workload: str, policy: str) -> float | None:
    family, _, number = workload.partition("/workload-")
    known = THEIRS.get(policy, {}).get(family, ())
    return known[int(number) - 1] if int(number) <= len(known) else None


def _line(workload: str, policy: str, report: RunReport, seconds: list[float]) -> str:
    theirs = _theirs(workload, policy)
    middle, most_often, most = np.quantile(seconds, (0.5, 0.95, 1.0)) * 1e3
    return (
        f"{workload:<20} {policy:<17} {report.num_done:>5} "
        f"{report.mean_completion_seconds / 3600:>7.3f} "
        f"{f'{theirs:.3f}' if theirs else '':>7} {report.p99_completion_seconds / 3600:>7.2f} "
        f"{report.makespan_seconds / 3600:>9.2f} {report.num_restarts / report.num_jobs:>9.2f} "
        f"{report.lower_bound_ratio:>9.2f} {middle:>7.2f} {most_often:>7.2f} {most:>7.1f}"
    )


if __name__ == "__main__":
    started = time.perf_counter()
    main()
    print(f"{time.perf_counter() - started:.0f} s in all")
