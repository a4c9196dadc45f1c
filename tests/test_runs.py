"""What became of occurrences and of their messages: pages of the ledger, the newest first."""

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from cron_ticks import run_sql
from cron_ticks.database import Database
from cron_ticks.errors import InvalidInputError
from cron_ticks.run_repository import RunChoice, RunRepository
from cron_ticks.runs import OUTCOMES, MessageState, Run
from cron_ticks.settings import Settings
from support.moved_clock import Engine
from support.rig import handling, rig
from token_queue import Message, QueueManager, queue_sql

pytestmark = pytest.mark.sql

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)


@pytest.fixture
async def manager(dsn: str) -> AsyncIterator[QueueManager]:
    async with QueueManager(settings=Settings.load(dsn=dsn)) as opened:
        yield opened


async def put(connection: Any, schedule_id: str, moment: datetime, outcome: str = "enqueued", **columns: Any) -> None:
    """A row of the ledger, and the version that it follows."""
    await connection.execute("SELECT cron_make_partition('runs', $1)", moment.astimezone(UTC).date())
    await put_version(connection, schedule_id, name=schedule_id.removeprefix("cron_"))
    row = {
        "schedule_id": schedule_id,
        "scheduled_for": moment,
        "version": 1,
        "origin": "schedule",
        "outcome": outcome,
        "ended_at": moment + timedelta(milliseconds=7),
        "attempts": 1,
    } | columns
    places = ", ".join(f"${number}" for number in range(1, len(row) + 1))
    await connection.execute(f"INSERT INTO cron_runs ({', '.join(row)}) VALUES ({places})", *row.values())


async def put_version(connection: Any, schedule_id: str, **columns: Any) -> None:
    row = {
        "schedule_id": schedule_id,
        "version": 1,
        "holds_after": NOON - 1000 * DAY,
        "change": "created",
        "enabled": True,
        "name": "a name",
        "queue_name": "queue",
        "anchor_at": NOON,
        "jitter_us": 0,
        "priority": 2,
        "planned": 0,
        "created_at": NOON,
    } | columns
    places = ", ".join(f"${number}" for number in range(1, len(row) + 1))
    await connection.execute(
        f"INSERT INTO cron_schedule_versions ({', '.join(row)}) VALUES ({places}) ON CONFLICT DO NOTHING",
        *row.values(),
    )


