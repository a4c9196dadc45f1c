"""The statements of the queue, each with what it guarantees.

As in the cron core, the time is an argument: NULL means the database's clock. A pair is a queue and a workspace, where
the system-wide workspace counts as ''. Whoever changes a message that may be in a worker's hand locks the token first.

What is looked for by id or by schedule says coalesce(completed_at, dlq_at) IS NULL, so that no planner without
statistics takes the index of unfinished messages instead of the key.

What changes a message's state is `noted`: it has a text that writes the events too, in `queue_event_sql`.
"""

from cron_ticks.events import Noted, noted
from token_queue import queue_event_sql as events

_INSERT_FROM_TICKS = """
    INSERT INTO {schema}.queue_messages (id, queue_name, workspace_id, payload, headers, priority, schedule_id,
        scheduled_for, process_after, inserted_at, exclusive)
    SELECT tick.message_id, tick.queue_name, tick.workspace_id, tick.payload,
        jsonb_build_object(
            'schedule_id', tick.schedule_id,
            'schedule_name', tick.schedule_name,
            'scheduled_for', to_char(tick.scheduled_for AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
            'tick_id', tick.id,
            'attempt', tick.attempts + 1,
            'ticker_id', pass.ticker_id,
            'origin', tick.origin),
        tick.priority, tick.schedule_id, tick.scheduled_for, pass.instant, pass.instant, tick.overlap <> 'allow'
"""

# The queue's part of the firing statement: a message per tick that passed the gate, in the order of being due.
INSERT_FROM_FIRED = (
    _INSERT_FROM_TICKS
    + """
    FROM fired AS tick, pass
    ORDER BY tick.due_at
    RETURNING 1
"""
)

# And its part where messages of a schedule must not overlap: those that find no unfinished one get in. The key decides;
# that it looks first only spares it from waiting for whoever is just ending a message, and LIMIT makes it look one by
# one. In the order of the key, and of one schedule's ticks the earliest goes first.
INSERT_FROM_LIMITED = (
    _INSERT_FROM_TICKS
    + """
    FROM limited AS tick
    LEFT JOIN LATERAL (
        SELECT message.id
        FROM {schema}.queue_messages AS message
        WHERE message.schedule_id = tick.schedule_id AND message.exclusive
            AND coalesce(message.completed_at, message.dlq_at) IS NULL
        LIMIT 1
    ) AS unfinished ON true
    CROSS JOIN pass
    WHERE unfinished.id IS NULL
    ORDER BY tick.schedule_id, tick.scheduled_for
    ON CONFLICT (schedule_id) WHERE exclusive AND coalesce(completed_at, dlq_at) IS NULL DO NOTHING
    RETURNING id
"""
)

# Wakes workers up, and only if one of the queue sleeps: NOTIFY makes commits wait for each other.
_WAKE = """
    SELECT pg_notify({channel}, {queue_name})
    WHERE EXISTS (
        SELECT FROM {schema}.queue_workers
        WHERE asleep AND {queue_name} = ANY (queues) AND seen_at > statement_timestamp() - interval '30 seconds')
"""


def _wake(channel: str, queue_name: str) -> str:
    return _WAKE.replace("{channel}", channel).replace("{queue_name}", queue_name)


# One message, in one round trip. No row: an unfinished message has its dedupe key.
_SEND_ONE = """
INSERT INTO {schema}.queue_messages
    (id, queue_name, workspace_id, payload, headers, priority, dedupe_key, process_after, inserted_at)
VALUES ($1, $2, $3, $4::text::jsonb, $5::text::jsonb, $6, $7,
    greatest(coalesce($8::timestamptz, statement_timestamp() + $9::interval), statement_timestamp()),
    statement_timestamp())
ON CONFLICT (queue_name, coalesce(workspace_id, ''), dedupe_key)
    WHERE dedupe_key IS NOT NULL AND completed_at IS NULL AND dlq_at IS NULL DO NOTHING
"""
_SENT_ONE = f"id, ({_wake('$10::text', '$2::text')})"
SEND_ONE = Noted(
    silent=f"{_SEND_ONE} RETURNING {_SENT_ONE}",
    noting=f"WITH sent AS ({_SEND_ONE}{events.NOTE_SENT}) SELECT {_SENT_ONE} FROM sent",
    least="all",
)

# The same for many at once, in their order, without waking anybody; a row for each that was sent. The others have a
# dedupe key that is taken.
_SEND_MANY = """
INSERT INTO {schema}.queue_messages
    (id, queue_name, workspace_id, payload, headers, priority, dedupe_key, process_after, inserted_at)
SELECT given.id, $2, given.workspace_id, given.payload::jsonb, given.headers::jsonb, given.priority, given.dedupe_key,
    greatest(coalesce(given.process_at, statement_timestamp() + given.delay), statement_timestamp()),
    statement_timestamp()
FROM unnest($1::text[], $3::text[], $4::text[], $5::text[], $6::smallint[], $7::text[], $8::timestamptz[],
        $9::interval[])
    WITH ORDINALITY AS given (id, workspace_id, payload, headers, priority, dedupe_key, process_at, delay, position)
ORDER BY position
ON CONFLICT (queue_name, coalesce(workspace_id, ''), dedupe_key)
    WHERE dedupe_key IS NOT NULL AND completed_at IS NULL AND dlq_at IS NULL DO NOTHING
"""
SEND_MANY = Noted(
    silent=f"{_SEND_MANY} RETURNING id",
    noting=f"WITH sent AS ({_SEND_MANY}{events.NOTE_SENT}) SELECT id FROM sent",
    least="all",
)

