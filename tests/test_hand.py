"""The hand: whose turn it is, how many at once, and when a pair is let go of."""

import math
from dataclasses import replace
from itertools import count
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from cron_ticks.settings import Settings
from token_queue import Message
from token_queue.hand import HAND_SECONDS, MOST_SERVED, Hand, InHand, Pace, Pair
from token_queue.handlers import QueueHandler, QueueOptions
from token_queue.message import RawMessage

NOW = 100.0
numbers = count(1)


async def handle(_: Message) -> None: ...


def handler(queue_name: str = "queue", concurrency: int = 10) -> QueueHandler:
    options = replace(QueueOptions.from_settings(Settings()), concurrency=concurrency)
    return QueueHandler(queue_name, options, handle, None)


def make_hand(*handlers: QueueHandler, concurrency: int = 10, most: int = 1000) -> Hand:
    return Hand(handlers, concurrency=concurrency, most=most)


def held(hand: Hand, of: QueueHandler, workspace_id: str | None = None, **changes: Any) -> Pair:
    """A pair that was leased just now."""
    pair = Pair(f"token_{next(numbers)}", of, workspace_id, **{"valid_until": math.inf} | changes)
    hand.add(pair)
    return pair


def put(hand: Hand, pair: Pair, *ids: str, deaths: int = 0, first: bool = False) -> None:
    messages = [
        RawMessage(message_id, pair.handler.queue_name, pair.workspace_id, "null", "{}", 1, deaths)
        for message_id in ids
    ]
    hand.put(pair, messages, first=first)


def started(hand: Hand, now: float = NOW) -> list[str]:
    """All that can be started, in this order."""
    found: list[str] = []
    while (entry := hand.next(now)) is not None:
        found.append(entry.message.id)
    return found


def start(hand: Hand, now: float = NOW) -> InHand:
    entry = hand.next(now)
    assert entry is not None
    return entry


def end(hand: Hand, *entries: InHand, seconds: float = 1.0, to_write: bool = False) -> None:
    for entry in entries:
        hand.ended(entry, seconds, to_write=to_write)


def names(letter: str, number: int) -> list[str]:
    return [f"{letter}{n}" for n in range(1, number + 1)]


# --- Turns


def test_pairs_take_turns() -> None:
    queue = handler()
    hand = make_hand(queue)
    a, b, c = (held(hand, queue, workspace) for workspace in ("a", "b", None))
    put(hand, a, *names("a", 3))
    put(hand, b, *names("b", 1))
    put(hand, c, *names("c", 2))
    assert started(hand) == ["a1", "b1", "c1", "a2", "c2", "a3"]


def test_a_pair_is_in_its_turn_once_however_often_it_gets_messages() -> None:
    queue = handler()
    hand = make_hand(queue)
    a, b = held(hand, queue, "a"), held(hand, queue, "b")
    put(hand, a, "a1", "a2")
    put(hand, a, "a3")
    put(hand, b, "b1", "b2")
    assert started(hand) == ["a1", "b1", "a2", "b2", "a3"]


def test_a_pair_with_its_first_messages_goes_before_the_others() -> None:
    queue = handler()
    hand = make_hand(queue)
    a, b = held(hand, queue, "a"), held(hand, queue, "b")
    put(hand, a, "a1", "a2", first=False)
    put(hand, b, "b1", "b2", first=True)
    assert started(hand) == ["b1", "a1", "b2", "a2"]


def test_no_messages_are_no_turn() -> None:
    queue = handler()
    hand = make_hand(queue)
    put(hand, held(hand, queue))
    assert hand.next(NOW) is None
    assert (hand.waiting, hand.running) == (0, 0)


def test_a_message_that_starts_is_running_until_it_ends_and_in_hand_until_it_is_written() -> None:
    queue = handler()
    hand = make_hand(queue)
    pair = held(hand, queue)
    put(hand, pair, "m1", "m2", "m3")
    first, second = start(hand), start(hand)
    assert (hand.waiting, hand.running) == (1, 2)
    assert sorted(pair.in_hand) == ["m1", "m2", "m3"]
    end(hand, first, to_write=True)
    end(hand, second, to_write=False)
    assert (hand.waiting, hand.running) == (1, 0)
    assert (pair.running, pair.unwritten) == ({}, {"m1"})
    assert sorted(pair.in_hand) == ["m1", "m3"]


# --- Limits


