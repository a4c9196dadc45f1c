"""Cron schedules in the engine: what is promised at their creation is what fires, whatever clocks and people do."""

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import asyncpg
import pytest
from structlog.testing import capture_logs

from cron_ticks import cron_rules, migrator, zones
from cron_ticks.cli.report import read_report
from cron_ticks.cron_rules import CronRule
from cron_ticks.database import Database, open_database
from cron_ticks.errors import InvalidInputError, ScheduleNotFoundError
from cron_ticks.migrator import known_migrations, migrate
from cron_ticks.occurrences import MICROSECOND
from cron_ticks.previews import preview
from cron_ticks.schedule_manager import ScheduleManager
from cron_ticks.schedules import Schedule
from cron_ticks.settings import Settings
from support.moved_clock import Engine
from support.versions import expected_by_versions
from token_queue import QueueManager

START = datetime(2026, 6, 1, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)
NEW_YORK = "America/New_York"
LORD_HOWE = "Australia/Lord_Howe"


@pytest.fixture
def engine(database: Database) -> Engine:
    return Engine(database, START)


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def moments(text: str) -> list[datetime]:
    """`2026-03-08 07:00 07:30, 2026-03-09 06:30`: days with their times."""
    return [utc(f"{day} {clock}") for part in text.split(",") for day, *clocks in [part.split()] for clock in clocks]


