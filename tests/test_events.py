"""Events: every change of a message's or a schedule's state, written with the change and by its level."""

import asyncio
import json
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from cron_ticks.database import Database
from cron_ticks.errors import InvalidInputError
from cron_ticks.events import Event, EventLevel, utc_text
from cron_ticks.repository import CronRepository
from cron_ticks.schedules import define_schedule
from cron_ticks.settings import Settings
from support.commands import fetch, manage, run_command
from support.moved_clock import Engine
from support.processes import Processes
from support.rig import handling, rig
from token_queue import Backoff, Message, OutgoingMessage, QueueManager
from token_queue.handlers import Handlers
from token_queue.queue_repository import QUEUE_SINK, Failure, QueueRepository, Token, Wanted

pytestmark = pytest.mark.sql

START = datetime(2026, 1, 1, tzinfo=UTC)
TEN = timedelta(seconds=10)
LEASE = timedelta(seconds=10)
ALICE = "alice"

OpenManager = Callable[..., Any]


@pytest.fixture
def open_manager(dsn: str) -> OpenManager:
    """A manager at a level of events, as alice."""

    @asynccontextmanager
    async def opened(events: EventLevel = "changes") -> AsyncIterator[QueueManager]:
        async with QueueManager(settings=Settings.load(dsn=dsn, events=events, actor=ALICE)) as manager:
            yield manager

    return opened


@pytest.fixture
async def manager(open_manager: OpenManager) -> AsyncIterator[QueueManager]:
    async with open_manager() as opened:
        yield opened


@pytest.fixture
async def talkative(open_manager: OpenManager) -> AsyncIterator[QueueManager]:
    """At level `all`."""
    async with open_manager("all") as opened:
        yield opened


async def nothing(_: Message) -> None: ...


async def failing(_: Message) -> None:
    raise ValueError("no such memo")


def names(events: Sequence[Event]) -> list[str]:
    return [event.event for event in events]


async def all_names(connection: Any) -> list[str]:
    return [row["event"] for row in await connection.fetch("SELECT event FROM execution_events ORDER BY sequence")]


class OneWorker(QueueRepository):
    """A worker's repository with short words for tests."""

    def __init__(self, database: Database, worker_id: str = "ticker_one", events: EventLevel = "changes") -> None:
        super().__init__(database, worker_id, events=events)
        handlers = Handlers(Settings())
        handlers.register("queue", nothing)
        self.handlers = handlers.all()

    async def lease(self, *, now: datetime | None = None) -> list[Token]:
        return (await self.look(self.handlers, [1000], most=10, lease=LEASE, now=now)).leased

    async def take(self) -> list[tuple[str, str]]:
        """Everything that is due, as keys."""
        (token,) = await self.lease()
        fetched = await self.fetch([Wanted(token.id, 100, ())])
        return [(message.id, token.id) for message in fetched[token.id].messages]


# Messages


async def test_a_message_tells_its_life_in_order(talkative: QueueManager, database: Database, connection: Any) -> None:
    sent = await talkative.send("queue", {"secret": 1})
    async with rig(database, handling(nothing), events="all") as parts:
        await parts.drain()
    story = await talkative.events(message_id=sent.id)
    assert names(story) == ["sent", "claimed", "completed"]
    assert [event.worker for event in story] == [None, "ticker_me", "ticker_me"]
    assert [event.data for event in story] == [{}, {"attempt": 1}, {"attempt": 1}]
    assert {event.actor for event in story} == {None}
    assert all(earlier.sequence < later.sequence and earlier.at <= later.at for earlier, later in pairwise(story))
    now = await connection.fetchval("SELECT statement_timestamp()")
    assert now - timedelta(minutes=5) < story[0].at <= story[-1].at <= now


@pytest.mark.parametrize("level", ["changes", "off"])
async def test_the_usual_way_of_a_message_is_silent_at_other_levels(
    open_manager: OpenManager, database: Database, connection: Any, level: EventLevel
) -> None:
    async with open_manager(level) as manager:
        await manager.send("queue")
        await manager.send("queue", process_after=3600)
        await manager.send_many("queue", [{}] * 200)
        await manager.send_many("queue", [{}] * 3)
        await manager.trigger((await manager.schedule("queue", every=3600, starts_at=datetime.now(UTC) + TEN)).id)
    before = await all_names(connection)
    async with rig(database, handling(nothing), events=level) as parts:
        await parts.drain()
    assert await connection.fetchval("SELECT count(*) FROM queue_messages WHERE completed_at IS NOT NULL") == 205
    assert await all_names(connection) == before == ([] if level == "off" else ["created", "triggered"])


