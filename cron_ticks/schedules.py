"""Schedules: what an application asks for, checked at the door, and what the database keeps of it."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypedDict

from cron_ticks.errors import InvalidInputError
from cron_ticks.occurrences import MICROSECOND, IntervalRule, OneOffRule, Timetable, jitter_offset

LONGEST_NAME = 200
SHORTEST_INTERVAL = timedelta(seconds=1)
LONGEST_INTERVAL = timedelta(days=36_525)
EARLIEST = datetime(1970, 1, 1, tzinfo=UTC)
LATEST = datetime(2500, 1, 1, tzinfo=UTC)
MOST_RUNS = 10**12
DEFAULT_JITTER_RATIO = 0.1
LARGEST_JITTER_RATIO = 0.5  # beyond it, occurrences would change their order
DEFAULT_JITTER_CAP = timedelta(seconds=30)
LARGEST_PAYLOAD_BYTES = 1_048_576
DEEPEST_PAYLOAD = 100  # levels: whoever reads it may have less room on the stack than who wrote it
JSON_TEXT = json.JSONEncoder(allow_nan=False, separators=(",", ":"), ensure_ascii=False)
NUL_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")  # not where the backslash itself is escaped

Priority = Literal["urgent", "high", "normal", "low"]
PRIORITIES: tuple[Priority, ...] = ("urgent", "high", "normal", "low")  # as the database numbers them
RANKS: dict[str, int] = {name: rank for rank, name in enumerate(PRIORITIES)}
Jitter = float | timedelta | Literal["default"] | None  # a ratio of the interval, or a time either way

OWN_QUEUE = "queue"  # the sink that everybody has
SinkKind = Literal["same_database", "outside"]
Delivery = Literal["exactly_once", "at_least_once", "at_most_once"]
DELIVERIES: dict[SinkKind, tuple[Delivery, ...]] = {  # the first is the default
    "same_database": ("exactly_once",),
    "outside": ("at_least_once", "at_most_once"),
}
Overlap = Literal["allow", "skip", "queue_one"]
OVERLAPS: tuple[Overlap, ...] = ("allow", "skip", "queue_one")
MOST_TICK_ATTEMPTS = 1000
LONGEST_AGE = timedelta(days=365)
LONGEST_BACKOFF = timedelta(days=7)
NO_OTHER_SINKS: Mapping[str, SinkKind] = {}


@dataclass(frozen=True)
class ScheduleDefinition:
    """What to send, where and when: the part of a schedule that an application declares."""

    queue_name: str
    name: str
    workspace_id: str | None
    payload_json: str
    interval: timedelta | None  # None: a one-off
    at: datetime | None
    jitter: timedelta  # how far an occurrence may move either way
    jitter_ratio: float | None  # of the interval, if it was asked for in that way
    priority: Priority
    starts_at: datetime | None
    ends_at: datetime | None
    max_runs: int | None
    sink: str
    delivery: Delivery
    overlap: Overlap
    max_attempts: int | None  # to send a tick; None: the setting, as for the next two
    max_age: timedelta | None  # after which a tick that could not be sent is not tried again
    backoff: timedelta | None  # before the second attempt

    def anchor(self, instant: datetime) -> datetime:
        """Occurrence 0 of a schedule that begins at `instant`."""
        return self.at or self.starts_at or instant

    def timetable(self, anchor: datetime) -> Timetable:
        """Its nominal times."""
        return Timetable(rule_of(anchor, self.interval), self.starts_at, self.ends_at, self.max_runs)


@dataclass(frozen=True)
class Schedule:
    """A row of `cron_schedules`."""

    id: str
    workspace_id: str | None
    name: str
    queue_name: str
    payload: Any
    interval: timedelta | None  # None: a one-off at `anchor_at`
    anchor_at: datetime
    jitter: timedelta
    jitter_ratio: float | None
    priority: Priority
    starts_at: datetime | None
    ends_at: datetime | None
    max_runs: int | None
    sink: str
    delivery: Delivery
    overlap: Overlap
    max_attempts: int | None  # to send a tick; None: the setting, as for the next two
    max_age: timedelta | None  # after which a tick that could not be sent is not tried again
    backoff: timedelta | None  # before the second attempt
    enabled: bool
    version: int
    error: str | None  # why no more ticks are made, if the rule can't be followed
    error_at: datetime | None
    created_at: datetime
    updated_at: datetime

    @property
    def at(self) -> datetime | None:
        """The only occurrence of a one-off."""
        return self.anchor_at if self.interval is None else None

    @property
    def rule(self) -> IntervalRule | OneOffRule:
        """Its nominal times, whatever the bounds."""
        return rule_of(self.anchor_at, self.interval)

    @property
    def timetable(self) -> Timetable:
        """Its nominal times."""
        return Timetable(self.rule, self.starts_at, self.ends_at, self.max_runs)

    def execute_at(self, occurrence: datetime) -> datetime:
        """When an occurrence is due: moved by its jitter, unless it is the first, and never before `starts_at`."""
        if occurrence == self.anchor_at:
            return occurrence
        moved = occurrence + jitter_offset(self.id, occurrence, self.jitter)
        return moved if self.starts_at is None else max(moved, self.starts_at)


@dataclass(frozen=True)
class Triggered:
    """A tick beside the rule, due at once."""

    tick_id: str
    scheduled_for: datetime

    @property
    def message_id(self) -> str:
        """The id that its message will have."""
        return self.tick_id.replace("tick_", "msg_", 1)


def rule_of(anchor: datetime, interval: timedelta | None) -> IntervalRule | OneOffRule:
    """Nominal times from `anchor` on; without an interval there is one."""
    return OneOffRule(anchor) if interval is None else IntervalRule(anchor, interval)


def define_schedule(
    queue_name: str,
    *,
    every: float | timedelta | None = None,
    at: datetime | None = None,
    payload: Any = None,
    workspace_id: str | None = None,
    name: str | None = None,
    jitter: Jitter = "default",
    priority: Priority = "normal",
    starts_at: datetime | None = None,
    ends_at: datetime | None = None,
    max_runs: int | None = None,
    sink: str = OWN_QUEUE,
    delivery: Delivery | None = None,
    overlap: Overlap = "allow",
    max_attempts: int | None = None,
    max_age: float | timedelta | None = None,
    backoff: float | timedelta | None = None,
    jitter_cap: timedelta = DEFAULT_JITTER_CAP,
    sinks: Mapping[str, SinkKind] = NO_OTHER_SINKS,
) -> ScheduleDefinition:
    """Check what the application asks for; the name defaults to the queue's. `sinks` are those beside our own queue."""
    check_name("queue_name", queue_name)
    if name is not None:
        check_name("name", name)
    if workspace_id is not None:
        check_name("workspace_id", workspace_id)
    if (every is None) == (at is None):
        raise InvalidInputError("every", "give either every= or at=")
    interval = None if every is None else check_interval("every", every)
    bounds = {"starts_at": starts_at, "ends_at": ends_at, "max_runs": max_runs}
    if interval is None:
        _refuse_for_one_off(jitter=None if jitter == "default" else jitter, **bounds)
    amplitude, ratio = _check_jitter(jitter, interval, jitter_cap)
    return ScheduleDefinition(
        queue_name=queue_name,
        name=queue_name if name is None else name,
        workspace_id=workspace_id,
        payload_json=check_payload("payload", {} if payload is None else payload),
        interval=interval,
        at=None if at is None else check_instant("at", at),
        jitter=amplitude,
        jitter_ratio=ratio,
        priority=PRIORITIES[check_priority("priority", priority)],
        **_check_bounds(**bounds),
        **_check_sending(sink, delivery, overlap, sinks),
        max_attempts=None
        if max_attempts is None
        else check_count("max_attempts", max_attempts, most=MOST_TICK_ATTEMPTS),
        max_age=None if max_age is None else check_span("max_age", max_age, longest=LONGEST_AGE),
        backoff=None if backoff is None else check_span("backoff", backoff, longest=LONGEST_BACKOFF),
    )


