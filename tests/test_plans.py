"""Query plans: the cost follows what is due, never what exists, whatever the statistics say."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from cron_ticks import (
    backfill_sql,
    event_sql,
    generation_sql,
    lease_sql,
    missing_sql,
    schedule_sql,
    shard_sql,
    tick_sql,
)
from cron_ticks.database import Database
from cron_ticks.tick_repository import firing_statement
from token_queue.queue_repository import QUEUE_SINK

pytestmark = pytest.mark.every_version

BATCH = 100
# Of a statement about a batch: each row has its places in some indexes, and parts inside parts are counted repeatedly.
MOST_BUFFERS = 250 * BATCH
MOST_BUFFERS_OF_ONE = 200  # of a statement about one schedule
MOST_BUFFERS_OF_A_WORKSPACE = 50 * 1000  # which has a thousandth of all schedules here: 1,000 at full size
NOW = datetime(2026, 1, 1, tzinfo=UTC)
MANY = [f"cron_{number}" for number in range(1, BATCH + 1)]
DUE_HOURS = [NOW - timedelta(hours=hour) for hour in range(5, 0, -1)]
LATER = [NOW + timedelta(days=1)] * BATCH

# Schedules far from due, but for the first BATCH; a tick for every tenth of them, the first BATCH of them due.
FILL = (
    """INSERT INTO cron_shards (shards, shard)
    SELECT 64, k FROM generate_series(0, 63) AS k WHERE $1::int > 0 AND $2::timestamptz IS NOT NULL""",
    """INSERT INTO cron_schedules (id, workspace_id, name, queue_name, payload, interval_us, anchor_at, jitter_us,
        created_at, updated_at)
    SELECT 'cron_' || k, CASE WHEN k % 2 = 0 THEN 'ws_' || k % 1000 END, k, 'queue', '{}', 86400000000,
        $2::timestamptz + k * interval '1 second', 30000000, $2, $2
    FROM generate_series(1, $1::int) AS k""",
    """INSERT INTO cron_schedule_cursors (schedule_id, next_tick_needed_at)
    SELECT id, anchor_at - interval '100 seconds' FROM cron_schedules
    WHERE $1::int > 0 AND $2::timestamptz IS NOT NULL""",
    """INSERT INTO cron_ticks (id, schedule_id, schedule_name, queue_name, payload, scheduled_for, execute_at, due_at,
        created_at)
    SELECT 'tick_' || k, 'cron_' || k, k, 'queue', '{}', moment, moment, moment, $2
    FROM generate_series(1, $1::int / 10) AS k,
        LATERAL (SELECT $2::timestamptz + (k - 100) * interval '1 second' AS moment) AS due""",
    """INSERT INTO cron_runs (schedule_id, scheduled_for, version, origin, outcome, ended_at, attempts)
    SELECT 'cron_' || k, $2::timestamptz - interval '1 hour', 1, 'schedule', 'enqueued', $2, 1
    FROM generate_series(1, $1::int / 10) AS k""",
    """INSERT INTO cron_runs (schedule_id, scheduled_for, version, origin, outcome, ended_at, attempts, missed_since,
        occurrences)
    SELECT 'cron_' || k, $2::timestamptz - interval '30 minutes', 1, 'schedule', 'missed', $2, 1,
        $2::timestamptz - interval '3 hours', 9
    FROM generate_series(1, $1::int / 10) AS k""",
    """INSERT INTO cron_backfills (id, schedule_id, start_at, end_at, next_at, per_minute, total, created_at, due_at,
        ended_at)
    SELECT 'backfill_' || k, 'cron_' || k, $2::timestamptz - interval '1 day', $2, $2, 600, 9, $2,
        CASE WHEN k < 100 THEN $2::timestamptz END, CASE WHEN k >= 100 THEN $2::timestamptz END
    FROM generate_series(1, $1::int / 10) AS k""",
    # a schedule of messages that must not overlap: every tenth is unfinished, the first BATCH have a tick
    """INSERT INTO queue_messages (id, queue_name, payload, schedule_id, scheduled_for, exclusive, completed_at)
    SELECT 'msg_before_' || k, 'queue', '{}', 'cron_' || k, $2::timestamptz - interval '1 hour', true,
        CASE WHEN k % 10 > 0 THEN $2::timestamptz END
    FROM generate_series(1, $1::int / 10) AS k""",
    """INSERT INTO cron_ticks (id, schedule_id, schedule_name, queue_name, payload, scheduled_for, execute_at, due_at,
        created_at, turn, overlap)
    SELECT 'tick_limited_' || k, 'cron_' || k, k, 'queue', '{}', moment, moment, moment, $2, 2, 'queue_one'
    FROM generate_series(1, least($1::int, 100)) AS k,
        LATERAL (SELECT $2::timestamptz - interval '7 minutes' AS moment) AS due""",
    """INSERT INTO cron_schedule_versions (schedule_id, version, holds_after, change, enabled, workspace_id, name,
        queue_name, payload, anchor_at, jitter_us, priority, planned, created_at)
    SELECT id, 1, anchor_at, 'created', true, workspace_id, name, queue_name, payload, anchor_at, 0, 2, 0, $2
    FROM cron_schedules
    WHERE workspace_id = 'ws_778' AND $1 > 0""",
    # events of four weeks: some of each message and schedule, and many of one schedule
    """INSERT INTO execution_events (at, event, schedule_id, message_id, data)
    SELECT statement_timestamp() + k % 4 * interval '7 days', 'edited',
        'cron_' || CASE WHEN k % 2 = 0 THEN k ELSE 1 END, 'msg_' || k / 5, '{"changed": {"payload": [1, 2]}}'
    FROM generate_series(1, $1::int) AS k
    WHERE $2::timestamptz IS NOT NULL""",
)

LIMITS = (3, timedelta(days=1))
NO = [False] * BATCH
SENDING = ("queue", "exactly_once", "allow", None, None, None)
CALENDAR = (None, None, None, None, None, None)
MINUTE = timedelta(minutes=1)
EDITING = ("latest", None, NOW, NOW, 0, "somebody", '{"priority": ["low", "high"]}', True)
SLOTS = list(range(256))
NO_CALENDARS: list[list[object]] = [[]] * 8
NO_FLOORS = [None] * 4
TICKS = [f"tick_{number}" for number in range(BATCH)]

STATEMENTS: dict[str, tuple[str, tuple[object, ...]]] = {
    # generation
    "BEAT": (shard_sql.BEAT, ("ticker_x", 64, MINUTE, NOW, SLOTS, [None] * 256)),
    "LOCK_CURSORS_OF_SLOTS": (
        generation_sql.LOCK_CURSORS_OF_SLOTS,
        (SLOTS, [None] * 256, NOW, BATCH, 1, 0, NOW, "10s"),
    ),
    "MAKE_TICKS, many": (
        generation_sql.MAKE_TICKS,
        (MANY, [NOW] * BATCH, [0] * BATCH, NOW, NOW + MINUTE, "tick_new_", *NO_CALENDARS, 1000, NOW + MINUTE, 4, NOW),
    ),
    "LOCK_CURSORS_OF": (generation_sql.LOCK_CURSORS_OF, (MANY, NOW, "10s")),
    "RULES": (generation_sql.RULES, (MANY,)),
    "CREATE_TICKS": (
        generation_sql.CREATE_TICKS,
        ([f"tick_new_{number}" for number in range(BATCH)], MANY, LATER, NOW, timedelta(0), MINUTE, [None] * BATCH),
    ),
    "FIND_TICKS": (generation_sql.FIND_TICKS, (MANY, LATER)),
    "UPDATE_NEXT_TICK_NEEDED": (generation_sql.UPDATE_NEXT_TICK_NEEDED, (MANY, LATER, [1] * BATCH)),
    # firing
    "FIRE_DUE_TICKS": (firing_statement(QUEUE_SINK), ("ticker_x", BATCH, NOW, None, "queue", 0, MINUTE, NO_FLOORS)),
    "FIRE_DUE_TICKS, limited": (
        firing_statement(QUEUE_SINK),
        ("ticker_x", BATCH, NOW, None, "queue", 2, MINUTE, NO_FLOORS),
    ),
    "FIRE_DUE_TICKS, all events": (
        firing_statement(QUEUE_SINK, events="all"),
        ("ticker_x", BATCH, NOW, None, "queue", 0, MINUTE, NO_FLOORS),
    ),
    "FIRE_DUE_TICKS, limited, all events": (
        firing_statement(QUEUE_SINK, events="all"),
        ("ticker_x", BATCH, NOW, None, "queue", 2, MINUTE, NO_FLOORS),
    ),
    "FIRE_DUE_TICKS, chosen": (
        firing_statement(QUEUE_SINK, chosen=True),
        ("ticker_x", BATCH, NOW, NOW, "queue", 0, MINUTE, NO_FLOORS, TICKS),
    ),
    "FIND_DUE_TICKS": (tick_sql.FIND_DUE_TICKS, ("queue", 0, NOW, BATCH, MINUTE)),
    "NEXT_DUE_IN": (tick_sql.NEXT_DUE_IN, (NOW, "queue", [None] * 12)),
    "RELEASE_WAITING": (tick_sql.RELEASE_WAITING, (MANY, NOW, "a_channel", "a notice")),
    # deciding about what is late
    "LATE_SCHEDULES": (missing_sql.LATE_SCHEDULES, ("queue", MINUTE, BATCH, NOW, NO_FLOORS)),
    "LATE_TICKS": (missing_sql.LATE_TICKS, (MANY, NOW, BATCH)),
    "MISS_TICKS": (missing_sql.MISS_TICKS, (TICKS, ["a test"] * BATCH, NOW)),
    "KEEP_TICKS": (missing_sql.KEEP_TICKS, (TICKS, [None] * BATCH)),
    "SET_ASIDE": (missing_sql.SET_ASIDE, (MANY, NOW)),
    "MISS_OCCURRENCES": (
        missing_sql.MISS_OCCURRENCES,
        (MANY, [1] * BATCH, [NOW - MINUTE] * BATCH, [NOW] * BATCH, [2] * BATCH, ["a test"] * BATCH, NOW),
    ),
    "DELETE_ORPHANED_TICKS_OF": (tick_sql.DELETE_ORPHANED_TICKS_OF, (MANY,)),
    # leasing
    "LEASE_DUE_TICKS": (
        lease_sql.LEASE_DUE_TICKS,
        ("ticker_x", BATCH, NOW, timedelta(seconds=10), "queue", *LIMITS, 2, MINUTE, [None] * 12),
    ),
    "RENEW_LEASES": (lease_sql.RENEW_LEASES, ("ticker_x", TICKS, NOW, timedelta(seconds=10), False)),
    "RELEASE_LEASES": (lease_sql.RELEASE_LEASES, ("ticker_x", TICKS, NOW)),
    "END_TICKS": (lease_sql.END_TICKS, ("ticker_x", TICKS, NOW)),
    "FAIL_TICKS": (
        lease_sql.FAIL_TICKS,
        (None, TICKS, [0] * BATCH, ["x"] * BATCH, NO, *LIMITS, timedelta(seconds=10), NOW, NO, "ticker_x"),
    ),
    "DELETE_EXPIRED_TICKS": (lease_sql.DELETE_EXPIRED_TICKS, (timedelta(0), BATCH, NOW, *LIMITS)),
    "UNSERVED_SINKS": (lease_sql.UNSERVED_SINKS, (NOW,)),
    # going on with a backfill
    "NEXT_BACKFILLS": (backfill_sql.NEXT_BACKFILLS, (20, NOW)),
    "GET_BACKFILL": (backfill_sql.GET_BACKFILL, ("backfill_77",)),
    "LIST_BACKFILLS": (backfill_sql.LIST_BACKFILLS, ("cron_77", None, 10)),
    "TRY_LOCK_CURSOR": (backfill_sql.TRY_LOCK_CURSOR, ("cron_77",)),
    "LOCK_BACKFILL": (backfill_sql.LOCK_BACKFILL, ("backfill_77", NOW)),
    "TICKS_OF": (backfill_sql.TICKS_OF, ("cron_77",)),
    "RUNS_OF": (backfill_sql.RUNS_OF, ("cron_77", DUE_HOURS, DUE_HOURS[0], DUE_HOURS[-1])),
    "STRETCHES": (backfill_sql.STRETCHES, ("cron_77", NOW - timedelta(hours=9), NOW)),
    "FORGET_MISSED": (backfill_sql.FORGET_MISSED, ("cron_77", DUE_HOURS, DUE_HOURS[0], DUE_HOURS[-1])),
    "SPLIT_STRETCH": (
        backfill_sql.SPLIT_STRETCH,
        ("cron_77", NOW - timedelta(minutes=30), [NOW - timedelta(hours=2)], [NOW - timedelta(hours=1.5)], [2]),
    ),
    "MAKE_TICKS": (
        backfill_sql.MAKE_TICKS,
        ("cron_77", ["tick_new_1"], [NOW - timedelta(hours=3)], [NOW], timedelta(0), NOW),
    ),
    "ADVANCE_BACKFILL": (backfill_sql.ADVANCE_BACKFILL, ("backfill_77", NOW, 1, 1, 2, NOW)),
    "END_BACKFILL": (backfill_sql.END_BACKFILL, ("backfill_77", "done", None, NOW)),
    "CANCEL_BACKFILLS_OF": (backfill_sql.CANCEL_BACKFILLS_OF, (["cron_77"], "a test", NOW)),
    # changing a schedule and planning it anew
    "FIND_SCHEDULE": (schedule_sql.FIND_SCHEDULE, (None, "777", "{}", NOW)),
    "FIND_SCHEDULE of a workspace": (schedule_sql.FIND_SCHEDULE, ("ws_778", "778", "{}", NOW)),
    "LOCK_SCHEDULE": (schedule_sql.LOCK_SCHEDULE, ("cron_777",)),
    "LOCK_CURSORS": (schedule_sql.LOCK_CURSORS, (["cron_777"],)),
    "LOCK_TICKS": (schedule_sql.LOCK_TICKS, (["cron_777"],)),
    "HORIZON": (schedule_sql.HORIZON, ("cron_777", NOW - timedelta(hours=2))),
    "DELETE_FUTURE_TICKS": (schedule_sql.DELETE_FUTURE_TICKS, ("cron_777", NOW)),
    "EDIT_SCHEDULE": (
        schedule_sql.EDIT_SCHEDULE,
        ("cron_777", "queue", "{}", 1_000_000, NOW, 0, None, 2, None, None, None, *SENDING, *CALENDAR, *EDITING),
    ),
    "SHARE_ZONE_OF": (schedule_sql.SHARE_ZONE_OF, ("cron_778",)),
    "GET_ZONE": (schedule_sql.GET_ZONE, ("ws_778",)),
    "IN_OTHER_ZONE": (schedule_sql.IN_OTHER_ZONE, ("ws_778", "Europe/Berlin")),
    "OWNED_BY": (schedule_sql.OWNED_BY, ("nobody",)),
    "IS_BACK": (schedule_sql.IS_BACK, ("cron_777", 3)),
    "MOVE_CURSOR": (schedule_sql.MOVE_CURSOR, ("cron_777", NOW, 0)),
    "SWITCH_SCHEDULE": (schedule_sql.SWITCH_SCHEDULE, ("cron_777", False, NOW, NOW, 0, "somebody")),
    "DROP_TICKS": (schedule_sql.DROP_TICKS, (["cron_777"], "a test", NOW)),
    "FORGET_DROPPED": (schedule_sql.FORGET_DROPPED, ("cron_777", NOW - timedelta(hours=2))),
    "SHARE_SCHEDULE": (schedule_sql.SHARE_SCHEDULE, ("cron_777", NOW)),
    "PLACE_TICK": (schedule_sql.PLACE_TICK, ("cron_777", "tick_new", NOW, "somebody")),
    "MARK_BROKEN": (schedule_sql.MARK_BROKEN, ("cron_777", 1, "a test", NOW, True, "ticker_x")),
    "FORGET_NOTED_PAYLOADS": (schedule_sql.FORGET_NOTED_PAYLOADS, ("ws_778",)),
    # reading
    "EVENTS_OF_MESSAGE": (event_sql.EVENTS_OF_MESSAGE, ("msg_777", 0, BATCH)),
    "EVENTS_OF_SCHEDULE": (event_sql.EVENTS_OF_SCHEDULE, ("cron_777", 0, BATCH)),
    "EVENTS_OF_SCHEDULE, the next page": (event_sql.EVENTS_OF_SCHEDULE, ("cron_1", BATCH, BATCH)),
    "DELETE_SCHEDULES": (schedule_sql.DELETE_SCHEDULES, (["cron_777"], NOW, "somebody")),
}
OF_A_WORKSPACE = {"FORGET_NOTED_PAYLOADS", "IN_OTHER_ZONE"}
OF_A_BATCH = {
    "BEAT",
    "LOCK_CURSORS_OF_SLOTS",
    "MAKE_TICKS, many",
    "LOCK_CURSORS_OF",
    "LATE_SCHEDULES",
    "LATE_TICKS",
    "MISS_TICKS",
    "KEEP_TICKS",
    "SET_ASIDE",
    "MISS_OCCURRENCES",
    "DELETE_ORPHANED_TICKS_OF",
    "RULES",
    "CREATE_TICKS",
    "FIND_TICKS",
    "UPDATE_NEXT_TICK_NEEDED",
    "FIRE_DUE_TICKS",
    "FIRE_DUE_TICKS, chosen",
    "FIRE_DUE_TICKS, limited",
    "FIRE_DUE_TICKS, all events",
    "FIRE_DUE_TICKS, limited, all events",
    "EVENTS_OF_SCHEDULE, the next page",
    "RELEASE_WAITING",
    "RENEW_LEASES",
    "RELEASE_LEASES",
    "END_TICKS",
    "FAIL_TICKS",
    "LEASE_DUE_TICKS",
}


def scans(node: dict[str, Any]) -> list[str]:
    """Tables that the plan reads from end to end."""
    here = [node["Relation Name"]] if node["Node Type"] == "Seq Scan" else []
    return here + [name for child in node.get("Plans", []) for name in scans(child)]


def buffers(node: dict[str, Any]) -> int:
    """What a plan touches; parts that change rows on their own are counted twice rather than not at all."""
    own = node["Shared Hit Blocks"] + node["Shared Read Blocks"]
    apart = [child for child in node.get("Plans", []) if child.get("Subplan Name", "").startswith("CTE")]
    return int(own) + sum(buffers(child) for child in apart)


async def costs(database: Database) -> dict[str, tuple[int, list[str]]]:
    """Buffers and whole tables that each statement reads, run for real and rolled back."""
    found = {}
    async with database.connection() as connection:
        for name, (text, arguments) in STATEMENTS.items():
            transaction = connection.transaction()
            await transaction.start()
            explain = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {database.sql(text)}"
            (plan,) = json.loads(await connection.fetchval(explain, *arguments))
            await transaction.rollback()
            root = plan["Plan"]
            found[name] = (buffers(root), scans(root))
    return found


def check(found: dict[str, tuple[int, list[str]]]) -> None:
    assert {name: tables for name, (_, tables) in found.items() if tables} == {}
    most = (
        dict.fromkeys(found, MOST_BUFFERS_OF_ONE)
        | dict.fromkeys(OF_A_BATCH, MOST_BUFFERS)
        | dict.fromkeys(OF_A_WORKSPACE, MOST_BUFFERS_OF_A_WORKSPACE)
    )
    assert {name: touched for name, (touched, _) in found.items() if touched > most[name]} == {}


@pytest.mark.soak(small=20_000, full=1_000_000)
async def test_no_statement_of_the_engine_reads_what_it_has_no_business_with(
    database: Database, connection: Any, size: int
) -> None:
    for table in ("cron_schedules", "cron_schedule_cursors", "cron_ticks"):
        await connection.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = false)")
    await connection.execute(
        "SELECT cron_make_partition('runs', date '2025-12-31' + k) FROM generate_series(0, 2) AS k"
    )
    await connection.execute("ANALYZE")
    for statement in FILL:
        await connection.execute(statement, size, NOW, timeout=600)
    unanalysed = await costs(database)
    figures = ", ".join(f"{name} {touched}" for name, (touched, _) in unanalysed.items())
    print(f"\n{size} schedules, {size // 10} ticks, a batch of {BATCH}; buffers: {figures}")  # noqa: T201
    check(unanalysed)
    await connection.execute("ANALYZE", timeout=600)
    check(await costs(database))
