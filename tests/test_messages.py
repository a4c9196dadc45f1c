"""Messages: claimed by one worker, completed, retried, buried, given back."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import anyio
import asyncpg
import pytest
from structlog.testing import capture_logs

from cron_ticks.database import Database
from cron_ticks.errors import InvalidInputError
from cron_ticks.ids import new_message_id
from cron_ticks.loops import Pause
from cron_ticks.repository import CronRepository
from cron_ticks.settings import Settings
from token_queue import Message, QueueManager
from token_queue.handlers import Handler, Handlers
from token_queue.queue_repository import QueueRepository
from token_queue.ticker import ClaimRenewal, MessageTicker, retry_seconds

pytestmark = pytest.mark.sql

LEASE = timedelta(seconds=10)


async def insert_message(connection: Any, queue: str = "queue", *, delay: timedelta = timedelta(0)) -> str:
    message_id = new_message_id()
    await connection.execute(
        """INSERT INTO queue_messages (id, queue_name, payload, process_after, inserted_at)
        VALUES ($1, $2, '{"n": 1}', statement_timestamp() + $3::interval, statement_timestamp())""",
        message_id,
        queue,
        delay,
    )
    return message_id


async def state(connection: Any, message_id: str) -> asyncpg.Record:
    found: asyncpg.Record = await connection.fetchrow(
        """SELECT attempts, claimed_by, last_error, completed_at IS NOT NULL AS completed, dlq_at IS NOT NULL AS dead,
            process_after - statement_timestamp() AS wait
        FROM queue_messages WHERE id = $1""",
        message_id,
    )
    return found


def handling(handler: Handler) -> Handlers:
    """That handler, for the queue `queue`."""
    handlers = Handlers()
    handlers.register("queue", handler)
    return handlers


@asynccontextmanager
async def ticker_with(database: Database, handlers: Handlers, **changes: Any) -> AsyncIterator[MessageTicker]:
    """A ticker whose handlers have ended when the block ends."""
    queue = QueueRepository(database, "ticker_me")
    settings = Settings.load(**changes)
    async with anyio.create_task_group() as tasks:
        yield MessageTicker(
            CronRepository(database),
            queue,
            handlers,
            settings,
            ticker_id="ticker_me",
            tasks=tasks,
            pause=Pause(),
        )


async def test_a_handler_gets_its_message_and_completes_it(database: Database, connection: Any) -> None:
    seen: list[Message] = []

    async def handle(message: Message) -> None:
        seen.append(message)

    handlers = handling(handle)
    message_id = await insert_message(connection)
    later = await insert_message(connection, delay=timedelta(hours=1))
    unhandled = await insert_message(connection, "other")
    async with ticker_with(database, handlers) as ticker:
        await ticker.run_once()
    assert [(message.id, message.payload, message.attempt) for message in seen] == [(message_id, {"n": 1}, 1)]
    assert (await state(connection, message_id))["completed"]
    assert ticker.in_flight == []
    for untouched in (later, unhandled):
        assert (await state(connection, untouched))["attempts"] == 0


async def test_a_failing_handler_is_retried_and_then_dead(database: Database, connection: Any) -> None:

    async def handle(_: Message) -> None:
        raise ValueError("no such memo")

    handlers = handling(handle)
    message_id = await insert_message(connection)
    with capture_logs() as logs:
        for dead in (False, True, True):
            async with ticker_with(database, handlers, message_max_attempts=2) as ticker:
                await ticker.run_once()
            failed = await state(connection, message_id)
            assert failed["last_error"] == "ValueError: no such memo"
            assert (failed["dead"], failed["completed"]) == (dead, False)
            await connection.execute("UPDATE queue_messages SET process_after = statement_timestamp()")
    assert (await state(connection, message_id))["attempts"] == 2
    assert [entry["event"] for entry in logs] == ["message_failed", "message_dead"]


async def test_a_message_whose_workers_all_died_is_buried(database: Database, connection: Any) -> None:

    async def handle(_: Message) -> None:
        raise AssertionError("must not run again")

    handlers = handling(handle)
    message_id = await insert_message(connection)
    await connection.execute("UPDATE queue_messages SET attempts = 3")
    async with ticker_with(database, handlers, message_max_attempts=3) as ticker:
        await ticker.run_once()
    buried = await state(connection, message_id)
    assert buried["dead"]
    assert "workers died" in buried["last_error"]


async def test_a_cancelled_handler_gives_its_message_back(database: Database, connection: Any) -> None:
    begun = anyio.Event()

    async def handle(_: Message) -> None:
        begun.set()
        await anyio.sleep_forever()

    handlers = handling(handle)
    message_id = await insert_message(connection)
    with anyio.CancelScope() as scope:
        async with ticker_with(database, handlers) as ticker:
            await ticker.run_once()
            await begun.wait()
            scope.cancel()
    given_back = await state(connection, message_id)
    assert (given_back["attempts"], given_back["claimed_by"], given_back["completed"]) == (0, None, False)
    assert given_back["wait"] <= timedelta(0)


async def test_a_cancellation_that_a_handler_lets_out_is_its_failure(database: Database, connection: Any) -> None:
    """Somebody else's, as from awaiting a task that was cancelled: it must not end the worker."""

    async def handle(_: Message) -> None:
        raise asyncio.CancelledError("some other task's")

    handlers = handling(handle)
    message_id = await insert_message(connection)
    async with ticker_with(database, handlers) as ticker:
        await ticker.run_once()
    failed = await state(connection, message_id)
    assert (failed["attempts"], failed["last_error"]) == (1, "CancelledError: some other task's")


