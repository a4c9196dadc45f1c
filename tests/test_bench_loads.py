"""The loads of `cron-ticks bench`: that they measure what they say, and see what is wrong; not how fast it is here."""

import dataclasses
import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cron_ticks.cli.bench import audit, bench_app, failover, idle, load_commands, steady
from cron_ticks.cli.bench.figures import of_rounds
from cron_ticks.cli.bench.loads import lead_seconds, parse_sizes
from cron_ticks.cli.bench.machine import settings_with
from cron_ticks.cli.bench.usage import server_cpu_seconds, server_of, usage_of
from cron_ticks.errors import InvalidInputError
from cron_ticks.settings import Settings
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
    assert await running.wait() == 0, "\n".join(running.errors[-5:])
    report: dict[str, Any] = json.loads(output)
    return report


async def test_a_steady_load_is_counted_from_the_rows(dsn: str, processes: Processes, tmp_path: Path) -> None:
    """600 schedules of a minute, spread evenly: ten ticks a second."""
    size = ("--schedules", "600", "--minutes", "0.1", "--jitter", "0", "--consume")
    plot = tmp_path / "steady.svg"
    report = await report_of(processes, "steady", *size, "--plot", str(plot), dsn=dsn)
    load = report["loads"]["600"]
    (found,) = load["rounds"]
    assert load["held"] is steady.holds(found)
    assert report["highest_held"] == (600 if load["held"] else None)
    assert 55 <= found["expected"] == found["enqueued"] == found["messages"] <= 65
    assert sum(third["ticks"] for third in found["thirds"]) == found["ticks"]
    assert found["per_second"] == pytest.approx(10, abs=1)
    assert found["due_per_second"] == 10
    assert found["consumed_per_second"] == pytest.approx(10, abs=2)
    assert max(found["backlog_start"], found["backlog_end"]) < 60
    assert found["unconsumed"] == found["handled_again"] == 0
    assert "each message once" in report["criterion"]
    assert "one more that also consumes, beside making and firing" in report["workers"]
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
    assert figures.plot().unit == "statements a second"
    assert list(figures.plot().groups) == ["10 schedules"]


@pytest.mark.parametrize("variant", failover.VARIANTS, ids=lambda variant: variant.name)
async def test_nothing_is_lost_when_a_worker_is_killed(dsn: str, variant: failover.Variant) -> None:
    """Before the kill both fire. It fails by itself if a tick is lost or doubled, or a schedule doesn't go on."""
    short = {"lookahead": 6, "manager_interval": 0.5, "shard_lease": 2}
    load = failover.FailoverLoad(schedules=100, processes=2, before=3, afterwards=11, jitter=0, **short)
    load.check()
    figures = await failover.run_failover(
        dsn, load=load, variants=[variant], rounds=1, server={}, progress=SilentSteps()
    )
    (found,) = figures.found[variant.name]
    assert found["expected"] == found["enqueued"] == found["messages"]
    assert found["ticks"] == pytest.approx(14 * load.per_second, rel=0.1)
    assert found["workers"] == 2
    assert found["allowed_ms"] == pytest.approx((variant.lease_seconds + 0.1) * 1000 + found["p99_ms"], abs=0.1)
    assert found["lost"] == found["duplicates"] == found["made_late"] == found["continued_late"] == 0
    assert 1 < found["taken_over_s"] < 8
    assert 0 < found["dead_shards"] < 64
    assert 0 < found["dead_schedules"] < 100
    assert found["continued_ticks"] >= found["dead_schedules"]
    assert 0 < found["continued_lead_s"] <= load.lookahead
    assert list(figures.plot().groups) == [variant.name]
    assert figures.as_json()["settings"]["lookahead_seconds"] == "6"
    assert "a shard lease of 2 s" in str(figures.table().caption)


def test_a_kill_is_watched_for_long_enough() -> None:
    load = failover.FailoverLoad(100, 2, 10, 16.5, 0.1)
    load.check()
    with pytest.raises(InvalidInputError, match=r"--after: must be at least 16\.5"):
        dataclasses.replace(load, afterwards=16).check()


CONSUMED = {"consumed_per_second": 97.1, "unconsumed": 0, "handled_again": 0}
THIRDS = [{"p99_ms": 10.0}, {"p99_ms": 10.0}, {"p99_ms": 1900.0}]


@pytest.mark.parametrize(
    ("changed", "held"),
    [
        ({}, True),
        ({"missed": 1}, False),
        ({"left_over": 1}, False),
        ({"thirds": THIRDS[:2]}, False),
        ({"thirds": [{"p99_ms": 10.0}, {}, {"p99_ms": 2100.0}]}, False),
        ({"thirds": [{"p99_ms": 3000.0}, {}, {"p99_ms": 3900.0}]}, True),
        ({"thirds": [{"p99_ms": 3000.0}, {}, {"p99_ms": 4100.0}]}, False),
        ({"per_second": 98.9}, False),
        (CONSUMED, True),
        (CONSUMED | {"consumed_per_second": 97.0}, False),
        (CONSUMED | {"unconsumed": 1}, False),
        (CONSUMED | {"handled_again": 1}, False),
    ],
)
def test_a_load_is_held_if_ticks_do_not_become_later_and_later(changed: dict[str, Any], *, held: bool) -> None:
    usual = {"missed": 0, "left_over": 0, "thirds": THIRDS, "per_second": 99.0, "due_per_second": 100.0}
    assert steady.holds(usual | changed) is held


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


