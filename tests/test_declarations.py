"""Schedules in a file: reading it, every mistake with its place. No database."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import process_time
from typing import Any

import pytest

from cron_ticks.declarations import (
    OPTIONS,
    Declarations,
    Declared,
    parse_duration,
    parse_time,
    read_declarations,
)
from cron_ticks.documents import LARGEST_FILE_BYTES
from cron_ticks.errors import CronTicksError, DeclarationsError, InvalidInputError
from cron_ticks.schedules import ScheduleChanges, ScheduleDefinition

CAP = timedelta(seconds=30)
NO_DURATION = "must be a number of seconds or a text such as 30s, 5m or 1h30m"

TOML = """
owner = "billing"

[[schedules]]
queue_name = "report.weekly"
name = "weekly-report"
workspace_id = "ws_A"
cron = "0 9 * * MON"
timezone = "Europe/Berlin"
payload = { kind = "weekly", to = ["a", "b"] }
jitter = "5s"
dst_gap = "skip"
dst_fold = "both"

[[schedules]]
queue_name = "sync"
every = "1m30s"
jitter = 0.25
priority = "high"
overlap = "skip"
starts_at = 2027-01-01T00:00:00Z
ends_at = "2028-01-01T00:00:00+01:00"
max_runs = 10
max_attempts = 7
max_age = "2d"
backoff = 1.5

[[schedules]]
queue_name = "once"
at = 2027-03-01T09:00:00+01:00
"""

YAML = """
owner: billing
schedules:
  - queue_name: report.weekly
    name: weekly-report
    workspace_id: ws_A
    cron: "0 9 * * MON"
    timezone: Europe/Berlin
    payload: {kind: weekly, to: [a, b]}
    jitter: 5s
    dst_gap: skip
    dst_fold: both
  - queue_name: sync
    every: 1m30s
    jitter: 0.25
    priority: high
    overlap: skip
    starts_at: 2027-01-01T00:00:00Z
    ends_at: "2028-01-01T00:00:00+01:00"
    max_runs: 10
    max_attempts: 7
    max_age: 2d
    backoff: 1.5
  - queue_name: once
    at: 2027-03-01T09:00:00+01:00
"""


def read(folder: Path, text: str, name: str = "schedules.yaml", **options: Any) -> Declarations:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return read_declarations(path, **{"owner": None, "jitter_cap": CAP, "sinks": {}} | options)


def problems(folder: Path, text: str, name: str = "schedules.yaml", **options: Any) -> list[str]:
    with pytest.raises(DeclarationsError) as raised:
        read(folder, text, name, **options)
    return raised.value.problems


def of_one(folder: Path, *lines: str) -> list[str]:
    """What is wrong with a schedule, without its place."""
    text = "schedules:\n  - queue_name: q\n" + "".join(f"    {line}\n" for line in lines)
    found = problems(folder, text)
    assert all(problem.startswith("schedules.yaml:2 schedule 'q': ") for problem in found)
    return [problem.removeprefix("schedules.yaml:2 schedule 'q': ") for problem in found]


@pytest.mark.parametrize(("name", "text"), [("s.toml", TOML), ("s.yaml", YAML), ("s.yml", YAML)])
def test_both_formats_say_the_same(tmp_path: Path, name: str, text: str) -> None:
    found = read(tmp_path, text, name)
    weekly, sync, once = (declared.definition for declared in found.schedules)
    assert found.owner == "billing"
    assert (weekly.name, weekly.workspace_id, weekly.cron) == ("weekly-report", "ws_A", "0 9 * * MON")
    assert (weekly.timezone, weekly.dst_gap, weekly.dst_fold) == ("Europe/Berlin", "skip", "both")
    assert (weekly.payload_json, weekly.jitter) == ('{"kind":"weekly","to":["a","b"]}', timedelta(seconds=5))
    assert (sync.name, sync.interval, sync.jitter_ratio) == ("sync", timedelta(seconds=90), 0.25)
    assert (sync.priority, sync.overlap, sync.max_runs, sync.max_attempts) == ("high", "skip", 10, 7)
    assert (sync.max_age, sync.backoff) == (timedelta(days=2), timedelta(seconds=1.5))
    assert sync.starts_at == datetime(2027, 1, 1, tzinfo=UTC)
    assert sync.ends_at == datetime(2027, 12, 31, 23, tzinfo=UTC)
    assert once.at == datetime(2027, 3, 1, 8, tzinfo=UTC)
    assert found.workspaces == ["ws_A"]


def test_whatever_can_be_changed_can_be_declared_in_a_file() -> None:
    assert set(ScheduleChanges.__annotations__) - {"owner"} <= set(OPTIONS)


def test_every_mistake_is_said_at_once_with_its_place(tmp_path: Path) -> None:
    text = """\
