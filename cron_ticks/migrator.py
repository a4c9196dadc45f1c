"""Migrations: numbered plain SQL, forward only, each applied once however many pods start together."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import asyncpg
import structlog
from packaging.version import Version

from cron_ticks.database import Connection, Database, in_schema
from cron_ticks.errors import MigrationError
from cron_ticks.release import __version__

log = structlog.get_logger("cron_ticks.migrator")

DEADLINE_SECONDS = 3600.0  # a migration may rewrite a large table, and the other pods wait for it
FILE_NAME = re.compile(r"^(?P<number>\d{4})_(?P<name>[a-z0-9_]+)\.sql$")
OLDEST_RELEASE = re.compile(r"^-- oldest-release: (?P<release>\S+)$", re.MULTILINE)

# Whether there is bookkeeping yet. Read from the catalogue like any table: to_regclass() may answer from a cache that
# doesn't know yet what was committed while we waited for the lock.
FIND_BOOKKEEPING = """
SELECT EXISTS (
    SELECT
    FROM pg_catalog.pg_class
    JOIN pg_catalog.pg_namespace ON pg_namespace.oid = relnamespace
    WHERE nspname = $1 AND relname = 'cron_ticks_migrations'
)
"""

# What has been applied, in order.
APPLIED = "SELECT number, name, checksum, oldest_release FROM {schema}.cron_ticks_migrations ORDER BY number"

# One process at a time, until the end of its transaction, which also holds through a transaction pooler.
LOCK = "SELECT pg_advisory_xact_lock($1)"

PREPARE_SCRIPT = """\
DO $$
BEGIN
    -- Only where it is missing: even IF NOT EXISTS asks for the right to create schemas in the database.
    IF to_regnamespace('{schema}') IS NULL THEN
        CREATE SCHEMA IF NOT EXISTS {schema};
    END IF;