# The unfinished message that a duplicate is a duplicate of.
FIND_DUPLICATE = """
SELECT id FROM {schema}.queue_messages
WHERE queue_name = $1 AND coalesce(workspace_id, '') = coalesce($2, '') AND dedupe_key = $3
    AND completed_at IS NULL AND dlq_at IS NULL
"""

# Wakes the sleeping workers of some queues.
WAKE_WORKERS = f"SELECT ({_wake('$1::text', 'given.queue_name')}) FROM unnest($2::text[]) AS given (queue_name)"

# One look of a worker, in one statement:
#
# - `seen`: it is alive, and whether senders have to wake it up. Written only if that is news.
# - `charged`: tokens that ran out are removed, and what their holders had in hand has used an attempt. Locked tokens
#   are skipped: their holder is just ending messages. Those that this worker knows as its own ($12) are not: after an
#   outage its renewal is on the way. A message's own state is checked again under its row lock.
# - `level`: a skip scan over (workspace, priority) of each queue that this process handles. One index probe per level
#   with unfinished messages, whatever their number: it finds the level and its earliest message at once. What is done
#   with but can't be removed yet lies in its way, so that this is a sweep ($13): see `floors`. Otherwise one probe per
#   level that is known ($15 to $18), from the time on below which nothing was left there.
# - `leased`: pairs with due messages, a free slot and room in this process, those not served lately first, then the
#   earliest due. A pair that this worker holds already ($19, $20) is not free for it: one fetch for two tokens of a
#   pair would give out its messages twice. Of two workers the unique key lets one through. Inserted in the order of the
#   key, so that two workers never wait for each other in a circle. Nothing is read of the pair's messages here: only a
#   later statement sees what the last holder has done with them. Pairs that begin with a suspect are left to others
#   while this worker has one in hand ($11): see FETCH_MESSAGES.
#
# The result has the times in which something may be due that isn't now, how long the server looked for levels and how
# many dead rows it counts, and a row per token leased. Then a row per level with its earliest message, if wanted ($14).
LOOK = noted(
    """
WITH RECURSIVE clock AS (
    SELECT coalesce($1::timestamptz, statement_timestamp()) AS instant
),
seen AS (
    INSERT INTO {schema}.queue_workers AS worker (id, queues, asleep, started_at, seen_at)
    SELECT $2, $4::text[], $3, instant, instant
    FROM clock
    WHERE NOT EXISTS (
        SELECT FROM {schema}.queue_workers
        WHERE id = $2 AND asleep = $3 AND seen_at > instant - interval '5 seconds')
    ON CONFLICT (id) DO UPDATE SET queues = excluded.queues, asleep = excluded.asleep, seen_at = excluded.seen_at
),
expired AS (
    SELECT id, in_flight, leased_by
    FROM {schema}.queue_tokens
    WHERE leased_until <= (SELECT instant FROM clock) AND id <> ALL ($12::text[])
        AND leased_until > (SELECT CASE WHEN $13 THEN '-infinity' ELSE instant - interval '10 seconds' END FROM clock)
    ORDER BY leased_until
    LIMIT 100
    FOR UPDATE SKIP LOCKED
),
removed AS (
    DELETE FROM {schema}.queue_tokens WHERE id = ANY (ARRAY(SELECT id FROM expired))
),
charged AS (
    UPDATE {schema}.queue_messages
    SET attempts = attempts + 1, worker_deaths = worker_deaths + 1,
        failed_at = failed_at || (SELECT instant FROM clock),
        error_type = 'WorkerLost', error_traceback = NULL,
        error_message = 'its worker died, hung or lost the server while it had the message in hand'
    WHERE id = ANY (ARRAY(SELECT unnest(in_flight) FROM expired)) AND coalesce(completed_at, dlq_at) IS NULL
    RETURNING id, schedule_id, attempts
    {events}
),
handled AS (
    SELECT * FROM unnest($4::text[], $5::int[], $6::int[]) AS given (queue_name, tokens, room)
),
swept AS (
    SELECT handled.queue_name, first.workspace, first.priority, first.process_after, first.worker_deaths
    FROM handled
    CROSS JOIN LATERAL (
        SELECT coalesce(message.workspace_id, '') AS workspace, message.priority, message.process_after,
            message.worker_deaths
        FROM {schema}.queue_messages AS message
        WHERE message.queue_name = handled.queue_name AND message.completed_at IS NULL AND message.dlq_at IS NULL
        ORDER BY coalesce(message.workspace_id, ''), message.priority, message.process_after, message.sequence
        LIMIT 1
    ) AS first
    WHERE $13::boolean
    UNION ALL
    SELECT level.queue_name, next.workspace, next.priority, next.process_after, next.worker_deaths
    FROM swept AS level
    CROSS JOIN LATERAL (
        SELECT coalesce(message.workspace_id, '') AS workspace, message.priority, message.process_after,
            message.worker_deaths
        FROM {schema}.queue_messages AS message
        WHERE message.queue_name = level.queue_name AND message.completed_at IS NULL AND message.dlq_at IS NULL
            AND (coalesce(message.workspace_id, ''), message.priority) > (level.workspace, level.priority)
        ORDER BY coalesce(message.workspace_id, ''), message.priority, message.process_after, message.sequence
        LIMIT 1
    ) AS next
),
level AS MATERIALIZED (
    SELECT queue_name, workspace, priority, process_after, worker_deaths FROM swept
    UNION ALL
    SELECT known.queue_name, known.workspace, known.priority, first.process_after, first.worker_deaths
    FROM unnest($15::text[], $16::text[], $17::smallint[], $18::timestamptz[])
        AS known (queue_name, workspace, priority, floor)
    CROSS JOIN LATERAL (
        SELECT message.process_after, message.worker_deaths
        FROM {schema}.queue_messages AS message
        WHERE message.queue_name = known.queue_name AND coalesce(message.workspace_id, '') = known.workspace
            AND message.priority = known.priority AND message.process_after >= known.floor
            AND message.completed_at IS NULL AND message.dlq_at IS NULL
        ORDER BY message.process_after, message.sequence
        LIMIT 1
    ) AS first
),
looked AS MATERIALIZED (
    SELECT count(*) AS levels, min(process_after) FILTER (WHERE process_after > (SELECT instant FROM clock)) AS next_at,
        clock_timestamp() - statement_timestamp() AS took,
        pg_stat_get_dead_tuples('{schema}.queue_messages'::regclass) AS dead
    FROM level
),
due AS (
    SELECT queue_name, workspace, min(process_after) AS due_at, array_agg(priority) AS priorities,
        array_agg(process_after) AS earliest
    FROM level
    WHERE process_after <= (SELECT instant FROM clock)
        AND (queue_name, workspace) NOT IN (SELECT * FROM unnest($19::text[], $20::text[]))
    GROUP BY queue_name, workspace
    HAVING NOT $11 OR bool_or(worker_deaths = 0)
),
free AS (
    SELECT due.queue_name, due.workspace, due.due_at, handled.room, taken.slots,
        coalesce(served.position, 0) AS served_lately
    FROM due
    JOIN handled USING (queue_name)
    CROSS JOIN LATERAL (
        SELECT coalesce(array_agg(token.slot), '{}') AS slots,
            coalesce(sum(cardinality(token.in_flight)), 0) AS messages,
            coalesce(bool_or(token.leased_by = $2), false) AS ours
        FROM {schema}.queue_tokens AS token
        WHERE token.queue_name = due.queue_name AND coalesce(token.workspace_id, '') = due.workspace
    ) AS taken
    LEFT JOIN unnest($7::text[], $8::text[]) WITH ORDINALITY AS served (queue_name, workspace, position)
        ON served.queue_name = due.queue_name AND served.workspace = due.workspace
    WHERE taken.slots = '{}'
        OR NOT taken.ours AND cardinality(taken.slots) < handled.tokens AND (
            SELECT count(*) > taken.messages
            FROM (
                SELECT
                FROM unnest(due.priorities, due.earliest) AS level (priority, process_after)
                CROSS JOIN LATERAL (
                    SELECT FROM {schema}.queue_messages AS message
                    WHERE message.queue_name = due.queue_name AND coalesce(message.workspace_id, '') = due.workspace
                        AND message.priority = level.priority AND message.process_after >= level.process_after
                        AND message.completed_at IS NULL AND message.dlq_at IS NULL
                        AND message.process_after <= (SELECT instant FROM clock)
                    LIMIT taken.messages + 1
                ) AS message
                LIMIT taken.messages + 1
            ) AS beyond)
),
chosen AS (
    SELECT queue_name, workspace, slots, row_number() OVER () AS position
    FROM (
        SELECT *
        FROM (
            SELECT *, row_number() OVER (PARTITION BY queue_name ORDER BY served_lately, due_at) AS place FROM free
        ) AS ranked
        WHERE place <= room
        ORDER BY served_lately, due_at
        LIMIT cardinality($9::text[])
    ) AS best
),
leased AS (
    INSERT INTO {schema}.queue_tokens (id, queue_name, workspace_id, slot, leased_by, leased_at, leased_until)
    SELECT ($9::text[])[position], queue_name, nullif(workspace, ''),
        (SELECT min(slot) FROM generate_series(0, cardinality(slots)) AS slot WHERE slot <> ALL (slots)),
        $2, instant, instant + $10::interval
    FROM chosen, clock
    ORDER BY queue_name, workspace
    ON CONFLICT (queue_name, coalesce(workspace_id, ''), slot) DO NOTHING
    RETURNING id, queue_name, workspace_id
)
SELECT found.*, summary.*
FROM (
    SELECT instant, (SELECT count(*) FROM expired) AS expired, (SELECT count(*) FROM charged) AS charged,
        looked.levels, looked.took, looked.dead, looked.next_at - instant AS due_in,
        (SELECT min(leased_until) FROM {schema}.queue_tokens WHERE leased_until > instant) - instant AS expiry_in
    FROM clock, looked
) AS summary
LEFT JOIN (
    SELECT id, queue_name, workspace_id, NULL::smallint AS priority, NULL::timestamptz AS earliest
    FROM leased
    UNION ALL
    SELECT NULL, queue_name, workspace, priority, process_after
    FROM level
    WHERE $14::boolean
) AS found ON true
""",
    events.NOTE_ABANDONED,
    least="changes",
)

