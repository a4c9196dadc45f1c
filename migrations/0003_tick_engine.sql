-- oldest-release: 0.1.0
-- The tick engine: rules with bounds and jitter, versions of schedules, leases and priorities of ticks, and the ledger.

-- Ids are compared byte by byte: their order means nothing to people, and every firing depends on its speed.
ALTER TABLE {schema}.cron_schedules
    ALTER COLUMN id TYPE text COLLATE "C",
    ALTER COLUMN interval_us DROP NOT NULL,     -- NULL: a one-off, whose only occurrence is anchor_at
    ADD COLUMN jitter_us bigint NOT NULL DEFAULT 0 CHECK (jitter_us >= 0),  -- an occurrence moves by less than this, either way
    ADD COLUMN jitter_ratio double precision,   -- of the interval, if it was asked for in that way
    ADD COLUMN priority smallint NOT NULL DEFAULT 2 CHECK (priority BETWEEN 0 AND 3),  -- 0 urgent, 1 high, 2 normal, 3 low
    ADD COLUMN starts_at timestamptz,           -- no occurrence before it
    ADD COLUMN ends_at timestamptz,             -- none after it
    ADD COLUMN max_runs bigint CHECK (max_runs > 0),  -- and no more than so many
    ADD COLUMN enabled boolean NOT NULL DEFAULT true,
    ADD COLUMN version integer NOT NULL DEFAULT 1,
    ADD COLUMN error text,                      -- why no more ticks are made, if the rule can't be followed
    ADD COLUMN error_at timestamptz,
    -- Times that programs can read: a row that can't be read would stop the managers.
    ADD CONSTRAINT cron_schedules_times_check CHECK (
        anchor_at >= '1970-01-01 00:00:00+00' AND anchor_at < '2500-01-01 00:00:00+00'
        AND starts_at >= '1970-01-01 00:00:00+00' AND starts_at < '2500-01-01 00:00:00+00'
        AND ends_at >= '1970-01-01 00:00:00+00' AND ends_at < '2500-01-01 00:00:00+00');

-- The schedules of a workspace, page by page.
CREATE INDEX cron_schedules_workspace_idx ON {schema}.cron_schedules (workspace_id, id) WHERE workspace_id IS NOT NULL;

-- Schedules of which people must be told.
CREATE INDEX cron_schedules_error_idx ON {schema}.cron_schedules (id) WHERE error IS NOT NULL;

ALTER TABLE {schema}.cron_schedule_cursors
    ALTER COLUMN schedule_id TYPE text COLLATE "C",
    ALTER COLUMN next_tick_needed_at DROP NOT NULL,  -- NULL: none is needed, because it is disabled or at its end
    ADD COLUMN planned bigint NOT NULL DEFAULT 0,  -- occurrences so far, made or missed: what max_runs counts
    ADD COLUMN broken boolean NOT NULL DEFAULT false;  -- passed over until the schedule is edited, declared or enabled again

DROP INDEX {schema}.cron_schedule_cursors_next_idx;
CREATE INDEX cron_schedule_cursors_next_idx ON {schema}.cron_schedule_cursors (next_tick_needed_at) WHERE NOT broken;

-- What a schedule was, from when on: what should have happened can be computed from these rows alone. A version holds
-- for occurrences after `holds_after`, up to that of any later version; one that isn't enabled expects none.
CREATE TABLE {schema}.cron_schedule_versions (
    schedule_id text COLLATE "C" NOT NULL,
    version integer NOT NULL,
    holds_after timestamptz NOT NULL,
    change text NOT NULL CHECK (change IN ('created', 'edited', 'disabled', 'enabled', 'deleted')),
    enabled boolean NOT NULL,
    workspace_id text,
    name text NOT NULL,
    queue_name text NOT NULL,
    payload jsonb,                              -- NULL: removed with its workspace
    interval_us bigint,
    anchor_at timestamptz NOT NULL,
    jitter_us bigint NOT NULL,
    jitter_ratio double precision,
    priority smallint NOT NULL,
    starts_at timestamptz,
    ends_at timestamptz,
    max_runs bigint,
    planned bigint NOT NULL,                    -- occurrences before it: what is left of max_runs
    created_at timestamptz NOT NULL,
    PRIMARY KEY (schedule_id, version)
);

CREATE INDEX cron_schedule_versions_workspace_idx ON {schema}.cron_schedule_versions (workspace_id)
    WHERE workspace_id IS NOT NULL;

INSERT INTO {schema}.cron_schedule_versions (schedule_id, version, holds_after, change, enabled, workspace_id, name,
    queue_name, payload, interval_us, anchor_at, jitter_us, priority, planned, created_at)
SELECT id, 1, greatest(anchor_at, updated_at) - interval '1 microsecond', 'created', true, workspace_id, name,
    queue_name, payload, interval_us, anchor_at, 0, priority, 0, updated_at
FROM {schema}.cron_schedules;

