"""Conformance: the rules that the engine relies on, which any sink can be put to, also one of yours.

    report = await check_sink(dsn, Subject(TableSink("jobs", {"id": "message_id", "body": "payload"}), read_jobs))

The engine's own parts run, in a database schema of their own that is removed afterwards. What has arrived stays.
"""

import secrets
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta

import anyio

from cron_ticks.database import Database, open_database
from cron_ticks.errors import InvalidInputError
from cron_ticks.firing import DUE_NOW
from cron_ticks.ids import new_ticker_id
from cron_ticks.logs import configure_logs_unless_done
from cron_ticks.migrator import migrate
from cron_ticks.repository import CronRepository
from cron_ticks.settings import Settings
from cron_ticks.sinks import OutsideSink, SameDatabaseSink
from cron_ticks.tick_repository import firing_statement
from token_queue.sink_bench import (
    ATTEMPTS,
    GRACE_SECONDS,
    LATER,
    SIZE,
    UNSEEN,
    Bench,
    Check,
    ConformanceError,
    Made,
    SkipCheck,
    Subject,
    name_of,
    said,
)

__all__ = ["CHECKS", "ConformanceError", "Report", "Subject", "check_sink"]

BATCHES = 3  # per pod, where there are many ticks
TOO_LONG = 1.5  # leases: a call is cancelled before the first is over

FIND_SCHEMA = "SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)"
DROP_SCHEMA = "DROP SCHEMA IF EXISTS {schema} CASCADE"


@dataclass
class Report:
    """The checks that passed, each with its rule, and those that did not run, each with the reason."""

    passed: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"ok       {check:<14}{rule}" for check, rule in self.passed.items()]
        return "\n".join(lines + [f"skipped  {check:<14}{why}" for check, why in self.skipped.items()])


class _RollBack(Exception):  # noqa: N818 - nothing went wrong
    """The transaction is not to be committed."""


async def check_sink(dsn: str, subject: Subject, *, schema: str | None = None) -> Report:
    """Put a sink to every rule; ConformanceError names the first that it breaks.

    `schema` is made for the time of the checks, and must not exist; without one, a name is drawn.
    """
    if not subject.payloads:
        raise InvalidInputError("payloads", "must have at least one that the sink accepts")
    settings = Settings.load(
        missed_after_seconds=LATER.total_seconds(),  # no tick of a check is missed
        dsn=dsn,
        database_schema=f"conformance_{secrets.token_hex(4)}" if schema is None else schema,
        lookahead_seconds=SIZE,
        manager_interval_seconds=10,
        jitter_cap_seconds=0,
        ticker_batch_size=subject.batch_size,
        lease_seconds=subject.lease_seconds,
        lease_renewal_seconds=subject.lease_seconds / 2,
        tick_max_attempts=ATTEMPTS,
        tick_max_age_seconds=86_400,
        tick_backoff_seconds=0.01,
        pool_max_size=10,
        stop_grace_seconds=GRACE_SECONDS,
    )
    configure_logs_unless_done(settings.log_level, settings.log_format)
    report = Report()
    async with open_database(settings, dsn=dsn) as database, _schema_of_its_own(database):
        bench = Bench(CronRepository(database, settings), subject, settings)
        await bench.prepare()
        for check in CHECKS:
            try:
                report.passed[name_of(check)] = await bench.judge(check)
            except SkipCheck as reason:
                report.skipped[name_of(check)] = str(reason)
    return report


@asynccontextmanager
async def _schema_of_its_own(database: Database) -> AsyncIterator[None]:
    if await database.fetchval(FIND_SCHEMA, database.schema):
        raise InvalidInputError("schema", f"{database.schema!r} exists already: name one that may be made and removed")
    try:
        await migrate(database)
        yield
    finally:
        with anyio.CancelScope(shield=True):
            await database.fetch(DROP_SCHEMA)


def _outside(bench: Bench) -> OutsideSink:
    if isinstance(bench.sink, SameDatabaseSink):
        raise SkipCheck("only for sinks outside the database")
    return bench.sink


def _same_database(bench: Bench) -> SameDatabaseSink:
    if isinstance(bench.sink, OutsideSink):
        raise SkipCheck("only for sinks in the same database")
    return bench.sink


def _expect(ticks: Iterable[Made], *, least: int = 0, most: int = 0) -> None:
    for tick in ticks:
        tick.least, tick.most = least, most


async def _make_around(bench: Bench, name: str) -> tuple[list[Made], list[Made]]:
    """A tick with a payload that the subject may name, and ticks before and behind it."""
    payload, others = getattr(bench.subject, name), bench.subject.payloads
    if payload is None:
        raise SkipCheck(f"the subject has no {name}=")
    ticks = await bench.make([*others, payload, *others])
    return [ticks.pop(len(others))], ticks


def _check_answers(bench: Bench) -> None:
    for call in bench.calls:
        if call.answer is None:
            continue
        if isinstance(call.answer, str | bytes) or not isinstance(call.answer, Sequence):
            raise bench.broken(f"it answered a {type(call.answer).__name__} for {len(call.ticks)} ticks")
        if len(call.answer) != len(call.ticks):
            raise bench.broken(f"it gave {len(call.answer)} answers for {len(call.ticks)} ticks")
        for answer in call.answer:
            if isinstance(answer, type) and issubclass(answer, BaseException):
                raise bench.broken(f"it answered the class {answer.__name__}, which counts as accepted")


