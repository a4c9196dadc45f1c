"""What may be written as a cron expression, what it means on a calendar, and what is refused, with which words."""

import re
from datetime import UTC, datetime, timedelta
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from croniter import CroniterBadCronError, CroniterBadDateError, CroniterError, croniter
from hypothesis import given

from cron_ticks import cron_expressions, cron_rules, preview
from cron_ticks.cron_expressions import MACROS, check_cron, parse
from cron_ticks.errors import InvalidInputError
from support.expressions import broken_expressions, expressions

FUZZER = Path(__file__).parent.parent / "benchmarks" / "fuzz_calendar.py"
NAMES = ("seconds", "minutes", "hours", "days", "months", "weekdays")
ALL = {
    "seconds": (0,),
    "minutes": tuple(range(60)),
    "hours": tuple(range(24)),
    "days": tuple(range(1, 32)),
    "months": tuple(range(1, 13)),
    "weekdays": tuple(range(7)),
}
START = datetime(2026, 1, 1, tzinfo=UTC)
MONTHS = "JAN, FEB, MAR, APR, MAY, JUN, JUL, AUG, SEP, OCT, NOV, DEC"
WEEKDAYS = "SUN, MON, TUE, WED, THU, FRI, SAT"
NO_ITEM = "must be *, a number, a name or a range a-b; * and ranges may have a step /n"
NO_ASCII = "only ASCII digits and letters can be used"
NOTHING = "there is nothing before or after a comma"
SO_MANY = "must have five fields (minute, hour, day of month, month, day of week), or six with seconds first; has"
MACROS_SHOWN = "there are @hourly, @daily, @midnight, @weekly, @monthly, @yearly, @annually"
NEAREST = "the day before W must be from 1 to 28, which every month has; LW is the last one"


def values(text: str) -> dict[str, tuple[int, ...]]:
    read = parse(text)
    return {name: tuple(sorted(getattr(read, name))) for name in NAMES}


def dates(text: str, year: int, month: int) -> list[int]:
    """The days of a month on which an expression fires, in UTC."""
    start = datetime(year, month, 1, tzinfo=UTC)
    found = parse(text).wall_times(start.replace(tzinfo=None))
    days = []
    for wall in found:
        if (wall.year, wall.month) != (year, month):
            break
        days.append(wall.day)
    return sorted(set(days))


def problem(text: Any) -> str:
    with pytest.raises(InvalidInputError) as refused:
        parse(text)
    assert refused.value.field == "cron"
    return refused.value.problem


# What is accepted


@pytest.mark.parametrize(
    ("text", "restricted"),
    [
        ("* * * * *", {}),
        ("5 4 3 2 1", {"minutes": (5,), "hours": (4,), "days": (3,), "months": (2,), "weekdays": (1,)}),
        (
            "6 5 4 3 2 1",
            {"seconds": (6,), "minutes": (5,), "hours": (4,), "days": (3,), "months": (2,), "weekdays": (1,)},
        ),
        ("* * * * * *", {"seconds": tuple(range(60))}),
        ("*/20 * * * * *", {"seconds": (0, 20, 40)}),
        ("30,0 * * * * *", {"seconds": (0, 30)}),
        ("*/15 * * * *", {"minutes": (0, 15, 30, 45)}),
        ("*/59 * * * *", {"minutes": (0, 59)}),
        ("*/7 * * * *", {"minutes": (0, 7, 14, 21, 28, 35, 42, 49, 56)}),
        ("*/1 * * * *", {}),
        ("*/01 * * * *", {}),
        ("3-20/5 * * * *", {"minutes": (3, 8, 13, 18)}),
        ("3-20/17 * * * *", {"minutes": (3, 20)}),
        ("58-59,0-1 * * * *", {"minutes": (0, 1, 58, 59)}),
        ("5-5 * * * *", {"minutes": (5,)}),
        ("59-59,0-0 * * * *", {"minutes": (0, 59)}),
        ("05,5,5 * * * *", {"minutes": (5,)}),
        ("1,* * * * *", {}),
        ("*/30,7 * * * *", {"minutes": (0, 7, 30)}),
        ("0 */23 * * *", {"minutes": (0,), "hours": (0, 23)}),
        ("0 9-17/4 * * *", {"minutes": (0,), "hours": (9, 13, 17)}),
        ("0 0-23 * * *", {"minutes": (0,)}),
        ("* * */30 * *", {"days": (1, 31)}),
        ("* * */2 * *", {"days": tuple(range(1, 32, 2))}),
        ("* * 31 * *", {"days": (31,)}),
        ("* * 29 2 *", {"days": (29,), "months": (2,)}),
        ("* * 31-31 3-3 *", {"days": (31,), "months": (3,)}),
        ("* * * */11 *", {"months": (1, 12)}),
        ("* * * jan,Jun,DEC *", {"months": (1, 6, 12)}),
        ("* * * MAR-5 *", {"months": (3, 4, 5)}),
        ("* * * Feb-Nov/3 *", {"months": (2, 5, 8, 11)}),
        ("* * * * 0", {"weekdays": (0,)}),
        ("* * * * 7", {"weekdays": (0,)}),
        ("* * * * 7-7", {"weekdays": (0,)}),
        ("* * * * sun", {"weekdays": (0,)}),
        ("* * * * SUN-SUN", {"weekdays": (0,)}),
        ("* * * * 0,7", {"weekdays": (0,)}),
        ("* * * * 0-7", {}),
        ("* * * * 1-7", {}),
        ("* * * * SUN-7", {}),
        ("* * * * 5-7", {"weekdays": (0, 5, 6)}),
        ("* * * * FRI-7", {"weekdays": (0, 5, 6)}),
        ("* * * * SUN-TUE", {"weekdays": (0, 1, 2)}),
        ("* * * * mon-FRI", {"weekdays": (1, 2, 3, 4, 5)}),
        ("* * * * MON-7/3", {"weekdays": (0, 1, 4)}),
        ("* * * * 2-7/5", {"weekdays": (0, 2)}),
        ("* * * * 1-7/2", {"weekdays": (0, 1, 3, 5)}),
        ("* * * * 0-7/2", {"weekdays": (0, 2, 4, 6)}),
        ("* * * * */2", {"weekdays": (0, 2, 4, 6)}),
        ("* * * * */7", {"weekdays": (0,)}),
        ("* * * * Wed,5,SAT-7", {"weekdays": (0, 3, 5, 6)}),
        ("\t *  *\t* * *\t ", {}),
    ],
)
def test_each_field_has_the_values_that_are_written(text: str, restricted: dict[str, tuple[int, ...]]) -> None:
    assert values(text) == {**ALL, **restricted}


