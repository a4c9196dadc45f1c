"""Bursts of `cron-ticks bench fire`: that they are what they say, and that nothing is hidden."""

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from cron_ticks.cli.bench import fire
from cron_ticks.cli.bench.bursts import Burst, BurstFigures, NotReadyError, burst_of, with_processes
from cron_ticks.cli.bench.fire_processes import CHANNEL, floors
from cron_ticks.cli.bench.fire_tables import BURST, BURST_EVERY, Tables, open_tables
from cron_ticks.cli.bench.progress import shown_steps
from cron_ticks.cli.bench.rounds import Figures
from cron_ticks.errors import CronTicksError
from support.processes import Processes

OURS = ("cron_ticks, 1 process", "cron_ticks, 2 processes")
BARE = ("bare SQL, 1 process", "bare SQL, 2 processes")
DUE = datetime(2026, 11, 17, 12, 0, tzinfo=UTC)

RUN = """
INSERT INTO cron_runs (schedule_id, scheduled_for, version, origin, outcome, ended_at, attempts, ticker_id)
VALUES ($1, $2, 1, 'schedule', 'enqueued', $3, 0, $4)
"""


def burst(rate: float, *, fired: int = 100, doubled: int = 0) -> Burst:
    late = 100 / rate * 1000
    return Burst(100, fired, doubled, late / 2, late, late)


def figures_of(**peers: list[Burst]) -> BurstFigures:
    own = {
        OURS[0]: [burst(100), burst(300)],
        OURS[1]: [burst(200), burst(600)],
        BARE[0]: [burst(100), burst(400)],
        BARE[1]: [burst(400), burst(400)],
    }
    processes = {with_processes(name, count): count for name in ("cron_ticks", "bare SQL") for count in (1, 2)}
    return BurstFigures({100: own | peers}, processes | dict.fromkeys(peers, 2))


async def report_of(processes: Processes, *options: str) -> dict[str, Any]:
    """It fails by itself if an occurrence has no message or two."""
    running = await processes.cron_ticks("bench", "fire", *options, "--rounds", "1", "--json")
    report: dict[str, Any] = json.loads(await running.output(110))
    assert await running.wait() == 0, running.errors
    assert report["machine"]["postgresql"].startswith("18")
    return report


async def test_a_drain_is_measured_beside_the_bare_statement(dsn: str, processes: Processes) -> None:
    report = await report_of(processes, "--ticks", "2000", "--only", "drain", "--dsn", dsn)
    assert report["ticks"] == 2000
    assert set(report["measures"]) == {"drain, 1 process", "drain, 2 processes"}
    for by_contender in report["measures"].values():
        assert set(by_contender) == {"cron_ticks", "bare SQL"}
        assert all(figures["per_second"][0] > 0 for figures in by_contender.values())


async def test_lateness_is_measured_under_a_steady_load(dsn: str, processes: Processes) -> None:
    report = await report_of(processes, "--per-second", "50", "--seconds", "1", "--only", "steady", "--dsn", dsn)
    (lateness,) = report["steady"]["rounds"]
    assert 0 < lateness["ticks"] <= 100
    assert 0 <= lateness["p50_ms"] <= lateness["p99_ms"] <= lateness["max_ms"]
    assert report["steady"]["p99_ms"]["median"] == lateness["p99_ms"]


async def test_a_burst_is_measured_with_one_and_two_processes(dsn: str, processes: Processes) -> None:
    report = await report_of(processes, "--burst", "100", "--only", "burst", "--dsn", dsn)
    assert set(report["bursts"]) == {"100"}
    assert set(report["bursts"]["100"]["contenders"]) == {*OURS, *BARE}
    assert len(report["bursts"]["100"]["ours_to_bare_1_process"]["rounds"]) == 1
    for figures in report["bursts"]["100"]["contenders"].values():
        assert (figures["fired"], figures["missing"], figures["doubled"]) == ([100], [0], [0])
        (p50,), (p99,), (last,) = (figures[name]["rounds"] for name in ("p50_ms", "p99_ms", "max_ms"))
        assert 0 < p50 <= p99 <= last
        assert figures["per_second"]["median"] == pytest.approx(100 / last * 1000, rel=0.01)


async def test_a_run_is_no_earlier_than_the_statement_after_it(dsn: str) -> None:
    """The ledger has the beginning of a statement; what it wrote is there when its ticker begins the next one."""
    now = datetime.now(UTC)
    runs = [("a", 10, "x"), ("b", 10, "x"), ("c", 30, "x"), ("d", 20, "y")]
    async with open_tables(dsn) as tables:
        for schedule, milliseconds, ticker in runs:
            await tables.connection.execute(RUN, schedule, now, now + timedelta(milliseconds=milliseconds), ticker)
        row = await tables.connection.fetchrow(BURST, now + timedelta(milliseconds=100))
    assert row is not None
    assert [row["fired"], row["p50_ms"], row["max_ms"]] == pytest.approx([4, 65, 100])


