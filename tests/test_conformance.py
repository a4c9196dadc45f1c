"""The conformance suite: good sinks of every kind pass it, and for each rule there is a sink that breaks just that."""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import anyio
import pytest

from cron_ticks import FunctionSink, LeasedTick, RejectTick, TableSink
from cron_ticks.errors import InvalidInputError
from cron_ticks.sinks import SameDatabaseSink
from support.processes import Processes
from token_queue.conformance import CHECKS, ConformanceError, Report, Subject, check_sink
from token_queue.queue_repository import QUEUE_SINK

POISON = {"poison": True}
HANG = {"hang": True}
SAME_DATABASE = {"nothing_due", "arrives", "payloads", "batches", "two_pods", "rolled_back"}
OUTSIDE = SAME_DATABASE - {"rolled_back"} | {"answers", "recovery", "repeat", "at_most_once"}

# Another process that keeps what it is sent: a line per request, a line per answer.
RECEIVER = """
import asyncio, json

kept = []

async def serve(reader, writer):
    async for line in reader:
        request = json.loads(line)
        if request is not None:
            kept.extend(request)
        writer.write((json.dumps(kept if request is None else "kept") + "\\n").encode())
        await writer.drain()
    writer.close()

async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=2**24)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


class Receiver:
    """A good outside sink, in this process; broken ones change a part of it."""

    def __init__(self) -> None:
        self.kept: list[tuple[str, Any]] = []

    async def publish(self, ticks: Sequence[LeasedTick]) -> Sequence[object] | None:
        return await asyncio.gather(*map(self.take, ticks), return_exceptions=True)

    async def take(self, tick: LeasedTick) -> object:
        if tick.payload == POISON:
            raise ValueError("poison")
        if tick.payload == HANG:
            await anyio.sleep_forever()
        self.keep(tick.message_id, tick.payload)
        return None

    def keep(self, message_id: str, payload: Any) -> None:
        self.kept.append((message_id, json.loads(json.dumps(payload))))

    async def delivered(self) -> Sequence[tuple[str, Any]]:
        return self.kept


def subject(receiver: Receiver, **changes: Any) -> Subject:
    return quick(receiver.publish, receiver.delivered, **{"poison": POISON, **changes})


def quick(sink: Any, delivered: Any, **changes: Any) -> Subject:
    options = {"batch_size": 10, "lease_seconds": 2.0, "arrival_seconds": 0.2, **changes}
    return Subject(sink, delivered, **options)


def reading(
    connection: Any, query: str = "SELECT id, body FROM jobs"
) -> Callable[[], Awaitable[list[tuple[str, Any]]]]:
    async def delivered() -> list[tuple[str, Any]]:
        return [(row[0], json.loads(row[1])) for row in await connection.fetch(query)]

    return delivered


JOBS = "CREATE TABLE jobs (id text, body jsonb)"
TABLE_SINK = TableSink("jobs", {"id": "message_id", "body": "payload"})
FUNCTION_SINK = FunctionSink("enqueue", {"id": "message_id", "body": "payload"})


def function(body: str, declare: str = "") -> str:
    return f"""{JOBS}; CREATE FUNCTION enqueue(id text, body jsonb) RETURNS void LANGUAGE plpgsql AS $function$
        {declare} BEGIN {body} END $function$"""


INSERT = "INSERT INTO jobs VALUES (id, body);"
REFUSE_POISON = f"""IF body = '{json.dumps(POISON)}' THEN RAISE EXCEPTION 'poison'; END IF;"""


async def schemas(connection: Any) -> list[str]:
    rows = await connection.fetch("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'conformance%'")
    return [row[0] for row in rows]


@pytest.mark.sql
async def test_our_own_queue(dsn: str, connection: Any) -> None:
    delivered = reading(connection, "SELECT id, payload FROM conformance_own.queue_messages")
    report = await check_sink(dsn, quick(QUEUE_SINK, delivered), schema="conformance_own")
    assert set(report.passed) == SAME_DATABASE
    assert report.skipped["poison"] == "the subject has no poison="
    assert report.skipped["repeat"] == "only for sinks outside the database"
    assert await schemas(connection) == []


@pytest.mark.sql
async def test_a_table(dsn: str, connection: Any) -> None:
    await connection.execute(JOBS)
    await connection.execute(f"ALTER TABLE jobs ADD CHECK (body <> '{json.dumps(POISON)}')")
    await connection.execute("INSERT INTO jobs VALUES ('before', '{}'), ('before', '{}')")
    report = await check_sink(dsn, quick(TABLE_SINK, reading(connection), poison=POISON))
    assert set(report.passed) == SAME_DATABASE | {"poison"}


@pytest.mark.sql
async def test_a_function_that_may_hang(dsn: str, connection: Any) -> None:
    hang = f"IF body = '{json.dumps(HANG)}' THEN PERFORM pg_sleep(60); END IF;"
    await connection.execute(function(f"{hang} {REFUSE_POISON} {INSERT}"))
    report = await check_sink(dsn, quick(FUNCTION_SINK, reading(connection), poison=POISON, hang=HANG, lease_seconds=1))
    assert set(report.passed) == SAME_DATABASE | {"poison", "hang"}


@pytest.mark.sql
async def test_an_outside_sink_that_answers_for_each_tick(dsn: str, connection: Any) -> None:
    report = await check_sink(dsn, subject(Receiver(), hang=HANG, lease_seconds=1))
    assert set(report.passed) == OUTSIDE | {"poison", "hang"}
    assert await schemas(connection) == []


@pytest.mark.sql
async def test_an_outside_sink_that_takes_all_or_nothing(dsn: str) -> None:
    class Atomic(Receiver):
        async def publish(self, ticks: Sequence[LeasedTick]) -> None:
            if any(tick.payload == POISON for tick in ticks):
                raise RejectTick("poison")
            for tick in ticks:
                self.keep(tick.message_id, tick.payload)

    assert set((await check_sink(dsn, subject(Atomic()))).passed) == OUTSIDE | {"poison"}


async def test_a_sink_that_takes_one_at_a_time(dsn: str) -> None:
    report = await check_sink(dsn, subject(Receiver(), batch_size=1, concurrency=1))
    assert set(report.passed) == OUTSIDE | {"poison"}


async def test_a_receiver_that_knows_repeats(dsn: str) -> None:
    class Deduplicating(Receiver):
        def keep(self, message_id: str, payload: Any) -> None:
            if message_id not in dict(self.kept):
                super().keep(message_id, payload)

    assert set((await check_sink(dsn, subject(Deduplicating()))).passed) == OUTSIDE | {"poison"}


@pytest.mark.sql
async def test_a_receiver_in_another_process(dsn: str, processes: Processes) -> None:
    port = int(await (await processes.start(sys.executable, "-c", RECEIVER)).first_output_line())

    async def ask(request: object) -> Any:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
        writer.write((json.dumps(request) + "\n").encode())
        answer = json.loads(await reader.readline())
        writer.close()
        await writer.wait_closed()
        return answer

    async def publish(ticks: Sequence[LeasedTick]) -> None:
        assert await ask([(tick.message_id, tick.payload) for tick in ticks]) == "kept"

    async def delivered() -> list[tuple[str, Any]]:
        return [(message_id, payload) for message_id, payload in await ask(None)]

    assert set((await check_sink(dsn, quick(publish, delivered))).passed) == OUTSIDE


async def test_a_receiver_of_which_only_the_ids_are_seen(dsn: str) -> None:
    receiver = Receiver()

    async def delivered() -> list[str]:
        return [message_id for message_id, _ in receiver.kept]

    report = await check_sink(dsn, quick(receiver.publish, delivered))
    assert report.skipped["payloads"] == "delivered() answers no payloads"


async def test_payloads_of_ones_own(dsn: str, connection: Any) -> None:
    await connection.execute("CREATE TABLE jobs (id text, body jsonb, kind text NOT NULL)")
    sink = TableSink("jobs", {"id": "message_id", "body": "payload", "kind": "payload.kind"})
    options: dict[str, Any] = {"payloads": [{"kind": "report"}, {"kind": "backup"}], "poison": {"kind": None}}
    report = await check_sink(dsn, quick(sink, reading(connection), **options))
    assert set(report.passed) == SAME_DATABASE | {"poison"}


async def test_what_arrives_later_is_waited_for(dsn: str) -> None:
    class Slow(Receiver):
        async def delivered(self) -> Sequence[tuple[str, Any]]:
            seen = list(self.kept)
            await anyio.sleep(0.1)
            return seen

    await check_sink(dsn, subject(Slow(), arrival_seconds=5.0))


def test_a_report_has_a_line_per_check() -> None:
    report = Report({"arrives": "Each tick arrives"}, {"poison": "the subject has no poison="})
    assert str(report).splitlines() == [
        "ok       arrives       Each tick arrives",
        "skipped  poison        the subject has no poison=",
    ]


async def test_a_schema_that_exists_is_left_alone(dsn: str, connection: Any) -> None:
    await connection.execute("CREATE SCHEMA theirs")
    with pytest.raises(InvalidInputError, match="exists already"):
        await check_sink(dsn, subject(Receiver()), schema="theirs")
    assert await connection.fetchval("SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = 'theirs')")


@pytest.mark.sql
async def test_nothing_is_left_when_it_is_cancelled(dsn: str, connection: Any) -> None:
    begun = anyio.Event()

    class Waiting(Receiver):
        async def take(self, tick: LeasedTick) -> object:  # noqa: ARG002
            begun.set()
            await anyio.sleep_forever()
            return None

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(check_sink, dsn, subject(Waiting(), lease_seconds=60))
        await begun.wait()
        assert len(await schemas(connection)) == 1
        tasks.cancel_scope.cancel()
    assert await schemas(connection) == []


async def test_a_table_that_does_not_fit_is_the_callers_mistake(dsn: str, connection: Any) -> None:
    await connection.execute("CREATE TABLE jobs (id text)")
    with pytest.raises(InvalidInputError, match="no such column"):
        await check_sink(dsn, quick(TABLE_SINK, reading(connection)))
    assert await schemas(connection) == []


async def test_without_payloads_nothing_can_be_checked(dsn: str) -> None:
    with pytest.raises(InvalidInputError, match="at least one"):
        await check_sink(dsn, subject(Receiver(), payloads=[]))


# Sinks in the same database that break a rule: the check that finds it, what it says, and how they are made.

TRIGGER = """
CREATE FUNCTION spoil() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body} END $$;
CREATE TRIGGER spoil {when} ON jobs FOR EACH {each} EXECUTE FUNCTION spoil()
"""


def table(when: str, body: str, each: str = "ROW") -> tuple[TableSink, str]:
    return TABLE_SINK, f"{JOBS}; {TRIGGER.format(when=when, body=body, each=each)}"


BROKEN_IN_DATABASE: dict[str, tuple[str, str, tuple[Any, str]]] = {
    "a trigger that writes for every statement": (
        "nothing_due",
        "'nobody' arrived",
        table("AFTER INSERT", "INSERT INTO log VALUES ('nobody', '{}'); RETURN NULL;", "STATEMENT"),
    ),
    "a statement that looks at ticks which are not due": (
        "nothing_due",
        "arrived 1 times, and 0 is the most",
        (
            SameDatabaseSink(
                "queue",
                """INSERT INTO jobs SELECT 'msg_' || substr(id, 6), payload FROM {schema}.cron_ticks
                WHERE due_at > statement_timestamp() RETURNING 1""",
            ),
            JOBS,
        ),
    ),
    "a trigger that swallows rows": (
        "arrives",
        "failed: RaiseError: the sink did not take exactly one message per tick",
        table("BEFORE INSERT", "RETURN CASE WHEN NEW.body <> '{}' THEN NEW END;"),
    ),
    "a function that writes twice": ("arrives", "arrived 2 times", (FUNCTION_SINK, function(INSERT * 2))),
    "ids of their own": (
        "arrives",
        "is no tick's message id",
        table("BEFORE INSERT", "NEW.id := md5(NEW.id); RETURN NEW;"),
    ),
    "a function that may not write": (
        "arrives",
        "InsufficientPrivilegeError",
        (FUNCTION_SINK, function("RAISE insufficient_privilege;")),
    ),
    "a server in trouble": (
        "arrives",
        "it stopped with DiskFullError",
        (FUNCTION_SINK, function("RAISE disk_full;")),
    ),
    "a trigger that cleans payloads": (
        "payloads",
        "arrived as",
        table("BEFORE INSERT", "NEW.body := jsonb_strip_nulls(NEW.body); NEW.body := '[1]'; RETURN NEW;"),
    ),
    "a table that keeps the last few": (
        "batches",
        "did not arrive",
        table(
            "AFTER INSERT",
            """DELETE FROM jobs WHERE ctid = ANY (ARRAY(SELECT ctid FROM jobs ORDER BY id DESC OFFSET 20));
            RETURN NULL;""",
            "STATEMENT",
        ),
    ),
    "a function that gives way to others": (
        "two_pods",
        "did not arrive",
        (
            FUNCTION_SINK,
            function(f"IF pg_try_advisory_xact_lock(7) THEN PERFORM pg_sleep(0.005); {INSERT} END IF;"),
        ),
    ),
    "a function that writes where nothing is rolled back": (
        "rolled_back",
        "arrived 1 times, and 0 is the most",
        (
            FUNCTION_SINK,
            function(
                """EXECUTE format('COPY (SELECT %L::jsonb) TO %L', body,
                current_setting('data_directory') || '/conformance_' || id);"""
            ),
        ),
    ),
    "a function that hides its errors": (
        "poison",
        "the ledger says: enqueued; failed is right",
        (FUNCTION_SINK, function(f"{REFUSE_POISON} {INSERT} EXCEPTION WHEN raise_exception THEN NULL;")),
    ),
    "a function that takes poison": (
        "poison",
        "arrived 1 times, and 0 is the most",
        (FUNCTION_SINK, function(INSERT)),
    ),
    "a function that can't be cancelled": (
        "hang",
        "the ledger says: enqueued; failed is right",
        (
            FUNCTION_SINK,
            function(
                f"""{REFUSE_POISON} IF body <> '{json.dumps(HANG)}' THEN {INSERT} ELSE PERFORM pg_sleep(60); END IF;
                EXCEPTION WHEN query_canceled THEN RETURN;"""
            ),
        ),
    ),
}
READ_FILES = """
SELECT substr(name, 13), replace(pg_read_file(name), '\\\\', '\\')
FROM pg_ls_dir('.') AS name
WHERE name ~ '^conformance_msg'
"""


@pytest.mark.sql
@pytest.mark.parametrize("name", BROKEN_IN_DATABASE)
async def test_a_broken_sink_in_the_database(dsn: str, connection: Any, name: str) -> None:
    check, problem, (sink, script) = BROKEN_IN_DATABASE[name]
    await connection.execute(f"CREATE TABLE log (id text, body jsonb); {script}")
    query = READ_FILES if check == "rolled_back" else "SELECT * FROM jobs UNION ALL SELECT * FROM log"
    with pytest.raises(ConformanceError) as raised:
        await check_sink(dsn, quick(sink, reading(connection, query), poison=POISON, hang=HANG, lease_seconds=1))
    assert (raised.value.check, problem in raised.value.problem) == (check, True), str(raised.value)
    assert await schemas(connection) == []


# Outside sinks that break a rule. What they do is the same whatever the server is.


class Heartbeat(Receiver):
    """Sends something of its own now and then."""

    async def delivered(self) -> Sequence[tuple[str, Any]]:
        self.kept.append((f"heartbeat {len(self.kept)}", {}))
        return self.kept


class Status(Receiver):
    """Answers what its server says."""

    async def publish(self, ticks: Sequence[LeasedTick]) -> Any:
        await super().publish(ticks)
        return "200 OK"


class OneAnswer(Receiver):
    """Answers once for all."""

    async def publish(self, ticks: Sequence[LeasedTick]) -> Any:
        await super().publish(ticks)
        return [None]


class ErrorClass(Receiver):
    """Answers exceptions that nobody made."""

    async def publish(self, ticks: Sequence[LeasedTick]) -> Any:
        return [type(answer) if answer else None for answer in await super().publish(ticks) or []]


class OwnIds(Receiver):
    """Draws ids."""

    def keep(self, message_id: str, payload: Any) -> None:
        super().keep(f"{message_id}-{len(self.kept)}", payload)


class Twice(Receiver):
    """Makes sure."""

    def keep(self, message_id: str, payload: Any) -> None:
        super().keep(message_id, payload)
        super().keep(message_id, payload)


class RaisesAfterwards(Receiver):
    """Has taken what it says that it hasn't."""

    async def publish(self, ticks: Sequence[LeasedTick]) -> None:
        await super().publish(ticks)
        raise ConnectionError("the answer got lost")


