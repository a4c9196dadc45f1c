"""`cron-ticks audit` and `cron-ticks stats`: whether everything happened that should have, and how well."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Annotated, TypeVar

import typer

from cron_ticks.audit_results import Audit, Counts, Figures, Finding, ScheduleAudit, Statistics
from cron_ticks.cli.calendar_commands import parse_moment, parse_span, qualified
from cron_ticks.cli.common import (
    Dsn,
    Json,
    one_line,
    print_table,
    reported_errors,
    time_text,
    to_json,
    visible,
    with_manager,
)
from cron_ticks.cli.report import database_clock
from token_queue import QueueManager

Result = TypeVar("Result")

MOST_SHOWN = 100  # findings, in the text for people
COUNTS = ("expected", "enqueued", "explained", "pending", "overdue", "late", "unexplained", "duplicate")

Since = Annotated[
    str | None,
    typer.Option(
        metavar="TIME|DURATION", help="From when on, or how long ago: 24h; default: an hour before.", show_default=False
    ),
]
Until = Annotated[
    str | None,
    typer.Option(metavar="TIME|DURATION", help="Up to when, or how long ago; default: now.", show_default=False),
]
ScheduleId = Annotated[
    str | None, typer.Option("--schedule", metavar="ID", help="Only this schedule.", show_default=False)
]
LateAfter = Annotated[
    str | None,
    typer.Option(
        metavar="DURATION", help="What is enqueued later than this is late; default: the setting.", show_default=False
    ),
]
All = Annotated[bool, typer.Option("--all", help="A line for each schedule, not only for those with findings.")]
EachSchedule = Annotated[bool, typer.Option("--all", help="A line for each schedule too.")]


def audit_command(  # noqa: PLR0917 - typer's way of declaring options
    since: Since = None,
    until: Until = None,
    schedule_id: ScheduleId = None,
    late_after: LateAfter = None,
    show_all: All = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Compare what should have happened with what did; exit 1 if something is unexplained or was told of twice."""
    with reported_errors():
        late = None if late_after is None else parse_span("late_after", late_after)

        async def work(manager: QueueManager, start: datetime | None, end: datetime | None) -> Audit:
            return await manager.audit(start, end, schedule_id=schedule_id, late_after=late)

        audit = _in_span(dsn, since, until, work)
        shown = [schedule for schedule in audit.schedules if show_all or not schedule.ok or schedule.error is not None]
        if as_json:
            typer.echo(to_json(replace(audit, schedules=shown).as_json()))
        else:
            _print_audit(audit, shown)
    if not audit.ok:
        raise typer.Exit(1)


def stats_command(  # noqa: PLR0917 - typer's way of declaring options
    since: Since = None,
    until: Until = None,
    schedule_id: ScheduleId = None,
    show_all: EachSchedule = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """How well it went: success, lateness and recoveries, by queue and in total."""
    with reported_errors():

        async def work(manager: QueueManager, start: datetime | None, end: datetime | None) -> Statistics:
            return await manager.stats(start, end, schedule_id=schedule_id)

        found = _in_span(dsn, since, until, work)
        if not show_all:
            found = replace(found, schedules=[])
        if as_json:
            typer.echo(to_json(found.as_json()))
        else:
            _print_statistics(found)


def _in_span(
    dsn: str | None,
    since: str | None,
    until: str | None,
    work: Callable[[QueueManager, datetime | None, datetime | None], Awaitable[Result]],
) -> Result:
    """Times as they are given; "24h" is that long ago, by the database's clock."""

    async def use(manager: QueueManager) -> Result:
        now = await database_clock(manager.database)
        return await work(manager, parse_moment("since", since, now), parse_moment("until", until, now))

    return with_manager(dsn, use)


def _print_audit(audit: Audit, shown: Sequence[ScheduleAudit]) -> None:
    if shown:
        rows = [[qualified(schedule.workspace_id, schedule.name), *_counts(schedule)] for schedule in shown]
        print_table(("schedule", *COUNTS), rows)
    for schedule in shown:
        if schedule.error is not None:
            typer.echo(visible(f"can't be followed: {schedule.schedule_id} {schedule.name}: {schedule.error}"))
    for finding in audit.findings[:MOST_SHOWN]:
        typer.echo(_finding_line(finding))
    if audit.found > MOST_SHOWN:
        typer.echo(f"and {audit.found - MOST_SHOWN} more")
    if audit.total.overdue:
        typer.echo(
            f"overdue: {audit.total.overdue} wait for too long. Does a worker run, and does it have their sinks?"
        )
    typer.echo(f"{time_text(audit.since)} to {time_text(audit.until)}")
    typer.echo(", ".join(f"{name} {value}" for name, value in zip(COUNTS, _counts(audit.total), strict=True)))
    typer.echo(f"{len(audit.schedules)} schedule(s), {audit.rows} row(s) of the ledger, {audit.seconds:.2f} s")


def _finding_line(finding: Finding) -> str:
    return f"{finding.kind}: {finding.schedule_id} {finding.scheduled_for.isoformat()}: {finding.why}"


def _counts(counts: Counts) -> list[str]:
    return [str(getattr(counts, name)) for name in COUNTS]


def _print_statistics(found: Statistics) -> None:
    rows = [[f"queue {one_line(queue.queue_name)}", *_figures(queue)] for queue in found.queues]
    rows += [[qualified(schedule.workspace_id, schedule.name), *_figures(schedule)] for schedule in found.schedules]
    rows.append(["total", *_figures(found.total)])
    headings = ("", "expected", "enqueued", "missed", "pending", "success", "recoveries", "p50", "p95", "p99")
    print_table(headings, rows)
    typer.echo(f"{time_text(found.since)} to {time_text(found.until)}; lateness in seconds")
    total = found.total
    mean = "" if total.mean_recovery_seconds is None else f", after {total.mean_recovery_seconds:.1f} s on average"
    typer.echo(
        f"recoveries: {total.recoveries_tried} tried, {total.recoveries_succeeded} succeeded, "
        f"{total.recoveries_failed} failed, {total.recoveries_abandoned} abandoned{mean}"
    )


def _figures(figures: Figures) -> list[str]:
    counts = (figures.expected, figures.enqueued, figures.missed, figures.pending)
    success = "" if figures.success_rate is None else f"{100 * figures.success_rate:.2f} %"
    lateness = (figures.lateness_p50, figures.lateness_p95, figures.lateness_p99)
    recoveries = f"{figures.recoveries_succeeded}/{figures.recoveries_tried}"
    return [*map(str, counts), success, recoveries, *("" if value is None else f"{value:.3f}" for value in lateness)]
