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
from cron_ticks.repository import CronRepository
from cron_ticks.schedule_manager import ScheduleManager
from cron_ticks.schedule_repository import Saved
from cron_ticks.schedules import Schedule, define_schedule, redefine_schedule
from cron_ticks.settings import Settings
from support.versions import expected_by_versions
from token_queue import QueueManager
from token_queue.queue_repository import QUEUE_SINK

pytestmark = pytest.mark.sql

START = datetime(2026, 1, 1, tzinfo=UTC)
TEN = timedelta(seconds=10)
MINUTE = timedelta(minutes=1)


@pytest.fixture
async def manager(settings: Settings) -> AsyncIterator[QueueManager]:
    async with QueueManager(settings=settings) as opened:
        yield opened


@pytest.fixture
def repository(database: Database, settings: Settings) -> CronRepository:
    return CronRepository(database, settings)


async def save(repository: CronRepository, *, now: datetime, every: float = 10, **changes: Any) -> Saved:
    definition = define_schedule("queue", every=every, **{"jitter": None} | changes)
    return await repository.save_schedule(definition, now=now)


async def cursor_of(connection: "asyncpg.Connection[asyncpg.Record]", schedule_id: str) -> datetime | None:
    found: datetime | None = await connection.fetchval(
        "SELECT next_tick_needed_at FROM cron_schedule_cursors WHERE schedule_id = $1", schedule_id
    )
    return found


async def ticks_of(connection: "asyncpg.Connection[asyncpg.Record]", schedule_id: str) -> list[datetime]:
    rows = await connection.fetch(
        "SELECT scheduled_for FROM cron_ticks WHERE schedule_id = $1 ORDER BY scheduled_for", schedule_id
    )
    return [row["scheduled_for"] for row in rows]


async def test_a_new_schedule_is_due_at_once_and_has_the_ticks_of_the_window(
    repository: CronRepository, connection: Any
) -> None:
    saved = await save(repository, now=START, payload={"scope": "system"})
    assert saved.change == "created"
    assert saved.schedule.anchor_at == START
    assert saved.schedule.payload == {"scope": "system"}
    assert await ticks_of(connection, saved.schedule.id) == [START + k * TEN for k in range(6)]
    assert await cursor_of(connection, saved.schedule.id) == START + MINUTE


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
    schedule_id = (await save(repository, now=START)).schedule.id
    edited = await save(repository, now=START + 2.5 * TEN, every=15)
    assert (edited.change, edited.schedule.version) == ("edited", 2)
    assert edited.schedule.anchor_at == START
    kept = [START, START + TEN, START + 2 * TEN]
    made = [START + timedelta(seconds=15 * k) for k in range(2, 6)]
    assert await ticks_of(connection, schedule_id) == kept + made
    versions = await connection.fetch("SELECT DISTINCT version FROM cron_ticks WHERE scheduled_for > $1", kept[-1])
    assert [row["version"] for row in versions] == [2]
    assert await cursor_of(connection, schedule_id) == START + timedelta(seconds=90)


async def test_an_edit_keeps_overdue_occurrences_that_nobody_has_made(
    repository: CronRepository, connection: Any
) -> None:
    saved = await save(repository, now=START, payload={"version": "old"})
    await connection.execute("DELETE FROM cron_ticks")
    await connection.execute("UPDATE cron_schedule_cursors SET next_tick_needed_at = $1, planned = 0", START)
    now = START + 3.5 * TEN
    await save(repository, now=now, every=7, payload={"version": "new"})
    old = [START + k * TEN for k in range(4)]
    assert (await ticks_of(connection, saved.schedule.id))[:5] == [*old, START + timedelta(seconds=42)]
    payloads = await connection.fetch(
        "SELECT DISTINCT payload ->> 'version' AS version, scheduled_for <= $1 AS old FROM cron_ticks", now
    )
    assert {tuple(row) for row in payloads} == {("old", True), ("new", False)}


