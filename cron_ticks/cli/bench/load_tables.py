"""What the loads put into the tables beforehand and read from them afterwards, by the database's clock.

All of it goes by sets: a million schedules are made in about a minute. What is asked for may well read whole tables.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import asyncpg

from cron_ticks.cli.bench.contenders import QUEUE, WORKSPACES
from cron_ticks.cli.bench.usage import server_cpu_seconds, server_of
from cron_ticks.ids import new_ulid
from cron_ticks.schedules import DEFAULT_JITTER_RATIO
from cron_ticks.settings import JITTER_CAP_SECONDS
from token_queue.queue_repository import QUEUE_SINK

TABLES = (
    "cron_schedules",
    "cron_schedule_versions",
    "cron_schedule_cursors",
    "cron_ticks",
    "cron_runs",
    "queue_messages",
)

# This connection reads much at a time.
SET_UP_CONNECTION = "SET work_mem = '256MB'; SET jit = off; SET enable_nestloop = off"

# As schedule() leaves them, in the middle of their lives: occurrence 0, which has no jitter, lies behind them. The next
# ones begin at $2, spread evenly over $3, or over the interval of each. Intervals ($4, microseconds) take turns.
MAKE_SCHEDULES = """
INSERT INTO cron_schedules (id, workspace_id, name, queue_name, payload, interval_us, anchor_at, jitter_us,
    jitter_ratio, sink, delivery, created_at, updated_at)
SELECT 'cron_' || $8::text || upper(left(md5(random()::text), 16)), 'ws_' || number % $9::int, 'benchmark-' || number,
    $7::text, jsonb_build_object('n', number), interval_us,
    $2::timestamptz + coalesce($3::interval, step) * (number::float / $1::int) - step,
    least(interval_us * $5::float, $6::bigint), $5, $10, $11, statement_timestamp(), statement_timestamp()
FROM generate_series(0, $1 - 1) AS number
CROSS JOIN LATERAL (SELECT ($4::bigint[])[1 + number % cardinality($4)] AS interval_us) AS rule
CROSS JOIN LATERAL (SELECT interval_us * interval '1 microsecond' AS step) AS length
"""
MAKE_VERSIONS = """
INSERT INTO cron_schedule_versions (schedule_id, version, holds_after, change, enabled, workspace_id, name, queue_name,
    payload, interval_us, anchor_at, jitter_us, jitter_ratio, priority, planned, created_at, sink, delivery)
SELECT id, version, anchor_at, 'created', enabled, workspace_id, name, queue_name,
    payload, interval_us, anchor_at, jitter_us, jitter_ratio, priority, 1, created_at, sink, delivery
