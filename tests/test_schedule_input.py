"""What an application may ask for; everything else is refused with the field's name."""

from datetime import UTC, datetime, timedelta, timezone
from typing import Any, cast

import pytest

from cron_ticks.checks import LARGEST_PAYLOAD_BYTES, LATEST, LONGEST_INTERVAL, PRIORITIES
from cron_ticks.errors import InvalidInputError
from cron_ticks.schedules import MOST_RUNS, Schedule, ScheduleChanges, define_schedule, redefine_schedule

GOOD: dict[str, Any] = {"queue_name": "memo.batch_check", "every": 30}
WHEN = datetime(2026, 5, 17, 12, tzinfo=UTC)
ONCE: dict[str, Any] = {"queue_name": "memo.batch_check", "at": WHEN}
CALENDAR: dict[str, Any] = {"queue_name": "memo.batch_check", "cron": "30 9 * * MON", "timezone": "Europe/Berlin"}
HOUR = timedelta(hours=1)


def test_the_name_defaults_to_the_queues() -> None:
    definition = define_schedule(**GOOD)
    assert definition.name == "memo.batch_check"
    assert definition.interval == timedelta(seconds=30)
    assert definition.payload_json == "{}"


@pytest.mark.parametrize("every", [1, 1.5, 0.1 + 0.9, timedelta(minutes=1), 604800, LONGEST_INTERVAL])
def test_intervals_from_one_second_up(every: float | timedelta) -> None:
    interval = define_schedule("q", every=every).interval
    assert interval is not None
    assert interval >= timedelta(seconds=1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("queue_name", ""),
        ("queue_name", " padded "),
        ("queue_name", "nul\0inside"),
        ("queue_name", "x" * 201),
        ("queue_name", None),
        ("name", ""),
        ("name", 7),
        ("workspace_id", ""),
        ("workspace_id", "line\nbreak"),
        ("every", 0),
        ("every", 0.999),
        ("every", -5),
        ("every", float("nan")),
        ("every", float("inf")),
        ("every", 1e300),
        ("every", "30"),
        ("every", True),
        ("every", timedelta(milliseconds=1)),
        ("every", LONGEST_INTERVAL + timedelta(microseconds=1)),
        ("payload", {"when": object()}),
        ("payload", {"n": float("nan")}),
        ("payload", {"text": "a\0b"}),
        ("payload", {"text": "\ud800"}),
        ("payload", "x" * (LARGEST_PAYLOAD_BYTES + 1)),
        ("jitter", -0.1),
        ("jitter", 0.51),
        ("jitter", 5),
        ("jitter", float("nan")),
        ("jitter", float("inf")),
        ("jitter", "much"),
        ("jitter", True),
        ("jitter", False),
        ("jitter", [0.1]),
        ("jitter", timedelta(seconds=-1)),
        ("jitter", timedelta(seconds=15, microseconds=1)),  # more than half of the interval
        ("starts_at", "2026-05-17"),
        ("starts_at", WHEN.date()),
        ("starts_at", WHEN.replace(tzinfo=None)),
        ("starts_at", datetime(1969, 12, 31, tzinfo=UTC)),
        ("starts_at", LATEST),
        ("starts_at", datetime.max.replace(tzinfo=timezone(-HOUR))),
        ("ends_at", 1_800_000_000),
        ("ends_at", WHEN.replace(tzinfo=None)),
        ("ends_at", LATEST),
        ("max_runs", 0),
        ("max_runs", -1),
        ("max_runs", 1.0),
        ("max_runs", "3"),
        ("max_runs", True),
        ("max_runs", MOST_RUNS + 1),
        ("priority", "middling"),
        ("priority", "URGENT"),
        ("priority", ""),
        ("priority", 0),
        ("priority", None),
        ("priority", ["low"]),
        ("timezone", "Europe/Berlin"),  # an interval counts real seconds
        ("dst_gap", "fire"),
        ("dst_fold", "first"),
        ("owner", ""),
        ("owner", " billing"),
        ("owner", 7),
        ("owner", "x" * 201),
    ],
)
def test_bad_input_names_its_field(field: str, value: object) -> None:
    with pytest.raises(InvalidInputError) as caught:
        define_schedule(**GOOD | {field: value})
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("at", "2026-05-17T12:00:00Z"),
        ("at", WHEN.date()),
        ("at", 1_800_000_000),
        ("at", WHEN.replace(tzinfo=None)),
        ("at", datetime(1969, 12, 31, tzinfo=UTC)),
        ("at", LATEST),
        ("jitter", 0.1),
        ("jitter", timedelta(seconds=1)),
        ("jitter", "much"),
        ("jitter", False),
        ("starts_at", WHEN),
        ("ends_at", WHEN),
        ("max_runs", 1),
        ("priority", "middling"),
        ("payload", {"n": float("nan")}),
        ("timezone", "UTC"),
        ("dst_gap", "skip"),
        ("dst_fold", "both"),
    ],
)
def test_bad_input_of_a_one_off_names_its_field(field: str, value: object) -> None:
    with pytest.raises(InvalidInputError) as caught:
        define_schedule(**ONCE | {field: value})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cron", ""),
        ("cron", 5),
        ("cron", b"* * * * *"),
        ("cron", "* * * *"),
        ("cron", "* * * * * * *"),
        ("cron", "*/70 * * * *"),
        ("cron", "0 25 * * *"),
        ("cron", "0 0 30 2 *"),
        ("cron", "0 0 * * FRI-MON"),
        ("cron", "0 9 ? * MON"),
        ("cron", "@reboot"),
        ("cron", "٣ * * * *"),
        ("cron", "0 0 * * *\n"),
        ("cron", "0 0\u00a0* * *"),
        ("cron", "0 " * 200),
        ("timezone", "Europe/Berln"),
        ("timezone", "europe/berlin"),
        ("timezone", ""),
        ("timezone", " UTC"),
        ("timezone", "localtime"),
        ("timezone", "right/Europe/Berlin"),
        ("timezone", "../etc/passwd"),
        ("timezone", "CET-1CEST"),
        ("timezone", "+02:00"),
        ("timezone", "Europe/Berlin\0"),
        ("timezone", "x" * 10_000),
        ("timezone", 2),
        ("timezone", UTC),
        ("timezone", ["UTC"]),
        ("dst_gap", "first"),
        ("dst_gap", "FIRE"),
        ("dst_gap", ""),
        ("dst_gap", True),
        ("dst_gap", ["fire"]),
        ("dst_fold", "fire"),
        ("dst_fold", "Both"),
        ("dst_fold", 2),
        ("dst_fold", {"first": 1}),
        ("jitter", 0.1),  # a ratio of what?
        ("jitter", 0),
        ("jitter", "much"),
        ("jitter", True),
        ("jitter", timedelta(microseconds=-1)),
        ("jitter", timedelta(seconds=31)),  # more than the cap
        ("owner", ""),
        ("owner", "line\nbreak"),
        ("starts_at", "2026-05-17"),
        ("max_runs", 0),
        ("priority", "middling"),
    ],
)
def test_bad_input_of_a_calendar_names_its_field(field: str, value: object) -> None:
    with pytest.raises(InvalidInputError) as caught:
        define_schedule(**CALENDAR | {field: value})
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")
    assert len(str(caught.value)) < 400


