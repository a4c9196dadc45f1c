"""describe(): exact wording; and what a line says, read back by a reader of its own, is what the expression means."""

import re
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, timezone
from functools import cache
from itertools import product, takewhile
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import cron_ticks
from cron_ticks.cron_expressions import CronExpression, parse
from cron_ticks.cron_rules import CronRule
from cron_ticks.descriptions import LONGEST_LINE, MONTHS, WEEKDAYS, describe, describe_rule
from cron_ticks.errors import InvalidInputError
from cron_ticks.occurrences import IntervalRule, OneOffRule
from cron_ticks.zones import known_zones

LONGEST_OF_ALL = LONGEST_LINE + 15
LONGEST_ZONE = max(known_zones(), key=len)
START = datetime(2026, 1, 1, tzinfo=UTC)

WORDING = {
    # minutes
    "* * * * *": "every minute",
    "0-59 * * * *": "every minute",
    "*/1 0-23 1-31 1-12 0-7": "every minute",
    "*/15 * * * *": "every 15 minutes",
    "0,30 * * * *": "every 30 minutes",
    "0 * * * *": "every hour at minute 0",
    "30 * * * *": "every hour at minute 30",
    "*/7 * * * *": "every hour at minutes 0, 7, 14 … 56",
    "*/40 * * * *": "every hour at minutes 0 and 40",
    "5-59/15 * * * *": "every hour at minutes 5, 20, 35 and 50",
    "5-59/10 * * * *": "every hour at minutes 5, 15, 25 … 55",
    "1-59/2 * * * *": "every hour at minutes 1, 3, 5 … 59",
    "0-10 * * * *": "every hour at minutes 0 to 10",
    "10-20,25,40-50 * * * *": "every hour at minutes 10 to 20, 25 and 40 to 50",
    "1,2,4,7,8,12,13,17,22,29,31,38,41 * * * *": "every hour at minutes 1, 2, 4, 7, 8, 12, 13, 17 and 5 more",
    "1,4,7,9,12,14,17,20,30-40 * * * *": "every hour at minutes 1, 4, 7, 9, 12, 14, 17, 20 and 30 to 40",
    "1,4,7,9,12,14,17,20,30-40,50 * * * *": "every hour at minutes 1, 4, 7, 9, 12, 14, 17, 20 and 12 more",
    # hours
    "30 2 * * *": "at 02:30 every day",
    "30 9,17 * * 1-5": "at 09:30 and 17:30, from Monday to Friday",
    "0,30 9,17 * * *": "at 09:00, 09:30, 17:00 and 17:30 every day",
    "0 */6 * * *": "at 00:00, 06:00, 12:00 and 18:00 every day",
    "0 */2 * * *": "every 2 hours from 00:00 to 22:00 every day",
    "0 */5 * * *": "every 5 hours from 00:00 to 20:00 every day",
    "15 1-23/2 * * *": "every 2 hours from 01:15 to 23:15 every day",
    "30 9-17 * * *": "every hour from 09:30 to 17:30 every day",
    "0 0-8,18-23 * * *": "every hour from 00:00 to 08:00 and from 18:00 to 23:00 every day",
    "0 9,12,16-18 * * *": "at 09:00, 12:00, 16:00, 17:00 and 18:00 every day",
    "0 9,12,14,16-18 * * *": "at 09:00, 12:00, 14:00, 16:00, 17:00 and 18:00 every day",
    "0 0,2,3,5,7-9,11,13,17,22,23 * * *": (
        "at 00:00, 02:00, 03:00, 05:00, 07:00, 08:00, 09:00, 11:00 and 4 more times every day"
    ),
    "* 1 * * *": "every minute from 01:00 to 01:59 every day",
    "*/15 9-17 * * MON-FRI": "every 15 minutes from 09:00 to 17:45, from Monday to Friday",
    "*/5 9,17 * * *": "every 5 minutes from 09:00 to 09:55 and from 17:00 to 17:55 every day",
    "*/15 */2 * * *": "every 15 minutes in hours 0, 2, 4 … 22 every day",
    "7,37 9-17 * * *": "every hour at minutes 7 and 37 from 09:07 to 17:37 every day",
    "7,37 */2 * * *": "at minutes 7 and 37 of hours 0, 2, 4 … 22 every day",
    "7,9,11 3,8 * * *": "at minutes 7, 9 and 11 of hours 3 and 8 every day",
    "7-15/2 3 * * *": "at minutes 7, 9, 11 … 15 of hour 3 every day",
    # seconds
    "* * * * * *": "every second",
    "*/10 * * * * *": "every 10 seconds",
    "0 */5 * * * *": "every 5 minutes",
    "30 * * * * *": "every minute at second 30",
    "30 */15 * * * *": "every 15 minutes at second 30",
    "*/7 * * * * *": "every minute at seconds 0, 7, 14 … 56",
    "30 0 9 * * *": "at 09:00:30 every day",
    "0,30 0 9 * * MON": "at 09:00:00 and 09:00:30 on Mondays",
    "15 30 * * * *": "every hour at second 15 of minute 30",
    "15,45 7,9 * * * *": "every hour at seconds 15 and 45 of minutes 7 and 9",
    "15,45 7,9 9-17 * * *": ("every hour at seconds 15 and 45 of minutes 7 and 9 from 09:07:15 to 17:09:45 every day"),
    "* 5 * * * *": "every second in minute 5 of every hour",
    "*/10 0,30 * * * *": "every 10 seconds in minutes 0 and 30 of every hour",
    "*/10 0,30 1,5 * * *": "every 10 seconds in minutes 0 and 30 of hours 1 and 5 every day",
    "* * 0-22 * * *": "every second from 00:00:00 to 22:59:59 every day",
    # days of the week
    "0 9 * * 1": "at 09:00 on Mondays",
    "0 9 * * 7": "at 09:00 on Sundays",
    "0 9 * * */7": "at 09:00 on Sundays",
    "0 12 * * 6,0": "at 12:00 on Saturdays and Sundays",
    "0 0 * * 5-7": "at 00:00, from Friday to Sunday",
    "0 0 * * 1,2,3,6": "at 00:00 on Mondays, Tuesdays, Wednesdays and Saturdays",
    "*/15 * * * 1": "every 15 minutes on Mondays",
    # days of the month
    "0 0 1 * *": "at 00:00 on day 1 of every month",
    "0 0 1-28 * *": "at 00:00 on days 1 to 28 of every month",
    "0 0 31 * *": "at 00:00 on day 31 of the month",
    "59 23 28-31 * *": "at 23:59 on days 28 to 31 of the month",
    "*/15 * 1 * *": "every 15 minutes on day 1 of every month",
    "0 0 1,2,3,5,8,13,21 * *": "at 00:00 on days 1 to 3, 5, 8, 13 and 21 of every month",
    # both
    "30 4 1,15 * 5": "at 04:30 on days 1 and 15 of the month, and on every Friday",
    "0 0 13 * 1,5": "at 00:00 on day 13 of the month, and on every Monday and Friday",
    "0 0 1-7 * 1-5": "at 00:00 on days 1 to 7 of the month, and every day from Monday to Friday",
    "0 0 1-31 * 1": "at 00:00 every day",
    "0 0 15 * 0-6": "at 00:00 every day",
    "0 0 */2 * 1": "at 00:00 on Mondays, but only on days 1, 3, 5 … 31 of the month",
    "0 0 */3 * 1-5": "at 00:00, from Monday to Friday, but only on days 1, 4, 7 … 31 of the month",
    "0 0 13 * */2": "at 00:00 on Tuesdays, Thursdays, Saturdays and Sundays, but only on day 13 of the month",
    # months
    "0 9 * 1,7 *": "at 09:00 every day in January and July",
    "* * * 3 *": "every minute in March",
    "0 0 * JAN-MAR FRI": "at 00:00 on Fridays from January to March",
    "0 0 1 */2 *": "at 00:00 on day 1 of January, March, May … November",
    "0 0 * 1-5,7-12 *": "at 00:00 every day in January to May and July to December",
    "*/5 * * 6-8 *": "every 5 minutes from June to August",
    "0 0 1 6-8 *": "at 00:00 on day 1 of the month from June to August",
    "0 0 1 1-3,7-9 *": "at 00:00 on day 1 of the month in January to March and July to September",
    "0 0 29 2 *": "at 00:00 on day 29 of February",
    "0 0 31 1,2 *": "at 00:00 on day 31 of January",
    "0 0 31 2 1": "at 00:00 on day 31 of February, and on every Monday in that month",
    "0 0 1,15 */3 5": (
        "at 00:00 on days 1 and 15 of January, April, July and October, and on every Friday in these months"
    ),
    "0 0 */2 6 MON": "at 00:00 on Mondays, but only on days 1, 3, 5 … 31 of June",
    # extensions
    "0 0 L * *": "at 00:00 on the last day of the month",
    "0 0 L 6-8 *": "at 00:00 on the last day of the month from June to August",
    "0 0 L 6,9 *": "at 00:00 on the last day of June and September",
    "0 0 LW * *": "at 00:00 on the last working day of the month",
    "0 0 1,L,L * *": "at 00:00 on day 1 and the last day of the month",
    "0 9 15W * *": "at 09:00 on the working day nearest to the 15th of the month",
    "0 9 W1,2W,3W,11W,22W 6 *": (
        "at 09:00 on the working day nearest to the 1st, the working day nearest to the 2nd, the working day nearest to"
        " the 3rd and 2 more such days of June"
    ),
    "0 9 * * FRI#2": "at 09:00 on the second Friday of the month",
    "0 9 * * L5,0#5": "at 09:00 on the last Friday and the fifth Sunday of the month",
    "0 0 * 6 1,5#2": "at 00:00 on every Monday and the second Friday of June",
    "0 0 1-31,L * *": "at 00:00 every day",
    "0 0 * * 0-6,5L": "at 00:00 every day",
    # macros
    "@hourly": "every hour at minute 0",
    "@Daily": "at 00:00 every day",
    "@midnight": "at 00:00 every day",
    "@weekly": "at 00:00 on Sundays",
    "@monthly": "at 00:00 on day 1 of every month",
    "@yearly": "at 00:00 on day 1 of January",
    " @annually ": "at 00:00 on day 1 of January",
}


