"""Commands run in this process: starting one for each would take most of the time."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import asyncpg
import structlog
from typer.testing import CliRunner

from cron_ticks.cli.main import app
from cron_ticks.settings import Settings
from token_queue import QueueManager

Result = TypeVar("Result")


@dataclass(frozen=True)
class Ended:
    """What a command did."""

    code: int
    output: str
    error: str

    @property
    def json(self) -> Any:
        assert self.code == 0, self.error
        return json.loads(self.output)

    @property
    def lines(self) -> list[str]:
        """What it printed for people, without the blanks that fill up a table."""
        assert self.code == 0, self.error
        return [line.strip() for line in self.output.splitlines() if line.strip()]


def run_command(*arguments: str, environment: dict[str, str] | None = None) -> Ended:
    """`cron-ticks …`, to its end. Not from a coroutine: the command has a loop of its own."""
    with _own_logs():
        ended = CliRunner().invoke(app, list(arguments), env=environment)
    if ended.exception is not None and not isinstance(ended.exception, SystemExit):
        raise ended.exception
    return Ended(ended.exit_code, ended.stdout, ended.stderr)


@contextmanager
def _own_logs() -> Iterator[None]:
    """A command configures logs for its process, which here is the tests'."""
    before = structlog.get_config() if structlog.is_configured() else None
    try:
        yield
    finally:
        if before is None:
            structlog.reset_defaults()
        else:
            structlog.configure(**before)


def fetch(dsn: str, query: str, *arguments: object) -> list[asyncpg.Record]:
    """Look into the database from a test that is no coroutine."""

    async def ask() -> list[asyncpg.Record]:
        connection = await asyncpg.connect(dsn)
        try:
            return await connection.fetch(query, *arguments)
        finally:
            await connection.close()

    return asyncio.run(ask())


def manage(dsn: str, work: Callable[[QueueManager], Awaitable[Result]]) -> Result:
    """Do some work with a QueueManager from a test that is no coroutine."""

    async def use() -> Result:
        async with QueueManager(settings=Settings.load(dsn=dsn)) as queue_manager:
            return await work(queue_manager)

    return asyncio.run(use())
