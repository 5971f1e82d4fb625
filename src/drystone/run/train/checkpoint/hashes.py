"""Hashes of the files of a checkpoint, made and checked by all ranks together.

Reading back a checkpoint of a large model takes minutes. The ranks share the bytes evenly, and
while they read they meet every two seconds at most, so none waits in a collective for long.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist

from drystone.errors import DrystoneError
from drystone.run.train.collectives import Wire

Result = TypeVar("Result")
_FIRST_WAIT_SECONDS: Final = 0.01
_MAX_WAIT_SECONDS: Final = 2.0


def hash_written(folder: Path, wire: Wire) -> dict[str, str]:
    """Every rank hashes the files that it wrote; the first also what belongs to none."""
    wire.barrier()
    names = [path.name for path in sorted(folder.iterdir()) if _writer(path.name) == wire.rank]
    mine = work_together(wire, lambda: {name: _hash(folder / name, sync=True) for name in names})
    return {name: value for part in gather_objects(wire, mine) for name, value in part.items()}


def damaged_files(folder: Path, hashes: Mapping[str, str], wire: Wire) -> list[str]:
    """What is wrong with the files of a folder, a line each; every rank reads its share of them."""
    sizes = from_first(wire, lambda: {name: _size(folder / name) for name in hashes})
    mine = split_evenly(sizes, wire.num_ranks)[wire.rank]

    def read() -> list[str]:
        found = [_problem(folder / name, hashes[name]) for name in mine]
        return [problem for problem in found if problem]

    problems = gather_objects(wire, work_together(wire, read))
    return sorted(problem for part in problems for problem in part)


def split_evenly(sizes: Mapping[str, int], num_parts: int) -> list[list[str]]:
    """Names in parts of about equal size: the largest first, each to the smallest part."""
    parts: list[list[str]] = [[] for _ in range(num_parts)]
    filled = [0] * num_parts
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        part = filled.index(min(filled))
        parts[part].append(name)
        filled[part] += max(sizes[name], 1)
    return parts


def work_together(wire: Wire, work: Callable[[], Result]) -> Result:
    """Do the work, and return when every rank has; nobody waits in one collective for long."""
    if wire.is_alone:
        return work()
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # raised below, by the thread that others can see
            errors.append(error)

    thread = threading.Thread(target=run, name="files", daemon=True)
    thread.start()
    wait_seconds = _FIRST_WAIT_SECONDS
    while True:
        thread.join(wait_seconds)
        is_done = torch.tensor([0 if thread.is_alive() else 1])
        dist.all_reduce(is_done, op=dist.ReduceOp.MIN, group=wire.group)
        if errors:
            raise errors[0]
        if is_done.item():
            return results[0]
        wait_seconds = min(2 * wait_seconds, _MAX_WAIT_SECONDS)


def from_first(wire: Wire, ask: Callable[[], Result]) -> Result:
    """What the first rank finds, on all ranks; an error of ours is raised on all of them."""
    if wire.is_alone:
        return ask()
    answer: list[Any] = [None]
    if wire.rank == 0:
        try:
            answer = [ask()]
        except DrystoneError as error:  # the other ranks wait to hear of it
            answer = [error]
    dist.broadcast_object_list(answer, group_src=0, group=wire.group)
    if isinstance(answer[0], DrystoneError):
        raise answer[0]
    found: Result = answer[0]
    return found


def gather_objects(wire: Wire, mine: Result) -> Sequence[Result]:
    """What each rank has."""
    if wire.is_alone:
        return [mine]
    gathered: list[Any] = [None] * wire.num_ranks
    dist.all_gather_object(gathered, mine, group=wire.group)
    return gathered


def _writer(name: str) -> int:
    """The rank that wrote a file: torch names them `__<rank>_<number>.distcp`."""
    match = re.fullmatch(r"__(\d+)_\d+\.distcp", name)
    return int(match.group(1)) if match else 0


def _problem(path: Path, expected: str) -> str:
    try:
        return "" if _hash(path) == expected else f"{path.name} is damaged"
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # whoever gets it says what is wrong


def _hash(path: Path, *, sync: bool = False) -> str:
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()
