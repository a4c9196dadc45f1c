"""`cron-ticks bench bloat`: that it measures what it says, not how fast it is here."""

import json
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from cron_ticks.cli.bench.bloat_figures import BloatFigures, Drain, slice_rates
from cron_ticks.cli.bench.bloat_snapshot import held_snapshot
from cron_ticks.errors import CronTicksError
from support.processes import Processes

SLICES = 6
NAMES = {"cron_ticks, old snapshot held", "cron_ticks, none held"}


@pytest.mark.parametrize(("only", "count"), [("messages, 2", 1000), ("ticks, 1", 6000)])
async def test_a_drain_has_a_rate_per_slice_with_the_snapshot_and_without_it(
    dsn: str, processes: Processes, tmp_path: Path, only: str, count: int
) -> None:
    """It fails by itself unless each message is handled once, and each tick becomes one message."""
    plot = tmp_path / "bloat.svg"
    size = ("--count", str(count), "--slices", str(SLICES), "--only", only)
    running = await processes.cron_ticks("bench", "bloat", *size, "--json", "--dsn", dsn, "--plot", str(plot))
    report = json.loads(await running.output(110))
    assert await running.wait() == 0, running.errors
    assert (report["count"], report["slices"], report["rounds"]) == (count, SLICES, 1)
    (by_contender,) = report["measures"].values()
    assert set(by_contender) == NAMES
    for figures in by_contender.values():
        (rates,) = figures["per_second"]
        assert len(rates) == SLICES
        assert min(rates) > 0
        first, last = sorted(rates[:3])[1], sorted(rates[-3:])[1]
        assert figures["ratio"]["rounds"] == [pytest.approx(last / first, rel=0.01)]
    assert by_contender["cron_ticks, old snapshot held"]["dead_rows"] >= [count]
    assert plot.read_text().startswith("<svg")


async def test_the_snapshot_keeps_what_is_deleted_from_being_removed(dsn: str, connection: Any) -> None:
    await connection.execute("CREATE TABLE kept AS SELECT FROM generate_series(1, 100)")

    async def vacuumed() -> int:
        other = await asyncpg.connect(dsn)
        await other.execute("DELETE FROM kept")
        await other.execute("VACUUM kept")
        await other.close()
        return int(await connection.fetchval("SELECT pg_relation_size('kept')"))

    async with held_snapshot(dsn, held=False), held_snapshot(dsn):
        assert await vacuumed() > 0
    async with held_snapshot(dsn, held=False):
        assert await vacuumed() == 0


async def test_a_snapshot_that_was_not_held_to_the_end_is_an_error(dsn: str, connection: Any) -> None:
    """As idle_in_transaction_session_timeout would end it."""
    with pytest.raises(CronTicksError, match="the old snapshot was not held to the end"):
        async with held_snapshot(dsn):
            await end_the_holder(connection)


async def end_the_holder(connection: Any) -> None:
    """And wait until it has ended."""
    ours = "FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction'"
    while not await connection.fetchval(f"SELECT count(pg_terminate_backend(pid)) {ours}"):
        pass
    while await connection.fetchval(f"SELECT EXISTS (SELECT {ours})"):
        pass


@pytest.mark.parametrize(
    ("rounds", "says"),
    [
        (1, "1 round: not for publication"),
        (4, "Median of 4 rounds (lowest to highest): not for publication"),
        (5, "Median of 5 rounds (lowest to highest)."),
    ],
)
def test_few_rounds_are_not_for_publication(rounds: int, says: str) -> None:
    figures = BloatFigures({}, {}, {}, 1000, 7, rounds)
    plot = figures.plot()
    assert plot is not None
    assert says.rstrip(".") in plot.caption
    assert says in str(figures.table().caption)
    assert ("not for publication" in plot.caption) == (rounds < 5)


def test_slices_are_cut_where_the_processes_together_were() -> None:
    reports = {0: [(1.0, 0), (2.0, 50), (4.0, 150)], 1: [(1.5, 0), (3.0, 50)]}
    assert slice_rates(reports, 1.0, 200, 2) == [pytest.approx(100 / 2), pytest.approx(100 / 1)]
    # 50 at 2.0 and 100 at 3.0; the other 100 in the second up to 4.0


def test_what_was_not_handled_has_no_rate() -> None:
    with pytest.raises(CronTicksError, match="only 150 of 200 were handled"):
        slice_rates({0: [(1.0, 100), (2.0, 150)]}, 0.0, 200, 2)


def test_what_is_left_is_the_last_slices_by_the_first() -> None:
    drain = Drain(1000, [1.0, 10.0, 11.0, 7.0, 5.0, 6.0, 100.0], 1234)
    assert (drain.first, drain.last, drain.ratio) == (10.0, 6.0, 0.6)
    other = Drain(1000, [10.0] * 7, 0)
    drains = {"messages, 1 process": {"held": [drain, other]}}
    figures = BloatFigures(drains, {"cron_ticks": "1"}, {}, 1000, 7, 2)
    cells = [list(column.cells) for column in figures.table().columns]
    assert cells == [["messages, 1 process: held"], ["1,000"], ["10"], ["8"], ["0.80 (0.60 to 1.00)"], ["617"]]
    plot = figures.plot()
    assert plot is not None
    bar = plot.groups["messages, 1 process"]["held"]
    assert (bar.median, bar.lowest, bar.highest) == (0.8, 0.6, 1.0)
