"""All SQL about schedules and ticks.

Every statement takes the time as its last argument; NULL means the database's clock, which is what the product
uses. Tests own the clock by giving one.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from typing import Literal

import asyncpg

from cron_ticks.database import Connection, Database
from cron_ticks.errors import ScheduleNotFoundError
from cron_ticks.ids import new_schedule_id, new_tick_id
from cron_ticks.occurrences import MICROSECOND, IntervalRule, Plan, plan
from cron_ticks.schedules import Schedule, ScheduleDefinition
from cron_ticks.sinks import SameDatabaseSink

SCHEDULE_COLUMNS = """
    id, workspace_id, name, queue_name, payload::text AS payload, interval_us, anchor_at, created_at, updated_at
"""

# Creates the schedule unless its name is taken: of N pods that declare it at once, one gets a row back.
# Its cursor starts at the anchor, so the first tick is due at once.
CREATE_SCHEDULE = (
    """
WITH clock AS (SELECT coalesce($7::timestamptz, statement_timestamp()) AS instant),
created AS (
    INSERT INTO {schema}.cron_schedules
        (id, workspace_id, name, queue_name, payload, interval_us, anchor_at, created_at, updated_at)
    SELECT $1, $2, $3, $4, $5::text::jsonb, $6, instant, instant, instant FROM clock
    ON CONFLICT ON CONSTRAINT cron_schedules_name_key DO NOTHING
    RETURNING *
),
cursor AS (
    INSERT INTO {schema}.cron_schedule_cursors (schedule_id, next_tick_needed_at)
    SELECT id, anchor_at FROM created
)
SELECT"""
    + SCHEDULE_COLUMNS
    + "FROM created"
)

# A schedule by its name, and whether its payload is the one given. Read without a lock: declaring what is there
# already waits for nobody.
FIND_SCHEDULE = (
    "SELECT"
    + SCHEDULE_COLUMNS
    + """
    , payload = $3::text::jsonb AS same_payload
FROM {schema}.cron_schedules
WHERE workspace_id IS NOT DISTINCT FROM $1 AND name = $2
"""
)

# The same, locked against other edits of it.
LOCK_SCHEDULE = FIND_SCHEDULE + "FOR UPDATE"

# The edit itself; the anchor stays, so the phase does.
UPDATE_SCHEDULE = (
    """
UPDATE {schema}.cron_schedules
SET queue_name = $2, payload = $3::text::jsonb, interval_us = $4, updated_at = $5
WHERE id = $1
RETURNING"""
    + SCHEDULE_COLUMNS
)

# Locks of an edit or a removal, after the schedule's own: the cursor, which waits for a manager that is making ticks
# for this schedule, then its ticks, which waits for tickers that are firing them. What is there afterwards is ours.
LOCK_CURSOR = "SELECT next_tick_needed_at FROM {schema}.cron_schedule_cursors WHERE schedule_id = $1 FOR UPDATE"
LOCK_TICKS = "SELECT FROM {schema}.cron_ticks WHERE schedule_id = $1 FOR UPDATE"

# The instant of an edit: asked for after the locks, so that whatever has fired lies before it.
CLOCK = "SELECT coalesce($1::timestamptz, statement_timestamp())"

# Re-planning: ticks not yet due go, those already due fire as they were made.
DELETE_FUTURE_TICKS = "DELETE FROM {schema}.cron_ticks WHERE schedule_id = $1 AND scheduled_for > $2"
MOVE_CURSOR = "UPDATE {schema}.cron_schedule_cursors SET next_tick_needed_at = $2 WHERE schedule_id = $1"

GET_SCHEDULE = "SELECT" + SCHEDULE_COLUMNS + "FROM {schema}.cron_schedules WHERE id = $1"

# Keyset pages in the order of the key, which is stable and means nothing else: `$2` is the last id of the page before.
LIST_SCHEDULES = (
    "SELECT"
    + SCHEDULE_COLUMNS
    + """
