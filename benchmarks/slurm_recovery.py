"""How long until a job runs again after the slurmd of its node was killed, and does anything stay?

A real Slurm of four nodes on this machine (tests/engines/slurm_fixture.py), Drystone's settings as
they are by default, a tiny model that really trains on emulated GPUs. SIGKILL goes to the slurmd of
the node of its first rank; times are from then on. Without Slurm or root it says so and ends.

    python benchmarks/slurm_recovery.py [--trials 3]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "engines"))

from engine_slurm import emulated
from slurm_fixture import SlurmCluster, SlurmNode, missing_slurm

from drystone.describe.files.job import make_job
from drystone.run.control.controller import Controller, ControllerSettings
from drystone.run.engines.slurm.engine import SlurmEngine, SlurmSettings
from drystone.run.events import Interrupted
from drystone.run.lifecycle import TERMINAL
from figures import print_figures, print_skip

BAR_SECONDS = 10.0
NODES = (
    SlurmNode("a1", "a100", 2),
    SlurmNode("a2", "a100", 2),
    SlurmNode("t1", "t4", 1),
    SlurmNode("t2", "t4", 1),
)
WAIT_SECONDS = 300.0


def until(condition: Callable[[], Any], what: str) -> Any:
    """What a condition gives, once it is something; every wait ends."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {WAIT_SECONDS:.0f} s in vain for {what}")
        time.sleep(0.02)
    return found


def ranks_of(folder: Path, epoch: int) -> list[int]:
    """Training processes of a launch that are alive, found by their environment."""
    marks = (f"DRYSTONE_CHECKPOINTS={folder}/jobs/".encode(), f"DRYSTONE_EPOCH={epoch}".encode())
    found = []
    for path in Path("/proc").iterdir():
        try:
            lines = (path / "environ").read_bytes().split(b"\0") if path.name.isdigit() else []
        except OSError:
            continue
        if marks[1] in lines and any(one.startswith(marks[0]) for one in lines):
            found.append(int(path.name))
    return found


def steps_of(folder: Path, epoch: int) -> list[int]:
    """The steps that a launch has reported."""
    found = []
    for path in folder.glob(f"agents/*/launches/1.{epoch}/rank-0.out"):
        for line in path.read_text().splitlines():
            report = json.loads(line)
            found += [report["step"]] if report["event"] == "step" else []
    return found


def measure(root: Path) -> dict[str, float]:
    """Seconds from the kill until each thing that follows."""
    cluster = SlurmCluster(root / "slurm", NODES)
    folder = root / "drystone"
    controller = thread = None
    try:
        cluster.start()
        engine = SlurmEngine(folder, SlurmSettings(environment=cluster.environment), emulated())
        settings = ControllerSettings(folder=folder, cluster=engine.discover(), engine=engine)
        controller = Controller(settings)
        thread = threading.Thread(target=controller.run)
        thread.start()
        return follow(cluster, controller, folder)
    finally:
        if controller is not None:
            controller.leave()
            if thread is not None:
                thread.join()
            controller.close(ends_agents=True)
        cluster.close()


def follow(cluster: SlurmCluster, controller: Controller, folder: Path) -> dict[str, float]:
    """Train, kill, and watch."""
    table = {
        "model": "mini-gpt",
        "train": {"steps": 60, "batch": 12, "sequence": 16, "checkpoint_every": 3},
        "gpus": {"min": 2, "max": 2, "allow": ["A100"]},
    }
    job = controller.submit(make_job(table, folder=folder))[0]
    until(lambda: max(steps_of(folder, 1), default=0) >= 4, "the first steps")
    node = controller.launches_of(job)[0].devices[0][0]
    killed = time.time()
    cluster.kill_node(node)
    seen: dict[str, float] = {}

    def note(name: str, condition: Callable[[], Any]) -> None:
        if name not in seen and condition():
            seen[name] = time.time() - killed

    def is_told() -> bool:
        events = [event for _, event in controller.store.read(job_id=job)]
        return any(isinstance(one, Interrupted) for one in events)

    def look() -> bool:
        note("noticed", is_told)
        note("old ranks gone", lambda: "noticed" in seen and not ranks_of(folder, 1))
        note("new ranks started", lambda: ranks_of(folder, 2))
        note("first new step", lambda: steps_of(folder, 2))
        return len(seen) == 4

    until(look, "the restart")
    until(lambda: controller.find(job).state in TERMINAL, "the end of the job")
    if controller.find(job).state.value != "done":
        raise SystemExit(f"the job is {controller.find(job).state.value}")
    return seen


def main() -> None:
    """Run the trials, and say whether the bar was reached."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=1)
    given = parser.parse_args()
    if reason := missing_slurm():
        print_skip(reason)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left behind
    rows = []
    for trial in range(given.trials):
        with tempfile.TemporaryDirectory(prefix="drystone-slurm-") as scratch:
            row = measure(Path(scratch))
        rows.append(row)
        told = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in row.items())
        print(f"trial {trial + 1}: {told}", flush=True)
    started = [row["new ranks started"] for row in rows]
    load = os.getloadavg()[0]
    print(
        f"restarted after {statistics.median(started):.1f} s (median of {len(rows)}, "
        f"worst {max(started):.1f} s; aim {BAR_SECONDS:.0f} s), load {load:.0f}"
    )
    print_figures(
        {
            "restart_seconds": statistics.median(started),
            "first_step_seconds": statistics.median(row["first new step"] for row in rows),
        }
    )


if __name__ == "__main__":
    main()
