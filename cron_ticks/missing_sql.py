"""The statements about ticks that nobody fired in time, and about occurrences that nobody made.

As elsewhere, the time is an argument: NULL means the database's clock.
"""

# Schedules of a sink whose ticks nobody fired in time ($2), from where nothing is left below ($5).
LATE_SCHEDULES = """
WITH clock AS (SELECT coalesce($4::timestamptz, statement_timestamp()) AS instant)
SELECT DISTINCT found.schedule_id
FROM unnest(ARRAY[0, 1, 2, 3], $5::timestamptz[]) AS level (priority, floor)
CROSS JOIN LATERAL (
    SELECT tick.schedule_id
    FROM {schema}.cron_ticks AS tick
    WHERE tick.sink = $1 AND tick.turn = 0 AND tick.priority = level.priority
        AND tick.due_at < (SELECT instant - $2::interval FROM clock)
        AND tick.due_at >= coalesce(level.floor, '-infinity')
    ORDER BY tick.due_at
    LIMIT $3
) AS found
"""

# Ticks of these schedules, whose cursors are held, that nobody fired in time, and those that are made up already but
# not fired: catch-up policies decide about all of them together. Not what somebody has begun with. Of each schedule no
# more than $3, the oldest: a sink that nobody served for a week has very many.
LATE_TICKS = """
SELECT found.*
FROM unnest($1::text[]) AS given (schedule_id)
CROSS JOIN LATERAL (
    SELECT tick.id, tick.schedule_id, tick.scheduled_for, tick.turn
    FROM {schema}.cron_ticks AS tick
    WHERE tick.schedule_id = given.schedule_id AND tick.execute_at < $2
        AND (tick.turn = 0 AND tick.due_at < $2 OR tick.turn = 2)
        AND tick.origin = 'schedule' AND tick.attempts = 0 AND NOT tick.waiting
    ORDER BY tick.execute_at
    LIMIT $3
    FOR UPDATE SKIP LOCKED
) AS found
ORDER BY found.schedule_id, found.scheduled_for
"""

# Late ticks that are missed end, and the ledger says so.
MISS_TICKS = """
WITH gone AS (
    DELETE FROM {schema}.cron_ticks AS tick
    USING unnest($1::text[], $2::text[]) AS given (id, reason)
    WHERE tick.id = given.id
    RETURNING tick.*, given.reason
)
INSERT INTO {schema}.cron_runs (schedule_id, scheduled_for, version, origin, outcome, reason, ended_at, attempts)
SELECT schedule_id, scheduled_for, version, origin, 'missed', reason, $3, attempts
FROM gone
ON CONFLICT (schedule_id, scheduled_for) DO NOTHING
"""

# Those that are made up go out behind what is due now, at their own time if they are paced.
KEEP_TICKS = """
UPDATE {schema}.cron_ticks AS tick
SET turn = 2, due_at = coalesce(given.paced_until, tick.due_at)
FROM unnest($1::text[], $2::timestamptz[]) AS given (id, paced_until)
WHERE tick.id = given.id AND tick.turn = 0
"""

# What else is late is nobody's to decide about: what was begun is a retry, what waits for the end of a message and what
# was asked for by hand is caught up with.
SET_ASIDE = """
WITH held AS (
    SELECT ctid
    FROM {schema}.cron_ticks
    WHERE schedule_id = ANY ($1::text[]) AND turn = 0 AND due_at < $2
        AND (attempts > 0 OR waiting OR origin <> 'schedule')
    FOR UPDATE SKIP LOCKED
)
UPDATE {schema}.cron_ticks
SET turn = CASE WHEN attempts > 0 THEN 1 ELSE 2 END
WHERE ctid = ANY (ARRAY(SELECT ctid FROM held))
"""

# Occurrences in a row that nobody made and that are not made up: one row, under the last of them, unless that has one.
MISS_OCCURRENCES = """
INSERT INTO {schema}.cron_runs (schedule_id, scheduled_for, version, origin, outcome, reason, ended_at, attempts,
    missed_since, occurrences)
SELECT given.schedule_id, given.last, given.version, 'schedule', 'missed', given.reason, $7, 0,
    CASE WHEN given.occurrences > 1 THEN given.first END, given.occurrences
FROM unnest($1::text[], $2::int[], $3::timestamptz[], $4::timestamptz[], $5::bigint[], $6::text[])
    AS given (schedule_id, version, first, last, occurrences, reason)
ON CONFLICT (schedule_id, scheduled_for) DO NOTHING
RETURNING schedule_id
"""
