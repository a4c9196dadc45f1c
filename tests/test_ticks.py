"""Making ticks and firing them: each occurrence once, whoever works at the same time."""

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest
from structlog.testing import capture_logs

from cron_ticks.checks import PRIORITIES
from cron_ticks.cleanup import CleanupWorker
from cron_ticks.database import Database
from cron_ticks.ids import new_tick_id
from cron_ticks.lease_sql import LEASE_DUE_TICKS
from cron_ticks.repository import CronRepository
from cron_ticks.rows import count_of
from cron_ticks.schedule_manager import ScheduleManager
from cron_ticks.schedules import define_schedule
from cron_ticks.settings import Settings
from cron_ticks.tick_repository import firing_statement
from support.rig import handling, rig
from token_queue.queue_repository import QUEUE_SINK

pytestmark = pytest.mark.every_version

SINK = QUEUE_SINK
START = datetime(2026, 1, 1, tzinfo=UTC)
SECOND = timedelta(seconds=1)


@pytest.fixture
def repository(database: Database, settings: Settings) -> CronRepository:
    return CronRepository(database, settings)


@pytest.fixture
async def now(connection: "asyncpg.Connection[asyncpg.Record]") -> datetime:
    found: datetime = await connection.fetchval("SELECT statement_timestamp()")
    return found


async def declare(
    repository: CronRepository, count: int, *, at: datetime | None = None, every: float = 5, **options: Any
) -> list[str]:
    return [
        (
            await repository.save_schedule(
                define_schedule("queue", every=every, name=f"n{number}", payload={"number": number}, **options),
                now=at,
            )
        ).schedule.id
        for number in range(count)
    ]


async def without_ticks(connection: Any) -> None:
    """As if a manager had still to make them all."""
    await connection.execute("DELETE FROM cron_ticks")
    await connection.execute(
        """UPDATE cron_schedule_cursors SET next_tick_needed_at = anchor_at, planned = 0
        FROM cron_schedules WHERE id = schedule_id"""
    )


async def put_in_by_hand(connection: Any, schedule_id: str, occurrence: datetime, *, execute_at: datetime) -> None:
    await connection.execute(
        """INSERT INTO cron_ticks (id, schedule_id, schedule_name, queue_name, payload, scheduled_for, execute_at,
            due_at, created_at)
        VALUES ($1, $2, 'n0', 'queue', '{}', $3, $4, $4, $4)""",
        new_tick_id(),
        schedule_id,
        occurrence,
        execute_at,
    )


async def count(connection: Any, table: str) -> int:
    found: int = await connection.fetchval(f"SELECT count(*) FROM {table}")
    return found


async def column(connection: Any, query: str, *arguments: object) -> list[Any]:
    return [row[0] for row in await connection.fetch(query, *arguments)]


async def test_a_pass_makes_every_tick_of_the_window(
    database: Database, repository: CronRepository, settings: Settings, connection: Any
) -> None:
    [schedule_id] = await declare(repository, 1)
    await without_ticks(connection)
    with capture_logs() as logs:
        delay = await ScheduleManager(database, repository, settings).run_once()
    assert settings.manager_interval_seconds - 5 < delay <= settings.manager_interval_seconds
    rows = await connection.fetch("SELECT * FROM cron_ticks ORDER BY scheduled_for")
    schedule = await repository.get_schedule(schedule_id)
    assert [row["scheduled_for"] for row in rows] == [schedule.anchor_at + k * 5 * SECOND for k in range(len(rows))]
    cursor = await connection.fetchrow("SELECT next_tick_needed_at, planned FROM cron_schedule_cursors")
    assert tuple(cursor) == (schedule.anchor_at + len(rows) * 5 * SECOND, len(rows))
    assert len(rows) >= 12
    assert all(row["execute_at"] == row["due_at"] == schedule.execute_at(row["scheduled_for"]) for row in rows)
    assert len({row["execute_at"] - row["scheduled_for"] for row in rows}) == len(rows)
    assert [entry["event"] for entry in logs] == ["ticks_generated"]
    assert logs[0]["ticks"] == len(rows)


