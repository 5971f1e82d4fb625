"""`drystone profile`: measures the device that is here and writes what estimates can use."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from drystone.errors import DrystoneError, MissingExtra, RequestError

if TYPE_CHECKING:
    from drystone.estimate.learned.profile import Profile


def profile(
    out: Annotated[Path, typer.Option(help="The file to write: .json or .yaml.")] = Path(
        "profile.json"
    ),
    observed: Annotated[
        Path | None,
        typer.Option(
            help="Measure nothing: add what your own runs took (a CSV as `drystone check` reads) "
            "to the file, or begin it."
        ),
    ] = None,
    quick: Annotated[bool, typer.Option(help="Fewer shapes and repeats: seconds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure the device that is here, for estimates to use.

    Times multiplications, attention, memory, the enqueueing of work and collectives under
    sustained load (heated first, a minute in all; --quick: bursts), on the first GPU or,
    where there is none, on the processor. `drystone estimate`, `plan` and `check` take it with
    --profile FILE; `serve` and `simulate` by a type of a cluster file (`gpu_types: {ours: {like:
    A100-80G, profile: FILE}}`).

    With --json: the profile itself, {device, source, precision, matmuls: [{m, n, k, seconds}],
    memory_bandwidth_bytes_per_second, launch_seconds, attention: [{sequences, heads, tokens,
    head_dim, forward_seconds, backward_seconds}], collectives: [{kind, level, ranks,
    num_bytes, seconds}]}.
    """
    if out.suffix not in (".json", ".yaml", ".yml"):
        raise RequestError(
            f"{str(out)!r} is neither a .json nor a .yaml file", hint="Try --out profile.json"
        )
    if not out.parent.is_dir():
        raise RequestError(f"there is no folder {str(out.parent)!r} to write into")
    from drystone.estimate.learned.profile import load_profile

    if observed is not None:
        _add_readings(out, observed)
    elif importlib.util.find_spec("torch") is None:
        raise MissingExtra("measuring needs torch", "runtime")
    else:
        _measure(out, is_quick=quick)

    measured = load_profile(out)
    if as_json:
        from drystone.cli.output import print_json

        print_json(measured.model_dump(mode="json", exclude_none=True))
    else:
        _print_profile(measured)
    typer.echo(f"Written: {out}", err=True)


def _add_readings(out: Path, observed: Path) -> None:
    from drystone.estimate.learned.profile import Profile, load_profile, save_profile
    from drystone.observe.check.readings import load_readings

    readings = load_readings(observed)
    if not readings:
        raise RequestError(
            "no row could be compared with its estimate",
            where=str(observed),
            hint="`drystone check speed --rows` lists every row that is skipped, with the reason",
        )
    names = sorted({reading.gpu for reading in readings})
    known = load_profile(out) if out.exists() else Profile(device=names[0])
    save_profile(known.model_copy(update={"readings": known.readings + readings}), out)


def _measure(out: Path, *, is_quick: bool) -> None:
    """Run the measurement in a process of its own, so that this one never imports torch."""
    command = [sys.executable, "-P", "-m", "drystone.run.train.measure", str(out)]
    command += ["--quick"] if is_quick else []
    # A file, not a pipe: nobody reads the messages before the end, and a full pipe would block.
    with (
        tempfile.TemporaryFile("w+") as messages,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=messages, text=True) as process,
    ):
        _show_progress(process)
        code = process.wait()
        messages.seek(0)
        last = (messages.read().strip().splitlines() or [f"exit code {code}"])[-1]
    if code:
        raise DrystoneError(f"the measurement failed: {last}")


def _show_progress(process: subprocess.Popen[str]) -> None:
    from rich.progress import Progress

    from drystone.cli.output import make_console

    console = make_console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("Starting", total=None)
        for line in process.stdout or ():
            if line.startswith("{"):
                step: dict[str, Any] = json.loads(line)
                progress.update(
                    task, completed=step["done"], total=step["of"], description=step["what"]
                )


def _print_profile(measured: Profile) -> None:
    from drystone.cli.output import Column, print_table
    from drystone.estimate.learned.profile import fit_matmuls
    from drystone.units import format_bytes, format_seconds

    rows = []
    for matmul in measured.matmuls:
        m, n, k = matmul.m, matmul.n, matmul.k
        rate = f"{2 * m * n * k / matmul.seconds / 1e9:.3g} GFLOP/s"
        rows.append((f"multiply {m} x {k} by {k} x {n}", format_seconds(matmul.seconds), rate))
    if measured.matmuls:
        fit = fit_matmuls(measured.matmuls)
        rows.append(("largest multiplications, fitted", "", f"{fit.flops / 1e9:.3g} GFLOP/s"))
    if measured.memory_bandwidth_bytes_per_second:
        gigabytes = measured.memory_bandwidth_bytes_per_second / 1e9
        rows.append(("memory, read and written", "", f"{gigabytes:.3g} GB/s"))
    if measured.launch_seconds:
        rows.append(("enqueue one kernel", format_seconds(measured.launch_seconds), ""))
    for timed in measured.attention:
        what = f"attention, {timed.sequences} x {timed.heads} heads x {timed.tokens} tokens"
        rate = f"{timed.forward_flops / timed.forward_seconds / 1e9:.3g} GFLOP/s"
        rows.append((what, format_seconds(timed.forward_seconds), rate))
    for collective in measured.collectives:
        size = format_bytes(collective.num_bytes)
        what = f"{collective.kind} of {size}, {collective.ranks} ranks"
        rate = f"{collective.num_bytes / collective.seconds / 1e9:.3g} GB/s"
        rows.append((what, format_seconds(collective.seconds), rate))
    if measured.readings:
        rows.append((f"{len(measured.readings)} readings of runs", "", ""))
    columns = (Column(header="what", justify="left"), Column(header="time"), Column(header="rate"))
    print_table(measured.device, columns, rows)
