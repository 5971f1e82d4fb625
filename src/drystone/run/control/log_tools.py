"""Maintenance of the log while no controller runs: check, repair, compact, back up, restore.

`check` folds the log and names every event that cannot be read, or cannot follow what came before.
`repair` moves those into a file, so that a controller can start again. `compact` leaves out what no
fold needs, and writes nothing unless the fold stays the same. A backup is one compressed file of
JSON lines, the same for SQLite and PostgreSQL; it is restored into a database without a log.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa

from drystone.describe.files.cluster import ClusterSpec
from drystone.errors import DrystoneError, InvalidSpec, UnreadableFile
from drystone.run.control.live_state import LiveState
from drystone.run.control.notes import Decided, Described, Remembered, job_of, parse
from drystone.run.control.store import JobRow, Lease, Store
from drystone.run.events import Event, Progressed
from drystone.run.job_output import clean_text
from drystone.run.job_rows import job_rows
from drystone.run.lifecycle import TERMINAL
from drystone.run.store_tables import EVENTS, JOBS, KEYS

_LEASE_SECONDS: Final = 600.0
_WAIT_SECONDS: Final = 30.0  # for a controller that was killed, and still seems to hold it
_FORMAT: Final = 1
_COLUMNS: Final = ("sequence", "time_seconds", "kind", "job_id", "actor", "body")
_BATCH: Final = 2000
_MAX_BROKEN_SHOWN: Final = 500  # characters of a line


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the log as the database has it."""

    sequence: int
    time_seconds: float
    kind: str
    job_id: str
    actor: str
    body: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BadLine:
    """An event that cannot be read or cannot follow, and why."""

    line: Line
    reason: str


@dataclass(slots=True, kw_only=True)
class Folded:
    """What a log comes to."""

    live: LiveState
    num_events: int
    bad: list[BadLine]
    rows: dict[str, JobRow]


