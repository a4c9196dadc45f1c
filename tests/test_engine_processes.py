"""The tick engine in real processes: many at once, killed, stopped, with wrong clocks, asleep, deaf."""

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from cron_ticks.schedules import Schedule
from cron_ticks.settings import Settings
from support.crowd import after, count, every_kth_second, expected_of, stop, until_end
from support.pgbouncer import PROGRAM, PgBouncer
from support.processes import Processes, RunningProcess
from support.servers import TestServer
from support.watching import Watch, watching
from token_queue import QueueManager

LEASE = {"lease_seconds": "2", "lease_renewal_seconds": "1"}
LONGER_THAN_A_LEASE = 3.0
# All schedules live longer than this window, so most of their ticks are made by managers, and not by schedule() itself.
WINDOW = {"lookahead_seconds": "3", "manager_interval_seconds": "0.5"}
SETTINGS = {**LEASE, **WINDOW}
DECLARED_AT_ONCE = 20
ZONES = ("UTC", "America/New_York", "Asia/Kathmandu")
AT_ONCE = timedelta(seconds=3)  # a ticker that sleeps would not look for longer than this by itself

FAKETIME = next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))), None)


@dataclass(frozen=True)
class Scale:
    """How much there is to do."""

    processes: int
    schedules: int
    seconds: int  # from the first declaration to the end of all schedules


@pytest.fixture
def scale(size: int) -> Scale:
    return Scale(20, size, 60) if size == 1000 else Scale(6, size, 8)


async def declare(dsn: str, scale: Scale, ends_at: datetime) -> list[Schedule]:
    """Schedules of 1 to 5 s that end together, some at once; a quarter of them with expressions."""
    async with QueueManager(settings=Settings.load(dsn=dsn, log_level="warning", **WINDOW)) as manager:
        for first in range(0, scale.schedules, DECLARED_AT_ONCE):
            numbers = range(first, min(first + DECLARED_AT_ONCE, scale.schedules))
            await asyncio.gather(
                *(
                    manager.schedule("queue", name=f"schedule {number}", ends_at=ends_at, **_rule(number, scale))
                    for number in numbers
                )
            )
        schedules = await manager.list_schedules(limit=scale.schedules)
    assert len(schedules) == scale.schedules
    assert all(schedule.anchor_at == schedule.created_at < ends_at for schedule in schedules)
    return schedules


def _rule(number: int, scale: Scale) -> dict[str, Any]:
    if number % 4:
        return {"every": 1 + 4 * number / scale.schedules}
    kind = number // 4
    jitter = timedelta(seconds=1) if kind % 2 else None
    return {"cron": every_kth_second(2 + kind % 4), "timezone": ZONES[kind % len(ZONES)], "jitter": jitter}


async def drain(dsn: str, ends_at: datetime, connection: Any, *, handled: bool = False) -> None:
    """Wait until nothing is left to make or to fire. Watched from the end on: a watched table is a slower one."""
    await anyio.sleep(await until_end(ends_at, connection))
    async with watching(dsn, "cron_ticks", "cron_schedule_cursors", "queue_messages") as watch:
        await watch.until(
            """SELECT NOT EXISTS (SELECT FROM cron_ticks)
            AND NOT EXISTS (SELECT FROM cron_schedule_cursors WHERE next_tick_needed_at IS NOT NULL)"""
        )
        if handled:
            await watch.until("SELECT NOT EXISTS (SELECT FROM queue_messages WHERE completed_at IS NULL)")


async def assert_exact(schedules: Sequence[Schedule], connection: Any) -> int:
    """One message and one run for each expected occurrence, and nothing else; how many there are."""
    expected = expected_of(schedules)
    messages = await connection.fetch("SELECT schedule_id, scheduled_for, id FROM queue_messages")
    fired = Counter((row["schedule_id"], row["scheduled_for"]) for row in messages)
    assert {occurrence: times for occurrence, times in fired.items() if times > 1} == {}
    assert {"lost": expected - fired.keys(), "unexpected": fired.keys() - expected} == {
        "lost": set(),
        "unexpected": set(),
    }
    runs = await connection.fetch("SELECT schedule_id, scheduled_for, message_id, outcome FROM cron_runs")
    assert {row["outcome"] for row in runs} == {"enqueued"}
    assert sorted(tuple(row)[:3] for row in runs) == sorted(tuple(row) for row in messages)
    return len(expected)


