"""PgQueuer's scheduler.

"The guide" is docs/guides/scheduling.md, "tuning" is docs/guides/performance-tuning.md, both in PgQueuer's repository.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from importlib.metadata import version

import asyncpg
from firing_contract import in_background, main
from pgqueuer.adapters.drivers.asyncpg import AsyncpgPoolDriver
from pgqueuer.models import Schedule
from pgqueuer.queries import Queries
from pgqueuer.sm import SchedulerManager

# The scheduler computes the times of all schedules before it sleeps; this is long enough for it to begin.
START_SECONDS = 2
# Each schedule that is due runs as a task of its own. With a pool they need not wait for each other's round trips; on a
# machine with other work, this and one connection for everything could not be told apart.
CONNECTIONS = 10


class PgQueuerFiring:
    """A scheduler on a connection of its own, whose schedules enqueue a job each."""

    def version(self) -> str:
        """Return the version of the library."""
        return version("pgqueuer")

    async def setup(self, dsn: str) -> None:
        """Install the schema as `pgq install` and `pgq autovac` do: durable, and the first item of tuning's list."""
        connection = await asyncpg.connect(dsn)
        queries = Queries.from_asyncpg_connection(connection)
        await queries.install()
        await queries.optimize_autovacuum()
        await connection.close()

    async def prepare(self, dsn: str, _schedules: int, _due: datetime) -> None:
        """Empty the tables. Each scheduler stores the schedules of its code when it starts."""
        connection = await asyncpg.connect(dsn)
        queries = Queries.from_asyncpg_connection(connection)
        await queries.clear_queue()
        await queries.clear_queue_log()
        await queries.clear_statistics_log()
        await queries.clear_schedule()
        await connection.close()

    @asynccontextmanager
    async def running(self, dsn: str, schedules: int, due: datetime) -> AsyncIterator[None]:
        """Run a scheduler, without the queue's part beside it: no job is run.

        An expression has five fields (the guide), so it is due at a full minute.
        """
        async with asyncpg.create_pool(dsn, min_size=CONNECTIONS, max_size=CONNECTIONS) as pool:
            sending = Queries(AsyncpgPoolDriver(pool))
            connection = await asyncpg.connect(dsn)  # "always use a direct connection" (tuning)
            manager = SchedulerManager(Queries.from_asyncpg_connection(connection))

            async def fire(schedule: Schedule) -> None:
                await sending.enqueue("benchmark", schedule.entrypoint.encode())

            for number in range(schedules):
                manager.schedule(f"schedule-{number}", f"{due.minute} {due.hour} * * *")(fire)
            async with in_background(asyncio.create_task(manager.run()), START_SECONDS):
                yield


if __name__ == "__main__":
    main(PgQueuerFiring())
