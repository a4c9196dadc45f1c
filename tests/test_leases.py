"""Leased ticks: whose they are and how long, how often a tick is tried, and what is written when it can't be sent."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from cron_ticks.checks import PRIORITIES
from cron_ticks.database import LONGEST_ERROR, Database
from cron_ticks.ids import new_tick_id
from cron_ticks.lease_repository import FailedTick
from cron_ticks.repository import CronRepository
from cron_ticks.rows import LeasedTick
from cron_ticks.schedules import define_schedule
from cron_ticks.settings import Settings

pytestmark = pytest.mark.sql

START = datetime(2026, 1, 1, tzinfo=UTC)
SECOND = timedelta(seconds=1)
LEASE = 10 * SECOND
BACKOFF = 10 * SECOND
DAY = timedelta(days=1)
MINUTES = timedelta(minutes=5)
ME, OTHER = "ticker_me", "ticker_other"
SINKS: Any = {"hooks": "outside", "others": "outside"}
RAN_OUT = "its lease ran out and it may not be tried again: whether it was delivered is unknown"
NOT_TRIED = "not tried again, for its attempts or its age; before: "


@pytest.fixture
def repository(database: Database, settings: Settings) -> CronRepository:
    return CronRepository(database, settings)


async def declare(repository: CronRepository, name: str = "job", *, at: datetime = START, **options: Any) -> str:
    """A schedule whose one tick is due at `at`."""
    chosen = {"every": 3600, "jitter": None, "sink": "hooks", "sinks": SINKS} | options
    return (await repository.save_schedule(define_schedule("topic", name=name, **chosen), now=at)).schedule.id


async def lease(
    repository: CronRepository, now: datetime = START, *, by: str = ME, limit: int = 100, sink: str = "hooks"
) -> list[LeasedTick]:
    return (await repository.batch_lease_ticks(sink=sink, leased_by=by, limit=limit, now=now)).ticks


async def fail(
    repository: CronRepository, tick: LeasedTick, now: datetime, error: str = "no", *, by: str = ME, **options: Any
) -> bool | None:
    """Whether it is over; None if it was not ours."""
    failed = FailedTick(tick.id, tick.attempts, error, **options)
    return (await repository.fail_ticks([failed], ticker_id=by, leased_by=by, now=now)).get(tick.id)


async def lease_once(repository: CronRepository, now: datetime = START) -> None:
    """Lease what may be sent once, and be about to send it."""
    ids = [tick.id for tick in await lease(repository, now)]
    assert await repository.renew_leases(ids, leased_by=ME, for_good=True, now=now) == set(ids)


async def lease_and_fail(repository: CronRepository, connection: Any, now: datetime, **options: Any) -> timedelta:
    """One attempt that fails; how long the tick then waits."""
    [tick] = await lease(repository, now)
    assert await fail(repository, tick, now, **options) is False
    wait: timedelta = await connection.fetchval("SELECT due_at - $1 FROM cron_ticks", now)
    return wait


async def only_tick(connection: Any) -> dict[str, Any]:
    [row] = await connection.fetch("SELECT * FROM cron_ticks")
    return dict(row)


async def only_run(connection: Any) -> tuple[Any, ...]:
    [row] = await connection.fetch("SELECT outcome, reason, attempts, ticker_id, recovered FROM cron_runs")
    return tuple(row)


async def count(connection: Any, table: str) -> int:
    found: int = await connection.fetchval(f"SELECT count(*) FROM {table}")
    return found


def names(ticks: Sequence[LeasedTick]) -> list[str]:
    return [tick.schedule_name for tick in ticks]


# Whose a tick is


async def test_a_leased_tick_says_all_that_a_sink_needs(repository: CronRepository, connection: Any) -> None:
    schedule_id = await declare(repository, payload={"a": [1, None]}, workspace_id="ws_1", priority="high")
    [tick] = await lease(repository, START + SECOND)
    assert tick == LeasedTick(
        id=tick.id,
        schedule_id=schedule_id,
        schedule_name="job",
        workspace_id="ws_1",
        queue_name="topic",
        payload={"a": [1, None]},
        scheduled_for=START,
        execute_at=START,
        origin="schedule",
        priority="high",
        delivery="at_least_once",
        attempts=1,
        recovery=False,
        leased_until=START + SECOND + LEASE,
        alone=False,
    )
    assert tick.message_id == f"msg_{tick.id.removeprefix('tick_')}"
    row = await only_tick(connection)
    assert (row["leased_by"], row["leased_at"], row["leased_until"]) == (ME, START + SECOND, START + SECOND + LEASE)
    assert (row["due_at"], row["execute_at"], row["attempts"]) == (START + SECOND + LEASE, START, 1)


async def test_nothing_is_leased_before_it_is_due(repository: CronRepository) -> None:
    await declare(repository)
    assert await lease(repository, START - timedelta(microseconds=1)) == []
    assert len(await lease(repository, START)) == 1


async def test_a_tick_is_nobody_elses_while_its_lease_lasts(repository: CronRepository) -> None:
    await declare(repository)
    [tick] = await lease(repository)
    almost = START + LEASE - timedelta(microseconds=1)
    assert await lease(repository, almost, by=OTHER) == []
    assert await repository.renew_leases([tick.id], leased_by=OTHER, now=almost) == set()
    assert await repository.delete_ticks([tick.id], leased_by=OTHER, now=almost) == []
    assert await fail(repository, tick, almost, by=OTHER) is None
    assert await repository.delete_tick(tick.id, leased_by=ME, now=almost)


async def test_an_owner_whose_lease_ran_out_can_do_nothing(repository: CronRepository, connection: Any) -> None:
    """Though nobody has taken the tick over yet."""
    await declare(repository)
    [tick] = await lease(repository)
    before = await only_tick(connection)
    for now in (START + LEASE, START + 2 * LEASE):
        assert await repository.renew_leases([tick.id], leased_by=ME, now=now) == set()
        assert not await repository.delete_tick(tick.id, leased_by=ME, now=now)
        assert await fail(repository, tick, now) is None
    assert await only_tick(connection) == before
    assert await count(connection, "cron_runs") == 0


async def test_the_clock_is_the_databases(repository: CronRepository, connection: Any) -> None:
    await declare(repository, at=await connection.fetchval("SELECT statement_timestamp()"))
    [tick] = (await repository.batch_lease_ticks(sink="hooks", leased_by=ME, limit=5)).ticks
    left = await connection.fetchval("SELECT leased_until - statement_timestamp() FROM cron_ticks")
    assert LEASE - 5 * SECOND < left <= LEASE
    await connection.execute("UPDATE cron_ticks SET leased_until = statement_timestamp()")
    assert await repository.renew_leases([tick.id], leased_by=ME) == set()
    assert not await repository.delete_tick(tick.id, leased_by=ME)
    failed = [FailedTick(tick.id, 1, "no")]
    assert await repository.fail_ticks(failed, ticker_id=ME, leased_by=ME) == {}
    await connection.execute("UPDATE cron_ticks SET leased_until = leased_until + interval '5 s'")
    assert await repository.renew_leases([tick.id], leased_by=ME) == {tick.id}
    assert await connection.fetchval("SELECT due_at = leased_until FROM cron_ticks")
    assert await repository.delete_tick(tick.id, leased_by=ME)


async def test_a_renewed_lease_lasts_from_then_on(repository: CronRepository) -> None:
    await declare(repository)
    [tick] = await lease(repository)
    assert await repository.renew_leases([tick.id, "tick_none"], leased_by=ME, now=START + 9 * SECOND) == {tick.id}
    assert await lease(repository, START + 9 * SECOND + LEASE - timedelta(microseconds=1), by=OTHER) == []
    [taken_over] = await lease(repository, START + 9 * SECOND + LEASE, by=OTHER)
    assert (taken_over.attempts, taken_over.recovery) == (2, True)


async def test_a_delivered_tick_ends_with_its_run(repository: CronRepository, connection: Any) -> None:
    await declare(repository)
    [tick] = await lease(repository)
    [ended] = await repository.delete_ticks([tick.id, "tick_none"], leased_by=ME, now=START + 2 * SECOND)
    assert ended == (tick.id, "schedule", 2 * SECOND, False)
    assert await repository.delete_ticks([tick.id], leased_by=ME, now=START + 2 * SECOND) == []
    assert await only_run(connection) == ("enqueued", None, 1, ME, False)
    row = await connection.fetchrow("SELECT message_id, lateness, ended_at FROM cron_runs")
    assert tuple(row) == (tick.message_id, 2 * SECOND, START + 2 * SECOND)
    assert await count(connection, "cron_ticks") == 0


@pytest.mark.parametrize("options", [{}, {"delivery": "at_most_once"}, {"max_attempts": 1}])
async def test_what_was_not_handed_on_is_given_back_as_if_it_had_not_been_leased(
    repository: CronRepository, connection: Any, options: dict[str, Any]
) -> None:
    await declare(repository, **options)
    [tick] = await lease(repository)
    await repository.release_leases([tick.id], leased_by=OTHER, now=START + SECOND)
    assert (await only_tick(connection))["leased_by"] == ME
    await repository.release_leases([tick.id], leased_by=ME, now=START + SECOND)
    row = await only_tick(connection)
    assert (row["attempts"], row["turn"], row["due_at"], row["error"]) == (0, 0, START + SECOND, None)
    assert (row["leased_by"], row["leased_at"], row["leased_until"]) == (None, None, None)
    [again] = await lease(repository, START + SECOND, by=OTHER)
    assert (again.attempts, again.recovery) == (1, False)


async def test_what_was_given_back_keeps_what_is_known_of_earlier_attempts(repository: CronRepository) -> None:
    await declare(repository)
    await lease(repository)
    [tick] = await lease(repository, START + LEASE, by=OTHER)
    await repository.release_leases([tick.id], leased_by=OTHER, now=START + LEASE)
    [again] = await lease(repository, START + LEASE)
    assert (again.attempts, again.recovery) == (2, True)


async def test_a_lease_that_ran_out_can_not_be_given_back(repository: CronRepository, connection: Any) -> None:
    await declare(repository)
    [tick] = await lease(repository)
    before = await only_tick(connection)
    await repository.release_leases([tick.id], leased_by=ME, now=START + LEASE)
    assert await only_tick(connection) == before


async def test_a_tick_that_somebody_has_locked_stays_its_owners_and_nobody_waits(
    repository: CronRepository, connection: Any
) -> None:
    """An edit in an application's transaction may last. What may be sent once must be pinned for sure, though."""
    await declare(repository)
    [tick] = await lease(repository)
    async with connection.transaction():
        await connection.execute("SELECT FROM cron_ticks FOR UPDATE")
        assert await repository.delete_ticks([tick.id], leased_by=ME, now=START) == []
        assert await fail(repository, tick, START) is None
        assert await repository.renew_leases([tick.id], leased_by=ME, now=START) == {tick.id}
        assert await repository.renew_leases([tick.id], leased_by=OTHER, now=START) == set()
        assert await repository.renew_leases([tick.id], leased_by=ME, now=START + LEASE) == set()
        assert await repository.renew_leases([tick.id], leased_by=ME, for_good=True, now=START) == set()
    assert await repository.delete_tick(tick.id, leased_by=ME, now=START)


