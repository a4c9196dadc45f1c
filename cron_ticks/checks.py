"""What an argument may be: checked at the door, with an error that names the field and says what to do."""

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Literal, TypeVar

from cron_ticks.errors import InvalidInputError

LONGEST_NAME = 200
SHORTEST_INTERVAL = timedelta(seconds=1)
LONGEST_INTERVAL = timedelta(days=36_525)
EARLIEST = datetime(1970, 1, 1, tzinfo=UTC)
LATEST = datetime(2500, 1, 1, tzinfo=UTC)
LARGEST_PAYLOAD_BYTES = 1_048_576
DEEPEST_PAYLOAD = 100  # levels: whoever reads it may have less room on the stack than who wrote it
JSON_TEXT = json.JSONEncoder(allow_nan=False, separators=(",", ":"), ensure_ascii=False)
NUL_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")  # not where the backslash itself is escaped
Priority = Literal["urgent", "high", "normal", "low"]
PRIORITIES: tuple[Priority, ...] = ("urgent", "high", "normal", "low")  # as the database numbers them
RANKS: dict[str, int] = {name: rank for rank, name in enumerate(PRIORITIES)}
ChoiceT = TypeVar("ChoiceT", bound=str)


def shown(value: object, most: int = 100) -> str:
    """What was given, for an error's text: never endless, whatever it is."""
    if isinstance(value, str):
        return repr(value if len(value) <= most else f"{value[:most]}…")
    try:
        text = str(value) if isinstance(value, timedelta) else repr(value)
    except (ValueError, RecursionError):
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= most else f"{text[:most]}…"


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


def check_choice(field: str, value: object, choices: tuple[ChoiceT, ...]) -> ChoiceT:
    """One of a few words."""
    for choice in choices:
        if value == choice:
            return choice
    raise InvalidInputError(field, f"must be one of {', '.join(map(str, choices))}, not {shown(value)}")


def check_count(field: str, value: object, *, least: int = 1, most: int) -> int:
    """A whole number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidInputError(field, f"must be a whole number from {least} to {most}, not {shown(value)}")
    return value


def check_priority(field: str, value: object) -> int:
    """A priority's name, as the number that the database keeps."""
    if not isinstance(value, str) or value not in RANKS:
        raise InvalidInputError(field, f"must be one of {', '.join(PRIORITIES)}, not {shown(value)}")
    return RANKS[value]


def check_interval(field: str, value: object) -> timedelta:
    """Seconds or a timedelta, from one second up, in whole microseconds."""
    if isinstance(value, bool) or not isinstance(value, int | float | timedelta):
        raise InvalidInputError(field, f"must be seconds or a timedelta, not {type(value).__name__}")
    try:
        interval = value if isinstance(value, timedelta) else timedelta(seconds=value)
    except (OverflowError, ValueError):
        raise InvalidInputError(field, f"must be a finite number of seconds, not {shown(value)}") from None
    if not SHORTEST_INTERVAL <= interval <= LONGEST_INTERVAL:
        raise InvalidInputError(
            field,
            f"must be from 1 second to {LONGEST_INTERVAL.days} days, not {interval.total_seconds():g} s",
        )
    return interval


def check_span(field: str, value: object, *, longest: timedelta) -> timedelta:
    """Seconds or a timedelta, more than none."""
    if isinstance(value, bool) or not isinstance(value, int | float | timedelta):
        raise InvalidInputError(field, f"must be seconds or a timedelta, not {type(value).__name__}")
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if not 0.001 <= seconds <= longest.total_seconds():  # noqa: PLR2004 - a millisecond
        raise InvalidInputError(field, f"must be from 1 ms to {longest.days} days, not {shown(value)}")
    return timedelta(seconds=seconds)


def check_instant(field: str, value: object) -> datetime:
    """A time with a zone, as UTC."""
    if not isinstance(value, datetime):
        raise InvalidInputError(field, f"must be a datetime, not {type(value).__name__}")
    if value.utcoffset() is None:
        raise InvalidInputError(field, "must have a time zone: datetime(..., tzinfo=UTC), or in a file an offset or Z")
    try:
        instant = value.astimezone(UTC)
    except OverflowError:
        instant = LATEST
    if not EARLIEST <= instant < LATEST:
        raise InvalidInputError(field, f"must be from {EARLIEST.year} to {LATEST.year - 1}, not {value.isoformat()}")
    return instant


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
