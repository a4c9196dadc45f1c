"""Connections to PostgreSQL: one pool, a deadline on every statement, no state kept in a session.

No result relies on SET, on advisory session locks or on startup parameters that a pooler refuses, so a transaction
pooler may stand between us and the server.
"""

from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from io import BytesIO
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import anyio
import asyncpg
import structlog

from cron_ticks.errors import DatabaseUnavailableError, InvalidInputError
from cron_ticks.loops import backoff_seconds
from cron_ticks.settings import Settings

log = structlog.get_logger("cron_ticks.database")

if TYPE_CHECKING:
    Pool: TypeAlias = asyncpg.Pool[asyncpg.Record]
    Connection: TypeAlias = asyncpg.Connection[asyncpg.Record] | asyncpg.pool.PoolConnectionProxy[asyncpg.Record]
else:  # generic for type checkers alone
    Pool = asyncpg.Pool
    Connection = asyncpg.Connection

# The server is away or starting, or chose us as a victim: worth another try, unlike a wrong password or database.
PASSING_ERRORS = (
    OSError,
    TimeoutError,
    asyncpg.CannotConnectNowError,
    asyncpg.TooManyConnectionsError,
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.DeadlockDetectedError,
    asyncpg.InterfaceError,
)


ROLLBACK_SECONDS = 2.0
IDLE_SECONDS = 60.0
SPARE_POOL_SIZE = 4  # an application's pool of this size has a connection to spare for LISTEN


LONGEST_ERROR = 10_000


