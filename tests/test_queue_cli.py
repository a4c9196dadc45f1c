"""`cron-ticks queue …`, in processes of their own."""

import asyncio
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from support.commands import Ended
from support.processes import Processes

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
MESSAGE_ID = r"msg_[0-9A-HJKMNP-TV-Z]{26}"
UNREACHABLE = {"CRON_TICKS_DSN": "postgresql://127.0.0.1:1/none", "CRON_TICKS_CONNECT_TIMEOUT_SECONDS": "0.3"}


Queue = Callable[..., Awaitable[Ended]]


@pytest.fixture
def queue(dsn: str, processes: Processes) -> Queue:
    """Runs `cron-ticks queue …` on the test's database to its end."""

    async def run(*arguments: str) -> Ended:
        running = await processes.cron_ticks("queue", *arguments, "--dsn", dsn)
        output = await running.output()
        return Ended(await running.wait(), output, "\n".join(running.errors))

    return run


def run_on_terminal(answer: str, *arguments: str) -> Ended:
    """Run `cron-ticks queue …` with a terminal as its standard input, and answer its question."""
    terminal, its_end = pty.openpty()
    try:
        os.write(terminal, f"{answer}\n".encode())
        command = [sys.executable, "-m", "cron_ticks.cli", "queue", *arguments]
        ended = subprocess.run(command, stdin=its_end, capture_output=True, text=True, check=False, timeout=60)
    finally:
        os.close(terminal)
        os.close(its_end)
    return Ended(ended.returncode, ended.stdout, ended.stderr)


async def insert(connection: Any, message_id: str, minute: int = 0, **columns: Any) -> None:
    """A message that died so many minutes after noon, unless its columns say otherwise."""
    row = {
        "id": message_id,
        "queue_name": "reports",
        "payload": "{}",
        "process_after": NOON,
        "inserted_at": NOON - MINUTE,
        "dlq_at": NOON + minute * MINUTE,
        "attempts": 2,
        "failed_at": [NOON, NOON + minute * MINUTE],
        "error_type": "ValueError",
        "error_message": "no such report",
    } | columns
    places = ", ".join(f"${number}" for number in range(1, len(row) + 1))
    await connection.execute(f"INSERT INTO queue_messages ({', '.join(row)}) VALUES ({places})", *row.values())


async def insert_four(connection: Any) -> None:
    """Dead letters of two queues and two workspaces, b2 the latest."""
    await insert(connection, "a1", 1)
    await insert(connection, "a2", 2, workspace_id="acme")
    await insert(connection, "b1", 3, queue_name="mails")
    await insert(connection, "b2", 4, queue_name="mails", workspace_id="acme")


async def dead_ids(connection: Any) -> list[str]:
    rows = await connection.fetch("SELECT id FROM queue_messages WHERE dlq_at IS NOT NULL ORDER BY id")
    return [row["id"] for row in rows]


def cells(output: str) -> list[list[str]]:
    """The rows of a table, the heading among them."""
    return [re.split(r" {2,}", line.strip()) for line in output.splitlines() if line.strip() and "──" not in line]


async def test_lists_queues_and_marks_those_without_workers(queue: Queue, connection: Any) -> None:
    hour_ago = datetime.now(UTC) - timedelta(hours=1)
    await insert(connection, "due", dlq_at=None, process_after=hour_ago)
    await insert(connection, "waiting", dlq_at=None, process_after=hour_ago + timedelta(days=1))
    await insert(connection, "served", dlq_at=None, process_after=hour_ago + timedelta(days=1), queue_name="served")
    await insert(connection, "dead", queue_name="dead")
    await connection.execute(
        "INSERT INTO queue_workers VALUES ('ticker_1', '{served,idle}', false, now(), now() + interval '1 hour')"
    )
    listed = await queue("list", "--json")
    states = {state.pop("queue_name"): state for state in listed.json}
    assert 3600 <= states["reports"].pop("oldest_due_age_seconds") < 3700
    assert datetime.fromisoformat(states["reports"].pop("oldest_due")) == hour_ago
    assert states["reports"] == {"due": 1, "waiting": 1, "dead": 0, "workers": 0, "unhandled": True}
    nothing = {"oldest_due": None, "oldest_due_age_seconds": None, "unhandled": False, "due": 0}
    assert states["served"] == nothing | {"waiting": 1, "dead": 0, "workers": 1}
    assert states["idle"] == nothing | {"waiting": 0, "dead": 0, "workers": 1}
    assert states["dead"] == nothing | {"waiting": 0, "dead": 1, "workers": 0}
    table = await queue("list")
    assert table.code == 0
    [headings, dead, idle, reports, served] = cells(table.output)
    assert headings == ["queue", "due", "waiting", "dead", "oldest due", "workers"]
    assert dead == ["dead", "0", "0", "1", "0"]
    assert idle == ["idle", "0", "0", "0", "1"]
    assert re.fullmatch(r"1:0\d:\d\d", reports.pop(4))
    assert reports == ["reports", "1", "1", "0", "0: NOT HANDLED"]
    assert served == ["served", "0", "1", "0", "1"]


