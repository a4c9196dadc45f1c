"""What an application may ask for; everything else is refused with the field's name."""

from datetime import UTC, datetime, timedelta, timezone
from typing import Any, cast

import pytest

from cron_ticks.errors import InvalidInputError
from cron_ticks.schedules import (
    LARGEST_PAYLOAD_BYTES,
    LATEST,
    LONGEST_INTERVAL,
    MOST_RUNS,
    PRIORITIES,
    Schedule,
    ScheduleChanges,
    define_schedule,
    redefine_schedule,
)

GOOD: dict[str, Any] = {"queue_name": "memo.batch_check", "every": 30}
WHEN = datetime(2026, 5, 17, 12, tzinfo=UTC)
ONCE: dict[str, Any] = {"queue_name": "memo.batch_check", "at": WHEN}
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
    ],
)
def test_bad_input_of_a_one_off_names_its_field(field: str, value: object) -> None:
    with pytest.raises(InvalidInputError) as caught:
        define_schedule(**ONCE | {field: value})
    assert caught.value.field == field


@pytest.mark.parametrize("given", [{}, {"every": 30, "at": WHEN}, {"every": None, "at": None}])
def test_a_schedule_has_either_an_interval_or_a_time(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match="every= or at=") as caught:
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


@pytest.mark.parametrize("field", ["name", "workspace_id", "id", "enabled", "interval", "jitter_cap", "cron", "nmae"])
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


def test_every_priority_is_accepted() -> None:
    assert [define_schedule("q", every=5, priority=name).priority for name in PRIORITIES] == list(PRIORITIES)
