"""PgQueuer, measured with the settings that its documentation and its own benchmark tool recommend.

"The guide" below is docs/guides/performance-tuning.md, "the tool" is tools/benchmark.py, both in PgQueuer's repository.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import version
from typing import ClassVar

import asyncpg
from contract import Consumer, CountLeft, SendMany, SendOne, Tally, main
from pgqueuer import PgQueuer
from pgqueuer.models import Job
from pgqueuer.queries import Queries

ENTRYPOINT = "benchmark"
TABLES = "pgqueuer, pgqueuer_log, pgqueuer_statistics"


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    """Open one connection; asyncpg, because PgQueuer measures it at 1.7 times the throughput of psycopg."""
    connection = await asyncpg.connect(dsn)
    try:
        yield connection
    finally:
        await connection.close()


def payload(number: int) -> bytes:
    """Make the payload: PgQueuer takes bytes and leaves the format to its user."""
    return json.dumps({"n": number}).encode()


def single_sender(queries: Queries) -> SendOne:
    """Send one job per call; outside a transaction asyncpg commits each statement by itself."""

    async def send(number: int) -> Sequence[int]:
        return await queries.enqueue(ENTRYPOINT, payload(number))

    return send


async def run_all(apps: list[PgQueuer], batch_size: int) -> None:
    """Run the managers of this process until they are shut down.

    All the rest stays as it is by default: the continuous mode (a worker that waits for more, as in production), the
    heartbeats, the log table, and no max_concurrent_tasks (a limit makes the dequeue query heavier).
    """
    await asyncio.gather(*(app.run(batch_size=batch_size) for app in apps))


class PgQueuerContender:
    """PgQueuer on asyncpg, with durable tables."""

    tuning: ClassVar[dict[str, int]] = {
        # "Increase batch_size when jobs are short-lived" (the guide). It is also how many finished jobs are written to
        # the log at once. 500 measured about three times the default of 10, and 1000 no better.
        "batch-size": 500,
        # The tool runs 5 managers of 10 jobs in its process; one with large batches measured twice that. With large
        # batches 1, 2 and 5 could not be told apart, and one is what an application has.
        "managers": 1,
    }

    def version(self) -> str:
        """Return the version of the library."""
        return version("pgqueuer")

    async def setup(self, dsn: str) -> None:
        """Install the schema as `pgq install` and `pgq autovac` do.

        The durability stays "durable", the default: the faster levels lose jobs or their log in a crash. The autovacuum
        settings are the first item of the guide's checklist.
        """
        async with connected(dsn) as connection:
            queries = Queries.from_asyncpg_connection(connection)
            await queries.install()
            await queries.optimize_autovacuum()

    async def clear(self, dsn: str) -> None:
        """Truncate the queue, its log and its statistics, as the tool does before a run.

        No VACUUM: a truncated table has nothing to clean, and VACUUM would record that it is empty (see contract.py).
        """
        async with connected(dsn) as connection:
            queries = Queries.from_asyncpg_connection(connection)
            await queries.clear_queue()
            await queries.clear_queue_log()
            await queries.clear_statistics_log()

    async def remove(self, dsn: str, ids: list[int]) -> None:
        """Delete jobs from the queue."""
        async with connected(dsn) as connection:
            await connection.execute("DELETE FROM pgqueuer WHERE id = ANY($1::bigint[])", ids)

    @asynccontextmanager
    async def senders(self, dsn: str, count: int) -> AsyncIterator[list[SendOne]]:
        """Open a connection for each sender, as the tool does: a pool would only add an acquire to each send."""
        async with AsyncExitStack() as stack:
            connections = [await stack.enter_async_context(connected(dsn)) for _ in range(count)]
            yield [single_sender(Queries.from_asyncpg_connection(connection)) for connection in connections]

    @asynccontextmanager
    async def bulk_sender(self, dsn: str) -> AsyncIterator[SendMany]:
        """Send batches with lists, which PgQueuer inserts with one statement."""
        async with connected(dsn) as connection:
            queries = Queries.from_asyncpg_connection(connection)

            async def send(numbers: list[int]) -> Sequence[int]:
                size = len(numbers)
                return await queries.enqueue([ENTRYPOINT] * size, [payload(number) for number in numbers], [0] * size)

            yield send

    @asynccontextmanager
    async def consumer(self, dsn: str, tally: Tally, tuning: dict[str, int]) -> AsyncIterator[Consumer]:
        """Connect the managers, each on a connection of its own: "always use a direct connection" (the guide)."""

        async def handle(_job: Job) -> None:
            tally.mark()

        async with AsyncExitStack() as stack:
            connections = [await stack.enter_async_context(connected(dsn)) for _ in range(tuning["managers"])]
            # The jobs were sent a moment ago and the planner may not know: a queue that runs for longer than a
            # benchmark has its statistics from autovacuum.
            await connections[0].execute(f"ANALYZE {TABLES}")
            apps = [PgQueuer.from_asyncpg_connection(connection) for connection in connections]
            for app in apps:
                app.entrypoint(ENTRYPOINT)(handle)

            def stop() -> None:
                for app in apps:
                    app.shutdown.set()

            yield Consumer(lambda: run_all(apps, tuning["batch-size"]), stop)

    @asynccontextmanager
    async def counter(self, dsn: str) -> AsyncIterator[CountLeft]:
        """Count the queue table: a finished job leaves it for the log."""
        async with connected(dsn) as connection:

            async def count() -> int:
                return int(await connection.fetchval("SELECT count(*) FROM pgqueuer"))

            yield count


if __name__ == "__main__":
    main(PgQueuerContender())
