"""The statements of CronRepository about schedules, each with what it guarantees.

Those that look at the time take it as an argument; NULL means the database's clock, which is what the product uses.
Tests own the clock by giving one. Whoever changes a schedule takes locks in this order: the schedule, its cursor, its
ticks.
"""

SCHEDULE_COLUMNS = """
    id, workspace_id, name, queue_name, payload::text AS payload, interval_us, anchor_at, jitter_us, jitter_ratio,
    priority, starts_at, ends_at, max_runs, sink, delivery, overlap, max_attempts, max_age_us, backoff_us, cron,
    timezone, zone, dst_gap, dst_fold, owner, catch_up, misfire_grace_us, enabled, version, error, error_at, created_at,
    updated_at
"""

# A row of the history, from the schedule as a statement leaves it, and its event if there is somebody who did it.
_KEEP_VERSION = """
kept AS (
    INSERT INTO {schema}.cron_schedule_versions (schedule_id, version, holds_after, change, enabled, workspace_id,
        name, queue_name, payload, interval_us, anchor_at, jitter_us, jitter_ratio, priority, starts_at, ends_at,
        max_runs, sink, delivery, overlap, max_attempts, max_age_us, backoff_us, cron, timezone, zone, dst_gap,
        dst_fold, owner, catch_up, misfire_grace_us, planned, created_at)
    SELECT id, version, {holds_after}, {change}, enabled, workspace_id,
        name, queue_name, payload, interval_us, anchor_at, jitter_us, jitter_ratio, priority, starts_at, ends_at,
        max_runs, sink, delivery, overlap, max_attempts, max_age_us, backoff_us, cron, timezone, zone, dst_gap,
        dst_fold, owner, catch_up, misfire_grace_us, {planned}, updated_at
    FROM changed
),
noted AS (
    INSERT INTO {schema}.execution_events (event, schedule_id, actor, data)
    SELECT {change}, id, {actor}::text, jsonb_build_object('version', version) || {data}
    FROM changed
    WHERE {actor}::text IS NOT NULL
)
"""

_NAME = "jsonb_build_object('name', name, 'workspace_id', workspace_id)"


def _keep_version(*, holds_after: str, change: str, planned: str, actor: str, data: str = "'{}'") -> str:
    filled = _KEEP_VERSION.replace("{holds_after}", holds_after).replace("{change}", change)
    return filled.replace("{planned}", planned).replace("{actor}", actor).replace("{data}", data)


# A schedule by its name, whether its payload is the one given, and the time; without a schedule, the time alone. Read
# without a lock: declaring what is there already waits for nobody. IS NOT DISTINCT FROM would read the whole index.
FIND_SCHEDULE = (
    "SELECT"
    + SCHEDULE_COLUMNS
    + """
    , payload = $3::text::jsonb AS same_payload, clock.instant
FROM (SELECT coalesce($4::timestamptz, statement_timestamp()) AS instant) AS clock
LEFT JOIN (
    SELECT * FROM {schema}.cron_schedules WHERE workspace_id = $1 AND name = $2
    UNION ALL
    SELECT * FROM {schema}.cron_schedules WHERE $1 IS NULL AND workspace_id IS NULL AND name = $2
) AS schedule ON true
"""
)

# Creates the schedule with its cursor and its first version, unless its name is taken: of N pods that declare it at
# once, one gets a row back.
CREATE_SCHEDULE = (
    """
WITH changed AS (
    INSERT INTO {schema}.cron_schedules (id, workspace_id, name, queue_name, payload, interval_us, anchor_at, jitter_us,
        jitter_ratio, priority, starts_at, ends_at, max_runs, sink, delivery, overlap, max_attempts, max_age_us,
        backoff_us, cron, timezone, zone, dst_gap, dst_fold, owner, catch_up, misfire_grace_us, created_at, updated_at)
    VALUES ($1, $2, $3, $4, $5::text::jsonb, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20,
        $21, $22, $23, $24, $25, $26, $27, $28, $28)
    ON CONFLICT ON CONSTRAINT cron_schedules_name_key DO NOTHING
    RETURNING *
),
cursor AS (
    INSERT INTO {schema}.cron_schedule_cursors (schedule_id, next_tick_needed_at, planned)
    SELECT id, $29::timestamptz, $30::bigint FROM changed
),
"""
    + _keep_version(holds_after="$31::timestamptz", change="'created'", planned="0", actor="$32", data=_NAME)
    + """
SELECT"""
    + SCHEDULE_COLUMNS
    + "FROM changed"
)

