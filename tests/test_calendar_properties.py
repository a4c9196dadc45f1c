"""The calendar against a scan that looks at every minute: all zones, random expressions, random windows.

Windows lie mostly where a zone's clocks are changed. A failure shows the case; `seed` repeats a whole run.
"""

import random
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from importlib.resources import files
from itertools import chain, pairwise
from pathlib import Path
from typing import Literal
from zoneinfo import TZPATH, ZoneInfo

import pytest

from cron_ticks import cron_rules, zones
from cron_ticks.checks import LATEST as END
from cron_ticks.cron_expressions import parse
from cron_ticks.cron_rules import DST_FOLDS, DST_GAPS, CronRule
from cron_ticks.errors import InvalidInputError
from support.calendar_scan import MONTHS, WEEKDAYS, Matcher, matches_date, scan

MICROSECOND = timedelta(microseconds=1)
SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
ZONES = sorted(zones.known_zones())
EXPRESSIONS = 6  # for each window, because looking at a clock takes longer than matching what it shows
ASIDE = (timedelta(0), MICROSECOND, -MICROSECOND, SECOND, -SECOND, MINUTE, -MINUTE, HOUR, -HOUR)
MACROS = ("@hourly", "@daily", "@midnight", "@weekly", "@monthly", "@yearly", "@annually", "@Daily")


# Where clocks are changed, found without the product


def offset(zone: str, instant: datetime) -> timedelta:
    found = instant.astimezone(ZoneInfo(zone)).utcoffset()
    assert found is not None
    return found