owner: billing
scheduls: []
schedules:
  - queue_name: a
    cron: "*/70 * * * *"
    timezone: Europe/Berln
    priority: hihg
    paylod: {}
  - queue_name: b
    every: 5x
  - cron: "0 0 * * *"
  - 7
  - queue_name: a
    every: 3
  - name: same
    queue_name: c
    workspace_id: ws
    every: 3
  - queue_name: a
    every: 4
"""
    assert problems(tmp_path, text) == [
        "schedules.yaml: scheduls: there is no such key: did you mean schedules?",
        "schedules.yaml:4 schedule 'a': paylod: there is no such key: did you mean payload?",
        "schedules.yaml:4 schedule 'a': cron: minute '*/70': the step must be from 1 to 59",
        "schedules.yaml:4 schedule 'a': timezone: there is no time zone 'Europe/Berln': did you mean Europe/Berlin?",
        "schedules.yaml:4 schedule 'a': priority: must be one of urgent, high, normal, low, not 'hihg'",
        f"schedules.yaml:9 schedule 'b': every: {NO_DURATION}, not '5x'",
        "schedules.yaml:11 schedule 3: queue_name: is missing",
        "schedules.yaml:12 schedule 4: must be a table",
        "schedules.yaml:13 schedule 'a': name: schedules.yaml:4 schedule 'a' has the same name and workspace",
        "schedules.yaml:19 schedule 'a': name: schedules.yaml:4 schedule 'a' has the same name and workspace",
    ]


def test_a_schedule_of_a_toml_file_is_found_by_its_line(tmp_path: Path) -> None:
    text = (
        'owner = "a"\n\n[[schedules]]\nqueue_name = "q"\nevery = 1\n\n  [[ schedules ]]  # another\nqueue_name = "r"\n'
    )
    assert problems(tmp_path, text, "s.toml") == ["s.toml:7 schedule 'r': every: give one of every, cron and at"]


def test_where_lines_can_not_be_told_the_name_is_given(tmp_path: Path) -> None:
    text = 'schedules = [{queue_name = "q"}, {every = 1}]\n'
    assert problems(tmp_path, text, "s.toml") == [
        "s.toml schedule 'q': every: give one of every, cron and at",
        "s.toml schedule 2: queue_name: is missing",
    ]


@pytest.mark.parametrize(
    ("lines", "fields"),
    [
        (["every: 5", "cron: '0 0 * * *'"], ["every"]),
        (["cron: '0 0 * * *'", "timezone: NO"], ["timezone"]),
        (["cron: 5"], ["cron"]),
        (["every: 5", "timezone: UTC"], ["timezone"]),
        (
            ["every: 0", "starts_at: soon", "ends_at: 2027-01-01", "max_runs: -1"],
            ["starts_at", "every", "ends_at", "max_runs"],
        ),
        (["at: 2027-01-01T00:00:00", "workspace_id: ''"], ["workspace_id", "at"]),
        (["every: 5", "payload: {when: 2027-01-01}"], ["payload"]),
        (["every: 5", "sink: elsewhere", "overlap: never"], ["sink", "overlap"]),
        (["cron: '0 0 * * *'", "jitter: 0.1", "dst_gap: maybe", "dst_fold: 3"], ["dst_gap", "dst_fold", "jitter"]),
        (["every: 5", "jitter: 1parsec", "max_age: forever", "backoff: [1]"], ["jitter", "max_age", "backoff"]),
        (["every: 5", "owner: me"], ["owner"]),
        (["every: 5", "jitter_cap: 900"], ["jitter_cap"]),
    ],
)
def test_each_wrong_field_is_named(tmp_path: Path, lines: list[str], fields: list[str]) -> None:
    assert sorted(problem.partition(":")[0] for problem in of_one(tmp_path, *lines)) == sorted(fields)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("s.json", "{}", "s.json: the name must end in .toml, .yaml, .yml"),
        ("s.toml", "a = \n", "s.toml: can't be read: Invalid value (at line 1"),
        ("s.toml", "owner = 'a'\nowner = 'b'\n", "s.toml: can't be read: Cannot overwrite a value (at line 2"),
        ("s.yaml", "- 1", "s.yaml: must be a table with the key schedules"),
        ("s.yaml", "schedules: [{every: 1:30}]", "s.yaml: can't be read: line 1: 1:30 is a number to the base of 60"),
        ("s.yaml", "schedules: {a: 1}", "s.yaml: schedules: must be a list of tables"),
        ("s.yaml", "owner: a\nowner: b", "s.yaml: can't be read: line 2: the key 'owner' is there twice"),
        ("s.yaml", "owner: 5\nschedules: []", "s.yaml: owner: must be a string, not int"),
        ("s.yaml", "a: &a [*a]", "s.yaml: can't be read: line 1: an alias contains itself"),
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path: Path, name: str, text: str, problem: str) -> None:
    assert problems(tmp_path, text, name)[0].startswith(problem)


@pytest.mark.parametrize(
    "text",
    [
        "schedules:\n  - cron: * * * * *",  # what a newcomer writes first
        "a: !!python/object/apply:os.system [true]",
        "a: [" * 5000,
        "\x00",
        "a: {[1]: 2",
        "--- 1\n--- 2",
        "schedules: [{? [a] : 1}]",
        'a: !!int ""',
        'a: !!float ""',
        "a: !!bool foo",
        "a: !!timestamp foo",
        f"schedules: [{{queue_name: q, every: 0x{'f' * 5000}}}]",
        f"schedules: [{{queue_name: q, every: 5, max_runs: 0x{'f' * 5000}, jitter: 0x{'f' * 5000}}}]",
        f"schedules: [{{queue_name: 0x{'f' * 5000}, every: 5, priority: 0x{'f' * 5000}}}]",
    ],
)
def test_hostile_yaml_is_refused_like_any_other_mistake(tmp_path: Path, text: str) -> None:
    assert problems(tmp_path, text)


def test_aliases_that_stand_for_too_much_are_refused_at_once(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    found = problems(tmp_path, "\n".join(lines))
    assert found == ["schedules.yaml: can't be read: line 6: its aliases stand for more than 1000000 values"]


def test_aliases_save_writing(tmp_path: Path) -> None:
    text = "schedules:\n  - &base {queue_name: a, every: 5, payload: {x: 1}}\n  - {<<: *base, name: b}\n"
    first, second = (declared.definition for declared in read(tmp_path, text).schedules)
    assert (second.name, second.payload_json) == ("b", first.payload_json)


@pytest.mark.parametrize(
    ("name", "text"),
    [("s.toml", ""), ("s.yaml", ""), ("s.yaml", "schedules: []"), ("s.yaml", "schedules:"), ("s.YML", "\ufeff")],
)
def test_an_empty_file_declares_nothing(tmp_path: Path, name: str, text: str) -> None:
    assert read(tmp_path, text, name) == Declarations(None, ())


def test_what_is_wrong_beside_the_rule_is_said_too(tmp_path: Path) -> None:
    found = of_one(tmp_path, "timezone: Nope/Nope", "priority: x", "max_runs: 0")
    assert [problem.partition(":")[0] for problem in found] == ["every", "timezone", "priority", "max_runs"]
    found = of_one(tmp_path, "every: 5", "cron: x", "priority: x")
    assert [problem.partition(":")[0] for problem in found] == ["every", "priority"]


def test_a_name_that_is_there_twice_is_said_beside_other_mistakes(tmp_path: Path) -> None:
    text = "schedules:\n  - {queue_name: a, every: 0}\n  - {queue_name: b, name: a, every: 5}\n"
    assert problems(tmp_path, text)[1] == (
        "schedules.yaml:3 schedule 'a': name: schedules.yaml:2 schedule 'a' has the same name and workspace"
    )


def test_a_payload_of_many_keys_is_read_at_once(tmp_path: Path) -> None:
    keys = "".join(f"      key_{number}: 1\n" for number in range(20_000))
    begin = process_time()
    read(tmp_path, f"schedules:\n  - queue_name: a\n    every: 5\n    payload:\n{keys}")
    assert process_time() - begin < 10  # about 2 s; with a search per key it would be a minute


def test_a_file_that_can_not_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(DeclarationsError, match=r"missing\.toml: No such file"):
        read_declarations(tmp_path / "missing.toml", owner=None, jitter_cap=CAP, sinks={})
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(DeclarationsError, match="Is a directory"):
        read_declarations(tmp_path / "folder.toml", owner=None, jitter_cap=CAP, sinks={})
    (tmp_path / "latin.toml").write_bytes(b'owner = "\xe9"')
    with pytest.raises(DeclarationsError, match=r"latin\.toml: can't be read: .*utf-8"):
        read_declarations(tmp_path / "latin.toml", owner=None, jitter_cap=CAP, sinks={})


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "huge.toml"
    with path.open("wb") as file:
        file.truncate(LARGEST_FILE_BYTES + 1)
    with pytest.raises(DeclarationsError, match="at most 16777216 bytes"):
        read_declarations(path, owner=None, jitter_cap=CAP, sinks={})


def test_the_owner_that_is_given_goes_before_the_files(tmp_path: Path) -> None:
    assert read(tmp_path, "owner: billing", owner="other").owner == "other"
    assert problems(tmp_path, "", owner="") == ["schedules.yaml: owner: must not be empty or begin or end with a blank"]


def test_sinks_are_those_that_are_known(tmp_path: Path) -> None:
    text = "schedules: [{queue_name: a, every: 5, sink: broker}]"
    (declared,) = read(tmp_path, text, sinks={"broker": "outside"}).schedules
    assert isinstance(declared, Declared)
    assert isinstance(declared.definition, ScheduleDefinition)
    assert declared.definition.delivery == "at_least_once"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("5m", 300), ("1h30m", 5400), ("2d", 172_800), ("500ms", 0.5), ("1.5h", 5400), ("1m1m", 120)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration("every", text) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "text", ["", "5", "s", "-5s", "5 s", "1e3s", "5S", "٣s", "5s ", "1h-30m", "9" * 30 + "d", ".5s"]
)
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(InvalidInputError) as raised:
        parse_duration("every", text)
    assert raised.value.field == "every"


def test_times() -> None:
    assert parse_time("at", "2027-01-01T09:00:00Z") == datetime(2027, 1, 1, 9, tzinfo=UTC)
    with pytest.raises(InvalidInputError, match="2027-01-01T09:00:00Z"):
        parse_time("at", "tomorrow")
    with pytest.raises(InvalidInputError, match="must end in Z or in an offset"):
        parse_time("at", "2027-01-01T09:00:00")


def test_the_error_is_one_of_ours_and_counts(tmp_path: Path) -> None:
    with pytest.raises(CronTicksError, match=r"^1 mistake\(s\), nothing was changed:\n  schedules\.yaml"):
        read(tmp_path, "x: 1")
