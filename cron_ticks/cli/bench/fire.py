"""`bench fire`: how fast due ticks become messages, beside the bare statement, and how late they are under a load.

Drain: processes stand and wait; then ticks are made that are due already, and a NOTIFY tells them. The time is the
database's, from the NOTIFY to the beginning of the last batch, and what was enqueued by then counts. So waking up is
part of it, for both alike.

Burst: schedules fall due at the same instant, for which the processes wait with their ticks made. The time is from that
instant until the last message is committed and a process has said so.

Steady: a worker makes and fires the ticks of many schedules for a while.
"""

import statistics
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import anyio
from rich import box
from rich.table import Table

import cron_ticks
from cron_ticks.cli.bench.bursts import BARE, OURS, Burst, BurstFigures, NotReadyError, with_processes
from cron_ticks.cli.bench.fire_tables import BURST_EVERY, Tables, open_tables
from cron_ticks.cli.bench.firers import (
    WORKER,
    Firer,
    all_said,
    bare_command,
    counted,
    patience,
    reading,
    standing_firers,
)
from cron_ticks.cli.bench.machine import describe_machine, described, fresh_database
from cron_ticks.cli.bench.plot import Plot
from cron_ticks.cli.bench.progress import Steps
from cron_ticks.cli.bench.rounds import EVENTS, Figures
from cron_ticks.database import open_database
from cron_ticks.errors import CronTicksError
from cron_ticks.migrator import migrate
from cron_ticks.schedules import DEFAULT_JITTER_RATIO
from cron_ticks.settings import Settings

NO_LEVELS: Mapping[str, str] = {}
PROCESS_COUNTS = (1, 2)

STEADY_EVERY = timedelta(seconds=5)
LEAD_SECONDS = 5.0  # for the manager's first pass, which makes the ticks of a whole window
WARM_UP_SECONDS = 1.0
LOOK_SECONDS = 0.1
STEADY_FIGURES = ("p50_ms", "p99_ms", "max_ms")

BURST_SIZES = (1000, 10_000, 100_000)
BURST_LEAD_SECONDS = 6.0  # for the processes to start
MADE_PER_SECOND = 8000  # ticks, on a slow machine; if it is slower still, the burst gets more time
BURST_ATTEMPTS = 3
QUIET = timedelta(seconds=1)  # between the end of all preparations and a burst


@dataclass(frozen=True)
class Load:
    """How much to measure."""

    ticks: int
    per_second: int
    seconds: float
    bursts: Sequence[int] = ()


@dataclass(frozen=True)
class Course:
    """A contender with a database of its own on the common server."""

    name: str
    dsn: str
    tables: Tables
    level: str | None = None  # of events; None: the default

    async def drain(self, ticks: int, processes: int) -> float:
        """Ticks a second."""
        await self.tables.clear()
        async with self._firers(processes, ticks) as firers:
            start = await self.tables.announce_due_ticks(ticks)
            await counted(firers, "ticks_fired", ticks)
        return await self.tables.drain_rate(ticks, start)

    async def burst(self, schedules: int, processes: int) -> Burst:
        """Schedules that fall due together. It begins anew, with more time, if the preparations took too long."""
        lead = BURST_LEAD_SECONDS + schedules / MADE_PER_SECOND
        for attempt in range(BURST_ATTEMPTS):
            burst = await self._burst(schedules, processes, timedelta(seconds=lead * 2**attempt))
            if burst is not None:
                return burst
        raise CronTicksError(f"{schedules} ticks were not made before they were due: give a smaller --burst")

    async def _burst(self, schedules: int, processes: int, lead: timedelta) -> Burst | None:
        """None: it was due before all was ready."""
        tables = self.tables
        await tables.clear()
        due = await tables.now() + lead
        if self.name != BARE:
            await tables.make_schedules(schedules, every=BURST_EVERY, start=due)
        async with self._firers(processes, schedules, until_due=True) as firers:
            if self.name == BARE:
                await tables.make_burst_ticks(schedules, due)
            else:
                await counted(firers, "ticks_generated", schedules)
                await tables.settle_ticks()
            zero = await tables.monotonic_zero()
            if await tables.now() > due - QUIET:
                return None
            end = zero + timedelta(seconds=await self._all_fired(firers, schedules))
        return await tables.burst(schedules, due, end)

    async def _all_fired(self, firers: Sequence[Firer], schedules: int) -> float:
        if self.name == BARE:
            return await all_said(firers, "all_fired")
        return await counted(firers, "ticks_fired", schedules)

    async def steady(self, load: Load) -> dict[str, Any]:
        """Lateness under a load that goes on, in milliseconds."""
        tables = self.tables
        await tables.clear()
        begin = await tables.now() + timedelta(seconds=LEAD_SECONDS)
        count = round(load.per_second * STEADY_EVERY.total_seconds())
        await tables.make_schedules(
            count, every=STEADY_EVERY, start=begin, spread=STEADY_EVERY, jitter=DEFAULT_JITTER_RATIO
        )
        async with self._firers(1) as (worker,):
            await worker.wait_for("ticks_generated")
            async with reading([worker], lambda _: None):  # or the pipe would fill up
                start = max(begin, await tables.now()) + timedelta(seconds=WARM_UP_SECONDS)
                until = start + timedelta(seconds=load.seconds)
                await anyio.sleep((until - await tables.now()).total_seconds())
                with patience("the last tick"):
                    while await tables.any_due(until):  # noqa: ASYNC110 - nobody tells us when it is fired
                        await anyio.sleep(LOOK_SECONDS)
        await tables.check_complete(until)
        return await tables.lateness(start, until)

    def _firers(
        self, processes: int, ticks: int = 0, *, until_due: bool = False
    ) -> AbstractAsyncContextManager[list[Firer]]:
        bare = bare_command(self.dsn, ticks, processes, until_due=until_due)
        level = {} if self.level is None else {EVENTS: self.level}
        return standing_firers(bare if self.name == BARE else WORKER, self.dsn, processes, level)