async def test_a_batch_of_the_same_worker_is_another_owner(repository: CronRepository, connection: Any) -> None:
    """One that slept over its lease can't end what the worker has taken over from itself."""
    await declare(repository)
    [tick] = await lease(repository, by="ticker_me.1")
    await lease(repository, START + LEASE, by="ticker_me.2")
    assert await repository.delete_ticks([tick.id], leased_by="ticker_me.1", now=START + LEASE) == []
    assert await repository.delete_tick(tick.id, leased_by="ticker_me.2", now=START + LEASE)
    assert await only_run(connection) == ("enqueued", None, 2, ME, True)


async def test_a_takeover_is_a_recovery_and_counts_an_attempt(repository: CronRepository, connection: Any) -> None:
    await declare(repository)
    [tick] = await lease(repository)
    [second] = await lease(repository, START + LEASE, by=OTHER)
    assert (second.id, second.message_id, second.attempts) == (tick.id, tick.message_id, 2)
    assert second.recovery
    assert not await repository.delete_tick(tick.id, leased_by=ME, now=START + LEASE)
    assert await repository.delete_tick(tick.id, leased_by=OTHER, now=START + LEASE)
    assert await only_run(connection) == ("enqueued", None, 2, OTHER, True)


@pytest.mark.parametrize(("max_attempts", "alone"), [(4, [False, False, True, True]), (2, [False, True])])
async def test_what_a_worker_lost_goes_alone_if_it_was_lost_before_or_is_tried_for_the_last_time(
    repository: CronRepository, max_attempts: int, alone: list[bool]
) -> None:
    await declare(repository, max_attempts=max_attempts)
    for number, expected in enumerate(alone):
        [tick] = await lease(repository, START + number * LEASE, by=f"ticker_{number}")
        assert (tick.attempts, tick.alone) == (number + 1, expected)