FROM cron_schedules
"""
MAKE_CURSORS = """
INSERT INTO cron_schedule_cursors (schedule_id, next_tick_needed_at, planned)
SELECT id, anchor_at + interval_us * interval '1 microsecond', 1 FROM cron_schedules
"""

# What should have happened from $1 up to $2, from the schedules alone, beside what did. Without a run and a tick, an
# occurrence is left for a manager, or in a row of missed ones; else it is unexplained. What fired and was no occurrence
# of an existing schedule is unexpected.
OUTCOMES = """
WITH expected AS (
    SELECT schedule.id AS schedule_id, scheduled_for
    FROM cron_schedules AS schedule
    CROSS JOIN LATERAL (
        SELECT interval_us * interval '1 microsecond' AS step,
            ceil(extract(epoch FROM $1::timestamptz - anchor_at) * 1000000 / interval_us)::bigint AS first
    ) AS rule
    CROSS JOIN LATERAL generate_series(anchor_at + first * step, $2::timestamptz - interval '1 microsecond', step)
        AS scheduled_for
),
runs AS (
    SELECT schedule_id, scheduled_for, outcome
    FROM cron_runs
    WHERE scheduled_for >= $1 AND scheduled_for < $2 AND missed_since IS NULL
),
ticks AS (SELECT DISTINCT schedule_id, scheduled_for FROM cron_ticks WHERE scheduled_for >= $1 AND scheduled_for < $2),
stretches AS (
    SELECT schedule_id, missed_since, scheduled_for AS missed_until
    FROM cron_runs
    WHERE missed_since < $2 AND scheduled_for >= $1
),
sent AS (
    SELECT schedule_id, scheduled_for, count(*) AS messages
    FROM queue_messages
    WHERE scheduled_for >= $1 AND scheduled_for < $2
    GROUP BY schedule_id, scheduled_for
)
SELECT count(*) AS expected,
    count(*) FILTER (WHERE outcome = 'enqueued') AS enqueued,
    count(*) FILTER (WHERE outcome = 'missed' OR missed_since IS NOT NULL) AS missed,
    count(*) FILTER (WHERE outcome NOT IN ('enqueued', 'missed')) AS otherwise_ended,
    count(*) FILTER (WHERE outcome IS NULL AND missed_since IS NULL
        AND (ticks.schedule_id IS NOT NULL OR next_tick_needed_at <= expected.scheduled_for)) AS left_over,
    count(*) FILTER (WHERE outcome IS NULL AND missed_since IS NULL AND ticks.schedule_id IS NULL
        AND (next_tick_needed_at <= expected.scheduled_for) IS NOT TRUE) AS unexplained,
    count(*) FILTER (WHERE messages > 1) AS duplicates,
    coalesce(sum(messages), 0)::bigint AS messages,
    (SELECT count(*) FROM runs AS run WHERE NOT EXISTS (
        SELECT FROM expected WHERE (expected.schedule_id, expected.scheduled_for) = (run.schedule_id, run.scheduled_for)
    )) AS unexpected_runs,
    (SELECT coalesce(sum(extra.messages), 0)::bigint FROM sent AS extra WHERE NOT EXISTS (
        SELECT FROM expected
        WHERE (expected.schedule_id, expected.scheduled_for) = (extra.schedule_id, extra.scheduled_for)
    )) AS unexpected_messages
FROM expected
LEFT JOIN runs USING (schedule_id, scheduled_for)
LEFT JOIN ticks USING (schedule_id, scheduled_for)
LEFT JOIN sent USING (schedule_id, scheduled_for)
LEFT JOIN cron_schedule_cursors AS cursor USING (schedule_id)
LEFT JOIN stretches ON stretches.schedule_id = expected.schedule_id
    AND expected.scheduled_for BETWEEN missed_since AND missed_until
"""

# Lateness of what was to be executed from $1 up to $2: of each third of the time, and (the row without one) of all.
LATENESS = """
SELECT third, count(*) AS ticks, percentile_cont(0.5) WITHIN GROUP (ORDER BY late) AS p50_ms,
    percentile_cont(0.99) WITHIN GROUP (ORDER BY late) AS p99_ms, max(late) AS max_ms
FROM (
    SELECT extract(epoch FROM lateness)::float * 1000 AS late,
        width_bucket(extract(epoch FROM ended_at - lateness - $1::timestamptz)::float, 0,
            extract(epoch FROM $2::timestamptz - $1)::float, 3) AS third
    FROM cron_runs
    WHERE ended_at - lateness >= $1 AND ended_at - lateness < $2
) AS runs
GROUP BY GROUPING SETS ((third), ())
ORDER BY third NULLS FIRST
"""

# Ticks enqueued from $1 up to $2, by the time of their firing.
ENQUEUED = "SELECT count(*) FROM cron_runs WHERE outcome = 'enqueued' AND ended_at >= $1 AND ended_at < $2"

CONSUMED = "SELECT count(*) FROM queue_messages WHERE completed_at >= $1 AND completed_at < $2"

# Messages that were there and not completed at $1 and at $2; from the rows afterwards, so that nobody is disturbed.
BACKLOG = """
SELECT count(*) FILTER (WHERE inserted_at < $1 AND (completed_at < $1) IS NOT TRUE) AS backlog_start,
    count(*) FILTER (WHERE inserted_at < $2 AND (completed_at < $2) IS NOT TRUE) AS backlog_end
FROM queue_messages
"""

# Messages of occurrences before $1 that are not completed.
ANY_UNCONSUMED = """
SELECT EXISTS (
    SELECT FROM queue_messages
    WHERE queue_name = $2 AND completed_at IS NULL AND dlq_at IS NULL AND scheduled_for < $1)
