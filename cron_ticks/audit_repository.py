"""Audits and statistics from the database. The statements are in `audit_sql`, what they mean is in `audits`."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple

import asyncpg
from anyio.lowlevel import checkpoint

from cron_ticks import audit_sql
from cron_ticks.audit_results import (
    Audit,
    Collected,
    Doubled,
    KeptAudit,
    ScheduleAudit,
    Statistics,
)
from cron_ticks.audits import (
    NONE,
    Expected,
    Ledger,
    Row,
    Stretch,
    Tally,
    Version,
    check_rows,
    check_sums,
    expected_of,
)
from cron_ticks.checks import check_instant, check_name, check_span
from cron_ticks.database import Connection, Database
from cron_ticks.errors import InvalidInputError, ScheduleNotFoundError
from cron_ticks.occurrences import RULE_ERRORS
from cron_ticks.rows import rule_of_row
from cron_ticks.settings import Settings

HOUR = timedelta(hours=1)
PART = timedelta(days=1)  # looked at in one go: what a rule gives in it stays bounded
LONGEST_LATENESS = timedelta(days=365)
LONG_DEADLINE_SECONDS = 3600.0  # of a statement that reads the ledger
LOOKED_AT_TOGETHER = 500  # schedules whose rows are read one by one, the most
ROWS_TOGETHER = 20_000  # of these schedules, about; a schedule that has more is looked at alone
FURTHEST_AHEAD = timedelta(days=1)  # beyond the ticks that may have been made
RESTS = 50.0  # times as long as an audit took

FindDoubled = Callable[[datetime, datetime, str | None], Awaitable[Sequence[Doubled]]]


class Span(NamedTuple):
    """The time that is looked at, [since, until), and of which schedule."""

    since: datetime
    until: datetime
    late_after: timedelta
    schedule_id: str | None
    first_version: datetime | None
    overdue_before: datetime

    def parts(self) -> "list[Span]":
        """In bounded parts, from the day on which there was something to expect."""
        if self.first_version is None:
            return []
        first_day = self.first_version.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        begin = max(self.since, first_day)
        days = -((begin - self.until) // PART)
        bounds = [*(begin + day * PART for day in range(days)), self.until]
        return [self._replace(since=start, until=end) for start, end in pairwise(bounds)]


class Suspect(NamedTuple):
    """A schedule whose sums are not as they should be."""

    schedule: ScheduleAudit
    expected: Expected
    stretches: tuple[Stretch, ...]
    rows: int  # that it has


class DueAudit(NamedTuple):
    """When the next audit is due, and what the last one found."""

    due_in: timedelta
    latest: KeptAudit | None


class AuditRepository:
    """Compares what should have happened with what did. `find_doubled` looks for several messages of one occurrence."""

    def __init__(self, database: Database, settings: Settings, find_doubled: FindDoubled | None = None) -> None:
        self.database = database
        self._furthest_ahead = timedelta(seconds=settings.lookahead_seconds) + FURTHEST_AHEAD
        self._missed_after = timedelta(seconds=settings.missed_after_seconds)
        self._interval = timedelta(seconds=settings.audit_interval_seconds)
        self._find_doubled = find_doubled

    async def audit(
        self,
        since: datetime | None = None,
        until: datetime | None = None,
        *,
        schedule_id: str | None = None,
        late_after: float | timedelta | None = None,
        now: datetime | None = None,
    ) -> Audit:
        """What should have happened in [since, until), and what did; the last hour, unless another time is given."""
        begun = perf_counter()
        asked = self._asked(since, until, schedule_id, late_after)
        async with self._snapshot() as connection:
            span = await self._span(asked, connection, now)
            collected = await self._collect(span, connection)
        await self._add_doubled(span, collected)
        return collected.audit(span.since, span.until, perf_counter() - begun)

    async def audit_alone(self, until: datetime, *, now: datetime | None = None) -> Audit | None:
        """The hour before, without schedules that are as they should be; None if another such audit is under way."""
        begun = perf_counter()
        asked = self._asked(None, until, None, None)
        async with self._snapshot() as connection:
            if not await self.database.fetchval(audit_sql.LOCK_READING, connection=connection):
                return None
            span = await self._span(asked, connection, now)
            collected = await self._collect(span, connection, details=False)
        await self._add_doubled(span, collected)
        return collected.audit(span.since, span.until, perf_counter() - begun)

    async def stats(
        self,
        since: datetime | None = None,
        until: datetime | None = None,
        *,
        schedule_id: str | None = None,
        now: datetime | None = None,
    ) -> Statistics:
        """How well it went in [since, until); the last hour, unless another time is given."""
        asked = self._asked(since, until, schedule_id, None)
        async with self._snapshot() as connection:
            span = await self._span(asked, connection, now)
            collected = await self._collect(span, connection)
            measures = await self.database.fetch(
                audit_sql.MEASURES,
                span.since,
                span.until,
                span.schedule_id,
                connection=connection,
                deadline_seconds=LONG_DEADLINE_SECONDS,
            )
        return collected.statistics(span.since, span.until, map(dict, measures))

    async def explain(self, since: datetime, until: datetime) -> dict[str, Any]:
        """What reading the tables for an audit costs, as PostgreSQL says it."""
        async with self._snapshot() as connection:
            rows = await self.database.fetch(
                audit_sql.EXPLAIN_SCHEDULES,
                since,
                until,
                self._missed_after,
                None,
                since,
                connection=connection,
                deadline_seconds=LONG_DEADLINE_SECONDS,
            )
        (found,) = json.loads(rows[0][0])
        return dict(found)

    async def due_audit(self, *, now: datetime | None = None) -> DueAudit:
        """When the next audit of all workers is due, and the last result."""
        return await self._due_audit(now)

    async def begin_audit(self, *, now: datetime | None = None) -> datetime | None:
        """Begin the audit that is due; None if another worker has, or has not ended the one before."""
        async with self.database.transaction() as connection:
            if not await self.database.fetchval(audit_sql.LOCK_AUDITS, connection=connection):
                return None
            if (await self._due_audit(now, connection)).due_in > timedelta(0):
                return None
            # Only now: it must not be in the way of one that has just begun.
            if not await self.database.fetchval(audit_sql.LOCK_READING, connection=connection):
                return None
            begun: datetime = await self.database.fetchval(audit_sql.BEGIN_AUDIT, now, HOUR, connection=connection)
        return begun

    async def _due_audit(self, now: datetime | None, connection: Connection | None = None) -> DueAudit:
        arguments = (now, self._interval, RESTS)
        (row,) = await self.database.fetch(audit_sql.LATEST_AUDIT, *arguments, connection=connection)
        _, due_in, *kept = row
        return DueAudit(due_in, None if kept[0] is None else KeptAudit._make(kept))

    async def end_audit(self, started_at: datetime, audit: Audit, *, now: datetime | None = None) -> None:
        """Keep what was found."""
        total = audit.total
        counts = (total.expected, total.enqueued, total.explained, total.pending, total.overdue, total.late)
        arguments = (started_at, now, audit.since, audit.expecting, *counts, total.unexplained, total.duplicate)
        await self.database.fetch(audit_sql.END_AUDIT, *arguments)

    def _asked(
        self,
        since: datetime | None,
        until: datetime | None,
        schedule_id: str | None,
        late_after: float | timedelta | None,
    ) -> tuple[datetime | None, datetime | None, str | None, timedelta]:
        if late_after is not None:
            late_after = check_span("late_after", late_after, longest=LONGEST_LATENESS)
        return (
            None if since is None else check_instant("since", since),
            None if until is None else check_instant("until", until),
            None if schedule_id is None else check_name("schedule_id", schedule_id),
            self._missed_after if late_after is None else late_after,
        )

    @asynccontextmanager
    async def _snapshot(self) -> AsyncIterator[Connection]:
        async with self.database.transaction() as connection:
            await self.database.execute_script(
                audit_sql.BEGIN, connection=connection, deadline_seconds=LONG_DEADLINE_SECONDS
            )
            yield connection

    async def _span(
        self,
        asked: tuple[datetime | None, datetime | None, str | None, timedelta],
        connection: Connection,
        now: datetime | None,
    ) -> Span:
        """The time asked for, if the ledger is complete in it."""
        since, until, schedule_id, late_after = asked
        ((instant, kept_since, first_version),) = await self.database.fetch(
            audit_sql.SPAN, now, schedule_id, connection=connection
        )
        until = instant if until is None else until
        latest = instant + self._furthest_ahead
        if until > latest:
            raise InvalidInputError("until", f"must be at most {latest.isoformat()}: no ticks are made as far ahead")
        if since is None:
            since = until - HOUR if kept_since is None or kept_since >= until else max(kept_since, until - HOUR)
        if since >= until:
            raise InvalidInputError("since", f"must be before until, {until.isoformat()}, not {since.isoformat()}")
        if kept_since is not None and since < kept_since:
            raise InvalidInputError(
                "since", f"the ledger is kept from {kept_since.isoformat()} on: {since.isoformat()} is before that"
            )
        known = schedule_id is None or await self.database.fetchval(audit_sql.KNOWN, schedule_id, connection=connection)
        if not known:
            raise ScheduleNotFoundError(f"there is no schedule {schedule_id}, and there was none")
        return Span(since, until, late_after, schedule_id, first_version, instant - late_after)

    async def _add_doubled(self, span: Span, collected: Collected) -> None:
        """Not of the snapshot's instant, which is fine: several messages are wrong, whatever the ledger says."""
        if self._find_doubled is not None:
            for doubled in await self._find_doubled(span.since, span.until, span.schedule_id):
                collected.add_doubled(doubled)

    async def _collect(self, span: Span, connection: Connection, *, details: bool = True) -> Collected:
        collected = Collected(details)
        for part in span.parts():
            suspects: list[Suspect] = []
            async for versions in self._schedules(part, connection):
                collected.rows += (versions[0]["runs"] or 0) + len(versions[0]["firsts"] or ())
                suspect = _check(versions, part, collected)
                if suspect is None:
                    continue
                if suspects and _too_many([*suspects, suspect]):
                    await self._look_closely(suspects, part, connection, collected)
                    suspects.clear()
                suspects.append(suspect)
            if suspects:
                await self._look_closely(suspects, part, connection, collected)
        return collected

    async def _schedules(self, span: Span, connection: Connection) -> AsyncIterator[list[asyncpg.Record]]:
        """One schedule after the other, as the list of its versions."""
        arguments = (span.since, span.until, span.late_after, span.schedule_id, span.overdue_before)
        await self.database.fetch(audit_sql.DECLARE_SCHEDULES, *arguments, connection=connection)
        versions: list[asyncpg.Record] = []
        while rows := await self.database.fetch(
            audit_sql.FETCH_SCHEDULES, connection=connection, deadline_seconds=LONG_DEADLINE_SECONDS
        ):
            for row in rows:
                if versions and versions[0]["schedule_id"] != row["schedule_id"]:
                    yield versions
                    versions = []
                versions.append(row)
        if versions:
            yield versions
        await self.database.fetch(audit_sql.CLOSE_SCHEDULES, connection=connection)

    async def _look_closely(
        self, suspects: Sequence[Suspect], span: Span, connection: Connection, collected: Collected
    ) -> None:
        """Row by row."""
        found: dict[str, list[Row]] = {suspect.schedule.schedule_id: [] for suspect in suspects}
        arguments = (list(found), span.since, span.until, span.late_after, span.overdue_before)
        for schedule_id, *row in await self.database.fetch(
            audit_sql.ROWS, *arguments, connection=connection, deadline_seconds=LONG_DEADLINE_SECONDS
        ):
            found[schedule_id].append(Row._make(row))
        for suspect in suspects:
            _check_closely(suspect, found.pop(suspect.schedule.schedule_id), collected)
            await checkpoint()  # others have their turn


