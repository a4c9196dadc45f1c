"""What `cron-ticks up` shows: per schedule, what should have fired since a moment and what did."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import asyncpg
from rich import box
from rich.table import Table
from rich.text import Text

from cron_ticks.cli.common import REPORT_WIDTH, one_line
from cron_ticks.database import Database
from cron_ticks.descriptions import describe_rule
from cron_ticks.occurrences import MICROSECOND, RULE_ERRORS, Timetable
from cron_ticks.rows import rule_of_row

CLOCK = "SELECT coalesce($1::timestamptz, statement_timestamp())"

# Counted from the messages themselves, not from what the workers say. An occurrence is a duplicate when it has several
# messages; it waits when it is due and has no message yet, but will get one.
REPORT = """
SELECT schedule.id, schedule.name, schedule.workspace_id, schedule.interval_us, schedule.anchor_at, schedule.cron,
    schedule.zone, schedule.dst_gap, schedule.dst_fold, schedule.error, span.since, span.until,
    pending.next_at, cursor.next_tick_needed_at AS needed_from, cursor.planned, schedule.starts_at, schedule.ends_at,
    schedule.max_runs,
    fired.last_at, fired.last_lateness, fired.worst_lateness, fired.messages, fired.duplicates, fired.completed,
    pending.due, coalesce($2::timestamptz - pending.first_due, interval '0') AS oldest_wait
FROM {schema}.cron_schedules AS schedule
JOIN {schema}.cron_schedule_cursors AS cursor ON cursor.schedule_id = schedule.id
CROSS JOIN LATERAL (
    SELECT greatest($1::timestamptz, schedule.anchor_at, schedule.updated_at, schedule.starts_at) AS since,
        -- Without a cursor ticks have been made up to the end, unless the end is not a time.
        least($2::timestamptz, coalesce(cursor.next_tick_needed_at,
            CASE WHEN schedule.enabled AND schedule.max_runs IS NULL
                THEN coalesce(schedule.ends_at, schedule.anchor_at) + interval '1 microsecond'
                ELSE $1::timestamptz END)) AS until
) AS span
CROSS JOIN LATERAL (
    SELECT min(execute_at) AS next_at, min(due_at) AS first_due,
        count(*) FILTER (WHERE due_at <= $2::timestamptz) AS due
    FROM {schema}.cron_ticks AS tick
    WHERE tick.schedule_id = schedule.id
) AS pending
CROSS JOIN LATERAL (
    SELECT max(message.scheduled_for) AS last_at,
        (array_agg(run.lateness ORDER BY message.scheduled_for DESC))[1] AS last_lateness,
        max(run.lateness) AS worst_lateness,
        count(*) AS messages,
        count(*) - count(DISTINCT message.scheduled_for) AS duplicates,
        count(completed_at) AS completed
    FROM {schema}.queue_messages AS message
    LEFT JOIN {schema}.cron_runs AS run
        ON run.schedule_id = message.schedule_id AND run.scheduled_for = message.scheduled_for
    WHERE message.schedule_id = schedule.id AND message.scheduled_for >= $1
) AS fired
ORDER BY schedule.workspace_id NULLS FIRST, schedule.name
"""

# An occurrence is missed when ticks have been made beyond it and yet it has neither a tick nor a message nor a run,
# which stays when the message has gone.
MISSED = """
SELECT schedule_id, count(*) AS occurrences
FROM unnest($1::text[], $2::timestamptz[]) AS expected (schedule_id, occurrence)
WHERE NOT EXISTS (
        SELECT FROM {schema}.queue_messages AS message
        WHERE message.schedule_id = expected.schedule_id AND message.scheduled_for = expected.occurrence)
    AND NOT EXISTS (
        SELECT FROM {schema}.cron_ticks AS tick
        WHERE tick.schedule_id = expected.schedule_id AND tick.scheduled_for = expected.occurrence)
    AND NOT EXISTS (
        SELECT FROM {schema}.cron_runs AS run
        WHERE run.schedule_id = expected.schedule_id AND run.scheduled_for >= expected.occurrence
            AND coalesce(run.missed_since, run.scheduled_for) <= expected.occurrence)
