"""Messages and their handlers: completed, retried, dead, given back."""

import asyncio
import contextvars
import threading
from datetime import timedelta
from typing import Any

import anyio
import asyncpg
import pytest
from pydantic import BaseModel
from structlog.testing import capture_logs

from cron_ticks.database import Database
from support.rig import handling, rig
from token_queue import Backoff, Message, QueueManager, RejectMessage
from token_queue.handlers import Handlers

WEEK = timedelta(days=7)

pytestmark = [pytest.mark.sql, pytest.mark.pooled]


@pytest.fixture
async def manager(settings: Any) -> Any:
    async with QueueManager(settings=settings) as opened:
        yield opened


async def state(connection: Any, message_id: str) -> asyncpg.Record:
    found: asyncpg.Record = await connection.fetchrow(
        """SELECT attempts, worker_deaths, error_type, error_message, error_traceback,
            cardinality(failed_at) AS failures, completed_at IS NOT NULL AS completed, dlq_at IS NOT NULL AS dead,
            process_after - statement_timestamp() AS wait
        FROM queue_messages WHERE id = $1""",
        message_id,
    )
    return found


async def make_due(connection: Any) -> None:
    await connection.execute("UPDATE queue_messages SET process_after = statement_timestamp()")


async def no_tokens(connection: Any) -> bool:
    return bool(await connection.fetchval("SELECT count(*) = 0 FROM queue_tokens"))


async def test_a_handler_gets_its_message_and_completes_it(
    manager: QueueManager, database: Database, connection: Any
) -> None:
    seen: list[Message] = []

    async def handle(message: Message) -> None:
        seen.append(message)

    sent = await manager.send("queue", {"n": 1}, workspace_id="ws_A", headers={"trace": "t1"})
    later = await manager.send("queue", process_after=3600)
    unhandled = await manager.send("other")
    async with rig(database, handling(handle)) as parts:
        await parts.drain()
    assert seen == [Message(sent.id, "queue", "ws_A", {"n": 1}, {"trace": "t1"}, 1)]
    done = await state(connection, sent.id)
    assert (done["completed"], done["attempts"]) == (True, 1)
    assert await no_tokens(connection)
    for untouched in (later, unhandled):
        assert (await state(connection, untouched.id))["attempts"] == 0


async def test_a_failing_handler_is_retried_and_then_dead(
    manager: QueueManager, database: Database, connection: Any
) -> None:
    attempts: list[int] = []

    async def handle(message: Message) -> None:
        attempts.append(message.attempt)
        raise ValueError("no such memo")

    sent = await manager.send("queue")
    failed = await state(connection, sent.id)
    with capture_logs() as logs:
        for dead in (False, True, True):
            async with rig(database, handling(handle, max_attempts=2)) as parts:
                await parts.turn()
            failed = await state(connection, sent.id)
            assert (failed["error_type"], failed["error_message"]) == ("ValueError", "no such memo")
            assert 'raise ValueError("no such memo")' in failed["error_traceback"]
            assert (failed["dead"], failed["completed"]) == (dead, False)
            await make_due(connection)
    assert attempts == [1, 2]
    assert (failed["attempts"], failed["failures"], failed["worker_deaths"]) == (2, 2, 0)
    assert [entry["event"] for entry in logs] == ["message_failed", "message_dead"]


async def test_a_retry_waits_as_its_backoff_says(manager: QueueManager, database: Database, connection: Any) -> None:
    async def handle(_: Message) -> None:
        raise ValueError

    sent = await manager.send("queue")
    async with rig(database, handling(handle, backoff=Backoff(first=1000, longest=1000))) as parts:
        await parts.turn()
    wait = (await state(connection, sent.id))["wait"]
    assert timedelta(seconds=700) < wait <= timedelta(seconds=1200)


async def test_a_message_that_waits_for_its_retry_does_not_block_its_pair(
    manager: QueueManager, database: Database, connection: Any
) -> None:
    async def handle(message: Message) -> None:
        if message.payload["bad"]:
            raise ValueError

    for bad in (True, False, False):
        await manager.send("queue", {"bad": bad})
    async with rig(database, handling(handle, concurrency=1, backoff=Backoff(first=1000, longest=1000))) as parts:
        await parts.drain()
    assert await connection.fetchval("SELECT count(completed_at) FROM queue_messages") == 2


async def test_a_rejected_message_is_dead_at_once(manager: QueueManager, database: Database, connection: Any) -> None:
    async def handle(_: Message) -> None:
        raise RejectMessage("this account is closed")

    sent = await manager.send("queue")
    async with rig(database, handling(handle)) as parts:
        await parts.turn()
    rejected = await state(connection, sent.id)
    assert (rejected["dead"], rejected["attempts"]) == (True, 1)
    assert (rejected["error_type"], rejected["error_message"]) == ("RejectMessage", "this account is closed")


class Memo(BaseModel):
    memo_id: int


