"""Calls of a QueueManager: every change of a message's or a schedule's state."""

from token_queue.opened import OpenedManager


class EventCalls(OpenedManager):
    """Every change of a message's or a schedule's state."""
