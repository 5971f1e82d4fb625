"""Formats of traces: the columns that each is known by, and what a row of it means.

Public traces come in a few shapes. Research artifacts (Arena, Pollux, Sia, Gavel and Shockwave,
ElasticFlow, Rubick, Tiresias) share one table here: source, trace, job_id, submit_time_s, model,
batch_size, num_gpus, gpu_type, duration_s, total_work, work_unit, deadline_s. How much work a row
means differs by artifact, and stands in `_artifact_samples`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from drystone.describe.job import JobSpec
from drystone.describe.traces.reading import Reading, duration_job
from drystone.describe.traces.rows import Row
from drystone.describe.traces.sacct import is_sacct, parse_sacct
from drystone.errors import InvalidSpec

OWN_COLUMNS: Final = (
    "id", "submit_seconds", "model", "total_samples", "global_batch", "seq_len", "tuning", "owner",
    "priority", "deadline_seconds", "max_cost_dollars", "allowed_gpus", "min_gpus", "max_gpus",
    "requested_gpu", "requested_count",
)  # fmt: skip
OWN_NEEDED: Final = OWN_COLUMNS[:4]

# Samples of an epoch: steps an epoch at the base batch, times that batch, in the validation
# logs of Pollux (github:petuum/adaptdl, branch osdi21-artifact, Apache-2.0); CIFAR-10, ImageNet and
# VOC 2007+2012 by their known sizes.
EPOCH_SAMPLES: Final = MappingProxyType(
    {
        "cifar10": 50_000,
        "imagenet": 1_281_167,
        "yolov3": 16_551,
        "bert": 7_387 * 12,
        "deepspeech2": 357 * 20,
        "ncf": 19_418 * 256,
        "gpt_pmp": 7_387 * 12,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFormat:
    """One kind of file: its name, whose columns it has, and what a line of it means."""

    name: str
    says: str  # what it looks like, for an error message
    knows: Callable[[Sequence[str]], bool]
    parse: Callable[[Row, Reading], JobSpec | None]


def _has(*needed: str) -> Callable[[Sequence[str]], bool]:
    return lambda columns: set(needed) <= set(columns)


def parse_own(row: Row, reading: Reading) -> JobSpec:
    """A line of our own CSV."""
    return JobSpec(
        id=row.text("id"),
        submit_seconds=row.number("submit_seconds"),
        model=row.text("model"),
        total_samples=row.number("total_samples") / reading.divide_work,
        global_batch=row.count("global_batch", 1),
        seq_len=row.count("seq_len", 0),
        tuning=row.text("tuning") or "full",
        owner=row.text("owner"),
        priority=row.number("priority", 1),
        deadline_seconds=row.number("deadline_seconds", math.inf),
        max_cost_dollars=row.number("max_cost_dollars", math.inf),
        allowed_gpus=frozenset(filter(None, row.text("allowed_gpus").split("+"))),
        min_gpus=row.count("min_gpus", 1),
        max_gpus=row.count("max_gpus", 1_000_000),
        requested_gpu=row.text("requested_gpu"),
        requested_count=row.count("requested_count", 0),
    )


def parse_artifact(row: Row, reading: Reading) -> JobSpec | None:
    """A line of the table that the research artifacts share."""
    num_gpus = row.count("num_gpus")
    deadline = row.number("deadline_s", math.inf)
    gpu = row.text("gpu_type").upper()
    if reading.by_duration and row.text("duration_s"):
        return duration_job(
            reading,
            id=row.text("job_id"),
            submit_seconds=row.number("submit_time_s"),
            num_gpus=num_gpus,
            duration_seconds=row.number("duration_s"),
            deadline_seconds=deadline,
            requested_gpu=gpu,
        )
    batch = row.count("batch_size", 1)
    is_gavel = row.text("source").startswith(("gavel", "shockwave"))
    return JobSpec(
        id=row.text("job_id"),
        submit_seconds=row.number("submit_time_s"),
        model=row.text("model"),
        total_samples=_artifact_samples(row, reading, batch),
        # Gavel names the batch of one worker, and its jobs are rigid.
        global_batch=batch * num_gpus if is_gavel else batch,
        min_gpus=num_gpus if is_gavel else 1,
        max_gpus=num_gpus if is_gavel else 1_000_000,
        deadline_seconds=deadline,
        requested_gpu=gpu,
        requested_count=num_gpus,
    )


def _artifact_samples(row: Row, reading: Reading, batch: int) -> float:
    work = row.number("total_work")
    unit = row.text("work_unit").partition(";")[0]
    if unit in ("", "iterations"):  # of the whole job; whole ones, as Arena's simulator counts
        return work // reading.divide_work * batch
    if unit == "steps":  # Gavel sums them over workers, so a step is one worker's batch
        return work * batch / reading.divide_work
    if unit == "max_epochs":
        model = row.text("model")
        if model not in EPOCH_SAMPLES:
            raise InvalidSpec(f"an epoch of {model!r} has an unknown number of samples")
        reading.note("jobs count epochs: every sample counts the same at every batch size")
        return work * EPOCH_SAMPLES[model] / reading.divide_work
    raise InvalidSpec(f"work_unit is {unit!r}; known are iterations, steps, max_epochs")


def parse_durations(row: Row, reading: Reading) -> JobSpec:
    """A line of Philly's job table, or of any table of durations."""
    return duration_job(
        reading,
        id=row.text("job_id"),
        submit_seconds=row.number("submit_time_s"),
        num_gpus=row.count("num_gpus"),
        duration_seconds=row.number("duration_s"),
        owner=row.text("vc"),
    )