def storable(text: str, longest: int = LONGEST_ERROR) -> str:
    """A text that PostgreSQL can keep: no NUL, no lone surrogates, not endless."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()[:longest]


def in_schema(text: str, schema: str) -> str:
    """The text with `{schema}` replaced; settings allow no quotes in the name."""
    return text.replace("{schema}", f'"{schema}"')


class Database:
    """A pool and the schema that our tables live in. `{schema}` in a statement's text stands for that schema."""

    def __init__(
        self, pool: Pool, settings: Settings, *, listen_dsn: str | None = None, own_pool: bool = False
    ) -> None:
        self._pool = pool
        self._idle: deque[tuple[Connection, float]] = deque()
        self._waiting = 0
        self._idle_seconds = IDLE_SECONDS if own_pool else 0.0
        self._listen_dsn = listen_dsn
        self._deadline = settings.statement_timeout_seconds
        self.schema = settings.database_schema
        self._texts: dict[str, str] = {}

    def sql(self, text: str) -> str:
        """The statement for this installation's schema."""
        if text not in self._texts:
            self._texts[text] = in_schema(text, self.schema)
        return self._texts[text]

    async def fetch(
        self, text: str, *arguments: object, connection: Connection | None = None, deadline_seconds: float | None = None
    ) -> list[asyncpg.Record]:
        """All rows of a statement, on `connection` or on one of the pool's."""
        chosen = await self._acquire() if connection is None else _checked(connection)
        try:
            rows = await chosen.fetch(self.sql(text), *arguments, timeout=deadline_seconds or self._deadline)
        except BaseException:
            if connection is None:
                await self._give_back(chosen)
            raise
        if connection is None:
            await self._put_by(chosen)
        return rows

    async def fetchrow(
        self, text: str, *arguments: object, connection: Connection | None = None
    ) -> asyncpg.Record | None:
        """The first row of a statement, or None."""
        rows = await self.fetch(text, *arguments, connection=connection)
        return rows[0] if rows else None

    async def fetchval(self, text: str, *arguments: object, connection: Connection | None = None) -> Any:
        """The first column of the first row, or None."""
        row = await self.fetchrow(text, *arguments, connection=connection)
        return row[0] if row else None

    async def copy(self, table: str, columns: Sequence[str], rows: str, *, connection: Connection) -> None:
        """Rows in the text format of COPY into a table of ours: the fastest way in."""
        await connection.copy_to_table(
            table,
            source=BytesIO(rows.encode()),
            columns=list(columns),
            schema_name=self.schema,
            format="text",
            timeout=self._deadline,
        )

    async def execute_script(self, script: str, *, connection: Connection, deadline_seconds: float) -> None:
        """Several statements at once, without arguments."""
        await connection.execute(self.sql(script), timeout=deadline_seconds)

    @asynccontextmanager
    async def connection(self, given: Connection | None = None) -> AsyncIterator[Connection]:
        """`given`, which stays its owner's, or a connection of the pool."""
        if given is not None:
            yield _checked(given)
            return
        acquired = await self._acquire()
        try:
            yield acquired
        except BaseException:
            await self._give_back(acquired)
            raise
        await self._put_by(acquired)

    async def _acquire(self) -> Connection:
        """The connection put by last, or one from the pool."""
        while self._idle:
            connection, _ = self._idle.pop()
            if _usable(connection):
                return connection
        self._waiting += 1
        try:
            return await self._pool.acquire(timeout=self._deadline)
        finally:
            self._waiting -= 1

    async def _give_back(self, connection: Connection) -> None:
        """To the pool, which sees to a connection that was left in the middle of something."""
        await self._pool.release(connection)  # type: ignore[arg-type]

    async def _put_by(self, connection: Connection) -> None:
        """Keep it at hand for a while: the way through the pool and back costs half as much as a short statement.

        Not while somebody waits at the pool, and not where the pool is the application's, which may be waiting for it.
        """
        if not self._idle_seconds or self._waiting:
            await self._give_back(connection)
            return
        now = anyio.current_time()
        self._idle.append((connection, now))
        if self._idle[0][1] < now - self._idle_seconds:
            await self._give_back(self._idle.popleft()[0])

    async def release_idle(self) -> None:
        """Give back to the pool what was put by, and put by no more."""
        self._idle_seconds = 0.0
        while self._idle:
            await self._give_back(self._idle.pop()[0])

    @asynccontextmanager
    async def transaction(self, given: Connection | None = None) -> AsyncIterator[Connection]:
        """A transaction in which each statement sees what is committed; inside a caller's own it is a savepoint."""
        isolation: Literal["read_committed"] | None = "read_committed" if given is None else None
        async with self.connection(given) as chosen:
            transaction = chosen.transaction(isolation=isolation)
            with anyio.fail_after(self._deadline):
                await transaction.start()
            try:
                yield chosen
            except BaseException:
                if not await _rolled_back(transaction) and given is None:
                    with suppress(asyncpg.InterfaceError):  # it has gone already
                        chosen.terminate()
                raise
            with anyio.fail_after(self._deadline):
                await transaction.commit()

    @property
    def channel(self) -> str:
        """Where this installation's NOTIFYs go: one channel per schema."""
        return f"cron_ticks.{self.schema}"

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Connection | None]:
        """A connection for LISTEN alone; None where the application's pool has none to spare."""
        if self._listen_dsn is not None:
            connection = await asyncpg.connect(
                self._listen_dsn, timeout=self._deadline, server_settings={"application_name": "cron_ticks listen"}
            )
            try:
                yield connection
            finally:
                connection.terminate()
        elif self._pool.get_max_size() >= SPARE_POOL_SIZE:
            async with self._pool.acquire(timeout=self._deadline) as acquired:
                yield acquired
        else:
            yield None


@asynccontextmanager
async def open_database(
    settings: Settings,
    *,
    dsn: str | None = None,
    pool: Pool | None = None,
    max_size: int | None = None,
    check: bool = True,
) -> AsyncIterator[Database]:
    """A database on the caller's pool, which is left open, or on a pool of our own to `dsn`.

    Without the check nothing is connected before it is used.
    """
    listen_dsn = settings.listen_dsn.get_secret_value() if settings.listen_dsn is not None else dsn
    if pool is not None:
        yield Database(pool, settings, listen_dsn=listen_dsn)
        return
    if dsn is None:
        raise TypeError("open_database() needs dsn= or pool=")
    connect = _connect if check else _create_pool
    own_pool = await connect(dsn, settings, max_size or settings.pool_max_size)
    database = Database(own_pool, settings, listen_dsn=listen_dsn, own_pool=True)
    try:
        yield database
    finally:
        with anyio.move_on_after(settings.stop_grace_seconds, shield=True) as scope:
            await database.release_idle()
            await own_pool.close()
        if scope.cancelled_caught:
            own_pool.terminate()


