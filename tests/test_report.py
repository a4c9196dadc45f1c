"""The report of `cron-ticks up`: it must see what goes wrong."""

from datetime import datetime, timedelta
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from cron_ticks.cli.report import Report, database_clock, read_report, report_table
from cron_ticks.database import Database
from cron_ticks.repository import CronRepository
from cron_ticks.schedule_manager import ScheduleManager
from cron_ticks.schedules import define_schedule
from cron_ticks.settings import Settings
from token_queue.queue_repository import QUEUE_SINK

pytestmark = pytest.mark.sql


async def fire_for_a_while(database: Database, settings: Settings) -> datetime:
    """A schedule of one second, begun ten seconds ago, fired up to now: eleven occurrences."""
    repository = CronRepository(database, settings)
    now = await database_clock(database)
    begun = now - timedelta(seconds=10)
    definition = define_schedule("queue", every=1, jitter=None, workspace_id="ws")
    await repository.save_schedule(definition, now=begun)
    await ScheduleManager(database, repository, settings).run_once()
    await repository.fire_due_ticks(QUEUE_SINK, ticker_id="ticker_me", limit=1000, now=now)
    return begun


async def test_all_is_well(database: Database, settings: Settings) -> None:
    report = await read_report(database, await fire_for_a_while(database, settings))
    assert report.fired == 11
    assert (report.duplicates, report.missed, report.problem) == (0, 0, None)
    assert report.fired_by == {"ticker_me": report.fired}
    assert report.as_json()["schedules"][0]["name"] == "queue"
    assert report_table(report).row_count == 1


async def test_a_tick_removed_by_hand_is_missed(database: Database, settings: Settings, connection: Any) -> None:
    since = await fire_for_a_while(database, settings)
    removed = await connection.fetch(
        """DELETE FROM queue_messages WHERE scheduled_for IN (SELECT scheduled_for FROM queue_messages OFFSET 3 LIMIT 2)
        RETURNING id"""
    )
    kept_in_the_ledger = await read_report(database, since)  # as what was completed long ago is
    assert (kept_in_the_ledger.missed, kept_in_the_ledger.problem) == (0, None)
    await connection.execute("DELETE FROM cron_runs WHERE message_id = ANY ($1)", [row["id"] for row in removed])
    report = await read_report(database, since)
    assert (report.missed, report.duplicates) == (2, 0)
    assert report.problem == "0 duplicate(s), 2 missed"


async def test_a_message_put_in_twice_is_a_duplicate(database: Database, settings: Settings, connection: Any) -> None:
    since = await fire_for_a_while(database, settings)
    await connection.execute(
        """INSERT INTO queue_messages (id, queue_name, payload, schedule_id, scheduled_for, process_after, inserted_at)
        SELECT 'again', queue_name, payload, schedule_id, scheduled_for, process_after, inserted_at
        FROM queue_messages LIMIT 1"""
    )
    report = await read_report(database, since)
    assert (report.missed, report.duplicates) == (0, 1)
    assert report.problem == "1 duplicate(s), 0 missed"


async def test_what_is_due_for_a_long_time_and_not_fired_is_a_problem(
    database: Database, settings: Settings, connection: Any
) -> None:
    repository = CronRepository(database, settings)
    now = await database_clock(database)
    since = now - timedelta(seconds=15)
    await repository.save_schedule(define_schedule("queue", every=6, jitter=None), now=since)
    with_ticks = await read_report(database, since, now=now)
    assert (with_ticks.waiting, with_ticks.missed) == (3, 0)
    assert with_ticks.problem is not None
    assert "3 occurrence(s) are due and not fired, the oldest for 15 s" in with_ticks.problem
    await connection.execute("DELETE FROM cron_ticks")
    await connection.execute("UPDATE cron_schedule_cursors SET next_tick_needed_at = $1", since)
    without_ticks = await read_report(database, since, now=now)
    assert (without_ticks.waiting, without_ticks.problem) == (3, with_ticks.problem)


