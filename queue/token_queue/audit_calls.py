"""Calls of a QueueManager: whether everything happened that should have, and how well."""

from token_queue.opened import OpenedManager


class AuditCalls(OpenedManager):
    """Whether everything happened that should have, and how well."""