async def test_a_burst_of_which_something_is_missing_is_an_error(dsn: str) -> None:
    async with open_tables(dsn) as tables:
        due = await tables.now()
        await tables.make_burst_ticks(100, due)
        with pytest.raises(CronTicksError, match="of 100 ticks not each became one message"):
            await tables.burst(100, due, due + timedelta(seconds=1))


async def test_one_lost_and_one_doubled_is_an_error_though_the_totals_are_right(dsn: str) -> None:
    message = (
        "INSERT INTO queue_messages (id, queue_name, payload, schedule_id, scheduled_for) VALUES ($1, 'q', '1', $2, $3)"
    )
    async with open_tables(dsn) as tables:
        now = await tables.now()
        for number, (schedule, fired) in enumerate([("a", "a"), ("b", "a")]):
            await tables.connection.execute(RUN, schedule, now, now, "x")
            await tables.connection.execute(message, f"msg_{number}", fired, now)
        with pytest.raises(CronTicksError, match="of 2 ticks not each became one message"):
            await tables.drain_rate(2, now - timedelta(seconds=1))


@pytest.mark.parametrize("ticks", [100, 1001, 1500])
def test_the_bare_statement_looks_from_the_last_tick_that_it_took_and_never_higher(ticks: int) -> None:
    step = timedelta(microseconds=250)
    moments = [DUE + number * step for number in range(ticks)]
    for number, floor in enumerate(floors(moments[0], moments[-1], ticks, 500)):
        last_taken = moments[max(0, number * 500 - 1)]
        assert last_taken - step <= floor <= last_taken


def test_in_a_burst_the_bare_statement_looks_from_the_instant() -> None:
    assert set(floors(DUE, DUE, 1500, 500)) == {DUE}


async def test_the_schedules_of_a_burst_have_no_jitter(dsn: str) -> None:
    async with open_tables(dsn) as tables:
        due = await tables.now() + timedelta(seconds=30)
        await tables.make_burst_ticks(100, due)
        moments = await tables.connection.fetch("SELECT DISTINCT scheduled_for, execute_at, due_at FROM cron_ticks")
        needed = await tables.connection.fetch("SELECT DISTINCT next_tick_needed_at FROM cron_schedule_cursors")
    assert [tuple(row) for row in moments] == [(due, due, due)]
    assert [tuple(row) for row in needed] == [(due + BURST_EVERY,)]