@pytest.mark.parametrize("unsure", [False, True])
async def test_what_failed_goes_alone_from_then_on(
    repository: CronRepository,
    connection: Any,
    unsure: bool,  # noqa: FBT001 - a parameter
) -> None:
    """Also where a worker that died had it afterwards."""
    await declare(repository, max_attempts=4)
    now = START + await lease_and_fail(repository, connection, START, unsure=unsure)
    for number in range(2):
        [tick] = await lease(repository, now + number * LEASE, by=f"ticker_{number}")
        assert tick.alone


async def recovery_time(connection: Any) -> timedelta | None:
    found: timedelta | None = await connection.fetchval("SELECT recovery_time FROM cron_runs")
    return found


async def test_the_ledger_says_how_long_a_recovery_took(repository: CronRepository, connection: Any) -> None:
    """From the end of the first lease that nobody ended, however often it was lost."""
    await declare(repository)
    await lease(repository)
    await lease(repository, START + LEASE + SECOND, by=OTHER)
    [tick] = await lease(repository, START + 3 * LEASE, by=ME)
    assert await repository.delete_tick(tick.id, leased_by=ME, now=START + 3 * LEASE + 2 * SECOND)
    assert await only_run(connection) == ("enqueued", None, 3, ME, True)
    assert await recovery_time(connection) == 2 * LEASE + 2 * SECOND


async def test_without_a_loss_there_is_no_time_to_recover(repository: CronRepository, connection: Any) -> None:
    await declare(repository)
    wait = await lease_and_fail(repository, connection, START)
    [tick] = await lease(repository, START + wait)
    assert await repository.delete_tick(tick.id, leased_by=ME, now=START + wait)
    assert await recovery_time(connection) is None


async def test_what_may_have_been_delivered_is_recovered_from_then_on(
    repository: CronRepository, connection: Any
) -> None:
    await declare(repository)
    wait = await lease_and_fail(repository, connection, START, unsure=True)
    [tick] = await lease(repository, START + wait)
    assert await fail(repository, tick, START + wait, final=True)
    assert await recovery_time(connection) == wait


async def test_what_a_disabled_schedule_lost_is_not_taken_over(repository: CronRepository, connection: Any) -> None:
    schedule_id = await declare(repository)
    [tick] = await lease(repository)
    await repository.disable_schedule(schedule_id, now=START + SECOND)
    leased = await repository.batch_lease_ticks(sink="hooks", leased_by=OTHER, limit=5, now=START + LEASE + SECOND)
    assert (leased.ticks, leased.given_up, leased.found) == ([], [tick.id], 1)
    reason = "its worker died or hung, and its schedule is disabled: whether it was delivered is unknown"
    assert await only_run(connection) == ("expired", reason, 1, ME, False)


async def test_what_may_have_been_delivered_is_not_sent_again_for_a_disabled_schedule(
    repository: CronRepository, connection: Any
) -> None:
    schedule_id = await declare(repository)
    wait = await lease_and_fail(repository, connection, START, unsure=True)
    await repository.disable_schedule(schedule_id, now=START + SECOND)
    assert await lease(repository, START + wait) == []
    outcome, _, attempts, _, recovered = await only_run(connection)
    assert (outcome, attempts, recovered) == ("expired", 1, True)


async def test_a_disabled_schedules_ticks_that_nobody_lost_go_out(repository: CronRepository) -> None:
    schedule_id = await declare(repository)
    await repository.disable_schedule(schedule_id, now=START + SECOND)
    assert len(await lease(repository, START + 2 * SECOND)) == 1


async def test_what_is_too_late_for_its_grace_is_missed_at_the_lease(
    repository: CronRepository, connection: Any
) -> None:
    await declare(repository, misfire_grace=5)
    await declare(repository, "patient", misfire_grace=50)
    leased = await repository.batch_lease_ticks(sink="hooks", leased_by=ME, limit=5, now=START + 6 * SECOND)
    assert (names(leased.ticks), len(leased.missed), leased.found) == (["patient"], 1, 2)
    assert await only_run(connection) == ("missed", "later than its misfire_grace", 0, None, False)


async def test_the_grace_is_for_the_first_attempt(repository: CronRepository, connection: Any) -> None:
    await declare(repository, misfire_grace=5)
    wait = await lease_and_fail(repository, connection, START)
    assert wait > 5 * SECOND
    assert len(await lease(repository, START + wait)) == 1


async def test_late_ticks_are_left_to_a_policy(repository: CronRepository) -> None:
    await declare(repository)
    minute = timedelta(minutes=1)
    leased = await repository.batch_lease_ticks(sink="hooks", leased_by=ME, limit=5, now=START + minute + SECOND)
    assert (leased.found, leased.late) == (0, True)
    leased = await repository.batch_lease_ticks(sink="others", leased_by=ME, limit=5, now=START + minute + SECOND)
    assert (leased.found, leased.late) == (0, False)
    leased = await repository.batch_lease_ticks(sink="hooks", leased_by=ME, limit=5, now=START + minute)
    assert (leased.found, leased.late) == (1, False)


async def test_the_attempt_before_a_takeover_can_not_be_failed_by_its_number(repository: CronRepository) -> None:
    """One who sleeps over its lease and leases the same tick again must not mix up its attempts."""
    await declare(repository)
    [first] = await lease(repository)
    [second] = await lease(repository, START + LEASE)
    assert await fail(repository, first, START + LEASE) is None
    assert await fail(repository, second, START + LEASE) is False


