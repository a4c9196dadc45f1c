"""TickFirer: turns due ticks into messages of a sink in this database, as soon as they are due."""

import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple, Protocol

import asyncpg
import structlog

from cron_ticks.database import PASSING_ERRORS
from cron_ticks.isolation import isolate
from cron_ticks.lease_repository import FailedTick
from cron_ticks.loops import Pause
from cron_ticks.metrics import Metrics
from cron_ticks.repository import CronRepository
from cron_ticks.rows import DueTick, FiredTicks, count_of
from cron_ticks.settings import Settings
from cron_ticks.sinks import SameDatabaseSink
from cron_ticks.tick_floors import OF_A_TURN, TickFloors

log = structlog.get_logger("cron_ticks.firing")

EVENTS = {
    "refused": (logging.WARNING, "tick_refused"),
    "overlapped": (logging.INFO, "tick_overlapped"),
    "missed": (logging.WARNING, "tick_missed"),
    "waiting": (logging.DEBUG, "tick_waiting"),
}
SPREAD = (0.8, 1.0)  # of a pause, so that the tickers of many pods don't ask in step
DUE_NOW, RETRY, CATCHING_UP = range(3)  # as the database numbers them
CROWD = 2000  # ticks a second: more of them wait for each other a little, because a larger batch costs less per tick
QUIET_SECONDS = 30.0  # without a firing; after that, one is rehearsed before the next tick is due
REHEARSAL_SECONDS = 0.25  # before it
RETRIES_AT_ONCE = 50  # what has failed may well fail again: then each costs some statements

# What is the server's trouble and passes with it. A function of the user's may raise anything else.
TROUBLE = (
    *PASSING_ERRORS,
    asyncpg.InsufficientResourcesError,
    asyncpg.InternalServerError,
    asyncpg.LockNotAvailableError,
    asyncpg.InvalidTransactionStateError,
    asyncpg.PostgresSystemError,
    asyncpg.TransactionRollbackError,
)
ALSO_OF_USERS = (TimeoutError, asyncpg.QueryCanceledError, asyncpg.InternalServerError)  # code that hangs, or in C


# Decides about a sink's ticks that nobody fired in time, from where nothing is left below.
CatchUpWith = Callable[[str, Sequence[datetime | None]], Awaitable[None]]


class OnFired(Protocol):
    """Is told of each batch that was fired; `more` follow at once."""

    async def __call__(self, fired: Sequence[FiredTicks], *, more: bool) -> None:
        """A batch."""
        ...


class Fired(NamedTuple):
    """What became of a batch."""

    taken: list[FiredTicks]
    finished: bool = False  # nothing is left that was due
    trouble: Exception | None = None  # the sink's, and no tick's


