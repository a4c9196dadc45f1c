"""`bench idle`: what a worker costs that has nothing to do, among few and among very many schedules.

A real worker with one handler that hears NOTIFY, at rest: its statements are counted where they are sent, processor
time and memory by the kernel.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import anyio
from rich import box
from rich.table import Table

from cron_ticks.cli.bench.figures import of_rounds, spread, summary
from cron_ticks.cli.bench.load_apps import COUNTED
from cron_ticks.cli.bench.load_tables import LoadTables, Made
from cron_ticks.cli.bench.loads import (
    LEAST_WIDTH,
    Course,
    Progress,
    after,
    in_turn,
    open_course,
    sleep_until,
)
from cron_ticks.cli.bench.machine import describe_machine, described
from cron_ticks.cli.bench.plot import Plot, bar_of
from cron_ticks.cli.bench.pods import Pod, pods
from cron_ticks.cli.bench.progress import Steps, within
from cron_ticks.cli.bench.usage import MEGABYTE
from cron_ticks.errors import CronTicksError

DAY = timedelta(days=1)
FAR = timedelta(hours=12)  # to the first occurrence
REST_SECONDS = 12.0  # before a worker that found nothing looks as seldom as it may
AUDIT_SECONDS = 1800.0  # that the first audit may take
LOOK_SECONDS = 1.0
GOAL_PER_SECOND = 0.3
SHOWN = (
    ("statements_per_second", "statements a second", ".2f"),
    ("worker_cpu_per_minute", "CPU of the worker, s a minute", ".3f"),
    ("server_cpu_per_minute", "CPU of the server, s a minute", ".3f"),
    ("worker_mb", "memory of the worker, MB", ",.1f"),
)

# A worker audits the last hour when it starts, if nobody has for long: this reads all schedules. No other audit comes
# due while it is watched: what one costs is for `bench audit` to say.
AUDIT_INTERVAL = timedelta(days=7)
SETTINGS = {"audit_interval_seconds": f"{AUDIT_INTERVAL.total_seconds():.0f}"}
AUDITS = "SELECT count(ended_at) AS ended, count(*) AS begun FROM cron_audits"
UNDER_WAY = "SELECT EXISTS (SELECT FROM cron_ticks) OR EXISTS (SELECT FROM cron_runs)"


@dataclass(frozen=True)
class Gauge:
    """What has been used so far."""

    at: float
    statements: Counter[str]
    worker_cpu: float | None
    server_cpu: float | None
    worker_mb: float | None

    @classmethod
    async def read(cls, tables: LoadTables, pod: Pod) -> "Gauge":
        """Look at it."""
        usage = pod.usage()
        cpu, memory = (None, None) if usage is None else (usage.cpu_seconds, usage.memory_bytes / MEGABYTE)
        return cls(anyio.current_time(), pod.statements.copy(), cpu, await tables.server_cpu_seconds(), memory)


async def measure(course: Course, seconds: float, rest: float, say: Progress) -> dict[str, Any]:
    """A worker at rest for a while."""
    tables = course.tables
    async with pods([COUNTED], course.dsn, SETTINGS) as (pod,):
        say("the first audit")
        await _audited(tables)
        await sleep_until(tables, after(await tables.now(), rest), say, "coming to rest")
        first = await Gauge.read(tables, pod)
        await sleep_until(tables, after(await tables.now(), seconds), say, "measuring")
        last = await Gauge.read(tables, pod)
    if await tables.connection.fetchval(UNDER_WAY):
        raise CronTicksError("something became due: this was no idle worker")
    await check_audits(tables)
    return _found(first, last)


async def _audited(tables: LoadTables) -> None:
    with anyio.move_on_after(AUDIT_SECONDS):
        while not (await _audits(tables))[0]:  # noqa: ASYNC110 - nobody tells us when it has ended
            await anyio.sleep(LOOK_SECONDS)
        return
    raise CronTicksError(f"the worker's first audit did not end within {AUDIT_SECONDS:.0f} s")


async def check_audits(tables: LoadTables) -> None:
    """An error unless the first audit was the only one, and has ended."""
    ended, begun = await _audits(tables)
    if (ended, begun) != (1, 1):
        raise CronTicksError(f"{begun} audits were begun, {ended} have ended: this was no idle worker")


async def _audits(tables: LoadTables) -> tuple[int, int]:
    """Audits that have ended, and that were begun."""
    (row,) = await tables.connection.fetch(AUDITS)
    return row["ended"], row["begun"]


def _found(first: Gauge, last: Gauge) -> dict[str, Any]:
    seconds = last.at - first.at
    sent = last.statements - first.statements
    found: dict[str, Any] = {
        "seconds": round(seconds, 3),
        "statements_per_second": sent.total() / seconds,
        "statements": dict(sent.most_common()),
    }
    if first.worker_cpu is not None and last.worker_cpu is not None and last.worker_mb is not None:
        found["worker_cpu_per_minute"] = (last.worker_cpu - first.worker_cpu) / seconds * 60
        found["worker_mb"] = last.worker_mb
    if first.server_cpu is not None and last.server_cpu is not None:
        found["server_cpu_per_minute"] = (last.server_cpu - first.server_cpu) / seconds * 60
    return found


@dataclass(frozen=True)
class IdleFigures:
    """What was used, by the number of schedules, a value per round."""

    found: dict[int, list[dict[str, Any]]]
    seconds: float
    server: dict[str, str]
    machine: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """Each value, with the median and the range, and the ratio to the fewest schedules, round by round."""
        return {
            "machine": self.machine,
            "server": self.server,
            "seconds": self.seconds,
            "settings": SETTINGS,
            "goal_per_second": GOAL_PER_SECOND,
            "sizes": {
                str(size): {
                    "rounds": rounds,
                    **{name: summary(self._values(size, name)) for name in self._names()},
                    "ratio": {name: summary(ratios) for name in self._names() if (ratios := self._ratios(size, name))},
                }
                for size, rounds in self.found.items()
            },
        }

    def table(self) -> Table:
        """For people."""
        rounds = len(next(iter(self.found.values())))
        fewest, most = min(self.found), max(self.found)
        caption = (
            f"one worker at rest for {self.seconds:.0f} s, nothing due, without audits (see bench audit); statements "
            f"counted where they are sent; {of_rounds(rounds)}; ratio: {most:,} to {fewest:,}; goal: about "
            f"{GOAL_PER_SECOND} statements a second, and the same CPU; {described(self.machine)}"
        )
        table = Table(title="cron-ticks bench idle", caption=caption, box=box.SIMPLE_HEAD, min_width=LEAST_WIDTH)
        table.add_column("schedules")
        for heading in (*(f"{size:,}" for size in self.found), "ratio"):
            table.add_column(heading, justify="right")
        for name, label, form in SHOWN:
            if name in self._names():
                cells = [spread(self._values(size, name), form) for size in self.found]
                ratios = self._ratios(most, name)
                table.add_row(label, *cells, spread(ratios) if ratios else "")
        return table

    def plot(self) -> Plot:
        """Statements by the number of schedules; the other figures have other units."""
        name, unit, _ = SHOWN[0]
        groups = {f"{size:,} schedules": {"cron_ticks": bar_of(self._values(size, name))} for size in self.found}
        return Plot("A worker with nothing to do", unit, groups, caption=described(self.machine))

    def _names(self) -> list[str]:
        rounds = [found for by_size in self.found.values() for found in by_size]
        return [name for name, *_ in SHOWN if all(name in found for found in rounds)]

    def _values(self, size: int, name: str) -> list[float]:
        return [found[name] for found in self.found[size]]

    def _ratios(self, size: int, name: str) -> list[float]:
        """Where there is something to divide by: the kernel counts in hundredths of a second."""
        pairs = zip(self._values(size, name), self._values(min(self.found), name), strict=True)
        return [value / least for value, least in pairs if least > 0]


async def run_idle(
    dsn: str,
    *,
    sizes: Sequence[int],
    seconds: float,
    rounds: int,
    server: dict[str, str],
    progress: Steps,
    rest: float = REST_SECONDS,
) -> IdleFigures:
    """Each size once per round, in another order each time; one worker at a time."""
    found: dict[int, list[dict[str, Any]]] = {size: [] for size in sizes}
    progress.expect(len(sizes) * (1 + rounds))
    async with AsyncExitStack() as stack:
        courses: list[tuple[int, Course]] = []
        for size in sizes:
            progress(f"making {size:,} schedules")
            course = await stack.enter_async_context(open_course(dsn, f"idle{size}"))
            await course.tables.make_schedules(Made(size, [DAY], await course.tables.now() + FAR))
            courses.append((size, course))
        for number in range(rounds):
            for size, course in in_turn(courses, number):
                label = f"round {number + 1} of {rounds}: {size:,} schedules"
                found[size].append(await measure(course, seconds, rest, within(progress, label)))
    return IdleFigures(found, seconds, server, await describe_machine(dsn))
