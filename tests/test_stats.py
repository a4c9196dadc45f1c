"""Statistics: by schedule, by queue and in total."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from cron_ticks.audit_repository import AuditRepository
from cron_ticks.audit_results import Figures, Statistics
from cron_ticks.database import Database
from cron_ticks.errors import InvalidInputError
from support.moved_clock import Engine
from token_queue import QueueManager

pytestmark = pytest.mark.sql

START = datetime(2026, 3, 1, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)


@pytest.fixture
def engine(database: Database) -> Engine:
    return Engine(database, START)


async def stats(engine: Engine, **options: Any) -> Statistics:
    audits = AuditRepository(engine.repository.database, engine.settings)
    return await audits.stats(now=engine.now, **options)


async def test_each_figure_is_counted_by_schedule_by_queue_and_in_total(engine: Engine, connection: Any) -> None:
    first = await engine.declare("reports", every=60, jitter=None, name="first")
    second = await engine.declare("reports", every=60, jitter=None, name="second", workspace_id="ws")
    third = await engine.declare("mails", every=120, jitter=None, name="third")
    await engine.run_until(START + 10 * MINUTE, step=20 * SECOND)
    change = "UPDATE cron_runs SET {} WHERE schedule_id = $1 AND scheduled_for = $2"

    async def ended(schedule_id: str, minute: int, assignments: str) -> None:
        await connection.execute(change.format(assignments), schedule_id, START + minute * MINUTE)

    await connection.execute("UPDATE cron_runs SET lateness = interval '1 second'")
    await ended(first.id, 1, "recovered = true, recovery_time = interval '4 seconds', lateness = interval '11 seconds'")
    await ended(first.id, 2, "recovered = true, recovery_time = interval '2 seconds', lateness = interval '11 seconds'")
    await ended(first.id, 3, "recovered = true, outcome = 'failed', lateness = NULL")
    await ended(first.id, 4, "outcome = 'expired', lateness = NULL")
    await ended(first.id, 5, "outcome = 'missed', lateness = NULL")
    await ended(third.id, 2, "outcome = 'overlapped', lateness = NULL")
    await engine.repository.trigger(second.id, now=engine.now)
    await engine.fire()
    found = await stats(engine)
    by_name = {schedule.name: schedule for schedule in found.schedules}
    assert set(by_name) == {"first", "second", "third"}
    one = by_name["first"]
    assert (one.schedule_id, one.workspace_id) == (first.id, None)
    assert (one.expected, one.enqueued, one.missed, one.pending) == (10, 7, 1, 0)
    assert (one.recoveries_tried, one.recoveries_succeeded) == (4, 2)
    assert (one.recoveries_failed, one.recoveries_abandoned) == (1, 1)
    assert one.mean_recovery_seconds == 3
    assert one.success_rate == 0.7
    assert one.lateness_p50 == 1
    assert one.lateness_p95 == one.lateness_p99 == 11
    assert (by_name["second"].success_rate, by_name["second"].lateness_p99) == (1, 1)
    assert (by_name["second"].recoveries_tried, by_name["second"].mean_recovery_seconds) == (0, None)
    assert [queue.queue_name for queue in found.queues] == ["mails", "reports"]
    mails, reports = found.queues
    assert (mails.expected, mails.enqueued, mails.success_rate, mails.lateness_p95) == (5, 4, 0.8, 1)
    assert (reports.expected, reports.enqueued, reports.missed, reports.recoveries_tried) == (20, 17, 1, 4)
    total = found.total
    assert (total.expected, total.enqueued, total.missed, total.recoveries_succeeded) == (25, 21, 1, 2)
    assert total.success_rate == 21 / 25
    assert (total.lateness_p50, total.lateness_p99) == (1, 11)
    assert total.mean_recovery_seconds == 3
    alone = await stats(engine, schedule_id=third.id)
    assert [schedule.name for schedule in alone.schedules] == ["third"]
    assert alone.total.expected == 5


async def test_a_stretch_of_missed_occurrences_counts_each_of_them(engine: Engine, connection: Any) -> None:
    schedule = await engine.declare(every=60, jitter=None)
    await engine.run_until(START + 2 * MINUTE, step=20 * SECOND)
    await connection.execute(
        """INSERT INTO cron_runs (schedule_id, scheduled_for, version, origin, outcome, ended_at, attempts,
            missed_since, occurrences)
        VALUES ($1, $2, 1, 'schedule', 'missed', $2, 0, $3, 5)""",
        schedule.id,
        START + 7 * MINUTE,
        START + 3 * MINUTE,
    )
    engine.now = START + 10 * MINUTE
    await connection.execute("UPDATE cron_schedule_cursors SET next_tick_needed_at = $1", START + 8 * MINUTE)
    found = (await stats(engine)).total
    assert (found.expected, found.enqueued, found.missed, found.pending) == (10, 3, 5, 2)
    assert found.success_rate == 3 / 8


async def test_after_an_edit_each_queue_counts_what_it_had(engine: Engine) -> None:
    schedule = await engine.declare("before", every=60, jitter=None)
    await engine.run_until(START + 4.5 * MINUTE, step=20 * SECOND)
    await engine.edit(schedule.id, queue_name="after")
    await engine.run_until(START + 10 * MINUTE, step=20 * SECOND)
    found = await stats(engine)
    assert [(queue.queue_name, queue.expected, queue.enqueued) for queue in found.queues] == [
        ("after", 5, 5),
        ("before", 5, 5),
    ]
    assert all(queue.lateness_p50 is not None for queue in found.queues)
    (alone,) = found.schedules
    assert (alone.expected, alone.enqueued) == (10, 10)


async def test_runs_whose_version_is_gone_are_not_taken_for_the_total(engine: Engine, connection: Any) -> None:
    """They have no queue any more."""
    kept = await engine.declare("kept", every=60, jitter=None, name="kept")
    gone = await engine.declare("gone", every=60, jitter=None, name="gone")
    await engine.run_until(START + 10 * MINUTE, step=20 * SECOND)
    await connection.execute(
        """UPDATE cron_runs SET recovered = true, recovery_time = interval '5 seconds', lateness = interval '7 seconds'
        WHERE schedule_id = $1""",
        kept.id,
    )
    before = (await stats(engine)).total
    assert (before.recoveries_tried, before.lateness_p99) == (10, 7)
    await connection.execute("DELETE FROM cron_schedule_versions WHERE schedule_id = $1", gone.id)
    after = await stats(engine)
    assert (after.total.recoveries_tried, after.total.mean_recovery_seconds) == (10, 5)
    assert (after.total.lateness_p50, after.total.lateness_p99) == (before.lateness_p50, 7)
    assert [(queue.queue_name, queue.recoveries_tried) for queue in after.queues] == [("kept", 10)]


async def test_where_nothing_happened_there_is_no_rate(engine: Engine) -> None:
    await engine.declare(every=3600, jitter=None, starts_at=START + 60 * MINUTE)
    found = await stats(engine)
    assert found.total == Figures()
    assert found.total.success_rate is None
    assert (found.schedules, found.queues) == ([], [])


async def test_the_manager_has_statistics_of_the_last_hour(dsn: str, connection: Any) -> None:
    async with QueueManager(dsn) as manager:
        await manager.schedule("queue", every=60, jitter=None)
        found = await manager.stats()
        assert found.until - found.since == timedelta(hours=1)
        assert (found.total.expected, found.total.pending) == (1, 1)
        assert found.total.success_rate is None
        with pytest.raises(InvalidInputError, match="since: must be before until"):
            await manager.stats(since=found.until, until=found.since)
        await connection.execute("INSERT INTO cron_retention VALUES ('runs', now())")
        with pytest.raises(InvalidInputError, match="since: the ledger is kept from"):
            await manager.stats(since=found.since)
