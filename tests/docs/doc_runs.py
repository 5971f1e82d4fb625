"""Running the blocks of a page: one program a page, in a folder of its own."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from doc_blocks import Block
from doc_commands import command_lines

FEW_JOBS = ("simulate", "frontier")  # verbs that are run with few jobs where they take long
MOST_SECONDS = 300


def few_jobs(block: Block) -> list[list[str]]:
    """Simulations that take long, with few jobs."""
    if block.language != "sh" or not block.takes:
        return []
    commands = [
        ["drystone", *words[3:]] if words[:3] == ["python", "-m", "drystone"] else words
        for words in command_lines(block.text)
    ]
    return [
        [*words, "--most-jobs", "3"]
        for words in commands
        if words[0] == "drystone" and words[1] in FEW_JOBS and "--arena" not in words
    ]


def runnable(blocks: list[Block]) -> list[tuple[int, Block]]:
    return [(index, block) for index, block in enumerate(blocks) if block.is_run or few_jobs(block)]


def script(blocks: list[Block], folder: Path) -> str:
    """One program for a page, so that variables and background jobs last from block to block."""
    lines = ["set -eu -o pipefail", "trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT"]
    for index, block in runnable(blocks):
        if block.language == "python":
            path = folder / f"block-{index}.py"
            path.write_text(block.text, encoding="utf-8")
            body = f"python {shlex.quote(str(path))}\n"
        elif block.takes:
            body = "".join(shlex.join(words) + "\n" for words in few_jobs(block))
        else:
            body = block.text
        lines.append(f"{{\n{body}}} > {shlex.quote(str(folder / f'out-{index}'))}")
    return "\n".join(lines) + "\n"


def run(script: Path, folder: Path) -> tuple[int, str]:
    """Its exit code and what it told on standard error; nothing of it is left afterwards."""
    mine = {"DRYSTONE_FOLDER", "DRYSTONE_URL", "DRYSTONE_TOKEN", "COLUMNS"}
    environment = {key: value for key, value in os.environ.items() if key not in mine}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(folder.parent / "home"),
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
    }
    (folder.parent / "home").mkdir()
    process = subprocess.Popen(
        ["bash", str(script)], cwd=folder, env=environment, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        _, told = process.communicate(timeout=MOST_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(timeout=30)
    return process.returncode, told


def difference(wanted: str, printed: str) -> str:
    """The first line that was not printed where it should be; empty if all were."""
    given = [line.rstrip() for line in printed.splitlines()]
    place, may_skip = 0, False
    for line in (one.rstrip() for one in wanted.splitlines()):
        if line.strip() == "...":
            may_skip = True
            continue
        last = len(given) if may_skip else place + 1
        found = next((at for at in range(place, min(last, len(given))) if given[at] == line), None)
        if found is None:
            after = "\n".join(given[place : place + 5])
            return f"{line!r} was not printed; instead:\n{after}"
        place, may_skip = found + 1, False
    return ""


def rewritten(wanted: str, printed: str) -> str:
    """A block of output with what is printed now; what follows dots stays as it was."""
    shown, dots, rest = wanted.partition("...\n")
    given = [line.rstrip() for line in printed.splitlines()]
    first = given[: shown.count("\n")] if dots else given
    return "".join(f"{line}\n" for line in first) + dots + rest
