"""What every contender of a benchmark does alike: the command line, the clock, and the lines on stdin and stdout.

Only the standard library is used here, and uvloop where it is installed: the peers of `benchmarks/` import this file in
a virtual environment of their own, where cron_ticks is not installed.
"""

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

try:
    import uvloop
except ModuleNotFoundError:
    run = asyncio.run
else:
    run = uvloop.run

WATCH_SECONDS = 0.1
REPORT_SECONDS = 0.01  # several of them in a slice, also of a drain that takes half a second
# More than the five executions after which psycopg prepares a statement and PostgreSQL may keep a plan.
WARM_UP_SENDS = 10


@dataclass
class Tally:
    """How many jobs the handler got, and when it got the last one."""

    handled: int = 0
    last: float | None = None

    def mark(self) -> None:
        """Count one call of the handler."""
        self.handled += 1
        self.last = time.monotonic()


@dataclass
class Consumer:
    """A connected consumer: `run` works until `stop` is called, and ends what it began before it returns."""

    run: Callable[[], Awaitable[None]]
    stop: Callable[[], None]


@dataclass
class Options:
    """The options of one command; each command reads only its own."""

    messages: int = 0
    senders: int = 1
    batch: int = 1
    watch: bool = False
    report: bool = False
    tuning: dict[str, int] = field(default_factory=dict)


# One send of job number n, committed when it returns; the result holds the new job's id.
SendOne = Callable[[int], Awaitable[Sequence[Any]]]
# One batch of jobs with these numbers, committed when it returns; the result is their ids.
SendMany = Callable[[list[int]], Awaitable[Sequence[Any]]]
CountLeft = Callable[[], Awaitable[int]]


class Contender(Protocol):
    """One library under test. Every method that opens something is an async context manager, so it is closed too."""

    # What `consume` may be told on the command line, with the value that measured best.
    tuning: ClassVar[dict[str, int]]

    def version(self) -> str:
        """Return the version of the library."""

    async def setup(self, dsn: str) -> None:
        """Install the library's schema in an empty database."""

    async def clear(self, dsn: str) -> None:
        """Remove every job and its traces with TRUNCATE, and leave the tables without statistics.

        A VACUUM of the empty table would tell the planner that it really is empty: Procrastinate then sent batches of
        1000 at a seventh to a quarter of its speed, most likely because the connection keeps plans that read the whole
        table. After TRUNCATE alone the planner knows nothing and expects some pages.
        """

    async def remove(self, dsn: str, ids: list[Any]) -> None:
        """Remove these jobs."""

    def senders(self, dsn: str, count: int) -> AbstractAsyncContextManager[list[SendOne]]:
        """Open `count` senders of single jobs, a connection each."""

    def bulk_sender(self, dsn: str) -> AbstractAsyncContextManager[SendMany]:
        """Open one sender of batches."""

    def consumer(self, dsn: str, tally: Tally, tuning: dict[str, int], /) -> AbstractAsyncContextManager[Consumer]:
        """Connect one consumer whose handler only marks the tally."""

    def counter(self, dsn: str) -> AbstractAsyncContextManager[CountLeft]:
        """Open a connection that counts the jobs not finished yet."""


def say(line: str) -> None:
    """Print one line at once: the orchestrator waits for it."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def share(messages: int, senders: int) -> list[range]:
    """Cut the job numbers into one range per sender, as even as it goes."""
    edges = [messages * index // senders for index in range(senders + 1)]
    return [range(first, end) for first, end in itertools.pairwise(edges)]


async def send_each(send: SendOne, numbers: range) -> list[Any]:
    """Send jobs one by one, the next when the one before is committed; return their ids."""
    ids: list[Any] = []
    for number in numbers:
        ids += await send(number)
    return ids


async def send_one(contender: Contender, dsn: str, options: Options) -> dict[str, Any]:
    """Time all senders together, after each has sent a few jobs to warm its connection up.

    Those few are removed again, so that the queue holds exactly the jobs that were asked for.
    """
    async with contender.senders(dsn, options.senders) as senders:
        warm = await asyncio.gather(*(send_each(send, range(WARM_UP_SENDS)) for send in senders))
        await contender.remove(dsn, list(itertools.chain.from_iterable(warm)))
        shares = zip(senders, share(options.messages, options.senders), strict=True)
        start = time.monotonic()
        await asyncio.gather(*(send_each(send, numbers) for send, numbers in shares))
        return {"seconds": time.monotonic() - start, "messages": options.messages}


async def send_many(contender: Contender, dsn: str, options: Options) -> dict[str, Any]:
    """Time one sender of batches; the last batch is smaller when the numbers do not divide."""
    async with contender.bulk_sender(dsn) as send:
        warm = [await send([number]) for number in range(WARM_UP_SENDS)]
        await contender.remove(dsn, list(itertools.chain.from_iterable(warm)))
        start = time.monotonic()
        for first in range(0, options.messages, options.batch):
            await send(list(range(first, min(first + options.batch, options.messages))))
        return {"seconds": time.monotonic() - start, "messages": options.messages}


async def stdin_lines() -> asyncio.StreamReader:
    """Read stdin without a thread: a thread stuck in a read would keep a failed consumer from exiting."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


