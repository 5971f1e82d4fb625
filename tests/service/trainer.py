"""A training script of nobody's framework: counts steps, saves, resumes, writes down what it did.

`audit` gets a line for every step and every checkpoint, with the epoch. Two processes at once are
told by a lock. Faults come from the variable FAULT.
"""

import fcntl
import json
import os
import signal
import sys
import time
from pathlib import Path

from drystone.run.fence import writing

STEPS, EPOCH = int(os.environ["DRYSTONE_STEPS"]), os.environ["DRYSTONE_EPOCH"]
FOLDER = Path(os.environ["DRYSTONE_CHECKPOINTS"])
FAULT = os.environ.get("FAULT", "")
SECONDS = float(os.environ.get("STEP_SECONDS", "0.05"))
SAVE_BYTES = int(os.environ.get("SAVE_BYTES", "0"))  # of a checkpoint
EVERY = 5
leaving = False


def leave(*_):
    global leaving
    leaving = True


def tell(**report):
    with open(os.environ["DRYSTONE_PROGRESS"], "a") as file:
        file.write(json.dumps(report) + "\n")


def note(text):
    with open(FOLDER / "audit", "a") as file:
        file.write(f"{EPOCH} {text}\n")


def save(step):
    with writing():
        scratch = FOLDER / f".saved.{EPOCH}"
        scratch.write_text(str(step) + " " * SAVE_BYTES)
        scratch.replace(FOLDER / "saved")
    note(f"saved {step}")
    tell(event="checkpoint", step=step)


def go_wrong(step):
    if FAULT == "memory" and step == 2:
        raise MemoryError("out of memory")
    if FAULT == "bug" and step == 3:
        raise RuntimeError("my own mistake")
    if EPOCH == "1" and step == 7:
        match FAULT:
            case "hang":
                time.sleep(600)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "disk":
                raise OSError(28, "No space left on device")


def main():
    signal.signal(signal.SIGTERM, leave)
    if os.environ["RANK"] != "0":
        while not leaving and not (FOLDER / f"over-{EPOCH}").exists():
            time.sleep(0.02)
        return
    lock = os.open(FOLDER / "lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        note("twice")
        sys.exit(9)
    saved = FOLDER / "saved"
    step = int(saved.read_text()) if saved.exists() else 0
    note(f"started {step}")
    tell(event="started", step=step)
    while step < STEPS and not leaving:
        time.sleep(SECONDS)
        step += 1
        go_wrong(step)
        note(f"step {step}")
        tell(event="step", step=step, loss=1.0 / step, step_seconds=SECONDS)
        if step % EVERY == 0:
            save(step)
    if leaving and step % EVERY:
        save(step)
    (FOLDER / f"over-{EPOCH}").touch()


main()
