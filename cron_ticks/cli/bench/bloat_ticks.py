"""The ticks' half of `bench bloat`: workers that fire slice after slice of due ticks."""

import json
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import anyio
import asyncpg
from anyio.streams.buffered import BufferedByteReceiveStream

from cron_ticks.cli.bench.bloat_figures import Drain
from cron_ticks.cli.bench.bloat_snapshot import dead_rows, held_snapshot
from cron_ticks.cli.bench.fire_processes import CHANNEL
from cron_ticks.cli.bench.fire_tables import Tables
from cron_ticks.cli.bench.machine import LONGEST_LINE, environment_with, started
from cron_ticks.errors import CronTicksError
from cron_ticks.ids import new_ulid
from cron_ticks.listener import NOTIFY, TICKS_NOTICE
from cron_ticks.settings import PREFIX

APP = "cron_ticks.cli.bench.fire_processes:worker"
PATIENCE_SECONDS = 120.0  # for a slice
LAST_LINES = 20
EVERY = timedelta(days=1)  # so that the schedules themselves are quiet
DUE_SINCE = timedelta(milliseconds=100)  # as when a manager is a little late: what is committed later lies below floors

# A tick of each schedule, due a moment ago, each slice at another time.
MAKE_TICKS = """
INSERT INTO cron_ticks (id, schedule_id, schedule_name, workspace_id, queue_name, payload, scheduled_for, execute_at,
    due_at, created_at, version, priority)
SELECT 'tick_' || $1::text || upper(left(md5(random()::text), 16)), id, name, workspace_id, queue_name, payload,
    moment, moment, moment, $2, version, priority
FROM (
    SELECT *, $2::timestamptz + row_number() OVER (ORDER BY anchor_at) * interval '1 microsecond' AS moment
    FROM cron_schedules
) AS schedule
"""

# As in `bench fire`: a run says when its statement began, so the last batch is left out.
FIRED = """
SELECT count(*) AS runs, count(*) FILTER (WHERE ended_at < last) AS counted, last
FROM cron_runs, (SELECT max(ended_at) AS last FROM cron_runs WHERE ended_at >= $1) AS ended
WHERE ended_at >= $1 AND outcome = 'enqueued'
GROUP BY last
"""

TOTALS = """
SELECT (SELECT count(*) FROM cron_ticks) AS ticks, (SELECT count(*) FROM cron_runs) AS runs,
    count(*) AS messages, count(DISTINCT (schedule_id, scheduled_for)) AS distinct_messages
FROM queue_messages
"""


@dataclass
class Workers:
    """Processes that fire, and how many ticks they have said to have fired."""

    fired: int = 0
    ready: int = 0
    _news: anyio.Event = field(default_factory=anyio.Event)
    _last: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))

    async def listen(self, stream: Any) -> None:
        """Read what one says, for ever: or the pipe would fill up."""
        lines = BufferedByteReceiveStream(stream)
        while True:
            try:
                line = (await lines.receive_until(b"\n", LONGEST_LINE)).decode(errors="replace")
            except (anyio.IncompleteRead, anyio.EndOfStream):
                words = "\n".join(self._last)
                raise CronTicksError(f"a process ended too early; its last words:\n{words}") from None
            self._note(line)

    def _note(self, line: str) -> None:
        self._last.append(line)
        event: dict[str, Any] = json.loads(line) if line.startswith("{") else {"event": None}
        self.fired += event["ticks"] if event["event"] == "ticks_fired" else 0
        self.ready += event["event"] == "notify_heard"
        self._news.set()
        self._news = anyio.Event()

    async def until(self, *, fired: int = 0, ready: int = 0) -> None:
        """Wait until so many are fired, or so many processes stand."""
        try:
            with anyio.fail_after(PATIENCE_SECONDS):
                while self.fired < fired or self.ready < ready:
                    await self._news.wait()
        except TimeoutError:
            raise CronTicksError(f"{self.fired} of {fired} ticks fired: no more in {PATIENCE_SECONDS:.0f} s") from None


async def fire_in_slices(dsn: str, count: int, processes: int, slices: int, *, held: bool) -> Drain:
    """Each slice is committed together with the NOTIFY that it is due; then the processes fire it.

    As many have been fired and vacuumed before it begins: tables that grow from nothing lose speed by that alone.
    """
    connection = await asyncpg.connect(dsn)
    size = count // slices
    try:
        tables = Tables(connection)
        await tables.clear()
        await tables.make_schedules(size, every=EVERY, start=await tables.now(), spread=DUE_SINCE, made=1)
        async with AsyncExitStack() as snapshot:
            async with _workers(dsn, processes) as workers:
                await _fire_slices(connection, workers, size, slices)
                await connection.execute("VACUUM (ANALYZE)")
                await snapshot.enter_async_context(held_snapshot(dsn, held=held))
                rates = await _fire_slices(connection, workers, size, slices)
            await _check(connection, 2 * size * slices)
            return Drain(size * slices, rates, await dead_rows(connection))
    finally:
        await connection.close()


async def _fire_slices(
    connection: "asyncpg.Connection[asyncpg.Record]", workers: Workers, size: int, slices: int
) -> list[float]:
    """The rate of each."""
    return [await _fire(connection, workers, workers.fired + size) for _ in range(slices)]


async def _fire(connection: "asyncpg.Connection[asyncpg.Record]", workers: Workers, fired: int) -> float:
    """Ticks a second from the commit to the beginning of the last batch."""
    async with connection.transaction():
        due_at = await connection.fetchval("SELECT statement_timestamp() - $1::interval", DUE_SINCE)
        await connection.execute(MAKE_TICKS, new_ulid()[:10], due_at)
        await connection.fetch(NOTIFY, CHANNEL, TICKS_NOTICE)
        start: datetime = await connection.fetchval("SELECT statement_timestamp()")
    await workers.until(fired=fired)
    row = await connection.fetchrow(FIRED, start)
    if row is None or not row["counted"]:
        raise CronTicksError(f"a slice was fired in one batch: give a larger --count ({row})")
    return float(row["counted"] / (row["last"] - start).total_seconds())


@asynccontextmanager
async def _workers(dsn: str, processes: int) -> AsyncIterator[Workers]:
    """They stand and hear NOTIFY; they are asked to end by the end of their input."""
    command = [sys.executable, "-m", "cron_ticks.cli", "worker", "--app", APP, "--while-stdin"]
    environment = environment_with({f"{PREFIX}DSN": dsn, f"{PREFIX}LOG_FORMAT": "json"})
    workers = Workers()
    try:
        async with AsyncExitStack() as stack:
            running = [
                await stack.enter_async_context(started(command, environment, stderr=subprocess.PIPE))
                for _ in range(processes)
            ]
            async with anyio.create_task_group() as tasks:
                for process in running:
                    tasks.start_soon(workers.listen, process.stderr)
                await workers.until(ready=processes)
                yield workers
                tasks.cancel_scope.cancel()
            for process in running:
                if process.stdin is not None:
                    await process.stdin.aclose()
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


async def _check(connection: "asyncpg.Connection[asyncpg.Record]", count: int) -> None:
    row = await connection.fetchrow(TOTALS)
    if row is None or tuple(row) != (0, count, count, count):
        raise CronTicksError(f"of {count} ticks not each became one message: {row}")
