-- oldest-release: 0.1.0
-- Cron expressions in time zones, default zones of workspaces, and who declared a schedule.
--
-- A program from before this migration takes an expression for a one-off that is over, and ends it: stop all of them
-- before the first expression is declared.

ALTER TABLE {schema}.cron_schedules
    ADD COLUMN cron text,                       -- the expression; NULL: an interval, or with neither a one-off
    ADD COLUMN timezone text,                   -- as declared; NULL: the workspace's
    ADD COLUMN zone text,                       -- the one that holds
    ADD COLUMN dst_gap text CHECK (dst_gap IN ('fire', 'skip')),  -- what becomes of times that clocks skip
    ADD COLUMN dst_fold text CHECK (dst_fold IN ('first', 'second', 'both')),  -- and of those that they show twice
    ADD COLUMN owner text COLLATE "C",          -- the label of the deployment that declared it
    ADD CONSTRAINT cron_schedules_rule_check CHECK (interval_us IS NULL OR cron IS NULL),
    ADD CONSTRAINT cron_schedules_calendar_check CHECK (
        (cron IS NULL) = (zone IS NULL) AND (cron IS NULL) = (dst_gap IS NULL) AND (cron IS NULL) = (dst_fold IS NULL)
        AND (cron IS NOT NULL OR timezone IS NULL));

-- What an owner has declared, to find what it declares no more.
CREATE INDEX cron_schedules_owner_idx ON {schema}.cron_schedules (owner, id) WHERE owner IS NOT NULL;

ALTER TABLE {schema}.cron_schedule_versions
    ADD COLUMN cron text,
    ADD COLUMN timezone text,
    ADD COLUMN zone text,
    ADD COLUMN dst_gap text,
    ADD COLUMN dst_fold text,
    ADD COLUMN owner text COLLATE "C";

-- The zone of a workspace's schedules that name none; without a row it is UTC.
CREATE TABLE {schema}.cron_workspaces (
    workspace_id text PRIMARY KEY,
    timezone text NOT NULL,
    updated_at timestamptz NOT NULL
);
