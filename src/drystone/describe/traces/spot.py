"""Spot traces: in which zones a node could be had, when and at what price, from a CSV of changes.

    zone,seconds,available,spot_dollars_per_hour
    us-east-1c,0,1,1.2781
    us-east-1c,3900,0,1.2781
    us-east-1c,3930810,,

A row holds until the next one of its zone; the last row of a zone is its end and nothing else.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from drystone.describe.market import Outage, PriceChange
from drystone.errors import UnreadableFile

_COLUMNS: Final = ("zone", "seconds", "available", "spot_dollars_per_hour")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SpotTrace:
    """Zones over time, in equal ticks: arrays are (zones, ticks)."""

    zones: tuple[str, ...]
    tick_seconds: float
    is_available: npt.NDArray[np.bool_]
    dollars_per_hour: npt.NDArray[np.float64]

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return float(self.is_available.shape[1] * self.tick_seconds)

    def price_changes(self, zone: str) -> tuple[PriceChange, ...]:
        """Every price of a zone that differs from the one before, the first one included."""
        prices = self.dollars_per_hour[self.zones.index(zone)]
        starts = np.flatnonzero(np.diff(prices, prepend=np.nan) != 0)
        return tuple(
            PriceChange(
                at_seconds=float(tick * self.tick_seconds),
                price_dollars_per_hour=float(prices[tick]),
            )
            for tick in starts.tolist()
        )

    def outages(self, zone: str) -> tuple[Outage, ...]:
        """The times in which a zone had no node."""
        is_out = ~self.is_available[self.zones.index(zone)]
        edges = np.flatnonzero(np.diff(is_out.astype(np.int8), prepend=0, append=0))
        return tuple(
            Outage(
                from_seconds=float(first * self.tick_seconds),
                until_seconds=float(end * self.tick_seconds),
            )
            for first, end in edges.reshape(-1, 2).tolist()
        )

    def window(self, zones: Sequence[str], start_seconds: float, seconds: float) -> SpotTrace:
        """Some zones for some time."""
        rows = [self.zones.index(zone) for zone in zones]
        first, number = (round(time / self.tick_seconds) for time in (start_seconds, seconds))
        if first + number > self.is_available.shape[1]:
            raise UnreadableFile(f"the trace ends before {start_seconds + seconds:.0f} s")
        ticks = slice(first, first + number)
        return SpotTrace(
            zones=tuple(zones),
            tick_seconds=self.tick_seconds,
            is_available=self.is_available[rows, ticks],
            dollars_per_hour=self.dollars_per_hour[rows, ticks],
        )


def load_spot_trace(path: Path, *, tick_seconds: float = 60.0) -> SpotTrace:
    """All zones of a file, from their common start to the first end of one."""
    changes: dict[str, list[tuple[float, bool, float]]] = {}
    ends: dict[str, float] = {}
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UnreadableFile(f"cannot be read: {error}", where=str(path)) from None
    with io.StringIO(text, newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != _COLUMNS:
            raise UnreadableFile(
                f"a spot trace has the columns {', '.join(_COLUMNS)}", where=str(path)
            )
        for row in reader:
            zone = row["zone"]
            try:
                ends[zone] = float(row["seconds"])
                if row["available"]:
                    change = (ends[zone], row["available"] == "1", float(row[_COLUMNS[3]]))
                    changes.setdefault(zone, []).append(change)
            except ValueError as error:
                where = f"{path}, line {reader.line_num}"
                raise UnreadableFile(f"not a number: {error}", where=where) from None
    if not changes:
        raise UnreadableFile("the spot trace has no rows", where=str(path))
    times = np.arange(int(min(ends.values()) // tick_seconds)) * tick_seconds
    available, dollars = [], []
    for rows in changes.values():
        seconds, is_available, price = (np.array(column) for column in zip(*rows, strict=True))
        holds = np.maximum(np.searchsorted(seconds, times, side="right") - 1, 0)
        available.append(is_available[holds])
        dollars.append(price[holds])
    return SpotTrace(
        zones=tuple(changes),
        tick_seconds=tick_seconds,
        is_available=np.array(available, dtype=np.bool_),
        dollars_per_hour=np.array(dollars, dtype=np.float64),
    )
