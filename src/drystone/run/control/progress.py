"""How far is a run? Reads the lines that training processes report."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from drystone.run.job_output import BadReport, Report, parse_report

_KEPT: Final = 32  # steps whose times are remembered
_RANK_STEPS: Final = 5  # with the same division, whose median counts
_FIRST: Final = 2  # the first steps of a run are slow, and say nothing about the others
MOST_POINTS: Final = 2000  # of a curve


@dataclass(slots=True)
class RunProgress:
    """What one launch has reported so far."""

    step: int = -1  # -1: it has not started yet
    first_step: int = -1
    checkpoint_step: int = -1
    is_ready: bool = False  # a standby, to take over
    is_finished: bool = False
    has_left: bool = False
    heard_seconds: float = math.nan  # when the last line came, by the monotonic clock
    largest_stride: int = 0  # steps between two reports
    offset: int = 0  # of what was read
    num_bad_reports: int = 0  # lines that look like reports and cannot be read
    bad_report: str = ""  # what was wrong with the last of them
    peak_memory_bytes: int = 0
    loss: float = math.nan
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    by_rank: deque[Report] = field(default_factory=lambda: deque(maxlen=_RANK_STEPS))
    curve: list[tuple[int, float, float]] = field(default_factory=list)  # step, loss, seconds
    trials: tuple[tuple[str, float, float], ...] = ()  # plans that were tried at the launch
    kept: str = ""  # the one that goes on
    has_curve: bool = True  # else it is to be read from the launch's file

    def drop_curve(self) -> None:
        """Keep what is shown in lists: a curve is a third of a megabyte."""
        self.curve, self.seconds, self.has_curve = [], deque(maxlen=1), False

    @property
    def step_seconds(self) -> float:
        """The median of the last steps; nan until there are some."""
        return statistics.median(self.seconds) if len(self.seconds) >= _FIRST + 1 else math.nan

    @property
    def rank_seconds(self) -> tuple[tuple[int, ...], tuple[float, ...]] | None:
        """Samples of each rank, and the median of its computing, where the division is steady."""
        divisions = {report.batches for report in self.by_rank}
        if len(self.by_rank) < _RANK_STEPS or len(divisions) != 1 or divisions == {()}:
            return None
        columns = zip(*(report.compute_seconds for report in self.by_rank), strict=True)
        return divisions.pop(), tuple(statistics.median(column) for column in columns)

    def read(self, text: str, now_seconds: float) -> None:
        """Take in whole lines of reports; what is no report is passed over, bad ones counted."""
        for line in text.split("\n"):
            if not line.startswith("{"):
                continue
            try:
                report = parse_report(line)
            except BadReport as error:
                self.num_bad_reports += 1
                self.bad_report = str(error)
            else:
                self._take(report)
                self.heard_seconds = now_seconds

    def _take(self, report: Report) -> None:
        step = report.step
        if step < 0:
            return
        match report.event:
            case "ready":
                self.is_ready = True
            case "tried":
                self.trials, self.kept = report.trials, report.kept
            case "started":
                self.step = self.first_step = step
            case "step":
                self._take_step(step, report)
            case "checkpoint":
                self.checkpoint_step = max(self.checkpoint_step, step)
            case "left":
                self.has_left, self.step = True, step
            case "finished":
                self.is_finished, self.step = True, step

    def _take_step(self, step: int, report: Report) -> None:
        if self.first_step < 0:
            self.first_step = step - 1
        if self.curve:
            self.largest_stride = max(self.largest_stride, step - self.curve[-1][0])
        self.step = step
        self.loss = report.loss
        if report.step_seconds > 0 and step - self.first_step > _FIRST:
            self.seconds.append(report.step_seconds)
            self.by_rank.append(report)
        self.peak_memory_bytes = max(self.peak_memory_bytes, report.peak_memory_bytes)
        self.curve.append((step, report.loss, report.step_seconds))
        if len(self.curve) > MOST_POINTS:
            del self.curve[1::2]  # every second point will do


Point = tuple[int, float, float]  # step, loss, seconds
ReadReports = Callable[[str, int, int], tuple[str, int]]  # job, epoch, offset: text, next offset
_MOST_LAUNCHES: Final = 40  # that are read, the last ones
_MOST_KEPT: Final = 50  # curves of launches that are over


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
                is_known = latest is not None and latest.has_curve
                found = latest.curve if latest and is_known else self._read_all(job_id, epoch)
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
