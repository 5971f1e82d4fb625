"""Does the service stay quick under load? 64 clients beside a controller at work; live updates.

Promised: 64 clients for 60 s without an error, the 99th percentile of reads under 100 ms and of
submissions under 250 ms, decisions not delayed; with 10,000 jobs in the store of which 500 live,
live updates for a browser under 10 % of a core. Clients are people and pages: each asks, waits
half a second, and asks again; one request in fifty is a submission. Everything is on loopback, in a
process of its own as it ships. On a machine with other work, read the CPU seconds beside the times.

    python benchmarks/api_load.py [--seconds 60] [--clients 64] [--jobs 10000] [--live 500]
"""

from __future__ import annotations

import argparse
import dataclasses
import http.client
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from drystone.describe.files.cluster import parse_cluster
from drystone.describe.files.job import make_job
from drystone.describe.job import make_spec
from drystone.run.control.access import make_team, make_token
from drystone.run.control.journal import Journal
from drystone.run.control.notes import Described
from drystone.run.control.store import Store
from drystone.run.events import Event, Finished, Started, Submitted
from drystone.service.client import Client, NotRunning
from figures import print_figures

PAUSE_SECONDS = 0.5
CLUSTER = """
nodes:
  - {gpu: A100, gpus_per_node: 2, emulate: {speed: 0.0003, memory: 4GiB}}
  - {gpu: T4, gpus_per_node: 2, emulate: {speed: 0.0003, memory: 4GiB}}
"""
WAITING = {
    "command": "python -c 'import time; time.sleep(3600)'",
    "train": {"steps": 1000, "batch": 1},
    "gpus": {"max": 1},
}
READS = (
    "/v1/jobs?most=50", "/v1/jobs?most=50&newest=true", "/v1/jobs?state=running", "/v1/cluster",
    "/v1/health", "/v1/jobs/{job}", "/v1/events?most=50&newest=true", "/v1/teams", "/v1/spend",
)  # fmt: skip


