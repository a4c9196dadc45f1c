"""What every scheduler of `fire_peers.py` does alike: its three commands, and the lines on stdin and stdout."""

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime
from typing import Protocol

import uvloop


class Scheduler(Protocol):
    """One library under test."""

    def version(self) -> str:
        """Return the version of the library."""

    async def setup(self, dsn: str) -> None:
        """Install the library's schema in an empty database."""

    async def prepare(self, dsn: str, schedules: int, due: datetime) -> None:
        """Remove what earlier bursts have left, and store so many schedules that fall due then, if they are stored."""

    def running(self, dsn: str, schedules: int, due: datetime) -> AbstractAsyncContextManager[None]:
        """Run a scheduler process; when this is entered, it stands and waits for the instant."""


@asynccontextmanager
async def in_background(work: asyncio.Task[None], seconds: float) -> AsyncIterator[None]:
    """Let a scheduler run that doesn't say when it stands: after so long, unless it has failed."""
    done, _ = await asyncio.wait([work], timeout=seconds)
    if done:
        await work
        raise RuntimeError("the scheduler has ended")
    try:
        yield
    finally:
        work.cancel()
        await asyncio.wait([work], timeout=5)


async def run_until_told(scheduler: Scheduler, options: argparse.Namespace) -> None:
    """Say when the scheduler stands; it ends with the input."""
    async with scheduler.running(options.dsn, options.schedules, options.due):
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)


def instant(text: str) -> datetime:
    """Read a time, always in UTC."""
    return datetime.fromisoformat(text).astimezone(UTC)


def main(scheduler: Scheduler) -> None:
    """Read the command line and do what it says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["setup", "prepare", "run"])
    parser.add_argument("--dsn", required=True)
    parser.add_argument("--schedules", type=int, default=0)
    parser.add_argument("--due", type=instant)
    options = parser.parse_args()
    if options.command == "run":
        uvloop.run(run_until_told(scheduler, options))
        return
    if options.command == "setup":
        uvloop.run(scheduler.setup(options.dsn))
    else:
        uvloop.run(scheduler.prepare(options.dsn, options.schedules, options.due))
    sys.stdout.write(json.dumps({"version": scheduler.version()}) + "\n")
