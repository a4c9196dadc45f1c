"""After an outage: what each policy makes up, what the ledger says of the rest, and in which order it goes out."""

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from structlog.testing import capture_logs

from cron_ticks.database import Database
from cron_ticks.occurrences import CatchUp, MakingUp
from cron_ticks.rows import FiredTicks
from cron_ticks.schedules import CATCH_UPS, Schedule
from support.moved_clock import Engine

pytestmark = pytest.mark.sql

START = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
TEN = 10 * SECOND


@pytest.fixture
def engine(database: Database) -> Engine:
    return Engine(database, START)


async def runs(connection: Any, schedule_id: str) -> list[tuple[Any, ...]]:
    """Outcome, the occurrences' numbers in steps of ten seconds from START, how many, and the reason."""
    rows = await connection.fetch(
        """SELECT outcome, missed_since, scheduled_for, occurrences, reason FROM cron_runs
        WHERE schedule_id = $1 ORDER BY scheduled_for""",
        schedule_id,
    )
    return [
        (
            row["outcome"],
            None if row["missed_since"] is None else (row["missed_since"] - START) // TEN,
            (row["scheduled_for"] - START) // TEN,
            row["occurrences"],
            row["reason"],
        )
        for row in rows
    ]


async def outage(engine: Engine, length: timedelta) -> list[FiredTicks]:
    """Nobody does anything for so long; then there is one pass of each."""
    engine.now += length
    return await engine.turn()


