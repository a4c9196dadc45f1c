"""Where a tick's payload goes: the only thing that the cron core knows of a queue."""

from typing import Protocol


class SameDatabaseSink(Protocol):
    """A queue in the same database: its part of the firing statement.

    `insert_from_taken` is one INSERT that reads the rows of `taken` (all columns of `cron_ticks`) and the row of
    `pass` (`ticker_id`, `instant`), so that the message and the end of the tick commit together.
    """

    insert_from_taken: str
