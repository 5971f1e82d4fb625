"""Reads the fields of a class from its source: name, type, default, and the comment beside it.

Works alike for dataclasses and pydantic models, so that what a reference page says of a field is
what stands in the code.
"""

from __future__ import annotations

import ast
import inspect
import io
import textwrap
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

NOTE = "<!-- Written by docs/generate_reference.py: `make reference`. Do not edit. -->"


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldText:
    """One field, as its source says it."""

    name: str
    type: str
    default: str  # empty where it has none
    comment: str


def fields_of(cls: type[Any]) -> list[FieldText]:
    """The fields of a class, those that it inherits first."""
    own: dict[str, FieldText] = {}
    for part in reversed(cls.__mro__):
        if "__annotations__" in vars(part) and part.__module__.startswith("drystone"):
            own |= {one.name: one for one in _own_fields(part)}
    return list(own.values())


@cache
def _own_fields(cls: type[Any]) -> tuple[FieldText, ...]:
    source = textwrap.dedent(inspect.getsource(cls))
    comments = _comments(source)
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.ClassDef)
    return tuple(
        _field_text(node, comments)
        for node in definition.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and not node.target.id.startswith("_")
    )


def _field_text(node: ast.AnnAssign, comments: dict[int, tuple[str, bool]]) -> FieldText:
    """A field as it is written; `option(default, "meaning", ge=0)` says all of it by itself."""
    name, kind = ast.unparse(node.target), ast.unparse(node.annotation)
    match node.value:
        case ast.Call(func=ast.Name(id="option"), args=[default, told], keywords=given):
            limits = [ast.unparse(one) for one in given if one.arg in _LIMITS]
            is_count = any(one.arg == "is_count" for one in given)
            return FieldText(
                name=name,
                type="Count" if is_count else f"Annotated[{kind}, Field({', '.join(limits)})]",
                default="" if is_count else _default(default),
                comment=ast.literal_eval(told),
            )
    return FieldText(
        name=name, type=kind, default=_default(node.value), comment=_comment_of(node, comments)
    )


def _comments(source: str) -> dict[int, tuple[str, bool]]:
    """By line: the comment, and whether it stands there alone."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {
        token.start[0]: (token.string.lstrip("# "), token.line.lstrip().startswith("#"))
        for token in tokens
        if token.type == tokenize.COMMENT and not token.string.startswith("# fmt")
    }


def _comment_of(node: ast.AnnAssign, comments: dict[int, tuple[str, bool]]) -> str:
    """What stands after a field, or on the lines above it."""
    after = comments.get(node.end_lineno or node.lineno)
    if after:
        return after[0]
    above: list[str] = []
    line = node.lineno - 1
    while line in comments and comments[line][1]:
        above.insert(0, comments[line][0])
        line -= 1
    return " ".join(above)


def _default(value: ast.expr | None) -> str:
    """A default as a person writes it; empty for none and for what is empty."""
    if value is None:
        return ""
    if isinstance(value, ast.Call):
        given = {one.arg: ast.unparse(one.value) for one in value.keywords}
        text = given.get("default", given.get("default_factory", ""))
    else:
        text = ast.unparse(value)
    nothing = ("None", "''", "()", "dict", "list", "tuple")
    return "" if text in nothing or text.endswith("Part") else text.strip("'")


# What the code calls short, in words.
_WORDS = {
    "str": "text", "Line": "text", "Name": "name", "_Name": "name", "_Text": "text",
    "int": "whole number", "float": "number", "bool": "true or false", "Count": "count",
    "Duration": "duration", "Gpu": "GPU type", "PositiveFloat": "number > 0",
    "_Amount": "number >= 0", "_Rate": "number > 0", "None": "",
}  # fmt: skip
_LIMITS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "max_length": "length <="}


def plain_type(text: str) -> str:
    """A type without what only Python needs: `Annotated[int, Field(ge=1)]` is `number >= 1`."""
    return _plain(ast.parse(text, mode="eval").body)


def _plain(node: ast.expr) -> str:
    match node:
        case ast.BinOp(left=left, right=right):
            return " or ".join(filter(None, (_plain(left), _plain(right))))
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[inner, *marks])):
            return ", ".join([_plain(inner), *(one for mark in marks for one in _limits(mark))])
        case ast.Subscript(value=ast.Name(id="Literal"), slice=ast.Tuple(elts=words)):
            return ", ".join(f"`{ast.literal_eval(one)}`" for one in words)
        case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=[inner, *_])):
            return f"list of {_plain(inner)}"
        case ast.Subscript(value=ast.Name(id="dict"), slice=ast.Tuple(elts=[_, inner])):
            return f"table of {_plain(inner)}"
        case ast.Constant(value=None):
            return ""
        case ast.Name(id=name):
            return _WORDS.get(name, "table" if name.endswith("Part") else name)
    return ast.unparse(node)


def _limits(mark: ast.expr) -> Iterator[str]:
    for given in mark.keywords if isinstance(mark, ast.Call) else ():
        if given.arg in _LIMITS:
            value = eval(ast.unparse(given.value), {"__builtins__": {}})  # 10**9, as it is written
            yield (
                f"{_LIMITS[given.arg]} {value:,}"
                if isinstance(value, int)
                else (f"{_LIMITS[given.arg]} {value:g}")
            )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table; bars in cells are escaped, line ends become spaces."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        cells = [" ".join(str(cell).replace("|", "\\|").split()) for cell in row]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def code(text: str) -> str:
    """Text as inline code; nothing for nothing."""
    return f"`{text}`" if text else ""
