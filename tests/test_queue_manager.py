"""QueueManager: opening, running, stopping."""

import asyncio
import signal
from functools import partial
from typing import Any

import anyio
import asyncpg
import pytest
from structlog.testing import capture_logs

from cron_ticks.errors import CronTicksError, DatabaseUnavailableError, InvalidInputError
from cron_ticks.logs import configure_logs
from cron_ticks.settings import Settings
from support.watching import watching
from token_queue import Message, QueueManager
from token_queue.queue_sql import SEND_ONE

pytestmark = pytest.mark.sql


async def test_a_schedule_reaches_its_handler(dsn: str, connection: Any) -> None:
    manager = QueueManager(dsn)
    arrived = anyio.Event()

    @manager.handler("memo.batch_check")
    async def batch_check(message: Message) -> None:
        assert message.payload == {"scope": "system"}
        arrived.set()

    async with manager, anyio.create_task_group() as tasks:
        tasks.start_soon(manager.run)
        await manager.schedule("memo.batch_check", every=3600, payload={"scope": "system"})
        with anyio.fail_after(30):
            await arrived.wait()
        assert {
            "schedule-manager",
            "message-ticker",
            "tick-firer queue",
            "cleanup",
            "token-renewal",
            "outcome-writer",
            "listener",
        } <= set(manager.health)
        manager.stop()
    assert await connection.fetchval("SELECT completed_at IS NOT NULL FROM queue_messages")


async def test_a_firing_is_logged_with_its_lateness(dsn: str, connection: Any) -> None:
    manager = QueueManager(settings=Settings.load(dsn=dsn, log_level="debug"))
    configure_logs("debug")
    async with manager, watching(dsn, "queue_messages") as watch:
        made = await manager.schedule("queue", every=3600)
        with capture_logs() as logs:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(manager.run)
                await watch.until("SELECT count(*) = 1 FROM queue_messages")
                manager.stop()
    [batch] = [entry for entry in logs if entry["event"] == "ticks_fired"]
    assert (batch["ticks"], batch["lateness_max_ms"] >= 0) == (1, True)
    [tick] = [entry for entry in logs if entry["event"] == "tick_fired"]
    assert (tick["schedule_id"], tick["schedule"]) == (made.id, "queue")
    lateness = await connection.fetchval("SELECT inserted_at - scheduled_for FROM queue_messages")
    assert tick["lateness_ms"] == round(lateness.total_seconds() * 1000, 1)


async def test_nothing_is_left_running(dsn: str, connection: Any) -> None:
    before = asyncio.all_tasks()
    manager = QueueManager(dsn)
    arrived = anyio.Event()

    @manager.handler("queue")
    async def handle(_: Message) -> None:
        arrived.set()

    async with manager, anyio.create_task_group() as tasks:
        await manager.schedule("queue", every=3600)
        tasks.start_soon(manager.run)
        await arrived.wait()
        manager.stop()
    assert manager.health == {}
    assert asyncio.all_tasks() == before
    sessions = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    with anyio.fail_after(30):
        while await connection.fetchval(sessions):  # a closed session takes a moment to go
            pass


async def test_no_statement_of_ours_is_compiled_or_reads_a_table_it_need_not(dsn: str) -> None:
    """On the connections of both pools. A server with LLVM would take 150 ms for each send() otherwise."""
    async with QueueManager(dsn) as manager, manager._services() as services:
        for database in (manager.database, services):
            assert await database.fetchval("SHOW enable_seqscan") == "off"
            assert await database.fetchval("SHOW jit") == "off"
        plan = await manager.database.fetch(
            f"EXPLAIN ANALYZE {SEND_ONE.at('off')}", "m", "q", None, "1", "{}", 2, None, None, None, "c"
        )
        assert not [row for row in plan if "JIT" in row[0]]


async def test_the_applications_own_pool_can_be_used_and_stays_open(dsn: str) -> None:
    async with asyncpg.create_pool(dsn, min_size=1) as pool:
        async with QueueManager(pool=pool) as manager:
            await manager.schedule("queue", every=5)
        assert await pool.fetchval("SELECT count(*) FROM cron_schedules") == 1


async def test_a_pool_with_a_json_codec_is_fine(dsn: str) -> None:
    import json  # noqa: PLC0415

    async def use_json(connection: Any) -> None:
        await connection.set_type_codec("jsonb", encoder=json.dumps, decoder=json.loads, schema="pg_catalog")

    async with asyncpg.create_pool(dsn, min_size=1, init=use_json) as pool, QueueManager(pool=pool) as manager:
        made = await manager.schedule("queue", every=5, payload={"deep": [1, None, "x"]})
        assert (await manager.get_schedule(made.id)).payload == {"deep": [1, None, "x"]}