async def test_a_burst_that_was_not_ready_in_time_begins_anew(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would measure how late the preparations were."""
    monkeypatch.setattr(fire, "BURST_LEAD_SECONDS", 0.001)
    monkeypatch.setattr(fire, "BURST_ATTEMPTS", 1)
    async with open_tables(dsn) as tables:
        with pytest.raises(CronTicksError, match="100 ticks were not made before they were due"):
            await fire.Course("bare SQL", dsn, tables).burst(100, 1)


async def test_nobody_sees_a_tick_of_a_drain_before_all_are_announced(dsn: str, connection: Any) -> None:
    seen: asyncio.Queue[object] = asyncio.Queue()
    await connection.add_listener(CHANNEL, lambda *notice: seen.put_nowait(notice[-1]))
    async with open_tables(dsn) as tables:
        announced = await asyncio.gather(tables.announce_due_ticks(3000), counts_until(connection, seen))
    assert set(announced[1][:-1]) <= {0}
    assert announced[1][-1] == 3000
    oldest = await connection.fetchval("SELECT min(due_at) FROM cron_ticks")
    assert announced[0] - oldest < timedelta(seconds=60)


async def counts_until(connection: Any, seen: "asyncio.Queue[object]") -> list[int]:
    counts = []
    while seen.empty():
        counts.append(await connection.fetchval("SELECT count(*) FROM cron_ticks"))
    return [*counts[:-1], await connection.fetchval("SELECT count(*) FROM cron_ticks")]


async def test_what_another_scheduler_fired_twice_or_not_is_counted(dsn: str) -> None:
    rows = "SELECT * FROM (VALUES ('a', 10), ('b', 20), ('b', 500), ('c', 40)) AS row (schedule, ms)"
    firings = f"SELECT schedule, '{DUE.isoformat()}'::timestamptz + ms * interval '1 ms' AS fired_at FROM ({rows}) AS r"
    async with open_tables(dsn) as tables:
        found = await burst_of(tables.connection, firings, 5, DUE)
        none = await burst_of(tables.connection, f"{firings} WHERE false", 5, DUE)
    assert (found.fired, found.missing, found.doubled) == (3, 2, 1)
    assert [found.p50_ms, found.max_ms, found.per_second] == pytest.approx([20, 40, 75])
    assert (none.fired, none.missing, none.per_second) == (0, 5, 0)


def test_ratios_are_to_ours_with_as_many_processes_round_by_round() -> None:
    figures = figures_of(slow=[burst(10), burst(20)], fast=[burst(50), burst(10)])
    assert figures.ratios(100, BARE[0]) == pytest.approx([1.0, 0.75])
    assert figures.ratios(100, BARE[1]) == pytest.approx([0.5, 1.5])
    assert figures.ratios(100, "slow") == pytest.approx([20, 30])
    assert figures.to_best_peer(100) == pytest.approx([4, 30])
    shown = figures.as_json()["100"]
    assert shown["ours_to_bare_1_process"]["rounds"] == [1.0, 0.75]
    assert (shown["ours_to_best_peer"]["median"], shown["ours_to_best_peer"]["lowest"]) == (17, 4)


def test_without_peers_there_is_no_best_one() -> None:
    assert "ours_to_best_peer" not in figures_of().as_json()["100"]


def test_a_peer_that_fired_nothing_has_no_ratio() -> None:
    figures = figures_of(dead=[burst(10, fired=0), burst(10, fired=0)])
    assert figures.ratios(100, "dead") == [0, 0]
    assert figures.to_best_peer(100) == [0, 0]


def test_a_peer_that_was_not_ready_in_some_round_keeps_the_others() -> None:
    figures = figures_of(slow=[burst(10)], fast=[burst(5), burst(10)])
    assert figures.ratios(100, "slow") == pytest.approx([20])
    assert figures.to_best_peer(100) == pytest.approx([20, 60])
    assert figures.as_json()["100"]["contenders"]["slow"]["fired"] == [100]


async def test_who_is_not_ready_is_left_out_and_the_run_goes_on(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    async def never() -> Burst:
        calls.append("never")
        raise NotReadyError("it can't have so many")

    async def once() -> Burst:
        calls.append("once")
        if calls.count("once") > 1:
            raise NotReadyError("it fell")
        return burst(10)

    async def ours(*_: object) -> Burst:
        return burst(100)

    monkeypatch.setattr(fire.Course, "burst", ours)
    measure = fire.burst_measure(100, [fire.Turn("never", never), fire.Turn("once", once)])
    with shown_steps() as steps:
        figures = await fire.run_fire_rounds(
            dsn, measures=[measure], load=fire.Load(0, 0, 0, [100]), rounds=3, progress=steps
        )
    report = figures.as_json()
    assert report["left_out"] == {
        "never, burst of 100": "not ready in round 1: it can't have so many",
        "once, burst of 100": "not ready in round 2: it fell",
    }
    assert set(report["bursts"]["100"]["contenders"]) == {*OURS, *BARE, "once"}
    assert [len(figures.bursts.bursts[100][name]) for name in ("once", OURS[0])] == [1, 3]
    assert not {"ticks", "measures"} & set(report)
    assert (calls.count("never"), calls.count("once")) == (1, 2)


def test_the_table_says_what_is_missing_or_doubled() -> None:
    figures = figures_of(peer=[burst(10, fired=98), burst(10, doubled=3)])
    cells = {name: list(column.cells) for name, column in zip("abcdefg", figures.table().columns, strict=True)}
    assert cells["a"][-1] == "  peer"
    assert cells["g"][-1] == "2 missing, 3 doubled"
    assert set(cells["g"][1:-1]) == {"all"}
    assert cells["b"][1] == "200\n100 to 300"


def test_bursts_stand_below_the_drains_and_are_drawn_beside_them() -> None:
    drains = Figures(
        {"drain, 1 process": {"cron_ticks": [10.0], "bare SQL": [10.0]}}, {"cron_ticks": "1", "bare SQL": "1"}, {}, 1
    )
    load = fire.Load(2000, 1000, 20, [100])
    both = fire.FireFigures(drains, [], load, 1, figures_of())
    assert both.table().row_count == 2
    plot = both.plot()
    assert plot is not None
    assert plot.logarithmic
    assert set(plot.groups) == {"drain, 1 process", "100 at once"}
    bar = plot.groups["100 at once"][OURS[0]]
    assert [bar.median, bar.lowest, bar.highest] == pytest.approx([200, 100, 300])


def test_no_size_is_measured_twice() -> None:
    names = [measure.name for measure in fire.measures_of(fire.Load(2000, 1000, 20, [1000, 200, 1000]))]
    assert names == ["drain, 1 process", "drain, 2 processes", "burst of 1,000", "burst of 200", "steady"]


async def test_the_clocks_are_compared(dsn: str) -> None:
    async with open_tables(dsn) as tables:
        zero = await tables.monotonic_zero()
        loop = asyncio.get_running_loop()
        assert abs(await _database_now(tables) - zero - timedelta(seconds=loop.time())) < timedelta(seconds=1)


async def _database_now(tables: Tables) -> datetime:
    instant: datetime = await tables.connection.fetchval("SELECT clock_timestamp()")
    return instant
