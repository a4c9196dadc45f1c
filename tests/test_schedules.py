"""Schedules in the database: declaring, editing and removing them, alone and all at once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import asyncpg
import pytest
from structlog.testing import capture_logs

from cron_ticks.database import Database
from cron_ticks.errors import InvalidInputError, ScheduleNotFoundError
from cron_ticks.ids import new_tick_id
from cron_ticks.repository import CronRepository, Saved
from cron_ticks.schedule_manager import ScheduleManager
from cron_ticks.schedules import define_schedule
from cron_ticks.settings import Settings
from token_queue import QueueManager
from token_queue.queue_repository import QueueSink

pytestmark = pytest.mark.sql

START = datetime(2026, 1, 1, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
Row = dict[str, Any]


@pytest.fixture
async def manager(settings: Settings) -> AsyncIterator[QueueManager]:
    async with QueueManager(settings=settings) as opened:
        yield opened


@pytest.fixture
def repository(database: Database) -> CronRepository:
    return CronRepository(database)


async def save(repository: CronRepository, *, now: datetime, every: float = 10, **changes: Any) -> Saved:
    definition = define_schedule("queue", every=every, **changes)
    return await repository.save_schedule(definition, missed_after=MINUTE, now=now)


async def cursor_of(connection: "asyncpg.Connection[asyncpg.Record]", schedule_id: str) -> datetime:
    found: datetime = await connection.fetchval(
        "SELECT next_tick_needed_at FROM cron_schedule_cursors WHERE schedule_id = $1", schedule_id
    )
    return found


async def insert_ticks(
    connection: "asyncpg.Connection[asyncpg.Record]", schedule_id: str, *occurrences: datetime
) -> None:
    await connection.executemany(
        """INSERT INTO cron_ticks (id, schedule_id, schedule_name, queue_name, payload,
            scheduled_for, execute_at, due_at, created_at)
        VALUES ($1, $2, 'queue', 'queue', '{}', $3, $3, $3, $3)""",
        [(new_tick_id(), schedule_id, occurrence) for occurrence in occurrences],
    )


async def ticks_of(connection: "asyncpg.Connection[asyncpg.Record]", schedule_id: str) -> list[datetime]:
    rows = await connection.fetch(
        "SELECT scheduled_for FROM cron_ticks WHERE schedule_id = $1 ORDER BY scheduled_for", schedule_id
    )
    return [row["scheduled_for"] for row in rows]


async def test_a_new_schedule_is_due_at_once(repository: CronRepository, connection: Any) -> None:
    saved = await save(repository, now=START, payload={"scope": "system"})
    assert saved.change == "created"
    assert saved.schedule.anchor_at == START
    assert saved.schedule.payload == {"scope": "system"}
    assert await cursor_of(connection, saved.schedule.id) == START


async def test_declaring_again_changes_nothing(repository: CronRepository, connection: Any) -> None:
    first = await save(repository, now=START, payload={"a": 1, "b": 2})
    again = await save(repository, now=START + MINUTE, payload={"b": 2, "a": 1})
    assert (again.change, again.schedule) == ("unchanged", first.schedule)
    assert await connection.fetchval("SELECT count(*) FROM cron_schedules") == 1


async def test_a_name_is_unique_per_workspace_and_for_the_whole_system(manager: QueueManager) -> None:
    system = await manager.schedule("queue", every=5)
    first = await manager.schedule("queue", every=5, workspace_id="ws_A")
    second = await manager.schedule("queue", every=5, workspace_id="ws_B")
    other = await manager.schedule("queue", every=5, name="other")
    assert len({system.id, first.id, second.id, other.id}) == 4
    assert await manager.schedule("queue", every=5) == system
    assert [found.id for found in await manager.list_schedules(workspace_id="ws_A")] == [first.id]


async def test_many_declarations_at_once_make_one_schedule(settings: Settings, connection: Any) -> None:
    """Separate pools, as separate pods have."""

    async def declare() -> str:
        async with QueueManager(settings=settings) as pod:
            return (await pod.schedule("queue", every=30, payload={"x": 1})).id

    ids = await asyncio.gather(*(declare() for _ in range(8)))
    assert len(set(ids)) == 1
    assert await connection.fetchval("SELECT count(*) FROM cron_schedule_cursors") == 1


async def test_an_edit_keeps_the_phase_and_replans_only_what_is_not_due(
    repository: CronRepository, connection: Any
) -> None:
    saved = await save(repository, now=START)
    schedule_id = saved.schedule.id
    await insert_ticks(connection, schedule_id, *(START + timedelta(seconds=10 * k) for k in range(6)))
    await connection.execute("UPDATE cron_schedule_cursors SET next_tick_needed_at = $1", START + MINUTE)
    edited = await save(repository, now=START + timedelta(seconds=25), every=15)
    assert edited.change == "edited"
    assert edited.schedule.anchor_at == START
    due_already = [START, START + timedelta(seconds=10), START + timedelta(seconds=20)]
    assert await ticks_of(connection, schedule_id) == due_already
    assert await cursor_of(connection, schedule_id) == START + timedelta(seconds=30)


async def test_an_edit_keeps_overdue_occurrences_that_nobody_has_made(
    repository: CronRepository, connection: Any
) -> None:
    saved = await save(repository, now=START, payload={"version": "old"})
    now = START + timedelta(seconds=35)
    await save(repository, now=now, every=7, payload={"version": "new"})
    assert await ticks_of(connection, saved.schedule.id) == [START + timedelta(seconds=10 * k) for k in range(4)]
    payloads = await connection.fetch("SELECT DISTINCT payload ->> 'version' AS version FROM cron_ticks")
    assert [row["version"] for row in payloads] == ["old"]
    assert await cursor_of(connection, saved.schedule.id) == START + timedelta(seconds=42)


async def test_declaring_what_is_there_waits_for_nobody(settings: Settings, connection: Any) -> None:
    """Another transaction has the schedule locked; a declaration that changes nothing doesn't mind."""
    quick = Settings.load(dsn=settings.dsn, statement_timeout_seconds=2)
    async with QueueManager(settings=quick) as manager:
        made = await manager.schedule("queue", every=5)
        async with connection.transaction():
            await connection.execute("SELECT FROM cron_schedules FOR UPDATE")
            assert await manager.schedule("queue", every=5) == made


