"""Identifiers: a prefix that says what it is, and a ULID.

They identify and never order: ULIDs of pods with different clocks don't sort.
"""

import base64
import os
import time
from functools import lru_cache

from ulid import ULID

TO_CROCKFORD = bytes.maketrans(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", b"0123456789ABCDEFGHJKMNPQRSTVWXYZ")


def new_ulid() -> str:
    """A ULID as text. Its time is written once per millisecond: a sender of many messages needs many."""
    randomness = base64.b32encode(os.urandom(10)).translate(TO_CROCKFORD).decode()
    return _time_part(time.time_ns() // 1_000_000) + randomness


@lru_cache(maxsize=1)
def _time_part(milliseconds: int) -> str:
    return str(ULID.from_timestamp(milliseconds))[:10]


def new_schedule_id() -> str:
    """`cron_<ulid>`: a schedule."""
    return f"cron_{new_ulid()}"


def new_tick_id() -> str:
    """`tick_<ulid>`: the token of one occurrence."""
    return f"tick_{new_ulid()}"


def new_message_id() -> str:
    """`msg_<ulid>`: a message. One that a tick sent has the tick's ULID, which the firing statement sees to."""
    return f"msg_{new_ulid()}"


def new_token_id() -> str:
    """`token_<ulid>`: the right to process one pair."""
    return f"token_{new_ulid()}"


def new_ticker_id() -> str:
    """`ticker_<ulid>`: one run of one worker process."""
    return f"ticker_{new_ulid()}"
