"""Applications that tests run in worker processes: `--app apps:NAME`, with tests/ as the folder."""

import sys

import anyio
import structlog

from token_queue import Message, QueueManager

log = structlog.get_logger("apps")

not_a_manager = 7


def quick() -> QueueManager:
    """Handles `queue` at once."""
    manager = QueueManager()

    @manager.handler("queue")
    async def handle(message: Message) -> None:
        log.info("handled", message_id=message.id, attempt=message.attempt)

    return manager


def until_told() -> QueueManager:
    """Handles a message until a line comes on standard input."""
    manager = QueueManager()

    @manager.handler("queue")
    async def handle(message: Message) -> None:
        log.info("handling", message_id=message.id)
        await anyio.to_thread.run_sync(sys.stdin.readline)
        log.info("handled", message_id=message.id)

    return manager


def slow() -> QueueManager:
    """Says when it begins, and ends when the payload's seconds are over."""
    manager = QueueManager()

    @manager.handler("queue")
    async def handle(message: Message) -> None:
        log.info("handling", message_id=message.id)
        await anyio.sleep(message.payload["seconds"])
        log.info("handled", message_id=message.id)

    return manager
