"""Strict reading of YAML files that people write, and of what each part of them may say.

A file is read into a `Document` (values, and the line of each), and its parts are checked against
subclasses of `Part`: whatever is wrong becomes one error with its place.

YAML 1.2's words only: `no` and `12:30` stay text, `1e9` is a number. Anchors and aliases, keys
given twice, tags, and files too large or too deep are refused: no file hangs or breaks a reader.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from drystone.errors import (
    DrystoneError,
    InvalidSpec,
    RequestError,
    UnknownName,
    UnreadableFile,
    reason_of,
)

_MOST_BYTES: Final = 262_144
_MOST_DEPTH: Final = 32
_MOST_OPEN: Final = 200  # brackets at once
_BRACKETS: Final = re.compile(r"[][{}]")

Key = tuple[str | int, ...]  # the way to a value: ("train", "steps"), ("nodes", 0, "gpu")


@dataclass(frozen=True, slots=True)
class Document:
    """What a file says, and on which line it says it."""

    value: Any
    lines: Mapping[Key, int] = field(default_factory=dict)
    where: str = ""

    def place(self, key: Key) -> str:
        """File, line and name of a value, for an error message."""
        known = key
        while known and known not in self.lines:
            known = known[:-1]
        parts = [self.where] if self.where else []
        if known in self.lines:
            parts.append(f"line {self.lines[known]}")
        if key:
            parts.append(format_key(key))
        return ": ".join(parts)


class _Loader(yaml.SafeLoader):
    """Text, numbers, true, false and null, as YAML 1.2's core schema has them."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - yaml's own way


_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"),
                              ["~", "n", "N", ""])  # fmt: skip
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool",
                              re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"),
                              list("tTfF"))  # fmt: skip
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?\d{1,30}$"),
                              list("-+0123456789"))  # fmt: skip
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d{1,30}\.\d{0,30}|\.\d{1,30}|\d{1,30}(?=[eE]))(?:[eE][-+]?\d{1,4})?$"),
    list("-+.0123456789"),
)


def load_yaml(path: Path) -> Document:
    """The one document of a file."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UnreadableFile(f"is larger than {_MOST_BYTES} bytes", where=str(path))
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise UnreadableFile(f"cannot be read: {reason_of(error)}", where=str(path)) from None
    return parse_yaml(text, where=str(path))


def parse_yaml(text: str, *, where: str = "") -> Document:
    """The one document that a text holds."""
    if len(text) > _MOST_BYTES:
        raise UnreadableFile(f"is larger than {_MOST_BYTES} characters", where=where)
    if _open_brackets(text) > _MOST_OPEN:
        raise UnreadableFile("is nested too deeply", where=where)
    try:
        node = yaml.compose(text, Loader=_Loader)
    except RecursionError:
        raise UnreadableFile("is nested too deeply", where=where) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        place = f"{where}: line {mark.line + 1}" if mark is not None else where
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        raise UnreadableFile(f"is no YAML: {problem}", where=place.removeprefix(": ")) from None
    lines: dict[Key, int] = {}
    seen: set[int] = set()
    value = None if node is None else _build(node, (), lines, seen, where)
    return Document(value, lines, where)


def _open_brackets(text: str) -> int:
    """How many brackets are open at once, at most; quotes and comments are not looked at.

    The time that PyYAML takes grows with the square of it: 5,000 took seconds.
    """
    most = level = 0
    for bracket in _BRACKETS.findall(text):
        level += 1 if bracket in "[{" else -1
        most = max(most, level)
    return most


def _build(node: yaml.Node, key: Key, lines: dict[Key, int], seen: set[int], where: str) -> Any:
    line = node.start_mark.line + 1
    place = f"{where}: line {line}".removeprefix(": ")
    lines[key] = line
    if id(node) in seen:
        raise UnreadableFile("anchors and aliases are not read here", where=place)
    seen.add(id(node))
    if len(key) > _MOST_DEPTH:
        raise UnreadableFile("is nested too deeply", where=place)
    if isinstance(node, yaml.SequenceNode):
        return [
            _build(item, (*key, index), lines, seen, where) for index, item in enumerate(node.value)
        ]
    if isinstance(node, yaml.MappingNode):
        table: dict[str, Any] = {}
        for name_node, value_node in node.value:
            name = name_node.value if isinstance(name_node, yaml.ScalarNode) else None
            if name is None:
                raise UnreadableFile("a key must be a word", where=place)
            if name in table:
                line = name_node.start_mark.line + 1
                raise InvalidSpec(
                    f"{name!r} is given twice", where=f"{where}: line {line}".removeprefix(": ")
                )
            table[name] = _build(value_node, (*key, name), lines, seen, where)
            lines[(*key, name)] = name_node.start_mark.line + 1
        return table
    return _scalar(node, place)


def _scalar(node: yaml.Node, place: str) -> Any:
    kind = node.tag.removeprefix("tag:yaml.org,2002:")
    text: str = node.value
    match kind:
        case "str":
            return text
        case "null":
            return None
        case "bool":
            return text.lower() == "true"
        case "int" | "float":
            try:
                return int(text) if kind == "int" else float(text)
            except ValueError:
                raise UnreadableFile(f"{text[:40]!r} is not a number", where=place) from None
    raise UnreadableFile(f"tags such as {node.tag[:40]!r} are not read here", where=place)


def format_key(key: Key) -> str:
    """`nodes[0].gpu`."""
    text = ""
    for part in key:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


class Part(BaseModel):
    """A table of a file: nothing more and nothing else than its fields say."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


