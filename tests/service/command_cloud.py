"""A cloud as three programs, which fail by chance in every way; nodes are files of a folder.

Linked as `create`, `list` and `delete`: which it is goes by its name.
"""

import json
import os
import random
import sys
import time
from pathlib import Path

HERE = Path(sys.argv[0]).absolute().parent
NODES = HERE / "nodes"
FAULTS = float((HERE / "faults").read_text())


def is_faulty() -> bool:
    return random.random() < FAULTS


def save(token: str, **fields: object) -> None:
    scratch = NODES / f".{token}"
    scratch.write_text(json.dumps(fields))
    scratch.replace(NODES / token)


def create(token: str) -> None:
    if is_faulty():
        sys.exit("create: no network")
    if (NODES / token).exists():
        with (HERE / "doubles").open("a") as file:
            print(token, file=file)
    save(token, offer=os.environ["DRYSTONE_OFFER"], since=time.time())
    if is_faulty():
        sys.exit("create: it was made, and the answer was lost")


def show(fleet: str) -> None:
    if is_faulty():
        sys.exit("list: no network")
    for path in sorted(NODES.glob(f"{fleet}*")):
        node = json.loads(path.read_text())
        row = {"token": path.name, "offer": node["offer"], "since_seconds": node["since"]}
        end = node.get("end")
        if end:
            row |= {
                "stage": "ended",
                "billed_dollars": round(0.4 * (end - node["since"]) / 3600, 6),
            }
        elif time.time() < node["since"] + 0.2:
            row |= {"stage": "starting"}
        else:
            row |= {"stage": "running"}
        sys.stdout.write(json.dumps(row) + "\n")


def delete(token: str) -> None:
    if is_faulty():
        sys.exit("delete: no network")
    if (NODES / token).exists():
        node = json.loads((NODES / token).read_text())
        save(token, **{"end": time.time(), **node})
    if is_faulty():
        sys.exit("delete: done, and the answer was lost")


{"create": create, "list": show, "delete": delete}[Path(sys.argv[0]).name](sys.argv[1])
