"""Handlers: how they are declared, what they get, how long a failure pauses, and plain functions in threads."""

import asyncio
import contextvars
import gc
import json
import math
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial, wraps
from typing import TYPE_CHECKING, Annotated, Any

import pytest
from pydantic import BaseModel, ConfigDict, RootModel

from cron_ticks.errors import InvalidInputError
from cron_ticks.settings import Settings
from token_queue import Backoff, Message, QueueManager, RejectMessage
from token_queue.handlers import (
    MOST_ATTEMPTS,
    MOST_HANDLERS,
    MOST_TOKENS,
    Handlers,
    QueueHandler,
    declared_model,
    in_thread,
)
from token_queue.message import RawMessage

if TYPE_CHECKING:
    from decimal import Decimal as OnlyForTypeCheckers

MESSAGE: Message[Any] = Message("msg_1", "queue", "ws", {"number": 7, "lines": [{"name": "a"}]}, {"h": 1}, 3)
WAIT_SECONDS = 60.0


class Line(BaseModel):
    name: str


class Order(BaseModel):
    number: int
    lines: list[Line] = []


class Names(RootModel[list[str]]):
    pass


async def handle(_: Message) -> None: ...


def declared(function: Callable[..., Any] = handle, settings: Settings | None = None, **options: Any) -> QueueHandler:
    """The only handler of a manager that was never opened."""
    manager = QueueManager(settings=settings)
    assert manager.handler("queue", **options)(function) is function
    [handler] = manager._handlers.all()
    return handler


# --- Declaring


def test_what_a_handler_leaves_out_comes_from_the_settings() -> None:
    settings = Settings.load(
        message_concurrency=3,
        message_timeout_seconds=1.5,
        message_max_attempts=7,
        message_retention_seconds=60,
        message_tokens_per_pair=2,
    )
    options = declared(settings=settings).options
    assert options.concurrency == 3
    assert options.timeout == timedelta(seconds=1.5)
    assert options.max_attempts == 7
    assert options.retention == timedelta(minutes=1)
    assert options.tokens_per_pair == 2
    assert options.backoff == Backoff()


def test_without_a_setting_a_handler_has_no_timeout() -> None:
    assert declared().options.timeout is None


@pytest.mark.parametrize(
    ("option", "value", "kept"),
    [
        ("concurrency", 1, 1),
        ("concurrency", MOST_HANDLERS, MOST_HANDLERS),
        ("timeout", 0.5, timedelta(milliseconds=500)),
        ("timeout", timedelta(days=3650), timedelta(days=3650)),
        ("max_attempts", 1, 1),
        ("max_attempts", MOST_ATTEMPTS, MOST_ATTEMPTS),
        ("backoff", Backoff(first=5), Backoff(first=5)),
        ("retention", 3600, timedelta(hours=1)),
        ("retention", timedelta(days=1), timedelta(days=1)),
        ("tokens_per_pair", MOST_TOKENS, MOST_TOKENS),
    ],
)
def test_an_option_is_the_handlers_own_and_changes_no_other(option: str, value: Any, kept: Any) -> None:
    chosen = declared(handle, **{option: value}).options
    assert chosen == replace(declared().options, **{option: kept})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(
            (option, value)
            for option in ("concurrency", "max_attempts", "tokens_per_pair")
            for value in (0, -1, 1.0, "1", True, [1])
        ),
        ("concurrency", MOST_HANDLERS + 1),
        ("max_attempts", MOST_ATTEMPTS + 1),
        ("tokens_per_pair", MOST_TOKENS + 1),
        *(
            (option, value)
            for option in ("timeout", "retention")
            for value in (
                *(0, -1, -0.5, math.nan, math.inf, 1e300, 10**400, True, "60", [60]),
                *(timedelta(0), timedelta(seconds=-1), timedelta(days=3650, microseconds=1), timedelta.max),
            )
        ),
        ("backoff", 5),
        ("backoff", (1, 2, 300)),
        ("backoff", "fast"),
        ("model", dict),
        ("model", "Order"),
        ("model", 7),
        ("model", Order(number=1)),
        ("model", Message),
    ],
)
def test_a_bad_option_is_named(option: str, value: object) -> None:
    manager = QueueManager()
    with pytest.raises(InvalidInputError) as caught:
        manager.handler("queue", **{option: value})(handle)  # type: ignore[arg-type]
    assert caught.value.field == option
    assert manager._handlers.queues() == []


