"""`cron-ticks events`: everything that happened to a message or to a schedule."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from cron_ticks.cli.common import Dsn, Json, one_line, reported_errors, time_text, to_json, with_manager
from cron_ticks.events import Event

LONGEST_DATA = 1000


def events_command(
    *,
    message: Annotated[
        str | None, typer.Option(metavar="ID", help="Everything about this message.", show_default=False)
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(metavar="ID", help="About this schedule, and its messages.", show_default=False)
    ] = None,
    limit: Annotated[int, typer.Option(help="At most so many.")] = 100,
    after: Annotated[
        int, typer.Option(metavar="SEQUENCE", help="The last sequence of the page before.", show_default=False)
    ] = 0,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Show what happened to a message or to a schedule, the oldest first."""
    with reported_errors():
        events = with_manager(
            dsn,
            lambda queue_manager: queue_manager.events(
                message_id=message, schedule_id=schedule, after_sequence=after, limit=limit
            ),
        )
    if as_json:
        typer.echo(to_json([asdict(event) for event in events]))
        return
    for event in events:
        typer.echo(_line(event, with_message=message is None))
    if not events:
        typer.echo("no events: is the id right? CRON_TICKS_EVENTS says which are kept")
    if len(events) == limit:
        typer.echo(f"there may be more: --after {events[-1].sequence}")


def _line(event: Event, *, with_message: bool) -> str:
    """In lines rather than a table: ids are copied, and data may be long."""
    by = event.worker or event.actor
    whose = event.message_id if with_message else None
    words = [f"{time_text(event.at)}  {event.event:<15}", whose, None if by is None else f"by {by}"]
    line = one_line("  ".join(word for word in words if word is not None).rstrip())
    if not event.data:
        return line
    data = json.dumps(event.data, ensure_ascii=False)
    return f"{line}\n    {one_line(data if len(data) <= LONGEST_DATA else data[:LONGEST_DATA] + '…')}"
