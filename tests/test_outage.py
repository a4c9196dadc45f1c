"""All pods and the server are down for a while: what each policy makes of it, and that nothing is unexplained."""

import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import asyncpg
import pytest

from cron_ticks.audit_repository import AuditRepository
from cron_ticks.database import Database
from cron_ticks.embedded import EmbeddedServer
from cron_ticks.occurrences import CatchUp
from cron_ticks.schedules import CATCH_UPS, Schedule
from support.moved_clock import Engine
from support.processes import Processes
from support.servers import kill_server, program_folder
from token_queue import QueueManager
from token_queue.doubled import find_doubled

START = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
EXPRESSIONS = ("* * * * *", "*/2 * * * *", "*/15 * * * * *")
ZONES = ("UTC", "Asia/Kathmandu", "America/New_York")


@dataclass(frozen=True)
class Fates:
    """What became of a schedule's occurrences, by their nominal times."""

    enqueued: Sequence[datetime]
    missed: Sequence[datetime]


async def fates(connection: Any, schedule: Schedule) -> Fates:
    """From the ledger alone; a stretch is spelled out by the schedule's rule."""
    rows = await connection.fetch("SELECT * FROM cron_runs WHERE schedule_id = $1 ORDER BY scheduled_for", schedule.id)
    assert {row["outcome"] for row in rows} <= {"enqueued", "missed"}
    enqueued = [row["scheduled_for"] for row in rows if row["outcome"] == "enqueued"]
    missed: list[datetime] = []
    for row in rows:
        if row["outcome"] == "missed":
            first = row["missed_since"] or row["scheduled_for"]
            stretch = schedule.rule.occurrences(first, row["scheduled_for"] + timedelta(microseconds=1))
            assert len(stretch) == row["occurrences"]
            missed += stretch
    return Fates(enqueued, missed)


def check_policy(schedule: Schedule, found: Fates, *, down: datetime, late_until: datetime, most: int) -> None:
    """All that was expected is there once; before the outage nothing is missed, in it only what the policy says."""
    everything = sorted([*found.enqueued, *found.missed])
    assert everything == schedule.timetable.occurrences(schedule.created_at, everything[-1] + timedelta(microseconds=1))
    late = [moment for moment in everything if down <= moment < late_until]
    made_up = [moment for moment in found.enqueued if down <= moment < late_until]
    room = {"skip": 0, "latest": 1}.get(schedule.catch_up, most)
    assert made_up == late[len(late) - min(room, len(late)) :], schedule.catch_up
    assert all(down <= moment < late_until for moment in found.missed)


