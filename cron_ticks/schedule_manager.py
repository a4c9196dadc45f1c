"""ScheduleManager: makes ticks ahead of time, on every pod."""

from collections.abc import Callable
from datetime import timedelta

import structlog

from cron_ticks.database import Database
from cron_ticks.repository import CronRepository
from cron_ticks.settings import Settings

log = structlog.get_logger("cron_ticks.schedule_manager")


class ScheduleManager:
    """Keeps a tick for every occurrence inside the lookahead window."""

    name = "schedule-manager"

    def __init__(
        self,
        database: Database,
        repository: CronRepository,
        settings: Settings,
        *,
        on_made: Callable[[], None] = lambda: None,
    ) -> None:
        self._database = database
        self._repository = repository
        self._settings = settings
        self._on_made = on_made

    async def run_once(self) -> float:
        """Make ticks, batch after batch, until no schedule in the window lacks one."""
        settings = self._settings
        made = schedules = 0
        while await self._repository.any_schedule_needs_ticks(
            lookahead=timedelta(seconds=settings.lookahead_seconds),
            shard_count=settings.shard_count,
            shard_id=settings.shard_id,
        ):
            taken, ticks = await self._make_batch()
            schedules += taken
            made += ticks
            if taken < settings.manager_batch_size:
                break
        if schedules:
            log.info("ticks_generated", ticks=made, schedules=schedules, lookahead=settings.lookahead_seconds)
        if made:
            self._on_made()
        return settings.manager_interval_seconds

    async def _make_batch(self) -> tuple[int, int]:
        """One transaction: take schedules, make their ticks, advance them. Returns (schedules, new ticks)."""
        settings = self._settings
        lookahead = timedelta(seconds=settings.lookahead_seconds)
        missed_after = timedelta(seconds=settings.missed_after_seconds)
        async with self._database.transaction() as connection:
            taken = await self._repository.find_schedules_needing_ticks(
                lookahead=lookahead,
                limit=settings.manager_batch_size,
                shard_count=settings.shard_count,
                shard_id=settings.shard_id,
                connection=connection,
            )
            if not taken:
                return 0, 0
            plans = [(needing, needing.plan(lookahead=lookahead, missed_after=missed_after)) for needing in taken]
            made = await self._repository.create_ticks(plans, connection=connection)
        for needing, planned in plans:
            if planned.missed:
                log.warning("occurrences_missed", schedule_id=needing.schedule_id, missed=planned.missed)
        return len(taken), made
