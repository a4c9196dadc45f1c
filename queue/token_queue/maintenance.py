"""Keeps the queue tidy, on every pod: retention, workers that vanished, queues that nobody handles."""

from datetime import timedelta

import structlog

from cron_ticks.metrics import Metrics
from cron_ticks.settings import Settings
from token_queue.handlers import Handlers
from token_queue.queue_repository import QueueRepository

log = structlog.get_logger("token_queue.maintenance")


class QueueMaintenance:
    """Removes messages whose retention is over, completed or dead, in bounded batches; reports unhandled queues."""

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
        await self._delete_dead()
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

    async def _delete_dead(self) -> None:
        days = self._settings.dead_retention_days
        if days is None:
            return
        limit = self._settings.cleanup_batch_size
        total = deleted = await self._queue.delete_dead_before(timedelta(days=days), limit=limit)
        while deleted == limit:
            deleted = await self._queue.delete_dead_before(timedelta(days=days), limit=limit)
            total += deleted
        if total:
            log.info("dead_letters_removed", messages=total)
