"""The audits that workers make by themselves: one of all at a time, and all export what it found."""

import asyncio
from collections.abc import Iterator
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import asyncpg
import pytest
import structlog
from structlog.testing import capture_logs

from cron_ticks.audit_repository import AuditRepository
from cron_ticks.auditor import Auditor
from cron_ticks.audits import NOT_DEALT_WITH
from cron_ticks.database import Database, open_database
from cron_ticks.errors import CronTicksError
from cron_ticks.metrics import AUDITED, Metrics
from cron_ticks.settings import Settings
from support.moved_clock import Engine
from support.processes import Processes
from support.watching import watching
from token_queue import QueueManager
from token_queue.doubled import find_doubled

MINUTE = timedelta(minutes=1)
SECOND = timedelta(seconds=1)


@pytest.fixture(autouse=True)
def all_levels() -> Iterator[None]:
    """Whatever level a test before has configured for this process."""
    before = structlog.get_config() if structlog.is_configured() else None
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()
    if before is not None:
        structlog.configure(**before)


def value(metrics: Metrics, name: str) -> float | None:
    return metrics.registry.get_sample_value(f"cron_ticks_audit_{name}")


def auditor_of(database: Database, settings: Settings, metrics: Metrics | None = None) -> Auditor:
    audits = AuditRepository(database, settings, partial(find_doubled, database))
    return Auditor(audits, settings, metrics, draw=lambda: 0.0)


@pytest.fixture
async def begun(database: Database, connection: Any) -> Engine:
    """A schedule of once a minute that has fired for ten minutes, up to now."""
    now: datetime = await connection.fetchval("SELECT statement_timestamp()")
    engine = Engine(database, now - 10 * MINUTE)
    await engine.declare(every=60, jitter=None)
    await engine.run_until(now, step=20 * SECOND)
    return engine


@pytest.mark.sql
async def test_an_audit_is_kept_logged_and_exported(
    database: Database, settings: Settings, connection: Any, begun: Engine
) -> None:
    metrics = Metrics()
    with capture_logs() as logs:
        pause = await auditor_of(database, settings, metrics).run_once(now=begun.now)
    assert pause == settings.audit_interval_seconds
    (row,) = await connection.fetch("SELECT * FROM cron_audits")
    assert (row["started_at"], row["since"], row["until"]) == (begun.now, begun.now - 60 * MINUTE, begun.now)
    assert row["ended_at"] is not None
    assert (row["schedules"], row["expected"], row["enqueued"], row["pending"]) == (1, 10, 10, 0)
    assert (row["unexplained"], row["duplicate"], row["explained"], row["late"]) == (0, 0, 0, 0)
    (line,) = logs
    assert (line["event"], line["log_level"]) == ("audit_done", "info")
    assert (line["expected"], line["unexplained"]) == (10, 0)
    assert (value(metrics, "expected"), value(metrics, "enqueued")) == (10, 10)
    assert value(metrics, "timestamp_seconds") == begun.now.timestamp()
    assert all(value(metrics, name) is not None for name in AUDITED)


@pytest.mark.sql
async def test_what_it_finds_is_named_in_the_log_and_in_every_workers_metrics(
    database: Database, settings: Settings, connection: Any, begun: Engine
) -> None:
    removed = begun.now - 5 * MINUTE
    schedule_id = await connection.fetchval(
        "DELETE FROM cron_runs WHERE scheduled_for = $1 RETURNING schedule_id", removed
    )
    first, second = Metrics(), Metrics()
    with capture_logs() as logs:
        await auditor_of(database, settings, first).run_once(now=begun.now)
        await auditor_of(database, settings, second).run_once(now=begun.now + SECOND)
    (line,) = logs
    assert (line["event"], line["log_level"], line["unexplained"]) == ("audit_found", "warning", 1)
    assert line["findings"] == [f"{schedule_id} {removed.isoformat()}: unexplained: {NOT_DEALT_WITH}"]
    assert value(first, "unexplained") == value(second, "unexplained") == 1
    assert value(second, "expected") == 10


@pytest.mark.sql
async def test_of_many_workers_one_audits(dsn: str, settings: Settings, connection: Any, begun: Engine) -> None:
    """Each with a pool of its own."""

    async def work() -> None:
        async with open_database(settings, dsn=dsn) as database:
            await auditor_of(database, settings).run_once(now=begun.now)

    with capture_logs() as logs:
        await asyncio.gather(*(work() for _ in range(8)))
    assert [line["event"] for line in logs] == ["audit_done"]
    assert await connection.fetchval("SELECT count(*) FROM cron_audits") == 1


@pytest.mark.sql
async def test_the_next_comes_after_the_interval_and_after_a_long_rest(
    database: Database, settings: Settings, connection: Any, begun: Engine
) -> None:
    auditor = auditor_of(database, settings)
    await auditor.run_once(now=begun.now)
    assert await auditor.run_once(now=begun.now + 4 * MINUTE) == 60
    assert await connection.fetchval("SELECT count(*) FROM cron_audits") == 1
    await auditor.run_once(now=begun.now + 5 * MINUTE)
    assert await connection.fetchval("SELECT count(*) FROM cron_audits") == 2
    await connection.execute("UPDATE cron_audits SET ended_at = started_at + interval '10 seconds'")
    assert await auditor.run_once(now=begun.now + 10 * MINUTE) == pytest.approx(500 - 300)
    assert await connection.fetchval("SELECT count(*) FROM cron_audits") == 2


