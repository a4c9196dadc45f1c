"""Runs the handlers of messages in hand, a bounded number at once."""

import contextvars
import math
import time

import anyio
import structlog
from anyio.abc import TaskGroup

from cron_ticks.loops import Pause
from token_queue.hand import Hand, InHand
from token_queue.handlers import RejectMessage
from token_queue.outcomes import Outcome, OutcomeWriter, failure

log = structlog.get_logger("token_queue.lanes")

TURN_SECONDS = 0.002  # of handlers that never wait, before the rest of the process gets its turn


class Lanes:
    """Tasks that take one message after the other. They end when there is none, and start when there are some."""

    def __init__(self, hand: Hand, writer: OutcomeWriter, *, tasks: TaskGroup, most: int, ticker_pause: Pause) -> None:
        self._hand = hand
        self._writer = writer
        self._tasks = tasks
        self._most = most
        self._ticker_pause = ticker_pause
        self._lanes = 0
        self._turn_ends = 0.0
        self._context = contextvars.copy_context()

    def dispatch(self) -> None:
        """Start as many lanes as there is work for."""
        for _ in range(min(self._most - self._lanes, self._hand.waiting)):
            self._lanes += 1
            # What one message's handler leaves in context variables is not the next one's.
            self._context.copy().run(self._tasks.start_soon, self._lane)

    async def _lane(self) -> None:
        context = contextvars.copy_context()
        try:
            while (entry := self._hand.next(time.monotonic())) is not None:
                if len(entry.pair.waiting) == entry.pair.low and not entry.pair.drained:
                    self._ticker_pause.wake()
                await self._process(entry)
                if contextvars.copy_context() != context:
                    break
                if time.monotonic() > self._turn_ends:
                    await anyio.lowlevel.checkpoint()
                    self._turn_ends = time.monotonic() + TURN_SECONDS
        finally:
            self._lanes -= 1
        if entry is not None:
            self.dispatch()

    async def _process(self, entry: InHand) -> None:
        begun = time.monotonic()
        outcome = None
        try:
            outcome = await self._outcome(entry)
        finally:
            self._hand.ended(entry, time.monotonic() - begun, to_write=outcome is not None)
        if outcome is not None:
            self._writer.add(outcome)

    async def _outcome(self, entry: InHand) -> Outcome | None:
        """Run the handler; None if the message is no longer ours."""
        handler, message = entry.pair.handler, entry.message
        if message.attempt > handler.options.max_attempts:
            _log_failed("message_dead", entry, "its attempts were used up by workers that died")
            return Outcome(entry, buried=True)
        timeout = handler.options.timeout
        deadline = math.inf if timeout is None else anyio.current_time() + timeout.total_seconds()
        try:
            with anyio.CancelScope(deadline=deadline) as entry.handling:
                await handler.run(handler.prepared(message))
                return Outcome(entry)
        except anyio.get_cancelled_exc_class() as error:
            if anyio.current_effective_deadline() == -math.inf:  # we are being stopped
                raise
            return self._failed(entry, error)  # the handler let out a cancellation of something else
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a handler raises is the message's outcome
            return self._failed(entry, error)
        if entry.pair.lost:
            return None
        return self._failed(entry, TimeoutError(f"the handler ran for more than {timeout}"))

    def _failed(self, entry: InHand, error: BaseException) -> Outcome:
        options, message = entry.pair.handler.options, entry.message
        final = isinstance(error, RejectMessage) or message.attempt >= options.max_attempts
        retry_in = None if final else options.backoff.seconds(message.attempt)
        if retry_in is not None:
            self._hand.note_retry(time.monotonic() + retry_in)
        _log_failed("message_dead" if final else "message_failed", entry, f"{type(error).__name__}: {error}")
        return Outcome(entry, failure(error, retry_in))


def _log_failed(event: str, entry: InHand, error: str) -> None:
    message = entry.message
    log.warning(
        event,
        message_id=message.id,
        queue=message.queue_name,
        workspace_id=message.workspace_id,
        attempt=message.attempt,
        error=error,
    )