async def summary(workers: Sequence[RunningProcess], schedules: Sequence[Schedule], connection: Any) -> str:
    """What there was to do, who did it, and how late."""
    row = await connection.fetchrow(
        """SELECT count(*) AS runs, count(DISTINCT ticker_id) AS tickers,
            percentile_disc(array[0.5, 0.99, 1]) WITHIN GROUP (ORDER BY extract(epoch FROM lateness) * 1000) AS late
        FROM cron_runs"""
    )
    managers = sum(count([worker], "ticks_generated") > 0 for worker in workers)
    p50, p99, most = (round(milliseconds) for milliseconds in row["late"])
    return (
        f"{len(workers)} processes, {len(schedules)} schedules, {row['runs']} occurrences: exact; "
        f"{managers} managers made ticks, {row['tickers']} tickers fired; "
        f"late by {p50} ms (p50), {p99} ms (p99), {most} ms (most)"
    )


@pytest.mark.soak(small=60, full=1000)
async def test_many_managers_and_tickers_fire_each_occurrence_once(
    dsn: str, processes: Processes, connection: Any, scale: Scale
) -> None:
    """Nobody handles the messages, so that the processes do nothing but make ticks and fire them."""
    workers = await asyncio.gather(
        *(processes.worker(dsn, "without_handlers", **SETTINGS) for _ in range(scale.processes))
    )
    ends_at = await after(scale.seconds, connection)
    schedules = await declare(dsn, scale, ends_at)
    await drain(dsn, ends_at, connection)
    await stop(workers)
    await assert_exact(schedules, connection)
    print(f"\n{await summary(workers, schedules, connection)}")  # noqa: T201
    assert sum(count([worker], "ticks_generated") > 0 for worker in workers) > 1
    assert await connection.fetchval("SELECT count(DISTINCT ticker_id) > 1 FROM cron_runs")
    assert count(workers, "service_failed") == count(workers, "tick_refused") == 0


@dataclass
class Crew:
    """Workers to whom things happen."""

    processes: Processes
    dsn: str
    everybody: list[RunningProcess] = field(default_factory=list)
    at_work: list[RunningProcess] = field(default_factory=list)
    killed: int = 0
    stopped: int = 0

    async def hire(self) -> None:
        worker = await self.processes.worker(self.dsn, "without_handlers", **SETTINGS)
        self.everybody.append(worker)
        self.at_work.append(worker)

    async def kill(self, victim: RunningProcess) -> None:
        """And replace it."""
        self.at_work.remove(victim)
        await victim.kill()
        self.killed += 1
        await self.hire()

    async def hold_up(self, victim: RunningProcess) -> None:
        """For longer than a lease."""
        self.at_work.remove(victim)
        victim.send(signal.SIGSTOP)
        self.stopped += 1
        await anyio.sleep(LONGER_THAN_A_LEASE)
        victim.send(signal.SIGCONT)
        self.at_work.append(victim)

    async def disturb(self, chance: random.Random, ends_at: datetime, connection: Any) -> None:
        """Each second one of the two to somebody, both equally often, until the schedules end."""
        turns = [self.kill, self.hold_up]
        async with anyio.create_task_group() as tasks:
            while await until_end(ends_at, connection) > 0:
                chance.shuffle(turns)
                for happen in turns:
                    if self.at_work:
                        tasks.start_soon(happen, chance.choice(self.at_work))
                    await anyio.sleep(1)


@pytest.mark.soak(small=60, full=1000)
async def test_killed_and_stopped_processes_lose_and_repeat_nothing(
    dsn: str, processes: Processes, connection: Any, scale: Scale
) -> None:
    seed = random.randrange(2**32)  # noqa: S311
    print(f"\nseed {seed}")  # noqa: T201
    crew = Crew(processes, dsn)
    await asyncio.gather(*(crew.hire() for _ in range(scale.processes)))
    ends_at = await after(scale.seconds, connection)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(crew.disturb, random.Random(seed), ends_at, connection)  # noqa: S311
        schedules = await declare(dsn, scale, ends_at)
    await drain(dsn, ends_at, connection)
    await stop(crew.at_work)
    await assert_exact(schedules, connection)
    print(  # noqa: T201
        f"{await summary(crew.everybody, schedules, connection)}; {crew.killed} killed, {crew.stopped} stopped for "
        f"longer than a lease; failed passes: {count(crew.everybody, 'service_failed')}"
    )
    assert crew.killed > 0
    assert crew.stopped > 0
    assert count(crew.everybody, "tick_refused") == 0


def wrong_clock(shift: str) -> dict[str, str]:
    """A process that tells another time; how long things take is as ever."""
    return {"LD_PRELOAD": str(FAKETIME), "FAKETIME": shift, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}


