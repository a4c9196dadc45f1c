"""What `cron-ticks up` shows: per schedule, what should have fired since a moment and what did."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from rich import box
from rich.table import Table

from cron_ticks.database import Database

CLOCK = "SELECT coalesce($1::timestamptz, statement_timestamp())"

# Counted from the messages themselves, not from what the workers say. An occurrence is missed when ticks have been made
# beyond it and yet it has neither a tick nor a message nor a run, which stays when the message has gone; it is a
# duplicate when it has several messages; it waits when it is due and has no message yet, but will get one.
REPORT = """
SELECT schedule.name, schedule.workspace_id, schedule.interval_us, schedule.error,
    coalesce(pending.next_at, cursor.next_tick_needed_at) AS next_at,
    fired.last_at, fired.last_lateness, fired.worst_lateness, fired.messages, fired.duplicates, fired.completed,
    (
        SELECT count(*)
        FROM (
            SELECT schedule.anchor_at + k * schedule.interval_us * interval '1 microsecond' AS occurrence
            FROM generate_series(
                greatest(0, ceil(extract(epoch FROM span.since - schedule.anchor_at) * 1000000
                    / schedule.interval_us)::bigint),
                ceil(extract(epoch FROM span.until - schedule.anchor_at) * 1000000
                    / schedule.interval_us)::bigint - 1) AS k
            UNION ALL
            SELECT schedule.anchor_at
            WHERE schedule.interval_us IS NULL AND schedule.anchor_at >= span.since AND schedule.anchor_at < span.until
        ) AS expected
        WHERE NOT EXISTS (
                SELECT FROM {schema}.queue_messages AS message
                WHERE message.schedule_id = schedule.id AND message.scheduled_for = expected.occurrence)
            AND NOT EXISTS (
                SELECT FROM {schema}.cron_ticks AS tick
                WHERE tick.schedule_id = schedule.id AND tick.scheduled_for = expected.occurrence)
            AND NOT EXISTS (
                SELECT FROM {schema}.cron_runs AS run
                WHERE run.schedule_id = schedule.id AND run.scheduled_for = expected.occurrence)
    ) AS missed,
    pending.due + CASE WHEN cursor.next_tick_needed_at > $2::timestamptz THEN 0
        ELSE coalesce(1 + floor(extract(epoch FROM $2::timestamptz - cursor.next_tick_needed_at) * 1000000
            / schedule.interval_us)::bigint, (cursor.next_tick_needed_at <= $2::timestamptz)::int, 0) END AS waiting,
    coalesce($2::timestamptz - least(pending.first_due, cursor.next_tick_needed_at), interval '0') AS oldest_wait
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

# How the workers shared the firing.
FIRED_BY = """
SELECT headers ->> 'ticker_id' AS ticker_id, count(*) AS ticks
FROM {schema}.queue_messages
WHERE schedule_id IS NOT NULL AND scheduled_for >= $1
GROUP BY 1
ORDER BY 1
"""


LONGEST_WAIT = timedelta(seconds=10)  # far beyond the ticker's pause and a worker's start


@dataclass(frozen=True)
class ScheduleReport:
    """One schedule since the report's start."""

    name: str
    workspace_id: str | None
    every: timedelta | None  # None: a one-off
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

    def as_json(self) -> dict[str, Any]:
        """Plain values: seconds, milliseconds and ISO times."""
        return {
            "name": self.name,
            "workspace_id": self.workspace_id,
            "every_seconds": self.every and self.every.total_seconds(),
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
    shares = await database.fetch(FIRED_BY, since)
    schedules = tuple(
        ScheduleReport(
            name=row["name"],
            workspace_id=row["workspace_id"],
            every=None if row["interval_us"] is None else timedelta(microseconds=row["interval_us"]),
            next_at=row["next_at"],
            last_at=row["last_at"],
            last_lateness=row["last_lateness"],
            worst_lateness=row["worst_lateness"],
            fired=row["messages"],
            completed=row["completed"],
            duplicates=row["duplicates"],
            missed=row["missed"],
            waiting=row["waiting"],
            oldest_wait=max(timedelta(0), row["oldest_wait"]),
            error=row["error"],
        )
        for row in rows
    )
    return Report(since, until, schedules, {row["ticker_id"]: row["ticks"] for row in shares})


def milliseconds(duration: timedelta | None) -> float | None:
    """For people and for JSON."""
    return None if duration is None else round(duration.total_seconds() * 1000, 1)


def report_table(report: Report, *, most: int = 40) -> Table:
    """The table that a person watches."""
    total = f"fired {report.fired}, duplicates {report.duplicates}, missed {report.missed}"
    hidden = len(report.schedules) - most
    caption = total if hidden <= 0 else f"{total}; {hidden} more schedules not shown"
    table = Table(title="cron-ticks", caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("schedule", no_wrap=True)
    for heading in ("next in", "last ago", "lateness", "fired", "duplicates", "missed"):
        table.add_column(heading, justify="right", no_wrap=True)
    for schedule in report.schedules[:most]:
        lateness = milliseconds(schedule.last_lateness)
        table.add_row(
            schedule.name if schedule.workspace_id is None else f"{schedule.workspace_id}/{schedule.name}",
            "" if schedule.next_at is None else f"{max(0.0, (schedule.next_at - report.until).total_seconds()):.1f} s",
            "" if schedule.last_at is None else f"{(report.until - schedule.last_at).total_seconds():.1f} s",
            "" if lateness is None else f"{lateness:.0f} ms",
            str(schedule.fired),
            str(schedule.duplicates),
            str(schedule.missed),
        )
    return table
