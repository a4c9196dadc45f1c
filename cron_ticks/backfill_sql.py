"""The statements of BackfillRepository, each with what it guarantees.

As elsewhere, the time is an argument: NULL means the database's clock. Locks are taken in the order of everybody who
changes a schedule, and a backfill's own row comes after its schedule's cursor.
"""

# The columns of a backfill, with its ticks that wait.
_COLUMNS = """
SELECT id, schedule_id, start_at, end_at, next_at, total, made, skipped,
    (
        SELECT count(*)
        FROM {schema}.cron_ticks AS tick
        WHERE tick.schedule_id = backfill.schedule_id AND tick.origin = 'backfill'
            AND tick.scheduled_for >= backfill.start_at AND tick.scheduled_for < backfill.next_at
    ) AS pending,
    per_minute, created_at, created_by, ended_at, outcome, reason
"""
GET_BACKFILL = _COLUMNS + "FROM {schema}.cron_backfills AS backfill WHERE id = $1"

# Those of a schedule, or all, the latest first; `$2` is the last id of the page before.
LIST_BACKFILLS = (
    _COLUMNS
    + """
FROM {schema}.cron_backfills AS backfill
WHERE ($1::text IS NULL OR schedule_id = $1)
    AND ($2::text IS NULL OR (created_at, id) < (SELECT created_at, id FROM {schema}.cron_backfills WHERE id = $2))
ORDER BY created_at DESC, id DESC
LIMIT $3
"""
)

# The time, and since when the ledger is complete by what was removed from it.
HORIZON = """
SELECT coalesce($1::timestamptz, statement_timestamp()) AS instant,
    (SELECT kept_since FROM {schema}.cron_retention WHERE kind = 'runs') AS kept_since
"""

# Whoever has this lock is alone with the schedule: managers, edits and other backfills of it take it too. A backfill
# that is nobody's business in particular leaves it to whoever has it.
LOCK_CURSOR = """
SELECT next_tick_needed_at FROM {schema}.cron_schedule_cursors WHERE schedule_id = $1 FOR UPDATE
"""
TRY_LOCK_CURSOR = """
SELECT next_tick_needed_at FROM {schema}.cron_schedule_cursors WHERE schedule_id = $1 FOR UPDATE SKIP LOCKED
"""
SCHEDULE_EXISTS = "SELECT EXISTS (SELECT FROM {schema}.cron_schedules WHERE id = $1)"

CREATE_BACKFILL = """
INSERT INTO {schema}.cron_backfills (id, schedule_id, start_at, end_at, next_at, per_minute, total, created_at,
    created_by, due_at)
VALUES ($1, $2, $3, $4, $3, $5, $6, $7, $8, $7)
"""

# The backfills that have not ended, by when to go on with them.
NEXT_BACKFILLS = """
SELECT id, schedule_id, due_at - coalesce($2::timestamptz, statement_timestamp()) AS due_in
FROM {schema}.cron_backfills
WHERE due_at IS NOT NULL
ORDER BY due_at
LIMIT $1
"""

# One step at a time, and only when it is due: whoever waited for another's step finds that there is nothing to do.
LOCK_BACKFILL = """
SELECT *, coalesce($2::timestamptz, statement_timestamp()) AS instant
FROM {schema}.cron_backfills
WHERE id = $1 AND due_at <= coalesce($2::timestamptz, statement_timestamp())
FOR UPDATE
"""

# All ticks of a schedule. Asked before the ledger: what has fired in between is in the ledger then.
TICKS_OF = """
SELECT scheduled_for, origin, nullif(due_at, 'infinity') AS due_at
FROM {schema}.cron_ticks
WHERE schedule_id = $1
"""

# What the ledger has of occurrences. The range is for the partitions' sake.
RUNS_OF = """
SELECT scheduled_for, outcome = 'missed' AS missed
FROM {schema}.cron_runs
WHERE schedule_id = $1 AND scheduled_for = ANY ($2::timestamptz[]) AND scheduled_for BETWEEN $3 AND $4
"""

