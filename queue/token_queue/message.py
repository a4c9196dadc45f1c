"""Messages: what an application sends, what a handler gets, and what is left of one that died."""

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Generic

from typing_extensions import TypeVar

from cron_ticks.checks import Priority

PayloadT = TypeVar("PayloadT", default=Any)


@dataclass(frozen=True, slots=True)
class Message(Generic[PayloadT]):
    """A row of `queue_messages`, as its handler gets it.

    The payload is JSON, or the pydantic model that the handler declares by `Message[Model]`. A message that a schedule
    sent has the headers `schedule_id`, `schedule_name`, `scheduled_for` (the occurrence, ISO 8601 in UTC), `tick_id`,
    `attempt` (of the tick: 1, unless it could not be sent before), `ticker_id` and `origin` (schedule or trigger).
    """

    id: str
    queue_name: str
    workspace_id: str | None
    payload: PayloadT
    headers: dict[str, Any]
    attempt: int  # 1 at the first try


@dataclass(slots=True)
class RawMessage:
    """A message as it came from the database, before anybody has read what is in it."""

    id: str
    queue_name: str
    workspace_id: str | None
    payload_json: str
    headers_json: str
    attempt: int
    worker_deaths: int  # workers that died with it in hand
    exclusive_for: str | None = None  # the schedule of which no other message may be unfinished


@dataclass(frozen=True, slots=True)
class OutgoingMessage:
    """One message of a `send_many()` with options of its own."""

    payload: Any
    workspace_id: str | None = None
    process_after: datetime | timedelta | float | None = None
    priority: Priority = "normal"
    dedupe_key: str | None = None
    headers: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sent:
    """What `send()` did. A duplicate was not sent: `id` is then that of the unfinished message with its dedupe key."""

    id: str
    duplicate: bool = False


@dataclass(frozen=True, slots=True)
class SentMany:
    """What `send_many()` did."""

    sent: int
    duplicates: int


@dataclass(frozen=True, slots=True)
class DeletedWorkspace:
    """What `delete_workspace()` removed."""

    schedules: int
    messages: int


@dataclass(frozen=True, slots=True)
class DeadMessage:
    """A message in the dead-letter state: not tried again until it is redriven."""

    id: str
    queue_name: str
    workspace_id: str | None
    payload: Any
    headers: dict[str, Any]
    attempts: int
    worker_deaths: int
    error_type: str | None
    error_message: str | None
    error_traceback: str | None
    sent_at: datetime
    failed_at: list[datetime]
    dead_at: datetime


@dataclass(frozen=True, slots=True)
class QueueState:
    """One queue at a moment: its messages, and how many running workers handle it."""

    queue_name: str
    due: int
    waiting: int
    dead: int
    oldest_due: datetime | None
    workers: int