async def test_what_is_not_expected_is_not_missed(database: Database, settings: Settings) -> None:
    """One-offs, ends, and ticks dropped by disabling."""
    repository = CronRepository(database, settings)
    now = await database_clock(database)
    begun = now - timedelta(seconds=10)
    await repository.save_schedule(define_schedule("once", at=begun), now=begun)
    await repository.save_schedule(define_schedule("ended", every=1, ends_at=begun + timedelta(seconds=3)), now=begun)
    await repository.save_schedule(define_schedule("counted", every=1, max_runs=2), now=begun)
    dropped = await repository.save_schedule(define_schedule("dropped", every=1), now=begun)
    await repository.disable_schedule(dropped.schedule.id, drop_pending=True, now=now)
    assert (await read_report(database, begun, now=now)).waiting == 7
    await repository.fire_due_ticks(QUEUE_SINK, ticker_id="ticker_me", limit=1000, now=now)
    report = await read_report(database, begun, now=now)
    assert {schedule.name: schedule.fired for schedule in report.schedules} == {
        "once": 1,
        "ended": 4,
        "counted": 2,
        "dropped": 0,
    }
    assert (report.missed, report.duplicates, report.waiting, report.problem) == (0, 0, 0, None)
    assert report_table(report).row_count == 4
    assert {schedule["every_seconds"] for schedule in report.as_json()["schedules"]} == {None, 1.0}


async def test_a_schedule_that_can_not_be_followed_is_a_problem(
    database: Database, settings: Settings, connection: Any
) -> None:
    since = await fire_for_a_while(database, settings)
    await connection.execute("UPDATE cron_schedules SET error = 'OverflowError: too far'")
    report = await read_report(database, since)
    assert report.problem == "schedule 'queue' can't be followed: OverflowError: too far"
    assert report.as_json()["schedules"][0]["error"] == "OverflowError: too far"


@pytest.mark.parametrize("width", [80, 100, 120])
async def test_the_table_says_when_if_the_terminal_is_wide_enough(
    database: Database, settings: Settings, connection: Any, width: int
) -> None:
    repository = CronRepository(database, settings)
    now = await database_clock(database)
    for name, expression in (("daily", "0 9 * * MON"), ("[bold]\x1b[2J", "0 9 * * *"), ("gone", "0 9 * * *")):
        definition = define_schedule("queue", name="name", cron=expression, timezone="Europe/Berlin")
        saved = await repository.save_schedule(definition)
        await connection.execute("UPDATE cron_schedules SET name = $2 WHERE id = $1", saved.schedule.id, name)
    await connection.execute("UPDATE cron_schedules SET error = 'x', cron = 'a b', zone = 'Mars/X' WHERE name = 'gone'")
    console = Console(width=width, file=StringIO())
    console.print(report_table(await read_report(database, now), width=width))
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    assert all(len(line) <= width for line in text.splitlines())
    for heading in ("schedule", "next in", "last ago", "lateness", "fired", "duplicates", "missed"):
        assert heading in text
    assert "[bold]\N{REPLACEMENT CHARACTER}[2J" in text
    assert "\x1b" not in text
    assert "BROKEN" in text
    assert ("when" in text, "Mondays" in text) == (width > 80, width > 80)
    assert ("a b, Mars/X time" in text) == (width > 80), "what can't be read is shown as it is"


async def test_what_is_due_since_a_moment_is_no_problem(database: Database, settings: Settings) -> None:
    """A run that was stopped in its first second, say."""
    now = await database_clock(database)
    since = now - timedelta(seconds=2)
    definition = define_schedule("queue", every=1, jitter=None)
    await CronRepository(database, settings).save_schedule(definition, now=since)
    report = await read_report(database, since, now=now)
    assert (report.fired, report.problem) == (0, None)
    assert report.waiting == 3


async def test_what_was_before_the_start_does_not_count(database: Database, settings: Settings) -> None:
    await fire_for_a_while(database, settings)
    report = await read_report(database, await database_clock(database))
    assert (report.fired, report.missed) == (0, 0)


def test_an_empty_report_is_no_problem() -> None:
    moment = datetime.fromisoformat("2026-01-01T00:00:00Z")
    assert Report(moment, moment, (), {}).problem is None
