"""What `bench fire` puts into the tables beforehand and reads from them afterwards, by the database's clock."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import asyncpg

from cron_ticks.cli.bench.bursts import Burst
from cron_ticks.cli.bench.contenders import WORKSPACES
from cron_ticks.cli.bench.fire_processes import CHANNEL
from cron_ticks.errors import CronTicksError
from cron_ticks.ids import new_ulid
from cron_ticks.listener import NOTIFY, TICKS_NOTICE

# Of ticks that are due already: all of them so lately that none is missed, though it takes a while to make them; and
# the next occurrences beyond the window, so that the manager has nothing to do.
DUE_EVERY = timedelta(seconds=180)
DUE_SINCE = DUE_SPREAD = timedelta(seconds=5)
MADE_BEFORE = timedelta(seconds=60)

BURST_EVERY = timedelta(hours=1)

CLEAR = """
TRUNCATE cron_schedules, cron_schedule_cursors, cron_schedule_versions, cron_ticks, cron_runs, queue_messages,
    queue_tokens, queue_workers, execution_events
"""

# As schedule() leaves them, in the middle of their lives: occurrence 0, which has no jitter, lies behind them. The next
# ones are spread evenly; `$5` of them have been made already.
MAKE_SCHEDULES = """
WITH made AS (
    SELECT 'cron_' || $6::text || upper(left(md5(random()::text), 16)) AS id, number,
        $2::timestamptz - $4::interval + number * ($3::interval / $1::int) AS anchor
    FROM generate_series(0, $1::int - 1) AS number
),
schedules AS (
    INSERT INTO cron_schedules (id, workspace_id, name, queue_name, payload, interval_us, anchor_at, jitter_us,
        jitter_ratio, starts_at, created_at, updated_at)
    SELECT id, 'ws_' || number % $8::int, 'benchmark-' || number, 'benchmark', jsonb_build_object('n', number),
        extract(epoch FROM $4) * 1000000, anchor, extract(epoch FROM $4 * $7::float) * 1000000, $7, anchor,
        statement_timestamp(), statement_timestamp()
    FROM made
    RETURNING *
),
versions AS (
    INSERT INTO cron_schedule_versions (schedule_id, version, holds_after, change, enabled, workspace_id, name,
        queue_name, payload, interval_us, anchor_at, jitter_us, jitter_ratio, priority, starts_at, planned, created_at)
    SELECT id, version, anchor_at - interval '1 microsecond', 'created', enabled, workspace_id, name,
        queue_name, payload, interval_us, anchor_at, jitter_us, jitter_ratio, priority, starts_at, 0, created_at
    FROM schedules
)
INSERT INTO cron_schedule_cursors (schedule_id, next_tick_needed_at, planned)
SELECT id, anchor + $4 * (1 + $5::int), 1 + $5::int FROM made
"""

# Occurrence 1 of each, as the manager makes it; made at `$2`, before it was due.
MAKE_TICKS = """
INSERT INTO cron_ticks (id, schedule_id, schedule_name, workspace_id, queue_name, payload, scheduled_for, execute_at,
    due_at, created_at, version, priority)
SELECT 'tick_' || $1::text || upper(left(md5(random()::text), 16)), id, name, workspace_id, queue_name, payload,
    occurrence, execute_at, execute_at, $2::timestamptz, version, priority
FROM cron_schedules
CROSS JOIN LATERAL (SELECT anchor_at + interval_us * interval '1 microsecond' AS occurrence) AS first
CROSS JOIN LATERAL (SELECT occurrence + cron_jitter(id, occurrence, jitter_us) AS execute_at) AS moved
"""

# How a drain ended. A run says when its statement began, so the last batch is left out: when it began, all that came
# before it was enqueued. Occurrences that have a message are counted too: one lost and one doubled must not look well.
DRAINED = """
SELECT (SELECT count(*) FROM cron_ticks) AS ticks,
    (SELECT count(*) FROM queue_messages) AS messages,
    (SELECT count(DISTINCT (schedule_id, scheduled_for)) FROM queue_messages) AS occurrences,
    count(*) AS runs,
    count(*) FILTER (WHERE ended_at < last) AS counted,
    min(ended_at) AS first,
    last