@pytest.mark.parametrize("option", ["timeout", "retention"])
def test_less_than_a_microsecond_is_no_duration(option: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"^{option}: "):
        QueueManager().handler("queue", **{option: 1e-7})(handle)  # type: ignore[arg-type]


def test_an_option_that_does_not_exist_is_a_mistake_in_the_code() -> None:
    with pytest.raises(TypeError, match="concurency"):
        Handlers(Settings()).register("queue", handle, concurency=5)
    with pytest.raises(TypeError, match="concurency"):
        QueueManager().handler("queue", concurency=5)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["", " ", " padded", "nul\0", "line\nbreak", "x" * 201, None, 7])
def test_a_queue_has_a_name(name: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^queue_name: "):
        QueueManager().handler(name)(handle)


@pytest.mark.parametrize("function", [None, "handle", 7, Message("1", "q", None, 1, {}, 1)])
def test_a_handler_is_a_function(function: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^handler: "):
        QueueManager().handler("queue")(function)


def test_a_queue_has_one_handler() -> None:
    manager = QueueManager()
    manager.handler("queue", concurrency=2)(handle)
    for function in (handle, lambda _: None):
        with pytest.raises(InvalidInputError, match="'queue' has a handler already"):
            manager.handler("queue")(function)
    manager.handler("other")(handle)
    assert manager._handlers.queues() == ["queue", "other"]
    assert [handler.queue_name for handler in manager._handlers.all()] == ["queue", "other"]
    assert manager._handlers["queue"].options.concurrency == 2
    with pytest.raises(KeyError):
        manager._handlers["missing"]


def test_a_refused_declaration_leaves_the_queue_free() -> None:
    manager = QueueManager()
    with pytest.raises(InvalidInputError):
        manager.handler("queue", concurrency=0)(handle)
    manager.handler("queue")(handle)
    assert manager._handlers.queues() == ["queue"]


# --- Which functions are asynchronous


class Asynchronous:
    async def __call__(self, _: Message[Order]) -> None:
        assert threading.current_thread() is threading.main_thread()

    async def method(self, _: Message) -> None:
        assert threading.current_thread() is threading.main_thread()

    @staticmethod
    async def without_self(_: Message) -> None:
        assert threading.current_thread() is threading.main_thread()


class Plain:
    def __call__(self, _: Message) -> None:
        assert threading.current_thread() is not threading.main_thread()


async def with_store(_store: object, _: Message) -> None:
    assert threading.current_thread() is threading.main_thread()


def plain(_: Message) -> None:
    assert threading.current_thread() is not threading.main_thread()


@pytest.mark.parametrize(
    "function",
    [
        Asynchronous(),
        Asynchronous().method,
        Asynchronous.without_self,
        partial(with_store, None),
        partial(partial(with_store), None),
        partial(Asynchronous()),
        Plain(),
        plain,
        partial(plain),
        partial(Plain()),
        lambda message: [plain(message)],  # type: ignore[func-returns-value]
    ],
)
async def test_what_is_asynchronous_runs_here_and_what_is_not_in_a_thread(function: Callable[..., Any]) -> None:
    await declared(function).run(MESSAGE)


async def asynchronous_generator(_: Message) -> AsyncIterator[int]:
    yield 1


def generator(_: Message) -> Iterator[int]:
    yield 1


async def test_a_coroutine_that_nobody_awaits_is_no_success() -> None:
    ran = False
    made: list[Coroutine[Any, Any, None]] = []

    async def work(_: Message) -> None:
        nonlocal ran
        ran = True

    def plain_function(message: Message) -> Coroutine[Any, Any, None]:
        made.append(work(message))
        return made[0]

    failed = False
    try:
        await declared(plain_function).run(MESSAGE)
    except Exception:  # noqa: BLE001 - any error is a failed attempt
        failed = True
    finally:
        made[0].close()
    assert ran or failed


@pytest.mark.parametrize("function", [asynchronous_generator, generator])
async def test_a_generator_is_no_handler(function: Callable[..., Any]) -> None:
    with pytest.raises((InvalidInputError, TypeError)):
        await declared(function).run(MESSAGE)


# --- Payload models


def of_a_model(message: Message[Order]) -> None: ...
def of_a_model_in_quotes(message: "Message[Order]") -> None: ...
def of_a_model_annotated(message: Annotated[Message[Order], "noted"]) -> None: ...
def of_a_model_and_more(message: Message[Order], _more: int = 1) -> None: ...
async def of_a_model_async(message: Message[Order]) -> None: ...
def of_anything(message: Message) -> None: ...
def of_a_dict(message: Message[dict[str, int]]) -> None: ...
def of_any(message: Message[Any]) -> None: ...
def of_the_model_alone(message: Order) -> None: ...
def of_a_list_of_messages(message: list[Message[Order]]) -> None: ...
def of_nothing() -> None: ...
def without_annotations(message):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    ...


def in_the_second_place(_message: Message, _other: Message[Order]) -> None: ...


def known_to_type_checkers(message: "Message[OnlyForTypeCheckers]") -> None: ...
def beside_what_type_checkers_know(message: Message[Order], _other: "OnlyForTypeCheckers | None" = None) -> None: ...


def decorated(function: Callable[[Message[Order]], None]) -> Callable[..., None]:
    @wraps(function)
    def inner(*arguments: Any) -> None:
        function(*arguments)

    return inner


class Methods:
    def method(self, message: Message[Order]) -> None: ...

    @classmethod
    def of_the_class(cls, message: Message[Order]) -> None: ...

    @staticmethod
    def without_self(message: Message[Order]) -> None: ...


class Untyped:
    def __call__(self, message):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        ...


@pytest.mark.parametrize(
    "function",
    [
        of_a_model,
        of_a_model_in_quotes,
        of_a_model_annotated,
        of_a_model_and_more,
        of_a_model_async,
        decorated(of_a_model),
        Methods().method,
        Methods.of_the_class,
        Methods.without_self,
        Asynchronous(),
    ],
)
def test_the_annotation_declares_the_model(function: Callable[..., Any]) -> None:
    assert declared_model(function) is Order
    assert declared(function).model is Order


@pytest.mark.parametrize(
    "function",
    [
        of_anything,
        of_a_dict,
        of_any,
        of_the_model_alone,
        of_a_list_of_messages,
        of_nothing,
        without_annotations,
        in_the_second_place,
        known_to_type_checkers,
        Untyped(),
        Plain(),
        lambda _: None,
        partial(of_anything),
        print,
        "text".join,
    ],
)
def test_other_functions_declare_none(function: Callable[..., Any]) -> None:
    assert declared_model(function) is None


@pytest.mark.parametrize(
    "function", [partial(of_a_model), partial(of_a_model_and_more, _more=2), partial(Methods.method, Methods())]
)
def test_a_partial_declares_what_its_function_declares(function: Callable[..., Any]) -> None:
    assert declared_model(function) is Order


def test_an_annotation_elsewhere_that_nobody_knows_does_not_hide_the_model() -> None:
    assert declared_model(beside_what_type_checkers_know) is Order


@pytest.mark.parametrize("annotation", ["asyncio.NoSuchName", "not an expression", "Message[Order"])
def test_an_annotation_that_is_broken_declares_none(annotation: str) -> None:

    def function(message: Any) -> None: ...

    function.__annotations__["message"] = annotation
    assert declared_model(function) is None


def test_a_model_that_is_given_goes_before_the_annotation() -> None:
    assert declared(of_a_model, model=Line).model is Line
    assert declared(of_anything, model=Order).model is Order


def raw(payload: object) -> RawMessage:
    return RawMessage(MESSAGE.id, MESSAGE.queue_name, MESSAGE.workspace_id, json.dumps(payload), "{}", 1, 0)


def test_a_fitting_payload_becomes_the_model() -> None:
    prepared = declared(of_a_model).prepared(raw({"number": 7, "lines": [{"name": "a"}]}))
    assert prepared.payload == Order(number=7, lines=[Line(name="a")])
    assert declared(of_anything, model=Names).prepared(raw(["a"])).payload == Names(["a"])


def test_a_strict_model_reads_what_the_same_model_sent() -> None:
    class Appointment(BaseModel):
        model_config = ConfigDict(strict=True)
        at: datetime

    sent = Appointment(at=datetime(2026, 3, 1, tzinfo=UTC))
    assert declared(of_anything, model=Appointment).prepared(raw(sent.model_dump(mode="json"))).payload == sent


def test_without_a_model_the_message_is_as_it_came() -> None:
    message = RawMessage("msg_1", "queue", "ws", '{"deep": [1, null]}', '{"trace": "x"}', 3, 1)
    expected = Message("msg_1", "queue", "ws", {"deep": [1, None]}, {"trace": "x"}, 3)
    assert declared(of_anything).prepared(message) == expected


def test_a_payload_that_nobody_can_read_is_rejected() -> None:
    deep = "[" * 100_000 + "]" * 100_000
    with pytest.raises(RejectMessage, match="can't be read"):
        declared(of_anything).prepared(replace(raw({}), payload_json=deep))


@pytest.mark.parametrize(
    ("payload", "reasons"),
    [
        ({}, ["number: Field required"]),
        ({"number": "x"}, ["number: Input should be a valid integer"]),
        ({"number": 1, "lines": [{"name": "a"}, {}]}, ["lines.1.name: Field required"]),
        ({"lines": 1}, ["number: Field required", "lines: Input should be a valid array"]),
        ([], ["payload: Input should be an object"]),
        (None, ["payload: Input should be an object"]),
    ],
)
def test_a_payload_that_does_not_fit_is_rejected_with_its_fields(payload: Any, reasons: list[str]) -> None:
    with pytest.raises(RejectMessage) as caught:
        declared(of_a_model).prepared(raw(payload))
    reason = str(caught.value)
    assert reason.startswith("the payload doesn't fit Order: ")
    for part in reasons:
        assert part in reason


def test_a_reason_names_a_few_fields_of_many() -> None:
    with pytest.raises(RejectMessage) as caught:
        declared(of_a_model).prepared(raw({"number": 1, "lines": [{}] * 10_000}))
    assert str(caught.value).count("Field required") == 5


def test_an_extra_field_is_rejected_if_the_model_forbids_it() -> None:
    class Strict(BaseModel):
        model_config = ConfigDict(extra="forbid")

    with pytest.raises(RejectMessage, match="surprise: Extra inputs"):
        declared(of_anything, model=Strict).prepared(raw({"surprise": 1}))


# --- Backoff


def middle() -> float:
    return 0.5


def test_pauses_double_up_to_five_minutes() -> None:
    pauses = [Backoff().seconds(attempt, middle) for attempt in range(1, 12)]
    assert pauses == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]


def test_pauses_grow_as_they_are_told_to() -> None:
    backoff = Backoff(first=0.5, factor=3, longest=10)
    assert [backoff.seconds(attempt, middle) for attempt in range(1, 6)] == [0.5, 1.5, 4.5, 10, 10]
    steady = Backoff(first=7, factor=1, longest=7)
    assert {steady.seconds(attempt, middle) for attempt in range(1, 100)} == {7}


@pytest.mark.parametrize(("draw", "factor"), [(0.0, 0.8), (0.5, 1.0), (1.0, 1.2)])
def test_a_pause_is_up_to_a_fifth_shorter_or_longer(draw: float, factor: float) -> None:
    for attempt, pause in ((1, 1), (3, 4), (50, 300)):
        assert Backoff().seconds(attempt, lambda: draw) == pytest.approx(pause * factor)


def test_pauses_of_failures_at_once_differ() -> None:
    pauses = {Backoff().seconds(5) for _ in range(50)}
    assert len(pauses) > 1
    assert min(pauses) >= 16 * 0.8
    assert max(pauses) <= 16 * 1.2


@pytest.mark.parametrize("backoff", [Backoff(), Backoff(1, 2, 300), Backoff(0.1, 604_800.0), Backoff(0.5, 3, 300)])
def test_no_attempt_is_too_many(backoff: Backoff) -> None:
    assert backoff.seconds(5000, middle) == 300


def test_no_pause_at_first_is_no_pause_at_all() -> None:
    assert [Backoff(first=0).seconds(attempt, middle) for attempt in (1, 2, 10)] == [0, 0, 0]


def test_no_pause_stays_none_however_often_it_fails() -> None:
    assert Backoff(first=0, factor=10.0).seconds(400, middle) == 0


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("first", {"first": -1}),
        ("first", {"first": math.nan}),
        ("first", {"first": math.inf}),
        ("first", {"first": True}),
        ("first", {"first": "1"}),
        ("first", {"first": None}),
        ("first", {"first": 604_801, "longest": 604_801}),
        ("factor", {"factor": 0.99}),
        ("factor", {"factor": -2}),
        ("factor", {"factor": math.nan}),
        ("factor", {"factor": math.inf}),
        ("factor", {"factor": False}),
        ("factor", {"factor": timedelta(seconds=2)}),
        ("longest", {"longest": 0.5}),
        ("longest", {"first": 400}),
        ("longest", {"longest": 604_801}),
        ("longest", {"longest": math.inf}),
        ("longest", {"longest": math.nan}),
        ("longest", {"longest": "300"}),
    ],
)
def test_a_backoff_that_makes_no_sense_is_refused(field: str, values: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError) as caught:
        Backoff(**values)
    assert caught.value.field == f"backoff.{field}"


