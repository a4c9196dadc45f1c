"""Real workers, real crashes: the server goes away, workers die, and every occurrence still fires once."""

import signal
from pathlib import Path
from typing import Any

import pytest

from cron_ticks.embedded import EmbeddedServer
from cron_ticks.settings import Settings
from support.processes import Processes
from support.servers import postmaster, program_folder
from support.watching import watching
from token_queue import QueueManager

TESTS = Path(__file__).parent


async def fired_and_expected(connection: Any, schedule: Any) -> tuple[list[Any], list[Any]]:
    rows = await connection.fetch("SELECT scheduled_for FROM queue_messages ORDER BY scheduled_for")
    fired = [row["scheduled_for"] for row in rows]
    return fired, schedule.rule.occurrences(schedule.anchor_at, fired[-1] + schedule.interval / 2)


async def test_a_killed_worker_is_replaced_by_the_others(dsn: str, processes: Processes, connection: Any) -> None:
    async with QueueManager(dsn) as manager, watching(dsn, "queue_messages") as watch:
        schedule = await manager.schedule("queue", every=1)
        victim = await processes.worker(dsn)
        survivor = await processes.worker(dsn)
        await watch.until("SELECT count(*) >= 3 FROM queue_messages")
        await victim.kill()
        await watch.until("SELECT count(*) >= 7 FROM queue_messages")
        survivor.send(signal.SIGTERM)
        assert await survivor.wait() == 0
    fired, expected = await fired_and_expected(connection, schedule)
    assert fired == expected


async def test_workers_go_on_after_the_server_crashed(tmp_path: Path, processes: Processes) -> None:
    """An immediate shutdown is a crash for whoever is connected."""
    server = EmbeddedServer(tmp_path / "data", program_folder(18))
    server.acquire()
    try:
        async with QueueManager(server.dsn) as manager:
            schedule = await manager.schedule("queue", every=1)
            worker = await processes.worker(server.dsn)
            await worker.wait_for("handled", times=3)
            crashing = postmaster(server)
            crashing.send_signal(signal.SIGQUIT)
            crashing.wait(timeout=30)
            await worker.wait_for("service_failed")
            seen = len([event for event in worker.events if event["event"] == "handled"])
            server.revive()
            await worker.wait_for("service_recovered", where=lambda line: line["service"] == "message-ticker")
            await worker.wait_for("handled", times=seen + 3)
            worker.send(signal.SIGTERM)
            assert await worker.wait() == 0
            async with manager.database.connection() as connection:
                fired, expected = await fired_and_expected(connection, schedule)
        assert fired == expected
    finally:
        server.release()


async def test_sigterm_lets_a_handler_finish_and_exits_cleanly(dsn: str, processes: Processes, connection: Any) -> None:
    async with QueueManager(dsn) as manager:
        await manager.schedule("queue", every=3600)
    worker = await processes.worker(dsn, "until_told")
    await worker.wait_for("handling")
    worker.send(signal.SIGTERM)
    await worker.wait_for("worker_stopping")
    worker.tell("go on")
    assert await worker.wait() == 0
    names = [event["event"] for event in worker.events if not event["event"].startswith("audit")]
    assert names[-4:] == ["signal_received", "worker_stopping", "handled", "worker_stopped"]
    assert await connection.fetchval("SELECT completed_at IS NOT NULL FROM queue_messages")


async def test_the_grace_is_bounded_and_the_message_is_given_back(
    dsn: str, processes: Processes, connection: Any
) -> None:
    async with QueueManager(dsn) as manager:
        await manager.schedule("queue", every=3600)
    worker = await processes.worker(dsn, "endless", stop_grace_seconds="0.5")
    await worker.wait_for("handling")
    worker.send(signal.SIGINT)
    assert await worker.wait() == 0
    row = await connection.fetchrow("SELECT attempts, completed_at FROM queue_messages")
    assert tuple(row) == (0, None)
    assert await connection.fetchval("SELECT count(*) FROM queue_tokens") == 0