def _check(rows: Sequence[asyncpg.Record], span: Span, collected: Collected) -> Suspect | None:
    """Count a schedule whose sums are as they should be; any other is suspect."""
    latest = rows[-1]
    schedule = ScheduleAudit(
        schedule_id=latest["schedule_id"],
        name=latest["name"],
        workspace_id=latest["workspace_id"],
        queue_name=latest["queue_name"],
        error=latest["error"],
    )
    ledger = _ledger(latest)
    try:
        versions = [_version(row) for row in rows]
        expected = expected_of(versions, latest["needed_from"], span.since, span.until, span.overdue_before)
        counted = check_sums(expected, ledger, span.since)
    except RULE_ERRORS as error:
        schedule.error = _why(error)
        counted = {}
    else:
        if counted is None:
            return Suspect(schedule, expected, ledger.stretches, ledger.runs.size + ledger.ticks.size)
    collected.add(schedule, counted)
    return None


def _check_closely(suspect: Suspect, rows: Sequence[Row], collected: Collected) -> None:
    schedule = suspect.schedule
    try:
        found = check_rows(schedule.schedule_id, suspect.expected, suspect.stretches, rows)
    except RULE_ERRORS as error:
        schedule.error = _why(error)
        found = {}, []
    collected.add(schedule, *found)


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _too_many(suspects: Sequence[Suspect]) -> bool:
    return len(suspects) > LOOKED_AT_TOGETHER or sum(suspect.rows for suspect in suspects) > ROWS_TOGETHER


def _version(row: asyncpg.Record) -> Version:
    return Version(
        row["version"],
        row["holds_after"],
        row["enabled"],
        rule_of_row(row),
        row["starts_at"],
        row["ends_at"],
        row["max_runs"],
        row["planned"],
        row["queue_name"],
    )


def _ledger(row: asyncpg.Record) -> Ledger:
    stretches: tuple[Stretch, ...] = ()
    if row["firsts"] is not None:
        stretches = tuple(map(Stretch, row["firsts"], row["lasts"], row["versions"]))
    ticks = NONE if row["ticks"] is None else Tally(row["ticks"], row["ticks_total"], int(row["ticks_squares"]))
    overdue = row["overdue"] or 0
    if row["runs"] is None:
        return Ledger(ticks=ticks, overdue=overdue, stretches=stretches)
    runs = Tally(row["runs"], row["runs_total"], int(row["runs_squares"]))
    return Ledger(runs, row["enqueued"], row["missed"], row["late"], ticks, overdue, stretches)