async def test_a_recovery_stays_one(repository: CronRepository, connection: Any) -> None:
    """Attempts after it may well fail in order: what became of the first is still unknown."""
    await declare(repository, max_attempts=10)
    await lease(repository)
    now = START
    for attempts in (2, 3):
        now += 50 * SECOND
        [tick] = await lease(repository, now)
        assert (tick.attempts, tick.recovery) == (attempts, True)
        assert await fail(repository, tick, now, unsure=False) is False
    [tick] = await lease(repository, now + 100 * SECOND)
    assert tick.recovery
    await fail(repository, tick, now + 100 * SECOND, final=True)
    assert await only_run(connection) == ("failed", "no", 4, ME, True)


async def test_a_failure_in_order_is_no_recovery(repository: CronRepository, connection: Any) -> None:
    await declare(repository)
    await lease_and_fail(repository, connection, START)
    [tick] = await lease(repository, START + 100 * SECOND)
    assert (tick.attempts, tick.recovery) == (2, False)


async def test_of_several_at_once_each_tick_has_one_owner(repository: CronRepository) -> None:
    for number in range(40):
        await declare(repository, f"n{number}")
    leased = await asyncio.gather(*(lease(repository, by=f"ticker_{number}", limit=7) for number in range(8)))
    rest = [await lease(repository, by="ticker_last", limit=7) for _ in range(7)]
    ticks = [tick for part in [*leased, *rest] for tick in part]
    assert sorted(names(ticks)) == sorted(f"n{number}" for number in range(40))
    assert {tick.attempts for tick in ticks} == {1}
    assert max(len(part) for part in leased) <= 7


async def test_sinks_do_not_see_each_others_ticks(repository: CronRepository) -> None:
    await declare(repository, "mine")
    await declare(repository, "theirs", sink="others")
    await declare(repository, "own", sink="queue")
    assert names(await lease(repository)) == ["mine"]
    assert names(await lease(repository, sink="others")) == ["theirs"]
    assert await lease(repository, sink="none") == []


# In which order


async def put_in(
    connection: Any, schedule_id: str, name: str, *, turn: int = 0, priority: int = 2, due_at: datetime = START
) -> None:
    place = await count(connection, "cron_ticks")
    await connection.execute(
        """INSERT INTO cron_ticks (id, schedule_id, schedule_name, queue_name, payload, scheduled_for, execute_at,
            due_at, created_at, sink, delivery, turn, priority)
        VALUES ($1, $2, $3, 'topic', '{}', $4, $4, $5, $5, 'hooks', 'at_least_once', $6, $7)""",
        new_tick_id(),
        schedule_id,
        name,
        START + (place + 1) * SECOND,
        due_at,
        turn,
        priority,
    )


async def test_due_ones_go_before_retries_before_catching_up_and_urgent_ones_first(
    repository: CronRepository, connection: Any
) -> None:
    """However long the less important ones have been due."""
    schedule_id = await declare(repository)
    await connection.execute("DELETE FROM cron_ticks")
    levels = [(turn, priority) for turn in range(3) for priority in range(4)]
    wanted = [f"{turn} {PRIORITIES[priority]} {age}" for turn, priority in levels for age in ("older", "newer")]
    for place, (turn, priority) in reversed(list(enumerate(levels))):
        due_at = START - place * 10 * SECOND
        for age, moment in (("newer", due_at + SECOND), ("older", due_at)):
            name = f"{turn} {PRIORITIES[priority]} {age}"
            await put_in(connection, schedule_id, name, turn=turn, priority=priority, due_at=moment)
    taken = [tick for _ in wanted for tick in await lease(repository, START + SECOND, limit=1)]
    assert names(taken) == wanted


async def test_a_batch_is_filled_with_the_most_important(repository: CronRepository, connection: Any) -> None:
    schedule_id = await declare(repository)
    await connection.execute("DELETE FROM cron_ticks")
    for number in range(6):
        await put_in(connection, schedule_id, f"{number % 3}", turn=number % 3)
    assert sorted(names(await lease(repository, limit=3))) == ["0", "0", "1"]
    assert sorted(names(await lease(repository, limit=9))) == ["1", "2", "2"]


async def test_what_is_less_important_can_be_left_out(repository: CronRepository, connection: Any) -> None:
    schedule_id = await declare(repository)
    await connection.execute("DELETE FROM cron_ticks")
    for turn in range(3):
        await put_in(connection, schedule_id, f"{turn}", turn=turn)
    for turn in range(3):
        leased = await repository.batch_lease_ticks(sink="hooks", leased_by=ME, limit=9, last_turn=turn, now=START)
        assert names(leased.ticks) == [f"{turn}"]


# How often a tick is tried


async def test_the_last_attempt_is_taken_over_by_nobody(repository: CronRepository, connection: Any) -> None:
    await declare(repository, max_attempts=2)
    await lease(repository)
    assert (await only_tick(connection))["due_at"] == START + LEASE
    [tick] = await lease(repository, START + LEASE)
    assert await connection.fetchval("SELECT due_at = 'infinity' FROM cron_ticks")
    assert await lease(repository, START + DAY, by=OTHER) == []
    renewed = await repository.renew_leases([tick.id], leased_by=ME, now=START + LEASE + SECOND)
    assert renewed == {tick.id}
    assert await connection.fetchval("SELECT due_at = 'infinity' FROM cron_ticks")
    assert (await only_tick(connection))["leased_until"] == START + 2 * LEASE + SECOND
    assert await repository.delete_tick(tick.id, leased_by=ME, now=START + LEASE + 2 * SECOND)
    assert await only_run(connection) == ("enqueued", None, 2, ME, True)


