"""What exists between entering and leaving a QueueManager, and the base of its calls."""

from contextlib import AsyncExitStack
from dataclasses import dataclass

from cron_ticks.database import Database
from cron_ticks.embedded import EmbeddedServer
from cron_ticks.errors import CronTicksError
from cron_ticks.repository import CronRepository
from cron_ticks.settings import Settings
from token_queue.queue_repository import QueueRepository


@dataclass(frozen=True)
class Opened:
    """What an open manager has."""

    stack: AsyncExitStack
    database: Database
    dsn: str | None  # None: the application's pool
    cron: CronRepository
    queue: QueueRepository
    embedded: EmbeddedServer | None


class OpenedManager:
    """What all calls of a manager need."""

    settings: Settings
    _opened: Opened | None

    @property
    def _open(self) -> Opened:
        if self._opened is None:
            raise CronTicksError("this QueueManager is not open: use it inside 'async with queue_manager:'")
        return self._opened