def main() -> int:
    """Print what was measured; 1 if a promise is broken."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--live", type=int, default=500)
    given = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as folder:
        tokens = fill(Path(folder) / "s", given.jobs, given.live, given.clients)
        with serving(Path(folder)) as (port, process):
            cost = measure_live(port, tokens[0], process.pid)
            quiet = decisions(port, tokens[0])
            load = Load(port, tokens, given.seconds, given.jobs)
            load.run(process.pid)
            busy = load.decision_seconds
    ok = report(load, cost, quiet, busy)
    return 0 if ok else 1


def report(load: Load, cost: float, quiet: float, busy: list[float]) -> bool:
    """In words; whether all promises are kept."""
    reads, submits = sorted(load.reads), sorted(load.submits)
    per_request = load.cpu_seconds / max(1, len(reads) + len(submits))
    print(f"requests {len(reads) + len(submits)}, errors {len(load.errors)} {load.errors[:3]}")
    print(f"CPU of the service {load.cpu_seconds / load.seconds:.0%} of a core, "
          f"{per_request * 1e3:.2f} ms a request, controller included")  # fmt: skip
    for name, found in (("reads", reads), ("submissions", submits)):
        if found:
            print(f"{name:12} median {statistics.median(found) * 1e3:6.1f} ms, 99th percentile "
                  f"{found[int(0.99 * (len(found) - 1))] * 1e3:6.1f} ms, worst "
                  f"{found[-1] * 1e3:6.1f} ms")  # fmt: skip
    worst = max(busy, default=0.0)
    usual = statistics.median(busy)
    print(f"decision {quiet * 1e3:.0f} ms before, median {usual * 1e3:.0f} ms and at most "
          f"{worst * 1e3:.0f} ms under load")  # fmt: skip
    print(f"live updates for one browser: {cost:.1%} of a core beyond none")
    reads_p99, submits_p99 = (
        some[int(0.99 * (len(some) - 1))] if some else 60.0 for some in (reads, submits)
    )
    print_figures(
        {
            "num_errors": len(load.errors),
            "reads_p99_seconds": reads_p99,
            "submits_p99_seconds": submits_p99,
            "cpu_seconds_per_request": per_request,
            "decision_times_quiet": usual / quiet if quiet > 0 else 1.0,
            "live_core_share": cost,
        }
    )
    return (
        not load.errors
        and reads[int(0.99 * (len(reads) - 1))] < 0.1
        and submits[int(0.99 * (len(submits) - 1))] < 0.25
        and cost < 0.1
    )


@dataclasses.dataclass
class Load:
    """Clients, each in a thread with a connection and a token of its own."""

    port: int
    tokens: list[str]
    seconds: float
    num_jobs: int
    reads: list[float] = dataclasses.field(default_factory=list)
    submits: list[float] = dataclasses.field(default_factory=list)
    errors: list[str] = dataclasses.field(default_factory=list)
    decision_seconds: list[float] = dataclasses.field(default_factory=list)
    cpu_seconds: float = 0.0

    def run(self, pid: int) -> None:
        """All of them at once, for so long."""
        before = cpu_of(pid)
        threads = [
            threading.Thread(target=self._client, args=(number, token))
            for number, token in enumerate(self.tokens)
        ]
        for one in threads:
            one.start()
        end = time.monotonic() + self.seconds
        while time.monotonic() < end:
            time.sleep(min(1.0, max(0.0, end - time.monotonic())))
            self.decision_seconds.append(decisions(self.port, self.tokens[0]))
        for one in threads:
            one.join(timeout=60)
        self.cpu_seconds = cpu_of(pid) - before

    def _client(self, number: int, token: str) -> None:
        chance = random.Random(number)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        end = time.monotonic() + self.seconds
        time.sleep(chance.random() * PAUSE_SECONDS)
        while time.monotonic() < end:
            is_submission = chance.random() < 0.02
            job = str(chance.randrange(1, self.num_jobs + 1))
            path = "/v1/jobs" if is_submission else chance.choice(READS).format(job=job)
            body = json.dumps({"job": WAITING}) if is_submission else None
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            started = time.perf_counter()
            try:
                connection.request("POST" if is_submission else "GET", path, body, headers)
                answer = connection.getresponse()
                answer.read()
                if answer.status >= 400:
                    self.errors.append(f"{answer.status} {path}")
            except (OSError, http.client.HTTPException) as error:
                self.errors.append(f"{type(error).__name__} {path}")
                connection.close()
            took = time.perf_counter() - started
            (self.submits if is_submission else self.reads).append(took)
            time.sleep(PAUSE_SECONDS * (0.5 + chance.random()))
        connection.close()


def measure_live(port: int, token: str, pid: int, seconds: float = 10.0) -> float:
    """The share of a core that one listener adds."""
    time.sleep(3.0)
    before = cpu_of(pid)
    time.sleep(seconds)
    idle = cpu_of(pid) - before
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/v1/stream", headers={"Authorization": f"Bearer {token}"})
    answer = connection.getresponse()
    reader = threading.Thread(
        target=lambda: [None for _ in iter(answer.readline, b"")], daemon=True
    )
    reader.start()
    time.sleep(1.0)
    before = cpu_of(pid)
    time.sleep(seconds)
    busy = cpu_of(pid) - before
    if connection.sock is not None:
        connection.sock.shutdown(socket.SHUT_RDWR)
    return max(0.0, busy - idle) / seconds


def decisions(port: int, token: str) -> float:
    """What the last decision took, as the service says."""
    with Client(url=f"http://127.0.0.1:{port}", token=token) as client:
        return float(client.get("/v1/health")["decision_seconds"])


def cpu_of(pid: int) -> float:
    """User and system seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def fill(folder: Path, num_jobs: int, num_live: int, num_tokens: int) -> list[str]:
    """A log with so many jobs, all but some of them done; tokens for as many people."""
    folder.mkdir(mode=0o700)
    store = Store(f"sqlite:///{folder / 'log.db'}")
    lease = store.acquire("benchmark", lease_seconds=600.0)
    assert lease is not None
    journal = Journal(store, lease, parse_cluster(CLUSTER))
    now, events, texts = journal.now(), list[Event](), list[str]()
    events.append(make_team("team", quota=None, budget_dollars=1e6, budget_period="month",
                            now_seconds=now))  # fmt: skip
    for number in range(num_tokens):
        note, text = make_token(name=f"p{number}", role="submitter", team="team", now_seconds=now)
        events.append(note)
        texts.append(text)
    for number in range(1, num_jobs + 1):
        table: dict[str, Any] = WAITING | {"name": f"job-{number}", "owner": f"p{number % 9}"}
        job = dataclasses.replace(make_job(table, folder=Path("/")), team="team")
        job_id = str(number)
        spec = make_spec(job, None, job_id=job_id, submit_seconds=now)
        events += [
            Described(time_seconds=now, job_id=job_id, job=job),
            Submitted(time_seconds=now, job=spec),
        ]
        if number <= num_jobs - num_live:
            events += [
                Started(time_seconds=now, job_id=job_id, option=0, placement=((0, 1),),
                        samples_per_second=1.0, productive_seconds=now),
                Finished(time_seconds=now, job_id=job_id),
            ]  # fmt: skip
    journal.commit(events)
    store.release(lease)
    store.close()
    return texts


@contextmanager
def serving(folder: Path) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """`drystone serve` on emulated GPUs and on a port, ended with all that it runs."""
    (folder / "cluster.yaml").write_text(CLUSTER)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "drystone", "serve", "--end-all", "--port", str(port)]
    process = subprocess.Popen(
        [*command, "--cluster", str(folder / "cluster.yaml"), "--folder", str(folder / "s")],
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 180.0
        while True:
            try:
                with Client(folder / "s") as client:
                    if client.get("/v1/jobs", state=["running"], most=1)["total"] >= 4:
                        break
            except NotRunning:
                pass
            if time.monotonic() > deadline:
                raise TimeoutError("the service does not come up")
            time.sleep(0.2)
        yield port, process
    finally:
        process.terminate()
        process.wait(timeout=120)


if __name__ == "__main__":
    sys.exit(main())
