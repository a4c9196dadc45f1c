"""Tokens: who may process a pair, how that is taken over, and what it costs to find work."""

import json
from datetime import datetime, timedelta
from itertools import product
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from cron_ticks.database import Database
from cron_ticks.events import EventLevel, Noted
from cron_ticks.settings import Settings
from support.rig import handling, rig
from token_queue import Message, QueueManager
from token_queue.handlers import Handlers, QueueHandler
from token_queue.queue_repository import Failure, Look, QueueRepository, Token, Wanted
from token_queue.queue_sql import COMPLETE_MESSAGES, FAIL_MESSAGES, FETCH_MESSAGES, LOOK

pytestmark = [pytest.mark.sql, pytest.mark.pooled]

LEASE = timedelta(seconds=10)
LEVELS: tuple[EventLevel, ...] = ("off", "all")
FAILURE = Failure("Error", "late", None, timedelta(seconds=1))


async def nothing(_: Message) -> None: ...


def handled(*queues: str, tokens_per_pair: int = 1) -> list[QueueHandler]:
    handlers = Handlers(Settings())
    for queue in queues:
        handlers.register(queue, nothing, tokens_per_pair=tokens_per_pair)
    return handlers.all()


class OneWorker(QueueRepository):
    """A worker's repository with short words for tests."""

    def __init__(self, database: Database, worker_id: str, *, tokens_per_pair: int = 1) -> None:
        super().__init__(database, worker_id)
        self.handlers = handled("queue", tokens_per_pair=tokens_per_pair)

    async def see(self, *, most: int = 10, now: datetime | None = None, **options: Any) -> Look:
        rooms = [1000] * len(self.handlers)
        return await self.look(self.handlers, rooms, most=most, lease=LEASE, now=now, **options)

    async def lease(self, *, most: int = 10, now: datetime | None = None) -> list[Token]:
        return (await self.see(most=most, now=now)).leased

    async def take(self, token: Token, *, most: int = 100, in_hand: tuple[str, ...] = ()) -> list[str] | None:
        """Ids in order; None if the token is not ours."""
        shared = self.handlers[0].options.tokens_per_pair > 1
        fetched = await self.fetch([Wanted(token.id, most, in_hand, shared)])
        return [message.id for message in fetched[token.id].messages] if token.id in fetched else None


@pytest.fixture
async def manager(settings: Settings) -> Any:
    async with QueueManager(settings=settings) as opened:
        yield opened


@pytest.fixture
def first(database: Database) -> OneWorker:
    return OneWorker(database, "ticker_first")


@pytest.fixture
def second(database: Database) -> OneWorker:
    return OneWorker(database, "ticker_second")


async def in_eleven_seconds(connection: Any) -> datetime:
    instant: datetime = await connection.fetchval("SELECT statement_timestamp() + interval '11 seconds'")
    return instant


async def test_a_pair_has_one_token(manager: QueueManager, first: OneWorker, second: OneWorker) -> None:
    for workspace in (None, "ws_A", "ws_A"):
        await manager.send("queue", workspace_id=workspace)
    leased = await first.lease()
    assert {token.workspace_id for token in leased} == {None, "ws_A"}
    assert await second.lease() == []
    await first.complete([], release=[token.id for token in leased])
    assert len(await second.lease()) == 2


async def test_many_workers_at_once_lease_each_pair_once(manager: QueueManager, database: Database) -> None:
    for number in range(40):
        await manager.send("queue", workspace_id=f"ws_{number}")
    leased: list[str | None] = []

    async def work(number: int) -> None:
        worker = OneWorker(database, f"ticker_{number}")
        while tokens := await worker.lease(most=3):
            leased.extend(token.workspace_id for token in tokens)

    async with anyio.create_task_group() as tasks:
        for number in range(6):
            tasks.start_soon(work, number)
    assert sorted(leased, key=str) == sorted((f"ws_{number}" for number in range(40)), key=str)


async def test_only_pairs_with_due_messages_of_handled_queues_are_leased(
    manager: QueueManager, first: OneWorker
) -> None:
    await manager.send("other")
    await manager.send("queue", workspace_id="later", process_after=60)
    look = await first.see()
    assert look.leased == []
    assert look.due_in is not None
    assert timedelta(seconds=50) < look.due_in <= timedelta(seconds=60)


