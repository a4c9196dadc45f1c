"""A message queue on PostgreSQL, and the manager through which an application uses it and the cron."""

from token_queue.message import Message
from token_queue.queue_manager import QueueManager

__all__ = ["Message", "QueueManager"]