async def test_an_edit_never_fires_by_itself(repository: CronRepository, connection: Any) -> None:
    """A new jitter may lie in the past of an occurrence that is still to come: that one waits for its time."""
    now = START + timedelta(seconds=39.9)
    for number in range(40):
        saved = await save(repository, now=START, every=40, name=str(number))
        await repository.fire_due_ticks(QUEUE_SINK, ticker_id="t", limit=10, now=START)
        await save(repository, now=now, every=40, name=str(number), jitter=timedelta(seconds=20))
        assert await repository.fire_due_ticks(QUEUE_SINK, ticker_id="t", limit=10, now=now) == []
        rows = await connection.fetch(
            "SELECT scheduled_for, execute_at, due_at FROM cron_ticks WHERE schedule_id = $1", saved.schedule.id
        )
        assert all(
            row["due_at"] == max(row["execute_at"], now) or row["due_at"] == row["scheduled_for"] for row in rows
        )
    moved = await connection.fetchval("SELECT count(*) FROM cron_ticks WHERE execute_at < $1", now)
    assert 5 < moved < 35


async def test_an_edit_of_what_has_fired_early_does_not_fire_it_again(
    repository: CronRepository, connection: Any
) -> None:
    """Jitter let an occurrence fire before its time; the new definition holds after it."""
    fired_early = 0
    for number in range(30):
        first = await save(repository, now=START, every=40, jitter=0.5, name=str(number))
        now = START + timedelta(seconds=39)
        while await repository.fire_due_ticks(QUEUE_SINK, ticker_id="t", limit=100, now=now):
            pass
        await save(repository, now=now, every=40, jitter=None, name=str(number))
        ticks = await ticks_of(connection, first.schedule.id)
        early = first.schedule.execute_at(START + timedelta(seconds=40)) <= now
        fired_early += early
        assert (START + timedelta(seconds=40) in ticks) == (not early)
        assert START + timedelta(seconds=80) in ticks
        boundary = await connection.fetchval(
            "SELECT holds_after FROM cron_schedule_versions WHERE schedule_id = $1 AND version = 2", first.schedule.id
        )
        assert boundary == (START + timedelta(seconds=40) if early else now)
    assert 5 < fired_early < 25


async def test_bounds(repository: CronRepository, connection: Any) -> None:
    later = START + TEN
    begins = await save(repository, now=START, name="begins", starts_at=later)
    assert begins.schedule.anchor_at == later
    assert (await ticks_of(connection, begins.schedule.id))[0] == later
    phase = await save(repository, now=START, name="phase", starts_at=START - timedelta(seconds=7))
    assert (await ticks_of(connection, phase.schedule.id))[0] == START + timedelta(seconds=3)
    ends = await save(repository, now=START, name="ends", ends_at=START + 2 * TEN)
    assert await ticks_of(connection, ends.schedule.id) == [START, START + TEN, START + 2 * TEN]
    counted = await save(repository, now=START, name="counted", max_runs=2)
    assert await ticks_of(connection, counted.schedule.id) == [START, START + TEN]
    for schedule in (ends.schedule, counted.schedule):
        assert await cursor_of(connection, schedule.id) is None
    over = await save(repository, now=START, name="over", ends_at=START - TEN)
    assert await ticks_of(connection, over.schedule.id) == []


async def test_a_schedule_that_has_not_begun_can_begin_earlier(repository: CronRepository, connection: Any) -> None:
    saved = await save(repository, now=START, starts_at=START + timedelta(days=30))
    soon = START + TEN
    moved = await save(repository, now=START, starts_at=soon)
    assert moved.schedule.anchor_at == soon
    assert (await ticks_of(connection, saved.schedule.id))[0] == soon
    begun = await save(repository, now=soon + TEN / 2, starts_at=soon + timedelta(seconds=3))
    assert begun.schedule.anchor_at == soon  # now it has a phase, and keeps it


