"""The tables of the database that holds the log, and their format."""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa

from drystone.errors import UnreadableFile

TABLES: Final = sa.MetaData()
_FORMAT: Final = 2  # 1 had no column `actor`

EVENTS = sa.Table(
    "events",
    TABLES,
    sa.Column("sequence", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("time_seconds", sa.Double, nullable=False),
    sa.Column("kind", sa.String(32), nullable=False),
    sa.Column("job_id", sa.String(64), nullable=False, index=True),
    sa.Column("actor", sa.String(200), nullable=False, server_default=""),  # "": the system itself
    sa.Column("body", sa.Text, nullable=False),
)
BY_PEOPLE = EVENTS.c.actor != ""
AUDIT_INDEX = sa.Index(
    "ix_events_by_people", EVENTS.c.sequence, sqlite_where=BY_PEOPLE, postgresql_where=BY_PEOPLE
)
KEYS = sa.Table(
    "client_keys",
    TABLES,
    sa.Column("client_key", sa.String(200), primary_key=True),
    sa.Column("job_id", sa.String(64), nullable=False),
)
LEASES = sa.Table(
    "leases",
    TABLES,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("holder", sa.String(200), nullable=False),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("expires_seconds", sa.Double, nullable=False),
)
JOBS = sa.Table(
    "jobs",
    TABLES,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("name", sa.String(200), nullable=False),
    sa.Column("owner", sa.String(200), nullable=False, index=True),
    sa.Column("state", sa.String(16), nullable=False, index=True),
    sa.Column("submit_seconds", sa.Double, nullable=False),
    sa.Column("end_seconds", sa.Double, nullable=True),
    sa.Column("reason", sa.Text, nullable=False),
)
FORMATS = sa.Table("format", TABLES, sa.Column("number", sa.Integer, primary_key=True))


def upgrade(engine: sa.Engine) -> None:
    """Bring a database of an earlier format to this one, in one transaction."""
    if "format" not in sa.inspect(engine).get_table_names():
        return
    with engine.begin() as connection:
        if connection.execute(sa.select(FORMATS.c.number)).scalar() != 1:
            return
        connection.execute(
            sa.text("ALTER TABLE events ADD COLUMN actor VARCHAR(200) NOT NULL DEFAULT ''")
        )
        AUDIT_INDEX.create(connection)
        connection.execute(FORMATS.update().values(number=_FORMAT))


def check_format(engine: sa.Engine, *, where: str) -> None:
    """Refuse a database of another format; note this one's in a new one."""
    with engine.begin() as connection:
        found = connection.execute(sa.select(FORMATS.c.number)).scalar()
        if found is None:
            connection.execute(FORMATS.insert().values(number=_FORMAT))
        elif found != _FORMAT:
            raise UnreadableFile(
                f"is a database of format {found}, this version reads {_FORMAT}",
                where=where,
                hint="Install the version of drystone that wrote it; nothing was changed.",
            )
