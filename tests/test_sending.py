"""Sending: what is written, what is refused, what dedupe keys and transactions do, and whom it wakes up."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from pydantic import BaseModel, Field

from cron_ticks.checks import LARGEST_PAYLOAD_BYTES, LONGEST_NAME, PRIORITIES
from cron_ticks.database import Pool
from cron_ticks.errors import InvalidInputError
from cron_ticks.settings import Settings
from token_queue import OutgoingMessage, QueueManager, Sent, SentMany, sending
from token_queue.sending import CHUNK, LARGEST_HEADERS_BYTES, LONGEST_DELAY, in_chunks, new_message

pytestmark = pytest.mark.sql

WAIT_SECONDS = 60.0
CLOSED = QueueManager  # a manager that isn't open can't write: what it refuses was refused at the door


class Order(BaseModel):
    number: int
    placed_at: datetime
    key: UUID


class Aliased(BaseModel):
    order_number: int = Field(alias="orderNumber")


class Loose(BaseModel):
    value: Any


@pytest.fixture
async def manager(settings: Settings) -> AsyncIterator[QueueManager]:
    async with QueueManager(settings=settings) as opened:
        yield opened


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sending, "CHUNK", 3)
    return 3


async def row_of(connection: Any, message_id: str) -> dict[str, Any]:
    row = await connection.fetchrow("SELECT * FROM queue_messages WHERE id = $1", message_id)
    return dict(row) | {"payload": json.loads(row["payload"]), "headers": json.loads(row["headers"])}


async def rows(connection: Any) -> list[dict[str, Any]]:
    """Every message, in the order in which they were sent."""
    found = await connection.fetch("SELECT id FROM queue_messages ORDER BY sequence")
    return [await row_of(connection, row["id"]) for row in found]


async def payloads(connection: Any) -> list[Any]:
    return [row["payload"] for row in await rows(connection)]


async def count(connection: Any) -> int:
    found: int = await connection.fetchval("SELECT count(*) FROM queue_messages")
    return found


async def each(*items: Any) -> AsyncIterator[Any]:
    for item in items:
        yield item


# --- One message


async def test_a_message_is_a_row_with_all_that_was_said(manager: QueueManager, connection: Any) -> None:
    sent = await manager.send(
        "queue",
        {"text": "ä\n☃", "list": [1, 2.5, None, True]},
        workspace_id="ws_A",
        process_after=60,
        priority="high",
        dedupe_key="key",
        headers={"trace": "abc", "deep": {"n": 1}},
    )
    assert not sent.duplicate
    assert sent.id.startswith("msg_")
    row = await row_of(connection, sent.id)
    assert row.pop("sequence") == 1
    assert row.pop("process_after") == row.pop("inserted_at") + timedelta(minutes=1)
    assert row == {
        "id": sent.id,
        "queue_name": "queue",
        "workspace_id": "ws_A",
        "payload": {"text": "ä\n☃", "list": [1, 2.5, None, True]},
        "headers": {"trace": "abc", "deep": {"n": 1}},
        "priority": 1,
        "dedupe_key": "key",
        "attempts": 0,
        "worker_deaths": 0,
        "failed_at": [],
        "schedule_id": None,
        "scheduled_for": None,
        "exclusive": False,
        "completed_at": None,
        "dlq_at": None,
        "error_type": None,
        "error_message": None,
        "error_traceback": None,
    }


async def test_a_message_with_nothing_said_is_normal_system_wide_and_due_now(
    manager: QueueManager, connection: Any
) -> None:
    before = await connection.fetchval("SELECT clock_timestamp()")
    sent = await manager.send("queue")
    after = await connection.fetchval("SELECT clock_timestamp()")
    row = await row_of(connection, sent.id)
    assert (row["payload"], row["headers"], row["priority"]) == ({}, {}, 2)
    assert (row["workspace_id"], row["dedupe_key"]) == (None, None)
    assert before <= row["inserted_at"] == row["process_after"] <= after


@pytest.mark.parametrize("many", [False, True], ids=["send", "send_many"])
async def test_priorities_are_numbered_from_the_most_urgent(
    manager: QueueManager, connection: Any, *, many: bool
) -> None:
    for priority in PRIORITIES:
        if many:
            await manager.send_many("queue", [OutgoingMessage(priority, priority=priority)])
        else:
            await manager.send("queue", priority, priority=priority)
    found = {row["payload"]: row["priority"] for row in await rows(connection)}
    assert found == {"urgent": 0, "high": 1, "normal": 2, "low": 3}


@pytest.mark.parametrize("many", [False, True], ids=["send", "send_many"])
async def test_a_delay_counts_from_the_databases_now(manager: QueueManager, connection: Any, *, many: bool) -> None:
    delays: list[tuple[timedelta | float, timedelta]] = [
        (0, timedelta(0)),
        (90, timedelta(seconds=90)),
        (0.25, timedelta(milliseconds=250)),
        (timedelta(0), timedelta(0)),
        (timedelta(days=1, microseconds=7), timedelta(days=1, microseconds=7)),
        (LONGEST_DELAY, LONGEST_DELAY),
    ]
    if many:
        await manager.send_many("queue", [OutgoingMessage(None, process_after=given) for given, _ in delays])
    else:
        for given, _ in delays:
            await manager.send("queue", process_after=given)
    waits = [row["process_after"] - row["inserted_at"] for row in await rows(connection)]
    assert waits == [expected for _, expected in delays]


@pytest.mark.parametrize("many", [False, True], ids=["send", "send_many"])
async def test_a_time_is_kept_as_it_is_and_a_past_one_is_now(
    manager: QueueManager, connection: Any, *, many: bool
) -> None:
    future = datetime(2999, 6, 1, 12, 0, 0, 123456, tzinfo=timezone(timedelta(hours=5, minutes=30)))
    for past in (future, datetime(2001, 1, 1, tzinfo=UTC), datetime.min.replace(tzinfo=UTC)):
        if many:
            await manager.send_many("queue", [OutgoingMessage(None, process_after=past)])
        else:
            await manager.send("queue", process_after=past)
    first, *others = await rows(connection)
    assert first["process_after"] == future
    assert [row["process_after"] for row in others] == [row["inserted_at"] for row in others]


async def test_a_payload_is_any_json_and_only_none_becomes_an_object(manager: QueueManager, connection: Any) -> None:
    given: list[Any] = [{}, [], "", 0, False, "text", 2**60, -1.5, [None], {"a": {"b": []}}, "\\u0000", "\U0001f600"]
    for payload in given:
        await manager.send("queue", payload)
    await manager.send("queue", None)
    assert await payloads(connection) == [*given, {}]
    await connection.execute("DELETE FROM queue_messages")
    await manager.send_many("queue", [*given, None])
    assert await payloads(connection) == [*given, {}]


async def test_a_pydantic_model_is_sent_as_its_json(manager: QueueManager, connection: Any) -> None:
    order = Order(number=7, placed_at=datetime(2026, 1, 2, tzinfo=UTC), key=UUID(int=5))
    await manager.send("queue", order)
    await manager.send_many("queue", [order, OutgoingMessage(order)])
    assert await payloads(connection) == [json.loads(order.model_dump_json())] * 3


async def test_a_model_comes_back_through_its_own_validation(manager: QueueManager, connection: Any) -> None:
    order = Aliased(orderNumber=7)
    sent = await manager.send("queue", order)
    assert Aliased.model_validate((await row_of(connection, sent.id))["payload"]) == order


async def test_the_largest_payload_and_headers_still_go(manager: QueueManager, connection: Any) -> None:
    payload = "x" * (LARGEST_PAYLOAD_BYTES - 2)  # and its quotes
    headers = {"h": "ä" * ((LARGEST_HEADERS_BYTES - 8) // 2)}
    sent = await manager.send("queue", payload, headers=headers)
    row = await row_of(connection, sent.id)
    assert (row["payload"], row["headers"]) == (payload, headers)


async def test_names_of_full_length_go_and_the_notification_with_them(manager: QueueManager, connection: Any) -> None:
    longest = "☃" * LONGEST_NAME
    await insert_worker(connection, queues=[longest])
    sent = await manager.send(longest, workspace_id=longest, dedupe_key=longest)
    row = await row_of(connection, sent.id)
    assert (row["queue_name"], row["workspace_id"], row["dedupe_key"]) == (longest, longest, longest)


# --- Dedupe keys


async def test_a_duplicate_is_not_sent_and_names_the_first(manager: QueueManager, connection: Any) -> None:
    first = await manager.send("queue", "first", dedupe_key="key")
    assert await manager.send("queue", "second", dedupe_key="key", priority="urgent") == Sent(first.id, duplicate=True)
    assert await payloads(connection) == ["first"]


async def test_without_a_key_nothing_is_a_duplicate(manager: QueueManager, connection: Any) -> None:
    first, second = await manager.send("queue", "same"), await manager.send("queue", "same")
    assert not first.duplicate
    assert not second.duplicate
    assert await count(connection) == 2


@pytest.mark.parametrize("end", ["completed_at", "dlq_at"])
async def test_a_key_is_free_again_when_its_message_has_ended(manager: QueueManager, connection: Any, end: str) -> None:
    first = await manager.send("queue", dedupe_key="key")
    await connection.execute(f"UPDATE queue_messages SET {end} = statement_timestamp()")
    second = await manager.send("queue", dedupe_key="key")
    assert not second.duplicate
    assert second.id != first.id
    assert (await manager.send("queue", dedupe_key="key")).id == second.id
    assert await count(connection) == 2


async def test_a_key_is_that_of_a_queue_and_a_workspace(manager: QueueManager, connection: Any) -> None:
    places: list[tuple[str, str | None]] = [("a", None), ("a", "ws"), ("a", "ws_2"), ("b", None), ("b", "ws")]
    first = [await manager.send(queue, workspace_id=workspace, dedupe_key="key") for queue, workspace in places]
    again = [await manager.send(queue, workspace_id=workspace, dedupe_key="key") for queue, workspace in places]
    assert not any(sent.duplicate for sent in first)
    assert again == [Sent(sent.id, duplicate=True) for sent in first]
    assert await count(connection) == len(places)


@pytest.mark.parametrize("workspace_id", [None, "ws"])
async def test_of_twenty_at_once_one_is_sent(manager: QueueManager, connection: Any, workspace_id: str | None) -> None:
    results = await asyncio.gather(
        *(manager.send("queue", n, workspace_id=workspace_id, dedupe_key="key") for n in range(20))
    )
    [first] = [sent for sent in results if not sent.duplicate]
    assert {sent.id for sent in results} == {first.id}
    assert [row["id"] for row in await rows(connection)] == [first.id]


@pytest.mark.parametrize("commits", [True, False])
async def test_a_duplicate_waits_for_what_becomes_of_the_first(
    manager: QueueManager, dsn: str, connection: Any, *, commits: bool
) -> None:
    """The first is in a transaction that has not ended yet."""
    waiting = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event = $1)"
    caller = await asyncpg.connect(dsn)
    try:
        transaction = caller.transaction()
        await transaction.start()
        first = await manager.send("queue", dedupe_key="key", connection=caller)
        async with asyncio.timeout(WAIT_SECONDS), asyncio.TaskGroup() as tasks:
            second = tasks.create_task(manager.send("queue", dedupe_key="key"))
            while not await connection.fetchval(waiting, "transactionid"):
                pass
            await (transaction.commit() if commits else transaction.rollback())
    finally:
        await caller.close()
    assert second.result().duplicate == commits
    assert (second.result().id == first.id) == commits
    assert [row["id"] for row in await rows(connection)] == [second.result().id]


async def test_a_key_that_becomes_free_while_its_owner_is_looked_for_is_taken(
    manager: QueueManager, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await manager.send("queue", dedupe_key="key")
    find = manager.database.fetchval

    async def too_late(*arguments: Any, **options: Any) -> Any:
        await connection.execute("UPDATE queue_messages SET completed_at = statement_timestamp()")
        return await find(*arguments, **options)

    monkeypatch.setattr(manager.database, "fetchval", too_late)
    second = await manager.send("queue", dedupe_key="key")
    assert not second.duplicate
    assert [row["id"] for row in await rows(connection)] == [first.id, second.id]


# --- The caller's transaction


@pytest.mark.parametrize("many", [False, True], ids=["send", "send_many"])
async def test_a_message_is_part_of_the_callers_transaction(
    manager: QueueManager, dsn: str, connection: Any, *, many: bool
) -> None:
    async def send(caller: Any) -> None:
        if many:
            await manager.send_many("queue", [1, 2], connection=caller)
        else:
            await manager.send("queue", 1, connection=caller)

    caller = await asyncpg.connect(dsn)
    try:
        transaction = caller.transaction()
        await transaction.start()
        await send(caller)
        assert await count(caller) == 1 + many
        await transaction.rollback()
        assert await count(connection) == 0
        async with caller.transaction():
            await send(caller)
            assert await count(connection) == 0
        assert await count(connection) == 1 + many
    finally:
        await caller.close()


async def test_a_duplicate_of_the_transactions_own_message_is_found(manager: QueueManager, connection: Any) -> None:
    async with connection.transaction():
        first = await manager.send("queue", dedupe_key="key", connection=connection)
        second = await manager.send("queue", dedupe_key="key", connection=connection)
        many = await manager.send_many("queue", [OutgoingMessage(1, dedupe_key="key")], connection=connection)
    assert second == Sent(first.id, duplicate=True)
    assert many == SentMany(0, 1)


async def test_a_connection_without_a_transaction_commits_at_once(
    manager: QueueManager, dsn: str, connection: Any
) -> None:
    caller = await asyncpg.connect(dsn)
    try:
        await manager.send("queue", 1, connection=caller)
        await manager.send_many("queue", [2, 3], connection=caller)
        assert not caller.is_in_transaction()
        assert await payloads(connection) == [1, 2, 3]
    finally:
        await caller.close()


async def test_an_applications_own_json_codec_is_not_in_the_way(settings: Settings, dsn: str, connection: Any) -> None:
    async def init(opened: Any) -> None:
        for name in ("json", "jsonb"):
            await opened.set_type_codec(name, encoder=json.dumps, decoder=json.loads, schema="pg_catalog")

    pool: Pool
    async with (
        asyncpg.create_pool(dsn, min_size=0, max_size=3, init=init) as pool,
        QueueManager(pool=pool, settings=settings) as manager,
    ):
        first = await manager.send("queue", {"n": 1}, headers={"h": 1}, dedupe_key="key")
        assert await manager.send("queue", dedupe_key="key") == Sent(first.id, duplicate=True)
        async with pool.acquire() as caller, caller.transaction():
            await manager.send("queue", {"n": 2}, headers={"h": 2}, connection=caller)
            many = [OutgoingMessage({"n": 3}, headers={"h": 3})]
            assert await manager.send_many("queue", many, connection=caller) == SentMany(1, 0)
    found = [(row["payload"], row["headers"]) for row in await rows(connection)]
    assert found == [({"n": n}, {"h": n}) for n in (1, 2, 3)]


@pytest.mark.parametrize("wrong", ["postgresql://", 7, object()])
async def test_a_connection_is_one_of_asyncpg(manager: QueueManager, connection: Any, wrong: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^connection: "):
        await manager.send("queue", connection=wrong)
    with pytest.raises(InvalidInputError, match=r"^connection: "):
        await manager.send_many("queue", [1], connection=wrong)
    assert await count(connection) == 0


# --- Many messages


async def test_payloads_and_messages_with_options_go_in_their_order(manager: QueueManager, connection: Any) -> None:
    result = await manager.send_many(
        "queue",
        [
            "plain",
            OutgoingMessage("own workspace", workspace_id="ws_B"),
            OutgoingMessage("urgent", priority="urgent"),
            OutgoingMessage("with headers", headers={"h": 1}),
            OutgoingMessage("with a key", dedupe_key="key"),
            OutgoingMessage("delayed", process_after=60),
            OutgoingMessage("at a time", process_after=datetime(2999, 1, 1, tzinfo=UTC)),
            {"also": "plain"},
        ],
        workspace_id="ws_A",
    )
    assert result == SentMany(8, 0)
    found = await rows(connection)
    assert [row["payload"] for row in found] == [
        "plain",
        "own workspace",
        "urgent",
        "with headers",
        "with a key",
        "delayed",
        "at a time",
        {"also": "plain"},
    ]
    assert [row["workspace_id"] for row in found] == ["ws_A", "ws_B", *["ws_A"] * 6]
    assert [row["priority"] for row in found] == [2, 2, 0, 2, 2, 2, 2, 2]
    assert [row["headers"] for row in found] == [{}, {}, {}, {"h": 1}, {}, {}, {}, {}]
    assert [row["dedupe_key"] for row in found] == [None] * 4 + ["key"] + [None] * 3
    waits = [row["process_after"] - row["inserted_at"] for row in found]
    assert waits[:6] == [timedelta(0)] * 5 + [timedelta(minutes=1)]
    assert found[6]["process_after"] == datetime(2999, 1, 1, tzinfo=UTC)
    assert {row["queue_name"] for row in found} == {"queue"}
    assert len({row["id"] for row in found}) == 8


@pytest.mark.parametrize("number", [2, 3, 4, 10])
@pytest.mark.parametrize("kind", ["list", "generator", "async generator"])
async def test_the_order_holds_across_chunks(
    manager: QueueManager, connection: Any, small_chunks: int, number: int, kind: str
) -> None:
    assert small_chunks == 3
    items = list(range(number, 0, -1))
    source: Any = {"list": items, "generator": iter(items), "async generator": each(*items)}[kind]
    assert await manager.send_many("queue", source) == SentMany(number, 0)
    assert await payloads(connection) == items


async def test_duplicates_are_counted(manager: QueueManager, connection: Any, small_chunks: int) -> None:
    """One with a message that was there, one in its own chunk, one in the next, one in another workspace."""
    assert small_chunks == 3
    await manager.send("queue", "there", dedupe_key="a")
    given = [("a", None), ("b", None), ("b", None), ("b", None), ("b", "ws"), ("c", None), (None, None), (None, None)]
    messages = [OutgoingMessage(n, dedupe_key=key, workspace_id=place) for n, (key, place) in enumerate(given)]
    assert await manager.send_many("queue", messages) == SentMany(5, 3)
    assert await payloads(connection) == ["there", 1, 4, 5, 6, 7]


async def test_no_messages_are_fine(manager: QueueManager, connection: Any) -> None:
    sources: list[Any] = [[], (), iter([]), each()]
    for nothing in sources:
        assert await manager.send_many("queue", nothing) == SentMany(0, 0)
    assert await count(connection) == 0


async def test_a_stream_is_taken_as_it_is_inserted(manager: QueueManager, connection: Any) -> None:
    """Before each item, those before it are in the transaction, but for the chunk that is being filled."""
    ahead: list[int] = []

    async def stream() -> AsyncIterator[int]:
        for n in range(5 * CHUNK):
            if n % (CHUNK // 5) == 0:
                ahead.append(n - await count(connection))
            yield n

    async with connection.transaction():
        assert await manager.send_many("queue", stream(), connection=connection) == SentMany(5 * CHUNK, 0)
    assert len(ahead) == 25
    assert max(ahead) < CHUNK
    assert await count(connection) == 5 * CHUNK


async def test_an_iterator_is_pulled_a_chunk_at_a_time() -> None:
    pulled = 0

    def items() -> Iterator[int]:
        nonlocal pulled
        for n in range(5 * CHUNK):
            pulled += 1
            yield n

    seen = 0
    async for chunk in in_chunks(items(), None):
        seen += len(chunk)
        assert pulled == seen
    assert seen == 5 * CHUNK


AWKWARD = "back\\slash \\N \\. tab\t line\n quote\" 'single' ünïcode \u2028 \\u0041"


async def test_many_arrive_as_they_were_sent(manager: QueueManager, connection: Any) -> None:
    """Large numbers go in another way than a few: the text format of COPY, which has signs of its own."""
    message = OutgoingMessage({AWKWARD: [AWKWARD]}, workspace_id="w\\N\\s", priority="low", headers={AWKWARD: AWKWARD})
    for number in (1, 3 * CHUNK):
        assert await manager.send_many("q\\ueue", [message] * number) == SentMany(number, 0)
        rows = await connection.fetch(
            """SELECT DISTINCT queue_name, workspace_id, payload::text, headers::text, priority,
                process_after = inserted_at AS at_once FROM queue_messages"""
        )
        [row] = rows
        assert (row["queue_name"], row["workspace_id"], row["priority"]) == ("q\\ueue", "w\\N\\s", 3)
        assert json.loads(row["payload"]) == {AWKWARD: [AWKWARD]}
        assert json.loads(row["headers"]) == {AWKWARD: AWKWARD}
        assert row["at_once"]


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_all_kinds_of_messages_keep_their_order(
    manager: QueueManager,
    connection: Any,
    asynchronous: bool,  # noqa: FBT001
) -> None:
    kinds: list[dict[str, Any]] = [{}, {"dedupe_key": "key"}, {"workspace_id": "ws"}]
    messages = [OutgoingMessage(n, **kinds[n // CHUNK % 3]) for n in range(7 * CHUNK + 10)]

    async def stream() -> AsyncIterator[OutgoingMessage]:
        for message in messages:
            yield message

    sent = await manager.send_many("queue", stream() if asynchronous else messages)
    assert sent == SentMany(5 * CHUNK + 1, 2 * CHUNK + 9)
    rows = await connection.fetch("SELECT payload::int AS n FROM queue_messages ORDER BY sequence")
    numbers = [row["n"] for row in rows]
    assert len(numbers) == sent.sent
    assert numbers == sorted(numbers)


async def test_a_bad_message_far_on_leaves_nothing_behind(manager: QueueManager, connection: Any) -> None:
    """What was on its way in by then is taken back, and the caller's own transaction goes on."""
    async with connection.transaction():
        await manager.send("queue", "first", connection=connection)
        with pytest.raises(InvalidInputError, match=rf"messages\[{4 * CHUNK}\].payload"):
            await manager.send_many("queue", [*range(4 * CHUNK), object()], connection=connection)
        await manager.send("queue", "last", connection=connection)
    rows = await connection.fetch("SELECT payload::text FROM queue_messages ORDER BY sequence")
    assert [row["payload"] for row in rows] == ['"first"', '"last"']


