"""The commands of `cron-ticks schedule`: what is scheduled, and changing it by hand."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

import typer

from cron_ticks.checks import check_count, check_name
from cron_ticks.cli.calendar_commands import (
    At,
    Cron,
    DstFold,
    DstGap,
    Every,
    Owner,
    Timezone,
    parse_instant,
    parse_span,
    rule_options,
)
from cron_ticks.cli.common import (
    Dsn,
    Json,
    confirm,
    one_line,
    parse_json,
    print_table,
    reported_errors,
    to_json,
    with_manager,
)
from cron_ticks.cli.report import database_clock
from cron_ticks.cli.shown_schedules import (
    SOURCES,
    Shown,
    Source,
    look_ahead,
    print_everything,
    print_next,
    row_of,
    source_of_zone,
)
from cron_ticks.errors import InvalidInputError
from cron_ticks.schedules import DEFAULT_ZONE, Schedule
from token_queue import QueueManager

SMALLEST_PAGE = 100  # what is read at once, though few may be wanted
LARGEST_PAGE = 10_000
schedule_app = typer.Typer(no_args_is_help=True, help="Look at schedules, and change them by hand.")

Id = Annotated[str, typer.Argument(metavar="ID", help="Id of the schedule.")]


@schedule_app.command("list")
def list_schedules(
    *,
    workspace: Annotated[str | None, typer.Option(help="Only of this workspace.", show_default=False)] = None,
    owner: Annotated[
        str | None, typer.Option(help="Only with this label. Reads all schedules to find them.", show_default=False)
    ] = None,
    broken: Annotated[
        bool, typer.Option("--broken", help="Only those that can't be followed. Reads all schedules to find them.")
    ] = False,
    limit: Annotated[int, typer.Option(help="At most so many.")] = 100,
    after: Annotated[str, typer.Option(metavar="ID", help="The last id of the page before.", show_default=False)] = "",
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Show schedules, in the order of their ids."""

    def chosen(schedule: Schedule) -> bool:
        return (owner is None or schedule.owner == owner) and not (broken and schedule.error is None)

    async def read(queue_manager: QueueManager) -> list[Shown]:
        found = await _find(queue_manager, chosen, workspace, after, limit)
        return await look_ahead(queue_manager, found, 1)

    with reported_errors():
        check_count("limit", limit, most=LARGEST_PAGE)
        if owner is not None:
            check_name("owner", owner)
        listed = with_manager(dsn, read)
    if as_json:
        typer.echo(to_json([shown.as_json() for shown in listed]))
    elif listed:
        print_table(("id", "name", "when", "queue", "next", "state"), [row_of(shown) for shown in listed])
        if len(listed) == limit:
            typer.echo(f"there may be more: --after {one_line(listed[-1].schedule.id)}")
    else:
        typer.echo("no schedules")


@schedule_app.command("show")
def show_schedule(schedule_id: Id, dsn: Dsn = None, as_json: Json = False) -> None:
    """Show everything about one schedule, and when it occurs next."""

    async def read(queue_manager: QueueManager) -> tuple[Shown, Source | None]:
        schedule = await queue_manager.get_schedule(schedule_id)
        [shown] = await look_ahead(queue_manager, [schedule])
        return shown, await source_of_zone(queue_manager, schedule)

    with reported_errors():
        shown, source = with_manager(dsn, read)
    if as_json:
        typer.echo(to_json(shown.as_json() | {"timezone_from": source}))
    else:
        print_everything(shown, source)