def test_a_calendar_as_it_is_kept() -> None:
    definition = define_schedule(**CALENDAR)
    assert (definition.cron, definition.timezone, definition.zone) == ("30 9 * * MON", "Europe/Berlin", "Europe/Berlin")
    assert (definition.dst_gap, definition.dst_fold, definition.owner) == ("fire", "first", None)
    assert (definition.interval, definition.at) == (None, None)
    assert (definition.jitter, definition.jitter_ratio) == (timedelta(0), None)
    bare = define_schedule("q", cron="@daily")
    assert (bare.cron, bare.timezone, bare.zone) == ("@daily", None, None)  # the workspace's, which nobody knows here
    chosen = define_schedule(**CALENDAR, dst_gap="skip", dst_fold="both", owner="billing")
    assert (chosen.dst_gap, chosen.dst_fold, chosen.owner) == ("skip", "both", "billing")


@pytest.mark.parametrize("text", [" 30 9 * * MON", "30  9 * * MON ", "30\t9 * *\t \tMON"])
def test_blanks_of_an_expression_mean_nothing(text: str) -> None:
    assert define_schedule(**CALENDAR | {"cron": text}) == define_schedule(**CALENDAR)


@pytest.mark.parametrize("options", [GOOD, ONCE], ids=["every", "at"])
def test_what_holds_for_calendars_only_is_explained(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=r"timezone: holds for cron= only"):
        define_schedule(**options, timezone="UTC")
    definition = define_schedule(**options, timezone=None, dst_gap=None, dst_fold=None, owner="billing")
    assert (definition.cron, definition.timezone, definition.zone) == (None, None, None)
    assert (definition.dst_gap, definition.dst_fold, definition.owner) == (None, None, "billing")


