"""LedgerKeeper: keeps the ledger's partitions days ahead of the firing, on every pod."""

import structlog

from cron_ticks.repository import CronRepository

log = structlog.get_logger("cron_ticks.ledger")

INTERVAL_SECONDS = 3600.0


class LedgerKeeper:
    """Makes the partitions that are missing; whoever comes second finds them made."""

    name = "ledger-keeper"

    def __init__(self, repository: CronRepository) -> None:
        self._repository = repository

    async def run_once(self) -> float:
        """Make those of the coming days."""
        made = await self._repository.make_run_partitions()
        if made:
            log.info("run_partitions_made", partitions=made)
        return INTERVAL_SECONDS
