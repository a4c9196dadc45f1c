"""The statements of CronRepository about ticks and runs, each with what it guarantees.

Those that look at the time take it as an argument; NULL means the database's clock, which is what the product uses.
"""

from cron_ticks.events import EventLevel, includes

# Due ticks of a sink, locked: one bounded scan of the index per priority, the most urgent first, from where the caller
# knows that nothing is left below. Of those that are due now, what is older than $7 is late: a catch-up policy decides
# about it. Where messages of a schedule must not overlap, one ticker at a time deals with its ticks, and the others
# leave them: nobody waits. There are 1024 locks for all schedules together, because a server has room for some
# thousands.
_DUE = """
    SELECT found.ctid
    FROM unnest(ARRAY[0, 1, 2, 3], (SELECT floors FROM pass)) AS level (priority, floor)
    CROSS JOIN LATERAL (
        SELECT tick.ctid
        FROM {schema}.cron_ticks AS tick
        WHERE tick.sink = $5 AND tick.turn = $6 AND tick.priority = level.priority
            AND tick.due_at <= (SELECT due_until FROM pass)
            AND tick.due_at >= greatest(level.floor, (SELECT earliest FROM pass))
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
    WHERE tick.id = ANY ($9::text[]) AND tick.sink = $5 AND tick.turn = $6
        AND tick.due_at <= (SELECT due_until FROM pass) AND tick.due_at >= (SELECT earliest FROM pass)
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
#
# What became messages comes back as one row per pair of a queue and a workspace, unless each is asked for: sending and
# reading a row per tick takes a tenth of the time of a firing.
_FIRE = """
WITH clock AS (SELECT coalesce($3::timestamptz, statement_timestamp()) AS instant),
pass AS (
    SELECT $1::text AS ticker_id, instant, coalesce($4::timestamptz, instant) AS due_until,
        CASE WHEN $6 = 0 THEN instant - $7::interval ELSE '-infinity' END AS earliest, $8::timestamptz[] AS floors
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
SELECT CASE WHEN {each} OR NOT passed THEN judged.id ELSE '' END,
    CASE WHEN {each} OR NOT passed THEN schedule_id ELSE '' END,
    CASE WHEN {each} OR NOT passed THEN schedule_name ELSE '' END,
    queue_name, workspace_id, origin,
    CASE WHEN passed THEN 'enqueued' WHEN too_late THEN 'missed' WHEN put_back THEN 'waiting'
        WHEN {limited} THEN 'overlapped' ELSE 'refused' END,
    priority, due_until, min(scheduled_for), max(due_at), array_agg(date_part('epoch', lateness))
FROM judged, pass
WHERE CASE
    WHEN (SELECT count(*) FROM sent) <> (SELECT count(*) FROM fired)
        THEN {schema}.cron_refuse('the sink did not take exactly one message per tick')
    WHEN entered AND NOT passed THEN {schema}.cron_refuse('the occurrence has just fired')
    ELSE true END
GROUP BY 1, 2, 3, 4, 5, 6, 7, 8, 9
ORDER BY priority, max(due_at)
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
    insert_from_fired: str,
    insert_from_limited: str | None,
    *,
    events: EventLevel,
    chosen: bool = False,
    each: bool = False,
) -> str:
    """Fires due ticks of a sink, or chosen ones; without `insert_from_limited` nothing is held back by an overlap."""
    overlap, limited = _WHATEVER_RUNS, "false"
    noted = _NOTE_SENT if includes(events, "all") else ""
    if insert_from_limited is not None:
        overlap = _UNLESS_UNFINISHED.replace("{insert_from_limited}", insert_from_limited)
        limited = "judged.id IN (SELECT id FROM limited)"
        noted += _NOTE_HELD_BACK if includes(events, "changes") else ""
    fire = _FIRE.replace("{due}", _CHOSEN if chosen else _DUE).replace("{overlap}", overlap).replace("{events}", noted)
    fire = fire.replace("{each}", "true" if each else "false")
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

# How long until a sink's next tick of each turn and priority is due, not positive if one is now; and up to when nothing
# of it is pending. Of a level with a floor ($3), only from there on. A tick that nobody may take over has no next time.
NEXT_DUE_IN = """
WITH clock AS (SELECT coalesce($1::timestamptz, statement_timestamp()) AS instant)
SELECT level.turn, first.due_at - instant AS due_in, least(first.due_at, instant) AS floor
FROM clock
CROSS JOIN unnest(
    ARRAY[0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2], ARRAY[0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3], $3::timestamptz[])
    WITH ORDINALITY AS level (turn, priority, floor, number)
LEFT JOIN LATERAL (
    SELECT due_at
    FROM {schema}.cron_ticks AS tick
    WHERE tick.sink = $2 AND tick.turn = level.turn AND tick.priority = level.priority
        AND tick.due_at < 'infinity' AND tick.due_at >= coalesce(level.floor, '-infinity')
    ORDER BY due_at
    LIMIT 1
) AS first ON true
ORDER BY level.number
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
