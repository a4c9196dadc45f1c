"""`cron-ticks up`: the whole product on one machine, with as many worker processes as asked for."""

import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import IO

import anyio
import structlog
from anyio.abc import Process
from rich.console import Console
from rich.live import Live

from cron_ticks.cli.example import declare_examples
from cron_ticks.cli.report import Report, database_clock, read_report, report_table
from cron_ticks.database import PASSING_ERRORS, Database
from cron_ticks.embedded import EmbeddedKeeper
from cron_ticks.loops import ServiceGroup, backoff_seconds, watch_stop_signals
from cron_ticks.settings import PREFIX
from token_queue import QueueManager

log = structlog.get_logger("cron_ticks.up")

EXAMPLE_APP = "cron_ticks.cli.example:example_app"
RESTART_SECONDS = 1.0
SHORTEST_REFRESH_SECONDS = 0.5
FINAL_REPORT_TRIES = 12


@dataclass(frozen=True)
class UpOptions:
    """What `up` was asked for."""

    workers: int
    seconds: float | None
    app: str
    environment: Mapping[str, str]
    metrics_port: int | None = None  # of the first worker
    declare: Callable[[], Awaitable[None]] | None = None  # what there is to schedule, before workers start


class WorkerProcess:
    """Keeps one worker process running: a pass is its life."""

    def __init__(self, number: int, options: UpOptions, grace: float, log_file: IO[str] | None) -> None:
        self.name = f"worker-{number}"
        self._environment = dict(options.environment)
        if options.metrics_port:  # each worker has a port of its own
            self._environment[f"{PREFIX}METRICS_PORT"] = str(options.metrics_port + number - 1)
        self._options = options
        self._grace = grace
        self._log_file = log_file

    async def run_once(self) -> float:
        """Start the process and wait for its end; it ends when we do, because its standard input closes."""
        command = [
            sys.executable,
            "-m",
            "cron_ticks.cli",
            "worker",
            "--app",
            self._options.app,
            "--while-stdin",
        ]
        process = await anyio.open_process(
            command,
            stdin=subprocess.PIPE,
            stdout=sys.stderr,
            stderr=self._log_file or sys.stderr,
            env=self._environment,
            start_new_session=True,
        )
        try:
            code = await process.wait()
        finally:
            await self._end(process)
        log.warning("worker_exited", worker=self.name, exit_code=code, restart_in_seconds=RESTART_SECONDS)
        return RESTART_SECONDS

    async def _end(self, process: Process) -> None:
        with anyio.move_on_after(self._grace + 5, shield=True):
            if process.returncode is None:
                process.terminate()
            await process.wait()
        if process.returncode is None:
            process.kill()
        with anyio.CancelScope(shield=True):
            await process.aclose()


async def run_up(
    queue_manager: QueueManager, options: UpOptions, console: Console, worker_log: IO[str] | None
) -> Report:
    """Run workers until the time is over or a signal comes; the report is read after they have stopped."""
    async with anyio.create_task_group() as support_tasks:
        if queue_manager.embedded is not None:
            ServiceGroup(support_tasks).start(EmbeddedKeeper(queue_manager.embedded))
        report = await _run_workers(queue_manager, options, console, worker_log)
        support_tasks.cancel_scope.cancel()
    return report


async def _run_workers(
    queue_manager: QueueManager, options: UpOptions, console: Console, worker_log: IO[str] | None
) -> Report:
    database = queue_manager.database
    since = await database_clock(database)
    if options.declare is not None:
        await options.declare()
    elif options.app == EXAMPLE_APP and not await queue_manager.list_schedules(limit=1):
        await declare_examples(queue_manager)
    async with anyio.create_task_group() as tasks:
        services = ServiceGroup(tasks)
        for number in range(1, options.workers + 1):
            services.start(WorkerProcess(number, options, queue_manager.settings.stop_grace_seconds, worker_log))
        if worker_log is not None:
            tasks.start_soon(_show, database, since, console)
        stop_requested = anyio.Event()
        await tasks.start(watch_stop_signals, stop_requested.set)
        with anyio.move_on_after(options.seconds):
            await stop_requested.wait()
        tasks.cancel_scope.cancel()
    return await _final_report(database, since)


async def _show(database: Database, since: datetime, console: Console) -> None:
    """Redraw the table; the longer the report takes, the less often."""
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            begun = anyio.current_time()
            try:
                live.update(report_table(await read_report(database, since), width=console.width), refresh=True)
            except PASSING_ERRORS as error:
                live.update(f"the database is away ({error}); workers go on when it is back", refresh=True)
            await anyio.sleep(max(SHORTEST_REFRESH_SECONDS, 10 * (anyio.current_time() - begun)))


async def _final_report(database: Database, since: datetime) -> Report:
    """The server may have been away at the end: it gets some tries."""
    for attempt in range(1, FINAL_REPORT_TRIES):
        try:
            return await read_report(database, since)
        except PASSING_ERRORS:
            await anyio.sleep(backoff_seconds(attempt))
    return await read_report(database, since)