def test_a_mistyped_zone_gets_a_suggestion() -> None:
    with pytest.raises(InvalidInputError, match=r"timezone: there is no time zone 'Europe/Berln': .*Europe/Berlin"):
        define_schedule("q", cron="@daily", timezone="Europe/Berln")
    with pytest.raises(InvalidInputError, match=r"America/New_York"):
        define_schedule("q", cron="@daily", timezone="america/new_york")


@pytest.mark.parametrize(
    ("cron", "most"),
    [
        ("30 9 * * *", 30),  # the cap
        ("* * * * *", 30),
        ("*/20 * * * * *", 20),
        ("0,50 * * * * *", 10),  # from one minute to the next
        ("0,1 0 9 * * *", 1),
        ("* * * * * *", 1),
    ],
)
def test_jitter_of_a_calendar_is_limited_by_the_next_occurrence_and_the_cap(cron: str, most: int) -> None:
    """To the microsecond: it moves only forward, so no occurrence reaches the next one."""
    limit = timedelta(seconds=most)
    assert define_schedule("q", cron=cron, jitter=limit).jitter == limit
    with pytest.raises(InvalidInputError, match=f"from 0 to {most} s") as caught:
        define_schedule("q", cron=cron, jitter=limit + timedelta(microseconds=1))
    assert caught.value.field == "jitter"


def test_the_cap_of_jitter_is_a_setting_for_calendars_too() -> None:
    longer, shorter = timedelta(minutes=2), timedelta(seconds=5)
    assert define_schedule("q", cron="0 9 * * *", jitter=longer, jitter_cap=longer).jitter == longer
    for cron, cap in (("* * * * *", longer), ("0 9 * * *", shorter)):
        with pytest.raises(InvalidInputError) as caught:
            define_schedule("q", cron=cron, jitter=longer, jitter_cap=cap)
        assert caught.value.field == "jitter"


def test_a_calendar_has_no_jitter_unless_a_time_is_given() -> None:
    for jitter in ("default", None, timedelta(0)):
        assert define_schedule("q", cron="* * * * *", jitter=jitter).jitter == timedelta(0)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"every": 30, "at": WHEN},
        {"every": 30, "cron": "* * * * *"},
        {"cron": "* * * * *", "at": WHEN},
        {"every": 30, "cron": "* * * * *", "at": WHEN},
        {"every": None, "cron": None, "at": None},
    ],
)
def test_a_schedule_has_one_rule(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match="one of every=, cron= and at=") as caught:
        define_schedule("q", **given)
    assert caught.value.field == "every"


def test_a_schedule_does_not_end_before_it_starts() -> None:
    assert define_schedule("q", every=5, starts_at=WHEN, ends_at=WHEN).ends_at == WHEN
    with pytest.raises(InvalidInputError, match="starts_at") as caught:
        define_schedule("q", every=5, starts_at=WHEN, ends_at=WHEN - timedelta(microseconds=1))
    assert caught.value.field == "ends_at"


