"""The applications of the workers under a load: `--app cron_ticks.cli.bench.load_apps:NAME`."""

import atexit
import json
import sys
from collections.abc import Sequence
from typing import Any

import anyio
import asyncpg

from cron_ticks import LeasedTick
from cron_ticks.cli.bench.contenders import QUEUE
from token_queue import Message, QueueManager

MODULE = "cron_ticks.cli.bench.load_apps"
FIRING, CONSUMING, COUNTED, OUTSIDE = (f"{MODULE}:{name}" for name in ("firing", "consuming", "counted", "outside"))

HANDLED = "messages_handled"  # what a worker that consumes says in the end
OUTSIDE_SINK = "outside"
BROKER_SECONDS = 0.02  # what an answer of the other side takes

# What has arrived outside, and when. It stands in the same database so that nothing else is needed to count it.
NOTE_DELIVERIES = "INSERT INTO {schema}.bench_deliveries (message_id) SELECT unnest($1::text[])"


def firing() -> QueueManager:
    """Makes and fires ticks, and has no handler: messages are not consumed."""
    return QueueManager()


def consuming() -> QueueManager:
    """Also consumes them, by a handler that does nothing but count; in the end it says how many it was given."""
    manager = QueueManager()
    handled = 0

    @manager.handler(QUEUE)
    async def handle(_: Message) -> None:
        nonlocal handled
        handled += 1

    atexit.register(lambda: _say(HANDLED, count=handled))
    return manager


def counted() -> QueueManager:
    """Says each statement that it sends to the server, over whatever connection."""
    made = asyncpg.Connection.__init__

    def make(self: "asyncpg.Connection[asyncpg.Record]", *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **options)
        self.add_query_logger(_say_statement)

    asyncpg.Connection.__init__ = make  # type: ignore[method-assign,assignment]
    return consuming()


def outside() -> QueueManager:
    """Publishes the ticks of an outside sink to a broker that takes its time and keeps what it got."""
    manager = QueueManager()

    @manager.sink(OUTSIDE_SINK)
    async def publish(ticks: Sequence[LeasedTick]) -> None:
        await anyio.sleep(BROKER_SECONDS)
        await manager.database.fetch(NOTE_DELIVERIES, [tick.message_id for tick in ticks])

    return manager


def _say_statement(statement: Any) -> None:
    _say("statement", text=" ".join(statement.query.split())[:80])


def _say(event: str, **values: Any) -> None:
    sys.stderr.write(json.dumps({"event": event} | values) + "\n")
    sys.stderr.flush()