async def test_a_message_for_later_is_deferred(talkative: QueueManager, connection: Any) -> None:
    sent = await talkative.send("queue", process_after=3600)
    (event,) = await talkative.events(message_id=sent.id)
    due = await connection.fetchval("SELECT process_after FROM queue_messages")
    assert (event.event, event.data) == ("deferred", {"until": utc_text(due)})


@pytest.mark.parametrize("count", [5, 250], ids=["inserted", "copied"])
async def test_many_at_once_have_an_event_each(talkative: QueueManager, connection: Any, count: int) -> None:
    await talkative.send_many("queue", [{"n": number} for number in range(count)])
    rows = await connection.fetch("SELECT event, message_id FROM execution_events ORDER BY sequence")
    ids = await connection.fetch("SELECT id FROM queue_messages ORDER BY sequence")
    assert [tuple(row) for row in rows] == [("sent", row["id"]) for row in ids]


async def test_what_a_dedupe_key_keeps_out_has_no_event(talkative: QueueManager, connection: Any) -> None:
    for _ in range(2):
        await talkative.send("queue", dedupe_key="k")
    await talkative.send_many("queue", [OutgoingMessage({}, dedupe_key="k"), OutgoingMessage({}, process_after=60)])
    assert await all_names(connection) == ["sent", "deferred"]


@pytest.mark.parametrize("level", ["changes", "all"])
async def test_a_message_that_fails_says_how_and_when_it_is_tried_again(
    open_manager: OpenManager, database: Database, connection: Any, level: EventLevel
) -> None:
    async with open_manager(level) as manager:
        sent = await manager.send("queue")
        quickly = Backoff(first=0.001, longest=0.001)
        async with rig(database, handling(failing, max_attempts=2, backoff=quickly), events=level) as parts:
            while not await manager.list_dead():
                await parts.turn()
        await manager.redrive_dead([sent.id])
        async with rig(database, handling(failing, max_attempts=1), events=level) as parts:
            while not await manager.list_dead():
                await parts.turn()
        await manager.purge_dead([sent.id])
        story = await manager.events(message_id=sent.id)
    kept = [event for event in story if event.event not in {"sent", "claimed"}]
    assert len(story) - len(kept) == (4 if level == "all" else 0)
    assert names(kept) == ["retry_scheduled", "dead_lettered", "redriven", "dead_lettered", "purged"]
    assert [event.worker for event in kept] == ["ticker_me", "ticker_me", None, "ticker_me", None]
    assert [event.actor for event in kept] == [None, None, ALICE, None, ALICE]
    error = {"error_type": "ValueError", "error_message": "no such memo"}
    retry = kept[0].data.pop("retry_at")
    assert kept[0].at - TEN < datetime.fromisoformat(retry) < kept[0].at + TEN
    assert [event.data for event in kept] == [
        {"attempt": 1} | error,
        {"attempt": 2} | error,
        {},
        error | {"attempt": 1},
        {},
    ]
    assert await connection.fetchval("SELECT count(*) FROM queue_messages") == 0


async def test_a_worker_that_is_gone_has_abandoned_its_messages(
    manager: QueueManager, database: Database, connection: Any
) -> None:
    sent = await manager.send("queue")
    first, second = OneWorker(database, "ticker_first"), OneWorker(database, "ticker_second")
    (key,) = await first.take()
    later = await connection.fetchval("SELECT statement_timestamp() + interval '11 seconds'")
    await second.lease(now=later)
    await first.complete([key])
    (event,) = await manager.events(message_id=sent.id)
    assert (event.event, event.worker) == ("abandoned", "ticker_first")
    assert event.data == {"attempt": 1, "found_by": "ticker_second"}
    assert event.at < later  # the database's clock, whatever a test says


