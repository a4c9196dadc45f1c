"""Ticks in the database: making them. The statements are in `generation_sql`, `missing_sql` and `shard_sql`."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

import asyncpg

from cron_ticks import generation_sql, missing_sql, shard_sql
from cron_ticks.calendars import Calendar, Calendars
from cron_ticks.database import Connection, Database
from cron_ticks.events import EventLevel
from cron_ticks.ids import new_tick_id, tick_id_beginning
from cron_ticks.lease_repository import LeaseRepository
from cron_ticks.listener import NOTIFY, SHARDS_NOTICE, TICKS_NOTICE
from cron_ticks.missing import Occurrence, paced_of, record_missed, settle_late
from cron_ticks.occurrences import MICROSECOND, CatchUp, MakingUp, Plan, plan
from cron_ticks.rows import Beat, LateTick, NeedingTicks, Planned, needing_ticks
from cron_ticks.settings import LONGEST_IDLE_SECONDS, SLOTS, Settings
from cron_ticks.tick_floors import NONE_OF_A_TURN

MOST_TICKS_AT_ONCE = 1000  # per schedule and transaction of a manager
MOST_TICKS_AHEAD = 4  # up to the horizon
LATE_AT_ONCE = 1000  # ticks per schedule that are ended as missed in one transaction
MOST_COLLISIONS = 100  # of one occurrence's microsecond with those of others
SOON = timedelta(seconds=1.5 * LONGEST_IDLE_SECONDS)  # a ticker asks at least so often what is due next


class GenerationRepository(LeaseRepository):
    """What managers and edits do to make ticks."""

    def __init__(self, database: Database, settings: Settings, *, worker: str | None = None) -> None:
        super().__init__(database, settings)
        self._worker = worker  # ticker_<ulid>, for events
        self._events: EventLevel = settings.events
        self._actor = None if self._events == "off" else settings.acting_as  # None: no events of schedules
        self._lookahead = timedelta(seconds=settings.lookahead_seconds)
        self._horizon = timedelta(seconds=settings.horizon)
        self._limits_of_catching_up = (
            settings.catch_up_max_count,
            timedelta(seconds=settings.catch_up_max_age_seconds),
        )
        self._spread = timedelta(seconds=settings.catch_up_spread_seconds)
        self._most_late = settings.catch_up_max_count + LATE_AT_ONCE
        self.patience = f"{max(1, self._lease // timedelta(milliseconds=1))}ms"  # with a process that hangs with locks
        self._shard = (settings.shard_count, settings.shard_id)
        self._shard_lease = timedelta(seconds=settings.shard_lease)
        count, number = self._shard  # a slot is of one shard alone if their number divides that of the slots
        self._slots = [slot for slot in range(SLOTS) if SLOTS % count or slot % count == number]

    async def add_shards(self, shards: int) -> None:
        """Make the tokens of so many shards, unless they are there."""
        await self.database.fetch(shard_sql.ADD_SHARDS, shards)

    async def beat(
        self,
        manager_id: str = "",
        *,
        shards: int = 0,
        floors: Mapping[int, datetime] | None = None,
        deadline_seconds: float | None = None,
        now: datetime | None = None,
    ) -> Beat:
        """A manager's heartbeat: it keeps or gets its share of the slots, and learns what is needed in them."""
        known = floors or {}
        arguments = (manager_id, shards, self._shard_lease, now, self._slots, [known.get(slot) for slot in self._slots])
        [row] = await self.database.fetch(shard_sql.BEAT, *arguments, deadline_seconds=deadline_seconds)
        instant, slots, needed, *rest = row
        return Beat(instant, instant + self._lookahead, dict(zip(slots, needed, strict=True)), *rest)

    async def retire_manager(self, manager_id: str, *, shards: int) -> None:
        """It has ended: its shards are free at once."""
        notice = f"{SHARDS_NOTICE} {manager_id}"
        await self.database.fetch(shard_sql.RETIRE_MANAGER, manager_id, shards, self.database.channel, notice)

    async def forget_managers(self, *, now: datetime | None = None) -> None:
        """Remove those that ended without a word."""
        await self.database.fetch(shard_sql.FORGET_MANAGERS, now)

    def calendars(self, beat: Beat) -> Calendars:
        """Those of a pass: of the schedules that are not behind, up to the end of the window."""
        since, horizon = beat.instant - self._missed_after, beat.instant + self._horizon
        return Calendars(since, beat.until, horizon, most=MOST_TICKS_AT_ONCE, ahead=MOST_TICKS_AHEAD)

    async def lock_cursors(
        self,
        floors: Mapping[int, datetime | None],
        until: datetime,
        *,
        limit: int,
        connection: Connection,
        now: datetime | None = None,
    ) -> list[asyncpg.Record]:
        """Cursors of schedules that need ticks before `until`, slot after slot, held until the transaction's end."""
        arguments = (list(floors), list(floors.values()), until, limit, *self._shard, now, self.patience)
        return await self.database.fetch(generation_sql.LOCK_CURSORS_OF_SLOTS, *arguments, connection=connection)

    async def make_ticks(
        self, cursors: Sequence[asyncpg.Record], calendars: Calendars, *, urgent: bool = False, connection: Connection
    ) -> tuple[int, set[str]]:
        """Make the ticks of schedules that are not behind, and advance them; how many, and who is left to be planned.

        If one is due soon, tickers hear of it. When it is urgent, nothing is made beyond the window.
        """
        ahead = 1 if urgent else MOST_TICKS_AHEAD
        made, left, refused = await self._make_ticks(cursors, calendars, ahead, connection)
        new = calendars.learn({calendar for calendar in left.values() if calendar is not None})
        again = [row for row in cursors if left.get(row["schedule_id"]) in new]
        if again:
            more, still_left, also_refused = await self._make_ticks(again, calendars, ahead, connection)
            made, refused = made + more, refused | also_refused
            left = {schedule_id: found for schedule_id, found in left.items() if found not in new} | still_left
        if refused:
            added = await self._insert_ticks(refused, {}, cursors[0]["instant"], connection)
            made += len(added)
            await self._wake_if_soon(added, connection)
        return made, set(left)

    async def _make_ticks(
        self, cursors: Sequence[asyncpg.Record], calendars: Calendars, ahead: int, connection: Connection
    ) -> tuple[int, dict[str, Calendar | None], set[Occurrence]]:
        """How many, who is left with which calendar, and which occurrences the unique key has refused."""
        rows = await self.database.fetch(
            generation_sql.MAKE_TICKS,
            [row["schedule_id"] for row in cursors],
            [row["next_tick_needed_at"] for row in cursors],
            [row["planned"] for row in cursors],
            cursors[0]["instant"],
            calendars.until,
            tick_id_beginning(),
            *calendars.columns(),
            MOST_TICKS_AT_ONCE,
            calendars.horizon,
            ahead,
            calendars.since,
            connection=connection,
        )
        await self._wake_if_soon(rows[:1], connection)
        rest = [row for row in rows if row["schedule_id"] is not None]
        left = {row["schedule_id"]: _calendar_of(row) for row in rest if row["scheduled_for"] is None}
        refused = {(row["schedule_id"], row["scheduled_for"]) for row in rest if row["scheduled_for"] is not None}
        return rows[0]["ticks"], left, refused

    async def find_schedules_needing_ticks(
        self,
        *,
        limit: int,
        connection: Connection,
        ids: Sequence[str] | None = None,
        now: datetime | None = None,
    ) -> list[NeedingTicks]:
        """Schedules to make ticks for, or those of these ids, held until the end of the transaction."""
        if ids is not None:
            arguments = (list(ids), now, self.patience)
            taken = await self.database.fetch(generation_sql.LOCK_CURSORS_OF, *arguments, connection=connection)
            return await self.needing(taken, connection=connection, all_late=True)
        instant = now or await self.database.fetchval("SELECT statement_timestamp()", connection=connection)
        floors = dict.fromkeys(self._slots)
        taken = await self.lock_cursors(floors, instant + self._lookahead, limit=limit, connection=connection, now=now)
        return await self.needing(taken, connection=connection)

    async def needing(
        self, cursors: Sequence[asyncpg.Record], *, connection: Connection, all_late: bool = False
    ) -> list[NeedingTicks]:
        """What is to be known of schedules whose cursors are held, to plan them; with late ticks of those behind."""
        if not cursors:
            return []
        found = [row["schedule_id"] for row in cursors]
        rules = await self.database.fetch(generation_sql.RULES, found, connection=connection)
        by_id = {row["id"]: row for row in rules}
        late = await self._late_ticks(cursors, connection, all_of_them=all_late)
        return [needing_ticks(row, by_id[row["schedule_id"]], late[row["schedule_id"]]) for row in cursors]

    async def _late_ticks(
        self, taken: Sequence[asyncpg.Record], connection: Connection, *, all_of_them: bool
    ) -> dict[str, list[LateTick]]:
        """By schedule. Who is not behind with making ticks has none that concern the making."""
        late: dict[str, list[LateTick]] = defaultdict(list)
        behind = [row["schedule_id"] for row in taken if all_of_them or self.is_behind(row)]
        if behind:
            arguments = (behind, taken[0]["instant"] - self._missed_after, self._most_late)
            for row in await self.database.fetch(missing_sql.LATE_TICKS, *arguments, connection=connection):
                late[row["schedule_id"]].append(LateTick(row["id"], row["scheduled_for"], row["turn"]))
        return late

    def is_behind(self, cursor: asyncpg.Record) -> bool:
        """Whether occurrences that nobody made are late: then its catch-up policy decides."""
        return bool(cursor["next_tick_needed_at"] < cursor["instant"] - self._missed_after)

    async def late_schedules(
        self,
        sink: str,
        *,
        limit: int,
        floors: Sequence[datetime | None] = NONE_OF_A_TURN,
        now: datetime | None = None,
    ) -> list[str]:
        """Schedules with ticks of a sink that nobody fired in time."""
        arguments = (sink, self._missed_after, limit, now, list(floors))
        return [row["schedule_id"] for row in await self.database.fetch(missing_sql.LATE_SCHEDULES, *arguments)]

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
        if not plans:
            return 0
        paced = paced_of(plans, missed_after=self._missed_after, span=self._spread)
        settled = await settle_late(self.database, plans, self.making_up, paced, connection)
        await record_missed(self.database, plans, self.making_up, connection)
        wanted = {(made.needing.schedule_id, moment) for made in plans for moment in made.plan.occurrences}
        made = await self._insert_ticks(wanted, paced, plans[0].needing.now, connection)
        if settled:
            await self.wake_tickers(connection)
        else:
            await self._wake_if_soon(made, connection)
        return len(made)

    async def _wake_if_soon(self, made: Sequence[asyncpg.Record], connection: Connection) -> None:
        if any(row["due_in"] is not None and row["due_in"] < SOON for row in made):
            await self.wake_tickers(connection)

    async def _insert_ticks(
        self, wanted: set[Occurrence], paced: Mapping[Occurrence, datetime], now: datetime, connection: Connection
    ) -> list[asyncpg.Record]:
        made: list[asyncpg.Record] = []
        for number in range(MOST_COLLISIONS):
            if not wanted:
                break
            keys = sorted(wanted)
            ids, moments = zip(*keys, strict=True)
            arguments = (ids, moments, now, number * MICROSECOND, self._missed_after)
            rows = await self.database.fetch(
                generation_sql.CREATE_TICKS,
                [new_tick_id() for _ in ids],
                *arguments,
                [paced.get(key) for key in keys],
                connection=connection,
            )
            made += rows
            wanted -= {(row["schedule_id"], row["scheduled_for"]) for row in rows}
            if wanted:  # there already, or another occurrence has its microsecond
                found = await self.database.fetch(generation_sql.FIND_TICKS, ids, moments, connection=connection)
                wanted -= {(row["schedule_id"], row["scheduled_for"]) for row in found}
        return made

    async def set_aside(self, needing: Sequence[NeedingTicks], *, connection: Connection) -> None:
        """Late ticks of these schedules that no policy decides about: they are behind what is due now, no more."""
        ids = [held.schedule_id for held in needing]
        floor = needing[0].now - self._missed_after
        await self.database.fetch(missing_sql.SET_ASIDE, ids, floor, connection=connection)

    async def update_next_tick_needed(self, plans: Sequence[Planned], *, connection: Connection) -> None:
        """Advance schedules beyond the ticks that were made."""
        await self.database.fetch(
            generation_sql.UPDATE_NEXT_TICK_NEEDED,
            [made.needing.schedule_id for made in plans],
            [made.plan.next_needed for made in plans],
            [made.needing.planned + made.plan.planned for made in plans],
            connection=connection,
        )

    async def wake_tickers(self, connection: Connection) -> None:
        """When the transaction commits."""
        await self.database.fetch(NOTIFY, self.database.channel, TICKS_NOTICE, connection=connection)


def _calendar_of(row: asyncpg.Record) -> Calendar | None:
    return None if row["cron"] is None else Calendar(row["cron"], row["zone"], row["dst_gap"], row["dst_fold"])
