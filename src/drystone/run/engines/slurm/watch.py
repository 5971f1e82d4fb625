"""A thread that talks to Slurm, so that the controller never waits for it.

Looks at nodes and jobs come at an interval, and at once when something is afoot. What is to be
submitted or cancelled waits in a queue, is done in order, and again until Slurm could be asked.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from drystone.errors import DrystoneError
from drystone.run.engines.slurm.dialect import SlurmJob, SlurmNode, parse_jobs, parse_nodes

_TIMEOUT_SECONDS: Final = 60.0
# What slurmctld says when it cannot be asked now, or when a limit will not hold for ever.
_LATER: Final = re.compile(
    r"unable to contact|connection (?:refused|timed out|reset)|socket timed out|"
    r"zero bytes were transmitted|temporarily|try again|submit ?limit|maxsubmit|"
    r"controller.*(?:busy|not (?:in|responding))|timed out",
    re.IGNORECASE,
)


class SlurmBusy(DrystoneError):
    """Slurm cannot be asked now; it can later."""


class SlurmRefused(DrystoneError):
    """Slurm does not do that, now or later."""


class Commands:
    """Ask Slurm, and tell it what to do; `environment` over that of this process."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = {**os.environ, **(environment or {})}
        if shutil.which("sbatch", path=self._environment.get("PATH")) is None:
            raise SlurmRefused(
                "there is no sbatch here", hint="Start it where Slurm's commands are installed"
            )
        self._scontrol_writes_json = True  # since 23.02

    def nodes(self) -> list[SlurmNode]:
        """All nodes that we may see."""
        if self._scontrol_writes_json:
            try:
                return parse_nodes(self._run(["scontrol", "show", "nodes", "--json"]))
            except SlurmRefused as error:
                if "--json" not in str(error):
                    raise
                self._scontrol_writes_json = False
        return parse_nodes(self._run(["sinfo", "--json"]))

    def jobs(self) -> list[SlurmJob]:
        """All jobs that we may see."""
        return parse_jobs(self._run(["squeue", "--json"]))

    def submit(self, script: Path) -> int:
        """The number of the new job; of a heterogeneous one, that of its first component."""
        told = self._run(["sbatch", "--parsable", str(script)])
        found = re.match(r"\s*(\d+)", told)
        if found is None:
            raise SlurmRefused(f"sbatch said no job number: {told[:200]!r}")
        return int(found[1])

    def cancel(self, job: int) -> None:
        """End a job; that it has ended already is no fault."""
        try:
            self._run(["scancel", "--quiet", str(job)])
        except SlurmRefused as error:
            if "invalid job id" not in str(error).lower():
                raise

    def _run(self, command: Sequence[str]) -> str:
        try:
            done = subprocess.run(
                command, env=self._environment, capture_output=True, text=True, check=False,
                timeout=_TIMEOUT_SECONDS, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise SlurmBusy(f"{command[0]} gave no answer for {_TIMEOUT_SECONDS:.0f} s") from None
        except OSError as error:
            raise SlurmRefused(f"{command[0]} cannot be run: {error}") from None
        if done.returncode == 0:
            return done.stdout
        said = (done.stderr or done.stdout).strip()[-800:]
        kind = SlurmBusy if _LATER.search(said) else SlurmRefused
        raise kind(f"{' '.join(command[:3])}: {said or f'exit code {done.returncode}'}")


_log = logging.getLogger("drystone.slurm")
_BUSY_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Slurm at one time."""

    asked: float = 0.0  # when it was asked, by the monotonic clock
    nodes: Mapping[str, SlurmNode] = field(default_factory=dict)
    jobs: Mapping[int, tuple[SlurmJob, ...]] = field(default_factory=dict)  # by first number


class Watch:
    """The last look, and what is still to be told to Slurm."""

    def __init__(self, commands: Commands, *, look_seconds: float) -> None:
        self._commands, self._look_seconds = commands, look_seconds
        self._condition = threading.Condition()
        self._orders: list[Callable[[], None]] = []
        self._wants_look = self._is_closed = False
        self._thread: threading.Thread | None = None
        self.last = Look()
        self.trouble = ""  # why Slurm could not be asked

    def start(self) -> None:
        """From now on in a thread; the first look is made here, and must succeed."""
        self.look()
        self._thread = threading.Thread(target=self._run, name="slurm", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Do what is left to do, then end; for a while at most."""
        with self._condition:
            self._is_closed = True
            self._condition.notify()
        if self._thread is not None:
            self._thread.join(timeout=30)

    def look_soon(self, after: float = 0.0) -> None:
        """Look at once, unless a look was begun after that time."""
        with self._condition:
            if self.last.asked <= after:
                self._wants_look = True
                self._condition.notify()

    def submit(self, script: Path, done: Callable[[int, str], None]) -> None:
        """Submit a script; `done` gets its number, or 0 and why it was refused."""

        def order() -> None:
            try:
                number, refusal = self._commands.submit(script), ""
            except SlurmRefused as error:
                number, refusal = 0, str(error)
            done(number, refusal)

        self._put(order)

    def cancel(self, job: int) -> None:
        """End a job."""
        self._put(lambda: self._commands.cancel(job))

    def look(self) -> None:
        """Ask for everything."""
        asked = time.monotonic()
        jobs: dict[int, list[SlurmJob]] = {}
        for job in self._commands.jobs():
            jobs.setdefault(job.first_id, []).append(job)
        nodes = {node.name: node for node in self._commands.nodes()}
        self.last = Look(
            asked=asked, nodes=nodes, jobs={first: tuple(some) for first, some in jobs.items()}
        )

    def _put(self, order: Callable[[], None]) -> None:
        with self._condition:
            self._orders.append(order)
            self._condition.notify()

    def _run(self) -> None:
        while True:
            with self._condition:
                if not self._orders and not self._wants_look and not self._is_closed:
                    self._condition.wait(
                        max(0.0, self.last.asked + self._look_seconds - time.monotonic())
                    )
                if self._is_closed and (not self._orders or self.trouble):
                    return
                order = self._orders[0] if self._orders else None
            try:
                if order is not None:
                    order()
                    with self._condition:
                        self._orders.pop(0)
                elif self._wants_look or self._is_due():
                    self._wants_look = False
                    self.look()
                self.trouble = ""
            except SlurmBusy as error:
                self._note(str(error))
                time.sleep(_BUSY_SECONDS)
            except (DrystoneError, OSError) as error:
                self._note(str(error))
                with self._condition:
                    if order is not None:
                        self._orders.pop(0)  # it would be refused again
                time.sleep(_BUSY_SECONDS)

    def _is_due(self) -> bool:
        return time.monotonic() - self.last.asked >= self._look_seconds

    def _note(self, trouble: str) -> None:
        if trouble != self.trouble:
            _log.warning("Slurm: %s", trouble)
        self.trouble = trouble
