"""How quick is the running system? From submission to the first step; lists of 10,000 jobs.

Promised: the first training step within 10 s of submission on an idle machine, of which Drystone's
own part (until the processes are asked for, and from a report until it is seen) is at most 0.5 s;
`drystone jobs` within 0.5 s and a decision within 1 s when 10,000 jobs wait; `why` of one of 100
that wait within 0.5 s.
Wall times, the median of several; on a machine with other work, read the CPU seconds too.

    python benchmarks/serving.py [--jobs 10000] [--times 5]
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drystone.describe.files.cluster import parse_cluster
from drystone.describe.files.job import make_job
from drystone.describe.job import make_spec
from drystone.run.control.controller import Controller, ControllerSettings
from drystone.run.control.journal import Journal
from drystone.run.control.notes import Described
from drystone.run.control.store import Store
from drystone.run.events import Event, Submitted
from drystone.schedule.decision import Memory, find_policy
from drystone.service.client import Client, NotRunning
from figures import print_figures

CLUSTER = """
nodes:
  - {gpu: A100, gpus_per_node: 2, emulate: {speed: 0.0003, memory: 4GiB}}
  - {gpu: T4, gpus_per_node: 2, emulate: {speed: 0.0003, memory: 4GiB}}
"""
MODEL_JOB = {
    "model": "mini-gpt",
    "train": {"steps": 3, "batch": 8, "sequence": 32},
    "gpus": {"max": 1},
}
WAITING_JOB = {
    "command": "python -c 'import time; time.sleep(3600)'",
    "train": {"steps": 1000, "batch": 1},
    "gpus": {"max": 1},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStep:
    """One job on an idle system."""

    whole_seconds: float  # from submission until the first step is seen
    asked_seconds: float  # from submission until the agent was asked to start processes
    answer_seconds: float  # that the submission itself took


def main() -> int:
    """Print what was measured; 1 if a promise is broken."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--times", type=int, default=5)
    given = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    firsts = measure_first_steps(given.times)
    whole = statistics.median(one.whole_seconds for one in firsts)
    asked = statistics.median(one.asked_seconds for one in firsts)
    answer = statistics.median(one.answer_seconds for one in firsts)
    print(f"submission to first step  {whole:6.2f} s, of which until asked for {asked:.2f} s")
    print(f"submission answered after {answer:6.3f} s")
    few, few_cpu = measure_command("why", "50", jobs=100, times=given.times)
    print(f"why, 100 jobs             {few:6.2f} s, CPU of the command {few_cpu:.2f} s")
    answers: list[float] = []
    many, many_cpu = measure_command("jobs", jobs=given.jobs, times=given.times, whys=answers)
    print(f"jobs, {given.jobs} jobs         {many:6.2f} s, CPU of the command {many_cpu:.2f} s")
    decision = measure_decision(given.jobs, given.times)
    print(f"a decision, {given.jobs} jobs   {decision:6.2f} s, the snapshot included")
    middle, worst = statistics.median(answers), max(answers)
    print(f"why, 100 of {given.jobs} jobs   {middle:6.3f} s each, at worst {worst:.3f} s (API)")
    print_figures(
        {
            "first_step_seconds": whole,
            "own_seconds": asked,
            "answer_seconds": answer,
            "why_seconds": few,
            "jobs_seconds": many,
            "jobs_cpu_seconds": many_cpu,
            "why_of_many_seconds": middle,
            "decision_seconds": decision,
        }
    )
    is_quick = whole < 10 and asked < 0.5 and max(few, many) < 0.5 and decision < 1
    return 0 if is_quick else 1


def measure_first_steps(times: int) -> list[FirstStep]:
    """Jobs one after another, each on an otherwise idle system."""
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as client:
        return [_first_step(client) for _ in range(times)]


