"""Publisher: leases due ticks of a sink outside this database and hands them to it."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import count
from typing import TypeVar

import anyio
import structlog
from anyio.abc import TaskGroup

from cron_ticks.database import PASSING_ERRORS
from cron_ticks.firing import CATCHING_UP, DUE_NOW, CatchUpWith, log_not_sent, seconds_to_sleep, shown, shown_ms
from cron_ticks.isolation import isolate
from cron_ticks.lease_repository import FailedTick, Leased
from cron_ticks.loops import Pause, backoff_seconds
from cron_ticks.metrics import Metrics
from cron_ticks.repository import CronRepository
from cron_ticks.rows import DeliveredTick, LeasedTick
from cron_ticks.settings import Settings
from cron_ticks.sinks import DEADLINE, OutsideSink, RejectTick, UnknownOutcome
from cron_ticks.tick_floors import OF_A_TURN, TickFloors

log = structlog.get_logger("cron_ticks.publishing")

FRESH = 0.05  # of a lease: what was renewed so lately need not be renewed before a call
NEAR = 0.6  # of a lease: a call that takes so long is near its deadline
LAST_WORDS_SECONDS = 2.0
BUSY_SECONDS = 0.1
UNSURE = (UnknownOutcome, OSError)  # a connection that broke, a client's timeout: it may have been sent
NO_OUTCOME = "its worker stopped, or lost the database, before it could say what became of it"

T = TypeVar("T")


class Refused(Exception):  # noqa: N818 - what a sink says by raising
    """The sink raised: nothing of the batch was taken."""


class Batch:
    """Leased ticks on their way."""

    def __init__(self, owner: str, ticks: Sequence[LeasedTick], leased_at: float) -> None:
        self.owner = owner
        self.open = {tick.id: tick for tick in ticks}  # what became of them is not known yet
        self.called: dict[str, float] = {}  # the sink may have them; until when it may take
        self.renewed_at = leased_at  # by this process's clock, before the statement was sent
        self.has_retries = any(tick.attempts > 1 for tick in ticks)

    def worth_keeping(self, now: float) -> list[str]:
        """Not what a sink keeps beyond its deadline, though it was told to stop."""
        return [tick_id for tick_id in self.open if self.called.get(tick_id, now) >= now]

    def close(self, ids: Iterable[str]) -> set[str]:
        """What became of these is known, or none of our business any more; those that were still open."""
        return {tick_id for tick_id in list(ids) if self.open.pop(tick_id, None) is not None}


class Publisher:
    """Hands due ticks to a sink, a few calls at once. A sink that hangs holds up itself alone."""

    def __init__(
        self,
        cron: CronRepository,
        sink: OutsideSink,
        settings: Settings,
        *,
        ticker_id: str,
        tasks: TaskGroup,
        pause: Pause,
        catch_up: CatchUpWith,
        hears: Callable[[], bool] = lambda: False,
        metrics: Metrics | None = None,
    ) -> None:
        self.name = f"publisher {sink.name}"
        self._cron = cron
        self._sink = sink
        self._settings = settings
        self._ticker_id = ticker_id
        self._tasks = tasks
        self._pause = pause
        self._catch_up = catch_up
        self._hears = hears
        self._metrics = Metrics() if metrics is None else metrics
        self._metrics.begin(sink.name)
        self._lease = settings.lease_seconds
        self._calls = anyio.CapacityLimiter(sink.concurrency)
        self._retries = anyio.CapacityLimiter(max(1, sink.concurrency - 1))  # a call is left for what is due now
        self._batches: list[Batch] = []
        self._numbers = count(1)
        self._floors = TickFloors()

    def reconsider(self) -> None:
        """There may be news of due ticks: ask anew."""
        self._pause.wake()

    async def run_once(self) -> float:
        """Take as many batches as calls are free; whoever ends one wakes this up."""
        while len(self._batches) < self._sink.concurrency and not self._pause.stopping:
            leased_at, owner = time.monotonic(), f"{self._ticker_id}.{next(self._numbers)}"
            leased = await self._cron.batch_lease_ticks(
                sink=self._sink.name,
                leased_by=owner,
                limit=self._sink.batch_size,
                last_turn=self._last_turn(),
                floors=self._floors.all,
            )
            self._note_over(leased)
            if leased.ticks:
                batch = Batch(owner, leased.ticks, leased_at)
                self._batches.append(batch)
                self._tasks.start_soon(self._deliver, batch)
            if leased.late:
                await self._catch_up(self._sink.name, self._floors.all[:OF_A_TURN])
                self._floors.forget_late()
            if leased.found < self._sink.batch_size:
                due_in = await self._cron.next_due_in(self._sink.name, floors=self._floors)
                wanted = {turn: wait for turn, wait in due_in.items() if turn <= self._last_turn()}
                sleep = seconds_to_sleep(wanted, self._settings, hears=self._hears(), taken=leased.found)
                return min(sleep, max(self._floors.sweep_in, self._settings.ticker_interval_ms / 1000))
        return math.inf

    def _last_turn(self) -> int:
        """What is less important than due now must not take the last place; whoever ends a batch makes room."""
        slow = sum(batch.has_retries for batch in self._batches)
        return CATCHING_UP if slow < max(1, self._sink.concurrency - 1) else DUE_NOW

    def _note_over(self, leased: Leased) -> None:
        """Ticks that end without a delivery."""
        self._metrics.refused.inc(len(leased.refused))
        self._metrics.note_lost(len(leased.given_up), self._metrics.failed.labels(self._sink.name))
        self._metrics.note_lost(len(leased.missed), self._metrics.missed)
        for tick_id in leased.missed:
            log.warning("tick_missed", tick_id=tick_id, sink=self._sink.name)
        for tick_id in leased.refused:
            log.warning("tick_refused", tick_id=tick_id, sink=self._sink.name)
        for tick_id in leased.given_up:
            log.error("tick_failed", tick_id=tick_id, sink=self._sink.name, error="no attempt left, or too old")

    async def _deliver(self, batch: Batch) -> None:
        """Publish a batch; whatever happens, its ticks are ended, failed, given back, or left to their leases."""
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._keep, batch)
                await self._publish(batch)
                group.cancel_scope.cancel()
        finally:
            await self._last_words(batch)
            self._batches.remove(batch)
            self._pause.wake()

    async def _keep(self, batch: Batch) -> None:
        """Ticks that wait for their turn keep their leases."""
        while True:
            await anyio.sleep(self._lease / 3)
            try:
                batch.renewed_at = await self._renew(batch, batch.worth_keeping(time.monotonic()))
            except Exception as error:  # noqa: BLE001 - it is tried again, or the leases run out
                log.warning("leases_not_renewed", sink=self._sink.name, error=shown(error))

    async def _publish(self, batch: Batch) -> None:
        """What has failed before, and what must not be repeated, goes alone: nothing beside it can spoil it."""
        together = [tick for tick in batch.open.values() if not tick.alone]
        alone = [tick for tick in batch.open.values() if tick.alone]
        async with anyio.create_task_group() as group:
            if together:
                group.start_soon(self._guarded, self._publish_together, batch, together)
            for tick in alone:
                group.start_soon(self._guarded, self._publish_alone, batch, [tick])

    async def _guarded(
        self,
        publish: Callable[[Batch, Sequence[LeasedTick]], Awaitable[None]],
        batch: Batch,
        ticks: Sequence[LeasedTick],
    ) -> None:
        """An error of ours, or of the server's, is none of the other calls' business."""
        try:
            await publish(batch, ticks)
        except Exception as error:
            log.exception("delivery_failed", sink=self._sink.name, ticks=len(ticks), error=shown(error))

    async def _publish_together(self, batch: Batch, ticks: Sequence[LeasedTick]) -> None:
        async def call(part: Sequence[LeasedTick]) -> list[LeasedTick]:
            await self._call(batch, part)
            return []

        found = await isolate(ticks, call, is_theirs=lambda error: isinstance(error, Refused))
        failed = [failed_tick(tick, cause(error)) for tick, error in found.failed]
        if found.error is not None:  # nothing goes: those that were not tried alone are not at fault
            failed += [FailedTick(tick.id, tick.attempts, shown(cause(found.error))) for tick in found.left]
        await self._fail(batch, failed)
        if found.trouble is not None:
            raise found.trouble

    async def _publish_alone(self, batch: Batch, ticks: Sequence[LeasedTick]) -> None:
        [tick] = ticks
        try:
            async with self._retries if tick.attempts > 1 else nullcontext():
                await self._call(batch, ticks)
        except Refused as error:
            await self._fail(batch, [failed_tick(tick, cause(error))])

    async def _call(self, batch: Batch, ticks: Sequence[LeasedTick]) -> None:
        """One call of the sink, and what it answers is written. Refused: it has raised, so nothing was taken."""
        async with self._calls:
            held_at = await self._hold(batch, ticks)
            ours = [tick for tick in ticks if tick.id in batch.open]
            if not ours:
                return
            begun, deadline = time.monotonic(), held_at + DEADLINE * self._lease
            batch.called.update({tick.id: deadline for tick in ours})
            try:
                answers = await self._answers(ours, deadline - begun)
            except Refused:
                for tick in ours:
                    del batch.called[tick.id]
                raise
        await self._end(batch, [tick for tick, answer in zip(ours, answers, strict=True) if answer is None])
        failed = [failed_tick(tick, answer) for tick, answer in zip(ours, answers, strict=True) if answer is not None]
        await self._fail(batch, failed)
        self._metrics.lease_duration.observe([time.monotonic() - begun])

    async def _answers(self, ticks: Sequence[LeasedTick], seconds: float) -> list[BaseException | None]:
        """What the sink says of each: None, or why not."""
        nearly = (NEAR - DEADLINE) * self._lease + seconds
        warning = asyncio.get_running_loop().call_later(max(0.0, nearly), self._warn, len(ticks), seconds)
        try:
            with anyio.move_on_after(seconds) as scope:
                answered: object = await self._sink.publish(ticks)
        except UNSURE as error:
            return [error] * len(ticks)
        except (Exception, SystemExit) as error:  # as in a handler, it is not for a sink to end the worker
            raise Refused from error
        finally:
            warning.cancel()
        if scope.cancelled_caught:
            return [UnknownOutcome(f"no answer within {seconds:.1f} s")] * len(ticks)
        if answered is None:
            return [None] * len(ticks)
        if isinstance(answered, str | bytes) or not isinstance(answered, Sequence) or len(answered) != len(ticks):
            problem = UnknownOutcome(
                f"the sink must answer None, or a list with an answer for each of {len(ticks)} ticks"
            )
            return [problem] * len(ticks)
        return [answer if isinstance(answer, BaseException) else None for answer in answered]

    def _warn(self, ticks: int, seconds: float) -> None:
        log.warning("publish_near_deadline", sink=self._sink.name, ticks=ticks, deadline_seconds=round(seconds, 3))

    async def _hold(self, batch: Batch, ticks: Sequence[LeasedTick]) -> float:
        """Make sure of the leases before a call; from when on they hold."""
        if ticks[0].delivery == "at_most_once":  # it is alone
            return await self._pin(batch, ticks[0].id)
        if time.monotonic() > batch.renewed_at + FRESH * self._lease:
            batch.renewed_at = await self._renew(batch, batch.worth_keeping(time.monotonic()))
        return batch.renewed_at

    async def _pin(self, batch: Batch, tick_id: str) -> float:
        """Nobody else may send it any more. Somebody may have its row locked just now: an edit, or our own renewal."""
        asked_at = time.monotonic()
        while not await self._cron.renew_leases([tick_id], leased_by=batch.owner, for_good=True):
            await self._renew(batch, [tick_id])
            if tick_id not in batch.open:
                break
            await anyio.sleep(BUSY_SECONDS)
            asked_at = time.monotonic()
        return asked_at

    async def _renew(self, batch: Batch, ids: Sequence[str]) -> float:
        asked_at = time.monotonic()
        kept = await self._cron.renew_leases(ids, leased_by=batch.owner)
        self._note_lost(batch, batch.close(tick_id for tick_id in ids if tick_id not in kept))
        return asked_at

    def _note_lost(self, batch: Batch, ids: set[str]) -> None:
        """Somebody else may have taken them over: they are none of ours any more."""
        for tick_id in ids:
            called = tick_id in batch.called
            log.warning("tick_lease_lost", tick_id=tick_id, sink=self._sink.name, maybe_delivered=called)

    async def _end(self, batch: Batch, ticks: Sequence[LeasedTick]) -> None:
        async def end(ids: set[str]) -> set[str]:
            ended = await self._cron.delete_ticks(ids, leased_by=batch.owner)
            self._note_ended(ended)
            return {tick.id for tick in ended}

        await self._settle(batch, {tick.id for tick in ticks}, end)

    async def _fail(self, batch: Batch, failed: Sequence[FailedTick]) -> None:
        if not failed:
            return

        async def fail(ids: set[str]) -> set[str]:
            mine = [tick for tick in failed if tick.id in ids]
            over = await self._cron.fail_ticks(mine, ticker_id=self._ticker_id, leased_by=batch.owner)
            self._metrics.note_not_sent(self._sink.name, over)
            for tick in mine:
                if tick.id in over:
                    log_not_sent(tick, self._sink.name, final=over[tick.id])
            return set(over)

        await self._settle(batch, {tick.id for tick in failed}, fail)
        self._pause.wake()  # they are due again before long

    async def _settle(self, batch: Batch, ids: set[str], write: Callable[[set[str]], Awaitable[set[str]]]) -> None:
        """Write what became of ticks. One that an edit has locked is tried again while it is ours."""
        left = batch.close(ids)
        while left:
            left = left - await self._write(batch, partial(write, left))
            if left:
                ours = await self._write(batch, partial(self._cron.renew_leases, left, leased_by=batch.owner))
                self._note_lost(batch, left - ours)
                left = left & ours
                await anyio.sleep(BUSY_SECONDS)

    def _note_ended(self, ended: Sequence[DeliveredTick]) -> None:
        self._metrics.note_fired((tick.origin, [tick.lateness.total_seconds()]) for tick in ended)
        self._metrics.recovered.labels(self._sink.name).inc(sum(tick.recovery for tick in ended))
        if ended:
            late = shown_ms(max(tick.lateness for tick in ended))
            log.info("ticks_fired", sink=self._sink.name, ticks=len(ended), lateness_max_ms=late)

    async def _write(self, batch: Batch, write: Callable[[], Awaitable[T]]) -> T:
        """While the leases last: what was delivered must not be delivered again because the server was away."""
        attempts = 0
        try:
            while True:
                try:
                    return await write()
                except PASSING_ERRORS as error:
                    attempts += 1
                    delay = backoff_seconds(attempts)
                    if time.monotonic() + delay > batch.renewed_at + self._lease:
                        raise
                    log.warning("outcome_not_written", sink=self._sink.name, error=shown(error))
                    await anyio.sleep(delay)
        except anyio.get_cancelled_exc_class():  # the worker stops: what is known is still written
            with anyio.move_on_after(LAST_WORDS_SECONDS, shield=True):
                await write()
            raise

    async def _last_words(self, batch: Batch) -> None:
        """A worker that stops, or a failure of ours: others need not wait for the leases to run out."""
        called = [tick for tick in batch.open.values() if tick.id in batch.called]
        uncalled = [tick_id for tick_id in batch.open if tick_id not in batch.called]
        failed = [FailedTick(tick.id, tick.attempts, NO_OUTCOME, unsure=True) for tick in called]
        with anyio.move_on_after(LAST_WORDS_SECONDS, shield=True):
            try:
                await self._fail(batch, failed)
                if uncalled:
                    await self._cron.release_leases(uncalled, leased_by=batch.owner)
            except Exception as error:  # noqa: BLE001 - the leases run out
                log.warning("outcome_not_written", sink=self._sink.name, error=shown(error))


def cause(refused: Exception) -> BaseException:
    """What the sink raised."""
    return refused.__cause__ or refused


def failed_tick(tick: LeasedTick, error: BaseException) -> FailedTick:
    """What there is to say of a tick that the sink did not take."""
    final = isinstance(error, RejectTick)
    return FailedTick(tick.id, tick.attempts, shown(error), final=final, unsure=isinstance(error, UNSURE))