@schedule_app.command("set")
def set_schedule(
    queue_name: Annotated[str, typer.Argument(metavar="QUEUE")],
    *,
    name: Annotated[str | None, typer.Option(help="Name; default: the queue's.", show_default=False)] = None,
    workspace: Annotated[str | None, typer.Option(help="Workspace; default: system-wide.", show_default=False)] = None,
    cron: Cron = None,
    every: Every = None,
    at: At = None,
    timezone: Timezone = None,
    payload: Annotated[str, typer.Option(metavar="JSON", help="The payload.")] = "{}",
    jitter: Annotated[
        str | None, typer.Option(help="A duration such as 5s, or a ratio of the interval.", show_default=False)
    ] = None,
    priority: Annotated[str, typer.Option(help="urgent, high, normal or low.")] = "normal",
    starts_at: Annotated[
        str | None, typer.Option(metavar="TIME", help="No occurrence before.", show_default=False)
    ] = None,
    ends_at: Annotated[
        str | None, typer.Option(metavar="TIME", help="No occurrence after.", show_default=False)
    ] = None,
    max_runs: Annotated[int | None, typer.Option(help="At most so many occurrences.", show_default=False)] = None,
    overlap: Annotated[
        str, typer.Option(help="While its last message is unfinished: allow, skip or queue_one.")
    ] = "allow",
    sink: Annotated[str, typer.Option(help="Where it goes.")] = "queue",
    delivery: Annotated[
        str | None, typer.Option(help="exactly_once, at_least_once or at_most_once.", show_default=False)
    ] = None,
    max_attempts: Annotated[int | None, typer.Option(help="To send a tick.", show_default=False)] = None,
    max_age: Annotated[
        str | None, typer.Option(metavar="DURATION", help="For how long a tick is tried.", show_default=False)
    ] = None,
    backoff: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Before the second attempt.", show_default=False)
    ] = None,
    catch_up: Annotated[
        str, typer.Option(help="What is made up of missed occurrences: skip, latest, all or spread.")
    ] = "latest",
    misfire_grace: Annotated[
        str | None, typer.Option(metavar="DURATION", help="A tick later than this is missed.", show_default=False)
    ] = None,
    dst_gap: DstGap = None,
    dst_fold: DstFold = None,
    owner: Owner = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Declare a schedule as schedule() does: create it, or edit the one of this name and workspace.

    What is left out gets its default, also where the schedule had something else before.
    """
    with reported_errors():
        options = {
            **rule_options(cron=cron, every=every, at=at, timezone=timezone, dst_gap=dst_gap, dst_fold=dst_fold),
            "name": name,
            "workspace_id": workspace,
            "payload": parse_json("payload", payload),
            "jitter": parse_span("jitter", jitter),
            "priority": priority,
            "starts_at": parse_instant("starts_at", starts_at),
            "ends_at": parse_instant("ends_at", ends_at),
            "max_runs": max_runs,
            "overlap": overlap,
            "sink": sink,
            "delivery": delivery,
            "max_attempts": max_attempts,
            "max_age": parse_span("max_age", max_age),
            "backoff": parse_span("backoff", backoff),
            "catch_up": catch_up,
            "misfire_grace": parse_span("misfire_grace", misfire_grace),
            "owner": owner,
        }
        given = {field: value for field, value in options.items() if value is not None}
        change, shown = with_manager(dsn, lambda queue_manager: _declare(queue_manager, queue_name, given))
    if as_json:
        typer.echo(to_json({"change": change} | shown.as_json()))
    else:
        schedule = shown.schedule
        typer.echo(f"{change} {schedule.id}: {one_line(schedule.description)}")
        print_next(shown)


@schedule_app.command("enable")
def enable_schedule(
    schedule_id: Id,
    *,
    fire_now: Annotated[bool, typer.Option("--fire-now", help="Fire once at once, beside the rule.")] = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Go on with a schedule at its next occurrence; a broken one is tried again."""

    async def enable(queue_manager: QueueManager) -> Shown:
        schedule = await queue_manager.enable_schedule(schedule_id, fire_now=fire_now)
        return (await look_ahead(queue_manager, [schedule]))[0]

    with reported_errors():
        shown = with_manager(dsn, enable)
    if as_json:
        typer.echo(to_json(shown.as_json()))
    else:
        typer.echo(f"enabled {one_line(shown.schedule.id)}")
        print_next(shown)


