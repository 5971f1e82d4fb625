"""What does a job with a deadline cost on spot nodes: by our rule, by others', at best?

AWS V100 nodes in 2023, availability and prices by zone (`data/README.md`). The setting of
SkyNomad's published comparison: 39.94 h of work, 1.5 times as long to do it, 0.2 h a restart, a
checkpoint of 50 GB at $0.02/GB to another region, three zones, five windows. Then the same job with
other zones, deadlines and windows: those that the rule was chosen on (they begin in the first 18
days) apart from those that it was not. With `--data` all nine zones.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from drystone.describe.job import JobSpec
from drystone.describe.market import Offer
from drystone.describe.option import OptionSet
from drystone.describe.traces.spot import SpotTrace, load_spot_trace
from drystone.observe.frontier import arrival_hours
from drystone.observe.simulation import Scenario, run_policy
from drystone.observe.spot import SpotTask, least_dollars, replay, rules_for
from drystone.schedule.snapshot import StartupCost
from figures import print_figures

SHIPPED = Path(__file__).with_name("data") / "spot_v100_aws.csv"
SKY_ZONES = ("us-east-1c", "us-east-2b", "us-west-2a")
SKY_STARTS = [179.725 + 119.8166667 * number for number in range(5)]  # hours
TASK = SpotTask(
    work_hours=39.938889, restart_hours=0.2, on_demand_dollars_per_hour=3.06, move_dollars=1.0
)
EARLY, LATE = (10.0, 110.0, 210.0, 310.0, 410.0), (540.0, 640.0, 740.0, 840.0, 940.0)
NUM_STREAMED = 60
RATIOS = (1.15, 1.5, 2.0)


def costs(
    trace: SpotTrace, zones: tuple[str, ...], starts: tuple[float, ...], ratio: float
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Dollars by rule and window, deadlines missed by rule; `optimum` beside the rules."""
    found: dict[str, list[float]] = {}
    missed: dict[str, int] = {}
    for start in starts:
        window = trace.window(zones, start * 3600, TASK.work_hours * ratio * 3600)
        found.setdefault("optimum", []).append(least_dollars(TASK, window))
        for name, rule in rules_for(TASK, window).items():
            outcome = replay(rule, TASK, window)
            found.setdefault(name, []).append(outcome.dollars)
            missed[name] = missed.get(name, 0) + (not outcome.is_done)
    return found, missed


def scenario(window: SpotTrace) -> Scenario:
    """The job alone on the zones of a window, with more money than it needs."""
    offers = []
    for zone in window.zones:
        first, *later = window.price_changes(zone)
        offers.append(
            Offer(
                name=zone,
                gpu="V100",
                num_gpus=1,
                price_dollars_per_hour=first.price_dollars_per_hour,
                price_changes=tuple(later),
                outages=window.outages(zone),
                is_spot=True,
            )
        )
    on_demand = TASK.on_demand_dollars_per_hour
    offers.append(Offer(name="on-demand", gpu="V100", num_gpus=1, price_dollars_per_hour=on_demand))
    job = JobSpec(
        id="job",
        submit_seconds=0.0,
        model="one",
        total_samples=TASK.work_hours * 3600,
        deadline_seconds=window.seconds,
    )
    options = OptionSet(
        counts=np.array([[1]]), samples_per_second=np.ones(1), memory_bytes=np.zeros(1)
    )
    restart_seconds = TASK.restart_hours * 3600
    return Scenario(
        jobs=(job,),
        nodes=(),
        options_of=lambda _job: options,
        startup=StartupCost(seconds_per_gpu=restart_seconds, most_seconds=restart_seconds),
        offers=tuple(offers),
        budget_dollars_per_hour=50.0,
    )


