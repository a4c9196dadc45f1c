"""Pure time arithmetic: examples, and properties against a plain enumeration."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cron_ticks.occurrences import (
    MICROSECOND,
    RULE_ERRORS,
    CatchUp,
    IntervalRule,
    MakingUp,
    OneOffRule,
    Plan,
    Timetable,
    paced,
    plan,
)
from cron_ticks.schedules import CATCH_UPS

START = datetime(2026, 1, 1, tzinfo=UTC)
MOST_STEPS = 400  # that the plain enumeration goes through; no window reaches further


def seconds(value: float) -> timedelta:
    return timedelta(seconds=value)


moments = st.datetimes(
    min_value=datetime(2020, 1, 1),  # noqa: DTZ001 - hypothesis wants naive bounds
    max_value=datetime(2040, 1, 1),  # noqa: DTZ001
    timezones=st.just(UTC),
)
intervals = st.timedeltas(min_value=seconds(1), max_value=timedelta(days=400))
rules = st.builds(IntervalRule, anchor=moments, interval=intervals)


@st.composite
def near(draw: st.DrawFn, rule: IntervalRule, *, most: int = 100) -> datetime:
    """An instant around the first occurrences: often one of them, or just beside it."""
    step = draw(st.integers(-3, most))
    aside = draw(st.sampled_from([timedelta(0), MICROSECOND, -MICROSECOND, rule.interval / 3]))
    return rule.anchor + step * rule.interval + aside


@st.composite
def timetables(draw: st.DrawFn) -> Timetable:
    """An interval with any bounds."""
    rule = draw(rules)
    starts_at = draw(st.none() | near(rule, most=20))
    ends_at = draw(st.none() | near(rule))
    return Timetable(rule, starts_at, ends_at, draw(st.none() | st.integers(1, 30)))


def interval_of(timetable: Timetable) -> IntervalRule:
    assert isinstance(timetable.rule, IntervalRule)
    return timetable.rule


def enumerated(timetable: Timetable, start: datetime, end: datetime) -> list[datetime]:
    """Step by step from the anchor, whatever is quicker."""
    rule, found = interval_of(timetable), []
    occurrence = rule.anchor
    for _ in range(MOST_STEPS):
        too_early = timetable.starts_at is not None and occurrence < timetable.starts_at
        too_late = timetable.ends_at is not None and occurrence > timetable.ends_at
        if start <= occurrence < end and not too_early and not too_late:
            found.append(occurrence)
        occurrence += rule.interval
    assert end <= occurrence, "the window reaches further than the enumeration"
    return found


def planned(timetable: Timetable, *, needed_from: datetime | None = START, now: datetime, ahead: float = 60) -> Plan:
    return plan(
        timetable, needed_from=needed_from, planned=0, now=now, lookahead=seconds(ahead), missed_after=seconds(60)
    )


# Rules


def test_first_occurrence_is_the_anchor() -> None:
    rule = IntervalRule(START, seconds(30))
    assert rule.occurrence_at_or_after(START - seconds(1000)) == START
    assert rule.occurrence_at_or_after(START) == START
    assert Timetable(rule).occurrence_after(START) == START + seconds(30)


@given(rules, moments)
def test_occurrence_is_the_first_on_the_grid(rule: IntervalRule, instant: datetime) -> None:
    found = rule.occurrence_at_or_after(instant)
    steps, rest = divmod(found - rule.anchor, rule.interval)
    assert (rest, steps >= 0) == (timedelta(0), True)
    assert found >= instant
    assert steps == 0 or found - rule.interval < instant
    following = Timetable(rule).occurrence_after(instant)
    assert following is not None
    assert following > instant


@given(rules, moments, st.integers(0, 50), st.integers(1, 5))
def test_every_occurrence_is_in_phase_whatever_the_window(
    rule: IntervalRule, start: datetime, length: int, most: int
) -> None:
    """Years after the anchor too, and whether or not a window begins at an occurrence."""
    end = start + length * rule.interval / 3
    for found in (rule.occurrences(start, end), rule.occurrences(start, end, most=most)):
        assert all((occurrence - rule.anchor) % rule.interval == timedelta(0) for occurrence in found)
        assert all(rule.anchor <= occurrence and start <= occurrence < end for occurrence in found)
        assert all(later - earlier == rule.interval for earlier, later in pairwise(found))


@given(rules, moments, st.integers(0, 50), st.integers(0, 50))
def test_windows_join_without_gap_or_overlap(rule: IntervalRule, start: datetime, first: int, second: int) -> None:
    middle = start + first * rule.interval / 3
    end = middle + second * rule.interval / 3
    assert rule.occurrences(start, middle) + rule.occurrences(middle, end) == rule.occurrences(start, end)


@given(rules, moments, st.integers(0, 90), st.integers(1, 7))
def test_parts_of_a_window_join_without_gap_or_overlap(
    rule: IntervalRule, start: datetime, length: int, most: int
) -> None:
    end = start + length * rule.interval / 3
    joined: list[datetime] = []
    begin = start
    while part := rule.occurrences(begin, end, most=most):
        assert len(part) <= most
        joined += part
        begin = part[-1] + MICROSECOND
    assert joined == rule.occurrences(start, end)


def test_no_occurrence_is_wanted_of_a_window() -> None:
    assert IntervalRule(START, seconds(1)).occurrences(START, START + seconds(9), most=0) == []
    assert OneOffRule(START).occurrences(START, START + seconds(9), most=0) == []


@given(moments, moments, moments)
def test_a_one_off_has_one_occurrence(at: datetime, start: datetime, end: datetime) -> None:
    rule = OneOffRule(at)
    assert rule.occurrence_at_or_after(start) == (at if start <= at else None)
    assert rule.occurrence_at_or_after(at) == at
    assert Timetable(rule).occurrence_after(at) is None
    inside = [at] if start <= at < end else []
    assert rule.occurrences(start, end) == rule.occurrences(start, end, most=5) == inside
    assert rule.count(start, end) == len(inside)
    assert rule.nth(min(start, at), 0) == at
    with pytest.raises(ValueError, match="no occurrence 1"):
        rule.nth(at, 1)
    with pytest.raises(ValueError, match="no occurrence 0"):
        rule.nth(at + MICROSECOND, 0)


def test_a_rule_that_leaves_the_calendar_says_so() -> None:
    rule = IntervalRule(datetime.max.replace(tzinfo=UTC) - seconds(5), seconds(10))
    with pytest.raises(RULE_ERRORS):
        rule.occurrence_at_or_after(rule.anchor + seconds(1))


# Bounds


def test_bounds_are_inclusive() -> None:
    rule = IntervalRule(START, seconds(10))
    bounded = Timetable(rule, START + seconds(10), START + seconds(30))
    expected = [START + seconds(10), START + seconds(20), START + seconds(30)]
    assert bounded.occurrences(START, START + seconds(100)) == expected
    assert bounded.occurrence_at_or_after(START + seconds(30)) == START + seconds(30)
    assert bounded.occurrence_after(START + seconds(30)) is None
    narrower = replace(bounded, starts_at=START + seconds(10) + MICROSECOND, ends_at=START + seconds(30) - MICROSECOND)
    assert narrower.occurrences(START, START + seconds(100)) == [START + seconds(20)]


@given(timetables(), st.data())
def test_bounded_occurrences_are_those_of_the_enumeration(timetable: Timetable, data: st.DataObject) -> None:
    rule = interval_of(timetable)
    start, end = data.draw(near(rule)), data.draw(near(rule))
    most = data.draw(st.none() | st.integers(0, 10))
    expected = enumerated(timetable, start, end)
    assert timetable.occurrences(start, end) == expected
    assert timetable.occurrences(start, end, most=most) == expected[:most]
    later = enumerated(timetable, start, rule.anchor + 300 * rule.interval)
    assert timetable.occurrence_at_or_after(start) == (later[0] if later else None)
    assert timetable.occurrence_after(start) == next((found for found in later if found > start), None)


@given(timetables(), st.data())
def test_count_and_nth_agree_with_the_enumeration(timetable: Timetable, data: st.DataObject) -> None:
    rule = interval_of(timetable)
    start, end = data.draw(near(rule)), data.draw(near(rule))
    expected = enumerated(timetable, start, end)
    assert timetable.count(start, end) == len(expected)
    assert [timetable.nth(start, number) for number in range(len(expected))] == expected


# Plans


def test_all_occurrences_inside_the_window_are_planned() -> None:
    made = planned(Timetable(IntervalRule(START, seconds(5))), now=START)
    assert made.occurrences == tuple(START + seconds(5) * k for k in range(12))
    assert made.next_needed == START + seconds(60)
    assert (made.missed, made.planned, made.complete) == (0, 12, True)


def test_nothing_is_planned_before_it_is_needed() -> None:
    needed = START + seconds(300)
    made = planned(Timetable(IntervalRule(START, seconds(5))), needed_from=needed, now=START)
    assert (made.occurrences, made.next_needed, made.complete) == ((), needed, True)


def test_nothing_is_planned_where_nothing_is_needed() -> None:
    made = planned(Timetable(IntervalRule(START, seconds(5))), needed_from=None, now=START)
    assert (made.occurrences, made.next_needed, made.missed, made.complete) == ((), None, 0, True)


def test_a_short_outage_loses_nothing() -> None:
    made = planned(Timetable(IntervalRule(START, seconds(10))), now=START + seconds(55), ahead=1)
    assert made.occurrences == tuple(START + seconds(10) * k for k in range(6))


def test_exactly_so_late_is_not_missed_yet() -> None:
    made = planned(Timetable(IntervalRule(START, seconds(10))), now=START + seconds(60), ahead=1)
    assert (made.missed, made.occurrences[0]) == (0, START)
    later = planned(Timetable(IntervalRule(START, seconds(10))), now=START + seconds(70) + MICROSECOND, ahead=1)
    assert (later.missed, later.occurrences[0]) == (1, START + seconds(10))


def test_after_a_long_outage_only_the_latest_missed_is_made_up() -> None:
    now = START + timedelta(days=1) + seconds(5)
    made = planned(Timetable(IntervalRule(START, seconds(10))), now=now, ahead=10)
    first = START + timedelta(days=1) - seconds(60)
    assert made.occurrences == tuple(first + seconds(10) * k for k in range(8))
    assert made.missed == (first - START) // seconds(10)


def test_after_the_end_the_last_one_is_made_up() -> None:
    timetable = Timetable(IntervalRule(START, seconds(10)), ends_at=START + seconds(35))
    made = planned(timetable, now=START + timedelta(days=1))
    assert (made.occurrences, made.missed, made.next_needed) == ((START + seconds(30),), 3, None)


def test_a_one_off_is_planned_once_however_late() -> None:
    made = planned(Timetable(OneOffRule(START)), now=START + timedelta(days=1))
    assert (made.occurrences, made.missed, made.next_needed, made.complete) == ((START,), 0, None, True)
    waiting = planned(Timetable(OneOffRule(START)), now=START - timedelta(days=1))
    assert (waiting.occurrences, waiting.next_needed, waiting.complete) == ((), START, True)


@given(rules, st.integers(0, 500), st.integers(1, 200), st.integers(1, 20), st.integers(1, 20))
def test_every_occurrence_is_planned_or_counted_as_missed(
    rule: IntervalRule, needed: int, late: int, ahead: int, grace: int
) -> None:
    """Passes follow each other as a manager's do: together they cover the grid exactly once."""
    begin = rule.anchor + needed * rule.interval
    needed_from: datetime | None = begin
    now = begin + late * rule.interval / 7
    lookahead, missed_after = ahead * rule.interval / 3, grace * rule.interval / 3
    dealt: list[datetime] = []
    missed = 0
    for _ in range(3):
        made = plan(
            Timetable(rule),
            needed_from=needed_from,
            planned=len(dealt) + missed,
            now=now,
            lookahead=lookahead,
            missed_after=missed_after,
        )
        dealt += made.occurrences
        missed += made.missed
        needed_from, now = made.next_needed, now + rule.interval * 2
    assert needed_from is not None
    expected = rule.occurrences(begin, needed_from)
    assert len(dealt) + missed == len(expected)
    assert set(dealt) <= set(expected)
    assert dealt == sorted(set(dealt))


