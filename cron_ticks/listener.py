"""Hears NOTIFY, and knows whether it really does.

Behind a transaction pooler LISTEN succeeds and stays deaf, and a connection can die without a word. So a proof counts:
a NOTIFY to ourselves, sent over another connection, that came back.
"""

from collections.abc import Callable

import anyio
import asyncpg
import structlog

from cron_ticks.database import Connection, Database

log = structlog.get_logger("cron_ticks.listener")

PROOF_PREFIX = " proof "  # no queue's name begins with a blank
TICKS_NOTICE = " ticks"  # there are ticks that are due soon
SHARDS_NOTICE = " shards"  # a manager has let go of its shards; then its id
PROOF_SECONDS = 5.0  # how long a proof may take
PROOF_INTERVAL_SECONDS = 60.0
DEAF_INTERVAL_SECONDS = (1.0, 30.0)  # until the next try, at first and at last

NOTIFY = "SELECT pg_notify($1, $2)"


class Listener:
    """Calls `on_notice` with each payload of the installation's channel, while `hears` is true."""

    name = "listener"

    def __init__(
        self,
        database: Database,
        listener_id: str,
        *,
        on_notice: Callable[[str], None],
        on_change: Callable[[], None],
    ) -> None:
        self.hears = False
        self._said: bool | None = None  # what the log says of it
        self._database = database
        self._proof = PROOF_PREFIX + listener_id
        self._on_notice = on_notice
        self._on_change = on_change
        self._proven = anyio.Event()
        self._ended = anyio.Event()
        self._deaf_passes = 0

    async def run_once(self) -> float:
        """One connection's life: LISTEN, and prove it again and again until a proof fails."""
        self._ended = anyio.Event()
        try:
            async with self._database.listening() as connection:
                if connection is not None:
                    await self._listen(connection)
        except Exception:
            self._change(hears=False)
            raise
        self._change(hears=False)
        first, last = DEAF_INTERVAL_SECONDS
        self._deaf_passes += 1
        return min(first * 2.0 ** min(self._deaf_passes - 1, 10), last)

    async def _listen(self, connection: Connection) -> None:
        connection.add_termination_listener(self._note_end)
        await connection.add_listener(self._database.channel, self._note)
        try:
            while not self._ended.is_set() and await self._prove():
                self._deaf_passes = 0
                self._change(hears=True)
                with anyio.move_on_after(PROOF_INTERVAL_SECONDS):
                    await self._ended.wait()
        finally:
            await self._forget(connection)

    async def _prove(self) -> bool:
        """Over the pool: what the listening connection sends itself would come back even where nothing else does."""
        self._proven = anyio.Event()
        await self._database.fetch(NOTIFY, self._database.channel, self._proof)
        with anyio.move_on_after(PROOF_SECONDS):
            await self._proven.wait()
        return self._proven.is_set()

    async def _forget(self, connection: Connection) -> None:
        """Leave a connection of the application's pool as it was."""
        connection.remove_termination_listener(self._note_end)
        with anyio.move_on_after(1, shield=True):
            try:
                await connection.remove_listener(self._database.channel, self._note)
            except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
                log.debug("listener_connection_lost")

    def _note(self, _connection: object, _process: int, _channel: str, payload: object) -> None:
        if payload == self._proof:
            self._proven.set()
        elif isinstance(payload, str) and not payload.startswith(PROOF_PREFIX):
            self._on_notice(payload)

    def _note_end(self, _connection: object) -> None:
        self._ended.set()
        self._change(hears=False)

    def _change(self, *, hears: bool) -> None:
        if self._said != hears:
            self._said = hears
            log.info("notify_heard" if hears else "notify_not_heard", channel=self._database.channel)
        if self.hears != hears:
            self.hears = hears
            self._on_change()
