"""How a benchmark hands on what it found: one last line for programs, after the lines for people.

`make bench` (the folder `bench`) reads it. A figure is a number; a list of numbers is a curve.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

Figures: TypeAlias = dict[str, float | list[float]]
_FIGURES = "figures: "
_SKIPPED = "not measured: "


def print_figures(figures: Mapping[str, float | Sequence[float]]) -> None:
    """The last line of a benchmark. NaN and infinity are no figures, and an error."""
    plain = {name: _plain(value) for name, value in figures.items()}
    print(_FIGURES + json.dumps(plain, allow_nan=False), flush=True)


def print_skip(reason: str) -> None:
    """The last line of a benchmark that cannot run here."""
    print(_SKIPPED + reason, flush=True)


def read_figures(output: str) -> Figures | None:
    """What the output of a benchmark says in the end; None where it says nothing."""
    lines = [line for line in output.splitlines() if line.startswith(_FIGURES)]
    found: Figures | None = json.loads(lines[-1].removeprefix(_FIGURES)) if lines else None
    return found


def read_skip(output: str) -> str:
    """Why a benchmark could not run here; empty where it could."""
    lines = [line for line in output.splitlines() if line.startswith(_SKIPPED)]
    return lines[-1].removeprefix(_SKIPPED) if lines else ""


def _plain(value: float | Sequence[float]) -> float | list[float]:
    if isinstance(value, Iterable):
        return [float(one) for one in value]
    return float(value)  # also of NumPy's kinds