AnyPart = TypeVar("AnyPart", bound=Part)


class Refused(ValueError):
    """An error of ours on its way through pydantic."""

    def __init__(self, error: DrystoneError) -> None:
        super().__init__(str(error))
        self.error = error


def checked(parse: Any) -> BeforeValidator:
    """A parser of numbers or text as a validator."""

    def call(value: Any) -> Any:
        if value is None or isinstance(value, bool | list | dict):
            raise Refused(InvalidSpec(f"must be a number or text, not {_kind(value)}"))
        try:
            return parse(value)
        except RequestError as error:
            raise Refused(error) from None

    return BeforeValidator(call)


def read_part(
    document: Document, part: type[AnyPart], key: Key = (), *, hint: str = "", context: Any = None
) -> AnyPart:
    """The table at `key` of a document, or at its top; `hint` shows how it is written."""
    value = document.value
    for name in key:
        value = value[name]
    if not isinstance(value, dict):
        raise InvalidSpec("must be a table of keys", where=document.place(key), hint=hint)
    try:
        return part.model_validate(value, context=context)
    except ValidationError as error:
        raise _explained(error, document, part, key, hint) from None
    except RecursionError:
        raise UnreadableFile("is nested too deeply", where=document.where) from None


def _explained(
    error: ValidationError, document: Document, part: type[Part], key: Key, hint: str
) -> RequestError:
    """One fault in our words: a misspelt key first, for it explains one that is missing."""
    faults = error.errors(include_url=False)
    # A list of which every item is at fault is said to be too short as well.
    beyond = {fault["loc"][:-1] for fault in faults}
    faults = [
        fault for fault in faults if fault["type"] != "too_short" or fault["loc"] not in beyond
    ]
    first = min(faults, key=lambda fault: fault["type"] != "extra_forbidden")
    inner = tuple(first["loc"])
    whole = _key_in(document, (*key, *inner))
    where = document.place(whole)
    if first["type"] == "extra_forbidden":
        return UnknownName("key", str(inner[-1]), _known_keys(part, inner), where=where)
    more = f"; and {len(faults) - 1} more" if len(faults) > 1 else ""
    if first["type"] == "missing":
        return InvalidSpec(f"`{inner[-1]}` is missing{more}", where=where, hint=hint)
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, Refused):
        return InvalidSpec(cause.error.message + more, where=where, hint=cause.error.hint)
    message = first["msg"].removeprefix("Value error, ")
    given = f", not {_kind(first['input'])}" if "type" in first["type"] else ""
    return InvalidSpec(f"{message[:1].lower()}{message[1:]}{given}{more}", where=where, hint=hint)


def _key_in(document: Document, key: Key) -> Key:
    """The way to a value, without what pydantic adds to it for its own branches."""
    found: list[str | int] = []
    value = document.value
    for name in key:
        is_there = name in value if isinstance(value, dict) else _is_index(value, name)
        if is_there:
            value = value[name]
            found.append(name)
    return tuple(found)


def _is_index(value: Any, name: str | int) -> bool:
    return isinstance(value, list) and isinstance(name, int) and name < len(value)


def _known_keys(part: type[Part], key: Key) -> list[str]:
    """What could have been written where an unknown key stands."""
    found = part
    for name in key[:-1]:
        if isinstance(name, str) and name in found.model_fields:
            found = _part_in(found.model_fields[name].annotation) or found
    return [field.alias or name for name, field in found.model_fields.items()]


def _part_in(annotation: Any) -> type[Part] | None:
    if isinstance(annotation, type) and issubclass(annotation, Part):
        return annotation
    return next((part for inner in get_args(annotation) if (part := _part_in(inner))), None)


def _kind(value: Any) -> str:
    names = {dict: "a table", list: "a list", type(None): "nothing", bool: "true or false"}
    return names.get(type(value), repr(value)[:60])