async def _nothing_due(bench: Bench) -> None:
    """Nothing arrives while nothing is due."""
    _expect(await bench.make(due=False))
    await bench.pass_once()
    if isinstance(bench.sink, SameDatabaseSink):  # the statement runs for nothing when another pod was faster
        await bench.cron.fire_due_ticks(bench.sink, ticker_id=new_ticker_id(), limit=1)
    await bench.look()


async def _answers(bench: Bench) -> None:
    """It answers None, or a list with one answer per tick, an exception object for each that failed."""
    _outside(bench)
    await bench.make()
    await bench.pass_once()
    _check_answers(bench)


async def _arrives(bench: Bench) -> None:
    """Each tick arrives once, under its message id, and the ledger says so."""
    await bench.deliver(await bench.make())


async def _payloads(bench: Bench) -> None:
    """What a tick carries arrives unchanged."""
    if all(payload is UNSEEN for _, payload in await bench.delivered()):
        raise SkipCheck("delivered() answers no payloads")
    ticks = await bench.make()
    await bench.deliver(ticks)
    await bench.compare(ticks)


async def _batches(bench: Bench, pods: int = 1) -> None:
    """Many ticks, more than go out at once, arrive like one."""
    ticks = await bench.make_batches(BATCHES * pods)
    await bench.deliver(ticks, pods=pods)
    await bench.compare(ticks)


async def _two_pods(bench: Bench) -> None:
    """Two pods at once deliver each tick once."""
    async with bench.cron.database.connection(), bench.cron.database.connection():
        pass  # both are connected, so that neither is late
    await _batches(bench, pods=2)


async def _rolled_back(bench: Bench) -> None:
    """What was rolled back has not arrived, and arrives later."""
    sink, database = _same_database(bench), bench.cron.database
    ticks = await bench.make()
    arguments = (new_ticker_id(), len(ticks), None, None, sink.name, DUE_NOW, LATER, [None] * 4)
    with suppress(_RollBack):
        async with database.transaction() as connection:
            await database.fetch(firing_statement(sink), *arguments, connection=connection)
            raise _RollBack
    _expect(ticks)
    await bench.look()
    _expect(ticks, least=1, most=1)
    await bench.deliver(ticks)


async def _poison(bench: Bench) -> None:
    """A tick that is refused fails alone, with its error in the ledger; its neighbours go out in the same pass."""
    refused, neighbours = await _make_around(bench, "poison")
    _expect(refused)
    await bench.drain(retries=False)
    _check_answers(bench)
    await bench.look()
    await bench.ledger(neighbours, "enqueued")
    await bench.drain()
    await bench.look()
    await bench.ledger(refused, "failed")


async def _hang(bench: Bench) -> None:
    """A call that hangs ends when it is cancelled: its tick is tried again, then fails, and its neighbours arrive."""
    hanging, neighbours = await _make_around(bench, "hang")
    outside = isinstance(bench.sink, OutsideSink)  # there, what it took before it hung may come again
    _expect(hanging, most=ATTEMPTS if outside else 0)
    _expect(neighbours, least=1, most=2 if outside else 1)
    await bench.drain()
    longest = max((call.seconds for call in bench.calls), default=0.0)
    if longest > TOO_LONG * bench.subject.lease_seconds:
        raise bench.broken(f"a call took {longest:.1f} s, and a lease lasts {bench.subject.lease_seconds:g} s")
    await bench.look()
    await bench.ledger(neighbours, "enqueued")
    (run,) = await bench.ledger(hanging, "failed")
    if run["recovered"] is not outside:
        raise bench.broken(f"it did not hang: the ledger says {said(run)}")


async def _recovery(bench: Bench) -> None:
    """A tick whose worker died before sending it arrives, as a recovery."""
    _outside(bench)
    ticks = await bench.make(delivery="at_least_once")
    await bench.abandon(ticks)
    if not all(run["recovered"] for run in await bench.deliver(ticks)):
        raise bench.broken("the ledger knows of no recovery")


async def _repeat(bench: Bench) -> None:
    """A tick whose worker died after sending it is accepted again, under the same message id."""
    sink = _outside(bench)
    ticks = await bench.make(delivery="at_least_once")
    _expect(ticks, least=1, most=2)
    await sink.publish(await bench.abandon(ticks))
    await bench.deliver(ticks)


async def _at_most_once(bench: Bench) -> None:
    """With at_most_once nothing arrives twice, and what is lost with its worker or refused is in the ledger."""
    _outside(bench)
    lost = await bench.make(delivery="at_most_once")
    await bench.abandon(lost, for_good=True)
    ticks = await bench.make(delivery="at_most_once")
    poison = [] if bench.subject.poison is None else [bench.subject.poison]
    refused = await bench.make(poison, delivery="at_most_once")
    _expect([*lost, *refused])
    await bench.deliver(ticks)
    await bench.cron.delete_expired_ticks(expired_for=timedelta(0), limit=len(lost))
    await bench.ledger(lost, "expired")
    await bench.ledger(refused, "failed")


CHECKS: tuple[Check, ...] = (
    *(_nothing_due, _answers, _arrives, _payloads, _batches, _two_pods, _rolled_back, _poison, _hang),
    *(_recovery, _repeat, _at_most_once),
)