def in_scheduler(
    trace: SpotTrace, zones: tuple[str, ...], starts: tuple[float, ...], ratio: float
) -> tuple[dict[str, list[float]], int]:
    """Dollars by policy and window beside those of rules; deadlines missed by our policies."""
    found, missed = costs(trace, zones, starts, ratio)
    num_missed = missed["on demand"]
    for start in starts:
        here = scenario(trace.window(zones, start * 3600, TASK.work_hours * ratio * 3600))
        for policy in ("budget", "prices"):
            report = run_policy(here, policy).report
            found.setdefault(policy, []).append(report.spent_dollars)
            is_late = report.mean_completion_seconds > here.jobs[0].deadline_seconds
            num_missed += is_late or report.num_done < 1
    return found, num_missed


def _sweep_scheduler(trace: SpotTrace) -> None:
    names = ("budget", "prices", "spot", "uniform progress", "spot with fallback", "on demand")
    ratios: dict[str, list[float]] = {name: [] for name in names}
    num_missed = 0
    print(f"times the optimum in the scheduler: {', '.join(names)}")
    for zones in [(zone,) for zone in trace.zones] + [SKY_ZONES]:
        for ratio in RATIOS:
            found, missed = in_scheduler(trace, zones, (*EARLY, *LATE), ratio)
            num_missed += missed
            for name in names:
                ratios[name].append(sum(found[name]) / sum(found["optimum"]))
            label = zones[0] if len(zones) == 1 else f"{len(zones)} zones from {zones[0]}"
            shown = "  ".join(f"{ratios[name][-1]:.3f}" for name in names)
            print(f"  {label:28} deadline x{ratio:<5} {shown}  missed {missed}", flush=True)
    means = {name: float(np.mean(values)) for name, values in ratios.items()}
    print(f"  {'mean':41} " + "  ".join(f"{means[name]:.3f}" for name in names))
    published, missed = in_scheduler(trace, SKY_ZONES, tuple(SKY_STARTS), 1.5)
    print_figures(
        {
            "budget_of_optimum": means["budget"],
            "prices_of_optimum": means["prices"],
            "uniform_of_optimum": means["uniform progress"],
            "worst_of_uniform": max(
                mine / theirs
                for mine, theirs in zip(ratios["budget"], ratios["uniform progress"], strict=True)
            ),
            "published_dollars": float(np.mean(published["budget"])),
            "num_missed": num_missed + missed,
        }
    )


def stream(trace: SpotTrace, seed: int, budget: float, *, has_spot: bool) -> Scenario:
    """A job every two hours, of eight hours on one GPU in the median; nodes come after 3 min."""
    dice, now, jobs = np.random.default_rng(seed), 0.0, []
    for number in range(NUM_STREAMED):
        now += dice.exponential(2.0 * 3600)
        work = float(8 * 3600 * dice.lognormal(0, 0.8))
        deadline = now + work * dice.uniform(1.1, 2.5) + 3600
        jobs.append(
            JobSpec(
                id=f"job-{number:02d}",
                submit_seconds=now,
                model="one",
                total_samples=work,
                deadline_seconds=deadline if number % 2 else math.inf,
            )
        )
    options = OptionSet(
        counts=np.array([[1], [2], [4], [8]]),
        samples_per_second=np.array([1.0, 1.85, 3.3, 5.5]),
        memory_bytes=np.zeros(4),
    )
    alone = scenario(trace.window(SKY_ZONES, 200 * 3600, 300 * 3600))
    return replace(
        alone,
        jobs=tuple(jobs),
        options_of=lambda _job: options,
        startup=StartupCost(seconds_per_gpu=300, most_seconds=300),
        offers=tuple(
            replace(offer, start_delay_seconds=180.0)
            for offer in alone.offers
            if has_spot or not offer.is_spot
        ),
        budget_dollars_per_hour=budget,
    )


