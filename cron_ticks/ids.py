"""Identifiers: a prefix that says what it is, and a ULID.

They identify and never order: ULIDs of pods with different clocks don't sort.
"""

import base64
import os
import time
from collections import deque
from functools import lru_cache

from ulid import ULID

TO_CROCKFORD = bytes.maketrans(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", b"0123456789ABCDEFGHJKMNPQRSTVWXYZ")


RANDOM_LETTERS = 16  # of a ULID: 80 bits

# Made in advance: asking the system for each one takes longer than all the rest.
_randomness: deque[str] = deque()
os.register_at_fork(after_in_child=_randomness.clear)


def new_ulid() -> str:
    """A ULID as text."""
    try:
        randomness = _randomness.pop()
    except IndexError:
        letters = base64.b32encode(os.urandom(10 * 256)).translate(TO_CROCKFORD).decode()
        parts = [letters[start : start + RANDOM_LETTERS] for start in range(0, len(letters), RANDOM_LETTERS)]
        randomness = parts.pop()
        _randomness.extend(parts)
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


def tick_id_beginning() -> str:
    """What precedes the random part of a tick's id, for ids that the database makes."""
    return f"tick_{_time_part(time.time_ns() // 1_000_000)}"


def new_message_id() -> str:
    """`msg_<ulid>`: a message. One that a tick sent has the tick's ULID, which the firing statement sees to."""
    return f"msg_{new_ulid()}"


def new_token_id() -> str:
    """`token_<ulid>`: the right to process one pair."""
    return f"token_{new_ulid()}"


def new_backfill_id() -> str:
    """`backfill_<ulid>`: occurrences of the past that somebody wants to have after all."""
    return f"backfill_{new_ulid()}"


def new_ticker_id() -> str:
    """`ticker_<ulid>`: one run of one worker process."""
    return f"ticker_{new_ulid()}"
