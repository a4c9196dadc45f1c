-- oldest-release: 0.1.0
-- A million schedules: cursors by slot, managers that share them out, and tables that keep up with vacuuming.

-- A number for each schedule: a hash of its id that no server version changes.
CREATE FUNCTION {schema}.cron_hash(schedule_id text) RETURNS integer
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
RETURN ('x' || left(encode(sha256(schedule_id::bytea), 'hex'), 6))::bit(24)::integer;

-- Managers look at the slots that are theirs, each from the occurrence on that is needed first.
ALTER TABLE {schema}.cron_schedule_cursors
    ADD COLUMN slot smallint NOT NULL GENERATED ALWAYS AS (({schema}.cron_hash(schedule_id) % 256)::smallint) STORED;
DROP INDEX {schema}.cron_schedule_cursors_next_idx;
CREATE INDEX cron_schedule_cursors_next_idx ON {schema}.cron_schedule_cursors (slot, next_tick_needed_at)
    WHERE NOT broken AND next_tick_needed_at IS NOT NULL;

-- The managers that are alive, each until its lease ends.
CREATE TABLE {schema}.cron_managers (
    shards integer NOT NULL,                    -- into how many it divides the slots: those who agree share them out
    id text COLLATE "C" NOT NULL,               -- ticker_<ulid>
    leased_until timestamptz NOT NULL,
    PRIMARY KEY (shards, id)
) WITH (fillfactor = 50);

-- A token per shard. It is its manager's for as long as that one's lease lasts.
CREATE TABLE {schema}.cron_shards (
    shards integer NOT NULL,
    shard integer NOT NULL,                     -- the slots that leave this remainder when divided by `shards`
    leased_by text COLLATE "C",
    PRIMARY KEY (shards, shard)
) WITH (fillfactor = 50);

-- Rows that live for a minute, and rows that change every minute: vacuumed when there is something to remove, whatever
-- share of the table that is, and fast enough to be done before the next round.
ALTER TABLE {schema}.cron_ticks SET (
    autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_limit = 2000,
    autovacuum_analyze_scale_factor = 0.2, autovacuum_analyze_threshold = 5000);
ALTER TABLE {schema}.queue_messages SET (
    autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_limit = 2000,
    autovacuum_analyze_scale_factor = 0.2, autovacuum_analyze_threshold = 5000);
ALTER TABLE {schema}.cron_schedule_cursors SET (
    autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_limit = 2000,
    autovacuum_analyze_scale_factor = 0.2, autovacuum_analyze_threshold = 5000);

-- A handful of rows that change all the time.
ALTER TABLE {schema}.queue_tokens SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
ALTER TABLE {schema}.queue_workers SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
