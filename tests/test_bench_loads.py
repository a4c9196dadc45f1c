"""The loads of `cron-ticks bench`: that they measure what they say, and see what is wrong; not how fast it is here."""

import json
import os
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from cron_ticks.cli.bench import failover, idle, steady
from cron_ticks.cli.bench.load_tables import LoadTables, Made, open_load_tables
from cron_ticks.cli.bench.loads import Course, check_audit, lead_seconds, parse_sizes
from cron_ticks.cli.bench.usage import server_cpu_seconds, server_of, usage_of
from cron_ticks.errors import CronTicksError, InvalidInputError
from cron_ticks.ids import new_message_id
from support.processes import Processes

MINUTE = timedelta(minutes=1)


class SilentSteps:
    """Nobody looks."""

    def expect(self, steps: int) -> None: ...

    def __call__(self, text: str) -> None: ...

    def say(self, text: str) -> None: ...


async def report_of(processes: Processes, *arguments: str, dsn: str) -> dict[str, Any]:
    running = await processes.cron_ticks("bench", *arguments, "--json", "--dsn", dsn)
    output = await running.output(110)
    assert await running.wait() == 0, running.errors
    report: dict[str, Any] = json.loads(output)
    return report


async def test_a_steady_load_is_counted_from_the_rows(dsn: str, processes: Processes, tmp_path: Path) -> None:
    """600 schedules of a minute, spread evenly: ten ticks a second."""
    size = ("--schedules", "600", "--minutes", "0.1", "--jitter", "0", "--consume")
    plot = tmp_path / "steady.svg"
    report = await report_of(processes, "steady", *size, "--plot", str(plot), dsn=dsn)
    load = report["loads"]["600"]
    (found,) = load["rounds"]
    assert load["held"]
    assert report["highest_held"] == 600
    assert 55 <= found["expected"] == found["enqueued"] == found["messages"] <= 65
    assert sum(third["ticks"] for third in found["thirds"]) == found["ticks"]
    assert found["per_second"] == pytest.approx(10, abs=1)
    assert found["consumed_per_second"] == pytest.approx(10, abs=2)
    assert 0 <= found["p50_ms"] <= found["p99_ms"] <= found["max_ms"]
    assert found["missed"] == found["left_over"] == found["duplicates"] == found["made_late"] == 0
    assert len(found["pods_mb"]["end"]) == 3
    assert found["pods_cpu"] > 0
    assert found["server_cpu"] > 0
    assert found["wal_bytes_per_tick"] > 100
    assert found["sizes"]["cron_schedules"]["table_bytes"] > 0
    assert plot.read_text().startswith("<svg")


async def test_making_ticks_is_measured_beside_the_bare_statements(dsn: str, processes: Processes) -> None:
    """It fails by itself unless each schedule that is due gets one tick."""
    size = ("--schedules", "300,900", "--due", "300", "--ticks", "500", "--rounds", "2")
    report = await report_of(processes, "generate", *size, dsn=dsn)
    assert set(report["per_second"]) == {"cron_ticks", "bare SQL"}
    assert all(len(rates["rounds"]) == 2 for rates in report["per_second"].values())
    assert list(report["passes"]) == ["300", "900"]
    assert report["passes"]["300"]["ratio"]["rounds"] == [1.0, 1.0]
    fewer, more = (report["passes"][size]["seconds"]["rounds"] for size in ("300", "900"))
    ratios = [after / before for before, after in zip(fewer, more, strict=True)]
    assert report["passes"]["900"]["ratio"]["rounds"] == pytest.approx(ratios, rel=0.05)
    assert report["expressions"] == 150


async def test_the_statements_of_an_idle_worker_are_counted(dsn: str) -> None:
    """Soon after its start it looks more often than at rest, but not much."""
    figures = await idle.run_idle(dsn, sizes=[10], seconds=3, rounds=1, rest=2, server={}, progress=SilentSteps())
    (found,) = figures.found[10]
    assert found["statements_per_second"] == pytest.approx(
        sum(found["statements"].values()) / found["seconds"], rel=0.01
    )
    assert 0 < found["statements_per_second"] < 10
    assert found["worker_mb"] > 10
    assert figures.as_json()["sizes"]["10"]["ratio"]["worker_mb"]["rounds"] == [1.0]
    assert figures.table().row_count == 4


