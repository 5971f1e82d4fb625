"""Files that come with a job from another machine: each bundle in a folder that it cannot leave."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

from drystone.errors import InvalidSpec
from drystone.service.answers import NotFound, TooLarge
from drystone.service.auth.callers import Caller
from drystone.service.auth.guard import RequestLimits

_PART: Final = re.compile(r"[A-Za-z0-9_+=,@][A-Za-z0-9._+=,@-]{0,99}")
_BUNDLE: Final = re.compile(r"[0-9a-f]{32}")
_MAX_PARTS: Final = 8
_KEPT_SECONDS: Final = 86_400.0


class Uploads:
    """A folder of bundles, by who sent them."""

    def __init__(
        self,
        folder: Path,
        limits: RequestLimits,
        used: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        """`used` says which folders jobs that have not ended need."""
        self._folder, self._limits, self._used = folder, limits, used
        self._lock = threading.Lock()
        self._num_bytes: dict[Path, int] = {}  # by who sent them; what is replaced counts twice

    def empty_folder(self) -> Path:
        """Where a job starts that came without files."""
        path = self._folder / "empty"
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        return path

    def folder_of(self, caller: Caller, bundle: str) -> Path:
        """Of a bundle that this caller, or the team, has sent."""
        path = self._place(caller, bundle)
        if not path.is_dir():
            raise NotFound(f"there is no bundle {bundle!r} of yours", hint="POST /v1/files first")
        return path

    async def keep(
        self, caller: Caller, bundle: str, name: str, chunks: AsyncIterator[bytes]
    ) -> tuple[int, str]:
        """Write a file as it comes; its size and its hash. The same name is written anew."""
        target = self._target(caller, bundle, name)
        place = self._place(caller, bundle).parent
        digest, size = hashlib.sha256(), 0
        scratch = target.with_name(f".{target.name[:60]}.{os.urandom(6).hex()}.part")
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with os.fdopen(os.open(scratch, flags, 0o600), "wb") as file:
                async for chunk in chunks:
                    self._take_room(place, len(chunk))
                    size += len(chunk)
                    digest.update(chunk)
                    file.write(chunk)
            self._check_room(self._place(caller, bundle))
            scratch.replace(target)
        except OSError as error:
            raise InvalidSpec(f"cannot be kept: {error.strerror}", where=name) from None
        finally:
            scratch.unlink(missing_ok=True)
        return size, digest.hexdigest()

    def _place(self, caller: Caller, bundle: str) -> Path:
        if not _BUNDLE.fullmatch(bundle):
            raise InvalidSpec("a bundle is 32 hexadecimal digits", where="bundle")
        # Names of teams may differ in case alone, which some file systems do not see.
        whose = hashlib.sha256(f"team {caller.team}".encode()).hexdigest()[:16]
        return self._folder / (whose if caller.token_id else "owner") / bundle

    def _target(self, caller: Caller, bundle: str, name: str) -> Path:
        parts = name.split("/")
        if len(parts) > _MAX_PARTS or not all(_PART.fullmatch(part) for part in parts):
            raise InvalidSpec(
                "a name is a relative path of letters, digits and . _ - + = , @ without leading "
                f"dots, at most {_MAX_PARTS} parts",
                where="name",
            )
        root = self._place(caller, bundle)
        target = root.joinpath(*parts)
        with self._lock:
            for folder in (root, *reversed(target.relative_to(root).parents[:-1])):
                path = folder if folder.is_absolute() else root / folder
                try:
                    path.mkdir(parents=path == root, exist_ok=True, mode=0o700)
                except OSError as error:
                    raise InvalidSpec(f"cannot be kept: {error.strerror}", where=name) from None
        # What runs in the folder may have put links there.
        if not target.parent.resolve().is_relative_to(root.resolve()) or target.is_dir():
            raise InvalidSpec("leads elsewhere", where="name")
        return target

    def _take_room(self, place: Path, num_bytes: int) -> None:
        """Count what is about to be written; refuse it where a caller, or all, have too much.

        What is on the disk is counted when a limit is met, without bundles that no job needs.
        """
        limits = self._limits
        with self._lock:
            if place not in self._num_bytes or self._is_over(place, num_bytes):
                self._drop_unused()
                folders = [path for path in self._folder.iterdir() if path.is_dir()]
                self._num_bytes = {path: _size_of(path) for path in (*folders, place)}
                if self._is_over(place, num_bytes):
                    raise TooLarge(
                        f"uploads may take {limits.max_uploads_of_caller_bytes} bytes a team, "
                        f"{limits.max_uploads_bytes} bytes in all, and leave "
                        f"{limits.min_free_bytes} bytes of the disk free",
                        hint="Put data where the nodes can read it, and name it by its path there",
                    )
            self._num_bytes[place] += num_bytes

    def _drop_unused(self) -> None:
        """Bundles of jobs that are over, and those that became no job within a day."""
        used, now = self._used(), time.time()
        for bundle in self._folder.glob("*/*"):
            is_old = now - bundle.stat().st_mtime > _KEPT_SECONDS
            if is_old and _BUNDLE.fullmatch(bundle.name) and str(bundle) not in used:
                shutil.rmtree(bundle, ignore_errors=True)

    def _is_over(self, place: Path, num_bytes: int) -> bool:
        limits, sizes = self._limits, self._num_bytes
        return (
            sizes[place] + num_bytes > limits.max_uploads_of_caller_bytes
            or sum(sizes.values()) + num_bytes > limits.max_uploads_bytes
            or shutil.disk_usage(self._folder).free - num_bytes < limits.min_free_bytes
        )

    def _check_room(self, root: Path) -> None:
        num_files = sum(1 for file in root.rglob("*") if file.is_file())
        limits = self._limits
        if _size_of(root) > limits.max_bundle_bytes or num_files > limits.max_bundle_files:
            raise TooLarge(
                f"a bundle holds at most {limits.max_bundle_files} files and "
                f"{limits.max_bundle_bytes} bytes",
                hint="Put data where the nodes can read it, and name it by its path there",
            )


def _size_of(folder: Path) -> int:
    return sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file())
