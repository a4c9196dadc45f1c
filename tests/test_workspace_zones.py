"""The default time zone of a workspace: whose schedules it holds for, and that a change leaves none behind."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from structlog.testing import capture_logs

from cron_ticks.database import Database
from cron_ticks.errors import InvalidInputError, ScheduleNotFoundError
from cron_ticks.repository import CronRepository
from cron_ticks.schedules import define_schedule
from cron_ticks.settings import Settings
from support.moved_clock import Engine
from token_queue import QueueManager

START = datetime(2026, 6, 1, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
BERLIN, KATHMANDU, NEW_YORK = "Europe/Berlin", "Asia/Kathmandu", "America/New_York"

# Who waits for a lock; the tables of statistics would show the same over and over inside a transaction.
WAITING = "SELECT count(DISTINCT pid) FROM pg_locks WHERE NOT granted"

# Schedules that are in another zone than their workspace says.
STRAY = """
SELECT count(*)
FROM cron_schedules AS schedule
LEFT JOIN cron_workspaces AS workspace USING (workspace_id)
WHERE schedule.cron IS NOT NULL AND schedule.timezone IS NULL
    AND schedule.zone <> coalesce(workspace.timezone, 'UTC')
"""


@pytest.fixture
async def manager(settings: Settings) -> AsyncIterator[QueueManager]:
    async with QueueManager(settings=settings) as opened:
        yield opened


@pytest.fixture
def engine(database: Database) -> Engine:
    return Engine(database, START)


async def ticks_of(connection: Any, schedule_id: str) -> list[datetime]:
    rows = await connection.fetch(
        "SELECT scheduled_for FROM cron_ticks WHERE schedule_id = $1 ORDER BY scheduled_for", schedule_id
    )
    return [row["scheduled_for"] for row in rows]


async def wait_for_lock(connection: Any, *tasks: "asyncio.Task[Any]", sessions: int = 1) -> None:
    async with asyncio.timeout(20):
        while await connection.fetchval(WAITING) < sessions:
            assert not any(task.done() for task in tasks)


# Which zone holds


@pytest.mark.sql
async def test_a_schedules_own_zone_comes_first_then_its_workspaces_then_utc(manager: QueueManager) -> None:
    before = await manager.schedule("before", cron="0 9 * * *", workspace_id="ws")
    assert (before.timezone, before.zone) == (None, "UTC")
    assert await manager.get_workspace_timezone("ws") is None
    assert await manager.set_workspace_timezone("ws", BERLIN) == 1
    assert await manager.get_workspace_timezone("ws") == BERLIN
    own = await manager.schedule("own", cron="0 9 * * *", workspace_id="ws", timezone=NEW_YORK)
    default = await manager.schedule("default", cron="0 9 * * *", workspace_id="ws")
    elsewhere = await manager.schedule("elsewhere", cron="0 9 * * *", workspace_id="other")
    system = await manager.schedule("system", cron="0 9 * * *")
    interval = await manager.schedule("interval", every=60, workspace_id="ws")
    found = {schedule.id: (schedule.timezone, schedule.zone) for schedule in await manager.list_schedules()}
    assert found == {
        before.id: (None, BERLIN),
        own.id: (NEW_YORK, NEW_YORK),
        default.id: (None, BERLIN),
        elsewhere.id: (None, "UTC"),
        system.id: (None, "UTC"),
        interval.id: (None, None),
    }


async def test_an_edit_goes_to_the_workspaces_zone_and_away_from_it(manager: QueueManager) -> None:
    await manager.set_workspace_timezone("ws", BERLIN)
    made = await manager.schedule("queue", cron="0 9 * * *", workspace_id="ws", timezone=NEW_YORK)
    back = await manager.update_schedule(made.id, timezone=None)
    assert (back.timezone, back.zone, back.version) == (None, BERLIN, 2)
    kept = await manager.update_schedule(made.id, payload={"n": 1})
    assert (kept.timezone, kept.zone) == (None, BERLIN)
    named = await manager.update_schedule(made.id, timezone=BERLIN)  # now it stays, whatever the workspace does
    assert (named.timezone, named.zone, named.version) == (BERLIN, BERLIN, 4)
    assert await manager.set_workspace_timezone("ws", KATHMANDU) == 0
    interval = await manager.update_schedule(made.id, every=60)
    assert interval.zone is None
    again = await manager.update_schedule(made.id, cron="0 9 * * *")
    assert (again.timezone, again.zone) == (None, KATHMANDU)


# Changing it


@pytest.mark.sql
async def test_a_change_replans_the_schedules_that_name_no_zone(engine: Engine, connection: Any) -> None:
    """A quarter past the hour in Kathmandu is half past in Berlin."""
    engine.now = START + 14 * MINUTE + 30 * SECOND
    options: dict[str, Any] = {"cron": "15 * * * *", "workspace_id": "ws"}
    default = await engine.declare(name="default", **options)
    own = await engine.declare(name="own", timezone=BERLIN, **options)
    elsewhere = await engine.declare(name="elsewhere", **options | {"workspace_id": "other"})
    moved = await engine.repository.set_workspace_timezone("ws", KATHMANDU, now=engine.now)
    assert [(saved.change, saved.schedule.id, saved.schedule.zone) for saved in moved] == [
        ("edited", default.id, KATHMANDU)
    ]
    assert await ticks_of(connection, default.id) == []
    for schedule in (own, elsewhere):
        assert await ticks_of(connection, schedule.id) == [START + 15 * MINUTE]
        assert await engine.repository.get_schedule(schedule.id) == schedule
    versions = await connection.fetch(
        "SELECT version, change, timezone, zone, holds_after FROM cron_schedule_versions WHERE schedule_id = $1",
        default.id,
    )
    assert [tuple(row) for row in versions[1:]] == [(2, "edited", None, KATHMANDU, engine.now)]
    await engine.run_until(START + 31 * MINUTE, step=30 * SECOND)
    rows = await connection.fetch("SELECT schedule_id, scheduled_for FROM queue_messages")
    assert {tuple(row) for row in rows} == {
        (default.id, START + 30 * MINUTE),
        (own.id, START + 15 * MINUTE),
        (elsewhere.id, START + 15 * MINUTE),
    }


async def test_a_change_never_fires_by_itself(engine: Engine, connection: Any) -> None:
    """It is just the time of the schedule there; and what has fired here does not fire there again."""
    due_there = await engine.declare(name="there", cron="45 17 * * *", workspace_id="ws")
    due_here = await engine.declare(name="here", cron="0 12 * * *", workspace_id="ws")
    assert [tick.schedule_id for tick in await engine.turn()] == [due_here.id]
    for zone in (KATHMANDU, "Africa/Abidjan", KATHMANDU, None):
        assert len(await engine.repository.set_workspace_timezone("ws", zone, now=engine.now)) == 2
        assert await engine.turn() == []
    assert await ticks_of(connection, due_there.id) == []


@pytest.mark.sql
async def test_what_is_due_already_fires_as_it_was(engine: Engine, connection: Any) -> None:
    schedule = await engine.declare(cron="*/20 * * * * *", workspace_id="ws", payload={"n": 1})
    engine.now += 25 * SECOND
    await engine.repository.set_workspace_timezone("ws", KATHMANDU, now=engine.now)
    assert [tick.scheduled_for for tick in await engine.fire()] == [START, START + 20 * SECOND]
    assert await ticks_of(connection, schedule.id) == [START + 40 * SECOND, START + 60 * SECOND, START + 80 * SECOND]
    found = await engine.repository.get_schedule(schedule.id)
    assert (found.payload, found.version, found.cron) == ({"n": 1}, 2, "*/20 * * * * *")


@pytest.mark.sql
async def test_a_change_leaves_everything_else_as_it_is(engine: Engine) -> None:
    options: dict[str, Any] = {
        "cron": "30 9 * * MON",
        "workspace_id": "ws",
        "payload": {"deep": [1, 2.5, {"ä": None}], "n": 10**30},
        "jitter": 7 * SECOND,
        "priority": "high",
        "starts_at": START + MINUTE,
        "ends_at": START + timedelta(days=900),
        "max_runs": 7,
        "overlap": "skip",
        "max_attempts": 3,
        "max_age": 60,
        "backoff": 2.5,
        "dst_gap": "skip",
        "dst_fold": "both",
        "owner": "billing",
    }
    before = await engine.declare(**options)
    [saved] = await engine.repository.set_workspace_timezone("ws", KATHMANDU, now=engine.now)
    changed = {"zone": KATHMANDU, "version": 2}
    assert vars(saved.schedule) == vars(before) | changed
    assert await engine.repository.get_schedule(before.id) == saved.schedule
    assert (await engine.save(**options)).change == "unchanged"


async def test_disabled_and_broken_schedules_move_too(engine: Engine, connection: Any) -> None:
    disabled = await engine.declare(name="disabled", cron="* * * * *", workspace_id="ws")
    broken = await engine.declare(name="broken", cron="* * * * *", workspace_id="ws")
    await engine.repository.disable_schedule(disabled.id, drop_pending=True, now=engine.now)
    await connection.execute("UPDATE cron_schedules SET zone = 'Mars/Olympus' WHERE id = $1", broken.id)
    engine.now += 5 * MINUTE + SECOND
    await engine.turn()
    assert (await engine.repository.get_schedule(broken.id)).error is not None
    moved = await engine.repository.set_workspace_timezone("ws", BERLIN, now=engine.now)
    assert {(saved.schedule.name, saved.schedule.enabled, saved.schedule.error) for saved in moved} == {
        ("disabled", False, None),
        ("broken", True, None),
    }
    await engine.run_until(engine.now + 2 * MINUTE, step=MINUTE)
    rows = await connection.fetch(
        "SELECT schedule_id, scheduled_for FROM queue_messages WHERE scheduled_for > $1", START
    )
    assert [tuple(row) for row in rows] == [(broken.id, START + k * MINUTE) for k in (6, 7)]


async def test_setting_the_same_again_changes_nothing(manager: QueueManager, connection: Any) -> None:
    made = await manager.schedule("queue", cron="0 9 * * *", workspace_id="ws")
    assert await manager.set_workspace_timezone("ws", "UTC") == 0
    assert await manager.set_workspace_timezone("ws", None) == 0
    assert await manager.set_workspace_timezone("ws", BERLIN) == 1
    assert await manager.set_workspace_timezone("ws", BERLIN) == 0
    assert await manager.set_workspace_timezone("ws", None) == 1
    assert await manager.get_workspace_timezone("ws") is None
    found = await manager.get_schedule(made.id)
    assert (found.zone, found.version) == ("UTC", 3)
    assert await connection.fetchval("SELECT count(*) FROM cron_workspaces") == 0


async def test_a_zone_that_does_not_exist_changes_nothing(manager: QueueManager, connection: Any) -> None:
    made = await manager.schedule("queue", cron="0 9 * * *", workspace_id="ws")
    await manager.set_workspace_timezone("other", BERLIN)
    for zone in ("Europe/Berln", "europe/berlin", "", "localtime", "right/UTC", "CET-1CEST", 7, "Mars/Olympus\0"):
        with pytest.raises(InvalidInputError) as caught:
            await manager.set_workspace_timezone("ws", zone)  # type: ignore[arg-type]
        assert caught.value.field == "timezone"
    for workspace in ("", 7, " ws"):
        with pytest.raises(InvalidInputError) as caught:
            await manager.set_workspace_timezone(workspace, BERLIN)  # type: ignore[arg-type]
        assert caught.value.field == "workspace_id"
        with pytest.raises(InvalidInputError):
            await manager.get_workspace_timezone(workspace)  # type: ignore[arg-type]
    assert await manager.get_schedule(made.id) == made
    rows = await connection.fetch("SELECT workspace_id, timezone FROM cron_workspaces")
    assert [tuple(row) for row in rows] == [("other", BERLIN)]


async def test_a_change_is_logged(manager: QueueManager) -> None:
    made = await manager.schedule("queue", cron="0 9 * * *", workspace_id="ws")
    with capture_logs() as logs:
        await manager.set_workspace_timezone("ws", BERLIN)
    assert [entry["event"] for entry in logs] == ["workspace_timezone_set", "schedule_edited"]
    assert (logs[0]["workspace_id"], logs[0]["timezone"], logs[0]["schedules"]) == ("ws", BERLIN, 1)
    assert (logs[1]["schedule_id"], logs[1]["timezone"], logs[1]["version"]) == (made.id, BERLIN, 2)


@pytest.mark.sql
async def test_a_workspace_that_is_deleted_forgets_its_zone(manager: QueueManager, connection: Any) -> None:
    for workspace in ("ws", "other"):
        await manager.set_workspace_timezone(workspace, BERLIN)
    await manager.schedule("queue", cron="0 9 * * *", workspace_id="ws")
    await manager.delete_workspace("ws")
    assert await manager.get_workspace_timezone("ws") is None
    assert await manager.get_workspace_timezone("other") == BERLIN
    assert (await manager.schedule("queue", cron="0 9 * * *", workspace_id="ws")).zone == "UTC"
    assert await connection.fetchval(STRAY) == 0


async def test_a_workspaces_zone_that_is_gone_is_said_and_breaks_nobody_else(engine: Engine, connection: Any) -> None:
    """It can't be declared in any more, until the workspace has another."""
    schedule = await engine.declare(name="before", cron="* * * * *", workspace_id="ws")
    await connection.execute("INSERT INTO cron_workspaces VALUES ('ws', 'Mars/Olympus', now())")
    await connection.execute("UPDATE cron_schedules SET zone = 'Mars/Olympus'")
    elsewhere = await engine.declare(name="elsewhere", cron="* * * * *", workspace_id="other")
    await engine.run_until(START + 3 * MINUTE, step=MINUTE)
    assert (await engine.repository.get_schedule(schedule.id)).error is not None
    assert (await engine.repository.get_schedule(elsewhere.id)).error is None
    with pytest.raises(InvalidInputError, match="Mars/Olympus") as caught:
        await engine.declare(name="after", cron="* * * * *", workspace_id="ws")
    assert caught.value.field == "timezone"
    named = await engine.declare(name="named", cron="* * * * *", workspace_id="ws", timezone=BERLIN)
    [moved] = await engine.repository.set_workspace_timezone("ws", KATHMANDU, now=engine.now)
    assert (moved.schedule.error, moved.schedule.zone) == (None, KATHMANDU)
    await engine.run_until(START + 5 * MINUTE, step=MINUTE)
    for found in (schedule, elsewhere, named):
        last = await connection.fetchval(
            "SELECT max(scheduled_for) FROM queue_messages WHERE schedule_id = $1", found.id
        )
        assert last == START + 5 * MINUTE


