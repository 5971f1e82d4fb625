"""Runs the benchmarks of this folder and says which figures lie outside of their range.

    make bench                              all, 40 minutes; writes benchmarks/RESULTS.md
    make bench QUICK=1                      the short ones, some with less to do; writes nothing
    make bench ONLY=plan_time,policies      some, by name; writes their part anew
    make bench DATA=DIR                     also those that read data which is not shipped

Ends with 0 if every figure lies inside, with 1 if one does not or a benchmark fails, with 2 if the
request was wrong.
"""

from __future__ import annotations

import argparse
import difflib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from bench.machine import describe_machine, source_version
from bench.measure import ROOT, Record, measure, reason_to_skip
from bench.render import write
from bench.spec import Benchmark
from bench.store import Results, load_results, save_results
from bench.table_running import BENCHMARKS, PARTS
from bench.verdicts import Verdict, judge, outside

RESULTS = Path(__file__).resolve().parents[1] / "RESULTS.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, judge, write."""
    given = _arguments(arguments)
    # In the background of a shell interrupts are ignored, by what is started from there as well:
    # then no benchmark could clear up.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    console = Console(highlight=False, soft_wrap=True)
    if given.list:
        _list(console)
        return 0
    chosen = _choose(given.only)
    if isinstance(chosen, str):
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"error: {chosen}")
        return 2
    data = given.data.resolve() if given.data is not None else None
    results = load_results(describe_machine())
    if given.render:
        save_results(results)
        return _write(console, results)
    commit = source_version(ROOT)
    verdicts: list[Verdict] = []
    failed: list[Record] = []
    for number, benchmark in enumerate(chosen, start=1):
        record = _run(console, benchmark, f"{number}/{len(chosen)}", given, data, commit)
        results.add(record)
        failed += [record] if record.failed else []
        verdicts += judge(benchmark, record, is_quick=given.quick)
        if not given.quick:  # kept after each, so that an interrupt loses little
            save_results(results)
    if not given.quick:
        _write(console, results)
    return _conclude(console, verdicts, failed, is_quick=given.quick)


def _write(console: Console, results: Results) -> int:
    from bench.plots import draw

    write(results, draw(results), RESULTS)
    console.print(f"Written: {RESULTS.relative_to(ROOT)}", style="dim")
    return 0


def _run(
    console: Console, benchmark: Benchmark, place: str, given: argparse.Namespace,
    data: Path | None, commit: str,
) -> Record:  # fmt: skip
    """One benchmark, with a moving line while it runs and its figures afterwards."""
    reason = reason_to_skip(benchmark, data=data, is_quick=given.quick)
    if benchmark.by_name_only and not given.only:
        reason = f"{benchmark.by_name_only}: `make bench ONLY={benchmark.name}`"
    if reason:
        record = Record(name=benchmark.name, date="", command="", skipped=reason)
    else:
        console.print(f"{place} {benchmark.name}: {benchmark.about}", style="bold", markup=False)
        if given.quick and benchmark.quick != benchmark.arguments:
            console.print(f"  with less to do: {benchmark.quick}", style="dim", markup=False)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        ) as progress:
            progress.add_task(f"at most {benchmark.limit_seconds:.0f} s", total=None)
            record = measure(
                benchmark, data=data, is_quick=given.quick, commit=commit, verbose=given.verbose
            )
    if record.skipped:
        console.print(f"{place} {benchmark.name}: not run, {record.skipped}", style="dim",
                      markup=False)  # fmt: skip
    if record.failed:
        console.print(f"  failed: {record.failed}", style="bold red", markup=False)
    for one in judge(benchmark, record, is_quick=given.quick):
        _say(console, one)
    return record


def _say(console: Console, verdict: Verdict) -> None:
    style = "green" if verdict.is_inside else "bold red"
    word = "inside " if verdict.is_inside else "OUTSIDE"
    if verdict.word == "-":
        style, word = "", "       "
    figure = verdict.figure
    line = f"  {word}  {verdict.found:>14}  {figure.show_range():<20}  {figure.name}"
    console.print(line, style=style, markup=False)


def _conclude(
    console: Console, verdicts: list[Verdict], failed: list[Record], *, is_quick: bool
) -> int:
    wrong = outside(verdicts)
    ranged = [one for one in verdicts if one.word != "-"]
    console.print(f"\n{len(ranged) - len(wrong)} of {len(ranged)} figures lie inside their range.")
    for one in wrong:
        known = f"; known: {one.figure.known}" if one.figure.known else ""
        console.print(
            f"  outside: {one.benchmark.name}, {one.figure.name}: {one.found}, "
            f"{one.figure.show_range()}{known}",
            style="red", markup=False,
        )  # fmt: skip
    for record in failed:
        console.print(f"  failed: {record.name}: {record.failed}", style="red", markup=False)
    load, cores = os.getloadavg()[2], os.cpu_count() or 1
    if wrong and load > cores:
        console.print(
            f"This machine was busy (load {load:.1f} of 15 minutes on {cores} cores): "
            "figures by the clock are worse for it.", style="yellow",
        )  # fmt: skip
    if is_quick:
        console.print("A quick run: nothing was written. Ranges are those of the whole one.")
    return 1 if wrong or failed else 0


def _choose(only: str) -> list[Benchmark] | str:
    """Those asked for in the order of the table; or what is wrong with the request."""
    names = [one.strip() for one in only.split(",") if one.strip()]
    for name in names:
        if name not in BENCHMARKS:
            near = difflib.get_close_matches(name, BENCHMARKS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            return f"unknown benchmark {name!r}.{hint} `make bench ARGS=--list` names all."
    return [one for name, one in BENCHMARKS.items() if not names or name in names]


def _list(console: Console) -> None:
    for part in PARTS:
        console.print(part.title, style="bold")
        for one in part.benchmarks:
            console.print(f"  {one.name:<22} {one.about}", markup=False)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="names, joined by commas")
    parser.add_argument("--quick", action="store_true", help="the short ones; writes nothing")
    parser.add_argument("--data", type=Path, default=None,
                        help="a folder with traces/ and peers/ (docs/goodput.md)")  # fmt: skip
    parser.add_argument("--verbose", action="store_true", help="show what each benchmark prints")
    parser.add_argument("--render", action="store_true",
                        help="only write RESULTS.md anew from what is kept")  # fmt: skip
    parser.add_argument("--list", action="store_true", help="name the benchmarks")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
