"""The processes of `bench fire`: the worker's application, and the bare statement.

Both wait for the NOTIFY with which the product announces ticks, and say in JSON lines on standard error that they hear
it and how many ticks they have fired. For a burst the bare one sleeps until the first tick is due, as the product does.

Bare means: the very text that the product fires with, the queue's insert in it, by the same batch, prepared, one after
the other on one connection that is set as the product's are. The rows that come back are received, but nobody makes
Python objects of them or looks at them: `executemany()` drops them while they are bytes. So what is left of Python is a
loop around one call, and one wait for the socket per batch. It is rehearsed with nothing to fire before it waits, as
the product rehearses before a tick is due.

The product looks only above the last tick that it took in the batch before. So does the bare one, though it does not
see the rows: the ticks of a drain are evenly spread, so it knows beforehand how far it will be.
"""

import asyncio
import itertools
import json
import math
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta

import asyncpg

from cron_ticks.cli.bench.contenders import connected
from cron_ticks.cli.bench.contract import run, stdin_lines
from cron_ticks.database import in_schema
from cron_ticks.firing import DUE_NOW
from cron_ticks.ids import new_ticker_id
from cron_ticks.listener import TICKS_NOTICE
from cron_ticks.settings import Settings
from cron_ticks.tick_floors import OF_A_TURN
from cron_ticks.tick_repository import firing_statement
from token_queue import QueueManager
from token_queue.queue_repository import QUEUE_SINK

SCHEMA = "public"
MISSED_AFTER = timedelta(seconds=Settings.model_fields["missed_after_seconds"].default)
CHANNEL = f"cron_ticks.{SCHEMA}"

DUE_IN = "SELECT extract(epoch FROM min(due_at) - clock_timestamp())::float FROM cron_ticks"

# When the first and the last are due: a look at both ends of each priority in the index.
SPAN = """
SELECT min(first) AS first, max(last) AS last
FROM generate_series(0, 3) AS level (priority)
CROSS JOIN LATERAL (
    SELECT min(due_at) AS first, max(due_at) AS last
    FROM cron_ticks
    WHERE sink = $1 AND turn = $2 AND priority = level.priority
) AS found
"""

ANY_LEFT = "SELECT EXISTS (SELECT FROM cron_ticks)"
FIRED_BY = "SELECT count(*) FROM cron_runs WHERE ticker_id = $1"


def worker() -> QueueManager:
    """For `cron-ticks worker`: it makes and fires ticks, and has no handler, so that nothing else is measured."""
    return QueueManager()


def say(event: str, **values: object) -> None:
    """A line as the worker logs it."""
    sys.stderr.write(json.dumps({"event": event, **values}) + "\n")
    sys.stderr.flush()


def floors(first: datetime, last: datetime, ticks: int, batch: int) -> Iterator[datetime]:
    """Where each statement of a process begins to look: at the last tick that it took before.

    With one process that is where the product's begin, to within a tick. With several, all of them have taken more than
    it alone has, so its look begins lower than the product's; never too high.
    """
    for taken in range(0, ticks, batch):
        yield first + (last - first) * max(0, taken - 1) // ticks


def known_floors(span: "asyncpg.Record | None", ticks: int, batch: int, processes: int) -> Iterator[datetime]:
    """Those of one process's share; none if the others have fired everything."""
    if span is None or span["first"] is None:
        return iter(())
    return itertools.islice(floors(span["first"], span["last"], ticks, batch), math.ceil(ticks / batch / processes))


async def fire_bare(dsn: str, batch: int, ticks: int, processes: int, *, until_due: bool) -> None:
    """Fire a share of the ticks when told, or when they are due; more if some are left; wait for stdin's end."""
    reader = await stdin_lines()
    async with connected(dsn) as connection, connected(dsn) as listening:
        text = in_schema(firing_statement(QUEUE_SINK), SCHEMA)
        statement, find_span = await connection.prepare(text), await connection.prepare(SPAN)
        await connection.execute("SELECT")  # ends the transaction that a prepare leaves open, with its locks
        ticker_id = new_ticker_id()
        common = (ticker_id, batch, None, None, QUEUE_SINK.name, DUE_NOW, MISSED_AFTER)
        await statement.executemany([(ticker_id, 0, *common[2:], [None] * OF_A_TURN)])  # planned, as the product's is
        told = asyncio.Event()

        def note(*notice: object) -> None:
            if notice[-1] == TICKS_NOTICE:
                told.set()

        await listening.add_listener(CHANNEL, note)
        say("notify_heard")
        await told.wait()
        span = await find_span.fetchrow(QUEUE_SINK.name, DUE_NOW)
        if until_due:
            await asyncio.sleep(await connection.fetchval(DUE_IN))
        for floor in known_floors(span, ticks, batch, processes):
            await statement.executemany([(*common, [floor] * OF_A_TURN)])
        while await connection.fetchval(ANY_LEFT):
            await statement.executemany([(*common, [None] * OF_A_TURN)])
        say("all_fired")
        say("ticks_fired", ticks=await connection.fetchval(FIRED_BY, ticker_id))
        await reader.read()


if __name__ == "__main__":
    count, total, beside = map(int, sys.argv[2:5])
    run(fire_bare(sys.argv[1], count, total, beside, until_due="--until-due" in sys.argv))