def numbers(fired: list[FiredTicks], schedule: Schedule) -> list[int]:
    return sorted((tick.scheduled_for - START) // TEN for tick in fired if tick.schedule_id == schedule.id)


# Ticks 0 to 5 are made by the declaration, 0 fires; then an hour passes. 354 to 360 are no more than a minute late:
# they fire as if nothing had been. So 1 to 5 are late ticks, and 6 to 353 late occurrences without one.


@pytest.mark.parametrize(
    ("policy", "made_up", "last_missed"), [("skip", [], 353), ("latest", [353], 352), ("all", [*range(254, 354)], 253)]
)
async def test_each_policy_makes_up_what_it_says(
    engine: Engine,
    connection: Any,
    policy: CatchUp,
    made_up: list[int],
    last_missed: int,
) -> None:
    schedule = await engine.declare(every=10, jitter=None, catch_up=policy)
    assert numbers(await engine.fire(), schedule) == [0]
    fired = await outage(engine, HOUR)
    assert numbers(fired, schedule) == [*made_up, *range(354, 361)]
    reason = MakingUp(policy).reason
    found = [run for run in await runs(connection, schedule.id) if run[0] == "missed"]
    assert found == [
        *(("missed", None, number, 1, reason) for number in range(1, 6)),
        ("missed", 6, last_missed, last_missed - 5, reason),
    ]
    assert policy in reason or "latest" in reason
    assert await engine.turn() == []


async def test_spread_is_all_but_paced(engine: Engine, connection: Any) -> None:
    schedule = await engine.declare(every=10, jitter=None, catch_up="spread")
    await engine.fire()
    recovered = START + HOUR
    assert numbers(await outage(engine, HOUR), schedule) == list(range(354, 361))
    due = await connection.fetch("SELECT due_at, scheduled_for FROM cron_ticks WHERE turn = 2 ORDER BY scheduled_for")
    assert [(row["scheduled_for"] - START) // TEN for row in due] == list(range(254, 354))
    parts = [(row["due_at"] - recovered) // (3 * SECOND) for row in due]
    assert parts == list(range(100))  # 300 s in a hundred parts
    fired = await engine.run_until(recovered + 5 * MINUTE, step=TEN)
    made_up = [tick for tick in fired if tick.scheduled_for < recovered - MINUTE]
    assert numbers(made_up, schedule) == list(range(254, 354))
    assert [tick.scheduled_for for tick in made_up] == sorted(tick.scheduled_for for tick in made_up)
    assert max(Counter(tick.lateness // HOUR for tick in made_up)) == 0
    assert min(tick.lateness for tick in made_up) > MINUTE  # from when it should have been


async def test_late_ticks_are_decided_about_when_nothing_else_is_late(engine: Engine, connection: Any) -> None:
    """Managers were there all the time, tickers were not."""
    schedules = {
        policy: await engine.declare(every=10, jitter=None, name=policy, catch_up=policy) for policy in CATCH_UPS
    }
    for _ in range(30):
        engine.now += TEN
        await engine.manager.run_once()
    fired = await engine.fire()
    on_time = list(range(24, 31))
    assert numbers(fired, schedules["skip"]) == on_time
    assert numbers(fired, schedules["latest"]) == [23, *on_time]
    assert numbers(fired, schedules["all"]) == list(range(31))
    expected: dict[CatchUp, int] = {"skip": 24, "latest": 23, "all": 0, "spread": 0}
    for policy, missed in expected.items():
        found = await runs(connection, schedules[policy].id)
        assert sum(run[3] for run in found if run[0] == "missed") == missed
        assert all(run[1] is None for run in found)  # each tick has its own row
    assert numbers(await engine.run_until(engine.now + 300 * SECOND, step=TEN), schedules["spread"])[:24] == list(
        range(24)
    )


async def test_a_ticker_that_comes_before_any_manager_decides_about_both(engine: Engine, connection: Any) -> None:
    """The latest of late ticks and of occurrences without one is made up, whoever comes first."""
    schedule = await engine.declare(every=10, jitter=None)
    await engine.fire()
    engine.now += HOUR
    assert await engine.repository.late_schedules("queue", limit=10) == [schedule.id]
    assert numbers(await engine.fire(), schedule) == [353, *range(354, 361)]
    await engine.manager.run_once()
    assert await engine.fire() == []
    assert sum(run[3] for run in await runs(connection, schedule.id)) == 361


async def test_what_was_made_up_before_counts_too(engine: Engine, connection: Any) -> None:
    """A second outage before it could fire: still only the latest."""
    schedule = await engine.declare(every=10, jitter=None)
    await engine.fire()
    engine.now += HOUR
    await engine.manager.run_once()
    assert await connection.fetchval("SELECT count(*) FROM cron_ticks WHERE turn = 2") == 1
    fired = await outage(engine, HOUR)
    assert numbers(fired, schedule) == list(range(713, 721))
    missed = [run for run in await runs(connection, schedule.id) if run[0] == "missed"]
    assert sum(run[3] for run in missed) + len(fired) + 1 == 721


@pytest.mark.parametrize("policy", ["latest", "all", "spread"])
async def test_nothing_older_than_the_limit_is_made_up(database: Database, connection: Any, policy: CatchUp) -> None:
    engine = Engine(database, START, catch_up_max_age_seconds=600)
    daily = await engine.declare(cron="0 12 * * *", catch_up=policy, name="daily")
    often = await engine.declare(every=10, jitter=None, catch_up=policy, name="often")
    await engine.fire()
    fired = await outage(engine, timedelta(days=1, minutes=11))
    fired += await engine.run_until(engine.now + 5 * MINUTE, step=TEN)
    assert numbers(fired, daily) == []
    assert [run[0] for run in await runs(connection, daily.id)][-1] == "missed"
    oldest = START + timedelta(days=1, minutes=1)
    assert min(tick.scheduled_for for tick in fired if tick.schedule_id == often.id) >= oldest


async def test_no_more_are_made_up_than_the_limit_says(database: Database) -> None:
    engine = Engine(database, START, catch_up_max_count=3)
    schedule = await engine.declare(every=10, jitter=None, catch_up="all")
    await engine.fire()
    assert numbers(await outage(engine, HOUR), schedule) == [351, 352, 353, *range(354, 361)]


async def test_what_is_due_now_goes_before_what_is_caught_up_with(engine: Engine) -> None:
    late = await engine.declare(every=10, jitter=None, catch_up="all", priority="urgent", name="late")
    await engine.fire()
    engine.now += HOUR
    await engine.declare(every=10, jitter=None, priority="low", name="fresh")
    fired = await engine.turn()
    places = [tick.schedule_id == late.id and tick.scheduled_for < engine.now - MINUTE for tick in fired]
    assert places == sorted(places)
    assert sum(places) == 100


async def test_a_late_trigger_fires_whatever_the_policy_says(engine: Engine) -> None:
    schedule = await engine.declare(every=3600, jitter=None, catch_up="skip", misfire_grace=5)
    await engine.fire()
    triggered = await engine.repository.trigger(schedule.id, now=engine.now + SECOND)
    fired = await outage(engine, timedelta(minutes=30))
    assert [tick.scheduled_for for tick in fired] == [triggered.scheduled_for]
    assert [tick.outcome for tick in fired] == ["enqueued"]


async def test_what_waits_for_the_end_of_a_message_is_not_missed_by_an_outage(engine: Engine, connection: Any) -> None:
    schedule = await engine.declare(every=10, jitter=None, overlap="queue_one", catch_up="skip")
    await engine.turn()
    engine.now += TEN
    assert [tick.outcome for tick in await engine.turn()] == ["waiting"]
    await connection.execute("UPDATE queue_messages SET completed_at = now()")
    fired = await outage(engine, HOUR)
    entered = [tick for tick in fired if tick.outcome == "enqueued"]
    assert [tick.scheduled_for for tick in entered][-1] in {START + TEN, *(tick.scheduled_for for tick in fired)}
    assert START + TEN in {tick.scheduled_for for tick in fired}
    assert schedule.id == entered[0].schedule_id


async def test_a_disabled_schedules_late_ticks_are_decided_about_too(engine: Engine, connection: Any) -> None:
    schedule = await engine.declare(every=10, jitter=None)
    await engine.repository.disable_schedule(schedule.id, now=engine.now)
    fired = await outage(engine, HOUR)
    assert numbers(fired, schedule) == [5]
    assert [run[0] for run in await runs(connection, schedule.id)] == ["missed"] * 5 + ["enqueued"]


async def test_a_broken_schedules_late_ticks_are_decided_about_too(engine: Engine, connection: Any) -> None:
    schedule = await engine.declare(every=10, jitter=None)
    await connection.execute("UPDATE cron_schedule_cursors SET broken = true")
    before = await connection.fetchrow("SELECT * FROM cron_schedule_cursors")
    assert numbers(await outage(engine, HOUR), schedule) == [5]
    assert await connection.fetchrow("SELECT * FROM cron_schedule_cursors") == before


async def test_late_ticks_without_a_schedule_hold_up_nobody(engine: Engine, connection: Any) -> None:
    kept = await engine.declare(every=10, jitter=None, name="kept")
    gone = await engine.declare(every=10, jitter=None, name="gone")
    await connection.execute("DELETE FROM cron_schedules WHERE id = $1", gone.id)
    engine.now += HOUR
    await engine.manager.catch_up("queue")
    await engine.manager.catch_up("queue")
    assert await connection.fetchval("SELECT count(*) FROM cron_ticks WHERE schedule_id = $1", gone.id) == 0
    assert numbers(await engine.fire(), kept) == [353, *range(354, 361)]


async def test_a_long_queue_of_late_ticks_is_worked_off_a_part_at_a_time(
    engine: Engine, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a sink that nobody served for a week: the end is the same as if all were decided about at once."""
    monkeypatch.setattr("cron_ticks.generation_repository.LATE_AT_ONCE", 7)
    engine = Engine(engine.repository.database, START, catch_up_max_count=3)
    schedules: dict[CatchUp, Schedule] = {
        policy: await engine.declare(every=10, jitter=None, name=policy, catch_up=policy)
        for policy in ("skip", "latest", "all")
    }
    for _ in range(60):
        engine.now += TEN
        await engine.manager.run_once()
    fired = await engine.fire()
    on_time = list(range(54, 61))
    assert numbers(fired, schedules["skip"]) == on_time
    assert numbers(fired, schedules["latest"]) == [53, *on_time]
    assert numbers(fired, schedules["all"]) == [51, 52, 53, *on_time]
    for schedule in schedules.values():
        assert sum(run[3] for run in await runs(connection, schedule.id)) == 61


async def test_what_is_due_now_does_not_wait_until_all_is_caught_up_with(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cron_ticks.schedule_manager.CATCH_UP_SECONDS", 0.0)
    engine = Engine(engine.repository.database, START, manager_batch_size=2)
    for number in range(6):
        await engine.declare(every=10, jitter=None, name=f"n{number}")
    engine.now += HOUR
    await engine.manager.catch_up("queue")
    assert len(await engine.repository.late_schedules("queue", limit=100)) == 4
    await engine.manager.catch_up("queue")
    assert len(await engine.repository.late_schedules("queue", limit=100)) == 2


@pytest.mark.parametrize(("ago", "policy"), [(25 * HOUR, "latest"), (2 * MINUTE, "skip"), (400 * 24 * HOUR, "all")])
async def test_a_one_off_that_is_declared_after_its_time_fires(engine: Engine, ago: timedelta, policy: CatchUp) -> None:
    """It was asked for now: that is no outage."""
    await engine.declare(at=START - ago, catch_up=policy)
    assert [tick.outcome for tick in await engine.turn()] == ["enqueued"]


async def test_an_edit_after_an_outage_records_what_it_leaves_behind(engine: Engine, connection: Any) -> None:
    schedule = await engine.declare(every=10, jitter=None)
    await engine.fire()
    engine.now += HOUR
    saved = await engine.edit(schedule.id, payload={"new": True})
    assert saved.missed == 347  # 6 to 352: the latest is made up
    fired = await engine.turn()
    assert numbers(fired, schedule) == [353, *range(354, 361)]
    found = await runs(connection, schedule.id)
    assert sum(run[3] for run in found) == 361
    assert Counter(run[0] for run in found) == {"enqueued": 9, "missed": 6}


async def test_deleting_after_an_outage_explains_everything(engine: Engine, connection: Any) -> None:
    schedule = await engine.declare(every=10, jitter=None)
    await engine.fire()
    engine.now += HOUR
    await engine.repository.delete_schedule(schedule.id, now=engine.now)
    found = await runs(connection, schedule.id)
    assert sum(run[3] for run in found) == 361
    assert Counter(run[0] for run in found) == {"enqueued": 1, "disabled": 13, "missed": 1}


async def test_a_stretch_does_not_take_the_place_of_another_run(engine: Engine, connection: Any) -> None:
    """Its last occurrence has a row already: the stretch ends before it."""
    schedule = await engine.declare(every=10, jitter=None, catch_up="skip")
    await engine.fire()
    await connection.execute(
        """INSERT INTO cron_runs (schedule_id, scheduled_for, version, origin, outcome, ended_at, attempts)
        VALUES ($1, $2, 1, 'schedule', 'disabled', now(), 1)""",
        schedule.id,
        START + 353 * TEN,
    )
    await outage(engine, HOUR)
    [stretch] = [run for run in await runs(connection, schedule.id) if run[1] is not None]
    assert stretch[1:4] == (6, 352, 347)


async def test_a_missed_occurrence_of_long_ago_finds_its_day(engine: Engine, connection: Any) -> None:
    """The ledger has no partition for it: it is made."""
    schedule = await engine.declare(cron="0 0 1 * *", catch_up="skip")
    engine.now = START + timedelta(days=200)
    await engine.turn()
    assert await connection.fetchval("SELECT sum(occurrences) FROM cron_runs WHERE schedule_id = $1", schedule.id) == 6


async def test_what_is_missed_is_counted_and_logged(engine: Engine) -> None:
    schedule = await engine.declare(every=10, jitter=None)
    await engine.fire()
    with capture_logs() as logs:
        await outage(engine, HOUR)
    said = [line for line in logs if line["event"] == "occurrences_missed"]
    assert sum(line["missed"] for line in said) == 352
    assert {line["schedule_id"] for line in said} == {schedule.id}
    assert engine.metrics.registry.get_sample_value("cron_ticks_missed_total") == 352


# misfire_grace


async def test_a_tick_later_than_its_grace_is_missed(engine: Engine, connection: Any) -> None:
    schedule = await engine.declare(every=10, jitter=None, misfire_grace=5)
    await engine.fire()
    engine.now += 35 * SECOND
    fired = await engine.fire()
    assert [(tick.outcome, (tick.scheduled_for - START) // TEN) for tick in fired] == [
        ("missed", 1),
        ("missed", 2),
        ("enqueued", 3),
    ]
    assert [run for run in await runs(connection, schedule.id) if run[0] == "missed"] == [
        ("missed", None, 1, 1, "later than its misfire_grace"),
        ("missed", None, 2, 1, "later than its misfire_grace"),
    ]
    assert await connection.fetchval("SELECT count(*) FROM queue_messages") == 2


async def test_what_is_made_up_must_be_within_the_grace_too(engine: Engine, connection: Any) -> None:
    schedule = await engine.declare(every=10, jitter=None, catch_up="all", misfire_grace=120)
    await engine.fire()
    fired = await outage(engine, HOUR)
    assert numbers([tick for tick in fired if tick.passed], schedule) == list(range(348, 361))
    assert sum(run[3] for run in await runs(connection, schedule.id)) == 361


async def test_the_grace_is_over_for_what_waits_for_a_message(engine: Engine, connection: Any) -> None:
    """It was tried in time."""
    await engine.declare(every=10, jitter=None, misfire_grace=5, overlap="queue_one")
    await engine.fire()
    engine.now += TEN
    assert [tick.outcome for tick in await engine.fire()] == ["waiting"]
    await connection.execute("UPDATE queue_messages SET completed_at = now()")
    engine.now += 8 * SECOND
    assert [(tick.outcome, tick.scheduled_for) for tick in await engine.fire()] == [("enqueued", START + TEN)]


@pytest.mark.parametrize("overlap", ["skip", "queue_one"])
async def test_the_grace_holds_where_messages_must_not_overlap(engine: Engine, connection: Any, overlap: str) -> None:
    await engine.declare(every=10, jitter=None, misfire_grace=5, overlap=overlap, max_runs=2)
    engine.now += 8 * SECOND
    assert [tick.outcome for tick in await engine.fire()] == ["missed"]
    assert await connection.fetchval("SELECT count(*) FROM queue_messages") == 0
    engine.now += 2 * SECOND
    assert [tick.outcome for tick in await engine.fire()] == ["enqueued"]


async def test_jitter_does_not_use_up_the_grace(engine: Engine) -> None:
    """It counts from when a tick is due."""
    await engine.declare(every=100, jitter=0.3, misfire_grace=1)
    fired = await engine.run_until(START + 20 * 100 * SECOND, step=TEN)
    assert {tick.outcome for tick in fired} == {"enqueued"}


async def test_an_edit_of_the_grace_holds_for_ticks_that_are_made(engine: Engine, connection: Any) -> None:
    schedule = await engine.declare(every=10, jitter=None)
    await engine.edit(schedule.id, misfire_grace=5)
    rows = await connection.fetch(
        "SELECT fire_before - due_at AS grace FROM cron_ticks WHERE scheduled_for > $1", START
    )
    assert {row["grace"] for row in rows} == {5 * SECOND}
