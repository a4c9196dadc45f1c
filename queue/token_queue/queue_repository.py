"""Messages, tokens and workers in the database. The statements are in `queue_sql`."""

import json
from collections.abc import AsyncIterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import asyncpg

from cron_ticks.database import Connection, Database, storable
from cron_ticks.errors import MessageNotFoundError
from cron_ticks.events import DEFAULT_LEVEL, EventLevel, includes
from cron_ticks.ids import new_token_id
from cron_ticks.runs import MessageState
from cron_ticks.schedules import OWN_QUEUE
from cron_ticks.sinks import SameDatabaseSink
from token_queue import queue_event_sql
from token_queue import queue_sql as sql
from token_queue.floors import NO_FLOORS, PRIORITIES, Level, PairFloors
from token_queue.handlers import QueueHandler
from token_queue.message import DeadMessage, QueueState, RawMessage, Sent, SentMany
from token_queue.sending import COPY_COLUMNS, NewMessage

LONGEST_TRACEBACK = 20_000
DEAD_BATCH = 1000
LONG_DEADLINE_SECONDS = 3600.0  # of a statement that reads all messages
SHORTEST_COPY = 100  # messages: fewer are as well inserted
TURN = timedelta(minutes=10)  # that a priority is worth
THE_BEGINNING = datetime.min.replace(tzinfo=UTC)


# Our own queue as a sink of the cron.
QUEUE_SINK = SameDatabaseSink(OWN_QUEUE, sql.INSERT_FROM_FIRED, sql.INSERT_FROM_LIMITED)


@dataclass(frozen=True, slots=True)
class Token:
    """A leased pair."""

    id: str
    queue_name: str
    workspace_id: str | None


@dataclass(frozen=True, slots=True)
class Look:
    """What a look at the queues found."""

    leased: list[Token]
    expired: int  # tokens of workers that died or hung
    charged: int  # messages that these had in hand
    due_in: timedelta | None  # until the next message that isn't due yet, as far as known
    expiry_in: timedelta | None  # until the next token may run out
    instant: datetime
    took: timedelta  # on the server, until the levels were found
    count: int  # of levels with unfinished messages
    dead: int  # versions of messages that were not removed yet, as far as the server has counted
    earliest: dict[Level, datetime]  # of each level, if they were to be named
    swept: bool  # without floors


@dataclass(frozen=True, slots=True)
class Wanted:
    """A fetch for one pair: so many messages, beside those in hand."""

    token_id: str
    most: int
    in_hand: Sequence[str]
    shared: bool = False  # the pair may have other tokens
    in_order: bool = False  # no message passes another
    floors: PairFloors = NO_FLOORS


