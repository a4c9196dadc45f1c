"""Firing into the same database: a tick that spoils its batch is isolated, tried again and given up."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import asyncpg
import pytest
from structlog.testing import capture_logs

from cron_ticks.database import Database
from cron_ticks.firing import REHEARSAL_SECONDS, RETRIES_AT_ONCE, TickFirer
from cron_ticks.loops import Pause
from cron_ticks.metrics import Metrics
from cron_ticks.repository import CronRepository
from cron_ticks.rows import FiredTicks, count_of
from cron_ticks.schedule_manager import ScheduleManager
from cron_ticks.schedules import define_schedule
from cron_ticks.settings import Settings
from cron_ticks.sinks import SameDatabaseSink, Sinks
from cron_ticks.user_sinks import FunctionSink, TableSink
from token_queue.queue_repository import QUEUE_SINK

pytestmark = pytest.mark.sql

SWALLOWED = "RaiseError: the sink did not take exactly one message per tick"

# What each kind of sink needs, where the messages are, and how one number is made poison.
JOBS = "CREATE TABLE jobs (id serial PRIMARY KEY, message_id text UNIQUE, number integer)"
FUNCTION = (
    JOBS
    + """;
CREATE TABLE poison (number integer, how text);
CREATE FUNCTION take(number integer, message_id text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    found text := (SELECT how FROM poison WHERE poison.number = take.number);
BEGIN
    INSERT INTO jobs (message_id, number) VALUES (take.message_id, take.number);
    CASE found
        WHEN 'raises' THEN RAISE EXCEPTION 'no % please', take.number;
        WHEN 'hangs' THEN PERFORM pg_sleep(60);
        WHEN 'is not allowed' THEN RAISE insufficient_privilege;
        ELSE NULL;
    END CASE;
END $$"""
)
SET_UP = {"queue": "", "table": JOBS, "function": FUNCTION}
POISON = {
    "queue": "ALTER TABLE queue_messages ADD CONSTRAINT theirs CHECK (payload ->> 'number' <> '{number}') NOT VALID",
    "table": "ALTER TABLE jobs ADD CONSTRAINT theirs CHECK (number <> {number})",
    "function": "INSERT INTO poison VALUES ({number}, 'raises')",
}
SENT = {
    "queue": "SELECT (payload ->> 'number')::int FROM queue_messages ORDER BY 1",
    "table": "SELECT number FROM jobs ORDER BY 1",
    "function": "SELECT number FROM jobs ORDER BY 1",
}
FIELDS = {"message_id": "message_id", "number": "payload.number"}


class Bench:
    """One sink and its firer; each pass is a new firer's, as after a restart."""

    def __init__(self, database: Database, sink: SameDatabaseSink, settings: Settings) -> None:
        self.cron = CronRepository(database, settings)
        self.sink = sink
        self.settings = settings
        self.metrics = Metrics()
        self.fired: list[FiredTicks] = []

    def firer(self, ticker_id: str = "ticker_me", *, hears: bool = False) -> TickFirer:
        async def on_fired(fired: Sequence[FiredTicks], *, more: bool) -> None:  # noqa: ARG001 - as the firer calls it
            self.fired += fired

        return TickFirer(
            self.cron,
            self.sink,
            self.settings,
            ticker_id=ticker_id,
            pause=Pause(),
            catch_up=ScheduleManager(self.cron.database, self.cron, self.settings).catch_up,
            hears=lambda: hears,
            on_fired=on_fired,
            metrics=self.metrics,
        )

    async def run_once(self) -> None:
        await self.firer().run_once()

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"cron_ticks_{name}_total", labels) or 0.0


async def bench_of(database: Database, connection: Any, kind: str, **changes: Any) -> Bench:
    settings = Settings.load(**({"ticker_batch_size": 1000} | changes))
    if SET_UP[kind]:
        await connection.execute(SET_UP[kind])
    if kind == "queue":
        return Bench(database, QUEUE_SINK, settings)
    sinks = Sinks(settings)
    sink = TableSink("jobs", FIELDS) if kind == "table" else FunctionSink("take", FIELDS)
    sinks.add("theirs", sink)
    [prepared] = await sinks.prepare(database)
    return Bench(database, prepared, settings)


