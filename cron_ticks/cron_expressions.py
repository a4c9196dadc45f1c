"""Cron expressions: what may be written, and which wall-clock times it means. No zone, no clock.

Every field is checked here, because croniter takes more than cron can mean; croniter then says which values it has.
"""

import re
from bisect import bisect_left
from calendar import monthrange
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from functools import cached_property, lru_cache

from croniter import croniter

from cron_ticks.checks import LATEST, shown
from cron_ticks.errors import InvalidInputError

LONGEST_EXPRESSION = 256
SHOWN = 40  # characters of what is refused
SECOND = timedelta(seconds=1)
SATURDAY, SUNDAY = 6, 0
LARGEST_NEAREST = 28  # W: of a later day it isn't clear what it means in a shorter month
LONGEST_MONTHS = {month: monthrange(2000, month)[1] for month in range(1, 13)}  # of a leap year
MACROS = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
MONTH_NAMES = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
WEEKDAY_NAMES = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")


@dataclass(frozen=True)
class _Field:
    name: str
    low: int
    high: int
    names: dict[str, int]


_SECOND = _Field("second", 0, 59, {})
_MINUTE = _Field("minute", 0, 59, {})
_HOUR = _Field("hour", 0, 23, {})
_DAY = _Field("day of month", 1, 31, {})
_MONTH = _Field("month", 1, 12, {name: number for number, name in enumerate(MONTH_NAMES, 1)})
_WEEKDAY = _Field("day of week", 0, 7, {name: number for number, name in enumerate(WEEKDAY_NAMES)})
FIELDS = (_MINUTE, _HOUR, _DAY, _MONTH, _WEEKDAY)

_ITEM = re.compile(r"(?:\*|(?P<low>[A-Za-z0-9]+)(?:-(?P<high>[A-Za-z0-9]+))?)(?:/(?P<step>[0-9]+))?")
_NEAREST = re.compile(r"([0-9]{1,2})W|W([0-9]{1,2})")
_NTH = re.compile(r"([A-Z]{3}|[0-9])#([0-9])")
_LAST = re.compile(r"([A-Z]{3}|[0-9])L|L([A-Z]{3}|[0-9])")


@dataclass(frozen=True)
class LastDay:
    """`L`: the last day of the month, or with `working`, `LW`, its last from Monday to Friday."""

    working: bool = False

    def days(self, first: int, length: int) -> list[int]:
        """The day, in a month of `length` days whose first is the weekday `first`."""
        weekday = (first + length - 1) % 7
        back = {SATURDAY: 1, SUNDAY: 2}.get(weekday, 0) if self.working else 0
        return [length - back]


@dataclass(frozen=True)
class NearestWorkingDay:
    """`15W`: the day from Monday to Friday that is nearest to the 15th, in the same month."""

    day: int

    def days(self, first: int, length: int) -> list[int]:
        """The day."""
        weekday = (first + self.day - 1) % 7
        if weekday == SATURDAY:
            return [self.day - 1 if self.day > 1 else self.day + 2]
        if weekday == SUNDAY:
            return [self.day + 1 if self.day < length else self.day - 2]
        return [self.day]


@dataclass(frozen=True)
class NthWeekday:
    """`5#2`: the second Friday. `5L`: the last one, whose number is None."""

    weekday: int
    number: int | None

    def days(self, first: int, length: int) -> list[int]:
        """The day, unless the month has fewer of them."""
        all_of_them = range(1 + (self.weekday - first) % 7, length + 1, 7)
        chosen = all_of_them[-1:] if self.number is None else all_of_them[self.number - 1 : self.number]
        return list(chosen)


Extension = LastDay | NearestWorkingDay | NthWeekday


