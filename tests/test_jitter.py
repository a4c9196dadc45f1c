"""Jitter: a hash of schedule and occurrence, the same in Python and in SQL, that spreads evenly and keeps the order."""

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cron_ticks.checks import LATEST
from cron_ticks.database import Database
from cron_ticks.occurrences import EPOCH, MICROSECOND, jitter_offset
from cron_ticks.repository import CronRepository
from cron_ticks.rows import Planned
from cron_ticks.schedules import Jitter, Schedule, define_schedule
from cron_ticks.settings import Settings
from support.processes import Processes

START = datetime(2026, 1, 1, tzinfo=UTC)
ZERO = timedelta(0)
BINS = 20
# Of chi-square with 19 degrees of freedom, one value in a million lies above it.
CHI_SQUARE_BOUND = 65.4

ids = st.text(min_size=1, max_size=40).filter(lambda text: "\0" not in text and text.isprintable())
moments = st.datetimes(
    min_value=datetime(1970, 1, 1),  # noqa: DTZ001 - hypothesis wants naive bounds
    max_value=datetime(2400, 1, 1),  # noqa: DTZ001
    timezones=st.just(UTC),
)
amplitudes = st.timedeltas(min_value=MICROSECOND, max_value=timedelta(seconds=30))
intervals = st.timedeltas(min_value=timedelta(seconds=1), max_value=timedelta(days=40))
jitters: st.SearchStrategy[Jitter] = st.one_of(
    st.just("default"), st.floats(0, 0.5), st.timedeltas(min_value=ZERO, max_value=timedelta(seconds=0.5))
)


def schedule_of(schedule_id: str, anchor: datetime, **options: Any) -> Schedule:
    """As the database would have it."""
    definition = define_schedule("queue", **options)
    return Schedule(
        id=schedule_id,
        workspace_id=None,
        name="queue",
        queue_name="queue",
        payload={},
        interval=definition.interval,
        anchor_at=anchor,
        jitter=definition.jitter,
        jitter_ratio=definition.jitter_ratio,
        priority="normal",
        starts_at=definition.starts_at,
        ends_at=None,
        max_runs=None,
        sink="queue",
        delivery="exactly_once",
        overlap="allow",
        max_attempts=None,
        max_age=None,
        backoff=None,
        catch_up="latest",
        misfire_grace=None,
        cron=definition.cron,
        timezone=definition.timezone,
        zone=definition.zone,
        dst_gap=definition.dst_gap,
        dst_fold=definition.dst_fold,
        owner=definition.owner,
        enabled=True,
        version=1,
        error=None,
        error_at=None,
        created_at=anchor,
        updated_at=anchor,
    )


schedules = st.builds(
    schedule_of,
    ids,
    moments,
    every=intervals,
    jitter=jitters,
    starts_at=st.none() | moments,
)


