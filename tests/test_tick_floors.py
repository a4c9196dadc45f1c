"""Floors: what cannot be vacuumed yet is not waded through each time, and what comes late is found nevertheless."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

import cron_ticks.sweeps
from cron_ticks import generation_sql, lease_sql, missing_sql, shard_sql, tick_sql
from cron_ticks.database import Database
from cron_ticks.ids import new_tick_id
from cron_ticks.schedule_manager import ScheduleManager
from cron_ticks.settings import SLOTS
from cron_ticks.sweeps import Sweeps
from cron_ticks.tick_floors import LEVELS, MARGIN, NO_FLOORS, OF_A_TURN, TickFloors
from cron_ticks.tick_repository import firing_statement
from support.moved_clock import Engine
from support.rig import Rig, handling, rig
from token_queue.queue_repository import QUEUE_SINK

NOW = datetime(2026, 6, 15, 12, tzinfo=UTC)
SECOND, MINUTE = timedelta(seconds=1), timedelta(minutes=1)
NORMAL = 2  # the priority
FEW = 4000  # buffers: of 256 slots, or of a small batch


# When to sweep


class Clock:
    """A time that stands still, or takes so much of it at each look."""

    def __init__(self) -> None:
        self.now = 0.0
        self.step = 0.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """With the product's own idea of what is quick, which tests have not otherwise."""
    monkeypatch.setattr(cron_ticks.sweeps, "QUICK_SECONDS", 0.02)
    return Clock()


def test_a_sweep_is_due_at_once_and_again_as_long_as_it_is_quick(clock: Clock) -> None:
    sweeps = Sweeps(clock)
    assert (sweeps.due, sweeps.due_in) == (True, 0.0)
    with sweeps.timed():
        clock.now += 0.019
    assert (sweeps.due, sweeps.due_in) == (True, 0.0)


def sweep(sweeps: Sweeps, clock: Clock, *seconds: float) -> Sweeps:
    for took in seconds:
        with sweeps.timed():
            clock.now += took
    return sweeps


@pytest.mark.parametrize("seconds", [(9.0,), (0.01, 9.0), (9.0, 0.01), (9.0, 0.01, 9.0)])
def test_one_slow_sweep_alone_says_nothing(clock: Clock, seconds: tuple[float, ...]) -> None:
    """A process has just started, or the machine was busy: ticks that are due at once must not wait for that."""
    assert sweep(Sweeps(clock), clock, *seconds).due


def test_after_two_slow_sweeps_there_is_a_rest_of_twenty_times_as_long(clock: Clock) -> None:
    sweeps = sweep(Sweeps(clock), clock, 3.0, 2.0)
    assert (sweeps.due, sweeps.due_in) == (False, 40.0)
    clock.now += 39.0
    assert (sweeps.due, sweeps.due_in) == (False, 1.0)
    clock.now += 1.0
    assert (sweeps.due, sweeps.due_in) == (True, 0.0)


def test_a_sweep_that_failed_says_nothing(clock: Clock) -> None:
    """The server was away: that is no reason to look less."""
    sweeps = Sweeps(clock)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            fail(sweeps, clock)
    assert sweeps.due_in == 0.0


def test_no_rest_is_longer_than_a_minute(clock: Clock) -> None:
    sweeps = Sweeps(clock)
    sweeps.rest(30.0)
    assert sweeps.due_in == 60.0


def fail(sweeps: Sweeps, clock: Clock) -> None:
    with sweeps.timed():
        clock.now += 30.0
        raise TimeoutError


# What is known of ticks


@dataclass(frozen=True)
class Gone:
    priority: int
    due_at: datetime


def slow(floors: TickFloors, clock: Clock) -> TickFloors:
    """Its last sweeps have just been slow ones."""
    floors.sweeps = sweep(Sweeps(clock), clock, 1.0, 1.0)
    return floors


def test_floors_are_used_between_sweeps_only(clock: Clock) -> None:
    floors = TickFloors()
    known = [NOW + number * SECOND for number in range(LEVELS)]
    floors.note(known)
    assert floors.all == NO_FLOORS
    assert slow(floors, clock).all == [floor - MARGIN for floor in known]
    assert [list(floors.reached(turn)) for turn in range(3)] == [known[0:4], known[4:8], known[8:12]]
    clock.now += 20.0
    assert floors.all == NO_FLOORS


