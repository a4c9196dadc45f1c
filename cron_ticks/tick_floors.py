"""TickFloors: below which no tick of a sink was pending, by turn and priority, as far as one process knows."""

import math
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Protocol

from cron_ticks.checks import PRIORITIES
from cron_ticks.sweeps import Sweeps

TURNS = 3
OF_A_TURN = len(PRIORITIES)
LEVELS = TURNS * OF_A_TURN
MARGIN = timedelta(seconds=1)  # what is due at once is committed a moment later, and somebody may have looked meanwhile
NO_FLOORS: Sequence[datetime | None] = (None,) * LEVELS
NONE_OF_A_TURN = NO_FLOORS[:OF_A_TURN]


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
        self._swept = True  # the last look was a sweep
        self._reached = list(NO_FLOORS)  # by what is being fired: what somebody else had locked may lie below

    @property
    def all(self) -> Sequence[datetime | None]:
        """Of each turn, of each priority, less a margin; none if it is time to look from the beginning."""
        if self.sweeps.due:
            return NO_FLOORS
        return [None if floor is None else floor - MARGIN for floor in self._floors]

    @property
    def sweep_in(self) -> float:
        """How many seconds until a look has to come that the last one was not."""
        return math.inf if self._swept else self.sweeps.due_in

    @property
    def known(self) -> bool:
        """Whether there are any."""
        return any(floor is not None for floor in self._floors)

    def reached(self, turn: int) -> Sequence[datetime | None]:
        """Of each priority, while a turn is being fired."""
        return self._reached[turn * OF_A_TURN : (turn + 1) * OF_A_TURN]

    def note(self, floors: Sequence[datetime | None], *, swept: bool = False) -> None:
        """What the database said."""
        self._swept = swept
        self._floors = list(floors)
        self._reached = list(floors)

    def note_taken(self, turn: int, taken: Iterable[Taken]) -> None:
        """A batch is gone, and it was the first of each priority."""
        for tick in taken:
            level = turn * OF_A_TURN + tick.priority
            reached = self._reached[level]
            if reached is None or tick.due_at > reached:
                self._reached[level] = tick.due_at

    def forget_late(self) -> None:
        """What is late was put behind what is due now, at the time that it had."""
        self._floors[OF_A_TURN:] = NO_FLOORS[OF_A_TURN:]
        self._reached[OF_A_TURN:] = NO_FLOORS[OF_A_TURN:]
