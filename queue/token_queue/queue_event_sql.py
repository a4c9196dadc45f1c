"""The events of messages: what the statements of `queue_sql` write along, each from the rows that they really changed.

A piece stands at the end of the part that changes rows, in the place of `{events}`: RETURNING, and a part that writes.
"""

_MESSAGE_EVENT = "INSERT INTO {schema}.execution_events (event, schedule_id, message_id, worker, data)"

# Of a time, as the headers of a message have it.
_UNTIL = """to_char(process_after AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')"""

# Long errors are kept with the dead letter alone.
_ERROR = """'attempt', attempts, 'error_type', error_type, 'error_message', left(error_message, 1000)"""

NOTE_SENT = f"""
    RETURNING id, process_after, inserted_at
),
noted AS (
    INSERT INTO {{schema}}.execution_events (event, message_id, data)
    SELECT CASE WHEN process_after > inserted_at THEN 'deferred' ELSE 'sent' END, id,
        CASE WHEN process_after > inserted_at THEN jsonb_build_object('until', {_UNTIL}) END
    FROM sent
"""

# What COPY has sent, in the transaction of the COPY.
NOTE_COPIED = """
INSERT INTO {schema}.execution_events (event, message_id)
SELECT 'sent', id FROM unnest($1::text[]) WITH ORDINALITY AS copied (id, position) ORDER BY position
"""

# The worker is the one that had them in hand; who found out is in the data.
NOTE_ABANDONED = f"""
),
noted AS (
    {_MESSAGE_EVENT}
    SELECT 'abandoned', schedule_id, id,
        (SELECT leased_by FROM expired WHERE charged.id = ANY (expired.in_flight) LIMIT 1),
        jsonb_build_object('attempt', attempts, 'found_by', $2::text)
    FROM charged
"""

NOTE_CLAIMED = f"""
),
noted_claimed AS (
    {_MESSAGE_EVENT}
    SELECT 'claimed', taken.schedule_id, taken.id, held.leased_by, jsonb_build_object('attempt', taken.attempts + 1)
    FROM taken
    JOIN held ON held.id = taken.token_id
    ORDER BY taken.turn, taken.sequence
"""

NOTE_COMPLETED = f"""
    RETURNING id, schedule_id, attempts
),
noted AS (
    {_MESSAGE_EVENT}
    SELECT 'completed', schedule_id, id, (SELECT leased_by FROM held LIMIT 1), jsonb_build_object('attempt', attempts)
    FROM completed
"""

NOTE_FAILED = f"""
    RETURNING message.id, message.schedule_id, message.attempts, message.error_type, message.error_message,
        message.process_after, message.dlq_at, held.leased_by
),
noted AS (
    {_MESSAGE_EVENT}
    SELECT CASE WHEN dlq_at IS NULL THEN 'retry_scheduled' ELSE 'dead_lettered' END, schedule_id, id, leased_by,
        jsonb_build_object({_ERROR})
            || CASE WHEN dlq_at IS NULL THEN jsonb_build_object('retry_at', {_UNTIL}) ELSE '{{}}' END
    FROM failed
"""

NOTE_BURIED = f"""
    RETURNING message.id, message.schedule_id, message.attempts, message.error_type, message.error_message,
        held.leased_by
),
noted AS (
    {_MESSAGE_EVENT}
    SELECT 'dead_lettered', schedule_id, id, leased_by, jsonb_build_object({_ERROR})
    FROM buried
"""
