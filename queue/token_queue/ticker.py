"""The message ticker: takes due messages into hand, every 100 ms or when it is woken up."""

import math
import random
import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta

import anyio
import structlog

from cron_ticks.loops import Pause
from cron_ticks.rows import FiredTicks, count_of
from cron_ticks.settings import Settings
from token_queue.floors import Floors, PairFloors
from token_queue.hand import MOST_PAIRS, Hand, Pair
from token_queue.handlers import Handlers
from token_queue.lanes import Lanes
from token_queue.outcomes import OutcomeWriter
from token_queue.queue_repository import Fetched, Look, QueueRepository, Wanted

log = structlog.get_logger("token_queue.ticker")

SPREAD = (0.8, 1.2)  # of a pause, so that the tickers of many pods don't look in step
BEAT_SECONDS = 5.0  # a worker without room says at least so often that it is there
BUSY_SECONDS = 1.0  # of finding work at every look: then it looks often, and senders need not wake it up
QUIET_SECONDS = 0.5  # without finding any: then they have to


class Wakefulness:
    """Whether senders have to wake this worker up, and how long it may sleep when they do.

    A sender that saw the worker awake may still be about to commit. So it sleeps no longer at a time than it has been
    asleep, and only by and by as long as it may.
    """

    def __init__(self) -> None:
        self._streak_began = self._found_at = -QUIET_SECONDS
        self._asleep_since: float | None = None

    def note_found(self, now: float) -> None:
        """A look found work."""
        if now - self._found_at >= QUIET_SECONDS:
            self._streak_began = now
        self._found_at = now

    def asleep(self, now: float, *, hears: bool) -> bool:
        """What to tell senders with the next look."""
        busy = now - self._found_at < QUIET_SECONDS and self._found_at - self._streak_began >= BUSY_SECONDS
        return hears and not busy

    def note_told(self, now: float, *, asleep: bool) -> None:
        """Senders know."""
        if not asleep:
            self._asleep_since = None
        elif self._asleep_since is None:
            self._asleep_since = now

    def longest_sleep(self, now: float, *, shortest: float, longest: float) -> float:
        """How long to sleep if nothing is known to become due."""
        if self._asleep_since is None:
            return shortest
        return min(max(now - self._asleep_since, shortest), longest)


