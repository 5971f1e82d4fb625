"""Turn a checkpoint into a folder that `transformers` or PEFT loads.

    python -m drystone.run.train.export CHECKPOINTS plan.json OUT [--dtype bf16] [--adapter]

CHECKPOINTS is one checkpoint, or the folder that holds them: then the newest whole one is taken.
Adapters are added into the matrices they stand beside, or with `--adapter` written alone. Tokenizer
and generation settings of the folder that training began with are copied along. Weights are read
and written a few gigabytes at a time; the folder gets its name when all is there.
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

from drystone.describe.model import ModelSpec, ModuleSpec
from drystone.describe.recipe import Lora, Precision, Tuning
from drystone.errors import DrystoneError, InvalidSpec, UnreadableFile
from drystone.plan.plan import Plan, load_plan
from drystone.run.train.checkpoint.checkpoint import (
    RECORD,
    check_checkpoint,
    find_whole,
)
from drystone.run.train.checkpoint.contents import SafeReader
from drystone.run.train.config import RankConfig
from drystone.run.train.judgement import BEST
from drystone.run.train.models.huggingface import Exported, exported_model
from drystone.run.train.models.lora import merged_weight
from drystone.run.train.models.peft import adapter_config, adapter_tensors
from drystone.run.train.models.quantised import PACKED, number_pairs, packed_shape, unpack

FILE_BYTES: Final = 4_000_000_000  # of one file, about; `transformers` itself takes 5e9
DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_PREFIX: Final = "model."
# What belongs to a model besides configuration and weights, where it is there.
_COPIED: Final = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)


def export_plan(
    checkpoints: Path, plan: Plan, out: Path, *, dtype: torch.dtype, is_adapter: bool = False
) -> None:
    """Write what a plan has trained so far to the folder `out`, which must be new."""
    model, recipe = plan.model, plan.recipe
    is_one = (checkpoints / RECORD).exists()
    checkpoint = checkpoints if is_one else find_whole(checkpoints)
    if checkpoint is None:
        raise UnreadableFile("holds no whole checkpoint", where=str(checkpoints))
    if isinstance(model, ModuleSpec):
        raise InvalidSpec(f"{model.name} is a module of its own: no format is known for it")
    exported = exported_model(model)
    if is_adapter:
        if recipe.tuning is Tuning.FULL:
            raise InvalidSpec(f"{model.name} was trained whole: there is no adapter")
        export_adapter(checkpoint, out, exported, model, recipe.lora, dtype=dtype)
    else:
        export_checkpoint(
            checkpoint, out, exported, dtype=dtype, lora=recipe.lora, beside=_folder_of(model)
        )


def check_export(plan: Plan, config: RankConfig) -> None:
    """What cannot be written at the end of a job is refused at its beginning."""
    if config.export == "none":
        return
    if config.checkpoints is None:
        raise InvalidSpec("nothing is saved to export from", hint="Give --checkpoints FOLDER")
    if config.export == "peft" and plan.recipe.tuning is Tuning.FULL:
        raise InvalidSpec("export: peft, but there are no adapters", hint="Write huggingface")
    if isinstance(plan.model, ModuleSpec):
        raise InvalidSpec("export: no format is known for a module of your own")
    beside_experts = {"gate", "up", "down"} & set(plan.recipe.lora.targets)
    if config.export == "peft" and plan.model.is_moe and beside_experts:
        raise InvalidSpec(
            "export: peft has no adapters beside the matrices of single experts",
            hint="Write huggingface, or adapt attention alone: "
            "targets: [q_proj, k_proj, v_proj, o_proj]",
        )
    exported_model(plan.model)


def export_at_end(plan: Plan, config: RankConfig) -> Path:
    """The last checkpoint of a job, or the one kept as the best, in a folder beside them."""
    checkpoints = config.checkpoints
    assert checkpoints is not None  # `check_export`
    out = checkpoints.absolute().parent / "export"
    shutil.rmtree(out, ignore_errors=True)  # of an attempt before
    best = checkpoints / BEST
    is_bf16 = plan.recipe.precision is Precision.BF16_MIXED
    export_plan(
        best if best.is_dir() else checkpoints,
        plan,
        out,
        dtype=torch.bfloat16 if is_bf16 else torch.float32,
        is_adapter=config.export == "peft",
    )
    return out


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    exported: Exported,
    *,
    dtype: torch.dtype = torch.float32,
    file_bytes: int = FILE_BYTES,
    lora: Lora | None = None,
    beside: Path | None = None,
) -> None:
    """Write weights and configuration of one checkpoint to the folder `out`, which must be new."""
    _check(checkpoint, out)
    stored = _stored_shapes(checkpoint, exported)
    scratch = _scratch(out)
    groups = list(_grouped(exported, file_bytes // dtype.itemsize))
    index: dict[str, str] = {}
    for number, names in enumerate(groups, start=1):
        tensors = _read(checkpoint, stored, exported, names, lora or Lora())
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        file = file if len(groups) > 1 else "model.safetensors"
        _save(tensors, scratch / file, dtype)
        index |= dict.fromkeys(names, file)
    if len(groups) > 1:
        total = sum(prod(exported.weights[name].shape) for name in index) * dtype.itemsize
        _write_json(
            scratch / "model.safetensors.index.json",
            {"metadata": {"total_size": total}, "weight_map": index},
        )
    config = {key: value for key, value in exported.config.items() if key != "torch_dtype"}
    _write_json(scratch / "config.json", {**config, "dtype": str(dtype).split(".")[1]})
    _copy_along(beside, scratch)
    scratch.rename(out)


def export_adapter(
    checkpoint: Path,
    out: Path,
    exported: Exported,
    model: ModelSpec,
    lora: Lora,
    *,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write the adapters of one checkpoint as PEFT does, without the model they stand beside."""
    if lora.train_embeddings:
        raise InvalidSpec(
            "embeddings were trained too, which is more than an adapter", hint="Export it merged"
        )
    _check(checkpoint, out)
    shapes = _stored_shapes(checkpoint, exported)
    scratch = _scratch(out)
    values = _load(checkpoint, {name: shapes[name] for name in shapes if _is_adapter(name)})
    _save(adapter_tensors(exported.weights, values), scratch / "adapter_model.safetensors", dtype)
    config = adapter_config(exported.weights, values, model, lora)
    _write_json(scratch / "adapter_config.json", config)
    _copy_along(_folder_of(model), scratch)
    scratch.rename(out)