async def test_stopping_is_clean_even_while_the_server_is_away(tmp_path: Path, processes: Processes) -> None:
    server = EmbeddedServer(tmp_path / "data", program_folder(18), durable=False)
    server.acquire()
    try:
        async with QueueManager(server.dsn) as manager:
            await manager.schedule("queue", every=3600)
        worker = await processes.worker(server.dsn, "endless", stop_grace_seconds="0.5")
        await worker.wait_for("handling")
        server.cluster.stop()
        await worker.wait_for("service_failed")
        worker.send(signal.SIGTERM)
        assert await worker.wait() == 0
        assert worker.events[-1]["event"] == "worker_stopped"
    finally:
        server.release()


async def test_sigterm_while_starting_gives_back_what_was_begun(embedded_folder: Path, processes: Processes) -> None:
    """Whenever it comes: no server without a user is left behind."""
    server = EmbeddedServer(embedded_folder, program_folder(18))
    worker = await processes.cron_ticks(
        "worker",
        "--app",
        "support.apps:quick",
        environment={"CRON_TICKS_EMBEDDED_DATA_DIR": str(embedded_folder), "PYTHONPATH": str(TESTS)},
    )
    await worker.wait_for("embedded_server_started")
    worker.send(signal.SIGTERM)
    assert await worker.wait() in {0, 128 + signal.SIGTERM}
    assert not server.accepts_connections()


async def test_a_second_signal_ends_the_grace(dsn: str, processes: Processes, connection: Any) -> None:
    async with QueueManager(dsn) as manager:
        await manager.schedule("queue", every=3600)
    worker = await processes.worker(dsn, "endless", stop_grace_seconds="3600")
    await worker.wait_for("handling")
    worker.send(signal.SIGTERM)
    await worker.wait_for("worker_stopping")
    worker.send(signal.SIGTERM)
    assert await worker.wait() == 0
    row = await connection.fetchrow("SELECT attempts, completed_at FROM queue_messages")
    assert tuple(row) == (0, None)
    assert await connection.fetchval("SELECT count(*) FROM queue_tokens") == 0


async def test_a_worker_waits_for_a_server_that_starts_later(tmp_path: Path, processes: Processes) -> None:
    server = EmbeddedServer(tmp_path / "data", program_folder(18), durable=False)
    worker = await processes.cron_ticks(
        "worker",
        "--app",
        "support.apps:quick",
        environment={"CRON_TICKS_DSN": server.dsn, "PYTHONPATH": str(TESTS)},
    )
    await worker.wait_for("database_unreachable", times=2)
    server.acquire()
    try:
        await worker.wait_for("worker_started")
        worker.send(signal.SIGTERM)
        assert await worker.wait() == 0
    finally:
        server.release()


async def test_a_statement_that_hangs_meets_its_deadline(dsn: str, connection: Any) -> None:
    settings = Settings.load(dsn=dsn, statement_timeout_seconds=2)
    async with QueueManager(settings=settings) as manager:
        async with connection.transaction():
            await connection.execute("LOCK TABLE cron_schedules IN ACCESS EXCLUSIVE MODE")
            with pytest.raises(TimeoutError):
                await manager.schedule("queue", every=5)
        await manager.schedule("queue", every=5)


async def test_a_service_whose_statement_hangs_meets_its_deadline_and_goes_on(
    dsn: str, processes: Processes, connection: Any
) -> None:
    async with QueueManager(dsn) as manager, watching(dsn, "queue_messages") as watch:
        async with connection.transaction():
            await connection.execute("LOCK TABLE cron_ticks IN ACCESS EXCLUSIVE MODE")
            worker = await processes.worker(dsn, statement_timeout_seconds="2")
            failed = await worker.wait_for("service_failed", where=lambda line: line["service"] == "tick-firer queue")
            assert failed["error"].startswith("TimeoutError")
        await manager.schedule("queue", every=3600)
        await watch.until("SELECT count(completed_at) = 1 FROM queue_messages")
        worker.send(signal.SIGTERM)
        assert await worker.wait() == 0