class LogTools(Store):
    """A log that nobody else writes to meanwhile."""

    def check(self) -> Folded:
        """Fold the whole log; what is bad is named and passed over."""
        folded = Folded(live=LiveState(ClusterSpec(nodes=())), num_events=0, bad=[], rows={})
        for line in self.lines():
            folded.num_events += 1
            reason = _fold_line(folded, line)
            if reason:
                folded.bad.append(BadLine(line=line, reason=reason))
        return folded

    def repair(self, aside: Path) -> Folded:
        """Move every bad event to the end of a file, and derive the table of jobs anew."""
        with self._held() as lease:
            folded = self.check()
            if folded.bad:
                _append_aside(aside, folded.bad)
            with self._write() as connection:
                self._check_lease(connection, lease)
                _delete(connection, [bad.line.sequence for bad in folded.bad])
                _replace_rows(connection, folded.rows.values())
        return folded

    def compact(self) -> tuple[int, int]:
        """Leave out progress and decisions that no fold needs; events before and after."""
        with self._held() as lease:
            before = self.check()
            if before.bad:
                raise DrystoneError(
                    f"event {before.bad[0].line.sequence} of the log is bad: "
                    f"{before.bad[0].reason}",
                    hint="drystone log repair first",
                )
            dropped = self._superfluous(before.live)
            after = Folded(live=LiveState(ClusterSpec(nodes=())), num_events=0, bad=[], rows={})
            for line in self.lines():
                if line.sequence not in dropped:
                    after.num_events += 1
                    reason = _fold_line(after, line)
                    if reason:
                        raise DrystoneError(f"event {line.sequence} is needed: {reason}")
            if _essence(before.live) != _essence(after.live):
                raise DrystoneError("the shorter log would say something else: nothing was changed")
            with self._write() as connection:
                self._check_lease(connection, lease)
                _delete(connection, sorted(dropped))
        if self._is_sqlite:
            with self._engine.connect() as connection:
                connection.execution_options(isolation_level="AUTOCOMMIT").exec_driver_sql("VACUUM")
        return before.num_events, after.num_events

    def backup(self, path: Path) -> int:
        """Write everything to a new file, whole or not at all; also while a controller runs."""
        scratch = path.with_name(f".{path.name}.part")
        digest, number = hashlib.sha256(), 0
        handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)  # it holds secrets
        with os.fdopen(handle, "wb") as raw, gzip.open(raw, "wt", encoding="utf-8") as file:
            file.write(json.dumps({"drystone_log": _FORMAT}) + "\n")
            for line in self.lines():
                text = json.dumps([getattr(line, name) for name in _COLUMNS])
                digest.update(text.encode())
                file.write(text + "\n")
                number += 1
            file.write(json.dumps({"num_events": number, "sha256": digest.hexdigest()}) + "\n")
        scratch.replace(path)
        return number

    def restore(self, path: Path) -> Folded:
        """Fill a database that has no log yet."""
        lines = list(_read_backup(path))
        with self._held() as lease, self._write() as connection:
            self._check_lease(connection, lease)
            if self._last(connection):
                raise InvalidSpec(
                    "there is a log already, and a backup is restored into an empty one",
                    hint="Give another --folder or --database, or move the old one away",
                )
            folded = Folded(live=LiveState(ClusterSpec(nodes=())), num_events=0, bad=[], rows={})
            for line in lines:
                folded.num_events += 1
                reason = _fold_line(folded, line)
                if reason:
                    folded.bad.append(BadLine(line=line, reason=reason))
            for start in range(0, len(lines), _BATCH):
                batch = lines[start : start + _BATCH]
                connection.execute(
                    EVENTS.insert(),
                    [{name: getattr(one, name) for name in _COLUMNS} for one in batch],
                )
            keys = {
                event.client_key: event.job_id
                for event in map(_parsed, lines)
                if isinstance(event, Described) and event.client_key
            }
            if keys:
                rows = [{"client_key": key, "job_id": job_id} for key, job_id in keys.items()]
                connection.execute(KEYS.insert(), rows)
            _replace_rows(connection, folded.rows.values())
        return folded

    def lines(self) -> Iterator[Line]:
        """All lines, oldest first."""
        columns, last = [EVENTS.c[name] for name in _COLUMNS], 0
        while True:
            query = sa.select(*columns).where(EVENTS.c.sequence > last).order_by(EVENTS.c.sequence)
            with self._read() as connection:
                rows = connection.execute(query.limit(_BATCH)).all()
            if not rows:
                return
            for row in rows:
                yield Line(**dict(zip(_COLUMNS, row, strict=True)))
            last = int(rows[-1][0])

    def _superfluous(self, live: LiveState) -> set[int]:
        """Progress and memory that more follows, and all but the last decision of ended jobs."""
        dropped: set[int] = set()
        progress: dict[str, int] = {}  # by job: the event before, if it was one
        decided: dict[str, int] = {}
        remembered = 0
        for line in self.lines():
            if line.kind == Progressed.__name__:
                if line.job_id in progress:
                    dropped.add(progress[line.job_id])
                progress[line.job_id] = line.sequence
            elif line.kind == Decided.__name__:
                record = live.state.jobs.get(line.job_id)
                if line.job_id in decided and record is not None and record.state in TERMINAL:
                    dropped.add(decided[line.job_id])
                decided[line.job_id] = line.sequence
            elif line.kind == Remembered.__name__:
                dropped |= {remembered} if remembered else set()
                remembered = line.sequence
            else:
                progress.pop(line.job_id, None)
        return dropped

    @contextmanager
    def _held(self) -> Iterator[Lease]:
        """The lease, so that no controller writes meanwhile."""
        holder = f"{socket.gethostname()}:log:{os.getpid()}"
        deadline = time.monotonic() + _WAIT_SECONDS
        while (lease := self.acquire(holder, lease_seconds=_LEASE_SECONDS)) is None:
            if time.monotonic() > deadline:
                raise DrystoneError(
                    "a controller writes to this log", hint="End `drystone serve` first"
                )
            time.sleep(0.2)
        try:
            yield lease
        finally:
            self.release(lease)


