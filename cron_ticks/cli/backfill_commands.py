"""The commands of `cron-ticks backfill`: making up for occurrences of the past."""

from dataclasses import asdict
from typing import Annotated, Any

import anyio
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cron_ticks.backfills import PER_MINUTE, Backfill
from cron_ticks.checks import check_name
from cron_ticks.cli.common import Dsn, Json, one_line, print_table, reported_errors, time_text, to_json, with_manager
from cron_ticks.declarations import parse_time
from token_queue import QueueManager

LOOK_SECONDS = 0.2  # between two looks while waiting
HEADINGS = ("id", "schedule", "from", "to", "made", "skipped", "pending", "total", "state")
backfill_app = typer.Typer(no_args_is_help=True, help="Make up for occurrences of the past.")

Id = Annotated[str, typer.Argument(metavar="ID", help="Id of the backfill.")]


@backfill_app.command("start")
def start_backfill(
    schedule_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the schedule.")],
    *,
    start: Annotated[str, typer.Option("--from", metavar="TIME", help="The first instant, as 2026-01-31T00:00:00Z.")],
    end: Annotated[str, typer.Option("--to", metavar="TIME", help="The first instant after it.")],
    per_minute: Annotated[int, typer.Option(help="At most so many a minute.")] = PER_MINUTE,
    wait: Annotated[bool, typer.Option("--wait", help="Until it has ended; 1 if it was cancelled or failed.")] = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Fire a schedule's occurrences of the past that have not fired. Running workers go on with it."""
    with reported_errors():
        first, beyond = parse_time("start", start), parse_time("end", end)

        async def begin(queue_manager: QueueManager) -> Backfill:
            begun = await queue_manager.backfill(schedule_id, first, beyond, per_minute=per_minute)
            return await _watch(queue_manager, begun) if wait else begun

        found = with_manager(dsn, begin)
    _print(found, as_json=as_json)
    if wait and found.outcome != "done":
        raise typer.Exit(1)


@backfill_app.command("list")
def list_backfills(
    *,
    schedule: Annotated[
        str | None, typer.Option(metavar="ID", help="Only of this schedule.", show_default=False)
    ] = None,
    limit: Annotated[int, typer.Option(help="At most so many.")] = 100,
    after: Annotated[
        str | None, typer.Option(metavar="ID", help="The last id of the page before.", show_default=False)
    ] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Show backfills, the latest first."""
    with reported_errors():
        found = with_manager(
            dsn, lambda queue_manager: queue_manager.list_backfills(schedule, after_id=after, limit=limit)
        )
    if as_json:
        typer.echo(to_json([_as_json(backfill) for backfill in found]))
    elif found:
        print_table(HEADINGS, [_row(backfill) for backfill in found])
    else:
        typer.echo("no backfills")


@backfill_app.command("show")
def show_backfill(backfill_id: Id, dsn: Dsn = None, as_json: Json = False) -> None:
    """Show how far a backfill is."""
    with reported_errors():
        found = with_manager(dsn, lambda queue_manager: queue_manager.get_backfill(backfill_id))
    _print(found, as_json=as_json)


@backfill_app.command("cancel")
def cancel_backfill(backfill_id: Id, dsn: Dsn = None, as_json: Json = False) -> None:
    """Make no more ticks of a backfill. Those that are made already fire."""
    with reported_errors():
        check_name("backfill_id", backfill_id)
        found = with_manager(dsn, lambda queue_manager: queue_manager.cancel_backfill(backfill_id))
    _print(found, as_json=as_json)


async def _watch(queue_manager: QueueManager, backfill: Backfill) -> Backfill:
    """Show how it goes on, on standard error, until it has ended."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(backfill.id, total=backfill.total)
        while backfill.ended_at is None:
            bar.update(task, completed=round(backfill.progress * backfill.total), total=backfill.total)
            await anyio.sleep(LOOK_SECONDS)
            backfill = await queue_manager.get_backfill(backfill.id)
        bar.update(task, completed=round(backfill.progress * backfill.total), total=backfill.total)
    return backfill


def _as_json(backfill: Backfill) -> dict[str, Any]:
    return asdict(backfill) | {"progress": backfill.progress}


def _state(backfill: Backfill) -> str:
    if backfill.outcome is None:
        return f"{backfill.progress:.0%}"
    return backfill.outcome if backfill.reason is None else one_line(f"{backfill.outcome}: {backfill.reason}")


def _row(backfill: Backfill) -> list[str]:
    numbers = (backfill.made, backfill.skipped, backfill.pending, backfill.total)
    return [
        backfill.id,
        one_line(backfill.schedule_id),
        time_text(backfill.start),
        time_text(backfill.end),
        *map(str, numbers),
        _state(backfill),
    ]


def _print(backfill: Backfill, *, as_json: bool) -> None:
    if as_json:
        typer.echo(to_json(_as_json(backfill)))
        return
    lines = {
        "id": backfill.id,
        "schedule": backfill.schedule_id,
        "from": time_text(backfill.start),
        "to": time_text(backfill.end),
        "position": time_text(backfill.position),
        "occurrences": str(backfill.total),
        "made": str(backfill.made),
        "skipped": str(backfill.skipped),
        "pending": str(backfill.pending),
        "pace": f"{backfill.per_minute} a minute",
        "begun at": time_text(backfill.created_at),
        "begun by": backfill.created_by or "(unknown)",
        "state": _state(backfill),
    }
    for heading, text in lines.items():
        typer.echo(f"{heading:13}  {one_line(text)}")
