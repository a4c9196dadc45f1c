"""LedgerKeeper: keeps the ledger's partitions days ahead of the firing and removes what is past, on every pod."""

from datetime import timedelta

import structlog

from cron_ticks.repository import CronRepository
from cron_ticks.retention_repository import PartitionKind, RetentionRepository
from cron_ticks.settings import Settings

log = structlog.get_logger("cron_ticks.ledger")

INTERVAL_SECONDS = 3600.0


class LedgerKeeper:
    """Makes the partitions that are missing and removes old ones; whoever comes second finds it done."""

    name = "ledger-keeper"

    def __init__(self, cron: CronRepository, retention: RetentionRepository, settings: Settings) -> None:
        self._cron = cron
        self._retention = retention
        self._runs = timedelta(days=settings.runs_retention_days)
        self._events = timedelta(days=settings.events_retention_days)

    async def run_once(self) -> float:
        """Make those of the coming days; then remove those of days long past, and what was kept for their sake."""
        made = await self._cron.make_partitions()
        if made:
            log.info("run_partitions_made", partitions=made)
        await self._drop("runs", self._runs)
        await self._drop("events", self._events)
        versions = await self._retention.forget_versions()
        audits = await self._retention.delete_audits(self._runs)
        backfills = await self._retention.delete_backfills(self._runs)
        if versions or audits or backfills:
            log.info("ledger_trimmed", versions=versions, audits=audits, backfills=backfills)
        return INTERVAL_SECONDS

    async def _drop(self, kind: PartitionKind, older_than: timedelta) -> None:
        dropped = await self._retention.drop_partitions(kind, older_than)
        if dropped.names:
            log.info("run_partitions_removed", kind=kind, partitions=list(dropped.names))
        if dropped.busy:
            log.info("run_partitions_in_use", kind=kind)