@given(timetables(), st.data())
def test_passes_plan_exactly_what_the_bounds_allow(timetable: Timetable, data: st.DataObject) -> None:
    """A series of passes, each in parts, against a list of all occurrences from which they are taken off."""
    rule = interval_of(timetable)
    begin = data.draw(near(rule, most=10))
    lookahead = data.draw(st.integers(1, 20)) * rule.interval / 3
    missed_after = data.draw(st.integers(1, 20)) * rule.interval / 3
    pauses = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=6))
    most = data.draw(st.none() | st.integers(1, 5))
    policy = data.draw(st.sampled_from(CATCH_UPS))
    making_up = MakingUp(policy, data.draw(st.integers(1, 8)), data.draw(st.integers(1, 200)) * rule.interval / 3)
    room = {"skip": 0, "latest": 1}.get(policy, making_up.most)
    waiting = enumerated(timetable, begin, rule.anchor + 300 * rule.interval)[: timetable.max_runs]
    needed_from = timetable.occurrence_at_or_after(begin)
    now, dealt = begin, 0
    for pause in pauses:
        now += pause * rule.interval / 3
        in_window = [occurrence for occurrence in waiting if occurrence < now + lookahead]
        late = [occurrence for occurrence in in_window if now - occurrence > missed_after]
        waiting = waiting[len(in_window) :]
        young = [occurrence for occurrence in late if occurrence >= now - making_up.max_age]
        not_made_up = late[: len(late) - min(room, len(young))]
        found: list[datetime] = []
        missed: list[datetime] = []
        while True:
            made = plan(
                timetable,
                needed_from=needed_from,
                planned=dealt,
                now=now,
                lookahead=lookahead,
                missed_after=missed_after,
                making_up=making_up,
                most=most,
            )
            assert most is None or len(made.occurrences) <= most
            needed_from, dealt = made.next_needed, dealt + made.planned
            found += made.occurrences
            if made.stretch is not None:
                stretched = [moment for moment in in_window if made.stretch.first <= moment <= made.stretch.last]
                assert (stretched[0], stretched[-1]) == (made.stretch.first, made.stretch.last)
                assert len(stretched) == made.missed
                missed += stretched
            if made.complete:
                break
        assert found == in_window[len(not_made_up) :]
        assert missed == not_made_up
        assert needed_from == (waiting[0] if waiting else None)
        assert timetable.max_runs is None or dealt <= timetable.max_runs


