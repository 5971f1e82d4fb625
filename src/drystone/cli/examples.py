"""Examples at the end of each `--help`, from `examples.txt`.

There they stand under the verb, or verb and sub-verb: what it is for, and the command after
`drystone`. A test parses every command, and runs those that need no service.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

_WIDTH: Final = 76  # with two blanks before, of 80 columns


def _load() -> Mapping[str, tuple[tuple[str, str], ...]]:
    """By verb: pairs of a purpose, which may be empty, and a command."""
    text = Path(__file__).with_name("examples.txt").read_text(encoding="utf-8")
    found: dict[str, tuple[tuple[str, str], ...]] = {}
    name = purpose = ""
    for line in text.splitlines():
        if line.startswith("["):
            name = line.strip("[]")
            found[name] = ()
        elif line.startswith("# "):
            purpose = line.removeprefix("# ")
        else:
            found[name] += ((purpose, line),)
            purpose = ""
    return MappingProxyType(found)


EXAMPLES: Final = _load()


def epilog(name: str) -> str:
    """The examples of a verb, as they stand at the end of its help; lines are kept as they are."""
    lines = ["\b", "Examples:"]
    for purpose, command in EXAMPLES[name]:
        lines += [f"  # {purpose}"] if purpose else []
        lines += _cut(f"  drystone {command}")
    return "\n".join(lines)


def _cut(line: str) -> list[str]:
    """One line or, where it is too long, two that a shell takes for one."""
    if len(line) <= _WIDTH:
        return [line]
    at = line.rindex(" --", 0, _WIDTH - 2)
    return [f"{line[:at]} \\", *_cut(f"     {line[at:]}")]


def add_examples(group: Any, name: str) -> None:
    """Give every verb of a group its examples."""
    for command in group.registered_commands:
        verb = command.name or command.callback.__name__
        command.epilog = epilog(f"{name} {verb}")