async def test_says_that_there_is_nothing(queue: Queue) -> None:
    assert (await queue("list")).output == "no queues: there are neither messages nor workers\n"
    assert (await queue("list", "--json")).json == []
    assert (await queue("dlq", "list")).output == "no dead letters\n"
    assert (await queue("dlq", "list", "--json")).json == []


async def test_sends_and_prints_the_id(queue: Queue, connection: Any) -> None:
    sent = await queue("send", "reports", '{"month": "März"}')
    assert (sent.code, sent.error) == (0, "")
    assert re.fullmatch(MESSAGE_ID, sent.output.strip())
    row = await connection.fetchrow("SELECT *, process_after <= now() AS due FROM queue_messages")
    assert (row["id"], row["queue_name"]) == (sent.output.strip(), "reports")
    assert json.loads(row["payload"]) == {"month": "März"}
    assert (row["workspace_id"], row["dedupe_key"], row["priority"], row["due"]) == (None, None, 2, True)
    assert await connection.fetchval("SELECT count(*) FROM queue_workers") == 0, "no worker was started"


async def test_sends_with_every_option(queue: Queue, connection: Any) -> None:
    options = ("--workspace", "acme", "--delay", "3600.5", "--priority", "urgent", "--dedupe-key", "month")
    sent = (await queue("send", "reports", *options, "--json")).json
    row = await connection.fetchrow("SELECT *, process_after - inserted_at AS delay FROM queue_messages")
    assert sent == {"id": row["id"], "duplicate": False}
    assert (row["payload"], row["workspace_id"], row["dedupe_key"], row["priority"]) == ("{}", "acme", "month", 0)
    assert row["delay"] == timedelta(seconds=3600.5)
    again = await queue("send", "reports", *options)
    assert (again.code, again.output) == (0, f"not sent: duplicate of {sent['id']}, which is unfinished\n")
    assert (await queue("send", "reports", *options, "--json")).json == {"id": sent["id"], "duplicate": True}
    assert await connection.fetchval("SELECT count(*) FROM queue_messages") == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("reports", "{month: 1}"), "error: PAYLOAD_JSON: is not JSON: "),
        (("reports", "[" * 100_000), "error: PAYLOAD_JSON: is not JSON: "),
        (("reports", "NaN"), "error: payload: must be JSON: "),
        (("reports", '"\\u0000"'), "error: payload: must not contain NUL"),
        (("",), "error: queue_name: must not be empty"),
        (("reports", "--priority", "soon"), "error: priority: must be one of urgent, high, normal, low, not 'soon'"),
        (("reports", "--workspace", ""), "error: workspace_id: must not be empty"),
        (("reports", "--dedupe-key", ""), "error: dedupe_key: must not be empty"),
        (("reports", "--delay", "inf"), "error: process_after: must be a delay from 0 s"),
        (("reports", "--delay", "-1"), "Invalid value for '--delay'"),
    ],
)
async def test_a_wrong_message_is_not_sent(
    queue: Queue, connection: Any, arguments: tuple[str, ...], says: str
) -> None:
    sent = await queue("send", *arguments)
    assert (sent.code, sent.output) == (2, "")
    assert says in sent.error
    assert await connection.fetchval("SELECT count(*) FROM queue_messages") == 0


