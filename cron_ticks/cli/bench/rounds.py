"""Runs contenders in turn, round after round, on one server, and says what came out."""

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream
from rich import box
from rich.table import Table

from cron_ticks.cli.bench.machine import (
    LONGEST_LINE,
    describe_machine,
    described,
    environment_with,
    fresh_database,
    started,
)
from cron_ticks.cli.bench.plot import Bar, Plot, bar_of
from cron_ticks.cli.bench.progress import Steps
from cron_ticks.errors import CronTicksError
from cron_ticks.events import DEFAULT_LEVEL, LEVELS
from cron_ticks.settings import PREFIX

BATCH = 1000
EVENTS = f"{PREFIX}EVENTS"
OTHER_LEVELS = {f"events={level}": level for level in LEVELS if level != DEFAULT_LEVEL}
SENDERS = 8


@dataclass(frozen=True)
class Contender:
    """A program with the commands of `contract`, and how many of the messages it can do in the time of the others."""

    name: str
    command: Sequence[str]
    share: float = 1.0
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Measure:
    """One figure: messages a second."""

    name: str
    share: float  # of the messages
    run: Callable[["Course", int], Any]


@dataclass(frozen=True)
class Course:
    """A contender with a database of its own on the common server."""

    contender: Contender
    dsn: str

    async def ask(self, command: str, *options: str) -> dict[str, Any]:
        """Run a command to its end; its last line."""
        result = await anyio.run_process(
            self._command(command, *options), check=False, env=self._environment, stderr=subprocess.PIPE
        )
        if result.returncode != 0:
            raise CronTicksError(f"{self.contender.name}: {command} failed:\n{result.stderr.decode()[-2000:]}")
        answer: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
        return answer

    async def send_one(self, messages: int, senders: int) -> float:
        """Messages a second, one by one."""
        await self.ask("clear")
        answer = await self.ask("send-one", "--messages", str(messages), "--senders", str(senders))
        return float(answer["messages"] / answer["seconds"])

    async def send_many(self, messages: int) -> float:
        """Messages a second, by the batch."""
        await self.ask("clear")
        answer = await self.ask("send-many", "--messages", str(messages), "--batch", str(BATCH))
        return float(answer["messages"] / answer["seconds"])

    async def send_beside_a_worker(self, messages: int) -> float:
        """Messages a second, one by one from several senders, while a worker handles them: it has to be woken up."""
        await self.ask("clear")
        sending = ("send-one", "--messages", str(messages), "--senders", str(SENDERS))
        answer, _ = await self._consumed_during(1, messages, *sending)
        return float(answer["messages"] / answer["seconds"])

    async def consume(self, messages: int, processes: int) -> float:
        """Messages a second from the start of the first process to the last message of the last one."""
        await self.send_many(messages)
        _, answers = await self._consumed_during(processes, messages, "left", "--watch")
        handled = sum(answer["handled"] for answer in answers)
        if handled != messages:
            raise CronTicksError(f"{self.contender.name} handled {handled} messages, and there were {messages}")
        last = max(answer["last"] for answer in answers if answer["last"] is not None)
        return float(messages / (last - min(answer["start"] for answer in answers)))

    async def _consumed_during(
        self, processes: int, messages: int, *asked: str
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Ask for something while consumers run; the answer, and theirs."""
        async with AsyncExitStack() as stack:
            command = self._command("consume", "--messages", str(messages))
            consumers = [await stack.enter_async_context(started(command, self._environment)) for _ in range(processes)]
            lines = [BufferedByteReceiveStream(_output(process)) for process in consumers]
            for reader in lines:
                await reader.receive_until(b"ready\n", LONGEST_LINE)
            for process in consumers:
                await _tell(process, b"go\n")
            answer = await self.ask(*asked)
            for process in consumers:
                await _tell(process, b"stop\n")
            return answer, [json.loads(await reader.receive_until(b"\n", LONGEST_LINE)) for reader in lines]

    @property
    def _environment(self) -> dict[str, str]:
        return environment_with(self.contender.environment)

    def _command(self, command: str, *options: str) -> list[str]:
        return [*self.contender.command, command, "--dsn", self.dsn, *options]


MEASURES = (
    Measure("send one by one", 0.1, lambda course, messages: course.send_one(messages, 1)),
    Measure(f"send one by one, {SENDERS} senders", 0.1, lambda course, messages: course.send_one(messages, SENDERS)),
    Measure("the same beside a worker", 0.1, lambda course, messages: course.send_beside_a_worker(messages)),
    Measure(f"send by {BATCH}", 1.0, lambda course, messages: course.send_many(messages)),
    Measure("consume, 1 process", 1.0, lambda course, messages: course.consume(messages, 1)),
    Measure("consume, 2 processes", 1.0, lambda course, messages: course.consume(messages, 2)),
)

OWN_CONTENDERS = tuple(
    Contender(name, (sys.executable, "-m", "cron_ticks.cli.bench.contenders", name))
    for name in ("cron_ticks", "bare SQL")
)

# Our own with the other levels of events, to see what these cost.
LEVEL_CONTENDERS = tuple(
    Contender(name, OWN_CONTENDERS[0].command, environment={EVENTS: level}) for name, level in OTHER_LEVELS.items()
)


@dataclass(frozen=True)
class Figures:
    """Messages a second: by measure, then by contender, a value per round."""

    rates: dict[str, dict[str, list[float]]]
    versions: dict[str, str]
    machine: dict[str, Any]
    messages: int

    def as_json(self) -> dict[str, Any]:
        """Each value, and the median, the range and our ratio to each contender round by round."""
        return {
            "machine": self.machine,
            "messages": self.messages,
            "versions": self.versions,
            "measures": {
                measure: {
                    name: {
                        "per_second": [round(rate, 1) for rate in rates],
                        "median": round(statistics.median(rates), 1),
                        "lowest": round(min(rates), 1),
                        "highest": round(max(rates), 1),
                        "ratio_of_ours": [round(ratio, 3) for ratio in self.ratios(measure, name)],
                    }
                    for name, rates in by_contender.items()
                }
                for measure, by_contender in self.rates.items()
            },
        }

    def ratios(self, measure: str, name: str) -> list[float]:
        """Ours by the contender's, in each round."""
        rates = self.rates[measure]
        return [ours / theirs for ours, theirs in zip(rates["cron_ticks"], rates[name], strict=True)]

    def table(self) -> Table:
        """For people: the median with the range, and our ratio to it."""
        caption = (
            f"messages a second, median of {self.rounds} rounds (lowest to highest); ratio: ours to theirs, per round. "
            f"{described(self.machine)}"
        )
        return self.fill(Table(title="cron-ticks bench queue", caption=caption, box=box.SIMPLE_HEAD))

    def plot(self) -> Plot:
        """All measures."""
        caption = f"Median and range of {self.rounds} rounds. {described(self.machine)}."
        return Plot("cron-ticks bench queue", "messages a second", self.bars(), logarithmic=True, caption=caption)

    def bars(self) -> dict[str, dict[str, Bar]]:
        """A group per measure."""
        return {
            measure: {name: bar_of(rates) for name, rates in by_contender.items()}
            for measure, by_contender in self.rates.items()
        }

    @property
    def rounds(self) -> int:
        """How many values each has."""
        return len(next(iter(next(iter(self.rates.values())).values())))

    def fill(self, table: Table) -> Table:
        """A column per contender, a row per measure."""
        table.add_column("")
        for name, version in self.versions.items():
            table.add_column(f"{name} {version}", justify="right")
        for measure, by_contender in self.rates.items():
            cells = [_cell(rates, self.ratios(measure, name), name) for name, rates in by_contender.items()]
            table.add_row(measure, *cells)
        return table


def _cell(rates: Sequence[float], ratios: Sequence[float], name: str) -> str:
    spread = f"{statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"
    if name == "cron_ticks":
        return spread
    return f"{spread}\nratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


async def run_rounds(
    dsn: str,
    *,
    contenders: Sequence[Contender],
    measures: Sequence[Measure],
    messages: int,
    rounds: int,
    progress: Steps,
) -> Figures:
    """Every measure of every contender once per round, the contenders in another order each time."""
    rates: dict[str, dict[str, list[float]]] = {
        measure.name: {contender.name: [] for contender in contenders} for measure in measures
    }
    async with AsyncExitStack() as stack:
        courses = [
            Course(contender, await stack.enter_async_context(fresh_database(dsn, contender.name)))
            for contender in contenders
        ]
        versions = {course.contender.name: (await course.ask("setup"))["version"] for course in courses}
        progress.expect(rounds * len(measures) * len(courses))
        for number in range(rounds):
            for measure in measures:
                for course in courses[number % len(courses) :] + courses[: number % len(courses)]:
                    progress(f"round {number + 1} of {rounds}: {measure.name}: {course.contender.name}")
                    count = max(SENDERS, round(messages * measure.share * course.contender.share))
                    rates[measure.name][course.contender.name].append(await measure.run(course, count))
        machine = await describe_machine(dsn)
    return Figures(rates, versions, machine, messages)


def _output(process: Process) -> Any:
    if process.stdout is None:
        raise RuntimeError("a contender without an output")
    return process.stdout


async def _tell(process: Process, line: bytes) -> None:
    if process.stdin is None:
        raise RuntimeError("a contender without an input")
    await process.stdin.send(line)