async def test_what_may_be_sent_once_is_taken_over_by_nobody_from_its_call_on(
    repository: CronRepository, connection: Any
) -> None:
    """Before that nothing was sent, so who takes it over repeats nothing."""
    await declare(repository, delivery="at_most_once", max_attempts=10)
    [tick] = await lease(repository)
    assert (tick.delivery, tick.attempts) == ("at_most_once", 1)
    [tick] = await lease(repository, START + LEASE, by=OTHER)
    assert (tick.attempts, tick.recovery) == (2, False)
    almost = START + 2 * LEASE - SECOND
    assert await repository.renew_leases([tick.id], leased_by=ME, for_good=True, now=almost) == set()
    assert await repository.renew_leases([tick.id], leased_by=OTHER, for_good=True, now=almost) == {tick.id}
    assert await connection.fetchval("SELECT due_at = 'infinity' FROM cron_ticks")
    await repository.renew_leases([tick.id], leased_by=OTHER, now=almost + SECOND)
    assert await connection.fetchval("SELECT due_at = 'infinity' FROM cron_ticks")
    assert await lease(repository, START + DAY) == []


async def test_a_failure_of_what_may_be_sent_once_is_its_end(repository: CronRepository, connection: Any) -> None:
    await declare(repository, delivery="at_most_once", max_attempts=10)
    [tick] = await lease(repository)
    assert await fail(repository, tick, START + SECOND, "no answer", unsure=True) is True
    assert await only_run(connection) == ("failed", "no answer", 1, ME, False)
    assert await count(connection, "cron_ticks") == 0


async def test_what_has_fired_before_is_not_leased(repository: CronRepository, connection: Any) -> None:
    schedule_id = await declare(repository)
    [tick] = await lease(repository)
    await repository.delete_tick(tick.id, leased_by=ME, now=START)
    await declare(repository, "fresh")
    await connection.execute(
        """INSERT INTO cron_ticks (id, schedule_id, schedule_name, queue_name, payload, scheduled_for, execute_at,
            due_at, created_at, sink, delivery)
        VALUES ('tick_again', $1, 'job', 'topic', '{}', $2, $3, $3, $3, 'hooks', 'at_least_once')""",
        schedule_id,
        START,
        START + SECOND,
    )
    leased = await repository.batch_lease_ticks(sink="hooks", leased_by=ME, limit=5, now=START + SECOND)
    assert (names(leased.ticks), leased.refused, leased.given_up, leased.found) == (["fresh"], ["tick_again"], [], 2)
    assert await count(connection, "cron_ticks") == 1
    assert await only_run(connection) == ("enqueued", None, 1, ME, False)


async def test_what_is_too_old_is_given_up_at_the_lease(repository: CronRepository, connection: Any) -> None:
    await declare(repository, max_age=60, max_attempts=10)
    [tick] = await lease(repository)
    assert await fail(repository, tick, START, "sink is down") is False
    leased = await repository.batch_lease_ticks(sink="hooks", leased_by=OTHER, limit=5, now=START + 61 * SECOND)
    assert (leased.ticks, leased.refused, leased.given_up, leased.found) == ([], [], [tick.id], 1)
    assert await only_run(connection) == ("failed", f"{NOT_TRIED}sink is down", 1, None, False)
    assert await count(connection, "cron_ticks") == 0


async def test_what_a_dead_worker_left_too_long_is_given_up_at_the_lease(
    repository: CronRepository, connection: Any
) -> None:
    await declare(repository, max_age=60)
    [tick] = await lease(repository)
    leased = await repository.batch_lease_ticks(sink="hooks", leased_by=OTHER, limit=5, now=START + 61 * SECOND)
    assert leased.given_up == [tick.id]
    outcome, reason, attempts, ticker_id, _ = await only_run(connection)
    assert (outcome, reason, attempts, ticker_id) == ("expired", f"{NOT_TRIED}its worker died or hung", 1, ME)


async def test_what_was_never_tried_is_never_too_old(repository: CronRepository) -> None:
    await declare(repository, max_age=10)
    [tick] = await lease(repository, START + 59 * SECOND)
    assert tick.attempts == 1


async def test_attempts_used_up_by_an_edit_are_given_up_at_the_lease(
    repository: CronRepository, connection: Any
) -> None:
    await declare(repository, max_attempts=5)
    now = START
    for _ in range(2):
        await lease_and_fail(repository, connection, now)
        now += 100 * SECOND
    await declare(repository, max_attempts=2, at=now)
    leased = await repository.batch_lease_ticks(sink="hooks", leased_by=ME, limit=5, now=now)
    assert (len(leased.given_up), leased.found) == (1, 1)
    assert await only_run(connection) == ("failed", f"{NOT_TRIED}no", 2, None, False)


async def test_the_settings_hold_where_the_schedule_says_nothing(database: Database, connection: Any) -> None:
    repository = CronRepository(
        database, Settings.load(tick_max_attempts=2, tick_max_age_seconds=100, tick_backoff_seconds=1, lease_seconds=20)
    )
    await declare(repository)
    [tick] = await lease(repository)
    assert tick.leased_until == START + 20 * SECOND
    await fail(repository, tick, START)
    assert 0.8 * SECOND <= (await only_tick(connection))["due_at"] - START <= 1.2 * SECOND
    [tick] = await lease(repository, START + 2 * SECOND)
    assert await connection.fetchval("SELECT due_at = 'infinity' FROM cron_ticks")
    assert await fail(repository, tick, START + 2 * SECOND) is True


# Ticks that could not be sent


async def test_a_failed_tick_waits_and_says_why(repository: CronRepository, connection: Any) -> None:
    await declare(repository)
    wait = await lease_and_fail(repository, connection, START, error="the sink says no")
    assert 0.8 * BACKOFF <= wait <= 1.2 * BACKOFF
    row = await only_tick(connection)
    assert (row["attempts"], row["turn"], row["error"], row["recovery"]) == (1, 1, "the sink says no", False)
    assert (row["leased_by"], row["leased_at"], row["leased_until"]) == (None, None, None)
    assert await lease(repository, row["due_at"] - timedelta(microseconds=1)) == []
    assert len(await lease(repository, row["due_at"])) == 1
    assert await count(connection, "cron_runs") == 0


async def test_the_pause_doubles_up_to_five_minutes(repository: CronRepository, connection: Any) -> None:
    await declare(repository, max_attempts=12)
    now = START
    for seconds in (10, 20, 40, 80, 160, 300, 300, 300):
        wait = await lease_and_fail(repository, connection, now)
        assert 0.8 * seconds * SECOND <= wait <= 1.2 * seconds * SECOND
        now += wait


