"""Tables and SQL functions of the user's as sinks: each tick arrives once, or nothing of its batch does."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from itertools import count
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from cron_ticks.database import Database
from cron_ticks.errors import InvalidInputError
from cron_ticks.repository import CronRepository
from cron_ticks.rows import FiredTicks
from cron_ticks.schedules import define_schedule
from cron_ticks.settings import Settings
from cron_ticks.sinks import SameDatabaseSink
from cron_ticks.user_sinks import FIELDS, Constant, FunctionSink, PreparedSink, TableSink
from token_queue.queue_repository import QUEUE_SINK

pytestmark = pytest.mark.sql

SECOND = timedelta(seconds=1)
ROLE_NUMBERS = count(1)
NASTY = [
    "it's",
    '"',
    "\\",
    "\\'",
    "'; DROP TABLE jobs; --",
    "{schema}",
    "{insert_from_fired}",
    "{",
    "}",
    "{}",
    "%s",
    "$1",
]
NASTY += ["$$", "E'\\x7B'", "\\x7Bschema}", "ünï 🎉", "a\nb\tc", "", " ", ":x", "\\007B", "--", "/*"]


@pytest.fixture
def repository(database: Database, settings: Settings) -> CronRepository:
    return CronRepository(database, settings)


@pytest.fixture
async def now(connection: "asyncpg.Connection[asyncpg.Record]") -> datetime:
    found: datetime = await connection.fetchval("SELECT statement_timestamp()")
    return found


async def fire(repository: CronRepository, prepared: PreparedSink, *, now: datetime | None = None) -> list[FiredTicks]:
    sink = SameDatabaseSink("theirs", prepared.insert_from_fired)
    return await repository.fire_due_ticks(sink, ticker_id="ticker_a", limit=100, now=now)


async def declare(
    repository: CronRepository,
    payload: Any = None,
    *,
    name: str = "n",
    at: datetime | None = None,
    sink: str = "theirs",
    **options: Any,
) -> str:
    """A schedule with one tick that is due."""
    definition = define_schedule(
        "reports", every=3600, name=name, payload=payload, sink=sink, sinks={"theirs": "same_database"}, **options
    )
    return (await repository.save_schedule(definition, now=at)).schedule.id


async def declare_many(repository: CronRepository, now: datetime, number: int = 5) -> None:
    """Their ticks are due one after the other, the last declared first."""
    for place in range(number):
        await declare(repository, {"number": place}, name=f"n{place}", at=now - place * SECOND)


@asynccontextmanager
async def database_with(dsn: str, settings: Settings, **server_settings: str) -> AsyncIterator[Database]:
    """A database whose connections have these settings, as an application's own pool may."""
    async with asyncpg.create_pool(dsn, min_size=0, max_size=2, server_settings=server_settings) as pool:
        yield Database(pool, settings)


@pytest.fixture
async def role(connection: Any) -> AsyncIterator[str]:
    """A role that may read our tables, and nothing else."""
    name = f"restricted_{next(ROLE_NUMBERS)}"
    await connection.execute(f"CREATE ROLE {name}; GRANT SELECT ON ALL TABLES IN SCHEMA public TO {name}")
    yield name
    await connection.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")


async def column(connection: Any, query: str) -> list[Any]:
    return [row[0] for row in await connection.fetch(query)]


async def unfired(connection: Any) -> tuple[int, int]:
    """How many ticks are due and how many runs there are."""
    found = await connection.fetchrow(
        """SELECT (SELECT count(*) FROM cron_ticks WHERE due_at <= statement_timestamp()),
            (SELECT count(*) FROM cron_runs)"""
    )
    return tuple(found)


async def delivered(
    database: Database, repository: CronRepository, connection: Any, cases: Sequence[tuple[str, str | Constant]]
) -> list[Any]:
    """What columns of these types get from these sources, of the tick that is due."""
    await connection.execute(
        "CREATE TABLE target (" + ", ".join(f"c{place} {type_}" for place, (type_, _) in enumerate(cases)) + ")"
    )
    columns = {f"c{place}": source for place, (_, source) in enumerate(cases)}
    assert len(await fire(repository, await TableSink("target", columns).prepare(database))) == 1
    return list(await connection.fetchrow("SELECT * FROM target"))


async def refusal(sink: TableSink | FunctionSink, database: Database) -> str:
    with pytest.raises(InvalidInputError) as caught:
        await sink.prepare(database)
    return str(caught.value)


# A table of theirs