# In the caller's transaction


@pytest.mark.sql
async def test_within_the_callers_transaction(manager: QueueManager, connection: Any) -> None:
    made = await manager.schedule("queue", cron="*/5 * * * * *", workspace_id="ws")
    before = await connection.fetch("SELECT * FROM cron_ticks ORDER BY id")
    transaction = connection.transaction()
    await transaction.start()
    assert await manager.set_workspace_timezone("ws", KATHMANDU, connection=connection) == 1
    inside = await manager.schedule("inside", cron="0 9 * * *", workspace_id="ws", connection=connection)
    assert inside.zone == KATHMANDU
    assert (await manager.get_schedule(made.id, connection=connection)).zone == KATHMANDU
    assert await manager.get_workspace_timezone("ws") is None  # nobody else sees it yet
    await transaction.rollback()
    assert await manager.get_workspace_timezone("ws") is None
    assert await manager.list_schedules() == [made]
    assert await connection.fetch("SELECT * FROM cron_ticks ORDER BY id") == before
    async with connection.transaction():
        await manager.set_workspace_timezone("ws", KATHMANDU, connection=connection)
    assert await manager.get_workspace_timezone("ws") == KATHMANDU
    assert (await manager.get_schedule(made.id)).zone == KATHMANDU


@pytest.mark.sql
@pytest.mark.parametrize("commits", [True, False])
async def test_a_declaration_waits_for_a_change_that_is_under_way(
    manager: QueueManager, connection: Any, *, commits: bool
) -> None:
    """And then has the zone that the change has left, committed or not."""
    transaction = connection.transaction()
    await transaction.start()
    await manager.set_workspace_timezone("ws", KATHMANDU, connection=connection)
    declaring = asyncio.create_task(manager.schedule("queue", cron="0 9 * * *", workspace_id="ws"))
    await wait_for_lock(connection, declaring)
    elsewhere = await manager.schedule("queue", cron="0 9 * * *", workspace_id="other")
    await (transaction.commit() if commits else transaction.rollback())
    assert (await declaring).zone == (KATHMANDU if commits else "UTC")
    assert elsewhere.zone == "UTC"
    assert await connection.fetchval(STRAY) == 0


