"""The commands of `cron-ticks`."""

import importlib
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import IO, Annotated

import anyio
import structlog
import typer
from rich.console import Console

import cron_ticks
from cron_ticks.cli.audit_commands import audit_command, stats_command
from cron_ticks.cli.backfill_commands import backfill_app
from cron_ticks.cli.bench import bench_app
from cron_ticks.cli.calendar_commands import apply_command, preview_command
from cron_ticks.cli.common import REPORT_WIDTH, Dsn, Json, load_settings, reported_errors, run
from cron_ticks.cli.event_commands import events_command
from cron_ticks.cli.queue_commands import queue_app
from cron_ticks.cli.report import Report, report_table
from cron_ticks.cli.run_commands import cleanup_command, runs_command
from cron_ticks.cli.schedule_commands import schedule_app
from cron_ticks.cli.up import EXAMPLE_APP, UpOptions, run_up
from cron_ticks.database import open_database
from cron_ticks.embedded import embedded_server, use_embedded
from cron_ticks.errors import InvalidInputError
from cron_ticks.logs import configure_logs
from cron_ticks.migrator import known_migrations, migrate, pending_migrations, render_script
from cron_ticks.settings import PREFIX, Settings
from token_queue import QueueManager

log = structlog.get_logger("cron_ticks.cli")

Schedules = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Apply this file of schedules first, and stop if it is wrong.", show_default=False
    ),
]

