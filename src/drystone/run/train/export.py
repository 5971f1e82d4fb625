"""Turn a checkpoint into a folder that `transformers` loads.

    python -m drystone.run.train.export CHECKPOINTS plan.json OUT [--dtype bf16]

CHECKPOINTS is one checkpoint, or the folder that holds them: then the newest whole one is taken.
Adapters are added into the matrices they stand beside. Weights are read and written a few gigabytes
at a time; the folder gets its name when all is there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from drystone.describe.model import ModuleSpec
from drystone.errors import DrystoneError, InvalidSpec, UnreadableFile
from drystone.plan.plan import load_plan
from drystone.run.train.checkpoint.checkpoint import (
    RECORD,
    check_checkpoint,
    find_whole,
)
from drystone.run.train.checkpoint.contents import SafeReader
from drystone.run.train.models.huggingface import Exported, exported_model
from drystone.run.train.models.lora import merged_weight

FILE_BYTES: Final = 4_000_000_000  # of one file, about; `transformers` itself takes 5e9
_DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    exported: Exported,
    *,
    dtype: torch.dtype = torch.float32,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write weights and configuration of one checkpoint to the folder `out`, which must be new."""
    problems = check_checkpoint(checkpoint)
    if problems:
        raise UnreadableFile("; ".join(problems), where=str(checkpoint))
    if out.exists():
        raise InvalidSpec("is there already", where=str(out))
    stored = _stored_shapes(checkpoint)
    scratch = out.with_name(f".{out.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    groups = list(_grouped(exported, stored, file_bytes // dtype.itemsize))
    index: dict[str, str] = {}
    for number, names in enumerate(groups, start=1):
        tensors = _read(checkpoint, stored, exported, names)
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        save_file(
            {name: one.to(dtype).contiguous() for name, one in tensors.items()},
            scratch / file,
            metadata={"format": "pt"},
        )
        index |= dict.fromkeys(names, file)
    total = sum(prod(exported.shape_of(name, stored)) for name in index) * dtype.itemsize
    _write_json(
        scratch / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": index},
    )
    _write_json(scratch / "config.json", {**exported.config, "dtype": str(dtype).split(".")[1]})
    scratch.rename(out)


def _stored_shapes(checkpoint: Path) -> dict[str, tuple[int, ...]]:
    metadata = SafeReader(checkpoint).read_metadata().state_dict_metadata
    prefix = "model."
    return {
        name.removeprefix(prefix): tuple(one.size)
        for name, one in metadata.items()
        if name.startswith(prefix)
    }


def _grouped(
    exported: Exported, stored: Mapping[str, Sequence[int]], most_elements: int
) -> Iterator[list[str]]:
    """Names of the exported model, a file's worth at a time."""
    names: list[str] = []
    elements = 0
    for name in exported.sources:
        size = prod(exported.shape_of(name, stored))
        if names and elements + size > most_elements:
            yield names
            names, elements = [], 0
        names.append(name)
        elements += size
    if names:
        yield names


def _read(
    checkpoint: Path,
    stored: Mapping[str, Sequence[int]],
    exported: Exported,
    names: Sequence[str],
) -> dict[str, torch.Tensor]:
    """Tensors under their new names."""
    wanted = list(dict.fromkeys(source for name in names for source in exported.sources[name]))
    adapters = [
        other
        for one in wanted
        for other in (f"{one.removesuffix('weight')}lora_a", f"{one.removesuffix('weight')}lora_b")
        if one.endswith(".weight") and other in stored
    ]
    values = {f"model.{one}": torch.empty(*stored[one]) for one in (*wanted, *adapters)}
    dcp.load(values, storage_reader=SafeReader(checkpoint), no_dist=True)
    for name in adapters:
        if name.endswith("lora_a"):
            base = f"model.{name.removesuffix('lora_a')}"
            weight = values[f"{base}weight"]
            values[f"{base}weight"] = merged_weight(
                weight, values[f"{base}lora_a"], values[f"{base}lora_b"]
            )
    return {
        name: exported.convert(
            name, [values[f"model.{source}"] for source in exported.sources[name]]
        )
        for name in names
    }


def _write_json(path: Path, table: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(table, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Find the checkpoint, export it."""
    parser = argparse.ArgumentParser(prog="python -m drystone.run.train.export")
    parser.add_argument("checkpoints", type=Path)
    parser.add_argument("plan", type=Path, help="what the checkpoint was trained by")
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=sorted(_DTYPES), default="fp32")
    given = parser.parse_args(arguments)
    try:
        is_one = (given.checkpoints / RECORD).exists()
        checkpoint = given.checkpoints if is_one else find_whole(given.checkpoints)
        if checkpoint is None:
            raise UnreadableFile("holds no whole checkpoint", where=str(given.checkpoints))
        model = load_plan(given.plan).model
        if isinstance(model, ModuleSpec):
            raise InvalidSpec(f"{model.name} is a module of its own: no format is known for it")
        exported = exported_model(model)
        export_checkpoint(checkpoint, given.out, exported, dtype=_DTYPES[given.dtype])
    except DrystoneError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