def test_a_queue_runs_no_more_than_its_own_at_once() -> None:
    slow, quick = handler("slow", concurrency=2), handler("quick")
    hand = make_hand(slow, quick)
    put(hand, held(hand, slow, "a"), *names("a", 2))
    put(hand, held(hand, slow, "b"), *names("b", 2))
    put(hand, held(hand, quick), *names("q", 3))
    first = start(hand)
    assert first.message.id == "a1"
    assert started(hand) == ["b1", "q1", "q2", "q3"]
    assert (hand.waiting, hand.running) == (2, 5)
    end(hand, first)
    assert started(hand) == ["a2"]


def test_a_pair_without_a_valid_token_starts_nothing() -> None:
    queue = handler()
    hand = make_hand(queue)
    late, good = held(hand, queue, "late", valid_until=NOW), held(hand, queue, "good", valid_until=NOW + 1)
    put(hand, late, "l1", "l2")
    put(hand, good, "g1", "g2")
    assert started(hand, NOW) == ["g1", "g2"]
    assert hand.waiting == 2
    late.valid_until = NOW + 10
    assert started(hand, NOW + 9) == ["l1", "l2"]


def test_a_pair_is_leased_for_no_time_until_somebody_says_so() -> None:
    queue = handler()
    hand = make_hand(queue)
    pair = Pair("token", queue, None)
    hand.add(pair)
    put(hand, pair, "m1")
    assert hand.next(0.0) is None


# --- Suspects: messages with which a worker died


def test_a_suspect_is_in_hand_from_its_fetch_to_its_end() -> None:
    queue, other = handler(), handler("other")
    hand = make_hand(queue, other)
    innocent, guilty = held(hand, queue), held(hand, other)
    flags = [hand.suspect]
    put(hand, innocent, "i1")
    flags.append(hand.suspect)
    put(hand, guilty, "g1", deaths=1)
    flags.append(hand.suspect)
    put(hand, innocent, "i2")
    flags.append(hand.suspect)
    entries = [start(hand) for _ in range(3)]
    assert [(entry.message.id, entry.suspect) for entry in entries] == [("i1", False), ("g1", True), ("i2", False)]
    for entry in (entries[0], entries[2], entries[1]):
        flags.append(hand.suspect)
        end(hand, entry)
    flags.append(hand.suspect)
    assert flags == [False, False, True, True, True, True, True, False]


def test_a_suspect_that_waits_goes_with_its_lost_pair() -> None:
    queue = handler()
    hand = make_hand(queue)
    innocent, guilty = held(hand, queue, "a"), held(hand, queue, "b")
    put(hand, innocent, "i1")
    put(hand, guilty, "g1", deaths=3)
    hand.lose(innocent)
    assert hand.suspect
    hand.lose(guilty)
    assert not hand.suspect


def test_a_suspect_that_runs_stays_in_hand_after_its_pair_is_lost() -> None:
    queue = handler()
    hand = make_hand(queue)
    guilty = held(hand, queue)
    put(hand, guilty, "g1", deaths=1)
    entry = start(hand)
    hand.lose(guilty)
    assert hand.suspect
    end(hand, entry)
    assert not hand.suspect


@pytest.mark.parametrize("runs", [False, True])
def test_a_stop_lets_go_of_a_suspect_unless_it_runs(*, runs: bool) -> None:
    queue = handler()
    hand = make_hand(queue)
    put(hand, held(hand, queue), "g1", deaths=1)
    if runs:
        start(hand)
    hand.stop()
    assert hand.suspect == runs


# --- Room


def test_at_first_there_is_room_for_each_handler_at_once() -> None:
    queue, narrow, wide = handler(), handler("narrow", concurrency=2), handler("wide", concurrency=50)
    hand = make_hand(queue, narrow, wide, concurrency=10)
    assert hand.room() == 10
    assert [hand.queue_room(name) for name in ("queue", "narrow", "wide")] == [10, 2, 10]


def test_what_waits_and_what_runs_takes_room() -> None:
    queue, other = handler(concurrency=4), handler("other")
    hand = make_hand(queue, other, concurrency=10)
    put(hand, held(hand, queue, "a"), *names("a", 2))
    put(hand, held(hand, queue, "b"), *names("b", 1))
    put(hand, held(hand, other), *names("o", 2))
    for _ in range(6):
        assert (hand.room(), hand.queue_room("queue"), hand.queue_room("other")) == (5, 1, 8)
        hand.next(NOW)


def test_too_many_messages_leave_no_room_and_not_less() -> None:
    queue = handler(concurrency=1)
    hand = make_hand(queue, concurrency=2)
    put(hand, held(hand, queue), *names("m", 5))
    assert (hand.room(), hand.queue_room("queue")) == (0, 0)


