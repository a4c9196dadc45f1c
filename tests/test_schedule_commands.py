"""`cron-ticks schedule …`: looking at schedules, and changing them by hand."""

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest

from cron_ticks.schedules import Schedule
from support.commands import Ended, fetch, manage, run_command
from support.processes import Processes

UNREACHABLE = {"CRON_TICKS_DSN": "postgresql://127.0.0.1:1/none", "CRON_TICKS_CONNECT_TIMEOUT_SECONDS": "0.3"}
SCHEDULE_ID = r"cron_[0-9A-HJKMNP-TV-Z]{26}"
HOSTILE = "\x1b[2J[bold]:smile:\n\u202ex"
HARMLESS = "\N{REPLACEMENT CHARACTER}[2J[bold]:smile:\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}x"

Command = Callable[..., Ended]


@pytest.fixture
def command(dsn: str) -> Command:
    """Runs `cron-ticks schedule …` on the test's database."""
    return lambda *arguments: run_command("schedule", *arguments, "--dsn", dsn)


def declare(dsn: str, queue_name: str, **options: Any) -> Schedule:
    return manage(dsn, lambda queue_manager: queue_manager.schedule(queue_name, **options))


def declare_three(dsn: str) -> list[Schedule]:
    """In the order of their ids."""
    return [
        declare(dsn, "a", every=60, owner="billing"),
        declare(dsn, "b", cron="0 9 * * MON", timezone="Asia/Tokyo", workspace_id="acme"),
        declare(dsn, "c", cron="0 9 * * *", workspace_id="acme", name="third", owner="billing"),
    ]


def break_schedule(dsn: str, schedule_id: str, error: str) -> None:
    fetch(dsn, "UPDATE cron_schedules SET error = $2, error_at = '2026-01-01Z' WHERE id = $1", schedule_id, error)


def stored(dsn: str) -> list[Any]:
    """All that a command could have changed."""
    tables = ("cron_schedules", "cron_schedule_cursors", "cron_schedule_versions", "cron_ticks", "cron_workspaces")
    return [fetch(dsn, f"SELECT * FROM {table} ORDER BY 1, 2") for table in tables]


def value(dsn: str, query: str) -> Any:
    [[found]] = fetch(dsn, query)
    return found


def cells(output: str) -> list[list[str]]:
    """The rows of a table, the heading among them."""
    return [re.split(r" {2,}", line.strip()) for line in output.splitlines() if line.strip() and "──" not in line]


def test_lists_schedules(command: Command, dsn: str) -> None:
    first, second, third = declare_three(dsn)
    manage(dsn, lambda queue_manager: queue_manager.disable_schedule(third.id))
    listed = command("list", "--json").json
    assert [shown["id"] for shown in listed] == [first.id, second.id, third.id]
    assert [shown["state"] for shown in listed] == ["enabled", "enabled", "disabled"]
    assert [len(shown["next"]) for shown in listed] == [1, 1, 0]
    assert listed[1]["description"] == second.description
    [headings, *rows] = cells(command("list").output)
    assert headings == ["id", "name", "when", "queue", "next", "state"]
    by_id = {row[0]: row[1:] for row in rows if re.match(SCHEDULE_ID, row[0])}
    moment = datetime.fromisoformat(listed[1]["next"][0]["utc"])
    assert moment.astimezone(UTC).hour == 0, "nine o'clock in Tokyo"
    assert by_id[first.id][:3] == ["a", "every minute", "a"]
    assert by_id[second.id][0] == "acme/b"
    assert by_id[second.id][2:] == ["b", f"{moment:%Y-%m-%d %H:%M:%S}Z", "enabled"]
    assert by_id[third.id][0] == "acme/third"
    assert by_id[third.id][2:] == ["c", "disabled"]


def test_says_that_there_is_nothing(command: Command) -> None:
    assert command("list").output == "no schedules\n"
    assert command("list", "--json").json == []