async def test_each_field_arrives(
    database: Database, repository: CronRepository, connection: Any, now: datetime
) -> None:
    types = {"payload": "jsonb", "headers": "jsonb", "attempt": "integer"} | dict.fromkeys(
        ("scheduled_for", "execute_at", "fired_at"), "timestamptz"
    )
    columns = ", ".join(f"their_{field} {types.get(field, 'text')} NOT NULL" for field in FIELDS)
    await connection.execute(f"CREATE TABLE jobs (id serial PRIMARY KEY, {columns})")
    schedule_id = await declare(repository, {"a": [1, None]}, at=now, workspace_id="ws_1", priority="high")
    prepared = await TableSink("jobs", {f"their_{field}": field for field in FIELDS}).prepare(database)
    later = now + SECOND
    [tick] = await fire(repository, prepared, now=later)
    await connection.set_type_codec("jsonb", schema="pg_catalog", encoder=str, decoder=str)
    got = {
        name.removeprefix("their_"): value for name, value in (await connection.fetchrow("SELECT * FROM jobs")).items()
    }
    headers = await connection.fetchval(
        "SELECT their_headers = $1::text::jsonb FROM jobs",
        f"""{{
        "schedule_id": "{schedule_id}", "schedule_name": "n", "tick_id": "{tick.id}", "attempt": 1,
        "scheduled_for": "{now.strftime("%Y-%m-%dT%H:%M:%S.%fZ")}", "ticker_id": "ticker_a", "origin": "schedule"}}""",
    )
    assert headers
    del got["headers"]
    assert got == {
        "id": 1,
        "message_id": tick.id.replace("tick_", "msg_"),
        "tick_id": tick.id,
        "schedule_id": schedule_id,
        "schedule_name": "n",
        "queue_name": "reports",
        "workspace_id": "ws_1",
        "payload": '{"a": [1, null]}',
        "scheduled_for": now,
        "execute_at": now,
        "fired_at": later,
        "origin": "schedule",
        "attempt": 1,
        "priority": "high",
        "ticker_id": "ticker_a",
    }
    assert await connection.fetchval("SELECT message_id FROM cron_runs") == got["message_id"]


