"""What `bench failover` reads: lateness around the death of a worker, and what arrived outside."""

from datetime import datetime
from typing import Any

from cron_ticks.cli.bench.load_tables import LoadTables, rounded

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
