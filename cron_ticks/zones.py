"""Time zones: which there are, and when their clocks are changed. zoneinfo knows; this asks it the right questions."""

import difflib
from bisect import bisect_right
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache, lru_cache
from importlib.resources import files
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cron_ticks.checks import shown
from cron_ticks.errors import InvalidInputError

LONGEST_ZONE = 64
NO_SHIFT = timedelta(0)
MARGIN = timedelta(days=2)  # more than any clock has been changed by
SECOND = timedelta(seconds=1)
SAMPLE = timedelta(days=1)  # no zone has changed its clocks twice within a day since 1970: the closest are a week apart


@dataclass(frozen=True)
class Span:
    """A time during which a zone's clocks run without a jump: [start, end), UTC."""

    start: datetime
    end: datetime
    offset: timedelta
    shift: timedelta  # by which clocks jumped at the start; negative: they were set back
    next_shift: timedelta  # and at the end


@dataclass(frozen=True)
class _Change:
    at: datetime
    before: timedelta
    after: timedelta

    @property
    def shift(self) -> timedelta:
        return self.after - self.before


def check_zone(field: str, value: object) -> str:
    """The name of an IANA time zone."""
    if not isinstance(value, str):
        raise InvalidInputError(field, f"must be the name of a time zone, not {type(value).__name__}")
    if value not in known_zones():
        raise InvalidInputError(field, f"there is no time zone {shown(value, LONGEST_ZONE)}{_suggestion(value)}")
    return value


@cache
def known_zones() -> frozenset[str]:
    """The zones of the IANA database; a machine may have more, such as `localtime`, which mean nothing elsewhere."""
    return frozenset(files("tzdata").joinpath("zones").read_text(encoding="ascii").split())


def span_at(zone: str, instant: datetime) -> Span:
    """The span that `instant` lies in. Where nothing changes for years it is cut, with a jump of none.

    ZoneInfoNotFoundError, a KeyError, if the zone has gone.
    """
    spans = _spans(zone, instant.year)
    return spans[bisect_right(spans, instant, key=_start) - 1]


def _start(span: Span) -> datetime:
    return span.start


@lru_cache(maxsize=4096)
def _spans(zone: str, year: int) -> tuple[Span, ...]:
    """Spans that cover a year."""
    info = _info(zone)
    start, end = datetime(year - 1, 1, 1, tzinfo=UTC), datetime(year + 2, 1, 1, tzinfo=UTC)
    changes = [change for number in (year - 1, year, year + 1) for change in _changes(zone, number)]
    beyond = _find_changes(info, end, end + MARGIN)  # a repeated hour before them is no place to cut
    first = _offset(info, start)
    marks = [_Change(start, first, first), *changes]
    ends = [(change.at, change.shift) for change in [*changes, *beyond[:1]]]
    return tuple(
        Span(mark.at, until, mark.after, mark.shift, next_shift)
        for mark, (until, next_shift) in zip(marks, [*ends, (end, NO_SHIFT)], strict=False)
    )


@lru_cache(maxsize=4096)
def _changes(zone: str, year: int) -> tuple[_Change, ...]:
    """When a zone's clocks are changed in a year, UTC."""
    return _find_changes(_info(zone), datetime(year, 1, 1, tzinfo=UTC), datetime(year + 1, 1, 1, tzinfo=UTC))


def _info(zone: str) -> ZoneInfo:
    if zone not in known_zones():  # ZoneInfo itself would look for a file of any name, and trip over a folder
        raise ZoneInfoNotFoundError(f"there is no time zone {shown(zone, LONGEST_ZONE)}")
    return ZoneInfo(zone)


def _find_changes(info: ZoneInfo, instant: datetime, end: datetime) -> tuple[_Change, ...]:
    changes = []
    offset = _offset(info, instant - SECOND)
    while instant < end:
        following = min(instant + SAMPLE, end)
        after = _offset(info, following - SECOND)
        if after != offset:
            changes.append(_Change(_jump(info, instant - SECOND, following - SECOND), offset, after))
        instant, offset = following, after
    return tuple(changes)


def _jump(info: ZoneInfo, before: datetime, after: datetime) -> datetime:
    """The first second with the offset of `after`."""
    offset = _offset(info, before)
    while after - before > SECOND:
        middle = before + (after - before) // 2
        middle = middle.replace(microsecond=0)
        if _offset(info, middle) == offset:
            before = middle
        else:
            after = middle
    return after


def _offset(info: ZoneInfo, instant: datetime) -> timedelta:
    offset = instant.astimezone(info).utcoffset()
    return NO_SHIFT if offset is None else offset


def _suggestion(value: str) -> str:
    by_lower = {name.lower(): name for name in known_zones()}
    close = difflib.get_close_matches(value[:LONGEST_ZONE].lower(), by_lower, n=1)
    return f": did you mean {by_lower[close[0]]}?" if close else ": use a name such as Europe/Berlin, or UTC"
