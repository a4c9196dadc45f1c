"""CleanupWorker: removes what nobody will look at again, on every pod."""

import structlog

from cron_ticks.repository import CronRepository
from cron_ticks.settings import Settings

log = structlog.get_logger("cron_ticks.cleanup")


class CleanupWorker:
    """Removes ticks whose schedule is gone, in bounded batches; pods never wait for each other's rows."""

    name = "cleanup"

    def __init__(self, repository: CronRepository, settings: Settings) -> None:
        self._repository = repository
        self._settings = settings

    async def run_once(self) -> float:
        """Remove until less than a batch is left."""
        orphaned = 0
        while True:
            removed = await self._repository.delete_orphaned_ticks(limit=self._settings.cleanup_batch_size)
            orphaned += removed
            if removed < self._settings.cleanup_batch_size:
                break
        if orphaned:
            log.info("cleaned_up", orphaned_ticks=orphaned)
        return self._settings.cleanup_interval_seconds
