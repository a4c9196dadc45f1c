-- The schema that the migrations make. Written by `make schema-snapshot`; do not edit.

CREATE TABLE public.cron_schedule_cursors (
    schedule_id text NOT NULL,
    next_tick_needed_at timestamp with time zone NOT NULL
);

CREATE TABLE public.cron_schedules (
    id text NOT NULL,
    workspace_id text,
    name text NOT NULL,
    queue_name text NOT NULL,
    payload jsonb NOT NULL,
    interval_us bigint NOT NULL,
    anchor_at timestamp with time zone NOT NULL,
    created_at timestamp with time zone NOT NULL,
    updated_at timestamp with time zone NOT NULL,
    CONSTRAINT cron_schedules_interval_us_check CHECK ((interval_us >= 1000000))
);

CREATE TABLE public.cron_ticks (
    id text NOT NULL,
    schedule_id text NOT NULL,
    schedule_name text NOT NULL,
    workspace_id text,
    queue_name text NOT NULL,
    payload jsonb NOT NULL,
    scheduled_for timestamp with time zone NOT NULL,
    execute_at timestamp with time zone NOT NULL,
    due_at timestamp with time zone NOT NULL,
    created_at timestamp with time zone NOT NULL
);

CREATE TABLE public.cron_ticks_migrations (
    number integer NOT NULL,
    name text NOT NULL,
    checksum text NOT NULL,
    oldest_release text NOT NULL,
    applied_at timestamp with time zone DEFAULT statement_timestamp() NOT NULL
);

CREATE TABLE public.queue_messages (
    id text NOT NULL COLLATE pg_catalog."C",
    queue_name text NOT NULL COLLATE pg_catalog."C",
    workspace_id text COLLATE pg_catalog."C",
    payload jsonb NOT NULL,
    headers jsonb DEFAULT '{}'::jsonb NOT NULL,
    schedule_id text,
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
    CONSTRAINT queue_messages_priority_check CHECK (((priority >= 0) AND (priority <= 3)))
);

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
);

CREATE TABLE public.queue_workers (
    id text NOT NULL COLLATE pg_catalog."C",
    queues text[] NOT NULL,
    asleep boolean NOT NULL,
    started_at timestamp with time zone NOT NULL,
    seen_at timestamp with time zone NOT NULL
);

ALTER TABLE ONLY public.cron_schedule_cursors
    ADD CONSTRAINT cron_schedule_cursors_pkey PRIMARY KEY (schedule_id);

ALTER TABLE ONLY public.cron_schedules
    ADD CONSTRAINT cron_schedules_name_key UNIQUE NULLS NOT DISTINCT (workspace_id, name);

ALTER TABLE ONLY public.cron_schedules
    ADD CONSTRAINT cron_schedules_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.cron_ticks
    ADD CONSTRAINT cron_ticks_execution_key UNIQUE (schedule_id, execute_at);

ALTER TABLE ONLY public.cron_ticks_migrations
    ADD CONSTRAINT cron_ticks_migrations_pkey PRIMARY KEY (number);

ALTER TABLE ONLY public.cron_ticks
    ADD CONSTRAINT cron_ticks_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.queue_messages
    ADD CONSTRAINT queue_messages_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.queue_tokens
    ADD CONSTRAINT queue_tokens_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.queue_workers
    ADD CONSTRAINT queue_workers_pkey PRIMARY KEY (id);

CREATE INDEX cron_schedule_cursors_next_idx ON public.cron_schedule_cursors USING btree (next_tick_needed_at);

CREATE INDEX cron_ticks_due_idx ON public.cron_ticks USING btree (due_at);

CREATE INDEX queue_messages_completed_idx ON public.queue_messages USING btree (queue_name, completed_at) WHERE (completed_at IS NOT NULL);

CREATE INDEX queue_messages_dead_idx ON public.queue_messages USING btree (dlq_at, id) WHERE (dlq_at IS NOT NULL);

CREATE UNIQUE INDEX queue_messages_dedupe_key ON public.queue_messages USING btree (queue_name, COALESCE(workspace_id, ''::text), dedupe_key) WHERE ((dedupe_key IS NOT NULL) AND (completed_at IS NULL) AND (dlq_at IS NULL));

CREATE INDEX queue_messages_occurrence_idx ON public.queue_messages USING btree (schedule_id, scheduled_for) WHERE (schedule_id IS NOT NULL);

CREATE INDEX queue_messages_pending_idx ON public.queue_messages USING btree (queue_name, COALESCE(workspace_id, ''::text), priority, process_after, sequence) WHERE ((completed_at IS NULL) AND (dlq_at IS NULL));

CREATE INDEX queue_tokens_expiry_idx ON public.queue_tokens USING btree (leased_until);

CREATE UNIQUE INDEX queue_tokens_pair_key ON public.queue_tokens USING btree (queue_name, COALESCE(workspace_id, ''::text), slot);

ALTER TABLE ONLY public.cron_schedule_cursors
    ADD CONSTRAINT cron_schedule_cursors_schedule_id_fkey FOREIGN KEY (schedule_id) REFERENCES public.cron_schedules(id) ON DELETE CASCADE;
