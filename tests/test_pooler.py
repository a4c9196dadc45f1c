"""Through a transaction pooler: a session's server connection changes with every transaction."""

import asyncio
from typing import Any

import anyio
import pytest

from cron_ticks.database import open_database
from cron_ticks.listener import Listener
from cron_ticks.settings import Settings
from support.pgbouncer import PROGRAM, PgBouncer
from support.watching import watching
from token_queue import Message, QueueManager

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="PgBouncer is not installed: apt-get install pgbouncer")


@pytest.fixture
def pooled(bouncer: PgBouncer, dsn: str) -> Settings:
    return Settings.load(dsn=bouncer.dsn_of(dsn), transaction_pooler=True)


async def test_workers_share_schedules_through_the_pooler(pooled: Settings, dsn: str, connection: Any) -> None:
    managers = [QueueManager(settings=pooled) for _ in range(4)]
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


async def test_migrations_at_once_through_the_pooler(bouncer: PgBouncer, empty_dsn: str) -> None:
    settings = Settings.load(dsn=bouncer.dsn_of(empty_dsn), transaction_pooler=True)

    async def start() -> None:
        async with QueueManager(settings=settings):
            pass

    await asyncio.gather(*(start() for _ in range(5)))


async def hears(settings: Settings) -> bool:
    """Whether a listener ever hears itself; its pass ends when a proof fails."""
    assert settings.dsn is not None
    heard: list[bool] = []
    async with open_database(settings, dsn=settings.dsn.get_secret_value()) as database:
        with anyio.fail_after(60), anyio.CancelScope() as scope:

            def note() -> None:
                heard.append(listener.hears)
                scope.cancel()

            listener = Listener(database, "me", on_notice=lambda _: None, on_change=note)
            await listener.run_once()
    return True in heard


async def test_listening_through_the_pooler_is_found_to_be_deaf(
    pooled: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cron_ticks.listener.PROOF_SECONDS", 0.5)
    assert not await hears(pooled)


async def test_a_dsn_for_listening_leads_past_the_pooler(pooled: Settings, dsn: str) -> None:
    assert pooled.dsn is not None
    address = pooled.dsn.get_secret_value()
    assert await hears(Settings.load(dsn=address, transaction_pooler=True, listen_dsn=dsn))
