"""Identifiers: a prefix that says what it is, and a ULID.

They identify and never order: ULIDs of pods with different clocks don't sort.
"""

from ulid import ULID


def new_schedule_id() -> str:
    """`cron_<ulid>`: a schedule."""
    return f"cron_{ULID()}"


def new_tick_id() -> str:
    """`tick_<ulid>`: the token of one occurrence."""
    return f"tick_{ULID()}"


def new_message_id() -> str:
    """`msg_<ulid>`: a message. One that a tick sent has the tick's ULID, which the firing statement sees to."""
    return f"msg_{ULID()}"


def new_token_id() -> str:
    """`token_<ulid>`: the right to process one pair."""
    return f"token_{ULID()}"


def new_ticker_id() -> str:
    """`ticker_<ulid>`: one run of one worker process."""
    return f"ticker_{ULID()}"