async def test_the_earliest_due_come_first_but_those_served_lately_last(
    manager: QueueManager, first: OneWorker, connection: Any
) -> None:
    for number, workspace in enumerate(("c", "a", "b")):
        sent = await manager.send("queue", workspace_id=workspace)
        await connection.execute(
            "UPDATE queue_messages SET process_after = process_after - make_interval(secs => $2) WHERE id = $1",
            sent.id,
            100 - number,
        )
    assert [token.workspace_id for token in await first.lease(most=1)] == ["c"]
    look = await first.see(most=1, served=[("queue", "a")])
    assert [token.workspace_id for token in look.leased] == ["b"]


async def test_no_more_pairs_of_a_queue_than_it_has_room_for(manager: QueueManager, database: Database) -> None:
    for queue in ("queue", "other"):
        for number in range(5):
            await manager.send(queue, workspace_id=f"ws_{number}")
    worker = QueueRepository(database, "ticker_me")
    look = await worker.look(handled("queue", "other"), [2, 1], most=10, lease=LEASE)
    assert sorted(token.queue_name for token in look.leased) == ["other", "queue", "queue"]


async def test_a_token_that_ran_out_is_taken_over_and_what_was_in_hand_is_charged(
    manager: QueueManager, first: OneWorker, second: OneWorker, connection: Any
) -> None:
    in_hand = await manager.send("queue")
    [token] = await first.lease()
    assert await first.take(token) == [in_hand.id]
    untouched = await manager.send("queue")
    assert await second.lease() == []
    later = await in_eleven_seconds(connection)
    look = await second.see(now=later)
    assert (look.leased, look.expired, look.charged) == ([], 1, 1)
    [taken] = await second.lease(now=later)
    assert await second.take(taken) == [in_hand.id]
    assert await second.take(taken, in_hand=(in_hand.id,)) == [untouched.id]
    rows = await connection.fetch("SELECT attempts, worker_deaths, error_type FROM queue_messages ORDER BY sequence")
    assert [tuple(row) for row in rows] == [(1, 1, "WorkerLost"), (0, 0, None)]


async def test_whoever_lost_the_token_can_end_nothing_any_more(
    manager: QueueManager, first: OneWorker, second: OneWorker, connection: Any
) -> None:
    sent = await manager.send("queue")
    [token] = await first.lease()
    await first.take(token)
    later = await in_eleven_seconds(connection)
    await second.see(now=later)
    [taken] = await second.lease(now=later)
    key = (sent.id, token.id)
    assert await first.complete([key], release=[token.id]) == set()
    assert await first.fail([(key, 1, FAILURE)]) == set()
    assert await first.bury([key]) == set()
    assert await first.renew([token.id], lease=LEASE) == set()
    assert await first.take(token) is None
    untouched = await connection.fetchrow("SELECT completed_at, dlq_at, attempts FROM queue_messages")
    assert tuple(untouched) == (None, None, 1)
    assert await second.complete([(sent.id, taken.id)]) == {taken.id}
    assert await connection.fetchval("SELECT completed_at IS NOT NULL AND attempts = 2 FROM queue_messages")


async def test_a_lost_token_takes_nothing_from_the_others(
    manager: QueueManager, first: OneWorker, connection: Any
) -> None:
    """One statement ends messages of several pairs, and lets go of them."""
    sent = {workspace: await manager.send("queue", workspace_id=workspace) for workspace in ("a", "b", "c")}
    tokens = {str(token.workspace_id): token.id for token in await first.lease()}
    await connection.execute("DELETE FROM queue_tokens WHERE id = $1", tokens["b"])
    keys = [(sent[workspace].id, tokens[workspace]) for workspace in sent]
    assert await first.complete(keys, release=[tokens["b"], tokens["c"]]) == {tokens["a"], tokens["c"]}
    completed = await connection.fetch(
        "SELECT workspace_id FROM queue_messages WHERE completed_at IS NOT NULL ORDER BY 1"
    )
    assert [row["workspace_id"] for row in completed] == ["a", "c"]
    assert await connection.fetchval("SELECT array_agg(id) FROM queue_tokens") == [tokens["a"]]


