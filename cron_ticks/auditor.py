"""Auditor: audits the last hour again and again, by one worker of all, and every worker exports what was found."""

import random
from collections.abc import Callable
from datetime import datetime, timedelta

import structlog

from cron_ticks.audit_repository import AuditRepository
from cron_ticks.audit_results import Audit
from cron_ticks.metrics import Metrics
from cron_ticks.settings import Settings

log = structlog.get_logger("cron_ticks.auditor")

MOST_LOGGED = 10  # findings in a log line
SPREAD = 0.1  # of the pause: so that not all workers find it due at once
SHORTEST_PAUSE_SECONDS = 1.0


class Auditor:
    """Begins the audit that is due, unless another worker has."""

    name = "auditor"

    def __init__(
        self,
        repository: AuditRepository,
        settings: Settings,
        metrics: Metrics | None = None,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._repository = repository
        self._interval = settings.audit_interval_seconds
        self._metrics = Metrics() if metrics is None else metrics
        self._draw = draw

    async def run_once(self, *, now: datetime | None = None) -> float:
        """Export the last result; audit, if that is due."""
        due = await self._repository.due_audit(now=now)
        if due.due_in <= timedelta(0):
            await self._audit_unless_begun(now)
            due = await self._repository.due_audit(now=now)
        if due.latest is not None:
            self._metrics.note_audit(due.latest)
        rest = max(SHORTEST_PAUSE_SECONDS, due.due_in / timedelta(seconds=1))
        return rest + self._draw() * SPREAD * self._interval

    async def _audit_unless_begun(self, now: datetime | None) -> None:
        started_at = await self._repository.begin_audit(now=now)
        if started_at is None:
            return
        audit = await self._repository.audit_alone(started_at, now=now)
        if audit is None:
            return
        await self._repository.end_audit(started_at, audit, now=now)
        _log(audit)


def _log(audit: Audit) -> None:
    total = audit.total
    figures = {
        "expected": total.expected,
        "enqueued": total.enqueued,
        "explained": total.explained,
        "pending": total.pending,
        "overdue": total.overdue,
        "late": total.late,
        "unexplained": total.unexplained,
        "duplicate": total.duplicate,
        "seconds": audit.seconds,
    }
    if audit.ok:
        log.info("audit_done", **figures)
        return
    named = [
        f"{finding.schedule_id} {finding.scheduled_for.isoformat()}: {finding.kind}: {finding.why}"
        for finding in audit.findings[:MOST_LOGGED]
    ]
    log.warning("audit_found", **figures, findings=named)
