"""ScheduleManager: makes ticks ahead of time, on every pod, for the slots of the schedules that are its own."""

import math
import time
from collections.abc import Sequence
from datetime import datetime, timedelta

import asyncpg
import structlog

from cron_ticks.backfill_repository import BackfillRepository
from cron_ticks.backfiller import Backfiller
from cron_ticks.calendars import Calendars
from cron_ticks.database import Connection, Database
from cron_ticks.metrics import Metrics
from cron_ticks.occurrences import RULE_ERRORS
from cron_ticks.repository import CronRepository
from cron_ticks.rows import Beat, NeedingTicks, Planned
from cron_ticks.settings import SLOTS, Settings
from cron_ticks.sweeps import DEADLINE_SECONDS, Sweeps
from cron_ticks.tick_floors import NONE_OF_A_TURN

log = structlog.get_logger("cron_ticks.schedule_manager")

CATCH_UP_SECONDS = 0.5
URGENT = 0.25  # of the window: what is needed sooner comes first
BEATS = 3  # per lease, at least
NEWCOMER_SECONDS = 3.0  # until a manager without shards takes its share of the others'

# What the database says of a row. Anything else is its own trouble, and no fault of a schedule's.
REFUSALS = (asyncpg.DataError, asyncpg.IntegrityConstraintViolationError, asyncpg.RaiseError)


class Pass:
    """What is left of a pass: slots, and from where on to look at each. It ends where the window did when it began.

    It goes through the slots twice: what is needed soon comes first, wherever it is.
    """

    def __init__(self, beat: Beat, calendars: Calendars) -> None:
        self.calendars = calendars
        self.schedules = self.ticks = 0
        self.floors: dict[int, datetime] = {}
        self.end = beat.until
        self._beat = beat
        self._ends = [beat.until, beat.instant + (beat.until - beat.instant) * URGENT]
        self._begin()

    @property
    def urgent(self) -> bool:
        """Whether it is about what is needed soon."""
        return bool(self._ends)

    def advance(self, cursors: Sequence[asyncpg.Record], limit: int) -> None:
        """These are dealt with, and so are the slots before the last of them."""
        if len(cursors) == limit:
            slots = list(self.floors)
            self.floors = {slot: self.floors[slot] for slot in slots[slots.index(cursors[-1]["slot"]) :]}
        else:
            self._begin()

    def _begin(self) -> None:
        self.floors = {}
        while self._ends and not self.floors:
            self.end = self._ends.pop()
            needed = self._beat.needed.items()
            self.floors = {slot: first for slot, first in needed if first is not None and first < self.end}


