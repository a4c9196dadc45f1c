"""Other schedulers in a burst: schedules fall due at the same instant, and the database says when each fired."""

import json
import subprocess
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import anyio
import asyncpg
from anyio.streams.buffered import BufferedByteReceiveStream

from cron_ticks.cli.bench.bursts import Burst, NotReadyError, burst_of
from cron_ticks.cli.bench.machine import LONGEST_LINE
from cron_ticks.errors import CronTicksError

LONGEST_SECONDS = 60.0  # after the instant, as long as a schedule of a minute has; who isn't done by then is shown so
START_SECONDS = 60.0
LOOK_SECONDS = 2.0  # the rows themselves say when they were made
LAST_LOOK_SECONDS = 1.0  # for what fires twice
LEAD_SECONDS = 8.0
READY_PER_SECOND = 1500  # schedules: so many more seconds a large number gets, to be ready before the instant
STARTED_PER_SECOND = 100  # so many more until it is given up
ATTEMPTS = 3
QUIET = timedelta(seconds=1)
SETTLED_SECONDS = 30  # for what the server still does for a peer whose processes are gone
MINUTE = timedelta(minutes=1)

ROWS = "SELECT count(*) FROM {table}"
FIRED = "SELECT count(DISTINCT schedule) FROM ({fired}) AS firing"

# A statement goes on when its client is killed, and would share the processor with whoever is measured next.
END_SESSIONS = """
SELECT count(pg_terminate_backend(pid, $1::bigint))
FROM pg_stat_activity
WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()
"""


@dataclass(frozen=True)
class Peer:
    """A scheduler: its program, the table where a firing makes a row, and which schedule fired when, from such rows."""

    name: str
    table: str
    fired: str
    script: str | None = None  # None: it lives in the server
    processes: int = 2
    whole_minutes: bool = False


PEERS = (
    Peer("APScheduler", "jobs", "SELECT schedule_id AS schedule, fired_at FROM jobs", "apscheduler_firing.py"),
    Peer(
        "PgQueuer",
        "pgqueuer",
        "SELECT convert_from(payload, 'UTF8') AS schedule, created AS fired_at FROM pgqueuer",
        "pgqueuer_firing.py",
        whole_minutes=True,
    ),
    Peer(
        "Procrastinate",
        "procrastinate_jobs",
        "SELECT args ->> 'n' AS schedule, at AS fired_at "
        "FROM procrastinate_jobs AS job JOIN procrastinate_events AS event ON event.job_id = job.id "
        "WHERE event.type = 'deferred'",
        "procrastinate_firing.py",
    ),
)

PG_CRON = Peer("pg_cron", "fired", "SELECT schedule, fired_at FROM fired", processes=1, whole_minutes=True)

# Jobs of every day at that minute, each of which writes a row.
MAKE_CRON_JOBS = """
SELECT count(cron.schedule('schedule-' || number, $2, format('INSERT INTO fired (schedule) VALUES (%L)', number)))
FROM generate_series(1, $1::int) AS number
"""


def start_seconds(schedules: int) -> float:
    """How long a peer may take to store them, and each process to stand."""
    return START_SECONDS + schedules / STARTED_PER_SECOND


