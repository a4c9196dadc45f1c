"""The statements that read the ledger, each with what it guarantees.

Pages go from the newest occurrence to the oldest. A stretch of missed occurrences stands under its last one: one that
began before the end of the time asked for and went on beyond it counts too.
"""

# $1 is the length of the page, ($2, $3) the place of the last run of the page before, $4 the outcome, $5 the workspace
# and $6 the queue; all but the first may be NULL.
_CHOSEN = """
    ($2::timestamptz IS NULL OR (run.scheduled_for, run.schedule_id) < ($2::timestamptz, $3::text))
    AND ($4::text IS NULL OR run.outcome = $4)
    AND ($5::text IS NULL AND $6::text IS NULL OR EXISTS (
        SELECT FROM {schema}.cron_schedule_versions AS version
        WHERE version.schedule_id = run.schedule_id AND version.version = run.version
            AND ($5 IS NULL OR version.workspace_id = $5) AND ($6 IS NULL OR version.queue_name = $6)))
    ORDER BY run.scheduled_for DESC, run.schedule_id DESC
    LIMIT $1
"""

# From $7 on, and before $8 and the page before.
_IN_TIME = """
    run.scheduled_for >= $7::timestamptz AND run.scheduled_for < coalesce($8::timestamptz, 'infinity')
    AND run.scheduled_for <= coalesce($2::timestamptz, 'infinity')
"""

# Stretches that began before $9 and went on. OFFSET keeps them apart, so that they are found by their own indexes and
# no other: by their schedule or their time the way to them leads through all runs since.
_BEYOND = """(
            SELECT * FROM {schema}.cron_runs
            WHERE missed_since IS NOT NULL AND missed_since < $9::timestamptz AND scheduled_for >= $9{of_schedule}
            OFFSET 0)"""

# With what a run's schedule was then; of a tick of long ago that may be forgotten.
_PAGE = """
SELECT run.schedule_id, version.name AS schedule_name, version.workspace_id, version.queue_name, version.sink,
    run.scheduled_for, run.missed_since, run.occurrences, run.version, run.origin, run.outcome, run.reason,
    run.ended_at, run.lateness, run.attempts, run.ticker_id AS worker, run.recovered, run.recovery_time, run.message_id
FROM (
    SELECT found.*
    FROM {schedules} CROSS JOIN LATERAL (
        (SELECT run.* FROM {schema}.cron_runs AS run WHERE {own} AND {in_time} AND {chosen})
        UNION ALL
        (SELECT run.* FROM {beyond} AS run WHERE {own} AND {chosen})
    ) AS found
    ORDER BY found.scheduled_for DESC, found.schedule_id DESC
    LIMIT $1
) AS run
LEFT JOIN {schema}.cron_schedule_versions AS version
    ON version.schedule_id = run.schedule_id AND version.version = run.version
ORDER BY run.scheduled_for DESC, run.schedule_id DESC
"""


def _page(*, schedules: str, own: str, of_schedule: str = "") -> str:
    page = _PAGE.replace("{schedules}", schedules).replace("{own}", own)
    beyond = _BEYOND.replace("{of_schedule}", of_schedule)
    return page.replace("{in_time}", _IN_TIME).replace("{beyond}", beyond).replace("{chosen}", _CHOSEN)


# Of some schedules: per schedule the key is read backwards, the newest partition first, until there is a page.
OF_SCHEDULES = _page(
    schedules="unnest($10::text[]) AS given (id)",
    own="run.schedule_id = given.id",
    of_schedule=" AND schedule_id = given.id",
)

# Of all schedules: may read all runs of the time, so the caller asks for a short one first.
OF_TIME = _page(schedules="(SELECT) AS everything", own="true")

# The same of an outcome but 'enqueued': these have an index of their own.
NOT_ENQUEUED = _page(schedules="(SELECT) AS everything", own="run.outcome <> 'enqueued'")

# Schedules that have had a name, those that are gone too.
SCHEDULES_NAMED = """
SELECT DISTINCT schedule_id
FROM {schema}.cron_schedule_versions
WHERE name = $1 AND ($2::text IS NULL OR workspace_id = $2)
"""

# And those that a workspace has had.
SCHEDULES_OF_WORKSPACE = "SELECT DISTINCT schedule_id FROM {schema}.cron_schedule_versions WHERE workspace_id = $1"
