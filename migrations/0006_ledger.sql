-- oldest-release: 0.1.0
-- The ledger in full: what was missed and made up, recoveries, events, audits, backfills, and how long all that is kept.

ALTER TABLE {schema}.cron_schedules
    ADD COLUMN catch_up text NOT NULL DEFAULT 'latest' CHECK (catch_up IN ('skip', 'latest', 'all', 'spread')),
    ADD COLUMN misfire_grace_us bigint CHECK (misfire_grace_us > 0);  -- a tick later than this is missed; NULL: none is

ALTER TABLE {schema}.cron_schedule_versions
    ADD COLUMN catch_up text NOT NULL DEFAULT 'latest',
    ADD COLUMN misfire_grace_us bigint;

ALTER TABLE {schema}.cron_ticks
    ADD COLUMN fire_before timestamptz,         -- after this it is missed, unless somebody has begun with it
    ADD COLUMN lost_at timestamptz;             -- when the first lease ended that nobody gave back

-- Beside a tick of the rule, one of a backfill may wait for the end of its schedule's message: it takes nobody's place.
DROP INDEX {schema}.cron_ticks_waiting_key;
CREATE UNIQUE INDEX cron_ticks_waiting_key ON {schema}.cron_ticks (schedule_id, (origin = 'backfill')) WHERE waiting;

-- Occurrences that were missed in a row are one row: under the last of them, so that it is kept as long as any of them.
ALTER TABLE {schema}.cron_runs
    ADD COLUMN missed_since timestamptz,        -- the first of several missed occurrences; NULL: the row is of one
    ADD COLUMN occurrences bigint NOT NULL DEFAULT 1,
    ADD COLUMN recovery_time interval,          -- from the end of the lost lease to the end of the tick
    ADD CONSTRAINT cron_runs_missed_check CHECK (
        missed_since IS NULL AND occurrences = 1
        OR missed_since < scheduled_for AND occurrences > 1 AND outcome = 'missed');

CREATE INDEX cron_runs_missed_idx ON {schema}.cron_runs (missed_since) WHERE missed_since IS NOT NULL;

-- Those of one schedule, for a backfill: there may be millions of others, and millions of the schedule's other runs.
CREATE INDEX cron_runs_stretch_idx ON {schema}.cron_runs (schedule_id, scheduled_for) WHERE missed_since IS NOT NULL;

-- The runs of a time, without another tree to keep: they come in the order of time, so a summary per range of pages does.
CREATE INDEX cron_runs_time_idx ON {schema}.cron_runs USING brin (scheduled_for) WITH (autosummarize = on);

-- What became no message is rare, and what people ask for: it has a tree.
CREATE INDEX cron_runs_outcome_idx ON {schema}.cron_runs (scheduled_for, schedule_id) WHERE outcome <> 'enqueued';

-- Schedules that have had a name, also those that are gone.
CREATE INDEX cron_schedule_versions_name_idx ON {schema}.cron_schedule_versions (name);

-- Versions that replaced others, in the order in which they let these be forgotten.
CREATE INDEX cron_schedule_versions_replacing_idx ON {schema}.cron_schedule_versions
    (holds_after, schedule_id, version) WHERE version > 1;

-- Every change of a message's or a schedule's state, written in the transaction that makes it and never changed.
CREATE SEQUENCE {schema}.execution_events_sequence;
CREATE TABLE {schema}.execution_events (
    at timestamptz NOT NULL DEFAULT statement_timestamp(),
    sequence bigint NOT NULL DEFAULT nextval('{schema}.execution_events_sequence'),
    event text NOT NULL,
    schedule_id text COLLATE "C",
    message_id text COLLATE "C",
    worker text,                                -- ticker_<ulid>
    actor text,                                 -- who asked for it, if that was no worker
    data jsonb
) PARTITION BY RANGE (at);

CREATE INDEX execution_events_message_idx ON {schema}.execution_events (message_id, sequence)
    WHERE message_id IS NOT NULL;
CREATE INDEX execution_events_schedule_idx ON {schema}.execution_events (schedule_id, sequence)
    WHERE schedule_id IS NOT NULL;