class ForgetsLists(Receiver):
    """Takes objects and texts alone, and says nothing."""

    async def take(self, tick: LeasedTick) -> object:
        return None if isinstance(tick.payload, list) else await super().take(tick)


class FloatNumbers(Receiver):
    """Reads JSON as JavaScript does."""

    def keep(self, message_id: str, payload: Any) -> None:
        self.kept.append((message_id, json.loads(json.dumps(payload), parse_int=float)))


class MixedUp(Receiver):
    """Gives all of a batch the payload of its first."""

    async def publish(self, ticks: Sequence[LeasedTick]) -> None:
        for tick in ticks:
            self.keep(tick.message_id, ticks[0].payload)


class FirstFew(Receiver):
    """Sends the first nine of a batch."""

    async def publish(self, ticks: Sequence[LeasedTick]) -> None:
        await super().publish(ticks[:9])


class OneAtATime(Receiver):
    """Ignores calls while it is busy."""

    busy = False

    async def publish(self, ticks: Sequence[LeasedTick]) -> Sequence[object] | None:
        if self.busy:
            return None
        self.busy = True
        await anyio.sleep(0.05)
        self.busy = False
        return await super().publish(ticks)


class HidesErrors(Receiver):
    """Nothing ever goes wrong."""

    async def publish(self, ticks: Sequence[LeasedTick]) -> None:
        await super().publish(ticks)


