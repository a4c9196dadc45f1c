"""Calls of a QueueManager: every change of a message's or a schedule's state."""

from cron_ticks.checks import check_count, check_name
from cron_ticks.errors import InvalidInputError
from cron_ticks.event_repository import EventRepository
from cron_ticks.events import Event
from token_queue.opened import OpenedManager

LARGEST_PAGE = 10_000
LAST_SEQUENCE = 2**63 - 1


class EventCalls(OpenedManager):
    """Every change of a message's or a schedule's state."""

    async def events(
        self,
        *,
        message_id: str | None = None,
        schedule_id: str | None = None,
        after_sequence: int = 0,
        limit: int = 100,
    ) -> list[Event]:
        """What happened to a message, or to a schedule and its messages, the oldest first.

        `after_sequence` is the last sequence of the page before. What there is depends on the setting `events`, and on
        how long events are kept.
        """
        check_count("limit", limit, most=LARGEST_PAGE)
        check_count("after_sequence", after_sequence, least=0, most=LAST_SEQUENCE)
        repository = EventRepository(self._open.database)
        if message_id is not None and schedule_id is None:
            check_name("message_id", message_id)
            return await repository.of_message(message_id, after_sequence=after_sequence, limit=limit)
        if schedule_id is not None and message_id is None:
            check_name("schedule_id", schedule_id)
            return await repository.of_schedule(schedule_id, after_sequence=after_sequence, limit=limit)
        raise InvalidInputError("message_id", "give either message_id or schedule_id")
