"""`bench generate`: how fast ticks are made, and how long a manager's pass takes among how many schedules.

Rate: all schedules need a tick; one manager makes them, and in turn the bare statements do. Pass: the same number of
schedules is due among ever more that exist. Cost should follow what is due.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from time import perf_counter
from typing import Any

from rich import box
from rich.table import Table

from cron_ticks.cli.bench.calendar import HOUR
from cron_ticks.cli.bench.figures import of_rounds, spread, summary
from cron_ticks.cli.bench.generate_bare import make_bare
from cron_ticks.cli.bench.generate_tables import CLEAR, FAR, count_ticks, make_due, put_off
from cron_ticks.cli.bench.load_tables import LoadTables, Made
from cron_ticks.cli.bench.loads import (
    LEAST_WIDTH,
    SET_UP_PER_SECOND,
    Progress,
    after,
    in_turn,
    open_course,
    sleep_until,
)
from cron_ticks.cli.bench.machine import describe_machine, described, settings_with
from cron_ticks.cli.bench.plot import Plot, bar_of
from cron_ticks.cli.bench.progress import Steps, within
from cron_ticks.database import Database, open_database
from cron_ticks.errors import CronTicksError
from cron_ticks.repository import CronRepository
from cron_ticks.schedule_manager import ScheduleManager
from cron_ticks.settings import Settings

OURS, BARE = "cron_ticks", "bare SQL"
GOAL = 1.5  # times as long as with the fewest schedules, at the most
RATE_SPREAD = timedelta(seconds=40)
WINDOW_SECONDS = 58.0  # inside the lookahead, with some room

Make = Callable[[], Awaitable[float]]


@dataclass(frozen=True)
class GenerateLoad:
    """How much there is to do."""

    sizes: Sequence[int]  # schedules that exist
    due: int  # of them
    ticks: int  # of the rate; 0: it is not measured
    cron_share: float  # of those due, with cron expressions


@dataclass(frozen=True)
class Course:
    """A database with connections as a worker has them."""

    dsn: str
    tables: LoadTables
    database: Database
    settings: Settings

    async def run_manager(self) -> float:
        """One pass, by a manager that knows nothing yet: what is due was changed behind its back. In seconds."""
        manager = ScheduleManager(self.database, CronRepository(self.database, self.settings), self.settings)
        begun = perf_counter()
        await manager.run_once()
        return perf_counter() - begun

    async def run_bare(self) -> float:
        """The statements alone."""
        return await make_bare(self.dsn, self.settings)


@asynccontextmanager
async def _course(dsn: str, label: str) -> AsyncIterator[Course]:
    async with open_course(dsn, label) as course:
        settings = settings_with(course.dsn)
        async with open_database(settings, dsn=course.dsn) as database:
            yield Course(course.dsn, course.tables, database, settings)


async def rate(course: Course, make: Make, ticks: int, say: Progress) -> float:
    """Ticks made a second, when all schedules need one."""
    tables = course.tables
    say("making schedules")
    await tables.connection.execute(CLEAR)
    await course.run_manager()  # whatever a connection does at first, it has done
    start = after(await tables.now(), 2 + ticks / SET_UP_PER_SECOND)
    await tables.make_schedules(Made(ticks, [HOUR], start, spread=RATE_SPREAD))
    inside = after(start + RATE_SPREAD, -WINDOW_SECONDS)
    await sleep_until(tables, inside, say, "until all are in the window")
    say("making ticks")
    seconds = await make()
    await _check(tables, ticks)
    return ticks / seconds


async def pass_seconds(course: Course, load: GenerateLoad, number: int) -> tuple[float, int]:
    """How long a pass takes with so many due, and how many expressions they have."""
    due = await make_due(course.tables, load.due, load.cron_share, number)
    seconds = await course.run_manager()
    await _check(course.tables, load.due)
    await put_off(course.tables, due)
    return seconds, due.expressions


async def _check(tables: LoadTables, expected: int) -> None:
    ticks, schedules = await count_ticks(tables)
    if (ticks, schedules) != (expected, expected):
        raise CronTicksError(f"{ticks} ticks of {schedules} schedules were made, not one of each of {expected}")


@dataclass(frozen=True)
class GenerateFigures:
    """Ticks a second by contender, and seconds of a pass by the number of schedules; a value per round."""

    rates: dict[str, list[float]]
    passes: dict[int, list[float]]
    expressions: int
    load: GenerateLoad
    server: dict[str, str]
    machine: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """Each value, with the median and the range; ratios round by round."""
        return {
            "machine": self.machine,
            "server": self.server,
            "ticks": self.load.ticks,
            "due": self.load.due,
            "cron_share": self.load.cron_share,
            "expressions": self.expressions,
            "goal": GOAL,
            "per_second": {name: summary(values) for name, values in self.rates.items()},
            "share_of_bare": summary(self._of_bare()) if self.rates else None,
            "passes": {
                str(size): {"seconds": summary(values), "ratio": summary(self._ratios(size))}
                for size, values in self.passes.items()
            },
        }

    def table(self) -> Table:
        """For people."""
        rounds = len(next(iter(self.passes.values())))
        caption = (
            f"rate: {self.load.ticks:,} schedules that all need a tick, one manager beside the bare statements; pass: "
            f"a manager's, with {self.load.due:,} schedules due among so many, {self.load.cron_share:.0%} of them with "
            f"{self.expressions} cron expressions; {of_rounds(rounds)}; goal: at most {GOAL} times the first; "
            f"{described(self.machine)}"
        )
        table = Table(title="cron-ticks bench generate", caption=caption, box=box.SIMPLE_HEAD, min_width=LEAST_WIDTH)
        for heading in ("", "", "ratio"):
            table.add_column(heading, justify="right" if table.columns else "left")
        for name, values in self.rates.items():
            ratio = spread(self._of_bare()) if name == OURS else ""
            table.add_row(f"rate, {name}", spread(values, ",.0f", " ticks/s"), ratio)
        for size, values in self.passes.items():
            table.add_row(f"pass among {size:,}", spread(values, ".3f", " s"), spread(self._ratios(size)))
        return table

    def plot(self) -> Plot:
        """A pass by the number of schedules."""
        groups = {f"{size:,} schedules": {OURS: bar_of(values)} for size, values in self.passes.items()}
        title = f"A manager's pass with {self.load.due:,} schedules due"
        return Plot(title, "s", groups, caption=described(self.machine))

    def _of_bare(self) -> list[float]:
        return [ours / bare for ours, bare in zip(self.rates[OURS], self.rates[BARE], strict=True)]

    def _ratios(self, size: int) -> list[float]:
        fewest = self.passes[min(self.passes)]
        return [seconds / least for seconds, least in zip(self.passes[size], fewest, strict=True)]


async def run_generate(
    dsn: str, *, load: GenerateLoad, rounds: int, server: dict[str, str], progress: Steps
) -> GenerateFigures:
    """First the rates, then the passes; in each round all, in another order."""
    rates: dict[str, list[float]] = {}
    progress.expect((2 * rounds if load.ticks else 0) + len(load.sizes) * (1 + rounds))
    if load.ticks:
        async with _course(dsn, "rate") as course:
            makers: list[tuple[str, Make]] = [(OURS, course.run_manager), (BARE, course.run_bare)]
            rates = {name: [] for name, _ in makers}
            for number in range(rounds):
                for name, make in in_turn(makers, number):
                    label = f"round {number + 1} of {rounds}: rate, {name}"
                    rates[name].append(await rate(course, make, load.ticks, within(progress, label)))
    passes, expressions = await _run_passes(dsn, load, rounds, progress)
    return GenerateFigures(rates, passes, expressions, load, server, await describe_machine(dsn))


async def _run_passes(dsn: str, load: GenerateLoad, rounds: int, progress: Steps) -> tuple[dict[int, list[float]], int]:
    seconds: dict[int, list[float]] = {size: [] for size in load.sizes}
    expressions = 0
    async with AsyncExitStack() as stack:
        courses: list[tuple[int, Course]] = []
        for size in load.sizes:
            progress(f"making {size:,} schedules")
            course = await stack.enter_async_context(_course(dsn, f"pass{size}"))
            await course.tables.make_schedules(Made(size, [HOUR], await course.tables.now() + FAR))
            courses.append((size, course))
        for number in range(rounds):
            for size, course in in_turn(courses, number):
                progress(f"round {number + 1} of {rounds}: pass among {size:,}")
                if number == 0:
                    await pass_seconds(course, load, -1)  # connections that have been there for a while
                took, expressions = await pass_seconds(course, load, number)
                seconds[size].append(took)
    return seconds, expressions