# Locks of an edit or a removal, in their order: the schedule against other edits; the cursor, which waits for a manager
# that is making ticks for it; its ticks, which waits for tickers that fire them. What is there afterwards is ours.
LOCK_SCHEDULE = "SELECT" + SCHEDULE_COLUMNS + "FROM {schema}.cron_schedules WHERE id = $1 FOR UPDATE"
LOCK_WORKSPACE = (
    "SELECT" + SCHEDULE_COLUMNS + "FROM {schema}.cron_schedules WHERE workspace_id = $1 ORDER BY id FOR UPDATE"
)
LOCK_CURSORS = """
SELECT next_tick_needed_at, planned
FROM {schema}.cron_schedule_cursors
WHERE schedule_id = ANY ($1::text[])
ORDER BY schedule_id
FOR UPDATE
"""
LOCK_TICKS = """
SELECT scheduled_for, origin, due_at, attempts, waiting
FROM {schema}.cron_ticks
WHERE schedule_id = ANY ($1::text[])
ORDER BY schedule_id, execute_at
FOR UPDATE
"""

# Whoever declares a schedule in a workspace's default zone shares this lock, whoever changes that zone has it alone: no
# schedule is left with the old one. Taken before the schedule's own. The first number stands for "zone".
SHARE_ZONE = "SELECT pg_advisory_xact_lock_shared(2053467749, hashtext($1))"
SHARE_ZONE_OF = """
SELECT pg_advisory_xact_lock_shared(2053467749, hashtext(workspace_id))
FROM {schema}.cron_schedules
WHERE id = $1 AND workspace_id IS NOT NULL
"""
LOCK_ZONE = "SELECT pg_advisory_xact_lock(2053467749, hashtext($1))"
GET_ZONE = "SELECT timezone FROM {schema}.cron_workspaces WHERE workspace_id = $1"
SET_ZONE = """
INSERT INTO {schema}.cron_workspaces (workspace_id, timezone, updated_at)
VALUES ($1, $2, coalesce($3::timestamptz, statement_timestamp()))
ON CONFLICT (workspace_id) DO UPDATE SET timezone = excluded.timezone, updated_at = excluded.updated_at
"""
FORGET_ZONE = "DELETE FROM {schema}.cron_workspaces WHERE workspace_id = $1"

# Schedules of a workspace that are in its default zone, if that is not $2.
IN_OTHER_ZONE = """
SELECT id
FROM {schema}.cron_schedules
WHERE workspace_id = $1 AND cron IS NOT NULL AND timezone IS NULL AND zone <> $2
ORDER BY id
"""

# One process at a time brings schedules in line with a file: it holds many of them at once. The number is for "file".
LOCK_APPLY = "SELECT pg_advisory_xact_lock(1718185061, 0)"
OWNED_BY = "SELECT" + SCHEDULE_COLUMNS + "FROM {schema}.cron_schedules WHERE owner = $1 ORDER BY id"

# A process that hangs in the middle of a change loses its session, and with it the locks.
LIMIT_PATIENCE = "SELECT set_config('idle_in_transaction_session_timeout', $1, true)"

CLOCK = "SELECT coalesce($1::timestamptz, statement_timestamp())"

