"""The messages in a worker's hand, and whose turn it is. Bookkeeping only: no clock, no database, no tasks."""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime

import anyio
import structlog

from token_queue.handlers import QueueHandler
from token_queue.message import RawMessage

log = structlog.get_logger("token_queue.hand")

HAND_SECONDS = 0.25  # of work: more would be held back from other workers, and charged if this one dies
MOST_PAIRS = 500  # leased per look
MOST_FETCHES = 50  # with one token while old versions of its row stay: each is in the way of whoever looks it up
MOST_SERVED = 5000  # pairs whose turn is remembered
SMOOTHING = 0.05


@dataclass(eq=False, slots=True)
class InHand:
    """A message from its fetch until its outcome is written."""

    pair: "Pair"
    message: RawMessage
    handling: anyio.CancelScope | None = None

    @property
    def suspect(self) -> bool:
        """Whether a worker died with it in hand. One such message is in hand at most, so that the guilty is found."""
        return self.message.worker_deaths > 0


@dataclass(eq=False, slots=True)
class Pair:
    """A (queue, workspace) pair that this worker holds the token of."""

    token_id: str
    handler: QueueHandler
    workspace_id: str | None
    valid_until: float = 0.0  # on this process's clock; past it nothing new is started before a renewal
    waiting: deque[InHand] = field(default_factory=deque)
    running: dict[str, InHand] = field(default_factory=dict)
    unwritten: set[str] = field(default_factory=set)  # ended messages whose outcome is not in the database yet
    fetched: bool = False  # at least once
    fetches: int = 0
    worn: bool = False  # to be let go of, and leased anew under another token
    fetching: bool = False
    low: int = 0  # with so many waiting it is time to fetch more
    drained: bool = False  # the last fetch found no more
    fetch_at: float = 0.0  # when to look again for messages beside the running ones
    reached: dict[int, datetime] = field(default_factory=dict)  # by priority: floors above those of the process
    releasing: bool = False
    lost: bool = False

    @property
    def key(self) -> tuple[str, str]:
        """As the database orders pairs."""
        return self.handler.queue_name, self.workspace_id or ""

    @property
    def in_hand(self) -> list[str]:
        """Messages that a fetch must leave out."""
        return [*self.running, *(entry.message.id for entry in self.waiting), *self.unwritten]

    def note_fetched(self, *, limited: bool) -> None:
        """Messages were fetched; the number of fetches may be limited."""
        self.fetches += 1
        self.worn = limited and self.fetches >= MOST_FETCHES

    def wants_messages(self, now: float) -> bool:
        """Whether to fetch: before the last hand is used up, so that handlers and database work at the same time."""
        if self.releasing or self.fetching or self.worn or len(self.waiting) > self.low:
            return False
        return not self.drained or (bool(self.running) and now >= self.fetch_at)


class Pace:
    """How long a message takes, and so how many make a hand."""

    def __init__(self, concurrency: int, most: int) -> None:
        self._concurrency = concurrency
        self._most = most
        self._seconds: float | None = None

    def note(self, seconds: float) -> None:
        """A message took so long."""
        before = seconds if self._seconds is None else self._seconds
        self._seconds = before + SMOOTHING * (seconds - before)

    @property
    def messages(self) -> int:
        """As many as the handlers at once can do in a moment, and at least one for each of them."""
        if self._seconds is None:
            return self._concurrency
        quick = HAND_SECONDS * self._concurrency / max(self._seconds, 1e-9)
        return max(self._concurrency, int(min(self._most, quick)))


