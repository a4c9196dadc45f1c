"""The statements about ticks that are leased, for sinks outside this database, and about ticks that could not be sent.

As elsewhere, the time is an argument: NULL means the database's clock. A tick at its last attempt, and one that may be
published once only and is about to be, is due at 'infinity' while it is leased: nobody takes it over, and the cleanup
ends it if its lease runs out. How often a tick is tried is read from its schedule at that moment; NULL there means the
setting. An owner is a worker's batch, `ticker_<ulid>.<number>`: a worker that slept and then took over its own tick is
another one.
"""

# Leases due ticks of a sink: those due now first, then retries, then what is catching up ($8: the last of these), each
# by priority, from where nothing is left below ($10). What is due now and later than $9 is for a catch-up policy to
# decide: the result says whether there is such a tick. A lease that ran out is taken over while its schedule is
# enabled, and what its owner sent is unknown: the next delivery is a recovery. What was tried before goes alone, so
# that nothing beside it can spoil it. Not so what one worker lost, unless this is its last attempt: a worker dies with
# all it had in hand, and each of these would wait for the others.
#
# What has fired before ends without a delivery, and so does, with its row in the ledger, what is too late for its
# misfire_grace, too old to be tried again, or lost by a schedule that is disabled now. The rows are read once, where
# they are locked: a second look by ctid has brought a server down.
LEASE_DUE_TICKS = """
WITH clock AS (SELECT coalesce($3::timestamptz, statement_timestamp()) AS instant),
level AS MATERIALIZED (
    SELECT *
    FROM unnest(
        ARRAY[0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2], ARRAY[0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3], $10::timestamptz[])
        AS given (turn, priority, floor)
),
due AS MATERIALIZED (
    SELECT found.*
    FROM level
    CROSS JOIN LATERAL (
        SELECT tick.id, tick.schedule_id, tick.scheduled_for, tick.execute_at, tick.attempts, tick.leased_until,
            tick.recovery, tick.fire_before
        FROM {schema}.cron_ticks AS tick
        WHERE level.turn <= $8 AND tick.sink = $5 AND tick.turn = level.turn AND tick.priority = level.priority
            AND tick.due_at <= (SELECT instant FROM clock)
            AND tick.due_at >= greatest(level.floor, CASE WHEN level.turn = 0
                THEN (SELECT instant - $9::interval FROM clock) ELSE '-infinity' END)
        ORDER BY tick.due_at
        LIMIT $2
        FOR UPDATE SKIP LOCKED
    ) AS found
    LIMIT $2
),
found AS MATERIALIZED (
    SELECT due.id, due.leased_until IS NOT NULL AND due.attempts = 1 AS lost_once,
        due.attempts + 1 >= coalesce(schedule.max_attempts, $6) AS last,
        before.schedule_id IS NOT NULL AS fired_before,
        CASE
            WHEN due.attempts = 0 AND due.fire_before < instant THEN 'too late'
            WHEN (due.leased_until IS NOT NULL OR due.recovery) AND schedule.enabled IS NOT TRUE THEN 'disabled'
            WHEN due.attempts > 0 AND (
                due.attempts >= coalesce(schedule.max_attempts, $6)
                OR instant - due.execute_at > coalesce(schedule.max_age_us * interval '1 microsecond', $7::interval)
            ) THEN 'given up'
        END AS over
    FROM due
    LEFT JOIN {schema}.cron_schedules AS schedule ON schedule.id = due.schedule_id
    LEFT JOIN {schema}.cron_fired_before(
        ARRAY(SELECT schedule_id FROM due), ARRAY(SELECT scheduled_for FROM due)) AS before
        ON before.schedule_id = due.schedule_id AND before.scheduled_for = due.scheduled_for
    CROSS JOIN clock
),
gone AS (
    DELETE FROM {schema}.cron_ticks
    WHERE id = ANY (ARRAY(SELECT id FROM found WHERE fired_before OR over IS NOT NULL))
    RETURNING *
),
runs AS (
    INSERT INTO {schema}.cron_runs (schedule_id, scheduled_for, version, origin, outcome, reason, ended_at, attempts,
        ticker_id, recovered, recovery_time)
    SELECT schedule_id, scheduled_for, version, origin,
        CASE WHEN found.over = 'too late' THEN 'missed'
            WHEN found.over = 'disabled' OR leased_until IS NOT NULL THEN 'expired'
            ELSE 'failed' END,
        CASE found.over
            WHEN 'too late' THEN 'later than its misfire_grace'
            WHEN 'disabled' THEN
                'its worker died or hung, and its schedule is disabled: whether it was delivered is unknown'
            ELSE 'not tried again, for its attempts or its age; before: ' || coalesce(error, 'its worker died or hung')
        END,
        instant, gone.attempts, split_part(leased_by, '.', 1), recovery, instant - lost_at
    FROM gone JOIN found USING (id), clock
    WHERE NOT found.fired_before
    ON CONFLICT (schedule_id, scheduled_for) DO NOTHING
),
leased AS (
    UPDATE {schema}.cron_ticks AS tick
    SET leased_by = $1, leased_at = instant, leased_until = instant + $4::interval,
        due_at = CASE WHEN found.last THEN 'infinity' ELSE instant + $4::interval END,
        attempts = tick.attempts + 1,
        recovery = tick.recovery OR tick.leased_until IS NOT NULL AND tick.delivery <> 'at_most_once',
        lost_at = coalesce(tick.lost_at, tick.leased_until)
    FROM found, clock
    WHERE tick.id = found.id AND NOT found.fired_before AND found.over IS NULL
    RETURNING tick.id, schedule_id, schedule_name, workspace_id, queue_name, payload::text AS payload, scheduled_for,
        execute_at, origin, priority, delivery, tick.attempts, recovery, tick.leased_until,
        delivery = 'at_most_once' OR tick.attempts > 1 AND (found.last OR NOT found.lost_once) AS alone
)
SELECT leased.*, summary.*
FROM (
    SELECT ARRAY(SELECT id FROM found WHERE fired_before) AS refused,
        ARRAY(SELECT id FROM found WHERE over <> 'too late' AND NOT fired_before) AS given_up,
        ARRAY(SELECT id FROM found WHERE over = 'too late' AND NOT fired_before) AS missed,
        EXISTS (
            SELECT
            FROM level
            CROSS JOIN LATERAL (
                SELECT
                FROM {schema}.cron_ticks AS tick
                WHERE level.turn = 0 AND tick.sink = $5 AND tick.turn = 0 AND tick.priority = level.priority
                    AND tick.due_at < (SELECT instant - $9::interval FROM clock)
                    AND tick.due_at >= coalesce(level.floor, '-infinity')
                LIMIT 1
            ) AS late
        ) AS late
) AS summary
LEFT JOIN leased ON true
ORDER BY leased.execute_at
"""