# The instant of an edit, and the latest occurrence that has ended before its time: jitter may do that. Asked for after
# the locks, so that whatever has fired is seen.
HORIZON = """
WITH clock AS (SELECT coalesce($2::timestamptz, statement_timestamp()) AS instant)
SELECT instant, (
        SELECT max(scheduled_for)
        FROM {schema}.cron_runs
        WHERE schedule_id = $1 AND scheduled_for > (SELECT instant FROM clock)
            AND origin = 'schedule' AND outcome <> 'disabled'
    ) AS fired
FROM clock
"""

# Whether a payload is the schedule's: the database decides what is the same JSON.
SAME_PAYLOAD = "SELECT payload = $2::text::jsonb FROM {schema}.cron_schedules WHERE id = $1"

# What an edit changed: [before, after] by field ($30), and the payloads if these are among it ($31). What the statement
# finds in the table is still the schedule as it was.
_CHANGED = """jsonb_build_object('changed', $30::text::jsonb || CASE WHEN $31::boolean
        THEN jsonb_build_object('payload', jsonb_build_array(
            (SELECT before.payload FROM {schema}.cron_schedules AS before WHERE before.id = $1), payload))
        ELSE '{}' END)"""

# The edit itself, with its version; whatever was broken gets another try.
EDIT_SCHEDULE = (
    """
WITH changed AS (
    UPDATE {schema}.cron_schedules
    SET queue_name = $2, payload = $3::text::jsonb, interval_us = $4, anchor_at = $5, jitter_us = $6, jitter_ratio = $7,
        priority = $8, starts_at = $9, ends_at = $10, max_runs = $11, sink = $12, delivery = $13, overlap = $14,
        max_attempts = $15, max_age_us = $16, backoff_us = $17, cron = $18, timezone = $19, zone = $20, dst_gap = $21,
        dst_fold = $22, owner = $23, catch_up = $24, misfire_grace_us = $25, updated_at = $26, version = version + 1,
        error = NULL, error_at = NULL
    WHERE id = $1
    RETURNING *
),
"""
    + _keep_version(
        holds_after="$27::timestamptz", change="'edited'", planned="$28::bigint", actor="$29", data=_CHANGED
    )
    + """
SELECT"""
    + SCHEDULE_COLUMNS
    + "FROM changed"
)

# Disables or enables, with its version.
SWITCH_SCHEDULE = (
    """
WITH changed AS (
    UPDATE {schema}.cron_schedules
    SET enabled = $2, updated_at = $3, version = version + 1, error = NULL, error_at = NULL
    WHERE id = $1
    RETURNING *
),
"""
    + _keep_version(
        holds_after="$4::timestamptz",
        change="CASE WHEN $2 THEN 'enabled' ELSE 'disabled' END",
        planned="$5::bigint",
        actor="$6",
    )
    + """
SELECT"""
    + SCHEDULE_COLUMNS
    + "FROM changed"
)

# Whether a definition is the one that an edit has just replaced: two releases may be declaring one name in turn.
IS_BACK = """
SELECT edited.created_at
FROM {schema}.cron_schedule_versions AS now
JOIN {schema}.cron_schedule_versions AS edited USING (schedule_id)
JOIN {schema}.cron_schedule_versions AS before USING (schedule_id)
WHERE schedule_id = $1 AND now.version = $2 AND edited.version = $2 - 1 AND before.version = $2 - 2
    AND now.change = 'edited' AND edited.change = 'edited'
    AND (now.queue_name, now.payload, now.interval_us, now.jitter_us, now.priority)
        IS NOT DISTINCT FROM (before.queue_name, before.payload, before.interval_us, before.jitter_us, before.priority)
    AND (now.starts_at, now.ends_at, now.max_runs)
        IS NOT DISTINCT FROM (before.starts_at, before.ends_at, before.max_runs)
    AND (now.sink, now.delivery, now.overlap, now.max_attempts, now.max_age_us, now.backoff_us, now.catch_up,
            now.misfire_grace_us)
        IS NOT DISTINCT FROM (before.sink, before.delivery, before.overlap, before.max_attempts, before.max_age_us,
            before.backoff_us, before.catch_up, before.misfire_grace_us)
    AND (now.cron, now.zone, now.dst_gap, now.dst_fold)
        IS NOT DISTINCT FROM (before.cron, before.zone, before.dst_gap, before.dst_fold)
    AND (coalesce(now.interval_us::text, now.cron) IS NOT NULL OR now.anchor_at = before.anchor_at)
"""