async def test_a_very_large_number_of_attempts_is_no_trouble(repository: CronRepository, connection: Any) -> None:
    await declare(repository, max_attempts=1000, max_age=30 * DAY)
    await connection.execute("UPDATE cron_ticks SET attempts = 997")
    assert await lease_and_fail(repository, connection, START) <= 360 * SECOND


async def test_the_pauses_of_ticks_that_fail_together_differ(repository: CronRepository, connection: Any) -> None:
    for number in range(20):
        await declare(repository, f"n{number}")
    failed = [FailedTick(tick.id, 1, "no") for tick in await lease(repository)]
    await repository.fail_ticks(failed, ticker_id=ME, leased_by=ME, now=START)
    assert await connection.fetchval("SELECT count(DISTINCT due_at) FROM cron_ticks") > 10


async def test_a_schedule_has_its_own_limits(repository: CronRepository, connection: Any) -> None:
    await declare(repository, backoff=1, max_attempts=4)
    now = START
    for seconds in (1, 2, 4):
        wait = await lease_and_fail(repository, connection, now)
        assert 0.8 * seconds * SECOND <= wait <= 1.2 * seconds * SECOND
        now += wait
    [tick] = await lease(repository, now)
    assert await fail(repository, tick, now, "at last") is True
    assert await only_run(connection) == ("failed", "at last", 4, ME, False)


async def test_a_first_pause_of_more_than_five_minutes_is_kept(repository: CronRepository, connection: Any) -> None:
    await declare(repository, backoff=3600, max_attempts=5)
    now = START
    for _ in range(2):
        wait = await lease_and_fail(repository, connection, now)
        assert 0.8 * 3600 * SECOND <= wait <= 1.2 * 3600 * SECOND
        now += wait


async def test_an_edit_of_the_limits_holds_from_the_next_failure_on(
    repository: CronRepository, connection: Any
) -> None:
    await declare(repository, backoff=10, max_attempts=3)
    await lease_and_fail(repository, connection, START)
    now = START + 100 * SECOND
    await declare(repository, backoff=1, max_attempts=5, at=now)
    for attempts, seconds in ((2, 2), (3, 4), (4, 8)):
        wait = await lease_and_fail(repository, connection, now)
        assert 0.8 * seconds * SECOND <= wait <= 1.2 * seconds * SECOND
        assert (await only_tick(connection))["attempts"] == attempts
        now += wait
    await declare(repository, max_age=1, max_attempts=100, at=now)
    await connection.execute("UPDATE cron_ticks SET execute_at = $1", now)
    [tick] = await lease(repository, now)
    assert await fail(repository, tick, now) is True


async def test_a_tick_that_would_be_too_old_for_its_next_attempt_has_failed(
    repository: CronRepository, connection: Any
) -> None:
    await declare(repository, max_age=60, backoff=40, max_attempts=10)
    [tick] = await lease(repository, START + SECOND)
    assert await fail(repository, tick, START + SECOND) is False
    [tick] = await lease(repository, START + 55 * SECOND)
    assert await fail(repository, tick, START + 55 * SECOND, "still no") is True
    assert await only_run(connection) == ("failed", "still no", 2, ME, False)


async def test_after_its_attempts_a_tick_has_failed(repository: CronRepository, connection: Any) -> None:
    await declare(repository)
    now = START
    for number in range(2):
        await lease_and_fail(repository, connection, now, error=f"error {number}")
        now += 100 * SECOND
    [tick] = await lease(repository, now)
    assert await fail(repository, tick, now + SECOND, "error 2") is True
    assert await only_run(connection) == ("failed", "error 2", 3, ME, False)
    row = await connection.fetchrow("SELECT message_id, lateness, ended_at, origin, version FROM cron_runs")
    assert tuple(row) == (None, None, now + SECOND, "schedule", 1)
    assert await count(connection, "cron_ticks") == 0
    assert await fail(repository, tick, now + SECOND) is None


async def test_a_rejected_tick_has_failed_at_once(repository: CronRepository, connection: Any) -> None:
    await declare(repository)
    [tick] = await lease(repository)
    assert await fail(repository, tick, START, "never", final=True) is True
    assert await only_run(connection) == ("failed", "never", 1, ME, False)


async def test_an_attempt_of_unknown_outcome_makes_the_next_a_recovery(
    repository: CronRepository, connection: Any
) -> None:
    await declare(repository)
    await lease_and_fail(repository, connection, START, unsure=True)
    assert (await only_tick(connection))["recovery"]
    [tick] = await lease(repository, START + 100 * SECOND)
    assert (tick.attempts, tick.recovery) == (2, True)


async def test_ticks_that_fail_together_each_end_as_they_must(repository: CronRepository, connection: Any) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "again": {},
        "rejected": {},
        "unsure": {},
        "last": {"max_attempts": 1},
        "once": {"delivery": "at_most_once"},
        "gone": {},
    }
    for name, options in kinds.items():
        await declare(repository, name, **options)
    ticks = {tick.schedule_name: tick for tick in await lease(repository)}
    assert await repository.delete_tick(ticks["gone"].id, leased_by=ME, now=START)
    failed = [
        FailedTick(tick.id, tick.attempts, f"of {name}", final=name == "rejected", unsure=name == "unsure")
        for name, tick in ticks.items()
    ]
    over = await repository.fail_ticks(failed, ticker_id=ME, leased_by=ME, now=START)
    by_name = {name: over.get(tick.id) for name, tick in ticks.items()}
    assert by_name == {
        "again": False,
        "rejected": True,
        "unsure": False,
        "last": True,
        "once": True,
        "gone": None,
    }
    left = await connection.fetch("SELECT schedule_name, error, recovery FROM cron_ticks ORDER BY schedule_name")
    assert [tuple(row) for row in left] == [("again", "of again", False), ("unsure", "of unsure", True)]
    reasons = await connection.fetch("SELECT reason FROM cron_runs WHERE outcome = 'failed' ORDER BY reason")
    assert [row["reason"] for row in reasons] == ["of last", "of once", "of rejected"]