def _check(checkpoint: Path, out: Path) -> None:
    problems = check_checkpoint(checkpoint)
    if problems:
        raise UnreadableFile("; ".join(problems), where=str(checkpoint))
    if out.exists():
        raise InvalidSpec("is there already", where=str(out), hint="Name a folder that is not")


def _scratch(out: Path) -> Path:
    """An empty folder beside the one that will be."""
    scratch = out.with_name(f".{out.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    return scratch


def _folder_of(model: ModelSpec) -> Path | None:
    file = Path(model.source)
    return file.parent if file.suffix == ".json" and file.is_file() else None


def _copy_along(folder: Path | None, out: Path) -> None:
    for name in _COPIED if folder is not None else ():
        assert folder is not None
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out / name)


def _stored_shapes(checkpoint: Path, exported: Exported) -> dict[str, tuple[int, ...]]:
    """What the checkpoint holds of the model; all that is exported must be there."""
    metadata = SafeReader(checkpoint).read_metadata().state_dict_metadata
    found = {
        name.removeprefix(_PREFIX): tuple(one.size)
        for name, one in metadata.items()
        if name.startswith(_PREFIX)
    }
    for stored in exported.weights.values():
        for name, shape in stored.parts:
            packed = _packed_name(name)
            if found.get(packed) == packed_shape(torch.Size(shape)):
                found[name] = shape
            if found.get(name) != shape:
                raise UnreadableFile(
                    f"{name} is {found.get(name, 'not there')}, the plan says {shape}",
                    where=str(checkpoint),
                    hint="Name the plan that the checkpoint was trained by",
                )
    return found


def _grouped(exported: Exported, most_elements: int) -> Iterator[list[str]]:
    """Names of the exported model, a file's worth at a time."""
    names: list[str] = []
    elements = 0
    for name, stored in exported.weights.items():
        size = prod(stored.shape)
        if names and elements + size > most_elements:
            yield names
            names, elements = [], 0
        names.append(name)
        elements += size
    if names:
        yield names


def _read(
    checkpoint: Path,
    shapes: Mapping[str, tuple[int, ...]],
    exported: Exported,
    names: Sequence[str],
    lora: Lora,
) -> dict[str, torch.Tensor]:
    """Tensors under their new names, adapters added in."""
    wanted = [part for name in names for part, _ in exported.weights[name].parts]
    bases = [name.removesuffix("weight") for name in wanted if name.endswith(".weight")]
    adapters = [
        f"{base}{end}" for base in bases for end in ("lora_a", "lora_b") if f"{base}{end}" in shapes
    ]
    held = {_packed_name(name) if _packed_name(name) in shapes else name for name in wanted}
    values = _load(checkpoint, {name: shapes[name] for name in (*sorted(held), *adapters)})
    for name in wanted:
        if name not in values:
            pairs = number_pairs(torch.device("cpu"))
            packed = values.pop(_packed_name(name))
            values[name] = unpack(packed, pairs, shapes[name], dtype=torch.float32)
    for name in adapters:
        if name.endswith("lora_a"):
            base = name.removesuffix("lora_a")
            values[f"{base}weight"] = merged_weight(
                values[f"{base}weight"], values[name], values[f"{base}lora_b"], lora.scale
            )
    return {
        name: exported.convert(name, [values[part] for part, _ in exported.weights[name].parts])
        for name in names
    }


def _load(checkpoint: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    values = {
        f"{_PREFIX}{name}": torch.empty(shape, dtype=torch.uint8 if _is_packed(name) else None)
        for name, shape in shapes.items()
    }
    dcp.load(values, storage_reader=SafeReader(checkpoint), no_dist=True)
    return {name.removeprefix(_PREFIX): value for name, value in values.items()}


def _packed_name(name: str) -> str:
    """Under which a weight stands where it is kept in four bits."""
    return f"{name.removesuffix('weight')}{PACKED}"


def _is_packed(name: str) -> bool:
    return name.endswith(f".{PACKED}")


def _is_adapter(name: str) -> bool:
    return name.endswith((".lora_a", ".lora_b"))


def _save(tensors: Mapping[str, torch.Tensor], file: Path, dtype: torch.dtype) -> None:
    ready = {name: value.to(dtype).contiguous() for name, value in tensors.items()}
    save_file(ready, file, metadata={"format": "pt"})


def _write_json(path: Path, table: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(table, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Find the checkpoint, export it."""
    parser = argparse.ArgumentParser(prog="python -m drystone.run.train.export")
    parser.add_argument("checkpoints", type=Path)
    parser.add_argument("plan", type=Path, help="what the checkpoint was trained by")
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp32")
    parser.add_argument("--adapter", action="store_true", help="the adapter alone, as PEFT has it")
    given = parser.parse_args(arguments)
    try:
        export_plan(
            given.checkpoints,
            load_plan(given.plan),
            given.out,
            dtype=DTYPES[given.dtype],
            is_adapter=given.adapter,
        )
    except DrystoneError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
