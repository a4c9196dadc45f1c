"""Events in the database, to be read. The statements are in `event_sql`."""

import json

import asyncpg

from cron_ticks import event_sql
from cron_ticks.database import Database
from cron_ticks.events import Event


class EventRepository:
    """What happened to a message or a schedule."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def of_message(self, message_id: str, *, after_sequence: int, limit: int) -> list[Event]:
        """The oldest first."""
        rows = await self._database.fetch(event_sql.EVENTS_OF_MESSAGE, message_id, after_sequence, limit)
        return [_event(row) for row in rows]

    async def of_schedule(self, schedule_id: str, *, after_sequence: int, limit: int) -> list[Event]:
        """The oldest first, those of its messages among them."""
        rows = await self._database.fetch(event_sql.EVENTS_OF_SCHEDULE, schedule_id, after_sequence, limit)
        return [_event(row) for row in rows]


def _event(row: asyncpg.Record) -> Event:
    data = {} if row["data"] is None else json.loads(row["data"])
    return Event(**dict(row) | {"data": data})
