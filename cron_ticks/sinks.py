"""Where a tick's payload goes: the only thing that the cron core knows of a queue."""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from cron_ticks.checks import check_count, check_name
from cron_ticks.database import Database
from cron_ticks.errors import CronTicksError, InvalidInputError
from cron_ticks.rows import LeasedTick
from cron_ticks.schedules import OWN_QUEUE, SinkKind
from cron_ticks.settings import Settings
from cron_ticks.user_sinks import FunctionSink, TableSink

MOST_AT_ONCE = 10_000
DEFAULT_BATCH = 100  # ticks per call
DEFAULT_CALLS = 4  # at once
DEADLINE = 0.9  # of a lease: what takes longer may find that somebody else has taken over

Publish = Callable[[Sequence[LeasedTick]], Awaitable[Sequence[object] | None]]
PublishT = TypeVar("PublishT", bound=Callable[[Sequence[LeasedTick]], Awaitable[Any]])


class RejectTick(Exception):  # noqa: N818 - what a sink says, not what went wrong
    """Raised or answered by a sink: this tick can't be sent, so it isn't tried again."""


class UnknownOutcome(Exception):  # noqa: N818 - what a sink says, not what went wrong
    """Raised or answered by a sink: it may have been sent. It is tried again, marked as a recovery."""


@dataclass(frozen=True)
class SameDatabaseSink:
    """A queue in the same database: its part of the firing statement.

    `insert_from_fired` is one statement that reads the rows of `fired` (all columns of `cron_ticks`, and `message_id`)
    and the row of `pass` (`ticker_id`, `instant`), and returns a row for each, so that the message, the run and the end
    of the tick commit together. `insert_from_limited` does the same for the rows of `limited`, and returns the ids of
    those messages that a unique key over unfinished ones lets in; only a sink that knows when a message is finished
    has it.
    """

    name: str
    insert_from_fired: str
    insert_from_limited: str | None = None
    deadline_seconds: float | None = None  # of the firing statement, where it runs the user's code


@dataclass(frozen=True)
class OutsideSink:
    """A queue anywhere else: a function that takes a batch of ticks and answers for each."""

    name: str
    publish: Publish
    batch_size: int
    concurrency: int  # calls at once


class Sinks:
    """The sinks that an application has beside our own queue."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._in_database: dict[str, TableSink | FunctionSink] = {}
        self.outside: dict[str, OutsideSink] = {}

    def add(self, name: str, sink: object, *, batch_size: int | None = None, concurrency: int | None = None) -> None:
        """Declare a sink."""
        check_name("name", name)
        if name == OWN_QUEUE or name in self.kinds:
            raise CronTicksError(f"there is a sink {name!r} already: choose another name")
        for field, value in (("batch_size", batch_size), ("concurrency", concurrency)):
            if value is not None:
                check_count(field, value, most=MOST_AT_ONCE)
                if isinstance(sink, TableSink | FunctionSink):
                    raise InvalidInputError(field, "is for functions outside the database: leave it out")
        if isinstance(sink, TableSink | FunctionSink):
            self._in_database[name] = sink
        elif callable(sink) and (
            inspect.iscoroutinefunction(sink) or inspect.iscoroutinefunction(getattr(sink, "__call__", None))  # noqa: B004
        ):
            self.outside[name] = OutsideSink(name, sink, batch_size or DEFAULT_BATCH, concurrency or DEFAULT_CALLS)
        else:
            raise InvalidInputError("sink", f"must be a TableSink, a FunctionSink or an async function, not {sink!r}")

    @property
    def kinds(self) -> dict[str, SinkKind]:
        """By name."""
        return {**dict.fromkeys(self._in_database, "same_database"), **dict.fromkeys(self.outside, "outside")}

    async def prepare(self, database: Database) -> list[SameDatabaseSink]:
        """Those in the database, checked against the tables and functions that are there."""
        deadline = DEADLINE * self._settings.lease_seconds
        prepared = []
        for name, sink in self._in_database.items():
            try:
                text = (await sink.prepare(database)).insert_from_fired
            except InvalidInputError as error:
                raise InvalidInputError(f"sink {name!r}: {error.field}", error.problem) from None
            prepared.append(SameDatabaseSink(name, text, deadline_seconds=deadline))
        return prepared
