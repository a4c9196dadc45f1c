"""Messages while another session holds an old snapshot: nothing that is finished can be removed, and nobody wades."""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from cron_ticks.database import Database
from cron_ticks.settings import Settings
from cron_ticks.sweeps import Sweeps
from support.rig import Rig, handling, rig
from token_queue import Message, QueueManager, floors
from token_queue.floors import Floors, Level
from token_queue.hand import MOST_FETCHES
from token_queue.queue_sql import FETCH_MESSAGES, LOOK

FINISHED = 20_000
FEW_BUFFERS = 150
LEASE = timedelta(seconds=10)

FILL = """
INSERT INTO queue_messages (id, queue_name, workspace_id, payload, process_after, inserted_at)
SELECT 'msg_' || n, 'queue', 'ws', '{}', statement_timestamp() - interval '1 hour' + n * interval '1 millisecond',
    statement_timestamp()
FROM generate_series(1, $1::int) AS n
ORDER BY md5(n::text) -- so that each is on another page than the one before
"""
LAST = ("queue", "ws", 2)


@pytest.fixture
async def snapshot(dsn: str) -> AsyncIterator[None]:
    """Somebody's long transaction."""
    holder = await asyncpg.connect(dsn)
    await holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1")
    yield
    await holder.close()


@pytest.fixture
async def manager(settings: Settings) -> AsyncIterator[QueueManager]:
    async with QueueManager(settings=settings) as opened:
        yield opened


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sweep counts as slow."""
    monkeypatch.setattr(floors, "QUICK", timedelta(0))
    monkeypatch.setattr(floors, "QUICK_PER_LEVEL", timedelta(0))
    monkeypatch.setattr(floors, "FEW_DEAD", 0)


class Clock:
    """Stands still, so that no sweep is due but by its hand."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def sweep_now(self) -> None:
        self.seconds += 1e9