class HalfABatch(Receiver):
    """Raises with a part of the batch sent."""

    async def publish(self, ticks: Sequence[LeasedTick]) -> None:
        for tick in ticks:
            await self.take(tick)


class Unordered(Receiver):
    """Answers as answers come."""

    async def publish(self, ticks: Sequence[LeasedTick]) -> Sequence[object] | None:
        answers = await super().publish(ticks) or []
        return sorted(answers, key=lambda answer: answer is None)


class OneRefusalRefusesAll(Receiver):
    """Says of all what holds for one."""

    async def publish(self, ticks: Sequence[LeasedTick]) -> Sequence[object] | None:
        if any(tick.payload == POISON for tick in ticks):
            return [RejectTick("poison")] * len(ticks)
        return await super().publish(ticks)


class Stubborn(Receiver):
    """Goes on for a while after it was cancelled."""

    async def publish(self, ticks: Sequence[LeasedTick]) -> Sequence[object] | None:
        until = time.monotonic() + 3
        while any(tick.payload == HANG for tick in ticks) and time.monotonic() < until:
            with suppress(asyncio.CancelledError):
                await anyio.sleep(2)
        return await super().publish(ticks)


class Endless(Receiver):
    """Can't be cancelled by the engine at all."""

    async def publish(self, ticks: Sequence[LeasedTick]) -> Sequence[object] | None:
        if any(tick.payload == HANG for tick in ticks):
            with anyio.CancelScope(shield=True):
                await anyio.sleep_forever()
        return await super().publish(ticks)