# The ticks of an owner ($1) whose leases are live. Those that somebody else has locked, an edit for example, are `own`
# and not `held`: nobody waits for them here, and nobody can take them over meanwhile.
_OWN = """
WITH clock AS (SELECT coalesce($3::timestamptz, statement_timestamp()) AS instant),
own AS MATERIALIZED (
    SELECT id
    FROM {schema}.cron_ticks
    WHERE id = ANY ($2::text[]) AND leased_by = $1 AND leased_until > (SELECT instant FROM clock)
),
held AS MATERIALIZED (
    SELECT id
    FROM {schema}.cron_ticks
    WHERE id = ANY ($2::text[]) AND leased_by = $1 AND leased_until > (SELECT instant FROM clock)
    FOR UPDATE SKIP LOCKED
),
"""

# The owner goes on with live leases; those that don't come back are not its own any more. With $5 it is about to
# publish what may be published once: from then on nobody takes it over.
RENEW_LEASES = (
    _OWN
    + """
renewed AS (
    UPDATE {schema}.cron_ticks
    SET leased_until = instant + $4::interval,
        due_at = CASE WHEN $5 OR due_at = 'infinity' THEN 'infinity' ELSE instant + $4::interval END
    FROM clock
    WHERE id = ANY (ARRAY(SELECT id FROM held))
    RETURNING id
)
SELECT id FROM own WHERE NOT $5
UNION
SELECT id FROM renewed
"""
)