@dataclass(frozen=True, eq=False)
class CronExpression:
    """What an expression means on a wall clock that never jumps."""

    text: str
    seconds: tuple[int, ...]
    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: frozenset[int]
    months: tuple[int, ...]
    weekdays: frozenset[int]  # Sunday is 0
    extensions: tuple[Extension, ...]  # of one of the day fields; the other one is `*` then
    either_day: bool  # both day fields are restricted: one that matches is enough
    wildcard: bool  # minute or hour starts with `*`
    has_seconds: bool

    def wall_times(self, start: datetime) -> Iterator[datetime]:
        """The times that match, from `start` on, in their order."""
        start = _whole_second(start)
        for day in self._dates(start.date()):
            midnight = datetime.combine(day, time.min)
            for second in self._seconds_of_day((start - midnight) // SECOND):
                yield midnight + timedelta(seconds=second)

    def count(self, start: datetime, end: datetime) -> int:
        """How many times in [start, end) match. What it costs doesn't depend on how many there are."""
        if end <= start:
            return 0
        start, end = _whole_second(start), _whole_second(end)
        days = self._count_dates(start.date(), end.date())
        return days * self._rank(86_400) + self._rank_on(end) - self._rank_on(start)

    @cached_property
    def shortest_gap(self) -> timedelta:
        """How far two times that match are apart at least, while no clock is changed; at most an hour."""
        if len(self.seconds) > 1:
            return timedelta(seconds=_closest(self.seconds, 60))
        if len(self.minutes) > 1:
            return timedelta(minutes=_closest(self.minutes, 60))
        return timedelta(hours=1)

    def _dates(self, start: date) -> Iterator[date]:
        """Dates that match, from `start` on."""
        first_month = start.month
        for year in range(start.year, LATEST.year + 1):  # some clocks are ahead
            for month in self.months[bisect_left(self.months, first_month) :]:
                least = start.day if (year, month) == (start.year, start.month) else 1
                for day in self._days_of(year, month):
                    if day >= least:
                        yield date(year, month, day)
            first_month = 1

    def _count_dates(self, start: date, end: date) -> int:
        """How many dates in [start, end) match."""
        total = 0
        for year in range(start.year, end.year + 1):
            for month in self.months:
                if (start.year, start.month) <= (year, month) <= (end.year, end.month):
                    days = self._days_of(year, month)
                    least = bisect_left(days, start.day) if (year, month) == (start.year, start.month) else 0
                    most = bisect_left(days, end.day) if (year, month) == (end.year, end.month) else len(days)
                    total += most - least
        return total

    def _days_of(self, year: int, month: int) -> tuple[int, ...]:
        monday_first, length = monthrange(year, month)
        return _days_of_month(self, (monday_first + 1) % 7, length)

    def _seconds_of_day(self, least: int) -> Iterator[int]:
        for hour in self.hours:
            if (hour + 1) * 3600 <= least:
                continue
            for minute in self.minutes:
                start = hour * 3600 + minute * 60
                if start + 60 <= least:
                    continue
                for second in self.seconds:
                    if start + second >= least:
                        yield start + second

    def _rank_on(self, moment: datetime) -> int:
        """How many of its date's times are before `moment`; none, if that date doesn't match."""
        if moment.month not in self.months or moment.day not in self._days_of(moment.year, moment.month):
            return 0
        return self._rank((moment - datetime.combine(moment, time.min)) // SECOND)

    def _rank(self, second_of_day: int) -> int:
        hour, minute, second = second_of_day // 3600, second_of_day // 60 % 60, second_of_day % 60
        rank = bisect_left(self.hours, hour) * len(self.minutes) * len(self.seconds)
        if hour in self.hours:
            rank += bisect_left(self.minutes, minute) * len(self.seconds)
            if minute in self.minutes:
                rank += bisect_left(self.seconds, second)
        return rank


@lru_cache(maxsize=8192)
def _days_of_month(expression: CronExpression, first: int, length: int) -> tuple[int, ...]:
    """Days that match in a month of `length` days whose first is the weekday `first`."""
    combine = any if expression.either_day else all
    found = {
        day
        for day in range(1, length + 1)
        if combine((day in expression.days, (first + day - 1) % 7 in expression.weekdays))
    }
    return tuple(sorted(found.union(*(extension.days(first, length) for extension in expression.extensions))))


def parse(text: str) -> CronExpression:
    """What an expression means, or an error that names the field and the reason."""
    if not isinstance(text, str):
        raise InvalidInputError("cron", f"must be a string, not {type(text).__name__}")
    if len(text) > LONGEST_EXPRESSION:
        raise InvalidInputError("cron", f"must have at most {LONGEST_EXPRESSION} characters, has {len(text)}")
    return _parse(text)


@lru_cache(maxsize=8192)
def _parse(text: str) -> CronExpression:
    fields = _split(text)
    has_seconds = len(fields) > len(FIELDS)
    seconds = _check_field(_SECOND, fields.pop(0)) if has_seconds else "0"
    day, weekday = fields[2], fields[4]
    of_month, of_week = _extensions(_DAY, day, weekday), _extensions(_WEEKDAY, weekday, day)
    plain = [_check_field(field, part) for field, part in zip(FIELDS, fields, strict=True)]
    minutes, hours, days, months, weekdays = _values(" ".join(part or "*" for part in plain))
    if of_week or not plain[2]:  # the other field's `*`, and what stands in for extensions, mean nothing
        days = []
    if of_month or not plain[4]:
        weekdays = []
    expression = CronExpression(
        text=text,
        seconds=tuple(_values(f"{seconds} * * * *")[0]),
        minutes=tuple(minutes),
        hours=tuple(hours),
        days=frozenset(days),
        months=tuple(months),
        weekdays=frozenset(weekdays),
        extensions=of_month + of_week,
        either_day=bool(of_month or of_week) or not (day.startswith("*") or weekday.startswith("*")),
        wildcard=fields[0].startswith("*") or fields[1].startswith("*"),
        has_seconds=has_seconds,
    )
    _must_match_some_day(expression)
    return expression


def check_cron(value: str) -> str:
    """An expression that can be followed, with single blanks."""
    parse(value)
    return " ".join(value.split())


def _split(text: str) -> list[str]:
    """The fields, in capitals; other letters than ASCII's stay what they are, because some have an ASCII capital."""
    text = text.strip(" \t")
    if text.startswith("@"):
        macro = text.lower() if text.isascii() else text
        if macro not in MACROS:
            raise InvalidInputError("cron", f"there is no {_quoted(text)}; there are {', '.join(MACROS)}")
        text = MACROS[macro]
    fields = [part.upper() if part.isascii() else part for part in re.split(r"[ \t]+", text)] if text else []
    if len(fields) not in (len(FIELDS), len(FIELDS) + 1):
        names = ", ".join(field.name for field in FIELDS)
        raise InvalidInputError(
            "cron", f"must have five fields ({names}), or six with seconds first; has {len(fields)}"
        )
    return fields


def _extensions(field: _Field, text: str, other: str) -> tuple[Extension, ...]:
    """What croniter shall not see: L, W and # of a day field, if the other one leaves them their meaning."""
    read = _day_extension if field is _DAY else _weekday_extension
    found = tuple(extension for item in text.split(",") if (extension := read(item)) is not None)
    if found and other != "*":
        rest = _WEEKDAY if field is _DAY else _DAY
        raise _refusal(
            field, text, f"an extension can't be combined with the {rest.name} {_quoted(other)}: write * there"
        )
    return found


def _day_extension(item: str) -> Extension | None:
    if item in ("L", "LW", "WL"):
        return LastDay(working=item != "L")
    match = _NEAREST.fullmatch(item)
    if match is None:
        return None
    day = int(match[1] or match[2])
    if not 1 <= day <= LARGEST_NEAREST:
        raise _refusal(
            _DAY,
            item,
            f"the day before W must be from 1 to {LARGEST_NEAREST}, which every month has; LW is the last one",
        )
    return NearestWorkingDay(day)


def _weekday_extension(item: str) -> Extension | None:
    if item == "L":
        raise _refusal(_WEEKDAY, item, "which day's last one? Write 5L for the last Friday")
    nth = _NTH.fullmatch(item)
    if nth is not None:
        number = int(nth[2])
        if not 1 <= number <= 5:  # noqa: PLR2004 - no month has more
            raise _refusal(_WEEKDAY, item, "the number after # must be from 1 to 5")
        return NthWeekday(_number(_WEEKDAY, item, nth[1]) % 7, number)
    last = _LAST.fullmatch(item)
    return None if last is None else NthWeekday(_number(_WEEKDAY, item, last[1] or last[2]) % 7, None)


def _check_field(field: _Field, text: str) -> str:
    """The field as croniter may see it: numbers, no range that it takes for another, and no extension."""
    read = {"day of month": _day_extension, "day of week": _weekday_extension}.get(field.name)
    items = [item for item in text.split(",") if read is None or read(item) is None]
    return ",".join(_check_item(field, item) for item in items)


def _check_item(field: _Field, item: str) -> str:
    match = _ITEM.fullmatch(item)
    if match is None:
        raise _refusal(field, item, _why_not(item))
    low, high, step = match["low"], match["high"], match["step"]
    first, last = field.low, field.high
    if low is not None:
        first = last = _number(field, item, low)
        if high is not None:
            last = _number(field, item, high)
            if last < first:
                raise _refusal(field, item, f"the range runs backwards: {_forwards(field, first, last)}")
        elif step is not None:
            raise _refusal(field, item, f"a step needs a range{_stepped(field, first, step)}")
    if step is None:
        return "*" if low is None else f"{first}-{last}" if last > first else str(first)
    most = last - first
    if not _fits(step, most):
        reason = f"the step must be from 1 to {most}" if most else "a step needs a longer range"
        raise _refusal(field, item, reason)
    return f"*/{int(step)}" if low is None else f"{first}-{last}/{int(step)}"


def _fits(step: str, most: int) -> bool:
    return len(step) <= 2 and 1 <= int(step) <= most  # noqa: PLR2004 - digits


def _stepped(field: _Field, first: int, step: str) -> str:
    return f": write {first}-{field.high}/{step}" if _fits(step, field.high - first) else ""


def _forwards(field: _Field, first: int, last: int) -> str:
    if field is _WEEKDAY:
        return f"write {first}-7" if last == 0 else f"write {first}-7,1-{last}"
    return f"write {first}-{field.high},{field.low}-{last}"


def _number(field: _Field, item: str, text: str) -> int:
    if text in field.names:
        return field.names[text]
    if not text.isdecimal():
        names = f" or {', '.join(field.names)}" if field.names else ""
        raise _refusal(field, item, f"{_quoted(text)} must be a number from {field.low} to {field.high}{names}")
    if len(text) > 2 or not field.low <= int(text) <= field.high:  # noqa: PLR2004 - digits
        raise _refusal(field, item, f"{_quoted(text)} must be from {field.low} to {field.high}")
    return int(text)


def _why_not(item: str) -> str:
    if not item:
        return "there is nothing before or after a comma"
    if not item.isascii():
        return "only ASCII digits and letters can be used"
    if item == "?":
        return "cron has no ?: write *"
    return "must be *, a number, a name or a range a-b; * and ranges may have a step /n"


def _values(plain: str) -> list[list[int]]:
    """The values of five fields, by croniter."""
    expanded, _ = croniter.expand(plain)
    # Days of the week run from 0 to 6 there: 7 has become 0.
    return [
        list(range(field.low, field.high + (field is not _WEEKDAY))) if "*" in values else sorted(map(int, values))
        for field, values in zip(FIELDS, expanded, strict=True)
    ]


def _must_match_some_day(expression: CronExpression) -> None:
    if expression.either_day:
        return
    if min(expression.days) > max(LONGEST_MONTHS[month] for month in expression.months):
        months = ", ".join(MONTH_NAMES[month - 1] for month in expression.months)
        raise InvalidInputError(
            "cron", f"day of month: {min(expression.days)} never comes in {months}, so it would never fire"
        )


def _refusal(field: _Field, item: str, reason: str) -> InvalidInputError:
    return InvalidInputError("cron", f"{field.name} {_quoted(item)}: {reason}")


def _quoted(text: str) -> str:
    return shown(text, SHOWN)


def _whole_second(moment: datetime) -> datetime:
    """This second, or if it has begun, the next."""
    return moment if moment.microsecond == 0 else moment.replace(microsecond=0) + SECOND


def _closest(values: tuple[int, ...], cycle: int) -> int:
    """The least distance between two values of a cycle."""
    following = (*values[1:], values[0] + cycle)
    return min(after - before for before, after in zip(values, following, strict=True))
