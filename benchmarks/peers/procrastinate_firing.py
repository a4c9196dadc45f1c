"""Procrastinate's periodic tasks.

"How-to" is docs/howto/ in Procrastinate's repository; periodic tasks are in its "Launch a task periodically".
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from importlib.metadata import version

import psycopg
from firing_contract import in_background, main
from procrastinate import App, PsycopgConnector
from psycopg_pool import AsyncConnectionPool

TABLES = "procrastinate_jobs, procrastinate_events, procrastinate_periodic_defers, procrastinate_workers"
# LISTEN, the deferrer, the heartbeat and the look for jobs.
CONNECTIONS = 4
# The deferrer computes the times of all schedules before it sleeps, without giving way to anything else.
START_SECONDS = 2


async def commit_each_statement(connection: psycopg.AsyncConnection) -> None:
    """Turn autocommit on: every call of Procrastinate is one statement, so BEGIN and COMMIT are only round trips."""
    await connection.set_autocommit(True)


@asynccontextmanager
async def opened(dsn: str) -> AsyncIterator[App]:
    """Open an app on a pool of our own: the one Procrastinate makes checks the connection before each use."""
    pool = AsyncConnectionPool(
        dsn,
        kwargs={},
        min_size=CONNECTIONS,
        max_size=CONNECTIONS,
        configure=commit_each_statement,
        open=False,
    )
    async with pool:
        await pool.wait()
        app = App(connector=PsycopgConnector())
        async with app.open_async(pool):
            yield app


class ProcrastinateFiring:
    """A worker with periodic tasks and no job of its own to run."""

    def version(self) -> str:
        """Return the version of the library."""
        return version("procrastinate")

    async def setup(self, dsn: str) -> None:
        """Install the schema as `procrastinate schema --apply` does."""
        async with opened(dsn) as app:
            await app.schema_manager.apply_schema_async()

    async def prepare(self, dsn: str, _schedules: int, _due: datetime) -> None:
        """Empty the tables. The schedules themselves are in the code of each worker."""
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            await connection.execute(f"TRUNCATE {TABLES}")

    @asynccontextmanager
    async def running(self, dsn: str, schedules: int, due: datetime) -> AsyncIterator[None]:
        """Run a worker that defers and runs nothing, because it serves another queue.

        Many schedules of one task have a `periodic_id` each (how-to), and the sixth column of the expression is the
        second (how-to). Once a day, so that nothing is made up for when the worker starts: that reaches back for ten
        minutes. Several workers defer each task once (how-to); they all try.
        """
        async with opened(dsn) as app:

            @app.task(name="benchmark", queue="benchmark")
            async def benchmark(timestamp: int, n: int) -> None:
                pass

            cron = f"{due.minute} {due.hour} * * * {due.second}"
            for number in range(schedules):
                app.periodic(cron=cron, periodic_id=str(number), task_kwargs={"n": number})(benchmark)
            worker = app.run_worker_async(queues=["another"], install_signal_handlers=False)
            async with in_background(asyncio.create_task(worker), START_SECONDS):
                yield


if __name__ == "__main__":
    main(ProcrastinateFiring())
