"""Where the log lives: an append-only table with one sequence, in SQLite or PostgreSQL.

The log is the only truth. Only the controller that holds the lease may append: every append checks,
in its own transaction, that the lease is still held at the same epoch, so that of two controllers
one is refused. The table of jobs is derived: it is written in the same transaction, for reading.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError

from drystone.errors import DrystoneError, MissingExtra, UnreadableFile
from drystone.run.control.notes import (
    Described,
    Remembered,
    job_of,
    parse,
    parse_numbered,
    render,
)
from drystone.run.events import Event, Progressed
from drystone.run.store_connections import postgresql_arguments, prepare_postgresql, prepare_sqlite
from drystone.run.store_tables import (
    BY_PEOPLE,
    EVENTS,
    JOBS,
    KEYS,
    LEASES,
    TABLES,
    check_format,
    upgrade,
)

CONTROLLER: Final = "controller"
_BUSY_SECONDS: Final = 5.0


class LeaseLost(DrystoneError):
    """Another controller has taken over; whoever gets this must stop acting."""


class LogConflict(LeaseLost):
    """The log and its writer's memory differ beyond mending; the next controller reads it anew."""


class StoreBusy(DrystoneError):
    """The database cannot be used right now; nothing was written, trying again may help."""


class CommitUnclear(StoreBusy):
    """The answer to a commit was lost: it may be in the log or not, until somebody looks."""


class LogMoved(StoreBusy):
    """The log is longer than its writer knew; nothing was written."""


class StoreRefused(DrystoneError):
    """The database does not take a value; nothing was written, and the same would be refused."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to act, as one holder at one epoch."""

    holder: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """One job in the table for reading."""

    id: str
    name: str
    owner: str
    state: str
    submit_seconds: float
    end_seconds: float | None
    reason: str


class LogLine(NamedTuple):
    """One line of the log."""

    sequence: int
    job_id: str
    actor: str
    body: str  # JSON


