"""A schedule in the database: declaring, editing, switching and removing it. The statements are in `schedule_sql`."""

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Literal

import asyncpg

from cron_ticks import backfill_sql, schedule_sql, tick_sql
from cron_ticks.database import Connection
from cron_ticks.errors import InvalidInputError, ScheduleNotFoundError
from cron_ticks.ids import new_schedule_id, new_tick_id
from cron_ticks.occurrences import EVERYTHING, MICROSECOND, NOTHING, RULE_ERRORS, Plan, all_missed
from cron_ticks.rows import (
    NeedingTicks,
    PendingTick,
    Planned,
    changes_json,
    definition_arguments,
    differences,
    schedule_of,
)
from cron_ticks.schedules import DEFAULT_ZONE, Schedule, ScheduleDefinition, Triggered
from cron_ticks.tick_repository import TickRepository
from cron_ticks.zones import known_zones


@dataclass(frozen=True)
class Saved:
    """What a change of a schedule did."""

    schedule: Schedule
    change: Literal["created", "edited", "disabled", "enabled", "retried", "unchanged"]
    fields: tuple[str, ...] = ()  # that were changed
    missed: int = 0  # occurrences before the change that are not made up
    back_after: timedelta | None = None  # since the edit that this one undoes


@dataclass(frozen=True)
class Held:
    """A schedule that is locked with its cursor and ticks: nobody else changes, makes or fires anything of it."""

    schedule: Schedule
    next_needed: datetime | None
    planned: int
    ticks: list[PendingTick]
    instant: datetime
    fired: datetime | None  # the latest occurrence that has fired before its time

    @property
    def boundary(self) -> datetime:
        """Up to here the schedule stays what it was: the past, what has fired early, and ticks that are due."""
        due = [tick.scheduled_for for tick in self.ticks if tick.due_by(self.instant)]
        return max([self.instant, *due, *([] if self.fired is None else [self.fired])])

    @property
    def last_tick(self) -> datetime:
        """Up to here there are ticks that stay."""
        return max([self.boundary, *(tick.scheduled_for for tick in self.ticks if tick.of_the_rule)])


