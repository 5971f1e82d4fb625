"""Decides what a MODEL on the command line is: a zoo name, a config file, or a Python function."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from drystone.describe.families.huggingface import load_config
from drystone.describe.families.reader import shorten
from drystone.describe.model import ModelSpec
from drystone.describe.zoo import find_model
from drystone.errors import InvalidSpec, UnknownName, UnreadableFile

_FUNCTION = re.compile(r"(?P<path>.+\.py):(?P<function>.*)", re.DOTALL)
_PATH_STARTS = ("/", "./", "../", "~")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleReference:
    """A function in a Python file that returns a `torch.nn.Module`; tracing it needs torch."""

    path: Path
    function: str


def resolve_model(text: str) -> ModelSpec | ModuleReference:
    """Find the model that `text` means.

    A bare name means the zoo even if a folder has the same name; write `./name` for the folder.
    """
    text = text.strip()
    if not text:
        raise InvalidSpec(
            "no model is named", hint="Give a name such as llama-3-8b, or a path to a config.json"
        )
    if match := _FUNCTION.fullmatch(text):
        return _module_reference(_expand(match["path"]), match["function"])
    if text.endswith(".py"):
        raise InvalidSpec(
            f"{shorten(text)} names no function",
            hint=f"Add the function that returns the model: {text[:100]}:build_model",
        )
    if text.startswith(_PATH_STARTS) or text.endswith(".json") or _is_config_folder(text):
        return load_config(_expand(text))
    try:
        return find_model(text)
    except UnknownName as error:
        error.hint += " A path to a config.json, or module.py:function, is also a model"
        raise


def is_config_folder(path: Path) -> bool:
    """Whether a folder has a config."""
    try:
        return (path / "config.json").is_file()
    except (OSError, ValueError):
        return False


def _module_reference(path: Path, function: str) -> ModuleReference:
    if not function.isidentifier():
        raise InvalidSpec(
            f"{shorten(function)} is not the name of a function",
            where=str(path)[:300],
            hint="Write it like model.py:build_model",
        )
    try:
        is_there = path.is_file()
    except (OSError, ValueError):
        is_there = False
    if not is_there:
        raise UnreadableFile(
            "there is no such Python file",
            where=str(path)[:300],
            hint="Give the path from the current folder, as in models/mine.py:build_model",
        )
    return ModuleReference(path=path, function=function)


def _expand(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:  # ~name, and nobody has that name
        return Path(text)


def _is_config_folder(text: str) -> bool:
    """Whether this is a path with a folder in it that leads to a config; bare names are not."""
    return os.sep in text and is_config_folder(Path(text))
