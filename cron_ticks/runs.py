"""What became of an occurrence: its row in the ledger, and the message that it became."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal, NamedTuple

from cron_ticks.checks import check_instant, check_name, shown
from cron_ticks.errors import InvalidInputError

Outcome = Literal["enqueued", "missed", "overlapped", "disabled", "failed", "expired"]
OUTCOMES: tuple[Outcome, ...] = ("enqueued", "missed", "overlapped", "disabled", "failed", "expired")
MessageProgress = Literal["pending", "running", "failed", "completed", "dead", "removed"]


@dataclass(frozen=True)
class MessageState:
    """A message at a moment, with the error of its last failed attempt."""

    id: str
    # running: in a worker's hands; failed: it waits for its next attempt; removed: finished, and its retention is over.
    # None: it was handed to a sink that doesn't tell us.
    state: MessageProgress | None
    sent_at: datetime | None = None
    completed_at: datetime | None = None
    dead_at: datetime | None = None
    attempts: int | None = None
    error_type: str | None = None
    error_message: str | None = None
    next_attempt_at: datetime | None = None  # unless it is finished, or running

    @property
    def finished_at(self) -> datetime | None:
        """When it was completed, or died."""
        return self.completed_at or self.dead_at

    @property
    def error(self) -> str | None:
        """Type and message of the last failure, as far as known."""
        return ": ".join(part for part in (self.error_type, self.error_message) if part) or None


class RunPlace(NamedTuple):
    """Where a run stands in the order of pages."""

    scheduled_for: datetime
    schedule_id: str


@dataclass(frozen=True)
class Run:
    """How a tick ended; of occurrences that were missed in a row, all of them."""

    schedule_id: str
    schedule_name: str | None  # as it was then; None, here and in the next three: too long ago to be known
    workspace_id: str | None
    queue_name: str | None
    sink: str | None
    scheduled_for: datetime  # of several, the last
    missed_since: datetime | None  # the first, if they are several
    occurrences: int
    version: int
    origin: Literal["schedule", "trigger", "backfill", "recovery"]
    outcome: Outcome
    reason: str | None
    ended_at: datetime
    lateness: timedelta | None  # if enqueued: from when it was due to ended_at
    attempts: int
    worker: str | None
    recovered: bool  # an attempt's lease ran out, and another worker took the tick over
    recovery_time: timedelta | None
    message_id: str | None
    message: MessageState | None = None

    @property
    def place(self) -> RunPlace:
        """In the order of pages."""
        return RunPlace(self.scheduled_for, self.schedule_id)

    @property
    def cursor(self) -> str:
        """The same as a text: `after` of the next page."""
        return f"{self.scheduled_for.isoformat()}/{self.schedule_id}"


def check_place(field: str, value: object) -> RunPlace:
    """A run, or the cursor of one."""
    if isinstance(value, Run):
        return value.place
    if not isinstance(value, str):
        raise InvalidInputError(field, f"must be a run, or the cursor of one, not {type(value).__name__}")
    moment, _, schedule_id = value.partition("/")
    try:
        return RunPlace(check_instant(field, datetime.fromisoformat(moment)), check_name(field, schedule_id))
    except ValueError:
        raise InvalidInputError(field, f"must be the cursor of a run, not {shown(value)}") from None
