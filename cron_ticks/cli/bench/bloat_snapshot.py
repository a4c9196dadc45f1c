"""A session that holds an old snapshot, and what it keeps from being removed."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg

# As the server's own statistics count them.
DEAD_ROWS = "SELECT coalesce(sum(n_dead_tup), 0)::bigint FROM pg_stat_user_tables"


@asynccontextmanager
async def held_snapshot(dsn: str, *, held: bool = True) -> AsyncIterator[None]:
    """Somebody's long transaction, as of a report or a backup; without `held` there is none."""
    connection = await asyncpg.connect(dsn)
    try:
        if held:
            await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1")
        yield
    finally:
        await connection.close()


async def dead_rows(connection: "asyncpg.Connection[asyncpg.Record]") -> int:
    """In all tables of the database."""
    return int(await connection.fetchval(DEAD_ROWS))