async def put_in(
    bench: Bench, connection: Any, number: int, *, first: int = 0, turn: int = 0, age: float = 1, **options: Any
) -> None:
    """So many ticks that are due, numbered in the order of being due."""
    sink = bench.sink.name
    definition = define_schedule(
        "topic", every=3600, name=f"job {first}", sink=sink, sinks={"theirs": "same_database"}, **options
    )
    schedule = (await bench.cron.save_schedule(definition)).schedule
    await connection.execute("DELETE FROM cron_ticks WHERE schedule_id = $1 AND payload = '{}'", schedule.id)
    await connection.execute(
        """INSERT INTO cron_ticks (id, schedule_id, schedule_name, queue_name, payload, scheduled_for, execute_at,
            due_at, created_at, sink, turn, attempts)
        SELECT 'tick_' || number, $1, 'job', 'topic', jsonb_build_object('number', number), moment, moment, moment,
            moment, $2, $3::int, CASE WHEN $3 = 1 THEN 1 ELSE 0 END
        FROM generate_series($4::int, $5::int) AS number
        CROSS JOIN LATERAL (
            SELECT statement_timestamp() - $6::float * interval '1 s' + (number - $5 - 1) * interval '1 ms' AS moment
        ) AS due""",
        schedule.id,
        sink,
        turn,
        first,
        first + number - 1,
        age,
    )


async def make_due(connection: Any) -> None:
    """The pauses of what has failed are over."""
    await connection.execute("UPDATE cron_ticks SET due_at = statement_timestamp()")


async def sent(connection: Any, kind: str) -> list[int]:
    return [row[0] for row in await connection.fetch(SENT[kind])]


async def in_order(connection: Any) -> list[int]:
    return [row["number"] for row in await connection.fetch("SELECT number FROM jobs ORDER BY id")]


async def states(connection: Any) -> dict[int, tuple[int, int, str | None]]:
    """Of each tick that is left: its turn, its attempts and the error's first line."""
    rows = await connection.fetch(
        "SELECT payload ->> 'number', turn, attempts, split_part(error, E'\\n', 1) FROM cron_ticks"
    )
    return {int(number): (turn, attempts, error) for number, turn, attempts, error in rows}


async def outcomes(connection: Any) -> dict[str, int]:
    return dict(await connection.fetch("SELECT outcome, count(*) FROM cron_runs GROUP BY outcome"))


# One poison tick


@pytest.mark.parametrize("poison", [0, 617, 999])
@pytest.mark.parametrize("kind", ["queue", "table", "function"])
async def test_one_poison_tick_among_a_thousand(database: Database, connection: Any, kind: str, poison: int) -> None:
    """The others go out in the same pass; it is tried again after a pause, and has failed after its attempts."""
    bench = await bench_of(database, connection, kind)
    await put_in(bench, connection, 1000)
    await connection.execute(POISON[kind].format(number=poison))
    others = [number for number in range(1000) if number != poison]
    error = {
        "queue": 'CheckViolationError: new row for relation "queue_messages" violates check constraint "theirs"',
        "table": 'CheckViolationError: new row for relation "jobs" violates check constraint "theirs"',
        "function": f"RaiseError: no {poison} please",
    }[kind]
    with capture_logs() as logs:
        await bench.run_once()
    assert await sent(connection, kind) == others
    assert await outcomes(connection) == {"enqueued": 999}
    assert await states(connection) == {poison: (1, 1, error)}
    assert count_of(bench.fired) == 999
    assert bench.value("fired", origin="schedule") == 999
    assert [entry["tick_id"] for entry in logs if entry["event"] == "tick_not_sent"] == [f"tick_{poison}"]
    wait = await connection.fetchval("SELECT extract(epoch FROM due_at - statement_timestamp())::float FROM cron_ticks")
    assert 5 < wait <= 12
    await bench.run_once()
    assert await states(connection) == {poison: (1, 1, error)}
    await make_due(connection)
    await bench.run_once()
    assert await states(connection) == {poison: (1, 2, error)}
    await make_due(connection)
    with capture_logs() as logs:
        await bench.run_once()
    assert [(entry["event"], entry["error"].splitlines()[0]) for entry in logs] == [("tick_failed", error)]
    assert await states(connection) == {}
    assert await sent(connection, kind) == others
    row = await connection.fetchrow(
        """SELECT reason, attempts, ticker_id, message_id, recovered
        FROM cron_runs WHERE outcome = 'failed'"""
    )
    assert tuple(row) == (error, 3, "ticker_me", None, False)
    assert (bench.value("not_sent", sink=bench.sink.name), bench.value("failed", sink=bench.sink.name)) == (3, 1)


