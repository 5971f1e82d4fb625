"""Errors of single jobs: such a job is put aside, counted, shown, and tried again later."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from drystone.errors import DrystoneError
from drystone.run.control.store import LeaseLost, StoreBusy
from drystone.run.job_output import clean_text

_FIRST_WAIT_SECONDS: Final = 1.0
_MAX_WAIT_SECONDS: Final = 60.0
_MAX_TEXT_CHARS: Final = 500
_LOG: Final = logging.getLogger("drystone.controller")


@dataclass(slots=True)
class Trouble:
    """Why a job was put aside."""

    text: str
    num_times: int  # in a row
    retry_at: float  # by the monotonic clock


class Troubles:
    """Jobs that were put aside; `also` are others to be shown and counted with them."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, also: Troubles | None = None
    ) -> None:
        self._clock, self._also = clock, also
        self._by_job: dict[str, Trouble] = {}
        self._tried: set[str] = set()  # in this round
        self._failed: set[str] = set()  # of those
        self._num_in_all = 0

    @property
    def by_job(self) -> Mapping[str, Trouble]:
        """Those that are put aside now."""
        return self._by_job if self._also is None else {**self._also.by_job, **self._by_job}

    @property
    def num_in_all(self) -> int:
        """How often a job was put aside since the controller started."""
        return self._num_in_all + (self._also.num_in_all if self._also is not None else 0)

    @property
    def is_any_due(self) -> bool:
        """Whether some job is to be tried again now."""
        return any(self._clock() >= trouble.retry_at for trouble in self._by_job.values())

    def is_waiting(self, job_id: str) -> bool:
        """Whether a job is not to be looked at yet."""
        trouble = self._by_job.get(job_id)
        return job_id in self._failed or (trouble is not None and self._clock() < trouble.retry_at)

    @contextmanager
    def guard(self, job_id: str) -> Iterator[None]:
        """What goes wrong inside is the trouble of this job, and of nobody else.

        A lease that is lost and a database that is away concern all jobs: they are passed on.
        """
        self._tried.add(job_id)
        try:
            yield
        except (LeaseLost, StoreBusy):
            raise
        except Exception as error:
            self.put_aside(job_id, error)

    def end_round(self, job_ids: Container[str]) -> None:
        """Those that went well have no trouble any more, nor those that are over."""
        for job_id in list(self._by_job):
            if job_id in self._tried - self._failed or job_id not in job_ids:
                del self._by_job[job_id]
        self._tried.clear()
        self._failed.clear()

    def solve(self, job_id: str) -> None:
        """A job has no trouble any more."""
        self._by_job.pop(job_id, None)

    def put_aside(self, job_id: str, error: Exception) -> None:
        """Count, show and log what went wrong with a job; it is tried again after a while."""
        is_known = isinstance(error, DrystoneError)
        told = str(error) if is_known else f"{type(error).__name__}: {error}"
        text = clean_text(told, _MAX_TEXT_CHARS)
        known = self._by_job.get(job_id)
        number = known.num_times + 1 if known is not None else 1
        wait = min(_FIRST_WAIT_SECONDS * 2.0 ** min(number - 1, 16), _MAX_WAIT_SECONDS)
        if known is None or known.text != text:
            _LOG.warning("job %s is put aside: %s", job_id, text, exc_info=not is_known)
        self._by_job[job_id] = Trouble(text, number, self._clock() + wait)
        self._failed.add(job_id)
        self._num_in_all += 1
