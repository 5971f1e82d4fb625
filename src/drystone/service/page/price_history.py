"""What was a GPU of each type worth, and what did it cost, over time? A fold over the log.

It reads on from where it stopped, so an answer costs what is new; lines that say nothing about
prices (by far the most) stay in the database.
"""

from __future__ import annotations

import threading
from typing import Any, Final

from drystone.run.control.store import Store
from drystone.run.events import load_line
from drystone.units import HOUR_SECONDS

Table = dict[str, Any]
Points = list[tuple[float, float]]
_CHUNK: Final = 20_000
_MOST_KEPT: Final = 20_000  # points of one line; then every second of the older half goes
_MOST_SHOWN: Final = 300
_WANTED: Final = ("Decided", "ClusterDescribed", "NodeJoined")


class PriceHistory:
    """Worth and dollars by GPU type, as far as the log was read."""

    def __init__(self, store: Store) -> None:
        self._store, self._lock, self._sequence = store, threading.Lock(), 0
        self._worth: dict[str, Points] = {}
        self._dollars: dict[str, Points] = {}

    def catch_up(self) -> None:
        """Read what is new."""
        with self._lock:
            read = self._store.read_log
            while lines := read(after=self._sequence, most=_CHUNK, kinds=_WANTED):
                for line in lines:
                    self._take(load_line(line.body))
                self._sequence = lines[-1].sequence
                if len(lines) < _CHUNK:
                    return

    def view(self, now_seconds: float, hours: float) -> Table:
        """`{worth: {gpu: [[time, worth]]}, dollars_per_hour: ..., now_seconds}`."""
        self.catch_up()
        since = now_seconds - hours * HOUR_SECONDS
        with self._lock:
            return {
                "worth": {gpu: shown(one, since) for gpu, one in self._worth.items()},
                "dollars_per_hour": {gpu: shown(one, since) for gpu, one in self._dollars.items()},
                "now_seconds": now_seconds,
            }

    def _take(self, event: Table) -> None:
        at = float(event["time_seconds"])
        match event["event"]:
            case "Decided":
                for name, value in event["numbers"].items():
                    if name.startswith("price_") and name != "price_dollars_per_hour":
                        put(self._worth.setdefault(name.removeprefix("price_"), []), at, value)
            case "ClusterDescribed":
                for gpu, price in event["dollars_per_gpu_hour"]:
                    put(self._dollars.setdefault(gpu, []), at, price)
            case "NodeJoined":
                spec, price = event["spec"], float(event["price_dollars_per_hour"])
                put(self._dollars.setdefault(spec["gpu"], []), at, price / spec["num_gpus"])


def put(points: Points, at: float, value: float) -> None:
    """From now on it is this much."""
    if points and points[-1][0] >= at:
        points[-1] = (points[-1][0], value)
    elif not points or points[-1][1] != value:
        points.append((at, value))
    if len(points) > _MOST_KEPT:
        del points[1 : _MOST_KEPT // 2 : 2]


def shown(points: Points, since: float, most: int = _MOST_SHOWN) -> list[list[float]]:
    """The points from a time on, and the one that held then; of very many, evenly fewer."""
    inside = [one for one in points if one[0] >= since]
    before = points[: len(points) - len(inside)][-1:]
    if len(inside) > most:
        last = len(inside) - 1
        inside = [inside[round(number * last / (most - 1))] for number in range(most)]
    return [[round(at, 1), float(f"{value:.5g}")] for at, value in (*before, *inside)]