def parse_pod(row: Row, reading: Reading) -> JobSpec | None:
    """A line of Alibaba's pod list of 2023 (openb), as published or with units in its columns."""
    num_gpus = row.count("num_gpu")
    if num_gpus == 0:
        return reading.leave_out("pods without a GPU")
    begin = row.text("scheduled_time_s") or row.text("scheduled_time")
    if not begin:
        return reading.leave_out("pods that never ran")
    created = "creation_time_s" if row.text("creation_time_s") else "creation_time"
    deleted = "deletion_time_s" if row.text("deletion_time_s") else "deletion_time"
    scheduled = "scheduled_time_s" if row.text("scheduled_time_s") else "scheduled_time"
    seconds = row.number(deleted) - row.number(scheduled)
    if seconds <= 0:
        return reading.leave_out("pods that ran for no time")
    share = row.number("gpu_milli_per_gpu", row.number("gpu_milli", 1000))
    if share < 1000:
        reading.note("pods asked for a part of a GPU: each is given a whole one")
    allowed = (row.text("gpu_spec_allowed") or row.text("gpu_spec")).split("|")
    return duration_job(
        reading,
        id=row.text("pod") or row.text("name"),
        submit_seconds=row.number(created),
        num_gpus=num_gpus,
        duration_seconds=seconds,
        owner=row.text("qos"),
        allowed_gpus=frozenset(filter(None, allowed)),
    )


FORMATS: Final = (
    TraceFormat(name="drystone", says=", ".join(OWN_NEEDED), knows=_has(*OWN_NEEDED),
                parse=parse_own),
    TraceFormat(name="sacct", says="sacct --parsable2 with JobID, Submit, ElapsedRaw, AllocTRES",
                knows=is_sacct, parse=parse_sacct),
    TraceFormat(name="artifact",
                says="Arena, Pollux, Sia, Gavel, ElasticFlow, Rubick, Tiresias: job_id, "
                "submit_time_s, model, batch_size, num_gpus, gpu_type, total_work",
                knows=_has("job_id", "submit_time_s", "model", "batch_size", "num_gpus",
                           "gpu_type", "total_work"), parse=parse_artifact),
    TraceFormat(name="durations", says="Philly: job_id, submit_time_s, num_gpus, duration_s",
                knows=_has("job_id", "submit_time_s", "num_gpus", "duration_s"),
                parse=parse_durations),
    TraceFormat(name="alibaba",
                says="Alibaba openb: pod, creation_time_s, scheduled_time_s, deletion_time_s, "
                "num_gpu",
                knows=lambda columns: (
                    _has("pod", "creation_time_s", "scheduled_time_s", "deletion_time_s",
                         "num_gpu")(columns)
                    or _has("name", "creation_time", "scheduled_time", "deletion_time",
                            "num_gpu")(columns)), parse=parse_pod),
)  # fmt: skip
