"""What a schedule's rule says, in one line of English: the times that clocks show, without what DST does to them.

The line is exact, unless a list is too long for it: that one ends with `and 12 more`. `0, 7, 14 … 56` leaves nothing
open: it stands for even steps only.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, timedelta
from itertools import groupby, product

from cron_ticks.cron_expressions import LONGEST_MONTHS, CronExpression, Extension, LastDay, NearestWorkingDay, parse
from cron_ticks.cron_rules import CronRule
from cron_ticks.occurrences import RULE_ERRORS, IntervalRule, OneOffRule
from cron_ticks.zones import check_zone

LONGEST_LINE = 200  # a few more, if all six fields are long lists and the zone's name is long too
MOST_SHOWN = (8, 5, 3, 2, 1, 0)  # of each list; fewer and fewer, until the line is short enough
FEW_TIMES = 4  # times of a day that are all named
FEW_RUNS = 3  # of consecutive hours
LONG_RUN = 3  # values that are worth a `to`
LONG_STEPS = 5  # values in even steps that are worth a `…`
HOURS, DAYS, SHORTEST_MONTH = 24, 31, 28

MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
ORDINALS = ("first", "second", "third", "fourth", "fifth")
ENDINGS = {1: "st", 2: "nd", 3: "rd", 21: "st", 22: "nd", 23: "rd"}
UNITS = {"day": timedelta(days=1), "hour": timedelta(hours=1), "minute": timedelta(minutes=1)}


def describe(cron: str, timezone: str | None = None) -> str:
    """One line of English for an expression, such as `at 09:00 on Mondays, Europe/Berlin time`."""
    expression = parse(cron)
    zone = "" if timezone is None else _zone(check_zone("timezone", timezone))
    line = ""
    for most in MOST_SHOWN:
        line = f"{_times(expression, most)}{_dates(expression, most)}{zone}"
        if len(line) <= LONGEST_LINE:
            break
    return line


def describe_rule(rule: IntervalRule | OneOffRule | CronRule) -> str:
    """One line of English; for an expression or a zone that can't be followed any more, what is stored."""
    if isinstance(rule, IntervalRule):
        return _interval(rule.interval)
    if isinstance(rule, OneOffRule):
        return f"once, at {rule.at.astimezone(UTC).replace(tzinfo=None).isoformat(' ')} UTC"
    try:
        return describe(rule.expression, rule.zone)
    except RULE_ERRORS:
        zone, text = _zone(rule.zone), " ".join(rule.expression.split())
        room = LONGEST_LINE - len(zone)
        return f"{text if len(text) <= room else f'{text[: room - 1]}…'}{zone}"


def _zone(name: str) -> str:
    return ", UTC" if name == "UTC" else f", {name} time"


def _interval(interval: timedelta) -> str:
    parts = []
    for unit, length in UNITS.items():
        number, interval = divmod(interval, length)
        parts += [f"{number} {unit}{'s' * (number > 1)}"] if number else []
    if interval:
        seconds = f"{interval.total_seconds():f}".rstrip("0").rstrip(".")
        parts.append(f"{seconds} second{'s' * (seconds != '1')}")
    return f"every {' '.join(parts) if len(parts) > 1 else parts[0].removeprefix('1 ')}"


def _times(cron: CronExpression, most: int) -> str:
    """When on a day."""
    if len(cron.hours) == HOURS:
        return _in_each_hour(_in_an_hour(cron, most))
    times_an_hour = len(cron.minutes) * len(cron.seconds)
    if times_an_hour * len(cron.hours) <= FEW_TIMES:
        return _all_times(cron, most)
    return _once_an_hour(cron, most) if times_an_hour == 1 else _often(cron, most)


def _once_an_hour(cron: CronExpression, most: int) -> str:
    if step := _even_step(cron.hours):
        return f"{_every(step, 'hour')} {_stretches(cron, [cron.hours])}"
    runs = _runs(cron.hours)
    if len(runs) <= min(FEW_RUNS, most) and min(map(len, runs)) >= LONG_RUN:
        return f"every hour {_stretches(cron, runs)}"
    return _all_times(cron, most)


def _often(cron: CronExpression, most: int) -> str:
    lead, runs = _in_an_hour(cron, most), _runs(cron.hours)
    each = _in_each_hour(lead)
    if len(runs) <= min(FEW_RUNS, most) and (lead == each or min(map(len, runs)) >= LONG_RUN):
        return f"{each} {_stretches(cron, runs)}"
    return f"{lead} {'in' if lead == each else 'of'} {_numbered('hour', cron.hours, most)}"


def _in_an_hour(cron: CronExpression, most: int) -> str:
    """`every 5 minutes`, `every 5 minutes at second 30`, `at minute 7`, `every 10 seconds in minutes 7 and 9`."""
    every_minutes, every_seconds = _evenly(cron.minutes, "minute"), _evenly(cron.seconds, "second")
    minutes, seconds = _numbered("minute", cron.minutes, most), _numbered("second", cron.seconds, most)
    if cron.seconds == (0,):
        return every_minutes or f"at {minutes}"
    if every_seconds:
        return every_seconds if every_minutes == "every minute" else f"{every_seconds} in {minutes}"
    return f"{every_minutes} at {seconds}" if every_minutes else f"at {seconds} of {minutes}"


def _in_each_hour(lead: str) -> str:
    if lead.startswith("at"):
        return f"every hour {lead}"
    return f"{lead} of every hour" if " in " in lead else lead


def _stretches(cron: CronExpression, runs: Iterable[Sequence[int]]) -> str:
    """From the first to the last time in each run of hours."""
    return " and ".join(
        f"from {_clock(cron, run[0], cron.minutes[0], cron.seconds[0])}"
        f" to {_clock(cron, run[-1], cron.minutes[-1], cron.seconds[-1])}"
        for run in runs
    )


