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
SELECT id, version, interval_us, anchor_at, cron, zone, dst_gap, dst_fold, starts_at, ends_at, max_runs
FROM {schema}.cron_schedules
WHERE id = ANY ($1::text[])
"""

# One row per occurrence, whoever else makes it too: the unique key decides. Made after its jittered time but before its
# occurrence, a tick is due at the occurrence, so that no edit fires by itself. $5 is none, or a little more where
# another occurrence is due at the very same microsecond. What is made so late that it counts as missed ($6) is catching
# up, and goes out behind what is due now. A time of day moves only forward, by half its jitter and as much either way.
CREATE_TICKS = """
INSERT INTO {schema}.cron_ticks (id, schedule_id, schedule_name, workspace_id, queue_name, payload, scheduled_for,
    execute_at, due_at, created_at, version, priority, sink, delivery, overlap, turn)
SELECT made.id, schedule.id, schedule.name, schedule.workspace_id, schedule.queue_name, schedule.payload,
    made.scheduled_for, moved.execute_at,
    CASE WHEN moved.execute_at - $5::interval <= $4 AND made.scheduled_for > $4 THEN made.scheduled_for
        ELSE moved.execute_at END,
    $4, schedule.version, schedule.priority, schedule.sink, schedule.delivery, schedule.overlap,
    CASE WHEN made.scheduled_for < $4 - $6::interval THEN 2 ELSE 0 END
