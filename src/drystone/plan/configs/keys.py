"""Tables of a tool's keys, read into a `Setup` and written from one; keys that are not used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any

from drystone.describe.recipe import Tuning
from drystone.errors import InvalidSpec
from drystone.plan.configs.setup import Setup

Table = dict[str, Any]  # by dotted key
# Which matrices adapters stand beside: all of them are taken, so other values are not used.
_TARGETS = ("lora_target", "lora_target_modules")
_ALL_TARGETS = ("all", "all-linear")


def names(text: str) -> tuple[str, ...]:
    """Names that stand in one text, as a table of them."""
    return tuple(text.split())


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a tool and the field that it sets.

    `words` are the tool's values and ours; None stands for "says nothing". Without words both
    sides have the same value.
    """

    name: str
    field: str
    words: Mapping[Any, Any] | None = None

    def read(self, value: Any, where: str) -> Any:
        """Our value of the tool's; None: it says nothing."""
        if self.words is None:
            return self._number(value, where)
        if not self.words:  # a value that counts only together with others
            return None
        plain = value.lower() if isinstance(value, str) else value
        for word, ours in self.words.items():
            if type(word) is type(plain) and word == plain:
                return ours
        known = ", ".join(str(word) for word in self.words)
        raise InvalidSpec(
            f"{value!r} is not a value that can be planned with",
            where=f"{where}: {self.name}",
            hint=f"Known: {known}",
        )

    def word(self, ours: Any) -> Any:
        """The tool's first word for our value; None: it has none."""
        if self.words is None:
            return ours
        return next((word for word, meant in self.words.items() if meant == ours), None)

    def _number(self, value: Any, where: str) -> Any:
        if isinstance(value, str) and value.replace("_", "").isdigit():  # 500_000
            value = int(value.replace("_", ""))
        kinds = {entry.name: type(entry.default) for entry in fields(Setup)}
        kind: Any = kinds.get(self.field, int)  # what only the tool itself knows are counts
        if value is None or value in ("auto", "none"):
            return None
        if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
            if kind is int and int(value) < 1:
                raise InvalidSpec(f"{value} is not a count", where=f"{where}: {self.name}")
            return value
        told = {int: "a whole number", str: "text", bool: "true or false"}.get(kind, "a number")
        raise InvalidSpec(f"{value!r} is not {told}", where=f"{where}: {self.name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A kind of config file: its keys, what it means where it says nothing, how it is known."""

    name: str
    keys: tuple[Key, ...]
    usual: Mapping[str, Any]  # fields that differ from those of `Setup()` where nothing is said
    marks: tuple[str, ...]  # keys by which a file is recognised as this tool's
    inert: tuple[str, ...] = ()  # patterns of keys that change neither memory nor speed
    qlora: Mapping[str, Any] = field(default_factory=dict)  # keys that ask for it together
    launcher: str = ""  # whose conventions on memory apply; none: as state is shared
    settle: Callable[[dict[str, Any], Table], None] | None = None  # what several keys say together

    def knows(self, table: Table) -> bool:
        """Whether a file with these keys is this tool's."""
        marks = [pattern for mark in self.marks for pattern in (mark, f"{mark}.*")]
        return any(fnmatchcase(name, mark) for name in table for mark in marks)

    def write(self, setup: Setup, names: Sequence[str]) -> Table:
        """The keys that say what these fields of a setup are; a field without a word is refused."""
        table: Table = {}
        for name in names:
            value = getattr(setup, name)
            if name == "tuning" and value is Tuning.QLORA and self.qlora:
                table |= self.qlora
                continue
            found = [(key.name, key.word(value)) for key in self.keys if key.field == name]
            said = next((pair for pair in found if pair[1] is not None), None)
            if said is not None:
                table[said[0]] = said[1]
            elif value != self.usual.get(name, getattr(Setup(), name)):
                raise InvalidSpec(
                    f"{self.name} has no key that says {name.replace('_', ' ')} {value}",
                    where=f"--to {self.name}",
                    hint=f"`drystone plan --tool {self.name}` finds plans that it can express",
                )
        return table

    def read(self, table: Table, where: str) -> Reading:
        """What a config's keys say, and those that are not used."""
        said: dict[str, Any] = {}
        for key in self.keys:
            if key.name in table:
                ours = key.read(table[key.name], where)
                if ours is not None:
                    said[key.field] = ours
        if self.settle is not None:
            self.settle(said, table)
        known = {key.name for key in self.keys}
        left = [name for name in table if name not in known]
        left = [name for name in left if not (name in _TARGETS and table[name] in _ALL_TARGETS)]
        unused = [n for n in left if not any(fnmatchcase(n, mark) for mark in self.inert)]
        return Reading(
            tool=self.name, said=said, unused=tuple(unused), num_inert=len(left) - len(unused)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one config says."""

    tool: str
    said: Mapping[str, Any]
    unused: tuple[str, ...] = ()
    num_inert: int = 0


def flatten(value: Any, prefix: str = "") -> Table:
    """Nested keys as dotted ones; an empty mapping stands for itself."""
    if not isinstance(value, Mapping):
        return {prefix: value}
    found: Table = {}
    for name, inner in value.items():
        path = f"{prefix}.{name}" if prefix else str(name)
        if isinstance(inner, Mapping) and inner:
            found |= flatten(inner, path)
        else:
            found[path] = inner
    return found
