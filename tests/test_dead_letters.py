"""Dead letters, as QueueManager lists, redrives and purges them."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from cron_ticks.errors import InvalidInputError, MessageNotFoundError
from cron_ticks.settings import Settings
from token_queue import QueueManager, queue_repository
from token_queue.message import DeadMessage

pytestmark = pytest.mark.sql

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


@pytest.fixture
async def manager(dsn: str) -> AsyncIterator[QueueManager]:
    async with QueueManager(settings=Settings.load(dsn=dsn)) as opened:
        yield opened


async def insert(connection: Any, message_id: str, minute: int = 0, **columns: Any) -> str:
    """A message that died so many minutes after noon, unless its columns say otherwise."""
    row = {
        "id": message_id,
        "queue_name": "queue",
        "payload": "{}",
        "process_after": NOON,
        "inserted_at": NOON,
        "dlq_at": NOON + minute * MINUTE,
        "attempts": 3,
        "worker_deaths": 1,
        "failed_at": [NOON - MINUTE, NOON],
        "error_type": "ValueError",
        "error_message": "no such memo",
    } | columns
    places = ", ".join(f"${number}" for number in range(1, len(row) + 1))
    await connection.execute(f"INSERT INTO queue_messages ({', '.join(row)}) VALUES ({places})", *row.values())
    return message_id


async def insert_alive(connection: Any) -> list[asyncpg.Record]:
    """A pending and a completed message, which nothing here may touch: their rows."""
    await insert(connection, "pending", dlq_at=None, process_after=NOON)
    await insert(connection, "completed", dlq_at=None, completed_at=NOON)
    return await alive(connection)


async def alive(connection: Any) -> list[asyncpg.Record]:
    rows: list[asyncpg.Record] = await connection.fetch(
        "SELECT * FROM queue_messages WHERE id IN ('pending', 'completed') ORDER BY id"
    )
    return rows


async def dead_ids(connection: Any) -> list[str]:
    rows = await connection.fetch("SELECT id FROM queue_messages WHERE dlq_at IS NOT NULL ORDER BY id")
    return [row["id"] for row in rows]


def ids(letters: list[DeadMessage]) -> list[str]:
    return [letter.id for letter in letters]


async def insert_of_several_queues_and_workspaces(connection: Any) -> None:
    await insert(connection, "a1")
    await insert(connection, "a2", workspace_id="acme")
    await insert(connection, "a3", workspace_id="beta")
    await insert(connection, "b1", queue_name="other")
    await insert(connection, "b2", queue_name="other", workspace_id="acme")


FILTERS = [
    ({}, ["a1", "a2", "a3", "b1", "b2"]),
    ({"queue_name": "queue"}, ["a1", "a2", "a3"]),
    ({"workspace_id": "acme"}, ["a2", "b2"]),
    ({"queue_name": "other", "workspace_id": "acme"}, ["b2"]),
    ({"queue_name": "none"}, []),
]


async def test_the_latest_comes_first_and_pages_follow_each_other(manager: QueueManager, connection: Any) -> None:
    for message_id, minute in (("m1", 1), ("m3", 3), ("m2a", 2), ("m2c", 2), ("m2b", 2)):
        await insert(connection, message_id, minute)
    await insert_alive(connection)
    order = ["m3", "m2c", "m2b", "m2a", "m1"]
    assert ids(await manager.list_dead()) == order
    pages = []
    after_id = None
    while page := await manager.list_dead(after_id=after_id, limit=2):
        pages.append(ids(page))
        after_id = page[-1].id
    assert pages == [["m3", "m2c"], ["m2b", "m2a"], ["m1"]]


@pytest.mark.parametrize(("chosen", "expected"), FILTERS)
async def test_lists_by_queue_and_workspace(
    manager: QueueManager, connection: Any, chosen: dict[str, str], expected: list[str]
) -> None:
    await insert_of_several_queues_and_workspaces(connection)
    assert sorted(ids(await manager.list_dead(**chosen))) == expected  # type: ignore[arg-type]


async def test_pages_of_one_queue_leave_the_others_out(manager: QueueManager, connection: Any) -> None:
    for minute in range(6):
        await insert(connection, f"m{minute}", minute, queue_name="even" if minute % 2 == 0 else "odd")
    assert ids(await manager.list_dead(queue_name="even", after_id="m4", limit=1)) == ["m2"]
    assert ids(await manager.list_dead(queue_name="even", after_id="m3")) == ["m2", "m0"]


@pytest.mark.parametrize("change", ["redrive_dead", "purge_dead"])
async def test_a_page_says_so_when_the_last_id_is_gone(manager: QueueManager, connection: Any, change: str) -> None:
    """Reading a page, changing what is on it and reading the next: the end of the list must not look like this."""
    for minute in range(4):
        await insert(connection, f"m{minute}", minute)
    first = ids(await manager.list_dead(limit=2))
    await getattr(manager, change)(first)
    with pytest.raises(MessageNotFoundError):
        await manager.list_dead(limit=2, after_id=first[-1])


async def test_one_dead_letter_with_all_that_is_known(manager: QueueManager, connection: Any) -> None:
    await insert(
        connection,
        "m",
        workspace_id="acme",
        payload='{"n": [1, "ü"]}',
        headers='{"trace": "t"}',
        error_traceback="Traceback …",
    )
    assert await manager.get_dead("m") == DeadMessage(
        id="m",
        queue_name="queue",
        workspace_id="acme",
        payload={"n": [1, "ü"]},
        headers={"trace": "t"},
        attempts=3,
        worker_deaths=1,
        error_type="ValueError",
        error_message="no such memo",
        error_traceback="Traceback …",
        sent_at=NOON,
        failed_at=[NOON - MINUTE, NOON],
        dead_at=NOON,
    )
    assert await manager.list_dead() == [await manager.get_dead("m")]


@pytest.mark.parametrize("message_id", ["none", "pending", "completed"])
async def test_only_dead_letters_are_found(manager: QueueManager, connection: Any, message_id: str) -> None:
    await insert_alive(connection)
    with pytest.raises(MessageNotFoundError, match=f"there is no dead letter {message_id}"):
        await manager.get_dead(message_id)


async def test_a_redriven_message_begins_anew_and_keeps_its_history(manager: QueueManager, connection: Any) -> None:
    future = datetime.now(UTC) + timedelta(days=1)
    await insert(connection, "m", process_after=future, priority=1, dedupe_key="key", payload='{"n": 1}')
    before = dict(await connection.fetchrow("SELECT * FROM queue_messages"))
    assert await manager.redrive_dead(["m"]) == 1
    after = dict(await connection.fetchrow("SELECT * FROM queue_messages WHERE process_after <= statement_timestamp()"))
    changes = {"dlq_at": None, "attempts": 0, "worker_deaths": 0, "process_after": after["process_after"]}
    assert after == before | changes
    assert [(state.queue_name, state.due, state.dead) for state in await manager.queue_states()] == [("queue", 1, 0)]
    assert await manager.redrive_dead(["m"]) == 0


@pytest.mark.parametrize("change", ["redrive_dead", "purge_dead"])
@pytest.mark.parametrize(("chosen", "expected"), FILTERS)
async def test_changes_by_queue_and_workspace(
    manager: QueueManager, connection: Any, change: str, chosen: dict[str, str], expected: list[str]
) -> None:
    await insert_of_several_queues_and_workspaces(connection)
    untouched = await insert_alive(connection)
    assert await getattr(manager, change)(**chosen) == len(expected)
    assert await dead_ids(connection) == sorted({"a1", "a2", "a3", "b1", "b2"} - set(expected))
    assert await alive(connection) == untouched


@pytest.mark.parametrize("change", ["redrive_dead", "purge_dead"])
async def test_changes_by_ids(manager: QueueManager, connection: Any, change: str) -> None:
    for message_id in ("a", "b", "c"):
        await insert(connection, message_id)
    untouched = await insert_alive(connection)
    method = getattr(manager, change)
    assert await method(["pending", "completed", "none"]) == 0
    assert await method([]) == 0, "no ids are not all ids"
    assert await dead_ids(connection) == ["a", "b", "c"]
    assert await method(["a", "c", "a", "pending", "completed", "none"]) == 2
    assert await dead_ids(connection) == ["b"]
    assert await method(["b"], queue_name="other") == 0, "both must hold"
    assert await alive(connection) == untouched


async def test_purged_messages_are_gone(manager: QueueManager, connection: Any) -> None:
    await insert(connection, "m")
    assert await manager.purge_dead(["m"]) == 1
    assert await connection.fetchval("SELECT count(*) FROM queue_messages") == 0


@pytest.mark.parametrize("change", ["redrive_dead", "purge_dead"])
@pytest.mark.parametrize("letters", [0, 1, 2, 3, 7])
async def test_more_than_a_batch(
    manager: QueueManager, connection: Any, monkeypatch: pytest.MonkeyPatch, change: str, letters: int
) -> None:
    monkeypatch.setattr(queue_repository, "DEAD_BATCH", 2)
    untouched = await insert_alive(connection)
    for number in range(letters):
        await insert(connection, f"m{number}", minute=number // 3)  # several died at the same instant
    assert await getattr(manager, change)() == letters
    assert await dead_ids(connection) == []
    assert await alive(connection) == untouched


async def test_a_dead_letter_whose_key_is_taken_stays_dead(manager: QueueManager, connection: Any) -> None:
    sent = await manager.send("queue", dedupe_key="key")
    await insert(connection, "taken", dedupe_key="key")
    await insert(connection, "other queue", queue_name="other", dedupe_key="key")
    await insert(connection, "other workspace", workspace_id="acme", dedupe_key="key")
    await insert(connection, "other key", dedupe_key="free")
    await insert(connection, "finished", dlq_at=None, completed_at=NOON, dedupe_key="free")
    assert await manager.redrive_dead() == 3
    assert await dead_ids(connection) == ["taken"]
    letter = await manager.get_dead("taken")
    assert (letter.attempts, letter.worker_deaths, letter.dead_at) == (3, 1, NOON)
    await connection.execute("UPDATE queue_messages SET completed_at = now() WHERE id = $1", sent.id)
    assert await manager.redrive_dead(["taken"]) == 1


@pytest.mark.parametrize("batch", [1, 2, 1000])
async def test_of_several_with_one_key_the_first_begins_anew(
    manager: QueueManager, connection: Any, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    monkeypatch.setattr(queue_repository, "DEAD_BATCH", batch)
    for message_id, minute in (("a", 3), ("b", 1), ("c", 2)):
        await insert(connection, message_id, minute, dedupe_key="key")
    await insert(connection, "d", 4)
    await insert(connection, "e", 5)
    assert await manager.redrive_dead() == 3
    assert await dead_ids(connection) == ["a", "c"]
    assert await manager.redrive_dead() == 0
    assert await manager.purge_dead() == 2


async def test_a_key_that_is_taken_meanwhile_is_no_error(manager: QueueManager, connection: Any, dsn: str) -> None:
    """A message with the key is sent by a transaction that commits while the redrive waits for it."""
    await insert(connection, "m", dedupe_key="key")
    await insert(connection, "n")
    observer = await asyncpg.connect(dsn)
    waits = "SELECT EXISTS (SELECT FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE NOT granted AND datname = $1)"
    name = await observer.fetchval("SELECT current_database()")
    async with connection.transaction(), asyncio.timeout(30):
        await manager.send("queue", dedupe_key="key", connection=connection)
        redrive = asyncio.create_task(manager.redrive_dead())
        while not await observer.fetchval(waits, name):
            pass
    assert await redrive == 1
    assert await dead_ids(connection) == ["m"]
    await observer.close()


async def test_letters_that_another_is_changing_are_left_to_it(manager: QueueManager, connection: Any) -> None:
    await insert(connection, "locked")
    await insert(connection, "free")
    async with connection.transaction():
        await connection.execute("SELECT FROM queue_messages WHERE id = 'locked' FOR UPDATE")
        assert await manager.purge_dead() == 1
    assert await dead_ids(connection) == ["locked"]


@pytest.mark.parametrize("change", ["redrive_dead", "purge_dead"])
async def test_several_at_once_change_each_letter_once(
    manager: QueueManager, connection: Any, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    monkeypatch.setattr(queue_repository, "DEAD_BATCH", 7)
    for number in range(100):
        await insert(connection, f"m{number}", minute=number, dedupe_key=f"key{number // 2}")
    counts = await asyncio.gather(*(getattr(manager, change)() for _ in range(5)))
    assert sum(counts) == (50 if change == "redrive_dead" else 100)
    assert len(await dead_ids(connection)) == (50 if change == "redrive_dead" else 0)


@pytest.mark.parametrize(
    ("method", "arguments", "field"),
    [
        ("list_dead", {"limit": 0}, "limit"),
        ("list_dead", {"limit": 10_001}, "limit"),
        ("list_dead", {"limit": True}, "limit"),
        ("list_dead", {"queue_name": ""}, "queue_name"),
        ("list_dead", {"workspace_id": " acme"}, "workspace_id"),
        ("list_dead", {"after_id": ""}, "after_id"),
        ("get_dead", {"message_id": ""}, "message_id"),
        ("get_dead", {"message_id": 7}, "message_id"),
        ("redrive_dead", {"queue_name": ""}, "queue_name"),
        ("redrive_dead", {"workspace_id": "a\0b"}, "workspace_id"),
        ("redrive_dead", {"message_ids": "m"}, "message_ids"),
        ("redrive_dead", {"message_ids": ["m", ""]}, "message_ids"),
        ("redrive_dead", {"message_ids": ["m", None]}, "message_ids"),
        ("purge_dead", {"queue_name": 7}, "queue_name"),
        ("purge_dead", {"workspace_id": ""}, "workspace_id"),
        ("purge_dead", {"message_ids": "m"}, "message_ids"),
        ("purge_dead", {"message_ids": ["m", "a\nb"]}, "message_ids"),
    ],
)
async def test_wrong_input_names_its_field_and_changes_nothing(
    manager: QueueManager, connection: Any, method: str, arguments: dict[str, Any], field: str
) -> None:
    await insert(connection, "m")
    with pytest.raises(InvalidInputError) as raised:
        await getattr(manager, method)(**arguments)
    assert raised.value.field == field
    assert await dead_ids(connection) == ["m"]
