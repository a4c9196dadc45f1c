"""QueueManager: the door through which an application uses the queue and the cron."""

import json
import os
from collections.abc import AsyncIterable, AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import anyio.to_thread
import structlog
from pydantic import BaseModel
from typing_extensions import Unpack

from cron_ticks.checks import Priority, check_count, check_name
from cron_ticks.cron_rules import DstFold, DstGap
from cron_ticks.database import Connection, Database, Pool, open_database
from cron_ticks.declarations import Applied, AppliedChange, read_declarations
from cron_ticks.embedded import EmbeddedServer, embedded_server, use_embedded
from cron_ticks.errors import CronTicksError, InvalidInputError, MigrationError
from cron_ticks.logs import configure_logs_unless_done
from cron_ticks.loops import ServiceHealth
from cron_ticks.migrator import migrate, pending_migrations
from cron_ticks.occurrences import CatchUp
from cron_ticks.repository import CronRepository
from cron_ticks.schedule_repository import Saved
from cron_ticks.schedules import (
    OWN_QUEUE,
    Delivery,
    Jitter,
    Overlap,
    Schedule,
    ScheduleChanges,
    ScheduleDefinition,
    SinkKind,
    Triggered,
    define_schedule,
    redefine_schedule,
)
from cron_ticks.settings import Settings
from cron_ticks.sinks import Publish, PublishT, Sinks
from cron_ticks.user_sinks import FunctionSink, TableSink
from cron_ticks.zones import check_zone
from token_queue.audit_calls import AuditCalls
from token_queue.backfill_calls import BackfillCalls
from token_queue.event_calls import EventCalls
from token_queue.handlers import Backoff, Handlers, HandlerT
from token_queue.message import DeadMessage, DeletedWorkspace, QueueState, Sent, SentMany
from token_queue.opened import Opened
from token_queue.queue_repository import QueueRepository
from token_queue.run_calls import RunCalls
from token_queue.sending import in_chunks, new_message
from token_queue.worker import Worker

log = structlog.get_logger("token_queue.queue_manager")

LARGEST_PAGE = 10_000
MOST_DECLARATIONS = 1000
_APPLIED: dict[str, Literal["create", "change", "unchanged"]] = {
    "created": "create",
    "edited": "change",
    "retried": "change",
    "unchanged": "unchanged",
}
_DECLARED_AS = {"interval": "every", "jitter_ratio": "jitter"}
SERVICE_CONNECTIONS = 6  # of a running worker, beside those of the application's calls