ALTER TABLE {schema}.cron_ticks
    ALTER COLUMN id TYPE text COLLATE "C",
    ALTER COLUMN schedule_id TYPE text COLLATE "C",
    ADD COLUMN version integer NOT NULL DEFAULT 1,
    ADD COLUMN origin text NOT NULL DEFAULT 'schedule' CHECK (origin IN ('schedule', 'trigger', 'backfill', 'recovery')),
    ADD COLUMN priority smallint NOT NULL DEFAULT 2 CHECK (priority BETWEEN 0 AND 3),
    ADD COLUMN attempts integer NOT NULL DEFAULT 0,  -- counted when leased
    ADD COLUMN leased_by text,                  -- ticker_<ulid>
    ADD COLUMN leased_at timestamptz,
    ADD COLUMN leased_until timestamptz;

-- Due ticks, one scan per priority. A lease moves due_at to its own end.
DROP INDEX {schema}.cron_ticks_due_idx;
CREATE INDEX cron_ticks_due_idx ON {schema}.cron_ticks (priority, due_at);

CREATE INDEX cron_ticks_lease_idx ON {schema}.cron_ticks (leased_until) WHERE leased_until IS NOT NULL;

-- The ledger: how each tick ended. Its key is the gate that an occurrence passes once in the life of its schedule.
CREATE TABLE {schema}.cron_runs (
    schedule_id text COLLATE "C" NOT NULL,
    scheduled_for timestamptz NOT NULL,         -- the occurrence; of a trigger, its own instant
    version integer NOT NULL,                   -- of the schedule
    origin text NOT NULL,
    outcome text NOT NULL CHECK (outcome IN ('enqueued', 'missed', 'overlapped', 'disabled', 'failed', 'expired')),
    reason text,
    message_id text COLLATE "C",                -- msg_<ulid>: the tick's ULID; NULL unless enqueued
    ended_at timestamptz NOT NULL,
    lateness interval,                          -- from when it was due to ended_at, if enqueued
    attempts integer NOT NULL,
    ticker_id text,
    CONSTRAINT cron_runs_occurrence_key PRIMARY KEY (schedule_id, scheduled_for)
) PARTITION BY RANGE (scheduled_for);

-- Makes the ledger's partition of a day (UTC), unless it is there. Attached rather than created as a partition, because
-- that never locks out a firing. It runs with its owner's rights: workers need none to change the schema.
CREATE FUNCTION {schema}.cron_make_run_partition(day date) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET datestyle = 'ISO'
AS $function$
DECLARE
    partition_name text := 'cron_runs_' || to_char(day, 'YYYYMMDD');
    first_instant timestamptz := day::timestamp AT TIME ZONE 'UTC';
    end_instant timestamptz := (day + 1)::timestamp AT TIME ZONE 'UTC';
BEGIN
    IF EXISTS (
        SELECT
        FROM pg_inherits
        WHERE inhparent = '{schema}.cron_runs'::regclass
            AND inhrelid = to_regclass(format('{schema}.%I', partition_name))
    ) THEN
        RETURN false;
    END IF;
    -- One maker at a time; whoever waited finds it done. The first number stands for "cron".
    PERFORM pg_advisory_xact_lock(1668443246, '{schema}.cron_runs'::regclass::oid::integer);
    -- From the catalogue, because to_regclass() may not know yet what was committed while we waited.
    IF EXISTS (
        SELECT
        FROM pg_inherits
        JOIN pg_class ON pg_class.oid = inhrelid
        WHERE inhparent = '{schema}.cron_runs'::regclass AND relname = partition_name
    ) THEN
        RETURN false;
    END IF;
    EXECUTE format(
        'CREATE TABLE {schema}.%I (LIKE {schema}.cron_runs INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING INDEXES)',
        partition_name);
    EXECUTE format(
        'ALTER TABLE {schema}.cron_runs ATTACH PARTITION {schema}.%I FOR VALUES FROM (%L) TO (%L)',
        partition_name, first_instant, end_instant);
    RETURN true;
END
$function$;

SELECT {schema}.cron_make_run_partition((statement_timestamp() AT TIME ZONE 'UTC')::date + day)
FROM generate_series(-1, 7) AS day;

-- By how much an occurrence moves: a hash of the schedule and the occurrence, evenly in [-amplitude, amplitude), the same
-- for everybody who asks. cron_ticks.occurrences.jitter_offset() is its twin.
CREATE FUNCTION {schema}.cron_jitter(schedule_id text, occurrence timestamptz, amplitude_us bigint) RETURNS interval
LANGUAGE sql STABLE PARALLEL SAFE
RETURN CASE WHEN amplitude_us > 0 THEN
    (('x' || left(encode(sha256(convert_to(
        schedule_id || ' ' || (extract(epoch FROM occurrence) * 1000000)::bigint, 'UTF8')), 'hex'), 15))::bit(60)::bigint
        % (2 * amplitude_us) - amplitude_us) * interval '1 microsecond'
    ELSE interval '0' END;