FROM cron_runs, (SELECT max(ended_at) AS last FROM cron_runs) AS ended
WHERE outcome = 'enqueued'
GROUP BY last
"""

# What should have fired by `$1`, from the schedules alone, beside what has.
UNEXPLAINED = """
WITH wanted AS (
    SELECT schedule.id AS schedule_id, scheduled_for
    FROM cron_schedules AS schedule
    CROSS JOIN LATERAL (SELECT interval_us * interval '1 microsecond' AS step) AS rule
    CROSS JOIN LATERAL generate_series(anchor_at + step, $1::timestamptz + step, step) AS scheduled_for
    WHERE scheduled_for + cron_jitter(schedule.id, scheduled_for, jitter_us) < $1
),
sent AS (
    SELECT schedule_id, scheduled_for, count(*) AS messages FROM queue_messages GROUP BY schedule_id, scheduled_for
)
SELECT count(*) AS expected,
    count(*) FILTER (WHERE messages IS NULL OR outcome IS DISTINCT FROM 'enqueued') AS missing,
    count(*) FILTER (WHERE messages > 1) AS doubled
FROM wanted
LEFT JOIN cron_runs USING (schedule_id, scheduled_for)
LEFT JOIN sent USING (schedule_id, scheduled_for)
"""

# Lateness of what was to be executed in a time, in milliseconds.
LATENESS = """
SELECT count(*) AS ticks, percentile_cont(0.5) WITHIN GROUP (ORDER BY late) AS p50_ms,
    percentile_cont(0.99) WITHIN GROUP (ORDER BY late) AS p99_ms, max(late) AS max_ms
FROM (
    SELECT extract(epoch FROM lateness) * 1000 AS late
    FROM cron_runs
    WHERE ended_at - lateness >= $1 AND ended_at - lateness < $2
) AS runs
"""

# How a burst went. A run says when its statement began; it was enqueued before its ticker began the next one, or, the
# last one, before the end ($1). So nothing is shown as earlier than it was.
BURST = """
WITH statements AS (
    SELECT ticker_id, ended_at, coalesce(lead(ended_at) OVER (PARTITION BY ticker_id ORDER BY ended_at), $1) AS done
    FROM (SELECT DISTINCT ticker_id, ended_at FROM cron_runs) AS run
)
SELECT count(*) AS fired, percentile_cont(0.5) WITHIN GROUP (ORDER BY late) AS p50_ms,
    percentile_cont(0.99) WITHIN GROUP (ORDER BY late) AS p99_ms, max(late) AS max_ms