async def test_lists_dead_letters(queue: Queue, connection: Any) -> None:
    await insert_four(connection)
    await insert(connection, "alive", dlq_at=None)
    listed = await queue("dlq", "list")
    assert listed.code == 0
    error = "ValueError: no such report"
    assert cells(listed.output) == [
        ["id", "queue", "workspace", "dead at", "attempts", "error"],
        ["b2", "mails", "acme", "2026-01-01 12:04:00Z", "2", error],
        ["b1", "mails", "2026-01-01 12:03:00Z", "2", error],
        ["a2", "reports", "acme", "2026-01-01 12:02:00Z", "2", error],
        ["a1", "reports", "2026-01-01 12:01:00Z", "2", error],
    ]
    letters = (await queue("dlq", "list", "--json")).json
    assert [letter["id"] for letter in letters] == ["b2", "b1", "a2", "a1"]
    assert letters[0] == (await queue("dlq", "show", "b2", "--json")).json


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--queue", "reports"), ["a2", "a1"]),
        (("--workspace", "acme"), ["b2", "a2"]),
        (("--queue", "mails", "--workspace", "acme"), ["b2"]),
        (("--limit", "2"), ["b2", "b1"]),
        (("--limit", "2", "--after", "b1"), ["a2", "a1"]),
        (("--queue", "reports", "--after", "b2", "--limit", "1"), ["a2"]),
    ],
)
async def test_lists_some_dead_letters(
    queue: Queue, connection: Any, options: tuple[str, ...], expected: list[str]
) -> None:
    await insert_four(connection)
    assert [letter["id"] for letter in (await queue("dlq", "list", *options, "--json")).json] == expected


async def test_a_full_page_says_how_to_go_on(queue: Queue, connection: Any) -> None:
    await insert_four(connection)
    assert (await queue("dlq", "list", "--limit", "3")).output.endswith("\nthere may be more: --after a2\n")
    assert "more" not in (await queue("dlq", "list", "--limit", "3", "--after", "a2")).output


async def test_a_table_shows_whole_ids_and_the_first_line_of_an_error_as_it_is(queue: Queue, connection: Any) -> None:
    message_id = "msg_01JGFJJZ00000000000000000A"
    await insert(
        connection,
        message_id,
        queue_name="a.queue.with.quite.a.long.name.that.needs.several.lines",
        workspace_id="a.workspace.with.quite.a.long.name.that.needs.several.lines",
        error_message="[bold]no :smile:\x1b[2J\nsecond line",
    )
    output = (await queue("dlq", "list")).output
    assert message_id in output
    assert "[bold]no" in output
    assert ":smile:\N{REPLACEMENT CHARACTER}[2J" in output
    assert "second" not in output


async def test_an_error_that_is_not_known_is_left_out(queue: Queue, connection: Any) -> None:
    await insert(connection, "m", error_type=None, error_message=None, failed_at=[])
    assert cells((await queue("dlq", "list")).output)[1] == ["m", "reports", "2026-01-01 12:00:00Z", "2"]
    assert (await queue("dlq", "show", "m")).code == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("list", "--limit", "0"), "limit: must be a whole number from 1 to 10000, not 0"),
        (("list", "--queue", ""), "queue_name: must not be empty"),
        (("list", "--workspace", ""), "workspace_id: must not be empty"),
        (("list", "--after", "gone"), "there is no dead letter gone"),
        (("show", "gone"), "there is no dead letter gone"),
        (("show", "alive"), "there is no dead letter alive"),
        (("redrive", "a1", ""), "message_id: must not be empty"),
        (("redrive", "--queue", ""), "queue_name: must not be empty"),
        (("purge", "--yes", "a1", ""), "message_id: must not be empty"),
        (("purge", "--yes", "--workspace", ""), "workspace_id: must not be empty"),
    ],
)
async def test_wrong_options_are_said_so(queue: Queue, connection: Any, arguments: tuple[str, ...], says: str) -> None:
    await insert(connection, "a1")
    await insert(connection, "alive", dlq_at=None)
    ended = await queue("dlq", *arguments)
    assert (ended.code, ended.output) == (2, "")
    assert ended.error.startswith(f"error: {says}")
    assert await dead_ids(connection) == ["a1"]


