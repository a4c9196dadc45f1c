"""Making the ticks of many schedules at once: their ids, what is refused, edits meanwhile, and what it costs."""

import asyncio
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest
from ulid import ULID

from cron_ticks.cron_rules import CronRule
from cron_ticks.database import Database
from cron_ticks.occurrences import MICROSECOND, jitter_offset
from support.moved_clock import Engine
from support.random_schedules import put, put_cursors

SECOND = timedelta(seconds=1)
NOW = datetime(2026, 6, 15, 12, 0, 0, 5, tzinfo=UTC)


# The ids that the database makes


async def put_many(connection: Any, number: int, *, crons: tuple[str, ...] = (), **columns: Any) -> list[str]:
    """Schedules that need their first tick now: every second, or with these expressions in turn."""
    rule: dict[str, Any] = {"interval_us": None if crons else 1_000_000}
    rows = []
    for k in range(number):
        calendar = (
            {"cron": crons[k % len(crons)], "zone": "UTC", "dst_gap": "fire", "dst_fold": "first"} if crons else {}
        )
        names = {"id": f"cron_{k}", "name": f"schedule {k}", "queue_name": "queue", "payload": "{}"}
        rows.append(names | rule | calendar | {"anchor_at": NOW, "created_at": NOW, "updated_at": NOW} | columns)
    await put(connection, rows)
    await put_cursors(connection, {row["id"]: (NOW, 0) for row in rows})
    return [row["id"] for row in rows]


@pytest.mark.sql
async def test_ids_are_ulids_of_now_and_unique(database: Database, connection: Any) -> None:
    await put_many(connection, 200)
    before = datetime.now(UTC) - timedelta(milliseconds=1)
    await Engine(database, NOW).manager.run_once()
    after = datetime.now(UTC)
    ids = [row["id"] for row in await connection.fetch("SELECT id FROM cron_ticks")]
    assert len(set(ids)) == len(ids) == 200 * 60
    assert all(tick_id.startswith("tick_") and len(tick_id) == 5 + 26 for tick_id in ids)
    made = {ULID.from_str(tick_id.removeprefix("tick_")) for tick_id in ids}
    assert all(before <= ulid.datetime <= after for ulid in made)
    assert len({str(ulid)[10:] for ulid in made}) == len(ids)


# What the unique key refuses


@pytest.mark.sql
async def test_two_times_of_day_with_the_same_microsecond_both_get_ticks(database: Database, connection: Any) -> None:
    """Jitter moves the second and the ninth second of this schedule to the same microsecond."""
    half = 10 * SECOND
    seconds = [NOW.replace(microsecond=0) + k * SECOND for k in (2, 9)]
    schedule_id = "cron_80709"
    assert len({moment + jitter_offset(schedule_id, moment, half) for moment in seconds}) == 1
    await put_many(connection, 1, crons=("* * * * * *",), jitter_us=20_000_000, id=schedule_id)
    await Engine(database, NOW).manager.run_once()
    made = await connection.fetch("SELECT scheduled_for, execute_at FROM cron_ticks ORDER BY scheduled_for")
    assert [row["scheduled_for"] for row in made] == [seconds[0] + k * SECOND for k in range(-1, 59)]
    [first, second] = [row["execute_at"] for row in made if row["scheduled_for"] in seconds]
    assert abs(second - first) == MICROSECOND


@pytest.mark.sql
async def test_what_is_there_already_is_left_as_it_is(database: Database, connection: Any) -> None:
    """A second manager, and a trigger that has an occurrence's microsecond."""
    [schedule_id] = await put_many(connection, 1)
    engine = Engine(database, NOW)
    taken = NOW + 30 * SECOND
    await connection.execute(
        """INSERT INTO cron_ticks (id, schedule_id, schedule_name, queue_name, payload, scheduled_for, execute_at,
            due_at, created_at, origin)
        VALUES ('tick_by_hand', $1, 'by hand', 'queue', '{}', $2::timestamptz - interval '1 hour', $2, $2, $2,
            'trigger')""",
        schedule_id,
        taken,
    )
    await engine.manager.run_once()
    made = await connection.fetch("SELECT * FROM cron_ticks ORDER BY id")
    assert len(made) == 61
    await put_cursors(connection, {schedule_id: (NOW, 0)})
    await engine.manager.run_once()
    assert await connection.fetch("SELECT * FROM cron_ticks ORDER BY id") == made
    beside = {row["id"]: row["execute_at"] for row in made if abs(row["execute_at"] - taken) <= MICROSECOND}
    assert sorted(beside.values()) == [taken, taken + MICROSECOND]
    assert beside["tick_by_hand"] == taken


