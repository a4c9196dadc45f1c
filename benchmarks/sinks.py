"""How fast due ticks go into each kind of sink: `python benchmarks/sinks.py [--ticks N] [--rounds N] [--json]`.

On an embedded server of its own, gone afterwards. In each round every kind of sink drains as many due ticks, one kind
after the other: by the service that a worker runs, and by its bare statements without anything around them.
"""

import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import anyio
import typer

from cron_ticks import FunctionSink, LeasedTick, TableSink
from cron_ticks.cli.common import Json, load_settings, run
from cron_ticks.database import Database, open_database
from cron_ticks.embedded import embedded_server, use_embedded
from cron_ticks.firing import CATCHING_UP, DUE_NOW, TickFirer
from cron_ticks.lease_sql import END_TICKS, LEASE_DUE_TICKS
from cron_ticks.logs import configure_logs
from cron_ticks.loops import Pause
from cron_ticks.migrator import migrate
from cron_ticks.publishing import Publisher
from cron_ticks.repository import CronRepository
from cron_ticks.settings import Settings
from cron_ticks.sinks import OutsideSink, SameDatabaseSink, Sinks
from cron_ticks.tick_repository import firing_statement
from token_queue.queue_repository import QUEUE_SINK

BATCH = 500  # as the ticker's, also for the outside sink, so that rows of the table can be compared
CALLS = 4
MISSED_AFTER = timedelta(seconds=Settings.model_fields["missed_after_seconds"].default)

TABLES = """
CREATE TABLE jobs (id text PRIMARY KEY, kind text NOT NULL, body jsonb NOT NULL, run_at timestamptz NOT NULL);
CREATE FUNCTION enqueue(message_id text, kind text, body jsonb) RETURNS void LANGUAGE sql
    AS $$ INSERT INTO jobs VALUES (message_id, kind, body, now()) $$;
"""

# Each of a schedule of its own, as in `bench fire`.
FILL = """
INSERT INTO cron_ticks (id, schedule_id, schedule_name, queue_name, payload, scheduled_for, execute_at, due_at,
    created_at, sink, delivery, overlap)
SELECT 'tick_' || gen_random_uuid(), 'cron_' || number, 'schedule ' || number, 'queue', '{"number": 1}', due, due, due,
    due, $2, $3, $4
FROM generate_series(1, $1::int) AS number,
    LATERAL (SELECT statement_timestamp() - number * interval '1 microsecond' AS due) AS moment
"""
EMPTY = "TRUNCATE cron_ticks, cron_runs, queue_messages, jobs"
LEFT = "SELECT count(*) FROM cron_ticks"

Ticks = Annotated[int, typer.Option(help="Due ticks per drain.", min=100)]
Rounds = Annotated[int, typer.Option(help="Rounds.", min=1)]
Drain = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class Kind:
    """A kind of sink: what its ticks are like, and the two ways to drain them."""

    name: str
    sink: str
    delivery: str
    overlap: str
    product: Drain
    bare: Drain


async def nothing_late(_sink: str, _floors: object) -> None:
    """All ticks here have just become due."""


async def accept(_ticks: Sequence[LeasedTick]) -> None:
    """An outside sink that costs nothing."""


def firing(name: str, cron: CronRepository, sink: SameDatabaseSink, settings: Settings, overlap: str = "allow") -> Kind:
    """A sink in the database."""
    database = cron.database

    async def product() -> None:
        firer = TickFirer(cron, sink, settings, ticker_id="ticker_bench", pause=Pause(), catch_up=nothing_late)
        while await database.fetchval(LEFT):
            await firer.run_once()

    async def bare() -> None:
        arguments = ("ticker_bench", BATCH, None, None, sink.name, DUE_NOW, MISSED_AFTER, [None] * 4)
        statement = firing_statement(sink)
        while sum(len(row[-1]) for row in await database.fetch(statement, *arguments)) == BATCH:  # a value per tick
            pass

    return Kind(name, sink.name, "exactly_once", overlap, product, bare)


