"""Processes that fire ticks: how they are started, what they say, and the wait for it."""

import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from cron_ticks.cli.bench.machine import LONGEST_LINE, environment_with, started
from cron_ticks.errors import CronTicksError
from cron_ticks.settings import PREFIX, Settings

PROCESSES = "cron_ticks.cli.bench.fire_processes"
BATCH = Settings.model_fields["ticker_batch_size"].default
LONGEST_SECONDS = 120.0  # that anything may take
LAST_LINES = 20

WORKER = ("cron_ticks.cli", "worker", "--app", f"{PROCESSES}:worker", "--while-stdin")


def bare_command(dsn: str, ticks: int, processes: int, *, until_due: bool = False) -> tuple[str, ...]:
    """A module and its arguments: the bare statement for a share of the ticks, when told or when they are due."""
    begins = ("--until-due",) if until_due else ()
    return (PROCESSES, dsn, str(BATCH), str(ticks), str(processes), *begins)


@dataclass(frozen=True)
class Firer:
    """A process that fires ticks, and what it says."""

    process: Process
    lines: BufferedByteReceiveStream
    last: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))

    async def event(self) -> dict[str, Any]:
        """The next thing it says."""
        while True:
            try:
                line = (await self.lines.receive_until(b"\n", LONGEST_LINE)).decode(errors="replace")
            except (anyio.IncompleteRead, anyio.EndOfStream):
                raise CronTicksError("a process ended too early; its last words:\n" + "\n".join(self.last)) from None
            self.last.append(line)
            if line.startswith("{"):
                return dict(json.loads(line))

    async def wait_for(self, name: str) -> None:
        """Wait until it says this."""
        with patience(name):
            while (await self.event())["event"] != name:
                pass

    async def read(self, note: Callable[[dict[str, Any]], None]) -> None:
        """Note whatever it says, for ever."""
        while True:
            note(await self.event())


@asynccontextmanager
async def standing_firers(
    module: Sequence[str], dsn: str, processes: int, environment: Mapping[str, str]
) -> AsyncIterator[list[Firer]]:
    """Processes that stand and hear NOTIFY; they are asked to end by the end of their input."""
    command = [sys.executable, "-m", *module]
    variables = environment_with({f"{PREFIX}DSN": dsn} | dict(environment))
    async with AsyncExitStack() as stack:
        firers = []
        for _ in range(processes):
            running = await stack.enter_async_context(started(command, variables, stderr=subprocess.PIPE))
            firers.append(Firer(running, BufferedByteReceiveStream(_piped(running.stderr))))
        for firer in firers:
            await firer.wait_for("notify_heard")
        yield firers
        for firer in firers:
            await _piped(firer.process.stdin).aclose()


async def counted(firers: Sequence[Firer], event: str, ticks: int) -> float:
    """Wait until they have said this of so many ticks; when that was, by our own monotonic clock."""
    left = ticks
    done = anyio.Event()

    def note(said: dict[str, Any]) -> None:
        nonlocal left
        if said["event"] == event:
            left -= said["ticks"]
            if left <= 0:
                done.set()

    async with reading(firers, note):
        with patience(f"{event} of {ticks} ticks"):
            await done.wait()
            return time.monotonic()


async def all_said(firers: Sequence[Firer], event: str) -> float:
    """Wait until each has said this; when that was, by our own monotonic clock."""
    async with anyio.create_task_group() as tasks:
        for firer in firers:
            tasks.start_soon(firer.wait_for, event)
    return time.monotonic()


@asynccontextmanager
async def reading(firers: Sequence[Firer], note: Callable[[dict[str, Any]], None]) -> AsyncIterator[None]:
    """Read what they say meanwhile."""
    try:
        async with anyio.create_task_group() as tasks:
            for firer in firers:
                tasks.start_soon(firer.read, note)
            yield
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


@contextmanager
def patience(what: str) -> Iterator[None]:
    """An error after a while."""
    try:
        with anyio.fail_after(LONGEST_SECONDS):
            yield
    except TimeoutError:
        raise CronTicksError(f"{what}: not within {LONGEST_SECONDS:.0f} s") from None


def _piped(stream: Any) -> Any:
    if stream is None:
        raise RuntimeError("a process without a pipe")
    return stream
