"""Removing what is past: partitions, and what goes with them. The statements are in `retention_sql`."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

import anyio
import asyncpg

from cron_ticks import retention_sql
from cron_ticks.database import Database

PartitionKind = Literal["runs", "events"]

TRIES = 5  # to get the lock on a table: each may hold up firings for 100 ms
PAUSE_SECONDS = 0.1  # between two tries, and between two partitions: those who waited go first
VERSIONS_AT_ONCE = 1000
THE_BEGINNING = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True)
class DroppedPartitions:
    """What was removed of a kind."""

    names: tuple[str, ...]
    busy: bool = False  # somebody has the table in use for long: the rest is left for another time


class RetentionRepository:
    """What is past, in the database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def drop_partitions(
        self, kind: PartitionKind, older_than: timedelta, *, now: datetime | None = None
    ) -> DroppedPartitions:
        """Remove the partitions that are wholly so old, one after the other, the oldest first."""
        statement = retention_sql.RUNS_BEFORE if kind == "runs" else retention_sql.EVENTS_BEFORE
        names: list[str] = []
        while True:
            before = await self._database.fetchval(statement, now, older_than)  # anew: a backfill may have begun
            try:
                name = await self._drop_oldest(kind, before)
            except asyncpg.LockNotAvailableError:
                return DroppedPartitions(tuple(names), busy=True)
            if name is None:
                return DroppedPartitions(tuple(names))
            names.append(name)
            await anyio.sleep(PAUSE_SECONDS)

    async def _drop_oldest(self, kind: PartitionKind, before: datetime) -> str | None:
        for _ in range(TRIES - 1):
            try:
                return await self._drop(kind, before)
            except asyncpg.LockNotAvailableError:
                await anyio.sleep(PAUSE_SECONDS)
        return await self._drop(kind, before)

    async def _drop(self, kind: PartitionKind, before: datetime) -> str | None:
        name: str | None = await self._database.fetchval(retention_sql.DROP_PARTITION, kind, before)
        return name

    async def forget_versions(self, *, limit: int = VERSIONS_AT_ONCE) -> int:
        """Remove what schedules were before the first kept run; how many versions."""
        kept = await self._database.fetchrow(retention_sql.KEPT)
        if kept is None or kept["runs"] is None or kept["runs"] == kept["versions"]:
            return 0
        place = (kept["versions"] or THE_BEGINNING, "", 0)
        forgotten = 0
        while True:
            arguments = (limit, kept["runs"], *place)
            last = await self._database.fetchrow(retention_sql.FORGET_VERSIONS, *arguments)
            if last is not None:
                forgotten += last["forgotten"]
                place = (last["holds_after"], last["schedule_id"], last["version"])
            if last is None or last["looked_at"] < limit:
                await self._database.fetch(retention_sql.NOTE_VERSIONS, kept["runs"])
                return forgotten

    async def delete_audits(self, older_than: timedelta, *, now: datetime | None = None) -> int:
        """Remove what audits found so long ago; how many there were."""
        return len(await self._database.fetch(retention_sql.DELETE_AUDITS, now, older_than))

    async def delete_backfills(self, older_than: timedelta, *, now: datetime | None = None) -> int:
        """Remove backfills that ended so long ago; how many there were."""
        return len(await self._database.fetch(retention_sql.DELETE_BACKFILLS, now, older_than))
