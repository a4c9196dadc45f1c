"""Backfills: occurrences of the past that somebody wants to have after all. Pure: no clock, no I/O."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import pairwise, takewhile
from typing import Literal

from cron_ticks.checks import check_count, check_instant
from cron_ticks.errors import InvalidInputError
from cron_ticks.occurrences import MICROSECOND, RULE_ERRORS, IntervalRule, Stretch, Timetable
from cron_ticks.schedules import Schedule

MOST_BACKFILL = 10_000  # occurrences of one
PER_MINUTE = 600
MOST_PER_MINUTE = 60_000
MOST_LOOKED_AT = 500  # occurrences per step
MOST_DAYS = 50  # of them, because each day has a partition of the ledger, and a transaction has room for few new ones
STEP = timedelta(seconds=10)  # for which a step makes ticks
MINUTE = timedelta(minutes=1)
KEPT_MARGIN = timedelta(days=1)  # what is about to be removed from the ledger is not begun with

BackfillOutcome = Literal["done", "cancelled", "failed"]


@dataclass(frozen=True)
class Backfill:
    """A row of `cron_backfills`, and how many of its ticks are pending."""

    id: str
    schedule_id: str
    start: datetime
    end: datetime  # the first instant after it
    position: datetime  # up to here it is done
    total: int  # occurrences in it
    made: int  # of these, ticks were made
    skipped: int  # and these had ended already, or were somebody else's to fire
    pending: int  # ticks that have not fired yet
    per_minute: int
    created_at: datetime
    created_by: str | None
    ended_at: datetime | None
    outcome: BackfillOutcome | None  # None: it is under way
    reason: str | None

    @property
    def progress(self) -> float:
        """From 0 to 1: the part of its occurrences that has ended."""
        if self.outcome == "done" or not self.total:
            return 1.0
        return max(0, self.made + self.skipped - self.pending) / self.total


class CannotGoOnError(ValueError):
    """A backfill can't be carried on; the text is the reason."""


def check_range(start: object, end: object, per_minute: object) -> tuple[datetime, datetime, int]:
    """What can be checked without a schedule."""
    first, beyond = check_instant("start", start), check_instant("end", end)
    if first >= beyond:
        raise InvalidInputError("end", f"must be after start ({first.isoformat()})")
    return first, beyond, check_count("per_minute", per_minute, most=MOST_PER_MINUTE)


def check_backfill(schedule: Schedule, start: datetime, end: datetime, *, now: datetime, kept_since: datetime) -> int:
    """How many occurrences it has, if they are of the past, in the ledger's reach, and not too many."""
    if end > now:
        raise InvalidInputError("end", f"must not be after now ({now.isoformat()}): what is to come fires by itself")
    if start < kept_since:
        raise InvalidInputError(
            "start",
            f"must not be before {kept_since.isoformat()}: the ledger is not kept longer, so nobody knows what has "
            "fired before",
        )
    try:
        total = timetable_for(schedule, start).count(start, end)
    except RULE_ERRORS as error:
        raise InvalidInputError("schedule_id", f"its rule can't be followed: {error}") from None
    if total > MOST_BACKFILL:
        raise InvalidInputError(
            "end", f"the range has {total} occurrences, at most {MOST_BACKFILL} are possible: give a shorter range"
        )
    return total


def timetable_for(schedule: Schedule, start: datetime) -> Timetable:
    """The schedule's occurrences from `start` on, whatever `max_runs` says.

    An interval that nobody gave a beginning has been going on for ever: last month can be had of what is new today.
    """
    timetable, rule = replace(schedule.timetable, max_runs=None), schedule.rule
    if isinstance(rule, IntervalRule) and schedule.starts_at is None and start < rule.anchor:
        steps = (rule.anchor - start) // rule.interval
        timetable = replace(timetable, rule=replace(rule, anchor=rule.anchor - steps * rule.interval))
    return timetable


def next_occurrences(timetable: Timetable, position: datetime, end: datetime) -> list[datetime]:
    """What a step looks at."""
    left = timetable.count(position, end)
    if left > MOST_BACKFILL:
        raise CannotGoOnError(f"the rule was edited: {left} occurrences are left, at most {MOST_BACKFILL} are possible")
    found = timetable.occurrences(position, end, most=MOST_LOOKED_AT)
    days = sorted({moment.date() for moment in found})[:MOST_DAYS]
    return list(takewhile(lambda moment: moment.date() <= days[-1], found))


@dataclass(frozen=True)
class Chosen:
    """What a step does with the occurrences that it looks at."""

    made: tuple[datetime, ...]
    skipped: int
    position: datetime  # where to go on

    @property
    def looked_at(self) -> int:
        """How many it deals with."""
        return len(self.made) + self.skipped


def choose(
    occurrences: Iterable[datetime],
    *,
    taken: Collection[datetime],
    managers_from: datetime | None,
    room: int,
    position: datetime,
) -> Chosen:
    """The first `room` of those that nobody has dealt with or will: what a manager will make is its own."""
    made: list[datetime] = []
    skipped = 0
    for moment in occurrences:
        if moment in taken or (managers_from is not None and moment >= managers_from):
            skipped += 1
        elif len(made) < room:
            made.append(moment)
        else:
            break
        position = moment + MICROSECOND
    return Chosen(tuple(made), skipped, position)


def room_of(per_minute: int) -> int:
    """How many ticks a step makes."""
    return min(MOST_LOOKED_AT, max(1, per_minute * STEP // MINUTE))


def slots(now: datetime, per_minute: int, count: int) -> list[datetime]:
    """When so many ticks are due, and then the next step."""
    return [now + number * MINUTE / per_minute for number in range(count + 1)]


def check_stretch(timetable: Timetable, stretch: Stretch) -> None:
    """It is what the rule says. A zone's may have been changed for the past too: nobody knows what was missed then."""
    ends = {timetable.occurrence_at_or_after(moment) == moment for moment in (stretch.first, stretch.last)}
    if ends != {True} or timetable.count(stretch.first, stretch.last + MICROSECOND) != stretch.count:
        raise CannotGoOnError(
            f"{stretch.count} occurrences were missed from {stretch.first.isoformat()} to {stretch.last.isoformat()}, "
            "and the rule of that time has others today: give a range beside them"
        )


def without(timetable: Timetable, stretch: Stretch, gone: Sequence[datetime]) -> list[Stretch]:
    """What is left of a stretch. `timetable` is the rule that it follows, however long it is."""
    inside = {moment for moment in gone if stretch.first <= moment <= stretch.last}
    ours = {moment for moment in inside if timetable.count(moment, moment + MICROSECOND)}
    return list(_pieces(timetable, stretch, sorted(ours)))


def _pieces(timetable: Timetable, stretch: Stretch, gone: Sequence[datetime]) -> Iterator[Stretch]:
    before, after = stretch.first - MICROSECOND, stretch.last + MICROSECOND
    for left, right in pairwise([before, *gone, after]):
        start = left + MICROSECOND
        count = timetable.count(start, right)
        if count:
            yield Stretch(timetable.nth(start, 0), timetable.nth(start, count - 1), count)