# --- Plain functions in threads


def thread_of(message: Message[Any]) -> threading.Thread:
    [thread] = [thread for thread in threading.enumerate() if thread.name == f"handler {message.id}"]
    return thread


async def test_a_plain_function_gets_its_message_in_a_thread_that_holds_no_process() -> None:
    seen: list[tuple[object, threading.Thread]] = []
    await in_thread(lambda message: seen.append((message, threading.current_thread())))(MESSAGE)
    [(message, thread)] = seen
    assert message is MESSAGE
    assert thread is not threading.main_thread()
    assert thread.daemon


async def test_the_loop_goes_on_while_a_thread_works() -> None:
    """Two threads wait for each other, and for the loop."""
    meeting, gate = threading.Barrier(3, timeout=WAIT_SECONDS), threading.Event()

    def work(_: Message) -> None:
        meeting.wait()
        assert gate.wait(WAIT_SECONDS)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(in_thread(work)(MESSAGE))  # type: ignore[arg-type]
        tasks.create_task(in_thread(work)(MESSAGE))  # type: ignore[arg-type]
        await asyncio.to_thread(meeting.wait)
        gate.set()


async def test_more_threads_than_any_pool_has_run_at_once() -> None:
    meeting = threading.Barrier(100, timeout=WAIT_SECONDS)
    await asyncio.gather(*(in_thread(lambda _: meeting.wait())(MESSAGE) for _ in range(100)))