@pytest.mark.parametrize("text", [f" {name.upper()}\t" for name in MACROS] + list(MACROS))
def test_a_macro_is_the_expression_that_it_stands_for(text: str) -> None:
    meant = MACROS[text.strip().lower()]
    assert values(text) == values(meant)
    assert (parse(text).wildcard, parse(text).has_seconds) == (parse(meant).wildcard, False)


def test_macros_are_those_of_cron() -> None:
    assert {name: preview(cron=name, after=START, count=1)[0] for name in MACROS} == {
        "@hourly": datetime(2026, 1, 1, 1, tzinfo=UTC),
        "@daily": datetime(2026, 1, 2, tzinfo=UTC),
        "@midnight": datetime(2026, 1, 2, tzinfo=UTC),
        "@weekly": datetime(2026, 1, 4, tzinfo=UTC),
        "@monthly": datetime(2026, 2, 1, tzinfo=UTC),
        "@yearly": datetime(2027, 1, 1, tzinfo=UTC),
        "@annually": datetime(2027, 1, 1, tzinfo=UTC),
    }


@pytest.mark.parametrize(
    ("text", "wildcard"),
    [
        ("* 5 * * *", True),
        ("5 * * * *", True),
        ("*/5 5 * * *", True),
        ("5 */5 * * *", True),
        ("*,5 5 * * *", True),
        ("0 * 5 * * *", True),
        ("@hourly", True),
        ("5 5 * * *", False),
        ("0-59 0-23 * * *", False),
        ("5,* 5,* * * *", False),  # cron looks at the first character
        ("* 5 5 * * *", False),  # the second is none of cron's fields
        ("@daily", False),
    ],
)
def test_minute_or_hour_that_starts_with_a_star_makes_a_wildcard(text: str, *, wildcard: bool) -> None:
    assert parse(text).wildcard is wildcard


