"""Decides what a MODEL on the command line is: a zoo name, a config file, or a Python function."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from drystone.describe.families.function import COMPARED
from drystone.describe.families.huggingface import load_config, parse_config, read_object
from drystone.describe.families.reader import shorten
from drystone.describe.model import ModelSpec
from drystone.errors import DrystoneError, InvalidSpec, UnknownName, UnreadableFile

MODELS_FILE: Final = Path(__file__).parent / "data" / "models.json"

# Fine-tuned models have the shape of what they were tuned from.
_TUNED = re.compile(r"[-_ .](instruct|chat|it|pt|hf|base)$")
_LONGEST_NAME = 200


@dataclass(frozen=True, slots=True)
class _Zoo:
    """The file, and two ways to look a name up in it."""

    entries: Mapping[str, Mapping[str, Any]]
    by_key: Mapping[str, str]
    by_loose_key: Mapping[str, frozenset[str]]  # may be ambiguous


def find_model(name: str) -> ModelSpec:
    """The model of that name; case, punctuation, the organisation and `-instruct` do not matter."""
    zoo = _load_zoo()
    name = name[:_LONGEST_NAME]
    for form in _forms(name):
        if found := zoo.by_key.get(_key(form)):
            return _parse_entry(found)
    for form in _forms(name):
        near = zoo.by_loose_key.get(_spaced(form), frozenset())
        if len(near) == 1:
            return _parse_entry(next(iter(near)))
        if near:
            raise InvalidSpec(
                f"model {name!r} can mean more than one", hint="Write " + " or ".join(sorted(near))
            )
    raise UnknownName("model", name, zoo.entries)


def published_config(spec: ModelSpec) -> dict[str, Any] | None:
    """The `config.json` that a model was read from, or that of its known name, if still the same.

    None where there is none, or where it describes another model by now.
    """
    file = Path(spec.source)
    try:
        config = read_object(file) if file.suffix == ".json" and file.is_file() else None
        if config is None:
            config = _load_zoo().entries[spec.name]["config"]
        read = parse_config(config, where=spec.source, name=spec.name)
    except (KeyError, OSError, ValueError, DrystoneError):
        return None
    same = replace(
        spec,
        weights="",
        weights_problem="",
        not_done=read.not_done,
        source=read.source,
        stated_params=0,
    )
    return dict(config) if same == read else None


def model_names() -> tuple[str, ...]:
    """Every name, in the order of the file: family by family, small to large."""
    return tuple(_load_zoo().entries)


@lru_cache(maxsize=1024)
def _parse_entry(name: str) -> ModelSpec:
    entry = _load_zoo().entries[name]
    config = entry["config"]
    spec = parse_config(config, where=f"zoo: {name}", name=name)
    not_done = spec.not_done
    if spec.family in COMPARED and not spec.learned_positions and "rope_theta" not in config:
        not_done = (*not_done, "its rope_theta is not in the list of known models: name its file")
    return replace(
        spec,
        source=entry["source"],
        stated_params=entry.get("stated_params", 0),
        not_done=not_done,
    )


@lru_cache(maxsize=1)
def _load_zoo() -> _Zoo:
    entries: dict[str, Mapping[str, Any]] = json.loads(MODELS_FILE.read_text(encoding="utf-8"))
    by_key: dict[str, str] = {}
    by_loose_key: dict[str, set[str]] = {}
    for name, entry in entries.items():
        for spelling in (name, *entry.get("aliases", ())):
            by_key.setdefault(_key(spelling), name)
            for loose in (_spaced(spelling), _letters(spelling)):
                by_loose_key.setdefault(loose, set()).add(name)
    return _Zoo(entries, by_key, {key: frozenset(names) for key, names in by_loose_key.items()})


def _forms(name: str) -> tuple[str, ...]:
    """The name without its organisation, and also without what a tuned variant adds."""
    bare = name.strip().rstrip("/").rsplit("/", 1)[-1]
    untuned = _TUNED.sub("", bare.lower())
    return tuple(dict.fromkeys((bare, untuned)))


def _key(name: str) -> str:
    """Letters and digits, and between two digits what kept them apart: opt-1.3b is not opt-13b."""
    text = re.sub(r"(?<=\d)[._](?=\d)", ".", name.lower())
    text = re.sub(r"(?<=\d)[^0-9a-z.]+(?=\d)", "-", text)
    return re.sub(r"(?<!\d)[^0-9a-z]+|[^0-9a-z]+(?!\d)", "", text)


def _spaced(name: str) -> str:
    """As `_key`, but any mark between two digits will do: llama-3_1-8b for llama-3.1-8b."""
    return _key(name).replace(".", "-")


def _letters(name: str) -> str:
    """No marks at all: llama38b. Only names without any are looked up by it."""
    return re.sub(r"[^0-9a-z]", "", name.lower())


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