async def _connect(dsn: str, settings: Settings, max_size: int) -> Pool:
    """Try until the server answers or `connect_timeout_seconds` have passed: a pod may start before its server."""
    attempts = 0
    last_error: BaseException | None = None
    with anyio.move_on_after(settings.connect_timeout_seconds):
        while True:
            try:
                return await _checked_pool(dsn, settings, max_size)
            except asyncpg.ClientConfigurationError as error:
                raise DatabaseUnavailableError(f"the DSN can't be used: {error}") from error
            except PASSING_ERRORS as error:
                attempts += 1
                last_error = error
                delay = backoff_seconds(attempts)
                log.warning("database_unreachable", error=str(error), retry_in_seconds=round(delay, 3))
                await anyio.sleep(delay)
            except (asyncpg.PostgresError, ValueError) as error:
                raise DatabaseUnavailableError(f"PostgreSQL refuses the connection: {error}. Check the DSN.") from error
    raise DatabaseUnavailableError(
        f"no answer from PostgreSQL within {settings.connect_timeout_seconds:g} s"
        f"{'' if last_error is None else f' ({last_error})'}. "
        "Check the DSN and that the server runs."
    ) from last_error


async def _checked_pool(dsn: str, settings: Settings, max_size: int) -> Pool:
    pool = await _create_pool(dsn, settings, max_size)
    try:
        async with pool.acquire(timeout=settings.connect_timeout_seconds):
            return pool
    except BaseException:
        pool.terminate()
        raise


async def _create_pool(dsn: str, settings: Settings, max_size: int) -> Pool:
    return await asyncpg.create_pool(
        dsn,
        min_size=0,
        max_size=max_size,
        timeout=settings.connect_timeout_seconds,
        command_timeout=settings.statement_timeout_seconds,
        init=None if settings.transaction_pooler else _prefer_indexes,
        reset=_keep_session,
        server_settings={"application_name": "cron_ticks"},
        statement_cache_size=0 if settings.transaction_pooler else 100,
    )


async def _rolled_back(transaction: asyncpg.transaction.Transaction) -> bool:
    """Roll back in a short time, also when cancelled. False: the connection is of no use any more."""
    try:
        with anyio.fail_after(ROLLBACK_SECONDS, shield=True):
            await transaction.rollback()
    except PASSING_ERRORS:
        return False
    return True


def _usable(connection: Connection) -> bool:
    """Not if the server has gone: the pool has taken it back then."""
    try:
        return not connection.is_closed()
    except asyncpg.InterfaceError:
        return False


def _checked(connection: Connection) -> Connection:
    if not isinstance(connection, asyncpg.Connection | asyncpg.pool.PoolConnectionProxy):
        raise InvalidInputError("connection", f"must be an asyncpg connection, not {type(connection).__name__}")
    if not _usable(connection):
        raise InvalidInputError("connection", "is closed, or has gone back to its pool")
    return connection


async def _prefer_indexes(connection: Connection) -> None:
    """Once per connection, where it is ours.

    Each statement sees what is committed, whatever the server's default is: tickers that fire at once rely on it.

    Plans are kept for a long time, and a queue that is empty now may have a million rows in a minute: a plan that reads
    the whole of a small table must never be the one that is kept. Where there is no index it is taken nevertheless, at
    a price that would make the server compile the statement each time.
    """
    await connection.execute(
        "SET default_transaction_isolation = 'read committed'; SET enable_seqscan = off; SET jit = off"
    )


async def _keep_session(_connection: Connection) -> None:
    """Nothing to reset: we leave no state in a session, and the default costs a round trip per release."""