@pytest.mark.parametrize("error", [ValueError("bad"), RejectMessage("never"), TimeoutError(), StopAsyncIteration()])
async def test_an_error_comes_back_as_itself(error: Exception) -> None:
    def work(_: Message) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        await in_thread(work)(MESSAGE)
    assert caught.value is error


@pytest.mark.parametrize("error", [StopIteration(5), SystemExit(3), SystemExit("bye")])
async def test_what_would_end_the_loop_is_an_error_with_its_name(error: BaseException) -> None:
    def work(_: Message) -> None:
        raise error

    with pytest.raises(RuntimeError) as caught:
        await in_thread(work)(MESSAGE)
    assert str(caught.value) == repr(error)


async def test_a_cancellation_inside_is_an_error_outside() -> None:
    """As from a plain function with a loop of its own: nobody has cancelled the one who waits."""

    def work(_: Message) -> None:
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="CancelledError"):
        await in_thread(work)(MESSAGE)


async def test_context_variables_are_seen_and_stay_as_they_are() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    variable.set("outside")
    seen: list[str] = []

    def work(_: Message) -> None:
        seen.append(variable.get())
        variable.set("inside")

    await in_thread(work)(MESSAGE)
    await in_thread(work)(MESSAGE)
    assert seen == ["outside", "outside"]
    assert variable.get() == "outside"


