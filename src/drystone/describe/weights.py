"""Files of trained weights in a model's folder: what is in them, and is it what the model needs?

Only headers are read, by the standard library: a file of safetensors begins with the length of a
JSON object that names every tensor with its type, shape and place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

from drystone.describe.families.names import STYLES, Stored, Style, stored_weights, weight_shapes
from drystone.describe.model import ModelSpec
from drystone.errors import DrystoneError, InvalidSpec, UnreadableFile

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# As `transformers`, its older versions and other tools name them, whole or in pieces.
_OTHER_ENDINGS: Final = (
    ".safetensors",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".h5",
    ".msgpack",
    ".npz",
)
_BYTES: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_LONGEST_HEADER: Final = 100_000_000  # as the format has it
_MOST_TOLD: Final = 3
_CONVERT: Final = (
    "Only safetensors are read. To convert them: AutoModelForCausalLM.from_pretrained(FOLDER)"
    ".save_pretrained(NEW_FOLDER), in Python with transformers"
)


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file."""

    file: Path
    name: str  # in the file
    dtype: str
    shape: tuple[int, ...]


def holds_weights(folder: Path) -> bool:
    """Whether a folder holds any, in whatever format."""
    return any(path.name.endswith((INDEX, *_OTHER_ENDINGS)) for path in folder.iterdir())


def check_weights(folder: Path, spec: ModelSpec) -> str:
    """Why the weights in the folder cannot be those of the model; empty when they can be."""
    try:
        find_weights(folder, spec)
    except DrystoneError as error:
        where = f"{error.where}: " if error.where else ""
        hint = f" ({error.hint})" if error.hint else ""
        return f"{where}{error.message}{hint}"
    return ""


def find_weights(folder: Path, spec: ModelSpec) -> dict[str, tuple[Stored, Tensor]]:
    """Where each weight of a model is, by our name; all are there, and nothing else is."""
    style = STYLES.get(spec.family)
    if style is None:
        raise InvalidSpec(f"weights of {spec.family or 'such'} models are not loaded")
    wanted = stored_weights(spec, style)
    found = _named_fully(read_headers(folder), style)
    missing = [name for name in wanted if name not in found]
    if missing:
        raise UnreadableFile(f"lacks {_listed(missing)}", where=str(folder))
    odd = [name for name in found if name not in wanted and not _is_ignored(name, spec, style)]
    if odd:
        raise UnreadableFile(
            f"holds what its config.json does not tell of: {_listed(odd)}", where=str(folder)
        )
    for name, stored in wanted.items():
        if found[name].shape != stored.shape:
            raise UnreadableFile(
                f"{name} has the shape {list(found[name].shape)}, its config.json says "
                f"{list(stored.shape)}",
                where=str(found[name].file),
            )
    ours = {
        part: (stored, found[name]) for name, stored in wanted.items() for part, _ in stored.parts
    }
    untold = [name for name, _ in weight_shapes(spec) if name not in ours]
    if untold:
        raise InvalidSpec(f"{spec.family} models have no {_listed(untold)} in transformers")
    return ours


def find_second_head(folder: Path, spec: ModelSpec) -> Tensor | None:
    """A stored head of a model whose head is its embedding; both must then be equal."""
    style = STYLES[spec.family]
    found = _named_fully(read_headers(folder), style)
    return found.get("lm_head.weight") if spec.tied_embeddings else None


def read_headers(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder by name; files are checked for being whole."""
    if (folder / INDEX).is_file():
        return _read_indexed(folder)
    if (folder / SINGLE).is_file():
        return _read_header(folder / SINGLE)
    others = sorted(path.name for path in folder.iterdir() if path.name.endswith(_OTHER_ENDINGS))
    if "adapter_model.safetensors" in others:
        raise InvalidSpec(
            "holds an adapter, not a model",
            where=str(folder),
            hint="Merge it into its model first: merge_and_unload() of PEFT",
        )
    raise InvalidSpec(f"has weights as {_listed(others)} only", where=str(folder), hint=_CONVERT)


def _read_indexed(folder: Path) -> dict[str, Tensor]:
    where = str(folder / INDEX)
    table = _parsed((folder / INDEX).read_bytes(), where)
    places = table.get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise UnreadableFile("has no weight_map of tensors to files", where=where)
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(places.values())):
        if Path(file).name != file or not (folder / file).is_file():
            raise UnreadableFile(f"names {file}, which is not there", where=where)
        tensors |= _read_header(folder / file)
    for name, file in places.items():
        if name not in tensors or tensors[name].file.name != file:
            raise UnreadableFile(f"says that {file} holds {name}, which it does not", where=where)
    return tensors


def _read_header(file: Path) -> dict[str, Tensor]:
    where = str(file)
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or not 0 < length <= min(size - 8, _LONGEST_HEADER):
                raise UnreadableFile("is not a safetensors file, or was cut short", where=where)
            table = _parsed(stream.read(length), where)
    except OSError as error:
        raise UnreadableFile(f"cannot be read: {error.strerror}", where=where) from None
    tensors, end = {}, 0
    for name, entry in table.items():
        if name == "__metadata__":
            continue
        tensors[name] = _tensor(file, name, entry)
        end = max(end, int(entry["data_offsets"][1]))
    if 8 + length + end != size:
        raise UnreadableFile(f"has {size} bytes, its header says {8 + length + end}", where=where)
    return tensors


def _tensor(file: Path, name: str, entry: Any) -> Tensor:
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
        start, end = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise UnreadableFile(f"its header is damaged at {name[:100]!r}", where=str(file)) from None
    if dtype in _BYTES and end - start != prod(shape) * _BYTES[dtype]:
        raise UnreadableFile(f"its header is damaged at {name[:100]!r}", where=str(file))
    if dtype not in _BYTES:
        raise InvalidSpec(
            f"{name[:100]} has the type {dtype[:20]}, which is not trained from",
            where=str(file),
            hint=f"Known: {', '.join(_BYTES)}",
        )
    return Tensor(file, name, dtype, shape)


def _parsed(content: bytes, where: str) -> Mapping[str, Any]:
    try:
        table = json.loads(content)
    except (ValueError, RecursionError):
        raise UnreadableFile("is damaged: its header is not JSON", where=where) from None
    if not isinstance(table, dict):
        raise UnreadableFile("is damaged: its header is no JSON object", where=where)
    return table


def _named_fully(tensors: Mapping[str, Tensor], style: Style) -> dict[str, Tensor]:
    """Files of a bare model leave the prefix out."""
    if any(name.startswith(style.prefix) for name in tensors):
        return dict(tensors)
    return {
        name if name.startswith("lm_head.") else f"{style.prefix}{name}": tensor
        for name, tensor in tensors.items()
    }


def _is_ignored(name: str, spec: ModelSpec, style: Style) -> bool:
    return name.endswith(style.ignored) or (name == "lm_head.weight" and spec.tied_embeddings)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_TOLD} more" if len(names) > _MOST_TOLD else ""
    return ", ".join(name[:100] for name in names[:_MOST_TOLD]) + more
