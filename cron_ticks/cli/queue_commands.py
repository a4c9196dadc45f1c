"""The commands of `cron-ticks queue`: what is in the queues, sending, and dead letters."""

import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from typing import Annotated, Any, cast

import typer

from cron_ticks.checks import Priority
from cron_ticks.cli.common import (
    Dsn,
    Json,
    confirm,
    parse_json,
    print_table,
    reported_errors,
    time_text,
    to_json,
    visible,
    with_manager,
)
from cron_ticks.cli.report import database_clock
from cron_ticks.errors import CronTicksError, MessageNotFoundError
from token_queue import QueueManager
from token_queue.message import DeadMessage

STILL_DEAD = {
    "redriven": "an unfinished message has its dedupe key",
    "purged": "another session is at work on it",
}

queue_app = typer.Typer(no_args_is_help=True, help="Look into the queues, send messages, handle dead letters.")
dlq_app = typer.Typer(no_args_is_help=True, help="Dead letters: messages that are not tried again until redriven.")
queue_app.add_typer(dlq_app, name="dlq")

Ids = Annotated[list[str] | None, typer.Argument(metavar="ID", help="Ids of dead letters.", show_default=False)]
Queue = Annotated[str | None, typer.Option("--queue", help="Only of this queue.", show_default=False)]
Workspace = Annotated[str | None, typer.Option("--workspace", help="Only of this workspace.", show_default=False)]
Everything = Annotated[bool, typer.Option("--all", help="All dead letters there are.")]


@queue_app.command("list")
def list_queues(dsn: Dsn = None, as_json: Json = False) -> None:
    """Show every queue: its messages, and how many running workers handle it."""
    with reported_errors():
        states = with_manager(dsn, _read_states)
    if as_json:
        typer.echo(to_json(states))
    elif states:
        headings = ("queue", "due", "waiting", "dead", "oldest due", "workers")
        print_table(headings, [_state_row(state) for state in states])
    else:
        typer.echo("no queues: there are neither messages nor workers")


