"""Publishing to a sink outside the database: batches, answers, poison, hanging calls, lost leases, stopping."""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import anyio
import asyncpg
import pytest
from anyio.abc import TaskGroup
from structlog.testing import capture_logs

from cron_ticks import publishing
from cron_ticks.database import Database
from cron_ticks.lease_repository import Leased
from cron_ticks.loops import Pause
from cron_ticks.metrics import Metrics
from cron_ticks.publishing import Publisher
from cron_ticks.repository import CronRepository
from cron_ticks.rows import LeasedTick
from cron_ticks.schedule_manager import ScheduleManager
from cron_ticks.schedules import define_schedule
from cron_ticks.settings import Settings
from cron_ticks.sinks import OutsideSink, RejectTick, UnknownOutcome

SECOND = timedelta(seconds=1)
WAIT_SECONDS = 30
LONG_LEASE: dict[str, Any] = {"lease_seconds": 600}
SHORT_LEASE: dict[str, Any] = {"lease_seconds": 1, "lease_renewal_seconds": 0.5}

Tick = LeasedTick
Publish = Callable[[Sequence[LeasedTick]], Any]


@dataclass
class Bench:
    """A publisher whose passes the test calls, and what its sink got."""

    publisher: Publisher
    pause: Pause
    tasks: TaskGroup
    metrics: Metrics
    cron: CronRepository
    calls: list[list[LeasedTick]] = field(default_factory=list)

    async def run(self) -> None:
        """Take all that is due, and wait until it has ended one way or another."""
        with anyio.fail_after(WAIT_SECONDS):
            while True:
                await self.publisher.run_once()
                if self.publisher._batches:
                    await self.pause.sleep(math.inf)
                elif all(wait > timedelta(0) for wait in (await self.cron.next_due_in("hooks")).values()):
                    return

    @property
    def numbers(self) -> list[list[int]]:
        """What was in each call."""
        return [sorted(tick.payload["number"] for tick in call) for call in self.calls]

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"cron_ticks_{name}_total", labels) or 0.0


@asynccontextmanager
async def publishing_to(
    database: Database,
    publish: Publish,
    *,
    batch_size: int = 100,
    concurrency: int = 4,
    ticker_id: str = "ticker_me",
    **changes: Any,
) -> AsyncIterator[Bench]:
    """A publisher; when the block ends, so have its calls."""
    settings = Settings.load(**(LONG_LEASE | changes))
    calls: list[list[LeasedTick]] = []

    async def noting(ticks: Sequence[LeasedTick]) -> Sequence[object] | None:
        calls.append(list(ticks))
        answers: Sequence[object] | None = await publish(ticks)
        return answers

    cron, pause, metrics = CronRepository(database, settings), Pause(), Metrics()
    async with anyio.create_task_group() as tasks:
        publisher = Publisher(
            cron,
            OutsideSink("hooks", noting, batch_size, concurrency),
            settings,
            ticker_id=ticker_id,
            tasks=tasks,
            pause=pause,
            catch_up=ScheduleManager(database, cron, settings).catch_up,
            metrics=metrics,
        )
        yield Bench(publisher, pause, tasks, metrics, cron, calls)


@pytest.fixture
def repository(database: Database, settings: Settings) -> CronRepository:
    return CronRepository(database, settings)


async def put_in(
    repository: CronRepository, connection: Any, number: int, *, attempts: int = 0, first: int = 0, **options: Any
) -> None:
    """So many ticks that are due, numbered in the order of being due."""
    chosen: dict[str, Any] = {"sink": "hooks", "sinks": {"hooks": "outside"}} | options
    definition = define_schedule("topic", every=3600, name=f"job {first}", **chosen)
    schedule = (await repository.save_schedule(definition)).schedule
    await connection.execute("DELETE FROM cron_ticks WHERE schedule_id = $1 AND payload = '{}'", schedule.id)
    await connection.execute(
        """INSERT INTO cron_ticks (id, schedule_id, schedule_name, queue_name, payload, scheduled_for, execute_at,
            due_at, created_at, sink, delivery, attempts, turn)
        SELECT 'tick_' || number, $1, 'job', 'topic', jsonb_build_object('number', number), moment, moment, moment,
            moment, 'hooks', $2, $3, $4
        FROM generate_series($5::int, $6::int) AS number
        CROSS JOIN LATERAL (
            SELECT statement_timestamp() - interval '2 s' + number * interval '1 ms' AS moment
        ) AS due""",
        schedule.id,
        schedule.delivery,
        attempts,
        1 if attempts else 0,
        first,
        first + number - 1,
    )


async def make_due(connection: Any) -> None:
    """The pauses of what has failed are over."""
    await connection.execute("UPDATE cron_ticks SET due_at = statement_timestamp() WHERE leased_until IS NULL")


async def end_leases(connection: Any) -> None:
    """Those of a worker that has died have run out."""
    await connection.execute(
        """UPDATE cron_ticks SET leased_until = statement_timestamp(), due_at = statement_timestamp()
        WHERE due_at < 'infinity'"""
    )


async def states(connection: Any) -> dict[int, tuple[int, bool, str | None]]:
    """Of each tick that is left in nobody's hands: attempts, whether the next is a recovery, the error."""
    rows = await connection.fetch(
        "SELECT payload ->> 'number', attempts, recovery, error FROM cron_ticks WHERE leased_by IS NULL"
    )
    return {int(number): (attempts, recovery, error) for number, attempts, recovery, error in rows}