async def test_any_error_text_can_be_kept(database: Database, connection: Any) -> None:

    async def handle(_: Message) -> None:
        raise ValueError("nul \0, surrogate \ud800" + "x" * 20_000)

    handlers = handling(handle)
    message_id = await insert_message(connection)
    async with ticker_with(database, handlers) as ticker:
        await ticker.run_once()
    failed = await state(connection, message_id)
    assert failed["last_error"].startswith("ValueError: nul \N{REPLACEMENT CHARACTER}, surrogate ?")
    assert len(failed["last_error"]) == 10_000


async def test_an_outcome_that_the_database_refuses_does_not_hold_the_worker(
    database: Database, connection: Any
) -> None:

    async def handle(_: Message) -> None: ...

    handlers = handling(handle)
    message_id = await insert_message(connection)
    await connection.execute("ALTER TABLE queue_messages ADD CONSTRAINT refuse CHECK (completed_at IS NULL)")
    with capture_logs() as logs:
        async with ticker_with(database, handlers) as ticker:
            await ticker.run_once()
    assert [entry["event"] for entry in logs] == ["outcome_refused"]
    assert (await state(connection, message_id))["attempts"] == 1


async def test_a_process_does_not_take_its_own_message_twice(database: Database, connection: Any) -> None:
    """Its claim ran out, as after an outage, while the handler still runs."""
    started, gate = 0, anyio.Event()

    async def handle(_: Message) -> None:
        nonlocal started
        started += 1
        await gate.wait()

    handlers = handling(handle)
    message_id = await insert_message(connection)
    async with ticker_with(database, handlers) as ticker:
        for _ in range(3):
            await ticker.run_once()
            await connection.execute("UPDATE queue_messages SET process_after = statement_timestamp()")
        await anyio.wait_all_tasks_blocked()
        gate.set()
    assert started == 1
    assert (await state(connection, message_id))["completed"]


async def test_a_handler_whose_message_was_taken_over_is_ended(
    database: Database, settings: Settings, connection: Any
) -> None:
    begun, ended = anyio.Event(), False

    async def handle(_: Message) -> None:
        nonlocal ended
        begun.set()
        try:
            await anyio.sleep_forever()
        finally:
            ended = True

    handlers = handling(handle)
    message_id = await insert_message(connection)
    queue = QueueRepository(database, "ticker_me")
    async with ticker_with(database, handlers) as ticker:
        await ticker.run_once()
        await begun.wait()
        instant = await connection.fetchval("SELECT statement_timestamp() + interval '11 seconds'")
        [taken_over] = await QueueRepository(database, "ticker_other").claim(
            ["queue"], limit=1, lease=LEASE, now=instant
        )
        await ClaimRenewal(ticker, queue, settings).run_once()
    assert ended
    assert (await state(connection, message_id))["claimed_by"] == "ticker_other"
    assert taken_over.attempt == 2


async def test_a_later_attempt_of_the_same_worker_is_another_claim(database: Database, connection: Any) -> None:
    await insert_message(connection)
    repository = QueueRepository(database, "ticker_me")
    [first] = await repository.claim(["queue"], limit=1, lease=timedelta(0))
    [second] = await repository.claim(["queue"], limit=1, lease=LEASE)
    assert not await repository.complete(first)
    assert not await repository.release(first)
    assert await repository.complete(second)


