"""Runs the handlers of messages in hand, a bounded number at once."""

import asyncio
import contextvars
import math
import time
from datetime import timedelta

import anyio
import structlog
from anyio.abc import TaskGroup

from cron_ticks.loops import Pause
from token_queue.hand import Hand, InHand
from token_queue.handlers import QueueHandler, RejectMessage
from token_queue.message import RawMessage
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
        self._turn_over = False
        self._context = contextvars.copy_context()

    def dispatch(self) -> None:
        """Start as many lanes as there is work for."""
        for _ in range(min(self._most - self._lanes, self._hand.waiting)):
            self._lanes += 1
            # What one message's handler leaves in context variables is not the next one's.
            self._context.copy().run(self._tasks.start_soon, self._lane)

    async def _lane(self) -> None:
        """Handle messages until there is none. A pair that is lost ends the lane that has a message of it."""
        context = contextvars.copy_context()
        entry: InHand | None = None
        try:
            with anyio.CancelScope() as scope:
                while (entry := self._hand.next(time.monotonic())) is not None:
                    entry.handling = scope
                    if self._hand.half_empty and not entry.pair.drained:
                        self._ticker_pause.wake()
                    await self._process(entry)
                    if scope.cancel_called or contextvars.copy_context() != context:
                        break
                    if self._turn_over or time.monotonic() > self._turn_ends:
                        await self._end_turn()
        finally:
            self._lanes -= 1
        if entry is not None:
            self.dispatch()

    async def _end_turn(self) -> None:
        """Let the rest of the process have its turn; all lanes together have one per round of the event loop."""
        if not self._turn_over:
            self._turn_over = True
            asyncio.get_running_loop().call_soon(self._begin_turn)
        await anyio.lowlevel.checkpoint()

    def _begin_turn(self) -> None:
        self._turn_over = False
        self._turn_ends = time.monotonic() + TURN_SECONDS

    async def _process(self, entry: InHand) -> None:
        begun = time.monotonic()
        outcome = None
        try:
            outcome = await self._outcome(entry)
        finally:
            self._hand.ended(entry, time.monotonic() - begun, to_write=outcome is not None)
        if outcome is not None:
            self._writer.add(outcome)

    async def _outcome(self, entry: InHand) -> Outcome:
        """Run the handler. A cancellation that is ours comes out again: there is no outcome then."""
        handler, message = entry.pair.handler, entry.message
        if message.attempt > handler.options.max_attempts:
            _log_failed("message_dead", entry, "its attempts were used up by workers that died")
            return Outcome(entry, buried=True)
        try:
            if handler.options.timeout is None:
                await handler.run(handler.prepared(message))
            else:
                await _run_in(handler.options.timeout, handler, message)
        except anyio.get_cancelled_exc_class() as error:
            if anyio.current_effective_deadline() == -math.inf:  # the pair is lost, or we are being stopped
                raise
            return self._failed(entry, error)  # the handler let out a cancellation of something else
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a handler raises is the message's outcome
            return self._failed(entry, error)
        return Outcome(entry)

    def _failed(self, entry: InHand, error: BaseException) -> Outcome:
        options, message = entry.pair.handler.options, entry.message
        final = isinstance(error, RejectMessage) or message.attempt >= options.max_attempts
        retry_in = None if final else options.backoff.seconds(message.attempt)
        _log_failed("message_dead" if final else "message_failed", entry, f"{type(error).__name__}: {error}")
        return Outcome(entry, failure(error, retry_in))


async def _run_in(limit: timedelta, handler: QueueHandler, message: RawMessage) -> None:
    with anyio.move_on_after(limit.total_seconds()) as scope:
        await handler.run(handler.prepared(message))
    if scope.cancelled_caught:
        raise TimeoutError(f"the handler ran for more than {limit.total_seconds():g} s")


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