class ScheduleChanges(TypedDict, total=False):
    """What an edit may change."""

    queue_name: str
    every: float | timedelta
    at: datetime
    payload: Any
    jitter: Jitter
    priority: Priority
    starts_at: datetime | None
    ends_at: datetime | None
    max_runs: int | None
    sink: str
    delivery: Delivery | None
    overlap: Overlap
    max_attempts: int | None
    max_age: float | timedelta | None
    backoff: float | timedelta | None


def redefine_schedule(
    schedule: Schedule,
    changes: ScheduleChanges,
    jitter_cap: timedelta = DEFAULT_JITTER_CAP,
    sinks: Mapping[str, SinkKind] = NO_OTHER_SINKS,
) -> ScheduleDefinition:
    """The schedule's definition with some of it changed; `every` and `at` replace each other."""
    for field in changes:
        if field not in ScheduleChanges.__annotations__:
            raise InvalidInputError(field, f"can't be changed; what can: {', '.join(ScheduleChanges.__annotations__)}")
    current: dict[str, Any] = {
        "queue_name": schedule.queue_name,
        "payload": schedule.payload,
        "priority": schedule.priority,
        "workspace_id": schedule.workspace_id,
        "name": schedule.name,
        "sink": schedule.sink,
        "overlap": schedule.overlap,
        "max_attempts": schedule.max_attempts,
        "max_age": schedule.max_age,
        "backoff": schedule.backoff,
    }
    if "sink" not in changes:  # another sink has a guarantee of its own
        current["delivery"] = schedule.delivery
        kind: SinkKind = "same_database" if schedule.delivery == "exactly_once" else "outside"
        sinks = {schedule.sink: kind, **sinks}
    if "at" not in changes and schedule.interval is not None:
        current |= {
            "every": schedule.interval,
            "jitter": schedule.jitter if schedule.jitter_ratio is None else schedule.jitter_ratio,
            "starts_at": schedule.starts_at,
            "ends_at": schedule.ends_at,
            "max_runs": schedule.max_runs,
        }
    elif "every" not in changes:
        current["at"] = schedule.at
    current.update(changes)
    return define_schedule(**current, jitter_cap=jitter_cap, sinks=sinks)