def publishing(cron: CronRepository, settings: Settings) -> Kind:
    """One outside it."""
    database = cron.database
    lease = timedelta(seconds=settings.lease_seconds)

    async def product() -> None:
        pause = Pause()
        sink = OutsideSink("outside", accept, BATCH, CALLS)
        async with anyio.create_task_group() as tasks:
            publisher = Publisher(
                cron, sink, settings, ticker_id="ticker_bench", tasks=tasks, pause=pause, catch_up=nothing_late
            )
            while await database.fetchval(LEFT):
                await pause.sleep(await publisher.run_once())

    async def bare() -> None:
        arguments = ("ticker_bench", BATCH, None, lease, "outside", 3, timedelta(days=1), CATCHING_UP, MISSED_AFTER)
        while True:
            leased = await database.fetch(LEASE_DUE_TICKS, *arguments)
            ids = [row["id"] for row in leased if row["id"] is not None]
            await database.fetch(END_TICKS, "ticker_bench", ids, None)
            if len(ids) < BATCH:
                return

    return Kind("outside", "outside", "at_least_once", "allow", product, bare)


async def seconds(database: Database, kind: Kind, drain: Drain, ticks: int) -> float:
    """How long it takes to drain so many; none may be left."""
    async with database.connection() as connection:
        await connection.execute(EMPTY)
        await connection.execute(FILL, ticks, kind.sink, kind.delivery, kind.overlap)
        await connection.execute("ANALYZE cron_ticks")
        await connection.execute("CHECKPOINT")
    begun = time.perf_counter()
    await drain()
    took = time.perf_counter() - begun
    ended = await database.fetchval("SELECT count(*) FROM cron_runs WHERE outcome = 'enqueued'")
    if ended != ticks or await database.fetchval(LEFT):
        raise AssertionError(f"{kind.name}: {ended} of {ticks} ticks have ended")
    return took


async def kinds_of(database: Database, settings: Settings) -> list[Kind]:
    """All there are."""
    cron = CronRepository(database, settings)
    sinks = Sinks(settings)
    columns = {"id": "message_id", "kind": "queue_name", "body": "payload", "run_at": "scheduled_for"}
    arguments = {"message_id": "message_id", "kind": "queue_name", "body": "payload"}
    sinks.add("table", TableSink("jobs", columns))
    sinks.add("function", FunctionSink("enqueue", arguments))
    table, function = await sinks.prepare(database)
    return [
        firing("own queue", cron, QUEUE_SINK, settings),
        firing("own queue, overlap=skip", cron, QUEUE_SINK, settings, "skip"),
        firing("a table", cron, table, settings),
        firing("a function", cron, function, settings),
        publishing(cron, settings),
    ]


@asynccontextmanager
async def fresh_server(settings: Settings) -> AsyncIterator[tuple[Database, Settings]]:
    """An embedded server for this run alone."""
    with tempfile.TemporaryDirectory() as folder:
        own = settings.model_copy(update={"embedded_data_dir": Path(folder) / "data", "dsn": None})
        async with use_embedded(embedded_server(own)) as server, open_database(own, dsn=server.dsn) as database:
            await migrate(database)
            async with database.connection() as connection:
                await connection.execute(TABLES)
            yield database, own


async def measure(ticks: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Ticks a second, per kind and way and round."""
    settings = load_settings()
    configure_logs("error", "console")  # a line per batch is not what is measured
    found: dict[str, dict[str, list[float]]] = {}
    async with fresh_server(settings) as (database, own):
        kinds = await kinds_of(database, own)
        for number in range(rounds):
            for kind in kinds if number % 2 == 0 else kinds[::-1]:
                rates = found.setdefault(kind.name, {"product": [], "bare": []})
                rates["bare"].append(ticks / await seconds(database, kind, kind.bare, ticks))
                rates["product"].append(ticks / await seconds(database, kind, kind.product, ticks))
    return {kind.name: found[kind.name] for kind in kinds}


def lines(found: dict[str, dict[str, list[float]]]) -> list[str]:
    """A table for people."""
    shown = [f"{'':26}{'ticks/s':>10}{'bare':>10}{'of bare':>10}   range"]
    for name, rates in found.items():
        ratios = [product / bare for product, bare in zip(rates["product"], rates["bare"], strict=True)]
        product, bare = (statistics.median(rates[way]) for way in ("product", "bare"))
        ratio = f"{statistics.median(ratios):>10.2f}   {min(ratios):.2f} to {max(ratios):.2f}"
        shown.append(f"{name:26}{product:>10.0f}{bare:>10.0f}{ratio}")
    return shown


def main(ticks: Ticks = 20_000, rounds: Rounds = 5, *, as_json: Json = False) -> None:
    """Drain due ticks into each kind of sink."""
    found: dict[str, Any] = run(measure, ticks, rounds)
    typer.echo(json.dumps(found) if as_json else "\n".join(lines(found)))


if __name__ == "__main__":
    typer.run(main)