"""

# What became of all messages: of occurrences before $1 that are not completed, completed, and tried more than once.
HANDLED = """
SELECT count(*) FILTER (WHERE completed_at IS NULL AND scheduled_for < $1) AS unconsumed,
    count(completed_at) AS completed,
    count(*) FILTER (WHERE attempts > 1 OR worker_deaths > 0 OR completed_at IS NOT NULL AND attempts <> 1)
        AS tried_again
FROM queue_messages
"""

# When ticks were made: those executed, which were to be from $1 up to $2, and those that are left. A message has the
# ULID of its tick, which says when that was made.
MADE_AT = """
WITH runs AS (
    SELECT schedule_id, substr(message_id, 5, 10) AS stamp, ended_at - lateness AS execute_at
    FROM cron_runs
    WHERE ended_at - lateness >= $1::timestamptz AND ended_at - lateness < $2::timestamptz
),
stamps AS MATERIALIZED (
    SELECT stamp, to_timestamp(sum(
        (strpos('0123456789ABCDEFGHJKMNPQRSTVWXYZ', substr(stamp, place, 1)) - 1) * 32::float ^ (10 - place)) / 1000)
        AS made_at
    FROM (SELECT DISTINCT stamp FROM runs) AS found, generate_series(1, 10) AS place
    GROUP BY stamp
),
made AS (
    SELECT schedule_id, execute_at, made_at FROM runs JOIN stamps USING (stamp)
    UNION ALL
    SELECT schedule_id, execute_at, created_at FROM cron_ticks
)
"""

# How many were made after their time, and how long before it the last one was made. Of those made after $3, if it is
# given.
MADE = (
    MADE_AT
    + """
SELECT count(*) FILTER (WHERE made_at > execute_at) AS late,
    min(extract(epoch FROM execute_at - made_at))::float AS lead_s
FROM made
WHERE $3::timestamptz IS NULL OR made_at > $3
"""
)

# Whether a tick is left that was due before $1: one probe of the index.
ANY_DUE = "SELECT EXISTS (SELECT FROM cron_ticks WHERE sink = $2 AND turn = 0 AND priority = 2 AND due_at < $1)"

# Each table with its partitions.
SIZES = """
SELECT name, sum(pg_table_size(stat.relid))::bigint AS table_bytes,
    sum(pg_indexes_size(stat.relid))::bigint AS index_bytes,
    sum(n_live_tup)::bigint AS rows, sum(n_dead_tup)::bigint AS dead_rows
FROM unnest($1::text[]) AS name
JOIN pg_stat_all_tables AS stat ON stat.relid = name::regclass
    OR stat.relid IN (SELECT inhrelid FROM pg_inherits WHERE inhparent = name::regclass)
