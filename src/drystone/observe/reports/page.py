"""A comparison of policies as one HTML page with everything in it: no network, no library.

The page is a template, a style sheet and a script (`assets/`), and the runs as JSON. The script
draws; this file decides what there is to draw.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from drystone.describe.job import JobSpec
from drystone.observe.metrics import RunReport
from drystone.observe.reports.series import (
    completion_curve,
    gpu_tiles,
    price_curves,
    spend_curve,
    use_by_type,
    waiting_jobs,
)
from drystone.observe.simulation import PolicyRun, Scenario
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
        values = tuple(get(report) for report in reports)
        shown = tuple("-" if math.isnan(value) else show(value) for value in values)
        return Line(label, values, shown, better, everyone if better > 0 else thorough)

    # Whoever finished fewer jobs has it easy to be quick: less is better among the others only.
    everyone = frozenset(range(len(reports)))
    most = max((report.num_done for report in reports), default=0)
    thorough = frozenset(row for row in everyone if reports[row].num_done == most > 0)
    num_jobs = reports[0].num_jobs if reports else 0
    lines = [
        line("done", lambda report: report.num_done, lambda n: f"{n:.0f}/{num_jobs}", 1),
        line("unfinished", lambda report: report.num_unfinished, _count, -1),
        line("refused", lambda report: report.num_refused, _count, -1),
        line("mean completion", lambda report: report.mean_completion_seconds, _seconds, -1),
        line("median", lambda report: report.median_completion_seconds, _seconds, -1),
        line("99th percentile", lambda report: report.p99_completion_seconds, _seconds, -1),
        line("x lower bound", lambda report: report.lower_bound_ratio, _ratio, -1),
        line("queued", lambda report: report.mean_queue_seconds, _seconds, -1),
        line("makespan", lambda report: report.makespan_seconds, _seconds, -1),
    ]
    shared = line("x shared bound", lambda report: report.shared_bound_ratio, _ratio, -1)
    lines += [] if all(map(math.isnan, shared.values)) else [shared]
    types = dict.fromkeys(gpu for report in reports for gpu in report.utilisation)
    lines += [line(f"{gpu} used", partial(_used, gpu), _share) for gpu in types]
    lines.append(line("restarts", lambda report: report.num_restarts, _count, -1))
    if any(report.num_interruptions for report in reports):
        lines.append(line("interruptions", lambda report: report.num_interruptions, _count))
    if any(report.num_deadlines for report in reports):
        num_due = reports[0].num_deadlines
        lines.append(
            line(
                "deadlines met",
                lambda report: report.num_deadlines_met,
                lambda n: f"{n:.0f}/{num_due}",
                1,
            )
        )
    lines.append(line("spent", lambda report: report.spent_dollars, lambda x: f"${x:,.2f}"))
    if any(report.spent_dollars for report in reports):
        lines.append(
            line(
                "spent an hour",
                lambda report: report.spent_dollars_per_hour,
                lambda x: f"${x:,.2f}",
            )
        )
    over = reports[0].fairness_over if reports else "jobs"
    lines += [
        line(f"fairness over {over}", lambda report: report.fairness, _ratio, 1),
        line("time a decision", lambda report: report.mean_decision_seconds, _seconds, -1),
        line("longest decision", lambda report: report.most_decision_seconds, _seconds, -1),
    ]
    return lines


def _used(gpu: str, report: RunReport) -> float:
    return report.utilisation.get(gpu, math.nan)


def _seconds(seconds: float) -> str:
    return format_seconds(seconds)


def _count(number: float) -> str:
    return f"{number:,.0f}"


def _ratio(ratio: float) -> str:
    return f"{ratio:.3f}"


def _share(share: float) -> str:
    return f"{share:.0%}"


_ASSETS: Final = Path(__file__).parent / "assets"


def render_page(
    scenario: Scenario, runs: Sequence[PolicyRun], *, title: str, remarks: Sequence[str] = ()
) -> str:
    """The page."""
    drawn = [_run(scenario, run) for run in runs]
    content = {
        "title": title,
        "headline": headline([run.report for run in runs]),
        "remarks": list(remarks),
        "table": _table([run.report for run in runs]),
        "jobs": _drawn_jobs(scenario.jobs, drawn),
        "budget": _finite(scenario.budget_dollars_per_hour),
        "runs": drawn,
    }
    # `<` would let a name in the data end the script element.
    text = json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "TITLE": html.escape(title),
        "STYLE": _asset("page.css"),
        "SCRIPT": _asset("page.js"),
        "CONTENT": text,
    }
    page = _asset("page.html")
    for name, part in parts.items():
        page = page.replace(f"%%{name}%%", part, 1)
    return page


def headline(reports: Sequence[RunReport]) -> str:
    """The result in a sentence; it compares only policies that finished the same number of jobs."""
    most = max((report.num_done for report in reports), default=0)
    complete = sorted(
        (report for report in reports if report.num_done == most and most > 0),
        key=lambda report: report.mean_completion_seconds,
    )
    if not complete:
        return "No policy finished a job."
    best = complete[0]
    mean = format_seconds(best.mean_completion_seconds)
    text = f"{best.policy} finishes {best.num_done} of {best.num_jobs} jobs, {mean} on average"
    if len(complete) > 1:
        second = complete[1]
        ratio = second.mean_completion_seconds / best.mean_completion_seconds
        text += f"; {second.policy}, the next best, takes {ratio:.2f} times as long"
    others = len(reports) - len(complete)
    if others:
        text += f". {others} of the policies finished fewer jobs"
    return text + "."


def _table(reports: Sequence[RunReport]) -> dict[str, Any]:
    return {
        "policies": [report.policy for report in reports],
        "lines": [
            {"label": line.label, "texts": list(line.texts), "best": sorted(line.best())}
            for line in report_lines(reports)
        ],
    }


def _run(scenario: Scenario, run: PolicyRun) -> dict[str, Any]:
    end = run.end_seconds
    return {
        "policy": run.report.policy,
        "end": end,
        "done": run.report.num_done,
        "completion": completion_curve(scenario.jobs, run.log),
        "use": use_by_type(scenario.nodes, run.log, end),
        "waiting": waiting_jobs(scenario.jobs, run.log, end),
        "spend": spend_curve(run.record, end, run.report.spent_dollars),
        "prices": price_curves(run.record, end),
        "gpus": gpu_tiles(scenario.nodes, run.log, end, scenario.jobs),
    }


def _drawn_jobs(jobs: Sequence[JobSpec], drawn: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """What the page says of the jobs that it draws; their tiles are numbered anew."""
    tiles = [tile for run in drawn for tile in run["gpus"]["tiles"]]
    rows = sorted({tile[5] for tile in tiles})
    number = {row: index for index, row in enumerate(rows)}
    for tile in tiles:
        tile[5] = number[tile[5]]
    chosen = [jobs[row] for row in rows]
    return [[job.id, job.model, job.owner, round(job.submit_seconds)] for job in chosen]


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
