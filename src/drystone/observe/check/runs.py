"""Published training runs, read from a CSV: what was run, on what, and what was measured.

The columns are those of the measurement tables (documented in `docs/measurements.md`). A row whose
columns do not suffice becomes a `SkippedRun` with the reason; nothing is guessed in silence.
"""

from __future__ import annotations

import csv
import math
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from drystone.describe.catalogue import find_gpu
from drystone.describe.layout import Layout, check_layout
from drystone.describe.machine import Link, Machine, default_machine, find_link
from drystone.describe.model import ModelSpec
from drystone.describe.recipe import Recipe
from drystone.errors import DrystoneError, RequestError, UnreadableFile, reason_of
from drystone.observe.check.columns import number_of, parse_layout, whole_number_of
from drystone.observe.check.model import parse_shape
from drystone.observe.check.recipe_columns import parse_recipe
from drystone.units import GiB

REQUIRED_COLUMNS = (
    "run_id",
    "framework",
    "arch",
    "layers",
    "hidden",
    "heads",
    "vocab",
    "seq_len",
    "gpu",
    "dp",
    "sharding",
    "tp",
    "pp",
    "micro_batch",
    "precision",
    "recompute",
    "tuning",
)
MEMORY_COLUMNS = ("mem_gib", "kind")
SPEED_COLUMNS = ("tokens_per_s_per_gpu",)
_GIGABIT_BYTES = 1e9 / 8
_USUAL_GPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """One run that somebody made and wrote down."""

    run_id: str
    dataset: str
    framework: str
    model: ModelSpec
    recipe: Recipe
    layout: Layout
    gpu_name: str
    gpus_per_node: int
    interconnect: str
    kind: str  # allocated, reserved, nvidia-smi, unstated, oom-boundary
    reports_last_stage: bool  # the reading is of the last pipeline stage only
    measured_memory_bytes: float  # 0: none
    measured_tokens_per_second_per_gpu: float  # 0: none
    ran_out_of_memory: bool
    is_second_reading: bool  # the same run stands in the table already, read by another tool
    notes: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedRun:
    """A row that cannot be judged, and why."""

    run_id: str
    dataset: str
    reason: str


def load_runs(path: Path, *, measure: str) -> list[PublishedRun | SkippedRun]:
    """Every row of the table, in order; `measure` is `memory` or `speed`."""
    rows = _load_rows(path, measure=measure)
    return [parse_run(row, measure=measure) for row in rows]


def parse_run(row: dict[str, str], *, measure: str) -> PublishedRun | SkippedRun:
    """One row as a run, or the reason why it cannot be one."""
    row = {key: (value or "").strip() for key, value in row.items() if key is not None}
    run_id = row["run_id"]
    dataset = re.sub(r"-?\d+[a-z]*$", "", run_id) or run_id
    try:
        _refuse_marked(row, measure=measure)
        return _parse_complete(row, run_id=run_id, dataset=dataset)
    except DrystoneError as error:
        return SkippedRun(run_id=run_id, dataset=dataset, reason=str(error))


def _load_rows(path: Path, *, measure: str) -> list[dict[str, str]]:
    wanted = REQUIRED_COLUMNS + (MEMORY_COLUMNS if measure == "memory" else SPEED_COLUMNS)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            header = list(reader.fieldnames or [])
            missing = [name for name in wanted if name not in header]
            if missing:
                raise UnreadableFile(
                    f"the column{'s' if len(missing) > 1 else ''} {', '.join(missing)} "
                    f"{'are' if len(missing) > 1 else 'is'} missing",
                    where=str(path),
                    hint=f"Needed: {', '.join(wanted)}; see docs/measurements.md",
                )
            return list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UnreadableFile(
            f"cannot be read as CSV: {reason_of(error)}",
            where=str(path),
            hint="Check the path and the encoding",
        ) from None


def _refuse_marked(row: dict[str, str], *, measure: str) -> None:
    notes = row.get("notes", "")
    for mark in ("SUSPECT", "DO NOT USE"):
        if mark in notes:
            raise RequestError(f"marked {mark}")
    missing = row.get("missing", "")
    # The number of parameters is counted here; a mixture of unknown layers cannot be.
    if row.get("config_complete", "yes") == "no" and (missing != "params" or row["arch"] == "moe"):
        raise RequestError(f"configuration incomplete: {missing or 'see notes'}")
    if measure == "memory" and row["kind"] != "oom-boundary" and not number_of(row, "mem_gib"):
        raise RequestError("no memory reading")
    if measure == "speed" and not number_of(row, "tokens_per_s_per_gpu"):
        if not number_of(row, "step_time_s"):
            raise RequestError("no speed reading")
        if "per micro-batch" in notes:
            raise RequestError("the time is of a micro-batch of unknown length")


