"""What `bench generate` changes between its passes: which schedules are due, and that no tick is left."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from cron_ticks.cli.bench.calendar import ALWAYS, HOUR, ZONES
from cron_ticks.cli.bench.load_tables import LoadTables

FIRST_SECONDS = 5.0  # from now to the first occurrence of those that are due
DUE_SECONDS = 50  # over which they are spread: all of them are inside the window
VARIANTS = 6  # of the expressions of a second, each with another text or zone
FAR = timedelta(days=1)

CLEAR = "TRUNCATE cron_schedules, cron_schedule_cursors, cron_schedule_versions, cron_ticks"
CLEAR_TICKS = "TRUNCATE cron_ticks"

# Some, from all parts of the tables, and others each time.
CHOOSE = "SELECT id FROM cron_schedules ORDER BY md5(id || $2::text) LIMIT $1"

# Their rules become such that each has one occurrence inside the window.
CHANGE_RULES = """
UPDATE cron_schedules AS schedule
SET anchor_at = occurrence - interval '1 hour', interval_us = due.interval_us, cron = due.cron, zone = due.zone,
    dst_gap = CASE WHEN due.cron IS NOT NULL THEN 'fire' END,
    dst_fold = CASE WHEN due.cron IS NOT NULL THEN 'first' END,
    jitter_us = CASE WHEN due.cron IS NULL THEN schedule.jitter_us ELSE 0 END
FROM unnest($1::text[], $2::timestamptz[], $3::bigint[], $4::text[], $5::text[])
    AS due (schedule_id, occurrence, interval_us, cron, zone)
WHERE schedule.id = due.schedule_id
"""
MAKE_DUE = """
UPDATE cron_schedule_cursors AS cursor
SET next_tick_needed_at = occurrence
FROM unnest($1::text[], $2::timestamptz[]) AS due (schedule_id, occurrence)
WHERE cursor.schedule_id = due.schedule_id
"""

COUNT = "SELECT count(*) AS ticks, count(DISTINCT schedule_id) AS schedules FROM cron_ticks"


@dataclass(frozen=True)
class Due:
    """Schedules that are due, each with one occurrence inside the window."""

    ids: Sequence[str]
    occurrences: Sequence[datetime]
    expressions: int  # that are different


async def make_due(tables: LoadTables, due: int, cron_share: float, number: int) -> Due:
    """So many of the schedules, that share of them with cron expressions. Afterwards nothing is left to be vacuumed."""
    connection = tables.connection
    ids = [row["id"] for row in await connection.fetch(CHOOSE, due, str(number))]
    first = (await tables.now()).replace(microsecond=0) + timedelta(seconds=FIRST_SECONDS)
    occurrences = [first + timedelta(seconds=place % DUE_SECONDS) for place in range(len(ids))]
    with_cron = round(len(ids) * cron_share)
    rules = [_rule(place, occurrence, cron=place < with_cron) for place, occurrence in enumerate(occurrences)]
    intervals, expressions, zones = zip(*rules, strict=True)
    await connection.execute(CHANGE_RULES, ids, occurrences, intervals, expressions, zones)
    await connection.execute(MAKE_DUE, ids, occurrences)
    for table in ("cron_schedules", "cron_schedule_cursors"):
        await connection.execute(f"VACUUM {table}")
    return Due(ids, occurrences, len({rule for rule in rules if rule[1] is not None}))


def _rule(place: int, occurrence: datetime, *, cron: bool) -> tuple[int | None, str | None, str | None]:
    """Interval, expression and zone of a schedule with that occurrence; there are 300 expressions in all."""
    if not cron:
        return HOUR // timedelta(microseconds=1), None, None
    variant = place // DUE_SECONDS % VARIANTS
    expression = f"{occurrence.second} {occurrence.minute} {ALWAYS[variant % len(ALWAYS)]}"
    return None, expression, ZONES[variant % (len(ZONES) - 1)]


async def put_off(tables: LoadTables, due: Due) -> None:
    """They are due no more, for long, and have no ticks."""
    await tables.connection.execute(CLEAR_TICKS)
    later = [occurrence + HOUR + FAR for occurrence in due.occurrences]
    await tables.connection.execute(MAKE_DUE, due.ids, later)


async def count_ticks(tables: LoadTables) -> tuple[int, int]:
    """Ticks, and schedules that have one."""
    row = await tables.connection.fetchrow(COUNT)
    return (0, 0) if row is None else (row["ticks"], row["schedules"])
