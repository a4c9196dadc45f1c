"""The message ticker: every 100 ms it fires due ticks and hands due messages to their handlers."""

import math
import random
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from datetime import timedelta

import anyio
import structlog
from anyio.abc import TaskGroup

from cron_ticks.database import PASSING_ERRORS
from cron_ticks.loops import Pause, backoff_seconds
from cron_ticks.repository import CronRepository, FiredTick
from cron_ticks.settings import Settings
from token_queue.handlers import Handlers
from token_queue.message import Message
from token_queue.queue_repository import QueueRepository, QueueSink

log = structlog.get_logger("token_queue.ticker")

FIRST_RETRY_SECONDS = 1.0
LONGEST_RETRY_SECONDS = 300.0
LAST_WORDS_SECONDS = 2.0
SPREAD = (0.8, 1.2)  # of the pause, so that the tickers of many pods don't look in step


Outcome = Callable[[], Awaitable[bool]]


@dataclass(frozen=True)
class InFlight:
    """A message and the scope in which its handler runs."""

    message: Message
    handling: anyio.CancelScope


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
        self._in_flight: dict[str, InFlight] = {}

    @property
    def in_flight(self) -> list[Message]:
        """The messages whose handlers run."""
        return [entry.message for entry in self._in_flight.values()]

    async def run_once(self) -> float:
        """Fire what is due, then claim as many messages as there is room for."""
        await self._fire_due_ticks()
        if not self._pause.stopping:
            await self._start_messages()
        return self._settings.ticker_interval_ms / 1000 * random.uniform(*SPREAD)  # noqa: S311 - no secret

    def abandon(self, messages: Collection[Message]) -> None:
        """End the handlers of messages that were taken over by another process."""
        for message in messages:
            entry = self._in_flight.get(message.id)
            if entry is not None and entry.message == message:
                log.warning("claim_lost", message_id=message.id, queue=message.queue_name)
                entry.handling.cancel()

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
        messages = await self._queue.claim(queues, limit=room, lease=self._lease, except_ids=self._in_flight)
        for message in messages:
            self._in_flight[message.id] = InFlight(message, anyio.CancelScope())
            self._tasks.start_soon(self._process, self._in_flight[message.id])

    async def _process(self, entry: InFlight) -> None:
        message = entry.message
        try:
            write = await self._handle(entry)
            if write is not None:
                await self._settle(message, write)
        finally:
            del self._in_flight[message.id]
            self._pause.wake()

    async def _handle(self, entry: InFlight) -> Outcome | None:
        """Run the handler; what to write of it, or None if the message is no longer ours or was given back."""
        message = entry.message
        if message.attempt > self._settings.message_max_attempts:
            return self._failure(message, "its workers died before they could end it")
        try:
            with entry.handling:
                await self._handlers.handle(message)
                return lambda: self._queue.complete(message)
        except anyio.get_cancelled_exc_class() as error:
            if not _stopping():  # the handler let out a cancellation of something else
                return self._failure(message, f"{type(error).__name__}: {error}")
            await self._last_words(message, lambda: self._queue.release(message))
            raise
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is the message's outcome
            return self._failure(message, f"{type(error).__name__}: {error}")
        return None

    def _failure(self, message: Message, error: str) -> Outcome:
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

    async def _settle(self, message: Message, write: Outcome) -> None:
        """Write the outcome, trying again while the server is away: the work is done and must not be done twice."""
        attempts = 0
        try:
            while not await self._written(message, write):
                attempts += 1
                await anyio.sleep(backoff_seconds(attempts))
        except anyio.get_cancelled_exc_class():
            await self._last_words(message, write)
            raise

    async def _last_words(self, message: Message, write: Outcome) -> None:
        """One more try in the short time that a process has after its grace; else the claim runs out by itself."""
        with anyio.move_on_after(LAST_WORDS_SECONDS, shield=True):
            await self._written(message, write)

    async def _written(self, message: Message, write: Outcome) -> bool:
        """False if it is worth another try."""
        try:
            if not await write():
                log.warning("claim_lost", message_id=message.id, queue=message.queue_name)
        except PASSING_ERRORS as error:
            log.warning("outcome_not_written", message_id=message.id, error=str(error))
            return False
        except Exception as error:
            log.exception("outcome_refused", message_id=message.id, error=str(error))
        return True


class ClaimRenewal:
    """Renews the claims on messages whose handlers still run."""

    name = "claim-renewal"

    def __init__(self, ticker: MessageTicker, queue: QueueRepository, settings: Settings) -> None:
        self._ticker = ticker
        self._queue = queue
        self._settings = settings

    async def run_once(self) -> float:
        """Renew once."""
        messages = self._ticker.in_flight
        if messages:
            with anyio.fail_after(self._settings.lease_renewal_seconds):
                renewed = await self._queue.renew(messages, lease=timedelta(seconds=self._settings.lease_seconds))
            self._ticker.abandon([message for message in messages if message.id not in renewed])
        return self._settings.lease_renewal_seconds


def retry_seconds(attempt: int) -> float:
    """Exponential, capped."""
    return min(math.ldexp(FIRST_RETRY_SECONDS, min(attempt - 1, 20)), LONGEST_RETRY_SECONDS)


def _stopping() -> bool:
    """Whether a scope around us was cancelled, as a stop does."""
    return anyio.current_effective_deadline() == -math.inf


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