def test_what_has_ended_makes_room() -> None:
    queue = handler()
    hand = make_hand(queue, concurrency=2)
    put(hand, held(hand, queue), "m1", "m2")
    entry = start(hand)
    assert hand.room() == 0
    end(hand, entry, to_write=True)
    assert hand.room() == 1


def test_a_process_that_stops_has_no_room() -> None:
    hand = make_hand(handler())
    hand.stop()
    assert hand.room() == 0


def test_quick_messages_make_a_large_hand_of_their_queue_and_the_process() -> None:
    quick, slow = handler("quick", concurrency=2), handler("slow", concurrency=3)
    hand = make_hand(quick, slow, concurrency=5, most=1000)
    put(hand, held(hand, quick), "m1")
    end(hand, start(hand), seconds=HAND_SECONDS / 20)
    assert hand.queue_room("quick") == 2 * 20
    assert hand.queue_room("slow") == 3
    assert hand.room() == 5 * 20


def test_a_pace_that_nobody_knows_is_one_message_for_each_handler() -> None:
    assert Pace(7, 1000).messages == 7


@pytest.mark.parametrize(
    ("seconds", "messages"),
    [
        (HAND_SECONDS, 4),
        (HAND_SECONDS / 2, 8),
        (HAND_SECONDS / 10, 40),
        (HAND_SECONDS / 10_000, 1000),
        (0.0, 1000),
        (HAND_SECONDS * 1.5, 4),
        (3600.0, 4),
    ],
)
def test_a_hand_is_a_quarter_of_a_second_of_work(seconds: float, messages: int) -> None:
    pace = Pace(4, 1000)
    for _ in range(3):
        pace.note(seconds)
        assert pace.messages == messages


def test_a_pace_follows_slowly_and_one_slow_message_is_not_a_new_one() -> None:
    pace = Pace(1, 10_000)
    pace.note(0.001)
    assert pace.messages == 250
    pace.note(0.021)  # a twentieth of the difference: 0.002 s
    assert pace.messages == 125
    for _ in range(500):
        pace.note(0.001)
    assert pace.messages in (249, 250)
    for _ in range(500):
        pace.note(10.0)
    assert pace.messages == 1


# --- Which pairs to fetch for


def test_a_new_pair_wants_messages() -> None:
    hand = make_hand(handler())
    pair = held(hand, handler())
    assert hand.wanting(NOW) == [pair]


@pytest.mark.parametrize(
    ("state", "wants"),
    [
        ({}, True),
        ({"fetching": True}, False),
        ({"releasing": True}, False),
        ({"drained": True}, False),
        ({"drained": True, "fetch_at": NOW - 1}, False),
    ],
)
def test_a_pair_without_messages_wants_some_unless_there_are_none(state: dict[str, Any], *, wants: bool) -> None:
    queue = handler()
    hand = make_hand(queue)
    pair = held(hand, queue, **state)
    assert hand.wanting(NOW) == [pair] * wants


@pytest.mark.parametrize(
    ("fetch_at", "wants"), [(NOW - 1, True), (NOW, True), (NOW + 0.1, False)], ids=["past", "now", "later"]
)
def test_a_drained_pair_with_running_messages_looks_again_after_a_while(fetch_at: float, *, wants: bool) -> None:
    queue = handler()
    hand = make_hand(queue)
    pair = held(hand, queue, drained=True, fetch_at=fetch_at)
    put(hand, pair, "m1")
    assert hand.wanting(NOW) == []
    start(hand)
    assert hand.wanting(NOW) == [pair] * wants


def test_more_is_wanted_when_half_of_the_last_hand_is_left() -> None:
    queue = handler()
    hand = make_hand(queue)
    pair = held(hand, queue)
    put(hand, pair, *names("m", 5))
    assert pair.low == 2
    wanted = []
    for _ in range(5):
        wanted.append(bool(hand.wanting(NOW)))
        start(hand)
    assert wanted == [False, False, False, True, True]
    put(hand, pair, *names("n", 2))
    assert pair.low == 1
    put(hand, pair, *names("o", 6))
    assert pair.low == 3


def test_the_hand_is_half_empty_once_on_its_way_down() -> None:
    queue = handler()
    hand = make_hand(queue)
    put(hand, held(hand, queue, "a"), *names("a", 3))
    put(hand, held(hand, queue, "b"), *names("b", 2))
    seen = [hand.half_empty]
    while hand.waiting:
        start(hand)
        seen.append(hand.half_empty)
    assert seen == [False, False, False, True, False, False]


def test_only_new_pairs_are_fetched_for_while_others_wait_for_room() -> None:
    """Or a pair with slow handlers would take every place that becomes free."""
    of = handler(concurrency=2)
    hand = make_hand(of, concurrency=2)
    old = held(hand, of, "old", fetched=True)
    put(hand, old, "m1")
    started(hand)
    assert hand.wanting(NOW) == [old]
    new = held(hand, of, "new")
    hand.crowded = True
    assert hand.wanting(NOW) == [new]


