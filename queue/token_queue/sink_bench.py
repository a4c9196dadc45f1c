"""The bench that a sink is checked on: the engine's parts around it, and what arrives compared with what should."""

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import count, cycle, islice
from typing import Any

import anyio
import asyncpg

from cron_ticks.firing import DUE_NOW, TickFirer, shown
from cron_ticks.ids import new_ticker_id
from cron_ticks.loops import Pause
from cron_ticks.publishing import Publisher
from cron_ticks.repository import CronRepository
from cron_ticks.rows import LeasedTick
from cron_ticks.schedule_manager import ScheduleManager
from cron_ticks.schedules import Delivery, SinkKind, define_schedule
from cron_ticks.settings import Settings
from cron_ticks.sinks import DEFAULT_BATCH, DEFAULT_CALLS, OutsideSink, Publish, SameDatabaseSink, Sinks
from cron_ticks.user_sinks import FunctionSink, TableSink

PAYLOADS: tuple[Any, ...] = (
    {"text": 'it\'s a "quote", a \\ backslash, {schema}, %s, $1, a\nline and a\ttab'},
    {"ключ": "größer, 時間, 🎉, \u200b, \u2028", "": "no key", "a.b": "a dot"},
    {"whole": [0, -1, 2**53 + 1, -(2**63), 10**30], "parts": [0.1, -2.5e-7]},
    {"deep": [[[[{"deeper": [None, True, False, "", [], {}]}]]]]},
    {"long": "x" * 10_000},
    {},
    ["a list", {"not": "an object"}],
    "a text",
)
NAMES = ("it's", 'a "name"', "ünï 🎉", "{schema}; --", "a\\b", "%s $1")
WORKSPACES = (None, "ws_A", "ws 'ö'", None, "{ws}")

SINK = "conformance"
AGO = timedelta(seconds=600)  # ticks of a check have been due for about so long
LATER = timedelta(hours=1)
SIZE = 100  # ticks of one schedule at the most
ATTEMPTS = 3
LOOK_SECONDS = 0.02
GRACE_SECONDS = 2.0
UNSEEN = object()

TICKS = "SELECT id, scheduled_for FROM {schema}.cron_ticks WHERE schedule_id = $1 ORDER BY scheduled_for"
RUNS = "SELECT schedule_id, scheduled_for, outcome, reason, attempts, recovered FROM {schema}.cron_runs"


@dataclass(frozen=True)
class Subject:
    """A sink, how to see what it delivers, and what is known of it.

    `delivered` answers everything that the receiver has got so far, repeats included: message ids, or pairs of a
    message id and its payload. `poison` is a payload that the sink refuses, `hang` one on which it never answers;
    without them, what needs them is skipped. All others are accepted: give your own if they need a certain form.
    """

    sink: TableSink | FunctionSink | SameDatabaseSink | Publish
    delivered: Callable[[], Awaitable[Iterable[str | tuple[str, Any]]]]
    poison: Any = None
    hang: Any = None
    payloads: Sequence[Any] = PAYLOADS
    queue_name: str = "conformance"
    batch_size: int = DEFAULT_BATCH
    concurrency: int = DEFAULT_CALLS  # calls at once of an outside sink
    lease_seconds: float = 2.0
    arrival_seconds: float = 5.0  # within which a delivery is seen
    check_seconds: float = 60.0  # that one check may take


class ConformanceError(AssertionError):
    """A sink breaks a rule: `check` names it, `problem` is what was seen."""

    def __init__(self, check: str, rule: str, problem: str) -> None:
        super().__init__(f"{check}: {rule}. But {problem}")
        self.check = check
        self.problem = problem


class SkipCheck(Exception):  # noqa: N818 - nothing went wrong
    """The check does not apply."""


@dataclass
class Made:
    """A tick, and how often it may arrive."""

    message_id: str
    occurrence: tuple[str, datetime]
    payload: Any
    least: int = 1
    most: int = 1

    def __str__(self) -> str:
        return f"{self.message_id} (payload {_json(self.payload)[:80]})"


@dataclass
class Call:
    """A call of an outside sink."""

    ticks: Sequence[LeasedTick]
    answer: object = None
    seconds: float = 0.0