class SaysYesWhenCancelled(Receiver):
    """Takes being cancelled for success."""

    async def publish(self, ticks: Sequence[LeasedTick]) -> Sequence[object] | None:
        try:
            return await super().publish(ticks)
        except asyncio.CancelledError:
            return None


class DoesNotHang(Receiver):
    """Raises where its owner thought that it hangs."""

    async def take(self, tick: LeasedTick) -> object:
        if tick.payload == HANG:
            raise ValueError("no")
        return await super().take(tick)


class DropsRecoveries(Receiver):
    """Believes that what was sent before has arrived."""

    async def take(self, tick: LeasedTick) -> object:
        return None if tick.recovery else await super().take(tick)


class RefusesRepeats(Receiver):
    """Has a unique key and no ON CONFLICT."""

    def keep(self, message_id: str, payload: Any) -> None:
        if message_id in dict(self.kept):
            raise KeyError(message_id)
        super().keep(message_id, payload)


class NewIdPerAttempt(Receiver):
    """Makes a repeat look like something new."""

    async def take(self, tick: LeasedTick) -> object:
        seen = any(message_id == tick.message_id for message_id, _ in self.kept)
        if not seen or tick.payload == POISON:
            return await super().take(tick)
        self.keep(f"{tick.message_id} again", tick.payload)
        return None