def changes_between(zone: str, start: datetime, end: datetime, step: timedelta) -> list[datetime]:
    """Looks every `step`, then closer and closer."""
    if step < SECOND:
        return [end]
    found = []
    before = offset(zone, start)
    while start < end:
        following = min(start + step, end)
        after = offset(zone, following)
        if after != before:
            finer = max((following - start) // 60 // SECOND, 1) * SECOND if following - start > SECOND else SECOND / 2
            found += changes_between(zone, start, following, finer)
        start, before = following, after
    return found


@lru_cache(maxsize=10_000)
def changes_of(zone: str, year: int, step: timedelta = timedelta(hours=6)) -> tuple[datetime, ...]:
    """The first instants with a new offset, in a year."""
    start, end = datetime(year, 1, 1, tzinfo=UTC) - SECOND, datetime(year + 1, 1, 1, tzinfo=UTC) - SECOND
    return tuple(changes_between(zone, start, end, step))


def zone_file(zone: str) -> bytes:
    """What zoneinfo reads: the machine's file, else the package's."""
    paths = [path for folder in TZPATH if (path := Path(folder, zone)).is_file()]
    return paths[0].read_bytes() if paths else files("tzdata").joinpath("zoneinfo", *zone.split("/")).read_bytes()


@lru_cache(maxsize=1000)
def recorded_changes(zone: str) -> tuple[tuple[datetime, timedelta, timedelta], ...]:
    """All changes of the offset that a zone's file lists (RFC 8536), from 1970 on: when, from what, to what."""
    data = zone_file(zone)
    counts = struct.unpack(">6l", data[20:44])
    utc, standard, leaps, times, types, letters = counts
    second = 44 + times * 5 + types * 6 + letters + leaps * 8 + standard + utc  # the part with 64 bits
    *_, times, types, _ = struct.unpack(">6l", data[second + 20 : second + 44])
    body = data[second + 44 :]
    moments = struct.unpack(f">{times}q", body[: times * 8])
    numbers = body[times * 8 : times * 9]
    offsets = [struct.unpack(">lbB", body[at : at + 6])[0] for at in range(times * 9, times * 9 + types * 6, 6)]
    series = [offsets[0], *(offsets[number] for number in numbers)]
    return tuple(
        (EPOCH + timedelta(seconds=moment), timedelta(seconds=before), timedelta(seconds=after))
        for moment, (before, after) in zip(moments, pairwise(series), strict=True)
        if moment >= 0 and before != after
    )


def distinct_zones() -> list[str]:
    """One zone for each content: the others are links."""
    return sorted({zone_file(zone): zone for zone in ZONES}.values())


# Random expressions and windows


@dataclass(frozen=True)
class Window:
    zone: str
    start: datetime
    end: datetime
    has_seconds: bool
    wall: datetime  # what is likely to be worth matching


class Dice:
    """Random cases."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311 - no secret

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def instant(self, start: datetime, end: datetime) -> datetime:
        """Any microsecond in between, whole seconds more often."""
        moment = start + (end - start) * self.random.random()
        return moment if self.chance(0.2) else moment.replace(microsecond=0)

    def year(self) -> int:
        return self.random.randint(2000, 2040) if self.chance(0.8) else self.random.randint(1970, 2498)

    def moment(self, zone: str) -> datetime:
        """Mostly an instant at which clocks are changed."""
        year = self.year()
        changes = changes_of(zone, year)
        if not changes and self.chance(0.8):  # then at one of the zone's changes in another year, if there are any
            changes = tuple(moment for moment, _, _ in recorded_changes(zone))
        if changes and self.chance(0.9):
            return self.random.choice(changes)
        return self.instant(datetime(year, 1, 1, tzinfo=UTC), datetime(year + 1, 1, 1, tzinfo=UTC))

    def window(self) -> Window:
        zone, has_seconds = self.random.choice(ZONES), self.chance(0.25)
        moment = self.moment(zone)
        lengths = (10 * MINUTE, HOUR, 2 * HOUR) if has_seconds else (HOUR, 6 * HOUR, 30 * HOUR, 72 * HOUR)
        length = self.random.choices(lengths, (3, 5, 2) if has_seconds else (2, 3, 4, 1))[0]
        start = self.random.choice((moment, moment - length * self.random.random(), moment - length / 2))
        start = self.aside(start if self.chance(0.2) else start.replace(microsecond=0))
        wall = moment.replace(tzinfo=None) + offset(zone, moment - self.random.choice((SECOND, timedelta(0))))
        if self.chance(0.7):
            wall += timedelta(minutes=self.random.randint(-90, 90))
        return Window(zone, max(start, EPOCH), max(start + length, EPOCH), has_seconds, wall)

    def aside(self, moment: datetime) -> datetime:
        return moment + self.random.choice(ASIDE)

    def expression(self, window: Window) -> str:
        if not window.has_seconds and self.chance(0.03):
            return self.random.choice(MACROS)
        wall = window.wall
        day, weekday = self.day_fields(wall)
        fields = [
            self.field(0, 59, wall.minute),
            self.field(0, 23, wall.hour),
            day,
            "*" if self.chance(0.75) else self.field(1, 12, wall.month, MONTHS, first=1),
            weekday,
        ]
        if window.has_seconds:
            fields.insert(0, self.field(0, 59, self.random.choice((0, 30, 59))))
        return self.random.choice((" ", "  ", "\t")).join(fields)

    def day_fields(self, wall: datetime) -> tuple[str, str]:
        day, weekday = self.field(1, 31, wall.day), self.field(0, 7, wall.isoweekday(), WEEKDAYS)
        choice = self.random.random()
        if choice < 0.5:
            return "*", "*"
        if choice < 0.6:
            return day, "*"
        if choice < 0.7:
            return "*", weekday
        if choice < 0.85:
            return day, weekday
        if choice < 0.925:
            return self.listed(self.day_extension(wall), day), "*"
        return "*", self.listed(self.weekday_extension(wall), weekday)

    def listed(self, extension: str, field: str) -> str:
        """An extension, sometimes in a list with other items."""
        if self.chance(0.5):
            return self.cased(extension)
        return ",".join(self.random.sample((self.cased(extension), field), 2))

    def day_extension(self, wall: datetime) -> str:
        near = min(max(wall.day + self.random.randint(-2, 2), 1), 28)
        return self.random.choice(("L", "LW", "WL", f"{near}W", f"W{near}", f"{self.random.randint(1, 28)}W"))

    def weekday_extension(self, wall: datetime) -> str:
        number = wall.isoweekday() if self.chance(0.7) else self.random.randint(0, 7)
        weekday = self.random.choice((str(number), WEEKDAYS[number % 7]))
        nth = (wall.day + 6) // 7 if self.chance(0.7) else self.random.randint(1, 5)
        return self.random.choice((f"{weekday}#{nth}", f"{weekday}L", f"L{weekday}"))

    def field(self, low: int, high: int, near: int, names: list[str] | None = None, first: int = 0) -> str:
        if near > low and self.chance(0.1):  # two neighbours: before a change and after it
            return self.random.choice((f"{near - 1}-{near}", f"{near - 1},{near}"))
        items = self.random.choices((1, 2, 3), (8, 2, 1))[0]
        return ",".join(self.item(low, high, near, names or [], first=first) for _ in range(items))

    def item(self, low: int, high: int, near: int, names: list[str], *, first: int) -> str:
        kind = self.random.choices(("*", "*/", "value", "-", "-/"), (3, 2, 6, 3, 2))[0]
        if kind == "*":
            return "*"
        if kind == "*/":
            return f"*/{self.random.randint(1, high - low)}"
        value = near if self.chance(0.6) else self.random.randint(low, high)
        if kind == "value":
            return self.named(value, names, first)
        start, end = sorted((value, self.random.randint(low, high)))
        if start == end or kind == "-":
            return f"{self.named(start, names, first)}-{self.named(end, names, first)}"
        return (
            f"{self.named(start, names, first)}-{self.named(end, names, first)}/{self.random.randint(1, end - start)}"
        )

    def named(self, value: int, names: list[str], first: int) -> str:
        if 0 <= value - first < len(names) and self.chance(0.5):
            return self.cased(names[value - first])
        return f"{value:02}" if self.chance(0.1) else str(value)

    def cased(self, text: str) -> str:
        return self.random.choice((text, text.lower(), text.title()))

    def rule(self, window: Window) -> CronRule:
        """One that can be followed; one that is refused must really never match."""
        while True:
            expression = self.expression(window)
            if not refused(expression):
                return CronRule(expression, window.zone, self.random.choice(DST_GAPS), self.random.choice(DST_FOLDS))


def refused(expression: str) -> bool:
    """Whether it is; of what is made here only dates that never come may be."""
    try:
        parse(expression)
    except InvalidInputError as error:
        reason = str(error)
    else:
        return False
    assert "never" in reason, (expression, reason)
    assert not ever_matches(expression), expression
    return True


def ever_matches(expression: str) -> bool:
    """In 28 years every date falls on every weekday."""
    first = datetime(2000, 1, 1, tzinfo=UTC).date()
    return any(matches_date(Matcher(expression), first + number * DAY) for number in range(28 * 366))


def scanned(rule: CronRule, start: datetime, end: datetime) -> list[datetime]:
    return scan(rule.expression, rule.zone, start, end, dst_gap=rule.dst_gap, dst_fold=rule.dst_fold)


def scanned_years(rule: CronRule, start: datetime, end: datetime) -> list[datetime]:
    """As `scanned`, but around the dates that match only: for windows of years."""
    matcher, found = Matcher(rule.expression), set()
    for number in range((end - start).days + 5):
        day = (start - 2 * DAY).date() + number * DAY
        if matches_date(matcher, day):
            midnight = datetime(day.year, day.month, day.day, tzinfo=UTC)
            found.update(scanned(rule, max(midnight - DAY, start), min(midnight + 2 * DAY, end)))
    return sorted(found)


def new_seed(request: pytest.FixtureRequest) -> int:
    """Always the same cases in `make test`, others each time in `make soak`."""
    return random.SystemRandom().randrange(10**9) if request.config.getoption("--soak") else 6


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> Iterator[int]:
    number, started = new_seed(request), time.monotonic()
    yield number
    print(f"\n{request.node.name}: seed {number}, {time.monotonic() - started:.1f} s", end=" ")  # noqa: T201


# The properties


@pytest.mark.soak(small=1_200, full=21_000)
def test_every_occurrence_is_the_one_of_the_scan(seed: int, size: int) -> None:
    dice, cases, fired, zones_seen = Dice(seed), 0, 0, set()
    while cases < size:
        window = dice.window()
        for _ in range(EXPRESSIONS):
            rule = dice.rule(window)
            expected = scanned(rule, window.start, window.end)
            case = f"seed {seed}: {rule}, {window.start.isoformat()} to {window.end.isoformat()}"
            compare(rule, window, expected, case)
            look_aside(dice, rule, window, expected, case)
            cases, fired = cases + 1, fired + bool(expected)
        zones_seen.add(window.zone)
    print(f"\n{cases} cases, {fired} of them with occurrences, in {len(zones_seen)} zones", end=" ")  # noqa: T201
    assert fired > cases / 3


def compare(rule: CronRule, window: Window, expected: list[datetime], case: str) -> None:
    assert rule.occurrences(window.start, window.end) == expected, case
    assert rule.count(window.start, window.end) == len(expected), case
    assert all(earlier < later for earlier, later in pairwise(expected)), case


def look_aside(dice: Dice, rule: CronRule, window: Window, expected: list[datetime], case: str) -> None:
    """The same question for one instant, one number and one limit."""
    moments = [dice.instant(window.start, window.end), window.start]
    if expected:
        moments.append(max(dice.aside(dice.random.choice(expected)), window.start))
        number = dice.random.randrange(len(expected))
        assert rule.nth(window.start, number) == expected[number], case
        assert rule.occurrences(window.start, window.end, most=number) == expected[:number], case
    for moment in moments:
        found = rule.occurrence_at_or_after(moment)
        following = next((instant for instant in expected if instant >= moment), None)
        if following is None:
            assert found is None or found >= max(moment, window.end), (case, moment)
        else:
            assert found == following, (case, moment)


@pytest.mark.soak(small=20, full=250)
def test_rare_occurrences_are_those_of_the_scan_over_years(seed: int, size: int) -> None:
    """What is due in years is found at once, and nothing before it is passed over."""
    dice, occurrences = Dice(seed), 0
    for _ in range(size):
        window = dice.window()
        rule = CronRule(rare_expression(dice, window), window.zone, dice.random.choice(DST_GAPS))
        start = max(window.start - 400 * DAY * dice.random.random(), EPOCH)
        end = min(window.end + 800 * DAY, END - DAY)
        expected = scanned_years(rule, start, end)
        case = f"seed {seed}: {rule}, {start.isoformat()} to {end.isoformat()}"
        assert rule.occurrences(start, end) == expected, case
        assert rule.count(start, end) == len(expected), case
        assert not expected or rule.occurrence_at_or_after(start) == expected[0], case
        assert [rule.nth(start, number) for number in range(len(expected))] == expected, case
        occurrences += len(expected)
    print(f"\n{size} cases, {occurrences} occurrences", end=" ")  # noqa: T201


def rare_expression(dice: Dice, window: Window) -> str:
    """Once to thrice a year or so; at least once in two."""
    wall = window.wall
    days = (
        f"{min(wall.day, 28)} {wall.month} *",
        f"* {wall.month} {wall.isoweekday()}#{min((wall.day + 6) // 7, 4)}",
        f"{dice.day_extension(wall)} {wall.month} *",
        f"L */{dice.random.randint(3, 11)} *",
    )
    return f"{wall.minute} {wall.hour} {dice.random.choice(days)}"


@pytest.mark.soak(small=100, full=2_000)
def test_parts_of_a_window_join(seed: int, size: int) -> None:
    """From minutes, which come from the cache's pages, to years."""
    dice = Dice(seed)
    for _ in range(size):
        window = dice.window()
        rule = dice.rule(window)
        before = dice.random.choice((10 * MINUTE, HOUR, DAY, 3 * DAY))
        marks = sorted([max(window.start - before, EPOCH), window.start, dice.instant(window.start, window.end)])
        whole = rule.occurrences(marks[0], marks[-1])
        parts = [rule.occurrences(start, end) for start, end in pairwise(marks)]
        assert list(chain.from_iterable(parts)) == whole, (rule, marks)
        distant = max(window.start - dice.random.randint(1, 4000) * DAY, EPOCH)
        counts = [rule.count(start, end) for start, end in pairwise([distant, *marks[1:]])]
        assert sum(counts) == rule.count(distant, marks[-1]), (rule, distant, marks)
        assert all(earlier < later for earlier, later in pairwise(whole)), (rule, marks)


@pytest.mark.soak(small=40, full=600)
def test_what_was_asked_before_changes_no_answer(seed: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of pages, with everything in it, with almost nothing in it, and without it."""
    dice = Dice(seed)
    for _ in range(size):
        window = dice.window()
        questions = [question(dice, window) for _ in range(12)]
        cron_rules._page.cache_clear()
        answers = [answer(*asked) for asked in questions]
        order = dice.random.sample(range(len(questions)), len(questions))
        assert [answer(*questions[number]) for number in order] == [answers[number] for number in order]
        cron_rules._page.cache_clear()
        assert [answer(*questions[number]) for number in order] == [answers[number] for number in order]
        with monkeypatch.context() as patch:
            patch.setattr(cron_rules, "_page", cron_rules._page.__wrapped__)
            assert [answer(*asked) for asked in questions] == answers


Kind = Literal["occurrences", "count", "next"]


def question(dice: Dice, window: Window) -> tuple[CronRule, Kind, datetime, datetime]:
    kinds: tuple[Kind, ...] = ("occurrences", "count", "next")
    start = dice.aside(dice.instant(window.start, window.end))
    length = dice.random.choice((SECOND, 7 * MINUTE, 50 * MINUTE, HOUR, 90 * MINUTE))
    return dice.rule(window), dice.random.choice(kinds), max(start, EPOCH), max(start, EPOCH) + length


def answer(rule: CronRule, kind: Kind, start: datetime, end: datetime) -> list[datetime] | int | datetime | None:
    if kind == "occurrences":
        return rule.occurrences(start, end)
    return rule.count(start, end) if kind == "count" else rule.occurrence_at_or_after(start)


@pytest.mark.soak(small=60, full=1_000)
def test_the_last_day_is_as_the_others(seed: int, size: int) -> None:
    """The calendar ends with 2499 in UTC, wherever the clocks are then."""
    dice = Dice(seed)
    for _ in range(size):
        zone = dice.random.choice(ZONES)
        window = Window(zone, END - dice.random.randint(1, 30) * HOUR, END, False, END.replace(tzinfo=None))  # noqa: FBT003
        rule = dice.rule(window)
        expected = scanned(rule, window.start, END)
        compare(rule, window, expected, str((rule, window.start)))
        found = rule.occurrence_at_or_after(window.start)
        assert found == (expected[0] if expected else None), (rule, window.start)


WEEKDAY_EXTENSIONS = [f"{day}{rest}" for day in range(8) for rest in ("#1", "#2", "#3", "#4", "#5", "L")]


@pytest.mark.parametrize("day", ["L", "LW", *(f"{day}W" for day in range(1, 29))])
def test_extension_of_the_day_of_month_in_every_kind_of_month(day: str) -> None:
    compare_months(f"0 0 {day} * *")


@pytest.mark.parametrize("weekday", WEEKDAY_EXTENSIONS)
def test_extension_of_the_day_of_week_in_every_kind_of_month(weekday: str) -> None:
    compare_months(f"0 0 * * {weekday}")


def compare_months(expression: str) -> None:
    for start, end in kinds_of_month():
        days = [start + number * DAY for number in range((end - start).days)]
        expected = [day for day in days if matches_date(Matcher(expression), day.date())]
        assert CronRule(expression, "UTC").occurrences(start, end) == expected, start


@lru_cache(maxsize=1)
def kinds_of_month() -> list[tuple[datetime, datetime]]:
    """A month of each length that begins with each weekday."""
    firsts = [datetime(year, month, 1, tzinfo=UTC) for year in range(2000, 2028) for month in range(1, 13)]
    found = {((end - start).days, start.weekday()): (start, end) for start, end in pairwise(firsts)}
    assert len(found) == 4 * 7
    return list(found.values())


@pytest.mark.parametrize("expression", ["0 0 *,L * *", "0 0 L,* * *", "0 0 * * *,5L", "0 0 * * 1#2,*"])
def test_star_beside_an_extension_is_every_day(expression: str) -> None:
    """A list is a union."""
    start, end = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 11, tzinfo=UTC)
    rule = CronRule(expression, "UTC")
    assert scanned(rule, start, end) == [start + number * DAY for number in range(10)]
    assert rule.occurrences(start, end) == scanned(rule, start, end)


@pytest.mark.parametrize(
    ("expression", "start", "number"),
    [("0 0 1 1 *", datetime(2400, 1, 1, tzinfo=UTC), 80), ("0 0 29 2 *", datetime(2026, 1, 1, tzinfo=UTC), 60)],
)
def test_nth_reaches_as_far_as_the_calendar(expression: str, start: datetime, number: int) -> None:
    rule = CronRule(expression, "UTC")
    assert rule.nth(start, number) == rule.occurrences(start, END)[number]
    last = rule.count(start, END) - 1
    assert rule.nth(start, last) == rule.occurrences(start, END)[last]
    with pytest.raises(ValueError, match="no occurrence"):
        rule.nth(start, last + 1)


# What is assumed of zones


def test_no_zone_changes_its_clocks_twice_within_a_sample() -> None:
    """The closest changes are almost a week apart. First those that the files list, then those by their last rule."""
    recorded = ((pair, zone) for zone in distinct_zones() for pair in pairwise(recorded_changes(zone)))
    distance, zone = min((later[0] - earlier[0], zone) for (earlier, later), zone in recorded)
    assert distance > 6 * DAY, zone
    assert distance > zones.SAMPLE
    for zone in {zone_file(zone).rsplit(b"\n", 2)[1]: zone for zone in ZONES}.values():
        later_changes = changes_of(zone, 2039, HOUR)
        assert len(later_changes) in {0, 2, 4}, zone  # 4: with Ramadan
        assert all(later - earlier > 6 * DAY for earlier, later in pairwise(later_changes)), zone


@pytest.mark.soak(small=25, full=1_000)
def test_all_changes_that_files_list_are_found(seed: int, size: int) -> None:
    """In `make soak` in all zones."""
    dice, compared = Dice(seed), 0
    names = distinct_zones()
    for zone in dice.random.sample(names, min(size, len(names))):
        recorded = [change for change in recorded_changes(zone) if change[0].year <= 2040]
        until = recorded[-1][0].year if recorded else 1969
        found = [change for year in range(1970, until + 1) for change in zones._changes(zone, year)]
        listed = [(change.at, change.before, change.after) for change in found if change.at <= recorded[-1][0]]
        assert listed == recorded, zone
        compared += len(recorded)
    print(f"\n{compared} changes", end=" ")  # noqa: T201


@pytest.mark.soak(small=25, full=1_000)
def test_all_changes_that_a_clock_shows_are_found(seed: int, size: int) -> None:
    """Every hour of a year is looked at."""
    dice = Dice(seed)
    for _ in range(size):
        zone, year = dice.random.choice(ZONES), dice.year()
        found = zones._changes(zone, year)
        assert tuple(change.at for change in found) == changes_of(zone, year, HOUR), (zone, year)
        assert all(change.before == offset(zone, change.at - SECOND) for change in found), (zone, year)
        assert all(change.after == offset(zone, change.at) for change in found), (zone, year)
