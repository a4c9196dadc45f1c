"""`bench fire`: how fast due ticks become messages, beside the bare statement, and how late they are under a load.

Drain: processes stand and wait; then ticks are made that are due already, and when all is committed, vacuumed and on
disk, a NOTIFY tells them. The time is the database's, from the NOTIFY to the beginning of the last batch, and what was
enqueued by then counts. So waking up is part of it, for both alike.

Steady: a worker makes and fires the ticks of many schedules for a while.
"""

import json
import math
import statistics
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream
from rich import box
from rich.table import Table

import cron_ticks
from cron_ticks.cli.bench.fire_tables import Tables, open_tables
from cron_ticks.cli.bench.machine import (
    LONGEST_LINE,
    describe_machine,
    described,
    environment_with,
    fresh_database,
    started,
)
from cron_ticks.cli.bench.plot import Plot
from cron_ticks.cli.bench.progress import Steps
from cron_ticks.cli.bench.rounds import EVENTS, Figures
from cron_ticks.database import open_database
from cron_ticks.errors import CronTicksError
from cron_ticks.migrator import migrate
from cron_ticks.settings import PREFIX, Settings

OURS, BARE = "cron_ticks", "bare SQL"
NO_LEVELS: Mapping[str, str] = {}
PROCESSES = "cron_ticks.cli.bench.fire_processes"
BATCH = Settings.model_fields["ticker_batch_size"].default
LONGEST_SECONDS = 120.0  # that anything may take
LAST_LINES = 20

STEADY_EVERY = timedelta(seconds=5)
LEAD_SECONDS = 5.0  # for the manager's first pass, which makes the ticks of a whole window
WARM_UP_SECONDS = 1.0
LOOK_SECONDS = 0.1
STEADY_FIGURES = ("p50_ms", "p99_ms", "max_ms")


@dataclass(frozen=True)
class Load:
    """How much to measure."""

    ticks: int
    per_second: int
    seconds: float


@dataclass(frozen=True)
class Firer:
    """A process that fires ticks, and what it says."""

    process: Process
    lines: BufferedByteReceiveStream
    last: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))

    async def event(self) -> dict[str, Any]:
        """The next thing it says."""
        while True:
            try:
                line = (await self.lines.receive_until(b"\n", LONGEST_LINE)).decode(errors="replace")
            except (anyio.IncompleteRead, anyio.EndOfStream):
                raise CronTicksError("a process ended too early; its last words:\n" + "\n".join(self.last)) from None
            self.last.append(line)
            if line.startswith("{"):
                return dict(json.loads(line))

    async def wait_for(self, name: str) -> None:
        """Wait until it says this."""
        with _patience(name):
            while (await self.event())["event"] != name:
                pass

    async def read(self, note: Callable[[dict[str, Any]], None]) -> None:
        """Note whatever it says, for ever."""
        while True:
            note(await self.event())


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
            await self.tables.make_due_ticks(ticks)
            start = await self.tables.announce_ticks(ticks)
            await _fired(firers, ticks)
        return await self.tables.drain_rate(ticks, start)

    async def steady(self, load: Load) -> dict[str, Any]:
        """Lateness under a load that goes on, in milliseconds."""
        tables = self.tables
        await tables.clear()
        begin = await tables.now() + timedelta(seconds=LEAD_SECONDS)
        count = round(load.per_second * STEADY_EVERY.total_seconds())
        await tables.make_schedules(count, every=STEADY_EVERY, start=begin, spread=STEADY_EVERY)
        async with self._firers(1) as (worker,):
            await worker.wait_for("ticks_generated")
            async with _reading([worker], lambda _: None):  # or the pipe would fill up
                start = max(begin, await tables.now()) + timedelta(seconds=WARM_UP_SECONDS)
                until = start + timedelta(seconds=load.seconds)
                await anyio.sleep((until - await tables.now()).total_seconds())
                with _patience("the last tick"):
                    while await tables.any_due(until):  # noqa: ASYNC110 - nobody tells us when it is fired
                        await anyio.sleep(LOOK_SECONDS)
        await tables.check_complete(until)
        return await tables.lateness(start, until)

    @asynccontextmanager
    async def _firers(self, processes: int, ticks: int = 0) -> AsyncIterator[list[Firer]]:
        """Processes that stand and hear NOTIFY; they are asked to end by the end of their input."""
        bare = [PROCESSES, self.dsn, str(BATCH), str(math.ceil(ticks / BATCH / processes))]
        worker = ["cron_ticks.cli", "worker", "--app", f"{PROCESSES}:worker", "--while-stdin"]
        command = [sys.executable, "-m", *(bare if self.name == BARE else worker)]
        level = {} if self.level is None else {EVENTS: self.level}
        environment = environment_with({f"{PREFIX}DSN": self.dsn} | level)
        async with AsyncExitStack() as stack:
            firers = []
            for _ in range(processes):
                running = await stack.enter_async_context(started(command, environment, stderr=subprocess.PIPE))
                firers.append(Firer(running, BufferedByteReceiveStream(_piped(running.stderr))))
            for firer in firers:
                await firer.wait_for("notify_heard")
            yield firers
            for firer in firers:
                await _piped(firer.process.stdin).aclose()


