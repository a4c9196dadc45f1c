"""`bench calendar`: what cron expressions cost the manager, beside intervals, in turn.

All schedules have one occurrence in the next 60 seconds, and one an hour: as many of each kind, at the same times.
Plan: the arithmetic alone, from rows to plans, batch by batch, beginning with empty caches. Pass: a manager's whole
pass, which also reads the schedules and writes their ticks.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from time import perf_counter, process_time
from typing import Any, Literal, cast

import asyncpg
from rich import box
from rich.table import Table

from cron_ticks import cron_expressions, cron_rules, zones
from cron_ticks.cli.bench.figures import of_rounds, spread, summary
from cron_ticks.cli.bench.loads import in_turn
from cron_ticks.cli.bench.machine import describe_machine, described, fresh_database, settings_with
from cron_ticks.cli.bench.plot import Plot, bar_of
from cron_ticks.cli.bench.progress import Steps
from cron_ticks.database import Database, open_database
from cron_ticks.errors import CronTicksError
from cron_ticks.migrator import migrate
from cron_ticks.occurrences import plan
from cron_ticks.repository import CronRepository
from cron_ticks.rows import needing_ticks
from cron_ticks.schedule_manager import ScheduleManager
from cron_ticks.settings import Settings

Kind = Literal["interval", "cron"]
KINDS: tuple[Kind, ...] = ("interval", "cron")
EXPRESSIONS = 300
HOUR = timedelta(hours=1)
WINDOW_SECONDS = 60
ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Asia/Tokyo", "America/Sao_Paulo")
ALWAYS = ("* * * *", "*/1 * * *", "* 1-31 * *", "* * 1-12 *", "*/1 1-31 * *")  # from the hour on: each another text
BATCH = Settings.model_fields["manager_batch_size"].default
BATCH_TIME = timedelta(milliseconds=20)  # about what a transaction of the manager takes

CLEAR = "TRUNCATE cron_schedules, cron_schedule_cursors, cron_schedule_versions, cron_ticks"
MAKE_SCHEDULES = """
WITH made AS (
    INSERT INTO cron_schedules (id, workspace_id, name, queue_name, payload, interval_us, anchor_at, cron, zone,
        dst_gap, dst_fold, created_at, updated_at)
    SELECT 'cron_' || upper(lpad(to_hex(number), 26, '0')), 'ws_' || number % 100, 'benchmark-' || number, 'benchmark',
        jsonb_build_object('n', number), interval_us, next_at - interval '1 hour', cron, zone,
        CASE WHEN cron IS NOT NULL THEN 'fire' END, CASE WHEN cron IS NOT NULL THEN 'first' END,
        statement_timestamp(), statement_timestamp()
    FROM unnest($1::timestamptz[], $2::bigint[], $3::text[], $4::text[])
        WITH ORDINALITY AS wanted (next_at, interval_us, cron, zone, number)
    RETURNING id, anchor_at
)
INSERT INTO cron_schedule_cursors (schedule_id, next_tick_needed_at, planned)
SELECT id, anchor_at + interval '1 hour', 1 FROM made
"""


def occurrences_of(start: datetime, schedules: int) -> list[datetime]:
    """The next occurrence of each schedule: spread over the window, in whole seconds."""
    return [start + timedelta(seconds=number % WINDOW_SECONDS) for number in range(schedules)]


def rule_columns(kind: Kind, occurrence: datetime, number: int) -> tuple[int | None, str | None, str | None]:
    """Interval, expression and zone of a schedule with that occurrence; there are 300 expressions in all."""
    if kind == "interval":
        return int(HOUR.total_seconds()) * 1_000_000, None, None
    variant = number % EXPRESSIONS // WINDOW_SECONDS
    return None, f"{occurrence.second} {occurrence.minute} {ALWAYS[variant]}", ZONES[variant]


def plan_seconds(kind: Kind, schedules: int) -> float:
    """CPU time of planning them all, batch by batch."""
    start = datetime(2026, 11, 16, 12, 0, 30, tzinfo=UTC)
    columns = ("anchor_at", "interval_us", "cron", "zone", "dst_gap", "dst_fold")
    bounds: dict[str, object] = {"starts_at": None, "ends_at": None, "max_runs": None}
    usual = bounds | {"version": 1, "catch_up": "latest"}
    rows = []
    for number, occurrence in enumerate(occurrences_of(start, schedules)):
        interval, cron, zone = rule_columns(kind, occurrence, number)
        values: tuple[object, ...] = (occurrence - HOUR, interval, cron, zone, cron and "fire", cron and "first")
        cursor = {"schedule_id": "cron", "next_tick_needed_at": occurrence, "planned": 1, "broken": False}
        rows.append((cursor, usual | dict(zip(columns, values, strict=True))))
    forget_everything()
    begin = process_time()
    planned = sum(
        _plan_batch(rows[first : first + BATCH], start - BATCH_TIME + number * BATCH_TIME)
        for number, first in enumerate(range(0, schedules, BATCH))
    )
    seconds = process_time() - begin
    if planned != schedules:
        raise CronTicksError(f"{planned} occurrences of {schedules} schedules")
    return seconds


def _plan_batch(rows: Sequence[tuple[dict[str, Any], dict[str, Any]]], now: datetime) -> int:
    planned = 0
    for cursor, rule in rows:
        needing = needing_ticks(cast("asyncpg.Record", cursor | {"instant": now}), cast("asyncpg.Record", rule))
        made = plan(
            needing.timetable,
            needed_from=needing.needed_from,
            planned=needing.planned,
            now=needing.now,
            lookahead=timedelta(seconds=WINDOW_SECONDS),
            missed_after=timedelta(seconds=60),
        )
        planned += made.planned
    return planned


def forget_everything() -> None:
    """What earlier rounds have computed must not help this one."""
    for module in (cron_rules, cron_expressions, zones):
        for cached in vars(module).values():
            if hasattr(cached, "cache_clear"):
                cached.cache_clear()


@dataclass(frozen=True)
class Course:
    """A database of its own on the common server, with one kind of schedules."""

    kind: Kind
    database: Database
    manager: ScheduleManager

    async def pass_seconds(self, schedules: int) -> float:
        """A manager's pass over all of them."""
        fetch = self.database.fetch
        await fetch(CLEAR)
        now: datetime = await self.database.fetchval("SELECT statement_timestamp()")
        occurrences = occurrences_of(now.replace(microsecond=0), schedules)
        columns = [rule_columns(self.kind, occurrence, number) for number, occurrence in enumerate(occurrences)]
        await fetch(MAKE_SCHEDULES, occurrences, *map(list, zip(*columns, strict=True)))
        await fetch("ANALYZE cron_schedules, cron_schedule_cursors")
        forget_everything()
        begin = perf_counter()
        await self.manager.run_once()
        seconds = perf_counter() - begin
        ticks = await self.database.fetchval("SELECT count(*) FROM cron_ticks")
        if ticks != schedules:
            raise CronTicksError(f"{ticks} ticks of {schedules} schedules")
        return seconds