class TwiceIfInDoubt(Receiver):
    """Sends again what the engine won't."""

    async def take(self, tick: LeasedTick) -> object:
        if tick.delivery == "at_most_once":
            await super().take(tick)
        return await super().take(tick)


class FireAndForget(Receiver):
    """Hides errors where nobody asks for certainty."""

    async def publish(self, ticks: Sequence[LeasedTick]) -> Sequence[object] | None:
        answers = await super().publish(ticks)
        return None if ticks[0].delivery == "at_most_once" else answers


NO_HANG: dict[str, Any] = {"hang": None, "lease_seconds": 2}
ONE_CALL: dict[str, Any] = {"concurrency": 1}
BROKEN_OUTSIDE: list[tuple[type[Receiver], str, str, dict[str, Any]]] = [
    (Heartbeat, "nothing_due", "'heartbeat 1' arrived", {}),
    (Status, "answers", "it answered a str for 8 ticks", {}),
    (OneAnswer, "answers", "it gave 1 answers for 8 ticks", {}),
    (OwnIds, "arrives", "is no tick's message id", {}),
    (Twice, "arrives", "arrived 2 times, and 1 is the most", {}),
    (RaisesAfterwards, "arrives", "times, and 1 is the most", {}),
    (ForgetsLists, "arrives", "the ledger says: enqueued", {}),
    (FloatNumbers, "payloads", '"whole": [0.0, -1.0', {}),
    (MixedUp, "payloads", "arrived as", {}),
    (FirstFew, "batches", "did not arrive", {}),
    (OneAtATime, "two_pods", "did not arrive", ONE_CALL),
    (ErrorClass, "poison", "it answered the class ValueError, which counts as accepted", {}),
    (HidesErrors, "poison", "the ledger says: enqueued; failed is right", {}),
    (HalfABatch, "poison", "times, and 1 is the most", {}),
    (Unordered, "poison", "the ledger says: nothing; enqueued is right", {}),
    (OneRefusalRefusesAll, "poison", "the ledger says: failed: RejectTick: poison", {}),
    (Stubborn, "hang", "and a lease lasts 1 s", {}),
    (Endless, "hang", "there was no end to it within 8 s", {"check_seconds": 8}),
    (SaysYesWhenCancelled, "hang", "the ledger says: enqueued; failed is right", {}),
    (DoesNotHang, "hang", "it did not hang: the ledger says failed: ValueError: no", {}),
    (DropsRecoveries, "recovery", "did not arrive", NO_HANG),
    (RefusesRepeats, "repeat", "failed: KeyError", NO_HANG),
    (NewIdPerAttempt, "repeat", "is no tick's message id", NO_HANG),
    (TwiceIfInDoubt, "at_most_once", "arrived 2 times", NO_HANG),
    (FireAndForget, "at_most_once", "the ledger says: enqueued; failed is right", NO_HANG),
]


@pytest.mark.parametrize("case", BROKEN_OUTSIDE, ids=lambda case: case[0].__name__)
async def test_a_broken_sink_outside(
    dsn: str, connection: Any, case: tuple[type[Receiver], str, str, dict[str, Any]]
) -> None:
    broken, check, problem, options = case
    given = subject(broken(), **{"hang": HANG, "lease_seconds": 1, **options})
    with pytest.raises(ConformanceError) as raised:
        await check_sink(dsn, given)
    assert (raised.value.check, problem in raised.value.problem) == (check, True), str(raised.value)
    assert str(raised.value).startswith(f"{check}: ")
    assert await schemas(connection) == []


def test_every_rule_can_be_broken() -> None:
    broken = {check for check, _, _ in BROKEN_IN_DATABASE.values()} | {check for _, check, _, _ in BROKEN_OUTSIDE}
    assert broken == {check.__name__.removeprefix("_") for check in CHECKS}
