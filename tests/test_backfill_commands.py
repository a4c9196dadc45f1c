"""`cron-ticks backfill …`: starting, watching, listing and cancelling backfills."""

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from cron_ticks.schedules import Schedule
from support.commands import Ended, fetch, manage, run_command
from support.processes import Processes

BACKFILL_ID = r"backfill_[0-9A-HJKMNP-TV-Z]{26}"
DAY = timedelta(days=1)

Command = Callable[..., Ended]


@pytest.fixture
def command(dsn: str) -> Command:
    """Runs `cron-ticks backfill …` on the test's database."""
    return lambda *arguments: run_command("backfill", *arguments, "--dsn", dsn)


@pytest.fixture
def schedule(dsn: str) -> Schedule:
    return manage(dsn, lambda queue_manager: queue_manager.schedule("queue", cron="0 * * * *"))


@pytest.fixture
def yesterday() -> tuple[str, str, str, str]:
    end = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return "--from", (end - DAY).isoformat(), "--to", end.isoformat()


def test_starts_shows_lists_and_cancels(command: Command, schedule: Schedule, yesterday: Any) -> None:
    assert command("list").lines == ["no backfills"]
    begun = command("start", schedule.id, *yesterday, "--per-minute", "60", "--json").json
    assert re.fullmatch(BACKFILL_ID, begun["id"])
    assert (begun["schedule_id"], begun["total"], begun["made"], begun["pending"]) == (schedule.id, 24, 10, 10)
    assert (begun["progress"], begun["outcome"], begun["per_minute"]) == (0, None, 60)
    assert command("show", begun["id"], "--json").json == begun
    shown = dict(re.split(r" {2,}", line, maxsplit=1) for line in command("show", begun["id"]).lines)
    assert (shown["occurrences"], shown["made"], shown["pace"], shown["state"]) == ("24", "10", "60 a minute", "0%")
    assert command("list", "--json").json == [begun]
    assert command("list", "--schedule", "cron_other", "--json").json == []
    assert begun["id"] in command("list", "--schedule", schedule.id).output
    cancelled = command("cancel", begun["id"], "--json").json
    assert (cancelled["outcome"], cancelled["pending"]) == ("cancelled", 10)
    assert (
        "cancelled by"
        in dict(re.split(r" {2,}", line, maxsplit=1) for line in command("show", begun["id"]).lines)["state"]
    )
    again = command("start", schedule.id, *yesterday, "--json").json
    assert [found["id"] for found in command("list", "--json").json] == [again["id"], begun["id"]]
    assert command("list", "--after", again["id"], "--json").json == [cancelled]


def test_waits_for_what_is_done_already(command: Command, schedule: Schedule) -> None:
    """The bar goes to standard error."""
    empty = (
        "--from",
        f"{schedule.created_at - DAY:%Y-%m-%d}T00:00:01Z",
        "--to",
        f"{schedule.created_at - DAY:%Y-%m-%d}T00:59:59Z",
    )
    ended = command("start", schedule.id, *empty, "--wait", "--json")
    assert ended.json["outcome"] == "done"


def test_a_wait_that_ends_otherwise_says_so_with_its_code(
    command: Command, dsn: str, schedule: Schedule, yesterday: Any
) -> None:
    fetch(dsn, "ALTER TABLE cron_ticks ADD CHECK (origin <> 'backfill')")
    ended = command("start", schedule.id, *yesterday, "--wait")
    assert ended.code == 1
    assert "failed: CheckViolationError" in ended.output


async def test_waits_with_a_bar_until_workers_have_fired_it(
    dsn: str, connection: Any, processes: Processes, schedule: Schedule, yesterday: Any
) -> None:
    await processes.worker(dsn, "quiet")
    arguments = ("backfill", "start", schedule.id, *yesterday, "--per-minute", "6000", "--wait")
    waiting = await processes.cron_ticks(*arguments, environment={"CRON_TICKS_DSN": dsn})
    printed = await waiting.output()
    assert await waiting.wait() == 0
    assert re.search(r"state +done", printed)
    assert any("24/24" in line for line in waiting.errors)
    assert await connection.fetchval("SELECT count(*) FROM cron_runs WHERE origin = 'backfill'") == 24


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("start", "ID", "--from", "yesterday", "--to", "2026-01-02T00:00:00Z"), "start: "),
        (("start", "ID", "--from", "2026-01-01T00:00:00Z", "--to", "2026-01-01"), "end: "),
        (
            ("start", "ID", "--from", "2020-01-01T00:00:00Z", "--to", "2020-01-02T00:00:00Z"),
            "start: must not be before",
        ),
        (("start", "ID", "--from", "2020-01-01T00:00:00Z", "--to", "2019-01-02T00:00:00Z"), "end: must be after start"),
        (
            ("start", "none", "--from", "2020-01-01T00:00:00Z", "--to", "2020-01-02T00:00:00Z"),
            "there is no schedule none",
        ),
        (("show", "backfill_none"), "there is no backfill backfill_none"),
        (("cancel", "backfill_none"), "there is no backfill backfill_none"),
        (("list", "--limit", "0"), "limit: "),
    ],
)
def test_mistakes_are_said(command: Command, schedule: Schedule, arguments: tuple[str, ...], said: str) -> None:
    ended = command(*(schedule.id if argument == "ID" else argument for argument in arguments))
    assert ended.code == 2
    assert f"error: {said}" in ended.error