@pytest.mark.skipif(FAKETIME is None, reason="libfaketime is not installed: apt-get install libfaketime")
@pytest.mark.soak(small=60, full=1000)
async def test_wrong_clocks_of_pods_change_nothing(
    dsn: str, processes: Processes, connection: Any, scale: Scale
) -> None:
    """Messages are handled too: the leases of their tokens are times as well."""
    hour = timedelta(hours=1)
    clocks = ((hour, wrong_clock("+1h")), (-hour, wrong_clock("-1h")), (timedelta(0), None))
    workers = await asyncio.gather(*(processes.worker(dsn, "quiet", clock, **SETTINGS) for _, clock in clocks))
    now = datetime.now(UTC)
    for worker, (shift, _) in zip(workers, clocks, strict=True):
        started = await worker.wait_for("worker_started")
        assert abs(datetime.fromisoformat(started["timestamp"]) - now - shift) < hour / 10
    ends_at = await after(scale.seconds, connection)
    schedules = await declare(dsn, scale, ends_at)
    await drain(dsn, ends_at, connection, handled=True)
    await stop(workers)
    await assert_exact(schedules, connection)
    print(f"\n{await summary(workers, schedules, connection)}")  # noqa: T201
    assert all(count([worker], "ticks_generated") and count([worker], "ticks_fired") for worker in workers)
    jitter = {schedule.id: schedule.jitter for schedule in schedules}
    for row in await connection.fetch("SELECT schedule_id, ended_at - scheduled_for AS after FROM cron_runs"):
        assert -jitter[row["schedule_id"]] <= row["after"] < jitter[row["schedule_id"]] + timedelta(seconds=20)


async def fire_at_once(dsn: str, watch: Watch, connection: Any) -> list[timedelta]:
    """Fresh schedules and triggers, each as soon as the one before has fired; how long each took, by the database."""
    async with QueueManager(dsn) as manager:
        for number in range(3):
            schedule = await manager.schedule("queue", every=3600, name=f"fresh {number}")
            await watch.until("SELECT count(*) = $1::int FROM queue_messages", 2 * number + 1)
            await manager.trigger(schedule.id)
            await watch.until("SELECT count(*) = $1::int FROM queue_messages", 2 * number + 2)
    rows = await connection.fetch(
        "SELECT origin, ended_at - scheduled_for AS after FROM cron_runs WHERE outcome = 'enqueued' ORDER BY ended_at"
    )
    assert [row["origin"] for row in rows] == ["schedule", "trigger"] * 3
    return [row["after"] for row in rows]


async def test_a_fresh_schedule_or_a_trigger_fires_at_once_on_a_pod_that_sleeps(
    dsn: str, processes: Processes, connection: Any
) -> None:
    """Whoever has just looked asks again only after half of `ticker_idle_seconds`, so polling doesn't explain it."""
    worker = await processes.worker(dsn)
    await worker.wait_for("notify_heard")
    async with watching(dsn, "queue_workers", "queue_messages") as watch:
        await watch.until("SELECT asleep FROM queue_workers")
        assert Settings().ticker_idle_seconds / 2 > AT_ONCE.total_seconds()
        assert max(await fire_at_once(dsn, watch, connection)) < AT_ONCE
    await stop([worker])


@pytest.mark.skipif(PROGRAM is None, reason="PgBouncer is not installed: apt-get install pgbouncer")
async def test_a_fresh_schedule_or_a_trigger_fires_at_the_next_poll_of_a_deaf_pod(
    dsn: str, bouncer: PgBouncer, processes: Processes, connection: Any
) -> None:
    worker = await processes.worker(bouncer.dsn_of(dsn), transaction_pooler="true")
    await worker.wait_for("notify_not_heard")
    async with watching(dsn, "queue_messages") as watch:
        assert max(await fire_at_once(dsn, watch, connection)) < AT_ONCE
    assert count([worker], "notify_heard") == 0
    await stop([worker])


@pytest.mark.parametrize("app", ["quick", "without_handlers"])
async def test_a_trigger_fires_at_the_next_poll_of_a_pod_that_goes_deaf(
    dsn: str, server: TestServer, processes: Processes, connection: Any, app: str
) -> None:
    """It loses the connection that listens and gets no other; those that it has go on."""
    async with QueueManager(dsn) as manager, watching(dsn, "queue_messages") as watch:
        [at] = await connection.fetchrow("SELECT statement_timestamp() + interval '1 hour'")
        schedule = await manager.schedule("queue", at=at)
        worker = await processes.worker(dsn, app)
        await worker.wait_for("notify_heard")
        await manager.trigger(schedule.id)
        await watch.until("SELECT count(*) = 1 FROM queue_messages")
        database = await connection.fetchval("SELECT current_database()")
        await server.run(f"ALTER DATABASE {database} ALLOW_CONNECTIONS false")
        await connection.fetch(
            """SELECT pg_terminate_backend(pid)
            FROM pg_stat_activity
            WHERE datname = current_database() AND application_name = 'cron_ticks listen'"""
        )
        await worker.wait_for("notify_not_heard")
        await manager.trigger(schedule.id)
        await watch.until("SELECT count(*) = 2 FROM queue_messages")
    assert await connection.fetchval("SELECT max(ended_at - scheduled_for) FROM cron_runs") < AT_ONCE