-- From when on something is complete: what is older has been removed.
CREATE TABLE {schema}.cron_retention (
    kind text PRIMARY KEY CHECK (kind IN ('runs', 'events', 'versions')),
    kept_since timestamptz NOT NULL
);

-- What the audits that run by themselves have found.
CREATE TABLE {schema}.cron_audits (
    started_at timestamptz PRIMARY KEY,
    since timestamptz NOT NULL,
    until timestamptz NOT NULL,
    ended_at timestamptz,                       -- NULL: it is under way, or its worker died
    schedules bigint,
    expected bigint,
    enqueued bigint,
    explained bigint,
    pending bigint,
    overdue bigint,
    late bigint,
    unexplained bigint,
    duplicate bigint
);

-- Occurrences of the past that somebody wants to have after all.
CREATE TABLE {schema}.cron_backfills (
    id text COLLATE "C" PRIMARY KEY,            -- backfill_<ulid>
    schedule_id text COLLATE "C" NOT NULL,
    start_at timestamptz NOT NULL,
    end_at timestamptz NOT NULL,                -- the first instant after it
    next_at timestamptz NOT NULL,               -- up to here it is done
    per_minute integer NOT NULL CHECK (per_minute > 0),
    total bigint NOT NULL,                      -- occurrences in it
    made bigint NOT NULL DEFAULT 0,             -- of these, ticks were made
    skipped bigint NOT NULL DEFAULT 0,          -- and these had ended already, or were pending
    created_at timestamptz NOT NULL,
    created_by text,
    due_at timestamptz,                         -- when to go on; NULL: it has ended
    ended_at timestamptz,
    outcome text CHECK (outcome IN ('done', 'cancelled', 'failed')),
    reason text
);

CREATE INDEX cron_backfills_due_idx ON {schema}.cron_backfills (due_at) WHERE due_at IS NOT NULL;
CREATE INDEX cron_backfills_schedule_idx ON {schema}.cron_backfills (schedule_id, created_at);

-- Makes a partition of a day or of a week that begins on Monday (UTC), unless it is there. Attached rather than created
-- as a partition, because that never locks out a firing. It runs with its owner's rights: workers need none to change
-- the schema.
DROP FUNCTION {schema}.cron_make_run_partition(date);
CREATE FUNCTION {schema}.cron_make_partition(kind text, day date) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET datestyle = 'ISO'
AS $function$
DECLARE
    parent text := CASE kind WHEN 'runs' THEN 'cron_runs' WHEN 'events' THEN 'execution_events' END;
    first_day date := CASE kind WHEN 'runs' THEN day ELSE date_trunc('week', day)::date END;
    beyond date := first_day + CASE kind WHEN 'runs' THEN 1 ELSE 7 END;
    parent_id oid := format('{schema}.%I', parent)::regclass;
    partition_name text := format('%s_%s', parent, to_char(first_day, 'YYYYMMDD'));
BEGIN
    IF EXISTS (
        SELECT
        FROM pg_inherits
        WHERE inhparent = parent_id AND inhrelid = to_regclass(format('{schema}.%I', partition_name))
    ) THEN
        RETURN false;
    END IF;
    -- One maker at a time; whoever waited finds it done. The first number stands for "cron".
    PERFORM pg_advisory_xact_lock(1668443246, parent_id::integer);
    -- From the catalogue, because to_regclass() may not know yet what was committed while we waited.
    IF EXISTS (
        SELECT
        FROM pg_inherits
        JOIN pg_class ON pg_class.oid = inhrelid
        WHERE inhparent = parent_id AND relname = partition_name
    ) THEN
        RETURN false;
    END IF;
    EXECUTE format(
        'CREATE TABLE {schema}.%I (LIKE {schema}.%I INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING INDEXES)',
        partition_name, parent);
    EXECUTE format(
        'ALTER TABLE {schema}.%I ATTACH PARTITION {schema}.%I FOR VALUES FROM (%L) TO (%L)',
        parent, partition_name, first_day::timestamp AT TIME ZONE 'UTC', beyond::timestamp AT TIME ZONE 'UTC');
    RETURN true;
END
$function$;