# Re-planning: ticks of the occurrences after $2 go, what was put in by a trigger stays.
DELETE_FUTURE_TICKS = """
DELETE FROM {schema}.cron_ticks WHERE schedule_id = $1 AND scheduled_for > $2 AND origin = 'schedule' RETURNING 1
"""
MOVE_CURSOR = """
UPDATE {schema}.cron_schedule_cursors SET next_tick_needed_at = $2, planned = $3, broken = false WHERE schedule_id = $1
"""

# Ticks that nobody may fire any more, each with its row in the ledger. One that somebody is just sending may go out.
DROP_TICKS = """
WITH dropped AS (
    DELETE FROM {schema}.cron_ticks WHERE schedule_id = ANY ($1::text[]) RETURNING *
)
INSERT INTO {schema}.cron_runs (schedule_id, scheduled_for, version, origin, outcome, reason, ended_at, attempts)
SELECT schedule_id, scheduled_for, version, origin, 'disabled',
    CASE WHEN leased_until > $3 THEN $2 || ' while it was being sent: it may have been delivered' ELSE $2 END, $3,
    attempts
FROM dropped
ON CONFLICT (schedule_id, scheduled_for) DO NOTHING
"""

# Enabled again before their time: dropped occurrences that are still to come are expected again, unless somebody had
# begun to send them.
FORGET_DROPPED = """
DELETE FROM {schema}.cron_runs
WHERE schedule_id = $1 AND scheduled_for > $2 AND outcome = 'disabled' AND origin = 'schedule' AND attempts = 0
RETURNING 1
"""

# Puts in a tick beside the rule, due at once, unless that instant is taken already. The schedule can't go meanwhile.
# Its event has the id that the message will have.
PLACE_TICK = """
WITH placed AS (
    INSERT INTO {schema}.cron_ticks (id, schedule_id, schedule_name, workspace_id, queue_name, payload, scheduled_for,
        execute_at, due_at, created_at, version, origin, priority, sink, delivery, overlap)
    SELECT $2, id, name, workspace_id, queue_name, payload, $3, $3, $3, $3, version, 'trigger', priority, sink,
        delivery, overlap
    FROM {schema}.cron_schedules
    WHERE id = $1
        AND NOT EXISTS (SELECT FROM {schema}.cron_runs WHERE schedule_id = $1 AND scheduled_for = $3)
        AND NOT EXISTS (SELECT FROM {schema}.cron_ticks WHERE schedule_id = $1 AND scheduled_for = $3)
    ON CONFLICT ON CONSTRAINT cron_ticks_execution_key DO NOTHING
    RETURNING id, schedule_id, scheduled_for
),
noted AS (
    INSERT INTO {schema}.execution_events (event, schedule_id, message_id, actor, data)
    SELECT 'triggered', schedule_id, 'msg_' || substr(id, 6), $4::text, jsonb_build_object(
        'scheduled_for', to_char(scheduled_for AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'))
    FROM placed
    WHERE $4 IS NOT NULL
)
SELECT id FROM placed
"""
SHARE_SCHEDULE = (
    "SELECT"
    + SCHEDULE_COLUMNS
    + """
    , coalesce($2::timestamptz, statement_timestamp()) AS instant
FROM {schema}.cron_schedules
WHERE id = $1
FOR KEY SHARE
"""
)

GET_SCHEDULE = "SELECT" + SCHEDULE_COLUMNS + "FROM {schema}.cron_schedules WHERE id = $1"

