"""`cron-ticks preview` and `cron-ticks apply`, and how options and occurrences of schedules are written."""

import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any
from zoneinfo import ZoneInfo

import typer

from cron_ticks.cli.common import (
    Dsn,
    Json,
    one_line,
    print_table,
    reported_errors,
    to_json,
    visible,
    with_manager,
)
from cron_ticks.declarations import DURATION, Applied, AppliedChange, parse_duration, parse_time
from cron_ticks.descriptions import describe_rule
from cron_ticks.errors import InvalidInputError
from cron_ticks.previews import preview
from cron_ticks.schedules import DEFAULT_ZONE, calendar_of, check_rule, rule_of

PLAIN_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?")

Cron = Annotated[
    str | None,
    typer.Option(
        metavar="EXPRESSION", help="Times of day: five fields, or six with seconds first.", show_default=False
    ),
]
Every = Annotated[
    str | None,
    typer.Option(metavar="DURATION", help="An interval: seconds, or 30s, 5m, 1h30m, 2d.", show_default=False),
]
At = Annotated[str | None, typer.Option(metavar="TIME", help="Once, such as 2027-01-01T09:00:00Z.", show_default=False)]
Timezone = Annotated[
    str | None, typer.Option(metavar="ZONE", help="IANA name, such as Europe/Berlin.", show_default=False)
]
DstGap = Annotated[
    str | None, typer.Option(help="Fixed times that clocks skip: fire (after the gap) or skip.", show_default=False)
]
DstFold = Annotated[
    str | None, typer.Option(help="Fixed times that clocks show twice: first, second or both.", show_default=False)
]
Owner = Annotated[str | None, typer.Option(help="Label of the deployment that declares it.", show_default=False)]


def preview_command(
    *,
    cron: Cron = None,
    every: Every = None,
    at: At = None,
    timezone: Timezone = None,
    after: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only occurrences after this time; default: now.")
    ] = None,
    count: Annotated[int, typer.Option(help="How many.")] = 5,
    dst_gap: DstGap = None,
    dst_fold: DstFold = None,
    as_json: Json = False,
) -> None:
    """Show when a schedule would occur. Needs no database."""
    with reported_errors():
        rule = rule_options(cron=cron, every=every, at=at, timezone=timezone, dst_gap=dst_gap, dst_fold=dst_fold)
        start = parse_instant("after", after) or datetime.now(UTC).replace(microsecond=0)
        occurrences = preview(**rule, after=start, count=count)
        description = _description(rule, start)
    zone = timezone or DEFAULT_ZONE
    if as_json:
        shown = {"description": description, "timezone": zone, "occurrences": occurrences_as_json(occurrences, zone)}
        typer.echo(to_json(shown))
        return
    typer.echo(visible(description))
    if occurrences:
        print_occurrences(occurrences, zone)
    else:
        typer.echo(f"no occurrences after {_seconds(start)}Z")


def apply_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="TOML or YAML, by its suffix.")],
    *,
    owner: Annotated[
        str | None, typer.Option(help="Label of this deployment, instead of the file's.", show_default=False)
    ] = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove the owner's schedules that the file doesn't declare.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and change nothing.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show unchanged schedules too.")] = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Bring schedules in line with a file: all of it or, on a mistake, nothing."""
    with reported_errors():
        applied = with_manager(
            dsn, lambda queue_manager: queue_manager.apply(file, owner=owner, prune=prune, dry_run=dry_run)
        )
    if as_json:
        typer.echo(to_json(asdict(applied) | _counts(applied)))
        return
    for change in applied.changes:
        if verbose or change.change != "unchanged":
            typer.echo(_change_line(change))
    typer.echo(_totals(applied))


def _description(rule: dict[str, Any], start: datetime) -> str:
    interval, moment, calendar = check_rule(**rule)
    zoned = calendar_of(calendar["cron"], calendar["timezone"], calendar["dst_gap"], calendar["dst_fold"])
    return describe_rule(rule_of(moment or start, interval, zoned))


def rule_options(*, every: str | None, at: str | None, **calendar: str | None) -> dict[str, Any]:
    """When a schedule occurs, as preview() and schedule() take it; they check it."""
    return {"every": parse_span("every", every), "at": parse_instant("at", at), **calendar}


def parse_span(field: str, text: str | None) -> float | timedelta | None:
    """A number as the API takes it, or a duration as files have it."""
    if text is None:
        return None
    return float(text) if PLAIN_NUMBER.fullmatch(text) else parse_duration(field, text)


def parse_moment(field: str, text: str | None, now: datetime) -> datetime | None:
    """A time, or how long ago."""
    if text is None:
        return None
    if not (PLAIN_NUMBER.fullmatch(text) or DURATION.fullmatch(text)):
        return parse_time(field, text)
    span = parse_span(field, text)
    try:
        return now - (span if isinstance(span, timedelta) else timedelta(seconds=span or 0.0))
    except OverflowError:
        raise InvalidInputError(field, f"{text} is too long ago") from None


def parse_instant(field: str, text: str | None) -> datetime | None:
    """A time with its offset."""
    return None if text is None else parse_time(field, text)


def occurrences_as_json(occurrences: Sequence[datetime], zone: str) -> list[dict[str, str]]:
    """Each in UTC and as the zone's clocks show it."""
    # What has none may be in a zone that is gone.
    return [
        {"utc": moment.isoformat(), "local": moment.astimezone(ZoneInfo(zone)).isoformat()} for moment in occurrences
    ]


def print_occurrences(occurrences: Sequence[datetime], zone: str) -> None:
    """A table of them, in the zone's wall time and in UTC."""
    info = ZoneInfo(zone)
    rows = [(_wall_time(moment.astimezone(info)), f"{_seconds(moment.astimezone(UTC))}Z") for moment in occurrences]
    print_table((one_line(f"clocks in {zone}"), "UTC"), rows)


def _wall_time(local: datetime) -> str:
    name = local.tzname() or ""
    offset = local.isoformat(timespec="seconds")[len("2027-01-01T09:00:00") :]
    return f"{local:%a} {_seconds(local)} {offset}{f' {name}' if name.isalpha() else ''}"


def _seconds(moment: datetime) -> str:
    """Without the offset, and with a fraction only if there is one."""
    return moment.replace(tzinfo=None).isoformat(" ", "milliseconds" if moment.microsecond else "seconds")


def qualified(workspace_id: str | None, name: str) -> str:
    """A schedule's name with its workspace."""
    return one_line(name if workspace_id is None else f"{workspace_id}/{name}")


def _counts(applied: Applied) -> dict[str, int]:
    return {kind: applied.count(kind) for kind in ("create", "change", "remove", "unchanged")}


def _change_line(change: AppliedChange) -> str:
    fields = f": {', '.join(change.fields)}" if change.fields else ""
    if change.change == "change" and not fields:
        fields = ": tried again, because it was broken"
    return f"{change.change:9} {qualified(change.workspace_id, change.name)}{fields}"


def _totals(applied: Applied) -> str:
    counts = _counts(applied)
    if applied.dry_run:
        text = "dry run, nothing was changed: {create} to create, {change} to change, {remove} to remove"
    else:
        text = "created {create}, changed {change}, removed {remove}"
    return f"{text}, {{unchanged}} unchanged".format(**counts)
