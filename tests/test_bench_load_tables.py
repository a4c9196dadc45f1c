"""What the loads of `cron-ticks bench` read from the tables: that they see what is right and what is wrong."""

from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from typing import Any

import pytest

from cron_ticks.cli.bench import idle
from cron_ticks.cli.bench.failover_tables import Estate, continued, taken_over
from cron_ticks.cli.bench.load_tables import LoadTables, Made, open_load_tables
from cron_ticks.cli.bench.loads import Course, check_audit, check_expected
from cron_ticks.errors import CronTicksError
from cron_ticks.ids import new_message_id

MINUTE = timedelta(minutes=1)


@pytest.mark.parametrize("audits", [0, 2])
async def test_a_worker_that_audits_is_not_idle(tables: LoadTables, audits: int) -> None:
    """One audit has ended before; what was begun afterwards was in the way."""
    await tables.connection.executemany(
        "INSERT INTO cron_audits (started_at, since, until) VALUES ($1, $1, $1)",
        [(await tables.now() - number * MINUTE,) for number in range(audits)],
    )
    with pytest.raises(CronTicksError, match=f"{audits} audits were begun"):
        await idle.check_audits(tables)


@pytest.mark.sql
async def test_a_worker_whose_death_would_show_nothing_is_not_killed(tables: LoadTables) -> None:
    with pytest.raises(CronTicksError, match="has no shards"):
        await Estate.of(tables, "ticker_1")
    await tables.connection.execute("INSERT INTO cron_shards (shards, shard, leased_by) VALUES (64, 7, 'ticker_1')")
    with pytest.raises(CronTicksError, match="no schedules in the shards"):
        await Estate.of(tables, "ticker_1")


@pytest.mark.sql
async def test_shards_that_nobody_takes_over_are_an_error(tables: LoadTables) -> None:
    await tables.connection.execute("INSERT INTO cron_shards (shards, shard, leased_by) VALUES (64, 7, 'ticker_1')")
    now = await tables.now()
    with pytest.raises(CronTicksError, match="nobody took over"):
        await taken_over(tables, "ticker_1", now, now)
    await tables.connection.execute("UPDATE cron_shards SET leased_by = 'ticker_2'")
    assert (await taken_over(tables, "ticker_1", now, now)).later_than == now


@pytest.mark.sql
async def test_what_was_made_for_the_dead_workers_schedules_is_counted(tables: LoadTables) -> None:
    """The ticks of all were made now: after the schedules, and before what is to come."""
    before = await tables.now()
    since, until = await fired(tables, 40)
    own = list(range(32))
    estate = Estate(64, own, 0)
    mine = await tables.connection.fetchval("SELECT count(*) FROM cron_schedule_cursors WHERE slot % 64 < 32")
    found = await continued(tables, estate, since, until, before - timedelta(milliseconds=1))
    assert (found["ticks"], found["schedules"], found["late"]) == (mine, mine, mine)
    assert 0 < mine < 40
    found = await continued(tables, estate, since, until, await tables.now() + MINUTE)
    assert (found["ticks"], found["schedules"], found["lead_s"]) == (0, 0, None)


@pytest.fixture
async def tables(dsn: str) -> AsyncIterator[LoadTables]:
    async with open_load_tables(dsn) as opened:
        yield opened


async def fired(tables: LoadTables, schedules: int) -> tuple[datetime, datetime]:
    """Schedules of a minute whose occurrences in some minute that is over have all become messages; that minute."""
    since = await tables.now() - 2 * MINUTE
    await tables.make_schedules(Made(schedules, [MINUTE], since, jitter=0))
    occurrences = await tables.connection.fetch(
        "UPDATE cron_schedule_cursors SET next_tick_needed_at = next_tick_needed_at + interval '1 hour' "
        "RETURNING schedule_id, next_tick_needed_at - interval '1 hour' AS scheduled_for"
    )
    rows = [(row["schedule_id"], row["scheduled_for"], new_message_id()) for row in occurrences]
    await tables.connection.executemany(
        "INSERT INTO cron_runs (schedule_id, scheduled_for, version, origin, outcome, message_id, ended_at, lateness, "
        "attempts) VALUES ($1, $2, 1, 'schedule', 'enqueued', $3, $2::timestamptz + interval '20 ms', '20 ms', 1)",
        rows,
    )
    await tables.connection.executemany(
        "INSERT INTO queue_messages (id, queue_name, payload, schedule_id, scheduled_for) "
        "VALUES ($3, 'benchmark', '{}', $1, $2)",
        rows,
    )
    return since, since + MINUTE


@pytest.mark.sql
async def test_the_schedules_are_such_that_the_audit_agrees(dsn: str, tables: LoadTables) -> None:
    since, until = await fired(tables, 50)
    outcomes = await tables.outcomes(since, until)
    assert (outcomes["expected"], outcomes["enqueued"], outcomes["messages"]) == (50, 50, 50)
    assert not any(outcomes[name] for name in ("missed", "left_over", "unexplained", "duplicates", "otherwise_ended"))
    await check_audit(Course(dsn, tables), outcomes, since, until)
    total, *thirds = await tables.lateness(since, until)
    assert (total["ticks"], total["p99_ms"], [third["ticks"] for third in thirds]) == (50, 20.0, [17, 17, 16])


