"""Applications that tests run in worker processes: `--app support.apps:NAME`, with tests/ on the path."""

import os
import signal
import sys
from collections.abc import Awaitable, Callable

import anyio
import structlog

from token_queue import Message, QueueManager

log = structlog.get_logger("apps")

not_a_manager = 7


def handling(work: Callable[[], Awaitable[object]], *, concurrency: int | None = None) -> QueueManager:
    """Handles `queue` by some work, and says when it begins and ends."""
    manager = QueueManager()

    @manager.handler("queue", concurrency=concurrency)
    async def handle(message: Message) -> None:
        log.info("handling", message_id=message.id)
        await work()
        log.info("handled", message_id=message.id)

    return manager


def quick() -> QueueManager:
    """Handles a message at once."""
    return handling(anyio.lowlevel.checkpoint)


def quiet() -> QueueManager:
    """Handles a message at once and says nothing, because there are many."""
    manager = QueueManager()

    @manager.handler("queue")
    async def handle(_: Message) -> None: ...

    return manager


def without_handlers() -> QueueManager:
    """Makes ticks and fires them; its messages wait for somebody else."""
    return QueueManager()


def until_told() -> QueueManager:
    """Handles a message until a line comes on standard input."""
    return handling(lambda: anyio.to_thread.run_sync(sys.stdin.readline))


def slow() -> QueueManager:
    """Takes a moment for each message."""
    return handling(lambda: anyio.sleep(0.03))


def in_turn() -> QueueManager:
    """One message at a time, each until a line comes on standard input."""
    return handling(lambda: anyio.to_thread.run_sync(sys.stdin.readline), concurrency=1)


def deadly() -> QueueManager:
    """Dies of messages that say so, as one whose memory is used up."""
    manager = QueueManager()

    @manager.handler("queue", max_attempts=3)
    async def handle(message: Message) -> None:
        log.info("handling", message_id=message.id, attempt=message.attempt)
        if message.payload.get("kills"):
            os.kill(os.getpid(), signal.SIGKILL)
        await anyio.lowlevel.checkpoint()

    return manager


def endless() -> QueueManager:
    """Never ends a message by itself."""
    return handling(anyio.sleep_forever)
