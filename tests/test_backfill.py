"""Backfills in the database: each occurrence once, whatever happens meanwhile."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import asyncpg
import pytest

from cron_ticks.backfill_repository import BackfillRepository, Ended
from cron_ticks.backfills import Backfill
from cron_ticks.database import Database, open_database
from cron_ticks.errors import BackfillNotFoundError, InvalidInputError, ScheduleNotFoundError
from cron_ticks.lease_repository import FailedTick
from cron_ticks.rows import FiredTicks
from cron_ticks.schedules import Schedule
from cron_ticks.settings import Settings
from support.moved_clock import Engine
from token_queue.queue_repository import QUEUE_SINK

pytestmark = pytest.mark.sql

NOW = datetime(2026, 6, 15, 12, tzinfo=UTC)
SECOND, MINUTE, HOUR, DAY = (timedelta(**{unit: 1}) for unit in ("seconds", "minutes", "hours", "days"))
MICROSECOND = timedelta(microseconds=1)
FAST = 60_000  # a minute


class World:
    """An engine and backfills under one clock of the test's own."""

    def __init__(self, database: Database, connection: Any, **settings: Any) -> None:
        self.engine = Engine(database, NOW, **settings)
        self.backfills = BackfillRepository(database, self.engine.settings)
        self.connection = connection

    @property
    def now(self) -> datetime:
        return self.engine.now

    async def declare(self, **options: Any) -> Schedule:
        """A schedule without jitter, whose first occurrence is now."""
        return await self.engine.declare(**{"jitter": None} | options)

    async def begin(self, schedule: Schedule, start: datetime, end: datetime, *, per_minute: int = FAST) -> str:
        return await self.backfills.create(schedule.id, start, end, per_minute=per_minute, now=self.now)

    async def step(self, backfill_id: str, schedule: Schedule, **options: Any) -> Ended | None:
        return await self.backfills.step(backfill_id, schedule.id, now=self.now, **options)

    async def drive(self, backfill_id: str, schedule: Schedule) -> Backfill:
        """Steps and firings, a second at a time, until it has ended."""
        found = await self.backfills.get(backfill_id)
        for _ in range(1000):
            await self.step(backfill_id, schedule)
            await self.engine.fire()
            found = await self.backfills.get(backfill_id)
            if found.ended_at is not None:
                return found
            self.engine.now += SECOND
        raise AssertionError(f"it doesn't end: {found}")

    async def ticks(self, schedule: Schedule) -> list[asyncpg.Record]:
        rows: list[asyncpg.Record] = await self.connection.fetch(
            "SELECT * FROM cron_ticks WHERE schedule_id = $1 AND origin = 'backfill' ORDER BY scheduled_for",
            schedule.id,
        )
        return rows

    async def runs(self, schedule: Schedule, *outcomes: str) -> list[datetime]:
        """Of these outcomes, once for each message."""
        rows = await self.connection.fetch(
            "SELECT scheduled_for FROM cron_runs WHERE schedule_id = $1 AND outcome = ANY ($2) ORDER BY scheduled_for",
            schedule.id,
            outcomes,
        )
        return [row["scheduled_for"] for row in rows]

    async def sent(self, schedule: Schedule) -> list[datetime]:
        rows = await self.connection.fetch(
            "SELECT scheduled_for FROM queue_messages WHERE schedule_id = $1 ORDER BY scheduled_for", schedule.id
        )
        return [row["scheduled_for"] for row in rows]

    async def missed(
        self, schedule: Schedule, first: datetime, last: datetime | None = None, count: int = 1, outcome: str = "missed"
    ) -> None:
        """A row of the ledger."""
        moment = last or first
        await self.connection.execute("SELECT cron_make_partition('runs', $1)", moment.date())
        await self.connection.execute(
            """INSERT INTO cron_runs (schedule_id, scheduled_for, version, origin, outcome, reason, ended_at, attempts,
                missed_since, occurrences)
            VALUES ($1, $2, $3, 'schedule', $6, 'a test', $2, 0, $4, $5)""",
            *(schedule.id, moment, schedule.version, None if last is None else first, count, outcome),
        )

    async def stretches(self, schedule: Schedule) -> list[tuple[datetime | None, datetime, int]]:
        rows = await self.connection.fetch(
            """SELECT missed_since, scheduled_for, occurrences FROM cron_runs
            WHERE schedule_id = $1 AND outcome = 'missed' ORDER BY scheduled_for""",
            schedule.id,
        )
        return [tuple(row) for row in rows]


