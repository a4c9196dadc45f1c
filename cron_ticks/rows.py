"""Rows of the cron's tables as the code sees them."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple

import asyncpg

from cron_ticks.checks import PRIORITIES, Priority
from cron_ticks.cron_rules import CronRule
from cron_ticks.events import utc_text
from cron_ticks.occurrences import MICROSECOND, CatchUp, IntervalRule, OneOffRule, Plan, Timetable
from cron_ticks.schedules import Delivery, Schedule, ScheduleDefinition, calendar_of, rule_of

COMPARED = (
    *("queue_name", "interval", "at", "jitter_ratio", "priority", "starts_at", "ends_at", "max_runs"),
    *("sink", "delivery", "overlap", "max_attempts", "max_age", "backoff", "catch_up", "misfire_grace"),
    *("cron", "timezone", "dst_gap", "dst_fold", "owner"),
)


class LateTick(NamedTuple):
    """A tick that nobody fired in time."""

    id: str
    scheduled_for: datetime
    turn: int


class Beat(NamedTuple):
    """What a manager's heartbeat has found."""

    instant: datetime
    until: datetime  # the end of the window
    needed: Mapping[int, datetime | None]  # of each of its slots, the earliest first: the occurrence needed first
    shards: int  # it has so many
    taken: int  # of these, just now
    backfills: bool  # there are some that have not ended


@dataclass(frozen=True)
class NeedingTicks:
    """A schedule that has occurrences without ticks inside the window, as a manager sees and holds it."""

    schedule_id: str
    version: int
    timetable: Timetable
    needed_from: datetime | None
    planned: int  # occurrences so far
    now: datetime
    catch_up: CatchUp
    broken: bool = False
    late: tuple[LateTick, ...] = ()


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
    waiting: bool

    @property
    def of_the_rule(self) -> bool:
        """Not a trigger's."""
        return self.origin == "schedule"

    def due_by(self, instant: datetime) -> bool:
        """Whether it is due already, or somebody has begun with it."""
        # The last, because what nobody may take over is due at 'infinity', which can't be compared.
        return self.of_the_rule and (self.attempts > 0 or self.waiting or self.due_at <= instant)


class DueTick(NamedTuple):
    """A tick that a firing would take."""

    id: str
    attempts: int


TickOutcome = Literal["enqueued", "overlapped", "waiting", "missed", "refused"]


class FiredTicks(NamedTuple):
    """Ticks that were taken, and what became of them: those that went the same way, as one.

    One that has become no message stands for itself, and so does each if they are asked for one by one. Otherwise the
    first three are empty.
    """

    id: str
    schedule_id: str
    schedule_name: str
    queue_name: str
    workspace_id: str | None
    origin: str
    outcome: TickOutcome  # refused: the occurrence has fired before
    priority: int
    due_until: datetime  # what was due at this instant is what the pass drains
    scheduled_for: datetime  # of the first
    due_at: datetime  # of the last
    lateness_seconds: list[float]  # of each

    @property
    def lateness(self) -> timedelta:
        """The most of them."""
        return timedelta(seconds=max(self.lateness_seconds))

    @property
    def passed(self) -> bool:
        """Whether they have become messages."""
        return self.outcome == "enqueued"


def count_of(taken: Iterable[FiredTicks]) -> int:
    """How many ticks."""
    return sum(len(ticks.lateness_seconds) for ticks in taken)


class DeliveredTick(NamedTuple):
    """A tick that an outside sink has taken."""

    id: str
    origin: str
    lateness: timedelta
    recovery: bool


@dataclass(frozen=True)
class LeasedTick:
    """A tick in the hands of whoever leased it, as an outside sink gets it."""

    id: str
    schedule_id: str
    schedule_name: str
    workspace_id: str | None
    queue_name: str
    payload: Any
    scheduled_for: datetime
    execute_at: datetime
    origin: str
    priority: Priority
    delivery: Delivery
    attempts: int  # this one included
    recovery: bool  # an earlier attempt may have been delivered: its worker died or hung, or the sink did
    leased_until: datetime
    alone: bool  # no other tick is in the same call

    @property
    def message_id(self) -> str:
        """The same at every attempt, so that the receiver knows a repeat."""
        return self.id.replace("tick_", "msg_", 1)


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
        sink=row["sink"],
        delivery=row["delivery"],
        overlap=row["overlap"],
        max_attempts=row["max_attempts"],
        max_age=_microseconds(row["max_age_us"]),
        backoff=_microseconds(row["backoff_us"]),
        catch_up=row["catch_up"],
        misfire_grace=_microseconds(row["misfire_grace_us"]),
        cron=row["cron"],
        timezone=row["timezone"],
        zone=row["zone"],
        dst_gap=row["dst_gap"],
        dst_fold=row["dst_fold"],
        owner=row["owner"],
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
        definition.sink,
        definition.delivery,
        definition.overlap,
        definition.max_attempts,
        None if definition.max_age is None else definition.max_age // MICROSECOND,
        None if definition.backoff is None else definition.backoff // MICROSECOND,
        definition.cron,
        definition.timezone,
        definition.zone,
        definition.dst_gap,
        definition.dst_fold,
        definition.owner,
        definition.catch_up,
        None if definition.misfire_grace is None else definition.misfire_grace // MICROSECOND,
    )


def differences(schedule: Schedule, definition: ScheduleDefinition) -> tuple[str, ...]:
    """In what a schedule is not as declared; the payload is for the database to compare."""
    # What a ratio comes to depends on the cap, which is a setting: pods that differ in it don't undo each other's work.
    compared = COMPARED if definition.jitter_ratio is not None else (*COMPARED, "jitter")
    return tuple(name for name in compared if getattr(schedule, name) != getattr(definition, name))


def changes_json(schedule: Schedule, definition: ScheduleDefinition, changed: Sequence[str]) -> str:
    """[before, after] of each field but the payload: durations in seconds, times as in ISO 8601."""
    pairs = {name: [getattr(schedule, name), getattr(definition, name)] for name in changed if name != "payload"}
    return json.dumps(pairs, default=_plain)


def _plain(value: datetime | timedelta) -> str | float:
    return value.total_seconds() if isinstance(value, timedelta) else utc_text(value)


def rule_of_row(row: asyncpg.Record) -> IntervalRule | OneOffRule | CronRule:
    """Nominal times of a schedule."""
    calendar = calendar_of(row["cron"], row["zone"], row["dst_gap"], row["dst_fold"])
    return rule_of(row["anchor_at"], _microseconds(row["interval_us"]), calendar)


def needing_ticks(cursor: asyncpg.Record, rule: asyncpg.Record, late: Sequence[LateTick] = ()) -> NeedingTicks:
    """A schedule in the window."""
    return NeedingTicks(
        schedule_id=cursor["schedule_id"],
        version=rule["version"],
        timetable=Timetable(
            rule_of_row(rule),
            rule["starts_at"],
            rule["ends_at"],
            rule["max_runs"],
        ),
        needed_from=cursor["next_tick_needed_at"],
        planned=cursor["planned"],
        now=cursor["instant"],
        catch_up=rule["catch_up"],
        broken=cursor["broken"],
        late=tuple(late),
    )


def leased_tick(row: asyncpg.Record) -> LeasedTick:
    """A leased tick."""
    fields = {name: row[name] for name in LeasedTick.__dataclass_fields__}
    return LeasedTick(**fields | {"payload": json.loads(row["payload"]), "priority": PRIORITIES[row["priority"]]})


def _microseconds(value: int | None) -> timedelta | None:
    return None if value is None else timedelta(microseconds=value)
