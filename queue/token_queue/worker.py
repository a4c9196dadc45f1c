"""One run of a worker: its services, and how they stop."""

import anyio
import structlog

from cron_ticks.cleanup import CleanupWorker
from cron_ticks.database import Database
from cron_ticks.embedded import EmbeddedKeeper, EmbeddedServer
from cron_ticks.ids import new_ticker_id
from cron_ticks.loops import Pause, ServiceGroup, ServiceHealth, watch_stop_signals
from cron_ticks.repository import CronRepository
from cron_ticks.schedule_manager import ScheduleManager
from cron_ticks.settings import Settings
from token_queue.handlers import Handlers
from token_queue.queue_repository import QueueRepository
from token_queue.ticker import ClaimRenewal, MessageTicker

log = structlog.get_logger("token_queue.worker")


class Worker:
    """Makes ticks, fires them and handles messages, from `run()` until it is stopped."""

    def __init__(
        self,
        database: Database,
        cron: CronRepository,
        handlers: Handlers,
        settings: Settings,
        embedded: EmbeddedServer | None,
    ) -> None:
        self.ticker_id = new_ticker_id()
        self.health: dict[str, ServiceHealth] = {}
        self._database = database
        self._cron = cron
        self._queue = QueueRepository(database, self.ticker_id)
        self._handlers = handlers
        self._settings = settings
        self._embedded = embedded
        self._manager_pause = Pause()
        self._stop_requested = anyio.Event()
        self._working = anyio.CancelScope()

    def stop(self) -> None:
        """Ask the run to end."""
        self._stop_requested.set()

    def wake_manager(self) -> None:
        """Look at the schedules now: one has changed."""
        self._manager_pause.wake()

    async def run(self, *, handle_signals: bool) -> None:
        """Run until stopped or cancelled; claims are renewed for as long as handlers run."""
        with structlog.contextvars.bound_contextvars(ticker_id=self.ticker_id):
            async with anyio.create_task_group() as support_tasks:
                support = ServiceGroup(support_tasks, self.health)
                if handle_signals:
                    await support_tasks.start(watch_stop_signals, self.stop, self._working.cancel)
                if self._embedded is not None:
                    support.start(EmbeddedKeeper(self._embedded))
                with self._working:
                    await self._work(support)
                support_tasks.cancel_scope.cancel()
            log.info("worker_stopped")

    async def _work(self, support: ServiceGroup) -> None:
        async with anyio.create_task_group() as tasks:
            work = ServiceGroup(tasks, self.health)
            ticker_pause = Pause()
            ticker = MessageTicker(
                self._cron,
                self._queue,
                self._handlers,
                self._settings,
                ticker_id=self.ticker_id,
                tasks=tasks,
                pause=ticker_pause,
            )
            support.start(ClaimRenewal(ticker, self._queue, self._settings))
            work.start(ScheduleManager(self._database, self._cron, self._settings), self._manager_pause)
            work.start(ticker, ticker_pause)
            work.start(CleanupWorker(self._cron, self._settings))
            log.info("worker_started", queues=self._handlers.queues())
            await self._stop_requested.wait()
            log.info("worker_stopping", messages_in_flight=len(ticker.in_flight))
            work.stop()
            self._working.deadline = anyio.current_time() + self._settings.stop_grace_seconds