async def test_shows_everything_about_a_dead_letter(queue: Queue, connection: Any) -> None:
    await insert(
        connection,
        "m",
        1,
        workspace_id="acme",
        payload='{"month": 3}',
        headers='{"trace": "t"}',
        worker_deaths=1,
        error_message="no such report\nlook again",
        error_traceback="Traceback:\n  line 1\n\x1b[2J",
    )
    assert (await queue("dlq", "show", "m", "--json")).json == {
        "id": "m",
        "queue_name": "reports",
        "workspace_id": "acme",
        "payload": {"month": 3},
        "headers": {"trace": "t"},
        "attempts": 2,
        "worker_deaths": 1,
        "error_type": "ValueError",
        "error_message": "no such report\nlook again",
        "error_traceback": "Traceback:\n  line 1\n\x1b[2J",
        "sent_at": "2026-01-01T11:59:00+00:00",
        "failed_at": ["2026-01-01T12:00:00+00:00", "2026-01-01T12:01:00+00:00"],
        "dead_at": "2026-01-01T12:01:00+00:00",
    }
    shown = await queue("dlq", "show", "m")
    assert shown.code == 0
    assert (
        shown.output
        == """\
id             m
queue          reports
workspace      acme
sent at        2026-01-01 11:59:00Z
dead at        2026-01-01 12:01:00Z
attempts       2
worker deaths  1
failed at      2026-01-01 12:00:00Z
failed at      2026-01-01 12:01:00Z
last error     ValueError: no such report
look again
payload        {
  "month": 3
}
headers        {
  "trace": "t"
}
Traceback:
  line 1
\N{REPLACEMENT CHARACTER}[2J
"""
    )


CHANGES = [(("redrive",), "redriven"), (("purge", "--yes"), "purged")]


@pytest.mark.parametrize(("command", "verb"), CHANGES)
@pytest.mark.parametrize(
    ("options", "left"),
    [
        (("--queue", "reports"), ["b1", "b2"]),
        (("--workspace", "acme"), ["a1", "b1"]),
        (("--queue", "mails", "--workspace", "acme"), ["a1", "a2", "b1"]),
        (("--all",), []),
        (("a1", "b2", "a1"), ["a2", "b1"]),
    ],
)
async def test_changes_what_is_chosen(
    queue: Queue, connection: Any, *, command: tuple[str, ...], verb: str, options: tuple[str, ...], left: list[str]
) -> None:
    await insert_four(connection)
    await insert(connection, "alive", dlq_at=None)
    changed = await queue("dlq", *command, *options)
    assert (changed.code, changed.output) == (0, f"{verb} {4 - len(left)}\n")
    assert await dead_ids(connection) == left
    there = await connection.fetchval("SELECT count(*) FROM queue_messages")
    assert there == (5 if verb == "redriven" else 1 + len(left))
    again = await queue("dlq", *command, "--queue", "none", "--json")
    assert again.json == {verb: 0, "not_found": [], "still_dead": []}


@pytest.mark.parametrize(("command", "verb"), CHANGES)
async def test_ids_that_are_no_dead_letters_are_reported(
    queue: Queue, connection: Any, command: tuple[str, ...], verb: str
) -> None:
    await insert_four(connection)
    await insert(connection, "alive", dlq_at=None)
    changed = await queue("dlq", *command, "gone", "a1", "alive")
    assert changed.code == 1
    assert changed.output.splitlines() == [
        f"{verb} 1",
        "not found among the dead letters: gone",
        "not found among the dead letters: alive",
    ]
    changed = await queue("dlq", *command, "--json", "b1", "a1")
    assert changed.code == 1
    assert json.loads(changed.output) == {verb: 1, "not_found": ["a1"], "still_dead": []}
    assert await dead_ids(connection) == ["a2", "b2"]
    assert await connection.fetchval("SELECT attempts FROM queue_messages WHERE id = 'alive'") == 2


async def test_a_dead_letter_whose_key_is_taken_is_reported(queue: Queue, connection: Any) -> None:
    await insert(connection, "alive", dlq_at=None, dedupe_key="key")
    await insert(connection, "a", dedupe_key="key")
    await insert(connection, "b")
    redriven = await queue("dlq", "redrive", "a", "b")
    assert redriven.code == 1
    assert redriven.output == "redriven 1\nstill dead: a: an unfinished message has its dedupe key\n"
    redriven = await queue("dlq", "redrive", "a", "--json")
    assert redriven.code == 1
    assert json.loads(redriven.output) == {"redriven": 0, "not_found": [], "still_dead": ["a"]}