@dataclass(frozen=True, slots=True)
class Fetched:
    """A pair's messages in their order."""

    messages: list[RawMessage]
    drained: bool  # there are no more
    due_in: timedelta | None  # until the next one of the pair is due
    reached: dict[int, datetime]  # by priority: nothing was left behind up to there, if there were floors


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt failed; without `retry_in` the message is dead."""

    error_type: str
    error_message: str
    error_traceback: str | None
    retry_in: timedelta | None


Key = tuple[str, str]  # of a message in hand: its id, and the token's


class QueueRepository:
    """Messages and tokens in the database, as one worker sees them."""

    def __init__(
        self, database: Database, worker_id: str, *, events: EventLevel = DEFAULT_LEVEL, actor: str | None = None
    ) -> None:
        self._database = database
        self._worker_id = worker_id
        self._events = events
        self._noted = (includes(events, "changes"), actor)  # of what is asked for through this process

    async def send(self, queue_name: str, message: NewMessage, *, connection: Connection | None = None) -> Sent:
        """Send one message, or find the unfinished one that has its dedupe key."""
        while True:
            row = await self._database.fetchrow(
                sql.SEND_ONE.at(self._events),
                message.id,
                queue_name,
                message.workspace_id,
                message.payload_json,
                message.headers_json,
                message.priority,
                message.dedupe_key,
                message.process_at,
                message.delay,
                self._database.channel,
                connection=connection,
            )
            if row is not None:
                return Sent(message.id)
            first = await self._database.fetchval(
                sql.FIND_DUPLICATE, queue_name, message.workspace_id, message.dedupe_key, connection=connection
            )
            if first is not None:  # else it has ended meanwhile, and the key is free
                return Sent(first, duplicate=True)

    async def send_many(
        self, queue_name: str, chunks: AsyncIterable[list[NewMessage]], *, connection: Connection | None = None
    ) -> SentMany:
        """Send all or, on any error, none."""
        total = sent = 0
        async with self._database.transaction(connection) as chosen:
            async for chunk in chunks:
                plain = len(chunk) >= SHORTEST_COPY and all(message.plain for message in chunk)
                sent += await (self._copy if plain else self._insert)(queue_name, chunk, chosen)
                total += len(chunk)
            if sent:
                await self._database.fetch(sql.WAKE_WORKERS, self._database.channel, [queue_name], connection=chosen)
        return SentMany(sent, total - sent)

    async def _copy(self, queue_name: str, chunk: Sequence[NewMessage], connection: Connection) -> int:
        rows = "".join([message.copy_row(queue_name) for message in chunk])
        await self._database.copy("queue_messages", COPY_COLUMNS, rows, connection=connection)
        if includes(self._events, "all"):
            ids = [message.id for message in chunk]
            await self._database.fetch(queue_event_sql.NOTE_COPIED, ids, connection=connection)
        return len(chunk)

    async def _insert(self, queue_name: str, chunk: Sequence[NewMessage], connection: Connection) -> int:
        rows = await self._database.fetch(
            sql.SEND_MANY.at(self._events),
            [message.id for message in chunk],
            queue_name,
            [message.workspace_id for message in chunk],
            [message.payload_json for message in chunk],
            [message.headers_json for message in chunk],
            [message.priority for message in chunk],
            [message.dedupe_key for message in chunk],
            [message.process_at for message in chunk],
            [message.delay for message in chunk],
            connection=connection,
        )
        return len(rows)

    async def wake_workers(self, queues: Sequence[str]) -> None:
        """Wake sleeping workers of these queues."""
        await self._database.fetch(sql.WAKE_WORKERS, self._database.channel, list(queues))

    async def look(
        self,
        handlers: Sequence[QueueHandler],
        rooms: Sequence[int],
        *,
        most: int,
        lease: timedelta,
        asleep: bool = False,
        served: Sequence[tuple[str, str]] = (),
        suspect: bool = False,
        in_hand: Mapping[str, tuple[str, str]] | None = None,
        naming: bool = False,
        floors: Mapping[Level, datetime] | None = None,
        now: datetime | None = None,
    ) -> Look:
        """Say that this worker is there, take what dead ones left, and lease up to `most` pairs.

        `suspect`: it has one in hand and can't take another; `in_hand`: its own tokens, which are not a dead worker's,
        with their pairs. With `floors` only these levels are looked at; otherwise all, and `naming` names them.
        """
        levels = {} if floors is None else floors
        own = {} if in_hand is None else in_hand
        rows = await self._database.fetch(
            sql.LOOK.at(self._events),
            now,
            self._worker_id,
            asleep,
            [handler.queue_name for handler in handlers],
            [handler.options.tokens_per_pair for handler in handlers],
            rooms,
            [queue_name for queue_name, _ in served],
            [workspace for _, workspace in served],
            [new_token_id() for _ in range(most)],
            lease,
            suspect,
            list(own),
            floors is None,
            naming or floors is not None,
            [queue_name for queue_name, _, _ in levels],
            [workspace for _, workspace, _ in levels],
            [priority for _, _, priority in levels],
            list(levels.values()),
            [queue_name for queue_name, _ in own.values()],
            [workspace for _, workspace in own.values()],
        )
        return _look(rows, swept=floors is None)

    async def fetch(
        self, wanted: Sequence[Wanted], *, suspects: bool = True, now: datetime | None = None
    ) -> dict[str, Fetched]:
        """Due messages per token, in their order; a token that isn't in the result is not ours any more.

        With `suspects`, one of the messages with which a worker died may be among them.
        """
        if not any(pair.shared for pair in wanted):
            return await self._fetch(wanted, now, None, suspects=suspects)
        async with self._database.transaction() as connection:
            await self._database.fetch(sql.LOCK_PAIRS, [pair.token_id for pair in wanted], connection=connection)
            return await self._fetch(wanted, now, connection, suspects=suspects)

    async def _fetch(
        self, wanted: Sequence[Wanted], now: datetime | None, connection: Connection | None, *, suspects: bool
    ) -> dict[str, Fetched]:
        rows = await self._database.fetch(
            sql.FETCH_MESSAGES.at(self._events),
            now,
            [pair.token_id for pair in wanted],
            [pair.most for pair in wanted],
            [message_id for pair in wanted for message_id in pair.in_hand],
            [not pair.in_hand for pair in wanted],
            [pair.in_order for pair in wanted],
            suspects,
            *([pair.floors[priority] for pair in wanted] for priority in range(PRIORITIES)),
            connection=connection,
        )
        return _fetched(wanted, rows)

    async def complete(
        self, messages: Sequence[Key], *, release: Sequence[str] = (), now: datetime | None = None
    ) -> set[str]:
        """Complete messages and let go of tokens; the tokens that were ours."""
        ids, tokens = _columns(messages)
        touched = {*tokens, *release}
        statement = sql.COMPLETE_MESSAGES.at(self._events)
        rows = await self._database.fetch(statement, now, ids, list(touched), release)
        ours = {row["id"] for row in rows}
        if ours and len(ours) < len(touched):  # some were lost: the same again with the others
            kept = [key for key in messages if key[1] in ours]
            return await self.complete(kept, release=[token_id for token_id in release if token_id in ours], now=now)
        return ours

    async def fail(self, messages: Sequence[tuple[Key, int, Failure]], *, now: datetime | None = None) -> set[str]:
        """Note failed attempts, each by its number; the tokens that were ours."""
        ids, tokens = _columns([key for key, _, _ in messages])
        failures = [failure for _, _, failure in messages]
        rows = await self._database.fetch(
            sql.FAIL_MESSAGES.at(self._events),
            now,
            ids,
            tokens,
            list(set(tokens)),
            [storable(failure.error_type) for failure in failures],
            [storable(failure.error_message) for failure in failures],
            [
                None if failure.error_traceback is None else storable(failure.error_traceback, LONGEST_TRACEBACK)
                for failure in failures
            ],
            [failure.retry_in for failure in failures],
            [attempt for _, attempt, _ in messages],
        )
        return {row["id"] for row in rows}

    async def bury(self, messages: Sequence[Key], *, now: datetime | None = None) -> set[str]:
        """Give up messages without another try; the tokens that were ours."""
        ids, tokens = _columns(messages)
        statement = sql.BURY_MESSAGES.at(self._events)
        rows = await self._database.fetch(statement, now, ids, tokens, list(set(tokens)))
        return {row["id"] for row in rows}

    async def renew(self, token_ids: Sequence[str], *, lease: timedelta, now: datetime | None = None) -> set[str]:
        """Renew tokens; those that are still ours."""
        rows = await self._database.fetch(sql.RENEW_TOKENS, now, token_ids, lease)
        return {row["id"] for row in rows}

    async def retire(self) -> None:
        """This worker is gone, and its tokens are free."""
        await self._database.fetch(sql.RETIRE_WORKER, self._worker_id, self._database.channel)

    async def delete_completed(
        self, handlers: Sequence[QueueHandler], *, otherwise: timedelta, limit: int, now: datetime | None = None
    ) -> int:
        """Remove completed messages past their retention; fewer than `limit` means that none is left.

        `otherwise` is the retention of queues that nobody handles.
        """
        rows = await self._database.fetch(
            sql.DELETE_COMPLETED,
            now,
            [handler.queue_name for handler in handlers],
            [handler.options.retention for handler in handlers],
            limit,
            otherwise,
        )
        return len(rows)

    async def delete_completed_before(self, age: timedelta, *, limit: int, now: datetime | None = None) -> int:
        """Remove messages of all queues that were completed so long ago; fewer than `limit`: none is left."""
        return len(await self._database.fetch(sql.DELETE_COMPLETED_BEFORE, now, age, limit))

    async def delete_dead_before(self, age: timedelta, *, limit: int, now: datetime | None = None) -> int:
        """Remove dead letters that died so long ago; fewer than `limit` means that none is left."""
        arguments = (now, age, limit, *self._noted, self._worker_id or None)
        return len(await self._database.fetch(sql.DELETE_DEAD_BEFORE, *arguments))

    async def message_states(self, ids: Sequence[str], *, now: datetime | None = None) -> dict[str, MessageState]:
        """How far messages have come, by id; those that are not there any more are not in the result."""
        rows = await self._database.fetch(sql.MESSAGE_STATES, now, list(ids))
        return {row["id"]: MessageState(**row) for row in rows}

    async def delete_workspace(self, workspace_id: str, *, connection: Connection) -> int:
        """Remove a workspace's messages; how many there were."""
        arguments = (workspace_id, *self._noted)
        (row,) = await self._database.fetch(
            sql.DELETE_WORKSPACE, *arguments, connection=connection, deadline_seconds=LONG_DEADLINE_SECONDS
        )
        return int(row["count"])

    async def delete_lost_workers(self, *, now: datetime | None = None) -> None:
        """Forget workers that died long ago."""
        await self._database.fetch(sql.DELETE_LOST_WORKERS, now)

    async def unhandled_queues(self, *, now: datetime | None = None) -> list[str]:
        """Queues with unfinished messages that no running worker handles."""
        return [row["queue_name"] for row in await self._database.fetch(sql.UNHANDLED_QUEUES, now)]

    async def queue_states(self, *, now: datetime | None = None) -> list[QueueState]:
        """Every queue with unfinished or dead messages, or a running worker."""
        return [QueueState(**row) for row in await self._database.fetch(sql.QUEUE_STATES, now)]

    async def list_dead(
        self, *, queue_name: str | None, workspace_id: str | None, after_id: str | None, limit: int
    ) -> list[DeadMessage]:
        """Dead letters, the latest first."""
        last = None if after_id is None else await self.get_dead(after_id)
        place = (None, None) if last is None else (last.dead_at, last.id)
        rows = await self._database.fetch(sql.LIST_DEAD, queue_name, workspace_id, limit, *place)
        return [_dead(row) for row in rows]

    async def get_dead(self, message_id: str) -> DeadMessage:
        """One dead letter."""
        row = await self._database.fetchrow(sql.GET_DEAD, message_id)
        if row is None:
            raise MessageNotFoundError(f"there is no dead letter {message_id}")
        return _dead(row)

    async def redrive_dead(self, *, ids: Sequence[str] | None, queue_name: str | None, workspace_id: str | None) -> int:
        """Let dead letters begin anew; how many did."""
        return await self._change_dead(sql.REDRIVE_DEAD, ids, queue_name, workspace_id)

    async def purge_dead(self, *, ids: Sequence[str] | None, queue_name: str | None, workspace_id: str | None) -> int:
        """Remove dead letters; how many there were."""
        return await self._change_dead(sql.PURGE_DEAD, ids, queue_name, workspace_id)

    async def _change_dead(
        self, statement: str, ids: Sequence[str] | None, queue_name: str | None, workspace_id: str | None
    ) -> int:
        """In batches, up to what is dead now."""
        until = await self._database.fetchval("SELECT statement_timestamp()")
        after: tuple[datetime, str] = (THE_BEGINNING, "")
        changed = 0
        while True:
            try:
                chosen = (ids, queue_name, workspace_id, DEAD_BATCH, until, *after)
                row = await self._database.fetchrow(statement, *chosen, *self._noted)
            except (asyncpg.UniqueViolationError, asyncpg.DeadlockDetectedError):
                continue  # a message with the same dedupe key is being sent: the next look sees it
            if row is None:
                return changed
            changed += row["changed"]
            after = (row["dlq_at"], row["id"])
            if row["queues"]:
                await self.wake_workers(row["queues"])


