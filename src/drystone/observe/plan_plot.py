"""What do the plans of a job look like? Speed against price, with the frontier marked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from drystone.errors import RequestError
from drystone.observe.plot import COLOURS, MARKS, load_pyplot, save_figure, tidy
from drystone.plan.plan import Plan, Way

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
            axes.scatter(plan.tokens_per_second, _dollars(plan), marker=mark, s=60, color=colour,
                         label=f"{row}  {words}: {_WORDS[plan.way]}", zorder=3)
        )  # fmt: skip
    best = frontier([plan for _, plan in shown])
    if len(best) > 1:
        handles += axes.plot(
            [p.tokens_per_second for p in best], [_dollars(p) for p in best], color="#333333",
            linewidth=1, linestyle="--", label="nothing is both faster and cheaper", zorder=2,
        )  # fmt: skip
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
        others = [one for one in points if one != (x, y)] + taken
        beside = [(x + right * 0.02, y + up * 0.035) for right, up in _SIDES]
        rooms = [min((math.dist(at, one) for one in others), default=1.0) for at in beside]
        side = _SIDES[rooms.index(max(rooms))]
        taken.append(beside[_SIDES.index(side)])
        axes.annotate(
            str(row), (plan.tokens_per_second, _dollars(plan)), fontsize=9, ha="center",
            va="center", xytext=(side[0] * 12, side[1] * 12), textcoords="offset points",
        )  # fmt: skip


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
