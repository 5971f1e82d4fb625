"""Is a job lost, or run twice, whatever is killed? Real processes, faults at random, by seed.

Each run submits jobs to a service with agents and training processes, and then does one of these at
a moment of chance: kills the controller, an agent or a training process; stops the controller for
longer than its lease, or an agent for longer than it may be silent, as a partition does; ends the
controller in order; two of them at once. The controller is started again, and runs follow each
other in the same folder until the last, when everything has to come to its end. Then the audit of
every job is read: one process at a time, every step done, none again but those since the last
checkpoint; no process is left.

    python benchmarks/chaos.py [--runs 500] [--seed 1] [--database postgresql+psycopg://...]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from drystone.service.client import Client
from figures import print_figures

TRAINER = Path(__file__).parents[1] / "tests" / "service" / "trainer.py"
NUM_STEPS = 40
CLUSTER = """
nodes:
  - {gpu: A100, gpus_per_node: 2, emulate: {speed: 0.0003, memory: 4GiB}}
  - {gpu: T4, gpus_per_node: 1, count: 2, emulate: {speed: 0.0003, memory: 4GiB}}
"""
OVER = {"done", "failed", "cancelled", "refused"}


class System:
    """A service, started again whenever it has ended."""

    def __init__(self, folder: Path, database: str) -> None:
        self.folder = folder
        (folder / "c.yaml").write_text(CLUSTER)
        self._more = ["--database", database] if database else []
        self.process: subprocess.Popen[bytes] | None = None
        self.num_jobs = 0

    def start(self) -> None:
        """Unless it runs; until it answers."""
        if self.process is not None and self.process.poll() is None:
            return
        command = [sys.executable, "-m", "drystone", "serve", "--folder", str(self.folder / "s")]
        command += ["--cluster", str(self.folder / "c.yaml"), *self._more]
        with (self.folder / "serve.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and self.process.poll() is None:
            with suppress(Exception):
                self.client().get("/v1/health")
                return
            time.sleep(0.05)
        raise SystemExit(f"it does not start: {(self.folder / 'serve.log').read_text()[-2000:]}")

    def client(self) -> Client:
        """A connection of its own: the service may have been another one a moment ago."""
        return Client(self.folder / "s")

    def submit(self, number: int) -> None:
        """Again with the same key until it is answered."""
        job = {
            "command": f"python {TRAINER}", "train": {"steps": NUM_STEPS, "batch": 4},
            "gpus": {"max": 1 + number % 2}, "environment": {"STEP_SECONDS": "0.03"},
        }  # fmt: skip
        body = {"job": job, "folder": str(self.folder), "client_key": f"key{number}"}
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            self.start()
            with suppress(Exception):
                self.client().post("/v1/jobs", body)
                self.num_jobs += 1
                return
            time.sleep(0.1)
        raise SystemExit("no submission was answered for two minutes")

    def states(self) -> dict[str, str]:
        """Of all jobs."""
        jobs = self.client().get("/v1/jobs?limit=5000")["jobs"]
        return {job["id"]: job["state"] for job in jobs}

    def processes(self, word: str) -> list[int]:
        """Of this system, with a word in their command lines."""
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                line = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
                is_of_kind = word.encode() in line
                if is_of_kind and str(self.folder).encode() in line + _variables_of(entry):
                    found.append(int(entry.name))
        return found


def _variables_of(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes()
    except OSError:  # an agent's, which nobody may read
        return b""


def strike(system: System, chance: random.Random) -> str:
    """One fault; what it was."""
    kind = chance.choice(
        ["kill serve", "kill serve", "end serve", "pause serve", "kill agent", "part agent",
         "kill training", "kill serve and agent"]
    )  # fmt: skip
    serve = system.process.pid if system.process is not None else 0
    if "agent" in kind:
        _hit(system.processes("drystone.run.engines.agent"), chance, is_pause="part" in kind)
    if "training" in kind:
        _hit(system.processes(TRAINER.name), chance, is_pause=False)
    if "serve" in kind:
        if kind == "pause serve":
            _pause(serve, chance.choice([1.0, 4.0, 12.0]))
        else:
            os.kill(serve, signal.SIGTERM if kind == "end serve" else signal.SIGKILL)
            assert system.process is not None
            system.process.wait(60)
    return kind


def _hit(pids: list[int], chance: random.Random, *, is_pause: bool) -> None:
    if pids:
        pid = chance.choice(sorted(pids))
        with suppress(ProcessLookupError):
            if is_pause:
                _pause(pid, chance.choice([1.0, 5.0, 15.0]))
            else:
                os.kill(pid, signal.SIGKILL)


def _pause(pid: int, seconds: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def problems_of(lines: list[str]) -> list[str]:
    """What an audit says that must not be."""
    step, saved, epochs, found = 0, 0, [0], []
    for line in lines:
        epoch, what, *number = line.split()
        at = int(number[0]) if number else 0
        if what == "twice":
            found.append("two processes at once")
        elif what == "started":
            # One that was killed may have saved a step more than it could still write down.
            if not saved <= at <= step or int(epoch) <= epochs[-1]:
                found.append(f"launch {epoch} began at step {at}, saved was {saved}")
            step, saved, epochs = at, at, [*epochs, int(epoch)]
        elif what == "step":
            if int(epoch) != epochs[-1] or at != step + 1:
                found.append(f"step {at} of launch {epoch} after step {step} of {epochs[-1]}")
            step = at
        else:
            saved = at
    return found if step == NUM_STEPS else [*found, f"it ended at step {step}"]


def main() -> int:
    """Print what was done and what went wrong; 1 where something did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--database", default="")
    given = parser.parse_args()
    chance, kinds, began = random.Random(given.seed), Counter[str](), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        system = System(Path(name), given.database)
        for number in range(given.runs):
            system.submit(number)
            time.sleep(chance.uniform(0.0, 1.5))
            kinds[strike(system, chance)] += 1
            system.start()
            if number % 20 == 19:
                print(number + 1, "runs", round(time.monotonic() - began), "s", flush=True)
        deadline = time.monotonic() + 300 + given.runs
        while time.monotonic() < deadline and set(system.states().values()) - OVER:
            time.sleep(0.5)
        states = system.states()
        wrong = {job: state for job, state in states.items() if state != "done"}
        told = {}
        for job in states:
            audit = system.folder / "s" / "jobs" / job / "checkpoints" / "audit"
            lines = audit.read_text().splitlines() if audit.exists() else []
            if found := problems_of(lines):
                told[job] = found[:3]
        left = system.processes(TRAINER.name)
        assert system.process is not None
        system.process.send_signal(signal.SIGTERM)
        system.process.wait(60)
        for pid in system.processes("drystone.run.engines.agent"):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        result = {
            "runs": given.runs, "seed": given.seed, "faults": dict(kinds),
            "jobs": len(states), "missing": system.num_jobs - len(states), "not_done": wrong,
            "problems": told, "processes_left": len(left),
            "seconds": round(time.monotonic() - began),
        }  # fmt: skip
        print(json.dumps(result, indent=1))
        print_figures(
            {
                "jobs": len(states),
                "missing": system.num_jobs - len(states),
                "not_done": len(wrong),
                "problems": len(told),
                "processes_left": len(left),
            }
        )
        time.sleep(2)
    return 1 if wrong or told or left or result["missing"] else 0


if __name__ == "__main__":
    sys.exit(main())