def test_what_was_taken_raises_the_floor_of_its_turn_and_priority_and_never_lowers_it(clock: Clock) -> None:
    floors = slow(TickFloors(), clock)
    floors.note_taken(1, [Gone(3, NOW), Gone(3, NOW + SECOND), Gone(0, NOW), Gone(3, NOW - SECOND)])
    expected: list[datetime | None] = [None] * LEVELS
    expected[1 * OF_A_TURN + 3], expected[1 * OF_A_TURN + 0] = NOW + SECOND, NOW
    assert [floor for turn in range(3) for floor in floors.reached(turn)] == expected


# What they spare


@asynccontextmanager
async def held_snapshot(dsn: str) -> AsyncIterator[None]:
    """A transaction elsewhere that is open for long: nothing that is deleted meanwhile can be removed."""
    other = await asyncpg.connect(dsn)
    transaction = other.transaction(isolation="repeatable_read")
    await transaction.start()
    await other.fetchval("SELECT count(*) FROM cron_ticks")
    try:
        yield
    finally:
        await transaction.rollback()
        await other.close()


def buffers(node: dict[str, Any]) -> int:
    """What a plan touches; parts that change rows on their own are counted twice rather than not at all."""
    own = node["Shared Hit Blocks"] + node["Shared Read Blocks"]
    apart = [child for child in node.get("Plans", []) if child.get("Subplan Name", "").startswith("CTE")]
    return int(own) + sum(buffers(child) for child in apart)


async def touched(database: Database, text: str, *arguments: object) -> int:
    """Run for real and rolled back."""
    async with database.connection() as connection:
        transaction = connection.transaction()
        await transaction.start()
        explain = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {database.sql(text)}"
        (plan,) = json.loads(await connection.fetchval(explain, *arguments, timeout=300))
        await transaction.rollback()
    return buffers(plan["Plan"])


async def assert_spared(
    database: Database, size: int, statements: dict[str, tuple[str, tuple[object, ...], tuple[object, ...]]]
) -> None:
    """With floors each costs little; without them as much as there are rows that are gone, or floors were no use.

    So much it is before the planner knows how many are left: with statistics it may read all pages instead.
    """
    cost = {
        name: (await touched(database, text, *with_floors), await touched(database, text, *without))
        for name, (text, with_floors, without) in statements.items()
    }
    print(f"\n{size} rows that are gone; buffers with floors, without: {cost}")  # noqa: T201
    assert {name: spent for name, (spent, _) in cost.items() if spent > FEW} == {}
    assert {name: spent for name, (_, spent) in cost.items() if spent < size / 2} == {}
    async with database.connection() as connection:
        await connection.execute("ANALYZE", timeout=300)
    analysed = {name: await touched(database, text, *floors) for name, (text, floors, _) in statements.items()}
    print(f"analysed, with floors: {analysed}")  # noqa: T201
    assert {name: spent for name, spent in analysed.items() if spent > FEW} == {}


@pytest.mark.sql
@pytest.mark.soak(small=20_000, full=1_000_000)
async def test_ticks_that_have_fired_are_not_waded_through(
    dsn: str, database: Database, connection: Any, size: int
) -> None:
    """They were due in the last 50 seconds, not in the order in which they were made; a few more are due now."""
    put = """INSERT INTO cron_ticks (id, schedule_id, schedule_name, queue_name, payload, scheduled_for, execute_at,
        due_at, created_at)
    SELECT $3 || k, 'cron_' || k, k, 'queue', '{}', due_at, due_at, due_at, $1
    FROM generate_series(1, $2::int) AS k, LATERAL (
        SELECT $1::timestamptz - interval '1 second' * $4::float8 * (k * 7919::bigint % $2) / $2 AS due_at) AS due"""
    await connection.execute("SELECT cron_make_partition('runs', date '2026-06-15')")
    await connection.execute("ALTER TABLE cron_ticks SET (autovacuum_enabled = false)")
    async with held_snapshot(dsn):
        await connection.execute(put, NOW - SECOND, size, "tick_gone_", 50.0, timeout=600)
        await connection.execute("DELETE FROM cron_ticks", timeout=600)
        await connection.execute(put, NOW, 20, "tick_due_", 0.5)
        floors: list[datetime | None] = [None] * LEVELS
        floors[NORMAL] = NOW - SECOND
        none = [None] * LEVELS
        fire = ("ticker_x", 100, NOW, None, "queue", 0, MINUTE)
        lease = ("ticker_x", 100, NOW, 10 * SECOND, "queue", 3, MINUTE, 2, MINUTE)
        late = ("queue", SECOND, 100, NOW)
        await assert_spared(
            database,
            size,
            {
                "FIRE": (firing_statement(QUEUE_SINK), (*fire, floors[:OF_A_TURN]), (*fire, none[:OF_A_TURN])),
                "NEXT_DUE_IN": (tick_sql.NEXT_DUE_IN, (NOW, "queue", floors), (NOW, "queue", none)),
                "LEASE": (lease_sql.LEASE_DUE_TICKS, (*lease, floors), (*lease, none)),
                "LATE_SCHEDULES": (
                    missing_sql.LATE_SCHEDULES,
                    (*late, floors[:OF_A_TURN]),
                    (*late, none[:OF_A_TURN]),
                ),
            },
        )


