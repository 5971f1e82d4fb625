"""Where the log lives: an append-only table with one sequence, in SQLite or PostgreSQL.

The log is the only truth. Only the controller that holds the lease may append: every append checks,
in its own transaction, that the lease is still held at the same epoch, so that of two controllers
one is refused. The table of jobs is derived: it is written in the same transaction, for reading.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError

from drystone.errors import DrystoneError, MissingExtra, UnreadableFile
from drystone.run.events import Event
from drystone.run.notes import Described, job_of, parse, render

CONTROLLER: Final = "controller"
_FORMAT: Final = 2  # 1 had no column `actor`
_BUSY_SECONDS: Final = 5.0
_TABLES = sa.MetaData()

_EVENTS = sa.Table(
    "events",
    _TABLES,
    sa.Column("sequence", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("time_seconds", sa.Double, nullable=False),
    sa.Column("kind", sa.String(32), nullable=False),
    sa.Column("job_id", sa.String(64), nullable=False, index=True),
    sa.Column("actor", sa.String(200), nullable=False, server_default=""),  # "": the system itself
    sa.Column("body", sa.Text, nullable=False),
)
_BY_PEOPLE = _EVENTS.c.actor != ""
_AUDIT_INDEX = sa.Index(
    "ix_events_by_people", _EVENTS.c.sequence, sqlite_where=_BY_PEOPLE, postgresql_where=_BY_PEOPLE
)
_KEYS = sa.Table(
    "client_keys",
    _TABLES,
    sa.Column("client_key", sa.String(200), primary_key=True),
    sa.Column("job_id", sa.String(64), nullable=False),
)
_LEASES = sa.Table(
    "leases",
    _TABLES,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("holder", sa.String(200), nullable=False),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("expires_seconds", sa.Double, nullable=False),
)
_JOBS = sa.Table(
    "jobs",
    _TABLES,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("name", sa.String(200), nullable=False),
    sa.Column("owner", sa.String(200), nullable=False, index=True),
    sa.Column("state", sa.String(16), nullable=False, index=True),
    sa.Column("submit_seconds", sa.Double, nullable=False),
    sa.Column("end_seconds", sa.Double, nullable=True),
    sa.Column("reason", sa.Text, nullable=False),
)
_FORMATS = sa.Table("format", _TABLES, sa.Column("number", sa.Integer, primary_key=True))


class LeaseLost(DrystoneError):
    """Another controller has taken over; whoever gets this must stop acting."""


class StoreBusy(DrystoneError):
    """The database cannot be written right now; nothing was written, trying again may help."""


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
            self._engine = sa.create_engine(url, pool_pre_ping=not url.startswith("sqlite"))
            self._is_sqlite = self._engine.dialect.name == "sqlite"
            if self._is_sqlite:
                _prepare_sqlite(self._engine, busy_seconds)
            self._upgrade()
            _TABLES.create_all(self._engine)
            self._check_format()
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
                    _LEASES.insert().values(**values, expires_seconds=now + lease_seconds)
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
        self, lease: Lease, events: Sequence[Event], rows: Iterable[JobRow] = (), *, actor: str = ""
    ) -> int:
        """Write events and what they did to jobs, all or nothing; the last sequence number.

        `actor` is the person behind them, where there is one.
        """
        with self._write() as connection:
            self._check_lease(connection, lease)
            first = self._last(connection) + 1
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
                connection.execute(_EVENTS.insert(), values)
            keys = [
                {"client_key": one.client_key, "job_id": one.job_id}
                for one in events
                if isinstance(one, Described) and one.client_key
            ]
            if keys:
                connection.execute(_KEYS.insert(), keys)
            self._write_rows(connection, rows)
            return first + len(values) - 1

    def read(
        self, *, after: int = 0, job_id: str = "", most: int = 0
    ) -> Iterator[tuple[int, Event]]:
        """Events with their sequence numbers, oldest first."""
        query = sa.select(_EVENTS.c.sequence, _EVENTS.c.body).where(_EVENTS.c.sequence > after)
        if job_id:
            query = query.where(_EVENTS.c.job_id == job_id)
        query = query.order_by(_EVENTS.c.sequence)
        if most:
            query = query.limit(most)
        with self._read() as connection:
            for sequence, body in connection.execute(query):
                yield int(sequence), parse(body)

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
        columns = (_EVENTS.c.sequence, _EVENTS.c.job_id, _EVENTS.c.actor, _EVENTS.c.body)
        query = sa.select(*columns).where(_EVENTS.c.sequence > after)
        if job_id:
            query = query.where(_EVENTS.c.job_id == job_id)
        if by_people:
            query = query.where(_BY_PEOPLE)
        if kinds:
            query = query.where(_EVENTS.c.kind.in_(kinds))
        order = _EVENTS.c.sequence.desc() if is_newest else _EVENTS.c.sequence
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
        query = sa.select(_KEYS.c.job_id).where(_KEYS.c.client_key == client_key)
        with self._read() as connection:
            return connection.execute(query).scalar()

    def list_jobs(
        self, *, states: Sequence[str] = (), owner: str = "", most: int = 0, skip: int = 0
    ) -> list[JobRow]:
        """Jobs by submission, the newest last."""
        query = sa.select(_JOBS).order_by(_JOBS.c.submit_seconds, _JOBS.c.id)
        if states:
            query = query.where(_JOBS.c.state.in_(states))
        if owner:
            query = query.where(_JOBS.c.owner == owner)
        if most:
            query = query.limit(most)
        if skip:
            query = query.offset(skip)
        with self._read() as connection:
            return [JobRow(**row) for row in connection.execute(query).mappings()]

    @contextmanager
    def _write(self) -> Iterator[sa.Connection]:
        try:
            with self._engine.begin() as connection:
                yield connection
        except IntegrityError as error:
            raise LeaseLost(f"another writer was faster: {error.orig}") from None
        except OperationalError as error:
            raise StoreBusy(f"the database cannot be written: {error.orig}") from None

    @contextmanager
    def _read(self) -> Iterator[sa.Connection]:
        try:
            with self._engine.connect() as connection:
                # Without a transaction: a reader must not hold up a writer.
                yield connection.execution_options(isolation_level="AUTOCOMMIT")
        except OperationalError as error:
            raise StoreBusy(f"the database cannot be read: {error.orig}") from None

    def _now(self, connection: sa.Connection) -> float:
        """The database's clock where several machines may share it."""
        if self._is_sqlite:
            return time.time()
        return float(
            connection.execute(sa.text("SELECT extract(epoch FROM clock_timestamp())")).scalar_one()
        )

    def _lease_row(self, connection: sa.Connection) -> Any:
        query = sa.select(_LEASES).where(_LEASES.c.name == CONTROLLER).with_for_update()
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
            _LEASES.update()
            .where(_LEASES.c.name == CONTROLLER)
            .values(holder=lease.holder, epoch=lease.epoch, expires_seconds=expires)
        )

    def _write_rows(self, connection: sa.Connection, rows: Iterable[JobRow]) -> None:
        values = [{name: getattr(row, name) for name in JobRow.__slots__} for row in rows]
        if not values:
            return
        ids = [value["id"] for value in values]
        connection.execute(_JOBS.delete().where(_JOBS.c.id == sa.bindparam("old")),
                           [{"old": one} for one in ids])  # fmt: skip
        connection.execute(_JOBS.insert(), values)

    def _last(self, connection: sa.Connection) -> int:
        return int(connection.execute(sa.select(sa.func.max(_EVENTS.c.sequence))).scalar() or 0)

    def _upgrade(self) -> None:
        """Bring a database of an earlier format to this one, in one transaction."""
        names = sa.inspect(self._engine).get_table_names()
        if "format" not in names:
            return
        with self._engine.begin() as connection:
            if connection.execute(sa.select(_FORMATS.c.number)).scalar() != 1:
                return
            connection.execute(
                sa.text("ALTER TABLE events ADD COLUMN actor VARCHAR(200) NOT NULL DEFAULT ''")
            )
            _AUDIT_INDEX.create(connection)
            connection.execute(_FORMATS.update().values(number=_FORMAT))

    def _check_format(self) -> None:
        with self._engine.begin() as connection:
            found = connection.execute(sa.select(_FORMATS.c.number)).scalar()
            if found is None:
                connection.execute(_FORMATS.insert().values(number=_FORMAT))
            elif found != _FORMAT:
                raise UnreadableFile(
                    f"is a database of format {found}, this version reads {_FORMAT}",
                    where=_shown(str(self._engine.url)),
                    hint="Install the version of drystone that wrote it; nothing was changed.",
                )


def _prepare_sqlite(engine: sa.Engine, busy_seconds: float) -> None:
    """Write-ahead log, every commit on the disk, writers wait for each other."""

    @sa.event.listens_for(engine, "connect")
    def connected(connection: Any, _: object) -> None:
        connection.isolation_level = None  # the driver begins no transactions of its own
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {int(busy_seconds * 1000)}")
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute("PRAGMA synchronous = FULL")
        cursor.close()

    @sa.event.listens_for(engine, "begin")
    def began(connection: sa.Connection) -> None:
        # Take the lock at once: a reader that turns writer could not wait for another writer.
        if connection.get_execution_options().get("isolation_level") != "AUTOCOMMIT":
            connection.exec_driver_sql("BEGIN IMMEDIATE")


def _shown(url: str) -> str:
    """The address without a password."""
    try:
        return sa.make_url(url).render_as_string(hide_password=True)
    except sa.exc.ArgumentError:
        return "the database's address"