def test_lists_some_schedules(command: Command, dsn: str) -> None:
    schedules = declare_three(dsn)
    break_schedule(dsn, schedules[1].id, "no such zone")
    for options, expected in [
        (("--workspace", "acme"), "bc"),
        (("--workspace", "none"), ""),
        (("--owner", "billing"), "ac"),
        (("--owner", "billing", "--workspace", "acme"), "c"),
        (("--broken",), "b"),
        (("--broken", "--owner", "billing"), ""),
        (("--limit", "2"), "ab"),
        (("--owner", "billing", "--limit", "1"), "a"),
    ]:
        listed = command("list", *options, "--json").json
        assert "".join(shown["queue_name"] for shown in listed) == expected, options


def test_a_full_page_says_how_to_go_on(command: Command, dsn: str) -> None:
    first, second, third = declare_three(dsn)
    assert command("list", "--limit", "2").lines[-1] == f"there may be more: --after {second.id}"
    page = command("list", "--limit", "2", "--after", second.id)
    assert third.id in page.output
    assert "more" not in page.output
    page = command("list", "--owner", "billing", "--limit", "1", "--after", first.id, "--json")
    assert [shown["id"] for shown in page.json] == [third.id]


def test_those_chosen_are_found_on_later_pages(command: Command, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cron_ticks.cli.schedule_commands.SMALLEST_PAGE", 1)
    schedules = [declare(dsn, f"q{number}", every=60) for number in range(5)]
    for broken in (schedules[2], schedules[4]):
        break_schedule(dsn, broken.id, "gone")
    assert [shown["id"] for shown in command("list", "--broken", "--limit", "1", "--json").json] == [schedules[2].id]
    assert [shown["id"] for shown in command("list", "--broken", "--limit", "2", "--json").json] == [
        schedules[2].id,
        schedules[4].id,
    ]


def test_a_broken_schedule_says_why(command: Command, dsn: str) -> None:
    schedule = declare(dsn, "q", cron="0 9 * * *", timezone="Asia/Tokyo")
    break_schedule(dsn, schedule.id, "no zone\nsecond line\x1b[2J")
    listed = command("list").output
    assert "BROKEN: no zone" in " ".join(listed.split())
    assert "second" not in listed
    shown = command("list", "--json").json[0]
    assert (shown["state"], shown["next"]) == ("broken", [])
    assert shown["error"] == "no zone\nsecond line\x1b[2J"
    lines = command("show", schedule.id).lines
    assert "state          BROKEN: no zone" in lines
    assert "broken since   2026-01-01 00:00:00Z" in lines
    assert lines[lines.index("error          no zone") + 1] == "second line\N{REPLACEMENT CHARACTER}[2J"
    assert lines[-1] == "no occurrences, because it is BROKEN: no zone"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("timezone = 'Mars/Olympus', zone = 'Mars/Olympus'", "there is no time zone 'Mars/Olympus'"),
        ("cron = 'a b c d e'", "minute"),
    ],
)
def test_what_can_not_be_followed_any_more_is_shown_before_a_manager_finds_out(
    command: Command, dsn: str, change: str, problem: str
) -> None:
    schedule = declare(dsn, "q", cron="0 9 * * *", timezone="Asia/Tokyo")
    declare(dsn, "other", every=60)
    fetch(dsn, f"UPDATE cron_schedules SET {change} WHERE id = '{schedule.id}'")
    listed = command("list", "--json").json
    assert [shown["state"] for shown in listed] == ["broken", "enabled"]
    assert len(listed[1]["next"]) == 1
    assert "BROKEN" in command("list").output
    assert problem in command("show", schedule.id).lines[-1]


def test_text_of_the_database_does_not_steer_the_terminal(command: Command, dsn: str) -> None:
    schedule = declare(dsn, "q", cron="0 9 * * *", workspace_id="w", owner="o")
    fetch(
        dsn,
        """UPDATE cron_schedules SET name = $1, queue_name = $1, owner = $1, cron = $1, zone = $1, sink = $1""",
        HOSTILE,
    )
    fetch(dsn, "INSERT INTO cron_workspaces VALUES ('w', $1, now())", HOSTILE)
    break_schedule(dsn, schedule.id, HOSTILE)
    for ended in (command("list"), command("show", schedule.id), command("timezone", "w")):
        assert ended.code == 0
        assert not re.search("[\x1b\u202e]", ended.output)
    shown = command("show", schedule.id)
    assert f"name           {HARMLESS}" in shown.lines
    assert f"owner          {HARMLESS}" in shown.lines
    assert f"cron           {HARMLESS}" in shown.lines
    assert command("show", schedule.id, "--json").json["name"] == HOSTILE