FROM {schema}.cron_schedules
WHERE ($1::text IS NULL OR workspace_id = $1) AND id > $2
ORDER BY id
LIMIT $3
"""
)

DELETE_SCHEDULE = "DELETE FROM {schema}.cron_schedules WHERE id = $1 RETURNING" + SCHEDULE_COLUMNS  # and its cursor
DELETE_TICKS = "DELETE FROM {schema}.cron_ticks WHERE schedule_id = $1"

# Takes schedules of this process's shard whose next occurrence falls inside the window; two managers never wait for
# each other. The shard's hash is md5's, which no server version changes.
LOCK_CURSORS_IN_WINDOW = """
WITH clock AS (SELECT coalesce($5::timestamptz, statement_timestamp()) AS instant)
SELECT schedule_id, next_tick_needed_at, (SELECT instant FROM clock) AS instant
FROM {schema}.cron_schedule_cursors
WHERE next_tick_needed_at < (SELECT instant + $1::interval FROM clock)
    AND ($3::int = 1 OR ('x' || left(md5(schedule_id), 8))::bit(32)::bigint % $3 = $4)
ORDER BY next_tick_needed_at
LIMIT $2
FOR UPDATE SKIP LOCKED
"""

# The rules of the schedules taken. A statement of its own, because only a snapshot made after the locks is sure to
# show the edit that moved the cursor.
RULES = "SELECT id, interval_us, anchor_at FROM {schema}.cron_schedules WHERE id = ANY($1::text[])"

# One row per occurrence, whoever else makes it too: the unique key decides.
CREATE_TICKS = """
INSERT INTO {schema}.cron_ticks
    (id, schedule_id, schedule_name, workspace_id, queue_name, payload, scheduled_for, execute_at, due_at, created_at)
SELECT made.id, schedule.id, schedule.name, schedule.workspace_id, schedule.queue_name, schedule.payload,
    made.scheduled_for, made.scheduled_for, made.scheduled_for, $4