def test_times_are_kept_as_utc() -> None:
    elsewhere = WHEN.astimezone(timezone(timedelta(hours=5, minutes=30)))
    definition = define_schedule("q", every=5, starts_at=elsewhere, ends_at=elsewhere)
    assert definition.starts_at == definition.ends_at == define_schedule("q", at=elsewhere).at == WHEN
    assert {str(found.tzinfo) for found in (definition.starts_at, definition.ends_at) if found} == {"UTC"}


def test_a_time_of_jitter_is_limited_by_the_cap_too() -> None:
    assert define_schedule("q", every=3600, jitter=timedelta(seconds=30)).jitter == timedelta(seconds=30)
    with pytest.raises(InvalidInputError, match="30 s") as caught:
        define_schedule("q", every=3600, jitter=timedelta(seconds=31))
    assert caught.value.field == "jitter"
    with pytest.raises(InvalidInputError, match="5 s"):
        define_schedule("q", every=3600, jitter=timedelta(seconds=6), jitter_cap=timedelta(seconds=5))


@pytest.mark.parametrize("microseconds", [1_000_000, 1_000_001, 1_000_002, 1_000_003])
def test_a_time_of_jitter_is_at_most_half_of_the_interval(microseconds: int) -> None:
    """To the microsecond: otherwise two occurrences could change their order, or be due at the same time."""
    every, half = timedelta(microseconds=microseconds), timedelta(microseconds=microseconds // 2)
    assert define_schedule("q", every=every, jitter=half).jitter == half
    with pytest.raises(InvalidInputError) as caught:
        define_schedule("q", every=every, jitter=half + timedelta(microseconds=1))
    assert caught.value.field == "jitter"


def test_a_one_off_may_say_that_it_has_no_jitter() -> None:
    assert define_schedule("q", at=WHEN, jitter=None).jitter == timedelta(0)
    assert define_schedule("q", at=WHEN, jitter="default").jitter == timedelta(0)


def test_a_backslash_before_u0000_is_text_and_not_a_nul() -> None:
    assert define_schedule("q", every=1, payload={"text": "\\u0000"}).payload_json


HUGE = 10**5000  # more digits than Python writes


@pytest.mark.parametrize(
    "field", ["every", "max_runs", "priority", "jitter", "max_age", "backoff", "max_attempts", "overlap"]
)
def test_a_huge_number_is_refused_like_any_other(field: str) -> None:
    options: dict[str, Any] = {"every": 5, field: HUGE}
    with pytest.raises(InvalidInputError) as raised:
        define_schedule("q", **options)
    assert raised.value.field == field
    assert len(str(raised.value)) < 300


# Edits


def schedule_of(**options: Any) -> Schedule:
    """As the database would have it."""
    definition = define_schedule("queue", **options)
    return Schedule(
        id="cron_x",
        workspace_id="ws",
        name="name",
        queue_name="queue",
        payload={"n": 1},
        interval=definition.interval,
        anchor_at=definition.anchor(WHEN),
        jitter=definition.jitter,
        jitter_ratio=definition.jitter_ratio,
        priority=definition.priority,
        starts_at=definition.starts_at,
        ends_at=definition.ends_at,
        max_runs=definition.max_runs,
        sink=definition.sink,
        delivery=definition.delivery,
        overlap=definition.overlap,
        max_attempts=definition.max_attempts,
        max_age=definition.max_age,
        backoff=definition.backoff,
        catch_up=definition.catch_up,
        misfire_grace=definition.misfire_grace,
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
        created_at=WHEN,
        updated_at=WHEN,
    )


def changed(schedule: Schedule, **changes: Any) -> Any:
    return redefine_schedule(schedule, cast("ScheduleChanges", changes))


def test_what_an_edit_does_not_name_stays() -> None:
    bounds: dict[str, Any] = {"starts_at": WHEN, "ends_at": WHEN + HOUR, "max_runs": 9}
    schedule = schedule_of(every=10, jitter=0.2, priority="high", **bounds)
    definition = changed(schedule, payload={"n": 2})
    assert (definition.workspace_id, definition.name, definition.queue_name) == ("ws", "name", "queue")
    assert (definition.interval, definition.jitter_ratio, definition.priority) == (timedelta(seconds=10), 0.2, "high")
    assert {name: getattr(definition, name) for name in bounds} == bounds
    assert definition.payload_json == '{"n":2}'


def test_a_ratio_of_jitter_follows_the_interval_and_a_time_does_not() -> None:
    assert changed(schedule_of(every=10, jitter=0.2), every=20).jitter == timedelta(seconds=4)
    assert changed(schedule_of(every=10, jitter=timedelta(seconds=1)), every=20).jitter == timedelta(seconds=1)
    assert changed(schedule_of(every=10, jitter=None), every=20).jitter == timedelta(0)


def test_a_bound_can_be_taken_away() -> None:
    schedule = schedule_of(every=10, starts_at=WHEN, ends_at=WHEN, max_runs=1)
    definition = changed(schedule, starts_at=None, ends_at=None, max_runs=None)
    assert (definition.starts_at, definition.ends_at, definition.max_runs) == (None, None, None)


def test_an_interval_and_a_time_replace_each_other() -> None:
    interval = schedule_of(every=10, jitter=0.2, ends_at=WHEN, max_runs=3)
    once = changed(interval, at=WHEN + HOUR)
    assert (once.at, once.interval, once.jitter, once.ends_at, once.max_runs) == (
        WHEN + HOUR,
        None,
        timedelta(0),
        None,
        None,
    )
    again = changed(schedule_of(at=WHEN), every=10, max_runs=5)
    assert (again.at, again.interval, again.max_runs) == (None, timedelta(seconds=10), 5)


@pytest.mark.parametrize("field", ["name", "workspace_id", "id", "enabled", "interval", "jitter_cap", "zone", "nmae"])
def test_what_an_edit_can_not_change_is_named(field: str) -> None:
    with pytest.raises(InvalidInputError, match="can't be changed") as caught:
        changed(schedule_of(every=10), **{field: 7})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"every": 0}, "every"),
        ({"every": None}, "every"),
        ({"every": 10, "at": WHEN}, "every"),
        ({"at": "tomorrow"}, "at"),
        ({"at": WHEN, "max_runs": 3}, "max_runs"),
        ({"at": WHEN, "starts_at": WHEN}, "starts_at"),
        ({"at": WHEN, "jitter": 0.1}, "jitter"),
        ({"jitter": 0.6}, "jitter"),
        ({"jitter": timedelta(seconds=6)}, "jitter"),
        ({"every": 3}, "jitter"),  # the jitter that it has, 2 s, is more than half of that
        ({"starts_at": WHEN + 2 * HOUR}, "ends_at"),
        ({"ends_at": WHEN - HOUR}, "ends_at"),
        ({"max_runs": 0}, "max_runs"),
        ({"priority": None}, "priority"),
        ({"queue_name": ""}, "queue_name"),
        ({"payload": object()}, "payload"),
    ],
)
def test_bad_input_of_an_edit_names_its_field(changes: dict[str, Any], field: str) -> None:
    schedule = schedule_of(every=10, jitter=timedelta(seconds=2), starts_at=WHEN, ends_at=WHEN + HOUR)
    with pytest.raises(InvalidInputError) as caught:
        changed(schedule, **changes)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"at": None}, "every"),
        ({"at": WHEN, "every": 5}, "every"),
        ({"max_runs": 3}, "max_runs"),
        ({"ends_at": WHEN}, "ends_at"),
        ({"jitter": 0.1}, "jitter"),
        ({"every": 5, "jitter": 7}, "jitter"),
    ],
)
def test_bad_input_of_an_edit_of_a_one_off_names_its_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        changed(schedule_of(at=WHEN), **changes)
    assert caught.value.field == field