@pytest.mark.sql
@pytest.mark.parametrize("commits", [True, False])
async def test_a_change_waits_for_a_declaration_that_is_under_way(
    manager: QueueManager, connection: Any, *, commits: bool
) -> None:
    made = await manager.schedule("edited", cron="0 9 * * *", workspace_id="ws", timezone=BERLIN)
    transaction = connection.transaction()
    await transaction.start()
    await manager.schedule("queue", cron="0 9 * * *", workspace_id="ws", connection=connection)
    await manager.update_schedule(made.id, timezone=None, connection=connection)
    changing = asyncio.create_task(manager.set_workspace_timezone("ws", KATHMANDU))
    await wait_for_lock(connection, changing)
    await (transaction.commit() if commits else transaction.rollback())
    assert await changing == (2 if commits else 0)
    assert await connection.fetchval(STRAY) == 0


# All at once


@pytest.mark.sql
@pytest.mark.soak(small=12, full=100)
async def test_changes_declarations_and_edits_at_once_leave_no_schedule_behind(
    settings: Settings, connection: Any, size: int
) -> None:
    """Separate pools, as separate pods have: whatever comes first, all are in the workspace's zone at the end."""
    async with QueueManager(settings=settings) as first, QueueManager(settings=settings) as second:
        ids = [
            (await first.schedule(f"queue.{number}", cron="*/5 * * * * *", workspace_id="ws")).id for number in range(3)
        ]

        async def change(pod: QueueManager, zones: tuple[str | None, ...]) -> None:
            for number in range(size):
                await pod.set_workspace_timezone("ws", zones[number % len(zones)])

        async def declare(pod: QueueManager, label: str) -> None:
            for number in range(size):
                await pod.schedule(f"{label}.{number}", cron="0 9 * * *", workspace_id="ws")

        async def edit(pod: QueueManager) -> None:
            for number in range(size):
                zone = (None, NEW_YORK)[number % 2]
                await pod.update_schedule(ids[number % 3], timezone=zone, payload={"n": number})

        await asyncio.gather(
            change(first, (BERLIN, KATHMANDU, None)),
            change(second, (NEW_YORK, BERLIN)),
            declare(first, "first"),
            declare(second, "second"),
            edit(first),
            edit(second),
        )
    assert await connection.fetchval("SELECT count(*) FROM cron_schedules") == 3 + 2 * size
    assert await connection.fetchval(STRAY) == 0


