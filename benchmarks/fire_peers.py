"""Firing beside other schedulers: `python benchmarks/fire_peers.py [--burst 1000] [--rounds 5] [--json]`.

So many schedules fall due at the same instant, and each scheduler does with them what it does: cron_ticks makes a
message of each, APScheduler, PgQueuer and Procrastinate a job, and pg_cron runs a statement that writes a row. All run
on one server, in turn, round after round, beside the bare statement of cron_ticks: see `cron_ticks.cli.bench.fire`.

The peers are installed from PyPI into a virtual environment of their own under `.cache/`, with the versions of
`peers/firing_requirements.txt`; why each setting was chosen stands in `peers/`. pg_cron is Debian's package, so the
server is Debian's PostgreSQL 15.
"""

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import asyncpg
import typer
from cron_server import PACKAGES, debian_server, has_pg_cron, install
from environments import HERE, install_peers
from peer_schedulers import PEERS, PG_CRON, PeerCourse, PgCronCourse
from rich.table import Table

from cron_ticks.cli.bench.fire import FireFigures, Load, Turn, burst_measure, run_fire_rounds
from cron_ticks.cli.bench.machine import fresh_database
from cron_ticks.cli.bench.plot import Plot
from cron_ticks.cli.bench.progress import Steps, shown_steps
from cron_ticks.cli.bench.showing import BenchDsn, PlotFile, Rounds, check_plot_file, show_results
from cron_ticks.cli.common import Json, load_settings, reported_errors, run
from cron_ticks.errors import CronTicksError

SIZES = (1000, 10_000)

Bursts = Annotated[
    list[int] | None,
    typer.Option(
        "--burst",
        help="Schedules that fall due at the same instant; may be repeated. Default: 1000 and 10000.",
        min=10,
        max=100_000,
        show_default=False,
    ),
]


@dataclass(frozen=True)
class PeerFigures:
    """The figures, and who is not among them at all; who was not ready for a size stands in the figures themselves."""

    figures: FireFigures
    absent: dict[str, str]

    @property
    def left_out(self) -> dict[str, str]:
        """Who, or who for what, and why."""
        return self.absent | dict(self.figures.left_out)

    def as_json(self) -> dict[str, Any]:
        """Each value, with the median and the range."""
        return self.figures.as_json() | {"left_out": self.left_out}

    def table(self) -> Table:
        """For people."""
        table = self.figures.table()
        versions = ", ".join(f"{name} {version}" for name, version in self.figures.drains.versions.items())
        said = [f"{name} is left out: {why.splitlines()[0]}" for name, why in self.left_out.items()]
        table.caption = ". ".join([str(table.caption), versions, *said])
        return table

    def plot(self) -> Plot | None:
        """All of them."""
        plot = self.figures.plot()
        return None if plot is None else replace(plot, title="Schedules that fall due at the same instant")


@asynccontextmanager
async def open_course(dsn: str, python: Path, number: int) -> AsyncIterator[PeerCourse]:
    """A peer in a database of its own."""
    peer = PEERS[number]
    async with fresh_database(dsn, peer.name) as own:
        connection = await asyncpg.connect(own)
        try:
            yield PeerCourse(peer, own, connection, (str(python), str(HERE / "peers" / str(peer.script))))
        finally:
            await connection.close()


@asynccontextmanager
async def open_pg_cron(dsn: str) -> AsyncIterator[PeerCourse]:
    """It lives in one database of the server."""
    connection = await asyncpg.connect(dsn)
    try:
        yield PgCronCourse(PG_CRON, dsn, connection)
    finally:
        await connection.close()


async def measure(dsn: str, *, python: Path, sizes: list[int], rounds: int, progress: Steps, cron: bool) -> PeerFigures:
    """All contenders on one server."""
    absent: dict[str, str] = {}
    async with AsyncExitStack() as stack:
        courses = [await stack.enter_async_context(open_course(dsn, python, number)) for number in range(len(PEERS))]
        courses += [await stack.enter_async_context(open_pg_cron(dsn))] if cron else []
        versions = await set_up(courses, absent)
        courses = [course for course in courses if course.peer.name in versions]
        measures = [
            burst_measure(
                size,
                [Turn(course.peer.name, partial(course.burst, size), course.peer.processes) for course in courses],
            )
            for size in sizes
        ]
        load = Load(0, 0, 0, sizes)
        figures = await run_fire_rounds(dsn, measures=measures, load=load, rounds=rounds, progress=progress)
    drains = replace(figures.drains, versions=figures.drains.versions | versions)
    return PeerFigures(replace(figures, drains=drains), absent)


async def set_up(courses: Sequence[PeerCourse], absent: dict[str, str]) -> dict[str, str]:
    """The versions of the peers that have their tables; the others are noted as absent."""
    versions = {}
    for course in courses:
        try:
            versions[course.peer.name] = await course.setup()
        except (CronTicksError, asyncpg.PostgresError) as error:
            absent[course.peer.name] = f"its tables can't be made: {error}"
    return versions


async def on_server(dsn: str | None, **arguments: Any) -> PeerFigures:
    """On the given server, without pg_cron, or on one for this run alone."""
    if dsn is not None:
        return await measure(dsn, cron=False, **arguments)
    async with debian_server() as own:
        return await measure(own, cron=has_pg_cron(), **arguments)


def main(
    burst: Bursts = None,
    rounds: Rounds = 5,
    dsn: BenchDsn = None,
    plot: PlotFile = None,
    *,
    as_json: Json = False,
) -> None:
    """Measure, and print a table or JSON."""
    with reported_errors(), shown_steps() as steps:
        load_settings(dsn)  # sets the logs up
        check_plot_file(plot)
        steps.say("installing the peers")
        python = install_peers("fire_peers", "firing_requirements.txt")
        install()
        sizes = list(dict.fromkeys(burst or SIZES))
        found = run(partial(on_server, dsn, python=python, sizes=sizes, rounds=rounds, progress=steps))
    figures = replace(found, absent=without_pg_cron(dsn) | found.absent)
    show_results(figures, as_json=as_json, plot=plot)


def without_pg_cron(dsn: str | None) -> dict[str, str]:
    """Why it is left out, if it is."""
    if dsn is not None:
        return {PG_CRON.name: "it needs a server with its library loaded, which there is without --dsn"}
    return {} if has_pg_cron() else {PG_CRON.name: f"Debian's package {PACKAGES[-1]} is not installed"}


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    typer.run(main)