def test_a_full_hand_is_not_filled_further() -> None:
    of = handler(concurrency=1)
    hand = make_hand(of, concurrency=1)
    pair = held(hand, of, fetched=True)
    put(hand, pair, "m1")
    [entry] = [start(hand)]
    assert hand.wanting(NOW) == []
    end(hand, entry)
    assert hand.wanting(NOW) == [pair]


def test_a_process_that_stops_wants_nothing() -> None:
    queue = handler()
    hand = make_hand(queue)
    held(hand, queue)
    hand.stop()
    assert hand.wanting(NOW) == []


# --- Letting go


@pytest.mark.parametrize(
    ("state", "crowded", "stopping", "finished"),
    [
        ({}, False, False, False),
        ({"drained": True}, False, False, True),
        ({"drained": True, "fetched": True}, False, False, True),
        ({"fetched": True}, False, False, False),
        ({"fetched": True}, True, False, True),
        ({"fetched": False}, True, False, False),
        ({}, False, True, True),
        ({"drained": True, "fetching": True}, False, False, False),
        ({"fetched": True, "fetching": True}, True, False, False),
        ({"fetching": True}, False, True, False),
        ({"drained": True, "releasing": True}, True, True, False),
        ({"drained": True, "unwritten": {"m1"}}, False, False, True),
    ],
)
def test_a_pair_is_let_go_of(state: dict[str, Any], *, crowded: bool, stopping: bool, finished: bool) -> None:
    """Drained, or served once while others wait, or at the end; never while a fetch is under way, and once."""
    queue = handler()
    hand = make_hand(queue)
    pair = held(hand, queue, **state)
    hand.crowded = crowded
    if stopping:
        hand.stop()
    assert hand.take_finished() == [pair] * finished
    assert pair.releasing == (finished or state.get("releasing", False))
    assert hand.take_finished() == []
    assert hand.pairs == {pair.token_id: pair}


@pytest.mark.parametrize("stopping", [False, True])
def test_a_pair_with_messages_in_hand_is_kept(*, stopping: bool) -> None:
    queue = handler()
    hand = make_hand(queue)
    pair = held(hand, queue, drained=True, fetched=True)
    hand.crowded = True
    put(hand, pair, "m1", "m2")
    assert hand.take_finished() == []
    entry = start(hand)
    assert hand.take_finished() == []
    end(hand, start(hand))
    if stopping:
        hand.stop()
    assert hand.take_finished() == []
    end(hand, entry)
    assert hand.take_finished() == [pair]


def test_a_pair_that_is_let_go_of_wants_nothing() -> None:
    queue = handler()
    hand = make_hand(queue)
    pair = held(hand, queue, fetched=True)
    hand.crowded = True
    assert hand.take_finished() == [pair]
    assert hand.wanting(NOW) == []
    hand.released(pair)
    assert hand.pairs == {}


def test_pairs_with_more_to_do_are_remembered_in_the_order_of_their_turns() -> None:
    queue, other = handler(), handler("other")
    hand = make_hand(queue, other)
    a, b, c = held(hand, queue, "a"), held(hand, other), held(hand, queue, "c", drained=True)
    for pair in (b, a, c):
        hand.released(pair)
    assert list(hand.served) == [("other", ""), ("queue", "a")]
    again = held(hand, other)
    assert list(hand.served) == [("queue", "a")]
    hand.released(again)
    assert list(hand.served) == [("queue", "a"), ("other", "")]
    again = held(hand, queue, "a", drained=True)
    hand.released(again)
    assert list(hand.served) == [("other", "")]


def test_of_very_many_pairs_the_latest_are_remembered() -> None:
    queue = handler()
    hand = make_hand(queue)
    for n in range(MOST_SERVED + 5):
        hand.released(held(hand, queue, f"{n}"))
    assert list(hand.served) == [("queue", f"{n}") for n in range(5, MOST_SERVED + 5)]


def test_a_second_token_of_a_pair_moves_its_turn_to_the_end() -> None:
    queue = handler()
    hand = make_hand(queue)
    first, second, other = held(hand, queue, "a"), held(hand, queue, "a"), held(hand, queue, "b")
    for pair in (first, other, second):
        hand.released(pair)
    assert list(hand.served) == [("queue", "b"), ("queue", "a")]


# --- Losing


