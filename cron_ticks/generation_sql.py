"""The statements with which ticks are made: for one change of a schedule, and for very many schedules at once.

As elsewhere, the time is an argument: NULL means the database's clock.
"""

# When a tick is due that is made of a row `made` (scheduled_for) and a row `schedule`; $4 is now, and {beside} none, or
# a little more where another occurrence is due at the very same microsecond. Made after its jittered time, a tick is
# due at its occurrence, if that is later: so no edit fires by itself, and no tick is late before it is made. A time of
# day moves only forward, by half its jitter and as much either way. OFFSET 0 keeps the hash from being computed again
# wherever it is mentioned.
_MOVED = """
CROSS JOIN LATERAL (
    SELECT CASE WHEN made.scheduled_for = schedule.anchor_at THEN made.scheduled_for
        WHEN schedule.cron IS NOT NULL THEN made.scheduled_for + schedule.jitter_us / 2 * interval '1 microsecond'
            + {schema}.cron_jitter(schedule.id, made.scheduled_for, schedule.jitter_us / 2)
        ELSE greatest(made.scheduled_for + {schema}.cron_jitter(schedule.id, made.scheduled_for, schedule.jitter_us),
            schedule.starts_at)
        END AS moment
    OFFSET 0
) AS jittered
CROSS JOIN LATERAL (
    SELECT jittered.moment + {beside} AS execute_at,
        CASE WHEN jittered.moment <= $4 THEN greatest(jittered.moment + {beside}, made.scheduled_for)
            ELSE jittered.moment + {beside} END AS due_at
) AS moved
"""

# One row per occurrence, whoever else makes it too: the unique key decides. What is made up though it is late ($6) is
# catching up: it goes out behind what is due now, at its own time ($7) if it is paced.
CREATE_TICKS = """
INSERT INTO {schema}.cron_ticks (id, schedule_id, schedule_name, workspace_id, queue_name, payload, scheduled_for,
    execute_at, due_at, created_at, version, priority, sink, delivery, overlap, turn, fire_before)
SELECT made.id, schedule.id, schedule.name, schedule.workspace_id, schedule.queue_name, schedule.payload,
    made.scheduled_for, moved.execute_at, coalesce(made.paced_until, moved.due_at),
    $4, schedule.version, schedule.priority, schedule.sink, schedule.delivery, schedule.overlap,
    CASE WHEN made.scheduled_for < $4 - $6::interval THEN 2 ELSE 0 END,
    moved.due_at + schedule.misfire_grace_us * interval '1 microsecond'
FROM unnest($1::text[], $2::text[], $3::timestamptz[], $7::timestamptz[])
    AS made (id, schedule_id, scheduled_for, paced_until)
JOIN {schema}.cron_schedules AS schedule ON schedule.id = made.schedule_id
{moved}
ON CONFLICT ON CONSTRAINT cron_ticks_execution_key DO NOTHING
RETURNING schedule_id, scheduled_for, due_at - $4 AS due_in
""".replace("{moved}", _MOVED.replace("{beside}", "$5::interval"))

# Takes schedules of these slots ($1), one slot after the other, whose next occurrence falls before the end of the pass
# ($3); two managers never wait for each other. Of each slot only what lies above its floor ($2), if it has one. Where
# shards are fixed, only those of this process's ($5, $6). A process that hangs with these locks loses its session, and
# they are free again.
LOCK_CURSORS_OF_SLOTS = """
WITH clock AS (
    SELECT coalesce($7::timestamptz, statement_timestamp()) AS instant,
        set_config('idle_in_transaction_session_timeout', $8, true)
)
SELECT taken.*, clock.instant
FROM clock
CROSS JOIN unnest($1::int[], $2::timestamptz[]) AS given (slot, floor)
CROSS JOIN LATERAL (
    SELECT cursor.schedule_id, cursor.next_tick_needed_at, cursor.planned, cursor.broken, cursor.slot
    FROM {schema}.cron_schedule_cursors AS cursor
    WHERE cursor.slot = given.slot AND NOT cursor.broken
        AND cursor.next_tick_needed_at < $3 AND cursor.next_tick_needed_at >= coalesce(given.floor, '-infinity')
        AND ($5::int = 1 OR {schema}.cron_hash(cursor.schedule_id) % $5 = $6)
    ORDER BY cursor.next_tick_needed_at
    LIMIT $4
    FOR UPDATE SKIP LOCKED
) AS taken
LIMIT $4
"""