# February 2026 begins on a Sunday and has 28 days; March begins on a Sunday too, and its 31st is a Tuesday. August
# begins on a Saturday and ends on a Monday; May begins on a Friday and ends on a Sunday.
@pytest.mark.parametrize(
    ("text", "year", "month", "days"),
    [
        # Neither day field starts with *: either matches.
        ("0 0 13 * FRI", 2026, 2, [6, 13, 20, 27]),
        ("0 0 13 * FRI", 2026, 3, [6, 13, 20, 27]),
        ("0 0 1,15 * 3", 2026, 5, [1, 6, 13, 15, 20, 27]),
        ("0 0 31 2 1", 2026, 2, [2, 9, 16, 23]),
        ("0 0 1-31 * 1", 2026, 2, list(range(1, 29))),
        ("0 0 10 * 0-7", 2026, 2, list(range(1, 29))),
        ("0 0 1,*/10 * 1", 2026, 2, [1, 2, 9, 11, 16, 21, 23]),  # starts with 1, not with *
        ("0 0 1,* * 1", 2026, 2, list(range(1, 29))),
        # One of them does: both must match.
        ("0 0 * * 1", 2026, 2, [2, 9, 16, 23]),
        ("0 0 13 * *", 2026, 2, [13]),
        ("0 0 */2 * 1", 2026, 2, [9, 23]),
        ("0 0 */2 * MON-FRI", 2026, 2, [3, 5, 9, 11, 13, 17, 19, 23, 25, 27]),
        ("0 0 */1 * 1", 2026, 2, [2, 9, 16, 23]),
        ("0 0 *,5 * 1", 2026, 2, [2, 9, 16, 23]),
        ("0 0 13 * */5", 2026, 2, [13]),  # Sunday and Friday
        ("0 0 14 * */5", 2026, 2, []),
        ("0 0 13-20 * */2", 2026, 2, [14, 15, 17, 19]),
        ("0 0 */10 * */2", 2026, 2, [1, 21]),
        ("0 0 */10 * */2", 2026, 3, [1, 21, 31]),
        ("0 0 29 2 *", 2026, 2, []),
        ("0 0 29 2 *", 2028, 2, [29]),
        ("0 0 29 2 *", 2100, 2, []),
        ("0 0 29 2 *", 2400, 2, [29]),
        ("0 0 31 * *", 2026, 4, []),
        ("0 0 */30,31 2 *", 2026, 2, [1]),
        # The last day, and the last from Monday to Friday.
        ("0 0 L * *", 2026, 2, [28]),
        ("0 0 l * *", 2028, 2, [29]),
        ("0 0 L * *", 2026, 4, [30]),
        ("0 0 L 1,3 *", 2026, 2, []),
        ("0 0 LW * *", 2026, 2, [27]),  # a Saturday is the last
        ("0 0 WL * *", 2026, 5, [29]),  # a Sunday
        ("0 0 lw * *", 2026, 8, [31]),
        ("0 0 1,L * *", 2026, 2, [1, 28]),
        ("0 0 L,*/10 * *", 2026, 2, [1, 11, 21, 28]),
        ("0 0 27-28,L,LW * *", 2026, 2, [27, 28]),
        # The nearest from Monday to Friday, in the same month.
        ("0 0 15W * *", 2026, 4, [15]),
        ("0 0 14W * *", 2026, 2, [13]),  # a Saturday
        ("0 0 15W * *", 2026, 2, [16]),  # a Sunday
        ("0 0 w15 * *", 2026, 2, [16]),
        ("0 0 1W * *", 2026, 8, [3]),  # a Saturday: not back into July
        ("0 0 1W * *", 2026, 2, [2]),
        ("0 0 28W * *", 2026, 2, [27]),  # a Saturday
        ("0 0 28W * *", 2027, 2, [26]),  # a Sunday: not on into March
        ("0 0 28W * *", 2027, 3, [29]),
        ("0 0 01W,15W,20 * *", 2026, 2, [2, 16, 20]),
        # The second Friday, the last one.
        ("0 0 * * 5#2", 2026, 2, [13]),
        ("0 0 * * fri#2", 2026, 2, [13]),
        ("0 0 * * SUN#1", 2026, 2, [1]),
        ("0 0 * * 0#1", 2026, 2, [1]),
        ("0 0 * * 7#4", 2026, 2, [22]),
        ("0 0 * * 7#5", 2026, 2, []),
        ("0 0 * * 7#5", 2026, 3, [29]),
        ("0 0 * 2 MON#5", 2044, 2, [29]),
        ("0 0 * * MON#1,MON#3", 2026, 2, [2, 16]),
        ("0 0 * * 5L", 2026, 2, [27]),
        ("0 0 * * L5", 2026, 5, [29]),
        ("0 0 * * FRIL", 2026, 2, [27]),
        ("0 0 * * Lfri", 2026, 2, [27]),
        ("0 0 * * 0L", 2026, 3, [29]),
        ("0 0 * * 7L", 2026, 3, [29]),
        ("0 0 * * SATL,WED#2,0", 2026, 2, [1, 8, 11, 15, 22, 28]),
        ("0 0 * * 1-2,FRIL", 2026, 2, [2, 3, 9, 10, 16, 17, 23, 24, 27]),
        # Every day and the last one is every day.
        ("0 0 *,L * *", 2026, 2, list(range(1, 29))),
        ("0 0 L,* * *", 2026, 2, list(range(1, 29))),
        ("0 0 * * 5#2,*", 2026, 2, list(range(1, 29))),
    ],
)
def test_an_expression_matches_these_days_of_a_month(text: str, year: int, month: int, days: list[int]) -> None:
    assert dates(text, year, month) == days