@schedule_app.command("disable")
def disable_schedule(
    schedule_id: Id,
    *,
    drop_pending: Annotated[
        bool, typer.Option("--drop-pending", help="Ticks that are made already don't fire either.")
    ] = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Pause a schedule."""

    async def disable(queue_manager: QueueManager) -> Shown:
        schedule = await queue_manager.disable_schedule(schedule_id, drop_pending=drop_pending)
        return (await look_ahead(queue_manager, [schedule]))[0]

    with reported_errors():
        shown = with_manager(dsn, disable)
    typer.echo(to_json(shown.as_json()) if as_json else f"disabled {one_line(shown.schedule.id)}")


@schedule_app.command("trigger")
def trigger_schedule(schedule_id: Id, dsn: Dsn = None, as_json: Json = False) -> None:
    """Fire a schedule once now, also a disabled one, and print the id that its message will have."""
    with reported_errors():
        triggered = with_manager(dsn, lambda queue_manager: queue_manager.trigger(schedule_id))
    if as_json:
        typer.echo(to_json(asdict(triggered) | {"message_id": triggered.message_id}))
    else:
        typer.echo(triggered.message_id)


@schedule_app.command("delete")
def delete_schedule(
    schedule_id: Id,
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Remove a schedule with its pending ticks. Messages already sent stay."""
    with reported_errors():
        if not yes:
            confirm(f"Delete the schedule {schedule_id} for good?", command="delete")
        with_manager(dsn, lambda queue_manager: queue_manager.delete_schedule(schedule_id))
    typer.echo(to_json({"deleted": schedule_id}) if as_json else f"deleted {one_line(schedule_id)}")


@schedule_app.command("timezone")
def workspace_timezone(
    workspace: Annotated[str, typer.Argument(metavar="WORKSPACE")],
    zone: Annotated[
        str | None, typer.Argument(metavar="ZONE", help="The new default zone.", show_default=False)
    ] = None,
    *,
    unset: Annotated[bool, typer.Option("--unset", help="Go back to UTC.")] = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Show or set the zone of a workspace's cron schedules that name none.

    For each of them a new zone is an edit, which holds from the next occurrence on.
    """

    async def change(queue_manager: QueueManager) -> tuple[str | None, int | None]:
        changed = await queue_manager.set_workspace_timezone(workspace, zone) if zone is not None or unset else None
        return await queue_manager.get_workspace_timezone(workspace), changed

    with reported_errors():
        if zone is not None and unset:
            raise InvalidInputError("timezone", "give a zone or --unset, not both")
        holds, changed = with_manager(dsn, change)
    if as_json:
        typer.echo(to_json({"workspace_id": workspace, "timezone": holds, "changed_schedules": changed}))
    else:
        text = f"{DEFAULT_ZONE} ({SOURCES['default']})" if holds is None else holds
        typer.echo(one_line(text if changed is None else f"{text}, {changed} schedule(s) changed"))


async def _find(
    queue_manager: QueueManager, chosen: Callable[[Schedule], bool], workspace: str | None, after: str, limit: int
) -> list[Schedule]:
    """The first schedules that are chosen, from page after page."""
    found: list[Schedule] = []
    page_size = max(limit, SMALLEST_PAGE)
    while len(found) < limit:
        page = await queue_manager.list_schedules(workspace_id=workspace, after_id=after, limit=page_size)
        found += filter(chosen, page)
        if len(page) < page_size:
            break
        after = page[-1].id
    return found[:limit]


async def _declare(queue_manager: QueueManager, queue_name: str, options: dict[str, Any]) -> tuple[str, Shown]:
    """What it did: a schedule's times are by the same clock as ours."""
    begun = await database_clock(queue_manager.database)
    schedule = await queue_manager.schedule(queue_name, **options)
    [shown] = await look_ahead(queue_manager, [schedule])
    if schedule.created_at >= begun:
        return "created", shown
    return "changed" if schedule.updated_at >= begun else "unchanged", shown