# Keyset pages in the order of the key, which is stable and means nothing else: `$2` is the last id of the page before.
# Of the two halves one has nothing to do.
LIST_SCHEDULES = (
    "SELECT"
    + SCHEDULE_COLUMNS
    + """
FROM (
    (SELECT * FROM {schema}.cron_schedules WHERE $1::text IS NULL AND id > $2 ORDER BY id LIMIT $3)
    UNION ALL
    (SELECT * FROM {schema}.cron_schedules WHERE workspace_id = $1 AND id > $2 ORDER BY id LIMIT $3)
) AS page
ORDER BY id
"""
)

# Removes schedules with their cursors. The last version says until when they held.
DELETE_SCHEDULES = (
    """
WITH deleted AS (
    DELETE FROM {schema}.cron_schedules WHERE id = ANY ($1::text[]) RETURNING *
),
changed AS (
    SELECT id, version + 1 AS version, false AS enabled, workspace_id, name, queue_name, payload, interval_us,
        anchor_at, jitter_us, jitter_ratio, priority, starts_at, ends_at, max_runs, sink, delivery, overlap,
        max_attempts, max_age_us, backoff_us, cron, timezone, zone, dst_gap, dst_fold, owner, catch_up,
        misfire_grace_us, $2::timestamptz AS updated_at,
        greatest($2::timestamptz, (
            SELECT max(scheduled_for)
            FROM {schema}.cron_runs
            WHERE schedule_id = deleted.id AND scheduled_for > $2 AND origin = 'schedule' AND outcome <> 'disabled'
        )) AS holds_after
    FROM deleted
),
"""
    + _keep_version(holds_after="holds_after", change="'deleted'", planned="0", actor="$3", data=_NAME)
    + """
SELECT"""
    + SCHEDULE_COLUMNS
    + "FROM deleted"
)

# Another try for a schedule whose rule could not be followed, from where it stopped.
RETRY_SCHEDULE = (
    """
WITH cursor AS (
    UPDATE {schema}.cron_schedule_cursors SET broken = false WHERE schedule_id = $1
),
changed AS (
    UPDATE {schema}.cron_schedules SET error = NULL, error_at = NULL WHERE id = $1
    RETURNING *
),
noted AS (
    INSERT INTO {schema}.execution_events (event, schedule_id, actor, data)
    SELECT 'retried', id, $2::text, jsonb_build_object('version', version) FROM changed WHERE $2::text IS NOT NULL
)
SELECT"""
    + SCHEDULE_COLUMNS
    + "FROM changed"
)

# What a workspace sent is gone with it; when its schedules held is kept.
FORGET_PAYLOADS = "UPDATE {schema}.cron_schedule_versions SET payload = NULL WHERE workspace_id = $1"

# The same for the events of its schedules: the one exception to their never being changed.
FORGET_NOTED_PAYLOADS = """
UPDATE {schema}.execution_events
SET data = data #- '{changed,payload}'
WHERE schedule_id = ANY (ARRAY(
        SELECT DISTINCT schedule_id FROM {schema}.cron_schedule_versions WHERE workspace_id = $1))
    AND event = 'edited' AND data -> 'changed' ? 'payload'
"""

# A schedule whose rule can't be followed is passed over from now on, and says why; unless it was changed meanwhile. Its
# event ($5) says which worker ($6) found out.
MARK_BROKEN = """
WITH broken AS (
    UPDATE {schema}.cron_schedules
    SET error = $3, error_at = coalesce($4::timestamptz, statement_timestamp())
    WHERE id = $1 AND version = $2
    RETURNING id
),
noted AS (
    INSERT INTO {schema}.execution_events (event, schedule_id, worker, data)
    SELECT 'broken', id, $6::text, jsonb_build_object('version', $2::integer, 'error', left($3, 1000))
    FROM broken
    WHERE $5::boolean
)
UPDATE {schema}.cron_schedule_cursors SET broken = true FROM broken WHERE schedule_id = broken.id
RETURNING schedule_id
"""
