"""Which function handles which queue in this process, and how."""

import asyncio
import contextvars
import functools
import inspect
import json
import random
import threading
import typing
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from cron_ticks.checks import check_count, check_name
from cron_ticks.errors import InvalidInputError
from cron_ticks.settings import Settings
from token_queue.message import Message, RawMessage

AsyncHandler = Callable[[Message[Any]], Awaitable[None]]
Handler = AsyncHandler | Callable[[Message[Any]], None]
HandlerT = TypeVar("HandlerT", bound=Callable[[Message[Any]], Any])

MOST_HANDLERS = 10_000
MOST_ATTEMPTS = 1000
MOST_TOKENS = 1000
SHORTEST = timedelta(milliseconds=1)
LONGEST = timedelta(days=3650)


class RejectMessage(Exception):  # noqa: N818 - what a handler says, not what went wrong
    """Raised by a handler: this message can't succeed, so it goes to the dead letters without another try."""


@dataclass(frozen=True)
class Backoff:
    """Pauses between tries: `first`, then `factor` times as long each time, up to `longest`; all in seconds."""

    first: float = 1.0
    factor: float = 2.0
    longest: float = 300.0

    def __post_init__(self) -> None:
        for name, least in (("first", 0.0), ("factor", 1.0), ("longest", self.first)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= 7 * 86_400:
                raise InvalidInputError(f"backoff.{name}", f"must be a number from {least:g} to 604800, not {value!r}")

    def seconds(self, attempt: int, draw: Callable[[], float] = random.random) -> float:
        """The pause after this attempt, up to a fifth shorter or longer, so that failures don't come back in step."""
        try:
            pause = min(self.first * self.factor ** (attempt - 1), self.longest)
        except OverflowError:
            pause = self.longest if self.first else 0.0
        return pause * (0.8 + 0.4 * draw())


@dataclass(frozen=True)
class QueueOptions:
    """How a queue's messages are handled in this process."""

    concurrency: int
    timeout: timedelta | None
    max_attempts: int
    backoff: Backoff
    retention: timedelta
    tokens_per_pair: int

    @classmethod
    def from_settings(cls, settings: Settings) -> "QueueOptions":
        """What holds for queues whose handler says nothing else."""
        timeout = settings.message_timeout_seconds
        return cls(
            concurrency=settings.message_concurrency,
            timeout=None if timeout is None else timedelta(seconds=timeout),
            max_attempts=settings.message_max_attempts,
            backoff=Backoff(),
            retention=timedelta(seconds=settings.message_retention_seconds),
            tokens_per_pair=settings.message_tokens_per_pair,
        )


@dataclass(frozen=True)
class QueueHandler:
    """A queue's function with its options."""

    queue_name: str
    options: QueueOptions
    run: AsyncHandler
    model: type[BaseModel] | None

    def prepared(self, raw: RawMessage) -> Message[Any]:
        """The message with its payload as the handler wants it; RejectMessage if that can't be."""
        try:
            payload = json.loads(raw.payload_json) if self.model is None else self._as_model(raw.payload_json)
            headers = {} if raw.headers_json == "{}" else json.loads(raw.headers_json)
        except (ValueError, RecursionError) as error:
            raise RejectMessage(f"the message can't be read: {error}") from error
        return Message(raw.id, raw.queue_name, raw.workspace_id, payload, headers, raw.attempt)

    def _as_model(self, payload_json: str) -> BaseModel:
        assert self.model is not None  # noqa: S101 - for the type checker
        try:
            return self.model.model_validate_json(payload_json)
        except ValidationError as error:
            raise RejectMessage(f"the payload doesn't fit {self.model.__name__}: {_shortly(error)}") from error


class Handlers:
    """Handlers by queue; a queue has one."""

    def __init__(self, settings: Settings) -> None:
        self._defaults = QueueOptions.from_settings(settings)
        self._by_queue: dict[str, QueueHandler] = {}

    def register(
        self,
        queue_name: str,
        function: Callable[[Message[Any]], Any],
        *,
        model: type[BaseModel] | None = None,
        **options: Any,
    ) -> None:
        """Make `function` the one for `queue_name`; options that are None are the settings'."""
        check_name("queue_name", queue_name)
        if not callable(function):
            raise InvalidInputError("handler", f"must be a function, not {type(function).__name__}")
        if inspect.isgeneratorfunction(_called(function)) or inspect.isasyncgenfunction(_called(function)):
            raise InvalidInputError("handler", f"{function!r} is a generator function: a handler must not yield")
        if queue_name in self._by_queue:
            raise InvalidInputError("queue_name", f"queue {queue_name!r} has a handler already: a queue has one")
        chosen = {name: _check_option(name, value) for name, value in options.items() if value is not None}
        self._by_queue[queue_name] = QueueHandler(
            queue_name,
            replace(self._defaults, **chosen),
            function if _is_async(function) else in_thread(function),
            _check_model(declared_model(function) if model is None else model),
        )

    def queues(self) -> list[str]:
        """The queues that this process handles."""
        return list(self._by_queue)

    def all(self) -> list[QueueHandler]:
        """Every handler."""
        return list(self._by_queue.values())

    def __getitem__(self, queue_name: str) -> QueueHandler:
        return self._by_queue[queue_name]


def in_thread(function: Callable[[Message[Any]], Any]) -> AsyncHandler:
    """A plain function as an async one: it runs in a thread of its own.

    Nobody can stop a thread. One whose message timed out, was lost or outlived the worker's grace goes on by itself and
    its result is not used; the process doesn't wait for it.
    """

    async def run(message: Message[Any]) -> None:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        context = contextvars.copy_context()

        def tell(error: Exception | None) -> None:
            if ended.done():  # nobody waits any more
                return
            if error is None:
                ended.set_result(None)
            else:
                ended.set_exception(error)

        def work() -> None:
            error = _error_of(lambda: context.run(function, message))
            with suppress(RuntimeError):  # the loop is closed: the worker has stopped
                loop.call_soon_threadsafe(tell, error)

        threading.Thread(target=work, name=f"handler {message.id}", daemon=True).start()
        await ended

    return run


def _error_of(call: Callable[[], object]) -> Exception | None:
    """What the call raised, as something that the one who waits for it can raise."""
    try:
        result = call()
    except StopIteration as error:
        return RuntimeError(repr(error))
    except Exception as error:  # noqa: BLE001 - it belongs to the one who waits
        return error
    except BaseException as error:  # noqa: BLE001 - a thread's SystemExit must not end the process
        return RuntimeError(repr(error))
    if inspect.iscoroutine(result):
        result.close()
        return TypeError("the handler returned a coroutine: declare it with 'async def'")
    return None


def declared_model(function: Callable[..., Any]) -> type[BaseModel] | None:
    """The model in the annotation `Message[Model]` of the function's first parameter, if it has one."""
    try:
        first = next(iter(inspect.signature(function).parameters.values()), None)
        annotation = None if first is None else first.annotation
        if isinstance(annotation, str):
            annotation = eval(annotation, getattr(_called(function), "__globals__", {}))  # noqa: S307 - its own source
    except Exception:  # noqa: BLE001 - names that only type checkers know, or no signature at all
        return None
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    arguments = typing.get_args(annotation) if typing.get_origin(annotation) is Message else ()
    if arguments and isinstance(arguments[0], type) and issubclass(arguments[0], BaseModel):
        return arguments[0]
    return None


def _called(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function behind a partial, or behind an object that can be called."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function).__call__


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(_called(function))


def _check_model(model: object) -> type[BaseModel] | None:
    if model is not None and not (isinstance(model, type) and issubclass(model, BaseModel)):
        raise InvalidInputError("model", f"must be a pydantic model, not {model!r}")
    return model


def _check_option(name: str, value: Any) -> Any:
    match name:
        case "concurrency":
            return check_count(name, value, most=MOST_HANDLERS)
        case "max_attempts":
            return check_count(name, value, most=MOST_ATTEMPTS)
        case "tokens_per_pair":
            return check_count(name, value, most=MOST_TOKENS)
        case "backoff":
            if not isinstance(value, Backoff):
                raise InvalidInputError(name, f"must be a Backoff, not {type(value).__name__}")
            return value
        case "timeout" | "retention":
            return _check_duration(name, value)
    raise TypeError(f"handler() has no option {name!r}")


def _check_duration(field: str, value: object) -> timedelta:
    if isinstance(value, bool) or not isinstance(value, int | float | timedelta):
        raise InvalidInputError(field, f"must be seconds or a timedelta, not {type(value).__name__}")
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if not SHORTEST.total_seconds() <= seconds <= LONGEST.total_seconds():
        raise InvalidInputError(field, f"must be from 1 ms to {LONGEST.days} days, not {value}")
    return timedelta(seconds=seconds)


def _shortly(error: ValidationError) -> str:
    problems = [f"{'.'.join(map(str, item['loc'])) or 'payload'}: {item['msg']}" for item in error.errors()[:5]]
    return "; ".join(problems)