def _columns(messages: Sequence[Key]) -> tuple[list[str], list[str]]:
    return [message_id for message_id, _ in messages], [token_id for _, token_id in messages]


def _look(rows: Sequence[asyncpg.Record], *, swept: bool) -> Look:
    first = rows[0]
    return Look(
        [Token(row["id"], row["queue_name"], row["workspace_id"]) for row in rows if row["id"] is not None],
        first["expired"],
        first["charged"],
        first["due_in"],
        first["expiry_in"],
        first["instant"],
        first["took"],
        first["levels"],
        first["dead"],
        {
            (row["queue_name"], row["workspace_id"], row["priority"]): row["earliest"]
            for row in rows
            if row["priority"] is not None
        },
        swept,
    )


def _fetched(wanted: Sequence[Wanted], rows: Sequence[asyncpg.Record]) -> dict[str, Fetched]:
    by_token: dict[str, list[asyncpg.Record]] = {}
    for row in rows:
        by_token.setdefault(row["held_id"], []).append(row)
    return {pair.token_id: _fetched_for(pair, by_token[pair.token_id]) for pair in wanted if pair.token_id in by_token}


def _fetched_for(pair: Wanted, rows: Sequence[asyncpg.Record]) -> Fetched:
    first = rows[0]
    taken = [row for row in rows if row["id"] is not None]
    everything = len(taken) == first["found"]  # no suspect was left
    reached: dict[int, datetime] = {}
    if everything and not pair.shared and pair.floors != NO_FLOORS:
        reached = {row["priority"]: row["turn"] - row["priority"] * TURN for row in taken}
    return Fetched([_message(row) for row in taken], everything and len(taken) < pair.most, first["due_in"], reached)


def _message(row: asyncpg.Record) -> RawMessage:
    return RawMessage(
        row["id"],
        row["queue_name"],
        row["workspace_id"],
        row["payload"],
        row["headers"],
        row["attempts"] + 1,
        row["worker_deaths"],
        row["exclusive_for"],
    )


def _dead(row: asyncpg.Record) -> DeadMessage:
    fields = dict(row)
    return DeadMessage(**fields | {"payload": json.loads(row["payload"]), "headers": json.loads(row["headers"])})
