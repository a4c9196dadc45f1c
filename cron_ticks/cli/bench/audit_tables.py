"""What `bench audit` puts into the tables beforehand: schedules, their versions and the ledger of the last hours."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from cron_ticks.cron_rules import CronRule
from cron_ticks.database import Database

EXPRESSIONS = 300
ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Asia/Tokyo", "America/Sao_Paulo")
FORMS = ("{n} * * * *", "{n},{m} * * * *", "{n} */5 * * * *", "{n} */10 * * * *", "{n} */2 * * * *")
WINDOW = timedelta(seconds=60)

# Three quarters have an interval of one to sixty minutes, at an odd microsecond; the others one of the expressions.
MAKE_SCHEDULES = """
WITH made AS (
    INSERT INTO {schema}.cron_schedules (id, workspace_id, name, queue_name, payload, interval_us, anchor_at, cron,
        zone, dst_gap, dst_fold, created_at, updated_at)
    SELECT 'cron_' || upper(md5(number::text)), 'ws_' || number % 100, 'benchmark-' || number,
        'benchmark-' || number % 20, jsonb_build_object('n', number),
        CASE WHEN number % 4 > 0 THEN (1 + number / 4 % 60) * 60000000::bigint END,
        $2::timestamptz + number % 3600 * interval '1 second' + number * interval '1 microsecond',
        CASE WHEN number % 4 = 0 THEN ($3::text[])[1 + number / 4 % $5::int] END,
        CASE WHEN number % 4 = 0 THEN ($4::text[])[1 + number / 4 % $5] END,
        CASE WHEN number % 4 = 0 THEN 'fire' END, CASE WHEN number % 4 = 0 THEN 'first' END, $2, $2
    FROM generate_series(0, $1::int - 1) AS number
    RETURNING *
),
versions AS (
    INSERT INTO {schema}.cron_schedule_versions (schedule_id, version, holds_after, change, enabled, workspace_id, name,
        queue_name, payload, interval_us, anchor_at, jitter_us, priority, planned, created_at, cron, zone, dst_gap,
        dst_fold)
    SELECT id, version, anchor_at - interval '1 microsecond', 'created', enabled, workspace_id, name,
        queue_name, payload, interval_us, anchor_at, jitter_us, priority, 0, created_at, cron, zone, dst_gap, dst_fold
    FROM made
)
INSERT INTO {schema}.cron_schedule_cursors (schedule_id, next_tick_needed_at, planned)
SELECT id, $6::timestamptz, 1 FROM made
"""

# All occurrences from $1 up to $2, in the order of time, as firing writes them.
_OCCURRENCES = """
    SELECT schedule.*, scheduled_for
    FROM {schema}.cron_schedules AS schedule
    CROSS JOIN LATERAL (
        SELECT interval_us * interval '1 microsecond' AS step,
            ceil(date_part('epoch', $1::timestamptz - anchor_at) * 1000000 / interval_us)::bigint AS first
    ) AS rule
    CROSS JOIN LATERAL generate_series(anchor_at + first * step, $2::timestamptz - interval '1 microsecond', step)
        AS scheduled_for
    WHERE interval_us IS NOT NULL
    UNION ALL
    SELECT schedule.*, moment
    FROM unnest($3::text[], $4::timestamptz[]) AS occurrence (expression, moment)
    JOIN {schema}.cron_schedules AS schedule ON schedule.cron = occurrence.expression
"""
MAKE_RUNS = (
    """
WITH runs AS (
    INSERT INTO {schema}.cron_runs (schedule_id, scheduled_for, version, origin, outcome, message_id, ended_at,
        lateness, attempts, ticker_id)
    SELECT id, scheduled_for, 1, 'schedule', 'enqueued', 'msg_' || upper(md5(id || scheduled_for)),
        scheduled_for + interval '20 milliseconds', interval '20 milliseconds', 1, 'ticker_benchmark'
    FROM ("""
    + _OCCURRENCES
    + """) AS occurrence
    ORDER BY scheduled_for
    RETURNING *
)
INSERT INTO {schema}.queue_messages (id, queue_name, payload, schedule_id, scheduled_for, completed_at)
SELECT message_id, 'benchmark', '{}', schedule_id, scheduled_for, ended_at FROM runs
"""
)
MAKE_TICKS = (
    """
INSERT INTO {schema}.cron_ticks (id, schedule_id, schedule_name, workspace_id, queue_name, payload, scheduled_for,
    execute_at, due_at, created_at)
SELECT 'tick_' || upper(md5(id || scheduled_for)), id, name, workspace_id, queue_name, payload, scheduled_for,
    scheduled_for, scheduled_for, $1
FROM ("""
    + _OCCURRENCES
    + ") AS occurrence"
)

# As autovacuum does sooner or later.
TABLES = (
    "cron_schedules",
    "cron_schedule_versions",
    "cron_schedule_cursors",
    "cron_ticks",
    "cron_runs",
    "queue_messages",
)

REMOVE_RUN = """
DELETE FROM {schema}.cron_runs
WHERE (schedule_id, scheduled_for) IN (
    SELECT schedule_id, scheduled_for
    FROM {schema}.cron_runs
    WHERE scheduled_for >= $1 AND scheduled_for < $2
    ORDER BY md5(schedule_id)
    LIMIT 1
)
RETURNING schedule_id, scheduled_for
"""
REMOVE_TICK = """
DELETE FROM {schema}.cron_ticks
WHERE id = (SELECT id FROM {schema}.cron_ticks ORDER BY id LIMIT 1)
RETURNING schedule_id, scheduled_for
"""


def expressions() -> list[tuple[str, str]]:
    """Some hundred, each with its zone."""
    per_form = EXPRESSIONS // len(FORMS)
    return [
        (form.format(n=number, m=(number + 30) % 60), zone)
        for form, zone in zip(FORMS, ZONES, strict=True)
        for number in range(per_form)
    ]


def calendar_occurrences(start: datetime, end: datetime) -> tuple[list[str], list[datetime]]:
    """Those of all expressions."""
    found = [(cron, moment) for cron, zone in expressions() for moment in CronRule(cron, zone).occurrences(start, end)]
    return [cron for cron, _ in found], [moment for _, moment in found]


async def fill(database: Database, schedules: int, now: datetime, hours: int) -> None:
    """Schedules with the ledger of the last hours, and the ticks of the coming minute."""
    crons, zones = map(list, zip(*expressions(), strict=True))
    begun = now.astimezone(UTC) - timedelta(hours=hours + 2)
    await database.fetch(MAKE_SCHEDULES, schedules, begun, crons, zones, EXPRESSIONS, now + WINDOW)
    await database.fetch("ANALYZE {schema}.cron_schedules")
    for hour in range(hours, 0, -1):
        start = now - timedelta(hours=hour)
        end = start + timedelta(hours=1)
        await database.fetch(MAKE_RUNS, start, end, *calendar_occurrences(start, end))
    await database.fetch(MAKE_TICKS, now, now + WINDOW, *calendar_occurrences(now, now + WINDOW))
    for table in TABLES:
        await database.fetch(f"VACUUM (ANALYZE) {{schema}}.{table}")


async def remove_by_hand(database: Database, since: datetime, until: datetime) -> Sequence[tuple[Any, ...]]:
    """A run and a tick: which occurrences they were of."""
    return [
        tuple(row)
        for statement, arguments in ((REMOVE_RUN, (since, until)), (REMOVE_TICK, ()))
        for row in await database.fetch(statement, *arguments)
    ]