@pytest.fixture
def world(database: Database, connection: Any) -> World:
    return World(database, connection)


def hours(start: datetime, count: int) -> list[datetime]:
    return [start + k * HOUR for k in range(count)]


async def test_a_schedule_declared_today_gets_last_month(world: World, connection: Any) -> None:
    """Partitions of those days are made, and each occurrence has one message with its own header."""
    schedule = await world.declare(every=HOUR, payload={"kind": "sales"})
    start = NOW - 30 * DAY
    assert not await connection.fetchval("SELECT to_regclass('cron_runs_20260516') IS NOT NULL")
    done = await world.drive(await world.begin(schedule, start, start + DAY), schedule)
    assert (done.outcome, done.total, done.made, done.skipped, done.pending) == ("done", 24, 24, 0, 0)
    assert (done.position, done.progress) == (start + DAY, 1)
    assert (await world.sent(schedule))[:24] == hours(start, 24)
    assert (await world.runs(schedule, "enqueued"))[:24] == hours(start, 24)
    headers = await connection.fetch(
        "SELECT DISTINCT headers ->> 'origin' AS origin, payload FROM queue_messages WHERE scheduled_for < $1",
        NOW - DAY,
    )
    assert [tuple(row) for row in headers] == [("backfill", '{"kind": "sales"}')]
    assert await connection.fetchval("SELECT count(*) FROM cron_runs_20260516 WHERE origin = 'backfill'") == 12


async def test_doing_it_twice_adds_nothing(world: World) -> None:
    schedule = await world.declare(every=HOUR)
    start = NOW - 2 * DAY
    await world.drive(await world.begin(schedule, start, NOW), schedule)
    before = await world.sent(schedule)
    again = await world.begin(schedule, start, NOW)
    assert await world.step(again, schedule) == Ended("done")
    found = await world.backfills.get(again)
    assert (found.total, found.made, found.skipped, found.outcome) == (48, 0, 48, "done")
    wider = await world.drive(await world.begin(schedule, start - HOUR, NOW), schedule)
    assert (wider.made, wider.skipped) == (1, 48)
    assert await world.sent(schedule) == [start - HOUR, *before]


async def test_a_second_one_beside_the_first_adds_nothing(world: World) -> None:
    """Its ticks are pending: they are the first one's."""
    schedule = await world.declare(every=HOUR)
    first, second = [await world.begin(schedule, NOW - DAY, NOW) for _ in range(2)]
    await world.step(first, schedule)
    assert await world.step(second, schedule) is None, "it waits for the ticks of its time"
    assert (await world.backfills.get(second)).skipped == 24
    assert len(await world.ticks(schedule)) == 24
    for backfill in (first, second):
        assert (await world.drive(backfill, schedule)).outcome == "done"
    assert Counter(await world.sent(schedule)).most_common(1)[0][1] == 1


async def test_occurrences_that_ended_stay_as_they_are(world: World) -> None:
    """Whatever became of them, only what was missed is made up."""
    schedule = await world.declare(every=HOUR)
    moments = hours(NOW - DAY, 7)
    outcomes = ("enqueued", "failed", "expired", "overlapped", "disabled", "missed")
    for moment, outcome in zip(moments, outcomes, strict=False):
        await world.missed(schedule, moment, outcome=outcome)
    done = await world.drive(await world.begin(schedule, moments[0], moments[-1] + MICROSECOND), schedule)
    assert (done.made, done.skipped) == (2, 5)
    assert (await world.sent(schedule))[:2] == moments[5:]
    assert await world.runs(schedule, "missed") == []


async def test_what_managers_will_make_is_theirs(world: World, connection: Any) -> None:
    schedule = await world.declare(every=HOUR)
    await connection.execute("DELETE FROM cron_ticks")
    await connection.execute("UPDATE cron_schedule_cursors SET next_tick_needed_at = $1", NOW - 3 * HOUR)
    done = await world.drive(await world.begin(schedule, NOW - 5 * HOUR, NOW), schedule)
    assert (done.made, done.skipped) == (2, 3)
    assert await world.sent(schedule) == [NOW - 5 * HOUR, NOW - 4 * HOUR]


async def test_what_is_pending_is_left_alone(world: World, connection: Any) -> None:
    schedule = await world.declare(every=HOUR, starts_at=NOW - 3 * HOUR)
    await connection.execute("UPDATE cron_schedule_cursors SET next_tick_needed_at = $1", NOW + HOUR)
    await connection.execute("UPDATE cron_ticks SET scheduled_for = $1, execute_at = $1, due_at = $1", NOW - 2 * HOUR)
    backfill = await world.begin(schedule, NOW - 4 * HOUR, NOW)
    await world.step(backfill, schedule)
    assert [row["scheduled_for"] for row in await world.ticks(schedule)] == [NOW - 3 * HOUR, NOW - HOUR]
    assert (await world.backfills.get(backfill)).skipped == 1


