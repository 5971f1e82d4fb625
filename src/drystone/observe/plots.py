"""Plots of a check, of plans and of a frontier, drawn with Matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from drystone.errors import MissingExtra, RequestError
from drystone.observe.check.accuracy import CheckReport, Errors
from drystone.observe.frontier import FrontierPoint
from drystone.plan.plan import Plan, Way
from drystone.schedule.budget.frontier import Frontier
from drystone.units import GiB

# Okabe and Ito's colours, for colour-blind people too; marks tell series apart without any.
COLOURS: Final = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7"),
    *("#e69f00", "#56b4e9", "#8c6bb1", "#7f7f7f"),
)
MARKS: Final = "osD^vPX*"


def plot_check(report: CheckReport, path: Path) -> None:
    """Predicted against measured, both logarithmic: a colour per dataset, bands at 10 and 25 %."""
    if not report.runs:
        raise RequestError("there is nothing to draw: no row could be evaluated")
    pyplot = load_pyplot(path)
    figure, axes = pyplot.subplots(figsize=(9, 7), dpi=140, layout="constrained")
    _draw_bands(axes, report)
    _draw_datasets(axes, report)
    unit = "GiB a GPU" if report.measure == "memory" else "tokens/s a GPU"
    axes.set(xscale="log", yscale="log", xlabel=f"measured, {unit}", ylabel=f"estimated, {unit}")
    total = Errors.of(report.first_readings)
    axes.set_title(
        f"Estimated {report.measure} against {len(report.runs)} published readings: "
        f"median error {total.median_abs_error:.1%}, 90th percentile {total.p90_abs_error:.0%}",
        fontsize=11,
    )
    axes.legend(loc="upper left", fontsize=8, frameon=False, markerscale=1.6)
    plain_ticks(axes, steps=(1.0, 3.0) if report.measure == "memory" else (1.0,))
    tidy(axes)
    save_figure(figure, path, pyplot)


def _draw_bands(axes: Any, report: CheckReport) -> None:
    unit = _unit(report)
    values = [value / unit for run in report.runs for value in (run.measured, run.estimated)]
    ends = np.array([min(values) * 0.8, max(values) * 1.25])
    for share, alpha in ((0.25, 0.08), (0.10, 0.13)):
        axes.fill_between(
            ends,
            ends * (1 - share),
            ends * (1 + share),
            color=COLOURS[0],
            alpha=alpha,
            linewidth=0,
            label=f"within {share:.0%}",
        )
    axes.plot(ends, ends, color="#333333", linewidth=0.8)
    axes.set(xlim=ends, ylim=ends)


def _draw_datasets(axes: Any, report: CheckReport) -> None:
    unit = _unit(report)
    for index, name in enumerate(sorted({run.dataset for run in report.runs})):
        runs = [run for run in report.runs if run.dataset == name]
        axes.scatter(
            [run.measured / unit for run in runs],
            [run.estimated / unit for run in runs],
            s=11,
            alpha=0.65,
            linewidths=0,
            color=COLOURS[index % len(COLOURS)],
            marker=MARKS[(index + index // len(COLOURS)) % len(MARKS)],
            label=f"{name} ({len(runs)})",
        )


def _unit(report: CheckReport) -> float:
    return float(GiB) if report.measure == "memory" else 1.0


def tidy(axes: Any) -> None:
    """The look of all plots: a faint grid, no box."""
    axes.set_axisbelow(True)
    axes.grid(visible=True, which="major", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def plain_ticks(axes: Any, *, steps: tuple[float, ...] = (1.0, 2.0, 5.0)) -> None:
    """Logarithmic axes with numbers as people write them, few enough to read."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=steps))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axis.set_minor_formatter(NullFormatter())


def save_figure(figure: Any, path: Path, pyplot: Any) -> None:
    """Write the picture and let go of it."""
    try:
        figure.savefig(path)
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error.strerror}") from None
    finally:
        pyplot.close(figure)


def load_pyplot(path: Path) -> Any:
    """Matplotlib for drawing into a file of this name."""
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise RequestError(f"cannot draw into {path}", hint="Name a .png, .svg or .pdf file")
    try:
        import matplotlib as mpl
    except ImportError:
        raise MissingExtra("drawing needs Matplotlib", "plots") from None
    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot


_LOOKS = dict(zip(Way, zip(MARKS, COLOURS, strict=True), strict=False))
_WORDS = {
    Way.CELL: "equal shares",
    Way.UNEVEN: "uneven shares",
    Way.GROUPS: "pipeline over groups",
}