@pytest.mark.sql
async def test_a_schedule_that_is_deleted_meanwhile_does_not_stop_a_change(
    manager: QueueManager, connection: Any
) -> None:
    """The change has found it, and waits for whoever is deleting it."""
    gone = await manager.schedule("gone", cron="0 9 * * *", workspace_id="ws")
    stays = await manager.schedule("stays", cron="0 9 * * *", workspace_id="ws")
    async with connection.transaction():
        await manager.delete_schedule(gone.id, connection=connection)
        changing = asyncio.create_task(manager.set_workspace_timezone("ws", BERLIN))
        await wait_for_lock(connection, changing)
    assert await changing == 1
    assert (await manager.get_schedule(stays.id)).zone == BERLIN


@pytest.mark.sql
async def test_a_caller_that_replaces_a_schedule_and_a_change_wait_for_each_other(
    manager: QueueManager, connection: Any
) -> None:
    """In the caller's transaction: neither is ended as a deadlock."""
    made = await manager.schedule("old", cron="0 9 * * *", workspace_id="ws")
    async with connection.transaction():
        await manager.delete_schedule(made.id, connection=connection)
        changing = asyncio.create_task(manager.set_workspace_timezone("ws", BERLIN))
        await wait_for_lock(connection, changing)
        await manager.schedule("new", cron="0 9 * * *", workspace_id="ws", connection=connection)
    assert await changing == 1
    assert [schedule.zone for schedule in await manager.list_schedules()] == [BERLIN]


