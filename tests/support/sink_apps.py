"""Applications with sinks, and with handlers that take long: `--app support.sink_apps:NAME`, as those of `apps`."""

import os
import random
import time
from collections.abc import Sequence

import anyio
import structlog

from cron_ticks import LeasedTick, TableSink
from support import recorder
from token_queue import Message, QueueManager

log = structlog.get_logger("sink_apps")

SENDS_AFTER = (0.0, 0.03)  # seconds of a call before it sends, so that a process may die before that too
HANDLER_SECONDS = 3.0


def send_to_recorder(manager: QueueManager, sink: str) -> None:
    """The sink's ticks go to the recorder whose port the environment names."""
    port = int(os.environ["RECORDER_PORT"])

    @manager.sink(sink, batch_size=10)
    async def publish(ticks: Sequence[LeasedTick]) -> None:
        await anyio.sleep(random.uniform(*SENDS_AFTER))  # noqa: S311
        await recorder.send(port, ticks, os.getpid())


def handle_quietly(manager: QueueManager) -> None:
    @manager.handler("queue")
    async def handle(_: Message) -> None: ...


def recording() -> QueueManager:
    """Sends ticks of `outside` to the recorder."""
    manager = QueueManager()
    send_to_recorder(manager, "outside")
    return manager


def hanging() -> QueueManager:
    """One sink never answers; beside it another one, a table, and our own queue."""
    manager = QueueManager()
    send_to_recorder(manager, "outside")
    manager.add_sink("table", TableSink("jobs", {"id": "message_id"}))
    handle_quietly(manager)

    @manager.sink("hangs", batch_size=5, concurrency=2)
    async def publish(ticks: Sequence[LeasedTick]) -> None:
        log.info("hanging", message_ids=[tick.message_id for tick in ticks])
        await anyio.sleep_forever()

    return manager


def healed() -> QueueManager:
    """The sink that hung sends to the recorder now."""
    manager = QueueManager()
    send_to_recorder(manager, "hangs")
    return manager


def overlapping() -> QueueManager:
    """Takes three intervals of its schedules for a message."""
    manager = QueueManager()

    @manager.handler("queue", tokens_per_pair=50)
    async def handle(message: Message) -> None:
        begin = time.monotonic()
        await anyio.sleep(HANDLER_SECONDS)
        schedule_id = message.headers["schedule_id"]
        log.info("handled", schedule_id=schedule_id, message_id=message.id, begin=begin, end=time.monotonic())

    return manager
