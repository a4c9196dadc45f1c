"""TickFloors: below which no tick of a sink was pending, by turn and priority, as far as one process knows."""

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Protocol

from cron_ticks.sweeps import Sweeps

PRIORITIES = 4
TURNS = 3
LEVELS = TURNS * PRIORITIES
MARGIN = timedelta(seconds=1)  # what is due at once is committed a moment later, and somebody may have looked meanwhile
NO_FLOORS: Sequence[datetime | None] = (None,) * LEVELS


class Taken(Protocol):
    """A tick that is gone."""

    @property
    def priority(self) -> int: ...  # noqa: D102

    @property
    def due_at(self) -> datetime: ...  # noqa: D102


class TickFloors:
    """A hint, and never the truth: what is committed late may lie below, and is found by the next sweep."""

    def __init__(self) -> None:
        self.sweeps = Sweeps()
        self._floors = list(NO_FLOORS)

    @property
    def all(self) -> Sequence[datetime | None]:
        """Of each turn, of each priority, less a margin; none if it is time to look from the beginning."""
        if self.sweeps.due:
            return NO_FLOORS
        return [None if floor is None else floor - MARGIN for floor in self._floors]

    def of_turn(self, turn: int) -> Sequence[datetime | None]:
        """Of each priority."""
        return self._floors[turn * PRIORITIES : (turn + 1) * PRIORITIES]

    def note(self, floors: Sequence[datetime | None]) -> None:
        """What the database said."""
        self._floors = list(floors)

    def note_taken(self, turn: int, taken: Iterable[Taken]) -> None:
        """A batch is gone, and it was the first of each priority."""
        for tick in taken:
            level = turn * PRIORITIES + tick.priority
            floor = self._floors[level]
            if floor is None or tick.due_at > floor:
                self._floors[level] = tick.due_at
