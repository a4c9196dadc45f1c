"""The statements of AuditRepository, each with what it guarantees. All but those of `cron_audits` only read."""

# Everything an audit reads is as it was at one instant, and it changes nothing. Unlike the rest of our statements,
# these read whole tables, so the planner may; to join in a loop is what it may not, should statistics be missing.
BEGIN = """
SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY;
SET LOCAL enable_seqscan = on;
SET LOCAL enable_nestloop = off;
SET LOCAL jit = off;
SET LOCAL max_parallel_workers_per_gather = 0;
SET LOCAL work_mem = '128MB';
SET LOCAL cursor_tuple_fraction = 1.0;
SET LOCAL idle_in_transaction_session_timeout = '60s'
"""

# The time, from when on the ledger is complete, and from when on there is a version of any schedule, or of one ($2).
SPAN = """
SELECT coalesce($1::timestamptz, statement_timestamp()) AS instant,
    (SELECT kept_since FROM {schema}.cron_retention WHERE kind = 'runs') AS kept_since,
    (
        SELECT min(holds_after) FROM {schema}.cron_schedule_versions WHERE $2::text IS NULL OR schedule_id = $2
    ) AS first_version
"""

# Whether there has been such a schedule.
KNOWN = "SELECT EXISTS (SELECT FROM {schema}.cron_schedule_versions WHERE schedule_id = $1)"

# Every version of every schedule, or of one ($4), without the payload, and beside it what there is of the schedule from
# $1 up to $2: its runs and its ticks as numbers, its stretches of missed occurrences one by one. Instants are summed up
# in microseconds since $1, exactly: a day of them is far from the limits of a double. Ticks that have been due since
# before $5 are overdue: one that is leased, retried or paced is due later than it was.
_SCHEDULES = """
WITH runs AS (
    SELECT schedule_id, count(*) AS runs,
        count(*) FILTER (WHERE outcome = 'enqueued') AS enqueued,
        count(*) FILTER (WHERE outcome = 'missed') AS missed,
        count(*) FILTER (WHERE outcome = 'enqueued' AND lateness > $3::interval) AS late,
        sum(since)::bigint AS total, sum(since::numeric * since) AS squares
    FROM (
        SELECT schedule_id, outcome, lateness,
            (date_part('epoch', scheduled_for - $1::timestamptz) * 1000000)::bigint AS since
        FROM {schema}.cron_runs
        WHERE scheduled_for >= $1 AND scheduled_for < $2::timestamptz AND missed_since IS NULL AND origin <> 'trigger'
            AND ($4::text IS NULL OR schedule_id = $4)
    ) AS run
    GROUP BY schedule_id
),
ticks AS (
    SELECT schedule_id, count(*) AS ticks, count(*) FILTER (WHERE overdue) AS overdue,
        sum(since)::bigint AS total, sum(since::numeric * since) AS squares
    FROM (
        SELECT schedule_id, due_at < $5::timestamptz AS overdue,
            (date_part('epoch', scheduled_for - $1) * 1000000)::bigint AS since
        FROM {schema}.cron_ticks
        WHERE scheduled_for >= $1 AND scheduled_for < $2 AND origin <> 'trigger'
            AND ($4 IS NULL OR schedule_id = $4)
    ) AS tick
    GROUP BY schedule_id
),
stretches AS (
    SELECT schedule_id, array_agg(missed_since) AS firsts, array_agg(scheduled_for) AS lasts,
        array_agg(version) AS versions
    FROM {schema}.cron_runs
    WHERE missed_since < $2 AND missed_since IS NOT NULL AND scheduled_for >= $1
        AND ($4 IS NULL OR schedule_id = $4)
    GROUP BY schedule_id
)
SELECT version.schedule_id, version.version, version.holds_after, version.enabled, version.name, version.workspace_id,
    version.queue_name, version.interval_us, version.anchor_at, version.cron, version.zone, version.dst_gap,
    version.dst_fold, version.starts_at, version.ends_at, version.max_runs, version.planned,
    runs.runs, runs.enqueued, runs.missed, runs.late, runs.total AS runs_total, runs.squares AS runs_squares,
    ticks.ticks, ticks.overdue, ticks.total AS ticks_total, ticks.squares AS ticks_squares,
    stretches.firsts, stretches.lasts, stretches.versions,
    cursor.next_tick_needed_at AS needed_from, broken.error
FROM {schema}.cron_schedule_versions AS version
LEFT JOIN runs ON runs.schedule_id = version.schedule_id
LEFT JOIN ticks ON ticks.schedule_id = version.schedule_id
LEFT JOIN stretches ON stretches.schedule_id = version.schedule_id
LEFT JOIN {schema}.cron_schedule_cursors AS cursor ON cursor.schedule_id = version.schedule_id
LEFT JOIN {schema}.cron_schedules AS broken ON broken.id = version.schedule_id AND broken.error IS NOT NULL
WHERE $4 IS NULL OR version.schedule_id = $4
ORDER BY version.schedule_id, version.version
"""

