"""What every measure needs: a fresh database on the server, processes, and a description of the machine."""

import os
import platform
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import anyio
import asyncpg
from anyio.abc import Process

from cron_ticks.cli.bench.usage import MEGABYTE, memory_of_machine
from cron_ticks.errors import DatabaseUnavailableError
from cron_ticks.settings import PREFIX, Settings

LONGEST_LINE = 65_536

# The settings of a server that move figures most.
SERVER_SETTINGS = ("shared_buffers", "max_wal_size", "synchronous_commit", "fsync")
READ_SETTINGS = "SELECT name, current_setting(name) AS setting FROM unnest($1::text[]) AS name"


@asynccontextmanager
async def fresh_database(dsn: str, label: str) -> AsyncIterator[str]:
    """The DSN of a fresh database on the server, dropped in the end."""
    database = f"cron_ticks_bench_{os.getpid()}_{''.join(filter(str.isalnum, label)).lower()}"
    try:
        connection = await asyncpg.connect(dsn)
        await connection.execute(f'CREATE DATABASE "{database}"')
    except (OSError, ValueError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise DatabaseUnavailableError(f"no database can be made on that server: {error}. Check --dsn.") from error
    try:
        try:
            yield urlunsplit(urlsplit(dsn)._replace(path=f"/{database}"))
        finally:
            with anyio.CancelScope(shield=True):
                await connection.execute(f'DROP DATABASE "{database}" WITH (FORCE)')
    finally:
        await connection.close()


def environment_with(variables: Mapping[str, str]) -> dict[str, str]:
    """Our environment without the settings in it: figures are those of the default settings."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    return inherited | dict(variables)


def settings_with(dsn: str, **changed: Any) -> Settings:
    """The default settings but for those given, for what is measured in this process: the environment sets nothing."""
    defaults = {name: field.get_default() for name, field in Settings.model_fields.items()}
    return Settings.load(**(defaults | {"dsn": dsn} | changed))


@asynccontextmanager
async def started(
    command: Sequence[str], environment: Mapping[str, str], *, stderr: int | None = None
) -> AsyncIterator[Process]:
    """A process that ends by itself in the end, or is killed on an error."""
    process = await anyio.open_process(command, env=environment, stderr=stderr)
    try:
        yield process
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
        with anyio.CancelScope(shield=True):
            await process.aclose()


async def describe_machine(dsn: str) -> dict[str, Any]:
    """What a figure means nothing without."""
    connection = await asyncpg.connect(dsn)
    try:
        server = await connection.fetchval("SHOW server_version")
        rows = await connection.fetch(READ_SETTINGS, SERVER_SETTINGS)
        settings = {row["name"]: row["setting"] for row in rows}
    finally:
        await connection.close()
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": memory_of_machine(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "postgresql": server,
        "durable": settings["fsync"] == settings["synchronous_commit"] == "on",
        "server_settings": settings,
    }


def described(machine: Mapping[str, Any]) -> str:
    """In a line, for a caption."""
    if not machine:
        return ""
    disk = "which waits for the disk" if machine["durable"] else "which does not wait for the disk"
    memory = f"{machine['memory_bytes'] / 2**30:.1f} GiB of memory, " if machine["memory_bytes"] else ""
    settings = machine["server_settings"]
    return (
        f"{machine['processor']}, {machine['cores']} cores, {memory}Python {machine['python']}, "
        f"PostgreSQL {machine['postgresql']}, {disk}, shared_buffers {settings['shared_buffers']}, "
        f"max_wal_size {settings['max_wal_size']}"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def server_settings() -> dict[str, str]:
    """What whoever runs a server for thousands of ticks a second sets. Nothing of it is about durability."""
    memory = memory_of_machine()
    shared = {} if memory is None else {"shared_buffers": f"{max(128, memory // MEGABYTE // 4)}MB"}
    return shared | {
        "max_wal_size": "16GB",
        "min_wal_size": "1GB",
        "checkpoint_timeout": "15min",
        "wal_compression": "on",
    }
