"""`cron-ticks preview` and `cron-ticks apply`, and files of schedules that workers start with."""

import json
import signal
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from support.commands import Ended, fetch, run_command
from support.processes import TESTS, Processes

UNREACHABLE = {"CRON_TICKS_DSN": "postgresql://127.0.0.1:1/none", "CRON_TICKS_CONNECT_TIMEOUT_SECONDS": "0.3"}

TWO = """
owner = "billing"

[[schedules]]
queue_name = "report"
cron = "0 9 * * MON"
timezone = "Europe/Berlin"

[[schedules]]
queue_name = "sync"
workspace_id = "acme"
every = "5m"
"""

Apply = Callable[..., Ended]


@pytest.fixture
def apply(dsn: str, tmp_path: Path) -> Apply:
    """Runs `cron-ticks apply` with a file of this text on the test's database."""

    def run(text: str, *arguments: str, name: str = "calendar.toml") -> Ended:
        file = tmp_path / name
        file.write_text(text, encoding="utf-8")
        return run_command("apply", str(file), *arguments, "--dsn", dsn)

    return run


def names(dsn: str) -> list[str]:
    return [row["name"] for row in fetch(dsn, "SELECT name FROM cron_schedules ORDER BY name")]


def test_preview_shows_wall_time_and_utc() -> None:
    """Berlin's clocks jump from 02:00 to 03:00 on 29 March 2026, 01:00 UTC."""
    options = ("--cron", "30 2 * * *", "--timezone", "Europe/Berlin", "--after", "2026-03-28T00:00:00Z", "--count", "3")
    assert run_command("preview", *options).lines == [
        "at 02:30 every day, Europe/Berlin time",
        "clocks in Europe/Berlin              UTC",
        "──────────────────────────────────────────────────────────",
        "Sat 2026-03-28 02:30:00 +01:00 CET   2026-03-28 01:30:00Z",
        "Sun 2026-03-29 03:00:00 +02:00 CEST  2026-03-29 01:00:00Z",
        "Mon 2026-03-30 02:30:00 +02:00 CEST  2026-03-30 00:30:00Z",
    ]
    assert run_command("preview", *options, "--json").json == {
        "description": "at 02:30 every day, Europe/Berlin time",
        "timezone": "Europe/Berlin",
        "occurrences": [
            {"utc": "2026-03-28T01:30:00+00:00", "local": "2026-03-28T02:30:00+01:00"},
            {"utc": "2026-03-29T01:00:00+00:00", "local": "2026-03-29T03:00:00+02:00"},
            {"utc": "2026-03-30T00:30:00+00:00", "local": "2026-03-30T02:30:00+02:00"},
        ],
    }


@pytest.mark.parametrize(
    ("options", "local"),
    [
        (("--after", "2026-03-29T00:00:00+01:00"), "2026-03-29T03:00:00+02:00"),
        (("--after", "2026-03-29T00:00:00+01:00", "--dst-gap", "skip"), "2026-03-30T02:30:00+02:00"),
        (("--after", "2026-10-25T00:00:00+02:00"), "2026-10-25T02:30:00+02:00"),
        (("--after", "2026-10-25T00:00:00+02:00", "--dst-fold", "second"), "2026-10-25T02:30:00+01:00"),
    ],
)
def test_preview_takes_what_happens_when_clocks_are_changed(options: tuple[str, ...], local: str) -> None:
    shown = run_command("preview", "--cron", "30 2 * * *", "--timezone", "Europe/Berlin", *options, "--json").json
    assert shown["occurrences"][0]["local"] == local
    assert len(shown["occurrences"]) == 5


@pytest.mark.parametrize(
    ("zone", "after", "first"),
    [
        ("Asia/Tehran", "2026-01-01T00:00:00Z", "Fri 2026-01-02 00:00:00 +03:30  2026-01-01 20:30:00Z"),
        ("Africa/Monrovia", "1971-01-01T00:00:00Z", "Fri 1971-01-01 00:00:00 -00:44:30 MMT  1971-01-01 00:44:30Z"),
    ],
)
def test_an_offset_is_always_there_and_a_name_where_there_is_one(zone: str, after: str, first: str) -> None:
    lines = run_command("preview", "--cron", "0 0 * * *", "--timezone", zone, "--after", after).lines
    assert lines[3] == first


