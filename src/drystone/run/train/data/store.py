"""Tokenised documents, made once and kept: memory-mapped, named by what they were made of.

A store is a folder of `tokens.u32`, `marks.u8` (1: not predicted), `ends.i64` (of the documents)
and `store.json`, written last. It is made under another name and then renamed, by one process of a
machine at a time: a lock is held, which the death of its holder gives back.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from drystone.run.train.data.encode import Beginning, Document

FORMAT: Final = 1
_RECORD: Final = "store.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFacts:
    """What is known of a store without reading it."""

    num_tokens: int
    num_documents: int
    num_skipped: int = 0  # records without anything to predict
    num_rewritten: int = 0  # answers of chats that cannot be predicted: see `encode.py`
    largest_token: int = 0
    tokenizer_size: int = 0  # tokens that it knows; 0: none was used
    is_text: bool = True  # documents may be cut into pieces


Yielded = Document | Beginning | StoreFacts


@dataclass(frozen=True, slots=True)
class Store:
    """Memory-mapped documents."""

    tokens: np.ndarray
    marks: np.ndarray
    ends: np.ndarray
    facts: StoreFacts


def cache_folder() -> Path:
    """`$DRYSTONE_CACHE`, `$XDG_CACHE_HOME/drystone`, or `~/.cache/drystone`."""
    own, home = os.environ.get("DRYSTONE_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own)
    return (Path(home) if home else Path.home() / ".cache") / "drystone"


def file_digest(file: Path) -> str:
    """The SHA-256 of a file; remembered for as long as size and time of change stay the same."""
    status = file.stat()
    named = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:32]
    note = cache_folder() / "digests" / f"{named}.json"
    stamp = [status.st_size, status.st_mtime_ns]
    try:
        known = json.loads(note.read_text(encoding="utf-8"))
        if known["stamp"] == stamp:
            return str(known["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    _write_whole(note, {"stamp": stamp, "sha256": digest})
    return digest


def open_store(key: Iterable[Any], make: Callable[[], Iterator[Yielded]]) -> Store:
    """The store of this key; made, where it is not there, of the documents that `make` yields."""
    named = hashlib.sha256(json.dumps([FORMAT, *key]).encode()).hexdigest()[:40]
    folder = cache_folder() / "tokens" / named
    folder.parent.mkdir(parents=True, exist_ok=True)
    found = _open(folder)
    if found is not None:
        return found
    with _locked(folder.with_suffix(".lock")):
        found = _open(folder)
        if found is None:
            for leftover in folder.parent.glob(f"{named}.*.part"):
                shutil.rmtree(leftover, ignore_errors=True)
            scratch = folder.with_name(f"{named}.{os.getpid()}.part")
            try:
                _write(scratch, make())
                shutil.rmtree(folder, ignore_errors=True)
                scratch.rename(folder)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
            found = _open(folder)
    assert found is not None
    return found


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _write(folder: Path, documents: Iterator[Yielded]) -> None:
    """The last thing that comes are facts about the rest; what can be counted is counted here."""
    folder.mkdir(parents=True)
    ends, largest, facts, num_skipped, num_begun = [0], 0, None, 0, 0
    with (folder / "tokens.u32").open("wb") as tokens, (folder / "marks.u8").open("wb") as marks:
        for document in documents:
            if isinstance(document, StoreFacts):
                facts = document
                continue
            ids, marked = document if len(document) == 2 else (document[0], bytes(len(document[0])))
            goes_on = len(document) == 1
            if not (goes_on or num_begun) and (len(ids) < 2 or all(marked[1:])):
                num_skipped += 1
                continue
            words = np.array(ids, dtype=np.uint32)
            largest = max(largest, int(words.max(initial=0)))
            tokens.write(words.tobytes())
            marks.write(marked)
            num_begun += len(ids)
            if not goes_on:
                ends.append(ends[-1] + num_begun)
                num_begun = 0
        for file in (tokens, marks):
            file.flush()
            os.fsync(file.fileno())
    np.array(ends, dtype=np.int64).tofile(folder / "ends.i64")
    counted = {
        "num_tokens": ends[-1],
        "num_documents": len(ends) - 1,
        "num_skipped": num_skipped,
        "largest_token": largest,
    }
    assert facts is not None
    _write_whole(folder / _RECORD, asdict(facts) | counted)


def _open(folder: Path) -> Store | None:
    """None where there is none, or where a file has not the size that it should have."""
    try:
        facts = StoreFacts(**json.loads((folder / _RECORD).read_text(encoding="utf-8")))
        ends = np.fromfile(folder / "ends.i64", dtype=np.int64)
        if len(ends) != facts.num_documents + 1 or ends[-1] != facts.num_tokens:
            return None
        tokens = _mapped(folder / "tokens.u32", np.uint32, facts.num_tokens)
        marks = _mapped(folder / "marks.u8", np.uint8, facts.num_tokens)
    except (OSError, ValueError, TypeError):
        return None
    return Store(tokens, marks, ends, facts)


def _mapped(path: Path, dtype: Any, length: int) -> np.ndarray:
    if path.stat().st_size != length * np.dtype(dtype).itemsize:
        raise ValueError(f"{path} has another size")
    return np.memmap(path, dtype=dtype, mode="r") if length else np.zeros(0, dtype=dtype)


def _write_whole(path: Path, table: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    scratch.write_text(json.dumps(table), encoding="utf-8")
    scratch.rename(path)