class QueueManager(RunCalls, AuditCalls, EventCalls, BackfillCalls):
    """Schedules, messages and the worker that runs them.

    Connects to `dsn`, or uses the application's asyncpg `pool`; with neither, CRON_TICKS_DSN, else the embedded
    server. Use it as `async with`.
    """

    def __init__(self, dsn: str | None = None, *, pool: Pool | None = None, settings: Settings | None = None) -> None:
        if dsn is not None and pool is not None:
            raise InvalidInputError("pool", "give dsn or pool, not both")
        self.settings = Settings.load() if settings is None else settings
        configured = self.settings.dsn.get_secret_value() if self.settings.dsn is not None else None
        self._dsn = dsn if dsn is not None else configured
        self._pool = pool
        self._handlers = Handlers(self.settings)
        self._sinks = Sinks(self.settings)
        self._declarations = _Declarations()
        self._opened: Opened | None = None
        self._worker: Worker | None = None

    def handler(
        self,
        queue_name: str,
        *,
        concurrency: int | None = None,
        timeout: float | timedelta | None = None,
        max_attempts: int | None = None,
        backoff: Backoff | None = None,
        retention: float | timedelta | None = None,
        tokens_per_pair: int | None = None,
        model: type[BaseModel] | None = None,
    ) -> Callable[[HandlerT], HandlerT]:
        """Declare the function that handles a queue's messages in this process; a plain one runs in a thread.

        What is left out comes from the settings. A handler that takes `Message[Model]`, or is given a `model`, gets its
        payload as that pydantic model; what doesn't fit goes to the dead letters at once.
        """
        if self._worker is not None:
            raise CronTicksError("this QueueManager runs already: declare handlers before run()")

        def register(function: HandlerT) -> HandlerT:
            self._handlers.register(
                queue_name,
                function,
                model=model,
                concurrency=concurrency,
                timeout=timeout,
                max_attempts=max_attempts,
                backoff=backoff,
                retention=retention,
                tokens_per_pair=tokens_per_pair,
            )
            return function

        return register

    def add_sink(
        self,
        name: str,
        sink: TableSink | FunctionSink | Publish,
        *,
        batch_size: int | None = None,
        concurrency: int | None = None,
    ) -> None:
        """Declare where else ticks of schedules with `sink=name` go, beside our own queue.

        A table or an SQL function in this database, or an async function that takes a batch of at most `batch_size`
        ticks (100), and answers for each, in at most `concurrency` calls (4) at once.
        """
        if self._worker is not None:
            raise CronTicksError("this QueueManager runs already: declare sinks before run()")
        self._sinks.add(name, sink, batch_size=batch_size, concurrency=concurrency)

    def sink(
        self, name: str, *, batch_size: int | None = None, concurrency: int | None = None
    ) -> Callable[[PublishT], PublishT]:
        """Declare an async function as a sink; see `add_sink`."""

        def register(publish: PublishT) -> PublishT:
            self.add_sink(name, publish, batch_size=batch_size, concurrency=concurrency)
            return publish

        return register

    async def __aenter__(self) -> Self:
        if self._opened is not None:
            raise CronTicksError("this QueueManager is open already")
        configure_logs_unless_done(self.settings.log_level, self.settings.log_format)
        async with AsyncExitStack() as stack:
            dsn, embedded = (self._dsn if self._pool is None else None), None
            if dsn is None and self._pool is None:
                embedded = await stack.enter_async_context(use_embedded(embedded_server(self.settings)))
                dsn = embedded.dsn
            database = await stack.enter_async_context(open_database(self.settings, dsn=dsn, pool=self._pool))
            await _prepare_schema(database, self.settings)
            events, actor = self.settings.events, self.settings.acting_as
            queue = QueueRepository(database, "", events=events, actor=actor)
            cron = CronRepository(database, self.settings)
            await cron.make_partitions()
            self._opened = Opened(stack.pop_all(), database, dsn, cron, queue, embedded)
        return self

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        opened, self._opened = self._open, None
        await opened.stack.aclose()

    @property
    def embedded(self) -> EmbeddedServer | None:
        """The embedded server, if that is what we use."""
        return self._open.embedded

    @property
    def database(self) -> Database:
        """The open database, for tools that read beside the manager."""
        return self._open.database

    async def send(
        self,
        queue_name: str,
        payload: Any = None,
        *,
        workspace_id: str | None = None,
        process_after: datetime | timedelta | float | None = None,
        priority: Priority = "normal",
        dedupe_key: str | None = None,
        headers: dict[str, Any] | None = None,
        connection: Connection | None = None,
    ) -> Sent:
        """Send a message, due now or at `process_after`: a time with a zone, or a delay.

        While an unfinished message of the same queue and workspace has the same `dedupe_key`, nothing is sent: the
        result says so and names that message. With `connection` it is part of the caller's transaction.
        """
        check_name("queue_name", queue_name)
        message = new_message(
            payload,
            workspace_id=workspace_id,
            process_after=process_after,
            priority=priority,
            dedupe_key=dedupe_key,
            headers=headers,
        )
        return await self._open.queue.send(queue_name, message, connection=connection)

    async def send_many(
        self,
        queue_name: str,
        messages: Iterable[Any] | AsyncIterable[Any],
        *,
        workspace_id: str | None = None,
        connection: Connection | None = None,
    ) -> SentMany:
        """Send payloads, or OutgoingMessages with options of their own, in this order: all or, on an error, none.

        The messages may be any iterable, also an asynchronous one. They are sent as they come, so their number is not
        limited by memory. `workspace_id` holds for those that name none.
        """
        check_name("queue_name", queue_name)
        _check_names(workspace_id=workspace_id)
        async with aclosing(in_chunks(messages, workspace_id)) as chunks:
            return await self._open.queue.send_many(queue_name, chunks, connection=connection)

    async def queue_states(self) -> list[QueueState]:
        """Every queue with unfinished or dead messages or a running worker. Counts them, so it costs what there is."""
        return await self._open.queue.queue_states()

    async def unhandled_queues(self) -> list[str]:
        """Queues with unfinished messages that no running worker handles."""
        return await self._open.queue.unhandled_queues()

    async def list_dead(
        self,
        *,
        queue_name: str | None = None,
        workspace_id: str | None = None,
        after_id: str | None = None,
        limit: int = 100,
    ) -> list[DeadMessage]:
        """A page of dead letters, the latest first; `after_id` is the last id of the page before.

        MessageNotFoundError if that one is no dead letter any more: begin with the first page again.
        """
        check_count("limit", limit, most=LARGEST_PAGE)
        _check_names(queue_name=queue_name, workspace_id=workspace_id, after_id=after_id)
        return await self._open.queue.list_dead(
            queue_name=queue_name, workspace_id=workspace_id, after_id=after_id, limit=limit
        )

    async def get_dead(self, message_id: str) -> DeadMessage:
        """One dead letter; MessageNotFoundError if there is none under this id."""
        check_name("message_id", message_id)
        return await self._open.queue.get_dead(message_id)

    async def redrive_dead(
        self,
        message_ids: Collection[str] | None = None,
        *,
        queue_name: str | None = None,
        workspace_id: str | None = None,
    ) -> int:
        """Let dead letters begin anew, with all their attempts: those of these ids, of a queue, of a workspace, or all.

        Returns how many did. One whose dedupe key another unfinished message has stays dead.
        """
        _check_names(queue_name=queue_name, workspace_id=workspace_id)
        ids = _check_ids(message_ids)
        return await self._open.queue.redrive_dead(ids=ids, queue_name=queue_name, workspace_id=workspace_id)

    async def purge_dead(
        self,
        message_ids: Collection[str] | None = None,
        *,
        queue_name: str | None = None,
        workspace_id: str | None = None,
    ) -> int:
        """Remove dead letters for good, chosen as in `redrive_dead`; how many there were."""
        _check_names(queue_name=queue_name, workspace_id=workspace_id)
        ids = _check_ids(message_ids)
        return await self._open.queue.purge_dead(ids=ids, queue_name=queue_name, workspace_id=workspace_id)

    async def schedule(
        self,
        queue_name: str,
        *,
        every: float | timedelta | None = None,
        cron: str | None = None,
        at: datetime | None = None,
        payload: Any = None,
        workspace_id: str | None = None,
        name: str | None = None,
        timezone: str | None = None,
        jitter: Jitter = "default",
        priority: Priority = "normal",
        starts_at: datetime | None = None,
        ends_at: datetime | None = None,
        max_runs: int | None = None,
        sink: str = OWN_QUEUE,
        delivery: Delivery | None = None,
        overlap: Overlap = "allow",
        max_attempts: int | None = None,
        max_age: float | timedelta | None = None,
        backoff: float | timedelta | None = None,
        catch_up: CatchUp = "latest",
        misfire_grace: float | timedelta | None = None,
        dst_gap: DstGap | None = None,
        dst_fold: DstFold | None = None,
        owner: str | None = None,
        connection: Connection | None = None,
    ) -> Schedule:
        """Declare that `payload` goes to `queue_name` every so many seconds, at times of day, or once at a time.

        Idempotent by (workspace, name), and the name defaults to the queue's: any number of pods may declare the
        same at every start. A changed definition is an edit, which holds from the next occurrence on, keeps the phase
        and never fires by itself. With `connection` it is part of the caller's transaction.

        The first occurrence is now, or `starts_at`; there is none after `ends_at`, and no more than `max_runs`. Each
        moves by up to `jitter` either way: a ratio of the interval (0.1 by default, capped), a timedelta, or None.

        `cron` is an expression of five fields, or six with seconds first, on the wall clocks of `timezone`, an IANA
        name; without one the workspace's, else UTC. It has no jitter unless a timedelta is given, and then moves only
        forward. Fixed times that clocks skip become one occurrence after the gap, or none with `dst_gap="skip"`; of
        those that they show twice it takes the `dst_fold`: first, second or both.

        `owner` is a label of the deployment that declares it: another one can't declare it too, and `apply` removes
        only what has its own.

        With `sink` it goes somewhere else than to our own queue: see `add_sink`. `delivery` is exactly_once in this
        database; outside it is at_least_once, or at_most_once. `overlap` says what happens while the schedule's last
        message is unfinished: allow, skip, or queue_one. A tick that can't be sent is tried `max_attempts` times, with
        pauses from `backoff` on, while it is younger than `max_age`; what is left out comes from the settings.

        `catch_up` says what is made up of occurrences that nobody dealt with in time, because all pods or the database
        were down: skip, latest, all, or spread (all, but paced). A tick that is later than `misfire_grace` is recorded
        as missed instead of fired.
        """
        definition = define_schedule(
            queue_name,
            every=every,
            cron=cron,
            at=at,
            payload=payload,
            workspace_id=workspace_id,
            name=name,
            timezone=timezone,
            jitter=jitter,
            priority=priority,
            starts_at=starts_at,
            ends_at=ends_at,
            max_runs=max_runs,
            sink=sink,
            delivery=delivery,
            overlap=overlap,
            max_attempts=max_attempts,
            max_age=max_age,
            backoff=backoff,
            catch_up=catch_up,
            misfire_grace=misfire_grace,
            dst_gap=dst_gap,
            dst_fold=dst_fold,
            owner=owner,
            jitter_cap=self.settings.jitter_cap,
            sinks=await self._known_sinks(sink, connection),
        )
        repository = self._open.cron
        if connection is None:
            with self._declarations.declared(definition):
                saved = await repository.save_schedule(definition)
        else:  # the application's data, which may change
            saved = await repository.save_schedule(definition, connection=connection)
        _log_saved(saved, connection)
        return saved.schedule

    async def apply(
        self,
        path: str | os.PathLike[str],
        *,
        owner: str | None = None,
        prune: bool = False,
        dry_run: bool = False,
    ) -> Applied:
        """Bring schedules in line with a TOML or YAML file, in one transaction: all of it or, on an error, nothing.

        They belong to the file's `owner`, or the one given here. With `prune` those of the same owner that the file
        doesn't declare are removed, never another's. DeclarationsError lists every mistake with its place.
        """
        if not isinstance(path, str | os.PathLike):
            raise InvalidInputError("path", f"must be the path of a file, not {type(path).__name__}")
        sinks = {**await self._open.cron.known_sinks(), **self._sinks.kinds}
        read = partial(read_declarations, owner=owner, jitter_cap=self.settings.jitter_cap, sinks=sinks)
        declarations = await anyio.to_thread.run_sync(read, Path(path))
        if prune and declarations.owner is None:
            raise InvalidInputError("owner", "prune removes what the same owner declared earlier: give one")
        saved, removed = await self._open.cron.apply(declarations, prune=prune, dry_run=dry_run)
        if not dry_run:
            for item in saved:
                _log_saved(item, None)
            for schedule in removed:
                self._declarations.forget(schedule.workspace_id, schedule.name)
                _log_schedule("schedule_deleted", schedule, None)
        return Applied(declarations.owner, dry_run, tuple(_applied_changes(saved, removed, dry_run=dry_run)))

    async def update_schedule(
        self, schedule_id: str, *, connection: Connection | None = None, **changes: Unpack[ScheduleChanges]
    ) -> Schedule:
        """Change what is given and leave the rest, as an edit by `schedule()` does: `every=`, `payload=` and so on."""
        check_name("schedule_id", schedule_id)
        sinks = await self._known_sinks(changes.get("sink"), connection)
        change = partial(redefine_schedule, changes=changes, jitter_cap=self.settings.jitter_cap, sinks=sinks)
        saved = await self._open.cron.update_schedule(schedule_id, change, connection=connection)
        _log_saved(saved, connection)
        return saved.schedule

    async def _known_sinks(self, sink: str | None, connection: Connection | None) -> Mapping[str, SinkKind]:
        """This process's, and unless these are enough those that workers serve."""
        own = self._sinks.kinds
        if sink is not None:
            check_name("sink", sink)
        if sink == OWN_QUEUE or sink in own:
            return own
        return {**await self._open.cron.known_sinks(connection=connection), **own}

    async def update_schedule_interval(
        self, schedule_id: str, every: float | timedelta, *, connection: Connection | None = None
    ) -> Schedule:
        """Change the interval alone; occurrences stay on the grid that begins at the schedule's anchor."""
        return await self.update_schedule(schedule_id, every=every, connection=connection)

    async def disable_schedule(
        self, schedule_id: str, *, drop_pending: bool = False, connection: Connection | None = None
    ) -> Schedule:
        """Pause a schedule. Ticks that are made already still fire, unless `drop_pending`."""
        check_name("schedule_id", schedule_id)
        saved = await self._open.cron.disable_schedule(schedule_id, drop_pending=drop_pending, connection=connection)
        _log_saved(saved, connection)
        return saved.schedule

    async def enable_schedule(
        self, schedule_id: str, *, fire_now: bool = False, connection: Connection | None = None
    ) -> Schedule:
        """Go on with a schedule at its next occurrence; with `fire_now` it also fires once at once."""
        check_name("schedule_id", schedule_id)
        saved = await self._open.cron.enable_schedule(schedule_id, fire_now=fire_now, connection=connection)
        _log_saved(saved, connection)
        return saved.schedule

    async def trigger(self, schedule_id: str, *, connection: Connection | None = None) -> Triggered:
        """Fire a schedule once now, also a disabled one; its phase and its occurrences stay what they are."""
        check_name("schedule_id", schedule_id)
        triggered = await self._open.cron.trigger(schedule_id, connection=connection)
        log.info(
            "schedule_triggered",
            in_callers_transaction=connection is not None,
            schedule_id=schedule_id,
            tick_id=triggered.tick_id,
        )
        return triggered

    async def get_schedule(self, schedule_id: str, *, connection: Connection | None = None) -> Schedule:
        """The schedule of this id; ScheduleNotFoundError if there is none."""
        check_name("schedule_id", schedule_id)
        return await self._open.cron.get_schedule(schedule_id, connection=connection)

    async def list_schedules(
        self,
        *,
        workspace_id: str | None = None,
        after_id: str = "",
        limit: int = 100,
        connection: Connection | None = None,
    ) -> list[Schedule]:
        """A page of schedules, of one workspace or of all; `after_id` is the last id of the page before."""
        check_count("limit", limit, most=LARGEST_PAGE)
        if workspace_id is not None:
            check_name("workspace_id", workspace_id)
        if after_id != "":
            check_name("after_id", after_id)
        return await self._open.cron.list_schedules(
            workspace_id=workspace_id, after_id=after_id, limit=limit, connection=connection
        )

    async def delete_schedule(self, schedule_id: str, *, connection: Connection | None = None) -> None:
        """Remove a schedule with its pending ticks; messages already sent stay, and so does the ledger."""
        check_name("schedule_id", schedule_id)
        deleted = await self._open.cron.delete_schedule(schedule_id, connection=connection)
        self._declarations.forget(deleted.workspace_id, deleted.name)
        _log_schedule("schedule_deleted", deleted, connection)

    async def delete_workspace(self, workspace_id: str, *, connection: Connection | None = None) -> DeletedWorkspace:
        """Remove a workspace with everything in it: schedules, their ticks, and messages in whatever state.

        A handler that is running finds its message gone when it ends. The ledger keeps what happened, without payloads.
        """
        check_name("workspace_id", workspace_id)
        async with self._open.database.transaction(connection) as chosen:
            schedules = await self._open.cron.delete_workspace(workspace_id, connection=chosen)
            messages = await self._open.queue.delete_workspace(workspace_id, connection=chosen)
        self._declarations.forget(workspace_id)
        log.info(
            "workspace_deleted",
            in_callers_transaction=connection is not None,
            workspace_id=workspace_id,
            schedules=schedules,
            messages=messages,
        )
        return DeletedWorkspace(schedules, messages)

    async def set_workspace_timezone(
        self, workspace_id: str, timezone: str | None, *, connection: Connection | None = None
    ) -> int:
        """Set the zone of the workspace's cron schedules that name none; None: UTC. How many it changes.

        For each of them it is an edit: it holds from the next occurrence on and never fires by itself.
        """
        check_name("workspace_id", workspace_id)
        zone = None if timezone is None else check_zone("timezone", timezone)
        moved = await self._open.cron.set_workspace_timezone(workspace_id, zone, connection=connection)
        log.info(
            "workspace_timezone_set",
            in_callers_transaction=connection is not None,
            workspace_id=workspace_id,
            timezone=zone,
            schedules=len(moved),
        )
        for saved in moved:
            _log_saved(saved, connection)
        return len(moved)

    async def get_workspace_timezone(self, workspace_id: str) -> str | None:
        """The zone of the workspace's cron schedules that name none; None: UTC."""
        check_name("workspace_id", workspace_id)
        return await self._open.cron.get_workspace_timezone(workspace_id)

    def stop(self) -> None:
        """Ask `run()` to end, as SIGTERM does."""
        if self._worker is not None:
            self._worker.stop()

    async def run(self, *, handle_signals: bool = True) -> None:
        """Make ticks, fire them and handle messages until cancelled, stopped, or told to by SIGTERM or SIGINT.

        Then no more handlers are started, running ones may finish within the grace, and what is left is given back.
        An application that has signal handlers of its own, or several managers in one process, sets
        `handle_signals=False` and calls `stop()`.
        """
        if self._worker is not None:
            raise CronTicksError("this QueueManager runs already: run() is called once at a time")
        async with self._services() as services:
            self._worker = Worker(services, self._handlers, self._sinks, self.settings, self._open.embedded)
            try:
                await self._worker.run(handle_signals=handle_signals)
            finally:
                self._worker = None

    @asynccontextmanager
    async def _services(self) -> AsyncIterator[Database]:
        """Connections for a worker: handlers that use up those of the application must not stop its renewals."""
        opened = self._open
        if opened.dsn is None:
            yield opened.database
            return
        most = SERVICE_CONNECTIONS + len(self._sinks.kinds)
        async with open_database(self.settings, dsn=opened.dsn, max_size=most, check=False) as services:
            yield services

    @property
    def health(self) -> dict[str, ServiceHealth]:
        """What the background services of a running worker have counted, by name."""
        return {} if self._worker is None else self._worker.health


