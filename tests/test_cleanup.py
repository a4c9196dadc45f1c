"""Cleaning up on every pod: what nobody may try again ends with its row, what is recoverable is left alone."""

import asyncio
import signal
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from structlog.testing import capture_logs

from cron_ticks.cleanup import CleanupWorker
from cron_ticks.database import Database
from cron_ticks.metrics import Metrics
from cron_ticks.repository import CronRepository
from cron_ticks.schedules import Schedule, define_schedule
from cron_ticks.settings import Settings
from support.processes import Processes, RunningProcess
from support.watching import watching
from token_queue import QueueManager
from token_queue.handlers import Handlers
from token_queue.maintenance import QueueMaintenance
from token_queue.queue_repository import QueueRepository

REASON = "its lease ran out and it may not be tried again: whether it was delivered is unknown"

# Ticks of one schedule, by what is the matter with them; leases ran out ten minutes ago unless it is said otherwise.
TICKS = """
INSERT INTO cron_ticks (id, schedule_id, schedule_name, queue_name, payload, scheduled_for, execute_at, due_at,
    created_at, sink, delivery, attempts, leased_by, leased_at, leased_until, recovery, error)
SELECT 'tick_' || $2::text || '_' || number, $1::text, $2, 'topic', '{}', moment, moment,
    CASE
        WHEN $2 IN ('once', 'attempts', 'live', 'lately') THEN 'infinity'::timestamptz
        WHEN $2 IN ('later', 'orphaned later') THEN now() + interval '1 hour'
        ELSE now() - interval '10 minutes'
    END,
    moment, 'hooks', CASE WHEN $2 = 'once' THEN 'at_most_once' ELSE 'at_least_once' END,
    CASE WHEN $2 = 'attempts' THEN 3 WHEN $2 IN ('later', 'orphaned', 'orphaned later') THEN 0 ELSE 1 END,
    'ticker_dead', now() - interval '11 minutes',
    CASE
        WHEN $2 IN ('retry', 'later', 'orphaned', 'orphaned later') THEN NULL
        WHEN $2 = 'live' THEN now() + interval '1 minute'
        WHEN $2 = 'lately' THEN now() - interval '1 minute'
        ELSE now() - interval '10 minutes'
    END,
    $2 = 'attempts', CASE WHEN $2 = 'retry' THEN 'an error' END
FROM generate_series(1, $3::int) AS number
CROSS JOIN LATERAL (
    SELECT date_trunc('hour', now()) - number * interval '1 ms'
        - CASE WHEN $2 = 'old' THEN interval '2 days' ELSE interval '0' END AS moment
) AS due
"""
EXPIRED = ("once", "attempts", "old")
RECOVERABLE = ("takeover", "retry", "later", "live", "lately")
ORPHANED = ("orphaned", "orphaned later", "orphaned lease")


@pytest.fixture
def repository(database: Database, settings: Settings) -> CronRepository:
    return CronRepository(database, settings)


def cleanup(database: Database, metrics: Metrics | None = None, **changes: Any) -> CleanupWorker:
    settings = Settings.load(**changes)
    return CleanupWorker(CronRepository(database, settings), settings, metrics)


async def put_in(repository: CronRepository, connection: Any, names: Sequence[str], number: int) -> None:
    """So many ticks of each kind."""
    for name in names:
        definition = define_schedule("topic", every=3600, name=name, sink="hooks", sinks={"hooks": "outside"})
        schedule = (await repository.save_schedule(definition)).schedule
        await connection.execute("DELETE FROM cron_ticks WHERE schedule_id = $1", schedule.id)
        await connection.execute(TICKS, schedule.id, name, number)
        if name in ORPHANED:
            await connection.execute("DELETE FROM cron_schedules WHERE id = $1", schedule.id)


async def left(connection: Any) -> dict[str, int]:
    return dict(await connection.fetch("SELECT schedule_name, count(*) FROM cron_ticks GROUP BY 1"))


async def contents(connection: Any, table: str, condition: str = "true") -> list[tuple[Any, ...]]:
    return [tuple(row) for row in await connection.fetch(f"SELECT * FROM {table} WHERE {condition} ORDER BY id")]


def value(metrics: Metrics, name: str) -> float:
    return metrics.registry.get_sample_value(f"cron_ticks_{name}_total") or 0.0


# Ticks


