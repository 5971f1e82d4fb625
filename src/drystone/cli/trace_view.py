"""How a trace looks in a terminal: facts, then arrivals over time as bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from rich.text import Text

from drystone.cli.columns import counted
from drystone.cli.output import make_console, printable
from drystone.observe.trace_summary import TraceSummary
from drystone.units import format_seconds

_BLOCKS: Final = " ▁▂▃▄▅▆▇█"
_HEIGHT: Final = 4
_MOST_NAMES: Final = 8


def print_summary(name: str, summary: TraceSummary) -> None:
    """The facts of a trace and a picture of its arrivals."""
    console = make_console()
    console.print(Text(f"{printable(name)}: {counted(summary.num_jobs, 'job')}", style="bold"))
    facts = [
        ("format", summary.format),
        ("arrive in", format_seconds(summary.span_seconds)),
        ("models", _names(summary.models)),
        ("owners", _names(summary.owners)),
        ("asked for", _asked(summary.jobs_by_num_gpus)),
    ]
    if summary.gpu_hours:
        by_type = ", ".join(
            f"{printable(gpu)} {hours:,.0f}" for gpu, hours in summary.gpu_hours_by_type.items()
        )
        facts.insert(2, ("GPU hours", f"{summary.gpu_hours:,.0f} ({by_type})"))
    if summary.num_deadlines:
        facts.append(("deadlines", counted(summary.num_deadlines, "job")))
    for label, value in facts:
        console.print(Text.assemble((f"  {label:<11}", "cyan"), value), soft_wrap=True)
    for note in summary.notes:
        console.print(Text(f"  {note}.", style="dim"), soft_wrap=True)
    most = max(summary.arrivals_per_bin)
    each = format_seconds(summary.bin_seconds)
    console.print()
    tallest = counted(most, "job")
    console.print(Text(f"Arrivals, a column for {each}; the tallest is {tallest}", "bold"))
    for line in draw_bars(summary.arrivals_per_bin):
        console.print(Text(f"  {line}", style="blue"), soft_wrap=True)
    end = f"{format_seconds(summary.span_seconds)} later"
    gap = " " * max(1, len(summary.arrivals_per_bin) - len("first job") - len(end))
    console.print(Text(f"  first job{gap}{end}", style="dim"))


def draw_bars(values: Sequence[float], height: int = _HEIGHT) -> list[str]:
    """Lines of block characters, the highest value as tall as `height` lines."""
    most = max(values, default=0.0) or 1.0
    eighths = [round(value / most * height * 8) for value in values]
    # Something is never drawn as nothing.
    eighths = [max(one, 1) if value else 0 for one, value in zip(eighths, values, strict=True)]
    return [
        "".join(_BLOCKS[min(max(one - 8 * level, 0), 8)] for one in eighths).rstrip()
        for level in reversed(range(height))
    ]


def _names(counts: Mapping[str, int]) -> str:
    shown = [f"{printable(name)} {count:,}" for name, count in list(counts.items())[:_MOST_NAMES]]
    more = len(counts) - len(shown)
    return ", ".join(shown) + (f", and {more} more" if more > 0 else "")


def _asked(counts: Mapping[int, int]) -> str:
    def words(number: int) -> str:
        return "nothing" if number == 0 else "1 GPU" if number == 1 else f"{number} GPUs"

    return ", ".join(f"{words(number)} {count:,}" for number, count in counts.items())