# Edits meanwhile


async def of_current_rule(connection: Any, engine: Engine, schedule_id: str, since: datetime) -> None:
    """Every tick from then on is of the schedule as it is now, and none is missing."""
    schedule = await engine.repository.get_schedule(schedule_id)
    window = engine.now + timedelta(seconds=engine.settings.lookahead_seconds)
    made = await connection.fetch(
        """SELECT scheduled_for, version, payload
        FROM cron_ticks WHERE schedule_id = $1 AND scheduled_for > $2 ORDER BY 1""",
        schedule_id,
        since,
    )
    wanted = schedule.timetable.occurrences(since + MICROSECOND, window)
    assert [row["scheduled_for"] for row in made] == wanted
    payload = await connection.fetchval("SELECT payload FROM cron_schedules WHERE id = $1", schedule_id)
    assert {(row["version"], row["payload"]) for row in made} == {(schedule.version, payload)}


@pytest.mark.sql
async def test_an_edit_waits_for_a_manager_that_has_the_schedule_and_then_makes_its_own_ticks(
    database: Database, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(database, NOW)
    schedule = await engine.declare(every=5, payload={"old": True})
    engine.now += 40 * SECOND
    held, go_on, make_ticks = asyncio.Event(), asyncio.Event(), engine.repository.make_ticks

    async def slowly(*arguments: Any, **options: Any) -> Any:
        held.set()
        await go_on.wait()
        return await make_ticks(*arguments, **options)

    monkeypatch.setattr(engine.repository, "make_ticks", slowly)
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        tasks.create_task(engine.manager.run_once())
        await held.wait()
        tasks.create_task(engine.edit(schedule.id, every=7, payload={"old": False}))
        await until_waiting("cron_schedule_cursors", connection)
        go_on.set()
    await of_current_rule(connection, engine, schedule.id, engine.now)


async def until_waiting(text: str, connection: Any) -> None:
    """Until a statement with this text waits for a lock."""
    waiting = """SELECT EXISTS (SELECT FROM pg_stat_activity
        WHERE datname = current_database() AND wait_event_type = 'Lock' AND position($1::text IN query) > 0)"""
    while not await connection.fetchval(waiting, text):
        pass


@pytest.mark.sql
async def test_a_manager_leaves_a_schedule_that_is_being_edited(database: Database, connection: Any, dsn: str) -> None:
    """Until the edit has committed: then its ticks are the new ones."""
    engine = Engine(database, NOW)
    schedule, other = await engine.declare(every=5, payload={"old": True}), await engine.declare("other", every=5)
    engine.now += 40 * SECOND
    editor = await asyncpg.connect(dsn)
    transaction = editor.transaction()
    await transaction.start()
    await editor.fetch("SELECT FROM cron_schedules WHERE id = $1 FOR UPDATE", schedule.id)
    await editor.fetch("SELECT FROM cron_schedule_cursors WHERE schedule_id = $1 FOR UPDATE", schedule.id)
    await editor.execute("""UPDATE cron_schedules SET payload = '"new"', version = 2 WHERE id = $1""", schedule.id)
    async with asyncio.timeout(30):
        await engine.manager.run_once()
    last = "SELECT max(scheduled_for) FROM cron_ticks WHERE schedule_id = $1"
    assert await connection.fetchval(last, schedule.id) == NOW + 55 * SECOND
    assert await connection.fetchval(last, other.id) == NOW + 95 * SECOND
    await transaction.commit()
    await editor.close()
    await engine.manager.run_once()
    await of_current_rule(connection, engine, schedule.id, NOW + 55 * SECOND)


@pytest.mark.sql
@pytest.mark.soak(small=6, full=100)
async def test_edits_and_managers_at_once_end_with_the_last_edit(
    database: Database, connection: Any, size: int
) -> None:
    """Nobody waits for somebody who waits for him, and no tick of an old rule is left."""
    engine = Engine(database, NOW, manager_batch_size=4)
    ids = [(await engine.declare("queue", name=f"schedule {k}", every=5)).id for k in range(12)]
    for step in range(size):
        engine.now += 20 * SECOND
        managers = [Engine(database, engine.now, manager_batch_size=4).manager for _ in range(4)]
        edits = [engine.edit(chosen, every=3 + (step + k) % 5, payload=step) for k, chosen in enumerate(ids)]
        await asyncio.gather(*edits, *(manager.run_once() for manager in managers))
        for schedule_id in ids:
            await of_current_rule(connection, engine, schedule_id, engine.now)


# What it costs


@pytest.mark.parametrize("batch", [50, 1000])
async def test_a_calendar_is_computed_once_for_all_who_share_it(
    database: Database, connection: Any, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    calls: Counter[str] = Counter()
    compute = CronRule.occurrences

    def counted(self: CronRule, *arguments: Any, **options: Any) -> list[datetime]:
        calls[self.expression] += 1
        return compute(self, *arguments, **options)

    monkeypatch.setattr(CronRule, "occurrences", counted)
    crons = ("* * * * *", "*/10 * * * * *", "0 12 * * *")
    await put_many(connection, 300, crons=crons)
    await Engine(database, NOW, manager_batch_size=batch).manager.run_once()
    assert await connection.fetchval("SELECT count(*) FROM cron_ticks") == 100 * (1 + 6)
    assert calls == dict.fromkeys(crons, 1)


async def test_a_batch_takes_as_many_statements_as_one_schedule(
    database: Database, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether they are in time or behind, intervals or times of day."""
    statements: list[str] = []
    fetch = Database.fetch

    async def counted(self: Database, text: str, *arguments: Any, **options: Any) -> Any:
        statements.append(text)
        return await fetch(self, text, *arguments, **options)

    async def statements_of_a_pass(number: int, now: datetime, *crons: str) -> int:
        await connection.execute("DELETE FROM cron_ticks; DELETE FROM cron_runs")
        await put_many(connection, number, crons=crons)
        engine = Engine(database, now)
        statements.clear()
        await engine.manager.run_once()
        assert await connection.fetchval("SELECT count(DISTINCT schedule_id) FROM cron_ticks") == number
        return len(statements)

    monkeypatch.setattr(Database, "fetch", counted)
    behind = NOW + 90 * SECOND
    for now, crons in ((NOW, ()), (NOW, ("* * * * *",)), (behind, ()), (behind, ("* * * * *",))):
        few, many = [await statements_of_a_pass(number, now, *crons) for number in (1, 500)]
        assert few == many <= 12, (now, crons)


async def test_an_expression_that_cant_be_followed_is_no_trouble_of_the_others(
    database: Database, connection: Any
) -> None:
    ids = await put_many(connection, 30, crons=("* * * * *", "no expression", "*/20 * * * * *"))
    await Engine(database, NOW).manager.run_once()
    broken = await connection.fetch("SELECT schedule_id FROM cron_schedule_cursors WHERE broken")
    assert sorted(row["schedule_id"] for row in broken) == sorted(ids[1::3])
    assert await connection.fetchval("SELECT count(*) FROM cron_ticks") == 10 * (1 + 3)


async def test_a_pass_in_several_batches_makes_all_of_them(database: Database, connection: Any) -> None:
    """However the schedules fall into slots and batches."""
    for number, batch in ((97, 1), (300, 7), (256, 256)):
        await connection.execute("DELETE FROM cron_ticks")
        await put_many(connection, number)
        await Engine(database, NOW, manager_batch_size=batch).manager.run_once()
        rows = await connection.fetch("SELECT schedule_id, count(*) FROM cron_ticks GROUP BY 1")
        assert {tuple(row) for row in rows} == {(f"cron_{k}", 60) for k in range(number)}
