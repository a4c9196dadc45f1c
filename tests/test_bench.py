"""`cron-ticks bench`: that it measures what it says, not how fast it is here."""

import json

import pytest

from cron_ticks.cli.bench.rounds import MEASURES, Figures
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


def test_ratios_are_taken_round_by_round() -> None:
    rates = {"send": {"cron_ticks": [10.0, 40.0, 90.0], "other": [10.0, 10.0, 10.0]}}
    figures = Figures(rates, {"cron_ticks": "1", "other": "2"}, {}, 100)
    assert figures.ratios("send", "other") == [1.0, 4.0, 9.0]
    shown = figures.as_json()["measures"]["send"]["cron_ticks"]
    assert (shown["median"], shown["lowest"], shown["highest"]) == (40.0, 10.0, 90.0)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(("--rounds", "0"), "--rounds"), (("--dsn", "postgresql://127.0.0.1:1/x"), "error: no database can be made")],
)
async def test_what_can_not_be_measured_is_an_error(
    processes: Processes, arguments: tuple[str, ...], says: str
) -> None:
    running = await processes.cron_ticks("bench", "queue", *arguments)
    assert await running.wait() != 0
    assert any(says in line for line in running.errors)
