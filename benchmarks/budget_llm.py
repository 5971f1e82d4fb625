"""How does `budget` compare with Pollux that rents, at equal money, on jobs that train LLMs?

    python benchmarks/budget_llm.py

Jobs of nine kinds (the usual mix of `drystone trace generate`: full, LoRA and QLoRA training of
0.3 to 14 billion parameters) arrive for two days; nodes of 8 A100-80G are rented and come after
three minutes. Both policies see the same estimated speeds and know lengths. Pollux is run at three
utilities; `budget` is given the dollars an hour that each run spent while jobs arrived. The
theoretical optimum is that of `drystone frontier`: no startup of nodes, no node in part idle.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np

from drystone.describe.market import Offer
from drystone.observe.frontier import arrival_hours, theoretical_frontier
from drystone.observe.generate import DEFAULT_MIX, Sizes, TraceSpec, generate_trace, parse_mix
from drystone.observe.simulation import Scenario, reachable_nodes, run_policy
from drystone.schedule.baselines.pollux.autoscale import Bounds, make_pollux_autoscale
from drystone.schedule.options import estimated_options
from drystone.schedule.snapshot import StartupCost
from figures import print_figures

BOUNDS = ((0.65, 0.9), (0.5, 0.8), (0.35, 0.65))
# The market example of examples/simulate: a round number near `drystone gpus`.
OFFER = Offer(
    name="8xA100",
    gpu="A100-80G",
    num_gpus=8,
    price_dollars_per_hour=16.0,
    start_delay_seconds=180.0,
    most_nodes=32,
)
PROMISED_RATIO = 1.6


def main() -> None:
    """Print a pair of lines for each of Pollux's utilities."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=150)
    parser.add_argument("--hours", type=float, default=48.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    scenario = make_scenario(arguments.jobs, arguments.hours, arguments.seed)
    hours = arrival_hours(scenario)
    theory = theoretical_frontier(scenario)
    print(
        f"{'policy':<24} {'done':>5} {'mean h':>7} {'dollars/h':>10} {'theory h':>9} {'ratio':>5}"
    )
    ratios, over, points = [], [], {"pollux": [], "budget": []}
    for low, high in BOUNDS:
        decide = make_pollux_autoscale(Bounds(low_utility=low, high_utility=high))
        theirs = run_policy(scenario, "pollux-autoscale", decide=decide).report
        rate = theirs.spent_dollars / hours
        ours = run_policy(replace(scenario, budget_dollars_per_hour=rate), "budget").report
        for name, report in ((f"pollux {low:.2f} to {high:.2f}", theirs), ("budget", ours)):
            spent = report.spent_dollars / hours
            best = theory.at_budget(max(spent, float(theory.spend_dollars_per_hour[0])))
            ratio = theirs.mean_completion_seconds / report.mean_completion_seconds
            print(
                f"{name:<24} {report.num_done:>5} {report.mean_completion_seconds / 3600:>7.2f} "
                f"{spent:>10.1f} {best.mean_completion_seconds / 3600:>9.2f} {ratio:>5.2f}",
                flush=True,
            )
            points[name.split()[0]].append((spent, report.mean_completion_seconds / 3600))
        ratios.append(ratio)
        over.append(abs(ours.spent_dollars / hours / rate - 1))
    most = 1.3 * max(one for some in points.values() for one, _ in some)
    spends = np.geomspace(float(theory.spend_dollars_per_hour[0]), most, 60)
    print_figures(
        {
            "least_ratio": min(ratios),
            "spend_error": max(over),
            **{f"{name}_dollars": [one for one, _ in some] for name, some in points.items()},
            **{f"{name}_hours": [one for _, one in some] for name, some in points.items()},
            "theory_dollars": spends,
            "theory_hours": np.interp(
                spends, theory.spend_dollars_per_hour, theory.mean_completion_seconds / 3600
            ),
        }
    )


def make_scenario(num_jobs: int, span_hours: float, seed: int) -> Scenario:
    """The jobs and the market; the budget is set by whoever runs it."""
    spec = TraceSpec(
        num_jobs=num_jobs,
        span_hours=span_hours,
        kinds=parse_mix(DEFAULT_MIX),
        sizes=Sizes(values=(8.0,), sigma=1.2),
        seed=seed,
    )
    return Scenario(
        jobs=generate_trace(spec),
        nodes=(),
        options_of=estimated_options(reachable_nodes((), (OFFER,))),
        startup=StartupCost(seconds_per_gpu=10.0, most_seconds=40.0),
        round_seconds=60.0,
        decides_every_round=True,
        offers=(OFFER,),
    )


if __name__ == "__main__":
    main()