async def test_a_disabled_schedule_can_be_backfilled(world: World) -> None:
    schedule = await world.declare(every=HOUR)
    await world.engine.repository.disable_schedule(schedule.id, drop_pending=True, now=NOW)
    world.engine.now += 5 * HOUR
    done = await world.drive(await world.begin(schedule, NOW + MICROSECOND, world.now), schedule)
    assert await world.sent(schedule) == hours(NOW + HOUR, 4)
    assert done.made == 4
    await world.engine.repository.enable_schedule(schedule.id, now=world.now)
    await world.engine.turn()
    assert await world.sent(schedule) == hours(NOW + HOUR, 4), "enabling makes none of them again"


async def test_a_one_off_and_an_expression(world: World) -> None:
    once = await world.declare(name="once", at=NOW - DAY)
    await world.engine.fire()
    assert (await world.drive(await world.begin(once, NOW - 2 * DAY, NOW), once)).skipped == 1
    daily = await world.declare(name="daily", cron="30 2 * * *", timezone="Europe/Berlin")
    done = await world.drive(
        await world.begin(daily, datetime(2026, 3, 27, tzinfo=UTC), datetime(2026, 4, 1, tzinfo=UTC)), daily
    )
    assert done.made == 5
    assert [f"{moment:%d %H:%M}" for moment in await world.sent(daily)] == [
        *("27 01:30", "28 01:30", "29 01:00", "30 00:30", "31 00:30")
    ]


async def test_an_empty_range_is_done_at_once(world: World) -> None:
    schedule = await world.declare(every=HOUR)
    backfill = await world.begin(schedule, NOW - HOUR + MICROSECOND, NOW - MINUTE)
    assert await world.step(backfill, schedule) == Ended("done")
    found = await world.backfills.get(backfill)
    assert (found.total, found.progress, found.position) == (0, 1, NOW - MINUTE)


# What is refused


@pytest.mark.parametrize(
    ("field", "start", "end"),
    [
        ("end", NOW - DAY, NOW + MICROSECOND),
        ("start", NOW - 9 * DAY - MICROSECOND, NOW),
        ("end", NOW - 8 * DAY, NOW),
    ],
)
async def test_a_range_out_of_reach_is_refused_and_nothing_is_changed(
    database: Database, connection: Any, field: str, start: datetime, end: datetime
) -> None:
    world = World(database, connection, runs_retention_days=10)
    schedule = await world.declare(every=MINUTE)
    with pytest.raises(InvalidInputError) as refused:
        await world.begin(schedule, start, end)
    assert refused.value.field == field
    assert await connection.fetchval("SELECT count(*) FROM cron_backfills") == 0


async def test_the_reach_ends_where_the_ledger_does(world: World, connection: Any) -> None:
    schedule = await world.declare(every=HOUR)
    await connection.execute("INSERT INTO cron_retention VALUES ('runs', $1), ('events', $2)", NOW - DAY, NOW)
    with pytest.raises(InvalidInputError, match="2026-06-14T12:00:00"):
        await world.begin(schedule, NOW - DAY - HOUR, NOW)
    await world.begin(schedule, NOW - DAY, NOW)


async def test_a_backfill_that_the_end_of_the_ledger_overtakes_fails(world: World, connection: Any) -> None:
    schedule = await world.declare(every=HOUR)
    backfill = await world.begin(schedule, NOW - 2 * DAY, NOW)
    await connection.execute("INSERT INTO cron_retention VALUES ('runs', $1)", NOW - DAY)
    ended = await world.step(backfill, schedule)
    assert ended == Ended("failed", "the ledger is kept since 2026-06-14T12:00:00+00:00 only")
    assert await world.ticks(schedule) == []


async def test_what_there_is_not(world: World) -> None:
    schedule = await world.declare(every=HOUR)
    await world.engine.repository.delete_schedule(schedule.id, now=NOW)
    with pytest.raises(ScheduleNotFoundError):
        await world.begin(schedule, NOW - DAY, NOW)
    with pytest.raises(BackfillNotFoundError):
        await world.backfills.get("backfill_none")
    assert not await world.backfills.cancel("backfill_none", reason="a test")