def _all_times(cron: CronExpression, most: int) -> str:
    times = [_clock(cron, *parts) for parts in product(cron.hours, cron.minutes, cron.seconds)]
    return f"at {_listed(times, most, 'more times')}"


def _clock(cron: CronExpression, hour: int, minute: int, second: int) -> str:
    return f"{hour:02}:{minute:02}" if cron.seconds == (0,) else f"{hour:02}:{minute:02}:{second:02}"


def _dates(cron: CronExpression, most: int) -> str:
    """On which days."""
    all_days, all_weekdays = len(cron.days) == DAYS, len(cron.weekdays) == len(WEEKDAYS)
    months = _months(cron, most)
    in_months = f" {'in' if ' and ' in months or ' to ' not in months else 'from'} {months}" if months else ""
    # Not `the last day of June to August`: that would be one day.
    month = f"the month{in_months}" if not months or " to " in months else months
    if (any if cron.either_day else all)((all_days, all_weekdays)):
        return f"{'' if len(cron.hours) == HOURS else ' every day'}{in_months}"
    if cron.extensions:
        return f" on {_extended(cron, most)} of {month}"
    if all_days:
        return f"{_weekdays(cron, most)}{in_months}"
    on_days = f" on {_numbered('day', sorted(cron.days), most)} of"
    if all_weekdays:
        return f"{on_days} {'every month' if not months and max(cron.days) <= SHORTEST_MONTH else month}"
    if not cron.either_day:
        return f"{_weekdays(cron, most)}, but only{on_days} {month}"
    there = "" if not months else " in that month" if len(cron.months) == 1 else " in these months"
    return f"{on_days} {month}, and{_weekdays(cron, most, every=True)}{there}"


def _months(cron: CronExpression, most: int) -> str:
    """The months, if not all; without those that never have the days that are asked for."""
    least = 1 if cron.either_day else min(cron.days)
    months = [month for month in cron.months if LONGEST_MONTHS[month] >= least]
    return "" if len(cron.months) == len(MONTHS) else _series(months, most, lambda month: MONTHS[month - 1])


def _weekdays(cron: CronExpression, most: int, *, every: bool = False) -> str:
    """`on Mondays and Fridays`, or with `every`, `on every Monday and Friday`."""
    numbers = sorted((weekday - 1) % 7 for weekday in cron.weekdays)
    names = [WEEKDAYS[number] for number in numbers]
    if most and len(names) >= LONG_RUN and len(_runs(numbers)) == 1:
        return f"{' every day' if every else ','} from {names[0]} to {names[-1]}"
    return f" on every {_listed(names, most)}" if every else f" on {_listed([f'{name}s' for name in names], most)}"


def _extended(cron: CronExpression, most: int) -> str:
    """Days of which at least one is an extension: `day 15 and the last day`."""
    plain = [_numbered("day", sorted(cron.days), most)] if cron.days else []
    plain += [f"every {WEEKDAYS[weekday - 1]}" for weekday in sorted(cron.weekdays)]
    return _listed([*plain, *map(_extension, dict.fromkeys(cron.extensions))], most, "more such days")


def _extension(extension: Extension) -> str:
    if isinstance(extension, LastDay):
        return "the last working day" if extension.working else "the last day"
    if isinstance(extension, NearestWorkingDay):
        return f"the working day nearest to the {extension.day}{ENDINGS.get(extension.day, 'th')}"
    ordinal = "last" if extension.number is None else ORDINALS[extension.number - 1]
    return f"the {ordinal} {WEEKDAYS[extension.weekday - 1]}"


def _evenly(values: Sequence[int], unit: str) -> str:
    """`every 15 minutes`, if that holds from one hour to the next too; else nothing."""
    step = 60 // len(values)
    return _every(step, unit) if len(values) > 1 and list(values) == list(range(0, 60, step)) else ""


def _every(number: int, unit: str) -> str:
    return f"every {unit}" if number == 1 else f"every {number} {unit}s"


def _numbered(unit: str, values: Sequence[int], most: int) -> str:
    return f"{unit}{'s' * (len(values) > 1)} {_series(values, most)}"


def _series(values: Sequence[int], most: int, name: Callable[[int], str] = str) -> str:
    """`1, 3, 5 … 31`, or `1 to 15, 20 and 25`."""
    if _even_step(values) > 1 and most:
        return f"{', '.join(map(name, values[:3]))} … {name(values[-1])}"
    parts: list[Sequence[int]] = []
    for run in _runs(values):
        parts += [run] if most and len(run) >= LONG_RUN else [[value] for value in run]
    texts = [name(part[0]) if len(part) == 1 else f"{name(part[0])} to {name(part[-1])}" for part in parts]
    return _listed(texts, most, sizes=[len(part) for part in parts])


def _listed(texts: Sequence[str], most: int, more: str = "more", sizes: Sequence[int] = ()) -> str:
    """`a, b and c`, or `a, b and 7 more`. A text may stand for several: `sizes`."""
    if len(texts) > most + 1:
        shown = most or 1
        texts = [*texts[:shown], f"{sum(sizes[shown:]) or len(texts) - shown} {more}"]
    return " and ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))


def _runs(values: Sequence[int]) -> list[list[int]]:
    """Consecutive values."""
    groups = groupby(enumerate(values), lambda pair: pair[1] - pair[0])
    return [[value for _, value in group] for _, group in groups]


def _even_step(values: Sequence[int]) -> int:
    """How far apart they are, if there are many of them, evenly spaced; else 0."""
    if len(values) < LONG_STEPS:
        return 0
    step = values[1] - values[0]
    return step if list(values) == list(range(values[0], values[-1] + 1, step)) else 0