# Makes the ticks of many schedules up to the end of the pass ($5), and advances their cursors, which are held. Whoever
# has few there gets up to $17 before the horizon ($16), because taking a schedule in hand costs more than its ticks do;
# up to one before a number that, with a letter of the id, is a multiple of $17, so that schedules which were made
# together are not in hand together for ever.
#
# The occurrences are numbered: those of an interval by arithmetic, a one-off has number 0, and a time of day has the
# numbers of its calendar's moments in $14, which were computed once for all schedules that share it ($7 to $13). None
# of them is late: who is behind is planned elsewhere, and so is what is left over, which comes back schedule by
# schedule: one whose calendar is not given, or not from where it needs it ($18), a time of day with bounds, whoever has
# very many occurrences ($15).
#
# They are written in the order in which they will be taken away, so that firing touches a page in one minute and not in
# each: after a checkpoint, the first change of a page writes all of it into the WAL.
#
# The unique key decides here too. What it refused comes back with its moment: it was there already, or another
# occurrence of the schedule has its microsecond. A tick's id is a ULID whose random part is of hexadecimal digits,
# which its alphabet contains; $6 is the part before it. Microseconds go through floating point, which is exact for more
# than two centuries; longer intervals don't occur here, because the schedules are in the window.
MAKE_TICKS = """
WITH calendar AS MATERIALIZED (
    SELECT *
    FROM unnest($7::text[], $8::text[], $9::text[], $10::text[], $11::int[], $12::int[], $13::timestamptz[])
        AS given (cron, zone, dst_gap, dst_fold, first, last, next_needed)
),
rule AS MATERIALIZED (
    SELECT schedule.*, given.planned, calendar.next_needed AS calendar_needed, numbered.first,
        least(greatest(in_window, least(in_horizon, numbered.first + $17 - 1
                - (ascii(right(schedule.id, 1)) + turn) % $17)),
            numbered.first + max_runs - given.planned - 1) AS last,
        calendar.last AS calendar_last,
        CASE WHEN schedule.cron IS NOT NULL
                THEN calendar.first IS NULL OR given.needed_from < $18 OR coalesce(starts_at, ends_at) IS NOT NULL
                    OR max_runs IS NOT NULL
            WHEN interval_us IS NULL THEN anchor_at >= $5
            ELSE in_window - numbered.first >= $15 END AS left_over
    FROM unnest($1::text[], $2::timestamptz[], $3::bigint[]) AS given (schedule_id, needed_from, planned)
    CROSS JOIN LATERAL (
        SELECT *,
            round(date_part('epoch', greatest(given.needed_from, starts_at) - anchor_at) * 1000000)::bigint AS from_us,
            round(date_part('epoch', least($5::timestamptz - interval '1 microsecond', ends_at) - anchor_at)
                * 1000000)::bigint AS until_us,
            round(date_part('epoch', least($16::timestamptz - interval '1 microsecond', ends_at) - anchor_at)
                * 1000000)::bigint AS horizon_us
        FROM {schema}.cron_schedules
        WHERE id = given.schedule_id
        LIMIT 1
    ) AS schedule
    LEFT JOIN calendar ON calendar.cron = schedule.cron AND calendar.zone = schedule.zone
        AND calendar.dst_gap = schedule.dst_gap AND calendar.dst_fold = schedule.dst_fold
    CROSS JOIN LATERAL (
        SELECT CASE WHEN schedule.cron IS NOT NULL THEN calendar.first + (
                SELECT count(*)
                FROM generate_series(calendar.first, calendar.last) AS number
                WHERE ($14::timestamptz[])[number] < given.needed_from)
            WHEN interval_us IS NULL THEN (from_us > 0)::int
            ELSE (greatest(from_us, 0) + interval_us - 1) / interval_us END AS first,
        CASE WHEN schedule.cron IS NOT NULL THEN calendar.last - (
                SELECT count(*)
                FROM generate_series(calendar.first, calendar.last) AS number
                WHERE ($14::timestamptz[])[number] >= $5)
            WHEN until_us < 0 THEN -1
            ELSE coalesce(until_us / interval_us, 0) END AS in_window,
        CASE WHEN schedule.cron IS NOT NULL THEN calendar.last
            WHEN horizon_us < 0 THEN -1
            ELSE coalesce(horizon_us / interval_us, 0) END AS in_horizon,
        CASE WHEN schedule.cron IS NOT NULL THEN date_part('epoch', given.needed_from)::bigint / 60
            ELSE (greatest(from_us, 0) + interval_us - 1) / interval_us END AS turn
        OFFSET 0
    ) AS numbered
),
wanted AS MATERIALIZED (
    SELECT rule.*, CASE WHEN cron IS NOT NULL THEN ($14::timestamptz[])[number]
        WHEN interval_us IS NULL THEN anchor_at
        ELSE anchor_at + number * interval_us * interval '1 microsecond' END AS scheduled_for
    FROM rule, generate_series(first, last) AS number
    WHERE NOT left_over
),
ticks AS (
    INSERT INTO {schema}.cron_ticks (id, schedule_id, schedule_name, workspace_id, queue_name, payload, scheduled_for,
        execute_at, due_at, created_at, version, priority, sink, delivery, overlap, fire_before)
    SELECT $6 || upper(right(replace(gen_random_uuid()::text, '-', ''), 16)), schedule.id, schedule.name,
        schedule.workspace_id, schedule.queue_name, schedule.payload, schedule.scheduled_for, moved.execute_at,
        moved.due_at, $4, schedule.version, schedule.priority, schedule.sink, schedule.delivery, schedule.overlap,
        moved.due_at + schedule.misfire_grace_us * interval '1 microsecond'
    FROM wanted AS schedule
    {moved}
    ORDER BY moved.due_at
    ON CONFLICT ON CONSTRAINT cron_ticks_execution_key DO NOTHING
    RETURNING schedule_id, scheduled_for, due_at
),
advanced AS (
    UPDATE {schema}.cron_schedule_cursors AS cursor
    SET planned = rule.planned + greatest(0, last - first + 1),
        next_tick_needed_at = CASE
            WHEN rule.planned + greatest(0, last - first + 1) >= max_runs THEN NULL
            WHEN cron IS NOT NULL AND greatest(first, last + 1) <= calendar_last
                THEN ($14::timestamptz[])[greatest(first, last + 1)]
            WHEN cron IS NOT NULL THEN calendar_needed
            WHEN anchor_at + greatest(first, last + 1) * interval_us * interval '1 microsecond' > ends_at THEN NULL
            ELSE anchor_at + greatest(first, last + 1) * interval_us * interval '1 microsecond' END
    FROM rule
    WHERE cursor.schedule_id = rule.id AND NOT left_over
)
SELECT made.ticks, made.due_in, rest.*
FROM (SELECT count(*) AS ticks, min(due_at) - $4 AS due_in FROM ticks) AS made
LEFT JOIN (
    SELECT id AS schedule_id, cron, zone, dst_gap, dst_fold, NULL::timestamptz AS scheduled_for
    FROM rule
    WHERE left_over
    UNION ALL
    SELECT id, NULL, NULL, NULL, NULL, scheduled_for
    FROM wanted
    WHERE (SELECT count(*) FROM wanted) > (SELECT count(*) FROM ticks)
        AND NOT EXISTS (
            SELECT FROM ticks WHERE ticks.schedule_id = wanted.id AND ticks.scheduled_for = wanted.scheduled_for)
) AS rest ON true
""".replace(
    "{moved}", _MOVED.replace("made.scheduled_for", "schedule.scheduled_for").replace("{beside}", "interval '0'")
)

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

# The rules of the schedules taken. A statement of its own, because only a snapshot made after the locks is sure to
# show the edit that moved the cursor.
RULES = """
SELECT id, version, interval_us, anchor_at, cron, zone, dst_gap, dst_fold, starts_at, ends_at, max_runs, catch_up
FROM {schema}.cron_schedules
WHERE id = ANY ($1::text[])
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