@pytest.mark.sql
@pytest.mark.soak(small=20_000, full=1_000_000)
async def test_places_of_cursors_that_have_moved_on_are_not_waded_through(
    dsn: str, database: Database, connection: Any, size: int
) -> None:
    await connection.execute(
        """INSERT INTO cron_schedules (id, name, queue_name, payload, interval_us, anchor_at, created_at, updated_at)
        SELECT 'cron_' || k, k, 'queue', '{}', 60000000, $2, $2, $2 FROM generate_series(1, $1::int) AS k""",
        size,
        NOW,
        timeout=600,
    )
    await connection.execute(
        """INSERT INTO cron_schedule_cursors (schedule_id, next_tick_needed_at)
        SELECT id, $1::timestamptz - name::int % 60 * interval '1 second' FROM cron_schedules""",
        NOW,
        timeout=600,
    )
    await connection.execute("ALTER TABLE cron_schedule_cursors SET (autovacuum_enabled = false)")
    async with held_snapshot(dsn):
        await connection.execute(
            "UPDATE cron_schedule_cursors SET next_tick_needed_at = next_tick_needed_at + interval '10 minutes'",
            timeout=600,
        )
        slots, floors, none = list(range(SLOTS)), [NOW + MINUTE] * SLOTS, [None] * SLOTS
        beat = ("", 0, MINUTE, NOW, slots)
        lock = (NOW + 2 * MINUTE, 1000, 1, 0, NOW, "10s")
        await assert_spared(
            database,
            size,
            {
                "BEAT": (shard_sql.BEAT, (*beat, floors), (*beat, none)),
                "LOCK": (generation_sql.LOCK_CURSORS_OF_SLOTS, (slots, floors, *lock), (slots, none, *lock)),
            },
        )


# What comes late