GROUP BY name
"""

WRITTEN = "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint"
BACKEND = "SELECT pg_backend_pid()"


@dataclass(frozen=True)
class Made:
    """The schedules of a load."""

    count: int
    every: Sequence[timedelta]  # in turns
    start: datetime  # of the next occurrences
    spread: timedelta | None = None  # over which these are spread; None: over the interval
    jitter: float = DEFAULT_JITTER_RATIO
    sink: str = QUEUE_SINK.name
    delivery: str = "exactly_once"


@dataclass(frozen=True)
class LoadTables:
    """The tables of a load, seen over a connection of our own."""

    connection: "asyncpg.Connection[asyncpg.Record]"

    async def now(self) -> datetime:
        """The database's clock."""
        instant: datetime = await self.connection.fetchval("SELECT clock_timestamp()")
        return instant

    async def make_schedules(self, wanted: Made) -> None:
        """Write them; afterwards nothing of it is left to be written, vacuumed or analysed."""
        intervals = [round(length.total_seconds() * 1_000_000) for length in wanted.every]
        naming = (QUEUE, new_ulid()[:10], WORKSPACES, wanted.sink, wanted.delivery)
        jitter = (wanted.jitter, round(JITTER_CAP_SECONDS * 1_000_000))
        async with self.connection.transaction():
            with suppress(asyncpg.InsufficientPrivilegeError):  # a million times, that a row is there which is there
                async with self.connection.transaction():
                    await self.connection.execute("SET LOCAL session_replication_role = replica")
            await self.connection.execute(
                MAKE_SCHEDULES, wanted.count, wanted.start, wanted.spread, intervals, *jitter, *naming
            )
            await self.connection.execute(MAKE_VERSIONS)
            await self.connection.execute(MAKE_CURSORS)
        await self.settle()

    async def settle(self) -> None:
        """As a database is that has been there for a while: what was written is counted before it is vacuumed.

        Counted afterwards, it would make autovacuum come in the middle of a measure.
        """
        await self.connection.fetchval("SELECT pg_stat_force_next_flush()")
        for table in TABLES:
            await self.connection.execute(f"VACUUM (ANALYZE) {table}")
        with suppress(asyncpg.InsufficientPrivilegeError):
            await self.connection.execute("CHECKPOINT")

    async def outcomes(self, since: datetime, until: datetime) -> dict[str, int]:
        """What became of the occurrences from `since` up to `until`."""
        await self.connection.execute("ANALYZE cron_runs, queue_messages, cron_ticks")
        return dict(await self._row(OUTCOMES, since, until))

    async def lateness(self, since: datetime, until: datetime) -> list[dict[str, Any]]:
        """Lateness of what was to be executed then, in milliseconds: of all, and of each third of the time."""
        rows = await self.connection.fetch(LATENESS, since, until)
        return [{name: rounded(value) for name, value in row.items() if name != "third"} for row in rows]

    async def enqueued(self, since: datetime, until: datetime) -> int:
        """Ticks that were enqueued then."""
        return int(await self.connection.fetchval(ENQUEUED, since, until))

    async def consumed(self, since: datetime, until: datetime) -> int:
        """Messages that were completed then."""
        return int(await self.connection.fetchval(CONSUMED, since, until))

    async def backlog(self, since: datetime, until: datetime) -> dict[str, int]:
        """Messages that waited, or were in hand, then."""
        return dict(await self._row(BACKLOG, since, until))

    async def any_unconsumed(self, instant: datetime) -> bool:
        """Whether a message of an occurrence before then is not completed."""
        return bool(await self.connection.fetchval(ANY_UNCONSUMED, instant, QUEUE))

    async def handled(self, instant: datetime) -> dict[str, int]:
        """Messages of occurrences before then that are not completed; of all, those completed and those tried again."""
        return dict(await self._row(HANDLED, instant))

    async def made(self, since: datetime, until: datetime, made_after: datetime | None = None) -> dict[str, Any]:
        """Ticks that were made after their time, and how long before it the last one was made."""
        return {name: rounded(value) for name, value in (await self._row(MADE, since, until, made_after)).items()}

    async def any_due(self, instant: datetime, sink: str = QUEUE_SINK.name) -> bool:
        """Whether a tick is left that was due before then."""
        return bool(await self.connection.fetchval(ANY_DUE, instant, sink))

    async def sizes(self) -> dict[str, dict[str, int]]:
        """Bytes and rows of each table with its indexes."""
        rows = await self.connection.fetch(SIZES, TABLES)
        return {row["name"]: {name: row[name] for name in list(row.keys())[1:]} for row in rows}

    async def written_bytes(self) -> int:
        """WAL since ever."""
        return int(await self.connection.fetchval(WRITTEN))

    async def server_cpu_seconds(self) -> float | None:
        """Of all processes of the server since it started; None unless it runs here."""
        server = server_of(await self.connection.fetchval(BACKEND))
        return None if server is None else server_cpu_seconds(server)

    async def _row(self, text: str, *arguments: object) -> asyncpg.Record:
        (row,) = await self.connection.fetch(text, *arguments)
        return row


def rounded(value: Any) -> Any:
    """Figures of the database for people and JSON."""
    return value if value is None or isinstance(value, int) else round(float(value), 2)


@asynccontextmanager
async def open_load_tables(dsn: str) -> AsyncIterator[LoadTables]:
    """A connection that reads much at a time."""
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(SET_UP_CONNECTION)
        yield LoadTables(connection)
    finally:
        await connection.close()