@pytest.mark.parametrize(("expression", "line"), WORDING.items())
def test_wording(expression: str, line: str) -> None:
    assert describe(expression) == line


@pytest.mark.parametrize(
    ("zone", "line"),
    [
        ("Europe/Berlin", "at 09:00 on Mondays, Europe/Berlin time"),
        ("UTC", "at 09:00 on Mondays, UTC"),
        ("Etc/UTC", "at 09:00 on Mondays, Etc/UTC time"),
    ],
)
def test_the_zone_is_said_if_it_is_given(zone: str, line: str) -> None:
    assert cron_ticks.describe("0 9 * * MON", timezone=zone) == line


def test_what_is_wrong_is_refused_as_everywhere() -> None:
    with pytest.raises(InvalidInputError, match="cron: minute '99'"):
        describe("99 * * * *")
    with pytest.raises(InvalidInputError, match="did you mean Europe/Berlin"):
        describe("* * * * *", "europe/berlin")
    with pytest.raises(InvalidInputError, match="timezone: "):
        describe("* * * * *", "")


@pytest.mark.parametrize(
    ("interval", "line"),
    [
        (timedelta(seconds=1), "every second"),
        (timedelta(seconds=30), "every 30 seconds"),
        (timedelta(seconds=1.5), "every 1.5 seconds"),
        (timedelta(seconds=10, microseconds=1), "every 10.000001 seconds"),
        (timedelta(minutes=1), "every minute"),
        (timedelta(minutes=5), "every 5 minutes"),
        (timedelta(seconds=90), "every 1 minute 30 seconds"),
        (timedelta(seconds=61), "every 1 minute 1 second"),
        (timedelta(hours=1), "every hour"),
        (timedelta(hours=1, minutes=30), "every 1 hour 30 minutes"),
        (timedelta(days=1), "every day"),
        (timedelta(days=7), "every 7 days"),
        (timedelta(days=2, hours=1, seconds=100), "every 2 days 1 hour 1 minute 40 seconds"),
    ],
)
def test_an_interval_is_said_in_units_of_people(interval: timedelta, line: str) -> None:
    assert describe_rule(IntervalRule(START, interval)) == line


