"""Leased ticks, ticks that could not be sent, and known sinks in the database. The statements are in `lease_sql`."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import asyncpg

from cron_ticks import event_sql, lease_sql, tick_sql
from cron_ticks.database import Connection, Database, storable
from cron_ticks.rows import DeliveredTick, LeasedTick, leased_tick
from cron_ticks.schedules import SinkKind
from cron_ticks.settings import Settings
from cron_ticks.tick_floors import NO_FLOORS

MAKE_MISSING = {
    "cron_runs": tick_sql.MAKE_PARTITIONS_OF_TICKS,
    "execution_events": event_sql.MAKE_PARTITION,
}


@dataclass(frozen=True)
class Leased:
    """What a lease of due ticks found."""

    ticks: list[LeasedTick]
    refused: list[str]  # ids of ticks that had fired before
    given_up: list[str]  # of those that were too old, had no attempt left, or were lost by a schedule now disabled
    missed: list[str]  # of those that were too late for their misfire_grace
    late: bool  # there are ticks that a catch-up policy must decide about first

    @property
    def found(self) -> int:
        """Fewer than asked for means that nothing is left."""
        return len(self.ticks) + len(self.refused) + len(self.given_up) + len(self.missed)


@dataclass(frozen=True)
class FailedTick:
    """A tick that could not be sent."""

    id: str
    attempts: int  # as it was read; what is leased has this attempt counted already
    error: str
    final: bool = False  # not to be tried again
    unsure: bool = False  # it may have been delivered nevertheless


class LeaseRepository:
    """Ticks in somebody's hands."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self.database = database
        self._lease = timedelta(seconds=settings.lease_seconds)
        self._missed_after = timedelta(seconds=settings.missed_after_seconds)
        self._limits = (settings.tick_max_attempts, timedelta(seconds=settings.tick_max_age_seconds))
        self._backoff = timedelta(seconds=settings.tick_backoff_seconds)

    async def batch_lease_ticks(
        self,
        *,
        sink: str,
        leased_by: str,
        limit: int,
        last_turn: int = 2,
        floors: Sequence[datetime | None] = NO_FLOORS,
        now: datetime | None = None,
    ) -> Leased:
        """Lease due ticks of a sink outside this database; a lease that runs out makes them due again."""
        arguments = (leased_by, limit, now, self._lease, sink, *self._limits, last_turn, self._missed_after)
        rows = await self._fetch(lease_sql.LEASE_DUE_TICKS, *arguments, list(floors))
        ticks = [leased_tick(row) for row in rows if row["id"] is not None]
        return Leased(ticks, *(rows[0][name] for name in ("refused", "given_up", "missed", "late")))

    async def renew_leases(
        self, ids: Collection[str], *, leased_by: str, for_good: bool = False, now: datetime | None = None
    ) -> set[str]:
        """Go on with ticks; those that are still the caller's. `for_good`: nobody may take them over."""
        rows = await self.database.fetch(lease_sql.RENEW_LEASES, leased_by, list(ids), now, self._lease, for_good)
        return {row["id"] for row in rows}

    async def release_leases(self, ids: Collection[str], *, leased_by: str, now: datetime | None = None) -> None:
        """Give back ticks that were not handed on."""
        await self.database.fetch(lease_sql.RELEASE_LEASES, leased_by, list(ids), now)

    async def delete_ticks(
        self, ids: Collection[str], *, leased_by: str, now: datetime | None = None
    ) -> list[DeliveredTick]:
        """End delivered ticks; those whose lease was still the caller's."""
        rows = await self._fetch(lease_sql.END_TICKS, leased_by, list(ids), now)
        return [DeliveredTick._make(row) for row in rows]

    async def delete_tick(self, tick_id: str, *, leased_by: str, now: datetime | None = None) -> bool:
        """End one delivered tick; False if the lease is not the caller's any more."""
        return bool(await self.delete_ticks([tick_id], leased_by=leased_by, now=now))

    async def fail_ticks(
        self,
        failed: Sequence[FailedTick],
        *,
        ticker_id: str,
        leased_by: str | None = None,
        now: datetime | None = None,
    ) -> dict[str, bool]:
        """Try these again after a pause, or end them: by id whether it has ended, without those that were not ours."""
        rows = await self._fetch(
            lease_sql.FAIL_TICKS,
            leased_by,
            [tick.id for tick in failed],
            [tick.attempts for tick in failed],
            [storable(tick.error) for tick in failed],
            [tick.final for tick in failed],
            *self._limits,
            self._backoff,
            now,
            [tick.unsure for tick in failed],
            ticker_id,
        )
        return {row["id"]: row["final"] for row in rows}

    async def delete_expired_ticks(self, *, expired_for: timedelta, limit: int, now: datetime | None = None) -> int:
        """End ticks whose last lease ran out so long ago; fewer than `limit` means that none is left."""
        arguments = (expired_for, limit, now, *self._limits)
        return len(await self._fetch(lease_sql.DELETE_EXPIRED_TICKS, *arguments))

    async def note_sinks(self, sinks: Mapping[str, SinkKind], *, now: datetime | None = None) -> None:
        """A worker serves these."""
        await self.database.fetch(lease_sql.NOTE_SINKS, list(sinks), list(sinks.values()), now)

    async def known_sinks(self, *, connection: Connection | None = None) -> dict[str, SinkKind]:
        """Sinks that some worker has served."""
        return {row["name"]: row["kind"] for row in await self.database.fetch(lease_sql.SINKS, connection=connection)}

    async def unserved_sinks(self, *, now: datetime | None = None) -> list[str]:
        """Sinks with due ticks that no worker serves."""
        return [row["sink"] for row in await self.database.fetch(lease_sql.UNSERVED_SINKS, now)]

    async def _fetch(
        self, statement: str, *arguments: object, deadline_seconds: float | None = None
    ) -> list[asyncpg.Record]:
        """A statement that writes to the ledger and its events; partitions that it lacks are made, each once."""
        missing = dict(MAKE_MISSING)
        while True:
            try:
                return await self.database.fetch(statement, *arguments, deadline_seconds=deadline_seconds)
            except asyncpg.CheckViolationError as error:
                make = missing.pop(error.table_name or "", None)
                if make is None or error.constraint_name is not None:  # a table of the user's
                    raise
                await self.database.fetch(make)