async def test_stopping_lets_running_handlers_finish(dsn: str, connection: Any) -> None:
    manager = QueueManager(dsn)
    begun, go_on = anyio.Event(), anyio.Event()

    @manager.handler("queue")
    async def handle(_: Message) -> None:
        begun.set()
        await go_on.wait()

    async with manager, anyio.create_task_group() as tasks:
        await manager.schedule("queue", every=3600)
        tasks.start_soon(manager.run)
        await begun.wait()
        manager.stop()
        await anyio.wait_all_tasks_blocked()
        go_on.set()
    assert await connection.fetchval("SELECT completed_at IS NOT NULL FROM queue_messages")


async def test_what_does_not_finish_in_the_grace_is_given_back(dsn: str, connection: Any) -> None:
    manager = QueueManager(settings=Settings.load(dsn=dsn, stop_grace_seconds=0.2))
    begun = anyio.Event()

    @manager.handler("queue")
    async def handle(_: Message) -> None:
        begun.set()
        await anyio.sleep_forever()

    async with manager, anyio.create_task_group() as tasks:
        await manager.schedule("queue", every=3600)
        tasks.start_soon(manager.run)
        await begun.wait()
        with capture_logs() as logs:
            manager.stop()
            await anyio.wait_all_tasks_blocked()
    row = await connection.fetchrow("SELECT attempts, completed_at FROM queue_messages")
    assert tuple(row) == (0, None)
    assert await connection.fetchval("SELECT count(*) FROM queue_tokens") == 0
    assert "worker_stopping" in [entry["event"] for entry in logs]


async def test_a_failing_service_does_not_end_the_worker(dsn: str, connection: Any) -> None:
    """The ticker's table is away for a while; when it is back, the tick fires."""
    manager = QueueManager(dsn)
    async with watching(dsn, "queue_messages") as watch, manager, anyio.create_task_group() as tasks:
        await connection.execute("ALTER TABLE queue_messages RENAME TO away")
        await manager.schedule("queue", every=3600)
        tasks.start_soon(manager.run)
        await watch_errors(manager)
        await connection.execute("ALTER TABLE away RENAME TO queue_messages")
        await watch.until("SELECT count(*) = 1 FROM queue_messages")
        manager.stop()


async def watch_errors(manager: QueueManager) -> None:
    """Until the ticker has failed twice; each look is one turn of the event loop."""
    with anyio.fail_after(30):
        while "tick-firer queue" not in manager.health or manager.health["tick-firer queue"].errors < 2:
            await anyio.lowlevel.checkpoint()


async def test_it_must_be_open_and_runs_once(dsn: str) -> None:
    manager = QueueManager(dsn)
    with pytest.raises(CronTicksError, match="async with"):
        await manager.schedule("queue", every=5)
    async with manager, anyio.create_task_group() as tasks:
        with pytest.raises(CronTicksError, match="open already"):
            await manager.__aenter__()
        tasks.start_soon(manager.run)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(CronTicksError, match="runs already"):
            await manager.run()
        manager.stop()


async def test_it_can_be_opened_and_run_again(dsn: str) -> None:
    manager = QueueManager(dsn)
    for _ in range(2):
        async with manager, anyio.create_task_group() as tasks:
            tasks.start_soon(manager.run)
            await anyio.wait_all_tasks_blocked()
            manager.stop()


async def test_an_applications_signal_handlers_are_left_or_put_back(dsn: str) -> None:
    def mine(*_: object) -> None: ...

    before = signal.signal(signal.SIGTERM, mine)
    try:
        for handle_signals in (True, False):
            manager = QueueManager(dsn)
            async with manager, anyio.create_task_group() as tasks:
                tasks.start_soon(partial(manager.run, handle_signals=handle_signals))
                await anyio.wait_all_tasks_blocked()
                assert (signal.getsignal(signal.SIGTERM) is mine) is not handle_signals
                manager.stop()
            assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


async def test_dsn_and_pool_exclude_each_other(dsn: str) -> None:
    async with asyncpg.create_pool(dsn, min_size=0) as pool:
        with pytest.raises(InvalidInputError, match="not both"):
            QueueManager(dsn, pool=pool)


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("postgresql://nobody@127.0.0.1:1/none", "no answer from PostgreSQL within 0.5 s"),
        ("not a dsn", "the DSN can't be used: invalid DSN"),
    ],
)
async def test_an_unreachable_server_is_said_so(address: str, says: str) -> None:
    settings = Settings.load(dsn=address, connect_timeout_seconds=0.5)
    with pytest.raises(DatabaseUnavailableError, match=says):
        async with QueueManager(settings=settings):
            pass


async def test_a_database_that_does_not_exist_is_said_so_at_once(dsn: str) -> None:
    with pytest.raises(DatabaseUnavailableError, match="no_such_database"):
        async with QueueManager(dsn.replace("/test_", "/no_such_database_")):
            pass