@pytest.mark.sql
async def test_a_caller_that_triggers_and_edits_and_a_change_wait_for_each_other(
    manager: QueueManager, connection: Any
) -> None:
    made = await manager.schedule("queue", cron="0 9 * * *", workspace_id="ws")
    async with connection.transaction():
        await manager.trigger(made.id, connection=connection)
        changing = asyncio.create_task(manager.set_workspace_timezone("ws", BERLIN))
        await wait_for_lock(connection, changing)
        await manager.update_schedule(made.id, payload={"n": 1}, connection=connection)
    assert await changing == 1
    assert (await manager.get_schedule(made.id)).zone == BERLIN


@pytest.mark.sql
async def test_a_deletion_of_the_workspace_and_a_change_wait_for_each_other(
    manager: QueueManager, connection: Any
) -> None:
    """Neither is ended as a deadlock, and the change finds nothing to do."""
    await manager.schedule("queue", cron="0 9 * * *", workspace_id="ws")
    await manager.set_workspace_timezone("ws", NEW_YORK)
    async with connection.transaction():
        # What a deletion does first.
        await connection.execute("SELECT FROM cron_schedules WHERE workspace_id = 'ws' FOR UPDATE")
        changing = asyncio.create_task(manager.set_workspace_timezone("ws", BERLIN))
        await wait_for_lock(connection, changing)
        deleting = asyncio.create_task(manager.delete_workspace("ws"))
        await wait_for_lock(connection, changing, deleting, sessions=2)
    outcomes = await asyncio.gather(changing, deleting, return_exceptions=True)
    assert [outcome for outcome in outcomes if isinstance(outcome, BaseException)] == []
    assert await connection.fetchval("SELECT count(*) FROM cron_schedules") == 0
    assert await connection.fetchval(STRAY) == 0