async def test_more_runs_can_be_given_and_taken(repository: CronRepository, connection: Any) -> None:
    saved = await save(repository, now=START, max_runs=2)
    await repository.fire_due_ticks(QUEUE_SINK, ticker_id="t", limit=1, now=START)
    await save(repository, now=START + TEN / 2, max_runs=4)
    assert await ticks_of(connection, saved.schedule.id) == [START + k * TEN for k in (1, 2, 3)]
    await save(repository, now=START + 1.5 * TEN, max_runs=1)
    assert await ticks_of(connection, saved.schedule.id) == [START + TEN]


async def test_a_one_off_fires_once(repository: CronRepository, connection: Any) -> None:
    definition = define_schedule("queue", at=START + MINUTE)
    saved = await repository.save_schedule(definition, now=START)
    assert (saved.schedule.at, saved.schedule.interval, saved.schedule.jitter) == (START + MINUTE, None, timedelta(0))
    assert await ticks_of(connection, saved.schedule.id) == []
    needed = await cursor_of(connection, saved.schedule.id)
    assert needed == START + MINUTE
    again = await repository.save_schedule(definition, now=START + 2 * MINUTE)
    assert again.change == "unchanged"


async def test_a_one_off_of_the_past_is_due_at_once_but_an_edit_into_the_past_is_refused(
    repository: CronRepository, connection: Any
) -> None:
    saved = await repository.save_schedule(define_schedule("queue", at=START - MINUTE), now=START)
    assert await ticks_of(connection, saved.schedule.id) == [START - MINUTE]
    with pytest.raises(InvalidInputError, match=r"at: .* has passed: an edit never fires, trigger\(\) does"):
        await repository.save_schedule(define_schedule("queue", at=START - TEN), now=START)
    assert (await repository.get_schedule(saved.schedule.id)).version == 1


async def test_an_interval_can_become_a_one_off_and_back(repository: CronRepository, connection: Any) -> None:
    saved = await save(repository, now=START)
    schedule_id = saved.schedule.id
    await repository.fire_due_ticks(QUEUE_SINK, ticker_id="t", limit=1, now=START)
    at = START + timedelta(seconds=33)
    once = await repository.update_schedule(
        schedule_id, lambda schedule: redefine_schedule(schedule, {"at": at}), now=START + TEN / 2
    )
    assert (once.schedule.at, await ticks_of(connection, schedule_id)) == (at, [at])
    now = START + TEN
    back = await repository.update_schedule(
        schedule_id, lambda schedule: redefine_schedule(schedule, {"every": 20, "jitter": None}), now=now
    )
    assert (back.schedule.anchor_at, back.schedule.at) == (now, None)
    assert (await ticks_of(connection, schedule_id))[0] == now + 2 * TEN


async def test_disabling_keeps_pending_ticks_unless_they_are_dropped(
    repository: CronRepository, connection: Any
) -> None:
    saved = await save(repository, now=START)
    schedule_id = saved.schedule.id
    await repository.fire_due_ticks(QUEUE_SINK, ticker_id="t", limit=1, now=START)
    disabled = await repository.disable_schedule(schedule_id, now=START + TEN / 2)
    assert (disabled.change, disabled.schedule.enabled, disabled.schedule.version) == ("disabled", False, 2)
    pending = [START + k * TEN for k in range(1, 6)]
    assert await ticks_of(connection, schedule_id) == pending
    assert await cursor_of(connection, schedule_id) is None
    assert (await repository.disable_schedule(schedule_id, now=START + TEN / 2)).change == "unchanged"
    await repository.disable_schedule(schedule_id, drop_pending=True, now=START + TEN / 2)
    assert await ticks_of(connection, schedule_id) == []
    runs = await connection.fetch("SELECT scheduled_for, outcome FROM cron_runs ORDER BY scheduled_for")
    assert [tuple(row) for row in runs] == [(START, "enqueued"), *((moment, "disabled") for moment in pending)]