def rules(number: int) -> dict[str, Any]:
    """Every third has an expression; the others intervals of 5 to 65 s."""
    if number % 3 == 0:
        return {"cron": EXPRESSIONS[number % 9 // 3], "timezone": ZONES[number % 7 % 3]}
    return {"every": 5 + number % 13 * 5, "jitter": None}


@pytest.mark.sql
async def test_an_outage_by_the_engines_clock_leaves_nothing_unexplained(database: Database, connection: Any) -> None:
    """200 schedules, 50 of each policy; some of their ticks were made before it, some have no tick."""
    engine = Engine(database, START, catch_up_max_count=20)
    schedules = [
        await engine.declare(name=f"n{number}", catch_up=CATCH_UPS[number % 4], **rules(number))
        for number in range(200)
    ]
    await engine.run_until(START + 5 * MINUTE, step=10 * SECOND)
    down = engine.now + timedelta(microseconds=1)  # what was due by now has fired
    made_before = await connection.fetchval("SELECT count(*) FROM cron_ticks")
    assert made_before > 200
    engine.now += timedelta(minutes=47, seconds=3)
    recovered = engine.now
    await engine.run_until(recovered + 6 * MINUTE, step=10 * SECOND)
    for schedule in schedules:
        found = await fates(connection, schedule)
        check_policy(schedule, found, down=down, late_until=recovered - MINUTE, most=20)
    audits = AuditRepository(database, engine.settings, partial(find_doubled, database))
    audit = await audits.audit(START, engine.now + timedelta(microseconds=1), now=engine.now)
    assert (audit.total.unexplained, audit.total.duplicate, audit.total.pending, audit.findings) == (0, 0, 0, [])
    expected = sum(len(schedule.timetable.occurrences(START, audit.until)) for schedule in schedules)
    assert audit.total.expected == audit.total.enqueued + audit.total.explained == expected
    stretches = await connection.fetchrow(
        "SELECT count(*), count(DISTINCT schedule_id), sum(occurrences) FROM cron_runs WHERE missed_since IS NOT NULL"
    )
    assert stretches[0] == stretches[1] > 100  # one row each, however long
    assert stretches[2] > 20 * stretches[0]


async def settled(connection: Any, until: datetime) -> bool:
    """Everything up to then has ended."""
    return not await connection.fetchval(
        """SELECT EXISTS (SELECT FROM cron_ticks WHERE scheduled_for <= $1)
            OR EXISTS (SELECT FROM cron_schedule_cursors WHERE next_tick_needed_at <= $1)""",
        until,
    )


async def fleet(processes: Processes, dsn: str, missed_after: int, number: int = 3) -> list[Any]:
    return [
        await processes.worker(
            dsn,
            "quiet",
            missed_after_seconds=str(missed_after),
            catch_up_max_count="5",
            catch_up_spread_seconds="3",
            manager_interval_seconds="1",
            lookahead_seconds="5",
            audit_interval_seconds="0",
        )
        for _ in range(number)
    ]


@pytest.mark.soak(small=6, full=180)
async def test_a_real_outage_leaves_nothing_unexplained(tmp_path: Path, processes: Processes, size: int) -> None:
    """Pods and server killed with -9 and away for a while; then server and other pods start."""
    missed_after = 2 if size < 60 else 30
    number = 40 if size < 60 else 200
    server = EmbeddedServer(tmp_path / "data", program_folder(18))
    server.acquire()
    try:
        async with QueueManager(server.dsn) as manager:
            schedules = [
                await manager.schedule("queue", every=1 + index % 5, jitter=None, name=f"n{index}", catch_up=policy)
                for index, policy in ((index, CATCH_UPS[index % 4]) for index in range(number))
            ]
        workers = await fleet(processes, server.dsn, missed_after)
        watching = await asyncpg.connect(server.dsn)
        while await watching.fetchval("SELECT count(*) < 3 * $1::int FROM cron_runs", number):  # noqa: ASYNC110
            await anyio.sleep(0.1)
        await watching.close()
        for worker in workers:
            await worker.kill()
        kill_server(server)
        await anyio.sleep(size)  # an outage is a time in which nothing happens
        server.revive()
        workers = await fleet(processes, server.dsn, missed_after)
        async with QueueManager(server.dsn) as manager:
            connection = await asyncpg.connect(server.dsn)
            back = await connection.fetchval("SELECT statement_timestamp()")
            with anyio.fail_after(120):
                while not await settled(connection, back):  # noqa: ASYNC110 - nobody tells when nothing is left
                    await anyio.sleep(0.2)
            audit = await manager.audit(min(schedule.created_at for schedule in schedules), back)
            found = {schedule.id: await fates(connection, schedule) for schedule in schedules}
            await connection.close()
        for worker in workers:
            worker.send(signal.SIGTERM)
            assert await worker.wait() == 0
    finally:
        server.release()
    assert (audit.total.unexplained, audit.total.duplicate, audit.findings) == (0, 0, [])
    missed: Counter[CatchUp] = Counter()
    for schedule in schedules:
        missed[schedule.catch_up] += len(found[schedule.id].missed)
        made = [*found[schedule.id].enqueued, *found[schedule.id].missed]
        assert len(made) == len(set(made))
    # One of each schedule is made up, or up to five; of schedules that began at other moments one more or less is late.
    each = number // 4
    assert 0 < missed["skip"] - missed["latest"] <= 2 * each
    assert missed["latest"] - missed["all"] <= 6 * each
    assert missed["latest"] > max(missed["all"], missed["spread"])
    print(  # noqa: T201 - `make soak` shows it
        f"\n{number} schedules, server and pods away for {size} s: {audit.total.expected} expected, "
        f"{audit.total.enqueued} enqueued, {audit.total.explained} explained, {audit.total.late} late, "
        f"{audit.total.unexplained} unexplained, {audit.total.duplicate} duplicate; missed by policy: {dict(missed)}"
    )
