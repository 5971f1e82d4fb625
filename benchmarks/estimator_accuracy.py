"""How right are estimates? Memory and speed against the published runs that ship with the package.

    python benchmarks/estimator_accuracy.py

The same as `drystone check memory` and `drystone check speed`. Promised: memory of full-parameter
training 6 % off in the median and 20 % in nine of ten cases, of LoRA and QLoRA 10 % in the median;
nine of ten runs that ran out of memory are caught, 95 % of those that fitted are accepted; speed of
dense full-parameter training 10 % off in the median and 30 % in nine of ten cases.
"""

from __future__ import annotations

from drystone.observe.check.accuracy import (
    MEMORY_TABLE,
    SPEED_TABLE,
    CheckReport,
    check_memory,
    check_speed,
)
from drystone.observe.check.runs import load_runs
from drystone.units import GiB
from figures import Figures, print_figures


def main() -> None:
    """Print a line for each measure and group."""
    memory = check_memory(load_runs(MEMORY_TABLE, measure="memory"))
    speed = check_speed(load_runs(SPEED_TABLE, measure="speed"))
    figures = judge("memory", memory, unit=GiB) | judge("speed", speed, unit=1.0)
    oom = memory.fit_counts
    figures["oom_caught"] = oom.caught / (oom.caught + oom.missed)
    figures["fits_accepted"] = oom.fits_accepted / (oom.fits_accepted + oom.fits_refused)
    print(f"out of memory: {figures['oom_caught']:.1%} caught; "
          f"fitting: {figures['fits_accepted']:.1%} accepted")  # fmt: skip
    print_figures(figures)


def judge(measure: str, report: CheckReport, *, unit: float) -> Figures:
    """Errors by group, and the points of a picture."""
    figures: Figures = {}
    print(f"{measure:<8} {'group':<16} {'n':>5} {'median':>8} {'90 %':>8} {'bias':>8}")
    for group, errors in sorted(report.errors_by_group().items()):
        name = group.replace(" ", "_")
        print(f"{'':<8} {group:<16} {errors.evaluated:>5} {errors.median_abs_error:>8.1%} "
              f"{errors.p90_abs_error:>8.1%} {errors.bias:>+8.1%}")  # fmt: skip
        figures[f"{measure}_{name}_median_error"] = errors.median_abs_error
        figures[f"{measure}_{name}_p90_error"] = errors.p90_abs_error
    figures[f"{measure}_measured"] = [run.measured / unit for run in report.first_readings]
    figures[f"{measure}_estimated"] = [run.estimated / unit for run in report.first_readings]
    return figures


if __name__ == "__main__":
    main()
