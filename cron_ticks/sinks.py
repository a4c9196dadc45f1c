"""Where a tick's payload goes: the only thing that the cron core knows of a queue."""

from typing import Protocol


class SameDatabaseSink(Protocol):
    """A queue in the same database: its part of the firing statement.

    `insert_from_fired` is one INSERT that reads the rows of `fired` (all columns of `cron_ticks`, and `message_id`) and
    the row of `pass` (`ticker_id`, `instant`), so that the message, the run and the end of the tick commit together.
    """

    insert_from_fired: str