# Pace and turn


async def test_ticks_are_due_at_the_pace(world: World) -> None:
    schedule = await world.declare(every=MINUTE)
    await world.engine.fire()
    backfill = await world.begin(schedule, NOW - HOUR, NOW, per_minute=60)
    await world.step(backfill, schedule)
    due = [row["due_at"] for row in await world.ticks(schedule)]
    assert due == [NOW + k * SECOND for k in range(10)]
    world.engine.now = NOW + 9.9 * SECOND
    await world.step(backfill, schedule)
    assert len(await world.ticks(schedule)) == 10, "it is not time yet"
    for _ in range(5):
        world.engine.now += 10 * SECOND
        await world.step(backfill, schedule)
    due = [row["due_at"] for row in await world.ticks(schedule)]
    gaps = [later - earlier for earlier, later in pairwise(due)]
    assert len(due) == 60
    assert min(gaps) == SECOND


async def test_lateness_and_age_count_from_the_place_in_the_pace(world: World, connection: Any) -> None:
    """A failed send is tried again, though the occurrence is a month old."""
    schedule = await world.declare(every=HOUR)
    await world.engine.fire()
    backfill = await world.begin(schedule, NOW - 30 * DAY, NOW - 30 * DAY + 2 * HOUR)
    await world.step(backfill, schedule)
    [tick, other] = await world.ticks(schedule)
    failed = {tick["id"]: False}
    assert await fail(world, tick["id"]) == failed
    world.engine.now = NOW + MINUTE
    await world.engine.fire()
    rows = await connection.fetch("SELECT lateness FROM cron_runs WHERE origin = 'backfill' ORDER BY scheduled_for")
    assert [row["lateness"] for row in rows] == [MINUTE, MINUTE - (other["due_at"] - NOW)]


async def fail(world: World, tick_id: str) -> dict[str, bool]:
    return await world.engine.repository.fail_ticks([FailedTick(tick_id, 0, "a test")], ticker_id="t", now=world.now)


async def test_what_is_due_now_goes_first(world: World) -> None:
    schedule = await world.declare(every=HOUR, name="old")
    await world.step(await world.begin(schedule, NOW - 5 * HOUR, NOW - HOUR), schedule)
    await world.declare(every=HOUR, name="new", starts_at=NOW + SECOND)
    repository = world.engine.repository
    world.engine.now = NOW + 2 * SECOND
    first: list[FiredTicks] = await repository.fire_due_ticks(QUEUE_SINK, ticker_id="t", limit=99, now=world.now)
    assert {(tick.schedule_name, tick.origin) for tick in first} == {("old", "schedule"), ("new", "schedule")}
    later = await repository.fire_due_ticks(QUEUE_SINK, ticker_id="t", limit=99, turn=2, now=world.now)
    assert {(tick.schedule_name, tick.origin) for tick in later} == {("old", "backfill")}


async def test_a_place_that_another_tick_has_is_left_to_it(world: World, connection: Any) -> None:
    schedule = await world.declare(every=HOUR)
    await connection.execute("UPDATE cron_ticks SET execute_at = $1", NOW)
    await world.step(await world.begin(schedule, NOW - 2 * HOUR, NOW), schedule)
    assert [row["execute_at"] for row in await world.ticks(schedule)] == [
        NOW + MICROSECOND,
        NOW + timedelta(milliseconds=1),
    ]


# Missed occurrences turn into ticks


async def test_a_stretch_gives_what_is_wanted_of_it(world: World) -> None:
    schedule = await world.declare(every=HOUR, starts_at=NOW - 9 * DAY)
    moments = hours(NOW - 10 * HOUR, 10)
    await world.missed(schedule, moments[0], moments[9], 10)
    backfill = await world.begin(schedule, moments[3], moments[5])
    await world.step(backfill, schedule)
    assert await world.stretches(schedule) == [(moments[0], moments[2], 3), (moments[5], moments[9], 5)]
    assert [row["scheduled_for"] for row in await world.ticks(schedule)] == moments[3:5]
    await world.drive(backfill, schedule)
    await world.drive(await world.begin(schedule, moments[6], moments[9]), schedule)
    assert await world.stretches(schedule) == [
        (moments[0], moments[2], 3),
        (None, moments[5], 1),
        (None, moments[9], 1),
    ]
    await world.drive(await world.begin(schedule, moments[0], NOW), schedule)
    assert await world.stretches(schedule) == []
    assert Counter(await world.sent(schedule))[moments[9]] == 1
    assert (await world.sent(schedule))[:10] == moments


