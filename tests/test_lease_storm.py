"""Leasing beside whatever else happens to the rows: no statement of ours may bring a server down."""

from contextlib import suppress
from datetime import timedelta
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import asyncpg
import pytest

from cron_ticks.database import in_schema, open_database
from cron_ticks.embedded import EmbeddedServer
from cron_ticks.lease_sql import LEASE_DUE_TICKS
from cron_ticks.migrator import migrate
from cron_ticks.settings import Settings
from support.servers import program_folder

INSERT = """
INSERT INTO cron_ticks (id, schedule_id, schedule_name, queue_name, payload, scheduled_for, execute_at, due_at,
    created_at, sink, delivery)
SELECT 'tick_' || gen_random_uuid(), 'cron_' || (random() * 50)::int, 'name', 'queue', '{}',
    now() - random() * interval '1000 s', now() - random() * interval '1000 s', now() - interval '1 s', now(), 'hooks',
    'at_least_once'
FROM generate_series(1, 50)
"""
OTHERS = (
    INSERT,
    "UPDATE cron_ticks SET due_at = now() - random() * interval '1 s' WHERE random() < 0.2",
    "DELETE FROM cron_ticks WHERE random() < 0.1",
    "VACUUM ANALYZE cron_ticks",
)
LEASE = in_schema(LEASE_DUE_TICKS, "public")


LIMITS = (1000, timedelta(days=1), 2, timedelta(days=1000))
KINDS = cycle([(number, timedelta(milliseconds=length)) for number in (5, 100) for length in (1, 50, 5)])


async def lease(connection: Any) -> None:
    """As a publisher does, on a connection that may be an application's: with the server's own settings."""
    number, length = next(KINDS)
    await connection.fetch(LEASE, "ticker_me", number, None, length, "hooks", *LIMITS, [None] * 12)


@pytest.mark.soak(small=3, full=60)
async def test_leasing_in_a_storm_of_changes_crashes_no_server(size: int) -> None:
    """With a second look at the locked rows by ctid, PostgreSQL 18 crashed within a second of this."""
    leases = 0
    with TemporaryDirectory(prefix="cron_ticks_storm_", ignore_cleanup_errors=True) as folder:
        server = EmbeddedServer(Path(folder) / "data", program_folder(18), durable=False)
        server.acquire()

        async def again_and_again(statement: str | None) -> None:
            nonlocal leases
            connection = await asyncpg.connect(server.dsn)
            while True:
                with suppress(asyncpg.DeadlockDetectedError, asyncpg.UniqueViolationError):
                    if statement is None:
                        await lease(connection)
                        leases += 1
                    else:
                        await connection.execute(statement)

        try:
            async with open_database(Settings(), dsn=server.dsn) as database:
                await migrate(database)
            with anyio.move_on_after(size):
                async with anyio.create_task_group() as tasks:
                    for statement in (*[None] * 5, *OTHERS):
                        tasks.start_soon(again_and_again, statement)
            said = (server.cluster.folder / "server.log").read_text(errors="replace")
        finally:
            server.release()
    assert "terminated by signal" not in said
    assert leases > 10 * size