@pytest.mark.parametrize("position", [0, 2, 3, 7])
async def test_a_bad_message_is_named_and_none_is_sent(
    manager: QueueManager, connection: Any, small_chunks: int, position: int
) -> None:
    assert small_chunks == 3
    bad: list[tuple[Any, str]] = [
        ({1, 2}, "payload"),
        (OutgoingMessage(object()), "payload"),
        (OutgoingMessage(1, workspace_id=""), "workspace_id"),
        (OutgoingMessage(1, dedupe_key=" "), "dedupe_key"),
        (OutgoingMessage(1, priority="soon"), "priority"),  # type: ignore[arg-type]
        (OutgoingMessage(1, process_after=-1), "process_after"),
        (OutgoingMessage(1, headers=[]), "headers"),  # type: ignore[arg-type]
    ]
    for item, field in bad:
        items: list[Any] = list(range(8))
        items[position] = item
        for source in (items, iter(items), each(*items)):
            with pytest.raises(InvalidInputError) as caught:
                await manager.send_many("queue", source)
            assert caught.value.field == f"messages[{position}].{field}"
            assert str(caught.value).startswith(f"messages[{position}].{field}: ")
    assert await count(connection) == 0


async def test_nothing_is_sent_if_the_stream_fails(manager: QueueManager, connection: Any, small_chunks: int) -> None:
    assert small_chunks == 3

    def stream() -> Iterator[int]:
        yield from range(7)
        raise LookupError("the source is gone")

    async def async_stream() -> AsyncIterator[int]:
        for n in stream():
            yield n

    for source in (stream(), async_stream()):
        with pytest.raises(LookupError, match="the source is gone"):
            await manager.send_many("queue", source)
    assert await count(connection) == 0