async def test_completing_locks_the_token_so_that_nobody_takes_it_over_meanwhile(
    manager: QueueManager, first: OneWorker, second: OneWorker, database: Database, connection: Any
) -> None:
    """A completion is under way (its transaction is open) when the token runs out: the look skips it."""
    sent = await manager.send("queue")
    [token] = await first.lease()
    await first.take(token)
    later = await in_eleven_seconds(connection)
    async with connection.transaction():
        await connection.fetch(database.sql(COMPLETE_MESSAGES.at("off")), None, [sent.id], [token.id], [])
        look = await second.see(now=later)
        assert (look.leased, look.expired) == ([], 0)
    look = await second.see(now=later)
    assert (look.expired, look.charged) == (1, 0)
    assert await connection.fetchval("SELECT worker_deaths FROM queue_messages") == 0


async def test_a_completion_waits_for_a_takeover_and_then_does_nothing(
    manager: QueueManager, first: OneWorker, connection: Any
) -> None:
    sent = await manager.send("queue")
    [token] = await first.lease()
    await first.take(token)
    ended: list[set[str]] = []

    async def complete() -> None:
        ended.append(await first.complete([(sent.id, token.id)]))

    async with anyio.create_task_group() as tasks, connection.transaction():  # a takeover that is not committed yet
        await connection.execute("DELETE FROM queue_tokens WHERE id = $1", token.id)
        tasks.start_soon(complete)
        with anyio.fail_after(30):
            while not await connection.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"):
                pass
        assert ended == []
    assert ended == [set()]
    assert await connection.fetchval("SELECT completed_at IS NULL FROM queue_messages")


async def test_a_token_that_ran_out_unnoticed_is_still_ours(
    manager: QueueManager, first: OneWorker, second: OneWorker, connection: Any
) -> None:
    """As after an outage of the server: nobody took over, so the work counts."""
    sent = await manager.send("queue")
    [token] = await first.lease()
    await first.take(token)
    later = await in_eleven_seconds(connection)
    assert await first.renew([token.id], lease=LEASE, now=later) == {token.id}
    assert (await second.see(now=later)).expired == 0
    assert await first.complete([(sent.id, token.id)], now=later) == {token.id}


async def test_a_worker_has_one_token_of_a_pair_at_the_most(manager: QueueManager, database: Database) -> None:
    """One fetch for two of them would give out the same messages twice."""
    worker = OneWorker(database, "ticker_me", tokens_per_pair=2)
    await manager.send_many("queue", range(4))
    [token] = await worker.lease()
    await worker.take(token, most=1)
    assert await worker.lease() == []
    assert len(await OneWorker(database, "ticker_other", tokens_per_pair=2).lease()) == 1


async def test_several_tokens_per_pair_never_have_a_message_twice(
    manager: QueueManager, database: Database, connection: Any
) -> None:
    await manager.send_many("queue", range(100), workspace_id="huge")
    taken: list[str] = []

    async def work(number: int) -> None:
        worker = OneWorker(database, f"ticker_{number}", tokens_per_pair=3)
        while tokens := await worker.lease():
            ids = await worker.take(tokens[0], most=7) or []
            taken.extend(ids)
            await worker.complete([(message_id, tokens[0].id) for message_id in ids], release=[tokens[0].id])

    async with anyio.create_task_group() as tasks:
        for number in range(5):
            tasks.start_soon(work, number)
    assert len(taken) == len(set(taken)) == 100
    assert await connection.fetchval("SELECT count(completed_at) FROM queue_messages") == 100


async def test_more_tokens_only_for_messages_beyond_those_in_hand(manager: QueueManager, database: Database) -> None:
    workers = [OneWorker(database, f"ticker_{number}", tokens_per_pair=2) for number in range(3)]
    await manager.send_many("queue", range(4))
    [token] = await workers[0].lease()
    assert len(await workers[0].take(token, most=2) or []) == 2
    [other] = await workers[1].lease()
    assert len(await workers[1].take(other, most=10) or []) == 2
    await manager.send("queue")
    assert await workers[2].lease() == []  # two at the most
    await workers[1].complete([], release=[other.id])
    [again] = await workers[2].lease()
    assert len(await workers[2].take(again, most=10) or []) == 3


