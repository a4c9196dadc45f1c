"""Floors of the message queue: when a look may begin above what is finished, and where."""

from datetime import UTC, datetime, timedelta

import pytest

from cron_ticks.sweeps import RESTS, Sweeps
from token_queue.floors import (
    FEW_DEAD,
    MOST_EMPTY_LEVELS,
    MOST_PAIRS,
    NO_FLOORS,
    QUICK,
    QUICK_PER_LEVEL,
    SLACK,
    Floors,
    Level,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SLOW = QUICK * 10
LEVEL: Level = ("queue", "ws", 2)


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def floors(clock: Clock) -> Floors:
    return Floors(Sweeps(clock))


def sweep(floors: Floors, earliest: dict[Level, datetime], *, took: timedelta = SLOW, dead: int = FEW_DEAD) -> bool:
    assert floors.sweeping
    return floors.note_swept(earliest if floors.naming else {}, NOW, took=took, count=len(earliest), dead=dead)


def test_as_long_as_sweeps_are_quick_every_look_is_one(floors: Floors) -> None:
    for _ in range(3):
        assert not sweep(floors, {LEVEL: NOW}, took=QUICK)
        assert (floors.sweeping, floors.naming, floors.levels) == (True, False, {})
        assert floors.of_pair("queue", "ws") == NO_FLOORS


def test_a_single_slow_sweep_may_be_a_busy_machine(floors: Floors) -> None:
    assert not sweep(floors, {LEVEL: NOW})
    assert (floors.sweeping, floors.naming) == (True, True)
    assert not sweep(floors, {LEVEL: NOW}, took=QUICK)
    assert (floors.sweeping, floors.naming) == (True, False)


def test_where_few_rows_are_dead_they_are_not_the_reason(floors: Floors) -> None:
    for _ in range(3):
        assert not sweep(floors, {LEVEL: NOW}, dead=FEW_DEAD - 1)
        assert (floors.sweeping, floors.naming) == (True, False)


def test_many_levels_take_longer_and_are_not_slow(floors: Floors) -> None:
    many: dict[Level, datetime] = {("queue", str(number), 2): NOW for number in range(1000)}
    for _ in range(3):
        assert not sweep(floors, many, took=QUICK + 1000 * QUICK_PER_LEVEL)
    assert floors.sweeping


def test_after_two_slow_sweeps_looks_begin_at_the_earliest_message_of_each_level(floors: Floors, clock: Clock) -> None:
    early = NOW - timedelta(hours=1)
    assert not sweep(floors, {LEVEL: early})
    assert sweep(floors, {LEVEL: early})
    assert not floors.sweeping
    assert floors.levels == {LEVEL: early}
    assert floors.of_pair("queue", "ws") == (NOW - SLACK, NOW - SLACK, early, NOW - SLACK)
    assert floors.sweep_in == pytest.approx(RESTS * SLOW.total_seconds())
    clock.seconds = floors.sweep_in
    assert floors.sweeping


def slow(floors: Floors, earliest: dict[Level, datetime]) -> None:
    sweep(floors, earliest)
    sweep(floors, earliest)


def test_no_floor_is_above_what_is_being_sent(floors: Floors) -> None:
    """Neither of a level whose messages wait nor of an empty one: a sender may not have committed yet."""
    slow(floors, {LEVEL: NOW + timedelta(hours=1)})
    assert floors.levels == {LEVEL: NOW - SLACK}
    later = NOW + timedelta(seconds=10)
    floors.note_looked({}, later)
    assert floors.levels == {LEVEL: later - SLACK}
    assert floors.capped(later) == later - SLACK
    assert floors.capped(NOW - timedelta(hours=1)) == NOW - timedelta(hours=1)


def test_a_level_that_no_look_has_probed_keeps_the_floor_of_the_sweep(floors: Floors) -> None:
    slow(floors, {LEVEL: NOW})
    floors.note_looked({LEVEL: NOW}, NOW + timedelta(seconds=10))
    assert floors.of_pair("queue", "another") == (NOW - SLACK,) * 4


def test_pairs_that_were_busy_lately_are_looked_at_too(floors: Floors) -> None:
    """Before the sweep or after it."""
    floors.expect([("queue", "before")])
    assert floors.levels == {}
    slow(floors, {LEVEL: NOW - timedelta(hours=1)})
    floors.expect([("queue", "after"), ("queue", "ws")])
    assert floors.levels[LEVEL] == NOW - timedelta(hours=1)
    for workspace in ("before", "after"):
        assert [floors.levels["queue", workspace, priority] for priority in range(4)] == [NOW - SLACK] * 4


def test_of_many_busy_pairs_the_last_are_remembered(floors: Floors) -> None:
    floors.expect(("queue", str(number)) for number in range(MOST_PAIRS + 1))
    slow(floors, {})
    assert len(floors.levels) == 4 * MOST_PAIRS
    assert ("queue", "0", 2) not in floors.levels


def test_a_quick_sweep_ends_it(floors: Floors, clock: Clock) -> None:
    slow(floors, {LEVEL: NOW})
    clock.seconds = floors.sweep_in
    assert not sweep(floors, {LEVEL: NOW}, took=QUICK)
    assert (floors.sweeping, floors.levels, floors.sweep_in) == (True, {}, 0.0)


def test_a_sweep_that_fails_is_put_off_while_there_are_floors(floors: Floors, clock: Clock) -> None:
    """One that takes longer than a statement may would come again and again."""
    floors.note_failed(30.0)
    assert floors.sweeping
    slow(floors, {LEVEL: NOW})
    clock.seconds = floors.sweep_in
    floors.note_failed(30.0)
    assert not floors.sweeping


def test_empty_levels_are_forgotten_when_there_are_too_many(floors: Floors, clock: Clock) -> None:
    many: dict[Level, datetime] = {("queue", str(number), 2): NOW for number in range(MOST_EMPTY_LEVELS + 10)}
    slow(floors, many)
    assert len(floors.levels) == MOST_EMPTY_LEVELS + 10
    clock.seconds = floors.sweep_in
    sweep(floors, {LEVEL: NOW})
    assert len(floors.levels) == MOST_EMPTY_LEVELS + 1
    assert LEVEL in floors.levels
