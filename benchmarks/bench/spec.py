"""What a line of the table of benchmarks says: a script, the figures it prints, their ranges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# How a value in base units is shown: factor, digits after the point.
UNITS: Final = {
    "s": (1.0, 2),
    "ms": (1e3, 1),
    "h": (1.0, 3),
    "%": (100.0, 1),
    "x": (1.0, 3),
    "/s": (1.0, 0),
    "MiB": (1.0, 1),
    "GB": (1e-9, 2),
    "$": (1.0, 2),
    "": (1.0, 0),
    "power": (1.0, 2),
}
_WORDS: Final = {"x": " times", "": "", "/s": "/s", "power": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number, where it is to lie, and who says so."""

    key: str  # in the last line of the benchmark's output
    name: str
    unit: str
    low: float | None = None
    high: float | None = None
    source: str = ""  # of the range
    by_clock: bool = False  # measured by the clock, so that other work on the machine adds to it
    known: str = ""  # where a figure that lies outside has been explained

    def is_inside(self, value: float) -> bool:
        """Whether the value lies in its range; without a range every value does."""
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    def show(self, value: float) -> str:
        """`12.3 ms`."""
        factor, digits = UNITS[self.unit]
        shown = value * factor
        if 0 < abs(shown) < 10**-digits and digits:
            text = f"{shown:.2g}"
        else:
            text = f"{shown:,.{digits}f}"
        return text + _WORDS.get(self.unit, f" {self.unit}")

    def show_range(self) -> str:
        """`at most 50 ms`, `0.95 to 1.05 times`."""
        if self.low is not None and self.high is not None:
            if self.low == self.high:
                return f"exactly {self._bound(self.low)}"
            factor, _ = UNITS[self.unit]
            return f"{self.low * factor:g} to {self._bound(self.high)}"
        if self.high is not None:
            return f"at most {self._bound(self.high)}"
        if self.low is not None:
            return f"at least {self._bound(self.low)}"
        return "none stated"

    def _bound(self, value: float) -> str:
        factor, _ = UNITS[self.unit]
        text = f"{float(f'{value * factor:.10g}'):,.10g}"
        return text + _WORDS.get(self.unit, f" {self.unit}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A script of this folder, run as a process of its own."""

    name: str
    about: str  # the question that it answers
    script: str
    arguments: str = ""  # {data} stands for the folder with data that is not shipped
    quick: str | None = None  # arguments of a quick run; None: left out of it
    limit_seconds: float
    needs: tuple[str, ...] = ()  # packages
    by_name_only: str = ""  # why it is not among all
    figures: tuple[Figure, ...]

    @property
    def needs_data(self) -> bool:
        """Whether it reads what is not shipped."""
        return "{data}" in self.arguments

    def command(self, *, data: str = "DIR", is_quick: bool = False) -> list[str]:
        """The words after `python`, from the top of the repository."""
        words = (self.quick or "") if is_quick else self.arguments
        return [f"benchmarks/{self.script}", *words.format(data=data).split()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Benchmarks that belong together, under one heading."""

    title: str
    benchmarks: tuple[Benchmark, ...]


def at_most(
    key: str, name: str, high: float, unit: str, source: str, *, clock: bool = False,
    known: str = "",
) -> Figure:  # fmt: skip
    """A figure that must not be higher."""
    return Figure(
        key=key, name=name, unit=unit, high=high, source=source, by_clock=clock, known=known
    )


def at_least(
    key: str, name: str, low: float, unit: str, source: str, *, clock: bool = False,
    known: str = "",
) -> Figure:  # fmt: skip
    """A figure that must not be lower."""
    return Figure(
        key=key, name=name, unit=unit, low=low, source=source, by_clock=clock, known=known
    )


def within(
    key: str, name: str, low: float, high: float, unit: str, source: str, *, clock: bool = False
) -> Figure:
    """A figure with two ends."""
    return Figure(key=key, name=name, unit=unit, low=low, high=high, source=source, by_clock=clock)


def shown(key: str, name: str, unit: str, *, clock: bool = False) -> Figure:
    """A figure that nobody has promised anything about."""
    return Figure(key=key, name=name, unit=unit, by_clock=clock)
