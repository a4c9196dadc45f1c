"""`cron-ticks runs` and `cron-ticks cleanup`, run in this process."""

import os
import pty
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from support.commands import Ended, fetch, manage, run_command
from token_queue import QueueManager

LEDGER = (
    """INSERT INTO cron_schedule_versions (schedule_id, version, holds_after, change, enabled, workspace_id, name,
        queue_name, anchor_at, jitter_us, priority, planned, created_at, sink)
    SELECT 'cron_' || name, 1, '-infinity', 'created', true, workspace, name, queue, now(), 0, 2, 0, now(), sink
    FROM (VALUES ('billing', 'acme', 'bills', 'queue'), ('sync', NULL, 'syncs', 'queue'),
            ('hook', NULL, 'hooks', 'out'))
        AS given (name, workspace, queue, sink)""",
    """INSERT INTO cron_runs (schedule_id, scheduled_for, version, origin, outcome, reason, ended_at, attempts,
        ticker_id, message_id, lateness, missed_since, occurrences, recovered, recovery_time)
    SELECT 'cron_' || name, date_trunc('minute', now()) - age, 1, origin, outcome, reason, now() - age, 1, 'ticker_1',
        CASE WHEN outcome = 'enqueued' THEN 'msg_' || number END, late,
        CASE WHEN outcome = 'missed' THEN date_trunc('minute', now()) - age - interval '2 hours' END,
        CASE WHEN outcome = 'missed' THEN 120 ELSE 1 END, name = 'hook', CASE WHEN name = 'hook' THEN interval '3 s' END
    FROM (VALUES
        (1, 'billing', interval '1 min', 'schedule', 'enqueued', NULL, interval '0.007 s'),
        (2, 'billing', interval '2 min', 'trigger', 'enqueued', NULL, interval '0.25 s'),
        (3, 'billing', interval '3 min', 'schedule', 'enqueued', NULL, interval '2 hours'),
        (4, 'sync', interval '4 min', 'schedule', 'missed', 'its catch-up policy', NULL),
        (5, 'sync', interval '50 min', 'schedule', 'failed', 'TableGone: no such
table', NULL),
        (6, 'hook', interval '60 min', 'schedule', 'enqueued', NULL, interval '1 s'),
        (7, 'sync', interval '26 hours', 'schedule', 'overlapped', 'the message before it is unfinished', NULL)
    ) AS given (number, name, age, origin, outcome, reason, late)""",
    """INSERT INTO queue_messages (id, queue_name, workspace_id, payload, attempts, completed_at, dlq_at, error_type,
        error_message)
    VALUES ('msg_1', 'bills', 'acme', '{}', 2, date_trunc('minute', now()), NULL, 'ValueError', 'once'),
        ('msg_2', 'bills', 'acme', '{}', 5, NULL, date_trunc('minute', now()), 'ValueError', E'no\\nmoney')""",
)


@pytest.fixture
def ledger(dsn: str) -> str:
    for statement in LEDGER:
        fetch(dsn, "SELECT cron_make_partition('runs', (now() - interval '26 hours')::date)")
        fetch(dsn, statement)
    return dsn


def runs(dsn: str, *arguments: str) -> Ended:
    return run_command("runs", *arguments, "--dsn", dsn)


def minutes_ago(dsn: str, minutes: int) -> datetime:
    [row] = fetch(dsn, "SELECT date_trunc('minute', max(ended_at)) + interval '1 minute' AS minute FROM cron_runs")
    moment: datetime = row["minute"] - timedelta(minutes=minutes)
    return moment


def ids(ended: Ended) -> list[tuple[str, str]]:
    return [(run["schedule_name"], run["outcome"]) for run in ended.json]


def test_one_command_says_what_ran_and_how_it_ended(ledger: str) -> None:
    heading, _, *lines = runs(ledger).lines
    assert heading.split("  ")[0].strip() == "scheduled for"
    text = "\n".join(" ".join(line.split()) for line in lines)
    minute = f"{minutes_ago(ledger, 0):%Y-%m-%d %H:%M:%SZ}"
    for expected in (
        f"acme/billing enqueued 0.007 s completed, 2 {minute[:10]}",
        "acme/billing enqueued 0.250 s dead, 5",
        "(trigger) attempts",
        "ValueError: no",
        "acme/billing enqueued 2:00:00 removed",
        "sync missed \N{MULTIPLICATION SIGN}120",
        "its catch-up",
        "TableGone: no",
        "hook enqueued, 1.000 s handed over",
    ):
        assert expected in text, f"{expected!r} is not in\n{text}"
    assert "ValueError: once" not in text
    assert "unfinished" not in text  # that was the day before