async def test_a_message_without_attempts_left_is_dead(
    manager: QueueManager, database: Database, connection: Any
) -> None:
    sent = await manager.send("queue")
    await connection.execute(
        "UPDATE queue_messages SET attempts = 5, worker_deaths = 5, error_type = 'WorkerLost', error_message = 'gone'"
    )
    async with rig(database, handling(nothing, max_attempts=5)) as parts:
        await parts.turn()
    (event,) = await manager.events(message_id=sent.id)
    assert (event.event, event.worker) == ("dead_lettered", "ticker_me")
    assert event.data == {"attempt": 5, "error_type": "WorkerLost", "error_message": "gone"}


async def test_what_is_written_twice_happens_once(talkative: QueueManager, database: Database) -> None:
    sent = [await talkative.send("queue") for _ in range(3)]
    worker = OneWorker(database, events="all")
    retried, dead, completed = await worker.take()
    for _ in range(2):
        await worker.fail([(retried, 1, Failure("Error", "x" * 5000, None, TEN))])
        await worker.bury([dead])
        await worker.complete([completed])
    stories = [await talkative.events(message_id=message.id) for message in sent]
    ends = ("retry_scheduled", "dead_lettered", "completed")
    assert [names(story) for story in stories] == [["sent", "claimed", end] for end in ends]
    assert len(stories[0][-1].data["error_message"]) == 1000


async def test_a_worker_that_lost_its_token_writes_nothing(
    talkative: QueueManager, database: Database, connection: Any
) -> None:
    await talkative.send("queue")
    worker = OneWorker(database, events="all")
    (key,) = await worker.take()
    await connection.execute("DELETE FROM queue_tokens")
    await worker.complete([key])
    await worker.fail([(key, 1, Failure("Error", "late", None, TEN))])
    await worker.bury([key])
    assert await all_names(connection) == ["sent", "claimed"]


async def test_a_killed_workers_message_is_abandoned_and_then_completed(
    dsn: str, processes: Processes, talkative: QueueManager
) -> None:
    """With real processes, and the level from the environment."""
    sent = await talkative.send("queue")
    options = {"lease_seconds": "1", "lease_renewal_seconds": "0.5", "events": "all"}
    victim = await processes.worker(dsn, "endless", **options)
    started = await victim.wait_for("worker_started")
    await victim.wait_for("handling")
    await victim.kill()
    heir = await processes.worker(dsn, "quick", **options)
    inherited = await heir.wait_for("worker_started")
    await heir.wait_for("handled")
    heir.send(signal.SIGTERM)
    assert await heir.wait() == 0
    story = await talkative.events(message_id=sent.id)
    assert names(story) == ["sent", "claimed", "abandoned", "claimed", "completed"]
    dead, alive = started["ticker_id"], inherited["ticker_id"]
    assert [event.worker for event in story] == [None, dead, dead, alive, alive]
    assert story[2].data["found_by"] == alive


# Schedules


async def test_a_schedule_tells_who_did_what(manager: QueueManager) -> None:
    options: dict[str, Any] = {
        "name": "report",
        "payload": {"a": 1},
        "starts_at": datetime.now(UTC) + timedelta(days=1),
    }
    schedule = await manager.schedule("queue", every=60, **options)
    await manager.schedule("queue", every=60, **options)  # declared again: nothing happens
    await manager.update_schedule(schedule.id, every=90, priority="high", payload={"a": [1.50, "ü"]})
    await manager.disable_schedule(schedule.id)
    await manager.disable_schedule(schedule.id)
    await manager.enable_schedule(schedule.id, fire_now=True)
    triggered = await manager.trigger(schedule.id)
    await manager.delete_schedule(schedule.id)
    story = await manager.events(schedule_id=schedule.id)
    assert names(story) == ["created", "edited", "disabled", "enabled", "triggered", "triggered", "deleted"]
    assert {(event.actor, event.worker) for event in story} == {(ALICE, None)}
    assert story[0].data == {"version": 1, "name": "report", "workspace_id": None}
    assert story[1].data == {
        "version": 2,
        "changed": {"interval": [60, 90], "priority": ["normal", "high"], "payload": [{"a": 1}, {"a": [1.5, "ü"]}]},
    }
    assert [event.data["version"] for event in story[2:4]] == [3, 4]
    assert story[5].message_id == triggered.message_id
    assert story[5].data == {"scheduled_for": utc_text(triggered.scheduled_for)}
    assert story[6].data == {"version": 5, "name": "report", "workspace_id": None}


