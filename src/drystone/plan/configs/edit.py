"""A plan written into a config that is there: only keys whose meaning changes, all else as it was.

Comments, order and spelling stay: values are replaced between the marks that YAML's own parser
gives. What comes out is read again, and must mean the plan; otherwise nothing is written.
"""

from __future__ import annotations

import difflib
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

import yaml

from drystone.describe.recipe import Tuning
from drystone.errors import InvalidSpec, UnreadableFile, reason_of
from drystone.plan.configs.huggingface import ACCELERATE, AXOLOTL, DEEPSPEED
from drystone.plan.configs.keys import Reading, Table, Tool, flatten
from drystone.plan.configs.read import load_table, read_config
from drystone.plan.configs.setup import Setup
from drystone.plan.configs.write import write_config

# How state is shared: keys that mean something only together, so all of them are of one mind.
_STATE: Final = ("fsdp", "fsdp_version", "fsdp_config", "deepspeed", "deepspeed_config",
                 "zero_optimization", "distributed_type")  # fmt: skip
_FIELDS: Final = frozenset(entry.name for entry in fields(Setup))
_STATE_FIELDS: Final = ("sharding", "keep_gathered", "offload")
_WITH_STATE: Final = (AXOLOTL.name, ACCELERATE.name, DEEPSPEED.name)


def edit_config(path: Path, setup: Setup, target: str) -> tuple[str, str]:
    """The file's text with the plan in it, and what changed as a unified diff."""
    text = _read_text(path)
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise InvalidSpec(
            "a launch script is not changed in place",
            where=str(path),
            hint=f"drystone export PLAN --to {target} writes a new one",
        )
    old, tool = load_table(path)
    if tool.name != target:
        raise InvalidSpec(f"is a config of {tool.name}, not of {target}", where=str(path))
    had, wanted = _meaning(read_config(path), tool), flatten(write_config(setup, target))
    changes = _changes(old, had, wanted, setup, tool)
    made = _edit_json(text, changes) if path.suffix == ".json" else _edit_yaml(text, changes)
    _check(made, path, setup, tool, wanted)
    lines = difflib.unified_diff(
        text.splitlines(keepends=True), made.splitlines(keepends=True), str(path), str(path)
    )
    return made, "".join(lines)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableFile(f"cannot be read: {reason_of(error)}", where=str(path)) from None


def _meaning(readings: Sequence[Reading], tool: Tool) -> Setup:
    said: dict[str, Any] = dict(tool.usual)
    for reading in readings:
        said |= reading.said
    setup = Setup(**{name: value for name, value in said.items() if name in _FIELDS})
    if setup.weight_bits and setup.tuning is Tuning.LORA:
        setup = replace(setup, tuning=Tuning.QLORA)
    return setup


def _changes(old: Table, had: Setup, wanted: Table, setup: Setup, tool: Tool) -> dict[str, Any]:
    """By dotted key what it becomes; None: it goes."""
    changes = _state_changes(old, had, wanted, setup, tool)
    of_key = {key.name: key.field for key in tool.keys if key.field not in (*_STATE_FIELDS, "")}
    for name, value in wanted.items():
        if name not in of_key and not _is_state(name) and old.get(name, value) != value:
            changes[name] = value  # what follows from the others, such as a batch in all
    for field in sorted(_FIELDS.intersection(of_key.values()) - {"model"}):
        if getattr(had, field) == getattr(setup, field):
            continue
        keys = [key for key in tool.keys if key.field == field and not _is_state(key.name)]
        said = {key.name: wanted[key.name] for key in keys if key.name in wanted}
        changes |= {key.name: None for key in keys if key.name in old and key.name not in said}
        changes |= said
    return changes


def _state_changes(
    old: Table, had: Setup, wanted: Table, setup: Setup, tool: Tool
) -> dict[str, Any]:
    if all(getattr(had, field) == getattr(setup, field) for field in _STATE_FIELDS):
        return {}
    said = [name for name in old if _is_state(name)]
    if tool.name not in _WITH_STATE:
        if said:
            raise InvalidSpec(
                f"says how state is shared, and the plan says zero={int(setup.sharding)}",
                where=", ".join(said),
                hint="Take these keys out: `--to accelerate` writes the split",
            )
        return {}
    kept = {name.split(".")[0] for name in wanted}
    known = {key.name for key in tool.keys}
    changes: dict[str, Any] = {}
    for name in said:
        if name.split(".")[0] not in kept:
            changes[name.split(".")[0]] = None
        elif name in known and name not in wanted:
            changes[name] = None
    return changes | {name: value for name, value in wanted.items() if _is_state(name)}


