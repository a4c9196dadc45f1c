"""One run of a worker: its services, and how they stop."""

from contextlib import suppress

import anyio
import asyncpg
import structlog

from cron_ticks.cleanup import CleanupWorker
from cron_ticks.database import PASSING_ERRORS, Database
from cron_ticks.embedded import EmbeddedKeeper, EmbeddedServer
from cron_ticks.ids import new_ticker_id
from cron_ticks.ledger import LedgerKeeper
from cron_ticks.listener import Listener
from cron_ticks.loops import Pause, ServiceGroup, ServiceHealth, watch_stop_signals
from cron_ticks.metrics import Metrics, served
from cron_ticks.repository import CronRepository
from cron_ticks.schedule_manager import ScheduleManager
from cron_ticks.settings import Settings
from token_queue.hand import Hand
from token_queue.handlers import Handlers
from token_queue.lanes import Lanes
from token_queue.maintenance import QueueMaintenance
from token_queue.outcomes import OutcomeWriter
from token_queue.queue_repository import QueueRepository
from token_queue.ticker import MessageTicker, TokenRenewal

log = structlog.get_logger("token_queue.worker")

LAST_WORDS_SECONDS = 2.0


class Worker:
    """Makes ticks, fires them and handles messages, from `run()` until it is stopped."""

    def __init__(
        self,
        database: Database,
        handlers: Handlers,
        settings: Settings,
        embedded: EmbeddedServer | None,
    ) -> None:
        self.ticker_id = new_ticker_id()
        self.health: dict[str, ServiceHealth] = {}
        self._database = database
        self._cron = CronRepository(database, settings)
        self._metrics = Metrics()
        self._queue = QueueRepository(database, self.ticker_id)
        self._handlers = handlers
        self._settings = settings
        self._embedded = embedded
        self._stop_requested = anyio.Event()
        self._working = anyio.CancelScope()
        self._hand = Hand(handlers.all(), concurrency=settings.message_concurrency, most=settings.message_batch_size)

    def stop(self) -> None:
        """Ask the run to end."""
        self._stop_requested.set()

    async def run(self, *, handle_signals: bool) -> None:
        """Run until stopped or cancelled; tokens are renewed and outcomes written for as long as handlers run."""
        with structlog.contextvars.bound_contextvars(ticker_id=self.ticker_id):
            async with served(self._metrics, self._settings), anyio.create_task_group() as support_tasks:
                support = ServiceGroup(support_tasks, self.health)
                if handle_signals:
                    await support_tasks.start(watch_stop_signals, self.stop, self._working.cancel)
                if self._embedded is not None:
                    support.start(EmbeddedKeeper(self._embedded))
                writer_pause, ticker_pause = Pause(), Pause()
                writer = OutcomeWriter(self._queue, self._hand, pause=writer_pause, ticker_pause=ticker_pause)
                support.start(writer, writer_pause)
                try:
                    with self._working:
                        await self._work(support, writer, ticker_pause)
                finally:
                    await self._last_words(writer)
                support_tasks.cancel_scope.cancel()
            log.info("worker_stopped")

    async def _work(self, support: ServiceGroup, writer: OutcomeWriter, ticker_pause: Pause) -> None:
        settings = self._settings
        async with anyio.create_task_group() as tasks:
            work = ServiceGroup(tasks, self.health)
            most = settings.message_concurrency
            lanes = Lanes(self._hand, writer, tasks=tasks, most=most, ticker_pause=ticker_pause)
            listener: Listener
            ticker = MessageTicker(
                self._cron,
                self._queue,
                self._handlers,
                settings,
                ticker_id=self.ticker_id,
                hand=self._hand,
                lanes=lanes,
                writer=writer,
                pause=ticker_pause,
                hears=lambda: listener.hears,
                metrics=self._metrics,
            )
            listener = Listener(self._database, self.ticker_id, on_notice=ticker.notice, on_change=ticker.reconsider)
            support.start(TokenRenewal(self._hand, lanes, self._queue, settings))
            support.start(listener)
            work.start(ScheduleManager(self._database, self._cron, settings, self._metrics))
            work.start(ticker, ticker_pause)
            work.start(CleanupWorker(self._cron, settings, self._metrics))
            work.start(LedgerKeeper(self._cron))
            work.start(QueueMaintenance(self._queue, self._handlers, settings))
            log.info("worker_started", queues=self._handlers.queues())
            await self._stop_requested.wait()
            log.info("worker_stopping", messages_in_flight=self._hand.running)
            work.stop()
            self._hand.stop()
            writer.wake()
            self._working.deadline = anyio.current_time() + settings.stop_grace_seconds

    async def _last_words(self, writer: OutcomeWriter) -> None:
        """What has ended is written and all tokens are free at once; if the server is away, they run out."""
        with anyio.move_on_after(LAST_WORDS_SECONDS, shield=True), suppress(*PASSING_ERRORS, asyncpg.PostgresError):
            await writer.flush()
            await self._queue.retire()