async def test_enabling_resumes_at_the_next_occurrence(repository: CronRepository, connection: Any) -> None:
    schedule_id = (await save(repository, now=START)).schedule.id
    await repository.disable_schedule(schedule_id, drop_pending=True, now=START + TEN / 2)
    soon = START + 1.5 * TEN  # dropped occurrences that are still to come are expected again
    enabled = await repository.enable_schedule(schedule_id, now=soon)
    assert (enabled.change, enabled.schedule.enabled, enabled.schedule.version) == ("enabled", True, 3)
    assert (await ticks_of(connection, schedule_id))[0] == START + 2 * TEN
    assert (await repository.enable_schedule(schedule_id, now=soon)).change == "unchanged"
    fired = await repository.fire_due_ticks(QUEUE_SINK, ticker_id="t", limit=10, now=START + 2 * TEN)
    assert [tick.passed for tick in fired] == [True]
    runs = await connection.fetch("SELECT scheduled_for FROM cron_runs WHERE outcome = 'disabled'")
    assert sorted(row["scheduled_for"] for row in runs) == [START, START + TEN]


async def test_enabling_leaves_ticks_alone_that_were_kept(repository: CronRepository, connection: Any) -> None:
    schedule_id = (await save(repository, now=START)).schedule.id
    await repository.disable_schedule(schedule_id, now=START + TEN / 2)
    await repository.enable_schedule(schedule_id, now=START + TEN / 2)
    ticks = await ticks_of(connection, schedule_id)
    assert ticks == [START + k * TEN for k in range(len(ticks))]


async def test_fire_now_and_trigger_fire_beside_the_rule(repository: CronRepository, connection: Any) -> None:
    saved = await save(repository, now=START)
    schedule_id = saved.schedule.id
    before = await ticks_of(connection, schedule_id)
    cursor = await cursor_of(connection, schedule_id)
    await repository.disable_schedule(schedule_id, now=START)
    now = START + 2 * TEN  # an occurrence of the rule: not the trigger's to take
    await repository.enable_schedule(schedule_id, fire_now=True, now=now)
    triggers = [await repository.trigger(schedule_id, now=now) for _ in range(3)]
    assert [trigger.scheduled_for - now for trigger in triggers] == [timedelta(microseconds=k) for k in (2, 3, 4)]
    fired = await repository.fire_due_ticks(QUEUE_SINK, ticker_id="t", limit=100, now=now + TEN / 2)
    assert sorted(tick.origin for tick in fired) == ["schedule"] * 3 + ["trigger"] * 4
    assert all(tick.passed for tick in fired)
    assert (await repository.trigger(schedule_id, now=now)).scheduled_for - now == timedelta(microseconds=5)
    messages = await connection.fetch("SELECT id FROM queue_messages WHERE headers ->> 'origin' = 'trigger'")
    assert {trigger.message_id for trigger in triggers} < {row["id"] for row in messages}
    rule_ticks = await connection.fetch("SELECT scheduled_for FROM cron_ticks WHERE origin = 'schedule'")
    assert {row["scheduled_for"] for row in rule_ticks} >= set(before[3:])
    moved = await cursor_of(connection, schedule_id)
    assert cursor is not None
    assert moved is not None
    assert moved >= cursor


async def test_a_disabled_schedule_can_be_edited_and_triggered(repository: CronRepository, connection: Any) -> None:
    schedule_id = (await save(repository, now=START)).schedule.id
    await repository.disable_schedule(schedule_id, drop_pending=True, now=START)
    edited = await save(repository, now=START, every=20)
    assert (edited.change, edited.schedule.enabled) == ("edited", False)
    assert await ticks_of(connection, schedule_id) == []
    await repository.trigger(schedule_id, now=START + TEN / 2)
    [fired] = await repository.fire_due_ticks(QUEUE_SINK, ticker_id="t", limit=10, now=START + TEN / 2)
    assert (fired.origin, fired.passed) == ("trigger", True)


