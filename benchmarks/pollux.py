"""How do policies compare on Pollux's workloads: on 64 T4, and on T4 that are rented?

    python benchmarks/pollux.py --data DIR
    python benchmarks/pollux.py --data DIR --rented [--aws]

DIR holds the measurements and traces (peers/throughput.csv, peers/sia_statistical_efficiency.csv,
traces/trace_pollux.csv). On 16 nodes of 4 T4 the authors' simulator gives on workload 6: Pollux
2,446 s (its README), Tiresias 3,470 s; here every policy is told the true goodput, theirs learn.

`--rented` is BOA's setting: the short models of workload 1, nodes of 4 T4 that come after two
minutes. Pollux with autoscaling is run at several utilities; `budget` is to spend as much in all
as each of those runs did (what it spends after the last arrival is taken off the rate beforehand,
by a first run). Restarts cost what Sia measured, or with `--aws` what BOA's authors measured on
AWS, where they found 1.6. Dollars an hour are all dollars over the time in which jobs arrive. What
no money could buy is printed too: `budget` without a limit, where nodes come at once.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from drystone.observe.frontier import arrival_hours
from drystone.observe.metrics import RunReport
from drystone.observe.simulation import Scenario, run_policy, simulate_policy
from drystone.schedule.baselines.pollux.autoscale import Bounds, make_pollux_autoscale
from figures import print_figures
from goodput.scenarios import (
    AWS_STARTUP_SECONDS,
    SIA_STARTUP_SECONDS,
    pollux_scenario,
    rented_scenario,
)

RIGID = ("fifo", "shortest", "least-attained")
# Seconds, by the authors' simulators: data/peers/README.md, 4.3.
THEIRS = {("workloads/workload-6", "pollux"): 2446.1}
BOUNDS = ((0.5, 0.8), (0.35, 0.65), (0.2, 0.5))


def main() -> None:
    """Print a line a run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--policy", default="prices,sia,least-attained,pollux")
    parser.add_argument("--workload", default="workloads/workload-6")
    parser.add_argument("--rented", action="store_true")
    parser.add_argument("--aws", action="store_true")
    options = parser.parse_args()
    if options.rented:
        _compare_rented(options.data, AWS_STARTUP_SECONDS if options.aws else SIA_STARTUP_SECONDS)
        return
    print(
        f"{'workload':<22} {'policy':<16} {'done':>5} {'mean s':>7} {'theirs':>7} {'restarts':>9}"
    )
    means: dict[str, list[float]] = {}
    for workload in options.workload.split(","):
        for name in options.policy.split(","):
            scenario = pollux_scenario(options.data, workload, rigid=name in RIGID)
            report = simulate_policy(scenario, name)[0]
            theirs = THEIRS.get((workload, name))
            print(
                f"{workload:<22} {name:<16} {report.num_done:>5} "
                f"{report.mean_completion_seconds:>7.0f} {f'{theirs:.0f}' if theirs else '':>7} "
                f"{report.num_restarts / report.num_jobs:>9.2f}",
                flush=True,
            )
            means.setdefault(name, []).append(report.mean_completion_seconds)
    print_figures({f"{name}_seconds": sum(some) / len(some) for name, some in means.items()})


def _compare_rented(data: Path, startups: Mapping[str, float]) -> None:
    print(
        f"{'policy':<22} {'done':>5} {'mean s':>7} {'dollars/h':>10} {'restarts':>9} {'ratio':>6}"
    )
    scenario = rented_scenario(data, startup_seconds=startups)
    hours, ratios, least_seconds = arrival_hours(scenario), [], math.inf
    for low, high in BOUNDS:
        decide = make_pollux_autoscale(Bounds(low_utility=low, high_utility=high))
        theirs = run_policy(scenario, "pollux-autoscale", decide=decide).report
        print(_line(f"pollux {low:.2f} to {high:.2f}", theirs, hours, 1.0), flush=True)
        least_seconds = min(least_seconds, theirs.mean_completion_seconds)
        money = theirs.spent_dollars / hours
        ours = _budget_of(scenario, money)
        ours = _budget_of(scenario, money * min(theirs.spent_dollars / ours.spent_dollars, 1.0))
        ratio = theirs.mean_completion_seconds / ours.mean_completion_seconds
        print(_line(f"budget of {money:.1f}", ours, hours, ratio), flush=True)
        ratios.append(ratio)
    at_once = rented_scenario(data, startup_seconds=startups, start_delay_seconds=0.0)
    ideal = run_policy(at_once, "budget").report
    print(_line("any money, at once", ideal, hours, least_seconds / ideal.mean_completion_seconds))
    print_figures(
        {
            "least_ratio": min(ratios),
            "most_ratio": max(ratios),
            "ideal_ratio": least_seconds / ideal.mean_completion_seconds,
        }
    )


def _budget_of(scenario: Scenario, dollars_per_hour: float) -> RunReport:
    return run_policy(replace(scenario, budget_dollars_per_hour=dollars_per_hour), "budget").report


def _line(name: str, report: RunReport, hours: float, ratio: float) -> str:
    return (
        f"{name:<22} {report.num_done:>5} {report.mean_completion_seconds:>7.0f} "
        f"{report.spent_dollars / hours:>10.2f} {report.num_restarts / report.num_jobs:>9.2f} "
        f"{ratio:>6.2f}"
    )


if __name__ == "__main__":
    main()
