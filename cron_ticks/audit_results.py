"""What an audit and the statistics say: plain values."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple

MOST_FINDINGS = 1000  # that are named; the rest is counted
MEASURED = (
    "recoveries_tried",
    "recoveries_succeeded",
    "recoveries_failed",
    "recoveries_abandoned",
    "mean_recovery_seconds",
)
OF_SCHEDULE, OF_QUEUE = 0b01, 0b10  # levels of a measure, as the database numbers them


@dataclass(kw_only=True, slots=True)
class Counts:
    """What became of the expected occurrences: expected = enqueued + explained + pending + unexplained."""

    expected: int = 0  # by the versions of the schedule
    enqueued: int = 0
    explained: int = 0  # not enqueued, and the ledger says why
    missed: int = 0  # of those explained
    pending: int = 0  # has a tick, or is left for a manager
    overdue: int = 0  # of those pending: for too long
    late: int = 0  # of those enqueued
    unexplained: int = 0
    duplicate: int = 0

    def add(self, other: "Counts") -> None:
        """Count what another has counted too."""
        self.expected += other.expected
        self.enqueued += other.enqueued
        self.explained += other.explained
        self.missed += other.missed
        self.pending += other.pending
        self.overdue += other.overdue
        self.late += other.late
        self.unexplained += other.unexplained
        self.duplicate += other.duplicate

    @property
    def ok(self) -> bool:
        """Nothing is unexplained, nothing was told of twice."""
        return not self.unexplained and not self.duplicate

    @staticmethod
    def sum(parts: "Iterable[Counts]") -> "Counts":
        """All together."""
        total = Counts()
        for part in parts:
            total.add(part)
        return total


@dataclass(frozen=True)
class Finding:
    """An occurrence that is not as it should be."""

    schedule_id: str
    scheduled_for: datetime
    kind: Literal["unexplained", "duplicate"]
    why: str


class Doubled(NamedTuple):
    """An occurrence that has several messages."""

    schedule_id: str
    name: str
    workspace_id: str | None
    queue_name: str
    scheduled_for: datetime
    messages: int

    @property
    def finding(self) -> Finding:
        """As the audit names it."""
        return Finding(self.schedule_id, self.scheduled_for, "duplicate", f"it has {self.messages} messages")


@dataclass(kw_only=True, slots=True)
class ScheduleAudit(Counts):
    """One schedule; its names are those of its latest version."""

    schedule_id: str
    name: str
    workspace_id: str | None
    queue_name: str
    error: str | None = None  # why it can't be followed, if it can't


@dataclass(frozen=True)
class Audit:
    """What should have happened from `since` up to `until`, and what did."""

    since: datetime
    until: datetime
    total: Counts
    schedules: list[ScheduleAudit]  # that expected something, or have a finding or an error
    findings: list[Finding]  # the first thousand
    found: int  # findings in all
    expecting: int  # schedules that expected something
    rows: int  # of the ledger that were looked at
    seconds: float

    @property
    def ok(self) -> bool:
        """Nothing is unexplained, nothing was told of twice."""
        return self.total.ok

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"ok": self.ok} | asdict(self)


@dataclass(kw_only=True)
class Figures:
    """How well it went."""

    expected: int = 0
    enqueued: int = 0
    missed: int = 0
    pending: int = 0
    recoveries_tried: int = 0  # taken over from a worker that died or hung, or given up because it had
    recoveries_succeeded: int = 0
    recoveries_failed: int = 0
    recoveries_abandoned: int = 0  # might not be tried again
    mean_recovery_seconds: float | None = None  # from the end of the lost lease to the end of the tick
    lateness_p50: float | None = None  # seconds
    lateness_p95: float | None = None
    lateness_p99: float | None = None

    @property
    def success_rate(self) -> float | None:
        """Of the occurrences that are dealt with, the part that was enqueued."""
        dealt_with = self.expected - self.pending
        return self.enqueued / dealt_with if dealt_with else None

    def note(self, counts: Counts) -> None:
        """What an audit has counted."""
        self.expected, self.enqueued = counts.expected, counts.enqueued
        self.missed, self.pending = counts.missed, counts.pending

    def measure(self, measured: dict[str, Any]) -> None:
        """What the database has measured."""
        for name in MEASURED:
            setattr(self, name, measured[name])
        if measured["lateness"] is not None:
            self.lateness_p50, self.lateness_p95, self.lateness_p99 = measured["lateness"]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"success_rate": self.success_rate}


@dataclass(kw_only=True)
class ScheduleStatistics(Figures):
    """One schedule."""

    schedule_id: str
    name: str
    workspace_id: str | None


@dataclass(kw_only=True)
class QueueStatistics(Figures):
    """The schedules of one queue; what a schedule did before it changed its queue counts for the queue it had."""

    queue_name: str


@dataclass(frozen=True)
class Statistics:
    """How well it went from `since` up to `until`."""

    since: datetime
    until: datetime
    total: Figures
    schedules: list[ScheduleStatistics]
    queues: list[QueueStatistics]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "since": self.since,
            "until": self.until,
            "total": self.total.as_json(),
            "schedules": [schedule.as_json() for schedule in self.schedules],
            "queues": [queue.as_json() for queue in self.queues],
        }


@dataclass
class Collected:
    """What an audit has counted so far, by schedule and by queue.

    Without details, only schedules with a finding or an error are kept: memory does not grow with their number. Then
    nobody can tell whether a schedule has been counted before, so the time must be looked at in one part.
    """

    details: bool = True
    total: Counts = field(default_factory=Counts)
    expecting: int = 0
    schedules: dict[str, ScheduleAudit] = field(default_factory=dict)
    queues: dict[str, Counts] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    found: int = 0
    rows: int = 0

    def add(self, schedule: ScheduleAudit, by_queue: dict[str, Counts], findings: Iterable[Finding] = ()) -> None:
        """What was found of a schedule in a part of the time."""
        known = self.schedules.get(schedule.schedule_id, schedule)
        expected_before = known.expected
        for queue_name, counts in by_queue.items():
            if not counts.expected and not counts.duplicate:
                continue
            known.add(counts)
            self.total.add(counts)
            self.queues.setdefault(queue_name, Counts()).add(counts)
        known.error = known.error or schedule.error
        self.expecting += known.expected > 0 and not expected_before
        if (self.details and known.expected) or not known.ok or known.error is not None:
            self.schedules[known.schedule_id] = known
        for finding in findings:
            self._name(finding)

    def add_doubled(self, doubled: Doubled) -> None:
        """An occurrence with several messages."""
        schedule = ScheduleAudit(
            schedule_id=doubled.schedule_id,
            name=doubled.name,
            workspace_id=doubled.workspace_id,
            queue_name=doubled.queue_name,
        )
        self.add(schedule, {doubled.queue_name: Counts(duplicate=1)}, [doubled.finding])

    def _name(self, finding: Finding) -> None:
        self.found += 1
        if len(self.findings) < MOST_FINDINGS:
            self.findings.append(finding)

    def audit(self, since: datetime, until: datetime, seconds: float) -> Audit:
        """The result."""
        return Audit(
            since,
            until,
            self.total,
            list(self.schedules.values()),
            self.findings,
            self.found,
            self.expecting,
            self.rows,
            round(seconds, 3),
        )

    def statistics(self, since: datetime, until: datetime, measures: Iterable[dict[str, Any]]) -> Statistics:
        """The result, with what was measured by schedule, by queue and in total."""
        total = Figures()
        total.note(self.total)
        schedules = {audited.schedule_id: _statistics_of(audited) for audited in self.schedules.values()}
        queues = {name: QueueStatistics(queue_name=name) for name in sorted(self.queues)}
        for queue_name, of_queue in queues.items():
            of_queue.note(self.queues[queue_name])
        for row in measures:
            measured: Figures | None = total
            if row["level"] == OF_SCHEDULE:
                measured = schedules.get(row["schedule_id"])
            elif row["level"] == OF_QUEUE:  # no name: of runs whose version is not kept any more
                measured = queues.get(row["queue_name"])
            if measured is not None:
                measured.measure(row)
        return Statistics(since, until, total, list(schedules.values()), list(queues.values()))


def _statistics_of(audited: ScheduleAudit) -> ScheduleStatistics:
    found = ScheduleStatistics(schedule_id=audited.schedule_id, name=audited.name, workspace_id=audited.workspace_id)
    found.note(audited)
    return found


class KeptAudit(NamedTuple):
    """An audit that a worker has made by itself, as all workers export it."""

    started_at: datetime
    ended_at: datetime
    expected: int
    enqueued: int
    explained: int
    pending: int
    overdue: int
    late: int
    unexplained: int
    duplicate: int

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.ended_at - self.started_at) / timedelta(seconds=1)