def chi_square(offsets: Iterable[timedelta], amplitude: timedelta) -> float:
    """How uneven the offsets are over bins of equal width."""
    bins = Counter((offset + amplitude) * BINS // (2 * amplitude) for offset in offsets)
    assert set(bins) <= set(range(BINS))
    expected = bins.total() / BINS
    return sum((bins[number] - expected) ** 2 / expected for number in range(BINS))


# The function


@given(ids, moments, amplitudes)
def test_an_offset_lies_within_the_amplitude(schedule_id: str, occurrence: datetime, amplitude: timedelta) -> None:
    assert -amplitude <= jitter_offset(schedule_id, occurrence, amplitude) < amplitude


@given(ids, moments, amplitudes)
def test_an_offset_is_the_hash_that_is_documented(schedule_id: str, occurrence: datetime, amplitude: timedelta) -> None:
    """Written again, so that nobody changes it: ticks that are made already must keep their time."""
    microseconds = (occurrence - EPOCH) // MICROSECOND
    number = int(hashlib.sha256(f"{schedule_id} {microseconds}".encode()).hexdigest()[:15], 16)
    width = amplitude // MICROSECOND
    assert jitter_offset(schedule_id, occurrence, amplitude) // MICROSECOND == number % (2 * width) - width


@given(ids, moments, amplitudes)
def test_an_offset_does_not_depend_on_the_zone(schedule_id: str, occurrence: datetime, amplitude: timedelta) -> None:
    elsewhere = occurrence.astimezone(timezone(timedelta(hours=5, minutes=30)))
    assert jitter_offset(schedule_id, elsewhere, amplitude) == jitter_offset(schedule_id, occurrence, amplitude)


@given(ids, moments)
def test_without_an_amplitude_nothing_moves(schedule_id: str, occurrence: datetime) -> None:
    assert jitter_offset(schedule_id, occurrence, ZERO) == ZERO


# A schedule's ticks


@given(schedules, st.integers(0, 10_000))
def test_ticks_keep_the_order_of_their_occurrences(schedule: Schedule, step: int) -> None:
    """Up to the largest ratio, and so none is ever due after the next occurrence's own tick."""
    assert schedule.interval is not None
    first = schedule.timetable.occurrence_at_or_after(schedule.anchor_at + step * schedule.interval)
    assert first is not None
    second = first + schedule.interval
    assert schedule.execute_at(first) < schedule.execute_at(second)


@given(schedules, st.integers(0, 10_000))
def test_no_tick_is_due_after_the_next_occurrence_or_before_the_one_before(schedule: Schedule, step: int) -> None:
    assert schedule.interval is not None
    occurrence = schedule.timetable.occurrence_at_or_after(schedule.anchor_at + step * schedule.interval)
    assert occurrence is not None
    execute_at = schedule.execute_at(occurrence)
    assert occurrence - schedule.interval < execute_at < occurrence + schedule.interval
    assert occurrence - schedule.jitter <= execute_at < occurrence + max(schedule.jitter, MICROSECOND)


@given(schedules)
def test_the_first_occurrence_does_not_move(schedule: Schedule) -> None:
    assert schedule.execute_at(schedule.anchor_at) == schedule.anchor_at


@given(schedules, st.integers(0, 100))
def test_no_tick_is_due_before_the_schedule_starts(schedule: Schedule, step: int) -> None:
    assert schedule.interval is not None
    first = schedule.timetable.occurrence_at_or_after(schedule.anchor_at)
    assert first is not None
    occurrence = first + step * schedule.interval
    assert schedule.starts_at is None or schedule.execute_at(occurrence) >= schedule.starts_at


@given(moments)
def test_a_one_off_does_not_move(at: datetime) -> None:
    assert schedule_of("cron_x", at, at=at).execute_at(at) == at


def test_an_amplitude_is_the_ratio_of_the_interval_up_to_the_cap() -> None:
    amplitudes_of: dict[tuple[float, Any], float] = {
        (10, "default"): 1,
        (10, 0.5): 5,
        (10, 0.25): 2.5,
        (10, 0): 0,
        (10, None): 0,
        (10, timedelta(seconds=3)): 3,
        (300, "default"): 30,
        (301, "default"): 30,
        (604_800, 0.5): 30,
        (604_800, timedelta(seconds=30)): 30,
    }
    for (every, jitter), expected in amplitudes_of.items():
        assert define_schedule("q", every=every, jitter=jitter).jitter == timedelta(seconds=expected)
    narrow = define_schedule("q", every=300, jitter_cap=timedelta(seconds=7))
    assert narrow.jitter == timedelta(seconds=7)


# Evenness


@pytest.mark.parametrize("amplitude", [timedelta(seconds=30), timedelta(seconds=0.1), timedelta(microseconds=1000)])
def test_ten_thousand_schedules_of_one_interval_spread_evenly(amplitude: timedelta) -> None:
    """The same ids in each run: what passes once passes always."""
    offsets = [jitter_offset(f"cron_{number:026}", START, amplitude) for number in range(10_000)]
    assert chi_square(offsets, amplitude) < CHI_SQUARE_BOUND


def test_the_occurrences_of_one_schedule_spread_evenly() -> None:
    amplitude = timedelta(seconds=30)
    offsets = [jitter_offset("cron_x", START + number * timedelta(minutes=5), amplitude) for number in range(10_000)]
    assert chi_square(offsets, amplitude) < CHI_SQUARE_BOUND


def test_what_is_uneven_is_found_out() -> None:
    """The bound is worth something: a slope of a tenth from end to end does not pass."""
    amplitude = timedelta(seconds=30)
    spread = [jitter_offset(f"cron_{number}", START, amplitude) for number in range(10_000)]
    leaning = [offset for number, offset in enumerate(spread) if number % 5 or offset < ZERO]
    assert chi_square(leaning, amplitude) > CHI_SQUARE_BOUND


# The database


@pytest.mark.sql
async def test_the_function_in_the_database_is_the_same(database: Database) -> None:
    random = Random(7)  # noqa: S311 - the same values in each run
    letters = "abcXYZ019_-. äß漢字🎈"
    rows = [
        (
            "".join(random.choices(letters, k=random.randint(1, 40))),
            EPOCH + timedelta(microseconds=random.randrange((LATEST - EPOCH) // MICROSECOND)),
            random.choice((0, 1, 2, 999_999, 30_000_000, random.randrange(10**7), random.randrange(10**12))),
        )
        for _ in range(1000)
    ]
    found = await database.fetch(
        """SELECT {schema}.cron_jitter(id, occurrence, amplitude) AS moved
        FROM unnest($1::text[], $2::timestamptz[], $3::bigint[]) WITH ORDINALITY AS row (id, occurrence, amplitude, nr)
        ORDER BY nr""",
        *(list(column) for column in zip(*rows, strict=True)),
    )
    expected = [jitter_offset(name, at, timedelta(microseconds=amplitude)) for name, at, amplitude in rows]
    assert [row["moved"] for row in found] == expected


@pytest.mark.sql
@pytest.mark.parametrize("zone", ["Asia/Kolkata", "America/New_York"])
async def test_the_function_in_the_database_does_not_depend_on_the_session(connection: Any, zone: str) -> None:
    """An occurrence in the night on which clocks change, in a session that shows it in other words."""
    occurrence = datetime(2026, 3, 8, 7, 0, 0, 1, tzinfo=UTC)
    await connection.execute(f"SET timezone = '{zone}'; SET datestyle = 'German'; SET intervalstyle = 'iso_8601'")
    moved = await connection.fetchval("SELECT cron_jitter('cron_x', $1, 5000000)", occurrence)
    assert moved == jitter_offset("cron_x", occurrence, timedelta(seconds=5))


@pytest.mark.sql
async def test_ticks_are_made_for_the_time_that_python_computes(
    database: Database, settings: Settings, connection: Any
) -> None:
    repository = CronRepository(database, settings)
    made: dict[str, Schedule] = {}
    asked: tuple[Jitter, ...] = ("default", 0.5, 0.01, None, timedelta(milliseconds=1))
    for number, jitter in enumerate(asked):
        for every in (1, 7.5, 30):
            definition = define_schedule("queue", name=f"{number} {every}", every=every, jitter=jitter)
            schedule = (await repository.save_schedule(definition, now=START)).schedule
            made[schedule.id] = schedule
    rows = await connection.fetch("SELECT schedule_id, scheduled_for, execute_at, due_at FROM cron_ticks")
    assert len(rows) == 5 * (60 + 8 + 2)
    for row in rows:
        assert row["execute_at"] == made[row["schedule_id"]].execute_at(row["scheduled_for"])
        assert row["due_at"] == row["execute_at"]


@pytest.mark.sql
async def test_ticks_around_a_later_start_are_made_for_the_time_that_python_computes(
    database: Database, settings: Settings, connection: Any
) -> None:
    """An edit keeps the phase, so the first occurrence after the start may be moved to before it: there it is cut."""
    repository = CronRepository(database, settings)
    cut = 0
    for number in range(40):
        name, starts_at = f"n{number}", START + timedelta(seconds=48)
        first = define_schedule("queue", name=name, every=10, jitter=0.5)
        later = define_schedule("queue", name=name, every=10, jitter=0.5, starts_at=starts_at)
        await repository.save_schedule(first, now=START)
        schedule = (await repository.save_schedule(later, now=START + timedelta(seconds=1))).schedule
        rows = await connection.fetch(
            "SELECT scheduled_for, execute_at, due_at FROM cron_ticks WHERE schedule_id = $1 AND scheduled_for > $2",
            schedule.id,
            START,
        )
        assert [row["scheduled_for"] for row in rows] == [START + timedelta(seconds=second) for second in (50, 60)]
        assert all(row["execute_at"] == row["due_at"] == schedule.execute_at(row["scheduled_for"]) for row in rows)
        cut += sum(row["execute_at"] == starts_at for row in rows)
    assert 0 < cut < 40


@pytest.mark.sql
async def test_ticks_of_many_schedules_spread_evenly(database: Database, settings: Settings, connection: Any) -> None:
    """What a manager's pass writes. Ids and times are given, so that the outcome is the same in each run."""
    amplitude, count = timedelta(seconds=30), 3000
    await connection.execute(
        """INSERT INTO cron_schedules (id, name, queue_name, payload, interval_us, anchor_at, jitter_us, created_at,
            updated_at)
        SELECT 'cron_' || number, number, 'queue', '{}', 300000000, $2::timestamptz - interval '1 hour', $3, $2, $2
        FROM generate_series(1, $1::int) AS number""",
        count,
        START,
        amplitude // MICROSECOND,
    )
    await connection.execute(
        "INSERT INTO cron_schedule_cursors (schedule_id, next_tick_needed_at) SELECT id, $1 FROM cron_schedules", START
    )
    repository = CronRepository(database, settings)
    async with database.transaction() as chosen:
        taken = await repository.find_schedules_needing_ticks(limit=count, connection=chosen, now=START)
        await repository.create_ticks([Planned(found, repository.plan(found)) for found in taken], connection=chosen)
    rows = await connection.fetch("SELECT scheduled_for, execute_at - scheduled_for AS moved FROM cron_ticks")
    assert [row["scheduled_for"] for row in rows] == [START] * count
    assert chi_square((row["moved"] for row in rows), amplitude) < CHI_SQUARE_BOUND


async def test_the_histogram_is_even(processes: Processes) -> None:
    program = Path(__file__).parent.parent / "benchmarks" / "jitter_histogram.py"
    running = await processes.start(sys.executable, str(program), "--schedules", "300", "--bins", "6", "--json")
    report = json.loads(await running.output())
    assert await running.wait() == 0, running.errors
    assert (report["schedules"], report["expected_per_bin"]) == (300, 50)
    assert sum(found["ticks"] for found in report["bins"]) == 300
    assert (report["bins"][0]["from_seconds"], report["bins"][-1]["to_seconds"]) == (-30, 30)
    assert report["chi_square"] < CHI_SQUARE_BOUND
