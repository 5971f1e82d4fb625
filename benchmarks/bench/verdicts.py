"""What do the figures of a run amount to? Each against its range."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bench.measure import Record
from bench.spec import Benchmark, Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One figure, as it came out."""

    benchmark: Benchmark
    figure: Figure
    value: float | None  # None: the benchmark did not print it
    record: Record

    @property
    def is_inside(self) -> bool:
        """Whether it lies in its range; a figure that is missing does not."""
        return self.value is not None and self.figure.is_inside(self.value)

    @property
    def word(self) -> str:
        """For the table."""
        if self.value is None:
            return "**missing**"
        if self.figure.low is None and self.figure.high is None:
            return "-"
        return "yes" if self.is_inside else "**no**"

    @property
    def found(self) -> str:
        """The value with its unit."""
        return self.figure.show(self.value) if self.value is not None else "-"


def judge(benchmark: Benchmark, record: Record, *, is_quick: bool = False) -> list[Verdict]:
    """Every figure of a benchmark that ran; a quick run may print fewer of them."""
    if record.skipped or record.failed:
        return []
    verdicts = []
    for figure in benchmark.figures:
        value = record.figures.get(figure.key)
        assert not isinstance(value, list), f"{figure.key} is a curve"
        if value is not None or not is_quick:
            verdicts.append(Verdict(benchmark=benchmark, figure=figure, value=value, record=record))
    return verdicts


def outside(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Those that are not where they should be."""
    return [one for one in verdicts if not one.is_inside]
