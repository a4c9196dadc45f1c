"""Which function handles which queue in this process."""

import inspect
from collections.abc import Awaitable, Callable
from typing import TypeVar

from cron_ticks.errors import InvalidInputError
from cron_ticks.schedules import check_name
from token_queue.message import Message

Handler = Callable[[Message], Awaitable[None]]
HandlerT = TypeVar("HandlerT", bound=Handler)


class Handlers:
    """Handlers by queue; a queue has one."""

    def __init__(self) -> None:
        self._by_queue: dict[str, Handler] = {}

    def register(self, queue_name: str, handler: Handler) -> None:
        """Make `handler` the one for `queue_name`."""
        check_name("queue_name", queue_name)
        if not inspect.iscoroutinefunction(handler):
            raise InvalidInputError("handler", f"{handler!r} must be declared with 'async def'")
        if queue_name in self._by_queue:
            raise InvalidInputError("queue_name", f"queue {queue_name!r} has a handler already: a queue has one")
        self._by_queue[queue_name] = handler

    def queues(self) -> list[str]:
        """The queues that this process handles."""
        return list(self._by_queue)

    async def handle(self, message: Message) -> None:
        """Run the handler of the message's queue."""
        await self._by_queue[message.queue_name](message)