def every(step: timedelta, start: str, end: str) -> list[datetime]:
    """All moments from `start` to `end`, the last one included."""
    return [utc(start) + number * step for number in range((utc(end) - utc(start)) // step + 1)]


async def messages_of(connection: Any, schedule_id: str) -> list[datetime]:
    rows = await connection.fetch(
        "SELECT scheduled_for FROM queue_messages WHERE schedule_id = $1 ORDER BY sequence", schedule_id
    )
    return [row["scheduled_for"] for row in rows]


async def ticks_of(connection: Any, schedule_id: str) -> list[datetime]:
    rows = await connection.fetch(
        "SELECT scheduled_for FROM cron_ticks WHERE schedule_id = $1 ORDER BY scheduled_for", schedule_id
    )
    return [row["scheduled_for"] for row in rows]


async def cursor_of(connection: Any, schedule_id: str) -> datetime | None:
    found: datetime | None = await connection.fetchval(
        "SELECT next_tick_needed_at FROM cron_schedule_cursors WHERE schedule_id = $1", schedule_id
    )
    return found


async def versions_of(connection: Any, schedule_id: str, columns: str) -> list[tuple[Any, ...]]:
    rows = await connection.fetch(
        f"SELECT {columns} FROM cron_schedule_versions WHERE schedule_id = $1 ORDER BY version", schedule_id
    )
    return [tuple(row) for row in rows]


# The nights on which clocks are changed. Above each table, what happens there.

Night = dict[tuple[str, str], str | list[datetime]]

# 2026-03-08 07:00 UTC: 01:59:59 EST is followed by 03:00 EDT.
NEW_YORK_SPRING: Night = {
    ("30 2 * * *", ""): "2026-03-08 07:00, 2026-03-09 06:30",
    ("30 2 * * *", "skip"): "2026-03-09 06:30",
    ("*/15 2 * * *", ""): "2026-03-09 06:00 06:15 06:30 06:45",
    ("0,15,30 2 * * *", ""): "2026-03-08 07:00, 2026-03-09 06:00 06:15 06:30",
    ("0 2,3 * * *", ""): "2026-03-08 07:00, 2026-03-09 06:00 07:00",
    ("0 2,3 * * *", "skip"): "2026-03-08 07:00, 2026-03-09 06:00 07:00",
    ("30 1 * * *", ""): "2026-03-08 06:30, 2026-03-09 05:30",
    ("30 1 * * *", "both"): "2026-03-08 06:30, 2026-03-09 05:30",
    ("45 30 2 * * *", ""): "2026-03-08 07:00:00, 2026-03-09 06:30:45",
    ("0 12 * * *", ""): "2026-03-08 16:00",
    ("*/15 * * * *", ""): every(15 * MINUTE, "2026-03-07 23:00", "2026-03-09 08:00"),
    ("30 * * * *", ""): every(HOUR, "2026-03-07 23:30", "2026-03-09 07:30"),
    ("30 * * * *", "skip"): every(HOUR, "2026-03-07 23:30", "2026-03-09 07:30"),
    ("0 */2 * * *", ""): [
        *every(2 * HOUR, "2026-03-07 23:00", "2026-03-08 05:00"),
        *every(2 * HOUR, "2026-03-08 08:00", "2026-03-09 08:00"),
    ],
}

# 2026-11-01 06:00 UTC: 01:59:59 EDT is followed by 01:00 EST.
NEW_YORK_AUTUMN: Night = {
    ("30 1 * * *", ""): "2026-11-01 05:30, 2026-11-02 06:30",
    ("30 1 * * *", "second"): "2026-11-01 06:30, 2026-11-02 06:30",
    ("30 1 * * *", "both"): "2026-11-01 05:30 06:30, 2026-11-02 06:30",
    ("30 2 * * *", ""): "2026-11-01 07:30, 2026-11-02 07:30",
    ("30 2 * * *", "second"): "2026-11-01 07:30, 2026-11-02 07:30",
    ("0 1,2 * * *", ""): "2026-11-01 05:00 07:00, 2026-11-02 06:00 07:00",
    ("0 1,2 * * *", "second"): "2026-11-01 06:00 07:00, 2026-11-02 06:00 07:00",
    ("*/20 1 * * *", ""): "2026-11-01 05:00 05:20 05:40 06:00 06:20 06:40, 2026-11-02 06:00 06:20 06:40",
    ("*/20 1 * * *", "second"): "2026-11-01 05:00 05:20 05:40 06:00 06:20 06:40, 2026-11-02 06:00 06:20 06:40",
    ("*/15 * * * *", ""): every(15 * MINUTE, "2026-10-31 22:00", "2026-11-02 08:00"),
    ("30 * * * *", ""): every(HOUR, "2026-10-31 22:30", "2026-11-02 07:30"),
}

# 2026-04-04 15:00 UTC: 01:59:59 at +11:00 is followed by 01:30 at +10:30.
LORD_HOWE_AUTUMN: Night = {
    ("45 1 * * *", ""): "2026-04-04 14:45, 2026-04-05 15:15",
    ("45 1 * * *", "second"): "2026-04-04 15:15, 2026-04-05 15:15",
    ("45 1 * * *", "both"): "2026-04-04 14:45 15:15, 2026-04-05 15:15",
    ("15 1 * * *", ""): "2026-04-04 14:15, 2026-04-05 14:45",
    ("15 1 * * *", "second"): "2026-04-04 14:15, 2026-04-05 14:45",
    ("45 * * * *", ""): [
        *every(HOUR, "2026-04-04 12:45", "2026-04-04 14:45"),
        *every(HOUR, "2026-04-04 15:15", "2026-04-05 15:15"),
    ],
}

# 2026-10-03 15:30 UTC: 01:59:59 at +10:30 is followed by 02:30 at +11:00.
LORD_HOWE_SPRING: Night = {
    ("15 2 * * *", ""): "2026-10-03 15:30, 2026-10-04 15:15",
    ("15 2 * * *", "skip"): "2026-10-04 15:15",
    ("15,30 2 * * *", ""): "2026-10-03 15:30, 2026-10-04 15:15 15:30",
    ("45 2 * * *", ""): "2026-10-03 15:45, 2026-10-04 15:45",
    ("15 * * * *", ""): [
        *every(HOUR, "2026-10-03 12:45", "2026-10-03 14:45"),
        *every(HOUR, "2026-10-03 16:15", "2026-10-04 15:15"),
    ],
}

# 2011-12-30 10:00 UTC: the 29th at -10:00 is followed by the 31st at +14:00. There was no 30th.
APIA_2011: Night = {
    ("0 12 * * *", ""): "2011-12-29 22:00, 2011-12-30 10:00 22:00",
    ("0 12 * * *", "skip"): "2011-12-29 22:00, 2011-12-30 22:00",
    ("0 6,18 * * *", ""): "2011-12-29 16:00, 2011-12-30 04:00 10:00 16:00, 2011-12-31 04:00",
    ("0 0 * * *", ""): "2011-12-30 10:00, 2011-12-31 10:00",
    ("0 9 30 * *", ""): "2011-12-30 10:00",
    ("0 9 30 * *", "skip"): [],
    ("0 * * * *", ""): every(HOUR, "2011-12-29 13:00", "2011-12-31 12:00"),
}

NIGHTS = {
    "new_york_spring": (NEW_YORK, "2026-03-07 22:50", "2026-03-09 08:10", NEW_YORK_SPRING),
    "new_york_autumn": (NEW_YORK, "2026-10-31 21:50", "2026-11-02 08:10", NEW_YORK_AUTUMN),
    "lord_howe_autumn": (LORD_HOWE, "2026-04-04 12:20", "2026-04-05 16:10", LORD_HOWE_AUTUMN),
    "lord_howe_spring": (LORD_HOWE, "2026-10-03 12:20", "2026-10-04 16:10", LORD_HOWE_SPRING),
    "apia_2011": ("Pacific/Apia", "2011-12-29 12:10", "2011-12-31 12:10", APIA_2011),
}


def dst(option: str) -> dict[str, Any]:
    return {"dst_gap": option} if option == "skip" else {"dst_fold": option} if option else {}


@pytest.mark.sql
@pytest.mark.parametrize("night", NIGHTS.values(), ids=NIGHTS)
async def test_schedules_fire_at_the_promised_instants_across_a_night(
    database: Database, connection: Any, night: tuple[str, str, str, Night]
) -> None:
    """Declared before it; then the engine's clock moves over it, pass by pass."""
    zone, begin, end, table = night
    engine = Engine(database, utc(begin), lookahead_seconds=1200)
    expected: dict[str, list[datetime]] = {}
    for (cron, option), text in table.items():
        schedule = await engine.declare(name=f"{cron} {option}".strip(), cron=cron, timezone=zone, **dst(option))
        expected[schedule.id] = moments(text) if isinstance(text, str) else text
        promised = preview(cron=cron, timezone=zone, after=utc(begin), count=200, **dst(option))
        assert [moment for moment in promised if moment <= utc(end)] == expected[schedule.id], (cron, option)
    fired = await engine.run_until(utc(end), step=15 * MINUTE)
    for schedule_id, instants in expected.items():
        assert await messages_of(connection, schedule_id) == instants
    assert all(tick.passed for tick in fired)
    assert await connection.fetchval("SELECT count(*) FROM queue_messages WHERE inserted_at <> scheduled_for") == 0
    assert await connection.fetchval("SELECT count(*) FROM cron_runs") == sum(map(len, expected.values()))
    report = await read_report(database, utc(begin), now=utc(end))
    assert (report.missed, report.duplicates, report.waiting, report.problem) == (0, 0, 0, None)


async def test_a_night_with_the_window_and_the_pauses_of_a_worker(database: Database, connection: Any) -> None:
    """As shipped: a minute ahead, a pass of the manager every ten seconds; two of them share the work."""
    engine = Engine(database, utc("2026-03-08 06:25"))
    other = ScheduleManager(database, engine.repository, engine.settings)
    fixed = await engine.declare(name="fixed", cron="30 2 * * *", timezone=NEW_YORK)
    often = await engine.declare(name="often", cron="*/5 * * * *", timezone=NEW_YORK)
    while engine.now < utc("2026-03-08 07:35"):
        await asyncio.gather(engine.manager.run_once(), other.run_once())
        await engine.fire()
        engine.now += 10 * SECOND
    assert await messages_of(connection, fixed.id) == [utc("2026-03-08 07:00")]
    assert await messages_of(connection, often.id) == every(5 * MINUTE, "2026-03-08 06:25", "2026-03-08 07:30")


async def test_a_night_without_any_worker_is_made_up_once(database: Database, connection: Any) -> None:
    """All pods were down from before the fold until after it: the latest occurrence is made up, others are missed."""
    engine = Engine(database, utc("2026-11-01 04:50"))
    both = await engine.declare(name="both", cron="30 1 * * *", timezone=NEW_YORK, dst_fold="both")
    often = await engine.declare(name="often", cron="*/15 1 * * *", timezone=NEW_YORK)
    engine.now = utc("2026-11-01 08:00")
    with capture_logs() as logs:
        await engine.turn()
    assert await messages_of(connection, both.id) == [utc("2026-11-01 06:30")]
    assert await messages_of(connection, often.id) == [utc("2026-11-01 06:45")]
    missed = {entry["schedule_id"]: entry["missed"] for entry in logs if entry["event"] == "occurrences_missed"}
    assert missed == {both.id: 1, often.id: 7}


# Declaring and editing


async def test_a_new_schedule_waits_for_its_time(engine: Engine, connection: Any) -> None:
    """Unlike an interval, which is due at once; and it is due at once if its time is now."""
    later = await engine.declare(name="later", cron="0 9 * * *", timezone="Europe/Berlin")
    assert (later.cron, later.timezone, later.zone) == ("0 9 * * *", "Europe/Berlin", "Europe/Berlin")
    assert (later.dst_gap, later.dst_fold, later.interval, later.at) == ("fire", "first", None, None)
    assert await ticks_of(connection, later.id) == []
    assert await cursor_of(connection, later.id) == utc("2026-06-02 07:00")
    exact = await engine.declare(name="exact", cron="0 14 * * *", timezone="Europe/Berlin")
    assert await ticks_of(connection, exact.id) == [START]
    assert [tick.schedule_id for tick in await engine.turn()] == [exact.id]
    engine.now += MICROSECOND
    past = await engine.declare(name="past", cron="0 14 * * *", timezone="Europe/Berlin")
    assert await cursor_of(connection, past.id) == START + DAY


@pytest.mark.sql
async def test_declaring_the_same_again_changes_nothing(engine: Engine, connection: Any) -> None:
    options: dict[str, Any] = {"timezone": NEW_YORK, "dst_gap": "skip", "dst_fold": "both", "owner": "billing"}
    first = await engine.save(cron="30 2 * * *", jitter=10 * SECOND, **options)
    before = await connection.fetch("SELECT * FROM cron_schedule_cursors")
    engine.now += DAY
    for text in ("30 2 * * *", "30  2 *\t* * ", " 30 2 * * *"):
        again = await engine.save(cron=text, jitter=10 * SECOND, **options)
        assert (again.change, again.schedule) == ("unchanged", first.schedule)
    defaults = await engine.save("other", cron="@daily")
    same = await engine.save("other", cron="@daily", dst_gap="fire", dst_fold="first", jitter=None)
    assert (same.change, same.schedule) == ("unchanged", defaults.schedule)
    assert await connection.fetch("SELECT * FROM cron_schedule_cursors WHERE schedule_id = $1", first.schedule.id) == (
        before
    )
    assert await connection.fetchval("SELECT count(*) FROM cron_schedule_versions") == 2


@pytest.mark.sql
async def test_many_declarations_at_once_make_one_schedule_and_one_version(settings: Settings, connection: Any) -> None:
    """Separate pools, as separate pods have; the second time all of them edit."""

    async def declare(cron: str, timezone: str) -> str:
        async with QueueManager(settings=settings) as pod:
            made = await pod.schedule("queue", cron=cron, timezone=timezone, workspace_id="ws", owner="billing")
            return made.id

    for cron, zone in (("0 9 * * MON", "Europe/Berlin"), ("0 9 * * MON", NEW_YORK), ("0 10 * * MON", NEW_YORK)):
        assert len({*await asyncio.gather(*(declare(cron, zone) for _ in range(4)))}) == 1
    rows = await connection.fetch("SELECT version, cron, zone FROM cron_schedule_versions ORDER BY version")
    assert [tuple(row) for row in rows] == [
        (1, "0 9 * * MON", "Europe/Berlin"),
        (2, "0 9 * * MON", NEW_YORK),
        (3, "0 10 * * MON", NEW_YORK),
    ]


@pytest.mark.sql
async def test_another_expression_replans_what_is_pending(engine: Engine, connection: Any) -> None:
    schedule = await engine.declare(cron="*/10 * * * * *")
    await engine.fire()
    engine.now += 25 * SECOND  # two are due that nobody has fired yet
    edited = await engine.save(cron="*/30 * * * * *")
    assert (edited.change, edited.schedule.version) == ("edited", 2)
    assert edited.fields == ("cron",)
    due = [START + 10 * SECOND, START + 20 * SECOND]
    assert await ticks_of(connection, schedule.id) == [*due, START + 30 * SECOND, START + MINUTE]
    assert [tick.scheduled_for for tick in await engine.fire()] == due
    found = await connection.fetch("SELECT DISTINCT version FROM cron_ticks")
    assert [row["version"] for row in found] == [2]
    assert await cursor_of(connection, schedule.id) == START + 90 * SECOND


@pytest.mark.sql
async def test_another_zone_replans_what_is_pending(engine: Engine, connection: Any) -> None:
    """A quarter past the hour in Berlin is half past in Kathmandu."""
    engine.now = utc("2026-06-01 12:14:30")
    schedule = await engine.declare(cron="15 * * * *", timezone="Europe/Berlin")
    assert await ticks_of(connection, schedule.id) == [utc("2026-06-01 12:15")]
    moved = await engine.edit(schedule.id, timezone="Asia/Kathmandu")
    assert (moved.schedule.timezone, moved.schedule.zone) == ("Asia/Kathmandu", "Asia/Kathmandu")
    assert await ticks_of(connection, schedule.id) == []
    assert await cursor_of(connection, schedule.id) == utc("2026-06-01 12:30")
    fired = await engine.run_until(utc("2026-06-01 13:40"), step=MINUTE)
    assert [tick.scheduled_for for tick in fired] == moments("2026-06-01 12:30 13:30")
    assert await versions_of(connection, schedule.id, "version, change, timezone, zone") == [
        (1, "created", "Europe/Berlin", "Europe/Berlin"),
        (2, "edited", "Asia/Kathmandu", "Asia/Kathmandu"),
    ]


@pytest.mark.sql
@pytest.mark.parametrize(
    "changes",
    [
        {"cron": "0 14 * * *"},  # in Berlin
        {"cron": "* * * * * *", "timezone": "Asia/Kathmandu"},
        {"timezone": "Asia/Kathmandu"},  # where it is 17:45
        {"every": 60, "jitter": None},
        {"starts_at": START, "cron": "0 14 * * *"},
    ],
    ids=["cron", "both", "timezone", "every", "starts_at"],
)
async def test_an_edit_never_fires_by_itself(engine: Engine, connection: Any, changes: dict[str, Any]) -> None:
    """Not even at the very time that the new rule names."""
    schedule = await engine.declare(cron="45 17 * * *", timezone="Europe/Berlin", jitter=timedelta(0))
    await engine.edit(schedule.id, **changes)
    assert await engine.turn() == []
    assert all(moment > START for moment in await ticks_of(connection, schedule.id))
    found = await engine.repository.get_schedule(schedule.id)
    expected = [*await ticks_of(connection, schedule.id), await cursor_of(connection, schedule.id)]
    assert expected[0] == found.timetable.occurrence_after(START)


@pytest.mark.parametrize(
    "changes",
    [
        {"cron": "0 12,13 * * *"},
        {"timezone": "Etc/UTC"},
        {"payload": {"n": 1}},
        {"dst_fold": "both"},
        {"every": 86_400},
    ],
    ids=lambda changes: next(iter(changes)),
)
async def test_an_edit_of_what_has_fired_does_not_fire_it_again(
    engine: Engine, connection: Any, changes: dict[str, Any]
) -> None:
    schedule = await engine.declare(cron="0 12 * * *", jitter=20 * SECOND)
    assert [tick.scheduled_for for tick in await engine.turn()] == [START]
    for moment in (START, START + SECOND):
        engine.now = moment
        await engine.edit(schedule.id, **changes)
        assert await engine.turn() == []
        await engine.edit(schedule.id, cron="0 12 * * *", timezone=None, payload={}, dst_fold=None)
        assert await engine.turn() == []
    await engine.run_until(START + DAY + MINUTE, step=HOUR)
    assert await messages_of(connection, schedule.id) == [START, START + DAY]


@pytest.mark.sql
async def test_a_schedule_goes_from_one_kind_to_the_other_and_back(engine: Engine, connection: Any) -> None:
    schedule = await engine.declare(
        cron="30 12 * * *", timezone="Europe/London", dst_fold="second", jitter=SECOND, max_runs=100
    )
    assert (await engine.edit(schedule.id, cron="0 15 * * *")).schedule.timezone == "Europe/London"
    interval = (await engine.edit(schedule.id, every=40, jitter=None)).schedule
    assert (interval.cron, interval.timezone, interval.zone, interval.dst_gap, interval.dst_fold) == (None,) * 5
    assert (interval.interval, interval.anchor_at, interval.max_runs) == (40 * SECOND, START, 100)
    assert await ticks_of(connection, schedule.id) == [START + 40 * SECOND]  # not at once
    engine.now += 10 * SECOND
    calendar = (await engine.edit(schedule.id, cron="15 * * * * *")).schedule
    assert (calendar.interval, calendar.timezone, calendar.zone, calendar.max_runs) == (None, None, "UTC", 100)
    assert (calendar.dst_gap, calendar.dst_fold, calendar.jitter) == ("fire", "first", timedelta(0))
    assert await ticks_of(connection, schedule.id) == [START + 15 * SECOND]
    once = (await engine.edit(schedule.id, at=START + 50 * SECOND)).schedule
    assert (once.cron, once.zone, once.at, once.max_runs) == (None, None, START + 50 * SECOND, None)
    fired = await engine.run_until(START + HOUR, step=MINUTE)
    assert [tick.scheduled_for for tick in fired] == [START + 50 * SECOND]
    back = (await engine.edit(schedule.id, cron="0 14 * * *", timezone="Europe/Berlin")).schedule
    assert (back.at, back.zone) == (None, "Europe/Berlin")
    assert await cursor_of(connection, schedule.id) == START + DAY
    assert await versions_of(connection, schedule.id, "cron, zone, interval_us, anchor_at") == [
        ("30 12 * * *", "Europe/London", None, START),
        ("0 15 * * *", "Europe/London", None, START),
        (None, None, 40_000_000, START),
        ("15 * * * * *", "UTC", None, START + 10 * SECOND),
        (None, None, None, START + 50 * SECOND),
        ("0 14 * * *", "Europe/Berlin", None, START + HOUR),
    ]


@pytest.mark.sql
async def test_an_edit_keeps_overdue_occurrences_that_nobody_has_made(engine: Engine, connection: Any) -> None:
    schedule = await engine.declare(cron="*/10 * * * * *", payload={"n": "old"})
    await connection.execute("DELETE FROM cron_ticks")
    await connection.execute("UPDATE cron_schedule_cursors SET next_tick_needed_at = $1, planned = 0", START)
    engine.now += 25 * SECOND
    await engine.edit(schedule.id, timezone="Asia/Kathmandu", payload={"n": "new"})
    rows = await connection.fetch("SELECT scheduled_for, payload ->> 'n' FROM cron_ticks ORDER BY 1 LIMIT 4")
    assert [tuple(row) for row in rows] == [
        (START + seconds * SECOND, n) for seconds, n in ((0, "old"), (10, "old"), (20, "old"), (30, "new"))
    ]


@pytest.mark.sql
async def test_disabling_and_enabling(engine: Engine, connection: Any) -> None:
    schedule = await engine.declare(cron="*/20 * * * * *", timezone="Asia/Kathmandu")
    await engine.fire()
    await engine.repository.disable_schedule(schedule.id, drop_pending=True, now=START + 5 * SECOND)
    engine.now += 2 * DAY + 5 * SECOND
    assert await engine.turn() == []
    enabled = await engine.repository.enable_schedule(schedule.id, now=engine.now)
    assert (enabled.change, enabled.schedule.version, enabled.schedule.cron) == ("enabled", 3, "*/20 * * * * *")
    assert await ticks_of(connection, schedule.id) == [START + 2 * DAY + 20 * k * SECOND for k in (1, 2, 3)]
    assert await versions_of(connection, schedule.id, "change, cron, zone, enabled") == [
        ("created", "*/20 * * * * *", "Asia/Kathmandu", True),
        ("disabled", "*/20 * * * * *", "Asia/Kathmandu", False),
        ("enabled", "*/20 * * * * *", "Asia/Kathmandu", True),
    ]
    disabled = await engine.repository.disable_schedule(schedule.id, now=engine.now)
    edited = await engine.edit(schedule.id, cron="* * * * *", timezone=NEW_YORK)
    assert (disabled.schedule.enabled, edited.schedule.enabled) == (False, False)
    assert len(await engine.run_until(engine.now + 5 * MINUTE, step=MINUTE)) == 3  # what was kept, and no more


@pytest.mark.sql
async def test_bounds(engine: Engine, connection: Any) -> None:
    counted = await engine.declare(name="counted", cron="* * * * *", max_runs=3)
    begins = await engine.declare(name="begins", cron="* * * * *", starts_at=START + 150 * SECOND)
    exact = await engine.declare(name="exact", cron="* * * * *", starts_at=START + 2 * MINUTE)
    ends = await engine.declare(name="ends", cron="* * * * *", ends_at=START + 2 * MINUTE)
    over = await engine.declare(name="over", cron="0 9 1 1 *", ends_at=START + 2 * MINUTE)
    await engine.run_until(START + 4 * MINUTE, step=MINUTE)
    expected = {counted.id: (0, 1, 2), begins.id: (3, 4), exact.id: (2, 3, 4), ends.id: (0, 1, 2), over.id: ()}
    for schedule_id, minutes in expected.items():
        assert await messages_of(connection, schedule_id) == [START + minute * MINUTE for minute in minutes]
    for schedule in (counted, ends, over):
        assert await cursor_of(connection, schedule.id) is None
    assert (await engine.edit(counted.id, max_runs=5)).change == "edited"
    await engine.edit(ends.id, ends_at=START + 6 * MINUTE)
    await engine.run_until(START + 9 * MINUTE, step=MINUTE)
    for schedule in (counted, ends):
        later = (await messages_of(connection, schedule.id))[3:]
        assert later == [START + 5 * MINUTE, START + 6 * MINUTE]


async def test_more_runs_than_one_pass_of_a_fold(database: Database, connection: Any) -> None:
    """The count goes on through the repeated hour, over edits too."""
    engine = Engine(database, utc("2026-11-01 05:20"))
    schedule = await engine.declare(cron="30 1 * * *", timezone=NEW_YORK, dst_fold="both", max_runs=2)
    await engine.run_until(utc("2026-11-01 06:10"), step=MINUTE)
    await engine.edit(schedule.id, payload={"n": 1})
    await engine.run_until(utc("2026-11-01 07:10"), step=MINUTE)
    assert await messages_of(connection, schedule.id) == moments("2026-11-01 05:30 06:30")
    assert await cursor_of(connection, schedule.id) is None


@pytest.mark.sql
async def test_deleting(engine: Engine, connection: Any) -> None:
    schedule = await engine.declare(cron="*/20 * * * * *", timezone=NEW_YORK)
    assert len(await engine.fire()) == 1
    await engine.repository.delete_schedule(schedule.id, now=engine.now)
    for table in ("cron_schedules", "cron_schedule_cursors", "cron_ticks"):
        assert await connection.fetchval(f"SELECT count(*) FROM {table}") == 0
    assert await versions_of(connection, schedule.id, "change, cron, zone, enabled") == [
        ("created", "*/20 * * * * *", NEW_YORK, True),
        ("deleted", "*/20 * * * * *", NEW_YORK, False),
    ]
    with pytest.raises(ScheduleNotFoundError):
        await engine.repository.get_schedule(schedule.id)
    again = await engine.declare(cron="*/20 * * * * *", timezone=NEW_YORK)
    assert again.id != schedule.id


@pytest.mark.sql
async def test_a_trigger_takes_no_occurrence_of_the_rule(engine: Engine, connection: Any) -> None:
    schedule = await engine.declare(cron="0 9 * * *", timezone="Europe/Berlin")
    engine.now = utc("2026-06-02 07:00")
    triggers = [await engine.repository.trigger(schedule.id, now=engine.now) for _ in range(2)]
    assert [trigger.scheduled_for - engine.now for trigger in triggers] == [MICROSECOND, 2 * MICROSECOND]
    engine.now += SECOND
    fired = await engine.turn()
    assert sorted((tick.scheduled_for, tick.origin) for tick in fired) == [
        (utc("2026-06-02 07:00"), "schedule"),
        *((trigger.scheduled_for, "trigger") for trigger in triggers),
    ]
    assert await cursor_of(connection, schedule.id) == utc("2026-06-03 07:00")


async def test_a_trigger_at_the_end_of_a_gap_leaves_its_occurrence_alone(database: Database) -> None:
    engine = Engine(database, utc("2026-03-08 07:00"))
    made_up = await engine.declare(name="made up", cron="30 2 * * *", timezone=NEW_YORK)
    skipped = await engine.declare(name="skipped", cron="30 2 * * *", timezone=NEW_YORK, dst_gap="skip")
    moved = [await engine.repository.trigger(schedule.id, now=engine.now) for schedule in (made_up, skipped)]
    assert [trigger.scheduled_for - engine.now for trigger in moved] == [MICROSECOND, timedelta(0)]


# Jitter


@pytest.mark.sql
@pytest.mark.parametrize("microseconds", [0, 1, 2, 999_999, 10_000_000])
async def test_jitter_moves_a_time_of_day_forward_only(engine: Engine, connection: Any, microseconds: int) -> None:
    """The database computes what Python does, and no occurrence comes after the next one."""
    jitter = microseconds * MICROSECOND
    made: dict[str, Schedule] = {}
    for number in range(5):
        cron = f"{number}-59/10 * * * * *"
        schedule = await engine.declare(name=str(number), cron=cron, timezone=NEW_YORK, jitter=jitter)
        made[schedule.id] = schedule
    rows = await connection.fetch("SELECT * FROM cron_ticks ORDER BY schedule_id, scheduled_for")
    assert len(rows) == 30
    for row in rows:
        schedule, occurrence = made[row["schedule_id"]], row["scheduled_for"]
        assert row["execute_at"] == row["due_at"] == schedule.execute_at(occurrence)
        assert occurrence <= row["execute_at"] < occurrence + max(jitter, MICROSECOND)
    due = [row["due_at"] for row in rows if row["schedule_id"] == rows[0]["schedule_id"]]
    assert due == sorted(set(due))
    moved = {row["execute_at"] - row["scheduled_for"] for row in rows}
    assert len(moved) == {0: 1, 1: 1, 2: 2}.get(microseconds, len(moved))
    assert len(moved) >= min(20, microseconds // 2)


@pytest.mark.sql
async def test_the_first_occurrence_does_not_move(engine: Engine, connection: Any) -> None:
    """If the schedule begins with one; Python and the database agree on it."""
    options: dict[str, Any] = {"cron": "*/10 * * * * *", "jitter": 10 * SECOND}
    now = await engine.declare(name="now", **options)
    later = await engine.declare(name="later", starts_at=START + 10 * SECOND, **options)
    for schedule, first in ((now, START), (later, START + 10 * SECOND)):
        rows = await connection.fetch("SELECT * FROM cron_ticks WHERE schedule_id = $1 ORDER BY 7", schedule.id)
        assert rows[0]["scheduled_for"] == rows[0]["execute_at"] == first
        assert all(row["execute_at"] == schedule.execute_at(row["scheduled_for"]) for row in rows)
        assert any(row["execute_at"] > row["scheduled_for"] for row in rows)


@pytest.mark.sql
async def test_what_is_moved_past_an_edit_fires_as_it_was_made(engine: Engine, connection: Any) -> None:
    """Its time has come, though it is not due yet: the edit holds after it, and it is not made twice."""
    engine.now = utc("2026-06-01 11:59:30")
    schedule = await engine.declare(cron="* * * * *", jitter=30 * SECOND, payload={"n": "old"})
    due = schedule.execute_at(START)
    assert due > START
    engine.now = START + (due - START) / 2
    await engine.edit(schedule.id, payload={"n": "new"}, jitter=None)
    await engine.run_until(START + MINUTE, step=10 * SECOND)
    rows = await connection.fetch(
        "SELECT scheduled_for, inserted_at, payload ->> 'n' FROM queue_messages ORDER BY sequence"
    )
    assert [tuple(row) for row in rows] == [(START, due, "old"), (START + MINUTE, START + MINUTE, "new")]


# A rule that can't be followed any more

BREAKING = {
    "zone": ("UPDATE cron_schedules SET zone = 'Mars/Olympus', timezone = 'Mars/Olympus' WHERE id = $1", "timezone"),
    "folder": ("UPDATE cron_schedules SET zone = 'America', timezone = 'America' WHERE id = $1", "timezone"),
    "cron": ("UPDATE cron_schedules SET cron = '0 25 * * *' WHERE id = $1", "cron"),
}


@pytest.mark.sql
async def test_a_zone_that_is_gone_breaks_its_schedule_alone(
    engine: Engine, database: Database, connection: Any
) -> None:
    broken = await engine.declare(name="broken", cron="*/20 * * * * *", timezone="Europe/Kyiv")
    sound = [
        await engine.declare(name="same rule", cron="*/20 * * * * *", timezone="Europe/Berlin"),
        await engine.declare(name="interval", every=20, jitter=None),
        await engine.declare(name="other", cron="*/20 * * * *", timezone=NEW_YORK),
    ]
    await connection.execute(BREAKING["zone"][0], broken.id)
    with capture_logs() as logs:
        await engine.run_until(START + 10 * MINUTE, step=30 * SECOND)
    made_before = [START + 20 * k * SECOND for k in range(3)]
    assert await messages_of(connection, broken.id) == made_before  # their hour was right
    assert await ticks_of(connection, broken.id) == []
    for schedule in sound[:2]:
        assert await messages_of(connection, schedule.id) == [START + 20 * k * SECOND for k in range(31)]
    assert await messages_of(connection, sound[2].id) == [START]
    events = [entry for entry in logs if entry["event"] == "schedule_broken"]
    assert [(event["schedule_id"], event["log_level"]) for event in events] == [(broken.id, "error")]
    assert "Mars/Olympus" in events[0]["error"]
    assert engine.metrics.registry.get_sample_value("cron_ticks_schedules_broken_total") == 1
    found = await engine.repository.get_schedule(broken.id)
    assert (found.error, found.version) == (events[0]["error"], 1)
    assert found.error_at == START + 20 * SECOND  # when the window reached what lacks a tick
    assert found in await engine.repository.list_schedules()
    assert found.description
    report = await read_report(database, START, now=engine.now)
    assert report.problem == f"schedule 'broken' can't be followed: {found.error}"
    assert {item.name: item.error for item in report.schedules} == {
        "broken": found.error,
        "same rule": None,
        "interval": None,
        "other": None,
    }
    assert (report.missed, report.duplicates) == (0, 0)


async def test_an_expression_that_nobody_understands_breaks_its_schedule_alone(
    engine: Engine, database: Database, connection: Any
) -> None:
    """As a newer release may have written it."""
    broken = await engine.declare(name="broken", cron="0 9 * * *")
    sound = await engine.declare(name="sound", cron="* * * * *")
    await connection.execute(BREAKING["cron"][0], broken.id)
    engine.now = begun = utc("2026-06-02 08:59:30")
    with capture_logs() as logs:
        await engine.run_until(utc("2026-06-02 09:05"), step=30 * SECOND)
    assert await messages_of(connection, broken.id) == []
    assert (await messages_of(connection, sound.id))[-1] == utc("2026-06-02 09:05")
    [event] = [entry for entry in logs if entry["event"] == "schedule_broken"]
    assert (event["schedule_id"], "hour '25'" in event["error"]) == (broken.id, True)
    found = await engine.repository.get_schedule(broken.id)
    assert found.error == event["error"]
    assert found.description
    report = await read_report(database, begun, now=engine.now)
    assert report.problem == f"schedule 'broken' can't be followed: {found.error}"


@pytest.mark.sql
@pytest.mark.parametrize("part", BREAKING)
async def test_a_broken_schedule_is_edited_only_by_mending_it(engine: Engine, connection: Any, part: str) -> None:
    schedule = await engine.declare(cron="*/20 * * * * *", timezone="Europe/Kyiv")
    statement, field = BREAKING[part]
    await connection.execute(statement, schedule.id)
    engine.now += 5 * MINUTE
    await engine.turn()
    broken = await engine.repository.get_schedule(schedule.id)
    assert broken.error is not None
    for changes in ({"payload": {"n": 1}}, {"priority": "high"}, {"owner": "billing"}):
        with pytest.raises(InvalidInputError) as caught:
            await engine.edit(schedule.id, **changes)
        assert caught.value.field == field
    assert await engine.repository.get_schedule(schedule.id) == broken
    before = await messages_of(connection, schedule.id)
    engine.now += SECOND
    mended = await engine.edit(schedule.id, cron="*/30 * * * * *", timezone="Asia/Kathmandu")
    assert (mended.schedule.error, mended.schedule.error_at, mended.schedule.version) == (None, None, 2)
    await engine.run_until(engine.now + MINUTE, step=30 * SECOND)
    later = (await messages_of(connection, schedule.id))[len(before) :]
    assert later == [START + 5 * MINUTE + 30 * k * SECOND for k in (1, 2)]


@pytest.mark.parametrize("part", BREAKING)
async def test_a_broken_schedule_can_be_triggered_disabled_and_deleted(
    engine: Engine, connection: Any, part: str
) -> None:
    schedule = await engine.declare(cron="0 9 * * *", timezone="Europe/Kyiv")
    await connection.execute(BREAKING[part][0], schedule.id)
    engine.now += DAY
    assert await engine.turn() == []
    trigger = await engine.repository.trigger(schedule.id, now=engine.now)
    assert trigger.scheduled_for == engine.now
    [fired] = await engine.fire()
    assert (fired.origin, fired.passed) == ("trigger", True)
    disabled = await engine.repository.disable_schedule(schedule.id, now=engine.now)
    assert (disabled.change, disabled.schedule.enabled) == ("disabled", False)
    enabled = await engine.repository.enable_schedule(schedule.id, now=engine.now)
    assert (enabled.change, enabled.schedule.enabled) == ("enabled", True)
    assert await engine.turn() == []
    assert (await engine.repository.get_schedule(schedule.id)).error is not None
    await engine.repository.delete_schedule(schedule.id, now=engine.now)
    assert await engine.repository.list_schedules() == []


@pytest.fixture
def tzdata(monkeypatch: pytest.MonkeyPatch) -> Iterator["Tzdata"]:
    """The zones that a release of tzdata has, for this test to change."""
    changed = Tzdata()
    monkeypatch.setattr(zones, "ZoneInfo", changed.zone)
    yield changed
    changed.forget()


class Tzdata:
    """Zones by name; another one's rules instead of a zone's own, or None where a zone is gone."""

    def __init__(self) -> None:
        self._instead: dict[str, str | None] = {}

    def zone(self, name: str) -> ZoneInfo:
        found = self._instead.get(name, name)
        if found is None:
            raise ZoneInfoNotFoundError(f"No time zone found with key {name}")
        return ZoneInfo(found)

    def change(self, name: str, instead: str | None) -> None:
        """A new release, which processes see when they start."""
        self._instead[name] = instead
        self.forget()

    def forget(self) -> None:
        for cached in (zones._spans, zones._changes, cron_rules._page):
            cached.cache_clear()


@pytest.mark.parametrize("way", ["declared", "enabled"])
async def test_a_zone_that_comes_back_lets_its_schedule_go_on(
    engine: Engine, connection: Any, tzdata: Tzdata, way: str
) -> None:
    schedule = await engine.declare(cron="0 15 * * *", timezone="Europe/Kyiv")  # 12:00 UTC
    assert len(await engine.turn()) == 1
    tzdata.change("Europe/Kyiv", None)
    await engine.run_until(START + 3 * DAY + HOUR, step=12 * HOUR)
    assert (await engine.repository.get_schedule(schedule.id)).error is not None
    tzdata.change("Europe/Kyiv", "Europe/Kyiv")
    assert await engine.turn() == []  # nobody looks at it again by itself
    if way == "declared":
        again = await engine.save(cron="0 15 * * *", timezone="Europe/Kyiv")
    else:
        again = await engine.repository.enable_schedule(schedule.id, now=engine.now)
    assert (again.change, again.schedule.error, again.schedule.version) == ("retried", None, 1)
    with capture_logs() as logs:
        await engine.run_until(START + 5 * DAY, step=12 * HOUR)
    assert await messages_of(connection, schedule.id) == [START + days * DAY for days in (0, 3, 4, 5)]
    assert [entry["missed"] for entry in logs if entry["event"] == "occurrences_missed"] == [2]


# The far future is looked at again


@pytest.mark.parametrize("begun", ["declared", "edited", "enabled"])
async def test_a_rare_schedule_is_looked_at_every_week(engine: Engine, connection: Any, begun: str) -> None:
    """And it fires once, at its time."""
    engine.now = utc("2026-06-01 00:00")
    schedule = await engine.declare(cron="0 12 1 8 *", timezone=NEW_YORK)
    if begun == "edited":
        await engine.edit(schedule.id, payload={"n": 1})
    if begun == "enabled":
        await engine.repository.disable_schedule(schedule.id, now=engine.now)
        await engine.repository.enable_schedule(schedule.id, now=engine.now)
    most = timedelta(days=7) + engine.settings.lookahead_seconds * SECOND
    fired: list[tuple[datetime, datetime]] = []
    while engine.now < utc("2026-09-01 00:00"):
        needed = await cursor_of(connection, schedule.id)
        assert needed is not None
        assert needed <= engine.now + most
        engine.now = max(engine.now + MINUTE, needed)
        fired += [(tick.scheduled_for, engine.now) for tick in await engine.turn()]
    assert fired == [(utc("2026-08-01 16:00"), utc("2026-08-01 16:00"))]


@pytest.mark.parametrize(
    ("instead", "promised"),
    [("America/Panama", "2026-08-01 17:00"), ("America/Halifax", "2026-08-01 15:00"), (NEW_YORK, "2026-08-01 16:00")],
    ids=["later", "earlier", "same"],
)
async def test_a_new_rule_of_a_zone_holds_for_what_was_declared_before(
    engine: Engine, connection: Any, tzdata: Tzdata, instead: str, promised: str
) -> None:
    """Wall clocks will show something else in August than was thought in June: the schedule follows them."""
    schedule = await engine.declare(cron="0 12 1 8 *", timezone=NEW_YORK)
    await engine.run_until(START + 20 * DAY, step=DAY)
    tzdata.change(NEW_YORK, instead)
    await engine.run_until(utc("2026-08-03 00:00"), step=6 * HOUR)
    assert await messages_of(connection, schedule.id) == [utc(promised)]
    assert await expected_by_versions(connection, schedule.id, engine.now) == [utc(promised)]
    found = await connection.fetchval("SELECT inserted_at FROM queue_messages")
    assert found - utc(promised) <= 6 * HOUR
    assert await connection.fetchval("SELECT count(*) FROM cron_schedule_versions") == 1


# The report


@pytest.mark.sql
async def test_the_report_of_a_calendar(engine: Engine, database: Database, connection: Any) -> None:
    often = await engine.declare(name="a", cron="*/20 * * * * *")
    await engine.declare(name="b", cron="0 9 * * *", timezone="Europe/Berlin")
    await engine.declare(name="c", cron="0 12 1 1 *", timezone=NEW_YORK)
    await engine.declare(name="d", cron="* * * * *", jitter=30 * SECOND)
    await engine.run_until(START + 5 * MINUTE, step=30 * SECOND)
    report = await read_report(database, START, now=engine.now)
    a, b, c, d = report.schedules
    assert (a.fired, a.missed, a.waiting, a.duplicates, a.worst_lateness) == (16, 0, 0, 0, timedelta(0))
    assert (a.last_at, a.next_at, a.every) == (engine.now, engine.now + 20 * SECOND, None)
    assert (b.fired, b.missed, b.waiting, b.next_at) == (0, 0, 0, utc("2026-06-02 07:00"))
    assert (c.fired, c.missed, c.waiting, c.next_at) == (0, 0, 0, utc("2027-01-01 17:00"))
    assert (d.missed, d.waiting, d.duplicates) == (0, 0, 0)
    assert report.problem is None
    await connection.execute(
        "DELETE FROM cron_runs WHERE schedule_id = $1 AND scheduled_for IN ($2, $3)", often.id, START, START + MINUTE
    )
    await connection.execute("DELETE FROM queue_messages WHERE scheduled_for IN ($1, $2)", START, START + MINUTE)
    assert (await read_report(database, START, now=engine.now)).schedules[0].missed == 2


@pytest.mark.sql
async def test_the_report_says_what_waits_for_a_manager(engine: Engine, database: Database) -> None:
    """Nobody has made or fired anything for a while."""
    await engine.declare(name="minutes", cron="* * * * *")
    await engine.declare(name="seconds", cron="*/20 * * * * *", timezone=NEW_YORK)
    await engine.declare(name="once a day", cron="5 12 * * *")
    now = START + 5 * MINUTE + 10 * SECOND
    report = await read_report(database, START, now=now)
    assert {item.name: item.waiting for item in report.schedules} == {"minutes": 6, "seconds": 16, "once a day": 1}
    assert {item.name: item.oldest_wait for item in report.schedules} == {
        "minutes": now - START,
        "seconds": now - START,
        "once a day": 10 * SECOND,
    }
    assert report.problem is not None
    assert "23 occurrence(s) are due and not fired, the oldest for 310 s" in report.problem


async def test_the_report_says_when_a_schedule_that_has_not_begun_occurs_next(
    engine: Engine, database: Database
) -> None:
    """Its cursor is earlier: a manager looks again within a week."""
    await engine.declare(cron="0 9 * * *", starts_at=START + 30 * DAY + timedelta(hours=10))
    (shown,) = (await read_report(database, START, now=START)).schedules
    assert shown.next_at is not None
    assert shown.next_at - START > 30 * DAY


@pytest.mark.sql
async def test_a_look_at_the_far_future_that_is_due_is_nothing_that_waits(engine: Engine, database: Database) -> None:
    """No manager for weeks: only what should have fired is a problem."""
    schedule = await engine.declare(name="yearly", cron="0 12 1 1 *", timezone=NEW_YORK)
    await engine.edit(schedule.id, payload={"n": 1})
    report = await read_report(database, START, now=START + 30 * DAY)
    assert (report.schedules[0].waiting, report.schedules[0].oldest_wait, report.problem) == (0, timedelta(0), None)
    assert report.schedules[0].next_at == utc("2027-01-01 17:00")
    overdue = await read_report(database, START, now=utc("2027-01-01 17:01"))
    assert (overdue.schedules[0].waiting, overdue.schedules[0].oldest_wait) == (1, MINUTE)


@pytest.mark.sql
async def test_bounds_are_in_the_report(engine: Engine, database: Database) -> None:
    await engine.declare(name="counted", cron="* * * * *", max_runs=2)
    await engine.declare(name="ended", cron="* * * * *", ends_at=START + 2 * MINUTE)
    await engine.declare(name="begins", cron="* * * * *", starts_at=START + 3 * MINUTE)
    await engine.run_until(START + 5 * MINUTE, step=30 * SECOND)
    report = await read_report(database, START, now=engine.now)
    assert {item.name: (item.fired, item.next_at) for item in report.schedules} == {
        "counted": (2, None),
        "ended": (3, None),
        "begins": (3, START + 6 * MINUTE),
    }
    assert (report.missed, report.waiting, report.problem) == (0, 0, None)


# Cost


async def test_schedules_that_share_a_rule_share_its_computation(
    database: Database, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[tuple[CronRule, datetime]] = []
    compute = CronRule._from

    def noted(rule: CronRule, instant: datetime) -> Iterator[datetime]:
        computed.append((rule, instant))
        return compute(rule, instant)

    monkeypatch.setattr(CronRule, "_from", noted)
    cron_rules._page.cache_clear()
    expressions = [f"{number} * * * *" for number in range(28)] + ["*/10 * * * * *", "0 9 * * MON"]
    await connection.execute(
        """INSERT INTO cron_schedules (id, name, queue_name, payload, anchor_at, cron, timezone, zone, dst_gap,
            dst_fold, created_at, updated_at)
        SELECT 'cron_' || number, number, 'queue', '{}', $1, ($2::text[])[number % 30 + 1], zone, zone, 'fire', 'first',
            $1, $1
        FROM generate_series(0, 2999) AS number
        CROSS JOIN LATERAL (SELECT ($3::text[])[number / 30 % 2 + 1] AS zone) AS chosen""",
        START,
        expressions,
        [NEW_YORK, "Asia/Kathmandu"],
    )
    await connection.execute(
        "INSERT INTO cron_schedule_cursors (schedule_id, next_tick_needed_at) SELECT id, $1 FROM cron_schedules", START
    )
    engine = Engine(database, START)
    await engine.manager.run_once()
    # At 12:00 UTC clocks in New York show a full hour, and in Kathmandu 17:45.
    assert await connection.fetchval("SELECT count(*) FROM cron_ticks") == 50 + 100 * 6
    assert len({rule for rule, _ in computed}) == 60
    assert len(computed) == len(set(computed)) <= 2 * 60
    computed.clear()
    engine.now += 20 * SECOND
    await engine.manager.run_once()
    assert computed == []


# Owners


async def test_a_declaration_without_an_owner_leaves_it(engine: Engine) -> None:
    schedule = await engine.declare(cron="0 9 * * *", owner="billing")
    assert schedule.owner == "billing"
    again = await engine.save(cron="0 9 * * *")
    assert (again.change, again.schedule) == ("unchanged", schedule)
    edited = await engine.save(cron="0 10 * * *")
    assert (edited.change, edited.fields, edited.schedule.owner) == ("edited", ("cron",), "billing")


@pytest.mark.sql
async def test_what_another_deployment_has_declared_is_not_taken(engine: Engine, connection: Any) -> None:
    schedule = await engine.declare(cron="0 9 * * *", owner="billing")
    for cron in ("0 9 * * *", "0 10 * * *"):
        with pytest.raises(InvalidInputError, match=r"owner: 'billing' has declared the schedule 'queue'") as caught:
            await engine.save(cron=cron, owner="reports")
        assert caught.value.field == "owner"
    assert await engine.repository.get_schedule(schedule.id) == schedule
    assert await connection.fetchval("SELECT count(*) FROM cron_schedule_versions") == 1
    elsewhere = await engine.declare(cron="0 9 * * *", owner="reports", workspace_id="ws")
    assert elsewhere.id != schedule.id


async def test_an_owner_is_adopted_and_changed(engine: Engine, connection: Any) -> None:
    schedule = await engine.declare(cron="0 9 * * *")
    adopted = await engine.save(cron="0 9 * * *", owner="billing")
    assert (adopted.change, adopted.fields, adopted.schedule.owner) == ("edited", ("owner",), "billing")
    assert (await engine.edit(schedule.id, owner="reports")).schedule.owner == "reports"
    assert (await engine.save(cron="0 9 * * *", owner="reports")).change == "unchanged"
    assert (await engine.edit(schedule.id, owner=None)).schedule.owner is None
    assert (await engine.edit(schedule.id, payload={"n": 1})).schedule.owner is None
    assert await versions_of(connection, schedule.id, "owner") == [
        (None,),
        ("billing",),
        ("reports",),
        (None,),
        (None,),
    ]


@pytest.mark.sql
async def test_of_two_that_adopt_a_schedule_at_once_one_is_refused(engine: Engine, connection: Any) -> None:
    """Both have seen it without an owner; somebody else's lock lets them wait for the same moment."""
    schedule = await engine.declare(cron="0 9 * * *")
    waiting = "SELECT count(DISTINCT pid) FROM pg_locks WHERE NOT granted"
    async with connection.transaction():
        await connection.execute("SELECT FROM cron_schedules FOR UPDATE")
        saving = [asyncio.create_task(engine.save(cron="0 9 * * *", owner=owner)) for owner in ("billing", "reports")]
        async with asyncio.timeout(20):
            while await connection.fetchval(waiting) < 2:
                assert not any(task.done() for task in saving)
    outcomes = await asyncio.gather(*saving, return_exceptions=True)
    refused = [outcome for outcome in outcomes if isinstance(outcome, InvalidInputError)]
    assert [error.field for error in refused] == ["owner"]
    assert (await engine.repository.get_schedule(schedule.id)).version == 2


# Migration


@pytest.mark.sql
async def test_schedules_of_the_schema_before_go_on(empty_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interval, an interval with its ticks, and a one-off; then they can become calendars."""
    before = tuple(migration for migration in known_migrations() if migration.number <= 4)
    added = [migration for migration in known_migrations() if migration.number > 4]
    async with open_database(Settings.load(), dsn=empty_dsn) as database:
        with monkeypatch.context() as earlier:
            earlier.setattr(migrator, "known_migrations", lambda: before)
            assert await migrate(database) == list(before)
        await declare_before(database)
        assert await migrate(database) == added
        engine = Engine(database, START)
        fired = await engine.run_until(START + 2 * MINUTE, step=30 * SECOND)
        assert sorted((tick.schedule_name, tick.scheduled_for) for tick in fired) == [
            *(("cron_interval", START + k * 40 * SECOND) for k in range(4)),
            ("cron_once", START + MINUTE),
        ]
        assert all(tick.passed for tick in fired)
        found = await engine.repository.get_schedule("cron_interval")
        assert (found.cron, found.timezone, found.zone, found.dst_gap, found.dst_fold, found.owner) == (None,) * 6
        same = await engine.save(name="cron_interval", every=40, jitter=None)
        assert (same.change, same.schedule) == ("unchanged", found)
        for schedule_id in ("cron_interval", "cron_once"):
            edited = await engine.edit(schedule_id, cron="0 9 * * *", timezone=NEW_YORK)
            assert (edited.schedule.version, edited.schedule.zone) == (2, NEW_YORK)
        cursors = await database.fetch("SELECT next_tick_needed_at FROM {schema}.cron_schedule_cursors")
        assert [row[0] for row in cursors] == [utc("2026-06-01 13:00")] * 2


async def declare_before(database: Database) -> None:
    """As the release before wrote them, in columns that it knew."""
    for schedule_id, interval, anchor in (
        ("cron_interval", 40_000_000, START),
        ("cron_once", None, START + MINUTE),
    ):
        await database.fetch(
            """INSERT INTO {schema}.cron_schedules (id, name, queue_name, payload, interval_us, anchor_at, created_at,
                updated_at) VALUES ($1, $1, 'queue', '{}', $2, $3, $4, $4)""",
            *(schedule_id, interval, anchor, START),
        )
        await database.fetch(
            "INSERT INTO {schema}.cron_schedule_cursors (schedule_id, next_tick_needed_at) VALUES ($1, $2)",
            *(schedule_id, anchor),
        )
        await database.fetch(
            """INSERT INTO {schema}.cron_schedule_versions (schedule_id, version, holds_after, change, enabled, name,
                queue_name, payload, interval_us, anchor_at, jitter_us, priority, planned, created_at)
            VALUES ($1, 1, $3::timestamptz - interval '1 microsecond', 'created', true, $1, 'queue', '{}', $2, $3, 0, 2,
                0, $4)""",
            *(schedule_id, interval, anchor, START),
        )


@pytest.mark.sql
async def test_a_rule_is_one_thing_only(engine: Engine, connection: Any) -> None:
    """The database itself refuses what nobody could follow."""
    calendar = await engine.declare(name="calendar", cron="0 9 * * *")
    interval = await engine.declare(name="interval", every=60)
    for schedule, change in (
        (calendar, "interval_us = 60000000"),
        (calendar, "zone = NULL"),
        (calendar, "dst_gap = 'maybe'"),
        (calendar, "dst_fold = NULL"),
        (interval, "cron = '0 9 * * *', zone = 'UTC', dst_gap = 'fire', dst_fold = 'first'"),
        (interval, "zone = 'UTC'"),
        (interval, "timezone = 'UTC'"),
    ):
        with pytest.raises(asyncpg.CheckViolationError):
            await connection.execute(f"UPDATE cron_schedules SET {change} WHERE id = $1", schedule.id)
