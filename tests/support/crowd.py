"""Many workers on schedules that end together: what to expect of them, and waiting for it."""

import signal
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from cron_ticks.schedules import Schedule
from support.processes import RunningProcess

Occurrence = tuple[str, datetime]


def expected_of(schedules: Sequence[Schedule]) -> set[Occurrence]:
    """What should fire, by plain arithmetic: each `anchor + k * interval` up to the end."""
    expected = set()
    for schedule in schedules:
        assert schedule.interval is not None
        assert schedule.ends_at is not None
        steps = (schedule.ends_at - schedule.anchor_at) // schedule.interval
        expected |= {(schedule.id, schedule.anchor_at + step * schedule.interval) for step in range(steps + 1)}
    return expected


async def after(seconds: float, connection: Any) -> datetime:
    """An instant from now on, by the database's clock."""
    instant: datetime = await connection.fetchval(
        "SELECT statement_timestamp() + $1::interval", timedelta(seconds=seconds)
    )
    return instant


async def until_end(ends_at: datetime, connection: Any) -> float:
    """Seconds that are left, by the database's clock."""
    left: timedelta = await connection.fetchval("SELECT $1::timestamptz - statement_timestamp()", ends_at)
    return max(0.0, left.total_seconds())


async def stop(workers: Sequence[RunningProcess]) -> None:
    for worker in workers:
        worker.send(signal.SIGTERM)
    for worker in workers:
        assert await worker.wait() == 0


def count(workers: Sequence[RunningProcess], event: str) -> int:
    return sum(line["event"] == event for worker in workers for line in worker.events)