def test_what_an_edit_of_a_calendar_does_not_name_stays() -> None:
    bounds: dict[str, Any] = {"starts_at": WHEN, "ends_at": WHEN + HOUR, "max_runs": 9}
    calendar: dict[str, Any] = {"timezone": "Europe/Berlin", "dst_gap": "skip", "dst_fold": "both", "owner": "billing"}
    schedule = schedule_of(cron="0 9 * * *", jitter=timedelta(seconds=3), **bounds, **calendar)
    for changes in ({"payload": {"n": 2}}, {"cron": "0 10 * * *"}, {"owner": "reports"}):
        definition = changed(schedule, **changes)
        assert {name: getattr(definition, name) for name in bounds} == bounds
        assert {name: getattr(definition, name) for name in calendar} == calendar | (
            changes if "owner" in changes else {}
        )
        assert definition.cron == changes.get("cron", "0 9 * * *")
        assert definition.jitter == timedelta(seconds=3)


def test_a_zone_and_its_options_can_be_taken_away() -> None:
    schedule = schedule_of(cron="0 9 * * *", timezone="Europe/Berlin", dst_gap="skip", dst_fold="both", owner="billing")
    definition = changed(schedule, timezone=None, dst_gap=None, dst_fold=None, owner=None)
    assert (definition.timezone, definition.zone, definition.owner) == (None, None, None)
    assert (definition.dst_gap, definition.dst_fold) == ("fire", "first")


