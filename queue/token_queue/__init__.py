"""A message queue on PostgreSQL, and the manager through which an application uses it and the cron."""

from token_queue.handlers import Backoff, RejectMessage
from token_queue.message import DeadMessage, Message, OutgoingMessage, Priority, QueueState, Sent, SentMany
from token_queue.queue_manager import QueueManager

__all__ = [
    "Backoff",
    "DeadMessage",
    "Message",
    "OutgoingMessage",
    "Priority",
    "QueueManager",
    "QueueState",
    "RejectMessage",
    "Sent",
    "SentMany",
]
