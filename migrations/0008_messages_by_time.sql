-- oldest-release: 0.1.0
-- Messages of occurrences by time first: those that are made together stand together. By schedule first, each message
-- went to a page of its own, which had to be found, changed and written to the log as a whole.

DROP INDEX {schema}.queue_messages_occurrence_idx;
CREATE INDEX queue_messages_occurrence_idx ON {schema}.queue_messages (scheduled_for, schedule_id)
    WHERE schedule_id IS NOT NULL;
