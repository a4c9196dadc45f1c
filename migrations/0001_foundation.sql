-- oldest-release: 0.1.0
-- Schedules, their ticks and the messages that ticks become.

CREATE TABLE {schema}.cron_schedules (
    id text PRIMARY KEY,                        -- cron_<ulid>
    workspace_id text,                          -- NULL: system-wide
    name text NOT NULL,
    queue_name text NOT NULL,
    payload jsonb NOT NULL,
    -- Occurrence k is anchor_at + k * interval, for ever: integer microseconds, so that nothing drifts.
    interval_us bigint NOT NULL CHECK (interval_us >= 1000000),
    anchor_at timestamptz NOT NULL,
    created_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL,
    -- One schedule per name and workspace, and the system-wide ones are a workspace of their own here.
    CONSTRAINT cron_schedules_name_key UNIQUE NULLS NOT DISTINCT (workspace_id, name)
);

-- Up to where ticks have been made. Apart from the wide row of the schedule, because it changes at every pass.
CREATE TABLE {schema}.cron_schedule_cursors (
    schedule_id text PRIMARY KEY REFERENCES {schema}.cron_schedules ON DELETE CASCADE,
    next_tick_needed_at timestamptz NOT NULL    -- the first occurrence that has no tick yet
);

CREATE INDEX cron_schedule_cursors_next_idx ON {schema}.cron_schedule_cursors (next_tick_needed_at);

-- One token per occurrence. What the message needs is copied, so that firing reads this table alone.
CREATE TABLE {schema}.cron_ticks (
    id text PRIMARY KEY,                        -- tick_<ulid>
    schedule_id text NOT NULL,                  -- no foreign key: an edit and a firing never wait for each other
    schedule_name text NOT NULL,
    workspace_id text,
    queue_name text NOT NULL,
    payload jsonb NOT NULL,
    scheduled_for timestamptz NOT NULL,         -- the occurrence
    execute_at timestamptz NOT NULL,            -- never changed once made
    due_at timestamptz NOT NULL,                -- when to look at the tick next
    created_at timestamptz NOT NULL,
    -- Managers at work at the same time can't make an occurrence twice.
    CONSTRAINT cron_ticks_execution_key UNIQUE (schedule_id, execute_at)
);

CREATE INDEX cron_ticks_due_idx ON {schema}.cron_ticks (due_at);

CREATE TABLE {schema}.queue_messages (
    id text PRIMARY KEY,                        -- msg_<ulid>; the tick's ULID when a tick sent it
    queue_name text NOT NULL,
    workspace_id text,
    payload jsonb NOT NULL,
    headers jsonb NOT NULL DEFAULT '{}',
    schedule_id text,                           -- NULL: sent by the application
    scheduled_for timestamptz,
    process_after timestamptz NOT NULL,         -- when to look at the message next: a claim moves it to its end
    inserted_at timestamptz NOT NULL,
    attempts integer NOT NULL DEFAULT 0,
    claimed_by text,                            -- ticker_<ulid>: only it may complete or fail the message
    completed_at timestamptz,
    dlq_at timestamptz,                         -- dead: not tried again
    last_error text
);

-- Work to do, claims that ran out among it.
CREATE INDEX queue_messages_pending_idx ON {schema}.queue_messages (queue_name, process_after)
    WHERE completed_at IS NULL AND dlq_at IS NULL;

-- What became of an occurrence.
CREATE INDEX queue_messages_occurrence_idx ON {schema}.queue_messages (schedule_id, scheduled_for)
    WHERE schedule_id IS NOT NULL;
