"""`drystone jobs` and `why` without a library for command lines: those take longer than all else.

People run these two again and again, so both read their few plain options themselves. For whatever
else (help, watching, completion, a mistake) they step back, and the same command is read in full.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

_VALUES: Final = frozenset({"--state", "--owner", "--most", "--folder"})
_MOST: Final = 1000


def run_quickly(arguments: Sequence[str]) -> bool:
    """Run the command if it is one of the two, in a plain form; whether that was done."""
    verb, *rest = arguments
    quick = {"jobs": quick_jobs, "why": quick_why}.get(verb)
    return quick is not None and quick(rest)


def quick_jobs(arguments: Sequence[str]) -> bool:
    """List the jobs if the arguments are plain; whether that was done."""
    given = _read(arguments)
    if given is None:
        return False
    from drystone.service.client import Client

    query = {name: given[name] for name in ("state", "owner", "most")}
    with Client(_folder(given)) as client:
        answer = client.get("/v1/jobs", **query)
    if given["json"]:
        _print_json(answer)
    else:
        show_page(answer)
    return True


def quick_why(arguments: Sequence[str]) -> bool:
    """Say why about one job if the arguments are plain; whether that was done.

    What draws the answer is loaded while the service works it out.
    """
    jobs = [one for one in arguments[:1] if not one.startswith("-")]
    given = _read(arguments[1:], frozenset({"--folder"}))
    if not jobs or given is None:
        return False
    from importlib import import_module
    from threading import Thread
    from urllib.parse import quote

    from drystone.service.client import Client

    if not given["json"]:
        Thread(target=import_module, args=("drystone.cli.live",)).start()
    with Client(_folder(given)) as client:
        answer = client.get(f"/v1/jobs/{quote(jobs[0], safe='')}/why")
    if given["json"]:
        _print_json(answer)
    else:
        show_reasons(answer)
    return True


def _folder(given: dict[str, Any]) -> Path | None:
    return Path(given["folder"]).expanduser().absolute() if given["folder"] else None


def _print_json(answer: dict[str, Any]) -> None:
    import json

    print(json.dumps(answer, indent=2, ensure_ascii=False, allow_nan=False))


def show_page(answer: dict[str, Any]) -> None:
    """One page of jobs as a table."""
    from drystone.cli.columns import counted
    from drystone.cli.live import print_jobs

    shown, total = len(answer["jobs"]), answer["total"]
    more = f", the first {shown} (--most shows more)" if shown < total else ""
    print_jobs(f"{counted(total, 'job')}{more}", answer["jobs"], answer["now_seconds"])
    say_emulated(answer["is_emulated"])


def show_reasons(answer: dict[str, Any]) -> None:
    """Why a job waits, or why it got what it has."""
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
    """Nobody may take an emulated GPU for a real one."""
    if is_emulated:
        text = "GPUs are emulated on this machine's processor."
        is_coloured = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        print(f"\033[33m{text}\033[0m" if is_coloured else text, file=sys.stderr)


def _read(arguments: Sequence[str], known: frozenset[str] = _VALUES) -> dict[str, Any] | None:
    """The options; None where they are not plain."""
    given: dict[str, Any] = {"state": [], "owner": "", "most": _MOST, "folder": "", "json": False}
    words = list(arguments)
    while words:
        word = words.pop(0)
        if word == "--json":
            given["json"] = True
        elif word not in known or not words or words[0].startswith("-"):
            return None
        elif word == "--state":
            given["state"].append(words.pop(0))
        elif word == "--most":
            text = words.pop(0)
            if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= 100_000):
                return None
            given["most"] = int(text)
        else:
            given[word.removeprefix("--")] = words.pop(0)
    return given