def plot_plans(plans: Sequence[Plan], path: Path) -> None:
    """Dollars for a billion tokens against tokens per second, a numbered point for each plan."""
    shown = [(row, plan) for row, plan in enumerate(plans, start=1) if _dollars(plan) > 0]
    if not shown:
        raise RequestError("there is nothing to draw: no plan has a price")
    pyplot = load_pyplot(path)
    figure, axes = pyplot.subplots(figsize=(9, 6.5), dpi=140, layout="constrained")
    handles = []
    for row, plan in shown:
        mark, colour = _LOOKS[plan.way]
        words = " + ".join(f"{count} {gpu}" for gpu, count in plan.gpus.items())
        handles.append(
            axes.scatter(
                plan.tokens_per_second,
                _dollars(plan),
                marker=mark,
                s=60,
                color=colour,
                label=f"{row}  {words}: {_WORDS[plan.way]}",
                zorder=3,
            )
        )
    best = frontier([plan for _, plan in shown])
    if len(best) > 1:
        handles += axes.plot(
            [p.tokens_per_second for p in best],
            [_dollars(p) for p in best],
            color="#333333",
            linewidth=1,
            linestyle="--",
            label="nothing is both faster and cheaper",
            zorder=2,
        )
    axes.set(xlabel="tokens per second", ylabel="dollars for a billion tokens")
    axes.set_title(f"{shown[0][1].model.name}: the ways to run it, the fastest first", fontsize=11)
    axes.set_xlim(0, 1.1 * max(plan.tokens_per_second for _, plan in shown))
    axes.set_ylim(0, 1.15 * max(_dollars(plan) for _, plan in shown))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    _number_points(axes, shown)
    figure.legend(handles=handles, loc="outside lower left", fontsize=8, frameon=False)
    tidy(axes)
    save_figure(figure, path, pyplot)


_SIDES: Final = ((0.0, 1.0), (0.0, -1.0), (1.0, 0.0), (-1.0, 0.0))


def _number_points(axes: Any, shown: Sequence[tuple[int, Plan]]) -> None:
    """The number of each plan beside its point, on the side where most room is."""
    width, height = axes.get_xlim()[1], axes.get_ylim()[1]
    points = [(p.tokens_per_second / width, _dollars(p) / height) for _, p in shown]
    taken: list[tuple[float, float]] = []
    for (row, plan), (x, y) in zip(shown, points, strict=True):
        others = [other for other in points if other != (x, y)] + taken
        beside = [(x + right * 0.02, y + up * 0.035) for right, up in _SIDES]
        rooms = [min((math.dist(at, other) for other in others), default=1.0) for at in beside]
        side = _SIDES[rooms.index(max(rooms))]
        taken.append(beside[_SIDES.index(side)])
        axes.annotate(
            str(row),
            (plan.tokens_per_second, _dollars(plan)),
            fontsize=9,
            ha="center",
            va="center",
            xytext=(side[0] * 12, side[1] * 12),
            textcoords="offset points",
        )


def _dollars(plan: Plan) -> float:
    return plan.dollars_per_billion_tokens or 0.0


def frontier(plans: Sequence[Plan]) -> list[Plan]:
    """Plans than which none is both faster and cheaper, the fastest last."""
    ordered = sorted(plans, key=lambda p: (-p.tokens_per_second, p.dollars_per_billion_tokens or 0))
    best: list[Plan] = []
    least = float("inf")
    for plan in ordered:
        dollars = plan.dollars_per_billion_tokens or 0.0
        if dollars < least:
            best.append(plan)
            least = dollars
    return best[::-1]


def plot_frontier(
    frontier: Frontier,
    points: Sequence[FrontierPoint],
    path: Path,
    *,
    title: str,
    target_seconds: float = math.nan,
) -> None:
    """Mean completion time in hours against dollars an hour."""
    pyplot = load_pyplot(path)
    figure, axes = pyplot.subplots(figsize=(8.5, 5.5), dpi=150, layout="constrained")
    shown = [point for point in points if point.num_done]
    most = max([point.arrival_dollars_per_hour for point in shown], default=0.0) * 1.3
    spend = frontier.spend_dollars_per_hour
    most = most or float(spend[0]) * 5
    xs = np.geomspace(float(spend[0]), max(most, float(spend[0]) * 1.5), 200)
    ys = np.interp(xs, spend, frontier.mean_completion_seconds) / 3600
    axes.plot(xs, ys, color="#333333", linewidth=1.6, label="best possible (theory)")
    axes.fill_between(xs, ys, ys.min() * 0.5, color="#888888", alpha=0.10, linewidth=0)
    for index, policy in enumerate(dict.fromkeys(point.policy for point in shown)):
        mine = sorted(
            (point for point in shown if point.policy == policy),
            key=lambda point: point.arrival_dollars_per_hour,
        )
        complete = [point for point in mine if point.num_done == point.num_jobs]
        look = {"color": COLOURS[index % 8], "marker": MARKS[index % 8], "markersize": 6}
        axes.plot(
            [point.arrival_dollars_per_hour for point in complete],
            [point.mean_completion_seconds / 3600 for point in complete],
            linewidth=1.2,
            label=policy,
            **look,
        )
        for point in mine:
            if point.num_done < point.num_jobs:
                at = (point.arrival_dollars_per_hour, point.mean_completion_seconds / 3600)
                axes.plot(*at, linestyle="", markerfacecolor="none", **look)
                axes.annotate(
                    f"{point.num_done}/{point.num_jobs} done",
                    at,
                    fontsize=7,
                    xytext=(6, 4),
                    textcoords="offset points",
                )
    if math.isfinite(target_seconds):
        axes.axhline(target_seconds / 3600, color="#888888", linestyle="--", linewidth=1)
        axes.annotate(
            f"wanted: {target_seconds / 3600:.3g} h",
            (xs[-1], target_seconds / 3600),
            fontsize=8,
            ha="right",
            va="bottom",
            color="#555555",
        )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="dollars spent, for each hour in which jobs arrived",
        title=title,
    )
    axes.set_ylabel("mean completion time, hours")
    plain_ticks(axes)
    axes.set_ylim(bottom=float(ys.min()) * 0.8)
    tidy(axes)
    axes.legend(frameon=False)
    save_figure(figure, path, pyplot)
