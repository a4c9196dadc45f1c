"""The calendar's contract once more, as literally as it can be written: every minute is looked at.

It shares nothing with the product but the zone database: not the parser, not the search for a zone's changes. What an
expression may contain is not checked here: it must be a valid one.
"""

from calendar import monthrange
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import cached_property, lru_cache
from typing import NamedTuple
from zoneinfo import ZoneInfo

SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
NONE = timedelta(0)
SHORTHANDS = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * SUN",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 JAN *",
    "@annually": "0 0 1 JAN *",
}
MONTHS = ["JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"]
WEEKDAYS = ["SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"]

DayTest = Callable[[date], bool]


@dataclass(frozen=True)
class Matcher:
    """An expression, as a question to a wall clock."""

    text: str

    @cached_property
    def fields(self) -> list[str]:
        """Second, minute, hour, day of month, month, day of week."""
        fields = SHORTHANDS.get(self.text.strip().lower(), self.text).upper().split()
        return fields if self.has_seconds else ["0", *fields]

    @cached_property
    def has_seconds(self) -> bool:
        """Whether there are six fields."""
        return len(self.text.split()) == 6

    @cached_property
    def wildcard(self) -> bool:
        """Whether minute or hour starts with `*`."""
        return self.fields[1][0] == "*" or self.fields[2][0] == "*"

    @cached_property
    def times(self) -> tuple[set[int], set[int], set[int]]:
        """Hours, minutes and seconds."""
        second, minute, hour = self.fields[:3]
        return values(hour, 0, 23), values(minute, 0, 59), values(second, 0, 59)

    def matches(self, wall: datetime) -> bool:
        """Whether it means this second."""
        hours, minutes, seconds = self.times
        if wall.minute not in minutes or wall.hour not in hours or wall.second not in seconds:
            return False
        return matches_date(self, wall.date())


@lru_cache(maxsize=100_000)
def matches_date(matcher: Matcher, day: date) -> bool:
    """Both day fields must match; if neither starts with `*`, one is enough."""
    _, _, _, days, months, weekdays = matcher.fields
    if day.month not in values(months, 1, 12, MONTHS, first=1):
        return False
    answers = any(test(day) for test in day_tests(days)), any(test(day) for test in weekday_tests(weekdays))
    if days[0] == "*" or weekdays[0] == "*":
        return all(answers)
    return any(answers)


def day_tests(field: str) -> list[DayTest]:
    """One question for each item of the day of month."""
    return [day_test(item) for item in field.split(",")]


def day_test(item: str) -> DayTest:
    """What an item of the day of month asks."""
    if item == "L":
        return lambda day: day.day == length(day)
    if item in {"LW", "WL"}:
        return lambda day: day.day == max(working_days(day))
    if "W" in item:
        wanted = int(item.replace("W", ""))
        return lambda day: day.day == min(working_days(day), key=lambda working: abs(working - wanted))
    allowed = values(item, 1, 31)
    return lambda day: day.day in allowed


def weekday_tests(field: str) -> list[DayTest]:
    """One question for each item of the day of week."""
    return [weekday_test(item) for item in field.split(",")]


def weekday_test(item: str) -> DayTest:
    """What an item of the day of week asks."""
    if "#" in item:
        name, number = item.split("#")
        wanted = value(name, WEEKDAYS, 0) % 7
        return lambda day: day.isoweekday() % 7 == wanted and (day.day + 6) // 7 == int(number)
    if item not in WEEKDAYS and (item[0] == "L" or item[-1] == "L"):
        wanted = value(item[1:] if item[0] == "L" else item[:-1], WEEKDAYS, 0) % 7
        return lambda day: day.isoweekday() % 7 == wanted and day.day + 7 > length(day)
    allowed = {number % 7 for number in values(item, 0, 7, WEEKDAYS)}
    return lambda day: day.isoweekday() % 7 in allowed


def length(day: date) -> int:
    """Of its month."""
    return monthrange(day.year, day.month)[1]


def working_days(day: date) -> list[int]:
    """From Monday to Friday, in its month."""
    return [number for number in range(1, length(day) + 1) if day.replace(day=number).isoweekday() <= 5]


