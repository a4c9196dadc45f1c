"""The queue in real processes: killed, paused, stopped, without a server, asleep."""

import random
import signal
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import anyio
import pytest

from cron_ticks.database import Database
from cron_ticks.embedded import EmbeddedServer
from cron_ticks.settings import Settings
from support.processes import Processes, RunningProcess
from support.servers import postmaster, program_folder
from support.watching import watching
from token_queue import Message, QueueManager
from token_queue.ticker import Wakefulness


def handled(worker: RunningProcess, event: str = "handled") -> list[str]:
    return [line["message_id"] for line in worker.events if line["event"] == event]


@pytest.mark.soak(small=4, full=10)
async def test_killed_workers_lose_nothing_and_repeat_only_what_they_had(
    dsn: str, processes: Processes, connection: Any, size: int
) -> None:
    """A random worker is killed every second and replaced."""
    full = size == 10
    messages = 20_000 if full else 1_500
    lease = {} if full else {"lease_seconds": "2", "lease_renewal_seconds": "1"}
    async with QueueManager(dsn) as manager:
        for workspace in range(30):
            await manager.send_many("queue", range(messages // 30), workspace_id=f"ws_{workspace}")
    sent = messages // 30 * 30
    workers = [await processes.worker(dsn, "slow", **lease) for _ in range(size)]
    alive, killed = list(workers), []
    left = sent
    while left:
        await anyio.sleep(1)
        victim = random.choice(alive)  # noqa: S311
        await victim.kill()
        killed.append(victim)
        alive.remove(victim)
        alive.append(await processes.worker(dsn, "slow", **lease))
        workers.append(alive[-1])
        left = await connection.fetchval("SELECT count(*) FROM queue_messages WHERE completed_at IS NULL")
    for worker in alive:
        worker.send(signal.SIGTERM)
        assert await worker.wait() == 0
    runs: dict[str, list[RunningProcess]] = defaultdict(list)
    for worker in workers:
        for message_id in handled(worker, "handling"):  # begun counts, whether it came to its end or not
            runs[message_id].append(worker)
    assert len(runs) == sent
    repeated = {message_id: by for message_id, by in runs.items() if len(by) > 1}
    unexplained = {message_id for message_id, by in repeated.items() if sum(one not in killed for one in by) > 1}
    print(  # noqa: T201
        f"\n{size} workers, {sent} messages, {len(killed)} killed: all completed, {len(repeated)} repeated, "
        f"{len(unexplained)} of them by no killed worker"
    )
    assert unexplained == set()
    assert await connection.fetchval("SELECT count(*) FROM queue_messages WHERE dlq_at IS NOT NULL") == 0
    assert await connection.fetchval("SELECT count(*) FROM queue_tokens") == 0


async def test_a_paused_worker_changes_nothing_when_it_wakes_up(
    dsn: str, processes: Processes, connection: Any
) -> None:
    lease = {"lease_seconds": "1", "lease_renewal_seconds": "0.5"}
    async with QueueManager(dsn) as manager:
        sent = await manager.send("queue")
    zombie = await processes.worker(dsn, "until_told", **lease)
    await zombie.wait_for("handling")
    zombie.send(signal.SIGSTOP)
    other = await processes.worker(dsn, "quick", **lease)
    await other.wait_for("handled")
    other.send(signal.SIGTERM)
    assert await other.wait() == 0
    before = await connection.fetchrow("SELECT * FROM queue_messages")
    assert before["completed_at"] is not None
    zombie.send(signal.SIGCONT)
    zombie.tell("go on")
    await zombie.wait_for("token_lost")
    zombie.send(signal.SIGTERM)
    assert await zombie.wait() == 0
    assert await connection.fetchrow("SELECT * FROM queue_messages") == before
    assert (before["id"], before["attempts"], before["worker_deaths"]) == (sent.id, 2, 1)


async def test_a_message_that_kills_its_workers_ends_in_the_dead_letters_alone(
    dsn: str, processes: Processes, connection: Any
) -> None:
    async with QueueManager(dsn) as manager:
        await manager.send_many("queue", [{}] * 20, workspace_id="ws_A")
        killer = await manager.send("queue", {"kills": True}, workspace_id="ws_A")
        await manager.send_many("queue", [{}] * 20, workspace_id="ws_A")
        await manager.send_many("queue", [{}] * 20, workspace_id="ws_B")
    lease = {"lease_seconds": "1", "lease_renewal_seconds": "0.5"}
    for _ in range(3):
        worker = await processes.worker(dsn, "deadly", **lease)
        assert await worker.wait() == -signal.SIGKILL
    worker = await processes.worker(dsn, "deadly", **lease)
    async with watching(dsn, "queue_messages") as watch:
        await watch.until("SELECT count(*) = 61 FROM queue_messages WHERE coalesce(completed_at, dlq_at) IS NOT NULL")
    worker.send(signal.SIGTERM)
    assert await worker.wait() == 0
    [dead] = await connection.fetch("SELECT * FROM queue_messages WHERE dlq_at IS NOT NULL")
    assert (dead["id"], dead["attempts"], dead["worker_deaths"], dead["error_type"]) == (killer.id, 3, 3, "WorkerLost")
    worst = await connection.fetchval("SELECT max(worker_deaths) FROM queue_messages WHERE dlq_at IS NULL")
    assert (
        worst <= 2
    )  # each killer charges a neighbour once as such, and once at the most while nobody knows the killer


async def test_a_stopped_worker_gives_its_pair_to_another_at_once(dsn: str, processes: Processes) -> None:
    """Its lease would last for ten minutes more."""
    lease = {"lease_seconds": "600", "lease_renewal_seconds": "5"}
    async with QueueManager(dsn) as manager:
        await manager.send_many("queue", range(50))
    stopping = await processes.worker(dsn, "in_turn", **lease)
    await stopping.wait_for("handling")
    heir = await processes.worker(dsn, "quick", **lease)
    await heir.wait_for("notify_heard")
    stopping.send(signal.SIGTERM)
    await stopping.wait_for("worker_stopping")
    stopping.tell("go on")
    assert await stopping.wait() == 0
    await heir.wait_for("handled", times=49)
    assert len(handled(stopping)) == 1
    assert set(handled(heir)).isdisjoint(handled(stopping))
    heir.send(signal.SIGTERM)
    assert await heir.wait() == 0


async def test_nothing_is_lost_when_the_server_crashes_in_the_middle(tmp_path: Path, processes: Processes) -> None:
    server = EmbeddedServer(tmp_path / "data", program_folder(18))
    server.acquire()
    try:
        async with QueueManager(server.dsn) as manager:
            for workspace in range(10):
                await manager.send_many("queue", range(100), workspace_id=f"ws_{workspace}")
            workers = [await processes.worker(server.dsn, "slow") for _ in range(2)]
            await workers[0].wait_for("handled", times=100)
            crashing = postmaster(server)
            crashing.send_signal(signal.SIGQUIT)
            crashing.wait(timeout=30)
            await workers[0].wait_for("service_failed")
            server.revive()
            while len({message_id for worker in workers for message_id in handled(worker)}) < 1000:
                await workers[0].wait_for("handled", times=len(handled(workers[0])) + 1)
            for worker in workers:
                worker.send(signal.SIGTERM)
                assert await worker.wait() == 0
            left = await manager.database.fetchval("SELECT count(*) FROM queue_messages WHERE completed_at IS NULL")
        assert left == 0
    finally:
        server.release()


@pytest.mark.usefixtures("only_woken")
async def test_a_sender_wakes_up_a_worker_that_sleeps(dsn: str) -> None:
    """It would sleep for ten minutes."""
    manager = QueueManager(settings=Settings.load(dsn=dsn))
    arrived: list[str] = []
    enough = anyio.Event()

    @manager.handler("queue")
    async def handle(message: Message) -> None:
        arrived.append(message.id)
        if len(arrived) == 3:
            enough.set()

    async with (
        manager,
        QueueManager(dsn) as sender,
        watching(dsn, "queue_workers") as watch,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(manager.run)
        await watch.until("SELECT count(*) = 1 FROM queue_workers WHERE asleep")
        await sender.send("queue")
        await sender.send_many("queue", [1])
        async with sender.database.transaction() as transaction:
            await sender.send("queue", connection=transaction)
        with anyio.fail_after(30):
            await enough.wait()
        manager.stop()


@pytest.fixture
def only_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that look only when they are woken up, or when they know of something."""
    monkeypatch.setattr(Wakefulness, "longest_sleep", lambda *_, **__: 600.0)
    monkeypatch.setattr("token_queue.ticker.BEAT_SECONDS", 600.0)


@pytest.mark.usefixtures("only_woken")
async def test_a_handler_that_sends_to_its_own_pair_is_called_again_at_once(dsn: str) -> None:
    """Whoever is woken up by that message may still see the token that is about to be let go of."""
    manager = QueueManager(dsn)
    done = anyio.Event()

    @manager.handler("queue")
    async def handle(message: Message) -> None:
        if message.payload == 20:
            done.set()
        else:
            await manager.send("queue", message.payload + 1)

    async with manager, anyio.create_task_group() as tasks:
        await manager.send("queue", 1)
        tasks.start_soon(manager.run)
        with anyio.fail_after(30):
            await done.wait()
        manager.stop()


@pytest.mark.usefixtures("only_woken")
async def test_what_came_while_there_was_no_room_is_taken_when_there_is(dsn: str) -> None:
    manager = QueueManager(settings=Settings.load(dsn=dsn, message_concurrency=1))
    begun, go_on, other = anyio.Event(), anyio.Event(), anyio.Event()

    @manager.handler("queue")
    async def handle(message: Message) -> None:
        if message.workspace_id == "other":
            other.set()
        else:
            begun.set()
            await go_on.wait()

    async with manager, anyio.create_task_group() as tasks:
        await manager.send("queue", workspace_id="first")
        tasks.start_soon(manager.run)
        await begun.wait()
        await manager.send("queue", workspace_id="other")
        await anyio.wait_all_tasks_blocked()
        go_on.set()
        with anyio.fail_after(30):
            await other.wait()
        manager.stop()


@pytest.mark.usefixtures("only_woken")
async def test_a_delayed_message_of_a_busy_pair_is_taken_in_time(dsn: str) -> None:
    manager = QueueManager(dsn)
    begun, delayed = anyio.Event(), anyio.Event()

    @manager.handler("queue")
    async def handle(message: Message) -> None:
        if message.payload == "delayed":
            delayed.set()
        else:
            begun.set()
            await delayed.wait()

    async with manager, watching(dsn, "queue_workers") as watch, anyio.create_task_group() as tasks:
        await manager.send("queue", "long")
        tasks.start_soon(manager.run)
        await begun.wait()
        await watch.until("SELECT count(*) = 1 FROM queue_workers WHERE asleep")
        await manager.send("queue", "delayed", process_after=0.5)
        with anyio.fail_after(30):
            await delayed.wait()
        manager.stop()


async def test_handlers_that_use_up_the_connections_do_not_stop_renewals(dsn: str, connection: Any) -> None:
    settings = Settings.load(
        dsn=dsn, pool_max_size=2, message_concurrency=2, lease_seconds=1, lease_renewal_seconds=0.3
    )
    manager = QueueManager(settings=settings)
    holding, go_on = [anyio.Event(), anyio.Event()], anyio.Event()

    @manager.handler("queue")
    async def handle(message: Message) -> None:
        async with manager.database.connection():
            holding[message.payload].set()
            await go_on.wait()

    async with manager, anyio.create_task_group() as tasks:
        await manager.send_many("queue", [0, 1])
        tasks.start_soon(manager.run)
        for event in holding:
            await event.wait()
        before = await connection.fetchval("SELECT max(leased_until) FROM queue_tokens")
        async with watching(dsn, "queue_tokens") as watch:
            await watch.until(
                "SELECT max(leased_until) > $1::timestamptz + interval '1 second' FROM queue_tokens", before
            )
        go_on.set()
        manager.stop()
    assert await connection.fetchval("SELECT count(completed_at) FROM queue_messages") == 2


@pytest.mark.soak(small=15, full=60)
async def test_a_worker_with_nothing_to_do_hardly_asks(dsn: str, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """At most about one statement in three seconds, counted where they are sent, once it has come to rest."""
    statements: Counter[str] = Counter()
    counted = Database.fetch

    async def fetch(self: Database, text: str, *arguments: Any, **options: Any) -> Any:
        statements[text.split("\n")[1] if "\n" in text else text] += 1
        return await counted(self, text, *arguments, **options)

    manager = QueueManager(dsn)

    @manager.handler("queue")
    async def handle(_: Message) -> None: ...

    async with manager, anyio.create_task_group() as tasks:
        tasks.start_soon(manager.run)
        await anyio.sleep(12)
        monkeypatch.setattr(Database, "fetch", fetch)
        await anyio.sleep(size)
        total = sum(statements.values())
        print(f"\nan idle worker: {total} statements in {size} s, {total / size:.2f} a second")  # noqa: T201
        manager.stop()
    assert total <= size / 3 + 2, statements


@pytest.mark.soak(small=10_000, full=100_000)
async def test_a_huge_workspace_delays_another_by_no_more_than_one_batch(dsn: str, size: int) -> None:
    manager = QueueManager(dsn)
    order: list[str | None] = []
    sent_after = 0
    small_done = anyio.Event()

    @manager.handler("queue")
    async def handle(message: Message) -> None:
        nonlocal sent_after
        if len(order) == 3000 and not sent_after:
            sent_after = -1
            await manager.send("queue", workspace_id="small")
            sent_after = len(order)
        order.append(message.workspace_id)
        if message.workspace_id == "small":
            small_done.set()

    async with manager, anyio.create_task_group() as tasks:
        await manager.send_many("queue", ({} for _ in range(size)), workspace_id="huge")
        tasks.start_soon(manager.run)
        with anyio.fail_after(60):
            await small_done.wait()
        manager.stop()
    delayed_by = order.index("small") - sent_after
    print(f"\n{size} waiting: another workspace's message was completed after {delayed_by} of them")  # noqa: T201
    assert delayed_by <= manager.settings.message_batch_size


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_a_huge_workspace_with_slow_handlers_delays_another_by_no_more_than_one_batch(
    dsn: str, concurrency: int
) -> None:
    """A batch is then no more than the handlers at once: each place that becomes free is anybody's."""
    manager = QueueManager(settings=Settings.load(dsn=dsn, message_concurrency=concurrency))
    order: list[str | None] = []
    sent_after: list[int] = []
    small_done = anyio.Event()

    @manager.handler("queue")
    async def handle(message: Message) -> None:
        await anyio.sleep(0.02)
        order.append(message.workspace_id)
        if len(order) >= 20 and not sent_after:
            sent_after.append(0)
            await manager.send("queue", workspace_id="small")
            sent_after[0] = len(order)
        if message.workspace_id == "small":
            small_done.set()

    async with manager, anyio.create_task_group() as tasks:
        await manager.send_many("queue", [{}] * 300, workspace_id="huge")
        tasks.start_soon(manager.run)
        with anyio.fail_after(60):
            await small_done.wait()
        manager.stop()
    begun = order.index("small") - sent_after[0]
    assert begun <= 3 * concurrency