class _Declarations:
    """What this process has declared: one name with two definitions is a mistake.

    It remembers so many; a process that makes schedules out of its users' data has no use for it.
    """

    def __init__(self) -> None:
        self._by_name: dict[tuple[str | None, str], ScheduleDefinition] = {}

    @contextmanager
    def declared(self, definition: ScheduleDefinition) -> Iterator[None]:
        """Refuse a name that has another definition here; one that can't be saved was not declared."""
        key = (definition.workspace_id, definition.name)
        payload = json.dumps(json.loads(definition.payload_json), sort_keys=True)  # in whatever order it came
        canonical = replace(definition, payload_json=payload)
        if self._by_name.get(key, canonical) != canonical:
            raise InvalidInputError(
                "name",
                f"this process has declared {definition.name!r} with another definition: give one of them a name= "
                "of its own, or change it with update_schedule()",
            )
        is_new = key not in self._by_name and len(self._by_name) < MOST_DECLARATIONS
        if is_new:
            self._by_name[key] = canonical
        try:
            yield
        except BaseException:
            if is_new:
                self._by_name.pop(key, None)
            raise

    def forget(self, workspace_id: str | None, name: str | None = None) -> None:
        """A schedule was deleted, or all of a workspace."""
        gone = [key for key in self._by_name if key[0] == workspace_id and name in {None, key[1]}]
        for key in gone:
            del self._by_name[key]


