"""Pure: what the versions of a schedule say should have happened, compared with what the ledger says. No clock, no I/O.

Most schedules are as they should be, so most are compared by three numbers; only where these differ is each row looked
at, and each occurrence that is not as it should be is named.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import NamedTuple

from cron_ticks.audit_results import Counts, Finding
from cron_ticks.occurrences import MICROSECOND, IntervalRule, Rule

NOT_DEALT_WITH = "it has neither a run nor a tick, though ticks have been made beyond it"
UNEXPECTED = "fired though no version expects it"
IN_STRETCH = "it has a run of its own inside a stretch of missed ones"
IN_STRETCHES = "it is in two stretches of missed ones"
STILL_PENDING = "it has a run, and a tick too"
SEVERAL_TICKS = "it has several ticks"


class Tally(NamedTuple):
    """Instants as three numbers, so that a million of them can be compared without reading them one by one.

    Are two collections of instants with equal numbers the same? They are equally large, so as many are missing from the
    one as from the other. One of each: the sums would differ. Two of each: two numbers are determined by their sum and
    the sum of their squares. So what is taken for equal, and is not, lacks three occurrences and has three others
    instead, at instants which balance each other twice over. That needs an intention, and rows written by hand.
    """

    size: int = 0
    total: int = 0  # of the microseconds since the start
    squares: int = 0  # of these

    def plus(self, other: "Tally") -> "Tally":
        """Both together."""
        return Tally(self.size + other.size, self.total + other.total, self.squares + other.squares)

    def minus(self, other: "Tally") -> "Tally":
        """Without a part of it."""
        return Tally(self.size - other.size, self.total - other.total, self.squares - other.squares)


NONE = Tally()


class Version(NamedTuple):
    """What a schedule was for occurrences after an instant."""

    version: int
    holds_after: datetime
    enabled: bool
    rule: Rule
    starts_at: datetime | None
    ends_at: datetime | None
    max_runs: int | None
    planned: int  # occurrences before it: what is left of max_runs
    queue_name: str


class Segment(NamedTuple):
    """The occurrences of one version within the time looked at: those of the rule in [start, end)."""

    version: int
    queue_name: str
    rule: Rule
    start: datetime
    end: datetime


class Stretch(NamedTuple):
    """Missed occurrences in a row, of one version."""

    first: datetime
    last: datetime
    version: int


class Ledger(NamedTuple):
    """What there is of a schedule in the time looked at, summed up."""

    runs: Tally = NONE  # single rows, whatever their outcome
    enqueued: int = 0
    missed: int = 0
    late: int = 0
    ticks: Tally = NONE
    overdue: int = 0  # of the ticks
    stretches: tuple[Stretch, ...] = ()


class Row(NamedTuple):
    """A run of one occurrence, or a tick."""

    scheduled_for: datetime
    origin: str
    outcome: str | None  # None: a tick
    late: bool  # of a tick: it is overdue


@dataclass(frozen=True, slots=True)
class Expected:
    """What a schedule should have done in a time, and from where on no manager has dealt with it."""

    segments: tuple[Segment, ...]
    needed_from: datetime | None  # in the current version; None: all is dealt with
    current: int  # the version's number
    queue_name: str  # of that version
    overdue_before: datetime  # what has not been dealt with

    def dealt_until(self, segment: Segment) -> datetime:
        """Where the part of a segment ends that a manager has dealt with."""
        if segment.version != self.current or self.needed_from is None:
            return segment.end
        return min(segment.end, max(segment.start, self.needed_from))


def expected_of(
    versions: Sequence[Version],
    needed_from: datetime | None,
    since: datetime,
    until: datetime,
    overdue_before: datetime,
) -> Expected:
    """What versions, in their order, say of [since, until): each holds up to the earliest of those after it."""
    segments: list[Segment] = []
    held_until = until
    for version in reversed(versions):
        begin = version.holds_after + MICROSECOND
        if version.enabled and begin < held_until:
            segment = _segment(version, begin, since, held_until)
            if segment.start < segment.end:
                segments.append(segment)
        held_until = min(held_until, begin)
        if held_until <= since:
            break
    current = versions[-1]
    return Expected(tuple(segments), needed_from, current.version, current.queue_name, overdue_before)


def _segment(version: Version, begin: datetime, since: datetime, end: datetime) -> Segment:
    if version.starts_at is not None:
        begin = max(begin, version.starts_at)
    if version.ends_at is not None:
        end = min(end, version.ends_at + MICROSECOND)
    if version.max_runs is not None:
        end = _used_up(version.rule, begin, end, max(0, version.max_runs - version.planned))
    return Segment(version.version, version.queue_name, version.rule, max(since, begin), end)


def _used_up(rule: Rule, begin: datetime, end: datetime, left: int) -> datetime:
    """Where the last of so many occurrences has been."""
    return rule.nth(begin, left) if begin < end and rule.count(begin, end) > left else end


def tally(rule: Rule, start: datetime, end: datetime, since: datetime) -> Tally:
    """The occurrences in [start, end), in microseconds since an instant."""
    if start >= end:
        return NONE
    if not isinstance(rule, IntervalRule):
        return _listed(rule, start, end, since)  # type: ignore[arg-type]  # rules are values
    count = rule.count(start, end)
    if not count:
        return NONE
    first = (rule.occurrence_at_or_after(start) - since) // MICROSECOND
    step = rule.interval // MICROSECOND
    pairs = count * (count - 1) // 2  # 0 + 1 + … + (count - 1)
    return Tally(
        count,
        count * first + step * pairs,
        count * first * first + 2 * first * step * pairs + step * step * (pairs * (2 * count - 1) // 3),
    )


@lru_cache(maxsize=4096)  # many schedules share an expression
def _listed(rule: Rule, start: datetime, end: datetime, since: datetime) -> Tally:
    return tally_of(rule.occurrences(start, end), since)


def tally_of(instants: Iterable[datetime], since: datetime) -> Tally:
    """Given instants."""
    offsets = [(instant - since) // MICROSECOND for instant in instants]
    return Tally(len(offsets), sum(offsets), sum(offset * offset for offset in offsets))


def check_sums(expected: Expected, ledger: Ledger, since: datetime) -> dict[str, Counts] | None:
    """The counts by queue if all is as it should be; None if only a look at each row can tell."""
    if any(segment.queue_name != expected.queue_name for segment in expected.segments):
        return None
    due, waiting, overdue = NONE, 0, ledger.overdue
    for segment in expected.segments:
        dealt_until = expected.dealt_until(segment)
        due = due.plus(tally(segment.rule, segment.start, dealt_until, since))
        waiting += tally(segment.rule, dealt_until, segment.end, since).size
        overdue += tally(segment.rule, dealt_until, min(segment.end, expected.overdue_before), since).size
    in_stretches = NONE
    for stretch in ledger.stretches:
        for rule, start, end in _parts(expected, stretch):
            in_stretches = in_stretches.plus(tally(rule, start, end, since))
    if due.minus(in_stretches) != ledger.runs.plus(ledger.ticks):
        return None
    counts = Counts(
        expected=due.size + waiting,
        enqueued=ledger.enqueued,
        explained=ledger.runs.size - ledger.enqueued + in_stretches.size,
        missed=ledger.missed + in_stretches.size,
        pending=ledger.ticks.size + waiting,
        overdue=overdue,
        late=ledger.late,
    )
    return {expected.queue_name: counts}


def _parts(expected: Expected, stretch: Stretch) -> list[tuple[Rule, datetime, datetime]]:
    """The occurrences of a stretch that its version expects."""
    return [
        (segment.rule, max(segment.start, stretch.first), min(segment.end, stretch.last + MICROSECOND))
        for segment in expected.segments
        if segment.version == stretch.version
    ]


def check_rows(
    schedule_id: str, expected: Expected, stretches: Iterable[Stretch], rows: Iterable[Row]
) -> tuple[dict[str, Counts], list[Finding]]:
    """The counts by queue, and each occurrence that is not as it should be."""
    runs, ticks = _by_moment(rows)
    in_stretches = Counter(
        moment
        for stretch in stretches
        for rule, start, end in _parts(expected, stretch)
        if start < end
        for moment in rule.occurrences(start, end)
    )
    checked = _Checked(schedule_id, {}, [])
    for segment in reversed(expected.segments):
        dealt_until = expected.dealt_until(segment)
        for moment in segment.rule.occurrences(segment.start, segment.end):
            run, pending, missed = runs.pop(moment, None), ticks.get(moment, []), in_stretches[moment]
            checked.count(segment.queue_name, run, pending, missed=missed)
            if run is None and not pending and not missed:
                if moment >= dealt_until:
                    checked.wait(segment.queue_name, overdue=moment < expected.overdue_before)
                else:
                    checked.lose(segment.queue_name, moment)
            for why in _told_twice(run, pending, missed):
                checked.find(segment.queue_name, moment, why)
    for moment, run in sorted(runs.items()):
        if run.origin == "schedule" and run.outcome == "enqueued":
            checked.find(expected.queue_name, moment, UNEXPECTED)
    return checked.counts, checked.findings


def _by_moment(rows: Iterable[Row]) -> tuple[dict[datetime, Row], dict[datetime, list[Row]]]:
    """Runs, of which there is one at the most, and ticks."""
    runs: dict[datetime, Row] = {}
    ticks: dict[datetime, list[Row]] = {}
    for row in rows:
        if row.outcome is None:
            ticks.setdefault(row.scheduled_for, []).append(row)
        else:
            runs[row.scheduled_for] = row
    return runs, ticks


def _told_twice(run: Row | None, ticks: Sequence[Row], missed: int) -> list[str]:
    """How an occurrence is told of twice. Making up for a missed one in a backfill is none."""
    found = []
    if run is not None and missed and run.origin != "backfill":
        found.append(IN_STRETCH)
    if run is not None and any(tick.origin != "backfill" or run.outcome == "enqueued" for tick in ticks):
        found.append(STILL_PENDING)
    if len(ticks) > 1:
        found.append(SEVERAL_TICKS)
    if missed > 1:
        found.append(IN_STRETCHES)
    return found


@dataclass(frozen=True, slots=True)
class _Checked:
    """What was found of a schedule so far."""

    schedule_id: str
    counts: dict[str, Counts]
    findings: list[Finding]

    def count(self, queue_name: str, run: Row | None, ticks: Sequence[Row], *, missed: int) -> None:
        """An expected occurrence."""
        counts = self.counts.setdefault(queue_name, Counts())
        counts.expected += 1
        if run is not None and run.outcome == "enqueued":
            counts.enqueued += 1
            counts.late += run.late
        elif run is not None:
            counts.explained += 1
            counts.missed += run.outcome == "missed"
        elif ticks:
            self.wait(queue_name, overdue=any(tick.late for tick in ticks))
        elif missed:
            counts.explained += 1
            counts.missed += 1

    def wait(self, queue_name: str, *, overdue: bool) -> None:
        """An expected occurrence that has a tick, or is left for a manager."""
        self.counts[queue_name].pending += 1
        self.counts[queue_name].overdue += overdue

    def lose(self, queue_name: str, moment: datetime) -> None:
        """An expected occurrence of which there is nothing."""
        self.counts[queue_name].unexplained += 1
        self.findings.append(Finding(self.schedule_id, moment, "unexplained", NOT_DEALT_WITH))

    def find(self, queue_name: str, moment: datetime, why: str) -> None:
        """An occurrence that is told of twice."""
        self.counts.setdefault(queue_name, Counts()).duplicate += 1
        self.findings.append(Finding(self.schedule_id, moment, "duplicate", why))