def _refuse_for_one_off(**given: object) -> None:
    for field, value in given.items():
        if value is not None:
            raise InvalidInputError(field, "a schedule with at= has one occurrence: leave it out")


def _check_bounds(starts_at: Any, ends_at: Any, max_runs: Any) -> dict[str, Any]:
    if starts_at is not None:
        starts_at = check_instant("starts_at", starts_at)
    if ends_at is not None:
        ends_at = check_instant("ends_at", ends_at)
        if starts_at is not None and ends_at < starts_at:
            raise InvalidInputError("ends_at", f"must not be before starts_at ({starts_at.isoformat()})")
    if max_runs is not None:
        check_count("max_runs", max_runs, most=MOST_RUNS)
    return {"starts_at": starts_at, "ends_at": ends_at, "max_runs": max_runs}


def _check_sending(sink: Any, delivery: Any, overlap: Any, sinks: Mapping[str, SinkKind]) -> dict[str, Any]:
    check_name("sink", sink)
    if sink != OWN_QUEUE and sink not in sinks:
        raise InvalidInputError(
            "sink", f"there is no sink {sink!r}: declare it with add_sink(), or start a worker that has it first"
        )
    kind: SinkKind = "same_database" if sink == OWN_QUEUE else sinks[sink]
    possible = DELIVERIES[kind]
    if delivery is not None and delivery not in possible:
        where = "in this database" if kind == "same_database" else "outside this database"
        raise InvalidInputError(
            "delivery", f"must be {' or '.join(possible)}, because the sink {sink!r} is {where}, not {delivery!r}"
        )
    if overlap not in OVERLAPS:
        raise InvalidInputError("overlap", f"must be one of {', '.join(OVERLAPS)}, not {overlap!r}")
    if overlap != "allow" and sink != OWN_QUEUE:
        raise InvalidInputError(
            "overlap", f"must be allow: the sink {sink!r} can't say when a message is finished, only our own queue can"
        )
    return {"sink": sink, "delivery": possible[0] if delivery is None else delivery, "overlap": overlap}


def check_span(field: str, value: object, *, longest: timedelta) -> timedelta:
    """Seconds or a timedelta, more than none."""
    if isinstance(value, bool) or not isinstance(value, int | float | timedelta):
        raise InvalidInputError(field, f"must be seconds or a timedelta, not {type(value).__name__}")
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if not 0.001 <= seconds <= longest.total_seconds():  # noqa: PLR2004 - a millisecond
        raise InvalidInputError(field, f"must be from 1 ms to {longest.days} days, not {value}")
    return timedelta(seconds=seconds)