def test_preview_of_an_interval_and_of_a_one_off() -> None:
    shown = run_command("preview", "--every", "1m30s", "--after", "2026-01-01T00:00:00Z", "--count", "2", "--json").json
    assert [moment["utc"] for moment in shown["occurrences"]] == [
        "2026-01-01T00:01:30+00:00",
        "2026-01-01T00:03:00+00:00",
    ]
    assert shown["timezone"] == "UTC"
    assert run_command("preview", "--every", "1.5", "--after", "2026-01-01T00:00:00Z").lines[3:5] == [
        "Thu 2026-01-01 00:00:01.500 +00:00 UTC  2026-01-01 00:00:01.500Z",
        "Thu 2026-01-01 00:00:03 +00:00 UTC      2026-01-01 00:00:03Z",
    ]
    once = ("preview", "--at", "2026-01-01T01:00:00+01:00")
    assert run_command(*once, "--after", "2025-01-01T00:00:00Z", "--json").json["occurrences"] == [
        {"utc": "2026-01-01T00:00:00+00:00", "local": "2026-01-01T00:00:00+00:00"}
    ]
    assert run_command(*once, "--after", "2026-01-01T00:00:00Z").lines[1:] == [
        "no occurrences after 2026-01-01 00:00:00Z"
    ]


def test_preview_begins_now_and_needs_neither_a_database_nor_settings() -> None:
    before = datetime.now(UTC)
    ended = run_command(
        "preview", "--cron", "* * * * * *", "--json", environment=UNREACHABLE | {"CRON_TICKS_SHARD_ID": "x"}
    )
    first = datetime.fromisoformat(ended.json["occurrences"][0]["utc"])
    assert before < first <= datetime.now(UTC) + timedelta(seconds=1)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "every: give one of every=, cron= and at="),
        (("--cron", "* * * * *", "--every", "5m"), "every: give one of every=, cron= and at="),
        (("--cron", "*/70 * * * *"), "cron: minute '*/70': the step must be from 1 to 59"),
        (("--cron", "0 0 30 2 *"), "cron: "),
        (("--cron", "\x1b[2J"), "cron: "),
        (("--cron", "* * * * *", "--timezone", "Europe/Berlim"), "timezone: there is no time zone 'Europe/Berlim'"),
        (
            ("--cron", "* * * * *", "--timezone", "europe/berlin"),
            "timezone: there is no time zone 'europe/berlin': did",
        ),
        (("--cron", "* * * * *", "--timezone", ""), "timezone: there is no time zone ''"),
        (("--cron", "* * * * *", "--timezone", "localtime"), "timezone: there is no time zone 'localtime'"),
        (("--cron", "* * * * *", "--timezone", "../../etc/passwd"), "timezone: there is no time zone"),
        (("--cron", "* * * * *", "--dst-gap", "never"), "dst_gap: must be one of fire, skip, not 'never'"),
        (("--cron", "* * * * *", "--dst-fold", "third"), "dst_fold: must be one of first, second, both, not 'third'"),
        (("--cron", "* * * * *", "--count", "0"), "count: must be a whole number from 1 to 10000, not 0"),
        (("--cron", "* * * * *", "--after", "soon"), "after: must be a time such as"),
        (("--cron", "* * * * *", "--after", "2500-01-01T00:00:00Z"), "after: must be from 1970 to 2499"),
        (("--every", "5m", "--timezone", "Europe/Berlin"), "timezone: holds for cron= only"),
        (("--every", "5 minutes"), "every: must be a number of seconds or a text such as 30s"),
        (("--every", "0.5"), "every: must be from 1 second"),
        (("--every", "9" * 400), "every: must be "),
        (("--at", "2026-01-01T00:00:00"), "at: must end in Z or in an offset such as +01:00"),
        (("--at", "2026-02-30T00:00:00Z"), "at: must be a time such as"),
    ],
)
def test_a_wrong_preview_is_refused(options: tuple[str, ...], says: str) -> None:
    ended = run_command("preview", *options)
    assert (ended.code, ended.output) == (2, "")
    assert ended.error.startswith(f"error: {says}")
    assert "\x1b" not in ended.error