FROM (
    SELECT extract(epoch FROM done - scheduled_for)::float * 1000 AS late
    FROM cron_runs JOIN statements USING (ticker_id, ended_at)
) AS runs
"""

ANY_DUE = "SELECT EXISTS (SELECT FROM cron_ticks WHERE due_at < $1)"


@dataclass(frozen=True)
class Tables:
    """The tables of a contender, seen over a connection of our own."""

    connection: "asyncpg.Connection[asyncpg.Record]"

    async def clear(self) -> None:
        """Empty them, without telling the planner that they are empty."""
        await self.connection.execute(CLEAR)

    async def now(self) -> datetime:
        """The database's clock."""
        instant: datetime = await self.connection.fetchval("SELECT statement_timestamp()")
        return instant

    async def monotonic_zero(self) -> datetime:
        """What the database's clock said when our own monotonic one was zero."""
        before = time.monotonic()
        now: datetime = await self.connection.fetchval("SELECT clock_timestamp()")
        return now - timedelta(seconds=(before + time.monotonic()) / 2)

    async def make_schedules(
        self,
        count: int,
        *,
        every: timedelta,
        start: datetime,
        spread: timedelta = timedelta(0),
        made: int = 0,
        jitter: float = 0,
    ) -> None:
        """Schedules whose next occurrences are spread evenly from `start` on."""
        arguments = (count, start, spread, every, made, new_ulid()[:10], jitter, WORKSPACES)
        await self.connection.fetch(MAKE_SCHEDULES, *arguments)
        await self.connection.execute("VACUUM (ANALYZE) cron_schedules")
        await self.connection.execute("VACUUM (ANALYZE) cron_schedule_cursors")

    async def announce_due_ticks(self, count: int) -> datetime:
        """Due ticks, a schedule each; then nothing is left to write but the firing. When the others saw them.

        As the manager does it, in one transaction with the NOTIFY: so nobody can fire some before the start.
        """
        now = await self.now()
        await self.make_schedules(count, every=DUE_EVERY, start=now - DUE_SINCE, spread=DUE_SPREAD, made=1)
        async with self.connection.transaction():
            await self.connection.fetch(MAKE_TICKS, new_ulid()[:10], now - MADE_BEFORE)
            await self.connection.execute("ANALYZE cron_ticks")
            await self.checkpoint()
            await self.connection.fetch(NOTIFY, CHANNEL, TICKS_NOTICE)
            return await self.now()

    async def checkpoint(self) -> None:
        """What was written until now is on disk, and does not get there while something is measured."""
        with suppress(asyncpg.InsufficientPrivilegeError):
            async with self.connection.transaction():  # within another one too, which goes on if it is refused
                await self.connection.execute("CHECKPOINT")

    async def make_burst_ticks(self, count: int, due: datetime) -> None:
        """Ticks that fall due together, as the managers would have made them; who waits for ticks hears of them."""
        await self.make_schedules(count, every=BURST_EVERY, start=due, made=1)
        await self.connection.fetch(MAKE_TICKS, new_ulid()[:10], await self.now())
        await self.settle_ticks()
        await self.connection.fetch(NOTIFY, CHANNEL, TICKS_NOTICE)

    async def settle_ticks(self) -> None:
        """As autovacuum and the checkpointer leave them after a while."""
        await self.connection.execute("VACUUM (ANALYZE) cron_ticks")
        await self.checkpoint()

    async def drain_rate(self, count: int, start: datetime) -> float:
        """Ticks a second from the start to the beginning of the last batch; an error if not all have one message."""
        row = await self._drained(count, start)
        return float(row["counted"] / (row["last"] - start).total_seconds())

    async def burst(self, count: int, due: datetime, end: datetime) -> Burst:
        """How late each was; an error if not all have one message."""
        await self._drained(count, due)
        row = await self.connection.fetchrow(BURST, end)
        if row is None or row["fired"] != count:
            raise CronTicksError(f"of {count} ticks not each has one run: {row}")
        return Burst(count, count, 0, row["p50_ms"], row["p99_ms"], row["max_ms"])

    async def _drained(self, count: int, start: datetime) -> "asyncpg.Record":
        row = await self.connection.fetchrow(DRAINED)
        found = None if row is None else (row["ticks"], row["messages"], row["occurrences"], row["runs"])
        if row is None or found != (0, count, count, count) or row["first"] < start:
            raise CronTicksError(f"of {count} ticks not each became one message after the start: {row}")
        return row

    async def any_due(self, instant: datetime) -> bool:
        """Whether a tick is left that was due before then."""
        return bool(await self.connection.fetchval(ANY_DUE, instant))

    async def check_complete(self, until: datetime) -> None:
        """An error unless each occurrence to be executed before `until` has one run and one message."""
        await self.connection.execute("ANALYZE cron_schedules, cron_runs, queue_messages")
        row = await self.connection.fetchrow(UNEXPLAINED, until)
        if row is None or row["missing"] or row["doubled"]:
            raise CronTicksError(f"not each occurrence became one message: {row}")

    async def lateness(self, start: datetime, until: datetime) -> dict[str, Any]:
        """Lateness of what was to be executed from `start` to `until`."""
        row = await self.connection.fetchrow(LATENESS, start, until)
        if row is None or not row["ticks"]:
            raise CronTicksError("no tick was fired: give more --seconds")
        return {name: value if isinstance(value, int) else round(float(value), 2) for name, value in row.items()}


@asynccontextmanager
async def open_tables(dsn: str) -> AsyncIterator[Tables]:
    """A connection as it comes: what we ask for may well read whole tables."""
    connection = await asyncpg.connect(dsn)
    try:
        yield Tables(connection)
    finally:
        await connection.close()
