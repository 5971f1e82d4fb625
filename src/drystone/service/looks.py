"""Looks at submitted jobs that take a process each: few at a time, and nobody has every place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from fastapi.concurrency import run_in_threadpool

from drystone.describe.job import TrainingJob
from drystone.run.control.options import OptionBook
from drystone.service.answers import TooMany

MAX_AT_ONCE: Final = 4  # of all callers: each takes a thread, a process and its memory
MAX_AT_ONCE_OF_CALLER: Final = 2
MAX_OF_CALLER: Final = 32  # with those that wait


@dataclass(slots=True)
class _Line:
    """The jobs of one caller."""

    num_jobs: int = 0
    places: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(MAX_AT_ONCE_OF_CALLER)
    )


class LookPool:
    """Whoever waits for a place takes no thread, so everything else is answered meanwhile."""

    def __init__(self, book: Callable[[], OptionBook]) -> None:
        self._book = book
        self._places = asyncio.Semaphore(MAX_AT_ONCE)
        self._lines: dict[str, _Line] = {}  # of callers with jobs here

    async def look(self, job: TrainingJob, caller: str) -> TrainingJob:
        """The job with what a look tells; `TooMany` where enough of the caller's wait already."""
        book = self._book()
        if not await run_in_threadpool(book.needs_process, job):
            return await run_in_threadpool(book.looked_at, job)
        line = self._lines.setdefault(caller, _Line())
        if line.num_jobs >= MAX_OF_CALLER:
            text = f"{line.num_jobs} of your jobs are being looked at, or wait for it"
            raise TooMany(text, retry_seconds=10.0)
        line.num_jobs += 1
        try:
            async with line.places, self._places:
                return await run_in_threadpool(book.looked_at, job)
        finally:
            line.num_jobs -= 1
            if not line.num_jobs:
                del self._lines[caller]
