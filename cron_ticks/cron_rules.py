"""CronRule: an expression on the wall clocks of a time zone, as instants."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import islice, takewhile
from typing import Literal

from cron_ticks.checks import LATEST
from cron_ticks.cron_expressions import CronExpression, parse
from cron_ticks.occurrences import EPOCH
from cron_ticks.zones import NO_SHIFT, Span, span_at

DstGap = Literal["fire", "skip"]
DstFold = Literal["first", "second", "both"]
DST_GAPS: tuple[DstGap, ...] = ("fire", "skip")
DST_FOLDS: tuple[DstFold, ...] = ("first", "second", "both")

DAY = timedelta(days=1)  # no zone is further from UTC
SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)
PAGE = timedelta(minutes=5)  # what is computed once for all schedules that share a rule
MOST_PAGES = 12  # of a window; a longer one is computed as a whole


@dataclass(frozen=True)
class CronRule:
    """The instants at which the clocks of `zone` show a time that matches.

    If minute or hour starts with `*`, at each such instant: twice in an hour that is repeated, never in one that is
    skipped. Otherwise once: in a repeated hour as `dst_fold` says, and what falls into a skipped hour once at its end,
    unless `dst_gap` is skip.
    """

    expression: str
    zone: str
    dst_gap: DstGap = "fire"
    dst_fold: DstFold = "first"
    lasting = False  # a zone's rules are changed by its government: the far future is to be looked at again

    def occurrence_at_or_after(self, instant: datetime) -> datetime | None:
        """The first occurrence that is not before `instant`, if there is one before the year 2500."""
        page = _page(self, (instant - EPOCH) // PAGE)
        index = bisect_left(page.occurrences, instant)
        return page.occurrences[index] if index < len(page.occurrences) else page.following

    def occurrences(self, start: datetime, end: datetime, *, most: int | None = None) -> list[datetime]:
        """The occurrences in [start, end), the first `most` of them."""
        first, last = (start - EPOCH) // PAGE, (end - EPOCH) // PAGE
        if last - first > MOST_PAGES:
            return list(islice(takewhile(lambda moment: moment < end, self._from(start)), most))
        found = [moment for number in range(first, last + 1) for moment in _page(self, number).occurrences]
        return found[bisect_left(found, start) : bisect_left(found, end)][:most]

    def count(self, start: datetime, end: datetime) -> int:
        """How many there are in [start, end)."""
        expression, total = parse(self.expression), 0
        end = min(end, LATEST)
        while start < end:
            span = span_at(self.zone, start)
            total += self._fires_for_gap(expression, span, start) and not _matches(expression, span)
            total += expression.count(*self._stretch(expression, span, start, end))
            start = span.end
        return total

    def nth(self, start: datetime, number: int) -> datetime:
        """The occurrence `number` of those from `start` on, which must exist; the first is 0."""
        reach = HOUR
        while self.count(start, start + reach) <= number:
            if start + reach > LATEST:
                raise ValueError(f"{self.expression!r} has no occurrence {number} from {start} on")
            reach *= 2
        low, high = reach // 2 // SECOND if reach > HOUR else 0, reach // SECOND
        while low < high:  # the least number of seconds within which there are so many
            middle = (low + high) // 2
            if self.count(start, start + middle * SECOND) > number:
                high = middle
            else:
                low = middle + 1
        (found,) = self.occurrences(start + (low - 1) * SECOND, start + low * SECOND)
        return found

    def _from(self, instant: datetime) -> Iterator[datetime]:
        """All occurrences from `instant` on, before the year 2500."""
        return takewhile(lambda moment: moment < LATEST, self._all_from(instant))

    def _all_from(self, instant: datetime) -> Iterator[datetime]:
        expression = parse(self.expression)
        while instant < LATEST:
            # Nothing is due before a wall clock somewhere shows the next time that matches: go there at once.
            wall = next(expression.wall_times(_naive(instant) - DAY), None)
            if wall is None:
                return
            instant = max(instant, wall.replace(tzinfo=UTC) - DAY)
            span = span_at(self.zone, instant)
            yield from self._within(expression, span, instant)
            instant = span.end

    def _within(self, expression: CronExpression, span: Span, instant: datetime) -> Iterator[datetime]:
        """The occurrences of a span from `instant` on."""
        if self._fires_for_gap(expression, span, instant) and not _matches(expression, span):
            yield span.start
        start, end = self._stretch(expression, span, instant, span.end)
        for wall in takewhile(lambda moment: moment < end, expression.wall_times(start)):
            yield (wall - span.offset).replace(tzinfo=UTC)

    def _fires_for_gap(self, expression: CronExpression, span: Span, instant: datetime) -> bool:
        """Whether `instant` is the end of a gap into which a time that matches has fallen."""
        if expression.wildcard or self.dst_gap == "skip" or span.shift <= NO_SHIFT or instant > span.start:
            return False
        wall = _naive(span.start) + span.offset
        return expression.count(wall - span.shift, wall) > 0

    def _stretch(
        self, expression: CronExpression, span: Span, start: datetime, end: datetime
    ) -> tuple[datetime, datetime]:
        """What the clocks show from `start` to `end` within a span, without a repeated hour's pass that is not ours."""
        first, last = _naive(max(start, span.start)) + span.offset, _naive(min(end, span.end)) + span.offset
        if not expression.wildcard and self.dst_fold == "first":
            first = max(first, _naive(span.start) + span.offset - min(span.shift, NO_SHIFT))
        if not expression.wildcard and self.dst_fold == "second":
            last = min(last, _naive(span.end) + span.offset + min(span.next_shift, NO_SHIFT))
        return first, last


@dataclass(frozen=True, slots=True)
class _Page:
    occurrences: tuple[datetime, ...]
    following: datetime | None  # the first after the page


@lru_cache(maxsize=2048)  # some 30 MB, if all rules fire every second
def _page(rule: CronRule, number: int) -> _Page:
    start = EPOCH + number * PAGE
    occurrences: list[datetime] = []
    for moment in rule._from(start):  # noqa: SLF001 - its own page
        if moment >= start + PAGE:
            return _Page(tuple(occurrences), moment)
        occurrences.append(moment)
    return _Page(tuple(occurrences), None)


def _matches(expression: CronExpression, span: Span) -> bool:
    """Whether the time that clocks show at the start of a span is one of the expression's."""
    wall = _naive(span.start) + span.offset
    return expression.count(wall, wall + SECOND) > 0


def _naive(instant: datetime) -> datetime:
    return instant.replace(tzinfo=None)
