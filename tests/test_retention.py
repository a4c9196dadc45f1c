"""How long things are kept: old days are dropped, what belongs to them goes with them, and no firing is lost by it."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from datetime import UTC, date, datetime, timedelta
from typing import Any

import asyncpg
import pytest
from structlog.testing import capture_logs

from cron_ticks import retention_repository, retention_sql
from cron_ticks.database import Database, open_database
from cron_ticks.errors import InvalidInputError
from cron_ticks.ledger import INTERVAL_SECONDS, LedgerKeeper
from cron_ticks.repository import CronRepository
from cron_ticks.retention_repository import DroppedPartitions, RetentionRepository
from cron_ticks.settings import Settings
from support.moved_clock import Engine
from token_queue import QueueManager, queue_sql
from token_queue.handlers import Handlers
from token_queue.maintenance import QueueMaintenance
from token_queue.queue_repository import QUEUE_SINK, QueueRepository
from token_queue.run_calls import CleanedUp

pytestmark = pytest.mark.sql

DAY = timedelta(days=1)
OLD = date(2020, 3, 2)  # a Monday
PARTITIONS = """
SELECT relname::text FROM pg_inherits JOIN pg_class ON oid = inhrelid
WHERE inhparent = $1::text::regclass ORDER BY relname
"""


@pytest.fixture
def retention(database: Database) -> RetentionRepository:
    return RetentionRepository(database)


@pytest.fixture
async def manager(dsn: str) -> AsyncIterator[QueueManager]:
    async with QueueManager(settings=Settings.load(dsn=dsn)) as opened:
        yield opened


@pytest.fixture
async def now(connection: Any) -> datetime:
    instant: datetime = await connection.fetchval("SELECT now()")
    return instant


def keeper(database: Database, **changes: Any) -> LedgerKeeper:
    settings = Settings.load(**changes)
    return LedgerKeeper(CronRepository(database, settings), RetentionRepository(database), settings)


def at(day: date, hour: int = 0) -> datetime:
    return datetime(day.year, day.month, day.day, hour, tzinfo=UTC)


async def make(connection: Any, kind: str, *days: date) -> None:
    for day in days:
        await connection.execute("SELECT cron_make_partition($1, $2)", kind, day)


async def partitions(connection: Any, table: str = "cron_runs") -> list[str]:
    return [row[0] for row in await connection.fetch(PARTITIONS, table)]


async def old_partitions(connection: Any, table: str = "cron_runs") -> list[str]:
    return [name for name in await partitions(connection, table) if name < f"{table}_2026"]


async def kept_since(connection: Any, kind: str = "runs") -> datetime | None:
    since: datetime | None = await connection.fetchval("SELECT kept_since FROM cron_retention WHERE kind = $1", kind)
    return since


async def drop(connection: Any, kind: str, before: datetime | None) -> str | None:
    name: str | None = await connection.fetchval("SELECT cron_drop_partition($1, $2)", kind, before)
    return name


async def test_days_that_are_wholly_past_are_dropped_the_oldest_first(connection: Any) -> None:
    await make(connection, "runs", OLD, OLD + 2 * DAY, OLD + DAY)
    assert await drop(connection, "runs", at(OLD, 23)) is None
    assert await kept_since(connection) is None
    assert await drop(connection, "runs", at(OLD + DAY)) == "cron_runs_20200302"
    assert await kept_since(connection) == at(OLD + DAY)
    assert await drop(connection, "runs", at(OLD + 10 * DAY)) == "cron_runs_20200303"
    assert await drop(connection, "runs", at(OLD + 10 * DAY)) == "cron_runs_20200304"
    assert await drop(connection, "runs", at(OLD + 10 * DAY)) is None
    assert await drop(connection, "runs", None) is None
    assert await kept_since(connection) == at(OLD + 3 * DAY)


async def test_weeks_of_events_are_dropped(connection: Any) -> None:
    await make(connection, "events", OLD, OLD + 7 * DAY)
    assert await drop(connection, "events", at(OLD + 6 * DAY, 23)) is None
    assert await drop(connection, "events", at(OLD + 7 * DAY)) == "execution_events_20200302"
    assert (await kept_since(connection, "events"), await kept_since(connection)) == (at(OLD + 7 * DAY), None)


async def test_neither_today_nor_the_future_is_ever_dropped(connection: Any, now: datetime) -> None:
    before = await partitions(connection)
    dropped = [name async for name in _drops(connection, "runs")]
    today = f"cron_runs_{now:%Y%m%d}"
    assert [name for name in before if name < today] == dropped
    assert await partitions(connection) == [name for name in before if name >= today]
    assert [name async for name in _drops(connection, "events")] == []


async def _drops(connection: Any, kind: str) -> AsyncIterator[str]:
    while (name := await drop(connection, kind, datetime(2499, 1, 1, tzinfo=UTC))) is not None:
        yield name


async def test_a_partition_of_somebody_elses_making_is_left_alone(connection: Any) -> None:
    await connection.execute(
        "CREATE TABLE cron_runs_archive PARTITION OF cron_runs FOR VALUES FROM ('2001-01-01Z') TO ('2002-01-01Z')"
    )
    await make(connection, "runs", OLD)
    assert await drop(connection, "runs", at(OLD + DAY)) == "cron_runs_20200302"
    assert await drop(connection, "runs", at(OLD + DAY)) is None
    assert "cron_runs_archive" in await partitions(connection)


async def test_an_unknown_kind_is_refused(connection: Any) -> None:
    with pytest.raises(asyncpg.PostgresError):
        await drop(connection, "ticks", at(OLD))


async def test_not_everybody_may_drop(connection: Any) -> None:
    granted = await connection.fetchval(
        "SELECT has_function_privilege('public', 'cron_drop_partition(text, timestamptz)', 'execute')"
    )
    assert granted is False


async def test_whoever_does_not_get_the_lock_gives_up_soon(dsn: str, connection: Any) -> None:
    """Firings that come meanwhile wait for no longer than that, and nothing is changed."""
    await make(connection, "runs", OLD)
    reader = await asyncpg.connect(dsn)
    async with reader.transaction():
        await reader.execute("SELECT count(*) FROM cron_runs")
        begun = time.monotonic()
        with pytest.raises(asyncpg.LockNotAvailableError):
            await drop(connection, "runs", at(OLD + DAY))
        assert time.monotonic() - begun < 2
    await reader.close()
    assert await kept_since(connection) is None
    assert await drop(connection, "runs", at(OLD + DAY)) == "cron_runs_20200302"
    assert await connection.fetchval("SHOW lock_timeout") == "0"


async def test_a_vacuum_at_work_on_the_partition_holds_up_no_firing(
    dsn: str, database: Database, connection: Any
) -> None:
    """Not even one that needs another day: the partition is asked for first, and only then the ledger."""
    await make(connection, "runs", OLD)
    engine = Engine(database, datetime(2026, 1, 1, tzinfo=UTC))
    await engine.declare("queue", every=60)
    vacuum, dropper = await asyncpg.connect(dsn), await asyncpg.connect(dsn)
    async with vacuum.transaction():
        await vacuum.execute("LOCK TABLE cron_runs_20200302 IN SHARE UPDATE EXCLUSIVE MODE")  # as VACUUM does
        dropping = asyncio.create_task(drop(dropper, "runs", at(OLD + DAY)))
        await until_waiting(connection, "SELECT cron_drop_partition%")
        assert len(await engine.fire()) == 1
        assert not dropping.done()
    assert await dropping == "cron_runs_20200302"
    await vacuum.close()
    await dropper.close()


async def until_waiting(connection: Any, statement: str) -> None:
    """Until it waits for a lock."""
    async with asyncio.timeout(30):
        while not await connection.fetchval(
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE $1", statement
        ):
            await connection.execute("SELECT pg_stat_clear_snapshot()")


async def test_droppers_at_once_drop_each_day_once(dsn: str, connection: Any) -> None:
    days = [OLD + number * DAY for number in range(12)]
    await make(connection, "runs", *days)

    async def drop_some() -> tuple[str, ...]:
        settings = Settings.load(dsn=dsn)
        async with open_database(settings, dsn=dsn) as database:
            dropped: tuple[str, ...] = ()
            while await old_partitions_in(database):
                dropped += (
                    await RetentionRepository(database).drop_partitions("runs", DAY, now=at(OLD + 20 * DAY))
                ).names
            return dropped

    dropped = await asyncio.gather(*(drop_some() for _ in range(4)))
    assert sorted(name for names in dropped for name in names) == [f"cron_runs_{day:%Y%m%d}" for day in days]
    assert await kept_since(connection) == at(OLD + 12 * DAY)


async def old_partitions_in(database: Database) -> list[str]:
    async with database.connection() as connection:
        return await old_partitions(connection)


async def test_the_keeper_makes_what_comes_and_drops_what_is_past(
    database: Database, connection: Any, now: datetime
) -> None:
    today = now.date()
    await make(connection, "runs", *(today - age * DAY for age in (2, 6, 7, 8, 9)))
    monday = today - today.weekday() * DAY
    await make(connection, "events", monday - 7 * DAY, monday - 14 * DAY, monday - 21 * DAY)
    await connection.execute(f"DROP TABLE cron_runs_{today + 7 * DAY:%Y%m%d}")
    await connection.execute(f"DROP TABLE execution_events_{monday + 35 * DAY:%Y%m%d}")
    with capture_logs() as logs:
        assert await keeper(database, runs_retention_days=7, events_retention_days=14).run_once() == INTERVAL_SECONDS
    # The eighth day back ended seven days before this morning.
    assert await partitions(connection) == [f"cron_runs_{today + k * DAY:%Y%m%d}" for k in (-7, -6, -2, *range(-1, 8))]
    assert await partitions(connection, "execution_events") == [
        f"execution_events_{monday + 7 * k * DAY:%Y%m%d}" for k in range(-2, 6)
    ]
    assert [line for line in logs if line["event"].startswith("run_partitions")] == [
        {"event": "run_partitions_made", "log_level": "info", "partitions": 2},
        {
            "event": "run_partitions_removed",
            "log_level": "info",
            "kind": "runs",
            "partitions": [f"cron_runs_{today - age * DAY:%Y%m%d}" for age in (9, 8)],
        },
        {
            "event": "run_partitions_removed",
            "log_level": "info",
            "kind": "events",
            "partitions": [f"execution_events_{monday - 21 * DAY:%Y%m%d}"],
        },
    ]
    with capture_logs() as logs:
        await keeper(database, runs_retention_days=7, events_retention_days=14).run_once()
    assert logs == []


async def test_what_is_in_use_is_left_for_the_next_pass(
    dsn: str, database: Database, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention_repository, "PAUSE_SECONDS", 0)
    await make(connection, "runs", OLD, OLD + DAY)
    reader = await asyncpg.connect(dsn)
    async with reader.transaction():
        await reader.execute("SELECT count(*) FROM cron_runs")
        with capture_logs() as logs:
            await keeper(database).run_once()
        assert {"event": "run_partitions_in_use", "log_level": "info", "kind": "runs"} in logs
        assert len(await old_partitions(connection)) == 2
    await reader.close()
    await keeper(database).run_once()
    assert await old_partitions(connection) == []


async def test_an_unfinished_backfill_keeps_its_days(retention: RetentionRepository, connection: Any) -> None:
    await make(connection, "runs", *(OLD + number * DAY for number in range(4)))
    await connection.execute(
        """INSERT INTO cron_backfills
            (id, schedule_id, start_at, end_at, next_at, per_minute, total, created_at, due_at)
        VALUES ('backfill_1', 'cron_a', $1, $3, $2, 60, 9, $3, $3)""",
        *(at(OLD), at(OLD + DAY, 12), at(OLD + 4 * DAY)),
    )
    assert await retention.drop_partitions("runs", DAY) == DroppedPartitions(("cron_runs_20200302",))
    await connection.execute("UPDATE cron_backfills SET ended_at = now(), due_at = NULL")
    assert len((await retention.drop_partitions("runs", DAY)).names) >= 3
    assert await old_partitions(connection) == []


async def test_a_tick_of_a_dropped_day_gets_its_day_again(database: Database, connection: Any) -> None:
    """Its run is kept until the next pass, and the ledger is not complete from there on."""
    await make(connection, "runs", OLD, OLD + DAY)
    await RetentionRepository(database).drop_partitions("runs", 90 * DAY)
    since = await kept_since(connection)
    assert since == at(OLD + 2 * DAY)
    engine = Engine(database, at(OLD, 12))
    schedule = await engine.declare("queue", at=engine.now)
    assert len(await engine.fire()) == 1
    assert await connection.fetchval("SELECT count(*) FROM cron_runs WHERE schedule_id = $1", schedule.id) == 1
    await keeper(database).run_once()
    assert await old_partitions(connection) == []
    assert await kept_since(connection) == since


async def versions(connection: Any) -> list[tuple[str, int]]:
    rows = await connection.fetch("SELECT name, version FROM cron_schedule_versions ORDER BY name, version")
    return [tuple(row) for row in rows]


async def test_what_a_forgotten_schedule_sent_is_not_in_its_events_either(
    database: Database, connection: Any, now: datetime
) -> None:
    """Or nobody would find it there when its workspace is deleted."""
    engine = Engine(database, now)
    schedule = await engine.declare("queue", every=60, jitter=None, workspace_id="ws", payload={"secret": 1})
    await engine.edit(schedule.id, payload={"secret": 2}, priority="high")
    await engine.repository.delete_schedule(schedule.id, now=now)
    await set_kept_since(connection, now + DAY)
    assert await RetentionRepository(database).forget_versions() == 3
    changed = await connection.fetchval("SELECT data ->> 'changed' FROM execution_events WHERE event = 'edited'")
    assert json.loads(changed) == {"priority": ["normal", "high"]}


async def set_kept_since(connection: Any, instant: datetime) -> None:
    await connection.execute(
        """INSERT INTO cron_retention VALUES ('runs', $1)
        ON CONFLICT (kind) DO UPDATE SET kept_since = excluded.kept_since""",
        instant,
    )


@pytest.mark.parametrize("limit", [1, 2, 1000])
async def test_versions_go_when_no_kept_run_needs_them(
    database: Database, retention: RetentionRepository, connection: Any, limit: int
) -> None:
    start = at(OLD, 12)
    engine = Engine(database, start)
    edited = await engine.declare("queue", every=60, name="edited")
    await engine.declare("queue", every=60, name="untouched")
    deleted = await engine.declare("queue", every=60, name="deleted")
    for day in (1, 2, 3):
        engine.now = start + day * DAY
        await engine.edit(edited.id, every=60 + day)
        await engine.edit(deleted.id, every=60 + day)
    engine.now = start + 4 * DAY
    await engine.repository.delete_schedule(deleted.id, now=engine.now)
    everything = await versions(connection)
    assert len(everything) == 4 + 1 + 5
    assert await retention.forget_versions(limit=limit) == 0

    [holds_after] = await connection.fetchrow(
        "SELECT holds_after FROM cron_schedule_versions WHERE name = 'edited' AND version = 3"
    )
    await set_kept_since(connection, holds_after)  # the occurrence at this very instant is version 2's
    assert await retention.forget_versions(limit=limit) == 2
    await set_kept_since(connection, holds_after + timedelta(microseconds=1))
    assert await retention.forget_versions(limit=limit) == 2
    assert [place for place in await versions(connection) if place[0] == "edited"] == [("edited", 3), ("edited", 4)]
    await set_kept_since(connection, start + 10 * DAY)
    assert await retention.forget_versions(limit=limit) == 4
    assert await versions(connection) == [("edited", 4), ("untouched", 1)]
    assert await retention.forget_versions(limit=limit) == 0


async def test_audits_and_backfills_go_with_the_runs(database: Database, connection: Any, now: datetime) -> None:
    for age in (1, 89, 91):
        moment = now - age * DAY
        await connection.execute("INSERT INTO cron_audits (started_at, since, until) VALUES ($1, $1, $1)", moment)
        await connection.execute(
            """INSERT INTO cron_backfills
                (id, schedule_id, start_at, end_at, next_at, per_minute, total, created_at, ended_at)
            VALUES ('backfill_' || $2::text, 'cron_a', $1, $1, $1, 60, 9, $1, $1)""",
            *(moment, str(age)),
        )
    with capture_logs() as logs:
        await keeper(database).run_once()
    assert await connection.fetchval("SELECT count(*) FROM cron_audits") == 2
    assert await connection.fetchval("SELECT array_agg(id ORDER BY id) FROM cron_backfills") == [
        "backfill_1",
        "backfill_89",
    ]
    assert logs == [{"event": "ledger_trimmed", "log_level": "info", "versions": 0, "audits": 1, "backfills": 1}]


MESSAGES = """
INSERT INTO queue_messages (id, queue_name, payload, dlq_at, completed_at)
SELECT kind || '_' || age || '_' || number, 'queue ' || number % 3, '{}',
    CASE WHEN kind = 'dead' THEN now() - age * interval '1 day' END,
    CASE WHEN kind = 'completed' THEN now() - age * interval '1 day' END
