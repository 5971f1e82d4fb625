"""A controller of one's own in a thread, with agents and training scripts as real processes."""

import json
import threading
import time
from contextlib import contextmanager
from pathlib import Path

from drystone.describe.files.cluster import parse_cluster
from drystone.describe.files.job import make_job
from drystone.run.control.controller import Controller, ControllerSettings
from drystone.run.control.runs import Patience
from drystone.run.control.world import Pace
from drystone.run.engines.agent.client import AgentClient
from drystone.run.lifecycle import TERMINAL, JobState

TRAINER = Path(__file__).parent / "trainer.py"
CLUSTER = """
nodes:
  - {gpu: A100, gpus_per_node: 2, emulate: {speed: 0.0003, memory: 4GiB}}
  - {gpu: T4, gpus_per_node: 2, emulate: {speed: 0.0003, memory: 4GiB}}
"""


class Running:
    """A controller, and what tests ask of it."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.live = controller.journal.live
        self.folder = controller.settings.folder

    def submit(
        self, *, fault: str = "", steps: int = 20, seconds: float = 0.03, owner: str = "",
        folder: Path | None = None, **more,
    ) -> str:  # fmt: skip
        table = {
            "command": f"python {TRAINER}",
            "train": {"steps": steps, "batch": 4},
            "gpus": {"max": 1},
            "environment": {"FAULT": fault, "STEP_SECONDS": str(seconds)},
        }
        job = make_job(table | more, folder=folder or self.folder, owner=owner)
        return self.controller.submit(job)[0]

    def state(self, job_id: str) -> JobState:
        return self.controller.find(job_id).state

    def events(self, job_id: str = "") -> list:
        return [event for _, event in self.controller.store.read(job_id=job_id)]

    def kinds(self, job_id: str) -> list[str]:
        return [type(one).__name__ for one in self.events(job_id)]

    def audit(self, job_id: str) -> list[str]:
        path = self.folder / "jobs" / job_id / "checkpoints" / "audit"
        return path.read_text().splitlines() if path.exists() else []

    def wait_over(self, *job_ids: str, seconds: float = 60.0) -> list[str]:
        self.until(lambda: all(self.state(one) in TERMINAL for one in job_ids), seconds=seconds)
        return [self.state(one).value for one in job_ids]

    def until(self, condition, *, seconds: float = 60.0):
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < deadline, (self.controller.last_error, self.events()[-5:])
            time.sleep(0.03)
        return found

    def launches(self) -> list:
        """What agents know of, asked over connections of one's own."""
        found = []
        for node in self.controller.settings.cluster.nodes:
            client = AgentClient(
                self.folder / "agents" / node.id, controller=self.controller.journal.lease.epoch
            )
            found += client.ask("poll")["launches"]
            client.close()
        return found

    def reports(self, job_id: str) -> list[dict]:
        """Every report of Drystone's own runtime, launch after launch."""
        files = sorted(
            self.folder.glob(f"agents/*/launches/{job_id}.*/rank-0.out"),
            key=lambda path: int(path.parent.name.split(".")[1]),
        )
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    def wait_step(self, job_id: str, step: int) -> None:
        def reached() -> bool:
            run = self.controller.reconciler.progress(job_id)
            return run is not None and run.step >= step

        self.until(reached)


@contextmanager
def running(folder: Path, cluster: str = CLUSTER, *, database: str = "", settings=None, **patience):
    # Who is silent for five seconds hangs, and not only because the machine is busy.
    given = {"grace_seconds": 10.0, "progress_seconds": 0.3, "hang_seconds": 5.0} | patience
    controller = Controller(
        ControllerSettings(
            folder=folder,
            cluster=parse_cluster(cluster),
            database=database,
            pace=Pace(tick_seconds=0.05, startup_seconds=0.5, round_seconds=2.0),
            patience=Patience(hang_steps=5.0, **given),
            **(settings or {}),
        )
    )
    thread = threading.Thread(target=controller.run)
    thread.start()
    try:
        yield Running(controller)
    finally:
        controller.leave()
        thread.join()
        controller.close(ends_agents=True)
