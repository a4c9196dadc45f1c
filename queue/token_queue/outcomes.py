"""Writes what became of messages: everything that has ended since the last write, in as few statements as possible."""

import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import anyio
import structlog

from cron_ticks.database import PASSING_ERRORS
from cron_ticks.loops import Pause
from cron_ticks.repository import CronRepository
from token_queue.hand import Hand, InHand, Pair
from token_queue.queue_repository import Failure, QueueRepository

log = structlog.get_logger("token_queue.outcomes")

LONG_SLEEP_SECONDS = 3600.0
LONGEST_TRACEBACK = 20_000


@dataclass(frozen=True, slots=True)
class Outcome:
    """A message has ended: completed, unless there is a failure; buried if it had no attempt left to begin with."""

    entry: InHand
    failure: Failure | None = None
    buried: bool = False

    @property
    def finished(self) -> bool:
        """Completed or dead."""
        return self.failure is None or self.failure.retry_in is None


class OutcomeWriter:
    """Writes outcomes and lets go of tokens; on an error it keeps them and tries again while the server is away."""

    name = "outcome-writer"

    def __init__(
        self, queue: QueueRepository, hand: Hand, *, cron: CronRepository, pause: Pause, ticker_pause: Pause
    ) -> None:
        self._queue = queue
        self._cron = cron
        self._hand = hand
        self._pause = pause
        self._ticker_pause = ticker_pause
        self._writing = anyio.Lock()
        self._outcomes: list[Outcome] = []

    def add(self, outcome: Outcome) -> None:
        """To be written soon."""
        self._outcomes.append(outcome)
        self._pause.wake()

    def wake(self) -> None:
        """Some pairs may be finished."""
        self._pause.wake()

    async def run_once(self) -> float:
        """Write everything that is there, and let go of pairs that are finished with it."""
        async with self._writing:
            outcomes, self._outcomes = self._outcomes, []
            finished = self._hand.take_finished()
            if outcomes or finished:
                try:
                    ours = await self._write_all(outcomes, finished)
                except BaseException:
                    self._outcomes[:0] = outcomes
                    for pair in finished:
                        pair.releasing = False
                    raise
                self._note_written(outcomes, finished, ours)
                await self._release_waiting(outcomes)
        return 0.0 if self._outcomes else LONG_SLEEP_SECONDS

    async def flush(self) -> None:
        """Write all that has ended, after the write under way."""
        while await self.run_once() == 0:
            pass

    async def _write_all(self, outcomes: Sequence[Outcome], finished: Sequence[Pair]) -> set[str]:
        """The tokens that are still ours, of all those concerned."""
        try:
            return await self._write(outcomes, finished)
        except PASSING_ERRORS:
            raise
        except Exception as error:
            log.exception("outcome_refused", messages=len(outcomes), error=str(error))
        ours: set[str] = set()
        for outcome in outcomes:  # one by one: only what the database refuses is lost
            ours |= await self._write_refused(outcome)
        return ours | await self._write([], finished)

    async def _write_refused(self, outcome: Outcome) -> set[str]:
        """What can't be completed counts as a failure; what can't fail either leaves its token to run out."""
        message = outcome.entry.message
        for attempt in (outcome, Outcome(outcome.entry, outcome.failure or _refusal())):
            try:
                return await self._write([attempt], [])
            except PASSING_ERRORS:
                raise
            except Exception as error:
                log.exception("outcome_refused", message_id=message.id, queue=message.queue_name, error=str(error))
        return set()

    async def _write(self, outcomes: Sequence[Outcome], finished: Sequence[Pair]) -> set[str]:
        failed = [
            (_key(outcome), outcome.entry.message.attempt, outcome.failure)
            for outcome in outcomes
            if outcome.failure is not None
        ]
        buried = [_key(outcome) for outcome in outcomes if outcome.buried]
        completed = [_key(outcome) for outcome in outcomes if outcome.failure is None and not outcome.buried]
        ours: set[str] = set()
        if failed:
            ours |= await self._queue.fail(failed)
        if buried:
            ours |= await self._queue.bury(buried)
        if completed or finished:
            ours |= await self._queue.complete(completed, release=[pair.token_id for pair in finished])
        if finished and self._hand.stopping:  # what is left of them is for others
            await self._queue.wake_workers(sorted({pair.handler.queue_name for pair in finished}))
        return ours

    async def _release_waiting(self, outcomes: Sequence[Outcome]) -> None:
        """Ticks that wait for the end of these messages; whoever fires them looks by himself too, but later."""
        schedules = {outcome.entry.message.exclusive_for for outcome in outcomes if outcome.finished}
        waiting = [schedule_id for schedule_id in schedules if schedule_id is not None]
        if waiting:
            try:
                await self._cron.release_waiting(waiting)
            except PASSING_ERRORS as error:
                log.warning("waiting_not_released", schedules=len(waiting), error=str(error))

    def _note_written(self, outcomes: Sequence[Outcome], finished: Sequence[Pair], ours: set[str]) -> None:
        now = time.monotonic()
        for outcome in outcomes:
            pair = outcome.entry.pair
            pair.unwritten.discard(outcome.entry.message.id)
            if pair.token_id not in ours:
                self._hand.lose(pair)
            elif outcome.failure is not None and outcome.failure.retry_in is not None:
                pair.fetch_at = min(pair.fetch_at, now + outcome.failure.retry_in.total_seconds())
        for pair in finished:
            self._hand.released(pair)
        # A pair that was let go of may have got a message meanwhile: whoever was woken by that saw our token.
        if finished or self._hand.crowded or self._hand.wanting(time.monotonic()):
            self._ticker_pause.wake()


def failure(error: BaseException, retry_in: float | None) -> Failure:
    """What is kept of an error; without a retry the message is dead."""
    frames = "".join(traceback.format_exception(error))
    return Failure(
        error_type=type(error).__name__,
        error_message=str(error),
        error_traceback=frames[-LONGEST_TRACEBACK:],
        retry_in=None if retry_in is None else timedelta(seconds=retry_in),
    )


def _refusal() -> Failure:
    return Failure("OutcomeRefused", "the database refused to complete the message", None, timedelta(seconds=60))


def _key(outcome: Outcome) -> tuple[str, str]:
    return outcome.entry.message.id, outcome.entry.pair.token_id