async def test_declaring_while_others_delete_always_gives_a_schedule(
    repository: CronRepository, manager: QueueManager
) -> None:
    declared: list[tuple[int, Any]] = []

    async def declare() -> None:
        for number in range(30):
            schedule = await manager.schedule("queue", every=5, payload={"n": number})
            declared.append((number, schedule.payload))

    async def delete() -> None:
        while len(declared) < 60:
            for schedule in await repository.list_schedules():
                with suppress(ScheduleNotFoundError):
                    await repository.delete_schedule(schedule.id)

    await asyncio.gather(declare(), delete(), declare())
    assert all(payload == {"n": number} for number, payload in declared)


async def test_what_happens_to_a_schedule_is_logged(manager: QueueManager, connection: Any) -> None:
    with capture_logs() as logs:
        made = await manager.schedule("queue", every=5, workspace_id="ws")
        await manager.schedule("queue", every=5, workspace_id="ws")
        async with connection.transaction():
            await manager.schedule("queue", every=7, workspace_id="ws", connection=connection)
        await manager.delete_schedule(made.id)
    assert [(entry["event"], entry["in_callers_transaction"]) for entry in logs] == [
        ("schedule_created", False),
        ("schedule_edited", True),
        ("schedule_deleted", False),
    ]
    assert {(entry["schedule_id"], entry["name"], entry["workspace_id"]) for entry in logs} == {
        (made.id, "queue", "ws")
    }


async def test_a_cancelled_edit_in_a_callers_transaction_is_whole_or_nothing(
    manager: QueueManager, connection: Any
) -> None:
    made = await manager.schedule("queue", every=5)
    outcomes = set()
    delays = [number * 0.0002 for number in range(50)] + [60]
    for number, delay in enumerate(delays):
        async with connection.transaction():
            with anyio.move_on_after(delay) as scope:
                every = 7 if number % 2 else 5
                await manager.schedule("queue", every=every, payload={"n": number}, connection=connection)
        outcomes.add(scope.cancelled_caught)
        schedule = await manager.get_schedule(made.id)
        cursor = await cursor_of(connection, made.id)
        assert schedule.rule.occurrence_at_or_after(cursor) == cursor
        assert scope.cancelled_caught or schedule.payload == {"n": number}
    assert outcomes == {True, False}


