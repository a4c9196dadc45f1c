-- The schema that the migrations make. Written by `make schema-snapshot`; do not edit.

CREATE FUNCTION public.cron_drop_partition(kind text, before timestamp with time zone) RETURNS text
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET "TimeZone" TO 'UTC'
    SET "DateStyle" TO 'ISO'
    SET lock_timeout TO '2s'
    AS $_$
DECLARE
    parent text := CASE kind WHEN 'runs' THEN 'cron_runs' WHEN 'events' THEN 'execution_events' END;

    days integer := CASE kind WHEN 'runs' THEN 1 WHEN 'events' THEN 7 END;

    parent_id oid := format('"public".%I', parent)::regclass;

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

    EXECUTE format('LOCK TABLE "public".%I IN SHARE UPDATE EXCLUSIVE MODE', oldest);

    PERFORM set_config('lock_timeout', '100ms', true);

    EXECUTE format('DROP TABLE "public".%I', oldest);

    INSERT INTO "public".cron_retention AS kept (kind, kept_since) VALUES (cron_drop_partition.kind, beyond)
    ON CONFLICT ON CONSTRAINT cron_retention_pkey DO UPDATE
    SET kept_since = greatest(kept.kept_since, excluded.kept_since);

    RETURN oldest;

END
$_$;

CREATE FUNCTION public.cron_fired_before(schedule_ids text[], moments timestamp with time zone[]) RETURNS TABLE(schedule_id text, scheduled_for timestamp with time zone)
    LANGUAGE plpgsql STABLE SECURITY DEFINER ROWS 10
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET "TimeZone" TO 'UTC'
    AS $_$
DECLARE
    day regclass;

BEGIN
    FOR day IN
        SELECT DISTINCT to_regclass(format('"public".%I', 'cron_runs_' || to_char(moment, 'YYYYMMDD')))
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
$_$;

CREATE FUNCTION public.cron_hash(schedule_id text) RETURNS integer
    LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
    RETURN ((('x'::text || "left"(encode(sha256((schedule_id)::bytea), 'hex'::text), 6)))::bit(24))::integer;

CREATE FUNCTION public.cron_jitter(schedule_id text, occurrence timestamp with time zone, amplitude_us bigint) RETURNS interval
    LANGUAGE sql STABLE PARALLEL SAFE
    RETURN CASE WHEN (amplitude_us > 0) THEN ((((((('x'::text || "left"(encode(sha256(convert_to(((schedule_id || ' '::text) || ((EXTRACT(epoch FROM occurrence) * (1000000)::numeric))::bigint), 'UTF8'::name)), 'hex'::text), 15)))::bit(60))::bigint % (2 * amplitude_us)) - amplitude_us))::double precision * '00:00:00.000001'::interval) ELSE '00:00:00'::interval END;

CREATE FUNCTION public.cron_make_partition(kind text, day date) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET "TimeZone" TO 'UTC'
    SET "DateStyle" TO 'ISO'
    AS $$
DECLARE
    parent text := CASE kind WHEN 'runs' THEN 'cron_runs' WHEN 'events' THEN 'execution_events' END;

    first_day date := CASE kind WHEN 'runs' THEN day ELSE date_trunc('week', day)::date END;

    beyond date := first_day + CASE kind WHEN 'runs' THEN 1 ELSE 7 END;

    parent_id oid := format('"public".%I', parent)::regclass;

    partition_name text := format('%s_%s', parent, to_char(first_day, 'YYYYMMDD'));

BEGIN
    IF EXISTS (
        SELECT
        FROM pg_inherits
        WHERE inhparent = parent_id AND inhrelid = to_regclass(format('"public".%I', partition_name))
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
        'CREATE TABLE "public".%I (LIKE "public".%I INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING INDEXES)',
        partition_name, parent);

    EXECUTE format(
        'ALTER TABLE "public".%I ATTACH PARTITION "public".%I FOR VALUES FROM (%L) TO (%L)',
        parent, partition_name, first_day::timestamp AT TIME ZONE 'UTC', beyond::timestamp AT TIME ZONE 'UTC');

    RETURN true;

END
$$;

CREATE FUNCTION public.cron_refuse(reason text) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
BEGIN
    RAISE EXCEPTION USING MESSAGE = reason;

END
$$;

