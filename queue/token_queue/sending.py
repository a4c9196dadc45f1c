"""What an application sends, checked at the door."""

from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from pydantic import BaseModel

from cron_ticks.checks import RANKS, check_name, check_payload, check_priority
from cron_ticks.errors import InvalidInputError
from cron_ticks.ids import new_message_id
from token_queue.message import OutgoingMessage

LONGEST_DELAY = timedelta(days=36_525)
LARGEST_HEADERS_BYTES = 65_536
CHUNK = 1000  # messages of a send_many() per statement
CHUNK_CHARACTERS = 4_000_000  # or as soon as their payloads are so long

NORMAL = RANKS["normal"]


@dataclass(slots=True)
class NewMessage:
    """A checked message, in the database's terms."""

    id: str
    workspace_id: str | None
    payload_json: str
    headers_json: str
    priority: int
    dedupe_key: str | None
    process_at: datetime | None
    delay: timedelta | None

    @property
    def plain(self) -> bool:
        """Due at once and no duplicate of anything, as most are."""
        return self.dedupe_key is None and self.process_at is None and self.delay is None

    def copy_row(self, queue_name: str) -> str:
        """A row for COPY, of COPY_COLUMNS. No value has a control character of its own: names and JSON can't."""
        workspace = "\\N" if self.workspace_id is None else _escape(self.workspace_id)
        payload, headers = _escape(self.payload_json), _escape(self.headers_json)
        return f"{self.id}\t{_escape(queue_name)}\t{workspace}\t{payload}\t{headers}\t{self.priority}\n"


COPY_COLUMNS = ("id", "queue_name", "workspace_id", "payload", "headers", "priority")


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\")


def new_message(
    payload: Any,
    *,
    workspace_id: str | None = None,
    process_after: datetime | timedelta | float | None = None,
    priority: str = "normal",
    dedupe_key: str | None = None,
    headers: dict[str, Any] | None = None,
) -> NewMessage:
    """Check one message; it is due at `process_after`: a time, or a delay by the database's clock."""
    if workspace_id is not None:
        check_name("workspace_id", workspace_id)
    if dedupe_key is not None:
        check_name("dedupe_key", dedupe_key)
    at, delay = (None, None) if process_after is None else check_process_after("process_after", process_after)
    return NewMessage(
        id=new_message_id(),
        workspace_id=workspace_id,
        payload_json=payload_json(payload),
        headers_json="{}" if headers is None or headers == {} else check_headers("headers", headers),
        priority=check_priority("priority", priority),
        dedupe_key=dedupe_key,
        process_at=at,
        delay=delay,
    )


def payload_json(payload: Any) -> str:
    """The payload's JSON; a pydantic model is sent as what it would be in JSON."""
    if isinstance(payload, BaseModel):
        try:
            payload = payload.model_dump(mode="json", by_alias=True)
        except ValueError as error:
            raise InvalidInputError("payload", f"must be JSON: {error}") from None
    return check_payload("payload", {} if payload is None else payload)


def check_headers(field: str, value: object) -> str:
    """An object with texts as keys, not too large."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise InvalidInputError(field, "must be a dict whose keys are strings")
    text = check_payload(field, value)
    if len(text.encode()) > LARGEST_HEADERS_BYTES:
        raise InvalidInputError(field, f"must be at most {LARGEST_HEADERS_BYTES} bytes as JSON; is this a payload?")
    return text


def check_process_after(field: str, value: object) -> tuple[datetime | None, timedelta | None]:
    """A time with a zone, or a delay: a timedelta or seconds."""
    if isinstance(value, datetime):
        if value.utcoffset() is None:
            raise InvalidInputError(field, f"{value} has no time zone: use datetime.now(UTC) or a delay in seconds")
        try:
            return value.astimezone(UTC), None
        except OverflowError:
            raise InvalidInputError(field, f"{value} is out of range") from None
    if isinstance(value, bool) or not isinstance(value, int | float | timedelta):
        raise InvalidInputError(field, f"must be a datetime, a timedelta or seconds, not {type(value).__name__}")
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if not 0 <= seconds <= LONGEST_DELAY.total_seconds():
        raise InvalidInputError(field, f"must be a delay from 0 s to {LONGEST_DELAY.days} days, not {value}")
    return None, timedelta(seconds=seconds)


class _Chunk:
    """Gathers checked messages until there are enough for a statement."""

    def __init__(self, workspace_id: str | None) -> None:
        self._workspace_id = workspace_id
        self._number = 0
        self._size = 0
        self._messages: list[NewMessage] = []

    def add(self, item: Any) -> bool:
        """True if the chunk is full."""
        try:
            message = _checked(item, self._workspace_id)
        except InvalidInputError as error:
            raise InvalidInputError(f"messages[{self._number}].{error.field}", error.problem) from None
        self._number += 1
        self._size += len(message.payload_json)
        self._messages.append(message)
        return len(self._messages) >= CHUNK or self._size >= CHUNK_CHARACTERS

    def take(self) -> list[NewMessage]:
        """What was gathered; the next chunk begins."""
        taken, self._messages, self._size = self._messages, [], 0
        return taken


async def in_chunks(
    messages: Iterable[Any] | AsyncIterable[Any], workspace_id: str | None
) -> AsyncGenerator[list[NewMessage], None]:
    """Checked messages, a chunk at a time, so that a stream of any length fits into memory."""
    chunk = _Chunk(workspace_id)
    if isinstance(messages, AsyncIterable):
        async for item in messages:
            if chunk.add(item):
                yield chunk.take()
    elif isinstance(messages, str | bytes | bytearray | Mapping | BaseModel) or not isinstance(messages, Iterable):
        raise InvalidInputError("messages", f"must be a list or another iterable, not {type(messages).__name__}")
    else:
        for item in messages:
            if chunk.add(item):
                yield chunk.take()
    if rest := chunk.take():
        yield rest


def _checked(item: Any, workspace_id: str | None) -> NewMessage:
    if not isinstance(item, OutgoingMessage):  # a payload alone; whose workspace it is was checked for all
        return NewMessage(new_message_id(), workspace_id, payload_json(item), "{}", NORMAL, None, None, None)
    return new_message(
        item.payload,
        workspace_id=workspace_id if item.workspace_id is None else item.workspace_id,
        process_after=item.process_after,
        priority=item.priority,
        dedupe_key=item.dedupe_key,
        headers=item.headers,
    )
