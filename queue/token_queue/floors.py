"""Floors of the message queue: where a look begins while what is done with can't be removed.

A level is a priority of a pair. Its floor is a time below which nothing was left when we looked: neither messages that
wait nor those in somebody's hand, for these are unfinished too. A look from the floors on costs one probe per level,
however many finished messages a long transaction elsewhere keeps in the index below them.

Floors are hints of one process. What is sent is never due before it is sent, and what is tried again is due later than
before; so only what was committed long after it was sent lies below a floor, and a level may be new. A sweep finds
both: a look without floors, see `cron_ticks.sweeps`.
"""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from itertools import islice

from cron_ticks.sweeps import Sweeps

# What a sweep may take on the server before it counts as slow. The rest after it is then about as long as the pause
# between two looks, so that nobody notices. A level that is looked at has its price in any case.
QUICK = timedelta(milliseconds=4)
QUICK_PER_LEVEL = timedelta(microseconds=20)
FEW_DEAD = 5000  # rows: they can't be what takes a sweep so long
SLACK = timedelta(milliseconds=500)  # between sending and commit, as usual: a floor lies so far behind the clock
MOST_EMPTY_LEVELS = 1000  # that are remembered beside those with messages
MOST_PAIRS = MOST_EMPTY_LEVELS // 4  # that had something to do lately, and may soon have again
PRIORITIES = 4

Level = tuple[str, str, int]  # queue, workspace ('' for the system-wide), priority
PairFloors = tuple[datetime | None, ...]  # by priority
NO_FLOORS: PairFloors = (None,) * PRIORITIES


class Floors:
    """What this process knows of levels, and whether the next look is a sweep.

    As long as sweeps are quick every look is one and nothing is kept. The server says how long it looked: neither the
    way to it nor what a look does with what it found counts. One among few dead rows is slow for another reason, and a
    single one may be due to a busy machine. So after it comes another that also names the levels, and if that is slow
    too, looks begin at the floors for a while.
    """

    def __init__(self, sweeps: Sweeps | None = None) -> None:
        self._sweeps = Sweeps() if sweeps is None else sweeps
        self._suspected = False
        self._levels: dict[Level, datetime] | None = None
        self._pairs: dict[tuple[str, str], None] = {}  # the one that was busy last at the end
        self._swept_until = self._looked_until = datetime.min.replace(tzinfo=UTC)

    @property
    def sweeping(self) -> bool:
        """Whether the next look is a sweep."""
        return self._levels is None or self._sweeps.due

    @property
    def in_use(self) -> bool:
        """Whether looks begin at floors at present."""
        return self._levels is not None

    @property
    def naming(self) -> bool:
        """Whether the next look should name levels."""
        return self._suspected

    @property
    def levels(self) -> Mapping[Level, datetime]:
        """What a look that isn't a sweep begins with."""
        return self._levels or {}

    @property
    def sweep_in(self) -> float:
        """Seconds until the next sweep is due."""
        return 0.0 if self._levels is None else self._sweeps.due_in

    def of_pair(self, queue_name: str, workspace: str) -> PairFloors:
        """Where a fetch begins; a level that nobody has seen was empty at the last sweep."""
        if self._levels is None:
            return NO_FLOORS
        levels = self._levels
        return tuple(levels.get((queue_name, workspace, priority), self._swept_until) for priority in range(PRIORITIES))

    def capped(self, reached: datetime) -> datetime:
        """A floor at what was fetched last, but not so high that a sender that commits just now is passed by."""
        return min(reached, self._looked_until)

    def expect(self, pairs: Iterable[tuple[str, str]]) -> None:
        """These pairs have messages, or had some: they are looked at too, if they are empty at the next sweep."""
        for pair in pairs:
            self._pairs.pop(pair, None)
            self._pairs[pair] = None
            self._look_at(pair)
        while len(self._pairs) > MOST_PAIRS:
            del self._pairs[next(iter(self._pairs))]

    def _look_at(self, pair: tuple[str, str]) -> None:
        if self._levels is not None:
            for priority in range(PRIORITIES):
                self._levels.setdefault((*pair, priority), self._swept_until)

    def note_swept(
        self, earliest: Mapping[Level, datetime], instant: datetime, *, took: timedelta, count: int, dead: int
    ) -> bool:
        """A sweep found so many levels, among so many dead rows; whether floors begin anew."""
        slow = took > QUICK + count * QUICK_PER_LEVEL and dead >= FEW_DEAD
        named, self._suspected = self._suspected, slow
        if not slow:
            self._levels = None
        elif named:
            self._swept_until = instant - SLACK
            self._note(earliest, instant)
            for pair in self._pairs:
                self._look_at(pair)
            self._sweeps.rest(took.total_seconds())
        return slow and named

    def note_looked(self, earliest: Mapping[Level, datetime], instant: datetime) -> None:
        """A look from the floors on found these levels, and no message in the others."""
        self._note(earliest, instant)

    def note_failed(self, seconds: float) -> None:
        """A sweep failed after so long: if it was for that reason, the next one is better off later."""
        self._sweeps.rest(seconds)

    def _note(self, earliest: Mapping[Level, datetime], instant: datetime) -> None:
        self._looked_until = instant - SLACK
        found = {level: min(moment, self._looked_until) for level, moment in earliest.items()}
        others = (level for level in self._levels or () if level not in found)
        self._levels = found | dict.fromkeys(islice(others, MOST_EMPTY_LEVELS), self._looked_until)