def test_a_one_off_says_when_in_utc() -> None:
    moment = datetime(2026, 3, 1, 10, 0, tzinfo=timezone(timedelta(hours=1)))
    assert describe_rule(OneOffRule(moment)) == "once, at 2026-03-01 09:00:00 UTC"
    assert describe_rule(OneOffRule(moment.replace(microsecond=5))) == "once, at 2026-03-01 09:00:00.000005 UTC"


def test_a_cron_rule_says_its_zone() -> None:
    assert describe_rule(CronRule("0 9 * * MON", "Europe/Berlin")) == "at 09:00 on Mondays, Europe/Berlin time"


@pytest.mark.parametrize(
    ("expression", "zone", "line"),
    [
        ("0 9 * * MON", "Mars/Olympus", "0 9 * * MON, Mars/Olympus time"),
        ("0 9 * *\nMOON", "UTC", "0 9 * * MOON, UTC"),
        ("", "UTC", ", UTC"),
        ("1," * 200, "Mars/Olympus", f"{'1,' * 91}…, Mars/Olympus time"[-LONGEST_LINE:]),
    ],
)
def test_a_rule_that_cannot_be_followed_is_shown_as_it_is_stored(expression: str, zone: str, line: str) -> None:
    assert describe_rule(CronRule(expression, zone)) == line


