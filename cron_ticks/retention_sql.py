"""The statements that remove what is past, each with what it guarantees.

As elsewhere, the time is an argument: NULL means the database's clock.
"""

# Runs before this instant may go: they are old enough, and no backfill will ask for their occurrences.
RUNS_BEFORE = """
SELECT least(coalesce($1::timestamptz, statement_timestamp()) - $2::interval,
    (SELECT min(next_at) FROM {schema}.cron_backfills WHERE ended_at IS NULL))
"""

# And events, to the week.
EVENTS_BEFORE = "SELECT coalesce($1::timestamptz, statement_timestamp()) - $2::interval"

# One partition, or none if none is old enough. LockNotAvailableError: not now.
DROP_PARTITION = "SELECT {schema}.cron_drop_partition($1, $2)"

# From where on runs are complete, and up to where versions that nobody needs are gone.
KEPT = """
SELECT (SELECT kept_since FROM {schema}.cron_retention WHERE kind = 'runs') AS runs,
    (SELECT kept_since FROM {schema}.cron_retention WHERE kind = 'versions') AS versions
"""

# What schedules were before a version that holds since before the first kept run ($2), and of a schedule that was
# deleted by then everything, also what it sent, as edits note it. A batch of such versions from a place in their order
# on, so that each is looked at once.
FORGET_VERSIONS = """
WITH replacing AS MATERIALIZED (
    SELECT holds_after, schedule_id, version, change
    FROM {schema}.cron_schedule_versions
    WHERE version > 1 AND holds_after < $2 AND (holds_after, schedule_id, version) > ($3, $4::text, $5::int)
    ORDER BY holds_after, schedule_id, version
    LIMIT $1
),
replaced AS MATERIALIZED (
    SELECT old.schedule_id, old.version
    FROM {schema}.cron_schedule_versions AS old
    JOIN replacing ON old.schedule_id = replacing.schedule_id
        AND (old.version < replacing.version OR old.version = replacing.version AND replacing.change = 'deleted')
    FOR UPDATE OF old SKIP LOCKED
),
forgotten AS (
    DELETE FROM {schema}.cron_schedule_versions AS version
    USING (SELECT DISTINCT schedule_id, version FROM replaced) AS replaced
    WHERE version.schedule_id = replaced.schedule_id AND version.version = replaced.version
    RETURNING 1
),
unnoted AS (
    UPDATE {schema}.execution_events
    SET data = data #- '{changed,payload}'
    WHERE schedule_id = ANY (ARRAY(SELECT schedule_id FROM replacing WHERE change = 'deleted'))
        AND event = 'edited' AND data -> 'changed' ? 'payload'
)
SELECT holds_after, schedule_id, version, (SELECT count(*) FROM forgotten) AS forgotten,
    (SELECT count(*) FROM replacing) AS looked_at
FROM replacing
ORDER BY holds_after DESC, schedule_id DESC, version DESC
LIMIT 1
"""

NOTE_VERSIONS = """
INSERT INTO {schema}.cron_retention AS kept (kind, kept_since) VALUES ('versions', $1)
ON CONFLICT (kind) DO UPDATE SET kept_since = greatest(kept.kept_since, excluded.kept_since)
"""

# Audits and backfills that are over: a handful a day.
DELETE_AUDITS = """
DELETE FROM {schema}.cron_audits
WHERE started_at < coalesce($1::timestamptz, statement_timestamp()) - $2::interval
RETURNING 1
"""
DELETE_BACKFILLS = """
DELETE FROM {schema}.cron_backfills
WHERE ended_at < coalesce($1::timestamptz, statement_timestamp()) - $2::interval
RETURNING 1
"""