class ScheduleManager:
    """Keeps a tick for every occurrence inside the lookahead window.

    With a `manager_id` it shares the schedules out with the other managers; without one it looks at all of them.
    """

    name = "schedule-manager"

    def __init__(
        self,
        database: Database,
        repository: CronRepository,
        settings: Settings,
        metrics: Metrics | None = None,
        *,
        manager_id: str = "",
    ) -> None:
        self._database = database
        self._repository = repository
        self._settings = settings
        self._metrics = Metrics() if metrics is None else metrics
        self._backfiller = Backfiller(BackfillRepository(database, settings))
        self._id = manager_id
        self._shards = settings.leased_shards if manager_id else 0
        self._new = True  # it has not beaten twice
        self._had = 0  # shards
        self._beat_interval = min(settings.manager_interval_seconds, settings.shard_lease / BEATS)
        self._beat_at = -math.inf
        self._sweeps = Sweeps()
        self._floors: dict[int, datetime] = {}

    async def run_once(self) -> float:
        """Make ticks, batch after batch, until no schedule in the window lacks one; a long pass has a short pause."""
        begun = time.monotonic()
        beat = await self._beat()
        course = Pass(beat, self._repository.calendars(beat))
        taken = 0  # of a dead manager's shards: they need a pass of their own
        while course.floors and not taken:
            await self._make_batch(course)
            taken = (await self._beat()).taken if time.monotonic() >= self._beat_at else 0
        if not taken:
            self._floors = dict.fromkeys(self._floors, beat.until)
        if course.schedules:
            lookahead = self._settings.lookahead_seconds
            log.info("ticks_generated", ticks=course.ticks, schedules=course.schedules, lookahead=lookahead)
        next_backfill = await self._backfiller.run_once() if beat.backfills else math.inf
        if taken:
            return 0.0
        interval = min(NEWCOMER_SECONDS, self._beat_interval) if self._new and self._shards else self._beat_interval
        return min(max(0.0, begun + interval - time.monotonic()), next_backfill)

    async def retire(self) -> None:
        """Let go of the shards."""
        if self._shards:
            await self._repository.retire_manager(self._id, shards=self._shards)

    async def catch_up(self, sink: str, floors: Sequence[datetime | None] = NONE_OF_A_TURN) -> None:
        """Decide about a sink's ticks that nobody fired in time, as their schedules want, before one of them fires.

        For a moment only: what is due now must not wait for all of them. Whoever calls comes again.
        """
        end = time.monotonic() + CATCH_UP_SECONDS
        limit = self._settings.manager_batch_size
        while ids := await self._repository.late_schedules(sink, limit=limit, floors=floors):
            schedules, _ = await self._make_those(ids)
            if schedules == 0:  # they are in others' hands, or gone
                self._metrics.orphaned.inc(await self._repository.delete_orphaned_ticks_of(ids))
            if schedules == 0 or time.monotonic() > end:
                return

    async def _beat(self) -> Beat:
        """Stay alive, have one's share of the schedules, and learn what they need."""
        if self._shards and not self._had:  # they may be gone, too
            await self._repository.add_shards(self._shards)
        beat = await self._sweep() if self._sweeps.due else None
        if beat is None:
            beat = await self._repository.beat(self._id, shards=self._shards, floors=self._floors)
        self._new = self._beat_at == -math.inf
        self._beat_at = time.monotonic() + self._beat_interval
        self._floors = {slot: min(first or beat.until, beat.until) for slot, first in beat.needed.items()}
        if beat.taken or beat.shards != self._had:
            log.info("shards_shared_out", shards=beat.shards, taken=beat.taken)
        self._had = beat.shards
        return beat

    async def _sweep(self) -> Beat | None:
        """A heartbeat that looks from the beginning; None if that takes too long."""
        try:
            with self._sweeps.timed():
                return await self._repository.beat(self._id, shards=self._shards, deadline_seconds=DEADLINE_SECONDS)
        except TimeoutError:
            self._sweeps.rest(DEADLINE_SECONDS)
            log.warning("sweep_too_slow", seconds=DEADLINE_SECONDS)
            late = await self._repository.clock() - timedelta(seconds=self._settings.missed_after_seconds)
            self._floors = dict.fromkeys(range(SLOTS), late) | self._floors
            return None

    async def _make_batch(self, course: Pass) -> None:
        """One transaction: take schedules of the pass, make their ticks, advance them. A broken one is put aside."""
        cursors: list[asyncpg.Record] = []
        limit = self._settings.manager_batch_size
        try:
            async with self._database.transaction() as connection:
                cursors = await self._repository.lock_cursors(
                    course.floors, course.end, limit=limit, connection=connection
                )
                ticks, left = await self._make_at_once(cursors, course, connection)
                needing = await self._repository.needing(left, connection=connection)
                plans, broken = self._plan(needing)
                planned = await self._make_planned(plans, connection)
        except REFUSALS as error:
            if not cursors:
                raise
            log.info("batch_refused", schedules=len(cursors), error=str(error))
            made = [await self._make_those([row["schedule_id"]]) for row in cursors]
            course.schedules += sum(schedules for schedules, _ in made)
            course.ticks += sum(ticks for _, ticks in made)
            return
        self._metrics.note_generated(ticks, 0)
        self._note(plans, planned)
        await self._put_aside(broken)
        course.schedules += len(cursors) - len(broken)
        course.ticks += ticks + planned
        if all(made.plan.complete for made in plans):
            course.advance(cursors, limit)

    async def _make_at_once(
        self, cursors: Sequence[asyncpg.Record], course: Pass, connection: Connection
    ) -> tuple[int, list[asyncpg.Record]]:
        """By one statement, for all that are not behind; how many ticks, and who is left to be planned."""
        behind = {row["schedule_id"] for row in cursors if self._repository.is_behind(row)}
        in_time = [row for row in cursors if row["schedule_id"] not in behind]
        ticks = 0
        if in_time:
            ticks, left = await self._repository.make_ticks(
                in_time, course.calendars, urgent=course.urgent, connection=connection
            )
            behind |= left
        return ticks, [row for row in cursors if row["schedule_id"] in behind]

    async def _make_planned(self, plans: Sequence[Planned], connection: Connection) -> int:
        if not plans:
            return 0
        ticks = await self._repository.create_ticks(plans, connection=connection)
        await self._repository.update_next_tick_needed(plans, connection=connection)
        return ticks

    async def _make_those(self, ids: Sequence[str]) -> tuple[int, int]:
        """One transaction for these, with what is late of them; how many schedules and ticks."""
        taken: list[NeedingTicks] = []
        try:
            async with self._database.transaction() as connection:
                taken = await self._repository.find_schedules_needing_ticks(
                    limit=len(ids), connection=connection, ids=ids
                )
                plans, broken = self._plan(taken)
                ticks = await self._make_planned(plans, connection)
                if taken:
                    await self._repository.set_aside(taken, connection=connection)
        except REFUSALS as error:
            if len(taken) > 1:  # find out for which schedule's sake
                made = [await self._make_those([needing.schedule_id]) for needing in taken]
                return sum(schedules for schedules, _ in made), sum(ticks for _, ticks in made)
            if not taken:
                raise
            await self._put_aside([(taken[0], error)])
            return 0, 0
        self._note(plans, ticks)
        await self._put_aside(broken)
        return len(plans), ticks

    def _plan(self, taken: Sequence[NeedingTicks]) -> tuple[list[Planned], list[tuple[NeedingTicks, Exception]]]:
        plans: list[Planned] = []
        broken: list[tuple[NeedingTicks, Exception]] = []
        for needing in taken:
            try:
                plans.append(Planned(needing, self._repository.plan(needing)))
            except RULE_ERRORS as error:
                broken.append((needing, error))
        return plans, broken

    async def _put_aside(self, broken: Sequence[tuple[NeedingTicks, Exception]]) -> None:
        for needing, problem in broken:
            error = f"{type(problem).__name__}: {problem}"
            if await self._repository.mark_broken(needing, error):
                self._metrics.broken.inc()
                log.error("schedule_broken", schedule_id=needing.schedule_id, error=error)

    def _note(self, plans: Sequence[Planned], ticks: int) -> None:
        missed = {made.needing.schedule_id: made.plan.missed + made.plan.late_missed for made in plans}
        self._metrics.note_generated(ticks, sum(missed.values()))
        for schedule_id, occurrences in missed.items():
            if occurrences:
                log.warning("occurrences_missed", schedule_id=schedule_id, missed=occurrences)