@pytest.mark.parametrize("variant", failover.VARIANTS, ids=lambda variant: variant.name)
async def test_nothing_is_lost_when_a_worker_is_killed(dsn: str, variant: failover.Variant) -> None:
    """Before the kill both fire, and it fails by itself if a tick is lost or doubled."""
    load = failover.FailoverLoad(schedules=100, processes=2, before=3, afterwards=3, jitter=0)
    figures = await failover.run_failover(
        dsn, load=load, variants=[variant], rounds=1, server={}, progress=SilentSteps()
    )
    (found,) = figures.found[variant.name]
    assert found["expected"] == found["enqueued"] == found["messages"]
    assert found["ticks"] == pytest.approx(6 * load.per_second, rel=0.1)
    assert found["workers"] == 2
    assert found["allowed_ms"] == pytest.approx((variant.lease_seconds + 0.1) * 1000 + found["p99_ms"], abs=0.1)
    assert found["lost"] == found["duplicates"] == found["made_late"] == 0
    assert list(figures.plot().groups) == [variant.name]


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


THIRDS = [{"p99_ms": 10.0}, {"p99_ms": 10.0}, {"p99_ms": 1900.0}]


@pytest.mark.parametrize(
    ("changed", "held"),
    [
        ({}, True),
        ({"missed": 1}, False),
        ({"left_over": 1}, False),
        ({"thirds": THIRDS[:2]}, False),
        ({"thirds": [{"p99_ms": 10.0}, {}, {"p99_ms": 2100.0}]}, False),
        ({"thirds": [{"p99_ms": 3000.0}, {}, {"p99_ms": 5900.0}]}, True),
    ],
)
def test_a_load_is_held_if_ticks_do_not_become_later_and_later(changed: dict[str, Any], *, held: bool) -> None:
    assert steady.holds({"missed": 0, "left_over": 0, "thirds": THIRDS} | changed) is held


@pytest.mark.parametrize(
    ("limit", "tried"), [(700_000, [100_000, 1_000_000, 550_000, 770_000]), (10**7, [100_000, 10**6])]
)
async def test_the_highest_load_that_is_held_is_searched_for(
    dsn: str, monkeypatch: pytest.MonkeyPatch, limit: int, tried: list[int]
) -> None:
    seen: list[int] = []

    async def measure(_dsn: str, load: steady.SteadyLoad, _say: object) -> dict[str, Any]:
        seen.append(load.schedules)
        return {"held": load.schedules <= limit}

    monkeypatch.setattr(steady, "measure", measure)
    loads = [steady.SteadyLoad(count, 60, 2, consume=False, jitter=0.1) for count in (100_000, 1_000_000)]
    figures = await steady.run_steady(dsn, loads=loads, rounds=1, find=True, server={}, progress=SilentSteps())
    assert seen == tried
    assert figures.highest_held == max(count for count in tried if count <= limit)


def test_sizes_are_numbers_in_order() -> None:
    assert parse_sizes("--schedules", "100, 20,100", least=1, most=100) == [20, 100]
    for text, says in (("many", "numbers with commas"), ("5,101", "from 1 to 100, not 101")):
        with pytest.raises(InvalidInputError, match=says):
            parse_sizes("--schedules", text, least=1, most=100)


def test_the_first_occurrence_leaves_time_to_write_and_to_fill_the_window() -> None:
    assert lead_seconds(600, 10) < 6
    assert lead_seconds(1_000_000, 16_667) > 60 + 50


def test_the_kernel_counts_what_a_process_uses() -> None:
    usage = usage_of(os.getpid())
    assert usage is not None
    assert usage.cpu_seconds > 0
    assert usage.memory_bytes > 1_000_000
    assert usage_of(2**22 + 1) is None


async def test_the_server_is_found_from_one_of_its_processes(connection: Any) -> None:
    """A process that isn't PostgreSQL's is of no server."""
    server = server_of(await connection.fetchval("SELECT pg_backend_pid()"))
    assert server is not None
    before = server_cpu_seconds(server)
    await connection.fetchval("SELECT count(md5(number::text)) FROM generate_series(1, 300000) AS number")
    after = server_cpu_seconds(server)
    assert before is not None
    assert after is not None
    assert 0.02 < after - before < 60
    assert server_of(os.getpid()) is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("steady", "--schedules", "10"), "error: --schedules: must be from 60 to"),
        (("failover", "--only", "kafka"), "error: --only: no sink begins with 'kafka'; there are: queue, outside"),
        (("idle", "--dsn", "postgresql://127.0.0.1:1/x"), "error: no database can be made"),
    ],
)
async def test_what_can_not_be_measured_is_an_error(
    processes: Processes, dsn: str, arguments: tuple[str, ...], says: str
) -> None:
    given = arguments if "--dsn" in arguments else (*arguments, "--dsn", dsn)
    running = await processes.cron_ticks("bench", *given)
    assert await running.wait() != 0
    assert any(says in line for line in running.errors), running.errors
