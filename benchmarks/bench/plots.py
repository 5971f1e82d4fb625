"""Pictures of what was measured, in the look of all plots of the project (`observe/plots.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.ticker
import numpy as np

from bench.store import FOLDER, Results
from bench.table_running import PARTS
from bench.verdicts import Verdict, judge
from drystone.observe.plots import COLOURS, MARKS, load_pyplot, tidy

DARK = "#333333"


def draw(results: Results, folder: Path = FOLDER) -> dict[str, str]:
    """Every picture that there are figures for: titles by file name."""
    folder.mkdir(exist_ok=True)
    mpl.rcParams["svg.hashsalt"] = "drystone"  # the same figures, the same file
    pictures = {}
    for name, title, picture in (
        ("ranges", "Every figure against its range", _ranges),
        ("accuracy", "Estimates against published runs", _accuracy),
        ("growth", "The time of a decision of `prices`", _growth),
        ("policies", "Mean completion time by policy, against that of `prices`", _policies),
        ("budget", "LLM jobs on rented A100: time against money", _budget),
    ):
        path = folder / f"{name}.svg"
        pyplot = load_pyplot(path)
        figure = picture(results, pyplot)
        if figure is None:
            path.unlink(missing_ok=True)
            continue
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
        pictures[path.name] = title
    return pictures


def _figures(results: Results, name: str) -> dict[str, Any]:
    record = results.records.get(name)
    return {} if record is None else dict(record.figures)


def _share_of_range(verdict: Verdict) -> float | None:
    """At most 1 is inside: the value over its limit, or the limit over the value."""
    figure, value = verdict.figure, verdict.value
    if value is None or value <= 0 or (figure.low is not None and figure.high is not None):
        return None
    if figure.high is not None:
        return value / figure.high if figure.high > 0 else None
    return figure.low / value if figure.low is not None else None


def _ranges(results: Results, pyplot: Any) -> Any:
    rows = [
        (f"{benchmark.name}: {one.figure.name}".replace("`", ""), share, one.figure.by_clock)
        for part in PARTS
        for benchmark in part.benchmarks
        if (record := results.records.get(benchmark.name)) is not None
        for one in judge(benchmark, record)
        if (share := _share_of_range(one)) is not None
    ]
    if not rows:
        return None
    figure, axes = pyplot.subplots(figsize=(10, 1.2 + 0.2 * len(rows)), layout="constrained")
    axes.axvspan(1.0, 1e3, color=COLOURS[1], alpha=0.08, linewidth=0)
    axes.axvline(1.0, color=DARK, linewidth=1)
    for clock, mark, words in ((False, "o", "CPU time, counts, ratios"), (True, "^", "clock")):
        for good, colour in ((True, COLOURS[0]), (False, COLOURS[1])):
            chosen = [
                (index, share)
                for index, (_, share, by_clock) in enumerate(rows)
                if by_clock is clock and (share <= 1.0) is good
            ]
            if chosen:
                label = f"{words}, {'inside' if good else 'outside'}"
                ys, xs = zip(*chosen, strict=True)
                axes.scatter(xs, ys, marker=mark, color=colour, s=28, zorder=3, label=label)
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows], fontsize=7)
    axes.set(xscale="log", ylim=(len(rows) - 0.5, -0.5))
    shares = [share for _, share, _ in rows]
    axes.set_xlim(min(shares) / 1.5, max(max(shares), 1.0) * 1.6)
    axes.set_xlabel("of the limit: left of 1 is inside, the further the more room")
    axes.legend(loc="lower left", fontsize=7, frameon=False)
    tidy(axes)
    return figure


def _accuracy(results: Results, pyplot: Any) -> Any:
    found = _figures(results, "estimator_accuracy")
    if not found:
        return None
    figure, both = pyplot.subplots(1, 2, figsize=(10, 4.8), layout="constrained")
    for axes, measure, unit in zip(
        both, ("memory", "speed"), ("GiB a GPU", "tokens/s a GPU"), strict=True
    ):
        measured = np.array(found[f"{measure}_measured"])
        estimated = np.array(found[f"{measure}_estimated"])
        ends = np.array([measured.min() * 0.8, measured.max() * 1.25])
        for share, alpha in ((0.25, 0.10), (0.10, 0.16)):
            axes.fill_between(ends, ends * (1 - share), ends * (1 + share), color=COLOURS[0],
                              alpha=alpha, linewidth=0, label=f"within {share:.0%}")  # fmt: skip
        axes.plot(ends, ends, color=DARK, linewidth=0.8)
        axes.scatter(measured, estimated, s=7, alpha=0.5, color=COLOURS[1], linewidths=0,
                     rasterized=True, label=f"{measured.size:,} runs")  # fmt: skip
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, title=measure)
        axes.set_xlabel(f"measured, {unit}")
        axes.set_ylabel(f"estimated, {unit}")
        axes.legend(loc="upper left", fontsize=8, frameon=False)
        tidy(axes)
    return figure


def _growth(results: Results, pyplot: Any) -> Any:
    found = _figures(results, "decision_growth")
    if not found:
        return None
    gpus = np.array(found["gpus"])
    figure, axes = pyplot.subplots(figsize=(7.5, 4.5), layout="constrained")
    for index, (key, words) in enumerate(
        (("first_seconds", "first decision"), ("next_seconds", "later decisions"))
    ):
        axes.loglog(gpus, found[key], marker=MARKS[index], color=COLOURS[index], label=words)
    last = np.array(found["next_seconds"])
    axes.loglog(gpus, last[-1] * gpus / gpus[-1], "--", color="#888888", label="linear")
    for x, y in zip(gpus, last, strict=True):
        text = f"{y * 1e3:.0f} ms" if y < 1 else f"{y:.1f} s"
        axes.annotate(text, (x, y), textcoords="offset points", xytext=(5, -12), fontsize=8)
    axes.set(xlabel="GPUs (a fifth as many jobs)", ylabel="CPU seconds a decision")
    axes.legend(frameon=False, fontsize=8)
    tidy(axes)
    return figure


def _policies(results: Results, pyplot: Any) -> Any:
    found = _figures(results, "policies")
    traces = [one for one in ("pai", "helios", "philly") if f"{one}_prices_hours" in found]
    if not traces:
        return None
    names = list(
        dict.fromkeys(
            key.removeprefix(f"{trace}_").removesuffix("_hours")
            for trace in traces
            for key in found
            if key.startswith(f"{trace}_") and key.endswith("_hours")
        )
    )
    figure, axes = pyplot.subplots(figsize=(7.5, 4.5), layout="constrained")
    for index, trace in enumerate(traces):
        hours = {name: found.get(f"{trace}_{name}_hours") for name in names}
        ratios = {name: one / hours["prices"] for name, one in hours.items() if one is not None}
        axes.scatter(list(ratios.values()), [names.index(name) for name in ratios], s=45,
                     marker=MARKS[index], color=COLOURS[index], zorder=3,
                     label=f"{trace}: prices {hours['prices']:.2f} h")  # fmt: skip
    axes.axvline(1.0, color=DARK, linewidth=1)
    axes.set_yticks(range(len(names)), names)
    axes.set(xscale="log", ylim=(len(names) - 0.5, -0.5))
    axes.set_xticks([1, 1.5, 2, 3, 4, 5], ["1", "1.5", "2", "3", "4", "5"])
    axes.xaxis.set_minor_formatter(mpl.ticker.NullFormatter())
    axes.set_xlabel("mean completion time, of that under prices")
    axes.legend(frameon=False, fontsize=8)
    tidy(axes)
    return figure


def _budget(results: Results, pyplot: Any) -> Any:
    found = _figures(results, "budget_llm")
    if not found:
        return None
    figure, axes = pyplot.subplots(figsize=(7.5, 4.5), layout="constrained")
    axes.plot(found["theory_dollars"], found["theory_hours"], color=DARK,
              label="best possible (theory)")  # fmt: skip
    for index, (key, words) in enumerate((("pollux", "Pollux that rents"), ("budget", "budget"))):
        axes.plot(found[f"{key}_dollars"], found[f"{key}_hours"], marker=MARKS[index],
                  color=COLOURS[index], label=words)  # fmt: skip
    most = max(found["pollux_hours"]) * 1.6
    axes.set(ylim=(0, most), xlabel="dollars an hour while jobs arrive")
    axes.set_ylabel("mean completion time, hours")
    axes.legend(frameon=False, fontsize=8)
    tidy(axes)
    return figure
