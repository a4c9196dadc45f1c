"""What every command needs: settings, options, and how an async function is run and its errors are shown."""

import asyncio
import json
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from importlib.util import find_spec
from typing import Annotated, Any, TypeVar, TypeVarTuple, Unpack

import anyio
import structlog
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from cron_ticks.errors import CronTicksError, InvalidInputError
from cron_ticks.logs import configure_logs
from cron_ticks.settings import Settings
from token_queue import QueueManager

log = structlog.get_logger("cron_ticks.cli")

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")

REPORT_WIDTH = 120  # where there is no terminal to ask

Dsn = Annotated[
    str | None,
    typer.Option(help="PostgreSQL to use; default: CRON_TICKS_DSN, else the embedded server.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def load_settings(dsn: str | None = None) -> Settings:
    """Settings from the environment, with logs set up by them."""
    settings = Settings.load(**({} if dsn is None else {"dsn": dsn}))
    configure_logs(settings.log_level, settings.log_format)
    for variable, suggestion in Settings.unknown_variables().items():
        log.warning("unknown_setting", variable=variable, did_you_mean=suggestion)
    return settings


def run(function: Callable[[Unpack[Arguments]], Awaitable[Result]], *arguments: *Arguments) -> Result:
    """Run an async function so that SIGTERM unwinds it as Ctrl-C does: what was begun is given back.

    A worker that stands has its own, gentler way.
    """

    async def main() -> Result:
        task = asyncio.current_task()
        if task is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await function(*arguments)

    try:
        return anyio.run(main, backend_options={"use_uvloop": find_spec("uvloop") is not None})
    except asyncio.CancelledError:
        raise typer.Exit(128 + signal.SIGTERM) from None


@contextmanager
def reported_errors() -> Iterator[None]:
    """Our own errors say what to do, so they are shown without a traceback."""
    try:
        yield
    except CronTicksError as error:
        typer.echo(visible(f"error: {error}"), err=True)
        raise typer.Exit(2) from error
    except ExceptionGroup as group:  # from a task beside others
        ours, others = group.split(CronTicksError)
        if ours is None or others is not None:
            raise
        for problem in ours.exceptions:
            typer.echo(visible(f"error: {problem}"), err=True)
        raise typer.Exit(2) from group


def with_manager(dsn: str | None, work: Callable[[QueueManager], Awaitable[Result]]) -> Result:
    """Do some work with an open QueueManager that runs no worker."""
    settings = load_settings(dsn)

    async def use_manager() -> Result:
        async with QueueManager(settings=settings) as queue_manager:
            return await work(queue_manager)

    return run(use_manager)


def confirm(question: str, *, command: str) -> None:
    """Ask before something is deleted for good."""
    if not sys.stdin.isatty():
        raise CronTicksError(f"{command} deletes for good, and there is no terminal to ask on: give --yes")
    typer.confirm(visible(question), abort=True, err=True)


def parse_json(field: str, text: str) -> Any:
    """A payload as it is typed."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(field, f"is not JSON: {error}") from None


def visible(text: str) -> str:
    """Without what would steer the terminal: an error's text may come from anywhere."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else "\N{REPLACEMENT CHARACTER}" for sign in text)


def one_line(text: str) -> str:
    """Nor what would begin a new line."""
    return "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in text)


def time_text(instant: datetime) -> str:
    """A time of the database, for people."""
    return instant.strftime("%Y-%m-%d %H:%M:%SZ")


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table as wide as the terminal; ids, which are copied, are not broken."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, overflow="fold", no_wrap=heading == headings[0])
    for row in rows:
        table.add_row(*row)
    width = None if sys.stdout.isatty() else REPORT_WIDTH
    Console(width=width, markup=False, emoji=False, highlight=False).print(table)


def to_json(value: object) -> str:
    """What `--json` prints."""
    return json.dumps(value, default=datetime.isoformat)
