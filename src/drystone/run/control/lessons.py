"""What does a run teach about its kind of work? Speeds, paces, plans tried, memory too small."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from drystone.describe.files.cluster import ClusterSpec
from drystone.describe.model import ModelSpec, ModuleSpec
from drystone.plan.plan import Plan
from drystone.run.control.emulation import section_seconds
from drystone.run.control.journal import Journal
from drystone.run.control.launches import can_rebalance
from drystone.run.control.notes import Learned
from drystone.run.control.options import work_of
from drystone.run.control.progress import RunProgress
from drystone.run.events import Event
from drystone.run.state import JobRecord

# A speed that differs by less from the known one is not worth an event.
_LEAST_DIFFERENCE: Final = 0.1
# Nor is memory above what was expected, by less than this share of what there is.
_LEAST_MEMORY_SHARE: Final = 0.02
# After memory ran out, estimates are raised to what was there and this much beyond; but not by more
# than this at once: a plan that should have left half of the memory free may have had company.
_MEMORY_STEP: Final = 1.1
_LARGEST_STEP: Final = 1.25


def speed_lesson(journal: Journal, record: JobRecord, samples_per_second: float) -> list[Event]:
    """A measured speed, if it says something new."""
    job_id = record.spec.id
    if job_id in journal.unplannable.by_job:
        return []  # there is no estimate to compare it with
    book, job = journal.book, journal.live.jobs[job_id].job
    counts = book.counts_of(job, record.option)
    estimated = book.estimated_speed(job, counts)
    if samples_per_second <= 0 or estimated <= 0:
        return []
    before = book.lesson(job).speeds.get(book.named(counts), 0.0)
    if abs(samples_per_second - before) <= _LEAST_DIFFERENCE * before:
        return []
    return [
        Learned(
            time_seconds=journal.now(),
            job_id=job_id,
            work=work_of(job),
            gpus=book.named(counts),
            estimated_samples_per_second=estimated,
            measured_samples_per_second=samples_per_second,
        )
    ]


def trial_lesson(journal: Journal, record: JobRecord, progress: RunProgress) -> list[Event]:
    """Which of the plans that the launch tried is the fastest, if that is new."""
    job_id = record.spec.id
    if not progress.kept or job_id in journal.unplannable.by_job:
        return []
    book, job = journal.book, journal.live.jobs[job_id].job
    counts = book.counts_of(job, record.option)
    gpus = book.named(counts)
    if book.lesson(job).kept.get(gpus) == progress.kept:
        return []
    return [
        Learned(
            time_seconds=journal.now(),
            job_id=job_id,
            work=work_of(job),
            gpus=gpus,
            estimated_samples_per_second=max(book.estimated_speed(job, counts), 1e-9),
            trials=progress.trials,
            kept=progress.kept,
        )
    ]


def pace_lesson(journal: Journal, record: JobRecord, progress: RunProgress) -> list[Event]:
    """What ranks of unlike GPUs took for their samples, over the formulas, if it is new."""
    job_id, found = record.spec.id, progress.rank_seconds
    if found is None or job_id in journal.unplannable.by_job:
        return []
    job, plan = journal.live.jobs[job_id].job, journal.plan_of(record.spec, record.option)
    if plan is None or not can_rebalance(plan) or isinstance(plan.model, ModuleSpec):
        return []
    measured = _paces(plan, journal.cluster, *found)
    known = {gpu: ratio for gpu, _, ratio in journal.book.lesson(job).paces}
    if all(
        abs(ratio / known.get(gpu, 1.0) - 1.0) <= _LEAST_DIFFERENCE for gpu, _, ratio in measured
    ):
        return []
    counts = journal.book.counts_of(job, record.option)
    return [
        Learned(
            time_seconds=journal.now(),
            job_id=job_id,
            work=work_of(job),
            gpus=journal.book.named(counts),
            estimated_samples_per_second=max(journal.book.estimated_speed(job, counts), 1e-9),
            paces=measured,
        )
    ]


def _paces(
    plan: Plan, cluster: ClusterSpec, batches: Sequence[int], seconds: Sequence[float]
) -> tuple[tuple[str, int, float], ...]:
    """By GPU type: micro-batch, and measured over estimated seconds of a sample."""
    assert isinstance(plan.model, ModelSpec)
    shares = [share for share in plan.stages[0].ranks for _ in range(share.count)]
    if len(shares) != len(batches):
        return ()
    found = []
    for gpu in plan.gpus:
        mine = [rank for rank, share in enumerate(shares) if share.gpu == gpu and batches[rank]]
        samples = sum(batches[rank] for rank in mine)
        if not samples:
            continue
        machine = cluster.group(gpu, 1).machine
        if machine.profile is not None:
            plain = machine.profile.model_copy(update={"layers": (), "paces": ()})
            machine = replace(machine, profile=plain)
        each = section_seconds(plan, machine, gpu)
        estimated = plan.model.num_layers * (each["forward"] + each["backward"]) + each["head"]
        measured = sum(seconds[rank] for rank in mine) / samples
        size = max(1, *(shares[rank].micro_batch for rank in mine))
        found.append((gpu, size, measured / estimated))
    return tuple(found)


def peak_lesson(journal: Journal, record: JobRecord, progress: RunProgress) -> list[Event]:
    """It took more memory than was estimated, though it fitted: others of its kind may not.

    A peak is of the bytes of tensors, on GPUs and on emulated devices.
    """
    job_id, peak = record.spec.id, progress.peak_memory_bytes
    if not peak or job_id in journal.unplannable.by_job:
        return []
    plan = journal.plan_of(record.spec, record.option)
    if plan is None:
        return []
    job = journal.live.jobs[job_id].job
    expected = max(need.high_bytes for need in plan.needs)
    room = min(journal.cluster.gpu(gpu).usable_bytes for gpu in plan.gpus)
    known = journal.book.lesson(job).memory_share
    if peak - known * expected <= _LEAST_MEMORY_SHARE * room:
        return []
    counts = journal.book.counts_of(job, record.option)
    return [
        Learned(
            time_seconds=journal.now(),
            job_id=job_id,
            work=work_of(job),
            gpus=journal.book.named(counts),
            estimated_samples_per_second=max(journal.book.estimated_speed(job, counts), 1e-9),
            memory_share=peak / expected,
        )
    ]


def memory_lesson(journal: Journal, record: JobRecord) -> list[Event]:
    """The plan needed more than there is: the estimates of all plans are taken as too low."""
    job_id = record.spec.id
    if job_id in journal.unplannable.by_job:
        return []
    job = journal.live.jobs[job_id].job
    counts = journal.book.counts_of(job, record.option)
    plan = journal.plan_of(record.spec, record.option)
    if plan is None:
        return []
    known = journal.book.lesson(job).memory_share
    room = {gpu: journal.cluster.gpu(gpu).usable_bytes for gpu in plan.gpus}
    tightest = min(room[need.gpu] / need.high_bytes for need in plan.needs)
    return [
        Learned(
            time_seconds=journal.now(),
            job_id=job_id,
            work=work_of(job),
            gpus=journal.book.named(counts),
            estimated_samples_per_second=max(journal.book.estimated_speed(job, counts), 1e-9),
            memory_share=max(known, min(tightest, known * _LARGEST_STEP)) * _MEMORY_STEP,
        )
    ]