class Store:
    """The log, the lease and the table of jobs in one database."""

    def __init__(self, url: str, *, busy_seconds: float = _BUSY_SECONDS) -> None:
        try:
            is_psycopg = url.startswith("postgresql+psycopg:")
            self._engine = sa.create_engine(
                url,
                pool_pre_ping=not url.startswith("sqlite"),
                connect_args=postgresql_arguments(busy_seconds) if is_psycopg else {},
            )
            self._is_sqlite = self._engine.dialect.name == "sqlite"
            if self._is_sqlite:
                prepare_sqlite(self._engine, busy_seconds)
            else:
                prepare_postgresql(self._engine, busy_seconds)
            upgrade(self._engine)
            TABLES.create_all(self._engine)
            check_format(self._engine, where=_shown(url))
        except ModuleNotFoundError as error:
            if error.name != "psycopg":
                raise UnreadableFile(f"is no database: {error}", where=_shown(url)) from None
            raise MissingExtra("PostgreSQL needs psycopg", "postgres", where=_shown(url)) from None
        except (sa.exc.ArgumentError, sa.exc.NoSuchModuleError, ImportError) as error:
            raise UnreadableFile(f"is no database: {error}", where=_shown(url)) from None
        except DBAPIError as error:
            raise UnreadableFile(f"cannot be opened: {error.orig}", where=_shown(url)) from None

    def close(self) -> None:
        """Let go of all connections."""
        self._engine.dispose()

    def acquire(self, holder: str, *, lease_seconds: float) -> Lease | None:
        """The lease at a new epoch, or None while another holder's has not run out."""
        with self._write() as connection:
            now = self._now(connection)
            row = self._lease_row(connection)
            if row is None:
                lease = Lease(holder, 1)
                values = {"name": CONTROLLER, "holder": holder, "epoch": 1}
                connection.execute(
                    LEASES.insert().values(**values, expires_seconds=now + lease_seconds)
                )
                return lease
            if row.expires_seconds > now and row.holder != holder:
                return None
            lease = Lease(holder, row.epoch + 1)
            self._set_lease(connection, lease, now + lease_seconds)
            return lease

    def renew(self, lease: Lease, *, lease_seconds: float) -> None:
        """Hold the lease for longer; `LeaseLost` if somebody else has it."""
        with self._write() as connection:
            self._check_lease(connection, lease)
            self._set_lease(connection, lease, self._now(connection) + lease_seconds)

    def release(self, lease: Lease) -> None:
        """Let another controller take over at once."""
        with self._write() as connection:
            if self._lease_row(connection) is not None:
                self._check_lease(connection, lease)
                self._set_lease(connection, lease, 0.0)

    def append(
        self,
        lease: Lease,
        events: Sequence[Event],
        rows: Iterable[JobRow] = (),
        *,
        after: int | None = None,
        actor: str = "",
    ) -> int:
        """Write events and what they did to jobs, all or nothing; the last sequence number.

        `after` is the last one that the writer knows: if the log has others, nothing is written and
        `LogMoved` is raised. `actor` is the person behind them, where there is one. If the answer
        is lost, `CommitUnclear` is raised, and `read_settled` says what became of it.
        """
        with self._write() as connection:
            self._check_lease(connection, lease)
            last = self._last(connection)
            if after is not None and last != after:
                raise LogMoved(f"the log is at {last}, and its writer knew of {after}")
            first = last + 1
            values = [
                {
                    "sequence": first + offset,
                    "time_seconds": event.time_seconds,
                    "kind": type(event).__name__,
                    "job_id": job_of(event),
                    "actor": actor,
                    "body": render(event),
                }
                for offset, event in enumerate(events)
            ]
            if values:
                connection.execute(EVENTS.insert(), values)
            keys = [
                {"client_key": one.client_key, "job_id": one.job_id}
                for one in events
                if isinstance(one, Described) and one.client_key
            ]
            if keys:
                connection.execute(KEYS.insert(), keys)
            self._write_rows(connection, rows)
            return first + len(values) - 1

    def read_settled(self, lease: Lease, *, after: int) -> list[tuple[int, Event]]:
        """Events after one, once no earlier write of this holder can still come through.

        Every write locks the row of the lease first: whoever has it knows how the others ended.
        """
        columns = (EVENTS.c.sequence, EVENTS.c.body)
        query = sa.select(*columns).where(EVENTS.c.sequence > after).order_by(EVENTS.c.sequence)
        with self._write() as connection:
            self._check_lease(connection, lease)
            return [(int(sequence), parse(body)) for sequence, body in connection.execute(query)]

    def read(
        self, *, after: int = 0, job_id: str = "", most: int = 0
    ) -> Iterator[tuple[int, Event]]:
        """Events with their sequence numbers, oldest first."""
        query = sa.select(EVENTS.c.sequence, EVENTS.c.body).where(EVENTS.c.sequence > after)
        if job_id:
            query = query.where(EVENTS.c.job_id == job_id)
        query = query.order_by(EVENTS.c.sequence)
        if most:
            query = query.limit(most)
        with self._read() as connection:
            for sequence, body in connection.execute(query):
                yield int(sequence), parse_numbered(sequence, body)

    def read_needed(self) -> Generator[tuple[int, Event], None, None]:
        """Events that a fold of the whole log needs: not progress or memory that more follows."""
        following = sa.func.lead(EVENTS.c.kind).over(
            partition_by=EVENTS.c.job_id, order_by=EVENTS.c.sequence
        )
        progress = Progressed.__name__
        marked = sa.select(EVENTS.c.sequence, EVENTS.c.kind, following.label("next")).subquery()
        passed = (
            sa.select(marked.c.sequence)
            .where(marked.c.kind == progress, marked.c.next == progress)
            .scalar_subquery()
        )
        remembered = EVENTS.c.kind == Remembered.__name__
        last = sa.select(sa.func.max(EVENTS.c.sequence)).where(remembered).scalar_subquery()
        query = sa.select(EVENTS.c.sequence, EVENTS.c.body).where(
            EVENTS.c.sequence.not_in(passed), sa.or_(~remembered, EVENTS.c.sequence == last)
        )
        with self._read() as connection:
            for sequence, body in connection.execute(query.order_by(EVENTS.c.sequence)):
                yield int(sequence), parse_numbered(sequence, body)

    def read_lines(
        self, *, after: int = 0, job_id: str = "", most: int = 0
    ) -> list[tuple[int, str]]:
        """The same as lines of JSON, not parsed."""
        found = self.read_log(after=after, job_id=job_id, most=most)
        return [(line.sequence, line.body) for line in found]

    def read_log(
        self,
        *,
        after: int = 0,
        job_id: str = "",
        most: int = 0,
        is_newest: bool = False,
        by_people: bool = False,
        kinds: Sequence[str] = (),
    ) -> list[LogLine]:
        """Lines with who did it: the first `most` of them, or with `is_newest` the last.

        With `by_people` only what somebody did, with `kinds` only events of those. Oldest first in
        any case.
        """
        columns = (EVENTS.c.sequence, EVENTS.c.job_id, EVENTS.c.actor, EVENTS.c.body)
        query = sa.select(*columns).where(EVENTS.c.sequence > after)
        if job_id:
            query = query.where(EVENTS.c.job_id == job_id)
        if by_people:
            query = query.where(BY_PEOPLE)
        if kinds:
            query = query.where(EVENTS.c.kind.in_(kinds))
        order = EVENTS.c.sequence.desc() if is_newest else EVENTS.c.sequence
        query = query.order_by(order)
        with self._read() as connection:
            found = connection.execute(query.limit(most) if most else query)
            lines = [LogLine(int(row[0]), row[1], row[2], row[3]) for row in found]
        return lines[::-1] if is_newest else lines

    def last_sequence(self) -> int:
        """Of the newest event; 0 in an empty log."""
        with self._read() as connection:
            return self._last(connection)

    def find_key(self, client_key: str) -> str | None:
        """The job that was submitted under a client's key."""
        query = sa.select(KEYS.c.job_id).where(KEYS.c.client_key == client_key)
        with self._read() as connection:
            return connection.execute(query).scalar()

    def list_jobs(
        self, *, states: Sequence[str] = (), owner: str = "", most: int = 0, skip: int = 0
    ) -> list[JobRow]:
        """Jobs by submission, the newest last."""
        query = sa.select(JOBS).order_by(JOBS.c.submit_seconds, JOBS.c.id)
        if states:
            query = query.where(JOBS.c.state.in_(states))
        if owner:
            query = query.where(JOBS.c.owner == owner)
        if most:
            query = query.limit(most)
        if skip:
            query = query.offset(skip)
        with self._read() as connection:
            return [JobRow(**row) for row in connection.execute(query).mappings()]

    @contextmanager
    def _write(self) -> Iterator[sa.Connection]:
        is_committing = False
        try:
            with self._engine.connect() as connection, connection.begin() as transaction:
                yield connection
                is_committing = True
                transaction.commit()
        except IntegrityError as error:
            raise LeaseLost(f"another writer was faster: {error.orig}") from None
        except DBAPIError as error:
            if is_committing:
                raise CommitUnclear(
                    f"the database did not say whether it has written: {error.orig}",
                    hint="Look before you try again; a submission may be sent again with its key",
                ) from None
            raise _trouble(error, "written") from None

    @contextmanager
    def _read(self) -> Iterator[sa.Connection]:
        try:
            with self._engine.connect() as connection:
                # Without a transaction: a reader must not hold up a writer.
                yield connection.execution_options(isolation_level="AUTOCOMMIT")
        except DBAPIError as error:
            raise _trouble(error, "read") from None

    def _now(self, connection: sa.Connection) -> float:
        """The database's clock where several machines may share it."""
        if self._is_sqlite:
            return time.time()
        return float(
            connection.execute(sa.text("SELECT extract(epoch FROM clock_timestamp())")).scalar_one()
        )

    def _lease_row(self, connection: sa.Connection) -> Any:
        query = sa.select(LEASES).where(LEASES.c.name == CONTROLLER).with_for_update()
        return connection.execute(query).one_or_none()

    def _check_lease(self, connection: sa.Connection, lease: Lease) -> None:
        row = self._lease_row(connection)
        if row is None or (row.holder, row.epoch) != (lease.holder, lease.epoch):
            holder = f"{row.holder} (epoch {row.epoch})" if row is not None else "nobody"
            raise LeaseLost(
                f"{lease.holder} (epoch {lease.epoch}) no longer controls: {holder} does",
                hint="Another `drystone serve` took over; this one stops",
            )

    def _set_lease(self, connection: sa.Connection, lease: Lease, expires: float) -> None:
        connection.execute(
            LEASES.update()
            .where(LEASES.c.name == CONTROLLER)
            .values(holder=lease.holder, epoch=lease.epoch, expires_seconds=expires)
        )

    def _write_rows(self, connection: sa.Connection, rows: Iterable[JobRow]) -> None:
        values = [{name: getattr(row, name) for name in JobRow.__slots__} for row in rows]
        if not values:
            return
        ids = [value["id"] for value in values]
        connection.execute(JOBS.delete().where(JOBS.c.id == sa.bindparam("old")),
                           [{"old": one} for one in ids])  # fmt: skip
        connection.execute(JOBS.insert(), values)

    def _last(self, connection: sa.Connection) -> int:
        return int(connection.execute(sa.select(sa.func.max(EVENTS.c.sequence))).scalar() or 0)


def _trouble(error: DBAPIError, what: str) -> DrystoneError:
    """Whether to try again, or never the same."""
    if isinstance(error, OperationalError) or error.connection_invalidated:
        return StoreBusy(f"the database cannot be {what}: {error.orig}")
    return StoreRefused(f"the database refuses it: {error.orig}")


def _shown(url: str) -> str:
    """The address without a password."""
    try:
        return sa.make_url(url).render_as_string(hide_password=True)
    except sa.exc.ArgumentError:
        return "the database's address"
