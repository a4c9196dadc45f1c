"""The statements of CronRepository about ticks and runs, each with what it guarantees.

Those that look at the time take it as an argument; NULL means the database's clock, which is what the product uses.
"""

# Takes schedules of this process's shard whose next occurrence falls inside the window, or one of them alone; two
# managers never wait for each other. The shard's hash is md5's, which no server version changes. A process that hangs
# with these locks loses its session, and they are free again.
LOCK_CURSORS_IN_WINDOW = """
WITH clock AS (
    SELECT coalesce($5::timestamptz, statement_timestamp()) AS instant,
        set_config('idle_in_transaction_session_timeout', $6, true)
)
SELECT schedule_id, next_tick_needed_at, planned, (SELECT instant FROM clock) AS instant
FROM {schema}.cron_schedule_cursors
WHERE next_tick_needed_at < (SELECT instant + $1::interval FROM clock)
    AND NOT broken
    AND ($3::int = 1 OR ('x' || left(md5(schedule_id), 8))::bit(32)::bigint % $3 = $4)
    AND ($7::text IS NULL OR schedule_id = $7)
ORDER BY next_tick_needed_at
LIMIT $2
FOR UPDATE SKIP LOCKED
"""

# Whether there is a cursor in the window: asked first, so that a pass with nothing to do costs one statement.
CURSOR_IN_WINDOW = """
SELECT EXISTS (
    SELECT FROM {schema}.cron_schedule_cursors
    WHERE next_tick_needed_at < coalesce($4::timestamptz, statement_timestamp()) + $1::interval
        AND NOT broken
        AND ($2::int = 1 OR ('x' || left(md5(schedule_id), 8))::bit(32)::bigint % $2 = $3))
"""

# The rules of the schedules taken. A statement of its own, because only a snapshot made after the locks is sure to
# show the edit that moved the cursor.
RULES = """
SELECT id, version, interval_us, anchor_at, starts_at, ends_at, max_runs
FROM {schema}.cron_schedules
WHERE id = ANY ($1::text[])
"""

# One row per occurrence, whoever else makes it too: the unique key decides. Made after its jittered time but before its
# occurrence, a tick is due at the occurrence, so that no edit fires by itself. $5 is none, or a little more where
# another occurrence is due at the very same microsecond.
CREATE_TICKS = """
INSERT INTO {schema}.cron_ticks (id, schedule_id, schedule_name, workspace_id, queue_name, payload, scheduled_for,
    execute_at, due_at, created_at, version, priority)
SELECT made.id, schedule.id, schedule.name, schedule.workspace_id, schedule.queue_name, schedule.payload,
    made.scheduled_for, moved.execute_at,
    CASE WHEN moved.execute_at - $5::interval <= $4 AND made.scheduled_for > $4 THEN made.scheduled_for
        ELSE moved.execute_at END,
    $4, schedule.version, schedule.priority
FROM unnest($1::text[], $2::text[], $3::timestamptz[]) AS made (id, schedule_id, scheduled_for)
JOIN {schema}.cron_schedules AS schedule ON schedule.id = made.schedule_id
CROSS JOIN LATERAL (
    SELECT CASE WHEN made.scheduled_for = schedule.anchor_at THEN made.scheduled_for
        ELSE greatest(made.scheduled_for + {schema}.cron_jitter(schedule.id, made.scheduled_for, schedule.jitter_us),
            schedule.starts_at)
        END + $5::interval AS execute_at
) AS moved
ON CONFLICT ON CONSTRAINT cron_ticks_execution_key DO NOTHING
RETURNING schedule_id, scheduled_for, due_at - $4 AS due_in
"""

# Which occurrences have a tick.
FIND_TICKS = """
SELECT tick.schedule_id, tick.scheduled_for
FROM unnest($1::text[], $2::timestamptz[]) AS wanted (schedule_id, scheduled_for)
JOIN {schema}.cron_ticks AS tick USING (schedule_id, scheduled_for)
"""

UPDATE_NEXT_TICK_NEEDED = """
UPDATE {schema}.cron_schedule_cursors AS cursor
SET next_tick_needed_at = made.next_needed, planned = made.planned
FROM unnest($1::text[], $2::timestamptz[], $3::bigint[]) AS made (schedule_id, next_needed, planned)
WHERE cursor.schedule_id = made.schedule_id
"""

# Due ticks, locked: one bounded scan of the index per priority, the most urgent first.
_DUE = """
    SELECT found.ctid
    FROM (VALUES (0), (1), (2), (3)) AS level (priority)
    CROSS JOIN LATERAL (
        SELECT tick.ctid
        FROM {schema}.cron_ticks AS tick
        WHERE tick.priority = level.priority AND tick.due_at <= (SELECT due_until FROM pass)
        ORDER BY tick.due_at
        LIMIT $2
        FOR UPDATE SKIP LOCKED
    ) AS found
    LIMIT $2
"""