async def test_a_lost_pair_starts_nothing_and_what_runs_is_cancelled() -> None:
    queue = handler()
    hand = make_hand(queue)
    lost, kept = held(hand, queue, "lost"), held(hand, queue, "kept")
    put(hand, lost, "l1", "l2", "l3")
    put(hand, kept, "k1", "k2")
    running = [start(hand) for _ in range(3)]
    for entry in running[:2]:
        entry.handling = anyio.CancelScope()
    with capture_logs() as logs:
        hand.lose(lost)
    assert [(entry["event"], entry["queue"], entry["workspace_id"], entry["token_id"]) for entry in logs] == [
        ("token_lost", "queue", "lost", lost.token_id)
    ]
    assert [entry.message.id for entry in running] == ["l1", "k1", "l2"]
    assert running[0].handling is not None
    assert running[0].handling.cancel_called
    assert running[1].handling is not None
    assert not running[1].handling.cancel_called
    assert lost.lost
    assert not kept.lost
    assert hand.pairs == {kept.token_id: kept}
    assert (hand.waiting, hand.running) == (1, 3)
    assert started(hand) == ["k2"]


async def test_a_pair_is_lost_once() -> None:
    queue = handler()
    hand = make_hand(queue)
    pair = held(hand, queue)
    put(hand, pair, "m1")
    entry = start(hand)
    hand.lose(pair)
    entry.handling = anyio.CancelScope()
    with capture_logs() as logs:
        hand.lose(pair)
    assert logs == []
    assert not entry.handling.cancel_called


def test_the_messages_of_a_lost_pair_end_and_make_room() -> None:
    queue = handler(concurrency=1)
    hand = make_hand(queue)
    lost, kept = held(hand, queue, "lost"), held(hand, queue, "kept")
    put(hand, lost, "l1")
    put(hand, kept, "k1")
    entry = start(hand)
    hand.lose(lost)
    assert hand.next(NOW) is None
    end(hand, entry)
    assert started(hand) == ["k1"]


def test_a_lost_pair_is_neither_fetched_for_nor_let_go_of() -> None:
    queue = handler()
    hand = make_hand(queue)
    hand.lose(held(hand, queue, fetched=True))
    hand.crowded = True
    assert hand.wanting(NOW) == []
    assert hand.take_finished() == []
    assert hand.served == {}


def test_messages_that_come_for_a_lost_pair_are_not_started() -> None:
    queue = handler()
    hand = make_hand(queue)
    pair = held(hand, queue)
    hand.lose(pair)
    put(hand, pair, "m1", deaths=1)
    assert hand.next(NOW) is None
    assert hand.waiting == 0
    assert not hand.suspect


# --- Stopping


def test_a_stop_starts_nothing_more_and_leaves_what_runs() -> None:
    queue = handler()
    hand = make_hand(queue)
    busy, idle = held(hand, queue, "busy"), held(hand, queue, "idle", valid_until=NOW)
    put(hand, busy, "b1", "b2")
    put(hand, idle, "i1")
    entry = start(hand)
    hand.stop()
    assert hand.stopping
    assert hand.next(NOW) is None
    assert (hand.waiting, hand.running) == (0, 1)
    assert (busy.in_hand, idle.in_hand) == (["b1"], [])
    assert hand.take_finished() == [idle]
    end(hand, entry, to_write=True)
    assert hand.take_finished() == [busy]


def test_messages_that_come_after_the_stop_are_not_started() -> None:
    queue = handler()
    hand = make_hand(queue)
    pair = held(hand, queue)
    hand.stop()
    put(hand, pair, "m1", "m2")
    assert hand.next(NOW) is None
    assert hand.take_finished() == [pair]


def test_the_next_fetch_is_that_of_a_pair_whose_handlers_run() -> None:
    of = handler()
    hand = make_hand(of)
    assert hand.next_fetch(0.0, patience=0.1) == math.inf
    for workspace, fetch_at in (("a", 7.0), ("b", 5.0), ("c", 1.0)):
        pair = held(hand, of, workspace, drained=True, fetch_at=fetch_at)
        if workspace != "c":  # nothing of it runs: it is about to be let go of
            put(hand, pair, f"m_{workspace}")
    started(hand)
    assert hand.next_fetch(0.0, patience=0.1) == 5.0


def test_a_fetch_that_has_to_wait_for_room_is_no_reason_to_spin() -> None:
    of = handler(concurrency=1)
    hand = make_hand(of, concurrency=1)
    pair = held(hand, of, fetched=True, drained=True, fetch_at=0.0)
    put(hand, pair, "m1")
    started(hand)
    assert hand.wanting(NOW) == []
    assert hand.next_fetch(NOW, patience=0.1) == NOW + 0.1