def test_shows_everything_about_a_schedule(command: Command, dsn: str) -> None:
    starts_at = datetime(2100, 3, 1, tzinfo=UTC)
    schedule = declare(
        dsn,
        "reports",
        cron="30 2 * * *",
        timezone="Europe/Berlin",
        workspace_id="acme",
        name="nightly",
        payload={"kind": "März"},
        jitter=timedelta(seconds=5),
        priority="high",
        starts_at=starts_at,
        ends_at=datetime(2100, 3, 4, tzinfo=UTC),
        max_runs=100,
        overlap="skip",
        max_attempts=7,
        max_age=3600,
        backoff=1.5,
        catch_up="spread",
        misfire_grace=90,
        dst_gap="skip",
        dst_fold="both",
        owner="billing",
    )
    shown = command("show", schedule.id, "--json").json
    created = shown.pop("created_at")
    assert abs(datetime.fromisoformat(created) - datetime.now(UTC)) < timedelta(minutes=5)
    assert shown.pop("updated_at") == created
    assert datetime.fromisoformat(shown.pop("anchor_at")) == starts_at
    assert shown == {
        "id": schedule.id,
        "workspace_id": "acme",
        "name": "nightly",
        "queue_name": "reports",
        "payload": {"kind": "März"},
        "cron": "30 2 * * *",
        "timezone": "Europe/Berlin",
        "timezone_from": "schedule",
        "zone": "Europe/Berlin",
        "dst_gap": "skip",
        "dst_fold": "both",
        "every_seconds": None,
        "at": None,
        "jitter_seconds": 5.0,
        "jitter_ratio": None,
        "priority": "high",
        "starts_at": "2100-03-01T00:00:00+00:00",
        "ends_at": "2100-03-04T00:00:00+00:00",
        "max_runs": 100,
        "sink": "queue",
        "delivery": "exactly_once",
        "overlap": "skip",
        "max_attempts": 7,
        "max_age_seconds": 3600.0,
        "backoff_seconds": 1.5,
        "catch_up": "spread",
        "misfire_grace_seconds": 90.0,
        "owner": "billing",
        "enabled": True,
        "version": 1,
        "error": None,
        "error_at": None,
        "state": "enabled",
        "description": "at 02:30 every day, Europe/Berlin time",
        "next": [
            {"utc": "2100-03-01T01:30:00+00:00", "local": "2100-03-01T02:30:00+01:00"},
            {"utc": "2100-03-02T01:30:00+00:00", "local": "2100-03-02T02:30:00+01:00"},
            {"utc": "2100-03-03T01:30:00+00:00", "local": "2100-03-03T02:30:00+01:00"},
        ],
    }
    since = datetime.fromisoformat(created).strftime("%Y-%m-%d %H:%M:%SZ")
    assert command("show", schedule.id).lines == [
        f"id             {schedule.id}",
        "name           nightly",
        "workspace      acme",
        "owner          billing",
        "state          enabled",
        "when           at 02:30 every day, Europe/Berlin time",
        "cron           30 2 * * *",
        "timezone       Europe/Berlin (its own)",
        "dst gap        skip",
        "dst fold       both",
        "starts at      2100-03-01 00:00:00Z",
        "ends at        2100-03-04 00:00:00Z",
        "max runs       100",
        "jitter         0:00:05",
        "max attempts   7",
        "max age        1:00:00",
        "backoff        0:00:01.500000",
        "misfire grace  0:01:30",
        "queue          reports",
        "priority       high",
        "overlap        skip",
        "catch-up       spread",
        "sink           queue, exactly_once",
        f"version        1, since {since}",
        f"created at     {since}",
        "payload        {",
        '"kind": "M\\u00e4rz"',
        "}",
        "clocks in Europe/Berlin             UTC",
        "─────────────────────────────────────────────────────────",
        "Mon 2100-03-01 02:30:00 +01:00 CET  2100-03-01 01:30:00Z",
        "Tue 2100-03-02 02:30:00 +01:00 CET  2100-03-02 01:30:00Z",
        "Wed 2100-03-03 02:30:00 +01:00 CET  2100-03-03 01:30:00Z",
    ]