FROM unnest('{dead, completed, pending}'::text[]) AS kind, unnest('{1, 5, 89, 91, 200}'::int[]) AS age,
    generate_series(1, 7) AS number
"""
COUNTED = (
    "SELECT split_part(id, '_', 1), array_agg(DISTINCT split_part(id, '_', 2)::int) FROM queue_messages GROUP BY 1"
)


@pytest.mark.parametrize(("days", "kept"), [(None, [1, 5, 89, 91, 200]), (90, [1, 5, 89]), (4, [1])])
async def test_dead_letters_go_after_their_time(
    database: Database, connection: Any, days: int | None, kept: list[int]
) -> None:
    await connection.execute(MESSAGES)
    settings = Settings.load(dead_retention_days=days, cleanup_batch_size=3, message_retention_seconds=3e8)
    maintenance = QueueMaintenance(QueueRepository(database, "ticker_a"), Handlers(settings), settings)
    with capture_logs() as logs:
        await maintenance.run_once()
    removed = [line["messages"] for line in logs if line["event"] == "dead_letters_removed"]
    assert removed == ([7 * (5 - len(kept))] if len(kept) < 5 else [])
    found = dict(await connection.fetch(COUNTED))
    assert found == {"dead": kept, "completed": [1, 5, 89, 91, 200], "pending": [1, 5, 89, 91, 200]}
    noted = await connection.fetch("SELECT event, data ->> 'reason', count(*) FROM execution_events GROUP BY 1, 2")
    assert [tuple(row) for row in noted] == ([("purged", "its retention is over", sum(removed))] if removed else [])


async def test_cleanup_removes_now_what_is_older(manager: QueueManager, connection: Any, now: datetime) -> None:
    today = now.date()
    await make(connection, "runs", *(today - age * DAY for age in (3, 4, 5, 200)))
    await make(connection, "events", today - 30 * DAY)
    await connection.execute(MESSAGES)
    removed = await manager.cleanup(4 * DAY)
    assert removed == CleanedUp(
        runs=(f"cron_runs_{today - 200 * DAY:%Y%m%d}", f"cron_runs_{today - 5 * DAY:%Y%m%d}"),
        events=tuple(f"execution_events_{monday:%Y%m%d}" for monday in [_monday(today - 30 * DAY)]),
        dead=28,
        messages=28,
    )
    assert dict(await connection.fetch(COUNTED)) == {"dead": [1], "completed": [1], "pending": [1, 5, 89, 91, 200]}
    assert await kept_since(connection) == at(today - 4 * DAY)
    assert await manager.cleanup(4 * DAY) == CleanedUp()


def _monday(day: date) -> date:
    return day - day.weekday() * DAY


@pytest.mark.parametrize("kind", ["runs", "events", "dead", "messages"])
async def test_cleanup_of_one_kind_leaves_the_others(manager: QueueManager, connection: Any, kind: Any) -> None:
    await make(connection, "runs", OLD)
    await make(connection, "events", OLD)
    await connection.execute(MESSAGES)
    removed = await manager.cleanup(timedelta(days=300 if kind in ("runs", "events") else 90), kinds=[kind])
    found = {name for name in ("runs", "events", "dead", "messages") if getattr(removed, name)}
    assert found == {kind}
    assert len(await old_partitions(connection)) == (0 if kind == "runs" else 1)
    assert len(await old_partitions(connection, "execution_events")) == (0 if kind == "events" else 1)
    assert await connection.fetchval("SELECT count(*) FROM queue_messages") == (
        91 if kind in ("dead", "messages") else 105
    )


async def test_cleanup_says_what_is_in_use(
    dsn: str, manager: QueueManager, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention_repository, "PAUSE_SECONDS", 0)
    await make(connection, "runs", OLD)
    reader = await asyncpg.connect(dsn)
    async with reader.transaction():
        await reader.execute("SELECT count(*) FROM cron_runs")
        assert await manager.cleanup(300 * DAY) == CleanedUp(busy=("runs",))
    await reader.close()


@pytest.mark.parametrize(
    ("older_than", "kinds", "says"),
    [
        (1.9 * DAY, None, "at least 2 days"),
        (3600, ["runs"], "at least 2 days"),
        (3 * DAY, ["runs"], "CATCH_UP_MAX_AGE_SECONDS"),
        (0, ["dead"], "from 1 ms"),
        ("90d", None, "seconds or a timedelta"),
        (90 * DAY, ["ticks"], "must be one of runs, events, dead, messages"),
    ],
)
async def test_cleanup_refuses_what_would_fire_twice(
    dsn: str, connection: Any, older_than: Any, kinds: Any, says: str
) -> None:
    await make(connection, "runs", OLD)
    async with QueueManager(settings=Settings.load(dsn=dsn, catch_up_max_age_seconds=4 * 86_400)) as manager:
        with pytest.raises(InvalidInputError, match=says):
            await manager.cleanup(older_than, kinds=kinds)
    assert len(await old_partitions(connection)) == 1


# Versions of schedules that were edited once, most of them lately; dead and completed messages, most of them new.
FILL = (
    """INSERT INTO cron_schedule_versions (schedule_id, version, holds_after, change, enabled, name, queue_name,
        anchor_at, jitter_us, priority, planned, created_at)
    SELECT 'cron_' || k, version, now() - CASE WHEN k > 50 THEN 1 ELSE 100 END * interval '1 day', 'edited', true,
        k, 'queue', now(), 0, 2, 0, now()
    FROM generate_series(1, 20000) AS k, generate_series(1, 2) AS version""",
    """INSERT INTO queue_messages (id, queue_name, payload, dlq_at, completed_at)
    SELECT 'msg_' || k, 'queue ' || k % 5, '{}', CASE WHEN k % 2 = 0 THEN moment END,
        CASE WHEN k % 2 = 1 THEN moment END
    FROM generate_series(1, 20000) AS k,
        LATERAL (SELECT now() - CASE WHEN k > 100 THEN 1 ELSE 100 END * interval '1 day' AS moment) AS ended""",
)


@pytest.mark.parametrize("analysed", [False, True])
async def test_removing_costs_what_is_removed(
    database: Database, connection: Any, now: datetime, *, analysed: bool
) -> None:
    for statement in FILL:
        await connection.execute(statement)
    if analysed:
        await connection.execute("ANALYZE")
    beginning = (retention_repository.THE_BEGINNING, "", 0)
    statements: dict[str, tuple[str, tuple[object, ...]]] = {
        "FORGET_VERSIONS": (retention_sql.FORGET_VERSIONS, (100, now - 90 * DAY, *beginning)),
        "RUNS_BEFORE": (retention_sql.RUNS_BEFORE, (None, 90 * DAY)),
        "DELETE_DEAD_BEFORE": (queue_sql.DELETE_DEAD_BEFORE, (None, 90 * DAY, 100, True, None, "ticker_x")),
        "DELETE_COMPLETED_BEFORE": (queue_sql.DELETE_COMPLETED_BEFORE, (None, 90 * DAY, 100)),
    }
    costs = {}
    async with database.connection() as own:
        for name, (text, arguments) in statements.items():
            explain = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {database.sql(text)}"
            (plan,) = json.loads(await own.fetchval(explain, *arguments))
            costs[name] = plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"]
    print(f"\nanalysed: {analysed}; buffers: {costs}")  # noqa: T201
    assert {name: cost for name, cost in costs.items() if cost > 2000} == {}
    assert await connection.fetchval("SELECT count(*) FROM cron_schedule_versions") == 40_000 - 50
    assert await connection.fetchval("SELECT count(*) FROM queue_messages") == 20_000 - 100


# Show 5: ticks that are due, and old days full of runs.
TICKS = """
INSERT INTO cron_ticks (id, schedule_id, schedule_name, queue_name, payload, scheduled_for, execute_at, due_at,
    created_at)