async def test_a_second_pass_makes_nothing_again(
    database: Database, repository: CronRepository, settings: Settings, connection: Any
) -> None:
    await declare(repository, 3, every=3600)
    manager = ScheduleManager(database, repository, settings)
    await without_ticks(connection)
    await manager.run_once()
    await manager.run_once()
    assert await count(connection, "cron_ticks") == 3


async def test_a_long_window_is_made_piece_by_piece(
    database: Database, settings: Settings, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No transaction makes more than so many ticks of one schedule, and yet none is left out."""
    monkeypatch.setattr("cron_ticks.generation_repository.MOST_TICKS_AT_ONCE", 7)
    repository = CronRepository(database, settings)
    [schedule_id] = await declare(repository, 1, every=1)
    assert await count(connection, "cron_ticks") == 7
    await ScheduleManager(database, repository, settings).run_once()
    anchor = (await repository.get_schedule(schedule_id)).anchor_at
    made = await column(connection, "SELECT scheduled_for FROM cron_ticks ORDER BY scheduled_for")
    assert made == [anchor + k * SECOND for k in range(len(made))]
    assert len(made) >= 60


async def test_two_occurrences_due_at_the_same_microsecond_are_both_made(
    database: Database, repository: CronRepository, settings: Settings, connection: Any
) -> None:
    """The key knows only when a tick is due: what an old definition left must not take the new one's place."""
    [schedule_id] = await declare(repository, 1)
    schedule = await repository.get_schedule(schedule_id)
    await without_ticks(connection)
    occurrence = schedule.anchor_at + 2 * 5 * SECOND
    for number in range(3):
        moment = schedule.execute_at(occurrence) + number * timedelta(microseconds=1)
        await put_in_by_hand(connection, schedule_id, schedule.anchor_at - (number + 1) * SECOND, execute_at=moment)
    await ScheduleManager(database, repository, settings).run_once()
    made = await connection.fetch(
        "SELECT scheduled_for, execute_at FROM cron_ticks WHERE scheduled_for >= $1 ORDER BY 1", schedule.anchor_at
    )
    assert [row["scheduled_for"] for row in made] == [schedule.anchor_at + k * 5 * SECOND for k in range(len(made))]
    assert made[2]["execute_at"] == schedule.execute_at(occurrence) + timedelta(microseconds=3)


async def test_managers_at_once_make_each_occurrence_once(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    await declare(repository, 40)
    await without_ticks(connection)
    settings = Settings.load(manager_batch_size=3)
    managers = [ScheduleManager(database, repository, settings) for _ in range(6)]
    await asyncio.gather(*(manager.run_once() for manager in managers))
    rows = await connection.fetch(
        "SELECT count(*) AS ticks, count(DISTINCT scheduled_for) AS distinct_ticks FROM cron_ticks GROUP BY schedule_id"
    )
    assert len(rows) == 40
    assert all(row["ticks"] == row["distinct_ticks"] >= 12 for row in rows)


async def test_a_manager_does_not_wait_for_another(
    database: Database, repository: CronRepository, settings: Settings, connection: Any
) -> None:
    """One holds a schedule in its transaction; the other makes the rest meanwhile."""
    held, free = await declare(repository, 2)
    await without_ticks(connection)
    async with database.transaction() as other:
        taken = await repository.find_schedules_needing_ticks(limit=10, connection=other, ids=[held])
        assert [needing.schedule_id for needing in taken] == [held]
        await ScheduleManager(database, repository, settings).run_once()
        assert await column(connection, "SELECT DISTINCT schedule_id FROM cron_ticks") == [free]


async def test_a_manager_that_hangs_loses_its_session(database: Database, repository: CronRepository) -> None:
    async with database.transaction() as connection:
        await repository.find_schedules_needing_ticks(limit=10, connection=connection)
        assert await connection.fetchval("SHOW idle_in_transaction_session_timeout") == "10s"
    async with database.connection() as connection:
        assert await connection.fetchval("SHOW idle_in_transaction_session_timeout") == "0"


async def test_static_shards_share_all_schedules(database: Database, connection: Any) -> None:
    await declare(CronRepository(database, Settings()), 60, every=3600)
    await without_ticks(connection)
    per_shard = []
    for shard in range(3):
        before = await count(connection, "cron_ticks")
        settings = Settings.load(shard_count=3, shard_id=shard)
        await ScheduleManager(database, CronRepository(database, settings), settings).run_once()
        per_shard.append(await count(connection, "cron_ticks") - before)
    assert sum(per_shard) == 60
    assert min(per_shard) > 0


async def test_missed_occurrences_are_logged(
    database: Database, repository: CronRepository, settings: Settings, connection: Any, now: datetime
) -> None:
    await declare(repository, 1, at=now - timedelta(hours=1), every=60, jitter=None)
    await without_ticks(connection)
    with capture_logs() as logs:
        await ScheduleManager(database, repository, settings).run_once()
    [missed] = [entry["missed"] for entry in logs if entry["event"] == "occurrences_missed"]
    due = await connection.fetchval("SELECT count(*) FROM cron_ticks WHERE due_at <= statement_timestamp()")
    assert missed + due in {61, 62}
    assert due <= 3


async def test_a_broken_schedule_is_put_aside_and_its_batch_goes_on(
    database: Database, repository: CronRepository, settings: Settings, connection: Any
) -> None:
    broken, sound = await declare(repository, 2)
    await without_ticks(connection)
    await connection.execute("UPDATE cron_schedules SET interval_us = 9223372036854775807 WHERE id = $1", broken)
    manager = ScheduleManager(database, repository, settings)
    with capture_logs() as logs:
        await manager.run_once()
        await manager.run_once()
    assert [entry["schedule_id"] for entry in logs if entry["event"] == "schedule_broken"] == [broken]
    assert await column(connection, "SELECT DISTINCT schedule_id FROM cron_ticks") == [sound]
    found = await repository.get_schedule(broken)
    assert found.error is not None
    assert found.error.startswith("OverflowError")
    assert found.error_at is not None
    assert found in await repository.list_schedules()


async def test_a_schedule_whose_ticks_the_database_refuses_is_put_aside(
    database: Database, repository: CronRepository, settings: Settings, connection: Any
) -> None:
    schedules = await declare(repository, 5)
    await without_ticks(connection)
    await connection.execute("ALTER TABLE cron_ticks ADD CONSTRAINT refuse CHECK (schedule_name <> 'n3')")
    with capture_logs() as logs:
        await ScheduleManager(database, repository, settings).run_once()
    [event] = [entry for entry in logs if entry["event"] == "schedule_broken"]
    assert event["schedule_id"] == schedules[3]
    assert "refuse" in event["error"]
    assert await connection.fetchval("SELECT count(DISTINCT schedule_id) FROM cron_ticks") == 4


async def test_trouble_of_the_server_is_no_fault_of_a_schedule(
    database: Database, repository: CronRepository, settings: Settings, connection: Any
) -> None:
    await declare(repository, 3)
    await without_ticks(connection)
    await connection.execute(
        """CREATE FUNCTION disk_full() RETURNS trigger LANGUAGE plpgsql
        AS $$ BEGIN RAISE EXCEPTION 'no space left' USING ERRCODE = 'disk_full'; END $$"""
    )
    await connection.execute("CREATE TRIGGER full_disk BEFORE INSERT ON cron_ticks EXECUTE FUNCTION disk_full()")
    manager = ScheduleManager(database, repository, settings)
    with pytest.raises(asyncpg.DiskFullError):
        await manager.run_once()
    await connection.execute("DROP TRIGGER full_disk ON cron_ticks")
    await manager.run_once()
    assert await connection.fetchval("SELECT count(DISTINCT schedule_id) FROM cron_ticks") == 3


async def test_a_time_that_nobody_could_read_is_refused(repository: CronRepository, connection: Any) -> None:
    """It would stop every manager."""
    await declare(repository, 1)
    for column_name in ("anchor_at", "starts_at", "ends_at"):
        for moment in ("4000-01-01 BC", "20000-01-01", "infinity"):
            with pytest.raises(asyncpg.CheckViolationError):
                await connection.execute(f"UPDATE cron_schedules SET {column_name} = '{moment}'")


async def test_a_manager_does_not_wait_for_a_trigger_in_an_open_transaction(
    database: Database, repository: CronRepository, settings: Settings, connection: Any
) -> None:
    [schedule_id] = await declare(repository, 1)
    await without_ticks(connection)
    await connection.execute("UPDATE cron_schedules SET interval_us = 9223372036854775807")
    async with connection.transaction():
        await repository.trigger(schedule_id, connection=connection)
        async with asyncio.timeout(10):
            await ScheduleManager(database, repository, settings).run_once()
    assert (await repository.get_schedule(schedule_id)).error is not None


async def test_a_broken_schedule_gets_another_try_from_where_it_stopped(
    database: Database, repository: CronRepository, settings: Settings, connection: Any
) -> None:
    await declare(repository, 1)
    await without_ticks(connection)
    await connection.execute("ALTER TABLE cron_ticks ADD CONSTRAINT refuse CHECK (false)")
    manager = ScheduleManager(database, repository, settings)
    await manager.run_once()
    await connection.execute("ALTER TABLE cron_ticks DROP CONSTRAINT refuse")
    await manager.run_once()
    assert await count(connection, "cron_ticks") == 0
    definition = define_schedule("queue", every=5, name="n0", payload={"number": 0})
    again = await repository.save_schedule(definition)
    assert (again.change, again.schedule.error, again.schedule.version) == ("retried", None, 1)
    await manager.run_once()
    first = await connection.fetchval("SELECT min(scheduled_for) FROM cron_ticks")
    assert first == again.schedule.anchor_at


async def test_a_firing_ends_the_tick_and_begins_its_message(
    repository: CronRepository, connection: Any, now: datetime
) -> None:
    [schedule_id] = await declare(repository, 1, every=3600, at=now, priority="high")
    tick = await connection.fetchrow("SELECT * FROM cron_ticks")
    fired_at = now + 2 * SECOND
    [fired] = await repository.fire_due_ticks(SINK, ticker_id="ticker_me", limit=10, now=fired_at)
    assert (fired.id, fired.schedule_id, fired.scheduled_for) == (tick["id"], schedule_id, now)
    assert (fired.passed, fired.lateness) == (True, 2 * SECOND)
    assert await count(connection, "cron_ticks") == 0
    message = await connection.fetchrow("SELECT * FROM queue_messages")
    assert message["id"] == tick["id"].replace("tick_", "msg_")
    assert json.loads(message["payload"]) == {"number": 0}
    assert message["process_after"] == message["inserted_at"] == fired_at
    assert message["priority"] == 1
    headers = json.loads(message["headers"])
    assert datetime.fromisoformat(headers.pop("scheduled_for")) == now
    assert headers == {
        "schedule_id": schedule_id,
        "schedule_name": "n0",
        "tick_id": tick["id"],
        "attempt": 1,
        "ticker_id": "ticker_me",
        "origin": "schedule",
    }
    run = await connection.fetchrow("SELECT * FROM cron_runs")
    assert dict(run) == {
        "schedule_id": schedule_id,
        "scheduled_for": now,
        "version": 1,
        "origin": "schedule",
        "outcome": "enqueued",
        "reason": None,
        "message_id": message["id"],
        "ended_at": fired_at,
        "lateness": 2 * SECOND,
        "attempts": 1,
        "ticker_id": "ticker_me",
        "recovered": False,
        "recovery_time": None,
        "missed_since": None,
        "occurrences": 1,
    }


async def test_nothing_fires_before_it_is_due(repository: CronRepository, now: datetime) -> None:
    await declare(repository, 1, at=now + 30 * SECOND)
    assert await repository.fire_due_ticks(SINK, ticker_id="t", limit=10) == []
    assert len(await repository.fire_due_ticks(SINK, ticker_id="t", limit=10, now=now + 31 * SECOND)) == 1


async def test_the_gate_alone_stops_a_tick_put_in_by_hand(
    repository: CronRepository, connection: Any, now: datetime
) -> None:
    [schedule_id] = await declare(repository, 1, at=now, every=3600)
    await repository.fire_due_ticks(SINK, ticker_id="t", limit=10)
    await put_in_by_hand(connection, schedule_id, now, execute_at=now + timedelta(microseconds=1))
    [refused] = await repository.fire_due_ticks(SINK, ticker_id="t", limit=10)
    assert not refused.passed
    assert await count(connection, "queue_messages") == await count(connection, "cron_runs") == 1
    assert await count(connection, "cron_ticks") == 0


async def test_the_gate_stops_it_in_the_same_batch_too(
    repository: CronRepository, connection: Any, now: datetime
) -> None:
    [schedule_id] = await declare(repository, 1, at=now, every=3600)
    for number in range(1, 4):
        await put_in_by_hand(connection, schedule_id, now, execute_at=now - timedelta(microseconds=number))
    taken = await repository.fire_due_ticks(SINK, ticker_id="t", limit=10)
    assert sorted(tick.passed for tick in taken) == [False, False, False, True]
    assert await count(connection, "queue_messages") == 1


async def test_what_became_messages_is_told_of_together_and_the_rest_one_by_one(
    repository: CronRepository, connection: Any, now: datetime
) -> None:
    """By queue, workspace and priority; the lateness of each is known nevertheless."""
    ids = await declare(repository, 3, at=now, every=3600)
    await repository.fire_due_ticks(SINK, ticker_id="t", limit=10, now=now)
    await declare(repository, 2, at=now, every=3600, workspace_id="ws_A")
    await declare(repository, 1, at=now + SECOND, every=3600, workspace_id="ws_B", priority="urgent")
    for schedule_id in ids[:2]:
        await put_in_by_hand(connection, schedule_id, now, execute_at=now + SECOND)
    await put_in_by_hand(connection, ids[2], now + SECOND, execute_at=now + 2 * SECOND)
    taken = await repository.fire_due_ticks(SINK, ticker_id="t", limit=10, now=now + 3 * SECOND, each=False)
    found = sorted((tick.outcome, tick.workspace_id or "", tick.schedule_id, tick.lateness_seconds) for tick in taken)
    assert [row for row in found if row[0] == "refused"] == [("refused", "", id_, [2.0]) for id_ in sorted(ids[:2])]
    assert [row for row in found if row[0] == "enqueued"] == [
        ("enqueued", "", "", [1.0]),
        ("enqueued", "ws_A", "", [3.0, 3.0]),
        ("enqueued", "ws_B", "", [2.0]),
    ]
    assert taken[0].workspace_id == "ws_B", "by priority"
    assert max(tick.due_at for tick in taken) == now + 2 * SECOND
    assert count_of(taken) == 6
    assert {tick.id for tick in taken if tick.passed} == {""}


async def test_the_ticker_says_what_the_gate_refused(
    database: Database, repository: CronRepository, connection: Any, now: datetime
) -> None:
    [schedule_id] = await declare(repository, 1, at=now, every=3600)
    await repository.fire_due_ticks(SINK, ticker_id="t", limit=10)
    await put_in_by_hand(connection, schedule_id, now, execute_at=now + timedelta(microseconds=1))

    async def handle(_message: Any) -> None: ...

    async with rig(database, handling(handle)) as worker:
        with capture_logs() as logs:
            await worker.firer.run_once()
    [event] = [entry for entry in logs if entry["event"] == "tick_refused"]
    assert (event["schedule_id"], event["scheduled_for"]) == (schedule_id, now.isoformat())


async def test_urgent_ticks_go_first_and_nobody_starves(repository: CronRepository, now: datetime) -> None:
    """A pass drains what was due when it began, by priority; what becomes due meanwhile is for the next."""
    for number, priority in enumerate(reversed(PRIORITIES)):
        definition = define_schedule("queue", every=3600, name=priority, priority=priority)
        await repository.save_schedule(definition, now=now + number * SECOND)
    at = now + 10 * SECOND
    [first] = await repository.fire_due_ticks(SINK, ticker_id="t", limit=1, now=at)
    assert (first.schedule_name, first.due_until) == ("urgent", at)
    definition = define_schedule("queue", every=3600, name="late", priority="urgent")
    await repository.save_schedule(definition, now=at + SECOND)
    later = at + 2 * SECOND
    rest = [
        (await repository.fire_due_ticks(SINK, ticker_id="t", limit=1, now=later, due_until=first.due_until))[0]
        for _ in range(3)
    ]
    assert [tick.schedule_name for tick in rest] == ["high", "normal", "low"]
    assert await repository.fire_due_ticks(SINK, ticker_id="t", limit=1, now=later, due_until=at) == []
    [late] = await repository.fire_due_ticks(SINK, ticker_id="t", limit=1, now=later)
    assert late.schedule_name == "late"
    assert late.lateness == SECOND


async def test_of_one_priority_the_first_due_goes_first(
    repository: CronRepository, connection: Any, now: datetime
) -> None:
    for number in (2, 0, 3, 1):
        await repository.save_schedule(
            define_schedule("queue", every=3600, name=str(number)), now=now + number * SECOND
        )
    at = now + 10 * SECOND
    await repository.fire_due_ticks(SINK, ticker_id="t", limit=2, now=at)
    await repository.fire_due_ticks(SINK, ticker_id="t", limit=2, now=at + SECOND)
    names = await column(connection, "SELECT headers ->> 'schedule_name' FROM queue_messages ORDER BY sequence")
    assert names == ["0", "1", "2", "3"]


async def test_a_tick_of_long_ago_gets_its_partition(repository: CronRepository, connection: Any) -> None:
    """The ledger has none for that day: firing makes one, and goes on."""
    await declare(repository, 1, at=START, every=3600)
    assert not await connection.fetchval("SELECT to_regclass('cron_runs_20260101') IS NOT NULL")
    assert len(await repository.fire_due_ticks(SINK, ticker_id="t", limit=10, now=START)) == 1
    assert await count(connection, "cron_runs_20260101") == 1


async def test_partitions_are_made_days_ahead_and_once(repository: CronRepository, now: datetime) -> None:
    later = now + timedelta(days=70)
    assert await repository.make_partitions() == 0
    made = await asyncio.gather(*(repository.make_partitions(now=later) for _ in range(5)))
    assert sorted(made) == [0, 0, 0, 0, 15]
    await declare(repository, 1, at=later + timedelta(days=7), every=3600)
    fired = await repository.fire_due_ticks(SINK, ticker_id="t", limit=10, now=later + timedelta(days=7))
    assert len(fired) == 1


@pytest.mark.parametrize("style", ["SQL, MDY", "Postgres, DMY", "German"])
async def test_the_days_of_partitions_are_utc_whatever_the_session_says(connection: Any, style: str) -> None:
    """PostgreSQL 15 and 16 print Shanghai's time as CST, and read it as Chicago's."""
    await connection.execute(f"SET timezone = 'Asia/Shanghai'; SET datestyle = '{style}'")
    await connection.execute("SELECT cron_make_partition('runs', '2027-03-04')")
    await connection.execute("SET timezone = 'UTC'; SET datestyle = 'ISO'")
    bound = await connection.fetchval(
        "SELECT pg_get_expr(relpartbound, oid) FROM pg_class WHERE relname = 'cron_runs_20270304'"
    )
    assert bound == "FOR VALUES FROM ('2027-03-04 00:00:00+00') TO ('2027-03-05 00:00:00+00')"


async def test_a_table_in_the_way_of_a_partition_is_said(connection: Any) -> None:
    await connection.execute("ALTER TABLE cron_runs DETACH PARTITION " + await last_partition(connection))
    day = (await last_detached(connection))[-8:]
    with pytest.raises(asyncpg.DuplicateTableError, match=f"cron_runs_{day}"):
        await connection.execute("SELECT cron_make_partition('runs', $1::text::date)", day)


async def last_partition(connection: Any) -> str:
    found: str = await connection.fetchval(
        "SELECT max(inhrelid::regclass::text) FROM pg_inherits WHERE inhparent = 'cron_runs'::regclass"
    )
    return found


async def last_detached(connection: Any) -> str:
    found: str = await connection.fetchval("SELECT max(relname) FROM pg_class WHERE relname ~ '^cron_runs_[0-9]+$'")
    return found


async def test_making_a_partition_does_not_wait_for_a_firing(
    database: Database, repository: CronRepository, connection: Any, now: datetime
) -> None:
    """Nor does a firing wait for it: one transaction has inserted a run, the other attaches a partition."""
    async with connection.transaction():
        await connection.execute(
            """INSERT INTO cron_runs (schedule_id, scheduled_for, version, origin, outcome, ended_at, attempts)
            VALUES ('cron_x', $1, 1, 'schedule', 'enqueued', $1, 1)""",
            now,
        )
        async with database.transaction() as maker:
            assert await maker.fetchval("SELECT cron_make_partition('runs', '2031-05-06')")
            [schedule_id] = await declare(repository, 1, every=3600)
            [fired] = await repository.fire_due_ticks(SINK, ticker_id="t", limit=10)
            assert fired.schedule_id == schedule_id


async def test_tickers_at_once_fire_each_tick_once(repository: CronRepository, connection: Any) -> None:
    await declare(repository, 50)
    made = await count(connection, "cron_ticks")
    patient = CronRepository(repository.database, Settings.load(missed_after_seconds=600))
    later = await connection.fetchval("SELECT max(due_at) FROM cron_ticks")

    async def drain(name: str) -> int:
        fired = 0
        while batch := await patient.fire_due_ticks(SINK, ticker_id=name, limit=9, now=later):
            fired += len(batch)
        return fired

    shares = await asyncio.gather(*(drain(f"ticker_{number}") for number in range(6)))
    assert sum(shares) == made == await count(connection, "queue_messages") == await count(connection, "cron_runs")
    assert await count(connection, "cron_ticks") == 0


async def test_a_failed_send_keeps_the_tick_and_leaves_no_run(repository: CronRepository, connection: Any) -> None:
    await declare(repository, 1, every=3600)
    await connection.execute("ALTER TABLE queue_messages ADD CONSTRAINT refuse CHECK (false)")
    with pytest.raises(asyncpg.CheckViolationError):
        await repository.fire_due_ticks(SINK, ticker_id="t", limit=10)
    assert (await count(connection, "cron_ticks"), await count(connection, "cron_runs")) == (1, 0)
    await connection.execute("ALTER TABLE queue_messages DROP CONSTRAINT refuse")
    assert len(await repository.fire_due_ticks(SINK, ticker_id="t", limit=10)) == 1


async def test_a_leased_tick_is_its_owners_until_the_lease_ends(repository: CronRepository, now: datetime) -> None:
    await declare(repository, 2, every=3600, at=now)
    mine, other = (await repository.batch_lease_ticks(sink="queue", leased_by="me", limit=5, now=now)).ticks
    assert mine.leased_until == now + 10 * SECOND
    assert (mine.attempts, mine.origin, mine.queue_name) == (1, "schedule", "queue")
    assert (await repository.batch_lease_ticks(sink="queue", leased_by="you", limit=5, now=now + SECOND)).found == 0
    assert await repository.fire_due_ticks(SINK, ticker_id="t", limit=5, now=now + SECOND) == []
    assert not await repository.delete_tick(mine.id, leased_by="you", now=now + SECOND)
    assert await repository.delete_tick(mine.id, leased_by="me", now=now + SECOND)
    assert not await repository.delete_tick(mine.id, leased_by="me", now=now + SECOND)
    late = now + 10 * SECOND
    assert not await repository.delete_tick(other.id, leased_by="me", now=late)
    [taken] = (await repository.batch_lease_ticks(sink="queue", leased_by="you", limit=5, now=late)).ticks
    assert (taken.id, taken.attempts, taken.recovery) == (other.id, 2, True)


async def test_ticks_whose_last_lease_ran_out_are_recorded_and_removed(
    repository: CronRepository, connection: Any, now: datetime
) -> None:
    schedule_id, _ = await declare(repository, 2, every=3600, at=now)
    for attempt in range(2):
        await repository.batch_lease_ticks(sink="queue", leased_by="me", limit=2, now=now + attempt * 10 * SECOND)
    await connection.execute("UPDATE cron_ticks SET attempts = 3 WHERE schedule_id = $1", schedule_id)
    minutes = timedelta(minutes=5)
    expired_at = now + 20 * SECOND + minutes
    assert await repository.delete_expired_ticks(expired_for=minutes, limit=5, now=expired_at) == 0
    removed = await repository.delete_expired_ticks(expired_for=minutes, limit=5, now=expired_at + SECOND)
    assert removed == 1
    run = await connection.fetchrow("SELECT schedule_id, outcome, reason, attempts FROM cron_runs")
    reason = "its lease ran out and it may not be tried again: whether it was delivered is unknown"
    assert tuple(run) == (schedule_id, "expired", reason, 3)
    assert await count(connection, "cron_ticks") == 1


async def test_orphaned_ticks_are_cleaned_up_in_batches(repository: CronRepository, connection: Any) -> None:
    await declare(repository, 12, every=3600)
    settings = Settings.load(cleanup_batch_size=2)
    await connection.execute("DELETE FROM cron_schedules WHERE name <> 'n3'")
    with capture_logs() as logs:
        delay = await CleanupWorker(repository, settings).run_once()
    assert delay == settings.cleanup_interval_seconds
    assert await column(connection, "SELECT schedule_name FROM cron_ticks") == ["n3"]
    assert [(entry["event"], entry["orphaned_ticks"]) for entry in logs] == [("cleaned_up", 11)]


LOCKING: dict[str, tuple[str, tuple[object, ...]]] = {
    "firing": (firing_statement(SINK, each=True), (None, "queue", 0, 60 * SECOND, [None] * 4)),
    "leasing": (LEASE_DUE_TICKS, (10 * SECOND, "queue", 3, timedelta(days=1), 2, 60 * SECOND, [None] * 12)),
}


@pytest.mark.parametrize("what", LOCKING)
async def test_a_long_ledger_does_not_use_up_the_servers_locks(
    repository: CronRepository, database: Database, connection: Any, now: datetime, what: str
) -> None:
    """However many days are kept, a statement locks those that it needs."""
    days = "SELECT cron_make_partition('runs', date '2020-01-01' + k) FROM generate_series(0, 89) AS k"
    await connection.execute(days)
    await declare(repository, 3, at=now)
    statement, arguments = LOCKING[what]
    async with database.transaction() as own:
        assert len(await database.fetch(statement, "ticker_me", 10, now, *arguments, connection=own)) >= 3
        locks = await own.fetchval("SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid()")
    assert locks < 60
