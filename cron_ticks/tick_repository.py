"""Ticks and runs in the database: making, firing and removing them. The statements are in `tick_sql`."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cache

import asyncpg

from cron_ticks import tick_sql
from cron_ticks.database import Connection, Database
from cron_ticks.events import DEFAULT_LEVEL, EventLevel
from cron_ticks.ids import new_tick_id
from cron_ticks.lease_repository import LeaseRepository
from cron_ticks.listener import NOTIFY, TICKS_NOTICE
from cron_ticks.missing import Occurrence, paced_of, record_missed, settle_late
from cron_ticks.occurrences import MICROSECOND, CatchUp, MakingUp, Plan, plan
from cron_ticks.rows import DueTick, FiredTick, LateTick, Needed, NeedingTicks, Planned, needing_ticks
from cron_ticks.settings import LONGEST_IDLE_SECONDS, Settings
from cron_ticks.sinks import SameDatabaseSink

DAYS_AHEAD = 7  # beyond the window for which the ledger has partitions
WEEKS_AHEAD = 5  # for which events have them
MOST_TICKS_AT_ONCE = 1000  # per schedule and transaction of a manager
LATE_AT_ONCE = 1000  # ticks per schedule that are ended as missed in one transaction
MOST_COLLISIONS = 100  # of one occurrence's microsecond with those of others
SOON = timedelta(seconds=1.5 * LONGEST_IDLE_SECONDS)  # a ticker asks at least so often what is due next


class TickRepository(LeaseRepository):
    """Ticks and runs: what CronRepository does without looking at a schedule's definition."""

    def __init__(self, database: Database, settings: Settings, *, worker: str | None = None) -> None:
        super().__init__(database, settings)
        self._worker = worker  # ticker_<ulid>, for events
        self._events: EventLevel = settings.events
        self._actor = None if self._events == "off" else settings.acting_as  # None: no events of schedules
        self._lookahead = timedelta(seconds=settings.lookahead_seconds)
        self._limits_of_catching_up = (
            settings.catch_up_max_count,
            timedelta(seconds=settings.catch_up_max_age_seconds),
        )
        self._spread = timedelta(seconds=settings.catch_up_spread_seconds)
        self._most_late = settings.catch_up_max_count + LATE_AT_ONCE
        self.patience = f"{max(1, self._lease // timedelta(milliseconds=1))}ms"  # with a process that hangs with locks
        self._shard = (settings.shard_count, settings.shard_id)

    async def what_is_needed(self, *, now: datetime | None = None) -> Needed:
        """What there is for a manager to do."""
        arguments = (self._lookahead, *self._shard, now)
        [row] = await self.database.fetch(tick_sql.CURSOR_IN_WINDOW, *arguments)
        return Needed._make(row)

    async def find_schedules_needing_ticks(
        self,
        *,
        limit: int,
        connection: Connection,
        ids: Sequence[str] | None = None,
        now: datetime | None = None,
    ) -> list[NeedingTicks]:
        """Schedules to make ticks for, or those of these ids, held until the end of the transaction."""
        if ids is None:
            arguments = (self._lookahead, limit, *self._shard, now, self.patience)
            taken = await self.database.fetch(tick_sql.LOCK_CURSORS_IN_WINDOW, *arguments, connection=connection)
        else:
            taken = await self.database.fetch(
                tick_sql.LOCK_CURSORS_OF, list(ids), now, self.patience, connection=connection
            )
        found = [row["schedule_id"] for row in taken]
        rules = {row["id"]: row for row in await self.database.fetch(tick_sql.RULES, found, connection=connection)}
        late = await self._late_ticks(taken, connection, all_of_them=ids is not None)
        return [needing_ticks(row, rules[row["schedule_id"]], late[row["schedule_id"]]) for row in taken]

    async def _late_ticks(
        self, taken: Sequence[asyncpg.Record], connection: Connection, *, all_of_them: bool
    ) -> dict[str, list[LateTick]]:
        """By schedule. Who is not behind with making ticks has none that concern the making."""
        late: dict[str, list[LateTick]] = defaultdict(list)
        behind = [row["schedule_id"] for row in taken if all_of_them or self._is_behind(row)]
        if behind:
            arguments = (behind, taken[0]["instant"] - self._missed_after, self._most_late)
            for row in await self.database.fetch(tick_sql.LATE_TICKS, *arguments, connection=connection):
                late[row["schedule_id"]].append(LateTick(row["id"], row["scheduled_for"], row["turn"]))
        return late

    def _is_behind(self, cursor: asyncpg.Record) -> bool:
        return bool(cursor["next_tick_needed_at"] < cursor["instant"] - self._missed_after)

    async def late_schedules(self, sink: str, *, limit: int, now: datetime | None = None) -> list[str]:
        """Schedules with ticks of a sink that nobody fired in time."""
        arguments = (sink, self._missed_after, limit, now)
        return [row["schedule_id"] for row in await self.database.fetch(tick_sql.LATE_SCHEDULES, *arguments)]

    def making_up(self, policy: CatchUp) -> MakingUp:
        """How much is made up under a policy."""
        return MakingUp(policy, *self._limits_of_catching_up)

    def plan(self, needing: NeedingTicks, *, until: datetime | None = None, making_up: MakingUp | None = None) -> Plan:
        """What to make of a schedule: up to the end of the window, a thousand at a time, or all up to `until`."""
        late = [tick.scheduled_for for tick in needing.late]
        making_up = making_up or self.making_up(needing.catch_up)
        if len(late) == self._most_late:  # there may be more: of these, the oldest can't be among those made up
            return Plan((), needing.needed_from, None, complete=False, late_missed=LATE_AT_ONCE, late_undecided=True)
        if needing.broken:  # it is passed over; what has been made is to be dealt with nevertheless
            kept = making_up.kept_of(late, needing.now, room=making_up.room)
            return Plan((), needing.needed_from, None, complete=True, late_missed=len(late) - kept)
        return plan(
            needing.timetable,
            needed_from=needing.needed_from,
            planned=needing.planned,
            now=needing.now,
            lookahead=self._lookahead if until is None else until - needing.now,
            missed_after=self._missed_after,
            making_up=making_up,
            late=late,
            most=MOST_TICKS_AT_ONCE if until is None else None,
        )

    async def create_ticks(self, plans: Sequence[Planned], *, connection: Connection) -> int:
        """Make planned ticks and record what is missed; how many are new. If one is due soon, tickers hear of it."""
        paced = paced_of(plans, missed_after=self._missed_after, span=self._spread)
        settled = await settle_late(self.database, plans, self.making_up, paced, connection)
        await record_missed(self.database, plans, self.making_up, connection)
        made = await self._insert_ticks(plans, paced, connection)
        if settled or any(row["due_in"] < SOON for row in made):
            await self.wake_tickers(connection)
        return len(made)

    async def _insert_ticks(
        self, plans: Sequence[Planned], paced: Mapping[Occurrence, datetime], connection: Connection
    ) -> list[asyncpg.Record]:
        wanted = {(made.needing.schedule_id, moment) for made in plans for moment in made.plan.occurrences}
        made: list[asyncpg.Record] = []
        for number in range(MOST_COLLISIONS):
            if not wanted:
                break
            keys = sorted(wanted)
            ids, moments = zip(*keys, strict=True)
            arguments = (ids, moments, plans[0].needing.now, number * MICROSECOND, self._missed_after)
            rows = await self.database.fetch(
                tick_sql.CREATE_TICKS,
                [new_tick_id() for _ in ids],
                *arguments,
                [paced.get(key) for key in keys],
                connection=connection,
            )
            made += rows
            wanted -= {(row["schedule_id"], row["scheduled_for"]) for row in rows}
            if wanted:  # there already, or another occurrence has its microsecond
                found = await self.database.fetch(tick_sql.FIND_TICKS, ids, moments, connection=connection)
                wanted -= {(row["schedule_id"], row["scheduled_for"]) for row in found}
        return made

    async def set_aside(self, needing: Sequence[NeedingTicks], *, connection: Connection) -> None:
        """Late ticks of these schedules that no policy decides about: they are behind what is due now, no more."""
        ids = [held.schedule_id for held in needing]
        floor = needing[0].now - self._missed_after
        await self.database.fetch(tick_sql.SET_ASIDE, ids, floor, connection=connection)

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
        arguments = (ticker_id, limit, now, due_until, sink.name, turn, self._missed_after)
        statement = firing_statement(sink, events=self._events)
        rows = await self._fetch(statement, *arguments, deadline_seconds=sink.deadline_seconds)
        return [FiredTick._make(row) for row in rows]

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
    ) -> list[FiredTick]:
        """Turn these into messages, if they are still there."""
        arguments = (ticker_id, len(ids), now, due_until, sink.name, turn, self._missed_after, list(ids))
        statement = firing_statement(sink, chosen=True, events=self._events)
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

    async def delete_orphaned_ticks_of(self, schedule_ids: Sequence[str]) -> int:
        """The same for schedules that may be gone."""
        return len(await self.database.fetch(tick_sql.DELETE_ORPHANED_TICKS_OF, list(schedule_ids)))

    async def make_partitions(self, *, now: datetime | None = None) -> int:
        """Make the partitions of runs and events for the time to come; how many were missing."""
        arguments = (self._lookahead.days + DAYS_AHEAD, WEEKS_AHEAD, now)
        rows = await self.database.fetch(tick_sql.MAKE_PARTITIONS, *arguments)
        return sum(row[0] for row in rows)

    async def wake_tickers(self, connection: Connection) -> None:
        """When the transaction commits."""
        await self.database.fetch(NOTIFY, self.database.channel, TICKS_NOTICE, connection=connection)


def firing_statement(sink: SameDatabaseSink, *, chosen: bool = False, events: EventLevel = DEFAULT_LEVEL) -> str:
    """The one statement that fires ticks into a sink."""
    return _statement(sink.insert_from_fired, sink.insert_from_limited, chosen, events)


@cache
def _statement(insert_from_fired: str, insert_from_limited: str | None, chosen: bool, events: EventLevel) -> str:  # noqa: FBT001 - cached
    return tick_sql.fire_statement(insert_from_fired, insert_from_limited, chosen=chosen, events=events)
