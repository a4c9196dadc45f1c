"""Migrations: each once, whoever comes; refused where they don't fit."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import asyncpg
import pytest

from cron_ticks.database import Database, open_database
from cron_ticks.errors import MigrationError
from cron_ticks.migrator import known_migrations, lock_key, migrate, pending_migrations, read_migrations, render_script
from cron_ticks.settings import Settings
from support.processes import Processes
from token_queue import Message, QueueManager

pytestmark = pytest.mark.every_version

LATER_MIGRATION = """
INSERT INTO cron_ticks_migrations (number, name, checksum, oldest_release) VALUES (9000, 'later', 'x', $1)
"""


@asynccontextmanager
async def opened(dsn: str, **changes: Any) -> AsyncIterator[Database]:
    async with open_database(Settings.load(**changes), dsn=dsn) as database:
        yield database


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator["asyncpg.Connection[asyncpg.Record]"]:
    connection = await asyncpg.connect(dsn)
    try:
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def a_role(dsn: str, *grants: str) -> AsyncIterator[str]:
    """A role of its own with some rights; `{role}` in a grant stands for it. Yields the DSN to connect as it."""
    role = "role_" + hashlib.sha256(dsn.encode()).hexdigest()[:8]
    async with connected(dsn) as connection:
        await connection.execute(f"CREATE ROLE {role} LOGIN")
        try:
            for grant in grants:
                await connection.execute(grant.format(role=role))
            yield dsn.replace("postgres@", f"{role}@")
        finally:
            await connection.execute(f"DROP OWNED BY {role} CASCADE")
            await connection.execute(f"DROP ROLE {role}")


async def tables(connection: Any, schema: str) -> set[str]:
    rows = await connection.fetch("SELECT tablename FROM pg_tables WHERE schemaname = $1", schema)
    return {row["tablename"] for row in rows}


async def test_an_empty_database_gets_everything_once(empty_dsn: str) -> None:
    async with opened(empty_dsn) as database:
        assert await pending_migrations(database) == list(known_migrations())
        assert await migrate(database) == list(known_migrations())
        assert await pending_migrations(database) == []
        assert await migrate(database) == []


@pytest.mark.soak(small=8, full=20)
async def test_processes_at_once_apply_each_migration_once(empty_dsn: str, processes: Processes, size: int) -> None:
    started = [await processes.cron_ticks("migrate", environment={"CRON_TICKS_DSN": empty_dsn}) for _ in range(size)]
    assert await asyncio.gather(*(process.wait() for process in started)) == [0] * size
    outputs = [await process.output() for process in started]
    appliers = [output for output in outputs if "applied" in output]
    assert len(appliers) == 1
    async with connected(empty_dsn) as connection:
        rows = await connection.fetch("SELECT number FROM cron_ticks_migrations ORDER BY number")
    assert [row["number"] for row in rows] == [migration.number for migration in known_migrations()]
    print(f"{size} processes called migrate at once: all exited 0, {len(rows)} migration(s) applied once")  # noqa: T201


async def test_a_pod_waits_longer_than_a_statement_may_take(empty_dsn: str) -> None:
    """Another pod's migration may take its time: ours waits for the lock, without the deadline of other statements."""
    waiting_for_lock = "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted)"
    async with connected(empty_dsn) as other, opened(empty_dsn, statement_timeout_seconds=2) as database:
        async with other.transaction():
            await other.execute("SELECT pg_advisory_xact_lock($1)", lock_key("public"))
            migrating = asyncio.create_task(migrate(database))
            while not await other.fetchval(waiting_for_lock):
                assert not migrating.done()
            await other.execute("SELECT pg_sleep(2.5)")
            assert not migrating.done()
        assert await migrating == list(known_migrations())


async def test_the_printed_script_does_the_same(empty_dsn: str) -> None:
    async with connected(empty_dsn) as connection:
        await connection.execute(render_script("elsewhere"))
        assert "cron_schedules" in await tables(connection, "elsewhere")
    async with opened(empty_dsn, database_schema="elsewhere") as database:
        assert await pending_migrations(database) == []


async def test_the_script_can_start_after_what_is_applied() -> None:
    last = known_migrations()[-1].number
    assert 'CREATE TABLE "public".cron_schedules' in render_script("public")
    assert 'CREATE TABLE "public".cron_schedules' not in render_script("public", after=last)


async def test_an_older_release_is_refused(dsn: str) -> None:
    async with connected(dsn) as connection:
        await connection.execute(LATER_MIGRATION, "99.10.0")
    async with opened(dsn) as database:
        for attempt in (migrate(database), pending_migrations(database)):
            with pytest.raises(MigrationError, match=r"needs at least 99\.10\.0: upgrade"):
                await attempt
    with pytest.raises(MigrationError, match="upgrade"):
        async with QueueManager(dsn):
            pass