async def test_a_payload_that_does_not_fit_its_model_is_dead_with_the_reason(
    manager: QueueManager, database: Database, connection: Any
) -> None:
    seen: list[int] = []

    async def handle(message: Message[Memo]) -> None:
        seen.append(message.payload.memo_id)

    await manager.send("queue", {"memo_id": 7})
    bad = await manager.send("queue", {"memo_id": "seven"})
    async with rig(database, handling(handle)) as parts:
        await parts.drain()
    assert seen == [7]
    dead = await state(connection, bad.id)
    assert (dead["dead"], dead["attempts"]) == (True, 1)
    assert dead["error_message"].startswith("the payload doesn't fit Memo: memo_id: ")


async def test_a_handler_that_takes_too_long_has_failed(
    manager: QueueManager, database: Database, connection: Any
) -> None:
    async def handle(_: Message) -> None:
        await anyio.sleep_forever()

    sent = await manager.send("queue")
    async with rig(database, handling(handle, timeout=0.05)) as parts:
        await parts.turn()
    failed = await state(connection, sent.id)
    assert (failed["error_type"], failed["attempts"], failed["dead"]) == ("TimeoutError", 1, False)


async def test_a_plain_function_runs_in_a_thread(manager: QueueManager, database: Database, connection: Any) -> None:
    threads: list[threading.Thread] = []

    def handle(message: Message) -> None:
        threads.append(threading.current_thread())
        if message.payload["bad"]:
            raise ValueError("plainly")

    good, bad = [await manager.send("queue", {"bad": bad}) for bad in (False, True)]
    async with rig(database, handling(handle)) as parts:
        await parts.drain()
    assert threading.main_thread() not in threads
    assert (await state(connection, good.id))["completed"]
    assert (await state(connection, bad.id))["error_message"] == "plainly"


async def test_a_plain_function_that_takes_too_long_is_left_alone(
    manager: QueueManager, database: Database, connection: Any
) -> None:
    go_on, through = threading.Event(), threading.Event()

    def handle(_: Message) -> None:
        go_on.wait()
        through.set()

    sent = await manager.send("queue")
    async with rig(database, handling(handle, timeout=0.05)) as parts:
        await parts.turn()
        go_on.set()
        assert await asyncio.to_thread(through.wait, 30)
    assert (await state(connection, sent.id))["error_type"] == "TimeoutError"


variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="fresh")


async def test_what_a_handler_leaves_in_context_variables_is_not_the_next_ones(
    manager: QueueManager, database: Database
) -> None:
    seen: list[str] = []

    async def handle(message: Message) -> None:
        seen.append(variable.get())
        variable.set(message.id)

    await manager.send_many("queue", range(20))
    async with rig(database, handling(handle, concurrency=1)) as parts:
        await parts.drain()
    assert seen == ["fresh"] * 20


@pytest.mark.parametrize("deaths", [3, 7])
async def test_a_message_whose_workers_all_died_is_buried_unread(
    manager: QueueManager, database: Database, connection: Any, deaths: int
) -> None:
    async def handle(_: Message) -> None:
        raise AssertionError("must not run again")

    sent = await manager.send("queue")
    await connection.execute(
        "UPDATE queue_messages SET attempts = $1, worker_deaths = $1, error_type = 'WorkerLost'", deaths
    )
    async with rig(database, handling(handle, max_attempts=3)) as parts:
        await parts.turn()
    buried = await state(connection, sent.id)
    assert (buried["dead"], buried["attempts"], buried["error_type"]) == (True, deaths, "WorkerLost")


async def test_a_cancelled_handler_gives_its_message_back(
    manager: QueueManager, database: Database, connection: Any
) -> None:
    begun = anyio.Event()

    async def handle(_: Message) -> None:
        begun.set()
        await anyio.sleep_forever()

    sent = await manager.send("queue")
    with anyio.CancelScope() as scope:
        async with rig(database, handling(handle)) as parts:
            await parts.ticker.run_once()
            await begun.wait()
            scope.cancel()
    given_back = await state(connection, sent.id)
    assert (given_back["attempts"], given_back["completed"], given_back["dead"]) == (0, False, False)
    assert given_back["wait"] <= timedelta(0)
    assert await no_tokens(connection)


@pytest.mark.parametrize(
    ("error", "kept"), [(asyncio.CancelledError("some other task's"), "CancelledError"), (SystemExit(3), "SystemExit")]
)
async def test_what_would_end_a_task_or_process_is_a_failure_of_its_message(
    manager: QueueManager, database: Database, connection: Any, error: BaseException, kept: str
) -> None:
    async def handle(_: Message) -> None:
        raise error

    sent = await manager.send("queue")
    async with rig(database, handling(handle)) as parts:
        await parts.turn()
    failed = await state(connection, sent.id)
    assert (failed["attempts"], failed["error_type"]) == (1, kept)


async def test_any_error_text_can_be_kept(manager: QueueManager, database: Database, connection: Any) -> None:
    async def handle(_: Message) -> None:
        raise ValueError("nul \0, surrogate \ud800" + "x" * 20_000)

    sent = await manager.send("queue")
    async with rig(database, handling(handle)) as parts:
        await parts.turn()
    failed = await state(connection, sent.id)
    assert failed["error_message"].startswith("nul \N{REPLACEMENT CHARACTER}, surrogate ?")
    assert len(failed["error_message"]) == 10_000
    assert len(failed["error_traceback"]) <= 20_000