async def test_an_attempt_without_a_lease_is_counted_when_it_fails(repository: CronRepository, connection: Any) -> None:
    """In the same database nothing is leased."""
    await declare(repository, sink="queue")
    tick = await only_tick(connection)
    failed = [FailedTick(tick["id"], 0, "a constraint")]
    for attempts in (1, 2):
        over = await repository.fail_ticks(failed, ticker_id=ME, now=START)
        assert over == {tick["id"]: False}
        row = await only_tick(connection)
        assert (row["attempts"], row["turn"], row["error"]) == (attempts, 1, "a constraint")
        assert 0.8 * BACKOFF <= (row["due_at"] - START) / 2 ** (attempts - 1) <= 1.2 * BACKOFF
        failed = [FailedTick(tick["id"], attempts, "a constraint")]
    assert await repository.fail_ticks(failed, ticker_id=ME, now=START) == {tick["id"]: True}
    assert await only_run(connection) == ("failed", "a constraint", 3, ME, False)


async def test_an_attempt_that_two_tickers_fail_is_counted_once(repository: CronRepository, connection: Any) -> None:
    await declare(repository, sink="queue")
    tick = await only_tick(connection)
    failed = [FailedTick(tick["id"], 0, "no")]
    over = await asyncio.gather(*(repository.fail_ticks(failed, ticker_id=f"ticker_{n}", now=START) for n in range(8)))
    assert sorted(over, key=len) == [{}] * 7 + [{tick["id"]: False}]
    assert (await only_tick(connection))["attempts"] == 1


async def test_of_two_who_fail_a_tick_at_once_nobody_waits(repository: CronRepository, connection: Any) -> None:
    await declare(repository, sink="queue")
    tick = await only_tick(connection)
    failed = [FailedTick(tick["id"], 0, "no")]
    async with connection.transaction():
        await connection.execute("UPDATE cron_ticks SET attempts = 1")
        assert await repository.fail_ticks(failed, ticker_id=ME, now=START) == {}
    assert await repository.fail_ticks(failed, ticker_id=ME, now=START) == {}
    assert (await only_tick(connection))["attempts"] == 1


async def test_who_has_no_lease_can_not_fail_what_is_leased(repository: CronRepository, connection: Any) -> None:
    await declare(repository)
    [tick] = await lease(repository)
    failed = [FailedTick(tick.id, tick.attempts, "no")]
    assert await repository.fail_ticks(failed, ticker_id=OTHER, now=START + SECOND) == {}
    assert (await only_tick(connection))["leased_by"] == ME


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        ("a\0b", "a\N{REPLACEMENT CHARACTER}b"),
        ("lone \ud800", "lone ?"),
        ("x" * 1_000_000, "x" * LONGEST_ERROR),
        ("🎉" * LONGEST_ERROR, "🎉" * LONGEST_ERROR),
        ("", ""),
    ],
    ids=["NUL", "surrogate", "long", "long and wide", "empty"],
)
async def test_any_error_text_can_be_kept(repository: CronRepository, connection: Any, error: str, kept: str) -> None:
    await declare(repository)
    await lease_and_fail(repository, connection, START, error=error)
    assert (await only_tick(connection))["error"] == kept
    [tick] = await lease(repository, START + 100 * SECOND)
    await fail(repository, tick, START + 100 * SECOND, error, final=True)
    assert (await only_run(connection))[1] == kept


async def test_a_tick_whose_schedule_is_gone_has_the_limits_of_the_settings(
    repository: CronRepository, connection: Any
) -> None:
    """Until the cleanup comes."""
    await declare(repository, max_attempts=1)
    await connection.execute("DELETE FROM cron_schedules")
    await lease_and_fail(repository, connection, START)
    await lease_and_fail(repository, connection, START + 100 * SECOND)
    [tick] = await lease(repository, START + 200 * SECOND)
    assert await fail(repository, tick, START + 200 * SECOND) is True


# A tick of long ago: the ledger has no partition for it yet


async def partition_of(connection: Any, day: datetime) -> bool:
    found: bool = await connection.fetchval("SELECT to_regclass($1) IS NOT NULL", f"cron_runs_{day:%Y%m%d}")
    return found


@pytest.mark.parametrize("how", ["delivered", "failed", "given up", "expired"])
async def test_a_missing_partition_is_made(repository: CronRepository, connection: Any, how: str) -> None:
    then = datetime(2001, 2, 3, tzinfo=UTC)
    await declare(repository, at=then, max_age=60)
    [tick] = await lease(repository, then)
    assert not await partition_of(connection, then)
    match how:
        case "delivered":
            assert await repository.delete_tick(tick.id, leased_by=ME, now=then)
        case "failed":
            assert await fail(repository, tick, then, final=True) is True
        case "given up":
            assert await lease(repository, then + 65 * SECOND) == []
        case _:
            assert await repository.delete_expired_ticks(expired_for=MINUTES, limit=5, now=then + DAY) == 1
    assert await partition_of(connection, then)
    outcomes = {"delivered": "enqueued", "failed": "failed", "given up": "expired", "expired": "expired"}
    assert (await only_run(connection))[0] == outcomes[how]
    assert await count(connection, "cron_ticks") == 0


# Leases that ran out


async def test_what_somebody_may_take_over_is_no_matter_of_the_cleanup(
    repository: CronRepository, connection: Any
) -> None:
    await declare(repository, "expired")
    await declare(repository, "not begun", delivery="at_most_once")
    await declare(repository, "due")
    await declare(repository, "retried")
    now = START + LEASE + MINUTES
    await lease(repository)
    await connection.execute(
        """UPDATE cron_ticks SET leased_by = NULL, leased_at = NULL, leased_until = NULL, due_at = execute_at,
            attempts = CASE WHEN schedule_name = 'due' THEN 0 ELSE 2 END, turn = 1
        WHERE schedule_name IN ('due', 'retried')"""
    )
    assert await repository.delete_expired_ticks(expired_for=MINUTES, limit=5, now=now + SECOND) == 0
    taken = await lease(repository, START + LEASE + 30 * SECOND)
    assert sorted(names(taken)) == ["due", "expired", "not begun", "retried"]