def test_a_calendar_and_the_other_rules_replace_each_other() -> None:
    bounds: dict[str, Any] = {"starts_at": WHEN, "ends_at": WHEN + HOUR, "max_runs": 9}
    calendar = schedule_of(cron="0 9 * * *", timezone="Europe/Berlin", jitter=timedelta(seconds=3), **bounds)
    interval = changed(calendar, every=60)
    assert (interval.cron, interval.timezone, interval.zone, interval.dst_gap, interval.dst_fold) == (None,) * 5
    assert (interval.jitter_ratio, {name: getattr(interval, name) for name in bounds}) == (0.1, bounds)
    once = changed(calendar, at=WHEN)
    assert (once.at, once.cron, once.zone, once.jitter, once.max_runs) == (WHEN, None, None, timedelta(0), None)
    back = changed(schedule_of(every=60, jitter=0.2, **bounds), cron="0 9 * * *", timezone="Asia/Kathmandu")
    assert (back.interval, back.jitter, back.jitter_ratio, back.zone) == (None, timedelta(0), None, "Asia/Kathmandu")
    assert {name: getattr(back, name) for name in bounds} == bounds
    from_once = changed(schedule_of(at=WHEN), cron="0 9 * * *")
    assert (from_once.at, from_once.cron, from_once.timezone) == (None, "0 9 * * *", None)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"cron": None}, "every"),
        ({"cron": "0 9 * * *", "every": 60}, "every"),
        ({"cron": "0 9 * * *", "at": WHEN}, "every"),
        ({"cron": "0 99 * * *"}, "cron"),
        ({"cron": "* * * * * *"}, "jitter"),  # the jitter that it has, 3 s, would reach the next
        ({"timezone": "Mars/Olympus"}, "timezone"),
        ({"every": 60, "timezone": "UTC"}, "timezone"),
        ({"at": WHEN, "dst_gap": "skip"}, "dst_gap"),
        ({"dst_gap": "both"}, "dst_gap"),
        ({"dst_fold": "skip"}, "dst_fold"),
        ({"jitter": 0.1}, "jitter"),
        ({"owner": ""}, "owner"),
    ],
)
def test_bad_input_of_an_edit_of_a_calendar_names_its_field(changes: dict[str, Any], field: str) -> None:
    schedule = schedule_of(cron="0 9 * * *", timezone="Europe/Berlin", jitter=timedelta(seconds=3))
    with pytest.raises(InvalidInputError) as caught:
        changed(schedule, **changes)
    assert caught.value.field == field


@pytest.mark.parametrize("field", ["timezone", "dst_gap", "dst_fold"])
@pytest.mark.parametrize("rule", [{"every": 60}, {"at": WHEN}], ids=["every", "at"])
def test_an_edit_of_another_rule_can_not_have_a_calendars_options(rule: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        changed(schedule_of(**rule), **{field: {"timezone": "UTC", "dst_gap": "skip"}.get(field, "both")})
    assert caught.value.field == field


def test_every_priority_is_accepted() -> None:
    assert [define_schedule("q", every=5, priority=name).priority for name in PRIORITIES] == list(PRIORITIES)
