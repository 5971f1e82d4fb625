"""Options: what one job can choose from, as rows of a table.

An option is a number of GPUs of each type, and what the job does with them. Tables are built from
plans (`plan/options.py`), from measured steps or from durations (`schedule/options.py`); policies
only ever see this type. A row number stands for the option in decisions and in the event log, and
whoever built the table from plans has the plan of every row beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from drystone.errors import InvalidSpec

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class OptionRow:
    """One option, as plain numbers."""

    counts: tuple[int, ...]  # by GPU type
    num_gpus: int  # of any type
    samples_per_second: float
    memory_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OptionSet:
    """The options of one job, one row each: GPUs of each type, and its speed on them.

    Speeds may change as a job progresses: the statistical efficiency of a large batch, for example,
    grows as a model learns. Which GPUs an option takes never changes, so that a running job keeps
    its option from one phase to the next. The last phase lasts until the job is done.
    """

    counts: IntArray  # (options, types)
    samples_per_second: FloatArray  # in the first phase
    memory_bytes: FloatArray  # of the fullest rank; 0: known to fit
    phase_ends_samples: tuple[float, ...] = ()  # work done when each phase but the last ends
    later_speeds: tuple[FloatArray, ...] = ()  # samples a second in each phase after the first

    def __post_init__(self) -> None:
        ends = self.phase_ends_samples
        if len(ends) != len(self.later_speeds):
            raise InvalidSpec(f"phases: {len(ends)} ends for {len(self.later_speeds) + 1} phases")
        if any(end <= before for before, end in pairwise((0.0, *ends))):
            raise InvalidSpec("phases: the ends must ascend, and the first be above 0 samples")
        for speeds in self.later_speeds:
            if not np.array_equal(speeds > 0, self.samples_per_second > 0):
                raise InvalidSpec("phases: every phase must have the same options, in one order")

    def __len__(self) -> int:
        return len(self.samples_per_second)

    @property
    def num_phases(self) -> int:
        """1 for a job whose speeds never change."""
        return 1 + len(self.later_speeds)

    def speeds(self, phase: int) -> FloatArray:
        """Samples a second of each option in a phase."""
        return self.later_speeds[phase - 1] if phase else self.samples_per_second

    def phase_end_samples(self, phase: int) -> float:
        """The work done when a phase ends; infinity where it lasts until the job is done."""
        ends = self.phase_ends_samples
        return ends[phase] if phase < len(ends) else math.inf

    def only(self, allowed: npt.NDArray[np.bool_]) -> OptionSet:
        """The same rows; those that are not allowed get speed 0, so that none is chosen."""
        return replace(
            self,
            samples_per_second=np.where(allowed, self.samples_per_second, 0.0),
            later_speeds=tuple(np.where(allowed, speeds, 0.0) for speeds in self.later_speeds),
        )

    def row(self, option: int, phase: int = 0) -> OptionRow | None:
        """One option in a phase; None where there is no such, or it cannot run."""
        speeds = self.speeds(phase)
        if not 0 <= option < len(speeds) or not speeds[option] > 0:
            return None
        counts = tuple(self.counts[option].tolist())
        memory_bytes = float(self.memory_bytes[option])
        return OptionRow(counts, sum(counts), float(speeds[option]), memory_bytes)
