"""The statements of CronRepository about ticks and runs, each with what it guarantees.

Those that look at the time take it as an argument; NULL means the database's clock, which is what the product uses.
"""

from cron_ticks.events import EventLevel, includes

# Takes schedules of this process's shard whose next occurrence falls inside the window; two managers never wait for
# each other. The shard's hash is md5's, which no server version changes. A process that hangs with these locks loses
# its session, and they are free again.
LOCK_CURSORS_IN_WINDOW = """
WITH clock AS (
    SELECT coalesce($5::timestamptz, statement_timestamp()) AS instant,
        set_config('idle_in_transaction_session_timeout', $6, true)
)
SELECT schedule_id, next_tick_needed_at, planned, broken, (SELECT instant FROM clock) AS instant
FROM {schema}.cron_schedule_cursors
WHERE next_tick_needed_at < (SELECT instant + $1::interval FROM clock)
    AND NOT broken
    AND ($3::int = 1 OR ('x' || left(md5(schedule_id), 8))::bit(32)::bigint % $3 = $4)
ORDER BY next_tick_needed_at
LIMIT $2
FOR UPDATE SKIP LOCKED
"""

# Takes these schedules, wherever their next occurrence is.
LOCK_CURSORS_OF = """
WITH clock AS (
    SELECT coalesce($2::timestamptz, statement_timestamp()) AS instant,
        set_config('idle_in_transaction_session_timeout', $3, true)
)
SELECT schedule_id, next_tick_needed_at, planned, broken, (SELECT instant FROM clock) AS instant
FROM {schema}.cron_schedule_cursors
WHERE schedule_id = ANY ($1::text[])
ORDER BY schedule_id
FOR UPDATE SKIP LOCKED
"""

# Whether there is a cursor in the window, and whether there are backfills: asked first, so that a pass with nothing to
# do costs one statement.
CURSOR_IN_WINDOW = """
SELECT EXISTS (
        SELECT FROM {schema}.cron_schedule_cursors
        WHERE next_tick_needed_at < coalesce($4::timestamptz, statement_timestamp()) + $1::interval
            AND NOT broken
            AND ($2::int = 1 OR ('x' || left(md5(schedule_id), 8))::bit(32)::bigint % $2 = $3)) AS ticks,
    EXISTS (SELECT FROM {schema}.cron_backfills WHERE due_at IS NOT NULL) AS backfills
"""

# The rules of the schedules taken. A statement of its own, because only a snapshot made after the locks is sure to
# show the edit that moved the cursor.
RULES = """
SELECT id, version, interval_us, anchor_at, cron, zone, dst_gap, dst_fold, starts_at, ends_at, max_runs, catch_up
FROM {schema}.cron_schedules
WHERE id = ANY ($1::text[])
"""