class ScheduleRepository(TickRepository):
    """What CronRepository does with one schedule at a time."""

    async def save_schedule(
        self, definition: ScheduleDefinition, *, connection: Connection | None = None, now: datetime | None = None
    ) -> Saved:
        """Create the schedule, or edit it if its definition changed, or leave it alone."""
        saved = None
        while saved is None:  # each further round means that somebody else has created or deleted it
            saved = await self._save(definition, connection, now)
        return saved

    async def _save(
        self, definition: ScheduleDefinition, connection: Connection | None, now: datetime | None
    ) -> Saved | None:
        key = (definition.workspace_id, definition.name, definition.payload_json, now)
        (row,) = await self.database.fetch(schedule_sql.FIND_SCHEDULE, *key, connection=connection)
        if row["id"] is None:
            created = await self.create_schedule(definition, now=row["instant"], connection=connection)
            return None if created is None else Saved(created, "created")
        found = schedule_of(row)
        same = row["same_payload"] and not differences(found, _owned(found, definition))
        if same and found.error is None:
            return Saved(found, "unchanged")
        try:
            return await self.update_schedule(
                found.id, lambda current: _owned(current, definition), connection=connection, now=now
            )
        except ScheduleNotFoundError:
            return None

    async def create_schedule(
        self, definition: ScheduleDefinition, *, now: datetime, connection: Connection | None = None
    ) -> Schedule | None:
        """Create a schedule with the ticks of the window; None if its name is taken."""
        anchor = definition.anchor(now)
        async with self.database.transaction(connection) as chosen:
            definition = await self._with_zone(definition, chosen)
            timetable = definition.timetable(anchor)
            needed_from = timetable.occurrence_at_or_after(now if definition.at is None else definition.at)
            needing = NeedingTicks(new_schedule_id(), 1, timetable, needed_from, 0, now, definition.catch_up)
            # A one-off whose time has passed was asked for now: nobody was late with it.
            made = self.plan(needing, making_up=None if definition.at is None else EVERYTHING)
            row = await self.database.fetchrow(
                schedule_sql.CREATE_SCHEDULE,
                needing.schedule_id,
                definition.workspace_id,
                definition.name,
                *definition_arguments(definition, anchor),
                now,
                made.next_needed,
                made.planned,
                # A rule that may change can have its first occurrence earlier than it is known now.
                (needed_from if needed_from is not None and timetable.rule.lasting else now) - MICROSECOND,
                self._actor,
                connection=chosen,
            )
            if row is None:
                return None
            await self.create_ticks([Planned(needing, made)], connection=chosen)
        return schedule_of(row)

    async def update_schedule(
        self,
        schedule_id: str,
        change: Callable[[Schedule], ScheduleDefinition],
        *,
        connection: Connection | None = None,
        now: datetime | None = None,
    ) -> Saved:
        """Edit a schedule. It holds for occurrences after now and after whatever has fired; the phase stays."""
        async with self._changing(connection) as chosen:
            held = await self._hold(schedule_id, chosen, now)
            definition = await self._with_zone(change(held.schedule), chosen)
            changed = differences(held.schedule, definition)
            same_payload = await self.database.fetchval(
                schedule_sql.SAME_PAYLOAD, schedule_id, definition.payload_json, connection=chosen
            )
            if not same_payload:
                changed += ("payload",)
            if not changed:
                return await self._retry_if_broken(held, chosen)
            return await self._edit(held, definition, changed, chosen)

    async def _edit(
        self, held: Held, definition: ScheduleDefinition, changed: tuple[str, ...], connection: Connection
    ) -> Saved:
        schedule = held.schedule
        boundary = held.boundary if schedule.enabled else held.last_tick
        if definition.at is not None and definition.at != schedule.at and definition.at <= boundary:
            raise InvalidInputError(
                "at", f"{definition.at.isoformat()} has passed: an edit never fires, trigger() does"
            )
        overdue = await self._make_overdue_ticks(held, boundary, connection)
        planned = held.planned + overdue.planned
        if schedule.enabled:
            planned -= len(
                await self.database.fetch(
                    schedule_sql.DELETE_FUTURE_TICKS, schedule.id, boundary, connection=connection
                )
            )
        anchor = _anchor_after(schedule, definition, boundary, held.instant)
        row = await self.database.fetchrow(
            schedule_sql.EDIT_SCHEDULE,
            schedule.id,
            *definition_arguments(definition, anchor),
            held.instant,
            boundary,
            planned,
            self._actor,
            changes_json(schedule, definition, changed),
            "payload" in changed,
            connection=connection,
        )
        edited = schedule_of(_existing(row, schedule.id))
        await self._resume(edited, boundary, planned, held.instant, connection)
        replaced_at = await self.database.fetchval(
            schedule_sql.IS_BACK, edited.id, edited.version, connection=connection
        )
        back_after = None if replaced_at is None else held.instant - replaced_at
        return Saved(edited, "edited", changed, missed=overdue.missed, back_after=back_after)

    async def disable_schedule(
        self,
        schedule_id: str,
        *,
        drop_pending: bool = False,
        connection: Connection | None = None,
        now: datetime | None = None,
    ) -> Saved:
        """Make no more ticks of it. Those that are there stay and fire, unless they are dropped."""
        async with self._changing(connection) as chosen:
            held = await self._hold(schedule_id, chosen, now)
            schedule = held.schedule
            overdue = await self._make_overdue_ticks(held, held.boundary, chosen)
            if drop_pending:
                dropped = [*(tick.scheduled_for for tick in held.ticks), *overdue.occurrences]
                await self._drop_ticks(
                    [schedule.id], dropped, chosen, reason="dropped when disabled", instant=held.instant
                )
            if not schedule.enabled:
                return Saved(schedule, "unchanged")
            holds_after = held.boundary if drop_pending else held.last_tick
            disabled = await self._switch(held, chosen, holds_after, held.planned + overdue.planned, enabled=False)
        return Saved(disabled, "disabled", missed=overdue.missed)

    async def enable_schedule(
        self,
        schedule_id: str,
        *,
        fire_now: bool = False,
        connection: Connection | None = None,
        now: datetime | None = None,
    ) -> Saved:
        """Make ticks again, from the next occurrence on; with `fire_now` there is one beside the rule at once."""
        async with self._changing(connection) as chosen:
            held = await self._hold(schedule_id, chosen, now)
            if held.schedule.enabled:
                saved = await self._retry_if_broken(held, chosen)
            else:
                forgotten = await self.database.fetch(
                    schedule_sql.FORGET_DROPPED, schedule_id, held.last_tick, connection=chosen
                )
                planned = held.planned - len(forgotten)
                enabled = await self._switch(held, chosen, held.last_tick, planned, enabled=True)
                saved = Saved(enabled, "enabled")
            if fire_now:
                await self._place_tick(saved.schedule, held.instant, chosen)
        return saved

    async def delete_schedule(
        self, schedule_id: str, *, connection: Connection | None = None, now: datetime | None = None
    ) -> Schedule:
        """Remove the schedule with its pending ticks; messages already sent stay, and so does the ledger."""
        async with self._changing(connection) as chosen:
            held = await self._hold(schedule_id, chosen, now)
            overdue = await self._make_overdue_ticks(held, held.boundary, chosen)
            dropped = [*(tick.scheduled_for for tick in held.ticks), *overdue.occurrences]
            await self._drop_ticks([schedule_id], dropped, chosen, reason="schedule deleted", instant=held.instant)
            arguments = ([schedule_id], held.instant, self._actor)
            await self.database.fetch(schedule_sql.DELETE_SCHEDULES, *arguments, connection=chosen)
        return held.schedule

    async def _with_zone(self, definition: ScheduleDefinition, connection: Connection) -> ScheduleDefinition:
        """With the zone that holds; a workspace's default can't change before the end of the transaction."""
        if definition.cron is None or definition.timezone is not None:
            return definition
        zone = None
        if definition.workspace_id is not None:
            await self.database.fetch(schedule_sql.SHARE_ZONE, definition.workspace_id, connection=connection)
            zone = await self.database.fetchval(schedule_sql.GET_ZONE, definition.workspace_id, connection=connection)
            if zone is not None and zone not in known_zones():  # it was, when it was set
                raise InvalidInputError(
                    "timezone", f"the workspace's default {zone!r} is gone: give one, or set_workspace_timezone() anew"
                )
        return replace(definition, zone=zone or DEFAULT_ZONE)

    async def trigger(
        self, schedule_id: str, *, connection: Connection | None = None, now: datetime | None = None
    ) -> Triggered:
        """Fire once now, beside the rule: the phase and what is expected stay as they are."""
        async with self._changing(connection) as chosen:
            await self.database.fetch(schedule_sql.SHARE_ZONE_OF, schedule_id, connection=chosen)
            row = await self.database.fetchrow(schedule_sql.SHARE_SCHEDULE, schedule_id, now, connection=chosen)
            found = _existing(row, schedule_id)
            return await self._place_tick(schedule_of(found), found["instant"], chosen)

    async def get_schedule(self, schedule_id: str, *, connection: Connection | None = None) -> Schedule:
        """The schedule of this id."""
        row = await self.database.fetchrow(schedule_sql.GET_SCHEDULE, schedule_id, connection=connection)
        return schedule_of(_existing(row, schedule_id))

    async def mark_broken(self, needing: NeedingTicks, error: str, *, now: datetime | None = None) -> bool:
        """Pass over a schedule whose rule can't be followed, and let it say why; False if it has changed meanwhile."""
        arguments = (needing.schedule_id, needing.version, error, now, self._events != "off", self._worker)
        return bool(await self.database.fetch(schedule_sql.MARK_BROKEN, *arguments))

    @asynccontextmanager
    async def _changing(self, connection: Connection | None) -> AsyncIterator[Connection]:
        """The caller's transaction, or one of our own that doesn't keep its locks if this process hangs."""
        async with self.database.transaction(connection) as chosen:
            if connection is None:
                await self.database.fetch(schedule_sql.LIMIT_PATIENCE, self.patience, connection=chosen)
            yield chosen

    async def _hold(self, schedule_id: str, connection: Connection, now: datetime | None) -> Held:
        await self.database.fetch(schedule_sql.SHARE_ZONE_OF, schedule_id, connection=connection)
        row = await self.database.fetchrow(schedule_sql.LOCK_SCHEDULE, schedule_id, connection=connection)
        schedule = schedule_of(_existing(row, schedule_id))
        cursors = await self.database.fetch(schedule_sql.LOCK_CURSORS, [schedule_id], connection=connection)
        ((next_needed, planned),) = cursors
        ticks = await self._lock_ticks([schedule_id], connection)
        ((instant, fired),) = await self.database.fetch(schedule_sql.HORIZON, schedule_id, now, connection=connection)
        return Held(schedule, next_needed, planned, ticks, instant, fired)

    async def _lock_ticks(self, schedule_ids: Sequence[str], connection: Connection) -> list[PendingTick]:
        """All of them. A firing may have put one back while we waited for it, so it is looked for once more."""
        before: list[asyncpg.Record] | None = None
        while True:
            rows = await self.database.fetch(schedule_sql.LOCK_TICKS, schedule_ids, connection=connection)
            if rows == before:
                return [PendingTick(*row) for row in rows]
            before = rows

    async def _make_overdue_ticks(self, held: Held, boundary: datetime, connection: Connection) -> Plan:
        """A change holds for occurrences after the boundary; those before it that no manager has made are kept."""
        overdue = self._overdue(held, boundary)
        await self.create_ticks([overdue], connection=connection)
        return overdue.plan

    def _overdue(self, held: Held, boundary: datetime) -> Planned:
        schedule = held.schedule
        needing = _needing(schedule, held.next_needed, held.planned, held.instant)
        if not schedule.enabled or held.next_needed is None:
            return Planned(needing, NOTHING)
        try:
            overdue = self.plan(needing, until=boundary + MICROSECOND)
            if schedule.error is not None:  # the database may have refused them: they are missed
                overdue = all_missed(schedule.timetable, held.next_needed, overdue)
        except RULE_ERRORS:
            return Planned(needing, NOTHING)
        return Planned(needing, overdue)

    async def _switch(
        self, held: Held, connection: Connection, holds_after: datetime, planned: int, *, enabled: bool
    ) -> Schedule:
        arguments = (held.schedule.id, enabled, held.instant, holds_after, planned, self._actor)
        row = await self.database.fetchrow(schedule_sql.SWITCH_SCHEDULE, *arguments, connection=connection)
        switched = schedule_of(_existing(row, held.schedule.id))
        await self._resume(switched, holds_after, planned, held.instant, connection)
        return switched

    async def _resume(
        self, schedule: Schedule, after: datetime, planned: int, instant: datetime, connection: Connection
    ) -> None:
        """Ticks of the window for occurrences after `after`, unless the schedule is disabled."""
        needing = _needing(schedule, after + MICROSECOND, planned, instant)
        try:
            made = self.plan(needing) if schedule.enabled else NOTHING
        except RULE_ERRORS:  # a manager will find out, and say so
            made = Plan((), needing.needed_from, None, complete=False)
        arguments = (schedule.id, made.next_needed, planned + made.planned)
        await self.database.fetch(schedule_sql.MOVE_CURSOR, *arguments, connection=connection)
        await self.create_ticks([Planned(needing, made)], connection=connection)

    async def _retry_if_broken(self, held: Held, connection: Connection) -> Saved:
        if held.schedule.error is None:
            return Saved(held.schedule, "unchanged")
        arguments = (held.schedule.id, self._actor)
        row = await self.database.fetchrow(schedule_sql.RETRY_SCHEDULE, *arguments, connection=connection)
        return Saved(schedule_of(_existing(row, held.schedule.id)), "retried")

    async def _drop_ticks(
        self,
        schedule_ids: Sequence[str],
        occurrences: Iterable[datetime],
        connection: Connection,
        *,
        reason: str,
        instant: datetime,
    ) -> None:
        """Nobody may fire these any more, nor what a backfill would still make; the ledger says why."""
        days = sorted({occurrence.date() for occurrence in occurrences})
        await self.database.fetch(tick_sql.MAKE_PARTITIONS_OF, days, connection=connection)
        arguments = (schedule_ids, reason, instant)
        await self.database.fetch(schedule_sql.DROP_TICKS, *arguments, connection=connection)
        await self.database.fetch(backfill_sql.CANCEL_BACKFILLS_OF, *arguments, connection=connection)

    async def _place_tick(self, schedule: Schedule, instant: datetime, connection: Connection) -> Triggered:
        """At the first free microsecond: what the rule or another trigger has is not ours to take."""
        placed = Triggered(new_tick_id(), instant)
        while not await self._place(schedule, placed, connection):
            placed = Triggered(placed.tick_id, placed.scheduled_for + MICROSECOND)
        await self.wake_tickers(connection)
        return placed

    async def _place(self, schedule: Schedule, tick: Triggered, connection: Connection) -> bool:
        with suppress(*RULE_ERRORS):  # a rule that can't be followed has no occurrences to spare
            if schedule.rule.count(tick.scheduled_for, tick.scheduled_for + MICROSECOND):
                return False
        arguments = (schedule.id, tick.tick_id, tick.scheduled_for, self._actor)
        return bool(await self.database.fetch(schedule_sql.PLACE_TICK, *arguments, connection=connection))


