"""`cron-ticks bench`: that it measures what it says, not how fast it is here."""

import json
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from cron_ticks import preview
from cron_ticks.cli.bench import calendar, fire
from cron_ticks.cli.bench.fire_tables import open_tables
from cron_ticks.cli.bench.rounds import LEVEL_CONTENDERS, MEASURES, OWN_CONTENDERS, Contender, Course, Figures
from cron_ticks.errors import CronTicksError
from support.processes import Processes


async def test_every_measure_of_both_contenders_has_a_figure_per_round(dsn: str, processes: Processes) -> None:
    """On the given server, in databases of its own that are gone afterwards."""
    arguments = ("bench", "queue", "--messages", "100", "--rounds", "1", "--json", "--dsn", dsn)
    running = await processes.cron_ticks(*arguments)
    report = json.loads(await running.output(110))
    assert await running.wait() == 0, running.errors
    assert report["machine"]["postgresql"].startswith("18")
    assert set(report["measures"]) == {measure.name for measure in MEASURES}
    for by_contender in report["measures"].values():
        assert set(by_contender) == {"cron_ticks", "bare SQL"}
        for figures in by_contender.values():
            assert len(figures["per_second"]) == len(figures["ratio_of_ours"]) == 1
            assert all(rate > 0 for rate in figures["per_second"])


@pytest.mark.parametrize(
    ("kind", "size"),
    [("queue", ("--messages", "100", "--only", "send by")), ("fire", ("--ticks", "2000", "--only", "drain, 1"))],
)
async def test_the_levels_of_events_can_be_measured_side_by_side(
    dsn: str, processes: Processes, kind: str, size: tuple[str, ...]
) -> None:
    arguments = ("bench", kind, *size, "--rounds", "2", "--events", "--json", "--dsn", dsn)
    running = await processes.cron_ticks(*arguments)
    report = json.loads(await running.output(110))
    assert await running.wait() == 0, running.errors
    (by_contender,) = report["measures"].values()
    assert set(by_contender) == {"cron_ticks", "bare SQL", "events=off", "events=all"}
    for figures in by_contender.values():
        assert len(figures["per_second"]) == len(figures["ratio_of_ours"]) == 2


@pytest.mark.parametrize(("level", "events"), [("off", 0), ("all", 100), (None, 0)])
async def test_a_contender_with_a_level_has_its_events(
    dsn: str, connection: Any, level: str | None, events: int
) -> None:
    """Or the figures of all levels would be of one."""
    contender = (
        OWN_CONTENDERS[0]
        if level is None
        else next(contender for contender in LEVEL_CONTENDERS if contender.name == f"events={level}")
    )
    await Course(contender, dsn).send_one(100, 2)
    noted = "SELECT count(*) FROM execution_events JOIN queue_messages ON queue_messages.id = message_id"
    assert await connection.fetchval(noted) == events


async def test_a_firer_with_a_level_has_its_events(dsn: str, connection: Any) -> None:
    async with open_tables(dsn) as tables:
        await fire.Course("events=all", dsn, tables, "all").drain(2000, 1)
    assert await connection.fetchval("SELECT count(*) FROM execution_events WHERE event = 'sent'") == 2000


async def test_planning_is_measured_with_expressions_beside_intervals(dsn: str, processes: Processes) -> None:
    """It fails by itself unless each schedule gets one tick."""
    running = await processes.cron_ticks(
        "bench", "calendar", "--schedules", "600", "--rounds", "2", "--json", "--dsn", dsn
    )
    report = json.loads(await running.output(110))
    assert await running.wait() == 0, running.errors
    assert (report["schedules"], report["expressions"]) == (600, 300)
    assert set(report["measures"]) == {"plan", "pass"}
    for figures in report["measures"].values():
        seconds = [figures[kind]["seconds"] for kind in ("cron", "interval")]
        assert [len(values) for values in seconds] == [2, 2]
        ratios = [cron / interval for cron, interval in zip(*seconds, strict=True)]
        assert figures["ratio"]["rounds"] == pytest.approx(ratios, abs=0.001)


