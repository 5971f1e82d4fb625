"""What a launch script starts: its variables, arrays and simple conditions, read but never run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

from drystone.errors import UnreadableFile

_NAME: Final = r"[A-Za-z_]\w*"
_ASSIGNMENT: Final = re.compile(rf"({_NAME})(\+?)=(.*)", re.DOTALL)
_USUAL: Final = r"(?:[^{}]|\{[^{}]*\})*"
_REFERENCE: Final = re.compile(
    rf"\$\(\((?P<sum>.*?)\)\)"
    rf"|\$\{{(?P<braced>{_NAME}|\d)(?P<array>\[[@*]\])?(?::?-(?P<usual>{_USUAL}))?\}}"
    rf"|\$(?P<plain>{_NAME})",
    re.DOTALL,
)
_OVERRIDE: Final = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
_PRODUCT: Final = re.compile(r"\d+([*/]\d+)*")
_CHOICE: Final = re.compile(r"activation[_-]checkpoint:([\w-]+)")  # as torchtitan writes it
_ENDS: Final = ("\n", ";", "&", "|")


@dataclass(frozen=True, slots=True)
class _Word:
    """A word as written, or a mark of the shell's grammar."""

    text: str
    is_mark: bool = False
    is_quoted: bool = False


@dataclass(slots=True)
class Script:
    """The commands of a script, with what its variables stand for, as far as it says."""

    variables: dict[str, list[str]] = field(default_factory=dict)
    commands: list[list[str]] = field(default_factory=list)
    _taken: list[bool] = field(default_factory=list)  # of the conditions around: which hold

    @property
    def words(self) -> list[str]:
        """Those of the command that has most options: the one that trains."""
        return max(self.commands, key=_num_options, default=[])

    def run(self, statement: list[_Word]) -> None:
        """Follow one statement."""
        first = statement[0].text
        if first in ("if", "elif", "else", "fi"):
            self._branch(first, statement[1:])
            statement = statement[1:] if first == "else" else []
        elif first in ("then", "do", "{"):
            statement = statement[1:]
        if not statement or not all(self._taken):
            return
        if statement[0].text == "for" and len(statement) > 3:
            values = [part for word in statement[3:] for part in self.expand(word)]
            self.variables[statement[1].text] = values[:1]  # the first round stands for all
        else:
            self._command(statement)

    def _branch(self, first: str, condition: list[_Word]) -> None:
        if first == "if":
            self._taken.append(self._holds(condition))
        elif not self._taken:
            return
        elif first == "fi":
            self._taken.pop()
        else:  # a second branch that might hold too stays out
            self._taken[-1] = not self._taken[-1] and (first == "else" or self._holds(condition))

    def _holds(self, condition: list[_Word]) -> bool:
        words = [" ".join(self.expand(word)) for word in condition]
        match words:
            case ["[" | "[[", left, "=" | "==" | "-eq", right, "]" | "]]"]:
                return left == right
            case ["[" | "[[", left, "!=" | "-ne", right, "]" | "]]"]:
                return left != right
            case ["[" | "[[", "-n", text, "]" | "]]"]:
                return bool(text) and "$" not in text
            case ["[" | "[[", left, "-gt", right, "]" | "]]"] if (left + right).isdigit():
                return int(left) > int(right)
        return False

    def _command(self, statement: list[_Word]) -> None:
        rest = list(statement)
        while rest and (rest[0].text in ("export", "local", "declare", "readonly", "set")):
            rest.pop(0)
        while rest and not rest[0].is_mark and (found := _ASSIGNMENT.fullmatch(rest[0].text)):
            name, more, text = found.groups()
            rest = rest[1:]
            if not text and rest and rest[0].text == "(":
                end = next((i for i, word in enumerate(rest) if word.text == ")"), len(rest))
                values = [part for word in rest[1:end] for part in self.expand(word)]
                rest = rest[end + 1 :]
            else:
                values = [self._filled(text)]
            self.variables[name] = [*(self.variables.get(name, []) if more else []), *values]
        words = [part for word in rest if not word.is_mark for part in self.expand(word)]
        if words[:1] == ["read"]:
            self._read(words)
        elif words[-2:-1] == ["-c"]:
            self.commands.append(_split(words[-1]))
        elif words:
            self.commands.append(words)

    def _read(self, words: list[str]) -> None:
        """`IFS=, read -r TP PP <<< "$CONFIG"`."""
        *names, text = [word for word in words[1:] if not word.startswith("-")]
        between = "".join(self.variables.get("IFS", [" "])) or " "
        for name, value in zip(names, text.split(between), strict=False):
            self.variables[name] = [value.strip()]

    def expand(self, word: _Word) -> list[str]:
        """The words that one stands for; what the script does not say stays a reference."""
        array = _REFERENCE.fullmatch(word.text)
        if array and array["array"] and array["braced"] in self.variables:
            values = self.variables[array["braced"]]
            return values if word.is_quoted else [part for v in values for part in _split(v)]
        text = self._filled(word.text)
        was_filled = text != word.text
        return [text] if word.is_quoted or not was_filled else _split(text)

    def _filled(self, text: str) -> str:
        def value(found: re.Match[str]) -> str:
            if found["sum"] is not None:
                return _summed(self._filled(re.sub(rf"(?<![\w$]){_NAME}", r"$\g<0>", found["sum"])))
            known = self.variables.get(found["braced"] or found["plain"])
            if known is not None:
                return " ".join(known)
            return found[0] if found["usual"] is None else self._filled(found["usual"].strip("\"'"))

        return _REFERENCE.sub(value, text).replace("\0", "$")


