"""A session that holds an old snapshot, and what it keeps from being removed."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg

from cron_ticks.errors import CronTicksError

# As the server's own statistics count them.
DEAD_ROWS = "SELECT coalesce(sum(n_dead_tup), 0)::bigint FROM pg_stat_user_tables"


@asynccontextmanager
async def held_snapshot(dsn: str, *, held: bool = True) -> AsyncIterator[None]:
    """Somebody's long transaction, as of a report or a backup; without `held` there is none.

    An error if it is gone in the end: then something could be removed after all.
    """
    connection = await asyncpg.connect(dsn)
    try:
        if held:
            await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1")
        yield
        if held:
            await _check_held(connection)
    finally:
        connection.terminate()  # it may be lost already


async def _check_held(connection: "asyncpg.Connection[asyncpg.Record]") -> None:
    try:
        await connection.execute("SELECT 1")
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError) as error:
        raise CronTicksError(f"the old snapshot was not held to the end: {error}") from error
    if not connection.is_in_transaction():
        raise CronTicksError("the old snapshot was not held to the end: its transaction is over")


async def dead_rows(connection: "asyncpg.Connection[asyncpg.Record]") -> int:
    """In all tables of the database."""
    return int(await connection.fetchval(DEAD_ROWS))
