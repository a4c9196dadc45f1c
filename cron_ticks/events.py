"""Events: every change of a message's or a schedule's state, and how much of that is kept."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

EventLevel = Literal["all", "changes", "off"]

DEFAULT_LEVEL: EventLevel = "changes"
LEVELS: tuple[EventLevel, ...] = ("off", "changes", "all")


@dataclass(frozen=True)
class Event:
    """A row of `execution_events`."""

    sequence: int  # grows with time for one message and for one schedule; there are gaps
    at: datetime
    event: str
    schedule_id: str | None
    message_id: str | None
    worker: str | None
    actor: str | None  # who asked for it, if that was no worker
    data: dict[str, Any]


def includes(level: EventLevel, least: EventLevel) -> bool:
    """Whether events that are kept from the level `least` on are kept at this one."""
    return LEVELS.index(level) >= LEVELS.index(least)


def utc_text(instant: datetime) -> str:
    """A time as the statements write it into an event's data."""
    return instant.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


@dataclass(frozen=True)
class Noted:
    """A statement in two static texts: with the events of what it does, from a level on, and without any cost of them.

    `{events}` stands at the end of a part that changes rows: there follow RETURNING and the part that writes.
    """

    silent: str
    noting: str
    least: EventLevel

    def at(self, level: EventLevel) -> str:
        """The text for a level."""
        return self.noting if includes(level, self.least) else self.silent


def noted(statement: str, events: str, *, least: EventLevel) -> Noted:
    """Both texts of a statement with `{events}` in it."""
    return Noted(statement.replace("{events}", ""), statement.replace("{events}", events), least)