async def test_every_change_keeps_a_version(repository: CronRepository, connection: Any) -> None:
    schedule_id = (await save(repository, now=START)).schedule.id
    await save(repository, now=START + TEN / 2, every=20)
    await save(repository, now=START + TEN / 2, every=20)
    await repository.disable_schedule(schedule_id, now=START + TEN)
    await repository.enable_schedule(schedule_id, now=START + 10 * TEN)
    await repository.delete_schedule(schedule_id, now=START + 11 * TEN)
    rows = await connection.fetch("SELECT version, change, enabled, interval_us FROM cron_schedule_versions ORDER BY 1")
    assert [tuple(row) for row in rows] == [
        (1, "created", True, 10_000_000),
        (2, "edited", True, 20_000_000),
        (3, "disabled", False, 20_000_000),
        (4, "enabled", True, 20_000_000),
        (5, "deleted", False, 20_000_000),
    ]
    bounds = await connection.fetch("SELECT holds_after FROM cron_schedule_versions ORDER BY version")
    last_pending = START + 6 * TEN  # kept when it was disabled
    assert [row["holds_after"] for row in bounds] == [
        START - timedelta(microseconds=1),
        START + TEN / 2,
        last_pending,
        START + 10 * TEN,
        START + 11 * TEN,
    ]


async def test_a_definition_that_comes_back_is_a_flip_flop(settings: Settings) -> None:
    """Two releases declare one name in turn, as pods do while they are replaced."""
    async with QueueManager(settings=settings) as old, QueueManager(settings=settings) as new:
        with capture_logs() as logs:
            for release, every in ((old, 5), (new, 7), (old, 5), (new, 7)):
                await release.schedule("queue", every=every)
        events = [entry["event"] for entry in logs]
        assert events == [
            "schedule_created",
            "schedule_edited",
            "schedule_edited",
            "schedule_flip_flop",
            "schedule_edited",
            "schedule_flip_flop",
        ]
        [found] = await old.list_schedules()
        assert found.interval == timedelta(seconds=7)


