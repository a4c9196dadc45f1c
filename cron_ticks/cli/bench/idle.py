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

from cron_ticks.cli.bench.load_apps import COUNTED
from cron_ticks.cli.bench.load_tables import LoadTables, Made
from cron_ticks.cli.bench.loads import (
    LEAST_WIDTH,
    MEGABYTE,
    Course,
    Progress,
    after,
    described,
    in_turn,
    open_course,
    sleep_until,
    spread,
    summary,
)
from cron_ticks.cli.bench.machine import describe_machine
from cron_ticks.cli.bench.plot import Plot, bar_of
from cron_ticks.cli.bench.pods import Pod, pods
from cron_ticks.cli.bench.progress import Steps, within
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

# A worker audits the last hour when it starts, if nobody has for long: this reads all schedules, once in a while.
AUDITED = "SELECT EXISTS (SELECT FROM cron_audits WHERE ended_at IS NOT NULL)"
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
    async with pods([COUNTED], course.dsn) as (pod,):
        say("the first audit")
        await _audited(tables)
        await sleep_until(tables, after(await tables.now(), rest), say, "coming to rest")
        first = await Gauge.read(tables, pod)
        await sleep_until(tables, after(await tables.now(), seconds), say, "measuring")
        last = await Gauge.read(tables, pod)
    if await tables.connection.fetchval(UNDER_WAY):
        raise CronTicksError("something became due: this was no idle worker")
    return _found(first, last)


async def _audited(tables: LoadTables) -> None:
    with anyio.move_on_after(AUDIT_SECONDS):
        while not await tables.connection.fetchval(AUDITED):  # noqa: ASYNC110 - nobody tells us when it has ended
            await anyio.sleep(LOOK_SECONDS)
        return
    raise CronTicksError(f"the worker's first audit did not end within {AUDIT_SECONDS:.0f} s")


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
            f"one worker at rest for {self.seconds:.0f} s, nothing due; statements counted where they are sent; median "
            f"of {rounds} rounds (lowest to highest); ratio: {most:,} to {fewest:,}; goal: about {GOAL_PER_SECOND} "
            "statements a second, and the same CPU"
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
        """CPU and statements by the number of schedules."""
        groups = {
            label: {f"{size:,} schedules": bar_of(self._values(size, name)) for size in self.found}
            for name, label, _ in SHOWN[:3]
            if name in self._names()
        }
        return Plot("A worker with nothing to do", "", groups, caption=described(self.machine))

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