def choices(*given: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Ways to ask."""
    return given


def moments(runs: list[Run]) -> list[datetime]:
    return [run.scheduled_for for run in runs]


async def pages(manager: QueueManager, limit: int, *, by_cursor: bool, **choice: Any) -> list[Run]:
    """All of them, page by page."""
    found = page = await manager.runs(**choice, limit=limit)
    while len(page) == limit:
        page = await manager.runs(**choice, limit=limit, after=page[-1].cursor if by_cursor else page[-1])
        found = found + page
    return found


async def test_a_run_says_all_that_is_known(manager: QueueManager, connection: Any) -> None:
    engine = Engine(manager.database, NOON)
    schedule = await engine.declare("billing", every=60, jitter=0, name="nightly", workspace_id="acme")
    engine.now = NOON + timedelta(milliseconds=250)
    await engine.fire()
    [message_id] = [row["id"] for row in await connection.fetch("SELECT id FROM queue_messages")]
    [run] = await manager.runs(schedule_id=schedule.id)
    sent = MessageState(message_id, "pending", sent_at=engine.now, attempts=0, next_attempt_at=engine.now)
    assert run == Run(
        schedule_id=schedule.id,
        schedule_name="nightly",
        workspace_id="acme",
        queue_name="billing",
        sink="queue",
        scheduled_for=NOON,
        missed_since=None,
        occurrences=1,
        version=1,
        origin="schedule",
        outcome="enqueued",
        reason=None,
        ended_at=engine.now,
        lateness=timedelta(milliseconds=250),
        attempts=1,
        worker="ticker_test",
        recovered=False,
        recovery_time=None,
        message_id=message_id,
        message=sent,
    )


async def test_a_run_is_followed_to_the_end_of_its_message(manager: QueueManager, connection: Any) -> None:
    """Pending, running, failed, completed; or dead; and then removed."""
    schedule = await manager.schedule("queue", every=3600)
    seen: list[MessageState | None] = []

    async def look() -> MessageState:
        [run] = await manager.runs(schedule_id=schedule.id)
        assert run.message is not None
        seen.append(run.message)
        return run.message

    async def handle(message: Message) -> None:
        await look()
        if message.attempt == 1:
            raise ValueError("the printer is on fire")

    async with rig(manager.database, handling(handle, max_attempts=2)) as worker:
        await worker.firer.run_once()
        await look()
        await worker.ticker.run_once()
        await worker.settle()
        failed = await look()
        await connection.execute("UPDATE queue_messages SET process_after = now()")
        await worker.ticker.run_once()
        await worker.settle()
    completed = await look()
    assert [state.state for state in seen if state] == ["pending", "running", "failed", "running", "completed"]
    assert (failed.error, failed.attempts) == ("ValueError: the printer is on fire", 1)
    assert failed.next_attempt_at is not None
    assert failed.sent_at is not None
    assert failed.next_attempt_at > failed.sent_at
    assert (completed.attempts, completed.next_attempt_at) == (2, None)
    assert (
        completed.finished_at
        == completed.completed_at
        == await connection.fetchval("SELECT completed_at FROM queue_messages")
    )
    await connection.execute("UPDATE queue_messages SET completed_at = NULL, dlq_at = now()")
    dead = await look()
    assert (dead.state, dead.finished_at) == ("dead", dead.dead_at)
    await connection.execute("DELETE FROM queue_messages")
    assert await look() == MessageState(dead.id, "removed")


async def test_a_message_of_a_worker_that_died_is_not_running(manager: QueueManager, connection: Any) -> None:
    schedule = await manager.schedule("queue", every=3600)

    async def handle(_message: Message) -> None:
        await connection.execute("UPDATE queue_tokens SET leased_until = now() - interval '1 second'")
        [run] = await manager.runs(schedule_id=schedule.id)
        assert run.message is not None
        assert run.message.state == "pending"

    async with rig(manager.database, handling(handle)) as worker:
        await worker.turn()
    assert await connection.fetchval("SELECT attempts FROM queue_messages WHERE error_type IS NULL") == 1


async def test_what_another_sink_took_was_handed_over(manager: QueueManager, connection: Any) -> None:
    await put_version(connection, "cron_a", name="a", sink="outside")
    await put(connection, "cron_a", NOON, message_id="msg_1")
    [run] = await manager.runs(schedule_id="cron_a")
    assert (run.sink, run.message) == ("outside", MessageState("msg_1", None))


async def test_pages_follow_each_other_without_gaps_or_repeats(manager: QueueManager, connection: Any) -> None:
    """Over several days and schedules, and with occurrences at the same instant."""
    for number in range(60):
        await put(connection, f"cron_{number % 4}", NOON - (number // 4) * 5 * HOUR)
    everything = await connection.fetch("SELECT scheduled_for, schedule_id FROM cron_runs ORDER BY 1 DESC, 2 DESC")
    expected = [tuple(row) for row in everything]
    for by_cursor, limit in ((False, 7), (True, 1), (False, 4), (True, 1000)):
        found = await pages(manager, limit, by_cursor=by_cursor, since=NOON - 30 * DAY)
        assert [run.place for run in found] == expected
        of_one = await pages(manager, limit, by_cursor=by_cursor, schedule_id="cron_2")
        assert [run.place for run in of_one] == [place for place in expected if place[1] == "cron_2"]


async def test_bounds_are_from_and_before(manager: QueueManager, connection: Any) -> None:
    for number in range(5):
        await put(connection, "cron_a", NOON + number * HOUR)
    for choice in choices({"schedule_id": "cron_a"}, {"name": "a"}, {}):
        found = await manager.runs(**choice, since=NOON + HOUR, until=NOON + 3 * HOUR)
        assert moments(found) == [NOON + 2 * HOUR, NOON + HOUR]


async def test_without_a_schedule_the_last_day_is_shown(manager: QueueManager, connection: Any) -> None:
    now = await connection.fetchval("SELECT now()")
    for age in (-MINUTE, MINUTE, HOUR, 23 * HOUR, 25 * HOUR, 40 * DAY):
        await put(connection, "cron_a", now - age)
        await put(connection, "cron_a", now - age - timedelta(seconds=1), "missed")
    assert len(await manager.runs()) == 8
    assert len(await manager.runs(outcome="missed")) == 4
    assert len(await manager.runs(workspace_id="nobody")) == 0
    assert len(await manager.runs(since=now - 41 * DAY)) == 12
    assert len(await manager.runs(since=now - 41 * DAY, outcome="missed")) == 6
    assert moments(await manager.runs(until=now - DAY)) == [now - 25 * HOUR, now - 25 * HOUR - timedelta(seconds=1)]
    assert len(await manager.runs(schedule_id="cron_a")) == 12
    assert moments(await manager.runs(limit=1)) == [now + MINUTE]


async def test_a_name_stands_for_all_who_had_it(manager: QueueManager) -> None:
    """Deleted and created again it has another id; and so has its namesake in a workspace."""
    engine = Engine(manager.database, NOON)
    first = await engine.declare("queue", every=3600, name="nightly")
    await engine.fire()
    await engine.repository.delete_schedule(first.id, now=engine.now)
    engine.now += MINUTE
    again = await engine.declare("queue", every=3600, name="nightly")
    await engine.fire()
    engine.now += MINUTE
    namesake = await engine.declare("queue", every=3600, name="nightly", workspace_id="acme")
    await engine.declare("queue", every=3600, name="other")
    await engine.fire()
    named = await manager.runs(name="nightly")
    assert [run.schedule_id for run in named] == [namesake.id, again.id, first.id]
    assert [run.schedule_id for run in await manager.runs(name="nightly", workspace_id="acme")] == [namesake.id]
    assert [run.schedule_id for run in await manager.runs(workspace_id="acme", since=NOON)] == [namesake.id]
    assert await manager.runs(name="never") == []


async def test_runs_are_chosen_by_outcome_and_by_the_queue_of_then(manager: QueueManager, connection: Any) -> None:
    await put_version(connection, "cron_a", name="a", queue_name="before")
    await put_version(connection, "cron_a", name="a", queue_name="now", version=2)
    outcomes = OUTCOMES
    for number, outcome in enumerate(outcomes):
        await put(connection, "cron_a", NOON + number * MINUTE, outcome, version=1 + number % 2)
    for choice in choices({"schedule_id": "cron_a"}, {"name": "a"}, {"since": NOON, "until": NOON + HOUR}):
        for outcome in outcomes:
            assert [run.outcome for run in await manager.runs(**choice, outcome=outcome)] == [outcome]
        for queue_name, expected in (("now", outcomes[1::2]), ("before", outcomes[::2])):
            found = await manager.runs(**choice, queue_name=queue_name, limit=2)
            assert [run.outcome for run in found] == [*reversed(expected)][:2]
            assert {run.queue_name for run in found} == {queue_name}


async def test_a_stretch_counts_where_it_overlaps_the_time(manager: QueueManager, connection: Any) -> None:
    """It stands under its last occurrence, also if that is after the end of the time."""
    stretch = {"missed_since": NOON - 5 * HOUR, "occurrences": 300}
    await put(connection, "cron_a", NOON, "missed", **stretch)
    await put(connection, "cron_a", NOON - 2 * HOUR, origin="trigger")
    for choice in choices({"schedule_id": "cron_a"}, {"name": "a"}, {}, {"outcome": "missed"}):
        found = await manager.runs(**choice, since=NOON - 6 * HOUR, until=NOON - HOUR)
        assert moments(found)[0] == NOON
        assert (found[0].missed_since, found[0].occurrences) == (NOON - 5 * HOUR, 300)
        assert len(found) == (1 if "outcome" in choice else 2)
        paged = await pages(manager, 1, by_cursor=True, **choice, since=NOON - 6 * HOUR, until=NOON - HOUR)
        assert paged == found
        assert moments(await manager.runs(**choice, since=NOON - 9 * HOUR, until=NOON - 5 * HOUR)) == []
        assert NOON in moments(await manager.runs(**choice, since=NOON, until=NOON + HOUR))


async def test_a_run_of_a_forgotten_version_is_shown_nevertheless(manager: QueueManager, connection: Any) -> None:
    await put(connection, "cron_a", NOON, message_id="msg_1")
    await connection.execute("DELETE FROM cron_schedule_versions")
    [run] = await manager.runs(schedule_id="cron_a")
    assert (run.schedule_name, run.queue_name, run.sink) == (None, None, None)
    assert run.message == MessageState("msg_1", "removed")


@pytest.mark.parametrize(
    ("choice", "field"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 10_001}, "limit"),
        ({"outcome": "lost"}, "outcome"),
        ({"since": datetime(2026, 1, 1)}, "since"),  # noqa: DTZ001 - that is the mistake
        ({"until": "yesterday"}, "until"),
        ({"after": 7}, "after"),
        ({"after": "cron_a"}, "after"),
        ({"after": "2026-01-01T00:00:00+00:00/"}, "after"),
        ({"after": "2026-01-01T00:00:00/cron_a"}, "after"),
        ({"name": ""}, "name"),
        ({"schedule_id": "\n"}, "schedule_id"),
        ({"workspace_id": " "}, "workspace_id"),
        ({"queue_name": 7}, "queue_name"),
        ({"since": datetime(2026, 2, 1, tzinfo=UTC), "until": datetime(2026, 1, 1, tzinfo=UTC)}, "since"),
    ],
)
async def test_what_cannot_be_meant_is_refused(manager: QueueManager, choice: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        await manager.runs(**choice)
    assert caught.value.field == field


# A busy ledger: DAYS days with `$1` runs each, of a thousand schedules, one in a hundred missed.
DAYS = 10
FILL = """
INSERT INTO cron_runs (schedule_id, scheduled_for, version, origin, outcome, ended_at, attempts, message_id)
SELECT 'cron_' || k % 1000, moment, 1, 'schedule', CASE WHEN k % 100 = 0 THEN 'missed' ELSE 'enqueued' END, moment, 1,
    'msg_' || day || '_' || k
FROM generate_series(0, 9) AS day, generate_series(1, $1::int) AS k,
    LATERAL (SELECT $2::timestamptz + day * interval '1 day' + k * interval '1 day' / $1 - interval '1 microsecond'
        AS moment) AS placed
ORDER BY moment
"""
FILL_VERSIONS = """
INSERT INTO cron_schedule_versions (schedule_id, version, holds_after, change, enabled, workspace_id, name, queue_name,
    anchor_at, jitter_us, priority, planned, created_at)
SELECT 'cron_' || k, 1, $1, 'created', true, 'ws_' || k % 100, 'name ' || k, 'queue', $1, 0, 2, 0, $1
FROM generate_series(0, 999) AS k
"""
FILL_MESSAGES = """
INSERT INTO queue_messages (id, queue_name, payload, completed_at)
SELECT message_id, 'queue', '{}', ended_at FROM cron_runs
"""


async def touched(database: Database, text: str, *arguments: object) -> int:
    """Buffers that a statement reads, planning aside."""
    async with database.connection() as connection:
        explain = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {database.sql(text)}"
        (plan,) = json.loads(await connection.fetchval(explain, *arguments))
    return int(plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"])


@pytest.mark.soak(small=5000, full=500_000)
async def test_a_page_costs_what_is_on_it(database: Database, connection: Any, size: int) -> None:
    """Whatever the ledger holds, and whatever the statistics say."""
    begin = NOON.replace(hour=0)
    for day in range(DAYS):
        await connection.execute("SELECT cron_make_partition('runs', $1)", (begin + day * DAY).date())
    await connection.execute(FILL_VERSIONS, begin)
    await connection.execute(FILL, size, begin, timeout=600)
    await connection.execute(FILL_MESSAGES, timeout=600)
    end = begin + DAYS * DAY
    minute = DAY * 100 / size  # with a hundred runs
    ids = [row[0] for row in await connection.fetch("SELECT message_id FROM cron_runs LIMIT 100")]
    nothing = (None, None, None, None, None)
    missed = (None, None, "missed", None, None)
    every = begin - DAY
    statements: dict[str, tuple[int, str, tuple[object, ...]]] = {
        "of a schedule": (60, run_sql.OF_SCHEDULES, (5, *nothing, every, None, None, ["cron_7"])),
        "of ten": (400, run_sql.OF_SCHEDULES, (5, *nothing, every, None, None, [f"cron_{k}" for k in range(10)])),
        "of a schedule, long ago": (
            *(200 + size // 1000, run_sql.OF_SCHEDULES),  # all of its runs of the one day, if the planner likes
            (5, *nothing, every, begin + DAY, begin + DAY, ["cron_7"]),
        ),
        "next page": (
            *(60, run_sql.OF_SCHEDULES),
            (5, end - DAY, "cron_7", None, None, None, every, None, None, ["cron_7"]),
        ),
        "missed, long ago": (400, run_sql.NOT_ENQUEUED, (50, *missed, begin, begin + 50 * minute, begin + 50 * minute)),
        "missed": (400, run_sql.NOT_ENQUEUED, (50, *missed, end - 50 * minute, None, None)),
        "named": (30, run_sql.SCHEDULES_NAMED, ("name 7", None)),
        "of a workspace": (60, run_sql.SCHEDULES_OF_WORKSPACE, ("ws_7",)),
        "messages": (600, queue_sql.MESSAGE_STATES, (NOON, ids)),
    }
    for analyse in (False, True):
        if analyse:
            await connection.execute("VACUUM ANALYZE", timeout=600)  # and what a BRIN index has not summarised
            # A range of pages per partition; or, in PostgreSQL 18, a probe per schedule if it has few.
            statements["of a time"] = (4900, run_sql.OF_TIME, (100, *nothing, end - minute, None, None))
            statements["of a time, long ago"] = (
                *(4900, run_sql.OF_TIME),
                (100, *nothing, begin, begin + minute, begin + minute),
            )
        costs = {name: await touched(database, text, *given) for name, (_, text, given) in statements.items()}
        print(f"\n{DAYS * size} runs, analysed: {analyse}; buffers: {costs}")  # noqa: T201
        assert {name: cost for name, cost in costs.items() if cost > statements[name][0]} == {}


async def test_a_busy_minute_is_enough_for_a_page(database: Database, connection: Any) -> None:
    """The time is read in parts, the newest first."""
    for second in range(50):
        await put(connection, "cron_a", NOON - timedelta(seconds=second))
    await put(connection, "cron_a", NOON - 20 * HOUR)
    asked: list[tuple[object, ...]] = []

    class Watched(Database):
        async def fetch(self, text: str, *arguments: object, **options: Any) -> Any:
            asked.append(arguments)
            return await database.fetch(text, *arguments, **options)

    repository = RunRepository(Watched(database._pool, Settings()))
    assert len(await repository.runs(RunChoice(), limit=50, now=NOON)) == 50
    assert [arguments[6] for arguments in asked] == [NOON - MINUTE]
    assert len(await repository.runs(RunChoice(), limit=51, now=NOON)) == 51
    assert [arguments[6] for arguments in asked[1:]] == [
        NOON - age for age in (MINUTE, 8 * MINUTE, 64 * MINUTE, 512 * MINUTE, DAY)
    ]
