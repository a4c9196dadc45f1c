"""The messages' half of `bench bloat`: consumers that work through many messages and say how far they are."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import asyncpg
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from cron_ticks.cli.bench.bloat_figures import Drain, slice_rates
from cron_ticks.cli.bench.bloat_snapshot import dead_rows, held_snapshot
from cron_ticks.cli.bench.machine import LONGEST_LINE, environment_with, started
from cron_ticks.cli.bench.rounds import BATCH, Course
from cron_ticks.errors import CronTicksError

PATIENCE_SECONDS = 120.0  # without a word that it went on


async def consume_in_slices(course: Course, count: int, processes: int, slices: int, *, held: bool) -> Drain:
    """All messages are there before the snapshot is taken; then processes handle them."""
    await course.ask("clear")
    await course.ask("send-many", "--messages", str(count), "--batch", str(BATCH))
    connection = await asyncpg.connect(course.dsn)
    try:
        await connection.execute("VACUUM (ANALYZE)")
        async with held_snapshot(course.dsn, held=held):
            reports, start = await _consume(course, count, processes)
            await _check(course, reports, count)
            return Drain(count, slice_rates(reports, start, count, slices), await dead_rows(connection))
    finally:
        await connection.close()


Reports = dict[int, list[tuple[float, int]]]  # by process: when, and how many it had handled by then


async def _consume(course: Course, count: int, processes: int) -> tuple[Reports, float]:
    async with _consumers(course, count, processes) as consumers:
        lines = [BufferedByteReceiveStream(_piped(process.stdout)) for process in consumers]
        for reader in lines:
            await reader.receive_until(b"ready\n", LONGEST_LINE)
        for process in consumers:
            await _piped(process.stdin).send(b"go\n")
        reports = await _follow(lines, count)
        for process in consumers:
            await _piped(process.stdin).send(b"stop\n")
        answers = [await _answer(reader) for reader in lines]
    for number, answer in enumerate(answers):
        if answer["last"] is not None:
            reports[number].append((answer["last"], answer["handled"]))
    return reports, min(answer["start"] for answer in answers)


@asynccontextmanager
async def _consumers(course: Course, count: int, processes: int) -> AsyncIterator[list[Process]]:
    contender = course.contender
    command = [*contender.command, "consume", "--dsn", course.dsn, "--messages", str(count), "--report"]
    environment = environment_with(contender.environment)
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(started(command, environment)) for _ in range(processes)]


async def _follow(lines: Sequence[BufferedByteReceiveStream], count: int) -> Reports:
    """Read what they say until all is handled. Nobody asks the database: that would cost more and more."""
    reports: Reports = {number: [] for number in range(len(lines))}

    async def follow(number: int, reader: BufferedByteReceiveStream) -> None:
        while True:
            said = json.loads(await reader.receive_until(b"\n", LONGEST_LINE))
            reports[number].append((said["at"], said["handled"]))
            if sum(given[-1][1] for given in reports.values() if given) >= count:
                tasks.cancel_scope.cancel()
            watch.deadline = anyio.current_time() + PATIENCE_SECONDS

    with anyio.move_on_after(PATIENCE_SECONDS) as watch:
        async with anyio.create_task_group() as tasks:
            for number, reader in enumerate(lines):
                tasks.start_soon(follow, number, reader)
    if watch.cancelled_caught:
        raise CronTicksError(f"nothing was handled for {PATIENCE_SECONDS:.0f} s")
    return reports


async def _answer(reader: BufferedByteReceiveStream) -> dict[str, Any]:
    """Its last words, after the reports that were on the way."""
    while True:
        said: dict[str, Any] = json.loads(await reader.receive_until(b"\n", LONGEST_LINE))
        if "last" in said:
            return said


async def _check(course: Course, reports: Reports, count: int) -> None:
    handled = sum(given[-1][1] for given in reports.values() if given)
    left = (await course.ask("left"))["left"]
    if (handled, left) != (count, 0):
        name = course.contender.name
        raise CronTicksError(f"{name} handled {handled} messages, {left} were left; there were {count}")


def _piped(stream: Any) -> Any:
    if stream is None:
        raise RuntimeError("a process without a pipe")
    return stream
