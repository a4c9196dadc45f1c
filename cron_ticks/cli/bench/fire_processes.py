"""The processes of `bench fire`: the worker's application, and the bare statement.

Both wait for the NOTIFY with which the product announces ticks, and say in JSON lines on standard error that they hear
it and how many ticks they have fired. For a burst the bare one sleeps until the first tick is due, as the product does.

Bare means: the very text that the product fires with, the queue's insert in it, by the same batch, prepared, one after
the other on one connection that is set as the product's are. The rows that come back are received, but nobody makes
Python objects of them or looks at them: `executemany()` drops them while they are bytes. So what is left of Python is a
loop around one call, and one wait for the socket per batch.
"""

import asyncio
import json
import sys
from datetime import timedelta

from cron_ticks.cli.bench.contenders import connected
from cron_ticks.cli.bench.contract import run, stdin_lines
from cron_ticks.database import in_schema
from cron_ticks.firing import DUE_NOW
from cron_ticks.ids import new_ticker_id
from cron_ticks.listener import TICKS_NOTICE
from cron_ticks.settings import Settings
from cron_ticks.tick_repository import firing_statement
from token_queue import QueueManager
from token_queue.queue_repository import QUEUE_SINK

SCHEMA = "public"
MISSED_AFTER = timedelta(seconds=Settings.model_fields["missed_after_seconds"].default)
CHANNEL = f"cron_ticks.{SCHEMA}"

DUE_IN = "SELECT extract(epoch FROM min(due_at) - clock_timestamp())::float FROM cron_ticks"
ANY_LEFT = "SELECT EXISTS (SELECT FROM cron_ticks)"
FIRED_BY = "SELECT count(*) FROM cron_runs WHERE ticker_id = $1"


def worker() -> QueueManager:
    """For `cron-ticks worker`: it makes and fires ticks, and has no handler, so that nothing else is measured."""
    return QueueManager()


def say(event: str, **values: object) -> None:
    """A line as the worker logs it."""
    sys.stderr.write(json.dumps({"event": event, **values}) + "\n")
    sys.stderr.flush()


async def fire_bare(dsn: str, batch: int, statements: int, *, until_due: bool) -> None:
    """Run `statements` of them when told, or when the ticks are due; more if some are left; wait for stdin's end."""
    reader = await stdin_lines()
    async with connected(dsn) as connection, connected(dsn) as listening:
        text = in_schema(firing_statement(QUEUE_SINK), SCHEMA)
        statement = await connection.prepare(text)
        await connection.execute("SELECT")  # ends the transaction that a prepare leaves open, with its locks
        arguments = [(new_ticker_id(), batch, None, None, QUEUE_SINK.name, DUE_NOW, MISSED_AFTER)]
        told = asyncio.Event()

        def note(*notice: object) -> None:
            if notice[-1] == TICKS_NOTICE:
                told.set()

        await listening.add_listener(CHANNEL, note)
        say("notify_heard")
        await told.wait()
        if until_due:
            await asyncio.sleep(await connection.fetchval(DUE_IN))
        for _ in range(statements):
            await statement.executemany(arguments)
        while await connection.fetchval(ANY_LEFT):
            await statement.executemany(arguments)
        say("all_fired")
        say("ticks_fired", ticks=await connection.fetchval(FIRED_BY, arguments[0][0]))
        await reader.read()


if __name__ == "__main__":
    run(fire_bare(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), until_due="--until-due" in sys.argv))