class Bench:
    """A sink among the engine's parts: makes ticks, sends them, and compares what arrives with what should."""

    sink: SameDatabaseSink | OutsideSink
    _check: "Check"
    _before: frozenset[str]  # message ids that were there already

    def __init__(self, cron: CronRepository, subject: Subject, settings: Settings) -> None:
        self.cron = cron
        self.subject = subject
        self.calls: list[Call] = []
        self._settings = settings
        self._made: dict[str, Made] = {}
        self._numbers = count()

    async def prepare(self) -> None:
        """Look at what there is."""
        await self.cron.make_partitions()
        self.sink = await self._prepared()
        self._before = frozenset(message_id for message_id, _ in await self.delivered())

    async def _prepared(self) -> SameDatabaseSink | OutsideSink:
        given, subject = self.subject.sink, self.subject
        if isinstance(given, SameDatabaseSink):
            return given
        sinks = Sinks(self._settings)
        if isinstance(given, TableSink | FunctionSink):
            sinks.add(SINK, given)
            (prepared,) = await sinks.prepare(self.cron.database)
            return prepared
        sinks.add(SINK, given, batch_size=subject.batch_size, concurrency=subject.concurrency)
        outside = sinks.outside[SINK]
        return replace(outside, publish=self._recorded(outside.publish))

    def _recorded(self, publish: Publish) -> Publish:
        async def recorded(ticks: Sequence[LeasedTick]) -> Sequence[object] | None:
            call = Call(ticks)
            self.calls.append(call)
            begun = time.monotonic()
            try:
                answer = await publish(ticks)
            finally:
                call.seconds = time.monotonic() - begun
            call.answer = answer
            return answer

        return recorded

    async def judge(self, check: "Check") -> str:
        """Run one check, which may take so long; a sink that nothing can stop is left behind."""
        self._check = check
        checking = asyncio.ensure_future(check(self))
        try:
            done, _ = await asyncio.wait({checking}, timeout=self.subject.check_seconds)
        finally:
            checking.cancel()
            with anyio.move_on_after(GRACE_SECONDS, shield=True):
                await asyncio.wait({checking})
        if not done:
            raise self.broken(f"there was no end to it within {self.subject.check_seconds:g} s")
        try:
            checking.result()
        except (ConformanceError, SkipCheck):
            raise
        except Exception as error:
            raise self.broken(f"it stopped with {shown(_first(error))}") from error
        return rule_of(check)

    def broken(self, problem: str) -> ConformanceError:
        """The rule does not hold."""
        return ConformanceError(name_of(self._check), rule_of(self._check), problem)

    @property
    def kind(self) -> SinkKind:
        """Of the sink."""
        return "outside" if isinstance(self.sink, OutsideSink) else "same_database"

    async def make(
        self,
        payloads: Iterable[Any] | None = None,
        *,
        each: int = 1,
        delivery: Delivery | None = None,
        due: bool = True,
    ) -> list[Made]:
        """Ticks with these payloads, due for a while or not for long."""
        now = await self.cron.clock()
        found = []
        for payload in self.subject.payloads if payloads is None else payloads:
            number = next(self._numbers)
            definition = define_schedule(
                self.subject.queue_name,
                every=1,
                payload=payload,
                workspace_id=WORKSPACES[number % len(WORKSPACES)],
                name=f"{NAMES[number % len(NAMES)]} {number}",
                jitter=None,
                max_runs=each,
                sink=self.sink.name,
                delivery=delivery,
                sinks={self.sink.name: self.kind},
            )
            saved = await self.cron.save_schedule(definition, now=now - AGO if due else now + LATER)
            for tick in await self.cron.database.fetch(TICKS, saved.schedule.id):
                message_id = tick["id"].replace("tick_", "msg_", 1)
                found.append(Made(message_id, (saved.schedule.id, tick["scheduled_for"]), payload))
        self._made |= {tick.message_id: tick for tick in found}
        return found

    async def make_batches(self, batches: int) -> list[Made]:
        """So many batches of ticks."""
        ticks = batches * self.subject.batch_size
        each = min(SIZE, math.ceil(ticks / len(self.subject.payloads)))
        return await self.make(islice(cycle(self.subject.payloads), math.ceil(ticks / each)), each=each)

    async def pass_once(self, pods: int = 1) -> None:
        """One pass of so many workers at once, up to the end of all that they began."""
        catch_up = ScheduleManager(self.cron.database, self.cron, self._settings).catch_up
        async with anyio.create_task_group() as tasks:
            for _ in range(pods):
                ticker_id, pause, sink = new_ticker_id(), Pause(), self.sink
                sender: TickFirer | Publisher
                if isinstance(sink, OutsideSink):
                    sender = Publisher(
                        self.cron,
                        sink,
                        self._settings,
                        ticker_id=ticker_id,
                        tasks=tasks,
                        pause=pause,
                        catch_up=catch_up,
                    )
                else:
                    sender = TickFirer(
                        self.cron, sink, self._settings, ticker_id=ticker_id, pause=pause, catch_up=catch_up
                    )
                tasks.start_soon(sender.run_once)

    async def drain(self, pods: int = 1, *, retries: bool = True) -> None:
        """Passes until every tick has ended, or is left for a retry."""
        while True:
            await self.pass_once(pods)
            due_in = await self.cron.next_due_in(self.sink.name)
            wait = min((wait for turn, wait in due_in.items() if retries or turn == DUE_NOW), default=LATER)
            if wait > LATER / 2:
                return
            await anyio.sleep(max(0.0, wait.total_seconds()))

    async def abandon(self, ticks: Sequence[Made], *, for_good: bool = False) -> list[LeasedTick]:
        """A worker has leased these and died, and its leases have run out; `for_good`: it was about to send them."""
        owner, then = new_ticker_id(), await self.cron.clock() - AGO / 2
        leased = await self.cron.batch_lease_ticks(sink=self.sink.name, leased_by=owner, limit=len(ticks), now=then)
        if for_good:
            await self.cron.renew_leases([tick.id for tick in leased.ticks], leased_by=owner, for_good=True, now=then)
        return leased.ticks

    async def look(self) -> None:
        """Everything has arrived as often as it must and may, and nothing else has."""
        until = time.monotonic() + self.subject.arrival_seconds
        while True:
            arrived = Counter(message_id for message_id, _ in await self.delivered())
            for message_id, times in arrived.items():
                tick = self._made.get(message_id)
                if tick is None and message_id not in self._before:
                    raise self.broken(f"{message_id!r} arrived, which is no tick's message id")
                if tick is not None and times > tick.most:
                    raise self.broken(f"{tick} arrived {times} times, and {tick.most} is the most")
            missing = [tick for tick in self._made.values() if arrived[tick.message_id] < tick.least]
            if not missing:
                return
            if time.monotonic() > until:
                what = said((await self._runs()).get(missing[0].occurrence))
                raise self.broken(f"{len(missing)} did not arrive; of {missing[0]} the ledger says: {what}")
            await anyio.sleep(LOOK_SECONDS)

    async def compare(self, ticks: Iterable[Made]) -> None:
        """These have arrived unchanged."""
        seen = dict(await self.delivered())
        for tick in ticks:
            got = seen[tick.message_id]
            if got is not UNSEEN and _json(got) != _json(tick.payload):
                raise self.broken(f"{tick} arrived as {_json(got)[:200]}")

    async def ledger(self, ticks: Sequence[Made], outcome: str) -> list[asyncpg.Record]:
        """What the ledger says of these, which is that outcome."""
        runs = await self._runs()
        for tick in ticks:
            run = runs.get(tick.occurrence)
            if run is None or run["outcome"] != outcome:
                raise self.broken(f"of {tick} the ledger says: {said(run)}; {outcome} is right")
        return [runs[tick.occurrence] for tick in ticks]

    async def deliver(self, ticks: Sequence[Made], *, pods: int = 1) -> list[asyncpg.Record]:
        """Send all that is due, and these arrive; what the ledger says of them."""
        await self.drain(pods)
        await self.look()
        return await self.ledger(ticks, "enqueued")

    async def _runs(self) -> dict[tuple[str, datetime], asyncpg.Record]:
        rows = await self.cron.database.fetch(RUNS)
        return {(row["schedule_id"], row["scheduled_for"]): row for row in rows}

    async def delivered(self) -> list[tuple[str, Any]]:
        """What the receiver has got."""
        delivered = await self.subject.delivered()
        return [(seen, UNSEEN) if isinstance(seen, str) else (seen[0], seen[1]) for seen in delivered]


Check = Callable[[Bench], Awaitable[None]]  # its name is the check's, its docstring the rule


def name_of(check: Check) -> str:
    """Of a check."""
    return check.__name__.removeprefix("_")


def rule_of(check: Check) -> str:
    """That a check is about."""
    return (check.__doc__ or "").removesuffix(".")


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=repr)


def said(run: asyncpg.Record | None) -> str:
    """What the ledger says of a tick."""
    return "nothing" if run is None else ": ".join(filter(None, (run["outcome"], run["reason"])))


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
