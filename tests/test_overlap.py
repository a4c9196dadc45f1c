"""Overlap: what becomes of an occurrence while the message before it is unfinished. The database decides."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from cron_ticks.database import Database
from cron_ticks.repository import CronRepository
from cron_ticks.rows import FiredTicks
from cron_ticks.schedules import define_schedule
from cron_ticks.settings import Settings
from cron_ticks.tick_repository import firing_statement
from support.rig import handling, rig
from token_queue import Message, QueueManager, RejectMessage
from token_queue.queue_repository import QUEUE_SINK

pytestmark = [pytest.mark.sql, pytest.mark.pooled]

START = datetime(2026, 1, 1, tzinfo=UTC)
TEN = timedelta(seconds=10)


@pytest.fixture
def repository(database: Database, settings: Settings) -> CronRepository:
    return CronRepository(database, settings)


async def declare(repository: CronRepository, overlap: Any, name: str = "job", **options: Any) -> str:
    definition = define_schedule("queue", every=10, jitter=None, name=name, overlap=overlap, **options)
    return (await repository.save_schedule(definition, now=START)).schedule.id


async def fire(repository: CronRepository, now: datetime, limit: int = 100) -> list[FiredTicks]:
    return await repository.fire_due_ticks(QUEUE_SINK, ticker_id="ticker_me", limit=limit, now=now)


async def outcomes(repository: CronRepository, now: datetime) -> list[tuple[int, str]]:
    """Of each tick that was taken: which occurrence it is, and what became of it."""
    taken = await fire(repository, now)
    return sorted(((tick.scheduled_for - START) // TEN, tick.outcome) for tick in taken)


async def finish(connection: Any, how: str = "completed_at") -> None:
    await connection.execute(f"UPDATE queue_messages SET {how} = statement_timestamp() WHERE completed_at IS NULL")


async def runs(connection: Any) -> list[tuple[int, str]]:
    rows = await connection.fetch("SELECT scheduled_for, outcome FROM cron_runs ORDER BY scheduled_for")
    return [((row["scheduled_for"] - START) // TEN, row["outcome"]) for row in rows]


async def unfinished(connection: Any) -> int:
    found: int = await connection.fetchval(
        "SELECT count(*) FROM queue_messages WHERE completed_at IS NULL AND dlq_at IS NULL"
    )
    return found


async def test_by_default_messages_may_overlap(repository: CronRepository, connection: Any) -> None:
    await declare(repository, "allow")
    assert await outcomes(repository, START + 2 * TEN) == [(0, "enqueued"), (1, "enqueued"), (2, "enqueued")]
    assert await unfinished(connection) == 3


async def test_skip_passes_over_occurrences_while_a_message_is_unfinished(
    repository: CronRepository, connection: Any
) -> None:
    await declare(repository, "skip")
    assert await outcomes(repository, START) == [(0, "enqueued")]
    assert await outcomes(repository, START + TEN) == [(1, "overlapped")]
    await finish(connection)
    assert await outcomes(repository, START + 2 * TEN) == [(2, "enqueued")]
    assert await runs(connection) == [(0, "enqueued"), (1, "overlapped"), (2, "enqueued")]
    run = await connection.fetchrow("SELECT reason, message_id, lateness FROM cron_runs WHERE outcome = 'overlapped'")
    assert tuple(run) == ("the message before it is unfinished", None, None)


async def test_of_several_due_at_once_the_earliest_goes(repository: CronRepository, connection: Any) -> None:
    await declare(repository, "skip")
    assert await outcomes(repository, START + 2 * TEN) == [(0, "enqueued"), (1, "overlapped"), (2, "overlapped")]
    assert await unfinished(connection) == 1


async def test_a_message_that_waits_for_a_retry_is_unfinished(repository: CronRepository, connection: Any) -> None:
    await declare(repository, "skip")
    await fire(repository, START)
    await connection.execute(
        "UPDATE queue_messages SET attempts = 1, process_after = process_after + interval '1 hour'"
    )
    assert await outcomes(repository, START + TEN) == [(1, "overlapped")]


async def test_a_dead_message_is_finished(repository: CronRepository, connection: Any) -> None:
    await declare(repository, "skip")
    await fire(repository, START)
    await finish(connection, "dlq_at")
    assert await outcomes(repository, START + TEN) == [(1, "enqueued")]


async def test_schedules_of_one_queue_dont_hinder_each_other(repository: CronRepository, connection: Any) -> None:
    await declare(repository, "skip", "a")
    await declare(repository, "skip", "b")
    await declare(repository, "allow", "c")
    assert await outcomes(repository, START) == [(0, "enqueued")] * 3
    assert await unfinished(connection) == 3


async def test_queue_one_keeps_one_occurrence_waiting(repository: CronRepository, connection: Any) -> None:
    await declare(repository, "queue_one")
    assert await outcomes(repository, START) == [(0, "enqueued")]
    assert await outcomes(repository, START + TEN) == [(1, "waiting")]
    waiting = await connection.fetchrow("SELECT * FROM cron_ticks WHERE waiting")
    assert waiting["scheduled_for"] == waiting["execute_at"] == START + TEN
    assert (await runs(connection)) == [(0, "enqueued")]
    assert await outcomes(repository, START + 2 * TEN) == [(1, "waiting"), (2, "overlapped")]
    await finish(connection)
    [fired] = await fire(repository, START + 3 * TEN - timedelta(seconds=1))
    assert ((fired.scheduled_for - START) // TEN, fired.outcome, fired.lateness) == (
        1,
        "enqueued",
        timedelta(seconds=19),
    )
    assert await runs(connection) == [(0, "enqueued"), (1, "enqueued"), (2, "overlapped")]
    assert await outcomes(repository, START + 3 * TEN) == [(3, "waiting")]


async def test_of_several_waiting_at_once_the_earliest_stays(repository: CronRepository) -> None:
    await declare(repository, "queue_one")
    assert await outcomes(repository, START + 2 * TEN) == [(0, "enqueued"), (1, "waiting"), (2, "overlapped")]


@pytest.mark.parametrize("dies", [False, True])
async def test_what_waits_is_due_as_soon_as_the_message_is_finished(
    database: Database, repository: CronRepository, connection: Any, *, dies: bool
) -> None:
    """By the worker that ends it, for whatever reason; the ticker need not find out."""

    async def handle(_message: Message) -> None:
        if dies:
            raise RejectMessage

    now = await connection.fetchval("SELECT statement_timestamp()")
    definition = define_schedule("queue", every=3600, jitter=None, overlap="queue_one")
    saved = await repository.save_schedule(definition, now=now)
    await repository.trigger(saved.schedule.id)
    async with rig(database, handling(handle)) as worker:
        await worker.firer.run_once()
        assert await connection.fetchval("SELECT due_at > statement_timestamp() FROM cron_ticks WHERE waiting")
        await worker.ticker.run_once()
        await worker.settle()
        assert await connection.fetchval("SELECT due_at <= statement_timestamp() FROM cron_ticks WHERE waiting")
        await worker.turn()
    assert await connection.fetchval("SELECT count(*) FROM cron_runs WHERE outcome = 'enqueued'") == 2


async def test_an_edit_leaves_the_waiting_occurrence_alone(repository: CronRepository, connection: Any) -> None:
    await declare(repository, "queue_one")
    await outcomes(repository, START + TEN)
    definition = define_schedule("queue", every=7, jitter=None, name="job", overlap="queue_one")
    await repository.save_schedule(definition, now=START + TEN)
    assert await connection.fetchval("SELECT scheduled_for FROM cron_ticks WHERE waiting") == START + TEN
    await finish(connection)
    assert await outcomes(repository, START + TEN + timedelta(seconds=5)) == [(1, "enqueued"), (1, "waiting")]


async def test_a_trigger_obeys_the_policy_too(repository: CronRepository) -> None:
    schedule_id = await declare(repository, "skip")
    await fire(repository, START)
    await repository.trigger(schedule_id, now=START + timedelta(seconds=3))
    [tick] = await fire(repository, START + timedelta(seconds=3))
    assert (tick.origin, tick.outcome) == ("trigger", "overlapped")


async def test_an_occurrence_that_has_fired_does_not_wait(repository: CronRepository, connection: Any) -> None:
    """The gate holds for these ticks too, however they came here."""
    schedule_id = await declare(repository, "queue_one")
    await fire(repository, START)
    await finish(connection)
    await connection.execute(
        """INSERT INTO cron_ticks (id, schedule_id, schedule_name, queue_name, payload, scheduled_for, execute_at,
            due_at, created_at, overlap)
        VALUES ('tick_again', $1, 'job', 'queue', '{}', $2, $3, $3, $3, 'queue_one')""",
        schedule_id,
        START,
        START + timedelta(seconds=1),
    )
    await fire(repository, START + timedelta(seconds=1))
    assert await unfinished(connection) == 0
    assert await connection.fetchval("SELECT count(*) FROM cron_ticks WHERE id = 'tick_again'") == 0


@pytest.mark.parametrize("overlap", ["skip", "queue_one"])
async def test_tickers_at_work_at_the_same_time_let_one_through(
    repository: CronRepository, connection: Any, overlap: str
) -> None:
    for number in range(5):
        await declare(repository, overlap, f"n{number}")
    later = START + 3 * TEN

    async def ticker() -> list[FiredTicks]:
        return [tick for _ in range(5) for tick in await fire(repository, later, limit=3)]

    await asyncio.gather(*(ticker() for _ in range(8)))
    await fire(repository, later)
    assert await unfinished(connection) == 5
    assert await connection.fetchval("SELECT count(*) FROM cron_ticks WHERE waiting") == (
        5 if overlap == "queue_one" else 0
    )
    counted = dict(await connection.fetch("SELECT outcome, count(*) FROM cron_runs GROUP BY outcome"))
    assert counted == {"enqueued": 5, "overlapped": 10 if overlap == "queue_one" else 15}


async def test_a_dead_message_comes_back_only_if_no_other_is_unfinished(
    settings: Settings, repository: CronRepository, connection: Any
) -> None:
    await declare(repository, "skip")
    for k in range(3):
        await fire(repository, START + k * TEN)
        await finish(connection, "dlq_at")
    async with QueueManager(settings=settings) as manager:
        assert await manager.redrive_dead() == 1
        assert await manager.redrive_dead() == 0
        assert await unfinished(connection) == 1
        await finish(connection)
        assert await manager.redrive_dead() == 1


async def test_the_key_is_the_last_word(repository: CronRepository, connection: Any) -> None:
    await declare(repository, "skip")
    await fire(repository, START)
    with pytest.raises(asyncpg.UniqueViolationError):
        await connection.execute(
            """INSERT INTO queue_messages (id, queue_name, payload, schedule_id, exclusive)
            SELECT 'msg_other', queue_name, payload, schedule_id, true FROM queue_messages"""
        )


async def test_an_edit_does_not_make_again_what_was_skipped_before_its_time(
    repository: CronRepository, connection: Any
) -> None:
    """Jitter may end an occurrence before its nominal time; `max_runs` counts it once."""
    definition = define_schedule("queue", every=10, overlap="skip", max_runs=3, jitter=0.3)
    schedule = (await repository.save_schedule(definition, now=START)).schedule
    while (early := schedule.execute_at(START + TEN)) >= START + TEN:  # the next id moves it otherwise
        await repository.delete_schedule(schedule.id, now=START - TEN)
        schedule = (await repository.save_schedule(definition, now=START)).schedule
    await connection.execute("DELETE FROM cron_runs")
    assert await outcomes(repository, START) == [(0, "enqueued")]
    assert await outcomes(repository, early) == [(1, "overlapped")]
    await repository.update_schedule(schedule.id, lambda _: replace(definition, payload_json='{"a": 1}'), now=early)
    await finish(connection)
    assert await outcomes(repository, START + 7 * TEN) == [(2, "enqueued")]
    assert await runs(connection) == [(0, "enqueued"), (1, "overlapped"), (2, "enqueued")]


async def test_a_removal_sees_a_tick_that_is_just_being_put_back(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    """It waits for the firing; what that has put back was not there when it began to look."""
    schedule_id = await declare(repository, "queue_one")
    await fire(repository, START)
    deleting = asyncio.Event()

    async def delete() -> None:
        deleting.set()
        await repository.delete_schedule(schedule_id, now=START + TEN)

    async with asyncio.TaskGroup() as tasks, database.transaction() as firing:
        arguments = ("ticker_me", 100, START + TEN, None, "queue", 0, timedelta(seconds=60), [None] * 4)
        await database.fetch(firing_statement(QUEUE_SINK), *arguments, connection=firing)
        tasks.create_task(delete())
        await deleting.wait()
        while not await connection.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"):
            pass
    assert await connection.fetchval("SELECT count(*) FROM cron_ticks") == 0
    assert (1, "disabled") in await runs(connection)
