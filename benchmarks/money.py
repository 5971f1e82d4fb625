"""How early does `budget` finish jobs, against everybody else at equal money?

    python benchmarks/money.py [--only llm,readme] [--seeds 3] [--pollux] [--data DIR]

Scenarios: the LLM mix of `budget_llm.py` on nodes of 8 that come after three minutes (Poisson, with
the rhythm of a day, in bursts), the example of the README, the same jobs on nodes of one GPU that
come at once, and with `--data` Pollux's jobs on rented T4. Budgets go from 1.05 of the least that
keeps up (the cheapest run of any opponent that lets nobody wait) to twice the most useful. At each,
`budget` is compared at the money that it really spent: with the best constant width within it, with
`prices` and with `--pollux` Pollux's autoscaling between the settings around it, with the best
constant multiplier likewise, and with the best possible of `drystone frontier`. All of these but
`prices` are known in hindsight only. Spend is all the money over the hours in which jobs arrive.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from budget_llm import BOUNDS, OFFER
from drystone.cli.simulate_setup import Request, set_up
from drystone.describe.market import Offer
from drystone.observe.frontier import arrival_hours, theoretical_frontier
from drystone.observe.generate import DEFAULT_MIX, Sizes, TraceSpec, generate_trace, parse_mix
from drystone.observe.metrics import RunReport
from drystone.observe.opponents import Tried, best_within, interpolated_seconds, try_settings
from drystone.observe.simulation import Scenario, reachable_nodes, run_policy
from drystone.run.simulate.faults import FaultSpec
from drystone.schedule.baselines.pollux.autoscale import Bounds, make_pollux_autoscale
from drystone.schedule.options import estimated_options
from drystone.schedule.snapshot import StartupCost
from figures import print_figures
from goodput.scenarios import rented_scenario

EXAMPLES = Path(__file__).parents[1] / "examples" / "simulate"
SINGLE = replace(
    OFFER,
    name="1xA100",
    num_gpus=1,
    price_dollars_per_hour=2.0,
    start_delay_seconds=0.0,
    most_nodes=256,
)
NUM_BUDGETS = 5
WARM_UP_SHARE = 0.25  # of the hours in which jobs arrive


def stream(
    seed: int, *, arrivals: str = "poisson", num_jobs: int = 150, offer: Offer = OFFER
) -> Scenario:
    """The LLM mix, three jobs an hour."""
    spec = TraceSpec(
        num_jobs=num_jobs,
        span_hours=num_jobs * 0.32,
        kinds=parse_mix(DEFAULT_MIX),
        sizes=Sizes(values=(8.0,), sigma=1.2),
        arrivals=arrivals,
        seed=seed,
    )
    at_once = offer.start_delay_seconds == 0
    return Scenario(
        jobs=generate_trace(spec),
        nodes=(),
        options_of=estimated_options(reachable_nodes((), (offer,))),
        startup=StartupCost() if at_once else StartupCost(seconds_per_gpu=10.0, most_seconds=40.0),
        round_seconds=0.0 if at_once else 60.0,
        decides_every_round=not at_once,
        offers=(replace(offer, most_nodes=256 if at_once else 64),),
    )


def readme_example(_seed: int) -> Scenario:
    """As `drystone frontier` has it."""
    request = Request(
        trace=EXAMPLES / "jobs.csv", market=EXAMPLES / "market.yaml", faults=FaultSpec(seed=0)
    )
    return set_up(request).scenario


SCENARIOS: dict[str, Callable[[int], Scenario]] = {
    "single": lambda seed: stream(seed, offer=SINGLE),
    "readme": readme_example,
    "llm": stream,
    "daily": lambda seed: stream(seed, arrivals="diurnal"),
    "bursts": lambda seed: stream(seed, arrivals="bursty"),
}


@dataclass(frozen=True)
class Compared:
    """`budget` at one budget; ratios above 1 are its own being later."""

    of_best: float  # of constant, prices and Pollux
    of_steady: float
    of_theory: float
    of_budget: float  # what it spent after the warm-up
    is_all_done: bool


def compare(label: str, scenario: Scenario, *, with_pollux: bool) -> list[Compared]:
    """All budgets of a scenario."""
    theory, hours = theoretical_frontier(scenario), arrival_hours(scenario)
    constant, steady = (try_settings(scenario, name) for name in ("constant", "steady"))
    done = [tried for tried in (*constant, *steady) if tried.report.num_done == len(scenario.jobs)]
    least = min(tried.dollars_per_hour for tried in done)
    budgets = np.geomspace(1.05 * least, 2 * theory.spend_dollars_per_hour[-1], NUM_BUDGETS)
    prices = [
        _tried(run_policy(_given(scenario, budget), "prices").report, "prices", hours)
        for budget in budgets
    ]
    pollux = _pollux(scenario, hours) if with_pollux else []
    found = []
    for budget in budgets.tolist():
        run = run_policy(_given(scenario, budget), "budget")
        spent, seconds = run.report.spent_dollars / hours, run.report.mean_completion_seconds
        others = {
            "constant": best_within(constant, spent).report.mean_completion_seconds,
            "prices": interpolated_seconds(prices, spent),
            **({"pollux": interpolated_seconds(pollux, spent)} if pollux else {}),
        }
        name = min(others, key=lambda name: math.inf if math.isnan(others[name]) else others[name])
        best = theory.at_budget(max(spent, float(theory.spend_dollars_per_hour[0])))
        compared = Compared(
            of_best=seconds / others[name],
            of_steady=seconds / interpolated_seconds(steady, spent),
            of_theory=seconds / best.mean_completion_seconds,
            of_budget=_rate_after_warm_up(run.record.times_seconds, run.record.spent_dollars, hours)
            / budget,
            is_all_done=run.report.num_done == run.report.num_jobs,
        )
        found.append(compared)
        print(
            f"{label:<10} ${budget:7.1f}/h spent {spent:7.1f} ({compared.of_budget:5.2f} warm) "
            f"{seconds / 3600:6.3f} h | {name:<8} x{compared.of_best:5.2f}  steady "
            f"x{compared.of_steady:5.2f}  best possible x{compared.of_theory:5.2f}"
            + ("" if compared.is_all_done else "  NOT ALL DONE"),
            flush=True,
        )
    return found


def _given(scenario: Scenario, budget: float) -> Scenario:
    return replace(scenario, budget_dollars_per_hour=budget)


def _tried(report: RunReport, name: str, hours: float) -> Tried:
    return Tried(name=name, report=report, dollars_per_hour=report.spent_dollars / hours)


def _pollux(scenario: Scenario, hours: float) -> list[Tried]:
    found = []
    for low, high in BOUNDS:
        decide = make_pollux_autoscale(Bounds(low_utility=low, high_utility=high))
        report = run_policy(scenario, "pollux-autoscale", decide=decide).report
        found.append(_tried(report, "pollux", hours))
    return found


def _rate_after_warm_up(times: list[float], spent: list[float], hours: float) -> float:
    """Dollars an hour between the warm-up and the last arrival."""
    begin, end = WARM_UP_SHARE * hours, hours
    at_begin, at_end = np.interp([begin, end], np.array(times) / 3600, spent)
    return float(at_end - at_begin) / (end - begin)


def main() -> None:
    """Print a line for each budget, and the bars at the end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(SCENARIOS))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--pollux", action="store_true", help="with Pollux: minutes a scenario")
    parser.add_argument("--data", type=Path, help="a folder with Pollux's jobs")
    given = parser.parse_args()
    scenarios = dict(SCENARIOS)
    if given.data:
        scenarios["pollux"] = lambda seed: rented_scenario(
            given.data, f"workloads/workload-{seed + 1}", most_nodes=64
        )
    found: dict[str, list[Compared]] = {}
    for name in given.only.split(","):
        for seed in range(given.first_seed, given.first_seed + given.seeds):
            if name == "readme" and seed:
                continue
            label = f"{name} {seed}"
            scenario = scenarios[name](seed)
            found.setdefault(name, []).extend(compare(label, scenario, with_pollux=given.pollux))
    everything = [compared for some in found.values() for compared in some]
    for name, some in (*found.items(), ("all", everything)):
        print(f"{name:<10} {_summary(some)}")
    print_figures(
        {
            "worst_of_best": max(one.of_best for one in everything),
            "median_of_best": float(np.median([one.of_best for one in everything])),
            "mean_of_steady": _mean([one.of_steady for one in everything]),
            "worst_of_steady": float(np.nanmax([one.of_steady for one in everything])),
            **{
                f"{name}_of_theory": _mean([one.of_theory for one in some])
                for name, some in found.items()
            },
            "num_not_all_done": sum(not one.is_all_done for one in everything),
        }
    )


def _mean(values: list[float]) -> float:
    return float(np.nanmean(values))


def _summary(some: list[Compared]) -> str:
    best, steady = [one.of_best for one in some], [one.of_steady for one in some]
    theory = [one.of_theory for one in some]
    return (
        f"of the best other: median {np.median(best):.2f}, worst {max(best):.2f}; of steady: mean "
        f"{_mean(steady):.2f}, worst {np.nanmax(steady):.2f}; of the best possible: mean "
        f"{_mean(theory):.2f}, worst {max(theory):.2f}"
    )


if __name__ == "__main__":
    main()