def test_an_expression_is_kept_with_single_blanks() -> None:
    assert check_cron("\t 0   9 * \t* MON-FRI ") == "0 9 * * MON-FRI"
    assert check_cron(" @Daily ") == "@Daily"


def test_exactly_256_characters_are_accepted() -> None:
    text = f"{','.join(['1'] * 124)} * * * *"
    assert len(f"{text} ") == 256
    assert values(f"{text} ")["minutes"] == (1,)
    assert problem(f"{text}  ") == "must have at most 256 characters, has 257"


# What is refused

STEPS = {
    "*/70 * * * *": "minute '*/70': the step must be from 1 to 59",
    "*/60 * * * *": "minute '*/60': the step must be from 1 to 59",
    "*/0 * * * *": "minute '*/0': the step must be from 1 to 59",
    "*/00 * * * *": "minute '*/00': the step must be from 1 to 59",
    "*/60 * * * * *": "second '*/60': the step must be from 1 to 59",
    "* */24 * * *": "hour '*/24': the step must be from 1 to 23",
    "* * */31 * *": "day of month '*/31': the step must be from 1 to 30",
    "* * * */12 *": "month '*/12': the step must be from 1 to 11",
    "* * * * */8": "day of week '*/8': the step must be from 1 to 7",
    "10-20/11 * * * *": "minute '10-20/11': the step must be from 1 to 10",
    "10-20/0 * * * *": "minute '10-20/0': the step must be from 1 to 10",
    "5-5/1 * * * *": "minute '5-5/1': a step needs a longer range",
    "5/15 * * * *": "minute '5/15': a step needs a range: write 5-59/15",
    "0 0 1/2 * *": "day of month '1/2': a step needs a range: write 1-31/2",
    "0 0 * * MON/2": "day of week 'MON/2': a step needs a range: write 1-7/2",
    "*/-5 * * * *": f"minute '*/-5': {NO_ITEM}",
    "*/+5 * * * *": f"minute '*/+5': {NO_ITEM}",
    "*/1.5 * * * *": f"minute '*/1.5': {NO_ITEM}",
    "*/ * * * *": f"minute '*/': {NO_ITEM}",
    "/5 * * * *": f"minute '/5': {NO_ITEM}",
    "*/5/2 * * * *": f"minute '*/5/2': {NO_ITEM}",
    "*/99999999999999999999 * * * *": "minute '*/99999999999999999999': the step must be from 1 to 59",
}
RANGES = {
    "50-10 * * * *": "minute '50-10': the range runs backwards: write 50-59,0-10",
    "0 22-2 * * *": "hour '22-2': the range runs backwards: write 22-23,0-2",
    "0 0 28-3 * *": "day of month '28-3': the range runs backwards: write 28-31,1-3",
    "0 0 * NOV-FEB *": "month 'NOV-FEB': the range runs backwards: write 11-12,1-2",
    "0 0 * * FRI-SUN": "day of week 'FRI-SUN': the range runs backwards: write 5-7",
    "0 0 * * 6-0": "day of week '6-0': the range runs backwards: write 6-7",
    "0 0 * * FRI-MON": "day of week 'FRI-MON': the range runs backwards: write 5-7,1-1",
    "60 * * * *": "minute '60': '60' must be from 0 to 59",
    "60 0 0 * * *": "second '60': '60' must be from 0 to 59",
    "0 24 * * *": "hour '24': '24' must be from 0 to 23",
    "0 0 0 * *": "day of month '0': '0' must be from 1 to 31",
    "0 0 32 * *": "day of month '32': '32' must be from 1 to 31",
    "0 0 * 0 *": "month '0': '0' must be from 1 to 12",
    "0 0 * 13 *": "month '13': '13' must be from 1 to 12",
    "0 0 * * 8": "day of week '8': '8' must be from 0 to 7",
    "0-60 * * * *": "minute '0-60': '60' must be from 0 to 59",
    "0 0 0-5 * *": "day of month '0-5': '0' must be from 1 to 31",
    "0 0 1 1 * 2030": "day of week '2030': '2030' must be from 0 to 7",
    "99999999999999999999 * * * *": "minute '99999999999999999999': '99999999999999999999' must be from 0 to 59",
    "1-2-3 * * * *": f"minute '1-2-3': {NO_ITEM}",
    "*-5 * * * *": f"minute '*-5': {NO_ITEM}",
    "5-* * * * *": f"minute '5-*': {NO_ITEM}",
    "1- * * * *": f"minute '1-': {NO_ITEM}",
    "-5 * * * *": f"minute '-5': {NO_ITEM}",
    "0 - 5 * * *": f"minute '-': {NO_ITEM}",
}
NEVER = {
    "0 0 30 2 *": "day of month: 30 never comes in FEB, so it would never fire",
    "0 0 31 2 *": "day of month: 31 never comes in FEB, so it would never fire",
    "0 0 30-31 FEB *": "day of month: 30 never comes in FEB, so it would never fire",
    "0 0 31,30 2-2 *": "day of month: 30 never comes in FEB, so it would never fire",
    "0 0 31 4,6,9,11 *": "day of month: 31 never comes in APR, JUN, SEP, NOV, so it would never fire",
    "0 0 0 31 2,4 */2": "day of month: 31 never comes in FEB, APR, so it would never fire",
}
EXTENSIONS = {
    "0 0 L * 5": "day of month 'L': an extension can't be combined with the day of week '5': write * there",
    "0 0 15W * 1-5": "day of month '15W': an extension can't be combined with the day of week '1-5': write * there",
    "0 0 LW,1 * */2": "day of month 'LW,1': an extension can't be combined with the day of week '*/2': write * there",
    "0 0 L * 0-7": "day of month 'L': an extension can't be combined with the day of week '0-7': write * there",
    "0 0 L * 5L": "day of month 'L': an extension can't be combined with the day of week '5L': write * there",
    "0 0 15 * 5L": "day of week '5L': an extension can't be combined with the day of month '15': write * there",
    "0 0 */2 * FRI#2": "day of week 'FRI#2': an extension can't be combined with the day of month '*/2': write * there",
    "0 0 * * L": "day of week 'L': which day's last one? Write 5L for the last Friday",
    "0 0 * * 5,l": "day of week 'L': which day's last one? Write 5L for the last Friday",
    "0 0 L-3 * *": "day of month 'L-3': 'L' must be a number from 1 to 31",
    "0 0 1-L * *": "day of month '1-L': 'L' must be a number from 1 to 31",
    "0 0 L/2 * *": "day of month 'L/2': 'L' must be a number from 1 to 31",
    "0 0 0L * *": "day of month '0L': '0L' must be a number from 1 to 31",
    "0 0 5L * *": "day of month '5L': '5L' must be a number from 1 to 31",
    "0 0 * * L-3": f"day of week 'L-3': 'L' must be a number from 0 to 7 or {WEEKDAYS}",
    "0 0 * * 8L": "day of week '8L': '8' must be from 0 to 7",
    "0 0 * * JANL": f"day of week 'JANL': 'JAN' must be a number from 0 to 7 or {WEEKDAYS}",
    "0 0 * * 5LL": f"day of week '5LL': '5LL' must be a number from 0 to 7 or {WEEKDAYS}",
    "L * * * *": "minute 'L': 'L' must be a number from 0 to 59",
    "0 0 * L *": f"month 'L': 'L' must be a number from 1 to 12 or {MONTHS}",
    "0 0 W * *": "day of month 'W': 'W' must be a number from 1 to 31",
    "0 0 0W * *": f"day of month '0W': {NEAREST}",
    "0 0 29W * *": f"day of month '29W': {NEAREST}",
    "0 0 W31 * *": f"day of month 'W31': {NEAREST}",
    "0 0 1-5W * *": "day of month '1-5W': '5W' must be a number from 1 to 31",
    "0 0 * * 5W": f"day of week '5W': '5W' must be a number from 0 to 7 or {WEEKDAYS}",
    "0 0 * * 5#0": "day of week '5#0': the number after # must be from 1 to 5",
    "0 0 * * 5#6": "day of week '5#6': the number after # must be from 1 to 5",
    "0 0 * * 8#1": "day of week '8#1': '8' must be from 0 to 7",
    "0 0 * * JAN#2": f"day of week 'JAN#2': 'JAN' must be a number from 0 to 7 or {WEEKDAYS}",
    "0 0 * * 1-5#2": f"day of week '1-5#2': {NO_ITEM}",
    "0 0 * * *#2": f"day of week '*#2': {NO_ITEM}",
    "0 0 * * 5#": f"day of week '5#': {NO_ITEM}",
    "0 0 * * #2": f"day of week '#2': {NO_ITEM}",
    "0 0 * * 5#L": f"day of week '5#L': {NO_ITEM}",
    "0 0 * * 5#10": f"day of week '5#10': {NO_ITEM}",
    "0 0 * * 5#2/2": f"day of week '5#2/2': {NO_ITEM}",
    "0 0 5#2 * *": f"day of month '5#2': {NO_ITEM}",
}
WORDS = {
    "MON * * * *": "minute 'MON': 'MON' must be a number from 0 to 59",
    "0 JAN * * *": "hour 'JAN': 'JAN' must be a number from 0 to 23",
    "0 0 FRI * *": "day of month 'FRI': 'FRI' must be a number from 1 to 31",
    "0 0 * MON *": f"month 'MON': 'MON' must be a number from 1 to 12 or {MONTHS}",
    "0 0 * * JAN": f"day of week 'JAN': 'JAN' must be a number from 0 to 7 or {WEEKDAYS}",
    "0 0 * JANUARY *": f"month 'JANUARY': 'JANUARY' must be a number from 1 to 12 or {MONTHS}",
    "0 0 * * MONDAY": f"day of week 'MONDAY': 'MONDAY' must be a number from 0 to 7 or {WEEKDAYS}",
    "0 0 * * M": f"day of week 'M': 'M' must be a number from 0 to 7 or {WEEKDAYS}",
    "0 9 * * MON-FRI echo": f"month 'MON-FRI': 'MON' must be a number from 1 to 12 or {MONTHS}",
    "TZ=UTC 0 9 * * *": f"second 'TZ=UTC': {NO_ITEM}",
    "0x10 * * * *": "minute '0X10': '0X10' must be a number from 0 to 59",
    "1_0 * * * *": f"minute '1_0': {NO_ITEM}",
    "1,,2 * * * *": f"minute '': {NOTHING}",
    ",1 * * * *": f"minute '': {NOTHING}",
    "0 0 * * 1,": f"day of week '': {NOTHING}",
    "0 0 L, * *": f"day of month '': {NOTHING}",
    "*5 * * * *": f"minute '*5': {NO_ITEM}",
    "5* * * * *": f"minute '5*': {NO_ITEM}",
    "** * * * *": f"minute '**': {NO_ITEM}",
    "0~30 * * * *": f"minute '0~30': {NO_ITEM}",
    "1;2 * * * *": f"minute '1;2': {NO_ITEM}",
}
OTHER_CRONS = {
    "0 0 ? * *": "day of month '?': cron has no ?: write *",
    "0 0 * * ?": "day of week '?': cron has no ?: write *",
    "H * * * *": "minute 'H': 'H' must be a number from 0 to 59",
    "0 H(0-5) * * *": f"hour 'H(0-5)': {NO_ITEM}",
    "R * * * *": "minute 'R': 'R' must be a number from 0 to 59",
    "0 0 * * R": f"day of week 'R': 'R' must be a number from 0 to 7 or {WEEKDAYS}",
    "@reboot": f"there is no '@reboot'; {MACROS_SHOWN}",
    "@every 5m": f"there is no '@every 5m'; {MACROS_SHOWN}",
    "@daily *": f"there is no '@daily *'; {MACROS_SHOWN}",
    "@": f"there is no '@'; {MACROS_SHOWN}",
    "": f"{SO_MANY} 0",
    "   ": f"{SO_MANY} 0",
    "\t": f"{SO_MANY} 0",
    "*": f"{SO_MANY} 1",
    "* * * *": f"{SO_MANY} 4",
    "* * * * * * *": f"{SO_MANY} 7",
    "0 0 1 1 * 0 2030": f"{SO_MANY} 7",
}
CHARACTERS = {
    "\u0663 * * * *": f"minute '\u0663': {NO_ASCII}",  # Arabic-Indic
    "1\u06f5 * * * *": f"minute '1\u06f5': {NO_ASCII}",
    "0 \u096b * * *": f"hour '\u096b': {NO_ASCII}",  # Devanagari
    "0 0 \uff13 * *": f"day of month '\uff13': {NO_ASCII}",  # of full width
    "0 0 * \xb2 *": f"month '\xb2': {NO_ASCII}",  # superscript
    "0 0 * * \u2460": f"day of week '\u2460': {NO_ASCII}",  # in a circle
    "*/\u0661\u0665 * * * *": f"minute '*/\u0661\u0665': {NO_ASCII}",
    "0 0 * * FR\u0406": f"day of week 'FR\u0406': {NO_ASCII}",  # Cyrillic
    "\ufeff* * * * *": f"minute '\\ufeff*': {NO_ASCII}",
    "*\u200b * * * *": f"minute '*\\u200b': {NO_ASCII}",
    "* * * * *\n": f"day of week '*\\n': {NO_ITEM}",
    "\n* * * * *": f"minute '\\n*': {NO_ITEM}",
    "* * * *\n*": f"{SO_MANY} 4",
    "* * * *\r*": f"{SO_MANY} 4",
    "* * * *\x0b*": f"{SO_MANY} 4",
    "* * * * *\0": f"day of week '*\\x00': {NO_ITEM}",
    "*\xa0* * * *": f"{SO_MANY} 4",
    "* * * *\u2003*": f"{SO_MANY} 4",
    "* * * * *\u3000": f"day of week '*\\u3000': {NO_ASCII}",
    "\ud800 * * * *": f"minute '\\ud800': {NO_ASCII}",  # half a character
}
REFUSED = {**STEPS, **RANGES, **NEVER, **EXTENSIONS, **WORDS, **OTHER_CRONS, **CHARACTERS}


