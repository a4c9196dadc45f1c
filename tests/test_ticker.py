"""The sleep of what fires and fetches, and its waking up: what is due is never slept over."""

import asyncio
import math
from datetime import timedelta
from typing import Any

import anyio
import pytest

from cron_ticks.database import Database
from cron_ticks.repository import CronRepository
from cron_ticks.schedules import define_schedule
from cron_ticks.settings import Settings
from cron_ticks.tick_floors import TickFloors
from support.rig import handling, rig
from token_queue import Message, QueueManager

SECOND = timedelta(seconds=1)


async def handle(_message: Message) -> None: ...


async def test_a_notice_that_comes_while_it_asks_is_not_forgotten(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(database, handling(handle), hears=True) as worker:
        ask = CronRepository.next_due_in

        async def ask_while_ticks_are_made(
            repository: CronRepository, sink: str, *, floors: TickFloors
        ) -> dict[int, timedelta]:
            due_in = await ask(repository, sink, floors=floors)
            worker.firer.reconsider()
            return due_in

        monkeypatch.setattr(CronRepository, "next_due_in", ask_while_ticks_are_made)
        sleep = await worker.firer.run_once()
        assert sleep > 1
        with anyio.fail_after(sleep / 2):
            await worker.firer_pause.sleep(sleep)


async def test_a_notice_that_comes_while_it_fetches_is_not_forgotten(
    database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler of the pair is running, so nobody else will look there."""
    running, done = asyncio.Event(), asyncio.Event()

    async def hold(_message: Message) -> None:
        running.set()
        await done.wait()

    async with rig(database, handling(hold), hears=True) as worker:
        fetch = worker.queue.fetch

        async def fetch_while_one_is_sent(*arguments: Any, **options: Any) -> Any:
            fetched = await fetch(*arguments, **options)
            worker.ticker.notice("queue")
            return fetched

        async with QueueManager(settings=settings) as sender:
            await sender.send("queue")
        monkeypatch.setattr(worker.queue, "fetch", fetch_while_one_is_sent)
        await worker.ticker.run_once()
        await running.wait()
        [pair] = worker.hand.pairs.values()
        assert pair.fetch_at == 0
        monkeypatch.undo()
        await worker.ticker.run_once()
        assert 0 < pair.fetch_at < math.inf
        done.set()


async def test_a_firing_that_fails_is_tried_again_with_the_next_pass(
    database: Database, settings: Settings, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not only when the ticker would have asked anyway, seconds later."""
    repository = CronRepository(database, settings)
    async with rig(database, handling(handle), hears=True) as worker:
        await worker.firer.run_once()
        await repository.save_schedule(define_schedule("queue", every=3600))

        async def fail(*_arguments: Any, **_options: Any) -> Any:
            raise ConnectionResetError

        monkeypatch.setattr(CronRepository, "fire_due_ticks", fail)
        with pytest.raises(ConnectionResetError):
            await worker.firer.run_once()
        monkeypatch.undo()
        await worker.firer.run_once()
    assert await connection.fetchval("SELECT count(*) FROM cron_runs") == 1


async def test_it_sleeps_exactly_until_the_next_tick(database: Database, settings: Settings, connection: Any) -> None:
    """Sooner than its next poll, and no sooner than it is due; it has just fired, so that it need not rehearse."""
    now = await connection.fetchval("SELECT statement_timestamp()")
    due = now + 20 * SECOND
    repository = CronRepository(database, settings)
    await repository.save_schedule(define_schedule("queue", every=3600, name="first"), now=now)
    await repository.save_schedule(define_schedule("queue", every=3600), now=due)
    async with rig(database, handling(handle), ticker_interval_ms=60_000) as worker:
        sleep = await worker.firer.run_once()
    left = (due - await connection.fetchval("SELECT statement_timestamp()")).total_seconds()
    assert left <= sleep < 20


async def test_ticks_in_others_hands_are_not_asked_for_all_the_time(
    database: Database, settings: Settings, connection: Any
) -> None:
    """An edit in an open transaction of the application's holds them, for as long as it likes."""
    saved = await CronRepository(database, settings).save_schedule(define_schedule("queue", every=3600))
    async with connection.transaction():
        await connection.execute("SELECT FROM cron_ticks WHERE schedule_id = $1 FOR UPDATE", saved.schedule.id)
        async with rig(database, handling(handle)) as worker:
            assert await worker.firer.run_once() >= 0.05


@pytest.mark.parametrize("pods", [1, 2])
async def test_a_scheduled_message_does_not_wait_for_a_running_handler_of_its_queue(
    settings: Settings, pods: int
) -> None:
    """Whoever fires it and whoever holds the pair: while one handler runs, the next occurrence is handled too."""
    begun: list[str] = []
    second = asyncio.Event()

    async def wait_for_the_second(message: Message) -> None:
        begun.append(message.id)
        if len(begun) >= 2:
            second.set()
        await second.wait()

    managers = [QueueManager(settings=settings) for _ in range(pods)]
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        for manager in managers:
            manager.handler("queue", concurrency=5)(wait_for_the_second)
            tasks.create_task(run(manager, second))
    assert len(set(begun)) >= 2


async def run(manager: QueueManager, until: asyncio.Event) -> None:
    async with manager, asyncio.TaskGroup() as tasks:
        await manager.schedule("queue", every=2, jitter=None)
        tasks.create_task(manager.run(handle_signals=False))
        await until.wait()
        manager.stop()