def read_script(text: str, where: str) -> Script:
    """The commands of a shell script; conditions that cannot be told do not hold."""
    script, depth = Script(), 0
    statement: list[_Word] = []
    try:
        for word in _lexed(text + "\n"):
            depth += {"(": 1, ")": -1}.get(word.text, 0) if word.is_mark else 0
            if word.is_mark and word.text in _ENDS and (depth <= 0 or word.text != "\n"):
                if statement:
                    script.run(statement)
                statement, depth = [], 0
            elif not (word.is_mark and word.text in _ENDS):
                statement.append(word)
    except ValueError as error:
        told = f"is no script that can be followed: {error}"
        raise UnreadableFile(told, where=where) from None
    return script


def _lexed(text: str) -> Iterator[_Word]:
    """Words and marks; quotes are taken off, and what single quotes hold stays as it is."""
    now, is_word, is_quoted, at = "", False, False, 0
    while at < len(text):
        char, size, piece = text[at], 1, None
        if char == "\\":
            size, piece = 2, "" if text[at + 1 : at + 2] in "\r\n" else text[at + 1 : at + 2]
        elif char in "'\"":
            end = _closing(text, at)
            size, piece, is_quoted = end + 1 - at, text[at + 1 : end], True
            piece = piece.replace("$", "\0") if char == "'" else piece.replace("\\\n", " ")
        elif char == "$" and text[at + 1 : at + 2] in ("(", "{"):
            size = _matching(text, at + 1) + 1 - at
            piece = text[at : at + size]
        elif char == "#" and not is_word:
            size = text.index("\n", at) - at
        elif char not in " \t\r\n;()&|<>":
            piece = char
        if piece is not None:
            now, is_word = now + piece, is_word or bool(piece) or is_quoted
        elif is_word:
            yield _Word(now, is_quoted=is_quoted)
            now, is_word, is_quoted = "", False, False
        if piece is None and char in "\n;()&|<>":
            yield _Word(char, is_mark=True)
        at += size


def _closing(text: str, at: int) -> int:
    end = at + 1
    while end < len(text) and text[end] != text[at]:
        end += 2 if text[end] == "\\" and text[at] == '"' else 1
    if end >= len(text):
        raise ValueError(f"a quotation that begins at character {at} never ends")
    return end


def _matching(text: str, at: int) -> int:
    opening = text[at]
    closing, depth = {"(": ")", "{": "}"}[opening], 0
    for end in range(at, len(text)):
        depth += (text[end] == opening) - (text[end] == closing)
        if depth == 0:
            return end
    raise ValueError(f"{opening} at character {at} is never closed")


def _summed(text: str) -> str:
    """`8 * 2`: products and quotients of plain numbers; anything else stays as it is."""
    parts = re.findall(r"\d+|\S", text)
    if not _PRODUCT.fullmatch("".join(parts)):
        return f"$(({text}))"
    total = int(parts[0])
    for mark, number in zip(parts[1::2], parts[2::2], strict=True):
        total = total * int(number) if mark == "*" else total // max(int(number), 1)
    return str(total)


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _num_options(words: list[str]) -> int:
    return sum(word.startswith("--") or bool(_OVERRIDE.fullmatch(word)) for word in words)


def options_of(words: list[str], variables: Mapping[str, list[str]]) -> dict[str, Any]:
    """`--a-b 1`, `--a.no-b`, `--flag` and `a.b=1` as a table."""
    table: dict[str, Any] = {}
    name = ""
    for word in words:
        override = _OVERRIDE.fullmatch(word)
        if word.startswith("--") and len(word) > 2:
            name, has_value, value = word[2:].partition("=")
            name = name.replace("-", "_")
            table[name] = _scalar(value) if has_value else True
            name = "" if has_value else name
        elif choice := _CHOICE.fullmatch(word):
            table["activation_checkpoint"], name = choice[1], ""
        elif word.endswith(".py") or re.fullmatch(r"-[A-Za-z]|\$[@*(].*", word):
            name = ""
            table |= {"PROGRAM": word} if word.endswith(".py") else {}
        elif override:
            table[override[1]], name = _scalar(override[2]), ""
        elif name:
            held = table[name]
            values = held if isinstance(held, list) else [] if held is True else [held]
            table[name] = [*values, _scalar(word)] if values else _scalar(word)
    for word in ("NGPU", "MODULE", "CONFIG"):  # of torchtitan's run_train.sh
        if word in variables:
            table.setdefault(word, _scalar(" ".join(variables[word])))
    negated = {key for key in table if _positive(key) != key}
    return {_positive(key): key not in negated and value for key, value in table.items()}


def _positive(name: str) -> str:
    """`compile.no_enable` says of `compile.enable` that it is not so."""
    *group, last = name.split(".")
    return ".".join([*group, last[3:]]) if group and last.startswith("no_") else name


def _scalar(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return text if isinstance(value, dict) else value
