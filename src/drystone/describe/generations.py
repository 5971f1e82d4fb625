"""GPU generations: everything that belonging to one implies, from `data/generations.csv`.

A row must be complete: a generation that is not there, or a fact that is missing, is an error that
names it, never the fact of another generation. The numbers are the calibrated part of the speed
estimate, and belong to a generation, never to a dataset. The column `source` says how each was
obtained: *published* (the source is named), *calibrated* (fitted on published training runs, with
each dataset held out once to see that the rest predicts it; docs/speed.md), or *assumed* (like the
nearest kin that was measured). In all rows `flops_per_tile_slot` is the peak of the best known part
over its number of multiprocessors (data sheets), `bandwidth_share` is published (STREAM-like copies
reach 85 to 92 % on HBM), and `wave_share` and `ramp_depth` are calibrated.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Final

from drystone.describe.chosen import split_name, values_without
from drystone.describe.gpu import GpuSpec
from drystone.errors import InvalidSpec, UnknownName
from drystone.units import MiB

FILE: Final = Path(__file__).parent / "data" / "generations.csv"
_PLACE: Final = "describe/data/generations.csv"
_WORDS: Final = ("name", "aliases", "source")


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """How GPUs of a generation behave in training, relative to their data sheets."""

    name: str  # as the column `architecture` of gpus.csv has it
    aliases: tuple[str, ...]
    ceiling_share: float  # best matrix multiplication over peak, where the catalogue has none
    sustained_share: float  # of that ceiling, inside a long training step: clocks, power, caches
    flops_per_tile_slot: float  # peak 16-bit rate of one multiprocessor: how much runs at once
    attention_forward_share: float  # fused attention over the 16-bit peak, long sequences
    attention_backward_share: float
    cudnn_attention_gain: float  # rate of cuDNN's attention over FlashAttention 2
    host_slowness: float  # time its usual hosts take to enqueue work; an H100 host is 1
    reference_watts: float  # the power limit that the shares were measured at
    bandwidth_share: float  # of the memory's bandwidth that copies reach
    wave_share: float  # empty part of the last wave of tiles
    ramp_depth: float  # inner depth that filling and draining a tile costs
    workspace_mib: float  # what cuBLAS and the like allocate through torch
    source: str

    @property
    def workspace_bytes(self) -> float:
        """What cuBLAS and the like allocate through torch."""
        return self.workspace_mib * MiB


@cache
def load_generations() -> tuple[Generation, ...]:
    """Every generation that is known."""
    with FILE.open(encoding="utf-8", newline="") as file:
        return parse_generations(file)


def parse_generations(lines: Iterable[str]) -> tuple[Generation, ...]:
    """Generations from lines of CSV; a row that lacks a fact is an error that names both."""
    found = tuple(_parse_row(row) for row in csv.DictReader(lines))
    names = [_key(name) for one in found for name in (one.name, *one.aliases)]
    for name in names:
        if names.count(name) > 1:
            raise InvalidSpec(f"two generations are called {name!r}", where=_PLACE)
    return found


def find_generation(name: str) -> Generation:
    """The generation that a name means, whatever its case."""
    by_key = {_key(known): one for one in load_generations() for known in (one.name, *one.aliases)}
    if _key(name) not in by_key:
        error = UnknownName("GPU generation", name, [one.name for one in load_generations()])
        error.hint += (
            ". What a generation implies for speed is never guessed: add a complete row to "
            f"{_PLACE}, or describe the type as `like` a known one without `architecture`"
        )
        raise error
    return by_key[_key(name)]


@cache
def generation_of(gpu: GpuSpec) -> Generation:
    """The generation of a GPU type; also `NAME without SOURCE` (`describe/chosen.py`)."""
    plain, source = split_name(gpu.architecture)
    try:
        found = find_generation(plain)
        chosen = values_without(source, kind="generation", owner=found.name) if source else {}
        return replace(found, **chosen) if chosen else found
    except UnknownName as error:
        error.where = error.where or f"GPU type {gpu.name}"
        raise


def _parse_row(row: dict[str, str]) -> Generation:
    where = f"{_PLACE}: {row.get('name') or 'a row without a name'}"
    facts: dict[str, float] = {}
    for name in (one.name for one in fields(Generation) if one.name not in _WORDS):
        text = row.get(name) or ""
        try:
            facts[name] = float(text)
        except ValueError:
            facts[name] = math.nan
        if not (math.isfinite(facts[name]) and facts[name] > 0):
            wrong = f"is {text!r}, must be a number above 0" if text else "is missing"
            raise InvalidSpec(
                f"`{name}` {wrong}", where=where, hint="A generation needs every column"
            )
    if not row.get("name") or not row.get("source"):
        raise InvalidSpec("`name` and `source` are needed", where=where)
    aliases = tuple(alias.strip() for alias in (row.get("aliases") or "").split(";"))
    return Generation(
        name=row["name"],
        aliases=tuple(alias for alias in aliases if alias),
        source=row["source"],
        **facts,
    )


def _key(name: str) -> str:
    return " ".join(name.lower().split())