def _first_step(client: Client) -> FirstStep:
    began, started = time.time(), time.perf_counter()
    job_id = client.post("/v1/jobs", {"job": MODEL_JOB, "folder": "/"})["id"]
    answered = time.perf_counter()
    while client.get(f"/v1/jobs/{job_id}")["step"] < 1:
        time.sleep(0.02)
    seen = time.perf_counter()
    events = client.get("/v1/events", job=job_id)["events"]
    asked = next(one["time_seconds"] for one in events if one["event"] == "Launched")
    while client.get(f"/v1/jobs/{job_id}")["state"] != "done":
        time.sleep(0.1)
    return FirstStep(
        whole_seconds=seen - started,
        asked_seconds=asked - began,
        answer_seconds=answered - started,
    )


def measure_command(
    *arguments: str, jobs: int, times: int, whys: list[float] | None = None
) -> tuple[float, float]:
    """Wall and CPU seconds of one command while so many jobs are there.

    `whys` gets the seconds of asking why for a hundred of them.
    """
    with tempfile.TemporaryDirectory() as folder:
        fill(Path(folder) / "s", jobs)
        with serving(Path(folder)) as client:
            while client.get("/v1/jobs", state=["running"], most=1)["total"] < 4:
                time.sleep(0.2)
            found = [_timed([*arguments, "--folder", f"{folder}/s"]) for _ in range(times)]
            for job_id in range(1, jobs + 1, max(1, jobs // 100)) if whys is not None else ():
                began = time.perf_counter()
                assert client.get(f"/v1/jobs/{job_id}/why")["sentence"]
                whys.append(time.perf_counter() - began)
    walls, cpus = zip(*found, strict=True)
    return statistics.median(walls), statistics.median(cpus)


def measure_decision(jobs: int, times: int) -> float:
    """Seconds from looking to a list of decisions, while so many jobs wait and no GPU is taken."""
    with tempfile.TemporaryDirectory() as folder:
        fill(Path(folder) / "s", jobs)
        controller = Controller(
            ControllerSettings(folder=Path(folder) / "s", cluster=parse_cluster(CLUSTER))
        )
        try:
            policy = controller.admission.limited(find_policy("prices"))
            memory: Memory = None
            found = []
            for _ in range(times):
                began = time.perf_counter()
                decisions, memory = policy(controller.world.observe(), memory)
                found.append(time.perf_counter() - began)
                assert decisions
        finally:
            controller.close()
    return statistics.median(found)


def _timed(arguments: list[str]) -> tuple[float, float]:
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "drystone", *arguments],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True,
    )  # fmt: skip
    wall = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, cpu


def fill(folder: Path, num_jobs: int) -> None:
    """A log in which so many jobs wait: written at once, for 10,000 requests take a while."""
    folder.mkdir(mode=0o700)
    store = Store(f"sqlite:///{folder / 'log.db'}")
    lease = store.acquire("benchmark", lease_seconds=600.0)
    assert lease is not None
    journal = Journal(store, lease, parse_cluster(CLUSTER))
    now, events = journal.now(), list[Event]()
    for number in range(1, num_jobs + 1):
        table: dict[str, Any] = WAITING_JOB | {"name": f"job-{number}", "owner": "ada"}
        job, job_id = make_job(table, folder=Path("/")), str(number)
        spec = make_spec(job, None, job_id=job_id, submit_seconds=now)
        events += [
            Described(time_seconds=now, job_id=job_id, job=job, client_key=""),
            Submitted(time_seconds=now, job=spec),
        ]
    journal.commit(events)
    store.release(lease)
    store.close()


@contextmanager
def serving(folder: Path) -> Iterator[Client]:
    """`drystone serve` on emulated GPUs, ended with all that it runs."""
    (folder / "cluster.yaml").write_text(CLUSTER)
    command = [sys.executable, "-m", "drystone", "serve", "--end-all"]
    serve = subprocess.Popen(
        [*command, "--cluster", str(folder / "cluster.yaml"), "--folder", str(folder / "s")],
        stderr=subprocess.DEVNULL,
    )
    try:
        with Client(folder / "s") as client:
            _wait_for(client)
            yield client
    finally:
        serve.terminate()
        serve.wait(timeout=120)


def _wait_for(client: Client) -> None:
    deadline = time.monotonic() + 120.0
    while True:
        try:
            client.get("/v1/health")
            return
        except NotRunning:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