class TickFirer:
    """Fires the ticks of one sink. Trouble with them is none of the messages', nor of another sink's."""

    def __init__(
        self,
        cron: CronRepository,
        sink: SameDatabaseSink,
        settings: Settings,
        *,
        ticker_id: str,
        pause: Pause,
        catch_up: CatchUpWith,
        hears: Callable[[], bool] = lambda: False,
        on_fired: OnFired | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.name = f"tick-firer {sink.name}"
        self._cron = cron
        self._sink = sink
        self._settings = settings
        self._log_each = settings.log_level == "debug"  # a line per tick is not for free
        self._ticker_id = ticker_id
        self._pause = pause
        self._catch_up = catch_up
        self._hears = hears
        self._on_fired = on_fired
        self._metrics = Metrics() if metrics is None else metrics
        self._metrics.begin(sink.name)
        self._known: dict[int, float] = {}  # when a tick is due, per turn
        self._floors = TickFloors()
        self._passed_at = -math.inf
        self._ready_until = math.inf if settings.transaction_pooler else -math.inf  # there, no plan is kept

    def reconsider(self) -> None:
        """What was known of the next tick may not hold any more: ask anew."""
        self._pause.wake()

    async def run_once(self) -> float:
        """Fire what is due, the most important first, and sleep until the next is."""
        now = time.monotonic()
        due_in = {turn: timedelta(0) for turn, moment in self._known.items() if moment <= now}
        self._known = {}
        if not due_in:
            due_in = await self._ask()
            if due_in.get(DUE_NOW, timedelta(0)) < -timedelta(seconds=self._settings.missed_after_seconds):
                await self._catch_up(self._sink.name, self._floors.all[:OF_A_TURN])
                self._floors.forget_late()
                due_in = await self._ask()
        due = [turn for turn, wait in due_in.items() if wait <= timedelta(0)]
        taken = 0
        for turn in due:
            taken += await self._fire_turn(turn)
        if due:
            due_in = await self._ask()
        now = time.monotonic()
        crowded = taken > CROWD * (now - self._passed_at)
        self._passed_at = now
        if taken:
            self._ready_until = max(self._ready_until, now + QUIET_SECONDS)
        self._known = {turn: now + wait.total_seconds() for turn, wait in due_in.items() if wait > timedelta(0)}
        sleep = seconds_to_sleep(due_in, self._settings, hears=self._hears(), taken=taken)
        if crowded:
            return max(sleep, self._settings.ticker_interval_ms / 2000)
        sleep = min(sleep, max(self._floors.sweep_in, self._settings.ticker_interval_ms / 1000))
        return await self._rehearsed(sleep)

    async def _rehearsed(self, sleep: float) -> float:
        """How long to sleep until a tick is due, or until it is time to rehearse it after a quiet time.

        The connection may be new by then, and the server has to plan the statement: a tick need not wait for that.
        """
        now = time.monotonic()
        due_at = min(self._known.values(), default=math.inf)
        if now < self._ready_until or now + sleep < due_at - REHEARSAL_SECONDS:
            return sleep
        if now < due_at - REHEARSAL_SECONDS:
            return due_at - REHEARSAL_SECONDS - now
        await self._cron.fire_due_ticks(self._sink, ticker_id=self._ticker_id, limit=0, each=self._log_each)
        self._ready_until = max(self._ready_until, now + QUIET_SECONDS)
        return max(0.0, now + sleep - time.monotonic())

    async def _ask(self) -> dict[int, timedelta]:
        return await self._cron.next_due_in(self._sink.name, floors=self._floors)

    async def _fire_turn(self, turn: int) -> int:
        """Fire what is due now; of what is less important a batch, because more of the rest may be due by then."""
        most = self._settings.ticker_batch_size
        limit = min(most, RETRIES_AT_ONCE) if turn == RETRY else most
        total, due_until = 0, None
        while True:
            begun = time.monotonic()
            batch = await self._fire_batch(turn, limit, due_until)
            if batch.taken:
                due_until = batch.taken[0].due_until
                self._floors.note_taken(turn, batch.taken)
                self._metrics.lease_duration.observe([time.monotonic() - begun])
                self._note(batch.taken)
            total += count_of(batch.taken)
            finished = batch.finished or turn != DUE_NOW or batch.trouble is not None
            if total and self._on_fired is not None:
                await self._on_fired([ticks for ticks in batch.taken if ticks.passed], more=not finished)
            if batch.trouble is not None:
                raise batch.trouble
            if finished:
                return total

    async def _fire_batch(self, turn: int, limit: int, due_until: datetime | None) -> Fired:
        """One statement, unless something in the batch can't be fired."""
        try:
            taken = await self._cron.fire_due_ticks(
                self._sink,
                ticker_id=self._ticker_id,
                limit=limit,
                turn=turn,
                due_until=due_until,
                floors=self._floors.reached(turn),
                each=self._log_each,
            )
        except (asyncpg.PostgresError, TimeoutError) as error:
            if not self._is_theirs(error):
                raise
            too_long = isinstance(error, TimeoutError)
            return await self._isolate(turn, limit, due_until or await self._cron.clock(), took_too_long=too_long)
        return Fired(taken, finished=count_of(taken) < limit)

    async def _isolate(self, turn: int, limit: int, due_until: datetime, *, took_too_long: bool) -> Fired:
        """The same in parts: what can't be fired is failed, and the rest goes out nevertheless."""

        async def fire(ticks: Sequence[DueTick]) -> list[FiredTicks]:
            ids = [tick.id for tick in ticks]
            return await self._cron.fire_chosen_ticks(
                self._sink, ids, ticker_id=self._ticker_id, turn=turn, due_until=due_until, each=self._log_each
            )

        due = await self._cron.find_due_ticks(self._sink.name, turn=turn, limit=limit, due_until=due_until)
        found = await isolate(due, fire, is_theirs=self._is_theirs, took_too_long=took_too_long)
        trouble = found.trouble
        if trouble is None and found.error is not None and not found.any_went:
            trouble = await self._sinks_trouble(found.error, fire)
        if trouble is not None:  # no tick's fault, and no attempt of theirs
            return Fired(found.done, trouble=trouble)
        failed = await self._fail([FailedTick(tick.id, tick.attempts, shown(error)) for tick, error in found.failed])
        return Fired(found.done, finished=not (found.done or failed))

    async def _sinks_trouble(
        self, error: Exception, fire: Callable[[Sequence[DueTick]], Awaitable[object]]
    ) -> Exception | None:
        """Nothing went. Can the statement run at all, with nothing to fire? Not if the table is gone, or locked."""
        if isinstance(error, TROUBLE) and not isinstance(error, ALSO_OF_USERS):
            return error
        try:
            await fire([])
        except (asyncpg.PostgresError, TimeoutError) as problem:
            return problem
        return None

    async def _fail(self, failed: Sequence[FailedTick]) -> int:
        if not failed:
            return 0
        over = await self._cron.fail_ticks(failed, ticker_id=self._ticker_id)
        self._metrics.note_not_sent(self._sink.name, over)
        for tick in failed:
            if tick.id in over:
                log_not_sent(tick, self._sink.name, final=over[tick.id])
        return len(over)

    def _is_theirs(self, error: Exception) -> bool:
        """Whether a tick may be the reason. Code of the user's may take too long, and raise whatever it likes."""
        if self._sink.deadline_seconds is not None:
            return isinstance(error, TimeoutError) or getattr(error, "severity_en", None) == "ERROR"
        return isinstance(error, asyncpg.PostgresError) and not isinstance(error, TROUBLE)

    def _note(self, taken: Sequence[FiredTicks]) -> None:
        fired = [ticks for ticks in taken if ticks.passed]
        self._metrics.note_fired((ticks.origin, ticks.lateness_seconds) for ticks in fired)
        if len(fired) < len(taken):
            self._note_not_fired([tick for tick in taken if not tick.passed])
        if fired:
            late = shown_ms(max(ticks.lateness for ticks in fired))
            log.info("ticks_fired", sink=self._sink.name, ticks=count_of(fired), lateness_max_ms=late)
        if self._log_each:
            _log_fired(fired)

    def _note_not_fired(self, ticks: Sequence[FiredTicks]) -> None:
        """Occurrences that had fired before, that came before the end of the last one's message, or were too late.

        Each stands for itself.
        """
        refused = [tick for tick in ticks if tick.outcome == "refused"]
        self._metrics.refused.inc(len(refused))
        self._metrics.note_lost(sum(tick.outcome == "missed" for tick in ticks), self._metrics.missed)
        self._metrics.note_overlapped([tick.origin for tick in ticks if tick.outcome == "overlapped"])
        for tick in ticks:
            log.log(
                *EVENTS[tick.outcome],
                tick_id=tick.id,
                schedule_id=tick.schedule_id,
                scheduled_for=tick.scheduled_for.isoformat(),
            )


def seconds_to_sleep(due_in: dict[int, timedelta], settings: Settings, *, hears: bool, taken: int) -> float:
    """Until the next tick of a sink is due, if that is near; else until it is time to ask again, unless told to."""
    interval = settings.ticker_interval_ms / 1000
    longest = settings.ticker_idle_seconds if hears else interval
    wait = min((wait.total_seconds() for wait in due_in.values()), default=math.inf)
    if wait <= 0:  # it became due meanwhile; or it is in others' hands, who may keep it for long
        return interval / 10 if taken else interval
    return wait if wait <= 1.5 * longest else longest * random.uniform(*SPREAD)  # noqa: S311 - no secret


def log_not_sent(tick: FailedTick, sink: str, *, final: bool) -> None:
    """A tick that could not be sent: whether it is tried again."""
    if final:
        log.error("tick_failed", tick_id=tick.id, sink=sink, error=tick.error)
    else:
        log.warning("tick_not_sent", tick_id=tick.id, sink=sink, error=tick.error, recovery=tick.unsure)


def shown(error: BaseException) -> str:
    """What is kept of an error. PostgreSQL's details are not: they show rows, and with them payloads."""
    said = getattr(error, "message", None) if isinstance(error, asyncpg.PostgresError) else None
    text = said or str(error) or ("it took too long" if isinstance(error, TimeoutError) else "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _log_fired(fired: Sequence[FiredTicks]) -> None:
    for tick in fired:
        log.debug(
            "tick_fired",
            tick_id=tick.id,
            schedule_id=tick.schedule_id,
            schedule=tick.schedule_name,
            scheduled_for=tick.scheduled_for.isoformat(),
            lateness_ms=shown_ms(tick.lateness),
        )


def shown_ms(lateness: timedelta) -> float:
    """For a line of the log."""
    return round(max(0.0, lateness.total_seconds()) * 1000, 1)
