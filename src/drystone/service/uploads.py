"""Files that come with a job from another machine: each bundle in a folder that it cannot leave."""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from drystone.errors import InvalidSpec
from drystone.service.answers import NotFound, TooLarge
from drystone.service.auth.callers import Caller
from drystone.service.auth.guard import RequestLimits

_PART: Final = re.compile(r"[A-Za-z0-9_+=,@][A-Za-z0-9._+=,@-]{0,99}")
_BUNDLE: Final = re.compile(r"[0-9a-f]{32}")
_MAX_PARTS: Final = 8


class Uploads:
    """A folder of bundles, by who sent them."""

    def __init__(self, folder: Path, limits: RequestLimits) -> None:
        self._folder, self._limits = folder, limits
        self._lock = threading.Lock()

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
        digest, size = hashlib.sha256(), 0
        scratch = target.with_name(f".{target.name[:60]}.{os.urandom(6).hex()}.part")
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with os.fdopen(os.open(scratch, flags, 0o600), "wb") as file:
                async for chunk in chunks:
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

    def _check_room(self, root: Path) -> None:
        sizes = [file.lstat().st_size for file in root.rglob("*") if file.is_file()]
        limits = self._limits
        if sum(sizes) > limits.max_bundle_bytes or len(sizes) > limits.max_bundle_files:
            raise TooLarge(
                f"a bundle holds at most {limits.max_bundle_files} files and "
                f"{limits.max_bundle_bytes} bytes",
                hint="Put data where the nodes can read it, and name it by its path there",
            )
