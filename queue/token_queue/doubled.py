"""Occurrences that have several messages: what the promise excludes, looked for where it would show."""

from datetime import datetime

from cron_ticks.audit_results import Doubled
from cron_ticks.database import Database

# One scan of the index over that time, whatever the statistics say, of all schedules or of one ($3): what was sent
# before $1 is not read.
DOUBLED_OCCURRENCES = """
SELECT doubled.schedule_id, latest.name, latest.workspace_id, latest.queue_name, doubled.scheduled_for,
    doubled.messages
FROM (
    SELECT scheduled_for, schedule_id, count(*) AS messages
    FROM {schema}.queue_messages
    WHERE schedule_id IS NOT NULL AND scheduled_for >= $1::timestamptz AND scheduled_for < $2::timestamptz
        AND ($3::text IS NULL OR schedule_id = $3)
    GROUP BY scheduled_for, schedule_id
    HAVING count(*) > 1
) AS doubled
CROSS JOIN LATERAL (
    SELECT name, workspace_id, queue_name
    FROM {schema}.cron_schedule_versions AS version
    WHERE version.schedule_id = doubled.schedule_id
    ORDER BY version.version DESC
    LIMIT 1
) AS latest
ORDER BY doubled.schedule_id, doubled.scheduled_for
"""

DEADLINE_SECONDS = 3600.0


async def find_doubled(
    database: Database, since: datetime, until: datetime, schedule_id: str | None = None
) -> list[Doubled]:
    """Occurrences in [since, until) with several messages in our own queue."""
    rows = await database.fetch(DOUBLED_OCCURRENCES, since, until, schedule_id, deadline_seconds=DEADLINE_SECONDS)
    return [Doubled._make(row) for row in rows]