def test_shows_an_interval_and_a_one_off(command: Command, dsn: str) -> None:
    interval = declare(dsn, "interval", every=100)
    lines = command("show", interval.id).lines
    assert "workspace      (system-wide)" in lines
    assert "jitter         0:00:10" in lines
    assert not any(line.startswith(("timezone", "cron", "dst")) for line in lines)
    shown = command("show", interval.id, "--json").json
    assert (shown["every_seconds"], shown["at"], shown["timezone_from"]) == (100.0, None, None)
    moments = [datetime.fromisoformat(moment["utc"]) for moment in shown["next"]]
    assert len(moments) == 5
    assert all(later - earlier == timedelta(seconds=100) for earlier, later in pairwise(moments))
    once = declare(dsn, "once", at=datetime(2020, 1, 1, tzinfo=UTC))
    assert command("show", once.id).lines[-1] == "no more occurrences"
    assert command("show", once.id, "--json").json["at"] == "2020-01-01T00:00:00+00:00"


def test_shows_whose_zone_it_is(command: Command, dsn: str) -> None:
    nobodys = declare(dsn, "nobodys", cron="0 9 * * *")
    plain = declare(dsn, "plain", cron="0 9 * * *", workspace_id="acme")
    own = declare(dsn, "own", cron="0 9 * * *", workspace_id="acme", timezone="UTC")
    for schedule in (nobodys, plain):
        assert "timezone       UTC (the default)" in command("show", schedule.id).lines
    assert command("timezone", "acme", "Asia/Tokyo").code == 0
    assert "timezone       Asia/Tokyo (the workspace's)" in command("show", plain.id).lines
    assert command("show", plain.id, "--json").json["timezone_from"] == "workspace"
    assert "timezone       UTC (its own)" in command("show", own.id).lines
    assert "timezone       UTC (the default)" in command("show", nobodys.id).lines


def test_no_more_is_promised_than_the_runs_that_are_left(command: Command, dsn: str) -> None:
    """With lookahead, ticks of the first runs are made already."""
    some = declare(dsn, "some", every=45, max_runs=4)
    ticks = fetch(dsn, "SELECT scheduled_for FROM cron_ticks WHERE scheduled_for > now() ORDER BY 1")
    assert ticks
    shown = command("show", some.id, "--json").json
    assert [moment["utc"] for moment in shown["next"]] == [
        (some.anchor_at + timedelta(seconds=45 * run)).isoformat() for run in (1, 2, 3)
    ]
    fetch(dsn, "DELETE FROM cron_ticks")
    fetch(dsn, "UPDATE cron_schedule_cursors SET planned = 4, next_tick_needed_at = NULL")
    assert command("show", some.id).lines[-1] == "no more occurrences"
    assert command("list", "--json").json[0]["next"] == []


def test_sets_a_schedule(command: Command, dsn: str) -> None:
    options = ("reports", "--cron", "0 9 * * MON", "--timezone", "Asia/Tokyo", "--workspace", "acme")
    created = command("set", *options)
    [first, _, _, *moments] = created.lines
    [row] = fetch(dsn, "SELECT * FROM cron_schedules")
    assert first == f"created {row['id']}: at 09:00 on Mondays, Asia/Tokyo time"
    assert len(moments) == 5
    assert all(re.match(r"Mon \S+ 09:00:00 \+09:00 JST  \S+ 00:00:00Z", moment) for moment in moments)
    assert (row["name"], row["workspace_id"], row["cron"], row["zone"]) == (
        "reports",
        "acme",
        "0 9 * * MON",
        "Asia/Tokyo",
    )
    assert command("set", *options).lines[0].startswith(f"unchanged {row['id']}: ")
    assert fetch(dsn, "SELECT * FROM cron_schedules") == [row]
    changed = command("set", *options, "--payload", '{"a": 1}', "--json").json
    assert (changed["change"], changed["id"], changed["version"]) == ("changed", row["id"], 2)
    assert changed["payload"] == {"a": 1}
    assert len(changed["next"]) == 5
    manage(dsn, lambda queue_manager: queue_manager.disable_schedule(row["id"]))
    assert command("set", *options).lines[-1] == "no occurrences, because it is disabled"


