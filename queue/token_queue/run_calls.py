"""Calls of a QueueManager: what became of occurrences and of their messages, and how long that is kept."""

from token_queue.opened import OpenedManager


class RunCalls(OpenedManager):
    """What became of occurrences and of their messages, and how long that is kept."""