GROUP BY schedule_id
"""

# How the workers shared the firing.
FIRED_BY = """
SELECT headers ->> 'ticker_id' AS ticker_id, count(*) AS ticks
FROM {schema}.queue_messages
WHERE schedule_id IS NOT NULL AND scheduled_for >= $1
GROUP BY 1
ORDER BY 1
"""


LONGEST_WAIT = timedelta(seconds=10)  # far beyond the ticker's pause and a worker's start
FIGURES_WIDTH = 62  # columns of a terminal, with the gaps
NARROWEST_WHEN = 18
WIDE_ENOUGH = 100  # to say when


@dataclass(frozen=True)
class ScheduleReport:
    """One schedule since the report's start."""

    name: str
    workspace_id: str | None
    every: timedelta | None  # None: an expression, or a one-off
    when: str
    next_at: datetime | None
    last_at: datetime | None
    last_lateness: timedelta | None
    worst_lateness: timedelta | None
    fired: int
    completed: int
    duplicates: int
    missed: int
    waiting: int
    oldest_wait: timedelta
    error: str | None  # why no more ticks are made

    @property
    def qualified_name(self) -> str:
        """With its workspace."""
        return self.name if self.workspace_id is None else f"{self.workspace_id}/{self.name}"

    def as_json(self) -> dict[str, Any]:
        """Plain values: seconds, milliseconds and ISO times."""
        return {
            "name": self.name,
            "workspace_id": self.workspace_id,
            "every_seconds": self.every and self.every.total_seconds(),
            "when": self.when,
            "next_at": self.next_at and self.next_at.isoformat(),
            "last_at": self.last_at and self.last_at.isoformat(),
            "last_lateness_ms": milliseconds(self.last_lateness),
            "worst_lateness_ms": milliseconds(self.worst_lateness),
            "fired": self.fired,
            "completed": self.completed,
            "duplicates": self.duplicates,
            "missed": self.missed,
            "waiting": self.waiting,
            "error": self.error,
        }


@dataclass(frozen=True)
class Report:
    """All schedules since the report's start."""

    since: datetime
    until: datetime
    schedules: tuple[ScheduleReport, ...]
    fired_by: dict[str, int]

    @property
    def fired(self) -> int:
        """Messages that ticks have become."""
        return sum(schedule.fired for schedule in self.schedules)

    @property
    def completed(self) -> int:
        """Messages that a handler has completed."""
        return sum(schedule.completed for schedule in self.schedules)

    @property
    def duplicates(self) -> int:
        """Messages beyond the first of an occurrence."""
        return sum(schedule.duplicates for schedule in self.schedules)

    @property
    def missed(self) -> int:
        """Occurrences that became nothing."""
        return sum(schedule.missed for schedule in self.schedules)

    @property
    def waiting(self) -> int:
        """Occurrences that are due and not fired yet."""
        return sum(schedule.waiting for schedule in self.schedules)

    @property
    def problem(self) -> str | None:
        """Why this is not what was promised, if it is not."""
        if self.duplicates or self.missed:
            return f"{self.duplicates} duplicate(s), {self.missed} missed"
        for schedule in self.schedules:
            if schedule.error is not None:
                return f"schedule {schedule.name!r} can't be followed: {schedule.error}"
        oldest = max((schedule.oldest_wait for schedule in self.schedules), default=timedelta(0))
        if oldest > LONGEST_WAIT:
            return (
                f"{self.waiting} occurrence(s) are due and not fired, the oldest for {oldest.total_seconds():.0f} s: "
                "look at the workers' log"
            )
        return None

    def as_json(self) -> dict[str, Any]:
        """The summary that `--json` prints."""
        return {
            "seconds": round((self.until - self.since).total_seconds(), 3),
            "fired": self.fired,
            "completed": self.completed,
            "duplicates": self.duplicates,
            "missed": self.missed,
            "waiting": self.waiting,
            "fired_by": self.fired_by,
            "schedules": [schedule.as_json() for schedule in self.schedules],
        }


async def database_clock(database: Database, now: datetime | None = None) -> datetime:
    """The time by the only clock that counts."""
    instant: datetime = await database.fetchval(CLOCK, now)
    return instant