END $$;
CREATE TABLE IF NOT EXISTS {schema}.cron_ticks_migrations (
    number integer PRIMARY KEY,
    name text NOT NULL,
    checksum text NOT NULL,
    -- The oldest release that may work with the schema as this migration leaves it.
    oldest_release text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT statement_timestamp()
);
"""

RECORD_SCRIPT = """\
INSERT INTO {schema}.cron_ticks_migrations (number, name, checksum, oldest_release)
VALUES (%(number)d, '%(name)s', '%(checksum)s', '%(oldest_release)s');
"""


@dataclass(frozen=True)
class Migration:
    """One file of `migrations/`."""

    number: int
    name: str
    text: str
    oldest_release: str

    @property
    def label(self) -> str:
        """The file's name without its ending."""
        return f"{self.number:04d}_{self.name}"

    @property
    def checksum(self) -> str:
        """Tells an edited migration from the one that was applied."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def script(self) -> str:
        """The migration and the row that says it has been applied."""
        record = RECORD_SCRIPT % {
            "number": self.number,
            "name": self.name,
            "checksum": self.checksum,
            "oldest_release": self.oldest_release,
        }
        return f"-- {self.label}\n{self.text.rstrip()}\n\n{record}"


def migrations_folder() -> Path:
    """In the wheel the files lie inside the package, in a checkout beside it."""
    package = Path(__file__).parent
    for folder in (package / "migrations", package.parent / "migrations"):
        if folder.is_dir():
            return folder
    raise MigrationError(f"no migrations beside {package}: the installation is incomplete, install cron-ticks again")


@cache
def known_migrations() -> tuple[Migration, ...]:
    """Every migration of this release, in order."""
    return read_migrations(migrations_folder())


def read_migrations(folder: Path) -> tuple[Migration, ...]:
    """The numbered files of a folder; numbers start at 1 and have no gaps."""
    migrations = []
    for path in sorted(folder.glob("*.sql")):
        match = FILE_NAME.match(path.name)
        if match is None:
            raise MigrationError(f"{path.name}: a migration is called NNNN_name.sql")
        text = path.read_text(encoding="utf-8")
        oldest = OLDEST_RELEASE.search(text)
        if oldest is None:
            raise MigrationError(f"{path.name}: the line '-- oldest-release: X.Y.Z' is missing")
        migrations.append(Migration(int(match["number"]), match["name"], text, oldest["release"]))
    if [migration.number for migration in migrations] != list(range(1, len(migrations) + 1)):
        raise MigrationError(f"migrations in {folder} must be numbered 0001, 0002, … without gaps")
    return tuple(migrations)


def render_script(schema: str, *, after: int = 0) -> str:
    """All migrations after number `after` as one transaction, for people whose DBA applies them."""
    parts = [
        PREPARE_SCRIPT,
        *(migration.script for migration in known_migrations() if migration.number > after),
    ]
    return in_schema("\n".join(["BEGIN;", *parts, "COMMIT;"]), schema) + "\n"


async def pending_migrations(
    database: Database, *, connection: Connection | None = None, release: str = __version__
) -> list[Migration]:
    """What `migrate` would apply; raises if this release is too old for the schema. Changes nothing."""
    async with database.connection(connection) as chosen:
        if not await database.fetchval(FIND_BOOKKEEPING, database.schema, connection=chosen):
            return list(known_migrations())
        try:
            applied = await database.fetch(APPLIED, connection=chosen)
        except asyncpg.InsufficientPrivilegeError as error:
            raise MigrationError(
                f"{error}: grant this role the use of schema {database.schema!r} and of the tables in it"
            ) from error
    _refuse_if_too_old(applied, release)
    _refuse_if_edited(applied)
    numbers = {row["number"] for row in applied}
    return [migration for migration in known_migrations() if migration.number not in numbers]


async def migrate(database: Database, *, release: str = __version__) -> list[Migration]:
    """Apply what is pending, all in one transaction. Processes that come at the same time wait and find it done."""
    if not await pending_migrations(database, release=release):
        return []
    async with database.transaction() as connection:
        key = lock_key(database.schema)
        await database.fetch(LOCK, key, connection=connection, deadline_seconds=DEADLINE_SECONDS)
        pending = await pending_migrations(database, connection=connection, release=release)
        if pending:
            script = "\n".join([PREPARE_SCRIPT, *(migration.script for migration in pending)])
            await _run(database, script, connection)
    for migration in pending:
        log.info("migration_applied", migration=migration.label, database_schema=database.schema)
    return pending


async def _run(database: Database, script: str, connection: Connection) -> None:
    try:
        await database.execute_script(script, connection=connection, deadline_seconds=DEADLINE_SECONDS)
    except asyncpg.DuplicateTableError as error:
        raise MigrationError(
            f"{error}: schema {database.schema!r} has a table of that name that is not ours. "
            "Nothing was changed; set CRON_TICKS_DATABASE_SCHEMA to a schema of its own."
        ) from error
    except asyncpg.InsufficientPrivilegeError as error:
        raise MigrationError(
            f"{error}: this role may not change schema {database.schema!r}. Nothing was changed; "
            "let the owner apply the output of 'cron-ticks migrate --sql'."
        ) from error


def lock_key(schema: str) -> int:
    """The advisory lock of an installation: the same on every server version."""
    digest = hashlib.sha256(f"cron_ticks migrations {schema}".encode()).digest()
    return int.from_bytes(digest[:8], signed=True)


def _refuse_if_too_old(applied: Sequence[asyncpg.Record], release: str) -> None:
    newest = max((row["oldest_release"] for row in applied), key=Version, default=None)
    if newest is not None and Version(newest) > Version(release):
        raise MigrationError(
            f"this is cron-ticks {release}, but the database's schema needs at least {newest}: "
            "upgrade this installation"
        )


def _refuse_if_edited(applied: Sequence[asyncpg.Record]) -> None:
    known = {migration.number: migration for migration in known_migrations()}
    for row in applied:
        migration = known.get(row["number"])
        if migration is not None and migration.checksum != row["checksum"]:
            raise MigrationError(
                f"migration {migration.label} was applied with another text than this installation has: "
                "released migrations are never edited, install an unchanged release"
            )