@pytest.mark.sql
async def test_autovacuum_has_nothing_to_do_after_the_schedules_are_made(tables: LoadTables, connection: Any) -> None:
    await tables.make_schedules(Made(2000, [MINUTE], await tables.now() + MINUTE))
    await tables.connection.fetchval("SELECT pg_stat_force_next_flush()")
    (row,) = await connection.fetch(
        "SELECT n_live_tup, n_mod_since_analyze, n_ins_since_vacuum FROM pg_stat_user_tables "
        "WHERE relname = 'cron_schedules'"
    )
    assert tuple(row) == (2000, 0, 0)


@pytest.mark.sql
@pytest.mark.parametrize(
    ("change", "name"),
    [
        ("DELETE FROM cron_runs", "unexplained"),
        ("UPDATE cron_runs SET outcome = 'missed', message_id = NULL", "missed"),
        ("UPDATE cron_runs SET outcome = 'failed', message_id = NULL", "otherwise_ended"),
    ],
)
async def test_what_went_wrong_is_seen(dsn: str, tables: LoadTables, change: str, name: str) -> None:
    since, until = await fired(tables, 3)
    await tables.connection.execute(f"{change} WHERE schedule_id = (SELECT min(schedule_id) FROM cron_runs)")
    outcomes = await tables.outcomes(since, until)
    assert (outcomes["enqueued"], outcomes[name], outcomes["messages"]) == (2, 1, 3)
    if name == "unexplained":
        with pytest.raises(CronTicksError, match="the audit says"):
            await check_audit(Course(dsn, tables), outcomes, since, until)


@pytest.mark.sql
async def test_a_second_message_is_a_duplicate_and_what_waits_is_left_over(tables: LoadTables) -> None:
    since, until = await fired(tables, 3)
    await tables.connection.execute(
        "INSERT INTO queue_messages (id, queue_name, payload, schedule_id, scheduled_for) "
        "SELECT $1, queue_name, payload, schedule_id, scheduled_for FROM queue_messages LIMIT 1",
        new_message_id(),
    )
    outcomes = await tables.outcomes(since, until + MINUTE)
    assert (outcomes["duplicates"], outcomes["messages"], outcomes["unexplained"]) == (1, 4, 3)
    await tables.connection.execute(
        "UPDATE cron_schedule_cursors SET next_tick_needed_at = next_tick_needed_at - interval '59 minutes'"
    )
    outcomes = await tables.outcomes(since, until + MINUTE)
    assert (outcomes["left_over"], outcomes["unexplained"], outcomes["enqueued"]) == (3, 0, 3)


@pytest.mark.sql
@pytest.mark.parametrize("table", ["cron_runs", "queue_messages"])
async def test_what_fires_and_was_no_occurrence_is_seen(tables: LoadTables, table: str) -> None:
    since, until = await fired(tables, 3)
    check_expected(await tables.outcomes(since, until))
    await tables.connection.execute(
        f"UPDATE {table} SET scheduled_for = scheduled_for + interval '1 ms' "
        f"WHERE schedule_id = (SELECT min(schedule_id) FROM {table})"
    )
    outcomes = await tables.outcomes(since, until)
    found = (outcomes["unexpected_runs"], outcomes["unexpected_messages"])
    assert found == ((1, 0) if table == "cron_runs" else (0, 1))
    with pytest.raises(CronTicksError, match="was no occurrence"):
        check_expected(outcomes)


@pytest.mark.sql
async def test_messages_that_wait_and_that_were_tried_again_are_counted(tables: LoadTables) -> None:
    """Ten, inserted in one minute: six completed in the next, one of them at the second try."""
    since, until = await fired(tables, 10)
    await tables.connection.execute("UPDATE queue_messages SET inserted_at = $1", since + MINUTE / 2)
    await tables.connection.execute(
        "UPDATE queue_messages SET completed_at = $1, attempts = 1 WHERE (payload IS NOT NULL) AND id IN "
        "(SELECT id FROM queue_messages ORDER BY id LIMIT 6)",
        until + MINUTE / 2,
    )
    await tables.connection.execute(
        "UPDATE queue_messages SET attempts = 2 WHERE id = (SELECT min(id) FROM queue_messages)"
    )
    assert await tables.backlog(since, until) == {"backlog_start": 0, "backlog_end": 10}
    assert await tables.backlog(until, until + MINUTE) == {"backlog_start": 10, "backlog_end": 4}
    assert await tables.handled(until) == {"unconsumed": 4, "completed": 6, "tried_again": 1}
    assert await tables.any_unconsumed(until)
    assert not await tables.any_unconsumed(since)


@pytest.mark.sql
async def test_an_occurrence_inside_a_row_of_missed_ones_is_missed(tables: LoadTables) -> None:
    since, until = await fired(tables, 1)
    await tables.connection.execute("DELETE FROM queue_messages")
    await tables.connection.execute(
        "UPDATE cron_runs SET outcome = 'missed', message_id = NULL, lateness = NULL, missed_since = scheduled_for, "
        "scheduled_for = scheduled_for + interval '1 minute', occurrences = 2"
    )
    outcomes = await tables.outcomes(since, until)
    assert (outcomes["missed"], outcomes["unexplained"]) == (1, 0)


@pytest.mark.sql
async def test_when_a_tick_was_made_is_read_from_its_id(tables: LoadTables) -> None:
    """The messages here have their ids from now, two minutes after their ticks were to be executed."""
    since, until = await fired(tables, 5)
    made = await tables.made(since, until)
    assert made["late"] == 5
    assert -121 < made["lead_s"] < -60
    assert (await tables.made(since, until, await tables.now() + MINUTE))["late"] == 0
