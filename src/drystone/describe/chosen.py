"""Constants that were chosen by looking at published runs, and what each is without one source.

Most numbers of the estimates come from code, papers and data sheets. The others were chosen because
published readings speak for them. `data/chosen.json` lists those, with the runs behind each and the
value that the same rule gives when all runs of one source are left out
(`benchmarks/choose_constants.py` writes it). A name such as `accelerate without fmsaccel` then
means that launcher as it would be if nobody had ever seen that source.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

CHOSEN_FILE: Final = Path(__file__).parent / "data" / "chosen.json"
_WITHOUT: Final = " without "


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One constant: whose it is, what was chosen, and on which evidence."""

    measure: str  # memory or speed: which readings speak for it
    kind: str  # launcher, speed (what a launcher's code costs) or generation
    owners: tuple[str, ...]  # the launchers or generations that share it
    field: str
    value: float  # with every source
    prior: float  # what is taken where no source is left: the value of the nearest kin
    candidates: tuple[float, ...]
    num_runs: Mapping[str, int]  # by source: whose estimate depends on it
    without: Mapping[str, float]  # by source that is left out

    def owner_of(self, launcher: str) -> str:
        """Whose it is, in an estimate for that launcher: the launcher's, or a generation's."""
        return launcher if launcher in self.owners else self.owners[0]


def choices_of(launcher: str, generation: str) -> tuple[Choice, ...]:
    """The constants behind an estimate that published runs were looked at for."""
    return tuple(
        choice
        for choice in load_choices()
        if (generation if choice.kind == "generation" else launcher) in choice.owners
    )


@cache
def load_choices() -> tuple[Choice, ...]:
    """Every constant that was chosen."""
    read: dict[str, Any] = json.loads(CHOSEN_FILE.read_text(encoding="utf-8"))
    return tuple(
        Choice(
            **entry | {"owners": tuple(entry["owners"]), "candidates": tuple(entry["candidates"])}
        )
        for entry in read["choices"]
    )


def name_without(name: str, source: str) -> str:
    """The name of a launcher or a generation as it would be without one source."""
    return f"{name}{_WITHOUT}{source}"


def split_name(name: str) -> tuple[str, str]:
    """The plain name, and the source that is left out (empty: none)."""
    plain, _, source = name.partition(_WITHOUT)
    return plain, source


def values_without(source: str, *, kind: str, owner: str) -> dict[str, Any]:
    """The fields of one owner that are other numbers where a source is left out."""
    return {
        choice.field: choice.without[source]
        for choice in load_choices()
        if choice.kind == kind and owner in choice.owners and source in choice.without
    }