# Exactly once, in one statement: the ticks end, their runs pass the gate and the messages of those that did begin, all
# together or not at all. A worker that wakes up late finds nothing to delete, so it sends nothing; an occurrence that
# has fired before has its run, so its tick ends without a message. Ticks are deleted by ctid, because the rows are
# locked and no statistics can then make the planner read the whole table; IS TRUE keeps it from joining in a loop.
FIRE_DUE_TICKS = (
    """
WITH clock AS (SELECT coalesce($3::timestamptz, statement_timestamp()) AS instant),
pass AS (SELECT $1::text AS ticker_id, instant, coalesce($4::timestamptz, instant) AS due_until FROM clock),
due AS ("""
    + _DUE
    + """),
taken AS (
    DELETE FROM {schema}.cron_ticks
    WHERE ctid = ANY (ARRAY(SELECT ctid FROM due))
    RETURNING *, 'msg_' || substr(id, 6) AS message_id,
        (SELECT instant FROM clock) - CASE WHEN attempts = 0 THEN due_at ELSE execute_at END AS lateness
),
runs AS (
    INSERT INTO {schema}.cron_runs (schedule_id, scheduled_for, version, origin, outcome, message_id, ended_at,
        lateness, attempts, ticker_id)
    SELECT schedule_id, scheduled_for, version, origin, 'enqueued', message_id, instant, lateness, attempts + 1,
        ticker_id
    FROM taken, pass
    ON CONFLICT (schedule_id, scheduled_for) DO NOTHING
    RETURNING message_id
),
judged AS (
    SELECT taken.*, (taken.message_id IN (SELECT message_id FROM runs)) IS TRUE AS passed FROM taken
),
fired AS (SELECT * FROM judged WHERE passed),
sent AS (
    {insert_from_fired}
)
SELECT judged.id, schedule_id, schedule_name, queue_name, workspace_id, scheduled_for, origin, lateness, passed,
    due_until
FROM judged, pass
"""
)

# How long until the next tick is due; not positive if one is now, NULL if there is none.
NEXT_DUE_IN = """
SELECT min(first.due_at) - coalesce($1::timestamptz, statement_timestamp())
FROM (VALUES (0), (1), (2), (3)) AS level (priority)
CROSS JOIN LATERAL (
    SELECT due_at FROM {schema}.cron_ticks AS tick WHERE tick.priority = level.priority ORDER BY due_at LIMIT 1
) AS first
"""

# Leases due ticks instead, for a queue that is not in this database: due again when the lease ends.
LEASE_DUE_TICKS = (
    """
WITH clock AS (SELECT coalesce($3::timestamptz, statement_timestamp()) AS instant),
pass AS (SELECT instant AS due_until, instant + $4::interval AS leased_until FROM clock),
due AS ("""
    + _DUE
    + """)
UPDATE {schema}.cron_ticks AS tick
SET leased_by = $1, leased_at = pass.due_until, leased_until = pass.leased_until, due_at = pass.leased_until,
    attempts = attempts + 1
FROM pass
WHERE tick.ctid = ANY (ARRAY(SELECT ctid FROM due))
RETURNING tick.id, schedule_id, schedule_name, workspace_id, queue_name, payload::text AS payload, scheduled_for,
    execute_at, origin, attempts, tick.leased_until
"""
)

# Only the owner of a live lease may end its tick.
DELETE_TICK = """
DELETE FROM {schema}.cron_ticks
WHERE id = $1 AND leased_by = $2 AND leased_until > coalesce($3::timestamptz, statement_timestamp())
RETURNING 1
"""

# Ticks whose last attempt ran out: they end, and the ledger says so. What may be tried again is left alone.
DELETE_EXPIRED_TICKS = """
WITH clock AS (SELECT coalesce($4::timestamptz, statement_timestamp()) AS instant),
expired AS (
    SELECT ctid
    FROM {schema}.cron_ticks
    WHERE leased_until < (SELECT instant - $1::interval FROM clock) AND attempts >= $2
    ORDER BY leased_until
    LIMIT $3
    FOR UPDATE SKIP LOCKED
),
taken AS (
    DELETE FROM {schema}.cron_ticks WHERE ctid = ANY (ARRAY(SELECT ctid FROM expired)) RETURNING *
),
runs AS (
    INSERT INTO {schema}.cron_runs (schedule_id, scheduled_for, version, origin, outcome, reason, ended_at, attempts,
        ticker_id)
    SELECT schedule_id, scheduled_for, version, origin, 'expired', 'the lease of the last attempt ran out', instant,
        attempts, leased_by
    FROM taken, clock
    ON CONFLICT (schedule_id, scheduled_for) DO NOTHING
)
SELECT id FROM taken
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

# The ledger's partitions around now; made days ahead, so that no firing ever waits for one.
MAKE_PARTITIONS = """
SELECT {schema}.cron_make_run_partition(today + day)
FROM (SELECT (coalesce($2::timestamptz, statement_timestamp()) AT TIME ZONE 'UTC')::date AS today) AS clock
CROSS JOIN generate_series(-1, $1::int) AS day
"""

# Those of given days.
MAKE_PARTITIONS_OF = "SELECT {schema}.cron_make_run_partition(day) FROM unnest($1::date[]) AS day"

# Those that due ticks need, should one be missing: a tick of long ago, say.
MAKE_PARTITIONS_OF_DUE_TICKS = """
SELECT {schema}.cron_make_run_partition(day)
FROM (
    SELECT DISTINCT (scheduled_for AT TIME ZONE 'UTC')::date AS day
    FROM {schema}.cron_ticks
    WHERE due_at <= coalesce($1::timestamptz, statement_timestamp())
) AS needed
"""