@lru_cache(maxsize=100_000)
def _values(field: str, low: int, high: int, names: tuple[str, ...], first: int) -> set[int]:
    found: set[int] = set()
    for item in field.split(","):
        span, _, step = item.partition("/")
        start, dash, end = span.partition("-")
        if start == "*":
            bounds = low, high
        else:
            bounds = value(start, names, first), value(end if dash else start, names, first)
        found.update(range(bounds[0], bounds[1] + 1, int(step or 1)))
    return found


def values(field: str, low: int, high: int, names: list[str] | None = None, first: int = 0) -> set[int]:
    """The numbers that a field stands for."""
    return _values(field, low, high, tuple(names or ()), first)


def value(text: str, names: list[str] | tuple[str, ...], first: int) -> int:
    """A number or a name."""
    return names.index(text) + first if text in names else int(text)


class Tick(NamedTuple):
    """What the clock on the wall shows at an instant, and what was skipped just before it."""

    instant: datetime
    wall: datetime  # in the zone
    skipped: timedelta  # by a jump of the clock at this very instant; negative if it was set back


def scan(
    expression: str,
    zone: str,
    start: datetime,
    end: datetime,
    *,
    dst_gap: str = "fire",
    dst_fold: str = "first",
    step: timedelta | None = None,
) -> list[datetime]:
    """The instants in [start, end) at which a schedule fires.

    It looks at every minute, or with six fields at every second, or every `step`, and always at every second where
    the zone's clocks don't show whole minutes or are about to be changed.
    """
    matcher = Matcher(expression)
    if step is None:
        step = SECOND if matcher.has_seconds else MINUTE
    _, minutes, seconds = matcher.times
    return [
        tick.instant
        for tick in ticks(zone, start, end, step)
        if (tick.skipped or (tick.wall.minute in minutes and tick.wall.second in seconds))  # most are not: be quick
        and start <= tick.instant < end
        and fires(matcher, tick, dst_gap=dst_gap, dst_fold=dst_fold)
    ]


@lru_cache(maxsize=2)
def ticks(zone: str, start: datetime, end: datetime, step: timedelta) -> tuple[Tick, ...]:
    """What the clock shows at each instant; it may begin a little before `start`. Kept for the next expression."""
    info, found = ZoneInfo(zone), []
    begin = start.astimezone(UTC).replace(second=0, microsecond=0)
    previous = offset_of((begin - SECOND).astimezone(info))
    for instant, wall in instants(info, begin, end, step):
        offset = offset_of(wall)
        found.append(Tick(instant, wall, offset - previous))
        previous = offset
    return tuple(found)


def instants(info: ZoneInfo, begin: datetime, end: datetime, step: timedelta) -> Iterator[tuple[datetime, datetime]]:
    """Every `step`, with what the clock shows; seconds where a step would be too coarse."""
    instant, wall = begin, begin.astimezone(info)
    while instant < end:
        following = instant + step
        next_wall = following.astimezone(info)
        yield instant, wall
        if step > SECOND and (wall.second or offset_of(wall) != offset_of(next_wall)):
            between = (instant + number * SECOND for number in range(1, step // SECOND))
            yield from ((moment, moment.astimezone(info)) for moment in between)
        instant, wall = following, next_wall


def offset_of(wall: datetime) -> timedelta:
    """How far the clock is from UTC."""
    offset = wall.utcoffset()
    assert offset is not None
    return offset


def fires(matcher: Matcher, tick: Tick, *, dst_gap: str, dst_fold: str) -> bool:
    """The rules of the contract, one after the other."""
    matches = matcher.matches(tick.wall)
    if matcher.wildcard:
        return matches
    if matches and dst_fold in passes(tick.wall):
        return True
    return tick.skipped > NONE and dst_gap == "fire" and skipped_match(matcher, tick)


def skipped_match(matcher: Matcher, tick: Tick) -> bool:
    """Whether the clock has jumped over a second that matches."""
    wall = tick.wall.replace(tzinfo=None)
    return any(matcher.matches(wall - second * SECOND) for second in range(tick.skipped // SECOND, 0, -1))


def passes(wall: datetime) -> set[str]:
    """Which choices of `dst_fold` take what the clock shows, in this pass."""
    if wall.replace(fold=0).utcoffset() == wall.replace(fold=1).utcoffset():  # there is only one
        return {"first", "second", "both"}
    return {"both", "second" if wall.fold else "first"}