async def test_times_and_durations_of_an_edit_are_plain_values(manager: QueueManager) -> None:
    day = datetime(2100, 1, 1, 12, 30, tzinfo=UTC)
    schedule = await manager.schedule("queue", every=60, starts_at=day, max_age=5)
    await manager.update_schedule(
        schedule.id, starts_at=day + TEN, max_age=timedelta(seconds=2.5), ends_at=day + 2 * TEN
    )
    edited = (await manager.events(schedule_id=schedule.id))[-1]
    assert edited.data["changed"] == {
        "starts_at": ["2100-01-01T12:30:00.000000Z", "2100-01-01T12:30:10.000000Z"],
        "ends_at": [None, "2100-01-01T12:30:20.000000Z"],
        "max_age": [5, 2.5],
    }


async def test_another_zone_of_a_workspace_is_an_edit(manager: QueueManager) -> None:
    schedule = await manager.schedule("queue", cron="0 12 * * *", workspace_id="ws")
    await manager.set_workspace_timezone("ws", "Europe/Berlin")
    story = await manager.events(schedule_id=schedule.id)
    assert [(event.event, event.data.get("changed")) for event in story] == [
        ("created", None),
        ("edited", {"zone": ["UTC", "Europe/Berlin"]}),
    ]


async def test_a_broken_schedule_says_so_and_who_gives_it_another_try(
    manager: QueueManager, database: Database, settings: Settings
) -> None:
    schedule = await manager.schedule("queue", every=60, starts_at=datetime.now(UTC) + timedelta(days=1))
    repository = CronRepository(database, settings, worker="ticker_manager")
    async with database.transaction() as connection:
        later = datetime.now(UTC) + timedelta(days=2)
        (needing,) = await repository.find_schedules_needing_ticks(limit=1, connection=connection, now=later)
    assert not await repository.mark_broken(replace(needing, version=7), "of another version")
    assert await repository.mark_broken(needing, "no such zone")
    await manager.enable_schedule(schedule.id)
    story = await manager.events(schedule_id=schedule.id)
    assert names(story) == ["created", "broken", "retried"]
    assert [(event.worker, event.actor) for event in story[1:]] == [("ticker_manager", None), (None, ALICE)]
    assert story[1].data == {"version": 1, "error": "no such zone"}


async def test_everything_about_a_schedule_includes_its_messages(talkative: QueueManager, database: Database) -> None:
    schedule = await talkative.schedule("queue", at=datetime.now(UTC) + timedelta(milliseconds=1), name="once")
    await talkative.send("queue")  # nobody's
    async with rig(database, handling(failing, max_attempts=1), events="all") as parts:
        while len(await talkative.list_dead()) < 2:
            await parts.turn()
    await talkative.redrive_dead()
    async with rig(database, handling(nothing), events="all") as parts:
        await parts.drain()
    story = await talkative.events(schedule_id=schedule.id)
    assert names(story) == ["created", "sent", "claimed", "dead_lettered", "redriven", "claimed", "completed"]
    (message_id,) = {event.message_id for event in story[1:]}
    assert message_id is not None
    assert await talkative.events(message_id=message_id) == story[1:]
    assert story[1].worker == "ticker_me"
    assert story[1].data.keys() == {"scheduled_for"}


