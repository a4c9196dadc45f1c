"""Backfills in the database: beginning them, and going on step by step. The statements are in `backfill_sql`."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import NamedTuple

import asyncpg

from cron_ticks import backfill_sql, schedule_sql, tick_sql
from cron_ticks.backfills import (
    KEPT_MARGIN,
    Backfill,
    BackfillOutcome,
    CannotGoOnError,
    Chosen,
    check_backfill,
    check_stretch,
    choose,
    next_occurrences,
    room_of,
    slots,
    timetable_for,
    without,
)
from cron_ticks.checks import EARLIEST
from cron_ticks.database import PASSING_ERRORS, Connection, Database, storable
from cron_ticks.errors import BackfillNotFoundError, ScheduleNotFoundError
from cron_ticks.ids import new_backfill_id, new_tick_id
from cron_ticks.listener import NOTIFY, TICKS_NOTICE
from cron_ticks.occurrences import MICROSECOND, RULE_ERRORS, Stretch, Timetable
from cron_ticks.rows import rule_of_row, schedule_of
from cron_ticks.schedules import Schedule
from cron_ticks.settings import Settings

DAYS_AT_ONCE = 20  # partitions made in a transaction: a server has room for some thousand locks
SHORTEST_PAUSE, LONGEST_PAUSE = timedelta(seconds=1), timedelta(minutes=1)  # while ticks are waited for

# The server's own trouble, which passes. Whatever else it says would be the same at the next step.
PASSING = (
    *PASSING_ERRORS,
    asyncpg.InsufficientResourcesError,
    asyncpg.LockNotAvailableError,
    asyncpg.PostgresSystemError,
    asyncpg.TransactionRollbackError,
)


class DueBackfill(NamedTuple):
    """A backfill that has not ended."""

    id: str
    schedule_id: str
    due_in: timedelta


class Ended(NamedTuple):
    """How a backfill has ended."""

    outcome: BackfillOutcome
    reason: str | None = None


@dataclass(frozen=True)
class Held:
    """A due backfill that is locked, with its schedule: nobody else makes or changes anything of it."""

    id: str
    schedule: Schedule
    managers_from: datetime | None  # from here on occurrences are for managers to make
    start: datetime
    end: datetime
    position: datetime
    per_minute: int
    now: datetime
    ticks: "Ticks"

    @property
    def timetable(self) -> Timetable:
        """Its occurrences, by the rule as it is now."""
        return timetable_for(self.schedule, self.start)

    @property
    def one_by_one(self) -> bool:
        """Whether a tick must wait for the message of the one before."""
        return self.schedule.overlap != "allow"


@dataclass(frozen=True)
class Ticks:
    """The pending ticks of a schedule."""

    occurrences: frozenset[datetime]
    backfilled: frozenset[datetime]  # those of backfills among them
    last_due: datetime | None  # of backfills

    def within(self, start: datetime, end: datetime) -> bool:
        """Whether a backfill's tick of this time is there."""
        return any(start <= moment < end for moment in self.backfilled)


@dataclass(frozen=True)
class Step:
    """What is to be done with some occurrences: all of it in one transaction."""

    chosen: Chosen
    due_at: datetime  # when to go on
    left: int  # occurrences before it
    split: Sequence[tuple[Stretch, list[Stretch]]] = ()
    done: bool = False  # and then there is nothing left to do


