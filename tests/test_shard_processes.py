"""Managers in real processes share out the shards: they come, one is killed, one is stopped, and nothing is lost."""

import asyncio
import signal
from datetime import datetime, timedelta
from typing import Any

import anyio

from cron_ticks.schedules import Schedule
from cron_ticks.settings import Settings
from support.crowd import after, count, expected_of, stop, until_end
from support.processes import Processes, RunningProcess
from support.watching import watching
from token_queue import QueueManager

SETTINGS = {"lookahead_seconds": "8", "manager_interval_seconds": "1", "shard_lease_seconds": "5"}
ALIVE_SECONDS = 24
PROMPT = timedelta(seconds=10)  # with beats each second
SHARES = """SELECT coalesce(array_agg(shards ORDER BY shards), '{}') = $1::bigint[]
FROM (SELECT count(*) AS shards FROM cron_shards WHERE leased_by IS NOT NULL GROUP BY leased_by) AS share"""
OF_ONE = "SELECT count(*) FROM cron_shards WHERE leased_by = $1"


async def declare(dsn: str, ends_at: datetime) -> list[Schedule]:
    async with QueueManager(settings=Settings.load(dsn=dsn, **SETTINGS)) as manager:
        return list(
            await asyncio.gather(
                *(
                    manager.schedule("queue", name=f"schedule {k}", every=1 + k % 3, ends_at=ends_at, jitter=None)
                    for k in range(60)
                )
            )
        )


def ticker_id(worker: RunningProcess) -> str:
    [found] = [line["ticker_id"] for line in worker.events if line["event"] == "worker_started"]
    return str(found)


async def lease_of(worker: RunningProcess, connection: Any) -> datetime:
    found: datetime = await connection.fetchval(
        "SELECT leased_until FROM cron_managers WHERE id = $1", ticker_id(worker)
    )
    return found


async def test_shards_move_to_whoever_is_there_and_nothing_is_lost(
    dsn: str, processes: Processes, connection: Any
) -> None:
    async with watching(dsn, "cron_shards", "cron_ticks", "cron_schedule_cursors") as watch:
        first = await processes.worker(dsn, "without_handlers", **SETTINGS)
        await first.wait_for("shards_shared_out", where=lambda line: line["shards"] == 64)
        others = await asyncio.gather(*(processes.worker(dsn, "without_handlers", **SETTINGS) for _ in range(2)))
        await watch.until(SHARES, [20, 22, 22])
        await first.wait_for("shards_shared_out", where=lambda line: line["shards"] in {20, 22})
        ends_at = await after(ALIVE_SECONDS, connection)
        schedules = await declare(dsn, ends_at)

        killed, stopped = others
        await killed.kill()
        lease_ended = await lease_of(killed, connection)
        assert await connection.fetchval(OF_ONE, ticker_id(killed)) >= 20
        await watch.until(f"SELECT NOT EXISTS ({OF_ONE} HAVING count(*) > 0)", ticker_id(killed))
        moved_at = await connection.fetchval("SELECT statement_timestamp()")
        assert lease_ended <= moved_at < lease_ended + PROMPT
        await watch.until(SHARES, [32, 32])

        stopped.send(signal.SIGTERM)
        before = await lease_of(stopped, connection)
        await watch.until(SHARES, [64])
        assert await connection.fetchval("SELECT statement_timestamp()") < before
        assert await stopped.wait() == 0
        assert await lease_of(stopped, connection) is None

        await anyio.sleep(await until_end(ends_at, connection))
        await watch.until(
            """SELECT NOT EXISTS (SELECT FROM cron_ticks)
            AND NOT EXISTS (SELECT FROM cron_schedule_cursors WHERE next_tick_needed_at IS NOT NULL)"""
        )
    await stop([first])
    runs = await connection.fetch("SELECT schedule_id, scheduled_for, outcome FROM cron_runs")
    assert sorted((row[0], row[1]) for row in runs) == sorted(expected_of(schedules))
    assert {row["outcome"] for row in runs} == {"enqueued"}
    assert count([first, stopped], "service_failed") == 0
    assert await connection.fetchval("SELECT count(*) FROM cron_shards WHERE leased_by IS NOT NULL") == 0
