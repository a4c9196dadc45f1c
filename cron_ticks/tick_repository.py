"""Ticks and runs in the database: making, firing and removing them. The statements are in `tick_sql`."""

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from functools import cache

import asyncpg

from cron_ticks import tick_sql
from cron_ticks.database import Connection, Database
from cron_ticks.ids import new_tick_id
from cron_ticks.lease_repository import LeaseRepository
from cron_ticks.listener import NOTIFY, TICKS_NOTICE
from cron_ticks.occurrences import MICROSECOND, Plan, plan
from cron_ticks.rows import DueTick, FiredTick, NeedingTicks, Planned, needing_ticks
from cron_ticks.settings import LONGEST_IDLE_SECONDS, Settings
from cron_ticks.sinks import SameDatabaseSink

DAYS_AHEAD = 7  # beyond the window for which the ledger has partitions
WEEKS_AHEAD = 5  # for which events have them
MOST_TICKS_AT_ONCE = 1000  # per schedule and transaction of a manager
MOST_COLLISIONS = 100  # of one occurrence's microsecond with those of others
SOON = timedelta(seconds=1.5 * LONGEST_IDLE_SECONDS)  # a ticker asks at least so often what is due next


class TickRepository(LeaseRepository):
    """Ticks and runs: what CronRepository does without looking at a schedule's definition."""

    def __init__(self, database: Database, settings: Settings) -> None:
        super().__init__(database, settings)
        self._lookahead = timedelta(seconds=settings.lookahead_seconds)
        self._missed_after = timedelta(seconds=settings.missed_after_seconds)
        self.patience = f"{max(1, self._lease // timedelta(milliseconds=1))}ms"  # with a process that hangs with locks
        self._shard = (settings.shard_count, settings.shard_id)

    async def any_schedule_needs_ticks(self, *, now: datetime | None = None) -> bool:
        """Whether there are schedules to make ticks for."""
        arguments = (self._lookahead, *self._shard, now)
        return bool(await self.database.fetchval(tick_sql.CURSOR_IN_WINDOW, *arguments))

    async def find_schedules_needing_ticks(
        self, *, limit: int, connection: Connection, only: str | None = None, now: datetime | None = None
    ) -> list[NeedingTicks]:
        """Schedules to make ticks for, or one of them, held until the end of the transaction."""
        arguments = (self._lookahead, limit, *self._shard, now, self.patience, only)
        taken = await self.database.fetch(tick_sql.LOCK_CURSORS_IN_WINDOW, *arguments, connection=connection)
        ids = [row["schedule_id"] for row in taken]
        rules = {row["id"]: row for row in await self.database.fetch(tick_sql.RULES, ids, connection=connection)}
        return [needing_ticks(row, rules[row["schedule_id"]]) for row in taken]

    def plan(self, needing: NeedingTicks, *, until: datetime | None = None) -> Plan:
        """What to make of a schedule: up to the end of the window, a thousand at a time, or all up to `until`."""
        return plan(
            needing.timetable,
            needed_from=needing.needed_from,
            planned=needing.planned,
            now=needing.now,
            lookahead=self._lookahead if until is None else until - needing.now,
            missed_after=self._missed_after,
            most=MOST_TICKS_AT_ONCE if until is None else None,
        )

    async def create_ticks(self, plans: Sequence[Planned], *, connection: Connection) -> int:
        """Make the planned ticks; how many of them are new. If one is due soon, tickers hear of it."""
        wanted = {(made.needing.schedule_id, moment) for made in plans for moment in made.plan.occurrences}
        made: list[asyncpg.Record] = []
        for number in range(MOST_COLLISIONS):
            if not wanted:
                break
            ids, moments = zip(*sorted(wanted), strict=True)
            arguments = (ids, moments, plans[0].needing.now, number * MICROSECOND, self._missed_after)
            rows = await self.database.fetch(
                tick_sql.CREATE_TICKS, [new_tick_id() for _ in ids], *arguments, connection=connection
            )
            made += rows
            wanted -= {(row["schedule_id"], row["scheduled_for"]) for row in rows}
            if wanted:  # there already, or another occurrence has its microsecond
                found = await self.database.fetch(tick_sql.FIND_TICKS, ids, moments, connection=connection)
                wanted -= {(row["schedule_id"], row["scheduled_for"]) for row in found}
        if any(row["due_in"] < SOON for row in made):
            await self.wake_tickers(connection)
        return len(made)

    async def update_next_tick_needed(self, plans: Sequence[Planned], *, connection: Connection) -> None:
        """Advance schedules beyond the ticks that were made."""
        await self.database.fetch(
            tick_sql.UPDATE_NEXT_TICK_NEEDED,
            [made.needing.schedule_id for made in plans],
            [made.plan.next_needed for made in plans],
            [made.needing.planned + made.plan.planned for made in plans],
            connection=connection,
        )

    async def fire_due_ticks(
        self,
        sink: SameDatabaseSink,
        *,
        ticker_id: str,
        limit: int,
        turn: int = 0,
        now: datetime | None = None,
        due_until: datetime | None = None,
    ) -> list[FiredTick]:
        """Turn due ticks into messages; fewer than `limit` means that nothing is left that was due at `due_until`."""
        arguments = (ticker_id, limit, now, due_until, sink.name, turn)
        rows = await self._fetch(firing_statement(sink), *arguments, deadline_seconds=sink.deadline_seconds)
        return [FiredTick._make(row) for row in rows]

    async def find_due_ticks(self, sink: str, *, turn: int, limit: int, due_until: datetime) -> list[DueTick]:
        """The batch that a firing would take."""
        rows = await self.database.fetch(tick_sql.FIND_DUE_TICKS, sink, turn, due_until, limit)
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
    ) -> list[FiredTick]:
        """Turn these into messages, if they are still there."""
        arguments = (ticker_id, len(ids), now, due_until, sink.name, turn, list(ids))
        statement = firing_statement(sink, chosen=True)
        rows = await self._fetch(statement, *arguments, deadline_seconds=sink.deadline_seconds)
        return [FiredTick._make(row) for row in rows]

    async def release_waiting(self, schedule_ids: Collection[str], *, now: datetime | None = None) -> None:
        """The messages before them are finished: ticks that wait for that are due, and tickers hear of it."""
        arguments = (list(schedule_ids), now, self.database.channel, TICKS_NOTICE)
        await self.database.fetch(tick_sql.RELEASE_WAITING, *arguments)

    async def next_due_in(self, sink: str, *, now: datetime | None = None) -> dict[int, timedelta]:
        """How long until a sink's next tick is due, per turn; not positive if one is now."""
        return {row["turn"]: row["due_in"] for row in await self.database.fetch(tick_sql.NEXT_DUE_IN, now, sink)}

    async def clock(self) -> datetime:
        """The database's time."""
        instant: datetime = await self.database.fetchval("SELECT statement_timestamp()")
        return instant

    async def delete_orphaned_ticks(self, *, limit: int) -> int:
        """Remove ticks whose schedule is gone; fewer than `limit` means that none is left."""
        return len(await self.database.fetch(tick_sql.DELETE_ORPHANED_TICKS, limit))

    async def make_partitions(self, *, now: datetime | None = None) -> int:
        """Make the partitions of runs and events for the time to come; how many were missing."""
        arguments = (self._lookahead.days + DAYS_AHEAD, WEEKS_AHEAD, now)
        rows = await self.database.fetch(tick_sql.MAKE_PARTITIONS, *arguments)
        return sum(row[0] for row in rows)

    async def wake_tickers(self, connection: Connection) -> None:
        """When the transaction commits."""
        await self.database.fetch(NOTIFY, self.database.channel, TICKS_NOTICE, connection=connection)


def firing_statement(sink: SameDatabaseSink, *, chosen: bool = False) -> str:
    """The one statement that fires ticks into a sink."""
    return _statement(sink.insert_from_fired, sink.insert_from_limited, chosen)


@cache
def _statement(insert_from_fired: str, insert_from_limited: str | None, chosen: bool) -> str:  # noqa: FBT001 - cached
    return tick_sql.fire_statement(insert_from_fired, insert_from_limited, chosen=chosen)