@pytest.mark.parametrize(("text", "reason"), REFUSED.items())
def test_what_cron_cannot_mean_is_refused_with_the_field_and_the_reason(text: str, reason: str) -> None:
    assert problem(text) == reason


@pytest.mark.parametrize(
    "text",
    [
        "0 0 * * \u017fun",  # a long s, which becomes an S
        "0 0 * * fr\u0131",  # an i without its dot, which becomes an I
        "0 0 * \u017fep *",
        "@wee\u212aly",  # the sign of kelvin, which becomes a k
    ],
)
def test_a_letter_that_becomes_ascii_in_the_other_case_is_none(text: str) -> None:
    assert problem(text)


@pytest.mark.parametrize("value", [None, 5, b"* * * * *", ["* * * * *"], {"cron": 1}, datetime.now])
def test_what_is_no_string_is_refused(value: object) -> None:
    with pytest.raises(InvalidInputError, match=r"^cron: must be a string, not "):
        check_cron(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [257, 5_000, 1_000_000])
@pytest.mark.parametrize("piece", ["*", " ", "1", "1,", "\u0663", "\0", "L"])
def test_a_long_text_is_refused_for_its_length_alone(piece: str, length: int) -> None:
    text = (piece * length)[:length]
    assert problem(text) == f"must have at most 256 characters, has {length}"