async def test_a_newer_schema_that_allows_this_release_is_fine(dsn: str) -> None:
    async with connected(dsn) as connection:
        await connection.execute(LATER_MIGRATION, "0.0.9")
    async with opened(dsn) as database:
        assert await migrate(database) == []


async def test_an_edited_migration_is_refused(dsn: str) -> None:
    async with connected(dsn) as connection:
        await connection.execute("UPDATE cron_ticks_migrations SET checksum = 'other' WHERE number = 1")
    async with opened(dsn) as database:
        with pytest.raises(MigrationError, match="never edited"):
            await migrate(database)


async def test_a_worker_refuses_pending_migrations_when_it_may_not_apply_them(empty_dsn: str) -> None:
    settings = Settings.load(dsn=empty_dsn, migrate_on_start=False)
    with pytest.raises(MigrationError, match="cron-ticks migrate"):
        async with QueueManager(settings=settings):
            pass
    async with connected(empty_dsn) as connection:
        assert await tables(connection, "public") == set()


async def test_a_table_in_the_way_changes_nothing(empty_dsn: str) -> None:
    async with connected(empty_dsn) as connection:
        await connection.execute("CREATE TABLE queue_messages (mine text)")
        async with opened(empty_dsn) as database:
            with pytest.raises(MigrationError, match="CRON_TICKS_DATABASE_SCHEMA"):
                await migrate(database)
        assert await tables(connection, "public") == {"queue_messages"}


async def test_a_role_without_rights_is_told_what_to_do(empty_dsn: str) -> None:
    async with a_role(empty_dsn) as limited, opened(limited) as database:
        with pytest.raises(MigrationError, match="migrate --sql"):
            await migrate(database)


async def test_a_role_without_rights_may_work_with_a_finished_schema(dsn: str) -> None:
    rights = (
        "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {role}",
        "GRANT USAGE ON SEQUENCE execution_events_sequence TO {role}",
    )
    async with a_role(dsn, *rights) as limited, QueueManager(limited) as manager:
        await manager.schedule("queue", every=5)


async def test_a_role_that_owns_its_schema_needs_no_rights_on_the_database(empty_dsn: str) -> None:
    right = "CREATE SCHEMA app AUTHORIZATION {role}"
    async with a_role(empty_dsn, right) as owner, opened(owner, database_schema="app") as database:
        assert await migrate(database) == list(known_migrations())


async def test_a_role_that_may_not_read_is_told_what_to_do(dsn: str) -> None:
    async with a_role(dsn) as blind, opened(blind) as database:
        with pytest.raises(MigrationError, match="grant this role"):
            await pending_migrations(database)


async def test_a_schema_named_like_a_word_of_sql_works(empty_dsn: str) -> None:
    settings = Settings.load(dsn=empty_dsn, database_schema="order")
    async with QueueManager(settings=settings) as manager:
        made = await manager.schedule("queue", every=5)
        assert await manager.list_schedules() == [made]


async def test_two_installations_in_one_database_do_not_meet(empty_dsn: str) -> None:
    """Each fires its own schedules into its own queue, though all names are the same."""
    handled = {"tenant_a": anyio.Event(), "tenant_b": anyio.Event()}

    async def work(schema: str) -> None:
        manager = QueueManager(settings=Settings.load(dsn=empty_dsn, database_schema=schema))

        @manager.handler("queue")
        async def handle(message: Message) -> None:
            assert message.payload == {"of": schema}
            handled[schema].set()

        async with manager:
            await manager.schedule("queue", every=3600, payload={"of": schema})
            assert len(await manager.list_schedules()) == 1
            await manager.run(handle_signals=False)

    async with anyio.create_task_group() as tasks:
        for schema in handled:
            tasks.start_soon(work, schema)
        with anyio.fail_after(60):
            for event in handled.values():
                await event.wait()
        tasks.cancel_scope.cancel()
    async with connected(empty_dsn) as connection:
        for schema in handled:
            assert await connection.fetchval(f"SELECT count(*) FROM {schema}.queue_messages") == 1


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"0001_a.sql": "SELECT 1;"}, "oldest-release"),
        ({"1_a.sql": "-- oldest-release: 0.1.0"}, "NNNN_name.sql"),
        ({"0002_a.sql": "-- oldest-release: 0.1.0"}, "without gaps"),
    ],
)
def test_a_folder_that_is_not_in_order_is_refused(tmp_path: Path, files: dict[str, str], says: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(MigrationError, match=says):
        read_migrations(tmp_path)
