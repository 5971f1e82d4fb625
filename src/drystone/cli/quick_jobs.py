"""`drystone jobs` without a library for command lines: those take longer than all it does.

People run it again and again, so it reads its few plain options itself. For whatever else (help,
watching, completion, a mistake) it steps back, and the same command is read in full.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

_VALUES: Final = frozenset({"--state", "--owner", "--most", "--folder"})
_MOST: Final = 1000


def quick_jobs(arguments: Sequence[str]) -> bool:
    """List the jobs if the arguments are plain; whether that was done."""
    given = _read(arguments)
    if given is None:
        return False
    from drystone.service.client import Client

    folder = Path(given["folder"]).expanduser().absolute() if given["folder"] else None
    query = {name: given[name] for name in ("state", "owner", "most")}
    with Client(folder) as client:
        answer = client.get("/v1/jobs", **query)
    if given["json"]:
        import json

        print(json.dumps(answer, indent=2, ensure_ascii=False, allow_nan=False))
        return True
    show_page(answer)
    return True


def show_page(answer: dict[str, Any]) -> None:
    """One page of jobs as a table."""
    from drystone.cli.columns import counted
    from drystone.cli.job_table import print_jobs

    shown, total = len(answer["jobs"]), answer["total"]
    more = f", the first {shown} (--most shows more)" if shown < total else ""
    print_jobs(f"{counted(total, 'job')}{more}", answer["jobs"], answer["now_seconds"])
    say_emulated(answer["is_emulated"])


def say_emulated(is_emulated: bool) -> None:
    """Nobody may take an emulated GPU for a real one."""
    if is_emulated:
        text = "GPUs are emulated on this machine's processor."
        is_coloured = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        print(f"\033[33m{text}\033[0m" if is_coloured else text, file=sys.stderr)


def _read(arguments: Sequence[str]) -> dict[str, Any] | None:
    """The options; None where they are not plain."""
    given: dict[str, Any] = {"state": [], "owner": "", "most": _MOST, "folder": "", "json": False}
    words = list(arguments)
    while words:
        word = words.pop(0)
        if word == "--json":
            given["json"] = True
        elif word not in _VALUES or not words or words[0].startswith("-"):
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