class MessageTicker:
    """Keeps the hand full. Ticks are fired beside it, and handlers run in lanes, so none of them delays another."""

    name = "message-ticker"

    def __init__(
        self,
        queue: QueueRepository,
        handlers: Handlers,
        settings: Settings,
        *,
        hand: Hand,
        lanes: Lanes,
        writer: OutcomeWriter,
        pause: Pause,
        hears: Callable[[], bool] = lambda: False,
        floors: Floors | None = None,
    ) -> None:
        self._queue = queue
        self._handlers = handlers.all()
        self._by_queue = {handler.queue_name: handler for handler in self._handlers}
        self._settings = settings
        self._hand = hand
        self._lanes = lanes
        self._writer = writer
        self._pause = pause
        self._hears = hears
        self._lease_length = timedelta(seconds=settings.lease_seconds)
        self._interval = settings.ticker_interval_ms / 1000
        self._wakefulness = Wakefulness()
        self._beat_at = 0.0
        self._fired_pairs: set[tuple[str, str | None]] = set()  # whose holders may not know of it
        self._woken: set[str] = set()  # queues whose workers were woken up by the firing under way
        self._look_at = 0.0  # when something known becomes due
        self._floors = Floors() if floors is None else floors

    async def run_once(self) -> float:
        """Take as many messages as there is room for."""
        if self._handlers and not self._pause.stopping:
            fired, self._fired_pairs = self._fired_pairs, set()
            await self._take_messages()
            await self._wake_holders(fired)
        return self._seconds_to_sleep()

    def notice(self, queue_name: str) -> None:
        """A message was sent to this queue."""
        if queue_name in self._by_queue:
            self._fetch_again({queue_name})
            self._pause.wake()

    def _fetch_again(self, queues: Collection[str]) -> None:
        for pair in self._hand.pairs.values():
            if pair.handler.queue_name in queues:
                pair.fetch_at = 0.0

    async def note_fired(self, fired: Sequence[FiredTicks], *, more: bool) -> None:
        """This process has fired ticks.

        Those who sleep don't know of messages that it can't handle, or not all at once. Their queues need not be woken
        up at each batch; but when the last is out, those woken by the first may have found nothing more.
        """
        pairs = {(ticks.queue_name, ticks.workspace_id) for ticks in fired}
        queues = {queue_name for queue_name, _ in pairs}
        self._fired_pairs |= {pair for pair in pairs if pair[0] in self._by_queue}
        self._floors.expect((queue_name, workspace or "") for queue_name, workspace in self._fired_pairs)
        self._fetch_again(queues)
        self._pause.wake()
        news = queues - self._woken
        again = set() if more else self._woken
        if count_of(fired) <= self._settings.message_concurrency and queues <= self._by_queue.keys():
            news = set()
        self._woken = self._woken | news if more else set()
        if news | again:
            await self._queue.wake_workers(sorted(news | again))

    async def _wake_holders(self, fired: Collection[tuple[str, str | None]]) -> None:
        """Of the pairs that we fired for and could not lease: whoever holds one may think that nothing is left."""
        held = {(pair.handler.queue_name, pair.workspace_id) for pair in self._hand.pairs.values()}
        queues = {queue_name for queue_name, _ in set(fired) - held}
        if queues:
            await self._queue.wake_workers(sorted(queues))

    async def _take_messages(self) -> None:
        now = time.monotonic()
        most = min(self._hand.room(), MOST_PAIRS)
        if most > 0 or now >= self._beat_at:
            await self._lease(now, most)
        else:
            self._look_at = self._beat_at
            self._hand.crowded = True  # for all we know
        await self._fetch()
        self._lanes.dispatch()

    async def _lease(self, now: float, most: int) -> None:
        asleep = self._wakefulness.asleep(now, hears=self._hears())
        look = await self._look(most, asleep=asleep)
        self._beat_at = now + BEAT_SECONDS
        self._wakefulness.note_told(now, asleep=asleep)
        if look.leased:
            self._wakefulness.note_found(now)
        self._hand.crowded = len(look.leased) == most
        self._look_at = now + self._known_seconds(look)
        if look.expired:
            log.warning("tokens_expired", tokens=look.expired, messages_charged=look.charged)
        self._floors.expect((token.queue_name, token.workspace_id or "") for token in look.leased)
        for token in look.leased:
            handler = self._by_queue[token.queue_name]
            valid_until = now + self._settings.lease_seconds
            self._hand.add(Pair(token.id, handler, token.workspace_id, valid_until=valid_until))

    async def _look(self, most: int, *, asleep: bool) -> Look:
        sweeping = self._floors.sweeping
        begun = time.monotonic()
        try:
            look = await self._queue.look(
                self._handlers,
                [self._hand.queue_room(handler.queue_name) for handler in self._handlers],
                most=most,
                lease=self._lease_length,
                asleep=asleep,
                served=list(self._hand.served),
                suspect=self._hand.suspect,
                in_hand={pair.token_id: pair.key for pair in self._hand.pairs.values()},
                naming=self._floors.naming,
                floors=None if sweeping else self._floors.levels,
            )
        except Exception:
            if sweeping:
                self._floors.note_failed(time.monotonic() - begun)
            raise
        self._note_levels(look)
        return look

    def _note_levels(self, look: Look) -> None:
        if not look.swept:
            self._floors.note_looked(look.earliest, look.instant)
        elif self._floors.note_swept(look.earliest, look.instant, took=look.took, count=look.count, dead=look.dead):
            for pair in self._hand.pairs.values():
                pair.reached.clear()

    def _floors_of(self, pair: Pair) -> PairFloors:
        """A handler that takes long keeps its message's level low, but the holder knows what else it has fetched."""
        floors = self._floors.of_pair(*pair.key)
        return tuple(
            floor if floor is None else max(floor, pair.reached.get(priority, floor))
            for priority, floor in enumerate(floors)
        )

    def _known_seconds(self, look: Look) -> float:
        """Until something is due that this look knows of; at once after an expiry, because its pair is free now."""
        if look.expired:
            return 0.0
        known = [span.total_seconds() for span in (look.due_in, look.expiry_in) if span is not None]
        if not look.swept:  # a notice may have been of what only a sweep finds
            known.append(self._floors.sweep_in)
        return max(0.0, min(known, default=math.inf))

    async def _fetch(self) -> None:
        now = time.monotonic()
        pairs = self._hand.wanting(now)
        if not pairs:
            return
        share = max(1, self._hand.room() // len(pairs))
        fetched = await self._fetched(pairs, share)
        for pair in pairs:
            if pair.token_id not in fetched:
                self._hand.lose(pair)
                continue
            taken = fetched[pair.token_id]
            if taken.messages:
                self._wakefulness.note_found(now)
            self._hand.put(pair, taken.messages, first=not pair.fetched)
            pair.fetched = True
            pair.note_fetched(limited=self._floors.in_use)
            pair.reached |= {priority: self._floors.capped(moment) for priority, moment in taken.reached.items()}
            # What is left behind for now, as suspects are, is for others if we have nothing else of the pair.
            pair.drained = taken.drained or not (taken.messages or pair.in_hand)
            pair.fetch_at = min(pair.fetch_at, now + self._next_fetch_in(taken))
        self._writer.wake()

    async def _fetched(self, pairs: Sequence[Pair], share: int) -> dict[str, Fetched]:
        wanted = [self._wanted(pair, share) for pair in pairs]
        for pair in pairs:
            pair.fetching = True
            pair.fetch_at = math.inf  # unless a notice comes meanwhile
        try:
            return await self._queue.fetch(wanted, suspects=not self._hand.suspect)
        except BaseException:
            for pair in pairs:
                pair.fetch_at = 0.0
            raise
        finally:
            for pair in pairs:
                pair.fetching = False

    def _next_fetch_in(self, taken: Fetched) -> float:
        """A message that is due later is known; one that is sent comes with a NOTIFY, if we hear them."""
        longest = self._settings.ticker_idle_seconds if self._hears() else self._interval
        return longest if taken.due_in is None else min(longest, taken.due_in.total_seconds())

    def _wanted(self, pair: Pair, share: int) -> Wanted:
        most = max(1, min(share, self._hand.queue_room(pair.handler.queue_name)))
        options = pair.handler.options
        in_order = options.concurrency == options.tokens_per_pair == 1
        shared = options.tokens_per_pair > 1
        return Wanted(pair.token_id, most, pair.in_hand, shared=shared, in_order=in_order, floors=self._floors_of(pair))

    def _seconds_to_sleep(self) -> float:
        """Until something is due that is known, or as long as a sleeper may; NOTIFY ends it."""
        now = time.monotonic()
        if not self._handlers:
            return math.inf
        longest = self._settings.ticker_idle_seconds
        sleep = self._wakefulness.longest_sleep(now, shortest=self._interval, longest=longest)
        moments = (self._look_at, self._hand.next_fetch(now, patience=self._interval))
        return max(0.0, min(sleep * random.uniform(*SPREAD), min(moments) - now))  # noqa: S311 - no secret


class TokenRenewal:
    """Renews the tokens in hand."""

    name = "token-renewal"

    def __init__(self, hand: Hand, lanes: Lanes, queue: QueueRepository, settings: Settings) -> None:
        self._hand = hand
        self._lanes = lanes
        self._queue = queue
        self._settings = settings

    async def run_once(self) -> float:
        """Renew once."""
        pairs = [pair for pair in self._hand.pairs.values() if not pair.releasing]
        if pairs:
            now = time.monotonic()
            with anyio.fail_after(self._settings.lease_renewal_seconds):
                renewed = await self._queue.renew(
                    [pair.token_id for pair in pairs], lease=timedelta(seconds=self._settings.lease_seconds)
                )
            for pair in pairs:
                if pair.token_id in renewed:
                    pair.valid_until = now + self._settings.lease_seconds
                elif not pair.releasing and pair.token_id in self._hand.pairs:
                    self._hand.lose(pair)
            self._lanes.dispatch()
        return self._settings.lease_renewal_seconds
