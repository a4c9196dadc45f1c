"""Rows of the cron's tables as the code sees them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import asyncpg

from cron_ticks.occurrences import MICROSECOND, Plan, Timetable
from cron_ticks.schedules import PRIORITIES, Schedule, ScheduleDefinition, rule_of


@dataclass(frozen=True)
class NeedingTicks:
    """A schedule that has occurrences without ticks inside the window, as a manager sees and holds it."""

    schedule_id: str
    version: int
    timetable: Timetable
    needed_from: datetime | None
    planned: int  # occurrences so far
    now: datetime


@dataclass(frozen=True)
class Planned:
    """What is to be made of a schedule."""

    needing: NeedingTicks
    plan: Plan


@dataclass(frozen=True, slots=True)
class PendingTick:
    """What an edit must know of a tick."""

    scheduled_for: datetime
    origin: str
    due_at: datetime
    attempts: int

    @property
    def of_the_rule(self) -> bool:
        """Not a trigger's."""
        return self.origin == "schedule"

    def due_by(self, instant: datetime) -> bool:
        """Whether it is due already, or somebody has begun with it."""
        return self.of_the_rule and (self.due_at <= instant or self.attempts > 0)


class FiredTick(NamedTuple):
    """A tick that was taken; it has become a message if it passed the gate. There are many of them: it is made fast."""

    id: str
    schedule_id: str
    schedule_name: str
    queue_name: str
    workspace_id: str | None
    scheduled_for: datetime
    origin: str
    lateness: timedelta
    passed: bool  # False: the occurrence has fired before
    due_until: datetime  # what was due at this instant is what the pass drains


@dataclass(frozen=True)
class LeasedTick:
    """A tick in the hands of whoever leased it."""

    id: str
    schedule_id: str
    schedule_name: str
    workspace_id: str | None
    queue_name: str
    payload: Any
    scheduled_for: datetime
    execute_at: datetime
    origin: str
    attempts: int  # this one included
    leased_until: datetime


def schedule_of(row: asyncpg.Record) -> Schedule:
    """A schedule."""
    return Schedule(
        id=row["id"],
        workspace_id=row["workspace_id"],
        name=row["name"],
        queue_name=row["queue_name"],
        payload=json.loads(row["payload"]),
        interval=_microseconds(row["interval_us"]),
        anchor_at=row["anchor_at"],
        jitter=timedelta(microseconds=row["jitter_us"]),
        jitter_ratio=row["jitter_ratio"],
        priority=PRIORITIES[row["priority"]],
        starts_at=row["starts_at"],
        ends_at=row["ends_at"],
        max_runs=row["max_runs"],
        enabled=row["enabled"],
        version=row["version"],
        error=row["error"],
        error_at=row["error_at"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
    )


def definition_arguments(definition: ScheduleDefinition, anchor: datetime) -> Sequence[object]:
    """A definition's columns, in the order of the statements that write them."""
    return (
        definition.queue_name,
        definition.payload_json,
        None if definition.interval is None else definition.interval // MICROSECOND,
        anchor,
        definition.jitter // MICROSECOND,
        definition.jitter_ratio,
        PRIORITIES.index(definition.priority),
        definition.starts_at,
        definition.ends_at,
        definition.max_runs,
    )


def same_but_payload(schedule: Schedule, definition: ScheduleDefinition) -> bool:
    """Whether a schedule is as declared; the payload is for the database to compare."""
    names = ("queue_name", "interval", "at", "jitter_ratio", "priority", "starts_at", "ends_at", "max_runs")
    same = all(getattr(schedule, name) == getattr(definition, name) for name in names)
    # What a ratio comes to depends on the cap, which is a setting: pods that differ in it don't undo each other's work.
    return same and (definition.jitter_ratio is not None or schedule.jitter == definition.jitter)


def needing_ticks(cursor: asyncpg.Record, rule: asyncpg.Record) -> NeedingTicks:
    """A schedule in the window."""
    return NeedingTicks(
        schedule_id=cursor["schedule_id"],
        version=rule["version"],
        timetable=Timetable(
            rule_of(rule["anchor_at"], _microseconds(rule["interval_us"])),
            rule["starts_at"],
            rule["ends_at"],
            rule["max_runs"],
        ),
        needed_from=cursor["next_tick_needed_at"],
        planned=cursor["planned"],
        now=cursor["instant"],
    )


def leased_tick(row: asyncpg.Record) -> LeasedTick:
    """A leased tick."""
    return LeasedTick(**dict(row) | {"payload": json.loads(row["payload"])})


def _microseconds(value: int | None) -> timedelta | None:
    return None if value is None else timedelta(microseconds=value)
