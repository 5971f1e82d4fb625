"""What does time against money look like? The theoretical frontier and the policies' points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from drystone.observe.frontier import FrontierPoint
from drystone.observe.plot import COLOURS, MARKS, load_pyplot, plain_ticks, save_figure, tidy
from drystone.schedule.budget.frontier import Frontier


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
    shown = [one for one in points if one.num_done]
    most = max([one.arrival_dollars_per_hour for one in shown], default=0.0) * 1.3
    spend = frontier.spend_dollars_per_hour
    most = most or float(spend[0]) * 5
    xs = np.geomspace(float(spend[0]), max(most, float(spend[0]) * 1.5), 200)
    ys = np.interp(xs, spend, frontier.mean_completion_seconds) / 3600
    axes.plot(xs, ys, color="#333333", linewidth=1.6, label="best possible (theory)")
    axes.fill_between(xs, ys, ys.min() * 0.5, color="#888888", alpha=0.10, linewidth=0)
    for index, policy in enumerate(dict.fromkeys(one.policy for one in shown)):
        mine = sorted(
            (one for one in shown if one.policy == policy),
            key=lambda one: one.arrival_dollars_per_hour,
        )
        complete = [one for one in mine if one.num_done == one.num_jobs]
        look = {"color": COLOURS[index % 8], "marker": MARKS[index % 8], "markersize": 6}
        axes.plot(
            [one.arrival_dollars_per_hour for one in complete],
            [one.mean_completion_seconds / 3600 for one in complete],
            linewidth=1.2,
            label=policy,
            **look,
        )
        for one in mine:
            if one.num_done < one.num_jobs:
                at = (one.arrival_dollars_per_hour, one.mean_completion_seconds / 3600)
                axes.plot(*at, linestyle="", markerfacecolor="none", **look)
                axes.annotate(
                    f"{one.num_done}/{one.num_jobs} done", at, fontsize=7,
                    xytext=(6, 4), textcoords="offset points",
                )  # fmt: skip
    if math.isfinite(target_seconds):
        axes.axhline(target_seconds / 3600, color="#888888", linestyle="--", linewidth=1)
        axes.annotate(
            f"wanted: {target_seconds / 3600:.3g} h", (xs[-1], target_seconds / 3600),
            fontsize=8, ha="right", va="bottom", color="#555555",
        )  # fmt: skip
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
