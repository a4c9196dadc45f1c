"""Pure time arithmetic: which occurrences a schedule has, and how far each is moved. No clock, no I/O."""

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Protocol

MICROSECOND = timedelta(microseconds=1)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
RULE_ERRORS = (ArithmeticError, ValueError, LookupError, TypeError)  # what a rule that can't be followed raises
LOOK_AGAIN = timedelta(days=7)  # the latest when a rule that may change is asked once more
HASH_DIGITS = 15  # hexadecimal: 60 bits, which PostgreSQL's bigint holds too


class Rule(Protocol):
    """Nominal times, strictly increasing."""

    @property
    def lasting(self) -> bool:
        """Whether what it says of the far future will still hold then."""
        ...

    def occurrence_at_or_after(self, instant: datetime) -> datetime | None:
        """The first occurrence that is not before `instant`, if there is one."""
        ...

    def occurrences(self, start: datetime, end: datetime, *, most: int | None = None) -> list[datetime]:
        """The occurrences in [start, end), the first `most` of them."""
        ...

    def count(self, start: datetime, end: datetime) -> int:
        """How many there are in [start, end)."""
        ...

    def nth(self, start: datetime, number: int) -> datetime:
        """The occurrence `number` of those from `start` on, which must exist; the first is 0."""
        ...


@dataclass(frozen=True)
class IntervalRule:
    """Occurrence k is `anchor + k * interval`, for k = 0, 1, 2, … and for ever: nothing feeds back into it."""

    anchor: datetime
    interval: timedelta
    lasting = True

    def occurrence_at_or_after(self, instant: datetime) -> datetime:
        """The first occurrence that is not before `instant`."""
        return self.anchor + self._steps(instant) * self.interval

    def occurrences(self, start: datetime, end: datetime, *, most: int | None = None) -> list[datetime]:
        """The occurrences in [start, end), the first `most` of them."""
        first, beyond = self._steps(start), self._steps(end)
        last = beyond if most is None else min(beyond, first + most)
        return [self.anchor + step * self.interval for step in range(first, last)]

    def count(self, start: datetime, end: datetime) -> int:
        """How many there are in [start, end)."""
        return max(0, self._steps(end) - self._steps(start))

    def nth(self, start: datetime, number: int) -> datetime:
        """The occurrence `number` of those from `start` on; the first is 0."""
        return self.anchor + (self._steps(start) + number) * self.interval

    def _steps(self, instant: datetime) -> int:
        """The number of the first occurrence that is not before `instant`."""
        return max(0, -((self.anchor - instant) // self.interval))


@dataclass(frozen=True)
class OneOffRule:
    """One occurrence."""

    at: datetime
    lasting = True

    def occurrence_at_or_after(self, instant: datetime) -> datetime | None:
        """The occurrence, unless it is before `instant`."""
        return self.at if self.at >= instant else None

    def occurrences(self, start: datetime, end: datetime, *, most: int | None = None) -> list[datetime]:
        """The occurrence, if it lies in [start, end)."""
        return [self.at] if start <= self.at < end and most != 0 else []

    def count(self, start: datetime, end: datetime) -> int:
        """One, if it lies in [start, end)."""
        return len(self.occurrences(start, end))

    def nth(self, start: datetime, number: int) -> datetime:
        """The occurrence."""
        if number or self.at < start:
            raise ValueError(f"a one-off has no occurrence {number} from {start} on")
        return self.at


@dataclass(frozen=True)
class Timetable:
    """A rule within its bounds: not before `starts_at`, not after `ends_at`, at most `max_runs` times in all."""

    rule: Rule
    starts_at: datetime | None = None
    ends_at: datetime | None = None
    max_runs: int | None = None

    def occurrence_at_or_after(self, instant: datetime) -> datetime | None:
        """The first occurrence that is not before `instant`, if the bounds allow one; whatever `max_runs` says."""
        found = self.rule.occurrence_at_or_after(self._from(instant))
        return None if found is None or (self.ends_at is not None and found > self.ends_at) else found

    def occurrence_after(self, instant: datetime) -> datetime | None:
        """The first occurrence strictly after `instant`."""
        return self.occurrence_at_or_after(instant + MICROSECOND)

    def occurrences(self, start: datetime, end: datetime, *, most: int | None = None) -> list[datetime]:
        """The occurrences in [start, end), the first `most` of them."""
        return self.rule.occurrences(self._from(start), self._until(end), most=most)

    def count(self, start: datetime, end: datetime) -> int:
        """How many there are in [start, end)."""
        return self.rule.count(self._from(start), self._until(end))

    def nth(self, start: datetime, number: int) -> datetime:
        """The occurrence `number` of those from `start` on, which must exist; the first is 0."""
        return self.rule.nth(self._from(start), number)

    def _from(self, instant: datetime) -> datetime:
        return instant if self.starts_at is None else max(instant, self.starts_at)

    def _until(self, instant: datetime) -> datetime:
        return instant if self.ends_at is None else min(instant, self.ends_at + MICROSECOND)


def jitter_offset(schedule_id: str, occurrence: datetime, amplitude: timedelta) -> timedelta:
    """By how much an occurrence moves: a hash, evenly in [-amplitude, amplitude), the same for everybody who asks.

    `cron_jitter` is its twin in the database.
    """
    width = 2 * (amplitude // MICROSECOND)
    if width == 0:
        return timedelta(0)
    text = f"{schedule_id} {(occurrence - EPOCH) // MICROSECOND}"
    number = int(hashlib.sha256(text.encode()).hexdigest()[:HASH_DIGITS], 16)
    return timedelta(microseconds=number % width) - amplitude


@dataclass(frozen=True)
class Plan:
    """What a manager's pass makes of one schedule."""

    occurrences: tuple[datetime, ...]
    next_needed: datetime | None  # None: there are no more
    missed: int
    complete: bool  # up to the end of the window

    @property
    def planned(self) -> int:
        """How many occurrences it deals with."""
        return len(self.occurrences) + self.missed


NOTHING = Plan((), None, 0, complete=True)


def plan(
    timetable: Timetable,
    *,
    needed_from: datetime | None,
    planned: int,
    now: datetime,
    lookahead: timedelta,
    missed_after: timedelta,
    most: int | None = None,
) -> Plan:
    """The occurrences from `needed_from` to the end of the window, or the first `most` of them.

    Those that nobody made for longer than `missed_after` are missed; the latest of them is made up, so that an outage
    never ends in a flood. `planned` is how many there have been before.
    """
    if needed_from is None:
        return NOTHING
    left = None if timetable.max_runs is None else max(0, timetable.max_runs - planned)
    end = max(now + lookahead, needed_from)
    overdue = timetable.count(needed_from, min(now - missed_after, end))
    if left is not None:
        overdue = min(overdue, left)
    missed = max(0, overdue - 1)
    start = timetable.nth(needed_from, missed) if overdue else needed_from
    room = min((limit for limit in (most, left and left - missed) if limit is not None), default=None)
    made = timetable.occurrences(start, end, most=room)
    after = made[-1] + MICROSECOND if made else start
    exhausted = left is not None and missed + len(made) >= left
    next_needed = None if exhausted else timetable.occurrence_at_or_after(after)
    complete = next_needed is None or next_needed >= end
    if next_needed is not None and not timetable.rule.lasting:
        next_needed = min(next_needed, now + lookahead + LOOK_AGAIN)
    return Plan(tuple(made), next_needed, missed, complete)
