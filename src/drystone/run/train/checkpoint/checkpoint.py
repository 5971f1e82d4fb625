"""Save a job from any split, load it into any other; what is half-written is never taken for whole.

A checkpoint is a folder `step-00000012`. It is written under another name, every file is hashed,
the hashes and the position of the job go into `checkpoint.json`, and only then the folder gets its
name. Loading takes the newest folder whose files are what their hashes say. All ranks must see the
same file system.

A checkpoint of another format is not a damaged one: loading refuses rather than pass over work that
another version of Drystone can read. Only checkpoints older than the one just written are removed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from drystone.errors import UnreadableFile
from drystone.run.fence import own_epoch, writing
from drystone.run.train.checkpoint.contents import SafeReader
from drystone.run.train.checkpoint.hashes import damaged_files, from_first, hash_written
from drystone.run.train.collectives import Wire
from drystone.run.train.emulate import host_memory
from drystone.run.train.stepping import Stepper
from drystone.run.train.uneven.shard import Owned

FORMAT = 1
RECORD = "checkpoint.json"
_NAME = re.compile(r"step-(\d{8,})")


class OtherFormat(UnreadableFile):
    """A checkpoint of another version of Drystone, in a format that this one cannot read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a job is."""

    step: int = 0
    position: int = 0  # samples seen
    seed: int = 0
    # Torch's global one, of rank 0, in hexadecimal: for loops that draw from it. What the engine
    # itself draws follows from seed, step and layer.
    rng_state: str = ""
    # Of fp16: the factor of the loss, and the steps since it last changed.
    loss_scale: float = 0.0
    scale_steps: int = 0
    # Of evaluations: the lowest loss, its step, and how many have not been lower since.
    best_loss: float | None = None
    best_step: int = 0
    num_worse: int = 0


def save_checkpoint(
    folder: Path,
    engine: Stepper,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    *,
    keep: int = 3,
) -> Path:
    """Write a checkpoint together with all ranks; whole or not at all. The last `keep` stay."""
    if not optimizer.state:
        make_optimizer_state(optimizer)
    state = dict(checkpoint_state(engine.counted, optimizer))
    return write_checkpoint(folder, state, progress, wire=engine.wire.for_storage(), keep=keep)


def write_checkpoint(
    folder: Path,
    state: dict[str, torch.Tensor],
    progress: Progress,
    *,
    wire: Wire,
    keep: int = 3,
) -> Path:
    """Write what this rank has of the state, together with all ranks of the wire."""
    target = folder / f"step-{progress.step:08d}"
    # Apart for each launch of a job: one that should be gone must not write into a later one's.
    scratch = folder / f".{target.name}.{own_epoch()}.part"
    if wire.rank == 0:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
    wire.barrier()
    with host_memory():
        dcp.save(
            state,
            storage_writer=dcp.FileSystemWriter(scratch),
            process_group=wire.group,
            no_dist=wire.is_alone,
        )
    hashes = hash_written(scratch, wire)
    if wire.rank == 0:
        record = {"format": FORMAT, "files": hashes, **asdict(progress)}
        _write_synced(scratch / RECORD, json.dumps(record, indent=2))
        with writing():
            shutil.rmtree(target, ignore_errors=True)
            scratch.rename(target)
            _sync_folder(folder)
            _remove_old(folder, target, keep)
    wire.barrier()
    return target


def load_latest(folder: Path, engine: Stepper, optimizer: torch.optim.Optimizer) -> Progress | None:
    """Load the newest whole checkpoint into this split; None where there is none."""
    found = find_whole(folder, engine.wire.for_storage())
    return None if found is None else load_checkpoint(found, engine, optimizer)


def load_checkpoint(path: Path, engine: Stepper, optimizer: torch.optim.Optimizer) -> Progress:
    """Load one checkpoint, whatever split it was saved from."""
    record = json.loads((path / RECORD).read_text(encoding="utf-8"))
    return load_state(SafeReader(path), record, engine, optimizer)


def load_state(
    reader: dcp.StorageReader,
    record: Mapping[str, Any],
    engine: Stepper,
    optimizer: torch.optim.Optimizer,
) -> Progress:
    """Fill this split with what a reader has; `record` says how far the job is."""
    if not optimizer.state:
        make_optimizer_state(optimizer)
    wire = engine.wire.for_storage()
    with host_memory():
        dcp.load(
            dict(checkpoint_state(engine.owned, optimizer)),
            storage_reader=reader,
            process_group=wire.group,
            no_dist=wire.is_alone,
        )
    progress = Progress(**{key: record[key] for key in asdict(Progress()) if key in record})
    engine.num_steps = progress.step
    if progress.rng_state:
        torch.set_rng_state(
            torch.tensor(list(bytes.fromhex(progress.rng_state)), dtype=torch.uint8)
        )
    return progress


def find_whole(folder: Path, wire: Wire | None = None) -> Path | None:
    """The newest checkpoint that is what its hashes say; damaged ones are named on the way.

    One of another format on the way is an error: to pass over it would throw its steps away. The
    ranks of `wire` look together, and each reads its share of the bytes.
    """
    wire = wire or Wire()
    for path in from_first(wire, lambda: _checkpoints(folder)[::-1]):
        problems = check_checkpoint(path, wire)
        if not problems:
            return path
        if wire.rank == 0:
            sys.stderr.write(f"{path}: passed over, {'; '.join(problems)}\n")
    return None


def check_checkpoint(path: Path, wire: Wire | None = None) -> list[str]:
    """What is damaged in a checkpoint; empty when nothing is. Another format is an error."""
    wire = wire or Wire()
    hashes, problems = from_first(wire, lambda: _read_hashes(path))
    return problems or damaged_files(path, hashes, wire)


def _read_hashes(path: Path) -> tuple[dict[str, str], list[str]]:
    """The hashes that a checkpoint's record states, or what is wrong with the record."""
    try:
        record = json.loads((path / RECORD).read_text(encoding="utf-8"))
        written = record["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return {}, [f"no readable {RECORD}: {error}"]
    if written != FORMAT:  # before anything else is looked at: the rest may mean something else
        raise OtherFormat(
            f"is a checkpoint of format {written!r}, this version of Drystone reads {FORMAT}",
            where=str(path),
            hint="Go on with the version that wrote it; or move the folder elsewhere to go on from "
            "the checkpoint before it. Nothing was changed",
        )
    try:
        return dict(record["files"]), []
    except (KeyError, ValueError, TypeError) as error:
        return {}, [f"no readable {RECORD}: {error}"]


def checkpoint_state(
    owned: Sequence[Owned], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pieces of parameters and optimizer state, under the names of the whole."""
    for one in owned:
        value = one.value.detach()
        yield f"model.{one.name}", one.slice_of(value)
        for key, entry in optimizer.state.get(one.value, {}).items():
            name = f"optimizer.{one.name}.{key}"
            if not isinstance(entry, torch.Tensor):
                continue
            is_piece = entry.shape == value.shape
            yield name, one.slice_of(entry) if is_piece else entry


def make_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """A step of length 0 that does not count, so that there is something to save or load into."""
    lengths = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for value in group["params"]:
            value.grad = torch.zeros_like(value)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, length in zip(optimizer.param_groups, lengths, strict=True):
        group["lr"] = length
    for state in optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"].zero_()


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _checkpoints(folder: Path) -> list[Path]:
    """All that have a name, oldest first."""
    try:
        found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UnreadableFile(f"cannot be read: {error.strerror}", where=str(folder)) from None
    return sorted(found, key=_step)


def _remove_old(folder: Path, newest: Path, keep: int) -> None:
    """Remove what the newest replaces, but for the last `keep`, itself included.

    Checkpoints of later steps are of a run that did not lead here, and of other formats of another
    version: neither is replaced by this one.
    """
    older = [path for path in _checkpoints(folder) if _step(path) < _step(newest)]
    formats = {path: _format(path) for path in older}
    readable = [path for path in older if formats[path] == FORMAT]
    kept = readable[max(len(readable) + 1 - max(keep, 1), 0) :]
    for path in older:
        if path not in kept and formats[path] in (FORMAT, None):
            shutil.rmtree(path, ignore_errors=True)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _format(path: Path) -> object:
    """What a checkpoint says of its format; None where it says nothing that can be read."""
    try:
        return json.loads((path / RECORD).read_text(encoding="utf-8"))["format"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