# Before a fetch where a pair may have several tokens: no other holder fetches until we have, so that the next statement
# sees what they have in hand. A process that is paused before it can send that statement keeps them for a moment only.
LOCK_PAIRS = """
SELECT set_config('idle_in_transaction_session_timeout', '3000', true)
FROM {schema}.queue_tokens AS token
WHERE EXISTS (
    SELECT FROM {schema}.queue_tokens AS own
    WHERE own.id = ANY ($1::text[]) AND own.queue_name = token.queue_name
        AND coalesce(own.workspace_id, '') = coalesce(token.workspace_id, ''))
ORDER BY token.id
FOR NO KEY UPDATE
"""

# Due messages of pairs that we hold, and the note of what we have in hand, in one statement and without a write per
# message: the token keeps everybody else away. One bounded index scan per priority; a level goes before the next unless
# a message there is ten minutes older. What we ($4) and the pair's other holders have in hand already is left out, and
# each scan begins at the floor of its priority ($8 to $11; NULL: none), below which nothing is left: see `floors`.
#
# A message that was in hand when a worker died is a suspect: it may be what killed it. A process has one suspect in
# hand at most ($7: it may take one), and that alone of its pair ($5: nothing of the pair is in hand): when it kills
# again, only it is charged twice. Where it may not be taken, later messages pass it by, unless the pair's messages run
# in order ($6), or it could be taken as soon as the pair's hand is empty.
_FETCH_MESSAGES = """
WITH clock AS (
    SELECT coalesce($1::timestamptz, statement_timestamp()) AS instant
),
held AS MATERIALIZED (
    SELECT token.id, token.leased_by, token.queue_name, coalesce(token.workspace_id, '') AS workspace, token.slot,
        wanted.most, wanted.empty_handed, wanted.in_order, wanted.urgent, wanted.high, wanted.normal, wanted.low
    FROM unnest($2::text[], $3::int[], $5::boolean[], $6::boolean[],
            $8::timestamptz[], $9::timestamptz[], $10::timestamptz[], $11::timestamptz[])
        AS wanted (id, most, empty_handed, in_order, urgent, high, normal, low)
    JOIN {schema}.queue_tokens AS token ON token.id = wanted.id
    ORDER BY token.id
    FOR NO KEY UPDATE OF token
),
others AS MATERIALIZED (
    SELECT unnest(token.in_flight) AS id
    FROM held
    CROSS JOIN LATERAL (
        SELECT in_flight
        FROM {schema}.queue_tokens
        WHERE queue_name = held.queue_name AND coalesce(workspace_id, '') = held.workspace AND slot < held.slot
        UNION ALL
        SELECT in_flight
        FROM {schema}.queue_tokens
        WHERE queue_name = held.queue_name AND coalesce(workspace_id, '') = held.workspace AND slot > held.slot
    ) AS token
),
found AS MATERIALIZED (
    SELECT held.id AS token_id, held.empty_handed, held.in_order, message.*
    FROM held
    CROSS JOIN LATERAL (
        SELECT due.*
        FROM (VALUES (0, held.urgent), (1, held.high), (2, held.normal), (3, held.low)) AS level (priority, floor)
        CROSS JOIN LATERAL (
            SELECT id, pending.queue_name, workspace_id, payload::text AS payload, headers::text AS headers,
                attempts, worker_deaths, CASE WHEN exclusive THEN schedule_id END AS exclusive_for,{schedule}
                pending.priority, process_after + pending.priority * interval '10 minutes' AS turn, sequence
            FROM {schema}.queue_messages AS pending
            WHERE pending.queue_name = held.queue_name AND coalesce(pending.workspace_id, '') = held.workspace
                AND pending.priority = level.priority
                AND completed_at IS NULL AND dlq_at IS NULL
                AND process_after <= (SELECT instant FROM clock)
                AND process_after >= coalesce(level.floor, '-infinity')
                AND pending.id NOT IN (SELECT unnest($4::text[]))
                AND pending.id NOT IN (SELECT id FROM others)
            ORDER BY process_after, sequence
            LIMIT held.most
        ) AS due
        ORDER BY due.turn, due.sequence
        LIMIT held.most
    ) AS message
),
suspects AS MATERIALIZED (
    SELECT DISTINCT ON (token_id) token_id, id, turn, sequence, empty_handed
    FROM found
    WHERE worker_deaths > 0
    ORDER BY token_id, turn, sequence
),
chosen AS (
    SELECT token_id, id
    FROM suspects
    WHERE $7 AND empty_handed AND NOT EXISTS (
        SELECT FROM found
        WHERE found.token_id = suspects.token_id AND (found.turn, found.sequence) < (suspects.turn, suspects.sequence))
    ORDER BY turn
    LIMIT 1
),
taken AS MATERIALIZED (
    SELECT found.*
    FROM found
    LEFT JOIN suspects ON suspects.token_id = found.token_id
    LEFT JOIN chosen ON chosen.token_id = found.token_id
    WHERE CASE
        WHEN chosen.id IS NOT NULL THEN found.id = chosen.id
        WHEN suspects.id IS NULL THEN true
        WHEN found.in_order OR ($7 AND NOT found.empty_handed)
            THEN (found.turn, found.sequence) < (suspects.turn, suspects.sequence)
        ELSE found.worker_deaths = 0
    END
),
noted AS (
    UPDATE {schema}.queue_tokens AS token
    SET in_flight = ARRAY(
        SELECT id FROM taken WHERE taken.token_id = token.id
        UNION ALL
        SELECT id FROM unnest(token.in_flight) AS kept (id) WHERE id IN (SELECT unnest($4::text[]))
    )
    WHERE id IN (SELECT token_id FROM taken)
    {events}
)
SELECT held.id AS held_id, coalesce(counted.found, 0) AS found, upcoming.due_in, taken.*
FROM held
CROSS JOIN LATERAL (
    SELECT min(next.process_after) - (SELECT instant FROM clock) AS due_in
    FROM (VALUES (0), (1), (2), (3)) AS level (priority)
    CROSS JOIN LATERAL (
        SELECT process_after
        FROM {schema}.queue_messages AS pending
        WHERE pending.queue_name = held.queue_name AND coalesce(pending.workspace_id, '') = held.workspace
            AND pending.priority = level.priority
            AND completed_at IS NULL AND dlq_at IS NULL
            AND process_after > (SELECT instant FROM clock)
        ORDER BY process_after
        LIMIT 1
    ) AS next
) AS upcoming
LEFT JOIN (SELECT token_id, count(*) AS found FROM found GROUP BY token_id) AS counted ON counted.token_id = held.id
LEFT JOIN taken ON taken.token_id = held.id
ORDER BY taken.turn, taken.sequence
"""
FETCH_MESSAGES = Noted(
    silent=_FETCH_MESSAGES.replace("{schedule}", "").replace("{events}", ""),
    noting=_FETCH_MESSAGES.replace("{schedule}", " schedule_id,").replace("{events}", events.NOTE_CLAIMED),
    least="all",
)

