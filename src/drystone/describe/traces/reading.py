"""Options and warnings for reading a trace."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from drystone.describe.job import JobSpec

# A job whose speed on other numbers of GPUs is assumed may get so many times what it asked for.
MOST_GROWTH: Final = 4


@dataclass(slots=True, kw_only=True)
class Reading:
    """The wishes, and the notes that gather while a file is read."""

    divide_work: float = 1.0  # Arena's own simulations divide the iterations by 5
    by_duration: bool = False  # where a trace tells durations and work, take the durations
    is_elastic: bool = False  # jobs with durations may get other numbers of GPUs than they had
    left_out: Counter[str] = field(default_factory=Counter)
    noted: Counter[str] = field(default_factory=Counter)

    def leave_out(self, what: str) -> JobSpec | None:
        """Count a line that is no job to be simulated, and give no job."""
        self.left_out[what] += 1
        return None

    def note(self, what: str) -> None:
        """Count a job of which something must be said."""
        self.noted[what] += 1

    def notes(self) -> tuple[str, ...]:
        """What a report should say."""
        left = [f"{count:,} {what} are left out" for what, count in self.left_out.items()]
        return (*left, *(f"{count:,} {what}" for what, count in self.noted.items()))


def duration_job(
    reading: Reading,
    *,
    num_gpus: int,
    duration_seconds: float,
    requested_gpu: str = "",
    **fields: Any,
) -> JobSpec:
    """A job of which only its GPUs and its length are known: its work counts GPU seconds."""
    return JobSpec(
        model="",
        total_samples=num_gpus * duration_seconds / reading.divide_work,
        requested_gpu=requested_gpu,
        requested_count=num_gpus,
        min_gpus=1 if reading.is_elastic else num_gpus,
        max_gpus=MOST_GROWTH * num_gpus if reading.is_elastic else num_gpus,
        **fields,
    )