# Random expressions.


@st.composite
def items(draw: st.DrawFn, low: int, high: int) -> str:
    first = draw(st.integers(low, high))
    last = draw(st.integers(first, high))
    kind = draw(st.sampled_from(["value", "value", "value", "range", "steps", "all", "all in steps"]))
    if kind == "steps" and last > first:
        return f"{first}-{last}/{draw(st.integers(1, last - first))}"
    if kind == "all in steps":
        return f"*/{draw(st.integers(1, high - low))}"
    return {"value": str(first), "all": "*"}.get(kind, f"{first}-{last}")


def fields(low: int, high: int, most: int = 5) -> st.SearchStrategy[str]:
    many = st.lists(items(low, high), min_size=1, max_size=most).map(",".join)
    return st.one_of(st.just("*"), st.integers(low, high).map(str), items(low, high), many)


def with_extensions(plain: st.SearchStrategy[str], extensions: list[str]) -> st.SearchStrategy[str]:
    chosen = st.lists(st.sampled_from(extensions), min_size=1, max_size=3)
    return st.tuples(st.lists(plain, max_size=2), chosen).map(lambda parts: ",".join(parts[0] + parts[1]))


day_extensions = with_extensions(items(1, 31), ["L", "LW", *(f"{day}W" for day in range(1, 29))])
weekday_extensions = with_extensions(
    items(0, 7), [f"{weekday}{kind}" for weekday in range(8) for kind in ("L", "#1", "#2", "#3", "#4", "#5")]
)
day_fields = st.one_of(
    st.tuples(fields(1, 31), fields(1, 12), fields(0, 7)),
    st.tuples(day_extensions, fields(1, 12), st.just("*")),
    st.tuples(st.just("*"), fields(1, 12), weekday_extensions),
)
time_fields = st.one_of(st.tuples(fields(0, 59), fields(0, 23)), st.tuples(fields(0, 59), fields(0, 59), fields(0, 23)))


def is_valid(text: str) -> bool:
    try:
        parse(text)
    except InvalidInputError:
        return False
    return True


expressions = st.tuples(time_fields, day_fields).map(lambda parts: " ".join(parts[0] + parts[1])).filter(is_valid)
hostile = (
    st.tuples(
        *(
            st.lists(st.integers(low, high).map(str), min_size=3, max_size=14).map(",".join)
            for low, high in [(0, 59), (0, 59), (0, 23), (1, 31), (1, 12), (0, 6)]
        )
    )
    .map(" ".join)
    .filter(is_valid)
)


@given(st.one_of(expressions, hostile), st.sampled_from([None, "UTC", LONGEST_ZONE]))
def test_any_expression_gets_one_short_line(expression: str, zone: str | None) -> None:
    line = describe(expression, zone)
    assert len(line) <= (LONGEST_OF_ALL if zone == LONGEST_ZONE else LONGEST_LINE)
    assert line.isprintable()
    assert line == " ".join(line.split())
    assert not line.endswith(".")


# A reader of such lines, that knows nothing of how they are written.

SERIES = r"[0-9]+(?: to [0-9]+| … [0-9]+|, [0-9]+| and [0-9]+)*(?! more)"
CLOCK = r"[0-9]{2}:[0-9]{2}(?::[0-9]{2})?"
START_OF_DATES = re.compile(r"(?:,? from [A-Z]| every day| on | in [A-Z]).*|$")
MONTH_SERIES = re.compile(rf"(?:of|in|from) ((?:{'|'.join(MONTHS)})(?:(?:, | and | to | … )(?:{'|'.join(MONTHS)}))*)")
NUMBERS = {"first": 0, "second": 1, "third": 2, "fourth": 3, "fifth": 4, "last": -1}


