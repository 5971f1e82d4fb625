"""What was a job's loss, step by step, over all its launches? Read from what they reported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from drystone.run.control.progress import MOST_POINTS, RunProgress

Point = tuple[int, float, float]  # step, loss, seconds
ReadReports = Callable[[str, int, int], tuple[str, int]]  # job, epoch, offset: text, next offset
_MOST_LAUNCHES: Final = 40  # that are read, the last ones
_MOST_KEPT: Final = 1000  # curves of launches that are over


class Curves:
    """Curves of jobs; those of launches that are over are read once."""

    def __init__(self, read: ReadReports) -> None:
        self._read = read
        self._over: dict[tuple[str, int], list[Point]] = {}

    def curve(
        self, job_id: str, epochs: Sequence[int], latest: RunProgress | None = None
    ) -> list[Point]:
        """One line through all launches: what a later one did again counts as that one did it.

        `latest` is what was heard of the last launch, where somebody listened.
        """
        points: list[Point] = []
        for epoch in epochs[-_MOST_LAUNCHES:]:
            if epoch != epochs[-1]:
                found = self._of_launch(job_id, epoch)
            else:
                found = latest.curve if latest is not None else self._read_all(job_id, epoch)
            if found:
                points = [one for one in points if one[0] < found[0][0]] + found
        while len(points) > MOST_POINTS:
            points = points[::2]
        return points

    def _of_launch(self, job_id: str, epoch: int) -> list[Point]:
        """Of one that is over: only when nothing of it runs any more is the next one launched."""
        known = self._over.get((job_id, epoch))
        if known is None:
            known = self._read_all(job_id, epoch)
            if known:  # else its node may be back later
                self._over[job_id, epoch] = known
                while len(self._over) > _MOST_KEPT:
                    del self._over[next(iter(self._over))]
        return known

    def _read_all(self, job_id: str, epoch: int) -> list[Point]:
        progress, offset = RunProgress(), 0
        while True:
            text, after = self._read(job_id, epoch, offset)
            if after <= offset:
                return progress.curve
            progress.read(text, 0.0)
            offset = after