def test_sets_every_option(command: Command) -> None:
    options = {
        "name": "nightly",
        "workspace": "acme",
        "every": "1h30m",
        "payload": '{"kind": [1]}',
        "jitter": "2.5s",
        "priority": "urgent",
        "starts-at": "2100-01-01T01:00:00+01:00",
        "ends-at": "2100-02-01T00:00:00Z",
        "max-runs": "9",
        "overlap": "queue_one",
        "sink": "queue",
        "delivery": "exactly_once",
        "max-attempts": "4",
        "max-age": "2d",
        "backoff": "500ms",
        "owner": "billing",
    }
    arguments = [text for name, value in options.items() for text in (f"--{name}", value)]
    shown = command("set", "reports", *arguments, "--json").json
    expected = {
        "change": "created",
        "queue_name": "reports",
        "name": "nightly",
        "workspace_id": "acme",
        "every_seconds": 5400.0,
        "payload": {"kind": [1]},
        "jitter_seconds": 2.5,
        "priority": "urgent",
        "starts_at": "2100-01-01T00:00:00+00:00",
        "ends_at": "2100-02-01T00:00:00+00:00",
        "max_runs": 9,
        "overlap": "queue_one",
        "sink": "queue",
        "delivery": "exactly_once",
        "max_attempts": 4,
        "max_age_seconds": 172_800.0,
        "backoff_seconds": 0.5,
        "owner": "billing",
    }
    assert {name: shown[name] for name in expected} == expected
    again = command("set", "other", "--cron", "0 2 * * *", "--dst-gap", "skip", "--dst-fold", "second", "--json").json
    assert (again["dst_gap"], again["dst_fold"], again["timezone"], again["zone"]) == ("skip", "second", None, "UTC")
    ratio = command("set", "ratio", "--every", "100", "--jitter", "0.25", "--json").json
    assert (ratio["every_seconds"], ratio["jitter_ratio"], ratio["jitter_seconds"]) == (100.0, 0.25, 25.0)
    once = command("set", "once", "--at", "2100-01-01T00:00:00Z", "--json").json
    assert (once["at"], len(once["next"])) == ("2100-01-01T00:00:00+00:00", 1)


