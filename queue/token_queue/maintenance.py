"""Keeps the queue tidy, on every pod: retention, workers that vanished, queues that nobody handles."""

import structlog

from cron_ticks.settings import Settings
from token_queue.handlers import Handlers
from token_queue.queue_repository import QueueRepository

log = structlog.get_logger("token_queue.maintenance")


class QueueMaintenance:
    """Removes completed messages whose retention is over, in bounded batches, and reports queues without a worker."""

    name = "queue-maintenance"

    def __init__(self, queue: QueueRepository, handlers: Handlers, settings: Settings) -> None:
        self._queue = queue
        self._handlers = handlers
        self._settings = settings

    async def run_once(self) -> float:
        """One pass."""
        await self._delete_completed()
        await self._queue.delete_lost_workers()
        own = self._handlers.queues()
        unhandled = [queue for queue in await self._queue.unhandled_queues() if queue not in own]
        if unhandled:
            log.warning("queues_unhandled", queues=unhandled)
        return self._settings.cleanup_interval_seconds

    async def _delete_completed(self) -> None:
        limit, deleted = self._settings.cleanup_batch_size, 0
        while True:
            batch = await self._queue.delete_completed(self._handlers.all(), limit=limit)
            deleted += batch
            if batch < limit:
                break
        if deleted:
            log.info("completed_messages_removed", messages=deleted)
