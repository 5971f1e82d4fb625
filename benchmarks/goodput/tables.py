"""How fast, and how well, do jobs learn? Step times by placement, gradient noise, and their traces.

Three CSV files, as the data of Pollux (github:petuum/adaptdl, Apache-2.0) and Sia are laid out:

step times: source, model, placement (digits: GPUs on each node; may be empty), num_nodes, num_gpus,
local_batch, iter_time_s, sync_time_s, plan (only dp, data parallelism, is read), origin (the file)
gradient noise: model, batch_size, epoch, progress (steps at the smallest batch), grad_sqr, grad_var
jobs: trace, job_id, submit_time_s, model, batch_size, num_gpus
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from drystone.describe.job import JobSpec
from drystone.errors import InvalidSpec, UnknownName, UnreadableFile, reason_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedStep:
    """One measured step of data-parallel training on GPUs of one type."""

    model: str
    gpu: str
    placement: tuple[int, ...]  # GPUs on each node; empty where only the counts are known
    num_nodes: int
    num_gpus: int
    local_batch: int  # samples of each GPU
    step_seconds: float
    sync_seconds: float  # of it, in the exchange of gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseRow:
    """What was seen in one epoch at one batch size."""

    model: str
    batch: int
    epoch: int  # from 1
    progress_steps: float  # at the end of the epoch, in steps of the smallest batch
    squared_norm: float  # of the gradient
    variance: float  # of the gradient, at the smallest batch


def load_placed_steps(
    path: Path, *, source: str, gpu_of_origin: Mapping[str, str]
) -> tuple[PlacedStep, ...]:
    """The steps of one source; `gpu_of_origin` names the GPU type by the ending of `origin`."""
    rows = _read(
        path, ("source", "model", "placement", "num_nodes", "num_gpus", "local_batch",
               "iter_time_s", "sync_time_s", "plan", "origin"),
    )  # fmt: skip
    found = []
    for line, row in enumerate(rows, start=2):
        gpu = next((gpu for end, gpu in gpu_of_origin.items() if row["origin"].endswith(end)), "")
        if row["source"] == source and gpu and row["plan"] == "dp":
            found.append(_parse_step(row, gpu, f"{path}: line {line}"))
    if not found:
        raise UnreadableFile(f"there are no step times of {source}", where=str(path))
    return tuple(found)


def load_noise(path: Path) -> tuple[NoiseRow, ...]:
    """The gradient noise of every model of a file."""
    columns = ("model", "batch_size", "epoch", "progress", "grad_sqr", "grad_var")
    return tuple(
        NoiseRow(
            model=row["model"],
            batch=int(_number(row, "batch_size", where)),
            epoch=int(_number(row, "epoch", where)),
            progress_steps=_number(row, "progress", where),
            squared_norm=_number(row, "grad_sqr", where),
            variance=_number(row, "grad_var", where),
        )
        for line, row in enumerate(_read(path, columns), start=2)
        for where in [f"{path}: line {line}"]
    )


def list_workloads(path: Path) -> tuple[str, ...]:
    """The traces of a file, in its order."""
    return tuple(dict.fromkeys(row["trace"] for row in _read(path, ("trace",))))


def load_workload(
    path: Path,
    workload: str,
    *,
    total_samples: Mapping[str, float],
    startup_seconds: Mapping[str, float],
    requested_gpu: str = "",
) -> tuple[JobSpec, ...]:
    """The jobs of one trace, by submission, at the times of the file.

    The work of a job and what a start costs it depend on its model alone. `global_batch` and
    `requested_count` are what its owner had tuned; only rigid policies keep to them.
    """
    columns = ("trace", "job_id", "submit_time_s", "model", "batch_size", "num_gpus")
    jobs = []
    for line, row in enumerate(_read(path, columns), start=2):
        if row["trace"] != workload:
            continue
        where = f"{path}: line {line}"
        if row["model"] not in total_samples:
            raise UnknownName("model", row["model"], total_samples, where=where)
        jobs.append(
            JobSpec(
                id=row["job_id"],
                submit_seconds=_number(row, "submit_time_s", where),
                model=row["model"],
                total_samples=total_samples[row["model"]],
                global_batch=int(_number(row, "batch_size", where)),
                requested_gpu=requested_gpu,
                requested_count=int(_number(row, "num_gpus", where)),
                startup_seconds=startup_seconds[row["model"]],
            )
        )
    if not jobs:
        raise UnknownName("workload", workload, list_workloads(path), where=str(path))
    return tuple(sorted(jobs, key=lambda job: job.submit_seconds))


def _parse_step(row: Mapping[str, str], gpu: str, where: str) -> PlacedStep:
    placement = tuple(int(digit) for digit in row["placement"].strip())
    step = PlacedStep(
        model=row["model"],
        gpu=gpu,
        placement=placement,
        num_nodes=int(_number(row, "num_nodes", where)),
        num_gpus=int(_number(row, "num_gpus", where)),
        local_batch=int(_number(row, "local_batch", where)),
        step_seconds=_number(row, "iter_time_s", where),
        sync_seconds=_number(row, "sync_time_s", where),
    )
    if not 0 <= step.sync_seconds < step.step_seconds:
        raise InvalidSpec(
            f"a step of {step.step_seconds} s with {step.sync_seconds} s of exchange", where=where
        )
    return step


def _read(path: Path, needed: Sequence[str]) -> list[dict[str, str]]:
    try:
        reader = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8-sig")), strict=True)
        rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = reason_of(error)
        raise UnreadableFile(f"nothing can be read: {reason}", where=str(path)) from error
    missing = [column for column in needed if column not in (reader.fieldnames or [])]
    if missing:
        raise UnreadableFile(f"the column {missing[0]} is missing", where=str(path))
    return rows


def _number(row: Mapping[str, str], column: str, where: str) -> float:
    try:
        value = float(row[column])
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InvalidSpec(f"{column} is {row[column]!r}, not a number", where=where)
    return value
