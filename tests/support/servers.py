"""PostgreSQL servers for tests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import asyncpg

from cron_ticks.database import open_database
from cron_ticks.embedded import WHEEL_FOLDERS, EmbeddedServer, wheel_folder
from cron_ticks.migrator import migrate
from cron_ticks.settings import Settings

TEMPLATE = "template_migrated"


def program_folder(version: int) -> Path:
    """PostgreSQL's programs: from the wheel, or from Debian's package."""
    if version in WHEEL_FOLDERS:
        return wheel_folder() / WHEEL_FOLDERS[version] / "bin"
    return Path(f"/usr/lib/postgresql/{version}/bin")


@dataclass(frozen=True)
class TestServer:
    """A server and its databases."""

    __test__ = False

    embedded: EmbeddedServer
    version: int

    def dsn_of(self, database: str) -> str:
        return self.embedded.dsn.replace("/postgres?", f"/{database}?")

    async def run(self, statement: str) -> None:
        connection = await asyncpg.connect(self.embedded.dsn)
        try:
            await connection.execute(statement)
        finally:
            await connection.close()

    async def make_template(self) -> None:
        await self.run(f"CREATE DATABASE {TEMPLATE}")
        dsn = self.dsn_of(TEMPLATE)
        async with open_database(Settings(), dsn=dsn) as database:
            await migrate(database)

    @asynccontextmanager
    async def fresh_database(self, name: str, template: str = TEMPLATE) -> AsyncIterator[str]:
        await self.run(f"CREATE DATABASE {name} TEMPLATE {template}")
        try:
            yield self.dsn_of(name)
        finally:
            await self.run(f"DROP DATABASE {name} WITH (FORCE)")