async def _prepare_schema(database: Database, settings: Settings) -> None:
    if settings.migrate_on_start:
        await migrate(database)
        return
    pending = await pending_migrations(database)
    if pending:
        raise MigrationError(
            f"{len(pending)} migration(s) are pending, from {pending[0].label} on: run 'cron-ticks migrate' first "
            "(CRON_TICKS_MIGRATE_ON_START is off)"
        )


def _check_names(**names: str | None) -> None:
    for field, value in names.items():
        if value is not None:
            check_name(field, value)


def _check_ids(message_ids: Collection[str] | None) -> list[str] | None:
    if message_ids is None:
        return None
    if not isinstance(message_ids, list | tuple | set | frozenset):
        raise InvalidInputError("message_ids", f"must be a list of ids, not {type(message_ids).__name__}")
    return [check_name("message_ids", message_id) for message_id in message_ids]


def _applied_changes(saved: Iterable[Saved], removed: Iterable[Schedule], *, dry_run: bool) -> Iterator[AppliedChange]:
    for item in saved:
        found = item.schedule
        fields = tuple(dict.fromkeys(_DECLARED_AS.get(field, field) for field in item.fields))
        schedule_id = None if dry_run and item.change == "created" else found.id
        yield AppliedChange(_APPLIED[item.change], found.workspace_id, found.name, schedule_id, fields)
    for found in removed:
        yield AppliedChange("remove", found.workspace_id, found.name, found.id)


