"""Our calendar beside croniter's and cronsim's: they may differ only where a rule below says why.

Most rules are readings: they say how the peer takes the case, in terms of our own calendar, and what we make of the
case when it is read so must be what the peer says, to the second. The others are predicates about the peer's answer.
"""

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from itertools import combinations, islice, pairwise
from zoneinfo import ZoneInfo

import pytest
from croniter import CroniterError, croniter
from cronsim import CronSim, CronSimError

from cron_ticks import preview
from cron_ticks.cron_expressions import MACROS, parse
from cron_ticks.cron_rules import DstFold, DstGap
from cron_ticks.errors import InvalidInputError
from support.expressions import aimed, broken_expression, random_expression, random_instant, random_zone

SEED = 20_260_101
COUNT = 3  # occurrences that are compared
AIMED, BROKEN = 0.35, 0.2  # of the cases: at a change of clocks, and most of them wrong
LAST_YEAR = 2150
MOST_TICKS = 20_000  # steps of cronsim to an occurrence; it jumps over dates that don't match
NOTHING = timedelta(0)
DAY = timedelta(days=1)
HOUR = timedelta(hours=1)
SECOND = timedelta(seconds=1)
LOWS, HIGHS = (0, 0, 0, 1, 1, 0), (59, 59, 23, 31, 12, 6)
Occurrences = list[datetime]


@dataclass(frozen=True)
class Case:
    """An expression, a zone and a start; and how clock changes are taken, where a peer does it in its own way."""

    text: str
    after: datetime
    zone: str
    dst_gap: DstGap | None = None
    dst_fold: DstFold | None = None
    seconds_stay: bool = False  # of what is moved to the end of a gap

    @cached_property
    def fields(self) -> list[str]:
        """Six of them, the second first."""
        text = self.text.strip(" \t").upper()
        fields = MACROS.get(text.lower(), text).split()
        return fields if len(fields) == 6 else ["0", *fields]

    @property
    def day(self) -> str:
        return self.fields[3]

    @property
    def weekday(self) -> str:
        return self.fields[5]

    @property
    def six(self) -> bool:
        return len(self.text.split()) == 6

    @property
    def wildcard(self) -> bool:
        return self.fields[1].startswith("*") or self.fields[2].startswith("*")

    def with_fields(self, **changed: str) -> "Case":
        names = ("second", "minute", "hour", "day", "month", "weekday")
        fields = [changed.get(name, text) for name, text in zip(names, self.fields, strict=True)]
        return replace(self, text=" ".join(fields if self.six else fields[1:]))

    def answer(self) -> Occurrences | None:
        """Ours; None: the expression is refused."""
        try:
            found = preview(
                cron=self.text,
                timezone=self.zone,
                after=self.after,
                count=COUNT,
                dst_gap=self.dst_gap,
                dst_fold=self.dst_fold,
            )
        except InvalidInputError:
            return None
        seconds = values(0, self.fields[0]) if self.seconds_stay else frozenset(range(60))
        return [moment if moment.second in seconds else moment.replace(second=min(seconds)) for moment in found]


def items(text: str) -> list[str]:
    return text.split(",")


def is_extension(item: str) -> bool:
    return re.fullmatch(r"L|LW|WL|\d+W|W\d+|\w+#\d|(\d|[A-Z]{3})L|L(\d|[A-Z]{3})", item) is not None


def has(text: str, pattern: str) -> bool:
    """Whether one of the items looks so."""
    return any(re.fullmatch(pattern, item) for item in items(text))


def values(number: int, text: str) -> frozenset[int]:
    """Of a field by its number, the second being 0."""
    fields = ["0", "0", "0", "*", "*", "*"]
    fields[number] = text
    read = parse(" ".join(fields))
    return frozenset((read.seconds, read.minutes, read.hours, read.days, read.months, read.weekdays)[number])


def offset(instant: datetime, zone: str) -> timedelta:
    found = instant.astimezone(ZoneInfo(zone)).utcoffset()
    assert found is not None
    return found