# Read in parts: memory stays the same, however many schedules there are, and other work of the process has its turn in
# between.
DECLARE_SCHEDULES = "DECLARE cron_audit NO SCROLL CURSOR FOR" + _SCHEDULES
FETCH_SCHEDULES = "FETCH 500 FROM cron_audit"
CLOSE_SCHEDULES = "CLOSE cron_audit"

# What the reading costs.
EXPLAIN_SCHEDULES = "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON)" + _SCHEDULES

# The runs and ticks of some schedules ($1), one by one. A tick that has been due since before $5 is late.
ROWS = """
SELECT schedule_id, scheduled_for, origin, outcome, coalesce(lateness > $4::interval, false) AS late
FROM {schema}.cron_runs
WHERE schedule_id = ANY ($1::text[]) AND scheduled_for >= $2::timestamptz AND scheduled_for < $3::timestamptz
    AND missed_since IS NULL AND origin <> 'trigger'
UNION ALL
SELECT schedule_id, scheduled_for, origin, NULL, due_at < $5::timestamptz
FROM {schema}.cron_ticks
WHERE schedule_id = ANY ($1) AND scheduled_for >= $2 AND scheduled_for < $3 AND origin <> 'trigger'
"""

# Recoveries and lateness by schedule, by queue and in total; the queue is the one that the run's version had. `level`
# has a bit for each of both by which it is not grouped.
MEASURES = """
SELECT run.schedule_id, version.queue_name, grouping(run.schedule_id, version.queue_name) AS level,
    count(*) FILTER (WHERE recovered OR outcome = 'expired') AS recoveries_tried,
    count(*) FILTER (WHERE recovered AND outcome = 'enqueued') AS recoveries_succeeded,
    count(*) FILTER (WHERE recovered AND outcome = 'failed') AS recoveries_failed,
    count(*) FILTER (WHERE outcome = 'expired') AS recoveries_abandoned,
    date_part('epoch', avg(recovery_time) FILTER (WHERE recovered AND outcome = 'enqueued')) AS mean_recovery_seconds,
    percentile_cont(ARRAY[0.5, 0.95, 0.99]) WITHIN GROUP (ORDER BY date_part('epoch', lateness))
        FILTER (WHERE outcome = 'enqueued') AS lateness
FROM {schema}.cron_runs AS run
LEFT JOIN {schema}.cron_schedule_versions AS version
    ON version.schedule_id = run.schedule_id AND version.version = run.version
WHERE run.scheduled_for >= $1::timestamptz AND run.scheduled_for < $2::timestamptz AND run.origin <> 'trigger'
    AND ($3::text IS NULL OR run.schedule_id = $3)
GROUP BY GROUPING SETS ((run.schedule_id), (version.queue_name), ())
"""

# The latest audit that has ended, and how long until the next is due: after the interval ($2), and after a rest of many
# times ($3) what the last one took. One whose worker died is not waited for longer than that.
LATEST_AUDIT = """
SELECT clock.instant, coalesce(
        begun.started_at + greatest($2::interval, (begun.ended_at - begun.started_at) * $3::float) - clock.instant,
        interval '0') AS due_in,
    ended.*
FROM (SELECT coalesce($1::timestamptz, statement_timestamp()) AS instant) AS clock
LEFT JOIN LATERAL (
    SELECT started_at, ended_at FROM {schema}.cron_audits ORDER BY started_at DESC LIMIT 1
) AS begun ON true
LEFT JOIN LATERAL (
    SELECT started_at, ended_at, expected, enqueued, explained, pending, overdue, late, unexplained, duplicate
    FROM {schema}.cron_audits
    WHERE ended_at IS NOT NULL
    ORDER BY started_at DESC
    LIMIT 1
) AS ended ON true
"""

# Of all workers that find an audit due, one begins it. The lock comes in a statement of its own, because only a
# snapshot made after it is sure to show what another has begun. The first number stands for "audi".
LOCK_AUDITS = "SELECT pg_try_advisory_xact_lock(1635083369, 0)"

# Held while an audit that was due reads, however long that takes: the next doesn't begin meanwhile. It goes with the
# transaction, so with a worker that dies.
LOCK_READING = "SELECT pg_try_advisory_xact_lock(1635083370, '{schema}.cron_audits'::regclass::oid::integer)"

BEGIN_AUDIT = """
INSERT INTO {schema}.cron_audits (started_at, since, until)
SELECT instant, instant - $2::interval, instant
FROM (SELECT coalesce($1::timestamptz, statement_timestamp()) AS instant) AS clock
RETURNING started_at
"""

END_AUDIT = """
UPDATE {schema}.cron_audits
SET ended_at = greatest(started_at, coalesce($2::timestamptz, statement_timestamp())), since = $3, schedules = $4,
    expected = $5, enqueued = $6, explained = $7, pending = $8, overdue = $9, late = $10, unexplained = $11,
    duplicate = $12
WHERE started_at = $1
"""