@pytest.mark.parametrize("level", ["changes", "all", "off"])
async def test_an_occurrence_that_an_overlap_ends_or_holds_back_says_so(
    database: Database, connection: Any, level: EventLevel
) -> None:
    """One that waits says so once, however often it is tried."""
    engine = Engine(database, START, events=level)
    skipping = await engine.declare(name="skip", every=10, jitter=None, overlap="skip")
    queueing = await engine.declare(name="queue_one", every=10, jitter=None, overlap="queue_one")
    for _ in range(4):
        await engine.turn()
        engine.now += TEN
    await connection.execute("UPDATE queue_messages SET completed_at = statement_timestamp()")
    await engine.repository.release_waiting([queueing.id], now=engine.now)
    await engine.fire()
    found: dict[str, list[tuple[str, int]]] = {skipping.id: [], queueing.id: []}
    rows = await connection.fetch("SELECT * FROM execution_events WHERE event <> 'created' ORDER BY sequence")
    for row in rows:
        data = json.loads(row["data"])
        occurrence = (datetime.fromisoformat(data["scheduled_for"]) - START) // TEN
        found[row["schedule_id"]].append((row["event"], occurrence))
        assert row["worker"] == "ticker_test"
        assert row["message_id"].startswith("msg_")
        reason = None if row["event"] == "sent" else "the message before it is unfinished"
        assert data.get("reason") == reason
    held = {
        skipping.id: [("sent", 0), ("skipped", 1), ("skipped", 2), ("skipped", 3), ("sent", 4)],
        queueing.id: [("sent", 0), ("deferred", 1), ("sent", 1), ("skipped", 2), ("skipped", 3), ("deferred", 4)],
    }
    kept = {"all": {"sent", "skipped", "deferred"}, "changes": {"skipped", "deferred"}, "off": set()}[level]
    in_order = {key: sorted(story, key=itemgetter(1)) for key, story in found.items()}
    assert in_order == {key: [item for item in story if item[0] in kept] for key, story in held.items()}


async def test_a_refused_tick_has_no_event(database: Database, connection: Any, settings: Settings) -> None:
    """Its occurrence has fired before."""
    repository = CronRepository(database, settings.model_copy(update={"events": "all"}))
    definition = define_schedule("queue", every=10, jitter=None, overlap="skip")
    schedule = (await repository.save_schedule(definition, now=START)).schedule
    await connection.execute("SELECT cron_make_partition('runs', date '2026-01-01')")
    await connection.execute(
        """INSERT INTO cron_runs (schedule_id, scheduled_for, version, origin, outcome, ended_at, attempts)
        VALUES ($1, $2, 1, 'schedule', 'enqueued', $2, 1)""",
        schedule.id,
        START,
    )
    (tick,) = await repository.fire_due_ticks(QUEUE_SINK, ticker_id="ticker_me", limit=10, now=START)
    assert tick.outcome == "refused"
    assert await all_names(connection) == ["created"]


# Levels, transactions, workspaces


async def test_nothing_is_written_at_level_off(open_manager: OpenManager, database: Database, connection: Any) -> None:
    async with open_manager("off") as manager:
        schedule = await manager.schedule("queue", every=60, workspace_id="ws", starts_at=datetime.now(UTC) + TEN)
        await manager.update_schedule(schedule.id, payload=7)
        await manager.disable_schedule(schedule.id)
        await manager.enable_schedule(schedule.id, fire_now=True)
        await connection.execute("UPDATE cron_schedules SET error = 'a test'")
        await manager.enable_schedule(schedule.id)
        async with rig(database, handling(failing, max_attempts=1), events="off") as parts:
            await parts.turn()
        assert await manager.redrive_dead() == 1
        worker = OneWorker(database, events="off")
        await worker.take()
        await worker.lease(now=await connection.fetchval("SELECT statement_timestamp() + interval '11 seconds'"))
        await connection.execute("UPDATE queue_messages SET dlq_at = statement_timestamp()")
        assert await manager.purge_dead() == 1
        await manager.send("queue", workspace_id="ws")
        await manager.delete_workspace("ws")
        assert await manager.events(schedule_id=schedule.id) == []
    assert await all_names(connection) == []


async def send_and_schedule(manager: QueueManager, connection: Any) -> list[str]:
    """Changes of all kinds in the caller's transaction; the events that they make."""
    await manager.send("queue", connection=connection)
    await manager.send_many("queue", [{}] * 2, connection=connection)
    await manager.send_many("queue", [{}] * 100, connection=connection)
    schedule = await manager.schedule("queue", every=3600, workspace_id="ws", connection=connection)
    await manager.update_schedule(schedule.id, every=60, connection=connection)
    await manager.trigger(schedule.id, connection=connection)
    await manager.disable_schedule(schedule.id, connection=connection)
    await manager.delete_schedule(schedule.id, connection=connection)
    await manager.schedule("queue", every=3600, workspace_id="ws", connection=connection)
    await manager.send("queue", workspace_id="ws", connection=connection)
    await manager.delete_workspace("ws", connection=connection)
    return [
        *["sent"] * 103,
        "created",
        "edited",
        "triggered",
        "disabled",
        "deleted",
        "created",
        "sent",
        "deleted",
        "purged",
    ]


