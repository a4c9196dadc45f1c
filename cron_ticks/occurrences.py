"""Pure time arithmetic: which occurrences a rule has. No clock, no I/O."""

from dataclasses import dataclass
from datetime import datetime, timedelta

MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True)
class IntervalRule:
    """Occurrence k is `anchor + k * interval`, for k = 0, 1, 2, … and for ever: nothing feeds back into it."""

    anchor: datetime
    interval: timedelta

    def occurrence_at_or_after(self, instant: datetime) -> datetime:
        """The first occurrence that is not before `instant`."""
        steps = max(0, -((self.anchor - instant) // self.interval))
        return self.anchor + steps * self.interval

    def occurrence_after(self, instant: datetime) -> datetime:
        """The first occurrence strictly after `instant`."""
        return self.occurrence_at_or_after(instant + MICROSECOND)

    def occurrences(self, start: datetime, end: datetime) -> list[datetime]:
        """All occurrences in [start, end)."""
        found = []
        occurrence = self.occurrence_at_or_after(start)
        while occurrence < end:
            found.append(occurrence)
            occurrence += self.interval
        return found


@dataclass(frozen=True)
class Plan:
    """What a manager's pass makes of one schedule."""

    occurrences: tuple[datetime, ...]
    next_needed: datetime
    missed: int


def plan(
    rule: IntervalRule, *, needed_from: datetime, now: datetime, lookahead: timedelta, missed_after: timedelta
) -> Plan:
    """All occurrences from `needed_from` to the end of the window.

    Those that nobody made for longer than `missed_after` are missed; the latest of them is made up, so that an
    outage never ends in a flood.
    """
    window_end = now + lookahead
    next_needed = rule.occurrence_at_or_after(max(window_end, needed_from))
    punctual_from = rule.occurrence_at_or_after(max(now - missed_after, needed_from))
    missed = (punctual_from - rule.occurrence_at_or_after(needed_from)) // rule.interval
    if missed:
        punctual_from -= rule.interval
    return Plan(tuple(rule.occurrences(punctual_from, next_needed)), next_needed, max(0, missed - 1))