async def run_until_told(consumer: Consumer, reader: asyncio.StreamReader) -> None:
    """Consume until a line comes or stdin closes; a consumer that ends by itself is an error."""
    running = asyncio.ensure_future(consumer.run())
    told = asyncio.ensure_future(reader.readline())
    await asyncio.wait({running, told}, return_when=asyncio.FIRST_COMPLETED)
    if not told.done():
        told.cancel()
        await running
        raise RuntimeError("The consumer ended before it was told to stop.")
    consumer.stop()
    await running


async def report_handled(tally: Tally) -> None:
    """Say again and again how many were handled, without asking anybody."""
    told = -1
    while True:
        if tally.handled != told:
            told = tally.handled
            say(json.dumps({"at": time.monotonic(), "handled": told}))
        await asyncio.sleep(REPORT_SECONDS)


async def consume(contender: Contender, dsn: str, options: Options) -> dict[str, Any]:
    """Connect, say `ready`, wait for `go`, consume until `stop`; with --report say how far it is meanwhile."""
    tally = Tally()
    reader = await stdin_lines()
    async with contender.consumer(dsn, tally, options.tuning) as consumer:
        say("ready")
        told = await reader.readline()
        start = time.monotonic()
        reporting = asyncio.ensure_future(report_handled(tally)) if options.report else None
        if told:
            await run_until_told(consumer, reader)
        if reporting is not None:
            reporting.cancel()
    return {"start": start, "last": tally.last, "handled": tally.handled}


async def left(contender: Contender, dsn: str, options: Options) -> dict[str, Any]:
    """Count once, or with --watch print every count until it is 0."""
    async with contender.counter(dsn) as count:
        found = await count()
        while options.watch and found:
            say(json.dumps({"left": found}))
            await asyncio.sleep(WATCH_SECONDS)
            found = await count()
    return {"left": found}


async def setup(contender: Contender, dsn: str, _options: Options) -> dict[str, Any]:
    """Install the schema."""
    await contender.setup(dsn)
    return {"version": contender.version()}


async def clear(contender: Contender, dsn: str, _options: Options) -> dict[str, Any]:
    """Remove every job."""
    await contender.clear(dsn)
    return {}


COMMANDS = {
    "setup": setup,
    "clear": clear,
    "send-one": send_one,
    "send-many": send_many,
    "consume": consume,
    "left": left,
}


def parse(contender: Contender) -> tuple[str, str, Options]:
    """Read the command line: the command, the DSN and the command's options."""
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    parsers = {name: commands.add_parser(name) for name in COMMANDS}
    for command in parsers.values():
        command.add_argument("--dsn", required=True)
    for name in ("send-one", "send-many", "consume"):
        parsers[name].add_argument("--messages", type=int, required=True)
    parsers["send-one"].add_argument("--senders", type=int, default=1)
    parsers["send-many"].add_argument("--batch", type=int, required=True)
    parsers["left"].add_argument("--watch", action="store_true")
    parsers["consume"].add_argument("--report", action="store_true")
    for name, value in contender.tuning.items():
        parsers["consume"].add_argument(f"--{name}", type=int, default=value, dest=name)
    given = vars(parser.parse_args())
    command, dsn = given.pop("command"), given.pop("dsn")
    tuning = {name: given.pop(name) for name in contender.tuning if name in given}
    return command, dsn, Options(**given, tuning=tuning)


def main(contender: Contender) -> None:
    """Run one command and print its result as one JSON line."""
    command, dsn, options = parse(contender)
    # PgQueuer requires uvloop and its own benchmark runs on it, so every contender gets it where it is installed.
    say(json.dumps(run(COMMANDS[command](contender, dsn, options))))
