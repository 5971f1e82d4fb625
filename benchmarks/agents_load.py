"""What do a thousand nodes cost the controller? Synthetic agents, the real controller.

Another process plays the agents: it answers on one socket a node, takes launches, and reports a
step of every job every second. The controller is the one that `serve` runs, at its pace (a look at
all agents five times a second), with a running job on every node. Promised: under 50 % of one core.
CPU time is measured, not wall time, and per look, so that a busy machine does not matter.

    python benchmarks/agents_load.py [--nodes 1000] [--seconds 20]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from drystone.describe.cluster import NodeSpec
from drystone.describe.files.cluster import ClusterSpec, Emulation
from drystone.describe.files.job import make_job
from drystone.run.control.controller import Controller, ControllerSettings
from drystone.run.control.world import Pace
from drystone.run.engines.agent.server import listen
from figures import print_figures

LOOKS_PER_SECOND = 1 / Pace().tick_seconds


def main() -> int:
    """Print what was measured; 1 if the promise is broken."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 3 * given.nodes + 200)), hard))
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, {given.nodes} nodes")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        names = [f"n{number:04d}" for number in range(given.nodes)]
        is_ready = multiprocessing.Event()
        agents = multiprocessing.Process(
            target=play_agents, args=(folder / "s" / "agents", names, is_ready), daemon=True
        )
        agents.start()
        is_ready.wait(120)
        try:
            share = measure(folder, names, given.seconds)
        finally:
            agents.kill()
            agents.join()
    print_figures({"core_share": share})
    return 0 if share < 0.5 else 1


def measure(folder: Path, names: list[str], seconds: float) -> float:
    """The share of a core that the controller takes at its usual pace."""
    nodes = tuple(NodeSpec(id=one, gpu="T4-16GB", num_gpus=1, memory_bytes=4e9) for one in names)
    emulations = {"T4-16GB": Emulation(speed=0.0003, memory_bytes=4 * 2**30)}
    controller = Controller(
        ControllerSettings(
            folder=folder / "s",
            cluster=ClusterSpec(nodes=nodes, emulations=emulations),
            policy="fifo",
        )
    )
    looks = 0
    tick = controller.reconciler.tick

    def counted() -> None:
        nonlocal looks
        looks += 1
        tick()

    controller.reconciler.tick = counted  # type: ignore[method-assign]
    table: dict[str, Any] = {
        "command": "python -c pass",
        "train": {"steps": 1_000_000, "batch": 1},
        "gpus": {"max": 1},
    }
    job = make_job(table, folder=folder)
    for _ in names:
        controller.submit(job)
    thread = threading.Thread(target=controller.run, daemon=True)
    thread.start()
    state, deadline = controller.journal.live.state, time.monotonic() + 300
    while sum(1 for one in names if is_stepping(controller, one)) < len(names):
        if time.monotonic() > deadline:
            raise SystemExit(f"not all run: {state.num_running} {controller.last_error}")
        time.sleep(0.5)
    cpu, wall, before, events = (
        time.process_time(),
        time.monotonic(),
        looks,
        controller.journal.sequence,
    )
    time.sleep(seconds)
    cpu, wall, num = time.process_time() - cpu, time.monotonic() - wall, looks - before
    written = controller.journal.sequence - events
    per_look = cpu / max(num, 1)
    share = per_look * LOOKS_PER_SECOND
    print(
        f"{num} looks in {wall:.1f} s, {written} events written; CPU {cpu:.2f} s, "
        f"{per_look * 1000:.1f} ms a look: {share:.0%} of a core at {LOOKS_PER_SECOND:.0f} looks/s"
    )
    print(
        f"highest resident memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MiB"
    )
    controller.leave()
    thread.join()
    controller.close()
    return share


def is_stepping(controller: Controller, name: str) -> bool:
    """Whether the job of a node has reported."""
    run = controller.reconciler.progress(str(int(name[1:]) + 1))
    return run is not None and run.step >= 1


def play_agents(folder: Path, names: list[str], is_ready: Any) -> None:
    """All agents in one process: sockets as real ones have, answers as real ones give."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 3 * len(names) + 200)), hard))

    async def play() -> None:
        for name in names:
            (folder / name).mkdir(parents=True)
            agent = SyntheticAgent()
            await asyncio.start_unix_server(
                agent.converse, sock=listen(folder / name), limit=16 * 2**20
            )
        is_ready.set()
        await asyncio.Event().wait()

    asyncio.run(play())


class SyntheticAgent:
    """Takes one launch at a time, and says that it trains."""

    def __init__(self) -> None:
        self._launches: dict[str, tuple[dict[str, Any], float]] = {}

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One JSON object a line."""
        with suppress(ConnectionError):
            while line := await reader.readline():
                request = json.loads(line)
                writer.write(json.dumps({"ok": True, **self.answer(request)}).encode() + b"\n")
                await writer.drain()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """As `run/engines/agent/server.py` does, without processes."""
        match request["op"]:
            case "hello":
                return {"node": "synthetic", "pid": os.getpid(), "controller": 0, "leaving": ""}
            case "launch":
                key = f"{request['job_id']}.{request['epoch']}"
                self._launches.setdefault(key, (request, time.monotonic()))
                return {"is_new": True}
            case "poll":
                offsets = request.get("offsets", {})
                shown = [self._show(key, offsets.get(key, 0)) for key in self._launches]
                return {"launches": shown, "leaving": ""}
        return {}

    def _show(self, key: str, offset: int) -> dict[str, Any]:
        """A step a second; the offset counts steps."""
        request, since = self._launches[key]
        step, reports = int(time.monotonic() - since), ""
        if step > offset:
            line = {"event": "step", "step": step, "loss": 1.0 / step, "step_seconds": 1.0}
            reports = json.dumps(line) + "\n"
        return {
            "job_id": request["job_id"],
            "epoch": request["epoch"],
            "devices": [one["device"] for one in request["ranks"]],
            "exits": {str(one["rank"]): None for one in request["ranks"]},
            "is_over": False,
            "note": "",
            "reports": reports,
            "offset": max(step, offset),
        }


if __name__ == "__main__":
    sys.exit(main())
