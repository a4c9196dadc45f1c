"""Identifiers."""

from collections.abc import Callable

import pytest
from ulid import ULID

from cron_ticks.ids import new_message_id, new_schedule_id, new_tick_id, new_ticker_id


@pytest.mark.parametrize(
    ("make", "prefix"),
    [(new_schedule_id, "cron_"), (new_tick_id, "tick_"), (new_message_id, "msg_"), (new_ticker_id, "ticker_")],
)
def test_an_id_is_a_prefix_and_a_ulid(make: Callable[[], str], prefix: str) -> None:
    first, second = make(), make()
    assert first != second
    assert first.startswith(prefix)
    assert str(ULID.from_str(first.removeprefix(prefix))) == first.removeprefix(prefix)
