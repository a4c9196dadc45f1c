"""Sinks in the user's own database: a table of theirs, or an SQL function of theirs.

Either is filled by the firing statement itself, so a tick arrives exactly once. `prepare` looks into the catalogue once
and makes the sink's part of that statement; every name in it is quoted and qualified by its schema, so that it means
the same whatever the search_path is later.

A table or function is named as in SQL: `jobs`, `app.jobs`, `"My Schema".jobs`; what isn't in double quotes is folded to
lower case. Columns and arguments are named exactly as they are, without quotes. Each gets one of our fields, or a
member of the payload (`payload.<key>`: everything after the first dot is the key of one top-level member, which is NULL
if it is missing), or a Constant, cast to its type: times as UTC where the type knows no zone, and texts in full, so
that one which is too long is an error.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import asyncpg

from cron_ticks.checks import PRIORITIES, check_name, check_payload
from cron_ticks.database import Database
from cron_ticks.errors import InvalidInputError

_PART = r'([A-Za-z_][A-Za-z0-9_$]*|"(?:[^"\0]|"")+")'
NAME = re.compile(rf"(?:{_PART}\.)?{_PART}")
KEY_PREFIX = "payload."

_INSTANT_TEXT = """to_char({instant} AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')"""
INSTANTS = {
    "scheduled_for": "fired.scheduled_for",
    "execute_at": "fired.execute_at",
    "fired_at": "pass.instant",
}
FIELDS = {
    "message_id": "fired.message_id",
    "tick_id": "fired.id",
    "schedule_id": "fired.schedule_id",
    "schedule_name": "fired.schedule_name",
    "queue_name": "fired.queue_name",
    "workspace_id": "fired.workspace_id",
    "payload": "fired.payload",
    **INSTANTS,
    "origin": "fired.origin",
    "attempt": "fired.attempts + 1",
    "priority": f"(ARRAY{list(PRIORITIES)})[fired.priority + 1]",
    "ticker_id": "pass.ticker_id",
    "headers": f"""jsonb_build_object('schedule_id', fired.schedule_id, 'schedule_name', fired.schedule_name,
        'scheduled_for', {_INSTANT_TEXT.format(instant="fired.scheduled_for")}, 'tick_id', fired.id,
        'attempt', fired.attempts + 1, 'ticker_id', pass.ticker_id, 'origin', fired.origin)""",
}

# The type that a domain is made of in the end, or the type itself. Only a cast to it leaves the length to the
# assignment, which refuses what is too long: a cast to varchar(5), or to a domain over it, would cut it off.
_BASE_TYPE = """
CROSS JOIN LATERAL (
    WITH RECURSIVE base AS (
        SELECT given.type_id AS id
        UNION ALL
        SELECT typbasetype FROM base JOIN pg_type ON pg_type.oid = base.id WHERE typtype = 'd'
    )
    SELECT nspname AS type_schema, typname AS type_name, typcategory::text AS type_category
    FROM base JOIN pg_type ON pg_type.oid = base.id JOIN pg_namespace ON pg_namespace.oid = typnamespace
    WHERE typtype <> 'd'
) AS base_type
"""

# The relation of that name: in the schema given, or the one that the search_path finds.
FIND_TABLE = """
SELECT pg_class.oid, nspname AS schema, relname AS name, relkind IN ('r', 'p') AS is_table,
    has_schema_privilege(pg_namespace.oid, 'USAGE') AS reachable, current_user AS role
FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
WHERE relname = $2 AND CASE WHEN $1::text IS NULL THEN pg_table_is_visible(pg_class.oid) ELSE nspname = $1 END
"""

FIND_COLUMNS = f"""
SELECT attname AS name, attgenerated <> '' OR attidentity = 'a' AS computed,
    (attnotnull OR typnotnull) AND NOT atthasdef AND attidentity = '' AND typdefault IS NULL AS required,
    has_column_privilege(attrelid, attnum, 'INSERT') AS permitted, base_type.*
FROM pg_attribute JOIN pg_type AS own ON own.oid = atttypid
CROSS JOIN LATERAL (SELECT atttypid AS type_id) AS given {_BASE_TYPE}
WHERE attrelid = $1 AND attnum > 0 AND NOT attisdropped
ORDER BY attnum
"""

# A row per function of that name and argument to give; a function without arguments has a row without a position.
FIND_FUNCTIONS = f"""
SELECT pg_proc.oid, nspname AS schema, proname AS name, provolatile = 'i' AS immutable, proisstrict AS strict,
    pg_get_function_identity_arguments(pg_proc.oid) AS signature, current_user AS role,
    has_schema_privilege(pg_namespace.oid, 'USAGE') AND has_function_privilege(pg_proc.oid, 'EXECUTE') AS permitted,
    argument.*
FROM pg_proc JOIN pg_namespace ON pg_namespace.oid = pronamespace
LEFT JOIN LATERAL (
    SELECT coalesce(given.name, '') AS argument_name, position, base_type.*,
        row_number() OVER (ORDER BY position) <= pronargs - pronargdefaults AS required
    FROM unnest(coalesce(proallargtypes, proargtypes::oid[]), proargnames, proargmodes)
        WITH ORDINALITY AS given (type_id, name, mode, position) {_BASE_TYPE}
    WHERE coalesce(given.mode, 'i') IN ('i', 'b', 'v')
) AS argument ON true
WHERE proname = $2 AND prokind = 'f' AND prorettype NOT IN ('trigger'::regtype, 'event_trigger'::regtype)
    AND CASE WHEN $1::text IS NULL THEN pg_function_is_visible(pg_proc.oid) ELSE nspname = $1 END
ORDER BY pg_proc.oid, position
"""

# One row per tick, in the order of being due.
INSERT_ROWS = """
    INSERT INTO {table} ({columns})
    SELECT {values}
    FROM fired, pass
    ORDER BY fired.due_at
    RETURNING 1
"""

# One call per tick, in the order of being due. No planner can leave a call out, share it or move it, whatever the
# function is declared as: arguments are columns of rows that are sorted already, the call depends on its row even if
# it has no arguments, its answers are counted, and MATERIALIZED keeps the count though nobody reads it.
CALL_FUNCTION = """
    WITH in_turn AS MATERIALIZED (
        SELECT {values}
        FROM fired, pass
        ORDER BY fired.due_at
    ),
    called AS MATERIALIZED (
        SELECT (
            SELECT count(answers.answer)
            FROM (SELECT {function}({arguments}) AS answer WHERE in_turn.tick_id <> '') AS answers
        )
        FROM in_turn
    )
    SELECT 1 FROM called
"""

# The database's own opinion of the statement, with nothing done: casts, constants, rules, permissions.
TRY_OUT = """
EXPLAIN WITH pass AS (SELECT ''::text AS ticker_id, statement_timestamp() AS instant),
fired AS (SELECT *, id AS message_id FROM {schema}.cron_ticks),
sent AS ({insert_from_fired})
SELECT count(*) FROM sent
"""


@dataclass(frozen=True)
class Constant:
    """The same value for every tick, as if written in SQL: for a jsonb column the text `{}` is an empty object."""

    value: str | int | float | bool | None


@dataclass(frozen=True)
class PreparedSink:
    """A sink that was found to fit, as its part of the firing statement."""

    insert_from_fired: str


class TableSink:
    """A table of yours, ordinary or partitioned: each tick becomes a row of it, in the transaction that fires it."""

    def __init__(self, table: str, columns: Mapping[str, str | Constant]) -> None:
        self.table = table
        self.columns = _check_sources("columns", columns)
        self._schema, self._name = _check_qualified_name("table", table)
        if not self.columns:
            raise InvalidInputError("columns", "must map at least one column")

    async def prepare(self, database: Database) -> PreparedSink:
        """Check the mapping against the table as it is now."""
        found = await database.fetchrow(FIND_TABLE, self._schema, self._name)
        if found is None:
            raise _not_found("table", self._schema, self._name)
        table = _qualified(found["schema"], found["name"])
        if not found["is_table"]:
            raise InvalidInputError("table", f"{table} is not an ordinary or partitioned table: use a FunctionSink")
        if not found["reachable"]:
            schema, role = _identifier(found["schema"]), _identifier(found["role"])
            raise InvalidInputError("table", f"{table} is out of reach: GRANT USAGE ON SCHEMA {schema} TO {role}")
        theirs = {row["name"]: row for row in await database.fetch(FIND_COLUMNS, found["oid"])}
        self._check_columns(table, theirs, role=_identifier(found["role"]))
        text = _fill(
            INSERT_ROWS,
            table=table,
            columns=", ".join(map(_identifier, self.columns)),
            values=", ".join(_value(source, theirs[name]) for name, source in self.columns.items()),
        )
        return await _tried_out(database, "columns", text)

    def _check_columns(self, table: str, theirs: Mapping[str, asyncpg.Record], *, role: str) -> None:
        for name in self.columns:
            field = f"columns[{name!r}]"
            if name not in theirs:
                raise InvalidInputError(field, f"{table} has no such column; it has {', '.join(theirs)}")
            if theirs[name]["computed"]:
                raise InvalidInputError(field, "the database itself makes its values: leave it out")
            if not theirs[name]["permitted"]:
                raise InvalidInputError(field, f"may not be written: GRANT INSERT ON {table} TO {role}")
        missing = [name for name, row in theirs.items() if row["required"] and name not in self.columns]
        if missing:
            raise InvalidInputError(
                "columns", f"{table} wants a value for {', '.join(missing)}: map it to a field or a Constant"
            )


class FunctionSink:
    """An SQL function of yours: called once per tick, in the transaction that fires it; what it returns is ignored."""

    def __init__(self, function: str, arguments: Mapping[str, str | Constant]) -> None:
        self.function = function
        self.arguments = _check_sources("arguments", arguments)
        self._schema, self._name = _check_qualified_name("function", function)

    async def prepare(self, database: Database) -> PreparedSink:
        """Check the arguments against the function as it is now; of several, the one whose arguments fit is called."""
        overloads: dict[int, list[asyncpg.Record]] = {}
        for row in await database.fetch(FIND_FUNCTIONS, self._schema, self._name):
            overloads.setdefault(row["oid"], []).append(row)
        if not overloads:
            raise _not_found("function", self._schema, self._name)
        rows = self._choose(list(overloads.values()))
        function = _qualified(rows[0]["schema"], rows[0]["name"])
        _check_callable(rows[0])
        theirs = {row["argument_name"]: row for row in rows}
        values = [_value(source, theirs[name]) for name, source in self.arguments.items()]
        given = [f"{_identifier(name)} => in_turn.argument_{place}" for place, name in enumerate(self.arguments)]
        text = _fill(
            CALL_FUNCTION,
            values=", ".join(
                ["fired.id AS tick_id", *(f"{value} AS argument_{place}" for place, value in enumerate(values))]
            ),
            function=function,
            arguments=", ".join(given),
        )
        return await _tried_out(database, "arguments", text)

    def _choose(self, overloads: list[list[asyncpg.Record]]) -> list[asyncpg.Record]:
        problems = [self._problem(rows) for rows in overloads]
        if problems.count(None) > 1:
            several = "; ".join(_signature(rows[0]) for rows in overloads if self._problem(rows) is None)
            raise InvalidInputError("arguments", f"fit several functions, give more of them: {several}")
        if None not in problems:
            raise InvalidInputError("arguments", "; ".join(filter(None, problems)))
        return overloads[problems.index(None)]

    def _problem(self, rows: list[asyncpg.Record]) -> str | None:
        """Why a function can't be called with our arguments."""
        names = [row["argument_name"] for row in rows if row["argument_name"]]
        for name in self.arguments:
            if name not in names:
                return f"{_signature(rows[0])} has no argument {name}"
        for row in rows:
            if row["required"] and row["argument_name"] not in self.arguments:
                wanted = row["argument_name"] or f"its argument {row['position']}, which has no name"
                return f"{_signature(rows[0])} wants a value for {wanted}"
        return None


def _signature(row: asyncpg.Record) -> str:
    return f"{_qualified(row['schema'], row['name'])}({row['signature']})"


def _check_callable(row: asyncpg.Record) -> None:
    named = _signature(row)
    if not row["permitted"]:
        role, schema = _identifier(row["role"]), _identifier(row["schema"])
        raise InvalidInputError(
            "function", f"may not be called: GRANT USAGE ON SCHEMA {schema} and EXECUTE ON FUNCTION {named} TO {role}"
        )
    if row["immutable"]:
        raise InvalidInputError(
            "function", f"is IMMUTABLE, so it may be called less than once per tick: ALTER FUNCTION {named} VOLATILE"
        )
    if row["strict"]:
        raise InvalidInputError(
            "function",
            f"is STRICT, so it isn't called if an argument is NULL: ALTER FUNCTION {named} CALLED ON NULL INPUT",
        )


async def _tried_out(database: Database, field: str, text: str) -> PreparedSink:
    try:
        await database.fetch(_fill(TRY_OUT, insert_from_fired=text))
    except (
        asyncpg.SyntaxOrAccessError,
        asyncpg.DataError,
        asyncpg.IntegrityConstraintViolationError,
        asyncpg.FeatureNotSupportedError,
    ) as error:
        raise InvalidInputError(field, f"PostgreSQL can't do this: {error}") from error
    return PreparedSink(text)


def _check_qualified_name(field: str, value: object) -> tuple[str | None, str]:
    """The schema, if one is given, and the name, as the catalogue has them."""
    if not isinstance(value, str):
        raise InvalidInputError(field, f"must be a string, not {type(value).__name__}")
    found = NAME.fullmatch(value)
    if found is None:
        raise InvalidInputError(
            field, f'must be name or schema.name, with double quotes as in SQL where needed ("My Name"), not {value!r}'
        )
    check_payload(field, value)  # PostgreSQL can keep its characters
    schema, name = found.groups()
    return None if schema is None else _exact(schema), _exact(name)


def _exact(part: str) -> str:
    return part[1:-1].replace('""', '"') if part.startswith('"') else part.lower()


def _check_sources(field: str, value: object) -> dict[str, str | Constant]:
    if not isinstance(value, Mapping):
        raise InvalidInputError(field, f"must be a mapping of names to fields, not {type(value).__name__}")
    for name, source in value.items():
        check_name(field, name)
        _check_source(f"{field}[{name!r}]", source)
    return dict(value)


def _check_source(field: str, source: object) -> None:
    if isinstance(source, Constant):
        if not isinstance(source.value, str | int | float | None):
            raise InvalidInputError(
                field, f"a Constant is a text, a number, a boolean or None, not {type(source.value).__name__}"
            )
        check_payload(field, source.value)
    elif not isinstance(source, str):
        raise InvalidInputError(field, f"must be a field's name or a Constant, not {type(source).__name__}")
    elif source.startswith(KEY_PREFIX) and source != KEY_PREFIX:
        check_payload(field, source)
    elif source not in FIELDS:
        raise InvalidInputError(field, f"{source!r} is none of {', '.join(FIELDS)}, payload.<key>; or use Constant()")


def _value(source: str | Constant, target: asyncpg.Record) -> str:
    """The value for a column or argument, as its type."""
    in_catalog = target["type_schema"] == "pg_catalog"
    is_json = in_catalog and target["type_name"] in ("json", "jsonb")
    if isinstance(source, Constant):
        value = _constant(source)
    elif source.startswith(KEY_PREFIX):
        value = f"fired.payload {'->' if is_json else '->>'} {_literal(source.removeprefix(KEY_PREFIX))}::text"
    elif source not in INSTANTS or (in_catalog and target["type_name"] == "timestamptz"):
        value = FIELDS[source]
    elif is_json or target["type_category"] == "S":
        value = _INSTANT_TEXT.format(instant=INSTANTS[source])
    else:
        value = f"{INSTANTS[source]} AT TIME ZONE 'UTC'"
    if is_json and not isinstance(source, Constant):
        value = f"to_jsonb({value})"
    return f"CAST({value} AS {_qualified(target['type_schema'], target['type_name'])})"


def _constant(constant: Constant) -> str:
    value = constant.value
    if value is None:
        return "NULL"
    return _literal(value if isinstance(value, str) else check_payload("value", value))


def _literal(text: str) -> str:
    """A quoted text that means the same under every setting, without a brace: those stand for names of ours."""
    return "E'" + text.replace("\\", "\\\\").replace("'", "''").replace("{", "\\x7B") + "'"


def _identifier(name: str) -> str:
    """A quoted name, without a brace as well."""
    quoted = name.replace('"', '""')
    if "{" in name:
        return 'U&"' + quoted.replace("\\", "\\\\").replace("{", "\\007B") + '"'
    return f'"{quoted}"'


def _qualified(schema: str, name: str) -> str:
    return f"{_identifier(schema)}.{_identifier(name)}"


def _not_found(kind: str, schema: str | None, name: str) -> InvalidInputError:
    place = "on the search_path" if schema is None else f"in the schema {_identifier(schema)}"
    return InvalidInputError(
        kind, f'there is no {kind} {_identifier(name)} {place}: write schema.name, and "Name" if it has capitals'
    )


def _fill(text: str, **parts: str) -> str:
    """A statement's text with its parts, each of them in one place; none has a brace."""
    for place, part in parts.items():
        text = text.replace("{" + place + "}", part)
    return text