@queue_app.command("send")
def send_message(
    queue_name: Annotated[str, typer.Argument(metavar="QUEUE")],
    payload_json: Annotated[str, typer.Argument(metavar="PAYLOAD_JSON", help="The payload.")] = "{}",
    *,
    workspace: Annotated[str | None, typer.Option(help="Workspace; default: system-wide.", show_default=False)] = None,
    delay: Annotated[float, typer.Option(help="Seconds until the message is due.", min=0)] = 0,
    priority: Annotated[str, typer.Option(help="urgent, high, normal or low.")] = "normal",
    dedupe_key: Annotated[
        str | None, typer.Option(help="Send only if no unfinished message has this key.", show_default=False)
    ] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Send a message and print its id, or the id of the message that it is a duplicate of."""
    with reported_errors():
        payload = parse_json("PAYLOAD_JSON", payload_json)
        sent = with_manager(
            dsn,
            lambda queue_manager: queue_manager.send(
                queue_name,
                payload,
                workspace_id=workspace,
                process_after=delay,
                priority=cast("Priority", priority),  # send() checks it
                dedupe_key=dedupe_key,
            ),
        )
    if as_json:
        typer.echo(to_json(asdict(sent)))
    else:
        typer.echo(f"not sent: duplicate of {sent.id}, which is unfinished" if sent.duplicate else sent.id)


@dlq_app.command("list")
def list_dead_letters(
    *,
    queue: Queue = None,
    workspace: Workspace = None,
    limit: Annotated[int, typer.Option(help="At most so many.")] = 100,
    after: Annotated[
        str | None, typer.Option(metavar="ID", help="The last id of the page before.", show_default=False)
    ] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Show dead letters, the latest first."""

    with reported_errors():
        letters = with_manager(
            dsn,
            lambda queue_manager: queue_manager.list_dead(
                queue_name=queue, workspace_id=workspace, after_id=after, limit=limit
            ),
        )
    if as_json:
        typer.echo(to_json([asdict(letter) for letter in letters]))
    elif letters:
        headings = ("id", "queue", "workspace", "dead at", "attempts", "error")
        print_table(headings, [_letter_row(letter) for letter in letters])
        if len(letters) == limit:
            typer.echo(f"there may be more: --after {letters[-1].id}")
    else:
        typer.echo("no dead letters")


@dlq_app.command("show")
def show_dead_letter(
    message_id: Annotated[str, typer.Argument(metavar="ID")], dsn: Dsn = None, as_json: Json = False
) -> None:
    """Show everything about one dead letter."""
    with reported_errors():
        letter = with_manager(dsn, lambda queue_manager: queue_manager.get_dead(message_id))
    typer.echo(to_json(asdict(letter)) if as_json else _letter_text(letter))


@dlq_app.command("redrive")
def redrive_dead_letters(
    ids: Ids = None,
    *,
    queue: Queue = None,
    workspace: Workspace = None,
    everything: Everything = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Let dead letters begin anew, with all their attempts."""
    with reported_errors():
        choice = _choose(ids, queue, workspace, everything)
        changed = with_manager(dsn, lambda queue_manager: _change(queue_manager, queue_manager.redrive_dead, choice))
    _report_change("redriven", changed, as_json)


@dlq_app.command("purge")
def purge_dead_letters(
    ids: Ids = None,
    *,
    queue: Queue = None,
    workspace: Workspace = None,
    everything: Everything = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Delete dead letters for good."""
    with reported_errors():
        choice = _choose(ids, queue, workspace, everything)
        if not yes:
            _confirm_purge(choice)
        changed = with_manager(dsn, lambda queue_manager: _change(queue_manager, queue_manager.purge_dead, choice))
    _report_change("purged", changed, as_json)


async def _read_states(queue_manager: QueueManager) -> list[dict[str, Any]]:
    """The queues as `--json` prints them; ages are by the database's clock."""
    states = await queue_manager.queue_states()
    now = await database_clock(queue_manager.database)
    return [
        asdict(state)
        | {
            "oldest_due_age_seconds": state.oldest_due and max(0.0, (now - state.oldest_due).total_seconds()),
            "unhandled": state.workers == 0 and state.due + state.waiting > 0,
        }
        for state in states
    ]


def _state_row(state: dict[str, Any]) -> list[str]:
    age = state["oldest_due_age_seconds"]
    return [
        *(str(state[field]) for field in ("queue_name", "due", "waiting", "dead")),
        "" if age is None else str(timedelta(seconds=int(age))),
        "0: NOT HANDLED" if state["unhandled"] else str(state["workers"]),
    ]


def _letter_row(letter: DeadMessage) -> list[str]:
    error = visible(_error(letter).partition("\n")[0])
    workspace = letter.workspace_id or ""
    return [letter.id, letter.queue_name, workspace, time_text(letter.dead_at), str(letter.attempts), error]


def _letter_text(letter: DeadMessage) -> str:
    lines = [
        f"id             {letter.id}",
        f"queue          {letter.queue_name}",
        f"workspace      {letter.workspace_id or '(system-wide)'}",
        f"sent at        {time_text(letter.sent_at)}",
        f"dead at        {time_text(letter.dead_at)}",
        f"attempts       {letter.attempts}",
        f"worker deaths  {letter.worker_deaths}",
        *(f"failed at      {time_text(instant)}" for instant in letter.failed_at),
        f"last error     {_error(letter)}",
        f"payload        {json.dumps(letter.payload, indent=2)}",
        f"headers        {json.dumps(letter.headers, indent=2)}",
    ]
    return visible("\n".join([*lines, letter.error_traceback or ""]).rstrip())


def _error(letter: DeadMessage) -> str:
    """Type and message of the last failure, as far as known."""
    return ": ".join(part for part in (letter.error_type, letter.error_message) if part)


def _choose(ids: list[str] | None, queue: str | None, workspace: str | None, everything: bool) -> dict[str, Any]:
    """The choice as redrive_dead() and purge_dead() take it, if it is one."""
    filtered = queue is not None or workspace is not None
    ways = [bool(ids), filtered, everything].count(True)
    if ways != 1:
        hint = "" if ways == 0 else ", and only one of these"
        raise CronTicksError(f"which dead letters? Give ids, or --queue or --workspace or both, or --all{hint}")
    return {"message_ids": list(dict.fromkeys(ids))} if ids else {"queue_name": queue, "workspace_id": workspace}


def _confirm_purge(choice: dict[str, Any]) -> None:
    ids = choice.get("message_ids")
    what = "all dead letters" if ids is None else f"{len(ids)} dead letter(s)"
    filters = "".join(f" of {choice[name]}" for name in ("queue_name", "workspace_id") if choice.get(name))
    confirm(f"Delete {what}{filters} for good?", command="purge")


async def _change(
    queue_manager: QueueManager, method: Callable[..., Awaitable[int]], choice: dict[str, Any]
) -> tuple[int, list[str], list[str]]:
    """How many were changed, which ids are no dead letters, and which were before and still are."""
    if "message_ids" not in choice:
        return await method(**choice), [], []
    dead = await _dead_among(queue_manager, choice["message_ids"])
    changed = await method(dead)
    still_dead = await _dead_among(queue_manager, dead) if changed < len(dead) else []
    return changed, [message_id for message_id in choice["message_ids"] if message_id not in dead], still_dead


async def _dead_among(queue_manager: QueueManager, ids: Sequence[str]) -> list[str]:
    dead = []
    for message_id in ids:
        with suppress(MessageNotFoundError):
            dead.append((await queue_manager.get_dead(message_id)).id)
    return dead


def _report_change(verb: str, result: tuple[int, list[str], list[str]], as_json: bool) -> None:
    changed, not_found, still_dead = result
    if as_json:
        typer.echo(to_json({verb: changed, "not_found": not_found, "still_dead": still_dead}))
    else:
        typer.echo(f"{verb} {changed}")
        for message_id in not_found:
            typer.echo(f"not found among the dead letters: {message_id}")
        for message_id in still_dead:
            typer.echo(f"still dead: {message_id}: {STILL_DEAD[verb]}")
    if not_found or still_dead:
        raise typer.Exit(1)
