"""`cron-ticks runs` and `cron-ticks cleanup`: what became of occurrences, and removing what is old."""

from dataclasses import asdict
from datetime import timedelta
from typing import Annotated, Any, cast

import typer

from cron_ticks.cli.calendar_commands import parse_moment, parse_span, qualified
from cron_ticks.cli.common import (
    Dsn,
    Json,
    confirm,
    one_line,
    print_table,
    reported_errors,
    time_text,
    to_json,
    with_manager,
)
from cron_ticks.cli.report import database_clock
from cron_ticks.runs import MessageState, Outcome, Run
from token_queue import QueueManager
from token_queue.run_calls import CleanedUp, CleanupKind

HEADINGS = ("scheduled for", "schedule", "outcome", "late", "message", "finished at", "why")
WITH_ERROR = ("failed", "dead", "running")  # of a completed message an error is one of before


def runs_command(
    *,
    schedule: Annotated[
        str | None, typer.Option("--schedule", metavar="ID", help="Only of this schedule.", show_default=False)
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Only of schedules that have had this name.", show_default=False)
    ] = None,
    workspace: Annotated[str | None, typer.Option(help="Only of this workspace.", show_default=False)] = None,
    queue: Annotated[str | None, typer.Option("--queue", help="Only of this queue.", show_default=False)] = None,
    outcome: Annotated[
        str | None,
        typer.Option(help="enqueued, missed, overlapped, disabled, failed or expired.", show_default=False),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="From then on: a time, or 24h for that long ago. Default: 24h, of a schedule all.",
            show_default=False,
        ),
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="TIME", help="Before then, in the same way.", show_default=False)
    ] = None,
    after: Annotated[
        str | None, typer.Option(metavar="CURSOR", help="Where the page before ended.", show_default=False)
    ] = None,
    limit: Annotated[int, typer.Option(help="At most so many.")] = 100,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Show what became of occurrences and of their messages, the newest first."""

    async def read(queue_manager: QueueManager) -> list[Run]:
        now = await database_clock(queue_manager.database)
        return await queue_manager.runs(
            schedule_id=schedule,
            name=name,
            workspace_id=workspace,
            queue_name=queue,
            outcome=cast("Outcome | None", outcome),  # runs() checks it
            since=parse_moment("since", since, now),
            until=parse_moment("until", until, now),
            after=after,
            limit=limit,
        )

    with reported_errors():
        found = with_manager(dsn, read)
    if as_json:
        typer.echo(to_json([_as_json(run) for run in found]))
    elif found:
        print_table(HEADINGS, [_row(run) for run in found])
        if len(found) == limit:
            typer.echo(f"there may be more: --after {one_line(found[-1].cursor)}")
    else:
        typer.echo("no runs")


def cleanup_command(
    *,
    older_than: Annotated[str, typer.Option(metavar="DURATION", help="Age of what is removed, such as 90d.")],
    kinds: Annotated[
        list[str] | None,
        typer.Option(
            "--kind", help="Only this kind: runs, events, dead or messages; may be repeated.", show_default=False
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Remove what is old now, instead of when its retention is over."""
    with reported_errors():
        age = cast("float | timedelta", parse_span("older_than", older_than))
        chosen = cast("list[CleanupKind] | None", kinds)  # cleanup() checks them
        if not yes:
            what = "runs, events, dead letters and completed messages" if kinds is None else " and ".join(kinds)
            confirm(f"Delete {what} older than {older_than} for good?", command="cleanup")
        removed = with_manager(dsn, lambda queue_manager: queue_manager.cleanup(age, kinds=chosen))
    if as_json:
        typer.echo(to_json(asdict(removed)))
        return
    for line in _removed_lines(removed):
        typer.echo(line)


def _row(run: Run) -> list[str]:
    message = run.message
    name = run.schedule_id if run.schedule_name is None else qualified(run.workspace_id, run.schedule_name)
    return [
        time_text(run.scheduled_for),
        one_line(name) if run.origin == "schedule" else f"{one_line(name)} ({run.origin})",
        _outcome_text(run),
        "" if run.lateness is None else _seconds_text(run.lateness),
        "" if message is None else _progress_text(message),
        "" if message is None or message.finished_at is None else time_text(message.finished_at),
        one_line(_why(run)),
    ]


def _outcome_text(run: Run) -> str:
    if run.missed_since is None:
        return f"{run.outcome}, recovered" if run.recovered else run.outcome
    return f"{run.outcome} \N{MULTIPLICATION SIGN}{run.occurrences} since {time_text(run.missed_since)}"


def _progress_text(message: MessageState) -> str:
    if message.state is None:
        return "handed over"
    tries = message.attempts or 0
    return f"{message.state}, {tries} attempts" if tries > 1 else message.state


def _why(run: Run) -> str:
    """The reason why there is no message, or the error of one that has not been completed."""
    if run.message is not None and run.message.state in WITH_ERROR:
        return (run.message.error or "").partition("\n")[0]
    return run.reason or ""


def _seconds_text(duration: timedelta) -> str:
    seconds = duration.total_seconds()
    return f"{seconds:.3f} s" if abs(seconds) < 60 else str(timedelta(seconds=round(seconds)))  # noqa: PLR2004


def _as_json(run: Run) -> dict[str, Any]:
    """Durations in seconds."""
    shown = asdict(run)
    lateness, recovery = shown.pop("lateness"), shown.pop("recovery_time")
    return shown | {
        "lateness_seconds": None if lateness is None else lateness.total_seconds(),
        "recovery_seconds": None if recovery is None else recovery.total_seconds(),
        "cursor": run.cursor,
    }


def _removed_lines(removed: CleanedUp) -> list[str]:
    counts = {
        "day(s) of runs": len(removed.runs),
        "week(s) of events": len(removed.events),
        "version(s) of schedules": removed.versions,
        "audit(s)": removed.audits,
        "backfill(s)": removed.backfills,
        "dead letter(s)": removed.dead,
        "completed message(s)": removed.messages,
    }
    lines = [f"removed {number} {what}" for what, number in counts.items() if number] or ["nothing was that old"]
    return lines + [f"some {kind} are left, because the table is in use: try again later" for kind in removed.busy]
