"""Records of text files, JSON lines, Parquet, and folders of them: found, and read one at a time.

Nothing is read further than it is asked for, so files may be larger than memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from drystone.errors import InvalidSpec, MissingExtra, UnreadableFile, reason_of

_BATCH_ROWS: Final = 1024
_LINES_BYTES: Final = 1 << 20  # of a text, read at a time


class Container(StrEnum):
    """How files hold their records, by how their names end."""

    TOKENS = "tokens"
    TEXT = "text"
    JSON_LINES = "JSON lines"
    PARQUET = "Parquet"
    ARROW = "Arrow"


CONTAINERS: Final = {
    ".bin": Container.TOKENS,
    ".u16": Container.TOKENS,
    ".u32": Container.TOKENS,
    ".txt": Container.TEXT,
    ".jsonl": Container.JSON_LINES,
    ".ndjson": Container.JSON_LINES,
    ".parquet": Container.PARQUET,
    ".arrow": Container.ARROW,
}


def find_files(path: Path) -> tuple[Container, list[Path]]:
    """The files that a path means, in the order of their names, and how they hold records.

    A folder that `datasets` saved says itself which files are its data; of one with several
    splits `train` is meant.
    """
    if not path.exists():
        raise UnreadableFile("is not there", where=str(path))
    if path.is_dir():
        if (path / "dataset_dict.json").is_file():
            path = path / "train"
        files = _saved_files(path) or sorted(
            file for file in path.rglob("*") if file.suffix in CONTAINERS and file.is_file()
        )
    else:
        files = [path]
    kinds = {CONTAINERS.get(file.suffix) for file in files}
    if not files or None in kinds:
        raise InvalidSpec(
            "holds no data of a known kind", where=str(path), hint=f"Known: {', '.join(CONTAINERS)}"
        )
    if len({file.suffix for file in files}) > 1:
        endings = ", ".join(sorted({file.suffix for file in files}))
        raise InvalidSpec(
            f"holds files of several kinds: {endings}", where=str(path), hint="Keep one kind"
        )
    if all(file.stat().st_size == 0 for file in files):
        raise UnreadableFile("is empty", where=str(path))
    return CONTAINERS[files[0].suffix], files


def _saved_files(folder: Path) -> list[Path]:
    """What `Dataset.save_to_disk` wrote, in its order."""
    state = folder / "state.json"
    if not state.is_file():
        return []
    try:
        names = [one["filename"] for one in json.loads(state.read_text())["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnreadableFile(
            f"is not the state of a data set: {error!r}", where=str(state)
        ) from None
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise UnreadableFile(f"{missing[0]} is missing", where=str(folder))
    return [folder / name for name in names]


def read_records(container: Container, file: Path) -> Iterator[dict[str, Any]]:
    """The records of one file."""
    if container is Container.JSON_LINES:
        return _json_records(file)
    return _table_records(container, file)


def read_text(file: Path) -> Iterator[list[str]]:
    """The lines of a text, some at a time."""
    try:
        with file.open(encoding="utf-8") as text:
            while lines := text.readlines(_LINES_BYTES):
                yield lines
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableFile(f"cannot be read: {reason_of(error)}", where=str(file)) from None


def _json_records(file: Path) -> Iterator[dict[str, Any]]:
    number = 0
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _json_record(line, f"{file}: line {number}")
    except (OSError, UnicodeDecodeError) as error:
        where = f"{file}: line {number + 1}"
        raise UnreadableFile(f"cannot be read: {reason_of(error)}", where=where) from None


def _json_record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UnreadableFile(f"is no JSON: {error}", where=where) from None
    if not isinstance(record, dict):
        raise InvalidSpec("is no JSON object", where=where, hint='Write {"text": "..."}')
    return record


def _table_records(container: Container, file: Path) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow as arrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise MissingExtra(f"{container.value} files need pyarrow", "data") from None
    try:
        if container is Container.PARQUET:
            with arrow.parquet.ParquetFile(file) as table:
                for batch in table.iter_batches(batch_size=_BATCH_ROWS):
                    yield from batch.to_pylist()
            return
        with arrow.memory_map(str(file)) as mapped:
            for batch in _arrow_batches(arrow, mapped):
                for start in range(0, batch.num_rows, _BATCH_ROWS):
                    yield from batch.slice(start, _BATCH_ROWS).to_pylist()
    except (arrow.ArrowException, OSError) as error:
        reason = str(error).split("\n", 1)[0]
        raise UnreadableFile(f"is damaged: {reason}", where=str(file)) from None


def _arrow_batches(arrow: Any, mapped: Any) -> Iterator[Any]:
    """`datasets` writes streams; others write files, which have a table of contents."""
    try:
        reader = arrow.ipc.open_stream(mapped)
    except arrow.ArrowInvalid:
        mapped.seek(0)
        reader = arrow.ipc.open_file(mapped)
        yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
        return
    yield from reader