def test_a_long_item_is_not_repeated_in_full() -> None:
    shown = f"'{'9' * 40}…'"
    assert problem(f"{'9' * 200} * * * *") == f"minute {shown}: {shown} must be from 0 to 59"


@pytest.mark.parametrize("text", [text for text, reason in REFUSED.items() if re.search(r": write \d", reason)])
def test_what_a_refusal_says_to_write_is_accepted(text: str) -> None:
    hint = re.fullmatch(r".*'(.*)'.*: write (\S+)", problem(text))
    assert hint is not None
    parse(text.replace(hint[1], hint[2]))


@pytest.mark.parametrize("text", ["59/5 * * * *", "1/0 * * * *", "5/70 * * * *", "0 0 * * 7/2"])
def test_a_refusal_says_nothing_to_write_that_would_be_refused_too(text: str) -> None:
    hint = re.fullmatch(r".*'(.*)'.*: write (\S+)", problem(text))
    if hint is not None:
        parse(text.replace(hint[1], hint[2]))


def test_the_message_names_the_argument() -> None:
    with pytest.raises(InvalidInputError, match=r"^cron: minute '\*/70': the step must be from 1 to 59$"):
        preview(cron="*/70 * * * *", after=START)


@given(expressions())
def test_every_drawn_expression_is_accepted_and_fires(text: str) -> None:
    occurrences = preview(cron=text, after=START, count=2)
    assert len(occurrences) == 2
    assert START < occurrences[0] < occurrences[1]


