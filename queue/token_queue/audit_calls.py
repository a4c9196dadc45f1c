"""Calls of a QueueManager: whether everything happened that should have, and how well."""

from datetime import datetime, timedelta
from functools import partial

from cron_ticks.audit_repository import AuditRepository
from cron_ticks.audit_results import Audit, Statistics
from token_queue.doubled import find_doubled
from token_queue.opened import OpenedManager


class AuditCalls(OpenedManager):
    """Whether everything happened that should have, and how well."""

    async def audit(
        self,
        since: datetime | None = None,
        until: datetime | None = None,
        *,
        schedule_id: str | None = None,
        late_after: float | timedelta | None = None,
    ) -> Audit:
        """What should have happened in [since, until) by the schedules' versions, and what did.

        Without times, the last hour; `until` may lie in the future, as far as ticks have been made. What was enqueued
        more than `late_after` too late is counted as late; default: `missed_after_seconds` of the settings.
        """
        return await self._audits.audit(since, until, schedule_id=schedule_id, late_after=late_after)

    async def stats(
        self, since: datetime | None = None, until: datetime | None = None, *, schedule_id: str | None = None
    ) -> Statistics:
        """How well it went in [since, until), by schedule, by queue and in total. Without times, the last hour."""
        return await self._audits.stats(since, until, schedule_id=schedule_id)

    @property
    def _audits(self) -> AuditRepository:
        database = self._open.database
        return AuditRepository(database, self.settings, partial(find_doubled, database))
