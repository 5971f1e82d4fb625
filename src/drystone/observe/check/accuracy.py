"""Accuracy of the estimates: prediction against published measurements, row by row.

Like is compared with like: an `allocated` reading with the allocated estimate, `reserved` with
reserved, everything else with what the device shows. A run that was read by two tools counts once
in the summary. Whether a run fits is decided on the upper end of the estimate's range. Each run is
estimated twice: as the package ships, and by what is known without the run's source (`left_out`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from drystone.describe.catalogue import find_gpu
from drystone.describe.gpu import GpuSpec
from drystone.describe.layout import Layouts
from drystone.describe.recipe import Tuning
from drystone.errors import DrystoneError
from drystone.estimate.memory.peak import estimate_memory
from drystone.estimate.time.speed import estimate_speed
from drystone.observe.check.left_out import (
    LeftOutErrors,
    gpu_without,
    left_out_errors,
    recipe_without,
)
from drystone.observe.check.runs import PublishedRun, SkippedRun, machine_of

GROUPS = ("dense full", "expert full", "lora", "qlora")
POOLED_GROUPS = {"all full": GROUPS[:2], "all adapters": GROUPS[2:]}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRun:
    """One run: what was measured, what is estimated, and how far apart they are."""

    run_id: str
    dataset: str
    group: str  # one of GROUPS
    kind: str  # of the reading
    estimated: float  # bytes, or tokens per second and GPU
    estimated_unseen: float  # the same by constants that were chosen without this source
    measured: float
    is_second_reading: bool

    @property
    def error(self) -> float:
        """Relative: +0.1 means that the estimate is a tenth above the measurement."""
        return self.estimated / self.measured - 1

    @property
    def unseen_error(self) -> float:
        """The same of the estimate by what is known without this source."""
        return self.estimated_unseen / self.measured - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """A summary over some runs; shares of the measurement."""

    evaluated: int
    median_abs_error: float
    p90_abs_error: float
    bias: float  # the median of the signed errors

    @classmethod
    def of(cls, runs: Sequence[CheckedRun]) -> Errors:
        """Summarise."""
        if not runs:
            return cls(evaluated=0, median_abs_error=0.0, p90_abs_error=0.0, bias=0.0)
        errors = np.array([run.error for run in runs])
        size = np.abs(errors)
        return cls(
            evaluated=len(runs),
            median_abs_error=float(np.median(size)),
            p90_abs_error=float(np.quantile(size, 0.9)),
            bias=float(np.median(errors)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FitCounts:
    """Runs that ran out of memory, and runs that fitted, against what was predicted."""

    caught: int = 0
    missed: int = 0
    fits_accepted: int = 0
    fits_refused: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """All rows of a table, judged."""

    measure: str  # memory or speed
    num_rows: int
    runs: tuple[CheckedRun, ...]
    skipped: tuple[SkippedRun, ...]
    fit_counts: FitCounts

    @property
    def first_readings(self) -> list[CheckedRun]:
        """Each run once."""
        return [run for run in self.runs if not run.is_second_reading]

    def errors_by(self, key: Callable[[CheckedRun], str]) -> dict[str, Errors]:
        """One summary per key, in order; second readings count where they stand apart."""
        names = sorted({key(run) for run in self.runs})
        return {name: Errors.of([run for run in self.runs if key(run) == name]) for name in names}

    def errors_by_group(self) -> dict[str, Errors]:
        """One summary per group and pool of groups that has runs, each run once."""
        members = {name: (name,) for name in GROUPS} | POOLED_GROUPS
        errors = {
            name: Errors.of([run for run in self.first_readings if run.group in some])
            for name, some in members.items()
        }
        return {name: found for name, found in errors.items() if found.evaluated}

    def left_out_by_group(self) -> dict[str, LeftOutErrors]:
        """Errors on sources left out of all choosing, per group and pool of groups with runs."""
        members = {name: (name,) for name in GROUPS} | POOLED_GROUPS
        return {
            name: left_out_errors(run for run in self.runs if run.group in some)
            for name, some in members.items()
            if any(run.group in some for run in self.runs)
        }

    def to_json(self) -> dict[str, Any]:
        """The documented shape of `drystone check --json`."""
        total = asdict(Errors.of(self.first_readings))
        groups = {name: asdict(errors) for name, errors in self.errors_by_group().items()}
        return {
            "measure": self.measure,
            "rows": self.num_rows,
            **total,
            "left_out": {name: found.to_json() for name, found in self.left_out_by_group().items()},
            "by_group": groups,
            "by_dataset": {
                name: asdict(errors)
                for name, errors in self.errors_by(lambda run: run.dataset).items()
            },
            "by_dataset_kind": {
                name: asdict(errors) for name, errors in self.errors_by(dataset_and_kind).items()
            },
            "oom": asdict(self.fit_counts),
            "skipped": [asdict(run) for run in self.skipped],
            "results": [
                asdict(run) | {"error": run.error, "unseen_error": run.unseen_error}
                for run in self.runs
            ],
        }


def dataset_and_kind(run: CheckedRun) -> str:
    """Dataset, kind of tuning and kind of reading: what may be pooled."""
    tuning = "full" if run.group.endswith("full") else "lora"
    return f"{run.dataset}, {tuning}" + (f", {run.kind}" if run.kind else "")


def check_memory(
    runs: Iterable[PublishedRun | SkippedRun],
) -> CheckReport:
    """Judge the memory estimates by published readings and by runs that failed."""
    checked: list[CheckedRun] = []
    skipped: list[SkippedRun] = []
    fits = dict.fromkeys(("caught", "missed", "fits_accepted", "fits_refused"), 0)
    num_rows = 0
    for run in runs:
        num_rows += 1
        if isinstance(run, SkippedRun):
            skipped.append(run)
            continue
        gpu = _known_gpu(run.gpu_name)
        if gpu is not None and not run.is_second_reading:
            hungriest = estimate_memory(run.model, run.recipe, Layouts.of([run.layout]), gpu=gpu)
            fits[_fit_outcome(run, predicted=bool(hungriest.fits(gpu)[0]))] += 1
        if run.measured_memory_bytes:
            checked.append(_checked(run, "memory"))
    return CheckReport(
        measure="memory",
        num_rows=num_rows,
        runs=tuple(checked),
        skipped=tuple(skipped),
        fit_counts=FitCounts(**fits),
    )


def check_speed(
    runs: Iterable[PublishedRun | SkippedRun],
) -> CheckReport:
    """Judge the speed estimates by published readings; each of these runs also fitted."""
    checked: list[CheckedRun] = []
    skipped: list[SkippedRun] = []
    accepted = refused = num_rows = 0
    for run in runs:
        num_rows += 1
        if isinstance(run, SkippedRun):
            skipped.append(run)
            continue
        try:
            machine = machine_of(run)
        except DrystoneError as error:
            skipped.append(_skipped(run, str(error)))
            continue
        layouts = Layouts.of([run.layout])
        if estimate_memory(run.model, run.recipe, layouts, gpu=machine.gpu).fits(machine.gpu)[0]:
            accepted += 1
        else:
            refused += 1
        checked.append(_checked(run, "speed"))
    return CheckReport(
        measure="speed",
        num_rows=num_rows,
        runs=tuple(checked),
        skipped=tuple(skipped),
        fit_counts=FitCounts(fits_accepted=accepted, fits_refused=refused),
    )


def estimate_run(run: PublishedRun, *, measure: str, without: str = "") -> tuple[float, float]:
    """What is estimated and what was measured; `without`: as if nobody had seen that source."""
    recipe = recipe_without(run.recipe, without) if without else run.recipe
    layouts = Layouts.of([run.layout])
    if measure == "memory":
        gpu = _known_gpu(run.gpu_name)
        stage = [run.layout.pp - 1] if run.reports_last_stage else None
        memory = estimate_memory(run.model, recipe, layouts, stage=stage, gpu=gpu)
        return float(getattr(memory, _reading_of(run.kind))[0]), run.measured_memory_bytes
    machine = machine_of(run)
    if without:
        machine = replace(machine, gpu=gpu_without(machine.gpu, without))
    speed = estimate_speed(run.model, recipe, layouts, machine)
    return float(speed.tokens_per_second_per_gpu[0]), run.measured_tokens_per_second_per_gpu


def _checked(run: PublishedRun, measure: str) -> CheckedRun:
    estimated, measured = estimate_run(run, measure=measure)
    unseen, _ = estimate_run(run, measure=measure, without=run.dataset)
    return CheckedRun(
        run_id=run.run_id,
        dataset=run.dataset,
        group=_group_of(run),
        kind=run.kind if run.kind != "fits" else "",
        estimated=estimated,
        estimated_unseen=unseen,
        measured=measured,
        is_second_reading=run.is_second_reading,
    )


def _skipped(run: PublishedRun, reason: str) -> SkippedRun:
    return SkippedRun(run_id=run.run_id, dataset=run.dataset, reason=reason)


def _group_of(run: PublishedRun) -> str:
    if run.recipe.tuning is not Tuning.FULL:
        return run.recipe.tuning.value
    return "expert full" if run.model.is_moe else "dense full"


def _reading_of(kind: str) -> str:
    """The estimate that a kind of reading is compared with."""
    if kind.startswith("allocated"):
        return "allocated"
    return "reserved" if kind.startswith("reserved") else "device"


def _fit_outcome(run: PublishedRun, *, predicted: bool) -> str:
    if run.ran_out_of_memory:
        return "missed" if predicted else "caught"
    return "fits_accepted" if predicted else "fits_refused"


def _known_gpu(name: str) -> GpuSpec | None:
    try:
        return find_gpu(name)
    except DrystoneError:
        return None


_FOLDER: Final = Path(__file__).parent / "data"
MEMORY_TABLE: Final = _FOLDER / "memory_runs.csv"
SPEED_TABLE: Final = _FOLDER / "speed_runs.csv"
