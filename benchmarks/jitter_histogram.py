"""How evenly jitter spreads schedules of one interval: `python benchmarks/jitter_histogram.py [--json]`.

On an embedded server of its own, gone afterwards: declares schedules that all have the same next occurrence, lets a
ScheduleManager make their ticks, and counts by how much each was moved.
"""

import json
import math
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import anyio
import typer

from cron_ticks.cli.common import Json, load_settings, reported_errors, run
from cron_ticks.database import Database, open_database
from cron_ticks.embedded import embedded_server, use_embedded
from cron_ticks.errors import CronTicksError
from cron_ticks.migrator import migrate
from cron_ticks.repository import CronRepository
from cron_ticks.schedule_manager import ScheduleManager
from cron_ticks.schedules import define_schedule
from cron_ticks.settings import Settings

INTERVAL = timedelta(hours=1)
AHEAD = timedelta(minutes=30)  # until the common occurrence, of which the manager makes the ticks
NARROW = timedelta(minutes=1)  # window of the declarations, so that they leave this to the manager
DECLARING = 8  # at once
WIDEST_BAR = 50
QUANTILE = 3.09  # of the normal distribution: one value in a thousand lies above it

OFFSETS = "SELECT execute_at - scheduled_for AS moved FROM {schema}.cron_ticks"
CLOCK = "SELECT statement_timestamp()"

Schedules = Annotated[int, typer.Option(help="Schedules of one interval.", min=1)]
Bins = Annotated[int, typer.Option(help="Parts of equal width into which the offsets are counted.", min=2)]


@dataclass(frozen=True)
class Histogram:
    """How many ticks were moved by how much."""

    amplitude: timedelta
    counts: list[int]

    @property
    def schedules(self) -> int:
        """How many there are, with a tick each."""
        return sum(self.counts)

    @property
    def expected(self) -> float:
        """Ticks per bin, were they spread with a ruler."""
        return self.schedules / len(self.counts)

    @property
    def chi_square(self) -> float:
        """How far the counts are from that."""
        return sum((count - self.expected) ** 2 / self.expected for count in self.counts)

    @property
    def bound(self) -> float:
        """What chi-square stays below in 999 of 1000 runs, if the spread is even (Wilson and Hilferty's formula)."""
        part = 2 / (9 * (len(self.counts) - 1))
        return float((len(self.counts) - 1) * (1 - part + QUANTILE * math.sqrt(part)) ** 3)

    def edge(self, number: int) -> float:
        """Where a bin begins, in seconds."""
        return self.amplitude.total_seconds() * (2 * number / len(self.counts) - 1)

    def as_json(self) -> dict[str, Any]:
        """Each count."""
        return {
            "schedules": self.schedules,
            "interval_seconds": INTERVAL.total_seconds(),
            "amplitude_seconds": self.amplitude.total_seconds(),
            "expected_per_bin": self.expected,
            "chi_square": round(self.chi_square, 2),
            "chi_square_bound": round(self.bound, 2),
            "bins": [
                {
                    "from_seconds": round(self.edge(number), 3),
                    "to_seconds": round(self.edge(number + 1), 3),
                    "ticks": count,
                }
                for number, count in enumerate(self.counts)
            ],
        }

    def text(self) -> str:
        """For people: a line per bin."""
        seconds = self.amplitude.total_seconds()
        lines = [f"{self.schedules} schedules of one interval; each tick moved by up to {seconds:g} s either way", ""]
        for number, count in enumerate(self.counts):
            bar = "#" * round(WIDEST_BAR * count / max(self.counts))
            lines.append(f"{self.edge(number):+8.2f} s to {self.edge(number + 1):+8.2f} s {count:7}  {bar}")
        lines += ["", f"expected per bin: {self.expected:g}"]
        lines += [f"chi-square: {self.chi_square:.1f}; an even spread stays below {self.bound:.1f} in 999 of 1000 runs"]
        return "\n".join(lines)


async def spread(settings: Settings, schedules: int, bins: int) -> Histogram:
    """On a server for this run alone."""
    with tempfile.TemporaryDirectory(prefix="cron_ticks_jitter_") as folder:
        own = settings.model_copy(update={"embedded_data_dir": Path(folder) / "server", "embedded_durable": False})
        async with (
            use_embedded(embedded_server(own)) as server,
            open_database(settings, dsn=server.dsn) as database,
        ):
            await migrate(database)
            return await measure(database, settings, schedules, bins)


async def measure(database: Database, settings: Settings, schedules: int, bins: int) -> Histogram:
    """Declare schedules, make their ticks, and count how far these were moved."""
    now = await database.fetchval(CLOCK)
    narrow = settings.model_copy(update={"lookahead_seconds": NARROW.total_seconds()})
    amplitude = await declare(CronRepository(database, narrow), now + AHEAD - INTERVAL, schedules)
    wide = settings.model_copy(update={"lookahead_seconds": INTERVAL.total_seconds()})
    await ScheduleManager(database, CronRepository(database, wide), wide).run_once()
    offsets = [row["moved"] for row in await database.fetch(OFFSETS)]
    if len(offsets) != schedules:
        raise CronTicksError(f"{schedules} schedules have {len(offsets)} ticks: each should have one")
    found = Counter((offset + amplitude) * bins // (2 * amplitude) for offset in offsets)
    return Histogram(amplitude, [found[number] for number in range(bins)])


async def declare(repository: CronRepository, starts_at: datetime, schedules: int) -> timedelta:
    """Schedules of one phase; how far their ticks may move. They began in the past: a first occurrence doesn't move."""
    rule = define_schedule("queue", every=INTERVAL, starts_at=starts_at)
    waiting = iter([replace(rule, name=f"n{number}") for number in range(schedules)])

    async def some() -> None:
        for definition in waiting:
            await repository.save_schedule(definition)

    async with anyio.create_task_group() as tasks:
        for _ in range(DECLARING):
            tasks.start_soon(some)
    return rule.jitter


def main(schedules: Schedules = 10_000, bins: Bins = 20, *, as_json: Json = False) -> None:
    """Print how evenly jitter spreads schedules of one interval."""
    with reported_errors():
        histogram = run(spread, load_settings(), schedules, bins)
    typer.echo(json.dumps(histogram.as_json()) if as_json else histogram.text())


if __name__ == "__main__":
    typer.run(main)
