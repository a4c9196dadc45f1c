"""Our own contenders: the queue as an application uses it, and the bare SQL that it consists of.

`python -m cron_ticks.cli.bench.contenders NAME COMMAND …`, with the commands of `contract`. The bare SQL sends the same
statements with arguments made beforehand and does nothing with what it gets, one statement at a time.
"""

import asyncio
import io
import itertools
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from typing import Any, ClassVar

import asyncpg

import cron_ticks
from cron_ticks.cli.bench.contract import Consumer, Contender, CountLeft, SendMany, SendOne, Tally, main
from cron_ticks.database import open_database
from cron_ticks.events import DEFAULT_LEVEL
from cron_ticks.ids import new_token_id
from cron_ticks.logs import configure_logs
from cron_ticks.migrator import migrate
from cron_ticks.settings import Settings
from token_queue import Message, QueueManager
from token_queue.queue_sql import COMPLETE_MESSAGES, FETCH_MESSAGES, LOOK

QUEUE = "benchmark"
WORKSPACES = 10
LEASE = timedelta(hours=1)
BATCH = 1000
AWAKE = NO_SUSPECTS = False  # arguments of the statements
NO_LEVELS: tuple[object, ...] = (True, False, [], [], [], [], [], [])
NO_FLOORS: tuple[list[None], ...] = ([None],) * 4

LAST_SENT = "SELECT ARRAY[id] FROM {schema}.queue_messages ORDER BY sequence DESC LIMIT 1"

BARE_INSERT = """
INSERT INTO queue_messages (id, queue_name, payload, process_after, inserted_at)
VALUES ($1, 'benchmark', '{"n": 1}', statement_timestamp(), statement_timestamp())
"""


def workspace(number: int) -> str:
    """Messages are spread over a few workspaces, so that two processes have something to share."""
    return f"ws_{number % WORKSPACES}"


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator["asyncpg.Connection[asyncpg.Record]"]:
    """One connection, set as those of our pool are."""
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute("SET enable_seqscan = off; SET jit = off")
        yield connection
    finally:
        await connection.close()


class OwnTables:
    """What both have in common: the schema, and what is left in it."""

    tuning: ClassVar[dict[str, int]] = {}

    def version(self) -> str:
        """Our version."""
        return cron_ticks.__version__

    async def setup(self, dsn: str) -> None:
        """Migrate."""
        settings = Settings.load(dsn=dsn)
        async with open_database(settings, dsn=dsn) as database:
            await migrate(database)

    async def clear(self, dsn: str) -> None:
        """Remove everything."""
        async with connected(dsn) as connection:
            await connection.execute("TRUNCATE queue_messages, queue_tokens, queue_workers, execution_events")

    async def remove(self, dsn: str, ids: list[Any]) -> None:
        """Remove messages."""
        async with connected(dsn) as connection:
            await connection.execute("DELETE FROM queue_messages WHERE id = ANY($1::text[])", ids)

    @asynccontextmanager
    async def counter(self, dsn: str) -> AsyncIterator[CountLeft]:
        """Count unfinished messages."""
        async with connected(dsn) as connection:

            async def count() -> int:
                found = await connection.fetchval(
                    "SELECT count(*) FROM queue_messages WHERE completed_at IS NULL AND dlq_at IS NULL"
                )
                return int(found)

            yield count


