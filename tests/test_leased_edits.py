"""Leased ticks beside what an application does with their schedules, and beside their own worker."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import pytest

from cron_ticks import LeasedTick
from cron_ticks.database import Database
from cron_ticks.loops import Pause
from cron_ticks.publishing import Publisher
from cron_ticks.repository import CronRepository
from cron_ticks.schedule_manager import ScheduleManager
from cron_ticks.schedules import Schedule, define_schedule, redefine_schedule
from cron_ticks.settings import Settings
from cron_ticks.sinks import OutsideSink

pytestmark = pytest.mark.sql

START = datetime(2026, 1, 1, tzinfo=UTC)
SECOND = timedelta(seconds=1)
SINKS: Any = {"hooks": "outside"}


@pytest.fixture
def repository(database: Database, settings: Settings) -> CronRepository:
    return CronRepository(database, settings)


async def declare(repository: CronRepository, *, now: datetime = START, name: str = "job", **options: Any) -> Schedule:
    definition = define_schedule("topic", name=name, sink="hooks", sinks=SINKS, **{"every": 60} | options)
    return (await repository.save_schedule(definition, now=now)).schedule


async def lease(repository: CronRepository, now: datetime, leased_by: str = "ticker_me.1") -> list[LeasedTick]:
    return (await repository.batch_lease_ticks(sink="hooks", leased_by=leased_by, limit=100, now=now)).ticks


@pytest.mark.parametrize("options", [{"delivery": "at_most_once"}, {"max_attempts": 1}])
async def test_a_schedule_can_be_changed_while_nobody_may_take_its_tick_over(
    repository: CronRepository, connection: Any, options: dict[str, Any]
) -> None:
    """Such a tick is due at infinity, which no program can compare with a time."""
    schedule = await declare(repository, **options)
    [tick] = await lease(repository, START)
    await repository.renew_leases([tick.id], leased_by="ticker_me.1", for_good=True, now=START)
    assert await connection.fetchval("SELECT due_at = 'infinity' FROM cron_ticks WHERE id = $1", tick.id)
    now = START + SECOND
    await repository.update_schedule(
        schedule.id, lambda held: redefine_schedule(held, {"every": 30}, sinks=SINKS), now=now
    )
    await repository.disable_schedule(schedule.id, now=now)
    await repository.enable_schedule(schedule.id, now=now)
    assert await repository.delete_tick(tick.id, leased_by="ticker_me.1", now=now)
    await repository.delete_schedule(schedule.id, now=now)


async def test_what_was_being_sent_when_it_was_dropped_is_not_sent_again(
    repository: CronRepository, connection: Any
) -> None:
    """Enabling takes back what was dropped, before its time; but nobody knows whether this one has gone out."""
    second = START + 50 * SECOND
    jitter = 20 * SECOND
    schedule = await declare(repository, every=50, jitter=jitter)
    while (due := schedule.execute_at(second)) > second - SECOND:  # another id moves it otherwise
        await repository.delete_schedule(schedule.id, now=START)
        schedule = await declare(repository, every=50, jitter=jitter)
    await lease(repository, START)
    assert [tick for tick in await lease(repository, due) if tick.scheduled_for == second]
    await repository.disable_schedule(schedule.id, drop_pending=True, now=due)
    run = await connection.fetchrow(
        "SELECT outcome, reason FROM cron_runs WHERE schedule_id = $1 AND scheduled_for = $2", schedule.id, second
    )
    assert tuple(run) == ("disabled", "dropped when disabled while it was being sent: it may have been delivered")
    await repository.enable_schedule(schedule.id, now=due)
    assert [again for again in await lease(repository, second) if again.scheduled_for == second] == []


async def test_a_worker_that_takes_over_its_own_tick_is_another_owner(repository: CronRepository) -> None:
    """It slept past its lease: what it had in hand then is not what it has now."""
    await declare(repository)
    [before] = await lease(repository, START, "ticker_me.1")
    later = START + 11 * SECOND
    [after] = await lease(repository, later, "ticker_me.2")
    assert (after.id, after.attempts, after.recovery) == (before.id, 2, True)
    assert await repository.renew_leases([before.id], leased_by="ticker_me.1", now=later) == set()
    assert not await repository.delete_tick(before.id, leased_by="ticker_me.1", now=later)
    assert await repository.delete_tick(after.id, leased_by="ticker_me.2", now=later)


async def test_an_edit_in_an_open_transaction_holds_up_its_own_schedule_alone(
    database: Database, repository: CronRepository, settings: Settings, connection: Any
) -> None:
    """Its neighbours in the batch end at once; its own tick as soon as the edit has ended."""
    now = await connection.fetchval("SELECT statement_timestamp()")
    edited = await declare(repository, now=now, name="edited")
    for number in range(5):
        await declare(repository, now=now, name=f"n{number}")
    called, ended = anyio.Event(), anyio.Event()

    async def publish(_ticks: Sequence[LeasedTick]) -> None:
        called.set()
        await ended.wait()

    pause = Pause()
    async with anyio.create_task_group() as tasks:
        sink = OutsideSink("hooks", publish, 100, 1)
        catch_up = ScheduleManager(database, repository, settings).catch_up
        publisher = Publisher(
            repository, sink, settings, ticker_id="ticker_me", tasks=tasks, pause=pause, catch_up=catch_up
        )
        await publisher.run_once()
        with anyio.fail_after(30):
            await called.wait()
            async with connection.transaction():
                await connection.execute("SELECT FROM cron_ticks WHERE schedule_id = $1 FOR UPDATE", edited.id)
                ended.set()
                while await database.fetchval("SELECT count(*) FROM cron_runs") < 5:
                    await anyio.lowlevel.checkpoint()
                assert await database.fetchval("SELECT count(*) FROM cron_runs WHERE schedule_id = $1", edited.id) == 0
    runs = await connection.fetch("SELECT outcome, attempts, recovered, ticker_id FROM cron_runs")
    assert [tuple(run) for run in runs] == [("enqueued", 1, False, "ticker_me")] * 6


async def test_what_may_be_sent_once_waits_for_a_lock_on_its_row(
    database: Database, repository: CronRepository, settings: Settings, connection: Any
) -> None:
    """An edit's, or that of a renewal of the same batch: it is not lost by that, and goes out when the row is free."""
    now = await connection.fetchval("SELECT statement_timestamp()")
    await declare(repository, now=now, delivery="at_most_once")
    sent: list[LeasedTick] = []
    locked, tried = anyio.Event(), anyio.Event()
    renew = repository.renew_leases

    async def publish(ticks: Sequence[LeasedTick]) -> None:
        sent.extend(ticks)

    async def renewing(*arguments: Any, **options: Any) -> set[str]:
        await locked.wait()
        kept = await renew(*arguments, **options)
        tried.set()
        return kept

    async with anyio.create_task_group() as tasks:
        sink = OutsideSink("hooks", publish, 100, 1)
        catch_up = ScheduleManager(database, repository, settings).catch_up
        publisher = Publisher(
            repository, sink, settings, ticker_id="ticker_me", tasks=tasks, pause=Pause(), catch_up=catch_up
        )
        repository.renew_leases = renewing  # type: ignore[method-assign]
        await publisher.run_once()
        async with connection.transaction():
            await connection.execute("SELECT FROM cron_ticks FOR UPDATE")
            locked.set()
            with anyio.fail_after(30):
                await tried.wait()
            assert sent == []
    assert [tick.attempts for tick in sent] == [1]
    assert await database.fetchval("SELECT outcome FROM cron_runs") == "enqueued"