@pytest.mark.parametrize("rule", [{"every": HOUR}, {"cron": "0 * * * *", "timezone": "Europe/Berlin"}])
async def test_an_outage_is_made_up_after_all(world: World, rule: dict[str, Any]) -> None:
    """What a manager has recorded as missed: nobody was there for ten hours, and the schedule wants none of it."""
    schedule = await world.declare(**rule, catch_up="skip")
    await world.engine.turn()
    world.engine.now += 10 * HOUR + 30 * MINUTE
    await world.engine.turn()
    assert await world.stretches(schedule) == [(NOW + HOUR, NOW + 10 * HOUR, 10)]
    backfill = await world.begin(schedule, NOW + 4 * HOUR, NOW + 6 * HOUR)
    assert (await world.drive(backfill, schedule)).made == 2
    assert [stretch[2] for stretch in await world.stretches(schedule)] == [3, 5]
    done = await world.drive(await world.begin(schedule, NOW, world.now), schedule)
    assert (done.made, done.skipped) == (8, 3)
    assert await world.stretches(schedule) == []
    assert await world.sent(schedule) == hours(NOW, 11)
    await world.engine.turn()
    assert await world.sent(schedule) == hours(NOW, 11)


async def test_pieces_keep_what_the_stretch_said(world: World, connection: Any) -> None:
    schedule = await world.declare(every=HOUR, starts_at=NOW - 9 * DAY)
    moments = hours(NOW - 3 * DAY, 49)
    await world.missed(schedule, moments[0], moments[48], 49)
    columns = "version, origin, outcome, reason, ended_at, attempts, recovered"
    before = await connection.fetch(f"SELECT {columns} FROM cron_runs WHERE outcome = 'missed'")
    await world.step(await world.begin(schedule, moments[24], moments[25]), schedule)
    after = await connection.fetch(f"SELECT {columns} FROM cron_runs WHERE outcome = 'missed'")
    assert list(after) == list(before) * 2
    assert [stretch[2] for stretch in await world.stretches(schedule)] == [24, 24]


async def test_a_stretch_of_another_rule_keeps_what_is_its_own(world: World) -> None:
    """Every hour was missed; the schedule is now every 90 minutes. What both have is made up."""
    schedule = await world.declare(every=HOUR, starts_at=NOW - 9 * DAY)
    moments = hours(NOW - 6 * HOUR, 6)
    await world.missed(schedule, moments[0], moments[5], 6)
    edited = (await world.engine.edit(schedule.id, every=90 * MINUTE)).schedule
    done = await world.drive(await world.begin(edited, moments[0], NOW), edited)
    assert done.made == 4
    assert (await world.sent(schedule))[:4] == [moments[0] + k * 90 * MINUTE for k in range(4)]
    assert await world.stretches(schedule) == [(moments[1], moments[2], 2), (moments[4], moments[5], 2)]


async def test_a_stretch_whose_version_is_gone_is_not_guessed_at(world: World, connection: Any) -> None:
    schedule = await world.declare(every=HOUR, starts_at=NOW - 9 * DAY)
    await world.missed(schedule, NOW - 5 * HOUR, NOW - 3 * HOUR, 3)
    await connection.execute("UPDATE cron_runs SET version = 77")
    ended = await world.step(await world.begin(schedule, NOW - 6 * HOUR, NOW), schedule)
    assert ended is not None
    assert (ended.outcome, "not kept any more" in str(ended.reason)) == ("failed", True)


async def test_a_very_long_stretch_is_as_quick(world: World) -> None:
    schedule = await world.declare(every=SECOND, starts_at=NOW - 80 * DAY)
    count = 79 * 86_400
    await world.missed(schedule, NOW - 80 * DAY, NOW - DAY - SECOND, count)
    done = await world.drive(await world.begin(schedule, NOW - 40 * DAY, NOW - 40 * DAY + 5 * SECOND), schedule)
    assert done.made == 5
    assert [stretch[2] for stretch in await world.stretches(schedule)] == [40 * 86_400, 39 * 86_400 - 5]


# Changes meanwhile


