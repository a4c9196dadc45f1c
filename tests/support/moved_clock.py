"""The engine under a clock of the test's own: its passes happen when the test says."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import asyncpg

from cron_ticks.database import Connection, Database
from cron_ticks.metrics import Metrics
from cron_ticks.repository import CronRepository
from cron_ticks.rows import Beat, FiredTicks, NeedingTicks
from cron_ticks.schedule_manager import ScheduleManager
from cron_ticks.schedule_repository import Saved
from cron_ticks.schedules import Schedule, ScheduleChanges, define_schedule, redefine_schedule
from cron_ticks.settings import Settings
from cron_ticks.tick_floors import NONE_OF_A_TURN
from token_queue.queue_repository import QUEUE_SINK


class ClockedRepository(CronRepository):
    """What a manager asks for happens at `instant`."""

    def __init__(self, database: Database, settings: Settings, instant: datetime) -> None:
        super().__init__(database, settings)
        self.instant = instant

    async def beat(
        self,
        manager_id: str = "",
        *,
        shards: int = 0,
        floors: Mapping[int, datetime] | None = None,
        deadline_seconds: float | None = None,
        now: datetime | None = None,
    ) -> Beat:
        return await super().beat(
            manager_id, shards=shards, floors=floors, deadline_seconds=deadline_seconds, now=now or self.instant
        )

    async def lock_cursors(
        self,
        floors: Mapping[int, datetime | None],
        until: datetime,
        *,
        limit: int,
        connection: Connection,
        now: datetime | None = None,
    ) -> list[asyncpg.Record]:
        return await super().lock_cursors(floors, until, limit=limit, connection=connection, now=now or self.instant)

    async def find_schedules_needing_ticks(
        self,
        *,
        limit: int,
        connection: Connection,
        ids: Sequence[str] | None = None,
        now: datetime | None = None,
    ) -> list[NeedingTicks]:
        return await super().find_schedules_needing_ticks(
            limit=limit, connection=connection, ids=ids, now=now or self.instant
        )

    async def late_schedules(
        self,
        sink: str,
        *,
        limit: int,
        floors: Sequence[datetime | None] = NONE_OF_A_TURN,
        now: datetime | None = None,
    ) -> list[str]:
        return await super().late_schedules(sink, limit=limit, floors=floors, now=now or self.instant)

    async def mark_broken(self, needing: NeedingTicks, error: str, *, now: datetime | None = None) -> bool:
        return await super().mark_broken(needing, error, now=now or self.instant)


class Engine:
    """A manager and a firer, one pass at a time."""

    def __init__(self, database: Database, instant: datetime, **settings: Any) -> None:
        self.settings = Settings.load(**settings)
        self.metrics = Metrics()
        self.repository = ClockedRepository(database, self.settings, instant)
        self.manager = ScheduleManager(database, self.repository, self.settings, self.metrics)

    @property
    def now(self) -> datetime:
        """The engine's clock."""
        return self.repository.instant

    @now.setter
    def now(self, instant: datetime) -> None:
        self.repository.instant = instant

    async def save(self, queue_name: str = "queue", **options: Any) -> Saved:
        """Declare a schedule, now."""
        return await self.repository.save_schedule(define_schedule(queue_name, **options), now=self.now)

    async def declare(self, queue_name: str = "queue", **options: Any) -> Schedule:
        """The schedule that was declared."""
        return (await self.save(queue_name, **options)).schedule

    async def edit(self, schedule_id: str, **changes: Any) -> Saved:
        """As update_schedule() does, now."""
        given: ScheduleChanges = changes  # type: ignore[assignment]
        return await self.repository.update_schedule(
            schedule_id, lambda schedule: redefine_schedule(schedule, given), now=self.now
        )

    async def fire(self) -> list[FiredTicks]:
        """Fire what is due now, caught up or not."""
        await self.manager.catch_up(QUEUE_SINK.name)
        fired: list[FiredTicks] = []
        for turn in (0, 1, 2):
            while batch := await self.repository.fire_due_ticks(
                QUEUE_SINK, ticker_id="ticker_test", limit=1000, turn=turn, now=self.now
            ):
                fired += batch
        return fired

    async def turn(self) -> list[FiredTicks]:
        """One pass of each."""
        await self.manager.run_once()
        return await self.fire()

    async def run_until(self, end: datetime, *, step: timedelta) -> list[FiredTicks]:
        """Passes up to `end`, at least one per `step`, and one whenever a tick is due: as a worker has them."""
        fired = await self.turn()
        while self.now < end:
            due_in = await self.repository.next_due_in(QUEUE_SINK.name, now=self.now)
            self.now = min(end, self.now + min([step, *due_in.values()]))
            fired += await self.turn()
        return fired
