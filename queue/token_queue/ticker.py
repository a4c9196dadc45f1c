"""The message ticker: every 100 ms it fires due ticks and hands due messages to their handlers."""

import math
from collections.abc import Awaitable, Callable
from datetime import timedelta

import anyio
import structlog
from anyio.abc import TaskGroup

from cron_ticks.loops import Pause, backoff_seconds
from cron_ticks.repository import CronRepository, FiredTick
from cron_ticks.settings import Settings
from token_queue.handlers import Handlers
from token_queue.message import Message
from token_queue.queue_repository import QueueRepository, QueueSink

log = structlog.get_logger("token_queue.ticker")

FIRST_RETRY_SECONDS = 1.0
LONGEST_RETRY_SECONDS = 300.0
RELEASE_SECONDS = 2.0


class MessageTicker:
    """Fires ticks and starts handlers. Handlers run in `tasks`, so a slow one never delays a firing."""

    name = "message-ticker"

    def __init__(
        self,
        cron: CronRepository,
        queue: QueueRepository,
        handlers: Handlers,
        settings: Settings,
        *,
        ticker_id: str,
        tasks: TaskGroup,
        pause: Pause,
    ) -> None:
        self._cron = cron
        self._queue = queue
        self._handlers = handlers
        self._settings = settings
        self._ticker_id = ticker_id
        self._tasks = tasks
        self._pause = pause
        self._sink = QueueSink()
        self._lease = timedelta(seconds=settings.lease_seconds)
        self.in_flight: set[str] = set()

    async def run_once(self) -> float:
        """Fire what is due, then claim as many messages as there is room for."""
        await self._fire_due_ticks()
        await self._start_messages()
        return self._settings.ticker_interval_ms / 1000

    async def _fire_due_ticks(self) -> None:
        limit = self._settings.ticker_batch_size
        while True:
            fired = await self._cron.fire_due_ticks(self._sink, ticker_id=self._ticker_id, limit=limit)
            if fired:
                _log_fired(fired)
            if len(fired) < limit:
                return

    async def _start_messages(self) -> None:
        room = self._settings.message_concurrency - len(self.in_flight)
        queues = self._handlers.queues()
        if room <= 0 or not queues:
            return
        messages = await self._queue.claim(queues, limit=room, lease=self._lease)
        for message in messages:
            self.in_flight.add(message.id)
            self._tasks.start_soon(self._process, message)

    async def _process(self, message: Message) -> None:
        try:
            if message.attempt > self._settings.message_max_attempts:
                await self._settle(message, self._failure(message, "its workers died before they could end it"))
                return
            try:
                await self._handlers.handle(message)
            except Exception as error:  # noqa: BLE001 - whatever a handler raises is the message's outcome
                await self._settle(message, self._failure(message, f"{type(error).__name__}: {error}"))
            else:
                await self._settle(message, lambda: self._queue.complete(message))
        except anyio.get_cancelled_exc_class():
            with anyio.move_on_after(RELEASE_SECONDS, shield=True):
                await self._queue.release([message.id])
            raise
        finally:
            self.in_flight.discard(message.id)
            self._pause.wake()

    def _failure(self, message: Message, error: str) -> Callable[[], Awaitable[bool]]:
        dead = message.attempt >= self._settings.message_max_attempts
        log.warning(
            "message_dead" if dead else "message_failed",
            message_id=message.id,
            queue=message.queue_name,
            attempt=message.attempt,
            error=error,
        )
        return lambda: self._queue.fail(
            message,
            error,
            max_attempts=self._settings.message_max_attempts,
            retry_in=timedelta(seconds=retry_seconds(message.attempt)),
        )

    async def _settle(self, message: Message, write: Callable[[], Awaitable[bool]]) -> None:
        """Write the outcome, trying again while the server is away: the work is done and must not be done twice."""
        attempts = 0
        while True:
            try:
                ours = await write()
            except Exception as error:  # noqa: BLE001 - tried again until written, taken over or stopped
                attempts += 1
                log.warning("outcome_not_written", message_id=message.id, error=str(error), attempts=attempts)
                await anyio.sleep(backoff_seconds(attempts))
            else:
                if not ours:
                    log.warning("claim_lost", message_id=message.id, queue=message.queue_name)
                return


class ClaimRenewal:
    """Renews the claims on messages whose handlers still run."""

    name = "claim-renewal"

    def __init__(self, ticker: MessageTicker, queue: QueueRepository, settings: Settings) -> None:
        self._ticker = ticker
        self._queue = queue
        self._settings = settings

    async def run_once(self) -> float:
        """Renew once."""
        if self._ticker.in_flight:
            lease = timedelta(seconds=self._settings.lease_seconds)
            await self._queue.renew(self._ticker.in_flight, lease=lease)
        return self._settings.lease_renewal_seconds


def retry_seconds(attempt: int) -> float:
    """Exponential, capped."""
    return min(math.ldexp(FIRST_RETRY_SECONDS, min(attempt - 1, 20)), LONGEST_RETRY_SECONDS)


def _log_fired(fired: list[FiredTick]) -> None:
    latest = max(tick.lateness for tick in fired)
    log.info("ticks_fired", ticks=len(fired), lateness_max_ms=round(latest.total_seconds() * 1000, 1))
    for tick in fired:
        log.debug(
            "tick_fired",
            tick_id=tick.id,
            schedule_id=tick.schedule_id,
            schedule=tick.schedule_name,
            scheduled_for=tick.scheduled_for.isoformat(),
            lateness_ms=round(tick.lateness.total_seconds() * 1000, 1),
        )
