"""The script that conformance trains with: no torch, and every rank writes down what it sees.

All ranks meet over the network at MASTER_ADDR and MASTER_PORT before the first step, as training
processes do. Rank 0 then counts steps, saves and reports; the others wait for it. `audit` in the
checkpoint folder gets a line for every start, step and checkpoint, with the epoch; two rank 0 at
once are told by a lock. The variable FAULT makes the first launch go wrong at step 7:

crash    rank 0 dies of SIGKILL
orphan   the same, but a process that nobody knows stays behind and keeps trying to save
"""

import fcntl
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

from drystone.run.fence import Fenced, writing

STEPS, EPOCH = int(os.environ["DRYSTONE_STEPS"]), int(os.environ["DRYSTONE_EPOCH"])
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FOLDER = Path(os.environ["DRYSTONE_CHECKPOINTS"])
FAULT, SECONDS = os.environ.get("FAULT", ""), float(os.environ.get("STEP_SECONDS", "0.03"))
MEETING_SECONDS = 40.0
EVERY = 5
KEPT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR",
        "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "DRYSTONE_JOB", "DRYSTONE_EPOCH",
        "DRYSTONE_STEPS", "DRYSTONE_PLAN")  # fmt: skip
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
        scratch.write_text(str(step))
        scratch.replace(FOLDER / "saved")
        note(f"saved {step}")
    tell(event="checkpoint", step=step)


def meet():
    """Everybody says hello to rank 0, who goes on when all have."""
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    deadline = time.monotonic() + MEETING_SECONDS
    if RANK == 0:
        with socket.create_server(("", address[1])) as server:
            server.settimeout(MEETING_SECONDS)
            seen, open_ones = {0}, []
            while len(seen) < WORLD:
                one, _ = server.accept()
                one.settimeout(MEETING_SECONDS)
                seen.add(int(one.recv(16)))
                open_ones.append(one)
            for one in open_ones:
                one.sendall(b"go")
                one.close()
        return
    while True:
        try:
            with socket.create_connection(address, timeout=MEETING_SECONDS) as one:
                one.sendall(str(RANK).encode())
                assert one.recv(2) == b"go"
                return
        except ConnectionError:
            if time.monotonic() > deadline or leaving:
                raise
            time.sleep(0.05)


def stay_behind():
    """What fencing is there for: a process of an old launch, out of everybody's sight."""
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    # A new program, so that no rank is found where only its orphan is.
    arguments = [sys.executable, __file__, "orphan"]
    os.execve(sys.executable, arguments, {**os.environ, "DRYSTONE_ORPHAN": "1"})


def be_orphan():
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            with writing():
                (FOLDER / "orphan").write_text(f"{os.getpid()} wrote at epoch {EPOCH}")
                note("orphan 0")
        except Fenced as error:
            (FOLDER / "orphan").write_text(f"fenced: {error}")
            return
        time.sleep(0.05)
    (FOLDER / "orphan").write_text("never fenced")


def go_wrong():
    if FAULT == "orphan":
        stay_behind()
        while not (FOLDER / "orphan").exists():
            time.sleep(0.02)
    if FAULT in ("crash", "orphan"):
        os.kill(os.getpid(), signal.SIGKILL)


def is_stopped(pid):
    """Whether a process can do nothing now, because its node hangs: then it is the fence's task."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "TZX"
    except OSError:
        return True


def train():
    lock = os.open(FOLDER / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.pwrite(lock, f"{os.getpid():<10}".encode(), 0)
    except BlockingIOError:
        if not is_stopped(int(os.pread(lock, 10, 0) or b"1")):
            note("twice 0")
            sys.exit(9)
    saved = FOLDER / "saved"
    step = int(saved.read_text()) if saved.exists() else 0
    note(f"started {step}")
    tell(event="started", step=step)
    sys.stdout.write(f"rank 0 of {WORLD} on standard output\n")
    sys.stdout.flush()
    while step < STEPS and not leaving:
        time.sleep(SECONDS)
        if EPOCH == 1 and step == 6:
            go_wrong()
        step += 1
        with writing():  # a step that is done after a later launch has begun would not count
            note(f"step {step}")
        tell(event="step", step=step, loss=1.0 / step, step_seconds=SECONDS)
        if step % EVERY == 0:
            save(step)
    if leaving and step % EVERY:
        save(step)
    (FOLDER / f"over-{EPOCH}").touch()


def main():
    signal.signal(signal.SIGTERM, leave)
    sys.stderr.write(f"rank {RANK} of {WORLD} in launch {EPOCH}\n")
    sys.stderr.flush()
    variables = {name: os.environ[name] for name in KEPT if name in os.environ}
    scratch = FOLDER / f".gang-{EPOCH}-{RANK}"
    scratch.write_text(json.dumps(variables))
    scratch.replace(FOLDER / f"gang-{EPOCH}-{RANK}.json")
    meet()
    if RANK == 0:
        train()
    while RANK and not leaving and not (FOLDER / f"over-{EPOCH}").exists():
        time.sleep(0.02)


if sys.argv[1:] == ["orphan"]:
    be_orphan()
else:
    main()
