"""Would Drystone take the configurations that others publish as their best, or find better ones?

    python benchmarks/published_configs.py

NVIDIA publishes the fastest configuration that it found for each model and GPU type
(Megatron-Bridge's performance tables). Of every pair of model and GPU type the newest release
counts. Asked: is the configuration accepted (`estimate` does not refuse it); is the best layout
that the planner finds on the same GPUs for the same batch at least as fast, by the same estimate;
how far is the estimated speed from the measured one, by constants chosen without these tables?
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from statistics import median

import numpy as np

from drystone.describe.layout import Layouts
from drystone.estimate.memory.peak import estimate_memory
from drystone.estimate.time.speed import estimate_speed
from drystone.observe.check.accuracy import SPEED_TABLE, estimate_run
from drystone.observe.check.runs import PublishedRun, load_runs, machine_of
from drystone.plan.cells.search import search_cells
from figures import print_figures

_AS_FAST = 0.99  # of the published one's speed: what lies nearer is the same


@dataclass(frozen=True)
class Judged:
    """One published configuration."""

    run: PublishedRun
    is_accepted: bool
    planned_share: float  # the planner's best speed over the published one's, both estimated
    error: float  # of the estimated speed, by constants chosen without the source
    planned: str


def newest(runs: list[PublishedRun]) -> list[PublishedRun]:
    """Of every pair of model and GPU type the newest release; the fastest where it has several."""
    found: dict[tuple[str, str], PublishedRun] = {}
    for run in runs:
        pair = (run.model.name, run.gpu_name)
        known = found.get(pair)
        if known is None or _rank(run) > _rank(known):
            found[pair] = run
    return [found[pair] for pair in sorted(found)]


def _rank(run: PublishedRun) -> tuple[str, float]:
    release = re.search(r"\d\d\.\d\d(\.\d\d)?", run.framework)
    return release.group() if release else "", run.measured_tokens_per_second_per_gpu


def judge(run: PublishedRun) -> Judged:
    """Accepted, beaten, and how far off."""
    machine, layouts = machine_of(run), Layouts.of([run.layout])
    memory = estimate_memory(run.model, run.recipe, layouts, gpu=machine.gpu)
    own = float(estimate_speed(run.model, run.recipe, layouts, machine).step_seconds[0])
    cells = search_cells(run.model, run.recipe, machine, (run.layout.num_gpus,))
    best = int(np.argmin(cells.step_seconds)) if len(cells.step_seconds) else -1
    estimated, measured = estimate_run(run, measure="speed", without=run.dataset)
    return Judged(
        run=run,
        is_accepted=bool(memory.fits(machine.gpu)[0]),
        planned_share=own / float(cells.step_seconds[best]) if best >= 0 else 0.0,
        error=estimated / measured - 1,
        planned=str(cells.layout(best)) if best >= 0 else "nothing fits",
    )


def main() -> None:
    """One line for each, and the figures."""
    runs = [
        run
        for run in load_runs(SPEED_TABLE, measure="speed")
        if isinstance(run, PublishedRun) and run.dataset == "mbridge"
    ]
    judged = [judge(run) for run in newest(runs)]
    print(f"{'model':<18} {'GPUs':<22} accepted {'planner':>8} {'error':>7}  published -> planned")
    for one in judged:
        gpus = f"{one.run.layout.num_gpus} x {one.run.gpu_name}"
        answer = "yes" if one.is_accepted else "NO"
        print(
            f"{one.run.model.name:<18} {gpus:<22} {answer:<8} {one.planned_share:>7.2f}x "
            f"{one.error:>+7.1%}  {one.run.layout} -> {one.planned}"
        )
    print_figures(
        {
            "configurations": len(judged),
            "accepted": sum(one.is_accepted for one in judged) / len(judged),
            "planner_as_fast": sum(one.planned_share >= _AS_FAST for one in judged) / len(judged),
            "median_error": median(abs(one.error) for one in judged),
        }
    )


if __name__ == "__main__":
    main()
