"""What should have happened, from the kept versions of a schedule alone."""

from datetime import datetime
from typing import Any

from cron_ticks.occurrences import MICROSECOND
from cron_ticks.rows import rule_of_row


async def expected_by_versions(connection: Any, schedule_id: str, until: datetime) -> list[datetime]:
    """What the kept versions say: each holds after its moment, up to that of any later one."""
    rows = await connection.fetch(
        "SELECT * FROM cron_schedule_versions WHERE schedule_id = $1 ORDER BY version DESC", schedule_id
    )
    expected: list[datetime] = []
    held_until = until
    for row in rows:
        after = row["holds_after"] + MICROSECOND
        if row["enabled"] and after <= held_until:
            expected += rule_of_row(row).occurrences(after, held_until + MICROSECOND)
        held_until = min(held_until, row["holds_after"])
    return sorted(expected)
