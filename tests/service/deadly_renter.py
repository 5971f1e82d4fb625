"""A controller that rents, and is killed by itself at a seeded moment around a rental.

`python deadly_renter.py FOLDER SEED`: dies before or after the n-th event about renting is written,
or before or after the provider is asked. With seed 0 it lives until all is over and given back.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

from renters import is_quiet, make_renter, open_cloud

from drystone.describe.files.job import make_job
from drystone.run.control.store import Store
from drystone.run.events import (
    BillSettled,
    NodeJoined,
    NodeReclaimed,
    NodeReleased,
    ReleaseAsked,
    RentalAsked,
    RentalFailed,
)
from drystone.run.lifecycle import TERMINAL
from drystone.run.renting.simulated_cloud import SimulatedCloud

RENTAL_EVENTS = (
    RentalAsked, RentalFailed, NodeJoined, ReleaseAsked, NodeReleased, NodeReclaimed, BillSettled,
)  # fmt: skip


def arm(seed: int) -> None:
    dice = random.Random(seed)
    left, where = dice.randint(1, 6), dice.choice(["before", "after"])
    append, rent, release = Store.append, SimulatedCloud.rent, SimulatedCloud.release

    def count(names: str) -> bool:
        nonlocal left
        left -= 1
        if left <= 0:
            sys.stdout.write(f"{where} {names}\n")
            sys.stdout.flush()
        return left <= 0

    def deadly(call, names: str):
        is_over = count(names)
        if is_over and where == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        answer = call()
        if is_over:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    def deadly_append(self, lease, events, rows=(), **more):
        names = "+".join(sorted({type(one).__name__ for one in events}))
        if not any(isinstance(one, RENTAL_EVENTS) for one in events):
            return append(self, lease, events, rows, **more)
        return deadly(lambda: append(self, lease, events, rows, **more), names)

    def deadly_rent(self, token, offer):
        return deadly(lambda: rent(self, token, offer), "rent")

    def deadly_release(self, token):
        return deadly(lambda: release(self, token), "release")

    Store.append = deadly_append
    SimulatedCloud.rent, SimulatedCloud.release = deadly_rent, deadly_release


def main() -> None:
    folder, seed = Path(sys.argv[1]), int(sys.argv[2])
    if seed:
        arm(seed)
    cloud = open_cloud(folder, (folder / "market.yaml").read_text(), seed=7, stockout_share=0.1,
                       spell_seconds=5.0)  # fmt: skip
    controller = make_renter(folder / "s", cloud)
    thread = threading.Thread(target=controller.run, daemon=True)
    thread.start()
    for number, job in enumerate(json.loads((folder / "wanted.json").read_text())):
        controller.submit(make_job(job, folder=folder), client_key=f"key-{number}")
    state = controller.journal.live.state
    deadline = time.monotonic() + 120
    while not (
        all(one.state in TERMINAL for one in list(state.jobs.values())) and is_quiet(controller)
    ):
        if not thread.is_alive() or time.monotonic() > deadline:
            sys.exit(f"not over: {controller.last_error} {state.rentals}")
        time.sleep(0.05)
    controller.leave()
    thread.join()
    controller.close(ends_agents=True)


main()