def test_json_has_everything(ledger: str) -> None:
    [run] = runs(ledger, "--schedule", "cron_billing", "--limit", "1", "--json").json
    moment = minutes_ago(ledger, 1).isoformat()
    assert run | {"message": None} == {
        "schedule_id": "cron_billing",
        "schedule_name": "billing",
        "workspace_id": "acme",
        "queue_name": "bills",
        "sink": "queue",
        "scheduled_for": moment,
        "missed_since": None,
        "occurrences": 1,
        "version": 1,
        "origin": "schedule",
        "outcome": "enqueued",
        "reason": None,
        "ended_at": run["ended_at"],
        "lateness_seconds": 0.007,
        "attempts": 1,
        "worker": "ticker_1",
        "recovered": False,
        "recovery_seconds": None,
        "message_id": "msg_1",
        "message": None,
        "cursor": f"{moment}/cron_billing",
    }
    message = run["message"]
    assert (message["id"], message["state"], message["attempts"]) == ("msg_1", "completed", 2)
    assert message["completed_at"] == minutes_ago(ledger, 0).isoformat()
    [hook] = runs(ledger, "--name", "hook", "--json").json
    assert (hook["recovered"], hook["recovery_seconds"], hook["message"]["state"]) == (True, 3.0, None)


ALL = [("billing", "enqueued")] * 3 + [("sync", "missed"), ("sync", "failed"), ("hook", "enqueued")]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ALL),
        (["--since", "30h"], [*ALL, ("sync", "overlapped")]),
        (["--name", "sync"], [("sync", "missed"), ("sync", "failed"), ("sync", "overlapped")]),
        (["--name", "sync", "--since", "1800"], [("sync", "missed")]),
        (["--name", "billing", "--workspace", "other"], []),
        (["--workspace", "acme"], ALL[:3]),
        (["--queue", "hooks"], ALL[-1:]),
        (["--outcome", "missed"], [("sync", "missed")]),
        (["--outcome", "overlapped", "--since", "2d"], [("sync", "overlapped")]),
        (["--until", "2h", "--outcome", "missed"], [("sync", "missed")]),  # it began before
        (["--until", "2h"], [("sync", "missed"), ("sync", "overlapped")][:1]),
        (["--since", "2999-01-01T00:00:00Z"], None),
    ],
)
def test_runs_are_chosen(ledger: str, arguments: list[str], expected: list[tuple[str, str]] | None) -> None:
    ended = runs(ledger, *arguments, "--json")
    if expected is None:
        assert (ended.code, "since: must be from 1970" in ended.error) == (2, True)
    else:
        assert ids(ended) == expected


def test_the_next_page_is_offered(ledger: str) -> None:
    first = runs(ledger, "--limit", "4")
    offer = first.lines[-1]
    assert offer.startswith("there may be more: --after ")
    assert ids(runs(ledger, "--after", offer.split()[-1], "--json")) == ALL[4:]


def test_an_empty_ledger_has_no_runs(dsn: str) -> None:
    assert runs(dsn).lines == ["no runs"]
    assert runs(dsn, "--json").json == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--outcome", "lost"], "outcome: must be one of"),
        (["--since", "yesterday"], "since: must be a time such as"),
        (["--until", "2026-01-01T00:00:00"], "until: must end in Z or in an offset"),
        (["--since", "9999999d"], "since: 9999999d is too long ago"),
        (["--after", "nothing"], "after: must be the cursor of a run"),
        (["--limit", "0"], "limit: must be"),
    ],
)
def test_what_cannot_be_meant_is_said(dsn: str, arguments: list[str], says: str) -> None:
    ended = runs(dsn, *arguments)
    assert ended.code == 2
    assert says in ended.error


