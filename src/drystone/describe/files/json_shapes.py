"""From frozen dataclasses to JSON and back, checked: a wrong key is an error with a hint.

Only what the project's own dataclasses use is understood: numbers, strings, booleans, enumerations,
tuples, unions and nested dataclasses.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from typing import Any, TypeVar

from drystone.errors import InvalidSpec, UnknownName

Shape = TypeVar("Shape")


def to_plain(value: Any) -> Any:
    """Dicts, lists, numbers and strings only."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    return value


def from_plain(shape: type[Shape], plain: Any, *, where: str) -> Shape:
    """An instance of the dataclass `shape`."""
    return typing.cast("Shape", _read(shape, plain, where))


def _read(kind: Any, plain: Any, where: str) -> Any:
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        return _read_union(kind, plain, where)
    if origin is tuple:
        return _read_tuple(kind, plain, where)
    if origin is dict:
        _expect(plain, dict, where)
        return {key: _read(typing.get_args(kind)[1], item, where) for key, item in plain.items()}
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, plain, where)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        try:
            return kind(plain)
        except ValueError:
            raise UnknownName(kind.__name__, str(plain), [str(member.value) for member in kind],
                              where=where) from None  # fmt: skip
    if kind is float and isinstance(plain, int) and not isinstance(plain, bool):
        return float(plain)
    if kind in (int, float, str, bool):
        _expect(plain, kind, where)
    return plain


def _read_dataclass(kind: Any, plain: Any, where: str) -> Any:
    _expect(plain, dict, where)
    hints = typing.get_type_hints(kind)
    known = {field.name: field for field in dataclasses.fields(kind)}
    for key in plain:
        if key not in known:
            raise UnknownName("key", str(key), known, where=where)
    values = {key: _read(hints[key], item, f"{where}.{key}") for key, item in plain.items()}
    for name, field in known.items():
        has_default = (
            field.default is not dataclasses.MISSING
            or field.default_factory is not dataclasses.MISSING
        )
        if name not in values and not has_default:
            raise InvalidSpec(f"{name} is missing", where=where)
    return kind(**values)


def _read_tuple(kind: Any, plain: Any, where: str) -> tuple[Any, ...]:
    _expect(plain, list, where)
    inner = typing.get_args(kind)
    if len(inner) == 2 and inner[1] is Ellipsis:
        return tuple(_read(inner[0], item, f"{where}[{i}]") for i, item in enumerate(plain))
    if len(inner) != len(plain):
        raise InvalidSpec(f"has {len(plain)} parts, must have {len(inner)}", where=where)
    return tuple(_read(kind, part, where) for kind, part in zip(inner, plain, strict=True))


def _read_union(kind: Any, plain: Any, where: str) -> Any:
    choices = typing.get_args(kind)
    if plain is None and type(None) in choices:
        return None
    failures = []
    for choice in choices:
        if choice is type(None):
            continue
        try:
            return _read(choice, plain, where)
        except InvalidSpec as error:
            failures.append(error)
        except UnknownName as error:
            failures.append(InvalidSpec(error.message, where=error.where, hint=error.hint))
    raise failures[0]


def _expect(plain: Any, kind: type, where: str) -> None:
    if not isinstance(plain, kind) or (kind is not bool and isinstance(plain, bool)):
        raise InvalidSpec(f"is {str(plain)[:60]!r}, must be {_WORDS[kind]}", where=where)


_WORDS = {
    int: "a whole number", float: "a number", str: "a text", bool: "true or false",
    dict: "an object", list: "a list",
}  # fmt: skip