def series(text: str) -> set[int]:
    found: set[int] = set()
    for part in re.split(r", | and ", text):
        if "…" in part:
            third, last = map(int, part.split(" … "))
            found |= set(range(third, last + 1, third - max(found)))
        else:
            first, _, last_text = part.partition(" to ")
            found |= set(range(int(first), int(last_text or first) + 1))
    return found


def second_of_day(clock: str) -> int:
    hour, minute, second = map(int, f"{clock}:00".split(":")[:3])
    return hour * 3600 + minute * 60 + second


def unit_values(text: str, unit: str, size: int) -> set[int] | None:
    """What a text says of a unit: `minutes 7 and 9`, or `every 5 minutes`."""
    if numbered := re.search(rf"{unit}s? ({SERIES})", text):
        return series(numbered[1])
    if every := re.search(rf"every (?:([0-9]+) )?{unit}", text):
        return set(range(0, size, int(every[1] or 1)))
    return None


def read_times(text: str) -> set[int]:
    stretches = [(second_of_day(a), second_of_day(b)) for a, b in re.findall(f"from ({CLOCK}) to ({CLOCK})", text)]
    if re.match(f"at {CLOCK}", text):
        return {second_of_day(clock) for clock in re.findall(CLOCK, text)}
    if hourly := re.match("every (?:([0-9]+) )?hours? from", text):
        step = int(hourly[1] or 1) * 3600
        return {second for first, last in stretches for second in range(first, last + 1, step)}
    seconds, minutes, hours = (
        unit_values(text, unit, size) for unit, size in [("second", 60), ("minute", 60), ("hour", 24)]
    )
    if minutes is None:
        minutes = set(range(60))
    found = {
        hour * 3600 + minute * 60 + second
        for hour, minute, second in product(hours or range(24), minutes, seconds or {0})
    }
    return {second for second in found if any(a <= second <= b for a, b in stretches or [(0, 86_400)])}


def read_weekdays(text: str) -> set[int] | None:
    """Monday is 0."""
    if run := re.search("from ([A-Z][a-z]+day) to ([A-Z][a-z]+day)", text):
        return set(range(WEEKDAYS.index(run[1]), WEEKDAYS.index(run[2]) + 1))
    named = re.search(r"on (?:every )?((?:[A-Z][a-z]+days?(?:, | and )?)+)", text)
    return {WEEKDAYS.index(name) for name in re.findall("[A-Z][a-z]+day", named[1])} if named else None


def read_special(text: str) -> Callable[[date], bool]:
    """One of the days of a list with extensions."""
    if plain := re.fullmatch("days? (.*)", text):
        return lambda day: day.day in series(plain[1])
    if name := re.fullmatch("every (.*)", text):
        return lambda day: day.weekday() == WEEKDAYS.index(name[1])
    if nearest := re.fullmatch("the working day nearest to the ([0-9]+)[a-z]+", text):
        wanted = int(nearest[1])
        return lambda day: day == min(working_days(day), key=lambda other: abs(other.day - wanted))
    if text == "the last working day":
        return lambda day: day == working_days(day)[-1]
    if text == "the last day":
        return lambda day: day == month_of(day)[-1]
    _, number, weekday = text.split(" ")
    index = NUMBERS[number]
    return lambda day: (
        day in [other for other in month_of(day) if other.weekday() == WEEKDAYS.index(weekday)][index:][:1]
    )


@cache
def month_of(day: date) -> list[date]:
    first = day.replace(day=1)
    return [other for number in range(31) if (other := first + timedelta(days=number)).month == day.month]


def working_days(day: date) -> list[date]:
    return [other for other in month_of(day) if other.weekday() < 5]