class BackfillRepository:
    """Backfills in the database."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._kept = timedelta(days=settings.runs_retention_days)
        self._patience = f"{max(1, int(settings.lease_seconds * 1000))}ms"  # with a process that hangs with locks

    async def create(
        self,
        schedule_id: str,
        start: datetime,
        end: datetime,
        *,
        per_minute: int,
        created_by: str | None = None,
        now: datetime | None = None,
    ) -> str:
        """Begin a backfill: its id. Nothing is made yet, and from now on any pod goes on with it."""
        async with self._database.transaction() as connection:
            await self._lock(schedule_id, connection, wait=True)
            schedule = await self._schedule(schedule_id, connection)
            instant, removed_before = await self._horizon(now, connection)
            kept_since = max(removed_before, instant - self._kept + KEPT_MARGIN)
            total = check_backfill(schedule, start, end, now=instant, kept_since=kept_since)
            backfill_id = new_backfill_id()
            arguments = (backfill_id, schedule_id, start, end, per_minute, total, instant, created_by)
            await self._database.fetch(backfill_sql.CREATE_BACKFILL, *arguments, connection=connection)
        return backfill_id

    async def get(self, backfill_id: str) -> Backfill:
        """The backfill of this id."""
        row = await self._database.fetchrow(backfill_sql.GET_BACKFILL, backfill_id)
        if row is None:
            raise BackfillNotFoundError(f"there is no backfill {backfill_id}")
        return Backfill(*row)

    async def list(self, *, schedule_id: str | None, after_id: str | None, limit: int) -> list[Backfill]:
        """A page of backfills, the latest first."""
        rows = await self._database.fetch(backfill_sql.LIST_BACKFILLS, schedule_id, after_id, limit)
        return [Backfill(*row) for row in rows]

    async def cancel(self, backfill_id: str, *, reason: str, now: datetime | None = None) -> bool:
        """Make no more ticks of it; False if it has ended already, or there is none."""
        return await self._end(backfill_id, Ended("cancelled", reason), now) is not None

    async def next_backfills(self, *, limit: int, now: datetime | None = None) -> Sequence[DueBackfill]:
        """Those that have not ended, the first to go on with first."""
        rows = await self._database.fetch(backfill_sql.NEXT_BACKFILLS, limit, now)
        return [DueBackfill._make(row) for row in rows]

    async def step(
        self, backfill_id: str, schedule_id: str, *, wait: bool = False, now: datetime | None = None
    ) -> Ended | None:
        """Go on with a due backfill, unless somebody else is busy with it or its schedule; how it has ended."""
        try:
            await self._make_partitions_ahead(backfill_id, schedule_id)
            return await self._step(backfill_id, schedule_id, wait=wait, now=now)
        except PASSING:
            raise
        except asyncpg.PostgresError as error:  # it would be the same again
            said = f"{type(error).__name__}: {error.args[0]}"  # without the details, which show payloads
            return await self._end(backfill_id, Ended("failed", storable(said)), now)

    async def _step(self, backfill_id: str, schedule_id: str, *, wait: bool, now: datetime | None) -> Ended | None:
        async with self._database.transaction() as connection:
            try:
                held = await self._hold(backfill_id, schedule_id, connection, wait=wait, now=now)
            except ScheduleNotFoundError:
                return await self._end(backfill_id, Ended("cancelled", "the schedule is gone"), now, connection)
            if held is None:
                return None
            try:
                step = await self._plan(held, connection)
            except RULE_ERRORS as error:
                said = str(error) if isinstance(error, CannotGoOnError) else f"{type(error).__name__}: {error}"
                return await self._end(held.id, Ended("failed", storable(said)), held.now, connection)
            await self._write(held, step, connection)
            return await self._end(held.id, Ended("done"), held.now, connection) if step.done else None

    async def _hold(
        self, backfill_id: str, schedule_id: str, connection: Connection, *, wait: bool, now: datetime | None
    ) -> Held | None:
        """None: it is not due, or somebody else is busy with the schedule."""
        cursor = await self._lock(schedule_id, connection, wait=wait)
        if cursor is None:
            return None
        row = await self._database.fetchrow(backfill_sql.LOCK_BACKFILL, backfill_id, now, connection=connection)
        if row is None:
            return None
        schedule = await self._schedule(schedule_id, connection)
        return Held(
            id=backfill_id,
            schedule=schedule,
            managers_from=cursor["next_tick_needed_at"] if schedule.enabled else None,
            start=row["start_at"],
            end=row["end_at"],
            position=row["next_at"],
            per_minute=row["per_minute"],
            now=row["instant"],
            ticks=await self._ticks(schedule_id, connection),
        )

    async def _lock(self, schedule_id: str, connection: Connection, *, wait: bool) -> asyncpg.Record | None:
        """Be alone with a schedule, and have its cursor; None: somebody else is."""
        await self._database.fetch(schedule_sql.LIMIT_PATIENCE, self._patience, connection=connection)
        statement = backfill_sql.LOCK_CURSOR if wait else backfill_sql.TRY_LOCK_CURSOR
        cursor = await self._database.fetchrow(statement, schedule_id, connection=connection)
        if cursor is None and not await self._database.fetchval(
            backfill_sql.SCHEDULE_EXISTS, schedule_id, connection=connection
        ):
            raise ScheduleNotFoundError(f"there is no schedule {schedule_id}")
        return cursor

    async def _schedule(self, schedule_id: str, connection: Connection | None = None) -> Schedule:
        """As it is after the lock."""
        row = await self._database.fetchrow(schedule_sql.GET_SCHEDULE, schedule_id, connection=connection)
        if row is None:
            raise ScheduleNotFoundError(f"there is no schedule {schedule_id}")
        return schedule_of(row)

    async def _horizon(self, now: datetime | None, connection: Connection) -> tuple[datetime, datetime]:
        """The time, and since when the ledger is complete. What a backfill has before it is not removed any more."""
        [(instant, removed_before)] = await self._database.fetch(backfill_sql.HORIZON, now, connection=connection)
        return instant, removed_before or EARLIEST

    async def _ticks(self, schedule_id: str, connection: Connection) -> Ticks:
        rows = await self._database.fetch(backfill_sql.TICKS_OF, schedule_id, connection=connection)
        ours = [row for row in rows if row["origin"] == "backfill"]
        return Ticks(
            occurrences=frozenset(row["scheduled_for"] for row in rows),
            backfilled=frozenset(row["scheduled_for"] for row in ours),
            last_due=max((row["due_at"] for row in ours if row["due_at"] is not None), default=None),
        )

    async def _plan(self, held: Held, connection: Connection) -> Step:
        """What comes next."""
        left = held.timetable.count(held.position, held.end)
        here = Chosen((), 0, held.position)
        if held.one_by_one and held.ticks.backfilled:
            return Step(here, look_again(held), left)
        occurrences = next_occurrences(held.timetable, held.position, held.end)
        if occurrences:
            return await self._choose(held, occurrences, left, connection)
        pending = held.ticks.within(held.start, held.end)
        return Step(replace(here, position=held.end), look_again(held), left, done=not pending)

    async def _choose(self, held: Held, occurrences: Sequence[datetime], left: int, connection: Connection) -> Step:
        """Leave alone what has ended or will by itself; of the rest, as much as the pace allows."""
        reach = (occurrences[0], occurrences[-1])
        arguments = (held.schedule.id, occurrences, *reach)
        runs = await self._database.fetch(backfill_sql.RUNS_OF, *arguments, connection=connection)
        _, kept_since = await self._horizon(None, connection)  # now that we read the ledger, no day of it can go
        if occurrences[0] < kept_since:
            raise CannotGoOnError(f"the ledger is kept since {kept_since.isoformat()} only")
        chosen = choose(
            occurrences,
            taken=held.ticks.occurrences | {row["scheduled_for"] for row in runs if not row["missed"]},
            managers_from=held.managers_from,
            room=1 if held.one_by_one else room_of(held.per_minute),
            position=held.position,
        )
        if chosen.looked_at == left:
            chosen = replace(chosen, position=held.end)
        rows = await self._database.fetch(backfill_sql.STRETCHES, held.schedule.id, *reach, connection=connection)
        split = [_split(row, chosen.made) for row in rows]
        due_at = slots(held.now, held.per_minute, len(chosen.made))[-1]
        over = chosen.position == held.end and not chosen.made and not held.ticks.within(held.start, held.end)
        return Step(chosen, due_at, left, split, done=over)

    async def _write(self, held: Held, step: Step, connection: Connection) -> None:
        """All that a step does. What was missed turns into ticks, so that each occurrence is told of once."""
        made = step.chosen.made
        pieces = [piece for _, pieces in step.split for piece in pieces]
        await self._make_partitions([*made, *(piece.last for piece in pieces)], connection)
        if made:
            arguments = (held.schedule.id, made, made[0], made[-1])
            await self._database.fetch(backfill_sql.FORGET_MISSED, *arguments, connection=connection)
        for stretch, left in step.split:
            if left != [stretch]:
                await self._split(held.schedule.id, stretch, left, connection)
        await self._make_ticks(held, made, connection)
        chosen = step.chosen
        numbers = (len(chosen.made), chosen.skipped, step.left, step.due_at)
        await self._database.fetch(
            backfill_sql.ADVANCE_BACKFILL, held.id, chosen.position, *numbers, connection=connection
        )

    async def _split(self, schedule_id: str, stretch: Stretch, left: Sequence[Stretch], connection: Connection) -> None:
        columns = [[getattr(piece, name) for piece in left] for name in ("first", "last", "count")]
        arguments = (schedule_id, stretch.last, *columns)
        await self._database.fetch(backfill_sql.SPLIT_STRETCH, *arguments, connection=connection)

    async def _make_ticks(self, held: Held, made: Sequence[datetime], connection: Connection) -> None:
        """At their places in the pace. Tickers hear of it: the first is due now."""
        wanted = dict(zip(made, slots(held.now, held.per_minute, len(made)), strict=False))
        offset = timedelta(0)
        while wanted:  # each further round means that another tick has their microsecond
            ids = [new_tick_id() for _ in wanted]
            arguments = (held.schedule.id, ids, list(wanted), list(wanted.values()), offset, held.now)
            rows = await self._database.fetch(backfill_sql.MAKE_TICKS, *arguments, connection=connection)
            for row in rows:
                del wanted[row["scheduled_for"]]
            offset += MICROSECOND
        if made:
            await self._database.fetch(NOTIFY, self._database.channel, TICKS_NOTICE, connection=connection)

    async def _make_partitions_ahead(self, backfill_id: str, schedule_id: str) -> None:
        """Those that the next step will want, before it takes its locks: whoever makes one keeps others waiting."""
        with suppress(ScheduleNotFoundError, BackfillNotFoundError, *RULE_ERRORS):
            backfill, schedule = await self.get(backfill_id), await self._schedule(schedule_id)
            timetable = timetable_for(schedule, backfill.start)
            await self._make_partitions(next_occurrences(timetable, backfill.position, backfill.end))

    async def _make_partitions(self, moments: Iterable[datetime], connection: Connection | None = None) -> None:
        days = sorted({moment.date() for moment in moments})
        for first in range(0, len(days), DAYS_AT_ONCE):
            some = days[first : first + DAYS_AT_ONCE]
            await self._database.fetch(tick_sql.MAKE_PARTITIONS_OF, some, connection=connection)

    async def _end(
        self, backfill_id: str, ended: Ended, now: datetime | None, connection: Connection | None = None
    ) -> Ended | None:
        """How it has ended; None if somebody else has ended it before."""
        arguments = (backfill_id, ended.outcome, ended.reason, now)
        rows = await self._database.fetch(backfill_sql.END_BACKFILL, *arguments, connection=connection)
        return ended if rows else None


def look_again(held: Held) -> datetime:
    """When to see whether ticks have fired: when the last is due, or after a while that grows with its lateness."""
    last = held.ticks.last_due or held.now
    wait = last - held.now if last > held.now else (held.now - last) / 10
    return held.now + min(max(wait, SHORTEST_PAUSE), LONGEST_PAUSE)


def _split(row: asyncpg.Record, gone: Sequence[datetime]) -> tuple[Stretch, list[Stretch]]:
    """A stretch, and what is left of it."""
    stretch = Stretch(row["first"], row["last"], row["count"])
    if not any(stretch.first <= moment <= stretch.last for moment in gone):
        return stretch, [stretch]
    if row["anchor_at"] is None:
        raise CannotGoOnError("the version of the schedule that missed some of it is not kept any more")
    timetable = Timetable(rule_of_row(row), row["starts_at"], row["ends_at"])
    check_stretch(timetable, stretch)
    return stretch, without(timetable, stretch, gone)
