"""The bare statements that make ticks: prepared, their arguments made beforehand, one after the other.

The ceiling beside which `bench generate` puts the manager: the same texts and the same batches, without anything made
of the rows that come back: `executemany()` drops them while they are bytes.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from time import perf_counter
from typing import Any

import asyncpg

from cron_ticks.cli.bench.contenders import connected
from cron_ticks.database import in_schema
from cron_ticks.generation_repository import MOST_TICKS_AT_ONCE
from cron_ticks.generation_sql import LOCK_CURSORS_OF_SLOTS, MAKE_TICKS
from cron_ticks.ids import tick_id_beginning
from cron_ticks.settings import SLOTS, Settings

SCHEMA = "public"
PATIENCE = "30s"
NO_CALENDARS: list[list[object]] = [[] for _ in range(8)]

NEEDED = "SELECT schedule_id, next_tick_needed_at, planned, slot FROM cron_schedule_cursors ORDER BY slot, 2"


async def make_bare(dsn: str, settings: Settings) -> float:
    """Make the tick of each schedule, none of which has a cron expression; in how many seconds."""
    async with connected(dsn) as connection:
        rows = await connection.fetch(NEEDED)
        now: datetime = await connection.fetchval("SELECT statement_timestamp()")
        until = now + timedelta(seconds=settings.lookahead_seconds)
        size = settings.manager_batch_size
        batches = [_arguments(rows[first : first + size], now, until) for first in range(0, len(rows), size)]
        texts = (LOCK_CURSORS_OF_SLOTS, MAKE_TICKS)
        statements = [await connection.prepare(in_schema(text, SCHEMA)) for text in texts]
        begun = perf_counter()
        for batch in batches:
            async with connection.transaction():
                for statement, arguments in zip(statements, batch, strict=True):
                    await statement.executemany([arguments])
        return perf_counter() - begun


def _arguments(rows: Sequence[asyncpg.Record], now: datetime, until: datetime) -> list[tuple[Any, ...]]:
    """Of the two statements of a batch."""
    ids, needed, planned, slots = (list(column) for column in zip(*rows, strict=True))
    left = list(range(slots[0], SLOTS))
    return [
        (left, [None] * len(left), until, len(ids), 1, 0, None, PATIENCE),
        (ids, needed, planned, now, until, tick_id_beginning(), *NO_CALENDARS, MOST_TICKS_AT_ONCE, until, 1, now),
    ]
