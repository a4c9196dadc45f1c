"""Backfills, the pure part: ranges, what a step takes, its pace, and what is left of missed stretches."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cron_ticks.backfills import (
    MOST_BACKFILL,
    MOST_DAYS,
    MOST_LOOKED_AT,
    Backfill,
    CannotGoOnError,
    check_backfill,
    check_range,
    check_stretch,
    choose,
    next_occurrences,
    room_of,
    slots,
    timetable_for,
    without,
)
from cron_ticks.cron_rules import CronRule
from cron_ticks.errors import InvalidInputError
from cron_ticks.occurrences import MICROSECOND, IntervalRule, Rule, Stretch, Timetable
from cron_ticks.schedules import Schedule

START = datetime(2026, 3, 1, tzinfo=UTC)
SECOND, MINUTE, HOUR, DAY = (timedelta(**{unit: 1}) for unit in ("seconds", "minutes", "hours", "days"))
LONG_AGO = START - 1000 * DAY
NOW = START + 10 * DAY


def a_schedule(**changes: Any) -> Schedule:
    fields: dict[str, Any] = dict.fromkeys(Schedule.__dataclass_fields__)
    return Schedule(**fields | {"anchor_at": START, "interval": HOUR, "overlap": "allow"} | changes)


def cron(expression: str, zone: str = "UTC") -> dict[str, Any]:
    return {"interval": None, "cron": expression, "zone": zone, "dst_gap": "fire", "dst_fold": "first"}


def test_an_interval_without_a_beginning_goes_on_backwards() -> None:
    timetable = timetable_for(a_schedule(), START - 3.5 * HOUR)
    assert timetable.occurrences(START - 3.5 * HOUR, START + 1.5 * HOUR) == [START + k * HOUR for k in range(-3, 2)]
    assert timetable.nth(START - 3.5 * HOUR, 5) == START + 2 * HOUR


def test_one_with_a_beginning_does_not() -> None:
    timetable = timetable_for(a_schedule(starts_at=START), START - 3 * HOUR)
    assert timetable.occurrences(START - 3 * HOUR, START + 1.5 * HOUR) == [START, START + HOUR]


@given(st.integers(0, 10**13), st.integers(10**6, 10**11))
def test_going_backwards_keeps_the_phase(before_us: int, interval_us: int) -> None:
    interval, start = interval_us * MICROSECOND, START - before_us * MICROSECOND
    found = timetable_for(a_schedule(interval=interval), start).occurrence_at_or_after(start)
    assert found is not None
    assert start <= found < start + interval
    assert (START - found) % interval == timedelta(0)


def test_an_expression_and_a_one_off_are_what_they_always_were() -> None:
    daily = timetable_for(a_schedule(**cron("0 9 * * *", "Europe/Berlin")), START - 2 * DAY)
    assert [moment.hour for moment in daily.occurrences(START - 2 * DAY, START)] == [8, 8]
    once = timetable_for(a_schedule(interval=None), START - DAY)
    assert once.occurrences(START - DAY, START + DAY) == [START]
    assert once.occurrences(START - DAY, START) == []


def test_bounds_hold_and_max_runs_does_not() -> None:
    schedule = a_schedule(ends_at=START + 2 * HOUR, max_runs=1)
    assert timetable_for(schedule, START).count(START, START + DAY) == 3


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("start", (datetime(2026, 1, 1), START, 1)),  # noqa: DTZ001 - that is the mistake
        ("end", (START, "tomorrow", 1)),
        ("end", (START, START, 1)),
        ("end", (START, START - SECOND, 1)),
        ("per_minute", (START, NOW, 0)),
        ("per_minute", (START, NOW, 60_001)),
        ("per_minute", (START, NOW, 1.5)),
    ],
)
def test_a_range_that_is_none_is_refused(field: str, arguments: tuple[Any, Any, Any]) -> None:
    with pytest.raises(InvalidInputError) as refused:
        check_range(*arguments)
    assert refused.value.field == field


def test_a_range_is_counted() -> None:
    assert check_backfill(a_schedule(), START, NOW, now=NOW, kept_since=START) == 240
    assert (
        check_backfill(a_schedule(interval=SECOND), START, START + 10_000 * SECOND, now=NOW, kept_since=START) == 10_000
    )


@pytest.mark.parametrize(
    ("field", "said", "changes", "start", "end"),
    [
        ("end", "must not be after now", {}, START, NOW + MICROSECOND),
        ("start", "must not be before 2026-02-28T00:00:00", {}, START - DAY - MICROSECOND, NOW),
        ("end", "has 10001 occurrences, at most 10000", {"interval": SECOND}, START, START + 10_001 * SECOND),
        ("schedule_id", "can't be followed", cron("0 9 * * *", "Mars/Olympus"), START, NOW),
    ],
)
def test_a_range_out_of_reach_is_refused(
    field: str, said: str, changes: dict[str, Any], start: datetime, end: datetime
) -> None:
    with pytest.raises(InvalidInputError, match=said) as refused:
        check_backfill(a_schedule(**changes), start, end, now=NOW, kept_since=START - DAY)
    assert refused.value.field == field


def test_a_step_looks_at_so_many_and_so_many_days() -> None:
    seconds = timetable_for(a_schedule(interval=SECOND), START)
    assert len(next_occurrences(seconds, START, START + HOUR)) == MOST_LOOKED_AT
    days = timetable_for(a_schedule(interval=DAY), START)
    assert len(next_occurrences(days, START, START + 300 * DAY)) == MOST_DAYS
    assert next_occurrences(days, START + 300 * DAY, START + 300 * DAY) == []


def test_an_edit_that_makes_too_many_of_it_ends_it() -> None:
    seconds = timetable_for(a_schedule(interval=SECOND), START)
    assert next_occurrences(seconds, START, START + MOST_BACKFILL * SECOND)
    with pytest.raises(CannotGoOnError, match="10001 occurrences are left"):
        next_occurrences(seconds, START, START + (MOST_BACKFILL + 1) * SECOND)


def test_what_is_taken_is_skipped_and_what_managers_make_is_theirs() -> None:
    hours = [START + k * HOUR for k in range(6)]
    chosen = choose(hours, taken={hours[1]}, managers_from=hours[4], room=9, position=START)
    assert chosen.made == (hours[0], hours[2], hours[3])
    assert (chosen.skipped, chosen.looked_at, chosen.position) == (3, 6, hours[5] + MICROSECOND)


def test_a_step_ends_where_its_room_does_and_goes_on_there() -> None:
    hours = [START + k * HOUR for k in range(6)]
    chosen = choose(hours, taken={hours[0], hours[3]}, managers_from=None, room=2, position=START)
    assert chosen.made == (hours[1], hours[2])
    assert (chosen.skipped, chosen.position) == (2, hours[3] + MICROSECOND)
    rest = choose(hours[4:], taken=(), managers_from=None, room=2, position=chosen.position)
    assert rest.made == (hours[4], hours[5])


def test_nothing_to_look_at_is_no_step_forward() -> None:
    assert choose([], taken=(), managers_from=None, room=1, position=START).position == START


@pytest.mark.parametrize(("per_minute", "room"), [(1, 1), (6, 1), (60, 10), (600, 100), (3000, 500), (60_000, 500)])
def test_a_step_makes_ticks_for_ten_seconds(per_minute: int, room: int) -> None:
    assert room_of(per_minute) == room


@given(st.integers(1, 60_000), st.integers(0, 500))
def test_the_pace_is_never_exceeded(per_minute: int, count: int) -> None:
    """The next step's first place comes after this one's last, a gap later, and so on for ever."""
    places = slots(NOW, per_minute, count)
    assert len(places) == count + 1
    assert places[0] == NOW
    assert abs(places[-1] - NOW - count * MINUTE / per_minute) <= MICROSECOND


def a_backfill(**changes: Any) -> Backfill:
    fields: dict[str, Any] = dict.fromkeys(Backfill.__dataclass_fields__)
    return Backfill(**fields | {"total": 10, "made": 0, "skipped": 0, "pending": 0} | changes)


def test_progress_counts_what_has_ended() -> None:
    assert a_backfill().progress == 0
    assert a_backfill(made=4, skipped=2, pending=3).progress == 0.3
    assert a_backfill(made=8, skipped=2).progress == 1
    assert a_backfill(total=0).progress == 1
    assert a_backfill(pending=3).progress == 0, "those of another backfill of the same time"


# What is left of a stretch

RULES: dict[str, Rule] = {
    "seconds": IntervalRule(START - 7 * HOUR, timedelta(seconds=7)),
    "odd": IntervalRule(START - 7 * HOUR, timedelta(seconds=1.000001)),
    "minutes": CronRule("*/5 * * * *", "UTC"),
    "nightly": CronRule("30 2 * * *", "Europe/Berlin"),
    "fold": CronRule("*/20 1-3 * * *", "America/New_York", dst_fold="both"),
}


def members(timetable: Timetable, stretch: Stretch) -> list[datetime]:
    return timetable.occurrences(stretch.first, stretch.last + MICROSECOND)


@given(data=st.data(), name=st.sampled_from(sorted(RULES)), skipped=st.integers(0, 40), length=st.integers(1, 60))
def test_what_is_left_and_what_is_gone_are_the_stretch(
    data: st.DataObject, name: str, skipped: int, length: int
) -> None:
    timetable = Timetable(RULES[name])
    before = timetable.nth(START, skipped)
    first, last = timetable.nth(START, skipped), timetable.nth(START, skipped + length - 1)
    stretch = Stretch(first, last, length)
    inside = members(timetable, stretch)
    others = [before - SECOND, last + SECOND, *(moment + MICROSECOND for moment in inside[:-1])]
    gone = data.draw(st.lists(st.sampled_from(inside + others)))
    pieces = without(timetable, stretch, gone)
    left = [moment for piece in pieces for moment in members(timetable, piece)]
    assert left == [moment for moment in inside if moment not in gone]
    assert [piece.count for piece in pieces] == [len(members(timetable, piece)) for piece in pieces]
    for piece in pieces:
        assert members(timetable, piece)[0] == piece.first
        assert members(timetable, piece)[-1] == piece.last
    neighbours = sum(1 for moment in inside if moment in gone)
    assert len(pieces) <= neighbours + 1


class CountingRule:
    """Says how often it was asked."""

    lasting = True

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self.asked = 0

    def occurrence_at_or_after(self, instant: datetime) -> datetime | None:
        return self._rule.occurrence_at_or_after(instant)

    def occurrences(self, start: datetime, end: datetime, *, most: int | None = None) -> list[datetime]:
        raise AssertionError(f"a long stretch must not be listed: {start} {end} {most}")

    def count(self, start: datetime, end: datetime) -> int:
        self.asked += 1
        return self._rule.count(start, end)

    def nth(self, start: datetime, number: int) -> datetime:
        self.asked += 1
        return self._rule.nth(start, number)


@pytest.mark.parametrize("rule", [IntervalRule(START, SECOND), CronRule("* * * * * *", "Europe/Berlin")])
def test_the_work_follows_what_is_gone_and_not_the_stretch(rule: Rule) -> None:
    years = 10**8
    stretch = Stretch(START, START + (years - 1) * SECOND, years)
    counting = CountingRule(rule)
    gone = [START + k * 10_000_019 * SECOND for k in range(1, 9)]
    pieces = without(Timetable(counting), stretch, gone)
    assert len(pieces) == 9
    assert sum(piece.count for piece in pieces) == years - 8
    assert counting.asked <= 4 * len(gone) + 4


@pytest.mark.parametrize(
    ("gone", "left"),
    [
        ([], [(0, 9)]),
        (range(10), []),
        ([0], [(1, 9)]),
        ([9], [(0, 8)]),
        ([4, 5], [(0, 3), (6, 9)]),
        ([1, 3], [(0, 0), (2, 2), (4, 9)]),
    ],
)
def test_pieces_of_a_stretch(gone: Sequence[int], left: list[tuple[int, int]]) -> None:
    timetable = Timetable(IntervalRule(START, HOUR))
    stretch = Stretch(START, START + 9 * HOUR, 10)
    pieces = without(timetable, stretch, [START + k * HOUR for k in gone])
    assert pieces == [Stretch(START + a * HOUR, START + b * HOUR, b - a + 1) for a, b in left]


def test_another_rules_occurrences_are_gone_only_where_they_are_the_stretchs_too() -> None:
    """Every hour was missed, and every 90 minutes is wanted."""
    timetable = Timetable(IntervalRule(START, HOUR))
    wanted = [START + k * timedelta(minutes=90) for k in range(5)]
    stretch = Stretch(START, START + 6 * HOUR, 7)
    assert without(timetable, stretch, wanted) == [
        Stretch(START + HOUR, START + 2 * HOUR, 2),
        Stretch(START + 4 * HOUR, START + 5 * HOUR, 2),
    ]


@pytest.mark.parametrize(
    ("first", "last", "count"),
    [(START + MINUTE, START + 9 * HOUR, 9), (START, START + 9 * HOUR + MINUTE, 10), (START, START + 9 * HOUR, 9)],
)
def test_a_stretch_that_its_rule_does_not_have_is_not_guessed_at(first: datetime, last: datetime, count: int) -> None:
    timetable = Timetable(IntervalRule(START, HOUR))
    check_stretch(timetable, Stretch(START, START + 9 * HOUR, 10))
    with pytest.raises(CannotGoOnError, match="has others today"):
        check_stretch(timetable, Stretch(first, last, count))
