"""How do a job's options change as it progresses? Phases: one set of options each.

Speeds may change with progress: the statistical efficiency of a large batch, for example, grows as
a model learns. Which GPUs an option takes never changes, so that a running job keeps its option
from one phase to the next.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from drystone.errors import InvalidSpec
from drystone.schedule.snapshot import FloatArray, OptionSet


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PhasedOptions:
    """Options by phase. The last phase has no end: it lasts as long as the job does."""

    ends_samples: tuple[float, ...]  # work done when each phase ends, ascending
    sets: tuple[OptionSet, ...]

    def __post_init__(self) -> None:
        ends = self.ends_samples
        if not self.sets or len(ends) != len(self.sets):
            raise InvalidSpec(f"phases: {len(ends)} ends for {len(self.sets)} sets of options")
        if ends[0] <= 0 or any(end <= before for before, end in pairwise(ends)):
            raise InvalidSpec("phases: the ends must ascend, and the first be above 0 samples")
        first = self.sets[0]
        for one in self.sets[1:]:
            if one is first:
                continue
            same_gpus = np.array_equal(one.counts, first.counts)
            if (
                not same_gpus
                or ((one.samples_per_second > 0) != (first.samples_per_second > 0)).any()
            ):
                raise InvalidSpec("phases: every phase must have the same options, in one order")

    def __len__(self) -> int:
        return len(self.sets)


Options = OptionSet | PhasedOptions


def phase_set(options: Options, phase: int) -> OptionSet:
    """The options of one phase; a job without phases has the same ones always."""
    return options.sets[phase] if isinstance(options, PhasedOptions) else options


def phase_end_samples(options: Options, phase: int) -> float:
    """The work done when a phase ends; infinity where it lasts until the job is done."""
    if not isinstance(options, PhasedOptions) or phase + 1 >= len(options):
        return math.inf
    return options.ends_samples[phase]


def option_seconds(options: Options, samples: float, *, done_samples: float = 0.0) -> FloatArray:
    """From `done_samples` to `samples` of work, by option; infinite where one cannot run."""
    total = np.zeros(len(phase_set(options, 0)))
    for work, speeds in _work_by_phase(options, samples, done_samples):
        with np.errstate(divide="ignore"):
            total += work / speeds
    return total


def fastest_seconds(options: Options, samples: float, *, done_samples: float = 0.0) -> float:
    """The same for a job that has its fastest option in every phase: nothing can be quicker."""
    total = 0.0
    for work, speeds in _work_by_phase(options, samples, done_samples):
        fastest = float(speeds.max(initial=0.0))
        total += work / fastest if fastest > 0 else math.inf
    return total


def _work_by_phase(
    options: Options, samples: float, done_samples: float
) -> list[tuple[float, FloatArray]]:
    """Samples that each phase still has to do, and the speeds in it."""
    found = []
    begin = done_samples
    for phase in range(len(options) if isinstance(options, PhasedOptions) else 1):
        end = min(samples, phase_end_samples(options, phase))
        if end > begin:
            found.append((end - begin, phase_set(options, phase).samples_per_second))
            begin = end
    return found
