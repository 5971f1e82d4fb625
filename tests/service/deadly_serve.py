"""A controller that submits what it is told and is killed, by itself, at a seeded moment.

`python deadly_serve.py FOLDER CLUSTER [restless]` reads seeds, one a line. For each it forks a
controller (so that everything need not be imported again), which dies before or after the n-th
write of the log or the first one of a certain kind, in the middle of giving an order to an agent,
or at any time. With seed 0 it lives until all jobs are over. How it ended is answered as JSON:
`code` and `cause`. Jobs whose name is `cancelled` or `paused` are cancelled, or paused and resumed,
once they have run. With `restless` the first job gets other GPUs again and again (`restless.py`).
"""

import faulthandler
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from restless import restless

from drystone.describe.files.cluster import load_cluster_file
from drystone.describe.files.job import make_job
from drystone.errors import InvalidSpec
from drystone.run.control import controller as controllers
from drystone.run.control.controller import Controller, ControllerSettings
from drystone.run.control.runs import Patience
from drystone.run.control.store import Store
from drystone.run.control.world import Pace
from drystone.run.engines.agent.client import AgentClient
from drystone.run.events import Paused, Started
from drystone.run.lifecycle import TERMINAL, JobState

PATIENCE = Patience(grace_seconds=5.0, progress_seconds=0.3, hang_seconds=5.0)
KINDS = ("Progressed", "Learned", "Finished", "Interrupted", "Paused", "Unpaused", "Cancelled",
         "Failed", "Stopped")  # fmt: skip


def die(folder: Path, cause: str) -> None:
    (folder / "cause").write_text(cause)
    os.kill(os.getpid(), signal.SIGKILL)


def arm(folder: Path, seed: int) -> None:
    dice = random.Random(seed)
    left, where = dice.randint(1, 14), dice.choice(["before", "after", "asked", "ordered"])
    wanted = dice.choice(KINDS) if where in ("before", "after") and dice.random() < 0.5 else ""
    append, ask = Store.append, AgentClient.ask

    def deadly_append(self, lease, events, rows=(), **more):
        nonlocal left
        names = "+".join(sorted({type(one).__name__ for one in events}))
        left = left - 1 if not wanted else int(wanted not in names)
        if left <= 0 and where == "before":
            die(folder, f"before {names}")
        last = append(self, lease, events, rows, **more)
        if left <= 0 and where == "after":
            die(folder, f"after {names}")
        return last

    def deadly_ask(self, op, **values):
        if left <= 0 and op in ("launch", "stop", "forget") and where == "asked":
            die(folder, f"before {op}")
        answer = ask(self, op, **values)
        if left <= 0 and op in ("launch", "stop", "forget") and where == "ordered":
            die(folder, f"after {op}")
        return answer

    Store.append, AgentClient.ask = deadly_append, deadly_ask


def meddle(controller: Controller, names: dict[str, str]) -> None:
    """Do to jobs what their owners would: each thing once, whichever controller comes to it."""
    for job_id, name in names.items():
        state = controller.find(job_id).state
        with suppress(InvalidSpec):  # it has ended meanwhile
            if name == "paused" and state is JobState.PAUSED:
                controller.resume(job_id)
            elif state is JobState.RUNNING:
                kinds = [type(one) for _, one in controller.store.read(job_id=job_id)]
                if name == "cancelled" and Started in kinds:
                    controller.cancel(job_id)
                elif name == "paused" and Paused not in kinds:
                    controller.pause(job_id)


def serve(folder: Path, cluster: Path, seed: int) -> None:
    faulthandler.dump_traceback_later(150, exit=True)  # one that hangs says where
    if seed:
        arm(folder, seed)
    controller = Controller(
        ControllerSettings(
            folder=folder,
            cluster=load_cluster_file(cluster),
            pace=Pace(tick_seconds=0.05, startup_seconds=0.5, round_seconds=2.0),
            patience=PATIENCE,
        )
    )
    thread = threading.Thread(target=controller.run, daemon=True)
    thread.start()
    jobs = json.loads((folder / "wanted.json").read_text())
    names = {}
    for number, job in enumerate(jobs):
        made = make_job(job, folder=folder)
        job_id, _ = controller.submit(made, client_key=f"key-{number}")
        if made.name in ("cancelled", "paused"):
            names[job_id] = made.name
    until = time.monotonic() + random.Random(seed).uniform(1.0, 5.0)
    while any(
        one.state not in TERMINAL for one in list(controller.journal.live.state.jobs.values())
    ):
        time.sleep(0.1)
        meddle(controller, names)
        if not thread.is_alive():
            raise RuntimeError("the loop ended")
        if seed and time.monotonic() > until:
            die(folder, "at any time")
    controller.leave()
    thread.join()
    controller.close(ends_agents=True)


def main() -> None:
    global PATIENCE
    folder, cluster = Path(sys.argv[1]), Path(sys.argv[2])
    if sys.argv[3:] == ["restless"]:
        controllers.find_policy = lambda _: restless
        PATIENCE = replace(PATIENCE, grace_seconds=60.0, hang_seconds=120.0)
    for line in sys.stdin:
        (folder / "cause").unlink(missing_ok=True)
        child = os.fork()
        if not child:
            try:
                serve(folder, cluster, int(line))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        cause = (folder / "cause").read_text() if (folder / "cause").exists() else ""
        sys.stdout.write(json.dumps({"code": code, "cause": cause}) + "\n")
        sys.stdout.flush()


main()
