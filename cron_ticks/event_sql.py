"""The statements that read events. Those that write them are parts of the statements that make the changes."""

# The partition of this week, should it be missing.
MAKE_PARTITION = "SELECT {schema}.cron_make_partition('events', (statement_timestamp() AT TIME ZONE 'UTC')::date)"

_COLUMNS = "SELECT sequence, at, event, schedule_id, message_id, worker, actor, data::text AS data"

# Everything about a message, or about a schedule with its messages: one index scan per partition, in the order of the
# sequence, which is the order in which they happened. `$2` is the last sequence of the page before.
EVENTS_OF_MESSAGE = (
    _COLUMNS
    + """
FROM {schema}.execution_events
WHERE message_id = $1 AND sequence > $2
ORDER BY sequence
LIMIT $3
"""
)
EVENTS_OF_SCHEDULE = (
    _COLUMNS
    + """
FROM {schema}.execution_events
WHERE schedule_id = $1 AND sequence > $2
ORDER BY sequence
LIMIT $3
"""
)
