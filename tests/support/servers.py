"""PostgreSQL servers for tests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import psutil

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


def postmaster(server: EmbeddedServer) -> psutil.Process:
    """The server's first process."""
    return psutil.Process(int((server.cluster.data / "postmaster.pid").read_text().split()[0]))


def kill_server(server: EmbeddedServer) -> None:
    """`kill -9` of all of the server's processes, children first; waits until they are dead or zombies."""
    first = postmaster(server)
    family = [*first.children(recursive=True), first]
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    for process in family:
        with suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
            process.wait(timeout=1)


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
