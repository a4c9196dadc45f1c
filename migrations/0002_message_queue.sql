-- oldest-release: 0.1.0
-- The message queue: tokens for (queue, workspace) pairs instead of a claim per message, and the workers that hold them.

-- Names are compared byte by byte: the order means nothing to people here, and every look depends on its speed.
ALTER TABLE {schema}.queue_messages
    ALTER COLUMN id TYPE text COLLATE "C",
    ALTER COLUMN queue_name TYPE text COLLATE "C",
    ALTER COLUMN workspace_id TYPE text COLLATE "C",
    ALTER COLUMN process_after SET DEFAULT statement_timestamp(),
    ALTER COLUMN inserted_at SET DEFAULT statement_timestamp(),
    DROP COLUMN claimed_by,
    ADD COLUMN sequence bigint GENERATED ALWAYS AS IDENTITY,    -- order of messages that are due at the same instant
    ADD COLUMN priority smallint NOT NULL DEFAULT 2 CHECK (priority BETWEEN 0 AND 3),  -- 0 urgent, 1 high, 2 normal, 3 low
    ADD COLUMN dedupe_key text COLLATE "C",                     -- at most one unfinished message per key
    ADD COLUMN worker_deaths integer NOT NULL DEFAULT 0,        -- attempts in which the worker died or lost its token
    ADD COLUMN failed_at timestamptz[] NOT NULL DEFAULT '{}',   -- the end of each failed attempt
    ADD COLUMN error_type text,                                 -- of the last failed attempt
    ADD COLUMN error_traceback text;

ALTER TABLE {schema}.queue_messages RENAME COLUMN last_error TO error_message;

-- Unfinished messages by pair, in the order in which they are taken. The system-wide pair, workspace NULL, is ''.
DROP INDEX {schema}.queue_messages_pending_idx;
CREATE INDEX queue_messages_pending_idx ON {schema}.queue_messages
    (queue_name, coalesce(workspace_id, ''), priority, process_after, sequence)
    WHERE completed_at IS NULL AND dlq_at IS NULL;

CREATE UNIQUE INDEX queue_messages_dedupe_key ON {schema}.queue_messages
    (queue_name, coalesce(workspace_id, ''), dedupe_key)
    WHERE dedupe_key IS NOT NULL AND completed_at IS NULL AND dlq_at IS NULL;

-- Completed messages in the order in which their retention ends.
CREATE INDEX queue_messages_completed_idx ON {schema}.queue_messages (queue_name, completed_at)
    WHERE completed_at IS NOT NULL;

-- Dead letters, page by page.
CREATE INDEX queue_messages_dead_idx ON {schema}.queue_messages (dlq_at, id) WHERE dlq_at IS NOT NULL;

-- The right to process one pair for a while. Whoever holds the row under its own id may end the pair's messages.
CREATE TABLE {schema}.queue_tokens (
    id text COLLATE "C" PRIMARY KEY,            -- token_<ulid>
    queue_name text COLLATE "C" NOT NULL,
    workspace_id text COLLATE "C",
    slot smallint NOT NULL,                     -- 0, unless the queue allows more than one token per pair
    leased_by text NOT NULL,                    -- ticker_<ulid>
    leased_at timestamptz NOT NULL,
    leased_until timestamptz NOT NULL,
    in_flight text[] NOT NULL DEFAULT '{}'      -- messages in the holder's hand: charged an attempt if it dies
);

-- Of two workers that lease a pair at once, this key decides.
CREATE UNIQUE INDEX queue_tokens_pair_key ON {schema}.queue_tokens (queue_name, coalesce(workspace_id, ''), slot);

CREATE INDEX queue_tokens_expiry_idx ON {schema}.queue_tokens (leased_until);

-- Workers that run: what they handle, and whether a sender has to wake them up.
CREATE TABLE {schema}.queue_workers (
    id text COLLATE "C" PRIMARY KEY,            -- ticker_<ulid>
    queues text[] NOT NULL,
    asleep boolean NOT NULL,
    started_at timestamptz NOT NULL,
    seen_at timestamptz NOT NULL
);