def _parsed(line: Line) -> Event | None:
    try:
        return parse(line.body)
    except Exception:  # whatever a damaged line makes of a reader
        return None


def _fold_line(folded: Folded, line: Line) -> str:
    """Fold one line; why that cannot be, or an empty text."""
    try:
        event = parse(line.body)
        if type(event).__name__ != line.kind or job_of(event) != line.job_id:
            return f"the columns say {line.kind} of job {line.job_id or '-'}, the event does not"
        states = folded.live.check([event])
        rows = job_rows(folded.live, [event], states)
        folded.live.record(event)
    except Exception as error:
        message = error.message if isinstance(error, DrystoneError) else str(error)
        return clean_text(f"{type(error).__name__}: {message}", _MAX_BROKEN_SHOWN)
    folded.rows.update({row.id: _with_name(row, folded.live) for row in rows})
    return ""


def _with_name(row: JobRow, live: LiveState) -> JobRow:
    """Job and description were written together, and are folded one by one."""
    job = live.jobs[row.id].job
    return JobRow(
        id=row.id,
        name=clean_text(job.name, 200),
        owner=clean_text(job.owner, 200),
        state=row.state,
        submit_seconds=row.submit_seconds,
        end_seconds=row.end_seconds,
        reason=row.reason,
    )


def _essence(live: LiveState) -> Any:
    """What must be the same after a log was made shorter."""
    jobs = {
        job_id: (
            record.state,
            record.done_samples,
            record.num_starts,
            record.end_seconds,
            record.attained_gpu_seconds,
            live.jobs[job_id].dollars,
            live.jobs[job_id].num_faults,
            live.jobs[job_id].reason,
        )
        for job_id, record in live.state.jobs.items()
    }
    accounts = live.ledger.statement(live.state.now_seconds).by_account
    nodes = [node.id for node in live.state.nodes], live.state.free, live.state.gone, live.drained
    known = live.lessons, live.remembered, live.access.tokens, live.access.teams
    return jobs, dict(accounts), nodes, known


def _delete(connection: sa.Connection, sequences: Sequence[int]) -> None:
    for start in range(0, len(sequences), 500):
        part = sequences[start : start + 500]
        connection.execute(EVENTS.delete().where(EVENTS.c.sequence.in_(part)))


def _replace_rows(connection: sa.Connection, rows: Iterable[JobRow]) -> None:
    connection.execute(JOBS.delete())
    values = [{name: getattr(row, name) for name in JobRow.__slots__} for row in rows]
    for start in range(0, len(values), _BATCH):
        connection.execute(JOBS.insert(), values[start : start + _BATCH])


def _append_aside(path: Path, bad: Sequence[BadLine]) -> None:
    """On the disk before anything is taken out of the log."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        for found in bad:
            line = {name: getattr(found.line, name) for name in _COLUMNS}
            file.write(json.dumps({"reason": found.reason, **line}) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _read_backup(path: Path) -> Iterator[Line]:
    digest, number = hashlib.sha256(), 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            head = json.loads(file.readline())
            if head.get("drystone_log") != _FORMAT:
                raise ValueError(f"it is of format {head.get('drystone_log')}")
            for text in file:
                values = json.loads(text)
                if isinstance(values, dict):
                    if values != {"num_events": number, "sha256": digest.hexdigest()}:
                        raise ValueError("it was changed since it was written")
                    return
                digest.update(text.rstrip("\n").encode())
                number += 1
                yield Line(**dict(zip(_COLUMNS, values, strict=True)))
        raise ValueError("its end is missing")
    except (OSError, ValueError, AttributeError, EOFError) as error:
        raise UnreadableFile(f"is no whole backup: {error}", where=str(path)) from None