def fill(dsn: str) -> None:
    for day in ("2020-01-01", "2020-01-02"):
        fetch(dsn, "SELECT cron_make_partition('runs', $1::text::date)", day)
    fetch(dsn, "SELECT cron_make_partition('events', '2020-01-01')")
    fetch(
        dsn,
        """INSERT INTO queue_messages (id, queue_name, payload, dlq_at, completed_at)
        VALUES ('msg_1', 'q', '{}', '2020-01-01', NULL), ('msg_2', 'q', '{}', NULL, '2020-01-01'),
            ('msg_3', 'q', '{}', NULL, NULL)""",
    )


def cleanup(dsn: str, *arguments: str) -> Ended:
    return run_command("cleanup", *arguments, "--dsn", dsn)


def test_cleanup_says_what_it_removed(dsn: str) -> None:
    fill(dsn)
    ended = cleanup(dsn, "--older-than", "90d", "--yes")
    assert ended.lines == [
        "removed 2 day(s) of runs",
        "removed 1 week(s) of events",
        "removed 1 dead letter(s)",
        "removed 1 completed message(s)",
    ]
    assert [row["id"] for row in fetch(dsn, "SELECT id FROM queue_messages")] == ["msg_3"]
    assert cleanup(dsn, "--older-than", "90d", "--yes").lines == ["nothing was that old"]


def test_cleanup_of_some_kinds_as_json(dsn: str) -> None:
    fill(dsn)
    removed = cleanup(dsn, "--older-than", "90d", "--kind", "runs", "--kind", "dead", "--yes", "--json").json
    assert removed == {
        "runs": ["cron_runs_20200101", "cron_runs_20200102"],
        "events": [],
        "versions": 0,
        "audits": 0,
        "backfills": 0,
        "dead": 1,
        "messages": 0,
        "busy": [],
    }


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--older-than", "1d", "--yes"], "older_than: must be at least 2 days for runs"),
        (["--older-than", "old", "--yes"], "older_than: must be a number of seconds or a text such as"),
        (["--older-than", "90d", "--kind", "ticks", "--yes"], "kinds: must be one of runs, events, dead, messages"),
        (["--older-than", "90d"], "no terminal to ask on: give --yes"),
    ],
)
def test_cleanup_removes_nothing_by_mistake(dsn: str, arguments: list[str], says: str) -> None:
    fill(dsn)
    ended = cleanup(dsn, *arguments)
    assert ended.code == 2
    assert says in ended.error
    assert len(fetch(dsn, "SELECT FROM queue_messages")) == 3


@pytest.mark.parametrize(("answer", "left"), [("n", 3), ("y", 2)])
def test_cleanup_asks_first(dsn: str, answer: str, left: int) -> None:
    fill(dsn)
    terminal, its_end = pty.openpty()
    try:
        os.write(terminal, f"{answer}\n".encode())
        options = ["--older-than", "90d", "--kind", "dead", "--dsn", dsn]
        command = [sys.executable, "-m", "cron_ticks.cli", "cleanup", *options]
        ended = subprocess.run(command, stdin=its_end, capture_output=True, text=True, check=False, timeout=60)
    finally:
        os.close(terminal)
        os.close(its_end)
    assert "Delete dead older than 90d for good?" in ended.stderr
    assert ended.returncode == (1 if answer == "n" else 0)
    assert len(fetch(dsn, "SELECT FROM queue_messages")) == left


def test_last_nights_billing_in_one_call(dsn: str) -> None:
    """The question of 3 a.m., from the schedule to the answer."""

    async def work(manager: QueueManager) -> Any:
        @manager.handler("billing", max_attempts=1)
        async def bill(_message: Any) -> None:
            manager.stop()
            raise ValueError("no such account")

        await manager.schedule("billing", at=datetime.now(UTC) - timedelta(hours=6), name="nightly")
        await manager.run(handle_signals=False)
        return await manager.runs(name="nightly")

    [run] = manage(dsn, work)
    assert (run.outcome, run.message.state, run.message.error) == ("enqueued", "dead", "ValueError: no such account")
    [line] = [
        line
        for line in runs(dsn, "--name", "nightly").lines
        if line.startswith(f"{run.scheduled_for:%Y-%m-%d %H:%M:%SZ}")
    ]
    assert all(word in line for word in ("nightly", "enqueued", "dead"))
