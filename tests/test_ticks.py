"""Making ticks and firing them: each occurrence once, whoever works at the same time."""

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest
from structlog.testing import capture_logs

from cron_ticks.cleanup import CleanupWorker
from cron_ticks.database import Database
from cron_ticks.repository import CronRepository, firing_statement
from cron_ticks.repository_sql import FIRE_DUE_TICKS, LOCK_CURSORS_IN_WINDOW
from cron_ticks.schedule_manager import ScheduleManager
from cron_ticks.schedules import define_schedule
from cron_ticks.settings import Settings
from token_queue.queue_repository import QueueSink

pytestmark = pytest.mark.sql

SINK = QueueSink()


@pytest.fixture
def repository(database: Database) -> CronRepository:
    return CronRepository(database)


@pytest.fixture
async def now(connection: "asyncpg.Connection[asyncpg.Record]") -> datetime:
    found: datetime = await connection.fetchval("SELECT statement_timestamp()")
    return found


async def declare(repository: CronRepository, count: int, *, at: datetime | None = None, every: float = 5) -> list[str]:
    return [
        (
            await repository.save_schedule(
                define_schedule("queue", every=every, name=f"n{number}", payload={"number": number}),
                missed_after=timedelta(minutes=1),
                now=at,
            )
        ).schedule.id
        for number in range(count)
    ]


async def count(connection: Any, table: str) -> int:
    found: int = await connection.fetchval(f"SELECT count(*) FROM {table}")
    return found


async def test_a_pass_makes_every_tick_of_the_window(
    database: Database, repository: CronRepository, settings: Settings, connection: Any
) -> None:
    [schedule_id] = await declare(repository, 1)
    with capture_logs() as logs:
        delay = await ScheduleManager(database, repository, settings).run_once()
    assert delay == settings.manager_interval_seconds
    rows = await connection.fetch("SELECT * FROM cron_ticks ORDER BY execute_at")
    schedule = await repository.get_schedule(schedule_id)
    assert [row["scheduled_for"] for row in rows] == [
        schedule.anchor_at + timedelta(seconds=5 * k) for k in range(len(rows))
    ]
    cursor = await connection.fetchval("SELECT next_tick_needed_at FROM cron_schedule_cursors")
    assert cursor == schedule.anchor_at + len(rows) * timedelta(seconds=5)
    assert len(rows) >= 12
    assert all(row["execute_at"] == row["scheduled_for"] == row["due_at"] for row in rows)
    assert [entry["event"] for entry in logs] == ["ticks_generated"]
    assert logs[0]["ticks"] == len(rows)


async def test_a_second_pass_makes_nothing_again(
    database: Database, repository: CronRepository, settings: Settings, connection: Any
) -> None:
    await declare(repository, 3, every=3600)
    manager = ScheduleManager(database, repository, settings)
    await manager.run_once()
    await manager.run_once()
    assert await count(connection, "cron_ticks") == 3


