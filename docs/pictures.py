"""The picture of the demo in the README, from what the commands really print.

    python docs/pictures.py

runs the first and the last act of `drystone demo` and draws them as a terminal.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

IMAGES = Path(__file__).parent / "images"
COLUMNS = 96
PLAN = "plan llama-3-8b --gpus 4xL40S,8xRTX-4090 --batch 64 --limit 4"


def printed(*words: str, is_coloured: bool) -> str:
    """What a command prints on a terminal of that width."""
    variables = {"COLUMNS": str(COLUMNS)} | ({"FORCE_COLOR": "1"} if is_coloured else {})
    command = [sys.executable, "-m", "drystone", *words]
    done = subprocess.run(
        command, env=os.environ | variables, check=True, capture_output=True, text=True
    )
    return done.stdout


def cut(line: str) -> str:
    """A line of the story that fits."""
    return line if len(line) <= COLUMNS else line[: COLUMNS - 4] + " ..."


def main() -> None:
    """Draw docs/images/demo.svg."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ drystone {PLAN}", style="bold"))
    console.print(Text.from_ansi(printed(*PLAN.split(), is_coloured=True)))
    console.print(Text("$ drystone demo --only 5          (GPUs are emulated)", style="bold"))
    story = printed("demo", "--only", "5", is_coloured=False)
    told = story[story.index("What became of them") :]
    for line in told.splitlines():
        style = "bold red" if line.startswith("Killed") else ""
        style = "bold green" if line.lstrip().startswith("after ") else style
        console.print(Text(cut(line), style=style))
    IMAGES.mkdir(exist_ok=True)
    title = "drystone: a plan, and a fine-tune on emulated GPUs"
    drawn = console.export_svg(title=title)
    # Rich would load a font from the network: whatever fixed-width font is there will do.
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)
    (IMAGES / "demo.svg").write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