def _parse_complete(row: dict[str, str], *, run_id: str, dataset: str) -> PublishedRun:
    model = parse_shape(row)
    layout = parse_layout(row, model)
    recipe = parse_recipe(row, layout, model)
    problems = check_layout(model, recipe, layout)
    problems = [problem for problem in problems if "global batch" not in problem]
    if problems:
        raise RequestError("; ".join(problems))
    num_gpus = whole_number_of(row, "gpus", 0) or layout.num_gpus
    kind = row.get("kind", "")
    return PublishedRun(
        run_id=run_id,
        dataset=dataset,
        framework=row["framework"],
        model=model,
        recipe=recipe,
        layout=layout,
        gpu_name=row.get("gpu_spec_key") or row["gpu"],
        gpus_per_node=_gpus_per_node(row, num_gpus),
        interconnect=row.get("interconnect", ""),
        kind=kind,
        reports_last_stage="last rank" in row.get("notes", ""),
        measured_memory_bytes=number_of(row, "mem_gib") * GiB,
        measured_tokens_per_second_per_gpu=_measured_pace(row, recipe, num_gpus),
        ran_out_of_memory=kind == "oom-boundary",
        is_second_reading="same run as the preceding" in row.get("notes", ""),
        notes=row.get("notes", ""),
    )


def _gpus_per_node(row: dict[str, str], num_gpus: int) -> int:
    """As stated; else nodes of eight, or as large as the domain that the GPU's NVLink joins."""
    nodes = whole_number_of(row, "nodes", 0)
    if not nodes:
        usual = _USUAL_GPUS_PER_NODE
        with suppress(DrystoneError):
            gpu = find_gpu(row.get("gpu_spec_key") or row["gpu"])
            usual = max(usual, default_machine(gpu).gpus_per_node)
        nodes = math.ceil(num_gpus / usual)
    return max(1, num_gpus // nodes)


def _measured_pace(row: dict[str, str], recipe: Recipe, num_gpus: int) -> float:
    if pace := number_of(row, "tokens_per_s_per_gpu"):
        return pace
    step_seconds = number_of(row, "step_time_s")
    return recipe.global_batch * recipe.seq_len / step_seconds / num_gpus if step_seconds else 0.0


def machine_of(run: PublishedRun) -> Machine:
    """The machine of a run; what the table does not say of the network is as usual for the GPU."""
    if not run.gpu_name:
        raise RequestError("the GPU is not stated")
    gpu = find_gpu(run.gpu_name)
    inter = _stated_network(run.interconnect, run.gpus_per_node)
    return default_machine(gpu, gpus_per_node=run.gpus_per_node, inter=inter)


# Gigabits, not the gigabytes of NVLink and PCIe; a `G` alone only after a number of ports.
_RATE = (
    r"(?:(?P<before>\d+)\s*[x*]\s*)?(?P<rate>\d+(?:\.\d+)?)\s*(?P<unit>[GT])"
    r"(?:b(?:ps|/s|it/s|it|E)?|(?<=\dG)(?(before)\b|(?!)))(?:\s*[x*]\s*(?P<after>\d+))?"
)
# What one port of InfiniBand carries, by generation: EDR, HDR, NDR, XDR.
_PORT_GIGABITS = (100, 200, 400, 800)


def _is_port(text: str, match: re.Match[str], gigabits: float) -> bool:
    """Whether a rate is that of one port, as `InfiniBand NDR 400 Gb/s`: each GPU has one."""
    if match.group("before") or match.group("after") or re.search(r"/\s*node|per node", text):
        return False
    generation = re.search(r"\b(EDR|HDR|NDR|XDR)\b", text)
    if generation:
        return gigabits == _PORT_GIGABITS[("EDR", "HDR", "NDR", "XDR").index(generation.group(1))]
    return (
        gigabits in _PORT_GIGABITS[:3] and re.search(r"\bIB\b|infiniband", text, re.I) is not None
    )


def _stated_network(text: str, gpus_per_node: int) -> Link | None:
    """A rate such as `400 Gb/s RDMA per GPU`, `8x400G`, `1.6 Tb/s` or `HDR 200 Gb/s`, per GPU."""
    match = re.search(_RATE, text)
    if match is None:
        return None
    stated = float(match.group("rate")) * (1000 if match.group("unit") == "T" else 1)
    gigabits = float(match.group("before") or match.group("after") or 1) * stated
    if not re.search(r"per GPU|/GPU|a GPU", text) and not _is_port(text, match, gigabits):
        gigabits = gigabits / gpus_per_node
    # What InfiniBand NDR reaches of its line rate, and its latency, stand for any RDMA network.
    known = find_link("InfiniBand NDR")
    share = known.bandwidth_bytes_per_second / (400 * _GIGABIT_BYTES)
    return Link(
        name=f"{gigabits:g} Gb/s a GPU",
        bandwidth_bytes_per_second=gigabits * _GIGABIT_BYTES * share,
        latency_seconds=known.latency_seconds,
        source=f"stated: {text}; share of the line rate and latency as {known.name}",
    )
