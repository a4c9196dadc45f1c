"""Waiting for rows without sleeping: triggers of the test's own tell when a table changes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg

WAIT_SECONDS = 60.0

NOTIFY_FUNCTION = """
CREATE FUNCTION test_notify() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('test_changes', TG_TABLE_NAME);
    RETURN NULL;
END $$
"""


class Watch:
    """Looks again at a condition whenever a watched table has changed."""

    def __init__(self, connection: "asyncpg.Connection[asyncpg.Record]") -> None:
        self._connection = connection
        self._changed = asyncio.Event()

    def note(self, *_: object) -> None:
        self._changed.set()

    async def until(self, condition: str, *arguments: object) -> None:
        """Wait until the query's one value is true."""
        async with asyncio.timeout(WAIT_SECONDS):
            while not await self._connection.fetchval(condition, *arguments):
                await self._changed.wait()
                self._changed.clear()


@asynccontextmanager
async def watching(dsn: str, *tables: str) -> AsyncIterator[Watch]:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(NOTIFY_FUNCTION)
        for table in tables:
            await connection.execute(
                f"CREATE TRIGGER test_changes AFTER INSERT OR UPDATE OR DELETE ON {table} "
                "FOR EACH STATEMENT EXECUTE FUNCTION test_notify()"
            )
        watch = Watch(connection)
        await connection.add_listener("test_changes", watch.note)
        yield watch
    finally:
        await connection.close()