@pytest.mark.parametrize("kind", ["queue", "table", "function"])
async def test_poison_that_is_cured_goes_out_at_its_next_attempt(
    database: Database, connection: Any, kind: str
) -> None:
    bench = await bench_of(database, connection, kind)
    await put_in(bench, connection, 3)
    await connection.execute(POISON[kind].format(number=1))
    await bench.run_once()
    table = {"queue": "queue_messages", "table": "jobs"}.get(kind)
    await connection.execute("DELETE FROM poison" if table is None else f"ALTER TABLE {table} DROP CONSTRAINT theirs")
    await make_due(connection)
    await bench.run_once()
    assert await sent(connection, kind) == [0, 1, 2]
    rows = await connection.fetch("SELECT attempts, recovered FROM cron_runs ORDER BY scheduled_for")
    assert [tuple(row) for row in rows] == [(1, False), (2, False), (1, False)]


async def test_a_function_that_hangs_for_one_tick(database: Database, connection: Any) -> None:
    quick: dict[str, Any] = {"lease_seconds": 1, "lease_renewal_seconds": 0.5}
    bench = await bench_of(database, connection, "function", **quick)
    await put_in(bench, connection, 12, max_attempts=2)
    await connection.execute("INSERT INTO poison VALUES (5, 'hangs')")
    await bench.run_once()
    others = [number for number in range(12) if number != 5]
    assert await sent(connection, "function") == others
    assert await states(connection) == {5: (1, 1, "TimeoutError: it took too long")}
    await make_due(connection)
    await bench.run_once()
    assert await outcomes(connection) == {"enqueued": 11, "failed": 1}
    assert await sent(connection, "function") == others
    assert await states(connection) == {}


@pytest.mark.parametrize("kind", ["queue", "table", "function"])
async def test_a_poison_tick_that_stands_alone_is_isolated_too(database: Database, connection: Any, kind: str) -> None:
    bench = await bench_of(database, connection, kind)
    await put_in(bench, connection, 1)
    await connection.execute(POISON[kind].format(number=0))
    for attempts in (1, 2):
        await bench.run_once()
        assert (await states(connection))[0][:2] == (1, attempts)
        await make_due(connection)
    await bench.run_once()
    assert await outcomes(connection) == {"failed": 1}


async def test_a_poison_tick_whose_error_looks_like_the_sinks_is_given_up_too(
    database: Database, connection: Any
) -> None:
    """A row-level policy refuses it, say, while others may pass."""
    bench = await bench_of(database, connection, "function")
    await put_in(bench, connection, 4)
    await connection.execute("INSERT INTO poison VALUES (2, 'is not allowed')")
    await bench.run_once()
    assert (await states(connection))[2][:2] == (1, 1)
    for _ in range(2):
        await make_due(connection)
        await bench.run_once()
    assert await outcomes(connection) == {"enqueued": 3, "failed": 1}


# Several