# Ends messages, and lets go of tokens with them, if all of the tokens are ours: otherwise it does nothing. The tokens'
# rows are locked first: a worker that lost its token ends nothing, and nobody takes one over meanwhile. The lock lets a
# fetch of the same worker pass. The result is the tokens that are ours.
COMPLETE_MESSAGES = noted(
    """
WITH held AS MATERIALIZED (
    SELECT id, leased_by FROM {schema}.queue_tokens WHERE id = ANY ($3::text[]) ORDER BY id FOR KEY SHARE
),
completed AS (
    UPDATE {schema}.queue_messages
    SET completed_at = coalesce($1::timestamptz, statement_timestamp()), attempts = attempts + 1
    WHERE id = ANY ($2::text[]) AND coalesce(completed_at, dlq_at) IS NULL
        AND (SELECT count(*) FROM held) = cardinality($3::text[])
    {events}
),
leaving AS MATERIALIZED (
    SELECT id FROM {schema}.queue_tokens
    WHERE id = ANY ($4::text[]) AND (SELECT count(*) FROM held) = cardinality($3::text[])
    ORDER BY id
    FOR UPDATE
),
released AS (
    DELETE FROM {schema}.queue_tokens WHERE id = ANY (ARRAY(SELECT id FROM leaving))
)
SELECT id FROM held
""",
    events.NOTE_COMPLETED,
    least="all",
)