async def test_an_edit_during_it_holds_for_the_rest(world: World, connection: Any) -> None:
    schedule = await world.declare(every=MINUTE, payload={"version": "old"})
    start = NOW - 100 * MINUTE
    backfill = await world.begin(schedule, start, NOW, per_minute=60)
    await world.step(backfill, schedule)
    await world.engine.edit(schedule.id, every=10 * MINUTE, payload={"version": "new"})
    assert len(await world.ticks(schedule)) == 10, "an edit leaves what was made"
    done = await world.drive(backfill, schedule)
    assert (done.outcome, done.made, done.total) == ("done", 19, 19)
    payloads = await connection.fetch(
        "SELECT payload ->> 'version' AS version FROM queue_messages WHERE scheduled_for < $1 ORDER BY scheduled_for",
        NOW,
    )
    assert [row["version"] for row in payloads] == ["old"] * 10 + ["new"] * 9
    assert (await world.sent(schedule))[10:12] == [start + 10 * MINUTE, start + 20 * MINUTE]


async def test_an_edit_that_makes_too_much_of_it_ends_it(world: World) -> None:
    schedule = await world.declare(every=HOUR)
    backfill = await world.begin(schedule, NOW - 2 * DAY, NOW, per_minute=60)
    await world.step(backfill, schedule)
    await world.engine.edit(schedule.id, every=SECOND)
    world.engine.now += 10 * SECOND
    ended = await world.step(backfill, schedule)
    assert ended is not None
    assert "occurrences are left, at most 10000" in str(ended.reason)


async def test_a_rule_that_cannot_be_followed_any_more_ends_it(world: World, connection: Any) -> None:
    schedule = await world.declare(cron="0 * * * *")
    backfill = await world.begin(schedule, NOW - DAY, NOW)
    await connection.execute("UPDATE cron_schedules SET zone = 'Mars/Olympus'")
    assert await world.step(backfill, schedule) is not None
    found = await world.backfills.get(backfill)
    assert (found.outcome, found.made, found.ended_at) == ("failed", 0, NOW)
    assert "Mars/Olympus" in str(found.reason)


async def test_rows_that_the_database_refuses_end_it_and_no_other(world: World, connection: Any) -> None:
    schedule = await world.declare(every=HOUR, name="refused")
    await connection.execute("ALTER TABLE cron_ticks ADD CHECK (schedule_name <> 'refused' OR origin = 'schedule')")
    backfill = await world.begin(schedule, NOW - DAY, NOW)
    await world.missed(schedule, NOW - HOUR)
    ended = await world.step(backfill, schedule)
    assert ended is not None
    assert str(ended.reason).startswith("CheckViolationError: ")
    assert await world.runs(schedule, "missed") == [NOW - HOUR], "nothing of the step is left"