@pytest.mark.parametrize("command", [("redrive",), ("purge", "--yes")])
@pytest.mark.parametrize(
    ("options", "ending"),
    [
        ((), "or --all"),
        (("a1", "--queue", "reports"), "or --all, and only one of these"),
        (("a1", "--workspace", "acme"), "or --all, and only one of these"),
        (("a1", "--all"), "or --all, and only one of these"),
        (("--all", "--queue", "reports"), "or --all, and only one of these"),
    ],
)
async def test_an_unclear_choice_changes_nothing(
    processes: Processes, command: tuple[str, ...], options: tuple[str, ...], ending: str
) -> None:
    """There is no database to change: the choice is checked first."""
    ended = await processes.cron_ticks("queue", "dlq", *command, *options, environment=UNREACHABLE)
    assert await ended.output() == ""
    assert await ended.wait() == 2
    assert ended.errors == [f"error: which dead letters? Give ids, or --queue or --workspace or both, {ending}"]


async def test_purge_without_a_terminal_wants_a_yes(queue: Queue, connection: Any) -> None:
    await insert(connection, "a1")
    ended = await queue("dlq", "purge", "--all")
    assert (ended.code, ended.output) == (2, "")
    assert ended.error == "error: purge deletes for good, and there is no terminal to ask on: give --yes"
    assert await dead_ids(connection) == ["a1"]


@pytest.mark.parametrize(
    ("options", "question"),
    [
        (("a1", "gone"), "Delete 2 dead letter(s) for good?"),
        (("--all",), "Delete all dead letters for good?"),
        (("--queue", "reports"), "Delete all dead letters of reports for good?"),
        (("--queue", "mails", "--workspace", "acme"), "Delete all dead letters of mails of acme for good?"),
    ],
)
async def test_purge_asks_on_a_terminal(dsn: str, connection: Any, options: tuple[str, ...], question: str) -> None:
    await insert_four(connection)
    refused = await asyncio.to_thread(run_on_terminal, "n", "dlq", "purge", *options, "--dsn", dsn)
    assert refused.code == 1
    assert question in refused.error
    assert await dead_ids(connection) == ["a1", "a2", "b1", "b2"]


async def test_purge_goes_on_after_a_yes(dsn: str, connection: Any) -> None:
    await insert_four(connection)
    purged = await asyncio.to_thread(run_on_terminal, "y", "dlq", "purge", "a1", "b1", "--dsn", dsn)
    assert (purged.code, purged.output.strip()) == (0, "purged 2")
    assert await dead_ids(connection) == ["a2", "b2"]
    purged = await asyncio.to_thread(run_on_terminal, "y", "dlq", "purge", "--all", "--json", "--dsn", dsn)
    assert purged.json == {"purged": 2, "not_found": [], "still_dead": []}


@pytest.mark.parametrize(
    "arguments",
    [
        ("list",),
        ("send", "reports"),
        ("dlq", "list"),
        ("dlq", "show", "m"),
        ("dlq", "redrive", "m"),
        ("dlq", "purge", "--yes", "m"),
    ],
)
async def test_an_unreachable_server_is_an_error_without_traceback(
    processes: Processes, arguments: tuple[str, ...]
) -> None:
    ended = await processes.cron_ticks("queue", *arguments, "--json", environment=UNREACHABLE)
    assert await ended.wait() == 2
    assert ended.errors[-1].startswith("error: no answer from PostgreSQL within 0.3 s")


async def test_uses_the_database_and_the_schema_of_the_settings(
    dsn: str, processes: Processes, connection: Any
) -> None:
    environment = {"CRON_TICKS_DSN": dsn, "CRON_TICKS_DATABASE_SCHEMA": "tenant"}
    sent = await processes.cron_ticks("queue", "send", "reports", environment=environment)
    assert await sent.wait() == 0
    assert await connection.fetchval("SELECT id FROM tenant.queue_messages") == (await sent.output()).strip()
    assert await connection.fetchval("SELECT count(*) FROM public.queue_messages") == 0
