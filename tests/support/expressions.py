"""Random cron expressions: right ones, and broken ones. Dice are thrown by hypothesis or by a plain Random."""

import random
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from hypothesis import strategies as st

from cron_ticks.cron_expressions import MACROS, MONTH_NAMES, WEEKDAY_NAMES
from cron_ticks.zones import known_zones, span_at

ZONES = tuple(sorted(known_zones()))
# Where clocks are changed in ways of their own: by half an hour, at midnight, by a day, twice for Ramadan, backwards.
ODD_ZONES = (
    "Africa/Cairo",
    "Africa/Casablanca",
    "America/Havana",
    "America/New_York",
    "America/Sao_Paulo",
    "America/St_Johns",
    "Antarctica/Troll",
    "Asia/Beirut",
    "Asia/Gaza",
    "Asia/Kathmandu",
    "Asia/Tehran",
    "Australia/Lord_Howe",
    "Europe/Berlin",
    "Europe/Dublin",
    "Pacific/Apia",
    "Pacific/Chatham",
)
FIRST_YEAR, LAST_YEAR = 1970, 2499
LATEST_IN_ANY_MONTH = 29  # a later day of the month may never come in the months that are drawn beside it

# What people write who know another cron, and what programs produce: texts to begin with, right and wrong.
CORPUS = (
    "* * * * *",
    "*/5 * * * *",
    "0 9 * * MON-FRI",
    "30 4 1,15 * 5",
    "0 0 1 1 *",
    "5 0 * 8 *",
    "15 14 1 * *",
    "0 22 * * 1-5",
    "23 0-20/2 * * *",
    "5 4 * * sun",
    "*/10 * * * * *",
    "0 30 2 * * *",
    "0 0 L * *",
    "0 0 LW * *",
    "0 0 15W * *",
    "0 0 * * 5L",
    "0 0 * * FRI#2",
    "0 0 29 2 *",
    "0 0 * 2 MON#5",
    "59 59 23 29 2 */7",
    f"{'0-59,' * 49}* * * * *",
    f"* * * * {'1-7,' * 61}0",
    "59 23 31 12 7",
    "0 0 1-31/30 1-12/11 *",
    *MACROS,
    "@reboot",
    "@every 5m",
    "0 0 ? * *",
    "H H * * *",
    "R * * * *",
    "5/15 * * * *",
    "*/70 * * * *",
    "*/0 * * * *",
    "0 0 30 2 *",
    "0 0 * * FRI-SUN",
    "0 0 L * 5",
    "0 0 L-3 * *",
    "1,,2 * * * *",
    "0 0 1 1 * 2030",
    "0 0 0 1 1 * 2030",
    "",
)
BLANKS_OF_OTHERS = "\u00a0\u2003\u3000\u2028\x0b\x0c\x1c\x85\n\r\0"
DIGITS_OF_OTHERS = "\u0663\u06f5\u096b\uff13\xb2\u2460\u2167\U0001d7d7"  # digits, or what looks like one
LETTERS_OF_OTHERS = "\u017f\u0131\u212a\xdf\u0130\u041c"  # some become ASCII when they are made small or large
PIECES = (*"*/-,#?LWHR@0123456789 \t", "MON", "fri", "JAN", "dec", "*/", "-5", "/0", "#6", "99999999999999999999", "~")


def random_expression(dice: random.Random, *, seconds: float = 0.2, extensions: float = 0.2) -> str:
    """One that cron can mean. `seconds` and `extensions`: how likely six fields and L, W, # are."""
    if dice.random() < 0.02:
        return dice.choice(tuple(MACROS))
    minute, hour = _field(dice, 0, 59), _field(dice, 0, 23)
    day, weekday = _days(dice, extensions)
    month = "*" if _may_be_missing(day) else _field(dice, 1, 12, MONTH_NAMES, every=0.7)
    fields = [minute, hour, day, month, weekday]
    if dice.random() < seconds:
        fields.insert(0, _field(dice, 0, 59))
    return " ".join(fields)


