"""How is one benchmark run? In a process of its own, within a time limit, its last line read."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.machine import packages
from bench.spec import Benchmark
from figures import Figures, read_figures, read_skip

ROOT = Path(__file__).resolve().parents[2]
LEAVE_SECONDS = 30.0  # to clear up after an interrupt


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What became of one benchmark."""

    name: str
    date: str
    command: str
    figures: Figures = field(default_factory=dict)
    skipped: str = ""  # why it was not run
    failed: str = ""  # why there are no figures
    seconds: float = 0.0
    load: tuple[float, float] = (0.0, 0.0)  # average of a minute, before and after
    commit: str = ""
    packages: str = ""  # the versions that it was measured with, as the machine states them

    def to_json(self) -> dict[str, Any]:
        """As it is kept."""
        return asdict(self)

    @classmethod
    def from_json(cls, table: dict[str, Any]) -> Record:
        """As it was kept."""
        return cls(**{**table, "load": tuple(table["load"])})


def reason_to_skip(benchmark: Benchmark, *, data: Path | None, is_quick: bool) -> str:
    """Why a benchmark does not run; empty where it does."""
    missing = [name for name in benchmark.needs if importlib.util.find_spec(name) is None]
    if missing:
        return f"needs {', '.join(missing)}: `make setup` installs it"
    if is_quick and benchmark.quick is None:
        return "not among the quick ones: leave QUICK out"
    if benchmark.needs_data and data is None:
        return f"needs data that is not shipped: `make bench ONLY={benchmark.name} DATA=DIR`"
    return ""


def measure(
    benchmark: Benchmark, *, data: Path | None, is_quick: bool, commit: str, verbose: bool = False
) -> Record:
    """Run it and read its figures; what it started ends with it."""
    shown = "python " + " ".join(benchmark.command(is_quick=is_quick))
    words = benchmark.command(data=str(data), is_quick=is_quick)
    kept: dict[str, Any] = {
        "name": benchmark.name, "command": shown, "commit": commit, "packages": packages(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }  # fmt: skip
    load, began = os.getloadavg()[0], time.monotonic()
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, text=True, start_new_session=True,
            stdout=output, stderr=errors,
        )  # fmt: skip
        try:
            code = process.wait(timeout=benchmark.limit_seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        output.seek(0)
        errors.seek(0)
        text, complaint = output.read(), errors.read()
    if verbose:
        sys.stdout.write(text)
    kept |= {"seconds": time.monotonic() - began, "load": (load, os.getloadavg()[0])}
    if code is None:
        return Record(**kept, failed=f"had not ended after {benchmark.limit_seconds:g} s")
    if (figures := read_figures(text)) is not None:
        return Record(**kept, figures=figures)
    if reason := read_skip(text):
        return Record(**kept, skipped=reason)
    last = (complaint.strip().splitlines() or ["it printed no figures"])[-1]
    return Record(**kept, failed=f"exit code {code}: {without_paths(last)}")


def without_paths(text: str) -> str:
    """The same without places on this machine."""
    for place in (str(ROOT), tempfile.gettempdir(), str(Path.home())):
        text = text.replace(place, "...")
    return text


def _end(process: subprocess.Popen[str]) -> None:
    """Whoever still runs is asked to leave, then made to, with all that it started."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=LEAVE_SECONDS)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
