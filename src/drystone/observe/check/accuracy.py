"""Accuracy of the estimates: prediction against published measurements, row by row.

Like is compared with like: an `allocated` reading with the allocated estimate, `reserved` with
reserved, everything else with what the device shows. A run that was read by two tools counts once
in the summary. A run is refused where the estimate is more than the GPU has. Each run is
estimated twice: as the package ships, and by what is known without the run's source (`left_out`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from drystone.describe.catalogue import find_gpu
from drystone.describe.gpu import GpuSpec
from drystone.describe.layout import Layouts
from drystone.describe.recipe import Tuning
from drystone.errors import DrystoneError
from drystone.estimate.learned.residuals import family_of, likely_range
from drystone.estimate.memory.peak import estimate_memory
from drystone.estimate.parameters import count_model
from drystone.estimate.time.speed import estimate_speed
from drystone.observe.check.left_out import (
    LeftOutErrors,
    RangeCover,
    gpu_without,
    left_out_errors,
    range_cover,
    recipe_without,
)
from drystone.observe.check.runs import PublishedRun, SkippedRun, machine_of

GROUPS = ("dense full", "expert full", "lora", "qlora")
POOLED_GROUPS = {"all full": GROUPS[:2], "all adapters": GROUPS[2:]}
# Mixtures of experts as people train them: not the tests of a framework, and on GPUs that know fp8.
LARGE_EXPERTS = "experts > 5B"
_LARGE_PARAMS = 5e9


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRun:
    """One run: what was measured, what is estimated, and how far apart they are."""

    run_id: str
    dataset: str
    group: str  # one of GROUPS
    kind: str  # of the reading
    family: str  # of launchers
    estimated: float  # bytes, or tokens per second and GPU
    estimated_unseen: float  # the same by constants that were chosen without this source
    measured: float
    is_second_reading: bool
    has_large_experts: bool = False

    @property
    def error(self) -> float:
        """Relative: +0.1 means that the estimate is a tenth above the measurement."""
        return self.estimated / self.measured - 1

    @property
    def tuning(self) -> str:
        """What is trained: full or adapters."""
        return "full" if self.group.endswith("full") else "adapters"

    @property
    def reading(self) -> str:
        """The estimate that the kind of reading is compared with."""
        return reading_of(self.kind)

    @property
    def unseen_range(self) -> tuple[float, float]:
        """Bytes between which the reading is likely, by what is known without this source."""
        low, high = likely_range(
            self.family,
            is_full=self.tuning == "full",
            reading=self.reading,
            without=self.dataset,
        )
        return self.estimated_unseen * low, self.estimated_unseen * high

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
    warned: int = 0  # of those that failed: the upper end of the range is not there
    fits_accepted: int = 0
    fits_refused: int = 0
    by_group: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # refused, of how many


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
        runs = {
            name: [run for run in self.runs if run.group in some] for name, some in members.items()
        }
        runs[LARGE_EXPERTS] = [run for run in self.runs if run.has_large_experts]
        return {name: left_out_errors(found) for name, found in runs.items() if found}

    def range_cover(self) -> RangeCover:
        """How many readings of left-out sources lie inside the stated range; none of speed."""
        runs = self.runs if self.measure == "memory" else ()
        return range_cover((run.dataset, run.measured, run.unseen_range) for run in runs)

    def to_json(self) -> dict[str, Any]:
        """The documented shape of `drystone check --json`."""
        total = asdict(Errors.of(self.first_readings))
        groups = {name: asdict(errors) for name, errors in self.errors_by_group().items()}
        return {
            "measure": self.measure,
            "rows": self.num_rows,
            **total,
            "left_out": {name: found.to_json() for name, found in self.left_out_by_group().items()},
            "range": asdict(self.range_cover()),
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
                asdict(run)
                | {"error": run.error, "unseen_error": run.unseen_error}
                | ({"unseen_range": run.unseen_range} if self.measure == "memory" else {})
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
    fits = _FitCounter()
    num_rows = 0
    for run in runs:
        num_rows += 1
        if isinstance(run, SkippedRun):
            skipped.append(run)
            continue
        gpu = _known_gpu(run.gpu_name)
        try:
            if run.measured_memory_bytes:
                checked.append(_checked(run, "memory"))
            if gpu is not None and not run.is_second_reading:
                fits.count(run, gpu)
        except DrystoneError as error:
            skipped.append(_skipped(run, str(error)))
    return CheckReport(
        measure="memory",
        num_rows=num_rows,
        runs=tuple(checked),
        skipped=tuple(skipped),
        fit_counts=fits.result(),
    )


def check_speed(
    runs: Iterable[PublishedRun | SkippedRun], *, measured: GpuSpec | None = None
) -> CheckReport:
    """Judge the speed estimates by published readings; each of these runs also fitted.

    `measured`: a GPU type with its profile, for the runs on it, as shipped.
    """
    checked: list[CheckedRun] = []
    skipped: list[SkippedRun] = []
    fits = _FitCounter()
    num_rows = 0
    for run in runs:
        num_rows += 1
        if isinstance(run, SkippedRun):
            skipped.append(run)
            continue
        try:
            machine = machine_of(run)
            checked.append(_checked(run, "speed", gpu=measured))
            fits.count(run, machine.gpu)
        except DrystoneError as error:
            skipped.append(_skipped(run, str(error)))
    return CheckReport(
        measure="speed",
        num_rows=num_rows,
        runs=tuple(checked),
        skipped=tuple(skipped),
        fit_counts=fits.result(),
    )


def estimate_run(
    run: PublishedRun, *, measure: str, without: str = "", gpu: GpuSpec | None = None
) -> tuple[float, float]:
    """What is estimated and what was measured; `without`: as if nobody had seen that source.

    `gpu`: what is known of its type here, where the run is on that type.
    """
    recipe = recipe_without(run.recipe, without) if without else run.recipe
    layouts = Layouts.of([run.layout])
    if measure == "memory":
        known = _known_gpu(run.gpu_name)
        stage = [run.layout.pp - 1] if run.reports_last_stage else None
        memory = estimate_memory(run.model, recipe, layouts, stage=stage, gpu=known)
        return float(getattr(memory, reading_of(run.kind))[0]), run.measured_memory_bytes
    machine = machine_of(run)
    if without:
        machine = replace(machine, gpu=gpu_without(machine.gpu, without))
    elif gpu is not None and gpu.name == machine.gpu.name:
        machine = replace(machine, gpu=gpu)
    speed = estimate_speed(run.model, recipe, layouts, machine)
    return float(speed.tokens_per_second_per_gpu[0]), run.measured_tokens_per_second_per_gpu


def _checked(run: PublishedRun, measure: str, *, gpu: GpuSpec | None = None) -> CheckedRun:
    estimated, measured = estimate_run(run, measure=measure, gpu=gpu)
    unseen, _ = estimate_run(run, measure=measure, without=run.dataset)
    return CheckedRun(
        run_id=run.run_id,
        dataset=run.dataset,
        group=_group_of(run),
        kind=run.kind if run.kind != "fits" else "",
        family=family_of(run.recipe.launcher),
        estimated=estimated,
        estimated_unseen=unseen,
        measured=measured,
        is_second_reading=run.is_second_reading,
        has_large_experts=_has_large_experts(run),
    )


def _has_large_experts(run: PublishedRun) -> bool:
    gpu = _known_gpu(run.gpu_name)
    if _group_of(run) != "expert full" or gpu is None or not gpu.fp8_flops:
        return False
    return count_model(run.model).total > _LARGE_PARAMS


def _skipped(run: PublishedRun, reason: str) -> SkippedRun:
    return SkippedRun(run_id=run.run_id, dataset=run.dataset, reason=reason)


def _group_of(run: PublishedRun) -> str:
    if run.recipe.tuning is not Tuning.FULL:
        return run.recipe.tuning.value
    return "expert full" if run.model.is_moe else "dense full"


def reading_of(kind: str) -> str:
    """The estimate that a kind of reading is compared with."""
    stated = kind.split(" (")[0].lower()  # what stands behind it in brackets is about the tool
    if "alloc" in stated:
        return "allocated"
    return "reserved" if "reserved" in stated else "device"


class _FitCounter:
    """Counts what is said of runs that failed and of runs that fitted."""

    def __init__(self) -> None:
        self._outcomes: Counter[str] = Counter()
        self._by_group: dict[str, list[bool]] = {}

    def count(self, run: PublishedRun, gpu: GpuSpec) -> None:
        """One run on its GPU."""
        memory = estimate_memory(run.model, run.recipe, Layouts.of([run.layout]), gpu=gpu)
        fits = bool(memory.fits(gpu)[0])
        if run.ran_out_of_memory:
            self._outcomes["missed" if fits else "caught"] += 1
            self._outcomes["warned"] += bool(memory.likely_range().high[0] > gpu.usable_bytes)
        else:
            self._outcomes["fits_accepted" if fits else "fits_refused"] += 1
            self._by_group.setdefault(_group_of(run), []).append(not fits)
            if _has_large_experts(run):
                self._by_group.setdefault(LARGE_EXPERTS, []).append(not fits)

    def result(self) -> FitCounts:
        """All of them."""
        by_group = {
            group: (sum(refused), len(refused)) for group, refused in sorted(self._by_group.items())
        }
        return FitCounts(**self._outcomes, by_group=by_group)


def _known_gpu(name: str) -> GpuSpec | None:
    try:
        return find_gpu(name)
    except DrystoneError:
        return None


_FOLDER: Final = Path(__file__).parent / "data"
MEMORY_TABLE: Final = _FOLDER / "memory_runs.csv"
SPEED_TABLE: Final = _FOLDER / "speed_runs.csv"
