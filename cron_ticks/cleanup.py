"""CleanupWorker: removes what nobody will look at again, on every pod."""

from collections.abc import Awaitable, Callable
from datetime import timedelta
from functools import partial

import structlog

from cron_ticks.metrics import Metrics
from cron_ticks.repository import CronRepository
from cron_ticks.settings import Settings

log = structlog.get_logger("cron_ticks.cleanup")


class CleanupWorker:
    """Removes expired and orphaned ticks, in bounded batches; pods never wait for each other's rows."""

    name = "cleanup"

    def __init__(self, repository: CronRepository, settings: Settings, metrics: Metrics | None = None) -> None:
        self._repository = repository
        self._settings = settings
        self._metrics = Metrics() if metrics is None else metrics

    async def run_once(self) -> float:
        """Remove until less than a batch is left."""
        threshold = timedelta(seconds=self._settings.cleanup_threshold_seconds)
        expired = await self._drain(partial(self._repository.delete_expired_ticks, expired_for=threshold))
        orphaned = await self._drain(self._repository.delete_orphaned_ticks)
        self._metrics.note_lost(expired, self._metrics.expired)
        self._metrics.orphaned.inc(orphaned)
        if expired or orphaned:
            log.info("cleaned_up", expired_ticks=expired, orphaned_ticks=orphaned)
        await self._repository.forget_managers()
        unserved = await self._repository.unserved_sinks()
        if unserved:
            log.warning("sinks_unserved", sinks=unserved)
        return self._settings.cleanup_interval_seconds

    async def _drain(self, remove: Callable[..., Awaitable[int]]) -> int:
        limit = self._settings.cleanup_batch_size
        total = removed = await remove(limit=limit)
        while removed == limit:
            removed = await remove(limit=limit)
            total += removed
        return total