def aimed(dice: random.Random, zone: str, *, last_year: int = LAST_YEAR) -> tuple[str, datetime]:
    """An expression with times around a change of the zone's clocks, if it has one, and an instant shortly before."""
    change = span_at(zone, random_instant(dice, zone, last_year=last_year - 2)).end  # at most two years on
    instant = max(change - timedelta(seconds=dice.randint(-7200, 20_000)), datetime(FIRST_YEAR, 1, 1, tzinfo=UTC))
    local = [(change + timedelta(hours=hours)).astimezone(ZoneInfo(zone)).hour for hours in (-2, -1, 0, 1)]
    minute = dice.choice(("*", "*/20", "0", "30", "*/15,7", _field(dice, 0, 59)))
    one, other = sorted((dice.choice(local), dice.choice(local)))
    hour = dice.choice(("*", "*/2", str(one), f"{one},{other}", f"{one}-{other}", "*/1", _field(dice, 0, 23)))
    day = dice.choice(("*", "*", "*/2", str(change.day)))
    fields = [minute, hour, day, "*", dice.choice(("*", "*", "*/2", "1-5"))]
    return " ".join(fields if dice.random() < 0.75 else [_field(dice, 0, 59), *fields]), instant


def broken_expression(dice: random.Random) -> str:
    """Nearly always one that cron can't mean: a right or a known one, with a few characters changed."""
    text = dice.choice(CORPUS) if dice.random() < 0.5 else random_expression(dice)
    for _ in range(dice.randint(1, 4)):
        text = dice.choice(MUTATIONS)(dice, text)
    return text


def random_text(dice: random.Random) -> str:
    """Anything: bytes, or characters of all of Unicode, also such as no file may hold."""
    length = dice.choice((1, 5, 20, 60, 300))
    if dice.random() < 0.5:
        return dice.randbytes(length).decode("latin-1")
    return "".join(chr(dice.randrange(0x110000)) for _ in range(length))


def random_zone(dice: random.Random) -> str:
    """Any zone, and often an odd one."""
    return dice.choice(ODD_ZONES if dice.random() < 0.5 else ZONES)


def random_instant(
    dice: random.Random, zone: str, *, first_year: int = FIRST_YEAR, last_year: int = LAST_YEAR
) -> datetime:
    """Any second, and often one near a change of the zone's clocks."""
    start = datetime(first_year, 1, 1, tzinfo=UTC)
    seconds = (datetime(last_year + 1, 1, 1, tzinfo=UTC) - start) // timedelta(seconds=1)
    instant = start + timedelta(seconds=dice.randrange(seconds))
    if dice.random() < 0.6:
        change = span_at(zone, instant).end
        near = change - timedelta(seconds=dice.randint(-7200, 100_000))
        return near if first_year <= near.year <= last_year else instant
    return instant


def expressions(*, seconds: float = 0.2, extensions: float = 0.2) -> st.SearchStrategy[str]:
    """A strategy of what cron can mean."""
    return st.randoms(use_true_random=False).map(
        lambda dice: random_expression(dice, seconds=seconds, extensions=extensions)
    )


def broken_expressions() -> st.SearchStrategy[str]:
    """A strategy of what cron can't mean, nearly always."""
    return st.randoms(use_true_random=False).map(broken_expression)


def _field(dice: random.Random, low: int, high: int, names: tuple[str, ...] = (), *, every: float = 0.3) -> str:
    if dice.random() < every:
        return "*"
    return ",".join(_item(dice, low, high, names) for _ in range(dice.choice((1, 1, 1, 2, 3))))


def _item(dice: random.Random, low: int, high: int, names: tuple[str, ...]) -> str:
    first, last = sorted((dice.randint(low, high), dice.randint(low, high)))
    kind = dice.choices(("value", "range", "range step", "star step", "same", "star"), (30, 25, 20, 20, 3, 2))[0]
    if kind == "star":
        return "*"
    if kind == "star step":
        return f"*/{dice.randint(1, high - low)}"
    if kind == "range step" and last > first:
        return f"{_written(dice, first, low, names)}-{_written(dice, last, low, names)}/{dice.randint(1, last - first)}"
    if kind == "range":
        return f"{_written(dice, first, low, names)}-{_written(dice, last, low, names)}"
    if kind == "same":
        return f"{first}-{_written(dice, first, low, names)}"
    return _written(dice, first, low, names)