def _compare_streams(trace: SpotTrace) -> None:
    """Time and money by policy, budget and market, over the seeds."""
    print("policy  budget $/h  nodes            mean h  spent $/h  deadlines met")
    figures: dict[str, float] = {}
    for policy in ("budget", "prices"):
        for budget in (14.0, 25.0):
            for has_spot in (False, True):
                runs = [stream(trace, seed, budget, has_spot=has_spot) for seed in (0, 1, 2)]
                reports = [run_policy(run, policy).report for run in runs]
                hours = [report.mean_completion_seconds / 3600 for report in reports]
                spent = [
                    report.spent_dollars / arrival_hours(run)
                    for report, run in zip(reports, runs, strict=True)
                ]
                met = sum(report.num_deadlines_met for report in reports)
                due = sum(report.num_deadlines for report in reports)
                nodes = "spot, on demand" if has_spot else "on demand"
                print(
                    f"{policy:6}  {budget:10.2f}  {nodes:15}  {np.mean(hours):6.2f}  "
                    f"{np.mean(spent):9.2f}  {met} of {due}",
                    flush=True,
                )
                figures[f"{policy}_{budget:.0f}_{'spot' if has_spot else 'on_demand'}_missed"] = (
                    due - met
                )
    print_figures(figures)


def main() -> None:
    """Print both comparisons."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="a folder with spot/v100_aws_2023.csv")
    parser.add_argument("--quick", action="store_true", help="the published setting only")
    parser.add_argument("--scheduler", action="store_true", help="by `budget` and `prices`")
    parser.add_argument("--stream", action="store_true", help="many jobs, with spot and without")
    given = parser.parse_args()
    trace = load_spot_trace(given.data / "spot/v100_aws_2023.csv" if given.data else SHIPPED)
    if given.stream:
        _compare_streams(trace)
        return
    if given.scheduler:
        _sweep_scheduler(trace)
        return
    found, missed = costs(trace, SKY_ZONES, tuple(SKY_STARTS), 1.5)
    print("SkyNomad's setting (its authors: $41.73, optimum $37.37, UP(S) $47.02):")
    for name, dollars in found.items():
        print(f"  {name:20} ${np.mean(dollars):7.2f}   missed {missed.get(name, 0)}")
    figures = {
        "published_dollars": np.mean(found["spot"]),
        "published_optimum_dollars": np.mean(found["optimum"]),
        "published_uniform_dollars": np.mean(found["uniform progress"]),
        "published_of_optimum": np.mean(found["spot"]) / np.mean(found["optimum"]),
    }
    num_missed = missed["spot"]
    if not given.quick:
        num_missed += _sweep(trace, figures)
    print_figures(figures | {"num_missed": num_missed})


def _sweep(trace: SpotTrace, figures: dict[str, float]) -> int:
    sets = [(zone,) for zone in trace.zones] + [SKY_ZONES]
    if len(trace.zones) > len(SKY_ZONES):
        sets += [trace.zones, tuple(zone for zone in trace.zones if "east-1" in zone)]
    num_missed, names = 0, ("spot", "uniform progress", "spot with fallback", "on demand")
    for half, starts in (("early", EARLY), ("late", LATE)):
        ratios: dict[str, list[float]] = {name: [] for name in names}
        print(f"\ntimes the optimum, {half} windows: {', '.join(names)}")
        for zones in sets:
            for ratio in RATIOS:
                found, missed = costs(trace, zones, starts, ratio)
                num_missed += missed["spot"]
                for name in names:
                    ratios[name].append(sum(found[name]) / sum(found["optimum"]))
                label = zones[0] if len(zones) == 1 else f"{len(zones)} zones from {zones[0]}"
                shown = "  ".join(f"{ratios[name][-1]:.3f}" for name in names)
                print(f"  {label:28} deadline x{ratio:<5} {shown}", flush=True)
        print(f"  {'mean':41} " + "  ".join(f"{np.mean(ratios[name]):.3f}" for name in names))
        figures[f"{half}_of_optimum"] = float(np.mean(ratios["spot"]))
        figures[f"{half}_worst_of_optimum"] = max(ratios["spot"])
        best = np.minimum(ratios["uniform progress"], ratios["spot with fallback"])
        figures[f"{half}_of_uniform"] = float(
            np.mean(ratios["spot"]) / np.mean(ratios["uniform progress"])
        )
        figures[f"{half}_of_best_rule"] = float(np.mean(ratios["spot"]) / np.mean(best))
    return num_missed


if __name__ == "__main__":
    main()