async def until_waiting(statement: str, connection: Any) -> None:
    """Until a process waits for a lock in a statement with this text, which the server shows the beginning of."""
    waiting = """
    SELECT EXISTS (
        SELECT
        FROM pg_stat_activity
        WHERE datname = current_database() AND wait_event_type = 'Lock' AND position($1::text IN query) > 0)
    """
    with anyio.fail_after(30):
        while not await connection.fetchval(waiting, statement):
            pass


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_a_ticker_killed_or_stopped_inside_its_firing_loses_and_repeats_nothing(
    dsn: str, processes: Processes, connection: Any, number: signal.Signals
) -> None:
    """It has deleted the tick and waits at the gate. The statement is the server's, and ends without it."""
    at = await connection.fetchval("SELECT statement_timestamp()")
    async with (
        QueueManager(dsn) as manager,
        manager.database.connection() as blocker,
        watching(dsn, "queue_messages") as watch,
    ):
        schedule = await manager.schedule("queue", at=at)
        block = blocker.transaction()
        await block.start()
        await blocker.execute(
            """INSERT INTO cron_runs (schedule_id, scheduled_for, version, origin, outcome, ended_at, attempts)
            VALUES ($1, $2, 1, 'schedule', 'enqueued', $2, 1)""",
            schedule.id,
            at,
        )
        victim = await processes.worker(dsn, "without_handlers")
        await until_waiting("AS ticker_id, instant", connection)
        victim.send(number)
        other = await processes.worker(dsn, "without_handlers")
        await block.rollback()
        await watch.until("SELECT count(*) > 0 FROM queue_messages")
    if number == signal.SIGSTOP:
        victim.send(signal.SIGCONT)
        await victim.wait_for("ticks_fired")
        await stop([victim])
    await stop([other])
    for table in ("queue_messages", "cron_runs"):
        rows = await connection.fetch(f"SELECT schedule_id, scheduled_for FROM {table}")
        assert [tuple(row) for row in rows] == [(schedule.id, at)]
    assert await connection.fetchval("SELECT count(*) FROM cron_ticks") == 0


# What keeps a manager that has its cursors from making ticks: a row that it is about to make, and the whole table.
THE_SAME_TICK = """
INSERT INTO cron_ticks (id, schedule_id, schedule_name, queue_name, payload, scheduled_for, execute_at, due_at,
    created_at)
SELECT 'tick_other', id, name, queue_name, payload, made.at, made.at, made.at, made.at
FROM cron_schedules, LATERAL (SELECT starts_at + interval '20 seconds' AS at) AS made
"""
THE_TABLE = "LOCK TABLE cron_ticks IN SHARE MODE"


@pytest.mark.parametrize(
    "obstacle",
    [
        pytest.param(THE_SAME_TICK, id="executing"),
        pytest.param(
            THE_TABLE,
            id="preparing",
            marks=pytest.mark.xfail(
                strict=True,
                raises=TimeoutError,
                reason="a session between Parse and Bind is not idle, so idle_in_transaction_session_timeout spares it",
            ),
        ),
    ],
)
async def test_a_manager_stopped_inside_its_transaction_loses_its_session_and_an_edit_goes_on(
    dsn: str, processes: Processes, connection: Any, obstacle: str
) -> None:
    settings = Settings.load(dsn=dsn, statement_timeout_seconds=10)
    starts_at = await connection.fetchval("SELECT statement_timestamp() + interval '50 seconds'")
    async with QueueManager(settings=settings) as manager, manager.database.connection() as blocker:
        schedule = await manager.schedule("queue", every=5, starts_at=starts_at, jitter=None)
        block = blocker.transaction()
        await block.start()
        await blocker.execute(obstacle)
        worker = await processes.worker(dsn, lookahead_seconds="120", **LEASE)
        await until_waiting("AS given (cron, zone, dst_gap", connection)
        worker.send(signal.SIGSTOP)
        assert await connection.fetch("SELECT FROM cron_schedule_cursors FOR UPDATE SKIP LOCKED") == []
        await block.rollback()
        edited = await manager.update_schedule(schedule.id, every=7)
        assert psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED
        worker.send(signal.SIGCONT)
        await worker.wait_for("service_recovered", where=lambda line: line["service"] == "schedule-manager")
    await stop([worker])
    ticks = await connection.fetch("SELECT scheduled_for, version FROM cron_ticks ORDER BY scheduled_for")
    assert [row["scheduled_for"] for row in ticks] == [starts_at + k * timedelta(seconds=7) for k in range(len(ticks))]
    assert {row["version"] for row in ticks} == {edited.version}
    assert ticks[-1]["scheduled_for"] > starts_at + timedelta(seconds=30)  # the manager has gone on