async def test_work_that_ends_after_the_grace_is_still_written(database: Database, connection: Any) -> None:
    """A thread can't be cancelled: when it is through, its message is done and must not run again."""
    begun, go_on = anyio.Event(), threading.Event()

    def work() -> None:
        anyio.from_thread.run_sync(begun.set)
        go_on.wait()

    async def handle(_: Message) -> None:
        await anyio.to_thread.run_sync(work)

    handlers = handling(handle)
    message_id = await insert_message(connection)
    with anyio.CancelScope() as scope:
        async with ticker_with(database, handlers) as ticker:
            await ticker.run_once()
            await begun.wait()
            scope.cancel()
            go_on.set()
    assert (await state(connection, message_id))["completed"]


async def test_concurrency_is_bounded(database: Database, connection: Any) -> None:
    running, most = 0, 0
    gate = anyio.Event()

    async def handle(_: Message) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await gate.wait()
        running -= 1

    handlers = handling(handle)
    for _ in range(5):
        await insert_message(connection)
    async with ticker_with(database, handlers, message_concurrency=2) as ticker:
        for _ in range(3):
            await ticker.run_once()
        await anyio.wait_all_tasks_blocked()
        assert len(ticker.in_flight) == 2
        gate.set()
    assert most == 2


async def test_only_the_claims_owner_can_end_a_message(database: Database, connection: Any) -> None:
    message_id = await insert_message(connection)
    first, second = QueueRepository(database, "ticker_first"), QueueRepository(database, "ticker_second")
    [claimed] = await first.claim(["queue"], limit=10, lease=LEASE)
    assert await second.claim(["queue"], limit=10, lease=LEASE) == []
    instant = await connection.fetchval("SELECT statement_timestamp() + interval '11 seconds'")
    [taken_over] = await second.claim(["queue"], limit=10, lease=LEASE, now=instant)
    assert (taken_over.id, taken_over.attempt) == (message_id, 2)
    assert not await first.complete(claimed)
    assert not await first.fail(claimed, "late", max_attempts=3, retry_in=LEASE)
    assert await first.renew([claimed], lease=LEASE) == set()
    assert await second.complete(taken_over)
    assert not await second.complete(taken_over)


async def test_renewal_keeps_the_claims_of_running_handlers(
    database: Database, settings: Settings, connection: Any
) -> None:
    gate = anyio.Event()

    async def handle(_: Message) -> None:
        await gate.wait()

    handlers = handling(handle)
    message_id = await insert_message(connection)
    async with ticker_with(database, handlers) as ticker:
        await ticker.run_once()
        await connection.execute(
            "UPDATE queue_messages SET process_after = statement_timestamp() + interval '1 second'"
        )
        await ClaimRenewal(ticker, QueueRepository(database, "ticker_me"), settings).run_once()
        assert (await state(connection, message_id))["wait"] > timedelta(seconds=5)
        gate.set()


async def test_two_workers_share_and_never_both_get_a_message(database: Database, connection: Any) -> None:
    made = {await insert_message(connection) for _ in range(60)}
    claimed: list[str] = []

    async def claim(name: str) -> None:
        repository = QueueRepository(database, name)
        while messages := await repository.claim(["queue"], limit=4, lease=LEASE):
            claimed.extend(message.id for message in messages)

    async with anyio.create_task_group() as tasks:
        for number in range(5):
            tasks.start_soon(claim, f"ticker_{number}")
    assert len(claimed) == 60
    assert set(claimed) == made


def test_handlers_are_checked_when_declared() -> None:
    manager = QueueManager("postgresql://unused")

    @manager.handler("queue")
    async def handle(_: Message) -> None: ...

    with pytest.raises(InvalidInputError, match="has a handler already"):
        manager.handler("queue")(handle)
    with pytest.raises(InvalidInputError, match="async def"):
        manager.handler("other")(lambda _: None)  # type: ignore[type-var]
    with pytest.raises(InvalidInputError, match="queue_name"):
        manager.handler("")(handle)


def test_retries_wait_longer_each_time_up_to_a_cap() -> None:
    waits = [retry_seconds(attempt) for attempt in range(1, 100)]
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (1, 300)
