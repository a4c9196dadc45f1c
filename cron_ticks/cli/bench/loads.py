"""What `bench steady`, `generate`, `idle` and `failover` share: server, databases, and what must hold."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import TypeVar

import anyio

from cron_ticks.audit_repository import AuditRepository
from cron_ticks.cli.bench.load_tables import LoadTables, open_load_tables
from cron_ticks.cli.bench.machine import fresh_database, settings_with
from cron_ticks.database import open_database
from cron_ticks.errors import CronTicksError, InvalidInputError
from cron_ticks.migrator import migrate
from cron_ticks.settings import Settings
from token_queue.doubled import find_doubled

Progress = Callable[[str], None]
Item = TypeVar("Item")

LEAST_WIDTH = 80  # of a table, for the sake of its caption
SET_UP_PER_SECOND = 12_000  # schedules that are written, at the least
STEP_SECONDS = 1.0  # between two words of progress
LOOK_SECONDS = 0.3  # between two looks for something of which nobody tells us
LOOKAHEAD_SECONDS = float(Settings.model_fields["lookahead_seconds"].default)
POLL_SECONDS = Settings.model_fields["ticker_interval_ms"].default / 1000
FILLED_PER_SECOND = 2000  # ticks of the first window, at the least


@dataclass(frozen=True)
class Course:
    """A database of its own on the common server."""

    dsn: str
    tables: LoadTables


@asynccontextmanager
async def open_course(dsn: str, label: str) -> AsyncIterator[Course]:
    """A fresh and migrated one."""
    async with fresh_database(dsn, label) as own:
        async with open_database(settings_with(own), dsn=own) as database:
            await migrate(database)
        async with open_load_tables(own) as tables:
            yield Course(own, tables)


def check_expected(outcomes: dict[str, int]) -> None:
    """An error if something fired that no schedule had, or fired twice."""
    if outcomes["duplicates"] or outcomes["unexpected_messages"] or outcomes["unexpected_runs"]:
        raise CronTicksError(f"something fired twice, or that was no occurrence: {outcomes}")


async def check_audit(course: Course, outcomes: dict[str, int], since: datetime, until: datetime) -> None:
    """An error unless the product's own audit says the same, and finds nothing."""
    settings = settings_with(course.dsn)
    async with open_database(settings, dsn=course.dsn) as database:
        audit = await AuditRepository(database, settings, partial(find_doubled, database)).audit(since, until)
    if not audit.ok or (audit.total.expected, audit.total.enqueued) != (outcomes["expected"], outcomes["enqueued"]):
        raise CronTicksError(f"the audit says {audit.total}, but the tables say {outcomes}")


def parse_sizes(option: str, text: str, *, least: int, most: int) -> list[int]:
    """Numbers with commas between them, in increasing order, each once."""
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise InvalidInputError(option, f"must be numbers with commas between them, not {text!r}") from None
    for size in sizes:
        if not least <= size <= most:
            raise InvalidInputError(option, f"must be from {least:,} to {most:,}, not {size:,}")
    return sizes


def lead_seconds(schedules: int, ticks_per_second: float, lookahead: float = LOOKAHEAD_SECONDS) -> float:
    """From now to the first occurrence, so that all is written and the first window is made before anything is due.

    A window's time ahead, nothing is in the window yet: the manager then begins with what it will do all the time.
    """
    window = lookahead * ticks_per_second
    return schedules / SET_UP_PER_SECOND + min(lookahead, 5 + window / FILLED_PER_SECOND)


async def sleep_until(tables: LoadTables, instant: datetime, progress: Progress, what: str) -> None:
    """By the database's clock, and say how long it will be."""
    end = anyio.current_time() + (instant - await tables.now()).total_seconds()
    while (left := end - anyio.current_time()) > 0:
        progress(f"{what}, {left:.0f} s")
        await anyio.sleep(min(STEP_SECONDS, left))


async def drained(any_left: Callable[[], Awaitable[bool]], longest: float) -> None:
    """Wait until nothing is left; not for ever, if it is too much."""
    with anyio.move_on_after(longest):
        while await any_left():  # noqa: ASYNC110 - nobody tells us when it is fired
            await anyio.sleep(LOOK_SECONDS)


def after(instant: datetime, seconds: float) -> datetime:
    """So many seconds later."""
    return instant + timedelta(seconds=seconds)


def in_turn(items: Sequence[Item], number: int) -> Iterator[Item]:
    """All of them, beginning with another one in each round."""
    first = number % len(items)
    yield from items[first:]
    yield from items[:first]