async def test_a_day_that_goes_in_the_middle_of_a_step_is_not_fired_again(
    world: World, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cleanup that had begun before the backfill: what has fired that day is known to nobody any more."""
    schedule = await world.declare(every=HOUR)
    day = NOW - 10 * DAY
    await world.drive(await world.begin(schedule, day, day + 3 * HOUR), schedule)
    before = await world.sent(schedule)
    backfill = await world.begin(schedule, day, day + 3 * HOUR)
    ticks_of = BackfillRepository._ticks

    async def dropping(self: BackfillRepository, *arguments: Any) -> Any:
        await connection.execute("SELECT cron_drop_partition('runs', $1)", day + 2 * DAY)
        return await ticks_of(self, *arguments)

    monkeypatch.setattr(BackfillRepository, "_ticks", dropping)
    ended = await world.step(backfill, schedule)
    assert ended is not None
    assert ended.outcome == "failed"
    assert "the ledger is kept since" in str(ended.reason)
    await world.engine.fire()
    assert await world.sent(schedule) == before


async def test_a_detached_day_that_kept_its_name_ends_it(world: World, connection: Any) -> None:
    """It would be the same at each step, and keep the ledger's old days for ever."""
    schedule = await world.declare(every=HOUR)
    day = NOW - 10 * DAY
    name = f"cron_runs_{day:%Y%m%d}"
    await connection.execute("SELECT cron_make_partition('runs', $1)", day.date())
    await connection.execute(f"ALTER TABLE cron_runs DETACH PARTITION {name}")
    backfill = await world.begin(schedule, day, day + HOUR)
    ended = await world.step(backfill, schedule)
    assert ended is not None
    assert (ended.outcome, str(ended.reason).split(":")[0]) == ("failed", "DuplicateTableError")


@pytest.mark.parametrize("how", ["disabled", "deleted", "workspace"])
async def test_dropping_its_ticks_ends_it(world: World, how: str) -> None:
    schedule = await world.declare(every=HOUR, workspace_id="ws_A")
    backfill = await world.begin(schedule, NOW - DAY, NOW, per_minute=60)
    await world.step(backfill, schedule)
    repository = world.engine.repository
    if how == "disabled":
        await repository.disable_schedule(schedule.id, drop_pending=True, now=NOW)
    elif how == "deleted":
        await repository.delete_schedule(schedule.id, now=NOW)
    else:
        async with repository.database.transaction() as chosen:
            await repository.delete_workspace("ws_A", connection=chosen, now=NOW)
    found = await world.backfills.get(backfill)
    assert (found.outcome, found.made, found.pending, found.ended_at) == ("cancelled", 10, 0, NOW)
    assert (await world.runs(schedule, "disabled"))[:10] == hours(NOW - DAY, 10)
    world.engine.now += MINUTE
    await world.step(backfill, schedule)
    assert await world.engine.fire() == []


async def test_disabling_alone_lets_it_go_on(world: World) -> None:
    schedule = await world.declare(every=HOUR)
    backfill = await world.begin(schedule, NOW - DAY, NOW, per_minute=60)
    await world.step(backfill, schedule)
    await world.engine.repository.disable_schedule(schedule.id, now=NOW)
    assert (await world.drive(backfill, schedule)).made == 24


async def test_a_schedule_that_is_gone_without_a_word_ends_it(world: World, connection: Any) -> None:
    schedule = await world.declare(every=HOUR)
    backfill = await world.begin(schedule, NOW - DAY, NOW)
    await connection.execute("DELETE FROM cron_schedules")
    assert await world.step(backfill, schedule) == Ended("cancelled", "the schedule is gone")


async def test_what_is_cancelled_makes_no_more_and_fires_what_it_made(world: World) -> None:
    schedule = await world.declare(every=HOUR)
    backfill = await world.begin(schedule, NOW - DAY, NOW, per_minute=60)
    await world.step(backfill, schedule)
    assert await world.backfills.cancel(backfill, reason="a test", now=NOW)
    assert not await world.backfills.cancel(backfill, reason="again", now=NOW + SECOND)
    world.engine.now += MINUTE
    assert await world.step(backfill, schedule) is None
    await world.engine.fire()
    assert (await world.sent(schedule))[:10] == hours(NOW - DAY, 10)
    found = await world.backfills.get(backfill)
    assert (found.outcome, found.reason, found.ended_at, found.made) == ("cancelled", "a test", NOW, 10)


# Messages that must not overlap


async def finish(connection: Any) -> None:
    await connection.execute("UPDATE queue_messages SET completed_at = statement_timestamp()")
    await connection.execute("UPDATE cron_ticks SET due_at = execute_at WHERE waiting")


@pytest.mark.parametrize("overlap", ["skip", "queue_one"])
async def test_where_messages_must_not_overlap_there_is_one_at_a_time(
    world: World, connection: Any, overlap: str
) -> None:
    schedule = await world.declare(every=HOUR, overlap=overlap, starts_at=NOW - DAY)
    await connection.execute("DELETE FROM cron_ticks")
    await connection.execute("UPDATE cron_schedule_cursors SET next_tick_needed_at = $1", NOW + HOUR)
    wanted = hours(NOW - DAY, 4)
    backfill = await world.begin(schedule, NOW - DAY, NOW - 20 * HOUR)
    for turn in range(60):
        await world.step(backfill, schedule)
        assert len(await world.ticks(schedule)) <= 1
        await world.engine.fire()
        assert await connection.fetchval("SELECT count(*) FROM queue_messages WHERE completed_at IS NULL") <= 1
        if turn % 3 == 0:
            await finish(connection)
        world.engine.now += 10 * SECOND
    found = await world.backfills.get(backfill)
    assert (found.outcome, found.made) == ("done", 4)
    assert await world.sent(schedule) == wanted
    assert await world.runs(schedule, "overlapped") == []


async def test_a_backfills_tick_takes_no_other_ones_place_to_wait(world: World, connection: Any) -> None:
    """Behind the same message, one of the schedule's own waits and one of the backfill."""
    schedule = await world.declare(every=HOUR, overlap="queue_one", starts_at=NOW - DAY)
    await world.engine.fire()
    await finish(connection)
    world.engine.now += MINUTE
    trigger = world.engine.repository.trigger
    await trigger(schedule.id, now=world.now)
    assert [tick.outcome for tick in await world.engine.fire()] == ["enqueued"]
    backfill = await world.begin(schedule, NOW - DAY, NOW - DAY + HOUR)
    await world.step(backfill, schedule)
    assert [tick.outcome for tick in await world.engine.fire()] == ["waiting"]
    world.engine.now += SECOND
    waiting = await trigger(schedule.id, now=world.now)
    assert [tick.outcome for tick in await world.engine.fire()] == ["waiting"]
    for _ in range(5):
        await finish(connection)
        world.engine.now += 10 * SECOND
        await world.step(backfill, schedule)
        await world.engine.fire()
    assert {NOW - DAY, waiting.scheduled_for} <= set(await world.sent(schedule))
    assert await world.runs(schedule, "overlapped") == []
    assert (await world.backfills.get(backfill)).made == 1


# Crashes and crowds


async def test_a_step_that_dies_in_the_middle_has_done_nothing(
    world: World, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = await world.declare(every=HOUR, starts_at=NOW - 9 * DAY)
    await world.missed(schedule, NOW - 10 * HOUR, NOW - 2 * HOUR, 9)
    backfill = await world.begin(schedule, NOW - DAY, NOW, per_minute=60)
    await world.step(backfill, schedule)
    before = (await world.backfills.get(backfill), await world.stretches(schedule), await world.ticks(schedule))
    world.engine.now += 10 * SECOND
    fetch = database.fetch

    async def dies_at_the_end(text: str, *arguments: object, **options: Any) -> list[asyncpg.Record]:
        if "SET next_at" in text:
            raise ConnectionResetError
        return await fetch(text, *arguments, **options)

    monkeypatch.setattr(database, "fetch", dies_at_the_end)
    with pytest.raises(ConnectionResetError):
        await world.step(backfill, schedule)
    monkeypatch.undo()
    after = (await world.backfills.get(backfill), await world.stretches(schedule), await world.ticks(schedule))
    assert after == before
    assert (await world.drive(backfill, schedule)).made == 24
    assert Counter(await world.sent(schedule)).most_common(1)[0][1] == 1
    assert await world.stretches(schedule) == []


async def test_overlapping_ranges_at_once_from_many_connections(
    world: World, settings: Settings, dsn: str, connection: Any
) -> None:
    """While managers make ticks and edits re-plan: each occurrence once, and nobody is locked out for good."""
    schedule = await world.declare(every=MINUTE, starts_at=NOW - 9 * DAY)
    await world.missed(schedule, NOW - 300 * MINUTE, NOW - 101 * MINUTE, 200)
    ranges = [(NOW - 400 * MINUTE, NOW), (NOW - 350 * MINUTE, NOW - 50 * MINUTE), (NOW - 200 * MINUTE, NOW)]
    backfills = [await world.begin(schedule, start, end, per_minute=600) for start, end in ranges]

    async def pod(number: int) -> None:
        async with open_database(settings, dsn=dsn, max_size=2) as own:
            repository = BackfillRepository(own, settings)
            for turn in range(60):
                now = NOW + turn * SECOND
                for backfill in backfills:
                    await repository.step(backfill, schedule.id, now=now)
                if number == 0 and turn % 5 == 0:
                    await world.engine.edit(schedule.id, payload={"turn": turn})

    await asyncio.gather(*(pod(number) for number in range(4)))
    rows = await connection.fetch("SELECT scheduled_for FROM cron_ticks WHERE origin = 'backfill'")
    moments = [row["scheduled_for"] for row in rows]
    assert sorted(moments) == [NOW - k * MINUTE for k in range(400, 0, -1)]
    assert await world.stretches(schedule) == []
    found = [await world.backfills.get(backfill) for backfill in backfills]
    assert sum(one.made for one in found) == 400
    assert [one.made + one.skipped for one in found] == [400, 300, 200]


async def test_a_busy_schedule_is_left_to_whoever_has_it(world: World, connection: Any) -> None:
    schedule = await world.declare(every=HOUR)
    backfill = await world.begin(schedule, NOW - DAY, NOW)
    async with connection.transaction():
        await connection.execute("SELECT FROM cron_schedule_cursors FOR UPDATE")
        assert await world.step(backfill, schedule) is None
        assert await world.ticks(schedule) == []
    await world.step(backfill, schedule)
    assert len(await world.ticks(schedule)) == 24


async def test_many_days_at_once(world: World, connection: Any) -> None:
    """Each needs a partition, and the server's room for locks is not used up."""
    world = World(world.engine.repository.database, connection, runs_retention_days=400)
    schedule = await world.declare(every=DAY)
    done = await world.drive(await world.begin(schedule, NOW - 120 * DAY, NOW), schedule)
    assert (done.outcome, done.made) == ("done", 120)
    partitions: Sequence[Any] = await connection.fetch("SELECT DISTINCT tableoid FROM cron_runs")
    assert len(partitions) >= 120