@dataclass(frozen=True)
class Turn:
    """What a contender does once per round."""

    contender: str
    run: Callable[[], Awaitable[Any]]
    processes: int = 1


@dataclass(frozen=True)
class FireMeasure:
    """What is measured once per round: the turns of the contenders, ours and the bare statement first."""

    name: str
    turns: Callable[[Sequence[Course], Load], list[Turn]]
    burst: int | None = None  # how many fall due together


def drain_measure(processes: int) -> FireMeasure:
    """Of all contenders."""

    def turns(courses: Sequence[Course], load: Load) -> list[Turn]:
        return [Turn(course.name, partial(course.drain, load.ticks, processes)) for course in courses]

    return FireMeasure(with_processes("drain", processes), turns)


def burst_measure(size: int, others: Sequence[Turn] = ()) -> FireMeasure:
    """Of ours and the bare statement with one and two processes, and of others."""

    def turns(courses: Sequence[Course], _: Load) -> list[Turn]:
        own = [
            Turn(with_processes(course.name, count), partial(course.burst, size, count), count)
            for course in courses[:2]
            for count in PROCESS_COUNTS
        ]
        return [*own, *others]

    return FireMeasure(f"burst of {size:,}", turns, size)


def measures_of(load: Load) -> list[FireMeasure]:
    """All there are."""
    steady = FireMeasure("steady", lambda courses, load: [Turn(OURS, partial(courses[0].steady, load))])
    return [*map(drain_measure, PROCESS_COUNTS), *map(burst_measure, dict.fromkeys(load.bursts)), steady]


