"""Readings of one's own runs, from a CSV: how far each was from its estimate.

Two forms. A whole table as `drystone check --rows` takes it (docs/measurements.md) describes every
run by itself. A short one has only what was measured (`mem_gib` and `kind`, `step_time_s` or
`tokens_per_s_per_gpu`) and, where a run differs from the one that is asked for, `model`, `gpu`,
`layout`, `global_batch`, `seq_len` or `recompute`.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from drystone.describe.catalogue import find_gpu
from drystone.describe.layout import Layout, Layouts, parse_layout
from drystone.describe.machine import Machine, default_machine
from drystone.describe.model import ModelSpec
from drystone.describe.model_source import find_model
from drystone.describe.recipe import Recipe, Recompute
from drystone.errors import DrystoneError, InvalidSpec, UnreadableFile, reason_of
from drystone.estimate.learned.pooled import kind_of, type_name
from drystone.estimate.learned.profile import Reading
from drystone.estimate.memory.peak import estimate_memory
from drystone.estimate.time.speed import estimate_speed
from drystone.observe.check.accuracy import estimate_run, reading_of
from drystone.observe.check.columns import Row, number_of, whole_number_of
from drystone.observe.check.runs import PublishedRun, load_runs
from drystone.units import GiB

_MEASURED = ("mem_gib", "step_time_s", "tokens_per_s_per_gpu")
_DIFFERENT = ("model", "gpu", "layout", "global_batch", "seq_len", "recompute", "kind")
_Measure = Literal["memory", "speed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The run that is asked for: what a short table leaves out is as here."""

    model: ModelSpec
    recipe: Recipe
    layout: Layout
    machine: Machine


def load_readings(path: Path, asked: Asked | None = None) -> tuple[Reading, ...]:
    """Every reading of a CSV; a row that says nothing is an error, with its line."""
    header, rows = _read(path)
    if "arch" in header:
        return tuple(_of_table(path, header))
    if asked is None:
        raise InvalidSpec(
            "the columns do not describe whole runs",
            where=str(path),
            hint="Columns as in docs/measurements.md, or give it to `drystone estimate --observed`",
        )
    if not set(_MEASURED) & set(header):
        raise InvalidSpec(
            "there is no column with a reading",
            where=str(path),
            hint=f"Needed: one of {', '.join(_MEASURED)}; possible: {', '.join(_DIFFERENT)}",
        )
    found: list[Reading] = []
    for number, row in enumerate(rows, start=2):
        try:
            found += _of_row(row, asked, source=f"{path.name}, line {number}")
        except DrystoneError as error:
            raise InvalidSpec(str(error), where=f"{path}, line {number}") from None
    return tuple(found)


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            return list(reader.fieldnames or []), list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UnreadableFile(
            f"cannot be read as CSV: {reason_of(error)}", where=str(path)
        ) from None


def _of_table(path: Path, header: list[str]) -> Iterator[Reading]:
    measures: list[_Measure] = []
    if "mem_gib" in header and "kind" in header:
        measures.append("memory")
    if "tokens_per_s_per_gpu" in header:
        measures.append("speed")
    for measure in measures:
        for run in load_runs(path, measure=measure):
            if not isinstance(run, PublishedRun) or run.ran_out_of_memory:
                continue
            try:
                estimated, measured = estimate_run(run, measure=measure)
            except DrystoneError:
                continue  # the GPU is not known: there is no speed to compare with
            kind = kind_of(run.model, run.recipe, run.layout, _gpu_name(run.gpu_name))
            ratio = measured / estimated if measure == "memory" else estimated / measured
            yield Reading(measure=measure, ratio=ratio, source=run.run_id, **kind._asdict())


def _of_row(row: Row, asked: Asked, *, source: str) -> Iterator[Reading]:
    model = find_model(row["model"]) if row.get("model") else asked.model
    machine = default_machine(find_gpu(row["gpu"])) if row.get("gpu") else asked.machine
    layout = parse_layout(row["layout"]) if row.get("layout") else asked.layout
    recipe = replace(
        asked.recipe,
        global_batch=whole_number_of(row, "global_batch", asked.recipe.global_batch),
        seq_len=whole_number_of(row, "seq_len", asked.recipe.seq_len),
    )
    if row.get("recompute"):
        recipe = replace(recipe, recompute=Recompute.parse(row["recompute"]))
    kind = kind_of(model, recipe, layout, type_name(machine.gpu))._asdict()
    layouts = Layouts.of([layout])
    if gibibytes := number_of(row, "mem_gib"):
        memory = estimate_memory(model, recipe, layouts, gpu=machine.gpu)
        estimated = float(getattr(memory, reading_of(row.get("kind", "")))[0])
        yield Reading(measure="memory", ratio=gibibytes * GiB / estimated, source=source, **kind)
    speed = estimate_speed(model, recipe, layouts, machine)
    seconds = number_of(row, "step_time_s")
    if pace := number_of(row, "tokens_per_s_per_gpu"):
        seconds = recipe.global_batch * recipe.seq_len / pace / layout.num_gpus
    if seconds:
        ratio = seconds / float(speed.step_seconds[0])
        yield Reading(measure="speed", ratio=ratio, source=source, **kind)


def _gpu_name(name: str) -> str:
    try:
        return find_gpu(name).name
    except DrystoneError:
        return name