class Ours(OwnTables):
    """The product, with its default settings."""

    @asynccontextmanager
    async def senders(self, dsn: str, count: int) -> AsyncIterator[list[SendOne]]:
        """Tasks that share one manager, as in an application."""
        async with QueueManager(dsn) as manager:

            async def send(number: int) -> Sequence[Any]:
                return [(await manager.send(QUEUE, {"n": number}, workspace_id=workspace(number))).id]

            yield [send] * count

    @asynccontextmanager
    async def bulk_sender(self, dsn: str) -> AsyncIterator[SendMany]:
        """Batches."""
        async with QueueManager(dsn) as manager:

            async def send(numbers: list[int]) -> Sequence[Any]:
                payloads = [{"n": number} for number in numbers]
                await manager.send_many(QUEUE, payloads, workspace_id=workspace(numbers[0] // BATCH))
                return [] if len(numbers) > 1 else await manager.database.fetchval(LAST_SENT)

            yield send

    @asynccontextmanager
    async def consumer(self, dsn: str, tally: Tally, _tuning: dict[str, int]) -> AsyncIterator[Consumer]:
        """A worker with one handler."""
        manager = QueueManager(dsn)

        @manager.handler(QUEUE)
        async def handle(_: Message) -> None:
            tally.mark()

        async with manager:
            await manager.database.fetch("ANALYZE {schema}.queue_messages")
            yield Consumer(manager.run, manager.stop)


class BareSql(OwnTables):
    """The statements alone."""

    @asynccontextmanager
    async def senders(self, dsn: str, count: int) -> AsyncIterator[list[SendOne]]:
        """A single-row insert with commit, prepared, on a connection each."""
        async with AsyncExitStack() as stack:
            connections = [await stack.enter_async_context(connected(dsn)) for _ in range(count)]
            statements = [await connection.prepare(BARE_INSERT) for connection in connections]
            ids = map(str, itertools.count(int(asyncio.get_running_loop().time() * 1e6)))

            def sender(statement: "asyncpg.prepared_stmt.PreparedStatement[asyncpg.Record]") -> SendOne:
                async def send(_number: int) -> Sequence[Any]:
                    message_id = next(ids)
                    await statement.fetch(message_id)
                    return [message_id]

                return send

            yield [sender(statement) for statement in statements]

    @asynccontextmanager
    async def bulk_sender(self, dsn: str) -> AsyncIterator[SendMany]:
        """COPY of rows that are texts already."""
        async with connected(dsn) as connection:
            ids = map(str, itertools.count(int(asyncio.get_running_loop().time() * 1e6)))

            async def send(numbers: list[int]) -> Sequence[Any]:
                chosen = list(itertools.islice(ids, len(numbers)))
                rest = f'\t{QUEUE}\t{workspace(numbers[0] // BATCH)}\t{{"n":1}}\n'
                rows = "".join([message_id + rest for message_id in chosen])
                await connection.copy_to_table(
                    "queue_messages",
                    source=io.BytesIO(rows.encode()),
                    columns=["id", "queue_name", "workspace_id", "payload"],
                    format="text",
                )
                return chosen

            yield send

    @asynccontextmanager
    async def consumer(self, dsn: str, tally: Tally, _tuning: dict[str, int]) -> AsyncIterator[Consumer]:
        """Fetch and complete, batch after batch, pair after pair."""
        async with connected(dsn) as connection:
            await connection.execute("ANALYZE queue_messages")
            stopped = asyncio.Event()
            look, fetch, complete = [
                await connection.prepare(statement.at(DEFAULT_LEVEL).replace("{schema}", "public"))
                for statement in (LOOK, FETCH_MESSAGES, COMPLETE_MESSAGES)
            ]
            worker = new_token_id()

            async def run() -> None:
                while not stopped.is_set():
                    rows = await look.fetch(
                        None, worker, AWAKE, [QUEUE], [1], [1], [], [], [new_token_id()], LEASE, AWAKE, [], *NO_LEVELS
                    )
                    if rows[0]["id"] is None:
                        await asyncio.sleep(0.001)
                        continue
                    await drain(rows[0]["id"])

            async def drain(token: str) -> None:
                while True:
                    rows = await fetch.fetch(None, [token], [BATCH], [], [True], [False], NO_SUSPECTS, *NO_FLOORS)
                    ids = [row["id"] for row in rows if row["id"] is not None]
                    release = [token] if len(ids) < BATCH else []
                    await complete.fetch(None, ids, [token], release)
                    for _ in ids:
                        tally.mark()
                    if release:
                        return

            yield Consumer(run, stopped.set)


CONTENDERS: dict[str, Callable[[], Contender]] = {"cron_ticks": Ours, "bare SQL": BareSql}

if __name__ == "__main__":
    configure_logs("warning", "json")
    name = sys.argv.pop(1)
    if name not in CONTENDERS:
        raise SystemExit(f"no contender {json.dumps(name)}: {', '.join(CONTENDERS)}")
    main(CONTENDERS[name]())