@pytest.mark.sql
async def test_a_worker_that_died_in_its_audit_is_not_waited_for(
    database: Database, settings: Settings, begun: Engine
) -> None:
    audits, metrics = AuditRepository(database, settings), Metrics()
    assert await audits.begin_audit(now=begun.now) == begun.now
    assert await audits.begin_audit(now=begun.now + MINUTE) is None
    auditor = auditor_of(database, settings, metrics)
    assert await auditor.run_once(now=begun.now + MINUTE) == 240
    assert value(metrics, "timestamp_seconds") == 0
    await auditor.run_once(now=begun.now + 5 * MINUTE)
    assert value(metrics, "timestamp_seconds") == (begun.now + 5 * MINUTE).timestamp()


@pytest.mark.sql
async def test_none_begins_while_another_reads(
    dsn: str, settings: Settings, connection: Any, begun: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Audits that take longer than their interval don't pile up; one whose connection broke is in nobody's way."""
    reading, go_on = asyncio.Event(), asyncio.Event()
    collect = AuditRepository._collect
    backends: list[int] = []

    async def held(self: AuditRepository, span: Any, snapshot: Any, **options: Any) -> Any:
        backends.append(await self.database.fetchval("SELECT pg_backend_pid()", connection=snapshot))
        reading.set()
        await go_on.wait()
        return await collect(self, span, snapshot, **options)

    async with open_database(settings, dsn=dsn) as one, open_database(settings, dsn=dsn) as two:
        first, second = auditor_of(one, settings), auditor_of(two, settings)
        with monkeypatch.context() as patched:
            patched.setattr(AuditRepository, "_collect", held)
            under_way = asyncio.create_task(first.run_once(now=begun.now))
            await reading.wait()
        by_hand = await AuditRepository(two, settings).audit(now=begun.now)
        assert by_hand.total.expected == 10
        pause = await second.run_once(now=begun.now + 10 * MINUTE)
        assert pause == 1
        assert await AuditRepository(two, settings).audit_alone(begun.now) is None
        assert await connection.fetchval("SELECT count(*) FROM cron_audits") == 1
        await connection.execute("SELECT pg_terminate_backend($1, 10000)", *backends)
        await second.run_once(now=begun.now + 10 * MINUTE)
        assert await connection.fetchval("SELECT count(*) FROM cron_audits WHERE ended_at IS NOT NULL") == 1
        go_on.set()
        with pytest.raises((CronTicksError, asyncpg.PostgresError, asyncpg.InterfaceError, OSError)):
            await under_way


@pytest.mark.sql
async def test_what_nobody_fires_is_exported_as_overdue(
    database: Database, settings: Settings, connection: Any, begun: Engine
) -> None:
    later, metrics = begun.now + 5 * MINUTE, Metrics()
    with capture_logs() as logs:
        await auditor_of(database, settings, metrics).run_once(now=later)
    assert (value(metrics, "pending"), value(metrics, "overdue")) == (4, 3)
    assert await connection.fetchval("SELECT overdue FROM cron_audits") == 3
    assert (logs[0]["event"], logs[0]["overdue"]) == ("audit_done", 3)


async def test_a_worker_with_nothing_due_sends_one_statement(
    database: Database, settings: Settings, begun: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    auditor = auditor_of(database, settings)
    await auditor.run_once(now=begun.now)
    statements = []
    fetch = Database.fetch

    async def counted(self: Database, text: str, *arguments: Any, **options: Any) -> Any:
        statements.append(text)
        return await fetch(self, text, *arguments, **options)

    monkeypatch.setattr(Database, "fetch", counted)
    await auditor.run_once(now=begun.now + MINUTE)
    assert len(statements) == 1


async def test_workers_audit_by_themselves(dsn: str, processes: Processes) -> None:
    async with QueueManager(dsn) as manager, watching(dsn, "cron_audits", "cron_runs") as watch:
        await manager.schedule("queue", every=3600, jitter=None)
        workers = [await processes.worker(dsn, audit_interval_seconds="1") for _ in range(2)]
        await watch.until("SELECT count(*) = 1 FROM cron_runs")
        await watch.until(
            "SELECT count(*) > 1 FROM cron_audits WHERE enqueued = 1 AND unexplained = 0 AND duplicate = 0"
        )
    assert all(event["event"] != "audit_found" for worker in workers for event in worker.events)


async def test_without_an_interval_nobody_audits(dsn: str, processes: Processes) -> None:
    async with QueueManager(dsn) as manager, watching(dsn, "cron_runs") as watch:
        await processes.worker(dsn, audit_interval_seconds="0")
        await manager.schedule("queue", every=3600, jitter=None)
        await watch.until("SELECT count(*) = 1 FROM cron_runs")
        await watch.until("SELECT count(*) = 0 FROM cron_audits")