async def test_events_belong_to_the_callers_transaction(talkative: QueueManager, connection: Any) -> None:
    async with connection.transaction():
        expected = await send_and_schedule(talkative, connection)
        assert await talkative.database.fetchval("SELECT count(*) FROM {schema}.execution_events") == 0
    assert await all_names(connection) == expected


async def test_events_are_rolled_back_with_the_change(talkative: QueueManager, connection: Any, tmp_path: Path) -> None:
    transaction = connection.transaction()
    await transaction.start()
    await send_and_schedule(talkative, connection)
    await transaction.rollback()
    file = tmp_path / "schedules.toml"
    file.write_text('[[schedules]]\nname = "a"\nqueue_name = "queue"\nevery = "1h"\n')
    assert (await talkative.apply(file, dry_run=True)).changes
    assert await all_names(connection) == []


async def test_a_workspace_takes_its_payloads_with_it(manager: QueueManager, connection: Any) -> None:
    kept = await manager.schedule("queue", every=3600, payload="theirs", workspace_id="other")
    gone = [await manager.schedule("queue", every=3600, payload="secret", name=n, workspace_id="ws") for n in "ab"]
    for schedule in (kept, *gone):
        await manager.update_schedule(schedule.id, payload=f"{schedule.payload} 2", max_runs=5)
    await manager.delete_schedule(gone[0].id)  # before the rest of its workspace
    pending = await manager.send("queue", "secret", workspace_id="ws")
    done = await manager.send("queue", "secret", workspace_id="ws")
    await connection.execute("UPDATE queue_messages SET completed_at = statement_timestamp() WHERE id = $1", done.id)
    await manager.delete_workspace("ws")
    for schedule in gone:
        story = await manager.events(schedule_id=schedule.id)
        assert names(story) == ["created", "edited", "deleted"]
        assert story[1].data == {"version": 2, "changed": {"max_runs": [None, 5]}}
        assert story[2].actor == ALICE
    assert (await manager.events(schedule_id=kept.id))[1].data["changed"]["payload"] == ["theirs", "theirs 2"]
    (purged,) = await manager.events(message_id=pending.id)
    assert (purged.event, purged.actor, purged.data) == ("purged", ALICE, {"reason": "workspace deleted"})
    assert await manager.events(message_id=done.id) == []
    rows = await connection.fetch("SELECT data::text FROM execution_events WHERE data::text LIKE '%secret%'")
    assert rows == []


# Reading