async def read_report(database: Database, since: datetime, *, now: datetime | None = None) -> Report:
    """What has happened since `since`."""
    until = await database_clock(database, now)
    rows = await database.fetch(REPORT, since, until)
    missed = await _count_missed(database, rows)
    shares = await database.fetch(FIRED_BY, since)
    unmade = {row["id"]: _unmade(row, until) for row in rows}
    schedules = tuple(
        ScheduleReport(
            name=row["name"],
            workspace_id=row["workspace_id"],
            every=None if row["interval_us"] is None else timedelta(microseconds=row["interval_us"]),
            when=describe_rule(rule_of_row(row)),
            next_at=row["next_at"] or _next_occurrence(row),
            last_at=row["last_at"],
            last_lateness=row["last_lateness"],
            worst_lateness=row["worst_lateness"],
            fired=row["messages"],
            completed=row["completed"],
            duplicates=row["duplicates"],
            missed=missed.get(row["id"], 0),
            waiting=row["due"] + unmade[row["id"]].occurrences,
            oldest_wait=max(timedelta(0), row["oldest_wait"], unmade[row["id"]].since),
            error=row["error"],
        )
        for row in rows
    )
    return Report(since, until, schedules, {row["ticker_id"]: row["ticks"] for row in shares})


async def _count_missed(database: Database, rows: Sequence[asyncpg.Record]) -> dict[str, int]:
    """Per schedule; one whose rule can't be followed says so by its error."""
    expected: list[tuple[str, datetime]] = []
    for row in rows:
        with suppress(*RULE_ERRORS):
            expected += ((row["id"], moment) for moment in rule_of_row(row).occurrences(row["since"], row["until"]))
    ids, moments = [schedule_id for schedule_id, _ in expected], [moment for _, moment in expected]
    return {row["schedule_id"]: row["occurrences"] for row in await database.fetch(MISSED, ids, moments)}


class _Unmade(NamedTuple):
    """Occurrences that are due and have no tick yet, and how long the first of them has waited."""

    occurrences: int = 0
    since: timedelta = timedelta(0)


def _unmade(row: asyncpg.Record, until: datetime) -> _Unmade:
    if row["needed_from"] is None:
        return _Unmade()
    with suppress(*RULE_ERRORS):
        timetable = _timetable(row)
        first = timetable.occurrence_at_or_after(row["needed_from"])  # where a manager looks next may be between two
        if first is not None and first <= until:
            found = timetable.count(first, until + MICROSECOND)
            left = found if row["max_runs"] is None else row["max_runs"] - row["planned"]
            return _Unmade(min(found, left), until - first)
    return _Unmade()


def _timetable(row: asyncpg.Record) -> Timetable:
    return Timetable(rule_of_row(row), row["starts_at"], row["ends_at"])


def _next_occurrence(row: asyncpg.Record) -> datetime | None:
    with suppress(*RULE_ERRORS):
        if row["needed_from"] is not None:
            return _timetable(row).occurrence_at_or_after(row["needed_from"])
    return None


def milliseconds(duration: timedelta | None) -> float | None:
    """For people and for JSON."""
    return None if duration is None else round(duration.total_seconds() * 1000, 1)


def report_table(report: Report, *, most: int = 40, width: int = REPORT_WIDTH) -> Table:
    """The table that a person watches; it says when a schedule occurs if there is room for that."""
    total = f"fired {report.fired}, duplicates {report.duplicates}, missed {report.missed}"
    hidden = len(report.schedules) - most
    caption = total if hidden <= 0 else f"{total}; {hidden} more schedules not shown"
    table = Table(title="cron-ticks", caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    # As they are: names may have signs that mean something to the table.
    names = [Text(one_line(schedule.qualified_name)) for schedule in report.schedules[:most]]
    wide = width >= WIDE_ENOUGH
    if wide:
        longest = max((name.cell_len for name in names), default=0)
        room = width - FIGURES_WIDTH - NARROWEST_WHEN
        table.add_column("schedule", overflow="fold", width=max(len("schedule"), min(longest, room)))
        table.add_column("when", overflow="fold")
    else:
        table.add_column("schedule", no_wrap=True)
    for heading in ("next in", "last ago", "lateness", "fired", "duplicates", "missed"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, schedule in zip(names, report.schedules, strict=False):
        when = [Text(one_line(schedule.when))] if wide else []
        table.add_row(name, *when, *_figures(schedule, report.until))
    return table


def _figures(schedule: ScheduleReport, now: datetime) -> list[str]:
    lateness = milliseconds(schedule.last_lateness)
    next_in = "" if schedule.next_at is None else f"{max(0.0, (schedule.next_at - now).total_seconds()):.1f} s"
    return [
        next_in if schedule.error is None else "BROKEN",
        "" if schedule.last_at is None else f"{(now - schedule.last_at).total_seconds():.1f} s",
        "" if lateness is None else f"{lateness:.0f} ms",
        str(schedule.fired),
        str(schedule.duplicates),
        str(schedule.missed),
    ]