def test_apply_prints_what_it_does(apply: Apply, dsn: str) -> None:
    assert apply(TWO).lines == [
        "create    report",
        "create    acme/sync",
        "created 2, changed 0, removed 0, 0 unchanged",
    ]
    assert names(dsn) == ["report", "sync"]
    assert apply(TWO).lines == ["created 0, changed 0, removed 0, 2 unchanged"]
    assert apply(TWO, "--verbose").lines[:2] == ["unchanged report", "unchanged acme/sync"]
    changed = TWO.replace("0 9 * * MON", "0 8 * * MON").replace("Europe/Berlin", "Europe/Paris")
    assert apply(changed).lines == [
        "change    report: cron, timezone",
        "created 0, changed 1, removed 0, 1 unchanged",
    ]
    [row] = fetch(dsn, "SELECT cron, zone, owner FROM cron_schedules WHERE name = 'report'")
    assert tuple(row) == ("0 8 * * MON", "Europe/Paris", "billing")


def test_apply_as_json(apply: Apply, dsn: str) -> None:
    ids = {row["name"]: row["id"] for row in fetch(dsn, "SELECT id, name FROM cron_schedules")}
    assert ids == {}
    applied = apply(TWO, "--json").json
    ids = {row["name"]: row["id"] for row in fetch(dsn, "SELECT id, name FROM cron_schedules")}
    created = {"change": "create", "fields": []}
    assert applied == {
        "owner": "billing",
        "dry_run": False,
        "create": 2,
        "change": 0,
        "remove": 0,
        "unchanged": 0,
        "changes": [
            created | {"workspace_id": None, "name": "report", "schedule_id": ids["report"]},
            created | {"workspace_id": "acme", "name": "sync", "schedule_id": ids["sync"]},
        ],
    }
    assert [change["change"] for change in apply(TWO, "--json").json["changes"]] == ["unchanged", "unchanged"]


def test_a_dry_run_changes_nothing(apply: Apply, dsn: str) -> None:
    assert apply(TWO, "--dry-run").lines == [
        "create    report",
        "create    acme/sync",
        "dry run, nothing was changed: 2 to create, 0 to change, 0 to remove, 0 unchanged",
    ]
    planned = apply(TWO, "--dry-run", "--json").json
    assert (planned["dry_run"], planned["create"]) == (True, 2)
    assert [change["schedule_id"] for change in planned["changes"]] == [None, None]
    assert names(dsn) == []


def test_prune_removes_only_what_the_same_owner_declared(apply: Apply, dsn: str) -> None:
    apply(TWO)
    others = '[[schedules]]\nqueue_name = "theirs"\nevery = 60\n'
    assert apply(others, "--owner", "shipping").code == 0
    assert apply(others.replace("theirs", "nobodys")).code == 0
    one = TWO[: TWO.index("[[schedules]]", 30)]
    planned = apply(one, "--prune", "--dry-run", "--json").json
    [removed] = [change for change in planned["changes"] if change["change"] == "remove"]
    assert [removed["schedule_id"]] == [
        row["id"] for row in fetch(dsn, "SELECT id FROM cron_schedules WHERE name = 'sync'")
    ]
    assert apply(one).lines == ["created 0, changed 0, removed 0, 1 unchanged"]
    assert names(dsn) == ["nobodys", "report", "sync", "theirs"]
    assert apply(one, "--prune").lines == ["remove    acme/sync", "created 0, changed 0, removed 1, 1 unchanged"]
    assert names(dsn) == ["nobodys", "report", "theirs"]


def test_prune_needs_an_owner(apply: Apply, dsn: str) -> None:
    apply(TWO)
    ended = apply("schedules = []\n", "--prune")
    assert (ended.code, ended.output) == (2, "")
    assert ended.error.startswith("error: owner: ")
    assert names(dsn) == ["report", "sync"]


