"""`python -m drystone.run.train.verify FOLDER`: one rank of `drystone verify`.

All ranks execute the plans of a folder one after the other, in one process each, because starting
processes takes longer than training a few steps. Rank 0 leaves the reports of each plan beside it;
a plan without a file of reports was not reached. The collectives come first.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import sys
from pathlib import Path
from typing import Any, TextIO

import torch

from drystone.errors import DrystoneError
from drystone.plan.plan import load_plan
from drystone.run.train.collectives import Form, Wire
from drystone.run.train.config import RankConfig
from drystone.run.train.group import joined, this_device
from drystone.run.train.loop import train

COLLECTIVES_FILE = "collectives.json"


def main(arguments: list[str] | None = None) -> int:
    """Check the collectives, then execute every plan of the folder that has no reports yet."""
    parser = argparse.ArgumentParser(prog="python -m drystone.run.train.verify")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--devices", action="store_true", help="print what torch sees, and leave")
    given = parser.parse_args(arguments)
    if given.devices:
        sys.stdout.write(json.dumps(describe_devices()) + "\n")
        return 0
    config = RankConfig(num_steps=given.steps, seed=given.seed)
    try:
        with joined() as wire:
            run_folder(given.folder, config, wire)
    except DrystoneError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


def run_folder(folder: Path, config: RankConfig, wire: Wire) -> None:
    """What one rank does; all ranks look at the folder before any of them changes it."""
    has_checked = (folder / COLLECTIVES_FILE).exists()
    todo = [path for path in sorted(folder.glob("*.plan")) if not _reports(path).exists()]
    wire.barrier()
    if not has_checked:
        found = check_collectives(wire, this_device())
        if wire.rank == 0:
            (folder / COLLECTIVES_FILE).write_text(json.dumps(found), encoding="utf-8")
    for path in todo:
        plan = load_plan(path)
        with _open_reports(path, wire) as stream:
            train(plan, config, wire, stream)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        wire.barrier()


def check_collectives(wire: Wire, device: torch.device) -> dict[str, list[str]]:
    """Every collective that training uses, on pieces of unequal size, against what must come out.

    By kind of number; an empty list means that all of it was right on this rank.
    """
    kinds = [torch.float32]
    if device.type == "cuda":
        kinds += [torch.float16, *([torch.bfloat16] if torch.cuda.is_bf16_supported() else [])]
    return {str(kind).removeprefix("torch."): _wrong(wire, device, kind) for kind in kinds}


def _wrong(wire: Wire, device: torch.device, dtype: torch.dtype) -> list[str]:
    ranks = wire.num_ranks
    cuts = {
        "equal pieces": [8 * rank for rank in range(ranks + 1)],
        "unequal pieces": [rank * (rank + 1) // 2 for rank in range(ranks + 1)],
        "all on the last": [0] * ranks + [24],
    }
    wrong = []
    for words, edges in cuts.items():
        forms: list[Form | None] = [None]
        if words != "equal pieces":
            forms += [Form.PADDED]
        for form in forms:
            if not _gathers_right(wire, edges, form, device, dtype):
                wrong.append(f"gather of {words}{f' ({form.value})' if form else ''}")
            if not _reduces_right(wire, edges, form, device, dtype):
                wrong.append(f"reduce of {words}{f' ({form.value})' if form else ''}")
    total = torch.full((3,), float(wire.rank + 1), device=device, dtype=dtype)
    wire.sum(total).wait()
    if total.tolist() != [ranks * (ranks + 1) / 2] * 3:
        wrong.append("sum")
    return wrong


def _gathers_right(
    wire: Wire, cuts: list[int], form: Form | None, device: torch.device, dtype: torch.dtype
) -> bool:
    mine = slice(cuts[wire.rank], cuts[wire.rank + 1])
    whole = torch.arange(cuts[-1], device=device).to(dtype)
    flat = torch.full_like(whole, -1)
    wire.gather(whole[mine].clone(), flat, cuts, form).wait()
    return torch.equal(flat, whole)


def _reduces_right(
    wire: Wire, cuts: list[int], form: Form | None, device: torch.device, dtype: torch.dtype
) -> bool:
    mine = slice(cuts[wire.rank], cuts[wire.rank + 1])
    whole = torch.arange(cuts[-1], device=device).to(dtype)
    out = torch.empty_like(whole[mine].clone())
    wire.reduce(whole + wire.rank, out, cuts, form).wait()
    extra = wire.num_ranks * (wire.num_ranks - 1) / 2
    return torch.equal(out, whole[mine] * wire.num_ranks + extra)


def describe_devices() -> dict[str, Any]:
    """Versions and devices, for the report."""
    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "devices": []}
    if torch.cuda.is_available():
        found["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
        for index in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(index)
            found["devices"].append({"name": about.name, "memory_bytes": about.total_memory})
    return found


def _reports(plan: Path) -> Path:
    return plan.with_suffix(".reports")


def _open_reports(plan: Path, wire: Wire) -> TextIO:
    if wire.rank:
        return io.StringIO()
    return _reports(plan).open("w", encoding="utf-8", buffering=1)


if __name__ == "__main__":
    sys.exit(main())
