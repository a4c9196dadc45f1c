"""The message that a handler gets."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Message:
    """A row of `queue_messages`, claimed by this process.

    A message that a schedule sent has the headers `schedule_id`, `schedule_name`, `scheduled_for` (the occurrence,
    ISO 8601 in UTC), `tick_id`, `ticker_id` and `origin`.
    """

    id: str
    queue_name: str
    workspace_id: str | None
    payload: Any
    headers: dict[str, Any]
    attempt: int