@given(broken_expressions())
def test_a_broken_expression_is_refused_as_every_other(text: str) -> None:
    refused = None
    try:
        parse(text)  # some are right by chance
    except InvalidInputError as error:
        refused = error
    assert refused is None or (refused.field == "cron" and refused.problem)


# Where croniter leads astray. Each test shows first that it still does.


def by_croniter(text: str, zone: str, after: datetime, count: int) -> list[datetime]:
    found = croniter(text, after.astimezone(ZoneInfo(zone)), ret_type=datetime)
    return [found.get_next().astimezone(UTC) for _ in range(count)]


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("5-5 0 1 1 *", "minutes", 5),
        ("0 5-5 1 1 *", "hours", 5),
        ("0 0 5-5 1 *", "days", 5),
        ("0 0 1 MAY-MAY *", "months", 5),
        ("0 0 * * FRI-5", "weekdays", 5),
    ],
)
def test_trap_a_range_of_one_value_is_that_value(text: str, name: str, value: int) -> None:
    field = NAMES.index(name) - 1
    assert croniter.expand(text)[0][field] == ["*"]
    assert values(text)[name] == (value,)


def test_trap_a_date_that_never_comes_leaves_the_weekdays() -> None:
    with pytest.raises(CroniterBadDateError):
        by_croniter("0 0 31 2 1", "UTC", START, 1)
    assert preview(cron="0 0 31 2 1", after=START, count=5) == [
        utc("2026-02-02"),
        utc("2026-02-09"),
        utc("2026-02-16"),
        utc("2026-02-23"),
        utc("2027-02-01"),
    ]


def test_trap_a_star_with_a_step_restricts_together_with_the_other_day_field() -> None:
    """Both must match, as in cron: croniter takes either."""
    after = utc("2026-02-01")
    assert by_croniter("0 0 */2 * 1", "UTC", after, 2) == [utc("2026-02-02"), utc("2026-02-03")]
    assert preview(cron="0 0 */2 * 1", after=after, count=2) == [utc("2026-02-09"), utc("2026-02-23")]


