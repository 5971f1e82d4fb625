"""What does a run teach about its kind of work? Speeds, and memory that did not suffice."""

from __future__ import annotations

from typing import Final

from drystone.run.control.journal import Journal
from drystone.run.control.notes import Learned
from drystone.run.control.options import work_of
from drystone.run.events import Event
from drystone.run.state import JobRecord

# A speed that differs by less from the known one is not worth an event.
_LEAST_DIFFERENCE: Final = 0.1
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
