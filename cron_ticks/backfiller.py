"""Backfiller: goes on with backfills that are due, on every pod."""

import math

import structlog

from cron_ticks.backfill_repository import BackfillRepository, DueBackfill, Ended

log = structlog.get_logger("cron_ticks.backfiller")

AT_ONCE = 20  # backfills per pass: whoever calls has other things to do
SHORTEST_SECONDS = 0.1  # before another look at one that somebody else is busy with


class Backfiller:
    """Works off backfills, whoever began them; two pods never wait for each other."""

    def __init__(self, repository: BackfillRepository) -> None:
        self._repository = repository

    async def run_once(self) -> float:
        """One step of each that is due; in how many seconds the next one is, which may be never."""
        trouble: Exception | None = None
        for found in await self._repository.next_backfills(limit=AT_ONCE):
            if found.due_in.total_seconds() <= 0:
                try:
                    await self._step(found)
                except Exception as error:  # noqa: BLE001 - one of them stops no other; it is tried again
                    trouble = error
        if trouble is not None:
            raise trouble
        following = await self._repository.next_backfills(limit=1)
        return max(SHORTEST_SECONDS, min((found.due_in.total_seconds() for found in following), default=math.inf))

    async def _step(self, found: DueBackfill) -> None:
        ended = await self._repository.step(found.id, found.schedule_id)
        if ended is not None:
            log_ended(found.id, found.schedule_id, ended)


def log_ended(backfill_id: str, schedule_id: str, ended: Ended) -> None:
    """How a backfill has ended."""
    write = log.error if ended.outcome == "failed" else log.info
    write(
        "backfill_ended",
        backfill_id=backfill_id,
        schedule_id=schedule_id,
        outcome=ended.outcome,
        reason=ended.reason,
    )
