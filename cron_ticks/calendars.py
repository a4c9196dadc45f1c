"""Calendars: when cron expressions fire in the time of a pass, each computed once for all schedules that share it."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

from cron_ticks.cron_rules import CronRule, DstFold, DstGap
from cron_ticks.occurrences import LOOK_AGAIN, MICROSECOND, RULE_ERRORS


class Calendar(NamedTuple):
    """What a schedule with a cron expression is compared by: as its columns are."""

    cron: str
    zone: str
    dst_gap: DstGap
    dst_fold: DstFold


class Known(NamedTuple):
    """The moments of a calendar, and the first one after the pass."""

    moments: Sequence[datetime]
    next_needed: datetime | None


class Calendars:
    """The moments of calendars in [since, until), and the `ahead` after them up to the horizon.

    One that can't be followed, or has too many, is not among them.
    """

    def __init__(self, since: datetime, until: datetime, horizon: datetime, *, most: int, ahead: int) -> None:
        self.since = since
        self.until = until  # the end of the window
        self.horizon = horizon
        self._most = most
        self._ahead = ahead
        self._known: dict[Calendar, Known | None] = {}

    def learn(self, calendars: Iterable[Calendar]) -> set[Calendar]:
        """Compute those that are new; the ones of these that are known now."""
        new = {calendar for calendar in calendars if calendar not in self._known}
        for calendar in new:
            self._known[calendar] = self._compute(calendar)
        return {calendar for calendar in new if self._known[calendar] is not None}

    def columns(self) -> tuple[list[object], ...]:
        """As the database gets them: calendars with the numbers of their first and last moments, and all moments."""
        found = [(calendar, known) for calendar, known in self._known.items() if known is not None]
        rows: list[tuple[object, ...]] = []
        moments: list[object] = []
        for calendar, known in found:
            first = len(moments) + 1  # arrays there begin with 1
            moments += known.moments
            rows.append((*calendar, first, len(moments), known.next_needed))
        columns: list[list[object]] = [list(column) for column in zip(*rows, strict=True)]
        return (*(columns or [[] for _ in range(len(Calendar._fields) + 3)]), moments)

    def _compute(self, calendar: Calendar) -> Known | None:
        try:
            rule = CronRule(*calendar)
            moments = rule.occurrences(self.since, self.until, most=self._most + 1)
            ahead = rule.occurrences(self.until, self.horizon, most=self._ahead) if self.horizon > self.until else []
            following = rule.occurrence_at_or_after(ahead[-1] + MICROSECOND if ahead else self.until)
        except RULE_ERRORS:  # whoever plans a schedule that has it finds out, and says so
            return None
        if len(moments) > self._most:
            return None
        return Known([*moments, *ahead], None if following is None else min(following, self.until + LOOK_AGAIN))