@dataclass(frozen=True)
class FireFigures:
    """Ticks a second of each drain, the lateness of each steady load, and the bursts; a value per round."""

    drains: Figures
    steady: list[dict[str, Any]]
    load: Load
    rounds: int
    bursts: BurstFigures = field(default_factory=lambda: BurstFigures({}, {}))
    left_out: Mapping[str, str] = field(default_factory=dict)  # who was not ready for what, and why

    def as_json(self) -> dict[str, Any]:
        """Each value, with the median and the range."""
        found = self.drains.as_json()
        shown = {name: found[name] for name in ("machine", "versions")}
        if self.drains.rates:
            shown |= {"measures": found["measures"], "ticks": self.load.ticks}
        if self.bursts.bursts:
            shown["bursts"] = self.bursts.as_json()
        if self.steady:
            shown["steady"] = {
                "per_second": self.load.per_second,
                "seconds": self.load.seconds,
                "rounds": self.steady,
                **{
                    name: {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}
                    for name, values in self._lateness().items()
                },
            }
        if self.left_out:
            shown["left_out"] = dict(self.left_out)
        return shown

    def table(self) -> Table:
        """For people: the drains and the steady load, and the bursts below."""
        tables = [self._rates_table()] if self.drains.rates or self.steady else []
        tables += [self._bursts_table()] if self.bursts.bursts else []
        if len(tables) == 1:
            return tables[0]
        both = Table.grid()
        for table in tables:
            both.add_row(table)
        return both

    def _rates_table(self) -> Table:
        caption = (
            f"drain: ticks a second from due to enqueued; steady: lateness. Median of {self.rounds} rounds "
            f"(lowest to highest); ratio: ours to theirs, per round. {described(self.drains.machine)}"
        )
        table = self.drains.fill(Table(title="cron-ticks bench fire", caption=caption, box=box.SIMPLE_HEAD))
        for name, values in self._lateness().items():
            label = f"steady, {self.load.per_second:,} a second, {name.removesuffix('_ms')}"
            table.add_row(label, f"{statistics.median(values):,.1f} ms ({min(values):,.1f} to {max(values):,.1f})")
        return table

    def _bursts_table(self) -> Table:
        table = self.bursts.table()
        table.caption = (
            f"a second: schedules by the lateness of the last. Median of {self.rounds} rounds, below it the range; "
            f"ratio: ours with as many processes to theirs, per round. {described(self.drains.machine)}"
        )
        return table

    def plot(self) -> Plot | None:
        """The drains and the bursts."""
        groups = self.drains.bars() | self.bursts.bars()
        if not groups:
            return None
        caption = f"Median and range of {self.rounds} rounds. {described(self.drains.machine)}."
        logarithmic = bool(self.bursts.bursts)
        return Plot("cron-ticks bench fire", "ticks a second", groups, logarithmic=logarithmic, caption=caption)

    def _lateness(self) -> dict[str, list[float]]:
        return {name: [values[name] for values in self.steady] for name in STEADY_FIGURES} if self.steady else {}


async def run_fire_rounds(
    dsn: str,
    *,
    measures: Sequence[FireMeasure],
    load: Load,
    rounds: int,
    progress: Steps,
    levels: Mapping[str, str] = NO_LEVELS,
) -> FireFigures:
    """Every measure once per round, the contenders in another order each time; ours also with other `levels`."""
    names = (OURS, BARE, *levels)
    async with AsyncExitStack() as stack:
        courses = [await stack.enter_async_context(_course(dsn, name, levels.get(name))) for name in names]
        turns = {measure.name: measure.turns(courses, load) for measure in measures}
        progress.expect(rounds * sum(map(len, turns.values())))
        results, left_out = await _run_turns(turns, rounds, progress)
        machine = await describe_machine(dsn)
    drains = {name: found for name, found in results.items() if name.startswith("drain")}
    figures = Figures(drains, dict.fromkeys(names, cron_ticks.__version__), machine, load.ticks)
    bursts = {
        measure.burst: {name: found for name, found in results[measure.name].items() if found}
        for measure in measures
        if measure.burst is not None
    }
    processes = {turn.contender: turn.processes for found in turns.values() for turn in found}
    steady = results.get("steady", {}).get(OURS, [])
    return FireFigures(figures, steady, load, rounds, BurstFigures(bursts, processes), left_out)


async def _run_turns(
    turns: Mapping[str, list[Turn]], rounds: int, progress: Steps
) -> tuple[dict[str, dict[str, list[Any]]], dict[str, str]]:
    """What came out by measure and contender, and who was left out from some round on, because it was not ready."""
    results: dict[str, dict[str, list[Any]]] = {
        name: {turn.contender: [] for turn in found} for name, found in turns.items()
    }
    left_out: dict[str, str] = {}
    for number in range(rounds):
        for name, found in turns.items():
            for turn in found[number % len(found) :] + found[: number % len(found)]:
                progress(f"round {number + 1} of {rounds}: {name}: {turn.contender}")
                label = f"{turn.contender}, {name}"
                if label in left_out:
                    continue
                try:
                    results[name][turn.contender].append(await turn.run())
                except NotReadyError as error:
                    left_out[label] = f"not ready in round {number + 1}: {error}"
    return results, left_out


@asynccontextmanager
async def _course(dsn: str, name: str, level: str | None) -> AsyncIterator[Course]:
    async with fresh_database(dsn, name) as own:
        async with open_database(Settings.load(dsn=own), dsn=own) as database:
            await migrate(database)
        async with open_tables(own) as tables:
            yield Course(name, own, tables, level)