@pytest.mark.sql
async def test_a_deletion_of_the_workspace_waits_for_a_declaration(manager: QueueManager, connection: Any) -> None:
    """Otherwise the schedule would stay, in a zone that its workspace has no more."""
    await manager.set_workspace_timezone("ws", BERLIN)
    async with connection.transaction():
        await manager.schedule("queue", cron="0 9 * * *", workspace_id="ws", connection=connection)
        deleting = asyncio.create_task(manager.delete_workspace("ws"))
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(deleting), 0.5)
    await deleting
    assert await connection.fetchval(STRAY) == 0


@pytest.mark.sql
@pytest.mark.soak(small=10, full=100)
async def test_deletions_and_changes_at_once_end_without_an_error(
    database: Database, settings: Settings, connection: Any, size: int
) -> None:
    """Of schedules and of the workspace, while others declare there and set its zone."""
    repository = CronRepository(database, settings)

    async def declare(label: str, number: int) -> None:
        definition = define_schedule("queue", name=f"{label} {number % 3}", cron="0 9 * * *", workspace_id="ws")
        await repository.save_schedule(definition)

    async def change(number: int) -> None:
        await repository.set_workspace_timezone("ws", (BERLIN, NEW_YORK, None)[number % 3])

    async def delete(number: int) -> None:
        for schedule in (await repository.list_schedules(workspace_id="ws"))[number % 2 :]:
            with suppress(ScheduleNotFoundError):
                await repository.delete_schedule(schedule.id)

    async def delete_workspace(_: int) -> None:
        async with database.transaction() as chosen:
            await repository.delete_workspace("ws", connection=chosen)

    async def again(work: Callable[[int], Awaitable[None]]) -> None:
        for number in range(size):
            await work(number)

    work = (partial(declare, "a"), partial(declare, "b"), change, delete, delete_workspace)
    await asyncio.gather(*(again(part) for part in work))
    assert await connection.fetchval(STRAY) == 0
