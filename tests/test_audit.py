"""The audit against the real database: what the engine does is complete, and what is changed by hand is named."""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest

from cron_ticks import audit_repository
from cron_ticks.audit_repository import AuditRepository
from cron_ticks.audit_results import Audit, Counts, Finding
from cron_ticks.audits import IN_STRETCH, NOT_DEALT_WITH, STILL_PENDING, UNEXPECTED
from cron_ticks.cli.bench.audit_tables import WINDOW, fill, remove_by_hand
from cron_ticks.database import Database
from cron_ticks.errors import InvalidInputError, ScheduleNotFoundError
from cron_ticks.settings import Settings
from support.moved_clock import Engine
from token_queue import QueueManager
from token_queue.doubled import DOUBLED_OCCURRENCES, find_doubled

pytestmark = pytest.mark.sql

START = datetime(2026, 3, 1, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
STEP = 20 * SECOND  # between two passes of a manager


class AuditedEngine(Engine):
    """An engine with its audits, under the same clock."""

    def __init__(self, database: Database, instant: datetime) -> None:
        super().__init__(database, instant)
        self.audits = AuditRepository(database, self.settings, partial(find_doubled, database))

    async def audit(self, since: datetime | None = None, until: datetime | None = None, **options: Any) -> Audit:
        return await self.audits.audit(since, until, now=self.now, **options)

    async def run(self, minutes: float) -> None:
        await self.run_until(self.now + minutes * MINUTE, step=STEP)


@pytest.fixture
def engine(database: Database) -> AuditedEngine:
    return AuditedEngine(database, START)


def counts_of(audit: Audit) -> dict[str, int]:
    total = audit.total
    return {
        name: getattr(total, name)
        for name in ("expected", "enqueued", "explained", "pending", "overdue", "unexplained", "duplicate")
        if getattr(total, name)
    }


async def test_what_the_engine_does_is_complete(engine: AuditedEngine) -> None:
    first = await engine.declare(every=60, jitter=None, name="first")
    await engine.declare(every=7, name="jittered")
    await engine.declare(cron="*/5 * * * *", name="cron", workspace_id="ws")
    await engine.run(20)
    audit = await engine.audit()
    assert audit.ok
    assert (audit.since, audit.until) == (engine.now - HOUR, engine.now)
    assert [(schedule.name, schedule.expected) for schedule in sorted(audit.schedules, key=lambda it: it.name)] == [
        ("cron", 4),
        ("first", 20),
        ("jittered", 172),
    ]
    assert audit.total.enqueued + audit.total.pending == audit.total.expected == 196
    assert audit.rows == audit.total.enqueued
    assert audit.findings == []
    alone = await engine.audit(schedule_id=first.id)
    assert [schedule.schedule_id for schedule in alone.schedules] == [first.id]
    assert alone.total == Counts(expected=20, enqueued=20)


async def test_a_run_and_a_tick_that_are_deleted_by_hand_are_named_exactly(
    engine: AuditedEngine, connection: Any
) -> None:
    schedules = [await engine.declare(every=30, jitter=None, name=str(number)) for number in range(5)]
    await engine.run(5)
    await connection.execute(
        "DELETE FROM cron_runs WHERE schedule_id = $1 AND scheduled_for = $2", schedules[1].id, START + 2 * MINUTE
    )
    await connection.execute(
        "DELETE FROM cron_ticks WHERE schedule_id = $1 AND scheduled_for = $2", schedules[3].id, START + 5.5 * MINUTE
    )
    audit = await engine.audit(until=engine.now + MINUTE)
    assert not audit.ok
    assert audit.findings == sorted(
        [
            Finding(schedules[1].id, START + 2 * MINUTE, "unexplained", NOT_DEALT_WITH),
            Finding(schedules[3].id, START + 5.5 * MINUTE, "unexplained", NOT_DEALT_WITH),
        ],
        key=lambda finding: finding.schedule_id,
    )
    assert audit.found == 2
    assert {schedule.schedule_id for schedule in audit.schedules if not schedule.ok} == {
        schedules[1].id,
        schedules[3].id,
    }
    assert audit.total.expected == audit.total.enqueued + audit.total.pending + 2


async def test_edits_disabled_periods_and_deletions_expect_what_their_versions_say(engine: AuditedEngine) -> None:
    edited = await engine.declare(every=60, jitter=None, name="edited")
    switched = await engine.declare(every=60, jitter=None, name="switched")
    dropped = await engine.declare(every=60, jitter=None, name="dropped")
    deleted = await engine.declare(every=60, jitter=None, name="deleted")
    await engine.run(4.5)
    await engine.edit(edited.id, every=30, queue_name="other")
    await engine.repository.disable_schedule(switched.id, now=engine.now)
    await engine.repository.disable_schedule(dropped.id, drop_pending=True, now=engine.now)
    await engine.repository.delete_schedule(deleted.id, now=engine.now)
    await engine.run(5)
    await engine.repository.enable_schedule(switched.id, now=engine.now)
    await engine.repository.trigger(switched.id, now=engine.now)
    await engine.run(5.5)
    audit = await engine.audit()
    assert audit.ok, audit.findings
    found = {schedule.name: (schedule.expected, schedule.enqueued) for schedule in audit.schedules}
    assert found == {
        "edited": (5 + 20, 5 + 20),  # up to 4.5 min once a minute, then twice
        "switched": (6 + 5, 6 + 5),  # its tick of minute 5 was made before it was disabled
        "dropped": (5, 5),
        "deleted": (5, 5),
    }


async def test_max_runs_and_bounds_end_what_is_expected(engine: AuditedEngine) -> None:
    await engine.declare(every=60, jitter=None, name="thrice", max_runs=3)
    await engine.declare(
        every=60, jitter=None, name="bounded", starts_at=START + 2 * MINUTE, ends_at=START + 4 * MINUTE
    )
    await engine.declare(at=START + MINUTE, jitter=None, name="once")
    await engine.declare(cron="* * * * *", name="crons", max_runs=4)
    await engine.run(10)
    audit = await engine.audit()
    assert audit.ok, audit.findings
    expected = {schedule.name: schedule.expected for schedule in audit.schedules}
    assert expected == {"thrice": 3, "bounded": 3, "once": 1, "crons": 4}
    second_half = await engine.audit(since=START + 2 * MINUTE)
    expected = {schedule.name: schedule.expected for schedule in second_half.schedules}
    assert expected == {"thrice": 1, "bounded": 3, "crons": 2}


async def test_a_night_on_which_clocks_are_changed(database: Database) -> None:
    """In Berlin, at 01:00 UTC on 2026-10-25 clocks went back from 03:00 to 02:00."""
    engine = AuditedEngine(database, datetime(2026, 10, 24, 23, 30, tzinfo=UTC))
    await engine.declare(cron="30 2 * * *", timezone="Europe/Berlin", name="once")
    await engine.declare(cron="*/30 2 * * *", timezone="Europe/Berlin", name="twice")
    await engine.run_until(engine.now + 3 * HOUR, step=30 * MINUTE)
    audit = await engine.audit(since=engine.now - 3 * HOUR)
    assert audit.ok, audit.findings
    assert {schedule.name: schedule.enqueued for schedule in audit.schedules} == {"once": 1, "twice": 4}


async def test_what_is_left_for_a_manager_is_pending_not_unexplained(engine: AuditedEngine, connection: Any) -> None:
    await engine.declare(every=60, jitter=None)
    await engine.run(2)
    engine.now += 10 * MINUTE  # nobody works
    audit = await engine.audit()
    assert counts_of(audit) == {"expected": 12, "enqueued": 3, "pending": 9, "overdue": 8}
    assert counts_of(await engine.audit(late_after=5 * MINUTE))["overdue"] == 4
    assert counts_of(await engine.audit(late_after=HOUR)) == {"expected": 12, "enqueued": 3, "pending": 9}
    await connection.execute("UPDATE cron_schedule_cursors SET next_tick_needed_at = $1", engine.now)
    audit = await engine.audit()
    assert counts_of(audit) == {"expected": 12, "enqueued": 3, "unexplained": 9}


async def insert_run(connection: Any, schedule_id: str, moment: datetime, **columns: Any) -> None:
    await connection.execute("SELECT cron_make_partition('runs', $1)", moment.date())
    row = {"version": 1, "origin": "schedule", "outcome": "enqueued", "ended_at": moment, "attempts": 1} | columns
    names = ", ".join(row)
    values = ", ".join(f"${number}" for number in range(3, len(row) + 3))
    await connection.execute(
        f"INSERT INTO cron_runs (schedule_id, scheduled_for, {names}) VALUES ($1, $2, {values})",
        schedule_id,
        moment,
        *row.values(),
    )


async def test_a_stretch_of_missed_occurrences_explains_all_of_them(engine: AuditedEngine, connection: Any) -> None:
    schedule = await engine.declare(every=60, jitter=None)
    await engine.run(2)
    engine.now += 10 * MINUTE
    missed = {"outcome": "missed", "missed_since": START + 3 * MINUTE, "occurrences": 9}
    await insert_run(connection, schedule.id, START + 11 * MINUTE, **missed)
    await connection.execute("UPDATE cron_schedule_cursors SET next_tick_needed_at = $1", engine.now)
    audit = await engine.audit()
    assert counts_of(audit) == {"expected": 12, "enqueued": 3, "explained": 9}
    assert audit.total.missed == 9
    middle = await engine.audit(START + 5 * MINUTE, START + 8 * MINUTE)
    assert counts_of(middle) == {"expected": 3, "explained": 3}
    await insert_run(connection, schedule.id, START + 6 * MINUTE, outcome="enqueued")
    audit = await engine.audit()
    assert counts_of(audit) == {"expected": 12, "enqueued": 4, "explained": 8, "duplicate": 1}
    assert audit.findings == [Finding(schedule.id, START + 6 * MINUTE, "duplicate", IN_STRETCH)]


async def test_what_was_told_of_twice_is_named(engine: AuditedEngine, connection: Any) -> None:
    schedule = await engine.declare(every=60, jitter=None)
    await engine.run(5)
    await connection.execute(
        """INSERT INTO queue_messages (id, queue_name, payload, schedule_id, scheduled_for)
        SELECT 'msg_again', queue_name, payload, schedule_id, scheduled_for FROM queue_messages
        WHERE scheduled_for = $1""",
        START + MINUTE,
    )
    await connection.execute(
        """INSERT INTO cron_ticks (id, schedule_id, schedule_name, queue_name, payload, scheduled_for, execute_at,
            due_at, created_at)
        VALUES ('tick_again', $1, 'x', 'queue', '{}', $2, $2, $2, $2)""",
        schedule.id,
        START + 2 * MINUTE,
    )
    await insert_run(connection, schedule.id, START + 2.5 * MINUTE)
    audit = await engine.audit()
    assert counts_of(audit) == {"expected": 5, "enqueued": 5, "duplicate": 3}
    assert {(finding.scheduled_for, finding.kind, finding.why) for finding in audit.findings} == {
        (START + MINUTE, "duplicate", "it has 2 messages"),
        (START + 2 * MINUTE, "duplicate", STILL_PENDING),
        (START + 2.5 * MINUTE, "duplicate", UNEXPECTED),
    }
    assert audit.schedules[0].duplicate == 3


async def test_a_doubled_message_of_a_schedule_that_expects_nothing_is_named_too(
    engine: AuditedEngine, connection: Any
) -> None:
    schedule = await engine.declare(every=3600, jitter=None, starts_at=START + 10 * HOUR)
    for number in range(2):
        await connection.execute(
            """INSERT INTO queue_messages (id, queue_name, payload, schedule_id, scheduled_for)
            VALUES ($1, 'queue', '{}', $2, $3)""",
            f"msg_{number}",
            schedule.id,
            START - MINUTE,
        )
    audit = await engine.audit()
    assert [(found.name, found.expected, found.duplicate) for found in audit.schedules] == [("queue", 0, 1)]
    assert [finding.why for finding in audit.findings] == ["it has 2 messages"]


async def test_the_look_for_doubled_messages_does_not_read_what_was_sent_before(
    engine: AuditedEngine, database: Database, connection: Any
) -> None:
    for number in range(20):
        await engine.declare(every=60, jitter=None, name=str(number))
    await connection.execute("ANALYZE")
    await connection.execute(
        """INSERT INTO queue_messages (id, queue_name, payload, schedule_id, scheduled_for)
        SELECT 'msg_' || id || number, 'queue', '{}', id, $1::timestamptz - number * interval '1 minute'
        FROM cron_schedules, generate_series(1, 1000) AS number""",
        START - HOUR,
    )
    async with database.connection() as chosen:
        explain = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {database.sql(DOUBLED_OCCURRENCES)}"
        text = await chosen.fetchval(explain, START - HOUR, START, None)
    plan = json.loads(text)[0]["Plan"]
    assert "queue_messages_occurrence_idx" in text
    assert '"Seq Scan"' not in text
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 200


async def test_backfilled_and_dropped_rows_beside_the_expected_are_fine(engine: AuditedEngine, connection: Any) -> None:
    schedule = await engine.declare(every=60, jitter=None)
    await engine.run(5)
    await insert_run(connection, schedule.id, START - MINUTE, origin="backfill")
    await insert_run(connection, schedule.id, START - 2 * MINUTE, outcome="disabled")
    audit = await engine.audit()
    assert audit.ok
    assert counts_of(audit) == {"expected": 5, "enqueued": 5}


async def test_a_backfill_that_made_up_for_what_was_removed_counts(engine: AuditedEngine, connection: Any) -> None:
    schedule = await engine.declare(every=60, jitter=None)
    await engine.run(5)
    await connection.execute("DELETE FROM cron_runs WHERE scheduled_for = $1", START + MINUTE)
    assert (await engine.audit()).total.unexplained == 1
    await insert_run(connection, schedule.id, START + MINUTE, origin="backfill")
    assert counts_of(await engine.audit()) == {"expected": 5, "enqueued": 5}


async def test_every_outcome_but_enqueued_is_an_explanation(engine: AuditedEngine, connection: Any) -> None:
    await engine.declare(every=60, jitter=None)
    await engine.run(5)
    for minute, outcome in enumerate(("missed", "overlapped", "disabled", "failed", "expired")):
        await connection.execute(
            "UPDATE cron_runs SET outcome = $1 WHERE scheduled_for = $2", outcome, START + minute * MINUTE
        )
    audit = await engine.audit()
    assert counts_of(audit) == {"expected": 5, "explained": 5}
    assert audit.total.missed == 1


async def test_late_is_what_came_later_than_asked(engine: AuditedEngine, connection: Any) -> None:
    await engine.declare(every=60, jitter=None)
    await engine.run(5)
    for minute in range(5):
        await connection.execute(
            "UPDATE cron_runs SET lateness = $1 WHERE scheduled_for = $2", minute * 30 * SECOND, START + minute * MINUTE
        )
    assert (await engine.audit()).total.late == 2  # beyond the 60 seconds of the settings
    assert (await engine.audit(late_after=29)).total.late == 4
    assert (await engine.audit(late_after=2 * MINUTE)).total.late == 0
    await connection.execute("DELETE FROM cron_runs WHERE scheduled_for = $1", START)
    assert (await engine.audit(late_after=29)).total.late == 4  # also where each row is looked at


async def test_a_time_of_several_days_is_looked_at_in_parts(
    engine: AuditedEngine, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await engine.declare(every=60, jitter=None, name="first")
    await engine.declare(cron="*/2 * * * *", name="second")
    await engine.run(10)
    await connection.execute("DELETE FROM cron_runs WHERE scheduled_for = $1", START + 4 * MINUTE)
    whole = await engine.audit(START, START + 10 * MINUTE)
    monkeypatch.setattr(audit_repository, "PART", 3 * MINUTE)
    parts = await engine.audit(START, START + 10 * MINUTE)
    assert parts.total == whole.total
    assert counts_of(parts) == {"expected": 15, "enqueued": 13, "unexplained": 2}
    assert sorted(map(repr, parts.findings)) == sorted(map(repr, whole.findings))
    assert {(found.name, found.expected) for found in parts.schedules} == {("first", 10), ("second", 5)}
    assert parts.rows == whole.rows == 13


async def test_a_rule_that_can_not_be_followed_is_reported_and_expects_nothing(
    engine: AuditedEngine, connection: Any
) -> None:
    broken = await engine.declare(cron="* * * * *", name="broken")
    await engine.declare(every=60, jitter=None, name="sound")
    await engine.run(3)
    await connection.execute("UPDATE cron_schedule_versions SET zone = 'Mars/Olympus' WHERE cron IS NOT NULL")
    audit = await engine.audit()
    assert audit.ok
    assert counts_of(audit) == {"expected": 3, "enqueued": 3}
    (found,) = [schedule for schedule in audit.schedules if schedule.name == "broken"]
    assert "Mars/Olympus" in (found.error or "")
    await connection.execute("UPDATE cron_schedule_versions SET zone = 'UTC' WHERE cron IS NOT NULL")
    await connection.execute("UPDATE cron_schedules SET error = 'no ticks', error_at = now() WHERE id = $1", broken.id)
    (found,) = [schedule for schedule in (await engine.audit()).schedules if schedule.name == "broken"]
    assert found.error == "no ticks"


async def test_one_of_an_unknown_zone_that_is_looked_at_closely_stops_no_other(
    engine: AuditedEngine, connection: Any
) -> None:
    broken = await engine.declare(cron="* * * * *", timezone="Europe/Berlin", name="broken")
    await engine.declare(every=60, jitter=None, name="sound")
    await engine.run(3)
    await engine.edit(broken.id, queue_name="other")
    await engine.run(3)
    await connection.execute("UPDATE cron_schedule_versions SET zone = 'Mars/Phobos' WHERE schedule_id = $1", broken.id)
    audit = await engine.audit()
    assert audit.ok
    assert counts_of(audit) == {"expected": 6, "enqueued": 6}
    (found,) = [schedule for schedule in audit.schedules if schedule.name == "broken"]
    assert "Mars/Phobos" in (found.error or "")
    assert (await engine.audits.stats(now=engine.now)).total.enqueued == 6


async def test_ticks_of_a_sink_that_nobody_serves_are_overdue(engine: AuditedEngine, connection: Any) -> None:
    await engine.declare(every=60, jitter=None)
    await engine.run(3)
    await connection.execute("UPDATE cron_ticks SET sink = 'gone'")
    await connection.execute("UPDATE cron_schedules SET sink = 'gone'")
    await engine.run(7)
    audit = await engine.audit()
    assert audit.ok
    assert counts_of(audit) == {"expected": 10, "enqueued": 4, "pending": 6, "overdue": 5}
    assert audit.schedules[0].overdue == 5
    await connection.execute("DELETE FROM cron_runs WHERE scheduled_for = $1", START)
    audit = await engine.audit()  # each row is looked at
    assert counts_of(audit) == {"expected": 10, "enqueued": 3, "pending": 6, "overdue": 5, "unexplained": 1}
    await connection.execute("UPDATE cron_ticks SET due_at = $1", engine.now)  # leased, or paced
    assert counts_of(await engine.audit()) == {"expected": 10, "enqueued": 3, "pending": 6, "unexplained": 1}


async def test_what_a_schedule_in_the_error_state_does_not_do_is_overdue(
    engine: AuditedEngine, connection: Any
) -> None:
    await engine.declare(every=60, jitter=None)
    await engine.run(3)
    await connection.execute("UPDATE cron_schedule_cursors SET broken = true")
    await connection.execute("UPDATE cron_schedules SET error = 'no ticks', error_at = now()")
    await engine.run(10)
    (found,) = (await engine.audit()).schedules
    assert (found.ok, found.error) == (True, "no ticks")
    assert (found.expected, found.expected - found.enqueued) == (13, found.pending)
    assert found.overdue == found.pending - 1 > 5


async def test_the_close_look_reads_a_bounded_number_of_rows_and_lets_others_have_their_turn(
    engine: AuditedEngine, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(7):
        await engine.declare(every=10, jitter=None, name=str(number))
    await engine.run(2)
    await connection.execute("DELETE FROM cron_runs WHERE scheduled_for = $1", START)
    looked_at: list[list[int]] = []
    look_closely, check_closely = AuditRepository._look_closely, audit_repository._check_closely
    turns = 0
    turns_before: list[int] = []

    async def noted(self: AuditRepository, suspects: Any, *arguments: Any) -> None:
        looked_at.append([suspect.rows for suspect in suspects])
        await look_closely(self, suspects, *arguments)

    def checked(*arguments: Any) -> None:
        turns_before.append(turns)
        check_closely(*arguments)

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(AuditRepository, "_look_closely", noted)
    monkeypatch.setattr(audit_repository, "_check_closely", checked)
    monkeypatch.setattr(audit_repository, "ROWS_TOGETHER", 30)
    others = asyncio.create_task(other())
    audit = await engine.audit()
    others.cancel()
    assert looked_at == [[11, 11], [11, 11], [11, 11], [11]]
    assert audit.total.unexplained == 7
    assert len(set(turns_before)) == 7
    monkeypatch.setattr(audit_repository, "ROWS_TOGETHER", 1)
    looked_at.clear()
    assert (await engine.audit()).total == audit.total
    assert looked_at == [[11]] * 7
    monkeypatch.setattr(audit_repository, "ROWS_TOGETHER", 1000)
    monkeypatch.setattr(audit_repository, "LOOKED_AT_TOGETHER", 4)
    looked_at.clear()
    assert (await engine.audit()).total == audit.total
    assert looked_at == [[11] * 4, [11] * 3]


async def test_without_details_only_schedules_with_findings_are_kept(engine: AuditedEngine, connection: Any) -> None:
    first = await engine.declare(every=60, jitter=None, name="first")
    second = await engine.declare(every=60, jitter=None, name="second")
    await engine.declare(every=60, jitter=None, name="third")
    await engine.declare(every=60, jitter=None, name="later", starts_at=START + HOUR)
    await engine.run(5)
    await connection.execute("DELETE FROM cron_runs WHERE scheduled_for = $1 AND schedule_id = $2", START, first.id)
    await connection.execute(
        """INSERT INTO queue_messages (id, queue_name, payload, schedule_id, scheduled_for)
        VALUES ('msg_again', 'queue', '{}', $1, $2)""",
        second.id,
        START,
    )
    whole = await engine.audit()
    alone = await engine.audits.audit_alone(engine.now, now=engine.now)
    assert alone is not None
    assert {schedule.name for schedule in whole.schedules} == {"first", "second", "third"}
    assert {schedule.name for schedule in alone.schedules} == {"first", "second"}
    assert whole.expecting == alone.expecting == 3
    assert (alone.total, alone.findings, alone.found) == (whole.total, whole.findings, 2)


async def test_the_time_before_the_first_version_is_not_walked_through(
    engine: AuditedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await engine.audit(since=START - timedelta(days=20_000))).total == Counts()
    old = await engine.declare(every=60, jitter=None, name="old")
    await engine.run(5)
    young = await engine.declare(every=60, jitter=None, name="young")
    parts: list[datetime] = []
    schedules = AuditRepository._schedules

    def noted(self: AuditRepository, span: Any, connection: Any) -> Any:
        parts.append(span.since)
        return schedules(self, span, connection)

    monkeypatch.setattr(AuditRepository, "_schedules", noted)
    audit = await engine.audit(since=START - timedelta(days=20_000))
    assert audit.since == START - timedelta(days=20_000)
    assert counts_of(audit) == {"expected": 5, "enqueued": 5}
    assert parts == [START.replace(hour=0)]
    engine.now += timedelta(days=2)
    for schedule, begun in ((old, START), (young, START + 5 * MINUTE)):
        parts.clear()
        await engine.audit(since=begun - HOUR, schedule_id=schedule.id)
        assert parts == [begun - HOUR + timedelta(days=day) for day in range(3)]
    parts.clear()
    assert (await engine.audit(START - timedelta(days=30), START - timedelta(days=20))).total == Counts()
    assert parts == []


async def test_what_is_not_kept_any_more_can_not_be_audited(engine: AuditedEngine, connection: Any) -> None:
    await engine.declare(every=60, jitter=None)
    await engine.run(10)
    await connection.execute("INSERT INTO cron_retention VALUES ('runs', $1)", START + 5 * MINUTE)
    with pytest.raises(InvalidInputError, match=r"since: the ledger is kept from 2026-03-01T12:05:00\+00:00 on"):
        await engine.audit(since=START)
    audit = await engine.audit()
    assert audit.since == START + 5 * MINUTE
    assert counts_of(audit) == {"expected": 5, "enqueued": 5}
    with pytest.raises(InvalidInputError, match="the ledger is kept from"):
        await engine.audit(until=START + MINUTE)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"since": START, "until": START}, "since: must be before until"),
        ({"since": START + MINUTE, "until": START}, "since: must be before until"),
        (
            {"until": START + timedelta(days=1, seconds=61)},
            r"until: must be at most 2026-03-02T12:01:00\+00:00: no ticks are made",
        ),
        ({"since": datetime(2026, 1, 1)}, "since: must have a time zone"),  # noqa: DTZ001
        ({"until": "now"}, "until: must be a datetime"),
        ({"late_after": 0}, "late_after: must be from 1 ms"),
        ({"schedule_id": ""}, "schedule_id: must not be empty"),
    ],
)
async def test_a_wrong_time_is_refused(engine: AuditedEngine, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        await engine.audit(**arguments)


async def test_a_schedule_that_never_was_is_an_error(engine: AuditedEngine) -> None:
    with pytest.raises(ScheduleNotFoundError, match="there is no schedule cron_no"):
        await engine.audit(schedule_id="cron_no")
    assert (await engine.audit()).schedules == []


@pytest.fixture
async def manager(settings: Settings) -> AsyncIterator[QueueManager]:
    async with QueueManager(settings=settings) as opened:
        yield opened


@pytest.mark.pooled
async def test_the_manager_audits_by_the_databases_clock(manager: QueueManager, connection: Any) -> None:
    await manager.schedule("queue", every=60, jitter=None)
    now = await connection.fetchval("SELECT now()")
    audit = await manager.audit()
    assert now <= audit.until <= now + MINUTE
    assert audit.until - audit.since == HOUR
    assert counts_of(audit) == {"expected": 1, "pending": 1}
    ahead = await manager.audit(until=now + 2 * MINUTE)
    assert ahead.total.expected == ahead.total.pending == 3  # two ticks, and one that no manager has made yet
    await connection.execute("DELETE FROM cron_ticks WHERE scheduled_for < $1", now + SECOND)
    assert (await manager.audit(until=now + 2 * MINUTE)).total.unexplained == 1
    assert (await manager.audit()).ok is False


async def test_an_audit_sees_one_instant_while_ticks_are_fired(
    engine: AuditedEngine, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two of its statements a run goes, and more is fired: neither shows in it."""
    schedule = await engine.declare(every=60, jitter=None)
    await engine.run(5)
    await connection.execute("DELETE FROM cron_runs WHERE scheduled_for = $1", START + MINUTE)
    look_closely = AuditRepository._look_closely

    async def interrupted(self: AuditRepository, *arguments: Any) -> None:
        await connection.execute("DELETE FROM cron_runs WHERE schedule_id = $1", schedule.id)
        await engine.run(1)
        await look_closely(self, *arguments)

    monkeypatch.setattr(AuditRepository, "_look_closely", interrupted)
    audit = await engine.audit(START, START + 5 * MINUTE)
    assert counts_of(audit) == {"expected": 5, "enqueued": 4, "unexplained": 1}
    monkeypatch.undo()
    assert (await engine.audit(START, START + 5 * MINUTE)).total.unexplained == 5


async def test_an_audit_changes_nothing_and_leaves_no_settings_behind(
    engine: AuditedEngine, database: Database
) -> None:
    await engine.declare(every=60, jitter=None)
    await engine.audit()
    for name, value in (("enable_seqscan", "off"), ("enable_nestloop", "on"), ("transaction_read_only", "off")):
        assert await database.fetchval(f"SHOW {name}") == value


async def test_more_than_a_thousand_findings_are_counted(engine: AuditedEngine, connection: Any) -> None:
    await engine.declare(every=2, jitter=None)
    await engine.run(1)
    engine.now += HOUR
    await connection.execute("UPDATE cron_schedule_cursors SET next_tick_needed_at = $1", engine.now)
    audit = await engine.audit(START, START + HOUR)
    assert audit.found == audit.total.unexplained > 1000
    assert len(audit.findings) == 1000


async def test_audits_at_once_don_t_disturb_each_other(engine: AuditedEngine) -> None:
    await engine.declare(every=10, jitter=None)
    await engine.run(5)
    audits = await asyncio.gather(*(engine.audit() for _ in range(4)))
    assert [counts_of(audit) for audit in audits] == [counts_of(audits[0])] * 4


@pytest.mark.soak(small=3000, full=100_000)
async def test_of_very_many_schedules_exactly_what_was_removed_is_named(
    database: Database, settings: Settings, connection: Any, size: int
) -> None:
    now = await connection.fetchval("SELECT statement_timestamp()")
    patient = Database(database._pool, settings.model_copy(update={"statement_timeout_seconds": 1200}))
    await fill(patient, size, now, 1)
    audits = AuditRepository(patient, settings, partial(find_doubled, patient))
    since, until = now - HOUR, now + WINDOW
    audit = await audits.audit(since, until)
    assert audit.ok
    assert len(audit.schedules) == size
    assert audit.total.expected == audit.total.enqueued + audit.total.pending > 5 * size
    assert audit.rows == audit.total.enqueued == await connection.fetchval("SELECT count(*) FROM cron_runs")
    print(f"\n{size} schedules, {audit.rows} runs: {audit.seconds} s")  # noqa: T201
    removed = await remove_by_hand(patient, since, until)
    audit = await audits.audit(since, until)
    assert {(finding.schedule_id, finding.scheduled_for) for finding in audit.findings} == set(removed)
    assert audit.total.unexplained == audit.found == len(removed) == 2
