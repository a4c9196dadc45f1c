"""What every command needs: settings, options, and how an async function is run and its errors are shown."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Annotated, TypeVar, TypeVarTuple, Unpack

import anyio
import structlog
import typer

from cron_ticks.errors import CronTicksError
from cron_ticks.logs import configure_logs
from cron_ticks.settings import Settings

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
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    except ExceptionGroup as group:  # from a task beside others
        ours, others = group.split(CronTicksError)
        if ours is None or others is not None:
            raise
        for problem in ours.exceptions:
            typer.echo(f"error: {problem}", err=True)
        raise typer.Exit(2) from group