async def test_the_loads_take_turns_within_a_round(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    async def measure(_dsn: str, load: steady.SteadyLoad, _say: object) -> dict[str, Any]:
        seen.append(load.schedules)
        return {"held": True}

    monkeypatch.setattr(steady, "measure", measure)
    loads = [steady.SteadyLoad(count, 60, 2, consume=True, jitter=0.1) for count in (100, 200)]
    figures = await steady.run_steady(dsn, loads=loads, rounds=3, find=False, server={}, progress=SilentSteps())
    assert seen == [100, 200, 200, 100, 100, 200]
    caption = str(figures.table().caption)
    assert "3 rounds: not for publication" in caption
    assert figures.machine["processor"] in caption
    assert "waits for the disk" in caption or "does not wait for the disk" in caption


@pytest.mark.parametrize(
    ("rounds", "says"),
    [
        (1, "1 round: not for publication"),
        (4, "4 rounds: not for publication, median (lowest to highest)"),
        (5, "median of 5 rounds (lowest to highest)"),
    ],
)
def test_few_rounds_are_not_for_publication(rounds: int, says: str) -> None:
    assert of_rounds(rounds) == says


def test_sizes_are_numbers_in_order() -> None:
    assert parse_sizes("--schedules", "100, 20,100", least=1, most=100) == [20, 100]
    for text, says in (("many", "numbers with commas"), ("5,101", "from 1 to 100, not 101")):
        with pytest.raises(InvalidInputError, match=says):
            parse_sizes("--schedules", text, least=1, most=100)


def test_the_first_occurrence_leaves_time_to_write_and_to_fill_the_window() -> None:
    assert lead_seconds(600, 10) < 6
    assert lead_seconds(1_000_000, 16_667) > 60 + 50
    assert lead_seconds(600, 10_000, lookahead=10) < 11


def test_the_environment_sets_nothing_of_what_is_measured_here(monkeypatch: pytest.MonkeyPatch, dsn: str) -> None:
    monkeypatch.setenv("CRON_TICKS_MANAGER_BATCH_SIZE", "7")
    monkeypatch.setenv("CRON_TICKS_EVENTS", "off")
    monkeypatch.setenv("CRON_TICKS_DATABASE_SCHEMA", "another")
    assert Settings.load(dsn=dsn).manager_batch_size == 7
    settings = settings_with(dsn, statement_timeout_seconds=600)
    changed = {name for name, field in Settings.model_fields.items() if getattr(settings, name) != field.get_default()}
    assert changed == {"dsn", "statement_timeout_seconds"}


async def test_the_audit_that_is_measured_has_the_default_settings(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its tables are shows with which settings it opened its database."""
    monkeypatch.setenv("CRON_TICKS_DATABASE_SCHEMA", "another")
    seen: list[str] = []

    async def look(course: audit.Course) -> None:
        seen.append(course.database.schema)

    measures = [audit.AuditMeasure("look", look)]
    load = audit.AuditLoad(schedules=300, hours=1)
    await audit.run_audit_rounds(dsn, measures=measures, load=load, rounds=1, progress=SilentSteps())
    assert seen == ["public"]


@pytest.mark.parametrize("kind", ["generate", "calendar"])
async def test_variables_do_not_reach_what_is_measured_in_the_process(
    dsn: str, processes: Processes, kind: str
) -> None:
    """With this schema the statements that look at the tables would not find them."""
    size = ("--schedules", "300", *(("--due", "300", "--ticks", "0") if kind == "generate" else ()))
    arguments = ("bench", kind, *size, "--rounds", "1", "--json", "--dsn", dsn)
    running = await processes.cron_ticks(*arguments, environment={"CRON_TICKS_DATABASE_SCHEMA": "another"})
    await running.output(110)
    assert await running.wait() == 0, "\n".join(running.errors[-5:])


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
        (("generate", "--schedules", "10"), "error: --schedules: must be from 5,000 to"),
        (("idle", "--schedules", "many"), "error: --schedules: must be numbers"),
        (("failover", "--only", "kafka"), "error: --only: no sink begins with 'kafka'; there are: queue, outside"),
        (("failover", "--after", "10"), "error: --after: must be at least 16.5"),
    ],
)
def test_mistakes_are_said_before_a_server_starts(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], says: str
) -> None:
    monkeypatch.setattr(load_commands, "on_server", None)
    result = CliRunner().invoke(bench_app, list(arguments))
    assert result.exit_code == 2
    assert says in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
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
