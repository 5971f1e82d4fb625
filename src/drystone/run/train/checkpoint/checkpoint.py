"""Save a job from any split, load it into any other; what is half-written is never taken for whole.

A checkpoint is a folder `step-00000012`. It is written under another name, every file is hashed,
the hashes and the position of the job go into `checkpoint.json`, and only then the folder gets its
name. Loading takes the newest folder whose files are what their hashes say. All ranks must see the
same file system.

A checkpoint of another format is not a damaged one: loading refuses rather than pass over work that
another version of Drystone can read. Only checkpoints older than the one just written are removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from drystone.errors import DrystoneError, UnreadableFile
from drystone.run.fence import own_epoch, writing
from drystone.run.train.collectives import Wire
from drystone.run.train.emulate import host_memory
from drystone.run.train.stepping import Stepper
from drystone.run.train.uneven.shard import Owned

_NAMES: Final = frozenset(
    {
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
        ("torch", "Size"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
        ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
        ("torch.distributed.checkpoint.metadata", "StorageMeta"),
        ("torch.distributed.checkpoint.metadata", "TensorProperties"),
        ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
        ("torch.serialization", "_get_layout"),
    }
)


class _TableOfContents(pickle.Unpickler):
    """Knows the names above and the types of numbers, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """What a name stands for."""
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):  # so Python 3.11.0 to 3.11.3 write enums
            return _member
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f"names {module[:60]}.{name[:60]}")
        return super().find_class(module, name)


def _member(kind: Any, name: str) -> Enum:
    """A member of an enumeration, and nothing else of anything."""
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise pickle.UnpicklingError(f"asks for {str(name)[:60]} of what is no enumeration")
    return kind[name]


class SafeReader(dcp.FileSystemReader):
    """torch's reader of a folder, with a table of contents that cannot run anything."""

    def read_metadata(self, *_: Any, **given: Any) -> Metadata:
        """The table of contents."""
        path = Path(self._get_metadata_path(given.get("rank")))
        try:
            with path.open("rb") as file:
                metadata = _TableOfContents(file).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError) as error:
            raise UnreadableFile(
                f"is no table of contents of a checkpoint: {error}",
                where=str(path),
                hint="Load only checkpoints that you or your jobs have written",
            ) from None
        if not isinstance(metadata, Metadata):
            raise UnreadableFile("is no table of contents of a checkpoint", where=str(path))
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


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
    return write_checkpoint(folder, state, progress, wire=engine.wire, keep=keep)


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
    hashes = _gather_hashes(wire, scratch)
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
    wire = engine.wire
    choice: list[Path | DrystoneError | None] = [None]
    if wire.rank == 0:
        try:
            choice = [find_whole(folder)]
        except DrystoneError as error:  # the other ranks wait to hear of it
            choice = [error]
    if not wire.is_alone:
        dist.broadcast_object_list(choice, group_src=0, group=wire.group)
    found = choice[0]
    if isinstance(found, DrystoneError):
        raise found
    return None if found is None else load_checkpoint(found, engine, optimizer)


def load_checkpoint(path: Path, engine: Stepper, optimizer: torch.optim.Optimizer) -> Progress:
    """Load one checkpoint, whatever split it was saved from."""
    make_optimizer_state(optimizer)
    wire = engine.wire
    with host_memory():
        dcp.load(
            dict(checkpoint_state(engine.owned, optimizer)),
            storage_reader=SafeReader(path),
            process_group=wire.group,
            no_dist=wire.is_alone,
        )
    record = json.loads((path / RECORD).read_text(encoding="utf-8"))
    progress = Progress(**{key: record[key] for key in asdict(Progress()) if key in record})
    engine.num_steps = progress.step
    if progress.rng_state:
        torch.set_rng_state(
            torch.tensor(list(bytes.fromhex(progress.rng_state)), dtype=torch.uint8)
        )
    return progress


def find_whole(folder: Path) -> Path | None:
    """The newest checkpoint that is what its hashes say; damaged ones are named on the way.

    One of another format on the way is an error: to pass over it would throw its steps away.
    """
    for path in reversed(_checkpoints(folder)):
        problems = check_checkpoint(path)
        if not problems:
            return path
        sys.stderr.write(f"{path}: passed over, {'; '.join(problems)}\n")
    return None


def check_checkpoint(path: Path) -> list[str]:
    """What is damaged in a checkpoint; empty when nothing is. Another format is an error."""
    try:
        record = json.loads((path / RECORD).read_text(encoding="utf-8"))
        written = record["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"no readable {RECORD}: {error}"]
    if written != FORMAT:  # before anything else is looked at: the rest may mean something else
        raise OtherFormat(
            f"is a checkpoint of format {written!r}, this version of Drystone reads {FORMAT}",
            where=str(path),
            hint="Go on with the version that wrote it; or move the folder elsewhere to go on from "
            "the checkpoint before it. Nothing was changed",
        )
    try:
        files = dict(record["files"])
    except (KeyError, ValueError, TypeError) as error:
        return [f"no readable {RECORD}: {error}"]
    problems = []
    for name, expected in files.items():
        try:
            if _hash(path / name) != expected:
                problems.append(f"{name} is damaged")
        except OSError as error:
            problems.append(f"{name} cannot be read: {error.strerror}")
    return problems


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


def _gather_hashes(wire: Wire, scratch: Path) -> dict[str, str]:
    """Every rank hashes the files that it wrote; the first also what belongs to none."""
    wire.barrier()
    mine = {
        path.name: _hash(path, sync=True)
        for path in sorted(scratch.iterdir())
        if _writer(path.name) == wire.rank
    }
    gathered: list[Any] = [mine]
    if not wire.is_alone:
        gathered = [None] * wire.num_ranks
        dist.all_gather_object(gathered, mine, group=wire.group)
    return {name: value for one in gathered for name, value in one.items()}


def _writer(name: str) -> int:
    """The rank that wrote a file: torch names them `__<rank>_<number>.distcp`."""
    match = re.fullmatch(r"__(\d+)_\d+\.distcp", name)
    return int(match.group(1)) if match else 0


def _hash(path: Path, *, sync: bool = False) -> str:
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


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
