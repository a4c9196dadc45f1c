"""The bare statements that make ticks: prepared, their arguments made beforehand, one after the other.

The ceiling beside which `bench generate` puts the manager: the same texts and the same batches, without the arithmetic
and without anything made of the rows that come back: `executemany()` drops them while they are bytes.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from time import perf_counter
from typing import Any

import asyncpg

from cron_ticks.cli.bench.contenders import connected
from cron_ticks.database import in_schema
from cron_ticks.ids import new_tick_id
from cron_ticks.settings import Settings
from cron_ticks.tick_sql import CREATE_TICKS, LOCK_CURSORS_IN_WINDOW, RULES, UPDATE_NEXT_TICK_NEEDED

SCHEMA = "public"
PATIENCE = "30s"
NO_TIME = timedelta(0)

# What the manager would find and compute: each schedule has one occurrence inside the window.
NEEDED = """
SELECT cursor.schedule_id, cursor.next_tick_needed_at AS occurrence,
    cursor.next_tick_needed_at + schedule.interval_us * interval '1 microsecond' AS next_needed,
    cursor.planned + 1 AS planned
FROM cron_schedule_cursors AS cursor
JOIN cron_schedules AS schedule ON schedule.id = cursor.schedule_id
ORDER BY cursor.next_tick_needed_at
"""


async def make_bare(dsn: str, settings: Settings) -> float:
    """Make the tick of each schedule; in how many seconds."""
    async with connected(dsn) as connection:
        rows = await connection.fetch(NEEDED)
        now: datetime = await connection.fetchval("SELECT statement_timestamp()")
        size = settings.manager_batch_size
        batches = [_arguments(rows[first : first + size], now, settings) for first in range(0, len(rows), size)]
        texts = (LOCK_CURSORS_IN_WINDOW, RULES, CREATE_TICKS, UPDATE_NEXT_TICK_NEEDED)
        statements = [await connection.prepare(in_schema(text, SCHEMA)) for text in texts]
        begun = perf_counter()
        for batch in batches:
            async with connection.transaction():
                for statement, arguments in zip(statements, batch, strict=True):
                    await statement.executemany([arguments])
        return perf_counter() - begun


def _arguments(rows: Sequence[asyncpg.Record], now: datetime, settings: Settings) -> list[tuple[Any, ...]]:
    """Of the four statements of a batch."""
    ids, occurrences, next_needed, planned = (list(column) for column in zip(*rows, strict=True))
    missed_after = timedelta(seconds=settings.missed_after_seconds)
    unpaced = [None] * len(ids)
    ticks = [new_tick_id() for _ in ids]
    return [
        (timedelta(seconds=settings.lookahead_seconds), len(ids), 1, 0, None, PATIENCE),
        (ids,),
        (ticks, ids, occurrences, now, NO_TIME, missed_after, unpaced),
        (ids, next_needed, planned),
    ]