def _check_jitter(value: object, interval: timedelta | None, cap: timedelta) -> tuple[timedelta, float | None]:
    """How far an occurrence may move, and the ratio if one was given."""
    if value is None or interval is None:
        return timedelta(0), None
    if isinstance(value, timedelta):
        most = min(cap, interval // 2)
        if not timedelta(0) <= value <= most:
            raise InvalidInputError(
                "jitter", f"must be from 0 to {most.total_seconds():g} s: half the interval, and the cap"
            )
        return value, None
    ratio = DEFAULT_JITTER_RATIO if value == "default" else value
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= LARGEST_JITTER_RATIO:
        raise InvalidInputError(
            "jitter",
            f"must be a ratio of the interval from 0 to {LARGEST_JITTER_RATIO}, a timedelta or None, not {value!r}",
        )
    if ratio == 0:
        return timedelta(0), None
    return min(cap, timedelta(microseconds=int(ratio * (interval // MICROSECOND)))), float(ratio)


def check_name(field: str, value: object) -> str:
    """A non-empty text without control characters, of at most LONGEST_NAME characters."""
    if not isinstance(value, str):
        raise InvalidInputError(field, f"must be a string, not {type(value).__name__}")
    if not value or value != value.strip():
        raise InvalidInputError(field, "must not be empty or begin or end with a blank")
    if len(value) > LONGEST_NAME:
        raise InvalidInputError(field, f"must have at most {LONGEST_NAME} characters, has {len(value)}")
    if not value.isprintable():
        raise InvalidInputError(field, "must not contain control characters")
    return value


def check_count(field: str, value: object, *, most: int) -> int:
    """A whole number from 1 to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise InvalidInputError(field, f"must be a whole number from 1 to {most}, not {value!r}")
    return value


def check_interval(field: str, value: object) -> timedelta:
    """Seconds or a timedelta, from one second up, in whole microseconds."""
    if isinstance(value, bool) or not isinstance(value, int | float | timedelta):
        raise InvalidInputError(field, f"must be seconds or a timedelta, not {type(value).__name__}")
    try:
        interval = value if isinstance(value, timedelta) else timedelta(seconds=value)
    except (OverflowError, ValueError):
        raise InvalidInputError(field, f"must be a finite number of seconds, not {value}") from None
    if not SHORTEST_INTERVAL <= interval <= LONGEST_INTERVAL:
        raise InvalidInputError(
            field,
            f"must be from 1 second to {LONGEST_INTERVAL.days} days, not {interval.total_seconds():g} s",
        )
    return interval


def check_instant(field: str, value: object) -> datetime:
    """A time with a zone, as UTC."""
    if not isinstance(value, datetime):
        raise InvalidInputError(field, f"must be a datetime, not {type(value).__name__}")
    if value.utcoffset() is None:
        raise InvalidInputError(field, "must have a time zone: datetime(..., tzinfo=UTC)")
    try:
        instant = value.astimezone(UTC)
    except OverflowError:
        instant = LATEST
    if not EARLIEST <= instant < LATEST:
        raise InvalidInputError(field, f"must be from {EARLIEST.year} to {LATEST.year - 1}, not {value.isoformat()}")
    return instant


def check_priority(field: str, value: object) -> int:
    """A priority's name, as the number that the database keeps."""
    if not isinstance(value, str) or value not in RANKS:
        raise InvalidInputError(field, f"must be one of {', '.join(PRIORITIES)}, not {value!r}")
    return RANKS[value]


def check_payload(field: str, value: object) -> str:
    """The payload as the JSON text that PostgreSQL keeps."""
    try:
        text = JSON_TEXT.encode(value)
        size = len(text.encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInputError(field, f"must be JSON: {error}") from None
    if text.count("[") + text.count("{") > DEEPEST_PAYLOAD and _depth(value) > DEEPEST_PAYLOAD:
        raise InvalidInputError(field, f"must not be nested deeper than {DEEPEST_PAYLOAD} levels")
    if size > LARGEST_PAYLOAD_BYTES:
        raise InvalidInputError(field, f"must be at most {LARGEST_PAYLOAD_BYTES} bytes as JSON, has {size}")
    if "\\u0000" in text and NUL_ESCAPE.search(text):
        raise InvalidInputError(field, "must not contain NUL characters: PostgreSQL can't keep them")
    return text


def _depth(value: object) -> int:
    """How deep lists and objects are nested."""
    depth, level = 0, [value]
    while level:
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list | tuple)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        depth += 1
    return depth - 1