# What has ended in another way than well is not in hand any more: whatever happens to the worker now is not its fault.
_PUT_DOWN = """
, put_down AS (
    UPDATE {schema}.queue_tokens
    SET in_flight = ARRAY(SELECT unnest(in_flight) EXCEPT SELECT unnest($2::text[]))
    WHERE id = ANY (ARRAY(SELECT id FROM held))
)
SELECT id FROM held
"""

# Failed attempts, each noted once by its number: tried again after a pause, or dead.
FAIL_MESSAGES = noted(
    """
WITH clock AS (
    SELECT coalesce($1::timestamptz, statement_timestamp()) AS instant
),
held AS MATERIALIZED (
    SELECT id, leased_by FROM {schema}.queue_tokens WHERE id = ANY ($4::text[]) ORDER BY id FOR NO KEY UPDATE
),
failed AS (
    UPDATE {schema}.queue_messages AS message
    SET attempts = attempts + 1, failed_at = failed_at || instant,
        error_type = given.error_type, error_message = given.error_message, error_traceback = given.error_traceback,
        process_after = instant + coalesce(given.retry_in, interval '0'),
        dlq_at = CASE WHEN given.retry_in IS NULL THEN instant END
    FROM unnest($2::text[], $3::text[], $5::text[], $6::text[], $7::text[], $8::interval[], $9::int[])
            AS given (id, token_id, error_type, error_message, error_traceback, retry_in, attempt)
        JOIN held ON held.id = given.token_id, clock
    WHERE message.id = given.id AND message.attempts = given.attempt - 1 AND coalesce(completed_at, dlq_at) IS NULL
    {events}
)
"""
    + _PUT_DOWN,
    events.NOTE_FAILED,
    least="changes",
)