async def test_an_edit_of_a_process_that_hangs_gives_its_locks_back(
    repository: CronRepository, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In our own transaction; in the caller's it is the caller's affair."""
    saved = await save(repository, now=START)
    seen: list[str] = []

    async def look(given: Any) -> None:
        seen.append(await given.fetchval("SHOW idle_in_transaction_session_timeout"))

    hold = repository._hold

    async def hold_and_look(schedule_id: str, chosen: Any, now: datetime | None) -> Any:
        await look(chosen)
        return await hold(schedule_id, chosen, now)

    monkeypatch.setattr(repository, "_hold", hold_and_look)
    await repository.disable_schedule(saved.schedule.id)
    async with connection.transaction():
        await repository.enable_schedule(saved.schedule.id, connection=connection)
    assert seen == ["10s", "0"]


async def test_a_one_off_that_moves_on_is_no_flip_flop(repository: CronRepository) -> None:
    for minutes in (1, 2, 3):
        saved = await repository.save_schedule(define_schedule("queue", at=START + minutes * MINUTE), now=START)
        assert saved.back_after is None
    again = await repository.save_schedule(define_schedule("queue", at=START + 2 * MINUTE), now=START + TEN)
    assert again.back_after == TEN


async def test_pods_that_differ_in_the_cap_do_not_undo_each_others_declarations(repository: CronRepository) -> None:
    """A ratio is what was asked for; what it comes to was decided when it was declared."""
    for cap, change in ((30, "created"), (5, "unchanged"), (30, "unchanged")):
        definition = define_schedule("queue", every=600, jitter_cap=timedelta(seconds=cap))
        saved = await repository.save_schedule(definition, now=START)
        assert (saved.change, saved.schedule.jitter) == (change, timedelta(seconds=30))


async def nobody_has_made_any_ticks(connection: Any) -> None:
    await connection.execute("DELETE FROM cron_ticks")
    await connection.execute("UPDATE cron_schedule_cursors SET next_tick_needed_at = $1, planned = 0", START)


async def test_an_edit_of_a_broken_schedule_says_what_was_missed(repository: CronRepository, connection: Any) -> None:
    saved = await save(repository, now=START)
    await nobody_has_made_any_ticks(connection)
    await connection.execute("UPDATE cron_schedules SET error = 'refused'")
    edited = await save(repository, now=START + 2.5 * TEN, every=20)
    assert (edited.change, edited.missed, edited.schedule.error) == ("edited", 3, None)
    assert (await ticks_of(connection, saved.schedule.id))[0] == START + 4 * TEN


@pytest.mark.parametrize("workspace", [False, True])
async def test_what_was_due_before_the_deletion_is_explained(
    repository: CronRepository, connection: Any, *, workspace: bool
) -> None:
    """Also what no manager had made yet."""
    saved = await save(repository, now=START, workspace_id="ws")
    await nobody_has_made_any_ticks(connection)
    now = START + 2.5 * TEN
    if workspace:
        async with connection.transaction():
            assert await repository.delete_workspace("ws", connection=connection, now=now) == 1
    else:
        await repository.delete_schedule(saved.schedule.id, now=now)
    runs = await connection.fetch("SELECT scheduled_for, outcome FROM cron_runs ORDER BY 1")
    assert [tuple(row) for row in runs] == [(START + k * TEN, "disabled") for k in range(3)]


async def test_one_process_with_two_definitions_of_a_name_is_told(manager: QueueManager) -> None:
    made = await manager.schedule("queue", every=5)
    with pytest.raises(InvalidInputError, match=r"name: this process has declared 'queue' with another definition"):
        await manager.schedule("queue", every=6)
    await manager.schedule("queue", every=6, name="other", payload={"a": 1, "b": 2})
    await manager.schedule("queue", every=6, name="other", payload={"b": 2, "a": 1})
    await manager.schedule("queue", every=6, workspace_id="ws")
    outcomes = await asyncio.gather(
        *(manager.schedule("queue", every=every, name="at once") for every in (5, 6)), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [Schedule, InvalidInputError]
    assert await manager.get_schedule(made.id) == made
    await manager.delete_schedule(made.id)
    assert (await manager.schedule("queue", every=6)).interval == timedelta(seconds=6)


async def test_updating_changes_what_is_given(manager: QueueManager) -> None:
    made = await manager.schedule("queue", every=60, payload={"n": 1}, jitter=0.2, max_runs=100)
    faster = await manager.update_schedule_interval(made.id, 30)
    assert (faster.interval, faster.jitter_ratio, faster.jitter) == (timedelta(seconds=30), 0.2, timedelta(seconds=6))
    assert (faster.payload, faster.max_runs, faster.anchor_at) == ({"n": 1}, 100, made.anchor_at)
    changed = await manager.update_schedule(
        made.id, payload={"n": True}, queue_name="elsewhere", jitter=None, priority="urgent", max_runs=None
    )
    assert (changed.payload, changed.queue_name, changed.jitter) == ({"n": True}, "elsewhere", timedelta(0))
    assert (changed.priority, changed.max_runs, changed.version) == ("urgent", None, 3)
    assert (await manager.update_schedule(made.id, priority="urgent")).version == 3
    for field, value in (("every", 0), ("jitter", 0.7), ("priority", "soon"), ("starts_at", "now"), ("name", "x")):
        with pytest.raises(InvalidInputError, match=f"^{field}: "):
            await manager.update_schedule(made.id, **{field: value})  # type: ignore[arg-type]
    assert (await manager.get_schedule(made.id)) == changed


async def test_true_is_not_one(manager: QueueManager) -> None:
    """Whether a payload is the same is for the database to say: Python takes true and 1 for equal."""
    made = await manager.schedule("queue", every=60, payload={"n": 1})
    assert (await manager.update_schedule(made.id, payload={"n": True})).version == 2
    assert (await manager.update_schedule(made.id, payload={"n": True})).version == 2


async def test_a_workspace_goes_with_everything_in_it(manager: QueueManager, connection: Any) -> None:
    for workspace in ("ws_A", "ws_B"):
        await manager.schedule("queue", every=5, workspace_id=workspace)
        await manager.schedule("other", every=5, workspace_id=workspace)
        await manager.send("queue", workspace_id=workspace)
    await manager.send("queue")
    earlier = await manager.schedule("earlier", every=5, workspace_id="ws_A", payload={"secret": 1})
    await manager.delete_schedule(earlier.id)
    deleted = await manager.delete_workspace("ws_A")
    assert (deleted.schedules, deleted.messages) == (2, 1)
    for table in ("cron_schedules", "cron_ticks", "queue_messages"):
        rows = await connection.fetch(f"SELECT DISTINCT workspace_id FROM {table}")
        assert "ws_A" not in {row["workspace_id"] for row in rows}
        assert "ws_B" in {row["workspace_id"] for row in rows}
    kept = await connection.fetch(
        "SELECT DISTINCT change, payload FROM cron_schedule_versions WHERE workspace_id = 'ws_A'"
    )
    assert {tuple(row) for row in kept} == {("created", None), ("deleted", None)}
    assert (await manager.delete_workspace("ws_A")).schedules == 0
    await manager.schedule("queue", every=6, workspace_id="ws_A")


async def test_everything_also_inside_the_callers_transaction(manager: QueueManager, connection: Any) -> None:
    made = await manager.schedule("queue", every=5, workspace_id="ws")
    before = await connection.fetch("SELECT * FROM cron_ticks ORDER BY id")
    transaction = connection.transaction()
    await transaction.start()
    await manager.update_schedule(made.id, every=7, connection=connection)
    await manager.disable_schedule(made.id, drop_pending=True, connection=connection)
    await manager.enable_schedule(made.id, fire_now=True, connection=connection)
    await manager.trigger(made.id, connection=connection)
    await manager.delete_schedule(made.id, connection=connection)
    await manager.schedule("queue", every=5, workspace_id="ws", connection=connection)
    await manager.delete_workspace("ws", connection=connection)
    assert await connection.fetchval("SELECT count(*) FROM cron_schedules") == 0
    await transaction.rollback()
    assert await manager.get_schedule(made.id) == made
    assert await connection.fetch("SELECT * FROM cron_ticks ORDER BY id") == before
    assert await connection.fetchval("SELECT count(*) FROM cron_runs") == 0
    assert await connection.fetchval("SELECT count(*) FROM cron_schedule_versions") == 1


async def test_declaring_what_is_there_waits_for_nobody(settings: Settings, connection: Any) -> None:
    """Another transaction has the schedule locked; a declaration that changes nothing doesn't mind."""
    quick = Settings.load(dsn=settings.dsn, statement_timeout_seconds=2)
    async with QueueManager(settings=quick) as manager:
        made = await manager.schedule("queue", every=5)
        async with connection.transaction():
            await connection.execute("SELECT FROM cron_schedules FOR UPDATE")
            assert await manager.schedule("queue", every=5) == made


async def test_declaring_while_others_delete_always_gives_a_schedule(repository: CronRepository) -> None:
    declared: list[tuple[int, Any]] = []

    async def declare() -> None:
        for number in range(30):
            saved = await repository.save_schedule(define_schedule("queue", every=5, payload={"n": number}))
            declared.append((number, saved.schedule.payload))

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
        assert cursor is not None
        assert schedule.rule.occurrence_at_or_after(cursor) == cursor
        assert scope.cancelled_caught or schedule.payload == {"n": number}
    assert outcomes == {True, False}


async def test_a_changed_payload_or_queue_is_an_edit(repository: CronRepository) -> None:
    await save(repository, now=START)
    assert (await save(repository, now=START, payload={"n": 1})).change == "edited"
    definition = define_schedule("elsewhere", every=10, jitter=None, name="queue", payload={"n": 1})
    moved = await repository.save_schedule(definition, now=START)
    assert (moved.change, moved.schedule.queue_name) == ("edited", "elsewhere")


async def test_deleting_removes_pending_ticks(repository: CronRepository, connection: Any) -> None:
    saved = await save(repository, now=START)
    await repository.delete_schedule(saved.schedule.id, now=START + timedelta(seconds=5))
    for table in ("cron_schedules", "cron_schedule_cursors", "cron_ticks"):
        assert await connection.fetchval(f"SELECT count(*) FROM {table}") == 0
    runs = await connection.fetch("SELECT DISTINCT outcome, reason FROM cron_runs")
    assert [tuple(row) for row in runs] == [("disabled", "schedule deleted")]


async def test_what_does_not_exist_is_said_so(manager: QueueManager) -> None:
    for attempt in (
        manager.get_schedule("cron_x"),
        manager.delete_schedule("cron_x"),
        manager.update_schedule("cron_x", every=5),
        manager.disable_schedule("cron_x"),
        manager.enable_schedule("cron_x"),
        manager.trigger("cron_x"),
    ):
        with pytest.raises(ScheduleNotFoundError, match="cron_x"):
            await attempt


async def test_bad_input_writes_nothing(manager: QueueManager, settings: Settings, connection: Any) -> None:
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
    closed = await asyncpg.connect(settings.dsn.get_secret_value() if settings.dsn else None)
    await closed.close()
    with pytest.raises(InvalidInputError, match="connection: is closed, or has gone back to its pool"):
        await manager.schedule("queue", every=5, connection=closed)
    assert await connection.fetchval("SELECT count(*) FROM cron_schedules") == 0


async def test_a_rolled_back_transaction_leaves_no_schedule(manager: QueueManager, connection: Any) -> None:
    transaction = connection.transaction()
    await transaction.start()
    created = await manager.schedule("queue", every=5, connection=connection)
    assert await connection.fetchval("SELECT count(*) > 10 FROM cron_ticks")
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


@pytest.mark.parametrize(
    "edits",
    [
        [{"every": 1, "payload": {"n": number}, "jitter": None} for number in range(3)],
        [{"every": 1, "jitter": jitter} for jitter in (0.1, None, 0.5, timedelta(seconds=0.3))],
        [{"every": every, "jitter": 0.5} for every in (1, 2, 1.5, 3)],
        [
            {"cron": "* * * * * *", "timezone": "America/New_York", "jitter": timedelta(seconds=1)},
            {"cron": "*/2 * * * * *", "timezone": "Asia/Kathmandu"},
            {"every": 1, "jitter": 0.5},
            {"cron": "1-59/2 * * * * *"},
        ],
    ],
    ids=["payload", "jitter", "interval", "calendar"],
)
async def test_edits_managers_and_firing_at_once_lose_and_double_nothing(
    settings: Settings, database: Database, connection: Any, edits: list[dict[str, Any]]
) -> None:
    """Whatever is edited between making and firing: what the versions expect comes out, and each once."""
    repository = CronRepository(database, settings)
    scheduler = ScheduleManager(database, repository, settings)
    definitions = [define_schedule("queue", **edit) for edit in edits]
    begun = await connection.fetchval("SELECT statement_timestamp()")
    schedule = (await repository.save_schedule(definitions[0], now=begun - timedelta(seconds=50))).schedule

    async def edit() -> None:
        for number in range(40):
            await repository.save_schedule(definitions[number % len(definitions)])

    async def make() -> None:
        for _ in range(40):
            await scheduler.run_once()

    async def fire() -> None:
        for _ in range(60):
            await repository.fire_due_ticks(QUEUE_SINK, ticker_id="ticker_test", limit=7)

    await asyncio.gather(edit(), make(), fire(), fire())
    await scheduler.run_once()
    now = await connection.fetchval("SELECT statement_timestamp()")
    while await repository.fire_due_ticks(QUEUE_SINK, ticker_id="ticker_test", limit=100, now=now + 2 * TEN):
        pass
    rows = await connection.fetch(
        "SELECT scheduled_for FROM queue_messages WHERE scheduled_for <= $1 ORDER BY scheduled_for", now + TEN
    )
    fired = [row["scheduled_for"] for row in rows]
    assert fired == await expected_by_versions(connection, schedule.id, now + TEN)
    assert len(fired) >= 20