-- Removes the oldest partition that ends before an instant, if there is one, and notes from when on the rest is complete.
-- Never today's, nor one of a day to come. That needs a lock on the parent which no firing can share, for a moment:
-- whoever doesn't get it soon gives up (55P03) and comes again. It is asked for last, when nothing else is left to wait
-- for: one remover at a time, and no VACUUM at work on the partition. An automatic one gives way after a second.
CREATE FUNCTION {schema}.cron_drop_partition(kind text, before timestamptz) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET datestyle = 'ISO' SET lock_timeout = '2s'
AS $function$
DECLARE
    parent text := CASE kind WHEN 'runs' THEN 'cron_runs' WHEN 'events' THEN 'execution_events' END;
    days integer := CASE kind WHEN 'runs' THEN 1 WHEN 'events' THEN 7 END;
    parent_id oid := format('{schema}.%I', parent)::regclass;
    oldest text;
    beyond timestamptz;
BEGIN
    IF NOT pg_try_advisory_xact_lock(1668443248, parent_id::integer) THEN
        RAISE lock_not_available USING MESSAGE = 'another process is removing partitions of ' || parent;
    END IF;
    SELECT relname, (to_date(right(relname, 8), 'YYYYMMDD') + days)::timestamp AT TIME ZONE 'UTC'
    INTO oldest, beyond
    FROM pg_inherits
    JOIN pg_class ON pg_class.oid = inhrelid
    WHERE inhparent = parent_id AND relname ~ ('^' || parent || '_[0-9]{8}$')
    ORDER BY relname
    LIMIT 1;
    IF oldest IS NULL OR before IS NULL OR beyond > least(before, statement_timestamp()) THEN
        RETURN NULL;
    END IF;
    EXECUTE format('LOCK TABLE {schema}.%I IN SHARE UPDATE EXCLUSIVE MODE', oldest);
    PERFORM set_config('lock_timeout', '100ms', true);
    EXECUTE format('DROP TABLE {schema}.%I', oldest);
    INSERT INTO {schema}.cron_retention AS kept (kind, kept_since) VALUES (cron_drop_partition.kind, beyond)
    ON CONFLICT ON CONSTRAINT cron_retention_pkey DO UPDATE
    SET kept_since = greatest(kept.kept_since, excluded.kept_since);
    RETURN oldest;
END
$function$;

-- Whoever may execute it removes what happened: that is not for everybody.
REVOKE EXECUTE ON FUNCTION {schema}.cron_drop_partition(text, timestamptz) FROM PUBLIC;

-- Which of these occurrences have a run. It looks into the days concerned alone: a statement that names the ledger itself
-- locks every day that is kept, with all of its indexes, and a server has room for some thousands of locks.
CREATE FUNCTION {schema}.cron_fired_before(schedule_ids text[], moments timestamptz[])
RETURNS TABLE (schedule_id text, scheduled_for timestamptz)
LANGUAGE plpgsql STABLE SECURITY DEFINER ROWS 10
SET search_path = pg_catalog, pg_temp SET timezone = 'UTC'
AS $function$
DECLARE
    day regclass;
BEGIN
    FOR day IN
        SELECT DISTINCT to_regclass(format('{schema}.%I', 'cron_runs_' || to_char(moment, 'YYYYMMDD')))
        FROM unnest(moments) AS moment
    LOOP
        IF day IS NOT NULL THEN
            RETURN QUERY EXECUTE format(
                'SELECT given.schedule_id, given.moment
                FROM unnest($1, $2) AS given (schedule_id, moment)
                CROSS JOIN LATERAL (
                    SELECT
                    FROM %s AS run
                    WHERE run.schedule_id = given.schedule_id AND run.scheduled_for = given.moment
                    LIMIT 1
                ) AS found', day)
            USING schedule_ids, moments;
        END IF;
    END LOOP;
END
$function$;

SELECT {schema}.cron_make_partition('runs', (statement_timestamp() AT TIME ZONE 'UTC')::date + day)
FROM generate_series(-1, 7) AS day;
SELECT {schema}.cron_make_partition('events', (statement_timestamp() AT TIME ZONE 'UTC')::date + 7 * week)
FROM generate_series(0, 5) AS week;