app = typer.Typer(name="cron-ticks", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

app.command("preview")(preview_command)
app.command("apply")(apply_command)
app.command("runs")(runs_command)
app.command("audit")(audit_command)
app.command("stats")(stats_command)
app.command("events")(events_command)
app.command("cleanup")(cleanup_command)
app.add_typer(schedule_app, name="schedule")
app.add_typer(backfill_app, name="backfill")
app.add_typer(queue_app, name="queue")
app.add_typer(bench_app, name="bench")


@app.callback(invoke_without_command=True)
def main(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """A distributed cron on PostgreSQL."""
    if version:
        typer.echo(cron_ticks.__version__)
        raise typer.Exit


@app.command("migrate")
def migrate_command(
    check: Annotated[bool, typer.Option("--check", help="Change nothing; exit 1 if migrations are pending.")] = False,
    sql: Annotated[bool, typer.Option("--sql", help="Print the migrations, for a DBA to apply.")] = False,
    after: Annotated[int, typer.Option(help="With --sql: only migrations after this number.", min=0)] = 0,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Bring the database's schema up to date."""
    with reported_errors():
        settings = load_settings(dsn)
        if sql:
            script = render_script(settings.database_schema, after=after)
            typer.echo(json.dumps({"sql": script}) if as_json else script, nl=as_json)
            return
        pending, applied = run(_migrate, settings, check)
    if as_json:
        typer.echo(json.dumps({"pending": pending, "applied": applied, "known": len(known_migrations())}))
    else:
        for label in applied:
            typer.echo(f"applied {label}")
        for label in pending:
            typer.echo(f"pending {label}")
        if not applied and not pending:
            typer.echo(f"up to date: {len(known_migrations())} migration(s)")
    if pending:
        raise typer.Exit(1)


async def _migrate(settings: Settings, check: bool) -> tuple[list[str], list[str]]:
    """What is pending afterwards and what was applied."""
    if settings.dsn is None:
        async with use_embedded(embedded_server(settings)) as server:
            return await _migrate_at(server.dsn, settings, check)
    return await _migrate_at(settings.dsn.get_secret_value(), settings, check)


async def _migrate_at(dsn: str, settings: Settings, check: bool) -> tuple[list[str], list[str]]:
    async with open_database(settings, dsn=dsn) as database:
        if check:
            return [migration.label for migration in await pending_migrations(database)], []
        return [], [migration.label for migration in await migrate(database)]


@app.command()
def worker(
    app_path: Annotated[
        str, typer.Option("--app", help="The QueueManager, or a function that returns it: module:name.")
    ],
    while_stdin: Annotated[
        bool,
        typer.Option("--while-stdin", help="Stop when standard input closes, as a supervisor's pipe does."),
    ] = False,
    schedules: Schedules = None,
) -> None:
    """Run a worker: make ticks, fire them and handle messages, until SIGTERM or Ctrl-C."""
    with reported_errors():
        load_settings()
        run(_run_worker, load_app(app_path), while_stdin, schedules)


async def _run_worker(queue_manager: QueueManager, while_stdin: bool, schedules: Path | None) -> None:
    async with queue_manager:
        if schedules is not None:
            await queue_manager.apply(schedules)
        async with anyio.create_task_group() as tasks:
            if while_stdin:
                tasks.start_soon(_stop_with_stdin, queue_manager)
            await queue_manager.run()
            tasks.cancel_scope.cancel()


async def _stop_with_stdin(queue_manager: QueueManager) -> None:
    descriptor = sys.stdin.fileno()
    while True:
        await anyio.wait_readable(descriptor)
        if not os.read(descriptor, 4096):
            log.warning("standard_input_closed")
            queue_manager.stop()
            return


@app.command()
def up(
    *,
    workers: Annotated[int, typer.Option(help="Worker processes.", min=1, max=64)] = 2,
    seconds: Annotated[
        float | None, typer.Option("--for", help="Stop after so many seconds.", min=0.1, show_default=False)
    ] = None,
    dsn: Dsn = None,
    app_path: Annotated[str, typer.Option("--app", help="Whose handlers to run: module:name.")] = EXAMPLE_APP,
    schedules: Schedules = None,
    as_json: Json = False,
) -> None:
    """Bring everything up on this machine and watch it fire.

    With no schedules in the database, a few examples are declared. Exits 1 if an occurrence was missed or fired twice,
    or if something has been due for long and is not fired.
    """
    live = sys.stdout.isatty() and not as_json
    console = Console(width=None if live else REPORT_WIDTH)
    with reported_errors():
        settings = load_settings(dsn)
        if dsn is not None:  # for the application too, here and in its workers
            os.environ[f"{PREFIX}DSN"] = dsn
        application = load_app(app_path)
        declare = None if schedules is None else partial(_apply, application, schedules)
        options = UpOptions(workers, seconds, app_path, dict(os.environ), settings.metrics_port, declare)
        if not live:
            report = run(_up, settings, options, console, None)
        else:
            with tempfile.NamedTemporaryFile("w", prefix="cron_ticks_up_", suffix=".log", delete=False) as log_file:
                configure_logs(settings.log_level, settings.log_format, log_file)
                console.print(f"log: {log_file.name}   Ctrl-C stops")
                report = run(_up, settings, options, console, log_file)
    if as_json:
        typer.echo(json.dumps({"workers": workers} | report.as_json()))
    else:
        console.print(report_table(report, width=console.width))
    if report.problem is not None:
        typer.echo(f"error: {report.problem}", err=True)
        raise typer.Exit(1)


async def _up(settings: Settings, options: UpOptions, console: Console, log_file: IO[str] | None) -> Report:
    async with QueueManager(settings=settings) as queue_manager:
        return await run_up(queue_manager, options, console, log_file)


async def _apply(application: QueueManager, schedules: Path) -> None:
    """By the application itself, because it knows its sinks."""
    async with application:
        await application.apply(schedules)


def load_app(path: str) -> QueueManager:
    """The QueueManager at `module:name`, or the one that the function there returns."""
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise InvalidInputError("--app", f"must be module:name, not {path!r}")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise InvalidInputError("--app", f"{error}: is it importable from {Path.cwd()}?") from error
    if not hasattr(module, attribute):
        raise InvalidInputError("--app", f"module {module_name!r} has no {attribute!r}")
    found = getattr(module, attribute)
    queue_manager = found() if callable(found) else found
    if not isinstance(queue_manager, QueueManager):
        raise InvalidInputError("--app", f"{path} is a {type(queue_manager).__name__}, not a QueueManager")
    return queue_manager
