"""Writes `RESULTS.md`: date, machine, what lies outside, every figure with its range, pictures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bench.spec import Benchmark, Part
from bench.store import Results
from bench.table_running import PARTS
from bench.verdicts import Verdict, judge, outside

HEAD = """# What was measured

Written by `make bench` on {dates}. Every figure comes from the command above its table.
`make bench ONLY=name` runs one benchmark again, `make bench QUICK=1` the short ones.

Each benchmark is a process of its own, with a time limit; what is compared is measured in the same
run, as a ratio. Figures marked ⏱ are by the clock, so that other work on the machine adds to them:
read the load average beside them (of a minute, before and after, on {cores} cores). The others are
CPU time, counts or simulated time, which other work hardly touches. A figure measured with other
versions than those of the table says so. Ranges and their sources stand in
`benchmarks/bench/table.py` and `table_running.py`; a range is never moved to fit a figure.
"""
WITHOUT_GPUS = """## What cannot be measured without GPUs

No benchmark needs a GPU, and none uses one. So nothing here says:

- how fast the runtime trains on GPUs, with NCCL: its ratios are of emulated devices on gloo, paced
  by deadlines, and of replayed logs;
- how near an estimate is to a run of Drystone's own runtime on a GPU: accuracy is against runs that
  others published, memory of the runtime against the same engine on fake tensors;
- what the CUDA context, the allocator's fragmentation and communicators take beside our tensors:
  the estimate has them from published readings;
- how long a job takes to move between real nodes: restart costs in simulations are those that the
  authors of the traces measured.
"""


def render(results: Results, pictures: dict[str, str]) -> str:
    """The whole document; `pictures` are titles by file name."""
    verdicts = [
        one
        for part in PARTS
        for benchmark in part.benchmarks
        if benchmark.name in results.records
        for one in judge(benchmark, results.records[benchmark.name])
    ]
    cores = results.machine["processor"].rpartition(", ")[2].split()[0]
    dates = sorted({one.date for one in results.records.values() if one.date})
    span = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    lines = [HEAD.format(dates=span, cores=cores)]
    lines += _machine(results)
    lines += _summary(results, verdicts)
    for part in PARTS:
        lines += _part(part, results)
    lines += ["## Pictures", ""]
    lines += [f"![{title}](results/{name})" for name, title in pictures.items()]
    lines += ["", WITHOUT_GPUS.rstrip(), ""]
    return "\n".join(lines)


def _machine(results: Results) -> Iterator[str]:
    yield from ("## Machine", "", "| | |", "|---|---|")
    yield from (f"| {name} | {text} |" for name, text in results.machine.items())
    commits = sorted({one.commit for one in results.records.values() if one.commit})
    if commits:
        yield f"| commit | {', '.join(commits)} |"
    yield ""


def _summary(results: Results, verdicts: list[Verdict]) -> Iterator[str]:
    wrong, ranged = outside(verdicts), [one for one in verdicts if one.word != "-"]
    failed = [one for one in results.records.values() if one.failed]
    skipped = [one for one in results.records.values() if one.skipped]
    yield "## In short"
    yield ""
    yield f"{len(ranged) - len(wrong)} of {len(ranged)} figures with a range lie inside it."
    if wrong:
        yield from ("", "**Outside:**", "")
        for one in wrong:
            why = f" ({one.figure.known})" if one.figure.known else ""
            yield (
                f"- {one.benchmark.name}, {one.figure.name}: **{one.found}**, "
                f"{one.figure.show_range()}{why}{_loaded(one)}"
            )
    if failed:
        yield from ("", "**Without figures:**", "")
        yield from (
            f"- {one.name}: {one.failed}, at load {one.load[0]:.1f} to {one.load[1]:.1f}"
            for one in failed
        )
    if skipped:
        yield from ("", "Not run:", "")
        yield from (f"- {one.name}: {one.skipped}" for one in skipped)
    yield ""


def _loaded(verdict: Verdict) -> str:
    if not verdict.figure.by_clock:
        return ""
    before, after = verdict.record.load
    return f"; by the clock, at load {before:.1f} to {after:.1f}"


def _part(part: Part, results: Results) -> Iterator[str]:
    yield f"## {part.title}"
    yield ""
    for benchmark in part.benchmarks:
        yield from _benchmark(benchmark, results)


def _other_versions(packages: str, now: str) -> str:
    """`; with torch 2.12.0`: what differs from the versions of the machine; empty where nothing."""
    differing = [one for one in packages.split(", ") if one and one not in now.split(", ")]
    return f"; with {', '.join(differing)}" if differing else ""


def _benchmark(benchmark: Benchmark, results: Results) -> Iterator[str]:
    command = "python " + " ".join(benchmark.command())
    record = results.records.get(benchmark.name)
    yield f"**{benchmark.name}.** {benchmark.about}{'' if benchmark.about.endswith('?') else '.'}"
    yield ""
    if record is None or record.skipped or record.failed:
        reason = "not run yet" if record is None else record.skipped or f"failed: {record.failed}"
        yield from (f"`{command}`: {reason}", "")
        return
    before, after = record.load
    yield (
        f"`{command}`, {record.date}, {record.seconds:.0f} s, load {before:.1f} before and "
        f"{after:.1f} after{_other_versions(record.packages, results.machine.get('packages', ''))}"
    )
    yield from ("", "| figure | found | range | inside | source of the range |")
    yield "|---|---:|---|---|---|"
    for one in judge(benchmark, record):
        clock = " ⏱" if one.figure.by_clock else ""
        yield (
            f"| {one.figure.name}{clock} | {one.found} | {one.figure.show_range()} | {one.word} "
            f"| {one.figure.source or '-'} |"
        )
    yield ""


def write(results: Results, pictures: dict[str, str], path: Path) -> None:
    """Into a file."""
    path.write_text(render(results, pictures), encoding="utf-8")