def _log_saved(saved: Saved, connection: Connection | None) -> None:
    if saved.change != "unchanged":
        _log_schedule(f"schedule_{saved.change}", saved.schedule, connection, *saved.fields)
    if saved.missed:
        log.warning("occurrences_missed", schedule_id=saved.schedule.id, missed=saved.missed)
    if saved.back_after is not None:
        log.warning(
            "schedule_flip_flop",
            schedule_id=saved.schedule.id,
            name=saved.schedule.name,
            version=saved.schedule.version,
            seconds_since_other_definition=saved.back_after.total_seconds(),
            hint="two definitions of one name take turns: are pods of two releases running?",
        )


def _log_schedule(event: str, schedule: Schedule, connection: Connection | None, *changed: str) -> None:
    """In a caller's transaction the event says so: it holds only if the caller commits."""
    log.info(
        event,
        in_callers_transaction=connection is not None,
        schedule_id=schedule.id,
        name=schedule.name,
        workspace_id=schedule.workspace_id,
        queue=schedule.queue_name,
        every_seconds=schedule.interval and schedule.interval.total_seconds(),
        at=schedule.at and schedule.at.isoformat(),
        cron=schedule.cron,
        timezone=schedule.zone,
        **({"changed": changed} if changed else {}),
        version=schedule.version,
    )