async def _fired(firers: Sequence[Firer], ticks: int) -> None:
    """Wait until they have said that so many are fired."""
    left = ticks
    done = anyio.Event()

    def note(event: dict[str, Any]) -> None:
        nonlocal left
        if event["event"] == "ticks_fired":
            left -= event["ticks"]
            if left <= 0:
                done.set()

    async with _reading(firers, note):
        with _patience(f"firing {ticks} ticks"):
            await done.wait()


@asynccontextmanager
async def _reading(firers: Sequence[Firer], note: Callable[[dict[str, Any]], None]) -> AsyncIterator[None]:
    """Read what they say meanwhile."""
    try:
        async with anyio.create_task_group() as tasks:
            for firer in firers:
                tasks.start_soon(firer.read, note)
            yield
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


@contextmanager
def _patience(what: str) -> Iterator[None]:
    try:
        with anyio.fail_after(LONGEST_SECONDS):
            yield
    except TimeoutError:
        raise CronTicksError(f"{what}: not within {LONGEST_SECONDS:.0f} s") from None


@dataclass(frozen=True)
class FireMeasure:
    """What is measured once per round; of our own product alone, or of all contenders."""

    name: str
    run: Callable[[Course, Load], Awaitable[Any]]
    compared: bool = True


MEASURES = (
    FireMeasure("drain, 1 process", lambda course, load: course.drain(load.ticks, 1)),
    FireMeasure("drain, 2 processes", lambda course, load: course.drain(load.ticks, 2)),
    FireMeasure("steady", lambda course, load: course.steady(load), compared=False),
)


@dataclass(frozen=True)
class FireFigures:
    """Ticks a second of each drain, and the lateness of each steady load; a value per round."""

    drains: Figures
    steady: list[dict[str, Any]]
    load: Load
    rounds: int

    def as_json(self) -> dict[str, Any]:
        """Each value, with the median and the range."""
        found = self.drains.as_json()
        shown = {name: found[name] for name in ("machine", "versions", "measures")} | {"ticks": self.load.ticks}
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
        return shown

    def table(self) -> Table:
        """For people."""
        caption = (
            f"drain: ticks a second from due to enqueued; steady: lateness. Median of {self.rounds} rounds "
            "(lowest to highest); ratio: ours to theirs, per round"
        )
        table = self.drains.fill(Table(title="cron-ticks bench fire", caption=caption, box=box.SIMPLE_HEAD))
        for name, values in self._lateness().items():
            label = f"steady, {self.load.per_second:,} a second, {name.removesuffix('_ms')}"
            table.add_row(label, f"{statistics.median(values):,.1f} ms ({min(values):,.1f} to {max(values):,.1f})")
        return table

    def plot(self) -> Plot | None:
        """The drains."""
        if not self.drains.rates:
            return None
        caption = f"Median and range of {self.rounds} rounds. {described(self.drains.machine)}."
        return Plot("cron-ticks bench fire", "ticks a second", self.drains.bars(), caption=caption)

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
    results: dict[str, dict[str, list[Any]]] = {
        measure.name: {name: [] for name in (names if measure.compared else names[:1])} for measure in measures
    }
    async with AsyncExitStack() as stack:
        courses = [await stack.enter_async_context(_course(dsn, name, levels.get(name))) for name in names]
        progress.expect(rounds * sum(len(results[measure.name]) for measure in measures))
        for number in range(rounds):
            for measure in measures:
                for course in courses[number % len(courses) :] + courses[: number % len(courses)]:
                    if course.name in results[measure.name]:
                        progress(f"round {number + 1} of {rounds}: {measure.name}: {course.name}")
                        results[measure.name][course.name].append(await measure.run(course, load))
        machine = await describe_machine(dsn)
    drains = {measure.name: results[measure.name] for measure in measures if measure.compared}
    figures = Figures(drains, dict.fromkeys(names, cron_ticks.__version__), machine, load.ticks)
    return FireFigures(figures, results.get("steady", {}).get(OURS, []), load, rounds)


@asynccontextmanager
async def _course(dsn: str, name: str, level: str | None) -> AsyncIterator[Course]:
    async with fresh_database(dsn, name) as own:
        async with open_database(Settings.load(dsn=own), dsn=own) as database:
            await migrate(database)
        async with open_tables(own) as tables:
            yield Course(name, own, tables, level)


def _piped(stream: Any) -> Any:
    if stream is None:
        raise RuntimeError("a process without a pipe")
    return stream
