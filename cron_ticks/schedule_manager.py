"""ScheduleManager: makes ticks ahead of time, on every pod."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import asyncpg
import structlog

from cron_ticks.backfill_repository import BackfillRepository
from cron_ticks.backfiller import Backfiller
from cron_ticks.database import Database
from cron_ticks.metrics import Metrics
from cron_ticks.occurrences import RULE_ERRORS
from cron_ticks.repository import CronRepository
from cron_ticks.rows import NeedingTicks, Planned
from cron_ticks.settings import Settings

log = structlog.get_logger("cron_ticks.schedule_manager")

CATCH_UP_SECONDS = 0.5

# What the database says of a row. Anything else is its own trouble, and no fault of a schedule's.
REFUSALS = (asyncpg.DataError, asyncpg.IntegrityConstraintViolationError, asyncpg.RaiseError)


@dataclass(frozen=True)
class Batch:
    """What one transaction did."""

    schedules: int = 0
    ticks: int = 0
    finished: bool = True  # nothing in the window is left


class ScheduleManager:
    """Keeps a tick for every occurrence inside the lookahead window."""

    name = "schedule-manager"

    def __init__(
        self, database: Database, repository: CronRepository, settings: Settings, metrics: Metrics | None = None
    ) -> None:
        self._database = database
        self._repository = repository
        self._settings = settings
        self._metrics = Metrics() if metrics is None else metrics
        self._backfiller = Backfiller(BackfillRepository(database, settings))

    async def run_once(self) -> float:
        """Make ticks, batch after batch, until no schedule in the window lacks one."""
        ticks = schedules = 0
        while (needed := await self._repository.what_is_needed()).ticks:
            batch = await self._make_batch()
            schedules += batch.schedules
            ticks += batch.ticks
            if batch.finished:
                break
        if schedules:
            lookahead = self._settings.lookahead_seconds
            log.info("ticks_generated", ticks=ticks, schedules=schedules, lookahead=lookahead)
        next_backfill = await self._backfiller.run_once() if needed.backfills else math.inf
        return min(self._settings.manager_interval_seconds, next_backfill)

    async def catch_up(self, sink: str) -> None:
        """Decide about a sink's ticks that nobody fired in time, as their schedules want, before one of them fires.

        For a moment only: what is due now must not wait for all of them. Whoever calls comes again.
        """
        end = time.monotonic() + CATCH_UP_SECONDS
        while ids := await self._repository.late_schedules(sink, limit=self._settings.manager_batch_size):
            batch = await self._make_batch(ids)
            if batch.schedules == 0:  # they are in others' hands, or gone
                self._metrics.orphaned.inc(await self._repository.delete_orphaned_ticks_of(ids))
            if batch.schedules == 0 or time.monotonic() > end:
                return

    async def _make_batch(self, ids: Sequence[str] | None = None) -> Batch:
        """One transaction: take schedules, make their ticks, advance them. A broken one is put aside."""
        taken: list[NeedingTicks] = []
        try:
            async with self._database.transaction() as connection:
                taken = await self._repository.find_schedules_needing_ticks(
                    limit=self._settings.manager_batch_size, connection=connection, ids=ids
                )
                plans, broken = self._plan(taken)
                ticks = await self._repository.create_ticks(plans, connection=connection)
                await self._repository.update_next_tick_needed(plans, connection=connection)
                if ids is not None and taken:
                    await self._repository.set_aside(taken, connection=connection)
        except REFUSALS as error:
            return await self._one_by_one(taken, error)
        self._note(plans, ticks)
        for needing, problem in broken:
            await self._mark_broken(needing, problem)
        complete = len(taken) < self._settings.manager_batch_size and all(made.plan.complete for made in plans)
        return Batch(len(plans), ticks, complete)

    async def _one_by_one(self, taken: list[NeedingTicks], error: asyncpg.PostgresError) -> Batch:
        """The database refuses a batch: find out for which schedule's sake."""
        if not taken:
            raise error
        if len(taken) == 1:
            await self._mark_broken(taken[0], error)
            return Batch(finished=False)
        batches = [await self._make_batch([needing.schedule_id]) for needing in taken]
        return Batch(sum(batch.schedules for batch in batches), sum(batch.ticks for batch in batches), finished=False)

    def _plan(self, taken: list[NeedingTicks]) -> tuple[list[Planned], list[tuple[NeedingTicks, Exception]]]:
        plans: list[Planned] = []
        broken: list[tuple[NeedingTicks, Exception]] = []
        for needing in taken:
            try:
                plans.append(Planned(needing, self._repository.plan(needing)))
            except RULE_ERRORS as error:
                broken.append((needing, error))
        return plans, broken

    async def _mark_broken(self, needing: NeedingTicks, problem: Exception) -> None:
        error = f"{type(problem).__name__}: {problem}"
        if await self._repository.mark_broken(needing, error):
            self._metrics.broken.inc()
            log.error("schedule_broken", schedule_id=needing.schedule_id, error=error)

    def _note(self, plans: list[Planned], ticks: int) -> None:
        missed = {made.needing.schedule_id: made.plan.missed + made.plan.late_missed for made in plans}
        self._metrics.note_generated(ticks, sum(missed.values()))
        for schedule_id, occurrences in missed.items():
            if occurrences:
                log.warning("occurrences_missed", schedule_id=schedule_id, missed=occurrences)
