-- oldest-release: 0.1.0
-- Sinks of the user's own, delivery guarantees, overlap, and the retries of ticks that could not be sent.

ALTER TABLE {schema}.cron_schedules
    ADD COLUMN sink text COLLATE "C" NOT NULL DEFAULT 'queue',  -- where the payload goes; 'queue' is our own
    ADD COLUMN delivery text NOT NULL DEFAULT 'exactly_once'
        CHECK (delivery IN ('exactly_once', 'at_least_once', 'at_most_once')),
    ADD COLUMN overlap text NOT NULL DEFAULT 'allow' CHECK (overlap IN ('allow', 'skip', 'queue_one')),
    ADD COLUMN max_attempts integer CHECK (max_attempts > 0),  -- to send a tick; NULL: the setting's, as for the next two
    ADD COLUMN max_age_us bigint CHECK (max_age_us > 0),  -- after which it isn't tried again
    ADD COLUMN backoff_us bigint CHECK (backoff_us > 0);  -- before its second attempt

ALTER TABLE {schema}.cron_schedule_versions
    ADD COLUMN sink text COLLATE "C" NOT NULL DEFAULT 'queue',
    ADD COLUMN delivery text NOT NULL DEFAULT 'exactly_once',
    ADD COLUMN overlap text NOT NULL DEFAULT 'allow',
    ADD COLUMN max_attempts integer,
    ADD COLUMN max_age_us bigint,
    ADD COLUMN backoff_us bigint;

ALTER TABLE {schema}.cron_ticks
    ADD COLUMN sink text COLLATE "C" NOT NULL DEFAULT 'queue',
    ADD COLUMN delivery text NOT NULL DEFAULT 'exactly_once',
    ADD COLUMN overlap text NOT NULL DEFAULT 'allow',
    ADD COLUMN turn smallint NOT NULL DEFAULT 0 CHECK (turn BETWEEN 0 AND 2),  -- 0 due now, 1 a retry, 2 catching up
    ADD COLUMN recovery boolean NOT NULL DEFAULT false,  -- an attempt may have been delivered without our knowing
    ADD COLUMN waiting boolean NOT NULL DEFAULT false,  -- for the end of its schedule's unfinished message
    ADD COLUMN error text;                      -- of the last attempt

-- Due ticks of a sink in the order of their importance: no sink wades through another's, no fresh tick through retries.
DROP INDEX {schema}.cron_ticks_due_idx;
CREATE INDEX cron_ticks_due_idx ON {schema}.cron_ticks (sink, turn, priority, due_at);

-- At most one tick of a schedule waits for the end of its message.
CREATE UNIQUE INDEX cron_ticks_waiting_key ON {schema}.cron_ticks (schedule_id) WHERE waiting;

ALTER TABLE {schema}.cron_runs
    ADD COLUMN recovered boolean NOT NULL DEFAULT false;  -- an attempt's lease ran out, and another took the tick over

-- Messages of schedules that must not overlap: one unfinished at a time. Waiting for a retry is unfinished, dead is not.
-- Schedules are compared byte by byte here too, so that a tick finds the index.
ALTER TABLE {schema}.queue_messages
    ALTER COLUMN schedule_id TYPE text COLLATE "C",
    ADD COLUMN exclusive boolean NOT NULL DEFAULT false;
CREATE UNIQUE INDEX queue_messages_overlap_key ON {schema}.queue_messages (schedule_id)
    WHERE exclusive AND coalesce(completed_at, dlq_at) IS NULL;

-- Sinks that workers have served, so that whoever declares a schedule knows what there is.
CREATE TABLE {schema}.cron_sinks (
    name text COLLATE "C" PRIMARY KEY,
    kind text NOT NULL CHECK (kind IN ('same_database', 'outside')),
    seen_at timestamptz NOT NULL                -- a worker that serves it was there
);

-- Ends the statement that calls it.
CREATE FUNCTION {schema}.cron_refuse(reason text) RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $function$
BEGIN
    RAISE EXCEPTION USING MESSAGE = reason;
END
$function$;
