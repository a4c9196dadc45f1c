"""The statements of CronRepository, each with what it guarantees.

Those that look at the time take it as an argument; NULL means the database's clock, which is what the product uses.
Tests own the clock by giving one.
"""

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

# Whether there is a cursor in the window: asked first, so that a pass with nothing to do costs one statement.
CURSOR_IN_WINDOW = """
SELECT EXISTS (
    SELECT FROM {schema}.cron_schedule_cursors
    WHERE next_tick_needed_at < coalesce($4::timestamptz, statement_timestamp()) + $1::interval
        AND ($2::int = 1 OR ('x' || left(md5(schedule_id), 8))::bit(32)::bigint % $2 = $3))
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
SELECT taken.id, schedule_id, schedule_name, queue_name, scheduled_for, instant - execute_at AS lateness
FROM taken, pass
"""

# How long until the next tick is due; not positive if one is now, NULL if there is none.
NEXT_DUE_IN = """
SELECT min(due_at) - coalesce($1::timestamptz, statement_timestamp()) FROM {schema}.cron_ticks
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
