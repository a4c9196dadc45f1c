"""Many workers on schedules that end together: what to expect of them, and waiting for it."""

import math
import signal
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from cron_ticks.schedules import Schedule
from support.processes import RunningProcess

Occurrence = tuple[str, datetime]


def expected_of(schedules: Sequence[Schedule]) -> set[Occurrence]:
    """What should fire, by plain arithmetic: each `anchor + k * interval` up to the end, or each k-th second."""
    expected = set()
    for schedule in schedules:
        assert schedule.ends_at is not None
        if schedule.cron is not None:
            moments = _kth_seconds(schedule.cron, schedule.created_at, schedule.ends_at)
        else:
            assert schedule.interval is not None
            steps = (schedule.ends_at - schedule.anchor_at) // schedule.interval
            moments = [schedule.anchor_at + step * schedule.interval for step in range(steps + 1)]
        expected |= {(schedule.id, moment) for moment in moments}
    return expected


def every_kth_second(k: int) -> str:
    """An expression; k divides 60, so that it is the same in every zone."""
    assert 60 % k == 0
    return f"*/{k} * * * * *"


def _kth_seconds(cron: str, start: datetime, end: datetime) -> list[datetime]:
    k = int(cron.partition(" ")[0].removeprefix("*/"))
    seconds = range(math.ceil(start.timestamp()), math.floor(end.timestamp()) + 1)
    return [datetime.fromtimestamp(second, UTC) for second in seconds if second % k == 0]


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
