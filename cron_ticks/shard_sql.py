"""The statements with which managers share out the slots of the schedules, and learn what is needed.

As elsewhere, the time is an argument: NULL means the database's clock. A token is its manager's for as long as that
one's lease lasts, so one row is renewed, however many shards there are. That a shard has a manager is all that matters
here: should two believe to have it, the cursors' locks keep them apart.
"""

# The tokens of as many shards as somebody wants.
ADD_SHARDS = """
INSERT INTO {schema}.cron_shards (shards, shard)
SELECT $1::int, shard FROM generate_series(0, $1::int - 1) AS shard
ON CONFLICT DO NOTHING
"""

# The heartbeat of a manager, in one statement:
#
# - `renewed`: it is alive, and what it has is its own for another lease. $2 is the number of shards; 0: it leases none,
#   and looks at all slots ($5).
# - `free`, `excess`, `taken`: whoever has shards takes at once what is nobody's, or of a manager whose lease has ended,
#   however much that is. A newcomer gets its share of what others have too much of; they look after it too until they
#   learn of that. It does so with its second heartbeat and not before: a pod that dies again and again when it starts
#   is another manager each time, and must not have what nobody else looks after while its lease lasts. Two that take at
#   the same time pass each other by.
#   A lease far longer than its own ($3) was written when the server's clock was wrong, and holds nothing.
# - `first`: the occurrence of each of its slots that is needed first. Of a slot with a floor ($6), only from there on.
BEAT = """
WITH clock AS (SELECT coalesce($4::timestamptz, statement_timestamp()) AS instant),
renewed AS (
    INSERT INTO {schema}.cron_managers (shards, id, leased_until)
    SELECT $2::int, $1, instant + $3::interval FROM clock WHERE $2 > 0
    ON CONFLICT (shards, id) DO UPDATE SET leased_until = excluded.leased_until
),
others AS MATERIALIZED (
    SELECT id
    FROM {schema}.cron_managers, clock
    WHERE shards = $2 AND leased_until > instant AND leased_until <= instant + 10 * $3::interval AND id <> $1
),
share AS MATERIALIZED (SELECT ceil($2::numeric / (1 + count(*)))::int AS most FROM others),
own AS MATERIALIZED (SELECT shard FROM {schema}.cron_shards WHERE shards = $2 AND leased_by = $1),
free AS MATERIALIZED (
    SELECT shard
    FROM {schema}.cron_shards
    WHERE shards = $2 AND (leased_by IS NULL OR leased_by <> $1 AND leased_by NOT IN (SELECT id FROM others))
        AND (EXISTS (SELECT FROM own) OR NOT EXISTS (
            SELECT FROM {schema}.cron_shards WHERE shards = $2 AND leased_by IN (SELECT id FROM others)))
    FOR UPDATE SKIP LOCKED
),
excess AS MATERIALIZED (
    SELECT shard
    FROM (
        SELECT shard, row_number() OVER (PARTITION BY leased_by ORDER BY shard) AS number
        FROM {schema}.cron_shards
        WHERE shards = $2 AND leased_by IN (SELECT id FROM others)
    ) AS counted, clock
    WHERE number > (SELECT most FROM share)
        AND EXISTS (SELECT FROM {schema}.cron_managers WHERE shards = $2 AND id = $1 AND leased_until > instant)
    ORDER BY number DESC
    LIMIT greatest(0, (SELECT most FROM share) - (SELECT count(*) FROM own) - (SELECT count(*) FROM free))
),
moving AS MATERIALIZED (
    SELECT shard
    FROM {schema}.cron_shards
    WHERE shards = $2 AND shard = ANY (ARRAY(SELECT shard FROM excess)) AND leased_by IN (SELECT id FROM others)
    FOR UPDATE SKIP LOCKED
),
taken AS (
    UPDATE {schema}.cron_shards
    SET leased_by = $1
    WHERE shards = $2 AND shard = ANY (ARRAY(SELECT shard FROM free UNION ALL SELECT shard FROM moving))
    RETURNING shard
),
mine AS MATERIALIZED (SELECT shard FROM own UNION ALL SELECT shard FROM taken),
slot AS MATERIALIZED (
    SELECT given.slot, given.floor
    FROM unnest($5::int[], $6::timestamptz[]) AS given (slot, floor)
    WHERE $2 = 0 OR given.slot % nullif($2, 0) IN (SELECT shard FROM mine)
),
first AS MATERIALIZED (
    SELECT slot.slot, needed.next_tick_needed_at
    FROM slot
    LEFT JOIN LATERAL (
        SELECT cursor.next_tick_needed_at
        FROM {schema}.cron_schedule_cursors AS cursor
        WHERE cursor.slot = slot.slot AND NOT cursor.broken
            AND cursor.next_tick_needed_at >= coalesce(slot.floor, '-infinity')
        ORDER BY cursor.next_tick_needed_at
        LIMIT 1
    ) AS needed ON true
)
SELECT clock.instant, ARRAY(SELECT slot FROM first ORDER BY next_tick_needed_at, slot) AS slots,
    ARRAY(SELECT next_tick_needed_at FROM first ORDER BY next_tick_needed_at, slot) AS needed,
    (SELECT count(*) FROM mine) AS shards, (SELECT count(*) FROM taken) AS taken,
    EXISTS (SELECT FROM {schema}.cron_backfills WHERE due_at IS NOT NULL) AS backfills
FROM clock
"""

# A manager that ends lets go of all it has, and the others hear of it ($3, $4).
RETIRE_MANAGER = """
WITH gone AS (
    DELETE FROM {schema}.cron_managers WHERE shards = $2 AND id = $1 RETURNING id
),
released AS (
    UPDATE {schema}.cron_shards
    SET leased_by = NULL
    WHERE shards = $2 AND shard IN (
        SELECT shard FROM {schema}.cron_shards WHERE shards = $2 AND leased_by = $1 FOR UPDATE SKIP LOCKED)
)
SELECT pg_notify($3, $4) FROM gone
"""

# Managers that ended without a word, a while ago.
FORGET_MANAGERS = """
DELETE FROM {schema}.cron_managers
WHERE (shards, id) IN (
    SELECT shards, id
    FROM {schema}.cron_managers
    WHERE leased_until < coalesce($1::timestamptz, statement_timestamp()) - interval '1 hour'
    FOR UPDATE SKIP LOCKED)
"""