WRONG = [
    (("set", "q"), "every: give one of every=, cron= and at="),
    (("set", "q", "--cron", "0 9 * * *", "--every", "5m"), "every: give one of every=, cron= and at="),
    (("set", "", "--every", "5m"), "queue_name: must not be empty"),
    (("set", "q", "--cron", "61 * * * *"), "cron: "),
    (("set", "q", "--cron", "0 0 30 2 *"), "cron: "),
    (("set", "q", "--cron", "0 9 * * *", "--timezone", "Mars/Olympus"), "timezone: there is no time zone"),
    (("set", "q", "--every", "5m", "--timezone", "UTC"), "timezone: holds for cron= only"),
    (("set", "q", "--every", "5m", "--dst-gap", "skip"), "dst_gap: holds for cron= only"),
    (("set", "q", "--every", "5 m"), "every: must be a number of seconds or a text such as"),
    (("set", "q", "--every", "-5"), "every: must be a number of seconds or a text such as"),
    (("set", "q", "--every", "nan"), "every: must be a number of seconds or a text such as"),
    (("set", "q", "--every", "10ms"), "every: must be from 1 second"),
    (("set", "q", "--every", "5m", "--jitter", "0.6"), "jitter: must be a ratio"),
    (("set", "q", "--every", "5m", "--max-age", "0s"), "max_age: must be from 1 ms"),
    (("set", "q", "--every", "5m", "--backoff", "8d"), "backoff: must be from 1 ms"),
    (("set", "q", "--every", "5m", "--payload", "{a: 1}"), "payload: is not JSON: "),
    (("set", "q", "--every", "5m", "--payload", "NaN"), "payload: must be JSON"),
    (("set", "q", "--every", "5m", "--priority", "soon"), "priority: must be one of"),
    (("set", "q", "--every", "5m", "--overlap", "never"), "overlap: must be one of"),
    (("set", "q", "--every", "5m", "--sink", "nowhere"), "sink: there is no sink 'nowhere'"),
    (("set", "q", "--every", "5m", "--delivery", "at_most_once"), "delivery: must be exactly_once"),
    (("set", "q", "--every", "5m", "--max-runs", "0"), "max_runs: must be a whole number"),
    (("set", "q", "--every", "5m", "--starts-at", "2100-01-01"), "starts_at: must end in Z or in an offset"),
    (("set", "q", "--every", "5m", "--owner", ""), "owner: must not be empty"),
    (("set", "a", "--every", "5m", "--owner", "shipping"), "owner: "),
    (("timezone", "acme", "Mars/Olympus"), "timezone: there is no time zone 'Mars/Olympus'"),
    (("timezone", "acme", "asia/tokyo"), "timezone: there is no time zone 'asia/tokyo': did you mean Asia/Tokyo?"),
    (("timezone", "acme", ""), "timezone: there is no time zone ''"),
    (("timezone", "acme", "Asia/Tokyo", "--unset"), "timezone: give a zone or --unset, not both"),
    (("timezone", "", "Asia/Tokyo"), "workspace_id: must not be empty"),
    (("list", "--limit", "0"), "limit: must be a whole number from 1 to 10000, not 0"),
    (("list", "--workspace", ""), "workspace_id: must not be empty"),
    (("list", "--owner", ""), "owner: must not be empty"),
    (("list", "--after", " "), "after_id: must not be empty"),
    (("show", "gone"), "there is no schedule"),
    (("show", ""), "schedule_id: must not be empty"),
    (("enable", "gone"), "there is no schedule"),
    (("disable", "gone"), "there is no schedule"),
    (("trigger", "gone"), "there is no schedule"),
    (("delete", "gone", "--yes"), "there is no schedule"),
]


def test_wrong_input_is_refused_and_changes_nothing(command: Command, dsn: str) -> None:
    declare_three(dsn)
    before = stored(dsn)
    for arguments, says in WRONG:
        ended = command(*arguments)
        assert (ended.code, ended.output) == (2, ""), arguments
        assert ended.error.splitlines()[-1].startswith(f"error: {says}"), arguments
        assert stored(dsn) == before, arguments


def test_disables_and_enables(command: Command, dsn: str) -> None:
    schedule = declare(dsn, "q", every=10)
    ticks = "SELECT count(*) FROM cron_ticks"
    assert command("disable", schedule.id).lines == [f"disabled {schedule.id}"]
    assert command("show", schedule.id).lines[-1] == "no occurrences, because it is disabled"
    assert value(dsn, ticks) > 0
    shown = command("disable", schedule.id, "--drop-pending", "--json").json
    assert (shown["enabled"], shown["state"], shown["next"]) == (False, "disabled", [])
    assert value(dsn, ticks) == 0
    enabled = command("enable", schedule.id)
    assert enabled.lines[0] == f"enabled {schedule.id}"
    assert len(enabled.lines) == 3 + 5
    assert value(dsn, "SELECT count(*) FROM cron_ticks WHERE origin <> 'schedule'") == 0
    assert command("enable", schedule.id, "--fire-now", "--json").json["state"] == "enabled"
    assert value(dsn, "SELECT count(*) FROM cron_ticks WHERE origin <> 'schedule'") == 1


def test_enabling_a_broken_schedule_tries_it_again(command: Command, dsn: str) -> None:
    schedule = declare(dsn, "q", every=10)
    break_schedule(dsn, schedule.id, "gone")
    assert command("enable", schedule.id, "--json").json["error"] is None


def test_triggers(command: Command, dsn: str) -> None:
    schedule = declare(dsn, "q", every=3600)
    triggered = command("trigger", schedule.id, "--json").json
    assert triggered["message_id"] == triggered["tick_id"].replace("tick_", "msg_")
    assert re.fullmatch(r"msg_[0-9A-HJKMNP-TV-Z]{26}\n", command("trigger", schedule.id).output)
    ids = [row["id"] for row in fetch(dsn, "SELECT id FROM cron_ticks WHERE origin <> 'schedule'")]
    assert len(ids) == 2
    assert triggered["tick_id"] in ids


