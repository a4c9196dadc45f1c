"""Through a transaction pooler: a session's server connection changes with every transaction."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import pytest

from cron_ticks.settings import Settings
from support.pgbouncer import PROGRAM, pgbouncer
from support.servers import TestServer
from support.watching import watching
from token_queue import Message, QueueManager

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="PgBouncer is not installed: apt-get install pgbouncer")


def through(port: int, dsn: str) -> str:
    return f"postgresql://postgres@127.0.0.1:{port}{urlsplit(dsn).path}"


@pytest.fixture
def pooled(server: TestServer, dsn: str, tmp_path: Path) -> Iterator[str]:
    with pgbouncer(server, tmp_path / "pgbouncer") as port:
        yield through(port, dsn)


async def test_workers_share_schedules_through_the_pooler(pooled: str, dsn: str, connection: Any) -> None:
    settings = Settings.load(dsn=pooled, transaction_pooler=True)
    managers = [QueueManager(settings=settings) for _ in range(4)]
    handled: list[str] = []

    async def handle(message: Message) -> None:
        handled.append(message.headers["scheduled_for"])

    async def work(manager: QueueManager) -> None:
        manager.handler("queue")(handle)
        async with manager:
            await manager.schedule("queue", every=1, payload={"n": 1})
            await manager.run()

    async with watching(dsn, "queue_messages") as watch, anyio.create_task_group() as tasks:
        for manager in managers:
            tasks.start_soon(work, manager)
        await watch.until("SELECT count(completed_at) >= 5 FROM queue_messages")
        health = [entry for manager in managers for entry in manager.health.values()]
        for manager in managers:
            manager.stop()
    assert [entry.last_error for entry in health if entry.errors] == []
    completed = await connection.fetchval("SELECT count(completed_at) FROM queue_messages")
    assert len(handled) == len(set(handled)) == completed
    assert await connection.fetchval("SELECT count(*) = count(DISTINCT scheduled_for) FROM queue_messages")


async def test_migrations_at_once_through_the_pooler(server: TestServer, tmp_path: Path, empty_dsn: str) -> None:
    with pgbouncer(server, tmp_path / "pgbouncer") as port:
        settings = Settings.load(dsn=through(port, empty_dsn), transaction_pooler=True)

        async def start() -> None:
            async with QueueManager(settings=settings):
                pass

        await asyncio.gather(*(start() for _ in range(5)))