@given(
    st.sampled_from(CATCH_UPS),
    st.integers(1, 8),
    st.integers(1, 100),
    st.lists(st.integers(70, 400), unique=True).map(sorted),
    st.integers(0, 70),
)
def test_late_ticks_and_occurrences_without_one_are_decided_together(
    policy: CatchUp, most: int, age: int, late_steps: list[int], unmade: int
) -> None:
    """Ticks that were made before an outage and occurrences in it: so much is made up of both, the latest first."""
    now = START + seconds(1000)
    making_up = MakingUp(policy, most, seconds(age))
    late = [now - seconds(step) for step in reversed(late_steps)]
    cursor = now - seconds(70 - unmade if unmade else 0)  # after all of them
    made = plan(
        Timetable(IntervalRule(START, seconds(1))),
        needed_from=cursor,
        planned=0,
        now=now,
        lookahead=seconds(0),
        missed_after=seconds(10),
        making_up=making_up,
        late=late,
    )
    overdue = [*late, *(cursor + seconds(k) for k in range(200) if cursor + seconds(k) < now - seconds(10))]
    room = {"skip": 0, "latest": 1}.get(policy, most)
    young = [moment for moment in overdue if moment >= now - seconds(age)]
    kept = young[len(young) - min(room, len(young)) :]
    assert late[made.late_missed :] == [moment for moment in late if moment in kept]
    assert [moment for moment in made.occurrences if moment < now - seconds(10)] == [
        moment for moment in kept if moment not in late
    ]
    assert made.missed == len(overdue) - len(late) - len([moment for moment in kept if moment not in late])


def test_without_a_rule_to_follow_late_ticks_are_decided_all_the_same() -> None:
    late = [START + seconds(step) for step in (1, 2, 3)]
    made = plan(
        Timetable(OneOffRule(START)),
        needed_from=None,
        planned=1,
        now=START + seconds(100),
        lookahead=seconds(60),
        missed_after=seconds(60),
        late=late,
    )
    assert made.late_missed == 2


@given(st.integers(1, 50), st.integers(1, 1000))
def test_pacing_gives_each_occurrence_its_own_part_of_the_time(count: int, span: int) -> None:
    moments = [START + seconds(k) for k in range(count)]
    due = paced("cron_x", moments, now=START, span=seconds(span))
    part = seconds(span) / count
    assert all(START + k * part - MICROSECOND <= due[k] <= START + (k + 1) * part + MICROSECOND for k in range(count))
    assert due == paced("cron_x", moments, now=START, span=seconds(span))
    assert paced("cron_x", [], now=START, span=seconds(span)) == []