@pytest.mark.parametrize(
    ("options", "attempts", "reason"),
    [
        ({"delivery": "at_most_once"}, 1, "once"),
        ({"max_attempts": 1}, 1, "attempts"),
        ({}, 3, "attempts by the settings"),
        ({"max_age": 60}, 1, "age"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_may_not_be_tried_again_ends_when_its_lease_has_run_out_for_long(
    repository: CronRepository, connection: Any, options: dict[str, Any], attempts: int, reason: str
) -> None:
    await declare(repository, **options)
    now = START
    for attempt in range(attempts):
        [tick] = await lease(repository, now)
        assert tick.attempts == attempt + 1, reason
        await repository.renew_leases([tick.id], leased_by=ME, for_good=tick.delivery == "at_most_once", now=now)
        now += LEASE
    assert await repository.delete_expired_ticks(expired_for=MINUTES, limit=5, now=now + MINUTES) == 0
    assert await repository.delete_expired_ticks(expired_for=MINUTES, limit=5, now=now + MINUTES + SECOND) == 1
    assert await only_run(connection) == ("expired", RAN_OUT, attempts, ME, attempts > 1)
    assert await count(connection, "cron_ticks") == 0


async def test_too_old_by_the_settings_ends_too(repository: CronRepository, connection: Any) -> None:
    await declare(repository)
    await lease(repository)
    assert await repository.delete_expired_ticks(expired_for=MINUTES, limit=5, now=START + DAY) == 0
    assert await repository.delete_expired_ticks(expired_for=MINUTES, limit=5, now=START + DAY + SECOND) == 1
    assert (await only_run(connection))[0] == "expired"


async def test_no_more_expired_ticks_are_removed_than_asked_for(repository: CronRepository) -> None:
    for number in range(5):
        await declare(repository, f"n{number}", delivery="at_most_once", at=START + number * SECOND)
        await lease_once(repository, START + number * SECOND)
    later = START + DAY / 2
    removed = [await repository.delete_expired_ticks(expired_for=MINUTES, limit=2, now=later) for _ in range(4)]
    assert removed == [2, 2, 1, 0]


async def test_an_expired_tick_is_ended_by_one_cleanup(repository: CronRepository, connection: Any) -> None:
    for number in range(30):
        await declare(repository, f"n{number}", delivery="at_most_once")
    await lease_once(repository)
    removed = await asyncio.gather(
        *(repository.delete_expired_ticks(expired_for=MINUTES, limit=10, now=START + DAY / 2) for _ in range(8))
    )
    assert sum(removed) == 30
    assert await count(connection, "cron_runs") == 30


async def test_a_cleanup_waits_for_nobody(repository: CronRepository, connection: Any) -> None:
    for name in ("held", "free"):
        await declare(repository, name, delivery="at_most_once")
    await lease_once(repository)
    async with connection.transaction():
        await connection.execute("SELECT FROM cron_ticks WHERE schedule_name = 'held' FOR UPDATE")
        assert await repository.delete_expired_ticks(expired_for=MINUTES, limit=5, now=START + DAY / 2) == 1
    assert await connection.fetchval("SELECT schedule_name FROM cron_ticks") == "held"


# Sinks that workers serve


async def test_sinks_are_known_once_a_worker_has_served_them(repository: CronRepository, connection: Any) -> None:
    assert await repository.known_sinks() == {}
    await repository.note_sinks({"hooks": "outside", "jobs": "same_database"}, now=START)
    await repository.note_sinks({"hooks": "outside"}, now=START + SECOND)
    assert await repository.known_sinks() == {"hooks": "outside", "jobs": "same_database"}
    assert await connection.fetchval("SELECT seen_at FROM cron_sinks WHERE name = 'hooks'") == START
    await repository.note_sinks({"hooks": "same_database"}, now=START + 2 * SECOND)
    assert (await repository.known_sinks())["hooks"] == "same_database"
    await repository.note_sinks({"jobs": "same_database"}, now=START + 11 * SECOND)
    assert await connection.fetchval("SELECT seen_at FROM cron_sinks WHERE name = 'jobs'") == START + 11 * SECOND


async def test_a_sink_is_unserved_if_its_ticks_wait_and_nobody_has_been_there_lately(
    repository: CronRepository,
) -> None:
    await declare(repository, "own", sink="queue")
    await declare(repository, "late")
    await declare(repository, "not due", sink="others", at=START + 10 * MINUTES)
    minute = 60 * SECOND
    assert await repository.unserved_sinks(now=START + minute) == []
    assert await repository.unserved_sinks(now=START + minute + SECOND) == ["hooks"]
    await repository.note_sinks({"hooks": "outside"}, now=START)
    assert await repository.unserved_sinks(now=START + 2 * minute - SECOND) == []
    assert await repository.unserved_sinks(now=START + 2 * minute) == ["hooks"]
    await declare(repository, "urgent", sink="others", priority="urgent", at=START)
    assert await repository.unserved_sinks(now=START + 2 * minute) == ["hooks", "others"]


@pytest.mark.parametrize("turn", [0, 1, 2])
async def test_retries_and_what_is_catching_up_wait_for_a_sink_too(
    repository: CronRepository, connection: Any, turn: int
) -> None:
    await declare(repository)
    await connection.execute("UPDATE cron_ticks SET turn = $1", turn)
    assert await repository.unserved_sinks(now=START + MINUTES) == ["hooks"]


async def test_leased_ticks_are_served(repository: CronRepository) -> None:
    """Those of their last attempt too."""
    await declare(repository, max_attempts=1)
    await lease(repository)
    assert await repository.unserved_sinks(now=START + SECOND) == []
    assert await repository.unserved_sinks(now=START + DAY) == []


async def test_a_constraint_of_the_ledgers_own_is_an_error(repository: CronRepository, connection: Any) -> None:
    """It is no missing partition, so nothing is tried again."""
    await connection.execute("ALTER TABLE cron_runs ADD CONSTRAINT theirs CHECK (attempts < 0)")
    await declare(repository)
    [tick] = await lease(repository)
    with pytest.raises(asyncpg.CheckViolationError):
        await repository.delete_tick(tick.id, leased_by=ME, now=START)
    assert await count(connection, "cron_ticks") == 1
