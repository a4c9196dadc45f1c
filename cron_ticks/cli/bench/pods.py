"""Worker processes of a load that goes on for minutes: what they say is read all the time, and counted."""

import json
import subprocess
import sys
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from cron_ticks.cli.bench.machine import LONGEST_LINE, environment_with, started
from cron_ticks.cli.bench.usage import Usage, usage_of
from cron_ticks.errors import CronTicksError
from cron_ticks.settings import PREFIX

LAST_LINES = 20
START_SECONDS = 60.0


@dataclass
class Pod:
    """A `cron-ticks worker`, and how often it has said what."""

    process: Process
    said: Counter[str] = field(default_factory=Counter)
    last_said: dict[str, dict[str, Any]] = field(default_factory=dict)  # by the name of the event
    statements: Counter[str] = field(default_factory=Counter)
    expected_to_run: bool = True
    _last: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    _ready: anyio.Event = field(default_factory=anyio.Event)

    async def ready(self) -> None:
        """Wait until it stands and hears NOTIFY."""
        with anyio.move_on_after(START_SECONDS) as waiting:
            await self._ready.wait()
        if waiting.cancelled_caught:
            raise CronTicksError(f"a worker did not start within {START_SECONDS:.0f} s; it said:\n{self._words()}")

    @property
    def ticker_id(self) -> str:
        """By which the tables know it, when it stands."""
        return str(self.last_said["notify_heard"]["ticker_id"])

    def usage(self) -> Usage | None:
        """What it uses; None where nobody counts that."""
        return usage_of(self.process.pid)

    def kill(self) -> None:
        """As `kill -9` does."""
        self.expected_to_run = False
        self.process.kill()

    async def end(self) -> None:
        """Ask it to end."""
        self.expected_to_run = False
        if self.process.stdin is not None:
            await self.process.stdin.aclose()

    async def listen(self) -> None:
        """Read what it says until it ends. An end that nobody asked for is an error."""
        if self.process.stderr is None:
            raise RuntimeError("a worker without a pipe")
        lines = BufferedByteReceiveStream(self.process.stderr)
        try:
            while True:
                self._note((await lines.receive_until(b"\n", LONGEST_LINE)).decode(errors="replace"))
        except (anyio.IncompleteRead, anyio.EndOfStream):
            if self.expected_to_run:
                raise CronTicksError(f"a worker ended too early; its last words:\n{self._words()}") from None

    def _note(self, line: str) -> None:
        self._last.append(line)
        if not line.startswith("{"):
            return
        event: dict[str, Any] = json.loads(line)
        self.said[event["event"]] += 1
        self.last_said[event["event"]] = event
        if event["event"] == "statement":
            self.statements[event["text"]] += 1
        if event["event"] == "notify_heard":
            self._ready.set()

    def _words(self) -> str:
        return "\n".join(self._last)


@asynccontextmanager
async def pods(apps: Sequence[str], dsn: str, settings: Mapping[str, str] | None = None) -> AsyncIterator[list[Pod]]:
    """A worker for each application, with the default settings but for those given; all stand, and end in the end."""
    try:
        async with AsyncExitStack() as stack, anyio.create_task_group() as tasks:
            running = [await stack.enter_async_context(_pod(app, dsn, settings or {})) for app in apps]
            for pod in running:
                tasks.start_soon(pod.listen)
            for pod in running:
                await pod.ready()
            yield running
            for pod in running:
                await pod.end()
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


@asynccontextmanager
async def _pod(app: str, dsn: str, settings: Mapping[str, str]) -> AsyncIterator[Pod]:
    command = [sys.executable, "-m", "cron_ticks.cli", "worker", "--app", app, "--while-stdin"]
    variables = {f"{PREFIX}{name.upper()}": value for name, value in settings.items()}
    environment = environment_with({f"{PREFIX}DSN": dsn, f"{PREFIX}LOG_FORMAT": "json"} | variables)
    async with started(command, environment, stderr=subprocess.PIPE) as process:
        yield Pod(process)
