"""Are estimates true on what they have never seen? Every bar in one table.

    python benchmarks/left_out.py

Leave-one-source-out: each source of published runs is judged by constants that were chosen without
it, and sources count equally (`drystone check`). Beside it what is refused although it ran, and how
many readings of a left-out source lie inside the stated range, and above it.
"""

from __future__ import annotations

from drystone.observe.check.accuracy import (
    LARGE_EXPERTS,
    MEMORY_TABLE,
    SPEED_TABLE,
    CheckReport,
    check_memory,
    check_speed,
)
from drystone.observe.check.runs import load_runs
from figures import Figures, print_figures

# The measure, the group of runs, and the most that median and 90th percentile should be.
BARS = (
    ("memory", "all full", 0.08, 0.25),
    ("memory", "all adapters", 0.10, 0.30),
    ("speed", "dense full", 0.09, 0.25),
    ("speed", LARGE_EXPERTS, 0.15, 0.40),
)


def main() -> None:
    """A line for each bar, then the figures."""
    reports = {
        "memory": check_memory(load_runs(MEMORY_TABLE, measure="memory")),
        "speed": check_speed(load_runs(SPEED_TABLE, measure="speed")),
    }
    figures: Figures = {}
    for measure, group, most_median, most_tail in BARS:
        found = reports[measure].left_out_by_group()[group]
        name = f"{measure}_{group.replace(' > ', '_above_').replace(' ', '_')}"
        for what, value, bar in (
            ("median", found.median_abs_error, most_median),
            ("p90", found.p90_abs_error, most_tail),
        ):
            figures[f"{name}_{what}"] = value
            _say(f"{measure}, {group}, {len(found.sources)} sources: {what}", value, bar)
    cover = reports["memory"].range_cover()
    figures |= {"range_inside": cover.inside, "range_above": cover.above}
    _say("memory: readings outside the 80 % range", 1 - cover.inside, 0.25)
    _say("memory: readings above it", cover.above, 0.15)
    for kind, group, bar in (("dense", "dense full", 0.03), ("experts", "expert full", 0.08)):
        figures[f"refused_{kind}"] = refused = _refused(reports, group)
        _say(f"published runs of {group} that are refused", refused, bar)
    print_figures(figures)


def _refused(reports: dict[str, CheckReport], group: str) -> float:
    counts = [report.fit_counts.by_group.get(group, (0, 0)) for report in reports.values()]
    return sum(refused for refused, _ in counts) / max(1, sum(number for _, number in counts))


def _say(what: str, value: float, bar: float) -> None:
    met = "yes" if value <= bar else "NO"
    print(f"{what:<62} {value:>6.1%}  at most {bar:>4.0%}  {met}")


if __name__ == "__main__":
    main()