@dataclass(frozen=True)
class PeerCourse:
    """A peer with a database of its own on the common server."""

    peer: Peer
    dsn: str
    connection: "asyncpg.Connection[asyncpg.Record]"
    command: Sequence[str] = ()

    async def setup(self) -> str:
        """Make its tables; its version."""
        return str((await self._ask("setup"))["version"])

    async def burst(self, schedules: int) -> Burst:
        """What came out; NotReadyError if it can't stand with so many schedules, or falls."""
        try:
            return await self._burst(schedules)
        except TimeoutError:
            raise NotReadyError(f"it took more than {start_seconds(schedules):.0f} s to start") from None
        except (CronTicksError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            raise NotReadyError(str(error)) from error

    async def _burst(self, schedules: int) -> Burst:
        """With more time to get ready, if it was not ready at the instant."""
        for attempt in range(ATTEMPTS):
            due = await self._due(timedelta(seconds=(LEAD_SECONDS + schedules / READY_PER_SECOND) * 2**attempt))
            async with self.running(schedules, due):
                if await self._now() < due - QUIET:
                    await self._watch(schedules, due)
                    return await burst_of(self.connection, self.peer.fired, schedules, due)
        raise CronTicksError(f"{schedules:,} schedules never stood before they were due")

    async def _due(self, lead: timedelta) -> datetime:
        """In whole seconds, or minutes."""
        earliest = await self._now() + lead
        if not self.peer.whole_minutes:
            return earliest.replace(microsecond=0)
        whole = earliest.replace(second=0, microsecond=0)
        return whole if whole >= earliest else whole + MINUTE

    async def _now(self) -> datetime:
        instant: datetime = await self.connection.fetchval("SELECT clock_timestamp()")
        return instant

    async def _watch(self, schedules: int, due: datetime) -> None:
        """Until all have fired, or for long enough."""
        await anyio.sleep((due - await self._now()).total_seconds())
        with anyio.move_on_after(LONGEST_SECONDS):
            while not await self._all_fired(schedules):  # noqa: ASYNC110 - nobody tells us when it has
                await anyio.sleep(LOOK_SECONDS)
        await anyio.sleep(LAST_LOOK_SECONDS)

    async def _all_fired(self, schedules: int) -> bool:
        """A cheap count while it goes on; which of them are doubled is asked when there are enough."""
        if await self.connection.fetchval(ROWS.replace("{table}", self.peer.table)) < schedules:
            return False
        return bool(await self.connection.fetchval(FIRED.replace("{fired}", self.peer.fired)) >= schedules)

    @asynccontextmanager
    async def running(self, schedules: int, due: datetime) -> AsyncIterator[None]:
        """Scheduler processes that stand."""
        options = ("--schedules", str(schedules), "--due", due.isoformat())
        longest = start_seconds(schedules)
        try:
            with anyio.fail_after(longest):
                await self._ask("prepare", *options)
            async with AsyncExitStack() as stack:
                for _ in range(self.peer.processes):
                    await stack.enter_async_context(self._process(longest, *options))
                yield
        finally:
            with anyio.CancelScope(shield=True):
                await self.connection.fetch(END_SESSIONS, SETTLED_SECONDS * 1000)

    @asynccontextmanager
    async def _process(self, longest: float, *options: str) -> AsyncIterator[None]:
        """One that has said that it stands."""
        with tempfile.TemporaryFile() as errors:
            process = await anyio.open_process(self._command("run", *options), stderr=errors)
            try:
                output: Any = process.stdout
                with anyio.fail_after(longest):
                    await BufferedByteReceiveStream(output).receive_until(b"ready\n", LONGEST_LINE)
                yield
            except (anyio.IncompleteRead, anyio.EndOfStream):
                errors.seek(0)
                said = errors.read().decode(errors="replace")[-2000:]
                raise CronTicksError(f"it does not start: {said}") from None
            finally:
                process.kill()
                with anyio.CancelScope(shield=True):
                    await process.aclose()

    async def _ask(self, command: str, *options: str) -> dict[str, Any]:
        result = await anyio.run_process(self._command(command, *options), check=False, stderr=subprocess.PIPE)
        if result.returncode != 0:
            raise CronTicksError(f"{command} failed: {result.stderr.decode()[-2000:]}")
        answer: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
        return answer

    def _command(self, command: str, *options: str) -> list[str]:
        return [*self.command, command, "--dsn", self.dsn, *options]


class PgCronCourse(PeerCourse):
    """pg_cron, whose scheduler is a process of the server."""

    async def setup(self) -> str:
        """Make the extension, and the table that the jobs write to."""
        await self.connection.execute("CREATE EXTENSION IF NOT EXISTS pg_cron")
        await self.connection.execute("DROP TABLE IF EXISTS fired")
        await self.connection.execute(
            "CREATE TABLE fired (schedule text NOT NULL, fired_at timestamptz NOT NULL DEFAULT clock_timestamp())"
        )
        return str(await self.connection.fetchval("SELECT extversion FROM pg_extension WHERE extname = 'pg_cron'"))

    @asynccontextmanager
    async def running(self, schedules: int, due: datetime) -> AsyncIterator[None]:
        """Jobs that the server knows; none are left in the end. It reads times in GMT, unless it is set otherwise."""
        await self.connection.execute("TRUNCATE fired, cron.job_run_details")
        try:
            with anyio.fail_after(start_seconds(schedules)):
                await self.connection.fetch(MAKE_CRON_JOBS, schedules, f"{due:%M %H * * *}")
            yield
        finally:
            with anyio.CancelScope(shield=True):
                await self.connection.execute("DELETE FROM cron.job")
                await self._settled()

    async def _settled(self) -> None:
        """Until no job that had begun is left."""
        before = -1
        with anyio.move_on_after(SETTLED_SECONDS):
            while (fired := await self.connection.fetchval(ROWS.replace("{table}", self.peer.table))) != before:
                before = fired
                await anyio.sleep(LOOK_SECONDS)
