"""What the commands of `cron-ticks bench` share: options, a server for the run, and how figures are shown."""

import json
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from cron_ticks.cli.bench.machine import server_settings
from cron_ticks.cli.bench.plot import Plot, svg
from cron_ticks.cli.common import REPORT_WIDTH, reported_errors
from cron_ticks.embedded import embedded_server, use_embedded
from cron_ticks.errors import InvalidInputError
from cron_ticks.settings import Settings

Rounds = Annotated[int, typer.Option(help="Rounds; the median of them is shown, with the range.", min=1)]
BenchDsn = Annotated[
    str | None,
    typer.Option(
        "--dsn",
        help="Server to measure on, where databases may be made; default: an embedded one for this run alone.",
        show_default=False,
    ),
]
PlotFile = Annotated[
    Path | None,
    typer.Option("--plot", help="Also draw the figures into this file, which ends in .svg.", show_default=False),
]


class Shown(Protocol):
    """Figures."""

    def as_json(self) -> dict[str, Any]: ...  # noqa: D102

    def table(self) -> Table: ...  # noqa: D102

    def plot(self) -> Plot | None: ...  # noqa: D102


def check_plot_file(plot: Path | None) -> None:
    """Before anything is measured: a long run must not end with a wrong name."""
    if plot is not None and plot.suffix != ".svg":
        raise InvalidInputError("--plot", f"{plot.name} must end in .svg")
    if plot is not None and not plot.parent.is_dir():
        raise InvalidInputError("--plot", f"there is no folder {plot.parent}")


def show_results(figures: Shown, *, as_json: bool, plot: Path | None) -> None:
    """Print them, and draw them if that is wanted."""
    if as_json:
        typer.echo(json.dumps(figures.as_json()))
    else:
        output = Console()
        Console(width=output.width if output.is_terminal else REPORT_WIDTH).print(figures.table())
    if plot is not None:
        with reported_errors():
            drawn = figures.plot()
            if drawn is None:
                raise InvalidInputError("--plot", "nothing was measured that can be drawn")
            plot.write_text(svg(drawn), encoding="utf-8")


Figures = TypeVar("Figures", bound=Shown)


async def on_server(
    settings: Settings,
    dsn: str | None,
    measure: Callable[[str], Awaitable[Figures]],
) -> Figures:
    """Measure on the server that was named, or on an embedded one for this run alone, set as for a load."""
    if dsn is not None:
        return await measure(dsn)
    with tempfile.TemporaryDirectory(prefix="cron_ticks_bench_") as folder:
        own = settings.model_copy(update={"embedded_data_dir": Path(folder) / "server"})
        async with use_embedded(embedded_server(own, server_settings())) as running:
            return await measure(running.dsn)
