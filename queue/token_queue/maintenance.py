"""Keeps the queue tidy, on every pod: retention, workers that vanished, queues that nobody handles."""

from datetime import timedelta

import structlog

from cron_ticks.metrics import Metrics
from cron_ticks.settings import Settings
from token_queue.handlers import Handlers
from token_queue.queue_repository import QueueRepository

log = structlog.get_logger("token_queue.maintenance")


class QueueMaintenance:
    """Removes completed messages whose retention is over, in bounded batches, and reports queues without a worker."""

    name = "queue-maintenance"

    def __init__(
        self, queue: QueueRepository, handlers: Handlers, settings: Settings, metrics: Metrics | None = None
    ) -> None:
        self._queue = queue
        self._handlers = handlers
        self._settings = settings
        self._metrics = Metrics() if metrics is None else metrics

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
        otherwise = timedelta(seconds=self._settings.message_retention_seconds)
        while True:
            batch = await self._queue.delete_completed(self._handlers.all(), otherwise=otherwise, limit=limit)
            deleted += batch
            if batch < limit:
                break
        self._metrics.messages_removed.inc(deleted)
        if deleted:
            log.info("completed_messages_removed", messages=deleted)
