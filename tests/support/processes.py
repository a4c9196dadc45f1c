"""Real processes of the product, and waiting for what they say."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

WAIT_SECONDS = 60.0
TESTS = Path(__file__).parent.parent


class RunningProcess:
    """A process whose log lines are read as they come."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid
        self.events: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self._output = bytearray()
        self._news = asyncio.Condition()
        self._readers = [asyncio.create_task(self._read_errors()), asyncio.create_task(self._read_output())]

    async def _read_errors(self) -> None:
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            await self._note(line.decode(errors="replace").rstrip())
        async with self._news:
            self._news.notify_all()

    async def _note(self, line: str) -> None:
        async with self._news:
            self.errors.append(line)
            if line.startswith("{"):
                self.events.append(json.loads(line))
            self._news.notify_all()

    async def _read_output(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self._output += line
            async with self._news:
                self._news.notify_all()

    async def wait_for(
        self, event: str, *, times: int = 1, where: Callable[[dict[str, Any]], bool] = lambda _: True
    ) -> dict[str, Any]:
        """Wait until the process has logged `event` so many times; the last of them."""

        def found() -> list[dict[str, Any]]:
            return [line for line in self.events if line["event"] == event and where(line)]

        async with asyncio.timeout(WAIT_SECONDS), self._news:
            await self._news.wait_for(lambda: len(found()) >= times or self._readers[0].done())
        if len(found()) < times:
            raise AssertionError(f"the process ended without {event!r}:\n" + "\n".join(self.errors))
        return found()[times - 1]

    async def first_output_line(self) -> str:
        """Wait for a line on standard output."""
        async with asyncio.timeout(WAIT_SECONDS), self._news:
            await self._news.wait_for(lambda: b"\n" in self._output)
        return self._output.decode().splitlines()[0]

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def tell(self, line: str) -> None:
        """A line on the process's standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())

    def close_input(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    async def wait(self, seconds: float = WAIT_SECONDS) -> int:
        """Wait for the end; the exit code."""
        async with asyncio.timeout(seconds):
            code = await self._process.wait()
            await asyncio.gather(*self._readers)
        return code

    async def output(self, seconds: float = WAIT_SECONDS) -> str:
        await self.wait(seconds)
        return self._output.decode()

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        self._process._transport.close()  # type: ignore[attr-defined]


class Processes:
    """Starts processes and remembers them."""

    def __init__(self) -> None:
        self._started: list[RunningProcess] = []

    async def start(
        self, *command: str, environment: Mapping[str, str] | None = None, folder: Path | None = None
    ) -> RunningProcess:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            cwd=folder,
            env=os.environ | (environment or {}),
            limit=2**20,
        )
        running = RunningProcess(process)
        self._started.append(running)
        return running

    async def cron_ticks(
        self, *arguments: str, environment: Mapping[str, str] | None = None, folder: Path | None = None
    ) -> RunningProcess:
        """`cron-ticks …` with this Python."""
        command = (sys.executable, "-m", "cron_ticks.cli", *arguments)
        return await self.start(*command, environment=environment, folder=folder)

    async def worker(
        self, dsn: str, app: str = "quick", others: Mapping[str, str] | None = None, /, **settings: str
    ) -> RunningProcess:
        """`cron-ticks worker` with an application of `support.apps`, once it has started.

        `others` are environment variables that are no settings.
        """
        variables = {f"CRON_TICKS_{name.upper()}": value for name, value in settings.items()}
        environment = {"CRON_TICKS_DSN": dsn, "PYTHONPATH": str(TESTS), **variables, **(others or {})}
        worker = await self.cron_ticks("worker", "--app", f"support.apps:{app}", environment=environment)
        await worker.wait_for("worker_started")
        return worker

    async def kill_all(self) -> None:
        for process in self._started:
            await process.kill()