async def outcomes(connection: Any) -> dict[str, int]:
    return dict(await connection.fetch("SELECT outcome, count(*) FROM cron_runs GROUP BY outcome"))


async def only_run(connection: Any) -> tuple[Any, ...]:
    [row] = await connection.fetch("SELECT outcome, reason, attempts, ticker_id, recovered FROM cron_runs")
    return tuple(row)


async def accept(_ticks: Sequence[Tick]) -> None: ...


def refusing(*bad: int, error: Callable[[str], Exception] = ValueError) -> Publish:
    """A sink that raises for a batch with one of these."""

    async def publish(ticks: Sequence[Tick]) -> None:
        for tick in ticks:
            if tick.payload["number"] in bad:
                raise error(f"can't take {tick.payload['number']}")

    return publish


# What a sink gets, and what it answers


@pytest.mark.sql
async def test_late_ticks_are_decided_about_before_they_are_delivered(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    """By their schedule's policy: the latest is made up. What was begun, and triggers, go out whatever it says."""
    await put_in(repository, connection, 5)
    await connection.execute(
        "UPDATE cron_ticks SET due_at = due_at - interval '1 hour', execute_at = execute_at - interval '1 hour'"
    )
    await connection.execute("UPDATE cron_ticks SET origin = 'trigger' WHERE id = 'tick_0'")
    await connection.execute("UPDATE cron_ticks SET attempts = 1 WHERE id = 'tick_1'")
    async with publishing_to(database, accept) as bench:
        for _ in range(3):
            await bench.publisher.run_once()
    assert sorted(number for call in bench.numbers for number in call) == [0, 1, 4]
    rows = await connection.fetch("SELECT outcome, count(*) FROM cron_runs GROUP BY outcome ORDER BY outcome")
    assert [tuple(row) for row in rows] == [("enqueued", 3), ("missed", 2)]


async def test_a_sink_gets_batches_and_what_it_takes_has_fired(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    await put_in(repository, connection, 25)
    async with publishing_to(database, accept, batch_size=10, concurrency=2) as bench:
        with capture_logs() as logs:
            await bench.run()
    assert sorted(len(call) for call in bench.calls) == [5, 10, 10]
    assert sorted(number for call in bench.numbers for number in call) == list(range(25))
    assert await outcomes(connection) == {"enqueued": 25}
    assert await connection.fetchval("SELECT count(*) FROM cron_ticks") == 0
    assert bench.value("fired", origin="schedule") == 25
    assert sorted(entry["ticks"] for entry in logs if entry["event"] == "ticks_fired") == [5, 10, 10]
    messages = await connection.fetch("SELECT message_id FROM cron_runs")
    assert {row["message_id"] for row in messages} == {tick.message_id for call in bench.calls for tick in call}


async def test_with_nothing_due_the_sink_is_not_called(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    await put_in(repository, connection, 1)
    await connection.execute("UPDATE cron_ticks SET due_at = due_at + interval '1 hour'")
    async with publishing_to(database, accept) as bench:
        assert 0 < await bench.publisher.run_once() < 1
    assert bench.calls == []


async def test_it_sleeps_no_longer_than_until_the_next_tick(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    await put_in(repository, connection, 1)
    await connection.execute("UPDATE cron_ticks SET due_at = statement_timestamp() + interval '20 s'")
    async with publishing_to(database, accept, ticker_interval_ms=60_000) as bench:
        assert 10 < await bench.publisher.run_once() <= 20


async def test_a_publisher_that_stops_takes_nothing_more(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    await put_in(repository, connection, 1)
    async with publishing_to(database, accept) as bench:
        bench.pause.stop()
        await bench.publisher.run_once()
    assert bench.calls == []
    assert await connection.fetchval("SELECT attempts FROM cron_ticks") == 0


@pytest.mark.parametrize("answers", [None, [None] * 4, (1, "x", False, 0), [{}, [], "", ...]])
async def test_what_is_answered_without_an_exception_was_taken(
    database: Database, repository: CronRepository, connection: Any, answers: Any
) -> None:
    async def publish(_ticks: Sequence[Tick]) -> Any:
        return answers

    await put_in(repository, connection, 4)
    async with publishing_to(database, publish) as bench:
        await bench.run()
    assert bench.numbers == [[0, 1, 2, 3]]
    assert await outcomes(connection) == {"enqueued": 4}


async def test_an_exception_in_the_answer_is_of_that_tick_alone(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    async def publish(ticks: Sequence[Tick]) -> Sequence[object]:
        async def send(tick: Tick) -> int:
            number: int = tick.payload["number"]
            match number:
                case 1:
                    raise ValueError("no such topic")
                case 2:
                    raise ConnectionError("no route")
                case 3:
                    raise RejectTick("nobody wants it")
                case 4:
                    raise asyncio.CancelledError
            return number

        return await asyncio.gather(*(send(tick) for tick in ticks), return_exceptions=True)

    await put_in(repository, connection, 6)
    async with publishing_to(database, publish) as bench:
        with capture_logs() as logs:
            await bench.run()
    assert bench.numbers == [[0, 1, 2, 3, 4, 5]]
    assert await outcomes(connection) == {"enqueued": 2, "failed": 1}
    assert await states(connection) == {
        1: (1, False, "ValueError: no such topic"),
        2: (1, True, "ConnectionError: no route"),
        4: (1, False, "CancelledError"),
    }
    failed = await connection.fetchval("SELECT reason FROM cron_runs WHERE outcome = 'failed'")
    assert failed == "RejectTick: nobody wants it"
    events = sorted((entry["event"], entry.get("tick_id")) for entry in logs if entry["event"] != "ticks_fired")
    assert events == [
        ("tick_failed", "tick_3"),
        ("tick_not_sent", "tick_1"),
        ("tick_not_sent", "tick_2"),
        ("tick_not_sent", "tick_4"),
    ]
    assert (bench.value("not_sent", sink="hooks"), bench.value("failed", sink="hooks")) == (4, 1)


@pytest.mark.parametrize("error", [UnknownOutcome("maybe"), ConnectionResetError("gone"), TimeoutError("too slow")])
@pytest.mark.parametrize("how", ["raised", "answered"])
async def test_an_error_after_which_it_may_have_been_sent_makes_the_next_attempt_a_recovery(
    database: Database, repository: CronRepository, connection: Any, error: Exception, how: str
) -> None:
    """So nothing is tried again in the same pass."""

    async def publish(ticks: Sequence[Tick]) -> Sequence[object]:
        if how == "raised":
            raise error
        return [error] * len(ticks)

    await put_in(repository, connection, 4)
    async with publishing_to(database, publish) as bench:
        await bench.run()
    assert bench.numbers == [[0, 1, 2, 3]]
    assert await states(connection) == dict.fromkeys(range(4), (1, True, f"{type(error).__name__}: {error}"))


@pytest.mark.parametrize("answers", ["abcd", b"abcd", [], [None] * 3, [None] * 5, 4, {1: 2}, iter([None] * 4)])
async def test_after_a_nonsensical_answer_nobody_knows(
    database: Database, repository: CronRepository, connection: Any, answers: Any
) -> None:
    """They may have been taken, so the next attempt says that it is a repeat."""

    async def publish(_ticks: Sequence[Tick]) -> Any:
        return answers

    await put_in(repository, connection, 4)
    async with publishing_to(database, publish) as bench:
        await bench.run()
    assert bench.numbers == [[0, 1, 2, 3]]
    error = "UnknownOutcome: the sink must answer None, or a list with an answer for each of 4 ticks"
    assert await states(connection) == dict.fromkeys(range(4), (1, True, error))


# Poison


@pytest.mark.sql
@pytest.mark.parametrize(("number", "poison"), [(1, 0), (2, 1), (50, 17), (1000, 0), (1000, 617), (1000, 999)])
async def test_the_neighbours_of_a_poison_tick_go_out_in_the_same_pass(
    database: Database, repository: CronRepository, connection: Any, number: int, poison: int
) -> None:
    await put_in(repository, connection, number)
    async with publishing_to(database, refusing(poison), batch_size=1000, concurrency=1) as bench:
        await bench.run()
        assert await outcomes(connection) == ({"enqueued": number - 1} if number > 1 else {})
        assert await states(connection) == {poison: (1, False, f"ValueError: can't take {poison}")}
        times = Counter(place for call in bench.numbers for place in call if poison not in call)
        assert times == dict.fromkeys(set(range(number)) - {poison}, 1)
        assert len(bench.calls) <= 21
        for attempts in (2, 3):
            bench.calls.clear()
            await make_due(connection)
            await bench.run()
            assert bench.numbers == [[poison]]
            [[tick]] = bench.calls
            assert (tick.attempts, tick.recovery) == (attempts, False)
        await make_due(connection)
        await bench.run()
        assert len(bench.calls) == 1
    failed = await connection.fetch("SELECT reason, attempts, ticker_id FROM cron_runs WHERE outcome = 'failed'")
    assert [tuple(row) for row in failed] == [(f"ValueError: can't take {poison}", 3, "ticker_me")]
    assert await connection.fetchval("SELECT count(*) FROM cron_ticks") == 0
    assert (bench.value("not_sent", sink="hooks"), bench.value("failed", sink="hooks")) == (3, 1)


async def test_several_poison_ticks_are_each_found(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    bad = {0, 20, 21, 22, 23, 24, 63}
    await put_in(repository, connection, 64)
    async with publishing_to(database, refusing(*bad)) as bench:
        await bench.run()
    assert (await states(connection)).keys() == bad
    assert await outcomes(connection) == {"enqueued": 57}


async def test_a_sink_that_takes_nothing_is_not_asked_for_each_tick(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    await put_in(repository, connection, 500)
    async with publishing_to(database, refusing(*range(500)), batch_size=500) as bench:
        await bench.run()
    assert len(bench.calls) < 30
    found = await states(connection)
    assert found.keys() == set(range(500))
    assert {(attempts, recovery) for attempts, recovery, _ in found.values()} == {(1, False)}


async def test_who_is_rejected_in_a_batch_is_found_and_has_failed_at_once(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    await put_in(repository, connection, 10)
    async with publishing_to(database, refusing(4, error=RejectTick)) as bench:
        await bench.run()
    assert await outcomes(connection) == {"enqueued": 9, "failed": 1}
    failed = await connection.fetchrow("SELECT reason, attempts FROM cron_runs WHERE outcome = 'failed'")
    assert tuple(failed) == ("RejectTick: can't take 4", 1)
    assert await connection.fetchval("SELECT count(*) FROM cron_ticks") == 0


async def test_nobody_is_rejected_without_having_been_asked_for_alone(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    """Isolation gives up after many rejections in a row; that says nothing of those behind."""
    await put_in(repository, connection, 100)
    async with publishing_to(database, refusing(*range(60), error=RejectTick)) as bench:
        await bench.run()
        await make_due(connection)
        await bench.run()
    assert await outcomes(connection) == {"enqueued": 40, "failed": 60}


# Hanging


@pytest.mark.sql
async def test_a_call_that_hangs_ends_at_its_deadline_and_is_repeated_alone_as_a_recovery(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    took: list[float] = []

    async def publish(ticks: Sequence[Tick]) -> None:
        begun = anyio.current_time()
        if any(tick.payload["number"] == 1 for tick in ticks):
            try:
                await anyio.sleep_forever()
            finally:
                took.append(anyio.current_time() - begun)

    await put_in(repository, connection, 3)
    async with publishing_to(database, publish, **SHORT_LEASE) as bench:
        with capture_logs() as logs:
            await bench.run()
        assert bench.numbers == [[0, 1, 2]]
        assert 0.8 < took[0] < 0.95
        found = await states(connection)
        assert {number: state[:2] for number, state in found.items()} == dict.fromkeys(range(3), (1, True))
        assert all(str(error).startswith("UnknownOutcome: no answer within 0.") for _, _, error in found.values())
        [warning] = [entry for entry in logs if entry["event"] == "publish_near_deadline"]
        assert (warning["sink"], warning["ticks"]) == ("hooks", 3)
        assert 0.8 < warning["deadline_seconds"] <= 0.9
        assert [entry["recovery"] for entry in logs if entry["event"] == "tick_not_sent"] == [True] * 3
        bench.calls.clear()
        await make_due(connection)
        await bench.run()
        assert sorted(bench.numbers) == [[0], [1], [2]]
        assert {(tick.attempts, tick.recovery) for [tick] in bench.calls} == {(2, True)}
        assert (await states(connection)).keys() == {1}
        await make_due(connection)
        await bench.run()
    assert await outcomes(connection) == {"enqueued": 2, "failed": 1}
    assert await connection.fetchval("SELECT bool_and(recovered) FROM cron_runs")
    assert bench.value("recovered", sink="hooks") == 2


async def test_a_call_that_answers_in_time_is_no_warning(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    await put_in(repository, connection, 3)
    async with publishing_to(database, accept, **SHORT_LEASE) as bench:
        with capture_logs() as logs:
            await bench.run()
            await anyio.sleep(0.7)  # longer than until the warning
    assert {entry["event"] for entry in logs} == {"ticks_fired"}


async def test_a_slow_call_is_warned_of_before_its_deadline(
    database: Database, repository: CronRepository, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def publish(_ticks: Sequence[Tick]) -> None:
        await warned.wait()

    def warn(publisher: Publisher, ticks: int, seconds: float) -> None:
        real_warning(publisher, ticks, seconds)
        warned.set()

    warned, real_warning = anyio.Event(), Publisher._warn
    monkeypatch.setattr(Publisher, "_warn", warn)
    await put_in(repository, connection, 1)
    async with publishing_to(database, publish, **SHORT_LEASE) as bench:
        with capture_logs() as logs:
            await bench.run()
    assert [entry["event"] for entry in logs] == ["publish_near_deadline", "ticks_fired"]
    assert await outcomes(connection) == {"enqueued": 1}


async def test_ticks_that_wait_for_their_turn_keep_their_leases(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    """A slow sink takes several leases' time for a batch of single calls; nobody takes over any of them."""

    async def publish(_ticks: Sequence[Tick]) -> None:
        await anyio.sleep(0.25)  # in sum: three leases
        stolen.append(await thief.batch_lease_ticks(sink="hooks", leased_by="ticker_other", limit=5))

    stolen: list[Leased] = []
    thief = repository
    await put_in(repository, connection, 6, attempts=1, max_attempts=10)
    quick: dict[str, Any] = {"lease_seconds": 0.5, "lease_renewal_seconds": 0.2}
    async with publishing_to(database, publish, concurrency=1, **quick) as bench:
        await bench.run()
    assert sorted(bench.numbers) == [[number] for number in range(6)]
    assert [leased.found for leased in stolen] == [0] * 6
    assert await outcomes(connection) == {"enqueued": 6}
    assert not await connection.fetchval("SELECT bool_or(recovered) FROM cron_runs")


# One at a time


@pytest.mark.sql
async def test_what_may_be_sent_once_goes_alone_and_once(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    async def publish(ticks: Sequence[Tick]) -> Sequence[object] | None:
        match ticks[0].payload["number"]:
            case 1:
                raise ValueError("not this one")
            case 2:
                await anyio.sleep_forever()
            case 3:
                return [OSError("nor this one")]
            case 4:
                return []
        return None

    await put_in(repository, connection, 6, delivery="at_most_once", max_attempts=5)
    async with publishing_to(database, publish, concurrency=10, **SHORT_LEASE) as bench:
        await bench.run()
        await make_due(connection)
        await bench.run()
    assert sorted(bench.numbers) == [[number] for number in range(6)]
    assert {(tick.attempts, tick.delivery) for [tick] in bench.calls} == {(1, "at_most_once")}
    assert await outcomes(connection) == {"enqueued": 2, "failed": 4}
    reasons = await connection.fetch("SELECT reason FROM cron_runs WHERE outcome = 'failed' ORDER BY scheduled_for")
    assert [row["reason"].split(":")[0] for row in reasons] == [
        "ValueError",
        "UnknownOutcome",
        "OSError",
        "UnknownOutcome",
    ]
    assert await connection.fetchval("SELECT count(*) FROM cron_ticks") == 0


async def test_what_may_be_sent_once_is_taken_over_by_nobody_from_its_call_on(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    """While it waits for its turn somebody may: it was not sent."""
    pinned: list[set[int]] = []

    async def publish(_ticks: Sequence[Tick]) -> None:
        rows = await connection.fetch("SELECT payload ->> 'number' FROM cron_ticks WHERE due_at = 'infinity'")
        pinned.append({int(row[0]) for row in rows})

    await put_in(repository, connection, 3, delivery="at_most_once")
    async with publishing_to(database, publish, concurrency=1) as bench:
        await bench.run()
    called = [number for [number] in bench.numbers]
    assert sorted(called) == [0, 1, 2]
    for place, number in enumerate(called):
        assert {number} <= pinned[place] <= set(called[: place + 1])


async def test_retries_go_alone_beside_the_batch(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    await put_in(repository, connection, 3, attempts=1)
    await put_in(repository, connection, 4, first=10)
    async with publishing_to(database, refusing(1)) as bench:
        await bench.run()
    assert sorted(bench.numbers) == [[0], [1], [2], [10, 11, 12, 13]]
    assert await outcomes(connection) == {"enqueued": 6}
    assert await states(connection) == {1: (2, False, "ValueError: can't take 1")}


async def test_what_a_dead_worker_had_in_hand_goes_together_once(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    """The second time one of them may be why: each goes alone."""
    await put_in(repository, connection, 4, max_attempts=4)
    for ticker_id in ("ticker_dead", "ticker_dead_too"):
        await repository.batch_lease_ticks(sink="hooks", leased_by=ticker_id, limit=100)
        await end_leases(connection)
        if ticker_id == "ticker_dead":
            await put_in(repository, connection, 2, first=10, max_attempts=4)
    async with publishing_to(database, accept) as bench:
        await bench.run()
    assert sorted(bench.numbers) == [[0], [1], [2], [3], [10, 11]]
    assert {tick.recovery for call in bench.calls for tick in call} == {True}
    assert await outcomes(connection) == {"enqueued": 6}


async def test_a_tick_that_has_fired_before_is_not_sent(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    await put_in(repository, connection, 2)
    await connection.execute(
        """INSERT INTO cron_runs (schedule_id, scheduled_for, version, origin, outcome, ended_at, attempts)
        SELECT schedule_id, scheduled_for, 1, 'schedule', 'enqueued', due_at, 1 FROM cron_ticks WHERE id = 'tick_0'"""
    )
    async with publishing_to(database, accept) as bench:
        await bench.run()
    assert bench.numbers == [[1]]
    assert bench.value("refused") == 1


# How many at once


@pytest.mark.parametrize("attempts", [0, 1])
async def test_never_more_calls_at_once_than_allowed(
    database: Database, repository: CronRepository, connection: Any, attempts: int
) -> None:
    """Neither with batches nor with single ticks."""
    running = most = 0
    all_there = anyio.Event()

    async def publish(_ticks: Sequence[Tick]) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == (2 if attempts else 3):
            all_there.set()
        await all_there.wait()
        for _ in range(3):
            await anyio.lowlevel.checkpoint()
        running -= 1

    await put_in(repository, connection, 40, attempts=attempts)
    async with publishing_to(database, publish, batch_size=7, concurrency=3) as bench:
        await bench.run()
    assert most == 3 or (attempts and most == 2)  # a call may be kept free of retries
    assert max(len(call) for call in bench.calls) == (1 if attempts else 7)
    assert sum(len(call) for call in bench.calls) == 40
    assert await outcomes(connection) == {"enqueued": 40}


async def test_no_more_is_leased_than_is_on_its_way(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    """The rest is for others."""
    both, go_on = anyio.Event(), anyio.Event()

    async def publish(_ticks: Sequence[Tick]) -> None:
        if len(bench.calls) == 2:
            both.set()
        await go_on.wait()

    await put_in(repository, connection, 10)
    async with publishing_to(database, publish, batch_size=2, concurrency=2) as bench:
        assert math.isinf(await bench.publisher.run_once())
        await both.wait()
        assert math.isinf(await bench.publisher.run_once())
        assert await connection.fetchval("SELECT count(*) FROM cron_ticks WHERE leased_by IS NOT NULL") == 4
        go_on.set()
        await bench.run()
    assert await outcomes(connection) == {"enqueued": 10}


async def test_a_call_that_hangs_holds_up_no_other(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    go_on = anyio.Event()

    async def publish(ticks: Sequence[Tick]) -> None:
        if ticks[0].payload["number"] == 0:
            await go_on.wait()
        elif len(bench.calls) == 20:
            others_done.set()

    others_done = anyio.Event()
    await put_in(repository, connection, 20)
    async with publishing_to(database, publish, batch_size=1, concurrency=2) as bench, asyncio.TaskGroup() as group:
        group.create_task(bench.run())
        with anyio.fail_after(WAIT_SECONDS):
            await others_done.wait()
        assert await connection.fetchval("SELECT count(*) FROM cron_runs") >= 18
        go_on.set()
    assert await outcomes(connection) == {"enqueued": 20}


async def test_fresh_ticks_do_not_wait_behind_retries_in_hand(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    """What is due now is more important, also while the sink is slow with what has failed before."""
    begun = anyio.Event()
    turns = anyio.Semaphore(0)

    async def publish(_ticks: Sequence[Tick]) -> None:
        begun.set()
        await turns.acquire()

    await put_in(repository, connection, 8, attempts=1)
    async with publishing_to(database, publish, batch_size=10, concurrency=2) as bench:
        await bench.publisher.run_once()
        with anyio.fail_after(WAIT_SECONDS):
            await begun.wait()
        await put_in(repository, connection, 1, first=100)
        await bench.publisher.run_once()
        for _ in range(9):
            turns.release()
        await bench.run()
    assert [100] in bench.numbers[:5]


async def test_retries_that_hang_leave_a_place_for_what_is_due_now(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    """However many batches of them there are."""
    begun, fresh, go_on = anyio.Event(), anyio.Event(), anyio.Event()

    async def publish(ticks: Sequence[Tick]) -> None:
        if ticks[0].payload["number"] == 100:
            fresh.set()
            return
        begun.set()
        await go_on.wait()

    await put_in(repository, connection, 20, attempts=1)
    async with publishing_to(database, publish, batch_size=2, concurrency=3) as bench:
        await bench.publisher.run_once()
        with anyio.fail_after(WAIT_SECONDS):
            await begun.wait()
        await put_in(repository, connection, 1, first=100)
        await bench.publisher.run_once()
        try:
            with anyio.fail_after(5):
                await fresh.wait()
        finally:
            go_on.set()
        await bench.run()
    assert await outcomes(connection) == {"enqueued": 21}


# Leases that are lost, and a server that is away


TAKE_OVER = """
UPDATE cron_ticks SET leased_by = 'ticker_other', leased_until = statement_timestamp() + interval '1 hour'
WHERE id = ANY ($1::text[])
"""


@pytest.mark.sql
@pytest.mark.parametrize("answer", ["taken", "failed", "raised"])
async def test_a_tick_that_was_taken_over_during_the_call_is_not_ended(
    database: Database, repository: CronRepository, connection: Any, answer: str
) -> None:
    async def publish(ticks: Sequence[Tick]) -> Sequence[object] | None:
        await connection.execute(TAKE_OVER, ["tick_1"])
        if answer == "raised" and len(ticks) == 3:
            raise ValueError
        return [ValueError("no") if tick.id == "tick_1" else None for tick in ticks] if answer == "failed" else None

    await put_in(repository, connection, 3)
    async with publishing_to(database, publish) as bench:
        with capture_logs() as logs:
            await bench.run()
    [lost] = [entry for entry in logs if entry["event"] == "tick_lease_lost"]
    assert (lost["tick_id"], lost["sink"], lost["maybe_delivered"]) == ("tick_1", "hooks", True)
    assert await outcomes(connection) == {"enqueued": 2}
    row = await connection.fetchrow("SELECT id, leased_by, attempts, error FROM cron_ticks")
    assert tuple(row) == ("tick_1", "ticker_other", 1, None)
    assert bench.value("fired", origin="schedule") == 2
    assert bench.value("not_sent", sink="hooks") == 0


async def test_a_tick_that_was_taken_over_before_its_call_is_not_sent(
    database: Database, repository: CronRepository, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "FRESH", -1)  # each call is preceded by a renewal

    async def publish(ticks: Sequence[Tick]) -> None:
        others = {f"tick_{number}" for number in range(3)} - {ticks[0].id}
        await connection.execute(TAKE_OVER, list(others))

    await put_in(repository, connection, 3, attempts=1)
    async with publishing_to(database, publish, concurrency=1) as bench:
        with capture_logs() as logs:
            await bench.run()
    assert len(bench.calls) == 1
    assert [entry["maybe_delivered"] for entry in logs if entry["event"] == "tick_lease_lost"] == [False, False]
    assert await outcomes(connection) == {"enqueued": 1}


class Away:
    """Stands for a method of the repository's: the server is away for so many calls."""

    def __init__(self, real: Callable[..., Any], times: float, error: Exception) -> None:
        self._real = real
        self._left = times
        self._error = error

    async def __call__(self, *arguments: Any, **options: Any) -> Any:
        if self._left > 0:
            self._left -= 1
            raise self._error
        return await self._real(*arguments, **options)


async def test_a_lease_that_can_not_be_renewed_before_a_call_is_none_of_the_other_calls_business(
    database: Database, repository: CronRepository, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They go on, or what may be sent once would be lost for a short trouble of the server's."""
    begun, away, go_on = anyio.Event(), anyio.Event(), anyio.Event()

    async def publish(_ticks: Sequence[Tick]) -> None:
        begun.set()
        await go_on.wait()

    async def renew(ids: Sequence[str], **options: Any) -> set[str]:
        renewed.append(ids)
        if len(renewed) == 2:
            await begun.wait()
            away.set()
            raise ConnectionResetError("gone")
        return await real_renew(ids, **options)

    renewed: list[Sequence[str]] = []
    await put_in(repository, connection, 2, delivery="at_most_once")
    async with publishing_to(database, publish, concurrency=2) as bench:
        real_renew = bench.cron.renew_leases
        monkeypatch.setattr(bench.cron, "renew_leases", renew)
        await bench.publisher.run_once()
        with anyio.fail_after(WAIT_SECONDS):
            await away.wait()
        await anyio.wait_all_tasks_blocked()
        go_on.set()
        await bench.run()
        await make_due(connection)
        await bench.run()
    assert await outcomes(connection) == {"enqueued": 2}


@pytest.mark.parametrize("answer", ["taken", "failed"])
async def test_an_outcome_is_written_when_the_server_is_back(
    database: Database, repository: CronRepository, connection: Any, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    async def publish(ticks: Sequence[Tick]) -> Sequence[object] | None:
        return None if answer == "taken" else [ValueError("no")] * len(ticks)

    await put_in(repository, connection, 3)
    async with publishing_to(database, publish) as bench:
        method = "delete_ticks" if answer == "taken" else "fail_ticks"
        error = ConnectionResetError("gone")
        monkeypatch.setattr(bench.cron, method, Away(getattr(bench.cron, method), 2, error))
        with capture_logs() as logs:
            await bench.run()
    assert bench.numbers == [[0, 1, 2]]
    assert [entry["error"] for entry in logs if entry["event"] == "outcome_not_written"] == [
        "ConnectionResetError: gone"
    ] * 2
    if answer == "taken":
        assert await outcomes(connection) == {"enqueued": 3}
    else:
        assert await states(connection) == dict.fromkeys(range(3), (1, False, "ValueError: no"))


async def test_an_outcome_that_can_not_be_written_while_the_lease_lasts_is_unknown(
    database: Database, repository: CronRepository, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put_in(repository, connection, 2)
    async with publishing_to(database, accept, **SHORT_LEASE) as bench:
        for method in ("delete_ticks", "renew_leases", "fail_ticks"):
            away = Away(getattr(bench.cron, method), math.inf, ConnectionResetError("gone"))
            monkeypatch.setattr(bench.cron, method, away)
        with capture_logs() as logs:
            await bench.run()
        monkeypatch.undo()
        assert {entry["event"] for entry in logs} == {
            "outcome_not_written",
            "leases_not_renewed",
            "delivery_failed",
        }
        rows = await connection.fetch("SELECT leased_by LIKE 'ticker_me.%', attempts FROM cron_ticks")
        assert [tuple(row) for row in rows] == [(True, 1)] * 2
        await end_leases(connection)
        await bench.run()
    assert bench.numbers == [[0, 1], [0, 1]]
    assert {(tick.attempts, tick.recovery) for tick in bench.calls[1]} == {(2, True)}
    assert await outcomes(connection) == {"enqueued": 2}


@pytest.mark.parametrize("answers", [True, False], ids=["answers", "hangs"])
@pytest.mark.parametrize(
    "error",
    [asyncpg.DiskFullError("disk full"), asyncpg.ReadOnlySQLTransactionError("a standby"), RuntimeError("a bug")],
    ids=["disk full", "read only", "bug"],
)
async def test_no_error_of_the_database_ends_the_worker(
    database: Database,
    repository: CronRepository,
    connection: Any,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    *,
    answers: bool,
) -> None:
    """The tick stays leased, and is a recovery for whoever takes it over."""

    async def publish(_ticks: Sequence[Tick]) -> None:
        if not answers and len(bench.calls) == 1:
            await anyio.sleep_forever()

    await put_in(repository, connection, 1)
    async with publishing_to(database, publish, **SHORT_LEASE) as bench:
        for method in ("delete_ticks", "renew_leases", "fail_ticks"):
            monkeypatch.setattr(bench.cron, method, Away(getattr(bench.cron, method), math.inf, error))
        with capture_logs() as logs:
            await bench.run()
        monkeypatch.undo()
        assert "delivery_failed" in {entry["event"] for entry in logs}
        await end_leases(connection)
        await bench.run()
    assert await only_run(connection) == ("enqueued", None, 2, "ticker_me", True)


async def test_a_sink_that_cancels_itself_hurts_its_own_batch_alone(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    async def publish(ticks: Sequence[Tick]) -> None:
        if ticks[0].payload["number"] == 0:
            raise asyncio.CancelledError

    await put_in(repository, connection, 4)
    async with publishing_to(database, publish, batch_size=2, concurrency=1) as bench:
        await bench.run()
    assert await outcomes(connection) == {"enqueued": 2}
    assert {number: state[:2] for number, state in (await states(connection)).items()} == {
        0: (1, True),
        1: (1, True),
    }


async def test_what_would_end_the_process_is_a_failure_of_the_batch(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    async def publish(_ticks: Sequence[Tick]) -> None:
        raise SystemExit(3)

    await put_in(repository, connection, 2)
    async with publishing_to(database, publish) as bench:
        await bench.run()
    assert await states(connection) == dict.fromkeys(range(2), (1, False, "SystemExit: 3"))


@pytest.mark.parametrize("answer", ["taken", "failed"])
async def test_a_tick_that_an_edit_has_locked_ends_when_it_is_free(
    database: Database, repository: CronRepository, connection: Any, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    """It is sent once, and its neighbours don't wait."""

    async def publish(ticks: Sequence[Tick]) -> Sequence[object] | None:
        return None if answer == "taken" else [ValueError("no")] * len(ticks)

    async def renew(ids: Sequence[str], **options: Any) -> set[str]:
        renewed = await real_renew(ids, **options)
        looked.set()
        return renewed

    looked = anyio.Event()
    await put_in(repository, connection, 2)
    async with publishing_to(database, publish) as bench:
        real_renew = bench.cron.renew_leases
        monkeypatch.setattr(bench.cron, "renew_leases", renew)
        await connection.execute("BEGIN")
        async with asyncio.TaskGroup() as group:
            await bench.publisher.run_once()
            await connection.execute("SELECT FROM cron_ticks WHERE id = 'tick_1' FOR UPDATE")
            group.create_task(bench.run())
            with anyio.fail_after(WAIT_SECONDS):
                await looked.wait()
            await connection.execute("COMMIT")
    assert bench.numbers == [[0, 1]]
    if answer == "taken":
        assert await outcomes(connection) == {"enqueued": 2}
    else:
        assert await states(connection) == dict.fromkeys(range(2), (1, False, "ValueError: no"))


# Stopping and starting again


@pytest.mark.sql
async def test_what_a_stopping_worker_has_in_hand_is_given_back_at_once(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    """As unsure, if the sink has it; no lease has to run out."""
    called = anyio.Event()

    async def publish(_ticks: Sequence[Tick]) -> None:
        called.set()
        await anyio.sleep_forever()

    await put_in(repository, connection, 3)
    await put_in(repository, connection, 2, first=10, attempts=1)
    async with publishing_to(database, publish, concurrency=1) as bench:
        await bench.publisher.run_once()
        with anyio.fail_after(WAIT_SECONDS):
            await called.wait()
        bench.tasks.cancel_scope.cancel()
    [in_the_sinks_hand] = bench.numbers
    begun = {0: 0, 1: 0, 2: 0, 10: 1, 11: 1}  # attempts before this one
    assert await states(connection) == {
        number: (attempts + 1, True, publishing.NO_OUTCOME) if number in in_the_sinks_hand else (attempts, False, None)
        for number, attempts in begun.items()
    }
    await make_due(connection)
    async with publishing_to(database, accept, ticker_id="ticker_next") as bench:
        await bench.run()
    repeated = {tick.payload["number"] for call in bench.calls for tick in call if tick.recovery}
    assert repeated == set(in_the_sinks_hand)
    assert await outcomes(connection) == {"enqueued": 5}


async def test_what_the_sink_never_saw_loses_no_attempt_when_its_worker_stops(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    """A deployment must not end what may be sent once, or what has its last attempt, if it was not sent at all."""
    called = anyio.Event()

    async def publish(_ticks: Sequence[Tick]) -> None:
        called.set()
        await anyio.sleep_forever()

    await put_in(repository, connection, 3, delivery="at_most_once")
    async with publishing_to(database, publish, concurrency=1) as bench:
        await bench.publisher.run_once()
        with anyio.fail_after(WAIT_SECONDS):
            await called.wait()
        bench.tasks.cancel_scope.cancel()
    assert await outcomes(connection) == {"failed": 1}
    await make_due(connection)
    async with publishing_to(database, accept) as bench:
        await bench.run()
    assert await outcomes(connection) == {"failed": 1, "enqueued": 2}


async def test_what_was_delivered_when_its_worker_stopped_is_known(
    database: Database, repository: CronRepository, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sink has answered: that much is still written, else it would be sent again or taken for lost."""
    writing = anyio.Event()
    await put_in(repository, connection, 2)
    await put_in(repository, connection, 1, first=10, delivery="at_most_once")
    async with publishing_to(database, accept) as bench:
        real_write = bench.cron.delete_ticks

        async def write(*arguments: Any, **options: Any) -> Any:
            writing.set()
            await anyio.sleep(0.05)  # a slow server
            return await real_write(*arguments, **options)

        monkeypatch.setattr(bench.cron, "delete_ticks", write)
        await bench.publisher.run_once()
        with anyio.fail_after(WAIT_SECONDS):
            await writing.wait()
        bench.tasks.cancel_scope.cancel()
    given_back = await states(connection)
    assert (await outcomes(connection)).get("enqueued", 0) + len(given_back) == 3
    assert (await outcomes(connection)) != {}


async def test_a_restart_forgets_nothing(database: Database, repository: CronRepository, connection: Any) -> None:
    await put_in(repository, connection, 2)
    for attempt in range(1, 4):
        async with publishing_to(database, refusing(0, 1), ticker_id=f"ticker_{attempt}") as bench:
            await bench.run()
        assert {tick.attempts for call in bench.calls for tick in call} == {attempt}
        await make_due(connection)
    async with publishing_to(database, refusing()) as bench:
        await bench.run()
    assert bench.calls == []
    rows = await connection.fetch("SELECT outcome, attempts, ticker_id FROM cron_runs")
    assert [tuple(row) for row in rows] == [("failed", 3, "ticker_3")] * 2
