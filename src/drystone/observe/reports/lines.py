"""Which measures does a comparison show, in which words, and which way is better?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from drystone.observe.metrics import RunReport
from drystone.units import format_seconds


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table: a measure, how each policy did, and which way is better."""

    label: str
    values: tuple[float, ...]
    texts: tuple[str, ...]
    better: int = 0  # -1: less is better; 1: more; 0: neither
    rivals: frozenset[int] = frozenset()  # which policies may be compared in this

    def best(self) -> set[int]:
        """Which policies did best; nobody where all did the same."""
        known = [self.values[row] for row in self.rivals if not math.isnan(self.values[row])]
        if not self.better or len(known) < 2 or min(known) == max(known):
            return set()
        wanted = min(known) if self.better < 0 else max(known)
        return {row for row in self.rivals if self.values[row] == wanted}


def report_lines(reports: Sequence[RunReport]) -> list[Line]:
    """Every measure of the reports; those that say nothing here are left out."""

    def line(
        label: str, get: Callable[[RunReport], float], show: Callable[[float], str], better: int = 0
    ) -> Line:
        values = tuple(get(one) for one in reports)
        shown = tuple("-" if math.isnan(value) else show(value) for value in values)
        return Line(label, values, shown, better, everyone if better > 0 else thorough)

    # Whoever finished fewer jobs has it easy to be quick: less is better among the others only.
    everyone = frozenset(range(len(reports)))
    most = max((one.num_done for one in reports), default=0)
    thorough = frozenset(row for row in everyone if reports[row].num_done == most > 0)
    num_jobs = reports[0].num_jobs if reports else 0
    lines = [
        line("done", lambda one: one.num_done, lambda n: f"{n:.0f}/{num_jobs}", 1),
        line("unfinished", lambda one: one.num_unfinished, _count, -1),
        line("refused", lambda one: one.num_refused, _count, -1),
        line("mean completion", lambda one: one.mean_completion_seconds, _seconds, -1),
        line("median", lambda one: one.median_completion_seconds, _seconds, -1),
        line("99th percentile", lambda one: one.p99_completion_seconds, _seconds, -1),
        line("x lower bound", lambda one: one.lower_bound_ratio, lambda x: f"{x:.3f}", -1),
        line("queued", lambda one: one.mean_queue_seconds, _seconds, -1),
        line("makespan", lambda one: one.makespan_seconds, _seconds, -1),
    ]
    types = dict.fromkeys(gpu for one in reports for gpu in one.utilisation)
    lines += [line(f"{gpu} used", partial(_used, gpu), _share) for gpu in types]
    lines.append(line("restarts", lambda one: one.num_restarts, _count, -1))
    if any(one.num_interruptions for one in reports):
        lines.append(line("interruptions", lambda one: one.num_interruptions, _count))
    if any(one.num_deadlines for one in reports):
        num_due = reports[0].num_deadlines
        lines.append(
            line(
                "deadlines met",
                lambda one: one.num_deadlines_met,
                lambda n: f"{n:.0f}/{num_due}",
                1,
            )
        )
    lines.append(line("spent", lambda one: one.spent_dollars, lambda x: f"${x:,.2f}"))
    if any(one.spent_dollars for one in reports):
        lines.append(
            line("spent an hour", lambda one: one.spent_dollars_per_hour, lambda x: f"${x:,.2f}")
        )
    over = reports[0].fairness_over if reports else "jobs"
    lines += [
        line(f"fairness over {over}", lambda one: one.fairness, lambda x: f"{x:.3f}", 1),
        line("time a decision", lambda one: one.mean_decision_seconds, _seconds, -1),
        line("longest decision", lambda one: one.most_decision_seconds, _seconds, -1),
    ]
    return lines


def _used(gpu: str, report: RunReport) -> float:
    return report.utilisation.get(gpu, math.nan)


def _seconds(seconds: float) -> str:
    return format_seconds(seconds)


def _count(number: float) -> str:
    return f"{number:,.0f}"


def _share(share: float) -> str:
    return f"{share:.0%}"
