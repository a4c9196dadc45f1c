"""The bursts of other schedulers: what is said of one, here of a scheduler of a few lines."""

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import peer_schedulers
import pytest
from peer_schedulers import Peer, PeerCourse

from cron_ticks.cli.bench.bursts import NotReadyError

PEERS = Path(peer_schedulers.__file__).parent / "peers"

# It fires what it is told to, and another session of it is busy for an hour.
SCHEDULER = """
import asyncio
from contextlib import asynccontextmanager

import asyncpg
from firing_contract import main

FIRE = "INSERT INTO fired SELECT number, clock_timestamp() FROM generate_series(1, $1::int) AS number"


class Scheduler:
    def version(self):
        return "1.0"

    async def setup(self, dsn):
        connection = await asyncpg.connect(dsn)
        await connection.execute("CREATE TABLE fired (schedule int, fired_at timestamptz)")

    async def prepare(self, dsn, schedules, due):
        connection = await asyncpg.connect(dsn)
        await connection.execute("TRUNCATE fired")

    @asynccontextmanager
    async def running(self, dsn, schedules, due):
        busy, connection = await asyncpg.connect(dsn), await asyncpg.connect(dsn)
        endless = asyncio.create_task(busy.execute("SELECT pg_sleep(3600)"))
        firing = asyncio.create_task(fire(connection, schedules, due))
        yield endless, firing


async def fire(connection, schedules, due):
    await connection.fetchval("SELECT pg_sleep(extract(epoch FROM $1::timestamptz - clock_timestamp()))", due)
    await connection.execute(FIRE, {fires})


main(Scheduler())
"""


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real peers need longer to stand."""
    monkeypatch.setattr(peer_schedulers, "LEAD_SECONDS", 4.0)
    monkeypatch.setattr(peer_schedulers, "LONGEST_SECONDS", 2.0)
    monkeypatch.setattr(peer_schedulers, "LOOK_SECONDS", 0.1)
    monkeypatch.setenv("PYTHONPATH", os.fspath(PEERS))


@asynccontextmanager
async def course_of(dsn: str, folder: Path, fires: str) -> AsyncIterator[PeerCourse]:
    """One process of it, that has its tables."""
    script = folder / "scheduler.py"
    script.write_text(SCHEDULER.replace("{fires}", fires))
    peer = Peer("a few lines", "fired", "SELECT schedule, fired_at FROM fired", processes=1)
    connection = await asyncpg.connect(dsn)
    try:
        course = PeerCourse(peer, dsn, connection, (sys.executable, os.fspath(script)))
        assert await course.setup() == "1.0"
        yield course
    finally:
        await connection.close()


@pytest.mark.parametrize(("fires", "fired"), [("schedules", 50), ("schedules // 2", 25), ("0", 0)])
async def test_what_has_fired_by_then_is_counted_and_nothing_goes_on(
    dsn: str, tmp_path: Path, fires: str, fired: int
) -> None:
    async with course_of(dsn, tmp_path, fires) as course:
        burst = await course.burst(50)
        busy = (
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE '%pg_sleep(3600)'"
        )
        assert await course.connection.fetchval(busy) == 0
    assert (burst.fired, burst.missing, burst.doubled) == (fired, 50 - fired, 0)
    assert (burst.max_ms > 0) == (burst.per_second > 0) == (fired > 0)


async def test_one_that_cant_stand_is_a_result(dsn: str, tmp_path: Path) -> None:
    async with course_of(dsn, tmp_path, "schedules") as course:
        (tmp_path / "scheduler.py").write_text("raise SystemExit('no room for so many')")
        with pytest.raises(NotReadyError, match="no room for so many"):
            await course.burst(50)