class Hand:
    """Pairs in hand, in turn, within the limits of the process and of each queue."""

    def __init__(self, handlers: Iterable[QueueHandler], *, concurrency: int, most: int) -> None:
        self.pairs: dict[str, Pair] = {}
        self.served: dict[tuple[str, str], None] = {}  # pairs with more to do, the one served last at the end
        self.crowded = False  # other pairs may wait for room
        self.stopping = False
        self.suspect = False  # one is in hand
        self._ready: deque[Pair] = deque()
        self._pace = Pace(concurrency, most)
        self._paces = {
            handler.queue_name: Pace(min(handler.options.concurrency, concurrency), most) for handler in handlers
        }
        self._running = dict.fromkeys(self._paces, 0)
        self.waiting = 0  # messages that could be started
        self._low = 0

    @property
    def running(self) -> int:
        """Messages whose handlers run."""
        return sum(self._running.values())

    def room(self) -> int:
        """How many more messages fit into the hand."""
        return 0 if self.stopping else max(0, self._pace.messages - self.waiting - self.running)

    def queue_room(self, queue_name: str) -> int:
        """How many more messages of this queue fit."""
        held = sum(len(pair.waiting) for pair in self._ready if pair.handler.queue_name == queue_name)
        return max(0, self._paces[queue_name].messages - held - self._running[queue_name])

    def add(self, pair: Pair) -> None:
        """A token was leased: it is this pair's turn, and its next one comes after everybody else's."""
        self.pairs[pair.token_id] = pair
        self.served.pop(pair.key, None)

    def put(self, pair: Pair, messages: Iterable[RawMessage], *, first: bool) -> None:
        """Messages were fetched; `first`: they go before those of other pairs."""
        if pair.lost or self.stopping:  # meanwhile
            return
        entries = [InHand(pair, message) for message in messages]
        pair.waiting.extend(entries)
        self.waiting += len(entries)
        self._low = self.waiting // 2
        pair.low = len(entries) // 2
        self.suspect = self.suspect or any(entry.suspect for entry in entries)
        if pair.waiting and pair not in self._ready:
            (self._ready.appendleft if first else self._ready.append)(pair)

    def next(self, now: float) -> InHand | None:
        """The message to start next, each pair in turn; it counts as running from here on."""
        for _ in range(len(self._ready)):
            pair = self._ready[0]
            if self._may_start(pair, now):
                return self._start(pair)
            self._ready.rotate(-1)
        return None

    def _may_start(self, pair: Pair, now: float) -> bool:
        return now < pair.valid_until and self._running[pair.handler.queue_name] < pair.handler.options.concurrency

    def _start(self, pair: Pair) -> InHand:
        entry = pair.waiting.popleft()
        self.waiting -= 1
        pair.running[entry.message.id] = entry
        self._running[pair.handler.queue_name] += 1
        self._ready.popleft()
        if pair.waiting:
            self._ready.append(pair)
        return entry

    def ended(self, entry: InHand, seconds: float, *, to_write: bool) -> None:
        """The handler is through; the message stays in hand until its outcome is written."""
        pair = entry.pair
        del pair.running[entry.message.id]
        if to_write:
            pair.unwritten.add(entry.message.id)
        self._running[pair.handler.queue_name] -= 1
        if entry.suspect:
            self.suspect = False
        self._pace.note(seconds)
        self._paces[pair.handler.queue_name].note(seconds)

    @property
    def half_empty(self) -> bool:
        """Whether it is time to fetch more: true once on the way down."""
        return self.waiting == self._low

    def wanting(self, now: float) -> list[Pair]:
        """The pairs to fetch messages for: new ones, and others as long as there is room that nobody else waits for."""
        if self.stopping:
            return []
        room = self.room() > 0 and not self.crowded
        return [
            pair
            for pair in self.pairs.values()
            if pair.wants_messages(now)
            and (not pair.fetched or (room and self.queue_room(pair.handler.queue_name) > 0))
        ]

    def take_finished(self) -> list[Pair]:
        """Pairs to let go of: all that was fetched has ended, and there is no more, or others wait."""
        finished = [
            pair
            for pair in self.pairs.values()
            if not (pair.waiting or pair.running or pair.fetching or pair.releasing)
            and (pair.drained or pair.worn or self.stopping or (self.crowded and pair.fetched))
        ]
        for pair in finished:
            pair.releasing = True
        return finished

    def released(self, pair: Pair) -> None:
        """The token is gone by our own will."""
        self.pairs.pop(pair.token_id, None)
        if not pair.drained:
            self.served.pop(pair.key, None)
            self.served[pair.key] = None
            while len(self.served) > MOST_SERVED:
                del self.served[next(iter(self.served))]

    def lose(self, pair: Pair) -> None:
        """Another worker has the pair now: what waits is not ours any more, and what runs is ended."""
        if pair.lost:
            return
        log.warning("token_lost", queue=pair.handler.queue_name, workspace_id=pair.workspace_id, token_id=pair.token_id)
        pair.lost = True
        self._drop_waiting(pair)
        if pair in self._ready:
            self._ready.remove(pair)
        self.pairs.pop(pair.token_id, None)
        for entry in pair.running.values():
            if entry.handling is not None:
                entry.handling.cancel()

    def next_fetch(self, now: float, *, patience: float) -> float:
        """When a pair with running handlers may have more messages, as far as this process knows.

        One whose time has come and that was not fetched for has to wait for room: so does its ticker, with patience.
        """
        soonest = min(
            (pair.fetch_at for pair in self.pairs.values() if pair.drained and pair.running), default=math.inf
        )
        return soonest if soonest > now else now + patience

    def stop(self) -> None:
        """Start nothing more; pairs without running handlers can be let go of."""
        self.stopping = True
        for pair in self._ready:
            self._drop_waiting(pair)
        self._ready.clear()

    def _drop_waiting(self, pair: Pair) -> None:
        if any(entry.suspect for entry in pair.waiting):
            self.suspect = False
        self.waiting -= len(pair.waiting)
        pair.waiting.clear()