# The owner gives back what it has not handed on: that was no attempt.
RELEASE_LEASES = (
    _OWN
    + """
released AS (
    UPDATE {schema}.cron_ticks
    SET due_at = instant, attempts = attempts - 1, leased_by = NULL, leased_at = NULL, leased_until = NULL
    FROM clock
    WHERE id = ANY (ARRAY(SELECT id FROM held))
)
SELECT id FROM held
"""
)

# Delivered ticks end, and the ledger says so. Only the owner of a live lease may do that.
END_TICKS = (
    _OWN
    + """
ended AS (
    DELETE FROM {schema}.cron_ticks WHERE id = ANY (ARRAY(SELECT id FROM held)) RETURNING *
),
runs AS (
    INSERT INTO {schema}.cron_runs (schedule_id, scheduled_for, version, origin, outcome, message_id, ended_at,
        lateness, attempts, ticker_id, recovered, recovery_time)
    SELECT schedule_id, scheduled_for, version, origin, 'enqueued', 'msg_' || substr(id, 6), instant,
        instant - execute_at, attempts, split_part(leased_by, '.', 1), recovery, instant - lost_at
    FROM ended, clock
    ON CONFLICT (schedule_id, scheduled_for) DO NOTHING
)
SELECT id, origin, instant - execute_at AS lateness, recovery FROM ended, clock
"""
)

# Ticks that could not be sent: tried again after a pause that doubles each time, or ended as failed. With an owner ($1)
# they are leased, and their attempt was counted with the lease; without one it is counted here, once, by its number.
FAIL_TICKS = """
WITH clock AS (SELECT coalesce($9::timestamptz, statement_timestamp()) AS instant),
held AS MATERIALIZED (
    SELECT tick.id, tried.attempts, given.error, given.unsure,
        given.final OR tick.delivery = 'at_most_once'
            OR tried.attempts >= coalesce(schedule.max_attempts, $6)
            OR instant + pause.length - tick.execute_at
                > coalesce(schedule.max_age_us * interval '1 microsecond', $7::interval) AS final,
        pause.length AS pause
    FROM unnest($2::text[], $3::int[], $4::text[], $5::boolean[], $10::boolean[])
        AS given (id, attempts, error, final, unsure)
    JOIN {schema}.cron_ticks AS tick ON tick.id = given.id
    LEFT JOIN {schema}.cron_schedules AS schedule ON schedule.id = tick.schedule_id
    CROSS JOIN clock
    CROSS JOIN LATERAL (SELECT tick.attempts + CASE WHEN $1::text IS NULL THEN 1 ELSE 0 END AS attempts) AS tried
    CROSS JOIN LATERAL (
        SELECT (0.8 + 0.4 * random()) * least(
            coalesce(schedule.backoff_us * interval '1 microsecond', $8::interval)
                * (2 ^ least(tried.attempts - 1, 20)),
            greatest(coalesce(schedule.backoff_us * interval '1 microsecond', $8::interval), interval '5 minutes')
        ) AS length
    ) AS pause
    WHERE tick.attempts = given.attempts AND CASE
        WHEN $1 IS NULL THEN tick.leased_until IS NULL OR tick.leased_until <= instant
        ELSE tick.leased_by = $1 AND tick.leased_until > instant END
    FOR UPDATE OF tick SKIP LOCKED
),
ended AS (
    DELETE FROM {schema}.cron_ticks WHERE id = ANY (ARRAY(SELECT id FROM held WHERE final)) RETURNING *
),
runs AS (
    INSERT INTO {schema}.cron_runs (schedule_id, scheduled_for, version, origin, outcome, reason, ended_at, attempts,
        ticker_id, recovered, recovery_time)
    SELECT schedule_id, scheduled_for, version, origin, 'failed', held.error, instant, held.attempts, $11, recovery,
        instant - lost_at
    FROM ended JOIN held USING (id), clock
    ON CONFLICT (schedule_id, scheduled_for) DO NOTHING
),
again AS (
    UPDATE {schema}.cron_ticks AS tick
    SET attempts = held.attempts, due_at = instant + held.pause, turn = 1, error = held.error, waiting = false,
        recovery = recovery OR held.unsure, lost_at = coalesce(lost_at, CASE WHEN held.unsure THEN instant END),
        leased_by = NULL, leased_at = NULL, leased_until = NULL
    FROM held, clock
    WHERE tick.id = held.id AND NOT held.final
)
SELECT id, final FROM held
"""