def _written(dice: random.Random, number: int, low: int, names: tuple[str, ...]) -> str:
    """As a number, with a zero before it at times, or as a name."""
    if number - low < len(names) and dice.random() < 0.4:
        name = names[number - low]
        return dice.choice((name, name.lower(), name.capitalize()))
    return f"{number:02}" if dice.random() < 0.1 else str(number)


def _days(dice: random.Random, extensions: float) -> tuple[str, str]:
    if dice.random() >= extensions:
        return _field(dice, 1, 31, every=0.5), _field(dice, 0, 7, WEEKDAY_NAMES, every=0.5)
    of_month = dice.random() < 0.5
    items = [_day_extension(dice) if of_month else _weekday_extension(dice)]
    if dice.random() < 0.3:
        items.append(_item(dice, 1, 31, ()) if of_month else _item(dice, 0, 7, WEEKDAY_NAMES))
    dice.shuffle(items)
    return (",".join(items), "*") if of_month else ("*", ",".join(items))


def _day_extension(dice: random.Random) -> str:
    day = dice.randint(1, 28)
    return dice.choice(("L", "LW", "WL", "l", f"{day}W", f"W{day}", f"{day}w"))


def _weekday_extension(dice: random.Random) -> str:
    weekday = _written(dice, dice.randint(0, 7), 0, WEEKDAY_NAMES).removeprefix("0") or "0"
    return dice.choice((f"{weekday}#{dice.randint(1, 5)}", f"{weekday}L", f"L{weekday}", f"{weekday}l"))


def _may_be_missing(day: str) -> bool:
    """Whether there are months that never have any of these days."""
    if "*" in day or re.search(r"[LW]", day.upper()):
        return False
    return min(int(item.split("-")[0]) for item in re.sub(r"/\d+", "", day).split(",")) > LATEST_IN_ANY_MONTH


def _insert(dice: random.Random, text: str) -> str:
    place = dice.randint(0, len(text))
    others = (BLANKS_OF_OTHERS, DIGITS_OF_OTHERS, LETTERS_OF_OTHERS)
    piece = dice.choice(PIECES) if dice.random() < 0.7 else dice.choice(dice.choice(others))
    return text[:place] + piece + text[place:]


def _drop(dice: random.Random, text: str) -> str:
    place = dice.randint(0, len(text))
    return text[:place] + text[place + dice.randint(1, 3) :]


def _replace(dice: random.Random, text: str) -> str:
    return _insert(dice, _drop(dice, text))


def _repeat(dice: random.Random, text: str) -> str:
    start = dice.randint(0, len(text))
    return text[:start] + text[start : start + dice.randint(1, 10)] * dice.choice((2, 2, 3, 50)) + text[start:]


def _swap(dice: random.Random, text: str) -> str:
    fields = text.split(" ")
    dice.shuffle(fields)
    return " ".join(fields)


def _in_another_script(dice: random.Random, text: str) -> str:
    """A digit of another script for one of ours: int() would read most of them."""
    scripts = ("٠١٢٣٤٥٦٧٨٩", "０１２３４５６７８９", "०१२३४५६७८९", "⁰¹²³⁴⁵⁶⁷⁸⁹")  # noqa: RUF001
    return text.translate({ord("0") + dice.randrange(10): dice.choice(dice.choice(scripts))})


def _other_case(_dice: random.Random, text: str) -> str:
    return text.swapcase()


MUTATIONS: tuple[Callable[[random.Random, str], str], ...] = (
    _insert,
    _drop,
    _replace,
    _repeat,
    _swap,
    _in_another_script,
    _other_case,
)