def read_dates(text: str) -> Callable[[date], bool]:
    months = set(range(1, 13))
    if named := MONTH_SERIES.search(text):
        numbered = re.sub("|".join(MONTHS), lambda match: str(MONTHS.index(match[0]) + 1), named[1])
        months = series(numbered)
    if re.search("the (last|first|second|third|fourth|fifth|working) ", text):
        body = re.sub(r"^ on | of (?:the month.*|[A-Z].*)$", "", text)
        parts = re.findall(rf"days? {SERIES}|every [A-Z][a-z]+|the .*?(?=, | and |$)", body)
        specials = [read_special(part) for part in parts]
        return lambda day: day.month in months and any(special(day) for special in specials)
    numbers, weekdays = re.search(f"on days? ({SERIES})", text), read_weekdays(text)
    days = series(numbers[1]) if numbers else None
    combine = any if re.search(", and (on every|every day)", text) else all
    return lambda day: (
        day.month in months
        and combine(
            value in wanted for value, wanted in [(day.day, days), (day.weekday(), weekdays)] if wanted is not None
        )
    )


# What the lines are compared with.

TWO_YEARS = [date(2024, 1, 1) + timedelta(days=number) for number in range(366 + 365)]


def times_of(expression: CronExpression) -> set[int]:
    times = product(expression.hours, expression.minutes, expression.seconds)
    return {hour * 3600 + minute * 60 + second for hour, minute, second in times}


def dates_of(expression: CronExpression) -> list[date]:
    return list(takewhile(lambda day: day <= TWO_YEARS[-1], expression._dates(TWO_YEARS[0])))


def says_what_it_means(line: str, expression: CronExpression) -> bool:
    """Whether times and dates that are read from a line are the expression's."""
    dates = START_OF_DATES.search(line)
    assert dates is not None
    matches = read_dates(dates[0])
    return read_times(line[: dates.start()]) == times_of(expression) and [
        day for day in TWO_YEARS if matches(day)
    ] == dates_of(expression)


@pytest.mark.parametrize("expression", [text for text, line in WORDING.items() if " more" not in line])
def test_the_wording_above_is_true(expression: str) -> None:
    assert says_what_it_means(WORDING[expression], parse(expression))


@given(expressions)
def test_a_line_is_true(expression: str) -> None:
    line = describe(expression)
    assume(" more" not in line)
    assert says_what_it_means(line, parse(expression)), line


@given(st.one_of(expressions, hostile))
def test_a_list_that_is_cut_says_how_many_are_left_out(expression: str) -> None:
    line, parsed = describe(expression), parse(expression)
    values = {
        "second": set(parsed.seconds),
        "minute": set(parsed.minutes),
        "hour": set(parsed.hours),
        "day": set(parsed.days),
    }
    for unit, shown_text, left_out in re.findall(r"(second|minute|hour|day)s ([0-9, to]+?) and ([0-9]+) more\b", line):
        shown = series(shown_text)
        assert shown <= values[unit], line
        assert len(shown) + int(left_out) == len(values[unit]), line


def meaning(expression: str) -> tuple[frozenset[int], tuple[date, ...]]:
    parsed = parse(expression)
    return frozenset(times_of(parsed)), tuple(dates_of(parsed))


@given(expressions, st.integers(0, 5), st.one_of(fields(0, 59), fields(1, 12), fields(0, 7)))
def test_lines_of_different_meaning_differ(expression: str, place: int, field: str) -> None:
    parts = expression.split(" ")
    parts[place % len(parts)] = field
    other = " ".join(parts)
    assume(is_valid(other))
    if describe(expression) == describe(other) and " more" not in describe(other):
        assert meaning(expression) == meaning(other), describe(other)


@pytest.mark.soak(small=2_000, full=50_000)
def test_no_two_meanings_share_a_line(size: int) -> None:
    """From few fields, so that many expressions are nearly the same."""
    random, seen = Random(6), dict[str, str]()  # noqa: S311 - not a secret
    pools = [
        ["0", "*", "*/10", "30", "0,30", "*/7", "0-10"],
        ["0", "*", "*/15", "*/7", "7,37", "0-59/2", "1-59/2", "5", "0,30"],
        ["*", "0", "9-17", "*/2", "1-23/2", "9,17", "0-8,18-23", "0,1,3,5,9", "9-11,13"],
        ["*", "*/2", "1", "1,15", "1-7", "1-31", "31", "*/30", "1,31"],
        ["*", "1", "1,7", "*/2", "1-6", "2"],
        ["*", "1", "1-5", "0,6", "*/2", "0-6", "5-7"],
    ]
    for _ in range(size):
        expression = " ".join(random.choice(pool) for pool in pools)
        if is_valid(expression) and " more" not in (line := describe(expression)):
            other = seen.setdefault(line, expression)
            assert other == expression or meaning(other) == meaning(expression), line
