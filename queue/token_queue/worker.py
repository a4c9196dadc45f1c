"""One run of a worker: its services, and how they stop."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import anyio
import asyncpg
import structlog
from anyio.abc import TaskGroup

from cron_ticks.audit_repository import AuditRepository
from cron_ticks.auditor import Auditor
from cron_ticks.cleanup import CleanupWorker
from cron_ticks.database import PASSING_ERRORS, Database
from cron_ticks.embedded import EmbeddedKeeper, EmbeddedServer
from cron_ticks.firing import CatchUpWith, TickFirer
from cron_ticks.ids import new_ticker_id
from cron_ticks.ledger import LedgerKeeper
from cron_ticks.listener import SHARDS_NOTICE, TICKS_NOTICE, Listener
from cron_ticks.loops import Pause, ServiceGroup, ServiceHealth, watch_stop_signals
from cron_ticks.metrics import Metrics, served
from cron_ticks.publishing import Publisher
from cron_ticks.repository import CronRepository
from cron_ticks.retention_repository import RetentionRepository
from cron_ticks.schedule_manager import ScheduleManager
from cron_ticks.settings import Settings
from cron_ticks.sinks import SameDatabaseSink, Sinks
from token_queue.doubled import find_doubled
from token_queue.hand import Hand
from token_queue.handlers import Handlers
from token_queue.lanes import Lanes
from token_queue.maintenance import QueueMaintenance
from token_queue.outcomes import OutcomeWriter
from token_queue.queue_repository import QUEUE_SINK, QueueRepository
from token_queue.ticker import MessageTicker, TokenRenewal

log = structlog.get_logger("token_queue.worker")

LAST_WORDS_SECONDS = 2.0
SINKS_SECONDS = 30.0


class SinkKeeper:
    """Says which sinks this worker serves."""

    name = "sink-keeper"

    def __init__(self, cron: CronRepository, sinks: Sinks) -> None:
        self._cron = cron
        self._sinks = sinks

    async def run_once(self) -> float:
        """Say it again."""
        await self._cron.note_sinks(self._sinks.kinds)
        return SINKS_SECONDS


class Worker:
    """Makes ticks, fires them and handles messages, from `run()` until it is stopped."""

    def __init__(
        self,
        database: Database,
        handlers: Handlers,
        sinks: Sinks,
        settings: Settings,
        embedded: EmbeddedServer | None,
    ) -> None:
        self.ticker_id = new_ticker_id()
        self.health: dict[str, ServiceHealth] = {}
        self._database = database
        self._cron = CronRepository(database, settings, worker=self.ticker_id)
        self._metrics = Metrics()
        self._manager = ScheduleManager(database, self._cron, settings, self._metrics, manager_id=self.ticker_id)
        self._queue = QueueRepository(database, self.ticker_id, events=settings.events)
        self._handlers = handlers
        self._sinks = sinks
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
        in_database = [QUEUE_SINK, *await self._sinks.prepare(self._database)]
        with structlog.contextvars.bound_contextvars(ticker_id=self.ticker_id):
            async with served(self._metrics, self._settings), anyio.create_task_group() as support_tasks:
                support = ServiceGroup(support_tasks, self.health)
                if handle_signals:
                    await support_tasks.start(watch_stop_signals, self.stop, self._working.cancel)
                if self._embedded is not None:
                    support.start(EmbeddedKeeper(self._embedded))
                writer_pause, ticker_pause = Pause(), Pause()
                writer = OutcomeWriter(
                    self._queue, self._hand, cron=self._cron, pause=writer_pause, ticker_pause=ticker_pause
                )
                support.start(writer, writer_pause)
                try:
                    with self._working:
                        await self._work(support, writer, ticker_pause, in_database)
                finally:
                    await self._last_words(writer)
                support_tasks.cancel_scope.cancel()
            log.info("worker_stopped")

    async def _work(
        self, support: ServiceGroup, writer: OutcomeWriter, ticker_pause: Pause, sinks: Sequence[SameDatabaseSink]
    ) -> None:
        settings = self._settings
        async with anyio.create_task_group() as tasks:
            work = ServiceGroup(tasks, self.health)
            most = settings.message_concurrency
            lanes = Lanes(self._hand, writer, tasks=tasks, most=most, ticker_pause=ticker_pause)
            listener: Listener

            def hears() -> bool:
                return listener.hears

            ticker = MessageTicker(
                self._queue,
                self._handlers,
                settings,
                hand=self._hand,
                lanes=lanes,
                writer=writer,
                pause=ticker_pause,
                hears=hears,
            )
            senders = self._start_senders(work, tasks, sinks, ticker, hears=hears, catch_up=self._manager.catch_up)
            manager_pause = Pause()
            notice = self._hearing(senders, manager_pause, ticker)

            def look_again() -> None:
                notice(TICKS_NOTICE)
                ticker_pause.wake()

            listener = Listener(self._database, self.ticker_id, on_notice=notice, on_change=look_again)
            support.start(TokenRenewal(self._hand, lanes, self._queue, settings))
            support.start(listener)
            work.start(self._manager, manager_pause)
            work.start(ticker, ticker_pause)
            work.start(CleanupWorker(self._cron, settings, self._metrics))
            work.start(LedgerKeeper(self._cron, RetentionRepository(self._database), settings))
            if settings.audit_interval_seconds:
                audits = AuditRepository(self._database, settings, partial(find_doubled, self._database))
                work.start(Auditor(audits, settings, self._metrics))
            work.start(QueueMaintenance(self._queue, self._handlers, settings, self._metrics))
            if self._sinks.kinds:
                work.start(SinkKeeper(self._cron, self._sinks))
            log.info("worker_started", queues=self._handlers.queues(), sinks=sorted(self._sinks.kinds))
            await self._stop_requested.wait()
            log.info("worker_stopping", messages_in_flight=self._hand.running)
            work.stop()
            self._hand.stop()
            writer.wake()
            self._working.deadline = anyio.current_time() + settings.stop_grace_seconds

    def _hearing(
        self, senders: Sequence[TickFirer | Publisher], manager_pause: Pause, ticker: MessageTicker
    ) -> Callable[[str], None]:
        """Whom a notice concerns."""

        def notice(text: str) -> None:
            if text == TICKS_NOTICE:
                for sender in senders:
                    sender.reconsider()
            elif not text.startswith(SHARDS_NOTICE):
                ticker.notice(text)
            elif not text.endswith(self.ticker_id):
                manager_pause.wake()

        return notice

    def _start_senders(
        self,
        work: ServiceGroup,
        tasks: TaskGroup,
        sinks: Sequence[SameDatabaseSink],
        ticker: MessageTicker,
        *,
        hears: Callable[[], bool],
        catch_up: CatchUpWith,
    ) -> list[TickFirer | Publisher]:
        """One for each sink, so that none waits for another."""
        senders: list[TickFirer | Publisher] = []
        for sink in sinks:
            pause = Pause()
            on_fired = ticker.note_fired if sink is QUEUE_SINK else None
            firer = TickFirer(
                self._cron,
                sink,
                self._settings,
                ticker_id=self.ticker_id,
                pause=pause,
                catch_up=catch_up,
                hears=hears,
                on_fired=on_fired,
                metrics=self._metrics,
            )
            work.start(firer, pause)
            senders.append(firer)
        for outside in self._sinks.outside.values():
            pause = Pause()
            publisher = Publisher(
                self._cron,
                outside,
                self._settings,
                ticker_id=self.ticker_id,
                tasks=tasks,
                pause=pause,
                catch_up=catch_up,
                hears=hears,
                metrics=self._metrics,
            )
            work.start(publisher, pause)
            senders.append(publisher)
        return senders

    async def _last_words(self, writer: OutcomeWriter) -> None:
        """What has ended is written and all tokens are free at once; if the server is away, they run out."""
        with anyio.move_on_after(LAST_WORDS_SECONDS, shield=True), suppress(*PASSING_ERRORS, asyncpg.PostgresError):
            await writer.flush()
            await self._queue.retire()
            await self._manager.retire()
