"""`cron-ticks audit` and `cron-ticks stats`."""

from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from cron_ticks.audits import NOT_DEALT_WITH
from cron_ticks.database import Database
from support.commands import Ended
from support.moved_clock import Engine
from support.processes import Processes

MINUTE = timedelta(minutes=1)

Command = Callable[..., Awaitable[Ended]]


@pytest.fixture
def command(dsn: str, processes: Processes) -> Command:
    """Runs `cron-ticks …` on the test's database to its end."""

    async def run(*arguments: str) -> Ended:
        running = await processes.cron_ticks(*arguments, "--dsn", dsn)
        output = await running.output()
        return Ended(await running.wait(), output, "\n".join(running.errors))

    return run


@pytest.fixture
async def engine(database: Database, connection: Any) -> Engine:
    """Two schedules that have fired for 27 minutes, up to now."""
    now: datetime = await connection.fetchval("SELECT statement_timestamp()")
    engine = Engine(database, now - 27 * MINUTE)
    await engine.declare("reports", every=300, jitter=None, name="first")
    await engine.declare("mails", every=600, jitter=None, name="second", workspace_id="ws")
    await engine.run_until(now, step=MINUTE / 3)
    return engine


async def test_an_audit_in_which_all_is_well(command: Command, engine: Engine) -> None:
    ended = await command("audit", "--since", "1h")
    assert ended.code == 0
    *_, times, counts, looked_at = ended.lines
    assert " to " in times
    assert counts.startswith("expected 9, enqueued ")
    assert counts.endswith("late 0, unexplained 0, duplicate 0")
    assert looked_at.startswith("2 schedule(s), 9 row(s) of the ledger, ")
    assert len(ended.lines) == 3
    everything = await command("audit", "--all")
    assert any(line.split()[:2] == ["ws/second", "3"] for line in everything.lines)
    begun = engine.now - 10 * MINUTE
    as_json = (await command("audit", "--json", "--all", "--since", begun.isoformat(), "--until", "0s")).json
    assert as_json["ok"] is True
    assert as_json["total"]["expected"] == sum(schedule["expected"] for schedule in as_json["schedules"])
    assert datetime.fromisoformat(as_json["since"]) == begun


async def test_what_is_missing_is_named_and_the_exit_code_says_so(
    command: Command, engine: Engine, connection: Any
) -> None:
    removed = engine.now - 22 * MINUTE
    schedule_id = await connection.fetchval(
        "DELETE FROM cron_runs WHERE scheduled_for = $1 RETURNING schedule_id", removed
    )
    ended = await command("audit")
    assert ended.code == 1
    lines = [line.strip() for line in ended.output.splitlines() if line.strip()]
    assert f"unexplained: {schedule_id} {removed.isoformat()}: {NOT_DEALT_WITH}" in lines
    shown = [line.split()[0] for line in lines]
    assert "first" in shown
    assert "ws/second" not in shown
    alone = await command("audit", "--json", "--schedule", schedule_id)
    assert alone.code == 1
    assert '"unexplained": 1' in alone.output
    before = await command("audit", "--until", "25m", "--json")
    assert before.code == 0


@pytest.mark.usefixtures("engine")
async def test_what_is_overdue_has_a_line(command: Command, connection: Any) -> None:
    await connection.execute("UPDATE cron_schedule_cursors SET next_tick_needed_at = now() - interval '10 minutes'")
    await connection.execute("DELETE FROM cron_ticks")
    await connection.execute("DELETE FROM cron_runs WHERE scheduled_for >= now() - interval '10 minutes'")
    ended = await command("audit")
    assert ended.code == 0
    assert any(line.startswith("overdue: 3 wait for too long.") for line in ended.lines)
    assert "pending 3, overdue 3, late 0" in ended.output
    assert (await command("audit", "--json")).json["total"]["overdue"] == 3


@pytest.mark.usefixtures("engine")
async def test_statistics_by_queue_and_by_schedule(command: Command) -> None:
    lines = (await command("stats", "--since", "24h")).lines
    assert [line.split()[:4] for line in lines[2:5]] == [
        ["queue", "mails", "3", "3"],
        ["queue", "reports", "6", "6"],
        ["total", "9", "9", "0"],
    ]
    assert "100.00 %" in lines[4]
    assert lines[-1] == "recoveries: 0 tried, 0 succeeded, 0 failed, 0 abandoned"
    found = (await command("stats", "--json")).json
    assert (found["total"]["expected"], found["schedules"]) == (9, [])
    assert [queue["queue_name"] for queue in found["queues"]] == ["mails", "reports"]
    found = (await command("stats", "--json", "--all")).json
    assert sorted(schedule["name"] for schedule in found["schedules"]) == ["first", "second"]
    assert found["total"]["success_rate"] == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("audit", "--since", "yesterday"), "error: since: must be a time such as 2027-01-01T09:00:00Z"),
        (("audit", "--until", "2026-01-01"), "error: until: must end in Z or in an offset"),
        (("audit", "--since", "1h", "--until", "2h"), "error: since: must be before until"),
        (("audit", "--until", "2400-01-01T00:00:00Z"), "error: until: must be at most"),
        (("audit", "--schedule", "cron_no"), "error: there is no schedule cron_no"),
        (("stats", "--since", "999999999d"), "error: since: "),
        (("audit", "--late-after", "soon"), "error: late_after: must be"),
    ],
)
async def test_a_wrong_option_is_an_error(command: Command, arguments: tuple[str, ...], says: str) -> None:
    ended = await command(*arguments)
    assert ended.code == 2
    assert says in ended.error