def test_what_another_deployment_declared_is_left_alone(apply: Apply, dsn: str) -> None:
    apply(TWO)
    ended = apply(TWO.replace("0 9 * * MON", "0 7 * * MON"), "--owner", "shipping")
    assert (ended.code, ended.output) == (2, "")
    assert "calendar.toml:4 schedule 'report': owner: " in ended.error
    assert "calendar.toml:9 schedule 'sync': owner: " in ended.error
    assert [row["cron"] for row in fetch(dsn, "SELECT cron FROM cron_schedules WHERE name = 'report'")] == [
        "0 9 * * MON"
    ]


def test_all_mistakes_are_shown_with_their_place_and_nothing_is_written(apply: Apply, dsn: str) -> None:
    text = """\
[[schedules]]
queue_name = "right"
every = 60

[[schedules]]
queue_name = "zone"
cron = "0 9 * * *"
timezone = "Europe/Berlim"

[[schedules]]
queue_name = "expression"
cron = "*/70 9 * * *"
priority = "soon"
"""
    for _ in range(2):
        ended = apply(text)
        assert (ended.code, ended.output) == (2, "")
        assert ended.error.splitlines()[0] == "error: 3 mistake(s), nothing was changed:"
        places = (
            "5 schedule 'zone': timezone: there",
            "10 schedule 'expression': cron: ",
            "10 schedule 'expression': priority",
        )
        for place, line in zip(places, ended.error.splitlines()[1:], strict=True):
            assert line.startswith(f"  calendar.toml:{place}")
        assert names(dsn) == []


def test_yaml_is_taken_too(apply: Apply, dsn: str) -> None:
    text = "owner: billing\nschedules:\n  - queue_name: report\n    cron: '0 9 * * MON'\n    timezone: {zone}\n"
    wrong = apply(text.format(zone="Mars/Olympus"), name="calendar.yaml")
    assert wrong.code == 2
    assert "calendar.yaml:3 schedule 'report': timezone: there is no time zone 'Mars/Olympus'" in wrong.error
    assert names(dsn) == []
    assert apply(text.format(zone="Asia/Tokyo"), name="calendar.yaml").lines[0] == "create    report"
    assert names(dsn) == ["report"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "calendar.txt: the name must end in .toml, .yaml, .yml"),
        ("[[schedules]\n", "calendar.toml: can't be read: "),
        ('"\\u001b[2J" = 1\n', "calendar.toml: \N{REPLACEMENT CHARACTER}[2J: there is no such key"),
    ],
)
def test_a_file_that_is_none_is_said_so(apply: Apply, text: str, says: str) -> None:
    ended = apply(text, name="calendar.toml" if text else "calendar.txt")
    assert (ended.code, ended.output) == (2, "")
    assert says in ended.error
    assert "\x1b" not in ended.error


def test_a_broken_schedule_is_tried_again(apply: Apply, dsn: str) -> None:
    apply(TWO)
    fetch(dsn, "UPDATE cron_schedules SET error = 'gone', error_at = now() WHERE name = 'report'")
    assert apply(TWO).lines[0] == "change    report: tried again, because it was broken"
    assert [row["error"] for row in fetch(dsn, "SELECT error FROM cron_schedules")] == [None, None]


def test_names_do_not_steer_the_terminal(apply: Apply, dsn: str) -> None:
    apply(TWO)
    fetch(dsn, "UPDATE cron_schedules SET name = E'\\x1b[2J\nx' WHERE name = 'sync'")
    removed = apply(TWO[: TWO.index("[[schedules]]", 30)], "--prune")
    assert removed.lines[0] == "remove    acme/\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}x"


def test_apply_without_a_server_is_an_error_without_traceback(tmp_path: Path) -> None:
    (tmp_path / "calendar.toml").write_text(TWO, encoding="utf-8")
    ended = run_command("apply", str(tmp_path / "calendar.toml"), environment=UNREACHABLE)
    assert (ended.code, ended.output) == (2, "")
    assert "error: no answer from PostgreSQL within 0.3 s" in ended.error


