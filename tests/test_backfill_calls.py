"""Backfills as an application and a fleet see them: calls, managers, outside sinks, workers that are killed."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import anyio
import asyncpg
import pytest
from structlog.testing import capture_logs

from cron_ticks import LeasedTick
from cron_ticks.database import Database
from cron_ticks.errors import BackfillNotFoundError, InvalidInputError, ScheduleNotFoundError
from cron_ticks.metrics import Metrics
from cron_ticks.repository import CronRepository
from cron_ticks.schedule_manager import ScheduleManager
from cron_ticks.settings import Settings
from support.processes import Processes
from support.watching import watching
from token_queue import Message, QueueManager

DAY, HOUR = timedelta(days=1), timedelta(hours=1)
HOLD = """
CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(4711);
    RETURN NEW;
END $$;
CREATE TRIGGER hold BEFORE UPDATE ON cron_backfills FOR EACH ROW EXECUTE FUNCTION hold();
"""


def midnight() -> datetime:
    return datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)


@pytest.mark.sql
@pytest.mark.pooled
async def test_the_calls(settings: Settings, connection: Any) -> None:
    end = midnight()
    manager = QueueManager(settings=settings.model_copy(update={"actor": "somebody"}))
    async with manager:
        schedule = await manager.schedule("queue", cron="0 * * * *")
        begun = await manager.backfill(schedule.id, end - DAY, end, per_minute=60)
        assert (begun.total, begun.made, begun.pending, begun.outcome) == (24, 10, 10, None)
        assert (begun.schedule_id, begun.per_minute, begun.created_by) == (schedule.id, 60, "somebody")
        assert (begun.start, begun.end) == (end - DAY, end)
        assert begun.position == end - DAY + 9 * HOUR + timedelta(microseconds=1)
        assert await manager.get_backfill(begun.id) == begun
        other = await manager.backfill(schedule.id, end - 2 * DAY, end - DAY)
        assert [found.id for found in await manager.list_backfills()] == [other.id, begun.id]
        assert [found.id for found in await manager.list_backfills(schedule.id, limit=1)] == [other.id]
        assert await manager.list_backfills(schedule.id, after_id=other.id) == [begun]
        assert await manager.list_backfills("cron_other") == []
        cancelled = await manager.cancel_backfill(begun.id)
        assert (cancelled.outcome, cancelled.reason) == ("cancelled", "cancelled by somebody")
        assert cancelled.pending == 10, "what was made will fire"
        assert await manager.cancel_backfill(begun.id) == cancelled
    assert await connection.fetchval("SELECT count(*) FROM cron_backfills WHERE due_at IS NOT NULL") == 1


async def test_what_is_refused_names_its_field(dsn: str) -> None:
    async with QueueManager(dsn) as manager:
        schedule = await manager.schedule("queue", every=60)
        now = datetime.now(UTC)
        for field, arguments, options in (
            ("schedule_id", ("", now - HOUR, now), {}),
            ("start", (schedule.id, "yesterday", now), {}),
            ("start", (schedule.id, now - 90 * DAY, now), {}),
            ("end", (schedule.id, now - HOUR, now + HOUR), {}),
            ("end", (schedule.id, now - 8 * DAY, now - HOUR), {}),
            ("end", (schedule.id, now, now), {}),
            ("per_minute", (schedule.id, now - HOUR, now), {"per_minute": 0}),
        ):
            with pytest.raises(InvalidInputError) as refused:
                await manager.backfill(*arguments, **options)  # type: ignore[arg-type]
            assert refused.value.field == field
        with pytest.raises(ScheduleNotFoundError):
            await manager.backfill("cron_none", now - HOUR, now - HOUR / 2)
        for call in (manager.get_backfill, manager.cancel_backfill):
            with pytest.raises(BackfillNotFoundError, match="there is no backfill backfill_none"):
                await call("backfill_none")
        with pytest.raises(BackfillNotFoundError):
            await manager.list_backfills(after_id="backfill_none")
        assert await manager.list_backfills() == []


@pytest.mark.sql
async def test_a_manager_goes_on_with_it_and_comes_back_in_time(database: Database, settings: Settings) -> None:
    metrics = Metrics()
    worker = ScheduleManager(database, CronRepository(database, settings), settings, metrics)
    async with QueueManager(settings=settings) as manager:
        assert settings.manager_interval_seconds - 5 < await worker.run_once() <= settings.manager_interval_seconds
        schedule = await manager.schedule("queue", cron="0 * * * *")
        end = midnight()
        begun = await manager.backfill(schedule.id, end - 30 * DAY, end, per_minute=60_000)
        assert begun.made == 500
        await database.fetch("UPDATE {schema}.cron_backfills SET due_at = statement_timestamp()")
        pause = await worker.run_once()
        assert (await manager.get_backfill(begun.id)).made == 720
        assert 0.1 <= pause <= 1
        await database.fetch("DELETE FROM {schema}.cron_ticks WHERE origin = 'backfill'")
        await database.fetch("UPDATE {schema}.cron_backfills SET due_at = statement_timestamp()")
        with capture_logs() as logs:
            assert settings.manager_interval_seconds - 5 < await worker.run_once() <= settings.manager_interval_seconds
        [ended] = [line for line in logs if line["event"] == "backfill_ended"]
        assert (ended["backfill_id"], ended["outcome"]) == (begun.id, "done")


async def test_trouble_with_one_stops_no_other(database: Database, settings: Settings, connection: Any) -> None:
    end = midnight()
    async with QueueManager(settings=settings) as manager:
        schedules = [await manager.schedule("queue", cron="0 * * * *", name=name) for name in ("first", "second")]
        begun = [await manager.backfill(schedule.id, end - DAY, end, per_minute=6) for schedule in schedules]
        await connection.execute("UPDATE cron_backfills SET due_at = statement_timestamp()")
        await connection.execute(
            """CREATE FUNCTION out_of_space() RETURNS trigger LANGUAGE plpgsql AS
            $$BEGIN RAISE EXCEPTION USING ERRCODE = '53100'; END$$;
            CREATE TRIGGER space BEFORE INSERT ON cron_ticks FOR EACH ROW WHEN (NEW.schedule_name = 'first')
            EXECUTE FUNCTION out_of_space()"""
        )
        with pytest.raises(asyncpg.DiskFullError):
            await ScheduleManager(database, CronRepository(database, settings), settings).run_once()
        found = [await manager.get_backfill(backfill.id) for backfill in begun]
        assert [(backfill.made, backfill.outcome) for backfill in found] == [(1, None), (2, None)]


@pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
async def test_an_outside_sink_gets_it(dsn: str, connection: Any, delivery: Any) -> None:
    manager = QueueManager(dsn)
    published: list[tuple[str, datetime]] = []

    @manager.sink("outside")
    async def publish(ticks: Sequence[LeasedTick]) -> None:
        published.extend((tick.origin, tick.scheduled_for) for tick in ticks)

    async with manager:
        schedule = await manager.schedule("queue", cron="0 * * * *", sink="outside", delivery=delivery)
        end = midnight()
        begun = await manager.backfill(schedule.id, end - DAY, end, per_minute=60_000)
        async with watching(dsn, "cron_backfills") as watch, anyio.create_task_group() as tasks:
            tasks.start_soon(partial(manager.run, handle_signals=False))
            await watch.until("SELECT ended_at IS NOT NULL FROM cron_backfills")
            manager.stop()
        assert (await manager.get_backfill(begun.id)).outcome == "done"
    assert sorted(published) == [("backfill", end - DAY + k * HOUR) for k in range(24)]
    latest = await connection.fetchval("SELECT max(lateness) FROM cron_runs WHERE origin = 'backfill'")
    assert latest < timedelta(minutes=1), "from its place in the pace, not from its time"


async def test_what_was_backfilled_is_no_coverage() -> None:
    metrics = Metrics()
    metrics.note_overlapped(["backfill"])
    assert metrics.registry.get_sample_value("cron_ticks_coverage_ratio") == 1
    metrics.note_overlapped(["schedule"])
    metrics.note_fired([("backfill", [0.0] * 9)])
    assert metrics.registry.get_sample_value("cron_ticks_coverage_ratio") == 0
    assert metrics.registry.get_sample_value("cron_ticks_fired_total", {"origin": "backfill"}) == 9


async def test_handlers_get_the_origin(dsn: str) -> None:
    manager = QueueManager(dsn)
    seen: list[str] = []

    @manager.handler("queue")
    async def handle(message: Message) -> None:
        seen.append(f"{message.headers['origin']} {message.headers['scheduled_for']}")
        manager.stop()

    async with manager:
        schedule = await manager.schedule("queue", cron="30 12 * * *")
        end = midnight()
        await manager.backfill(schedule.id, end - DAY, end)
        await manager.run(handle_signals=False)
    assert seen == [f"backfill {end - DAY:%Y-%m-%d}T12:30:00.000000Z"]


async def until(connection: Any, condition: str) -> None:
    """For what no trigger tells of: who waits for a lock."""
    async with asyncio.timeout(60):
        while not await connection.fetchval(condition):
            await connection.fetchval("SELECT pg_sleep(0.02)")


async def test_a_worker_that_is_killed_in_the_middle_of_a_step_leaves_nothing_behind(
    dsn: str, connection: Any, processes: Processes
) -> None:
    async with QueueManager(dsn) as manager:
        schedule = await manager.schedule("queue", cron="0 * * * *")
        end = midnight()
        begun = await manager.backfill(schedule.id, end - 10 * DAY, end, per_minute=600)
        assert begun.made == 100
        await connection.execute("UPDATE cron_backfills SET due_at = statement_timestamp()")
        await connection.execute(HOLD)
        await connection.execute("SELECT pg_advisory_lock(4711)")
        worker = await processes.worker(dsn, "without_handlers")
        await until(connection, "SELECT count(*) = 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
        await worker.kill()
        await connection.execute("SELECT pg_advisory_unlock(4711)")
        await connection.execute("DROP TRIGGER hold ON cron_backfills")  # waits for the end of its transaction
        left = await manager.get_backfill(begun.id)
        assert (left.made, left.position) == (100, begun.position)
        beyond = "SELECT count(*) FROM cron_ticks WHERE origin = 'backfill' AND scheduled_for >= $1"
        assert await connection.fetchval(beyond, begun.position) == 0
        async with watching(dsn, "cron_backfills") as watch:
            await connection.execute("UPDATE cron_backfills SET per_minute = 60000")
            for _ in range(2):
                await processes.worker(dsn, "quiet")
            await watch.until("SELECT ended_at IS NOT NULL FROM cron_backfills")
        done = await manager.get_backfill(begun.id)
    assert (done.outcome, done.made, done.skipped, done.pending) == ("done", 240, 0, 0)
    rows = await connection.fetch("SELECT scheduled_for FROM queue_messages WHERE scheduled_for < $1", end)
    assert Counter(row[0] for row in rows) == Counter(end - 10 * DAY + k * HOUR for k in range(240))
    assert await connection.fetchval("SELECT count(*) FROM cron_runs WHERE origin = 'backfill'") == 240


async def test_a_process_that_is_killed_after_the_first_step_is_not_needed(
    dsn: str, connection: Any, processes: Processes
) -> None:
    """The range begins with a call that never returns to its caller: workers finish what it began."""
    async with QueueManager(dsn) as manager:
        schedule = await manager.schedule("queue", cron="0 * * * *")
    end = midnight()
    await connection.execute(HOLD)
    await connection.execute("SELECT pg_advisory_lock(4711)")
    arguments = ("backfill", "start", schedule.id, "--from", (end - DAY).isoformat(), "--to", end.isoformat())
    caller = await processes.cron_ticks(*arguments, environment={"CRON_TICKS_DSN": dsn})
    await until(connection, "SELECT count(*) = 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
    await caller.kill()
    await connection.execute("SELECT pg_advisory_unlock(4711)")
    await connection.execute("DROP TRIGGER hold ON cron_backfills")
    assert await connection.fetchval("SELECT count(*) FROM cron_ticks WHERE origin = 'backfill'") == 0
    async with watching(dsn, "cron_backfills") as watch:
        await processes.worker(dsn, "quiet")
        await watch.until("SELECT outcome = 'done' AND made = 24 FROM cron_backfills")
    assert await connection.fetchval("SELECT count(*) FROM queue_messages WHERE scheduled_for < $1", end) == 24