async def buffers(connection: Any, statement: str, *arguments: object) -> int:
    """What it touches, run for real and rolled back."""
    transaction = connection.transaction()
    await transaction.start()
    try:
        await connection.execute("SET LOCAL enable_seqscan = off")
        found = await connection.fetchval(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", *arguments)
    finally:
        await transaction.rollback()
    plan = json.loads(found)[0]["Plan"]
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


async def look_buffers(database: Database, connection: Any, levels: dict[Level, datetime]) -> int:
    columns = [list(column) for column in zip(*levels, strict=True)] or [[], [], []]
    looking = (not levels, True, *columns, list(levels.values()), [], [])
    arguments = (None, "ticker_me", False, ["queue"], [1], [1000], [], [], ["token_new"], LEASE, False, [], *looking)
    return await buffers(connection, database.sql(LOOK.at("changes")), *arguments)


async def fetch_buffers(database: Database, connection: Any, floor: datetime | None) -> int:
    arguments = (None, ["token_1"], [10], [], [True], [False], True, *[[floor]] * 4)
    return await buffers(connection, database.sql(FETCH_MESSAGES.at("changes")), *arguments)


@pytest.mark.every_version
@pytest.mark.usefixtures("snapshot")
@pytest.mark.parametrize("analysed", [True, False])
async def test_looks_and_fetches_from_the_floor_on_do_not_read_what_is_finished(
    database: Database,
    connection: Any,
    analysed: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    await connection.execute("ALTER TABLE queue_messages SET (autovacuum_enabled = off)")
    await connection.execute(FILL, FINISHED + 20)
    finish = "UPDATE queue_messages SET completed_at = statement_timestamp() WHERE substr(id, 5)::int <= $1"
    await connection.execute(finish, FINISHED)
    lease = "INSERT INTO queue_tokens VALUES ('token_1', 'queue', 'ws', 0, 'ticker_other', now(), now() + $1)"
    await connection.execute(lease, LEASE)
    if analysed:
        await connection.execute("ANALYZE queue_messages, queue_tokens")
    first = await connection.fetchval("SELECT min(process_after) FROM queue_messages WHERE completed_at IS NULL")
    found = (
        await look_buffers(database, connection, {LAST: first, ("queue", "empty", 2): first}),
        await fetch_buffers(database, connection, first),
        await look_buffers(database, connection, {}),
        await fetch_buffers(database, connection, None),
    )
    assert max(found[:2]) < FEW_BUFFERS, found
    assert min(found[2:]) > FINISHED / 2, found


async def floored(worker: Rig, clock: Clock) -> None:
    """Two sweeps that count as slow."""
    for _ in range(2):
        clock.sweep_now()
        await worker.ticker.run_once()
        await worker.settle()


@pytest.mark.sql
@pytest.mark.usefixtures("snapshot", "impatient")
async def test_what_is_committed_late_below_the_floor_is_handled_by_the_next_sweep(
    database: Database, manager: QueueManager, connection: Any
) -> None:
    """A transaction that was open for a minute; what was sent after it, but committed before, has gone ahead."""
    handled: list[Any] = []
    clock = Clock()

    async def handle(message: Message) -> None:
        handled.append(message.payload)

    async with rig(database, handling(handle), floors=Floors(Sweeps(clock))) as worker:
        await manager.send("queue", "first", workspace_id="ws")
        await floored(worker, clock)
        await manager.send("queue", "second", workspace_id="ws")
        await worker.turn()
        assert handled == ["first", "second"]
        await connection.execute(
            "INSERT INTO queue_messages (id, queue_name, workspace_id, payload, process_after) "
            "VALUES ('late', 'queue', 'ws', '\"late\"', statement_timestamp() - interval '1 minute')"
        )
        await worker.turn()
        assert handled == ["first", "second"]
        clock.sweep_now()
        await worker.turn()
        assert handled == ["first", "second", "late"]


@pytest.mark.sql
@pytest.mark.usefixtures("impatient")
async def test_a_new_pair_is_found_by_the_next_sweep_which_is_not_slept_over(
    database: Database, manager: QueueManager
) -> None:
    handled: list[str | None] = []
    clock = Clock()

    async def handle(message: Message) -> None:
        handled.append(message.workspace_id)

    async with rig(database, handling(handle), hears=True, floors=Floors(Sweeps(clock))) as worker:
        await manager.send("queue", workspace_id="known")
        await floored(worker, clock)
        await manager.send("queue", workspace_id="new")
        await manager.send("queue", workspace_id="known")
        sleep = await worker.ticker.run_once()
        await worker.settle()
        assert handled == ["known", "known"]
        assert sleep < 1  # twenty times a quick sweep, not ten seconds
        clock.sweep_now()
        await worker.turn()
        assert handled == ["known", "known", "new"]


@pytest.mark.sql
@pytest.mark.usefixtures("snapshot", "impatient")
async def test_a_slow_handler_does_not_hold_the_floor_of_its_pair_down(
    database: Database, manager: QueueManager, connection: Any
) -> None:
    """Its message is unfinished, so the floor of its level stays; but its holder knows how far it has fetched."""
    begun, done = asyncio.Event(), asyncio.Event()
    handled: list[Any] = []
    clock = Clock()

    async def handle(message: Message) -> None:
        if message.payload == "slow":
            begun.set()
            await done.wait()
        handled.append(message.payload)

    moments = [datetime.now(UTC) - timedelta(hours=1) + timedelta(seconds=number) for number in range(3)]
    async with rig(database, handling(handle), floors=Floors(Sweeps(clock))) as worker:
        await floored(worker, clock)
        await manager.send_many("queue", ["slow", "quick"], workspace_id="ws")
        for payload, moment in zip(("slow", "quick"), moments, strict=False):
            text = "UPDATE queue_messages SET process_after = $2 WHERE payload = to_jsonb($1::text)"
            await connection.execute(text, payload, moment)
        clock.sweep_now()
        await worker.ticker.run_once()
        await begun.wait()
        await worker.writer.flush()
        (pair,) = worker.hand.pairs.values()
        assert pair.reached == {2: moments[1]}
        clock.sweep_now()
        await worker.ticker.run_once()
        assert pair.reached == {}
        done.set()
        await worker.settle()
        assert handled == ["quick", "slow"]


@pytest.mark.sql
@pytest.mark.usefixtures("snapshot", "impatient")
async def test_order_is_kept_and_failed_messages_come_back(
    database: Database, manager: QueueManager, connection: Any
) -> None:
    """Of a pair whose messages run one after the other, with a token that is replaced on the way."""
    handled: list[int] = []
    failed: list[int] = []
    clock = Clock()

    async def handle(message: Message) -> None:
        if message.payload % 10 == 0 and message.attempt == 1:
            failed.append(message.payload)
            raise ValueError("a failure")
        handled.append(message.payload)

    count = 3 * MOST_FETCHES
    async with rig(database, handling(handle, concurrency=1), floors=Floors(Sweeps(clock))) as worker:
        await manager.send_many("queue", list(range(count)), workspace_id="ws")
        await floored(worker, clock)
        while len(handled) + len(failed) < count:
            await worker.turn()
        assert handled == [number for number in range(count) if number % 10]
        assert failed == [number for number in range(count) if number % 10 == 0]
        await connection.execute("UPDATE queue_messages SET process_after = now() WHERE completed_at IS NULL")
        await worker.drain()
        assert sorted(handled) == list(range(count))


@pytest.mark.sql
@pytest.mark.usefixtures("impatient")
async def test_messages_of_a_dead_worker_are_not_below_the_floor(
    database: Database, manager: QueueManager, connection: Any
) -> None:
    """They were in hand, and so unfinished, when floors were taken."""
    handled: list[Any] = []
    clock = Clock()

    async def handle(message: Message) -> None:
        handled.append(message.payload)

    async with rig(database, handling(handle), worker_id="ticker_first") as first:
        await manager.send_many("queue", [0, 1, 2], workspace_id="ws")
        [token] = (await first.queue.look(handling(handle).all(), [10], most=1, lease=LEASE)).leased
        async with rig(database, handling(handle), floors=Floors(Sweeps(clock))) as second:
            await floored(second, clock)
            assert handled == []
            expire = "UPDATE queue_tokens SET leased_until = now() - interval '1 second' WHERE id = $1"
            await connection.execute(expire, token.id)
            await second.drain()
            assert handled == [0, 1, 2]