@pytest.fixture
def rare_sweeps(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Every sweep is slow, and then there is none until the test moves the clock."""
    monkeypatch.setattr(cron_ticks.sweeps, "QUICK_SECONDS", 0.0)
    monkeypatch.setattr(cron_ticks.sweeps, "RESTS", 10**9)
    clock = Clock()
    clock.step = 0.001
    return clock


def sweep_again(clock: Clock) -> None:
    clock.now += 10**9


async def put_late(connection: Any, schedule_id: str, age: timedelta) -> str:
    """A tick of the schedule that was due so long ago, as the transaction that makes it sees it."""
    tick_id = new_tick_id()
    await connection.execute(
        """INSERT INTO cron_ticks (id, schedule_id, schedule_name, queue_name, payload, scheduled_for, execute_at,
            due_at, created_at)
        SELECT $1, $2, 'queue', 'queue', '{}', moment, moment, moment, moment
        FROM (SELECT statement_timestamp() - $3::interval AS moment) AS due""",
        tick_id,
        schedule_id,
        age,
    )
    return tick_id


@asynccontextmanager
async def firing(database: Database, clock: Clock) -> AsyncIterator[Rig]:
    """A real firer with floors, which has nothing left to fire."""
    async with rig(database, handling(lambda _: None)) as parts:
        parts.firer._floors.sweeps = Sweeps(clock)
        await parts.firer.run_once()
        await parts.firer.run_once()
        yield parts


@pytest.mark.sql
async def test_a_tick_that_is_committed_below_the_floor_fires_at_the_next_sweep(
    database: Database, connection: Any, rare_sweeps: Clock
) -> None:
    now = await connection.fetchval("SELECT statement_timestamp()")
    schedule = await Engine(database, now).declare(every=3600, jitter=None)
    outcome = "SELECT outcome FROM cron_runs WHERE message_id = 'msg_' || substr($1, 6)"
    transaction = connection.transaction()
    await transaction.start()
    tick_id = await put_late(connection, schedule.id, 10 * SECOND)
    async with firing(database, rare_sweeps) as parts:
        await transaction.commit()
        await parts.firer.run_once()
        assert await connection.fetchval(outcome, tick_id) is None  # or the floor is not in use
        sweep_again(rare_sweeps)
        await parts.firer.run_once()
        assert await connection.fetchval(outcome, tick_id) == "enqueued"


@pytest.mark.sql
async def test_what_is_due_at_once_fires_at_once_though_somebody_looked_before_its_commit(
    database: Database, connection: Any, rare_sweeps: Clock
) -> None:
    now = await connection.fetchval("SELECT statement_timestamp()")
    schedule = await Engine(database, now).declare(every=3600, jitter=None)
    async with firing(database, rare_sweeps) as parts:
        await parts.firer.run_once()
        tick_id = await put_late(connection, schedule.id, MARGIN / 2)
        assert not parts.firer._floors.sweeps.due
        await parts.firer.run_once()
    assert await connection.fetchval("SELECT count(*) FROM cron_ticks WHERE id = $1", tick_id) == 0


@pytest.mark.sql
async def test_a_tick_that_is_committed_late_by_minutes_is_caught_up_with(
    database: Database, connection: Any, rare_sweeps: Clock
) -> None:
    """One sweep finds that a policy must decide; it may need another to find what was decided."""
    now = await connection.fetchval("SELECT statement_timestamp()")
    schedule = await Engine(database, now).declare(every=3600, jitter=None, catch_up="latest")
    outcomes = "SELECT message_id, outcome FROM cron_runs WHERE scheduled_for < $1 ORDER BY scheduled_for"
    transaction = connection.transaction()
    await transaction.start()
    older = await put_late(connection, schedule.id, 3 * MINUTE)
    newer = await put_late(connection, schedule.id, 2 * MINUTE)
    async with firing(database, rare_sweeps) as parts:
        await transaction.commit()
        await parts.firer.run_once()
        assert await connection.fetch(outcomes, now) == []
        for _ in range(2):
            sweep_again(rare_sweeps)
            await parts.firer.run_once()
        assert [tuple(row) for row in await connection.fetch(outcomes, now)] == [
            (None, "missed"),
            (f"msg_{newer.removeprefix('tick_')}", "enqueued"),
        ]
        assert await connection.fetchval("SELECT count(*) FROM cron_ticks WHERE id = $1", older) == 0


@pytest.mark.sql
@pytest.mark.parametrize("manager_id", ["", "ticker_x"], ids=["all slots", "leased shards"])
async def test_a_cursor_that_is_put_back_below_the_floor_is_found_by_the_next_sweep(
    database: Database, connection: Any, rare_sweeps: Clock, manager_id: str
) -> None:
    engine = Engine(database, NOW)
    schedule = await engine.declare(every=10, jitter=None)
    manager = ScheduleManager(database, engine.repository, engine.settings, manager_id=manager_id)
    manager._sweeps = Sweeps(rare_sweeps)
    made = "SELECT count(*) FROM cron_ticks WHERE schedule_id = $1"
    await manager.run_once()
    await manager.run_once()
    await connection.execute("DELETE FROM cron_ticks WHERE scheduled_for >= $1", NOW + 30 * SECOND)
    await connection.execute("UPDATE cron_schedule_cursors SET next_tick_needed_at = $1", NOW + 30 * SECOND)
    await manager.run_once()
    assert await connection.fetchval(made, schedule.id) == 3  # or the floor is not in use
    sweep_again(rare_sweeps)
    await manager.run_once()
    assert await connection.fetchval(made, schedule.id) == 6


@pytest.mark.sql
async def test_between_sweeps_the_window_is_made_on_and_ticks_fire(
    database: Database, connection: Any, rare_sweeps: Clock
) -> None:
    """Floors leave nothing out that comes in its time, batch after batch."""
    engine = Engine(database, NOW, manager_batch_size=3)
    for number in range(10):
        await engine.declare("queue", name=f"schedule {number}", every=5 + number, jitter=None)
    engine.manager._sweeps = Sweeps(rare_sweeps)
    floors = TickFloors()
    floors.sweeps = Sweeps(rare_sweeps)
    for step in range(30):
        engine.now = NOW + 10 * step * SECOND
        await engine.manager.run_once()
        await engine.repository.next_due_in("queue", floors=floors, now=engine.now)
        fired = await engine.repository.fire_due_ticks(
            QUEUE_SINK, ticker_id="ticker_x", limit=1000, now=engine.now, floors=floors.reached(0)
        )
        floors.note_taken(0, fired)
    expected = sum(290 // (5 + number) + 1 for number in range(10))
    assert await connection.fetchval("SELECT count(*) FROM cron_runs WHERE outcome = 'enqueued'") == expected
    assert not floors.sweeps.due
    assert not engine.manager._sweeps.due