async def test_the_audit_is_measured_and_names_what_was_removed(dsn: str, processes: Processes) -> None:
    """It fails by itself if the audit finds something before, or anything else afterwards."""
    size = ("--schedules", "600", "--hours", "2", "--rounds", "2")
    running = await processes.cron_ticks("bench", "audit", *size, "--json", "--dsn", dsn)
    report = json.loads(await running.output(110))
    assert await running.wait() == 0, running.errors
    assert (report["schedules"], report["versions"], report["expressions"]) == (600, 600, 300)
    assert set(report["measures"]) == {"audit", "stats"}
    assert all(len(figures["seconds"]) == 2 for figures in report["measures"].values())
    assert report["expected"] == report["ledger_rows"] + report["pending"] > 600
    assert report["buffers_hit"] + report["buffers_read"] > 0
    assert report["named"] == report["removed_by_hand"]
    assert len(report["named"]) == 2


def test_the_expressions_are_as_many_as_said_and_occur_where_the_intervals_do() -> None:
    start = datetime(2026, 11, 16, 12, 0, 30, tzinfo=UTC)
    occurrences = calendar.occurrences_of(start, 1000)
    columns = [calendar.rule_columns("cron", moment, number) for number, moment in enumerate(occurrences)]
    assert len(set(columns)) == len({cron for _, cron, _ in columns}) == calendar.EXPRESSIONS
    for moment, (_, cron, zone) in zip(occurrences, columns, strict=True):
        before = moment - timedelta(seconds=1)
        expected = [moment, moment + timedelta(hours=1)]
        assert preview(cron=cron, timezone=zone, after=before, count=2) == expected


async def test_a_process_that_can_not_start_says_why(dsn: str) -> None:
    """Our own connection works, the worker's doesn't."""
    async with open_tables(dsn) as tables:
        course = fire.Course("cron_ticks", dsn.replace("/test_", "/no_test_"), tables)
        with pytest.raises(CronTicksError, match=r"(?s)ended too early.*Check the DSN"):
            await course.drain(2000, 1)


# A contender that handles another number of messages than it got.
MISCOUNTING = """
import json, sys
if sys.argv[1] == "consume":
    print("ready", flush=True)
    sys.stdin.readline()
    sys.stdin.readline()
print(json.dumps({"messages": 100, "seconds": 1, "left": 0, "handled": HANDLED, "start": 0, "last": 1}))
"""


@pytest.mark.parametrize("handled", [99, 101])
async def test_messages_that_were_not_each_handled_once_are_an_error(handled: int) -> None:
    program = MISCOUNTING.replace("HANDLED", str(handled))
    contender = Contender("one", (sys.executable, "-c", program))
    with pytest.raises(CronTicksError, match=f"one handled {handled} messages, and there were 100"):
        await Course(contender, "postgresql://nowhere").consume(100, 1)


def test_lateness_is_shown_beside_the_rates() -> None:
    rates = {"drain, 1 process": {"cron_ticks": [10.0, 8.0], "bare SQL": [10.0, 10.0]}}
    figures = Figures(rates, {"cron_ticks": "1", "bare SQL": "1"}, {}, 2000)
    steady = [{"p50_ms": 1.0, "p99_ms": 5.0, "max_ms": 9.0}, {"p50_ms": 3.0, "p99_ms": 7.0, "max_ms": 8.0}]
    shown = fire.FireFigures(figures, steady, fire.Load(2000, 1000, 20), 2)
    columns = [list(column.cells) for column in shown.table().columns]
    assert columns[0][1:] == [f"steady, 1,000 a second, {name}" for name in ("p50", "p99", "max")]
    assert columns[1][1] == "2.0 ms (1.0 to 3.0)"
    assert columns[2][0] == "10 (10 to 10)\nratio 0.90 (0.80 to 1.00)"


def test_ratios_are_taken_round_by_round() -> None:
    rates = {"send": {"cron_ticks": [10.0, 40.0, 90.0], "other": [10.0, 10.0, 10.0]}}
    figures = Figures(rates, {"cron_ticks": "1", "other": "2"}, {}, 100)
    assert figures.ratios("send", "other") == [1.0, 4.0, 9.0]
    shown = figures.as_json()["measures"]["send"]["cron_ticks"]
    assert (shown["median"], shown["lowest"], shown["highest"]) == (40.0, 10.0, 90.0)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("queue", "--rounds", "0"), "--rounds"),
        (("queue", "--dsn", "postgresql://127.0.0.1:1/x"), "error: no database can be made"),
        (("fire", "--only", "fill"), "error: --only: no measure begins with 'fill'; there are: drain, 1 process"),
    ],
)
async def test_what_can_not_be_measured_is_an_error(
    processes: Processes, arguments: tuple[str, ...], says: str
) -> None:
    running = await processes.cron_ticks("bench", *arguments)
    assert await running.wait() != 0
    assert any(says in line for line in running.errors)
