"""Pure time arithmetic: examples, and properties against a plain count."""

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from cron_ticks.occurrences import IntervalRule, plan

START = datetime(2026, 1, 1, tzinfo=UTC)


def seconds(value: float) -> timedelta:
    return timedelta(seconds=value)


moments = st.datetimes(
    min_value=datetime(2020, 1, 1),  # noqa: DTZ001 - hypothesis wants naive bounds
    max_value=datetime(2040, 1, 1),  # noqa: DTZ001
    timezones=st.just(UTC),
)
intervals = st.timedeltas(min_value=seconds(1), max_value=timedelta(days=400))
rules = st.builds(IntervalRule, anchor=moments, interval=intervals)


def test_first_occurrence_is_the_anchor() -> None:
    rule = IntervalRule(START, seconds(30))
    assert rule.occurrence_at_or_after(START - seconds(1000)) == START
    assert rule.occurrence_at_or_after(START) == START
    assert rule.occurrence_after(START) == START + seconds(30)


@given(rules, moments)
def test_occurrence_is_the_first_on_the_grid(rule: IntervalRule, instant: datetime) -> None:
    found = rule.occurrence_at_or_after(instant)
    steps, rest = divmod(found - rule.anchor, rule.interval)
    assert (rest, steps >= 0) == (timedelta(0), True)
    assert found >= instant
    assert steps == 0 or found - rule.interval < instant
    assert rule.occurrence_after(instant) > instant


@given(rules, moments, st.integers(0, 50), st.integers(0, 50))
def test_windows_join_without_gap_or_overlap(rule: IntervalRule, start: datetime, first: int, second: int) -> None:
    middle = start + first * rule.interval / 3
    end = middle + second * rule.interval / 3
    assert rule.occurrences(start, middle) + rule.occurrences(middle, end) == rule.occurrences(start, end)


def test_all_occurrences_inside_the_window_are_planned() -> None:
    rule = IntervalRule(START, seconds(5))
    made = plan(rule, needed_from=START, now=START, lookahead=seconds(60), missed_after=seconds(60))
    assert made.occurrences == tuple(START + seconds(5) * k for k in range(12))
    assert made.next_needed == START + seconds(60)
    assert made.missed == 0


def test_nothing_is_planned_before_it_is_needed() -> None:
    rule = IntervalRule(START, seconds(5))
    needed = START + seconds(300)
    made = plan(rule, needed_from=needed, now=START, lookahead=seconds(60), missed_after=seconds(60))
    assert (made.occurrences, made.next_needed) == ((), needed)


def test_a_short_outage_loses_nothing() -> None:
    rule = IntervalRule(START, seconds(10))
    now = START + seconds(55)
    made = plan(rule, needed_from=START, now=now, lookahead=seconds(1), missed_after=seconds(60))
    assert made.occurrences == tuple(START + seconds(10) * k for k in range(6))


def test_after_a_long_outage_only_the_latest_missed_is_made_up() -> None:
    rule = IntervalRule(START, seconds(10))
    now = START + timedelta(days=1) + seconds(5)
    made = plan(rule, needed_from=START, now=now, lookahead=seconds(10), missed_after=seconds(60))
    first = START + timedelta(days=1) - seconds(60)
    assert made.occurrences == tuple(first + seconds(10) * k for k in range(8))
    assert made.missed == 24 * 360 - 6
    assert made.next_needed == START + timedelta(days=1) + seconds(20)


@given(rules, st.integers(0, 500), st.integers(1, 200), st.integers(1, 20), st.integers(1, 20))
def test_every_occurrence_is_planned_or_counted_as_missed(
    rule: IntervalRule, needed: int, late: int, ahead: int, grace: int
) -> None:
    """Passes follow each other as a manager's do: together they cover the grid exactly once."""
    needed_from = rule.anchor + needed * rule.interval
    now = needed_from + late * rule.interval / 7
    lookahead, missed_after = ahead * rule.interval / 3, grace * rule.interval / 3
    planned: list[datetime] = []
    missed = 0
    for _ in range(3):
        made = plan(rule, needed_from=needed_from, now=now, lookahead=lookahead, missed_after=missed_after)
        planned += made.occurrences
        missed += made.missed
        needed_from, now = made.next_needed, now + rule.interval * 2
    expected = rule.occurrences(rule.anchor + needed * rule.interval, needed_from)
    assert len(planned) + missed == len(expected)
    assert set(planned) <= set(expected)
    assert planned == sorted(set(planned))