# Stretches of missed occurrences that reach into a range, each with the rule that it follows.
STRETCHES = """
SELECT run.missed_since AS first, run.scheduled_for AS last, run.occurrences AS count, version.anchor_at,
    version.interval_us, version.cron, version.zone, version.dst_gap, version.dst_fold, version.starts_at,
    version.ends_at
FROM {schema}.cron_runs AS run
LEFT JOIN {schema}.cron_schedule_versions AS version
    ON version.schedule_id = run.schedule_id AND version.version = run.version
WHERE run.schedule_id = $1 AND run.missed_since IS NOT NULL AND run.missed_since <= $3 AND run.scheduled_for >= $2
ORDER BY run.scheduled_for
"""

# Single occurrences are missed no more: their ticks come in the same transaction.
FORGET_MISSED = """
DELETE FROM {schema}.cron_runs
WHERE schedule_id = $1 AND scheduled_for = ANY ($2::timestamptz[]) AND scheduled_for BETWEEN $3 AND $4
    AND outcome = 'missed' AND missed_since IS NULL
"""

# Some of a stretch are missed no more: what is left of it takes its place.
SPLIT_STRETCH = """
WITH split AS (
    DELETE FROM {schema}.cron_runs
    WHERE schedule_id = $1 AND scheduled_for = $2 AND missed_since IS NOT NULL
    RETURNING *
)
INSERT INTO {schema}.cron_runs (schedule_id, scheduled_for, version, origin, outcome, reason, ended_at, attempts,
    ticker_id, missed_since, occurrences)
SELECT schedule_id, piece.last, version, origin, outcome, reason, ended_at, attempts, ticker_id,
    CASE WHEN piece.count > 1 THEN piece.first END, piece.count
FROM split, unnest($3::timestamptz[], $4::timestamptz[], $5::bigint[]) AS piece (first, last, count)
"""

# Ticks of occurrences of the past, as the schedule is now, behind what is due now. They are due at their place in the
# backfill's pace, or a little later ($5) where another tick is due at the very same microsecond: age and lateness count
# from there. Where messages must not overlap, each waits for the unfinished one instead of being passed over.
MAKE_TICKS = """
INSERT INTO {schema}.cron_ticks (id, schedule_id, schedule_name, workspace_id, queue_name, payload, scheduled_for,
    execute_at, due_at, created_at, version, origin, priority, sink, delivery, overlap, turn)
SELECT made.id, schedule.id, schedule.name, schedule.workspace_id, schedule.queue_name, schedule.payload,
    made.scheduled_for, made.due_at + $5::interval, made.due_at + $5::interval, $6, schedule.version, 'backfill',
    schedule.priority, schedule.sink, schedule.delivery,
    CASE WHEN schedule.overlap = 'allow' THEN 'allow' ELSE 'queue_one' END, 2
FROM unnest($2::text[], $3::timestamptz[], $4::timestamptz[]) AS made (id, scheduled_for, due_at)
JOIN {schema}.cron_schedules AS schedule ON schedule.id = $1
ON CONFLICT ON CONSTRAINT cron_ticks_execution_key DO NOTHING
RETURNING scheduled_for
"""

# Position and ticks change in one transaction, so that a crash anywhere loses and repeats nothing.
ADVANCE_BACKFILL = """
UPDATE {schema}.cron_backfills
SET next_at = $2, made = made + $3, skipped = skipped + $4, total = made + skipped + $5, due_at = $6
WHERE id = $1
"""

# Ends once: whoever comes later changes nothing.
END_BACKFILL = """
UPDATE {schema}.cron_backfills
SET due_at = NULL, ended_at = coalesce($4::timestamptz, statement_timestamp()), outcome = $2, reason = $3
WHERE id = $1 AND ended_at IS NULL
RETURNING 1
"""

# Of schedules whose ticks are dropped.
CANCEL_BACKFILLS_OF = """
UPDATE {schema}.cron_backfills
SET due_at = NULL, ended_at = $3, outcome = 'cancelled', reason = $2
WHERE schedule_id = ANY ($1::text[]) AND ended_at IS NULL
"""