async def test_nothing_is_sent_if_the_database_refuses_one(
    manager: QueueManager, connection: Any, small_chunks: int
) -> None:
    assert small_chunks == 3
    await connection.execute("ALTER TABLE queue_messages ADD CONSTRAINT refuse CHECK (payload <> '5')")
    with pytest.raises(asyncpg.CheckViolationError):
        await manager.send_many("queue", range(9))
    assert await count(connection) == 0
    assert await manager.send_many("queue", range(5)) == SentMany(5, 0)


async def test_the_callers_transaction_outlives_a_failed_send_many(
    manager: QueueManager, connection: Any, small_chunks: int
) -> None:
    assert small_chunks == 3
    await connection.execute("ALTER TABLE queue_messages ADD CONSTRAINT refuse CHECK (payload <> '5')")
    async with connection.transaction():
        await manager.send("queue", "before", connection=connection)
        with pytest.raises(InvalidInputError):
            await manager.send_many("queue", [1, 2, 3, 4, object()], connection=connection)
        with pytest.raises(asyncpg.CheckViolationError):
            await manager.send_many("queue", range(9), connection=connection)
        await manager.send("queue", "after", connection=connection)
    assert await payloads(connection) == ["before", "after"]


@pytest.mark.parametrize("messages", ["text", b"bytes", {"a": 1}, None, 7, OutgoingMessage(1)])
async def test_messages_are_an_iterable_of_messages(manager: QueueManager, connection: Any, messages: Any) -> None:
    with pytest.raises(InvalidInputError) as caught:
        await manager.send_many("queue", messages)
    assert caught.value.field == "messages"
    assert await count(connection) == 0