# Ticks whose lease ran out so long ago and that may not be tried again end, and the ledger says so. What somebody may
# still take over is left alone.
DELETE_EXPIRED_TICKS = """
WITH clock AS (SELECT coalesce($3::timestamptz, statement_timestamp()) AS instant),
expired AS (
    SELECT tick.ctid
    FROM {schema}.cron_ticks AS tick
    LEFT JOIN {schema}.cron_schedules AS schedule ON schedule.id = tick.schedule_id
    WHERE tick.leased_until < (SELECT instant - $1::interval FROM clock)
        AND (
            tick.due_at = 'infinity'
            OR tick.attempts >= coalesce(schedule.max_attempts, $4)
            OR (SELECT instant FROM clock) - tick.execute_at
                > coalesce(schedule.max_age_us * interval '1 microsecond', $5::interval)
        )
    ORDER BY tick.leased_until
    LIMIT $2
    FOR UPDATE OF tick SKIP LOCKED
),
taken AS (
    DELETE FROM {schema}.cron_ticks WHERE ctid = ANY (ARRAY(SELECT ctid FROM expired)) RETURNING *
),
runs AS (
    INSERT INTO {schema}.cron_runs (schedule_id, scheduled_for, version, origin, outcome, reason, ended_at, attempts,
        ticker_id, recovered, recovery_time)
    SELECT schedule_id, scheduled_for, version, origin, 'expired',
        'its lease ran out and it may not be tried again: whether it was delivered is unknown', instant, attempts,
        split_part(leased_by, '.', 1), recovery, instant - coalesce(lost_at, leased_until)
    FROM taken, clock
    ON CONFLICT (schedule_id, scheduled_for) DO NOTHING
)
SELECT id, scheduled_for FROM taken
"""

# A worker serves these sinks. Written only if that is news.
NOTE_SINKS = """
INSERT INTO {schema}.cron_sinks AS sink (name, kind, seen_at)
SELECT given.name, given.kind, coalesce($3::timestamptz, statement_timestamp())
FROM unnest($1::text[], $2::text[]) AS given (name, kind)
ORDER BY given.name
ON CONFLICT (name) DO UPDATE SET kind = excluded.kind, seen_at = excluded.seen_at
WHERE sink.kind <> excluded.kind OR sink.seen_at < excluded.seen_at - interval '10 seconds'
"""

SINKS = "SELECT name, kind FROM {schema}.cron_sinks ORDER BY name"

# Sinks with ticks that have been due for a while, though no worker serves them: a skip scan, one probe per sink.
UNSERVED_SINKS = """
WITH RECURSIVE clock AS (SELECT coalesce($1::timestamptz, statement_timestamp()) AS instant),
found AS (
    (SELECT sink FROM {schema}.cron_ticks ORDER BY sink LIMIT 1)
    UNION ALL
    SELECT next.sink
    FROM found
    CROSS JOIN LATERAL (
        SELECT sink FROM {schema}.cron_ticks WHERE sink > found.sink ORDER BY sink LIMIT 1
    ) AS next
)
SELECT found.sink
FROM found, clock
WHERE found.sink <> 'queue'
    AND EXISTS (
        SELECT
        FROM (VALUES (0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3))
            AS level (turn, priority)
        JOIN {schema}.cron_ticks AS tick
            ON tick.sink = found.sink AND tick.turn = level.turn AND tick.priority = level.priority
                AND tick.due_at < instant - interval '1 minute')
    AND NOT EXISTS (
        SELECT FROM {schema}.cron_sinks AS served
        WHERE served.name = found.sink AND served.seen_at > instant - interval '2 minutes')
ORDER BY found.sink
"""
