"""Schedules: what an application asks for, checked at the door, and what the database keeps of it."""

import json
import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from cron_ticks.errors import InvalidInputError
from cron_ticks.occurrences import IntervalRule

LONGEST_NAME = 200
SHORTEST_INTERVAL = timedelta(seconds=1)
LONGEST_INTERVAL = timedelta(days=36_525)
LARGEST_PAYLOAD_BYTES = 1_048_576
DEEPEST_PAYLOAD = 100  # levels: whoever reads it may have less room on the stack than who wrote it
JSON_TEXT = json.JSONEncoder(allow_nan=False, separators=(",", ":"), ensure_ascii=False)
NUL_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")  # not where the backslash itself is escaped


@dataclass(frozen=True)
class ScheduleDefinition:
    """What to send, where and how often: the part of a schedule that an application declares."""

    queue_name: str
    name: str
    workspace_id: str | None
    interval: timedelta
    payload_json: str

    @property
    def interval_us(self) -> int:
        """The interval as the database keeps it."""
        return self.interval // timedelta(microseconds=1)


@dataclass(frozen=True)
class Schedule:
    """A row of `cron_schedules`."""

    id: str
    workspace_id: str | None
    name: str
    queue_name: str
    payload: Any
    interval: timedelta
    anchor_at: datetime
    created_at: datetime
    updated_at: datetime

    @property
    def rule(self) -> IntervalRule:
        """When the schedule fires."""
        return IntervalRule(self.anchor_at, self.interval)


def define_schedule(
    queue_name: str,
    *,
    every: float | timedelta,
    payload: Any = None,
    workspace_id: str | None = None,
    name: str | None = None,
) -> ScheduleDefinition:
    """Check what the application asks for; the name defaults to the queue's."""
    check_name("queue_name", queue_name)
    if name is not None:
        check_name("name", name)
    if workspace_id is not None:
        check_name("workspace_id", workspace_id)
    return ScheduleDefinition(
        queue_name=queue_name,
        name=queue_name if name is None else name,
        workspace_id=workspace_id,
        interval=check_interval("every", every),
        payload_json=check_payload("payload", {} if payload is None else payload),
    )


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
