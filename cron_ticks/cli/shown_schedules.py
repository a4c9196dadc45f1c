"""A schedule as commands show it: what it is, in which state, and when it occurs next."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

import typer

from cron_ticks.cli.calendar_commands import occurrences_as_json, print_occurrences, qualified
from cron_ticks.cli.common import one_line, time_text, visible
from cron_ticks.cli.report import database_clock
from cron_ticks.occurrences import RULE_ERRORS
from cron_ticks.schedules import DEFAULT_ZONE, Schedule
from token_queue import QueueManager

# How many occurrences after $2 the schedules' max_runs still allow: those without a tick, and ticks that wait.
RUNS_LEFT = """
SELECT schedule.id, greatest(0, schedule.max_runs - cursor.planned) + (
        SELECT count(*)
        FROM {schema}.cron_ticks AS tick
        WHERE tick.schedule_id = schedule.id AND tick.origin = 'schedule' AND tick.scheduled_for > $2::timestamptz
    ) AS runs
FROM {schema}.cron_schedules AS schedule
JOIN {schema}.cron_schedule_cursors AS cursor ON cursor.schedule_id = schedule.id
WHERE schedule.id = ANY ($1::text[]) AND schedule.max_runs IS NOT NULL
"""

SHOWN_OCCURRENCES = 5
Source = Literal["schedule", "workspace", "default"]
SOURCES: dict[Source, str] = {"schedule": "its own", "workspace": "the workspace's", "default": "the default"}
DURATIONS = {name: name for name in ("jitter", "max_age", "backoff", "misfire_grace")} | {"every": "interval"}


@dataclass(frozen=True)
class Shown:
    """A schedule, and when it occurs next."""

    schedule: Schedule
    next: tuple[datetime, ...]
    problem: str | None  # why it can't be said when

    @property
    def state(self) -> str:
        """As `--json` has it."""
        if self.problem is not None:
            return "broken"
        return "enabled" if self.schedule.enabled else "disabled"

    @property
    def state_text(self) -> str:
        """As people read it: who is broken says why."""
        if self.problem is None:
            return self.state
        first_line, _, _ = self.problem.partition("\n")
        return f"BROKEN: {one_line(first_line)}"

    def as_json(self) -> dict[str, Any]:
        """Everything: durations in seconds, times as ISO 8601 has them."""
        fields = asdict(self.schedule)
        seconds = {f"{name}_seconds": _seconds(fields.pop(field)) for name, field in DURATIONS.items()}
        return {
            **fields,
            **seconds,
            "at": self.schedule.at,
            "description": self.schedule.description,
            "state": self.state,
            "next": occurrences_as_json(self.next, self.schedule.zone or DEFAULT_ZONE),
        }


async def look_ahead(
    queue_manager: QueueManager, schedules: Sequence[Schedule], count: int = SHOWN_OCCURRENCES
) -> list[Shown]:
    """Each with its next occurrences, by the database's clock."""
    now = await database_clock(queue_manager.database)
    limited = [schedule.id for schedule in schedules if schedule.max_runs is not None]
    rows = await queue_manager.database.fetch(RUNS_LEFT, limited, now) if limited else []
    runs_left = {row["id"]: row["runs"] for row in rows}
    return [_look(schedule, now, min(count, runs_left.get(schedule.id, count))) for schedule in schedules]


def _look(schedule: Schedule, now: datetime, count: int) -> Shown:
    """What is disabled or broken has no next occurrence."""
    if schedule.error is not None or not schedule.enabled:
        return Shown(schedule, (), schedule.error)
    timetable, moment = schedule.timetable, now
    occurrences: list[datetime] = []
    try:
        while len(occurrences) < count and (following := timetable.occurrence_after(moment)) is not None:
            occurrences.append(following)
            moment = following
    except RULE_ERRORS as error:  # a manager will find out, and say so
        return Shown(schedule, (), f"{type(error).__name__}: {error}")
    return Shown(schedule, tuple(occurrences), None)


async def source_of_zone(queue_manager: QueueManager, schedule: Schedule) -> Source | None:
    """Who says in which zone it is."""
    if schedule.cron is None:
        return None
    if schedule.timezone is not None:
        return "schedule"
    if schedule.workspace_id is None or await queue_manager.get_workspace_timezone(schedule.workspace_id) is None:
        return "default"
    return "workspace"


def row_of(shown: Shown) -> list[str]:
    """Its row in the list."""
    schedule = shown.schedule
    return [
        one_line(schedule.id),
        qualified(schedule.workspace_id, schedule.name),
        one_line(schedule.description),
        one_line(schedule.queue_name),
        time_text(shown.next[0]) if shown.next else "",
        shown.state_text,
    ]


def print_everything(shown: Shown, source: Source | None) -> None:
    """All there is to know of it."""
    for heading, text in _lines(shown, source):
        typer.echo(f"{heading:13}  {one_line(text)}")
    if shown.schedule.error is not None:
        typer.echo(visible(f"error          {shown.schedule.error}"))
    typer.echo(f"payload        {json.dumps(shown.schedule.payload, indent=2)}")
    print_next(shown)


def _lines(shown: Shown, source: Source | None) -> list[tuple[str, str]]:
    """What there is to say; what was left to the settings is left out."""
    schedule = shown.schedule
    optional = {
        "cron": schedule.cron,
        "timezone": None if source is None else f"{schedule.zone} ({SOURCES[source]})",
        "dst gap": schedule.dst_gap,
        "dst fold": schedule.dst_fold,
        "starts at": schedule.starts_at and time_text(schedule.starts_at),
        "ends at": schedule.ends_at and time_text(schedule.ends_at),
        "max runs": schedule.max_runs,
        "jitter": schedule.jitter or None,
        "jitter ratio": schedule.jitter_ratio,
        "max attempts": schedule.max_attempts,
        "max age": schedule.max_age,
        "backoff": schedule.backoff,
        "misfire grace": schedule.misfire_grace,
    }
    return [
        ("id", schedule.id),
        ("name", schedule.name),
        ("workspace", schedule.workspace_id or "(system-wide)"),
        ("owner", schedule.owner or "(none)"),
        ("state", shown.state_text),
        *([("broken since", time_text(schedule.error_at))] if schedule.error_at is not None else []),
        ("when", schedule.description),
        *((heading, str(value)) for heading, value in optional.items() if value is not None),
        ("queue", schedule.queue_name),
        ("priority", schedule.priority),
        ("overlap", schedule.overlap),
        ("catch-up", schedule.catch_up),
        ("sink", f"{schedule.sink}, {schedule.delivery}"),
        ("version", f"{schedule.version}, since {time_text(schedule.updated_at)}"),
        ("created at", time_text(schedule.created_at)),
    ]


def print_next(shown: Shown) -> None:
    """When it occurs next, or why it doesn't."""
    if shown.next:
        print_occurrences(shown.next, shown.schedule.zone or DEFAULT_ZONE)
    elif shown.state == "enabled":
        typer.echo("no more occurrences")
    else:
        typer.echo(f"no occurrences, because it is {shown.state_text}")


def _seconds(duration: timedelta | None) -> float | None:
    return None if duration is None else duration.total_seconds()