async def test_pages_follow_each_other_in_the_order_of_the_sequence(manager: QueueManager) -> None:
    schedule = await manager.schedule("queue", every=3600)
    for number in range(2, 8):
        await manager.update_schedule(schedule.id, max_runs=number)
    pages, after = [], 0
    while page := await manager.events(schedule_id=schedule.id, after_sequence=after, limit=3):
        pages.append([event.data["version"] for event in page])
        after = page[-1].sequence
    assert pages == [[1, 2, 3], [4, 5, 6], [7]]
    assert await manager.events(schedule_id="cron_of_nobody") == []


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({}, "message_id"),
        ({"message_id": "a", "schedule_id": "b"}, "message_id"),
        ({"message_id": ""}, "message_id"),
        ({"schedule_id": 7}, "schedule_id"),
        ({"message_id": "a", "limit": 0}, "limit"),
        ({"message_id": "a", "limit": 10_001}, "limit"),
        ({"message_id": "a", "after_sequence": -1}, "after_sequence"),
        ({"message_id": "a", "after_sequence": 2**63}, "after_sequence"),
    ],
)
async def test_what_can_not_be_asked_for_is_refused(manager: QueueManager, arguments: Any, field: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        await manager.events(**arguments)
    assert refused.value.field == field


async def test_two_that_change_at_once_write_each_event_once(manager: QueueManager) -> None:
    """Of all pods that declare a schedule, one has created it."""

    async def declare(number: int) -> str:
        return (await manager._open.cron.save_schedule(define_schedule("queue", every=60, max_runs=number))).schedule.id

    declaring: list[Awaitable[str]] = [declare(7) for _ in range(8)]
    (schedule_id,) = set(await asyncio.gather(*declaring))
    await asyncio.gather(*(declare(8) for _ in range(8)))
    assert names(await manager.events(schedule_id=schedule_id)) == ["created", "edited"]


# The command


def test_the_command_shows_a_message_or_a_schedule(dsn: str) -> None:
    async def change(manager: QueueManager) -> str:
        schedule = await manager.schedule("queue", every=3600, payload={"note": "\x1b[31m"})
        await manager.update_schedule(schedule.id, payload={"note": "x" * 1000})
        return schedule.id

    schedule_id = manage(dsn, change)
    shown = run_command("events", "--schedule", schedule_id, "--json", "--dsn", dsn).json
    assert [event["event"] for event in shown] == ["created", "edited"]
    assert shown[1]["data"]["changed"]["payload"] == [{"note": "\x1b[31m"}, {"note": "x" * 1000}]
    assert datetime.fromisoformat(shown[0]["at"]).utcoffset() == timedelta(0)
    (row,) = fetch(dsn, "SELECT sequence, actor FROM execution_events WHERE event = 'created'")
    assert (shown[0]["sequence"], shown[0]["actor"]) == tuple(row)
    page = run_command("events", "--schedule", schedule_id, "--limit", "1", "--dsn", dsn)
    assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\dZ  created +by {re.escape(row['actor'])}", page.lines[0])
    assert json.loads(page.lines[1]) == shown[0]["data"]
    assert page.lines[2] == f"there may be more: --after {row['sequence']}"
    rest = run_command("events", "--schedule", schedule_id, "--after", str(row["sequence"]), "--dsn", dsn)
    assert "edited" in rest.output
    assert "created" not in rest.output
    assert "\x1b" not in rest.output
    assert len(rest.output) < 1300


def test_the_command_triggers_as_whoever_it_is(dsn: str) -> None:
    schedule_id = manage(dsn, _schedule)
    someone = {"CRON_TICKS_ACTOR": "bob@ops"}
    triggered = run_command("schedule", "trigger", schedule_id, "--json", "--dsn", dsn, environment=someone).json
    message_id = triggered["tick_id"].replace("tick_", "msg_")
    shown = run_command("events", "--message", message_id, "--json", "--dsn", dsn).json
    assert [(event["event"], event["actor"]) for event in shown] == [("triggered", "bob@ops")]


async def _schedule(manager: QueueManager) -> str:
    return (await manager.schedule("queue", every=3600)).id


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ((), 2, "give either"),
        (("--message", "a", "--schedule", "b"), 2, "give either"),
        (("--message", "a", "--limit", "0"), 2, "limit"),
        (("--message", "a"), 0, "no events"),
    ],
)
def test_the_command_says_what_is_wrong(dsn: str, arguments: tuple[str, ...], code: int, says: str) -> None:
    ended = run_command("events", *arguments, "--dsn", dsn)
    assert ended.code == code
    assert says in ended.output + ended.error


# Where they are kept


async def test_a_firing_makes_the_partition_that_its_events_lack(database: Database, connection: Any) -> None:
    """Or ticks would be blamed for it, and lost."""
    engine = Engine(database, START, events="all")
    await engine.declare(every=10, jitter=None)
    (partition,) = await connection.fetch("SELECT DISTINCT tableoid::regclass::text AS name FROM execution_events")
    await connection.execute(f"DROP TABLE {partition['name']}")
    assert len(await engine.fire()) == 1
    assert await all_names(connection) == ["sent"]


async def test_events_are_kept_by_week_and_their_partitions_are_there(connection: Any, manager: QueueManager) -> None:
    await manager.schedule("queue", every=60)
    (row,) = await connection.fetch("SELECT tableoid::regclass::text AS partition, at FROM execution_events")
    monday = row["at"].date() - timedelta(days=row["at"].weekday())
    assert row["partition"] == f"execution_events_{monday:%Y%m%d}"
    with pytest.raises(asyncpg.CheckViolationError):
        await connection.execute("INSERT INTO execution_events (at, event) VALUES ('2001-01-01', 'x')")
