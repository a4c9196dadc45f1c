"""Schedules and ticks in the database. The statements are in `repository_sql`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from typing import Literal

import asyncpg

from cron_ticks import repository_sql as sql
from cron_ticks.database import Connection, Database
from cron_ticks.errors import ScheduleNotFoundError
from cron_ticks.ids import new_schedule_id, new_tick_id
from cron_ticks.occurrences import MICROSECOND, IntervalRule, Plan, plan
from cron_ticks.schedules import Schedule, ScheduleDefinition
from cron_ticks.sinks import SameDatabaseSink


@dataclass(frozen=True)
class NeedingTicks:
    """A schedule that has occurrences without ticks inside the window, as a manager sees and holds it."""

    schedule_id: str
    rule: IntervalRule
    needed_from: datetime
    now: datetime

    def plan(self, *, lookahead: timedelta, missed_after: timedelta) -> Plan:
        """The occurrences to make ticks for."""
        return plan(
            self.rule, needed_from=self.needed_from, now=self.now, lookahead=lookahead, missed_after=missed_after
        )


@dataclass(frozen=True)
class FiredTick:
    """A tick that has become a message."""

    id: str
    schedule_id: str
    schedule_name: str
    queue_name: str
    scheduled_for: datetime
    lateness: timedelta


@dataclass(frozen=True)
class Found:
    """A schedule of the name that is being declared."""

    schedule: Schedule
    same: bool  # as the definition


@dataclass(frozen=True)
class Saved:
    """What `save_schedule` did."""

    schedule: Schedule
    change: Literal["created", "edited", "unchanged"]
    missed: int = 0  # occurrences of the old definition that are not made up


class CronRepository:
    """Schedules and ticks in the database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def save_schedule(
        self,
        definition: ScheduleDefinition,
        *,
        missed_after: timedelta,
        connection: Connection | None = None,
        now: datetime | None = None,
    ) -> Saved:
        """Create the schedule, or edit it if its definition changed, or leave it alone."""
        saved = None
        while saved is None:  # each further round means that somebody else has created or deleted it
            async with self._database.transaction(connection) as chosen:
                saved = await self._save(definition, chosen, missed_after, now)
        return saved

    async def _save(
        self, definition: ScheduleDefinition, connection: Connection, missed_after: timedelta, now: datetime | None
    ) -> Saved | None:
        """None if the schedule came or went while we looked."""
        found = await self._find(sql.FIND_SCHEDULE, definition, connection)
        if found is None:
            created = await self._create(definition, connection, now)
            return None if created is None else Saved(created, "created")
        if found.same:
            return Saved(found.schedule, "unchanged")
        locked = await self._find(sql.LOCK_SCHEDULE, definition, connection)
        if locked is None:
            return None
        if locked.same:
            return Saved(locked.schedule, "unchanged")
        return await self._edit(locked.schedule, definition, connection, missed_after, now)

    async def _find(self, statement: str, definition: ScheduleDefinition, connection: Connection) -> Found | None:
        row = await self._database.fetchrow(
            statement, definition.workspace_id, definition.name, definition.payload_json, connection=connection
        )
        if row is None:
            return None
        schedule = _schedule(row)
        same_rest = (schedule.queue_name, schedule.interval) == (definition.queue_name, definition.interval)
        return Found(schedule, same=same_rest and row["same_payload"])

    async def _create(
        self, definition: ScheduleDefinition, connection: Connection, now: datetime | None
    ) -> Schedule | None:
        row = await self._database.fetchrow(
            sql.CREATE_SCHEDULE,
            new_schedule_id(),
            definition.workspace_id,
            definition.name,
            definition.queue_name,
            definition.payload_json,
            definition.interval_us,
            now,
            connection=connection,
        )
        return None if row is None else _schedule(row)

    async def _edit(
        self,
        current: Schedule,
        definition: ScheduleDefinition,
        connection: Connection,
        missed_after: timedelta,
        now: datetime | None,
    ) -> Saved:
        cursor = await self._database.fetchval(sql.LOCK_CURSOR, current.id, connection=connection)
        await self._database.fetch(sql.LOCK_TICKS, current.id, connection=connection)
        instant = await self._database.fetchval(sql.CLOCK, now, connection=connection)
        missed = await self._make_overdue_ticks(
            NeedingTicks(current.id, current.rule, cursor, instant), missed_after, connection
        )
        edited = await self._update(current.id, definition, instant, connection)
        await self._database.fetch(sql.DELETE_FUTURE_TICKS, edited.id, instant, connection=connection)
        next_needed = edited.rule.occurrence_after(instant)
        await self._database.fetch(sql.MOVE_CURSOR, edited.id, next_needed, connection=connection)
        return Saved(edited, "edited", missed)

    async def _make_overdue_ticks(self, needing: NeedingTicks, missed_after: timedelta, connection: Connection) -> int:
        """The new definition holds for occurrences after now; those before it that no manager has made are kept.

        Returns how many are missed, because they are too old to be made up.
        """
        overdue = needing.plan(lookahead=MICROSECOND, missed_after=missed_after)
        if overdue.occurrences:
            await self.create_ticks([(needing, overdue)], connection=connection)
        return overdue.missed

    async def _update(
        self, schedule_id: str, definition: ScheduleDefinition, instant: datetime, connection: Connection
    ) -> Schedule:
        rows = await self._database.fetch(
            sql.UPDATE_SCHEDULE,
            schedule_id,
            definition.queue_name,
            definition.payload_json,
            definition.interval_us,
            instant,
            connection=connection,
        )
        return _schedule(rows[0])

    async def get_schedule(self, schedule_id: str, *, connection: Connection | None = None) -> Schedule:
        """The schedule of this id."""
        row = await self._database.fetchrow(sql.GET_SCHEDULE, schedule_id, connection=connection)
        if row is None:
            raise ScheduleNotFoundError(f"there is no schedule {schedule_id}")
        return _schedule(row)

    async def list_schedules(
        self,
        *,
        workspace_id: str | None = None,
        after_id: str = "",
        limit: int = 100,
        connection: Connection | None = None,
    ) -> list[Schedule]:
        """A page of schedules; pass the last one's id as `after_id` for the next."""
        rows = await self._database.fetch(sql.LIST_SCHEDULES, workspace_id, after_id, limit, connection=connection)
        return [_schedule(row) for row in rows]

    async def delete_schedule(self, schedule_id: str, *, connection: Connection | None = None) -> Schedule:
        """Remove the schedule with its pending ticks; messages already sent stay."""
        async with self._database.transaction(connection) as chosen:
            row = await self._database.fetchrow(sql.DELETE_SCHEDULE, schedule_id, connection=chosen)
            if row is None:
                raise ScheduleNotFoundError(f"there is no schedule {schedule_id}")
            await self._database.fetch(sql.DELETE_TICKS, schedule_id, connection=chosen)
        return _schedule(row)

    async def any_schedule_needs_ticks(
        self, *, lookahead: timedelta, shard_count: int, shard_id: int, now: datetime | None = None
    ) -> bool:
        """Whether there are schedules to make ticks for."""
        arguments = (lookahead, shard_count, shard_id, now)
        return bool(await self._database.fetchval(sql.CURSOR_IN_WINDOW, *arguments))

    async def find_schedules_needing_ticks(
        self,
        *,
        lookahead: timedelta,
        limit: int,
        shard_count: int,
        shard_id: int,
        connection: Connection,
        now: datetime | None = None,
    ) -> list[NeedingTicks]:
        """Schedules to make ticks for, held until the end of the transaction."""
        taken = await self._database.fetch(
            sql.LOCK_CURSORS_IN_WINDOW, lookahead, limit, shard_count, shard_id, now, connection=connection
        )
        ids = [row["schedule_id"] for row in taken]
        rules = {row["id"]: row for row in await self._database.fetch(sql.RULES, ids, connection=connection)}
        return [
            NeedingTicks(
                schedule_id=row["schedule_id"],
                rule=_rule(rules[row["schedule_id"]]),
                needed_from=row["next_tick_needed_at"],
                now=row["instant"],
            )
            for row in taken
        ]

    async def create_ticks(self, plans: Sequence[tuple[NeedingTicks, Plan]], *, connection: Connection) -> int:
        """Make the planned ticks and advance their schedules; how many ticks are new."""
        pairs = [(needing.schedule_id, occurrence) for needing, planned in plans for occurrence in planned.occurrences]
        made = await self._database.fetch(
            sql.CREATE_TICKS,
            [new_tick_id() for _ in pairs],
            [schedule_id for schedule_id, _ in pairs],
            [occurrence for _, occurrence in pairs],
            plans[0][0].now,
            connection=connection,
        )
        await self._database.fetch(
            sql.UPDATE_NEXT_TICK_NEEDED,
            [needing.schedule_id for needing, _ in plans],
            [planned.next_needed for _, planned in plans],
            connection=connection,
        )
        return len(made)

    async def fire_due_ticks(
        self, sink: SameDatabaseSink, *, ticker_id: str, limit: int, now: datetime | None = None
    ) -> list[FiredTick]:
        """Turn due ticks into messages; fewer than `limit` means that nothing due is left."""
        rows = await self._database.fetch(firing_statement(sink.insert_from_taken), ticker_id, limit, now)
        return [FiredTick(**row) for row in rows]

    async def next_due_in(self, *, now: datetime | None = None) -> timedelta | None:
        """How long until the next tick is due; not positive if one is now, None if there is none."""
        due_in: timedelta | None = await self._database.fetchval(sql.NEXT_DUE_IN, now)
        return due_in

    async def delete_orphaned_ticks(self, *, limit: int) -> int:
        """Remove ticks whose schedule is gone; fewer than `limit` means that none is left."""
        return len(await self._database.fetch(sql.DELETE_ORPHANED_TICKS, limit))


@cache
def firing_statement(insert_from_taken: str) -> str:
    """The one statement that fires ticks into a sink."""
    return sql.FIRE_DUE_TICKS.replace("{insert_from_taken}", insert_from_taken)


def _rule(row: asyncpg.Record) -> IntervalRule:
    return IntervalRule(row["anchor_at"], timedelta(microseconds=row["interval_us"]))


def _schedule(row: asyncpg.Record) -> Schedule:
    return Schedule(
        id=row["id"],
        workspace_id=row["workspace_id"],
        name=row["name"],
        queue_name=row["queue_name"],
        payload=json.loads(row["payload"]),
        interval=timedelta(microseconds=row["interval_us"]),
        anchor_at=row["anchor_at"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
    )
