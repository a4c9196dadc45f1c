"""What must not stop managers and tickers: clocks that were wrong, tokens that are gone, sweeps that take too long."""

import asyncio
import math
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from structlog.testing import capture_logs

import cron_ticks.schedule_manager
import cron_ticks.tick_repository
from cron_ticks.database import Database
from cron_ticks.rows import Beat
from cron_ticks.settings import Settings
from cron_ticks.tick_floors import LEVELS, TickFloors
from support.moved_clock import ClockedRepository, Engine

pytestmark = pytest.mark.sql

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)
SHARDS = 64


async def beats(database: Database, now: datetime, *managers: str) -> dict[str, Beat]:
    """A heartbeat of each."""
    repository = ClockedRepository(database, Settings(), now)
    return {name: await repository.beat(name, shards=SHARDS) for name in managers}


async def test_a_lease_that_was_written_by_a_wrong_clock_holds_nothing(database: Database) -> None:
    await ClockedRepository(database, Settings(), NOW).add_shards(SHARDS)
    await beats(database, NOW + HOUR, "ticker_ahead")
    found = await beats(database, NOW + SECOND, "ticker_b")
    assert found["ticker_b"].shards == SHARDS


async def test_tokens_that_are_gone_are_made_again(database: Database, connection: Any) -> None:
    engine = Engine(database, NOW)
    manager = cron_ticks.schedule_manager.ScheduleManager(
        database, engine.repository, engine.settings, manager_id="ticker_a"
    )
    await engine.declare(every=60, jitter=None)
    await manager.run_once()
    await connection.execute("TRUNCATE cron_shards, cron_managers")
    engine.now += 90 * SECOND
    for _ in range(2):
        await manager.run_once()
    assert await connection.fetchval("SELECT count(*) FROM cron_shards WHERE leased_by = 'ticker_a'") == SHARDS
    assert await connection.fetchval("SELECT max(scheduled_for) FROM cron_ticks") == NOW + 120 * SECOND


async def test_a_clock_that_steps_back_in_a_pass_loses_no_occurrence(database: Database, connection: Any) -> None:
    """A cursor may then look as if it were in time, though the pass knows no moments from so long ago."""
    engine = Engine(database, NOW)
    schedule = await engine.declare(cron="* * * * *", catch_up="all")
    await connection.execute("DELETE FROM cron_ticks")
    await connection.execute("UPDATE cron_schedule_cursors SET next_tick_needed_at = $1", NOW + 60 * SECOND)
    engine.now = NOW + 300 * SECOND
    beat = engine.repository.beat

    async def beat_and_step_back(*arguments: Any, **options: Any) -> Beat:
        found = await beat(*arguments, **options)
        engine.now = NOW + 60 * SECOND
        return found

    engine.repository.beat = beat_and_step_back  # type: ignore[method-assign]
    await engine.manager.run_once()
    moments = [row[0] for row in await connection.fetch("SELECT scheduled_for FROM cron_ticks ORDER BY 1")]
    assert moments[0] == NOW + 60 * SECOND
    assert len(moments) == len(set(moments)) == (moments[-1] - moments[0]) // (60 * SECOND) + 1
    assert schedule.cron == "* * * * *"