CREATE TABLE public.cron_audits (
    started_at timestamp with time zone NOT NULL,
    since timestamp with time zone NOT NULL,
    until timestamp with time zone NOT NULL,
    ended_at timestamp with time zone,
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

CREATE TABLE public.cron_backfills (
    id text NOT NULL COLLATE pg_catalog."C",
    schedule_id text NOT NULL COLLATE pg_catalog."C",
    start_at timestamp with time zone NOT NULL,
    end_at timestamp with time zone NOT NULL,
    next_at timestamp with time zone NOT NULL,
    per_minute integer NOT NULL,
    total bigint NOT NULL,
    made bigint DEFAULT 0 NOT NULL,
    skipped bigint DEFAULT 0 NOT NULL,
    created_at timestamp with time zone NOT NULL,
    created_by text,
    due_at timestamp with time zone,
    ended_at timestamp with time zone,
    outcome text,
    reason text,
    CONSTRAINT cron_backfills_outcome_check CHECK ((outcome = ANY (ARRAY['done'::text, 'cancelled'::text, 'failed'::text]))),
    CONSTRAINT cron_backfills_per_minute_check CHECK ((per_minute > 0))
);

CREATE TABLE public.cron_managers (
    shards integer NOT NULL,
    id text NOT NULL COLLATE pg_catalog."C",
    leased_until timestamp with time zone NOT NULL
)
WITH (fillfactor='50');

CREATE TABLE public.cron_retention (
    kind text NOT NULL,
    kept_since timestamp with time zone NOT NULL,
    CONSTRAINT cron_retention_kind_check CHECK ((kind = ANY (ARRAY['runs'::text, 'events'::text, 'versions'::text])))
);

CREATE TABLE public.cron_runs (
    schedule_id text NOT NULL COLLATE pg_catalog."C",
    scheduled_for timestamp with time zone NOT NULL,
    version integer NOT NULL,
    origin text NOT NULL,
    outcome text NOT NULL,
    reason text,
    message_id text COLLATE pg_catalog."C",
    ended_at timestamp with time zone NOT NULL,
    lateness interval,
    attempts integer NOT NULL,
    ticker_id text,
    recovered boolean DEFAULT false NOT NULL,
    missed_since timestamp with time zone,
    occurrences bigint DEFAULT 1 NOT NULL,
    recovery_time interval,
    CONSTRAINT cron_runs_missed_check CHECK ((((missed_since IS NULL) AND (occurrences = 1)) OR ((missed_since < scheduled_for) AND (occurrences > 1) AND (outcome = 'missed'::text)))),
    CONSTRAINT cron_runs_outcome_check CHECK ((outcome = ANY (ARRAY['enqueued'::text, 'missed'::text, 'overlapped'::text, 'disabled'::text, 'failed'::text, 'expired'::text])))
)
PARTITION BY RANGE (scheduled_for);

CREATE TABLE public.cron_schedule_cursors (
    schedule_id text NOT NULL COLLATE pg_catalog."C",
    next_tick_needed_at timestamp with time zone,
    planned bigint DEFAULT 0 NOT NULL,
    broken boolean DEFAULT false NOT NULL,
    slot smallint GENERATED ALWAYS AS (((public.cron_hash(schedule_id) % 256))::smallint) STORED NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0.05', autovacuum_vacuum_threshold='5000', autovacuum_vacuum_cost_limit='2000', autovacuum_analyze_scale_factor='0.2', autovacuum_analyze_threshold='5000');

CREATE TABLE public.cron_schedule_versions (
    schedule_id text NOT NULL COLLATE pg_catalog."C",
    version integer NOT NULL,
    holds_after timestamp with time zone NOT NULL,
    change text NOT NULL,
    enabled boolean NOT NULL,
    workspace_id text,
    name text NOT NULL,
    queue_name text NOT NULL,
    payload jsonb,
    interval_us bigint,
    anchor_at timestamp with time zone NOT NULL,
    jitter_us bigint NOT NULL,
    jitter_ratio double precision,
    priority smallint NOT NULL,
    starts_at timestamp with time zone,
    ends_at timestamp with time zone,
    max_runs bigint,
    planned bigint NOT NULL,
    created_at timestamp with time zone NOT NULL,
    sink text DEFAULT 'queue'::text NOT NULL COLLATE pg_catalog."C",
    delivery text DEFAULT 'exactly_once'::text NOT NULL,
    overlap text DEFAULT 'allow'::text NOT NULL,
    max_attempts integer,
    max_age_us bigint,
    backoff_us bigint,
    cron text,
    timezone text,
    zone text,
    dst_gap text,
    dst_fold text,
    owner text COLLATE pg_catalog."C",
    catch_up text DEFAULT 'latest'::text NOT NULL,
    misfire_grace_us bigint,
    CONSTRAINT cron_schedule_versions_change_check CHECK ((change = ANY (ARRAY['created'::text, 'edited'::text, 'disabled'::text, 'enabled'::text, 'deleted'::text])))
);

CREATE TABLE public.cron_schedules (
    id text NOT NULL COLLATE pg_catalog."C",
    workspace_id text,
    name text NOT NULL,
    queue_name text NOT NULL,
    payload jsonb NOT NULL,
    interval_us bigint,
    anchor_at timestamp with time zone NOT NULL,
    created_at timestamp with time zone NOT NULL,
    updated_at timestamp with time zone NOT NULL,
    jitter_us bigint DEFAULT 0 NOT NULL,
    jitter_ratio double precision,
    priority smallint DEFAULT 2 NOT NULL,
    starts_at timestamp with time zone,
    ends_at timestamp with time zone,
    max_runs bigint,
    enabled boolean DEFAULT true NOT NULL,
    version integer DEFAULT 1 NOT NULL,
    error text,
    error_at timestamp with time zone,
    sink text DEFAULT 'queue'::text NOT NULL COLLATE pg_catalog."C",
    delivery text DEFAULT 'exactly_once'::text NOT NULL,
    overlap text DEFAULT 'allow'::text NOT NULL,
    max_attempts integer,
    max_age_us bigint,
    backoff_us bigint,
    cron text,
    timezone text,
    zone text,
    dst_gap text,
    dst_fold text,
    owner text COLLATE pg_catalog."C",
    catch_up text DEFAULT 'latest'::text NOT NULL,
    misfire_grace_us bigint,
    CONSTRAINT cron_schedules_backoff_us_check CHECK ((backoff_us > 0)),
    CONSTRAINT cron_schedules_calendar_check CHECK ((((cron IS NULL) = (zone IS NULL)) AND ((cron IS NULL) = (dst_gap IS NULL)) AND ((cron IS NULL) = (dst_fold IS NULL)) AND ((cron IS NOT NULL) OR (timezone IS NULL)))),
    CONSTRAINT cron_schedules_catch_up_check CHECK ((catch_up = ANY (ARRAY['skip'::text, 'latest'::text, 'all'::text, 'spread'::text]))),
    CONSTRAINT cron_schedules_delivery_check CHECK ((delivery = ANY (ARRAY['exactly_once'::text, 'at_least_once'::text, 'at_most_once'::text]))),
    CONSTRAINT cron_schedules_dst_fold_check CHECK ((dst_fold = ANY (ARRAY['first'::text, 'second'::text, 'both'::text]))),
    CONSTRAINT cron_schedules_dst_gap_check CHECK ((dst_gap = ANY (ARRAY['fire'::text, 'skip'::text]))),
    CONSTRAINT cron_schedules_interval_us_check CHECK ((interval_us >= 1000000)),
    CONSTRAINT cron_schedules_jitter_us_check CHECK ((jitter_us >= 0)),
    CONSTRAINT cron_schedules_max_age_us_check CHECK ((max_age_us > 0)),
    CONSTRAINT cron_schedules_max_attempts_check CHECK ((max_attempts > 0)),
    CONSTRAINT cron_schedules_max_runs_check CHECK ((max_runs > 0)),
    CONSTRAINT cron_schedules_misfire_grace_us_check CHECK ((misfire_grace_us > 0)),
    CONSTRAINT cron_schedules_overlap_check CHECK ((overlap = ANY (ARRAY['allow'::text, 'skip'::text, 'queue_one'::text]))),
    CONSTRAINT cron_schedules_priority_check CHECK (((priority >= 0) AND (priority <= 3))),
    CONSTRAINT cron_schedules_rule_check CHECK (((interval_us IS NULL) OR (cron IS NULL))),
    CONSTRAINT cron_schedules_times_check CHECK (((anchor_at >= '1970-01-01 00:00:00+00'::timestamp with time zone) AND (anchor_at < '2500-01-01 00:00:00+00'::timestamp with time zone) AND (starts_at >= '1970-01-01 00:00:00+00'::timestamp with time zone) AND (starts_at < '2500-01-01 00:00:00+00'::timestamp with time zone) AND (ends_at >= '1970-01-01 00:00:00+00'::timestamp with time zone) AND (ends_at < '2500-01-01 00:00:00+00'::timestamp with time zone)))
);

CREATE TABLE public.cron_shards (
    shards integer NOT NULL,
    shard integer NOT NULL,
    leased_by text COLLATE pg_catalog."C"
)
WITH (fillfactor='50');

CREATE TABLE public.cron_sinks (
    name text NOT NULL COLLATE pg_catalog."C",
    kind text NOT NULL,
    seen_at timestamp with time zone NOT NULL,
    CONSTRAINT cron_sinks_kind_check CHECK ((kind = ANY (ARRAY['same_database'::text, 'outside'::text])))
);

CREATE TABLE public.cron_ticks (
    id text NOT NULL COLLATE pg_catalog."C",
    schedule_id text NOT NULL COLLATE pg_catalog."C",
    schedule_name text NOT NULL,
    workspace_id text,
    queue_name text NOT NULL,
    payload jsonb NOT NULL,
    scheduled_for timestamp with time zone NOT NULL,
    execute_at timestamp with time zone NOT NULL,
    due_at timestamp with time zone NOT NULL,
    created_at timestamp with time zone NOT NULL,
    version integer DEFAULT 1 NOT NULL,
    origin text DEFAULT 'schedule'::text NOT NULL,
    priority smallint DEFAULT 2 NOT NULL,
    attempts integer DEFAULT 0 NOT NULL,
    leased_by text,
    leased_at timestamp with time zone,
    leased_until timestamp with time zone,
    sink text DEFAULT 'queue'::text NOT NULL COLLATE pg_catalog."C",
    delivery text DEFAULT 'exactly_once'::text NOT NULL,
    overlap text DEFAULT 'allow'::text NOT NULL,
    turn smallint DEFAULT 0 NOT NULL,
    recovery boolean DEFAULT false NOT NULL,
    waiting boolean DEFAULT false NOT NULL,
    error text,
    fire_before timestamp with time zone,
    lost_at timestamp with time zone,
    CONSTRAINT cron_ticks_origin_check CHECK ((origin = ANY (ARRAY['schedule'::text, 'trigger'::text, 'backfill'::text, 'recovery'::text]))),
    CONSTRAINT cron_ticks_priority_check CHECK (((priority >= 0) AND (priority <= 3))),
    CONSTRAINT cron_ticks_turn_check CHECK (((turn >= 0) AND (turn <= 2)))
)
WITH (autovacuum_vacuum_scale_factor='0.05', autovacuum_vacuum_threshold='5000', autovacuum_vacuum_cost_limit='2000', autovacuum_analyze_scale_factor='0.2', autovacuum_analyze_threshold='5000');

CREATE TABLE public.cron_ticks_migrations (
    number integer NOT NULL,
    name text NOT NULL,
    checksum text NOT NULL,
    oldest_release text NOT NULL,
    applied_at timestamp with time zone DEFAULT statement_timestamp() NOT NULL
);

CREATE TABLE public.cron_workspaces (
    workspace_id text NOT NULL,
    timezone text NOT NULL,
    updated_at timestamp with time zone NOT NULL
);

CREATE SEQUENCE public.execution_events_sequence
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;

CREATE TABLE public.execution_events (
    at timestamp with time zone DEFAULT statement_timestamp() NOT NULL,
    sequence bigint DEFAULT nextval('public.execution_events_sequence'::regclass) NOT NULL,
    event text NOT NULL,
    schedule_id text COLLATE pg_catalog."C",
    message_id text COLLATE pg_catalog."C",
    worker text,
    actor text,
    data jsonb
)
PARTITION BY RANGE (at);

CREATE TABLE public.execution_events_20261116 (
    at timestamp with time zone DEFAULT statement_timestamp() CONSTRAINT execution_events_at_not_null NOT NULL,
    sequence bigint DEFAULT nextval('public.execution_events_sequence'::regclass) CONSTRAINT execution_events_sequence_not_null NOT NULL,
    event text CONSTRAINT execution_events_event_not_null NOT NULL,
    schedule_id text COLLATE pg_catalog."C",
    message_id text COLLATE pg_catalog."C",
    worker text,
    actor text,
    data jsonb
);

CREATE TABLE public.execution_events_20261123 (
    at timestamp with time zone DEFAULT statement_timestamp() CONSTRAINT execution_events_at_not_null NOT NULL,
    sequence bigint DEFAULT nextval('public.execution_events_sequence'::regclass) CONSTRAINT execution_events_sequence_not_null NOT NULL,
    event text CONSTRAINT execution_events_event_not_null NOT NULL,
    schedule_id text COLLATE pg_catalog."C",
    message_id text COLLATE pg_catalog."C",
    worker text,
    actor text,
    data jsonb
);

CREATE TABLE public.execution_events_20261130 (
    at timestamp with time zone DEFAULT statement_timestamp() CONSTRAINT execution_events_at_not_null NOT NULL,
    sequence bigint DEFAULT nextval('public.execution_events_sequence'::regclass) CONSTRAINT execution_events_sequence_not_null NOT NULL,
    event text CONSTRAINT execution_events_event_not_null NOT NULL,
    schedule_id text COLLATE pg_catalog."C",
    message_id text COLLATE pg_catalog."C",
    worker text,
    actor text,
    data jsonb
);

CREATE TABLE public.execution_events_20261207 (
    at timestamp with time zone DEFAULT statement_timestamp() CONSTRAINT execution_events_at_not_null NOT NULL,
    sequence bigint DEFAULT nextval('public.execution_events_sequence'::regclass) CONSTRAINT execution_events_sequence_not_null NOT NULL,
    event text CONSTRAINT execution_events_event_not_null NOT NULL,
    schedule_id text COLLATE pg_catalog."C",
    message_id text COLLATE pg_catalog."C",
    worker text,
    actor text,
    data jsonb
);

CREATE TABLE public.execution_events_20261214 (
    at timestamp with time zone DEFAULT statement_timestamp() CONSTRAINT execution_events_at_not_null NOT NULL,
    sequence bigint DEFAULT nextval('public.execution_events_sequence'::regclass) CONSTRAINT execution_events_sequence_not_null NOT NULL,
    event text CONSTRAINT execution_events_event_not_null NOT NULL,
    schedule_id text COLLATE pg_catalog."C",
    message_id text COLLATE pg_catalog."C",
    worker text,
    actor text,
    data jsonb
);

CREATE TABLE public.execution_events_20261221 (
    at timestamp with time zone DEFAULT statement_timestamp() CONSTRAINT execution_events_at_not_null NOT NULL,
    sequence bigint DEFAULT nextval('public.execution_events_sequence'::regclass) CONSTRAINT execution_events_sequence_not_null NOT NULL,
    event text CONSTRAINT execution_events_event_not_null NOT NULL,
    schedule_id text COLLATE pg_catalog."C",
    message_id text COLLATE pg_catalog."C",
    worker text,
    actor text,
    data jsonb
);

CREATE TABLE public.queue_messages (
    id text NOT NULL COLLATE pg_catalog."C",
    queue_name text NOT NULL COLLATE pg_catalog."C",
    workspace_id text COLLATE pg_catalog."C",
    payload jsonb NOT NULL,
    headers jsonb DEFAULT '{}'::jsonb NOT NULL,
    schedule_id text COLLATE pg_catalog."C",
    scheduled_for timestamp with time zone,
    process_after timestamp with time zone DEFAULT statement_timestamp() NOT NULL,
    inserted_at timestamp with time zone DEFAULT statement_timestamp() NOT NULL,
    attempts integer DEFAULT 0 NOT NULL,
    completed_at timestamp with time zone,
    dlq_at timestamp with time zone,
    error_message text,
    sequence bigint NOT NULL,
    priority smallint DEFAULT 2 NOT NULL,
    dedupe_key text COLLATE pg_catalog."C",
    worker_deaths integer DEFAULT 0 NOT NULL,
    failed_at timestamp with time zone[] DEFAULT '{}'::timestamp with time zone[] NOT NULL,
    error_type text,
    error_traceback text,
    exclusive boolean DEFAULT false NOT NULL,
    CONSTRAINT queue_messages_priority_check CHECK (((priority >= 0) AND (priority <= 3)))
)
WITH (autovacuum_vacuum_scale_factor='0.05', autovacuum_vacuum_threshold='5000', autovacuum_vacuum_cost_limit='2000', autovacuum_analyze_scale_factor='0.2', autovacuum_analyze_threshold='5000');

ALTER TABLE public.queue_messages ALTER COLUMN sequence ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME public.queue_messages_sequence_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE public.queue_tokens (
    id text NOT NULL COLLATE pg_catalog."C",
    queue_name text NOT NULL COLLATE pg_catalog."C",
    workspace_id text COLLATE pg_catalog."C",
    slot smallint NOT NULL,
    leased_by text NOT NULL,
    leased_at timestamp with time zone NOT NULL,
    leased_until timestamp with time zone NOT NULL,
    in_flight text[] DEFAULT '{}'::text[] NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='1000');

CREATE TABLE public.queue_workers (
    id text NOT NULL COLLATE pg_catalog."C",
    queues text[] NOT NULL,
    asleep boolean NOT NULL,
    started_at timestamp with time zone NOT NULL,
    seen_at timestamp with time zone NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='1000');

ALTER TABLE ONLY public.execution_events ATTACH PARTITION public.execution_events_20261116 FOR VALUES FROM ('2026-11-16 00:00:00+00') TO ('2026-11-23 00:00:00+00');

ALTER TABLE ONLY public.execution_events ATTACH PARTITION public.execution_events_20261123 FOR VALUES FROM ('2026-11-23 00:00:00+00') TO ('2026-11-30 00:00:00+00');

ALTER TABLE ONLY public.execution_events ATTACH PARTITION public.execution_events_20261130 FOR VALUES FROM ('2026-11-30 00:00:00+00') TO ('2026-12-07 00:00:00+00');

ALTER TABLE ONLY public.execution_events ATTACH PARTITION public.execution_events_20261207 FOR VALUES FROM ('2026-12-07 00:00:00+00') TO ('2026-12-14 00:00:00+00');

ALTER TABLE ONLY public.execution_events ATTACH PARTITION public.execution_events_20261214 FOR VALUES FROM ('2026-12-14 00:00:00+00') TO ('2026-12-21 00:00:00+00');

ALTER TABLE ONLY public.execution_events ATTACH PARTITION public.execution_events_20261221 FOR VALUES FROM ('2026-12-21 00:00:00+00') TO ('2026-12-28 00:00:00+00');

ALTER TABLE ONLY public.cron_audits
    ADD CONSTRAINT cron_audits_pkey PRIMARY KEY (started_at);

ALTER TABLE ONLY public.cron_backfills
    ADD CONSTRAINT cron_backfills_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.cron_managers
    ADD CONSTRAINT cron_managers_pkey PRIMARY KEY (shards, id);

ALTER TABLE ONLY public.cron_retention
    ADD CONSTRAINT cron_retention_pkey PRIMARY KEY (kind);

ALTER TABLE ONLY public.cron_runs
    ADD CONSTRAINT cron_runs_occurrence_key PRIMARY KEY (schedule_id, scheduled_for);

ALTER TABLE ONLY public.cron_schedule_cursors
    ADD CONSTRAINT cron_schedule_cursors_pkey PRIMARY KEY (schedule_id);

ALTER TABLE ONLY public.cron_schedule_versions
    ADD CONSTRAINT cron_schedule_versions_pkey PRIMARY KEY (schedule_id, version);

ALTER TABLE ONLY public.cron_schedules
    ADD CONSTRAINT cron_schedules_name_key UNIQUE NULLS NOT DISTINCT (workspace_id, name);

ALTER TABLE ONLY public.cron_schedules
    ADD CONSTRAINT cron_schedules_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.cron_shards
    ADD CONSTRAINT cron_shards_pkey PRIMARY KEY (shards, shard);

ALTER TABLE ONLY public.cron_sinks
    ADD CONSTRAINT cron_sinks_pkey PRIMARY KEY (name);

ALTER TABLE ONLY public.cron_ticks
    ADD CONSTRAINT cron_ticks_execution_key UNIQUE (schedule_id, execute_at);

ALTER TABLE ONLY public.cron_ticks_migrations
    ADD CONSTRAINT cron_ticks_migrations_pkey PRIMARY KEY (number);

ALTER TABLE ONLY public.cron_ticks
    ADD CONSTRAINT cron_ticks_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.cron_workspaces
    ADD CONSTRAINT cron_workspaces_pkey PRIMARY KEY (workspace_id);

ALTER TABLE ONLY public.queue_messages
    ADD CONSTRAINT queue_messages_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.queue_tokens
    ADD CONSTRAINT queue_tokens_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.queue_workers
    ADD CONSTRAINT queue_workers_pkey PRIMARY KEY (id);

CREATE INDEX cron_backfills_due_idx ON public.cron_backfills USING btree (due_at) WHERE (due_at IS NOT NULL);

CREATE INDEX cron_backfills_schedule_idx ON public.cron_backfills USING btree (schedule_id, created_at);

CREATE INDEX cron_runs_missed_idx ON ONLY public.cron_runs USING btree (missed_since) WHERE (missed_since IS NOT NULL);

CREATE INDEX cron_runs_outcome_idx ON ONLY public.cron_runs USING btree (scheduled_for, schedule_id) WHERE (outcome <> 'enqueued'::text);

CREATE INDEX cron_runs_stretch_idx ON ONLY public.cron_runs USING btree (schedule_id, scheduled_for) WHERE (missed_since IS NOT NULL);

CREATE INDEX cron_runs_time_idx ON ONLY public.cron_runs USING brin (scheduled_for) WITH (autosummarize='on');

CREATE INDEX cron_schedule_cursors_next_idx ON public.cron_schedule_cursors USING btree (slot, next_tick_needed_at) WHERE ((NOT broken) AND (next_tick_needed_at IS NOT NULL));

CREATE INDEX cron_schedule_versions_name_idx ON public.cron_schedule_versions USING btree (name);

CREATE INDEX cron_schedule_versions_replacing_idx ON public.cron_schedule_versions USING btree (holds_after, schedule_id, version) WHERE (version > 1);

CREATE INDEX cron_schedule_versions_workspace_idx ON public.cron_schedule_versions USING btree (workspace_id) WHERE (workspace_id IS NOT NULL);

CREATE INDEX cron_schedules_error_idx ON public.cron_schedules USING btree (id) WHERE (error IS NOT NULL);

CREATE INDEX cron_schedules_owner_idx ON public.cron_schedules USING btree (owner, id) WHERE (owner IS NOT NULL);

CREATE INDEX cron_schedules_workspace_idx ON public.cron_schedules USING btree (workspace_id, id) WHERE (workspace_id IS NOT NULL);

CREATE INDEX cron_ticks_due_idx ON public.cron_ticks USING btree (sink, turn, priority, due_at);

CREATE INDEX cron_ticks_lease_idx ON public.cron_ticks USING btree (leased_until) WHERE (leased_until IS NOT NULL);

CREATE UNIQUE INDEX cron_ticks_waiting_key ON public.cron_ticks USING btree (schedule_id, ((origin = 'backfill'::text))) WHERE waiting;

CREATE INDEX execution_events_message_idx ON ONLY public.execution_events USING btree (message_id, sequence) WHERE (message_id IS NOT NULL);

CREATE INDEX execution_events_20261116_message_id_sequence_idx ON public.execution_events_20261116 USING btree (message_id, sequence) WHERE (message_id IS NOT NULL);

CREATE INDEX execution_events_schedule_idx ON ONLY public.execution_events USING btree (schedule_id, sequence) WHERE (schedule_id IS NOT NULL);

CREATE INDEX execution_events_20261116_schedule_id_sequence_idx ON public.execution_events_20261116 USING btree (schedule_id, sequence) WHERE (schedule_id IS NOT NULL);

CREATE INDEX execution_events_20261123_message_id_sequence_idx ON public.execution_events_20261123 USING btree (message_id, sequence) WHERE (message_id IS NOT NULL);

CREATE INDEX execution_events_20261123_schedule_id_sequence_idx ON public.execution_events_20261123 USING btree (schedule_id, sequence) WHERE (schedule_id IS NOT NULL);

CREATE INDEX execution_events_20261130_message_id_sequence_idx ON public.execution_events_20261130 USING btree (message_id, sequence) WHERE (message_id IS NOT NULL);

CREATE INDEX execution_events_20261130_schedule_id_sequence_idx ON public.execution_events_20261130 USING btree (schedule_id, sequence) WHERE (schedule_id IS NOT NULL);

CREATE INDEX execution_events_20261207_message_id_sequence_idx ON public.execution_events_20261207 USING btree (message_id, sequence) WHERE (message_id IS NOT NULL);

CREATE INDEX execution_events_20261207_schedule_id_sequence_idx ON public.execution_events_20261207 USING btree (schedule_id, sequence) WHERE (schedule_id IS NOT NULL);

CREATE INDEX execution_events_20261214_message_id_sequence_idx ON public.execution_events_20261214 USING btree (message_id, sequence) WHERE (message_id IS NOT NULL);

CREATE INDEX execution_events_20261214_schedule_id_sequence_idx ON public.execution_events_20261214 USING btree (schedule_id, sequence) WHERE (schedule_id IS NOT NULL);

CREATE INDEX execution_events_20261221_message_id_sequence_idx ON public.execution_events_20261221 USING btree (message_id, sequence) WHERE (message_id IS NOT NULL);

CREATE INDEX execution_events_20261221_schedule_id_sequence_idx ON public.execution_events_20261221 USING btree (schedule_id, sequence) WHERE (schedule_id IS NOT NULL);

CREATE INDEX queue_messages_completed_idx ON public.queue_messages USING btree (queue_name, completed_at) WHERE (completed_at IS NOT NULL);

CREATE INDEX queue_messages_dead_idx ON public.queue_messages USING btree (dlq_at, id) WHERE (dlq_at IS NOT NULL);

CREATE UNIQUE INDEX queue_messages_dedupe_key ON public.queue_messages USING btree (queue_name, COALESCE(workspace_id, ''::text), dedupe_key) WHERE ((dedupe_key IS NOT NULL) AND (completed_at IS NULL) AND (dlq_at IS NULL));

CREATE INDEX queue_messages_occurrence_idx ON public.queue_messages USING btree (scheduled_for, schedule_id) WHERE (schedule_id IS NOT NULL);

CREATE UNIQUE INDEX queue_messages_overlap_key ON public.queue_messages USING btree (schedule_id) WHERE (exclusive AND (COALESCE(completed_at, dlq_at) IS NULL));

CREATE INDEX queue_messages_pending_idx ON public.queue_messages USING btree (queue_name, COALESCE(workspace_id, ''::text), priority, process_after, sequence) WHERE ((completed_at IS NULL) AND (dlq_at IS NULL));

CREATE INDEX queue_tokens_expiry_idx ON public.queue_tokens USING btree (leased_until);

CREATE UNIQUE INDEX queue_tokens_pair_key ON public.queue_tokens USING btree (queue_name, COALESCE(workspace_id, ''::text), slot);

ALTER INDEX public.execution_events_message_idx ATTACH PARTITION public.execution_events_20261116_message_id_sequence_idx;

ALTER INDEX public.execution_events_schedule_idx ATTACH PARTITION public.execution_events_20261116_schedule_id_sequence_idx;

ALTER INDEX public.execution_events_message_idx ATTACH PARTITION public.execution_events_20261123_message_id_sequence_idx;

ALTER INDEX public.execution_events_schedule_idx ATTACH PARTITION public.execution_events_20261123_schedule_id_sequence_idx;

ALTER INDEX public.execution_events_message_idx ATTACH PARTITION public.execution_events_20261130_message_id_sequence_idx;

ALTER INDEX public.execution_events_schedule_idx ATTACH PARTITION public.execution_events_20261130_schedule_id_sequence_idx;

ALTER INDEX public.execution_events_message_idx ATTACH PARTITION public.execution_events_20261207_message_id_sequence_idx;

ALTER INDEX public.execution_events_schedule_idx ATTACH PARTITION public.execution_events_20261207_schedule_id_sequence_idx;

ALTER INDEX public.execution_events_message_idx ATTACH PARTITION public.execution_events_20261214_message_id_sequence_idx;

ALTER INDEX public.execution_events_schedule_idx ATTACH PARTITION public.execution_events_20261214_schedule_id_sequence_idx;

ALTER INDEX public.execution_events_message_idx ATTACH PARTITION public.execution_events_20261221_message_id_sequence_idx;

ALTER INDEX public.execution_events_schedule_idx ATTACH PARTITION public.execution_events_20261221_schedule_id_sequence_idx;

ALTER TABLE ONLY public.cron_schedule_cursors
    ADD CONSTRAINT cron_schedule_cursors_schedule_id_fkey FOREIGN KEY (schedule_id) REFERENCES public.cron_schedules(id) ON DELETE CASCADE;