@pytest.mark.sql
async def test_a_pass_ends_what_may_not_be_tried_again_and_leaves_the_rest_alone(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    await put_in(repository, connection, RECOVERABLE, 4)
    before = await contents(connection, "cron_ticks")
    await put_in(repository, connection, (*EXPIRED, *ORPHANED), 5)
    metrics = Metrics()
    with capture_logs() as logs:
        worker = cleanup(database, metrics, cleanup_batch_size=2, cleanup_interval_seconds=17)
        assert await worker.run_once() == 17
    assert await contents(connection, "cron_ticks") == before
    cleaned = [entry for entry in logs if entry["event"] == "cleaned_up"]
    assert [(entry["expired_ticks"], entry["orphaned_ticks"]) for entry in cleaned] == [(15, 15)]
    assert (value(metrics, "expired"), value(metrics, "orphaned")) == (15, 15)
    assert metrics.registry.get_sample_value("cron_ticks_coverage_ratio") == 0
    rows = await connection.fetch(
        """SELECT name, outcome, reason, attempts, ticker_id, recovered, message_id, lateness, count(*)
        FROM cron_runs JOIN cron_schedules ON id = schedule_id GROUP BY 1, 2, 3, 4, 5, 6, 7, 8 ORDER BY name"""
    )
    assert [tuple(row) for row in rows] == [
        ("attempts", "expired", REASON, 3, "ticker_dead", True, None, None, 5),
        ("old", "expired", REASON, 1, "ticker_dead", False, None, None, 5),
        ("once", "expired", REASON, 1, "ticker_dead", False, None, None, 5),
    ]
    assert await connection.fetchval("SELECT count(*) FROM cron_runs") == 15
    with capture_logs() as logs:
        await worker.run_once()
    assert [entry for entry in logs if entry["event"] == "cleaned_up"] == []
    assert (value(metrics, "expired"), value(metrics, "orphaned")) == (15, 15)


@pytest.mark.sql
async def test_an_orphan_that_may_have_been_delivered_has_its_row(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    """Its schedule is gone, but the ledger stays."""
    await put_in(repository, connection, ["once"], 3)
    await connection.execute("DELETE FROM cron_schedules")
    with capture_logs() as logs:
        await cleanup(database).run_once()
    [cleaned] = [entry for entry in logs if entry["event"] == "cleaned_up"]
    assert (cleaned["expired_ticks"], cleaned["orphaned_ticks"]) == (3, 0)
    assert await connection.fetchval("SELECT count(*) FROM cron_runs WHERE outcome = 'expired'") == 3


async def test_how_long_a_lease_must_have_run_out_is_a_setting(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    await put_in(repository, connection, ["once", "lately", "live"], 2)
    await cleanup(database, cleanup_threshold_seconds=1200).run_once()
    assert await left(connection) == {"once": 2, "lately": 2, "live": 2}
    await cleanup(database, cleanup_threshold_seconds=30).run_once()
    assert await left(connection) == {"live": 2}


async def test_the_limits_are_the_settings_and_the_schedules(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    await put_in(repository, connection, ["takeover", "attempts"], 2)
    await connection.execute("UPDATE cron_ticks SET due_at = leased_until")
    await connection.execute("UPDATE cron_schedules SET max_attempts = 4 WHERE name = 'attempts'")
    await cleanup(database).run_once()
    assert await left(connection) == {"takeover": 2, "attempts": 2}
    await cleanup(database, tick_max_attempts=1).run_once()
    assert await left(connection) == {"attempts": 2}
    await connection.execute("UPDATE cron_schedules SET max_age_us = 60 * 1000000")
    await connection.execute("UPDATE cron_ticks SET execute_at = execute_at - interval '1 hour'")
    await cleanup(database).run_once()
    assert await left(connection) == {}


@pytest.mark.sql
async def test_cleanups_at_once_count_each_row_once(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    await put_in(repository, connection, RECOVERABLE, 3)
    before = await contents(connection, "cron_ticks")
    await put_in(repository, connection, (*EXPIRED, *ORPHANED), 100)
    metrics = Metrics()
    with capture_logs() as logs:
        await asyncio.gather(*(cleanup(database, metrics, cleanup_batch_size=7).run_once() for _ in range(6)))
        await cleanup(database, metrics).run_once()
    cleaned = [entry for entry in logs if entry["event"] == "cleaned_up"]
    assert sum(entry["expired_ticks"] for entry in cleaned) == value(metrics, "expired") == 300
    assert sum(entry["orphaned_ticks"] for entry in cleaned) == value(metrics, "orphaned") == 300
    assert await connection.fetchval("SELECT count(*) FROM cron_runs") == 300
    assert await contents(connection, "cron_ticks") == before


@pytest.mark.sql
async def test_a_cleanup_waits_for_nobody(database: Database, repository: CronRepository, connection: Any) -> None:
    await put_in(repository, connection, ["once", "orphaned"], 3)
    async with connection.transaction():
        await connection.execute("SELECT FROM cron_ticks WHERE id LIKE '%_1' FOR UPDATE")
        await asyncio.wait_for(cleanup(database).run_once(), 10)
        assert await left(connection) == {"once": 1, "orphaned": 1}
    await cleanup(database).run_once()
    assert await left(connection) == {}


async def test_sinks_that_nobody_serves_are_reported(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    await put_in(repository, connection, ["takeover"], 1)
    with capture_logs() as logs:
        await cleanup(database).run_once()
    assert [(entry["event"], entry["log_level"], entry["sinks"]) for entry in logs] == [
        ("sinks_unserved", "warning", ["hooks"])
    ]
    await repository.note_sinks({"hooks": "outside"})
    with capture_logs() as logs:
        await cleanup(database).run_once()
    assert logs == []


# Completed messages


def maintenance(
    database: Database, handlers: Handlers | None = None, metrics: Metrics | None = None, **changes: Any
) -> QueueMaintenance:
    settings = Settings.load(**changes)
    chosen = Handlers(settings) if handlers is None else handlers
    return QueueMaintenance(QueueRepository(database, "ticker_me"), chosen, settings, metrics)


async def send(connection: Any, queue: str, number: int, *, days: float, how: str = "completed_at") -> None:
    await connection.execute(
        f"""INSERT INTO queue_messages (id, queue_name, payload, {how})
        SELECT format('msg_%s_%s_%s', $1::text, $3::float, number), $1, '{{}}', now() - $3 * interval '1 day'
        FROM generate_series(1, $2::int) AS number""",
        queue,
        number,
        days,
    )


async def messages(connection: Any) -> dict[str, int]:
    return dict(await connection.fetch("SELECT queue_name, count(*) FROM queue_messages GROUP BY 1"))


@pytest.mark.sql
async def test_completed_messages_go_when_their_retention_is_over_handled_or_not(
    database: Database, connection: Any
) -> None:
    async def handle(_message: Any) -> None: ...

    handlers = Handlers(Settings.load())
    handlers.register("handled", handle, retention=timedelta(days=2))
    for queue in ("handled", "in use lately", "elsewhere"):
        await send(connection, queue, 5, days=8)
        await send(connection, queue, 3, days=3)
        await send(connection, queue, 1, days=1)
    await send(connection, "abandoned", 5, days=8)
    await send(connection, "elsewhere too", 5, days=8)
    await send(connection, "dead", 2, days=80, how="dlq_at")
    await send(connection, "waiting", 2, days=100, how="process_after")
    await connection.execute(
        "INSERT INTO queue_workers VALUES ('ticker_other', '{elsewhere,elsewhere too}', false, now(), now())"
    )
    metrics = Metrics()
    with capture_logs() as logs:
        worker = maintenance(database, handlers, metrics, cleanup_batch_size=2, cleanup_interval_seconds=19)
        assert await worker.run_once() == 19
    assert await messages(connection) == {
        "handled": 1,
        "in use lately": 9,  # its worker may come back, and knows better how long to keep them
        "elsewhere": 9,
        "elsewhere too": 5,
        "dead": 2,
        "waiting": 2,
    }
    assert [entry["messages"] for entry in logs if entry["event"] == "completed_messages_removed"] == [13]
    assert value(metrics, "messages_removed") == 13
    with capture_logs() as logs:
        await worker.run_once()
    assert [entry for entry in logs if entry["event"] == "completed_messages_removed"] == []
    assert value(metrics, "messages_removed") == 13


async def test_the_retention_of_abandoned_queues_is_a_setting(database: Database, connection: Any) -> None:
    await send(connection, "abandoned", 3, days=3)
    await maintenance(database).run_once()
    assert await messages(connection) == {"abandoned": 3}
    await maintenance(database, message_retention_seconds=2 * 86_400).run_once()
    assert await messages(connection) == {}


@pytest.mark.sql
async def test_pods_at_once_count_each_removed_message_once(database: Database, connection: Any) -> None:
    for queue in ("a", "b", "c"):
        await send(connection, queue, 100, days=8)
    await send(connection, "d", 10, days=1)
    metrics = Metrics()
    with capture_logs() as logs:
        await asyncio.gather(
            *(maintenance(database, metrics=metrics, cleanup_batch_size=7).run_once() for _ in range(6))
        )
        await maintenance(database, metrics=metrics).run_once()
    removed = sum(entry["messages"] for entry in logs if entry["event"] == "completed_messages_removed")
    assert removed == value(metrics, "messages_removed") == 300
    assert await messages(connection) == {"d": 10}


# Real processes


def total(pods: Sequence[RunningProcess], name: str) -> int:
    return sum(event[name] for pod in pods for event in pod.events if event["event"] == "cleaned_up")


async def assert_fired_exactly(schedule: Schedule, connection: Any) -> int:
    """One message per occurrence, each with its run; how many there are."""
    rows = await connection.fetch("SELECT scheduled_for FROM queue_messages ORDER BY scheduled_for")
    assert schedule.interval is not None
    assert schedule.ends_at is not None
    steps = (schedule.ends_at - schedule.anchor_at) // schedule.interval
    expected = [schedule.anchor_at + step * schedule.interval for step in range(steps + 1)]
    assert [row["scheduled_for"] for row in rows] == expected
    outcomes = await connection.fetch("SELECT DISTINCT outcome FROM cron_runs WHERE schedule_id = $1", schedule.id)
    assert [row["outcome"] for row in outcomes] == ["enqueued"]
    return len(expected)


@pytest.mark.soak(small=2_000, full=100_000)
async def test_many_pods_clean_up_at_once_and_firing_goes_on(
    dsn: str, processes: Processes, connection: Any, repository: CronRepository, size: int
) -> None:
    number, seconds = (3, 6) if size == 2_000 else (10, 30)
    settings = {
        "cleanup_interval_seconds": "0.02",
        "cleanup_batch_size": str(size // 100),
        "lookahead_seconds": "3",
        "manager_interval_seconds": "0.5",
    }
    pods = await asyncio.gather(*(processes.worker(dsn, "without_handlers", **settings) for _ in range(number)))
    ends_at = await connection.fetchval("SELECT statement_timestamp() + $1::interval", timedelta(seconds=seconds))
    async with QueueManager(dsn) as manager:
        schedule = await manager.schedule("queue", every=1, jitter=None, ends_at=ends_at)
    await put_in(repository, connection, RECOVERABLE, size // 50)
    recoverable = f"schedule_id <> '{schedule.id}'"
    before = await contents(connection, "cron_ticks", recoverable)
    each = size // 6
    begun = await connection.fetchval("SELECT clock_timestamp()")
    async with connection.transaction():  # at once for all
        await put_in(repository, connection, (*EXPIRED, *ORPHANED), each)
    async with watching(dsn, "cron_ticks") as watch:
        await watch.until(
            "SELECT NOT EXISTS (SELECT FROM cron_ticks WHERE schedule_name = ANY ($1::text[]))", [*EXPIRED, *ORPHANED]
        )
        took = await connection.fetchval("SELECT clock_timestamp() - $1", begun)
        await watch.until(
            """SELECT NOT EXISTS (SELECT FROM cron_ticks WHERE schedule_id = $1)
            AND (SELECT next_tick_needed_at IS NULL FROM cron_schedule_cursors WHERE schedule_id = $1)""",
            schedule.id,
        )
    for pod in pods:
        pod.send(signal.SIGTERM)
    assert [await pod.wait() for pod in pods] == [0] * number
    assert (total(pods, "expired_ticks"), total(pods, "orphaned_ticks")) == (3 * each, 3 * each)
    runs = await connection.fetch("SELECT count(*) FROM cron_runs WHERE outcome = 'expired' GROUP BY schedule_id")
    assert [row["count"] for row in runs] == [each] * 3
    assert await contents(connection, "cron_ticks", recoverable) == before
    fired = await assert_fired_exactly(schedule, connection)
    late = await connection.fetchval("SELECT max(lateness) FROM cron_runs WHERE schedule_id = $1", schedule.id)
    shares = [total([pod], "expired_ticks") + total([pod], "orphaned_ticks") for pod in pods]
    assert sum(event["event"] == "service_failed" for pod in pods for event in pod.events) == 0
    print(  # noqa: T201
        f"\n{6 * each} expired and orphaned ticks removed by {number} pods in {took.total_seconds():.1f} s "
        f"(by each: {sorted(shares)}); {len(before)} recoverable ones untouched; {fired} ticks fired meanwhile, "
        f"at most {late.total_seconds() * 1000:.0f} ms late"
    )
    assert sum(share > 0 for share in shares) > 1