@dataclass(frozen=True)
class CalendarMeasure:
    """What is measured once per round and kind."""

    name: str
    run: Callable[[Course, int], Awaitable[float]]


async def _plan(course: Course, schedules: int) -> float:
    return plan_seconds(course.kind, schedules)


MEASURES = (
    CalendarMeasure("plan", _plan),
    CalendarMeasure("pass", Course.pass_seconds),
)


@dataclass(frozen=True)
class CalendarFigures:
    """Seconds: by measure, then by kind, a value per round."""

    seconds: dict[str, dict[Kind, list[float]]]
    machine: dict[str, Any]
    schedules: int

    def as_json(self) -> dict[str, Any]:
        """Each value, and the ratio of cron to interval, round by round."""
        return {
            "machine": self.machine,
            "schedules": self.schedules,
            "expressions": EXPRESSIONS,
            "measures": {
                name: {kind: {"seconds": values} for kind, values in by_kind.items()}
                | {"ratio": summary(self._ratios(name), 3)}
                for name, by_kind in self.seconds.items()
            },
        }

    def table(self) -> Table:
        """For people."""
        rounds = len(next(iter(self.seconds.values()))["cron"])
        caption = (
            f"{self.schedules:,} schedules, {EXPRESSIONS} expressions; seconds, {of_rounds(rounds)}; plan: CPU time of "
            "the arithmetic, pass: the manager's whole pass; ratio: cron to interval; " + described(self.machine)
        )
        table = Table(title="cron-ticks bench calendar", caption=caption, box=box.SIMPLE_HEAD)
        for heading in ("", *KINDS, "ratio"):
            table.add_column(heading, justify="left" if not heading else "right")
        for name, by_kind in self.seconds.items():
            table.add_row(name, *(spread(by_kind[kind]) for kind in KINDS), spread(self._ratios(name)))
        return table

    def plot(self) -> Plot:
        """Both kinds, measure by measure."""
        groups = {name: {str(kind): bar_of(by_kind[kind]) for kind in KINDS} for name, by_kind in self.seconds.items()}
        caption = f"{self.schedules:,} schedules, {EXPRESSIONS} expressions. {described(self.machine)}."
        return Plot("cron-ticks bench calendar", "seconds", groups, caption=caption)

    def _ratios(self, name: str) -> list[float]:
        by_kind = self.seconds[name]
        return [cron / interval for cron, interval in zip(by_kind["cron"], by_kind["interval"], strict=True)]


async def run_calendar_rounds(
    dsn: str, *, measures: Sequence[CalendarMeasure], schedules: int, rounds: int, progress: Steps
) -> CalendarFigures:
    """Every measure of both kinds once per round, in another order each time."""
    seconds: dict[str, dict[Kind, list[float]]] = {measure.name: {kind: [] for kind in KINDS} for measure in measures}
    async with AsyncExitStack() as stack:
        courses = [await stack.enter_async_context(_course(dsn, kind)) for kind in KINDS]
        progress.expect(rounds * len(measures) * len(KINDS))
        for number in range(rounds):
            for measure in measures:
                for course in in_turn(courses, number):
                    progress(f"round {number + 1} of {rounds}: {measure.name}: {course.kind}")
                    seconds[measure.name][course.kind].append(await measure.run(course, schedules))
        machine = await describe_machine(dsn)
    return CalendarFigures(seconds, machine, schedules)


@asynccontextmanager
async def _course(dsn: str, kind: Kind) -> AsyncIterator[Course]:
    async with fresh_database(dsn, kind) as own:
        settings = settings_with(own, statement_timeout_seconds=600)
        async with open_database(settings, dsn=own) as database:
            await migrate(database)
            yield Course(kind, database, ScheduleManager(database, CronRepository(database, settings), settings))