FROM unnest($1::text[], $2::text[], $3::timestamptz[]) AS made (id, schedule_id, scheduled_for)
JOIN {schema}.cron_schedules AS schedule ON schedule.id = made.schedule_id
CROSS JOIN LATERAL (
    SELECT CASE WHEN made.scheduled_for = schedule.anchor_at THEN made.scheduled_for
        WHEN schedule.cron IS NOT NULL THEN made.scheduled_for + schedule.jitter_us / 2 * interval '1 microsecond'
            + {schema}.cron_jitter(schedule.id, made.scheduled_for, schedule.jitter_us / 2)
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

# Due ticks of a sink, locked: one bounded scan of the index per priority, the most urgent first. Where messages of a
# schedule must not overlap, one ticker at a time deals with its ticks, and the others leave them: nobody waits. There
# are 1024 locks for all schedules together, because a server has room for some thousands.
_DUE = """
    SELECT found.ctid
    FROM (VALUES (0), (1), (2), (3)) AS level (priority)
    CROSS JOIN LATERAL (
        SELECT tick.ctid
        FROM {schema}.cron_ticks AS tick
        WHERE tick.sink = $5 AND tick.turn = $6 AND tick.priority = level.priority
            AND tick.due_at <= (SELECT due_until FROM pass)
            AND (tick.overlap = 'allow' OR pg_try_advisory_xact_lock(1668443247, hashtext(tick.schedule_id) & 1023))
        ORDER BY tick.due_at
        LIMIT $2
        FOR UPDATE SKIP LOCKED
    ) AS found
    LIMIT $2
"""

# Some of them, by their ids.
_CHOSEN = """
    SELECT tick.ctid
    FROM {schema}.cron_ticks AS tick
    WHERE tick.id = ANY ($7::text[]) AND tick.sink = $5 AND tick.turn = $6
        AND tick.due_at <= (SELECT due_until FROM pass)
        AND (tick.overlap = 'allow' OR pg_try_advisory_xact_lock(1668443247, hashtext(tick.schedule_id) & 1023))
    ORDER BY tick.due_at
    LIMIT $2
    FOR UPDATE SKIP LOCKED
"""

# Where messages may overlap, or nobody knows when one is finished: every tick becomes a message.
_WHATEVER_RUNS = """
entered AS (SELECT NULL::text AS id WHERE false),
put_back AS (SELECT NULL::text AS id WHERE false),
ended AS (SELECT *, 'enqueued' AS outcome FROM taken),
"""

# Where they may not, the sink's unique key over unfinished messages decides who enters. Of the others, one per schedule
# is put back to wait if its policy is queue_one, which a unique key decides too; the rest is over. A tick whose
# occurrence has fired before does not even try; should that have happened just now, the end of the statement refuses.
_UNLESS_UNFINISHED = """
limited AS (
    SELECT * FROM taken
    WHERE overlap <> 'allow' AND NOT EXISTS (
        SELECT FROM {schema}.cron_runs AS run
        WHERE run.schedule_id = taken.schedule_id AND run.scheduled_for = taken.scheduled_for)
),
entered AS (
    {insert_from_limited}
),
put_back AS (
    INSERT INTO {schema}.cron_ticks (id, schedule_id, schedule_name, workspace_id, queue_name, payload, scheduled_for,
        execute_at, due_at, created_at, version, origin, priority, attempts, sink, delivery, overlap, turn, recovery,
        waiting, error)
    SELECT id, schedule_id, schedule_name, workspace_id, queue_name, payload, scheduled_for,
        execute_at, pass.instant + greatest(interval '5 seconds', least(interval '1 minute',
            (pass.instant - execute_at) / 10)), created_at, version, origin, priority, attempts, sink,
        delivery, overlap, turn, recovery, true, error
    FROM limited, pass
    WHERE overlap = 'queue_one' AND message_id NOT IN (SELECT id FROM entered)
    ORDER BY schedule_id, scheduled_for
    ON CONFLICT DO NOTHING
    RETURNING id
),
ended AS (
    SELECT *,
        CASE WHEN overlap = 'allow' OR message_id IN (SELECT id FROM entered) THEN 'enqueued' ELSE 'overlapped' END
            AS outcome
    FROM taken
    WHERE id NOT IN (SELECT id FROM put_back)
),
"""

# Exactly once, in one statement: the ticks end, their runs pass the gate and the messages of those that did begin, all
# together or not at all. A worker that wakes up late finds nothing to delete, so it sends nothing; an occurrence that
# has fired before has its run, so its tick ends without a message. Ticks are deleted by ctid, because the rows are
# locked and no statistics can then make the planner read the whole table; IS TRUE keeps it from joining in a loop.
# A sink that swallows a message (a trigger of the user's can) is found out, and nothing of the batch happens.
_FIRE = """
WITH clock AS (SELECT coalesce($3::timestamptz, statement_timestamp()) AS instant),
pass AS (SELECT $1::text AS ticker_id, instant, coalesce($4::timestamptz, instant) AS due_until FROM clock),
due AS ({due}),
taken AS (
    DELETE FROM {schema}.cron_ticks
    WHERE ctid = ANY (ARRAY(SELECT ctid FROM due))
    RETURNING *, 'msg_' || substr(id, 6) AS message_id,
        (SELECT instant FROM clock) - CASE WHEN attempts = 0 AND NOT waiting THEN due_at ELSE execute_at END AS lateness
),
{overlap}
runs AS (
    INSERT INTO {schema}.cron_runs (schedule_id, scheduled_for, version, origin, outcome, reason, message_id, ended_at,
        lateness, attempts, ticker_id, recovered)
    SELECT schedule_id, scheduled_for, version, origin, outcome,
        CASE WHEN outcome = 'overlapped' THEN 'the message before it is unfinished' END,
        CASE WHEN outcome = 'enqueued' THEN message_id END, instant,
        CASE WHEN outcome = 'enqueued' THEN lateness END, attempts + 1, ticker_id, recovery
    FROM ended, pass
    ON CONFLICT (schedule_id, scheduled_for) DO NOTHING
    RETURNING message_id
),
judged AS (
    SELECT taken.*, (taken.message_id IN (SELECT message_id FROM runs WHERE message_id IS NOT NULL)) IS TRUE AS passed,
        taken.message_id IN (SELECT id FROM entered) AS entered, taken.id IN (SELECT id FROM put_back) AS put_back
    FROM taken
),
fired AS (SELECT * FROM judged WHERE passed AND NOT entered),
sent AS (
    {insert_from_fired}
)
SELECT judged.id, schedule_id, schedule_name, queue_name, workspace_id, scheduled_for, origin, lateness,
    CASE WHEN passed THEN 'enqueued' WHEN put_back THEN 'waiting' WHEN {limited} THEN 'overlapped' ELSE 'refused' END,
    due_until
FROM judged, pass
WHERE CASE
    WHEN (SELECT count(*) FROM sent) <> (SELECT count(*) FROM fired)
        THEN {schema}.cron_refuse('the sink did not take exactly one message per tick')
    WHEN entered AND NOT passed THEN {schema}.cron_refuse('the occurrence has just fired')
    ELSE true END
"""


def fire_statement(insert_from_fired: str, insert_from_limited: str | None, *, chosen: bool = False) -> str:
    """Fires due ticks of a sink, or chosen ones; without `insert_from_limited` nothing is held back by an overlap."""
    overlap, limited = _WHATEVER_RUNS, "false"
    if insert_from_limited is not None:
        overlap = _UNLESS_UNFINISHED.replace("{insert_from_limited}", insert_from_limited)
        limited = "judged.id IN (SELECT id FROM limited)"
    fire = _FIRE.replace("{due}", _CHOSEN if chosen else _DUE).replace("{overlap}", overlap)
    return fire.replace("{limited}", limited).replace("{insert_from_fired}", insert_from_fired)


# The batch that a firing would take, without taking it.
FIND_DUE_TICKS = """
SELECT found.id, found.attempts
FROM (VALUES (0), (1), (2), (3)) AS level (priority)
CROSS JOIN LATERAL (
    SELECT tick.id, tick.attempts
    FROM {schema}.cron_ticks AS tick
    WHERE tick.sink = $1 AND tick.turn = $2 AND tick.priority = level.priority AND tick.due_at <= $3
    ORDER BY tick.due_at
    LIMIT $4
) AS found
LIMIT $4
"""

# Ticks that wait for the end of their schedule's message are due: it has come, and tickers hear of it. One that is just
# being tried is skipped: should it come too early, it is tried again by itself.
RELEASE_WAITING = """
WITH held AS (
    SELECT ctid
    FROM {schema}.cron_ticks
    WHERE waiting AND schedule_id = ANY ($1::text[])
    FOR UPDATE SKIP LOCKED
),
released AS (
    UPDATE {schema}.cron_ticks
    SET due_at = coalesce($2::timestamptz, statement_timestamp())
    WHERE ctid = ANY (ARRAY(SELECT ctid FROM held))
    RETURNING 1
)
SELECT pg_notify($3, $4) FROM released LIMIT 1
"""

# How long until a sink's next tick is due, per turn; not positive if one is now. A turn without ticks has no row.
NEXT_DUE_IN = """
SELECT level.turn, min(first.due_at) - coalesce($1::timestamptz, statement_timestamp()) AS due_in
FROM (VALUES (0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3))
    AS level (turn, priority)
CROSS JOIN LATERAL (
    SELECT due_at
    FROM {schema}.cron_ticks AS tick
    WHERE tick.sink = $2 AND tick.turn = level.turn AND tick.priority = level.priority AND tick.due_at < 'infinity'
    ORDER BY due_at
    LIMIT 1
) AS first
GROUP BY level.turn
ORDER BY level.turn
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

# The partitions of runs and of events around now; made days and weeks ahead, so that nobody ever waits for one.
MAKE_PARTITIONS = """
WITH clock AS (SELECT (coalesce($3::timestamptz, statement_timestamp()) AT TIME ZONE 'UTC')::date AS today)
SELECT {schema}.cron_make_partition('runs', today + day) FROM clock, generate_series(-1, $1::int) AS day
UNION ALL
SELECT {schema}.cron_make_partition('events', today + 7 * week) FROM clock, generate_series(0, $2::int) AS week
"""

# Those of given days.
MAKE_PARTITIONS_OF = "SELECT {schema}.cron_make_partition('runs', day) FROM unnest($1::date[]) AS day"

# Those that the ticks need, should one be missing: a tick of long ago, say.
MAKE_PARTITIONS_OF_TICKS = """
SELECT {schema}.cron_make_partition('runs', day)
FROM (SELECT DISTINCT (scheduled_for AT TIME ZONE 'UTC')::date AS day FROM {schema}.cron_ticks) AS needed
"""
