"""What do the plans of a job look like? Speed against price, with the frontier marked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from drystone.errors import RequestError
from drystone.observe.plot import COLOURS, MARKS, load_pyplot, save_figure, tidy
from drystone.plan.plan import Plan, Way

_LOOKS = dict(zip(Way, zip(MARKS, COLOURS, strict=True), strict=False))
_WORDS = {
    Way.CELL: "equal GPUs",
    Way.UNEVEN: "mixed, uneven shares",
    Way.GROUPS: "mixed, pipeline over groups",
}


def plot_plans(plans: Sequence[Plan], path: Path) -> None:
    """Dollars for a billion tokens against tokens per second, one point a plan."""
    shown = [plan for plan in plans if plan.dollars_per_billion_tokens is not None]
    if not shown:
        raise RequestError("there is nothing to draw: no plan has a price")
    pyplot = load_pyplot(path)
    figure, axes = pyplot.subplots(figsize=(9, 6), dpi=140, layout="constrained")
    for way in Way:
        mine = [plan for plan in shown if plan.way is way]
        if mine:
            mark, colour = _LOOKS[way]
            axes.scatter([p.tokens_per_second for p in mine],
                         [p.dollars_per_billion_tokens for p in mine],
                         marker=mark, s=60, color=colour, label=_WORDS[way], zorder=3)  # fmt: skip
    best = frontier(shown)
    axes.plot([p.tokens_per_second for p in best], [p.dollars_per_billion_tokens for p in best],
              color="#333333", linewidth=1, linestyle="--", label="nothing is faster and cheaper",
              zorder=2)  # fmt: skip
    for plan in best:
        words = " + ".join(f"{count} {gpu}" for gpu, count in plan.gpus.items())
        axes.annotate(words, (plan.tokens_per_second, plan.dollars_per_billion_tokens or 0.0),
                      xytext=(6, 8), textcoords="offset points", fontsize=8)  # fmt: skip
    axes.set(xlabel="tokens per second", ylabel="dollars for a billion tokens")
    axes.set_title(f"{shown[0].model.name}: the ways to run it", fontsize=11)
    axes.set_xlim(0, 1.3 * max(plan.tokens_per_second for plan in shown))
    axes.set_ylim(0, 1.2 * max(plan.dollars_per_billion_tokens or 0.0 for plan in shown))
    axes.legend(loc="best", fontsize=8, frameon=False)
    tidy(axes)
    save_figure(figure, path, pyplot)


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