def changes(zone: str, start: datetime, end: datetime) -> Iterator[tuple[datetime, timedelta]]:
    """When clocks are changed in between, to the minute, and by how much. Asked of zoneinfo, not of ours."""
    start = start.replace(second=0, microsecond=0)
    while start < end:
        following = min(start + 6 * HOUR, end)
        if offset(start, zone) != offset(following, zone):
            steps = ((following - start) // SECOND) // 60
            marks = [start + timedelta(minutes=number) for number in range(steps + 1)]
            yield from (
                (late, offset(late, zone) - offset(early, zone))
                for early, late in pairwise([*marks, following])
                if offset(early, zone) != offset(late, zone)
            )
        start = following


# What croniter says, and why it is another thing.


def ask_croniter(case: Case) -> Occurrences:
    start = case.after.astimezone(ZoneInfo(case.zone))
    found = croniter(case.text, start, ret_type=datetime, second_at_beginning=True)
    return [found.get_next().astimezone(UTC) for _ in range(COUNT)]


def same_value_range(case: Case) -> Case | None:
    """croniter takes a range of one value, 5-5, for the whole range."""
    names = ("second", "minute", "hour", "day", "month", "weekday")
    changed: dict[str, str] = {}
    for number, text in enumerate(case.fields):
        whole = f"{LOWS[number]}-{HIGHS[number]}"
        read = [
            whole if re.fullmatch(r"\w+-\w+", item) and len(values(number, item)) == 1 else item for item in items(text)
        ]
        if read != items(text):
            changed[names[number]] = ",".join(read)
    return case.with_fields(**changed) if changed else None


def either_day(case: Case) -> Case | None:
    """croniter takes */2 in a day field for a restriction like any other: either field is enough."""
    if "*" in (case.day, case.weekday) or not ("*/" in case.day or "*/" in case.weekday):
        return None
    return case.with_fields(day=case.day.replace("*/", "1-31/"), weekday=case.weekday.replace("*/", "0-7/"))


def every_day(case: Case) -> Case | None:
    """croniter takes a day field with all values in it for *, if it has a lone * or there is a * in the other one."""
    if any(is_extension(item) for item in items(case.day) + items(case.weekday)):
        return None
    changed = {}
    if "*" in items(case.day) or (len(values(3, case.day)) == 31 and "*" in case.weekday):
        changed["day"] = "*"
    if "*" in items(case.weekday) or (len(values(5, case.weekday)) == 7 and "*" in case.day):
        changed["weekday"] = "*"
    return case.with_fields(**changed)


def nth_alone(case: Case) -> Case | None:
    """croniter forgets the plain days of the week in a list beside 5#2 or L5, if it takes such a list at all."""
    nth = [item for item in items(case.weekday) if is_extension(item)]
    return case.with_fields(weekday=",".join(nth)) if nth and nth != items(case.weekday) else None


def _fixed(case: Case) -> Case:
    """The same times, in an expression that doesn't start with *: so it falls under dst_gap and dst_fold."""
    minute = ",".join("0-59" + item[1:] if item.startswith("*") else item for item in items(case.fields[1]))
    hour = ",".join("0-23" + item[1:] if item.startswith("*") else item for item in items(case.fields[2]))
    return case.with_fields(minute=minute, hour=hour)


def end_of_every_gap(case: Case) -> Case | None:
    """croniter fires at the end of a gap also if minute or hour starts with *."""
    return replace(_fixed(case), dst_fold="both") if case.wildcard else None


def no_second_pass(case: Case) -> Case | None:
    """croniter may pass over the second pass of a fold though minute or hour starts with *."""
    return replace(_fixed(case), dst_gap="skip", dst_fold="first") if case.wildcard else None


def both_passes(case: Case) -> Case | None:
    """croniter fires in both passes of a repeated hour, whatever the expression."""
    return None if case.wildcard else replace(case, dst_fold="both")


def no_end_of_gap(case: Case) -> Case | None:
    """croniter drops what falls into a gap if the hours are all there are."""
    return replace(case, dst_gap="skip") if len(values(2, case.fields[2])) == 24 else None


def seconds_stay(case: Case) -> Case | None:
    """croniter moves what falls into a gap by whole minutes, so with seconds it fires some after the end of the gap."""
    return replace(case, seconds_stay=True) if case.six and 0 not in values(0, case.fields[0]) else None


def croniter_last_weekday(case: Case) -> bool:
    """croniter knows L5 for the last Friday, but neither 5L nor names."""
    return has(case.weekday, r"\w+L|L[A-Z]+")


def croniter_last_working_day(case: Case) -> bool:
    """croniter knows no LW."""
    return has(case.day, "LW|WL")


def croniter_nearest_in_list(case: Case) -> bool:
    """croniter takes 15W only if it stands alone."""
    return has(case.day, r"\d+W|W\d+") and "," in case.day


def croniter_nth_in_list(case: Case) -> bool:
    """croniter takes 5#2 or L5 and other days of the week in one list only if they are the same days."""
    return nth_alone(case) is not None


def croniter_seven(case: Case) -> bool:
    """croniter knows no 7 for Sunday in six fields."""
    return case.six and "7" in re.sub(r"/\d+", "", case.weekday)


def croniter_macro(case: Case) -> bool:
    """croniter takes @daily only without blanks around it."""
    return case.text.strip(" \t").lower() in MACROS and case.text != case.text.strip()


def croniter_never(case: Case) -> bool:
    """croniter finds no date where the day of the month never comes, though the day of the week would do."""
    return "*" not in case.day + case.weekday and min(values(3, case.day)) > 29 and case.fields[4] != "*"


# What cronsim says, and why it is another thing.


class EndlessError(Exception):
    """cronsim goes round in circles."""


class Bounded(CronSim):
    """cronsim, when it goes round in circles, says so after some time."""

    ticks = 0

    def tick(self, seconds: int = 1) -> None:
        self.ticks += 1
        if self.ticks > MOST_TICKS:
            raise EndlessError
        super().tick(seconds)


def ask_cronsim(case: Case) -> Occurrences:
    found = Bounded(case.text, case.after.astimezone(ZoneInfo(case.zone)))
    return [moment.astimezone(UTC) for moment in islice(found, COUNT)]


def six_fields_are_wildcards(case: Case) -> Case | None:
    """cronsim takes each expression with seconds for one whose minute or hour starts with *."""
    return replace(case, dst_gap="skip", dst_fold="both") if case.six and not case.wildcard else None


def first_pass_again(case: Case) -> Case | None:
    """cronsim forgets in which pass of a repeated hour it starts, and says what is over already."""
    first = case.after.astimezone(ZoneInfo(case.zone)).replace(fold=0).astimezone(UTC)
    return replace(case, after=first) if not case.wildcard and not case.six and first < case.after else None


def cronsim_macro(case: Case) -> bool:
    """cronsim knows no @daily."""
    return case.text.strip(" \t").lower() in MACROS


def cronsim_nearest(case: Case) -> bool:
    """cronsim knows no 15W, and no WL for LW."""
    return has(case.day, r"\d+W|W\d+|WL")


def cronsim_last_weekday(case: Case) -> bool:
    """cronsim knows 5L for the last Friday, but neither L5 nor names."""
    return has(case.weekday, r"L\w+|[A-Z]+L")


def cronsim_endless(case: Case) -> bool:
    """cronsim goes round in circles where an hour is repeated that doesn't begin at one, or has midnight in it."""
    return any(
        shift < NOTHING and _is_odd(case, at, shift) for at, shift in changes(case.zone, case.after, case.after + DAY)
    )


def stands_still(case: Case, theirs: Occurrences) -> bool:
    """cronsim stays where it is, or goes back, in such an hour."""
    back = [late for early, late in pairwise([case.after, *theirs]) if early >= late]
    return bool(back) and all(_is_repeated(moment.astimezone(ZoneInfo(case.zone))) for moment in back)


def midnight_in_gap(case: Case, theirs: Occurrences) -> bool:
    """cronsim begins a day at a midnight that is skipped: it fires at the end of the gap, or passes over an hour."""
    gaps = [
        at for at, shift in changes(case.zone, case.after, max(theirs)) if shift > NOTHING and _begins_day(case, at)
    ]
    ours = ours_until(case, max(theirs))
    wrong = set(theirs).symmetric_difference(ours)
    return all(any(at <= moment < at + HOUR for at in gaps) for moment in wrong)


def off_the_hour(case: Case, theirs: Occurrences) -> bool:
    """cronsim goes by whole hours: after a change that isn't by one, or not at one, it passes over what is left."""
    odd = [at for at, shift in changes(case.zone, case.after - HOUR, max(theirs)) if _is_odd(case, at, shift)]
    ours = ours_until(case, max(theirs))
    missed = [moment for moment in ours if moment not in theirs]
    return (
        bool(missed)
        and set(theirs) <= set(ours)
        and max(missed) - min(missed) < HOUR
        and any(at - HOUR <= min(missed) < at + DAY for at in odd)
    )


def ours_until(case: Case, end: datetime) -> Occurrences:
    return preview(
        cron=case.text,
        timezone=case.zone,
        after=case.after,
        count=10_000,
        ends_at=end,
        dst_gap=case.dst_gap,
        dst_fold=case.dst_fold,
    )


def _is_repeated(wall: datetime) -> bool:
    first, second = wall.replace(fold=0).utcoffset(), wall.replace(fold=1).utcoffset()
    assert first is not None
    assert second is not None
    return first > second


def _is_odd(case: Case, at: datetime, shift: timedelta) -> bool:
    """Whether a change is not by a whole hour, or not at one, or midnight comes twice."""
    wall = at.astimezone(ZoneInfo(case.zone))
    before = (wall - shift).replace(tzinfo=None)
    return bool(shift % HOUR) or wall.minute != 0 or (shift < NOTHING and wall.date() < before.date())


def _begins_day(case: Case, at: datetime) -> bool:
    """Whether the last thing that clocks show before `at` is of another date: midnight is skipped."""
    zone = ZoneInfo(case.zone)
    return (at - SECOND).astimezone(zone).date() < at.astimezone(zone).date()


# What we refuse and others take: how our reason begins or ends, and what the text must have in it.

REFUSALS = {
    "5/15 is no cron: a step needs a range": ("a step needs a range", r"(^|[,\s])\w+/\d"),
    "a range of one value has no step": ("a step needs a longer range", r"\w-\w+/"),
    "a step past the end of its range is a mistake": ("the step must be from", r"/0*[1-9]"),
    "a range doesn't run backwards": ("the range runs backwards", r"\w-\w"),
    "? is no cron": ("cron has no ?", r"\?"),
    "R, a time at random, is no cron": ("must be a number from", r"\bR"),
    "only blanks and tabs stand between fields": ("", r"[\n\r\x0b\x0c\x1c\x85\xa0\u2003\u2028\u3000]"),
    "digits and letters are ASCII": ("only ASCII", r"[^\x00-\x7f]"),
    "numbers have at most two digits, and one after #": ("must be", r"\d{3}|#\d\d"),
    "a month has no day 0": ("must be from 1 to", r"(^|[,\s])0"),
    "L, W and # stand beside *": ("an extension can't be combined with", r"L|W|#"),
    "there is no seventh field": ("must have five fields", r"\S+(\s+\S+){6}"),
    "an expression has at most 256 characters": ("must have at most 256 characters", r".{257}"),
}


def why_we_refuse(case: Case) -> str | None:
    """The rule by which we refuse what a peer takes, if there is one."""
    with pytest.raises(InvalidInputError) as refused:
        parse(case.text)
    for rule, (reason, pattern) in REFUSALS.items():
        if reason in refused.value.problem and re.search(pattern, case.text.upper(), re.DOTALL):
            return rule
    return None


Reading = Callable[[Case], Case | None]
Predicate = Callable[[Case], bool]


@dataclass(frozen=True)
class Peer:
    """A library, and all the rules that may explain why it says another thing than we do."""

    name: str
    ask: Callable[[Case], Occurrences]
    readings: tuple[Reading, ...]
    refusals: tuple[Predicate, ...]  # what it refuses and we take
    answers: tuple[Callable[[Case, Occurrences], bool], ...] = ()

    def rules(self) -> list[str]:
        return [rule.__name__ for rule in (*self.readings, *self.refusals, *self.answers)]

    def answer(self, case: Case) -> Occurrences | None:
        try:
            return self.ask(case)
        except (CroniterError, CronSimError, EndlessError):
            return None

    def why(self, case: Case, ours: Occurrences | None, theirs: Occurrences | None) -> list[str]:
        """The rules that explain the difference; none: nothing does."""
        if ours is None:
            rule = why_we_refuse(case)
            return [rule] if rule else []
        if theirs is None:
            return [rule.__name__ for rule in self.refusals if rule(case)][:1]
        return self._readings(case, theirs) or self._answers(case, theirs)

    def _readings(self, case: Case, theirs: Occurrences) -> list[str]:
        """The fewest readings with which we say the same."""
        for number in range(1, len(self.readings) + 1):
            for chosen in combinations(self.readings, number):
                read = _read(case, chosen)
                if read is not None and read.answer() == theirs:
                    return [reading.__name__ for reading in chosen]
        return []

    def _answers(self, case: Case, theirs: Occurrences) -> list[str]:
        """A predicate that holds for the case, or for the case as the peer reads it."""
        for reading in (None, *self.readings):
            read = case if reading is None else reading(case)
            for rule in self.answers:
                if read is not None and rule(read, theirs):
                    return [rule.__name__] if reading is None else [reading.__name__, rule.__name__]
        return []


def _read(case: Case, readings: tuple[Reading, ...]) -> Case | None:
    for reading in readings:
        read = reading(case)
        if read is None or read == case:
            return None
        case = read
    return case


CRONITER = Peer(
    "croniter",
    ask_croniter,
    (
        same_value_range,
        every_day,
        either_day,
        nth_alone,
        end_of_every_gap,
        no_second_pass,
        both_passes,
        no_end_of_gap,
        seconds_stay,
    ),
    (
        croniter_last_weekday,
        croniter_last_working_day,
        croniter_nearest_in_list,
        croniter_nth_in_list,
        croniter_seven,
        croniter_macro,
        croniter_never,
    ),
)
CRONSIM = Peer(
    "cronsim",
    ask_cronsim,
    (six_fields_are_wildcards, first_pass_again),
    (cronsim_macro, cronsim_nearest, cronsim_last_weekday, cronsim_endless),
    (stands_still, midnight_in_gap, off_the_hour),
)


@dataclass
class Comparison:
    """How many cases agree, and by which rules the others are explained."""

    cases: int = 0
    refused: int = 0
    agreed: int = 0
    used: Counter[str] = field(default_factory=Counter)
    unexplained: list[str] = field(default_factory=list)

    def compare(self, peer: Peer, case: Case) -> None:
        ours, theirs = case.answer(), peer.answer(case)
        self.cases += 1
        if ours == theirs:
            self.agreed += 1
            self.refused += ours is None
            return
        why = peer.why(case, ours, theirs)
        self.used.update(f"{peer.name}: {rule}" for rule in why)
        if not why:
            self.unexplained.append(f"{case!r}\n  ours   {_shown(ours)}\n  {peer.name} {_shown(theirs)}")

    def report(self) -> str:
        lines = [f"{self.cases} comparisons: {self.agreed} agree, {self.refused} of these in refusing"]
        return "\n".join(lines + [f"{count:6}  {rule}" for rule, count in sorted(self.used.items())])


def _shown(occurrences: Occurrences | None) -> str:
    return "refuses" if occurrences is None else ", ".join(f"{moment:%Y-%m-%d %H:%M:%S}" for moment in occurrences)


def random_case(dice: random.Random) -> Case:
    zone, kind = random_zone(dice), dice.random()
    if kind < AIMED:
        return Case(*aimed(dice, zone, last_year=LAST_YEAR), zone)
    text = broken_expression(dice) if kind < AIMED + BROKEN else random_expression(dice)
    return Case(text, random_instant(dice, zone, last_year=LAST_YEAR), zone)


# A case for each rule, so that no excuse outlives what it was made for.
EXAMPLES = [
    (CRONITER, "same_value_range", "0 0 5-5 * *", "2026-01-01T00:00", "UTC"),
    (CRONITER, "every_day", "0 0 9,* * 0", "2026-01-01T00:00", "UTC"),
    (CRONITER, "either_day", "0 0 1 * */2", "2026-01-01T00:00", "UTC"),
    (CRONITER, "nth_alone", "0 0 * * 7,7#5", "2026-01-01T00:00", "UTC"),
    (CRONITER, "end_of_every_gap", "0 * * * *", "2026-10-03T14:40", "Australia/Lord_Howe"),
    (CRONITER, "no_second_pass", "*/7,22 0-1 * * *", "2080-04-06T14:48", "Australia/Lord_Howe"),
    (CRONITER, "both_passes", "30 1 * * *", "2026-10-31T12:00", "America/New_York"),
    (CRONITER, "no_end_of_gap", "30 0-23 * * *", "2026-03-08T06:40", "America/New_York"),
    (CRONITER, "seconds_stay", "3 30 2 * * *", "2026-03-08T06:00", "America/New_York"),
    (CRONITER, "croniter_last_weekday", "0 0 * * 2L", "2026-01-01T00:00", "UTC"),
    (CRONITER, "croniter_last_working_day", "0 0 LW * *", "2026-01-01T00:00", "UTC"),
    (CRONITER, "croniter_nearest_in_list", "0 0 1W,15 * *", "2026-01-01T00:00", "UTC"),
    (CRONITER, "croniter_nth_in_list", "0 0 * * L5,0", "2026-01-01T00:00", "UTC"),
    (CRONITER, "croniter_seven", "0 0 0 * * 7", "2026-01-01T00:00", "UTC"),
    (CRONITER, "croniter_macro", "@daily ", "2026-01-01T00:00", "UTC"),
    (CRONITER, "croniter_never", "0 0 31 2 1", "2026-01-01T00:00", "UTC"),
    (CRONSIM, "six_fields_are_wildcards", "0 30 2 * * *", "2026-03-08T06:00", "America/New_York"),
    (CRONSIM, "first_pass_again", "30 1 * * *", "2026-11-01T06:20", "America/New_York"),
    (CRONSIM, "cronsim_macro", "@daily", "2026-01-01T00:00", "UTC"),
    (CRONSIM, "cronsim_nearest", "0 0 15W * *", "2026-01-01T00:00", "UTC"),
    (CRONSIM, "cronsim_last_weekday", "0 0 * * FRIL", "2026-01-01T00:00", "UTC"),
    (CRONSIM, "cronsim_endless", "22,3-22/15 */2 * * *", "1993-10-31T00:49", "America/St_Johns"),
    (CRONSIM, "stands_still", "*/20 * 1 * *", "2009-11-01T01:17", "America/St_Johns"),
    (CRONSIM, "midnight_in_gap", "* */2 8 * *", "2026-03-08T01:00", "America/Havana"),
    (CRONSIM, "off_the_hour", "* 4 * * *", "2026-10-03T13:53", "Australia/Lord_Howe"),
    (CRONITER, "5/15 is no cron: a step needs a range", "5/15 * * * *", "2026-01-01T00:00", "UTC"),
    (CRONITER, "a range of one value has no step", "0-0/2 * * * *", "2026-01-01T00:00", "UTC"),
    (CRONITER, "a step past the end of its range is a mistake", "*/70 * * * *", "2026-01-01T00:00", "UTC"),
    (CRONITER, "a range doesn't run backwards", "0 0 * * FRI-SUN", "2026-01-01T00:00", "UTC"),
    (CRONITER, "? is no cron", "0 0 ? * *", "2026-01-01T00:00", "UTC"),
    (CRONITER, "R, a time at random, is no cron", "R * * * *", "2026-01-01T00:00", "UTC"),
    (CRONITER, "only blanks and tabs stand between fields", "0 0 *\n* *", "2026-01-01T00:00", "UTC"),
    (CRONITER, "digits and letters are ASCII", "5 \uff18 * * *", "2026-01-01T00:00", "UTC"),
    (CRONITER, "numbers have at most two digits, and one after #", "0 000 * * *", "2026-01-01T00:00", "UTC"),
    (CRONITER, "a month has no day 0", "0 0 0 0 * *", "2026-01-01T00:00", "UTC"),
    (CRONITER, "L, W and # stand beside *", "0 0 L * 5", "2026-01-01T00:00", "UTC"),
    (CRONITER, "there is no seventh field", "* * * * * * *", "2026-01-01T00:00", "UTC"),
    (CRONITER, "an expression has at most 256 characters", f"{'1,' * 130}1 * * * *", "2026-01-01T00:00", "UTC"),
]


@pytest.mark.parametrize(("peer", "rule", "text", "after", "zone"), EXAMPLES)
def test_each_rule_still_explains_a_difference(peer: Peer, rule: str, text: str, after: str, zone: str) -> None:
    case = Case(text, datetime.fromisoformat(after).replace(tzinfo=UTC), zone)
    ours, theirs = case.answer(), peer.answer(case)
    assert ours != theirs
    assert peer.why(case, ours, theirs) == [rule]


def test_each_rule_has_its_example() -> None:
    assert [rule for _, rule, *_ in EXAMPLES] == [*CRONITER.rules(), *CRONSIM.rules(), *REFUSALS]


@pytest.mark.soak(small=2_000, full=20_000)
def test_each_difference_from_croniter_and_cronsim_has_its_rule(size: int) -> None:
    dice, comparison = random.Random(SEED), Comparison()  # noqa: S311 - no secret
    for _ in range(size):
        case = random_case(dice)
        for peer in (CRONITER, CRONSIM):
            comparison.compare(peer, case)
    print(f"\n{comparison.report()}")  # noqa: T201
    assert not comparison.unexplained, "\n".join(comparison.unexplained[:10])
    assert comparison.agreed > comparison.cases / 2
