"""The arithmetic of the audit, beside a computation that goes through all instants one by one."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cron_ticks.audit_results import Counts, Finding
from cron_ticks.audits import (
    IN_STRETCH,
    IN_STRETCHES,
    NONE,
    NOT_DEALT_WITH,
    SEVERAL_TICKS,
    STILL_PENDING,
    UNEXPECTED,
    Ledger,
    Row,
    Stretch,
    Tally,
    Version,
    check_rows,
    check_sums,
    expected_of,
    tally,
    tally_of,
)
from cron_ticks.cron_rules import CronRule
from cron_ticks.occurrences import MICROSECOND, IntervalRule, OneOffRule, Rule

START = datetime(2026, 3, 1, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)
LENGTH = 60  # seconds that are gone through one by one
SINCE, UNTIL = START + 20 * SECOND, START + 50 * SECOND


def at(second: float) -> datetime:
    return START + second * SECOND


def version(
    number: int,
    after: float,
    rule: Rule,
    *,
    enabled: bool = True,
    starts_at: datetime | None = None,
    ends_at: datetime | None = None,
    max_runs: int | None = None,
    planned: int = 0,
    queue_name: str = "queue",
) -> Version:
    return Version(number, at(after), enabled, rule, starts_at, ends_at, max_runs, planned, queue_name)


def every(seconds: int, anchor: int = 0) -> IntervalRule:
    return IntervalRule(at(anchor), seconds * SECOND)


rules = st.one_of(
    st.builds(every, st.integers(1, 20), st.integers(0, LENGTH)),
    st.builds(lambda second: OneOffRule(at(second)), st.integers(0, LENGTH)),
    st.builds(
        lambda step, first: CronRule(f"{first}-59/{step} * * * * *", "UTC"), st.integers(1, 20), st.integers(0, 30)
    ),
)
moments = st.integers(0, LENGTH)
maybe = st.none() | moments.map(at)


@st.composite
def histories(draw: st.DrawFn) -> list[Version]:
    """Versions whose times need not be in their order: a later one cuts off all before it."""
    return [
        version(
            number + 1,
            draw(st.integers(-1, LENGTH)),
            draw(rules),
            enabled=draw(st.booleans()) or draw(st.booleans()),
            starts_at=draw(maybe),
            ends_at=draw(maybe),
            max_runs=draw(st.none() | st.integers(1, 20)),
            planned=draw(st.integers(0, 5)),
            queue_name=draw(st.sampled_from(["queue", "queue", "queue", "other"])),
        )
        for number in range(draw(st.integers(1, 4)))
    ]


def occurs(rule: Rule, moment: datetime) -> bool:
    if isinstance(rule, IntervalRule):
        return moment >= rule.anchor and (moment - rule.anchor) % rule.interval == timedelta(0)
    if isinstance(rule, OneOffRule):
        return moment == rule.at
    assert isinstance(rule, CronRule)
    first, step = map(int, rule.expression.split()[0].split("-59/"))
    return moment.second >= first and (moment.second - first) % step == 0


def expected_one_by_one(versions: list[Version]) -> dict[datetime, Version]:
    """All occurrences of the minute, second by second, with the version that expects each."""
    found: dict[datetime, Version] = {}
    for index, one in enumerate(versions):
        left = LENGTH if one.max_runs is None else max(0, one.max_runs - one.planned)
        end = min([later.holds_after for later in versions[index + 1 :]], default=at(LENGTH))
        for moment in (at(second) for second in range(LENGTH)):
            bounded = (one.starts_at or moment) <= moment <= (one.ends_at or moment)
            if one.enabled and moment > one.holds_after and bounded and occurs(one.rule, moment):
                if left and moment <= end:
                    found[moment] = one
                left = max(0, left - 1)
    return found


@given(histories())
def test_what_versions_expect_is_what_going_through_all_seconds_finds(versions: list[Version]) -> None:
    expected = expected_of(versions, None, SINCE, UNTIL, SINCE)
    found = [
        (moment, segment.version)
        for segment in expected.segments
        for moment in segment.rule.occurrences(segment.start, segment.end)
    ]
    wanted = expected_one_by_one(versions)
    assert sorted(found) == sorted((moment, one.version) for moment, one in wanted.items() if SINCE <= moment < UNTIL)


@given(rules, moments, moments, moments)
def test_the_sums_of_a_rule_are_those_of_its_occurrences(rule: Rule, first: int, last: int, since: int) -> None:
    assert tally(rule, at(first), at(last), at(since)) == tally_of(rule.occurrences(at(first), at(last)), at(since))


@given(st.integers(1, 10**9), st.integers(0, 10**6), st.integers(0, 200))
def test_an_interval_of_any_length_has_its_sums_in_closed_form(interval: int, phase: int, count: int) -> None:
    rule = IntervalRule(START + phase * MICROSECOND, interval * MICROSECOND)
    end = START + (phase + count * interval) * MICROSECOND
    assert tally(rule, START, end, START) == tally_of(rule.occurrences(START, end), START)
    assert tally(rule, START, end, START).size == count


@given(st.sets(moments, min_size=2), st.data())
def test_up_to_two_rows_that_are_wrong_always_show(occurrences: set[int], data: st.DataObject) -> None:
    """Whatever they are replaced by."""
    removed = data.draw(st.lists(st.sampled_from(sorted(occurrences)), max_size=2, unique=True))
    added = data.draw(st.lists(moments, max_size=2))
    left = [moment for moment in occurrences if moment not in removed] + added
    same = tally_of(map(at, left), START) == tally_of(map(at, occurrences), START)
    assert same == (Counter(left) == Counter(occurrences))


@dataclass
class World:
    """What there is of a schedule."""

    versions: list[Version]
    needed_from: datetime | None = None
    rows: list[Row] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)
    overdue_before: datetime = SINCE

    def by_rows(self) -> tuple[dict[str, Counts], list[Finding]]:
        expected = expected_of(self.versions, self.needed_from, SINCE, UNTIL, self.overdue_before)
        return check_rows("cron_x", expected, self.stretches, self._seen)

    def by_sums(self) -> dict[str, Counts] | None:
        expected = expected_of(self.versions, self.needed_from, SINCE, UNTIL, self.overdue_before)
        runs = [row for row in self._seen if row.outcome is not None]
        enqueued = [row for row in runs if row.outcome == "enqueued"]
        ticks = [row for row in self._seen if row.outcome is None]
        ledger = Ledger(
            tally_of([row.scheduled_for for row in runs], SINCE),
            len(enqueued),
            sum(row.outcome == "missed" for row in runs),
            sum(row.late for row in enqueued),
            tally_of([row.scheduled_for for row in ticks], SINCE),
            sum(row.late for row in ticks),
            tuple(self.stretches),
        )
        return check_sums(expected, ledger, SINCE)

    @property
    def _seen(self) -> list[Row]:
        return [row for row in self.rows if SINCE <= row.scheduled_for < UNTIL]


OUTCOMES = ("enqueued", "enqueued", "enqueued", "missed", "overlapped", "failed", "expired", "disabled", None)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """All is as it should be: each occurrence before the cursor has a row, or is in a stretch of its version."""
    versions = draw(histories())
    needed_from = draw(maybe)
    world = World(versions, needed_from, overdue_before=at(draw(moments)))
    current = versions[-1]
    stretch: list[tuple[datetime, Version]] = []
    for moment, one in sorted(expected_one_by_one(versions).items()):
        if one is current and needed_from is not None and moment >= needed_from:
            continue
        if draw(st.integers(0, 3)) == 0 and (not stretch or stretch[-1][1] is one):
            stretch.append((moment, one))
            continue
        _close(world, stretch)
        origin = draw(st.sampled_from(["schedule", "schedule", "backfill"]))
        world.rows.append(Row(moment, origin, draw(st.sampled_from(OUTCOMES)), draw(st.booleans())))
    _close(world, stretch)
    return world


def _close(world: World, stretch: list[tuple[datetime, Version]]) -> None:
    if len(stretch) > 1:
        world.stretches.append(Stretch(stretch[0][0], stretch[-1][0], stretch[0][1].version))
    elif stretch:
        world.rows.append(Row(stretch[0][0], "schedule", "missed", late=False))
    stretch.clear()


def total_of(by_queue: dict[str, Counts]) -> Counts:
    return Counts.sum(by_queue.values())


@given(worlds())
def test_sums_and_rows_agree_where_all_is_well(world: World) -> None:
    counts, findings = world.by_rows()
    total = total_of(counts)
    assert findings == []
    assert total.expected == total.enqueued + total.explained + total.pending
    expected = {moment: one for moment, one in expected_one_by_one(world.versions).items() if SINCE <= moment < UNTIL}
    assert {queue: one.expected for queue, one in counts.items()} == Counter(
        one.queue_name for one in expected.values()
    )
    ended = [row for row in world._seen if row.outcome == "enqueued"]
    assert (total.enqueued, total.late) == (len(ended), sum(row.late for row in ended))
    overdue = [row for row in world._seen if row.outcome is None and row.late]
    left = [
        moment
        for moment, one in expected.items()
        if one is world.versions[-1] and world.needed_from is not None and moment >= world.needed_from
    ]
    assert total.overdue == len(overdue) + sum(moment < world.overdue_before for moment in left)
    by_sums = world.by_sums()
    if by_sums is None:  # only because there are two queues
        assert len({one.queue_name for one in world.versions}) > 1
    else:
        assert asdict(total_of(by_sums)) == asdict(total)


@given(worlds(), st.data())
def test_what_is_removed_or_doubled_is_named_exactly(world: World, data: st.DataObject) -> None:
    seen = world._seen
    if not seen:
        return
    removed = data.draw(st.sets(st.sampled_from(range(len(seen))), min_size=0, max_size=3))
    doubled = data.draw(st.sets(st.sampled_from(range(len(seen))), min_size=0, max_size=3)) - removed
    before, _ = world.by_rows()
    world.rows = [row for number, row in enumerate(seen) if number not in removed]
    world.rows += [Row(seen[number].scheduled_for, "schedule", None, late=False) for number in doubled]
    counts, findings = world.by_rows()
    total = total_of(counts)
    assert total.expected == total_of(before).expected
    assert total.expected == total.enqueued + total.explained + total.pending + total.unexplained
    named = {(finding.kind, finding.scheduled_for) for finding in findings}
    assert named == {("unexplained", seen[number].scheduled_for) for number in removed} | {
        ("duplicate", seen[number].scheduled_for) for number in doubled
    }
    assert (total.unexplained, total.duplicate) == (len(removed), len(doubled))
    if (removed or doubled) and len(removed) < 3:
        assert world.by_sums() is None


ONE = [version(1, -1, every(10))]  # at 20, 30 and 40


def run(second: float, outcome: str | None = "enqueued", origin: str = "schedule") -> Row:
    return Row(at(second), origin, outcome, late=False)


ALL = [run(20), run(30), run(40)]


@pytest.mark.parametrize(
    ("rows", "stretches", "finding"),
    [
        ([run(20), run(40)], [], (30, "unexplained", NOT_DEALT_WITH)),
        ([*ALL, run(30, None)], [], (30, "duplicate", STILL_PENDING)),
        ([*ALL, run(35)], [], (35, "duplicate", UNEXPECTED)),
        (ALL, [Stretch(at(30), at(40), 1)], (30, "duplicate", IN_STRETCH)),
        ([run(20)], [Stretch(at(30), at(40), 1), Stretch(at(30), at(40), 1)], (30, "duplicate", IN_STRETCHES)),
        ([run(20), run(30), run(40, None), run(40, None)], [], (40, "duplicate", SEVERAL_TICKS)),
    ],
)
def test_each_finding_says_why(rows: list[Row], stretches: list[Stretch], finding: tuple[int, str, str]) -> None:
    world = World(ONE, rows=rows, stretches=stretches)
    assert world.by_sums() is None
    _, findings = world.by_rows()
    assert (findings[0].schedule_id, findings[0].scheduled_for) == ("cron_x", at(finding[0]))
    assert (findings[0].kind, findings[0].why) == finding[1:]


@pytest.mark.parametrize(
    ("row", "stretches", "enqueued"),
    [
        (run(35, "disabled"), [], 3),  # dropped by disabling
        (run(35, origin="backfill"), [], 3),  # of a time in which it was disabled
        (run(35, "failed"), [], 3),
    ],
)
def test_what_lies_beside_the_expected_and_did_not_fire_by_itself_is_fine(
    row: Row, stretches: list[Stretch], enqueued: int
) -> None:
    counts, findings = World(ONE, rows=[*ALL, row], stretches=stretches).by_rows()
    assert findings == []
    assert total_of(counts).enqueued == enqueued
    assert total_of(counts).expected == 3


@pytest.mark.parametrize(("outcome", "enqueued", "pending"), [("enqueued", 2, 0), (None, 1, 1)])
def test_a_backfill_makes_up_for_a_part_of_a_stretch(outcome: str | None, enqueued: int, pending: int) -> None:
    world = World(ONE, rows=[run(20), run(30, outcome, "backfill")], stretches=[Stretch(at(30), at(40), 1)])
    counts, findings = world.by_rows()
    total = total_of(counts)
    assert findings == []
    assert (total.enqueued, total.pending, total.missed) == (enqueued, pending, 3 - enqueued - pending)


def test_what_no_manager_has_dealt_with_waits() -> None:
    world = World(ONE, needed_from=at(31), rows=[run(20), run(30, "overlapped")])
    assert world.by_sums() == {"queue": Counts(expected=3, enqueued=1, explained=1, pending=1)}
    counts, findings = world.by_rows()
    assert (counts, findings) == (world.by_sums(), [])


def test_what_waits_for_too_long_is_overdue() -> None:
    rows = [run(20, None)._replace(late=True), run(30, None)]
    world = World(ONE, needed_from=at(31), rows=rows, overdue_before=at(41))
    assert world.by_sums() == {"queue": Counts(expected=3, pending=3, overdue=2)}
    assert world.by_rows() == (world.by_sums(), [])
    world.overdue_before = at(40)
    assert world.by_sums() == {"queue": Counts(expected=3, pending=3, overdue=1)}
    assert world.by_rows() == (world.by_sums(), [])


def test_the_cursor_says_nothing_of_versions_before() -> None:
    versions = [version(1, -1, every(10)), version(2, 35, every(10))]
    _, findings = World(versions, needed_from=at(10), rows=[]).by_rows()
    assert [finding.scheduled_for for finding in findings] == [at(20), at(30)]


def test_after_a_change_of_the_queue_each_queue_has_its_own() -> None:
    versions = [version(1, -1, every(10)), version(2, 35, every(10), queue_name="other")]
    world = World(versions, rows=ALL)
    assert world.by_sums() is None
    counts, findings = world.by_rows()
    assert findings == []
    assert counts == {"queue": Counts(expected=2, enqueued=2), "other": Counts(expected=1, enqueued=1)}


def test_sums_add_up() -> None:
    first, second = Tally(1, 5, 25), Tally(2, 7, 29)
    assert first.plus(second).minus(first) == second
    assert first.minus(first) == NONE