SELECT 'tick_' || $2::text || k, 'cron_' || $2 || k, k, 'queue', '{}', moment, moment, moment, moment
FROM generate_series(1, $1::int) AS k, LATERAL (SELECT now() - k * interval '1 ms' AS moment) AS due
"""
OLD_RUNS = """
INSERT INTO cron_runs (schedule_id, scheduled_for, version, origin, outcome, ended_at, attempts)
SELECT 'cron_' || k, $2::timestamptz + day * interval '1 day', 1, 'schedule', 'enqueued', now(), 1
FROM generate_series(0, $3::int - 1) AS day, generate_series(1, $1::int) AS k
"""
FIRERS, BATCH = 4, 100


async def drain(database: Database, settings: Settings, number: int) -> list[float]:
    """Fires until nothing is left; how long each statement took."""
    cron, took = CronRepository(database, settings), []
    while True:
        begun = time.monotonic()
        fired = await cron.fire_due_ticks(QUEUE_SINK, ticker_id=f"ticker_{number}", limit=BATCH)
        took.append(time.monotonic() - begun)
        assert all(tick.passed for tick in fired)
        if len(fired) < BATCH:
            return took


def figures(seconds: list[float]) -> str:
    ordered = sorted(1000 * second for second in seconds)
    p50, p99 = ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)]
    return f"{len(ordered)} statements, p50 {p50:.1f}, p99 {p99:.1f}, max {ordered[-1]:.1f} ms"


async def test_a_reader_in_the_way_stops_no_firing(dsn: str, database: Database, connection: Any) -> None:
    """Whoever reads the ledger for hours keeps the days there, and firings wait for moments only."""
    await make(connection, "runs", OLD)
    await connection.execute(TICKS, 1000, "read")
    reader = await asyncpg.connect(dsn)
    async with reader.transaction():
        await reader.execute("SELECT count(*) FROM cron_runs")
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            dropping = tasks.create_task(RetentionRepository(database).drop_partitions("runs", 90 * DAY))
            for number in range(FIRERS):
                tasks.create_task(drain(database, Settings.load(dsn=dsn), number))
        assert dropping.result() == DroppedPartitions((), busy=True)
        assert await connection.fetchval("SELECT count(*) FROM queue_messages") == 1000
    await reader.close()


@pytest.mark.soak(small=4000, full=200_000)
async def test_dropping_days_while_firing_at_full_rate_disturbs_nothing(dsn: str, connection: Any, size: int) -> None:
    """Nothing is lost, doubled or late by more than the lock may take; beside the same without a drop."""
    days = max(5, size // 5000)
    await make(connection, "runs", *(OLD + number * DAY for number in range(days)))
    await connection.execute(OLD_RUNS, size // 2, at(OLD, 1), days, timeout=600)
    settings = Settings.load(dsn=dsn, pool_max_size=FIRERS + 1, missed_after_seconds=86_400)  # none is late
    dropped: list[float] = []

    async def drop_all(database: Database) -> None:
        """Without a pause: far more often than it ever happens."""
        retention = RetentionRepository(database)
        while await old_partitions(connection):
            begun = time.monotonic()
            await retention._drop_oldest("runs", at(OLD + days * DAY))
            dropped.append(time.monotonic() - begun)

    async with open_database(settings, dsn=dsn) as database:
        for name in ("undisturbed", "dropping"):
            await connection.execute(TICKS, size, name, timeout=600)
            async with asyncio.TaskGroup() as tasks:
                if name == "dropping":
                    tasks.create_task(drop_all(database))
                firing = [tasks.create_task(drain(database, settings, number)) for number in range(FIRERS)]
            took = [second for task in firing for second in task.result()]
            print(f"\n{name}: {size} ticks, {FIRERS} at once: {figures(took)}")  # noqa: T201
    print(f"{days} days of {size // 2} runs dropped, tries included: {figures(dropped)}")  # noqa: T201
    assert len(dropped) == days
    assert await connection.fetchval("SELECT count(*) FROM cron_ticks") == 0
    fired = "SELECT count(*), count(DISTINCT schedule_id), count(message_id) FROM cron_runs"
    assert tuple(await connection.fetchrow(fired)) == (2 * size, 2 * size, 2 * size)
    sent = "SELECT count(*), count(DISTINCT schedule_id) FROM queue_messages"
    assert tuple(await connection.fetchrow(sent)) == (2 * size, 2 * size)