FROM unnest($1::text[], $2::text[], $3::timestamptz[]) AS made (id, schedule_id, scheduled_for)
JOIN {schema}.cron_schedules AS schedule ON schedule.id = made.schedule_id
ON CONFLICT ON CONSTRAINT cron_ticks_execution_key DO NOTHING
RETURNING 1
"""

UPDATE_NEXT_TICK_NEEDED = """
UPDATE {schema}.cron_schedule_cursors AS cursor
SET next_tick_needed_at = made.next_needed
FROM unnest($1::text[], $2::timestamptz[]) AS made (schedule_id, next_needed)
WHERE cursor.schedule_id = made.schedule_id
"""

# Exactly once, in one statement: the ticks end and their messages begin together, or neither does. A worker that
# wakes up late finds nothing to delete, so it sends nothing. By ctid, because the rows are locked and no statistics
# can then make the planner read the whole table.
FIRE_DUE_TICKS = """
WITH pass AS (
    SELECT $1::text AS ticker_id, coalesce($3::timestamptz, statement_timestamp()) AS instant
),
due AS (
    SELECT ctid
    FROM {schema}.cron_ticks
    WHERE due_at <= (SELECT instant FROM pass)
    ORDER BY due_at
    LIMIT $2
    FOR UPDATE SKIP LOCKED
),
taken AS (
    DELETE FROM {schema}.cron_ticks WHERE ctid = ANY (ARRAY(SELECT ctid FROM due)) RETURNING *
),
sent AS (
    {insert_from_taken}
)
SELECT taken.id, schedule_id, schedule_name, scheduled_for, instant - execute_at AS lateness
FROM taken, pass
"""

# Ticks whose schedule is gone, which only a change by hand can leave behind.
DELETE_ORPHANED_TICKS = """
WITH orphaned AS (
    SELECT id
    FROM {schema}.cron_ticks AS tick
    WHERE NOT EXISTS (SELECT FROM {schema}.cron_schedules WHERE id = tick.schedule_id)
    LIMIT $1
    FOR UPDATE SKIP LOCKED
)
DELETE FROM {schema}.cron_ticks AS tick USING orphaned WHERE tick.id = orphaned.id
RETURNING 1
"""


@dataclass(frozen=True)
class NeedingTicks:
    """A schedule that has occurrences without ticks inside the window, as a manager sees and holds it."""

    schedule_id: str
    rule: IntervalRule
    needed_from: datetime
    now: datetime


@dataclass(frozen=True)
class FiredTick:
    """A tick that has become a message."""

    id: str
    schedule_id: str
    schedule_name: str
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
        found = await self._find(FIND_SCHEDULE, definition, connection)
        if found is None:
            created = await self._create(definition, connection, now)
            return None if created is None else Saved(created, "created")
        if found.same:
            return Saved(found.schedule, "unchanged")
        locked = await self._find(LOCK_SCHEDULE, definition, connection)
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
            CREATE_SCHEDULE,
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
        cursor = await self._database.fetchval(LOCK_CURSOR, current.id, connection=connection)
        await self._database.fetch(LOCK_TICKS, current.id, connection=connection)
        instant = await self._database.fetchval(CLOCK, now, connection=connection)
        missed = await self._make_overdue_ticks(
            NeedingTicks(current.id, current.rule, cursor, instant), missed_after, connection
        )
        edited = await self._update(current.id, definition, instant, connection)
        await self._database.fetch(DELETE_FUTURE_TICKS, edited.id, instant, connection=connection)
        next_needed = edited.rule.occurrence_after(instant)
        await self._database.fetch(MOVE_CURSOR, edited.id, next_needed, connection=connection)
        return Saved(edited, "edited", missed)

    async def _make_overdue_ticks(self, needing: NeedingTicks, missed_after: timedelta, connection: Connection) -> int:
        """The new definition holds for occurrences after now; those before it that no manager has made are kept.

        Returns how many are missed, because they are too old to be made up.
        """
        overdue = plan(
            needing.rule,
            needed_from=needing.needed_from,
            now=needing.now,
            lookahead=MICROSECOND,
            missed_after=missed_after,
        )
        if overdue.occurrences:
            await self.create_ticks([(needing, overdue)], connection=connection)
        return overdue.missed

    async def _update(
        self, schedule_id: str, definition: ScheduleDefinition, instant: datetime, connection: Connection
    ) -> Schedule:
        rows = await self._database.fetch(
            UPDATE_SCHEDULE,
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
        row = await self._database.fetchrow(GET_SCHEDULE, schedule_id, connection=connection)
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
        rows = await self._database.fetch(LIST_SCHEDULES, workspace_id, after_id, limit, connection=connection)
        return [_schedule(row) for row in rows]

    async def delete_schedule(self, schedule_id: str, *, connection: Connection | None = None) -> Schedule:
        """Remove the schedule with its pending ticks; messages already sent stay."""
        async with self._database.transaction(connection) as chosen:
            row = await self._database.fetchrow(DELETE_SCHEDULE, schedule_id, connection=chosen)
            if row is None:
                raise ScheduleNotFoundError(f"there is no schedule {schedule_id}")
            await self._database.fetch(DELETE_TICKS, schedule_id, connection=chosen)
        return _schedule(row)

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
            LOCK_CURSORS_IN_WINDOW, lookahead, limit, shard_count, shard_id, now, connection=connection
        )
        ids = [row["schedule_id"] for row in taken]
        rules = {row["id"]: row for row in await self._database.fetch(RULES, ids, connection=connection)}
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
            CREATE_TICKS,
            [new_tick_id() for _ in pairs],
            [schedule_id for schedule_id, _ in pairs],
            [occurrence for _, occurrence in pairs],
            plans[0][0].now,
            connection=connection,
        )
        await self._database.fetch(
            UPDATE_NEXT_TICK_NEEDED,
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

    async def delete_orphaned_ticks(self, *, limit: int) -> int:
        """Remove ticks whose schedule is gone; fewer than `limit` means that none is left."""
        return len(await self._database.fetch(DELETE_ORPHANED_TICKS, limit))


@cache
def firing_statement(insert_from_taken: str) -> str:
    """The one statement that fires ticks into a sink."""
    return FIRE_DUE_TICKS.replace("{insert_from_taken}", insert_from_taken)


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