async def test_several_poison_ticks_are_each_isolated(database: Database, connection: Any) -> None:
    bench = await bench_of(database, connection, "function")
    await put_in(bench, connection, 200)
    bad = {0, 50, 51, 52, 53, 54, 120, 199}
    await connection.executemany("INSERT INTO poison VALUES ($1, 'raises')", [(number,) for number in bad])
    await bench.run_once()
    assert await sent(connection, "function") == [number for number in range(200) if number not in bad]
    found = await states(connection)
    assert found == {number: (1, 1, f"RaiseError: no {number} please") for number in bad}


async def test_very_many_side_by_side_hold_up_nobody_either(database: Database, connection: Any) -> None:
    bench = await bench_of(database, connection, "function")
    await put_in(bench, connection, 200)
    bad = range(60, 120)
    await connection.executemany("INSERT INTO poison VALUES ($1, 'raises')", [(number,) for number in bad])
    await bench.run_once()
    assert await sent(connection, "function") == [number for number in range(200) if number not in bad]
    assert {number: state[:2] for number, state in (await states(connection)).items()} == dict.fromkeys(bad, (1, 1))
    assert bench.value("fired", origin="schedule") == count_of(bench.fired) == 140


async def test_firers_that_isolate_at_the_same_time_fire_each_tick_once(database: Database, connection: Any) -> None:
    bench = await bench_of(database, connection, "table")
    await put_in(bench, connection, 60)
    await connection.execute(POISON["table"].format(number=30))
    await asyncio.gather(*(bench.firer(f"ticker_{number}").run_once() for number in range(4)))
    await bench.run_once()
    assert await sent(connection, "table") == [number for number in range(60) if number != 30]
    assert (await states(connection))[30][:2] == (1, 1)
    assert count_of(bench.fired) == 59


# Trouble that is no tick's


async def test_a_table_that_is_gone_is_nobodys_fault(database: Database, connection: Any) -> None:
    bench = await bench_of(database, connection, "table")
    await put_in(bench, connection, 100)
    await connection.execute("ALTER TABLE jobs RENAME TO gone")
    for _ in range(5):
        with pytest.raises(asyncpg.UndefinedTableError):
            await bench.run_once()
    assert set((await states(connection)).values()) == {(0, 0, None)}
    assert len(await states(connection)) == 100
    await connection.execute("ALTER TABLE gone RENAME TO jobs")
    await bench.run_once()
    assert await sent(connection, "table") == list(range(100))
    assert await outcomes(connection) == {"enqueued": 100}
    assert bench.value("not_sent", sink="theirs") == 0


async def test_a_function_that_is_gone_is_nobodys_fault(database: Database, connection: Any) -> None:
    bench = await bench_of(database, connection, "function")
    await put_in(bench, connection, 10)
    await connection.execute("ALTER FUNCTION take RENAME TO gone")
    with pytest.raises(asyncpg.UndefinedFunctionError):
        await bench.run_once()
    assert set((await states(connection)).values()) == {(0, 0, None)}


