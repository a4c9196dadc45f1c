"""Calls of a QueueManager: making up for occurrences of the past."""

from datetime import datetime

import structlog

from cron_ticks.backfill_repository import BackfillRepository
from cron_ticks.backfiller import log_ended
from cron_ticks.backfills import PER_MINUTE, Backfill, check_range
from cron_ticks.checks import check_count, check_name
from token_queue.opened import OpenedManager

log = structlog.get_logger("token_queue.backfill_calls")

LARGEST_PAGE = 10_000


class BackfillCalls(OpenedManager):
    """Making up for occurrences of the past."""

    async def backfill(
        self, schedule_id: str, start: datetime, end: datetime, *, per_minute: int = PER_MINUTE
    ) -> Backfill:
        """Fire the occurrences from `start` to before `end` that have not fired: those missed, and those that were not.

        They are those of the schedule as it is now, in the past, at most 10 000. What has ended otherwise than missed
        is left alone, so that doing it twice adds nothing. It returns when the first ticks are made; running workers
        go on with it, at most `per_minute`, behind whatever is due.
        """
        check_name("schedule_id", schedule_id)
        first, beyond, pace = check_range(start, end, per_minute)
        backfills = self._backfills
        created = await backfills.create(
            schedule_id, first, beyond, per_minute=pace, created_by=self.settings.acting_as
        )
        log.info("backfill_started", backfill_id=created, schedule_id=schedule_id, start=first, end=beyond)
        ended = await backfills.step(created, schedule_id, wait=True)
        if ended is not None:
            log_ended(created, schedule_id, ended)
        return await backfills.get(created)

    async def get_backfill(self, backfill_id: str) -> Backfill:
        """How far a backfill is; BackfillNotFoundError if there is none under this id."""
        check_name("backfill_id", backfill_id)
        return await self._backfills.get(backfill_id)

    async def list_backfills(
        self, schedule_id: str | None = None, *, after_id: str | None = None, limit: int = 100
    ) -> list[Backfill]:
        """A page of backfills, of a schedule or all, the latest first; `after_id` is the last id of the page before.

        BackfillNotFoundError if there is no such backfill.
        """
        check_count("limit", limit, most=LARGEST_PAGE)
        if schedule_id is not None:
            check_name("schedule_id", schedule_id)
        if after_id is not None:
            await self.get_backfill(after_id)
        return await self._backfills.list(schedule_id=schedule_id, after_id=after_id, limit=limit)

    async def cancel_backfill(self, backfill_id: str) -> Backfill:
        """Make no more ticks of a backfill. Those that are made already fire; one that has ended stays as it is."""
        found = await self.get_backfill(backfill_id)
        if await self._backfills.cancel(backfill_id, reason=f"cancelled by {self.settings.acting_as}"):
            log.info("backfill_cancelled", backfill_id=backfill_id, schedule_id=found.schedule_id)
        return await self.get_backfill(backfill_id)

    @property
    def _backfills(self) -> BackfillRepository:
        return BackfillRepository(self._open.database, self.settings)