async def test_an_outcome_that_the_database_refuses_fails_its_message_alone(
    manager: QueueManager, database: Database, connection: Any
) -> None:
    async def handle(_: Message) -> None: ...

    good, bad = [await manager.send("queue", {"bad": bad}) for bad in (False, True)]
    await connection.execute(
        """ALTER TABLE queue_messages ADD CONSTRAINT refuse
        CHECK (payload <> '{"bad": true}' OR completed_at IS NULL) NOT VALID"""
    )
    with capture_logs() as logs:
        async with rig(database, handling(handle)) as parts:
            await parts.turn()
    assert {entry["event"] for entry in logs} == {"outcome_refused"}
    assert (await state(connection, good.id))["completed"]
    refused = await state(connection, bad.id)
    assert (refused["completed"], refused["attempts"], refused["error_type"]) == (False, 1, "OutcomeRefused")


async def test_work_that_ends_after_the_grace_is_still_written(
    manager: QueueManager, database: Database, connection: Any
) -> None:
    """What can't be cancelled: when it is through, its message is done and must not run again."""
    begun, go_on = anyio.Event(), threading.Event()

    def work() -> None:
        anyio.from_thread.run_sync(begun.set)
        go_on.wait()

    async def handle(_: Message) -> None:
        await anyio.to_thread.run_sync(work)

    sent = await manager.send("queue")
    with anyio.CancelScope() as scope:
        async with rig(database, handling(handle)) as parts:
            await parts.ticker.run_once()
            await begun.wait()
            scope.cancel()
            go_on.set()
    assert (await state(connection, sent.id))["completed"]


def three_queues(handle: Any) -> Handlers:
    handlers = handling(handle, "a", concurrency=2)
    handlers.register("b", handle)
    handlers.register("c", handle)
    return handlers


async def test_concurrency_is_bounded_per_queue_and_per_process(manager: QueueManager, database: Database) -> None:
    running: list[str] = []
    gate = anyio.Event()

    async def handle(message: Message) -> None:
        running.append(message.queue_name)
        await gate.wait()

    for queue in ("a", "b", "c"):
        await manager.send_many(queue, range(5))
    async with rig(database, three_queues(handle), message_concurrency=6) as parts:
        for _ in range(4):
            await parts.ticker.run_once()
            await anyio.wait_all_tasks_blocked()
        assert len(running) == 6
        assert running.count("a") <= 2
        gate.set()


async def test_with_concurrency_one_a_pairs_messages_run_in_order(manager: QueueManager, database: Database) -> None:
    seen: dict[str, list[int]] = {"ws_A": [], "ws_B": []}

    async def handle(message: Message) -> None:
        assert message.workspace_id is not None
        seen[message.workspace_id].append(message.payload)

    for start in (0, 100):
        for workspace in seen:
            await manager.send_many("queue", range(start, start + 100), workspace_id=workspace)
    async with rig(database, handling(handle, concurrency=1), message_batch_size=30) as parts:
        await parts.drain()
    assert all(values == list(range(200)) for values in seen.values())


async def test_priorities_go_first_unless_something_is_much_older(
    manager: QueueManager, database: Database, connection: Any
) -> None:
    seen: list[str] = []

    async def handle(message: Message) -> None:
        seen.append(message.payload)

    for priority in ("low", "normal", "high", "urgent"):
        await manager.send("queue", priority, priority=priority)
    old = await manager.send("queue", "old", priority="low")
    await connection.execute("UPDATE queue_messages SET process_after = process_after - interval '11 minutes'")
    await connection.execute(
        "UPDATE queue_messages SET process_after = process_after - interval '31 minutes' WHERE id = $1", old.id
    )
    async with rig(database, handling(handle, concurrency=1)) as parts:
        await parts.drain()
    assert seen == ["old", "urgent", "high", "normal", "low"]


async def test_completed_messages_stay_until_their_retention_ends(
    manager: QueueManager, database: Database, connection: Any
) -> None:
    async def handle(_: Message) -> None: ...

    handlers = handling(handle, retention=3600)
    handlers.register("other", handle, retention=timedelta(days=1))
    sent = [await manager.send(queue) for queue in ("queue", "other", "queue")]
    pending = await manager.send("queue", process_after=3600)
    async with rig(database, handlers) as parts:
        await parts.drain()
        assert await parts.queue.delete_completed(handlers.all(), otherwise=WEEK, limit=10) == 0
        now = await connection.fetchval("SELECT statement_timestamp() + interval '2 hours'")
        assert await parts.queue.delete_completed(handlers.all(), otherwise=WEEK, limit=1, now=now) == 1
        assert await parts.queue.delete_completed(handlers.all(), otherwise=WEEK, limit=10, now=now) == 1
    left = {row["id"] for row in await connection.fetch("SELECT id FROM queue_messages")}
    assert left == {sent[1].id, pending.id}
