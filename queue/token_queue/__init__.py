"""A message queue on PostgreSQL, and the manager through which an application uses it and the cron."""

from cron_ticks.audit_results import Audit, Statistics
from cron_ticks.backfills import Backfill
from cron_ticks.checks import Priority
from cron_ticks.events import Event
from cron_ticks.runs import Run
from token_queue.handlers import Backoff, RejectMessage
from token_queue.message import DeadMessage, DeletedWorkspace, Message, OutgoingMessage, QueueState, Sent, SentMany
from token_queue.queue_manager import QueueManager
from token_queue.run_calls import CleanedUp

__all__ = [
    "Audit",
    "Backfill",
    "Backoff",
    "CleanedUp",
    "DeadMessage",
    "DeletedWorkspace",
    "Event",
    "Message",
    "OutgoingMessage",
    "Priority",
    "QueueManager",
    "QueueState",
    "RejectMessage",
    "Run",
    "Sent",
    "SentMany",
    "Statistics",
]
