"""A worker in parts: tests call its passes one by one, without the loops around them."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio

from cron_ticks.database import Database
from cron_ticks.firing import TickFirer
from cron_ticks.loops import Pause
from cron_ticks.metrics import Metrics
from cron_ticks.repository import CronRepository
from cron_ticks.schedule_manager import ScheduleManager
from cron_ticks.settings import Settings
from token_queue.floors import Floors
from token_queue.hand import Hand
from token_queue.handlers import Handlers
from token_queue.lanes import Lanes
from token_queue.outcomes import OutcomeWriter
from token_queue.queue_repository import QUEUE_SINK, QueueRepository
from token_queue.ticker import MessageTicker, TokenRenewal


@dataclass(frozen=True)
class Rig:
    """The parts, wired as a worker wires them."""

    queue: QueueRepository
    hand: Hand
    writer: OutcomeWriter
    firer: TickFirer
    firer_pause: Pause
    ticker: MessageTicker
    renewal: TokenRenewal

    async def turn(self) -> None:
        """One pass: due ticks are fired, messages taken; handlers run to their end and what they did is written."""
        await self.firer.run_once()
        await self.ticker.run_once()
        await self.settle()

    async def settle(self) -> None:
        with anyio.fail_after(30):
            while self.hand.running or self.hand.waiting:
                await anyio.lowlevel.checkpoint()
        await self.writer.flush()

    async def drain(self) -> None:
        """Turns until there is nothing due any more."""
        while True:
            await self.turn()
            if not self.hand.pairs:
                await self.ticker.run_once()
                if not self.hand.pairs:
                    return
                await self.settle()


def handling(function: Callable[..., Any], queue: str = "queue", **options: Any) -> Handlers:
    """That handler alone."""
    handlers = Handlers(Settings())
    handlers.register(queue, function, **options)
    return handlers


@asynccontextmanager
async def rig(
    database: Database,
    handlers: Handlers,
    *,
    worker_id: str = "ticker_me",
    metrics: Metrics | None = None,
    hears: bool = False,
    floors: Floors | None = None,
    **changes: Any,
) -> AsyncIterator[Rig]:
    """The parts of a worker; when the block ends, its handlers have ended too and everything is written."""
    settings = Settings.load(**changes)
    queue = QueueRepository(database, worker_id, events=settings.events)
    most = settings.message_concurrency
    hand = Hand(handlers.all(), concurrency=most, most=settings.message_batch_size)
    writer_pause, ticker_pause, firer_pause = Pause(), Pause(), Pause()
    cron = CronRepository(database, settings)
    writer = OutcomeWriter(queue, hand, cron=cron, pause=writer_pause, ticker_pause=ticker_pause)
    try:
        async with anyio.create_task_group() as tasks:
            lanes = Lanes(hand, writer, tasks=tasks, most=most, ticker_pause=ticker_pause)
            ticker = MessageTicker(
                queue,
                handlers,
                settings,
                hand=hand,
                lanes=lanes,
                writer=writer,
                pause=ticker_pause,
                hears=lambda: hears,
                floors=floors,
            )
            firer = TickFirer(
                cron,
                QUEUE_SINK,
                settings,
                ticker_id=worker_id,
                pause=firer_pause,
                catch_up=ScheduleManager(database, cron, settings).catch_up,
                hears=lambda: hears,
                on_fired=ticker.note_fired,
                metrics=metrics,
            )
            yield Rig(queue, hand, writer, firer, firer_pause, ticker, TokenRenewal(hand, lanes, queue, settings))
    finally:
        with anyio.CancelScope(shield=True):
            hand.stop()
            await writer.flush()