async def test_headers_are_those_of_our_own_messages(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    await connection.execute("CREATE TABLE jobs (headers jsonb)")
    await declare(repository)
    await fire(repository, await TableSink("jobs", {"headers": "headers"}).prepare(database))
    await declare(repository, name="m", sink="queue")
    await repository.fire_due_ticks(QUEUE_SINK, ticker_id="ticker_a", limit=100)
    keys = "SELECT array_agg(key ORDER BY key) FROM {table}, jsonb_object_keys(headers) AS key"
    ours = await connection.fetchval(keys.replace("{table}", "queue_messages"))
    assert ours
    assert ours == await connection.fetchval(keys.replace("{table}", "jobs"))


async def test_a_member_of_the_payload_has_the_columns_type(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    cases = [
        ("integer", 7, 7),
        ("integer", "7", 7),
        ("bigint", 2**40, 2**40),
        ("numeric(6, 2)", 1.5, Decimal("1.50")),
        ("double precision", 0.1, 0.1),
        ("boolean", True, True),
        ("boolean", "no", False),
        ("uuid", "6f1c0b9e-0000-4000-8000-000000000001", UUID("6f1c0b9e-0000-4000-8000-000000000001")),
        ("date", "2026-02-03", date(2026, 2, 3)),
        ("timestamptz", "2026-02-03T04:05:06+01:00", datetime(2026, 2, 3, 3, 5, 6, tzinfo=UTC)),
        ("interval", "PT1H", timedelta(hours=1)),
        ("text", "a 'b' \\", "a 'b' \\"),
        ("text", {"b": 1}, '{"b": 1}'),
        ("text", True, "true"),
        ("varchar(5)", "abcde", "abcde"),
        ("mood", "happy", "happy"),
        ("positive", 3, 3),
        ("jsonb", "text", '"text"'),
        ("jsonb", {"b": [1]}, '{"b": [1]}'),
        ("json", 5, "5"),
        ("text[]", "{a,b}", ["a", "b"]),
        ("integer", None, None),
        ("text", None, None),
    ]
    await connection.execute(
        "CREATE TYPE mood AS ENUM ('sad', 'happy'); CREATE DOMAIN positive AS int CHECK (value > 0)"
    )
    await declare(repository, {str(place): member for place, (_, member, _) in enumerate(cases)})
    sources = [(type_, f"payload.{place}") for place, (type_, _, _) in enumerate(cases)]
    assert await delivered(database, repository, connection, sources) == [expected for _, _, expected in cases]


async def test_a_member_that_is_missing_is_null(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    await connection.execute("CREATE TABLE jobs (a integer, b jsonb)")
    prepared = await TableSink("jobs", {"a": "payload.a.b", "b": "payload.a.b"}).prepare(database)
    for place, payload in enumerate(({}, {"other": 1}, ["a.b"], "a.b", 5, {"a": {"b": 1}})):
        await declare(repository, payload, name=f"n{place}")
    await fire(repository, prepared)
    assert [tuple(row) for row in await connection.fetch("SELECT * FROM jobs")] == [(None, None)] * 6


async def test_a_key_is_everything_after_the_first_dot(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    keys = [*filter(None, NASTY), "a.b", "0", "payload."]
    await declare(repository, {key: f"of {key}" for key in keys})
    got = await delivered(database, repository, connection, [("text", f"payload.{key}") for key in keys])
    assert got == [f"of {key}" for key in keys]


async def test_a_payload_goes_into_json_and_text(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    await declare(repository, {"a": [1, None, "é"]})
    sources = [(type_, "payload") for type_ in ("json", "jsonb", "text", "varchar")]
    assert await delivered(database, repository, connection, sources) == ['{"a": [1, null, "é"]}'] * 4


async def test_times_are_utc_whatever_the_session_says(dsn: str, settings: Settings, connection: Any) -> None:
    async with database_with(dsn, settings, timezone="Asia/Tokyo", datestyle="German") as database:
        repository = CronRepository(database, settings.model_copy(update={"catch_up_max_age_seconds": 3650 * 86_400.0}))
        await declare(repository, at=datetime(2026, 1, 1, 23, 30, tzinfo=UTC))
        # It is long past, so it is catching up.
        await connection.execute("UPDATE cron_ticks SET turn = 0, due_at = statement_timestamp()")
        types = ("timestamptz", "timestamp", "date", "text", "varchar(40)", "jsonb")
        got = await delivered(database, repository, connection, [(type_, "scheduled_for") for type_ in types])
    assert got == [
        datetime(2026, 1, 1, 23, 30, tzinfo=UTC),
        datetime(2026, 1, 1, 23, 30),  # noqa: DTZ001
        date(2026, 1, 1),
        "2026-01-01T23:30:00.000000Z",
        "2026-01-01T23:30:00.000000Z",
        '"2026-01-01T23:30:00.000000Z"',
    ]


async def test_fields_fit_other_types(database: Database, repository: CronRepository, connection: Any) -> None:
    cases = [
        ("varchar(40)", "queue_name", "reports"),
        ("char(10)", "queue_name", "reports   "),
        ("jsonb", "queue_name", '"reports"'),
        ("json", "attempt", "1"),
        ("text", "attempt", "1"),
        ("bigint", "attempt", 1),
        ("level", "priority", "normal"),
        ("text", "workspace_id", None),
        ("jsonb", "workspace_id", None),
    ]
    await connection.execute("CREATE TYPE level AS ENUM ('urgent', 'high', 'normal', 'low')")
    await declare(repository)
    got = await delivered(database, repository, connection, [(type_, source) for type_, source, _ in cases])
    assert got == [expected for _, _, expected in cases]


async def test_a_text_that_is_too_long_is_refused_not_cut(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    await connection.execute("CREATE DOMAIN short AS varchar(5); CREATE DOMAIN shorter AS short CHECK (value <> '')")
    await declare(repository)
    for type_ in ("varchar(5)", "char(5)", "short", "shorter"):
        with pytest.raises(asyncpg.StringDataRightTruncationError):
            await delivered(database, repository, connection, [(type_, "message_id")])
        await connection.execute("DROP TABLE target")
    assert await unfired(connection) == (1, 0)


async def test_many_ticks_arrive_in_the_order_of_being_due(
    database: Database, repository: CronRepository, connection: Any, now: datetime
) -> None:
    await connection.execute("CREATE TABLE jobs (id bigserial, number int NOT NULL, tick text UNIQUE)")
    prepared = await TableSink("jobs", {"number": "payload.number", "tick": "tick_id"}).prepare(database)
    await declare_many(repository, now)
    assert len(await fire(repository, prepared, now=now)) == 5
    assert await fire(repository, prepared, now=now) == []
    assert await column(connection, "SELECT number FROM jobs ORDER BY id") == [4, 3, 2, 1, 0]
    assert await unfired(connection) == (0, 5)


@pytest.mark.parametrize(
    ("condition", "error"),
    [
        ("CHECK (number <> 2)", asyncpg.CheckViolationError),
        ("UNIQUE (kind)", asyncpg.UniqueViolationError),
    ],
)
async def test_a_constraint_of_theirs_leaves_nothing_of_the_batch(
    database: Database,
    repository: CronRepository,
    connection: Any,
    now: datetime,
    *,
    condition: str,
    error: type[Exception],
) -> None:
    await connection.execute(f"CREATE TABLE jobs (number int, kind text, CONSTRAINT theirs {condition})")
    prepared = await TableSink("jobs", {"number": "payload.number", "kind": "queue_name"}).prepare(database)
    await declare_many(repository, now)
    with pytest.raises(error):
        await fire(repository, prepared, now=now)
    assert await column(connection, "SELECT count(*) FROM jobs") == [0]
    assert await unfired(connection) == (5, 0)
    await connection.execute("ALTER TABLE jobs DROP CONSTRAINT theirs")
    assert len(await fire(repository, prepared, now=now)) == 5
    assert await column(connection, "SELECT count(*) FROM jobs") == [5]


async def test_a_trigger_of_theirs_that_swallows_a_row_leaves_nothing_of_the_batch(
    database: Database, repository: CronRepository, connection: Any, now: datetime
) -> None:
    await connection.execute(
        """CREATE TABLE jobs (number int);
        CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
        CREATE TRIGGER swallow BEFORE INSERT ON jobs FOR EACH ROW WHEN (new.number = 2) EXECUTE FUNCTION swallow()"""
    )
    prepared = await TableSink("jobs", {"number": "payload.number"}).prepare(database)
    await declare_many(repository, now)
    with pytest.raises(asyncpg.RaiseError):
        await fire(repository, prepared, now=now)
    assert await column(connection, "SELECT count(*) FROM jobs") == [0]
    assert await unfired(connection) == (5, 0)


@pytest.mark.parametrize("conforming", ["on", "off"])
async def test_texts_arrive_as_they_are(dsn: str, settings: Settings, connection: Any, conforming: str) -> None:
    columns = {f"c{place}": Constant(text) for place, text in enumerate(NASTY)}
    await connection.execute(f"CREATE TABLE jobs ({', '.join(f'{name} text' for name in columns)})")
    async with database_with(
        dsn, settings, standard_conforming_strings=conforming, escape_string_warning="off"
    ) as database:
        repository = CronRepository(database, settings)
        await declare(repository)
        await fire(repository, await TableSink("jobs", columns).prepare(database))
    assert list(await connection.fetchrow("SELECT * FROM jobs")) == NASTY


async def test_a_constant_has_the_columns_type(database: Database, repository: CronRepository, connection: Any) -> None:
    cases: list[tuple[str, str | float | None, Any]] = [
        ("integer", 5, 5),
        ("text", 5, "5"),
        ("numeric", 1.25, Decimal("1.25")),
        ("boolean", True, True),
        ("text", False, "false"),
        ("jsonb", False, "false"),
        ("jsonb", "{}", "{}"),
        ("jsonb", '"text"', '"text"'),
        ("integer", None, None),
        ("mood", "sad", "sad"),
        ("date", "2026-01-02", date(2026, 1, 2)),
    ]
    await connection.execute("CREATE TYPE mood AS ENUM ('sad', 'happy')")
    await declare(repository)
    got = await delivered(database, repository, connection, [(type_, Constant(value)) for type_, value, _ in cases])
    assert got == [expected for _, _, expected in cases]


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


async def test_any_name_can_be_used(database: Database, repository: CronRepository, connection: Any) -> None:
    names = ("Mixed Case", 'a"b', "{schema}", "{insert_from_fired}", '{"\\007B', "a\\b", "select", "ü.x")
    for place, name in enumerate(names):
        theirs = quoted(name)
        await connection.execute(
            f"CREATE SCHEMA {theirs}; CREATE TYPE {theirs}.{theirs} AS ENUM ('reports');"
            f"CREATE TABLE {theirs}.jobs ({theirs} {theirs}.{theirs} NOT NULL);"
            f"CREATE FUNCTION {theirs}.{theirs}({theirs} {theirs}.{theirs}) RETURNS void LANGUAGE sql"
            f" AS $$ INSERT INTO {theirs}.jobs SELECT $1 $$"
        )
        table = TableSink(f"{theirs}.jobs", {name: "queue_name"})
        function = FunctionSink(f"{theirs}.{theirs}", {name: "queue_name"})
        for sink in (table, function):
            prepared = await sink.prepare(database)
            assert "{" not in prepared.insert_from_fired
            await declare(repository, name=f"{place} {sink is table}")
            await fire(repository, prepared)
        assert await column(connection, f"SELECT count(*) FROM {theirs}.jobs") == [2]


async def test_a_name_without_quotes_is_folded_and_found_by_the_search_path(
    dsn: str, settings: Settings, repository: CronRepository, connection: Any
) -> None:
    """What was found stays what is meant, on whatever connection the firing runs."""
    await connection.execute(
        """CREATE SCHEMA app; CREATE TYPE app.mood AS ENUM ('reports');
        CREATE TABLE app.jobs (mood app.mood); CREATE TABLE public.jobs (mood text);
        CREATE FUNCTION app.note(mood app.mood) RETURNS void LANGUAGE sql AS 'INSERT INTO app.jobs VALUES (mood)'"""
    )
    async with database_with(dsn, settings, search_path="app, public") as their_database:
        table = await TableSink("Jobs", {"mood": "queue_name"}).prepare(their_database)
        function = await FunctionSink("NOTE", {"mood": "queue_name"}).prepare(their_database)
        qualified = await TableSink("public.jobs", {"mood": "queue_name"}).prepare(their_database)
    for place, prepared in enumerate((table, function, qualified)):
        await declare(repository, name=f"n{place}")
        await fire(repository, prepared)
    assert await column(connection, "SELECT count(*) FROM app.jobs") == [2]
    assert await column(connection, "SELECT count(*) FROM public.jobs") == [1]


async def test_the_database_fills_in_what_is_not_mapped(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    """Partitioned tables too, and what a domain says."""
    await connection.execute(
        """CREATE DOMAIN state AS text NOT NULL DEFAULT 'new';
        CREATE TABLE jobs (id bigint GENERATED ALWAYS AS IDENTITY, other bigint GENERATED BY DEFAULT AS IDENTITY,
            kind text NOT NULL, twice text GENERATED ALWAYS AS (kind || kind) STORED NOT NULL, state state,
            made_at timestamptz NOT NULL DEFAULT now(), note text, gone text NOT NULL);
        ALTER TABLE jobs DROP COLUMN gone;
        CREATE TABLE parts (kind text NOT NULL) PARTITION BY LIST (kind);
        CREATE TABLE parts_of_reports PARTITION OF parts FOR VALUES IN ('reports')"""
    )
    await declare(repository)
    await fire(repository, await TableSink("jobs", {"kind": "queue_name", "other": "attempt"}).prepare(database))
    row = await connection.fetchrow("SELECT id, other, kind, twice, state, note FROM jobs")
    assert tuple(row) == (1, 1, "reports", "reportsreports", "new", None)
    await declare(repository, name="m")
    await fire(repository, await TableSink("parts", {"kind": "queue_name"}).prepare(database))
    assert await column(connection, "SELECT kind FROM parts_of_reports") == ["reports"]


# What is wrong with a table


@pytest.mark.parametrize(
    ("table", "columns", "message"),
    [
        (5, {}, "table: must be a string, not int"),
        *(
            (table, {"a": "payload"}, "table: must be name or schema.name, with double quotes as in SQL where needed")
            for table in ("", "a.b.c", "a b", "a.", ".a", '"a', '""', "a;b", "1a", 'a"b"', "jöbs", '"a\0"', "a\n")
        ),
        ('"\ud800"', {"a": "payload"}, "table: must be JSON"),
        ("jobs", {}, "columns: must map at least one column"),
        ("jobs", ["a"], "columns: must be a mapping of names to fields, not list"),
        ("jobs", {5: "payload"}, "columns: must be a string, not int"),
        ("jobs", {"": "payload"}, "columns: must not be empty"),
        (
            "jobs",
            {"a": "paylod"},
            r"columns\['a'\]: 'paylod' is none of message_id, .*, payload.<key>; or use Constant",
        ),
        ("jobs", {"a": "payload."}, r"columns\['a'\]: 'payload.' is none of"),
        ("jobs", {"a": "payload.\0"}, r"columns\['a'\]: must not contain NUL"),
        ("jobs", {"a": 5}, r"columns\['a'\]: must be a field's name or a Constant, not int"),
        ("jobs", {"a": Constant([])}, r"columns\['a'\]: a Constant is a text, a number, a boolean or None, not list"),  # type: ignore[arg-type]
        ("jobs", {"a": Constant(float("nan"))}, r"columns\['a'\]: must be JSON"),
        ("jobs", {"a": Constant("a\0b")}, r"columns\['a'\]: must not contain NUL"),
        ("jobs", {"a": Constant("\ud800")}, r"columns\['a'\]: must be JSON"),
    ],
)
def test_what_is_wrong_in_itself_is_said_at_once(table: Any, columns: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{message}"):
        TableSink(table, columns)


async def test_what_does_not_fit_the_table_is_said(database: Database, connection: Any) -> None:
    cases: list[tuple[str, dict[str, str | Constant], str]] = [
        ("nothing", {"a": "payload"}, 'table: there is no table "nothing" on the search_path: write schema.name, and'),
        ("Mixed", {"a": "payload"}, 'table: there is no table "mixed" on the search_path'),
        ("app.nothing", {"a": "payload"}, 'table: there is no table "nothing" in the schema "app"'),
        (
            "watched",
            {"a": "payload"},
            'table: "public"."watched" is not an ordinary or partitioned table: use a Function',
        ),
        ("jobs_seq", {"a": "payload"}, 'table: "public"."jobs_seq" is not an ordinary or partitioned table'),
        ("jobs", {"A": "payload"}, 'columns[\'A\']: "public"."jobs" has no such column; it has id, a, b, twice, n'),
        ("jobs", {"ctid": "payload"}, 'columns[\'ctid\']: "public"."jobs" has no such column'),
        ("jobs", {"id": "attempt"}, "columns['id']: the database itself makes its values: leave it out"),
        ("jobs", {"twice": "queue_name"}, "columns['twice']: the database itself makes its values"),
        ("jobs", {"n": "attempt"}, 'columns: "public"."jobs" wants a value for a, b: map it to a field or a Constant'),
        ("jobs", {"a": "queue_name", "b": "fired_at"}, "columns: PostgreSQL can't do this: cannot cast type timestamp"),
        (
            "jobs",
            {"a": "queue_name", "b": Constant("x")},
            "columns: PostgreSQL can't do this: invalid input syntax for",
        ),
        (
            "ruled",
            {"a": "queue_name"},
            "columns: PostgreSQL can't do this: cannot perform INSERT RETURNING on relation",
        ),
    ]
    await connection.execute(
        """CREATE TABLE jobs (id bigint GENERATED ALWAYS AS IDENTITY, a varchar(5) NOT NULL, b integer NOT NULL,
            twice text GENERATED ALWAYS AS (a || 'x') STORED, n integer);
        CREATE TABLE "Mixed" (a text); CREATE VIEW watched AS SELECT 1 AS a; CREATE SEQUENCE jobs_seq;
        CREATE TABLE ruled (a text); CREATE RULE drop_all AS ON INSERT TO ruled DO INSTEAD NOTHING"""
    )
    for name, columns, message in cases:
        said = await refusal(TableSink(name, columns), database)
        assert said.startswith(message), said


async def test_what_the_role_may_not_do_is_said(dsn: str, settings: Settings, connection: Any, role: str) -> None:
    await connection.execute(
        """CREATE SCHEMA app; CREATE TABLE app.jobs (a text, b text);
        CREATE FUNCTION app.note(a text) RETURNS void LANGUAGE sql AS 'INSERT INTO app.jobs VALUES (a)';
        REVOKE EXECUTE ON FUNCTION app.note FROM public"""
    )
    sink, function = TableSink("app.jobs", {"a": "queue_name"}), FunctionSink("app.note", {"a": "queue_name"})
    async with database_with(dsn, settings, role=role) as theirs:
        assert await refusal(sink, theirs) == (
            f'table: "app"."jobs" is out of reach: GRANT USAGE ON SCHEMA "app" TO "{role}"'
        )
        await connection.execute(f"GRANT USAGE ON SCHEMA app TO {role}")
        assert await refusal(sink, theirs) == (
            f'columns[\'a\']: may not be written: GRANT INSERT ON "app"."jobs" TO "{role}"'
        )
        await connection.execute(f"GRANT INSERT (b) ON app.jobs TO {role}")
        assert (await refusal(sink, theirs)).startswith("columns['a']: may not be written")
        await connection.execute(f"GRANT INSERT (a) ON app.jobs TO {role}")
        await sink.prepare(theirs)
        assert await refusal(function, theirs) == (
            'function: may not be called: GRANT USAGE ON SCHEMA "app" and EXECUTE ON FUNCTION'
            f' "app"."note"(a text) TO "{role}"'
        )
        await connection.execute(f"GRANT EXECUTE ON FUNCTION app.note TO {role}")
        await function.prepare(theirs)


async def test_a_role_that_may_only_insert_is_enough(dsn: str, settings: Settings, connection: Any, role: str) -> None:
    await connection.execute(
        f"""CREATE TABLE jobs (a text);
        GRANT INSERT, SELECT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {role};
        GRANT USAGE ON SEQUENCE execution_events_sequence TO {role};
        REVOKE ALL ON jobs FROM {role}; GRANT INSERT ON jobs TO {role}"""
    )
    async with database_with(dsn, settings, role=role) as database:
        repository = CronRepository(database, settings)
        await declare(repository)
        await fire(repository, await TableSink("jobs", {"a": "queue_name"}).prepare(database))
    assert await column(connection, "SELECT a FROM jobs") == ["reports"]


# An SQL function of theirs

NOTES = """
CREATE TABLE notes (id bigserial, text text);
CREATE FUNCTION note(text text) RETURNS bigint LANGUAGE sql AS 'INSERT INTO notes (text) VALUES (text) RETURNING id';
CREATE FUNCTION quiet_note(text text) RETURNS bigint STABLE LANGUAGE plpgsql AS $$ BEGIN RETURN note(text); END $$;
"""


KINDS = [
    "RETURNS void LANGUAGE plpgsql AS $$ BEGIN PERFORM note(text); END $$",
    "RETURNS void LANGUAGE sql AS $$ INSERT INTO notes (text) VALUES (text) $$",
    "RETURNS bigint LANGUAGE plpgsql AS $$ BEGIN RETURN note(text); END $$",
    "RETURNS bigint LANGUAGE sql AS $$ SELECT note(text) $$",
    "RETURNS bigint LANGUAGE plpgsql AS $$ BEGIN PERFORM note(text); RETURN NULL; END $$",
    "RETURNS SETOF int LANGUAGE plpgsql AS $$ BEGIN PERFORM note(text); RETURN QUERY VALUES (1), (2), (3); END $$",
    "RETURNS SETOF int LANGUAGE plpgsql AS $$ BEGIN PERFORM note(text); END $$",
    "RETURNS SETOF bigint LANGUAGE sql AS $$ SELECT note(text) $$",
    "RETURNS SETOF void LANGUAGE sql AS $$ INSERT INTO notes (text) VALUES (text) $$",
    "RETURNS TABLE (a int, b bigint) LANGUAGE sql AS $$ SELECT 1, note(text) UNION ALL SELECT 2, 2 $$",
    "RETURNS notes LANGUAGE sql AS $$ INSERT INTO notes (text) VALUES (text) RETURNING * $$",
    "RETURNS record LANGUAGE plpgsql AS $$ BEGIN RETURN (note(text), 1); END $$",
    "RETURNS bigint STABLE LANGUAGE plpgsql AS $$ BEGIN RETURN note(text); END $$",
    "RETURNS void STABLE LANGUAGE plpgsql AS $$ BEGIN PERFORM note(text); END $$",
    "RETURNS bigint STABLE LANGUAGE sql AS $$ SELECT quiet_note(text) $$",
    "RETURNS SETOF bigint STABLE LANGUAGE sql AS $$ SELECT quiet_note(text) $$",
    "RETURNS SETOF bigint STABLE LANGUAGE sql AS $$ SELECT quiet_note(text) FROM generate_series(1, 1) $$",
    "RETURNS TABLE (a int, b bigint) STABLE ROWS 1 LANGUAGE sql AS $$ SELECT 1, quiet_note(text) $$",
    "RETURNS void SECURITY DEFINER SET search_path = public LANGUAGE sql AS $$ SELECT note(text) $$",
]


@pytest.mark.parametrize("source", ["payload.number", Constant("same")])
async def test_a_function_is_called_once_per_tick(
    database: Database, repository: CronRepository, connection: Any, now: datetime, source: str | Constant
) -> None:
    """In the order of being due, also where all calls look the same to the planner."""
    await connection.execute(NOTES)
    for kind in KINDS:
        await connection.execute(f"CREATE FUNCTION work(text text) {kind}")
        prepared = await FunctionSink("work", {"text": source}).prepare(database)
        assert await column(connection, "SELECT count(*) FROM notes") == [0]
        await declare_many(repository, now)
        assert len(await fire(repository, prepared, now=now)) == 5
        assert await fire(repository, prepared, now=now) == []
        expected = ["4", "3", "2", "1", "0"] if isinstance(source, str) else ["same"] * 5
        assert await column(connection, "SELECT text FROM notes ORDER BY id") == expected, kind
        assert await unfired(connection) == (0, 5)
        await connection.execute("DROP FUNCTION work; TRUNCATE notes, cron_schedules, cron_ticks, cron_runs CASCADE")


@pytest.mark.parametrize("volatility", ["VOLATILE", "STABLE"])
async def test_a_function_without_arguments_is_called_once_per_tick(
    database: Database, repository: CronRepository, connection: Any, now: datetime, volatility: str
) -> None:
    await connection.execute(
        NOTES
        + f"CREATE FUNCTION work() RETURNS void {volatility} LANGUAGE plpgsql AS $$ BEGIN PERFORM note('x'); END $$"
    )
    await declare_many(repository, now)
    assert len(await fire(repository, await FunctionSink("work", {}).prepare(database), now=now)) == 5
    assert await column(connection, "SELECT count(*) FROM notes") == [5]


async def test_a_function_that_fails_leaves_nothing_of_the_batch(
    database: Database, repository: CronRepository, connection: Any, now: datetime
) -> None:
    await connection.execute(
        NOTES
        + """CREATE FUNCTION work(number int) RETURNS void LANGUAGE plpgsql
            AS $$ BEGIN PERFORM note('x'); IF number = 2 THEN RAISE EXCEPTION 'not this one'; END IF; END $$"""
    )
    prepared = await FunctionSink("work", {"number": "payload.number"}).prepare(database)
    await declare_many(repository, now)
    with pytest.raises(asyncpg.RaiseError, match="not this one"):
        await fire(repository, prepared, now=now)
    assert await column(connection, "SELECT count(*) FROM notes") == [0]
    assert await unfired(connection) == (5, 0)


async def test_arguments_have_their_types_and_defaults(
    database: Database, repository: CronRepository, connection: Any, now: datetime
) -> None:
    await connection.execute(
        """CREATE TABLE calls (number int, payload json, at timestamp, kind text, extra text);
        CREATE DOMAIN counted AS int CHECK (value >= 0);
        CREATE FUNCTION work(number counted, OUT answer int, "theJob" json, at timestamp, kind text DEFAULT 'usual',
            INOUT extra text DEFAULT 'more')
        LANGUAGE plpgsql AS $$ BEGIN INSERT INTO calls VALUES (number, "theJob", at, kind, extra); END $$"""
    )
    arguments: dict[str, str | Constant] = {
        "at": "scheduled_for",
        "extra": Constant("{schema}"),
        "number": "payload.number",
        "theJob": "payload",
    }
    await declare(repository, {"number": 3}, at=now)
    await fire(repository, await FunctionSink("work", arguments).prepare(database), now=now)
    row = await connection.fetchrow("SELECT * FROM calls")
    assert tuple(row) == (3, '{"number": 3}', now.replace(tzinfo=None), "usual", "{schema}")


async def test_of_several_functions_the_one_whose_arguments_fit_is_called(
    database: Database, repository: CronRepository, connection: Any
) -> None:
    await connection.execute(
        NOTES
        + """CREATE FUNCTION work(a text) RETURNS void LANGUAGE sql AS $$ SELECT note('a') $$;
        CREATE FUNCTION work(a text, b text) RETURNS void LANGUAGE sql AS $$ SELECT note('a, b') $$;
        CREATE FUNCTION work(c text, d int DEFAULT 0) RETURNS void LANGUAGE sql AS $$ SELECT note('c') $$;
        CREATE FUNCTION work() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN new; END $$;
        CREATE FUNCTION work(c int) RETURNS void LANGUAGE sql AS $$ SELECT note('c') $$"""
    )
    for place, arguments in enumerate(({"a": "queue_name"}, {"b": "queue_name", "a": "queue_name"})):
        await declare(repository, name=f"n{place}")
        await fire(repository, await FunctionSink("work", arguments).prepare(database))
    assert await column(connection, "SELECT text FROM notes ORDER BY id") == ["a", "a, b"]
    assert await refusal(FunctionSink("work", {"c": "queue_name"}), database) == (
        'arguments: fit several functions, give more of them: "public"."work"(c text, d integer);'
        ' "public"."work"(c integer)'
    )
    assert await refusal(FunctionSink("work", {"b": "queue_name"}), database) == (
        'arguments: "public"."work"(a text) has no argument b; "public"."work"(a text, b text) wants a value for a;'
        ' "public"."work"(c text, d integer) has no argument b; "public"."work"(c integer) has no argument b'
    )


async def test_what_does_not_fit_the_function_is_said(database: Database, connection: Any) -> None:
    cases: list[tuple[str, dict[str, str | Constant], str]] = [
        (
            "nothing",
            {},
            'function: there is no function "nothing" on the search_path: write schema.name, and "Name" if',
        ),
        ("app.work", {}, 'function: there is no function "work" in the schema "app"'),
        ("proc", {}, 'function: there is no function "proc"'),
        ("on_change", {}, 'function: there is no function "on_change"'),
        ("work", {}, 'arguments: "public"."work"(a integer, b text) wants a value for a'),
        ("work", {"a": "attempt", "A": "attempt"}, 'arguments: "public"."work"(a integer, b text) has no argument A'),
        ("work", {"a": "fired_at"}, "arguments: PostgreSQL can't do this: cannot cast type timestamp"),
        ("work", {"a": Constant("x")}, "arguments: PostgreSQL can't do this: invalid input syntax for type integer"),
        ("unnamed", {}, 'arguments: "public"."unnamed"(integer) wants a value for its argument 1, which has no name'),
        (
            "pure",
            {"a": "attempt"},
            'function: is IMMUTABLE, so it may be called less than once per tick: ALTER FUNCTION "public"."pure"(a ',
        ),
        (
            "strict",
            {"a": "attempt"},
            'function: is STRICT, so it isn\'t called if an argument is NULL: ALTER FUNCTION "public"."strict"',
        ),
    ]
    await connection.execute(
        """CREATE FUNCTION work(a int, b text DEFAULT '') RETURNS int LANGUAGE sql AS 'SELECT a';
        CREATE FUNCTION unnamed(int) RETURNS int LANGUAGE sql AS 'SELECT 1';
        CREATE FUNCTION pure(a int) RETURNS int IMMUTABLE LANGUAGE sql AS 'SELECT 1';
        CREATE FUNCTION strict(a int) RETURNS int STRICT LANGUAGE sql AS 'SELECT 1';
        CREATE FUNCTION on_change() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN new; END';
        CREATE PROCEDURE proc() LANGUAGE sql AS 'SELECT 1'"""
    )
    for name, arguments, message in cases:
        said = await refusal(FunctionSink(name, arguments), database)
        assert said.startswith(message), said


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (None, {}, "function: must be a string, not NoneType"),
        ("f()", {}, "function: must be name or schema.name"),
        ("f", None, "arguments: must be a mapping of names to fields, not NoneType"),
        ("f", {"a": "nothing"}, r"arguments\['a'\]: 'nothing' is none of"),
    ],
)
def test_what_is_wrong_with_a_function_in_itself_is_said_at_once(function: Any, arguments: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{message}"):
        FunctionSink(function, arguments)
