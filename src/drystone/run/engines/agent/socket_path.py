"""A Unix socket's address holds 107 bytes; a path may be longer. This goes around that."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """The same file by a short name, as long as we are inside."""
    if len(os.fsencode(path)) <= 100:
        yield str(path)
        return
    handle = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{handle}/{path.name}"
    finally:
        os.close(handle)
