"""What one round writes to the log: reports of progress are collected, and written together."""

from __future__ import annotations

from collections.abc import Iterable

from drystone.run.control.journal import Journal
from drystone.run.control.notes import job_of
from drystone.run.control.store import LeaseLost, StoreBusy
from drystone.run.control.troubles import Troubles
from drystone.run.events import Event


class RoundWriter:
    """Writes to the log in one round: reports of progress are collected, and written together."""

    def __init__(self, journal: Journal, troubles: Troubles) -> None:
        self._journal, self._troubles = journal, troubles
        self._later: list[Event] = []

    def begin_round(self) -> None:
        """Drop what a round that failed has left: agents report it again."""
        self._later = []

    def write_later(self, events: Iterable[Event]) -> None:
        """Write these with the next commit, before its events."""
        self._later += events

    def commit(self, *events: Event) -> None:
        """Write these, after all that was put off."""
        later, self._later = self._later, []
        try:
            self._journal.commit([*later, *events])
        except (LeaseLost, StoreBusy):
            raise
        except Exception:
            if not later:
                raise
            # What one job reported may be what cannot be written: each by itself, then.
            for job_id in dict.fromkeys(job_of(event) for event in later):
                with self._troubles.guard(job_id):
                    self._journal.commit([event for event in later if job_of(event) == job_id])
            self._journal.commit(events)
