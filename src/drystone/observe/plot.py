"""What does predicted against measured look like? Pictures of a check, drawn with Matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

from drystone.errors import MissingExtra, RequestError
from drystone.observe.check.accuracy import CheckReport, Errors
from drystone.units import GiB

# Okabe and Ito's colours, for colour-blind people too; marks tell series apart without any.
COLOURS: Final = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f7f",
)  # fmt: skip
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
