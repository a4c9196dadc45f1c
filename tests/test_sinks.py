"""Sinks as an application declares them: what is accepted, what is refused at the door, and who knows of them."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import anyio
import pytest

from cron_ticks import LeasedTick, RejectTick, TableSink
from cron_ticks.errors import CronTicksError, InvalidInputError
from cron_ticks.settings import Settings
from support.watching import watching
from token_queue import QueueManager

TABLE = TableSink("jobs", {"id": "message_id", "body": "payload"})


async def publish(_ticks: Sequence[LeasedTick]) -> None: ...


class Publishing:
    async def __call__(self, _ticks: Sequence[LeasedTick]) -> None: ...


def plain(_ticks: Sequence[LeasedTick]) -> None: ...


@pytest.fixture
async def manager(settings: Settings, connection: Any) -> Any:
    await connection.execute("CREATE TABLE jobs (id text, body jsonb)")
    opened = QueueManager(settings=settings)
    opened.add_sink("outside", publish)
    opened.add_sink("table", TABLE)
    async with opened:
        yield opened


@pytest.mark.parametrize(
    ("name", "sink", "options", "problem"),
    [
        ("queue", publish, {}, "there is a sink 'queue' already: choose another name"),
        ("taken", publish, {}, "there is a sink 'taken' already: choose another name"),
        ("", publish, {}, "name: must not be empty or begin or end with a blank"),
        ("x", plain, {}, "sink: must be a TableSink, a FunctionSink or an async function, not <function plain"),
        ("x", None, {}, "sink: must be a TableSink, a FunctionSink or an async function, not None"),
        ("x", TABLE, {"batch_size": 5}, "batch_size: is for functions outside the database: leave it out"),
        ("x", publish, {"batch_size": 0}, "batch_size: must be a whole number from 1 to 10000, not 0"),
        ("x", publish, {"concurrency": "many"}, "concurrency: must be a whole number from 1 to 10000, not 'many'"),
    ],
)
def test_what_is_no_sink_is_refused(name: str, sink: Any, options: dict[str, Any], problem: str) -> None:
    manager = QueueManager(settings=Settings())
    manager.add_sink("taken", publish)
    with pytest.raises(CronTicksError) as raised:
        manager.add_sink(name, sink, **options)
    assert str(raised.value).startswith(problem)


def test_an_object_that_can_be_awaited_like_a_function_is_a_sink() -> None:
    QueueManager(settings=Settings()).add_sink("object", Publishing())


def test_a_function_can_be_declared_where_it_stands() -> None:
    manager = QueueManager(settings=Settings())
    assert manager.sink("here", batch_size=5)(publish) is publish
    with pytest.raises(CronTicksError, match="there is a sink 'here' already"):
        manager.sink("here")(publish)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"sink": "nowhere"}, "sink: there is no sink 'nowhere': declare it with add_sink(), or start a worker"),
        ({"sink": 7}, "sink: must be a string, not int"),
        ({"sink": []}, "sink: must be a string, not list"),
        (
            {"delivery": "at_least_once"},
            "delivery: must be exactly_once, because the sink 'queue' is in this database, not 'at_least_once'",
        ),
        (
            {"sink": "table", "delivery": "at_most_once"},
            "delivery: must be exactly_once, because the sink 'table' is in this database, not 'at_most_once'",
        ),
        (
            {"sink": "outside", "delivery": "exactly_once"},
            "delivery: must be at_least_once or at_most_once, because the sink 'outside' is outside this database",
        ),
        ({"overlap": "never"}, "overlap: must be one of allow, skip, queue_one, not 'never'"),
        ({"overlap": None}, "overlap: must be one of allow, skip, queue_one, not None"),
        ({"sink": "table", "overlap": "skip"}, "overlap: must be allow: the sink 'table' can't say when a message"),
        ({"sink": "outside", "overlap": "queue_one"}, "overlap: must be allow: the sink 'outside' can't say when"),
        ({"max_attempts": 0}, "max_attempts: must be a whole number from 1 to 1000, not 0"),
        ({"max_age": 0}, "max_age: must be from 1 ms to 365 days, not 0"),
        ({"max_age": float("nan")}, "max_age: must be from 1 ms to 365 days, not nan"),
        ({"backoff": timedelta(days=8)}, "backoff: must be from 1 ms to 7 days, not 8 days"),
        ({"backoff": "long"}, "backoff: must be seconds or a timedelta, not str"),
    ],
)
async def test_what_a_schedule_cant_have_is_refused_and_changes_nothing(
    manager: QueueManager, connection: Any, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidInputError) as raised:
        await manager.schedule("topic", every=60, **options)
    assert str(raised.value).startswith(problem)
    schedule = await manager.schedule("topic", every=60)
    with pytest.raises(InvalidInputError) as raised:
        await manager.update_schedule(schedule.id, **options)
    assert str(raised.value).startswith(problem)
    assert await manager.list_schedules() == [schedule]
    assert await connection.fetchval("SELECT count(*) FROM cron_schedule_versions") == 1


@pytest.mark.parametrize(
    ("sink", "delivery"), [("queue", "exactly_once"), ("table", "exactly_once"), ("outside", "at_least_once")]
)
async def test_a_sinks_kind_gives_the_guarantee(manager: QueueManager, sink: str, delivery: str) -> None:
    assert (await manager.schedule("topic", every=60, sink=sink)).delivery == delivery


async def test_declaring_the_same_again_changes_nothing_and_something_else_is_an_edit(
    manager: QueueManager, settings: Settings
) -> None:
    options: dict[str, Any] = {"sink": "outside", "delivery": "at_most_once", "max_attempts": 7}
    limits: dict[str, Any] = {"max_age": 3600, "backoff": timedelta(seconds=2)}
    first = await manager.schedule("topic", every=60, **options, **limits)
    assert await manager.schedule("topic", every=60, **options, **limits) == first
    assert (first.sink, first.delivery, first.overlap, first.max_attempts) == ("outside", "at_most_once", "allow", 7)
    assert (first.max_age, first.backoff) == (timedelta(hours=1), timedelta(seconds=2))
    other = QueueManager(settings=settings)
    other.add_sink("outside", publish)
    async with other:
        edited = await other.schedule("topic", every=60, sink="outside")
    assert (edited.version, edited.delivery, edited.max_attempts, edited.max_age) == (2, "at_least_once", None, None)


async def test_pending_ticks_go_where_an_edit_says(manager: QueueManager, connection: Any) -> None:
    schedule = await manager.schedule("topic", every=20, starts_at=await in_a_minute(connection))
    assert await sinks_of_ticks(connection) == {"queue"}
    edited = await manager.update_schedule(schedule.id, sink="outside")
    assert (edited.delivery, await sinks_of_ticks(connection)) == ("at_least_once", {"outside"})
    edited = await manager.update_schedule(schedule.id, delivery="at_most_once")
    edited = await manager.update_schedule(schedule.id, every=10)
    assert (edited.sink, edited.delivery) == ("outside", "at_most_once")
    edited = await manager.update_schedule(schedule.id, sink="queue", overlap="skip")
    assert (edited.delivery, edited.overlap, await sinks_of_ticks(connection)) == ("exactly_once", "skip", {"queue"})
    kept = await connection.fetch("SELECT sink, delivery, overlap FROM cron_schedule_versions ORDER BY version")
    assert [tuple(row) for row in kept] == [
        ("queue", "exactly_once", "allow"),
        ("outside", "at_least_once", "allow"),
        ("outside", "at_most_once", "allow"),
        ("outside", "at_most_once", "allow"),
        ("queue", "exactly_once", "skip"),
    ]


async def in_a_minute(connection: Any) -> Any:
    return await connection.fetchval("SELECT statement_timestamp() + interval '30 seconds'")


async def sinks_of_ticks(connection: Any) -> set[str]:
    return {row["sink"] for row in await connection.fetch("SELECT sink FROM cron_ticks")}


async def test_who_only_schedules_knows_the_sinks_that_a_worker_serves(
    manager: QueueManager, settings: Settings, dsn: str
) -> None:
    async with QueueManager(settings=settings) as scheduling, watching(dsn, "cron_sinks") as watch:
        with pytest.raises(InvalidInputError, match="there is no sink 'outside'"):
            await scheduling.schedule("topic", every=60, sink="outside")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: manager.run(handle_signals=False))
            await watch.until("SELECT count(*) = 2 FROM cron_sinks")
            assert (await scheduling.schedule("topic", every=60, sink="outside")).delivery == "at_least_once"
            assert (await scheduling.schedule("other", every=60, sink="table")).delivery == "exactly_once"
            edited = await scheduling.update_schedule((await scheduling.list_schedules())[0].id, every=30)
            assert edited.sink in {"outside", "table"}
            manager.stop()


async def test_an_edit_of_something_else_needs_no_sink(manager: QueueManager, settings: Settings) -> None:
    """A process that knows nothing of it can change the interval, though no worker has served it yet."""
    schedule = await manager.schedule("topic", every=60, sink="outside", delivery="at_most_once")
    async with QueueManager(settings=settings) as other:
        edited = await other.update_schedule(schedule.id, every=30)
    assert (edited.sink, edited.delivery, edited.interval) == ("outside", "at_most_once", timedelta(seconds=30))


async def test_a_worker_whose_sink_does_not_fit_refuses_to_start(settings: Settings) -> None:
    manager = QueueManager(settings=settings)
    manager.add_sink("gone", TableSink("not_there", {"id": "message_id"}))
    async with manager:
        with pytest.raises(InvalidInputError, match=r"sink 'gone': table: .*not_there"):
            await manager.run(handle_signals=False)


async def test_sinks_are_declared_before_the_worker_runs(manager: QueueManager, dsn: str) -> None:
    async with watching(dsn, "cron_sinks") as watch, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: manager.run(handle_signals=False))
        await watch.until("SELECT count(*) = 2 FROM cron_sinks")
        with pytest.raises(CronTicksError, match="declare sinks before run"):
            manager.add_sink("late", publish)
        manager.stop()


async def test_ticks_reach_the_sinks_of_a_running_worker(settings: Settings, dsn: str, connection: Any) -> None:
    """All kinds side by side, as an application has them."""
    await connection.execute("CREATE TABLE jobs (id text, body jsonb)")
    manager = QueueManager(settings=settings)
    got: dict[str, Any] = {}

    @manager.sink("outside")
    async def take(ticks: Sequence[LeasedTick]) -> list[object]:
        for tick in ticks:
            got[tick.message_id] = (tick.queue_name, tick.payload, tick.attempts, tick.recovery, tick.priority)
        return [RejectTick("not this") if tick.payload == "no" else None for tick in ticks]

    manager.add_sink("table", TABLE)
    async with manager, watching(dsn, "cron_ticks") as watch, anyio.create_task_group() as tasks:
        yes = await manager.schedule("topic", name="yes", every=3600, payload={"a": 1}, sink="outside", priority="high")
        no = await manager.schedule("topic", name="no", every=3600, payload="no", sink="outside")
        row = await manager.schedule("topic", name="row", every=3600, payload={"b": 2}, sink="table")
        tasks.start_soon(lambda: manager.run(handle_signals=False))
        await watch.until("SELECT count(*) = 3 FROM cron_runs")
        manager.stop()
    runs = {run["schedule_id"]: run for run in await connection.fetch("SELECT * FROM cron_runs")}
    assert got[runs[yes.id]["message_id"]] == ("topic", {"a": 1}, 1, False, "high")
    assert (runs[no.id]["outcome"], runs[no.id]["reason"], runs[no.id]["attempts"]) == (
        "failed",
        "RejectTick: not this",
        1,
    )
    jobs = await connection.fetch("SELECT id, body FROM jobs")
    assert [tuple(job) for job in jobs] == [(runs[row.id]["message_id"], '{"b": 2}')]
    assert await connection.fetchval("SELECT count(*) FROM queue_messages") == 0