# Dead without another try: what had used up its attempts when it came into our hand, by workers that died.
BURY_MESSAGES = noted(
    """
WITH held AS MATERIALIZED (
    SELECT id, leased_by FROM {schema}.queue_tokens WHERE id = ANY ($4::text[]) ORDER BY id FOR NO KEY UPDATE
),
buried AS (
    UPDATE {schema}.queue_messages AS message
    SET dlq_at = coalesce($1::timestamptz, statement_timestamp())
    FROM unnest($2::text[], $3::text[]) AS given (id, token_id) JOIN held ON held.id = given.token_id
    WHERE message.id = given.id AND coalesce(completed_at, dlq_at) IS NULL
    {events}
)
"""
    + _PUT_DOWN,
    events.NOTE_BURIED,
    least="changes",
)

# Keeps tokens in use; those that don't come back were taken over. A token that ran out unnoticed is still ours.
RENEW_TOKENS = """
WITH held AS (
    SELECT id FROM {schema}.queue_tokens WHERE id = ANY ($2::text[]) ORDER BY id FOR NO KEY UPDATE
)
UPDATE {schema}.queue_tokens
SET leased_until = coalesce($1::timestamptz, statement_timestamp()) + $3::interval
WHERE id = ANY (ARRAY(SELECT id FROM held))
RETURNING id
"""

# The end of a worker: its tokens are free at once, nobody is charged, and sleeping workers take over.
RETIRE_WORKER = f"""
WITH leaving AS MATERIALIZED (
    SELECT id FROM {{schema}}.queue_tokens WHERE leased_by = $1 ORDER BY id FOR UPDATE
),
released AS (
    DELETE FROM {{schema}}.queue_tokens WHERE id = ANY (ARRAY(SELECT id FROM leaving))
),
gone AS (
    DELETE FROM {{schema}}.queue_workers WHERE id = $1 RETURNING queues
)
SELECT ({_wake("$2::text", "given.queue_name")}) FROM gone, unnest(gone.queues) AS given (queue_name)
"""

# Queues with completed messages: a skip scan, one probe per queue.
_COMPLETED_QUEUES = """
WITH RECURSIVE clock AS (SELECT coalesce($1::timestamptz, statement_timestamp()) AS instant),
queue AS (
    (
        SELECT queue_name FROM {schema}.queue_messages
        WHERE completed_at IS NOT NULL
        ORDER BY queue_name
        LIMIT 1
    )
    UNION ALL
    SELECT next.queue_name
    FROM queue
    CROSS JOIN LATERAL (
        SELECT queue_name FROM {schema}.queue_messages
        WHERE completed_at IS NOT NULL AND queue_name > queue.queue_name
        ORDER BY queue_name
        LIMIT 1
    ) AS next
),
"""

# Completed messages whose retention is over. Each worker sees to the queues that it handles. Those that nobody handles,
# and in which nothing was completed for as long as the settings' retention ($5), are anybody's. A worker that is away
# for a while may have another retention in mind.
DELETE_COMPLETED = (
    _COMPLETED_QUEUES
    + """
kept AS (
    SELECT queue_name, retention FROM unnest($2::text[], $3::interval[]) AS handled (queue_name, retention)
    UNION ALL
    SELECT queue_name, $5::interval
    FROM queue, clock
    WHERE queue_name <> ALL ($2::text[]) AND NOT EXISTS (
        SELECT FROM {schema}.queue_workers
        WHERE queue_name = ANY (queues) AND seen_at > instant - interval '30 seconds')
        AND NOT EXISTS (
            SELECT FROM {schema}.queue_messages AS message
            WHERE message.queue_name = queue.queue_name AND message.completed_at >= instant - $5::interval)
),
old AS (
    SELECT message.id
    FROM kept
    CROSS JOIN LATERAL (
        SELECT id
        FROM {schema}.queue_messages
        WHERE queue_name = kept.queue_name AND completed_at < (SELECT instant FROM clock) - kept.retention
        ORDER BY completed_at
        LIMIT $4
        FOR UPDATE SKIP LOCKED
    ) AS message
    LIMIT $4
)
DELETE FROM {schema}.queue_messages WHERE id = ANY (ARRAY(SELECT id FROM old))
RETURNING 1
"""
)

# The same of all queues, by hand: whatever was completed so long ago.
DELETE_COMPLETED_BEFORE = (
    _COMPLETED_QUEUES
    + """
old AS (
    SELECT message.id
    FROM queue
    CROSS JOIN LATERAL (
        SELECT id
        FROM {schema}.queue_messages
        WHERE queue_name = queue.queue_name AND completed_at < (SELECT instant - $2::interval FROM clock)
        ORDER BY completed_at
        LIMIT $3
        FOR UPDATE SKIP LOCKED
    ) AS message
    LIMIT $3
)
DELETE FROM {schema}.queue_messages WHERE id = ANY (ARRAY(SELECT id FROM old))
RETURNING 1
"""
)