async def test_one_model_is_not_many_messages(manager: QueueManager, connection: Any) -> None:
    one: Any = Loose(value=1)
    with pytest.raises(InvalidInputError, match=r"^messages: "):
        await manager.send_many("queue", one)
    assert await count(connection) == 0


@pytest.mark.parametrize("messages", [[], [1]])
async def test_the_workspace_of_all_is_an_argument_and_no_messages(
    manager: QueueManager, connection: Any, messages: list[int]
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        await manager.send_many("queue", messages, workspace_id="")
    assert caught.value.field == "workspace_id"
    assert await count(connection) == 0


# --- Bad input


BAD_NAMES: list[Any] = [
    "",
    " ",
    " padded",
    "padded ",
    "nul\0inside",
    "tab\tinside",
    "line\nbreak",
    "\x7f",
    "lone \ud800",
    "x" * (LONGEST_NAME + 1),
    7,
    True,
    b"bytes",
    ["list"],
]

BAD_PAYLOADS: list[Any] = [
    object(),
    {1, 2},
    b"bytes",
    math.nan,
    [math.inf],
    {"when": datetime(2026, 1, 1, tzinfo=UTC)},
    {("tuple",): 1},
    {"model inside": Loose(value=1)},
    "nul \0",
    ["\\\0"],
    {"nul in \0 a key": 1},
    "lone \ud800",
    {"\udfff": 1},
    "x" * (LARGEST_PAYLOAD_BYTES - 1),
    ["ä" * (LARGEST_PAYLOAD_BYTES // 2)],
    Loose(value="nul \0"),
]

BAD_TIMES: list[Any] = [
    datetime(2026, 1, 1),  # noqa: DTZ001 - that is the mistake
    -1,
    -0.001,
    timedelta(microseconds=-1),
    math.nan,
    math.inf,
    -math.inf,
    1e300,
    LONGEST_DELAY.total_seconds() + 1,
    LONGEST_DELAY + timedelta(microseconds=1),
    timedelta.max,
    timedelta.min,
    True,
    False,
    "60",
    "2026-01-01T00:00:00Z",
    [60],
]

BAD_HEADERS: list[Any] = [
    [],
    "text",
    7,
    [("a", 1)],
    {1: "number"},
    {None: "none"},
    {"a": 1, ("b",): 2},
    {"a": object()},
    {"a": math.nan},
    {"a": "nul \0"},
    {"nul \0": 1},
    {"a": "\ud800"},
    {"h": "x" * (LARGEST_HEADERS_BYTES - 7)},
    {"h": "x" * LARGEST_PAYLOAD_BYTES},
]

BAD_PRIORITIES: list[Any] = ["soon", "", "NORMAL", "normal ", 0, 2, True, None, ["normal"]]

BAD_FIELDS = [
    *(("queue_name", value) for value in [*BAD_NAMES, None]),
    *(("workspace_id", value) for value in BAD_NAMES),
    *(("dedupe_key", value) for value in BAD_NAMES),
    *(("payload", value) for value in BAD_PAYLOADS),
    *(("process_after", value) for value in BAD_TIMES),
    *(("priority", value) for value in BAD_PRIORITIES),
    *(("headers", value) for value in BAD_HEADERS),
]


def shortly(value: object) -> str:
    return type(value).__name__ if " object at 0x" in ascii(value) else ascii(value)[:30]


async def refused(field: str, value: Any) -> InvalidInputError:
    good: dict[str, Any] = {"queue_name": "queue", "payload": 1}
    with pytest.raises(InvalidInputError) as caught:
        await CLOSED().send(**good | {field: value})
    return caught.value


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS, ids=shortly)
async def test_bad_input_names_its_field(field: str, value: Any) -> None:
    error = await refused(field, value)
    assert error.field == field
    assert str(error).startswith(f"{field}: ")


async def test_bad_input_is_refused_by_an_open_manager_too(manager: QueueManager, connection: Any) -> None:
    good: dict[str, Any] = {"queue_name": "queue", "payload": 1}
    async with connection.transaction():
        for field, value in BAD_FIELDS:
            with pytest.raises(InvalidInputError):
                await manager.send(**good | {field: value}, connection=connection)
        await manager.send("queue", "good", connection=connection)
    assert await payloads(connection) == ["good"]


@pytest.mark.parametrize("queue_name", [*BAD_NAMES, None], ids=shortly)
async def test_send_many_checks_its_queue_first(queue_name: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^queue_name: "):
        await CLOSED().send_many(queue_name, [1])


async def test_a_delay_beyond_every_float_is_refused() -> None:
    assert (await refused("process_after", 10**400)).field == "process_after"


async def test_a_time_beyond_the_calendar_is_refused() -> None:
    end = datetime.max.replace(tzinfo=timezone(timedelta(hours=-1)))
    assert (await refused("process_after", end)).field == "process_after"


async def test_a_time_before_the_calendar_is_refused() -> None:
    begin = datetime.min.replace(tzinfo=timezone(timedelta(hours=1)))
    assert (await refused("process_after", begin)).field == "process_after"


@pytest.mark.parametrize("value", [object(), b"\xff"], ids=shortly)
async def test_a_model_that_is_no_json_is_a_bad_payload(value: Any) -> None:
    assert (await refused("payload", Loose(value=value))).field == "payload"


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def deeper_in_the_stack(frames: int, text: str) -> Any:
    return json.loads(text) if frames == 0 else deeper_in_the_stack(frames - 1, text)


@pytest.mark.parametrize("field", ["payload", "headers"])
def test_what_is_nested_too_deep_to_be_read_is_not_sent(field: str) -> None:
    accepted = ""
    for depth in range(1, 1000):
        value = {"h": nested(depth)}
        try:
            message = new_message(value) if field == "payload" else new_message(1, headers=value)
        except InvalidInputError:
            break
        accepted = message.payload_json if field == "payload" else message.headers_json
    assert accepted
    assert deeper_in_the_stack(300, accepted)


# --- Waking workers


async def insert_worker(
    connection: Any, *, queues: list[str], asleep: bool = True, seen_ago: timedelta = timedelta(0)
) -> None:
    await connection.execute(
        """INSERT INTO queue_workers (id, queues, asleep, started_at, seen_at)
        SELECT 'ticker_' || gen_random_uuid(), $1, $2, statement_timestamp(), statement_timestamp() - $3::interval""",
        queues,
        asleep,
        seen_ago,
    )


class Heard:
    """What was notified on a channel."""

    def __init__(self, connection: Any, channel: str) -> None:
        self._connection = connection
        self._channel = channel
        self._notices: asyncio.Queue[str] = asyncio.Queue()

    def note(self, _connection: object, _process: int, _channel: str, payload: object) -> None:
        self._notices.put_nowait(str(payload))

    async def so_far(self) -> list[str]:
        """All until now: they come in the order of their commits, so none comes after our own."""
        await self._connection.execute("SELECT pg_notify($1, 'sentinel')", self._channel)
        heard: list[str] = []
        async with asyncio.timeout(WAIT_SECONDS):
            while (notice := await self._notices.get()) != "sentinel":
                heard.append(notice)
        return heard


@asynccontextmanager
async def hearing(manager: QueueManager, dsn: str) -> AsyncIterator[Heard]:
    listener = await asyncpg.connect(dsn)
    try:
        heard = Heard(listener, manager.database.channel)
        await listener.add_listener(manager.database.channel, heard.note)
        yield heard
    finally:
        await listener.close()


MINUTE = timedelta(minutes=1)


@pytest.mark.parametrize(
    ("workers", "notices"),
    [
        pytest.param([], [], id="no worker"),
        pytest.param([{"queues": ["queue"]}], ["queue"], id="asleep"),
        pytest.param([{"queues": ["other", "queue"]}], ["queue"], id="asleep, of several queues"),
        pytest.param([{"queues": ["queue"], "asleep": False}], [], id="awake"),
        pytest.param([{"queues": ["other"]}], [], id="of another queue"),
        pytest.param([{"queues": []}], [], id="of no queue"),
        pytest.param([{"queues": ["queue"], "seen_ago": MINUTE}], [], id="seen long ago"),
        pytest.param([{"queues": ["queue"]}, {"queues": ["queue"]}], ["queue"], id="two asleep"),
        pytest.param([{"queues": ["queue"], "asleep": False}, {"queues": ["queue"]}], ["queue"], id="one of two"),
        pytest.param([{"queues": ["queue"], "asleep": False}, {"queues": ["other"]}], [], id="neither of two"),
    ],
)
async def test_who_sleeps_is_woken_up_and_nobody_else(
    manager: QueueManager, dsn: str, connection: Any, workers: list[dict[str, Any]], notices: list[str]
) -> None:
    for worker in workers:
        await insert_worker(connection, **worker)
    async with hearing(manager, dsn) as heard:
        await manager.send("queue")
        assert await heard.so_far() == notices
        await manager.send_many("queue", [1, 2, 3])
        assert await heard.so_far() == notices


async def test_many_messages_are_one_notification(
    manager: QueueManager, dsn: str, connection: Any, small_chunks: int
) -> None:
    assert small_chunks == 3
    await insert_worker(connection, queues=["queue"])
    async with hearing(manager, dsn) as heard:
        await manager.send_many("queue", range(10))
        assert await heard.so_far() == ["queue"]
        await manager.send_many("queue", [])
        assert await heard.so_far() == []


async def test_a_duplicate_wakes_nobody_up(manager: QueueManager, dsn: str, connection: Any) -> None:
    await manager.send("queue", dedupe_key="key")
    await insert_worker(connection, queues=["queue"])
    async with hearing(manager, dsn) as heard:
        assert (await manager.send("queue", dedupe_key="key")).duplicate
        assert await heard.so_far() == []


async def test_the_callers_commit_wakes_up(manager: QueueManager, dsn: str, connection: Any) -> None:
    await insert_worker(connection, queues=["queue"])
    async with hearing(manager, dsn) as heard:
        transaction = connection.transaction()
        await transaction.start()
        await manager.send("queue", connection=connection)
        await transaction.rollback()
        assert await heard.so_far() == []
        async with connection.transaction():
            await manager.send("queue", connection=connection)
            assert await heard.so_far() == []
        assert await heard.so_far() == ["queue"]


async def test_a_later_message_wakes_up_too(manager: QueueManager, dsn: str, connection: Any) -> None:
    """A sleeper has to know when to look again."""
    await insert_worker(connection, queues=["queue"])
    async with hearing(manager, dsn) as heard:
        await manager.send("queue", process_after=3600)
        assert await heard.so_far() == ["queue"]


async def test_a_schemas_workers_are_its_own(dsn: str, connection: Any) -> None:
    other = Settings.load(dsn=dsn, database_schema="other")
    async with QueueManager(settings=other) as manager, hearing(manager, dsn) as heard:
        await insert_worker(connection, queues=["queue"])
        await manager.send("queue")
        assert await heard.so_far() == []
        assert await count(connection) == 0
        assert await connection.fetchval("SELECT count(*) FROM other.queue_messages") == 1
