"""Errors on sources that were left out of all choosing: leave-one-source-out.

A figure measured on the runs that constants were chosen by says little about the next run. So each
source is judged by the constants that the same rule chooses without it (`describe/chosen.py`), and
sources count, not rows: the median error and the 90th percentile of each, then the median of these
over sources.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any, Protocol

from drystone.describe.chosen import name_without
from drystone.describe.gpu import GpuSpec
from drystone.describe.recipe import Recipe


class Judged(Protocol):
    """A reading and its estimate by what is known without its source."""

    @property
    def dataset(self) -> str:
        """The source."""

    @property
    def unseen_error(self) -> float:
        """Relative, signed."""


def recipe_without(recipe: Recipe, source: str) -> Recipe:
    """The same recipe under its launcher as it would be if nobody had seen the source."""
    return replace(recipe, launcher=name_without(recipe.launcher, source))


def gpu_without(gpu: GpuSpec, source: str) -> GpuSpec:
    """The same GPU type of its generation as it would be if nobody had seen the source."""
    return replace(gpu, architecture=name_without(gpu.architecture, source))


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceErrors:
    """The errors on one source, by what is known without it."""

    source: str
    evaluated: int
    median_abs_error: float
    p90_abs_error: float
    bias: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOutErrors:
    """Over sources, each counting equally."""

    sources: tuple[SourceErrors, ...]

    @property
    def median_abs_error(self) -> float:
        """The median over sources of the median error."""
        return median(errors.median_abs_error for errors in self.sources) if self.sources else 0.0

    @property
    def p90_abs_error(self) -> float:
        """The median over sources of the 90th percentile."""
        return median(errors.p90_abs_error for errors in self.sources) if self.sources else 0.0

    def to_json(self) -> dict[str, Any]:
        """Both medians, and every source."""
        return {
            "num_sources": len(self.sources),
            "median_abs_error": self.median_abs_error,
            "p90_abs_error": self.p90_abs_error,
            "by_source": {
                errors.source: {
                    "evaluated": errors.evaluated,
                    "median_abs_error": errors.median_abs_error,
                    "p90_abs_error": errors.p90_abs_error,
                    "bias": errors.bias,
                }
                for errors in self.sources
            },
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeCover:
    """Readings of left-out sources against the stated range, a mean over sources."""

    num_sources: int
    inside: float
    above: float


def range_cover(readings: Iterable[tuple[str, float, tuple[float, float]]]) -> RangeCover:
    """Of (source, measured, range): how many lie inside and above, sources counting alike."""
    by_source: dict[str, list[tuple[bool, bool]]] = {}
    for source, measured, (low, high) in readings:
        lies = (low <= measured <= high, measured > high)
        by_source.setdefault(source, []).append(lies)
    shares = [
        (mean(inside for inside, _ in some), mean(above for _, above in some))
        for some in by_source.values()
    ]
    return RangeCover(
        num_sources=len(shares),
        inside=mean(inside for inside, _ in shares) if shares else 0.0,
        above=mean(above for _, above in shares) if shares else 0.0,
    )


def left_out_errors(runs: Iterable[Judged]) -> LeftOutErrors:
    """Each source by itself, every reading of it."""
    by_source: dict[str, list[float]] = {}
    for run in runs:
        by_source.setdefault(run.dataset, []).append(run.unseen_error)
    return LeftOutErrors(
        sources=tuple(_source_errors(name, by_source[name]) for name in sorted(by_source))
    )


def _source_errors(source: str, errors: Sequence[float]) -> SourceErrors:
    sizes = sorted(abs(error) for error in errors)
    return SourceErrors(
        source=source,
        evaluated=len(sizes),
        median_abs_error=median(sizes),
        p90_abs_error=_quantile(sizes, 0.9),
        bias=median(errors),
    )


def _quantile(sizes: Sequence[float], share: float) -> float:
    """Linear between the two nearest of sorted sizes."""
    place = share * (len(sizes) - 1)
    below = int(place)
    above = min(below + 1, len(sizes) - 1)
    return sizes[below] + (place - below) * (sizes[above] - sizes[below])