def test_shows_and_sets_the_zone_of_a_workspace(command: Command, dsn: str) -> None:
    [_, own, plain] = declare_three(dsn)
    assert command("timezone", "acme").output == "UTC (the default)\n"
    assert command("timezone", "acme", "--json").json == {
        "workspace_id": "acme",
        "timezone": None,
        "changed_schedules": None,
    }
    assert command("timezone", "acme", "Europe/Paris").output == "Europe/Paris, 1 schedule(s) changed\n"
    zones = {row["id"]: row["zone"] for row in fetch(dsn, "SELECT id, zone FROM cron_schedules WHERE cron IS NOT NULL")}
    assert zones == {own.id: "Asia/Tokyo", plain.id: "Europe/Paris"}
    assert command("timezone", "acme").output == "Europe/Paris\n"
    assert command("timezone", "acme", "--unset", "--json").json == {
        "workspace_id": "acme",
        "timezone": None,
        "changed_schedules": 1,
    }
    assert command("timezone", "other").output == "UTC (the default)\n"


def test_delete_without_a_terminal_wants_a_yes(command: Command, dsn: str) -> None:
    schedule = declare(dsn, "q", every=60)
    ended = command("delete", schedule.id)
    assert (ended.code, ended.output) == (2, "")
    assert ended.error == "error: delete deletes for good, and there is no terminal to ask on: give --yes\n"
    assert value(dsn, "SELECT id FROM cron_schedules") == schedule.id
    assert command("delete", schedule.id, "--yes").output == f"deleted {schedule.id}\n"
    assert fetch(dsn, "SELECT id FROM cron_schedules") == []
    other = declare(dsn, "q", every=60)
    assert command("delete", other.id, "--yes", "--json").json == {"deleted": other.id}


@pytest.mark.parametrize(("answer", "code", "left"), [("n", 1, 1), ("y", 0, 0)])
def test_delete_asks_on_a_terminal(dsn: str, answer: str, code: int, left: int) -> None:
    schedule = declare(dsn, "q", every=60)
    terminal, its_end = pty.openpty()
    try:
        os.write(terminal, f"{answer}\n".encode())
        arguments = [sys.executable, "-m", "cron_ticks.cli", "schedule", "delete", schedule.id, "--dsn", dsn]
        ended = subprocess.run(arguments, stdin=its_end, capture_output=True, text=True, check=False, timeout=60)
    finally:
        os.close(terminal)
        os.close(its_end)
    assert ended.returncode == code
    assert f"Delete the schedule {schedule.id} for good?" in ended.stderr
    assert value(dsn, "SELECT count(*) FROM cron_schedules") == left


@pytest.mark.parametrize(
    "arguments",
    [
        ("list",),
        ("show", "s"),
        ("set", "q", "--every", "60"),
        ("enable", "s"),
        ("disable", "s"),
        ("trigger", "s"),
        ("delete", "s", "--yes"),
        ("timezone", "w"),
    ],
)
def test_an_unreachable_server_is_an_error_without_traceback(arguments: tuple[str, ...]) -> None:
    ended = run_command("schedule", *arguments, "--json", environment=UNREACHABLE)
    assert (ended.code, ended.output) == (2, "")
    assert ended.error.splitlines()[-1].startswith("error: no answer from PostgreSQL within 0.3 s")


async def test_a_process_of_its_own_in_a_schema_of_its_own(dsn: str, processes: Processes, connection: Any) -> None:
    """The whole way once: logs and results don't mix."""
    environment = {"CRON_TICKS_DSN": dsn, "CRON_TICKS_DATABASE_SCHEMA": "tenant"}
    ended = await processes.cron_ticks(
        "schedule", "set", "q", "--cron", "@daily", "--max-runs", "3", "--json", environment=environment
    )
    shown = json.loads(await ended.output())
    assert len(shown["next"]) == 3
    assert await connection.fetchval("SELECT id FROM tenant.cron_schedules") == shown["id"]
    assert await connection.fetchval("SELECT count(*) FROM public.cron_schedules") == 0
    assert (await ended.wait_for("schedule_created"))["schedule_id"] == shown["id"]
