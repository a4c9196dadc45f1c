"""A message queue on PostgreSQL, and the manager through which an application uses it and the cron."""

from cron_ticks.checks import Priority
from token_queue.handlers import Backoff, RejectMessage
from token_queue.message import DeadMessage, DeletedWorkspace, Message, OutgoingMessage, QueueState, Sent, SentMany
from token_queue.queue_manager import QueueManager
from token_queue.run_calls import CleanedUp

__all__ = [
    "Backoff",
    "CleanedUp",
    "DeadMessage",
    "DeletedWorkspace",
    "Message",
    "OutgoingMessage",
    "Priority",
    "QueueManager",
    "QueueState",
    "RejectMessage",
    "Sent",
    "SentMany",
]