async def test_trouble_of_the_server_is_nobodys_fault(
    database: Database, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = await bench_of(database, connection, "table")
    await put_in(bench, connection, 10)
    for error in (
        asyncpg.DiskFullError("full"),
        asyncpg.AdminShutdownError("stopping"),
        asyncpg.DeadlockDetectedError("deadlock"),
        asyncpg.SerializationError("serialization"),
        asyncpg.ReadOnlySQLTransactionError("a standby"),
        ConnectionResetError("gone"),
    ):

        async def fail(*_arguments: Any, _error: Exception = error, **_options: Any) -> Any:
            raise _error

        monkeypatch.setattr(bench.cron, "fire_due_ticks", fail)
        with pytest.raises(type(error)):
            await bench.run_once()
        monkeypatch.undo()
    assert set((await states(connection)).values()) == {(0, 0, None)}
    await bench.run_once()
    assert await sent(connection, "table") == list(range(10))


async def test_a_statement_of_our_own_queue_that_takes_too_long_is_nobodys_fault(
    database: Database, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = await bench_of(database, connection, "queue")
    await put_in(bench, connection, 2)

    async def fail(*_arguments: Any, **_options: Any) -> Any:
        raise TimeoutError

    monkeypatch.setattr(bench.cron, "fire_due_ticks", fail)
    with pytest.raises(TimeoutError):
        await bench.run_once()
    assert set((await states(connection)).values()) == {(0, 0, None)}


async def test_trouble_with_one_sink_is_none_of_anothers(database: Database, connection: Any) -> None:
    theirs = await bench_of(database, connection, "table")
    own = await bench_of(database, connection, "queue")
    await put_in(theirs, connection, 10)
    await put_in(own, connection, 10, first=100)
    await connection.execute("DROP TABLE jobs")
    with pytest.raises(asyncpg.UndefinedTableError):
        await theirs.run_once()
    await own.run_once()
    assert await sent(connection, "queue") == list(range(100, 110))
    assert (await states(connection)).keys() == set(range(10))


# A sink that swallows messages


SWALLOW = """
CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
CREATE TRIGGER swallow BEFORE INSERT ON {table} FOR EACH ROW WHEN ({condition}) EXECUTE FUNCTION swallow();
"""


@pytest.mark.parametrize(
    ("kind", "table", "condition"),
    [("table", "jobs", "NEW.number = 7"), ("queue", "queue_messages", "NEW.payload ->> 'number' = '7'")],
)
async def test_a_message_that_a_trigger_swallows_is_found_out(
    database: Database, connection: Any, kind: str, table: str, condition: str
) -> None:
    """Never is a tick recorded as sent that nobody got."""
    bench = await bench_of(database, connection, kind)
    await put_in(bench, connection, 20)
    await connection.execute(SWALLOW.format(table=table, condition=condition))
    await bench.run_once()
    assert await sent(connection, kind) == [number for number in range(20) if number != 7]
    assert await states(connection) == {7: (1, 1, SWALLOWED)}
    for _ in range(2):
        await make_due(connection)
        await bench.run_once()
    row = await connection.fetchrow("SELECT reason, attempts FROM cron_runs WHERE outcome = 'failed'")
    assert tuple(row) == (SWALLOWED, 3)
    assert await outcomes(connection) == {"enqueued": 19, "failed": 1}


async def test_a_trigger_that_swallows_everything_is_found_out(database: Database, connection: Any) -> None:
    bench = await bench_of(database, connection, "table")
    await put_in(bench, connection, 10)
    await connection.execute(SWALLOW.format(table="jobs", condition="true"))
    for _ in range(6):
        with suppress(asyncpg.RaiseError):
            await bench.run_once()
        await make_due(connection)
    assert await outcomes(connection) == {"failed": 10}
    assert await sent(connection, "table") == []


# What is more important


async def test_fresh_ticks_go_before_retries_before_catching_up(database: Database, connection: Any) -> None:
    """However long the others have been due."""
    bench = await bench_of(database, connection, "table")
    await put_in(bench, connection, 3, first=200, turn=2, age=3000)
    await put_in(bench, connection, 3, first=100, turn=1, age=2000)
    await put_in(bench, connection, 3, first=0, turn=0, age=1)
    await bench.run_once()
    assert await in_order(connection) == [0, 1, 2, 100, 101, 102, 200, 201, 202]


async def test_of_what_is_less_important_a_pass_takes_one_batch(database: Database, connection: Any) -> None:
    """Then it looks again for what is due now."""
    bench = await bench_of(database, connection, "table", ticker_batch_size=80)
    await put_in(bench, connection, 200, first=0, turn=0)
    await put_in(bench, connection, 200, first=1000, turn=1)
    await put_in(bench, connection, 200, first=2000, turn=2)
    await bench.run_once()
    order = await in_order(connection)
    assert order[:200] == list(range(200))
    assert order[200:] == [*range(1000, 1000 + RETRIES_AT_ONCE), *range(2000, 2080)]
    await put_in(bench, connection, 1, first=500)
    await bench.run_once()
    assert (await in_order(connection))[len(order)] == 500


async def test_retries_that_hang_do_not_hold_up_what_is_due(database: Database, connection: Any) -> None:
    quick: dict[str, Any] = {"lease_seconds": 1, "lease_renewal_seconds": 0.5}
    bench = await bench_of(database, connection, "function", **quick)
    await put_in(bench, connection, 3, first=100, turn=1, age=1000, max_attempts=10)
    await put_in(bench, connection, 10)
    await connection.execute("INSERT INTO poison SELECT number, 'hangs' FROM generate_series(100, 102) AS number")
    firing = asyncio.create_task(bench.run_once())
    other = bench.firer("ticker_other")
    await put_in(bench, connection, 5, first=50)
    await other._fire_turn(0)
    assert set(await sent(connection, "function")) >= set(range(50, 55))
    with suppress(TimeoutError):
        await firing
    assert await sent(connection, "function") == [*range(10), *range(50, 55)]
    assert {number for number, state in (await states(connection)).items() if state[1] > 1} <= {100, 101, 102}


async def test_retries_that_fail_again_do_not_keep_back_the_catching_up(database: Database, connection: Any) -> None:
    bench = await bench_of(database, connection, "function")
    await put_in(bench, connection, 5, first=100, turn=1, max_attempts=10)
    await put_in(bench, connection, 5, first=200, turn=2)
    await connection.execute("INSERT INTO poison SELECT number, 'raises' FROM generate_series(100, 104) AS number")
    await bench.run_once()
    assert await sent(connection, "function") == list(range(200, 205))
    assert {state[1] for state in (await states(connection)).values()} == {2}


PLANNED = "SELECT count(*) FROM pg_prepared_statements WHERE ltrim(statement, E'\\n') LIKE 'WITH clock%DELETE FROM%'"


async def test_after_a_quiet_time_a_firing_is_rehearsed_just_before_a_tick_is_due(
    database: Database, connection: Any
) -> None:
    bench = await bench_of(database, connection, "queue")
    firer = bench.firer(hears=True)
    await put_in(bench, connection, 1, age=-10)
    assert 9 < await firer.run_once() < 10 - REHEARSAL_SECONDS
    assert await database.fetchval(PLANNED) == 0
    await put_in(bench, connection, 1, first=1, age=-REHEARSAL_SECONDS)
    assert await firer.run_once() <= REHEARSAL_SECONDS
    assert await database.fetchval(PLANNED) == 1
    assert await connection.fetchval("SELECT count(*) FROM cron_ticks") == 2
    assert not bench.fired
    await connection.execute("UPDATE cron_ticks SET due_at = statement_timestamp() WHERE id = 'tick_1'")
    await firer.run_once()
    assert count_of(bench.fired) == 1


async def test_who_has_just_fired_rehearses_nothing(database: Database, connection: Any) -> None:
    bench = await bench_of(database, connection, "queue")
    firer = bench.firer(hears=True)
    await put_in(bench, connection, 1)
    await put_in(bench, connection, 1, first=1, age=-10)
    assert 10 - REHEARSAL_SECONDS < await firer.run_once() < 10
    assert count_of(bench.fired) == 1


async def test_behind_a_pooler_there_is_nothing_to_rehearse(database: Database, connection: Any) -> None:
    bench = await bench_of(database, connection, "queue", transaction_pooler=True)
    await put_in(bench, connection, 1, age=-10)
    assert 10 - REHEARSAL_SECONDS < await bench.firer(hears=True).run_once() < 10


async def test_the_debug_log_has_a_line_for_each_tick(database: Database, connection: Any) -> None:
    """Also for those that go to the same queue, which are counted together otherwise."""
    bench = await bench_of(database, connection, "queue", log_level="debug")
    await put_in(bench, connection, 3)
    with capture_logs() as logs:
        await bench.run_once()
    assert sorted(entry["tick_id"] for entry in logs if entry["event"] == "tick_fired") == [
        "tick_0",
        "tick_1",
        "tick_2",
    ]
    assert [entry["ticks"] for entry in logs if entry["event"] == "ticks_fired"] == [3]
    assert count_of(bench.fired) == len(bench.fired) == bench.value("fired", origin="schedule") == 3