async def test_what_is_needed_soon_is_made_before_the_rest(
    database: Database, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever slots it is in: a pass may take long."""
    engine = Engine(database, NOW, manager_batch_size=10)
    for number in range(60):
        soon = number % 3 == 0
        await engine.declare(name=f"schedule {number}", at=NOW + (HOUR if soon else HOUR + 50 * SECOND), jitter=None)
    engine.now = NOW + HOUR - 5 * SECOND
    taken: list[datetime] = []
    lock = engine.repository.lock_cursors

    async def lock_and_note(*arguments: Any, **options: Any) -> Any:
        rows = await lock(*arguments, **options)
        taken.extend(row["next_tick_needed_at"] for row in rows)
        return rows

    monkeypatch.setattr(engine.repository, "lock_cursors", lock_and_note)
    await engine.manager.run_once()
    assert len(taken) == 60
    assert taken == sorted(taken)
    assert await connection.fetchval("SELECT count(*) FROM cron_ticks") == 60


async def test_a_sweep_that_takes_too_long_does_not_stop_a_firer_that_starts(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins where ticks are not late yet, and says so."""
    engine = Engine(database, await ClockedRepository(database, Settings(), NOW).clock())
    await engine.declare(every=60, jitter=None)
    monkeypatch.setattr(cron_ticks.tick_repository, "DEADLINE_SECONDS", 1e-6)
    floors = TickFloors()
    with capture_logs() as logs:
        due_in = await engine.repository.next_due_in("queue", floors=floors)
    assert 0 in due_in
    assert floors.known
    assert len(floors.all) == LEVELS
    assert [line["event"] for line in logs] == ["sweep_too_slow"]


async def test_a_sweep_that_takes_too_long_does_not_stop_a_manager_that_starts(
    database: Database, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(database, await ClockedRepository(database, Settings(), NOW).clock())
    await engine.declare(every=30, jitter=None)
    await connection.execute("DELETE FROM cron_ticks")
    await connection.execute("UPDATE cron_schedule_cursors SET next_tick_needed_at = $1", engine.now)
    monkeypatch.setattr(cron_ticks.schedule_manager, "DEADLINE_SECONDS", 1e-6)
    with capture_logs() as logs:
        await asyncio.wait_for(engine.manager.run_once(), 30)
    assert await connection.fetchval("SELECT count(*) FROM cron_ticks") == 2
    assert "sweep_too_slow" in [line["event"] for line in logs]


def test_late_ticks_that_are_put_behind_are_found_at_once() -> None:
    """Though nothing was there when floors were learned."""
    floors = TickFloors()
    floors.sweeps.rest(3.0)
    floors.note([NOW] * LEVELS)
    floors.forget_late()
    assert list(floors.all[4:]) == [None] * 8
    assert list(floors.reached(2)) == [None] * 4
    assert floors.all[0] is not None


async def test_who_could_not_look_from_the_beginning_does_so_soon(database: Database) -> None:
    """A tick that is committed late, below the floor, must not wait until the ticker has nothing better to do."""
    engine = Engine(database, NOW)
    floors = TickFloors()
    await engine.repository.next_due_in("queue", floors=floors)
    assert floors.sweep_in == math.inf
    floors.sweeps.rest(0.5)
    await engine.repository.next_due_in("queue", floors=floors)
    assert 5 < floors.sweep_in <= 10


async def test_shards_taken_in_the_middle_of_a_pass_get_one_at_once(database: Database, connection: Any) -> None:
    """Nobody else may take them any more, so they don't wait for the next interval."""
    engine = Engine(database, NOW, manager_batch_size=1000)
    for number in range(80):
        await engine.declare(name=f"schedule {number}", every=60, jitter=None)
    repository = engine.repository
    await repository.add_shards(SHARDS)
    for _ in range(2):
        for name in ("ticker_a", "ticker_dead"):
            assert (await repository.beat(name, shards=SHARDS)).shards > 0 or name == "ticker_dead"
    manager = cron_ticks.schedule_manager.ScheduleManager(database, repository, engine.settings, manager_id="ticker_a")
    engine.now += 20 * SECOND
    await repository.beat("ticker_a", shards=SHARDS)
    await manager.run_once()
    lock, left = repository.lock_cursors, 1

    async def lock_and_outlive(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        if left:
            left -= 1
            engine.now += 45 * SECOND
            manager._beat_at = 0.0
        return await lock(*arguments, **options)

    repository.lock_cursors = lock_and_outlive  # type: ignore[method-assign]
    engine.now += 5 * SECOND
    await connection.execute("UPDATE cron_schedule_cursors SET next_tick_needed_at = $1", engine.now + SECOND)
    assert await manager.run_once() == 0.0
    assert await connection.fetchval("SELECT count(*) FROM cron_shards WHERE leased_by = 'ticker_a'") == SHARDS
    assert await manager.run_once() > 0
    until = engine.now + 60 * SECOND
    assert not await connection.fetchval(
        "SELECT count(*) FROM cron_schedule_cursors WHERE next_tick_needed_at < $1", until - 10 * SECOND
    )
