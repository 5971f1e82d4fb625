"""Widths for speedup laws instead of tables: the closed forms of boa.md 2.3, by bisection on mu.

A width is a number of GPUs, at least 1 and not necessarily whole; the budget is the mean number of
GPUs rented. This is the theorem's own setting (arXiv:2406.15560), and what tables are held against.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from drystone.errors import InvalidSpec, NothingFits

_NUM_HALVINGS: Final = 200


class SpeedupLaw(Protocol):
    """How a job speeds up with its width."""

    def speedup(self, width: float) -> float:
        """Times as fast as on one GPU."""
        ...

    def width(self, multiplier: float) -> float:
        """The width that makes (1 + mu k) / s(k) least, not below 1."""
        ...


@dataclass(frozen=True, slots=True)
class PowerLaw:
    """s(k) = k^p."""

    exponent: float  # between 0 and 1, neither included

    def __post_init__(self) -> None:
        if not 0 < self.exponent < 1:
            raise InvalidSpec(f"the exponent is {self.exponent}, must be between 0 and 1")

    def speedup(self, width: float) -> float:
        """The law itself."""
        return math.pow(width, self.exponent)

    def width(self, multiplier: float) -> float:
        """The closed form p / (mu (1 - p)): boa.md 2.3, table."""
        return max(1.0, self.exponent / (multiplier * (1 - self.exponent)))


@dataclass(frozen=True, slots=True)
class AmdahlLaw:
    """s(k) = 1 / ((1 - f) + f / k)."""

    parallel_share: float  # f, between 0 and 1, neither included

    def __post_init__(self) -> None:
        if not 0 < self.parallel_share < 1:
            raise InvalidSpec(f"parallel_share is {self.parallel_share}, must be between 0 and 1")

    def speedup(self, width: float) -> float:
        """The law itself."""
        return 1 / ((1 - self.parallel_share) + self.parallel_share / width)

    def width(self, multiplier: float) -> float:
        """The closed form sqrt(f / (mu (1 - f))): boa.md 2.3, table."""
        share = self.parallel_share
        return max(1.0, math.sqrt(share / (multiplier * (1 - share))))


@dataclass(frozen=True, slots=True, kw_only=True)
class LawClass:
    """A class of jobs: arrivals a second, seconds of one job on one GPU, and its law."""

    arrivals_per_second: float
    mean_seconds: float
    law: SpeedupLaw

    def __post_init__(self) -> None:
        if not (self.arrivals_per_second > 0 and self.mean_seconds > 0):
            raise InvalidSpec("the arrival rate and the mean size must be above 0")

    @property
    def load(self) -> float:
        """GPUs that the class keeps busy if each job has one: rho in boa.md 2.2."""
        return self.arrivals_per_second * self.mean_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthAllocation:
    """The widths, what they use, and how long jobs take."""

    widths: tuple[float, ...]
    mean_num_gpus: float
    mean_completion_seconds: float
    multiplier: float  # job-hours that one more GPU-hour saves


def solve_widths(classes: Sequence[LawClass], mean_num_gpus: float) -> WidthAllocation:
    """The widths with the least mean completion time, for so many GPUs on average.

    The GPUs used fall as mu rises, so mu is found by bisection (boa.md 2.3), in its logarithm.
    """
    least = sum(job_class.load for job_class in classes)
    if not (classes and mean_num_gpus >= least):
        raise NothingFits(
            f"{mean_num_gpus:g} GPUs cannot keep up with the arriving jobs, which need {least:g}",
            hint="Raise the budget, or let fewer jobs in",
        )
    low, high = math.log(1e-15), math.log(1e15)
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        if _allocate(classes, math.exp(middle)).mean_num_gpus > mean_num_gpus:
            low = middle
        else:
            high = middle
    return _allocate(classes, math.exp(high))


def _allocate(classes: Sequence[LawClass], multiplier: float) -> WidthAllocation:
    widths = tuple(job_class.law.width(multiplier) for job_class in classes)
    # Jobs of each class that are present on average: rho / s(k), (BOA) in boa.md 2.2.
    present = [
        job_class.load / job_class.law.speedup(width)
        for job_class, width in zip(classes, widths, strict=True)
    ]
    return WidthAllocation(
        widths=widths,
        mean_num_gpus=sum(k * number for k, number in zip(widths, present, strict=True)),
        mean_completion_seconds=sum(present)
        / sum(job_class.arrivals_per_second for job_class in classes),
        multiplier=multiplier,
    )
