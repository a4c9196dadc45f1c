"""Ticks and runs in the database: firing and removing them. The statements are in `tick_sql`."""

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from functools import cache

import asyncpg
import structlog

from cron_ticks import tick_sql
from cron_ticks.events import DEFAULT_LEVEL, EventLevel
from cron_ticks.generation_repository import GenerationRepository
from cron_ticks.listener import TICKS_NOTICE
from cron_ticks.rows import DueTick, FiredTicks
from cron_ticks.sinks import SameDatabaseSink
from cron_ticks.sweeps import DEADLINE_SECONDS
from cron_ticks.tick_floors import LEVELS, NO_FLOORS, NONE_OF_A_TURN, TickFloors

log = structlog.get_logger("cron_ticks.tick_repository")

DAYS_AHEAD = 7  # beyond the window for which the ledger has partitions
WEEKS_AHEAD = 5  # for which events have them


class TickRepository(GenerationRepository):
    """Ticks and runs: what CronRepository does without looking at a schedule's definition."""

    async def fire_due_ticks(
        self,
        sink: SameDatabaseSink,
        *,
        ticker_id: str,
        limit: int,
        turn: int = 0,
        now: datetime | None = None,
        due_until: datetime | None = None,
        floors: Sequence[datetime | None] = NONE_OF_A_TURN,
        each: bool = True,
    ) -> list[FiredTicks]:
        """Turn due ticks into messages; fewer than `limit` means that nothing is left that was due at `due_until`.

        Unless `each` is asked for, those that become messages are told of by queue and workspace.
        """
        arguments = (ticker_id, limit, now, due_until, sink.name, turn, self._missed_after, list(floors))
        statement = firing_statement(sink, events=self._events, each=each)
        rows = await self._fetch(statement, *arguments, deadline_seconds=sink.deadline_seconds)
        return [FiredTicks._make(row) for row in rows]

    async def find_due_ticks(self, sink: str, *, turn: int, limit: int, due_until: datetime) -> list[DueTick]:
        """The batch that a firing would take."""
        arguments = (sink, turn, due_until, limit, self._missed_after)
        rows = await self.database.fetch(tick_sql.FIND_DUE_TICKS, *arguments)
        return [DueTick._make(row) for row in rows]

    async def fire_chosen_ticks(
        self,
        sink: SameDatabaseSink,
        ids: Sequence[str],
        *,
        ticker_id: str,
        turn: int,
        due_until: datetime,
        now: datetime | None = None,
        each: bool = True,
    ) -> list[FiredTicks]:
        """Turn these into messages, if they are still there."""
        floors = list(NONE_OF_A_TURN)
        arguments = (ticker_id, len(ids), now, due_until, sink.name, turn, self._missed_after, floors, list(ids))
        statement = firing_statement(sink, chosen=True, events=self._events, each=each)
        rows = await self._fetch(statement, *arguments, deadline_seconds=sink.deadline_seconds)
        return [FiredTicks._make(row) for row in rows]

    async def release_waiting(self, schedule_ids: Collection[str], *, now: datetime | None = None) -> None:
        """The messages before them are finished: ticks that wait for that are due, and tickers hear of it."""
        arguments = (list(schedule_ids), now, self.database.channel, TICKS_NOTICE)
        await self.database.fetch(tick_sql.RELEASE_WAITING, *arguments)

    async def next_due_in(
        self, sink: str, *, floors: TickFloors | None = None, now: datetime | None = None
    ) -> dict[int, timedelta]:
        """How long until a sink's next tick is due, per turn; not positive if one is now. `floors` learn from it."""
        known = TickFloors() if floors is None else floors
        rows = await self._sweep(known, sink, now) if known.sweeps.due else None
        swept = rows is not None
        if rows is None:
            rows = await self.database.fetch(tick_sql.NEXT_DUE_IN, now, sink, list(known.all))
        known.note([row["floor"] for row in rows], swept=swept)
        found: dict[int, timedelta] = {}
        for turn, due_in, _ in rows:
            if due_in is not None:
                found[turn] = min(due_in, found.get(turn, due_in))
        return found

    async def _sweep(self, floors: TickFloors, sink: str, now: datetime | None) -> list[asyncpg.Record] | None:
        """Look from the beginning; None if that takes too long. Then what is late is found when it doesn't any more."""
        try:
            with floors.sweeps.timed():
                return await self.database.fetch(
                    tick_sql.NEXT_DUE_IN, now, sink, list(NO_FLOORS), deadline_seconds=DEADLINE_SECONDS
                )
        except TimeoutError:
            floors.sweeps.rest(DEADLINE_SECONDS)
            log.warning("sweep_too_slow", sink=sink, seconds=DEADLINE_SECONDS)
            if not floors.known:
                floors.note([await self.clock() - self._missed_after] * LEVELS)
            return None

    async def clock(self) -> datetime:
        """The database's time."""
        instant: datetime = await self.database.fetchval("SELECT statement_timestamp()")
        return instant

    async def delete_orphaned_ticks(self, *, limit: int) -> int:
        """Remove ticks whose schedule is gone; fewer than `limit` means that none is left."""
        return len(await self.database.fetch(tick_sql.DELETE_ORPHANED_TICKS, limit))

    async def delete_orphaned_ticks_of(self, schedule_ids: Sequence[str]) -> int:
        """The same for schedules that may be gone."""
        return len(await self.database.fetch(tick_sql.DELETE_ORPHANED_TICKS_OF, list(schedule_ids)))

    async def make_partitions(self, *, now: datetime | None = None) -> int:
        """Make the partitions of runs and events for the time to come; how many were missing."""
        arguments = (self._lookahead.days + DAYS_AHEAD, WEEKS_AHEAD, now)
        rows = await self.database.fetch(tick_sql.MAKE_PARTITIONS, *arguments)
        return sum(row[0] for row in rows)


@cache
def firing_statement(
    sink: SameDatabaseSink, *, chosen: bool = False, events: EventLevel = DEFAULT_LEVEL, each: bool = False
) -> str:
    """The one statement that fires ticks into a sink."""
    return tick_sql.fire_statement(
        sink.insert_from_fired, sink.insert_from_limited, chosen=chosen, events=events, each=each
    )
