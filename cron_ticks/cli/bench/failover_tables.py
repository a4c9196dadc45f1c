"""What `bench failover` reads: lateness around the death of a worker, who has its shards, and what arrived outside."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import anyio

from cron_ticks.cli.bench.load_tables import MADE_AT, LoadTables, rounded
from cron_ticks.errors import CronTicksError

LOOK_SECONDS = 0.1  # at the shards

MAKE_DELIVERIES = "CREATE TABLE bench_deliveries (message_id text NOT NULL)"

# Ticks to be executed from $1 up to $2: those that ended before $3, and those that ended later. In milliseconds.
AROUND = """
SELECT ended_at >= $3::timestamptz AS afterwards, count(*) AS ticks,
    percentile_cont(0.5) WITHIN GROUP (ORDER BY late) AS p50_ms,
    percentile_cont(0.99) WITHIN GROUP (ORDER BY late) AS p99_ms, max(late) AS max_ms,
    count(*) FILTER (WHERE recovered) AS recovered, count(DISTINCT ticker_id) AS workers
FROM (
    SELECT *, extract(epoch FROM lateness)::float * 1000 AS late
    FROM cron_runs
    WHERE ended_at - lateness >= $1::timestamptz AND ended_at - lateness < $2::timestamptz
) AS runs
GROUP BY afterwards
ORDER BY afterwards
"""

ANY_LEFT = "SELECT EXISTS (SELECT FROM cron_ticks WHERE execute_at < $1)"

# What the ledger says was sent, beside what arrived.
DELIVERIES = """
WITH arrived AS (SELECT message_id, count(*) AS times FROM bench_deliveries GROUP BY message_id)
SELECT count(*) FILTER (WHERE times IS NULL) AS lost,
    coalesce(sum(times - 1), 0)::bigint AS again,
    count(*) FILTER (WHERE times > 1 AND NOT recovered) AS again_unmarked
FROM cron_runs
LEFT JOIN arrived USING (message_id)
WHERE outcome = 'enqueued'
"""

# The shards of a manager, and the schedules in them.
SHARDS_OF = "SELECT shards, shard FROM cron_shards WHERE leased_by = $1"
SCHEDULES_OF = "SELECT count(*) FROM cron_schedule_cursors WHERE slot % $1::int = ANY ($2::int[])"

# Of the ticks of the schedules in these shards ($4, of $5), those made after $3.
CONTINUED = (
    MADE_AT
    + """
SELECT count(*) AS ticks, count(DISTINCT schedule_id) AS schedules,
    count(*) FILTER (WHERE made_at > execute_at) AS late,
    min(extract(epoch FROM execute_at - made_at))::float AS lead_s
FROM made
JOIN cron_schedule_cursors USING (schedule_id)
WHERE made_at > $3::timestamptz AND slot % $5::int = ANY ($4::int[])
"""
)


@dataclass(frozen=True)
class Estate:
    """What a manager had when it was killed."""

    shards: int  # of all
    own: list[int]
    schedules: int

    @classmethod
    async def of(cls, tables: LoadTables, manager: str) -> "Estate":
        """An error if it has nothing: its death would show nothing."""
        rows = await tables.connection.fetch(SHARDS_OF, manager)
        if not rows:
            raise CronTicksError("the worker that is to be killed has no shards of the schedules")
        shards, own = rows[0]["shards"], [row["shard"] for row in rows]
        schedules = int(await tables.connection.fetchval(SCHEDULES_OF, shards, own))
        if not schedules:
            raise CronTicksError("there are no schedules in the shards of the worker that is to be killed: take more")
        return cls(shards, own, schedules)


@dataclass(frozen=True)
class Takeover:
    """When the shards of a dead manager were others': after the one look, and by the other."""

    later_than: datetime
    seen_at: datetime


async def taken_over(tables: LoadTables, manager: str, death: datetime, until: datetime) -> Takeover:
    """Wait until all of a dead manager's shards are others'; an error if they aren't by then."""
    before = death
    while True:
        now = await tables.now()
        if not await tables.connection.fetch(SHARDS_OF, manager):
            return Takeover(before, await tables.now())
        if now > until:
            raise CronTicksError(f"nobody took over the shards of the dead worker in {(until - death).seconds} s")
        before = now
        await anyio.sleep(LOOK_SECONDS)


async def continued(
    tables: LoadTables, estate: Estate, since: datetime, until: datetime, made_after: datetime
) -> dict[str, Any]:
    """What was made after the takeover for schedules in the dead manager's shards."""
    rows = await tables.connection.fetch(CONTINUED, since, until, made_after, estate.own, estate.shards)
    return {name: rounded(value) for name, value in rows[0].items()}


async def around(tables: LoadTables, since: datetime, until: datetime, death: datetime) -> list[dict[str, Any]]:
    """Before and after it."""
    rows = await tables.connection.fetch(AROUND, since, until, death)
    return [{name: rounded(value) for name, value in row.items() if name != "afterwards"} for row in rows]


async def any_left(tables: LoadTables, instant: datetime) -> bool:
    """Whether a tick is left that was to be executed before then."""
    return bool(await tables.connection.fetchval(ANY_LEFT, instant))


async def deliveries(tables: LoadTables) -> dict[str, int]:
    """What was lost on the way, and what arrived again."""
    (row,) = await tables.connection.fetch(DELIVERIES)
    return dict(row)
