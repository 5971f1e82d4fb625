"""`drystone jobs` and `why` for a plain command line, and how both print their answers.

People run these two again and again, and importing a library for command lines takes longer than
all else they do. So their few plain options are read here; for anything else (help, watching,
completion, a mistake) Typer reads the same command in full, in `cli/jobs.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from drystone.service.client import Client

DEFAULT_LIMIT: Final = 1000
MAX_LIMIT: Final = 100_000
_VALUES: Final = {  # options that take a value, by the name that it has here
    "jobs": {
        "--state": "state",
        "--owner": "owner",
        "--limit": "limit",
        "--most": "limit",
        "--sort": "sort",
    },
    "why": {},
}
_STATE_WORDS: Final = {"waiting": "queued"}  # as tables of jobs say it, and as the service does
SORTS: Final[Mapping[str, Callable[[Mapping[str, Any]], Any]]] = {
    "id": lambda job: 0,  # as they came
    "name": lambda job: job["name"],
    "owner": lambda job: job["owner"],
    "state": lambda job: job["state"],
    "gpus": lambda job: -sum(job["gpus"].values()),
    "progress": lambda job: -job["progress"],
    "ends": lambda job: job["end_seconds"] or job["eta_seconds"] or float("inf"),
    "cost": lambda job: -job["dollars"],
}


def run_quickly(arguments: Sequence[str]) -> bool:
    """Run `jobs` or `why` if the arguments are plain; whether that was done."""
    verb, *words = arguments
    job = words.pop(0) if verb == "why" and words else ""
    given = _read(words, _VALUES[verb] | {"--folder": "folder"})
    if given is None or (verb == "why" and (not job or job.startswith("-"))):
        return False
    from drystone.service.client import Client

    folder = Path(given["folder"]).expanduser().absolute() if given["folder"] else None
    with Client(folder) as client:
        if verb == "why":
            show_reasons(client, job, as_json=given["json"])
        else:
            check_sort(given["sort"])
            page = list_jobs(client, given["state"], given["owner"], given["limit"], given["sort"])
            print_page(page, as_json=given["json"])
    return True


def check_sort(sort: str) -> None:
    """Refuse what rows cannot be sorted by."""
    from drystone.errors import UnknownName

    if sort not in SORTS:
        raise UnknownName("order", sort, SORTS)


def find_job(client: Client, job: str) -> str:
    """The number of a job that is named by number or by name; of several, the newest alive."""
    from drystone.errors import InvalidSpec

    if job.isascii() and job.isdigit():
        return job
    found = client.get("/v1/jobs", name=job, newest="true", most=1000)["jobs"]
    alive = [row for row in found if row["state"] in ("queued", "running", "paused")]
    if len(alive) > 1:
        numbers = ", ".join(row["id"] for row in alive[:8])
        raise InvalidSpec(
            f"{len(alive)} jobs that are not over have this name",
            where=job,
            hint=f"Give a number: {numbers}",
        )
    if not found:
        raise InvalidSpec("no job has this number or name", where=job, hint="See `drystone jobs`")
    return str((alive or found)[0]["id"])


def list_jobs(
    client: Client, states: Sequence[str], owner: str, limit: int, sort: str = "id"
) -> dict[str, Any]:
    """The first jobs, as if they came in one page: the service answers only so many at once."""
    known = [_STATE_WORDS.get(state, state) for state in states]
    asked: dict[str, Any] = {"state": known, "owner": owner}
    page = client.get("/v1/jobs", **asked, most=limit)
    while page.get("next_skip") and len(page["jobs"]) < limit:
        missing = limit - len(page["jobs"])
        more = client.get("/v1/jobs", **asked, most=missing, skip=page["next_skip"])
        page = more | {"jobs": page["jobs"] + more["jobs"]}
    page["jobs"].sort(key=SORTS[sort])
    return page


def print_page(page: dict[str, Any], *, as_json: bool) -> None:
    """One page of jobs, as a table or as JSON."""
    if as_json:
        _print_json(page)
        return
    from drystone.cli.columns import counted
    from drystone.cli.live import print_jobs

    shown, total = len(page["jobs"]), page["total"]
    more = f", the first {shown} (--limit shows more)" if shown < total else ""
    print_jobs(f"{counted(total, 'job')}{more}", page["jobs"], page["now_seconds"])
    say_emulated(page["is_emulated"])


def show_reasons(client: Client, job: str, *, as_json: bool) -> None:
    """Ask why a job waits, or why it got what it has, and print the answer."""
    from importlib import import_module
    from threading import Thread
    from urllib.parse import quote

    if not as_json:  # what draws the answer is loaded while the service works it out
        Thread(target=import_module, args=("drystone.cli.live",)).start()
    answer = client.get(f"/v1/jobs/{quote(find_job(client, job), safe='')}/why")
    if as_json:
        _print_json(answer)
    else:
        _print_reasons(answer)


def _print_reasons(answer: dict[str, Any]) -> None:
    import datetime

    from drystone.cli.live import print_options
    from drystone.cli.output import make_console, printable

    console = make_console()
    console.print(printable(answer["sentence"]), style="bold", markup=False)
    if answer["position"]:
        console.print(f"Place {answer['position']} of {answer['num_waiting']} that wait.")
    if answer["expected_start_seconds"]:
        at = datetime.datetime.fromtimestamp(answer["expected_start_seconds"]).astimezone()
        told = f", after {len(answer['ahead'])} of those that wait" if answer["ahead"] else ""
        console.print(f"Expected start: {at:%Y-%m-%d %H:%M:%S}{told}.")
    elif answer["position"]:
        console.print("Expected start: unknown.")
    if answer["faults"]:
        told = ", ".join(f"{kind} {count}x" for kind, count in answer["faults"].items())
        console.print(f"Faults since it last got further: {told}.")
    decision = answer["decision"]
    if decision:
        text = f"Last decision: {decision['decision']}, because {decision['reason']}."
        console.print(printable(text), markup=False)
    if answer["prices"]:
        worth = ", ".join(f"{gpu} {price:.3g}" for gpu, price in answer["prices"].items())
        console.print(f"What one more GPU would be worth to all jobs: {worth}.")
    if answer["options"]:
        console.print()
        print_options("What it can choose from", answer["options"])


def say_emulated(is_emulated: bool) -> None:
    """Tell emulated GPUs from real ones."""
    if is_emulated:
        text = "GPUs are emulated on this machine's processor."
        is_coloured = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        print(f"\033[33m{text}\033[0m" if is_coloured else text, file=sys.stderr)


def _print_json(answer: dict[str, Any]) -> None:
    """As `cli/output.py` prints it, without importing rich."""
    import json

    print(json.dumps(answer, indent=2, ensure_ascii=False, allow_nan=False))


def _read(words: Sequence[str], known: dict[str, str]) -> dict[str, Any] | None:
    """The options; None where they are not plain."""
    given: dict[str, Any] = {
        "state": [],
        "owner": "",
        "limit": DEFAULT_LIMIT,
        "sort": "id",
        "folder": "",
        "json": False,
    }
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--json":
            given["json"] = True
            continue
        if word not in known or not left or left[0].startswith("-"):
            return None
        name, value = known[word], left.pop(0)
        if name == "state":
            given["state"].append(value)
        elif name == "limit":
            if not (value.isascii() and value.isdigit() and 1 <= int(value[:9]) <= MAX_LIMIT):
                return None
            given["limit"] = int(value)
        else:
            given[name] = value
    return given
