"""Applications that tests run in worker processes: `--app support.apps:NAME`, with tests/ on the path."""

import sys
from collections.abc import Awaitable, Callable

import anyio
import structlog

from token_queue import Message, QueueManager

log = structlog.get_logger("apps")

not_a_manager = 7


def handling(work: Callable[[], Awaitable[object]]) -> QueueManager:
    """Handles `queue` by some work, and says when it begins and ends."""
    manager = QueueManager()

    @manager.handler("queue")
    async def handle(message: Message) -> None:
        log.info("handling", message_id=message.id)
        await work()
        log.info("handled", message_id=message.id)

    return manager


def quick() -> QueueManager:
    """Handles a message at once."""
    return handling(anyio.lowlevel.checkpoint)


def until_told() -> QueueManager:
    """Handles a message until a line comes on standard input."""
    return handling(lambda: anyio.to_thread.run_sync(sys.stdin.readline))


def endless() -> QueueManager:
    """Never ends a message by itself."""
    return handling(anyio.sleep_forever)