def _is_state(name: str) -> bool:
    return name.split(".")[0] in _STATE


def _check(made: str, path: Path, setup: Setup, tool: Tool, wanted: Table) -> None:
    """What was written, read again, means the plan."""
    table = flatten(yaml.safe_load(made))
    table.pop("deepspeed", None)  # the file beside it is written by itself
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        copy.write_text(json.dumps(table) if path.suffix == ".json" else yaml.safe_dump(table))
        again = _meaning(read_config(copy), tool)
    names = {key.field for key in tool.keys if key.name in wanted or key.name in table}
    names -= {"model", *_STATE_FIELDS}
    if tool.name in _WITH_STATE and "deepspeed" not in wanted:
        names |= set(_STATE_FIELDS)
    for name in sorted(names & _FIELDS):
        if getattr(again, name) != getattr(setup, name):
            raise InvalidSpec(
                f"cannot be changed so that {name.replace('_', ' ')} is {getattr(setup, name)}: "
                "other keys of it say otherwise",
                where=str(path),
                hint="Leave --config out: the plan is written as a new file",
            )


def _edit_json(text: str, changes: Mapping[str, Any]) -> str:
    table = json.loads(text)
    for name, value in changes.items():
        _set(table, name.split("."), value)
    return json.dumps(table, indent=2) + "\n"


def _set(table: dict[str, Any], path: Sequence[str], value: Any) -> None:
    first, *rest = path
    if not rest and value is not None:
        table[first] = value
    elif not rest:
        table.pop(first, None)
    else:
        _set(table.setdefault(first, {}), rest, value)
        if not table[first]:
            del table[first]


def _edit_yaml(text: str, changes: Mapping[str, Any]) -> str:
    for name, value in changes.items():
        text = _edit_key(text, name.split("."), value)
    return text


def _edit_key(text: str, path: Sequence[str], value: Any) -> str:
    """One key changed, added where its mapping ends, or taken out."""
    root = yaml.compose(text)
    if not isinstance(root, yaml.MappingNode) or root.flow_style:
        raise InvalidSpec("is not a mapping with a line for each key")
    mapping, at_end = root, len(text)
    for depth, step in enumerate(path):
        found = next((pair for pair in mapping.value if pair[0].value == step), None)
        is_last = depth == len(path) - 1
        if found is None:
            added = yaml.safe_dump(_nest(path[depth:], value), sort_keys=False)
            return text if value is None else _insert(text, mapping, at_end, added)
        key, node = found
        if is_last and value is None:
            if depth and len(mapping.value) == 1:  # nothing is left of the mapping
                return _edit_key(text, path[:-1], None)
            return _without_lines(text, key.start_mark.index, _last_index(node))
        if is_last or not isinstance(node, yaml.MappingNode) or node.flow_style:
            whole = value if is_last else _nest(path[depth + 1 :], value)
            return _with_value(text, key, node, whole)
        mapping, at_end = node, _last_index(node)
    return text


def _nest(path: Sequence[str], value: Any) -> Any:
    for step in reversed(path):
        value = {step: value}
    return value


def _with_value(text: str, key: yaml.Node, node: yaml.Node, value: Any) -> str:
    """Between the marks of the old value; what an empty value had is a space."""
    word = yaml.safe_dump(value, default_flow_style=True).strip().removesuffix("\n...")
    start, end = node.start_mark.index, _last_index(node)
    if start == end:  # `key:` alone
        start = end = text.index(":", key.end_mark.index) + 1
        word = " " + word
    return text[:start] + word + text[end:]


def _last_index(node: yaml.Node) -> int:
    """Where what is written ends, before comments and empty lines that follow it."""
    if not isinstance(node, yaml.CollectionNode) or node.flow_style or not node.value:
        return int(node.end_mark.index)
    last = node.value[-1]
    return _last_index(last[1] if isinstance(last, tuple) else last)


def _insert(text: str, mapping: yaml.MappingNode, at: int, added: str) -> str:
    """After the last entry of a mapping, as far to the right as its others."""
    indent = " " * (mapping.value[0][0].start_mark.column if mapping.value else 0)
    line_end = text.find("\n", at)
    line_end = len(text) if line_end < 0 else line_end + 1
    before = text[:line_end]
    before += "" if before.endswith("\n") or not before else "\n"
    return before + "".join(indent + line + "\n" for line in added.splitlines()) + text[line_end:]


def _without_lines(text: str, start: int, end: int) -> str:
    first = text.rfind("\n", 0, start) + 1
    last = text.find("\n", end)
    return text[:first] + ("" if last < 0 else text[last + 1 :])
