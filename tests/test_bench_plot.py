"""Plots and progress of `cron-ticks bench`: that they show what was measured."""

import io
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from cron_ticks.cli.bench import fire
from cron_ticks.cli.bench.bloat_figures import BloatFigures
from cron_ticks.cli.bench.machine import describe_machine, described
from cron_ticks.cli.bench.plot import Bar, Plot, bar_of, shown, svg
from cron_ticks.cli.bench.progress import shown_steps
from cron_ticks.cli.bench.rounds import Figures
from support.processes import Processes

SPACE = "{http://www.w3.org/2000/svg}"
MACHINE = {
    "processor": "a <fast> one",
    "cores": 2,
    "memory_bytes": 8 * 2**30,
    "python": "3.11",
    "postgresql": "18.4",
    "durable": True,
    "server_settings": {"shared_buffers": "128MB", "max_wal_size": "1GB", "synchronous_commit": "on", "fsync": "on"},
}
SAID = (
    "a <fast> one, 2 cores, 8.0 GiB of memory, Python 3.11, PostgreSQL 18.4, which waits for the disk, "
    "shared_buffers 128MB, max_wal_size 1GB"
)


def drawn(plot: Plot) -> ElementTree.Element:
    return ElementTree.fromstring(svg(plot))  # noqa: S314 - our own text


def widths(picture: ElementTree.Element) -> list[float]:
    return [float(group.find(f"{SPACE}rect").attrib["width"]) for group in picture.iter(f"{SPACE}g")]  # type: ignore[union-attr]


def texts(picture: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in picture.iter(f"{SPACE}text")]


def test_bars_are_as_long_as_their_values() -> None:
    picture = drawn(Plot("t", "ticks", {"a": {"x": Bar(100, 90, 200), "y": Bar(50, 50, 50)}, "b": {"x": Bar(0, 0, 0)}}))
    full, half, none = widths(picture)
    assert full == pytest.approx(2 * half, abs=0.2)
    assert none == 0
    assert len(list(picture.iter(f"{SPACE}g"))) == 3


def test_on_a_logarithmic_axis_equal_ratios_are_equal_distances() -> None:
    bars = {"x": Bar(20, 20, 20), "y": Bar(200, 200, 200), "z": Bar(2000, 2000, 2000), "zero": Bar(0, 0, 0)}
    small, middle, large, zero = widths(drawn(Plot("t", "ticks", {"a": bars}, logarithmic=True)))
    assert large - middle == pytest.approx(middle - small, abs=0.2)
    assert small > zero == 0


@pytest.mark.parametrize("logarithmic", [False, True])
@pytest.mark.parametrize("value", [0.0, 0.003, 1.0, 999.0, 1e7])
def test_whatever_is_measured_stays_inside_the_picture(value: float, *, logarithmic: bool) -> None:
    picture = drawn(Plot("t", "ms", {"a": {"x": Bar(value, value / 2, value * 2)}}, logarithmic=logarithmic))
    places = [float(text.attrib["x"]) for text in picture.iter(f"{SPACE}text")]
    assert all(0 <= place < 960 for place in places)
    assert shown(value) in texts(picture)


def test_a_picture_without_a_bar_is_a_picture() -> None:
    for logarithmic in (False, True):
        assert drawn(Plot("nothing", "ticks", {}, logarithmic=logarithmic)).tag == f"{SPACE}svg"


def test_all_figures_are_there_in_words() -> None:
    picture = drawn(Plot("a & b", "ticks a second", {"1,000": {"<ours>": Bar(1234.5, 1000, 2000)}}, caption="on it"))
    assert picture.find(f"{SPACE}title").text == "a & b"  # type: ignore[union-attr]
    described = picture.find(f"{SPACE}desc").text  # type: ignore[union-attr]
    assert described == "Median and range, in ticks a second. 1,000: <ours> 1,234 (1,000 to 2,000)."
    assert {"1,000", "<ours>", "1,234", "on it"} <= set(texts(picture))


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.0123, "0.0123"), (0.5, "0.50"), (12.34, "12.3"), (123.4, "123"), (45678, "45,678")]
)
def test_values_have_the_digits_that_mean_something(value: float, text: str) -> None:
    assert shown(value) == text


def test_a_bar_is_the_median_and_the_range() -> None:
    assert bar_of([3.0, 1.0, 2.0]) == Bar(2.0, 1.0, 3.0)


def test_a_plot_and_a_table_say_on_which_machine() -> None:
    rates = {"drain, 1 process": {"cron_ticks": [10.0, 8.0], "bare SQL": [10.0, 12.0]}}
    figures = Figures(rates, {"cron_ticks": "1", "bare SQL": "1"}, MACHINE, 2000)
    shown = fire.FireFigures(figures, [], fire.Load(2000, 1000, 20), 2)
    plot = shown.plot()
    assert plot is not None
    assert plot.groups == {"drain, 1 process": {"cron_ticks": Bar(9, 8, 10), "bare SQL": Bar(11, 10, 12)}}
    assert SAID in plot.caption
    bloat = BloatFigures({}, {}, MACHINE, 1000, 6, 5)
    for table in (shown.table(), figures.table(), bloat.table()):
        assert SAID in str(table.caption)


def test_where_nobody_says_how_much_memory_there_is_it_is_left_out() -> None:
    assert "2 cores, Python 3.11" in described(MACHINE | {"memory_bytes": None})


async def test_the_machine_is_described_with_the_settings_of_the_server(dsn: str) -> None:
    machine = await describe_machine(dsn)
    assert machine["memory_bytes"] > 2**20
    assert set(machine["server_settings"]) == {"shared_buffers", "max_wal_size", "synchronous_commit", "fsync"}
    assert machine["durable"] == (machine["server_settings"]["fsync"] == "on")


def test_the_bar_shows_steps_done_of_all() -> None:
    output = io.StringIO()
    with shown_steps(Console(file=output, force_terminal=True, width=100)) as steps:
        steps.expect(3)
        steps("round 1 of 3: [drain]")
        steps("round 2 of 3: [drain]")
        steps.bar.refresh()
    assert "1/3" in output.getvalue()
    assert "round 2 of 3: [drain]" in output.getvalue()


def test_where_there_is_no_terminal_nothing_is_printed() -> None:
    output = io.StringIO()
    with shown_steps(Console(file=output)) as steps:
        steps.expect(1)
        steps("round 1 of 1")
    assert not output.getvalue()


async def test_a_command_draws_what_it_measured(dsn: str, processes: Processes, tmp_path: Path) -> None:
    file = tmp_path / "queue.svg"
    size = ("--messages", "100", "--rounds", "1", "--only", "send by")
    running = await processes.cron_ticks("bench", "queue", *size, "--plot", str(file), "--dsn", dsn)
    assert await running.wait() == 0, running.errors
    assert {"send by 1000", "cron_ticks", "bare SQL"} <= set(texts(ElementTree.fromstring(file.read_text())))  # noqa: S314


@pytest.mark.parametrize(
    ("name", "says"), [("figures.png", "must end in .svg"), ("nowhere/figures.svg", "there is no folder")]
)
async def test_what_can_not_be_drawn_is_an_error_before_anything_is_measured(
    processes: Processes, tmp_path: Path, name: str, says: str
) -> None:
    running = await processes.cron_ticks("bench", "queue", "--plot", str(tmp_path / name))
    assert await running.wait() == 2
    assert any("error: --plot:" in line and says in line for line in running.errors)
