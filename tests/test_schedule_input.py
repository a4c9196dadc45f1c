"""What an application may ask for; everything else is refused with the field's name."""

from datetime import timedelta
from typing import Any

import pytest

from cron_ticks.errors import InvalidInputError
from cron_ticks.schedules import LARGEST_PAYLOAD_BYTES, define_schedule

GOOD: dict[str, Any] = {"queue_name": "memo.batch_check", "every": 30}


def test_the_name_defaults_to_the_queues() -> None:
    definition = define_schedule(**GOOD)
    assert definition.name == "memo.batch_check"
    assert definition.interval == timedelta(seconds=30)
    assert definition.payload_json == "{}"


@pytest.mark.parametrize("every", [1, 1.5, 0.1 + 0.9, timedelta(minutes=1), 604800])
def test_intervals_from_one_second_up(every: float | timedelta) -> None:
    assert define_schedule("q", every=every).interval_us >= 1_000_000


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
        ("payload", {"when": object()}),
        ("payload", {"n": float("nan")}),
        ("payload", {"text": "a\0b"}),
        ("payload", {"text": "\ud800"}),
        ("payload", "x" * (LARGEST_PAYLOAD_BYTES + 1)),
    ],
)
def test_bad_input_names_its_field(field: str, value: object) -> None:
    with pytest.raises(InvalidInputError) as caught:
        define_schedule(**GOOD | {field: value})
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")


def test_a_backslash_before_u0000_is_text_and_not_a_nul() -> None:
    assert define_schedule("q", every=1, payload={"text": "\\u0000"}).payload_json