def test_trap_a_fixed_time_fires_once_in_a_repeated_hour() -> None:
    """In New York clocks go back from 2:00 to 1:00 on 1 November 2026, at 6:00 UTC."""
    after, zone = utc("2026-10-31T12:00"), "America/New_York"
    first, second, next_day = utc("2026-11-01T05:30"), utc("2026-11-01T06:30"), utc("2026-11-02T06:30")
    assert by_croniter("30 1 * * *", zone, after, 3) == [first, second, next_day]
    assert preview(cron="30 1 * * *", timezone=zone, after=after, count=2) == [first, next_day]
    assert preview(cron="30 1 * * *", timezone=zone, after=first + timedelta(minutes=5), count=1) == [next_day]


def test_trap_on_lord_howe_clocks_move_by_half_an_hour() -> None:
    """They go on from 2:00 to 2:30 on 4 October 2026, at 15:30 UTC, and back from 2:00 to 1:30 on 5 April, at 15:00."""
    zone, spring, autumn = "Australia/Lord_Howe", utc("2026-10-03T14:40"), utc("2026-04-04T14:40")
    assert by_croniter("0 * * * *", zone, spring, 2) == [utc("2026-10-03T15:30"), utc("2026-10-03T16:00")]
    assert preview(cron="0 * * * *", timezone=zone, after=spring, count=2) == [
        utc("2026-10-03T16:00"),  # 3:00: there is no 2:00 that night
        utc("2026-10-03T17:00"),
    ]
    assert by_croniter("45 1 * * *", zone, autumn, 2) == [utc("2026-04-04T14:45"), utc("2026-04-04T15:15")]
    assert preview(cron="45 1 * * *", timezone=zone, after=autumn, count=2) == [
        utc("2026-04-04T14:45"),
        utc("2026-04-05T15:15"),
    ]


def test_trap_a_very_long_number_is_refused_like_any_other() -> None:
    with pytest.raises(ValueError, match="digits") as raised:
        croniter(f"{'1' * 5000} * * * *")
    assert not isinstance(raised.value, CroniterError)
    assert problem(f"{'1' * 5000} * * * *") == "must have at most 256 characters, has 5008"
    for text in (f"{'1' * 240} * * * *", f"*/{'1' * 240} * * * *", f"1-{'1' * 240} * * * *", f"* * * * 1#{'1' * 240}"):
        assert "must be" in problem(text)


def test_trap_years_go_on_after_2099() -> None:
    with pytest.raises(CroniterBadCronError, match="out of range"):
        croniter("0 0 1 1 * 0 2100")
    assert preview(cron="0 0 1 1 *", after=utc("2099-06-01"), count=2) == [utc("2100-01-01"), utc("2101-01-01")]
    assert preview(cron="0 0 29 2 *", after=utc("2096-03-01"), count=2) == [utc("2104-02-29"), utc("2108-02-29")]
    assert preview(cron="30 12 31 12 *", timezone="Europe/Berlin", after=utc("2498-06-01"), count=5) == [
        utc("2498-12-31T11:30"),
        utc("2499-12-31T11:30"),
    ]
    assert preview(cron="* * * * *", after=utc("2499-12-31T23:58:30"), count=5) == [utc("2499-12-31T23:59")]


@pytest.mark.parametrize("text", ["\u0665 * * * *", "\uff15 * * * *"])
def test_trap_digits_of_other_scripts_are_no_digits(text: str) -> None:
    assert croniter.expand(text)[0][0] == [5]
    assert problem(text).endswith(NO_ASCII)


# Hostile input


@pytest.fixture(scope="module")
def fuzzer() -> ModuleType:
    spec = spec_from_file_location("fuzz_calendar", FUZZER)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_nothing_hostile_is_slow_or_raises_another_error(fuzzer: ModuleType) -> None:
    report = fuzzer.fuzz(seconds=2.0, seed=7)
    assert report.failures == []
    assert report.refused > 100
    assert all(report.calls[name] for name in fuzzer.LIMITS)


def test_the_fuzzer_notices_another_error(fuzzer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cron_expressions, "_split", lambda text: {}[text])
    report = fuzzer.fuzz(seconds=0.0, seed=7)
    assert "KeyError" in report.failures[0]


def test_the_fuzzer_notices_a_slow_call(fuzzer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fuzzer.LIMITS, "preview", 0.001)
    report = fuzzer.fuzz(seconds=0.0, seed=7)
    assert re.search(r"^preview of .* took .* ms, more than 0.001$", report.failures[0])


def test_the_fuzzer_notices_occurrences_that_contradict_each_other(
    fuzzer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cron_rules.CronRule, "count", lambda *_: 3)
    assert fuzzer.fuzz(seconds=0.0, seed=7).failures