async def test_a_worker_that_lost_its_token_stops_the_pair(
    manager: QueueManager, database: Database, second: OneWorker, connection: Any
) -> None:
    ended: list[str] = []
    begun = anyio.Event()

    async def handle(message: Message) -> None:
        begun.set()
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(message.id)

    sent = await manager.send("queue")
    waiting = await manager.send("queue")
    with capture_logs() as logs:
        async with rig(database, handling(handle, concurrency=1)) as parts:
            await parts.ticker.run_once()
            await begun.wait()
            await second.see(now=await in_eleven_seconds(connection))
            await parts.renewal.run_once()
            await parts.settle()
            assert parts.hand.pairs == {}
    assert ended == [sent.id]
    assert [entry["event"] for entry in logs] == ["token_lost"]
    rows = await connection.fetch("SELECT id, attempts FROM queue_messages ORDER BY sequence")
    assert [row["id"] for row in rows] == [sent.id, waiting.id]


async def test_nothing_is_started_after_a_pause_longer_than_the_lease(
    manager: QueueManager, database: Database
) -> None:
    """As after SIGSTOP: what is still in hand may be another worker's, so a renewal has to say that it is ours."""
    seen: list[int] = []

    async def handle(message: Message) -> None:
        seen.append(message.payload)
        [pair] = parts.hand.pairs.values()
        pair.valid_until = 0.0

    await manager.send_many("queue", range(2))
    async with rig(database, handling(handle, concurrency=1), message_concurrency=2) as parts:
        await parts.ticker.run_once()
        await anyio.wait_all_tasks_blocked()
        await parts.writer.flush()
        await parts.ticker.run_once()
        await anyio.wait_all_tasks_blocked()
        assert seen == [0]
        await parts.renewal.run_once()
        await anyio.wait_all_tasks_blocked()
        assert seen == [0, 1]


async def test_a_worker_does_not_take_its_own_tokens_for_a_dead_ones(
    manager: QueueManager, first: OneWorker, second: OneWorker, connection: Any
) -> None:
    """After an outage longer than the lease it may look before it renews. Tokens that it never heard of do expire."""
    await manager.send("queue", workspace_id="mine")
    await manager.send("queue", workspace_id="answer lost")
    tokens = {token.workspace_id: token.id for token in await first.lease()}
    later = await in_eleven_seconds(connection)
    assert (await first.see(now=later, in_hand={tokens["mine"]: ("queue", "mine")})).expired == 1
    assert await connection.fetchval("SELECT array_agg(id) FROM queue_tokens") == [tokens["mine"]]
    assert (await second.see(now=later)).expired == 1


async def test_a_failure_is_noted_once_however_often_it_is_written(
    manager: QueueManager, first: OneWorker, connection: Any
) -> None:
    """As when the answer to the first write is lost."""
    sent = await manager.send("queue")
    [token] = await first.lease()
    await first.take(token)
    for _ in range(3):
        assert await first.fail([((sent.id, token.id), 1, FAILURE)]) == {token.id}
    row = await connection.fetchrow("SELECT attempts, cardinality(failed_at) FROM queue_messages")
    assert tuple(row) == (1, 1)


async def test_a_worker_with_a_suspect_leaves_pairs_that_begin_with_one_to_others(
    manager: QueueManager, database: Database, first: OneWorker, second: OneWorker, connection: Any
) -> None:
    await leave_suspects(manager, database, connection)
    await manager.send("queue", workspace_id="ws_C")
    assert [token.workspace_id for token in (await first.see(suspect=True)).leased] == ["ws_C"]
    assert {token.workspace_id for token in await second.lease()} == {"ws_A", "ws_B"}


async def test_a_suspect_is_chosen_where_nothing_else_is_in_hand(
    manager: QueueManager, database: Database, first: OneWorker, connection: Any
) -> None:
    """One that has to wait for its pair's hand doesn't keep those of other pairs waiting."""
    await leave_suspects(manager, database, connection)
    busy, idle = await first.lease()
    wanted = [Wanted(busy.id, 10, ["something"]), Wanted(idle.id, 10, [])]
    fetched = await first.fetch(wanted)
    assert fetched[busy.id].messages == []
    assert [message.payload_json for message in fetched[idle.id].messages] == ['"suspect"']


