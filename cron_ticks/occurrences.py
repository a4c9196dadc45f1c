"""Pure time arithmetic: which occurrences a schedule has, and how far each is moved. No clock, no I/O."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal, Protocol

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


CatchUp = Literal["skip", "latest", "all", "spread"]


@dataclass(frozen=True)
class MakingUp:
    """How much is made up of occurrences that nobody dealt with in time: the latest ones, so many and so old."""

    policy: CatchUp = "latest"
    most: int = 100
    max_age: timedelta = timedelta(days=1)

    @property
    def room(self) -> int:
        """How many are made up at the most."""
        return {"skip": 0, "latest": 1}.get(self.policy, self.most)

    @property
    def reason(self) -> str:
        """Why the others are missed."""
        if self.policy == "skip":
            return "late, and catch_up is skip"
        which = "the latest" if self.policy == "latest" else f"the latest {self.most}"
        return f"late, and catch_up makes up {which}, if not older than {self.max_age.total_seconds():g} s"

    def kept_of(self, moments: Sequence[datetime], now: datetime, *, room: int) -> int:
        """How many of these are made up, at the end."""
        young = sum(moment >= now - self.max_age for moment in moments)
        return min(room, young)


EVERYTHING = MakingUp("all", 1000, timedelta(days=500 * 365))


@dataclass(frozen=True)
class Stretch:
    """Occurrences in a row."""

    first: datetime
    last: datetime
    count: int


@dataclass(frozen=True)
class Plan:
    """What a manager's pass makes of one schedule."""

    occurrences: tuple[datetime, ...]
    next_needed: datetime | None  # None: there are no more
    stretch: Stretch | None  # what is missed
    complete: bool  # up to the end of the window
    late_missed: int = 0  # so many of the late ticks are missed, the oldest ones
    late_undecided: bool = False  # about the others later

    @property
    def missed(self) -> int:
        """How many occurrences without a tick are missed."""
        return 0 if self.stretch is None else self.stretch.count

    @property
    def planned(self) -> int:
        """How many occurrences it deals with."""
        return len(self.occurrences) + self.missed


NOTHING = Plan((), None, None, complete=True)


def plan(
    timetable: Timetable,
    *,
    needed_from: datetime | None,
    planned: int,
    now: datetime,
    lookahead: timedelta,
    missed_after: timedelta,
    making_up: MakingUp = MakingUp(),  # noqa: B008 - frozen
    late: Sequence[datetime] = (),
    most: int | None = None,
) -> Plan:
    """The occurrences from `needed_from` to the end of the window, or the first `most` of them.

    Of those that nobody made for longer than `missed_after`, and of the `late` ones whose ticks nobody fired, so much
    is made up as the schedule wants, the latest first; the rest is missed. `planned` is how many there were before.
    """
    if needed_from is None:
        return Plan((), None, None, complete=True, late_missed=len(late) - _kept(late, making_up, now))
    left = None if timetable.max_runs is None else max(0, timetable.max_runs - planned)
    end = max(now + lookahead, needed_from)
    overdue = timetable.count(needed_from, min(now - missed_after, end))
    if left is not None:
        overdue = min(overdue, left)
    kept = _kept_overdue(timetable, needed_from, overdue, making_up, now) if overdue else 0
    missed = overdue - kept
    start = timetable.nth(needed_from, missed) if kept else needed_from
    stretch = None
    if missed:
        stretch = _stretch(timetable, needed_from, missed)
        start = start if kept else stretch.last + MICROSECOND
    room = min((limit for limit in (most, left and left - missed) if limit is not None), default=None)
    made = timetable.occurrences(start, end, most=room)
    after = made[-1] + MICROSECOND if made else start
    exhausted = left is not None and missed + len(made) >= left
    next_needed = None if exhausted else timetable.occurrence_at_or_after(after)
    complete = next_needed is None or next_needed >= end
    if next_needed is not None and not timetable.rule.lasting:
        next_needed = min(next_needed, now + lookahead + LOOK_AGAIN)
    late_missed = len(late) - _kept(late, making_up, now, already=kept) if late else 0
    return Plan(tuple(made), next_needed, stretch, complete, late_missed)


def all_missed(timetable: Timetable, needed_from: datetime, planned: Plan) -> Plan:
    """The same, but nothing is made: all of it is missed."""
    if not planned.planned:
        return planned
    stretch = _stretch(timetable, needed_from, planned.planned)
    return Plan((), planned.next_needed, stretch, planned.complete)


def _stretch(timetable: Timetable, start: datetime, count: int) -> Stretch:
    return Stretch(timetable.nth(start, 0), timetable.nth(start, count - 1), count)


def _kept(late: Sequence[datetime], making_up: MakingUp, now: datetime, *, already: int = 0) -> int:
    return making_up.kept_of(late, now, room=max(0, making_up.room - already))


def _kept_overdue(timetable: Timetable, start: datetime, overdue: int, making_up: MakingUp, now: datetime) -> int:
    """How many of the first so many occurrences are made up, at their end."""
    if not making_up.room:
        return 0
    last = timetable.nth(start, overdue - 1)
    young = timetable.count(max(start, now - making_up.max_age), last + MICROSECOND)
    return min(overdue, making_up.room, young)


def paced(schedule_id: str, moments: Sequence[datetime], *, now: datetime, span: timedelta) -> list[datetime]:
    """When each of these is due if they are spread over a time: at some moment of its part of it, always the same."""
    if not moments:
        return []
    part = span / len(moments)
    half = part / 2
    return [
        now + number * part + half + jitter_offset(schedule_id, moment, half) for number, moment in enumerate(moments)
    ]