def _needing(schedule: Schedule, needed_from: datetime | None, planned: int, instant: datetime) -> NeedingTicks:
    return NeedingTicks(
        schedule.id, schedule.version, schedule.timetable, needed_from, planned, instant, schedule.catch_up
    )


def _anchor_after(
    schedule: Schedule, definition: ScheduleDefinition, boundary: datetime, instant: datetime
) -> datetime:
    """An edit keeps the phase, unless there is none yet, or none any more."""
    has_begun = schedule.interval is not None and schedule.anchor_at <= boundary
    return schedule.anchor_at if has_begun and definition.interval is not None else definition.anchor(instant)


def _owned(found: Schedule, definition: ScheduleDefinition) -> ScheduleDefinition:
    """Declaring without an owner leaves it as it is; nobody takes what another has declared."""
    if found.owner is not None and definition.owner not in (None, found.owner):
        raise InvalidInputError(
            "owner",
            f"{found.owner!r} has declared the schedule {found.name!r}: give another name, or change its owner with "
            "update_schedule()",
        )
    return replace(definition, owner=found.owner) if definition.owner is None else definition


def _existing(row: asyncpg.Record | None, schedule_id: str) -> asyncpg.Record:
    if row is None:
        raise ScheduleNotFoundError(f"there is no schedule {schedule_id}")
    return row