async def test_in_order_means_that_nothing_passes_a_suspect(
    manager: QueueManager, database: Database, first: OneWorker, connection: Any
) -> None:
    await leave_suspects(manager, database, connection)
    [token, _] = await first.lease()
    for in_order, expected in ((True, []), (False, ['"normal"'])):
        fetched = await first.fetch([Wanted(token.id, 10, [], in_order=in_order)], suspects=False)
        assert [message.payload_json for message in fetched[token.id].messages] == expected


async def test_a_fetch_knows_when_the_pair_has_more(manager: QueueManager, first: OneWorker) -> None:
    await manager.send("queue")
    [token] = await first.lease()
    assert (await first.fetch([Wanted(token.id, 10, [])]))[token.id].due_in is None
    for delay in (300, 100):
        await manager.send("queue", process_after=delay, priority="low")
    due_in = (await first.fetch([Wanted(token.id, 10, [])]))[token.id].due_in
    assert due_in is not None
    assert timedelta(seconds=90) < due_in <= timedelta(seconds=100)


@pytest.mark.parametrize("end", ["fail", "bury"])
async def test_what_has_ended_is_not_charged_for_a_later_death_of_its_worker(
    manager: QueueManager, first: OneWorker, second: OneWorker, connection: Any, end: str
) -> None:
    """Not even if it lives again by then, as a retry or a redriven message does."""
    sent = await manager.send("queue")
    [token] = await first.lease()
    await first.take(token)
    key = (sent.id, token.id)
    await (first.fail([(key, 1, FAILURE)]) if end == "fail" else first.bury([key]))
    await manager.redrive_dead()
    before = await connection.fetchrow("SELECT * FROM queue_messages")
    look = await second.see(now=await in_eleven_seconds(connection))
    assert (look.expired, look.charged) == (1, 0)
    assert await connection.fetchrow("SELECT * FROM queue_messages") == before


async def leave_suspects(manager: QueueManager, database: Database, connection: Any) -> None:
    """Two pairs with two messages each, with which a worker died, and one message each that came later."""
    dying = OneWorker(database, "ticker_dying")
    for workspace in ("ws_A", "ws_B"):
        await manager.send_many("queue", ["suspect"] * 2, workspace_id=workspace)
    for token in await dying.lease():
        await dying.take(token)
    await dying.see(now=await in_eleven_seconds(connection))
    for workspace in ("ws_A", "ws_B"):
        await manager.send("queue", "normal", workspace_id=workspace)


async def test_a_process_has_one_suspect_in_hand_and_that_alone_of_its_pair(
    manager: QueueManager, database: Database, first: OneWorker, connection: Any
) -> None:
    await leave_suspects(manager, database, connection)
    tokens = await first.lease()
    fetched = await first.fetch([Wanted(token.id, 10, [], shared=False) for token in tokens])
    hands = sorted([message.payload_json for message in taken.messages] for taken in fetched.values())
    assert hands == [['"normal"'], ['"suspect"']]
    in_flight = await connection.fetchval("SELECT sum(cardinality(in_flight)) FROM queue_tokens")
    assert in_flight == 2


async def test_a_suspect_waits_until_its_pair_has_nothing_else_in_hand(
    manager: QueueManager, database: Database, first: OneWorker, connection: Any
) -> None:
    await leave_suspects(manager, database, connection)
    [token, _] = await first.lease()
    [normal] = (await first.fetch([Wanted(token.id, 10, [], shared=False)], suspects=False))[token.id].messages
    assert normal.payload_json == '"normal"'
    left = (await first.fetch([Wanted(token.id, 10, [normal.id], shared=False)]))[token.id]
    assert (left.messages, left.drained) == ([], False)


async def test_messages_of_a_dead_worker_run_one_by_one(
    manager: QueueManager, database: Database, connection: Any
) -> None:
    running, most = 0, 0

    async def handle(message: Message) -> None:
        nonlocal running, most
        running += message.payload == "suspect"
        most = max(most, running)
        await anyio.lowlevel.checkpoint()
        running -= message.payload == "suspect"

    await leave_suspects(manager, database, connection)
    async with rig(database, handling(handle)) as parts:
        await parts.drain()
    assert most == 1
    attempts = await connection.fetch("SELECT attempts FROM queue_messages WHERE completed_at IS NOT NULL ORDER BY 1")
    assert [row["attempts"] for row in attempts] == [1, 1, 2, 2, 2, 2]


