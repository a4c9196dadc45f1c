"""Sweeps: when to look at everything, and when only above the floor below which nothing was left.

While a transaction elsewhere is open for long, rows that are done with can't be removed. They pile up where a scan of
an index begins, and each look has to wade through them. A look with a floor doesn't; but what is committed late may lie
below it, so that now and then somebody has to look from the beginning. As long as that is quick, every look does.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

QUICK_SECONDS = 0.002
RESTS = 20  # times as long as it took, so that sweeps take a twentieth of the time at the most
MOST_REST_SECONDS = 60.0  # what is found by a sweep alone must not wait for ever
DEADLINE_SECONDS = 5.0  # of a sweep: what is due doesn't wait longer for what may not be there


class Sweeps:
    """When the next one is due."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due_at = -float("inf")
        self._before = 0.0  # how long the sweep before has taken

    @property
    def due(self) -> bool:
        """Whether to look from the beginning."""
        return self._clock() >= self._due_at

    @property
    def due_in(self) -> float:
        """How many seconds until then."""
        return max(0.0, self._due_at - self._clock())

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Around a sweep: after two slow ones it is a while until the next. One that failed says nothing.

        One alone says little: a connection had to be made, a statement to be planned, or the machine was busy.
        """
        begun = self._clock()
        yield
        took = self._clock() - begun
        least, self._before = min(took, self._before), took
        self.rest(0.0 if least < QUICK_SECONDS else least)

    def rest(self, took: float) -> None:
        """The next one is due after a while, because this one took so long."""
        self._due_at = self._clock() + min(RESTS * took, MOST_REST_SECONDS)
