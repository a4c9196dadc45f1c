"""APScheduler 4, which is a pre-release, with schedules and jobs in PostgreSQL.

What is said about it here stands in the package that is installed: its README (METADATA) and its docstrings.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from importlib.metadata import version

import asyncpg
from apscheduler import AsyncScheduler, SchedulerRole
from apscheduler.datastores.sqlalchemy import SQLAlchemyDataStore
from apscheduler.eventbrokers.psycopg import PsycopgEventBroker
from apscheduler.triggers.interval import IntervalTrigger
from firing_contract import main
from sqlalchemy.ext.asyncio import create_async_engine

# One schedule is added by the library and the others are copies of its row: adding 10,000 of them one by one takes
# longer than what is measured, and is not measured.
COPY_SCHEDULE = """
INSERT INTO schedules (id, task_id, trigger, args, kwargs, paused, coalesce, misfire_grace_time, max_jitter,
    job_executor, job_result_expiration_time, metadata, last_fire_time, next_fire_time, acquired_by, acquired_until)
SELECT 'schedule-' || number, task_id, trigger, args, kwargs, paused, coalesce, misfire_grace_time, max_jitter,
    job_executor, job_result_expiration_time, metadata, last_fire_time, next_fire_time, acquired_by, acquired_until
FROM schedules, generate_series(2, $1::int) AS number
"""


async def job() -> None:
    """Nothing: no worker runs here, so jobs are made and not run, as our messages are made and not consumed."""


@asynccontextmanager
async def opened(dsn: str) -> AsyncIterator[AsyncScheduler]:
    """Open a scheduler that makes jobs and runs none.

    The data store is the one for PostgreSQL, on asyncpg, and the event broker is PostgreSQL's too: event brokers are
    "needed in scenarios with multiple schedulers" (README), and the default one, LocalEventBroker, is "not suitable for
    multi-node or multiprocess use cases" (its docstring). Of the two for PostgreSQL the one on psycopg measured about
    twice as fast here as the one on asyncpg, or more. Everything else is as it is by default.
    """
    engine = create_async_engine(dsn.replace("postgresql://", "postgresql+asyncpg://", 1))
    store = SQLAlchemyDataStore(engine)
    broker = PsycopgEventBroker(dsn)
    async with AsyncScheduler(store, broker, role=SchedulerRole.scheduler) as scheduler:
        yield scheduler
    await engine.dispose()


class ApschedulerFiring:
    """APScheduler's scheduler, the role without a worker."""

    def version(self) -> str:
        """Return the version of the library."""
        return version("apscheduler")

    async def setup(self, dsn: str) -> None:
        """Let the data store make its tables. The column says when a job's row was written, by the database's clock."""
        async with opened(dsn):
            pass
        connection = await asyncpg.connect(dsn)
        await connection.execute("ALTER TABLE jobs ADD COLUMN fired_at timestamptz DEFAULT clock_timestamp()")
        await connection.close()

    async def prepare(self, dsn: str, schedules: int, due: datetime) -> None:
        """Store schedules of an hour; an interval is the cheapest trigger to compute."""
        connection = await asyncpg.connect(dsn)
        await connection.execute("TRUNCATE schedules, jobs, job_results, tasks")
        async with opened(dsn) as scheduler:
            await scheduler.configure_task("job", func=job)
            await scheduler.add_schedule("job", IntervalTrigger(hours=1, start_time=due), id="schedule-1")
        await connection.execute("VACUUM ANALYZE schedules")
        await connection.execute(COPY_SCHEDULE, schedules)
        await connection.execute("VACUUM ANALYZE schedules")
        await connection.close()

    @asynccontextmanager
    async def running(self, dsn: str, _schedules: int, _due: datetime) -> AsyncIterator[None]:
        """Run it in the background: start_in_background() returns when it has started."""
        async with opened(dsn) as scheduler:
            await scheduler.start_in_background()
            yield
            await scheduler.stop()


if __name__ == "__main__":
    main(ApschedulerFiring())