SWEEPING: tuple[object, ...] = (True, False, [], [], [], [], [], [])  # of a look: the last arguments


async def plan_nodes(connection: Any, statement: str, *arguments: object) -> tuple[set[str], int]:
    """The tables read from end to end, and the buffers that the statement touched."""
    transaction = connection.transaction()
    await transaction.start()
    try:
        await connection.execute("SET LOCAL enable_seqscan = off")  # as on every connection of ours
        [row] = await connection.fetch(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", *arguments)
    finally:
        await transaction.rollback()
    plan = json.loads(row[0])[0]["Plan"]
    scanned: set[str] = set()

    def visit(node: dict[str, Any]) -> None:
        if node["Node Type"] == "Seq Scan":
            scanned.add(node["Relation Name"])
        for child in node.get("Plans", ()):
            visit(child)

    visit(plan)
    return scanned, plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]


FILL = """
INSERT INTO queue_messages (id, queue_name, workspace_id, payload, process_after, inserted_at)
SELECT 'msg_' || n, 'queue', 'ws_' || n % 1000, '{}', statement_timestamp(), statement_timestamp()
FROM generate_series(1, $1::int) AS n
"""


async def look_buffers(database: Database, connection: Any) -> int:
    ids = [f"token_{number}" for number in range(10)]
    arguments: tuple[object, ...] = (
        None,
        "ticker_me",
        False,
        ["queue"],
        [1],
        [1000],
        [],
        [],
        ids,
        LEASE,
        False,
        [],
        *SWEEPING,
    )
    scanned, buffers = await plan_nodes(connection, database.sql(LOOK.at("all")), *arguments)
    assert "queue_messages" not in scanned
    return buffers


@pytest.mark.soak(small=50_000, full=1_000_000)
async def test_finding_work_costs_by_the_number_of_pairs_not_by_the_backlog(
    database: Database, connection: Any, size: int, request: pytest.FixtureRequest
) -> None:
    await connection.execute(FILL, 1000)
    await connection.execute("VACUUM ANALYZE queue_messages")
    few = await look_buffers(database, connection)
    await connection.execute("TRUNCATE queue_messages")
    await connection.execute(FILL, size)
    await connection.execute("VACUUM ANALYZE queue_messages")
    many = await look_buffers(database, connection)
    print(f"\na look at 1,000 pairs: {few} buffers with 1,000 messages, {many} with {size:,} ({request.node.name})")  # noqa: T201
    assert many < 2 * few


@pytest.mark.parametrize("analysed", [True, False])
async def test_no_statement_reads_the_whole_table(database: Database, connection: Any, analysed: bool) -> None:  # noqa: FBT001
    await connection.execute("ALTER TABLE queue_messages SET (autovacuum_enabled = off)")
    await connection.execute(FILL, 5000)
    if analysed:
        await connection.execute("VACUUM ANALYZE queue_messages")
    await connection.execute(
        "INSERT INTO queue_tokens VALUES ('token_1', 'queue', 'ws_1', 0, 'ticker_me', now(), now() + interval '1 hour')"
    )
    calls: dict[Noted, tuple[object, ...]] = {
        LOOK: (None, "ticker_me", False, ["queue"], [1], [1000], [], [], ["token_2"], LEASE, False, [], *SWEEPING),
        FETCH_MESSAGES: (None, ["token_1"], [3], [], [True], [False], True, *[[None]] * 4),
        COMPLETE_MESSAGES: (None, ["msg_1", "msg_1001"], ["token_1"], []),
        FAIL_MESSAGES: (None, ["msg_2001"], ["token_1"], ["token_1"], ["E"], ["m"], [None], [None], [1]),
    }
    for (statement, arguments), level in product(calls.items(), LEVELS):
        scanned, _ = await plan_nodes(connection, database.sql(statement.at(level)), *arguments)
        assert scanned & {"queue_messages", "queue_tokens"} == set()