OUTSIDE = '[[schedules]]\nqueue_name = "queue"\nevery = 3600\nsink = "{sink}"\n'


def start_of(command: str, app: str, file: Path) -> list[str]:
    arguments = ["--for", "1", "--workers", "1", "--json"] if command == "up" else []
    return [command, "--app", f"support.{app}", "--schedules", str(file), *arguments]


@pytest.mark.parametrize("command", ["worker", "up"])
async def test_a_worker_does_not_start_with_a_wrong_file(
    dsn: str, processes: Processes, connection: Any, tmp_path: Path, command: str
) -> None:
    file = tmp_path / "calendar.toml"
    file.write_text(TWO.replace("Europe/Berlin", "Europe/Berlim"), encoding="utf-8")
    environment = {"CRON_TICKS_DSN": dsn, "PYTHONPATH": str(TESTS)}
    running = await processes.cron_ticks(*start_of(command, "apps:quick", file), environment=environment)
    assert (await running.output(), await running.wait()) == ("", 2)
    [first, second] = running.errors[-2:]
    assert first == "error: 1 mistake(s), nothing was changed:"
    assert second.startswith("  calendar.toml:4 schedule 'report': timezone: there is no time zone 'Europe/Berlim'")
    assert not any(event["event"] == "worker_started" for event in running.events)
    assert await connection.fetchval("SELECT count(*) FROM cron_schedules") == 0
    assert await connection.fetchval("SELECT count(*) FROM queue_workers") == 0


async def test_a_worker_starts_with_a_file(dsn: str, processes: Processes, tmp_path: Path) -> None:
    file = tmp_path / "calendar.toml"
    file.write_text(OUTSIDE.format(sink="queue"), encoding="utf-8")
    environment = {"CRON_TICKS_DSN": dsn, "PYTHONPATH": str(TESTS)}
    worker = await processes.cron_ticks(*start_of("worker", "apps:quick", file), environment=environment)
    await worker.wait_for("handled")
    order = [event["event"] for event in worker.events]
    assert order.index("schedule_created") < order.index("worker_started")


async def test_up_applies_a_file_to_the_database_that_it_is_given(
    dsn: str, processes: Processes, connection: Any, tmp_path: Path
) -> None:
    """The sink is the application's own: nobody else could have said yet that there is one."""
    await connection.execute("CREATE TABLE jobs (id text PRIMARY KEY)")
    file = tmp_path / "calendar.toml"
    file.write_text(OUTSIDE.format(sink="table"), encoding="utf-8")
    environment = {"PYTHONPATH": str(TESTS), "RECORDER_PORT": "1", **UNREACHABLE}
    running = await processes.cron_ticks(
        *start_of("up", "sink_apps:hanging", file), "--dsn", dsn, environment=environment
    )
    summary = json.loads(await running.output())
    assert await running.wait() == 0
    assert [schedule["name"] for schedule in summary["schedules"]] == ["queue"]


async def test_up_counts_what_the_file_makes_fire_at_once(dsn: str, processes: Processes, tmp_path: Path) -> None:
    """And declares no examples."""
    file = tmp_path / "calendar.toml"
    file.write_text(OUTSIDE.format(sink="queue"), encoding="utf-8")
    arguments = ("--workers", "1", "--json", "--dsn", dsn, "--schedules", str(file))
    running = await processes.cron_ticks("up", *arguments)
    await running.wait_for("ticks_fired")
    running.send(signal.SIGTERM)
    summary = json.loads(await running.output())
    assert [(schedule["name"], schedule["fired"]) for schedule in summary["schedules"]] == [("queue", 1)]


async def test_up_with_a_file_of_nothing_declares_nothing(dsn: str, processes: Processes, tmp_path: Path) -> None:
    """Not even the examples: somebody has said what there is to schedule."""
    file = tmp_path / "calendar.toml"
    file.write_text("schedules = []\n", encoding="utf-8")
    arguments = ("--workers", "1", "--for", "0.1", "--json", "--dsn", dsn, "--schedules", str(file))
    running = await processes.cron_ticks("up", *arguments)
    assert json.loads(await running.output())["schedules"] == []