async def test_managers_at_once_make_each_occurrence_once(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    await declare(repository, 40)
    settings = Settings.load(manager_batch_size=3)
    managers = [ScheduleManager(database, repository, settings) for _ in range(6)]
    await asyncio.gather(*(manager.run_once() for manager in managers))
    rows = await connection.fetch(
        "SELECT count(*) AS ticks, count(DISTINCT scheduled_for) AS distinct_ticks FROM cron_ticks GROUP BY schedule_id"
    )
    assert len(rows) == 40
    assert all(row["ticks"] == row["distinct_ticks"] >= 12 for row in rows)


async def test_static_shards_share_all_schedules(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    await declare(repository, 60, every=3600)
    per_shard = []
    for shard in range(3):
        before = await count(connection, "cron_ticks")
        settings = Settings.load(shard_count=3, shard_id=shard)
        await ScheduleManager(database, repository, settings).run_once()
        per_shard.append(await count(connection, "cron_ticks") - before)
    assert sum(per_shard) == 60
    assert min(per_shard) > 0


async def test_missed_occurrences_are_logged(
    database: Database, repository: CronRepository, settings: Settings, connection: Any, now: datetime
) -> None:
    await declare(repository, 1, at=now - timedelta(hours=1), every=60)
    with capture_logs() as logs:
        await ScheduleManager(database, repository, settings).run_once()
    [missed] = [entry["missed"] for entry in logs if entry["event"] == "occurrences_missed"]
    due = await connection.fetchval("SELECT count(*) FROM cron_ticks WHERE due_at <= statement_timestamp()")
    assert missed + due in {61, 62}
    assert due <= 3


async def test_a_firing_ends_the_tick_and_begins_its_message(
    database: Database, repository: CronRepository, settings: Settings, connection: Any
) -> None:
    [schedule_id] = await declare(repository, 1, every=3600)
    await ScheduleManager(database, repository, settings).run_once()
    tick = await connection.fetchrow("SELECT * FROM cron_ticks")
    [fired] = await repository.fire_due_ticks(SINK, ticker_id="ticker_me", limit=10)
    assert (fired.id, fired.schedule_id, fired.scheduled_for) == (tick["id"], schedule_id, tick["scheduled_for"])
    assert fired.lateness >= timedelta(0)
    assert await count(connection, "cron_ticks") == 0
    message = await connection.fetchrow("SELECT * FROM queue_messages")
    assert message["id"] == tick["id"].replace("tick_", "msg_")
    assert json.loads(message["payload"]) == {"number": 0}
    assert message["process_after"] == message["inserted_at"]
    headers = json.loads(message["headers"])
    assert datetime.fromisoformat(headers.pop("scheduled_for")) == tick["scheduled_for"]
    assert headers == {
        "schedule_id": schedule_id,
        "schedule_name": "n0",
        "tick_id": tick["id"],
        "ticker_id": "ticker_me",
        "origin": "schedule",
    }


async def test_nothing_fires_before_it_is_due(
    database: Database, repository: CronRepository, settings: Settings, now: datetime
) -> None:
    await declare(repository, 1, at=now + timedelta(seconds=30))
    await ScheduleManager(database, repository, settings).run_once()
    assert await repository.fire_due_ticks(SINK, ticker_id="t", limit=10) == []
    later = now + timedelta(seconds=31)
    assert len(await repository.fire_due_ticks(SINK, ticker_id="t", limit=10, now=later)) == 1


async def test_tickers_at_once_fire_each_tick_once(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    await declare(repository, 50)
    await ScheduleManager(database, repository, Settings.load(manager_batch_size=1000)).run_once()
    made = await count(connection, "cron_ticks")
    later = datetime(2100, 1, 1, tzinfo=UTC)

    async def drain(name: str) -> int:
        fired = 0
        while batch := await repository.fire_due_ticks(SINK, ticker_id=name, limit=9, now=later):
            fired += len(batch)
        return fired

    shares = await asyncio.gather(*(drain(f"ticker_{number}") for number in range(6)))
    assert sum(shares) == made == await count(connection, "queue_messages")
    assert await count(connection, "cron_ticks") == 0


async def test_a_failed_send_keeps_the_tick(
    database: Database, repository: CronRepository, settings: Settings, connection: Any
) -> None:
    await declare(repository, 1, every=3600)
    await ScheduleManager(database, repository, settings).run_once()
    await connection.execute("ALTER TABLE queue_messages ADD CONSTRAINT refuse CHECK (false)")
    with pytest.raises(asyncpg.CheckViolationError):
        await repository.fire_due_ticks(SINK, ticker_id="t", limit=10)
    assert await count(connection, "cron_ticks") == 1
    await connection.execute("ALTER TABLE queue_messages DROP CONSTRAINT refuse")
    assert len(await repository.fire_due_ticks(SINK, ticker_id="t", limit=10)) == 1


async def test_orphaned_ticks_are_cleaned_up_in_batches(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    await declare(repository, 12, every=3600)
    settings = Settings.load(cleanup_batch_size=2)
    await ScheduleManager(database, repository, settings).run_once()
    await connection.execute("DELETE FROM cron_schedules WHERE name <> 'n3'")
    with capture_logs() as logs:
        delay = await CleanupWorker(repository, settings).run_once()
    assert delay == settings.cleanup_interval_seconds
    assert [row["schedule_name"] for row in await connection.fetch("SELECT schedule_name FROM cron_ticks")] == ["n3"]
    assert [(entry["event"], entry["orphaned_ticks"]) for entry in logs] == [("cleaned_up", 11)]


def plan_nodes(node: dict[str, Any]) -> list[tuple[str, str | None]]:
    nodes = [(node["Node Type"], node.get("Index Name"))]
    return nodes + [found for child in node.get("Plans", []) for found in plan_nodes(child)]


@pytest.mark.parametrize("analysed", [False, True])
async def test_hot_statements_use_their_indexes(database: Database, connection: Any, *, analysed: bool) -> None:
    await connection.execute(
        """INSERT INTO cron_schedules (id, name, queue_name, payload, interval_us, anchor_at, created_at, updated_at)
        SELECT 'cron_' || k, k, 'q', '{}', 86400000000, now(), now(), now() FROM generate_series(1, 20000) AS k"""
    )
    await connection.execute(
        """INSERT INTO cron_schedule_cursors
        SELECT 'cron_' || k, now() + k * interval '1 second' FROM generate_series(1, 20000) AS k"""
    )
    await connection.execute(
        """INSERT INTO cron_ticks (id, schedule_id, schedule_name, queue_name, payload,
            scheduled_for, execute_at, due_at, created_at)
        SELECT 'tick_' || k, 'cron_' || k, k, 'q', '{}', at, at, at, now()
        FROM generate_series(1, 20000) AS k, LATERAL (SELECT now() + k * interval '1 second' AS at) AS moment"""
    )
    if analysed:
        await connection.execute("ANALYZE")
    firing = await explain(connection, database.sql(firing_statement(SINK.insert_from_taken)), "t", 100, None)
    assert ("Index Scan", "cron_ticks_due_idx") in firing
    making = await explain(connection, database.sql(LOCK_CURSORS_IN_WINDOW), timedelta(seconds=60), 100, 1, 0, None)
    assert ("Index Scan", "cron_schedule_cursors_next_idx") in making
    for nodes in (firing, making):
        assert not any(name.startswith("Seq Scan") for name, _ in nodes)


async def explain(connection: Any, statement: str, *arguments: object) -> list[tuple[str, str | None]]:
    found = await connection.fetchval(f"EXPLAIN (FORMAT JSON) {statement}", *arguments)
    return plan_nodes(json.loads(found)[0]["Plan"])


def test_the_firing_statement_has_one_place_for_the_sink() -> None:
    assert FIRE_DUE_TICKS.count("{insert_from_taken}") == 1
