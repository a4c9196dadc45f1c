"""`bench audit`: how long the audit of an hour takes, and what it reads, with many schedules.

The tables are filled as if all schedules had fired for some hours; the audit is the one that the product runs. It must
find nothing. In the end a run and a tick are deleted by hand, and it must name exactly these two.
"""

import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from time import perf_counter
from typing import Any

from rich import box
from rich.table import Table

from cron_ticks.audit_repository import AuditRepository
from cron_ticks.audit_results import Audit
from cron_ticks.cli.bench.audit_tables import EXPRESSIONS, WINDOW, fill, remove_by_hand
from cron_ticks.cli.bench.figures import of_rounds, spread
from cron_ticks.cli.bench.machine import describe_machine, described, fresh_database, settings_with
from cron_ticks.cli.bench.plot import Plot, bar_of
from cron_ticks.cli.bench.progress import Steps
from cron_ticks.database import Database, open_database
from cron_ticks.errors import CronTicksError
from cron_ticks.migrator import migrate
from cron_ticks.settings import Settings
from token_queue.doubled import find_doubled

HOUR = timedelta(hours=1)
BLOCK_BYTES = 8192


@dataclass(frozen=True)
class AuditLoad:
    """What is audited."""

    schedules: int
    hours: int  # of the ledger; one of them is audited


@dataclass(frozen=True)
class Course:
    """A filled database, and the hour to look at: up to the end of the window for which there are ticks."""

    database: Database
    audits: AuditRepository
    since: datetime
    until: datetime

    async def audit(self) -> None:
        """The audit; an error if it finds something."""
        audit = await self.audits.audit(self.since, self.until)
        if not audit.ok:
            raise CronTicksError(f"the audit found {audit.total}: {audit.findings[:3]}")

    async def stats(self) -> None:
        """The statistics."""
        await self.audits.stats(self.since, self.until)


@dataclass(frozen=True)
class AuditMeasure:
    """What is measured once per round."""

    name: str
    run: Callable[[Course], Awaitable[None]]


MEASURES = (AuditMeasure("audit", Course.audit), AuditMeasure("stats", Course.stats))


@dataclass(frozen=True)
class AuditFigures:
    """Seconds by measure, a value per round, and what was looked at."""

    seconds: dict[str, list[float]]
    load: AuditLoad
    looked_at: dict[str, int]
    removed: list[str]
    named: list[str]
    machine: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """Each value, with the median and the range."""
        return {
            "machine": self.machine,
            "schedules": self.load.schedules,
            "expressions": EXPRESSIONS,
            "hours": self.load.hours,
            "measures": {
                name: {
                    "seconds": [round(value, 3) for value in values],
                    "median": round(statistics.median(values), 3),
                    "lowest": round(min(values), 3),
                    "highest": round(max(values), 3),
                }
                for name, values in self.seconds.items()
            },
            **self.looked_at,
            "found": 0,
            "removed_by_hand": self.removed,
            "named": self.named,
        }

    def table(self) -> Table:
        """For people."""
        rounds = len(next(iter(self.seconds.values())))
        caption = (
            f"{self.load.schedules:,} schedules, a ledger of {self.load.hours} h of which one is audited; "
            f"{of_rounds(rounds)}; a buffer is {BLOCK_BYTES} bytes; named: after a run and a tick were deleted by "
            f"hand; {described(self.machine)}"
        )
        table = Table(title="cron-ticks bench audit", caption=caption, box=box.SIMPLE_HEAD)
        table.add_column("")
        table.add_column("", justify="right")
        for name, values in self.seconds.items():
            table.add_row(name, spread(values, ".2f", " s"))
        for name, value in self.looked_at.items():
            table.add_row(name.replace("_", " "), f"{value:,}")
        table.add_row("found", "0")
        for name in self.named:
            table.add_row("named", name)
        return table

    def plot(self) -> Plot:
        """A bar per measure."""
        groups = {name: {"cron_ticks": bar_of(values)} for name, values in self.seconds.items()}
        caption = f"{self.load.schedules:,} schedules, an hour of the ledger. {described(self.machine)}."
        return Plot("cron-ticks bench audit", "seconds", groups, caption=caption)


async def run_audit_rounds(
    dsn: str, *, measures: Sequence[AuditMeasure], load: AuditLoad, rounds: int, progress: Steps
) -> AuditFigures:
    """Every measure once per round, then the proof that what is removed is named."""
    seconds: dict[str, list[float]] = {measure.name: [] for measure in measures}
    progress.expect(rounds * len(measures) + 2)
    async with fresh_database(dsn, "audit") as own:
        settings = settings_with(own, statement_timeout_seconds=3600)
        async with open_database(settings, dsn=own) as database:
            progress(f"making {load.schedules:,} schedules and their ledger")
            course = await _course(database, settings, load)
            for number in range(rounds):
                for measure in measures:
                    progress(f"round {number + 1} of {rounds}: {measure.name}")
                    begun = perf_counter()
                    await measure.run(course)
                    seconds[measure.name].append(perf_counter() - begun)
            progress("what it reads, and what it names")
            looked_at = await _looked_at(course)
            removed, named = await _proof(course)
        machine = await describe_machine(dsn)
    return AuditFigures(seconds, load, looked_at, removed, named, machine)


async def _course(database: Database, settings: Settings, load: AuditLoad) -> Course:
    await migrate(database)
    now: datetime = await database.fetchval("SELECT statement_timestamp()")
    await fill(database, load.schedules, now, load.hours)
    audits = AuditRepository(database, settings, partial(find_doubled, database))
    return Course(database, audits, now + WINDOW - HOUR, now + WINDOW)


async def _looked_at(course: Course) -> dict[str, int]:
    audit = await course.audits.audit(course.since, course.until)
    explained = await course.audits.explain(course.since, course.until)
    plan = explained["Plan"]
    return {
        "expected": audit.total.expected,
        "pending": audit.total.pending,
        "ledger_rows": audit.rows,
        "versions": int(plan["Actual Rows"]),
        "buffers_hit": plan["Shared Hit Blocks"],
        "buffers_read": plan["Shared Read Blocks"],
        "temporary_buffers": plan["Temp Read Blocks"] + plan["Temp Written Blocks"],
        "statement_ms": round(explained["Execution Time"]),
    }


async def _proof(course: Course) -> tuple[list[str], list[str]]:
    removed = sorted(
        f"{schedule_id} {moment.isoformat()}"
        for schedule_id, moment in await remove_by_hand(course.database, course.since, course.until)
    )
    audit: Audit = await course.audits.audit(course.since, course.until)
    named = sorted(f"{finding.schedule_id} {finding.scheduled_for.isoformat()}" for finding in audit.findings)
    if named != removed or audit.total.unexplained != len(removed):
        raise CronTicksError(f"{removed} were removed by hand, and the audit names {named}")
    return removed, named
