"""Procrastinate, measured with the settings its documentation recommends for many short jobs.

"Discussions" and "how-to" below are docs/discussions.md and docs/howto/ in Procrastinate's repository.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any, ClassVar

import psycopg
from contract import Consumer, CountLeft, SendMany, SendOne, Tally, main
from procrastinate import App, PsycopgConnector
from procrastinate.tasks import Task
from procrastinate.types import JSONDict
from psycopg_pool import AsyncConnectionPool

TABLES = "procrastinate_jobs, procrastinate_events, procrastinate_periodic_defers, procrastinate_workers"


async def commit_each_statement(connection: psycopg.AsyncConnection) -> None:
    """Turn autocommit on: every call of Procrastinate is one statement, so BEGIN and COMMIT are only round trips.

    It is set here and not in the pool's `kwargs`, because Procrastinate gives autocommit a second time when it opens
    its connection for LISTEN, and that is an error.
    """
    await connection.set_autocommit(True)


@asynccontextmanager
async def opened(dsn: str, connections: int) -> AsyncIterator[App]:
    """Open an app on a pool of so many connections.

    PsycopgConnector is the async connector of the how-to and of the current psycopg; the only other one, on aiopg, is
    for old code. The pool is our own, given to `open_async`, because the one Procrastinate makes checks the connection
    with a query of its own before each use.
    """
    pool = AsyncConnectionPool(
        dsn,
        kwargs={},
        min_size=connections,
        max_size=connections,
        configure=commit_each_statement,
        open=False,
    )
    async with pool:
        await pool.wait()
        app = App(connector=PsycopgConnector())
        async with app.open_async(pool):
            yield app


def add_task(app: App, tally: Tally) -> Task[..., Any, ...]:
    """Register the job's function under a name that does not depend on how this script is called."""

    @app.task(name="benchmark")
    async def benchmark(n: int) -> None:  # noqa: ARG001 - the name is the payload's key
        tally.mark()

    return benchmark


async def ended(workers: list[asyncio.Task[None]]) -> None:
    """Wait for the workers; cancelling one is the documented way to stop it, and it ends its jobs first."""
    for outcome in await asyncio.gather(*workers, return_exceptions=True):
        if outcome is not None and not isinstance(outcome, asyncio.CancelledError):
            raise outcome


class ProcrastinateContender:
    """Procrastinate on psycopg 3, with its C speed-ups (the `binary` extra)."""

    tuning: ClassVar[dict[str, int]] = {
        # How many jobs a worker runs at once. It fetches one job at a time and only ends them side by side, so for an
        # empty job two are enough: 1 measured half of that, and 4, 10 and 30 (the how-to's example) no better.
        "concurrency": 2,
        # One worker to a process is what the how-to shows; 2 or 4 of them in one process showed no clear gain.
        "workers": 1,
    }

    def version(self) -> str:
        """Return the version of the library."""
        return version("procrastinate")

    async def setup(self, dsn: str) -> None:
        """Install the schema as `procrastinate schema --apply` does."""
        async with opened(dsn, 1) as app:
            await app.schema_manager.apply_schema_async()

    async def clear(self, dsn: str) -> None:
        """Truncate every table; they refer to each other, so all at once.

        No VACUUM: a truncated table has nothing to clean, and VACUUM would record that it is empty (see contract.py).
        """
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            await connection.execute(f"TRUNCATE {TABLES}")

    async def remove(self, dsn: str, ids: list[int]) -> None:
        """Delete jobs; their events go with them."""
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            await connection.execute("DELETE FROM procrastinate_jobs WHERE id = ANY(%s)", [ids])

    @asynccontextmanager
    async def senders(self, dsn: str, count: int) -> AsyncIterator[list[SendOne]]:
        """Open a pool with a connection for each sender: `defer_async` always takes one from the app's pool."""
        async with opened(dsn, count) as app:
            task = add_task(app, Tally())

            async def send(number: int) -> list[int]:
                return [await task.defer_async(n=number)]

            yield [send] * count

    @asynccontextmanager
    async def bulk_sender(self, dsn: str) -> AsyncIterator[SendMany]:
        """Send batches with `batch_defer_async`, which is one statement."""
        async with opened(dsn, 1) as app:
            task = add_task(app, Tally())

            async def send(numbers: list[int]) -> list[int]:
                jobs: list[JSONDict] = [{"n": number} for number in numbers]
                return await task.batch_defer_async(*jobs)

            yield send

    @asynccontextmanager
    async def consumer(self, dsn: str, tally: Tally, tuning: dict[str, int]) -> AsyncIterator[Consumer]:
        """Open an app for the workers.

        The pool has a connection per job that runs and one more, as Discussions says for short jobs. The rest of the
        worker's options stay as they are by default: finished jobs are kept (delete_jobs="never"), LISTEN is on, and
        the polling interval does not matter while there are jobs. Only the signal handlers are off, as the how-to says
        for a worker inside a bigger program.
        """
        async with opened(dsn, tuning["workers"] * tuning["concurrency"] + 1) as app:
            add_task(app, tally)
            # The jobs were sent a moment ago and the planner may not know: with statistics of an empty table this
            # consumed at a third of its speed. A queue that runs for longer than a benchmark has them from autovacuum.
            await app.connector.execute_query_async(f"ANALYZE {TABLES}")
            workers: list[asyncio.Task[None]] = []

            async def run() -> None:
                for _ in range(tuning["workers"]):
                    worker = app.run_worker_async(concurrency=tuning["concurrency"], install_signal_handlers=False)
                    workers.append(asyncio.create_task(worker))
                await ended(workers)

            def stop() -> None:
                for worker in workers:
                    worker.cancel()

            yield Consumer(run, stop)

    @asynccontextmanager
    async def counter(self, dsn: str) -> AsyncIterator[CountLeft]:
        """Count the jobs that wait or run; finished ones stay in the table with another status."""
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:

            async def count() -> int:
                cursor = await connection.execute(
                    "SELECT count(*) FROM procrastinate_jobs WHERE status IN ('todo', 'doing')"
                )
                row = await cursor.fetchone()
                return int(row[0]) if row else 0

            yield count


if __name__ == "__main__":
    main(ProcrastinateContender())