async def test_a_changed_payload_or_queue_is_an_edit(repository: CronRepository) -> None:
    await save(repository, now=START)
    assert (await save(repository, now=START, payload={"n": 1})).change == "edited"
    definition = define_schedule("elsewhere", every=10, name="queue", payload={"n": 1})
    moved = await repository.save_schedule(definition, missed_after=MINUTE, now=START)
    assert (moved.change, moved.schedule.queue_name) == ("edited", "elsewhere")


async def test_deleting_removes_pending_ticks(repository: CronRepository, connection: Any) -> None:
    saved = await save(repository, now=START)
    await insert_ticks(connection, saved.schedule.id, START)
    await repository.delete_schedule(saved.schedule.id)
    for table in ("cron_schedules", "cron_schedule_cursors", "cron_ticks"):
        assert await connection.fetchval(f"SELECT count(*) FROM {table}") == 0


async def test_what_does_not_exist_is_said_so(manager: QueueManager) -> None:
    for attempt in (manager.get_schedule("cron_x"), manager.delete_schedule("cron_x")):
        with pytest.raises(ScheduleNotFoundError, match="cron_x"):
            await attempt


async def test_bad_input_writes_nothing(manager: QueueManager, connection: Any) -> None:
    with pytest.raises(InvalidInputError, match="every"):
        await manager.schedule("queue", every=0)
    for limit in (0, 10**30, "5", True):
        with pytest.raises(InvalidInputError, match="limit"):
            await manager.list_schedules(limit=limit)  # type: ignore[arg-type]
    for wrong in (5, "a\0b", ""):
        with pytest.raises(InvalidInputError, match="schedule_id"):
            await manager.get_schedule(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="connection: must be an asyncpg connection, not str"):
        await manager.schedule("queue", every=5, connection="pool")  # type: ignore[arg-type]
    assert await connection.fetchval("SELECT count(*) FROM cron_schedules") == 0


async def test_a_rolled_back_transaction_leaves_no_schedule(manager: QueueManager, connection: Any) -> None:
    transaction = connection.transaction()
    await transaction.start()
    created = await manager.schedule("queue", every=5, connection=connection)
    assert await manager.get_schedule(created.id, connection=connection) == created
    await transaction.rollback()
    assert await manager.list_schedules() == []


async def test_listing_goes_page_by_page(manager: QueueManager) -> None:
    made = {(await manager.schedule("queue", every=5, name=f"n{number}")).id for number in range(7)}
    seen: list[str] = []
    while page := await manager.list_schedules(after_id=seen[-1] if seen else "", limit=3):
        seen += [schedule.id for schedule in page]
    assert len(seen) == 7
    assert set(seen) == made


async def test_edits_managers_and_firing_at_once_lose_and_double_nothing(
    settings: Settings, database: Database, connection: Any
) -> None:
    """The edit changes the payload alone, so the grid of occurrences stays: each must come out once."""
    repository = CronRepository(database)
    scheduler = ScheduleManager(database, repository, settings)
    begun = await connection.fetchval("SELECT statement_timestamp()")
    definition = define_schedule("queue", every=1, payload={"n": 0})
    schedule = (
        await repository.save_schedule(definition, missed_after=MINUTE, now=begun - timedelta(seconds=50))
    ).schedule

    async def edit() -> None:
        for number in range(40):
            await repository.save_schedule(
                define_schedule("queue", every=1, payload={"n": number}), missed_after=MINUTE
            )

    async def make() -> None:
        for _ in range(40):
            await scheduler.run_once()

    async def fire() -> None:
        for _ in range(60):
            await repository.fire_due_ticks(QueueSink(), ticker_id="ticker_test", limit=7)

    await asyncio.gather(edit(), make(), fire(), fire())
    await scheduler.run_once()
    now = await connection.fetchval("SELECT statement_timestamp()")
    while await repository.fire_due_ticks(QueueSink(), ticker_id="ticker_test", limit=100, now=now):
        pass
    rows = await connection.fetch("SELECT scheduled_for FROM queue_messages ORDER BY scheduled_for")
    assert [row["scheduled_for"] for row in rows] == schedule.rule.occurrences(
        schedule.anchor_at, now + timedelta(microseconds=1)
    )