# Dead letters that died so long ago, the oldest first. Each has its event ($4), by whoever asks ($5) or a worker ($6).
DELETE_DEAD_BEFORE = """
WITH clock AS (SELECT coalesce($1::timestamptz, statement_timestamp()) AS instant),
old AS (
    SELECT id
    FROM {schema}.queue_messages
    WHERE dlq_at < (SELECT instant - $2::interval FROM clock)
    ORDER BY dlq_at, id
    LIMIT $3
    FOR UPDATE SKIP LOCKED
),
removed AS (
    DELETE FROM {schema}.queue_messages WHERE id = ANY (ARRAY(SELECT id FROM old)) RETURNING id, schedule_id
),
noted AS (
    INSERT INTO {schema}.execution_events (event, schedule_id, message_id, worker, actor, data)
    SELECT 'purged', schedule_id, id, $6::text, $5::text, jsonb_build_object('reason', 'its retention is over')
    FROM removed
    WHERE $4::boolean
)
SELECT id FROM removed
"""

# Workers that went without a word.
DELETE_LOST_WORKERS = """
DELETE FROM {schema}.queue_workers
WHERE seen_at < coalesce($1::timestamptz, statement_timestamp()) - interval '5 minutes'
"""

# Queues with unfinished messages that no running worker handles: a skip scan, one probe per queue.
UNHANDLED_QUEUES = """
WITH RECURSIVE queue AS (
    (
        SELECT queue_name FROM {schema}.queue_messages
        WHERE completed_at IS NULL AND dlq_at IS NULL
        ORDER BY queue_name
        LIMIT 1
    )
    UNION ALL
    SELECT next.queue_name
    FROM queue
    CROSS JOIN LATERAL (
        SELECT queue_name FROM {schema}.queue_messages
        WHERE completed_at IS NULL AND dlq_at IS NULL AND queue_name > queue.queue_name
        ORDER BY queue_name
        LIMIT 1
    ) AS next
)
SELECT queue_name
FROM queue
WHERE NOT EXISTS (
    SELECT FROM {schema}.queue_workers
    WHERE queue_name = ANY (queues)
        AND seen_at > coalesce($1::timestamptz, statement_timestamp()) - interval '30 seconds')
ORDER BY queue_name
"""

# For people: counts every unfinished and dead message, so it costs what they are.
QUEUE_STATES = """
WITH clock AS (
    SELECT coalesce($1::timestamptz, statement_timestamp()) AS instant
),
counted AS (
    SELECT queue_name, count(*) FILTER (WHERE process_after <= instant) AS due,
        count(*) FILTER (WHERE process_after > instant) AS waiting, 0::bigint AS dead,
        min(process_after) FILTER (WHERE process_after <= instant) AS oldest_due
    FROM {schema}.queue_messages, clock
    WHERE completed_at IS NULL AND dlq_at IS NULL
    GROUP BY queue_name
    UNION ALL
    SELECT queue_name, 0, 0, count(*), NULL FROM {schema}.queue_messages WHERE dlq_at IS NOT NULL GROUP BY queue_name
    UNION ALL
    SELECT DISTINCT unnest(queues), 0, 0, 0, NULL::timestamptz FROM {schema}.queue_workers, clock
    WHERE seen_at > instant - interval '30 seconds'
)
SELECT queue_name, sum(due)::bigint AS due, sum(waiting)::bigint AS waiting, sum(dead)::bigint AS dead,
    min(oldest_due) AS oldest_due,
    (
        SELECT count(*) FROM {schema}.queue_workers, clock
        WHERE queue_name = ANY (queues) AND seen_at > instant - interval '30 seconds'
    ) AS workers
FROM counted
GROUP BY queue_name
ORDER BY queue_name
"""

# How far messages have come. One that is in the hand of a worker whose token has run out waits for another.
MESSAGE_STATES = """
WITH clock AS (SELECT coalesce($1::timestamptz, statement_timestamp()) AS instant)
SELECT message.id, inserted_at AS sent_at, completed_at, dlq_at AS dead_at, attempts, error_type, error_message,
    progress.state, CASE WHEN progress.state IN ('pending', 'failed') THEN process_after END AS next_attempt_at
FROM {schema}.queue_messages AS message, clock
CROSS JOIN LATERAL (
    SELECT CASE
        WHEN completed_at IS NOT NULL THEN 'completed'
        WHEN dlq_at IS NOT NULL THEN 'dead'
        WHEN EXISTS (
            SELECT FROM {schema}.queue_tokens AS token
            WHERE token.queue_name = message.queue_name
                AND coalesce(token.workspace_id, '') = coalesce(message.workspace_id, '')
                AND token.leased_until > instant AND message.id = ANY (token.in_flight)
        ) THEN 'running'
        WHEN attempts > 0 THEN 'failed'
        ELSE 'pending' END AS state
) AS progress
WHERE message.id = ANY ($2::text[])
"""

DEAD_COLUMNS = """
    id, queue_name, workspace_id, payload::text AS payload, headers::text AS headers, attempts, worker_deaths,
    error_type, error_message, error_traceback, inserted_at AS sent_at, failed_at, dlq_at AS dead_at
"""