# One row per occurrence, whoever else makes it too: the unique key decides. Made after its jittered time, a tick is due
# at its occurrence, if that is later: so no edit fires by itself, and no tick is late before it is made. $5 is none, or
# a little more where another occurrence is due at the very same microsecond. What is made up though it is late ($6) is
# catching up: it goes out behind what is due now, at its own time ($7) if it is paced. A time of day moves only
# forward, by half its jitter and as much either way.
CREATE_TICKS = """
INSERT INTO {schema}.cron_ticks (id, schedule_id, schedule_name, workspace_id, queue_name, payload, scheduled_for,
    execute_at, due_at, created_at, version, priority, sink, delivery, overlap, turn, fire_before)
SELECT made.id, schedule.id, schedule.name, schedule.workspace_id, schedule.queue_name, schedule.payload,
    made.scheduled_for, moved.execute_at, coalesce(made.paced_until, expected.due_at),
    $4, schedule.version, schedule.priority, schedule.sink, schedule.delivery, schedule.overlap,
    CASE WHEN made.scheduled_for < $4 - $6::interval THEN 2 ELSE 0 END,
    expected.due_at + schedule.misfire_grace_us * interval '1 microsecond'
FROM unnest($1::text[], $2::text[], $3::timestamptz[], $7::timestamptz[])
    AS made (id, schedule_id, scheduled_for, paced_until)
JOIN {schema}.cron_schedules AS schedule ON schedule.id = made.schedule_id
CROSS JOIN LATERAL (
    SELECT CASE WHEN made.scheduled_for = schedule.anchor_at THEN made.scheduled_for
        WHEN schedule.cron IS NOT NULL THEN made.scheduled_for + schedule.jitter_us / 2 * interval '1 microsecond'
            + {schema}.cron_jitter(schedule.id, made.scheduled_for, schedule.jitter_us / 2)
        ELSE greatest(made.scheduled_for + {schema}.cron_jitter(schedule.id, made.scheduled_for, schedule.jitter_us),
            schedule.starts_at)
        END + $5::interval AS execute_at
) AS moved
CROSS JOIN LATERAL (
    SELECT CASE WHEN moved.execute_at - $5::interval <= $4 THEN greatest(moved.execute_at, made.scheduled_for)
        ELSE moved.execute_at END AS due_at
) AS expected
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

# Schedules of a sink whose ticks nobody fired in time ($2).
LATE_SCHEDULES = """
WITH clock AS (SELECT coalesce($4::timestamptz, statement_timestamp()) AS instant)
SELECT DISTINCT found.schedule_id
FROM (VALUES (0), (1), (2), (3)) AS level (priority)
CROSS JOIN LATERAL (
    SELECT tick.schedule_id
    FROM {schema}.cron_ticks AS tick
    WHERE tick.sink = $1 AND tick.turn = 0 AND tick.priority = level.priority
        AND tick.due_at < (SELECT instant - $2::interval FROM clock)
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

# Due ticks of a sink, locked: one bounded scan of the index per priority, the most urgent first. Of those that are due
# now, what lies below the floor is late: it is for a catch-up policy to decide. Where messages of a
# schedule must not overlap, one ticker at a time deals with its ticks, and the others leave them: nobody waits. There
# are 1024 locks for all schedules together, because a server has room for some thousands.
_DUE = """
    SELECT found.ctid
    FROM (VALUES (0), (1), (2), (3)) AS level (priority)
    CROSS JOIN LATERAL (
        SELECT tick.ctid
        FROM {schema}.cron_ticks AS tick
        WHERE tick.sink = $5 AND tick.turn = $6 AND tick.priority = level.priority
            AND tick.due_at <= (SELECT due_until FROM pass) AND tick.due_at >= (SELECT floor FROM pass)
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
    WHERE tick.id = ANY ($8::text[]) AND tick.sink = $5 AND tick.turn = $6
        AND tick.due_at <= (SELECT due_until FROM pass) AND tick.due_at >= (SELECT floor FROM pass)
        AND (tick.overlap = 'allow' OR pg_try_advisory_xact_lock(1668443247, hashtext(tick.schedule_id) & 1023))
    ORDER BY tick.due_at
    LIMIT $2
    FOR UPDATE SKIP LOCKED
"""

# Where messages may overlap, or nobody knows when one is finished: every tick becomes a message.
_WHATEVER_RUNS = """
entered AS (SELECT NULL::text AS id WHERE false),
put_back AS (SELECT NULL::text AS id WHERE false),
ended AS (SELECT *, CASE WHEN too_late THEN 'missed' ELSE 'enqueued' END AS outcome FROM taken),
"""

# Where they may not, the sink's unique key over unfinished messages decides who enters. Of the others, one per schedule
# is put back to wait if its policy is queue_one, which a unique key decides too; the rest is over. A tick whose
# occurrence has fired before does not even try; should that have happened just now, the end of the statement refuses.
_UNLESS_UNFINISHED = """
limited AS (
    SELECT taken.*
    FROM taken
    LEFT JOIN {schema}.cron_fired_before(
        ARRAY(SELECT schedule_id FROM taken WHERE overlap <> 'allow'),
        ARRAY(SELECT scheduled_for FROM taken WHERE overlap <> 'allow')) AS before
        ON before.schedule_id = taken.schedule_id AND before.scheduled_for = taken.scheduled_for
    WHERE overlap <> 'allow' AND NOT too_late AND before.schedule_id IS NULL
),
entered AS (
    {insert_from_limited}
),
put_back AS (
    INSERT INTO {schema}.cron_ticks (id, schedule_id, schedule_name, workspace_id, queue_name, payload, scheduled_for,
        execute_at, due_at, created_at, version, origin, priority, attempts, sink, delivery, overlap, turn, recovery,
        waiting, error, fire_before)
    SELECT id, schedule_id, schedule_name, workspace_id, queue_name, payload, scheduled_for,
        execute_at, pass.instant + greatest(interval '5 seconds', least(interval '1 minute',
            (pass.instant - execute_at) / 10)), created_at, version, origin, priority, attempts, sink,
        delivery, overlap, turn, recovery, true, error, fire_before
    FROM limited, pass
    WHERE overlap = 'queue_one' AND message_id NOT IN (SELECT id FROM entered)
    ORDER BY schedule_id, scheduled_for
    ON CONFLICT DO NOTHING
    RETURNING id
),
ended AS (
    SELECT *,
        CASE WHEN too_late THEN 'missed'
            WHEN overlap = 'allow' OR message_id IN (SELECT id FROM entered) THEN 'enqueued'
            ELSE 'overlapped' END AS outcome
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
pass AS (
    SELECT $1::text AS ticker_id, instant, coalesce($4::timestamptz, instant) AS due_until,
        CASE WHEN $6 = 0 THEN instant - $7::interval ELSE '-infinity' END AS floor
    FROM clock
),
due AS ({due}),
taken AS (
    DELETE FROM {schema}.cron_ticks
    WHERE ctid = ANY (ARRAY(SELECT ctid FROM due))
    RETURNING *, 'msg_' || substr(id, 6) AS message_id,
        (SELECT instant FROM clock) - CASE WHEN turn = 0 AND attempts = 0 AND NOT waiting
            THEN due_at ELSE execute_at END AS lateness,
        (attempts = 0 AND NOT waiting AND fire_before < (SELECT instant FROM clock)) IS TRUE AS too_late
),
{overlap}
runs AS (
    INSERT INTO {schema}.cron_runs (schedule_id, scheduled_for, version, origin, outcome, reason, message_id, ended_at,
        lateness, attempts, ticker_id, recovered)
    SELECT schedule_id, scheduled_for, version, origin, outcome,
        CASE outcome WHEN 'overlapped' THEN 'the message before it is unfinished'
            WHEN 'missed' THEN 'later than its misfire_grace' END,
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
{events}
sent AS (
    {insert_from_fired}
)
SELECT judged.id, schedule_id, schedule_name, queue_name, workspace_id, scheduled_for, origin, lateness,
    CASE WHEN passed THEN 'enqueued' WHEN too_late THEN 'missed' WHEN put_back THEN 'waiting'
        WHEN {limited} THEN 'overlapped' ELSE 'refused' END,
    due_until
FROM judged, pass
WHERE CASE
    WHEN (SELECT count(*) FROM sent) <> (SELECT count(*) FROM fired)
        THEN {schema}.cron_refuse('the sink did not take exactly one message per tick')
    WHEN entered AND NOT passed THEN {schema}.cron_refuse('the occurrence has just fired')
    ELSE true END
"""


# Events of a firing: ticks that an overlap ended, and those that begin to wait for the end of the message before.
_NOTE_HELD_BACK = """
noted_held_back AS (
    INSERT INTO {schema}.execution_events (event, schedule_id, message_id, worker, data)
    SELECT CASE WHEN id IN (SELECT id FROM put_back) THEN 'deferred' ELSE 'skipped' END, schedule_id, message_id,
        ticker_id, jsonb_build_object(
            'scheduled_for', to_char(scheduled_for AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
            'reason', 'the message before it is unfinished')
    FROM limited, pass
    WHERE message_id NOT IN (SELECT id FROM entered) AND NOT (waiting AND id IN (SELECT id FROM put_back))
    ORDER BY due_at
),
"""

# And those that became messages.
_NOTE_SENT = """
noted_sent AS (
    INSERT INTO {schema}.execution_events (event, schedule_id, message_id, worker, data)
    SELECT 'sent', schedule_id, message_id, ticker_id, jsonb_build_object(
        'scheduled_for', to_char(scheduled_for AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'))
    FROM judged, pass
    WHERE passed
    ORDER BY due_at
),
"""


def fire_statement(
    insert_from_fired: str, insert_from_limited: str | None, *, events: EventLevel, chosen: bool = False
) -> str:
    """Fires due ticks of a sink, or chosen ones; without `insert_from_limited` nothing is held back by an overlap."""
    overlap, limited = _WHATEVER_RUNS, "false"
    noted = _NOTE_SENT if includes(events, "all") else ""
    if insert_from_limited is not None:
        overlap = _UNLESS_UNFINISHED.replace("{insert_from_limited}", insert_from_limited)
        limited = "judged.id IN (SELECT id FROM limited)"
        noted += _NOTE_HELD_BACK if includes(events, "changes") else ""
    fire = _FIRE.replace("{due}", _CHOSEN if chosen else _DUE).replace("{overlap}", overlap).replace("{events}", noted)
    return fire.replace("{limited}", limited).replace("{insert_from_fired}", insert_from_fired)


# The batch that a firing would take, without taking it.
FIND_DUE_TICKS = """
SELECT found.id, found.attempts
FROM (VALUES (0), (1), (2), (3)) AS level (priority)
CROSS JOIN LATERAL (
    SELECT tick.id, tick.attempts
    FROM {schema}.cron_ticks AS tick
    WHERE tick.sink = $1 AND tick.turn = $2 AND tick.priority = level.priority AND tick.due_at <= $3
        AND tick.due_at >= CASE WHEN $2 = 0 THEN $3 - $5::interval ELSE '-infinity' END
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

DELETE_ORPHANED_TICKS_OF = """
DELETE FROM {schema}.cron_ticks
WHERE schedule_id = ANY ($1::text[])
    AND NOT EXISTS (SELECT FROM {schema}.cron_schedules WHERE id = cron_ticks.schedule_id)
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