@pytest.mark.parametrize("error", [None, ValueError("too late"), SystemExit(1)])
async def test_a_thread_whose_message_was_cancelled_goes_on_unheard(error: BaseException | None) -> None:
    begun, gate, ended = threading.Event(), threading.Event(), threading.Event()

    def work(_: Message) -> None:
        begun.set()
        assert gate.wait(WAIT_SECONDS)
        ended.set()
        if error is not None:
            raise error

    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    task = asyncio.ensure_future(in_thread(work)(MESSAGE))
    assert await asyncio.to_thread(begun.wait, WAIT_SECONDS)
    thread = thread_of(MESSAGE)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert thread.is_alive()
    assert not ended.is_set()
    gate.set()
    await asyncio.to_thread(thread.join, WAIT_SECONDS)
    assert ended.is_set()
    del task
    gc.collect()
    await asyncio.sleep(0)  # what the thread told the loop is heard now
    assert complaints == []


def test_a_thread_that_outlives_its_loop_ends_without_a_word() -> None:
    """A complaint in a thread is a warning, and warnings are errors here."""
    begun, gate = threading.Event(), threading.Event()

    def work(_: Message) -> None:
        begun.set()
        assert gate.wait(WAIT_SECONDS)

    async def start() -> threading.Thread:
        task = asyncio.ensure_future(in_thread(work)(MESSAGE))
        assert await asyncio.to_thread(begun.wait, WAIT_SECONDS)
        task.cancel()
        return thread_of(MESSAGE)

    thread = asyncio.run(start())
    assert thread.is_alive()
    gate.set()
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()
