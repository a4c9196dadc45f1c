"""The example that `cron-ticks up` runs when there is nothing else to run: a few schedules and their handlers."""

from typing import Any

import structlog

from token_queue import Message, QueueManager

log = structlog.get_logger("cron_ticks.example")

EXAMPLE_SCHEDULES: dict[str, dict[str, Any]] = {
    "example.heartbeat": {"every": 1},
    "example.sync": {"every": 2},
    "example.report": {"every": 3},
    "example.backup": {"every": 5},
    "example.calendar": {"cron": "*/4 * * * * *", "timezone": "Europe/Berlin"},  # six fields: seconds first
}


def example_app() -> QueueManager:
    """A manager with a handler for each example queue."""
    queue_manager = QueueManager()

    async def handle(message: Message) -> None:
        log.debug("example_handled", queue=message.queue_name, scheduled_for=message.headers.get("scheduled_for"))

    for queue_name in EXAMPLE_SCHEDULES:
        queue_manager.handler(queue_name)(handle)
    return queue_manager


async def declare_examples(queue_manager: QueueManager) -> None:
    """Declare the example schedules."""
    for queue_name, rule in EXAMPLE_SCHEDULES.items():
        await queue_manager.schedule(queue_name, **rule, payload={"example": True})
