"""Calls of a QueueManager: making up for occurrences of the past."""

from token_queue.opened import OpenedManager


class BackfillCalls(OpenedManager):
    """Making up for occurrences of the past."""
