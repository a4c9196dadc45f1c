"""A server that writes down what it is sent, and answers only then: `python -m support.recorder FILE`.

It is a process of its own, so nothing that happens to a worker changes what was written. A connection brings one line
of JSON, a list of deliveries; half a line is none. The server prints its port, and once its standard input ends it
waits for the connections that it has and ends too.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from cron_ticks import LeasedTick

ANSWERS_AFTER = (0.01, 0.05)  # seconds, so that a sender may die between what it did and what it knows
LONGEST_LINE = 2**20


@dataclass(frozen=True)
class Delivery:
    """What was sent once."""

    message_id: str
    schedule_id: str
    scheduled_for: datetime
    attempt: int
    recovery: bool
    sender: int  # its process id
    at: float  # when it was written down, by the machine's monotonic clock


def read(file: Path) -> list[Delivery]:
    """All that was written, in its order."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [Delivery(**line | {"scheduled_for": datetime.fromisoformat(line["scheduled_for"])}) for line in lines]


async def send(port: int, ticks: Sequence[LeasedTick], sender: int) -> None:
    """Deliver ticks; once this returns they are written."""
    deliveries = [
        Delivery(tick.message_id, tick.schedule_id, tick.scheduled_for, tick.attempts, tick.recovery, sender, 0.0)
        for tick in ticks
    ]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(json.dumps([asdict(delivery) for delivery in deliveries], default=str).encode() + b"\n")
        await reader.readexactly(1)
    finally:
        writer.close()


class Recorder:
    """Takes connections until it is told to end."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._open: set[asyncio.Task[Any]] = set()

    async def serve(self) -> None:
        server = await asyncio.start_server(self._take, "127.0.0.1", 0, limit=LONGEST_LINE, backlog=1000)
        print(server.sockets[0].getsockname()[1], flush=True)  # noqa: T201
        await asyncio.to_thread(sys.stdin.read)
        server.close()
        await asyncio.gather(*self._open)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            with suppress(ConnectionError):
                line = await reader.readline()
                if line.endswith(b"\n"):
                    self._record(json.loads(line))
                    await asyncio.sleep(random.uniform(*ANSWERS_AFTER))  # noqa: S311
                    writer.write(b".")
        finally:
            writer.close()
            self._open.discard(task)

    def _record(self, deliveries: Sequence[dict[str, Any]]) -> None:
        at = time.monotonic()
        self._file.writelines(json.dumps(delivery | {"at": at}) + "\n" for delivery in deliveries)
        self._file.flush()


if __name__ == "__main__":
    with Path(sys.argv[1]).open("w") as opened:
        asyncio.run(Recorder(opened).serve())
