"""How connections to the log's database are set up: nobody waits for ever."""

from __future__ import annotations

import math
from typing import Any, Final

import sqlalchemy as sa

_ABANDONED_SECONDS: Final = 30.0  # after which PostgreSQL ends what a lost connection left open


def prepare_sqlite(engine: sa.Engine, busy_seconds: float) -> None:
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


def postgresql_arguments(busy_seconds: float) -> dict[str, Any]:
    """What a connection is opened with: a server that went away without a word is noticed."""
    milliseconds = int(busy_seconds * 1000)
    return {
        "connect_timeout": max(2, math.ceil(busy_seconds)),
        "tcp_user_timeout": milliseconds,
        "keepalives_idle": max(1, math.ceil(busy_seconds / 2)),
        "keepalives_interval": 1,
        "keepalives_count": 3,
    }


def prepare_postgresql(engine: sa.Engine, busy_seconds: float) -> None:
    """Nobody waits for ever, neither for a lock nor for a client that is gone."""

    @sa.event.listens_for(engine, "connect")
    def connected(connection: Any, _: object) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"SET lock_timeout = {int(busy_seconds * 1000)}")
            cursor.execute(
                f"SET idle_in_transaction_session_timeout = {int(_ABANDONED_SECONDS * 1000)}"
            )
        connection.commit()
