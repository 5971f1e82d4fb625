"""Slurm's commands, and what they showed last.

The commands are run in the thread of a `ClusterWatch`, so that the controller never waits for them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from drystone.errors import DrystoneError
from drystone.run.engines.agent.environment import job_environment
from drystone.run.engines.agents_on_nodes import ClusterWatch
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
        # `sbatch` gives all it has to the job: only what a job may see, and its own settings.
        own = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("SLURM_", "SBATCH_", "SQUEUE_", "SINFO_", "SCANCEL_"))
        }
        self._environment = {**job_environment(os.environ), **own, **(environment or {})}
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
                command,
                env=self._environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=_TIMEOUT_SECONDS,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            raise SlurmBusy(f"{command[0]} gave no answer for {_TIMEOUT_SECONDS:.0f} s") from None
        except OSError as error:
            raise SlurmRefused(f"{command[0]} cannot be run: {error}") from None
        if done.returncode == 0:
            return done.stdout
        said = (done.stderr or done.stdout).strip()[-800:]
        kind = SlurmBusy if _LATER.search(said) else SlurmRefused
        raise kind(f"{' '.join(command[:3])}: {said or f'exit code {done.returncode}'}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmView:
    """Slurm at one time."""

    asked: float = 0.0  # when it was asked, by the monotonic clock
    nodes: Mapping[str, SlurmNode] = field(default_factory=dict)
    jobs: Mapping[int, tuple[SlurmJob, ...]] = field(default_factory=dict)  # by first number


class SlurmWatch(ClusterWatch[SlurmView]):
    """What Slurm shows, and the jobs that it is asked to run and to cancel."""

    def __init__(self, commands: Commands, *, look_seconds: float) -> None:
        self._commands = commands
        super().__init__(
            "Slurm", self._view, SlurmView(), look_seconds=look_seconds, passing=SlurmBusy
        )

    def submit(self, script: Path, done: Callable[[int, str], None]) -> None:
        """Submit a script; `done` gets its number, or 0 and why it was refused."""

        def submit() -> None:
            try:
                number, refusal = self._commands.submit(script), ""
            except SlurmRefused as error:
                number, refusal = 0, str(error)
            done(number, refusal)

        self.order(submit)

    def cancel(self, job: int) -> None:
        """End a job."""
        self.order(lambda: self._commands.cancel(job))

    def _view(self, asked: float) -> SlurmView:
        jobs: dict[int, list[SlurmJob]] = {}
        for job in self._commands.jobs():
            jobs.setdefault(job.first_id, []).append(job)
        nodes = {node.name: node for node in self._commands.nodes()}
        return SlurmView(
            asked=asked, nodes=nodes, jobs={first: tuple(some) for first, some in jobs.items()}
        )