# Dead letters, the latest first. Keyset pages: ($4, $5) is the place of the last one of the page before.
LIST_DEAD = (
    "SELECT"
    + DEAD_COLUMNS
    + """
FROM {schema}.queue_messages
WHERE dlq_at IS NOT NULL
    AND ($1::text IS NULL OR queue_name = $1) AND ($2::text IS NULL OR workspace_id = $2)
    AND ($4::timestamptz IS NULL OR (dlq_at, id) < ($4, $5::text))
ORDER BY dlq_at DESC, id DESC
LIMIT $3
"""
)

GET_DEAD = "SELECT" + DEAD_COLUMNS + "FROM {schema}.queue_messages WHERE id = $1 AND dlq_at IS NOT NULL"

# The event of each, if events are kept ($8), by whom ($9).
_NOTE_DEAD = """
, noted AS (
    INSERT INTO {schema}.execution_events (event, schedule_id, message_id, actor)
    SELECT '{name}', schedule_id, id, $9::text FROM {name} WHERE $8::boolean
)
"""

# Dead letters by their ids, or all of a queue or workspace, a batch at a time from a place in their order on.
_CHOSEN_DEAD = """
WITH chosen AS MATERIALIZED (
    SELECT id, queue_name, coalesce(workspace_id, '') AS workspace, dedupe_key, dlq_at,
        CASE WHEN exclusive THEN schedule_id END AS exclusive_for
    FROM {schema}.queue_messages
    WHERE dlq_at IS NOT NULL AND dlq_at <= $5
        AND ($1::text[] IS NULL OR id = ANY ($1))
        AND ($2::text IS NULL OR queue_name = $2) AND ($3::text IS NULL OR workspace_id = $3)
        AND (dlq_at, id) > ($6::timestamptz, $7::text)
    ORDER BY dlq_at, id
    LIMIT $4
    FOR UPDATE SKIP LOCKED
),
last AS (
    SELECT dlq_at, id, count(*) OVER () AS chosen FROM chosen ORDER BY dlq_at DESC, id DESC LIMIT 1
)
"""

# Dead letters begin anew. One whose dedupe key another unfinished message has by now stays dead, and of several dead
# ones with one key the first begins anew; so does one of a schedule whose messages must not overlap.
REDRIVE_DEAD = (
    _CHOSEN_DEAD
    + """
, redriven AS (
    UPDATE {schema}.queue_messages AS message
    SET dlq_at = NULL, attempts = 0, worker_deaths = 0, process_after = statement_timestamp()
    FROM (
        SELECT *, row_number() OVER (PARTITION BY queue_name, workspace, dedupe_key ORDER BY dlq_at, id) AS place,
            row_number() OVER (PARTITION BY exclusive_for ORDER BY dlq_at, id) AS turn
        FROM chosen
    ) AS chosen
    WHERE message.id = chosen.id
        AND (chosen.exclusive_for IS NULL OR chosen.turn = 1 AND NOT EXISTS (
            SELECT FROM {schema}.queue_messages AS other
            WHERE other.schedule_id = chosen.exclusive_for AND other.exclusive
                AND coalesce(other.completed_at, other.dlq_at) IS NULL))
        AND (chosen.dedupe_key IS NULL OR chosen.place = 1 AND NOT EXISTS (
            SELECT FROM {schema}.queue_messages AS other
            WHERE other.queue_name = chosen.queue_name AND coalesce(other.workspace_id, '') = chosen.workspace
                AND other.dedupe_key = chosen.dedupe_key AND other.completed_at IS NULL AND other.dlq_at IS NULL))
    RETURNING message.id, message.queue_name, message.schedule_id
)
"""
    + _NOTE_DEAD.replace("{name}", "redriven")
    + """
SELECT last.*, (SELECT count(*) FROM redriven) AS changed, ARRAY(SELECT DISTINCT queue_name FROM redriven) AS queues
FROM last
"""
)

PURGE_DEAD = (
    _CHOSEN_DEAD
    + """
, purged AS (
    DELETE FROM {schema}.queue_messages WHERE id = ANY (ARRAY(SELECT id FROM chosen)) RETURNING id, schedule_id
)
"""
    + _NOTE_DEAD.replace("{name}", "purged")
    + """
SELECT last.*, (SELECT count(*) FROM purged) AS changed, '{}'::text[] AS queues
FROM last
"""
)

# A workspace's messages in whatever state. Tokens of its pairs are let go of by their holders, or run out. Those that
# had not come to their end have an event ($2), by whom ($3).
DELETE_WORKSPACE = """
WITH deleted AS (
    DELETE FROM {schema}.queue_messages WHERE workspace_id = $1 RETURNING id, schedule_id, completed_at
),
noted AS (
    INSERT INTO {schema}.execution_events (event, schedule_id, message_id, actor, data)
    SELECT 'purged', schedule_id, id, $3::text, jsonb_build_object('reason', 'workspace deleted')
    FROM deleted
    WHERE $2::boolean AND completed_at IS NULL
)
SELECT count(*) FROM deleted
"""
